"""Optimizers of ours that look at a parameter as a whole (Muon, LAMB, Adam-mini), over tiles that hold whole ones."""

from __future__ import annotations

from collections.abc import Collection, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from offload import kernels
from offload.errors import ConfigError
from offload.optim.formats import Formats
from offload.optim.kernel_rule import TORCH_DTYPES
from offload.optim.loose_states import LooseStates
from offload.optim.matrix_steps import AdamMini, AdamW, Algorithm, Arrays, Lamb, Muon, Step
from offload.optim.moments import copy_moments, is_in_codes, num_blocks, scale_name
from offload.optim.rule import Group, SteppingParameter, TileBytes
from offload.optim.whole_parameters import Schema, WholeParameters
from offload.units import ParameterSpec, Tile, UnitSpec


@dataclass(frozen=True)
class MatrixOptimizer:
    """An optimizer that has one algorithm for matrices between embedding and head, and one for the rest.

    ``torch_class`` is the name of a class in ``torch.optim`` that does ``inner`` alone; "" if there is none.
    """

    inner: Algorithm
    others: Algorithm
    torch_class: str = ""

    def algorithms(
        self, specs: Sequence[ParameterSpec], whole: Collection[int] | None
    ) -> dict[ParameterSpec, Algorithm]:
        """Return the algorithm of each trained parameter. ``whole`` is what the method of this name gave for the
        model."""
        assert whole is not None or not self.others.takes_elements
        trained = [spec for spec in specs if spec.trainable]
        return {spec: self.inner if whole is None or id(spec.parameter) in whole else self.others for spec in trained}

    def whole(self, model: nn.Module) -> frozenset[int] | None:
        """Return the parameters of the model that ``inner`` takes, by their ``id``, since they must not be cut; None:
        all of them. Raises ``ConfigError`` for one that it cannot take.

        A parameter's own ``use_muon`` decides. Where it has none, an inner matrix is one that is no embedding, nor the
        last one with as many rows as an embedding has, nor vectors of stacked matrices, such as the biases of experts.
        """
        if not self.others.takes_elements:
            return None
        parameters = list(model.parameters())
        matrices = {id(parameter): parameter for parameter in parameters if parameter.ndim == 2}
        tables = [each._parameters.get("weight") for each in model.modules() if _is_embedding(each)]
        rows = {table.shape[0] for table in tables if table is not None}
        heads = {key for key in list(matrices)[-1:] if matrices[key].shape[0] in rows}
        vectors = {id(each) for module in model.modules() for each in _stacked_vectors(module)}
        inner = matrices.keys() - heads - vectors - set(map(id, tables))
        found = {id(parameter): parameter for parameter in parameters if _use_muon(parameter, id(parameter) in inner)}
        for name, parameter in model.named_parameters():
            if id(parameter) in found and parameter.ndim != 2:
                raise ConfigError(
                    f"parameter {name} {tuple(parameter.shape)} has use_muon=True, and Muon takes matrices alone: "
                    "set it to False"
                )
        return frozenset(found)


MATRIX_OPTIMIZERS: Mapping[str, MatrixOptimizer] = MappingProxyType(
    {
        "muon": MatrixOptimizer(Muon(), AdamW(), "Muon"),
        "adam_mini": MatrixOptimizer(AdamMini(), AdamMini()),
        "lamb": MatrixOptimizer(Lamb(), Lamb()),
    }
)
"""By the names in ``MATRIX_DEFAULTS``."""


@dataclass(frozen=True)
class _ParameterStep:
    """One parameter's step: equal to that of no other, so that each is taken by itself."""

    spec: ParameterSpec
    step: Step


class MatrixRule(LooseStates, WholeParameters):
    """Steps of whole parameters. See ``Rule``."""

    repeatable = True
    is_watched = False
    replayable = False
    uniform = False
    is_one_kernel = False
    device_unsupported_reason = "whole matrices are updated on the CPU"

    def __init__(
        self,
        name: str,
        algorithms: Mapping[ParameterSpec, Algorithm],
        formats: Formats,
        dtypes: tuple[torch.dtype, torch.dtype],
        moments: str,
    ) -> None:
        """``algorithms`` of all parameters that have a group. ``dtypes`` are those of weights and gradients;
        ``moments`` is ``moments_dtype``."""
        super().__init__(formats)
        self._name, self._algorithms, self._dtypes, self._moments = name, algorithms, dtypes, moments
        sizes = (algorithm.temporary_bytes(spec.shape, moments) for spec, algorithm in algorithms.items())
        self.temporary_bytes = max(sizes, default=0)

    @property
    def identity(self) -> dict[str, Any]:
        return {"optimizer": self._name, "moments": self._moments, **self._formats.identity}

    def products(self, unit: UnitSpec) -> float:
        return sum(self._algorithms[spec].products(spec.shape) for spec in unit.trainable)

    def begin_step(self, stepping: Mapping[ParameterSpec, SteppingParameter]) -> None:
        pass

    def freeze(self, spec: ParameterSpec, group: Group, step: int, grad_scale: float) -> Hashable:
        try:
            return _ParameterStep(spec, self._algorithms[spec].step(group, step, grad_scale))
        except (KeyError, ValueError, TypeError) as error:
            raise ConfigError(f"optimizer options cannot work: {error}") from None

    def check_options(self, spec: ParameterSpec, group: Group) -> None:
        self.freeze(spec, group, 1, 1.0)

    def apply(self, frozen: Hashable, tile: Tile, start: int, stop: int, at: TileBytes, native: kernels.Native) -> None:
        assert isinstance(frozen, _ParameterStep)
        spec = frozen.spec
        arrays = Arrays(
            shape=spec.shape,
            states=self.states(tile, at.states, spec),
            master=at.states + self._records[tile][spec].master,
            at=at,
            dtypes=self._dtypes,
            moments=self._moments,
            formats=self._formats,
            native=native,
        )
        frozen.step.apply(arrays)

    def put_states(self, tile: Tile, address: int, spec: ParameterSpec, states: Mapping[str, Any], first: int) -> None:
        own = self.states(tile, address, spec)  # a tile has all of the parameter
        for name in self._state_names(spec) if own else ():
            copy_moments(name, own, 0, states, 0, own[name].numel())

    def names(self, spec: ParameterSpec) -> tuple[str, ...]:
        return tuple(self._schema(spec))

    def shapes_like(self, spec: ParameterSpec, states: Mapping[str, Any]) -> dict[str, torch.Size]:
        names = self._state_names(spec)
        scales = {scale_name(name): torch.Size([num_blocks(spec.numel)]) for name in names if is_in_codes(name, states)}
        return {**{name: self.shape(spec, name) for name in names}, **scales}

    def _state_names(self, spec: ParameterSpec) -> tuple[str, ...]:
        return self._algorithms[spec].states if spec in self._algorithms else ()

    def _schema(self, spec: ParameterSpec) -> Schema:
        dtype, schema = TORCH_DTYPES[self._moments], {}
        for name in self._state_names(spec):
            shape = self._algorithms[spec].shape_of(name, spec.shape)
            if shape != spec.shape:  # a few numbers
                schema[name] = shape, torch.float32
                continue
            schema[name] = shape, dtype
            if dtype is torch.uint8:
                schema[scale_name(name)] = torch.Size([num_blocks(spec.numel)]), torch.float32
        return schema


def _use_muon(parameter: nn.Parameter, otherwise: bool) -> bool:
    return bool(getattr(parameter, "use_muon", otherwise))


def _stacked_vectors(module: nn.Module) -> Iterator[nn.Parameter]:
    """Parameters with a row for each of the matrices that another one of the module stacks."""
    own = list(module.parameters(recurse=False))
    stacks = {parameter.shape[0] for parameter in own if parameter.ndim == 3}
    return (parameter for parameter in own if parameter.ndim == 2 and parameter.shape[0] in stacks)


def _is_embedding(module: nn.Module) -> bool:
    return isinstance(module, (nn.Embedding, nn.EmbeddingBag))
