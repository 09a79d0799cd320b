"""Has the forwards of a model that is not trained counted."""

from __future__ import annotations

from torch import nn

from offload.closing import Closers
from offload.model.installed_hooks import HookOfModel
from offload.run.forwards import Forwards, whole_modules


def count_forwards(model: nn.Module, forwards: Forwards, closers: Closers) -> None:
    """Tell ``forwards`` of each one of the model, until the engine is closed."""
    begin, end = HookOfModel(forwards.begin), HookOfModel(forwards.end)
    for module in whole_modules(model):
        before = module.register_forward_pre_hook(begin, with_kwargs=True, prepend=True)
        after = module.register_forward_hook(end, with_kwargs=True, always_call=True)
        closers.callback(before.remove)
        closers.callback(after.remove)
