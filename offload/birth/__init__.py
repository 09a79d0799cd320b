"""Where the values of a model's weights come from, when nobody has them in memory: initialisers, and weights files."""
