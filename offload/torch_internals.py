"""Everything private of torch that the engine stands on, in one place, tried before it is trusted. What ranks need of
``torch.distributed`` is in ``ranks/torch_distributed.py``, of ``torch.compile`` in ``model/outside_of_graphs.py``, of
TorchScript in ``model/scripted.py``.

``check`` runs each once, before the first engine is made. What has no fallback raises ``TorchUnsupported`` with torch's
version, instead of a wrong number or a crash later on.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from functools import cache, partial, wraps
from inspect import signature
from itertools import product
from operator import is_, methodcaller
from types import FrameType, FunctionType
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.autograd.graph import Node
from torch.multiprocessing import reductions
from torch.utils import _mode_utils, _python_dispatch, _pytree
from torch.utils._device import DeviceContext
from torch.utils.hooks import RemovableHandle

from offload.errors import OLDEST_TORCH, TorchUnsupported


def _unsupported(name: str, what: str) -> TorchUnsupported:
    return TorchUnsupported(
        f"torch {torch.__version__} lacks {name}, or has changed it: {what}. Use a release of torch >= {OLDEST_TORCH} "
        "that this version of the engine knows, or a newer engine."
    )


def found(owner: Any, name: str) -> Any:
    """Return what torch has under this name. Raises ``TorchUnsupported``."""
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise _unsupported(name, str(error)) from error


map_leaves: Callable[[Callable[[Any], Any], Any], Any] = found(_pytree, "tree_map")
"""Replace each leaf of nested containers."""

leaves_of: Callable[[Any], list[Any]] = found(_pytree, "tree_leaves")
"""The leaves of nested containers."""

_flattened: Callable[..., tuple[list[Any], Any]] = found(_pytree, "tree_flatten")
_unflattened: Callable[[list[Any], Any], Any] = found(_pytree, "tree_unflatten")


def taken_apart(item: Any) -> tuple[list[Any], Any]:
    """The leaves of nested containers, and what ``put_together`` makes the containers of."""
    return _flattened(item)  # type: ignore[no-any-return]


def put_together(leaves: list[Any], structure: Any) -> Any:
    """The containers that were taken apart, with these leaves."""
    return _unflattened(leaves, structure)


def replace_leaves(function: Callable[[Any], Any], item: Any) -> Any:
    """As ``map_leaves``, with each container in which no leaf becomes another object kept as it is."""
    top = id(item)  # what looks for leaves is part of a cycle, which would keep the item itself until it is collected
    children, structure = _flattened(item, is_leaf=lambda part: id(part) != top)
    if len(children) == 1 and children[0] is item:
        return function(item)
    replaced = [replace_leaves(function, child) for child in children]
    if all(map(is_, replaced, children)):
        return item
    return _unflattened(replaced, structure)


graph_task: Callable[[], int] = found(torch._C, "_current_graph_task_id")
"""The number of the backward that this thread is in; -1 outside of all."""

next_sequence_number: Callable[[], int] = found(torch._C._autograd, "_get_sequence_nr")
"""The number that the next autograd node of this thread gets."""

sequence_number: Callable[[Node], int] = methodcaller("_sequence_nr")
"""The number that an autograd node got when it was made, by the count of the thread that made it."""

current_node: Callable[[], Node | None] = found(torch._C, "_current_autograd_node")
"""The node that the backward of this thread runs now."""

belongs_to_backward: Callable[[Node], bool] = found(torch._C, "_will_engine_execute_node")
"""Tell whether a node, not the one that it began with, is part of the backward that this thread is in. It must be in
one."""


def others_listen() -> bool:
    """Something sees, or changes, the operations of this thread: a mode (the default device is none), hooks of saved
    tensors, a transform of ``torch.func``."""
    return (
        not all(isinstance(mode, DeviceContext) for mode in (*function_modes(), *dispatch_modes()))
        or top_saved_tensors_hooks() is not None
        or transforms() is not None
    )


_no_dispatch_modes: Callable[[], AbstractContextManager[Any]] = found(_python_dispatch, "_disable_current_modes")
_pop_function_mode: Callable[[], Any] = found(torch.overrides, "_pop_mode")
_push_function_mode: Callable[[Any], None] = found(torch.overrides, "_push_mode")


@contextmanager
def unseen() -> Iterator[None]:
    """Within, no mode sees the operations of this thread, and there is no default device."""
    modes = [_pop_function_mode() for _ in range(num_function_modes())]
    try:
        with _no_dispatch_modes():
            yield
    finally:
        for mode in reversed(modes):
            _push_function_mode(mode)


function_modes: Callable[[], list[Any]] = found(torch.overrides, "_get_current_function_mode_stack")
dispatch_modes: Callable[[], list[Any]] = found(_python_dispatch, "_get_current_dispatch_mode_stack")
without_function_mode: Callable[[], AbstractContextManager[Any]] = found(torch.overrides, "_pop_mode_temporarily")
"""Within, the last one entered sees nothing."""
without_dispatch_mode: Callable[[], AbstractContextManager[Any]] = found(_python_dispatch, "_pop_mode_temporarily")
transforms: Callable[[], Any] = found(torch._C._functorch, "peek_interpreter_stack")
"""The transform of ``torch.func`` that is under way, or None. Its tensors have no memory, and end with it."""

HOOKS_OF_ALL_FORWARDS: tuple[dict[int, Any], ...] = (
    found(torch.nn.modules.module, "_global_forward_pre_hooks"),
    found(torch.nn.modules.module, "_global_forward_hooks"),
)
"""Those of ``register_module_forward_hook`` and its like, by their numbers."""

num_function_modes: Callable[[], int] = found(torch._C, "_len_torch_function_stack")
"""The number of ``TorchFunctionMode`` that see the calls of this thread, with the default device."""
num_listening_modes: Callable[[], int] = found(torch._C, "_len_torch_dispatch_stack")
"""The number of ``TorchDispatchMode`` that see the operations of this thread."""

SavedTensorsHooks: TypeAlias = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]
"""Functions that pack a tensor that autograd saves, and unpack it."""

_top_hooks: Callable[[bool], Any] = found(torch._C._autograd, "_top_saved_tensors_default_hooks")
_push_hooks: Callable[..., None] = found(torch._C._autograd, "_push_saved_tensors_default_hooks")
_hooks_are_enabled: Callable[[], bool] = found(torch._C._autograd, "_saved_tensors_hooks_is_enabled")
_pop_hooks: Callable[[], None] = found(torch._C._autograd, "_pop_saved_tensors_default_hooks")


def top_saved_tensors_hooks() -> SavedTensorsHooks | None:
    """Return the hooks that see what autograd saves in this thread. Those of blocks that are over are taken out: torch
    leaves them where Ctrl-C strikes the end of a block, a checkpoint's it may be, and all that comes would be saved
    there."""
    while (top := _top_hooks(False)) is not None and _is_block_over(top):
        _pop_hooks()
    return top  # type: ignore[no-any-return]


def _is_block_over(hooks: SavedTensorsHooks) -> bool:
    """Nothing but torch's stack and this pair refer to the first one. A block has its hooks until it ends. Methods may
    be made for the stack alone, by an object that the block has."""
    return isinstance(hooks[0], FunctionType) and sys.getrefcount(hooks[0]) == _IN_PAIR + 1


_pair = (lambda: None), (lambda: None)
_IN_PAIR = sys.getrefcount(_pair[0])
"""References to what is in a pair alone."""


def push_saved_tensors_hooks(hooks: SavedTensorsHooks) -> None:
    """Have these see it from now on. A transform of ``torch.func`` that is under way suffers none."""
    if _hooks_are_enabled():
        _push_hooks(*hooks)


def take_out_saved_tensors_hooks(hooks: SavedTensorsHooks, below: SavedTensorsHooks | None) -> None:
    """Take out these, which were put above ``below``. Nothing may be there in their place: a block of the user's that
    an interrupt has ended takes out what is on top. Then what was left is taken out, ``below``."""
    above: list[SavedTensorsHooks] = []
    while (top := _top_hooks(True)) is not None:
        _pop_hooks()
        if top[0] is hooks[0]:
            break
        above.append(top)
    else:
        first = next((index for index, pair in enumerate(above) if below is not None and pair[0] is below[0]), None)
        if first is not None:
            del above[first]
    for pair in reversed(above):
        _push_hooks(*pair)


@cache
def hooks_step_aside() -> None:
    """Transforms of ``torch.func`` refuse to run under hooks of saved tensors. Those whose ``pack`` has the attribute
    ``steps_aside`` are taken out for as long as one runs."""
    disabled = found(torch.autograd.graph, "disable_saved_tensors_hooks")

    @contextmanager
    def disable_saved_tensors_hooks(error_message: str) -> Iterator[None]:
        aside: list[SavedTensorsHooks] = []
        while (top := _top_hooks(True)) is not None and getattr(top[0], "steps_aside", False):
            _pop_hooks()
            aside.append(top)
        try:
            with disabled(error_message):
                yield
        finally:
            for pair in reversed(aside):
                _push_hooks(*pair)

    torch.autograd.graph.disable_saved_tensors_hooks = disable_saved_tensors_hooks


@cache
def backward_asks_its_inputs() -> None:
    """``torch.autograd.backward`` asks its ``inputs`` for their ``__torch_function__``. It does not in torch 2.8, and
    in 2.11 what is asked gets an iterator of them that is used up."""
    backward = torch.autograd.backward
    call: Callable[..., None] = backward  # as which it takes iterators, too
    if _is_asked(lambda asked: call(torch.zeros(1, requires_grad=True), inputs=iter([asked]))):
        return
    parameters = signature(backward)

    @wraps(backward)
    def asking(*args: Any, **kwargs: Any) -> Any:
        given = parameters.bind(*args, **kwargs).arguments
        inputs = given.get("inputs", ())
        if isinstance(inputs, Iterator):
            inputs = given["inputs"] = tuple(inputs)
        asked = tuple(filter(torch.overrides.is_tensor_like, leaves_of(inputs)))
        if torch.overrides.has_torch_function(asked):
            return torch.overrides.handle_torch_function(backward, asked, **given)
        return backward(**given)

    torch.autograd.backward = asking


def _is_asked(call: Callable[[torch.Tensor], object]) -> bool:
    """The tensor that the call is given is asked for its ``__torch_function__``, and finds itself among the inputs."""
    is_asked = False

    class Asked(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> None:  # type: ignore[override]
            nonlocal is_asked
            is_asked |= bool(list((kwargs or {}).get("inputs", ())))

    with suppress(RuntimeError):  # a program's own function may call torch's twice, and the inputs are used up
        call(torch.zeros(1, requires_grad=True).as_subclass(Asked))
    return is_asked


def top_hooks_step_aside() -> None:
    """Have the hooks on top, of a checkpoint of the engine's own, step aside, too."""
    top = top_saved_tensors_hooks()
    if top is not None:
        top[0].steps_aside = True  # type: ignore[attr-defined]


Setting: TypeAlias = tuple[Callable[[], Any], Callable[[Any], object]]
"""How one is read and set."""


def _fp32_precisions() -> Iterator[Setting]:
    for of in [("generic", "all"), *product(("mkldnn", "cuda"), ("all", "matmul", "conv", "rnn"))]:
        try:
            get, put = torch._C._get_fp32_precision_getter, torch._C._set_fp32_precision_setter
            get(*of)
        except (AttributeError, RuntimeError):  # before torch 2.9
            continue
        yield partial(get, *of), partial(put, *of)


FP32_PRECISIONS = tuple(_fp32_precisions())
"""Formats that fp32 is rounded to within operations of a library, those that others follow first."""

TORCH_FUNCTIONS: Setting = (
    torch._C._get_torch_function_state,  # type: ignore[attr-defined]
    torch._C._set_torch_function_state,  # type: ignore[attr-defined]
)
"""Whether classes of tensors are asked for their ``__torch_function__`` in this thread."""

KERNEL_FLAGS: tuple[Setting, ...] = tuple(
    (getattr(torch._C, f"_get_{name}"), getattr(torch._C, f"_set_{name}"))
    for name in (
        "mkldnn_enabled",
        "mkldnn_deterministic",
        "nnpack_enabled",
        "cudnn_enabled",
        "cudnn_benchmark",
        "cudnn_deterministic",
        "cublas_allow_fp16_accumulation",
        "cpu_allow_fp16_reduced_precision_reduction",
        "math_sdp_allow_fp16_bf16_reduction",
    )
    if hasattr(torch._C, f"_get_{name}") and hasattr(torch._C, f"_set_{name}")
)
"""Flags of libraries. ``torch.backends`` reads them more slowly, and refuses to set them once flags are frozen."""

_tracing: Callable[[], Any] = found(torch._guards.TracingContext, "try_get")


def is_traced() -> bool:
    """The compiler is at work in this thread, and looks at what a graph will take."""
    return _tracing() is not None


never_compiled: Callable[[Any], Any] = found(torch, "_disable_dynamo")
"""Keeps a function out of what ``torch.compile`` makes of its callers."""


def same_number(first: RemovableHandle | None, register: Callable[[], RemovableHandle]) -> RemovableHandle:
    """Have a hook registered under the number of ``first``, which is in another module; None: under a new one.

    What ``torch.compile`` makes of a module depends on the numbers of the hooks in it: two that differ in nothing else
    would be compiled twice, and after eight it gives up.
    """
    following = RemovableHandle.next_id
    if first is not None:
        RemovableHandle.next_id = first.id
    try:
        return register()
    finally:
        if first is not None:
            RemovableHandle.next_id = following


def when_backward_ends(call: Callable[[], None]) -> None:
    """Have ``call`` made at the end of the backward that this thread is in."""
    torch.autograd.Variable._execution_engine.queue_callback(call)  # type: ignore[attr-defined]


def keeps_version(tensor: torch.Tensor) -> AbstractContextManager[None]:
    """Changes of ``tensor`` within are none for autograd."""
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    return _unsafe_preserve_version_counter(tensor)


swap_memory: Callable[[torch.UntypedStorage, torch.UntypedStorage], None] = getattr(
    torch.UntypedStorage, "_swap_data_ptr_", lambda left, right: None
)
"""Exchange what two storages look out on. Where ``can_swap_memory`` says so: torch >= 2.13."""


exchange_tensors: Callable[[torch.Tensor, torch.Tensor], None] = found(torch._C, "_swap_tensor_impl")
"""Have each of two objects be the tensor in C++ that the other was."""

num_owners: Callable[[int], int] = found(torch._C, "_storage_Use_Count")
"""The number of owners of a storage, by its ``_cdata``: tensors over it, in Python or in C++, and arrays of these."""


_num_owners_in_cpp: Callable[[torch.Tensor], int] = found(torch._C.TensorBase, "_use_count")
_probe = torch.zeros(1, device="cpu", requires_grad=True)
_before, _graph = sys.getrefcount(_probe), _probe * 2
_OF_TORCH = sys.getrefcount(_probe) - _before


def num_references(tensors: Sequence[torch.Tensor]) -> int:
    """References to them in Python, but for torch's own to what C++ has, too (a graph): since 2.10 there is one."""
    return sum(map(sys.getrefcount, tensors)) - sum(map((1).__lt__, map(_num_owners_in_cpp, tensors))) * _OF_TORCH


StorageReference: Any = found(reductions, "StorageWeakRef")
"""Weak reference to a storage: ``expired()`` says whether it is gone. Its ``_cdata`` is nobody else's until then."""


def storage_of(reference: Any) -> torch.UntypedStorage | None:
    """The storage of a weak reference, if it is there still."""
    return torch.UntypedStorage._new_with_weak_ptr(reference.cdata)  # type: ignore[attr-defined, no-any-return]


@cache
def can_swap_memory() -> bool:
    """``swap_memory`` works: views see the other memory."""
    try:
        left, right = torch.zeros(4), torch.ones(4)
        view = left.view(2, 2).t()
        found(torch.UntypedStorage, "_swap_data_ptr_")
        swap_memory(left.untyped_storage(), right.untyped_storage())
        return bool((view == 1).all()) and bool((right == 0).all())
    except (AttributeError, RuntimeError, TypeError, TorchUnsupported):
        return False


_inference: Callable[[bool], AbstractContextManager[None]] = found(torch._C, "_InferenceMode")


def wrapper(cls: type[torch.Tensor], meta: torch.Tensor, device: torch.device) -> Any:
    """A tensor of class ``cls`` with the shape and dtype of ``meta``, on ``device``, and no memory: what would write
    there without an operation (``to_dlpack``) raises ``RuntimeError``. It is no inference tensor, wherever it is made:
    no view of an ordinary tensor is."""
    with _inference(False):  # not torch's own, which Ctrl-C can leave to end at any later time, and change modes then
        tensor = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            meta.shape,
            strides=meta.stride(),
            storage_offset=meta.storage_offset(),
            dtype=meta.dtype,
            device=device,
        )
    _has_no_memory(tensor)
    return tensor


_has_no_memory: Callable[[torch.Tensor], None] = found(torch._C, "_set_throw_on_mutable_data_ptr")

no_dispatch: Callable[[], AbstractContextManager[None]] = found(_mode_utils, "no_dispatch")
"""Operations within work on the tensors of a class themselves, and do not reach ``__torch_dispatch__``."""


itself: Callable[[], AbstractContextManager[None]] = found(torch._C, "DisableTorchFunctionSubclass")
"""Within, operations and attributes are those of the tensors themselves, and pass by ``__torch_function__``."""

no_torch_function: Any = found(torch._C, "_disabled_torch_function_impl")
"""``__torch_function__`` of a class whose operations are to reach ``__torch_dispatch__`` unchanged."""

data: Any = found(torch._C.TensorBase, "data")
"""Descriptor of what a tensor looks at, under the property of the same name."""

autograd_gradient: Any = found(torch.Tensor, "grad")
"""Descriptor where autograd puts gradients, under the property of the same name."""

version: Any = found(torch.Tensor, "_version")
"""Descriptor of the number of changes in place, under the property of the same name."""

requires_grad: Any = found(torch.Tensor, "requires_grad")
"""Descriptor that says whether autograd makes a gradient, under the property of the same name."""


@cache
def check() -> None:
    """Try everything above that has no fallback. Raises ``TorchUnsupported`` for the first that does not work."""
    for name, trial in _TRIALS.items():
        try:
            works = trial()
        except Exception as error:
            raise _unsupported(name, repr(error)) from error
        if not works:
            raise _unsupported(name, "it gave something else than expected")


def _try_sequence_numbers() -> bool:
    before = next_sequence_number()
    node = (torch.ones(1, requires_grad=True) * 2).grad_fn
    after = next_sequence_number()
    return node is not None and before <= sequence_number(node) < after


def _go_backward(result: torch.Tensor) -> None:
    """As ``result.backward()``, in whose place a program may have put something of its own."""
    roots, gradients = (result,), (torch.ones_like(result),)
    torch.autograd.Variable._execution_engine.run_backward(  # type: ignore[attr-defined]
        roots, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
    )


def _try_graph_tasks() -> bool:
    seen: list[str] = []
    leaf = torch.ones(1, requires_grad=True)
    result = leaf * 2
    node = result.grad_fn
    if node is None:
        return False

    def hook(gradients: Any) -> None:
        with torch.enable_grad():
            other = (leaf * 2).grad_fn
        is_part = other is not None and belongs_to_backward(node) and not belongs_to_backward(other)
        is_current = current_node() is node
        seen.append("in a backward" if graph_task() >= 0 and is_part and is_current else "in none")
        when_backward_ends(lambda: seen.append("its end"))

    node.register_prehook(hook)
    leaf.register_post_accumulate_grad_hook(lambda _: seen.append("a gradient"))
    _go_backward(result.sum())
    return seen == ["in a backward", "a gradient", "its end"] and graph_task() == -1


def _try_listeners() -> bool:
    with torch.device("cpu"):
        before = others_listen()
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
        return others_listen() and not before


def _try_saved_tensors() -> bool:
    hooks = (lambda tensor: (tensor.detach(), 3), lambda packed: packed[0] * packed[1])
    leaf = torch.ones(1, requires_grad=True)
    push_saved_tensors_hooks(hooks)
    is_on_top = top_saved_tensors_hooks() == hooks
    result = leaf * leaf
    _push_hooks(lambda tensor: tensor, lambda packed: packed)  # of no block
    is_on_top &= top_saved_tensors_hooks() == hooks
    take_out_saved_tensors_hooks(hooks, None)
    (gradient,) = torch.autograd.grad(result, leaf)
    return is_on_top and top_saved_tensors_hooks() is None and bool(gradient == 6)


def _try_counts() -> bool:
    weight = nn.Parameter(torch.ones(2, dtype=torch.float32))
    storage = weight.untyped_storage()._cdata
    before = num_owners(storage)
    _go_backward((weight * 2).sum())
    weight.grad = None
    after = num_owners(storage)
    view = weight.detach()
    with_view = num_owners(storage)
    array = view.numpy()
    del view
    return before == after and with_view == num_owners(storage) == before + 1 and array is not None


def _try_storage_references() -> bool:
    tensor = torch.zeros(1)
    reference, storage = StorageReference(tensor.untyped_storage()), tensor.untyped_storage()._cdata
    found = storage_of(reference)
    is_there = not reference.expired() and found is not None and found._cdata == storage
    del tensor, found
    return is_there and reference.expired() and storage_of(reference) is None


def _try_witness() -> bool:
    tensor = torch.zeros(2)
    witness = tensor[1:].detach()
    witness.data = torch.empty(0)
    tensor.add_(1)
    return witness._version == tensor._version == 1 and witness.untyped_storage().nbytes() == 0


def _try_version_counter() -> bool:
    tensor = torch.zeros(1)
    before = tensor._version
    with torch.no_grad(), keeps_version(tensor):
        tensor.add_(1)
    return tensor._version == before and bool(tensor == 1)


def _try_containers() -> bool:
    nested = {"a": [1, (2,)]}
    replaced = replace_leaves(lambda leaf: leaf * 3, [[0], nested["a"]])
    are_walked = leaves_of(nested) == [1, 2] and map_leaves(lambda leaf: leaf + 1, nested) == {"a": [2, (3,)]}
    return are_walked and replaced == [[0], [3, (6,)]] and replace_leaves(lambda leaf: leaf, nested) is nested


class _Probe(torch.Tensor):
    """A wrapper whose value is one, as ``Handle`` is."""

    __torch_function__ = no_torch_function

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func is torch.ops.aten.detach.default:
            return wrapper(cls, torch.empty(args[0].shape, device="meta"), torch.device("cpu"))
        return func(*map_leaves(lambda item: torch.ones(2) if isinstance(item, _Probe) else item, args), **kwargs or {})


def _try_wrapper() -> bool:
    probe = nn.Parameter(wrapper(_Probe, torch.empty(2, device="meta"), torch.device("cpu")))
    _go_backward((result := probe * 3).sum())
    return bool(result.tolist() == [3.0, 3.0] == autograd_gradient.__get__(probe).tolist())


_TRIALS: dict[str, Callable[[], bool]] = {
    "the sequence numbers of autograd's nodes": _try_sequence_numbers,
    "the numbers and callbacks of a backward": _try_graph_tasks,
    "modes and hooks of saved tensors": _try_listeners,
    "the stack of hooks of saved tensors": _try_saved_tensors,
    "the counts of who looks at a tensor's memory": _try_counts,
    "weak references to storages": _try_storage_references,
    "versions without memory": _try_witness,
    "changes that keep a tensor's version": _try_version_counter,
    "torch.utils._pytree": _try_containers,
    "wrapper subclasses of Tensor": _try_wrapper,
}


def in_module_call() -> bool:
    """A module runs in this thread. Hooks do not tell: one that an interrupt ends calls none after its forward."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_code is _MODULE_CALL:
            return True
        frame = frame.f_back
    return False


def num_calls_of(module: nn.Module) -> int:
    """As many calls of the module run in this thread, one within the other."""
    frame: FrameType | None = sys._getframe()
    found = 0
    while frame is not None:
        found += frame.f_code is _MODULE_CALL and frame.f_locals["self"] is module
        frame = frame.f_back
    return found


_MODULE_CALL = nn.Module._call_impl.__code__
