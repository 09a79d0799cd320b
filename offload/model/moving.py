"""Values that move in place and keep their identity: arrays, iterators, files, generators.

Of each there is a mark, which is another one once it has moved. Most can be had as they were: the bytes of an array can
be written again, an iterator can be copied before it moves, a file has a place. A generator cannot.
"""

from __future__ import annotations

import array
import ctypes
import io
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import partial
from operator import length_hint
from types import GeneratorType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils.data.dataloader import _BaseDataLoaderIter

ARRAYS = (np.ndarray, bytearray, array.array, ctypes.Array)
BYTES_MAX = 1 << 20
"""An array that takes more is not looked at."""


PLAIN = frozenset({int, float, str, bool, bytes, type(None), torch.dtype, torch.device})
"""Classes of values that never move."""


def slots_of(kind: type) -> tuple[str, ...]:
    """Names of the slots of a class of the program's."""
    if kind not in _slots:
        _slots[kind] = _find_slots(kind)
    return _slots[kind]


_slots: weakref.WeakKeyDictionary[type, tuple[str, ...]] = weakref.WeakKeyDictionary()


def _find_slots(kind: type) -> tuple[str, ...]:
    if kind.__module__.split(".")[0] in ("builtins", "torch", "numpy"):
        return ()
    names = (name for cls in kind.__mro__ for name in _as_tuple(vars(cls).get("__slots__", ())))
    return tuple(name for name in names if not name.startswith("__"))


def attributes_of(value: Any) -> dict[str, Any]:
    """Attributes that an object has itself, those in slots, too; of a module also its parameters, buffers and
    children."""
    own = dict(getattr(value, "__dict__", {}))
    if isinstance(value, nn.Module):
        own |= {**value._parameters, **value._buffers, **value._modules}
    return own | {name: getattr(value, name) for name in slots_of(type(value)) if hasattr(value, name)}


def _as_tuple(names: Any) -> tuple[str, ...]:
    return (names,) if isinstance(names, str) else tuple(names)


def bytes_of(value: Any) -> memoryview | None:
    """The memory of an array that is neither large nor one of objects; None: it is none."""
    if not isinstance(value, ARRAYS) or (isinstance(value, np.ndarray) and value.dtype.hasobject):
        return None
    view = memoryview(_flat(value) if isinstance(value, np.ndarray) else value)  # type: ignore[arg-type]
    if view.nbytes > BYTES_MAX or not view.nbytes or not view.c_contiguous or view.readonly:
        return None
    return view.cast("B")


def _flat(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The memory of an array, or of the one that it is a part of, as bytes."""
    while not array.flags.forc and isinstance(array.base, np.ndarray):
        array = array.base
    return array.reshape(-1, order="A").view(np.uint8) if array.flags.forc else np.empty(0, np.uint8)


def is_iterator(value: Any) -> bool:
    """It is one of Python's own, and no generator. One of a class of the program's is an object as others are."""
    return type(value).__module__ in ("builtins", "itertools") and isinstance(value, Iterator) and not _has_frame(value)


def within(iterator: Any) -> tuple[Any, ...]:
    """What an iterator of Python's own takes its items from, and functions that it calls."""
    parts = _parts_of(iterator)
    return () if parts is None else (*parts[1], *(parts[2] if isinstance(parts[2], tuple) else ()))


def copied(iterator: Any) -> Any:
    """One that will give what this one gives next, or None if there is none. Iterators within it are copied, too."""
    parts = _parts_of(iterator)
    if parts is None:
        return None
    function, arguments, state = parts
    items = [*arguments, *(state if isinstance(state, tuple) else ())]
    copies = [copied(item) if is_iterator(item) else item for item in items]
    if any(_has_frame(item) or one is None is not item for item, one in zip(items, copies, strict=True)):
        return None
    again = function(*copies[: len(arguments)])
    if state is not None:  # lists in it grow: ``itertools.cycle`` writes down what it has given
        of_state = (list(item) if type(item) is list else item for item in copies[len(arguments) :])
        again.__setstate__(tuple(of_state) if isinstance(state, tuple) else state)
    return again


def mark_of(value: Any) -> Any:
    """Another one if the value has moved; None for a value that does not."""
    if isinstance(value, GeneratorType):
        frame = value.gi_frame
        return None if frame is None else (frame.f_lasti, *map(id, frame.f_locals.values()))
    if isinstance(value, io.IOBase):
        place = place_of(value)
        return None if place is None else place[0]()
    if isinstance(value, _BaseDataLoaderIter):
        return value._num_yielded
    if is_iterator(value):
        return _position(value)
    memory = bytes_of(value)
    return None if memory is None else hash(memory.tobytes())


def place_of(file: io.IOBase) -> tuple[Callable[[], int], Callable[[int], object]] | None:
    """How the place in a file is read and set; None where there is none."""
    try:
        if file.closed or not file.seekable():
            return None
        file.tell()
    except (OSError, ValueError):
        return None
    return file.tell, partial(file.seek)


def _has_frame(value: Any) -> bool:
    return isinstance(value, GeneratorType)


def _parts_of(iterator: Any) -> tuple[Any, tuple[Any, ...], Any] | None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        try:
            function, arguments, *state = iterator.__reduce__()
        except (TypeError, ValueError):  # it cannot be copied
            return None
    return function, arguments, state[0] if state else None


def _position(iterator: Any) -> Any:
    left = length_hint(iterator, -1)
    parts = None if left >= 0 else _parts_of(iterator)
    if parts is None:
        return left
    _, arguments, state = parts
    items = (*arguments, *(state if isinstance(state, tuple) else (state,)))
    return tuple(
        _position(item) if is_iterator(item) else item if isinstance(item, int) else id(item) for item in items
    )
