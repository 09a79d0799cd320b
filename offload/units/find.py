"""Grouping of parameters that move together: the units of a model, found from its structure."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple, TypeAlias

import torch
from torch import nn

from offload.errors import ConfigError
from offload.units.distributed_tensor import Distribution, distributions_in
from offload.units.experts import EXPERTS, Experts, FusedExperts, SeparateExperts, find_experts
from offload.units.overlap import check_memory_is_distinct
from offload.units.packed import Packing, packing_of
from offload.units.pieces import Piece, WeightInPieces, can_be_cut, num_pieces, piece_numel
from offload.units.spec import ALIGNMENT, GRAIN, ParameterSpec, Site, UnitSpec
from offload.units.wrapped import Wrapping, wrappings_in
from swapper import align

_UNIT_SHARE = 1 / 8
"""A module with at most this share of the model's parameters is one unit."""

_BLOCK_SHARE = 1 / 2
"""A repeated block may have up to this share."""


def find_units(
    model: nn.Module,
    *,
    whole: Collection[int] | None = None,
    dtype: torch.dtype = torch.float32,
    num_ranks: int = 1,
    experts: Sequence[str] = EXPERTS,
    most_experts: int | None = None,
) -> list[UnitSpec]:
    """Cut ``model`` into units, in the order of ``model.named_parameters()``.

    Repeated blocks (children of one class in a ``ModuleList`` or ``Sequential``) are units; so is every other module
    that is small against the model; what a larger module owns itself is a unit of its own. A weight that
    is much larger than all other units is cut into several, unless its ``id`` is in ``whole`` (None: none is cut): see
    ``offload.units.pieces``. Each expert is a unit; ``experts`` are names of modules that have some: see
    ``offload.units.experts``. Of more fused ones than ``most_experts`` several are one unit, as many as its ``count``
    says.
    ``dtype`` is that of the weights: what is quantised takes as many elements of it as its bytes fill.
    Units can be divided among ``num_ranks``: see ``offload.units.shard``.
    Raises ``ConfigError`` for a trainable parameter that is not a real floating-point tensor, for two that share
    memory, and for what ``packing_of`` and ``distributions_in`` refuse.
    """
    outers: dict[int, Distribution | Wrapping] = {**wrappings_in(model), **distributions_in(model)}
    packings = _packings(model, outers, dtype)
    check_memory_is_distinct(model.named_parameters())
    kept = {*outers, *(id_ for id_, packing in packings.items() if not packing.has_rows), *(whole or ())}
    of_layers = list(find_experts(model, experts, fused=whole is not None, whole=kept, least=GRAIN * num_ranks))
    fused = {of.module: of for of in of_layers if isinstance(of, FusedExperts)}
    in_rows = {id(parameter) for of in fused.values() for parameter in of.parameters.values()}
    separate: dict[nn.Module, Experts] = {
        expert: of for of in of_layers if isinstance(of, SeparateExperts) for expert in of.module.children()
    }
    sites, groups = _groups(model, dict(_owners(model, separate, in_rows)), fused, in_rows)
    names = {module: name for name, module in model.named_modules()}
    parameters = {owner: _distinct(group) for owner, group in groups.items() if isinstance(owner, nn.Module)}
    num_fused = sum(of.count for of in fused.values())
    together = math.ceil(num_fused / most_experts) if most_experts is not None else 1
    layout = _Layout(sites, packings, outers, dtype, GRAIN * num_ranks, names)
    cuts = {} if whole is None else _cuts(parameters, layout, whole)
    rest = {owner: [item for item in group if id(item[1]) not in cuts] for owner, group in parameters.items()}
    layout.unit_names.update(names[owner] for owner in parameters if rest[owner])
    units: list[UnitSpec] = []
    for owner in groups:
        if isinstance(owner, FusedExperts):
            units += _units_of_experts(len(units), owner, together, layout)
            continue
        if rest[owner]:
            units.append(replace(_unit(len(units), owner, rest[owner], layout), experts=separate.get(owner)))
        for _, parameter in parameters[owner]:
            for piece in cuts[id(parameter)].pieces if id(parameter) in cuts else ():
                units.append(_unit_of_pieces(len(units), [piece], [parameter], layout))
    return units


def _packings(model: nn.Module, outers: Collection[int], dtype: torch.dtype) -> dict[int, Packing]:
    """By the ``id`` of each parameter that is quantised."""
    packings = {}
    for name, parameter in model.named_parameters():
        packing = None if id(parameter) in outers else packing_of(name, parameter, dtype)
        if packing is not None:
            packings[id(parameter)] = packing
    return packings


_Groups: TypeAlias = dict[nn.Module | FusedExperts, dict[str, nn.Parameter]]
"""Parameters by name, by the owner of their unit. Those of fused experts are not named: each unit has rows of all."""


def _groups(
    model: nn.Module,
    owners: Mapping[nn.Module, nn.Module],
    fused: Mapping[nn.Module, FusedExperts],
    in_rows: Collection[int],
) -> tuple[dict[int, list[Site]], _Groups]:
    """Sites of each parameter, by its ``id``, and the parameters of each unit, in the order of the model. A parameter
    with several sites belongs to the owner of the first."""
    sites: dict[int, list[Site]] = {}
    groups: _Groups = {}
    claimed: dict[int, nn.Module] = {}
    for prefix, module in model.named_modules():
        if isinstance(module, torch.jit.ScriptModule) and any(True for _ in module.parameters()):
            raise ConfigError(
                f"module {prefix or '(root)'} is a torch.jit.ScriptModule, whose compiled code keeps its parameters "
                "for itself: make the engine with the module that it was compiled from."
            )
        for name, parameter in module._parameters.items():
            full_name = f"{prefix}.{name}" if prefix else name
            if parameter is None or not _managed(parameter, full_name):
                continue
            sites.setdefault(id(parameter), []).append(Site(module, name))
            if id(parameter) not in in_rows:
                if claimed.setdefault(id(parameter), owners[module]) is owners[module]:
                    groups.setdefault(owners[module], {}).setdefault(full_name, parameter)
            elif module in fused:
                groups.setdefault(fused[module], {})
    return sites, groups


def _owners(
    model: nn.Module, separate: Collection[nn.Module], in_rows: Collection[int]
) -> Iterator[tuple[nn.Module, nn.Module]]:
    """Each module, once, with the module that stands for its unit. ``separate`` experts have units of their own, and so
    have parameters whose ``id`` is ``in_rows``: neither counts for those around them."""
    seen: set[nn.Module] = set()
    """A module may stand in several others, and in those that it contains."""
    apart = {*in_rows, *(id(parameter) for expert in separate for parameter in expert.parameters())}

    def size(module: nn.Module) -> int:
        return sum(p.numel() for p in module.parameters() if id(p) not in apart)

    def assign(module: nn.Module, unit: nn.Module) -> Iterator[tuple[nn.Module, nn.Module]]:
        if module in seen:
            return
        seen.add(module)
        unit = module if module in separate else unit
        yield module, unit
        for child in module.children():
            yield from assign(child, unit)

    def descend(module: nn.Module, repeated: bool) -> Iterator[tuple[nn.Module, nn.Module]]:
        container = isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict))
        share = _BLOCK_SHARE if repeated else _UNIT_SHARE
        if not container and size(module) <= share * total:
            yield from assign(module, module)
            return
        if module in seen:
            return
        seen.add(module)
        yield module, module
        children = list(module.children())
        classes = [type(child) for child in children]
        for child in children:
            blocks = isinstance(module, (nn.ModuleList, nn.Sequential)) and classes.count(type(child)) > 1
            yield from descend(child, blocks and any(True for _ in child.children()))

    total = size(model)
    yield from descend(model, False)


_COMPLEX = ": make torch.view_as_real(value).clone() the parameter, and use torch.view_as_complex(parameter) in forward"


def _managed(parameter: nn.Parameter, name: str) -> bool:
    """Only floating-point parameters move; others stay where they are, unless they would have to be trained."""
    if parameter.is_floating_point():
        if parameter.layout is not torch.strided:
            raise ConfigError(f"parameter {name} is {parameter.layout}; only dense parameters are supported")
        return True
    if parameter.requires_grad:
        way = _COMPLEX if parameter.is_complex() else ""
        raise ConfigError(f"parameter {name} is {parameter.dtype}; only floating-point parameters can be trained{way}")
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
    outers: Mapping[int, Distribution | Wrapping]
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
        packing, outer = self.packings.get(id(parameter)), self.outers.get(id(parameter))
        shape = self._shape(parameter)
        return ParameterSpec(name, shape, numel, offset, trainable, sites, packing=packing, outer=outer)

    def _shape(self, parameter: nn.Parameter) -> torch.Size:
        """Of what this rank has of it."""
        outer = self.outers.get(id(parameter))
        return parameter.shape if outer is None else outer.own_shape


def _unit(index: int, owner: nn.Module, parameters: list[tuple[str, nn.Parameter]], layout: _Layout) -> UnitSpec:
    name = layout.names[owner]
    laid_out = [
        _LaidOut(layout.numel(p), p.requires_grad, id(p) in layout.packings, partial(layout.spec, full_name, p))
        for full_name, p in parameters
    ]
    specs, trainable_numel, numel = _lay_out(laid_out, layout.multiple)
    modules = tuple(dict.fromkeys([owner, *(site.module for spec in specs for site in spec.sites)]))
    depth = max(layout.depth(module, but=name) for module in modules)
    return UnitSpec(index, name or "(root)", modules, specs, trainable_numel, numel, depth)


class _LaidOut(NamedTuple):
    """Something that takes ``numel`` elements of a unit. ``at`` makes its spec, with this offset."""

    numel: int
    trainable: bool
    in_no_tile: bool
    at: Callable[[int], ParameterSpec]


def _lay_out(items: Sequence[_LaidOut], multiple: int) -> tuple[tuple[ParameterSpec, ...], int, int]:
    """Place what is trainable, then what is not; the specs, and where each of the two ends, in whole pages."""
    specs: list[ParameterSpec] = []
    ends: list[int] = []
    offset = 0
    for trainable in (True, False):
        for item in items:
            if item.trainable is trainable:
                offset = align(offset, ALIGNMENT if item.numel < GRAIN or item.in_no_tile else GRAIN)
                specs.append(item.at(offset))
                offset += item.numel
        offset = align(offset, multiple)
        ends.append(offset)
    return tuple(specs), ends[0], ends[1]


def _cuts(
    parameters: dict[nn.Module, list[tuple[str, nn.Parameter]]], layout: _Layout, whole: Collection[int]
) -> dict[int, WeightInPieces]:
    """Weights that are to be cut, by the ``id`` of the parameter: units that are little but one large weight. Those in
    ``whole`` are not."""
    sites = layout.sites
    sizes = {owner: sum(layout.numel(p) for _, p in group) for owner, group in parameters.items()}
    cuttable = {
        owner: (name, p)
        for owner, group in parameters.items()
        for name, p in group
        if p is owner._parameters.get("weight") and id(p) not in {*layout.packings, *layout.outers, *whole}
        if all(can_be_cut(*site) for site in sites[id(p)])
    }
    others = [size for owner, size in sizes.items() if owner not in cuttable]
    most = piece_numel([sizes[owner] for owner in cuttable], others)
    return {
        id(p): WeightInPieces(name, sites[id(p)], p.shape, num_pieces(p.shape, most))
        for owner, (name, p) in cuttable.items()
        if sizes[owner] > 2 * most
    }


def _units_of_experts(first: int, experts: FusedExperts, together: int, layout: _Layout) -> Iterator[UnitSpec]:
    """A unit for each expert, or for so many ``together``: its rows of all parameters."""
    parameters = list(experts.parameters.values())
    wholes = experts.cut(layout.sites, layout.packings, max(together, 1))
    for row, pieces in enumerate(zip(*(whole.pieces for whole in wholes), strict=True)):
        unit = _unit_of_pieces(first + row, pieces, parameters, layout)
        yield replace(unit, experts=experts, count=pieces[0].stop - pieces[0].start)


def _unit_of_pieces(
    index: int, pieces: Sequence[Piece], parameters: Sequence[nn.Parameter], layout: _Layout
) -> UnitSpec:
    """The unit of a piece, or of the same rows of several parameters."""

    def laid_out_of(piece: Piece, trainable: bool) -> _LaidOut:
        shape = torch.Size([piece.stop - piece.start, *piece.whole.shape[1:]])
        whole = piece.whole.packing
        packing = None if whole is None else whole.rows(piece.start, piece.stop)
        numel = shape.numel() if packing is None else packing.nbytes // layout.dtype.itemsize

        def spec(offset: int) -> ParameterSpec:
            return ParameterSpec(piece.whole.name + rows, shape, numel, offset, trainable, (), piece, packing)

        return _LaidOut(numel, trainable, packing is not None, spec)

    rows = f"[{pieces[0].start}:{pieces[0].stop}]"
    laid_out = [
        laid_out_of(piece, parameter.requires_grad) for piece, parameter in zip(pieces, parameters, strict=True)
    ]
    specs, trainable_numel, numel = _lay_out(laid_out, layout.multiple)
    owners = {module for piece in pieces for module, _ in piece.whole.sites}
    depth = max(layout.depth(module) for module in owners)
    name = (layout.names[pieces[0].whole.sites[0][0]] or "(root)") + rows
    return UnitSpec(index, name, (), specs, trainable_numel, numel, depth)
