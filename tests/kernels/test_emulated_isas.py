"""NEON against scalar, cross-compiled and run under an emulator, where both are at hand.

On Debian: g++-aarch64-linux-gnu and qemu-user-static. Takes half a minute: runs where ``OFFLOAD_TEST_EMULATED=1`` asks.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

SOURCES = Path(__file__).parents[2] / "offload" / "kernels" / "src"
COMPILER, EMULATOR = "aarch64-linux-gnu-g++", "qemu-aarch64-static"


@pytest.mark.skipif(os.environ.get("OFFLOAD_TEST_EMULATED") != "1", reason="asked for by OFFLOAD_TEST_EMULATED=1")
@pytest.mark.skipif(shutil.which(COMPILER) is None, reason=f"no {COMPILER}")
@pytest.mark.skipif(shutil.which(EMULATOR) is None, reason=f"no {EMULATOR}")
def test_neon_has_the_bits_of_scalar(tmp_path: Path) -> None:
    flags = ["-std=c++20", "-O1", "-ffp-contract=off", "-fno-math-errno", f"-I{SOURCES}"]
    objects = []
    for isa, vec in (("scalar", "Scalar"), ("neon", "Neon")):
        objects.append(str(tmp_path / f"{isa}.o"))
        defines = [f"-DOFFLOAD_ISA={isa}", f"-DOFFLOAD_VEC={vec}"]
        subprocess.run([COMPILER, *flags, *defines, "-c", str(SOURCES / "isa.cpp"), "-o", objects[-1]], check=True)
    program = str(tmp_path / "isa_agreement")
    main = str(Path(__file__).with_name("isa_agreement.cpp"))
    subprocess.run([COMPILER, *flags, "-DTABLE=table_neon", "-static", main, *objects, "-o", program], check=True)
    result = subprocess.run([EMULATOR, program], capture_output=True, text=True)
    assert result.returncode == 0, result.stdout
    assert result.stdout == "neon: 0 differences\n"
