"""The last commit of a durable run that had another number of ranks, or one that had several where there is one now.

Each of its ranks has left a store in a folder of its own (``rank-0-of-4/run-1.store``). One process brings them to the
last commit that all of them have (see ``DurableStore.prepare``), and all read it in parts, as they do a checkpoint.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from offload.checkpoint.native.description import Description
from offload.checkpoint.native.mark import saved_in
from offload.checkpoint.native.parts import Parts, runs_in_parts
from offload.tiers.store import run_names
from swapper import StorageError, generation_metadata, open_store


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


def last_run(base: Path, own: int) -> Parts | None:
    """The run of several ranks under ``base`` that has come farthest, once its stores have been brought together; None
    if there is none of which all parts are there."""
    best: tuple[int, list[Path]] | None = None
    for folder in _folders(base, own):
        names = [set(run_names(part)) for part in folder]
        for name in set.intersection(*names):
            stores = [part / f"{name}.store" for part in folder]
            with contextlib.suppress(StorageError):
                found = [Description.decode(generation_metadata(store), str(store)).run["step"] for store in stores]
                if len(set(found)) == 1 and (best is None or found[0] > best[0]):
                    best = found[0], stores
    return None if best is None else Parts(base, best[1])


def what_is_there(base: Path, own: int) -> str:
    """What there is under ``base`` where nothing was found that a run of ``own`` ranks goes on from; nothing if there
    is nothing."""
    told = [
        f"ranks {sorted(found)} of a run of {count}, and not the others"
        for count, found in runs_in_parts(base).items()
        if count != own and len(found) < count
    ]
    with contextlib.suppress(OSError):
        for directory in (base, *sorted(entry for entry in base.iterdir() if entry.is_dir())):
            if saved_in(directory):
                told.append(f"checkpoints: engine.load_checkpoint({str(directory)!r})")
                break
    return "; ".join(told)


def _folders(base: Path, own: int) -> list[list[Path]]:
    """The folders of all ranks of a run, of each run that has them all, but that of ``own`` ranks."""
    runs = {count: found for count, found in runs_in_parts(base).items() if count != own}
    return [[found[rank] for rank in range(count)] for count, found in runs.items() if set(found) == set(range(count))]
