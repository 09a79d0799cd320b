"""Optimizers with a native kernel, which sweeps a tile ``[master | state | scales of state | state | ...]`` once."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import torch

from offload import kernels
from offload.dtypes import kernel_dtype
from offload.errors import ConfigError
from offload.memory import tensor_at
from offload.native_optimizers import NATIVE_OPTIMIZERS, Coef, NativeOptimizer
from offload.optim.formats import Formats
from offload.optim.loose_states import LooseStates
from offload.optim.moments import copy_moments, is_in_codes, num_blocks, scale_name
from offload.optim.rule import Group, SteppingParameter, TileBytes, TilePart
from offload.units import GRAIN, ParameterSpec, Tile, UnitSpec

_SCALE_BYTES = 4


DTYPES = {"fp32": kernels.Dtype.F32, "bf16": kernels.Dtype.BF16, "int8": kernels.Dtype.INT8}
MOMENTS = tuple(DTYPES)
TORCH_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "int8": torch.uint8}


class KernelRule(LooseStates):
    """A native kernel over tiles of any length. See ``Rule``."""

    repeatable = True
    is_watched = False
    replayable = True
    uniform = True
    is_one_kernel = True
    temporary_bytes = 0

    def __init__(
        self,
        kernel: NativeOptimizer,
        groups: list[Group],
        formats: Formats,
        dtypes: tuple[torch.dtype, torch.dtype],
        moments: str,
    ) -> None:
        """``dtypes`` are those of weights and gradients; ``moments`` is ``moments_dtype``."""
        self._kernel = kernel
        self._moments = moments
        longest = max((self._coefficients(group).states for group in groups), key=len, default=())
        self._names = longest
        self._formats = formats
        self._weight_dtype, self._grad_dtype = map(kernel_dtype, dtypes)
        self._dtype = DTYPES[moments]
        self._torch_dtype = TORCH_DTYPES[moments]
        super().__init__()
        self._last: tuple[Hashable, kernels.Native, Callable[[Tile, int, int, TileBytes], None]]
        self._last = None, kernels.on_host, lambda tile, start, stop, at: None
        """The step that was applied last, by what, and that prepared."""
        self._first_value = max((float(group.get("initial_accumulator_value", 0.0)) for group in groups), default=0.0)
        if self._first_value and moments == "int8":
            raise ConfigError("initial_accumulator_value needs moments_dtype fp32 or bf16, not int8")

    def products(self, unit: UnitSpec) -> float:
        return 0.0

    def tiles_of(self, unit: UnitSpec, tile_bytes: int) -> tuple[Tile, ...]:
        step = max(tile_bytes // max(self._nbytes(GRAIN), 1), 1) * GRAIN if self._nbytes(GRAIN) else unit.numel
        starts = range(0, unit.trainable_numel, step)
        stops = [min(start + step, unit.trainable_numel) for start in starts]
        return tuple(Tile(start, stop, self._nbytes(stop - start)) for start, stop in zip(starts, stops, strict=True))

    @property
    def identity(self) -> dict[str, Any]:
        name = next(name for name, kernel in NATIVE_OPTIMIZERS.items() if kernel is self._kernel)
        return {"optimizer": name, "states": list(self._names), "moments": self._moments, **self._formats.identity}

    def tile_between(self, unit: UnitSpec, start: int, stop: int) -> Tile:
        return Tile(start, stop, self._nbytes(stop - start))

    def parts(self, tile: Tile) -> Sequence[TilePart]:
        return ()

    def begin(self, tile: Tile, address: int) -> None:
        tensor_at(address, tile.nbytes, torch.uint8).zero_()
        if self._first_value:
            for name in self._names:
                tensor_at(address + self._offset(tile, name), tile.numel, self._torch_dtype).fill_(self._first_value)

    def master_offset(self, tile: Tile, element: int) -> int:
        return (element - tile.start) * self._formats.master

    def begin_step(self, stepping: Mapping[ParameterSpec, SteppingParameter]) -> None:
        pass

    def freeze(self, spec: ParameterSpec, group: Group, step: int, grad_scale: float) -> Hashable:
        coefficients = self._coefficients(group, step, grad_scale)
        unknown = set(coefficients.states) - set(self._names)
        if unknown:
            raise ConfigError(
                f"a parameter group now needs the state {', '.join(unknown)}, for which no room was reserved: "
                "set amsgrad or momentum in some group before the engine is made"
            )
        return coefficients

    def _coefficients(self, group: Group, step: int = 1, grad_scale: float = 1.0) -> Coef:
        try:
            return self._kernel.coefficients(group, step, grad_scale)
        except (ValueError, TypeError) as error:
            raise ConfigError(f"optimizer options cannot work: {error}") from None

    def check_options(self, spec: ParameterSpec, group: Group) -> None:
        self.freeze(spec, group, 1, 1.0)

    @property
    def device_unsupported_reason(self) -> str | None:
        """Reason why ``apply`` cannot run on a device, if it cannot."""
        return "8-bit moments are updated on the CPU" if self._dtype is kernels.Dtype.INT8 else None

    def apply(self, frozen: Hashable, tile: Tile, start: int, stop: int, at: TileBytes, native: kernels.Native) -> None:
        last = self._last
        if last[0] is not frozen or last[1] is not native:
            last = self._last = frozen, native, self._prepared(frozen, native)  # type: ignore[arg-type]  # of ``freeze``
        last[2](tile, start, stop, at)

    def _prepared(self, coef: Coef, native: kernels.Native) -> Callable[[Tile, int, int, TileBytes], None]:
        """``apply`` of this step: small units that follow one another have it in common."""
        run = kernels.prepare(coef, self._grad_dtype, self._weight_dtype, self._dtype, native)
        places = [(index, self._names.index(name)) for index, name in enumerate(coef.states)]
        master_bytes, itemsize = self._formats.master, self._dtype.itemsize
        is_split, in_codes = self._weight_dtype is kernels.Dtype.BF16, self._dtype is kernels.Dtype.INT8

        def apply(tile: Tile, start: int, stop: int, at: TileBytes) -> None:
            into, numel = start - tile.start, tile.stop - tile.start
            states, scales, rest, master = [0, 0, 0], [0, 0, 0], 0, 0
            first, each = at.states + numel * master_bytes, self._state_bytes(numel)
            for index, place in places:
                state = first + place * each
                states[index] = state + into * itemsize
                if in_codes:
                    scales[index] = state + numel * itemsize + into // kernels.CODE_BLOCK * _SCALE_BYTES
            if master_bytes and is_split:
                rest = at.states + self.master_offset(tile, start)
            elif master_bytes:
                master = at.states + self.master_offset(tile, start)
            weight_shift, states_shift = at.weights_before - at.weights, at.states_before - at.states
            run(stop - start, at.grads, at.weights, rest, master, states, scales, weight_shift, states_shift)

        return apply

    def states(self, tile: Tile, address: int, spec: ParameterSpec) -> dict[str, torch.Tensor]:
        start = max(spec.offset, tile.start) - tile.start
        stop = min(spec.offset + spec.numel, tile.stop) - tile.start
        if start >= stop:
            return {}
        views = {}
        for name in self._names:
            state = address + self._offset(tile, name)
            views[name] = tensor_at(state, tile.numel, self._torch_dtype)[start:stop]
            if self._dtype is kernels.Dtype.INT8:
                scales = tensor_at(
                    state + tile.numel * self._dtype.itemsize, tile.numel // kernels.CODE_BLOCK, torch.float32
                )
                views[scale_name(name)] = scales[start // kernels.CODE_BLOCK : num_blocks(stop)]
        return views

    def put_states(self, tile: Tile, address: int, spec: ParameterSpec, states: Mapping[str, Any], first: int) -> None:
        own = self.states(tile, address, spec)
        for name in self._names if own else ():
            start = max(spec.offset, tile.start, first)  # the start of a block: of a parameter, or of a tile
            stop = min(spec.offset + spec.numel, tile.stop, first + torch.as_tensor(states[name]).numel())
            if start < stop:
                copy_moments(name, own, start - max(spec.offset, tile.start), states, start - first, stop - first)

    def names(self, spec: ParameterSpec) -> tuple[str, ...]:
        scales = [scale_name(name) for name in self._names] if self._dtype is kernels.Dtype.INT8 else []
        return (*self._names, *scales)

    def shape(self, spec: ParameterSpec, name: str) -> torch.Size:
        return spec.shape if name in self._names else torch.Size([num_blocks(spec.numel)])

    def shapes_like(self, spec: ParameterSpec, states: Mapping[str, Any]) -> dict[str, torch.Size]:
        scales = [scale_name(name) for name in self._names if is_in_codes(name, states)]
        return {name: self.shape(spec, name) for name in (*self._names, *scales)}

    def _nbytes(self, numel: int) -> int:
        return numel * self._formats.master + len(self._names) * self._state_bytes(numel)

    def _state_bytes(self, numel: int) -> int:
        scales = numel // kernels.CODE_BLOCK * _SCALE_BYTES if self._dtype is kernels.Dtype.INT8 else 0
        return numel * self._dtype.itemsize + scales

    def _offset(self, tile: Tile, name: str) -> int:
        return tile.numel * self._formats.master + self._names.index(name) * self._state_bytes(tile.numel)
