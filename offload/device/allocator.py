"""Settings of torch's allocator of a GPU's memory.

[Note: Why segments should be expandable] Weights come and go in pieces as large as units, between activations of all
sizes, and both take from one pool: so each can have what the other leaves. Segments of fixed sizes would leave gaps
that fit neither. A pool of the engine's own (``torch.cuda.MemPool``) would have no gaps, and what is free in it would
be closed to activations. So torch is asked for segments that grow and shrink by pages.
"""

from __future__ import annotations

import os

import torch

from offload.errors import warn

_SETTING = "expandable_segments"
_NAMES = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
"""Variables that torch reads when CUDA is first used. Releases from 2.10 on prefer the second name."""

_HAVE_NEW_NAME = (2, 10)


def prefer_expandable_segments() -> None:
    """Have torch use expandable segments, unless the user has set one of the variables: by the variable, or, where CUDA
    is in use already, by the allocator's settings, for the segments to come. Warns where that cannot be."""
    if any(name in os.environ for name in _NAMES):
        return
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    name = _NAMES[release >= _HAVE_NEW_NAME]
    if torch.cuda.is_initialized():
        if _set_now():
            return
        warn(
            f"CUDA was in use before the engine was made, which would have set {name}={_SETTING}:True: memory between "
            "weights and activations may be left in pieces. Set it in the environment, or make the engine first."
        )
        return
    os.environ[name] = f"{_SETTING}:True"


def _set_now() -> bool:
    """Change the setting of the running allocator; False where this torch has no way. Both names are private: the first
    is of torch 2.9 and later."""
    change = getattr(torch._C, "_accelerator_setAllocatorSettings", None)
    change = change or getattr(torch.cuda.memory, "_set_allocator_settings", None)
    try:
        if change is not None:
            change(f"{_SETTING}:True")
    except RuntimeError:  # a platform without them
        return False
    return change is not None
