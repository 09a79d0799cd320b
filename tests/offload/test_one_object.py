"""A parameter is one object: what hangs on it, counts on it and waits for its gradient is the same in forward and
outside."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import torch
from torch import nn

from offload import ConfigError, OffloadEngine
from offload.model.leaves import Leaves


class _Reads(nn.Linear):
    """Multiplies by an attribute of its weight, and leaves another one there."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.seen = self.weight._version  # type: ignore[assignment]
        return super().forward(x) * getattr(self.weight, "factor", 1.0)


@pytest.fixture
def engine() -> Iterator[OffloadEngine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), _Reads(4, 4))
    with OffloadEngine(model, optimizer="sgd", lr=0.5, precision="fp32") as engine:
        yield engine


_X = torch.ones(2, 4)


def test_attributes_set_on_either_side_are_there_on_the_other(engine: OffloadEngine):
    weight, plain = engine.module[1].weight, engine(_X)
    weight.factor = 2.0
    assert torch.equal(engine(_X), 2 * plain)
    assert isinstance(weight.seen, int)
    del weight.factor
    assert torch.equal(engine(_X), plain)


def test_a_step_moves_the_version_of_each_parameter_inside_and_outside(engine: OffloadEngine):
    weight = engine.module[1].weight
    engine.backward(engine(_X).sum())
    before = weight.seen
    assert before == weight._version
    engine.step()
    engine(_X)
    assert weight.seen == weight._version > before


def test_a_graph_over_weights_from_before_a_step_refuses_its_backward(engine: OffloadEngine):
    penalty = engine.module[1].weight.pow(2).sum()
    engine.backward(engine(_X).sum())
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        penalty.backward()


def test_a_detached_weight_that_requires_grad_is_a_leaf_of_its_own(engine: OffloadEngine):
    weight = engine.module[1].weight
    leaf = weight.detach().requires_grad_()
    (3 * leaf).sum().backward()
    assert torch.equal(leaf.grad, torch.full((4, 4), 3.0))
    assert weight.grad is None


def test_a_parameter_made_of_a_parameter_has_its_own_gradient_and_one_memory_with_it(engine: OffloadEngine):
    weight = engine.module[1].weight
    before, other = weight.detach().clone(), nn.Parameter(engine.module[1].weight)
    optimizer = torch.optim.SGD([other], lr=1.0)
    other.sum().backward()
    optimizer.step()
    assert weight.grad is None
    assert torch.equal(weight, before - 1)


@pytest.mark.parametrize("penalty_first", [True, False])
def test_hooks_see_the_whole_gradient_of_a_weight_that_is_used_in_its_unit_and_outside(
    engine: OffloadEngine, penalty_first: bool
):
    weight = engine.module[1].weight
    seen: list[torch.Tensor] = []
    weight.register_hook(lambda gradient: gradient.clamp(max=4.0))
    weight.register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad.clone()))
    penalty = 3 * weight.sum() if penalty_first else 0
    loss = (engine(torch.ones(1, 4)) * 0 + engine.module[1](_X)).sum()
    loss = loss + penalty if penalty_first else loss + 3 * weight.sum()
    loss.backward()
    assert len(seen) == 1
    assert torch.equal(seen[0], torch.full((4, 4), 4.0))
    assert torch.equal(weight.grad, seen[0])


def test_hooks_of_one_leaf_are_called_in_each_backward_and_after_the_others_are_gone():
    leaf, seen = torch.ones(2, requires_grad=True), []
    leaves = Leaves([leaf])
    with leaves.register_hook(lambda gradient: seen.append(gradient.tolist())):
        (2 * leaf).sum().backward()
        leaves.end()
        (3 * leaf).sum().backward()
    (5 * leaf).sum().backward()
    assert seen == [[2.0, 2.0], [3.0, 3.0]]


def test_an_encoder_in_evaluation_hides_what_its_mask_hides():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    encoder, x = nn.TransformerEncoder(layer, 2).eval(), torch.randn(2, 4, 16)
    mask = torch.tensor([[False] * 4, [False, False, True, True]])
    with torch.no_grad():
        expected = encoder(x, src_key_padding_mask=mask)
        assert not expected[1, 2:].any()
        with OffloadEngine(nn.Sequential(nn.Linear(4, 4), encoder), optimizer="sgd", precision="fp32") as engine:
            assert torch.equal(engine.module[1](x, src_key_padding_mask=mask), expected)
            assert encoder.layers[0].linear1.weight is not engine.module[0].weight
            assert all(type(p).__name__ == "Handle" for p in encoder.parameters())


def test_a_weight_of_a_recurrent_module_may_be_a_tensor_that_is_set_anew():
    inner, raw = nn.LSTM(4, 4), nn.Parameter(torch.randn(16, 4))
    del inner._parameters["weight_hh_l0"]
    inner.weight_hh_l0 = raw.detach()
    x = torch.randn(3, 1, 4)
    expected = inner(x)[0]
    with OffloadEngine(nn.ModuleList([inner, nn.ParameterList([raw])]), optimizer="sgd", precision="fp32"):
        inner.weight_hh_l0 = 1 * raw
        assert torch.equal(inner(x)[0], expected)


def test_compiled_modules_with_parameters_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Linear(2, 2)))
    with pytest.raises(ConfigError, match=r"module 1 is a torch\.jit\.ScriptModule"):
        OffloadEngine(model)
    assert type(model[0].weight) is nn.Parameter


def test_the_engine_is_not_the_model_whose_attributes_it_names(engine: OffloadEngine):
    engine.module.temperature = 1.0
    with pytest.raises(AttributeError, match=r"set engine\.module\.temperature"):
        engine.temperature = 0.1
    with pytest.raises(AttributeError, match=r"use engine\.module\.temperature"):
        _ = engine.temperature
    engine.note = "of the caller's own"
    assert not hasattr(engine, "generate")


def test_autograd_grad_gives_what_hooks_make_of_the_whole(engine: OffloadEngine):
    weight = engine.module[1].weight
    with weight.register_hook(lambda gradient: gradient.clamp(max=4.0)):
        loss = engine.module[1](_X).sum() + 3 * weight.sum()
        (gradient,) = torch.autograd.grad(loss, [weight], retain_graph=True)
        assert torch.equal(gradient, torch.full((4, 4), 4.0))
    (gradient,) = torch.autograd.grad(loss, [weight])
    assert torch.equal(gradient, torch.full((4, 4), 5.0))


class _Saves(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.mark = 1  # type: ignore[assignment]
        with self.weight.register_hook(print):
            self.content = io.BytesIO()
            torch.save(self.weight, self.content)
        return super().forward(x)


def test_a_weight_is_saved_in_its_units_forward():
    model = nn.Sequential(nn.Linear(4, 4), _Saves(4, 4))
    with OffloadEngine(model, optimizer="sgd", precision="fp32"):
        model(_X)
        model[1].content.seek(0)
        loaded = torch.load(model[1].content, weights_only=True)
        assert type(loaded) is nn.Parameter
        assert loaded.mark == 1
        assert torch.equal(loaded, model[1].weight)
