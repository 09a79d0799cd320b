"""Reading and changing parameters and gradients from outside of the model's own order: what handles are backed by."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence
from enum import Enum, auto
from functools import partial

import torch
from torch import nn

from offload.memory import tensor_at
from offload.model.distributed_handle import DistributedGradientHandle
from offload.model.gradient_handle import GradientBacking, GradientHandle
from offload.model.handle import value_of
from offload.optim.formats import Formats
from offload.optim.rule import Rule
from offload.ranks.ranks import Ranks
from offload.spooled import Spooled
from offload.tiers.gradients.store import Gradient, GradientStore
from offload.tiers.home import TileHomes, UnitHomes
from offload.tiers.make_compute import WholeWeights
from offload.tiers.weights.host import HostLevel
from offload.tiers.weights.level import Level
from offload.units import ParameterSpec, UnitSpec, WeightInPieces
from offload.waiting import Failure
from swapper import OffloadError


class Zeroing(Enum):
    """What is known of ``zero_grad()`` since a step has used the gradients up.

    - ``DONE``: somebody has dropped them, or has seen that there are none. The same where nobody expects any.
    - ``DUE``: not so far.
    - ``MISSED``: not before the next backward, which would have added to them in PyTorch. May be dropped still.
    """

    DONE = auto()
    DUE = auto()
    MISSED = auto()


class ExternalAccess:
    """The one way from outside to weights, masters and gradients. Everything that changes them announces it first."""

    def __init__(
        self,
        homes: Sequence[UnitHomes],
        host: HostLevel,
        gradients: GradientStore,
        level: Level,
        rule: Rule | None,
        formats: Formats,
        dtype: torch.dtype,
        device: torch.device,
        failure: Failure,
        settle: Callable[[], None],
        spooled: Spooled,
        invalidate: Callable[[UnitSpec], None],
        ranks: Ranks,
        whole: WholeWeights | None,
    ) -> None:
        """``homes``, ``host`` and ``gradients`` are of this rank's shards, where ``ranks`` are several;
        ``whole`` has whole units then. ``settle`` returns when all gradients are in their places. ``invalidate``
        makes void what was computed from a unit's weights, gradients or states before the step; see
        ``SpeculativeUpdates.invalidate``."""
        self.gradients = gradients
        self.failure = failure
        self.formats = formats
        self.rule = rule
        self.dtype = dtype
        self.device = device
        self.settle = settle
        self.spooled = spooled
        self.ranks = ranks
        self._whole = whole
        self.zeroing = Zeroing.DONE
        self._homes = homes
        self._host = host
        self._level = level
        self._invalidate = invalidate
        self.agree_to_change: Callable[[], None] = partial(ranks.barrier, "a change")
        """Called before any change, on all ranks together."""
        self.before_change: Callable[[UnitSpec], None] = _nothing
        """Called before weights, masters or states of a unit change; a commit under way still reads them."""

    def changing(self, units: Sequence[UnitSpec]) -> None:
        """Weights, gradients or states of these units are about to change: speculative updates of them are void, and
        nothing else uses them any more. Every change of their bytes from outside comes through here; a factor for a
        gradient needs no such care, since a speculative update that was made without it does not pass the verdict. All
        ranks come through here together."""
        self.agree_to_change()
        for unit in units:
            self.dropping(unit)
            self._host.fence.wait(unit)
            self.before_change(unit)

    def dropping(self, unit: UnitSpec) -> None:
        """Gradients of the unit are about to be forgotten. An update of the last step may go on reading them."""
        self.settle()
        self._invalidate(unit)

    @contextlib.contextmanager
    def weights(self, unit: UnitSpec, spec: ParameterSpec) -> Iterator[int]:
        """The address of one parameter's weights, once the last step's update has reached them."""
        with self._borrow(unit, change=False) as address:
            yield address + spec.offset * self.formats.weights

    @contextlib.contextmanager
    def whole_weights(self, unit: UnitSpec, spec: ParameterSpec) -> Iterator[int]:
        """The same of all of a parameter of which ``spec`` may be a rank's shard. A rank may do this by itself as long
        as the others go on."""
        if self._whole is None or spec.whole is None:
            with self.weights(unit, spec) as address:
                yield address
            return
        with self._whole.borrow(unit, spec.whole.offset, spec.whole.offset + spec.whole.numel) as address:
            yield address

    def joined(self, what: str, part: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
        """All of something of which each rank has a part, flat, for all ranks together; ``what`` says which."""
        return self.ranks.join(f"{what} of {spec.name}", part.reshape(-1))

    @contextlib.contextmanager
    def weights_to_change(self, unit: UnitSpec, spec: ParameterSpec) -> Iterator[int]:
        """The same, to be changed."""
        with self.all_weights_to_change(unit) as address:
            yield address + spec.offset * self.formats.weights

    @contextlib.contextmanager
    def all_weights(self, unit: UnitSpec) -> Iterator[int]:
        """The address of the unit's weights, as ``weights``."""
        with self._borrow(unit, change=False) as address:
            yield address

    @contextlib.contextmanager
    def all_weights_to_change(self, unit: UnitSpec) -> Iterator[int]:
        """The same, to be changed."""
        self.changing([unit])
        self._level.outdate([unit])
        with self._borrow(unit, change=True) as address:
            yield address

    def read_master(self, unit: UnitSpec, spec: ParameterSpec) -> torch.Tensor:
        """A copy of the parameter's fp32 master, flat, once the last step's update has reached it."""
        value = torch.empty(spec.numel)
        with self.weights(unit, spec) as weights:
            for tile, start, stop in self._tiles_of(unit, spec):
                with tile.states.borrow(change=False) as address:
                    value[start - spec.offset : stop - spec.offset] = self.formats.get_master(
                        stop - start,
                        weights + (start - spec.offset) * self.formats.weights,
                        address + self._master_offset(tile, start),
                    )
        return value

    def write_master(
        self, unit: UnitSpec, spec: ParameterSpec, weights: int, value: torch.Tensor | None = None
    ) -> None:
        """Make the master ``value``, fp32 and flat, and the parameter's weights at this address what it is rounded to;
        without a value, make the master what the weights are."""
        if self.rule is None or not self.formats.master or not spec.trainable:
            return
        if value is None:
            value = tensor_at(weights, spec.numel, self.dtype).float()
        for tile, start, stop in self._tiles_of(unit, spec):
            with tile.states.borrow(change=True) as address:
                self.formats.put_master(
                    value[start - spec.offset : stop - spec.offset],
                    weights + (start - spec.offset) * self.formats.weights,
                    address + self._master_offset(tile, start),
                )

    def _tiles_of(self, unit: UnitSpec, spec: ParameterSpec) -> Iterator[tuple[TileHomes, int, int]]:
        """The tiles that hold a part of the parameter, and which of the unit's elements that is."""
        for homes in self._homes[unit.index].tiles:
            start, stop = max(spec.offset, homes.tile.start), min(spec.offset + spec.numel, homes.tile.stop)
            if start < stop:
                yield homes, start, stop

    def _master_offset(self, tile: TileHomes, element: int) -> int:
        return 0 if self.rule is None else self.rule.master_offset(tile.tile, element)

    def _borrow(self, unit: UnitSpec, *, change: bool) -> contextlib.AbstractContextManager[int]:
        home = self._homes[unit.index].weights
        if home.tensor is not None:
            return home.borrow(change=change)
        return self._host.borrow(unit, change=change)


def _nothing(unit: UnitSpec) -> None:
    return None


def _nobody() -> None:
    return None


class ParameterBacking:
    """Backs the handle of one parameter, or of one piece of a large one. ``in_use`` is the one in the unit's window."""

    def __init__(self, unit: UnitSpec, spec: ParameterSpec, access: ExternalAccess, in_use: nn.Parameter) -> None:
        self.name = spec.name
        self.trainable = spec.trainable
        self.in_use = (in_use,)
        self._unit = unit
        self._spec = spec
        self._access = access
        self._gradient_handle: GradientHandle | None = None

    def read(self) -> torch.Tensor:
        """A copy of the value, once the last step's update has reached it."""
        shape = self._spec.whole_shape
        with self._access.failure, self._access.whole_weights(self._unit, self._spec) as address:
            value = tensor_at(address, shape.numel(), self._access.dtype).view(shape).clone()
        return self._spec.in_model(value)

    def write(self, value: torch.Tensor) -> None:
        """Set the value. The fp32 master becomes exactly this, unless it is rounded to this already; moments stay as
        they are."""
        access, unit, spec = self._access, self._unit, self._spec
        with access.failure, access.weights_to_change(unit, spec) as address, torch.no_grad():
            own = spec.shard_of(value).view(spec.shape)
            rounded = own.to("cpu", access.dtype)
            if access.formats.master and torch.equal(self._tensor(address), rounded):
                return
            self._tensor(address).copy_(own)
            access.write_master(unit, spec, address)

    def read_master(self) -> torch.Tensor:
        """A copy of the fp32 master."""
        access, spec = self._access, self._spec
        with access.failure:
            value = access.joined("the master", access.read_master(self._unit, spec), spec)
        return spec.in_model(value.view(spec.whole_shape))

    def write_master(self, value: torch.Tensor) -> None:
        """Set the fp32 master, and the weight to what it is rounded to."""
        access, unit, spec = self._access, self._unit, self._spec
        flat = spec.shard_of(value.detach()).to("cpu", torch.float32).reshape(-1)
        with access.failure, access.weights_to_change(unit, spec) as address, torch.no_grad():
            access.write_master(unit, spec, address, flat)

    @property
    def gradient(self) -> torch.Tensor | None:
        """A handle on the gradient for the coming step, or None if there is none."""
        backing = self.gradient_backing()
        if backing is None:
            return None
        if self._gradient_handle is None:
            self._gradient_handle = self.gradient_handle(backing, self._spec.model_shape)
        return self._gradient_handle

    @gradient.setter
    def gradient(self, value: torch.Tensor | None) -> None:
        access, unit, spec = self._access, self._unit, self._spec
        if isinstance(value, GradientHandle) and value.is_of(spec):
            return
        access.zeroing = Zeroing.DONE
        with access.failure:
            if value is None:
                access.dropping(unit)
                access.gradients.discard(unit, spec)
            else:
                access.changing([unit])
                access.gradients.write(unit, spec, spec.shard_of(value_of(value).detach()))

    def gradient_backing(self) -> PlainGradientBacking | None:
        """What a handle on the gradient needs, if there is a gradient."""
        self._access.settle()
        if self._spec in self._access.gradients.of(self._unit):
            return PlainGradientBacking(self._unit, self._spec, self._access)
        if self._access.zeroing is Zeroing.DUE:
            self._access.zeroing = Zeroing.DONE
        return None

    def gradient_handle(self, backing: GradientBacking, shape: torch.Size) -> GradientHandle:
        """A handle on a gradient of this parameter, or of the whole that it is a piece of."""
        meta = torch.empty(shape, dtype=self._access.dtype, device="meta")
        kind = GradientHandle if self._spec.distribution is None else DistributedGradientHandle
        return kind(backing, meta, self._access.device)

    def _tensor(self, address: int) -> torch.Tensor:
        return tensor_at(address, self._spec.numel, self._access.dtype).view(self._spec.shape)


class PiecewiseBacking:
    """Backs the handle of a weight in pieces. ``pieces`` are the backings of its pieces, in order."""

    def __init__(self, whole: WeightInPieces, pieces: Sequence[ParameterBacking]) -> None:
        self.name = whole.name
        self.whole = whole
        self.trainable = pieces[0].trainable
        self.in_use = tuple(parameter for piece in pieces for parameter in piece.in_use)
        self._pieces = pieces

    def read(self) -> torch.Tensor:
        """A copy of the whole value."""
        return torch.cat([piece.read() for piece in self._pieces])

    def write(self, value: torch.Tensor) -> None:
        """As ``ParameterBacking.write``."""
        for piece, part in zip(self._pieces, self.whole.split(value), strict=True):
            piece.write(part)

    @property
    def gradient(self) -> torch.Tensor | None:
        """A handle on the gradient, or None if one of the pieces has none."""
        parts = [part for piece in self._pieces if (part := piece.gradient_backing()) is not None]
        if len(parts) < len(self._pieces):
            return None
        return self._pieces[0].gradient_handle(PiecewiseGradientBacking(self.whole, parts), self.whole.shape)

    @gradient.setter
    def gradient(self, value: torch.Tensor | None) -> None:
        if isinstance(value, GradientHandle) and value.is_of(self.whole):
            return
        parts = [None] * len(self._pieces) if value is None else self.whole.split(value_of(value).detach())
        for piece, part in zip(self._pieces, parts, strict=True):
            piece.gradient = part


class PlainGradientBacking:
    """Backs the handle of one gradient, ``parameter.grad``."""

    gradient: torch.Tensor | None = None
    trainable = False
    in_use: Sequence[nn.Parameter] = ()

    def __init__(self, unit: UnitSpec, spec: ParameterSpec, access: ExternalAccess) -> None:
        self.name = f"the gradient of {spec.name}"
        self.spec = spec
        self._unit = unit
        self._access = access

    def read(self) -> torch.Tensor:
        with self._access.failure:
            self._known()
            own = self._access.gradients.read(self._unit, self.spec)
            value = self._access.joined("the gradient", own, self.spec).view(self.spec.whole_shape)
        return self.spec.in_model(value.to(self._access.dtype))

    def write(self, value: torch.Tensor) -> None:
        self._access.zeroing = Zeroing.DONE  # zeros, it may be
        with self._access.failure:
            self._access.changing([self._unit])
            self._access.gradients.write(self._unit, self.spec, self.spec.shard_of(value))

    # What clip_grad_norm_ asks of each gradient, without bringing it in.

    def norm(self) -> float:
        """Its 2-norm, from the sum that was added up while it came."""
        return float(self._known().ask() ** 0.5)

    def is_finite(self) -> bool:
        """No element is infinite or NaN."""
        return math.isfinite(self._known().norm_squared)

    def multiply(self, factor: float) -> None:
        """Multiply it, when the update reads it. A speculative update with another factor does not pass the verdict."""
        self._known().scale *= factor

    def _known(self) -> Gradient:
        """What is known of the gradient. Raises ``OffloadError`` if there is none any more."""
        self._access.settle()
        found = self._access.gradients.of(self._unit).get(self.spec)
        if found is None:
            raise OffloadError(
                f"{self.name} is gone: a step has used it, or it was dropped. Take a copy before: "
                "parameter.grad.detach().clone()"
            )
        return found


class PiecewiseGradientBacking:
    """The same for a weight in pieces. ``pieces`` are the backings of its pieces' gradients, in order."""

    gradient: torch.Tensor | None = None
    trainable = False
    in_use: Sequence[nn.Parameter] = ()

    def __init__(self, whole: WeightInPieces, pieces: Sequence[PlainGradientBacking]) -> None:
        self.name = f"the gradient of {whole.name}"
        self.spec = whole
        self._pieces = pieces

    def read(self) -> torch.Tensor:
        return torch.cat([piece.read() for piece in self._pieces])

    def write(self, value: torch.Tensor) -> None:
        for piece, part in zip(self._pieces, self.spec.split(value), strict=True):
            piece.write(part)

    def norm(self) -> float:
        return float(sum(piece.norm() ** 2 for piece in self._pieces) ** 0.5)

    def is_finite(self) -> bool:
        return all(piece.is_finite() for piece in self._pieces)

    def multiply(self, factor: float) -> None:
        for piece in self._pieces:
            piece.multiply(factor)
