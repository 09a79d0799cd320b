"""Costs of recomputing a unit, or of not doing it: bytes and times of its forward, as a step shows them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from offload.device.protocol import Device
from offload.model.handle import Handle
from offload.torch_internals import top_saved_tensors_hooks


class Clock(Protocol):
    """Clock of what compute does."""

    def now(self) -> Any: ...

    def seconds(self, begin: Any, end: Any) -> float:
        """Between two moments, both of which have come."""


class HostClock:
    """This thread computes."""

    def now(self) -> float:
        return time.perf_counter()

    def seconds(self, begin: float, end: float) -> float:
        return end - begin


class DeviceClock:
    """A device computes, in its own time."""

    def __init__(self, device: Device) -> None:
        self._device = device

    def now(self) -> Any:
        return self._device.compute.record()

    def seconds(self, begin: Any, end: Any) -> float:
        end.wait()
        return float(end.seconds_since(begin))


class Unmeasured:
    """Nobody asks."""

    def first(self, inputs: Sequence[Any]) -> AbstractContextManager[None]:
        """Around the first run of a call, with these arguments."""
        return nullcontext()

    def again(self) -> None:
        """A second run of it is over."""


@dataclass(eq=False)
class ForwardCosts(Unmeasured):
    """Those of one unit in a step. ``free_bytes`` says what memory has left, ``is_weight`` what is not counted."""

    clock: Clock
    free_bytes: Callable[[], int]
    is_weight: Callable[[torch.Tensor], bool]
    runs_alone: Callable[[], bool]
    """The call is one of a micro-batch that others will run together with in later steps."""
    input_bytes: int = 0
    """Of the largest call, like the next."""
    saved_bytes: int = 0
    num_alive: int = 0
    """Calls whose backward is to come."""
    num_alone: int = 0
    """Calls of a micro-batch that has run alone: they will be alive with those of the others."""
    most_alive: int = 0
    least_free_bytes: int = 1 << 62
    spans: list[tuple[Any, Any]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        """Of the forward, of all calls."""
        return sum(self.clock.seconds(begin, end) for begin, end in self.spans)

    @contextmanager
    def first(self, inputs: Sequence[Any]) -> Iterator[None]:
        tensors = [each for each in inputs if type(each) is torch.Tensor and each.layout is torch.strided]
        self.input_bytes = max(self.input_bytes, sum(each.nbytes for each in tensors))
        self.num_alive += 1
        self.most_alive = max(self.most_alive, self.num_alive + self.num_alone)
        below = top_saved_tensors_hooks()
        if below is None:  # a transform of ``torch.func`` is under way
            yield
            return
        pack_below, unpack = below
        seen = {each.untyped_storage()._cdata: each.untyped_storage().nbytes() for each in tensors}

        def pack(tensor: torch.Tensor) -> Any:
            if tensor.layout is torch.strided and not isinstance(tensor, Handle) and not self.is_weight(tensor):
                storage = tensor.untyped_storage()
                seen[storage._cdata] = storage.nbytes()
            return pack_below(tensor)

        pack.steps_aside = True  # type: ignore[attr-defined]
        begin = self.clock.now()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield
        self.spans.append((begin, self.clock.now()))
        self.saved_bytes = max(self.saved_bytes, sum(seen.values()))
        self._look()

    def again(self) -> None:
        self.num_alive = max(self.num_alive - 1, 0)
        self.num_alone += self.runs_alone()
        self._look()

    def _look(self) -> None:
        self.least_free_bytes = min(self.least_free_bytes, self.free_bytes())
