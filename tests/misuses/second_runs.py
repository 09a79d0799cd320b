"""State that a forward reads and moves in places where nobody looks for it: iterators, files, arrays, slots, classes,
functions that it calls. A forward that runs again, and micro-batches that run beside each other, find it moved."""

from __future__ import annotations

import array
import collections
import ctypes
import functools
import itertools
import os
import queue
import threading
import types
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

from misuses.case import Family
from misuses.joints import ACCUMULATED, PAIRS, batch, program, stepped
from misuses.place import values
from misuses.strangers import WIDTH, Block, Net

family = Family("second runs")

ALL = (*ACCUMULATED, *PAIRS[:2])
AGAIN = ("recomputed", "over the tiers", *PAIRS[:2])
"""Joints at which forwards run twice."""


def trained(run, build, *, steps=4, call=None):
    """Three micro-batches a step; losses, gradients and values."""
    engine = run.engine(build())
    found = []
    for step in range(steps):

        def body(index, engine=engine):
            x = batch(index)
            loss = (engine(x) if call is None else call(engine, x)).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [3 * step, 3 * step + 1, 3 * step + 2], body)
        found.append(stepped(engine))
    return found, values(engine.module)


def net(make):
    """``Net`` whose third block alone is of another kind, and comes before other blocks that it would disturb."""

    def build():
        model = Net()
        torch.manual_seed(1)
        model.blocks[1], model.blocks[3] = make(), make()
        return model

    return build


class FromIterator(Block):
    def __init__(self):
        super().__init__()
        self.scales = iter([1.0 + 0.1 * index for index in range(1000)])

    def forward(self, x):
        return x + next(self.scales) * self.down(torch.tanh(self.up(x)))


@program(family, "a block takes its scale from an iterator over a list: `next(self.scales)`", ALL)
def scale_from_iterator(run):
    return trained(run, net(FromIterator))


class FromCycle(Block):
    def __init__(self):
        super().__init__()
        self.widths = itertools.cycle([8, 16, 24, 32])

    def forward(self, x):
        width = next(self.widths)
        inner = F.linear(x, self.up.weight[:width], self.up.bias[:width])
        return x + F.linear(torch.tanh(inner), self.down.weight[:, :width], self.down.bias)


@program(family, "slimmable layers take their width from `itertools.cycle`", ALL)
def widths_from_cycle(run):
    return trained(run, net(FromCycle))


class FromGenerator(Block):
    def __init__(self):
        super().__init__()
        self.source = self.noise()

    @staticmethod
    def noise():
        index = 0
        while True:
            index += 1
            yield 0.01 * index

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) * next(self.source)


@program(
    family,
    "a generator function of the block's gives the scale of its residual",
    ALL,
    refused=dict.fromkeys(AGAIN, "cannot be set back.*Do not recompute it"),
)
def scale_from_generator(run):
    return trained(run, net(FromGenerator))


class Counted(Block):
    count = itertools.count()

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) / (1 + next(Counted.count) % 5)


@program(family, "`itertools.count` as an attribute of the class is shared by all blocks", ALL)
def count_of_class(run):
    Counted.count = itertools.count()
    return trained(run, lambda: Net(Counted))


class ByClass(Block):
    calls = 0

    def forward(self, x):
        ByClass.calls += 1
        return x + self.down(torch.tanh(self.up(x))) * (1 + 0.1 * (ByClass.calls % 7))


@program(family, "calls are counted on the class: `type(self).calls += 1`, and scale the residual", ALL)
def calls_of_class(run):
    ByClass.calls = 0
    return trained(run, lambda: Net(ByClass))


class ByArray(Block):
    def __init__(self):
        super().__init__()
        self.calls = np.zeros(1)

    def forward(self, x):
        self.calls[0] += 1
        return x + self.down(torch.tanh(self.up(x))) * float(1 + 0.1 * self.calls[0])


@program(family, "calls are counted in a numpy array, in place", ALL)
def calls_in_array(run):
    return trained(run, net(ByArray))


class ByBytes(Block):
    def __init__(self):
        super().__init__()
        self.calls = bytearray(1)
        self.more = array.array("i", [0])
        self.raw = (ctypes.c_int * 1)()

    def forward(self, x):
        self.calls[0] += 1
        self.more[0] += 2
        self.raw[0] += 3
        scale = 1 + 0.01 * (self.calls[0] + self.more[0] + self.raw[0])
        return x + self.down(torch.tanh(self.up(x))) * scale


@program(family, "calls are counted in a bytearray, an `array.array` and a ctypes array", ALL)
def calls_in_bytes(run):
    return trained(run, net(ByBytes))


class Slots:
    __slots__ = ("calls", "scale")

    def __init__(self):
        self.calls, self.scale = 0, 1.0


class BySlots(Block):
    def __init__(self):
        super().__init__()
        self.state = Slots()

    def forward(self, x):
        self.state.calls += 1
        self.state.scale *= 1.05
        return x + self.down(torch.tanh(self.up(x))) * self.state.scale


@program(family, "calls are counted in an object with `__slots__`", ALL)
def calls_in_slots(run):
    return trained(run, net(BySlots))


@dataclass
class Inner:
    calls: int = 0


@dataclass
class Middle:
    inner: Inner = field(default_factory=Inner)


@dataclass
class Outer:
    middle: Middle = field(default_factory=Middle)


class ByDepth(Block):
    def __init__(self):
        super().__init__()
        self.config = Outer()

    def forward(self, x):
        self.config.middle.inner.calls += 1
        return x + self.down(torch.tanh(self.up(x))) * (1 + 0.1 * self.config.middle.inner.calls)


@program(family, "calls are counted in a dataclass, three levels down", ALL)
def calls_three_levels_down(run):
    return trained(run, net(ByDepth))


_CALLS = {"helper": 0}


def _helper_scale():
    _CALLS["helper"] += 1
    return 1 + 0.1 * (_CALLS["helper"] % 6)


class ByHelper(Block):
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) * _helper_scale()


@program(family, "a function that the forward calls counts in a global of its own", ALL)
def helper_counts(run):
    _CALLS["helper"] = 0
    return trained(run, net(ByHelper))


class ByFunction(Block):
    def forward(self, x):
        ByFunction.forward.calls = getattr(ByFunction.forward, "calls", 0) + 1
        return x + self.down(torch.tanh(self.up(x))) * (1 + 0.1 * (ByFunction.forward.calls % 6))


@program(family, "calls are counted on the function: `forward.calls += 1`", ALL)
def calls_of_function(run):
    ByFunction.forward.__dict__.clear()
    return trained(run, net(ByFunction))


class ByDefault(Block):
    def forward(self, x, seen=[0]):  # noqa: B006
        seen[0] += 1
        return x + self.down(torch.tanh(self.up(x))) * (1 + 0.1 * (seen[0] % 6))


@program(family, "calls are counted in a default argument that is a list", ALL)
def calls_in_default(run):
    ByDefault.forward.__defaults__[0][0] = 0
    return trained(run, net(ByDefault))


class ByCache(Block):
    @functools.lru_cache  # noqa: B019
    def scale(self, key):
        self.__dict__["misses"] = self.__dict__.get("misses", 0) + 1
        return 1 + 0.1 * self.misses

    def forward(self, x):
        key = round(float(x.detach().abs().mean()), 3)
        return x + self.down(torch.tanh(self.up(x))) * self.scale(key)


@program(family, "a scale is kept by `functools.lru_cache`, and differs at the first call of a key", ALL)
def scale_by_cache(run):
    return trained(run, net(ByCache))


class ByQueue(Block):
    def __init__(self):
        super().__init__()
        self.waiting = queue.Queue()
        for index in range(200):
            self.waiting.put(1 + 0.02 * index)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) * self.waiting.get_nowait()


@program(family, "scales come out of a `queue.Queue`", ALL)
def scales_from_queue(run):
    return trained(run, net(ByQueue))


class ByThread(Block):
    kept = threading.local()

    def forward(self, x):
        self.kept.calls = getattr(self.kept, "calls", 0) + 1
        return x + self.down(torch.tanh(self.up(x))) * (1 + 0.1 * (self.kept.calls % 6))


@program(family, "calls are counted in a `threading.local`", ALL)
def calls_in_thread_local(run):
    ByThread.kept = threading.local()
    return trained(run, net(ByThread))


class ByEnvironment(Block):
    def forward(self, x):
        os.environ["MISUSE_CALLS"] = str(int(os.environ.get("MISUSE_CALLS", "0")) + 1)
        return x + self.down(torch.tanh(self.up(x))) * (1 + 0.1 * (int(os.environ["MISUSE_CALLS"]) % 6))


@program(
    family,
    "calls are counted in the environment of the process",
    ALL,
    differs=dict.fromkeys((*AGAIN, "together"), "what a forward keeps outside of Python's objects is not seen"),
)
def calls_in_environment(run):
    return trained(run, net(ByEnvironment))


class ByFile(Block):
    def __init__(self):
        super().__init__()
        self.file = None

    def forward(self, x):
        line = self.file.readline()
        return x + self.down(torch.tanh(self.up(x))) * float(line)


@program(family, "scales are read from a file, line by line", ALL)
def scales_from_file(run):
    path = run.place.folder / "scales.txt"
    path.write_text("\n".join(str(1 + 0.01 * index) for index in range(1000)))

    def build():
        model = net(ByFile)()
        for each in (model.blocks[1], model.blocks[3]):
            each.file = path.open()
        return model

    return trained(run, build)


class ByOwner(Block):
    """Counts on the model, which it knows by a list."""

    def __init__(self):
        super().__init__()
        self.owner = []

    def forward(self, x):
        model = self.owner[0]
        model.calls += 1
        return x + self.down(torch.tanh(self.up(x))) * (1 + 0.1 * (model.calls % 6))


@program(family, "blocks count on the model, which they know by a list", ALL)
def calls_on_owner(run):
    def build():
        model = net(ByOwner)()
        model.calls = 0
        for each in (model.blocks[1], model.blocks[3]):
            each.owner.append(model)
        return model

    return trained(run, build)


class Clock(nn.Module):
    """A module without weights, which nobody has registered."""

    def __init__(self):
        super().__init__()
        self.ticks = 0
        self.register_buffer("phase", torch.zeros(()))

    def forward(self):
        self.ticks += 1
        self.phase += 0.1
        return float(self.phase) + 0.01 * self.ticks


class ByClock(Block):
    clock = Clock()

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) * (1 + ByClock.clock() % 0.7)


@program(family, "blocks share a clock, a module that stands in their class and is not registered", ALL)
def shared_clock(run):
    ByClock.clock = Clock()
    return trained(run, net(ByClock))


class ByProxy(Block):
    """Counts behind objects that give no attributes of their own."""

    def __init__(self):
        super().__init__()
        self.mapping = types.MappingProxyType(self._hidden())
        self.partial = functools.partial(self._bump, [0])

    @staticmethod
    def _hidden():
        return {"calls": [0]}

    @staticmethod
    def _bump(calls):
        calls[0] += 1
        return calls[0]

    def forward(self, x):
        self.mapping["calls"][0] += 1
        return x + self.down(torch.tanh(self.up(x))) * (1 + 0.02 * (self.mapping["calls"][0] + self.partial()))


@program(family, "calls are counted behind a mapping proxy and in a partial's argument", ALL)
def calls_behind_proxy(run):
    return trained(run, net(ByProxy))


def counting(scale):
    calls = 0

    def function(x):
        nonlocal calls
        calls += 1
        return torch.tanh(x) * (1 + scale * (calls % 6))

    return function


class ByClosure(Block):
    def __init__(self):
        super().__init__()
        self.act = counting(0.1)

    def forward(self, x):
        return x + self.down(self.act(self.up(x)))


@program(family, "an activation function that is an attribute counts in its closure", ALL)
def activation_with_closure(run):
    return trained(run, net(ByClosure))


class ByUserDict(Block):
    def __init__(self):
        super().__init__()
        self.seen = collections.UserDict(calls=0)
        self.chain = collections.ChainMap({"calls": 0}, {})
        self.names = types.SimpleNamespace(deep=types.SimpleNamespace(deeper=types.SimpleNamespace(calls=0)))

    def forward(self, x):
        self.seen["calls"] += 1
        self.chain["calls"] += 1
        self.names.deep.deeper.calls += 1
        total = self.seen["calls"] + self.chain["calls"] + self.names.deep.deeper.calls
        return x + self.down(torch.tanh(self.up(x))) * (1 + 0.02 * total)


@program(family, "calls are counted in a UserDict, a ChainMap and namespaces of namespaces", ALL)
def calls_in_wrappers(run):
    return trained(run, net(ByUserDict))


class ByStatistics(Block):
    """Standard deviation of all outputs so far, in tensors of a dict of a list."""

    def __init__(self):
        super().__init__()
        self.kept = [{"sum": torch.zeros(WIDTH), "count": torch.zeros(())}]

    def forward(self, x):
        kept = self.kept[0]
        with torch.no_grad():
            kept["sum"].data.add_(x.detach().abs().mean(0))
            kept["count"].data.add_(1)
            scale = kept["sum"] / kept["count"]
        return x + self.down(torch.tanh(self.up(x))) * scale


@program(family, "running statistics in tensors of a dict of a list, written through `.data`", ALL)
def statistics_behind_version(run):
    return trained(run, net(ByStatistics))


class BySparse(Block):
    """A table by hash, in a python dict with the rows' signs as keys: the value depends on the first who came."""

    def __init__(self):
        super().__init__()
        self.table = {}

    def forward(self, x):
        scales = []
        for row in (x.detach()[:8, :3] > 0).long().tolist():
            scales.append(self.table.setdefault(tuple(row), 1 + 0.1 * len(self.table)))
        y = self.down(torch.tanh(self.up(x)))
        return x + y * (sum(scales) / len(scales))


@program(family, "a table that grows with the rows that come (novelty counts)", ALL)
def growing_table(run):
    return trained(run, net(BySparse))


class ByFlag(Block):
    """Data-dependent initialisation in the first call, guarded by a flag of numpy."""

    def __init__(self):
        super().__init__()
        self.is_done = np.zeros((), dtype=bool)
        self.scale = np.ones((), dtype=np.float32)

    def forward(self, x):
        if not self.is_done:
            self.is_done[()] = True
            self.scale[()] = 1 / float(x.detach().std())
            return x + self.down(torch.tanh(self.up(x)))
        return x + self.down(torch.tanh(self.up(x))) * float(self.scale)


@program(family, "the first call learns a scale from its data, flag and scale are numpy scalars", ALL)
def first_call_learns(run):
    return trained(run, net(ByFlag))


# State of the loop's own, around the model.


@program(family, "the loop hands a hidden state from one micro-batch to the next by `nonlocal`", ALL)
def state_by_nonlocal(run):
    engine = run.engine(Net())
    found = []
    hidden = torch.zeros(1, WIDTH)
    for step in range(4):

        def body(index, engine=engine):
            nonlocal hidden
            y = engine(batch(index) + hidden)
            hidden = y.detach().mean(0, keepdim=True)
            loss = y.square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [3 * step, 3 * step + 1, 3 * step + 2], body)
        found.append(stepped(engine))
    return found, values(engine.module)


@program(family, "the loop keeps the last output in a dict, and pushes the next one away from it", ALL)
def state_in_dict(run):
    engine = run.engine(Net())
    found, memory = [], {"last": None, "count": 0}
    for step in range(4):

        def body(index, engine=engine):
            last = memory["last"]
            y = engine(batch(index))
            loss = y.square().mean()
            if last is not None:
                loss = loss - 0.1 * (y - last).square().mean()
            memory["last"] = y.detach()
            memory["count"] += 1
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [3 * step, 3 * step + 1, 3 * step + 2], body)
        found.append(stepped(engine))
    return found, values(engine.module), memory


@program(family, "the loss is divided by a running mean of losses, which is moved after the backward", ALL)
def running_mean_of_losses(run):
    engine = run.engine(Net())
    found, mean = [], [1.0]
    for step in range(4):

        def body(index, engine=engine):
            loss = engine(batch(index)).square().mean()
            (loss / mean[0]).backward()
            mean[0] = 0.9 * mean[0] + 0.1 * loss.item()
            return loss.item()

        found += run.accumulate(engine, [3 * step, 3 * step + 1, 3 * step + 2], body)
        found.append(stepped(engine))
    return found, values(engine.module), mean


@program(family, "a replay buffer: outputs go in after the backward, the next micro-batch samples from it", ALL)
def replay_buffer(run):
    engine = run.engine(Net())
    found, kept = [], collections.deque(maxlen=4)
    for step in range(4):

        def body(index, engine=engine):
            x = batch(index)
            if kept:
                x = x + 0.1 * kept[len(kept) // 2]
            y = engine(x)
            loss = y.square().mean()
            loss.backward()
            kept.append(y.detach())
            return loss.item()

        found += run.accumulate(engine, [3 * step, 3 * step + 1, 3 * step + 2], body)
        found.append(stepped(engine))
    return found, values(engine.module)


class Curriculum:
    """An object of the loop whose method is the body."""

    def __init__(self, engine):
        self.engine, self.hardness, self.history = engine, 1.0, []

    def __call__(self, index):
        loss = self.engine(batch(index) * self.hardness).square().mean()
        loss.backward()
        self.hardness = 0.9 * self.hardness + 0.1 * (1 + loss.item())
        self.history.append(loss.item())
        return loss.item()


@program(family, "an object is the body, and makes the next micro-batch harder by the last one's loss", ALL)
def curriculum_object(run):
    engine = run.engine(Net())
    body, found = Curriculum(engine), []
    for step in range(4):
        found += run.accumulate(engine, [3 * step, 3 * step + 1, 3 * step + 2], body)
        found.append(stepped(engine))
    return found, values(engine.module), body.hardness, body.history


@program(family, "the items are a generator that reads what the last micro-batch has left", ALL)
def items_read_the_last(run):
    engine = run.engine(Net())
    found, left = [], [0.0]

    def items(step):
        for index in range(3 * step, 3 * step + 3):
            yield batch(index) * (1 + left[0])

    for step in range(4):

        def body(x, engine=engine):
            loss = engine(x).square().mean()
            loss.backward()
            left[0] = loss.item()
            return loss.item()

        found += run.accumulate(engine, items(step), body)
        found.append(stepped(engine))
    return found, values(engine.module)


@program(
    family, "a discriminator of the loop's own takes a step within each micro-batch, the model learns from it", ALL
)
def player_steps_in_between(run):
    engine = run.engine(Net())
    torch.manual_seed(5)
    judge = nn.Linear(WIDTH, 1)
    own = torch.optim.SGD(judge.parameters(), lr=0.1)
    found = []
    for step in range(4):

        def body(index, engine=engine):
            y = engine(batch(index))
            own.zero_grad()
            F.softplus(judge(y.detach())).mean().backward()
            own.step()
            loss = F.softplus(-judge(y)).mean() + y.square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [3 * step, 3 * step + 1, 3 * step + 2], body)
        found.append(stepped(engine))
    return found, values(engine.module), values(judge)


@program(family, "a memory tensor of the loop's is written in place by each micro-batch, and read by the next", ALL)
def memory_in_place(run):
    engine = run.engine(Net())
    found, memory = [], torch.zeros(WIDTH)
    for step in range(4):

        def body(index, engine=engine):
            y = engine(batch(index) + memory)
            loss = y.square().mean()
            memory.mul_(0.5).add_(y.detach().mean(0))
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [3 * step, 3 * step + 1, 3 * step + 2], body)
        found.append(stepped(engine))
    return found, values(engine.module), memory


@program(family, "batch normalisation of the loop's own after the model, its statistics are used in the next", ALL)
def norm_of_the_loop(run):
    engine = run.engine(Net())
    norm = nn.BatchNorm1d(WIDTH)
    found = []
    for step in range(4):

        def body(index, engine=engine):
            x = batch(index) - norm.running_mean
            loss = norm(engine(x)).square().mean() + (engine(x) - 1).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [3 * step, 3 * step + 1, 3 * step + 2], body)
        found.append(stepped(engine))
    return found, values(engine.module), values(norm)


def counts_and_scales():
    calls = [0]

    def scaled(x):
        calls[0] += 1
        return torch.tanh(x) * (1 + 0.1 * (calls[0] % 5))

    return scaled


class FunctionInList(Block):
    def __init__(self):
        super().__init__()
        self.functions = [counts_and_scales()]

    def forward(self, x):
        return x + self.down(self.functions[0](self.up(x)))


@program(family, "a function in a list of the block's counts its calls in a closure, and scales by it", ALL)
def function_in_list(run):
    return trained(run, net(FunctionInList))


REGISTRY = {}


class FunctionInRegistry(Block):
    def forward(self, x):
        return x + self.down(REGISTRY["counting"](self.up(x)))


@program(family, "a function that counts in a closure is looked up in a global registry", ALL)
def function_in_registry(run):
    REGISTRY["counting"] = counts_and_scales()
    return trained(run, net(FunctionInRegistry))


@program(family, "a forward hook of all modules counts its calls, and scales by it", ALL[:3])
def hook_of_all_modules(run):
    scaled = counts_and_scales()
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, args, output: scaled(output) if isinstance(module, nn.Linear) else None
    )
    try:
        return trained(run, Net)
    finally:
        hook.remove()
