"""Lightning's precision plugins, with what the engine does in their place."""

from __future__ import annotations

import contextlib
from typing import Any, Literal

import torch

from offload.engine import OffloadEngine
from offload.errors import ConfigError
from offload.integrations.clipping import clip_all

PRECISIONS: dict[str, Literal["bf16", "fp16", "fp32"]] = {"32-true": "fp32", "bf16-true": "bf16", "16-true": "fp16"}
"""The engine's precision, by Lightning's."""


OfLightning: Any = object
"""The base of a mixin over a class of Lightning's, which has all that the mixin asks ``super()`` and ``self`` for."""


class EnginePrecision(OfLightning):  # type: ignore[misc]
    """Tasks that Lightning's precision plugins leave to the engine. A mixin over one of them."""

    engine: OffloadEngine
    """Of the present run."""

    def convert_module(self, module: Any) -> Any:
        """The module as it is: the engine converts it, and keeps fp32 masters of the values that it has now."""
        return module

    def tensor_init_context(self) -> contextlib.AbstractContextManager[None]:
        """Weights are made in fp32, whatever they are trained in: masters begin with all bits."""
        return contextlib.nullcontext()

    module_init_context = tensor_init_context

    def backward(self, tensor: torch.Tensor, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> None:
        """By the engine where the loss needs its scale, or an update may begin before the backward is over."""
        strategy = model.trainer.strategy
        if args or kwargs or not strategy.engine_runs_backward:
            super().backward(tensor, model, optimizer, *args, **kwargs)
        else:  # Lightning has divided the loss already
            self.engine.backward(tensor * self.engine.config.gradient_accumulation_steps)

    def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
        """By the engine, where the optimizer has all that it trains: it knows the norms, and rounds none."""
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        if clip_all(self.engine, parameters, clip_val) is None:
            super().clip_grad_by_norm(optimizer, clip_val)


def precision_over(plugin: Any) -> Any:
    """The plugin of Lightning's that was chosen, with what the engine does in its place. Raises ``ConfigError`` for one
    that cannot be."""
    if isinstance(plugin, EnginePrecision):
        return plugin
    kind = type(plugin)
    if kind.__name__ not in ("Precision", "HalfPrecision") or plugin.precision not in PRECISIONS:
        hint = ""
        if "mixed" in str(plugin.precision):
            hint = (
                ": autocast would keep a second copy of all weights, in 16 bits. "
                f'Write precision="{str(plugin.precision).replace("mixed", "true")}", which keeps fp32 masters here'
            )
        raise ConfigError(f"precision {plugin.precision!r}: expected one of {', '.join(PRECISIONS)}{hint}")
    own = type("OffloadPrecision", (EnginePrecision, kind), {})
    return own() if kind.__name__ == "Precision" else own(plugin.precision)
