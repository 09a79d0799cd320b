"""Programs that change torch or Python around the model, and modules that are not what they seem: functions of torch
replaced, methods of ``nn.Module`` patched, truth, equality, length and attributes of modules made otherwise."""

from __future__ import annotations

import contextlib
import copy
import functools
import io
import itertools
import types
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils import checkpoint as checkpoints

from misuses.case import Family
from misuses.joints import batch, program
from misuses.loops_of_today import loop, mean
from misuses.place import values
from misuses.strangers import WIDTH, Block, Net

family = Family("patched")
TWO = ("plain", "mixed")
FOUR = ("plain", "mixed", "together", "resumed")
THREE = ("plain", "mixed", "together")
DRAWING = ("plain", "mixed", "together", "together, recomputed")


def patched(title, joints=TWO, **options):
    return program(family, title, joints, **options)


@contextlib.contextmanager
def replaced(owner, name, make):
    """``owner.name`` is what ``make`` gives for the old one."""
    before = getattr(owner, name)
    setattr(owner, name, make(before))
    try:
        yield
    finally:
        setattr(owner, name, before)


# Torch's functions.


@patched("`F.linear` is replaced by a function of the program's, before the model is made (as kernels' libraries do)")
def linear_replaced(run):
    def make(before):
        return lambda x, weight, bias=None: before(x, weight) * 0.9 + (0 if bias is None else bias)

    with replaced(F, "linear", make):
        return loop(run, body=mean)


@patched("`nn.Linear.forward` is replaced on the class between two steps")
def linear_forward_replaced(run):
    before = nn.Linear.forward

    def after(engine, step):
        if step == 0:
            nn.Linear.forward = lambda self, x: F.linear(x, self.weight * 1.1, self.bias)

    try:
        return loop(run, body=mean, after=after)
    finally:
        nn.Linear.forward = before


@patched("`nn.Module.__call__` is replaced on the class by one that counts calls and scales nothing")
def call_replaced(run):
    seen = []

    def make(before):
        def call(self, *args, **kwargs):
            seen.append(type(self).__name__)
            return before(self, *args, **kwargs)

        return call

    with replaced(nn.Module, "__call__", make):
        found = loop(run, body=mean)
    return found, len(seen) > 0


@patched("`nn.Module._call_impl` is replaced on the class by a straight call of `forward`, without hooks")
def call_impl_replaced(run):
    with replaced(nn.Module, "_call_impl", lambda before: lambda self, *a, **k: self.forward(*a, **k)):
        return loop(run, body=mean)


@patched("`torch.Tensor.backward` is replaced by one that scales the loss")
def backward_replaced(run):
    with replaced(torch.Tensor, "backward", lambda before: lambda self, *a, **k: before(self * 2, *a, **k)):
        return loop(run, body=mean)


@patched("`torch.autograd.backward` is replaced by one that calls the old one twice, with a retained graph")
def autograd_backward_replaced(run):
    def make(before):
        def backward(tensors, grad_tensors=None, retain_graph=None, create_graph=False, **keywords):
            before(tensors, grad_tensors, retain_graph=True, create_graph=create_graph, **keywords)
            before(tensors, grad_tensors, retain_graph=retain_graph, create_graph=create_graph, **keywords)

        return backward

    with replaced(torch.autograd, "backward", make):
        return loop(run, body=mean)


@patched("`nn.Module.__setattr__` is patched to log names of what is set")
def setattr_patched(run):
    seen = []

    def make(before):
        def setattr_(self, name, value):
            seen.append(name)
            before(self, name, value)

        return setattr_

    with replaced(nn.Module, "__setattr__", make):
        return loop(run, body=mean)


@patched("`nn.Module.__getattr__` is patched to give a default for what is missing")
def getattr_patched(run):
    def make(before):
        def getattr_(self, name):
            if name == "scale_of_mine":
                return 0.5
            return before(self, name)

        return getattr_

    class Scaled(Block):
        def forward(self, x):
            return x + self.scale_of_mine * self.down(torch.tanh(self.up(x)))

    with replaced(nn.Module, "__getattr__", make):
        return loop(run, lambda: Net(Scaled), body=mean)


@patched(
    "`torch.tanh` is replaced for the forward alone, and given back before the backward",
    differs={"mixed": "which function stands in `torch.tanh` must be the same in both runs"},
)
def function_replaced_between(run):
    before = torch.tanh

    def body(engine, index):
        torch.tanh = lambda x: before(x) * 0.5
        try:
            return mean(engine, index)
        finally:
            torch.tanh = before

    return loop(run, body=body)


@patched("`torch.Tensor.__add__` is replaced by one that counts and rounds to bf16")
def add_replaced(run):
    def make(before):
        def add(self, other):
            out = before(self, other)
            return out.add((out.bfloat16().float() - out).detach())

        return add

    with replaced(torch.Tensor, "__add__", lambda before: make(torch.Tensor.add)):
        return loop(run, body=mean)


@patched("`torch.nn.functional.dropout` is replaced by one with a generator of the program's own", FOUR)
def dropout_replaced(run):
    generator = torch.Generator().manual_seed(3)

    class Dropping(Block):
        def forward(self, x):
            return x + self.down(F.dropout(torch.tanh(self.up(x)), 0.2))

    def drop(x, p=0.5, training=True, inplace=False):
        return x * (torch.rand(x.shape, generator=generator) > p)

    with replaced(F, "dropout", lambda before: drop):
        return loop(run, lambda: Net(Dropping), body=mean)


@patched("`torch.utils.checkpoint.checkpoint` is replaced by a plain call, or the other way round, by a flag")
def checkpoint_replaced(run):
    class Checked(Block):
        def forward(self, x):
            return checkpoints.checkpoint(super().forward, x, use_reentrant=False)

    with replaced(checkpoints, "checkpoint", lambda before: lambda function, *a, use_reentrant=None: function(*a)):
        return loop(run, lambda: Net(Checked), body=mean)


@patched("`nn.Parameter.__new__` is patched to count, before the model is made and while it trains", ("plain",))
def parameter_new_patched(run):
    before, seen = nn.Parameter.__new__, []

    def new(cls, *args, **kwargs):
        seen.append(1)
        return before(cls, *args, **kwargs)

    nn.Parameter.__new__ = new
    try:
        return loop(run, body=mean)
    finally:
        nn.Parameter.__new__ = before


@patched("`torch.optim.Optimizer.step` hooks by patching `SGD.step` on the class: it scales gradients before", FOUR)
def sgd_step_patched(run):
    def make(before):
        def step(self, closure=None):
            for group in self.param_groups:
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        parameter.grad.mul_(0.3)
            return before(self, closure)

        return step

    with replaced(torch.optim.SGD, "step", make):
        return loop(run, body=mean)


@patched("`torch.no_grad` is replaced by `torch.inference_mode`, as some scripts do", ("plain",))
def no_grad_replaced(run):
    def body(engine, index):
        with torch.no_grad():
            target = engine(batch(index + 10)).sum().item()
        return mean(engine, index) * (1 + abs(target) * 1e-3)

    with replaced(torch, "no_grad", lambda before: torch.inference_mode):
        return loop(run, body=body)


@patched("`torch.manual_seed` is patched by one that adds a rank's number; the forward seeds by its input", FOUR)
def seed_patched(run):
    class Seeding(Block):
        def forward(self, x):
            torch.manual_seed(7)
            return x + self.down(F.dropout(torch.tanh(self.up(x)), 0.1))

    with replaced(torch, "manual_seed", lambda before: lambda seed: before(seed + 1)):
        return loop(run, lambda: Net(Seeding), body=mean)


@patched("an operator of torch's gets another kernel for the CPU by `torch.library.Library('aten', 'IMPL')`")
def kernel_replaced(run):
    library = torch.library.Library("aten", "IMPL")
    import warnings

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("tanh", lambda x: torch.sigmoid(2 * x) * 2 - 1, "CPU")
    try:
        return loop(run, body=mean)
    finally:
        library._destroy()


@patched("an operator of torch's gets another autograd formula by `Library('aten', 'IMPL', 'AutogradCPU')`")
def autograd_kernel_replaced(run):
    import warnings

    class Halved(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            out = torch.sigmoid(2 * x) * 2 - 1
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, gradient):
            (out,) = ctx.saved_tensors
            return gradient * (1 - out * out) * 0.5

    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        library.impl("tanh", lambda x: Halved.apply(x), "AutogradCPU")
    try:
        return loop(run, body=mean)
    finally:
        library._destroy()


@patched("a method is put on `torch.Tensor`: `torch.Tensor.rms = ...`, and is called on weights and activations")
def method_on_tensor(run):
    torch.Tensor.rms = lambda self: self.square().mean().sqrt()

    class Normed(Block):
        def forward(self, x):
            return x / x.rms() + self.down(torch.tanh(self.up(x))) * self.up.weight.rms()

    try:
        return loop(run, lambda: Net(Normed), body=mean, after=lambda e, s: e.module.last.weight.rms().item())
    finally:
        del torch.Tensor.rms


@patched("`copy.deepcopy` and `torch.save` are patched by ones that count; both are used between steps", ("plain",))
def copies_patched(run):
    seen = []

    def count(before):
        def call(*args, **kwargs):
            seen.append(1)
            return before(*args, **kwargs)

        return call

    def after(engine, step):
        copied = copy.deepcopy(engine.module)
        file = io.BytesIO()
        torch.save(copied.state_dict(), file)
        return values(copied)

    with replaced(copy, "deepcopy", count), replaced(torch, "save", count):
        return loop(run, body=mean, after=after), len(seen) > 0


@patched("`F.scaled_dot_product_attention` is replaced by a chunked one of the program's own")
def attention_replaced(run):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            return x + self.out(F.scaled_dot_product_attention(q[None], k[None], v[None])[0])

    def chunked(q, k, v, **options):
        return torch.cat([(part @ k.mT / 6).softmax(-1) @ v for part in q.split(32, 1)], 1)

    with replaced(F, "scaled_dot_product_attention", lambda before: chunked):
        return loop(run, lambda: Net(Attending), body=mean)


# Modules that are not what they seem.


class Length(Block):
    def __len__(self):
        return 0


@patched("blocks that are false: `__len__` gives 0", FOUR)
def false_by_length(run):
    return loop(run, lambda: Net(Length), body=mean)


class Unsure(Block):
    def __bool__(self):
        raise TypeError("neither true nor false")


@patched("blocks whose truth raises: `__bool__`", FOUR)
def truth_raises(run):
    return loop(run, lambda: Net(Unsure), body=mean)


@patched("a model that is false")
def false_model(run):
    class False_(Net):
        def __len__(self):
            return 0

    return loop(run, False_, body=mean)


class Equal(Block):
    """All of them are equal, and have one hash: torch takes them for one module where it collects them in a set."""

    def __eq__(self, other):
        return isinstance(other, Equal)

    def __hash__(self):
        return 7


@patched(
    "blocks that are all equal, with one hash: torch finds the parameters of the first one alone",
    ("plain", "recomputed"),
)
def equal_blocks(run):
    return loop(run, lambda: Net(Equal), body=mean)


class Unequal(Block):
    def __eq__(self, other):
        return torch.zeros(2) == 0

    __hash__ = nn.Module.__hash__


@patched("blocks whose `==` gives a tensor, whose truth is an error")
def equality_is_a_tensor(run):
    return loop(run, lambda: Net(Unequal), body=mean)


class Dict(nn.Module, Mapping):
    """A module that is a mapping of its layers."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def __getitem__(self, key):
        return self._modules[key]

    def __iter__(self):
        return iter(self._modules)

    def __len__(self):
        return len(self._modules)

    __hash__ = nn.Module.__hash__

    def __eq__(self, other):
        return self is other

    def forward(self, x):
        return x + self["down"](torch.tanh(self["up"](x)))


@patched("blocks that are mappings of their layers: `Mapping` is a base class", FOUR)
def blocks_are_mappings(run):
    return loop(run, lambda: Net(Dict), body=mean)


class Callable_(Block):
    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        if name in ("gain", "shift"):
            return self._parameters.get("up_" + name, 0.25)
        return super().__getattr__(name)

    def forward(self, x):
        return x + self.gain * self.down(torch.tanh(self.up(x)))


@patched("a module whose `__getattr__` makes attributes up")
def attributes_made_up(run):
    return loop(run, lambda: Net(Callable_), body=mean)


class Forwarding(nn.Module):
    """It stands before another module, and gives all of that one's attributes as its own."""

    def __init__(self, inner=None):
        super().__init__()
        self.inner = Block() if inner is None else inner

    def __getattr__(self, name):
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("inner"), name)

    def forward(self, x):
        return self.inner(x) * 1.01 + self.up.bias * 0.1


@patched("blocks that forward all attributes to an inner module, whose weight they use by their own name", FOUR)
def forwarding(run):
    return loop(run, lambda: Net(Forwarding), body=mean)


class Attribute:
    """A descriptor: a positive weight, from a raw one with another name."""

    def __set_name__(self, owner, name):
        self.raw = f"raw_{name}"

    def __get__(self, module, owner=None):
        return self if module is None else F.softplus(getattr(module, self.raw))

    def __set__(self, module, value):
        with torch.no_grad():
            getattr(module, self.raw).copy_(value.expm1().log())


class Described(Block):
    gain = Attribute()

    def __init__(self):
        super().__init__()
        self.raw_gain = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x):
        return x + self.gain * self.down(torch.tanh(self.up(x)))


@patched("a descriptor of the class gives and sets a positive weight; it is set between steps", FOUR)
def descriptors(run):
    def after(engine, step):
        engine.module.blocks[1].gain = engine.module.blocks[1].gain.detach() * 1.1

    return loop(run, lambda: Net(Described), body=mean, after=after)


class Cached(Block):
    @functools.cached_property
    def merged(self):
        return self.down.weight @ self.up.weight

    def forward(self, x):
        self.__dict__.pop("merged", None)
        return x + F.linear(x, self.merged) + F.linear(torch.tanh(x), self.merged)


@patched("a `cached_property` is a product of two weights; it is dropped at each forward's beginning", FOUR)
def cached_products(run):
    return loop(run, lambda: Net(Cached), body=mean)


class Lingering(Block):
    @functools.cached_property
    def merged(self):
        return self.down.weight.detach() @ self.up.weight.detach()

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) + F.linear(x, self.merged) * 0.1


@patched("a `cached_property` of a detached product lives for the whole run, made in the first forward", THREE)
def cached_for_ever(run):
    return loop(run, lambda: Net(Lingering), body=mean)


class Dispatching(Block):
    @functools.singledispatchmethod
    def compute(self, x):
        raise TypeError

    @compute.register
    def _(self, x: torch.Tensor):
        return self.up(x)

    @compute.register
    def _(self, x: list):
        return sum(self.down(part) for part in x)

    def forward(self, x):
        return x + self.compute([torch.tanh(self.compute(x)), x * 0.1])


@patched("`functools.singledispatchmethod` chooses how a block computes", FOUR)
def single_dispatch(run):
    return loop(run, lambda: Net(Dispatching), body=mean)


class Meta(type(nn.Module)):
    """Each class gets a forward that adds the input."""

    def __new__(mcs, name, bases, body):
        made = super().__new__(mcs, name, bases, body)
        inner = made.forward

        def forward(self, x):
            return x + inner(self, x)

        if "forward" in body:
            made.forward = forward
        return made


@patched(
    "a metaclass wraps `forward` of each class that it makes; classes are made for each block by `type()`",
    ("plain", "recomputed"),
)
def metaclass(run):
    numbers = itertools.count()

    def make():
        base = Meta("Base", (nn.Module,), {})

        def init(self):
            nn.Module.__init__(self)
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return torch.tanh(self.layer(x))

        return Meta(f"Made{next(numbers)}", (base,), {"__init__": init, "forward": forward})()

    return loop(run, lambda: Net(make), body=mean)


class Slotted(Block):
    __slots__ = ("count",)

    def __init__(self):
        super().__init__()
        self.count = 0

    def forward(self, x):
        self.count += 1
        return x + self.down(torch.tanh(self.up(x))) * (1 + 0.1 * self.count)


@patched("a module with `__slots__`, in which its forward counts", THREE)
def module_slots(run):
    return loop(run, lambda: Net(Slotted), body=mean)


class Tree(nn.Module):
    """A module whose children know their parent."""

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        object.__setattr__(self.up, "parent", self)
        object.__setattr__(self.down, "parent", self)

    def forward(self, x):
        return x + self.up.parent.down(torch.tanh(self.down.parent.up(x)))


@patched("layers know their parent by a plain attribute, and are called through it", FOUR)
def parents_known(run):
    return loop(run, lambda: Net(Tree), body=mean)


class Reporting(Block):
    def __repr__(self):
        raise RuntimeError("no repr")

    __str__ = __repr__


@patched("a module whose `repr` raises", FOUR)
def repr_raises(run):
    return loop(run, lambda: Net(Reporting), body=mean)


class Named(Block):
    def _get_name(self):
        return "Block/with a slash, and a dot."


@patched(
    "module names with odd letters: keys of a `ModuleDict` with spaces, slashes, digits, and of other alphabets", FOUR
)
def odd_letters(run):
    class Odd(Net):
        def __init__(self):
            super().__init__()
            self.more = nn.ModuleDict(
                {
                    key: Named()
                    for key in ("a b", "c/d", "0", "..".replace(".", "_"), "größe", "层", "weight", "*", "[x]")
                }
            )

        def forward(self, x):
            x = super().forward(x)
            for layer in self.more.values():
                x = layer(x)
            return x

    return loop(run, Odd, body=mean)


@patched("a `Parameter` subclass whose `__torch_function__` counts and scales what is computed with it", ("plain",))
def parameter_subclass(run):
    class Scaled(nn.Parameter):
        @classmethod
        def __torch_function__(cls, function, kinds, args=(), kwargs=None):
            out = super().__torch_function__(function, kinds, args, kwargs)
            return out * 0.9 if function is F.linear else out

    net = Net()
    for block in net.blocks:
        block.up.weight = Scaled(block.up.weight.detach().clone())
    return loop(run, lambda: net, body=mean)


@patched("`train()` of a class is overridden and builds merged weights in evaluation, which are a buffer", FOUR)
def merged_by_train(run):
    class Merging(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("merged", None, persistent=False)

        def train(self, mode=True):
            super().train(mode)
            self.merged = None if mode else (self.down.weight @ self.up.weight).detach()
            return self

        def forward(self, x):
            if self.merged is not None:
                return x + F.linear(x, self.merged)
            return x + self.down(torch.tanh(self.up(x)))

    def after(engine, step):
        engine.module.eval()
        with torch.no_grad():
            found = engine.module(batch(70)).sum().item()
        engine.module.train()
        return found

    return loop(run, lambda: Net(Merging), body=mean, after=after)


@patched("a forward that is a `functools.partialmethod`, another that is a static method, and a callable object")
def forwards_of_kinds(run):
    class Partial(Block):
        def compute(self, scale, x):
            return x + scale * self.down(torch.tanh(self.up(x)))

        forward = functools.partialmethod(compute, 0.5)

    class Object:
        def __init__(self, block):
            self.block = block

        def __call__(self, x):
            return x + self.block.down(torch.tanh(self.block.up(x))) * 0.7

    class OfObject(Block):
        def __init__(self):
            super().__init__()
            self.forward = Object(self)

    kinds = itertools.cycle([Partial, OfObject])
    return loop(run, lambda: Net(lambda: next(kinds)()), body=mean)


@patched("a model that is built by a factory out of `types.SimpleNamespace` of functions that close over layers")
def functions_over_layers(run):
    class Functional(Net):
        def __init__(self):
            super().__init__()
            self.space = types.SimpleNamespace(
                **{f"step{i}": (lambda x, b=b: x + b.down(torch.tanh(b.up(x)))) for i, b in enumerate(self.blocks)}
            )

        def forward(self, x):
            x = self.first(x)
            for i in range(len(self.blocks)):
                x = getattr(self.space, f"step{i}")(x)
            return self.last(x)

    return loop(run, Functional, body=mean)


@patched("layers are reached through `operator.attrgetter('blocks.2.up')`, `get_submodule` and `eval` of a path")
def reached_by_path(run):
    class Reaching(Net):
        def forward(self, x):
            x = self.first(x)
            for i in range(len(self.blocks)):
                up, down = self.get_submodule(f"blocks.{i}.up"), eval(f"self.blocks[{i}].down")
                x = x + down(torch.tanh(up(x)))
            return self.last(x)

    return loop(run, Reaching, body=mean)


@patched("a context manager of the class's own, `__enter__` scales a weight in place and `__exit__` puts it back", FOUR)
def model_is_context(run):
    class Context(Net):
        def __enter__(self):
            self.kept = [p.detach().clone() for p in self.blocks.parameters()]
            with torch.no_grad():
                for parameter in self.blocks.parameters():
                    parameter.mul_(0.5)
            return self

        def __exit__(self, *error):
            with torch.no_grad():
                for parameter, kept in zip(self.blocks.parameters(), self.kept, strict=True):
                    parameter.copy_(kept)

    def after(engine, step):
        with engine.module as model, torch.no_grad():
            return model(batch(80)).sum().item()

    return loop(run, Context, body=mean, after=after)


@patched("the model's `parameters()` is overridden to give a generator that skips, in every second call", ("plain",))
def parameters_overridden(run):
    class Fickle(Net):
        turn = 0

        def parameters(self, recurse=True):
            type(self).turn += 1
            return super().parameters(recurse)

        def named_parameters(self, *args, **kwargs):
            yield from super().named_parameters(*args, **kwargs)

    return loop(run, Fickle, body=mean)


@patched(
    "a class defines `weight` as a property over a `ParameterList` of low-rank factors of its own, with a setter", FOUR
)
def weight_property(run):
    class LowRank(nn.Module):
        def __init__(self):
            super().__init__()
            self.factors = nn.ParameterList([torch.randn(WIDTH, 4) * 0.2, torch.randn(4, WIDTH) * 0.2])

        @property
        def weight(self):
            return self.factors[0] @ self.factors[1]

        @weight.setter
        def weight(self, value):
            u, s, v = torch.linalg.svd(value)
            with torch.no_grad():
                self.factors[0].copy_(u[:, :4] * s[:4])
                self.factors[1].copy_(v[:4])

        def forward(self, x):
            return x + torch.tanh(F.linear(x, self.weight))

    def after(engine, step):
        layer = engine.module.blocks[0]
        layer.weight = layer.weight.detach() * 0.9

    return loop(run, lambda: Net(LowRank), body=mean, after=after)


GENERATOR = torch.Generator()


class OfGlobalGenerator(Block):
    def forward(self, x):
        noise = torch.rand(x.shape, generator=GENERATOR)
        return x + self.down(torch.tanh(self.up(x))) * noise


@patched("a forward draws from a generator that is a global", DRAWING)
def global_generator(run):
    GENERATOR.manual_seed(3)
    return loop(run, lambda: Net(OfGlobalGenerator), body=mean)


class OfClassGenerator(Block):
    generator = torch.Generator()

    def forward(self, x):
        noise = torch.rand(x.shape, generator=self.generator)
        return x + self.down(torch.tanh(self.up(x))) * noise


@patched("a forward draws from a generator that its class has", DRAWING)
def class_generator(run):
    OfClassGenerator.generator.manual_seed(3)
    return loop(run, lambda: Net(OfClassGenerator), body=mean)


@patched("a forward draws from a generator of Python's in a closure, and one of numpy's in a default", DRAWING)
def closure_generators(run):
    import random

    import numpy as np

    of_python, of_numpy = random.Random(3), np.random.default_rng(4)

    class Own(Block):
        def forward(self, x, of_numpy=of_numpy):
            return x + self.down(torch.tanh(self.up(x))) * (of_python.random() + of_numpy.random())

    return loop(run, lambda: Net(Own), body=mean)


@patched("a forward calls a function of the program's that draws from a generator in a dict of a global", DRAWING)
def generator_in_globals(run):
    SHARED["rng"] = torch.Generator().manual_seed(8)

    class Own(Block):
        def forward(self, x):
            return x + drawn(x) * self.down(torch.tanh(self.up(x)))

    return loop(run, lambda: Net(Own), body=mean)


SHARED = {}


def drawn(x):
    return torch.rand(x.shape, generator=SHARED["rng"])
