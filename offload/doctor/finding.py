"""Finding of one check."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


class Status(Enum):
    """Verdict on whether it is good for the engine."""

    GOOD = "good"
    BETTER = "could be better"
    """It works, and something that can be changed holds it back."""
    BROKEN = "broken"
    """The engine refuses to work with it, or would fail."""


@dataclass(frozen=True)
class Finding:
    """One line. ``repair`` is the command or the option that makes it better; empty if there is none."""

    subject: str
    status: Status
    says: str
    repair: str = ""


def good(subject: str, says: str) -> Finding:
    return Finding(subject, Status.GOOD, says)


def better(subject: str, says: str, repair: str = "") -> Finding:
    return Finding(subject, Status.BETTER, says, repair)


def good_if(is_good: bool, subject: str, says: str, repair: str = "") -> Finding:
    """Good; else the same could be better by the repair."""
    return good(subject, says) if is_good else better(subject, says, repair)


def broken(subject: str, says: str, repair: str = "") -> Finding:
    return Finding(subject, Status.BROKEN, says, repair)
