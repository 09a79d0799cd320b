"""Places of a process: what its program waits for, as a message names it, and whether other ranks alone can end that.

Nobody asks for them but ranks that have waited for long.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from torch import distributed

_DISTRIBUTED = "/torch/distributed/distributed_c10d.py"
_OURS = ("torch", "offload", "swapper", "aio_ext", "threading", "contextlib")


@dataclass(frozen=True)
class Place:
    """``name`` says where; ``stuck_s``, for how long nothing but ranks of the same world could have ended it there."""

    name: str
    stuck_s: float


class Needed(Protocol):
    """Operations of ranks that a thread cannot go on without."""

    @property
    def needed_for(self) -> str:
        """Name of the first of them; empty if no thread waits for one."""

    @property
    def members(self) -> Sequence[int]:
        """The ranks that carry them out, as the whole program counts them."""

    def stuck_s(self) -> float:
        """Seconds since which a thread has waited for them, and they for other ranks."""


class Places:
    """Those of this process, as looked for again and again by a world of these ``members``."""

    def __init__(self, members: Sequence[int]) -> None:
        self._members = frozenset(members)
        self._seen: tuple[FrameType | None, float] = None, 0.0
        """A frame, and since when it was seen. What is referred to is no other call's."""

    def look(self, own: Needed, others: Iterable[Needed]) -> Place:
        """The place where the process is now: ``own`` operations are this world's, the ``others`` of its other
        engines."""
        for needed in (own, *others):
            if name := needed.needed_for:
                name += "" if needed is own else ", of another engine"
                return Place(name, needed.stuck_s() if self._members.issuperset(needed.members) else 0.0)
        main = sys._current_frames().get(threading.main_thread().ident or 0)
        found = self._in_torch(main)
        if found is not None:
            return found
        self._seen = None, 0.0
        at = next((frame for frame in _outwards(main) if _is_users(frame)), None)
        return Place("an unknown place" if at is None else _line(at), 0.0)

    def _in_torch(self, main: FrameType | None) -> Place | None:
        """In a collective that the program has called itself."""
        called = [frame for frame in _outwards(main) if frame.f_code.co_filename.endswith(_DISTRIBUTED)]
        called = [frame for frame in called if "group" in frame.f_locals]
        if not called:
            return None
        outermost = called[-1]
        at = next((frame for frame in _outwards(outermost) if _is_users(frame)), outermost)
        stuck_s = self._since(outermost) if self._are_all_of(outermost.f_locals["group"]) else 0.0
        return Place(f"torch.distributed.{outermost.f_code.co_name} ({_line(at)})", stuck_s)

    def _are_all_of(self, group: Any) -> bool:
        """All ranks of the group are this world's."""
        try:
            ranks = distributed.get_process_group_ranks(distributed.group.WORLD if group is None else group)
        except (KeyError, ValueError, RuntimeError, AttributeError):  # it is destroyed
            return False
        return self._members.issuperset(ranks)

    def _since(self, frame: FrameType) -> float:
        seen, since = self._seen
        now = time.monotonic()
        if seen is not frame:
            self._seen = frame, now
            return 0.0
        return now - since


def _outwards(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _is_users(frame: FrameType) -> bool:
    return frame.f_globals.get("__name__", "").partition(".")[0] not in _OURS


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}, line {frame.f_lineno}"
