"""The kernels' text for GPUs, without one: NVRTC compiles it, and compiled for the host it has the bits of the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from gpu_emulator import Emulator

from offload.kernels import AdagradCoef, AdamCoef, Dtype, LionCoef, SgdCoef, adagrad, adam, lion, sgd, sum_squares
from offload.kernels._native import SQUARES_BLOCK, SQUARES_LANES
from offload.kernels.gpu import _FORMATS, _RULES, GpuKernels, Program
from offload.kernels.nvrtc import CompilerMissing, compile_kernels

HYPER = {"lr": 1e-3, "weight_decay": 0.01, "grad_scale": 0.37}


@pytest.fixture(scope="module")
def emulated(tmp_path_factory: pytest.TempPathFactory) -> GpuKernels:
    return GpuKernels(Emulator(tmp_path_factory.mktemp("gpu")))


ADAM = {**HYPER, "beta1": 0.9, "beta2": 0.999, "eps": 1e-8}
MOMENTS = ["exp_avg", "exp_avg_sq"]
F32, BF16, F16 = Dtype.F32, Dtype.BF16, Dtype.F16
# Function, coefficients, states; how the weight is kept, dtypes of gradients and states.
CASES: list[tuple[Callable[..., None], Any, list[str], str, Dtype, Dtype]] = [
    (adam, AdamCoef(**ADAM, step=3), MOMENTS, "split", BF16, F32),
    (adam, AdamCoef(**ADAM, step=3, decoupled=False), [*MOMENTS, "max_exp_avg_sq"], "out_f16", F32, F32),
    (adam, AdamCoef(**ADAM, step=1), MOMENTS, "f32", F32, BF16),
    (adagrad, AdagradCoef(**HYPER, lr_decay=0.1, eps=1e-10, step=2), ["sum"], "f32", F32, F32),
    (lion, LionCoef(**HYPER, beta1=0.9, beta2=0.99, step=2), ["exp_avg"], "split", F32, F32),
    (sgd, SgdCoef(**HYPER, momentum=0.0, dampening=0.0, step=2), [], "out_f16", F16, F32),
    (sgd, SgdCoef(**HYPER, momentum=0.9, dampening=0, step=2, nesterov=True), ["momentum_buffer"], "split", BF16, F32),
]


@pytest.mark.parametrize(("optimizer", "coef", "names", "form", "grad", "state"), CASES)
@pytest.mark.parametrize("numel", [1, 255, 5000])
def test_an_update_has_the_bits_of_the_cpu(
    emulated: GpuKernels,
    guarded: Callable[..., Any],
    awkward: Callable[[int, int], Any],
    optimizer: Callable[..., None],
    coef: Any,
    names: list[str],
    form: str,
    grad: Dtype,
    state: Dtype,
    numel: int,
) -> None:
    def run(**who: Any) -> list[Any]:
        def array(seed: int, dtype: Dtype) -> Any:
            bits = awkward(numel, seed)
            return guarded(bits if dtype is Dtype.F32 else (bits >> 16).astype(np.uint16))

        weight_dtype = {"split": Dtype.BF16, "out_f16": Dtype.F16, "f32": Dtype.F32}[form]
        arrays = {"grad": array(1, grad), "weight": array(2, weight_dtype)}
        if form == "split":
            arrays["rest"] = array(3, Dtype.BF16)
        elif form == "out_f16":
            arrays["master"] = array(3, Dtype.F32)
        arrays |= {name: array(4 + k, state) for k, name in enumerate(names)}
        addresses = {name: guard.address for name, guard in arrays.items()}
        dtypes = {"grad_dtype": grad, "weight_dtype": weight_dtype, "moments_dtype": state}
        optimizer(coef, numel, **addresses, **dtypes, **who)
        return [guard.values.copy() for guard in arrays.values()]

    for ours, cpu in zip(run(native=emulated.kernel), run(), strict=True):
        np.testing.assert_array_equal(ours, cpu)


def test_sums_of_squares_have_the_bits_of_the_cpu(emulated: GpuKernels) -> None:
    numels = [5, SQUARES_BLOCK, 1, 0, 3 * SQUARES_BLOCK + 17]
    blocks = [-(-numel // SQUARES_BLOCK) for numel in numels]
    source = np.random.default_rng(0).normal(0, 1e-3, sum(numels)).astype(np.float32)
    starts = np.cumsum([0, *numels[:-1]])
    firsts = np.cumsum([0, *blocks[:-1]])
    ranges = np.stack([starts, numels, firsts], axis=1).astype(np.int64)
    lanes = np.full((sum(blocks), SQUARES_LANES), math.nan)
    sums = np.full(len(numels), math.nan)
    emulated.sum_squares(
        Dtype.F32,
        source.ctypes.data,
        ranges.ctypes.data,
        len(numels),
        lanes.ctypes.data,
        sum(blocks),
        sums.ctypes.data,
    )
    for start, numel, found in zip(starts, numels, sums, strict=True):
        assert found == sum_squares(source.ctypes.data + 4 * int(start), numel, Dtype.F32)


@pytest.mark.parametrize("rule", _RULES.values())
@pytest.mark.parametrize("form", _FORMATS)
def test_nvrtc_compiles_it(rule: str, form: str) -> None:
    try:
        for version in ("13", "12"):
            try:
                binary = compile_kernels(version, "sm_90", Program(rule, "bf16", form, "f32").definitions())
                break
            except CompilerMissing as error:
                missing = error
        else:
            raise missing
    except CompilerMissing as error:
        if "is not installed" not in str(error):
            raise
        pytest.skip(str(error))
    assert binary.startswith(b"\x7fELF")
    for function in (b"update", b"square_lanes", b"square_blocks", b"square_ranges"):
        assert function in binary
