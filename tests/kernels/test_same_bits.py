"""Every instruction set that this processor has gives the bits of the scalar kernels, and writes nothing else."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from offload.kernels import (
    CODE_BLOCK,
    Dtype,
    OnHost,
    _kernels,
    accumulate,
    always,
    convert,
    decode,
    dequantize,
    encode,
    join_master,
    round_randomly,
    split_master,
    sum_squares,
    twist,
    update,
)
from offload.native_optimizers import AdagradCoef, AdamCoef, Coef, LionCoef, SgdCoef

ISAS = [isa for isa in _kernels.isas_supported() if isa != "scalar"] or ["scalar"]
LENGTHS = [*range(0, 36), 255, 256, 257, 515, 1000]  # to beyond two of the widest vectors; code blocks
NUMBERS = [Dtype.F32, Dtype.BF16, Dtype.F16]
FORMATS: list[Any] = ["f32", "split", "bf16", *NUMBERS]  # the last three: a master, and a weight of it written out

HYPER = {"lr": 1e-3, "weight_decay": 0.01, "grad_scale": 0.37}
BETAS = {"beta1": 0.9, "beta2": 0.999}
ADAM = {**HYPER, **BETAS, "eps": 1e-8}
OPTIMIZERS: dict[str, Callable[[int], Coef]] = {
    "adamw": lambda step: AdamCoef(**ADAM, step=step),
    "adam": lambda step: AdamCoef(**ADAM, step=step, decoupled=False, maximize=True),
    "adamw_amsgrad": lambda step: AdamCoef(**ADAM, step=step, amsgrad=True),
    "adam_amsgrad": lambda step: AdamCoef(**ADAM, step=step, decoupled=False, amsgrad=True),
    "adagrad": lambda step: AdagradCoef(**HYPER, lr_decay=0.1, eps=1e-10, step=step),
    "lion": lambda step: LionCoef(**HYPER, **BETAS, step=step),
    "sgd": lambda step: SgdCoef(**HYPER, momentum=0, dampening=0, step=step),
    "sgd_momentum": lambda step: SgdCoef(**HYPER, momentum=0.9, dampening=0.2, step=step),
    "sgd_nesterov": lambda step: SgdCoef(**HYPER, momentum=0.9, dampening=0, nesterov=True, step=step),
}


def as_dtype(bits: Any, dtype: Dtype) -> Any:
    """The same numbers; cut to the upper half where there is only half the room, so F16 gets patterns of its own."""
    return bits if dtype is Dtype.F32 else (bits >> 16).astype(np.uint16)


def run(guarded: Any, awkward: Any, name: str, numel: int, formats: Any, steps: Any, num_threads: int) -> list[Any]:
    """Run steps of an optimizer on awkward numbers; return all that it wrote, as bits."""
    grad_dtype, weight_format, state_dtype = formats
    coef = OPTIMIZERS[name]
    arrays: dict[str, Any] = {"grad": guarded(as_dtype(awkward(numel, 1), grad_dtype))}
    master = awkward(numel, 2)
    weight_dtype = weight_format
    if weight_format == "f32":
        weight_dtype, arrays["weight"] = Dtype.F32, guarded(master)
    elif weight_format == "split":
        weight_dtype, arrays["weight"] = Dtype.BF16, guarded(as_dtype(master, Dtype.BF16))
        arrays["rest"] = guarded((master & 0xFFFF).astype(np.uint16))
    elif weight_format == "bf16":
        weight_dtype, arrays["weight"] = Dtype.BF16, guarded(as_dtype(master, Dtype.BF16))
    else:
        arrays["master"], arrays["weight"] = guarded(master), guarded(as_dtype(master, weight_dtype))
    for index, state in enumerate(coef(1).states):
        bits = awkward(numel, 3 + index)
        if state in ("exp_avg_sq", "max_exp_avg_sq", "sum"):
            bits = bits & 0x7FFFFFFF
        if state_dtype is Dtype.INT8:
            arrays[state] = guarded((bits >> 16 & 0xFF).astype(np.uint8))
            arrays[f"{state}_scale"] = guarded(np.full(-(-numel // CODE_BLOCK), 0.01, np.float32).view(np.uint32))
        else:
            arrays[state] = guarded(as_dtype(bits, state_dtype))
    for step in steps:
        update(
            coef(step),
            numel,
            grad_dtype=grad_dtype,
            weight_dtype=weight_dtype,
            moments_dtype=state_dtype,
            native=OnHost(always(num_threads)),
            **{key: array.address for key, array in arrays.items()},
        )
    return [array.values for key, array in arrays.items() if key != "grad"]


def assert_same(ours: list[Any], scalar: list[Any]) -> None:
    for a, b in zip(ours, scalar, strict=True):
        np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_in_every_format_has_the_bits_of_scalar(
    name: str, isa: str, guarded: Any, awkward: Any, use_isa: Any
) -> None:
    states = [Dtype.F32, Dtype.BF16, Dtype.INT8]
    for formats in itertools.product(NUMBERS, FORMATS, states):
        use_isa("scalar")
        expected = run(guarded, awkward, name, 515, formats, (1, 2), 1)
        use_isa(isa)
        assert_same(run(guarded, awkward, name, 515, formats, (1, 2), 1), expected)


@pytest.mark.each_value
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("state_dtype", [Dtype.F32, Dtype.BF16, Dtype.INT8])
def test_every_length_has_the_bits_of_scalar(
    state_dtype: Dtype, isa: str, guarded: Any, awkward: Any, use_isa: Any
) -> None:
    for numel, weight_format in itertools.product(LENGTHS, FORMATS):
        formats = (Dtype.BF16, weight_format, state_dtype)
        use_isa("scalar")
        expected = run(guarded, awkward, "adamw", numel, formats, (1, 10**6), 1)
        use_isa(isa)
        assert_same(run(guarded, awkward, "adamw", numel, formats, (1, 10**6), 1), expected)


@pytest.mark.parametrize("name", ["adamw", "lion"])
@pytest.mark.parametrize(
    ("weight_format", "state_dtype"), [("split", Dtype.F32), ("bf16", Dtype.BF16), ("split", Dtype.INT8)]
)
def test_the_number_of_threads_changes_no_bit(
    name: str, weight_format: str, state_dtype: Dtype, guarded: Any, awkward: Any
) -> None:
    formats = (Dtype.BF16, weight_format, state_dtype)
    expected = run(guarded, awkward, name, 100_003, formats, (1, 2, 3), 1)
    for num_threads in (2, 3, 64):
        assert_same(run(guarded, awkward, name, 100_003, formats, (1, 2, 3), num_threads), expected)


@pytest.mark.parametrize("state_dtype", [Dtype.F32, Dtype.BF16, Dtype.INT8])
def test_the_size_of_tiles_changes_no_bit(state_dtype: Dtype, awkward: Any) -> None:
    numel = 5000
    coef = AdamCoef(**HYPER, **BETAS, eps=1e-8, step=7)

    def run_in_tiles(tile: int) -> list[Any]:
        itemsize = state_dtype.itemsize
        weight_dtype = Dtype.BF16 if state_dtype is Dtype.BF16 else Dtype.F32  # rounded at random, too
        grad, weight = awkward(numel, 1), as_dtype(awkward(numel, 2), weight_dtype)
        states = [np.full(numel * itemsize, 3, np.uint8) for _ in range(2)]
        scales = [np.full(numel // CODE_BLOCK + 1, 0.01, np.float32) for _ in range(2)]
        for start in range(0, numel, tile):
            update(
                coef,
                min(tile, numel - start),
                grad=grad.ctypes.data + 4 * start,
                grad_dtype=Dtype.F32,
                weight=weight.ctypes.data + weight_dtype.itemsize * start,
                weight_dtype=weight_dtype,
                exp_avg=states[0].ctypes.data + itemsize * start,
                exp_avg_sq=states[1].ctypes.data + itemsize * start,
                exp_avg_scale=scales[0].ctypes.data + 4 * (start // CODE_BLOCK),
                exp_avg_sq_scale=scales[1].ctypes.data + 4 * (start // CODE_BLOCK),
                moments_dtype=state_dtype,
            )
        return [weight, *states, *(scale.view(np.uint32) for scale in scales)]

    expected = run_in_tiles(numel)
    for tile in (CODE_BLOCK, 3 * CODE_BLOCK) if state_dtype is Dtype.INT8 else (1, 7, 256, 1001):
        assert_same(run_in_tiles(tile), expected)


@pytest.mark.each_value
@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("function", [accumulate, convert])
def test_accumulate_and_convert_have_the_bits_of_scalar(
    function: Any, isa: str, guarded: Any, awkward: Any, use_isa: Any
) -> None:
    for to, source_dtype, numel in itertools.product(NUMBERS, NUMBERS, [*LENGTHS, 20_000]):
        written = []
        for use in ("scalar", isa):
            use_isa(use)
            destination = guarded(as_dtype(awkward(numel, 1), to))
            source = guarded(as_dtype(awkward(numel, 2), source_dtype))
            function(numel, destination.address, to, source.address, source_dtype, num_threads=2)
            written.append([destination.values])
        assert_same(written[1], written[0])


@pytest.mark.parametrize("isa", ISAS)
def test_random_rounding_has_the_bits_of_scalar(isa: str, guarded: Any, awkward: Any, use_isa: Any) -> None:
    for numel in (*LENGTHS, 40_000):
        written = []
        for use, num_threads in (("scalar", 1), (isa, 3)):
            use_isa(use)
            destination, source = guarded(np.zeros(numel, np.uint16)), guarded(awkward(numel, 1))
            round_randomly(numel, destination.address, source.address, step=9, num_threads=num_threads)
            written.append([destination.values])
        assert_same(written[1], written[0])


@pytest.mark.parametrize("isa", ISAS)
def test_split_and_join_have_the_bits_of_scalar(isa: str, guarded: Any, awkward: Any, use_isa: Any) -> None:
    for numel in LENGTHS:
        written = []
        for use in ("scalar", isa):
            use_isa(use)
            master, again = guarded(awkward(numel, 1)), guarded(np.zeros(numel, np.uint32))
            weight, rest = guarded(np.zeros(numel, np.uint16)), guarded(np.zeros(numel, np.uint16))
            split_master(numel, master.address, weight.address, rest.address)
            join_master(numel, again.address, weight.address, rest.address)
            written.append([weight.values, rest.values, again.values])
        assert_same(written[1], written[0])


@pytest.mark.parametrize("dtype", NUMBERS)
def test_sum_squares_has_the_same_bits_for_every_isa_and_number_of_threads(
    dtype: Dtype, guarded: Any, use_isa: Any
) -> None:
    rng = np.random.default_rng(0)
    for numel in [*LENGTHS, 16_384, 16_385, 200_001]:
        values = rng.normal(0, 1, numel).astype(np.float32).view(np.uint32)
        array = guarded(as_dtype(values, dtype))
        sums = set()
        for isa, num_threads in itertools.product(_kernels.isas_supported(), (1, 2, 5)):
            use_isa(isa)
            sums.add(sum_squares(array.address, numel, dtype, num_threads).hex())
        assert len(sums) == 1


def test_an_isa_can_be_asked_for_and_one_that_the_processor_lacks_is_a_clear_error() -> None:
    def start(isa: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", "from offload.kernels import ISA; print(ISA)"]
        environment = {**os.environ, "OFFLOAD_ISA": isa, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        return subprocess.run(command, env=environment, capture_output=True, text=True)

    for isa in _kernels.isas_supported():
        assert start(isa).stdout.strip() == isa
    assert start("").stdout.strip() == _kernels.isas_supported()[0]
    wrong = start("altivec")
    assert wrong.returncode != 0
    supported = ", ".join(_kernels.isas_supported())
    assert f"OFFLOAD_ISA='altivec' is none of the instruction sets that this CPU and this build have: {supported}" in (
        wrong.stderr
    )


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("signed", [True, False])
def test_numbers_become_codes_and_codes_numbers_with_the_bits_of_scalar(
    isa: str, signed: bool, guarded: Any, awkward: Any, use_isa: Any
) -> None:
    def there_and_back(numel: int, num_threads: int) -> list[Any]:
        bits = awkward(numel, 1)
        bits[: numel // 2] &= 0x3FFFFFFF  # a block with an infinity or a NaN shows nothing but that
        bits[: numel // 2] |= 0x30000000
        numbers, decoded = guarded(bits), guarded(np.full(numel, 7, np.uint32))
        codes = guarded(np.full(numel, 3, np.uint8))
        scales = guarded(np.full(-(-numel // CODE_BLOCK), 9, np.uint32))
        encode(numel, codes.address, scales.address, numbers.address, signed=signed, num_threads=num_threads)
        decode(numel, decoded.address, codes.address, scales.address, signed=signed, num_threads=num_threads)
        assert (numbers.values == bits).all()
        return [codes.values, scales.values, decoded.values]

    for numel in (*LENGTHS, 40_000):
        use_isa("scalar")
        expected = there_and_back(numel, 1)
        use_isa(isa)
        assert_same(there_and_back(numel, 1 if numel < 40_000 else 3), expected)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", NUMBERS)
def test_4_bit_codes_become_numbers_with_the_bits_of_scalar(
    isa: str, dtype: Dtype, guarded: Any, awkward: Any, use_isa: Any
) -> None:
    def numbers(numel: int, per_scale: int, num_threads: int) -> list[Any]:
        given = guarded(np.arange(-(-numel // 2), dtype=np.uint64).astype(np.uint8) * 37)
        scales, pairs = guarded(awkward(-(-numel // per_scale), 1)), guarded(awkward(512, 2))
        written = guarded(as_dtype(np.full(numel, 7 << 16, np.uint32), dtype))
        dequantize(numel, written.address, dtype, given.address, scales.address, per_scale, pairs.address, num_threads)
        given.check()
        return [written.values]

    for numel, per_scale in ((0, 1), (1, 2), (35, 32), (257, 16), (515, 64), (1000, 7), (40_000, 32), (70_000, 16_385)):
        use_isa("scalar")
        expected = numbers(numel, per_scale, 1)
        use_isa(isa)
        assert_same(numbers(numel, per_scale, 3), expected)


@pytest.mark.parametrize("isa", ISAS)
def test_the_twister_is_moved_on_alike_and_as_numpy_moves_it(isa: str, use_isa: Any) -> None:
    expected = np.random.RandomState(7)
    begin = expected.get_state()[1]
    expected.bytes(3 * 624 * 4)
    for use in ("scalar", isa):
        use_isa(use)
        words = begin.astype(np.uint32)
        twist(words.ctypes.data, 3)
        assert (words == expected.get_state()[1]).all(), use
    with pytest.raises(ValueError, match="words"):
        twist(words.ctypes.data + 1, 1)
