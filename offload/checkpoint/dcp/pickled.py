"""Plans and metadata of ``torch.distributed.checkpoint``, which are pickles: of a few classes that hold data alone.

A pickle names what is called to make its values. Here that is one of these names, or the pickle is refused; so no code
of whoever wrote it is run.
"""

from __future__ import annotations

import io
import pickle
from collections import OrderedDict
from enum import Enum
from pathlib import Path, PosixPath
from typing import Any

import torch
from torch.distributed.checkpoint import filesystem, metadata, planner, storage
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, MetadataIndex, TensorStorageMetadata

from offload.encoding import DTYPES
from swapper.checked import SLACK_BYTES, FileName, Int, Refused, Shape, Text, read_regular, within

METADATA_BYTES_MAX = 1 << 30

_EMPTY_BYTES, _GROWTH = 72, 24
"""Bytes that a list or dict takes for which a pickle has one; and those that values take, for each of a pickle's."""

_CLASSES = {
    metadata: (
        *("ChunkStorageMetadata", "_MEM_FORMAT_ENCODING", "TensorProperties", "TensorStorageMetadata"),
        *("BytesStorageMetadata", "StorageMeta", "Metadata", "MetadataIndex"),
    ),
    planner: ("WriteItemType", "BytesIOWriteData", "TensorWriteData", "WriteItem", "SavePlan"),
    storage: ("WriteResult",),
    filesystem: ("_StorageInfo", "_StoragePrefix"),
}
_DTYPES = {*DTYPES, *(str(dtype).removeprefix("torch.") for dtype in (torch.qint8, torch.quint8, torch.qint32))}


def _member(kind: Any, name: Any) -> Any:
    """The member of an enumeration: Python 3.11.0 to 3.11.3 write it as an attribute of its class."""
    is_enumeration = isinstance(kind, type) and issubclass(kind, Enum)
    return kind[name] if is_enumeration and name in kind.__members__ else _refuse("builtins.getattr")


_KNOWN: dict[tuple[str, str], Any] = {
    **{(module.__name__, name): getattr(module, name) for module, of_it in _CLASSES.items() for name in of_it},
    **{("torch", name): getattr(torch, name) for name in (*_DTYPES, "Size", "strided", "device")},
    ("torch.serialization", "_get_layout"): lambda name: torch.strided if name == "torch.strided" else _refuse(name),
    ("collections", "OrderedDict"): OrderedDict,
    ("pathlib", "PosixPath"): PosixPath,
    ("pathlib._local", "PosixPath"): PosixPath,
    ("builtins", "set"): set,
    ("builtins", "frozenset"): frozenset,
    ("builtins", "getattr"): _member,
}


class PlainUnpickler(pickle._Unpickler):  # type: ignore[name-defined,misc]
    """The unpickler that is written in Python. The one in C takes 16 bytes for each number that a value could be
    remembered under, up to the largest that a pickle names."""


class _Unpickler(PlainUnpickler):
    def find_class(self, module: str, name: str) -> Any:
        return _KNOWN.get((module, name)) or _refuse(f"{module}.{name}")


def _refuse(name: str) -> Any:
    raise Refused(f"it names {name}, which is none of the classes of a checkpoint")


def unpickled(data: bytes, kind: type | tuple[type, ...]) -> Any:
    """The value in a pickle. Raises ``Refused`` for one of another ``kind``, or that needs other classes."""
    if (data.count(b"]") + data.count(b"}")) * _EMPTY_BYTES > SLACK_BYTES + _GROWTH * len(data):
        raise Refused("its values would take far more memory than its bytes")
    try:
        found = _Unpickler(io.BytesIO(data)).load()
    except Refused:
        raise
    except Exception as error:  # whatever a pickle of other bytes raises
        raise Refused(f"{type(error).__name__}: {error}") from None
    if not isinstance(found, kind):
        raise Refused(f"it is a {type(found).__name__}")
    return found


def read_metadata(path: Path) -> Metadata:
    """The file ``.metadata`` of a checkpoint. Raises ``Refused`` and ``OSError``."""
    found: Metadata = unpickled(read_regular(path / ".metadata", METADATA_BYTES_MAX, links=True), Metadata)
    try:
        _check(found)
    except (AttributeError, TypeError) as error:  # a value without its fields
        raise Refused(str(error)) from None
    return found


def _check(found: Metadata) -> None:
    with within("state_dict_metadata"):
        for name, entry in _items(found.state_dict_metadata):
            Text(1 << 20).take(name)
            if isinstance(entry, TensorStorageMetadata):
                with within(name):
                    _check_tensor(entry)
    with within("planner_data"):
        for name, path_of_it in _items(getattr(found, "planner_data", None) or {}):
            if not isinstance(path_of_it, tuple) or not all(type(part) in (str, int) for part in path_of_it):
                raise Refused("it is no path of names", str(name))
    with within("storage_data"):
        for index, place in _items(found.storage_data):
            if not isinstance(index, MetadataIndex) or not isinstance(place, filesystem._StorageInfo):
                raise Refused("it is no place in a file")
            with within(str(index.fqn)):
                _FILE_NAME.take(place.relative_path)
                _SIZE.take(place.offset)
                _SIZE.take(place.length)


def _check_tensor(entry: TensorStorageMetadata) -> None:
    size = _SHAPE.take(entry.size)
    if not isinstance(entry.properties.dtype, torch.dtype):
        raise Refused("it is no dtype", "dtype")
    if not isinstance(entry.chunks, list):
        raise Refused("they are no list", "chunks")
    for chunk in entry.chunks:
        if not isinstance(chunk, ChunkStorageMetadata):
            raise Refused("it is no chunk", "chunks")
        offsets, sizes = _SHAPE.take(chunk.offsets), _SHAPE.take(chunk.sizes)
        ends = [first + own for first, own in zip(offsets, sizes, strict=False)]
        if not len(offsets) == len(sizes) == len(size) or any(end > most for end, most in zip(ends, size, strict=True)):
            raise Refused(f"a chunk of {sizes} at {offsets} is not within {size}", "chunks")


def _items(found: Any) -> list[tuple[Any, Any]]:
    if not isinstance(found, dict):
        raise Refused(f"it is a {type(found).__name__}")
    return list(found.items())


_FILE_NAME, _SIZE, _SHAPE = FileName(), Int(), Shape()
