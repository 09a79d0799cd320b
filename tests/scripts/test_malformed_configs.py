"""A slice of ``scripts/malformed_configs.py``, and faults that it must find."""

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import malformed_configs

from offload import OffloadConfig, OffloadError, option_values


@pytest.mark.parametrize("seed", [1, 2])
def test_every_malformed_configuration_ends_in_one_clear_error(seed: int):
    messages, faults = malformed_configs.run(seed, 150)
    assert faults == []
    assert len(messages) > 50 and 5 < len(messages["passed"]) < 75


@pytest.mark.parametrize(
    ("break_it", "fault"),
    [
        (lambda *_: TypeError("planted"), "TypeError instead of an OffloadError"),
        (lambda *_: OffloadError("two\nlines"), "more than one line"),
        (lambda *_: OffloadError("no"), "is named"),
        (lambda *_: OffloadError("x" * 401), "too long"),
    ],
)
def test_an_error_that_is_not_clear_is_found(break_it, fault: str, monkeypatch: pytest.MonkeyPatch):
    def refuse(*_: object) -> None:
        raise break_it()

    monkeypatch.setattr(option_values, "as_flag", refuse)
    assert any(fault in line for line in malformed_configs.run(1, 20)[1])


def test_silence_is_found(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(OffloadConfig, "_check", lambda *_: None)
    monkeypatch.setattr(OffloadConfig, "_check_optimizer", lambda *_: None)
    monkeypatch.setattr(malformed_configs, "OffloadEngine", lambda *_, **__: malformed_configs.tempfile.TemporaryFile())
    assert any("nothing was said" in line for line in malformed_configs.run(1, 20)[1])
