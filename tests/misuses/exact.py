"""What programs share whose bits are compared: the optimizer is torch's own arithmetic."""

from __future__ import annotations

from misuses.place import gradients
from misuses.strangers import Exact, Net, batch

SGD = {"optimizer": Exact, "lr": 0.05, "optimizer_options": {"momentum": 0.9}}


def wrapped(place, model=None, **options):
    """The engine and its model."""
    engine = place.wrap(Net() if model is None else model, **{**SGD, **options})
    return engine, engine.module


def step(engine, loss):
    """The loss, and the gradients of a step of PyTorch's loop."""
    engine.optimizer.zero_grad()
    loss.backward()
    found = gradients(engine.module)
    engine.optimizer.step()
    return loss.item(), found


def loss_of(call, index):
    return call(batch(index)).square().mean()
