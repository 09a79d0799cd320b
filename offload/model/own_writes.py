"""Finds what is written to a unit's weights while it is in use, through whichever tensor: a largest norm, a clamp, a
projection, a codebook.

Code outside of a use writes to handles, which pass it on. Within one there are ordinary parameters. Their versions and
addresses are looked at when the use ends: a change through autograd's eyes moves the one, ``parameter.data = tensor``
the other. A change through ``.data``, an array or a view of these shows in the bytes alone. Where the memory is a copy
in RAM, the change would go with that: hashes of its bytes are compared at each use. Where a backward runs the forward
again, the bytes before its first run and before the second are.

Elsewhere they are compared in the first use with gradients and in the first one without, and from then on where they
have changed. A hash of a device's memory would have the host wait for the device. And where the memory is that of the
weights themselves, the change is there in any case: it is only a commit that must know of it (``UpdateLog``).
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter, methodcaller, ne, or_

import torch
import xxhash

from offload.torch_internals import itself
from offload.unseen import own_work

_version: Callable[[torch.Tensor], int] = attrgetter("_version")
_address: Callable[[torch.Tensor], int] = methodcaller("data_ptr")


Writes = Sequence[tuple[int, torch.Tensor, torch.Tensor | None]]
"""See ``OwnWrites.end``."""


class OwnWrites:
    """Looks at the parameters in one unit's window, before and after each of its uses."""

    def __init__(self, parameters: Sequence[torch.Tensor]) -> None:
        """They may be the tensors that parameters wrap."""
        self._parameters = parameters
        self._views = [parameter.data for parameter in parameters]
        """Memory to which each parameter belongs."""
        self._largest = max(self._views, key=torch.Tensor.numel, default=torch.empty(0))
        self._in_place: tuple[int, list[int]] = -1, []
        """The address of the largest view when it was asked last, and those of all of them then."""
        self._looks = {True: True, False: True}
        """At the bytes of what is no copy in RAM: in uses with gradients, and in those without."""
        self._mode = True
        """Of the use that is under way: with gradients."""
        self.always_looks = False
        """At bytes in RAM when a use begins, also where they are those of the weights: a forward that is run again must
        find what the first run has found."""
        self._compares = True
        """The bytes at the end of the use that is under way."""
        self._versions: list[int] = []
        self._hashes: list[int] = []

    def begin(self, *, is_copy: bool) -> None:
        """The use begins; the weights are there, or a copy of them."""
        self._versions = list(map(_version, self._parameters))
        self._hashes = []
        self._mode = torch.is_grad_enabled()
        are_here = (is_copy or self.always_looks) and all(map(_is_here, self._views))
        self._compares = self._looks[self._mode] or (is_copy and are_here)
        if self._compares or (self.always_looks and are_here):
            self._hashes = self.hashes()

    def end(self) -> Writes:
        """The use is over: the index of each parameter that was changed, its value, an own copy, and the tensor that it
        was pointed to, if it was. Such a one is put back."""
        versions, addresses = list(map(_version, self._parameters)), list(map(_address, self._parameters))
        at = self._largest.data_ptr()
        if self._in_place[0] != at:  # all views are over one memory, which comes and goes as a whole
            self._in_place = at, list(map(_address, self._views))
        if versions == self._versions and addresses == self._in_place[1] and not self._compares:
            return ()
        return list(self._taken_over(versions, list(map(ne, addresses, self._in_place[1]))))

    def _taken_over(
        self, versions: list[int], are_moved: list[bool]
    ) -> Iterator[tuple[int, torch.Tensor, torch.Tensor | None]]:
        are_changed = list(map(or_, are_moved, map(ne, versions, self._versions)))
        if self._compares:
            by_bytes = list(map(ne, self._hashes, self.hashes()))
            self._looks[self._mode] = any(by_bytes)
            are_changed = list(map(or_, are_changed, by_bytes))
        for index, parameter in enumerate(self._parameters):
            if are_changed[index] and self._views[index].numel():
                value, other = parameter.detach().clone(), parameter.data
                parameter.data = self._views[index]
                yield index, value, other if are_moved[index] else None

    def show(self, writes: Writes) -> None:
        """The use goes on after ``end``: what was put back has its value, also where the memory is a copy."""
        for index, value, other in writes:
            if other is not None:
                self._views[index].copy_(value)

    def is_written(self) -> bool:
        """Tell whether ``end`` would find a write, as the use stands."""
        return (
            list(map(_version, self._parameters)) != self._versions
            or list(map(_address, self._parameters)) != list(map(_address, self._views))
            or (self._compares and self._hashes != self.hashes())
        )

    @property
    def mark(self) -> tuple[list[int], list[int]]:
        """Equal at two moments if nothing was written between them: versions, and the bytes as this use has found them,
        if they were looked at."""
        return list(map(_version, self._parameters)), self._hashes

    def put_back(self) -> None:
        """Parameters that an interrupt has left pointed elsewhere."""
        with itself():  # the unit may rest
            for parameter, view in zip(self._parameters, self._views, strict=True):
                if parameter.data_ptr() != view.data_ptr():
                    parameter.data = view

    def hashes(self) -> list[int]:
        """A hash of the bytes of each parameter's memory."""
        return list(map(bytes_hash, self._views))


def bytes_hash(tensor: torch.Tensor) -> int:
    """A hash of the tensor's bytes, at about 20 GB/s. Of contiguous tensors."""
    if not tensor.numel():
        return 0
    if not _is_here(tensor):
        return _hash_there(tensor)
    return xxhash.xxh3_64_intdigest((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()))


@own_work
def version_of(tensor: torch.Tensor) -> int:
    """That of the tensor's bytes. Those of inference have none."""
    return 0 if tensor.is_inference() else tensor._version


def has_bytes(tensor: torch.Tensor) -> bool:
    """Bytes that can be hashed, and are no weight's."""
    return (
        type(tensor) is torch.Tensor
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and tensor.device.type != "meta"
        and tensor.untyped_storage().nbytes() > 0
    )


def _is_here(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu"


_COLUMNS = 4096


def _hash_there(tensor: torch.Tensor) -> int:
    """The device adds up the bytes by columns, which are few; the host hashes the sums, in their order."""
    words = tensor.detach().reshape(-1).view(torch.uint8)
    whole = words.numel() // _COLUMNS * _COLUMNS
    by_column = words[:whole].view(-1, _COLUMNS).sum(0, dtype=torch.int64)
    by_row = words[:whole].view(-1, _COLUMNS).sum(1, dtype=torch.int64)
    sums = torch.cat([by_column, by_row, words[whole:].to(torch.int64)]).cpu()
    return xxhash.xxh3_64_intdigest(bytes(sums.numpy()))
