"""Foreign memory: that of a tensor which torch has not allocated. It is an array's, a capsule's, or shared with other
processes. Whoever has it looks at it without torch, and nobody counts them.

Torch frees all that it allocates by one function, and a storage says by which its memory is freed: in C++ alone, so
that the word is found by a trial. (``resizable()`` does not tell: what ``torch.load`` reads is not resizable, and what
``share_memory()`` shares is.)

A private mapping of a file is nobody else's: weights that ``safetensors`` and ``torch.load(mmap=True)`` have read.
Memory that another process has shared with this one stays that one's: each process that it was given to may have an
engine of its own.
"""

from __future__ import annotations

import ctypes
import io
import os
from functools import cache
from pathlib import Path

import torch

_NUM_WORDS = 6
"""A table of methods, counts, an address, the function that frees the memory, and what it is given."""


def is_foreign(storage: torch.UntypedStorage) -> bool:
    """Somebody may look at the memory of this storage without torch. False where that cannot be told."""
    word = _word_of_freeing()
    if word is None or storage.device.type != "cpu" or not storage.nbytes():
        return False
    is_torchs = _words(storage)[word] == _words(torch.UntypedStorage(1))[word]
    return not is_torchs and _is_seen_by_others(storage.data_ptr())


def _words(storage: torch.UntypedStorage) -> list[int]:
    return list((ctypes.c_size_t * _NUM_WORDS).from_address(storage._cdata))


@cache
def _word_of_freeing() -> int | None:
    """The number of the word of a storage that says by which function its memory is freed; None if there is none."""
    read = io.BytesIO()
    torch.save(torch.zeros(2), read)
    read.seek(0)
    own = [torch.empty(1), torch.empty(5000), torch.load(read, weights_only=True)]
    foreign = [torch.frombuffer(bytearray(size), dtype=torch.uint8) for size in (1, 5000)]
    words = [[_words(tensor.untyped_storage()) for tensor in tensors] for tensors in (own, foreign)]
    for index in range(_NUM_WORDS):
        of_own, of_foreign = ({each[index] for each in of_kind} for of_kind in words)
        if len(of_own) == len(of_foreign) == 1 and of_own != of_foreign:
            return index
    return None


def _is_seen_by_others(address: int) -> bool:
    """The kernel's list of mappings: range, permissions, offset, device, inode, path."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        span, permissions, _, _, inode, *path = line.split(maxsplit=5)
        first, behind = (int(part, 16) for part in span.split("-"))
        if first <= address < behind:
            is_private = permissions.endswith("p")
            if not is_private and path and Path(path[0]).name.startswith("torch_"):
                return f"torch_{os.getpid()}_" in path[0]
            return not (is_private and int(inode))
    return False
