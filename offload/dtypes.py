"""The kernels' names of torch's dtypes."""

from __future__ import annotations

import torch

from offload import kernels

_KERNEL_DTYPES = {
    torch.float32: kernels.Dtype.F32,
    torch.bfloat16: kernels.Dtype.BF16,
    torch.float16: kernels.Dtype.F16,
}


def kernel_dtype(dtype: torch.dtype) -> kernels.Dtype:
    """What the kernels call ``dtype``."""
    return _KERNEL_DTYPES[dtype]
