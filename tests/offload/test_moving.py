"""Values that move in place, in second runs and among micro-batches."""

from __future__ import annotations

import array
import gc
import itertools
import random
import warnings
import weakref
from pathlib import Path
from types import MappingProxyType

import numpy as np
import pytest
import torch
from tiny import Block, Tiny, batches, loss_of
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.data import DataLoader, Dataset, Sampler, TensorDataset

from offload import ConfigError, OffloadEngine
from offload.model.body import Body
from offload.model.draws import generators_among
from offload.model.forward_state import State
from offload.model.moving import copied, mark_of


@pytest.mark.parametrize(
    "make",
    [
        lambda: iter([1, 2, 3, 4]),
        lambda: iter("abcd"),
        lambda: iter(range(9)),
        lambda: reversed([1, 2, 3]),
        lambda: itertools.cycle([1, 2, 3]),
        lambda: itertools.count(3),
        lambda: itertools.chain([1, 2], [3, 4]),
        lambda: itertools.islice(itertools.count(), 9),
        lambda: zip([1, 2, 3], itertools.count(), strict=False),
        lambda: enumerate("abc"),
        lambda: map(abs, [1, 2, 3]),
    ],
)
def test_a_copy_of_an_iterator_gives_what_comes_next_and_leaves_the_iterator_where_it_is(make):
    iterator, expected = make(), [number for number, _ in zip(make(), range(9), strict=False)]
    found = []
    for _ in expected:
        again = copied(iterator)
        if again is None:
            pytest.skip("this Python does not copy it")
        before = mark_of(iterator)
        following = next(again)
        assert mark_of(iterator) == before
        found.append(next(iterator))
        assert found[-1] == following
        assert mark_of(iterator) != before
    assert found == expected


def test_a_generator_is_not_copied_nor_what_it_is_in():
    generator = (number for number in range(3))
    assert copied(enumerate(generator)) is None
    before = mark_of(generator)
    next(generator)
    assert mark_of(generator) != before


class Slots:
    __slots__ = ("calls", "late")

    def __init__(self) -> None:
        self.calls = 0


def test_a_second_run_finds_iterators_arrays_slots_and_files_as_the_first_did(tmp_path: Path):
    (tmp_path / "lines").write_text("one\ntwo\nthree\n")
    with (tmp_path / "lines").open() as file:
        module = nn.Identity()
        module.source, module.array, module.raw = iter([1, 2, 3]), np.zeros(2), array.array("i", [0])
        module.slots, module.file, module.inner = Slots(), file, MappingProxyType({"seen": [0]})

        def forward() -> list[object]:
            module.array += 1
            module.raw[0] += 1
            module.slots.calls += 1
            module.slots.late = 5
            module.inner["seen"].append(1)
            seen = len(module.inner["seen"])
            return [
                next(module.source),
                module.array.tolist(),
                module.raw[0],
                module.slots.calls,
                file.readline(),
                seen,
            ]

        state = State(module, [], "block")
        first = forward()
        state.compare()
        with state.before():
            assert not hasattr(module.slots, "late")
            assert forward() == first
        assert forward() == [2, [2.0, 2.0], 2, 2, "two\n", 3]


def test_a_forward_that_goes_on_in_a_generator_is_not_run_again():
    module = nn.Identity()
    module.source = (number for number in range(9))
    state = State(module, [], "block")
    state.compare()
    next(module.source)
    state = State(module, [], "block")
    next(module.source)
    with pytest.raises(ConfigError, match=r"goes on in a generator.*cannot be set back"):
        state.compare()


class Trainer:
    def __init__(self) -> None:
        self.scale, self.losses, self.total = 1.0, [], 0.0

    def step(self, number: float) -> float:
        self.losses.append(number)
        self.total += number
        return number * self.scale

    def adapt(self, number: float) -> None:
        self.scale = number


def changed(function, *arguments, items=()) -> str | None:
    body = Body(function, items, lambda module: False)
    function(*arguments)
    return body.changed()


def test_of_a_function_counts_what_it_reads_and_moves():
    hidden, losses, total, table, scale = torch.zeros(2), [], 0.0, {"seen": 0}, np.ones(1)

    def only_writes(number):
        nonlocal total
        losses.append(number)
        total += number
        table["seen"] = table_key(number)
        table["seen"] += 1

    def table_key(number):
        return number * 2

    def reads(number):
        hidden.data.add_(number * float(hidden.sum() + 1))

    def by_another(number):
        return reads(number)

    def by_array(number):
        scale[0] *= 1 + number * scale.sum()

    assert changed(only_writes, 1.0) is None
    assert changed(reads, 1.0) == "hidden"
    assert changed(by_another, 1.0) == "hidden"
    assert changed(by_array, 1.0) == "scale"


def test_of_a_method_count_the_attributes_that_it_reads():
    trainer = Trainer()
    body = Body(trainer.step, (), lambda module: False)
    trainer.step(2.0)
    assert body.changed() is None
    trainer.adapt(3.0)
    assert body.changed() == "self.scale"


class Balancer:
    def __init__(self, rate: float = 0.5) -> None:
        self.mean, self.rate = 1.0, rate

    def backward(self, loss) -> None:
        (loss / self.mean).backward()
        self.move(loss.item())

    def move(self, number: float) -> None:
        self.mean += self.rate * number

    def scaled(self, number: float) -> float:
        return number / self.mean


class Meter:
    def __init__(self) -> None:
        self.total, self.count, self.means = 0.0, 0, []

    def update(self, number: float) -> None:
        self.total += number
        self.count += 1
        self.means.append(self.total / self.count)


class Derived(Balancer):
    def step(self, number: float) -> None:
        last = super().scaled(number)
        super().move(last)


class Slotted:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Around(nn.Module):
    """The engine's model is in it, and something of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.mean = model, 1.0
        self.register_buffer("centre", torch.zeros(2))

    def forward(self, number: float) -> float:
        self.mean += number
        return number / self.mean

    def centred(self, number: float) -> None:
        self.centre.add_(number - self.centre)


def test_what_a_method_reads_counts_where_it_goes_backward():
    balancer, meter, slotted = Balancer(), Meter(), Slotted()

    def body(number):
        loss = torch.tensor(number, requires_grad=True)
        balancer.backward(loss)

    def measures(number):
        meter.update(number)

    def of_slots(number):
        slotted.scale = number * slotted.scale

    assert changed(body, 2.0) == "self.mean"
    assert changed(measures, 2.0) is None
    assert changed(of_slots, 2.0) == "slotted.scale"


def test_methods_of_parents_and_of_each_object_of_a_class_are_known():
    fixed, moving = Balancer(0.0), Balancer()

    def both(number):
        fixed.move(moving.scaled(fixed.scaled(number)))
        moving.move(number)

    assert changed(Derived().step, 2.0) == "self.mean"
    assert changed(both, 2.0) == "self.mean"


def test_a_module_around_the_model_has_something_of_its_own():
    model, other = nn.Linear(2, 2), nn.Parameter(torch.zeros(2))

    def changed_in(function, number):
        body = Body(function, (), lambda module: module is model)
        function(number)
        return body.changed()

    def trains_another(number):
        with torch.no_grad():
            other.sub_(number * other.sum() + 1)

    around = Around(model)
    assert changed_in(around, 2.0) == "self.mean"
    assert changed_in(around.centred, 2.0) == "self.centre"
    assert changed_in(lambda number: around(number), 2.0) == "around"
    assert changed_in(trains_another, 2.0) == "other"
    assert changed_in(lambda number: around.model(torch.ones(2)), 2.0) is None


def test_iterators_count_once_the_model_was_used():
    loader = iter(DataLoader(TensorDataset(torch.arange(9.0)), 1))
    numbers = (number for number in range(9))

    def takes(_):
        return next(loader), next(numbers)

    body = Body(takes, (), lambda module: False)
    takes(0)
    body.took()
    assert body.changed() is None
    takes(0)
    assert body.changed() is not None


def test_a_generator_of_items_that_has_ended_has_changed_nothing():
    scale = 2.0

    def items(numbers, count):
        for _ in range(count):
            yield next(numbers) * scale

    given = items(iter(range(9)), 2)
    body = Body(print, given, lambda module: False)
    next(given)
    body.took()
    assert body.changed() is None
    next(given)
    body.took()
    assert list(given) == []
    assert body.changed() is None


class Curriculum(Dataset):
    def __init__(self) -> None:
        self.level = 1

    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> int:
        return index * self.level


class Jumping(Sampler):
    def __init__(self) -> None:
        self.step = 1

    def __iter__(self):
        return iter(range(0, 3, self.step))


def test_what_gives_the_items_of_a_loader_counts():
    data, sampler = Curriculum(), Jumping()

    def harder(number):
        data.level = number

    def faster(number):
        sampler.step = number

    assert changed(harder, 2, items=iter(DataLoader(data))) == "self.level"
    assert changed(faster, 2, items=iter(DataLoader(data, sampler=sampler))) == "self.step"


def test_generators_in_objects_are_found():
    class Noise:
        def __init__(self) -> None:
            self.random, self.of_torch = random.Random(1), torch.Generator()

        def shuffle(self, numbers):
            self.random.shuffle(numbers)
            return torch.rand(1, generator=self.of_torch)

    noise = Noise()
    body = Body(lambda numbers: noise.shuffle(numbers), (), lambda module: False)
    assert generators_among(body.everything()) in ([noise.random, noise.of_torch], [noise.of_torch, noise.random])


def test_what_the_generator_of_the_items_reads_counts():
    left = [0.0]

    def items():
        yield from (left[0] + number for number in range(3))

    def writes(number):
        left[0] = number

    assert changed(writes, 5.0, items=items()) == "left"


def test_a_function_without_source_reads_all_that_it_names():
    names: dict[str, object] = {"losses": []}
    exec("def body(number):\n    losses.append(number)", names)  # as in an interpreter
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert changed(names["body"], 1.0) == "losses"


@pytest.mark.parametrize(
    "array_of_zeros",
    [
        np.zeros(()),
        np.zeros((3, 4)).T,
        np.zeros((4, 4))[::2],
        np.zeros((4, 4))[:, 1],
        np.zeros(3, "M8[s]"),
        np.zeros(2, [("a", "i4"), ("b", "f8")]),
    ],
    ids=["no dimensions", "transposed", "rows", "a column", "times", "records"],
)
def test_an_array_of_any_layout_moves_and_gets_its_bytes_back(array_of_zeros: np.ndarray):
    class Keeps(nn.Module):
        kept = array_of_zeros

    before, state = array_of_zeros.copy(), State(Keeps(), (), "block")
    mark = mark_of(array_of_zeros)
    array_of_zeros[...] = np.ones(array_of_zeros.shape, "u1").astype(array_of_zeros.dtype)
    assert mark_of(array_of_zeros) != mark
    after = array_of_zeros.copy()
    state.compare()
    with state.before():
        assert np.array_equal(array_of_zeros, before)
    assert np.array_equal(array_of_zeros, after) and not np.array_equal(before, after)


def test_what_a_class_closes_over_goes_with_the_model(tmp_path: Path):
    def train() -> weakref.ref[torch.Tensor]:
        table = torch.zeros(32)

        class Local(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) + table

        model = Tiny(width=32)
        model.blocks[0] = Local(32)
        with OffloadEngine(model, activations="recompute") as engine:
            for tokens, targets in batches(2):
                engine.backward(loss_of(engine(tokens), targets))
                engine.step()
        return weakref.ref(table)

    table = train()
    gc.collect()
    assert table() is None


def test_a_second_run_finds_what_functions_and_iterators_among_its_arguments_keep():
    calls = [0]

    def count() -> int:
        calls[0] += 1
        return calls[0]

    arguments = [count, iter([1, 2, 3])]
    state = State(nn.Identity(), arguments, "block")
    first = arguments[0](), next(arguments[1])
    state.compare()
    with state.before():
        assert (arguments[0](), next(arguments[1])) == first
    assert (calls, next(arguments[1])) == ([1], 2)


def test_an_iterator_in_a_tuple_is_an_error_once_it_moves():
    module = nn.Identity()
    module.sources = (iter([1, 2, 3]),)
    state = State(module, [], "block")
    next(module.sources[0])
    with pytest.raises(ConfigError, match="cannot be set back"):
        state.compare()


def test_a_second_run_finds_modules_elsewhere_hooks_of_all_modules_and_modes_as_the_first_did():
    class Counts(TorchFunctionMode):
        calls = 0

        def __torch_function__(self, function, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            self.calls += 1
            return function(*args, **(kwargs or {}))

    seen, norm = [0], nn.BatchNorm1d(2)

    def hook(module: nn.Module, args: object, output: object) -> None:
        seen[0] += 1

    handle = nn.modules.module.register_module_forward_hook(hook)
    try:
        with Counts() as mode:
            state = State(nn.Identity(), [nn.Sequential(nn.Sequential(norm))], "block")
            norm(torch.ones(3, 2))
            state.compare()
        after = mode.calls
        with state.before():
            assert (seen, norm.num_batches_tracked.item()) == ([0], 0)
            assert vars(mode).get("calls", 0) < after
        assert (seen, mode.calls, norm.num_batches_tracked.item()) == ([1], after, 1)
    finally:
        handle.remove()
