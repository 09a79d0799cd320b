"""Experts: parts of a layer of which its router chooses few for a token. Each is a unit of its own.

They are found by shape and by use. Fused experts are a module's own parameters, one of which at least has three
dimensions, with a row for each expert: a class of ``transformers`` that takes an experts implementation, or a module
that is named. Separate ones are the modules of a named ``nn.ModuleList`` or ``nn.ModuleDict``. What is cut depends on
the model alone, so that the bits do not depend on a budget.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import nn

from offload.units.packed import Packing
from offload.units.pieces import WeightInPieces

EXPERTS = ("experts",)
"""Names that modules with experts have in published models."""


class Experts:
    """The experts of one layer: a use of them is one of some, which are not known before."""

    def __init__(self, name: str, module: nn.Module, count: int) -> None:
        self.name = name
        self.module = module
        self.count = count


class FusedExperts(Experts):
    """Experts whose weights are rows of common parameters."""

    def __init__(self, name: str, module: nn.Module, parameters: dict[str, nn.Parameter]) -> None:
        """``parameters``: those of the module, by the names that they have there."""
        super().__init__(name, module, next(iter(parameters.values())).shape[0])
        self.parameters = parameters

    def cut(
        self,
        sites: Mapping[int, Sequence[tuple[nn.Module, str]]],
        packings: Mapping[int, Packing],
        together: int = 1,
    ) -> list[WeightInPieces]:
        """A piece for each expert, or for so many ``together``, of each parameter; ``sites`` and ``packings`` are those
        of the parameters, by their ``id``."""
        prefix, count = f"{self.name}." if self.name else "", math.ceil(self.count / together)
        return [
            WeightInPieces(prefix + name, sites[id(of)], of.shape, count, packings.get(id(of)))
            for name, of in self.parameters.items()
        ]


class SeparateExperts(Experts):
    """Experts that are modules of their own."""

    def __init__(self, name: str, module: nn.ModuleList | nn.ModuleDict) -> None:
        super().__init__(name, module, len(module))


def find_experts(
    model: nn.Module, names: Sequence[str], *, fused: bool, whole: Collection[int], least: int
) -> Iterator[Experts]:
    """The experts of each layer that has some. ``names`` are last parts of modules' names, or ends of
    their classes', in any case of letters.

    ``fused``: parameters may be cut, except those whose ``id`` is in ``whole``, where an expert has ``least`` elements.
    """
    seen = set(whole)
    ends = tuple(name.lower() for name in names)
    for name, module in model.named_modules():
        is_named = name.rpartition(".")[2] in names or type(module).__name__.lower().endswith(ends)
        if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
            experts = list(module.children())
            numel = min((sum(p.numel() for p in expert.parameters()) for expert in experts), default=0)
            if is_named and len(experts) > 1 and len({type(e) for e in experts}) == 1 and numel >= least:
                yield SeparateExperts(name, module)
        elif fused and (is_named or takes_implementation(module)):
            parameters = _fused(module)
            numel = sum(parameter[0].numel() for parameter in parameters.values())
            if numel >= least and seen.isdisjoint(map(id, parameters.values())):
                seen.update(map(id, parameters.values()))
                yield FusedExperts(name, module, parameters)


def takes_implementation(module: nn.Module) -> bool:
    """Its class is one of ``transformers`` whose experts can be computed in several ways."""
    forward = getattr(type(module), "forward", None)  # compiled modules have none there
    return hasattr(forward, "__wrapped__") and hasattr(getattr(module, "config", None), "_experts_implementation")


def _fused(module: nn.Module) -> dict[str, nn.Parameter]:
    """The module's own parameters that have a row for each expert."""
    own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
    if not all(parameter.is_floating_point() and parameter.layout is torch.strided for parameter in own.values()):
        return {}
    counts = {parameter.shape[0] for parameter in own.values() if parameter.dim() == 3}
    if len(counts) != 1 or counts <= {0, 1}:
        return {}
    return {name: parameter for name, parameter in own.items() if parameter.dim() > 1 and parameter.shape[0] in counts}
