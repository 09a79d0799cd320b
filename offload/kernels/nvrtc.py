"""The kernels' text compiled for a GPU, at run time, by the compiler that every CUDA build of torch brings along.

No GPU is needed for it. What is compiled is ``src/device.cu``: the scalar kernels with a thread for each element.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_SOURCES = Path(__file__).with_name("src")
_HEADERS = ("arrays.h", "rules.h", "sweep.h", "vec_scalar.h", "nvrtc_std.h")
_STANDARD_HEADERS = ("bit", "cstddef", "cstdint", "cstring", "type_traits", "utility")
_OPTIONS = (
    "--std=c++17",
    "--fmad=false",  # with the defaults for division, square root and subnormal numbers: the bits of the CPU
    "--device-as-default-execution-space",
    "--pre-include=nvrtc_std.h",
    "--diag-suppress=1097",  # attributes that it does not know
    "-DOFFLOAD_ISA=gpu",
)


class CompilerMissing(Exception):
    """There is no NVRTC, or it cannot compile for this GPU. The message is one line."""


def compile_kernels(version: str, architecture: str, definitions: Sequence[str]) -> bytes:
    """The binary of ``device.cu`` with these macros, for a GPU such as ``sm_90``.

    ``version`` is that of CUDA, such as ``12.8``. Raises ``CompilerMissing``.
    """
    library = _library(version)
    texts = {name: (_SOURCES / name).read_bytes() for name in _HEADERS} | dict.fromkeys(_STANDARD_HEADERS, b"")
    program = ctypes.c_void_p()
    status = library.nvrtcCreateProgram(
        ctypes.byref(program),
        (_SOURCES / "device.cu").read_bytes(),
        b"device.cu",
        len(texts),
        (ctypes.c_char_p * len(texts))(*texts.values()),
        (ctypes.c_char_p * len(texts))(*(name.encode() for name in texts)),
    )
    if status != 0:
        raise CompilerMissing(f"NVRTC does not take the kernels' text (error {status})")
    try:
        options = [f"--gpu-architecture={architecture}", *_OPTIONS, *(f"-D{text}" for text in definitions)]
        status = library.nvrtcCompileProgram(
            program, len(options), (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        )
        if status != 0:
            raise CompilerMissing(f"NVRTC does not compile for {architecture}: {_log(library, program)}")
        return _output(library, "CUBIN", program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _library(version: str) -> ctypes.CDLL:
    major = version.split(".")[0]
    name = "libnvrtc.so." + {"11": "11.2"}.get(major, major)
    for candidate in (name, *_installed(name)):  # the first finds what torch has loaded, or the system knows
        try:
            return ctypes.CDLL(candidate)
        except OSError:
            continue
    raise CompilerMissing(f"{name} is not installed: pip install nvidia-cuda-nvrtc-cu{major}")


def _installed(name: str) -> Iterator[str]:
    """Where pip puts it, conda, and NVIDIA's own installers."""
    for folder in sys.path:
        yield from map(str, sorted(Path(folder or ".").glob(f"nvidia/*/lib/{name}")))
    yield str(Path(sys.prefix) / "lib" / name)
    yield from map(str, sorted(Path("/usr/local").glob(f"cuda*/lib64/{name}"), reverse=True))


def _log(library: ctypes.CDLL, program: ctypes.c_void_p) -> str:
    """The first error that the compiler has printed."""
    lines = _output(library, "ProgramLog", program).decode(errors="replace").rstrip("\0").splitlines()
    return next((line for line in lines if "error" in line), " ".join(lines[:1]))


def _output(library: ctypes.CDLL, kind: str, program: ctypes.c_void_p) -> bytes:
    nbytes = ctypes.c_size_t()
    getattr(library, f"nvrtcGet{kind}Size")(program, ctypes.byref(nbytes))
    output = ctypes.create_string_buffer(max(nbytes.value, 1))
    getattr(library, f"nvrtcGet{kind}")(program, output)
    return output.raw[: nbytes.value]
