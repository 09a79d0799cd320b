"""What NVRTC makes of the kernels' text, read without a GPU, and how it is found."""

from __future__ import annotations

import importlib.metadata
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import cycle
from pathlib import Path

import pytest

from offload.kernels import nvrtc
from offload.kernels.gpu import _FORMATS, Program

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import gpu_assembly

_WHEELS = {"12": "nvidia-cuda-nvrtc-cu12", "13": "nvidia-cuda-nvrtc"}


def is_installed(compiler: str) -> bool:
    try:
        importlib.metadata.version(_WHEELS[compiler])
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


COMPILERS = [compiler for compiler in _WHEELS if is_installed(compiler)]
needs_compilers = pytest.mark.skipif(not COMPILERS, reason=f"none of {', '.join(_WHEELS.values())} is installed")

_ALONE = """
import importlib.util, sys
spec = importlib.util.spec_from_file_location("nvrtc", sys.argv[1])
nvrtc = importlib.util.module_from_spec(spec)
spec.loader.exec_module(nvrtc)
binary = nvrtc.compile_kernels(sys.argv[2], "sm_90", sys.argv[3:])
assert "torch" not in sys.modules and binary.startswith(b"\\x7fELF")
"""


# What is compiled.


def slice_of(architecture: str) -> list[gpu_assembly.Case]:
    """Every optimizer, and every format of gradients, weights and states at least once."""
    formats = zip(cycle(("bf16", "f32", "f16")), cycle(_FORMATS), cycle(("f32", "bf16")), strict=False)
    return [
        gpu_assembly.Case(Program(rule, *of), architecture, compiler)
        for rule, of, compiler in zip(gpu_assembly._FUSED, formats, cycle(COMPILERS), strict=False)
    ]


@pytest.mark.one_in(4)
@needs_compilers
@pytest.mark.parametrize("architecture", gpu_assembly.ARCHITECTURES)
def test_arithmetic_is_exact_and_loads_come_first(architecture: str) -> None:
    first, *others = slice_of(architecture)
    wrong, taken = gpu_assembly.check(first, gpu_assembly.find_disassembler())
    assert wrong == [] and set(taken) == set(gpu_assembly.KERNELS)
    assert all(0 < of.registers <= gpu_assembly.MOST_REGISTERS and of.local_bytes == 0 for of in taken.values())
    for case in others:
        assert gpu_assembly.check_ptx(case, gpu_assembly.compile_ptx(case)) == []


@needs_compilers
@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("--fmad=true", "update: rounding is left to the compiler: mul.f32"),
        ("--fmad=true", "square_lanes: a fused multiplication and addition"),
        ("--prec-div=false", "update: not IEEE's arithmetic to nearest: div.full.f32"),
        ("--ftz=true", "update: not IEEE's arithmetic to nearest: sqrt.rn.ftz.f32"),
    ],
)
def test_a_compiler_that_is_let_off_ieee_is_found(monkeypatch: pytest.MonkeyPatch, option: str, said: str) -> None:
    case = gpu_assembly.Case(Program("adamw", "f32", "f32", "f32"), "90", COMPILERS[-1])
    kept = [given for given in nvrtc._OPTIONS if not given.startswith(option.split("=")[0])]
    monkeypatch.setattr(nvrtc, "_OPTIONS", (*kept, option))
    assert said in gpu_assembly.check_ptx(case, gpu_assembly.compile_ptx(case))


@needs_compilers
@pytest.mark.parametrize(
    ("text", "planted", "said"),
    [
        (
            "Operands<Scalar> x[kEach];",
            "Operands<Scalar> x[kEach];\n#pragma unroll 1",
            "update: local memory",
        ),
        ("end <= numel && is_aligned(arrays)", "false", "update: 0 of 5 wide loads stand together"),
        (
            "Scalar::add_square(sum, ",
            "([](double sum, float x) { return __fma_rn(double(x), double(x), sum); })(sum, ",
            "square_lanes: a fused multiplication and addition",
        ),
    ],
)
def test_text_that_is_slow_or_inexact_is_found(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, planted: str, said: str
) -> None:
    sources = tmp_path / "src"
    shutil.copytree(nvrtc._SOURCES, sources)
    kernels = (sources / "device.cu").read_text()
    assert text in kernels
    (sources / "device.cu").write_text(kernels.replace(text, planted))
    monkeypatch.setattr(nvrtc, "_SOURCES", sources)
    case = gpu_assembly.Case(Program("adamw", "bf16", "split", "f32"), "90", COMPILERS[-1])
    assert said in gpu_assembly.check_ptx(case, gpu_assembly.compile_ptx(case))


_LISTING = """
.text.update:
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/                   LDG.E.64 R4, desc[UR6][R2.64] ;
        /*0020*/                   LDG.E.128 R8, desc[UR6][R12.64] ;
{use}
        /*0040*/              @!P0 LDG.E.64 R16, desc[UR6][R14.64] ;
        /*0050*/                   FMUL R0, R5, UR20 ;
//--------------------- .text.square_lanes        --------------------------
.text.square_lanes:
        /*0000*/                   {square} R3, R5 ;
"""


@pytest.mark.parametrize(
    ("use", "square", "said"),
    [
        ("        /*0030*/                   IADD3 R14, P0, R20, R22, RZ ;", "DADD", []),
        (
            "        /*0030*/                   FMUL R0, R11, UR20 ;",  # the last of the four that LDG.E.128 R8 fills
            "DADD",
            ["update: the machine begins 2 of 3 wide loads before it waits for one"],
        ),
        ("", "STL.64", ["square_lanes: local memory"]),
    ],
)
def test_a_machine_that_waits_twice_or_spills_is_found(use: str, square: str, said: list[str]) -> None:
    case = gpu_assembly.Case(Program("lion", "bf16", "f32", "f32"), "90", "13")
    assert gpu_assembly.check_sass(case, _LISTING.format(use=use, square=square)) == said


def test_the_table_of_rules_is_that_of_the_text() -> None:
    rules = (Path(nvrtc.__file__).with_name("src") / "rules.h").read_text()
    listed = re.findall(r"^  RULE\((\w+),", rules, re.MULTILINE)
    assert set(gpu_assembly._FUSED) == set(gpu_assembly._STATES) == set(listed)


# How the compiler is found.


@needs_compilers
@pytest.mark.parametrize("compiler", COMPILERS)
def test_it_compiles_where_torch_has_loaded_nothing(compiler: str) -> None:
    definitions = Program("sgd", "f32", "f32", "f32").definitions()
    arguments = [sys.executable, "-c", _ALONE, nvrtc.__file__, compiler, *definitions]
    done = subprocess.run(arguments, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


_FAKE = """
#include <cstring>
extern "C" {{
int nvrtcCreateProgram(void**, const char*, const char*, int, const char**, const char**) {{ return 0; }}
int nvrtcCompileProgram(void*, int, const char**) {{ return {status}; }}
int nvrtcDestroyProgram(void**) {{ return 0; }}
int nvrtcGetProgramLogSize(void*, std::size_t* size) {{ *size = {size}; return 0; }}
int nvrtcGetProgramLog(void*, char* log) {{ std::memcpy(log, "{text}", {size}); return 0; }}
int nvrtcGetCUBINSize(void*, std::size_t* size) {{ *size = {size}; return 0; }}
int nvrtcGetCUBIN(void*, char* binary) {{ std::memcpy(binary, "{text}", {size}); return 0; }}
}}
"""


@pytest.fixture
def fake_compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, int, str], None]:
    """Puts a compiler of CUDA 99 where a wheel would: it ends with a status, and says a text or makes it."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("no C++ compiler")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])

    def make(package: str, status: int, text: str) -> None:
        folder = tmp_path / "nvidia" / package / "lib"
        folder.mkdir(parents=True)
        (folder / "fake.cpp").write_text(_FAKE.format(status=status, text=text, size=len(text)))
        arguments = ["-shared", "-fPIC", str(folder / "fake.cpp"), "-o", str(folder / "libnvrtc.so.99")]
        subprocess.run([compiler, *arguments], check=True)

    return make


def test_the_next_compiler_is_tried_where_one_does_not_know_the_gpu(
    fake_compiler: Callable[[str, int, str], None], tmp_path: Path
) -> None:
    fake_compiler("a", 5, "nvrtc: error: invalid value for --gpu-architecture (-arch)")
    (tmp_path / "nvidia" / "b" / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "b" / "lib" / "libnvrtc.so.99").write_text("no library")
    with pytest.raises(nvrtc.CompilerMissing) as caught:
        nvrtc.compile_kernels("99.0", "sm_120", ())
    expected = "NVRTC does not compile for sm_120: nvrtc: error: invalid value for --gpu-architecture (-arch)"
    assert str(caught.value) == expected
    fake_compiler("c", 0, "a binary")
    assert nvrtc.compile_kernels("99.0", "sm_120", ()) == b"a binary"


def test_a_compiler_that_cannot_be_loaded_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    with pytest.raises(
        nvrtc.CompilerMissing, match=r"libnvrtc.so.99 is not installed: pip install nvidia-cuda-nvrtc==99.\*"
    ):
        nvrtc.compile_kernels("99.0", "sm_90", ())
    (tmp_path / "nvidia" / "a" / "lib").mkdir(parents=True)
    (tmp_path / "nvidia" / "a" / "lib" / "libnvrtc.so.99").write_text("no library")
    with pytest.raises(nvrtc.CompilerMissing, match=r"NVRTC cannot be loaded: .*libnvrtc.so.99: "):
        nvrtc.compile_kernels("99.0", "sm_90", ())


def test_what_a_compiler_wants_to_find_loaded_is_loaded_first(
    fake_compiler: Callable[[str, int, str], None], tmp_path: Path
) -> None:
    """A library beside it is broken: it is asked for before the compiler is used."""
    fake_compiler("a", 0, "a binary")
    (tmp_path / "nvidia" / "a" / "lib" / "libnvrtc-builtins.so.99.0").write_text("no library")
    with pytest.raises(nvrtc.CompilerMissing, match=r"libnvrtc-builtins.so.99.0"):
        nvrtc.compile_kernels("99.0", "sm_90", ())
