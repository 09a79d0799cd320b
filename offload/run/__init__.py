"""Record of a run, and its display: observers of steps, the run directory, and the page made of it."""
