"""The README as a package index shows it, which has no files beside it: pictures go, and links to files become words.

The build calls it (``[tool.scikit-build]`` in pyproject.toml).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

_PICTURE = re.compile(r"!\[[^]]*\]\([^)]*\)\n\n")
_LINK_TO_FILE = re.compile(r"\[([^]]+)\]\((?!https?:)[^)]+\)")


def dynamic_metadata(field: str, settings: Mapping[str, object]) -> dict[str, str]:
    """What stands in the metadata of the package. The build runs in the project's root."""
    text = Path("README.md").read_text(encoding="utf-8")
    return {"content-type": "text/markdown", "text": _LINK_TO_FILE.sub(r"\1", _PICTURE.sub("", text))}
