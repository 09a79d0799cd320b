"""A model that ``peft`` has put adapters into, as weights files know it: without them, and by the names from before."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from torch import nn

from offload.errors import ConfigError
from offload.units import Site

_OF_FIXED_VALUES = ("lora_A", "lora_B", "lora_embedding_A", "lora_embedding_B", "ia3_l")
"""Parts of a layer with an adapter whose first values do not depend on the layer's weights."""

_BASES = ("base_layer", "original_module")
"""Attributes by which what stands in the place of a layer of the model has that layer."""

_INITIALISERS = (True, False, "gaussian")
"""Values of ``init_lora_weights`` that leave the layer's weights as they are, and look at nothing else."""


def without_adapters(model: nn.Module) -> nn.Module:
    """The model that the adapters were put into; the model itself, if there are none.

    Raises ``ConfigError`` for adapters that change the weights, which are in files, when they are made.
    """
    if not hasattr(model, "peft_config") or not callable(getattr(model, "get_base_model", None)):
        return model
    for name, config in model.peft_config.items():  # type: ignore[union-attr, operator]
        value = getattr(config, "init_lora_weights", True)
        if value not in _INITIALISERS:
            raise ConfigError(
                f"weights=: init_lora_weights={value!r} of adapter {name} takes a part out of the model's weights when "
                "it begins, and these are in files. Load the weights into the model, add the adapter then, and make "
                "the engine without weights=."
            )
    base: nn.Module = model.get_base_model()  # type: ignore[operator]
    return base


def computed(base: nn.Module) -> Iterator[tuple[str, Site]]:
    """Yield the name and the site of each tensor of an adapter that may begin with what is worked out from weights of
    the model: DoRA's magnitudes, copies of layers (``modules_to_save``)."""
    for name, module in base.named_modules():
        layer = _layer_of(module)
        if layer is None:
            continue
        for part, values in module.named_children():
            if values is layer or _layer_of(values) is not None or part in _OF_FIXED_VALUES:
                continue
            for inner in values.modules():
                own = (item for item in (*inner._parameters.items(), *inner._buffers.items()) if item[1] is not None)
                yield from ((f"{part} of {name}", Site(inner, of_tensor)) for of_tensor, _ in own)


def without_value(what: str) -> ConfigError:
    """The error for such a tensor, where it is not known how it was worked out."""
    return ConfigError(
        f"weights=: {what} begins with values that are computed from the model's weights, which are in files still. "
        "Build the model and put the adapter in by one function, offload.deferred_init(build), which brings the model "
        "to its dtype before that, or use OffloadEngine.from_pretrained(..., peft_config=...): they are computed from "
        "the files then. Or load the weights into the model, add the adapter, and make the engine without weights=."
    )


def sites_by_name(model: nn.Module) -> dict[str, Site]:
    """Sites of parameters and persistent buffers by the names that a state dict of the model has without adapters."""
    found: dict[str, Site] = {}
    for prefix, module in _named_modules(model, ""):
        persistent = [name for name in module._buffers if name not in module._non_persistent_buffers_set]
        for name in (*module._parameters, *persistent):
            if module._parameters.get(name) is not None or module._buffers.get(name) is not None:
                found[f"{prefix}.{name}" if prefix else name] = Site(module, name)
    return found


@contextlib.contextmanager
def in_dtypes_of_layers() -> Iterator[None]:
    """Adapters that ``peft`` puts in are in the dtype of their layers, as in memory: on the meta device it leaves them
    in fp32, and what it works out from them would be rounded otherwise."""
    tuners = sys.modules.get("peft.tuners.tuners_utils")
    kind: Any = getattr(tuners, "BaseTunerLayer", None)
    known = getattr(kind, "_move_adapter_to_device_of_base_layer", None)
    if known is None:
        yield
        return

    def move(layer: Any, adapter_name: str, *args: Any, **kwargs: Any) -> None:
        known(layer, adapter_name, *args, **kwargs)
        dtype = next((p.dtype for p in layer.get_base_layer().parameters() if p.is_floating_point()), None)
        for name in layer.adapter_layer_names if dtype is not None else ():
            held = getattr(layer, name, None)
            if not isinstance(held, nn.ModuleDict | nn.ParameterDict) or adapter_name not in held:
                continue
            if any(parameter.device.type == "meta" for parameter in held.parameters()):
                held[adapter_name] = held[adapter_name].to(dtype)

    kind._move_adapter_to_device_of_base_layer = move
    try:
        yield
    finally:
        kind._move_adapter_to_device_of_base_layer = known


def _named_modules(module: nn.Module, prefix: str) -> Iterator[tuple[str, nn.Module]]:
    layer = _layer_of(module)
    if layer is not None:
        yield from _named_modules(layer, prefix)
        return
    yield prefix, module
    for name, child in module._modules.items():
        if child is not None:
            yield from _named_modules(child, f"{prefix}.{name}" if prefix else name)


def _layer_of(module: Any) -> nn.Module | None:
    """The layer of the model in whose place this stands; None for all else."""
    if not hasattr(module, "adapter_layer_names"):
        return None
    found = (getattr(module, name, None) for name in _BASES)
    return next((layer for layer in found if isinstance(layer, nn.Module)), None)
