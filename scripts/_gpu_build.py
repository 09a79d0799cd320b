"""The part ``build`` of ``gpu_check.py``: the native parts in place, with pybind11 or with its headers in torch."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

_ROOT = Path(__file__).resolve().parents[1]


def main() -> None:
    pybind11 = str(_ROOT / "scripts" / "pybind11")
    if importlib.util.find_spec("pybind11") is not None:
        asked = [sys.executable, "-m", "pybind11", "--cmakedir"]
        pybind11 = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
    folder = _ROOT / "build" / "gpu-build"
    options = {
        "pybind11_DIR": pybind11,
        "TORCH_INCLUDE": str(Path(torch.__file__).parent / "include"),
        "Python_EXECUTABLE": sys.executable,
    }
    generator = [] if shutil.which("make") else ["-G", "Ninja"]
    configure = ["cmake", "-S", str(_ROOT), "-B", str(folder), *generator]
    subprocess.run([*configure, *(f"-D{name}={value}" for name, value in options.items())], check=True)
    jobs = str(os.cpu_count() or 1)  # make alone would start all of them at once
    subprocess.run(["cmake", "--build", str(folder), "--parallel", jobs, "--target", "_aio", "_kernels"], check=True)
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    for name in ("aio_ext/_aio", "offload/kernels/_kernels"):
        shutil.copy(folder / f"{name}{suffix}", _ROOT / f"{name}{suffix}")


if __name__ == "__main__":
    main()
