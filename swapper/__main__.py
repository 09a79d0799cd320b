"""``python -m swapper inspect | scrub | gc PATH``: what is there, its owner, whether it is whole, what is left over."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from swapper import upkeep
from swapper.errors import OffloadError


def main(argv: list[str] | None = None) -> int:
    """Exit status 0: all is well; 1: something is damaged, or could not be looked at; 2: bad arguments."""
    arguments = _arguments(argv)
    commands: dict[str, Callable[[list[Path]], list[dict[str, Any]]]] = {
        "inspect": upkeep.inspect,
        "scrub": upkeep.scrub,
        "gc": upkeep.collect,
    }
    try:
        found = commands[arguments.command](arguments.paths)
    except OffloadError as error:
        if arguments.json:
            print(json.dumps({"error": type(error).__name__, "message": str(error)}))
        else:
            print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return 1
    if arguments.json:
        print(json.dumps(found))
    else:
        _print(found)
    return 1 if any(store.get("damage") for store in found) else 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m swapper", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    for name, text in (
        ("inspect", "list the durable stores on a path: owner, generations, sizes; changes nothing"),
        ("scrub", "read everything of every generation and verify it"),
        ("gc", "remove what dead owners left and no store needs; never touches a store that is in use"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="the paths of a store, in their order")
        command.add_argument("--json", action="store_true", help="print one JSON list")
    return parser.parse_args(argv)


def _print(found: list[dict[str, Any]]) -> None:
    if not found:
        print("nothing there")
    for store in found:
        head, *rest = store.items()
        print(head[1])
        for name, value in rest:
            for line in value if isinstance(value, list) else [value]:
                print(f"  {name:<12}{line:,}" if isinstance(line, int) else f"  {name:<12}{line}")


if __name__ == "__main__":
    sys.exit(main())
