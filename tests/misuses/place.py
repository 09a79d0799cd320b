"""Where a case runs: under plain PyTorch, in the engine with everything in RAM, or in the engine on NVMe.

A case is written once, with the engine's calls: plain PyTorch has ``Plain``, which does the same by PyTorch's own.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from tiny import Tiny, batches, loss_of
from torch import Tensor, nn

from offload import BudgetError, OffloadEngine
from swapper import OffloadError

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-4}
VOCAB = 64


def small(blocks: int = 8) -> Tiny:
    """The model of most cases: 71,552 parameters in 11 units, most of them on NVMe with the least budget."""
    torch.manual_seed(0)
    return Tiny(32, blocks, VOCAB)


def data(count: int = 3) -> list[tuple[Tensor, Tensor]]:
    """Batches for ``small``."""
    return batches(count, VOCAB)


class Plain:
    """The calls of ``OffloadEngine`` in plain PyTorch."""

    def __init__(self, model: nn.Module, optimizer: Any = "adamw", **options: Any) -> None:
        self.module = model
        self._accumulated = 0
        self._steps = options.pop("gradient_accumulation_steps", 1)
        self._clipping = options.pop("gradient_clipping", 0.0)
        options.pop("precision", None)
        options.update(options.pop("optimizer_options", {}))
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        if optimizer == "adamw":
            optimizer = torch.optim.AdamW
        elif isinstance(optimizer, str):
            optimizer = {"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adagrad": torch.optim.Adagrad}[optimizer]
        self.optimizer = optimizer(trained, **options) if isinstance(optimizer, type) else optimizer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def backward(self, loss: Tensor) -> None:
        (loss.float() / self._steps).backward()
        self._accumulated += 1

    def step(self) -> None:
        if self._accumulated < self._steps:
            return
        self._accumulated = 0
        if self._clipping:
            self.clip_grad_norm_(self._clipping)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def together(
        self, micro_batches: Iterable[Any], run: Callable[[Any], Any], at_once: int | None = None
    ) -> list[Any]:
        return [run(each) for each in micro_batches]

    def clip_grad_norm_(self, max_norm: float) -> Tensor:
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def state_dict(self) -> dict[str, Any]:
        return self.module.state_dict()

    def load_state_dict(self, state: dict[str, Any], strict: bool = True) -> Any:
        return self.module.load_state_dict(state, strict=strict)

    def unwrap(self) -> nn.Module:
        return self.module

    def synchronize(self) -> None:
        pass

    def close(self) -> None:
        pass

    def __enter__(self) -> Plain:
        return self

    def __exit__(self, *error: object) -> None:
        pass


class Place:
    """What a case is given. ``name`` is "torch", "ram" or "nvme"."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.folder = folder
        self.messages: list[str] = []
        """Of the engine's errors that the case has caught, and went on."""
        self.left: list[Any] = []
        """Engines to close at the end."""

    @property
    def has_engine(self) -> bool:
        return self.name != "torch"

    def wrap(self, model: nn.Module, **options: Any) -> Any:
        """The model, ready to be trained in this place: by AdamW in fp32 if nothing else is asked for."""
        if options.get("optimizer", "adamw") == "adamw":
            options = {**ADAMW, **options}
        if not self.has_engine:
            return Plain(model, **options)
        options.setdefault("precision", "fp32")
        if self.name == "nvme":
            options = {**options, "nvme_path": self.folder, "tile_bytes": 65536}
            try:
                OffloadEngine(model, **options, host_memory=1)
            except BudgetError as error:
                options["host_memory"] = error.needed_bytes
        engine = OffloadEngine(model, **options)
        self.left.append(engine)
        return engine

    def small(self, **options: Any) -> Any:
        """``small``, wrapped."""
        return self.wrap(small(), **options)

    def attempt(self, call: Callable[[], Any]) -> str:
        """Make a call that may raise: "nothing raised", or the built-in kind of what it raised."""
        try:
            call()
        except Exception as error:
            if isinstance(error, OffloadError):
                self.messages.append(f"{type(error).__name__}: {error}")
            kind = next(k for k in type(error).__mro__ if getattr(builtins, k.__name__, None) is k)
            return f"raises {kind.__name__}"
        return "nothing raised"


def values(model: nn.Module) -> dict[str, Tensor]:
    """All parameters and buffers now."""
    return {name: value.detach().clone() for name, value in [*model.named_parameters(), *model.named_buffers()]}


def gradients(model: nn.Module) -> dict[str, Tensor | None]:
    """All gradients now."""
    return {name: None if p.grad is None else p.grad.detach().clone() for name, p in model.named_parameters()}


def losses(engine: Any, count: int = 2, model: Any = None) -> Iterator[Tensor]:
    """The losses of some batches, one by one."""
    for tokens, targets in data(count):
        yield loss_of((engine if model is None else model)(tokens), targets)


def train(engine: Any, steps: int = 2) -> list[float]:
    """Some steps by the engine's own calls; the losses."""
    found = []
    for loss in losses(engine, steps):
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def train_by_hand(engine: Any, steps: int = 2) -> list[float]:
    """The same by PyTorch's own loop."""
    found = []
    for loss in losses(engine, steps, engine.module):
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        found.append(loss.item())
    return found
