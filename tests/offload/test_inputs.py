"""What a model is called with: brought to where it computes, and else the caller's own objects."""

from __future__ import annotations

import pytest
import torch
from tiny import Tiny
from torch import nn

from offload import OffloadEngine
from offload.config import OffloadConfig
from offload.device.host import Cpu
from offload.model.inputs import Inputs

_FP32, _BF16, _FP64 = torch.ones(2), torch.ones(2).bfloat16(), torch.full((2,), 1e9 + 1, dtype=torch.float64)


def _inputs(converted: set[torch.dtype], dtype: torch.dtype = torch.float32) -> Inputs:
    return Inputs(Cpu(), converted, dtype)


def test_containers_of_tensors_that_are_there_already_are_the_callers_own():
    cache: dict[str, list[torch.Tensor]] = {}
    losses: list[torch.Tensor] = [_FP32]
    given = ((_FP32, [cache, (losses,)]), {"cache": cache})
    args, kwargs = _inputs(set()).bring(given)
    assert args is given[0]
    assert kwargs is given[1]


def test_no_input_is_cast_where_no_weight_was():
    for tensor in (_FP32, _BF16, _FP64, torch.arange(3)):
        assert _inputs(set()).bring(tensor) is tensor


def test_inputs_are_cast_as_the_weights_of_their_dtype_were():
    inputs = _inputs({torch.float32}, torch.bfloat16)
    losses: list[torch.Tensor] = []
    brought, rest, same = inputs.bring((_FP32, [_FP64, _BF16], losses))
    assert brought.dtype == torch.bfloat16
    assert [item.dtype for item in rest] == [torch.float64, torch.bfloat16]
    assert same is losses


def test_the_converted_dtypes_are_those_of_the_models_parameters():
    model = Tiny(8, 1, 8)
    model.norm.double()
    assert OffloadConfig(precision="fp32").converted_dtypes(model) == {torch.float64}
    assert OffloadConfig(precision="bf16").converted_dtypes(model) == {torch.float32, torch.float64}


class OwnCasts(nn.Module):
    """A block in bf16 of a model in fp32."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, dtype=torch.bfloat16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(x.bfloat16()).float()


class Masked(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 8)
        self.register_buffer("mask", torch.ones(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.mask)


def test_buffers_keep_their_dtype_and_an_error_on_it_says_how_the_model_is_converted_as_a_whole():
    x = torch.ones(2, 8)
    with pytest.warns(UserWarning, match="become torch.bfloat16"), OffloadEngine(Masked(), precision="bf16") as engine:
        assert engine.module.mask.dtype == torch.float32
        with pytest.raises(RuntimeError, match=r"Buffers have kept theirs: .* model\.to\(torch\.bfloat16\)"):
            engine(x)
    with OffloadEngine(Masked().to(torch.bfloat16)) as engine:
        assert engine(x.bfloat16()).dtype == torch.bfloat16


def test_an_error_of_a_forward_that_casts_to_the_dtype_of_before_names_the_conversion():
    model = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8), OwnCasts())
    assert model(torch.ones(2, 8)).shape == (2, 8)
    with pytest.warns(UserWarning, match="become torch.float32"):
        engine = OffloadEngine(model)
    for call in (engine, engine.module):
        with pytest.raises(RuntimeError, match=r"converted the .* torch\.bfloat16 to.*precision=.*x\.to"):
            call(torch.ones(2, 8))
    with pytest.raises(RuntimeError) as raised:
        engine(torch.ones(2, 9))
    assert "converted" not in str(raised.value)
    engine.unwrap()
    assert not model._forward_hooks
