"""Places of a process: what its threads wait for, as a message names it, and whether other ranks alone can end that.

Nobody asks for them but ranks that have waited for long.
"""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torch import distributed

_DISTRIBUTED = "/torch/distributed/distributed_c10d.py"
_OURS = ("/torch/", "/offload/ranks/")


@dataclass(frozen=True)
class Place:
    """``name`` says where; ``stuck_s``, for how long nothing but ranks of the same world could have ended it there."""

    name: str
    stuck_s: float


class Places:
    """Those of this process, as looked for again and again. ``waits`` is the code that waits for an operation of ranks,
    and whose ``self`` is that."""

    def __init__(self, members: Sequence[int], waits: CodeType) -> None:
        self._members = frozenset(members)
        self._waits = waits
        self._seen: tuple[FrameType | None, float] = None, 0.0
        """A frame, and since when it was seen. What is referred to is no other call's."""

    def look(self) -> Place:
        """The place where the process is now."""
        frames = sys._current_frames()
        main = frames.get(threading.main_thread().ident or 0)
        for frame in frames.values():
            for waiting in _outwards(frame):
                if waiting.f_code is self._waits:
                    return self._at_operation(waiting)
        found = self._in_torch(main)
        if found is not None:
            return found
        self._seen = None, 0.0
        at = next((frame for frame in _outwards(main) if _is_users(frame)), None)
        return Place("an unknown place" if at is None else _line(at), 0.0)

    def _at_operation(self, frame: FrameType) -> Place:
        operation = frame.f_locals["self"]
        is_known = self._members.issuperset(operation.members)
        return Place(operation.name, min(self._since(frame), operation.stuck_s()) if is_known else 0.0)

    def _in_torch(self, main: FrameType | None) -> Place | None:
        """In a collective that the program has called itself."""
        called = [frame for frame in _outwards(main) if frame.f_code.co_filename.endswith(_DISTRIBUTED)]
        called = [frame for frame in called if "group" in frame.f_locals]
        if not called:
            return None
        outermost = called[-1]
        at = next((frame for frame in _outwards(outermost) if _is_users(frame)), outermost)
        stuck_s = self._since(outermost) if self._members.issuperset(_members(outermost.f_locals["group"])) else 0.0
        return Place(f"torch.distributed.{outermost.f_code.co_name} ({_line(at)})", stuck_s)

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


def _members(group: Any) -> list[int]:
    return distributed.get_process_group_ranks(distributed.group.WORLD if group is None else group)


def _is_users(frame: FrameType) -> bool:
    return not any(part in frame.f_code.co_filename for part in _OURS) and "importlib" not in frame.f_code.co_filename


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}, line {frame.f_lineno}"
