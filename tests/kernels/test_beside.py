"""Updates that write elsewhere than they read have the bits of those in place, and write nothing else."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest

from offload.kernels import CODE_BLOCK, Dtype, OnHost, _kernels, always, update
from offload.native_optimizers import AdamCoef, LionCoef, SgdCoef

COEFS = {
    "adamw_amsgrad": AdamCoef(lr=1e-3, weight_decay=0.01, beta1=0.9, beta2=0.99, eps=1e-8, step=3, amsgrad=True),
    "lion": LionCoef(lr=1e-3, weight_decay=0.01, beta1=0.9, beta2=0.99, step=3),
    "sgd": SgdCoef(lr=1e-3, weight_decay=0.01, momentum=0, dampening=0, step=3),
}
FORMATS: list[Any] = ["f32", "split", "bf16", Dtype.F32, Dtype.BF16, Dtype.F16]
GUARD = 64


def arrays_of(coef: Any, numel: int, weight_format: Any, state_dtype: Dtype) -> dict[str, int]:
    """Bytes of each array that an update writes, by name; the weight first."""
    if weight_format == "f32":
        arrays = {"weight": 4 * numel}
    elif weight_format == "split":
        arrays = {"weight": 2 * numel, "rest": 2 * numel}
    elif weight_format == "bf16":
        arrays = {"weight": 2 * numel}
    else:
        arrays = {"weight": weight_format.itemsize * numel, "master": 4 * numel}
    for state in coef.states:
        arrays[state] = state_dtype.itemsize * numel
        if state_dtype is Dtype.INT8:
            arrays[f"{state}_scale"] = 4 * -(-numel // CODE_BLOCK)
    return arrays


def assert_beside_is_in_place(
    name: str, numel: int, weight_format: Any, state_dtype: Dtype, *, num_threads: int = 1, by: tuple[int, int] = (1, 1)
) -> None:
    """``by``: the weight goes elsewhere, and all else does; 0: in place."""
    coef = COEFS[name]
    sizes = arrays_of(coef, numel, weight_format, state_dtype)
    ends = list(itertools.accumulate((GUARD + (-(-size // 4) * 4) for size in sizes.values()), initial=GUARD))
    rng = np.random.default_rng(numel)
    old = (rng.random(ends[-1] // 4 + 1, np.float32) * 0.1).view(np.uint8)
    expected, new = old.copy(), np.full_like(old, 0x5A)
    kept = old.copy()
    grad = rng.standard_normal(numel).astype(np.float32)
    weight_dtype = {"f32": Dtype.F32, "split": Dtype.BF16, "bf16": Dtype.BF16}.get(weight_format, weight_format)

    def run(target: Any, source: Any) -> None:
        places = {key: start + target.ctypes.data for key, start in zip(sizes, ends, strict=False)}
        shift = source.ctypes.data - target.ctypes.data
        update(
            coef, numel, grad=grad.ctypes.data, grad_dtype=Dtype.F32, weight_dtype=weight_dtype,
            moments_dtype=state_dtype, native=OnHost(always(num_threads)),
            weight_shift=shift * by[0], states_shift=shift * by[1], **places,
        )  # fmt: skip

    run(expected, expected)
    untouched = np.ones(len(old), bool)
    for index, (start, size) in enumerate(zip(ends, sizes.values(), strict=False)):
        written = slice(start, start + size)
        untouched[written] = False
        if not by[min(index, 1)]:
            new[written] = old[written]
    run(new, old)
    np.testing.assert_array_equal(new[~untouched], expected[~untouched])
    assert (new[untouched] == 0x5A).all(), "nothing else is written"
    np.testing.assert_array_equal(old, kept, "what is current stays as it is")


@pytest.mark.parametrize("isa", _kernels.isas_supported())
@pytest.mark.parametrize("name", COEFS)
def test_an_update_beside_has_the_bits_of_one_in_place(name: str, isa: str, use_isa: Any) -> None:
    use_isa(isa)
    for weight_format, state_dtype in itertools.product(FORMATS, (Dtype.F32, Dtype.BF16, Dtype.INT8)):
        assert_beside_is_in_place(name, 1333, weight_format, state_dtype)


@pytest.mark.parametrize("numel", [0, 1, 3, 255, 4095, 4096, 4097, 16384 + 4096 + 5, 3 * 16384])
def test_pieces_of_every_length_are_written_whole(numel: int) -> None:
    for state_dtype in (Dtype.F32, Dtype.INT8):
        assert_beside_is_in_place("adamw_amsgrad", numel, "split", state_dtype, num_threads=3)


@pytest.mark.parametrize("by", [(1, 0), (0, 1)])
def test_weights_may_go_elsewhere_alone_and_so_may_states(by: tuple[int, int]) -> None:
    for weight_format in FORMATS:
        assert_beside_is_in_place("adamw_amsgrad", 5000, weight_format, Dtype.F32, by=by)
