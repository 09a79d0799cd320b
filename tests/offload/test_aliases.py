"""Memory that a parameter had, and that somebody looks at still, stays the same as the parameter."""

from __future__ import annotations

import copy
import ctypes
import os
import pickle
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny import least_budget
from torch import nn

from offload import ConfigError, OffloadEngine, OffloadError
from offload.model.aliases import _ASSIGNED_BYTES_MAX, Alias, Aliases
from offload.model.foreign_memory import is_foreign


class _Parameter:
    """The engine's side of one."""

    name = "weight"
    in_use = ()

    def __init__(self, aliases: Aliases, value: torch.Tensor) -> None:
        self.aliases = aliases
        self.value = value.clone()

    def read_weight(self) -> torch.Tensor:
        return self.value.clone()

    def write(self, value: torch.Tensor) -> None:
        self.value = value.clone()
        self.aliases.bring(0, self, value)


def _followed(memory: torch.Tensor) -> tuple[Aliases, _Parameter]:
    aliases = Aliases()
    parameter = _Parameter(aliases, memory)
    aliases.follow(0, parameter, Alias(memory))
    return aliases, parameter


def test_a_write_to_an_alias_reaches_the_weight_and_other_aliases_of_it():
    memory, other = torch.zeros(2, 3), torch.zeros(2, 3)
    aliases, parameter = _followed(memory.t())
    aliases.follow(0, parameter, Alias(other.t()))
    memory[1, 2] = 5.0
    aliases.take(1)
    assert parameter.value.sum() == 0  # another unit's
    aliases.take(0)
    assert parameter.value[2, 1] == other[1, 2] == 5.0


@pytest.mark.filterwarnings("ignore:tensors outside of the engine")
def test_a_step_brings_an_alias_what_the_weight_has_become_and_that_is_no_write():
    memory = torch.zeros(4)
    aliases, parameter = _followed(memory[1:3])
    parameter.value += 1
    aliases.refresh()
    assert memory.tolist() == [0.0, 1.0, 1.0, 0.0]
    parameter.value += 1
    aliases.take_all()
    assert parameter.value.tolist() == [2.0, 2.0]


def test_what_it_costs_is_said_once_and_nothing_once_nobody_has_the_memory():
    memory = torch.zeros(4)
    aliases, _ = _followed(memory)
    with pytest.warns(UserWarning, match=r"memory that parameters had \(weight, 1 in all.*copies 16 bytes"):
        aliases.refresh()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        aliases.refresh()
    del memory
    aliases.refresh()
    assert not aliases.of_unit


def test_what_a_parameter_was_pointed_to_stays_until_a_step_and_no_longer_than_there_is_room():
    aliases = Aliases()
    parameter = _Parameter(aliases, torch.zeros(4))
    memory = torch.ones(4)
    aliases.assigned(0, parameter, Alias(memory))
    memory.mul_(3)
    del memory
    large = torch.zeros(_ASSIGNED_BYTES_MAX // 4)
    aliases.assigned(1, _Parameter(Aliases(), large), Alias(large))
    assert parameter.value.tolist() == [3.0] * 4
    del large
    aliases.take_all()
    assert not aliases.of_unit


def test_what_was_written_to_an_alias_reaches_the_weight_although_nobody_has_it_any_more():
    memory = torch.zeros(6)
    aliases, parameter = _followed(memory[:3])
    other = _Parameter(aliases, memory[3:])
    aliases.follow(1, other, Alias(memory[3:]))
    memory += 1
    watcher = weakref.ref(memory)
    del memory
    assert watcher() is None
    aliases.take(0)
    assert parameter.value.tolist() == [1.0] * 3 and list(aliases.of_unit) == [1]
    aliases.take(1)
    assert other.value.tolist() == [1.0] * 3
    assert not aliases.of_unit and not aliases._parts


def test_a_write_within_the_use_of_the_unit_is_one_error_although_the_alias_is_gone():
    memory = torch.zeros(4)
    aliases, _ = _followed(memory)
    aliases.take(0)
    memory.add_(1)
    del memory
    with pytest.raises(OffloadError, match=r"weight: a tensor over the memory .* was written to within"):
        aliases.check(0)


def test_a_write_to_an_alias_within_the_use_of_its_unit_is_one_error():
    memory = torch.zeros(4)
    aliases, _ = _followed(memory)
    aliases.check(0)
    memory.add_(1)
    with pytest.raises(OffloadError, match=r"weight: a tensor over the memory .* was written to within"):
        aliases.check(0)


def _loaded(folder: Path, **options: Any) -> torch.Tensor:
    torch.save({"weight": torch.ones(2000)}, folder / "weights.pt")
    return torch.load(folder / "weights.pt", **options)["weight"]


def _from_safetensors(folder: Path) -> torch.Tensor:
    save_file({"weight": torch.ones(2000)}, folder / "weights.safetensors")
    return load_file(folder / "weights.safetensors")["weight"]


@pytest.mark.parametrize(
    ("make", "expected"),
    [
        (lambda folder: torch.ones(3), False),
        (lambda folder: _loaded(folder), False),
        (lambda folder: _loaded(folder, mmap=True), False),
        (_from_safetensors, False),
        (lambda folder: copy.deepcopy(nn.Linear(2, 2)).weight, False),
        (lambda folder: pickle.loads(pickle.dumps(nn.Linear(2, 2))).weight, False),
        (lambda folder: torch.from_numpy(np.ones(3)), True),
        (lambda folder: torch.from_dlpack(np.ones(3)), True),
        (lambda folder: torch.frombuffer(bytearray(8), dtype=torch.float32)[1:], True),
        (lambda folder: torch.from_numpy(np.memmap(folder / "array", mode="w+", shape=(3,))), True),
        (lambda folder: torch.ones(3).share_memory_(), True),
    ],
)
def test_memory_that_torch_has_not_made_is_foreign_unless_a_file_alone_has_it(make, expected, tmp_path: Path):
    assert is_foreign(make(tmp_path).untyped_storage()) is expected


def test_memory_that_another_process_has_shared_is_that_ones(monkeypatch: pytest.MonkeyPatch):
    shared = torch.ones(3).share_memory_()
    monkeypatch.setattr(os, "getpid", lambda: 1)
    assert not is_foreign(shared.untyped_storage())


class _Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return x


def _flat(model: _Net) -> torch.Tensor:
    flat = torch.cat([parameter.data.reshape(-1) for parameter in model.parameters()])
    start = 0
    for parameter in model.parameters():
        parameter.data = flat[start : start + parameter.numel()].view_as(parameter)
        start += parameter.numel()
    return flat


def _buffer(model: _Net) -> torch.Tensor:
    model.layers[1].register_buffer("alias", model.layers[1].weight.data)
    return model.layers[1].alias


def _made_of_an_array(model: _Net) -> Any:
    array = model.layers[1].weight.detach().numpy().copy()
    model.layers[1].weight = nn.Parameter(torch.from_numpy(array))
    return array


ALIASES: dict[str, Callable[[_Net], Any]] = {
    "an array below": _made_of_an_array,
    "one flat buffer": _flat,
    "a buffer": _buffer,
    "an array": lambda model: model.layers[1].weight.detach().numpy(),
}


def _seen(folder: Path | None, make_alias: Callable[[_Net], Any], *, of_engine: bool) -> list[float]:
    torch.manual_seed(0)
    model = _Net()
    alias = make_alias(model)
    options: dict[str, Any] = {"optimizer": "adamw", "lr": 1e-2, "weight_decay": 0.01}
    if folder is not None:
        options.update(host_memory=least_budget(_Net(), folder, **options), nvme_path=folder)
    engine = OffloadEngine(model, **options) if of_engine else None
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2) if engine is None else engine.optimizer
    seen = []
    for step in range(3):
        x = torch.randn(2, 16, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen += [loss.item(), float(alias.sum())]
        alias *= 0.5
        seen.append(model.layers[1].weight.detach().sum().item())
        assigned = torch.full((16,), 0.1)
        model.layers[2].bias.data = assigned
        assigned += 0.1
    if engine is not None:
        engine.close()
    return seen


@pytest.mark.filterwarnings("ignore:tensors outside of the engine")
@pytest.mark.parametrize("tier", ["ram", "nvme"])
@pytest.mark.parametrize("how", ALIASES)
def test_aliases_from_before_the_engine_are_read_and_written_to_as_in_pytorch(how, tier, tmp_path):
    expected = _seen(None, ALIASES[how], of_engine=False)
    folder = tmp_path if tier == "nvme" else None
    assert _seen(folder, ALIASES[how], of_engine=True) == pytest.approx(expected, rel=1e-5)


def test_a_tensor_that_is_given_a_parameters_memory_shares_it() -> None:
    model = _Net()
    plain = copy.deepcopy(model)
    tensor, expected = torch.zeros(16, 16), torch.zeros(16, 16)
    with OffloadEngine(model, lr=1e-2, weight_decay=0.01) as engine:
        optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
        tensor.data, expected.data = model.layers[1].weight.data, plain.layers[1].weight.data
        assert torch.equal(tensor.norm(), expected.norm()) and type(tensor) is torch.Tensor
        for of in (tensor, expected):
            of.mul_(0.5)
        assert torch.equal(model.layers[1].weight.detach().clone(), expected)
        for run, step in ((engine, engine.optimizer), (plain, optimizer)):
            run(torch.ones(2, 16)).square().mean().backward()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                step.step()
        torch.testing.assert_close(tensor, expected)
        with pytest.raises(ConfigError, match=r"of layers\.1\.weight: the two would be one memory"):
            tensor.data = model.layers[1].weight.data[:3]


def test_what_is_no_handles_is_assigned_as_ever() -> None:
    tensor, other = nn.Parameter(torch.zeros(3)), torch.ones(4)
    tensor.data = other
    assert tensor.data_ptr() == tensor.data.data_ptr() == other.data_ptr()
    with pytest.raises(TypeError, match="Variable data has to be a tensor"):
        tensor.data = 3
    assert isinstance(torch.Tensor.data, type(torch.Tensor.is_leaf))


def test_data_is_watched_while_there_are_handles_of_any_engine():
    code = """
import gc
import torch
from torch import nn
from offload import OffloadEngine, OffloadError

model, other = nn.Linear(4, 4), nn.Linear(4, 4)
engine, another = OffloadEngine(model, lr=1e-2), OffloadEngine(other, lr=1e-2)
handle = model.weight
another.close()
engine.close(discard=True)
del engine, another, model, other
gc.collect()
try:
    torch.zeros(4, 4).data = handle
except OffloadError as error:
    print(error)
del handle
gc.collect()
print("data" in vars(torch.Tensor))
"""
    said = forked.run_well(code)
    assert "the engine is closed" in said and said.endswith("False\n")


def test_who_looks_at_the_memory_of_before_keeps_its_value(tmp_path: Path) -> None:
    """``p.data, average = average, p.data``: weights and averages change places, and back."""
    weight, average = torch.ones(3, 3), torch.full((3, 3), 5.0)
    model = nn.Linear(3, 3, bias=False)
    model.weight.data.copy_(weight)
    with OffloadEngine(model, lr=0.1, nvme_path=tmp_path, host_memory="1MiB", precision="fp32"):
        kept, row = model.weight.detach(), model.weight[0]
        model.weight.data, other = average, model.weight.data
        assert model.weight.eq(5).all() and other.eq(1).all() and kept.eq(1).all() and row.eq(1).all()
        model.weight.data, other = other, model.weight.data
        assert model.weight.eq(1).all() and other.eq(5).all() and average.eq(5).all()
        look = model.weight.detach()
        look.data = torch.zeros(3, 3)
        assert model.weight.eq(1).all() and look.eq(0).all()
        saved = model.weight.data
        model.weight.data = torch.full((3, 3), 2.0)
        model.weight.data = saved
        saved.mul_(3)
        assert model.weight.eq(3).all()


@pytest.mark.filterwarnings("ignore:tensors outside of the engine")
def test_a_checkpoint_that_is_loaded_reaches_memory_that_a_parameter_had(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    had = model[0].weight.data
    with OffloadEngine(model, precision="fp32", lr=0.1, nvme_path=tmp_path) as engine:
        array = (ctypes.c_float * 64).from_address(model[1].weight.data_ptr())
        engine.save_checkpoint(tmp_path / "saved")
        before = had.clone(), list(array)
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
        assert not torch.equal(had, before[0]) and list(array) != before[1]
        engine.load_checkpoint(tmp_path / "saved")
        assert torch.equal(had, before[0]) and list(array) == before[1]


@pytest.mark.filterwarnings("ignore:tensors outside of the engine")
def test_tensors_that_are_given_a_parameters_memory_share_it_with_each_other() -> None:
    model = nn.Linear(8, 8)
    with OffloadEngine(model, precision="fp32"):
        one, another = torch.empty(0), torch.empty(0)
        one.data, another.data = model.weight.data, model.weight.data
        one[0, 0] = 5.0
        assert another[0, 0] == model.weight[0, 0] == 5.0
        assert one.data_ptr() == another.data_ptr() == model.weight.data_ptr()
