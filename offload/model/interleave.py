"""Micro-batches on their way through the model together, so that each unit is brought in once for all of them.

Each runs in a thread of its own, as the user has written it. One thread computes at a time: at the beginning of a use
of a unit it waits, and another one goes on. So all of them come to a unit before the first uses it, then each uses it
in turn, and it is released after the last.

[Note: Why the bits are those of the loop] Each micro-batch computes what it computes alone. What they share is the
weights, which stay as they are, the sums of gradients, and the random generators. A micro-batch begins the backward of
a unit when those before it have begun theirs, so that gradients are added in the order of the loop. Where units are
nested in it, such as experts, of which each micro-batch uses others, it waits once more before it gives a parameter of
the unit a gradient. Once one draws random numbers in its forward, or changes weights there, it goes on alone to its
end, and so does the next: that is the loop. So it is with one that goes backward several times, or looks at gradients,
writes to weights or trains another engine's model between its forward and its end. The first call of all runs alone, so
that this is known before another one begins: what a model remembers of one forward (the state of a recurrent net) would
be read by the next one before anything shows that it was changed. What has come in another order all the same is an
error. None of it depends on the micro-batches using the same units in the same order; only the traffic that is saved
does.

[Note: Why nothing hangs] One thread computes at any moment until all are over. Who stops to compute, by waiting or by
its end, says who goes on; the first micro-batch that is not over may always. After an error each of the others ends at
the wait where it is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

from aio_ext.latch import Latch
from offload.interrupts import held_back
from offload.model.attributes import Attributes
from offload.model.body import Body
from offload.model.draws import generators_among, known_to, random_states
from offload.model.habits import TOGETHER, Habits
from offload.model.hook_context import HookContext
from offload.model.items import SharedItems
from offload.model.micro_batch import Ended, MicroBatch, Place, Stage
from offload.model.surroundings import Surroundings
from offload.model.under_way import in_thread
from offload.model.unit_in_model import UnitInModel
from offload.settings import Settings
from offload.torch_internals import graph_task
from offload.units import ParameterSpec
from swapper import OffloadError

_SLICE_S = 0.1


class Switch(Protocol):
    """State of the model that changes with the turn: see ``offload.model.hooks``."""

    context: HookContext

    def switch(self, context: HookContext) -> None: ...

    def keep(self, wanted: UnitInModel | None) -> None: ...

    def end_calls(self) -> None: ...


@dataclass(eq=False)
class MicroBatches:
    """Runs up to ``num_at_once`` micro-batches together. One call of ``run`` for each object."""

    hooks: Switch
    function: Callable[[Any], Any]
    items: Iterator[Any]
    num_at_once: int | None
    """None: all that there are."""
    habits: Habits
    surroundings: Surroundings
    attributes: Attributes

    def __post_init__(self) -> None:
        self._all: list[MicroBatch] = []
        self._num_calls = self.hooks.context.num_calls
        self._shared = SharedItems(self.attributes.has)
        self._body = Body(self.function, self.items, self.attributes.has, self.attributes.backward_hooks())
        known = (*self.attributes.everything(), *known_to(self.function), *self._body.everything())
        self._generators = generators_among(known)
        self._own: MicroBatch
        """The one that computes."""
        self._there_may_be_more = True
        self._one_by_one = False
        """Each runs to its end from now on."""
        self._last_changer: MicroBatch | None = None
        """The last one that has changed an attribute of a module."""
        self._last_place: Place | None = None
        """The use that began last."""
        self._last_drawer = -1
        """The last micro-batch that has drawn random numbers."""
        self._last_giver: dict[ParameterSpec, int] = {}
        """The last micro-batch that has given each parameter a gradient."""
        self._last_of_unit: dict[UnitInModel, MicroBatch] = {}
        """The same of each unit."""
        self._error: BaseException | None = None
        self._has_left = False
        """``surroundings`` are those that a micro-batch has left."""
        self.over = Latch()
        """No thread touches anything any more. What is above belongs to the thread that has the turn."""

    def run(self) -> list[Any]:
        """Run them; their results. The first error ends all, and is raised when they have ended."""
        try:
            with held_back():
                self._give_turn(self._begin_next())
            self._wait_for_end()
        except BaseException as error:  # an interrupt, or there is no room for a thread
            self._error = self._error or error
            if self._all:
                self._wait_for_end()
            raise
        if self._has_left:
            self.surroundings.take_on()
        self._raise_error()
        if self._last_drawer >= 0 and not self.habits.takes_turns:
            self.habits.draws_first = True
        return [each.result for each in self._all if each.is_one]

    def _raise_error(self) -> None:
        error, self._error = self._error, None
        try:
            if error is not None:
                raise error
        finally:
            del error  # it refers to this frame, and by it to all that the micro-batches have computed

    def _wait_for_end(self) -> None:
        while not self.over.wait(_SLICE_S):  # a signal that came to another thread is handled between two slices
            pass

    @property
    def of_threads(self) -> str | None:
        """Why they must run in the thread that calls for them; None: they need not."""
        name = self._body.of_threads()
        return None if name is None else f"the function reads {name}, which one thread holds, or each has by itself"

    @property
    def was_last(self) -> bool:
        """There was no other micro-batch left."""
        return any(not each.is_one for each in self._all)

    @property
    def first_is_alone(self) -> bool:
        return not (self.habits.are_seen or self.habits.takes_turns)

    @property
    def is_over(self) -> bool:
        """No thread touches anything any more."""
        return all(each.stage is Stage.OVER for each in self._all)

    # What the hooks tell, in the thread that has the turn.

    def arrive(self, unit: UnitInModel, *, backward: bool) -> None:
        """Wait until it is this micro-batch's turn to use the unit. Raises ``Ended``."""
        own = self._own
        self._end_if_failed()
        self._look_for_draws(own)
        self._look_for_changes(own, unit)
        if not own.used:
            self._body.took()
        kept = self.surroundings.kept_for_all_threads()
        if kept is not None:
            self._run_one_by_one(kept)
        own.place = Place(unit, backward)
        self._pause(own)
        own.used.add(unit)
        if not backward:
            (own.repeated if unit in own.entered else own.entered).add(unit)
        own.last_unit = unit
        self._last_place = own.place

    def _pause(self, own: MicroBatch) -> None:
        """Wait at its place until it is its turn."""
        own.stage = Stage.WAITING
        following = self._following() or own
        self.hooks.keep(following.unit)
        if following is not own:
            settings = Settings()
            self._give_turn(following)
            self._wait_for_turn(own)
            settings.put()
        own.stage = Stage.COMPUTING

    def left(self, unit: UnitInModel, start: int) -> None:
        self._own.calls.setdefault(unit, set()).add(start)

    def opened(self, unit: UnitInModel, start: int) -> None:
        self._own.calls.get(unit, set()).discard(start)

    def is_awaited(self, unit: UnitInModel) -> bool:
        return any(each.place is not None and each.place.unit is unit for each in self._in_stage(Stage.WAITING))

    def gradient(self, unit: UnitInModel, spec: ParameterSpec, *, in_its_place: bool) -> bool:
        own = self._own
        if not in_its_place:
            self._run_one_by_one(f"the gradient of {spec.name} comes outside of its unit's backward")
        if self._gives_too_early(own, unit, spec):
            own.place, own.gives = Place(unit, backward=True), spec
            self._pause(own)
            own.gives = None
        if spec in own.given:
            self._run_one_by_one(f"the function gives {spec.name} several gradients (two backwards?)")
        own.given.add(spec)
        last = self._last_giver.get(spec, -1)
        if own.index < last:
            self._refuse_order(own, last, f"gets a gradient of {spec.name}")
        self._last_giver[spec] = own.index
        before, self._last_of_unit[unit] = self._last_of_unit.get(unit, own), own
        return before is not own

    def changed(self, unit: UnitInModel) -> None:
        own = self._own
        self._run_one_by_one(f"the forward of {unit.spec.name} changes its weights")
        for other in self._others(own, unit):
            self._refuse_order(own, other.index, f"has changed weights of {unit.spec.name}")

    def touched(self, what: str) -> None:
        if self.hooks.context.in_forward or graph_task() != -1:
            return  # in its place: see ``changed`` and ``gradient``
        own = self._own
        self._run_one_by_one(f"the function {what}")
        for other in self._all:
            if other.stage is not Stage.OVER if other.index < own.index else other.index > own.index and other.used:
                self._refuse_order(own, other.index, what)

    def refuse_others(self, what: str) -> None:
        others = [each for each in self._all if each.stage is not Stage.OVER]
        if len(others) > 1 or self._there_may_be_more:
            raise OffloadError(
                f"{TOGETHER}: {what} comes within one micro-batch, while others are under way. It belongs after the "
                "call: micro-batches add to one step"
            )

    # Who goes on.

    def _following(self) -> MicroBatch | None:
        """The one to compute next, of those that wait or have not begun; None if there is none."""
        waiting = self._in_stage(Stage.WAITING)
        if self._error is not None:
            return waiting[0] if waiting else None
        one_by_one = self._one_by_one or self.habits.takes_turns or self.first_is_alone
        if self._there_may_be_more and not (one_by_one and waiting):
            return self._begin_next()
        able = waiting[:1] if one_by_one else [each for each in waiting if not self._comes_too_early(each)]
        here = [each for each in able if each.place == self._last_place]
        return here[0] if here else min(able, key=_progress, default=None)

    def _begin_next(self) -> MicroBatch:
        """One more, whose thread waits for its turn."""
        own = MicroBatch(HookContext(len(self._all), self._num_calls))
        threading.Thread(
            target=self.surroundings.variables().run,
            args=(self._run, own),
            name=f"offload-micro-batch-{own.index}",
            daemon=True,
        ).start()
        self._all.append(own)
        if self.num_at_once is not None and len(self._all) == self.num_at_once:
            self._there_may_be_more = False
        return own

    def _comes_too_early(self, own: MicroBatch) -> bool:
        """It would begin a backward of a unit that one before it has yet to begin."""
        place = own.place
        if place is None or not place.backward:
            return False
        if own.gives is not None:
            return self._gives_too_early(own, place.unit, own.gives)
        num_calls = max(own.num_calls(place.unit), 1)
        return any(each.num_calls(place.unit) >= num_calls for each in self._before(own))

    def _gives_too_early(self, own: MicroBatch, unit: UnitInModel, spec: ParameterSpec) -> bool:
        """One before it is in the middle of the backward of the unit, and has not given the parameter a gradient."""
        before = (each for each in self._before(own) if spec not in each.given)
        return any(unit is entry[0] for each in before for entry in each.context.open)

    def _before(self, own: MicroBatch) -> list[MicroBatch]:
        """Those before it in a loop that are not over."""
        return [each for each in self._all[: own.index] if each.stage is not Stage.OVER]

    def _others(self, own: MicroBatch, *users_of: UnitInModel) -> list[MicroBatch]:
        """All others that are not over, and have used these units."""
        return [
            each
            for each in self._all
            if each is not own and each.stage is not Stage.OVER and each.used.issuperset(users_of)
        ]

    def _give_turn(self, to: MicroBatch) -> None:
        """The other thread computes from now on, and this one touches nothing until it gets the turn again."""
        self.hooks.switch(to.context)
        self._own = to
        to.turn.release()

    def _wait_for_turn(self, own: MicroBatch) -> None:
        own.turn.acquire()
        own.states = self._random_states()
        self._end_if_failed()

    # The thread of one.

    def _run(self, own: MicroBatch) -> None:
        own.context.thread = threading.get_ident()
        try:
            self._wait_for_turn(own)
            own.stage = Stage.COMPUTING
            try:
                before = self.attributes.hashes() if self.first_is_alone else {}
                with self.surroundings.entered(), in_thread(self):
                    self._call(own)
                    self._look_at_surroundings(own)
                self._look_for_draws(own)
                self._look_for_changes(own)
                self._look_behind_versions(before)
                self._look_at_body(own)
            finally:
                self.hooks.end_calls()
        except Ended:
            pass
        except BaseException as error:
            self._error = self._error or error
        self._end(own)

    def _call(self, own: MicroBatch) -> None:
        try:
            item = next(self.items)
        except StopIteration:
            own.is_one = self._there_may_be_more = False
        else:
            self._look_at_item(item)
            own.result = self.function(item)

    def _end(self, own: MicroBatch) -> None:
        own.stage = Stage.OVER
        self.habits.are_seen |= bool(own.given)
        following = None
        try:
            following = self._following()
            self.hooks.keep(None if following is None else following.unit)
        except BaseException as error:  # of a disk, or of the system that has no room for a thread
            self._error = self._error or error
            following = self._following()
        if following is None:
            self.over.set()
        else:
            self._give_turn(following)

    # What shall not come in another order than in a loop.

    def _look_for_draws(self, own: MicroBatch) -> None:
        """See whether the micro-batch has drawn random numbers since it got its turn."""
        states = self._random_states()
        if states == own.states:
            return
        own.states = states
        if own.used:
            self._run_one_by_one("the function draws random numbers once it has used the model (dropout?)")
        elif not self.habits.draws_first:
            self._one_by_one = True  # this once: it may draw later, too
        if own.index < self._last_drawer:
            self._refuse_order(own, self._last_drawer, "draws random numbers")
        self._last_drawer = own.index

    def _look_for_changes(self, own: MicroBatch, *arrived: UnitInModel) -> None:
        """See whether modules know something of this micro-batch that another one would find."""
        last = () if own.last_unit is None else (own.last_unit,)
        around = dict.fromkeys([*last, *arrived, *own.context.in_forward])
        for unit in own.repeated.intersection(around):
            self._look_for_statistics(own, unit)
        kind = self.attributes.changed(around if arrived else None)
        if kind is None:
            return
        reason = f"a {kind} keeps something of its forward"
        if self._last_changer in (None, own):
            self._one_by_one = True  # this once: it may be a cache that was filled
            self.habits.say(reason)
        else:
            self._run_one_by_one(reason)
        self._last_changer = own
        for other in self._before(own):
            self._refuse_order(own, other.index, f"has changed what a {kind} keeps")

    def _look_for_statistics(self, own: MicroBatch, unit: UnitInModel) -> None:
        """See [Note: Buffers of torch's own modules], of a unit that the micro-batch has used again."""
        if not self.attributes.statistics_changed(unit):
            return
        self._run_one_by_one(
            f"the function uses {unit.spec.name} several times, which keeps statistics of its forwards"
        )
        for other in self._others(own, unit):
            self._refuse_order(own, other.index, f"has changed statistics of {unit.spec.name}")

    def _look_behind_versions(self, before: dict[int, int]) -> None:
        """See whether the first micro-batch of all has written to tensors that modules have, through ``.data``."""
        now = self.attributes.hashes() if before else {}
        if any(now.get(key, value) != value for key, value in before.items()):
            self._run_one_by_one("the function writes to a tensor that a module keeps")

    def _look_at_surroundings(self, own: MicroBatch) -> None:
        """See whether the function leaves other modes, or context variables, than it has found."""
        left = self.surroundings.left()
        if left is None:
            return
        leaves = "leaves a mode of torch or a context variable other than it was"
        self._run_one_by_one(f"the function {leaves}")
        for other in self._others(own):
            self._refuse_order(own, other.index, leaves)
        self.surroundings = left
        self._has_left = True

    def _look_at_body(self, own: MicroBatch) -> None:
        """See whether the function hands something on to the next micro-batch."""
        name = self._body.changed()
        if name is None:
            return
        self._run_one_by_one(f"the function reads {name}, and a micro-batch changes it")
        for other in self._others(own):
            if other.used:
                self._refuse_order(own, other.index, f"has changed {name}, which the function reads,")

    def _look_at_item(self, item: Any) -> None:
        """See whether an earlier micro-batch hands something on by what its item shares with this one."""
        if not self.habits.takes_turns and self._shared.is_changed_for(item):
            self._run_one_by_one("the items share something, and a micro-batch changes it")

    def _random_states(self) -> tuple[Any, ...]:
        return random_states(self.surroundings.device, self._generators)

    def _run_one_by_one(self, reason: str) -> None:
        self._one_by_one = True
        self.habits.take_turns(reason)

    def _refuse_order(self, own: MicroBatch, other: int, what: str) -> None:
        self.habits.takes_turns = True
        raise OffloadError(
            f"{TOGETHER}: micro-batch {own.index} {what} while micro-batch {other} is under way. A loop has another "
            "order, and would give other numbers. The gradients of this step are dropped; from now on micro-batches "
            "run one after the other"
        )

    def _end_if_failed(self) -> None:
        if self._error is not None:
            raise Ended

    def _in_stage(self, stage: Stage) -> list[MicroBatch]:
        return [each for each in self._all if each.stage is stage]


def _progress(each: MicroBatch) -> tuple[bool, int]:
    return (False, -1) if each.place is None else each.place.progress
