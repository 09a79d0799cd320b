"""What ranks of one training have in common: who they are, what they exchange, what one machine gives each."""
