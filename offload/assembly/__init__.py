"""Ties the parts of an engine together: the only room that asks which device, how many ranks and which optimizer."""
