"""Models of the hub whose shapes are shipped.

``known_models.json`` has the names under which each is known with those on the hub, the fields of their
``config.json``, and the number of parameters that was published. Vision parts are left out.
"""

from __future__ import annotations

import difflib
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_ENDINGS = re.compile(r"-(instruct|chat|it|pt|base|hf|thinking|v\d\.\d|\d{4})$")


@functools.cache
def configs() -> Mapping[str, Mapping[str, Any]]:
    """The fields of every known model, by its name in lower case."""
    return {name: entry["config"] for entry in _entries() for name in entry["names"]}


def config_of(name: str) -> Mapping[str, Any] | None:
    """Return the fields of a model by its name on the hub, with or without its organisation and endings such as
    ``-Instruct``; None if it is not known."""
    return configs().get(_known_as(name))


def hub_name(name: str) -> str:
    """Return the name by which the hub has a model: ``name`` itself, if it has an organisation or is not known. An
    ending of ``name`` stays: it says which of an organisation's models is meant."""
    known_as = _known_as(name)
    if "/" in name or known_as not in configs():
        return name
    on_the_hub: str = next(entry["names"][known_as] for entry in _entries() if known_as in entry["names"])
    return on_the_hub if known_as == _short(name) else f"{on_the_hub.partition('/')[0]}/{name}"


def nearest(name: str) -> list[str]:
    """Names that may have been meant."""
    return difflib.get_close_matches(_short(name), configs(), 3, 0.5)


@functools.cache
def _entries() -> list[Any]:
    return json.loads(Path(__file__).with_name("known_models.json").read_text())  # type: ignore[no-any-return]


def _known_as(name: str) -> str:
    short = _short(name)
    while short not in configs() and (found := _ENDINGS.search(short)):
        short = short[: found.start()]
    return short


def _short(name: str) -> str:
    return name.rpartition("/")[2].lower().removeprefix("meta-")
