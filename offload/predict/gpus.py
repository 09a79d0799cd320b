"""GPUs by their data sheets, and the names that people have for them."""

from __future__ import annotations

import re
from dataclasses import dataclass

from offload import option_values


@dataclass(frozen=True, kw_only=True)
class Reach:
    """Share of its dense peak that a training step reaches on a kind of GPU, and who has reached it."""

    share: float
    source: str


@dataclass(frozen=True)
class Gpu:
    """A GPU as its data sheet has it: bytes, dense bf16 FLOP/s with fp32 sums, bytes a second each way.

    ``peers`` is the rate of its links to others, each way; None: GPUs talk over ``link``. ``desktop``: it is used in
    machines with two channels of memory. ``unified``: its memory is the host's.
    """

    name: str
    memory_bytes: int
    peak_flops: float
    link: float
    peers: float | None
    source: str
    reach: Reach
    desktop: bool = False
    unified: bool = False


_GB = 10**9
_GEN3, _GEN4, _GEN5 = 15.8e9, 31.5e9, 63.0e9  # PCI-SIG, 16 lanes, after encoding

# Cards for games add in fp32 at half of the rate that their tensor cores have, so memory seldom holds them up.
_CARD = Reach(share=0.9, source="Fuyou's 156 TFLOPS on an RTX 4090, arXiv:2403.06504")
_V100 = Reach(share=0.4, source="ZeRO-Infinity's 49 TFLOPS a V100, arXiv:2104.07857")
_SERVER = Reach(share=0.45, source="assumed")

GPUS = {
    gpu.name: gpu
    for gpu in (
        Gpu("v100", 32 * _GB, 125e12, _GEN3, 150e9, "NVIDIA V100 data sheet, SXM2 32 GB (fp16: it has no bf16)", _V100),
        Gpu("a100", 80 * _GB, 312e12, _GEN4, 300e9, "NVIDIA A100 data sheet, SXM4 80 GB", _SERVER),
        Gpu("a100-40", 40 * _GB, 312e12, _GEN4, 300e9, "NVIDIA A100 data sheet, SXM4 40 GB", _SERVER),
        Gpu("h100", 80 * _GB, 989e12, _GEN5, 450e9, "NVIDIA H100 data sheet, SXM5, without sparsity", _SERVER),
        Gpu("h100-pcie", 80 * _GB, 756e12, _GEN5, None, "NVIDIA H100 data sheet, PCIe, without sparsity", _SERVER),
        Gpu("h200", 141 * _GB, 989e12, _GEN5, 450e9, "NVIDIA H200 data sheet, SXM, without sparsity", _SERVER),
        Gpu("gh200", 96 * _GB, 989e12, 450e9, 450e9, "NVIDIA GH200 data sheet, 96 GB; NVLink-C2C to its CPU", _SERVER),
        Gpu("b200", 180 * _GB, 2250e12, _GEN5, 900e9, "NVIDIA HGX B200 data sheet, without sparsity", _SERVER),
        Gpu("b300", 270 * _GB, 2250e12, _GEN5, 900e9, "NVIDIA HGX B300 data sheet, without sparsity", _SERVER),
        Gpu("l40s", 48 * _GB, 362e12, _GEN4, None, "NVIDIA L40S data sheet, without sparsity", _SERVER),
        Gpu("mi300x", 192 * _GB, 1307e12, _GEN5, 448e9, "AMD Instinct MI300X data sheet, without sparsity", _SERVER),
        Gpu("mi325x", 256 * _GB, 1307e12, _GEN5, 448e9, "AMD Instinct MI325X data sheet, without sparsity", _SERVER),
        Gpu("mi355x", 288 * _GB, 2516e12, _GEN5, 537e9, "AMD Instinct MI355X data sheet, without sparsity", _SERVER),
        Gpu("rtx3090", 24 * _GB, 71e12, _GEN4, None, "NVIDIA GA102 white paper, fp32 sums, without sparsity", _CARD,
            desktop=True),
        Gpu("rtx4090", 24 * _GB, 165e12, _GEN4, None, "NVIDIA Ada white paper, fp32 sums, without sparsity", _CARD,
            desktop=True),
        Gpu("rtx5090", 32 * _GB, 209.5e12, _GEN5, None,
            "NVIDIA RTX Blackwell white paper, fp32 sums, without sparsity", _CARD, desktop=True),
        Gpu("rtx-pro-6000", 96 * _GB, 504e12, _GEN5, None,
            "NVIDIA RTX PRO Blackwell white paper, workstation edition, without sparsity", _SERVER),
        Gpu("gb10", 128 * _GB, 125e12, 273e9 / 2, None,
            "NVIDIA DGX Spark data sheet: 1 PFLOPS of sparse FP4 is an eighth of it in bf16; LPDDR5X, 273 GB/s",
            _SERVER, unified=True),
        Gpu("strix-halo", 128 * _GB, 59e12, 256e9 / 2, None,
            "AMD Ryzen AI Max+ 395: 40 compute units x 512 FLOP x 2.9 GHz; LPDDR5X, 256 GB/s", _SERVER, unified=True),
    )
}  # fmt: skip
"""By the names that ``--gpu`` takes."""

_OTHER_NAMES = {"dgxspark": "gb10", "ryzenaimax395": "strix-halo", "8060s": "strix-halo", "a10080": "a100"}
_OF_MAKERS = re.compile(r"nvidia|geforce|amd|instinct|radeon|tesla|graphics|gpu|blackwell|workstationedition|sxm\d?")


def find_gpu(text: str) -> Gpu:
    """``4090``, ``RTX 4090``, ``rtx4090`` or ``NVIDIA GeForce RTX 4090``. Raises ``ConfigError`` for one that is not in
    the table."""
    asked = _plain(text)
    for name, gpu in GPUS.items():
        if asked in (_plain(name), _plain(name).removeprefix("rtx").removeprefix("pro")):
            return gpu
    if asked in _OTHER_NAMES:
        return GPUS[_OTHER_NAMES[asked]]
    option_values.refuse_name("--gpu", option_values.one_of(tuple(GPUS)), text, asked, GPUS)


def _plain(text: str) -> str:
    """Without the maker, and what stands between the letters."""
    return _OF_MAKERS.sub("", re.sub(r"[^a-z0-9]", "", text.lower()))
