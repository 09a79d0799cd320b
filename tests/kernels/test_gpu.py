"""The kernels' text for GPUs, without one: compiled for the host it has the bits of the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_emulator import Emulator

from offload.kernels import Dtype, sum_squares, update
from offload.kernels._native import SQUARES_BLOCK, SQUARES_LANES
from offload.kernels.gpu import GpuKernels
from offload.native_optimizers import AdagradCoef, AdamCoef, Coef, LionCoef, SgdCoef

HYPER = {"lr": 1e-3, "weight_decay": 0.01, "grad_scale": 0.37}


@pytest.fixture
def emulated() -> GpuKernels:
    return GpuKernels(Emulator())


ADAM = {**HYPER, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
MOMENTS = ["exp_avg", "exp_avg_sq"]
F32, BF16, F16 = Dtype.F32, Dtype.BF16, Dtype.F16
# Coefficients; how the weight is kept, dtypes of gradients and states.
CASES: list[tuple[Coef, str, Dtype, Dtype]] = [
    (AdamCoef(**ADAM, step=3), "split", BF16, F32),
    (AdamCoef(**ADAM, step=3, decoupled=False, amsgrad=True), "out_f16", F32, F32),
    (AdamCoef(**ADAM, step=1), "f32", F32, BF16),
    (AdamCoef(**ADAM, step=2, amsgrad=True), "bf16", BF16, BF16),
    (LionCoef(**HYPER, beta1=0.9, beta2=0.99, step=5), "bf16", F32, F32),
    (AdagradCoef(**HYPER, lr_decay=0.1, eps=1e-10, step=2), "f32", F32, F32),
    (LionCoef(**HYPER, beta1=0.9, beta2=0.99, step=2), "split", F32, F32),
    (SgdCoef(**HYPER, momentum=0.0, dampening=0.0, step=2), "out_f16", F16, F32),
    (SgdCoef(**HYPER, momentum=0.9, dampening=0, step=2, nesterov=True), "split", BF16, F32),
]


@pytest.mark.each_value
@pytest.mark.parametrize(("coef", "form", "grad", "state"), CASES)
@pytest.mark.parametrize(
    ("numel", "elements_past"), [(1, 1), (255, 1), (5000, 1), (3, 0), (4, 0), (4099, 0), (4096, 4)]
)
def test_an_update_has_the_bits_of_the_cpu(
    emulated: GpuKernels,
    guarded: Callable[..., Any],
    awkward: Callable[[int, int], Any],
    coef: Coef,
    form: str,
    grad: Dtype,
    state: Dtype,
    numel: int,
    elements_past: int,
) -> None:
    """``elements_past``: past an address at which four elements are one access."""

    def run(**who: Any) -> list[Any]:
        def array(seed: int, dtype: Dtype) -> Any:
            bits = awkward(numel, seed)
            return guarded(bits if dtype is Dtype.F32 else (bits >> 16).astype(np.uint16), elements_past)

        weight_dtype = {"split": BF16, "bf16": BF16, "out_f16": F16, "f32": F32}[form]
        arrays = {"grad": array(1, grad), "weight": array(2, weight_dtype)}
        if form == "split":
            arrays["rest"] = array(3, Dtype.BF16)
        elif form == "out_f16":
            arrays["master"] = array(3, Dtype.F32)
        arrays |= {name: array(4 + k, state) for k, name in enumerate(coef.states)}
        addresses = {name: guard.address for name, guard in arrays.items()}
        dtypes = {"grad_dtype": grad, "weight_dtype": weight_dtype, "moments_dtype": state}
        update(coef, numel, **addresses, **dtypes, **who)
        return [guard.values.copy() for guard in arrays.values()]

    for ours, cpu in zip(run(native=emulated.kernel), run(), strict=True):
        np.testing.assert_array_equal(ours, cpu)


def test_one_array_that_is_not_aligned_is_enough(
    emulated: GpuKernels, guarded: Callable[..., Any], awkward: Callable[[int, int], Any]
) -> None:
    outcomes = []
    for who in ({"native": emulated.kernel}, {}):
        arrays = {name: guarded(awkward(64, seed), seed == 2) for seed, name in enumerate(("grad", "weight", *MOMENTS))}
        addresses = {name: array.address for name, array in arrays.items()}
        update(AdamCoef(**ADAM, step=3), 64, **addresses, grad_dtype=F32, weight_dtype=F32, **who)
        outcomes.append([array.values.copy() for array in arrays.values()])
    np.testing.assert_array_equal(*outcomes)


NUMELS = {
    "short": [5, SQUARES_BLOCK, 1, 0, 3 * SQUARES_BLOCK + 17],
    "many": [257 * SQUARES_BLOCK + 3, 700],  # more blocks than threads that add them up
    "of an engine": [SQUARES_BLOCK + 1000, 300, 2 * SQUARES_BLOCK],
}


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("kind", "dtype", "alignment"),
    [
        ("short", F32, 1),
        ("short", BF16, 1),
        ("many", BF16, 1),
        *(("of an engine", dtype, 256) for dtype in (F32, BF16, F16)),
    ],
)
def test_sums_of_squares_have_the_bits_of_the_cpu(
    emulated: GpuKernels, kind: str, dtype: Dtype, alignment: int
) -> None:
    numels = NUMELS[kind]
    starts = np.cumsum([0, *(-(-numel // alignment) * alignment for numel in numels)])
    blocks = [-(-numel // SQUARES_BLOCK) for numel in numels]
    values = np.random.default_rng(0).normal(0, 1e-3, starts[-1]).astype(np.float32).view(np.uint32)
    source = values if dtype is F32 else (values >> 16).astype(np.uint16)
    sums = sums_of(emulated, source, dtype, np.stack([starts[:-1], numels, np.cumsum([0, *blocks[:-1]])], axis=1))
    for start, numel, found in zip(starts, numels, sums, strict=False):
        assert found == sum_squares(source.ctypes.data + dtype.itemsize * int(start), numel, dtype)


@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_what_is_not_finite_shows_in_its_own_sum(emulated: GpuKernels, value: float) -> None:
    source = np.ones(2 * SQUARES_BLOCK, dtype=np.float32)
    source[100] = value
    rows = np.array([[0, SQUARES_BLOCK, 0], [SQUARES_BLOCK, SQUARES_BLOCK, 1]])
    sums = sums_of(emulated, source, F32, rows)
    assert not math.isfinite(sums[0]) and sums[1] == SQUARES_BLOCK


def sums_of(emulated: GpuKernels, source: Any, dtype: Dtype, rows: Any) -> Any:
    ranges = rows.astype(np.int64)
    num_blocks = int(sum(-(-rows[:, 1] // SQUARES_BLOCK)))
    lanes = np.full((num_blocks, SQUARES_LANES), math.nan)
    sums = np.full(len(rows), math.nan)
    addresses = (ranges.ctypes.data, len(rows), lanes.ctypes.data, num_blocks, sums.ctypes.data)
    emulated.sum_squares(dtype, source.ctypes.data, *addresses)
    return sums
