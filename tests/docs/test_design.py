"""The pages name what there is: files, rooms, threads and notes."""

from __future__ import annotations

import ast
import re
from fnmatch import fnmatch
from pathlib import Path

_ROOT = Path(__file__).parents[2]
_FOLDERS = ("offload", "swapper", "aio_ext", "tests", "scripts", "docs")
_DESIGN = _ROOT / "docs" / "design.md"
_ELSEWHERE = {"zero_to_fp32.py"}
"""Files of other projects."""


def _sources() -> list[Path]:
    return [path for floor in ("offload", "swapper", "aio_ext") for path in (_ROOT / floor).rglob("*.py")]


def test_every_file_that_a_page_names_is_there():
    """As it is called from its folder, its room, its floor or the root."""
    there = set()
    for path in (path for folder in _FOLDERS for path in (_ROOT / folder).rglob("*") if path.is_file()):
        parts = path.relative_to(_ROOT).parts
        there |= {"/".join(parts[start:]) for start in range(len(parts))}
    missing = []
    for page in (_ROOT / "README.md", _ROOT / "CHANGELOG.md", *(_ROOT / "docs").rglob("*.md")):
        text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
        for name in re.findall(r"`([\w./*-]+\.(?:py|sh|cpp|h|cu))\b[^`]*`", text):
            if name not in there | _ELSEWHERE and not any(fnmatch(each, name) for each in there):
                missing.append(f"{page.name}: {name}")
    assert not missing


def test_the_design_has_every_room():
    table = _DESIGN.read_text().partition("| room | content |")[2].partition("\n\n")[0]
    named = {
        name for row in table.splitlines() for name in re.findall(r"`([\w./]+)`", row.split("|")[1] if row else "")
    }
    rooms = {
        f"{path.name}/" if path.is_dir() else path.name
        for path in (_ROOT / "offload").iterdir()
        if (path / "__init__.py").is_file() or (path.suffix == ".py" and not path.name.startswith("__"))
    }
    assert named == rooms


def test_the_design_has_every_thread_that_has_a_name():
    text = _DESIGN.read_text()
    names = {
        name
        for path in _sources()
        for name in re.findall(
            r"""(?:Worker\(|name=f?|thread_name_prefix=)"((?:offload|swapper)-[a-z-]+)""", path.read_text()
        )
    }
    assert len(names) > 10
    assert not [name for name in names if f"`{name.rstrip('-')}" not in text]


def test_every_note_that_a_page_cites_is_in_the_sources():
    notes = {
        " ".join(note.split())
        for path in _sources()
        for note in re.findall(r"^\s*(?:# )?\[Note: ([^]]+)\]", path.read_text(), re.M)
    }
    for page in (_ROOT / "docs").rglob("*.md"):
        cited = {" ".join(note.split()) for note in re.findall(r"\[Note: ([^].]+)\]", page.read_text())}
        assert cited <= notes, page


def test_lines_of_the_design_fit_a_terminal():
    """Tables cannot be shorter."""
    lines = _DESIGN.read_text().splitlines()
    assert not [line for line in lines if len(line) > 120 and not line.startswith("|")]


def test_every_call_path_of_the_design_names_functions_that_are_there():
    """``Class.function`` anywhere, and ``_function`` where questions are answered."""
    text = _DESIGN.read_text()
    members: dict[str, set[str]] = {}
    bases: dict[str, list[str]] = {}
    functions = set()
    for path in _sources():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                functions.add(node.name)
            if isinstance(node, ast.ClassDef):
                own = members.setdefault(node.name, set())
                own |= {part.name for part in node.body if isinstance(part, ast.FunctionDef)}
                own |= {target.attr for target in ast.walk(node) if isinstance(target, ast.Attribute)}
                own |= {target.id for target in ast.walk(node) if isinstance(target, ast.Name)}
                bases.setdefault(node.name, []).extend(ast.unparse(base).split("[")[0] for base in node.bases)

    def has(kind: str, name: str) -> bool:
        return name in members.get(kind, ()) or any(has(base, name) for base in bases.get(kind, ()))

    named = set(re.findall(r"`([A-Z]\w+)\.(\w+)(?:\([^`]*\))?`", text))
    known = {(kind, name) for kind, name in named if kind in members}
    answers = text.partition("## Where to look")[2].partition("\n## ")[0]
    assert len(known) > 40 and not [f"{kind}.{name}" for kind, name in known if not has(kind, name)]
    assert not set(re.findall(r"`(_[a-z]\w+)`", answers)) - functions
    assert {kind for kind, _ in re.findall(r"`([A-Z]\w+)\.(\w+)`", answers)} <= members.keys()
