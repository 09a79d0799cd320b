"""Ways to change the bytes of a file, for ``fuzz_files.py``: anywhere, in values of JSON, in fields of a layout."""

from __future__ import annotations

import copy
import json
import random
import struct
from collections.abc import Callable
from typing import Any

import xxhash

Change = Callable[[random.Random, bytes], bytes]

_JUNK: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 255, 256, 4096, 1 << 31, 1 << 32, (1 << 53) + 1, 1 << 63, 1 << 64, 10**40, 0.5,
    -0.0, 1e308, float("inf"), float("nan"), "", "a", "..", "../x", "/etc/passwd", "a/b", "\0", "\ud800", "é", "😀",
    "$tensor", "__metadata__", "x" * 300, [], {}, [[]], [0], ["a"], {"a": 1}, {"$tensor": ["float32", [2], 0, 8]},
    {"$tensor": ["quint8", [4], 0, 4]}, {"$tensor": ["float32", [1 << 40, 0], 0, 0]}, {"$bytes": [0, 4]},
    {"$dict": [[[], 1]]}, {"$dict": [[1, 2]]}, {"$set": [[1]]}, {"$tuple": [1, 2]}, {"$array": ["<f4", [1], 0, 4]},
    {"$scalar": ["|O", 0, 8]}, {"$dtype": "quint8"}, {"$dtype": "bool"}, {"$device": "cuda:99"}, {"$complex": [1]},
    {"$none": 1}, {"$deque": []}, [0] * 100, [[[[[[[[[[]]]]]]]]]],
)  # fmt: skip


def bytewise(rng: random.Random, data: bytes) -> bytes:
    """Flip, insert, delete, cut, repeat."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 5))):
        at, kind = rng.randrange(len(changed) + 1), rng.randrange(6)
        if kind == 0 and at < len(changed):
            changed[at] ^= 1 << rng.randrange(8)
        elif kind == 1:
            changed[at:at] = rng.randbytes(rng.choice((1, 8, 64)))
        elif kind == 2:
            del changed[at : at + rng.choice((1, 4, 100))]
        elif kind == 3 and rng.random() < 0.3:
            del changed[at:]
        elif kind == 4:
            changed[at:at] = changed[at : at + rng.choice((1, 16, 200))]
        elif at < len(changed):
            changed[at : at + 1] = rng.choice((b"[", b"{", b"]", b'"', b"9", b",", b"-", b"\xff", b"\\"))
    return bytes(changed)


def in_json(rng: random.Random, data: bytes) -> bytes:
    """Change some values of a text, wherever they are in it."""
    try:
        root = [json.loads(data)]
    except (ValueError, RecursionError):
        return bytewise(rng, data)
    for _ in range(rng.choice((1, 1, 1, 2, 4))):
        _change(rng, root)
    return json.dumps(root[0], separators=(",", ":")).encode()


def _change(rng: random.Random, root: list[Any]) -> None:
    holder, key = root, 0
    while isinstance(holder[key], (list, dict)) and holder[key] and (holder is root or rng.random() < 0.85):
        holder = holder[key]
        key = rng.randrange(len(holder)) if isinstance(holder, list) else rng.choice(list(holder))
    value, kind = holder[key], rng.randrange(8)
    if kind == 0 and len(holder) > 1:
        del holder[key]
    elif kind == 1 and isinstance(holder, list) and holder is not root:
        holder.insert(key, copy.deepcopy(value))
    elif kind == 2 and isinstance(holder, dict):
        holder[str(rng.choice(_JUNK))] = holder.pop(key)
    elif kind == 3 and isinstance(holder, list) and len(holder) > 1:
        rng.shuffle(holder)
    elif kind in (4, 5) and type(value) is int:
        holder[key] = rng.choice((value + 1, value - 1, -value, value * 2, value << 20, value // 2, value + 4096))
    else:
        holder[key] = copy.deepcopy(rng.choice(_JUNK))


def in_text_of(change: Change) -> Change:
    """The same in the text that a description begins with; the memory behind it stays."""

    def changed(rng: random.Random, data: bytes) -> bytes:
        (length,) = struct.unpack_from("<Q", data)
        text = change(rng, data[8 : 8 + length])
        return struct.pack("<Q", len(text)) + text + data[8 + length :]

    return changed


def in_part(name: str) -> Change:
    """Changes values of one member of an object."""

    def changed(rng: random.Random, data: bytes) -> bytes:
        content = json.loads(data)
        content[name] = json.loads(in_json(rng, json.dumps(content[name]).encode()))
        return json.dumps(content, separators=(",", ":")).encode()

    return changed


def sealed(change: Change) -> Change:
    """The change of a manifest's body, with a good checksum, and most often a good size."""

    def changed(rng: random.Random, data: bytes) -> bytes:
        body = bytearray(change(rng, data[:-16]))
        if len(body) >= 64 and rng.random() < 0.9:
            struct.pack_into("<Q", body, 56, len(body) + 16)
        return bytes(body) + xxhash.xxh3_128_digest(bytes(body))

    return changed


def in_fields(rng: random.Random, data: bytes) -> bytes:
    """Change numbers of the header of a manifest, and of its extents."""
    body = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.choice((8, 12, 32, 40, 44, 48, 52, 56, *(64 + 4 * rng.randrange(8 * 8) for _ in range(8))))
        value = rng.choice((0, 1, 2, 7, 255, 4096, 8192, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1))
        if at + 4 <= len(body):
            struct.pack_into("<I", body, at, value)
    return bytes(body)


def in_numbers(rng: random.Random, data: bytes) -> bytes:
    """Change numbers of 4 and 8 bytes in any place."""
    changed = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        value = rng.choice((0, 1, 8, 9, 12, 30, 33, 255, 4096, 1 << 20, (1 << 31) - 1, 1 << 32, 1 << 63, (1 << 64) - 1))
        form = rng.choice(("<I", "<Q"))
        at = rng.randrange(max(1, len(changed) - 8))
        if at + 8 <= len(changed):
            struct.pack_into(form, changed, at, value & (1 << 8 * struct.calcsize(form)) - 1)
    return bytes(changed)


def in_header(change: Change) -> Change:
    """The change of a safetensors header, with its length most often put right."""

    def changed(rng: random.Random, data: bytes) -> bytes:
        (length,) = struct.unpack_from("<Q", data)
        text = change(rng, data[8 : 8 + length])
        told = len(text) if rng.random() < 0.95 else rng.choice((0, 1, len(text) + 1, 1 << 40, (1 << 64) - 1))
        return struct.pack("<Q", told) + text + data[8 + length :]

    return changed
