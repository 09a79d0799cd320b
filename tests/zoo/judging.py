"""What must hold between a training under the engine and the same under plain PyTorch.

[Note: Rounding] Two orders of the same fp32 operations differ in the last bit, and a few steps of training make more of
it; how much is a property of the model. So every model is asked itself: plain PyTorch trains it once more, and each
weight is moved by up to one unit of its last place before every step. The engine may be ``_FACTOR`` times as far from
plain PyTorch as that, tensor by tensor. (The biases of attention keys, for one, have a true gradient of zero: all of
their movement is rounding, and no fixed tolerance fits them.) What rounding does can also be all or nothing, where a
rectifier or a router stands exactly at its threshold: hence ``_FLOOR``, a share of how far the tensor has moved. What
goes wrong in an engine (a lost gradient, another group's settings, a stale weight) is larger.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from zoo.specimen import Specimen
from zoo.training import Outcome, built, in_torch, tensors_of

_FACTOR = 16
_FLOOR = 1e-2


@dataclass(frozen=True)
class Reference:
    """Plain PyTorch's training of a specimen, and how far rounding may carry each of its tensors."""

    outcome: Outcome
    allowed: dict[str, float]

    @classmethod
    def of(cls, specimen: Specimen) -> Reference:
        start, outcome = tensors_of(built(specimen)), in_torch(specimen)
        disturbed = in_torch(specimen, _by_one_unit())
        allowed = {}
        for name, value in outcome.tensors.items():
            moved = _distance(start.get(name, torch.zeros_like(value)), value)  # optimizer states begin at zero
            allowed[name] = max(_FACTOR * _distance(disturbed.tensors[name], value), _FLOOR * moved)
        return cls(outcome, allowed)

    def excess(self, outcome: Outcome) -> tuple[float, str]:
        """How far ``outcome`` is from plain PyTorch as a share of what is allowed, and the tensor where it is most."""
        return max(
            (_share(_distance(outcome.tensors[name], self.outcome.tensors[name]), allowed), name)
            for name, allowed in self.allowed.items()
        )


def differences(one: Outcome, other: Outcome) -> list[str]:
    """The names of the tensors that differ in a bit; "losses" if those do."""
    names = sorted(one.tensors.keys() ^ other.tensors.keys())
    shared = [name for name in one.tensors if name in other.tensors]
    names += [name for name in shared if _bits(one.tensors[name]) != _bits(other.tensors[name])]
    return names + (["losses"] if one.losses != other.losses else [])


def _by_one_unit() -> Callable[[Tensor], None]:
    generator = torch.Generator().manual_seed(2)

    def disturb(value: Tensor) -> None:
        value.mul_(1 + (torch.rand(value.shape, generator=generator) - 0.5) * 2**-22)

    return disturb


def _distance(one: Tensor, other: Tensor) -> float:
    return (one.double() - other.double()).norm().item()


def _share(distance: float, allowed: float) -> float:
    if distance == 0:
        return 0.0
    return distance / allowed if allowed else float("inf")


def _bits(value: Tensor) -> bytes:
    return value.contiguous().flatten().view(torch.uint8).numpy().tobytes()  # numpy has no bf16
