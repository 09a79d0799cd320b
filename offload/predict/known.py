"""Models of the hub whose shapes are shipped: ``known_models.json`` has the fields of their ``config.json``, and the
number of parameters that was published. Vision parts are left out."""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ENDINGS = re.compile(r"-(instruct|chat|it|pt|base|hf|thinking|v0\.\d|\d{4})$")


@functools.cache
def configs() -> Mapping[str, Mapping[str, Any]]:
    """The fields of every known model, by its name in lower case."""
    entries = json.loads(Path(__file__).with_name("known_models.json").read_text())
    return {name: entry["config"] for entry in entries for name in entry["names"]}


def config_of(name: str) -> Mapping[str, Any] | None:
    """Return the fields of a model by its name on the hub, with or without its organisation and endings such as
    ``-Instruct``; None if it is not known."""
    short = _short(name)
    while short not in configs() and (found := _ENDINGS.search(short)):
        short = short[: found.start()]
    return configs().get(short)


def nearest(name: str) -> list[str]:
    """Names that may have been meant."""
    return difflib.get_close_matches(_short(name), configs(), 3, 0.5)


def _short(name: str) -> str:
    return name.rpartition("/")[2].lower().removeprefix("meta-")
