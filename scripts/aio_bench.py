#!/usr/bin/env python3
"""Find the best I/O settings of a path, compare them with fio, and write the profile that the engine loads by itself.

Works in a file that it makes itself and that has no name from then on: nothing is left behind, however it ends.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from aio_ext import Memory, Queue, available_backends, unavailable_backends
from aio_ext.measure import READS, WRITES, Mode, Range, Sample, mixed_q
from aio_ext.profile import IoProfile, file_system, profiles_path, save_profile
from swapper.paths import Medium, medium_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MODES: tuple[Mode, ...] = get_args(Mode)
BLOCKS = (256 * KIB, 512 * KIB, 1 * MIB, 2 * MIB, 4 * MIB)
DEPTHS = (4, 8, 16, 32, 64, 128)
THREADS = (2, 4, 8)
MEMORY_BYTES = 288 * MIB
IN_FLIGHT_BYTES_MAX = 256 * MIB
PROBE_SECONDS, PAIR_SECONDS = 0.25, 0.5
SAME = 0.97
"""A setting that reaches so much of the best counts as equal; of equals the one with the least in flight is taken."""


class BenchError(Exception):
    """One line for the person who asked."""


@dataclass(frozen=True)
class Setting:
    backend: str
    block_bytes: int
    depth: int

    def __str__(self) -> str:
        return f"{self.backend} {self.block_bytes // KIB} KiB x {self.depth}"


@dataclass
class Subject:
    """A path under test: the nameless file, the memory, and what was found."""

    path: Path
    fd: int
    nbytes: int
    memory: Memory
    bytes_per_s: float = 1e9
    tried: dict[Setting, dict[str, float]] = field(default_factory=dict)

    @contextmanager
    def range(self, setting: Setting) -> Iterator[Range]:
        with Queue(setting.backend, setting.depth, setting.block_bytes, num_threads=min(setting.depth, 256)) as queue:
            queue.register_memory(self.memory.address, self.memory.nbytes)
            file = queue.register_file(self.fd)
            yield Range(queue, file, self.nbytes, self.memory, setting.depth, setting.block_bytes)

    def bytes_for(self, seconds: float) -> int:
        return int(min(max(self.bytes_per_s * seconds, 64 * MIB), 16 * GIB))

    def probe(self, setting: Setting) -> float:
        """GiB/s that count: one read, one write and one mixed pass, by the time they take together."""
        if setting not in self.tried:
            nbytes = self.bytes_for(PROBE_SECONDS)
            with self.range(setting) as range_:
                self.tried[setting] = {mode: range_.measure(mode, nbytes).gib_per_s for mode in MODES}
        return statistics.harmonic_mean(self.tried[setting].values())


@contextmanager
def subject(path: Path, size: int | None, any_file_system: bool) -> Iterator[Subject]:
    if not path.is_dir():
        raise BenchError(f"{path} is not a directory")
    kind = file_system(path)
    medium = medium_of(kind)
    if not any_file_system and medium is not Medium.DISK:
        raise BenchError(f"{path} is on {kind}, behind {medium.value}; --any-file-system measures it all the same")
    free = shutil.disk_usage(path).free
    nbytes = size or min(GIB, free // 4) // (16 * MIB) * (16 * MIB)
    if nbytes < 64 * MIB or nbytes + 64 * MIB > free:
        raise BenchError(
            f"{path} has {free // MIB} MiB free, too little for a file of {max(nbytes, 64 * MIB) // MIB} MiB"
        )
    try:
        named, name = tempfile.mkstemp(dir=path, prefix="aio_bench.")
        os.close(named)
        try:
            fd = os.open(name, os.O_RDWR | os.O_DIRECT | os.O_CLOEXEC | os.O_NOFOLLOW)
        finally:
            os.unlink(name)  # noqa: PTH108
    except OSError as error:
        raise BenchError(f"no file with direct I/O can be made in {path}: {error.strerror}") from None
    try:
        os.posix_fallocate(fd, 0, nbytes)
        with Memory(MEMORY_BYTES) as memory:
            memory.populate()
            yield Subject(path, fd, nbytes, memory)
    finally:
        os.close(fd)


def grid(backend: str, blocks: Sequence[int] = BLOCKS, depths: Sequence[int] = ()) -> list[Setting]:
    """The settings of a backend with these blocks and depths (none: all that are tried) that fit into the memory."""
    depths = depths or (DEPTHS if backend == "io_uring" else THREADS)
    settings = [Setting(backend, block, depth) for block in blocks for depth in depths]
    return [setting for setting in settings if setting.block_bytes * setting.depth <= IN_FLIGHT_BYTES_MAX]


def search(it: Subject, bar: tqdm[None], backends: Sequence[str], full: bool) -> Setting:
    """The setting to use. Adaptive: the block size at a depth of 32, the depth at the best block size, the threads."""

    def best(settings: Sequence[Setting]) -> Setting:
        for setting in settings:
            bar.set_description(str(setting))
            it.probe(setting)
            bar.update()
        fastest = max(it.probe(setting) for setting in settings)
        good = [setting for setting in settings if it.probe(setting) >= SAME * fastest]
        return min(good, key=lambda setting: setting.depth * setting.block_bytes)

    winners = []
    for backend in backends:
        if full:
            winners.append(best(grid(backend)))
            continue
        block = best(grid(backend, depths=[32 if backend == "io_uring" else 4])).block_bytes
        winners.append(best(grid(backend, blocks=[block])))
    fastest = max(it.probe(setting) for setting in winners)
    return next(setting for setting in winners if it.probe(setting) >= SAME * fastest)


class Fio:
    """fio on the same file, at the same settings, with huge pages where some are reserved."""

    def __init__(self, it: Subject, setting: Setting) -> None:
        self._it = it
        self._setting = setting
        needed = -(-setting.block_bytes * (setting.depth + 1) // (2 * MIB))
        self.huge_pages = _free_huge_pages() >= needed
        self.engines: dict[Mode, str] = {}

    def choose_engines(self) -> None:
        """The faster of io_uring and libaio, for each mode."""
        nbytes = self._it.bytes_for(PROBE_SECONDS)
        for mode in MODES:
            rates = {engine: self._run(mode, nbytes, engine).bytes_per_s for engine in ("io_uring", "libaio")}
            self.engines[mode] = max(rates, key=lambda engine: rates[engine])

    def measure(self, mode: Mode, nbytes: int) -> Sample:
        return self._run(mode, nbytes, self.engines[mode])

    def _run(self, mode: Mode, nbytes: int, engine: str) -> Sample:
        command = [
            *("fio", "--name=bench", "--output-format=json", "--direct=1", "--allow_file_create=0", "--thread"),
            *(f"--filename=/proc/{os.getpid()}/fd/{self._it.fd}", f"--ioengine={engine}", "--group_reporting"),
            *(f"--bs={self._setting.block_bytes}", f"--iodepth={self._setting.depth}", "--invalidate=0"),
            *(f"--size={self._it.nbytes}", f"--io_size={nbytes // MIB * MIB}", "--scramble_buffers=0"),
            f"--rw={'rw' if mode == 'mixed' else mode}",
            f"--rwmixread={round(100 * READS / (READS + WRITES))}",
            *(["--mem=shmhuge", f"--hugepage-size={2 * MIB}"] if self.huge_pages else []),
        ]
        result = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        if result.returncode != 0:
            raise BenchError(f"fio failed: {result.stderr.strip().splitlines()[-1:] or result.returncode}")
        job = json.loads(result.stdout[result.stdout.index("{") :])["jobs"][0]
        seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1000
        return Sample(
            read_bytes=job["read"]["io_bytes"],
            write_bytes=job["write"]["io_bytes"],
            seconds=seconds,
            cpu_seconds=(job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000,
            depth_mean=float(self._setting.depth),
        )


def _free_huge_pages() -> int:
    try:
        return int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())
    except OSError:
        return 0


Samples = dict[str, list[Sample]]


def compare(it: Subject, setting: Setting, fio: Fio | None, pairs: int, bar: tqdm[None]) -> tuple[Samples, Samples]:
    """Ours and fio's samples of each mode, taken in turns, so that both meet the same moods of the machine."""
    ours: Samples = {mode: [] for mode in MODES}
    theirs: Samples = {mode: [] for mode in MODES}
    if fio:
        bar.set_description("fio: io_uring or libaio")
        fio.choose_engines()
    with it.range(setting) as range_:
        for pair in range(pairs):
            for mode in MODES:
                bar.set_description(f"{mode} {pair + 1} of {pairs}")
                nbytes = int(it.tried[setting][mode] * GIB * PAIR_SECONDS) // (64 * MIB) * 64 * MIB or 64 * MIB
                turns = [lambda m=mode, n=nbytes: ours[m].append(range_.measure(m, n))]
                if fio:
                    turns.append(lambda m=mode, n=nbytes: theirs[m].append(fio.measure(m, n)))
                for turn in turns if pair % 2 == 0 else reversed(turns):
                    turn()
                bar.update()
    return ours, theirs


def sustained(it: Subject, setting: Setting, gib: float, bar: tqdm[None]) -> dict[str, float]:
    """GiB/s of writing at the start, and of the last quarter, when a drive's fast cache may be full."""
    rates = []
    step = it.bytes_for(1.0)
    left = int(gib * GIB)
    with it.range(setting) as range_:
        while left > 0:
            bar.set_description(f"sustained, {left / GIB:.1f} GiB to go")
            rates.append(range_.measure("write", min(step, max(left, 16 * MIB))).gib_per_s)
            left -= step
    last = rates[-max(1, len(rates) // 4) :]
    return {"first_gib_per_s": rates[0], "last_gib_per_s": statistics.median(last), "written_gib": gib}


def tensors(it: Subject, setting: Setting, count: int, bar: tqdm[None]) -> dict[str, Any]:
    """``count`` tensors of 64 KiB to 1 MiB, asked for at once, against the same bytes in requests of 256 MiB."""
    draw = random.Random(1)
    small = [draw.randrange(64 * KIB, MIB + 1, 4 * KIB) for _ in range(count)]
    large = [256 * MIB] * (sum(small) // (256 * MIB)) or [sum(small)]
    result: dict[str, Any] = {"count": count, "bytes": sum(small)}
    with it.range(setting) as range_:
        for kind in ("read", "write"):
            samples: dict[str, list[Sample]] = {"small": [], "large": []}
            for turn in range(5):
                bar.set_description(f"{count} tensors, {kind} {turn + 1} of 5")
                sizes = {"small": small, "large": large}
                for name in sizes if turn % 2 == 0 else reversed(sizes):
                    samples[name].append(range_.move(kind, sizes[name]))
            rates = {name: median_rate(samples[name]) for name in samples}
            result[kind] = {
                **{f"{name}_gib_per_s": round(rate, 3) for name, rate in rates.items()},
                "ratio": round(rates["small"] / rates["large"], 3),
                "samples_gib_per_s": {name: [round(s.gib_per_s, 3) for s in samples[name]] for name in samples},
            }
    return result


def median_rate(samples: Sequence[Sample]) -> float:
    return statistics.median(sample.gib_per_s for sample in samples)


def result_of(it: Subject, setting: Setting, ours: Samples, theirs: Samples, fio: Fio | None) -> dict[str, Any]:
    rates = {mode: median_rate(ours[mode]) for mode in MODES}
    share = READS / (READS + WRITES)
    q = mixed_q(share / rates["read"], (1 - share) / rates["write"], 1 / rates["mixed"])
    result: dict[str, Any] = {
        "path": str(it.path),
        "file_system": file_system(it.path),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "backend": setting.backend,
        "block_bytes": setting.block_bytes,
        "queue_depth": setting.depth,
        **{f"{mode}_gib_per_s": round(rates[mode], 3) for mode in MODES},
        "mixed_q": round(q, 2),
        "cpu_seconds_per_gib": {m: round(statistics.median(s.cpu_seconds_per_gib for s in ours[m]), 4) for m in MODES},
        "samples_gib_per_s": {mode: [round(s.gib_per_s, 3) for s in ours[mode]] for mode in MODES},
        "huge_bytes": it.memory.huge_bytes(),
        "unavailable": unavailable_backends(),
        "fio": None,
    }
    if fio:
        result["fio"] = {
            **{f"{mode}_gib_per_s": round(median_rate(theirs[mode]), 3) for mode in MODES},
            "ratio": {
                mode: round(
                    statistics.median(
                        a.bytes_per_s / b.bytes_per_s for a, b in zip(ours[mode], theirs[mode], strict=True)
                    ),
                    3,
                )
                for mode in MODES
            },
            "cpu_seconds_per_gib": {
                mode: round(statistics.median(s.cpu_seconds_per_gib for s in theirs[mode]), 4) for mode in MODES
            },
            "samples_gib_per_s": {mode: [round(s.gib_per_s, 3) for s in theirs[mode]] for mode in MODES},
            "engines": fio.engines,
            "huge_pages": fio.huge_pages,
        }
    return result


def profile_of(result: dict[str, Any]) -> IoProfile:
    threads = result["queue_depth"] if result["backend"] == "threads" else 4
    return IoProfile(
        backend=result["backend"],
        block_bytes=result["block_bytes"],
        queue_depth=result["queue_depth"],
        num_threads=threads,
        read_bytes_per_s=result["read_gib_per_s"] * GIB,
        write_bytes_per_s=result["write_gib_per_s"] * GIB,
        mixed_bytes_per_s=result["mixed_gib_per_s"] * GIB,
        mixed_q=result["mixed_q"],
    )


def print_table(result: dict[str, Any]) -> None:
    fio = result["fio"]
    setting = Setting(result["backend"], result["block_bytes"], result["queue_depth"])
    print(f"{result['path']} ({result['file_system']}, Linux {result['kernel']}, {result['cpus']} CPUs): {setting}")
    print(
        f"{'':8}{'GiB/s':>8}{'spread':>16}{'CPU s/GiB':>11}" + (f"{'fio':>8}{'ratio':>8}{'its CPU':>9}" if fio else "")
    )
    for mode in MODES:
        samples = result["samples_gib_per_s"][mode]
        spread = f"{min(samples):.2f} to {max(samples):.2f}"
        line = f"{mode:8}{result[f'{mode}_gib_per_s']:8.2f}{spread:>16}{result['cpu_seconds_per_gib'][mode]:11.3f}"
        if fio:
            line += f"{fio[f'{mode}_gib_per_s']:8.2f}{fio['ratio'][mode]:8.2f}{fio['cpu_seconds_per_gib'][mode]:9.3f}"
        print(line)
    print(f"mixed is {READS} bytes read to {WRITES} written; q = {result['mixed_q']} (1: they share the drive)")
    if result["huge_bytes"] < MEMORY_BYTES:
        print(
            f"only {result['huge_bytes'] // MIB} of {MEMORY_BYTES // MIB} MiB of memory rest on huge pages: expect less"
        )
    if fio and not fio["huge_pages"]:
        print("fio ran on ordinary pages: none of 2 MiB are reserved (`sysctl vm.nr_hugepages=64` reserves some)")
    if "sustained" in result:
        s = result["sustained"]
        after = f"{s['last_gib_per_s']:.2f} GiB/s after {s['written_gib']} GiB"
        print(f"sustained writes: {s['first_gib_per_s']:.2f} at first, {after}")
    for kind in ("read", "write") if "tensors" in result else ():
        t = result["tensors"][kind]
        rates = f"{t['small_gib_per_s']:.2f} GiB/s, {t['ratio']:.2f} of {t['large_gib_per_s']:.2f} in large requests"
        print(f"{result['tensors']['count']} small tensors, {kind}: {rates}")
    for reason in result["unavailable"].values():
        print(reason)


def plot(it: Subject, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(MODES), figsize=(13, 4), sharey=True, constrained_layout=True)
    for axis, mode in zip(axes, MODES, strict=True):
        for backend, block in sorted({(s.backend, s.block_bytes) for s in it.tried}):
            points = sorted(
                (s.depth, v[mode]) for s, v in it.tried.items() if (s.backend, s.block_bytes) == (backend, block)
            )
            axis.plot(
                *zip(*points, strict=True),
                "o-" if backend == "io_uring" else "s--",
                color=f"C{BLOCKS.index(block)}",
                label=f"{backend}, {block // KIB} KiB",
            )
        axis.set(title=mode, xlabel="blocks in flight", xscale="log")
        axis.set_xticks((2, *DEPTHS), [str(depth) for depth in (2, *DEPTHS)])
        axis.minorticks_off()
    axes[0].set(ylabel="GiB/s", ylim=(0, None))  # once all is drawn: the axes share their scale
    figure.legend(*axes[0].get_legend_handles_labels(), loc="outside right upper", fontsize="small")
    figure.savefig(target, dpi=120)


def bench(path: Path, options: argparse.Namespace) -> dict[str, Any]:
    backends = options.backend or [name for name in available_backends() if name != "portable"] or ["portable"]
    with subject(path, options.size, options.any_file_system) as it:
        points = sum(len(grid(b)) if options.full else len(BLOCKS) + len(grid(b, blocks=[MIB])) for b in backends)
        with tqdm(
            total=points + options.pairs * len(MODES),
            disable=True if options.json else None,
            leave=False,
            file=sys.stderr,
        ) as bar:
            bar.set_description("first write")
            start = Setting(backends[0], MIB, 4)
            with it.range(start) as range_:  # blocks that were never written are a matter of the file system
                range_.measure("write", it.nbytes)
                it.bytes_per_s = range_.measure("read", it.nbytes // 4).bytes_per_s
            setting = search(it, bar, backends, options.full)
            fio = Fio(it, setting) if shutil.which("fio") and not options.no_fio else None
            ours, theirs = compare(it, setting, fio, options.pairs, bar)
            result = result_of(it, setting, ours, theirs, fio)
            if options.sustained:
                result["sustained"] = sustained(it, setting, options.sustained, bar)
            if options.tensors:
                result["tensors"] = tensors(it, setting, options.tensors, bar)
        if options.plot:
            plot(it, options.plot)
        result["tried"] = [{**asdict(s), **{m: round(v, 3) for m, v in rates.items()}} for s, rates in it.tried.items()]
    if not options.no_profile:
        save_profile(path, profile_of(result))
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("paths", nargs="+", type=Path, metavar="PATH", help="a directory on the drive to measure")
    parser.add_argument("--full", action="store_true", help="try every combination, not only the promising ones")
    parser.add_argument("--backend", action="append", choices=("io_uring", "threads", "portable"), help="only these")
    parser.add_argument("--sustained", type=float, metavar="GiB", help="also write so much, to fill a fast cache")
    parser.add_argument("--tensors", type=int, metavar="N", help="also move N tensors of 64 KiB to 1 MiB")
    parser.add_argument("--pairs", type=int, default=5, help="measurements, in turns with fio (default 5)")
    parser.add_argument("--size", type=lambda text: int(text) * MIB, metavar="MiB", help="of the file (default 1024)")
    parser.add_argument("--plot", type=Path, metavar="PNG", help="draw bandwidth over depth and block size")
    parser.add_argument("--json", action="store_true", help="print one object for programs")
    parser.add_argument("--no-fio", action="store_true", help="do not run fio")
    parser.add_argument("--no-profile", action="store_true", help=f"do not write {profiles_path()}")
    parser.add_argument("--any-file-system", action="store_true", help="also in memory or over a network")
    options = parser.parse_args()
    if options.pairs < 1:
        parser.error("--pairs must be at least 1")
    try:
        results = [bench(path, options) for path in options.paths]
    except (BenchError, OSError, ValueError) as error:
        print(f"aio_bench: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    if options.json:
        print(json.dumps(results[0] if len(results) == 1 else {**results[0], "paths": results}))
        return 0
    for result in results:
        print_table(result)
    if not options.no_profile:
        print(f"profile: {profiles_path()}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
