"""What is kept of a run, and shown of it: observers of steps, the run directory, and the page made of it."""
