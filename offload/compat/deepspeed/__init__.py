"""DeepSpeed's front door: ``import offload.compat.deepspeed as deepspeed`` in a script, and nothing else changes.

It is no module of the name ``deepspeed``, which other libraries look for to import its inner parts.
"""

from __future__ import annotations

from torch import distributed as comm

from offload.compat.deepspeed import accelerator as accelerator
from offload.compat.deepspeed import ops as ops
from offload.compat.deepspeed import zero as zero
from offload.compat.deepspeed.accelerator import get_accelerator as get_accelerator
from offload.compat.deepspeed.engine import DeepSpeedEngine as DeepSpeedEngine
from offload.compat.deepspeed.entry import initialize as initialize
from offload.compat.deepspeed.process import add_config_arguments as add_config_arguments
from offload.compat.deepspeed.process import init_distributed as init_distributed
from offload.compat.deepspeed.translation import Translation as Translation
from offload.compat.deepspeed.translation import translate as translate

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
