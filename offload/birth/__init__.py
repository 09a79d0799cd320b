"""Sources of a model's weights that nobody has in memory: initialisers, and weights files."""
