"""The pipeline over fakes (``pipeline_story.py``): what it asks for, and in which order."""

from __future__ import annotations

import contextlib
import random
import threading
from itertools import count, pairwise
from typing import Any
from unittest.mock import Mock

import pytest
from pipeline_story import FORMATS, STATES_BYTES, Disk, Resident, Story, Task, buffer_at

from offload import kernels
from offload.optim.rule import TileBytes
from offload.tiers.home import TileHomes
from offload.units import Tile, UnitSpec
from offload.update.state_prefetch import StatePrefetch
from offload.update.step import Segment, UnitUpdate, apply
from swapper import StorageIOError


def test_every_tile_is_read_updated_and_written_in_order_through_fewer_buffers_than_tiles():
    story = Story(num_buffers=2)
    story.pipeline.run([story.task("a", 3), story.task("b", 1)])
    assert story.events == [
        ("read", "a.0", "B1"),
        ("read", "a.1", "B0"),
        ("weights", "a"),
        ("read over", "a.0"),
        ("apply", "a.0"),
        ("write", "a.0", "B1"),
        ("read over", "a.1"),
        ("apply", "a.1"),
        ("write", "a.1", "B0"),
        ("write over", "a.0"),  # nothing is on its way: only now is there a wait for a buffer
        ("read", "a.2", "B1"),
        ("read over", "a.2"),
        ("apply", "a.2"),
        ("write", "a.2", "B1"),
        ("finish", "a"),
        ("write over", "a.1"),
        ("read", "b.0", "B0"),
        ("weights", "b"),
        ("read over", "b.0"),
        ("apply", "b.0"),
        ("write", "b.0", "B0"),
        ("finish", "b"),
        ("write over", "a.2"),
        ("write over", "b.0"),
    ]


def test_on_a_fast_disk_each_buffer_is_filled_again_as_soon_as_its_tile_is_written():
    story = Story(num_buffers=2, disk=Disk(is_fast=True))
    story.pipeline.run([story.task("a", 2), story.task("b", 2)])
    assert story.events == [
        ("read", "a.0", "B1"),
        ("read", "a.1", "B0"),
        ("weights", "a"),
        ("read over", "a.0"),
        ("apply", "a.0"),
        ("write", "a.0", "B1"),
        ("write over", "a.0"),
        ("read", "b.0", "B1"),  # before a.1 is updated
        ("read over", "a.1"),
        ("apply", "a.1"),
        ("write", "a.1", "B0"),
        ("finish", "a"),
        ("write over", "a.1"),
        ("read", "b.1", "B0"),
        ("weights", "b"),
        ("read over", "b.0"),
        ("apply", "b.0"),
        ("write", "b.0", "B1"),
        ("write over", "b.0"),
        ("read over", "b.1"),
        ("apply", "b.1"),
        ("write", "b.1", "B0"),
        ("finish", "b"),
        ("write over", "b.1"),
    ]


@pytest.mark.parametrize("num_buffers", [1, 2, 3, 5])
def test_as_many_tiles_as_there_are_other_buffers_are_in_flight_while_one_is_updated(num_buffers):
    story = Story(num_buffers)
    meanwhile = []
    story.rule.during = lambda name: meanwhile.append((name, [(move.what, move.name) for move in story.disk.in_flight]))
    story.pipeline.run([story.task("a", 4)])
    expected = {
        1: [("a.0", []), ("a.1", []), ("a.2", []), ("a.3", [])],
        2: [
            ("a.0", [("read", "a.1")]),
            ("a.1", [("write", "a.0")]),
            ("a.2", [("write", "a.1")]),
            ("a.3", [("write", "a.2")]),
        ],
        3: [
            ("a.0", [("read", "a.1"), ("read", "a.2")]),
            ("a.1", [("read", "a.2"), ("write", "a.0")]),
            ("a.2", [("write", "a.0"), ("write", "a.1")]),
            ("a.3", [("write", "a.1"), ("write", "a.2")]),
        ],
        5: [
            ("a.0", [("read", "a.1"), ("read", "a.2"), ("read", "a.3")]),
            ("a.1", [("read", "a.2"), ("read", "a.3"), ("write", "a.0")]),
            ("a.2", [("read", "a.3"), ("write", "a.0"), ("write", "a.1")]),
            ("a.3", [("write", "a.0"), ("write", "a.1"), ("write", "a.2")]),
        ],
    }
    assert meanwhile == expected[num_buffers]


@pytest.mark.parametrize(("is_one_kernel", "steps_to"), [(True, 200), (True, 150), (False, 200)])
def test_an_update_beside_reads_the_old_bytes_and_copies_those_of_a_tile_that_is_not_written_in_whole(
    is_one_kernel: bool, steps_to: int
):
    story = Story(num_buffers=0)
    story.rule.is_one_kernel = is_one_kernel
    task = story.task("a", 2, resident=True)
    task.beside = 210_000
    task.update = UnitUpdate(task.update.unit, (Segment(0, 60, "one"), Segment(60, steps_to, "other")))
    given = []
    story.rule.apply = lambda frozen, tile, start, stop, at, native: given.append((start, stop, at))
    story.pipeline.run([task])
    copied = [index for index in (0, 1) if not is_one_kernel or steps_to < 100 * (index + 1)]
    assert [what for event, what, *_ in story.events if event == "copy"] == [
        copy
        for index in copied
        for copy in (
            f"{STATES_BYTES} bytes to 210000 from 200000",
            f"200 bytes to {510_000 + 200 * index} from {500_000 + 200 * index}",
        )
    ]
    assert given == [
        (start, stop, TileBytes(210_000, weights, 300_000 + 4 * start, *((210_000, weights) if copy else before)))
        for start, stop, copy in ((0, 60, 0 in copied), (60, 100, 0 in copied), (100, steps_to, 1 in copied))
        for weights, before in [(510_000 + 2 * start, (200_000, 500_000 + 2 * start))]
    ]


def test_tiles_resident_in_ram_use_no_buffer_and_need_none():
    story = Story(num_buffers=0)
    story.pipeline.run([story.task("a", 2, resident=True), story.task("b", 1, resident=True)])
    assert story.events == [
        ("weights", "a"),
        ("apply", "a.0"),
        ("apply", "a.1"),
        ("finish", "a"),
        ("weights", "b"),
        ("apply", "b.0"),
        ("finish", "b"),
    ]


def test_a_tile_resident_in_ram_leaves_the_buffers_to_the_tiles_around_it():
    story = Story(num_buffers=2)
    story.pipeline.run([story.task("a", 1), story.task("b", 1, resident=True), story.task("c", 1)])
    assert story.events == [
        ("read", "a.0", "B1"),
        ("read", "c.0", "B0"),  # b has none of the two
        ("weights", "a"),
        ("read over", "a.0"),
        ("apply", "a.0"),
        ("write", "a.0", "B1"),
        ("finish", "a"),
        ("weights", "b"),
        ("apply", "b.0"),
        ("finish", "b"),
        ("weights", "c"),
        ("read over", "c.0"),
        ("apply", "c.0"),
        ("write", "c.0", "B0"),
        ("finish", "c"),
        ("write over", "a.0"),
        ("write over", "c.0"),
    ]


def test_spilled_gradients_are_read_behind_the_states_once_they_are_on_the_disk():
    story = Story(num_buffers=1)
    story.pipeline.run([story.task("a", 2, spilled=True)])
    assert story.events == [
        ("read", "a.0", "B0"),
        ("before grads", "a"),
        ("read", "a.0 grads", f"B0+{STATES_BYTES}"),
        ("weights", "a"),
        ("read over", "a.0"),
        ("read over", "a.0 grads"),
        ("apply", "a.0"),
        ("write", "a.0", "B0"),
        ("write over", "a.0"),
        ("read", "a.1", "B0"),
        ("before grads", "a"),
        ("read", "a.1 grads", f"B0+{STATES_BYTES}"),
        ("read over", "a.1"),
        ("read over", "a.1 grads"),
        ("apply", "a.1"),
        ("write", "a.1", "B0"),
        ("finish", "a"),
        ("write over", "a.1"),
    ]


def test_spilled_gradients_of_resident_states_pass_through_a_buffer_that_is_free_right_after():
    story = Story(num_buffers=1)
    story.pipeline.run([story.task("a", 2, resident=True, spilled=True)])
    assert story.events == [
        ("before grads", "a"),
        ("read", "a.0 grads", "B0"),
        ("weights", "a"),
        ("read over", "a.0 grads"),
        ("apply", "a.0"),
        ("before grads", "a"),
        ("read", "a.1 grads", "B0"),
        ("read over", "a.1 grads"),
        ("apply", "a.1"),
        ("finish", "a"),
    ]


def test_the_rule_gets_the_addresses_of_each_tile():
    story = Story(num_buffers=2)
    given = []

    def apply_of(frozen, tile, start, stop, at, native):
        given.append((frozen, at.states, start, stop, at.weights, at.grads, native))

    story.rule.apply = apply_of
    story.pipeline.run([story.task("a", 2), story.task("b", 2, spilled=True), story.task("c", 2, resident=True)])
    b0, b1 = buffer_at(0).address, buffer_at(1).address
    host = story.host.at_once
    assert given == [
        ("a", b1, 0, 100, 500_000, 300_000, host),
        ("a", b0, 100, 200, 500_200, 300_400, host),
        ("b", b1, 0, 100, 500_000, b1 + STATES_BYTES, host),
        ("b", b0, 100, 200, 500_200, b0 + STATES_BYTES, host),
        ("c", 200_000, 0, 100, 500_000, 300_000, host),
        ("c", 200_000, 100, 200, 500_200, 300_400, host),
    ]


def test_a_second_run_finds_all_buffers_again():
    story = Story(num_buffers=3)
    story.pipeline.run([story.task("a", 5)])
    first = len(story.events)
    story.pipeline.run([story.task("b", 3)])
    reads = [place for what, _, place in (event for event in story.events[first:] if event[0] == "read")]
    assert sorted(reads) == ["B0", "B1", "B2"]


def test_stop_ends_the_run_after_the_tile_at_hand_and_leaves_nothing_in_flight():
    story = Story(num_buffers=3)
    story.rule.during = lambda name: story.pipeline.stop() if name == "a.1" else None
    story.pipeline.run([story.task("a", 4), story.task("b", 1)])
    assert story.events == [
        ("read", "a.0", "B2"),
        ("read", "a.1", "B1"),
        ("read", "a.2", "B0"),
        ("weights", "a"),
        ("read over", "a.0"),
        ("apply", "a.0"),
        ("write", "a.0", "B2"),
        ("read over", "a.1"),
        ("apply", "a.1"),  # the tile at hand
        ("write", "a.1", "B1"),
        ("read over", "a.2"),
        ("write over", "a.0"),
        ("write over", "a.1"),
    ]
    assert story.disk.in_flight == []


def failing(story: Story) -> list[Task]:
    """Units of each kind, whose transfers fail one after the other."""
    return [
        story.task("a", 2),
        story.task("b", 2, spilled=True),
        story.task("c", 1, resident=True, spilled=True),
        story.task("d", 2),
    ]


@pytest.mark.parametrize("num_buffers", [1, 2, 4])
@pytest.mark.parametrize("is_fast", [False, True], ids=["slow", "fast"])
def test_whichever_transfer_fails_is_raised_and_all_others_have_been_waited_for(num_buffers, is_fast):
    for number in count():
        story = Story(num_buffers, Disk(is_fast=is_fast, fails=lambda n, number=number: n == number))
        try:
            story.pipeline.run(failing(story))
        except StorageIOError as error:
            begun = [(what, name) for what, name, *_ in story.events if what in ("read", "write")]
            what, name = begun[number]
            assert str(error).startswith(f"{what} of {name} failed.")
        else:
            break
        over = [(what, name) for what, name, *_ in story.events if what in ("read over", "write over")]
        assert story.disk.in_flight == []
        assert sorted(over) == sorted((f"{what} over", name) for what, name in begun)
        failed_unit = name[0]
        applied = [name for what, name, *_ in story.events if what == "apply"]
        if what == "read":
            assert name.removesuffix(" grads") not in applied
            assert ("finish", failed_unit) not in story.events
        story.disk.fails, before = lambda n: False, len(story.events)
        story.pipeline.run([story.task("e", num_buffers)])  # and no buffer is lost
        assert sum(event[0] == "read" for event in story.events[before:]) == num_buffers
        assert [event[0] for event in story.events[before : before + num_buffers]] == ["read"] * num_buffers
    assert number == 4 + 6 + 1 + 4  # transfers of a run that is clean


@pytest.mark.parametrize(
    "call",
    [
        "weights",
        "finish",
        pytest.param("before grads"),
        pytest.param("begins"),
    ],
)
def test_when_a_task_fails_its_error_is_raised_and_nothing_is_in_flight(call):
    story = Story(num_buffers=3)
    tasks = [story.task("a", 2), story.task("b", 2, spilled=True)]
    tasks[1].error_in = call
    with pytest.raises(StorageIOError, match=f"{call} of b failed"):
        story.pipeline.run(tasks)
    assert story.disk.in_flight == []


def test_when_a_transfer_is_refused_nothing_is_in_flight():
    for number in count():
        story = Story(3, Disk(fails=lambda n, number=number: n == number, refuses=True))
        try:
            story.pipeline.run([story.task("a", 2), story.task("b", 2, spilled=True)])
        except StorageIOError:
            assert story.disk.in_flight == [], f"operation {number}"
        else:
            break
    assert number == 4 + 6


def test_when_several_transfers_fail_the_first_failure_is_raised():
    story = Story(3, Disk(fails=lambda n: n in (0, 1, 2)))
    with pytest.raises(StorageIOError, match=r"read of a\.0 failed"):
        story.pipeline.run([story.task("a", 3)])
    assert story.disk.in_flight == []


def test_when_the_rule_fails_its_error_is_raised_and_nothing_is_in_flight():
    def fail(name: str) -> None:
        if name == "a.1":
            raise ZeroDivisionError("rule")

    story = Story(num_buffers=2)
    story.rule.during = fail
    with pytest.raises(ZeroDivisionError):
        story.pipeline.run([story.task("a", 4)])
    assert story.disk.in_flight == []
    assert [event for event in story.events if event[0] == "finish"] == []


def void(story: Story, task: Task) -> Task:
    """The task is void when its weights are asked for."""
    take = task.weights

    def weights() -> None:
        take()

    task.weights = weights
    return task


def test_the_tiles_of_a_void_task_are_passed_over_once_they_are_read():
    story = Story(num_buffers=2)
    story.pipeline.run([void(story, story.task("a", 3)), story.task("b", 1)])
    assert story.events == [
        ("read", "a.0", "B1"),
        ("read", "a.1", "B0"),
        ("weights", "a"),  # asked for once
        ("read over", "a.0"),
        ("read", "a.2", "B1"),
        ("read over", "a.1"),
        ("read", "b.0", "B0"),
        ("read over", "a.2"),
        ("finish", "a"),
        ("weights", "b"),
        ("read over", "b.0"),
        ("apply", "b.0"),
        ("write", "b.0", "B0"),
        ("finish", "b"),
        ("write over", "b.0"),
    ]


# With a device.


def test_the_tiles_of_a_void_task_are_not_sent_to_a_device():
    story = Story(num_buffers=0, goes="a.0 a.1 b.0")
    tasks = [void(story, story.task("a", 2, resident=True)), story.task("b", 1, resident=True)]
    story.pipeline.run(tasks)
    assert story.events == [
        ("weights", "a"),
        ("finish", "a"),
        ("weights", "b"),
        ("send", "b.0"),
        ("back", "b.0"),
        ("finish", "b"),
        ("drain", []),
    ]


def test_tiles_that_a_device_has_done_sooner_go_there_while_the_cpu_does_the_others():
    story = Story(num_buffers=0, goes="a.1 a.3")
    story.pipeline.run([story.task("a", 5, resident=True)])
    assert story.events == [
        ("weights", "a"),
        ("send", "a.1"),
        ("send", "a.3"),
        ("apply", "a.0"),
        ("cpu took", "a.0"),
        ("apply", "a.2"),
        ("cpu took", "a.2"),
        ("apply", "a.4"),
        ("cpu took", "a.4"),
        ("back", "a.1"),
        ("back", "a.3"),
        ("finish", "a"),
        ("drain", []),
    ]
    assert story.device.asked == ["a.0", "a.1", "a.2", "a.3", "a.4", "a.2", "a.4", "a.4"]


def test_the_buffer_of_a_tile_on_a_device_is_written_and_used_again_when_it_is_back():
    story = Story(num_buffers=2, goes="a.1")
    story.pipeline.run([story.task("a", 3)])
    assert story.events == [
        ("read", "a.0", "B1"),
        ("read", "a.1", "B0"),
        ("weights", "a"),
        ("read over", "a.0"),
        ("apply", "a.0"),
        ("cpu took", "a.0"),
        ("write", "a.0", "B1"),
        ("read over", "a.1"),
        ("send", "a.1"),
        ("back", "a.1"),
        ("write", "a.1", "B0"),
        ("write over", "a.0"),
        ("read", "a.2", "B1"),
        ("read over", "a.2"),
        ("apply", "a.2"),
        ("cpu took", "a.2"),
        ("write", "a.2", "B1"),
        ("finish", "a"),
        ("drain", []),
        ("write over", "a.1"),
        ("write over", "a.2"),
    ]


def test_the_weights_of_the_next_unit_are_not_taken_while_tiles_of_this_one_are_away():
    story = Story(num_buffers=0, goes="a.0 a.1 b.0")
    story.pipeline.run([story.task("a", 2, resident=True), story.task("b", 1, resident=True)])
    assert story.events == [
        ("weights", "a"),
        ("send", "a.0"),
        ("send", "a.1"),
        ("back", "a.0"),
        ("back", "a.1"),
        ("finish", "a"),
        ("weights", "b"),
        ("send", "b.0"),
        ("back", "b.0"),
        ("finish", "b"),
        ("drain", []),
    ]


def test_weights_that_are_at_hand_are_taken_at_once():
    story = Story(num_buffers=0, goes="a.0 b.0")
    tasks = [story.task("a", 1, resident=True), story.task("b", 1, resident=True)]
    tasks[1].weights_at_hand = lambda: True
    story.pipeline.run(tasks)
    assert story.events == [
        ("weights", "a"),
        ("send", "a.0"),
        ("weights", "b"),
        ("send", "b.0"),
        ("back", "a.0"),
        ("finish", "a"),
        ("back", "b.0"),
        ("finish", "b"),
        ("drain", []),
    ]


def test_a_unit_that_turns_out_void_while_tiles_are_sent_is_passed_over():
    story = Story(num_buffers=0, goes="a.0 b.0 b.1 c.0")
    tasks = [story.task(name, num_tiles, resident=True) for name, num_tiles in (("a", 1), ("b", 2), ("c", 1))]
    tasks[1].weights = lambda: None
    for task in tasks[1:]:
        task.weights_at_hand = lambda: True
    story.pipeline.run(tasks)
    assert story.events == [
        ("weights", "a"),
        ("send", "a.0"),
        ("weights", "c"),
        ("send", "c.0"),
        ("finish", "b"),
        ("back", "a.0"),
        ("finish", "a"),
        ("back", "c.0"),
        ("finish", "c"),
        ("drain", []),
    ]


def test_when_the_run_is_stopped_or_fails_tiles_on_a_device_are_waited_for():
    def stop(name: str) -> None:
        story.pipeline.stop()

    def fail(name: str) -> None:
        raise ZeroDivisionError("rule")

    for during in (stop, fail):
        story = Story(num_buffers=3, disk=Disk(is_fast=True), goes="a.1")
        story.rule.during = during
        with contextlib.suppress(ZeroDivisionError):
            story.pipeline.run([story.task("a", 3)])
        assert story.events[:3] == [("read", "a.0", "B2"), ("read", "a.1", "B1"), ("read", "a.2", "B0")]
        assert ("drain", ["a.1"]) in story.events
        assert ("finish", "a") not in story.events
        assert story.disk.in_flight == [] and story.device.away == []


# update.step


class Recorder:
    """A rule that keeps what it is given."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, ...]] = []

    def apply(self, frozen, tile, start, stop, at, native) -> None:
        self.calls.append((frozen, tile, at.states, start, stop, at.weights, at.grads, native))


def test_segments_that_cross_tile_bounds_are_applied_part_by_part_at_their_addresses():
    unit = UnitSpec(0, "u", (), (), 300, 300, 0)
    update = UnitUpdate(unit, (Segment(10, 120, "p"), Segment(120, 130, "q"), Segment(190, 300, "r")))
    tiles = [Tile(0, 100, 1), Tile(100, 200, 1), Tile(200, 300, 1)]
    rule, native = Recorder(), object()
    for index, tile in enumerate(tiles):
        at = TileBytes.in_place(1000 * index, 10_000 * (index + 1), 100_000 * (index + 1))
        apply(rule, FORMATS, update, tile, at, native)
    assert rule.calls == [
        ("p", tiles[0], 0, 10, 100, 10_020, 100_040, native),
        ("p", tiles[1], 1000, 100, 120, 20_000, 200_000, native),
        ("q", tiles[1], 1000, 120, 130, 20_040, 200_080, native),
        ("r", tiles[1], 1000, 190, 200, 20_180, 200_360, native),
        ("r", tiles[2], 2000, 200, 300, 30_000, 300_000, native),
    ]


def test_whatever_the_tiles_every_element_of_a_segment_is_updated_once_and_no_other():
    random_numbers = random.Random(0)
    unit = UnitSpec(0, "u", (), (), 64, 64, 0)
    for _ in range(300):
        bounds = sorted({0, 64, *random_numbers.sample(range(1, 64), random_numbers.randrange(8))})
        tiles = [Tile(start, stop, 1) for start, stop in pairwise(bounds)]
        ends = sorted(random_numbers.sample(range(65), 2 * random_numbers.randrange(1, 6)))
        update = UnitUpdate(unit, tuple(Segment(a, b, (a, b)) for a, b in zip(ends[::2], ends[1::2], strict=True)))
        expected = [(element, segment.frozen) for segment in update.segments for element in range(*segment[:2])]
        rule, seen = Recorder(), []
        for tile in tiles:
            apply(rule, FORMATS, update, tile, TileBytes.in_place(7, 2 * tile.start, 4 * tile.start))
        for frozen, tile, states, start, stop, weight, grad, native in rule.calls:
            assert tile.start <= start < stop <= tile.stop
            assert (states, weight, grad, native) == (7, 2 * start, 4 * start, kernels.on_host)
            seen += [(element, frozen) for element in range(start, stop)]
        assert seen == expected
        homes = [TileHomes(tile, Resident(0)) for tile in tiles]
        touched = {tile for _, tile, *_ in rule.calls}
        if len(tiles) > 1:
            assert [home.tile for home in update.touched(homes)] == [tile for tile in tiles if tile in touched]


def test_tiles_that_no_segment_touches_are_left_where_they_are():
    story = Story(num_buffers=1)
    task = story.task("a", 3)
    task.update = UnitUpdate(task.update.unit, (Segment(0, 50, "x"), Segment(250, 260, "x")))
    task.tiles = task.update.touched(task.tiles)
    story.pipeline.run([task])
    assert [event for event in story.events if event[0] == "read"] == [("read", "a.0", "B0"), ("read", "a.2", "B0")]
    assert [event for event in story.events if event[0] == "finish"] == [("finish", "a")]


# States that were read before the verdict.


def test_states_that_were_read_ahead_are_not_read_again_and_their_buffers_come_back():
    story = Story(num_buffers=2)
    a, b = story.task("a", 1, spilled=True), story.task("b", 3)
    homes = [tile.states.stored for task in (a, b) for tile in task.tiles]
    story.pipeline.ahead.reader(homes)()
    assert story.events == [("read", "a.0", "B1"), ("read", "b.0", "B0")]
    story.pipeline.run([a, b])
    reads = [event for event in story.events if event[0] == "read"]
    assert [event[1] for event in reads] == ["a.0", "b.0", "a.0 grads", "b.1", "b.2"]
    applied = [event[1] for event in story.events if event[0] == "apply"]
    assert applied == ["a.0", "b.0", "b.1", "b.2"]
    story.pipeline.ahead.reader(homes)()
    assert len([event for event in story.events if event[0] == "read"]) == 7  # both buffers are free again


def test_an_update_of_other_units_takes_the_buffers_of_states_that_were_read_ahead_the_last_one_first():
    story = Story(num_buffers=2)
    a, b, c = story.task("a", 1), story.task("b", 1), story.task("c", 1)
    story.pipeline.ahead.reader([tile.states.stored for task in (a, b) for tile in task.tiles])()
    story.pipeline.run([c])
    story.pipeline.run([a])
    reads = [event[1] for event in story.events if event[0] == "read"]
    assert reads == ["a.0", "b.0", "c.0"]


def test_who_looks_for_a_buffer_while_states_are_dropped_finds_theirs():
    pool: list[Any] = [Mock(address=0)]
    came, dropping = threading.Event(), threading.Event()

    class Read:
        def wait(self) -> None:
            dropping.set()
            assert came.wait(10)

    ahead = StatePrefetch(pool)
    ahead.reader([Mock(read=lambda address: Read(), num_flips=0)])()
    dropper = threading.Thread(target=ahead.drop)
    dropper.start()
    assert dropping.wait(10) and not pool
    threading.Timer(0.05, came.set).start()
    assert not ahead.give_up() and pool  # it has waited for whoever drops
    dropper.join()


def test_states_that_were_read_ahead_before_a_speculative_update_of_them_counted_are_read_again():
    story = Story(num_buffers=2)
    a = story.task("a", 1)
    home = a.tiles[0].states.stored
    story.pipeline.ahead.reader([home])()
    home.num_flips += 1
    story.pipeline.run([a])
    assert [event[1] for event in story.events if event[0] == "read"] == ["a.0", "a.0"]


def test_states_that_are_dropped_are_read_again_and_not_read_ahead_by_a_call_from_before():
    story = Story(num_buffers=2)
    a = story.task("a", 1)
    homes = [tile.states.stored for tile in a.tiles]
    late = story.pipeline.ahead.reader(homes)
    story.pipeline.ahead.reader(homes)()
    story.pipeline.ahead.drop()
    assert story.events == [("read", "a.0", "B1"), ("read over", "a.0")]
    late()
    story.pipeline.run([a])
    assert [event[1] for event in story.events if event[0] == "read"] == ["a.0", "a.0"]
