"""Entries of a parameter's state that no kernel reads: the step's number, and what a user has put beside it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offload.units import ParameterSpec


class LooseStates:
    """Base of the rules whose states are known. Entries rest in RAM; parameters share none."""

    def __init__(self, *given: Any) -> None:
        """``given`` is what another base of the rule takes."""
        super().__init__(*given)
        self._others: dict[ParameterSpec, dict[str, Any]] = {}

    def loose_states(self, spec: ParameterSpec, step: int) -> dict[str, Any]:
        return {"step": torch.tensor(float(step)), **self._others.get(spec, {})}

    def set_loose_states(self, spec: ParameterSpec, states: dict[str, Any], *, held: bool = False) -> int:
        self._others[spec] = {name: value for name, value in states.items() if name != "step"}
        return int(states.get("step", 1))

    def forget_states(self, spec: ParameterSpec) -> None:
        self._others.pop(spec, None)

    def get_shared(self) -> dict[str, Any]:
        return {}

    def set_shared(self, shared: Mapping[str, Any]) -> None:
        pass
