"""The part ``build`` of ``gpu_check.py``: the native parts in place, with pybind11 or with its headers in torch.

What was built of the same sources for this kind of interpreter stays, also where it was built on another machine and
carried here: ``aio_ext/_aio*.so``, ``offload/kernels/_kernels*.so`` and ``build/native.sha256``.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import torch

_ROOT = Path(__file__).resolve().parents[1]
_NAMES = "aio_ext/_aio", "offload/kernels/_kernels"
_SUFFIX = sysconfig.get_config_var("EXT_SUFFIX")


def main() -> None:
    stamp = _ROOT / "build" / "native.sha256"
    if stamp.exists() and stamp.read_text() == fingerprint() and _can_be_loaded():
        print(f"built already: {', '.join(name + _SUFFIX for name in _NAMES)}")
        return
    stamp.unlink(missing_ok=True)
    _build(_ROOT / "build" / "gpu-build")
    stamp.write_text(fingerprint())


def fingerprint() -> str:
    """Of the sources and the kind of interpreter."""
    digest = hashlib.sha256(_SUFFIX.encode())
    folders = (_ROOT / name for name in ("aio_ext", "offload/kernels"))
    sources = (path for folder in folders for path in folder.rglob("*") if path.suffix in (".cpp", ".h", ".txt"))
    for path in sorted([_ROOT / "CMakeLists.txt", *sources]):
        digest.update(path.relative_to(_ROOT).as_posix().encode() + path.read_bytes())
    return digest.hexdigest()


def _can_be_loaded() -> bool:
    """They are there, and this machine has what they were linked with."""
    load = "import ctypes, sys, torch; [ctypes.PyDLL(path) for path in sys.argv[1:]]"
    paths = [str(_ROOT / f"{name}{_SUFFIX}") for name in _NAMES]
    return subprocess.run([sys.executable, "-c", load, *paths], capture_output=True).returncode == 0


def _build(folder: Path) -> None:
    pybind11 = str(_ROOT / "scripts" / "pybind11")
    if importlib.util.find_spec("pybind11") is not None:
        asked = [sys.executable, "-m", "pybind11", "--cmakedir"]
        pybind11 = subprocess.run(asked, capture_output=True, text=True, check=True).stdout.strip()
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
    for name in _NAMES:
        shutil.copy(folder / f"{name}{_SUFFIX}", _ROOT / f"{name}{_SUFFIX}")


if __name__ == "__main__":
    main()
