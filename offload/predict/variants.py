"""The trained part of a model and the format of its frozen base, as options say it: ``--lora`` and ``--base``."""

from __future__ import annotations

import re
from dataclasses import dataclass

from offload import option_values

_RANK = 16


@dataclass(frozen=True)
class Lora:
    """Adapters of a rank over the linear layers of the blocks; ``targets`` are names of some, empty: all."""

    rank: int = _RANK
    targets: tuple[str, ...] = ()

    @classmethod
    def parse(cls, text: str) -> Lora:
        """``16``, ``r=16`` or ``r=16,targets=q_proj+v_proj``. Raises ``ConfigError``."""
        match = re.fullmatch(r"\s*(?:(?:r|rank)=)?([1-9]\d{0,5})(?:,(?:targets?=)?([\w+.]+))?\s*", text)
        if match is None:
            option_values.refuse("--lora", 'a rank such as "r=16", or "r=16,targets=q_proj+v_proj"', text)
        targets = tuple(name for name in (match[2] or "").split("+") if name)
        return cls(int(match[1]), () if targets == ("all",) else targets)

    def __str__(self) -> str:
        return f"LoRA r={self.rank} on {' and '.join(self.targets) or 'all linear layers'}"


@dataclass(frozen=True)
class Base:
    """Format of frozen matrices: ``bits`` of an element with its part of the scales. 0: as all weights."""

    name: str
    bits: float


AS_WEIGHTS = Base("", 0.0)
BASES = {
    base.name: base
    for base in (
        Base("bf16", 0.0),
        Base("int8", 8.01),  # an fp32 scale a row
        Base("fp8", 8.01),
        Base("int4", 4.5),  # a bf16 scale for 32: compressed-tensors
        Base("nvfp4", 4.5),  # an fp8 scale for 16
        Base("mxfp4", 4.25),  # 8 bits for 32: OCP Microscaling Formats 1.0
        Base("nf4", 4.127),  # QLoRA, arXiv:2305.14314: 8 bits for 64, and an fp32 for 256 of these
        Base("q8_0", 8.5),  # as all below, a block of GGUF
        Base("q6_k", 6.5625),
        Base("q5_k", 5.5),
        Base("q4_k", 4.5),
    )
}
"""By the names that ``--base`` takes."""
