"""Every optimizer, over tiles in RAM and on NVMe: the same bits in both, and what ``torch.optim`` gives in memory."""

import copy
import warnings
from pathlib import Path

import pytest
import torch
from tiny import Tiny, batches, least_budget, loss_of
from torch import nn

from offload import ConfigError, OffloadEngine

EPS = 1e-4
"""Large: where a gradient is nearly zero, Adam's step is otherwise its sign, and that is rounding."""


class Momentum(torch.optim.Optimizer):
    """An optimizer of the user's own, which keeps a number, a tensor and a matrix of another shape."""

    def __init__(self, params, lr=1e-2):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["count"] = 0
                    state["velocity"] = torch.zeros_like(p)
                    state["rows"] = torch.zeros(p.shape[0], 3, dtype=torch.float64)
                state["count"] += 1
                state["velocity"] = 0.9 * state["velocity"] + p.grad  # a new tensor, not changed in place
                state["rows"][:, 0] += p.grad.double().flatten(1).sum(1) if p.dim() > 1 else p.grad.double()
                p.sub_(group["lr"] / state["count"] * state["velocity"])


CASES = {
    "adam": ({"optimizer": "adam", "lr": 1e-2, "eps": EPS}, torch.optim.Adam, {"lr": 1e-2, "eps": EPS}),
    "adamw amsgrad": (
        {"optimizer": "adamw", "lr": 1e-2, "eps": EPS, "optimizer_options": {"amsgrad": True}},
        torch.optim.AdamW,
        {"lr": 1e-2, "eps": EPS, "amsgrad": True},
    ),
    "adagrad": (
        {"optimizer": "adagrad", "optimizer_options": {"initial_accumulator_value": 0.1}},
        torch.optim.Adagrad,
        {"initial_accumulator_value": 0.1},
    ),
    "sgd": ({"optimizer": "sgd", "lr": 0.1}, torch.optim.SGD, {"lr": 0.1}),
    "sgd nesterov": (
        {"optimizer": "sgd", "lr": 0.1, "optimizer_options": {"momentum": 0.9, "nesterov": True}},
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.9, "nesterov": True},
    ),
    "class with a kernel": (
        {"optimizer": torch.optim.SGD, "lr": 0.1, "optimizer_options": {"momentum": 0.5}},
        torch.optim.SGD,
        {"lr": 0.1, "momentum": 0.5},
    ),
    "nadam": ({"optimizer": torch.optim.NAdam, "lr": 1e-2, "eps": EPS}, torch.optim.NAdam, {"lr": 1e-2, "eps": EPS}),
    "rmsprop": ({"optimizer": torch.optim.RMSprop, "eps": 1e-2}, torch.optim.RMSprop, {"eps": 1e-2}),
    "adafactor": ({"optimizer": torch.optim.Adafactor}, torch.optim.Adafactor, {}),
    "own": ({"optimizer": Momentum}, Momentum, {}),
}


def built() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


def run(model: nn.Module, call, backward, step) -> dict[str, torch.Tensor]:
    for tokens, targets in batches(4):
        backward(loss_of(call(tokens), targets))
        step()
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def offloaded(**options) -> dict[str, torch.Tensor]:
    model = built()
    with OffloadEngine(model, **options) as engine:
        return run(model, engine, engine.backward, engine.step)


def in_memory(make_optimizer) -> dict[str, torch.Tensor]:
    model = built()
    optimizer = make_optimizer(model)

    def step() -> None:
        optimizer.step()
        optimizer.zero_grad()

    return run(model, model, torch.Tensor.backward, step)


def assert_close(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(got[name].float(), value, rtol=1e-3, atol=1e-4, msg=name)


def assert_same(got: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        assert torch.equal(got[name], value), name


@pytest.mark.one_in(2)
@pytest.mark.parametrize("case", CASES)
def test_an_optimizer_gives_what_its_namesake_gives_in_memory(case, tmp_path: Path):
    options, kind, settings = CASES[case]
    options = {**options, "precision": "fp32"}
    expected = in_memory(lambda model: kind(model.parameters(), **settings))
    in_ram = offloaded(**options)
    assert_close(in_ram, expected)
    budget = least_budget(built(), tmp_path, **options)
    assert_same(offloaded(**options, nvme_path=tmp_path, host_memory=budget), in_ram)


@pytest.mark.one_in(3)
@pytest.mark.parametrize("optimizer", ["adamw", "lion", torch.optim.NAdam])
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_16_bit_weights_are_rounded_from_the_same_master_wherever_it_rests(optimizer, precision, tmp_path: Path):
    options = {"optimizer": optimizer, "precision": precision, "lr": 1e-3}
    in_ram = offloaded(**options)
    budget = least_budget(built(), tmp_path, **options)
    assert_same(offloaded(**options, nvme_path=tmp_path, host_memory=budget), in_ram)
    before = dict(built().named_parameters())
    assert all(value.dtype == (torch.bfloat16 if precision == "bf16" else torch.float16) for value in in_ram.values())
    assert all(not torch.equal(value.float(), before[name]) for name, value in in_ram.items())


@pytest.mark.parametrize("moments", ["bf16", "int8"])
def test_small_moments_stay_near_full_ones_and_do_not_depend_on_tiles(moments, tmp_path: Path):
    options = {"precision": "fp32", "lr": 1e-3, "moments_dtype": moments, "eps": 1e-6}
    in_ram = offloaded(**options)
    budget = least_budget(built(), tmp_path, **options)
    assert_same(offloaded(**options, nvme_path=tmp_path, host_memory=budget), in_ram)
    assert_same(offloaded(**options, tile_bytes=65536), in_ram)
    full = offloaded(**{**options, "moments_dtype": "fp32"})
    before = {name: p.detach() for name, p in built().named_parameters()}
    moved = sum((full[name] - before[name]).square().sum() for name in full)
    apart = sum((full[name] - in_ram[name]).square().sum() for name in full)
    assert 0 < apart < 0.05 * moved


def grouped(model: nn.Module) -> list[dict]:
    decayed = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": rest, "lr": 3e-3, "weight_decay": 0.0}]


@pytest.mark.parametrize("before", [True, False])
def test_a_scheduler_on_a_built_optimizer_never_warns_of_the_order_of_steps(before: bool):
    model = Tiny()
    own = torch.optim.AdamW(model.parameters(), lr=1.0)
    schedulers = [torch.optim.lr_scheduler.StepLR(own, 1)] if before else []
    with OffloadEngine(model, optimizer=own, precision="fp32") as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = schedulers[0] if before else torch.optim.lr_scheduler.StepLR(own, 1)
        for take_step in (engine.step, own.step, engine.optimizer.step):
            tokens, targets = batches(1)[0]
            engine.backward(loss_of(engine(tokens), targets))
            take_step()
            scheduler.step()
        assert engine.optimizer.param_groups[0]["lr"] == pytest.approx(1e-3)


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adagrad, torch.optim.NAdam])
def test_a_built_optimizer_is_taken_over_with_groups_states_and_scheduler(kind, tmp_path: Path):
    """Two steps in memory, then two with the engine, are four steps in memory."""

    def schedule_of(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 / (1 + epoch))

    def steps(model, optimizer, schedule, data, call=None):
        for tokens, targets in data:
            loss_of((call or model)(tokens), targets).backward()
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()

    plain = built()
    optimizer = kind(grouped(plain), lr=1e-2, eps=EPS)
    steps(plain, optimizer, schedule_of(optimizer), batches(4))

    model = built()
    optimizer = kind(grouped(model), lr=1e-2, eps=EPS)
    schedule = schedule_of(optimizer)
    steps(model, optimizer, schedule, batches(4)[:2])
    with OffloadEngine(model, optimizer=optimizer, precision="fp32", nvme_path=tmp_path, host_memory="8MiB") as engine:
        assert [len(group["params"]) for group in engine.optimizer.param_groups] == [10, 19]
        assert isinstance(engine.optimizer, torch.optim.Optimizer)
        steps(model, optimizer, schedule, batches(4)[2:])  # the user's own objects, as before
        assert engine.optimizer.param_groups[1]["lr"] == pytest.approx(3e-3 / 5)
        got = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert_close(got, {name: p.detach() for name, p in plain.named_parameters()})


@pytest.mark.parametrize("options", [{}, {"moments_dtype": "int8"}, {"optimizer": torch.optim.NAdam}])
def test_optimizer_states_are_saved_and_loaded_exactly(options, tmp_path: Path):
    options = {"precision": "bf16", "nvme_path": tmp_path, "host_memory": "7MiB", **options}
    model = built()
    with OffloadEngine(model, **options) as engine:
        data = batches(4)
        for tokens, targets in data[:2]:
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
        weights = copy.deepcopy(engine.state_dict())
        states = copy.deepcopy(engine.optimizer.state_dict())
        masters = [value for values in states["state"].values() for value in values.values()]
        assert masters and all(type(value) is torch.Tensor for value in masters)
        for tokens, targets in data[2:]:
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
        engine.optimizer.load_state_dict(states)
        again = engine.optimizer.state_dict()
        for index, values in states["state"].items():
            for name, value in values.items():
                assert torch.equal(torch.as_tensor(again["state"][index][name]), torch.as_tensor(value)), name
        assert weights.keys() == engine.state_dict().keys()


def test_states_of_torch_load_into_the_engine_and_back():
    plain = built()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for tokens, targets in batches(3):
        loss_of(plain(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = built()
    with OffloadEngine(model, precision="fp32", lr=5e-3) as engine:
        engine.optimizer.load_state_dict(optimizer.state_dict())
        assert engine.optimizer.param_groups[0]["lr"] == 1e-2
        got = engine.optimizer.state_dict()["state"]
    for index, values in optimizer.state_dict()["state"].items():
        for name, value in values.items():
            assert torch.equal(got[index][name], value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"optimizer": "sgd", "betas": (0.9, 0.99)}, "optimizer 'sgd' has no option 'betas'"),
        ({"optimizer": "sgd", "optimizer_options": {"nesterov": True}}, "nesterov needs a momentum"),
        ({"optimizer": torch.optim.LBFGS}, r"LBFGS cannot run one parameter at a time: .*docs/optimizers\.md"),
        ({"optimizer": torch.optim.NAdam, "optimizer_options": {"momentun": 1}}, "has no option 'momentun'"),
        ({"optimizer": torch.optim.NAdam, "moments_dtype": "int8"}, "needs an optimizer with a kernel"),
        ({"optimizer": nn.Linear}, "Linear is not a torch.optim.Optimizer"),
    ],
)
def test_what_cannot_work_is_said_before_the_model_is_touched(options, message):
    model = built()
    with pytest.raises(ConfigError, match=message):
        OffloadEngine(model, **options)
    assert all(type(p) is nn.Parameter for p in model.parameters())


def test_an_optimizer_over_other_parameters_is_refused():
    model = built()
    with pytest.raises(ConfigError, match="not one of the model's"):
        OffloadEngine(model, optimizer=torch.optim.AdamW(built().parameters()))


def test_a_parameter_that_is_given_twice_is_refused_where_torch_takes_two_steps():
    model = Tiny()
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = torch.optim.AdamW([*model.parameters(), model.head.weight])
    with pytest.raises(ConfigError, match=r"head\.weight 2 times"):
        OffloadEngine(model, optimizer=optimizer)
    with OffloadEngine(model, optimizer="sgd", precision="fp32") as engine:
        engine.optimizer.param_groups[0]["params"].append(model.norm.weight)
        tokens, targets = batches(1)[0]
        engine.backward(loss_of(engine(tokens), targets))
        with pytest.raises(ConfigError, match=r"norm\.weight 2 times"):
            engine.step()


def test_weight_decay_of_a_group_is_decoupled_as_the_group_says():
    def make(model):
        groups = grouped(model)
        groups[0]["decoupled_weight_decay"] = False
        return torch.optim.AdamW(groups, lr=1e-2, eps=EPS)

    expected = in_memory(make)
    model = built()
    with OffloadEngine(model, optimizer=make(model), precision="fp32") as engine:
        got = run(model, engine, lambda loss: engine.backward(loss), engine.step)
    assert_close(got, expected)


def test_an_adamw_that_loads_the_options_of_adam_stays_one():
    of_adam = torch.optim.Adam(built().parameters(), lr=1e-3).state_dict()
    model = built()
    for optimizer in (torch.optim.AdamW(model.parameters()), "adamw"):
        with OffloadEngine(model, optimizer=optimizer) as engine:
            engine.optimizer.load_state_dict(of_adam)
            assert engine.optimizer.param_groups[0].get("decoupled_weight_decay", True)
            assert engine.optimizer.param_groups[0]["lr"] == 1e-3
            model = engine.unwrap()


def test_options_that_are_not_finite_are_refused_for_what_they_are():
    with OffloadEngine(Tiny(), optimizer="sgd", precision="fp32") as engine:
        tokens, targets = batches(1)[0]
        engine.backward(loss_of(engine(tokens), targets))
        engine.optimizer.param_groups[0]["lr"] = float("nan")
        with pytest.raises(ConfigError, match="lr must be finite, got nan"):
            engine.step()


def test_gradients_through_a_step_are_refused():
    model = Tiny()
    with pytest.raises(ConfigError, match="differentiable=True"):
        OffloadEngine(model, optimizer=torch.optim.Adam(model.parameters(), differentiable=True))
