#!/usr/bin/env python3
"""Find the best I/O settings of a path, compare them with fio, and write the profile that the engine loads by itself.

Works in a file that it makes itself and that has no name from then on: nothing is left behind, however it ends.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from aio_ext import Memory, Queue, available_backends, unavailable_backends
from aio_ext.measure import NUM_BUFFERS, READS, REQUEST_BYTES, WRITES, Mode, Range, Sample, mixed_q
from aio_ext.profile import IoProfile, file_system, profiles_path, save_profile
from swapper.paths import Medium, medium_of

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
MODES: tuple[Mode, ...] = ("read", "write", "mixed")
"""What is compared and kept in the profile."""
USES: tuple[Mode, ...] = ("read", "update")
"""What settings are chosen by: the engine reads weights ahead of compute, and its update reads and writes tiles."""
BLOCKS = (256 * KIB, 512 * KIB, 1 * MIB, 2 * MIB, 4 * MIB)
DEPTHS = (4, 8, 16, 32, 64, 128)
THREADS = (2, 4)
"""Depths of the other backends: the engine gives them no more threads."""
ENGINE_BYTES = NUM_BUFFERS * REQUEST_BYTES
"""The engine's tile buffers. No more than that is tried in flight."""
TENSOR_MEMORY_BYTES = 288 * MIB
PROBE_SECONDS, PAIR_SECONDS = 0.1, 0.4
ROUNDS, ENGINE_ROUNDS = 7, 3
FASTER = 1.05
"""A setting is faster than another if in three rounds of four it is so by this factor."""
GLIBC_HUGE_PAGES = "glibc.malloc.hugetlb=1:glibc.malloc.mmap_max=0"
"""From the heap, not by mmap: that would begin at any page, and cost small buffers most of their 2 MiB pages."""
FIO_MISSING = "fio is not installed: nothing to compare with (`apt-get install fio`)"


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
    """A path under test: the nameless file, memory as large as the engine's buffers, and the GiB/s that were found."""

    path: Path
    fd: int
    nbytes: int
    memory: Memory
    bytes_per_s: float = 1e9
    tried: dict[Setting, dict[str, list[float]]] = field(default_factory=dict)

    @contextmanager
    def range(self, setting: Setting, memory: Memory | None = None) -> Iterator[Range]:
        memory = memory or self.memory
        with Queue(setting.backend, setting.depth, setting.block_bytes) as queue:
            queue.register_memory(memory.address, memory.nbytes)
            file = queue.register_file(self.fd)
            yield Range(queue, file, self.nbytes, memory, setting.depth, setting.block_bytes)

    def bytes_for(self, seconds: float) -> int:
        return int(min(max(self.bytes_per_s * seconds, 32 * MIB), 16 * GIB))

    def probe(self, setting: Setting) -> float:
        """GiB/s that count: of what the engine does, by the time that all of it takes together."""
        nbytes = self.bytes_for(PROBE_SECONDS)
        with self.range(setting) as range_:
            rates = {use: range_.measure(use, nbytes).gib_per_s for use in USES}
        found = self.tried.setdefault(setting, {use: [] for use in USES})
        for use in USES:
            found[use].append(rates[use])
        return statistics.harmonic_mean(rates.values())


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
        with Memory(ENGINE_BYTES) as memory:
            memory.populate()
            yield Subject(path, fd, nbytes, memory)
    finally:
        os.close(fd)


def default(backend: str) -> Setting:
    """What the engine takes without a profile."""
    return Setting(backend, MIB, 32 if backend == "io_uring" else max(THREADS))


def grid(backend: str, blocks: Sequence[int] = BLOCKS) -> list[Setting]:
    """The settings of a backend with these blocks whose blocks in flight fit into the engine's buffers."""
    depths = DEPTHS if backend == "io_uring" else THREADS
    settings = [Setting(backend, block, depth) for block in blocks for depth in depths]
    return [setting for setting in settings if setting.block_bytes * setting.depth <= ENGINE_BYTES]


def rivals(backend: str) -> list[Setting]:
    """The default's rivals: with other blocks, and the default's depth or what fits of it."""
    start = default(backend)
    deepest = {setting.block_bytes: setting for setting in grid(backend) if setting.depth <= start.depth}
    return list(deepest.values())


def chosen(scores: Mapping[Setting, Sequence[float]]) -> Setting:
    """The first setting, unless one is faster; of those that nothing is faster than, the one with least in flight.

    ``scores``: one of each setting in each round. Rounds are compared with themselves, so that what the machine does
    meanwhile takes no part; and noise alone does not move the choice from one run to the next.
    """

    def faster(one: Setting, other: Setting) -> bool:
        ratios = [a / b for a, b in zip(scores[one], scores[other], strict=True)]
        return statistics.quantiles(ratios, n=4)[0] >= FASTER

    first = next(iter(scores))
    best = max(scores, key=lambda setting: statistics.median(scores[setting]))
    good = [setting for setting in scores if faster(setting, first) and not faster(best, setting)]
    return min(good, key=lambda setting: (setting.depth * setting.block_bytes, setting.depth), default=first)


def search(it: Subject, bar: tqdm[None], backends: Sequence[str], full: bool) -> Setting:
    """The setting to use. Adaptive: the block size, then the depth at that block size, then the backend. The default
    and the first of the backends are the ones to be beaten, twice: the best of many is often the luckiest."""

    def best(first: Setting, others: Sequence[Setting]) -> Setting:
        settings = [first, *(setting for setting in others if setting != first)]
        scores: dict[Setting, list[float]] = {setting: [] for setting in settings}
        for turn in range(ROUNDS):
            for setting in settings[turn % len(settings) :] + settings[: turn % len(settings)]:
                bar.set_description(f"{setting}, {turn + 1} of {ROUNDS}")
                scores[setting].append(it.probe(setting))
                bar.update()
        return chosen(scores)

    def settled(first: Setting, others: Sequence[Setting]) -> Setting:
        winner = best(first, others)
        return first if winner == first else best(first, [winner])

    winners = []
    for backend in backends:
        if full:
            winners.append(settled(default(backend), grid(backend)))
            continue
        first = settled(default(backend), rivals(backend))
        winners.append(settled(first, grid(backend, [first.block_bytes])))
    return settled(winners[0], winners[1:]) if len(winners) > 1 else winners[0]


def num_probes(backends: Sequence[str], full: bool) -> int:
    """About as many as the search makes."""
    settings = sum(len(grid(b)) if full else len(rivals(b)) + len(grid(b, [MIB])) for b in backends)
    return ROUNDS * (settings + (len(backends) if len(backends) > 1 else 0))


class Fio:
    """fio on the same file, at the same block size, with as much in flight as its buffers are to have.

    It has no buffers beside those in flight: with as much memory as the engine it has more in flight than the engine.
    2 MiB pages are those reserved, where there are enough; else glibc asks the kernel for transparent ones.
    """

    def __init__(self, it: Subject, block_bytes: int, footprint_bytes: int) -> None:
        self._it = it
        self._block_bytes = block_bytes
        self.depth = footprint_bytes // block_bytes
        needed = -(-block_bytes * (self.depth + 1) // (2 * MIB))
        self._reserved = _free_huge_pages() >= needed
        self.huge_pages = self._reserved or _transparent_pages()
        self.engines: dict[Mode, str] = {}

    def choose_engines(self) -> None:
        """The faster of io_uring and libaio, for each mode."""
        nbytes = self._it.bytes_for(PROBE_SECONDS)
        for mode in MODES:
            rates: dict[str, list[float]] = {"io_uring": [], "libaio": []}
            for _ in range(ENGINE_ROUNDS):
                for engine, found in rates.items():
                    found.append(self._run(mode, nbytes, engine).bytes_per_s)
            self.engines[mode] = max(rates, key=lambda engine: statistics.median(rates[engine]))

    def measure(self, mode: Mode, nbytes: int) -> Sample:
        return self._run(mode, nbytes, self.engines[mode])

    def _run(self, mode: Mode, nbytes: int, engine: str) -> Sample:
        command = [
            *("fio", "--name=bench", "--output-format=json", "--direct=1", "--allow_file_create=0"),
            *(f"--filename=/proc/{os.getpid()}/fd/{self._it.fd}", f"--ioengine={engine}", "--group_reporting"),
            *(f"--bs={self._block_bytes}", f"--iodepth={self.depth}", "--invalidate=0"),
            *(f"--size={self._it.nbytes}", f"--io_size={nbytes // MIB * MIB}", "--scramble_buffers=0"),
            f"--rw={'rw' if mode == 'mixed' else mode}",
            f"--rwmixread={round(100 * READS / (READS + WRITES))}",
            *(["--mem=shmhuge", f"--hugepage-size={2 * MIB}"] if self._reserved else []),
        ]
        environment = os.environ if self._reserved else {**os.environ, "GLIBC_TUNABLES": GLIBC_HUGE_PAGES}
        result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
        if result.returncode != 0:
            raise BenchError(f"fio failed: {result.stderr.strip().splitlines()[-1:] or result.returncode}")
        job = json.loads(result.stdout[result.stdout.index("{") :])["jobs"][0]
        seconds = max(job["read"]["runtime"], job["write"]["runtime"]) / 1000
        return Sample(
            read_bytes=job["read"]["io_bytes"],
            write_bytes=job["write"]["io_bytes"],
            seconds=seconds,
            cpu_seconds=(job["usr_cpu"] + job["sys_cpu"]) / 100 * job["job_runtime"] / 1000,
            depth_mean=float(self.depth),
        )


def _free_huge_pages() -> int:
    try:
        return int(Path("/sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages").read_text())
    except OSError:
        return 0


def _transparent_pages() -> bool:
    """glibc 2.35 and later can ask for them, if the kernel gives any."""
    libc, _, version = (os.confstr("CS_GNU_LIBC_VERSION") or "").partition(" ")
    try:
        switch = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return False
    return libc == "glibc" and tuple(map(int, version.split(".")[:2])) >= (2, 35) and "[never]" not in switch


Samples = dict[str, list[Sample]]


@dataclass
class Contest:
    """Ours and fio's samples of each mode, both going around ``footprint_bytes`` of memory."""

    footprint_bytes: int
    range: Range
    fio: Fio | None
    ours: Samples = field(default_factory=lambda: {mode: [] for mode in MODES})
    theirs: Samples = field(default_factory=lambda: {mode: [] for mode in MODES})

    def turns(self, mode: Mode, nbytes: int) -> list[Callable[[], None]]:
        turns = [lambda: self.ours[mode].append(self.range.measure(mode, nbytes))]
        if self.fio:
            fio = self.fio
            turns.append(lambda: self.theirs[mode].append(fio.measure(mode, nbytes)))
        return turns


def compare(it: Subject, setting: Setting, with_fio: bool, pairs: int, bar: tqdm[None]) -> tuple[Contest, Contest]:
    """Ours and fio's samples at the engine's footprint, and at that of what is in flight, which a cache may hold.

    All are taken in turns, so that they meet the same moods of the machine.
    """
    in_flight = setting.block_bytes * setting.depth
    with Memory(in_flight) as small, it.range(setting) as large_range, it.range(setting, small) as small_range:
        small.populate()
        contests = [
            Contest(size, range_, Fio(it, setting.block_bytes, size) if with_fio else None)
            for size, range_ in ((it.memory.nbytes, large_range), (in_flight, small_range))
        ]
        for contest in contests:
            if contest.fio:
                bar.set_description(f"fio: io_uring or libaio, {contest.footprint_bytes // MIB} MiB")
                contest.fio.choose_engines()
        for pair in range(pairs):
            for mode in MODES:
                bar.set_description(f"{mode} {pair + 1} of {pairs}")
                nbytes = it.bytes_for(PAIR_SECONDS) // (32 * MIB) * (32 * MIB)
                turns = [turn for contest in contests for turn in contest.turns(mode, nbytes)]
                for turn in turns if pair % 2 == 0 else reversed(turns):
                    turn()
                bar.update()
    return contests[0], contests[1]


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
    with Memory(TENSOR_MEMORY_BYTES) as memory, it.range(setting, memory) as range_:
        memory.populate()
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


def result_of(it: Subject, setting: Setting, engine: Contest, in_flight: Contest) -> dict[str, Any]:
    rates = {mode: median_rate(engine.ours[mode]) for mode in MODES}
    share = READS / (READS + WRITES)
    q = mixed_q(share / rates["read"], (1 - share) / rates["write"], 1 / rates["mixed"])
    return {
        "path": str(it.path),
        "file_system": file_system(it.path),
        "kernel": platform.release(),
        "cpus": os.cpu_count(),
        "cache_bytes": last_level_cache_bytes(),
        "backend": setting.backend,
        "block_bytes": setting.block_bytes,
        "queue_depth": setting.depth,
        "mixed_q": round(q, 2),
        **contest_of(engine),
        "in_flight": contest_of(in_flight),
        "huge_bytes": it.memory.huge_bytes(),
        "unavailable": unavailable_backends(),
    }


def contest_of(contest: Contest) -> dict[str, Any]:
    """What was found at one footprint."""
    fio = contest.fio
    return {
        "footprint_bytes": contest.footprint_bytes,
        **_figures(contest.ours),
        "fio": fio
        and {
            **_figures(contest.theirs),
            "ratio": {mode: round(_ratio(contest.ours[mode], contest.theirs[mode]), 3) for mode in MODES},
            "queue_depth": fio.depth,
            "engines": fio.engines,
            "huge_pages": fio.huge_pages,
        },
    }


def _figures(samples: Samples) -> dict[str, Any]:
    cpu = {mode: statistics.median(sample.cpu_seconds_per_gib for sample in samples[mode]) for mode in MODES}
    return {
        **{f"{mode}_gib_per_s": round(median_rate(samples[mode]), 3) for mode in MODES},
        "cpu_seconds_per_gib": {mode: round(cpu[mode], 4) for mode in MODES},
        "samples_gib_per_s": {mode: [round(s.gib_per_s, 3) for s in samples[mode]] for mode in MODES},
    }


def _ratio(ours: Sequence[Sample], theirs: Sequence[Sample]) -> float:
    return statistics.median(a.bytes_per_s / b.bytes_per_s for a, b in zip(ours, theirs, strict=True))


def last_level_cache_bytes() -> int | None:
    """The largest cache of the first processor, as Linux tells; None where it does not."""
    sizes = []
    for file in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        with contextlib.suppress(OSError, ValueError):
            sizes.append(int(file.read_text().strip().removesuffix("K")) * KIB)
    return max(sizes, default=None)


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
    setting = Setting(result["backend"], result["block_bytes"], result["queue_depth"])
    print(f"{result['path']} ({result['file_system']}, Linux {result['kernel']}, {result['cpus']} CPUs): {setting}")
    cache = result["cache_bytes"]
    if cache:
        print(f"last-level cache: {cache // MIB} MiB; what rests in it is moved faster on some machines")
    print_contest(result, "as the engine's buffers")
    print_contest(result["in_flight"], "what is in flight")
    print(f"mixed is {READS} bytes read to {WRITES} written; q = {result['mixed_q']} (1: they share the drive)")
    if result["huge_bytes"] < ENGINE_BYTES:
        print(
            f"only {result['huge_bytes'] // MIB} of {ENGINE_BYTES // MIB} MiB of memory rest on huge pages: expect less"
        )
    if result["fio"] and not result["fio"]["huge_pages"]:
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


def print_contest(found: dict[str, Any], what: str) -> None:
    fio = found["fio"]
    print(
        f"memory {found['footprint_bytes'] / MIB:g} MiB, {what}"
        + (f"; fio has {fio['queue_depth']} blocks in flight:\n" if fio else ":\n")
        + f"{'':8}{'GiB/s':>8}{'spread':>16}{'CPU s/GiB':>11}"
        + (f"{'fio':>8}{'ratio':>8}{'its CPU':>9}" if fio else "")
    )
    for mode in MODES:
        samples = found["samples_gib_per_s"][mode]
        spread = f"{min(samples):.2f} to {max(samples):.2f}"
        line = f"{mode:8}{found[f'{mode}_gib_per_s']:8.2f}{spread:>16}{found['cpu_seconds_per_gib'][mode]:11.3f}"
        if fio:
            line += f"{fio[f'{mode}_gib_per_s']:8.2f}{fio['ratio'][mode]:8.2f}{fio['cpu_seconds_per_gib'][mode]:9.3f}"
        print(line)


def plot(it: Subject, target: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(USES), figsize=(10, 4), sharey=True, constrained_layout=True)
    for axis, mode in zip(axes, USES, strict=True):
        for backend, block in sorted({(s.backend, s.block_bytes) for s in it.tried}):
            points = sorted(
                (s.depth, statistics.median(v[mode]))
                for s, v in it.tried.items()
                if (s.backend, s.block_bytes) == (backend, block)
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
    has_fio = shutil.which("fio") is not None
    with subject(path, options.size, options.any_file_system) as it:
        with tqdm(
            total=num_probes(backends, options.full) + options.pairs * len(MODES),
            disable=True if options.json else None,
            leave=False,
            file=sys.stderr,
        ) as bar:
            bar.set_description("first write")
            with it.range(default(backends[0])) as range_:  # blocks never written are a matter of the file system
                range_.measure("write", it.nbytes)
                it.bytes_per_s = range_.measure("read", it.nbytes // 4).bytes_per_s
            setting = search(it, bar, backends, options.full)
            result = result_of(it, setting, *compare(it, setting, has_fio and not options.no_fio, options.pairs, bar))
            if not (has_fio or options.no_fio):
                result["unavailable"]["fio"] = FIO_MISSING
            if options.sustained:
                result["sustained"] = sustained(it, setting, options.sustained, bar)
            if options.tensors:
                result["tensors"] = tensors(it, setting, options.tensors, bar)
        if options.plot:
            plot(it, options.plot)
        result["tried"] = [
            {**asdict(s), **{use: [round(v, 3) for v in found[use]] for use in USES}} for s, found in it.tried.items()
        ]
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
