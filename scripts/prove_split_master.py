"""Prove that the split master is lossless: split and join all 2^32 patterns of an fp32 number, with every kernel.

    python scripts/prove_split_master.py

Every pattern that is not a NaN must come back; every NaN must come back as the canonical one. Takes about a minute for
each instruction set.
"""

from __future__ import annotations

import argparse
import os
import sys

import numpy as np

from offload.kernels import _kernels, join_master, split_master

CHUNK = 1 << 24
CANONICAL_NAN, CANONICAL_NAN_BF16 = 0x7FC00000, 0x7FC0


def prove(isa: str, num_threads: int) -> int:
    """Return the number of patterns that did not come back as they should."""
    _kernels.use_isa(isa)
    weight, rest, again = np.empty(CHUNK, np.uint16), np.empty(CHUNK, np.uint16), np.empty(CHUNK, np.uint32)
    wrong = nans = 0
    for first in range(0, 1 << 32, CHUNK):
        master = np.arange(first, first + CHUNK, dtype=np.uint32)
        split_master(CHUNK, master.ctypes.data, weight.ctypes.data, rest.ctypes.data, num_threads)
        join_master(CHUNK, again.ctypes.data, weight.ctypes.data, rest.ctypes.data, num_threads)
        nan = (master & 0x7FFFFFFF) > 0x7F800000
        nans += int(np.count_nonzero(nan))
        wrong += int(np.count_nonzero(again != np.where(nan, CANONICAL_NAN, master)))
        wrong += int(np.count_nonzero(weight[nan] != CANONICAL_NAN_BF16))
    print(f"{isa}: {1 << 32:,} patterns, {nans:,} of them NaNs, {wrong} wrong")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description="Split and join all 2^32 patterns of an fp32 number.")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    arguments = parser.parse_args()
    return 1 if sum(prove(isa, arguments.threads) for isa in _kernels.isas_supported()) else 0


if __name__ == "__main__":
    sys.exit(main())
