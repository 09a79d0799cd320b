"""Moments in one format become those of another: numbers in fp32 or bf16, or 8-bit codes with a scale for each block.

States are flat tensors by name, as ``Rule.states`` and state dicts have them: beside the codes of ``exp_avg`` there is
``exp_avg_scale``. Blocks are counted from the parameter's first element.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offload import kernels
from offload.native_optimizers import SQUARES


def scale_name(name: str) -> str:
    """The name of the scales of a state in codes."""
    return f"{name}_scale"


def num_blocks(numel: int) -> int:
    """Scales that so many codes have."""
    return -(-numel // kernels.CODE_BLOCK)


def is_in_codes(name: str, states: Mapping[str, Any]) -> bool:
    """The state is in 8-bit codes, and not in numbers."""
    return isinstance(states.get(name), torch.Tensor) and states[name].dtype == torch.uint8


def copy_moments(
    name: str, into: Mapping[str, torch.Tensor], at: int, source: Mapping[str, Any], start: int, stop: int
) -> None:
    """Copy the elements ``[start, stop)`` of a state to element ``at`` and those after it, in the format there.

    Between equal formats the bits stay. Where codes are written, ``at`` and ``start`` are multiples of ``CODE_BLOCK``.
    """
    target = into[name][at : at + stop - start]
    if not is_in_codes(name, into):
        target.copy_(read_moments(name, source, start, stop))
        return
    scales = into[scale_name(name)][at // kernels.CODE_BLOCK :][: num_blocks(stop - start)]
    if is_in_codes(name, source):
        first = start // kernels.CODE_BLOCK
        target.copy_(_flat(source[name])[start:stop])
        scales.copy_(_flat(source[scale_name(name)])[first : first + len(scales)])
        return
    numbers = _flat(source[name])[start:stop].to("cpu", torch.float32).contiguous()
    kernels.encode(
        numbers.numel(), target.data_ptr(), scales.data_ptr(), numbers.data_ptr(), signed=name not in SQUARES
    )


def read_moments(name: str, states: Mapping[str, Any], start: int, stop: int) -> torch.Tensor:
    """The elements ``[start, stop)`` of a state, flat: in fp32 if it is in codes, otherwise in its own format."""
    values = _flat(states[name])
    if not is_in_codes(name, states):
        return values[start:stop]
    first = start // kernels.CODE_BLOCK
    begin = first * kernels.CODE_BLOCK
    codes = values[begin:stop].cpu().contiguous()
    scales = _flat(states[scale_name(name)])[first : num_blocks(stop)].to("cpu", torch.float32).contiguous()
    numbers = torch.empty(stop - begin)
    kernels.decode(numbers.numel(), numbers.data_ptr(), codes.data_ptr(), scales.data_ptr(), signed=name not in SQUARES)
    return numbers[start - begin :]


def _flat(value: Any) -> torch.Tensor:
    return torch.as_tensor(value).detach().reshape(-1)
