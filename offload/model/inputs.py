"""Inputs of the model: brought to where it computes, without the caller having to know when the copy is over."""

from __future__ import annotations

from typing import Any

import torch

from offload.device.protocol import Event, Processor
from offload.torch_internals import map_leaves


class Inputs:
    """Brings what a model is called with to its device. ``dtype`` is that of the weights."""

    def __init__(self, processor: Processor, dtype: torch.dtype) -> None:
        self._processor = processor
        self._dtype = dtype
        self._last: Event | None = None
        """After it, everything that was brought may be changed by its owner."""

    def bring(self, inputs: Any) -> Any:
        """The same containers, with tensors on the device; floating-point ones are cast to the weights' dtype."""
        return map_leaves(self._bring_leaf, inputs)

    def wait(self) -> None:
        """Return when all that was brought is there: a loader may fill its pinned buffers again. Copies that the device
        makes by itself were only asked for; it had the model's work to be busy with since."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def _bring_leaf(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor):
            return item
        dtype = self._dtype if item.is_floating_point() else item.dtype
        there, copied = self._processor.bring(item, dtype)
        self._last = copied or self._last
        return there
