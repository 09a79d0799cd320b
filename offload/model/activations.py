"""Hooks of saved tensors of units whose activations go over the tiers.

What autograd keeps of such a unit is copied into a pool, and its memory is free. Weights are not: they have homes. A
tensor of less than ``LEAST_BYTES`` stays as it is, and so does one that lives anyway (a buffer of the model), or is no
ordinary tensor.

[Note: The same bits] A tensor comes back with its bytes, sizes and strides, so every kernel sees what it would have
seen. What lies in one piece of memory at one version is kept once, however often it is saved. Versions are those of one
counter: tensors over one memory may have several (``tensor.data``, and the gates within ``nn.GRUCell``), and a write by
one counter says nothing of the others.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection
from typing import Any

import torch
from torch import nn

from offload.model.saved_tensors import SavedTensors, UsesOfUnits, changed_in_place, unit_around
from offload.model.unit_in_model import Call
from offload.tiers.activations.pool import ActivationPool, Kept
from offload.torch_internals import StorageReference, keeps_version, never_compiled, transforms
from offload.unseen import own_work

LEAST_BYTES = 16 << 10

_MAX_GAPS = 4
"""A view of which neighbours in its memory are saved, too, is kept with them if that is at most so many times it."""


class Shared:
    """Bytes of one storage that several saved tensors look at."""

    __slots__ = (
        *("__weakref__", "_kept", "_restored", "num_users", "num_waiting", "start", "stop", "storage", "version"),
        "witness",
    )

    def __init__(self, kept: Kept, tensor: torch.Tensor, start: int, stop: int) -> None:
        """They were kept as ``tensor`` has them now."""
        self._kept = kept
        self.storage = StorageReference(tensor.untyped_storage())
        self.version = tensor._version
        self.witness = _witness_of(tensor)
        self.start = start
        self.stop = stop
        self.num_waiting = 0
        """Saved tensors that were not asked for since the bytes came back."""
        self.num_users = 0
        self._restored: torch.UntypedStorage | None = None

    def renew(self, order: tuple[int, int]) -> None:
        """They were saved again, by who is that soon in backward."""
        self._kept.renew(order)

    def bring(self) -> torch.UntypedStorage:
        """A storage with the bytes, until all who share them have had them."""
        storage = self._restored
        if storage is None:
            storage, self.num_waiting = self._kept.bring(), self.num_users
        self.num_waiting -= 1
        self._restored = storage if self.num_waiting > 0 else None
        return storage


class Packed:
    """The object that a graph has in the place of a saved tensor."""

    __slots__ = ("_layout", "_shared", "call")

    def __init__(self, tensor: torch.Tensor, shared: Shared, call: Call) -> None:
        shared.num_users += 1
        self._shared = shared
        first = (tensor.storage_offset() * tensor.itemsize - shared.start) // tensor.itemsize
        self._layout = tensor.dtype, first, tensor.shape, tensor.stride()
        self.call = call

    @own_work
    def tensor(self) -> torch.Tensor:
        """The tensor as it was. Raises ``RuntimeError`` as torch does if it was changed in place since, and
        ``ActivationError``."""
        dtype, first, shape, stride = self._layout
        witness, version = self._shared.witness, self._shared.version
        if witness._version != version:
            raise changed_in_place(witness, shape, version)
        storage = self._shared.bring()
        return torch.empty(0, dtype=dtype, device=storage.device).set_(storage, first, shape, stride)  # type: ignore[call-overload,no-any-return]


class OffloadedTensors(SavedTensors):
    """The hooks of the units whose activations go into a pool, with none of the user's below them."""

    def __init__(
        self,
        uses: UsesOfUnits,
        pool: ActivationPool,
        lasting: Collection[int],
        *,
        spills: bool,
    ) -> None:
        """``lasting`` memory, by the ``_cdata`` of storages, is there all the time: what looks at it stays. ``spills``:
        to NVMe, as far as memory is short."""
        super().__init__(uses)
        self._pool = pool
        self._lasting = lasting
        self._spills = spills
        self._shared: dict[int, weakref.ref[Shared]] = {}
        """The bytes that were kept last of each storage."""

    @never_compiled  # torch 2.11 would make graphs of it where it is called between two
    @own_work
    def pack(self, tensor: torch.Tensor) -> Any:
        if (
            type(tensor) not in (torch.Tensor, nn.Parameter)
            or not self._can_be_copied(tensor)
            or tensor.nbytes < LEAST_BYTES
            or unit_around(tensor, self.uses.context) is not None
            or tensor.untyped_storage()._cdata in self._lasting
        ):
            return super().pack(tensor)
        shared = self._known(tensor) or self._keep(tensor)
        if shared is None:
            return super().pack(tensor)
        call = self.uses.context.in_forward[-1].call
        assert call is not None
        return Packed(tensor, shared, call)

    @never_compiled
    def unpack(self, packed: Any) -> torch.Tensor:
        if isinstance(packed, Packed):
            self.uses.needed(packed.call)  # before a unit is recomputed: its weights come first
            return packed.tensor()
        self._pool.check()
        return super().unpack(packed)

    pack.steps_aside = unpack.steps_aside = True  # type: ignore[attr-defined]

    def _can_be_copied(self, tensor: torch.Tensor) -> bool:
        return (
            tensor.layout is torch.strided
            and not tensor.is_nested
            and tensor.device == self._pool.copies.device
            and not tensor.is_complex()
            and not tensor.is_quantized
            and not tensor.is_neg()  # its bytes are those of another tensor
            and not tensor._is_zerotensor()  # it has none
            and transforms() is None
        )

    def _known(self, tensor: torch.Tensor) -> Shared | None:
        """Return the bytes that were kept of the same memory, if they have all of the tensor."""
        key = tensor.untyped_storage()._cdata
        shared = self._shared[key]() if key in self._shared else None
        if shared is None or shared.storage.expired() or shared.version != tensor._version:
            return None
        start, stop = _span_of(tensor)
        is_inside = shared.start <= start and stop <= shared.stop
        if not is_inside or (start - shared.start) % tensor.itemsize or not _count_as_one(tensor, shared.witness):
            return None
        shared.renew(self.uses.context.order)
        return shared

    def _keep(self, tensor: torch.Tensor) -> Shared | None:
        storage = tensor.untyped_storage()
        start, stop = _span_of(tensor)
        if stop - start > tensor.nbytes and storage.nbytes() <= _MAX_GAPS * tensor.nbytes:
            start, stop = 0, storage.nbytes()
        kept = self._pool.keep(storage, start, stop - start, self.uses.context.order, spills=self._spills)
        if kept is None:
            return None
        shared = Shared(kept, tensor, start, stop)
        key = storage._cdata
        self._shared[key] = weakref.ref(shared, lambda gone: _forget(self._shared, key, gone))
        return shared


def _forget(known: dict[int, weakref.ref[Shared]], key: int, gone: weakref.ref[Shared]) -> None:
    if known.get(key) is gone:
        del known[key]


def _span_of(tensor: torch.Tensor) -> tuple[int, int]:
    """First byte and end of the tensor in its storage."""
    size = tensor.itemsize
    last = sum((length - 1) * stride for length, stride in zip(tensor.shape, tensor.stride(), strict=True))
    first = int(tensor.storage_offset())
    return first * size, (first + int(last) + 1) * size


def _count_as_one(one: torch.Tensor, other: torch.Tensor) -> bool:
    """They have one counter of versions."""
    with keeps_version(one):
        before = other._version
        torch.autograd.graph.increment_version(one)
        return other._version != before


def _witness_of(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without memory that counts the changes in place of another one."""
    witness = tensor.detach()
    witness.data = torch.empty(0, dtype=tensor.dtype, device=tensor.device)
    return witness
