"""One optimizer step, whatever the optimizer: how the weight is kept, what its states are, and the checks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

from . import _kernels
from ._native import Dtype, check_address, check_numbers, check_numel

_FORMAT_F32, _FORMAT_SPLIT, _FORMAT_OUT = 0, 1, 2  # WeightFormat in src/arrays.h: _FORMAT_OUT + Dtype

Kernel = Callable[
    [
        Sequence[float],  # constants
        int,  # numel
        int,  # grad
        int,  # grad_dtype
        int,  # weight
        int,  # rest
        int,  # master
        int,  # weight_format
        Sequence[int],  # states
        Sequence[int],  # scales
        int,  # state_dtype
        int,  # seed
        int,  # num_threads
    ],
    None,
]

Native = Callable[[str], Kernel]
"""Who runs a kernel: gives it by its name in the native module."""


def on_host(name: str) -> Kernel:
    """The CPU, at once."""
    kernel: Kernel = getattr(_kernels, name)
    return kernel


class State(NamedTuple):
    """One state of an optimizer: its name for errors, its address, and where its scales are if it is in codes."""

    name: str
    address: int
    scale: int


def update(
    kernel: Kernel,
    constants: Sequence[float],
    step: int,
    numel: int,
    *,
    grad: int,
    grad_dtype: Dtype,
    weight: int,
    weight_dtype: Dtype,
    rest: int,
    master: int,
    states: Sequence[State],
    state_dtype: Dtype,
    num_threads: int,
) -> None:
    """Check the arguments and run the kernel, which takes three states, used or not."""
    check_numel(numel, num_threads)
    check_numbers("grad", grad, grad_dtype, numel)
    master, weight_format = _check_weight(numel, weight, weight_dtype, rest, master)
    if state_dtype is Dtype.F16:
        raise ValueError("states are F32, BF16 or INT8: the range of F16 is too small for squares of gradients")
    for state in states:
        check_address(state.name, state.address, state_dtype.itemsize, numel)
        if state_dtype is Dtype.INT8:
            check_address(f"{state.name}_scale", state.scale, 4, numel)
    unused = [0] * (3 - len(states))
    kernel(
        constants,
        numel,
        grad,
        grad_dtype,
        weight,
        rest,
        master,
        weight_format,
        [state.address for state in states] + unused,
        [state.scale for state in states] + unused,
        state_dtype,
        step * 0x9E3779B1 % 2**32,  # the seed of the random rounding of codes
        num_threads,
    )


def _check_weight(numel: int, weight: int, weight_dtype: Dtype, rest: int, master: int) -> tuple[int, int]:
    """Return the address of the fp32 master (0 for a split one) and the weight format."""
    check_numbers("weight", weight, weight_dtype, numel)
    if master and rest:
        raise ValueError("give master or rest, not both")
    if master:
        check_address("master", master, 4, numel)
        return master, _FORMAT_OUT + weight_dtype
    if rest:
        if weight_dtype is not Dtype.BF16:
            raise ValueError(f"rest is the lower half of a BF16 weight; weight_dtype is {weight_dtype.name}")
        check_address("rest", rest, 2, numel)
        return 0, _FORMAT_SPLIT
    if weight_dtype is not Dtype.F32 and numel > 0:
        raise ValueError(f"a {weight_dtype.name} weight needs its rest (BF16 only) or a master")
    return weight, _FORMAT_F32
