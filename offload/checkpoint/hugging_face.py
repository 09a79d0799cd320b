"""Files that ``transformers`` and ``peft`` expect beside the weights, and the weights that they write."""

from __future__ import annotations

import copy
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError

CONFIG, GENERATION_CONFIG = "config.json", "generation_config.json"

_DTYPE = "dtype"
"""Of the weights, in ``config.json``."""


def is_transformers_model(model: nn.Module) -> bool:
    """It has a config, and is a class that ``from_pretrained`` loads."""
    return callable(getattr(model, "save_pretrained", None)) and hasattr(getattr(model, "config", None), "to_json_file")


def is_peft_model(model: nn.Module) -> bool:
    """It is a model that ``peft`` has wrapped: only its adapter is saved."""
    return any(kind.__module__.startswith("peft.") for kind in type(model).__mro__) and hasattr(model, "peft_config")


def adapter_of(model: Any, state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The part of the state dict that ``PeftModel.save_pretrained`` writes, under the names that it gives it.

    Raises ``ConfigError`` if there are several adapters.
    """
    from peft import get_peft_model_state_dict

    name = _adapter_name(model)
    found = get_peft_model_state_dict(model, state_dict=dict(state_dict), adapter_name=name)
    return {key: value for key, value in found.items() if isinstance(value, torch.Tensor)}


def write_adapter_config(model: Any, folder: Path) -> None:
    """Write ``adapter_config.json``."""
    config = copy.deepcopy(model.peft_config[_adapter_name(model)])
    if config.base_model_name_or_path is None:
        config.base_model_name_or_path = getattr(model.get_base_model(), "name_or_path", None) or None
    config.inference_mode = True
    base = type(model.get_base_model())
    mapping = {"base_model_class": base.__name__, "parent_library": base.__module__}
    config.save_pretrained(folder, auto_mapping_dict=None if config.task_type is not None else mapping)


def configs_of(model: Any) -> dict[str, dict[str, Any]]:
    """The content of ``config.json`` and ``generation_config.json``, by their names, for a model that has them. None of
    a model with an adapter, whose weights no config loads."""
    config = getattr(model, "config", None)
    if config is None or is_peft_model(model) or getattr(model, "_hf_peft_config_loaded", False):
        return {}
    if is_transformers_model(model):
        configs = {CONFIG: {**_as_json(config), "architectures": [type(model).__name__]}}
        if _generates(model):
            configs[GENERATION_CONFIG] = _as_json(model.generation_config)
        return configs
    try:
        return {CONFIG: _as_json(config)}
    except (AttributeError, TypeError, ValueError):  # it is nothing that JSON can say
        return {}


def write_saved_configs(configs: Mapping[str, Mapping[str, Any]], folder: Path, dtype: torch.dtype) -> None:
    """Write what ``configs_of`` gave, with the dtype of the weights beside it."""
    for name, content in configs.items():
        changed = {_DTYPE: str(dtype).removeprefix("torch.")} if name == CONFIG and "architectures" in content else {}
        text = json.dumps({**content, **changed}, indent=2, sort_keys=True)
        (folder / name).write_text(text + "\n", encoding="utf-8")


def _as_json(config: Any) -> dict[str, Any]:
    """Return what the config would write. Raises what it raises, and ``ValueError`` for what is no JSON object."""
    text = config.to_json_string() if hasattr(config, "to_json_string") else json.dumps(config.to_dict())
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError("the config is no JSON object")
    return content


def _generates(model: Any) -> bool:
    return bool(model.can_generate()) and getattr(model, "generation_config", None) is not None


def write_configs(model: Any, folder: Path, dtype: torch.dtype) -> None:
    """Write ``config.json``, and ``generation_config.json`` of models that generate. The model's own config stays.

    Raises ``ConfigError`` for a model with an adapter that ``transformers`` itself has put in.
    """
    if getattr(model, "_hf_peft_config_loaded", False):
        raise ConfigError(
            "the model has an adapter of model.add_adapter(): use model.save_pretrained(dir), or make it a model of "
            "peft (get_peft_model)"
        )
    config = copy.deepcopy(model.config)
    config.dtype = str(dtype).removeprefix("torch.")
    config.architectures = [type(model).__name__]
    config.save_pretrained(folder)
    if _generates(model):
        model.generation_config.save_pretrained(folder)


def not_saved(model: nn.Module) -> set[str]:
    """Names that a model of ``transformers`` leaves out of its files."""
    return set(getattr(model, "_keys_to_ignore_on_save", None) or ())


def tied_to_others(model: nn.Module) -> set[str]:
    """Names that a model of ``transformers`` ties to others when it is loaded."""
    return set(getattr(model, "all_tied_weights_keys", None) or ())


def _adapter_name(model: Any) -> str:
    names = list(model.peft_config)
    if len(names) != 1:
        raise ConfigError(
            f"the model has {len(names)} adapters ({', '.join(names)}), and save_model writes one: use "
            "model.save_pretrained(dir)"
        )
    return str(names[0])
