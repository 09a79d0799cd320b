"""Progress of a run: what the session counts, and checkpoints save and restore."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from offload.optim.loss_scale import LossScale


@dataclass
class Progress:
    """Steps taken, what the coming step has seen so far, and the loss scale, which only fp16 has."""

    loss_scale: LossScale | None
    global_step: int = 0
    num_backwards: int = 0
    """Those of ``engine.backward`` since the last step."""
    has_other_gradients: bool = False
    """Gradients of a backward that the user called have come since the last step."""

    def begin_step(self) -> None:
        """Nothing of the coming step is there yet."""
        self.num_backwards, self.has_other_gradients = 0, False

    def state_dict(self) -> dict[str, Any]:
        """Return what a state dict of the optimizer says of it: that is taken between steps."""
        scale = self.loss_scale
        return {
            "global_step": self.global_step,
            "loss_scale": [] if scale is None else [scale.value, scale.num_good_steps],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what ``state_dict`` gave."""
        self.global_step = int(state["global_step"])
        if state["loss_scale"] and self.loss_scale is not None:
            self.loss_scale.value, self.loss_scale.num_good_steps = state["loss_scale"]
