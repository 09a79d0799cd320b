"""Layers of ``bitsandbytes`` in 4 bits, ``Linear4bit``, whose weights the engine holds.

Such a weight, ``Params4bit``, keeps scales and tables beside its tensor, and the layer's product keeps all of them for
backward where autograd's hooks do not see it. In the engine it is a ``QuantisedWeight`` over the same tensors, and the
layer has a class that asks ``F.linear`` for the product: the numbers of ``dequantize_4bit``. State dicts have what the
layer's have, and a model that is given back has its ``Params4bit``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from offload.errors import ConfigError, warn
from offload.quantised.four_bits import Blocks4, Blocks4Nested
from offload.quantised.weight import QuantisedWeight

_ROWS_TRIED = 64


class _OfLayer(Blocks4):
    """Mixin for the weight of a layer. Its settings end with ``quant_type``, and ``dtype`` is that of the engine's
    weights: products are in the dtype of what is multiplied."""

    def factor(self, dtype: torch.dtype, *, in_backward: bool) -> torch.Tensor:
        per_scale, quantised, *more = self.settings
        rounded = quantised if in_backward else dtype  # as the layer's own product has it
        out = torch.empty(self.shape, dtype=rounded, device=self.device)
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            type(self)(self.parts, self.shape, self.dtype, (per_scale, rounded, *more)).put_into(out)
        return out.to(dtype)

    @property
    def saved(self) -> torch.Tensor:
        return self.codes

    @property
    def quant_state(self) -> Any:
        """As of ``Params4bit``, over the same memory."""
        return self._state(_state_in_engine())

    def _state(self, kind: type) -> Any:
        per_scale, dtype, *_, quant_type = self.settings
        offset, outer = self._outer()
        return kind(self.scales, self.shape, self.table, per_scale, quant_type, dtype, offset, outer)

    def _outer(self) -> tuple[torch.Tensor | None, Any]:
        """What is added to each scale, and the state of the scales' own quantisation."""
        return None, None

    def as_parameter(self) -> nn.Parameter:
        from bitsandbytes.functional import QuantState
        from bitsandbytes.nn.modules import Params4bit

        state = self._state(QuantState)
        return Params4bit(  # type: ignore[no-any-return, no-untyped-call]
            self.codes,
            requires_grad=False,
            quant_state=state,
            blocksize=state.blocksize,
            compress_statistics=state.nested,
            quant_type=state.quant_type,
            quant_storage=self.codes.dtype,
            bnb_quantized=True,
        )


class Linear4bitWeight(_OfLayer):
    """With scales in fp32."""


class Linear4bitWeightNested(_OfLayer, Blocks4Nested):
    """With scales in 8 bits."""

    def _outer(self) -> tuple[torch.Tensor, Any]:
        from bitsandbytes.functional import QuantState

        _, _, per_scale, offset, _ = self.settings
        outer = QuantState(self.outer_scales, code=self.outer_table, blocksize=per_scale, dtype=torch.float32)
        return torch.tensor(offset, device=self.device), outer


@cache
def _state_in_engine() -> type:
    """``QuantState`` of a weight that an engine holds."""
    from bitsandbytes.functional import QuantState

    class StateInEngine(QuantState):
        def __getattr__(self, name: str) -> Any:
            if name == "SCB":  # PEFT asks every weight for it whose class is not called Params4bit
                raise ConfigError(
                    "an adapter cannot be merged into, or its merge be taken out of, the weight of a Linear4bit that "
                    "an engine holds. Merge in the model that engine.unwrap() gives. This weight has not changed, and "
                    "model.unmerge_adapter() takes back what has been merged into other layers"
                )
            return super().__getattr__(name)

    return StateInEngine


class _InEngine:
    """Mixin for the class of a layer while the engine holds its weight."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        if not self.compute_type_is_set:
            self.set_compute_type(x)
            self.compute_type_is_set = True
        factor = x if self.compute_dtype is None else x.to(self.compute_dtype)
        bias = None if self.bias is None else self.bias.to(factor.dtype)
        return F.linear(factor, self.weight, bias).to(x.dtype)

    def __reduce_ex__(self, protocol: Any) -> Any:
        made: Any = super().__reduce_ex__(protocol)
        return made[0], (type(self).__bases__[1], *made[1][1:]), *made[2:]  # a copy is not the engine's


def is_in_4bit(parameter: nn.Parameter) -> bool:
    """Its dtype is that of the memory that its codes are in."""
    library = sys.modules.get("bitsandbytes")  # where nobody has imported it, there is none
    return library is not None and isinstance(parameter, library.nn.Params4bit) and bool(parameter.bnb_quantized)


def weights_of_layers(model: nn.Module, dtype: torch.dtype) -> dict[nn.Module, nn.Parameter]:
    """Return a parameter over the same memory for the weight of each layer of the model that is in 4 bits. ``dtype`` is
    that of the engine's weights."""
    found: dict[int, nn.Parameter] = {}
    weights = {}
    others = []
    for name, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))  # a scripted module's ``_parameters`` are no dict
        weight: Any = own.get("weight")
        if weight is not None and is_in_4bit(weight) and isinstance(module, sys.modules["bitsandbytes"].nn.Linear4bit):
            if getattr(weight.quant_state, "packing_format_for_cpu", False):
                module.state_dict()  # which gives up the layout for inference
                weight = module._parameters["weight"]
            if id(weight) not in found:
                found[id(weight)] = nn.Parameter(_weight_over(weight, dtype), requires_grad=False)
                state = weight.quant_state
                rows = min(state.shape[0], _ROWS_TRIED)
                if weight.is_cpu and not _library_agrees(rows, state.shape[-1], state.blocksize, state.quant_type):
                    others.append(name)
            weights[module] = found[id(weight)]
    if others:
        warn(
            f"{len(others)} layers in 4 bits ({others[0]}, ...) have rows that are no multiple of a block: "
            f"bitsandbytes {sys.modules['bitsandbytes'].__version__} dequantises such weights wrongly on the CPU. The "
            "engine does not, so that its losses are others there: nearer to those of the weights that were quantised."
        )
    return weights


@cache
def _library_agrees(rows: int, columns: int, per_scale: int, quant_type: str) -> bool:
    """``bitsandbytes`` gives a weight of this shape the numbers of its format on the CPU: where that may be otherwise,
    a trial tells."""
    if columns % per_scale == 0:
        return True
    from bitsandbytes.functional import QuantState, dequantize_4bit, get_4bit_type

    shape, table = torch.Size((rows, columns)), get_4bit_type(quant_type, device="cpu")
    codes = (torch.arange((shape.numel() + 1) // 2) % 251).to(torch.uint8).reshape(-1, 1)
    scales = torch.arange(1, -(-shape.numel() // per_scale) + 1, dtype=torch.float32)
    state = QuantState(scales, shape, table, per_scale, quant_type, torch.float32)
    settings = (per_scale, torch.float32, quant_type)
    ours = Linear4bitWeight([codes, scales, table], shape, torch.float32, settings).dequantize()
    return torch.equal(dequantize_4bit(codes, state), ours)


def _weight_over(weight: Any, dtype: torch.dtype) -> QuantisedWeight:
    state = weight.quant_state
    parts, settings = [weight.data, state.absmax, state.code], (state.blocksize, state.dtype)
    if not state.nested:
        return Linear4bitWeight(parts, state.shape, dtype, (*settings, state.quant_type))
    outer, offset = state.state2, float(state.offset)
    parts += [outer.absmax, outer.code]
    return Linear4bitWeightNested(parts, state.shape, dtype, (*settings, outer.blocksize, offset, state.quant_type))


def compute_in_engine(places: Iterable[tuple[nn.Module, type]]) -> Callable[[], None]:
    """Give the layers among modules of which the engine holds a weight, of this class, a class that computes with it.
    Returns the call that undoes it."""
    before: dict[nn.Module, type[nn.Module]] = {}
    for layer in (module for module, kind in places if issubclass(kind, _OfLayer)):
        before[layer] = kind = type(layer)
        layer.__class__ = type(kind.__name__, (_InEngine, kind), {"__module__": kind.__module__})
        layer.quant_state = None  # type: ignore[assignment]

    def undo() -> None:
        for layer, kind in before.items():
            layer.__class__ = kind
            weight: Any = layer._parameters["weight"]
            if isinstance(weight, sys.modules["bitsandbytes"].nn.Params4bit):
                layer.quant_state = weight.quant_state

    return undo
