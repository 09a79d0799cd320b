#!/usr/bin/env python3
"""Fuzz the parser of manifests, guided by coverage (atheris), with inputs whose checksum is right as often as not.

Whatever the bytes: `StorageCorrupt`, or a manifest that encodes to exactly these bytes; never another exception, and no
more memory than a small multiple of the input. Needs `pip install atheris`.
"""

from __future__ import annotations

import argparse
import json
import random
import resource
import struct
import sys
from pathlib import Path

import xxhash

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

try:
    import atheris
except ImportError:
    sys.exit("store_fuzz needs atheris: pip install atheris")

with atheris.instrument_imports():
    from swapper import manifest as _manifest

from swapper import PAGE_BYTES, StorageCorrupt

MEMORY_KIB_MAX = 512 << 10
counts = {"inputs": 0, "inputs_asked": 0, "accepted": 0}


def one_input(data: bytes) -> None:
    counts["inputs"] += 1
    if counts["inputs"] == counts["inputs_asked"]:  # libFuzzer ends the process without a word
        _report()
    try:
        decoded = _manifest.Manifest.decode(data)
    except StorageCorrupt:
        return
    if decoded.encode() != data:
        raise AssertionError(f"accepted, but it is encoded otherwise: {data.hex()}")
    counts["accepted"] += 1


def mutate(data: bytes, size_max: int, seed: int) -> bytes:
    """One of libFuzzer's mutations; then, mostly, the total size and the checksum are put right."""
    rng = random.Random(seed)
    body = bytearray(atheris.Mutate(data[:-16] if len(data) > 16 else data, max(size_max - 16, 1)))
    if rng.random() < 0.7 and len(body) >= 64:
        struct.pack_into("<8sI", body, 0, b"OFLDSTOR", 1)
        struct.pack_into("<Q", body, 56, len(body) + 16)
        num_extents, num_chunks = (rng.randrange(4) for _ in range(2))
        rest = len(body) - 64 - 32 * num_extents - 8 * num_chunks
        if rest >= 0 and rng.random() < 0.7:
            struct.pack_into("<I", body, 40, num_extents)
            struct.pack_into("<II", body, 48, num_chunks, rest)
    return bytes(body) + xxhash.xxh3_128_digest(bytes(body)) if rng.random() < 0.9 else bytes(body)


def _report() -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps({**counts, "peak_rss_kib": peak}), flush=True)
    if peak > MEMORY_KIB_MAX:
        raise AssertionError(f"{peak} KiB of memory")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--runs", type=int, default=1_000_000)
    arguments = parser.parse_args()
    counts["inputs_asked"] = arguments.runs
    entry = _manifest.Entry(PAGE_BYTES, 1, 1, 5)
    seeds = [
        _manifest.Manifest(bytes(16), 3, 2, 1, (entry,) * 3, (), b"metadata").encode(),
        _manifest.Manifest(bytes(16), 3, 3, 2, (entry,), ((0, 1), (1, 0)), b"").encode(),
    ]
    for data in seeds:
        one_input(data)
    argv = [sys.argv[0], f"-seed={arguments.seed}", f"-runs={arguments.runs}", "-max_len=512", "-verbosity=0"]
    atheris.Setup(argv, one_input, custom_mutator=mutate)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
