"""A checkpoint by the path that a user gives: its folder, a directory with several, or the store of a durable run."""

from __future__ import annotations

import contextlib
import fcntl
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from offload.checkpoint.native.description import Description
from offload.checkpoint.native.folder import CheckpointDirectory, hold
from offload.checkpoint.native.mark import holds_generation, is_checkpoint
from offload.checkpoint.native.other_ranks import last_stores
from offload.checkpoint.native.parts import Parts, description_of, is_part, open_parts, part_folders, runs_in_parts
from offload.tiers.store import run_names
from swapper import (
    Generation,
    OffloadError,
    StoreLocked,
    StoreMissing,
    StoreUnsafe,
    generation_manifest,
    open_generation,
)
from swapper.checked import Refused, open_regular
from swapper.errors import failed
from swapper.files import Descriptor
from swapper.owner import NAME as OWNER
from swapper.owner import read_owner


@dataclass(frozen=True)
class Opened:
    """A generation and what it says of itself. ``in_use_by``: the process that trains with it now, if there is one."""

    generation: Generation | Parts
    description: Description
    in_use_by: str | None

    @property
    def folder(self) -> Path:
        return self.generation.folder

    @property
    def is_run(self) -> bool:
        """It is the store of a durable run, and no checkpoint."""
        return (self.parts[0] / OWNER).exists()

    @property
    def parts(self) -> list[Path]:
        """The folders of all ranks' parts; the one that there is, if it is not in parts."""
        found = self.generation.generations if isinstance(self.generation, Parts) else [self.generation]
        return [part.folder for part in found]


@contextlib.contextmanager
def open_checkpoint(path: Path, *, to_read: bool) -> Iterator[Opened]:
    """Open the checkpoint in ``path``, or the latest of those in it.

    ``to_read``: its records will be read. The store of a run is then kept from being trained with meanwhile: raises
    ``StoreLocked`` if it is. Raises ``StoreMissing``, and ``StorageCorrupt``, which names the others that are whole.
    """
    path = path.expanduser()
    with contextlib.ExitStack() as closing:
        if holds_generation(path):
            _refuse_part(path)
            in_use_by = _enter_run(path, closing, to_read=to_read)
            hold(path, closing)
            generation: Generation | Parts = open_generation(path)
        elif stores := _stores_of_ranks(path):
            owners = [_enter_run(store, closing, to_read=to_read) for store in stores]
            in_use_by, generation = next(filter(None, owners), None), Parts(path, stores)
        elif part_folders(path):
            hold(path, closing)
            in_use_by, generation = None, open_parts(path)
        elif path.is_dir():
            generation = closing.enter_context(CheckpointDirectory(path).open(None))
            in_use_by = _enter_run(generation.folder, closing, to_read=to_read)
        else:
            what = f"{path} is a file." if path.exists() else f"there is no directory {path}."
            raise StoreMissing(what, advice="Give a checkpoint, or the directory that it is in.")
        closing.callback(generation.close)
        yield Opened(generation, description_of(generation, str(generation.folder)), in_use_by)


def _refuse_part(path: Path) -> None:
    """Raise ``StoreMissing`` for the part of one rank."""
    for part in (path, path.absolute().parent):
        if is_part(part):
            raise StoreMissing(f"{path} is the part of one rank.", advice=f"Give {part.parent}, which has all parts.")


def _stores_of_ranks(path: Path) -> list[Path]:
    """The stores of the durable run of several ranks that is there, or of one process that has gone on with it; none if
    there is no such run. Raises ``StoreMissing`` if ranks have no commit in common."""
    if not any(run_names(part) for found in runs_in_parts(path).values() for part in found.values()):
        return []
    stores = last_stores(path, 0)
    if stores is None:
        raise StoreMissing(
            f"{path} has the stores of several ranks, and no commit that all of them have.",
            advice="Start the ranks again: load_checkpoint() brings them together.",
        )
    return stores


def _enter_run(folder: Path, closing: contextlib.ExitStack, *, to_read: bool) -> str | None:
    """Of the store of a run: who trains with it. Raises ``StoreLocked`` if it is to be read, and is in use."""
    if not (folder / OWNER).exists():
        return None
    try:
        directory = Descriptor(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))
        closing.callback(directory.close)
        data = open_regular(folder / "data.0")
    except OSError as error:
        raise failed(f"opening {folder}", error) from error
    except Refused as error:
        raise StoreUnsafe(f"{folder / 'data.0'} cannot be opened: {error}.") from None
    closing.callback(data.close)
    _check_paths(folder)
    try:
        fcntl.flock(data.number, fcntl.LOCK_SH | fcntl.LOCK_NB)
        if not to_read:
            fcntl.flock(data.number, fcntl.LOCK_UN)
        return None
    except BlockingIOError:
        owner = str(read_owner(directory.number) or "another process")
        if to_read:
            raise StoreLocked(
                f"{folder} is in use by {owner}.",
                survives="",
                advice="Wait for the run to end, or take one of its checkpoints (save_checkpoint).",
            ) from None
        return owner


def _check_paths(folder: Path) -> None:
    num_paths = generation_manifest(folder).num_paths
    if num_paths > 1:
        raise StoreUnsafe(
            f"{folder} is a part of a run whose data lie on {num_paths} paths.",
            survives="",
            advice="Load it into an engine with these paths, and save a checkpoint (save_checkpoint).",
        )


def whole_checkpoints(directory: Path) -> Iterator[tuple[Path, Opened | OffloadError]]:
    """Each checkpoint in a directory, open until the next one is asked for, or what is wrong with it. By name."""
    for folder in sorted(entry for entry in directory.iterdir() if entry.is_dir() and not entry.name.startswith(".")):
        if not is_checkpoint(folder):
            continue
        with contextlib.ExitStack() as one:
            try:
                found: Opened | OffloadError = one.enter_context(open_checkpoint(folder, to_read=False))
            except OffloadError as error:
                found = error
            yield folder, found
