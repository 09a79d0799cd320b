"""The model of a forecast: a module without memory, its units as the engine finds them, and what they compute."""

from __future__ import annotations

import functools
import importlib
import json
import logging
import math
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.birth.initialise import deferred_init, shapes_of
from offload.errors import ConfigError
from offload.predict.activations import Kept, blocks_of, kept_of
from offload.predict.adapted import adapted, matrix_bytes, of_base
from offload.predict.architecture import Architecture
from offload.predict.transformer import Transformer
from offload.predict.variants import AS_WEIGHTS, Base, Lora
from offload.units import UnitSpec
from offload.units.find import find_units

VOCABULARY = 32_000

MOST_EXPERTS = 128
"""Experts of a larger model are planned several for one: one by one would take minutes where there are 15,000."""

_HEAD_WIDTH = 128
_WIDTH_A_LAYER = 128
"""Width over layers of published models: 4096 / 32 at 7B, 12288 / 96 at 175B."""


MOST_LAYERS = 4096
"""No model has as many, and each takes its time in a plan."""


@dataclass(frozen=True)
class Model:
    """A model without memory. ``attention_width`` is that of all heads of a layer together; ``active`` the share of
    its experts that a token passes; ``base`` the format of frozen matrices in its blocks."""

    name: str
    module: nn.Module
    layers: int
    width: int
    attention_width: int
    vocabulary: int
    active: float = 1.0
    base: Base = AS_WEIGHTS

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._parameters)

    @property
    def num_trained(self) -> int:
        return sum(parameter.numel() for parameter in self._parameters if parameter.requires_grad)

    @property
    def num_active(self) -> int:
        """Parameters that a token passes: of experts those that it is sent to."""
        return sum(
            int(parameter.numel() * (self.active if _of_experts(name, parameter.dim()) else 1))
            for name, parameter in self.module.named_parameters()
        )

    def kept(self, sequence: int, dtype: torch.dtype) -> Kept:
        """Bytes that backward needs of a forward of one sequence."""
        return kept_of(self.module, self.layers, self.width, sequence, dtype)

    def widened_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of the largest matrix of the base, which is widened while it computes; 0 where none is narrow."""
        return matrix_bytes(self.module, dtype) if self.base.bits else 0

    def with_adapters(self, lora: Lora, base: Base) -> Model:
        """The model with adapters over a frozen base of this format. Raises ``ConfigError``."""
        return replace(self, module=adapted(self.module, lora), base=base)

    @functools.cached_property
    def _parameters(self) -> tuple[nn.Parameter, ...]:
        """Found once: a walk through the modules takes longer than what is asked of them."""
        return tuple(self.module.parameters())

    def units(
        self, dtype: torch.dtype, num_ranks: int = 1, whole: frozenset[int] | None = frozenset()
    ) -> tuple[UnitSpec, ...]:
        """As the engine finds them, to be divided among ranks. The optimizer looks at those in ``whole`` as wholes."""
        trained = tuple(parameter.requires_grad for parameter in self._parameters)
        units = _units(self.module, self.base, dtype, num_ranks, trained, whole)
        if not units:
            raise ConfigError(f"{self.name} has no floating-point parameters: there is nothing to offload")
        return units

    def flops(self, unit: UnitSpec) -> tuple[float, float]:
        """FLOP of products with the unit's weights for one token: in forward, and for the gradients of its trained
        weights. Those of its input take as many as forward."""
        return _flops(unit, self.active)

    def attention_flops(self, sequence: int) -> float:
        """FLOP of causal attention in forward, for one token of one layer."""
        return 2.0 * sequence * self.attention_width


@functools.lru_cache(maxsize=8)
def _units(
    module: nn.Module,
    base: Base,
    dtype: torch.dtype,
    num_ranks: int,
    trained: tuple[bool, ...],
    whole: frozenset[int] | None,
) -> tuple[UnitSpec, ...]:
    """``trained`` says of each parameter whether it is, so that what was found before it was frozen is found anew."""
    if base.bits:
        units = _units(module, AS_WEIGHTS, dtype, num_ranks, trained, whole)
        return tuple(of_base(units, module, base, dtype, num_ranks))
    return tuple(find_units(module, whole=whole, dtype=dtype, num_ranks=num_ranks, most_experts=MOST_EXPERTS))


@functools.lru_cache(maxsize=1 << 14)
def _flops(unit: UnitSpec, active: float) -> tuple[float, float]:
    """Counted once: every forecast of a search asks for all units."""
    forward = trained = 0.0
    for spec in unit.parameters:
        modules = [site.module for site in spec.owners]
        if len(spec.shape) < 2 or all(isinstance(module, nn.Embedding) for module in modules):
            continue
        share = active if _of_experts(spec.name, len(spec.shape)) else 1.0
        flops = 2.0 * spec.shape.numel() * share
        forward += flops
        trained += flops if spec.trainable else 0.0
    return forward, trained


def from_architecture(name: str, shapes: Architecture) -> Model:
    """The model of these shapes."""
    with torch.device("meta"):
        module = Transformer(shapes)
    experts = shapes.experts
    return Model(
        name, module, shapes.layers, shapes.width, shapes.attention_width, shapes.vocabulary,
        active=experts.chosen / experts.count if experts is not None else 1.0,
    )  # fmt: skip


def from_hugging_face(path: Path) -> Model:
    """The model of a ``config.json``, or of a directory with one. Raises ``ConfigError``."""
    if not path.exists():
        raise ConfigError(f"{path}: there is no such file or directory")
    file = path / "config.json" if path.is_dir() else path
    if not file.exists():
        raise ConfigError(f"{path}: there is no config.json in this folder")
    try:
        fields = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} is not a config of a model: {' '.join(str(error).split())}") from error
    if not isinstance(fields, dict):
        raise ConfigError(
            f"{file} is not a config of a model: expected an object in braces, {{...}}, got a {type(fields).__name__}"
        )
    fields = fields.get("text_config", fields)
    shapes = Architecture.of_config(fields)
    return _from_transformers(path) if shapes is None else from_architecture(str(path), shapes)


def _from_transformers(path: Path) -> Model:
    """The model of a config that is not known here, as ``transformers`` builds it."""
    with _unheard():
        try:
            import transformers
        except ImportError:
            raise ConfigError(
                f"{path} is the config of a model that is not known here, and transformers is not installed: "
                "pip install transformers"
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


@contextmanager
def _unheard() -> Iterator[None]:
    """Drop what libraries log and warn of meanwhile: that a kernel of theirs is missing says nothing of a model's
    shapes."""
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def to_train(name: str) -> Model:
    """The model of a ``config.json`` or a factory as it is trained: with its own forward, and weights to come. Raises
    ``ConfigError``."""
    path = Path(name).expanduser()
    return _from_transformers(path) if path.exists() else from_factory(name, deferred_init)


def from_factory(name: str, build: Callable[[Any], nn.Module] = shapes_of) -> Model:
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
    try:
        return _model(name, build(factory))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


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
        if layers > MOST_LAYERS:
            raise ConfigError(
                f"{parameters:,} parameters in layers of width {width:,} are {layers:,} layers, and at most "
                f"{MOST_LAYERS:,} are planned: give a larger --width"
            )
    tied = 2 * vocabulary * width > parameters // 4
    tables = vocabulary * width * (1 if tied else 2)
    hidden = ((parameters - tables - width) // layers - 4 * width**2 - 2 * width) // (3 * width)
    if hidden < 1:
        raise ConfigError(
            f"{parameters:,} parameters are too few for {layers} layers of width {width:,} and a vocabulary of "
            f"{vocabulary:,}: give fewer layers, a smaller width or a smaller vocabulary"
        )
    head_width = math.gcd(width, _HEAD_WIDTH)
    heads = width // head_width
    shapes = Architecture(
        layers=layers, width=width, heads=heads, vocabulary=vocabulary, hidden=hidden, kv_heads=heads,
        head_width=head_width, tied=tied,
    )  # fmt: skip
    return from_architecture("a transformer", shapes)


def _of_experts(name: str, dims: int) -> bool:
    return dims > 2 or ".experts." in name


def _model(name: str, module: nn.Module, **known: Any) -> Model:
    """The module with what is known of it; what is not known is read from its layers."""
    given: Mapping[str, Any] = {key: value for key, value in known.items() if value}
    return Model(name, module, **{**dict(_found(module)), **given})


def _found(module: nn.Module) -> Iterator[tuple[str, int]]:
    tables = [table for table in module.modules() if isinstance(table, nn.Embedding)]
    widths = Counter(layer.in_features for layer in module.modules() if isinstance(layer, nn.Linear))
    largest = max(tables, key=lambda table: table.num_embeddings, default=None)
    width = largest.embedding_dim if largest is not None else max(widths, key=lambda key: widths[key], default=1)
    yield "layers", len(blocks_of(module)) or 1
    yield "width", width
    yield "attention_width", width if any("attention" in type(m).__name__.lower() for m in module.modules()) else 0
    yield "vocabulary", largest.num_embeddings if largest is not None else 0


def _first(config: Any, *names: str, default: int) -> int:
    """The first of these that the config has."""
    return next((int(value) for value in (getattr(config, name, None) for name in names) if value), default)
