"""A run that is stopped goes on later: what is kept of it in its folder, and how it is taken up again."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

from offload import OffloadEngine, OffloadError
from offload.train.errors import InputError
from offload.train.settings import Settings
from offload.train.stopped import Stopped

_NAME = "checkpoints"


class Keeping:
    """The checkpoints of a run in its folder ``out``."""

    def __init__(self, out: Path, settings: Settings) -> None:
        self._out = out
        self._folder = out / _NAME
        self._settings = settings

    @property
    def is_there(self) -> bool:
        """An earlier run was stopped here, and this one goes on from it."""
        return self._folder.is_dir()

    def go_on(self, engine: OffloadEngine) -> None:
        """Take the run up where it was stopped, if one was. Raises ``InputError`` if its settings were others."""
        if not self.is_there:
            return
        before = engine.load_checkpoint(self._folder)
        now = _comparable(self._settings)
        for name, value in now.items():
            if before[name] != value:
                raise InputError(
                    f"--out: {self._out} has step {engine.global_step} of a run with {name} {before[name]}, and here "
                    f"it is {value}: give what it had, or another folder"
                )

    @contextlib.contextmanager
    def when_stopped(self, engine: OffloadEngine) -> Iterator[None]:
        """Save the last step taken if a signal ends what is within; the program's last line says so."""
        try:
            yield
        except Stopped as stopped:
            assert engine.optimizer is not None
            step = engine.global_step
            if not 0 < step < self._settings.steps:
                raise
            try:
                engine.optimizer.zero_grad()  # those of a step that was not taken
                engine.save_checkpoint(self._folder, client_state=_comparable(self._settings))
            except OffloadError as error:
                raise Stopped(f" after step {step}, which could not be saved: {error}") from stopped
            raise Stopped(
                f" after step {step}, which is kept: the same command with --out {self._out} goes on from it"
            ) from stopped


def _comparable(settings: Settings) -> dict[str, Any]:
    """The settings that a run cannot change on its way."""
    return {**asdict(settings), "text": list(settings.text)}
