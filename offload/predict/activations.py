"""Bytes that autograd keeps of a model's blocks for backward: counted by following its forward without memory."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Iterator, Mapping, Set
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

_ESTIMATE = 34
"""16-bit bytes for each token and unit of width, where a forward cannot be followed. Source: Korthikanti et al.,
arXiv:2205.05198, section 4."""


@dataclass(frozen=True)
class Kept:
    """Bytes kept for one sequence: of all ``blocks`` together, of the ``largest``, of the ``inputs`` of them all, of
    the inputs of the one that has most (``input``), and ``around`` the blocks. ``reason`` says why they are an
    estimate; empty: they were counted."""

    blocks: int
    largest: int
    inputs: int
    input: int
    around: int = 0
    reason: str = ""

    def nbytes(self, batch: int, *, recomputed: bool) -> int:
        """Of a batch, where nothing leaves; of recomputed blocks the inputs, and one block at a time."""
        return batch * (self.around + (self.inputs + self.largest if recomputed else self.blocks))


@functools.lru_cache(maxsize=8)
def blocks_of(module: nn.Module) -> list[nn.Module]:
    """Return the repeated blocks of a model: of the list of modules that has most parameters those of the class that is
    there most often. Empty if there is no such list."""
    lists = [child for child in module.modules() if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child)]
    found: list[nn.Module] = []
    most = 0
    for children in lists:
        kind, count = Counter(type(item) for item in children).most_common(1)[0]
        alike = [item for item in children if type(item) is kind]
        numel = sum(parameter.numel() for item in alike for parameter in item.parameters())
        if count > 1 and numel > most:
            found, most = alike, numel
    return found


@functools.lru_cache(maxsize=8)
def kept_of(module: nn.Module, layers: int, width: int, sequence: int, dtype: torch.dtype) -> Kept:
    """Count for one sequence of so many tokens. ``layers`` and ``width`` are for the estimate.

    The module has ``dtype`` afterwards, if it is on the meta device.
    """
    try:
        return _followed(module, sequence, dtype)
    except Exception as error:  # whatever a model's own code may say to tensors without values
        hidden = width * sequence * dtype.itemsize
        one = _ESTIMATE * hidden // 2
        reason = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
        return Kept(layers * one, one, layers * hidden, hidden, reason=reason)


def _followed(module: nn.Module, sequence: int, dtype: torch.dtype) -> Kept:
    """Blocks with the same class and shapes are followed once."""
    if any(not parameter.is_meta for parameter in module.parameters()):
        raise TypeError("its weights are in memory")
    blocks = blocks_of(module) or [module]
    module.to(dtype)
    given = _options(module, sequence)
    lasting = [*module.parameters(), *module.buffers(), *given.values()]
    known = {tensor.untyped_storage()._cdata for tensor in lasting if isinstance(tensor, Tensor)}
    followed: dict[Any, tuple[int, Any]] = {}
    counts: list[int] = []
    inputs = _Inputs(known)
    plain = {block: block.forward for block in blocks}

    def forward(block: nn.Module, *args: Any, **options: Any) -> Any:
        inputs.of_call((args, options))
        kind = type(block), tuple(parameter.shape for parameter in block.parameters())
        if kind not in followed:
            saved: dict[int, Tensor] = {}
            with _noting(saved):
                output = plain[block](*args, **options)
            followed[kind] = _nbytes(saved, known), output
        counts.append(followed[kind][0])
        inputs.passed_on(followed[kind][1])
        return followed[kind][1]

    try:
        for block in blocks:
            block.forward = functools.partial(forward, block)
        around: dict[int, Tensor] = {}
        with _Attention(), _Shapes(), torch.enable_grad(), _noting(around):
            module(*_inputs(module, sequence), **given)
    finally:
        for block in blocks:
            del block.forward
    if len(counts) < len(blocks):
        raise ValueError("its forward does not call all of its blocks")
    return Kept(
        sum(counts), max(counts), sum(inputs.counts), max(inputs.counts), _nbytes(around, known | inputs.storages)
    )


class _Inputs:
    """Bytes among the arguments of each call of a block. What several are given is counted once, except for what the
    block before has made: each has its own, for which one stands here."""

    def __init__(self, known: set[int]) -> None:
        self.counts: list[int] = []
        self._known = known
        self._seen: dict[int, Tensor] = {}
        """Kept, so that no other storage comes to lie where theirs do."""

    def of_call(self, arguments: Any) -> None:
        """The next block is called with these."""
        count = 0
        for tensor in _tensors(arguments):
            storage = tensor.untyped_storage()
            if storage._cdata not in self._known and storage._cdata not in self._seen:
                self._seen[storage._cdata] = tensor
                count += storage.nbytes()
        self.counts.append(count)

    @property
    def storages(self) -> Set[int]:
        """Return the storages of the blocks' inputs, less those that other blocks have made."""
        return self._seen.keys()

    def passed_on(self, output: Any) -> None:
        """The block has returned this."""
        for tensor in _tensors(output):
            self._seen.pop(tensor.untyped_storage()._cdata, None)


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, Mapping):
        yield from _tensors(tuple(values.values()))
    elif isinstance(values, (tuple, list)):
        for value in values:
            yield from _tensors(value)


def _nbytes(saved: Mapping[int, Tensor], known: Set[int]) -> int:
    return sum(saved[storage].untyped_storage().nbytes() for storage in saved.keys() - known)


def _inputs(module: nn.Module, sequence: int) -> tuple[Tensor, ...]:
    """Tokens, or vectors where the model begins with a matrix."""
    first = next((child for child in module.modules() if isinstance(child, (nn.Embedding, nn.Linear))), None)
    if isinstance(first, nn.Linear):
        dtype = first.weight.dtype
        return (torch.empty(1, sequence, first.in_features, dtype=dtype, device="meta", requires_grad=True),)
    return (torch.empty(1, sequence, dtype=torch.long, device="meta"),)


def _options(module: nn.Module, sequence: int) -> dict[str, Any]:
    """Of a model of ``transformers``: a mask with all of its dimensions is not looked into."""
    if not hasattr(getattr(module, "config", None), "model_type"):
        return {}
    mask = torch.empty(1, 1, sequence, sequence, dtype=torch.bool, device="meta")
    return {"attention_mask": mask, "use_cache": False}


def _noting(saved: dict[int, Tensor]) -> torch.autograd.graph.saved_tensors_hooks:
    """Within ``with``, what autograd saves is noted, by its storage."""

    def note(tensor: Tensor) -> Tensor:
        saved[tensor.untyped_storage()._cdata] = tensor
        return tensor

    return torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)


class _FlashAttention(torch.autograd.Function):
    """Keeps what the fused kernels keep: the operands, the result, and a number for each row."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        batch, heads, tokens, _ = query.shape
        rows = torch.empty(batch, heads, tokens, dtype=torch.float32, device=query.device)
        out = torch.empty(batch, tokens, heads, value.shape[-1], dtype=query.dtype, device=query.device).transpose(1, 2)
        ctx.save_for_backward(query, key, value, out, rows)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise NotImplementedError("shapes only")


_aten = torch.ops.aten
_POINT_BY_POINT = {
    _aten.add, _aten.sub, _aten.mul, _aten.div, _aten.pow, _aten.neg, _aten.rsqrt, _aten.sigmoid, _aten.silu,
    _aten.gelu, _aten.relu, _aten.tanh,
}  # fmt: skip


class _Shapes(TorchDispatchMode):
    """Within ``with``, the commonest operators on the meta device give a tensor of the right shape at once. For theirs
    torch would bring in its compiler, which takes longer than all of the forecast. So does its ``broadcast_shapes``."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Torch asks whether to keep its compiler away from this class, for which it brings it in."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        operator, options = func.overloadpacket, kwargs or {}
        operands = [value for value in args if isinstance(value, Tensor)]
        if operator in _POINT_BY_POINT and options.keys() <= {"approximate"} and any(one.is_meta for one in operands):
            dtype = functools.reduce(torch.promote_types, (one.dtype for one in operands if one.is_meta))
            return torch.empty(np.broadcast_shapes(*(one.shape for one in operands)), dtype=dtype, device="meta")
        if func in (_aten.mean.dim, _aten.sum.dim_IntList) and not options and operands[0].is_meta:
            shape = list(operands[0].shape)
            for dim in args[1]:
                shape[dim] = 1
            kept = torch.empty(shape, dtype=operands[0].dtype, device="meta")
            return kept if len(args) > 2 and args[2] else kept.squeeze(tuple(args[1]))
        if func is _aten.cat.default and all(one.is_meta for one in args[0]):
            dim, shape = args[1] if len(args) > 1 else 0, list(args[0][0].shape)
            shape[dim] = sum(one.shape[dim] for one in args[0])
            return torch.empty(shape, dtype=args[0][0].dtype, device="meta")
        if func is _aten._softmax.default and operands[0].is_meta:
            return torch.empty(operands[0].shape, dtype=torch.float32 if args[2] else operands[0].dtype, device="meta")
        if func is _aten.topk.default and operands[0].is_meta:
            shape = list(operands[0].shape)
            shape[args[2] if len(args) > 2 else -1] = args[1]
            values = torch.empty(shape, dtype=operands[0].dtype, device="meta")
            return values, torch.empty(shape, dtype=torch.long, device="meta")
        if func in (_aten.mm.default, _aten.addmm.default) and operands[0].is_meta:
            left, right = operands[-2:]
            return torch.empty(left.shape[0], right.shape[1], dtype=left.dtype, device="meta")
        if func is _aten.native_layer_norm.default and operands[0].is_meta:
            values, lengths = operands[0], args[1]
            rows = [*values.shape[: values.dim() - len(lengths)], *(1 for _ in lengths)]
            statistics = (torch.empty(rows, dtype=torch.float32, device="meta") for _ in range(2))
            return torch.empty(values.shape, dtype=values.dtype, device="meta"), *statistics
        if func is _aten.embedding.default and operands[0].is_meta:
            table, indices = operands
            return torch.empty(*indices.shape, table.shape[1], dtype=table.dtype, device="meta")
        return func(*args, **options)


class _Attention(TorchFunctionMode):
    """Within ``with``, attention keeps no matrix of its own: on the meta device torch would take the kernel that
    does."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is F.scaled_dot_product_attention:
            return _FlashAttention.apply(*args[:3])
        return func(*args, **(kwargs or {}))
