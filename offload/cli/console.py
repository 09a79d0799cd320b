"""Printing of a command: its answer goes to stdout, for people as rich shows it, or with ``--json`` as one object."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Annotated, Any

import typer
from rich.console import Console, RenderableType

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object to stdout, and everything else to stderr.")]
"""The option that every command with an answer has, under the name ``json``."""


_LONGEST = 1000
"""Columns of what is no terminal: nobody looks for the end of a word on the next line of a file."""


def show_answer(facts: Any, text: RenderableType, *, to_programs: bool) -> None:
    """Print what a command has found: the facts for programs, or the text for people."""
    if to_programs:
        show_json(facts)
    elif isinstance(text, str):  # as it stands: code and tables are copied from it
        print(text)
    else:
        _show(text)


def _show(text: RenderableType) -> None:
    """Print for people: in colours on a terminal, else as plain text whose lines are as long as they need to be."""
    console = Console(highlight=False, markup=False, emoji=False, width=None if sys.stdout.isatty() else _LONGEST)
    with console.capture() as captured:
        console.print(text)
    print("\n".join(line.rstrip() for line in captured.get().splitlines()))


def teller(*, to_programs: bool) -> Callable[[str], None]:
    """Return a function that prints lines for people on the way to the answer: to stdout, or to stderr where stdout is
    a program's."""
    return functools.partial(print, file=sys.stderr if to_programs else sys.stdout)


def show_json(answer: Any) -> None:
    """Print for programs."""
    print(json.dumps(answer, indent=2))


def show_error(program: str, kind: str, message: str, *, to_programs: bool) -> None:
    """One line on stderr, in the name of ``program``; programs that asked for JSON get an object with the same."""
    line = " ".join(message.split()) or kind
    print(f"{program}: error: {line}", file=sys.stderr, flush=True)
    if to_programs:
        print(json.dumps({"error": kind, "message": line}))
