"""Hooks in small models: what they tell the schedule, that parameters are there when needed and handles else.

Every story compares the gradients with those of a copy of the model without hooks, and looks at the model afterwards.
"""

from __future__ import annotations

import contextlib
import copy
import pickle
from collections.abc import Iterator

import pytest
import torch
from stories import Model, Story, Weight, batch, chain, forward_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.model.hooks import Hooks
from offload.model.own_writes import OwnWrites
from swapper import StorageIOError


@pytest.fixture(autouse=True)
def seed() -> Iterator[None]:
    torch.manual_seed(0)
    yield


LINEAR_BACKWARD = ["begin {0}", "take {0}.bias", "take {0}.weight", "end {0}", "over {0}"]


def backward_of(*names: str) -> list[str]:
    """Of linear layers."""
    return [line.format(name) for name in names for line in LINEAR_BACKWARD]


# Which units are used, and when.


def test_the_layers_of_a_chain_are_used_one_after_the_other_forward_and_backward():
    story = Story(chain("a", "b"), "a", "b")
    assert story.train() == forward_of("a", "b") + backward_of("b", "a")


def test_a_second_step_is_like_the_first():
    story = Story(chain("a", "b"), "a", "b")
    assert story.train() == story.train()


def test_evaluation_uses_units_forward_only_also_between_a_forward_and_its_backward():
    story = Story(chain("a", "b"), "a", "b")

    def run(model: nn.Module) -> torch.Tensor:
        loss = model(batch())
        with torch.no_grad():
            model(2 * batch())
        return loss

    assert story.train(run) == 2 * forward_of("a", "b") + backward_of("b", "a")


def test_the_backwards_of_two_forwards_may_come_in_any_order():
    story = Story(chain("a", "b"), "a", "b")
    for model in (story.model, story.plain):
        first, second = model(batch()), model(2 * batch())
        first.sum().backward()
        second.sum().backward()
    assert story.told() == 2 * forward_of("a", "b") + 2 * backward_of("b", "a")
    story.check_at_rest()
    story.check_gradients()


def test_a_module_that_is_called_twice_in_a_row_has_one_backward():
    story = Story(Model(lambda self, x: self.a(self.a(x).relu()), a=nn.Linear(4, 4)), "a")
    assert story.train() == [*forward_of("a", "a"), *backward_of("a")]


def test_a_module_that_is_called_before_and_after_another_is_used_twice_each_way():
    model = Model(lambda self, x: self.a(self.b(self.a(x).relu())), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    assert Story(model, "a", "b").train() == [
        *forward_of("a", "b", "a"),
        "begin a",  # the second call's backward: the gradients come with the first one's
        "end a",
        "over a",
        *backward_of("b", "a"),
    ]


def test_a_unit_around_another_is_in_use_as_long_as_the_inner_one():
    def compute(self: Weight, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x * self.weight) * self.weight

    story = Story(Model(lambda self, x: self.outer(x), outer=Weight(compute, inner=nn.Linear(4, 4))), "outer")
    assert story.train() == [
        "begin outer",
        "end outer",
        "begin outer",
        "take outer.inner.bias",
        "take outer.inner.weight",
        "take outer.weight",
        "end outer",
        "over outer",
    ]
    model = Model(lambda self, x: self.outer(x), outer=Weight(compute, inner=nn.Linear(4, 4)))
    story = Story(model, "outer", "outer.inner")
    assert story.train() == [
        "begin outer",
        "begin outer.inner",
        "end outer.inner",
        "end outer",
        "begin outer",
        "begin outer.inner",
        "take outer.inner.bias",
        "take outer.inner.weight",
        "take outer.weight",
        "end outer",
        "over outer",
        "end outer.inner",  # nothing says that it is over before the backward is
        "over outer.inner",
    ]


def test_an_inner_unit_is_closed_when_a_gradient_reaches_the_one_before_it():
    def compute(self: Weight, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.weight

    outer = Weight(compute, first=nn.Linear(4, 4), second=nn.Linear(4, 4))
    story = Story(Model(lambda self, x: self.outer(x), outer=outer), "outer", "outer.first", "outer.second")
    assert story.train() == [
        "begin outer",
        *forward_of("outer.first", "outer.second"),
        "end outer",
        "begin outer",
        "take outer.weight",
        *backward_of("outer.second"),
        *backward_of("outer.first")[:-2],
        "end outer",
        "over outer",
        "end outer.first",
        "over outer.first",
    ]


def test_a_unit_that_is_not_called_is_not_used():
    model = Model(lambda self, x: self.a(x), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    story = Story(model, "a", "b")
    assert story.train() == forward_of("a") + backward_of("a")


def test_a_frozen_unit_is_used_backward_where_a_gradient_passes_it_and_has_none_itself():
    model = chain("a", "b", "c")
    for name in "ac":
        model.get_submodule(name).requires_grad_(False)
    story = Story(model, "a", "b", "c")
    assert story.train() == [
        *forward_of("a", "b", "c"),
        "begin c",
        "end c",
        "over c",
        *backward_of("b"),  # and no gradient goes on to a
    ]


def test_a_unit_with_several_outputs_is_used_once_whichever_gradient_comes_first():
    def pair(self: Weight, x: torch.Tensor) -> tuple[torch.Tensor, dict[str, list[torch.Tensor]]]:
        return x * self.weight, {"more": [x + self.weight, x]}

    def compute(self: Model, x: torch.Tensor) -> torch.Tensor:
        left, right = self.a(x)
        return self.b(left) + self.c(right["more"][0]) + right["more"][1]

    model = Model(compute, a=Weight(pair), b=nn.Linear(4, 4), c=nn.Linear(4, 4))
    story = Story(model, "a", "b", "c")
    events = story.train()
    assert events[:6] == forward_of("a", "b", "c")
    assert events[6:] == [*backward_of("c", "b"), "begin a", "take a.weight", "end a", "over a"]


def test_a_graph_that_is_kept_goes_backward_twice():
    story = Story(chain("a", "b"), "a", "b")
    loss, expected = story.model(batch()).sum(), story.plain(batch()).sum()
    for _ in range(2):
        loss.backward(retain_graph=True)
        expected.backward(retain_graph=True)
        story.check_at_rest()
    story.check_gradients()
    assert story.told() == forward_of("a", "b") + 2 * backward_of("b", "a")


def test_the_gradient_of_the_input_alone_uses_the_units_and_takes_nothing():
    story = Story(chain("a", "b"), "a", "b")
    x, y = batch(requires_grad=True), batch(requires_grad=True)
    (gradient,) = torch.autograd.grad(story.model(x).sum(), x)
    (expected,) = torch.autograd.grad(story.plain(y).sum(), y)
    assert torch.equal(gradient, expected)
    assert story.told() == [*forward_of("a", "b"), "begin b", "end b", "over b", "begin a", "end a", "over a"]
    story.check_at_rest()


def test_a_parameter_used_outside_of_its_unit_has_its_gradient_taken_without_a_use():
    story = Story(chain("a"), "a")
    assert story.train(lambda model: model.a.bias * 3) == ["take a.bias", "over a"]


def _weights_taken_out(self: Model, x: torch.Tensor) -> torch.Tensor:
    for module in (self.a, self.b):
        x = nn.functional.linear(x, module.weight, module.bias)
    return x


def test_gradients_that_come_outside_of_their_units_backward_end_it_once():
    story = Story(Model(_weights_taken_out, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), "a", "b")
    assert story.train() == [
        *("take b.bias", "take b.weight", "over b"),
        *("take a.bias", "take a.weight", "over a"),
    ]


def test_an_exception_after_a_gradient_outside_of_a_backward_leaves_no_unit_waiting():
    def stop(gradient: torch.Tensor) -> None:
        raise ArithmeticError("backward")

    story = Story(Model(_weights_taken_out, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), "a", "b")
    x = batch(requires_grad=True)
    loss = story.model(x).sum()
    x.register_hook(stop)
    with pytest.raises(ArithmeticError):
        loss.backward()
    del loss
    story.hooks.reset()
    assert [event for event in story.told() if event.startswith("over")] == ["over b", "over a"]


# Checkpoints.


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_unit_under_a_checkpoint_is_used_once_more_for_its_backward(use_reentrant):
    def compute(self: Model, x: torch.Tensor) -> torch.Tensor:
        for module in (self.a, self.b):
            x = checkpoint(module, x, use_reentrant=use_reentrant)
        return self.c(x)

    model = Model(compute, a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4))
    story = Story(model, "a", "b", "c")
    events = story.train(lambda model: model(batch(requires_grad=True)))
    if use_reentrant:  # computed anew, and then a backward of its own within the backward
        assert events == [
            *forward_of("a", "b", "c"),
            *backward_of("c")[:-2],
            *forward_of("b"),
            *backward_of("b"),
            *forward_of("a"),
            *backward_of("a"),
            "end c",  # the others' calls began after that of c: they do not tell that it is over
            "over c",
        ]
    else:  # computed anew while its backward uses it
        assert events == forward_of("a", "b", "c") + backward_of("c", "b", "a")


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpoint_around_two_units_brings_both_back(use_reentrant):
    def compute(self: Model, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: self.b(self.a(x)), x, use_reentrant=use_reentrant)

    story = Story(Model(compute, a=nn.Linear(4, 4), b=nn.Linear(4, 4)), "a", "b")
    events = story.train(lambda model: model(batch(requires_grad=True)))
    if use_reentrant:
        assert events == 2 * forward_of("a", "b") + backward_of("b", "a")
    else:
        assert (
            events
            == [
                *forward_of("a", "b"),
                "begin b",
                *forward_of("a"),  # b is in use, and computed anew without a use of its own
                *backward_of("b")[1:],
                *backward_of("a"),
            ]
        )


# Errors.


class Broken(nn.Linear):
    """Fails while ``is_broken``."""

    is_broken = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.is_broken:
            raise ArithmeticError("forward")
        return x


def test_a_forward_that_fails_ends_its_uses():
    story = Story(nn.Sequential(nn.Linear(4, 4), Broken(4, 4), nn.Linear(4, 4)), "0", "1", "2")
    story.model[1].is_broken = True
    with pytest.raises(ArithmeticError):
        story.model(batch())
    assert story.told() == forward_of("0", "1")
    story.check_at_rest()
    story.model[1].is_broken = False
    assert story.train() == forward_of("0", "1", "2") + backward_of("2", "1", "0")


def test_a_forward_that_fails_inside_of_another_unit_ends_both():
    model = Model(lambda self, x: self.outer(x), outer=Weight(lambda self, x: self.inner(x), inner=Broken(4, 4)))
    story = Story(model, "outer", "outer.inner")
    model.outer.inner.is_broken = True
    with pytest.raises(ArithmeticError):
        model(batch())
    assert story.told() == ["begin outer", "begin outer.inner", "end outer.inner", "end outer"]
    story.check_at_rest()


def test_a_use_that_is_refused_is_not_ended():
    model = Model(lambda self, x: self.outer(x), outer=Weight(lambda self, x: self.inner(x), inner=nn.Linear(4, 4)))
    story = Story(model, "outer", "outer.inner")
    story.refused = "outer.inner"
    with pytest.raises(StorageIOError):
        model(batch())
    assert story.told() == ["begin outer", "begin outer.inner", "end outer"]
    story.check_at_rest()


class Raise(torch.autograd.Function):
    """The identity, whose backward fails while ``is_broken``."""

    is_broken = True

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if Raise.is_broken:
            raise ArithmeticError("backward")
        return gradient


@pytest.fixture
def broken_backward() -> Iterator[None]:
    Raise.is_broken = True
    yield
    Raise.is_broken = False


@pytest.mark.parametrize("close", [Hooks.reset, Hooks.close_backward])
def test_a_backward_that_fails_leaves_its_unit_open_until_it_is_closed(close, broken_backward):
    model = Model(lambda self, x: self.b(Raise.apply(self.a(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4))
    story = Story(model, "a", "b")
    with pytest.raises(ArithmeticError):
        model(batch()).sum().backward()
    assert story.told() == forward_of("a", "b") + backward_of("b")[:3]
    assert story.in_use == {"b"}
    close(story.hooks)
    assert story.told() == ["end b", "over b"]
    story.check_at_rest()
    Raise.is_broken = False
    story.gradients.clear()
    assert story.train() == forward_of("a", "b") + backward_of("b", "a")


def test_reset_ends_a_backward_that_was_interrupted_before_it_was_noted():
    story = Story(chain("a", "b"), "a", "b")
    unit = story.units[1]
    story.hooks._begin_use(unit)
    unit.in_backward = True
    story.hooks.reset()
    story.end_use(unit.spec)  # as ``Uses.reset`` does
    assert story.told() == ["begin b", "end b"]
    assert story.train() == forward_of("a", "b") + backward_of("b", "a")


def test_reset_looks_only_at_units_whose_use_may_have_been_interrupted(monkeypatch):
    story = Story(chain("a", "b"), "a", "b")
    looked: list[OwnWrites] = []
    monkeypatch.setattr(OwnWrites, "put_back", lambda writes: looked.append(writes))
    story.train()
    story.hooks.reset()
    assert looked == []
    story.hooks._begin_use(story.units[1])
    story.hooks.reset()
    assert looked == [story.units[1].own_writes]


def test_reset_ends_a_forward_that_was_interrupted():
    story = Story(chain("a", "b"), "a", "b")
    unit = story.units[0]
    story.hooks._pre_forward(unit, story.model.a, ())  # and Ctrl-C comes before the other hook
    assert story.model.a.weight is unit.parameters[0]
    story.hooks.reset()
    assert story.told() == forward_of("a")
    story.check_at_rest()
    story.hooks.reset()
    assert story.told() == []


def test_a_call_that_never_began_ends_no_other_call_of_its_unit():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4)
            self.inner = nn.Linear(4, 4)
            self.last = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            with contextlib.suppress(ArithmeticError):
                x = self.inner(x)
            return self.last(x)

    def refuse(module: nn.Module, args: object) -> None:
        raise ArithmeticError("before the engine's hook")

    model = Model(lambda self, x: self.b(self.a(x)), a=nn.Linear(4, 4), b=Outer())
    model.b.inner.register_forward_pre_hook(refuse)
    story = Story(model, "a", "b")
    last, first = backward_of("b.last")[1:3], backward_of("b.first")[1:3]
    expected = [*forward_of("a", "b"), "begin b", *last, *first, "end b", "over b", *backward_of("a")]
    assert story.train() == expected


# What a module may return.


def test_a_unit_that_returns_its_input_is_not_used_backward():
    model = Model(lambda self, x: self.b(self.a(x)), a=nn.Linear(4, 4), b=Weight(lambda self, x: x))
    story = Story(model, "a", "b")
    assert story.train() == forward_of("a", "b") + backward_of("a")


def views(self: Weight, x: torch.Tensor) -> dict[str, object]:
    return {"own": (self.weight[:2], self.weight), "other": x, "number": 3}


@pytest.mark.parametrize(
    ("returned", "use"),
    [
        (lambda self, x: self.weight, lambda out: out * 2),
        (lambda self, x: self.weight.view(2, 2), lambda out: out * 2),
        (lambda self, x: self.weight.detach(), lambda out: out * torch.ones(4, requires_grad=True)),
        (views, lambda out: out["own"][0].sum() * out["own"][1] * out["number"]),
    ],
    ids=["itself", "a view", "detached", "in containers"],
)
def test_a_unit_that_returns_its_own_parameter_returns_a_copy_which_stays(returned, use):
    story = Story(Model(lambda self, x: use(self.a(x)), a=Weight(returned)), "a")
    seen = []
    story.model.a.register_forward_hook(lambda module, args, out: seen.append(out))  # after the engine's
    events = story.train()
    assert events[:2] == forward_of("a")
    assert events[2:] in (["begin a", "take a.weight", "end a", "over a"], [])
    tensors = [leaf for leaf in torch.utils._pytree.tree_leaves(seen) if isinstance(leaf, torch.Tensor)]
    assert not any(story.units[0].window.holds(tensor) for tensor in tensors)
    assert not any(bool(torch.isnan(tensor).any()) for tensor in tensors)


def test_other_outputs_beside_a_parameter_are_not_copied():
    story = Story(Model(lambda self, x: self.a(x)["other"], a=Weight(views)), "a")
    x = batch()
    assert story.model(x) is x


@pytest.mark.parametrize(
    "compute",
    [
        lambda self, x: self.b(self.a(x).mul_(2)),
        lambda self, x: self.b(self.view(self.a(x)).mul_(2)),
        lambda self, x: self.b(self.a(x)[1:].mul_(2)),
    ],
    ids=["itself", "a view by the next module", "a view"],
)
def test_an_output_that_is_changed_in_place_still_tells_when_its_gradient_comes(compute):
    class View(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.view(-1, 4)

    model = Model(compute, a=nn.Linear(4, 4), b=nn.Linear(4, 4), view=View())
    story = Story(model, "a", "b")
    assert story.train() == forward_of("a", "b") + backward_of("b", "a")


def test_a_view_that_a_unit_returns_and_the_caller_changes_in_place_still_tells_when_its_gradient_comes():
    class Flat(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x).view(4, 3)

    model = Model(lambda self, x: self.b(self.a(x).mul_(2).view(3, 4)), a=Flat(4, 4), b=nn.Linear(4, 4))
    story = Story(model, "a", "b")
    assert story.train() == forward_of("a", "b") + backward_of("b", "a")


def test_a_unit_that_changes_its_input_in_place_is_used_backward():
    model = Model(lambda self, x: self.b(self.a(x)), a=nn.Linear(4, 4), b=Weight(lambda self, x: x.mul_(self.weight)))
    story = Story(model, "a", "b")
    assert story.train() == [
        *forward_of("a", "b"),
        "begin b",
        "take b.weight",
        "end b",
        "over b",
        *backward_of("a"),
    ]


# What stands in the model.


def test_a_unit_with_nothing_but_a_use_has_its_parameters_in_the_model_while_it_lasts():
    seen = []

    def compute(self: Weight, x: torch.Tensor) -> torch.Tensor:
        seen.append(self.weight)
        return self.inner(x) * self.weight

    model = Model(lambda self, x: self.a(x), a=Weight(compute, inner=nn.Linear(4, 4)))
    story = Story(model, "a")
    with torch.no_grad():
        model(batch())
    assert seen == [story.units[0].parameters[0]] and seen[0] is story.units[0].parameters[0]
    story.check_at_rest()


def test_a_parameter_that_was_replaced_stays_where_it_is():
    story = Story(chain("a", "b"), "a", "b")
    own = nn.Parameter(torch.ones(4, 4))
    story.model.b.weight = own
    with torch.no_grad():
        story.plain.b.weight.copy_(own)
    loss = story.model(batch()).sum()
    assert story.model.b.weight is own
    loss.backward()
    story.plain(batch()).sum().backward()
    assert story.model.b.weight is own
    assert story.told() == [
        *forward_of("a", "b"),
        "begin b",
        "take b.bias",
        "end b",
        "over b",
        *backward_of("a"),
    ]
    assert torch.equal(own.grad, story.plain.b.weight.grad)
    for name, gradient in story.gradients.items():
        assert torch.equal(gradient, story.plain.get_parameter(name).grad)


def test_a_parameter_that_a_forward_puts_in_the_place_of_the_engines_stays():
    own = nn.Parameter(torch.ones(4))

    def compute(self: Weight, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        self.weight = own
        return x

    story = Story(Model(lambda self, x: self.a(x), a=Weight(compute)), "a")
    with torch.no_grad():
        story.model(batch())
    assert story.model.a.weight is own
    assert story.told() == forward_of("a")


@pytest.mark.parametrize(
    "how", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["copy", "pickle"]
)
def test_in_a_copy_of_the_model_the_hooks_do_nothing(how):
    story = Story(chain("a", "b"), "a", "b")
    other = how(story.model)
    for model in (other, story.plain):
        model(batch()).sum().backward()
    assert story.told() == []
    for name, parameter in other.named_parameters():
        assert type(parameter) is nn.Parameter
        assert torch.equal(parameter.grad, story.plain.get_parameter(name).grad)
    story.plain.zero_grad()
    assert story.train() == forward_of("a", "b") + backward_of("b", "a")


def test_hooks_that_were_removed_tell_nothing():
    story = Story(chain("a", "b"), "a", "b")
    story.hooks.remove()
    expected = story.plain(batch())
    assert torch.equal(story.model(batch()), expected)  # by the handles
    assert story.told() == []
