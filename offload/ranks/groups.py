"""Groups of ``torch.distributed`` that are the engine's alone. Nothing here keeps them alive: what the program destroys
is gone, with the store that it stands on, and another start finds nothing of it.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import os
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

from torch import distributed

from offload.errors import RankError
from offload.ranks.heartbeat import Heartbeat
from offload.ranks.launch import start_name
from offload.ranks.torch_distributed import destroy_group, groups_by_members, own_store

_PATIENCE = timedelta(days=7)
"""A collective may wait this long: a rank that is gone is noticed by its silence (``offload.ranks.heartbeat``), and one
that computes is waited for."""


_DESTROYED = (
    "torch.distributed was destroyed (destroy_process_group) while an engine stood on it: close the engine before"
)


class Group:
    """A group of ours, for one world at a time. ``torch.distributed`` has it until it is destroyed."""

    def __init__(self, made: Any) -> None:
        self._made = weakref.ref(made)
        self.is_taken = True
        self.is_broken = False

    @property
    def is_destroyed(self) -> bool:
        """The program has destroyed ``torch.distributed`` since."""
        return self._made() is None

    @property
    def group(self) -> Any:
        """The group itself. Raises ``RankError`` if it is destroyed."""
        made = self._made()
        if made is None:
            raise RankError(_DESTROYED)
        return made

    def release(self, *, broken: bool = False) -> None:
        """Other worlds may have the group now. ``broken``: a collective may be under way that nobody ends, so that it
        is not used again."""
        self.is_taken = False
        made = self._made()
        if broken and not self.is_broken and made is not None:
            self.is_broken = True
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(made))  # its destructor would wait for what is under way

    def destroy(self) -> None:
        """End the group, which no world has from now on. No collective may be under way in it."""
        self.is_taken = False
        made = self._made()
        if made is not None and not self.is_broken:
            self.is_broken = True
            destroy_group(made)


class _NoGroup(Group):
    """The group of a single rank."""

    def __init__(self) -> None:
        self.is_taken = self.is_broken = False

    @property
    def is_destroyed(self) -> bool:
        return False

    @property
    def group(self) -> None:
        return None

    def release(self, *, broken: bool = False) -> None:
        pass

    def destroy(self) -> None:
        pass


NO_GROUP: Group = _NoGroup()

_groups: dict[tuple[str, tuple[int, ...]], list[Group]] = {}
"""The groups of each backend and set of ranks, for the present ``torch.distributed``."""
_num_worlds: Counter[tuple[int, ...]] = Counter()
"""Number of worlds that each set of ranks has had there."""
_num_starts = 0
"""Of ``torch.distributed``, as far as worlds were made in it."""
_everyone: Any = None
"""A reference that keeps nothing alive to the group of all processes that they were made in."""


def _forget_former() -> None:
    """Forget what was made in a ``torch.distributed`` that is destroyed."""
    global _everyone, _num_starts
    if _everyone is None or _everyone() is not distributed.group.WORLD:
        _everyone = weakref.ref(distributed.group.WORLD)
        _num_starts += 1
        _groups.clear()
        _num_worlds.clear()


def next_store(members: Sequence[int]) -> Any:
    """A ``torch.distributed.Store`` that the next world of these ranks shares, and no other one."""
    _forget_former()
    _num_worlds[tuple(members)] += 1
    name = hashlib.sha256(repr(list(members)).encode()).hexdigest()[:16]
    return own_store(f"offload/{start_name()}.{_num_starts}/{name}/{_num_worlds[tuple(members)]}")


def take_group(members: Sequence[int], heartbeat: Heartbeat, backend: str = "gloo") -> Group:
    """A group for these ranks, as the whole program counts them, that no other world has. All of them call this.

    Its name, and so what it leaves in the store that all processes share, follows from the ranks and the groups that
    they have: it is kept, since one of the same name would find that. One that is gone would be waited for without end:
    ``heartbeat`` says so.
    """
    _forget_former()
    of_members = _groups.setdefault((backend, tuple(members)), [])
    found = next((group for group in of_members if not group.is_taken and not group.is_broken), None)
    if found is None:
        make = partial(_make_group, members, backend)
        found = Group(heartbeat.wait_for_call(make, "make their engines"))
        of_members.append(found)
    found.is_taken = True
    return found


def _make_group(members: Sequence[int], backend: str) -> Any:
    with _own_handling_of_errors(), groups_by_members():
        return distributed.new_group(list(members), _PATIENCE, backend, use_local_synchronization=True)


@contextlib.contextmanager
def _own_handling_of_errors() -> Iterator[None]:
    """A group that is made within leaves it to us to end transfers of a peer that is gone: by itself nccl's would end
    the process. Source: torch's "ProcessGroupNCCL Environment Variables"."""
    name = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
    before = os.environ.get(name)
    os.environ[name] = "0"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before
