"""Strays: tensors over a unit's memory that outlive its use. A forward has put away a view of a weight, its ``.data``
or an array; a transform of ``torch.func`` has saved it. (The parameter itself is none: see ``resting``.)

They can be counted at no cost: each of them owns the storage that the window keeps for the unit's whole life. What
autograd has saved through the engine's hooks owns it, too, and is known; it comes back through a use. So where others
are left at the end of a use, the memory stays under the closed window for them: see [Note: What is kept keeps its
address]. It is that of weights in RAM, or else a copy from then on, which each use and each step bring up to date. Such
a copy can be read. What is written to it reaches nobody, and is an error as soon as it is noticed: before the next use,
the next step and the next ``zero_grad()``.

Who has them is asked when a step finds some, and of the collector: what only frames have (those of an exception that
somebody keeps) is nothing that a forward has kept, and nobody is warned of it.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from types import CellType, FrameType

import torch

from offload.errors import warn
from offload.model.own_writes import OwnWrites
from offload.tiers.window import Window
from offload.torch_internals import itself, num_owners
from offload.units import UnitSpec
from swapper import OffloadError, readable_bytes


class Saved:
    """Mark of what autograd has saved of a unit: each such tensor refers to the one object of this class, and owns the
    unit's storage once."""


class Strays:
    """Those of one unit."""

    def __init__(
        self,
        unit: UnitSpec,
        window: Window,
        writes: OwnWrites,
        names: Sequence[str],
    ) -> None:
        """``names`` are those of the parameters that ``writes`` looks at."""
        self.saved = Saved()
        self.are_left = False
        """At the end of the last use there were some."""
        self._unit = unit
        self._window = window
        self._writes = writes
        self._names = names
        self._hashes: list[int] = []
        """Of the parameters, as they were left to strays."""
        self._is_seen = any(spec.piece is None for spec in unit.parameters)
        """By the user's code: with a piece of a weight the engine alone computes."""
        self._storage: int = window.flat.untyped_storage()._cdata
        self._keeps = False
        """The window does."""
        self.looks_before = True
        """At the next use: ``begin_use`` is to be called."""
        self._knows = False
        """The count where there are none is known, from before the first use."""
        self._owners_at_rest = 0
        self._in_hooks = 0
        """Owners since the use began that hooks of saved tensors below ours have made."""
        self._owners_asked = 0
        """As many as there were when the collector was asked for them."""
        self._owners_excused = 0
        """As many as an interrupt has left, until there are none once."""

    def begin_use(self) -> None:
        """Before it. Raises ``OffloadError`` if what was left to strays has been written to."""
        if self.are_left:
            self.check()
            self.are_left = False
        elif not self._knows:
            self._owners_at_rest = self._owners()
            self._knows = True
        self.looks_before = False  # last: an interrupt between these lines leaves it to the next use

    @contextmanager
    def kept_by_hooks(self) -> Iterator[None]:
        """Within, hooks of saved tensors below ours are called."""
        before = num_owners(self._storage)
        try:
            yield
        finally:
            self._in_hooks += num_owners(self._storage) - before

    def end_use(self, *, is_recomputed: bool = False) -> None:
        """See whether there are some, while the weights are there. What a checkpoint recomputes it has saved for the
        backward that follows, which asks our hooks for it."""
        owners = num_owners(self._storage) - sys.getrefcount(self.saved) - (self._in_hooks if is_recomputed else 0)
        self._in_hooks = 0
        self.are_left = self._is_seen and owners > self._owners_at_rest
        if self.are_left:
            self.looks_before = True
            self._hashes = self._writes.hashes()
        if self.are_left != self._keeps:
            self._keeps = self.are_left
            self._window.keep(self._keeps)

    def refuse_move(self, name: str) -> None:
        """A use has pointed the parameter of this name to another tensor. Raises ``OffloadError`` if somebody has kept
        what would look at the former value from then on: the window shows the present one."""
        if self._are_there(but=self._in_hooks):
            raise OffloadError(
                f"{name}: a forward has assigned to its .data, and a tensor over the unit's memory from before is kept "
                "(by hooks of saved tensors such as save_on_cpu, or by the model), which needs the value before. There "
                "is one: assign before the use, or after the step, or keep a clone."
            )

    def drop(self) -> None:
        """Give the memory back if nobody has it any more: a frame that has ended since held what a module returned.
        Raises as ``begin_use``."""
        if not self._are_there():
            self.check()
            self.are_left = self._keeps = False
            self._owners_excused = 0
            self._window.keep(False)
            self._window.drop_copy()

    def check(self) -> None:
        """See whether what was left to strays is as it was. Raises ``OffloadError``, once."""
        if not self._window.has_copy():  # an interrupt has ended the use before there was one
            return
        pairs = zip(self._names, self._hashes, self._writes.hashes(), strict=True)
        changed = [name for name, before, after in pairs if before != after]
        if changed:
            self.are_left = False
            raise OffloadError(
                f"{', '.join(changed)}: a tensor that a forward has kept (a view, .data, an array, the parameter) was "
                "written to outside of it. It is a copy there, and the weight has not changed. Write to the model's "
                "parameter, or within the forward."
            )

    def are_kept(self) -> bool:
        """Somebody else than frames has some. Looks through all objects of the process, once for as many strays."""
        owners = self._owners()
        if owners == self._owners_asked or owners <= self._owners_excused:
            return False
        self._owners_asked = owners
        tensors = _tensors_over(self._storage)
        strays = owners - self._owners_at_rest
        for item in tensors:
            strays -= _is_of_frames(item, [tensors], depth=3)
        return strays > 0

    def excuse(self) -> None:
        """Those that are there were left by a use that did not come to its end: they are nothing to warn of."""
        self._in_hooks = 0
        self._owners_excused = self._owners()

    def warn(self) -> None:
        """Say what they cost."""
        warn(
            f"unit {self._unit.name}: a forward has kept a tensor over its weights (a view, .data, an array). The "
            f"{readable_bytes(self._window.flat.nbytes)} stay in memory for it, beside the budget where they are "
            "stored on NVMe, and those of each other such unit, and each step waits for their update. Keep a clone of "
            "what is needed, or nothing."
        )

    def _are_there(self, but: int = 0) -> bool:
        return self._is_seen and self._owners() - but > self._owners_at_rest

    def _owners(self) -> int:
        return num_owners(self._storage) - sys.getrefcount(self.saved)


def _tensors_over(storage: int) -> list[torch.Tensor]:
    """The objects of tensors over it: those of the engine, too."""
    found = []
    with itself():
        for item in gc.get_objects():
            if issubclass(type(item), torch.Tensor):
                with suppress(RuntimeError, NotImplementedError):  # a sparse tensor, or one that wraps others
                    if torch.Tensor.untyped_storage(item)._cdata == storage:
                        found.append(item)
    return found


def _is_of_frames(item: object, ours: list[object], depth: int) -> bool:
    """All that refers to it, directly or by containers, are frames. ``ours`` are the search's own lists. Its frames
    count as frames: nothing else of it may refer to the item (a partial, a generator, the cell of a variable that an
    inner function shares)."""
    own = [id(one) for one in ours]
    owners = [owner for owner in gc.get_referrers(item) if id(owner) not in own]
    ours = [*ours, owners]
    for owner in owners:
        if not isinstance(owner, FrameType):
            is_container = depth > 0 and type(owner) in (list, tuple, dict, CellType)
            if not is_container or not _is_of_frames(owner, ours, depth - 1):
                return False
    return len(owners) > 0
