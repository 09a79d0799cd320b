"""``offload explain``: a section of the troubleshooting page."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from typer import Argument

from offload.cli.console import Json, show_json

_PAGES = (
    Path(__file__).with_name("troubleshooting.md"),  # in an installed package
    Path(__file__).parents[2] / "docs" / "troubleshooting.md",
)


def explain(
    name: Annotated[str, Argument(metavar="NAME", help="What stands in the message: (offload explain NAME).")],
    json: Json = False,
) -> int:
    """Print what an error means, what survives it, and what to do."""
    sections = _sections()
    if name not in sections:
        raise typer.BadParameter(f"{name} is none of {', '.join(sections)}", param_hint="NAME")
    if json:
        show_json({"name": name, "text": sections[name]})
    else:
        from rich.markdown import Markdown

        Console().print(Markdown(f"**{name}**\n\n{sections[name]}", hyperlinks=False))
    return 0


def _sections() -> dict[str, str]:
    """The page's text on each error, by the error's name."""
    page = next(page for page in _PAGES if page.is_file()).read_text(encoding="utf-8")
    parts = re.split(r"^(#+ .*)\n", page, flags=re.MULTILINE)[1:]
    headings = zip(parts[::2], parts[1::2], strict=True)
    return {found[1]: text.strip() for line, text in headings if (found := re.fullmatch(r"### (\w+)", line))}
