"""Initialisers without memory: what they do to tensors on the meta device is recorded, and done when it is needed.

[Note: The same random numbers]
Initialisers draw from one stream, in the order in which a program calls them; units are stored in another order. So
each call that draws is made twice. When it is recorded it is made on scratch memory: the generator moves on as it would
have, and the state that it had before is kept (5 KB). When the tensor is needed the call is made again from that state.
Calls that fill a tensor in order are made in pieces: see [Note: Pieces of one draw].
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map

from offload.birth.draws import Draw, KeptPieces, comes_in_pieces
from offload.memory import passing_tensor
from offload.units import innermost

_aten = torch.ops.aten
_META = torch.device("meta")

_FILLING_NOTHING = {_aten.empty, _aten.empty_strided, _aten.empty_like, _aten.new_empty, _aten.new_empty_strided}
_OVERWRITING = {_aten.uniform_, _aten.normal_, _aten.zero_, _aten.fill_}
"""Operators whose result does not depend on what was there."""

_IS_META = Tensor.is_meta.__get__  # type: ignore[attr-defined]

_LARGE = (torch.empty, torch.empty_strided, torch.ones, torch.zeros, torch.full, torch.rand, torch.randn, torch.randint)
"""Functions that make weights. Others, such as ``torch.arange``, make small tensors that programs look into."""


class _Layout(NamedTuple):
    """Storage of a tensor on the meta device, and its layout there."""

    storage: int
    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int


@dataclass(frozen=True, eq=False)
class _Call:
    """One call that wrote to storages on the meta device. Tensors there are replaced by their layouts."""

    function: Callable[..., Any]
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    reads: frozenset[int]
    fresh: tuple[int | None, ...] = ()
    """The storages that the tensors in its result were made in."""
    state: Tensor | None = None
    """The generator's before it, if it draws."""
    overwrites: bool = False
    draw: Draw | None = None
    """The draw of an operation that fills its first argument with random numbers in order; None for others."""


class Recording(TorchDispatchMode):
    """Within ``with``, what is done to tensors on the meta device is recorded. ``value`` does it."""

    def __init__(self) -> None:
        super().__init__()
        self._calls: list[_Call] = []
        self._writers: dict[int, list[int]] = {}
        """By storage, the indices of the calls that wrote to it."""
        self._storages: dict[int, torch.UntypedStorage] = {}
        """Held, because another storage could get the address of one that is gone."""
        self._last: dict[int, torch.UntypedStorage] = {}
        self._given: dict[int, tuple[_Layout, Callable[[], Tensor]]] = {}
        self._kept_pieces = KeptPieces()

    def fills(self, tensor: Tensor) -> bool:
        """Something was written to the tensor's storage."""
        return _key(tensor) in self._writers

    def give(self, tensor: Tensor, value: Callable[[], Tensor]) -> None:
        """Whatever was done to the tensor, it holds ``value()``, which is asked for each time that another one's value
        depends on it."""
        self._hold([tensor])
        self._given[_key(tensor)] = self._layout(tensor), value

    def without_value(self, tensors: Iterable[Tensor]) -> list[Tensor]:
        """Those of the tensors that depend on what no other has in the end: on values in whose place others were
        given, or on memory that nothing was written to."""
        replaced = set().union(*map(self._calls_behind, self._given))
        found = []
        for tensor in tensors:
            calls = self._calls_behind(_key(tensor))
            if calls & replaced or any(self._reads_nothing(index) for index in calls):
                found.append(tensor)
        return found

    def _reads_nothing(self, index: int) -> bool:
        """The call reads memory that nothing was written to before, and that it does not write to."""
        reads = self._calls[index].reads - self._given.keys()
        return any(self._writers.get(read, [index + 1])[0] > index for read in reads)

    def value(self, tensor: Tensor) -> Tensor:
        """Return what a tensor on the meta device would hold, in host memory. Drawing from the generators of the
        program is not noticed by them. The last value made is kept until another is asked for."""
        key = _key(tensor)
        if key not in self._last:
            self._last = {}
            self._last = {key: self._make(key)}
        return _tensor_in(self._last, self._layout(tensor))

    @torch.no_grad()
    def rows(self, tensor: Tensor, start: int, stop: int) -> Tensor:
        """The rows ``[start, stop)`` of the same. Where one draw has filled all of it, memory for them is enough."""
        calls = [self._calls[index] for index in self._calls_behind(_key(tensor))]
        draw = calls[0].draw if len(calls) == 1 else None
        if draw is None or not (_covers_storage(tensor) and tensor.is_contiguous()):
            return self.value(tensor)[start:stop]
        of_row = tensor.shape[1:].numel()
        out = passing_tensor((stop - start) * of_row * tensor.itemsize).view(tensor.dtype)
        draw.fill_from(start * of_row, out, tensor.numel(), self._kept_pieces)
        return out.view(stop - start, *tensor.shape[1:])

    def __enter__(self) -> Recording:
        super().__enter__()  # type: ignore[no-untyped-call]
        self._as_in_memory = _AsInMemory()
        self._as_in_memory.__enter__()
        # Since torch 2.13 it looks at what it has drawn: it is one call here.
        self._truncated_normal = torch.nn.init._no_grad_trunc_normal_
        torch.nn.init._no_grad_trunc_normal_ = self._record_truncated_normal
        return self

    def __exit__(self, *error: Any) -> None:
        torch.nn.init._no_grad_trunc_normal_ = self._truncated_normal
        self._as_in_memory.__exit__(*error)
        super().__exit__(*error)  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # what is wrapped is recorded when the wrapper has taken the call apart
        kwargs = kwargs or {}
        written = _written_by(func, args, kwargs)
        before = [tensor for tensor in _tensors((args, kwargs)) if _is_meta(tensor)]
        if before and all(_is_meta(tensor) for tensor in written):
            result = func(*_on_meta(args), **_on_meta(kwargs))
        else:
            result = func(*args, **kwargs)
        after = [tensor for tensor in _tensors(result) if _is_meta(tensor)]
        known = {_key(tensor) for tensor in before}
        fresh = tuple(key if key not in known else None for key in map(_key, after))
        writes = [tensor for tensor in written if _is_meta(tensor)]
        if not (writes or any(fresh)) or func.overloadpacket in _FILLING_NOTHING:
            return result
        self._hold(after)
        draws = torch.Tag.nondeterministic_seeded in func.tags
        overwrites = func.overloadpacket in _OVERWRITING and _covers_storage(args[0])
        self._record(func, args, kwargs, writes, fresh, draws=draws, overwrites=overwrites)
        return result

    def _record_truncated_normal(self, tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if not _is_meta(tensor):
            return self._truncated_normal(tensor, *args, **kwargs)
        with _disable_current_modes(), torch.no_grad():
            self._record(self._truncated_normal, (tensor, *args), kwargs, [tensor], (), draws=True)
        return tensor

    def _record(
        self,
        function: Callable[..., Any],
        args: Any,
        kwargs: Any,
        writes: Sequence[Tensor],
        fresh: tuple[int | None, ...],
        *,
        draws: bool,
        overwrites: bool = False,
    ) -> None:
        inputs = [tensor for tensor in _tensors((args, kwargs)) if _is_meta(tensor)]
        self._hold(inputs)
        arguments = tree_map(self._kept, (args, kwargs))
        state, draw = None, None
        if draws and overwrites and comes_in_pieces(function, args[0]):
            settings = [item for item in (*args[1:], *kwargs.values()) if not isinstance(item, torch.Generator | None)]
            draw = Draw(function, settings, args[0], _generator_of(arguments))
        elif draws:
            state = _generator_of(arguments).get_state()
            scratch = {key: self._memory_for(key) for key in map(_key, inputs)}
            _run(function, arguments, scratch)
        for key in {*map(_key, writes), *(key for key in fresh if key is not None)}:
            self._writers.setdefault(key, []).append(len(self._calls))
        reads = frozenset(map(_key, inputs))
        self._calls.append(_Call(function, arguments, reads, fresh, state, overwrites, draw))

    def _hold(self, tensors: Sequence[Tensor]) -> None:
        for tensor in tensors:
            self._storages[_key(tensor)] = _storage_of(tensor)

    def _memory_for(self, key: int) -> torch.UntypedStorage:
        return passing_tensor(self._storages[key].nbytes()).untyped_storage()

    def _beginning_of(self, key: int) -> torch.UntypedStorage:
        """Memory for a storage, with what was given for it."""
        storage = self._memory_for(key)
        if key in self._given:
            layout, value = self._given[key]
            _tensor_in({key: storage}, layout).copy_(value())
        return storage

    def _kept(self, item: Any) -> Any:
        """An argument as a call keeps it: what lies in memory as it is now, since it may change."""
        if isinstance(item, Tensor):
            return self._layout(item) if _is_meta(item) else item.detach().clone()
        return torch.device("cpu") if item == _META else item

    def _layout(self, tensor: Tensor) -> _Layout:
        of = innermost(tensor)
        return _Layout(_key(of), of.dtype, of.shape, of.stride(), int(of.storage_offset()))

    @torch.no_grad()
    def _make(self, key: int) -> torch.UntypedStorage:
        """The storage, with all that was done to it and to what that depends on."""
        storages: dict[int, torch.UntypedStorage] = {}
        for index in sorted(self._calls_behind(key)):
            call = self._calls[index]
            for read in call.reads:
                if read not in storages:
                    storages[read] = self._beginning_of(read)
            if call.draw is not None:
                call.draw.fill(_tensor_in(storages, call.arguments[0][0]))
                continue
            with _from_state(call):
                result = _run(call.function, call.arguments, storages)
            for made, tensor in zip(call.fresh, _tensors(result), strict=False):
                if made is not None:
                    storages[made] = tensor.untyped_storage()
        return storages[key]

    def _calls_behind(self, key: int) -> set[int]:
        """The indices of the calls without which the storage would not be what it is at the end. What was given to
        others needs no call."""
        needed: set[int] = set()
        seen: set[tuple[int, int]] = set()
        waiting = [(key, len(self._calls))]
        while waiting:
            storage, end = waiting.pop()
            if (storage, end) in seen:
                continue
            seen.add((storage, end))
            for index in reversed(self._writers.get(storage, ())):
                if index >= end:
                    continue
                needed.add(index)
                call = self._calls[index]
                waiting.extend((other, index) for other in call.reads - self._given.keys() if other != storage)
                if call.overwrites or storage in call.fresh:
                    break
        return needed


class Shapes(Recording):
    """The same without values: nothing is recorded, and nothing drawn."""

    def _record(self, *call: Any, **known: Any) -> None:
        """Leave it out."""


class _AsInMemory(TorchFunctionMode):
    """Initialisers do what they do in memory. Weights that they make are made on the meta device where they name no
    other; and no tensor says that it is there, since ``torch.nn.init`` would leave it as it is."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == _IS_META:
            return False
        if func in _LARGE and kwargs.get("device") is None:
            kwargs["device"] = _META
        return func(*args, **kwargs)


def _is_meta(tensor: Tensor) -> bool:
    return tensor.device.type == "meta"


def _key(tensor: Tensor) -> int:
    return int(_storage_of(tensor)._cdata)


def _storage_of(tensor: Tensor) -> torch.UntypedStorage:
    return innermost(tensor).untyped_storage()


def _tensors(items: Any) -> list[Tensor]:
    return [item for item in tree_leaves(items) if isinstance(item, Tensor)]


def _on_meta(items: Any) -> Any:
    """The same, with the shapes alone of tensors in memory; single numbers may mix with every device."""
    return tree_map(lambda item: item.to(_META) if isinstance(item, Tensor) and item.dim() else item, items)


def _written_by(func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> list[Tensor]:
    """The arguments that an operator writes to."""
    found: list[Tensor] = []
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += _tensors(kwargs.get(argument.name) if argument.name in kwargs else args[index : index + 1])
    return found


def _covers_storage(tensor: Tensor) -> bool:
    return tensor.numel() * tensor.itemsize == _storage_of(tensor).nbytes()


def _tensor_in(storages: dict[int, torch.UntypedStorage], layout: _Layout) -> Tensor:
    whole = torch.empty(0, dtype=layout.dtype, device="cpu")
    return whole.set_(storages[layout.storage], layout.offset, layout.size, layout.stride)  # type: ignore[call-overload,no-any-return]


def _run(function: Callable[..., Any], arguments: Any, storages: dict[int, torch.UntypedStorage]) -> Any:
    args, kwargs = tree_map(
        lambda item: _tensor_in(storages, item) if isinstance(item, _Layout) else item,
        arguments,
        is_leaf=lambda item: isinstance(item, _Layout),
    )
    return function(*args, **kwargs)


def _generator_of(arguments: Any) -> torch.Generator:
    given = (item for item in tree_leaves(arguments) if isinstance(item, torch.Generator))
    return next(given, torch.default_generator)


@contextlib.contextmanager
def _from_state(call: _Call) -> Iterator[None]:
    """Draw what the call drew; the generator is then what it was."""
    if call.state is None:
        yield
        return
    generator = _generator_of(call.arguments)
    present = generator.get_state()
    generator.set_state(call.state)
    try:
        yield
    finally:
        generator.set_state(present)
