"""An order of units in which any first few are spread evenly over all of them."""

_GOLDEN = 0.6180339887498949
"""Multiples of it, less their whole parts, are spread evenly whatever their number."""


def spread_rank(index: int) -> float:
    """Place of the unit in that order: the smallest comes first."""
    return index * _GOLDEN % 1
