#!/usr/bin/env python3
"""Put the table of errors into docs/reliability.md, as it stands in swapper/errors.py."""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from swapper.errors import errors_markdown

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reliability.md"
BEGIN = "<!-- errors: made by scripts/store_docs.py from swapper/errors.py -->\n"
END = "<!-- end of errors -->\n"


def updated(page: str) -> str:
    """The page with the table of today."""
    before, rest = page.split(BEGIN)
    return before + BEGIN + errors_markdown() + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(updated(PAGE.read_text()))
