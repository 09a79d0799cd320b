"""Where bytes rest and how they move: homes, one weight cache, one gradient store."""
