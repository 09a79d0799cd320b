"""Names that the options and the kernels have for torch's dtypes."""

from __future__ import annotations

import torch

from offload import kernels

BY_PRECISION = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}

KERNEL_DTYPES = {
    torch.float32: kernels.Dtype.F32,
    torch.bfloat16: kernels.Dtype.BF16,
    torch.float16: kernels.Dtype.F16,
}


def kernel_dtype(dtype: torch.dtype) -> kernels.Dtype:
    """Return the kernels' name of ``dtype``."""
    return KERNEL_DTYPES[dtype]
