"""Where a step can be interrupted: ``interrupts.py`` watches what it executes."""

from __future__ import annotations

import contextlib
import dis
import os
import re
import signal
import sys
import threading
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import offload.engine

ROOT = Path(offload.engine.__file__).parents[1]
OURS = tuple(f"{ROOT / name}{os.sep}" for name in ("offload", "swapper", "aio_ext"))
SIMULATED = f"{ROOT / 'offload' / 'testing'}{os.sep}"
"""What stands for hardware here: nothing interrupts that in the middle."""

LIBRARY = (threading.__file__, contextlib.__file__)
"""Of the standard library: what our locks and context managers are made of."""


class Place(NamedTuple):
    """The beginning of a line; among ``points``, of the instruction at ``offset``."""

    path: str
    line: int
    offset: int = -1

    def __str__(self) -> str:
        return f"{self.path}:{self.line}" + (f" (+{self.offset})" if self.offset >= 0 else "")


class Target(NamedTuple):
    """The interrupt comes when ``step`` comes to ``place`` for the ``count``-th time, on this rank."""

    step: int
    place: Place
    count: int
    rank: int


class Watch:
    """Interrupts each step that has a target, once."""

    def __init__(self, targets: Sequence[Target], num_recorded: int, points: bool, library: bool) -> None:
        """``points``: at instructions, not at lines. ``library``: also in what ours calls there."""
        self.counts: defaultdict[int, Counter[Place]] = defaultdict(Counter)
        """How often the steps with targets, and the first ``num_recorded``, have come to each place."""
        self.stacks: dict[int, list[str]] = {}
        """Of each step that was interrupted: functions of ours, the innermost one first."""
        self._targets = {target.step: target for target in targets}
        self._num_recorded = num_recorded
        self._points = points
        self._library = LIBRARY if library else ()
        self._local = self._point if points else self._line
        self._step = 0

    @contextlib.contextmanager
    def over(self, step: int) -> Iterator[None]:
        """Watch what is done within; after its interrupt a step is not watched again."""
        self._step = step
        wanted = step < self._num_recorded or (step in self._targets and step not in self.stacks)
        sys.settrace(self._call if wanted else None)
        try:
            yield
        finally:
            sys.settrace(None)

    def _call(self, frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_filename in self._library:
            if frame.f_back is None or frame.f_back.f_trace is None:
                return None
        elif not _is_ours(frame.f_code.co_filename) or _is_within_hardware(frame):
            return None
        if self._points:
            frame.f_trace_opcodes, frame.f_trace_lines = True, False
            self._come_to(Place(_path(frame.f_code), frame.f_lineno, frame.f_lasti), frame)
        return self._local

    def _line(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "line" and frame.f_lasti not in _exits(frame.f_code):
            self._come_to(Place(_path(frame.f_code), frame.f_lineno), frame)
        return self._line

    def _point(self, frame: FrameType, event: str, argument: object) -> Any:
        if event == "opcode" and frame.f_lasti in handling_points(frame.f_code):
            self._come_to(Place(_path(frame.f_code), frame.f_lineno, frame.f_lasti), frame)
        return self._point

    def _come_to(self, place: Place, frame: FrameType) -> None:
        step = self._step
        self.counts[step][place] += 1
        target = self._targets.get(step)
        if target is not None and target.place == place and target.count == self.counts[step][place]:
            self.stacks[step] = _stack(frame)
            sys.settrace(None)
            signal.raise_signal(signal.SIGINT)  # its handler runs before this returns


@cache
def _is_ours(filename: str) -> bool:
    return filename.startswith(OURS)


def _is_within_hardware(frame: FrameType | None) -> bool:
    """The code runs in the name of what stands for hardware: the innermost frame of ours that calls it is not
    watched."""
    called = frame
    while frame is not None and (frame is called or not _is_ours(frame.f_code.co_filename)):
        if frame.f_code.co_filename.startswith(SIMULATED):
            return True
        frame = frame.f_back
    return frame is not None and frame.f_trace is None


@cache
def _path(code: CodeType) -> str:
    path = Path(code.co_filename)
    return str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else path.name


def _stack(frame: FrameType | None) -> list[str]:
    found = []
    while frame is not None:
        if _is_ours(frame.f_code.co_filename):
            found.append(f"{frame.f_code.co_name} ({_path(frame.f_code)}:{frame.f_lineno})")
        frame = frame.f_back
    return found


_FILLERS = ("NOP", "POP_BLOCK", "SWAP", "ROT_TWO", "EXTENDED_ARG", "NOT_TAKEN")


@cache
def _exits(code: CodeType) -> frozenset[int]:
    """Where the interpreter comes back to the line of a ``with`` to leave it: it looks for signals before and after
    what it calls there, not here, where the exit would be missed."""
    instructions = list(dis.get_instructions(code))
    found = set()
    for start, instruction in enumerate(instructions):
        rest = [each for each in instructions[start : start + 8] if each.opname not in _FILLERS][:4]
        names = " ".join(f"{each.opname} {each.argval}" for each in rest)
        if re.match(r"LOAD_CONST None (LOAD_CONST None LOAD_CONST None|DUP_TOP \S+ DUP_TOP \S+) (PRECALL|CALL)", names):
            found.add(instruction.offset)
    return frozenset(found)


@cache
def handling_points(code: CodeType) -> frozenset[int]:
    """The instructions before which CPython handles signals: those after calls and after jumps back; not those that an
    exception of the call itself would not pass. It does so, too, where a function begins and a generator goes on: that
    is where their tracing begins."""
    instructions = [each for each in dis.get_instructions(code) if each.opname != "CACHE"]
    protected = getattr(dis.Bytecode(code), "exception_entries", ())

    def handler(offset: int) -> list[int]:
        return [entry.target for entry in protected if entry.start <= offset < entry.end]

    found = set()
    for before, instruction in zip([None, *instructions], instructions, strict=False):
        if before is not None and before.opname.startswith("CALL") and before.opname != "CALL_INTRINSIC_1":
            if instruction.offset not in _exits(code) and handler(before.offset) == handler(instruction.offset):
                found.add(instruction.offset)
        elif before is not None and before.opname.startswith("JUMP_BACKWARD") and isinstance(before.argval, int):
            found.add(before.argval)
    return frozenset(found)
