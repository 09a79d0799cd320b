"""A hidden folder of a directory, in which one process makes what is to come into the directory, and puts what goes.

[Note: What a dead process leaves] The folder is locked as long as its process works there. One that can be locked is
a dead process's: what it was making goes. What it had taken out of a name, to put something else there, gets the name
back if nothing has it.

Earlier versions had no lock, and wrote their process id into the name. What they left goes if no other process of
that id lives, and nobody has a file of it open as a store; but a whole generation stays: it may have been taken out of
a name, and which one is not known.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
from collections.abc import Callable
from pathlib import Path

from offload.checkpoint.locks import take, take_unused
from swapper import OffloadError, check_generation
from swapper.files import Descriptor

_HIDDEN = re.compile(r"\.unfinished-[0-9a-f]{16}")
_WITHOUT_LOCK = re.compile(r"\.unfinished-([0-9]+)-[0-9a-f]{8}(\.store)?")
_LOCK, _NEW, _REPLACED, _REMOVED = "lock", "new", "replaced", "removed"


class Workplace:
    """``new`` is an empty folder to make things in. Raises ``OSError``. What is still there at ``close`` goes."""

    def __init__(self, target: Path) -> None:
        self._target = target
        self.folder, self._lock = _made_in(target)
        self.new = self.folder / _NEW
        try:
            self.new.mkdir(mode=0o700)
        except BaseException:
            self.close()
            raise

    @property
    def mark(self) -> str:
        """A name that nothing else has."""
        return self.folder.name.rpartition("-")[2]

    def put_aside(self, name: str) -> None:
        """Take what is to be replaced out of its name, which it gets back if nothing else has it in the end."""
        replaced = self.folder / _REPLACED
        replaced.mkdir(exist_ok=True)
        (self._target / name).rename(replaced / name)

    def remove(self, name: str, is_meant: Callable[[Path], bool]) -> None:
        """Take something out of its name; it goes at ``close``. It is looked at when nobody else can take the name
        from it any more: what another process has put there meanwhile is not meant, and gets the name back."""
        self.put_aside(name)
        aside, removed = self.folder / _REPLACED / name, self.folder / _REMOVED
        if is_meant(aside):
            removed.mkdir(exist_ok=True)
            aside.rename(removed / name)
        else:
            _give_names_back(aside.parent, self._target)

    def close(self) -> None:
        """Give names back, and remove all that is still there. Safe to call twice."""
        with contextlib.suppress(OSError):  # then the next process does, as soon as this one is gone
            _give_names_back(self.folder / _REPLACED, self._target)
            _remove(self.folder)
        self._lock.close()

    def __enter__(self) -> Workplace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _made_in(target: Path) -> tuple[Path, Descriptor]:
    while True:
        folder = target / f".unfinished-{os.urandom(8).hex()}"
        folder.mkdir(mode=0o700)
        try:
            lock = take(folder / _LOCK)
        except FileNotFoundError:  # another process took it for one that a dead process left
            continue
        except BaseException:
            _remove(folder)
            raise
        if lock is not None:
            return folder, lock


def is_workplace(name: str) -> bool:
    """A folder of this name is one, or what was left of one."""
    return any(kind.fullmatch(name) for kind in (_HIDDEN, _WITHOUT_LOCK))


def clear_left_over(target: Path) -> None:
    """Remove what dead processes left unfinished in ``target``, and give names back. Raises ``OSError``."""
    for entry in target.iterdir():
        if (former := _WITHOUT_LOCK.fullmatch(entry.name)) and not _may_be_needed(entry, int(former[1])):
            shutil.rmtree(entry, ignore_errors=True)
        if not _HIDDEN.fullmatch(entry.name):
            continue
        lock = take_unused(entry / _LOCK)
        if lock is None:
            with contextlib.suppress(OSError):  # if its process died before there was a lock: it is empty
                entry.rmdir()
            continue
        try:
            _give_names_back(entry / _REPLACED, target)
            _remove(entry)
        finally:
            lock.close()


def _may_be_needed(folder: Path, process: int) -> bool:
    """Of a folder without a lock, which a process of this id has made."""
    if folder.is_symlink() or (process != os.getpid() and Path(f"/proc/{process}").exists()):
        return True
    for data in folder.rglob("data.*"):
        lock = take_unused(data)
        if lock is None:
            return True
        lock.close()
    return any(_holds_generation(inner) for inner in (folder, *folder.glob("rank-*")))


def _holds_generation(folder: Path) -> bool:
    try:
        check_generation(folder)
    except OffloadError:
        return False
    return True


def _remove(folder: Path) -> None:
    """The lock goes last, and only if all else has gone: without it nobody could tell that the rest may go."""
    with contextlib.suppress(OSError):  # what cannot be removed now is left over
        for entry in folder.iterdir():
            if entry.name != _LOCK:
                with contextlib.suppress(OSError):
                    _remove_one(entry)
        if {entry.name for entry in folder.iterdir()} <= {_LOCK}:
            (folder / _LOCK).unlink(missing_ok=True)
            folder.rmdir()


def _remove_one(entry: Path) -> None:
    if entry.is_dir() and not entry.is_symlink():
        shutil.rmtree(entry)
    else:
        entry.unlink()


def _give_names_back(replaced: Path, target: Path) -> None:
    for old in replaced.iterdir() if replaced.is_dir() else ():
        if not (target / old.name).exists():
            old.rename(target / old.name)
