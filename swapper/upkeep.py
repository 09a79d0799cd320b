"""Looking after durable stores from outside: list them, verify them, remove what dead owners left."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from swapper import links, owner
from swapper.arena import PAGE_BYTES, Arena
from swapper.directory import RealDirectory
from swapper.durable import DurableStore
from swapper.errors import OffloadError, StorageError, StoreMissing, StoreUnsafe, failed
from swapper.files import Descriptor, open_directory
from swapper.folders import SUFFIX, open_store
from swapper.publication import left_over, missing, prepared, published, read_manifest

_NAMELESS = re.compile(r"\.offload-[0-9]+-[0-9a-f]{16}")
"""Name of a file without a name for a moment, where such a file cannot be made."""

_BESIDE = (owner.NAME, owner.WRITTEN, links.NAME, links.REPLACES, "new")
"""Small files that say nothing of a store without a manifest."""

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC


def inspect(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Each store on each path, with its owner and generations. Takes no lock and changes nothing.

    ``damage`` lists what cannot be read. Raises ``StoreUnsafe`` for a path that cannot be looked at.
    """
    report = []
    for path in paths:
        for name, folder in _folders(path):
            try:
                report.append(_describe(path / name, folder))
            except OSError as error:
                report.append({"store": str(path / name), "damage": [str(failed("looking at it", error))]})
    return report


def scrub(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Read and verify every extent of every generation of the stores whose first path is the first of ``paths``; of one
    that is prepared, the manifest only.

    ``damage`` lists what is wrong. Raises ``StoreLocked`` for a store that is in use.
    """
    report = []
    for name, _ in _folders(paths[0]):
        found: dict[str, Any] = {
            "store": str(paths[0] / name),
            "generations": 0,
            "extents": 0,
            "bytes": 0,
            "damage": [],
        }
        report.append(found)
        try:
            generations = _whole(paths, name.removesuffix(SUFFIX), found)
        except StoreMissing:
            found["state"] = "its creation was never finished: gc removes it"
            continue
        for number in generations:
            with open_store(paths, name.removesuffix(SUFFIX), generation=number, reserved=()) as store:
                _read_all(store, found)
    return report


def _whole(paths: Sequence[Path], name: str, found: dict[str, Any]) -> list[int]:
    """The generations of a store that can be opened. What is wrong with the others goes into ``found``."""
    names = os.listdir(paths[0] / (name + SUFFIX))  # noqa: PTH208 - only names are asked for
    generations = []
    for number in [None, *published(names)]:
        try:
            with open_store(paths, name, generation=number, reserved=()) as store:
                if number is not None:
                    generations.append(number)
                wrong = list(store.damage)
        except StorageError as error:
            wrong = [str(error)]
        found["damage"] += [line for line in wrong if line not in found["damage"]]
    return generations


def collect(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """Remove what dead owners left: unfinished stores and commits, replaced generations, files that kept a name.

    All that is in use, was retained, or is not known to be ours, stays. Returns what was removed.
    """
    return [_clean(path / name, folder) for path in paths for name, folder in _folders(path)] + [
        _clean_nameless(path) for path in paths
    ]


def _folders(path: Path) -> Iterator[tuple[str, int]]:
    """The directories of stores on a path: name and descriptor, which is open until the next one is asked for."""
    with contextlib.ExitStack() as closing:
        parent = Descriptor.kept(closing, open_directory(path))
        for name in sorted(os.listdir(parent)):  # noqa: PTH208 - a descriptor
            if not name.endswith(SUFFIX):
                continue
            with contextlib.ExitStack() as one:
                try:
                    folder = Descriptor.kept(one, os.open(name, _FOLDER, dir_fd=parent))
                except OSError:
                    continue  # a file, or a link: none of ours
                yield name, folder


def _describe(where: Path, folder: int) -> dict[str, Any]:
    directory = RealDirectory(folder)
    names = directory.names()
    who = owner.read_owner(folder)
    found: dict[str, Any] = {
        "store": str(where),
        "owner": None if who is None else vars(who),
        "in_use": _in_use(folder, names),
        "generations": [],
        "left_over": left_over(names),
        "data_bytes": sum(os.stat(n, dir_fd=folder, follow_symlinks=False).st_size for n in names if _is_data(n)),
        "damage": [],
    }
    if gone := missing(names):
        found["damage"].append(gone)
    for number, name in (published(names) | prepared(names)).items():
        try:
            manifest = read_manifest(directory, name)
        except OffloadError as error:
            found["damage"].append(str(error))
            continue
        written = [entry for entry in manifest.entries if entry.generation]
        found["generations"].append(
            {
                "generation": number,
                "retained": name.startswith("retained"),
                "prepared": name.startswith("prepared"),
                "extents": len(manifest.entries),
                "extents_written": len(written),
                "bytes_written": sum(entry.nbytes for entry in written),
                "metadata_bytes": len(manifest.metadata),
            }
        )
    if not found["generations"] and not found["damage"]:
        found["state"] = "its creation was never finished, or its manifests are under another path"
    return found


def _is_data(name: str) -> bool:
    return re.fullmatch(r"data\.[0-9]+", name) is not None


def _in_use(folder: int, names: Sequence[str]) -> bool:
    with contextlib.ExitStack() as closing:
        return any(owner.is_locked(_open_data(closing, folder, name)) for name in names if _is_data(name))


def _open_data(closing: contextlib.ExitStack, folder: int, name: str) -> int:
    flags = os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC | os.O_NONBLOCK
    return Descriptor.kept(closing, os.open(name, flags, dir_fd=folder))


def _read_all(store: DurableStore, found: dict[str, Any]) -> None:
    found["generations"] += 1
    arena = Arena(max((extent.nbytes for extent in store.extents), default=PAGE_BYTES))
    lease = arena.lease(arena.nbytes)
    for extent in store.extents:
        try:
            store.read(extent, lease.address, extent.nbytes).wait()
            found["extents"] += 1
            found["bytes"] += extent.nbytes
        except StorageError as error:
            found["damage"].append(f"generation {store.generation}: {error}")
        except OffloadError:
            continue  # it was never written
    store.close()
    arena.close()


def _clean(where: Path, folder: int) -> dict[str, Any]:
    """Under the lock of its data: no owner is there, and one that comes meanwhile will find that it is gone."""
    found: dict[str, Any] = {"store": str(where), "removed": []}
    directory = RealDirectory(folder)
    names = directory.names()
    with contextlib.ExitStack() as closing:
        try:
            for name in filter(_is_data, names):
                fcntl.flock(_open_data(closing, folder, name), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            found["state"] = f"in use by {owner.read_owner(folder) or 'another process'}"
            return found
        # Without data.0 it may hold a part of a store whose manifests are under another path.
        ours = [name for name in names if _is_data(name) or name in _BESIDE]
        try:
            if not published(names) and "data.0" in names and len(ours) == len(names):
                for name in ours:
                    directory.remove(name)
                where.rmdir()
                found["removed"] = [str(where)]
            else:
                for name in left_over(names):
                    directory.remove(name)
                    found["removed"].append(str(where / name))
        except OSError as error:
            raise failed(f"clearing {where}", error) from error
    return found


def _clean_nameless(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = {"path": str(path), "removed": []}
    with contextlib.ExitStack() as closing:
        parent = Descriptor.kept(closing, open_directory(path))
        for name in filter(_NAMELESS.fullmatch, os.listdir(parent)):  # noqa: PTH208 - a descriptor
            info = os.stat(name, dir_fd=parent, follow_symlinks=False)
            if not stat.S_ISREG(info.st_mode) or info.st_uid != os.geteuid():
                raise StoreUnsafe(f"{path / name} is not a regular file of yours.")
            if not Path(f"/proc/{name.split('-')[1]}").exists():
                os.unlink(name, dir_fd=parent)
                found["removed"].append(str(path / name))
    return found
