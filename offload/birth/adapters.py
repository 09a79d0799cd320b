"""A model that ``peft`` has put adapters into, as weights files know it: without them, and by the names from before."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from offload.errors import ConfigError
from offload.units import Site

_OF_FIXED_VALUES = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "ia3_l", "base_layer")
"""Parts of a layer with an adapter whose first values do not depend on the layer's weights."""

_INITIALISERS = (True, False, "gaussian")
"""Values of ``init_lora_weights`` of which the same is true."""


def without_adapters(model: nn.Module) -> nn.Module:
    """The model that the adapters were put into; the model itself, if there are none.

    Raises ``ConfigError`` for adapters whose first values are computed from weights, which are in files still.
    """
    if not hasattr(model, "peft_config") or not callable(getattr(model, "get_base_model", None)):
        return model
    for name, config in model.peft_config.items():  # type: ignore[union-attr, operator]
        if getattr(config, "init_lora_weights", True) not in _INITIALISERS:
            raise _computed(f"init_lora_weights={config.init_lora_weights!r} of adapter {name}")
    base: nn.Module = model.get_base_model()  # type: ignore[operator]
    for name, module in base.named_modules():
        if hasattr(module, "modules_to_save"):
            raise _computed(f"modules_to_save: {name}")
        if _is_adapted(module):
            for part, values in module.named_children():
                if part not in _OF_FIXED_VALUES and any(True for _ in values.parameters()):
                    raise _computed(f"{part} of {name}")
    return base


def sites_by_name(model: nn.Module) -> dict[str, Site]:
    """Sites of parameters and persistent buffers by the names that a state dict of the model has without adapters."""
    found: dict[str, Site] = {}
    for prefix, module in _named_modules(model, ""):
        persistent = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        for name in (*module._parameters, *persistent):
            if module._parameters.get(name) is not None or module._buffers.get(name) is not None:
                found[f"{prefix}.{name}" if prefix else name] = Site(module, name)
    return found


def _named_modules(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    if _is_adapted(module):
        yield from _named_modules(module.base_layer, prefix)  # type: ignore[arg-type]
        return
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _named_modules(child, f"{prefix}.{name}" if prefix else name)


def _is_adapted(module: Any) -> bool:
    """It stands in the place of a layer of the model, which it has as ``base_layer``."""
    return hasattr(module, "base_layer") and hasattr(module, "adapter_layer_names")


def _computed(what: str) -> ConfigError:
    return ConfigError(
        f"weights=: {what} begins with values that are computed from the model's weights, which are in files still. "
        "Load the weights into the model, add the adapter then, and make the engine without weights=."
    )
