"""The generations of a store in its directory: a manifest each, under a name that says whether it counts.

A generation is published by one rename, at once or after it was prepared, see ``swapper.durable``.

[Note: What was acknowledged] When a generation is published for good, the name of an empty file is changed to say so.
Nobody waits until the disk has that name: one that is there is true, one that is not says nothing. So a last manifest
that somebody has removed is an error, and not a reason to go back to an older one in silence.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence

from swapper.directory import Directory
from swapper.errors import failed
from swapper.extent import Extent, lay_out, offsets_of
from swapper.manifest import MANIFEST_BYTES_MAX, Manifest
from swapper.record import Record

NEW = "new"
_NAME = re.compile(r"(generation|retained|prepared)\.([0-9a-f]{16})")
_COMMITTED = re.compile(r"committed\.([0-9a-f]{16})")


def last_name(generation: int) -> str:
    """Under which a generation is published; it goes when the next one is."""
    return f"generation.{generation:016x}"


def retained_name(generation: int) -> str:
    """Under which a generation stays until it is released."""
    return f"retained.{generation:016x}"


def prepared_name(generation: int) -> str:
    """Under which a generation waits until it is finished or abandoned."""
    return f"prepared.{generation:016x}"


def committed_name(generation: int) -> str:
    """Name of an empty file that says that this generation was committed. See [Note: What was acknowledged]."""
    return f"committed.{generation:016x}"


def committed(names: Sequence[str]) -> dict[int, str]:
    """The generations of which that is said; the last one is the largest."""
    found = {int(match[1], 16): name for name in names if (match := _COMMITTED.fullmatch(name))}
    return dict(sorted(found.items()))


def missing(names: Sequence[str]) -> str:
    """Sentence on the last generation, if it was committed and its manifest is gone; else nothing."""
    last = max(committed(names), default=0)
    found = published(names)
    if not last or last <= max(found, default=-1):
        return ""
    others = f"; there are {sorted(found)}" if found else ""
    return f"generation {last} was committed, and its manifest {last_name(last)} is gone{others}."


def published(names: Sequence[str]) -> dict[int, str]:
    """The generations that count, oldest first, with the names of their manifests: those retained, and the last."""
    found = [(int(match[2], 16), match[1], name) for name in names if (match := _NAME.fullmatch(name))]
    counting = sorted(item for item in found if item[1] != "prepared")
    return {number: name for number, kind, name in counting if kind == "retained" or number == counting[-1][0]}


def prepared(names: Sequence[str]) -> dict[int, str]:
    """The generation that waits to be finished, if there is one: the one that comes after the last."""
    if not (found := published(names)):
        return {}
    following = max(found) + 1
    name = prepared_name(following)
    return {following: name} if name in names else {}


def left_over(names: Sequence[str]) -> list[str]:
    """Names that a dead owner left and no store needs: an unfinished commit, a generation that was replaced."""
    needed = {*published(names).values(), *prepared(names).values()}
    older = list(committed(names).values())[:-1]
    return [name for name in names if name == NEW or name in older or (_NAME.fullmatch(name) and name not in needed)]


def read_manifest(directory: Directory, name: str) -> Manifest:
    """The manifest of this name. Raises ``StorageCorrupt`` or ``StorageIOError``: damaged, or not to be read."""
    try:
        data = directory.read(name, MANIFEST_BYTES_MAX)
    except OSError as error:
        raise failed(f"read of manifest {name}", error) from error
    return Manifest.decode(data, f"manifest {name}")


def publish(directory: Directory, manifest: Manifest) -> None:
    """Make it the last generation of ``directory``. Raises ``OSError``."""
    put_new(directory, manifest)
    directory.rename(NEW, last_name(manifest.generation))
    directory.sync()


def put_new(directory: Directory, manifest: Manifest) -> None:
    """Put the manifest under its temporary name; its content is durable then, its name is not. Raises ``OSError``."""
    with contextlib.suppress(FileNotFoundError):
        directory.remove(NEW)
    directory.create(NEW, manifest.encode())
    directory.sync_file(NEW)


def layout_of(manifest: Manifest) -> tuple[tuple[Extent, ...], list[Record], int]:
    """Extents and records as ``lay_out`` gives them; and the bytes of all places."""
    entries = manifest.entries
    return lay_out([entry.nbytes for entry in entries], [manifest.places(entry) for entry in entries])


class Held:
    """Places of the extents of one generation. Takes 8 bytes for each."""

    def __init__(self, manifest: Manifest) -> None:
        counts = [manifest.places(entry) for entry in manifest.entries]
        self._offsets, self._strides = offsets_of((entry.nbytes for entry in manifest.entries), counts)
        self._manifest = manifest
        self.store_bytes = sum(count * stride for count, stride in self._strides.items())
        """Bytes of all places of all extents."""

    def offset(self, index: int) -> int:
        """Offset at which the bytes of an extent that the generation has begin, in the store's space."""
        entry = self._manifest.entries[index]
        return self._offsets[index] + entry.copy * self._strides[self._manifest.places(entry)]

    def extent(self, index: int) -> Extent:
        """The extent of this number. Raises ``IndexError``."""
        return Extent(index, self._offsets[index], self._manifest.entries[index].nbytes)


def used_bytes(manifest: Manifest) -> int:
    """End of the bytes of a generation in the space of its store."""
    held, entries = Held(manifest), enumerate(manifest.entries)
    return max((held.offset(index) + entry.nbytes for index, entry in entries if entry.generation), default=0)
