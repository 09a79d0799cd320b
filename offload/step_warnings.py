"""Warnings of a step: what a loop does beside what PyTorch's would, each said once."""

from __future__ import annotations

import weakref

from torch import nn

from offload.access import ExternalAccess
from offload.errors import warn
from offload.model.handle import Handle
from offload.model.hooks import Hooks


class StepWarnings:
    """The training thread makes all calls."""

    def __init__(self, model: nn.Module, hooks: Hooks, access: ExternalAccess) -> None:
        self._model = weakref.ref(model)
        self._hooks = hooks
        self._access = access
        self._has_warned_of_empty_step = False

    def before_step(self) -> None:
        """A step is about to be taken."""
        self._of_lost_parameters()
        self._access.using_gradients("engine.optimizer.step()", self._access.to_be_zeroed)

    def empty_step(self) -> None:
        """No parameter took part in a step."""
        if not self._has_warned_of_empty_step:
            self._has_warned_of_empty_step = True
            warn(
                "engine.optimizer.step(): no parameter has a gradient, and nothing changes. A step uses gradients up, "
                "as if zero_grad() came after it; the next backward brings new ones." + self._of_newcomers()
            )

    def _of_newcomers(self) -> str:
        """Parameters that have a gradient, and came into the model after the engine was made."""
        model = self._model()
        named = model.named_parameters() if model is not None else ()
        names = [name for name, parameter in named if not isinstance(parameter, Handle) and parameter.grad is not None]
        if not names:
            return ""
        return (
            f" {len(names)} parameters that came into the model later have one ({names[0]}, ...): add adapters before "
            "the engine is made, or give them an optimizer of their own."
        )

    def _of_lost_parameters(self) -> None:
        """Parameters that were replaced behind the engine."""
        model = self._model()
        for name in self._hooks.standing.lost(model) if model is not None else ():
            warn(
                f"parameter {name} is no longer in the model, and what was put in its place is not the engine's: it is "
                "not trained by engine.optimizer. Write into the parameter (parameter.data.copy_(value)) instead, or "
                "change the model before the engine is made."
            )
        replaced = self._hooks.standing.replaced()
        if replaced:
            warn(
                f"{len(replaced)} quantised parameters ({replaced[0]}, ...) were replaced, as by a merge of adapters: "
                "what stands there is in memory beside the engine's budget, and checkpoints keep what stood there. "
                "Merge in the model that engine.unwrap() gives."
            )
