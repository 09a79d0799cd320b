"""The pipeline over fakes, with a CPU that is given tiles ahead: a tile is updated when it is waited for."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pytest
from pipeline_story import FORMATS, STATES_BYTES, Device, Disk, Move, Story, Task, buffer_at

from offload.optim.rule import TileBytes
from offload.units import Tile
from offload.update.pipeline import Pipeline
from offload.update.step import UnitUpdate
from swapper import StorageIOError


class Ahead:
    """A CPU with places for tiles behind the one at hand. Nobody may touch the memory of a tile that it has."""

    def __init__(self, story: Story, num_ahead: int, *, is_fast: bool = False) -> None:
        self.story = story
        self.num_ahead = num_ahead
        self.is_fast = is_fast
        self.most = 0
        self.error_of: str | None = None
        """The tile whose update fails when it is asked for."""

    def begin(self, update: UnitUpdate, tile: Tile, at: TileBytes) -> Given:
        disk, name = self.story.disk, self.story.rule.names[tile]
        if name == self.error_of:
            raise ValueError(name)
        disk.check_free(at.states, at.states + STATES_BYTES)
        disk.events.append(("given", name))
        move = Move(disk, "update", name, at.states, at.states + STATES_BYTES)
        disk.in_flight.append(move)
        given = sum(each.what == "update" for each in disk.in_flight)
        self.most = max(self.most, given)
        return Given(self, move)

    def end(self, work: Given) -> None:
        work.move.wait()


@dataclass
class Given:
    host: Ahead
    move: Move

    def is_over(self) -> bool:
        return self.host.is_fast or self.move not in self.host.story.disk.in_flight


@dataclass
class Beside(Device):
    """A device that hears what the CPU has still to do."""

    can_compare: bool = True
    given: list[int] = field(default_factory=list)

    def sooner(self, tiles: Iterable[Tile], given: int) -> Iterator[int]:
        self.given.append(given)
        return super().sooner(tiles, 0)


def apart(tasks: list[Task]) -> list[Task]:
    """Units whose states in RAM lie where those of no other tile do."""
    homes = [home.states for task in tasks for home in task.tiles if home.states.stored is None]
    for index, states in enumerate(homes):
        states.address = 5_000_000 + STATES_BYTES * index  # type: ignore[misc]
    return tasks


def story_of(num_buffers: int, num_ahead: int = 2, goes: str = "", *, is_fast: bool = False) -> tuple[Story, Ahead]:
    story = Story(num_buffers, Disk(is_fast=is_fast))
    story.device = Beside(story.disk, story.rule, goes.split())
    host = Ahead(story, num_ahead, is_fast=is_fast)
    buffers = [buffer_at(index) for index in range(num_buffers)]
    story.pipeline = Pipeline(buffers, story.rule, FORMATS, host, story.device, story.copied)
    return story, host


def test_the_cpu_has_tiles_ahead() -> None:
    story, host = story_of(num_buffers=0)
    story.pipeline.run(apart([story.task("a", 5, resident=True)]))
    assert [(event, name) for event, name, *_ in story.events if event != "drain"] == [
        ("weights", "a"),
        ("given", "a.0"),
        ("given", "a.1"),
        ("given", "a.2"),
        ("update over", "a.0"),
        ("given", "a.3"),
        ("update over", "a.1"),
        ("given", "a.4"),
        ("update over", "a.2"),
        ("update over", "a.3"),
        ("update over", "a.4"),
        ("finish", "a"),
    ]
    assert host.most == 3, "the one at hand, and two behind it"


def test_a_tile_is_written_once_the_cpu_has_updated_it() -> None:
    story, _ = story_of(num_buffers=3)
    story.pipeline.run([story.task("a", 5)])
    of_cpu = [(event, name) for event, name, *_ in story.events if event in ("update over", "write")]
    assert of_cpu == [(event, f"a.{index}") for index in range(5) for event in ("update over", "write")]


def test_before_it_is_known_how_fast_the_cpu_is_it_has_one_tile() -> None:
    story, host = story_of(num_buffers=4)
    story.device.can_compare = False
    story.pipeline.run([story.task("a", 4)])
    assert host.most == 1


def test_the_weights_of_the_next_unit_are_not_taken_while_the_cpu_has_tiles_of_this_one() -> None:
    story, _ = story_of(num_buffers=4)
    story.pipeline.run([story.task("a", 1), story.task("b", 1)])
    order = [(event, name) for event, name, *_ in story.events if event in ("weights", "update over", "finish")]
    assert order == [
        *(("weights", "a"), ("update over", "a.0"), ("finish", "a")),
        *(("weights", "b"), ("update over", "b.0"), ("finish", "b")),
    ]


def test_a_device_hears_of_all_elements_that_the_cpu_has_still_to_do() -> None:
    story, _ = story_of(num_buffers=0)
    story.pipeline.run(apart([story.task("a", 4, resident=True)]))
    assert story.device.given == [0, 100, 200, 200]


@pytest.mark.parametrize("what", ["stop", "fail"])
def test_when_the_run_ends_early_the_tiles_that_the_cpu_has_are_waited_for(what: str) -> None:
    story, host = story_of(num_buffers=4)
    if what == "fail":
        host.error_of = "a.2"
        with pytest.raises(ValueError, match=r"a\.2"):
            story.pipeline.run([story.task("a", 4)])
    else:
        task = story.task("a", 4)
        task.begins = story.pipeline.stop  # type: ignore[method-assign]
        story.pipeline.run([task])
    assert not story.disk.in_flight
    story.pipeline._stopping = False
    host.error_of = None
    story.pipeline.run([story.task("b", 6)])  # all buffers are there
    assert [name for event, name, *_ in story.events if event == "write"][-6:] == [f"b.{index}" for index in range(6)]


@pytest.mark.parametrize("seed", range(60))
def test_whatever_is_fast_every_tile_is_updated_once_by_one_side_and_no_two_meet_in_the_same_memory(seed: int) -> None:
    draw = random.Random(seed)
    kinds = [
        (f"u{index}", draw.randint(1, 5), {"resident": draw.random() < 0.3, "spilled": draw.random() < 0.3})
        for index in range(draw.randint(1, 5))
    ]
    names = [f"{name}.{index}" for name, count, _ in kinds for index in range(count)]
    goes = " ".join(name for name in names if draw.random() < 0.4)
    story, host = story_of(draw.randint(2, 6), draw.randint(0, 3), goes, is_fast=draw.random() < 0.3)
    fails = draw.random() < 0.3 and not host.is_fast
    if fails:
        at = draw.randrange(2 * len(names))
        story.disk.fails = lambda number: number == at
    try:
        story.pipeline.run(apart([story.task(name, count, **kind) for name, count, kind in kinds]))
    except StorageIOError:
        assert fails
    else:
        updated = [name for event, name, *_ in story.events if event in ("given", "send")]
        assert sorted(updated) == sorted(names)
        assert [name for event, name, *_ in story.events if event == "finish"] == [name for name, *_ in kinds]
    assert host.is_fast or not story.disk.in_flight
    assert host.most <= host.num_ahead + 1
