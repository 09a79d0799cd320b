#!/usr/bin/env python3
"""The page of methods and commands, docs/reference.md, from their docstrings and options."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

import offload
from offload.cli.app import make_app

PAGE = Path(__file__).resolve().parent.parent / "docs" / "reference.md"

_ENGINE = "OffloadEngine"
_OTHERS = (
    "deferred_init",
    "attention_in_tiles",
    "cross_entropy_in_tiles",
    "in_tiles",
    "LiveLine",
    "TensorBoard",
    "Prometheus",
    "Observer",
    "StepRecord",
    "Plan",
    "Report",
)
_DOORS = {
    "offload.integrations.transformers": ("OffloadTrainer", "OffloadTrainerMixin"),
    "offload.integrations.accelerate": ("OffloadAccelerator",),
    "offload.integrations.lightning": ("OffloadStrategy",),
}
_HEAD = """\
# Methods and commands

<!-- made by scripts/reference.py from docstrings -->

The options of the engine are on a page of their own: [Configuration](configuration.md). The errors are in
[Troubleshooting](troubleshooting.md), and in `offload explain NAME`.
"""


def page() -> str:
    """The page as it must be now."""
    parts = [_HEAD.rstrip(), "## The engine", *_of_class(getattr(offload, _ENGINE), "engine")]
    parts += ["## Beside it"]
    for name in _OTHERS:
        parts += _entry(getattr(offload, name))
    parts += ["## In other trainers"]
    for module, names in _DOORS.items():
        for name in names:
            found = getattr(importlib.import_module(module), name)
            parts += [f"### {name}", f"`from {module} import {name}`", _text(found)]
    parts += ["## The command line", *_commands()]
    return "\n\n".join(part for part in parts if part) + "\n"


def _of_class(kind: type, variable: str) -> Iterator[str]:
    """The class and its public methods, in the order of the source."""
    yield _text(kind)
    for name, member in vars(kind).items():
        function = member.__func__ if isinstance(member, classmethod) else member
        if isinstance(member, property):
            yield f"### {variable}.{name}"
            yield _text(member)
        elif name == "__call__" or (callable(function) and not name.startswith("_")):
            owner = kind.__name__ if isinstance(member, classmethod) else variable
            called = owner if name == "__call__" else f"{owner}.{name}"
            yield f"### {called}()"
            yield f"`{called}{_signature(function)}`"
            yield _text(function)


def _entry(found: Any) -> Iterator[str]:
    yield f"### {found.__name__}"
    if not hasattr(found, "__dataclass_fields__"):
        yield f"`{found.__name__}{_signature(found.__init__ if isinstance(found, type) else found)}`"
    yield _text(found)


def _signature(function: Any) -> str:
    """As it is written, without ``self``, ``cls`` and what is returned."""
    signature = inspect.signature(function)
    kept = [each for name, each in signature.parameters.items() if name not in ("self", "cls")]
    if len(kept) > 8:  # the options of the engine, which have their page
        kept = [each for each in kept if each.kind is not inspect.Parameter.KEYWORD_ONLY or each.name == "model_kwargs"]
        kept.append(inspect.Parameter("options", inspect.Parameter.VAR_KEYWORD))
    text = str(signature.replace(parameters=kept, return_annotation=inspect.Signature.empty))
    return text.replace("'", "").replace("|", "or")


def _text(found: Any) -> str:
    """The docstring in Markdown."""
    text = inspect.getdoc(found) or ""
    return text.replace("``", "`")


def _commands() -> Iterator[str]:
    group: Any = typer.main.get_command(make_app())
    for name, command in group.commands.items():
        subcommands = getattr(command, "commands", {})
        for path, each in {f"{name} {inner}": one for inner, one in subcommands.items()}.items() or [(name, command)]:
            yield f"### offload {path}"
            yield _text(each.callback)
            rows = [_option(each, parameter) for parameter in each.params]
            yield "| option | default | |\n|---|---|---|\n" + "\n".join(rows)


def _option(command: Any, parameter: Any) -> str:
    names = ", ".join(f"`{name}`" for name in getattr(parameter, "opts", [])) or f"`{parameter.name}`"
    if isinstance(parameter, typer.core.TyperArgument):
        names = f"`{parameter.metavar or parameter.name.upper()}`"
    default = parameter.default
    shown = "" if default in (None, False, ()) or callable(default) else f"`{default}`"
    text = re.sub(r"\s+", " ", parameter.help or "").replace("|", "or")
    return f"| {names} | {shown} | {text} |"


if __name__ == "__main__":
    import _written_page

    sys.exit(_written_page.main(__doc__, PAGE, page))
