"""``offload doctor``."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text
from typer import Argument

from offload.cli.console import Json, show_answer

if TYPE_CHECKING:
    from offload.doctor import Section, Status

_STYLES = {"GOOD": "green", "BETTER": "yellow", "BROKEN": "bold red"}


def doctor(
    context: typer.Context,
    paths: Annotated[
        list[Path] | None,
        Argument(metavar="PATH", show_default="the current directory", help="Directories on the drives for nvme_path."),
    ] = None,
    json: Json = False,
) -> int:
    """Look at this machine, and say what repairs it.

    Looks at native parts, io_uring, memory, GPUs, and at the storage under each PATH, where it writes and reads a file
    without a name for a second. Exit status 1 if something is broken.
    """
    from offload.doctor import Status, examine

    sections = examine([path.expanduser().absolute() for path in paths or [Path()]], context.obj.check)
    show_answer(_facts(sections), _lines(sections), to_programs=json)
    return 1 if _counts(sections)[Status.BROKEN] else 0


def _facts(sections: Sequence[Section]) -> dict[str, Any]:
    counts = _counts(sections)
    return {
        "findings": [
            {"section": section.title, **asdict(finding), "status": finding.status.value}
            for section in sections
            for finding in section.findings
        ],
        "counts": {status.value: count for status, count in counts.items()},
    }


def _lines(sections: Sequence[Section]) -> Group:
    """A line a finding, aligned across sections, and the repair under it."""
    width = max(len(finding.subject) for section in sections for finding in section.findings)
    parts: list[RenderableType] = []
    for section in sections:
        table = Table.grid(padding=(0, 2))
        table.add_column(width=len("  could be better"))
        table.add_column(width=width)
        table.add_column()
        for finding in section.findings:
            status = Text(f"  {finding.status.value}", style=_STYLES[finding.status.name])
            table.add_row(status, finding.subject, finding.says)
            if finding.repair:
                table.add_row("", "", Text(f"-> {finding.repair}", style="cyan"))
        parts += [Text(section.title, style="bold"), table]
    counts = ", ".join(f"{count} {status.value}" for status, count in _counts(sections).items())
    return Group(*parts, Text(f"\n{counts}"))


def _counts(sections: Sequence[Section]) -> dict[Status, int]:
    from offload.doctor import Status

    counts = Counter(finding.status for section in sections for finding in section.findings)
    return {status: counts[status] for status in Status}
