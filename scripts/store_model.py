"""What the store's campaigns share: a durable store on a disk in memory, and the dict that it must agree with."""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import random
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from store_ram_disk import FaultPlan, RamDevice, RamDirectory, RamDisk

from swapper import PAGE_BYTES, Arena, DurableStore, Extent
from swapper.manifest import Entry, Manifest
from swapper.opening import begin, take_up

SIZES = [page * PAGE_BYTES for page in (1, 2, 1, 3, 1, 1)]
NUM_COPIES = 3
DISK_BYTES = sum(SIZES) * NUM_COPIES

_arena = Arena(16 * PAGE_BYTES)
_buffer = _arena.lease(4 * PAGE_BYTES)


class Difference(Exception):
    """The store and the model do not agree."""


def make_store(disk: RamDisk, plan: FaultPlan | None = None, identity: bytes = b"i" * 16) -> DurableStore:
    """A new store with room for one retained generation."""
    empty = Manifest(identity, 0, NUM_COPIES, 1, tuple(Entry(size, 0, 0, 0) for size in SIZES))
    return begin(RamDirectory(disk, plan), lambda _: RamDevice(disk, plan), empty, "ram")


def reopen(disk: RamDisk, generation: int | None = None, plan: FaultPlan | None = None) -> DurableStore:
    return take_up(RamDirectory(disk, plan), lambda _: RamDevice(disk, plan), "ram", generation)


def content(extent: Extent, rng: random.Random) -> bytes:
    """Bytes that differ from write to write, in every sector."""
    return rng.randbytes(64) * (extent.nbytes // 64)


def put(store: DurableStore, extent: Extent, data: bytes) -> None:
    """Write an extent. Raises ``OffloadError``."""
    ctypes.memmove(_buffer.address, data, len(data))
    store.write(extent, _buffer.address, extent.nbytes).wait(30)


def put_shadow(store: DurableStore, extent: Extent, data: bytes) -> None:
    """Write an extent beside what is current. Raises ``OffloadError``."""
    ctypes.memmove(_buffer.address, data, len(data))
    store.write_shadow(extent, _buffer.address, extent.nbytes).wait(30)


def get(store: DurableStore, extent: Extent) -> bytes:
    """Read an extent, over other bytes in the buffer. Raises ``OffloadError``."""
    ctypes.memset(_buffer.address, 0xEE, extent.nbytes)
    store.read(extent, _buffer.address, extent.nbytes).wait(30)
    return ctypes.string_at(_buffer.address, extent.nbytes)


def check_equal(store: DurableStore, expected: dict[int, bytes], what: str) -> None:
    """Every extent holds what the model says. Raises ``Difference``."""
    for index, data in expected.items():
        if get(store, store.extents[index]) != data:
            raise Difference(f"{what}: extent {index} has other bytes")


def run(description: str | None, campaign: Callable[[argparse.Namespace], dict[str, Any]], **numbers: int) -> None:
    """The command line of a campaign: ``--seed``, one option for each of ``numbers``, ``--json``. Exit status 1: a
    check failed."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    for name, default in numbers.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, default=default, help=f"(default: {default})")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args()
    start = time.monotonic()
    try:
        result = {"seed": arguments.seed, **campaign(arguments)}
    except Difference as difference:
        print(f"seed {arguments.seed}: {difference}", file=sys.stderr)
        raise SystemExit(1) from None
    result["seconds"] = round(time.monotonic() - start, 1)
    if arguments.json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            print(f"{name:<28}{value:,}" if isinstance(value, int) and name != "seed" else f"{name:<28}{value}")


def close_quietly(store: DurableStore) -> None:
    with contextlib.suppress(Exception):
        store.close()
