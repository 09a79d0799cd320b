"""The identity of a run: checkpoints with it follow each other, and no other run removes them.

An engine that goes on from a commit or a checkpoint goes on as that run. Two engines may go on from the same one, and
save into the same directory: then the second one is another run from there on. What tells is a lock on a hidden file of
the directory, which a run that has saved there holds until its end.
"""

from __future__ import annotations

import contextlib
import re
import secrets
from pathlib import Path

from offload.checkpoint.locks import take, take_unused
from swapper.files import Descriptor

_DIRECTORIES_MAX = 8
"""Directories in which a run holds its identity at a time: a trainer makes a new one for each checkpoint."""

_HELD = re.compile(r"\.run-[0-9a-f]{16}")


class RunIdentity:
    """A new run, until ``go_on``."""

    def __init__(self) -> None:
        self.value = secrets.token_hex(8)
        self._held: dict[Path, Descriptor] = {}

    def go_on(self, value: str) -> None:
        """Be the run of what was loaded, so far as no other engine is it; see ``in_directory``."""
        if value != self.value:
            self.release()
            self.value = value

    def in_directory(self, directory: Path) -> str:
        """The identity, which this engine has alone in a directory until ``release``. It is a new one if another
        engine has it there. Raises ``OSError``."""
        path = directory / f".run-{self.value}"
        if path in self._held and path.exists():
            return self.value
        if path in self._held:  # the directory was removed, and is there again
            self._held.pop(path).close()
        self._release(*[*self._held][: 1 - _DIRECTORIES_MAX])
        held = take(path)
        if held is None:
            self.go_on(secrets.token_hex(8))
            return self.in_directory(directory)
        self._held[path] = held
        return self.value

    def release(self) -> None:
        """The engine saves nothing more as this run. Safe to call twice; does nothing in a forked process, whose parent
        is the run."""
        self._release(*self._held)

    def _release(self, *paths: Path) -> None:
        for path in paths:
            held = self._held.pop(path)
            if held.is_open:
                with contextlib.suppress(OSError):
                    path.unlink()
            held.close()


def clear_held(directory: Path) -> None:
    """Remove what dead runs have held in a directory. Raises ``OSError``."""
    for entry in directory.iterdir():
        if _HELD.fullmatch(entry.name) and (held := take_unused(entry)) is not None:
            entry.unlink(missing_ok=True)
            held.close()
