"""Optimizers over tiles: rules, their choice, formats, the loss scale."""
