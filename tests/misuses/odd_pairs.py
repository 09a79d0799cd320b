"""Two or three features at once: settings that hold for a forward alone, copies of modules, lazy results, Functions,
writes behind versions, each at the joints of the engine."""

from __future__ import annotations

import contextlib
import contextvars
import copy
import random
import types

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from misuses.case import Family
from misuses.joints import ACCUMULATED, PAIRS, PLAIN, RESUMED, batch, program, stepped
from misuses.place import values
from misuses.second_runs import net
from misuses.strangers import WIDTH, Block, Net

family = Family("odd pairs")

ALL = (*ACCUMULATED, *PAIRS[:2])
BEHIND_VERSIONS = "a write through `.data` to what autograd has saved does not reach what is kept elsewhere"


def trained(run, build, *, steps=3, forward=None, around_backward=contextlib.nullcontext, resumes=False, **options):
    """Two micro-batches a step; losses, gradients and values."""
    engine = run.engine(build(), **options)
    found = []
    for step in range(steps):

        def body(index, engine=engine):
            x = batch(index)
            y = engine(x) if forward is None else forward(engine, x)
            with around_backward():
                loss = y.float().square().mean()
                loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
        if step == 0 and resumes:
            engine = run.resume(engine, build, **options)
    return found, values(engine.module)


# Settings that hold for a forward alone, or for a backward alone.


class Attends(Block):
    def forward(self, x):
        q = self.up(x).view(2, -1, 4, 8).transpose(1, 2)
        y = F.scaled_dot_product_attention(q, q * 0.5, torch.tanh(q))
        return x + self.down(y.transpose(1, 2).reshape(-1, WIDTH))


@program(family, "the kernel of attention is chosen around the forward alone: `sdpa_kernel(MATH)`", ALL)
def attention_by_math(run):
    def forward(engine, x):
        with sdpa_kernel(SDPBackend.MATH):
            return engine(x)

    return trained(run, net(Attends), forward=forward)


class Makes(Block):
    """Makes tensors of the default dtype."""

    def forward(self, x):
        scale = torch.ones(WIDTH).mul_(1.1)
        grid = torch.linspace(0, 1, WIDTH)
        return x + self.down(torch.tanh(self.up(x) * scale.to(x.dtype) + grid.to(x.dtype)))


@contextlib.contextmanager
def doubles():
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@program(family, "the default dtype is float64 around the loss and the backward, a block makes tensors", ALL)
def default_dtype_of_backward(run):
    return trained(run, net(Makes), around_backward=doubles)


class Sums(Block):
    def forward(self, x):
        index = torch.arange(len(x)) % 7
        sums = torch.zeros(7, WIDTH).index_add(0, index, self.up(x))
        return x + self.down(torch.tanh(sums[index]))


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


@program(family, "deterministic algorithms around the backward alone, a block adds by index", ALL)
def deterministic_backward(run):
    return trained(run, net(Sums), around_backward=deterministic)


@program(family, "denormal numbers are flushed in the forward and not in the backward, weights are tiny", ALL)
def flushed_forward(run):
    def build():
        model = Net()
        with torch.no_grad():
            for block in model.blocks:
                block.up.weight.mul_(1e-20)
                block.up.bias.zero_()
                block.down.weight.mul_(1e-19)
        return model

    def forward(engine, x):
        torch.set_flush_denormal(True)
        try:
            return engine(x)
        finally:
            torch.set_flush_denormal(False)

    return trained(run, build, forward=forward)


@contextlib.contextmanager
def grad_off_then_on():
    with torch.no_grad(), torch.enable_grad():
        yield


@program(family, "loss and backward within `enable_grad` of a `no_grad`, the forward in autocast without a cache", ALL)
def modes_around_halves(run):
    def forward(engine, x):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return engine(x)

    return trained(run, Net, forward=forward, around_backward=grad_off_then_on)


@program(family, "a forward in one autocast, the backward within another one", ALL)
def backward_in_other_autocast(run):
    def forward(engine, x):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            return engine(x)

    return trained(
        run, Net, forward=forward, around_backward=lambda: torch.autocast("cpu", torch.float16, cache_enabled=False)
    )


# Random numbers.


class Drops(Block):
    def forward(self, x):
        def inner(x):
            return self.down(F.dropout(torch.tanh(self.up(x)), 0.3))

        return x + checkpoint(inner, x, use_reentrant=False, preserve_rng_state=False)


@program(family, "a checkpoint in a block that does not keep the random state draws anew in backward", ALL)
def checkpoint_draws_anew(run):
    torch.manual_seed(11)
    return trained(run, net(Drops))


class NoisyGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient + 0.01 * torch.randn_like(gradient) * random.random()


class Rounds(Block):
    def forward(self, x):
        return x + self.down(NoisyGradient.apply(F.dropout(torch.tanh(self.up(x)), 0.1)))


@program(family, "a Function draws noise in its backward, by torch and Python, between dropouts", ALL)
def noise_in_backward(run):
    torch.manual_seed(12)
    random.seed(3)
    return trained(run, net(Rounds))


class Reseeds(Block):
    def forward(self, x):
        torch.manual_seed(int(x.detach().abs().sum()) % 1000)
        return x + F.dropout(self.down(torch.tanh(self.up(x))), 0.2)


@program(family, "a block seeds the generator by its input, the next ones draw from it", ALL)
def block_reseeds(run):
    torch.manual_seed(13)
    random.seed(4)

    def build():
        model = net(Reseeds)()
        model.blocks[2] = Rounds()
        return model

    return trained(run, build)


class OwnFork(Block):
    def forward(self, x):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            mask = torch.rand_like(x) > 0.2
        return x + self.down(torch.tanh(self.up(x))) * mask * torch.empty_like(x).bernoulli_(0.9)


@program(family, "a block forks the generator for one mask, and draws another one outside", ALL)
def forked_generator(run):
    torch.manual_seed(14)
    return trained(run, net(OwnFork))


# Writes behind versions.


class ClampsData(Block):
    def forward(self, x):
        h = torch.relu(self.up(x))
        h.data.clamp_(max=0.3)
        return x + self.down(h)


@program(family, "an activation is clamped through `.data` after `relu` has saved it", ALL)
def activation_clamped_by_data(run):
    return trained(run, net(ClampsData))


class ArrayWrites(Block):
    def forward(self, x):
        h = torch.sigmoid(self.up(x))
        y = h * h
        h.detach().numpy()[:, :4] = 0.5
        return x + self.down(y)


@program(family, "an activation is written through a numpy array after a product has saved it", ALL)
def activation_written_by_array(run):
    return trained(run, net(ArrayWrites))


class LaterData(Block):
    """Writes what it has kept from its last call of this micro-batch."""

    def forward(self, x):
        h = torch.tanh(self.up(x))
        self.kept = [h]
        return x + self.down(h * h)


@program(
    family,
    "activations that blocks have kept are scaled through `.data` between forward and backward",
    PLAIN,
    differs=dict.fromkeys(PLAIN[1:], BEHIND_VERSIONS),
)
def kept_activations_scaled(run):
    def forward(engine, x):
        y = engine(x)
        for block in (engine.module.blocks[1], engine.module.blocks[3]):
            block.kept.pop().data.mul_(0.9)
        return y

    return trained(run, net(LaterData), forward=forward)


@program(
    family,
    "the batch is written through `.data` after the forward: a ring buffer of inputs that is used again",
    ALL,
    differs=dict.fromkeys(("over the tiers", PAIRS[1]), BEHIND_VERSIONS),
)
def batch_is_reused(run):
    ring = torch.zeros(160, WIDTH)

    def forward(engine, x):
        ring.data.copy_(x)
        y = engine(ring)
        ring.data.mul_(0.5)
        return y

    return trained(run, Net, forward=forward)


# Copies of modules, and forwards that are exchanged.


@program(family, "a shallow copy of a block gets a layer of its own, and is called as a branch", PLAIN)
def shallow_copy_of_block(run):
    engine = run.engine()
    twin = copy.copy(engine.module.blocks[1])
    twin._modules = dict(twin._modules)
    torch.manual_seed(9)
    twin.up = nn.Linear(WIDTH, WIDTH)
    found = []
    for step in range(3):
        loss = (engine(batch(step)) + twin(batch(step))).square().mean()
        loss.backward()
        found += [loss.item(), twin.up.weight.grad.clone(), stepped(engine)]
    return found, values(engine.module)


@program(
    family, "a block is replicated as DataParallel does it (`_replicate_for_data_parallel`), with scaled weights", PLAIN
)
def replica_of_block(run):
    engine = run.engine()
    found = []
    for step in range(3):
        block = engine.module.blocks[2]
        replica = block._replicate_for_data_parallel()
        for name, child in block.named_children():
            other = child._replicate_for_data_parallel()
            for key, parameter in child._parameters.items():
                setattr(other, key, parameter * 0.5)
            replica._modules[name] = other
        x = batch(step)
        loss = (engine(x) + replica(x)).square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
    return found, values(engine.module)


@program(family, "forwards of two blocks change places: `a.forward, b.forward = b.forward, a.forward`", PLAIN)
def forwards_change_places(run):
    engine = run.engine()
    found = []
    for step in range(4):
        if step in (1, 3):
            a, b = engine.module.blocks[0], engine.module.blocks[3]
            a.forward, b.forward = b.forward, a.forward
        loss = engine(batch(step)).square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
    return found, values(engine.module)


@program(family, "a forward is wrapped in each step by one that scales, bound to the block by `types.MethodType`", ALL)
def forward_is_wrapped_again(run):
    engine = run.engine()
    found = []
    for step in range(3):
        block = engine.module.blocks[1]
        block.forward = types.MethodType(lambda self, x, before=block.forward: 0.9 * before(x), block)

        def body(index, engine=engine):
            loss = engine(batch(index)).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
    return found, values(engine.module)


class Doubled(Block):
    def forward(self, x):
        return super().forward(x) * 2


@program(family, "the class of a block is exchanged between steps: `block.__class__ = Other`", RESUMED)
def class_is_exchanged(run):
    engine = run.engine()
    found = []
    for step in range(4):
        engine.module.blocks[step].__class__ = Doubled
        loss = engine(batch(step)).square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
    return found, values(engine.module)


@program(family, "pruning after wrapping: `prune.l1_unstructured` on layers of two blocks, then made permanent", PLAIN)
def pruned_after_wrapping(run):
    engine = run.engine()
    found = []
    for step in range(4):
        if step == 1:
            prune.l1_unstructured(engine.module.blocks[1].up, "weight", amount=0.3)
        if step == 3:
            prune.remove(engine.module.blocks[1].up, "weight")
        loss = engine(batch(step)).square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
    return found, values(engine.module)


# Results that come later.


class Lazy(Block):
    def forward(self, x):
        return lambda: x + self.down(torch.tanh(self.up(x)))


class Streams(Block):
    def forward(self, x):
        h = torch.tanh(F.linear(x, self.up.weight, self.up.bias))
        yield h.mean()
        yield x + F.linear(h, self.down.weight, self.down.bias)


class LaterNet(Net):
    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.blocks[1], self.blocks[3] = Lazy(), Streams()

    def forward(self, x):
        x = self.first(x)
        extra = 0
        for block in self.blocks:
            y = block(x)
            if callable(y):
                y = y()
            if isinstance(y, types.GeneratorType):
                extra = extra + next(y)
                y = next(y)
            x = y
        return self.last(x) + extra


@program(family, "a block returns a function that computes later, another one is a generator", ALL)
def results_come_later(run):
    return trained(run, LaterNet)


class Coroutine(Block):
    async def half(self, x):
        return torch.tanh(self.up(x))

    async def forward(self, x):
        return x + self.down(await self.half(x))


class AwaitingNet(Net):
    def __init__(self):
        super().__init__(Coroutine)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            try:
                block(x).send(None)
            except StopIteration as end:
                x = end.value
        return self.last(x)


@program(family, "the forward of a block is a coroutine, which the model drives by hand", ALL)
def forward_is_coroutine(run):
    return trained(run, AwaitingNet)


# Functions.


class Odd(torch.autograd.Function):
    """Two outputs, one of which is not differentiable, gradients that may be None, an input that is written."""

    @staticmethod
    def forward(ctx, x, weight, scratch):
        ctx.set_materialize_grads(False)
        scratch.add_(1)
        ctx.mark_dirty(scratch)
        y = x @ weight.t()
        top = y.argmax(1)
        ctx.mark_non_differentiable(top)
        ctx.save_for_backward(x, weight)
        return y, top, scratch

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx, gradient, _, __):
        if gradient is None:
            return None, None, None
        x, weight = ctx.saved_tensors
        return (
            gradient @ weight if ctx.needs_input_grad[0] else None,
            gradient.t() @ x if ctx.needs_input_grad[1] else None,
            None,
        )


class UsesOdd(Block):
    def forward(self, x):
        y, top, scratch = Odd.apply(torch.tanh(self.up(x)), self.down.weight, torch.zeros(3))
        return x + y * (1 + 0.01 * top.unsqueeze(1)) * scratch[0]


@program(family, "a Function with an output that is not differentiable, a written input, and gradients of None", ALL)
def odd_function(run):
    return trained(run, net(UsesOdd))


class Quantises(torch.autograd.Function):
    @staticmethod
    def forward(x, weight, scale):
        return F.linear(x, (weight / scale).round() * scale)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.x, ctx.weight, _ = inputs
        ctx.kept = output

    @staticmethod
    def backward(ctx, gradient):
        return gradient @ ctx.weight, gradient.t() @ ctx.x, (gradient * ctx.kept).mean()


class UsesQuantises(Block):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(0.01))
        self.empty = nn.Parameter(torch.empty(0, WIDTH))

    def forward(self, x):
        y = Quantises.apply(torch.tanh(self.up(x)), self.down.weight, self.scale)
        return x + y + F.linear(x, torch.cat([self.down.weight, self.empty]))


@program(family, "a Function by `setup_context` keeps weight and output as attributes, scales have no dimension", ALL)
def quantising_function(run):
    return trained(run, net(UsesQuantises))


class Straight(Block):
    """Straight-through weights, a detached copy that is kept, and a penalty by hand in a hook of the output."""

    def forward(self, x):
        weight = self.up.weight
        hard = weight + (weight.sign() * weight.abs().mean() - weight).detach()
        y = self.down(torch.tanh(F.linear(x, hard, self.up.bias)))
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient + 1e-3 * weight.detach().mean())
        return x + y


@program(family, "straight-through weights, and a hook on the output that reads the weight in backward", ALL)
def straight_through_with_hook(run):
    return trained(run, net(Straight))


# Calls.


@program(family, "`functional_call` with other weights for one block, whose gradients go elsewhere", PLAIN)
def other_weights_for_a_block(run):
    engine = run.engine()
    torch.manual_seed(6)
    own = {"blocks.1.up.weight": torch.randn(WIDTH, WIDTH).mul_(0.1).requires_grad_()}
    found = []
    for step in range(3):
        x = batch(step)
        loss = engine(x).square().mean() + torch.func.functional_call(engine.module, own, (x,)).square().mean()
        loss.backward()
        found += [loss.item(), own["blocks.1.up.weight"].grad.clone(), stepped(engine)]
        own["blocks.1.up.weight"].grad = None
    return found, values(engine.module)


@program(family, "two backwards of one graph by `retain_graph`, the weights of losses change between them", ALL)
def two_weighted_backwards(run):
    engine = run.engine()
    found = []
    for step in range(3):

        def body(index, engine=engine):
            y = engine(batch(index))
            y.square().mean().backward(retain_graph=True)
            loss = y.abs().mean() * (1 + index)
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
    return found, values(engine.module)


class Fails(Block):
    fails = False

    def forward(self, x):
        if Fails.fails and torch.is_grad_enabled():
            raise ValueError("now")
        return super().forward(x)


@program(family, "a block raises in every second forward, the batch is skipped and its gradients are dropped", PLAIN)
def every_second_forward_raises(run):
    engine = run.engine(net(Fails)())
    found = []
    for step in range(5):
        Fails.fails = step % 2 == 1
        try:
            loss = engine(batch(step)).square().mean()
            loss.backward()
        except ValueError:
            found.append("raised")
            engine.optimizer.zero_grad()
            continue
        found += [loss.item(), stepped(engine)]
    Fails.fails = False
    return found, values(engine.module)


_SCALE = contextvars.ContextVar("scale", default=1.0)


class ByVariable(Block):
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) * _SCALE.get()


@program(family, "the loop moves a context variable after each micro-batch, a block reads it", ALL)
def context_variable_of_loop(run):
    _SCALE.set(1.0)
    engine = run.engine(net(ByVariable)())
    found = []
    for step in range(3):

        def body(index, engine=engine):
            loss = engine(batch(index)).square().mean()
            loss.backward()
            _SCALE.set(_SCALE.get() * 0.9)
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
    return found, values(engine.module), _SCALE.get()


@program(
    family,
    "a mode that the loop leaves on: `set_grad_enabled(False)` from the second micro-batch of a step on",
    ALL,
    refused=dict.fromkeys(("together", *PAIRS[:2]), "leaves a mode of torch"),
)
def grad_mode_left_off(run):
    engine = run.engine()
    found = []
    for step in range(3):
        torch.set_grad_enabled(True)

        def body(index, engine=engine):
            loss = engine(batch(index)).square().mean()
            if loss.requires_grad:
                loss.backward()
            torch.set_grad_enabled(index % 3 != 1)
            return loss.item()

        found += run.accumulate(engine, [3 * step, 3 * step + 1, 3 * step + 2], body)
        torch.set_grad_enabled(True)
        found.append(stepped(engine))
    return found, values(engine.module)


class Teaches(Block):
    """Asks a teacher, a model of another engine, which it knows by a list."""

    def __init__(self):
        super().__init__()
        self.teacher = []

    def forward(self, x):
        with torch.no_grad():
            hint = self.teacher[0](x)
        return x + self.down(torch.tanh(self.up(x))) + 0.1 * hint


@program(family, "a block asks another engine's model in its forward, which is trained in turn with it", ALL)
def teacher_in_block(run):
    torch.manual_seed(8)
    teacher = run.engine(Net())
    model = net(Teaches)()
    for each in (model.blocks[1], model.blocks[3]):
        each.teacher.append(teacher)
    engine = run.engine(model)
    found = []
    for step in range(3):

        def body(index, engine=engine):
            loss = engine(batch(index)).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
        loss = teacher(batch(90 + step)).square().mean()
        loss.backward()
        found += [loss.item(), stepped(teacher)]
    return found, values(engine.module), values(teacher.module)
