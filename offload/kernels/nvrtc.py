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
    """``device.cu`` with these macros: the binary for a GPU such as ``sm_90``, the PTX for one such as ``compute_90``.

    ``version`` is that of CUDA, such as ``12.8``. All compilers of its major version are tried in turn: an old one does
    not know a new GPU, and one may be broken. Raises ``CompilerMissing`` with the first error if none can.
    """
    major = version.split(".")[0]
    name = "libnvrtc.so." + {"11": "11.2"}.get(major, major)
    first_error: CompilerMissing | None = None
    for candidate in _candidates(name):
        try:
            return _compile(_load(candidate, major), architecture, definitions)
        except CompilerMissing as error:
            first_error = first_error or error
    raise first_error or CompilerMissing(f"{name} is not installed: pip install {_wheel(major)}")


def _compile(library: ctypes.CDLL, architecture: str, definitions: Sequence[str]) -> bytes:
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
        return _output(library, "PTX" if architecture.startswith("compute_") else "CUBIN", program)
    finally:
        library.nvrtcDestroyProgram(ctypes.byref(program))


def _candidates(name: str) -> Iterator[str]:
    """Places where pip, conda and NVIDIA's own installers put it, as far as it is there; then what the system knows."""
    for folder in sys.path:
        yield from map(str, sorted(Path(folder or ".").glob(f"nvidia/*/lib/{name}")))
    in_prefix = Path(sys.prefix) / "lib" / name
    if in_prefix.exists():
        yield str(in_prefix)
    yield from map(str, sorted(Path("/usr/local").glob(f"cuda*/lib64/{name}"), reverse=True))
    try:
        ctypes.CDLL(name)
    except OSError:
        return
    yield name


def _load(candidate: str, major: str) -> ctypes.CDLL:
    """The compiler, which will ask for its builtins by name: some builds find them only if they are loaded already."""
    try:
        if "/" in candidate:
            for builtins in sorted(Path(candidate).parent.glob(f"libnvrtc-builtins.so.{major}*")):
                ctypes.CDLL(str(builtins))
        return ctypes.CDLL(candidate)
    except OSError as error:
        raise CompilerMissing(f"NVRTC cannot be loaded: {error}") from error


def _wheel(major: str) -> str:
    return f"nvidia-cuda-nvrtc-cu{major}" if int(major) < 13 else f"nvidia-cuda-nvrtc=={major}.*"


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
