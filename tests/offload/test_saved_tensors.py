"""Weights that autograd saves reach backward, whatever becomes of a module's output."""

from __future__ import annotations

import copy
import pickle
import types
import warnings
from collections import UserDict
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial

import pytest
import torch
from stories import Model, Story, Weight, batch, chain, forward_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.torch_internals import push_saved_tensors_hooks, take_out_saved_tensors_hooks, top_saved_tensors_hooks
from swapper import OffloadError


@pytest.fixture(autouse=True)
def no_hooks_are_left():
    torch.manual_seed(0)
    yield
    assert top_saved_tensors_hooks() is None


@dataclass
class Output:
    value: torch.Tensor


class Slots:
    __slots__ = ("value",)

    def __init__(self, value: torch.Tensor) -> None:
        self.value = value


class Returning(nn.Linear):
    """A layer that hands its output over in a way of its own: ``give`` puts it away, ``take`` finds it."""

    def __init__(self, give: Callable[..., object], take: Callable[..., torch.Tensor]) -> None:
        super().__init__(4, 4)
        self.__dict__["kept"] = []
        self.give, self.take = give, take

    def forward(self, x: torch.Tensor) -> object:
        return self.give(self, super().forward(x).relu())


def keep(self: Returning, value: torch.Tensor) -> None:
    self.__dict__["attribute"] = value


def swap_mode(self: Returning, value: torch.Tensor) -> object:
    with torch.enable_grad():
        return Output(value * 2 + self.weight.square().sum())


WAYS = {
    "dataclass": (lambda self, v: Output(v), lambda self, out: out.value),
    "slots": (lambda self, v: Slots(v), lambda self, out: out.value),
    "namespace": (lambda self, v: types.SimpleNamespace(value=v), lambda self, out: out.value),
    "user dict": (lambda self, v: UserDict(value=v), lambda self, out: out["value"]),
    "dict subclass": (lambda self, v: type("Own", (dict,), {})(value=v), lambda self, out: out["value"]),
    "distribution": (lambda self, v: torch.distributions.Normal(v, 1.0), lambda self, out: out.mean),
    "attribute": (keep, lambda self, out: self.attribute),
    "list": (lambda self, v: self.kept.append(v), lambda self, out: self.kept.pop()),
    "closure": (lambda self, v: lambda: v, lambda self, out: out()),
    "auxiliary loss": (
        lambda self, v: [keep(self, self.weight.square().sum() * v.logsumexp(-1)), v][1],
        lambda self, out: out + self.attribute[:, None],
    ),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_unit_is_brought_in_for_backward_in_whichever_way_it_hands_its_output_over(way):
    give, take = WAYS[way]

    def compute(self: Model, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.a, self.b, self.c):
            x = take(layer, layer(x))
        return x

    story = Story(Model(compute, **{name: Returning(give, take) for name in "abc"}), "a", "b", "c")
    story.train(lambda model: model(batch(requires_grad=True)))
    story.train(lambda model: model(2 * batch(requires_grad=True)))


def test_a_gradient_of_the_input_through_a_hidden_output_is_that_of_the_weights():
    give, take = WAYS["dataclass"]
    story = Story(Model(lambda self, x: self.a(x).value, a=Returning(give, take)), "a")
    x, y = batch(requires_grad=True), batch(requires_grad=True)
    (gradient,) = torch.autograd.grad(story.model(x).sum(), x)
    (expected,) = torch.autograd.grad(story.plain(y).sum(), y)
    assert torch.equal(gradient, expected)
    story.check_at_rest()


def test_a_unit_computes_with_gradients_within_a_forward_without():
    class Enables(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.enable_grad():
                return super().forward(x)

    def run(model: nn.Module) -> torch.Tensor:
        with torch.no_grad():
            return model(batch(requires_grad=True))

    story = Story(Model(lambda self, x: self.a(x), a=Enables(4, 4)), "a")
    assert story.train(run)[:2] == forward_of("a")


def test_a_change_in_place_of_what_was_saved_is_refused_as_torch_refuses_it():
    story = Story(chain("a", "b"), "a", "b")
    for model in (story.model, story.plain):
        x = model.a(batch())
        y = model.b(x)
        x.data.add_(1)  # no change for autograd
        x.detach().mul_(2)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation: \[torch.FloatTensor \[3, 4\]\]"):
            y.sum().backward()
    story.hooks.reset()


def test_what_a_node_has_saved_can_be_looked_at_outside_of_a_backward():
    story = Story(Model(lambda self, x: self.a(x), a=Weight(lambda self, x: x * self.weight)), "a")
    saved = story.model(batch(requires_grad=True)).grad_fn._saved_other
    assert torch.equal(saved, story.plain.a.weight)
    assert not story.units[0].window.holds(saved)
    assert story.told() == forward_of("a", "a")
    story.check_at_rest()


def test_a_graph_that_nobody_wants_is_freed_with_what_it_has_saved():
    story = Story(chain("a", "b"), "a", "b")
    freed = []

    class Watched(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.watch = Freed(freed)
            return x.exp()

        @staticmethod
        def backward(ctx, gradient):
            return gradient

    story.model.b.register_forward_pre_hook(lambda module, args: (Watched.apply(args[0]).exp().sigmoid(),))
    story.model(batch())
    assert freed == ["freed"]  # by counts of references alone: there is no cycle


class Freed:
    def __init__(self, told: list[str]) -> None:
        self._told = told

    def __del__(self) -> None:
        self._told.append("freed")


# Hooks of the user's own, around a unit and within it.


def halved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor / 2


@pytest.mark.parametrize(
    "hooks",
    [
        torch.autograd.graph.save_on_cpu,
        partial(torch.autograd.graph.saved_tensors_hooks, lambda t: [t], lambda kept: kept[0]),
        partial(torch.autograd.graph.saved_tensors_hooks, lambda t: t.to(torch.float16), lambda t: t.float()),
    ],
    ids=["on the CPU", "by reference", "in another format"],
)
@pytest.mark.parametrize("where", ["around", "within"])
def test_hooks_of_the_users_own_see_what_they_see_without_the_engine(hooks, where):
    class Within(Returning):
        def forward(self, x: torch.Tensor) -> object:
            with hooks():
                return super().forward(x)

    kind = Within if where == "within" else Returning
    give, take = (lambda self, v: v), (lambda self, v: v) if where == "within" else WAYS["dataclass"]
    if where == "around":
        give, take = WAYS["dataclass"]

    def compute(self: Model, x: torch.Tensor) -> torch.Tensor:
        return take(self, self.b(take(self, self.a(x))))

    def run(model: nn.Module) -> torch.Tensor:
        if where == "within":
            return model(batch(requires_grad=True))
        with hooks():
            return model(batch(requires_grad=True))

    story = Story(Model(compute, a=kind(give, take), b=kind(give, take)), "a", "b")
    story.train(run)


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_units_with_hidden_outputs_under_a_checkpoint_are_recomputed(use_reentrant):
    give, take = WAYS["dataclass"]

    def both(self: Model, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.a(x).value).value

    def compute(self: Model, x: torch.Tensor) -> torch.Tensor:
        return self.c(checkpoint(both, self, x, use_reentrant=use_reentrant)).value

    story = Story(Model(compute, **{name: Returning(give, take) for name in "abc"}), "a", "b", "c")
    story.train(lambda model: model(batch(requires_grad=True)))


def test_a_transform_of_torch_func_runs_within_a_forward():
    class Scores(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            squares = torch.func.vmap(lambda row: row.square().sum())(x)
            slope = torch.func.grad(lambda row: row.sin().sum())(x.detach())
            return super().forward(x + slope) * squares[:, None]

    story = Story(Model(lambda self, x: self.b(self.a(x)), a=Scores(4, 4), b=nn.Linear(4, 4)), "a", "b")
    story.train()


# Interrupts.


def test_an_interrupt_leaves_no_hooks_in_force():
    def interrupted(module: nn.Module, args: object) -> None:
        raise KeyboardInterrupt

    story = Story(chain("a", "b"), "a", "b")
    hook = story.model.b.register_forward_pre_hook(interrupted)
    with pytest.raises(KeyboardInterrupt):
        story.model(batch())
    with pytest.raises(KeyboardInterrupt), torch.autograd.graph.save_on_cpu():
        story.model(batch())  # the block takes out what is on top: ours, and its own stay
    story.hooks.reset()
    assert top_saved_tensors_hooks() is None
    hook.remove()
    story.told()
    story.train()


def test_hooks_are_taken_out_from_below_others():
    own, other = (halved, halved), (abs, abs)
    push_saved_tensors_hooks(own)
    push_saved_tensors_hooks(other)
    take_out_saved_tensors_hooks(own, None)
    assert top_saved_tensors_hooks() == other
    take_out_saved_tensors_hooks(other, None)


# Tensors over the weights' memory that outlive a use.


KEPT = {
    "view": lambda self: self.weight.view(-1),
    "detached": lambda self: self.weight.detach(),
    "data": lambda self: self.weight.data,
    "array": lambda self: self.weight.detach().numpy(),
}


def keeping(how: Callable[[nn.Module], object]) -> Story:
    class Keeps(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.__dict__["kept"] = how(self)
            return super().forward(x)

    return Story(Model(lambda self, x: self.b(self.a(x)), a=Keeps(4, 4), b=nn.Linear(4, 4)), "a", "b")


@pytest.mark.filterwarnings("ignore:unit a")
@pytest.mark.parametrize("how", KEPT)
def test_what_a_forward_keeps_of_its_weights_can_be_read_until_nobody_has_it(how):
    story = keeping(KEPT[how])
    story.train()
    kept = story.model.a.kept
    found = torch.as_tensor(kept).detach().flatten()
    assert torch.equal(found, story.plain.a.weight.detach().flatten())
    del story.model.a.__dict__["kept"], kept, found
    story.hooks.reset()
    assert not story.units[0].strays.are_left
    story.check_at_rest()


@pytest.mark.filterwarnings("ignore:unit a")
@pytest.mark.parametrize("how", KEPT)
def test_a_write_to_what_a_forward_has_kept_is_one_error_that_names_the_parameter(how):
    story = keeping(KEPT[how])
    story.train()
    kept = torch.as_tensor(story.model.a.kept)
    with torch.no_grad():
        kept.flatten()[3:4].add_(1)
    with pytest.raises(OffloadError, match=r"^a.weight: a tensor that a forward has kept"):
        story.hooks.reset()
    story.hooks.reset()  # once


def test_a_copy_that_a_unit_leaves_is_said_once():
    story = keeping(KEPT["data"])
    with pytest.warns(UserWarning, match=r"unit a: a forward has kept a tensor over its weights") as warned:
        for _ in range(2):
            story.train()
            story.hooks.refresh()
    assert len(warned) == 1


def test_a_parameter_that_a_forward_keeps_is_what_the_model_has_and_leaves_no_copy():
    story = keeping(lambda self: self.weight)
    story.train()
    kept, handle = story.model.a.kept, story.model.a.weight
    assert not any(unit.strays.are_left for unit in story.units)
    assert isinstance(kept, nn.Parameter) and kept.requires_grad and kept.shape == (4, 4)
    assert torch.equal(kept.data, story.plain.a.weight.data) and repr(kept) == repr(handle)
    with torch.no_grad():
        for of in (kept, story.plain.a.weight):
            of.data[0] = 2.0
            of.mul_(0.5)
    assert torch.equal(handle.detach().clone(), story.plain.a.weight.detach())
    kept.label = "kept"
    assert type(copy.deepcopy(kept)) is nn.Parameter and torch.equal(pickle.loads(pickle.dumps(kept)), handle)
    (kept.square().sum() + torch.add(torch.ones(()), kept).sum()).backward()
    expected = 2 * story.plain.a.weight.detach() + 1
    torch.testing.assert_close(story.gradients["a.weight"] - story.plain.a.weight.grad, expected)
    kept.requires_grad = False
    assert not handle.requires_grad


def test_a_parameter_that_the_model_has_no_more_says_so():
    story = keeping(lambda self: self.weight)
    story.train()
    kept = story.model.a.kept
    story.model.a.weight = None
    with pytest.raises(OffloadError, match=r"parameter a\.weight: the model has another one in its place"):
        kept.norm()


class _Interrupted(nn.Linear):
    """Ends as ``error`` says, with a view of its weight in the frame."""

    error: BaseException | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        views = {"rows": [self.weight[1:].detach()]}
        if self.error is not None:
            raise self.error
        return nn.functional.linear(x, torch.cat([self.weight[:1], views["rows"][0]]))


@pytest.mark.parametrize("error", [RuntimeError("of the user's"), KeyboardInterrupt()])
def test_what_only_the_frames_of_an_exception_have_is_nothing_that_a_forward_has_kept(error):
    story = Story(Model(lambda self, x: self.b(self.a(x)), a=_Interrupted(4, 4), b=nn.Linear(4, 4)), "a", "b")
    story.model(batch())
    story.model.a.error = error
    with pytest.raises(type(error)) as kept:
        story.model(batch())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        story.hooks.reset()
        story.hooks.refresh()
    assert kept.tb is not None and story.units[0].strays.are_left  # a debugger may look at them
    del kept, error


def test_a_tensor_that_a_list_of_the_users_has_is_said_although_frames_have_others():
    story = Story(Model(lambda self, x: self.b(self.a(x)), a=_Interrupted(4, 4), b=nn.Linear(4, 4)), "a", "b")
    story.model(batch())
    story.model.a.error = RuntimeError("of the user's")
    with pytest.raises(RuntimeError):
        story.model(batch())
    story.model.a.__dict__["kept"] = story.units[0].window.flat[1:3]
    with pytest.warns(UserWarning, match="unit a: a forward has kept a tensor"):
        story.hooks.refresh()


def test_what_a_use_has_left_that_did_not_come_to_its_end_is_said_once_it_is_kept_by_another():
    story = Story(Model(lambda self, x: self.b(self.a(x)), a=_Interrupted(4, 4), b=nn.Linear(4, 4)), "a", "b")
    story.model(batch())
    strays, flat = story.units[0].strays, story.units[0].window.flat
    story.model.a.error = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        story.model(batch())
    left = [flat[1:3]]  # as a graph has that nobody will run
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        story.hooks.reset()
        assert strays.are_left
        story.hooks.refresh()
    story.model.a.error = None
    left.clear()
    story.hooks.reset()
    assert not strays.are_left
    left = [flat[1:3]]
    story.model(batch())
    with pytest.warns(UserWarning, match="unit a: a forward has kept a tensor"):
        story.hooks.refresh()


class _BiasLast(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(x, self.weight) + self.bias


def test_a_gradient_that_comes_before_any_weight_is_asked_for_is_part_of_its_units_backward():
    story = Story(nn.Sequential(_BiasLast(4, 4), _BiasLast(4, 4)), "0", "1")
    output = story.model(batch(requires_grad=True))
    story.events.clear()
    output.square().sum().backward()
    assert story.events == [
        *("begin 1", "take 1.bias", "take 1.weight", "end 1", "over 1"),
        *("begin 0", "take 0.bias", "take 0.weight", "end 0", "over 0"),
    ]
    story.check_at_rest()


def test_a_unit_that_autograd_asks_for_a_weight_has_no_hook_on_its_output():
    story = Story(nn.Sequential(nn.Embedding(5, 4), nn.Linear(4, 4)), "0", "1")
    story.model(torch.tensor([0]))  # once a unit has rested, what refers to its parameters is known
    tokens = story.model[0](torch.tensor([1, 2]))
    output = story.model[1](tokens)
    called = []
    for name, tensor in (("embedding", tokens), ("linear", output)):
        tensor.grad_fn.register_prehook(lambda gradients, name=name: called.append((name, list(story.events))))
    story.events.clear()
    output.sum().backward()
    assert called[0] == ("linear", [])  # the unit came with its weight
    assert called[1][1][-1] == "begin 0"  # this one saves none: the hook brought it
    story.check_at_rest()


def test_what_autograd_saves_is_no_stray():
    story = Story(chain("a", "b"), "a", "b")
    losses = [story.model(batch(requires_grad=True)).sum() for _ in range(3)]
    assert not any(unit.strays.are_left for unit in story.units)
    for loss in losses:
        loss.backward()
    story.check_at_rest()


# Writes through whichever tensor, at any moment within a use.


WRITES = {
    "permuted rows": lambda weight: weight.data.copy_(weight.data.flip(0).clone()),
    "in place": lambda weight: weight.data.mul_(2),
    "an array": lambda weight: weight.detach().numpy().__setitem__((0, 0), 5.0),
    "a view": lambda weight: weight.data.t()[1].zero_(),
    "a function": lambda weight: weight.data.apply_(lambda number: number + 1),
    "another tensor": lambda weight: setattr(weight, "data", weight.data * 3),
}


class Writes(nn.Linear):
    """Writes to its weight in the forwards that ``when`` names, by their numbers, or in their backwards."""

    def __init__(self, write: Callable[[torch.Tensor], object], when: set[int], in_backward: bool = False) -> None:
        super().__init__(4, 4)
        self.write, self.when, self.in_backward = write, when, in_backward
        self.num_calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        if self.num_calls not in self.when:
            return super().forward(x)
        if self.in_backward:
            return WritesInBackward.apply(x, self.weight, self.write)
        self.write(self.weight)
        return super().forward(x)


class WritesInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, write):
        ctx.save_for_backward(x, weight)
        ctx.write = write
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        of_x = gradient @ weight
        ctx.write(weight)
        return of_x, gradient.t() @ x, None


@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("when", [{1}, {3}, {2, 4}])
def test_a_write_to_the_weights_in_any_forward_is_kept(write, when):
    story = Story(Model(lambda self, x: self.b(self.a(x)), a=Writes(WRITES[write], when), b=nn.Linear(4, 4)), "a", "b")
    for index in range(4):
        if index == 2:
            with torch.no_grad():
                assert torch.equal(story.model(batch()), story.plain(batch()))
            story.told()
        else:
            story.train()
        assert torch.equal(story.units[0].window.weights[:16], story.plain.a.weight.detach().flatten())


def test_a_write_to_the_weights_in_a_backward_is_kept():
    layer = Writes(WRITES["permuted rows"], {2}, in_backward=True)
    story = Story(Model(lambda self, x: self.b(self.a(x)), a=layer, b=nn.Linear(4, 4)), "a", "b")
    for _ in range(3):
        story.train()
    assert torch.equal(story.units[0].window.weights[:16], story.plain.a.weight.detach().flatten())


def test_a_backward_that_needs_what_a_parameter_was_before_it_became_another_tensor_is_refused():
    class Assigns(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            self.weight.data = self.weight.data * 0.5
            return y

    story = Story(Model(lambda self, x: self.a(x), a=Assigns(4, 4)), "a")
    with pytest.raises(OffloadError, match=r"^a.weight: a forward has assigned to its .data once it was used"):
        story.model(batch(requires_grad=True)).sum().backward()
    story.hooks.reset()
    story.check_at_rest()


class _AssignsAfterUse(nn.Linear):
    """With hooks of the user's own above the engine's, or around the model."""

    saves: bool

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autograd.graph.save_on_cpu() if self.saves else nullcontext():
            output = super().forward(x)
        self.weight.data = self.weight.data * 2
        return output


def test_a_weight_that_is_assigned_to_once_hooks_of_others_have_saved_it_is_one_error():
    story = Story(Model(lambda self, x: self.a(x), a=_AssignsAfterUse(4, 4)), "a")
    story.model.a.saves = True
    with pytest.raises(OffloadError, match=r"^a\.weight: a forward has assigned to its \.data, and a tensor over"):
        story.model(batch(requires_grad=True))
    story.model.a.saves = False
    story.hooks.reset()
    story.model(batch())  # without a gradient for its input, nothing has saved the weight
    story.check_at_rest()
