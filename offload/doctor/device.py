"""GPUs: the driver, what torch sees of them, their memory and their links."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.filesize import decimal

from offload.doctor.finding import Finding, better, broken, good, good_if
from offload.doctor.pci import link_of
from offload.ranks.topology import pci_address, text_of

_SYS, _PROC = Path("/sys"), Path("/proc")
_NVIDIA = "0x10de"
_DISPLAY = "0x03"
_TORCH_FOR_CUDA = "pip install torch with CUDA: https://pytorch.org/get-started/locally"


def driver() -> Iterator[Finding]:
    """NVIDIA's, and whether torch is made for it."""
    import torch

    version, gpus = _driver_version(), _gpus_on_the_bus()
    if not version and not gpus:
        yield good("GPU", "none: the model computes on the CPU")
    elif not version:
        says = f"{gpus} of NVIDIA on the bus, and no driver"
        yield broken("GPU", says, "install the driver: nvidia.com/drivers, or apt install nvidia-driver")
    elif torch.version.cuda is None:
        yield better("CUDA", f"driver {version}, but torch {torch.__version__} is for the CPU alone", _TORCH_FOR_CUDA)
    elif not torch.cuda.is_available():
        says = f"driver {version}, but torch for CUDA {torch.version.cuda} cannot use it"
        yield broken("CUDA", says, "a driver for this CUDA or newer; nvidia-smi; CUDA_VISIBLE_DEVICES; --gpus all")
    else:
        yield good("CUDA", f"driver {version}, torch for CUDA {torch.version.cuda}")


def gpus() -> Iterator[Finding]:
    """Each GPU that torch sees."""
    import torch

    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        properties = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        says = f"{properties.name}, {decimal(free)} of {decimal(total)} free"
        yield good_if(free >= total / 2, f"cuda:{index}", says, "end what else uses it: nvidia-smi")
        if getattr(properties, "is_integrated", False):
            says = f"cuda:{index} computes in the host's memory: what one of them holds the other lacks"
            yield better("one memory", says, "give host_memory and device_memory, together less than what is free")
        yield from _kernels(index)
        yield from _link(index, properties)


def _kernels(index: int) -> Iterator[Finding]:
    """Find whether the optimizer's kernels can be made for it: without them, states cannot rest on the GPU."""
    import torch

    from offload.device.cuda import CudaDevice, has_one_queue

    if has_one_queue():
        yield better("GPU queues", "CUDA_DEVICE_MAX_CONNECTIONS=1: copies wait behind kernels", "unset it")
    unsupported_reason = CudaDevice(torch.device("cuda", index)).kernels_unsupported_reason()
    if unsupported_reason:
        says, _, repair = unsupported_reason.partition(": pip")
        yield better("GPU kernels", says, f"pip{repair}" if repair else "")
    else:
        yield good("GPU kernels", "compiled")


def _link(index: int, properties: Any) -> Iterator[Finding]:
    """An idle GPU slows its link down, but keeps the lanes."""
    address = pci_address(properties)
    link = link_of(_SYS / "bus/pci/devices" / address) if address is not None else None
    if link is None:
        return
    if link.width < link.width_max:
        yield better(
            "PCIe link", f"cuda:{index}: x{link.width} of x{link.width_max} lanes", "another slot, or a riser less"
        )
    else:
        yield good("PCIe link", f"cuda:{index}: x{link.width}, up to {link.speed_max:g} GT/s")


def _driver_version() -> str:
    """Of NVIDIA's driver, if it is loaded."""
    words = text_of(_PROC / "driver/nvidia/version").split()
    return next((word for word in words if word[0].isdigit() and "." in word), "of an unknown version" if words else "")


def _gpus_on_the_bus() -> int:
    devices = (_SYS / "bus/pci/devices").glob("*")
    nvidia = (device for device in devices if text_of(device / "vendor") == _NVIDIA)
    return sum(text_of(device / "class").startswith(_DISPLAY) for device in nvidia)


CHECKS = (driver, gpus)
