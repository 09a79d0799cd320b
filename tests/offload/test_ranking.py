"""Which unit gives its place to another one."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from offload.tiers.weights.ranking import Ranking


def unit(distance: float, **of: Any) -> Any:
    return SimpleNamespace(distance=distance, pins=(), is_settled=lambda: True, **of)


class Present:
    """Units as a set of objects, which have no hash."""

    def __init__(self, units: list[Any]) -> None:
        self._units = list(units)

    def __iter__(self) -> Any:
        return iter(self._units)

    def __len__(self) -> int:
        return len(self._units)

    def __contains__(self, item: object) -> bool:
        return any(item is other for other in self._units)


class Compared:
    """Distances, counted."""

    count = 0

    def __call__(self, entry: Any) -> float:
        self.count += 1
        return float(entry.distance)


def test_a_visit_compares_units_once_however_many_are_evicted_in_it() -> None:
    units = [unit(number) for number in range(100)]
    ranking: Ranking[Any] = Ranking()
    distance, visit = Compared(), object()
    for number in range(99, 69, -1):
        victim = ranking.victim(Present(units), visit, distance, 5.0)
        assert victim is units[number]
        units.remove(victim)
    assert distance.count <= 100 + 30


def test_units_are_compared_anew_in_another_visit_and_where_none_of_before_will_do() -> None:
    near, far = unit(1.0), unit(9.0)
    ranking: Ranking[Any] = Ranking()
    distance, visit = Compared(), object()
    present = Present([near, far])
    assert ranking.victim(present, visit, distance, 5.0) is far
    assert ranking.victim(Present([near]), visit, distance, 5.0) is None
    near.distance = 9.0
    assert ranking.victim(Present([near]), visit, distance, 5.0) is near
    other = unit(7.0)
    assert ranking.victim(Present([near, other]), object(), distance, 5.0) is near


def test_what_must_be_had_is_the_unit_that_is_needed_last_now() -> None:
    first, second = unit(3.0), unit(2.0)
    ranking: Ranking[Any] = Ranking()
    distance, visit = Compared(), object()
    assert ranking.victim(Present([first, second]), visit, distance, 8.0) is None
    second.distance = 4.0
    assert ranking.victim(Present([first, second]), visit, distance, -1.0) is second


def test_a_unit_that_is_in_use_keeps_its_place() -> None:
    used, idle = unit(9.0), unit(2.0)
    used.pins = ("compute",)
    assert Ranking[Any]().victim(Present([used, idle]), object(), Compared(), -1.0) is idle
