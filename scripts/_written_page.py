"""The command line of a script that makes a page of the documents from docstrings."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from pathlib import Path


def main(what: str | None, path: Path, page: Callable[[], str]) -> int:
    """Write the page with ``--write``, else say whether it is up to date. Returns the exit status."""
    parser = argparse.ArgumentParser(description=what)
    parser.add_argument("--write", action="store_true", help="write the page; else say whether it is up to date")
    if parser.parse_args().write:
        path.write_text(page())
        return 0
    if path.read_text() == page():
        return 0
    print(f"{path}: not that of the docstrings; run {Path(sys.argv[0]).name} --write", file=sys.stderr)
    return 1
