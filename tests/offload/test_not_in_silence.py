"""What a user does beside the documented loop works as in PyTorch, or is refused with the way named. Never silence."""

import copy
import errno
import os
import signal
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import pytest
import torch
from tiny import Tiny, batches, least_budget, loss_of
from torch import nn

from offload import BudgetError, ConfigError, OffloadEngine, OffloadError

ADAMW = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-4}
OPTIONS = {"precision": "fp32", "tile_bytes": 65536, **ADAMW}


def built() -> Tiny:
    torch.manual_seed(0)
    return Tiny(width=32, num_blocks=4)


@pytest.fixture
def engine(tmp_path: Path):
    with OffloadEngine(
        built(), nvme_path=tmp_path, host_memory=least_budget(built(), tmp_path, **OPTIONS), **OPTIONS
    ) as engine:
        yield engine


class Plain:
    """The same model, trained by torch alone."""

    def __init__(self) -> None:
        self.model = built()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), **ADAMW)

    def backward(self, tokens: torch.Tensor, targets: torch.Tensor) -> float:
        loss = loss_of(self.model(tokens), targets)
        loss.backward()
        return loss.item()

    def step(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


def backward(engine: OffloadEngine, tokens: torch.Tensor, targets: torch.Tensor) -> float:
    """As PyTorch's own loop does it."""
    loss = loss_of(engine.module(tokens), targets)
    loss.backward()
    return loss.item()


def assert_near(model: nn.Module, expected: nn.Module) -> None:
    for (name, parameter), other in zip(model.named_parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(parameter.detach().clone(), other.detach(), rtol=1e-4, atol=1e-6, msg=name)


# Loops.


def test_a_plain_backward_and_the_engines_step_train(engine: OffloadEngine):
    plain = Plain()
    for tokens, targets in batches(3):
        assert backward(engine, tokens, targets) == pytest.approx(plain.backward(tokens, targets), rel=1e-5)
        engine.step()
        plain.step()
    assert engine.global_step == 3
    assert_near(engine.module, plain.model)


def test_a_plain_backward_is_not_counted_as_one_of_several():
    with OffloadEngine(built(), gradient_accumulation_steps=2, **OPTIONS) as engine:
        backward(engine, *batches(1)[0])
        with pytest.raises(ConfigError, match=r"gradient_accumulation_steps=2.*engine\.backward\(loss\)"):
            engine.step()


def test_micro_batches_whose_gradients_were_dropped_do_not_count():
    tokens, targets = batches(1)[0]
    with OffloadEngine(built(), gradient_accumulation_steps=2, **OPTIONS) as engine:
        engine.backward(loss_of(engine(tokens), targets))
        engine.optimizer.zero_grad()  # the user gives this micro-batch up
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
        assert engine.global_step == 0
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
        assert engine.global_step == 1


def test_a_step_without_gradients_says_so_once(engine: OffloadEngine):
    with pytest.warns(UserWarning, match="no parameter has a gradient"):
        engine.optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.optimizer.step()


def test_a_graph_is_not_used_again_after_the_step_that_changed_its_weights(engine: OffloadEngine):
    tokens, targets = batches(1)[0]
    loss = loss_of(engine(tokens), targets)
    loss.backward(retain_graph=True)
    engine.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_a_frozen_neighbour_that_no_step_has_changed_is_no_reason_to_refuse(tmp_path: Path):
    """Each parameter counts its own changes, although a unit has one memory."""
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    for parameter in model[1].parameters():
        parameter.requires_grad_(False)
    with OffloadEngine(model, **OPTIONS) as engine:
        x = torch.ones(2, 8, requires_grad=True)
        through_frozen = model[1](x)
        model[2](model[1](model[0](x))).sum().backward()
        engine.step()
        through_frozen.sum().backward()
        assert x.grad is not None


def test_gradients_that_were_zeroed_in_part_are_said_at_the_next_step(engine: OffloadEngine):
    first, second, third = batches(3)
    backward(engine, *first)
    engine.optimizer.step()
    engine.module.zero_grad()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(engine, *second)
        engine.optimizer.step()
    engine.module.blocks.zero_grad()
    backward(engine, *third)
    with pytest.warns(UserWarning, match=r"no zero_grad\(\) since"):
        engine.optimizer.step()


def test_a_save_behind_a_backward_without_zero_grad_says_that_nothing_was_added(engine: OffloadEngine, tmp_path: Path):
    first, second = batches(2)
    backward(engine, *first)
    engine.optimizer.step()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.save_checkpoint(tmp_path / "saved")
        backward(engine, *second)
    with pytest.warns(UserWarning, match=r"save_checkpoint\(\): there was no zero_grad\(\) since"):
        engine.save_checkpoint(tmp_path / "saved")


def test_a_gradient_penalty_is_refused_at_the_first_backward(engine: OffloadEngine):
    tokens, targets = batches(1)[0]
    loss = loss_of(engine(tokens), targets)
    with pytest.raises(ConfigError, match="create_graph=True"):
        loss.backward(create_graph=True)
    engine.optimizer.zero_grad()
    backward(engine, tokens, targets)
    engine.step()


def test_a_closure_is_called_once_before_the_step(engine: OffloadEngine):
    plain = Plain()
    for tokens, targets in batches(3):

        def closure(tokens=tokens, targets=targets) -> torch.Tensor:
            engine.optimizer.zero_grad()
            loss = loss_of(engine.module(tokens), targets)
            loss.backward()
            return loss

        assert engine.optimizer.step(closure).item() == pytest.approx(plain.backward(tokens, targets), rel=1e-5)
        plain.step()
    assert_near(engine.module, plain.model)


def test_gradients_of_chosen_parameters(engine: OffloadEngine):
    plain = Plain()
    tokens, targets = batches(1)[0]
    found = torch.autograd.grad(loss_of(engine(tokens), targets), list(engine.module.parameters()))
    expected = torch.autograd.grad(loss_of(plain.model(tokens), targets), list(plain.model.parameters()))
    for gradient, other in zip(found, expected, strict=True):
        torch.testing.assert_close(gradient, other, rtol=1e-4, atol=1e-6)
    chosen = engine.module.blocks[1].up.weight
    for inputs in ([chosen], chosen, iter([chosen])):
        engine.optimizer.zero_grad()
        torch.autograd.backward(loss_of(engine(tokens), targets), inputs=inputs)
        assert [name for name, p in engine.module.named_parameters() if p.grad is not None] == ["blocks.1.up.weight"]


def test_the_norm_that_is_reported_is_the_one_before_clipping(engine: OffloadEngine):
    plain = Plain()
    for clip in (
        engine.clip_grad_norm_,
        lambda bound: torch.nn.utils.clip_grad_norm_(engine.module.parameters(), bound),
    ):
        tokens, targets = batches(1)[0]
        plain.backward(tokens, targets)
        expected = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), 1e-2).item()
        plain.step()
        engine.backward(loss_of(engine(tokens), targets))
        clip(1e-2)
        engine.step()
        assert engine.report().grad_norm == pytest.approx(expected, rel=1e-4)
    assert_near(engine.module, plain.model)


# Optimizers.


@pytest.mark.parametrize("before", [False, True], ids=["built after the engine", "built before, and not given"])
def test_an_optimizer_beside_the_engines_is_refused_at_its_first_step(before: bool):
    model = built()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    with OffloadEngine(model, **OPTIONS) as engine:
        optimizer = early if before else torch.optim.SGD(model.parameters(), lr=0.1)
        backward(engine, *batches(1)[0])
        with pytest.raises(ConfigError, match=r"SGD was built over \d+ parameters.*engine\.optimizer"):
            optimizer.step()
        engine.optimizer.step()
    torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1).step()


def test_an_optimizer_of_other_parameters_is_nobodys_business(engine: OffloadEngine):
    extra = nn.Parameter(torch.ones(3))
    optimizer = torch.optim.SGD([extra], lr=0.1)
    extra.sum().backward()
    optimizer.step()
    assert extra.tolist() == pytest.approx([0.9] * 3)


def test_groups_take_only_what_the_engine_can_train():
    model = built()
    model.embed.requires_grad_(False)
    with OffloadEngine(model, **OPTIONS) as engine:
        with pytest.raises(ConfigError, match="not one that the engine holds"):
            engine.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(2))]})
        with pytest.raises(ConfigError, match="not to be trained"):
            engine.optimizer.add_param_group({"params": model.embed.weight})
        with pytest.raises(ValueError, match="more than one parameter group"):
            engine.optimizer.add_param_group({"params": model.head.weight})
        engine.optimizer.param_groups[0]["params"].append(nn.Parameter(torch.ones(2)))
        backward(engine, *batches(1)[0])
        with pytest.raises(ConfigError, match="does not hold"):
            engine.step()


def test_a_group_may_come_later():
    model, other = built(), built()
    groups = [[p for p in m.parameters() if p is not m.head.weight] for m in (model, other)]
    late = torch.optim.AdamW(groups[1], **ADAMW)
    with OffloadEngine(
        model, optimizer=torch.optim.AdamW(groups[0], **ADAMW), precision="fp32", tile_bytes=65536
    ) as engine:
        for index, (tokens, targets) in enumerate(batches(4)):
            if index == 2:
                engine.module.zero_grad()
                engine.optimizer.add_param_group({"params": model.head.weight, "lr": 3e-3})
                late.add_param_group({"params": other.head.weight, "lr": 3e-3})
            backward(engine, tokens, targets)
            engine.step()
            loss_of(other(tokens), targets).backward()
            late.step()
            other.zero_grad()
            if index == 0:  # torch keeps the gradient of what is in no group
                model.head.weight.grad = None
        assert_near(model, other)


def test_what_is_frozen_later_stays_and_what_was_frozen_is_not_unfrozen(engine: OffloadEngine):
    plain = Plain()
    for index, (tokens, targets) in enumerate(batches(4)):
        for model in (engine.module, plain.model):
            model.blocks[1].requires_grad_(index in (0, 3))
        backward(engine, tokens, targets)
        plain.backward(tokens, targets)
        engine.step()
        plain.step()
    assert_near(engine.module, plain.model)
    model = built()
    model.head.requires_grad_(False)
    with OffloadEngine(model, **OPTIONS), pytest.raises(ConfigError, match=r"head\.weight was not to be trained"):
        model.head.weight.requires_grad = True


def test_states_are_read_and_changed_by_parameter(engine: OffloadEngine):
    plain = Plain()
    for index, (tokens, targets) in enumerate(batches(4)):
        backward(engine, tokens, targets)
        plain.backward(tokens, targets)
        engine.step()
        plain.step()
        for model, optimizer in ((engine.module, engine.optimizer), (plain.model, plain.optimizer)):
            states = optimizer.state[model.blocks[2].up.weight]
            assert set(states) == {"step", "exp_avg", "exp_avg_sq"} and len(optimizer.state) == len(
                list(model.parameters())
            )
            if index == 0:
                states["exp_avg"].mul_(0.5)
            if index == 1:
                states["exp_avg"] = torch.zeros(128, 32)
            if index == 2:
                states["step"].fill_(7.0)
    assert_near(engine.module, plain.model)
    ours = engine.optimizer.state[engine.module.head.weight]["exp_avg"]
    theirs = plain.optimizer.state[plain.model.head.weight]["exp_avg"]
    torch.testing.assert_close(ours.clone(), theirs, rtol=1e-4, atol=1e-7)


def test_states_begin_anew(engine: OffloadEngine):
    plain = Plain()
    for index, (tokens, targets) in enumerate(batches(4)):
        if index == 1:
            for optimizer in (engine.optimizer, plain.optimizer):
                optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        if index == 2:
            del engine.optimizer.state[engine.module.head.weight], plain.optimizer.state[plain.model.head.weight]
        if index == 3:
            engine.optimizer.state.clear()
            plain.optimizer.state.clear()
        backward(engine, tokens, targets)
        plain.backward(tokens, targets)
        engine.step()
        plain.step()
    assert_near(engine.module, plain.model)


_SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "StepLR": lambda o: torch.optim.lr_scheduler.StepLR(o, 2),
    "MultiStepLR": lambda o: torch.optim.lr_scheduler.MultiStepLR(o, [1, 3]),
    "LambdaLR": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: torch.optim.lr_scheduler.MultiplicativeLR(o, lambda step: 0.9),
    "ConstantLR": lambda o: torch.optim.lr_scheduler.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: torch.optim.lr_scheduler.LinearLR(o),
    "ExponentialLR": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: torch.optim.lr_scheduler.PolynomialLR(o),
    "CosineAnnealingLR": lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 4),
    "CosineAnnealingWarmRestarts": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
    "CyclicLR": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 1e-3, 1e-2, 2, cycle_momentum=True),
    "OneCycleLR": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 1e-2, total_steps=6),
    "ReduceLROnPlateau": lambda o: torch.optim.lr_scheduler.ReduceLROnPlateau(o, patience=0),
    "SequentialLR": lambda o: torch.optim.lr_scheduler.SequentialLR(
        o, [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)], [2]
    ),
    "ChainedScheduler": lambda o: torch.optim.lr_scheduler.ChainedScheduler(
        [torch.optim.lr_scheduler.ConstantLR(o, 0.1, 2), torch.optim.lr_scheduler.ExponentialLR(o, 0.9)]
    ),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=1e-3),
}


@pytest.mark.parametrize("name", _SCHEDULERS)
def test_every_scheduler_sets_what_it_sets_with_torch(name: str):
    plain = Plain()
    with OffloadEngine(built(), **OPTIONS) as engine:
        pairs = [(optimizer, _SCHEDULERS[name](optimizer)) for optimizer in (engine.optimizer, plain.optimizer)]
        for tokens, targets in batches(5):
            backward(engine, tokens, targets)
            plain.backward(tokens, targets)
            for optimizer, scheduler in pairs:
                optimizer.step()
                optimizer.zero_grad()
                scheduler.step(*([1.0] if name == "ReduceLROnPlateau" else []))
            ours, theirs = ([(g["lr"], g["betas"]) for g in optimizer.param_groups] for optimizer, _ in pairs)
            assert ours == theirs
        assert_near(engine.module, plain.model)


# Loss scaling.


def test_fp16_without_a_scaled_loss_is_refused(tmp_path: Path):
    with OffloadEngine(built().half(), nvme_path=tmp_path, lr=1e-2) as engine:
        backward(engine, *batches(1)[0])
        with pytest.raises(ConfigError, match=r"small gradients.*GradScaler"):
            engine.optimizer.step()


@pytest.mark.parametrize("clip", [False, True])
def test_a_grad_scaler_works_as_users_write_it(engine: OffloadEngine, clip: bool):
    plain = Plain()
    steps = []
    for model, optimizer in ((engine.module, engine.optimizer), (plain.model, plain.optimizer)):
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        scales = []
        for index, (tokens, targets) in enumerate(batches(5)):
            loss = loss_of(model(tokens), targets)
            scaler.scale(loss * float("inf") if index == 2 else loss).backward()
            if clip:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            scales.append(scaler.get_scale())
        steps.append(scales)
    assert steps[0] == steps[1] and len(set(steps[0])) > 1
    assert engine.global_step == 4
    assert_near(engine.module, plain.model)


def test_a_grad_scaler_works_with_fp16_weights():
    with OffloadEngine(built().half(), lr=1e-3) as engine:
        before = engine.module.head.weight.detach().clone()
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8)
        for tokens, targets in batches(2):
            scaler.scale(loss_of(engine.module(tokens), targets)).backward()
            scaler.step(engine.optimizer)
            scaler.update()
            engine.optimizer.zero_grad()
        assert engine.report().loss_scale == 2.0**8
        assert 0 < (engine.module.head.weight - before).abs().max() < 1e-2


# What stands in the model.


def test_unwrap_gives_an_ordinary_model_back(tmp_path: Path):
    model, plain = built(), Plain()
    with OffloadEngine(model, nvme_path=tmp_path, host_memory="3MiB", **OPTIONS) as engine:
        for tokens, targets in batches(2):
            backward(engine, tokens, targets)
            plain.backward(tokens, targets)
            engine.step()
            plain.step()
        backward(engine, tokens, targets)
        plain.backward(tokens, targets)
        assert engine.unwrap() is model
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert_near(model, plain.model)
    torch.testing.assert_close(model.head.weight.grad, plain.model.head.weight.grad, rtol=1e-4, atol=1e-6)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    with OffloadEngine(model, **OPTIONS) as again:
        backward(again, tokens, targets)
        again.step()


def test_unwrap_is_refused_where_memory_has_no_room(engine: OffloadEngine, monkeypatch):
    monkeypatch.setattr("offload.device.host.available_bytes", lambda: 1000)
    with pytest.raises(BudgetError, match=r"KiB\) as ordinary parameters.*1,000 bytes"):
        engine.unwrap()
    backward(engine, *batches(1)[0])
    engine.step()


def test_a_closed_engine_that_kept_no_weights_says_how_they_are_kept():
    model = built()
    engine = OffloadEngine(model, **OPTIONS)
    engine.close(discard=True)
    for use in (lambda: model(batches(1)[0][0]), lambda: model.head.weight.sum(), engine.step):
        with pytest.raises(OffloadError, match=r"engine\.save_model, engine\.save_checkpoint"):
            use()
    with pytest.raises(ConfigError, match=r"unwrap\(\)"):
        OffloadEngine(model, **OPTIONS)


def test_a_wrapped_model_is_saved_as_an_ordinary_one(engine: OffloadEngine, tmp_path: Path):
    torch.save(engine.module, tmp_path / "model.pt")
    loaded = torch.load(tmp_path / "model.pt", weights_only=False)
    tokens = batches(1)[0][0]
    assert torch.equal(loaded(tokens), engine(tokens))
    assert all(type(parameter) is nn.Parameter for parameter in loaded.parameters())


def test_a_tied_weight_is_one_tensor_in_a_state_dict():
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
    model[2].weight = model[0].weight
    with OffloadEngine(model, **OPTIONS) as engine:
        first = model.state_dict()
        assert first["0.weight"] is first["2.weight"]
        engine.backward(engine(torch.ones(2, 8)).sum())
        engine.step()
        second = model.state_dict()
        assert second["0.weight"] is second["2.weight"] and not torch.equal(first["0.weight"], second["0.weight"])
        assert isinstance(model.state_dict(keep_vars=True)["0.weight"], nn.Parameter)


def test_a_parameter_that_was_replaced_is_named_once(engine: OffloadEngine):
    engine.module.blocks[1].up.weight = nn.Parameter(torch.zeros(128, 32))
    backward(engine, *batches(1)[0])
    with pytest.warns(UserWarning, match=r"blocks\.1\.up\.weight is no longer in the model"):
        engine.step()
    backward(engine, *batches(1)[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.step()


def test_hooks_on_parameters_are_called(engine: OffloadEngine):
    plain = Plain()
    seen: list[list[object]] = [[], []]
    for index, model in enumerate((engine.module, plain.model)):
        weight = model.blocks[1].up.weight
        weight.register_hook(lambda gradient: gradient * 3)
        weight.register_post_accumulate_grad_hook(
            lambda parameter, index=index: seen[index].append((parameter.shape, parameter.grad.norm().item()))
        )
        with model.head.weight.register_hook(lambda gradient: gradient * 0):
            pass
    for tokens, targets in batches(3):
        backward(engine, tokens, targets)
        plain.backward(tokens, targets)
        engine.step()
        plain.step()
    assert len(seen[0]) == 3
    for (shape, norm), (other_shape, other) in zip(*seen, strict=True):
        assert shape == other_shape and norm == pytest.approx(other, rel=1e-4)
    assert_near(engine.module, plain.model)


def test_hooks_and_attributes_from_before_stay(tmp_path: Path):
    plain, model = Plain(), built()
    for owner in (plain.model, model):
        owner.head.weight.no_decay = True
        owner.head.weight.register_hook(lambda gradient: gradient * 3)
        owner.handle = owner.head.bias.register_hook(lambda gradient: gradient * 0)
        owner.seen = []
        owner.embed.weight.register_post_accumulate_grad_hook(
            lambda p, seen=owner.seen: seen.append(p.grad.norm().item())
        )
    least = least_budget(built(), tmp_path, **OPTIONS)
    with OffloadEngine(model, nvme_path=tmp_path, host_memory=least, **OPTIONS) as engine:
        assert model.head.weight.no_decay
        for index, (tokens, targets) in enumerate(batches(3)):
            if index == 2:
                model.handle.remove()
                plain.model.handle.remove()
            backward(engine, tokens, targets)
            plain.backward(tokens, targets)
            engine.step()
            plain.step()
        assert model.seen == pytest.approx(plain.model.seen, rel=1e-4) and len(model.seen) == 3
        assert_near(model, plain.model)


def test_what_would_be_lost_is_refused(engine: OffloadEngine):
    weight, other = engine.module.blocks[1].up.weight, engine.module.blocks[2].up.weight
    with pytest.raises(ConfigError, match="register_post_accumulate_grad_hook"):
        weight.expand_as(weight)
    with pytest.raises(ConfigError, match="register_post_accumulate_grad_hook"):
        torch.autograd.graph.register_multi_grad_hook([weight, other], lambda gradients: None)
    with pytest.raises(ConfigError, match="two parameters of one memory"):
        weight.data = other.data
    with pytest.raises(ValueError, match="read-only"):
        weight.detach().numpy()[0] = 0
    with pytest.raises(TypeError, match="got grad of type float"):
        weight.grad = 1.0
    with pytest.raises(RuntimeError, match="assigned grad"):
        weight.grad = torch.zeros(2)
    backward(engine, *batches(1)[0])
    assert weight.grad is weight.grad
    other.grad = weight.grad
    assert torch.equal(other.grad.clone(), weight.grad.clone())


def test_gradients_from_before_count_and_graphs_from_before_are_refused():
    plain, model = Plain(), built()
    tokens, targets = batches(1)[0]
    plain.backward(tokens, targets)
    loss_of(model(tokens), targets).backward()
    old = loss_of(model(tokens), targets)
    with OffloadEngine(model, **OPTIONS) as engine:
        with pytest.raises(ConfigError, match="made before the engine"):
            old.backward()
        plain.backward(tokens, targets)
        backward(engine, tokens, targets)
        engine.step()
        plain.step()
        assert_near(model, plain.model)


def test_a_parameter_that_was_swapped_is_named(engine: OffloadEngine):
    torch.utils.swap_tensors(engine.module.head.bias, nn.Parameter(torch.zeros(engine.module.head.bias.shape)))
    backward(engine, *batches(1)[0])
    with pytest.warns(UserWarning, match=r"head\.bias is no longer in the model"):
        engine.step()


def test_a_backward_after_close_is_an_error_and_no_crash():
    engine = OffloadEngine(built(), **OPTIONS)
    tokens, targets = batches(1)[0]
    loss = loss_of(engine(tokens), targets)
    engine.close()
    with pytest.raises(OffloadError, match="the engine is closed"):
        loss.backward()


def test_a_close_in_the_middle_of_a_backward_is_an_error_and_no_crash():
    engine = OffloadEngine(built(), **OPTIONS)
    tokens, targets = batches(1)[0]
    engine.module.blocks[2].register_full_backward_hook(lambda *_: engine.close())
    loss = loss_of(engine(tokens), targets)
    with pytest.raises(OffloadError, match="the engine is closed"):
        loss.backward()


def test_a_second_thread_is_refused_while_the_first_computes(engine: OffloadEngine):
    tokens, _ = batches(1)[0]
    inside, go = threading.Event(), threading.Event()

    def stop(*_: object) -> None:
        inside.set()
        assert go.wait(60)

    hook = engine.module.blocks[1].up.register_forward_pre_hook(stop)
    first = threading.Thread(target=engine, args=(tokens,))
    first.start()
    assert inside.wait(60)
    hook.remove()
    try:
        with pytest.raises(OffloadError, match="two threads"), torch.no_grad():
            engine(tokens)
    finally:
        go.set()
        first.join(60)
    engine(tokens)


def test_a_forked_process_gets_an_error_and_does_not_wait(engine: OffloadEngine):
    tokens, targets = batches(1)[0]
    backward(engine, tokens, targets)
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for use in (lambda: engine(tokens), lambda: engine.module.head.weight.sum(), engine.optimizer.step):
                with pytest.raises(OffloadError, match="forked"):
                    use()
            engine.close()
            code = 0
        finally:
            os._exit(code)
    deadline = time.monotonic() + 60
    while (found := os.waitpid(child, os.WNOHANG))[0] == 0 and time.monotonic() < deadline:
        time.sleep(0.05)
    if found[0] == 0:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    assert found == (child, 0)
    engine.step()
    backward(engine, tokens, targets)


@pytest.mark.parametrize("on_nvme", [False, True])
def test_an_interrupt_while_weights_come_in_leaves_nothing_behind(on_nvme: bool, tmp_path: Path, monkeypatch):
    plain, model = Plain(), built()
    memory = {"nvme_path": tmp_path, "host_memory": least_budget(built(), tmp_path, **OPTIONS)} if on_nvme else {}
    with OffloadEngine(model, **memory, **OPTIONS) as engine:
        for window in engine._session.parts.tiers.windows:
            original = window.open
            for after in (False, True):

                def interrupted(address: int, window=window, original=original, after=after) -> None:
                    monkeypatch.setattr(window, "open", original)
                    if after:
                        original(address)
                    raise KeyboardInterrupt

                monkeypatch.setattr(window, "open", interrupted)
                with pytest.raises(KeyboardInterrupt):
                    engine(batches(1)[0][0])
                engine.optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for tokens, targets in batches(3):
                loss = backward(engine, tokens, targets)
                assert loss == pytest.approx(plain.backward(tokens, targets), rel=1e-5)
                engine.step()
                plain.step()
        assert_near(model, plain.model)
        assert not any(entry.pins for entry in engine._session.parts.tiers.host.cache.entries)


def test_an_interrupt_in_the_middle_of_a_step_says_what_is_lost(engine: OffloadEngine, monkeypatch):
    tokens, targets = batches(1)[0]
    engine.backward(loss_of(engine(tokens), targets))

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(engine._session.parts.trained.updates.speculative, "confirm", interrupt)
    with pytest.raises(KeyboardInterrupt):
        engine.step()
    with pytest.raises(OffloadError, match="interrupted half-way"):
        engine(tokens)


class _MaxNorm(nn.Linear):
    def __init__(self, how: str) -> None:
        super().__init__(64, 64)
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.how == "in place of data":
            self.weight.data.clamp_(-0.05, 0.05)
        elif self.how == "other data":
            self.weight.data = torch.renorm(self.weight.data, 2, 0, 0.3)
        elif self.how == "in place":
            with torch.no_grad():
                self.weight.mul_(0.9)
        return super().forward(x)


@pytest.mark.parametrize("how", ["in place of data", "other data", "in place"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_what_a_layer_writes_to_its_own_weight_stays(how: str, precision: str, tmp_path: Path):
    def made() -> nn.Module:
        torch.manual_seed(1)
        return nn.Sequential(*(_MaxNorm(how) for _ in range(5)))

    options = {**OPTIONS, "precision": precision}
    reference = made()
    optimizer = torch.optim.AdamW(reference.parameters(), **ADAMW)
    least = least_budget(made(), tmp_path, **options)
    runs = []
    for memory in ({"host_memory": least, "nvme_path": tmp_path}, {}):
        model = made()
        with OffloadEngine(model, **memory, **options) as engine:
            losses = []
            for step in range(4):
                x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
                loss = engine(x).float().square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            runs.append((losses, [p.detach().clone() for p in model.parameters()]))
    assert runs[0][0] == runs[1][0] and all(map(torch.equal, runs[0][1], runs[1][1]))
    if precision == "fp32":
        for step in range(4):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(step))
            loss = reference(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert runs[0][0][step] == pytest.approx(loss.item(), rel=1e-4)
        for ours, theirs in zip(runs[0][1], reference.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-4, atol=1e-6)


# Dtypes and processes.


def test_running_statistics_go_with_the_weights_and_other_buffers_stay():
    model = nn.Sequential(nn.Conv1d(4, 4, 3), nn.BatchNorm1d(4), nn.InstanceNorm1d(4, track_running_stats=True))
    model.register_buffer("frequencies", torch.ones(4))
    with OffloadEngine(copy.deepcopy(model), precision="bf16", lr=1e-2) as engine:
        loss = engine(torch.randn(2, 4, 9)).float().square().mean()
        engine.backward(loss)
        engine.step()
        dtypes = {name: buffer.dtype for name, buffer in engine.module.named_buffers()}
    assert dtypes["1.running_mean"] == dtypes["2.running_var"] == torch.bfloat16
    assert dtypes["frequencies"] == torch.float32 and dtypes["1.num_batches_tracked"] == torch.int64


@pytest.mark.parametrize("dtype, precision", [(torch.float32, "fp32"), (torch.bfloat16, "bf16")])
def test_the_precision_is_the_models(dtype: torch.dtype, precision: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with OffloadEngine(built().to(dtype), lr=1e-2) as engine:
            assert engine.config.precision == precision
            backward(engine, *batches(1)[0])
            engine.step()


def test_one_of_several_processes_does_not_train_by_itself(monkeypatch):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="one of 2 processes"):
        OffloadEngine(built(), **OPTIONS)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_an_engine_may_be_made_where_gradients_are_off(mode: Callable[[], object]):
    model, plain = built(), Plain()
    with mode():
        engine = OffloadEngine(model, **OPTIONS)
    tokens, targets = batches(1)[0]
    backward(engine, tokens, targets)
    plain.backward(tokens, targets)
    engine.step()
    plain.step()
    assert_near(model, plain.model)
    engine.close()


# Objects that the user has kept from before.


def test_what_was_kept_of_the_model_is_the_model(tmp_path: Path):
    plain, model = Plain(), built()
    model.head.bias.no_decay = True
    kept, other = list(model.parameters()), list(plain.model.parameters())
    average, expected = [p.detach().clone() for p in kept], [p.detach().clone() for p in other]
    seen: list[list[float]] = [[], []]
    for hooked, norms in ((model, seen[0]), (plain.model, seen[1])):
        hooked.embed.weight.register_hook(lambda gradient, norms=norms: norms.append(gradient.norm().item()))
    least = least_budget(built(), tmp_path, **OPTIONS)
    with OffloadEngine(model, nvme_path=tmp_path, host_memory=least, **OPTIONS) as engine:
        assert all(map(lambda p, q: p is q, kept, model.parameters()))
        for tokens, targets in batches(3):
            backward(engine, tokens, targets)
            plain.backward(tokens, targets)
            norm = nn.utils.clip_grad_norm_(kept, 0.5)
            assert norm.item() == pytest.approx(nn.utils.clip_grad_norm_(other, 0.5).item(), rel=1e-4)
            engine.step()
            plain.step()
            for (parameter, mean), (plain_parameter, plain_mean) in zip(
                zip(kept, average, strict=True), zip(other, expected, strict=True), strict=True
            ):
                mean.lerp_(parameter.detach(), 0.5)
                plain_mean.lerp_(plain_parameter.detach(), 0.5)
                torch.testing.assert_close(mean, plain_mean, rtol=1e-4, atol=1e-6)
        engine.unwrap()
    assert all(map(lambda p, q: p is q, kept, model.parameters()))
    assert all(type(parameter) is nn.Parameter for parameter in kept) and model.head.bias.no_decay
    assert_near(model, plain.model)
    for owner in (model, plain.model):
        loss_of(owner(tokens), targets).backward()
    assert seen[0] == pytest.approx(seen[1], rel=1e-3) and len(seen[0]) == 4


def test_what_was_kept_of_a_recurrent_model_is_the_model():
    model = nn.LSTM(8, 16, num_layers=2)
    kept, values = list(model.parameters()), [weakref.ref(p.untyped_storage()) for p in model.parameters()]
    looks = [weakref.ref(parameter) for parameter in kept]
    with OffloadEngine(model, **OPTIONS) as engine:
        assert all(map(lambda p, q: p is q, kept, model.parameters()))
        assert not any(storage() for storage in values)
        for _ in range(2):
            engine(torch.ones(3, 2, 8))[0].sum().backward()
            before = [p.detach().clone() for p in kept]
            engine.step()
            assert not any(map(torch.equal, before, [p.detach().clone() for p in kept]))
        copy.deepcopy(model)(torch.ones(3, 2, 8))
        engine.unwrap()
    assert all(map(lambda look, p: look() is p, looks, model.parameters()))
    model(torch.ones(3, 2, 8))


def test_weights_that_another_model_uses_are_the_same_there():
    model, other = built(), built()
    other.head.weight = model.head.weight
    model.blocks[1].up.weight = model.blocks[0].up.weight
    with OffloadEngine(model, **OPTIONS) as engine:
        backward(engine, *batches(1)[0])
        engine.step()
        assert other.head.weight is model.head.weight and model.blocks[1].up.weight is model.blocks[0].up.weight
        tokens = batches(1)[0][0]
        expected = copy.deepcopy(model.head.weight)
        assert torch.equal(other.norm(other.embed(tokens)) @ expected.t() + other.head.bias, _head_only(other, tokens))


def _head_only(model: Tiny, tokens: torch.Tensor) -> torch.Tensor:
    return model.norm(model.embed(tokens)) @ model.head.weight.t() + model.head.bias


def test_a_parameter_that_something_else_looks_at_gets_a_handle_of_its_own():
    model = built()
    old = model.head.weight
    value, looking = old.detach().clone(), torch._C._WeakTensorRef(old)
    with OffloadEngine(model, **OPTIONS) as engine:
        assert type(old) is nn.Parameter and torch.equal(old, value) and looking is not None
        assert model.head.weight is not old
        backward(engine, *batches(1)[0])
        engine.step()
        assert not torch.equal(model.head.weight.detach(), value)
        with pytest.raises(ConfigError, match=r"engine\.optimizer"):
            torch.optim.SGD([old]).step()


def test_a_parameter_of_a_users_own_class_stays_one():
    class Special(nn.Parameter):
        pass

    model = built()
    model.head.weight = Special(model.head.weight.detach())
    seen = []
    model.head.register_forward_hook(lambda module, *_: seen.append(type(module.weight)))
    with OffloadEngine(model, **OPTIONS) as engine:
        assert isinstance(model.head.weight, Special)
        backward(engine, *batches(1)[0])
        engine.step()
        assert type(copy.deepcopy(model).head.weight) is Special
        engine.unwrap()
    assert type(model.head.weight) is Special and seen == [Special]


def test_two_parameters_over_one_memory_are_refused():
    model, value = built(), torch.zeros(128, 32)
    model.blocks[0].up.weight, model.blocks[2].up.weight = nn.Parameter(value), nn.Parameter(value)
    with pytest.raises(ConfigError, match=r"blocks\.0\.up\.weight and blocks\.2\.up\.weight share memory"):
        OffloadEngine(model, **OPTIONS)
    assert type(model.head.weight) is nn.Parameter
    model.blocks[2].up.weight = model.blocks[0].up.weight
    OffloadEngine(model, **OPTIONS).close()
    beside, side_by_side = built(), torch.zeros(2, 128, 32)
    beside.blocks[0].up.weight, beside.blocks[2].up.weight = map(nn.Parameter, side_by_side)
    OffloadEngine(beside, **OPTIONS).close()


@pytest.mark.parametrize(
    ("strides", "is_refused"), [((0, 1), True), ((2, 1), True), ((3, 2), True), ((3, 5), False), ((1, 4), False)]
)
def test_a_parameter_with_several_elements_at_one_place_is_refused_where_it_is_trained(strides, is_refused):
    model = built()
    for trained in (False, True):
        value = torch.arange(32.0).as_strided((4, 4), strides)
        model.head.extra = nn.Parameter(value, requires_grad=trained)
        if trained and is_refused:
            with pytest.raises(ConfigError, match=r"head\.extra has several elements at one place"):
                OffloadEngine(model, **OPTIONS)
        else:
            with pytest.warns(UserWarning, match="contiguous"):
                engine = OffloadEngine(model, **OPTIONS)
            assert model.head.extra.equal(value)
            engine.unwrap()


# Gradients that a step has used up.


def test_a_loop_without_zero_grad_is_told_once_that_a_step_uses_gradients_up(engine: OffloadEngine):
    backward(engine, *batches(1)[0])
    engine.optimizer.step()
    backward(engine, *batches(1)[0])
    with pytest.warns(UserWarning, match=r"no zero_grad\(\) since the last step") as caught:
        engine.optimizer.step()
    assert [Path(item.filename) for item in caught] == [Path(__file__)]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        backward(engine, *batches(1)[0])
        engine.optimizer.step()


def test_who_knows_that_gradients_are_gone_is_not_told(engine: OffloadEngine):
    def set_to_none() -> None:
        for parameter in engine.module.parameters():
            parameter.grad = None

    ways: list[Callable[[], object]] = [
        engine.optimizer.zero_grad,
        lambda: engine.optimizer.zero_grad(set_to_none=False),
        engine.module.zero_grad,
        lambda: engine.module.zero_grad(set_to_none=False),
        set_to_none,
        lambda: engine.module.head.weight.grad,
    ]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for way in ways:
            backward(engine, *batches(1)[0])
            engine.optimizer.step()
            way()
        for way in ways[:5]:  # the gradients of another's backward are dropped before the own one
            backward(engine, *batches(1)[0])
            way()
            backward(engine, *batches(1)[0])
            engine.optimizer.step()
            engine.optimizer.zero_grad()
        for _ in range(2):
            backward(engine, *batches(1)[0])
            backward(engine, *batches(1)[0])
            engine.step()
        for _ in range(2):
            engine.backward(loss_of(engine(batches(1)[0][0]), batches(1)[0][1]))
            engine.optimizer.step()


# What compiles, shows or sends a model.


def test_scripting_names_the_way(engine: OffloadEngine):
    with pytest.raises(ConfigError, match=r"torch\.jit\.script.*engine\.unwrap\(\)"):
        torch.jit.script(engine.module.head)
    assert not hasattr(next(iter(engine.module.head._forward_hooks.values())), "__name__")


def test_a_view_is_shown_with_the_operation_that_made_it(engine: OffloadEngine):
    assert repr(engine.module.head.bias[0]).endswith(", grad_fn=<SelectBackward0>)")
    assert "grad_fn" not in repr(engine.module.head.bias) + repr(engine.module.head.bias.detach())


def test_a_model_is_sent_to_another_process_by_value(engine: OffloadEngine):
    """Torch would send a file descriptor of each copy, which is closed by the time that the process starts."""
    sent = ForkingPickler.dumps(engine.module)
    assert len(sent) > sum(parameter.numel() * 4 for parameter in engine.module.parameters())
    found = ForkingPickler.loads(sent)
    assert all(type(parameter) is nn.Parameter for parameter in found.parameters())
    for parameter, other in zip(found.parameters(), engine.module.parameters(), strict=True):
        assert torch.equal(parameter, other.detach().clone())


# Options that have no effect.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"optimizer": None, "lr": 1e-3}, r"lr: nothing is trained with optimizer=None"),
        ({"optimizer": None, "optimizer_options": {"momentum": 0.9}}, r"momentum: nothing is trained"),
        ({"nvme_capacity": "1GiB"}, r"nvme_capacity: .* without nvme_path"),
    ],
)
def test_options_that_contradict_each_other_are_refused(options: dict[str, object], said: str):
    with pytest.raises(ConfigError, match=said):
        OffloadEngine(built(), **options)


def test_a_budget_that_bounds_nothing_is_said():
    with pytest.warns(UserWarning, match="device_memory: the model computes on the CPU") as caught:
        OffloadEngine(built(), device_memory="1GiB", **OPTIONS).close()
    assert [Path(item.filename) for item in caught] == [Path(__file__)]


def test_where_no_file_descriptor_is_left_the_error_names_the_limit(monkeypatch):
    def no_more(*_: object) -> None:
        raise OSError(errno.EMFILE, "memfd_create: Too many open files")

    monkeypatch.setattr("aio_ext.Pattern", no_more)
    with pytest.raises(OffloadError, match=r"No file descriptor is left.*may have [\d,]+ open.*ulimit -n"):
        OffloadEngine(built(), **OPTIONS)


def test_a_frozen_parameter_with_hooks_is_refused_in_words():
    model = torch.nn.Linear(4, 4)
    handle = model.weight.register_hook(lambda gradient: gradient)
    model.weight.requires_grad_(False)
    with pytest.raises(ConfigError, match="parameter weight has hooks and is frozen"):
        OffloadEngine(model, lr=0.1)
    handle.remove()
    with OffloadEngine(model, lr=0.1):
        pass
