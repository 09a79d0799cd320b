"""Places of a process, as ranks that wait for it are told."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from offload.ranks import places
from offload.ranks.places import Place, Places


class Needs:
    """Operations of an engine."""

    def __init__(self, name: str = "", stuck_s: float = 5.0, members: Sequence[int] = (0, 1)) -> None:
        self.needed_for = name
        self.members = members
        self._stuck_s = stuck_s

    def stuck_s(self) -> float:
        return self._stuck_s


NOTHING = Needs()


def torchs(call: Callable[[], Any]) -> Any:
    """A collective of torch's, in which the call is made."""
    text = "def barrier(group=None):\n    return [call() for _ in range(2)]"
    names: dict[str, Any] = {"call": call, "__name__": "torch.distributed.distributed_c10d"}
    exec(compile(text, "/x/torch/distributed/distributed_c10d.py", "exec"), names)
    return names["barrier"]


def test_a_program_that_waits_for_nobody_is_at_its_own_line():
    found = Places([0, 1]).look(NOTHING, [NOTHING])
    assert found.name.startswith("test_places.py, line ") and found.stuck_s == 0


def test_a_program_that_waits_for_ranks_is_at_the_operation():
    look = Places([0, 1, 2]).look
    assert look(Needs("step 3"), []) == Place("step 3", 5.0)
    assert look(NOTHING, [NOTHING, Needs("step 9")]) == Place("step 9, of another engine", 5.0)


def test_operations_that_other_processes_may_end_leave_nobody_stuck():
    assert Places([0, 1]).look(NOTHING, [Needs("step 9", members=[1, 2])]).stuck_s == 0


@pytest.mark.parametrize(
    ("of_group", "stuck_s"), [([0, 1], [(0.0, 3.0), (0.0, 4.0)]), ([0, 1, 2], [(0.0, 0.0), (0.0, 0.0)])]
)
def test_a_collective_of_the_programs_own_is_named_and_counts_if_its_ranks_are_the_worlds(
    monkeypatch: pytest.MonkeyPatch, of_group: list[int], stuck_s: list[tuple[float, float]]
):
    monkeypatch.setattr(places.distributed, "get_process_group_ranks", lambda group: of_group)
    now = iter([10.0, 13.0, 20.0, 24.0])
    monkeypatch.setattr(places, "time", SimpleNamespace(monotonic=lambda: next(now)))
    own = Places([0, 1])
    barrier = torchs(lambda: own.look(NOTHING, []))
    calls = [barrier() for _ in range(2)]
    assert [(first.stuck_s, second.stuck_s) for first, second in calls] == stuck_s, "another call is another wait"
    assert {"torch.distributed.barrier (test_places.py" in place.name for call in calls for place in call} == {True}
