"""Protocol of an optimizer: how its states lie in tiles, and what one step does to one tile."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeAlias

import torch
from torch import nn

from offload import kernels
from offload.errors import ConfigError
from offload.ranks.agreement import Facts
from offload.units import ParameterSpec, Tile, UnitSpec

Group = dict[str, Any]
"""A parameter group of ``torch.optim``: its options by name, and ``params``."""


@dataclass(frozen=True, slots=True)
class TilePart:
    """A part of a tile, one state of one parameter or (``state`` "") its master: the byte where it begins, and what it
    is."""

    parameter: str
    state: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype


class TileBytes(NamedTuple):
    """The addresses of a tile's states, and of the weights and gradients of the same elements, or of some of them.

    An update writes to ``states`` and ``weights`` what it makes of those at ``states_before`` and ``weights_before``.
    """

    states: int
    weights: int
    grads: int
    states_before: int
    weights_before: int

    @classmethod
    def in_place(cls, states: int, weights: int, grads: int) -> TileBytes:
        """For an update that writes where it reads."""
        return cls(states, weights, grads, states, weights)

    @property
    def is_in_place(self) -> bool:
        """The update writes where it reads."""
        return self.states == self.states_before and self.weights == self.weights_before


SteppingParameter: TypeAlias = tuple[nn.Parameter, Group]
"""A parameter that takes part in a step, as the optimizer has it, and its group."""


def options_of(group: Group) -> Group:
    """The group without its ``params``."""
    return {name: value for name, value in group.items() if name != "params"}


def refuse_twice(groups: Iterable[Group], name_of: Callable[[nn.Parameter], str | None]) -> None:
    """Raise ``ConfigError`` if a parameter is in the groups several times."""
    parameters = [parameter for group in groups for parameter in group["params"]]
    counts = Counter(map(id, parameters))
    if len(counts) < len(parameters):
        several = {id(each): each for each in parameters if counts[id(each)] > 1}
        shown = ", ".join(f"{name_of(each) or tuple(each.shape)} {counts[key]} times" for key, each in several.items())
        raise ConfigError(
            f"the optimizer's parameter groups have {shown}: torch would take as many steps of it in one. Give each "
            "parameter once"
        )


def facts_of(groups: Iterable[tuple[Group, Sequence[str]]]) -> Facts:
    """Facts that ranks must agree on of parameter groups, each with the names of its parameters."""
    of_groups: dict[str, dict[str, Any]] = {}
    num_groups = 0
    for group, names in groups:
        of_this = {
            **{name: _plain(value) for name, value in options_of(group).items()},
            "the list of parameters": names,
        }
        for name, value in of_this.items():
            of_groups.setdefault(name, {})[f"parameter group {num_groups}"] = value
        num_groups += 1
    return {"the number of parameter groups": num_groups, **of_groups}


def _plain(value: Any) -> Any:
    """A setting whose representation is the same in all processes where its value is."""
    if isinstance(value, torch.Tensor):
        return value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    return type(value).__qualname__


class TileLayout(Protocol):
    """Layout of masters and states in tiles. Addresses are of memory that holds a whole tile, in RAM."""

    @property
    def identity(self) -> dict[str, Any]:
        """Facts that a checkpoint of its states says of it: ``optimizer``, and ``moments``, the format of its
        states."""

    def parts(self, tile: Tile) -> Sequence[TilePart]:
        """Parts that a stranger needs to know to read a tile that ``identity`` does not explain; empty if it does."""

    def master_offset(self, tile: Tile, element: int) -> int:
        """Bytes from the tile's start to what it holds of the master of ``element``."""

    def states(self, tile: Tile, address: int, spec: ParameterSpec) -> dict[str, torch.Tensor]:
        """The part of the parameter's states that lies in this tile: flat tensors over its memory, by name."""


class Rule(TileLayout, Protocol):
    """An optimizer that runs over tiles."""

    repeatable: bool
    """``apply`` leaves nothing behind but what it writes to the addresses, so that it can be taken back."""
    replayable: bool
    """``freeze`` gives a ``Coef``, with which another process can take the same step."""
    uniform: bool
    """``freeze`` gives the same for all parameters of a group with the same step and scale."""
    temporary_bytes: int
    """Host memory that ``apply`` takes beside the tile, as far as it is known."""
    is_one_kernel: bool
    """``apply`` runs one kernel and does nothing else. So it need not wait for its end, and can write elsewhere than it
    reads: all elements from ``start`` to ``stop``, and no others."""

    @property
    def is_watched(self) -> bool:
        """The caller's modes see the operations of the step that has begun, or the program holds what it reads: it is
        carried out before the call returns."""

    def products(self, unit: UnitSpec) -> float:
        """FLOP of products of matrices that a step of the unit takes, as far as it is known."""

    def tile_between(self, unit: UnitSpec, start: int, stop: int) -> Tile:
        """A tile of the unit's elements ``[start, stop)``, whatever ``tiles_of`` has cut."""

    @property
    def device_unsupported_reason(self) -> str | None:
        """Reason why ``apply`` cannot run in a device's memory; None if it can."""

    def tiles_of(self, unit: UnitSpec, tile_bytes: int) -> tuple[Tile, ...]:
        """The unit's trainable elements in tiles of at most ``tile_bytes``, or as little more as works."""

    def begin(self, tile: Tile, address: int) -> None:
        """Write the states that are there before the first step."""

    def begin_step(self, stepping: Mapping[ParameterSpec, SteppingParameter]) -> None:
        """A step of the optimizer is certain; these parameters take part in it, each of which is frozen next."""

    def freeze(self, spec: ParameterSpec, group: Group, step: int, grad_scale: float) -> Hashable:
        """All that the ``step``-th step of one parameter depends on, as it is now.

        Neighbours for which it is equal are updated in one call. Raises ``ConfigError`` for settings that cannot work.
        """

    def check_options(self, spec: ParameterSpec, group: Group) -> None:
        """Raise ``ConfigError`` for options with which this parameter of a group could not take a step."""

    def apply(self, frozen: Hashable, tile: Tile, start: int, stop: int, at: TileBytes, native: kernels.Native) -> None:
        """Update the elements ``[start, stop)`` of the tile, whose weights and gradients begin where ``at`` says.
        ``native`` runs the kernels: on the CPU, or on a device
        (see ``device_unsupported_reason``), in whose memory all addresses are then."""

    def put_states(self, tile: Tile, address: int, spec: ParameterSpec, states: Mapping[str, Any], first: int) -> None:
        """Write what the tile holds of the parameter's states and ``states`` have of them, in any format of moments.
        Those begin with element ``first`` of the unit. The bits stay where the format is that of the tile."""

    def names(self, spec: ParameterSpec) -> tuple[str, ...]:
        """The states of the parameter that rest in tiles."""

    def shape(self, spec: ParameterSpec, name: str) -> torch.Size:
        """The shape of a whole state of the parameter, put together from all tiles."""

    def shapes_like(self, spec: ParameterSpec, states: Mapping[str, Any]) -> dict[str, torch.Size]:
        """The shape of each state that rests in tiles, in the formats in which ``states`` have them."""

    def loose_states(self, spec: ParameterSpec, step: int) -> dict[str, Any]:
        """Return what belongs to the parameter's state and lies in no tile: the number of steps and the like."""

    def get_shared(self) -> dict[str, Any]:
        """Return what the optimizer keeps beside options of groups and states of parameters; empty if nothing."""

    def set_shared(self, shared: Mapping[str, Any]) -> None:
        """Take over what ``get_shared`` gave."""

    def set_loose_states(self, spec: ParameterSpec, states: dict[str, Any], *, held: bool = False) -> int:
        """Take over what ``loose_states`` gave, which the program may have ``held``; the number of steps taken."""

    def forget_states(self, spec: ParameterSpec) -> None:
        """The parameter has no states, as before its first step."""
