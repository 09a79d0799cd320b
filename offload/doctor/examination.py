"""All checks, in the order in which they are told. A check that fails by itself becomes a finding."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from offload.doctor import device, memory, software, storage
from offload.doctor.finding import Finding, better

Check = Callable[[], Iterator[Finding]]

_OF_THE_MACHINE: dict[str, Sequence[Check]] = {
    "software": software.CHECKS,
    "memory": memory.CHECKS,
    "device": device.CHECKS,
}


@dataclass(frozen=True)
class Section:
    """Findings on one part of the machine, or of the storage under one path."""

    title: str
    findings: tuple[Finding, ...]


def examine(paths: Sequence[Path], check: Callable[[], None]) -> list[Section]:
    """Look at the machine and at the storage under each of ``paths``, which takes about a second each.

    Makes files without a name on the paths, and leaves nothing behind. Raises nothing but what ``check`` raises, which
    is called before each check.
    """
    sections = [_section(title, checks, check) for title, checks in _OF_THE_MACHINE.items()]
    for path in paths:
        checks = [partial(each, path) for each in storage.checks_of(path)]
        sections.append(_section(f"storage {path}", checks, check))
    return sections


def _section(title: str, checks: Sequence[Check], check: Callable[[], None]) -> Section:
    findings: list[Finding] = []
    for each in checks:
        check()
        findings += _found(each)
    return Section(title, tuple(findings))


def _found(check: Check) -> list[Finding]:
    try:
        return list(check())
    except Exception as error:
        name = getattr(check, "func", check).__name__.replace("_", " ")
        message = " ".join(f"{type(error).__name__}: {error}".split())
        return [better(name, f"it could not be checked: {message}")]
