"""Grouping of parameters that move together: the units of a model, found from its structure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import nn

from offload.errors import ConfigError
from offload.units.distributed_tensor import Distribution, distributions_in
from offload.units.overlap import check_memory_is_distinct
from offload.units.packed import Packing, packing_of
from offload.units.pieces import Piece, WeightInPieces, can_be_cut, piece_numel
from offload.units.spec import ALIGNMENT, GRAIN, ParameterSpec, Site, UnitSpec
from swapper import align

_UNIT_SHARE = 1 / 8
"""A module with at most this share of the model's parameters is one unit."""

_BLOCK_SHARE = 1 / 2
"""A repeated block may have up to this share."""


def find_units(
    model: nn.Module, *, in_pieces: bool = False, dtype: torch.dtype = torch.float32, num_ranks: int = 1
) -> list[UnitSpec]:
    """Cut ``model`` into units, in the order of ``model.named_parameters()``.

    Repeated blocks (children of one class in a ``ModuleList`` or ``Sequential``) are units; so is every other module
    that is small against the model; what a larger module owns itself is a unit of its own. With ``in_pieces`` a weight
    that is much larger than all other units may be cut into several: see ``offload.units.pieces``.
    ``dtype`` is that of the weights: what is quantised takes as many elements of it as its bytes fill.
    Units can be divided among ``num_ranks``: see ``offload.units.shard``.
    Raises ``ConfigError`` for a trainable parameter that is not a real floating-point tensor, for two that share
    memory, and for what ``packing_of`` and ``distributions_in`` refuse.
    """
    distributions = distributions_in(model)
    packings: dict[int, Packing] = {}
    for name, parameter in model.named_parameters():
        packing = None if id(parameter) in distributions else packing_of(name, parameter, dtype)
        if packing is not None:
            packings[id(parameter)] = packing
    check_memory_is_distinct(model.named_parameters())
    total = sum(p.numel() for p in model.parameters())
    owners = dict(_owners(model, total))
    sites: dict[int, list[Site]] = {}
    groups: dict[nn.Module, dict[str, nn.Parameter]] = {}
    claimed: dict[int, nn.Module] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise ConfigError(
                f"module {prefix or '(root)'} is a torch.jit.ScriptModule, whose compiled code keeps its parameters "
                "for itself: make the engine with the module that it was compiled from."
            )
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
    layout = _Layout(sites, packings, distributions, dtype, GRAIN * num_ranks, names)
    cuts = _cuts(parameters, layout) if in_pieces else {}
    rest = {owner: [item for item in group if id(item[1]) not in cuts] for owner, group in parameters.items()}
    layout.unit_names.update(names[owner] for owner in parameters if rest[owner])
    units: list[UnitSpec] = []
    for owner, group in parameters.items():
        if rest[owner]:
            units.append(_unit(len(units), owner, rest[owner], layout))
        for _, parameter in group:
            for piece in cuts[id(parameter)].pieces if id(parameter) in cuts else ():
                units.append(_unit_of_piece(len(units), piece, parameter.requires_grad, layout))
    return units


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


@dataclass(frozen=True)
class _Layout:
    """Knowledge of parameters, by their ``id``. ``dtype`` is that of the weights, ``multiple`` what the lengths of
    units are multiples of. ``names`` are those of all modules, ``unit_names`` of those that units are around."""

    sites: Mapping[int, Sequence[Site]]
    packings: Mapping[int, Packing]
    distributions: Mapping[int, Distribution]
    dtype: torch.dtype
    multiple: int
    names: Mapping[nn.Module, str]
    unit_names: set[str] = field(default_factory=set)

    def depth(self, module: nn.Module, but: str | None = None) -> int:
        """Number of units that are around a module or are the module itself, ``but`` one of this name."""
        parts = self.names[module].split(".") if self.names[module] else []
        around = {".".join(parts[:length]) for length in range(len(parts) + 1)}
        return len(self.unit_names & around - {but})

    def numel(self, parameter: nn.Parameter) -> int:
        """The elements of its unit that it takes."""
        packing = self.packings.get(id(parameter))
        return self._shape(parameter).numel() if packing is None else packing.nbytes // self.dtype.itemsize

    def spec(self, name: str, parameter: nn.Parameter, offset: int) -> ParameterSpec:
        """The parameter, laid out at this offset."""
        sites, numel, trainable = tuple(self.sites[id(parameter)]), self.numel(parameter), parameter.requires_grad
        packing, distribution = self.packings.get(id(parameter)), self.distributions.get(id(parameter))
        shape = self._shape(parameter)
        return ParameterSpec(name, shape, numel, offset, trainable, sites, packing=packing, distribution=distribution)

    def _shape(self, parameter: nn.Parameter) -> torch.Size:
        """Of what this rank has of it."""
        distribution = self.distributions.get(id(parameter))
        return parameter.shape if distribution is None else distribution.own_shape


def _unit(index: int, owner: nn.Module, parameters: list[tuple[str, nn.Parameter]], layout: _Layout) -> UnitSpec:
    name = layout.names[owner]
    specs: list[ParameterSpec] = []

    def lay_out(trainable: bool, start: int) -> int:
        """Place the parameters that are trainable, or those that are not; the end, rounded up to whole pages."""
        offset = start
        for full_name, p in parameters:
            if p.requires_grad is trainable:
                numel = layout.numel(p)
                in_no_tile = id(p) in layout.packings
                offset = align(offset, ALIGNMENT if numel < GRAIN or in_no_tile else GRAIN)
                specs.append(layout.spec(full_name, p, offset))
                offset += numel
        return align(offset, layout.multiple)

    trainable_numel = lay_out(True, 0)
    numel = lay_out(False, trainable_numel)
    modules = tuple(dict.fromkeys([owner, *(site.module for spec in specs for site in spec.sites)]))
    depth = max(layout.depth(module, but=name) for module in modules)
    return UnitSpec(index, name or "(root)", modules, tuple(specs), trainable_numel, numel, depth)


def _cuts(parameters: dict[nn.Module, list[tuple[str, nn.Parameter]]], layout: _Layout) -> dict[int, WeightInPieces]:
    """Weights that are to be cut, by the ``id`` of the parameter: units that are little but one large weight."""
    sites = layout.sites
    sizes = {owner: sum(layout.numel(p) for _, p in group) for owner, group in parameters.items()}
    cuttable = {
        owner: (name, p)
        for owner, group in parameters.items()
        for name, p in group
        if p is owner._parameters.get("weight") and id(p) not in layout.packings and id(p) not in layout.distributions
        if all(can_be_cut(*site) for site in sites[id(p)])
    }
    others = [size for owner, size in sizes.items() if owner not in cuttable]
    most = piece_numel([sizes[owner] for owner in cuttable], others)
    return {
        id(p): WeightInPieces(name, sites[id(p)], p.shape, most)
        for owner, (name, p) in cuttable.items()
        if sizes[owner] > 2 * most
    }


def _unit_of_piece(index: int, piece: Piece, trainable: bool, layout: _Layout) -> UnitSpec:
    rows = f"[{piece.start}:{piece.stop}]"
    shape = torch.Size([piece.stop - piece.start, *piece.whole.shape[1:]])
    spec = ParameterSpec(piece.whole.name + rows, shape, shape.numel(), 0, trainable, (Site(piece, "weight"),), piece)
    numel = align(spec.numel, layout.multiple)
    depth = max(layout.depth(module) for module, _ in piece.whole.sites)
    name = (layout.names[piece.whole.sites[0][0]] or "(root)") + rows
    return UnitSpec(index, name, (piece,), (spec,), numel if trainable else 0, numel, depth)
