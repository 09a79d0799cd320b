"""Inputs of the model: brought to where it computes, without the caller having to know when the copy is over.

An input that is there already is the caller's own object, and so is a container of such: what the model appends to a
list of its caller's, or puts into a dict, is there for the caller.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch

from offload.device.protocol import Event, Processor
from offload.torch_internals import replace_leaves
from offload.unseen import own_work


class Inputs:
    """Brings what a model is called with to its device. Parameters that were of one of the ``converted`` dtypes are of
    ``dtype`` now."""

    def __init__(self, processor: Processor, converted: Collection[torch.dtype], dtype: torch.dtype) -> None:
        self._processor = processor
        self._dtypes = dict.fromkeys(converted, dtype)
        self._last: Event | None = None
        """After it, everything that was brought may be changed by its owner."""

    @own_work
    def bring(self, inputs: Any) -> Any:
        """The same with tensors on the device, those of a converted dtype converted likewise. A container is made anew
        only if something in it is another object now."""
        return replace_leaves(self._bring_leaf, inputs)

    def wait(self) -> None:
        """Return when all that was brought is there: a loader may fill its pinned buffers again. Copies that the device
        makes by itself were only asked for; it had the model's work to be busy with since."""
        last, self._last = self._last, None
        if last is not None:
            last.wait()

    def _bring_leaf(self, item: Any) -> Any:
        if not isinstance(item, torch.Tensor) or item.is_meta:  # which has no bytes to bring
            return item
        there, copied = self._processor.bring(item, self._dtypes.get(item.dtype, item.dtype))
        self._last = copied or self._last
        return there
