"""Routing: which experts a step's tokens are sent to, as far as it bears on the bytes that a step moves."""

from __future__ import annotations

from dataclasses import dataclass

from offload.units import SeparateExperts, UnitSpec


@dataclass(frozen=True)
class Routing:
    """Share of a layer's experts that one forward is sent to, and its backward again (``touched``); and of those of
    them that rest on NVMe the share that is not in a slot (``missed``; None: nobody has counted)."""

    touched: float = 1.0
    missed: float | None = None

    @classmethod
    def of_tokens(cls, tokens: int, chosen: float) -> Routing:
        """Return what is expected if each token is sent to the share ``chosen`` of a layer's experts, and all experts
        are chosen equally often: the union over the tokens."""
        return cls(1.0 - (1.0 - min(chosen, 1.0)) ** tokens)

    def used(self, unit: UnitSpec) -> float:
        """Share of the unit that a forward uses, and a backward."""
        return 1.0 if unit.experts is None else self.touched

    def changed(self, unit: UnitSpec) -> float:
        """Share of the unit that a step changes: an expert in a fused weight has a gradient, of zeros, also where no
        token was sent to it; one that is a module has none."""
        return self.touched if isinstance(unit.experts, SeparateExperts) else 1.0


EVERYWHERE = Routing()
"""Tokens are sent to all experts: no batch is known to do more."""
