"""What the kernels compute: formats, non-finite numbers, denormals, and the edges of the coefficients."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

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
    update,
)
from offload.native_optimizers import AdamCoef, LionCoef, SgdCoef

TORCH_DTYPES = {Dtype.F32: torch.float32, Dtype.BF16: torch.bfloat16, Dtype.F16: torch.float16}
MOMENTS = ("exp_avg", "exp_avg_sq")
CANONICAL_NAN = {Dtype.F32: 0x7FC00000, Dtype.BF16: 0x7FC0, Dtype.F16: 0x7E00}


def bits_of(tensor: torch.Tensor) -> Any:
    return tensor.view(torch.int32 if tensor.dtype == torch.float32 else torch.int16).numpy()


@pytest.mark.parametrize("to", TORCH_DTYPES)
@pytest.mark.parametrize("source_dtype", TORCH_DTYPES)
def test_convert_rounds_as_torch_does_and_makes_nans_canonical(source_dtype: Dtype, to: Dtype, awkward: Any) -> None:
    if source_dtype is Dtype.F32:
        source = torch.from_numpy(awkward(100_000, 5).view(np.float32))
    else:  # all there are
        source = torch.from_numpy(np.arange(65_536, dtype=np.uint16).view(np.int16)).view(TORCH_DTYPES[source_dtype])
    expected, ours = source.to(TORCH_DTYPES[to]), torch.empty(source.numel(), dtype=TORCH_DTYPES[to])
    convert(source.numel(), ours.data_ptr(), to, source.data_ptr(), source_dtype)
    finite = ~expected.isnan().numpy()
    np.testing.assert_array_equal(bits_of(ours)[finite], bits_of(expected)[finite])
    assert (bits_of(ours)[~finite] == CANONICAL_NAN[to]).all()
    assert not finite.all()


def test_accumulate_adds_in_fp32() -> None:
    total, part = torch.randn(1000), torch.randn(1000).bfloat16()
    expected = total + part.float()
    accumulate(1000, total.data_ptr(), Dtype.F32, part.data_ptr(), Dtype.BF16)
    assert torch.equal(total, expected)


@pytest.mark.parametrize("numel", [0, 1, 17, 16_384, 50_001])
@pytest.mark.parametrize("bring", [convert, accumulate])
def test_what_brings_a_gradient_returns_the_sum_of_its_squares(bring: Any, numel: int) -> None:
    torch.manual_seed(1)
    total, part = torch.randn(numel), torch.randn(numel).bfloat16()
    once = bring(numel, total.data_ptr(), Dtype.F32, part.data_ptr(), Dtype.BF16, num_threads=2)
    assert once == sum_squares(total.data_ptr(), numel, Dtype.F32)
    if numel:
        total[-1] = float("inf")
        assert bring(numel, total.data_ptr(), Dtype.F32, total.clone().data_ptr(), Dtype.F32) == float("inf")


def test_split_master_is_lossless_but_for_nan_payloads(awkward: Any) -> None:
    """A sample with all awkward kinds; scripts/prove_split_master.py goes through all 2^32 patterns."""
    edges = np.array([high << 16 | low for high in range(0, 65_536, 17) for low in (0, 1, 0x7FFF, 0x8000, 0xFFFF)])
    master = np.concatenate([awkward(200_000, 6), edges.astype(np.uint32)])
    weight, rest, again = np.zeros(len(master), np.uint16), np.zeros(len(master), np.uint16), np.zeros_like(master)
    split_master(len(master), master.ctypes.data, weight.ctypes.data, rest.ctypes.data)
    join_master(len(master), again.ctypes.data, weight.ctypes.data, rest.ctypes.data)
    nan = np.isnan(master.view(np.float32))
    np.testing.assert_array_equal(again[~nan], master[~nan])
    assert (again[nan] == CANONICAL_NAN[Dtype.F32]).all() and (weight[nan] == CANONICAL_NAN[Dtype.BF16]).all()
    np.testing.assert_array_equal(weight[~nan], ((master[~nan].astype(np.uint64) + 0x8000) >> 16).astype(np.uint16))


def test_sum_squares_is_exact_enough_and_finite_exactly_if_all_elements_are() -> None:
    values = torch.randn(100_003)
    total = sum_squares(values.data_ptr(), values.numel(), Dtype.F32)
    assert total == pytest.approx(float((values.double() ** 2).sum()), rel=1e-13)
    largest = torch.full((40_000,), torch.finfo(torch.float32).max)
    assert np.isfinite(sum_squares(largest.data_ptr(), 40_000, Dtype.F32))
    for index in (0, 7, 16_384, 100_002):
        for bad in (float("inf"), float("-inf"), float("nan")):
            spoilt = values.clone()
            spoilt[index] = bad
            assert not np.isfinite(sum_squares(spoilt.data_ptr(), spoilt.numel(), Dtype.F32, 2))


def step_adam(coef: Any, grad: torch.Tensor, state: dict[str, torch.Tensor], **formats: Any) -> None:
    update(
        coef,
        grad.numel(),
        grad=grad.data_ptr(),
        grad_dtype=next(dtype for dtype, torch_dtype in TORCH_DTYPES.items() if torch_dtype == grad.dtype),
        **{name: tensor.data_ptr() for name, tensor in state.items()},
        **formats,
    )


def fresh(numel: int, seed: int = 0) -> dict[str, torch.Tensor]:
    weight = torch.randn(numel, generator=torch.Generator().manual_seed(seed))
    return {"weight": weight, "exp_avg": torch.zeros(numel), "exp_avg_sq": torch.zeros(numel)}


COEF = AdamCoef(lr=1e-2, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, step=1, grad_scale=0.25)


def test_all_weight_formats_take_the_same_steps() -> None:
    """The master has the same bits however it is kept, and the weight beside it is its rounding."""
    numel = 1000
    plain, split = fresh(numel), fresh(numel)
    split_weight, rest = torch.empty(numel, dtype=torch.bfloat16), torch.empty(numel, dtype=torch.int16)
    split_master(numel, split["weight"].data_ptr(), split_weight.data_ptr(), rest.data_ptr())
    split |= {"weight": split_weight, "rest": rest}
    beside: dict[Dtype, dict[str, torch.Tensor]] = {}
    for dtype, torch_dtype in TORCH_DTYPES.items():
        beside[dtype] = fresh(numel)
        beside[dtype] |= {"master": beside[dtype]["weight"], "weight": torch.zeros(numel, dtype=torch_dtype)}
    for step in range(1, 6):
        grad = torch.randn(numel).bfloat16()
        coef = replace(COEF, step=step)
        step_adam(coef, grad, plain, weight_dtype=Dtype.F32)
        step_adam(coef, grad, split, weight_dtype=Dtype.BF16)
        for dtype, state in beside.items():
            step_adam(coef, grad, state, weight_dtype=dtype)
    joined = torch.empty(numel)
    join_master(numel, joined.data_ptr(), split_weight.data_ptr(), rest.data_ptr())
    assert torch.equal(joined, plain["weight"]) and torch.equal(split["exp_avg_sq"], plain["exp_avg_sq"])
    for dtype, state in beside.items():
        assert torch.equal(state["master"], plain["weight"])
        assert torch.equal(state["weight"], plain["weight"].to(TORCH_DTYPES[dtype]))


def test_the_gradient_scale_multiplies_each_element_once() -> None:
    grad = torch.randn(100)
    scaled, before = fresh(100), fresh(100)
    step_adam(COEF, grad, scaled, weight_dtype=Dtype.F32)
    step_adam(replace(COEF, grad_scale=1.0), grad * 0.25, before, weight_dtype=Dtype.F32)
    assert all(torch.equal(scaled[name], before[name]) for name in before)


def test_a_zero_learning_rate_moves_the_moments_and_not_the_weight() -> None:
    state = fresh(100)
    weight = state["weight"].clone()
    step_adam(replace(COEF, lr=0.0), torch.randn(100), state, weight_dtype=Dtype.F32)
    assert torch.equal(state["weight"], weight) and state["exp_avg"].all()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_a_non_finite_gradient_shows_and_stays_in_its_element(bad: float) -> None:
    grad, state, clean = torch.randn(100), fresh(100), fresh(100)
    step_adam(COEF, grad, clean, weight_dtype=Dtype.F32)
    grad[37] = bad
    step_adam(COEF, grad, state, weight_dtype=Dtype.F32)
    assert bits_of(state["weight"])[37] == CANONICAL_NAN[Dtype.F32]
    others = torch.arange(100) != 37
    assert all(torch.equal(state[name][others], clean[name][others]) for name in state)


@pytest.mark.parametrize("num_threads", [1, 2])
def test_denormals_are_kept_even_where_the_caller_flushes_them(num_threads: int) -> None:
    numel = 100_000
    grad, state = torch.full((numel,), 1e-38), fresh(numel)
    torch.set_flush_denormal(True)
    try:
        step_adam(COEF, grad, state, weight_dtype=Dtype.F32, native=OnHost(always(num_threads)))
    finally:
        torch.set_flush_denormal(False)
    expected = np.float32(np.float32(1e-38) * np.float32(0.25)) * np.float64(np.float32(1 - 0.9))
    assert 0 < expected < np.finfo(np.float32).tiny
    assert (state["exp_avg"] == float(np.float32(expected))).all()


def test_step_one_million_has_no_bias_correction_left() -> None:
    state, grad = fresh(100), torch.randn(100)
    weight = state["weight"].clone()
    step_adam(replace(COEF, weight_decay=0.0, step=10**6, grad_scale=1.0), grad, state, weight_dtype=Dtype.F32)
    expected = weight - 1e-2 * state["exp_avg"] / (state["exp_avg_sq"].sqrt() + 1e-8)
    assert torch.allclose(state["weight"], expected, rtol=1e-6, atol=1e-6)


def test_int8_moments_follow_fp32_ones_closely() -> None:
    """Over 300 steps of a noisy quadratic: inexact, but the weights end where those with fp32 moments do."""
    numel, steps = 4096, 300
    exact, coded = fresh(numel), fresh(numel)
    coded |= {"exp_avg": torch.zeros(numel, dtype=torch.uint8), "exp_avg_sq": torch.zeros(numel, dtype=torch.uint8)}
    for name in ("exp_avg_scale", "exp_avg_sq_scale"):
        coded[name] = torch.zeros(numel // CODE_BLOCK)
    random = torch.Generator().manual_seed(1)
    target, curvature = torch.randn(numel, generator=random), torch.logspace(-3, 3, numel)
    start = (exact["weight"] - target).abs().mean()
    for step in range(1, steps + 1):
        coef = replace(COEF, weight_decay=0.0, step=step, grad_scale=1.0)
        noise = torch.randn(numel, generator=random) * 0.1
        for state, formats in ((exact, {}), (coded, {"moments_dtype": Dtype.INT8})):
            grad = curvature * (state["weight"] - target + noise)
            step_adam(coef, grad, state, weight_dtype=Dtype.F32, **formats)
    error_exact, error_coded = ((state["weight"] - target).abs().mean() for state in (exact, coded))
    assert error_exact < 0.1 * start
    assert error_coded < 1.1 * error_exact


def test_int8_codes_are_within_an_eighth_and_right_on_average() -> None:
    """With both betas zero the moments are the gradient and its square: what codes make of them, over many steps."""
    numel, steps = 2 * CODE_BLOCK + 77, 400
    grad = torch.randn(numel) * torch.logspace(-3, 1, numel)
    state = fresh(numel)
    codes = {"exp_avg": torch.zeros(numel, dtype=torch.uint8), "exp_avg_sq": torch.zeros(numel, dtype=torch.uint8)}
    scales = {"exp_avg_scale": torch.zeros(3), "exp_avg_sq_scale": torch.zeros(3)}
    sums = {"exp_avg": torch.zeros(numel), "exp_avg_sq": torch.zeros(numel)}
    block = torch.arange(numel) // CODE_BLOCK
    for step in range(1, steps + 1):
        coef = AdamCoef(lr=1e-3, beta1=0.0, beta2=0.0, eps=1e-8, weight_decay=0.0, step=step)
        step_adam(coef, grad, state | codes | scales, weight_dtype=Dtype.F32, moments_dtype=Dtype.INT8)
        code, scale = codes["exp_avg"].int(), scales["exp_avg_scale"][block]
        magnitude = torch.ldexp(1 + (code % 8) / 8, (code & 0x7F) // 8 - 14) - 2.0**-14
        signed = torch.where(code < 128, magnitude, -magnitude) * scale
        assert ((signed - grad).abs() <= grad.abs() / 8 + scale * 2.0**-17).all()
        code, scale = codes["exp_avg_sq"].int(), scales["exp_avg_sq_scale"][block]
        unsigned = torch.ldexp(1 + (code % 8) / 8, code // 8 - 30) * scale
        assert ((unsigned - grad**2).abs() <= grad**2 / 8 + scale * 2.0**-30).all()
        sums["exp_avg"] += signed / steps
        sums["exp_avg_sq"] += unsigned / steps
    for name, exact in (("exp_avg", grad), ("exp_avg_sq", grad**2)):
        large = grad.abs() > 1e-3 * grad.abs().max()
        error = (sums[name] / exact - 1)[large]
        assert error.abs().max() < 0.02 and error.mean().abs() < 0.002


def test_codes_of_numbers_are_those_of_an_update_and_numbers_of_codes_keep_their_values() -> None:
    """With both betas zero the moments are the gradient and its square."""
    numel = 3 * CODE_BLOCK + 77
    grad = torch.randn(numel, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 1, numel)
    grad[CODE_BLOCK : 2 * CODE_BLOCK] = 0
    coef = AdamCoef(lr=1e-3, beta1=0.0, beta2=0.0, eps=1e-8, weight_decay=0.0, step=1)
    for name, signed, numbers in (("exp_avg", True, grad), ("exp_avg_sq", False, grad * grad)):
        state = fresh(numel)
        state |= {key: torch.zeros(numel, dtype=torch.uint8) for key in ("exp_avg", "exp_avg_sq")}
        state |= {f"{key}_scale": torch.zeros(4) for key in ("exp_avg", "exp_avg_sq")}
        step_adam(coef, grad, state, weight_dtype=Dtype.F32, moments_dtype=Dtype.INT8)
        codes, scales = torch.zeros(numel, dtype=torch.uint8), torch.zeros(4)
        encode(numel, codes.data_ptr(), scales.data_ptr(), numbers.data_ptr(), signed=signed)
        assert torch.equal(scales, state[f"{name}_scale"])
        difference = codes.int() - state[name].int()
        assert difference.abs().max() <= 1 and difference.any()  # rounded with other random bits
        decoded = torch.zeros(numel)
        decode(numel, decoded.data_ptr(), state[name].data_ptr(), state[f"{name}_scale"].data_ptr(), signed=signed)
        block = torch.arange(numel) // CODE_BLOCK
        step = scales[block] * (2.0**-17 if signed else 2.0**-30)
        assert ((decoded - numbers).abs() <= numbers.abs() / 8 + step).all()
        encode(numel, codes.data_ptr(), scales.data_ptr(), decoded.data_ptr(), signed=signed)
        again = torch.zeros(numel)
        decode(numel, again.data_ptr(), codes.data_ptr(), scales.data_ptr(), signed=signed)
        assert torch.equal(again, decoded)


@pytest.mark.parametrize("per_scale", [1, 32, 64])
def test_4_bit_codes_become_what_torch_makes_of_them(per_scale: int) -> None:
    """The first code of a byte is whichever ``pairs`` has first; the product is rounded once."""
    numel = 64 * 5 - 1
    codes = torch.randint(0, 256, (numel // 2 + 1,), dtype=torch.uint8)
    pairs, scales = torch.randn(256, 2), torch.randn(-(-numel // per_scale)) * torch.tensor(3.0).pow(40)
    for dtype, number in ((Dtype.F32, torch.float32), (Dtype.BF16, torch.bfloat16), (Dtype.F16, torch.float16)):
        found = torch.empty(numel, dtype=number)
        addresses = codes.data_ptr(), scales.data_ptr()
        dequantize(numel, found.data_ptr(), dtype, *addresses, per_scale, pairs.data_ptr())
        values = pairs[codes.int()].flatten()[:numel] * scales.repeat_interleave(per_scale)[:numel]
        assert torch.equal(found, values.to(number))
    with pytest.raises(ValueError, match="per_scale must be >= 1, got 0"):
        dequantize(numel, found.data_ptr(), Dtype.F16, *addresses, 0, pairs.data_ptr())


@pytest.mark.parametrize("signed", [True, False])
def test_the_number_of_each_code_is_encoded_exactly(signed: bool) -> None:
    """Whatever the largest code of a block is, among those that an update leaves there."""
    least_scale, top = (2.0**-112, 119) if signed else (2.0**-96, 246)
    for largest in range(top, 128 if signed else 256):
        codes = torch.arange(CODE_BLOCK).clamp(max=largest).to(torch.uint8)
        if signed:
            codes[128:] = 128 + (torch.arange(128) + 1).clamp(max=largest)  # below zero
        for scale in (least_scale, 2 * least_scale, 1.0, 2.0**20):
            numbers, again, scales = torch.zeros(CODE_BLOCK), torch.zeros(CODE_BLOCK), torch.tensor([scale])
            decode(CODE_BLOCK, numbers.data_ptr(), codes.data_ptr(), scales.data_ptr(), signed=signed)
            others, other_scales = torch.zeros(CODE_BLOCK, dtype=torch.uint8), torch.zeros(1)
            encode(CODE_BLOCK, others.data_ptr(), other_scales.data_ptr(), numbers.data_ptr(), signed=signed)
            decode(CODE_BLOCK, again.data_ptr(), others.data_ptr(), other_scales.data_ptr(), signed=signed)
            assert torch.equal(again, numbers)
            if signed:
                assert torch.equal(others, codes) and other_scales == scale


def in_bf16(numel: int) -> dict[str, torch.Tensor]:
    return {**fresh(numel), **{name: torch.zeros(numel, dtype=torch.bfloat16) for name in MOMENTS}}


def errors_of(rounded: torch.Tensor, exact: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What rounding to bf16 added, in units of what was cut off at most; and how often it should round up."""
    bits = exact.view(torch.int32)
    below, cut = (bits & ~0xFFFF).view(torch.float32), (bits & 0xFFFF) / 65536
    unit = (((bits & ~0xFFFF) + 0x10000).view(torch.float32) - below).abs()
    return ((rounded.float() - below).abs() / unit - cut), cut


def assert_mean_is_exact(errors: list[torch.Tensor], cut: torch.Tensor) -> None:
    """Errors of many steps: those of an element are none on average, and say nothing about those of the next step."""
    stacked, inner = torch.stack(errors), (cut > 0.02) & (cut < 0.98)
    assert set((stacked + cut).round(decimals=3).unique().tolist()) == {0.0, 1.0}, "up or down, by one"
    num_steps, spread = len(errors), (cut * (1 - cut)).sqrt()[inner]
    scores = stacked[:, inner].mean(0) / spread * num_steps**0.5  # standard normal
    assert abs(scores.mean()) * len(scores) ** 0.5 < 4.5 and 0.9 < scores.var() < 1.1
    for lag in (1, 2, 7):
        products = (stacked[lag:, inner] * stacked[:-lag, inner]).mean(0) / spread**2 * (num_steps - lag) ** 0.5
        assert abs(products.mean()) * len(products) ** 0.5 < 4.5 and products.var() < 1.15


def test_bf16_moments_are_the_fp32_ones_rounded_at_random_with_an_exact_mean() -> None:
    numel = 4000
    grad, start = torch.randn(numel), {name: (torch.rand(numel) * 1e-2).bfloat16() for name in MOMENTS}
    errors: dict[str, list[torch.Tensor]] = {name: [] for name in MOMENTS}
    for step in range(1, 501):
        exact = {**fresh(numel), **{name: value.float() for name, value in start.items()}}
        rounded = {**fresh(numel), **{name: value.clone() for name, value in start.items()}}
        coef = replace(COEF, step=step)
        step_adam(coef, grad, exact, weight_dtype=Dtype.F32)
        step_adam(coef, grad, rounded, weight_dtype=Dtype.F32, moments_dtype=Dtype.BF16)
        assert torch.equal(rounded["weight"], exact["weight"])
        for name in MOMENTS:
            errors[name].append(errors_of(rounded[name], exact[name])[0])
    for name in MOMENTS:
        assert_mean_is_exact(errors[name], errors_of(rounded[name], exact[name])[1])


def test_a_bf16_second_moment_follows_gradients_that_move_it_by_less_than_its_unit() -> None:
    """To nearest it would stay where it is for ever: a thousandth is less than half a unit of bf16."""
    numel = 4000
    state = in_bf16(numel)
    start = 1 + torch.rand(numel)  # equal elements would round alike
    state["exp_avg_sq"].copy_(start)
    for step in range(1, 1001):
        coef = replace(COEF, step=step, beta2=0.999)
        step_adam(coef, torch.zeros(numel), state, weight_dtype=Dtype.F32, moments_dtype=Dtype.BF16)
    assert (state["exp_avg_sq"].float() / start).mean().item() == pytest.approx(0.999**1000, rel=0.01)


def test_a_bf16_weight_without_a_master_moves_by_less_than_its_unit() -> None:
    numel, lr, steps = 4000, 1e-3, 500
    grad, start = torch.rand(numel), (1.25 + torch.rand(numel) / 2).bfloat16()
    weight, exact, errors = start.clone(), {"weight": start.float()}, []
    coef = SgdCoef(lr=lr, weight_decay=0.0, momentum=0, dampening=0, step=1)
    step_adam(coef, grad, exact, weight_dtype=Dtype.F32)
    for step in range(1, steps + 1):
        once = start.clone()
        for target in (weight, once):
            step_adam(replace(coef, step=step), grad, {"weight": target}, weight_dtype=Dtype.BF16)
        error, cut = errors_of(once, exact["weight"])
        errors.append(error)
    assert_mean_is_exact(errors, cut)
    assert (start.float() - weight.float()).mean().item() == pytest.approx(steps * lr * grad.mean().item(), rel=0.01)


def test_random_rounding_leaves_numbers_of_bf16_infinities_and_zeros_alone_and_makes_nans_canonical() -> None:
    numbers = torch.cat([torch.randn(100).bfloat16().float(), torch.tensor([0.0, -0.0, math.inf, -math.inf])])
    odd = torch.tensor([0x7FFFFFFF, -1, 0x7F800001], dtype=torch.int32).view(torch.float32)
    source = torch.cat([numbers, odd])
    for step in range(1, 50):
        rounded = torch.empty(len(source), dtype=torch.bfloat16)
        round_randomly(len(source), rounded.data_ptr(), source.data_ptr(), step=step)
        assert torch.equal(rounded[:-3].view(torch.int16), numbers.bfloat16().view(torch.int16))
        assert (rounded[-3:].view(torch.int16) == 0x7FC0).all()


def test_int8_blocks_of_zeros_stay_zero_and_non_finite_ones_become_nan() -> None:
    numel = 2 * CODE_BLOCK
    state = fresh(numel)
    state |= {"exp_avg": torch.zeros(numel, dtype=torch.uint8), "exp_avg_sq": torch.zeros(numel, dtype=torch.uint8)}
    state |= {"exp_avg_scale": torch.ones(2), "exp_avg_sq_scale": torch.zeros(2)}
    grad = torch.zeros(numel)
    weight = state["weight"].clone()
    step_adam(
        replace(COEF, weight_decay=0.0, step=1, grad_scale=1.0),
        grad,
        state,
        weight_dtype=Dtype.F32,
        moments_dtype=Dtype.INT8,
    )
    assert torch.equal(state["weight"], weight) and not state["exp_avg_scale"].any()
    grad[300] = float("inf")
    step_adam(
        replace(COEF, weight_decay=0.0, step=2, grad_scale=1.0),
        grad,
        state,
        weight_dtype=Dtype.F32,
        moments_dtype=Dtype.INT8,
    )
    assert state["exp_avg_scale"].isnan().tolist() == [False, True]


def test_int8_scales_end_where_code_0_is_a_normal_number(use_isa: Any) -> None:
    numel = CODE_BLOCK + 40
    for size, name, smallest in ((1e-18, "exp_avg_sq", 2.0**-96), (1e-36, "exp_avg", 2.0**-112)):
        written = []
        for isa in _kernels.isas_supported():
            use_isa(isa)
            state = fresh(numel)
            state |= {key: torch.zeros(numel, dtype=torch.uint8) for key in ("exp_avg", "exp_avg_sq")}
            state |= {f"{key}_scale": torch.zeros(2) for key in ("exp_avg", "exp_avg_sq")}
            for step in (1, 2):
                grad = torch.full((numel,), size) * torch.logspace(-1, 1, numel)
                coef = replace(COEF, weight_decay=0.0, step=step, grad_scale=1.0)
                step_adam(coef, grad, state, weight_dtype=Dtype.F32, moments_dtype=Dtype.INT8)
            assert (state[f"{name}_scale"] == smallest).all() and state["weight"].isfinite().all()
            written.append(state)
        for other in written[1:]:
            assert all(torch.equal(other[key], written[0][key]) for key in other)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"numel": -1}, "numel must be >= 0"),
        ({"native": OnHost(always(0))}, "num_threads must be >= 1"),
        ({"grad": 0}, "grad must be an address"),
        ({"weight": 4098}, "weight must be aligned"),
        ({"weight_dtype": Dtype.F16}, "needs a master"),
        ({"rest": 4096}, "rest is the lower half of a BF16 weight"),
        ({"rest": 4096, "master": 4096}, "not both"),
        ({"moments_dtype": Dtype.F16}, "too small"),
        ({"moments_dtype": Dtype.INT8}, "exp_avg_scale must be an address"),
        ({"grad_dtype": Dtype.INT8}, "grad must be F32, BF16 or F16"),
        ({"max_exp_avg_sq": 4096}, "adamw has no states max_exp_avg_sq: it has exp_avg, exp_avg_sq"),
    ],
)
def test_an_impossible_call_is_refused(change: dict[str, Any], message: str) -> None:
    address = 4096  # nothing is there: reading it would crash
    call: dict[str, Any] = {
        "numel": 1,
        "grad": address,
        "grad_dtype": Dtype.F32,
        "weight": address,
        "weight_dtype": Dtype.F32,
    }
    call |= {"exp_avg": address, "exp_avg_sq": address}
    with pytest.raises(ValueError, match=message):
        update(COEF, **{**call, **change})


def test_impossible_coefficients_are_refused() -> None:
    with pytest.raises(ValueError, match="step counts from 1"):
        replace(COEF, step=0)
    with pytest.raises(ValueError, match="beta2 must be in"):
        LionCoef(lr=1e-3, beta1=0.9, beta2=1.0, weight_decay=0, step=1)
    with pytest.raises(ValueError, match="nesterov"):
        SgdCoef(lr=1e-3, momentum=0.9, dampening=0.5, weight_decay=0, step=1, nesterov=True)
