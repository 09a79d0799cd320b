"""The one way from outside to weights, masters, states and gradients of a running engine."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, field

import torch

from offload.elements import Begin, Elements, Layout, Loan, NewElements
from offload.errors import warn
from offload.optim.rule import Rule
from offload.ranks.agreement import fact_of
from offload.ranks.ranks import Ranks
from offload.spooled import Spooled
from offload.tiers.gradients.own import OwnGradients
from offload.tiers.gradients.store import GradientStore
from offload.tiers.home import Home, TileHomes, UnitHomes
from offload.tiers.weights.host import HostLevel
from offload.tiers.weights.level import Level, WholeWeights
from offload.units import ParameterSpec, UnitSpec, local_tensor
from offload.waiting import Failure


@dataclass(frozen=True)
class Levels:
    """Levels that lend the weights of units: those in host memory, their copies for compute, and, where this rank has
    shards, ``whole`` units."""

    host: HostLevel
    compute: Level
    whole: WholeWeights


def _nothing(unit: UnitSpec) -> None:
    return None


@dataclass
class BeforeChange:
    """Steps that come before a change from outside, in this order.

    ``agree`` is called by all ranks together. ``settle`` returns when all gradients are in their places. ``invalidate``
    makes void what was computed from a unit's weights, gradients or states before the step; see
    ``SpeculativeUpdates.invalidate``. ``commit``: a commit under way reads the unit's records still.
    """

    agree: Callable[[], None]
    settle: Callable[[], None]
    invalidate: Callable[[UnitSpec], None] = _nothing
    commit: Callable[[UnitSpec], None] = _nothing


@dataclass(eq=False)
class ExternalAccess:
    """The one way from outside to weights, masters, states and gradients of an engine. Everything that changes them
    announces it first. ``homes`` and ``gradients`` are of this rank's shards, where there are several ``ranks``."""

    layout: Layout[Rule]
    homes: Sequence[UnitHomes]
    levels: Levels
    gradients: GradientStore
    own_gradients: OwnGradients
    before: BeforeChange
    ranks: Ranks
    device: torch.device
    failure: Failure
    spooled: Spooled
    to_be_zeroed: set[ParameterSpec] = field(default_factory=set)
    """Parameters whose gradients a step has used up, and nobody has dropped since: in PyTorch they are there still.
    Empty once somebody has seen that one has none."""
    has_warned_of_used_gradients: bool = False

    def __post_init__(self) -> None:
        self.own_gradients.write = self.write_gradient

    def write_gradient(self, unit: UnitSpec, spec: ParameterSpec, value: torch.Tensor) -> None:
        """Make the gradient for the coming step what the whole parameter's is to be: see ``GradientStore.write``."""
        with self.failure:
            self.agree(f"the gradient of {spec.name}", value)
            self.changing([unit])
            self.gradients.write(unit, spec, spec.shard_of(value.detach()))

    def has_gradients(self, unit: UnitSpec) -> bool:
        """The unit's parameters have gradients, as far as that is known without a wait."""
        return self.gradients.has_any(unit) or (bool(self.own_gradients.of_spec) and self.own_gradients.has_any(unit))

    def using_gradients(self, what: str, of: Collection[ParameterSpec]) -> None:
        """These gradients are about to be used or read: in PyTorch they might hold those of the last step, too."""
        if not self.to_be_zeroed.isdisjoint(of) and not self.has_warned_of_used_gradients:
            self.has_warned_of_used_gradients = True
            warn(
                f"{what}: there was no zero_grad() since the last step, and nothing was added to its gradients: "
                "engine.optimizer.step() uses them up, as if zero_grad() came after it. To add up several backwards, "
                "step after the last of them. Else call zero_grad() before the backward, as for any optimizer."
            )

    def wait_for_updates(self) -> None:
        """Wait until the last step's update is done everywhere."""
        self.levels.host.fence.wait_all()

    def changing(self, units: Sequence[UnitSpec]) -> None:
        """Weights, gradients or states of these units are about to change: speculative updates of them are void, and
        nothing else uses them any more. Every change of their bytes from outside comes through here; a factor for a
        gradient needs no such care, since a speculative update that was made without it does not pass the verdict. All
        ranks come through here together."""
        self.before.agree()
        for unit in units:
            self.dropping(unit)
            self.levels.host.fence.wait(unit)
            self.before.commit(unit)

    def agree(self, what: str, value: torch.Tensor) -> None:
        """Have all ranks say what they are about to write: the same, or all of them end with an error."""
        self.ranks.barrier(f"a change of {what}", lambda: {"the new value": fact_of(local_tensor(value))})

    def dropping(self, unit: UnitSpec) -> None:
        """Gradients of the unit are about to be forgotten. An update of the last step may go on reading them."""
        self.before.settle()
        self.before.invalidate(unit)

    @contextlib.contextmanager
    def changing_weights(self, units: Sequence[UnitSpec]) -> Iterator[None]:
        """As ``changing``, of weights, which change within: copies of them are void, too."""
        with self.ranks.changing_weights():
            self.changing(units)
            self.levels.compute.outdate(units)
            yield

    def weights(self, unit: UnitSpec) -> Loan:
        """The unit's weights, once the last step's update has reached them."""
        return self._borrow(unit, change=False)

    @contextlib.contextmanager
    def weights_to_change(self, unit: UnitSpec) -> Iterator[int]:
        """The same, to be changed."""
        with self.changing_weights([unit]), self._borrow(unit, change=True) as address:
            yield address

    @contextlib.contextmanager
    def whole_weights(self, unit: UnitSpec, spec: ParameterSpec) -> Iterator[int]:
        """The weights of all of a parameter of which ``spec`` may be a rank's shard. A rank may do this by itself as
        long as the others go on."""
        if spec.whole is None:
            with self.weights(unit) as address:
                yield address + spec.offset * self.layout.formats.weights
            return
        with self.levels.whole.borrow(unit, spec.whole.offset, spec.whole.offset + spec.whole.numel) as address:
            yield address

    def joined(self, what: str, part: torch.Tensor, spec: ParameterSpec) -> torch.Tensor:
        """All of something of which each rank has a part, flat, for all ranks together; ``what`` says which."""
        return self.ranks.join(f"{what} of {spec.name}", part.reshape(-1))

    def elements(self) -> Elements:
        """The elements of all parameters, to be read."""
        return Elements(_HomeRecords(self, self.weights, lambda home: home.borrow(change=False)), self.layout)

    def elements_to_change(self) -> Elements:
        """The same, to be changed. Who changes states alone announces it by ``changing``."""
        return Elements(_HomeRecords(self, self.weights_to_change, lambda home: home.borrow(change=True)), self.layout)

    def new_elements(self, begin: Begin) -> NewElements:
        """The same, to be made anew."""
        return NewElements(_HomeRecords(self, self.weights_to_change, lambda home: home.replace()), self.layout, begin)

    def _borrow(self, unit: UnitSpec, *, change: bool) -> Loan:
        home = self.homes[unit.index].weights
        return self.levels.host.borrow(unit, change=change) if home.tensor is None else home.borrow(change=change)


@dataclass(frozen=True)
class _HomeRecords:
    """The records of an engine. A fault of the disk while one is brought in is the engine's failure; what becomes of it
    meanwhile is not."""

    access: ExternalAccess
    weights: Callable[[UnitSpec], Loan]
    states: Callable[[Home], Loan]

    def tiles(self, unit: UnitSpec) -> Sequence[TileHomes]:
        return self.access.homes[unit.index].tiles

    def lend_weights(self, unit: UnitSpec) -> Loan:
        return self._lent(self.weights(unit))

    def lend_tile(self, tile: TileHomes) -> Loan:
        return self._lent(self.states(tile.states))

    @contextlib.contextmanager
    def _lent(self, loan: Loan) -> Iterator[int]:
        with contextlib.ExitStack() as lent:
            with self.access.failure:
                address = lent.enter_context(loan)
            yield address
