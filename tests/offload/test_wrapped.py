"""Weights of a class that computes in another way with ordinary values, beside the same program without an engine."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from tiny import least_budget
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from offload import BudgetError, ConfigError, OffloadEngine
from offload.testing.simulated import SimulatedDevice

_PRESERVED = {
    torch.ops.aten.detach.default,
    torch.ops.aten.clone.default,
    torch.ops.aten._to_copy.default,
    torch.ops.aten.empty_like.default,
    torch.ops.aten.view.default,
}


class Coarse(Tensor):
    """A weight whose linear products see it rounded to multiples of ``step``, and whose gradient does not."""

    @staticmethod
    def __new__(cls, inner: Tensor, step: float) -> Coarse:
        return Tensor._make_wrapper_subclass(  # type: ignore[attr-defined, no-any-return]
            cls, inner.shape, strides=inner.stride(), dtype=inner.dtype, device=inner.device
        )

    def __init__(self, inner: Tensor, step: float) -> None:
        self._inner, self.step = inner, step

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["_inner"], self.step

    @classmethod
    def __tensor_unflatten__(cls, inner: dict[str, Tensor], step: float, shape: Any, stride: Any) -> Coarse:
        return cls(inner["_inner"], step)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is F.linear:
            return F.linear(args[0], _Rounded.apply(args[1]), *args[2:])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **(kwargs or {}))

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        step = next(item.step for item in pytree.tree_leaves((args, kwargs)) if isinstance(item, cls))
        inner = pytree.tree_map_only(cls, lambda wrapped: wrapped._inner, (args, kwargs or {}))
        out = func(*inner[0], **inner[1])
        if func is torch.ops.aten.copy_.default:
            return args[0]
        return cls(out, step) if func in _PRESERVED else out


class _Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Coarse) -> Tensor:
        return (weight._inner / weight.step).round() * weight.step

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        return gradient


def make_model(device: str = "cpu", wrap: bool = True) -> nn.Sequential:
    torch.manual_seed(0)
    with torch.device(device):
        blocks = [nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 96), nn.GELU(), nn.Linear(96, 64)) for _ in range(3)]
        model = nn.Sequential(nn.Embedding(64, 64), *blocks, nn.Linear(64, 64))
    for module in model.modules():
        if wrap and isinstance(module, nn.Linear):
            module.weight = nn.Parameter(Coarse(module.weight.detach(), 1 / 16))
    return model


TOKENS = torch.randint(64, (2, 17), generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module) -> Tensor:
    return F.cross_entropy(model(TOKENS[:, :-1]).flatten(0, 1), TOKENS[:, 1:].flatten())


def train(model: nn.Module, optimizer: Any, steps: int, loss: Callable[[Any], Tensor] = loss_of) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        loss(model).backward()
        optimizer.step()


def nadam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(model.parameters(), lr=1e-3)


def trained(steps: int, loss: Callable[[Any], Tensor] = loss_of) -> nn.Sequential:
    model = make_model()
    train(model, nadam(model), steps, loss)
    return model


@pytest.fixture
def tight(tmp_path: Path) -> Callable[..., OffloadEngine]:
    def make(model: nn.Module, **options: Any) -> OffloadEngine:
        options = {"optimizer": nadam(model), **options}
        least = least_budget(model, tmp_path, **options)
        return OffloadEngine(model, nvme_path=tmp_path, host_memory=least, **options)

    return make


def inner(tensor: Tensor) -> Tensor:
    value = tensor.detach()
    return value._inner if isinstance(value, Coarse) else value


def assert_same(one: nn.Module, other: nn.Module) -> None:
    for (name, mine), theirs in zip(one.named_parameters(), other.parameters(), strict=True):
        assert isinstance(mine, Coarse) == isinstance(theirs, Coarse), name
        assert torch.equal(inner(mine), inner(theirs)), name


@pytest.mark.parametrize("options", [{}, {"activations": "recompute"}], ids=["kept", "recomputed"])
def test_a_model_over_the_tiers_has_the_bits_of_one_in_memory(tight, options) -> None:
    model = make_model()
    with tight(model, **options) as engine:
        assert engine.plan.nvme_bytes["states"] > 0
        train(model, engine.optimizer, 3)
        engine.unwrap()
    assert_same(model, trained(3))
    dense = make_model(wrap=False)
    train(dense, nadam(dense), 3)
    assert not torch.equal(model[0].weight, dense[0].weight)  # the class does the products


def test_a_device_has_the_bits_of_the_cpu_in_the_least_memory_and_in_all(tmp_path: Path) -> None:
    with pytest.raises(BudgetError) as least:
        OffloadEngine(make_model(), device=SimulatedDevice(), device_memory=1, nvme_path=tmp_path)
    for device_memory in (least.value.needed_bytes, 1 << 26):
        model = make_model()
        options = {"device": SimulatedDevice(), "device_memory": device_memory, "nvme_path": tmp_path}
        with OffloadEngine(model, optimizer=nadam(model), **options) as engine:
            train(model, engine.optimizer, 3)
            engine.unwrap()
        assert_same(model, trained(3))


def test_a_checkpoint_goes_on_and_files_have_ordinary_tensors(tight, tmp_path: Path) -> None:
    model = make_model()
    with tight(model) as engine:
        train(model, engine.optimizer, 2)
        engine.save_checkpoint(tmp_path / "saved")
        engine.save_model(tmp_path / "model")
        state = model.state_dict()
        assert isinstance(state["1.1.weight"], Coarse) and isinstance(copy.deepcopy(model)[1][1].weight, Coarse)
    model = make_model()
    with tight(model) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        train(model, engine.optimizer, 1)
        engine.unwrap()
    assert_same(model, trained(3))
    files = load_file(tmp_path / "model" / "model.safetensors")
    assert all(torch.equal(files[name], inner(value)) for name, value in trained(2).named_parameters())
    model = make_model()
    with tight(model) as engine:
        model.load_state_dict(state)
        engine.unwrap()
    assert_same(model, trained(2))
    model = make_model()
    with tight(model, weights=tmp_path / "model") as engine:
        engine.unwrap()
    assert_same(model, trained(2))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_backward_of_some_weights_runs_forwards_of_the_class_again(tight, activations: str) -> None:
    model, plain = make_model(), make_model()
    with tight(model, activations=activations):
        mine, theirs = (
            torch.autograd.grad(loss_of(each), [each[1][0].weight, each[1][1].weight, each[3][3].weight])
            for each in (model, plain)
        )
        assert all(map(torch.equal, mine, theirs))


def test_copies_of_a_weight_have_its_class_and_compute_as_it_does(tight) -> None:
    model, plain = make_model(), make_model()
    with tight(model):
        for name in ("clone", "detach", "contiguous", "double"):
            mine, theirs = (getattr(each[4].weight, name)().clone() for each in (model, plain))
            assert type(mine) is type(theirs), name
            x = torch.ones(64, dtype=theirs.dtype)
            assert torch.equal(F.linear(x, mine), F.linear(x, theirs)), name


def test_values_gradients_and_changes_are_those_of_the_plain_model(tight) -> None:
    model, plain = make_model(), make_model()

    def shrink(module: nn.Module, _: Any) -> None:
        with torch.no_grad():
            module.weight.mul_(0.9)  # type: ignore[operator]

    with tight(model) as engine:
        for each in (model, plain):
            each[1][1].register_forward_pre_hook(shrink)
            loss_of(each).backward()
            with torch.no_grad():
                each[2][1].weight.mul_(0.5)
                each[3][1].weight.data.add_(1)
            each[1][3].weight.grad.mul_(2)
        assert not isinstance(plain[1][3].weight.grad, Coarse)
        assert all(torch.equal(p.grad * 1, q.grad) for p, q in zip(model.parameters(), plain.parameters(), strict=True))
        assert model[1][1].weight.step == 1 / 16
        with pytest.MonkeyPatch.context() as patch:  # a question about another attribute reads no weight
            patch.setattr(type(model[1][1].weight), "value", lambda handle: pytest.fail("read"))
            assert not hasattr(model[1][1].weight, "use_muon")
        engine.unwrap()
    assert_same(model, plain)


def test_products_outside_of_the_unit_are_those_of_the_class(tight) -> None:
    def loss(model: nn.Sequential) -> Tensor:
        hidden = F.linear(model(TOKENS[:, :-1]), model[4].weight)
        return F.cross_entropy(hidden.flatten(0, 1), TOKENS[:, 1:].flatten())

    model = make_model()
    with tight(model) as engine:
        train(model, engine.optimizer, 2, loss)
        engine.unwrap()
    assert_same(model, trained(2, loss))


def test_a_model_on_the_meta_device_draws_what_it_would_have_drawn(tight) -> None:
    models = [make_model("meta"), make_model("meta", wrap=False)]
    for model in models:
        torch.manual_seed(3)
        with tight(model) as engine:
            engine.unwrap()
    first, second = (list(map(inner, model.parameters())) for model in models)
    assert isinstance(models[0][1][1].weight, Coarse)
    assert all(map(torch.equal, first, second)) and float(first[3].std()) > 0


class _Pair(Coarse):
    """Wraps two tensors: what is trained of it is not known."""

    def __tensor_flatten__(self) -> tuple[list[str], float]:
        return ["_inner", "_inner"], self.step


def test_a_weight_that_wraps_more_than_its_values_is_refused() -> None:
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].weight = nn.Parameter(_Pair(torch.ones(4, 4), 1.0))
    with pytest.raises(ConfigError, match=r"0\.weight is a _Pair and requires grad"):
        OffloadEngine(model)
