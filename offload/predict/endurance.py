"""Cost of a step in an SSD's life."""

from __future__ import annotations

from dataclasses import dataclass

from offload.predict.prediction import Prediction


@dataclass(frozen=True)
class Endurance:
    """``written_bytes`` a node writes in a step; ``rated_bytes`` its drives may write together (their TBW)."""

    written_bytes: int
    rated_bytes: int
    seconds: float
    """Of a step."""
    step_tokens: int
    """Of a step."""

    @classmethod
    def of(cls, prediction: Prediction, rated_bytes: int) -> Endurance:
        """Return how much drives with this rating bear of such steps."""
        written = prediction.written_bytes * prediction.machine.network.ranks_a_node
        return cls(written, rated_bytes, prediction.seconds, prediction.tokens)

    @property
    def steps(self) -> int | None:
        """Until the rating is used up; None if nothing is written."""
        return self.rated_bytes // self.written_bytes if self.written_bytes else None

    @property
    def hours(self) -> float | None:
        """The same, training without a pause."""
        return None if self.steps is None else self.steps * self.seconds / 3600

    @property
    def tokens(self) -> int | None:
        """Tokens that are trained on until then."""
        return None if self.steps is None else self.steps * self.step_tokens
