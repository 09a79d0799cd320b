"""The documentation is built as a site without a warning: every page has its place, every link and anchor its end."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("material")
_ROOT = Path(__file__).parents[2]


def test_the_site_is_built_without_a_warning_and_asks_nothing_of_other_hosts(tmp_path: Path):
    built = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path)],
        cwd=_ROOT,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert built.returncode == 0, built.stderr
    for page in tmp_path.rglob("*.html"):
        loaded = re.findall(
            r'(?:<script[^>]*src|<img[^>]*src|<link rel="(?:stylesheet|icon)"[^>]*href)="([^"]+)"', page.read_text()
        )
        assert loaded and not [address for address in loaded if "//" in address], page
