"""A space over two paths, of which one is slow: it takes less of the work, and the sum of both is reached."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import pytest
from faulty_queue import FaultPlan, faulty_queue

from aio_ext import Memory, Queue, StripedFile, StripePath

KIB = 1 << 10
MIB = 1 << 20
CHUNK = 256 * KIB
FILE_BYTES = 64 * MIB
GROUPS = Path("/sys/fs/cgroup")


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_the_sum_is_reached_when_one_queue_is_slow(tmp_path: Path, stack: ExitStack) -> None:
    # Each block takes so long, two at a time: 25 and 6.25 MiB/s.
    slow = [FaultPlan(log=False).strike_range(0, 1 << 40, delay_us=us) for us in (20_000, 80_000)]
    files = [tmp_path / "0", tmp_path / "1"]
    for file in files:
        with file.open("wb") as stream:
            os.posix_fallocate(stream.fileno(), 0, FILE_BYTES)
    queues = [stack.enter_context(faulty_queue(plan, depth=2, block_bytes=CHUNK)) for plan in slow]

    def share(move: Move) -> float:
        """Under load a block takes longer than it is told to, but neither queue waits for the other."""
        assert move.rate < 31.25
        return move.least_full

    shares = best_of(moves_over_both(queues, files, stack), share, 0.9)
    assert min(shares.values()) >= 0.9, shares


def test_the_sum_is_reached_when_a_control_group_throttles_the_drives(
    tmp_path: Path, backend: str, stack: ExitStack
) -> None:
    try:
        devices = [stack.enter_context(loop_device(tmp_path)) for _ in range(2)]
        stack.enter_context(throttled(dict(zip(devices, (48 * MIB, 12 * MIB), strict=True))))
    except CannotThrottle as reason:
        pytest.skip(str(reason))
    queues = [stack.enter_context(Queue(backend, depth=4, block_bytes=CHUNK)) for _ in devices]
    rates = best_of(moves_over_both(queues, devices, stack), lambda move: move.rate, 0.9 * 60)
    # The kernel lets a little more through than it is told, for moments: but not what the slow path alone is short of.
    assert min(rates.values()) >= 0.9 * 60 and max(rates.values()) < 1.25 * 60, rates


@dataclass(frozen=True)
class Move:
    """A move over both paths, in MiB/s. ``least_full`` is the share of its time in which a queue had as much to do as
    it can, of the queue of which that is less."""

    kind: str
    rate: float
    least_full: float


def moves_over_both(queues: Sequence[Queue], files: Sequence[Path], stack: ExitStack) -> Iterator[Move]:
    """Some rounds of a write and a read of a space over both paths, which expects them to be equally fast."""
    memory = stack.enter_context(Memory(24 * MIB))
    memory.populate()
    paths = []
    for queue, file in zip(queues, files, strict=True):
        fd = os.open(file, os.O_RDWR | os.O_DIRECT)
        paths.append(StripePath(queue, queue.register_file(fd), FILE_BYTES, 1e9))
        os.close(fd)
    space = StripedFile(paths, memory.nbytes, chunk_bytes=CHUNK, chunks_in_flight=8)
    for _ in range(16):
        for kind, move in (("write", space.write), ("read", space.read)):
            start, before = time.perf_counter(), [full_seconds(queue) for queue in queues]
            move(0, memory.address, memory.nbytes).wait(60)
            seconds = time.perf_counter() - start
            full = [full_seconds(queue) - others for queue, others in zip(queues, before, strict=True)]
            yield Move(kind, memory.nbytes / MIB / seconds, min(full) / seconds)


def full_seconds(queue: Queue) -> float:
    """Seconds in which a queue had as much to do as it can."""
    statistics = queue.statistics()
    return statistics.busy_seconds - statistics.starved_seconds


def best_of(moves: Iterable[Move], value: Callable[[Move], float], wanted: float) -> dict[str, float]:
    """The best write and the best read of some rounds, no more than are needed: other programs may take the processor
    or the drive for a while, none can make the paths faster."""
    best = {"write": 0.0, "read": 0.0}
    for move in moves:
        best[move.kind] = max(best[move.kind], value(move))
        if min(best.values()) >= wanted:
            break
    return best


class CannotThrottle(Exception):
    """What this machine does not allow, in a sentence."""


@contextmanager
def loop_device(directory: Path) -> Iterator[Path]:
    """A block device over a file in ``directory`` that has no name from then on. For root."""
    file = directory / "loop"
    with file.open("wb") as stream:
        os.posix_fallocate(stream.fileno(), 0, FILE_BYTES)
    try:
        command = ["losetup", "--find", "--show", "--direct-io=on", str(file)]
        device = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        raise CannotThrottle(f"no loop device can be made: {error}") from None
    finally:
        file.unlink()
    try:
        yield Path(device)
    finally:
        subprocess.run(["losetup", "--detach", device], check=True)


@contextmanager
def throttled(bytes_per_s: Mapping[Path, int]) -> Iterator[None]:
    """This process moves so many bytes a second to and from these block devices. For root; control groups v1 or v2."""
    parent = _group_that_limits_io()
    group = parent / f"aio_ext.{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise CannotThrottle(f"no control group can be made: {error}") from None
    try:
        for device, limit in bytes_per_s.items():
            _limit(group, device, limit)
        (group / "cgroup.procs").write_text(str(os.getpid()))
        yield
    finally:
        with suppress(OSError):
            (parent / "cgroup.procs").write_text(str(os.getpid()))
        group.rmdir()


def _group_that_limits_io() -> Path:
    """The control group of this process whose children can have limits."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if "blkio" in controllers.split(","):
            return GROUPS / "blkio" / path.lstrip("/")
        handed_down = GROUPS / path.lstrip("/") / "cgroup.subtree_control"
        if controllers == "" and handed_down.exists() and "io" in handed_down.read_text().split():
            return handed_down.parent
    raise CannotThrottle("no control group of this process limits block I/O")


def _limit(group: Path, device: Path, bytes_per_s: int) -> None:
    number = device.stat().st_rdev
    try:
        if (group / "io.max").exists():
            limits = f"rbps={bytes_per_s} wbps={bytes_per_s}"
            (group / "io.max").write_text(f"{os.major(number)}:{os.minor(number)} {limits}")
            return
        for direction in ("read", "write"):
            limit = f"{os.major(number)}:{os.minor(number)} {bytes_per_s}"
            (group / f"blkio.throttle.{direction}_bps_device").write_text(limit)
    except OSError as error:
        raise CannotThrottle(f"this kernel does not throttle block devices: {error}") from None
