"""The last commit of a durable run that had another number of ranks, or one that had several where there is one now.

Each of its ranks has left a store in a folder of its own (``rank-0-of-4/run-1.store``), one process beside these. One
process brings them to the last commit that all of them have (see ``DurableStore.prepare``), and all read it in parts,
as they do a checkpoint.

[Note: A run that went on] The number of ranks may change and change back. Then ranks find a commit of their own, and
the run has gone on with others. It is taken up where it is: at the commit of the same run that came later and has come
farther.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from offload.checkpoint.native.description import Description
from offload.checkpoint.native.mark import saved_in
from offload.checkpoint.native.parts import Parts, moment_of, runs_in_parts
from offload.tiers.store import run_names
from swapper import StorageError, generation_metadata, open_store
from swapper.publication import committed, published


def bring_together(base: Path, own: int) -> None:
    """Bring the stores of every run under ``base``, but that of ``own`` ranks, to the last commit that they have in
    common. One process calls this, and none trains with them."""
    for folder in _folders(base, own):
        with contextlib.ExitStack() as opened:
            stores = []
            for part in folder:
                for name in run_names(part):
                    store = opened.enter_context(open_store([part], name, reserved=()))
                    stores.append((name, store))
            newest = max(((name, store.generation) for name, store in stores if store.generation), default=None)
            for name, store in stores:
                if newest is not None and (name, store.prepared) == newest:
                    store.finish()
                elif store.prepared is not None:
                    store.abandon()


def went_on(base: Path, own: int, commit: Mapping[str, Any], store: Path) -> bool:
    """Tell whether another number of ranks has gone on with the run whose own last ``commit``, its state, is in
    ``store``."""
    for part in (part for folder in _folders(base, own) for part in folder):
        for name in run_names(part):
            other = part / f"{name}.store"
            with contextlib.suppress(StorageError, OSError):
                run = Description.decode(generation_metadata(other), str(other)).run
                is_same = run.get("identity") is not None and run.get("identity") == commit.get("identity")
                if is_same and run["step"] > commit["step"] and _committed_at(other) >= _committed_at(store):
                    return True
    return False


def last_run(base: Path, own: int, identity: str | None = None) -> Parts | None:
    """The run under ``base`` of another number of ranks that has come farthest, of those with this ``identity`` if one
    is given, once its stores have been brought together; None if there is none of which all parts are there."""
    stores = last_stores(base, own, identity)
    return None if stores is None else Parts(base, stores)


def last_stores(base: Path, own: int, identity: str | None = None) -> list[Path] | None:
    """The stores of its ranks."""
    best: tuple[int, list[Path]] | None = None
    for folder in _folders(base, own):
        names = [set(run_names(part)) for part in folder]
        for name in set.intersection(*names):
            stores = [part / f"{name}.store" for part in folder]
            with contextlib.suppress(StorageError):
                runs = [Description.decode(generation_metadata(store), str(store)).run for store in stores]
                found = {moment_of(run) for run in runs}
                if identity is not None and identity != runs[0].get("identity"):
                    continue
                if len(found) == 1 and (best is None or runs[0]["step"] > best[0]):
                    best = runs[0]["step"], stores
    return None if best is None else best[1]


def what_is_there(base: Path, own: int) -> str:
    """Describe what there is under ``base`` where nothing was found that a run of ``own`` ranks goes on from; empty if
    there is nothing."""
    told = [
        f"ranks {sorted(found)} of a run of {count}, and not the others"
        for count, found in runs_in_parts(base).items()
        if count != own and len(found) < count
    ]
    told += [f"{store.name} {why}" for store, why in _stores_passed_by(base)]
    with contextlib.suppress(OSError):
        for directory in (base, *sorted(entry for entry in base.iterdir() if entry.is_dir())):
            if saved_in(directory):
                told.append(f"checkpoints: engine.load_checkpoint({str(directory)!r})")
                break
    return "; ".join(told)


def _committed_at(store: Path) -> float:
    """When the last generation was committed, by the clock of the file system."""
    manifests = published([entry.name for entry in store.iterdir()])
    return max((store / name).stat().st_mtime for name in manifests.values())


def _stores_passed_by(base: Path) -> Iterator[tuple[Path, str]]:
    """Stores that are none of this user's runs by their owner or name, and why."""
    own = set(run_names(base))
    for store in sorted(base.glob("*.store")):
        with contextlib.suppress(OSError):
            owner = store.lstat().st_uid
            if owner != os.geteuid():
                yield store, f"of user {owner}"
            elif store.stem not in own and committed([entry.name for entry in store.iterdir()]):
                yield store, "under a name that is no run's: call it run-1.store to go on from it"


def _folders(base: Path, own: int) -> list[list[Path]]:
    """The folders of all ranks of a run, of each run that has them all, but that of ``own`` ranks."""
    runs = {count: found for count, found in runs_in_parts(base).items() if count != own}
    if own != 1 and run_names(base):
        runs[1] = {0: base}
    return [[found[rank] for rank in range(count)] for count, found in runs.items() if set(found) == set(range(count))]
