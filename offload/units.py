"""Which parameters move together: the units of a model, found from its structure."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn

from offload.errors import ConfigError
from offload.pieces import Cut, Piece, can_be_cut, piece_numel
from swapper import PAGE_BYTES

GRAIN = PAGE_BYTES // 2
"""Elements that a unit's length is a multiple of, so that 16-bit and 32-bit pieces of it both fill whole pages."""

ALIGNMENT = 256
"""Elements that each parameter's offset is a multiple of: those that share one scale where moments are in 8 bits.

One of a grain or more begins at a multiple of ``GRAIN``, so that tiles can hold whole parameters.
"""

_UNIT_SHARE = 1 / 8
"""A module with at most this share of the model's parameters is one unit."""

_BLOCK_SHARE = 1 / 2
"""A repeated block may have up to this share."""


class Site(NamedTuple):
    """One place in the model where a parameter stands."""

    module: nn.Module
    name: str


@dataclass(frozen=True, eq=False)
class ParameterSpec:
    """One parameter of a unit, or one piece of a large one.

    ``offset`` counts elements from the unit's start. ``sites`` are where it stands while it is used; tied ones have
    several.
    """

    name: str
    shape: torch.Size
    numel: int
    offset: int
    trainable: bool
    sites: tuple[Site, ...]
    piece: Piece | None = None

    @property
    def owners(self) -> tuple[Site, ...]:
        """Where the model has the parameter: for a piece, the whole of it."""
        return tuple(Site(*site) for site in self.piece.cut.sites) if self.piece is not None else self.sites

    @property
    def parameter(self) -> nn.Parameter:
        """The model's parameter as it stands there now."""
        module, name = self.owners[0]
        parameter = module._parameters[name]
        assert parameter is not None
        return parameter

    @property
    def parameter_name(self) -> str:
        """The name that the model knows it by."""
        return self.piece.cut.name if self.piece is not None else self.name

    def value(self) -> torch.Tensor:
        """The elements of ``parameter`` that this one has."""
        return self.part_of(self.parameter.detach())

    def part_of(self, whole: torch.Tensor) -> torch.Tensor:
        """The same elements of something that has the parameter's shape."""
        return whole[self.piece.start : self.piece.stop] if self.piece is not None else whole

    @property
    def another_piece_follows(self) -> bool:
        """This is a piece, and not the last one."""
        return self.piece is not None and self.piece is not self.piece.cut.pieces[-1]


@dataclass(frozen=True, eq=False)
class UnitSpec:
    """Parameters stored flat, one after the other: the trainable ones first.

    ``numel`` and ``trainable_numel`` count elements up to the end of the padding, whole multiples of ``GRAIN``.
    ``modules`` are those around whose forward the unit must be resident; ``depth`` counts the units that are
    resident around this one because their module calls this one's.
    """

    index: int
    name: str
    modules: tuple[nn.Module, ...]
    parameters: tuple[ParameterSpec, ...]
    trainable_numel: int
    numel: int
    depth: int

    @property
    def trainable(self) -> tuple[ParameterSpec, ...]:
        """The parameters that are trained."""
        return tuple(spec for spec in self.parameters if spec.trainable)

    @property
    def reused(self) -> bool:
        """It is a piece of a weight that the model uses at several places."""
        return self.cut is not None and len(self.cut.sites) > 1

    @property
    def cut(self) -> Cut | None:
        """The weight that it is a piece of."""
        piece = self.parameters[0].piece
        return piece.cut if piece is not None else None

    @property
    def gaps(self) -> Iterator[tuple[int, int]]:
        """The padding among the trainable elements, as half-open ranges."""
        end = 0
        for spec in self.parameters:
            if spec.trainable:
                if spec.offset > end:
                    yield end, spec.offset
                end = spec.offset + spec.numel
        if self.trainable_numel > end:
            yield end, self.trainable_numel


def find_units(model: nn.Module, *, in_pieces: bool = False) -> list[UnitSpec]:
    """Cut ``model`` into units, in the order of ``model.named_parameters()``.

    Repeated blocks (children of one class in a ``ModuleList`` or ``Sequential``) are units; so is every other module
    that is small against the model; what a larger module owns itself is a unit of its own. With ``in_pieces`` a weight
    that is much larger than all other units may be cut into several: see ``offload.pieces``.
    Raises ``ConfigError`` for a trainable parameter that is not a real floating-point tensor.
    """
    total = sum(p.numel() for p in model.parameters())
    owners = dict(_owners(model, total))
    sites: dict[int, list[Site]] = {}
    groups: dict[nn.Module, dict[str, nn.Parameter]] = {}
    claimed: dict[int, nn.Module] = {}
    for prefix, module in model.named_modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            full_name = f"{prefix}.{name}" if prefix else name
            if not _managed(parameter, full_name):
                continue
            sites.setdefault(id(parameter), []).append(Site(module, name))
            if claimed.setdefault(id(parameter), owners[module]) is owners[module]:
                groups.setdefault(owners[module], {}).setdefault(full_name, parameter)
    names = {module: name for name, module in model.named_modules()}
    parameters = {owner: _distinct(group) for owner, group in groups.items()}
    cuts = _cuts(parameters, sites) if in_pieces else {}
    rest = {owner: [item for item in group if id(item[1]) not in cuts] for owner, group in parameters.items()}
    unit_names = {names[owner] for owner in parameters if rest[owner]}
    units: list[UnitSpec] = []
    for owner, group in parameters.items():
        if rest[owner]:
            units.append(_unit(len(units), names[owner], owner, rest[owner], sites, names, unit_names))
        for _, parameter in group:
            for piece in cuts[id(parameter)].pieces if id(parameter) in cuts else ():
                units.append(_unit_of_piece(len(units), piece, parameter.requires_grad, names, unit_names))
    return units


def num_nested(units: Sequence[UnitSpec]) -> int:
    """The most units that compute needs at a time: the one at work and those whose modules call it."""
    return max(unit.depth for unit in units) + 1


def _units_around(module_name: str, unit_names: set[str]) -> set[str]:
    """The units whose module is or contains the module of this name."""
    parts = module_name.split(".") if module_name else []
    return unit_names & {".".join(parts[:length]) for length in range(len(parts) + 1)}


def _owners(model: nn.Module, total: int) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Each module with the module that stands for its unit."""

    def assign(module: nn.Module, unit: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
        yield module, unit
        for child in module.children():
            yield from assign(child, unit)

    def descend(module: nn.Module, repeated: bool) -> Iterator[tuple[nn.Module, nn.Module]]:
        numel = sum(p.numel() for p in module.parameters())
        container = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))
        share = _BLOCK_SHARE if repeated else _UNIT_SHARE
        if not container and numel <= share * total:
            yield from assign(module, module)
            return
        yield module, module
        children = list(module.children())
        classes = [type(child) for child in children]
        for child in children:
            blocks = isinstance(module, (nn.ModuleList, nn.Sequential)) and classes.count(type(child)) > 1
            yield from descend(child, blocks and any(True for _ in child.children()))

    yield from descend(model, False)


def _managed(parameter: nn.Parameter, name: str) -> bool:
    """Only floating-point parameters move; others stay where they are, unless they would have to be trained."""
    if parameter.is_floating_point():
        if parameter.layout is not torch.strided:
            raise ConfigError(f"parameter {name} is {parameter.layout}; only dense parameters are supported")
        return True
    if parameter.requires_grad:
        raise ConfigError(f"parameter {name} is {parameter.dtype}; only floating-point parameters can be trained")
    return False


def _distinct(parameters: dict[str, nn.Parameter]) -> list[tuple[str, nn.Parameter]]:
    """Each parameter once, under its first name."""
    seen: dict[int, tuple[str, nn.Parameter]] = {}
    for name, parameter in parameters.items():
        seen.setdefault(id(parameter), (name, parameter))
    return list(seen.values())


def _unit(
    index: int,
    name: str,
    owner: nn.Module,
    parameters: list[tuple[str, nn.Parameter]],
    sites: dict[int, list[Site]],
    names: dict[nn.Module, str],
    unit_names: set[str],
) -> UnitSpec:
    specs: list[ParameterSpec] = []

    def lay_out(trainable: bool, start: int) -> int:
        """Place the parameters that are trainable, or those that are not; the end, rounded up to whole pages."""
        offset = start
        for full_name, p in parameters:
            if p.requires_grad is trainable:
                offset = _round_up(offset, GRAIN if p.numel() >= GRAIN else ALIGNMENT)
                specs.append(ParameterSpec(full_name, p.shape, p.numel(), offset, trainable, tuple(sites[id(p)])))
                offset += p.numel()
        return _round_up(offset, GRAIN)

    trainable_numel = lay_out(True, 0)
    numel = lay_out(False, trainable_numel)
    modules = tuple(dict.fromkeys([owner, *(site.module for spec in specs for site in spec.sites)]))
    depth = max(len(_units_around(names[module], unit_names) - {name}) for module in modules)
    return UnitSpec(index, name or "(root)", modules, tuple(specs), trainable_numel, numel, depth)


def _cuts(parameters: dict[nn.Module, list[tuple[str, nn.Parameter]]], sites: dict[int, list[Site]]) -> dict[int, Cut]:
    """What is to be cut, by the ``id`` of the parameter: units that are little but one large weight."""
    sizes = {owner: sum(p.numel() for _, p in group) for owner, group in parameters.items()}
    cuttable = {
        owner: (name, p)
        for owner, group in parameters.items()
        for name, p in group
        if p is owner._parameters.get("weight") and all(can_be_cut(*site) for site in sites[id(p)])
    }
    others = [size for owner, size in sizes.items() if owner not in cuttable]
    most = piece_numel([sizes[owner] for owner in cuttable], others)
    return {
        id(p): Cut(name, sites[id(p)], p.shape, most)
        for owner, (name, p) in cuttable.items()
        if sizes[owner] > 2 * most
    }


def _unit_of_piece(
    index: int, piece: Piece, trainable: bool, names: dict[nn.Module, str], unit_names: set[str]
) -> UnitSpec:
    rows = f"[{piece.start}:{piece.stop}]"
    shape = torch.Size([piece.stop - piece.start, *piece.cut.shape[1:]])
    spec = ParameterSpec(piece.cut.name + rows, shape, shape.numel(), 0, trainable, (Site(piece, "weight"),), piece)
    numel = _round_up(spec.numel, GRAIN)
    depth = max(len(_units_around(names[module], unit_names)) for module, _ in piece.cut.sites)
    name = (names[piece.cut.sites[0][0]] or "(root)") + rows
    return UnitSpec(index, name, (piece,), (spec,), numel if trainable else 0, numel, depth)


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple
