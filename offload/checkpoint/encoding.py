"""Values of a user's objects as bytes: JSON, and the memory of tensors and arrays behind it. Nothing is ever pickled.

Layout: 8 bytes with the length of the JSON text (little-endian), the text, and the memory, to which the text refers by
``[offset, bytes]``. What JSON has no word for is an object with one key that begins with ``$``.
"""

from __future__ import annotations

import json
import struct
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from offload.errors import ConfigError
from swapper import StorageCorrupt

_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class Json:
    """A part of a value that was made into JSON before, see ``as_json``."""

    content: Any


def as_json(value: object, what: str) -> Json:
    """A value without tensors and arrays, to be encoded again and again as a part of others. Raises ``ConfigError`` as
    ``Encoded``."""
    return Json(_Encoder([]).of(value, what))


class Encoded:
    """A value on its way to bytes, as large as it will be: ``nbytes``. Memory of tensors and arrays on the CPU is not
    copied before ``join`` is called."""

    def __init__(self, value: object, what: str) -> None:
        """Raises ``ConfigError`` for a part of the value that has no place in it; ``what`` names the whole."""
        self._memory: list[memoryview] = []
        self._text = json.dumps(_Encoder(self._memory).of(value, what), separators=(",", ":")).encode()
        self.nbytes = _LENGTH.size + len(self._text) + sum(part.nbytes for part in self._memory)

    def join(self) -> bytes:
        """The bytes."""
        return b"".join((_LENGTH.pack(len(self._text)), self._text, *self._memory))


def encode(value: object, what: str) -> bytes:
    """``value`` as bytes. Raises ``ConfigError`` as ``Encoded``."""
    return Encoded(value, what).join()


def decode(data: bytes, what: str) -> Any:
    """The value that ``encode`` was given: tensors on the CPU, mappings as ``dict``.

    Raises ``StorageCorrupt`` for bytes that are not such a value.
    """
    try:
        (length,) = _LENGTH.unpack_from(data)
        end = _LENGTH.size + length
        if end > len(data):
            raise ValueError("it is cut short")
        return _Decoder(memoryview(data)[end:]).of(json.loads(bytes(data[_LENGTH.size : end])))
    except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError, struct.error) as error:
        raise StorageCorrupt(f"{what} cannot be read: {error}.") from None


class _Encoder:
    def __init__(self, memory: list[memoryview]) -> None:
        self._memory = memory
        self._nbytes = 0

    def of(self, value: Any, path: str) -> Any:
        if isinstance(value, (bool, str, type(None))):
            return value
        if isinstance(value, Json):
            return value.content
        if isinstance(value, (int, float)) and type(value) in (int, float):
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, np.ndarray) and not value.dtype.hasobject:
            return {"$array": [value.dtype.str, list(value.shape), *self._keep(_bytes_of(value))]}
        if isinstance(value, np.generic) and not value.dtype.hasobject:
            return {"$scalar": [value.dtype.str, *self._keep(value.tobytes())]}
        if isinstance(value, (bytes, bytearray)):
            return {"$bytes": self._keep(bytes(value))}
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        for name, kind in _SEQUENCES.items():
            if isinstance(value, kind):
                items = [self.of(item, f"{path}[{index}]") for index, item in enumerate(value)]
                return items if name == "list" else {f"${name}": items}
        if isinstance(value, torch.dtype):
            return {"$dtype": str(value).removeprefix("torch.")}
        if isinstance(value, torch.device):
            return {"$device": str(value)}
        if isinstance(value, complex):
            return {"$complex": [value.real, value.imag]}
        if isinstance(value, PurePath):
            return str(value)
        if isinstance(value, (int, float)):  # a class of one's own, or an enumeration
            return int(value) if isinstance(value, int) else float(value)
        raise ConfigError(
            f"{path} is a {type(value).__qualname__}, which a checkpoint cannot hold: it takes numbers, strings, "
            "tensors, arrays, and lists, tuples, sets and dicts of them"
        )

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: self.of(item, f"{path}[{key!r}]") for key, item in value.items()}
        pairs = [[self.of(key, f"a key of {path}"), self.of(item, f"{path}[{key!r}]")] for key, item in value.items()]
        return {"$dict": pairs}

    def _tensor(self, value: torch.Tensor) -> Any:
        plain = value.detach().cpu().contiguous()
        if plain.is_sparse or plain.is_quantized:
            plain = plain.to_dense() if plain.is_sparse else plain.dequantize()
        raw = plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b""
        return {"$tensor": [str(plain.dtype).removeprefix("torch."), list(plain.shape), *self._keep(raw)]}

    def _keep(self, raw: bytes | memoryview) -> list[int]:
        self._memory.append(memoryview(raw))
        self._nbytes += self._memory[-1].nbytes
        return [self._nbytes - self._memory[-1].nbytes, self._memory[-1].nbytes]


class _Decoder:
    def __init__(self, memory: memoryview) -> None:
        self._memory = memory

    def of(self, item: Any) -> Any:
        if isinstance(item, list):
            return [self.of(part) for part in item]
        if not isinstance(item, dict):
            return item
        if len(item) == 1:
            ((name, content),) = item.items()
            if name.startswith("$"):
                return self._special(name[1:], content)
        return {key: self.of(part) for key, part in item.items()}

    def _special(self, name: str, content: Any) -> Any:
        if name in _SEQUENCES:
            return _SEQUENCES[name](self.of(content))
        if name == "dict":
            return {self.of(key): self.of(part) for key, part in content}
        if name == "bytes":
            return bytes(self._part(*content))
        if name == "tensor":
            dtype, shape, offset, nbytes = content
            flat = torch.frombuffer(bytearray(self._part(offset, nbytes)), dtype=_dtype(dtype)) if nbytes else None
            return torch.empty(shape, dtype=_dtype(dtype)) if flat is None else flat.view(shape)
        if name == "array":
            dtype, shape, offset, nbytes = content
            return np.frombuffer(bytearray(self._part(offset, nbytes)), dtype=np.dtype(dtype)).reshape(shape)
        if name == "scalar":
            dtype, offset, nbytes = content
            return np.frombuffer(self._part(offset, nbytes), dtype=np.dtype(dtype))[0]
        if name == "dtype":
            return _dtype(content)
        if name == "device":
            return torch.device(content)
        if name == "complex":
            return complex(*content)
        raise ValueError(f"it has a {name!r}, which this program does not know")

    def _part(self, offset: int, nbytes: int) -> memoryview:
        if not 0 <= offset <= offset + nbytes <= len(self._memory):
            raise ValueError(f"[{offset}, {offset + nbytes}) is not inside its {len(self._memory)} bytes")
        return self._memory[offset : offset + nbytes]


_SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}


def _bytes_of(array: Any) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


def _dtype(name: str) -> torch.dtype:
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name!r} is no dtype")
    return found
