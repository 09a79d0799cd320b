"""Models of ``transformers`` in GGUF files: which tensor of the file is which of the model's, and which of its rows.

``transformers`` undoes what the conversion to GGUF has done to a model, architecture by architecture, with dequantised
values in memory (its ``TensorProcessor``). Here it does that with the numbers of rows instead, which tells where each
row of the model's weight is in the file: blocks stay there as they are. What is done to more than rows is done with
values, when they are loaded.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

import numpy as np
import torch

from offload.birth.gguf_file import GgufTensor
from offload.birth.gguf_rows import Array, NumberedRows
from offload.birth.hugging_face import Converted, Renamed
from offload.birth.stored_quantised import StoredQuantised, of_gguf
from offload.errors import ConfigError


def renamed_gguf(
    model: Any, architecture: str, tensors: Mapping[str, GgufTensor], dtypes: Mapping[str, torch.dtype]
) -> Renamed:
    """Find the model's names for the tensors of a GGUF file, as ``from_pretrained`` does.

    ``dtypes`` are those of the model's tensors. Raises ``ConfigError`` for a model whose names are not known.
    """
    convert = _Conversions.of_transformers(model, architecture, list(dtypes))
    found: dict[str, StoredQuantised | Converted] = {}
    used: set[str] = set()
    for _, group in groupby(sorted(tensors, key=_layer), key=_layer):  # what becomes one weight is of one layer
        of_layer = [tensors[name] for name in group]
        numbered = NumberedRows(of_layer)
        for name, (of, numbers) in convert(of_layer, numbered.of).items():
            sources = [of] if of is not None else numbered.sources(numbers)
            if name not in dtypes or not sources:
                continue
            of_values = _OfValues(convert, sources, dtypes[name])
            found[name] = numbered.in_file(name, numbers) or Converted(
                of_values, name, numbered.shape(numbers) or of_values.shape(name)
            )
            used.update(source.name for source in sources)
    return Renamed(found, [name for name in tensors if name not in used], None)


def _layer(name: str) -> list[str]:
    """The numbers in a tensor's name."""
    return re.findall(r"\d+", name)


_Results = dict[str, tuple[GgufTensor | None, Array]]
"""By the model's names: the tensor that it is made of, if it is one that is known, and the result."""


@dataclass(frozen=True)
class _Conversions:
    """What ``transformers`` does with the tensors of a file. ``names`` are the model's, by those of GGUF."""

    processor: Any
    names: Mapping[str, str]

    @classmethod
    def of_transformers(cls, model: Any, architecture: str, own: Sequence[str]) -> _Conversions:
        """Those for a model whose tensors have the names ``own``."""
        try:
            import gguf  # noqa: F401
            from transformers import modeling_gguf_pytorch_utils as of_gguf_files
        except ImportError as error:
            raise ConfigError(
                f"weights=: the model's names for what is in a GGUF file are known by transformers, with gguf (pip "
                f"install gguf): {error}"
            ) from None
        config = model.config.get_text_config()
        kind = of_gguf_files.TENSOR_PROCESSORS.get(architecture, of_gguf_files.TensorProcessor)
        processor = kind(config=config.to_dict())
        try:
            return cls(processor, of_gguf_files.get_gguf_hf_weights_map(_Names(config, own), processor))
        except NotImplementedError:
            raise ConfigError(
                f"weights=: transformers has no names for the tensors of a GGUF file ({architecture}) in a model of "
                f"type {config.model_type}. Give the weights as safetensors."
            ) from None

    def __call__(self, tensors: Sequence[GgufTensor], values: Callable[[GgufTensor], Array]) -> _Results:
        """The results, where the tensors have these values."""
        parsed: dict[str, dict[str, Any]] = {"tensors": {}}
        found: _Results = {}
        for tensor in tensors:
            try:
                with np.errstate(all="ignore"):
                    result = self.processor.process(
                        weights=values(tensor),
                        name=tensor.name,
                        tensor_key_mapping=self.names,
                        parsed_parameters=parsed,
                    )
            except KeyError:  # experts, which the model does not have
                continue
            except ValueError:  # it wants to know all dimensions, and rows do not tell them
                if tensor.name in self.names:
                    found[self.names[tensor.name]] = tensor, np.empty(0)
                continue
            if result.name in self.names:
                found[self.names[result.name]] = tensor, np.asarray(result.weights)
        for name, joined in parsed["tensors"].items():
            found[name] = None, joined.numpy()
        return found


class _Names:
    """Stands for a module, of which ``transformers`` wants to know the names of its tensors."""

    def __init__(self, config: Any, names: Sequence[str]) -> None:
        self.config = config
        self._names = names

    def state_dict(self) -> dict[str, None]:
        return dict.fromkeys(self._names)

    def named_children(self) -> Iterator[tuple[str, _Names]]:
        children: dict[str, list[str]] = {}
        for name in self._names:
            child, _, rest = name.partition(".")
            if rest:
                children.setdefault(child, []).append(rest)
        for child, names in children.items():
            yield child, _Names(self.config, names)


@dataclass
class _OfValues:
    """Makes a weight of dequantised values, in ``dtype``."""

    convert: _Conversions
    sources: Sequence[GgufTensor]
    dtype: torch.dtype
    _kept: dict[str, torch.Tensor] = field(default_factory=dict)

    def result(self, name: str, *, keeps: bool = False) -> torch.Tensor:
        """The weight. ``keeps``: it will be asked for again."""
        value = self._kept.pop(name, None)
        if value is None:
            value = self._of(name, lambda tensor: of_gguf("", tensor, tensor.numbers).whole(torch.float32).numpy())
        if keeps:
            self._kept[name] = value
        return value

    def shape(self, name: str) -> torch.Size:
        """Its shape. Reads nothing."""
        return self._of(name, lambda tensor: np.broadcast_to(np.float32(-1), tensor.numbers)).shape

    def _of(self, name: str, values: Callable[[GgufTensor], Array]) -> torch.Tensor:
        _, found = self.convert(self.sources, values)[name]
        return torch.from_numpy(np.array(found)).to(self.dtype)
