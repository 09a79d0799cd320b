"""The order of uses of a model with experts: two layers, each a unit and four experts of it."""

from __future__ import annotations

from itertools import islice

import torch
from torch import nn

from offload.tiers.weights.routed_order import RoutedOrder
from offload.tiers.weights.use_order import NEVER
from offload.units.find import find_units


class _Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.dense = nn.Linear(64, 64)
        self.experts = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))


def order() -> RoutedOrder:
    """Units 0 and 5 are dense, 1 to 4 and 6 to 9 their experts."""
    with torch.device("meta"):
        units = find_units(nn.ModuleList([_Layer(), _Layer()]))
    assert [unit.experts is None for unit in units] == [True, *[False] * 4] * 2
    return RoutedOrder(units)


def forward(order: RoutedOrder, *of_layers: list[int]) -> None:
    for dense, experts in zip((0, 5), of_layers, strict=True):
        order.use(dense)
        order.announce(experts)
        for index in experts:
            order.use(index)
            order.use(index)  # its other weight


def test_experts_that_are_announced_come_first_and_in_this_order() -> None:
    one = order()
    one.use(0)
    one.announce([2, 4])
    assert list(islice(one.upcoming(), 3)) == [2, 4, 5]
    assert one.distance(2) < one.distance(4) < one.distance(5)
    assert one.distance(1) == one.distance(3) == NEVER  # no visit has used them so far


def test_an_expert_counts_once_in_a_visit_of_its_layer() -> None:
    one = order()
    one.use(0)
    one.announce([2, 4])
    assert [one.use(index) for index in (2, 2, 4, 4)] == [True, False, True, False]


def test_routing_that_changes_does_not_disturb_the_order_of_the_layers() -> None:
    one = order()
    for step in range(6):
        one.use(0)
        if step > 1:  # two sweeps are known
            assert next(index for index in one.upcoming() if index is not None) == 5
        one.announce([1 + step % 4])
        one.use(1 + step % 4)
        one.use(5)
        one.announce([6 + step * 3 % 4])
        one.use(6 + step * 3 % 4)


def test_a_backward_uses_in_reverse_what_its_forward_has_used() -> None:
    one = order()
    forward(one, [1, 3], [7, 8])
    one.use(5)
    one.use(8)
    assert next(islice(one.upcoming(), 1, None)) == 7
    one.use(7)
    one.use(0)
    one.use(3)
    assert next(islice(one.upcoming(), 1, None)) == 1
    one.use(1)
    one.end_step()
    forward(one, [2, 4], [6, 9])  # after one backward that is expected before it begins
    one.use(5)
    assert list(islice(one.upcoming(), 2)) == [9, 6]


def test_experts_that_are_used_more_often_are_expected_sooner() -> None:
    one = order()
    for step in range(20):
        forward(one, [1, 2] if step % 4 == 0 else [1, 3], [6, 7])
    one.use(0)
    assert one.distance(1) < one.distance(3) < one.distance(2) < one.distance(4) == NEVER


def test_only_an_expert_that_nearly_every_visit_uses_comes_before_the_router_has_chosen() -> None:
    one = order()
    forward(one, [1, 2], [6, 7])
    one.use(0)
    assert not {1, 2, 3, 4} & set(one.upcoming())  # one visit says little
    for step in range(30):
        forward(one, [1, 2] if step % 2 else [1, 3], [6, 7])
    one.use(5)
    assert {1, 2, 3, 4} & set(one.upcoming()) == {1}
    one.use(6)
    one.use(0)
    assert list(islice(one.upcoming(), 3)) == [1, None, 5]  # as many as last time, whichever the other one is
