"""What a case of the campaign is, and how it says what must come of it."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum
from typing import Any

PLACES = ("torch", "ram", "nvme")


class Expected(Enum):
    """What must come of a case once the engine is right.

    - ``AS_IN_TORCH``: the same results as plain PyTorch, or the same kind of exception.
    - ``OUR_ERROR``: an ``OffloadError`` that names the way, where PyTorch goes on.
    - ``SAID``: a warning of the engine's that says what differs.
    - ``EITHER``: as in PyTorch, or an honest error or warning. For what no user could call wrong either way.
    - ``DIFFERS``: another result, without a word. Only for what follows from what the documentation says of handles;
      the title must say it.
    """

    AS_IN_TORCH = "as in PyTorch"
    OUR_ERROR = "our error"
    SAID = "said"
    EITHER = "as in PyTorch, or our error"
    DIFFERS = "another result, as documented"


@dataclass(frozen=True)
class Case:
    """``body`` is the user's program. It is given the place where it runs, and returns what is compared."""

    name: str
    family: str
    title: str
    body: Callable[[Any], Any]
    expected: Expected
    way: str
    """A pattern that the engine's error or warning must match: it names the way out. Where the case is to differ, what
    the documentation says of it."""
    rtol: float
    atol: float
    seconds: float
    """One that takes longer hangs."""
    needs: tuple[str, ...]
    """Libraries without which the case is left out."""
    places: tuple[str, ...]
    """Where it runs: "torch", "ram", "nvme"."""
    also: tuple[str, ...]
    """Errors of other libraries that are as good as one of ours, if the message matches ``way``."""


class Family:
    """The cases of one file. Its methods are decorators of the cases' functions."""

    def __init__(self, name: str, *, needs: tuple[str, ...] = (), preload: tuple[str, ...] = ()) -> None:
        """``preload`` is imported once, before the cases run, each in a process of its own."""
        self.name = name
        self.cases: list[Case] = []
        self.preload = preload
        self._needs = needs

    def works(self, title: str, **options: Any) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """The engine must do what PyTorch does."""
        return self._case(title, Expected.AS_IN_TORCH, "", options)

    def same_bits(self, title: str, **options: Any) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """The engine must give the bits of PyTorch."""
        return self.works(title, rtol=0.0, atol=0.0, **options)

    def refused(self, title: str, way: str, **options: Any) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """The engine must raise an error of its own, which matches ``way``."""
        return self._case(title, Expected.OUR_ERROR, way, options)

    def said(self, title: str, way: str, **options: Any) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """The engine must warn, with words that match ``way``."""
        return self._case(title, Expected.SAID, way, options)

    def differs(self, title: str, note: str, **options: Any) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """The engine gives something else, and the documentation says so."""
        return self._case(title, Expected.DIFFERS, note, options)

    def works_or_refused(
        self, title: str, way: str = "", **options: Any
    ) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        """Either of both."""
        return self._case(title, Expected.EITHER, way, options)

    def _case(
        self,
        title: str,
        expected: Expected,
        way: str,
        options: dict[str, Any],
    ) -> Callable[[Callable[[Any], Any]], Callable[[Any], Any]]:
        settings: dict[str, Any] = {"rtol": 1e-5, "atol": 5e-6, "seconds": 60.0, "places": PLACES, **options}
        settings["needs"] = self._needs + settings.get("needs", ())
        settings.setdefault("also", ())
        re.compile(way)

        def add(body: Callable[[Any], Any]) -> Callable[[Any], Any]:
            if any(case.name == body.__name__ for case in self.cases):
                raise ValueError(f"two cases are called {body.__name__}")
            self.cases.append(Case(body.__name__, self.name, title, body, expected, way, **settings))
            return body

        return add
