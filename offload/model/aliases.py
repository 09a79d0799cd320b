"""Aliases: memory of the user's own that a parameter had, and that somebody looks at still. A buffer that is
``lin.weight.data``, one flat buffer under all parameters, an array, the tensor of ``parameter.data = tensor``.

In PyTorch it is the parameter's memory. Here the weight rests in the engine, and the two are kept the same: what was
written to an alias reaches the weight before the next use of its unit, the next look at it and the next step; a step
brings to the alias what the weight has become. The engine has a part in the memory, so that what is written last is
not lost with it: who writes may let go. It gives that up when it next looks, if nobody else has one. Who looks at
foreign memory (see ``foreign_memory``), or by an address (``parameter.data_ptr()``), is not known: that stays as long
as the parameter is over it.
"""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from functools import cache
from typing import Protocol
from weakref import WeakValueDictionary

import torch
from torch import nn
from torch.autograd.graph import increment_version

from offload.errors import warn
from offload.model.foreign_memory import is_foreign
from offload.model.own_writes import bytes_hash
from offload.torch_internals import StorageReference, num_owners, storage_of
from swapper import OffloadError, readable_bytes

_ASSIGNED_BYTES_MAX = 64 * 1024**2


class Aliased(Protocol):
    """The engine's side of a parameter."""

    name: str

    @property
    def in_use(self) -> Sequence[nn.Parameter]: ...

    def read_weight(self) -> torch.Tensor: ...

    def write(self, value: torch.Tensor) -> None: ...


class _Part:
    """The engine's part in memory that somebody looks at: one for all aliases there."""

    def __init__(self, storage: torch.UntypedStorage) -> None:
        self._tensor = torch.empty(0, dtype=torch.uint8).set_(storage)  # type: ignore[call-overload]
        self._storage: int = storage._cdata

    def is_alone(self) -> bool:
        """Nobody else has one."""
        return num_owners(self._storage) == _owners_if_alone()


class _ForeignPart(_Part):
    """The same where who looks at the memory is not known: it is foreign, or somebody has its address."""

    def is_alone(self) -> bool:
        return False


@cache
def _owners_if_alone() -> int:
    """Return the owners counted where the engine alone has a part: the Python object of a storage may be one."""
    part = _Part(torch.UntypedStorage(1))
    return num_owners(part._storage)


class Alias:
    """A tensor as somebody looks at it; without a part in its memory, until it is followed. In foreign memory it has
    one from the start: torch forgets that memory with the last tensor over it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        self._storage = StorageReference(storage)
        self._part: _Part | None = _ForeignPart(storage) if is_foreign(storage) else None
        self._dtype = tensor.dtype
        self.nbytes = tensor.nbytes
        self._layout = tensor.storage_offset(), tensor.shape, tensor.stride()
        self._hash = 0
        self._witness = tensor.detach()
        """Has the version that the tensor shares, and no memory."""
        self._witness.data = torch.empty(0)
        self._version = self._witness._version

    def tensor(self) -> torch.Tensor | None:
        """The tensor; None if nobody has its memory."""
        storage = storage_of(self._storage)
        return None if storage is None else torch.empty(0, dtype=self._dtype).set_(storage, *self._layout)  # type: ignore[call-overload]

    def hold(self, parts: MutableMapping[int, _Part]) -> None:
        """Have a part in the memory, which somebody has: that of these which is another alias's, too. Foreign memory
        has parts of its own."""
        if self._part is not None:
            return
        storage = storage_of(self._storage)
        assert storage is not None
        self._part = parts.get(storage._cdata) or parts.setdefault(storage._cdata, _Part(storage))

    def keep(self) -> None:
        """Somebody has its address: who looks at the memory is not known from now on."""
        storage = storage_of(self._storage)
        assert storage is not None
        self._part = _ForeignPart(storage)

    def is_alone(self) -> bool:
        """Nobody else has the memory."""
        return self._part is not None and self._part.is_alone()

    def fits(self, dtype: torch.dtype, device: torch.device) -> bool:
        """A parameter of this kind may be over it: a conversion has made another memory, as elsewhere."""
        return self._dtype == dtype and device.type == "cpu"

    def is_written(self, tensor: torch.Tensor) -> bool:
        """Its bytes are others than they were left with."""
        return bytes_hash(tensor.contiguous()) != self._hash

    def leave(self, tensor: torch.Tensor) -> None:
        """They are what they are to be."""
        self._hash = bytes_hash(tensor.contiguous())

    def tells_autograd(self) -> bool:
        """It was written to through autograd's eyes since this was asked last: ``.detach()`` shares a version with the
        parameter, ``.data`` does not."""
        before, self._version = self._version, self._witness._version
        return self._version != before


class Aliases:
    """Those of an engine's parameters."""

    def __init__(self) -> None:
        self.of_unit: dict[int, dict[Aliased, list[Alias]]] = {}
        """By the index of the unit. Empty, as a rule."""
        self._parts: WeakValueDictionary[int, _Part] = WeakValueDictionary()
        self._assigned_bytes = 0
        """Of tensors that parameters were pointed to since all aliases were looked at."""
        self._has_warned = False

    def follow(self, unit: int, parameter: Aliased, alias: Alias) -> None:
        """The weight has been what is there, and both are to stay the same."""
        tensor = alias.tensor()
        if tensor is not None:
            alias.leave(tensor)
            alias.hold(self._parts)
            self.of_unit.setdefault(unit, {}).setdefault(parameter, []).append(alias)

    def assigned(self, unit: int, parameter: Aliased, alias: Alias) -> None:
        """The parameter was pointed to this. Such tensors stay until the next step, as far as there is room."""
        self.follow(unit, parameter, alias)
        self._assigned_bytes += alias.nbytes
        if self._assigned_bytes > _ASSIGNED_BYTES_MAX:
            self.take_all()

    def newest(self, unit: int, parameter: Aliased) -> torch.Tensor | None:
        """The tensor that was made one with the weight last, if somebody has its memory still."""
        found = self._newest(unit, parameter)
        return None if found is None else found[1]

    def with_address(self, unit: int, parameter: Aliased) -> torch.Tensor | None:
        """The same, and it stays so as long as the parameter is over it."""
        found = self._newest(unit, parameter)
        if found is None:
            return None
        alias, tensor = found
        alias.keep()
        return tensor

    def take_all(self) -> None:
        """Bring what was written to any alias to the weights."""
        for unit in list(self.of_unit):
            self.take(unit)
        self._assigned_bytes = 0

    def take(self, unit: int) -> None:
        """The same of one unit."""
        if self.of_unit:
            for parameter in list(self.of_unit.get(unit, ())):
                are_alone = [alias for alias in self.of_unit[unit][parameter] if alias.is_alone()]
                self._take_of(unit, parameter)
                for alias in are_alone:
                    self._forget(unit, parameter, alias)

    def _take_of(self, unit: int, parameter: Aliased) -> None:
        there = self._there(unit, parameter)
        told = [alias.tells_autograd() for alias, _ in there]
        if any(told):
            increment_version(parameter.in_use)
        written = [tensor for alias, tensor in there if alias.is_written(tensor)]
        if written:
            parameter.write(written[-1].clone())

    def check(self, unit: int) -> None:
        """A use of the unit is over. Raises ``OffloadError`` if an alias was written to within it: the unit has
        computed with something else."""
        for parameter in list(self.of_unit.get(unit, ())):
            if any(alias.is_written(tensor) for alias, tensor in self._there(unit, parameter)):
                raise OffloadError(
                    f"{parameter.name}: a tensor over the memory that the parameter had was written to within the use "
                    "of its unit, which computes in other memory. Write to the parameter there, or to that tensor "
                    "before the forward."
                )

    def forget(self, unit: int, parameter: Aliased) -> None:
        """The parameter will be over other memory: what was its own is that of its aliases alone."""
        self.of_unit.get(unit, {}).pop(parameter, None)

    def bring(self, unit: int, parameter: Aliased, value: torch.Tensor) -> None:
        """The weight is this now."""
        for alias, tensor in self._there(unit, parameter):
            tensor.copy_(value)  # a tensor of its own: the version that others see does not move
            alias.leave(tensor)

    def refresh(self) -> None:
        """A step, or a checkpoint that was loaded, has changed the weights."""
        nbytes = 0
        for unit in list(self.of_unit):
            for parameter in list(self.of_unit[unit]):
                for alias in [alias for alias in self.of_unit[unit][parameter] if alias.is_alone()]:
                    self._forget(unit, parameter, alias)
                if self._there(unit, parameter):
                    value = parameter.read_weight()
                    nbytes += value.nbytes
                    self.bring(unit, parameter, value)
        if nbytes and not self._has_warned:
            self._has_warned = True
            names = [parameter.name for parameters in self.of_unit.values() for parameter in parameters]
            warn(
                f"tensors outside of the engine look at memory that parameters had ({names[0]}, {len(names)} in all: a "
                "buffer, .data, an array, a state dict). They stay the same as the parameters, as in PyTorch, and each "
                f"step waits for its update and copies {readable_bytes(nbytes)} to them. Let go of them, or take "
                "clones, if you do not need that. Who looks at memory that torch has not made (an array's, shared "
                "memory), or by an address (data_ptr(), save_file of safetensors), is not known: give parameters "
                "clones of it, parameter.data = parameter.data.clone()."
            )

    def _there(self, unit: int, parameter: Aliased) -> list[tuple[Alias, torch.Tensor]]:
        of_parameter = self.of_unit.get(unit, {}).get(parameter, ())
        return [(alias, tensor) for alias in of_parameter if (tensor := alias.tensor()) is not None]

    def _newest(self, unit: int, parameter: Aliased) -> tuple[Alias, torch.Tensor] | None:
        there = [each for each in self._there(unit, parameter) if each[1].is_contiguous()]
        return there[-1] if there else None

    def _forget(self, unit: int, parameter: Aliased, alias: Alias) -> None:
        of_unit = self.of_unit[unit]
        of_unit[parameter].remove(alias)
        if not of_unit[parameter]:
            del of_unit[parameter]
        if not of_unit:
            del self.of_unit[unit]
