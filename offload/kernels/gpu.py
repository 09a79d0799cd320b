"""The kernels over a GPU's memory: which program runs them, and what it is launched with."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from ._native import SQUARES_LANES, Dtype
from ._update import Kernel, Sweep

_THREADS = 256
"""Of one block of a launch: ``kRangeThreads`` in src/device.cu."""

_EACH = 4
"""Elements that a thread updates: ``kEach`` in src/device.cu."""

_GROUPS = 4
"""Blocks of a sum of squares that a block of threads works on, a thread a lane: ``kGroups`` in src/device.cu."""

_FORMATS = ("f32", "split", "out_f32", "out_bf16", "out_f16", "bf16")
"""``WeightFormat`` in src/arrays.h."""


@dataclass(frozen=True)
class Program:
    """Types that src/device.cu is compiled for."""

    rule: str
    """The name of a kernel in ``OFFLOAD_RULES``, src/rules.h."""
    grad: str
    weight_format: str
    state: str

    def definitions(self) -> tuple[str, ...]:
        """The macros that say so."""
        return (
            f"OFFLOAD_RULE=offload::rules::{self.rule}",
            f"OFFLOAD_GRAD={self.grad}",
            f"OFFLOAD_FORMAT={self.weight_format}",
            f"OFFLOAD_STATE={self.state}",
        )


Launch = Callable[[Program, str, int, int, Sequence[Any]], None]
"""Starts so many blocks, of so many threads each, of the function of this name of a program, with these arguments."""


class _Arrays(ctypes.Structure):
    """``Arrays`` in src/arrays.h."""

    _fields_ = (
        ("grad", ctypes.c_void_p),
        ("weight", ctypes.c_void_p),
        ("rest", ctypes.c_void_p),
        ("master", ctypes.c_void_p),
        ("states", ctypes.c_void_p * 3),
        ("scales", ctypes.c_void_p * 3),
        ("grad_dtype", ctypes.c_int),
        ("weight_format", ctypes.c_int),
        ("state_dtype", ctypes.c_int),
        ("seed", ctypes.c_uint32),
    )


class GpuKernels:
    """The kernels, given to ``launch``. All addresses are of device memory, and what is launched runs later."""

    def __init__(self, launch: Launch) -> None:
        self._launch = launch

    def kernel(self, name: str) -> Kernel:
        """The kernel that the native module has under this name. States in 8 bits have none."""
        return partial(self._update, name)

    def sum_squares(
        self, dtype: Dtype, source: int, ranges: int, num_ranges: int, lanes: int, num_blocks: int, sums: int
    ) -> None:
        """The sum of squares of each of several ranges of ``source``, with the bits of ``offload.kernels.sum_squares``.

        Shapes:  ``ranges`` is int64, (num_ranges, 3): start, numel, and the first of the range's blocks among
                 ``num_blocks``; ``lanes`` is fp64, (num_blocks, SQUARES_LANES); ``sums`` is fp64, (num_ranges,).
        Effects: writes ``lanes`` and ``sums``.
        """
        if num_ranges == 0:
            return
        program = Program("sgd", _name(dtype), "f32", "f32")
        source_, ranges_, lanes_, sums_ = map(ctypes.c_void_p, (source, ranges, lanes, sums))
        of_all = [source_, ranges_, ctypes.c_size_t(num_ranges), ctypes.c_size_t(num_blocks), lanes_]
        if num_blocks:
            self._launch(program, "square_lanes", -(-num_blocks // _GROUPS), _GROUPS * SQUARES_LANES, of_all)
        self._launch(program, "square_ranges", num_ranges, _THREADS, [ranges_, lanes_, sums_])

    def _update(self, rule: str, sweep: Sweep) -> None:
        grad, state = _name(Dtype(sweep.grad_dtype)), _name(Dtype(sweep.state_dtype))
        program = Program(rule, grad, _FORMATS[sweep.weight_format], state)
        arrays = _Arrays(
            sweep.grad, sweep.weight, sweep.rest, sweep.master, tuple(sweep.states), tuple(sweep.scales),
            sweep.grad_dtype, sweep.weight_format, sweep.state_dtype, sweep.seed,
        )  # fmt: skip
        constants = (ctypes.c_float * len(sweep.constants))(*sweep.constants)
        if sweep.numel:
            num_blocks = -(-sweep.numel // (_EACH * _THREADS))
            self._launch(program, "update", num_blocks, _THREADS, [constants, arrays, ctypes.c_size_t(sweep.numel)])


def _name(dtype: Dtype) -> str:
    return dtype.name.lower()
