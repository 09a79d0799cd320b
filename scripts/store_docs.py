#!/usr/bin/env python3
"""Put the table of errors into docs/reliability.md, as it stands in swapper/errors.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import swapper.errors

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
BEGIN = "<!-- errors: made by scripts/store_docs.py from swapper/errors.py -->\n"
END = "<!-- end of errors -->\n"


def errors() -> list[type[swapper.OffloadError]]:
    """Every class of the table, in the order of swapper/errors.py."""
    kinds = [kind for kind in vars(swapper.errors).values() if isinstance(kind, type)]
    return [kind for kind in kinds if issubclass(kind, swapper.OffloadError) and kind.happened]


def errors_markdown() -> str:
    """The table as it stands in the documentation."""
    lines = ["| error | what happened | numbers | what survives | what to do |", "|---|---|---|---|---|"]
    for kind in errors():
        cells = (f"`{kind.__name__}`", kind.happened, kind.numbers, kind.survives, kind.advice)
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def updated(page: str) -> str:
    """The page with the table of today."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + errors_markdown() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
