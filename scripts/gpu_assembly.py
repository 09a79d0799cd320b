"""Reads the assembly of the GPU kernels, for all optimizers, formats and GPUs, without a GPU.

    python scripts/gpu_assembly.py          all programs, for sm_80, 90, 100 and 120, by NVRTC 12 and 13: an hour
    python scripts/gpu_assembly.py --rules adamw --architectures 90 --table

What it looks for, in the PTX: arithmetic that is not rounded to nearest, multiplications and additions that were made
one (more fused ones than the rule has), flushed subnormal numbers, local memory, and loads that do not stand together.
In the binary: registers and local memory of each kernel; and, if ``nvdisasm`` is there (``pip install
nvidia-cuda-nvdisasm``), whether the machine begins all loads of an update before it waits for one.
"""

from __future__ import annotations

import argparse
import re
import shutil
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from offload.kernels.gpu import _FORMATS, Program
from offload.kernels.nvrtc import CompilerMissing, compile_kernels

ARCHITECTURES = ("80", "90", "100", "120")
COMPILERS = ("12", "13")
KERNELS = ("update", "square_lanes", "square_ranges")
MOST_REGISTERS = 64
"""A GPU with 65,536 of them then keeps 1,024 threads at work on each multiprocessor."""

_FUSED = {
    "adamw": 4, "adamw_amsgrad": 4, "adam": 5, "adam_amsgrad": 5, "adagrad": 3, "lion": 3, "sgd": 2, "sgd_momentum": 3,
    "sgd_nesterov": 4,
}  # fmt: skip
"""Calls of ``fma`` in a rule of src/rules.h, ``advance`` and ``apply`` together."""

_STATES = {name: 3 if "amsgrad" in name else 2 if "adam" in name else 0 if name == "sgd" else 1 for name in _FUSED}

_COPIES = 5
"""How often the text of a rule stands in a program: for each of four elements at a time, and for one at the end."""

_SQUARE_LOADS = 8
"""``kPieces`` in src/device.cu."""

_INSTRUCTION = re.compile(r"^\s*(?:@!?%p\d+\s+)?([a-z][\w.]*)\s*(.*);")
_INEXACT = re.compile(r"\.(ftz|approx|full|sat|rz|rm|rp)\b")
_NOT_ARITHMETIC = ("mov.", "ld.", "st.", "setp.", "selp.", "neg.", "abs.", "cvt.f64.f32")


@dataclass(frozen=True)
class Case:
    """A program, and what it is compiled with and for."""

    program: Program
    architecture: str
    compiler: str

    def __str__(self) -> str:
        formats = f"{self.program.grad} {self.program.weight_format} {self.program.state}"
        return f"{self.program.rule} {formats} sm_{self.architecture} NVRTC {self.compiler}"


@dataclass(frozen=True)
class Resources:
    """What a kernel takes of a GPU, for each of its threads."""

    registers: int
    local_bytes: int


def all_cases(rules: Iterable[str], architectures: Iterable[str], compilers: Iterable[str]) -> Iterator[Case]:
    """Every optimizer with every format of gradients, weights and states."""
    for compiler, architecture, rule, grad, weights, state in product(
        compilers, architectures, rules, ("f32", "bf16", "f16"), _FORMATS, ("f32", "bf16")
    ):
        yield Case(Program(rule, grad, weights, state), architecture, compiler)


def check(case: Case, disassembler: str | None) -> tuple[list[str], dict[str, Resources]]:
    """What is wrong with a program, a line each, and what its kernels take. Raises ``CompilerMissing``."""
    found = check_ptx(case, compile_ptx(case))
    binary = compile_kernels(case.compiler, f"sm_{case.architecture}", case.program.definitions())
    taken = resources(binary)
    for kernel, of in taken.items():
        if of.local_bytes:
            found.append(f"{kernel}: {of.local_bytes} bytes of local memory a thread")
        if of.registers > MOST_REGISTERS:
            found.append(f"{kernel}: {of.registers} registers")
    if disassembler is not None:
        found += check_sass(case, disassemble(disassembler, binary))
    return [f"{case}: {line}" for line in found], taken


def compile_ptx(case: Case) -> str:
    """A program's PTX."""
    ptx = compile_kernels(case.compiler, f"compute_{case.architecture}", case.program.definitions())
    return ptx.decode().rstrip("\0")


def check_ptx(case: Case, text: str) -> list[str]:
    """What is wrong in the PTX of a program, which holds the three kernels."""
    found = []
    bodies = dict(re.findall(r"\.entry (\w+)\((?:.*?)\n\{\n(.*?)\n\}", text, re.DOTALL))
    if set(bodies) != set(KERNELS):
        return [f"its kernels are {sorted(bodies)}"]
    for kernel, body in bodies.items():
        found += [f"{kernel}: {line}" for line in _wrong_instructions(body)]
    fused = sum(operation.startswith("fma.") for operation, _ in _instructions(bodies["update"]))
    if fused != _COPIES * _FUSED[case.program.rule]:
        found.append(
            f"update: {fused} fused multiplications and additions, the rule has {_FUSED[case.program.rule]} in each "
            "copy"
        )
    for kernel in KERNELS[1:]:
        if "fma." in bodies[kernel]:
            found.append(f"{kernel}: a fused multiplication and addition")
    found += _split_loads("update", bodies["update"], "ld.global.v", _num_arrays(case))
    found += _split_loads("square_lanes", bodies["square_lanes"], "ld.global.v4", _SQUARE_LOADS)
    return found


def check_sass(case: Case, text: str) -> list[str]:
    """What is wrong in the machine's instructions of a program: ``nvdisasm -c`` prints a section for each kernel."""
    found = []
    for kernel, body in re.findall(r"\.text\.(\w+):\n(.*?)(?=\n//---|\Z)", text, re.DOTALL):
        lines = re.findall(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?([A-Z][\w.]*)\s*(.*?);", body)
        if any(operation.startswith(("LDL", "STL")) for operation, _ in lines):
            found.append(f"{kernel}: local memory")
        if kernel == "update":
            found += _late_loads(lines, _num_arrays(case))
    return found


def _wrong_instructions(body: str) -> Iterator[str]:
    if ".local" in body:
        yield "local memory"
    for operation, operands in _instructions(body):
        floating = re.search(r"\.f(16|32|64)", operation)
        if operation.startswith("call"):
            yield f"a call: {operation} {operands}"
        elif floating and _INEXACT.search(operation):
            yield f"not IEEE's arithmetic to nearest: {operation}"
        elif floating and not operation.startswith(_NOT_ARITHMETIC) and ".rn" not in operation:
            yield f"rounding is left to the compiler: {operation}"


def _split_loads(kernel: str, body: str, load: str, num_loads: int) -> Iterator[str]:
    """Wide loads that are not in one piece of code without branch and arithmetic: a thread would wait again."""
    found = 0
    for line in body.splitlines():
        match = _INSTRUCTION.match(line)
        operation = match[1] if match else ""
        if operation.startswith(load):
            found += 1
            if found == num_loads:
                return
        elif found and (operation.startswith("bra") or line.startswith("$L") or ".rn" in operation):
            break
    yield f"{kernel}: {found} of {num_loads} wide loads stand together"


def _late_loads(instructions: list[tuple[str, str]], num_loads: int) -> Iterator[str]:
    """Wide loads that the machine begins after the first use of what another of them brings."""
    brought: set[int] = set()
    num_found = 0
    for operation, operands in instructions:
        width = re.match(r"LDG\.E\.(64|128)", operation)
        target, _, address = operands.partition(",")
        if brought & set(_registers(address if width else operands)):
            break
        if width:
            (first,) = _registers(target)
            brought |= set(range(first, first + int(width[1]) // 32))
            num_found += 1
            if num_found == num_loads:
                return
    yield f"update: the machine begins {num_found} of {num_loads} wide loads before it waits for one"


def _instructions(body: str) -> list[tuple[str, str]]:
    return [(match[1], match[2]) for line in body.splitlines() if (match := _INSTRUCTION.match(line))]


def _registers(operands: str) -> list[int]:
    return [int(number) for number in re.findall(r"\bR(\d+)", operands)]


def _num_arrays(case: Case) -> int:
    """Arrays that an update reads: gradient, weight in one or two halves, states."""
    return 1 + (2 if case.program.weight_format == "split" else 1) + _STATES[case.program.rule]


def resources(binary: bytes) -> dict[str, Resources]:
    """Registers and local memory of each kernel, from the section ``.nv.info`` of an ELF file of NVIDIA's compilers."""
    sections = list(_sections(binary))
    symbols = next(content for kind, _, content in sections if kind == 2)
    names = next(content for kind, name, content in sections if kind == 3 and name == b".strtab")
    info = next(content for _, name, content in sections if name == b".nv.info")
    found: dict[str, dict[int, int]] = {}
    for attribute, index, value in _attributes(info):
        start = struct.unpack_from("<I", symbols, 24 * index)[0]
        found.setdefault(names[start : names.index(b"\0", start)].decode(), {})[attribute] = value
    return {
        name: Resources(of[_REGISTERS], max(of.get(_FRAME, 0), of.get(_STACK, 0)))
        for name, of in found.items()
        if name in KERNELS
    }


_FRAME, _STACK, _REGISTERS = 0x11, 0x12, 0x2F
"""Attributes of ``.nv.info``: bytes of a function's frame, of its stack, and its registers."""


def _sections(binary: bytes) -> Iterator[tuple[int, bytes, bytes]]:
    """Kind, name and content of the sections of an ELF file of 64 bits."""
    (table,) = struct.unpack_from("<Q", binary, 0x28)
    size, count, of_names = struct.unpack_from("<HHH", binary, 0x3A)
    headers = [struct.unpack_from("<IIQQQQ", binary, table + size * index) for index in range(count)]
    names = headers[of_names][4]
    for name, kind, _, _, start, nbytes in headers:
        end = binary.index(b"\0", names + name)
        yield kind, binary[names + name : end], binary[start : start + nbytes]


def _attributes(info: bytes) -> Iterator[tuple[int, int, int]]:
    """Attribute, symbol and value of the entries that are a pair of numbers of 32 bits."""
    place = 0
    while place + 4 <= len(info):
        form, attribute, nbytes = struct.unpack_from("<BBH", info, place)
        place += 4
        if form == 4:
            if nbytes == 8:
                yield attribute, *struct.unpack_from("<II", info, place)
            place += nbytes


def find_disassembler() -> str | None:
    """``nvdisasm``, on the path or where pip puts it."""
    folders = (Path(folder) / "nvidia" for folder in sys.path)
    return shutil.which("nvdisasm") or next(
        (str(path) for folder in folders for path in folder.glob("*/bin/nvdisasm")), None
    )


def disassemble(disassembler: str, binary: bytes) -> str:
    """The machine's instructions of a binary."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        return subprocess.run([disassembler, "-c", file.name], capture_output=True, text=True, check=True).stdout


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--rules", nargs="+", choices=_FUSED, default=list(_FUSED))
    parser.add_argument("--architectures", nargs="+", default=ARCHITECTURES)
    parser.add_argument("--compilers", nargs="+", default=COMPILERS)
    parser.add_argument("--table", action="store_true", help="print the registers of each program's update")
    options = parser.parse_args()
    disassembler = find_disassembler()
    num_programs, num_wrong, most = 0, 0, 0
    for case in all_cases(options.rules, options.architectures, options.compilers):
        try:
            wrong, taken = check(case, disassembler)
        except CompilerMissing as error:
            wrong, taken = [f"{case}: {error}"], {}
        if options.table:
            print(case, *(f"{kernel} {of.registers}" for kernel, of in taken.items()))
        num_programs, num_wrong = num_programs + 1, num_wrong + bool(wrong)
        most = max([most, *(of.registers for of in taken.values())])
        print(*wrong, sep="\n", end="\n" if wrong else "", flush=True)
    looked = "with" if disassembler else "without"
    print(f"{num_programs} programs, {looked} nvdisasm; {num_wrong} wrong; a kernel takes {most} registers at most")
    return int(num_wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
