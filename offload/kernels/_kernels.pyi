"""The native kernels, as ``__init__.py`` calls them: nothing is checked here."""

from collections.abc import Sequence
from typing import Protocol

class Kernel(Protocol):
    """An optimizer, over the fields of ``Sweep``."""

    def __call__(self, *sweep: object) -> None: ...

adamw: Kernel
adamw_amsgrad: Kernel
adam: Kernel
adam_amsgrad: Kernel
adagrad: Kernel
lion: Kernel
sgd: Kernel
sgd_momentum: Kernel
sgd_nesterov: Kernel

def accumulate(
    numel: int, destination: int, destination_dtype: int, source: int, source_dtype: int, num_threads: int
) -> float: ...
def convert(
    numel: int, destination: int, destination_dtype: int, source: int, source_dtype: int, num_threads: int
) -> float: ...
def split_master(numel: int, master: int, weight: int, rest: int, num_threads: int) -> None: ...
def join_master(numel: int, master: int, weight: int, rest: int, num_threads: int) -> None: ...
def sum_squares(numel: int, source: int, dtype: int, num_threads: int) -> float: ...
def encode(numel: int, codes: int, scales: int, numbers: int, is_signed: bool, num_threads: int) -> None: ...
def decode(numel: int, numbers: int, codes: int, scales: int, is_signed: bool, num_threads: int) -> None: ...
def stream(
    numel: int,
    grad: int,
    grad_dtype: int,
    weight: int,
    rest: int,
    master: int,
    weight_format: int,
    states: Sequence[int],
    state_dtype: int,
    num_threads: int,
) -> None: ...
def isas_supported() -> list[str]: ...
def isa() -> str: ...
def use_isa(name: str) -> None: ...
