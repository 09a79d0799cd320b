"""Sources of a ``ds_config``: a dict, a JSON text, a file, or ``args.deepspeed_config``."""

from __future__ import annotations

import copy
import json
import os
from collections.abc import Mapping
from typing import Any

from offload import option_values
from offload.errors import ConfigError


def read(config: object) -> dict[str, Any]:
    """The configuration as a dict of its own. Raises ``ConfigError`` for a file or text that is not one."""
    if isinstance(config, Mapping):
        return copy.deepcopy(dict(config))
    if not isinstance(config, (str, os.PathLike)):
        option_values.refuse("config", "a dict, or the path of a JSON file", config)
    if isinstance(config, str) and config.lstrip().startswith("{"):
        return _parse(config, "config")
    path = option_values.as_path("config", config)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, ValueError) as error:
        raise ConfigError(f"config: {_name(str(path))} cannot be read: {_said(error)}") from None
    return _parse(text, str(path))


def given(args: object, config: object, config_params: object) -> object:
    """The one configuration among those that ``initialize`` can be given. Raises ``ConfigError`` for none or two."""
    of_args = args.get("deepspeed_config") if isinstance(args, Mapping) else getattr(args, "deepspeed_config", None)
    found = {
        name: value
        for name, value in {"config": config, "config_params": config_params, "args.deepspeed_config": of_args}.items()
        if value is not None
    }
    if len(found) != 1:
        what = " and ".join(found) if found else "none"
        raise ConfigError(f"a configuration is needed, as config= or as args.deepspeed_config, and there is: {what}")
    return next(iter(found.values()))


def _parse(text: str, where: str) -> dict[str, Any]:
    try:
        found = json.loads(text, object_pairs_hook=_once)
    except (json.JSONDecodeError, RecursionError) as error:
        raise ConfigError(f"{_name(where)} is no JSON: {_said(error)}") from None
    if not isinstance(found, dict):
        raise ConfigError(f"{_name(where)} holds {option_values.shown(found)}, and not an object in braces, {{...}}")
    return found


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of JSON. Raises ``ConfigError`` if a key is there twice."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"key {option_values.shown(key)} is given twice in one object: leave one out")
        found[key] = value
    return found


def _name(where: str) -> str:
    return where if len(where) < 120 else f"...{where[-110:]}"


def _said(error: Exception) -> str:
    text = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
    return " ".join(text.split()) or type(error).__name__
