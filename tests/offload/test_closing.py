"""The end of the program: ranks close what they have together, so each goes through it in the same order."""

from __future__ import annotations

import weakref
from functools import partial

import pytest

from offload import closing


def test_what_is_open_at_the_end_of_the_program_is_closed_the_newest_first(monkeypatch: pytest.MonkeyPatch):
    made = [closing.Closers() for _ in range(20)]
    closed: list[int] = []
    for number, closers in enumerate(made):
        closers.callback(partial(closed.append, number))
    monkeypatch.setattr(closing, "_open", weakref.WeakSet(made))
    closing._close_all()
    assert closed == list(reversed(range(20)))
