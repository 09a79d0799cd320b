"""What ``transformers`` and ``peft`` expect beside the weights, and which weights they write."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError


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
    if model.can_generate() and getattr(model, "generation_config", None) is not None:
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
