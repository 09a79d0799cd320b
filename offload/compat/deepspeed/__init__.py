"""DeepSpeed's front door: ``import offload.compat.deepspeed as deepspeed`` in a script, and nothing else changes.

It is no module of the name ``deepspeed``, which other libraries look for to import its inner parts.
"""

from __future__ import annotations

from torch import distributed as comm

from offload.compat.deepspeed import accelerator, ops, zero
from offload.compat.deepspeed.accelerator import get_accelerator
from offload.compat.deepspeed.engine import DeepSpeedEngine
from offload.compat.deepspeed.entry import initialize
from offload.compat.deepspeed.process import add_config_arguments, init_distributed
from offload.compat.deepspeed.translation import Translation, translate

__all__ = [
    "DeepSpeedEngine",
    "Translation",
    "accelerator",
    "add_config_arguments",
    "comm",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "ops",
    "translate",
    "zero",
]
