"""Objects around a model and its parameters: wrappers, proxies, containers, caches, subclasses, captured references.
The optimizer is torch's own arithmetic, so that bits are compared."""

from __future__ import annotations

import collections
import contextlib
import contextvars
import copy
import dataclasses
import functools
import gc
import io
import pickle
import weakref
from typing import Any, ClassVar

import torch
from torch import nn
from torch._utils import _flatten_dense_tensors, _unflatten_dense_tensors
from torch.nn import functional as F
from torch.nn.utils.fusion import fuse_linear_bn_eval
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from misuses.case import Family
from misuses.exact import loss_of, step, wrapped
from misuses.place import gradients, values
from misuses.strangers import WIDTH, Block, Net, batch, trained

family = Family("wrappers")
same_bits = family.same_bits


# Wrappers of one's own.


class NaiveDDP(nn.Module):
    """Hooks that fill buckets; a bucket that is full is "reduced" and copied back; ``no_sync``."""

    def __init__(self, module, size=3):
        super().__init__()
        self.module, self.sync = module, True
        parameters = [p for p in module.parameters() if p.requires_grad][::-1]
        self.buckets = [parameters[i : i + size] for i in range(0, len(parameters), size)]
        self.ready = [0] * len(self.buckets)
        self.log = []
        for number, bucket in enumerate(self.buckets):
            for p in bucket:
                p.register_post_accumulate_grad_hook(functools.partial(self._hook, number))

    def _hook(self, number, p):
        if not self.sync:
            return
        self.ready[number] += 1
        if self.ready[number] == len(self.buckets[number]):
            self.ready[number] = 0
            grads = [p.grad for p in self.buckets[number]]
            flat = _flatten_dense_tensors(grads) / 2
            for g, new in zip(grads, _unflatten_dense_tensors(flat, grads), strict=True):
                g.copy_(new)
            self.log.append(number)

    @contextlib.contextmanager
    def no_sync(self):
        self.sync = False
        yield
        self.sync = True

    def forward(self, x):
        return self.module(x)


@same_bits(
    "a DDP of one's own around the engine's model: buckets filled by post-accumulate hooks, `no_sync` in accumulation"
)
def naive_ddp(place):
    engine, model = wrapped(place)
    outer = NaiveDDP(model)
    found = []
    for index in range(3):
        engine.optimizer.zero_grad()
        with outer.no_sync():
            loss_of(outer, 10 * index).backward()
        loss_of(outer, 10 * index + 1).backward()
        found.append(gradients(model))
        engine.optimizer.step()
    return found, outer.log, values(model)


@same_bits("a DDP of one's own that is wrapped before the engine, and is itself given to the engine")
def naive_ddp_before(place):
    outer = NaiveDDP(Net())
    engine, _ = wrapped(place, outer)
    return [step(engine, loss_of(engine, index)) for index in range(3)], outer.log, values(outer)


@same_bits(
    "data parallelism by hand: two halves of the batch, one after the other, in one backward; copies compute the same"
)
def replicated(place):
    engine, model = wrapped(place)
    found = []
    for index in range(2):
        engine.optimizer.zero_grad()
        total = 0
        for part in batch(index, 8).chunk(2):
            total = total + model(part).square().mean() / 2
        total.backward()
        found.append(gradients(model))
        engine.optimizer.step()
    found += [each(batch(7)).detach() for each in (copy.deepcopy(model) for _ in range(2))]
    return found, values(model)


class Proxy:
    """No module at all: attributes go to the model."""

    def __init__(self, model):
        object.__setattr__(self, "_model", model)

    def __getattr__(self, name):
        return getattr(self._model, name)

    def __setattr__(self, name, value):
        setattr(self._model, name, value)

    def __call__(self, *args):
        return self._model(*args)


@same_bits("a proxy object around the model: attributes are read and set through it, its `__call__` trains")
def proxy_of_model(place):
    engine, model = wrapped(place)
    proxy = Proxy(model)
    found = []
    for index in range(3):
        proxy.last_seen = index
        found.append(step(engine, loss_of(proxy, index)))
        with torch.no_grad():
            proxy.last.bias.add_(0.01)
    return found, model.last_seen, values(proxy)


@same_bits("the forward is wrapped by `functools.wraps` on the instance of each block, and unwrapped while training")
def forwards_wrapped(place):
    engine, model = wrapped(place)
    calls, found = [], []

    def around(forward, name):
        @functools.wraps(forward)
        def inner(x):
            calls.append(name)
            return forward(x) * 0.9

        return inner

    for name, block in enumerate(model.blocks):
        block.forward = around(block.forward, name)
    found.append(step(engine, loss_of(engine, 0)))
    for block in list(model.blocks)[:2]:
        del block.forward
    found += [step(engine, loss_of(engine, index)) for index in (1, 2)]
    return found, calls, values(model)


@same_bits("`block.__class__ = Other` while training: the same parameters, another forward")
def class_changed(place):
    class Other(Block):
        def forward(self, x):
            return x - self.down(torch.sin(self.up(x)))

    engine, model = wrapped(place)
    found = [step(engine, loss_of(engine, 0))]
    for block in model.blocks[::2]:
        block.__class__ = Other
    found += [step(engine, loss_of(engine, index)) for index in (1, 2)]
    return found, values(model)


@same_bits("methods are replaced on the class while training: `Block.forward = other`, for all of its objects")
def class_patched(place):
    class Mine(Block):
        pass

    engine, model = wrapped(place, Net(Mine))
    found = [step(engine, loss_of(engine, 0))]
    original = Mine.forward
    Mine.forward = lambda self, x: original(self, x) * 0.5
    found += [step(engine, loss_of(engine, index)) for index in (1, 2)]
    return found, values(model)


# References that were captured before.


class Bound(Block):
    """``functools.partial`` over its own weight, made when it is built."""

    def __init__(self):
        super().__init__()
        self.call = functools.partial(F.linear, weight=self.up.weight, bias=self.up.bias)

    def forward(self, x):
        return x + self.down(torch.tanh(self.call(x)))


@same_bits("blocks call a `functools.partial(F.linear, weight=self.up.weight)` from their `__init__`")
def bound_weights(place):
    return trained(place, Net(Bound))


@dataclasses.dataclass
class Pair:
    weight: nn.Parameter
    bias: nn.Parameter


class InDataclass(Block):
    def __init__(self):
        super().__init__()
        self.pair = Pair(self.up.weight, self.up.bias)
        self.table = {"w": [self.down.weight], "b": (self.down.bias,)}

    def forward(self, x):
        return x + F.linear(
            torch.tanh(F.linear(x, self.pair.weight, self.pair.bias)), self.table["w"][0], self.table["b"][0]
        )


@same_bits("blocks read their weights from a dataclass and from lists in a dict, filled in `__init__`")
def weights_in_dataclass(place):
    return trained(place, Net(InDataclass))


class Weak(Block):
    def __init__(self):
        super().__init__()
        self.of_weight = weakref.ref(self.up.weight)
        self.of_module = weakref.ref(self.down)

    def forward(self, x):
        return x + self.of_module()(torch.tanh(F.linear(x, self.of_weight(), self.up.bias)))


@same_bits("blocks hold their weight and a layer by `weakref.ref`")
def weights_by_weakref(place):
    return trained(place, Net(Weak))


class ListOfAll(Block):
    def __init__(self):
        super().__init__()
        self.all = list(self.parameters())
        self.names = {id(p): name for name, p in self.named_parameters()}

    def forward(self, x):
        w, b, v, c = self.all
        return x + F.linear(torch.tanh(F.linear(x, w, b)), v, c)


@same_bits("blocks compute from `self.all = list(self.parameters())` of their `__init__`")
def list_of_all(place):
    return trained(place, Net(ListOfAll))


class Cached(Block):
    """A merged weight is kept while evaluating, until the next training."""

    kept = None

    def train(self, mode=True):
        self.kept = None
        return super().train(mode)

    def forward(self, x):
        if self.training:
            return x + self.down(torch.tanh(self.up(x)))
        if self.kept is None:
            self.kept = self.up.weight, self.down.weight.t().contiguous()
        return x + torch.tanh(F.linear(x, self.kept[0], self.up.bias)) @ self.kept[1] + self.down.bias


@same_bits("blocks keep the weight itself and a transposed copy over calls of evaluation; `train()` forgets them")
def cached_for_evaluation(place):
    engine, model = wrapped(place, Net(Cached))
    found = []
    for index in range(3):
        found.append(step(engine, loss_of(engine, index)))
        model.eval()
        with torch.no_grad():
            found += [engine(batch(8)), engine(batch(9))]
        model.train()
    return found, values(model)


@same_bits("a closure over a weight from within the forward is called after the step, and again after the next")
def closure_called_later(place):
    class Lazy(Net):
        def forward(self, x):
            x = super().forward(x)
            weight = self.last.weight
            return x, lambda y: F.linear(y, weight)

    engine, model = wrapped(place, Lazy())
    found, late = [], []
    for index in range(3):
        out, call = engine(batch(index))
        late.append(call)
        found.append(step(engine, out.square().mean() + call(out).square().mean()))
        with torch.no_grad():
            found += [each(batch(9)) for each in late]
    return found, values(model)


@same_bits("the forward gives an object with lazy logits: chunks of them are computed by the loss, in a loop")
def lazy_logits(place):
    class Logits:
        def __init__(self, hidden, head):
            self.hidden, self.head = hidden, head

        def __getitem__(self, rows):
            return self.head(self.hidden[rows])

    class Lazy(Net):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return Logits(x, self.last)

    engine, model = wrapped(place, Lazy())
    found = []
    for index in range(3):
        logits = engine(batch(index, 6))
        loss = sum(logits[i : i + 2].square().sum() for i in range(0, 6, 2))
        found.append(step(engine, loss))
    return found, values(model)


@same_bits("generator functions: the model yields after each block; losses of two batches are interleaved")
def interleaved_generators(place):
    class Yields(Net):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
                yield x
            yield self.last(x)

    engine, model = wrapped(place, Yields())
    found = []
    for index in range(3):
        one, two = engine(batch(index)), engine(batch(index + 20))
        loss = sum((a - b).square().mean() for a, b in zip(one, two, strict=True))
        found.append(step(engine, loss))
    return found, values(model)


# Kinds of tensors.


class Named(torch.Tensor):
    """A subclass that counts the functions it goes through, and stays of its kind."""

    seen: ClassVar[Any] = collections.Counter()

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.seen[getattr(func, "__name__", str(func))] += 1
        return super().__torch_function__(func, types, args, kwargs or {})


@same_bits("inputs are of a tensor subclass with `__torch_function__`, and so are outputs")
def inputs_of_subclass(place):
    engine, model = wrapped(place)
    found = []
    Named.seen.clear()
    for index in range(3):
        out = engine(batch(index).as_subclass(Named))
        found += [type(out).__name__, step(engine, out.square().mean())]
    return found, Named.seen["linear"], values(model)


class Scaled(torch.Tensor):
    """A wrapper subclass of two inner tensors, with ``__torch_dispatch__``."""

    @staticmethod
    def __new__(cls, inner, scale):
        return torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, requires_grad=inner.requires_grad
        )

    def __init__(self, inner, scale):
        self.inner, self.scale = inner, scale

    def __tensor_flatten__(self):
        return ["inner", "scale"], None

    @classmethod
    def __tensor_unflatten__(cls, inner, context, size, stride):
        return cls(inner["inner"], inner["scale"])

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        if func is torch.ops.aten.detach.default:
            return cls(args[0].inner.detach(), args[0].scale)
        plain = torch.utils._pytree.tree_map_only(cls, lambda t: t.inner * t.scale, (args, kwargs or {}))
        return func(*plain[0], **plain[1])


@family.works_or_refused(
    "frozen weights of a wrapper subclass with `__torch_dispatch__` (quantised weights as torchao has them)"
)
def weights_of_subclass(place):
    model = Net()
    for block in model.blocks:
        inner = block.up.weight.detach()
        block.up.weight = nn.Parameter(Scaled((inner * 8).round(), torch.tensor(0.125)), requires_grad=False)
    engine, model = wrapped(place, model)
    found = [step(engine, loss_of(engine, index))[0] for index in range(3)]
    return found, model.last.weight.detach()


@same_bits("inputs of a wrapper subclass with `__torch_dispatch__`")
def inputs_of_wrapper_subclass(place):
    engine, model = wrapped(place)
    found = [step(engine, loss_of(lambda x: engine(Scaled(x, torch.tensor(0.5))), index)) for index in range(3)]
    return found, values(model)


@same_bits("a `nn.Buffer` that needs gradients, and is trained by hand beside the engine's optimizer")
def buffer_with_gradient(place):
    class Tilted(Block):
        def __init__(self):
            super().__init__()
            self.tilt = nn.Buffer(torch.zeros(WIDTH).requires_grad_())

        def forward(self, x):
            return super().forward(x) + self.tilt

    def after(model, index):
        with torch.no_grad():
            for block in model.blocks:
                block.tilt -= 0.1 * block.tilt.grad
                block.tilt.grad = None

    return trained(place, Net(Tilted), after=after)


@same_bits("complex numbers as pairs: `torch.view_as_complex(self.weight)` of a real parameter, and back")
def complex_view(place):
    class Spectral(Block):
        def __init__(self):
            super().__init__()
            self.filter = nn.Parameter(torch.ones(WIDTH // 2 + 1, 2))

        def forward(self, x):
            return x + torch.fft.irfft(torch.fft.rfft(self.up(x)) * torch.view_as_complex(self.filter), n=WIDTH)

    return trained(place, Net(Spectral))


@same_bits("parameters of no dimension, of no element, and with a length of one, in `ParameterDict` in `ParameterList`")
def odd_parameters(place):
    class Odd(Block):
        def __init__(self):
            super().__init__()
            self.odd = nn.ParameterDict(
                {
                    "scale": nn.Parameter(torch.tensor(1.0)),
                    "none": nn.Parameter(torch.zeros(0, 3)),
                    "one": torch.ones(1, 1),
                }
            )
            self.more = nn.ParameterList([nn.Parameter(torch.tensor(0.5)), torch.zeros(WIDTH)])

        def forward(self, x):
            out = super().forward(x) * self.odd["scale"] + self.more[0] * self.more[1]
            return out * self.odd["one"] + self.odd["none"].sum()

    return trained(place, Net(Odd))


@same_bits(
    "weights are seen as another shape: `nn.Unflatten`, `as_strided`, `unfold` and `expand` of them in the forward"
)
def weights_reshaped(place):
    class Reshaped(Block):
        def forward(self, x):
            w = self.up.weight.as_strided((WIDTH, WIDTH), (1, WIDTH))
            v = self.down.weight.unfold(1, 4, 4).mean(-1).repeat_interleave(4, 1)
            return x + F.linear(torch.tanh(F.linear(x, w, self.up.bias.expand(WIDTH))), v, self.down.bias)

    return trained(place, Net(Reshaped))


@same_bits("a layer and its norm are fused for evaluation on a copy: `fuse_linear_bn_eval(block.up, block.norm)`")
def fused_on_copy(place):
    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return x + self.down(torch.tanh(self.norm(self.up(x))))

    engine, model = wrapped(place, Net(Normed))
    found = [step(engine, loss_of(engine, index)) for index in range(2)]
    model.eval()
    fused = [fuse_linear_bn_eval(block.up, block.norm) for block in model.blocks]
    found += [each(batch(3)).detach() for each in fused]
    model.train()
    return found, step(engine, loss_of(engine, 2)), values(model)


# Hooks and registries.


@same_bits("hooks of all optimizers: `register_optimizer_step_pre_hook` scales gradients, a post hook counts")
def hooks_of_all_optimizers(place):
    engine, model = wrapped(place)
    counted, found = [], []

    def before(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.grad.mul_(0.5)

    handles = [
        register_optimizer_step_pre_hook(before),
        register_optimizer_step_post_hook(lambda *args: counted.append(type(args[0]).__name__ != "")),
    ]
    try:
        for index in range(3):
            found.append(step(engine, loss_of(engine, index)))
    finally:
        for handle in handles:
            handle.remove()
    return found, len(counted), values(model)


@same_bits(
    "a forward hook with `always_call=True` and keyword arguments, while a block raises once and the "
    "batch is tried again"
)
def hook_always_called(place):
    class Raises(Block):
        left = 1

        def forward(self, x, *, scale=1.0):
            if self.left == 0:
                self.left = -1
                raise RuntimeError("out of memory")
            self.left -= self.left > 0
            return super().forward(x) * scale

    class Calls(Net):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x, scale=0.5)
            return self.last(x)

    engine, model = wrapped(place, Calls(Raises))
    seen, found = [], []
    for block in model.blocks:
        block.register_forward_hook(
            lambda module, args, kwargs, out: seen.append((sorted(kwargs), out is None)),
            with_kwargs=True,
            always_call=True,
        )
    for index in range(3):
        engine.optimizer.zero_grad()
        try:
            loss_of(engine, index).backward()
        except RuntimeError:
            for part in batch(index).chunk(2):
                (engine(part).square().mean() / 2).backward()
        found.append(gradients(model))
        engine.optimizer.step()
    return found, seen, values(model)


@same_bits("a pre-hook replaces keyword arguments, a hook replaces the output by a tuple, another undoes it")
def hooks_replace_arguments(place):
    engine, model = wrapped(place)
    found = []
    model.register_forward_pre_hook(lambda m, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)
    for block in model.blocks:
        block.register_forward_hook(lambda m, args, out: (out, args[0]))
        block.register_forward_hook(lambda m, args, out: out[0] + 0.1 * out[1], prepend=False)
    for index in range(3):
        found.append(step(engine, loss_of(engine, index)))
    return found, values(model)


@same_bits(
    "hooks on activations rewrite gradients in place, and one of them replaces the gradient by a clone that is kept"
)
def hooks_on_activations(place):
    engine, model = wrapped(place)
    kept, found = [], []

    def watch(module, args, out):
        out.register_hook(lambda g: kept.append(g.clone()) or g.clamp(-1e-3, 1e-3))

    handles = [block.register_forward_hook(watch) for block in model.blocks]
    for index in range(3):
        found.append(step(engine, loss_of(engine, index)))
        if index == 1:
            handles[0].remove()
    return found, kept, values(model)


@same_bits("a hook of a weight's gradient is added in the forward itself, in each call, and removed after the backward")
def hooks_of_weights_in_forward(place):
    class Hooked(Block):
        def forward(self, x):
            self.handles = getattr(self, "handles", [])
            self.handles.append(self.up.weight.register_hook(lambda g: g * 0.5))
            return super().forward(x)

    def after(model, index):
        for block in model.blocks:
            for handle in block.handles:
                handle.remove()
            block.handles.clear()

    return trained(place, Net(Hooked), after=after)


# What is left behind.


@same_bits("losses, outputs and inputs are gone after the step: weak references to them are dead without the collector")
def nothing_is_kept(place):
    engine, _ = wrapped(place)
    gc.collect()
    gc.disable()
    found = []
    for index in range(4):
        x = batch(index).requires_grad_()
        out = engine(x)
        loss = out.square().mean()
        references = [weakref.ref(each) for each in (x, out, loss)]
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        del x, out, loss
        found.append([each() is None for each in references])
    gc.enable()
    return found


@same_bits("outputs that are dropped without a backward are gone at once, too")
def nothing_is_kept_without_backward(place):
    engine, model = wrapped(place)
    gc.collect()
    gc.disable()
    found = []
    for index in range(4):
        out = engine(batch(index))
        hidden = model.blocks[0](batch(index))
        references = [weakref.ref(out), weakref.ref(hidden)]
        del out, hidden
        found.append([each() is None for each in references])
    gc.enable()
    return found, step(engine, loss_of(engine, 5)), values(model)


@same_bits("thirty steps: the number of tensors that live does not grow")
def tensors_do_not_grow(place):
    engine, model = wrapped(place, Net())
    counts = []
    for index in range(30):
        step(engine, loss_of(engine, index))
        with torch.no_grad():
            model(batch(9))
        for p in model.parameters():
            p.detach().norm().item()
        if index in (9, 29):
            gc.collect()
            counts.append(sum(isinstance(o, torch.Tensor) for o in gc.get_objects()))
    return counts[1] <= counts[0]


@same_bits("hooks that are registered and removed in each step leave nothing")
def hooks_do_not_grow(place):
    engine, model = wrapped(place)
    counts = []
    for index in range(20):
        handles = [p.register_hook(lambda g: g * 1.0) for p in model.parameters()]
        handles += [m.register_forward_hook(lambda m, a, o: None) for m in model.modules()]
        step(engine, loss_of(engine, index))
        for handle in handles:
            handle.remove()
        if index in (4, 19):
            gc.collect()
            counts.append(len(gc.get_objects()) // 200)
    return counts[1] <= counts[0] + 1


@same_bits("the model is pickled and read back in the middle of accumulation, the copy goes on by plain SGD")
def pickled_in_accumulation(place):
    engine, model = wrapped(place)
    loss_of(engine, 0).backward()
    stream = io.BytesIO()
    torch.save(model, stream)
    stream.seek(0)
    other = torch.load(stream, weights_only=False)
    found = [gradients(other), values(other)]
    own = torch.optim.SGD(other.parameters(), 0.1)
    loss_of(other, 1).backward()
    own.step()
    loss_of(engine, 1).backward()
    found += [gradients(model)]
    engine.optimizer.step()
    return found, values(other), values(model)


@same_bits("`pickle.dumps` of one block, of a parameter with a gradient, of a dict of both")
def parts_pickled(place):
    engine, model = wrapped(place)
    step(engine, loss_of(engine, 0))
    loss_of(engine, 1).backward()
    block, weight = pickle.loads(pickle.dumps((model.blocks[1], model.blocks[1].up.weight)))
    return values(block), weight.detach(), block.up.weight is weight, type(weight).__name__, block(batch(2)).detach()


# What a second run of a forward finds, and does again.


def recomputed(place, model, **options):
    return trained(place, model, **({"activations": "recompute"} if place.has_engine else {}), **options)


class Rounds(TorchFunctionMode):
    """Weights of ``F.linear`` are rounded, with a straight-through gradient."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, *rest = args
            args = (x, weight + ((weight * 16).round() / 16 - weight).detach(), *rest)
        return func(*args, **kwargs or {})


class Halves(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        return out * 0.5 if func is torch.ops.aten.tanh.default else out


@same_bits("a `TorchFunctionMode` around the forward alone, and blocks that are recomputed")
def function_mode_recomputed(place):
    def call(model, x):
        with Rounds():
            return model(x)

    return recomputed(place, Net(), call=call)


@same_bits("a `TorchDispatchMode` around the forward alone, and blocks that are recomputed")
def dispatch_mode_recomputed(place):
    def call(model, x):
        with Halves():
            return model(x)

    return recomputed(place, Net(), call=call)


temperature = contextvars.ContextVar("temperature", default=1.0)


class Tempered(Block):
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x) * torch.tensor(temperature.get())))


@same_bits("blocks that are recomputed read a context variable, which is reset before the backward")
def context_variable_recomputed(place):
    def call(model, x):
        token = temperature.set(0.3)
        out = model(x)
        temperature.reset(token)
        return out

    return recomputed(place, Net(Tempered), call=call)


class Registers(Block):
    def forward(self, x):
        self.up.weight.register_hook(lambda g: g * 0.5)
        return super().forward(x)


@family.refused("a block that is recomputed adds a hook to its weight in each forward", "keep")
def hooks_in_recomputed(place):
    return recomputed(place, Net(Registers))


class WritesElsewhere(Block):
    def forward(self, x):
        with torch.no_grad():
            self.other[0].up.weight.mul_(0.99)
        return super().forward(x)


@family.refused("a block that is recomputed writes to the weight of another one in its forward", "keep")
def writes_elsewhere_recomputed(place):
    model = Net(WritesElsewhere)
    for index, block in enumerate(model.blocks):
        block.other = [model.blocks[(index + 1) % 5]]
    return recomputed(place, model)


class GoesBackward(Block):
    def forward(self, x):
        if torch.is_grad_enabled():
            self.up(x.detach()).square().mean().backward()
        return super().forward(x)


@family.refused("a block that is recomputed goes backward from a loss of its own in its forward", "keep")
def backward_in_recomputed(place):
    return recomputed(place, Net(GoesBackward))


class DropsGradient(Block):
    def forward(self, x):
        self.other[0].up.weight.grad = None
        return super().forward(x)


@family.refused("a block that is recomputed sets the gradient of another one's weight to None in its forward", "keep")
def gradient_dropped_recomputed(place):
    model = Net(DropsGradient)
    for index, block in enumerate(model.blocks):
        block.other = [model.blocks[(index + 1) % 5]]
    return recomputed(place, model)
