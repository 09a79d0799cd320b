"""The model of a forecast: a module without memory, its units as the engine finds them, and what they compute."""

from __future__ import annotations

import importlib
import math
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from offload.birth.initialise import deferred_init
from offload.errors import ConfigError
from offload.units import UnitSpec
from offload.units.find import find_units

VOCABULARY = 32_000

_WIDTH_A_LAYER = 128
"""Width over layers of published models: 4096 / 32 at 7B, 12288 / 96 at 175B."""


@dataclass(frozen=True)
class Model:
    """A model without memory. ``attention_width`` is that of all heads of a layer together; ``active`` the share of
    its experts that a token passes."""

    name: str
    module: nn.Module
    layers: int
    width: int
    attention_width: int
    vocabulary: int
    active: float = 1.0

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self.module.parameters())

    def units(self, dtype: torch.dtype, num_ranks: int = 1) -> list[UnitSpec]:
        """As the engine finds them where an optimizer with a kernel trains, to be divided among ranks."""
        units = find_units(self.module, in_pieces=True, dtype=dtype, num_ranks=num_ranks)
        if not units:
            raise ConfigError(f"{self.name} has no floating-point parameters: there is nothing to offload")
        return units

    def flops(self, unit: UnitSpec) -> tuple[float, float]:
        """FLOP of products with the unit's weights for one token: in forward, and for the gradients of its trained
        weights. Those of its input take as many as forward."""
        forward = trained = 0.0
        for spec in unit.parameters:
            modules = [site.module for site in spec.owners]
            if len(spec.shape) < 2 or all(isinstance(module, nn.Embedding) for module in modules):
                continue
            share = self.active if len(spec.shape) > 2 or ".experts." in spec.name else 1.0
            flops = 2.0 * spec.shape.numel() * share
            forward += flops
            trained += flops if spec.trainable else 0.0
        return forward, trained

    def attention_flops(self, sequence: int) -> float:
        """FLOP of causal attention in forward, for one token of one layer."""
        return 2.0 * sequence * self.attention_width


def from_hugging_face(path: Path) -> Model:
    """The model of a ``config.json``, or of a directory with one. Raises ``ConfigError``."""
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or directory")
    try:
        import transformers
    except ImportError:
        raise ConfigError(
            f"{path} is a Hugging Face config, and transformers is not installed: pip install transformers"
        ) from None
    try:
        config = transformers.AutoConfig.from_pretrained(path)
        text = config.get_text_config()
        causal = type(config) in transformers.MODEL_FOR_CAUSAL_LM_MAPPING
        kind = transformers.AutoModelForCausalLM if causal else transformers.AutoModel
        with torch.device("meta"):
            module = kind.from_config(config)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"{path} is not a config of a model: {' '.join(str(error).split())}") from error
    experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts", default=0)
    chosen = _first(text, "num_experts_per_tok", "num_experts_per_token", default=0)
    width = _first(text, "hidden_size", "n_embd", "d_model", default=0)
    heads = _first(text, "num_attention_heads", "n_head", default=0)
    head_width = _first(text, "head_dim", default=0) or (width // heads if heads else 0)
    return _model(
        str(path), module, layers=_first(text, "num_hidden_layers", "n_layer", default=0), width=width,
        attention_width=heads * head_width, vocabulary=_first(text, "vocab_size", default=0),
        active=chosen / experts if experts and chosen else 1.0,
    )  # fmt: skip


def from_factory(name: str) -> Model:
    """The model that ``module:factory`` returns, built without memory. Raises ``ConfigError``."""
    module_name, _, function = name.partition(":")
    sys.path.insert(0, "")
    try:
        factory: Any = importlib.import_module(module_name)
        for part in function.split("."):
            factory = getattr(factory, part)
    except (ImportError, AttributeError) as error:
        raise ConfigError(
            f"{name}: {error}. Expected a module and a function in it, as in my_package.models:build"
        ) from (error)
    finally:
        sys.path.remove("")
    if not callable(factory):
        raise ConfigError(f"{name} is no function that returns a model")
    return _model(name, deferred_init(factory))


def from_count(
    parameters: int, layers: int | None = None, width: int | None = None, vocabulary: int = VOCABULARY
) -> Model:
    """A transformer with about this many parameters; layers and width are those of published models if left out.

    Raises ``ConfigError`` if the three contradict each other.
    """
    if layers is None and width is None:
        layers = max(round((parameters / (12 * _WIDTH_A_LAYER**2)) ** (1 / 3)), 1)
    if width is None:
        assert layers is not None
        grain = 128 if parameters >= 1e9 else 64
        rows = vocabulary * (2 if parameters >= 1e9 else 1)  # 12 layers width^2 + rows width = parameters
        root = (-rows + math.sqrt(rows**2 + 48 * layers * parameters)) / (24 * layers)
        width = max(round(root / grain), 1) * grain
    if layers is None:
        layers = max(round(parameters / (12 * width**2)), 1)
    tied = 2 * vocabulary * width > parameters // 4
    tables = vocabulary * width * (1 if tied else 2)
    hidden = ((parameters - tables - width) // layers - 4 * width**2 - 2 * width) // (3 * width)
    if hidden < 1:
        raise ConfigError(
            f"{parameters:,} parameters are too few for {layers} layers of width {width:,} and a vocabulary of "
            f"{vocabulary:,}: give fewer layers, a smaller width or a smaller vocabulary"
        )
    with torch.device("meta"):
        module = _Transformer(layers, width, hidden, vocabulary, tied=tied)
    name = f"{parameters / 1e9:,.3g} billion parameters, {layers} layers of {width:,}"
    return Model(name, module, layers, width, width, vocabulary)


class _Layer(nn.Module):
    """The weights of a block as Llama has them. Only their shapes are used."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.norm_attention = nn.LayerNorm(width, bias=False)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_mlp = nn.LayerNorm(width, bias=False)
        self.gate_up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)


class _Transformer(nn.Module):
    def __init__(self, layers: int, width: int, hidden: int, vocabulary: int, *, tied: bool) -> None:
        super().__init__()
        self.tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(_Layer(width, hidden) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        self.head = nn.Linear(width, vocabulary, bias=False)
        if tied:
            self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor) -> Tensor:
        raise NotImplementedError("a described model has shapes only")


def _model(name: str, module: nn.Module, **known: Any) -> Model:
    """The module with what is known of it; what is not known is read from its layers."""
    given: Mapping[str, Any] = {key: value for key, value in known.items() if value}
    return Model(name, module, **{**dict(_found(module)), **given})


def _found(module: nn.Module) -> Iterator[tuple[str, int]]:
    lists = [child for child in module.modules() if isinstance(child, (nn.ModuleList, nn.Sequential)) and len(child)]
    alike = [max(Counter(type(item) for item in children).values()) for children in lists]
    tables = [table for table in module.modules() if isinstance(table, nn.Embedding)]
    widths = Counter(layer.in_features for layer in module.modules() if isinstance(layer, nn.Linear))
    largest = max(tables, key=lambda table: table.num_embeddings, default=None)
    width = largest.embedding_dim if largest is not None else max(widths, key=lambda key: widths[key], default=1)
    yield "layers", max(alike, default=1)
    yield "width", width
    yield "attention_width", width if any("attention" in type(m).__name__.lower() for m in module.modules()) else 0
    yield "vocabulary", largest.num_embeddings if largest is not None else 0


def _first(config: Any, *names: str, default: int) -> int:
    """The first of these that the config has."""
    return next((int(value) for value in (getattr(config, name, None) for name in names) if value), default)
