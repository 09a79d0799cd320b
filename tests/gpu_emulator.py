"""A GPU that runs the kernels' text on the host: what tests launch where there is none."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Lock
from typing import Any

import pytest

from offload.kernels.gpu import Program

_SOURCES = Path(__file__).parents[1] / "offload" / "kernels" / "src"
_COMPILER = shutil.which("c++")
_one_at_a_time = Lock()

_MAIN = """
#include "{emulator}"
#include "device.cu"

enum class Barriers {{ none, some }};

template <Barriers barriers, class Function, class... Arguments>
void launch(Function function, unsigned blocks, unsigned threads, Arguments... arguments) {{
  blockDim.x = threads;
  for (blockIdx.x = 0; blockIdx.x < blocks; ++blockIdx.x) {{
    if constexpr (barriers == Barriers::some) {{
      Block::block().run(threads, [&] {{ function(arguments...); }});
    }} else {{
      for (threadIdx.x = 0; threadIdx.x < threads; ++threadIdx.x) function(arguments...);
    }}
  }}
}}

// Arguments as cuLaunchKernel takes them: an address for each.
template <Barriers barriers, class... Parameters, std::size_t... k>
void call(void (*function)(Parameters...), unsigned blocks, unsigned threads, void** arguments,
          std::index_sequence<k...>) {{
  launch<barriers>(function, blocks, threads, *static_cast<std::remove_const_t<Parameters>*>(arguments[k])...);
}}
template <Barriers barriers, class... Parameters>
void call(void (*function)(Parameters...), unsigned blocks, unsigned threads, void** arguments) {{
  call<barriers>(function, blocks, threads, arguments, std::index_sequence_for<Parameters...>{{}});
}}

#define ENTRY(name, barriers) \\
  extern "C" void launch_##name(unsigned blocks, unsigned threads, void** arguments) {{ \\
    call<Barriers::barriers>(name, blocks, threads, arguments); \\
  }}
ENTRY(update, none)
ENTRY(square_lanes, some)
ENTRY(square_ranges, some)
"""


class Emulator:
    """Launches on the host what a GPU would run, at once. Skips the test where there is no compiler."""

    def __init__(self) -> None:
        if _COMPILER is None:
            pytest.skip("no C++ compiler")

    def __call__(
        self, program: Program, function: str, num_blocks: int, num_threads: int, arguments: Sequence[Any]
    ) -> None:
        addresses = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        self.call(program, function, num_blocks, num_threads, addresses)

    def call(self, program: Program, function: str, num_blocks: int, num_threads: int, addresses: Any) -> None:
        """The same with the addresses of the arguments, as ``cuLaunchKernel`` takes them."""
        with _one_at_a_time:  # the place of a thread is kept in global variables
            getattr(_compiled(program), f"launch_{function}")(num_blocks, num_threads, addresses)


@cache
def _compiled(program: Program) -> ctypes.CDLL:
    with TemporaryDirectory() as folder:
        source, library = Path(folder) / "kernels.cpp", Path(folder) / "kernels.so"
        source.write_text(_MAIN.format(emulator=Path(__file__).with_suffix(".h")))
        defines = [f"-D{text}" for text in ("OFFLOAD_ISA=gpu", *program.definitions())]
        flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-fno-math-errno", "-fPIC", "-shared", f"-I{_SOURCES}"]
        assert _COMPILER is not None
        subprocess.run([_COMPILER, *flags, *defines, str(source), "-o", str(library)], check=True)
        return ctypes.CDLL(str(library))
