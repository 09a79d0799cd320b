"""Each kind of error has a heading in the troubleshooting page, and its messages point there."""

from __future__ import annotations

import importlib
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from offload import BudgetError, ConfigError, StorageFull, cli
from swapper import OffloadError

ROOT = Path(__file__).parents[2]


def kinds(base: type[OffloadError]) -> Iterator[type[OffloadError]]:
    """``base``, and every class of the packages that is derived from it."""
    yield base
    for kind in base.__subclasses__():
        if kind.__module__.partition(".")[0] in ("offload", "swapper"):
            yield from kinds(kind)


def import_errors() -> None:
    """Import every module that derives an error from another."""
    for path in [*(ROOT / "offload").rglob("*.py"), *(ROOT / "swapper").rglob("*.py")]:
        if re.search(r"^class \w+\((\w*Error|Store\w+)\b", path.read_text(), re.MULTILINE):
            importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def explained(capsys: pytest.CaptureFixture[str], name: str) -> str:
    assert cli.main(["explain", name, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["name"] == name
    return answer["text"]


def test_every_error_that_points_to_its_heading_has_one(capsys: pytest.CaptureFixture[str]):
    import_errors()
    names = {kind.__name__ for kind in kinds(OffloadError) if kind.explained}
    assert {"BudgetError", "DriverError", "NonFiniteGradient", "StorageCorrupt", "TorchUnsupported"} <= names
    for name in sorted(names):
        text = explained(capsys, name)
        parts = re.findall(r"^\*\*(.*?)\*\*", text, re.MULTILINE)
        assert parts[:3] == ["What it means.", "What survives.", "What to do."], name


def test_messages_point_to_their_heading_unless_they_say_all():
    assert str(StorageFull("Full.")).endswith("give another path. (offload explain StorageFull)")
    assert str(BudgetError("Too small.", 1)) == "Too small. (offload explain BudgetError)"
    assert str(ConfigError("lr must be a number.")) == "lr must be a number."
    assert str(OffloadError("The engine is closed.")) == "The engine is closed."


def test_a_section_is_printed_for_people(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["explain", "StorageFull"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("StorageFull") and "Free some space" in printed
    assert "StorageIOError" not in printed and "**" not in printed


def test_an_unknown_name_is_answered_by_the_names_that_there_are(capsys: pytest.CaptureFixture[str]):
    assert cli.main(["explain", "StorageFul"]) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.count("\n") == 1
    assert "StorageFul is none of ConfigError, BudgetError" in printed.err and "OffloadError" in printed.err
