"""Fakes around the pipeline of updates: a disk whose transfers end when they are waited for, a rule that says what it
was given, a device that takes the tiles it is told to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import count

from offload.cores import CoreBudget
from offload.optim.formats import Formats
from offload.optim.rule import TileBytes
from offload.report.meter import Meter
from offload.report.report import LinkRates
from offload.tiers.home import TileHomes
from offload.units import Tile, UnitSpec
from offload.update.device_side import DeviceSide
from offload.update.host_side import HostSide
from offload.update.pipeline import Pipeline
from offload.update.step import Segment, UnitUpdate
from swapper import Lease, StorageIOError

FORMATS = Formats(weights=2, master=2, grads=4)
NUMEL = 100
"""Elements of each tile in the stories of the pipeline."""
STATES_BYTES = 1000
BUFFER_BYTES = STATES_BYTES + NUMEL * FORMATS.grads


class Move:
    """A transfer. It is over when somebody waits for it, or at once if the disk is that fast."""

    def __init__(self, disk: Disk, what: str, name: str, start: int, stop: int) -> None:
        self.disk = disk
        self.what = what
        self.name = name
        self.start = start
        self.stop = stop
        self.error: StorageIOError | None = None

    def done(self) -> bool:
        return self.disk.is_fast or self not in self.disk.in_flight

    def wait(self) -> None:
        if self in self.disk.in_flight:
            self.disk.in_flight.remove(self)
            self.disk.events.append((f"{self.what} over", self.name))
        if self.error is not None:
            raise self.error


@dataclass
class Disk:
    """Begins transfers; no two of them, and no update, ever meet in the same memory."""

    is_fast: bool = False
    fails: Callable[[int], bool] = lambda number: False
    """Whether the transfer with this number, from 0, fails: when it is waited for, or at once if ``refuses``."""
    refuses: bool = False
    events: list[tuple[object, ...]] = field(default_factory=list)
    in_flight: list[Move] = field(default_factory=list)
    numbers: Iterable[int] = field(default_factory=count)

    def begin(self, what: str, name: str, address: int, nbytes: int) -> Move:
        self.check_free(address, address + nbytes)
        move = Move(self, what, name, address, address + nbytes)
        if self.fails(next(iter(self.numbers))):
            move.error = StorageIOError(f"{what} of {name} failed.")
            if self.refuses:
                raise move.error
        self.events.append((what, name, place_of(address)))
        self.in_flight.append(move)
        return move

    def check_free(self, start: int, stop: int) -> None:
        for other in self.in_flight:
            if not self.is_fast:
                assert stop <= other.start or other.stop <= start, f"{other.what} of {other.name} is in flight there"


def buffer_at(index: int) -> Lease:
    return Lease(1_000_000 + 10_000 * index, BUFFER_BYTES)


def place_of(address: int) -> str:
    """The name of a place in memory, such as B0: the first buffer; B0+1000: so far into it."""
    index, into = divmod(address - 1_000_000, 10_000)
    return f"B{index}" + (f"+{into}" if into else "")


@dataclass(eq=False)
class Stored:
    """A record on the disk."""

    disk: Disk
    name: str
    nbytes: int
    address: int | None = None
    num_flips: int = 0

    @property
    def stored(self) -> Stored:
        return self

    def read(self, address: int, *, urgent: bool = False) -> Move:
        return self.disk.begin("read", self.name, address, self.nbytes)

    def write(self, address: int) -> Move:
        return self.disk.begin("write", self.name, address, self.nbytes)


@dataclass(eq=False)
class Resident:
    """A record resident in RAM."""

    address: int | None
    stored: None = None


class Task:
    """The update of a unit, which tells what it is asked for."""

    def __init__(self, disk: Disk, name: str, homes: list[TileHomes], grads: int | None) -> None:
        numel = homes[-1].tile.stop
        self.update = UnitUpdate(UnitSpec(0, name, (), (), numel, numel, 0), (Segment(0, numel, name),))
        self.tiles = homes
        self.grads = grads
        self.disk = disk
        self.error_in: str | None = None
        """The call that fails."""
        self.num_begun = 0
        self.beside: int | None = None
        """Where states in RAM are updated, if not where they are."""

    def _tell(self, what: str) -> None:
        self.disk.events.append((what, self.update.unit.name))
        if self.error_in == what:
            raise StorageIOError(f"{what} of {self.update.unit.name} failed.")

    def begins(self) -> None:
        self.num_begun += 1
        if self.error_in == "begins":
            raise StorageIOError(f"begins of {self.update.unit.name} failed.")

    def before_grads(self) -> None:
        self._tell("before grads")

    def states_at(self, states: Resident) -> int | None:
        return states.address if self.beside is None else self.beside

    def weights_at_hand(self) -> bool:
        return False

    def weights(self) -> tuple[int, int]:
        self._tell("weights")
        return (500_000, 500_000) if self.beside is None else (510_000, 500_000)

    def write(self, states: Stored, address: int) -> Move:
        return states.write(address)

    def finish(self) -> None:
        self._tell("finish")


class Rule:
    """Tells which tile it updates. ``during`` is called meanwhile."""

    is_one_kernel = True

    def __init__(self, disk: Disk) -> None:
        self.disk = disk
        self.names: dict[Tile, str] = {}
        self.during: Callable[[str], None] = lambda name: None
        self.states: list[int] = []
        """Addresses of the states of each tile that it has updated."""

    def apply(self, frozen, tile, start, stop, at, native) -> None:
        name = self.names[tile]
        self.disk.check_free(at.states, at.states + STATES_BYTES)
        self.disk.check_free(at.grads, at.grads + (stop - start) * FORMATS.grads)
        self.disk.events.append(("apply", name))
        self.states.append(at.states)
        self.during(name)


@dataclass
class Trip:
    tile: Tile
    at: TileBytes
    over: bool = False

    def is_over(self) -> bool:
        return self.over


@dataclass
class Device:
    """A device that takes the tiles with some names. They are back when they are waited for."""

    disk: Disk
    rule: Rule
    goes: list[str]
    asked: list[str] = field(default_factory=list)
    away: list[Trip] = field(default_factory=list)

    def sooner(self, tiles: Iterable[Tile], given: int) -> Iterator[int]:
        assert not given, "the CPU updates at once"
        for index, tile in enumerate(tiles):
            self.asked.append(self.rule.names[tile])
            if self.rule.names[tile] in self.goes:
                yield index

    def begin(self, update: UnitUpdate, tile: Tile, at: TileBytes) -> Trip:
        self.disk.check_free(at.states, at.states + STATES_BYTES)
        self.disk.check_free(at.grads, at.grads + tile.numel * FORMATS.grads)
        self.disk.events.append(("send", self.rule.names[tile]))
        self.away.append(Trip(tile, at))
        return self.away[-1]

    def end(self, trip: Trip) -> None:
        assert trip is self.away.pop(0)
        self.disk.events.append(("back", self.rule.names[trip.tile]))

    def drain(self) -> None:
        self.disk.events.append(("drain", [self.rule.names[trip.tile] for trip in self.away]))
        self.away.clear()

    def cpu_took(self, tile: Tile, seconds: float) -> None:
        assert seconds >= 0
        self.disk.events.append(("cpu took", self.rule.names[tile]))


class Story:
    """A disk, a rule, a pipeline with ``num_buffers``, and units to be updated."""

    def __init__(self, num_buffers: int, disk: Disk | None = None, goes: str | None = None) -> None:
        """``goes``: the tiles that are sent to a device, if there is one."""
        self.disk = disk or Disk()
        self.rule = Rule(self.disk)
        buffers = [buffer_at(index) for index in range(num_buffers)]
        alone = DeviceSide(self.rule, FORMATS, Meter(), LinkRates())
        self.device = alone if goes is None else Device(self.disk, self.rule, goes.split())
        cores = CoreBudget(1, 1, bool)
        self.host = HostSide(self.rule, FORMATS, Meter(), cores.lend, self.device.cpu_took, ahead=False)
        self.pipeline = Pipeline(buffers, self.rule, FORMATS, self.host, self.device, self.copied)

    @property
    def events(self) -> list[tuple[object, ...]]:
        return self.disk.events

    def copied(self, target: int, source: int, nbytes: int) -> None:
        self.events.append(("copy", f"{nbytes} bytes to {target} from {source}"))

    def task(self, name: str, num_tiles: int, *, resident: bool = False, spilled: bool = False) -> Task:
        """A unit whose states are ``resident`` in RAM, or else on disk; its gradients are in RAM or ``spilled``."""
        homes = []
        for index in range(num_tiles):
            tile = Tile(NUMEL * index, NUMEL * (index + 1), STATES_BYTES)
            tile_name = f"{name}.{index}"
            self.rule.names[tile] = tile_name
            states = Resident(200_000) if resident else Stored(self.disk, tile_name, STATES_BYTES)
            grads = Stored(self.disk, f"{tile_name} grads", NUMEL * FORMATS.grads) if spilled else None
            homes.append(TileHomes(tile, states, grads))
        return Task(self.disk, name, homes, None if spilled else 300_000)
