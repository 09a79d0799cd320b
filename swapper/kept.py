"""The generations of a store that are kept, in memory and by the names of their manifests.

[Note: The commit] 1. All writes are over, and good. 2. The data is synced. 3. The manifest, which names the copy and
the checksum of every extent, is written under a temporary name and synced. 4. It is renamed. 5. The directory is
synced. A crash before 4 leaves the last generation, one after 5 the new one; in between it is one of the two, both
whole.
After a failure in 2, 4 or 5 the content of the disk is unknown, so the store serves nothing more.

[Note: Two phases] Several stores can have one commit in common: each one prepares it (1 to 3, and the manifest gets a
name that stays, durably), and once all have, each one finishes it (4 and 5). In between the prepared generation is kept
beside the last one: no place that either needs is written. It outlives the process, and whoever opens the store next
decides what becomes of it. ``commit`` does both at once, under the temporary name, and never leaves one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator

from swapper.directory import Directory
from swapper.errors import StorageFull, StoreMissing, StoreMisuse, failed
from swapper.manifest import Manifest
from swapper.publication import NEW, committed_name, last_name, prepared_name, put_new, retained_name
from swapper.turns import Turns


class KeptGenerations:
    """The last generation, those retained, and one that may be prepared. Whoever changes them has the turn.

    Starts from the manifests ``kept``; ``base`` is the generation that the store goes on from. ``last`` is the last one
    that was committed; one that is kept above it is prepared.
    """

    def __init__(
        self,
        directory: Directory,
        turns: Turns,
        where: str,
        kept: dict[int, Manifest],
        retained: set[int],
        last: int,
        base: int,
    ) -> None:
        self._directory = directory
        self._turns = turns
        self._where = where
        self.kept = dict(kept)
        self.last = last
        self.retained = set(retained)
        self.base = kept[base]

    @property
    def next(self) -> int:
        """Number of the generation that writes are for."""
        return self.last + 1

    @property
    def prepared(self) -> int | None:
        """The generation that was prepared, and is neither finished nor abandoned."""
        newest = max(self.kept)
        return newest if newest > self.last else None

    def needed(self, index: int) -> set[int]:
        """The copies of the extent of this number that kept generations need."""
        entries = [manifest.entries[index] for manifest in self.kept.values()]
        return {entry.copy for entry in entries if entry.generation}

    def manifest_of(self, generation: int) -> Manifest:
        """Manifest of a generation that is kept. Raises ``StoreMissing``."""
        manifest = self.kept.get(generation)
        if manifest is None:
            raise StoreMissing(f"generation {generation} is not kept; {sorted(self.kept)} are.")
        return manifest

    def publish_first(self) -> None:
        """Publish generation 0 of a new store."""
        self.write_new(self.base)
        with self._renamed(NEW, last_name(0)):
            pass

    def write_new(self, manifest: Manifest) -> None:
        """Write a manifest under the temporary name. Raises ``StorageFull`` or ``StorageIOError``; nothing has changed
        then."""
        try:
            put_new(self._directory, manifest)
        except OSError as error:
            raise failed(f"manifest of generation {manifest.generation} of {self._where}", error) from error

    def prepare(self, manifest: Manifest) -> None:
        """Keep what was written under the temporary name as prepared."""
        with self._renamed(NEW, prepared_name(manifest.generation)):
            self.kept = self.kept | {manifest.generation: manifest}

    @contextlib.contextmanager
    def published(self, manifest: Manifest, name: str) -> Iterator[None]:
        """Make it the last generation; so far its manifest is called ``name``. The body makes it what is current."""
        before, generation = self.last, manifest.generation
        with self._renamed(name, last_name(generation)):
            self.base, self.last = manifest, generation
            self.kept = {number: self.kept[number] for number in self.retained} | {generation: manifest}
            yield
        with contextlib.suppress(OSError):  # the next owner removes what is left, and what is not said is not known
            self._say_committed(before, generation)
            if before not in self.retained:
                self._directory.remove(last_name(before))

    def abandon(self) -> None:
        """Give up the prepared generation, if there is one."""
        generation = self.prepared
        if generation is not None:
            self._remove_for_good(prepared_name(generation), generation)

    def retain(self) -> None:
        """Keep the last one until it is released. Raises ``StorageFull``."""
        if self.last in self.retained:
            return
        retained_max = self.base.num_copies - 2
        if len(self.retained) >= retained_max:
            raise StorageFull(
                f"generation {self.last} cannot be retained: {self._where} has room for {retained_max} retained "
                f"generations, and holds {sorted(self.retained)}.",
                survives="Nothing has changed.",
                advice="Release one, or create the store with a larger retained_max.",
            )
        with self._renamed(last_name(self.last), retained_name(self.last)):
            self.retained.add(self.last)

    def release(self, generation: int) -> None:
        """Let a retained one go. Raises ``StoreMissing``."""
        if generation not in self.retained:
            raise StoreMissing(f"generation {generation} is not retained; {sorted(self.retained)} are.")
        name = retained_name(generation)
        if generation == self.last:
            with self._renamed(name, last_name(generation)):
                self.retained.discard(generation)
            return
        self._remove_for_good(name, generation)

    def check_none_prepared(self) -> None:
        """Raise ``StoreMisuse`` if one is."""
        if self.prepared is not None:
            raise StoreMisuse(
                f"generation {self.prepared} of {self._where} is prepared.", advice="Finish or abandon it."
            )

    def _say_committed(self, before: int, generation: int) -> None:
        """See [Note: What was acknowledged]."""
        try:
            self._directory.rename(committed_name(before), committed_name(generation))
        except FileNotFoundError:
            self._directory.create(committed_name(generation), b"")

    def _remove_for_good(self, name: str, generation: int) -> None:
        """Give up a generation, whose manifest is called ``name``: that must be gone for good before its copies are
        written again."""
        with self._for_good(f"removal of {name}", lambda: self._directory.remove(name)):
            self.retained.discard(generation)
            if generation != self.base.generation:
                self.kept = {number: kept for number, kept in self.kept.items() if number != generation}

    @contextlib.contextmanager
    def _renamed(self, old: str, new: str) -> Iterator[None]:
        with self._for_good(f"publication of {new}", lambda: self._directory.rename(old, new)):
            yield

    @contextlib.contextmanager
    def _for_good(self, what: str, change: Callable[[], None]) -> Iterator[None]:
        """Change a name on disk; what it means in memory is done in the body.

        If that fails or is interrupted before both are done, the store may believe what the disk does not hold: it
        serves nothing more.
        """
        with self._turns.fatal(what):
            try:
                change()
                self._directory.sync()
            except OSError as error:
                raise failed(f"{what} of {self._where}", error) from error
            yield
