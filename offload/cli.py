"""The command ``offload``: its subcommands, how it is stopped, and how errors reach the user.

Nothing heavy is imported before the arguments are understood. Exit status: 0 done, 1 fault, 2 bad input,
128 + signal when stopped.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from types import FrameType
from typing import Any, NoReturn

from offload.checkpoint.command import add_export, add_inspect
from offload.compat.command import add_config
from offload.train.arguments import add_train

_STOPPING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Ctrl-C, a request of the system, and the terminal that goes away."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line, told in the name of the subcommand they belong to."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unknown arguments: {' '.join(unknown)}")
        return parsed, unknown


class Stopped(BaseException):
    """The user or the system wants the program to end. Not an ``Exception``: nothing on the way may swallow it."""


class Signals:
    """Within ``with``, turns a signal to stop into ``Stopped`` in the main thread. A second one ends the process."""

    def __init__(self) -> None:
        self.received: int | None = None
        self._handlers: dict[int, Any] = {}

    def __enter__(self) -> Signals:
        self._handlers = {number: signal.signal(number, self._handle) for number in _STOPPING}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._handlers.items():
            signal.signal(number, handler)

    def check(self) -> None:
        """Raise ``Stopped`` if a signal has come: it may have hit a place that swallows exceptions (``__del__``)."""
        if self.received is not None:
            raise Stopped

    def _handle(self, number: int, frame: FrameType | None) -> None:
        self.received = number
        for each in self._handlers:
            signal.signal(each, signal.SIG_DFL)
        raise Stopped


def make_parser() -> argparse.ArgumentParser:
    """The parser of all subcommands; each sets ``run``, a function of the parsed arguments and ``Signals.check``."""
    parser = Parser(prog="offload", description="Train models that do not fit into memory.", allow_abbrev=False)
    subparsers = parser.add_subparsers(required=True, metavar="COMMAND", parser_class=Parser)
    add_train(subparsers)
    add_inspect(subparsers)
    add_export(subparsers)
    add_config(subparsers)
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``sys.argv`` or the given arguments; returns the exit status."""
    program = "offload"
    signals = Signals()
    try:
        with signals:
            parsed = make_parser().parse_args(arguments)
            program = parsed.program
            status: int = parsed.run(parsed, signals.check)
            return status
    except Stopped:
        number = signal.Signals(signals.received or signal.SIGINT)
        print(f"{program}: stopped by {number.name}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(128 + number)  # all that is ours is closed; the interpreter would take a second to take torch apart
