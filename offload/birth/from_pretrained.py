"""A model of ``transformers`` as its ``from_pretrained`` would build it, without memory, and where its weights are."""

from __future__ import annotations

import contextlib
import copy
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offload.birth.initialise import deferred_init
from offload.birth.weights import Weights
from offload.errors import ConfigError
from swapper import OffloadError

_FOR_HUB = ("revision", "token", "cache_dir", "local_files_only", "force_download")
_IN_MEMORY = {
    "device_map": "the engine's budgets say where weights rest",
    "quantization_config": "the files are read as they are; torchao quantises a model in memory",
    "state_dict": "give the directory with the weights",
    "adapter_kwargs": "an adapter is peft_config=",
    "key_mapping": "register it (transformers.conversion_mapping.register_checkpoint_conversion_mapping)",
    "output_loading_info": "names that do not fit are in a warning",
}
"""Options of ``from_pretrained`` that are refused, and why."""

_READ = ("awq", "bitsandbytes", "compressed-tensors", "fp8", "gptq", "mxfp4")
"""Methods of quantisation, as configs name them, of whose files some are read in place (``stored_quantised.py``)."""


def build(
    model_class: Any, name: str | os.PathLike[str], options: Mapping[str, Any], peft_config: Any, *, trains: bool
) -> tuple[Any, Path]:
    """The model, in eval mode, and its weights: a directory, or a GGUF file.

    ``model_class`` is a model or auto class, ``name`` a directory or the name of a repository on the hub, ``options``
    are of ``from_pretrained``. ``peft_config`` is of the adapter to put in; None is none. What is not trained is
    frozen: the base of an adapter, and everything without ``trains``. Raises ``ConfigError`` for what cannot be
    streamed; what ``transformers`` raises for a config that it does not know.
    """
    options = dict(options)
    for option, why in _IN_MEMORY.items():
        if options.get(option) is not None:
            raise ConfigError(
                f"model_kwargs: {option} is not taken here: {why}. Or load the model in memory "
                f"({model_class.__name__}.from_pretrained) and make the engine of it."
            )
    hub = {key: options.pop(key) for key in _FOR_HUB if key in options}
    gguf_file = options.get("gguf_file")
    directory = Path(name).expanduser()
    if not directory.is_dir():
        directory = _downloaded(name, ["*.json", "*.safetensors", "*.py"] if gguf_file is None else [gguf_file], hub)
    weights = directory if gguf_file is None else directory / gguf_file
    if gguf_file is not None:
        _check_gguf(weights)
    given = options.pop("config", None)
    dtype = options.pop("dtype", options.pop("torch_dtype", "auto"))
    trusted = {"trust_remote_code": options.pop("trust_remote_code")} if "trust_remote_code" in options else {}
    generation = options.pop("generation_config", None)
    built = {key: options.pop(key) for key in ("attn_implementation", "experts_implementation") if key in options}
    config, rest = _config(model_class, directory, given, {**options, **trusted})
    _take_out_quantisation(config, directory)
    if dtype is None or (dtype == "auto" and getattr(config, "dtype", None) is None):
        dtype = _dtype_in(directory) if dtype == "auto" and gguf_file is None else torch.get_default_dtype()
    config.name_or_path = str(name)
    make = getattr(model_class, "from_config", None) or model_class._from_config
    with torch.device("meta"):
        model = make(config, **({} if dtype == "auto" else {"dtype": dtype}), **built, **rest, **trusted)
    _keep_dtypes(model)
    model.eval()
    if model.can_generate():
        if generation is not None:
            model.generation_config = generation
        elif gguf_file is None:
            model.generation_config = _generation_config(directory)
    if peft_config is not None:
        model = deferred_init(_adapted, model, peft_config)
    return model if trains else model.requires_grad_(False), weights


def _take_out_quantisation(config: Any, directory: Path) -> None:
    """Remove the quantisation from ``config``: the model computes with ordinary weights, and the files say themselves
    that they are quantised. Raises ``ConfigError`` for methods of which no file is read."""
    for part in {id(part): part for part in (config, config.get_text_config())}.values():
        found = getattr(part, "quantization_config", None)
        if found is None:
            continue
        method = found["quant_method"] if isinstance(found, dict) else found.quant_method
        method = str(getattr(method, "value", method))
        if method not in _READ:
            raise ConfigError(
                f"the weights in {directory} are quantised by {method}, which is not read; {', '.join(_READ)} are. "
                "Load the model in memory, dequantise it, save it, and give that."
            )
        del part.quantization_config


def _adapted(model: Any, peft_config: Any) -> Any:
    """The model with a new adapter in its dtype, its other weights frozen. To be recorded."""
    try:
        from peft import get_peft_model
    except ImportError:
        raise ConfigError("peft_config: peft is missing, which makes the adapter (pip install peft)") from None
    return get_peft_model(model, peft_config, autocast_adapter_dtype=False)


def _keep_dtypes(model: Any) -> None:
    """Weights that the class wants in fp32 although the model is in 16 bits, as ``from_pretrained`` has them."""
    patterns = model._get_dtype_plan(model.dtype) if hasattr(model, "_get_dtype_plan") else {}
    if not patterns:
        return
    from transformers.core_model_loading import build_glob_alternation

    any_pattern, pattern_of, _ = build_glob_alternation(list(patterns))
    for name, parameter in model.named_parameters():
        match = any_pattern.search(name)
        if match is not None and match.lastgroup is not None and parameter.is_floating_point():
            parameter.data = parameter.data.to(patterns[pattern_of[match.lastgroup]])


def _check_gguf(path: Path) -> None:
    """Raise ``WeightsError`` for a damaged file, before others parse it, ``ConfigError`` if nobody can."""
    Weights(path).close()
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise ConfigError(
            "gguf_file: gguf is missing, by which transformers reads the model's config (pip install gguf)"
        ) from None


def _downloaded(name: str | os.PathLike[str], patterns: list[str], options: Mapping[str, Any]) -> Path:
    try:
        from huggingface_hub import snapshot_download
    except ImportError:
        raise ConfigError(
            f"{name} is not a directory, and huggingface_hub, which could download it, is missing"
        ) from None
    try:
        found = snapshot_download(os.fspath(name), allow_patterns=patterns, **options)
    except (OSError, ValueError) as error:  # a connection, a name that cannot be one
        raise OffloadError(f"{name} is not a directory, and was not found on the hub: {error}") from error
    return Path(found)


def _config(model_class: Any, directory: Path, given: Any, options: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The config, with those options that it knows, and the others."""
    from transformers import AutoConfig, PreTrainedConfig

    if isinstance(given, PreTrainedConfig):
        return copy.deepcopy(given), {key: value for key, value in options.items() if key != "gguf_file"}
    config_class = getattr(model_class, "config_class", None) or AutoConfig
    try:
        found, rest = config_class.from_pretrained(given or directory, return_unused_kwargs=True, **options)
    except (ValueError, KeyError, TypeError) as error:  # the latter for fields of GGUF that are missing
        if options.get("gguf_file") is None:
            raise
        raise ConfigError(
            f"gguf_file: transformers does not read the model's config in {options['gguf_file']} ({error!r}). Give a "
            "config (model_kwargs), or the weights as safetensors."
        ) from error
    return found, {key: value for key, value in rest.items() if key not in ("trust_remote_code", "gguf_file")}


def _dtype_in(directory: Path) -> torch.dtype:
    """Return the dtype of the first floating-point tensor that is no code."""
    with contextlib.closing(Weights(directory)) as weights:
        found = (tensor.dtype for tensor in weights.tensors.values())
        dtypes = (dtype for dtype in found if dtype.is_floating_point and dtype.itemsize > 1)
        return next(dtypes, torch.get_default_dtype())


def _generation_config(directory: Path) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(directory)
    except OSError:  # as ``from_pretrained``: what older configs say of generation
        return GenerationConfig.from_pretrained(directory, config_file_name="config.json", _from_model_config=True)
