"""The forecast: will a model fit a machine that is here or described, how fast will it be, and what would help."""
