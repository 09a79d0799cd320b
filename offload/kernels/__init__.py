"""The optimizer kernels: each byte moved once, and the same bits on every machine.

All functions take addresses (``tensor.data_ptr()``) and a number of elements, so that they work on tensors, on arena
buffers and on tiles of either. An address must be aligned to its element and its array must stay alive and untouched
until the call returns; no array may overlap another, partly or wholly. Calls on more than 16,384 elements release the
GIL.

The scalar kernel is the definition; AVX2, AVX-512 and NEON agree with it bit for bit, for any length, alignment and
number of threads. Denormals are kept, and every NaN that is written is the canonical one. ``OFFLOAD_ISA=scalar|avx2|
avx512|neon`` chooses by hand what is otherwise chosen by what the processor reports.
"""

try:
    from . import _kernels as _kernels
except ImportError as error:
    raise ImportError(f"the native kernels are missing ({error}): build them with `pip install -e .`") from error

from ._companions import (
    Bring,
    accumulate,
    convert,
    decode,
    dequantize,
    encode,
    join_master,
    round_randomly,
    split_master,
    sum_squares,
)
from ._kernels import Work
from ._native import CODE_BLOCK, ISA, SQUARES_BLOCK, SQUARES_LANES, Dtype
from ._update import Kernel, Native, OnHost, OnQueue, Queue, Sweep, always, on_host, update

__all__ = [
    "CODE_BLOCK",
    "ISA",
    "SQUARES_BLOCK",
    "SQUARES_LANES",
    "Bring",
    "Dtype",
    "Kernel",
    "Native",
    "OnHost",
    "OnQueue",
    "Queue",
    "Sweep",
    "Work",
    "accumulate",
    "always",
    "convert",
    "decode",
    "dequantize",
    "encode",
    "join_master",
    "on_host",
    "round_randomly",
    "split_master",
    "sum_squares",
    "update",
]
