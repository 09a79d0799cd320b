"""``nn.TransformerEncoder``, which looks at the parameters of its first layer before that is called.

In evaluation it packs away what a mask hides, if the layer's parameters are ordinary ones: a handle is none, and the
layers' own fast path would fill what is hidden with other numbers. It reads no values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from offload.model.installed_hooks import HookOfModel
from offload.model.unit_in_model import UnitInModel


def show_first_layers(model: nn.Module, units: Mapping[nn.Module, UnitInModel]) -> Callable[[], None]:
    """Let encoders find the ordinary parameters in their first layers, which ``units`` has by each module that owns
    some. Returns the call that undoes it."""
    installed = []
    for module in model.modules():
        if isinstance(module, nn.TransformerEncoder) and len(module.layers) > 0:
            owners = list(module.layers[0].modules())
            found = list(dict.fromkeys(units[owner] for owner in owners if owner in units))
            before, after = HookOfModel(_show, found), HookOfModel(_hide, found)
            installed.append(module.register_forward_pre_hook(before, prepend=True))
            installed.append(module.register_forward_hook(after, always_call=True))

    def undo() -> None:
        for hook in installed:
            hook.remove()

    return undo


def _show(units: list[UnitInModel], module: nn.Module, args: Any) -> None:
    for unit in units:
        unit.wake()
        unit.show_parameters()


def _hide(units: list[UnitInModel], module: nn.Module, args: Any, output: Any) -> None:
    for unit in units:
        if not unit.forward_depth:
            unit.show_handles()
            if not unit.num_users:
                unit.rest()
