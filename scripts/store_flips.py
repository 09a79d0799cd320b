#!/usr/bin/env python3
"""Flip bits and swap blocks in the data and the manifests of a store: each change is found, or lies in unused bytes.

One change at a time, on a store with a retained and a last generation. Then everything is opened and read: what is read
must be right to the byte; whatever is not must be an error.
"""

from __future__ import annotations

import argparse
import random
from typing import Any

from store_model import DISK_BYTES, Difference, check_equal, content, make_store, put, reopen, run
from store_ram_disk import SECTOR_BYTES, RamDisk, flipped

from swapper import StorageCorrupt, StoreMissing

BLOCKS = (SECTOR_BYTES, 4096)


def campaign(arguments: argparse.Namespace) -> dict[str, Any]:
    rng = random.Random(arguments.seed)
    disk, generations = _store(rng)
    counts = {"changes": 0, "found": 0, "in_unused_bytes": 0}
    kinds = {"flips_in_data": _flip_data, "flips_in_manifests": _flip_manifest, "swaps_in_data": _swap_data,
             "swaps_of_manifests": _swap_manifests}  # fmt: skip
    counts |= dict.fromkeys(kinds, 0)
    while counts["changes"] < arguments.changes:
        kind = rng.choices(list(kinds), (45, 25, 28, 2))[0]
        spoilt = RamDisk(bytearray(disk.data), dict(disk.files))
        kinds[kind](spoilt, rng)
        if (spoilt.data, spoilt.files) == (disk.data, disk.files):
            continue
        counts["changes"] += 1
        counts[kind] += 1
        try:
            found = _read_all(spoilt, generations)
        except Difference as difference:
            raise Difference(f"change {counts['changes']}, {kind}: {difference}") from None
        counts["found" if found else "in_unused_bytes"] += 1
        if kind != "flips_in_data" and kind != "swaps_in_data" and not found:
            raise Difference(f"change {counts['changes']}, {kind}: not found, and manifests have no unused bytes")
    return counts


def _store(rng: random.Random) -> tuple[RamDisk, dict[int, dict[int, bytes]]]:
    """Generation 1, retained, and 3, the last; extent 5 is in neither of its copies after 1, some copies are free."""
    disk = RamDisk(bytearray(DISK_BYTES))
    store = make_store(disk)
    now: dict[int, bytes] = {}
    generations = {}
    for number, indices in ((1, range(5)), (2, (0, 3)), (3, (0, 1, 2))):
        for index in indices:
            now[index] = content(store.extents[index], rng)
            put(store, store.extents[index], now[index])
        store.commit(b"metadata of generation %d" % number)
        generations[number] = dict(now)
        if number == 1:
            store.retain()
    store.close()
    return disk, generations


def _read_all(disk: RamDisk, generations: dict[int, dict[int, bytes]]) -> bool:
    """Read everything that the disk still offers. True if the change was found, ``Difference`` if it was used."""
    found = False
    for number in (1, 3):
        try:
            with reopen(disk, number) as store:
                if store.metadata != b"metadata of generation %d" % number:
                    raise Difference(f"generation {number} has other metadata")
                for index, data in generations[number].items():
                    try:
                        check_equal(store, {index: data}, f"generation {number}")
                    except StorageCorrupt:
                        found = True
        except (StorageCorrupt, StoreMissing):
            found = True
    return found


def _flip_data(disk: RamDisk, rng: random.Random) -> None:
    bit = rng.randrange(8 * len(disk.data))
    disk.data[bit // 8] ^= 1 << bit % 8


def _flip_manifest(disk: RamDisk, rng: random.Random) -> None:
    name = rng.choice(sorted(name for name, content in disk.files.items() if content))
    disk.files[name] = flipped(disk.files[name], rng.randrange(8 * len(disk.files[name])))


def _swap_data(disk: RamDisk, rng: random.Random) -> None:
    block = rng.choice(BLOCKS)
    a, b = (rng.randrange(0, len(disk.data), block) for _ in range(2))
    disk.data[a : a + block], disk.data[b : b + block] = disk.data[b : b + block], disk.data[a : a + block]


def _swap_manifests(disk: RamDisk, rng: random.Random) -> None:
    a, b = rng.sample(sorted(disk.files), 2)
    disk.files[a], disk.files[b] = disk.files[b], disk.files[a]


if __name__ == "__main__":
    run(__doc__, campaign, changes=100_000)
