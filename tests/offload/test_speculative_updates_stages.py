"""The stages of a speculative update: which follows which, and what ends with each way it can end."""

from __future__ import annotations

from collections import deque
from itertools import product

import pytest
from cache_rig import Call
from speculative_room import PATIENCE_S, Room, carried_out, carry_out

from offload.update.speculative import SpeculativeUpdate, Stage

ALLOWED = {
    (Stage.HELD, Stage.QUEUED),
    (Stage.HELD, Stage.OVER),
    (Stage.QUEUED, Stage.RUNNING),
    (Stage.QUEUED, Stage.OVER),
    (Stage.RUNNING, Stage.WRITTEN),
    (Stage.RUNNING, Stage.CONFIRMED),
    (Stage.RUNNING, Stage.VOID),
    (Stage.CONFIRMED, Stage.OVER),
    (Stage.VOID, Stage.OVER),
    (Stage.WRITTEN, Stage.OVER),
}


@pytest.mark.parametrize(("before", "after"), list(product(Stage, Stage)), ids=lambda stage: stage.name)
def test_a_stage_follows_another_only_as_allowed(before: Stage, after: Stage):
    room = Room()
    early = SpeculativeUpdate(room.units[0], room.speculative, is_slot_held=True)
    early.stage = before
    if (before, after) in ALLOWED:
        early.become(after)
        assert early.stage is after
    else:
        message = f"the speculative update of unit u0 cannot be {after.name} after {before.name}"
        with pytest.raises(RuntimeError, match=message):
            early.become(after)
        assert early.stage is before


def by_none(room: Room) -> None:
    room.hold(0)
    room.speculative.begin(room.units[0], None)


def by_void_before(room: Room) -> None:
    room.queue(0)
    room.speculative.invalidate(room.units[0])


def by_void_meanwhile(room: Room) -> None:
    (task,) = room.run(0)
    training = Call(lambda: room.speculative.invalidate(room.units[0]))
    assert room.failure.somebody_waits.wait(PATIENCE_S)
    carry_out(task)
    training.result()


def by_void_after(room: Room) -> None:
    room.write(0)
    room.speculative.invalidate(room.units[0])


def by_confirmation(room: Room) -> None:
    room.write(0)
    room.speculative.confirm([room.update(0)])


def by_confirmation_meanwhile(room: Room) -> None:
    (task,) = room.run(0)
    room.speculative.confirm([room.update(0)])
    carry_out(task)


def by_refusal(room: Room) -> None:
    room.write(0)
    room.speculative.confirm([room.update(0, "lr 2")])


def by_refusal_meanwhile(room: Room) -> None:
    (task,) = room.run(0)
    room.speculative.confirm([room.update(0, "lr 2")])
    carry_out(task)


def by_a_step_before(room: Room) -> None:
    room.queue(0)
    room.speculative.confirm([room.update(0)])


def by_dropping_held(room: Room) -> None:
    room.hold(0)
    room.speculative.drop_all()


def by_dropping_queued(room: Room) -> None:
    room.queue(0)
    room.speculative.drop_all()


class _Interrupted(deque[SpeculativeUpdate]):
    def append(self, _: SpeculativeUpdate) -> None:
        raise KeyboardInterrupt


def _queue_interrupted(room: Room) -> None:
    """An update that is asked for, and that an interrupt keeps from the queue."""
    room.hold(0)
    queue, room.speculative._queue = room.speculative._queue, _Interrupted()
    with pytest.raises(KeyboardInterrupt):
        room.speculative.begin(room.units[0], room.update(0))
    room.speculative._queue = queue
    assert room.speculative.of_unit[room.units[0].index].stage is Stage.QUEUED and not queue


def by_void_after_an_interrupt(room: Room) -> None:
    _queue_interrupted(room)
    room.speculative.invalidate(room.units[0])


def by_dropping_after_an_interrupt(room: Room) -> None:
    _queue_interrupted(room)
    room.speculative.drop_all()


@pytest.mark.parametrize(
    "end",
    [
        by_void_after_an_interrupt,
        by_dropping_after_an_interrupt,
        by_none,
        by_void_before,
        by_void_meanwhile,
        by_void_after,
        by_confirmation,
        by_confirmation_meanwhile,
        by_refusal,
        by_refusal_meanwhile,
        by_a_step_before,
        by_dropping_held,
        by_dropping_queued,
    ],
)
@pytest.mark.parametrize("spilled", [(), (0,)], ids=["resident", "spilled"])
def test_however_an_update_ends_loans_and_holds_end_with_it_and_the_next_backward_holds_the_unit_again(end, spilled):
    room = Room(max_held=1, spilled=spilled)
    for _ in range(2):  # the place of the first one is free for the second
        end(room)
        events = [what for what, _ in room.told()]
        assert events.count("hold") == 1
        assert events.count("end hold") + events.count("lend slot") + events.count("lend nothing") == 1
        assert events.count("lend slot") == events.count("give back")
        assert events.count("lend buffer") == events.count("end loan")
        assert (
            events.count("flip") == events.count("flip tile") == (end in (by_confirmation, by_confirmation_meanwhile))
        )
        carried_out(room)
        assert room.told() == []
        room.speculative.drop_all()


def test_an_update_that_has_not_begun_at_the_verdict_is_not_begun_by_the_update_thread_while_others_are_confirmed():
    room = Room(2)
    room.write(0)
    room.queue(1)
    run: list[str] = []
    flip = room.host.flip
    room.host.flip = lambda unit: (run.extend(carried_out(room)), flip(unit))
    remaining = room.speculative.confirm([room.update(1), room.update(0)])
    assert [update.unit.name for update in remaining] == ["u1"] and not run
