"""Mixtures of experts that others wrote, trained with and without the engine. See ``strange_experts``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from strange_experts import COUNT, PROGRAMS
from tiny import least_budget
from torch import nn

from offload import OffloadEngine
from offload.units.find import find_units

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-4}


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return PROGRAMS[name]()


def trained(model: nn.Module, call: Any, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Losses, the gradients of the first micro-batch of two, and the weights after the second step."""
    losses, gradients = [], {}
    for step in range(2):
        for micro in range(2):
            tokens = torch.randint(0, 50, (2, 6), generator=torch.Generator().manual_seed(10 * step + micro))
            loss = call(tokens)
            loss.backward()
            losses.append(loss.item())
            gradients = gradients or {
                name: p.grad.detach().clone() for name, p in model.named_parameters() if p.grad is not None
            }
        optimizer.step()
        optimizer.zero_grad()
    return [losses, gradients, {name: p.detach().clone() for name, p in model.named_parameters()}]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("name", PROGRAMS)
def test_training_has_the_numbers_of_the_plain_program_in_ram_and_at_the_least_budget(
    name: str, tmp_path: Path
) -> None:
    plain = built(name)
    of_plain = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], **ADAMW)
    losses, gradients, weights = trained(plain, plain, of_plain)
    runs = []
    for options in ({}, {"nvme_path": tmp_path, "host_memory": least_budget(built(name), tmp_path, **ADAMW)}):
        model = built(name)
        with OffloadEngine(model, **ADAMW, **options) as engine:
            runs.append(trained(model, engine, engine.optimizer))
    for own_losses, own_gradients, own_weights in runs:
        assert own_losses[:2] == losses[:2]
        assert own_losses == pytest.approx(losses, rel=1e-5)
        assert own_gradients.keys() == gradients.keys()
        assert all(torch.equal(value, own_gradients[name]) for name, value in gradients.items())
        torch.testing.assert_close(own_weights, weights, rtol=0, atol=2e-5)  # the kernels round in another way
    assert all(torch.equal(value, runs[1][2][name]) for name, value in runs[0][2].items())


@pytest.mark.parametrize(("name", "number"), [("by name", COUNT), ("named by a class", 2 * COUNT), ("soft", COUNT)])
def test_experts_in_a_dictionary_and_those_that_a_class_names_are_units(name: str, number: int) -> None:
    assert sum(unit.experts is not None for unit in find_units(built(name), whole=())) == number
