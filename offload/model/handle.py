"""The handle: what stands in the model for a parameter that is not in use.

It has the parameter's shape, dtype and device but no memory. An operation that reads it brings the value in; one that
mutates it writes the result back; a view of it is a handle on the same value. Inside a unit's forward the model holds
ordinary parameters instead, so nothing there pays for it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from multiprocessing.reduction import ForkingPickler
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import increment_version

from offload.errors import ConfigError
from offload.model.aliases import Alias
from offload.model.another_process import for_another_process
from offload.model.grad_call import CALLS
from offload.model.handle_backing import Backing, BackingOfParameter, Memory, View, check_gradient, check_value
from offload.model.leaves import Leaves, flatten
from offload.model.onlookers import add_onlooker, forget_onlooker, leave_onlookers
from offload.model.strides import say_strides
from offload.model.under_way import change, touch
from offload.model.written import refuse_receiving, wait_for_writes, written_by
from offload.torch_internals import (
    autograd_gradient,
    is_traced,
    itself,
    map_leaves,
    never_compiled,
    no_dispatch,
    no_torch_function,
    requires_grad,
    version,
    wrapper,
)
from swapper import OffloadError


class Handle(torch.Tensor):
    """A tensor whose value is stored in the engine. See the module's docstring; made by ``make_handle``."""

    _backing: Any
    """A ``Backing``, and of a parameter of the model a ``BackingOfParameter``."""
    _meta: torch.Tensor
    _leaves: Leaves | None = None
    """Hooks on it, once there are some."""
    _is_managed = False
    """It stands in the model for a parameter. Others are values that look into the engine, also as ``nn.Parameter``:
    leaves of their own."""
    _is_alias = False
    """It looks at another one's value (``p.data``, a view), and may look at other memory instead."""
    _kind: type[nn.Parameter] = nn.Parameter
    """The class of ordinary parameters that it stands for."""
    _tells_autograd = True
    """A change in place is one for graphs that have saved the value: not through ``.data``, as for any tensor."""

    @staticmethod
    def __new__(
        cls, backing: Backing, meta: torch.Tensor | None = None, device: torch.device | None = None, **other: Any
    ) -> Handle:
        if meta is None or device is None:  # libraries make ``type(parameter)(value, requires_grad=...)``
            raise ConfigError(
                "a parameter of this kind belongs to an OffloadEngine and is made by it alone: what moves a model "
                "between devices by itself (accelerate's cpu_offload and device_map) is not for a model in an engine"
            )
        handle = wrapper(cls, meta, device)
        handle._backing = backing
        handle._meta = meta
        return handle  # type: ignore[no-any-return]

    @property
    def backing(self) -> Backing:
        """The same for all handles on one value."""
        return self._backing  # type: ignore[no-any-return]

    def value(self) -> torch.Tensor:
        """The value now, as an ordinary tensor of the caller's own."""
        value: torch.Tensor = self._backing.read()
        if value.device == self.device:
            return value
        # a class around values may make an ordinary tensor of ``value.to``, if it is asked for it whole
        return torch.ops.aten._to_copy.default(value, device=self.device)  # type: ignore[no-any-return]

    def value_on_host(self) -> torch.Tensor:
        """The same in host memory: what is larger than a device can be looked at there."""
        return self._backing.read()  # type: ignore[no-any-return]

    def saved(self) -> torch.Tensor:
        """What a state dict holds of it, in host memory."""
        return self.value_on_host()

    @property
    def _version(self) -> int:  # type: ignore[override]
        """The number of changes, which is one for the parameter in its unit and outside."""
        in_use = self._backing.in_use if self._tells_autograd else ()
        with itself():
            return version.__get__(in_use[0] if in_use else self)  # type: ignore[no-any-return]

    @classmethod
    def __torch_function__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        call = CALLS.get(func)
        if func in _SEEKS_NODE and len(args) > 1 and args[0] is args[1] and args[0].requires_grad:
            raise ConfigError(
                f"parameter {args[0]._backing.name}: the node that accumulates its gradient is another in each use: "
                "hooks on it would not be called. Use parameter.register_post_accumulate_grad_hook(hook). A pipeline "
                "whose schedule splits backward (zero bubble) needs it: take one that does not, such as 1F1B."
            )
        if call is None:
            return no_torch_function(func, types, args, kwargs or {})
        with itself():
            return call(_in_graphs, *args, **kwargs or {})

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        kwargs = kwargs or {}
        returns = func._schema.returns
        aliases = bool(returns) and returns[0].alias_info is not None
        if aliases and not returns[0].alias_info.is_write:
            return _view(func, args, kwargs)
        if func is torch.ops.aten.set_.source_Tensor and args[0] is args[1]:  # torch's parametrizations do
            return args[0]
        if torch.Tag.inplace_view in func.tags and isinstance(args[0], Handle) and args[0]._is_alias:
            return _look_elsewhere(args[0], func, args[1:], kwargs)
        values: dict[int, torch.Tensor] = {}

        def brought_in(item: Any) -> Any:
            if not isinstance(item, Handle):
                return item
            return values.setdefault(id(item), item.value()) if id(item) not in values else values[id(item)]

        written = flatten(written_by(func, args, kwargs))
        handles = {id(item): item for item in written if isinstance(item, Handle)}
        for handle in handles.values():
            refuse_receiving(func, handle._backing.name)
        result = func(*map_leaves(brought_in, args), **map_leaves(brought_in, kwargs))
        if handles:
            wait_for_writes(func, result)
        for key, handle in handles.items():
            check_value(handle, values[key], handle._backing.name)
            handle._backing.write(values[key])
            if handle._tells_autograd:
                increment_version(handle._backing.in_use)
        of_value = {id(values[key]): handle for key, handle in handles.items()}
        return map_leaves(lambda item: of_value.get(id(item), item), result)

    @property
    @never_compiled
    def grad(self) -> torch.Tensor | None:  # type: ignore[override]
        """The gradient, wherever it is stored. Of what is no parameter of the model it is autograd's own."""
        if not self._is_managed:
            return autograd_gradient.__get__(self)  # type: ignore[no-any-return]
        touch("looks at gradients")
        return self._backing.gradient  # type: ignore[no-any-return]

    @grad.setter
    @never_compiled
    def grad(self, value: torch.Tensor | None) -> None:
        if not self._is_managed:
            autograd_gradient.__set__(self, value)
            return
        if value is not None:
            check_gradient(self, value)
        change("sets gradients")
        self._backing.gradient = value

    @property
    def gradient_so_far(self) -> torch.Tensor | None:
        """The same of a parameter, as far as it is known without a wait."""
        return self._backing.gradient_so_far if self._is_managed else None  # type: ignore[no-any-return]

    def take_autograd_gradient(self, *, keep: bool = False) -> torch.Tensor | None:
        """Take what autograd has left here, which is here no longer, unless others ask for it, too (``keep``)."""
        gradient = autograd_gradient.__get__(self)
        if not keep:
            autograd_gradient.__set__(self, None)
        return gradient  # type: ignore[no-any-return]

    @property
    def data(self) -> torch.Tensor:  # type: ignore[override]
        """The handle without its gradient's history, as for any tensor."""
        data = self.detach()
        data._tells_autograd = False  # type: ignore[attr-defined]
        return data

    @data.setter
    def data(self, value: torch.Tensor) -> None:
        """The value is taken over; another dtype or shape is refused. Who looks at the memory of before keeps it."""
        check_value(self, value, self._backing.name)
        if self._is_alias:
            self.look_at(value._backing if isinstance(value, Handle) else Memory(value.detach()))
            return
        if isinstance(value, Handle) and value._backing is self._backing:
            return
        in_use = value._backing.in_use if isinstance(value, Handle) else ()
        if isinstance(value, Handle) and in_use and in_use is not self._backing.in_use:
            raise ConfigError(
                f"{self._backing.name}.data = {value._backing.name}.data would make two parameters of one memory. To "
                "copy the value: parameter.data.copy_(other). To tie weights: do it before the engine is made."
            )
        if not self._is_managed:
            self._backing.write(value_of(value.detach()))
            return
        if not value.is_contiguous():
            say_strides({self._backing.name: value.stride()})
        leave_onlookers(self._backing)
        memory = Alias(value.data) if type(value) in (torch.Tensor, nn.Parameter) else None
        self._backing.point_to(memory, value_of(value.detach()))
        if isinstance(value, Handle) and value._is_alias:  # it and the parameter are one from now on
            value.look_at(self._backing)
            add_onlooker(value, self._backing)

    def look_at(self, backing: Backing) -> None:
        """Look at this from now on, and no longer at what a parameter has."""
        self._backing = backing
        self.__class__ = Handle

    @property
    def _is_param(self) -> bool:
        return bool(vars(self).get("_is_param"))

    @_is_param.setter
    def _is_param(self, value: bool) -> None:
        """It becomes a parameter: others look at what it has."""
        vars(self)["_is_param"] = value
        forget_onlooker(self, self._backing)

    @property
    def _fsdp_flattened(self) -> bool:
        return False

    @_fsdp_flattened.setter
    def _fsdp_flattened(self, value: bool) -> None:
        """FSDP has copied it into a parameter of its own, which the model is to compute with from now on."""
        raise ConfigError(
            f"FullyShardedDataParallel takes over parameter {self._backing.name}, which an engine holds: the engine "
            "shards a model by itself in each process that torchrun starts. Give it the model without FSDP."
        )

    # What the ordinary parameters in its place must take over.

    @property
    def requires_grad(self) -> bool:  # type: ignore[override]
        """As for any parameter. One that was frozen when the engine was made stays so: it has no optimizer states."""
        return requires_grad.__get__(self)  # type: ignore[no-any-return]

    @requires_grad.setter
    def requires_grad(self, value: bool) -> None:
        if value and self._is_managed and not self._backing.trainable:
            raise ConfigError(
                f"parameter {self._backing.name} was not to be trained when the engine was made, so that there is no "
                "room for its gradient and states. Make the engine while it requires grad, and freeze it then."
            )
        if self._is_managed and value != self.requires_grad:
            touch("freezes or thaws parameters")
        requires_grad.__set__(self, value)
        with itself():
            for parameter in self._backing.in_use if self._is_managed else ():
                parameter.requires_grad = value

    def requires_grad_(self, requires_grad: bool = True) -> Handle:  # type: ignore[override]
        self.requires_grad = requires_grad
        return self

    def register_hook(self, hook: Callable[[torch.Tensor], Any]) -> Any:
        """As for any tensor. Raises ``ConfigError`` for a weight that is used in pieces."""
        leaves = self._hooked("register_hook")
        return super().register_hook(hook) if leaves is None else leaves.register_hook(hook)  # type: ignore[no-untyped-call]

    def register_post_accumulate_grad_hook(self, hook: Callable[[torch.Tensor], None]) -> Any:
        """As for any parameter: ``hook`` gets this one. Raises ``ConfigError`` for a weight that is used in pieces."""
        leaves = self._hooked("register_post_accumulate_grad_hook")
        return (super().register_post_accumulate_grad_hook if leaves is None else leaves.register_post_hook)(hook)

    def _hooked(self, what: str) -> Leaves | None:
        """The tensor that hooks on a parameter of the model go to."""
        touch("adds hooks to parameters")
        if self._leaves is None and self._is_managed:
            self._leaves = Leaves([self, *self._whole_in_use(what)])
        return self._leaves

    def _whole_in_use(self, what: str) -> Sequence[nn.Parameter]:
        parameters: Sequence[nn.Parameter] = self._backing.in_use if self._is_managed else ()
        if len(parameters) > 1:
            raise ConfigError(
                f"parameter {self._backing.name} is used in {len(parameters)} pieces, and its gradient comes in as "
                f"many: {what} would not see it whole. Call backward(), and look at or change parameter.grad."
            )
        return parameters

    # What works on memory, not through operations. Arrays are copies: one that is written to would be lost.

    def apply_(self, function: Callable[[Any], Any]) -> Handle:  # type: ignore[override]
        return self._changed(lambda value: value.apply_(function))

    def map_(self, tensor: torch.Tensor, function: Callable[[Any, Any], Any]) -> Handle:  # type: ignore[override]
        return self._changed(lambda value: value.map_(value_of(tensor), function))

    def map2_(self, x: torch.Tensor, y: torch.Tensor, function: Callable[[Any, Any, Any], Any]) -> Handle:  # type: ignore[override]
        return self._changed(lambda value: value.map2_(value_of(x), value_of(y), function))

    def _changed(self, change: Callable[[torch.Tensor], Any]) -> Handle:
        value = self._differentiable()
        change(value)
        with torch.no_grad():
            return self.copy_(value)  # type: ignore[return-value]

    def numpy(self, *, force: bool = False) -> Any:
        array = (self.value() if force else self._differentiable()).numpy()
        array.flags.writeable = False
        return array

    def tolist(self) -> Any:
        return self.value_on_host().tolist()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        array = self._differentiable().__array__(dtype)
        array.flags.writeable = False
        return array

    def __dlpack__(self, **options: Any) -> Any:
        raise self._no_address()

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        text = repr(self.ordinary())
        node = self.grad_fn
        return text if node is None else f"{text[:-1]}, grad_fn=<{type(node).__name__}>)"

    def __format__(self, spec: str) -> str:
        return format(self.ordinary(), spec)

    def data_ptr(self) -> int:
        return self._with_address().data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        if is_traced():  # the compiler describes the gradients of the parameters that a graph takes
            return self._meta.untyped_storage()
        storage = self._with_address().untyped_storage()
        storage.resize_ = partial(_refuse_resizing, self._backing.name)  # type: ignore[assignment]
        return storage

    def _with_address(self) -> torch.Tensor:
        """The value in memory that stays the same as it (see ``aliases``)."""
        found: torch.Tensor | None = None if is_traced() else self._backing.with_address()
        if found is None:
            raise self._no_address()
        return found

    def share_memory_(self) -> Any:
        raise self._no_address()

    def _no_address(self) -> OffloadError:
        return OffloadError(
            f"parameter {self._backing.name} has no address: it is stored in the engine between uses. "
            "Take a copy: parameter.detach().clone()"
        )

    def _differentiable(self) -> torch.Tensor:
        """The value, refusing what a tensor that requires grad refuses."""
        return self.value().requires_grad_(self.requires_grad)

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.Tensor:
        """An ordinary tensor (a ``Parameter`` if this is one): the copy is not the engine's."""
        if id(self) not in memo:
            memo[id(self)] = self.ordinary()
        return memo[id(self)]  # type: ignore[no-any-return]

    def __copy__(self) -> torch.Tensor:
        """Another tensor over the same value, as in torch: a leaf of its own."""
        if isinstance(self, nn.Parameter):
            return nn.Parameter(self, self.requires_grad)
        return self.detach().requires_grad_(self.requires_grad)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        ForkingPickler.register(cls, for_another_process)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._as_ordinary(self.value_on_host()).__reduce_ex__(protocol)

    def ordinary(self) -> torch.Tensor:
        """The value as an ordinary tensor, a parameter if this is one."""
        return self._as_ordinary(self.value())

    def _as_ordinary(self, value: torch.Tensor) -> torch.Tensor:
        if not isinstance(self, nn.Parameter):
            return value
        parameter = nn.Parameter(value, requires_grad=self.requires_grad)
        parameter.__class__ = self._kind
        return parameter

    def become_kind(self, kind: type[nn.Parameter]) -> None:
        """Be a parameter of a user's own class, too."""
        self.__class__ = type(kind.__name__, (type(self), kind), {"_kind": kind})

    def attributes(self) -> dict[str, Any]:
        """Attributes that others have hung on it."""
        return {name: value for name, value in vars(self).items() if name not in _OF_HANDLES}


ForkingPickler.register(Handle, for_another_process)

_OF_HANDLES = {"_backing", "_meta", "_tells_autograd", "_is_param", "_is_managed", "_is_alias", "_leaves"}
"""The attributes of handles' own."""

_SEEKS_NODE = (torch.Tensor.view_as, torch.Tensor.expand_as)
"""With the tensor itself as the other one, they serve to find its node in the graph."""


def _in_graphs(item: Any) -> list[Any]:
    """Return what stands for a parameter in graphs: the one in its unit's window, and where no unit was in use the
    handle.

    Raises ``ConfigError`` for a weight in pieces, whose uses are leaves of their own.
    """
    if not isinstance(item, Handle):
        return [item]
    return [item, *item._whole_in_use("torch.autograd.grad")]


def make_handle(
    backing: BackingOfParameter,
    shape: torch.Size,
    dtype: torch.dtype,
    device: torch.device,
    requires_grad: bool,
    kind: type[Handle] = Handle,
) -> nn.Parameter:
    """A parameter that is stored in the engine."""
    meta = torch.empty(shape, dtype=dtype, device="meta")
    handle = kind(backing, meta, device)
    with itself():
        handle.requires_grad_(requires_grad)
    handle._is_param, handle._is_managed = True, True  # not by nn.Parameter(...), which makes a second one of it
    return handle  # type: ignore[return-value]


def value_of(item: Any) -> Any:
    """An ordinary tensor for a handle; everything else as it is."""
    return item.value() if isinstance(item, Handle) else item


def _refuse_resizing(name: str, nbytes: int) -> None:
    raise OffloadError(
        f"parameter {name} is stored in the engine, and what is at its address is the same as there: it cannot be "
        "resized. Resize a copy: parameter.detach().clone()"
    )


def _view(func: Any, args: Any, kwargs: Any) -> Any:
    """A view of a handle is a handle: what is written to it reaches the parameter."""
    base, *rest = args
    if not isinstance(base, Handle):
        return func(*map_leaves(value_of, args), **map_leaves(value_of, kwargs))
    if func in (torch.ops.aten.detach.default, torch.ops.aten.alias.default):
        return _like(base, type(base)(base._backing, base._meta, base.device))

    def function(value: torch.Tensor) -> Any:
        return func(value, *rest, **kwargs)

    outputs = function(base._meta)
    if isinstance(outputs, torch.Tensor):
        return _like(base, Handle(View(base._backing, function, None), outputs, base.device))
    views = [Handle(View(base._backing, function, i), output, base.device) for i, output in enumerate(outputs)]
    return type(outputs)(_like(base, view) for view in views)


def _look_elsewhere(handle: Handle, func: Any, rest: Sequence[Any], kwargs: Any) -> Handle:
    """``w.t_()``, ``w.set_(other)``: the handle looks at memory in another way, and no memory changes."""

    def function(value: torch.Tensor) -> torch.Tensor:
        return func(value.detach(), *rest, **kwargs)  # type: ignore[no-any-return]

    backing: Backing
    if func.overloadpacket is not torch.ops.aten.set_:
        backing, meta = View(handle._backing, function, None), function(handle._meta)
        if meta.numel() > handle._meta.numel():
            raise ConfigError(f"parameter {backing.name} is held by the engine: it cannot become {tuple(meta.shape)}")
    elif rest and isinstance(rest[0], Handle):
        backing, meta = rest[0]._backing, func(handle._meta.detach(), rest[0]._meta, *rest[1:], **kwargs)
    else:
        own = function(torch.empty(0, dtype=handle.dtype, device=handle.device))
        backing, meta = Memory(own), torch.empty_strided(own.shape, own.stride(), dtype=own.dtype, device="meta")
    with no_dispatch():
        func(handle, *rest, **kwargs)
    handle._meta = meta
    handle.look_at(backing)
    return handle


def _like(base: Handle, view: Handle) -> Handle:
    view._tells_autograd = base._tells_autograd
    view._is_alias = True
    add_onlooker(view, view._backing)
    return view
