"""PyTorch's own loop, untouched: gradients are seen, clipped, changed and dropped through ``parameter.grad``."""

import copy
import threading
from pathlib import Path

import pytest
import torch
from tiny import Tiny, batches, loss_of

from offload import NonFiniteGradient, OffloadEngine
from offload.tiers.home import StoredHome

ADAMW = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-4}


def built() -> Tiny:
    torch.manual_seed(0)
    return Tiny()


@pytest.fixture
def engine(tmp_path: Path):
    with OffloadEngine(built(), precision="fp32", nvme_path=tmp_path, host_memory="5MiB", **ADAMW) as engine:
        assert engine.plan.nvme_bytes["grads"] > 0
        yield engine


def test_clip_grad_norm_of_torch_clips_and_moves_nothing(engine, monkeypatch):
    readers = []
    read = StoredHome.read
    monkeypatch.setattr(
        StoredHome,
        "read",
        lambda home, *args, **more: readers.append(threading.current_thread()) or read(home, *args, **more),
    )
    model, plain = engine.module, built()
    optimizer = torch.optim.AdamW(plain.parameters(), **ADAMW)
    for tokens, targets in batches(3):
        norms = []
        for module, step in ((model, engine.optimizer), (plain, optimizer)):
            step.zero_grad()
            loss_of(module(tokens), targets).backward()
            before = readers.count(threading.main_thread())
            norms.append(torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1).item())
            if module is model:
                assert readers.count(threading.main_thread()) == before > 0  # updates go on beside
            step.step()
        assert norms[0] == pytest.approx(norms[1], rel=1e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(model.get_parameter(name).detach().clone(), parameter.detach(), rtol=1e-3, atol=1e-4)


def test_products_that_lose_bits_or_signs_lose_them_here(engine):
    def changed(model, dividing=False):
        first, second, third = (block.up.weight.grad for block in model.blocks[:3])
        first.mul_(2.0**-140)
        first.div_(2.0**-140) if dividing else first.mul_(2.0**100).mul_(2.0**40)
        for _ in range(30):
            second.div_(2.0**5) if dividing else second.mul_(2.0**-5)
        third.zero_()
        third.mul_(-1)
        return first.clone(), second.clone(), 1 / third

    model, plain = engine.module, built()
    for dividing in (False, True):
        for module in (model, plain):
            module.zero_grad()
            loss_of(module(batches(1)[0][0]), batches(1)[0][1]).backward()
        for ours, theirs in zip(changed(model, dividing), changed(plain, dividing), strict=True):
            assert torch.equal(ours, theirs)


def test_the_engines_own_clipping_is_the_same(tmp_path: Path):
    results = []
    for own in (True, False):
        with OffloadEngine(built(), precision="fp32", **ADAMW) as engine:
            for tokens, targets in batches(2):
                engine.backward(loss_of(engine(tokens), targets))
                clip = engine.clip_grad_norm_ if own else None
                if clip is not None:
                    norm = clip(0.1)
                else:
                    norm = torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
                assert norm.item() > 0.1
                engine.step()
            results.append({name: p.detach().clone() for name, p in engine.module.named_parameters()})
    for name, value in results[0].items():
        torch.testing.assert_close(value, results[1][name], rtol=1e-6, atol=1e-7, msg=name)


def test_gradients_are_seen_changed_and_dropped(engine):
    model, plain = engine.module, built()
    tokens, targets = batches(1)[0]
    assert model.head.weight.grad is None
    for module in (model, plain):
        loss_of(module(tokens), targets).backward()
    for name, parameter in plain.named_parameters():
        gradient = model.get_parameter(name).grad
        torch.testing.assert_close(gradient.clone(), parameter.grad, rtol=1e-3, atol=1e-6)
        assert gradient.shape == parameter.shape
    model.head.weight.grad.mul_(3.0)
    model.head.bias.grad.clamp_(-1e-3, 1e-3)
    model.norm.weight.grad = torch.full((128,), 0.25)
    model.norm.bias.grad = None
    torch.testing.assert_close(model.head.weight.grad.clone(), 3 * plain.head.weight.grad, rtol=1e-3, atol=1e-6)
    assert model.head.bias.grad.abs().max() <= 1e-3
    assert model.norm.weight.grad.tolist() == [0.25] * 128
    assert model.norm.bias.grad is None
    before = model.norm.bias.detach().clone()
    engine.optimizer.step()
    assert torch.equal(model.norm.bias.detach().clone(), before)
    used = model.head.weight.grad
    assert used.norm().item() == pytest.approx(3 * plain.head.weight.grad.norm().item(), rel=1e-3)
    torch.testing.assert_close(used.clone(), 3 * plain.head.weight.grad, rtol=1e-3, atol=1e-6)
    loss_of(model(tokens), targets).backward()
    model.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    engine.optimizer.step()
    assert all(torch.equal(model.get_parameter(name).detach().clone(), value) for name, value in weights.items())


def test_a_clipped_gradient_that_is_added_to_counts_as_clipped(engine):
    tokens, targets = batches(1)[0]
    model = engine.module
    loss_of(model(tokens), targets).backward()
    first = model.head.weight.grad.clone()
    model.head.weight.grad.mul_(0.5)
    loss_of(model(tokens), targets).backward()
    torch.testing.assert_close(model.head.weight.grad.clone(), 1.5 * first, rtol=1e-4, atol=1e-7)


def test_fp16_scales_the_loss_skips_bad_steps_and_goes_on(tmp_path: Path):
    with OffloadEngine(built(), precision="fp16", lr=1e-3, nvme_path=tmp_path, host_memory="6MiB") as engine:
        model = engine.module
        (tokens, targets), (more, more_targets) = batches(2)
        engine.backward(loss_of(engine(tokens), targets))
        plain = built()
        loss_of(plain(tokens), targets).backward()
        torch.testing.assert_close(model.head.weight.grad.float().clone(), plain.head.weight.grad, rtol=5e-2, atol=1e-4)
        engine.step()
        assert engine.global_step == 1 and engine.report().loss_scale == 2.0**16
        weights = {name: p.detach().clone() for name, p in model.named_parameters()}
        engine.backward(loss_of(engine(more), more_targets) * 1e6)  # overflows fp16
        engine.step()
        assert engine.global_step == 1
        assert all(torch.equal(model.get_parameter(name).detach().clone(), value) for name, value in weights.items())
        engine.backward(loss_of(engine(more), more_targets))
        engine.step()
        assert engine.global_step == 2 and engine.report().loss_scale == 2.0**15


def test_a_gradient_that_is_not_finite_changes_nothing(engine):
    tokens, targets = batches(1)[0]
    model = engine.module
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    loss_of(model(tokens), targets).backward()
    model.blocks[0].up.bias.grad = torch.full((512,), float("nan"))
    with pytest.raises(NonFiniteGradient, match=r"blocks\.0\.up\.bias"):
        engine.optimizer.step()
    assert all(torch.equal(model.get_parameter(name).detach().clone(), value) for name, value in weights.items())


def test_a_parameter_without_elements_takes_its_steps(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    model.nothing = torch.nn.Parameter(torch.zeros(0, 4))
    reference = copy.deepcopy(model)
    optimizer = torch.optim.AdamW(reference.parameters())
    with OffloadEngine(model, precision="fp32", nvme_path=tmp_path) as engine:
        for module, stepper in ((reference, optimizer), (engine.module, engine.optimizer)):
            (module(torch.ones(2, 4)).sum() + module.nothing.sum()).backward()
            stepper.step()
        expected, found = (opt.state_dict()["state"] for opt in (optimizer, engine.optimizer))
        assert found.keys() == expected.keys()
        for index, states in expected.items():
            for name, value in states.items():
                assert found[index][name].shape == value.shape, (index, name)
