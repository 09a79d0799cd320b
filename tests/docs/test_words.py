"""The project's words: pages for users say each thing in the field's words, and one thing in one word."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RATHER = {
    r"born from files": "loaded from files",
    r"at home in (other|your)": "integrations",
    r"second places?\b": "spare copies",
    r"\b(states?|weights|units?|gradients|bytes|they|it|that|what) rests?\b(?! of)": "is stored, or are",
    r"one part after the other would take": "without overlap",
    r"\*\*(Facts|Choice)\.\*\*": "what it does: so begin pages for contributors",
    r"\blook-?ahead\b": "prefetch",
    r"\bVRAM\b": "GPU memory",
    r"\bSSDs? drives?\b": "SSD",
    r"\b(obviously|simply put|needless to say|please note)\b": "nothing",
    r"\b(the the|of of|to to|is is|and and|in in|a a)\b": "it once",
    r"\be\.g\b|\bi\.e\b|\betc\b": "such as, that is, and so on",
    r"\b(utili[sz]e[sd]?|leverag(e|es|ed|ing))\b": "use",
    r"\bGbytes?\b|\bMbytes?\b|\b(?-i:KB)\b": "GB, MB, kB; GiB, MiB, KiB",
}
"""Words that are not written, and those that stand for them."""

OF_OTHERS = {"outside-table.md", "deepspeed-keys.md", "deepspeed.md", "migration.md", "optimizers.md"}
"""Pages that speak other libraries' words."""

FOR_USERS = (ROOT / "mkdocs.yml").read_text().partition("- Contribute:")[0]
PAGES = sorted({"../README.md", *re.findall(r"[\w/-]+\.md", FOR_USERS)} - OF_OTHERS)


@pytest.mark.parametrize("page", PAGES)
def test_a_page_is_written_in_the_projects_words(page: str):
    prose = re.sub(r"```.*?```|`[^`]*`|\]\([^)]*\)", "", (ROOT / "docs" / page).read_text(), flags=re.DOTALL)
    found = [
        f"{match[0]!r}: rather {word}"
        for pattern, word in RATHER.items()
        for match in re.finditer(pattern, prose, re.I)
    ]
    assert not found
