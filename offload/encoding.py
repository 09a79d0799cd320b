"""Values of a user's objects as bytes: JSON, and the memory of tensors and arrays behind it. Nothing is ever pickled.

Layout: 8 bytes with the length of the JSON text (little-endian), the text, and the memory, to which the text refers by
``[offset, bytes]``, in the order in which it lies there. What JSON has no word for is an object with one key that
begins with ``$``.
"""

from __future__ import annotations

import json
import math
import re
import struct
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import numpy as np
import torch

from offload.errors import ConfigError, warn
from swapper import OffloadError, StorageCorrupt
from swapper.checked import (
    ANY,
    SLACK_BYTES,
    Cursor,
    Int,
    Kind,
    OneOf,
    Real,
    Refused,
    Shape,
    Tuple,
    cost_of,
    once,
    refusals,
    text_of,
)

_LENGTH = struct.Struct("<Q")

_SPECIAL_BYTES = 300
"""Bytes that what an object with a ``$`` stands for takes beyond those of the text: a tensor takes 740, a deque 760."""


@dataclass(frozen=True)
class Json:
    """A value that was made into JSON before, see ``as_json``."""

    text: bytes


def as_json(value: object, what: str) -> Json:
    """A value without tensors and arrays, to be a member of one ``Encoded`` after the other. Raises ``ConfigError`` as
    that."""
    return Json(_text(_Encoder([]).of(value, what)))


class Encoded:
    """An object on its way to bytes, as large as it will be: ``nbytes``. Memory of tensors and arrays on the CPU is not
    copied before ``join`` is called."""

    def __init__(self, members: Mapping[str, object], what: str) -> None:
        """Raises ``ConfigError`` for a part of a member that has no place in it; ``what`` names the whole."""
        self._memory: list[memoryview] = []
        encoder = _Encoder(self._memory)
        self._texts = {
            name: value.text if isinstance(value, Json) else _text(encoder.of(value, f"{what}[{name!r}]"))
            for name, value in members.items()
        }
        members_bytes = sum(len(_text(name)) + len(text) + 2 for name, text in self._texts.items())
        self.nbytes = _LENGTH.size + max(members_bytes, 1) + 1 + sum(part.nbytes for part in self._memory)

    def is_held(self, name: str) -> bool:
        """A reader will hold the values of this member, see ``Decoder``."""
        return _held_bytes(self._texts[name]) <= _held_bytes_max(self.nbytes)

    def join(self) -> bytes:
        """The bytes."""
        text = b",".join(_text(name) + b":" + text for name, text in self._texts.items())
        return b"".join((_LENGTH.pack(len(text) + 2), b"{", text, b"}", *self._memory))


def encode(value: object, what: str) -> bytes:
    """``value`` as bytes. Raises ``ConfigError`` as ``Encoded``."""
    memory: list[memoryview] = []
    text = _text(_Encoder(memory).of(value, what))
    return b"".join((_LENGTH.pack(len(text)), text, *memory))


def decode(data: bytes, what: str, kind: Callable[[str], OffloadError] = StorageCorrupt) -> Any:
    """The value that ``encode`` was given: tensors on the CPU, classes of one's own as what they are made of.

    Raises an error of this ``kind`` for bytes that are not such a value.
    """
    with refusals(what, kind):
        decoder = Decoder(data)
        value = decoder.whole()
        decoder.end()
        return value


def _text(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _held_bytes(text: bytes) -> int:
    return cost_of(text) + text.count(b'"$') * _SPECIAL_BYTES


def _held_bytes_max(nbytes: int) -> int:
    return SLACK_BYTES + 6 * nbytes


class _Encoder:
    def __init__(self, memory: list[memoryview]) -> None:
        self._memory = memory
        self._nbytes = 0

    def of(self, value: Any, path: str) -> Any:
        if value is None or type(value) in (bool, str, int, float):
            return value
        if isinstance(value, torch.Tensor) and not value.is_meta:
            return self._tensor(value, path)
        if isinstance(value, np.ndarray) and _is_plain(value.dtype):
            return {"$array": [value.dtype.str, list(value.shape), *self._keep(_bytes_of(value))]}
        if isinstance(value, np.generic) and _is_plain(value.dtype):
            return {"$scalar": [value.dtype.str, *self._keep(value.tobytes())]}
        if isinstance(value, bytearray):
            return {"$bytearray": self._keep(bytes(value))}
        if isinstance(value, bytes):
            return {"$bytes": self._keep(value)}
        if isinstance(value, Mapping):
            return self._mapping(value, path)
        if isinstance(value, deque) and value.maxlen is not None:
            return {"$window": [value.maxlen, self.of(list(value), path)]}
        for name, kind in _SEQUENCES.items():
            if isinstance(value, kind):
                _say_unless(type(value) is kind, value, kind.__name__, path)
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
        for plain, made in _PLAIN.items():
            if isinstance(value, plain):  # a class of one's own, or an enumeration
                _say_unless(False, value, plain.__name__, path)
                return made(value)
        raise ConfigError(
            f"{path} is a {type(value).__qualname__}, which a checkpoint cannot hold: it takes numbers, strings, "
            "tensors, arrays, and lists, tuples, sets and dicts of them"
        )

    def _mapping(self, value: Mapping[Any, Any], path: str) -> Any:
        plain = self._pairs(value, path)
        for name, kind in _MAPPINGS.items():
            if type(value) is kind:
                return {f"${name}": plain}
        if type(value) is defaultdict and value.default_factory in _FACTORIES.values():
            factory = next(name for name, made_by in _FACTORIES.items() if made_by is value.default_factory)
            return {"$defaultdict": [factory, plain]}
        _say_unless(type(value) is dict or not isinstance(value, dict), value, "dict", path)
        return plain

    def _pairs(self, value: Mapping[Any, Any], path: str) -> Any:
        if all(isinstance(key, str) and not key.startswith("$") for key in value):
            return {key: self.of(item, f"{path}[{key!r}]") for key, item in value.items()}
        pairs = [[self.of(key, f"a key of {path}"), self.of(item, f"{path}[{key!r}]")] for key, item in value.items()]
        return {"$dict": pairs}

    def _tensor(self, value: torch.Tensor, path: str) -> Any:
        plain = value.detach().cpu()
        if plain.layout is not torch.strided or plain.is_quantized:
            what = f"{plain.dtype}" if plain.is_quantized else f"{plain.layout}"
            if "'buffers'" not in path:  # they are copied into the model's, which know what they are
                warn(f"{path} is a tensor of {what}: loading what the engine saves gives a plain one of its numbers")
            plain = plain.dequantize() if plain.is_quantized else plain.to_dense()
        plain = plain.resolve_conj().resolve_neg().contiguous()
        raw = plain.reshape(-1).view(torch.uint8).numpy().data if plain.numel() else b""
        return {"$tensor": [str(plain.dtype).removeprefix("torch."), list(plain.shape), *self._keep(raw)]}

    def _keep(self, raw: bytes | memoryview) -> list[int]:
        self._memory.append(memoryview(raw))
        self._nbytes += self._memory[-1].nbytes
        return [self._nbytes - self._memory[-1].nbytes, self._memory[-1].nbytes]


class Decoder:
    """Takes what was encoded from bytes, as a whole, or field by field by ``cursor``. Raises ``Refused``.

    Memory: what the text takes, and the values. See [Note: What text costs].
    """

    def __init__(self, data: bytes) -> None:
        if len(data) < _LENGTH.size:
            raise Refused("it is cut short")
        (length,) = _LENGTH.unpack_from(data)
        begin = _LENGTH.size + length
        if begin > len(data):
            raise Refused("it is cut short")
        self._text = data[_LENGTH.size : begin]
        if not self._text.isascii():
            raise Refused("its text has other letters than those of ASCII")
        self._memory = memoryview(data)[begin:]
        self._taken_bytes = 0
        self._held_bytes_max = _held_bytes_max(len(data))
        self.cursor = Cursor(text_of(self._text), self._object, list_in="$tuple")

    def whole(self) -> Any:
        """The next value, if what it takes is in proportion to the bytes."""
        if _held_bytes(self._text[self.cursor.at :]) > self._held_bytes_max:
            raise Refused(f"its values would take more than {self._held_bytes_max:,} bytes")
        return self.cursor.whole()

    def end(self) -> None:
        """Raise ``Refused`` unless all of it was taken."""
        self.cursor.end()
        if self._taken_bytes != len(self._memory):
            raise Refused(f"{len(self._memory) - self._taken_bytes:,} bytes of memory belong to nothing")

    def _object(self, pairs: list[tuple[str, Any]]) -> Any:
        if len(pairs) == 1 and pairs[0][0].startswith("$"):
            name, content = pairs[0]
            try:
                return self._special(name[1:], content)
            except Refused as error:
                error.place = (name, *error.place)
                raise
            except (ValueError, TypeError, RuntimeError, OverflowError) as error:
                raise Refused(f"{error}", name) from None
        return once(pairs)

    def _special(self, name: str, content: Any) -> Any:
        if name in _SEQUENCES:
            return _SEQUENCES[name](_LIST.take(content))
        if name in _MAPPINGS:
            return _MAPPINGS[name](_DICT.take(content))
        if name == "defaultdict":
            factory, items = _DEFAULTS.take(content)
            return defaultdict(factory, items)
        if name == "window":
            return _window(*_WINDOW.take(content))
        if name == "dict":
            pairs = [_PAIR.take(pair) for pair in _LIST.take(content)]
            found = dict(pairs)
            if len(found) != len(pairs):
                raise Refused("a key is there twice")
            return found
        if name in ("bytes", "bytearray"):
            return (bytes if name == "bytes" else bytearray)(self._part(*_RANGE.take(content)))
        if name == "tensor":
            dtype, shape, offset, nbytes = _TENSOR.take(content)
            part = self._part(offset, nbytes, math.prod(shape) * dtype.itemsize)
            if dtype is torch.bool and part.nbytes and max(part) > 1:
                raise Refused("a truth is neither 0 nor 1")
            flat = torch.empty(part.nbytes, dtype=torch.uint8, device="cpu")
            flat.numpy()[:] = part
            return flat.view(dtype).view(shape)
        if name in ("array", "scalar"):
            is_array = name == "array"
            dtype, shape, offset, nbytes = (_ARRAY if is_array else _SCALAR).take(content)
            part = self._part(offset, nbytes, math.prod(shape) * dtype.itemsize)
            array = np.frombuffer(part, dtype=dtype).copy()
            return array.reshape(shape) if is_array else array[0]
        if name == "dtype":
            return DTYPE.take(content)
        if name == "device":
            return _DEVICE.take(content)
        if name == "complex":
            return complex(*_COMPLEX.take(content))
        raise Refused("this program does not know it")

    def _part(self, offset: int, nbytes: int, expected: int | None = None) -> memoryview:
        """The next part of the memory, if it is the one that the text says."""
        if expected not in (None, nbytes):
            raise Refused(f"it has {nbytes:,} bytes, not {expected:,}")
        if offset != self._taken_bytes or nbytes > len(self._memory) - offset:
            raise Refused(
                f"[{offset:,}, {offset + nbytes:,}) is not what comes next of its {len(self._memory):,} bytes of memory"
            )
        self._taken_bytes += nbytes
        return self._memory[offset : offset + nbytes]


_SEQUENCES: dict[str, Any] = {
    **{"list": list, "size": torch.Size, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": deque}
}
_MAPPINGS: dict[str, Any] = {"ordereddict": OrderedDict, "counter": Counter}
_PLAIN: dict[type, Any] = {int: int.__int__, float: float.__float__, str: str.__str__}
_FACTORIES: dict[str, Any] = {
    **{"none": None, "bool": bool, "int": int, "float": float, "str": str},
    **{"list": list, "tuple": tuple, "set": set, "dict": dict},
}
"""What a ``defaultdict`` makes values with, by its name: a function has none that could be trusted."""


def _say_unless(is_kept: bool, value: Any, plain: str, path: str) -> None:
    if not is_kept:
        warn(
            f"{path} is of the class {type(value).__qualname__}, which the engine's files have no word for: loading "
            f"gives a plain {plain}. Make it one before it is saved, or make the object of it again"
        )


def _window(length: int, items: list[Any]) -> deque[Any]:
    if len(items) > length:
        raise Refused(f"{len(items)} items are in a window of {length}")
    return deque(items, length)


def _is_plain(dtype: np.dtype[Any]) -> bool:
    """Its name says all of it: no objects, no fields, and no empty words."""
    return not dtype.hasobject and dtype.names is None and dtype.itemsize > 0


def _bytes_of(array: Any) -> memoryview:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data if array.size else memoryview(b"")


class _ArrayDtype(Kind[Any]):
    """A dtype of numpy that is no object, and has a size."""

    def take(self, value: Any) -> Any:
        if not isinstance(value, str) or not _OF_NUMPY.fullmatch(value):
            raise Refused("it is no dtype of numbers or letters")
        return np.dtype(value)


class _Device(Kind[torch.device]):
    def take(self, value: Any) -> torch.device:
        if not isinstance(value, str) or not _OF_DEVICES.fullmatch(value):
            raise Refused("it is no device")
        return torch.device(value)


class _Scalar(Tuple):
    """Dtype, offset and bytes of one number, as those of an array without dimensions."""

    def take(self, value: Any) -> tuple[Any, ...]:
        dtype, *place = super().take(value)
        return dtype, (), *place


_OF_NUMPY = re.compile(r"[<>|=]?(b1|[iufcmMSUV][1-9][0-9]{0,5}(\[[0-9a-zA-Z]{1,9}\])?)")
_OF_DEVICES = re.compile(r"[a-z]{1,20}(:[0-9]{1,3})?")

DTYPES = {
    name: dtype
    for name in (
        "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz",
        "float8_e5m2fnuz", "complex128", "complex64", "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16",
        "uint8", "bool",
    )
    if isinstance(dtype := getattr(torch, name, None), torch.dtype)
}  # fmt: skip
"""Dtypes of tensors whose bytes are numbers, by the names that torch gives them."""


class Dtype(OneOf[torch.dtype]):
    """One of some dtypes, by its name, or decoded already."""

    def take(self, value: Any) -> torch.dtype:
        return super().take(str(value).removeprefix("torch.") if isinstance(value, torch.dtype) else value)


class _Dict(Kind[dict[Any, Any]]):
    def take(self, value: Any) -> dict[Any, Any]:
        if type(value) is not dict:
            raise Refused("expected an object")
        return value


class _List(Kind[list[Any]]):
    def take(self, value: Any) -> list[Any]:
        if not isinstance(value, list):
            raise Refused("expected a list")
        return value


DTYPE = Dtype(DTYPES)
_LIST, _DICT, _PAIR = _List(), _Dict(), Tuple(ANY, ANY)
_DEFAULTS = Tuple(OneOf(_FACTORIES), _DICT)
_WINDOW = Tuple(Int(), _LIST)
_RANGE = Tuple(Int(), Int())
_TENSOR = Tuple(DTYPE, Shape(), Int(), Int())
_ARRAY = Tuple(_ArrayDtype(), Shape(), Int(), Int())
_SCALAR = _Scalar(_ArrayDtype(), Int(), Int())
_DEVICE, _COMPLEX = _Device(), Tuple(Real(), Real())
