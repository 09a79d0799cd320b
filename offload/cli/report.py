"""``offload report``."""

from __future__ import annotations

import webbrowser
from pathlib import Path
from typing import Annotated

import typer
from typer import Argument, Option

from offload.cli.console import Json, show_answer


def report(
    context: typer.Context,
    run: Annotated[Path, Argument(metavar="RUN", help="A run directory: what run_dir= named, or --out of a training.")],
    out: Annotated[Path | None, Option(metavar="FILE", help="The page.  [default: RUN/report.html]")] = None,
    open_page: Annotated[bool, Option("--open", help="Show the page in a browser.")] = False,
    json: Json = False,
) -> int:
    """Make a page of a run.

    Loss, times against the bound, waits, memory, a timeline, drives and their wear: one HTML file that needs nothing
    else. A run that is still at work can be looked at, too.
    """
    from offload.run.figures import figures
    from offload.run.page import page
    from offload.run.reading import read_run
    from offload.run.words import words

    found = read_run(run.expanduser())
    file = (out or run / "report.html").expanduser()
    file.write_text(page(found))
    if open_page:
        webbrowser.open(file.resolve().as_uri())
    facts = figures(found)
    show_answer({**facts, "page": str(file)}, f"{words(facts)}\npage: {file}", to_programs=json)
    return 0
