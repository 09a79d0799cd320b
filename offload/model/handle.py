"""The handle: what stands in the model for a parameter that is not in use.

It has the parameter's shape, dtype and device but no memory. An operation that reads it brings the value in; one that
mutates it writes the result back; a view of it is a handle on the same value. Inside a unit's forward the model holds
ordinary parameters instead, so nothing there pays for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import torch
from torch import nn

from offload.errors import ConfigError
from offload.torch_internals import autograd_gradient, map_leaves, no_torch_function, wrapper
from swapper import OffloadError


class Backing(Protocol):
    """The engine's side of a handle: ``read`` gives a copy of the value in host memory, ``write`` takes a new one.

    ``gradient`` is what ``parameter.grad`` gives and takes.
    """

    name: str
    gradient: torch.Tensor | None

    def read(self) -> torch.Tensor: ...

    def write(self, value: torch.Tensor) -> None: ...


class _View:
    """A view of another backing's value: one output of ``function`` applied to it."""

    gradient: torch.Tensor | None = None

    def __init__(self, base: Backing, function: Callable[[torch.Tensor], Any], position: int | None) -> None:
        self.name = base.name
        self._base = base
        self._function = function
        self._position = position

    def _of(self, value: torch.Tensor) -> torch.Tensor:
        view = self._function(value)
        return view if self._position is None else view[self._position]  # type: ignore[no-any-return]

    def read(self) -> torch.Tensor:
        return self._of(self._base.read())

    def write(self, value: torch.Tensor) -> None:
        whole = self._base.read()
        self._of(whole).copy_(value)
        self._base.write(whole)


class Handle(torch.Tensor):
    """A tensor whose value rests in the engine. See the module's docstring; made by ``make_handle``."""

    _backing: Backing
    _meta: torch.Tensor

    @staticmethod
    def __new__(cls, backing: Backing, meta: torch.Tensor, device: torch.device) -> Handle:
        handle = wrapper(cls, meta, device)
        handle._backing = backing
        handle._meta = meta
        return handle  # type: ignore[no-any-return]

    def value(self) -> torch.Tensor:
        """The value now, as an ordinary tensor of the caller's own."""
        return self._backing.read().to(self.device)

    def value_on_host(self) -> torch.Tensor:
        """The same in host memory: what is larger than a device can be looked at there."""
        return self._backing.read()

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        returns = func._schema.returns
        aliases = bool(returns) and returns[0].alias_info is not None
        if aliases and not returns[0].alias_info.is_write:
            return _view(func, args, kwargs)
        values: dict[int, torch.Tensor] = {}

        def value_of(item: Any) -> Any:
            if not isinstance(item, Handle):
                return item
            return values.setdefault(id(item), item.value()) if id(item) not in values else values[id(item)]

        result = func(*map_leaves(value_of, args), **map_leaves(value_of, kwargs))
        written = [
            args[position] if position < len(args) else kwargs.get(argument.name)
            for position, argument in enumerate(func._schema.arguments)
            if argument.alias_info is not None and argument.alias_info.is_write
        ]
        handles = {id(item): item for item in _flatten(written) if isinstance(item, Handle)}
        for key, handle in handles.items():
            handle._backing.write(values[key])
        of_value = {id(values[key]): handle for key, handle in handles.items()}
        return map_leaves(lambda item: of_value.get(id(item), item), result)

    @property
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The gradient for the coming step, wherever it rests: a handle, or None."""
        return self._backing.gradient if isinstance(self, nn.Parameter) else None

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        self._backing.gradient = value

    def take_autograd_gradient(self, *, keep: bool = False) -> torch.Tensor | None:
        """What autograd has left here, which is here no longer, unless others ask for it, too (``keep``)."""
        gradient = autograd_gradient.__get__(self)
        if not keep:
            autograd_gradient.__set__(self, None)
        return gradient  # type: ignore[no-any-return]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The handle without its gradient's history, as for any tensor."""
        return self.detach()

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """The value is taken over; another dtype or shape would be another parameter, and is refused."""
        if value.dtype != self.dtype or value.shape != self.shape:
            raise ConfigError(
                f"parameter {self._backing.name} is {self.dtype} {tuple(self.shape)} and is held by the engine: it "
                f"cannot become {value.dtype} {tuple(value.shape)}. Convert the model first, or set precision=."
            )
        if value is not self:
            self._backing.write(_value_of(value.detach()))

    # What works on memory, not through operations.

    def numpy(self, *, force: bool = False) -> Any:
        return (self.value() if force else self._differentiable()).numpy()

    def tolist(self) -> Any:
        return self.value_on_host().tolist()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._differentiable().__array__(dtype)

    def __dlpack__(self, **options: Any) -> Any:
        return self._differentiable().__dlpack__(**options)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return repr(self._ordinary())

    def __format__(self, spec: str) -> str:
        return format(self._differentiable(), spec)

    def data_ptr(self) -> int:
        raise self._no_address()

    def untyped_storage(self) -> torch.UntypedStorage:
        raise self._no_address()

    def share_memory_(self) -> Any:
        raise self._no_address()

    def _no_address(self) -> OffloadError:
        return OffloadError(
            f"parameter {self._backing.name} has no address: it rests in the engine between uses. "
            "Take a copy: parameter.detach().clone()"
        )

    def _differentiable(self) -> torch.Tensor:
        """The value, refusing what a tensor that requires grad refuses."""
        return self.value().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An ordinary tensor (a ``Parameter`` if this is one): the copy is not the engine's."""
        if id(self) not in memo:
            memo[id(self)] = self._ordinary()
        return memo[id(self)]  # type: ignore[no-any-return]

    def __reduce_ex__(self, protocol: Any) -> Any:
        value = self.value_on_host()
        return (nn.Parameter(value, self.requires_grad) if isinstance(self, nn.Parameter) else value).__reduce_ex__(
            protocol
        )

    def _ordinary(self) -> torch.Tensor:
        value = self.value()
        if isinstance(self, nn.Parameter):
            return nn.Parameter(value, requires_grad=self.requires_grad)
        return value


def make_handle(
    backing: Backing,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
    kind: type[Handle] = Handle,
) -> nn.Parameter:
    """A parameter that rests in the engine."""
    meta = torch.empty(shape, dtype=dtype, device="meta")
    return nn.Parameter(kind(backing, meta, device), requires_grad=requires_grad)  # type: ignore[arg-type]


def _value_of(item: Any) -> Any:
    return item.value() if isinstance(item, Handle) else item


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """A view of a handle is a handle: what is written to it reaches the parameter."""
    base, *rest = args
    if not isinstance(base, Handle):
        return func(*map_leaves(_value_of, args), **map_leaves(_value_of, kwargs))
    if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        return type(base)(base._backing, base._meta, base.device)

    def function(value: torch.Tensor) -> Any:
        return func(value, *rest, **kwargs)

    outputs = function(base._meta)
    if isinstance(outputs, torch.Tensor):
        return Handle(_View(base._backing, function, None), outputs, base.device)
    views = [Handle(_View(base._backing, function, i), output, base.device) for i, output in enumerate(outputs)]
    return type(outputs)(views)


def _flatten(items: Any) -> list[Any]:
    flat: list[Any] = []
    for item in items:
        flat.extend(_flatten(item) if isinstance(item, (list, tuple)) else [item])
    return flat
