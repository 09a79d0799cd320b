"""The engine's store: extents of the records on NVMe, and of those that commits write there.

[Note: What a commit needs] A record that is stored on NVMe is committed where it is. One that is stored in memory has
extents of its own that only commits write. They take no room on the disk before they are needed: with ``durable`` at
the start, otherwise when a checkpoint is saved.

[Note: Names] Without ``durable`` the store has no name, and is gone with its process. With it, it is ``run-N.store``
under the first path, and the next engine goes on from it: in place if its plan has the same extents, else by copying
(``offload.checkpoint``). The old store is removed when the new one has committed, and says that it replaces it; any
other one with a commit stays.

[Note: When a store is written no more] A store of which something is damaged is only read. One whose data has names
that are not accounted for (a checkpoint that was moved, a copy by hard links) may be somebody's backup: what is written
there is written into that, too. The run goes on in a new store in both cases.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from aio_ext.profile import IoProfile, load_profile
from aio_ext.queue import DEPTH
from offload.config import OffloadConfig
from offload.errors import warn
from offload.plan.plan import Plan, Tier, UnitPlan
from offload.plan.update_log import LOGGED_STEPS, part_bytes
from offload.ranks.machine import queue_share
from offload.ranks.ranks import Ranks
from offload.tiers.home import UnitHomes
from swapper import (
    DurableStore,
    Extent,
    InPlaceFiles,
    OffloadError,
    StorageCorrupt,
    StoreLocked,
    StoreMissing,
    align,
    create_store,
    open_store,
    remove_store,
    remove_unfinished,
)

_CHECKPOINTS_MAX = 8
"""Checkpoints that one store can hold without copying; more of them are copied."""

_FILE_BYTES_MAX = 8 << 40
"""A file of a store has no more, holes included: ext4 ends at 16 TiB."""

_RUN = re.compile(r"run-([0-9]{1,9})\.store")


@dataclass(frozen=True)
class RecordExtents:
    """Extents where a commit finds or puts the records of one unit: its weights (what is trained, then what is frozen),
    its tiles, and gradients that were accumulated for the next step. ``log`` has, for each update that can be logged
    before they are written again, the extents of its gradients in parts."""

    weights: tuple[Extent, ...]
    tiles: tuple[Extent, ...]
    gradients: Extent | None
    log: tuple[tuple[Extent, ...], ...] = ()

    @property
    def all(self) -> tuple[Extent, ...]:
        return (*self.weights, *self.tiles, *(() if self.gradients is None else (self.gradients,)))


@dataclass
class EngineStore:
    """``name``: that of a durable run's store. ``previous``: that of an earlier run, whose plan had other extents.
    ``profile``: what was measured on the paths, and this rank's part of it."""

    store: DurableStore
    paths: Sequence[Path]
    profile: IoProfile | None
    holds_generations: bool
    checkpoints_max: int
    """Checkpoints that it can hold without copying."""
    previous: str | None = None
    name: str | None = None
    gives_back: bool = False
    """Others have names for its checkpoints: at its end it leaves them no more space than they need."""

    def close(self) -> None:
        """Close it, once no transfer is in flight. A durable run's store in which nothing was ever committed is
        removed: it only takes room."""
        is_empty = self.store.generation == 0 and self.store.prepared is None
        try:
            if self.gives_back:
                self.store.give_back()
        finally:
            self.store.close()
        if self.name is not None and is_empty:
            with contextlib.suppress(OffloadError):  # the next engine on the path removes it
                remove_store(self.paths, self.name)

    def remove_previous(self) -> None:
        """Remove the earlier run's store, if there is one: this one holds all that is needed."""
        if self.previous is not None:
            remove_store(self.paths, self.previous)
            self.previous = None


@dataclass(frozen=True)
class _Kind:
    """One extent to be made: ``places`` as in ``create_store``, ``reserved`` of them at the start."""

    nbytes: int
    places: int
    reserved: int


class _Opener:
    """Opens stores of one layout."""

    def __init__(self, config: OffloadConfig, kinds: Sequence[_Kind], retained_max: int, sharers: int) -> None:
        self.profile = _profile(config, sharers)
        self.paths = config.paths
        self.retained_max = retained_max
        self._kinds = kinds
        self._queue = _queue_of(config, self.profile, sharers)

    def create(self, name: str | None, replaces: bytes = b"") -> DurableStore:
        return create_store(
            self.paths,
            name,
            [kind.nbytes for kind in self._kinds],
            places=[kind.places for kind in self._kinds],
            retained_max=self.retained_max,
            reserved=[kind.reserved for kind in self._kinds],
            replaces=replaces,
            **self._queue,
        )

    def open(self, name: str) -> tuple[DurableStore, bool]:
        """A store that is there, and whether it has the layout and may be written. If not, it is only to be read."""
        store = open_store(self.paths, name, reserved=(), **self._queue)
        counts = [1 + kind.places + self.retained_max if kind.places else 1 for kind in self._kinds]
        fits = store.shape == [(align(kind.nbytes), count) for kind, count in zip(self._kinds, counts, strict=True)]
        reason = _written_no_more(store)
        if fits and reason:
            warn(f"{self.paths[0] / name}.store: {reason}. The run goes on in a new store")
        fits = fits and not reason
        if fits:
            try:
                store.reserve([kind.reserved for kind in self._kinds])
            except BaseException:
                store.close()
                raise
        return store, fits


def open_engine_store(config: OffloadConfig, plan: Plan, sharers: int, ranks: Ranks) -> EngineStore | None:
    """Open the store that the plan needs, if it needs one. ``sharers``: ranks on its drives, this one included.

    Raises what ``create_store`` and ``open_store`` raise.
    """
    durable = bool(config.durable)
    resting = [kind for item in plan.units for kind in _resting(item, plan, durable=durable)]
    if not config.paths or not (resting or durable):
        return None
    several = len(config.paths) > 1  # all space is taken at once there: none for checkpoints that may come
    holds_generations = durable or (plan.record_copies == 2 and not several)
    if holds_generations:
        resting += [kind for item in plan.units for kind in _committed(item, plan, durable=durable)]
    else:
        resting = [replace(kind, places=kind.reserved - 1) for kind in resting]
    checkpoints_max = 0
    if holds_generations and not several:
        of_one = sum(kind.nbytes for kind in resting if kind.places)
        checkpoints_max = max(min(_CHECKPOINTS_MAX, _FILE_BYTES_MAX // max(of_one, 1) - 3), 0)
    opener = _Opener(config, resting, checkpoints_max, sharers)
    if not durable:
        store = opener.create(None)
        return EngineStore(store, opener.paths, opener.profile, holds_generations, checkpoints_max)
    return _open_durable(opener, ranks)


def _open_durable(opener: _Opener, ranks: Ranks) -> EngineStore:
    """The store of the last run on the paths, if it has the same extents; else a new one beside it.

    Of several ranks, each with paths of its own, all take up the last commit that one of them has finished: the others
    have prepared it, at least. What was prepared and finished by none is given up.
    """
    with contextlib.ExitStack() as closing:
        found, damaged = _found(opener, closing)
        last = max(
            ((number, store.generation) for number, (store, _) in found.items() if store.generation), default=None
        )
        if max(damaged, default=-1) > (-1 if last is None else last[0]):
            raise damaged[max(damaged)]
        highest, foreign = max((*found, *damaged), default=0), sorted(_taken(opener.paths) - found.keys())
        of_ranks = ranks.all_gather_object("the last commit", (last, highest, foreign))
        last = max((of_rank for of_rank, _, _ in of_ranks if of_rank is not None), default=None)
        highest = max(number for _, number, _ in of_ranks)
        taken = {number for _, _, numbers in of_ranks for number in numbers}
        number = 0 if last is None else last[0]
        own, fits = found.get(number, (None, False))
        if last is not None:
            own = _at_commit(own, last[1], f"run-{number} under {opener.paths[0]}")
        fits = ranks.all("the layout of the store", fits)
        for other, (store, _) in found.items():
            if other == number:
                continue
            if store.generation and (own is None or own.replaces != store.identity):
                warn(f"{opener.paths[0]}/run-{other}.store holds another run, beside run-{number}.store: it stays")
                continue
            store.close()  # nothing was ever committed there, or the newer run has replaced it
            remove_store(opener.paths, f"run-{other}")
        if own is not None and fits:
            for other, (store, _) in found.items():
                if other != number:
                    store.close()
            closing.pop_all()
            return EngineStore(own, opener.paths, opener.profile, True, opener.retained_max, None, f"run-{number}")
        replaces = b"" if own is None else own.identity
    name = f"run-{next(number for number in count(highest + 1) if number not in taken)}"
    previous = None if last is None else f"run-{number}"
    store = opener.create(name, replaces)
    return EngineStore(store, opener.paths, opener.profile, True, opener.retained_max, previous, name)


def _found(
    opener: _Opener, closing: contextlib.ExitStack
) -> tuple[dict[int, tuple[DurableStore, bool]], dict[int, StorageCorrupt]]:
    """By number: the stores that can be opened, as ``_Opener.open`` gives them, and what is wrong with the others."""
    found: dict[int, tuple[DurableStore, bool]] = {}
    damaged: dict[int, StorageCorrupt] = {}
    for number in sorted({*_runs(opener.paths, os.geteuid())}, reverse=True):
        name = f"run-{number}"
        try:
            found[number] = store, _ = opener.open(name)
        except StoreMissing:  # its creation, or its removal, was never finished
            try:
                remove_unfinished(opener.paths, name)
            except StoreLocked:  # somebody makes it
                pass
            except OffloadError as error:
                warn(f"what is left of {opener.paths[0] / name}.store takes room still. {error}")
            continue
        except StorageCorrupt as error:
            way_out = f"To begin with a checkpoint, move {opener.paths[0] / name}.store away, and load one."
            error.advice = f"{error.advice} {way_out}"
            damaged[number] = error
            continue
        closing.callback(store.close)
    return found, damaged


def _written_no_more(store: DurableStore) -> str:
    """Why nothing may be written into this store; nothing if it may. See [Note: When a store is written no more]."""
    if store.damage:
        return " ".join(store.damage).rstrip(".")
    num_unknown = store.links().num_unknown
    if num_unknown:
        return f"its data has {num_unknown} more names (hard links), which are not those of its checkpoints"
    return ""


def _at_commit(store: DurableStore | None, generation: int, where: str) -> DurableStore:
    """The store, at the last commit that counts. Raises ``StoreMissing`` if it has no part of it."""
    if store is not None:
        if store.prepared == generation:
            store.finish()
        elif store.prepared is not None:
            store.abandon()
        if store.generation == generation:
            return store
    raise StoreMissing(
        f"{where} has no part of commit {generation}, which other ranks have.",
        advice="Give every rank the nvme_path that it had, or an empty one to all, and load a checkpoint.",
    )


def run_names(path: Path) -> list[str]:
    """The names of durable runs' stores on a path, newest first. Those of other users are none: a path can be
    shared."""
    return sorted((f"run-{number}" for number in _runs([path], os.geteuid())), key=_number, reverse=True)


def _taken(paths: Sequence[Path]) -> set[int]:
    """Numbers of all runs on the paths, whoever they belong to."""
    return set(_runs(paths))


def _runs(paths: Sequence[Path], owner: int | None = None) -> Iterator[int]:
    for path in paths:
        with contextlib.suppress(OSError), os.scandir(path) as entries:
            for entry in entries:
                match = _RUN.fullmatch(entry.name)
                if match and (owner is None or entry.stat(follow_symlinks=False).st_uid == owner):
                    yield int(match[1])


def run_bytes(path: Path) -> int:
    """Bytes of the disk that durable runs' stores take on a path."""
    taken = 0
    for name in run_names(path):
        with contextlib.suppress(OSError):
            taken += sum(file.stat().st_blocks * 512 for file in (path / f"{name}.store").iterdir())
    return taken


def _number(name: str) -> int:
    return int(name.partition("-")[2])


def extents_of_records(plan: Plan, homes: Sequence[UnitHomes], store: EngineStore) -> list[RecordExtents]:
    """Of each unit, in order."""
    resting = sum(1 for item in plan.units for _ in _resting(item, plan, durable=False))
    more = iter(store.store.extents[resting:])
    found = []
    for item, of_unit in zip(plan.units, homes, strict=True):
        unit = item.unit
        weights = of_unit.weights.stored
        parts = sum(1 for numel in (unit.trainable_numel, unit.stored_numel - unit.trainable_numel) if numel)
        own = tuple(weights.extents) if weights is not None else tuple(next(more) for _ in range(parts))
        tiles = []
        for tile in of_unit.tiles:
            stored = tile.states.stored
            tiles.append(next(stored.extents) if stored is not None else next(more))
        gradients = next(more) if unit.trainable_numel and plan.formats.grads else None
        num_logged = LOGGED_STEPS if item.is_logged else 0
        log = tuple(tuple(next(more) for _ in part_bytes(item, plan.formats)) for _ in range(num_logged))
        found.append(RecordExtents(own, tuple(tiles), gradients, log))
    return found


def _resting(item: UnitPlan, plan: Plan, *, durable: bool) -> Iterator[_Kind]:
    """The extents of the unit's records on NVMe, in the order in which their homes take them."""
    unit, formats = item.unit, plan.formats
    working = 2 if plan.speculative else 1  # a speculative update writes beside what is current
    trained = _Kind(0, working, working + 1 if durable else plan.record_copies)
    frozen = _Kind(0, 1, 1)
    if item.weights is Tier.NVME:
        for numel, kind in ((unit.trainable_numel, trained), (unit.stored_numel - unit.trainable_numel, frozen)):
            if numel:
                yield _Kind(numel * formats.weights, kind.places, kind.reserved)
    for tile, tier in item.tiles:
        if tier is Tier.NVME:
            yield _Kind(tile.nbytes, trained.places, trained.reserved)
        if item.grads is Tier.NVME:
            yield _Kind(tile.numel * formats.grads, 0, 1)


def _committed(item: UnitPlan, plan: Plan, *, durable: bool) -> Iterator[_Kind]:
    """The extents of the unit's records in memory and of its log, which only commits write."""
    unit, formats = item.unit, plan.formats
    if item.weights is not Tier.NVME:
        for numel, places in ((unit.trainable_numel, 2), (unit.stored_numel - unit.trainable_numel, 1)):
            if numel:
                yield _Kind(numel * formats.weights, 1, places if durable else 0)
    for tile, tier in item.tiles:
        if tier is not Tier.NVME:
            yield _Kind(tile.nbytes, 1, 2 if durable else 0)
    if unit.trainable_numel and formats.grads:
        yield _Kind(unit.trainable_numel * formats.grads, 1, 0)
    for _ in range(LOGGED_STEPS if item.is_logged else 0):
        yield from (_Kind(nbytes, 1, 1) for nbytes in part_bytes(item, formats))


def open_files(config: OffloadConfig, plan: Plan, sharers: int) -> InPlaceFiles | None:
    """Open the files that frozen weights are read from in place, if there are any, for as many reads at a time as the
    store has. Raises what ``InPlaceFiles`` raises."""
    return InPlaceFiles(plan.files, **queue_options(config, sharers)) if plan.files else None


def queue_options(config: OffloadConfig, sharers: int) -> dict[str, Any]:
    """The options of a queue on the paths, by what was measured there: one rank's part."""
    return _queue_of(config, _profile(config, sharers), sharers)


def _queue_of(config: OffloadConfig, profile: IoProfile | None, sharers: int) -> dict[str, Any]:
    return {
        "backend": config.io_backend if profile is None else profile.backend,
        "queue_depth": queue_share(DEPTH, sharers) if profile is None else profile.queue_depth,
        "block_bytes": 1 << 20 if profile is None else profile.block_bytes,
    }


def _profile(config: OffloadConfig, sharers: int) -> IoProfile | None:
    """Profile that ``aio_bench.py`` has measured on the paths, if it has, and with the backend that is asked for: one
    rank's part of it."""
    with contextlib.suppress(OSError):  # the store refuses a path that is not there, and says so
        profile = load_profile(*config.paths) if config.paths else None
        if profile is not None and config.io_backend in ("auto", profile.backend):
            return replace(
                profile,
                queue_depth=queue_share(profile.queue_depth, sharers),
                read_bytes_per_s=profile.read_bytes_per_s / sharers,
                write_bytes_per_s=profile.write_bytes_per_s / sharers,
                mixed_bytes_per_s=profile.mixed_bytes_per_s / sharers,
            )
    return None
