"""Strides of parameters are not kept: weights lie flat in homes, in the order of their dimensions. Who looks sees the
strides of a contiguous tensor, and so does the kernel that computes: values are the same, and bits need not be."""

from __future__ import annotations

from collections.abc import Mapping

from offload.errors import warn


def say_strides(odd: Mapping[str, tuple[int, ...]]) -> None:
    """Warn of the strides of these parameters, by name, if there are any."""
    for name, strides in [*odd.items()][:1]:
        others = f" ({len(odd)} parameters in all)" if len(odd) > 1 else ""
        warn(
            f"parameter {name} was given strides {strides}, and is contiguous in the engine{others}: its values are "
            "the same, and a kernel that looks at strides (a convolution in channels_last) may round otherwise. Inputs "
            "keep theirs. To compare bits, make parameters contiguous first: parameter.data.contiguous()"
        )
