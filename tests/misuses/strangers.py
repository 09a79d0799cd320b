"""Programs of strangers: what a unit's forward, a parameter or a loop may be that nobody has thought of. The optimizer
is torch's own arithmetic, so that bits are compared."""

from __future__ import annotations

import copy
import functools
import random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts, set_checkpoint_early_stop

from misuses.case import Family
from misuses.place import gradients, values

family = Family("strangers")

WIDTH = 32


class Exact(torch.optim.SGD):
    """It has no kernel: a step is the operations of torch."""


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x)))


class Net(nn.Module):
    def __init__(self, make=Block) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(5))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def batch(index, rows=4):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(index))


def same_bits(title, **options):
    return family.works(title, rtol=0.0, atol=0.0, **options)


def trained(place, model, *, call=None, penalty=None, between=None, after=None, steps=3, data=batch, **options):
    """Losses, the last gradients, and all values. ``call`` is the forward, ``between`` comes after backward and
    ``after`` after a step; what they give is compared, too."""
    options = {"optimizer": Exact, "lr": 0.05, "optimizer_options": {"momentum": 0.9}, **options}
    engine = place.wrap(model, **options)
    model, found, last = engine.module, [], {}
    for step in range(steps):
        x = data(step)
        loss = (engine(x) if call is None else call(model, x)).square().mean()
        if penalty is not None:
            loss = loss + penalty(model)
        engine.optimizer.zero_grad()
        loss.backward()
        found += [loss.item(), None if between is None else between(model, step)]
        last = gradients(model)
        engine.optimizer.step()
        del loss
        found.append(None if after is None else after(model, step))
    return found, last, values(model)


# Graphs within a forward.


class OfEnergy(Block):
    """The gradient of an energy, which is differentiated once more by the training."""

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.down(torch.tanh(self.up(x)))).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - 0.1 * force


@same_bits("a block gives the gradient of its own energy, by `autograd.grad(create_graph=True)` in its forward")
def energy_in_block(place):
    def evaluated(model, step):
        with torch.no_grad():
            return model(batch(9))

    return trained(place, Net(OfEnergy), after=evaluated)


class Curved(Block):
    def forward(self, x):
        x = x * 1.0 if x.requires_grad else x.clone().requires_grad_()
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(torch.tanh(self.up(x)).square().sum(), x, create_graph=True)
            (curve,) = torch.autograd.grad(slope.square().sum(), x, create_graph=True)
        return x + 0.1 * self.down(slope) + 0.1 * curve


@same_bits("a block that differentiates twice in its forward")
def curvature_in_block(place):
    return trained(place, Net(Curved))


class FastWeights(Block):
    def forward(self, x):
        weight = self.up.weight
        inner = F.linear(x.detach(), weight).square().mean()
        (gradient,) = torch.autograd.grad(inner, weight, create_graph=True)
        return x + self.down(torch.tanh(F.linear(x, weight - 0.1 * gradient, self.up.bias)))


@same_bits("fast weights in a block: a step of its own loss in each forward, second order (MAML)")
def fast_weights_in_block(place):
    return trained(place, Net(FastWeights))


class TestTime(Block):
    def forward(self, x):
        gradient = torch.func.grad(lambda weight: F.linear(x, weight).square().mean())(self.up.weight)
        return x + self.down(torch.tanh(F.linear(x, self.up.weight - 0.1 * gradient, self.up.bias)))


@same_bits("`torch.func.grad` by a weight in a block's forward (test-time training)")
def func_grad_in_block(place):
    return trained(place, Net(TestTime))


class Jacobian(Block):
    def forward(self, x):
        slopes = torch.func.vmap(torch.func.jacrev(lambda row: torch.tanh(self.up(row))))(x)
        return x + self.down(torch.tanh(self.up(x))) + 0.01 * slopes.diagonal(dim1=-2, dim2=-1)


@same_bits("`vmap(jacrev(...))` in a block's forward (a log determinant)")
def jacobian_in_block(place):
    return trained(place, Net(Jacobian))


# Functions of the user's.


class ByAttribute(torch.autograd.Function):
    """Keeps what it needs as attributes, and not by ``save_for_backward``."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.kept = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.kept
        return gradient @ weight, gradient.t() @ x


class KeptByAttribute(Block):
    def forward(self, x):
        return x + ByAttribute.apply(torch.tanh(self.up(x)), self.down.weight)


@same_bits("a Function that keeps the weight as an attribute of `ctx`")
def weight_kept_by_function(place):
    return trained(place, Net(KeptByAttribute))


class MainGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        ctx.parameter = weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        if not hasattr(ctx.parameter, "main_grad"):
            ctx.parameter.main_grad = torch.zeros_like(weight)
        ctx.parameter.main_grad.add_(gradient.t() @ x)
        return gradient @ weight, None


class WithMainGradient(Block):
    def forward(self, x):
        return x + MainGradient.apply(torch.tanh(self.up(x)), self.down.weight)


@same_bits("a Function adds a weight's gradient to `weight.main_grad`, which becomes `.grad` before the step")
def main_grad_by_function(place):
    def given(model, step):
        for block in model.blocks:
            block.down.weight.grad = block.down.weight.main_grad.clone()
            block.down.weight.main_grad.zero_()

    return trained(place, Net(WithMainGradient), between=given)


class StepInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.x, ctx.weight = x, weight
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        of_input = gradient @ ctx.weight
        with torch.no_grad():
            ctx.weight.sub_(gradient.t() @ ctx.x, alpha=1e-2)
        return of_input, None


class Stepping(Block):
    def forward(self, x):
        return x + StepInBackward.apply(torch.tanh(self.up(x)), self.down.weight)


@same_bits("a Function that takes a step with its weight in its backward")
def step_in_function(place):
    return trained(place, Net(Stepping))


# Memory and layout.


@family.said("a convolutional model in channels_last: weights are contiguous in an engine", "contiguous", rtol=1e-4)
def convolutions_in_channels_last(place):
    torch.manual_seed(0)
    layers = [nn.Sequential(nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()) for _ in range(5)]
    model = nn.Sequential(*layers, nn.Flatten(), nn.Linear(256, 4)).to(memory_format=torch.channels_last)

    def images(index):
        found = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(index))
        return found.to(memory_format=torch.channels_last)

    return trained(place, model, data=images)


@family.said("weights that are transposed views are contiguous in an engine", "contiguous")
def weights_transposed_before(place):
    model = Net()
    for block in model.blocks:
        block.up.weight = nn.Parameter(block.up.weight.detach().t())
    return trained(place, model)


@family.said("`model.to(memory_format=torch.channels_last)` after wrapping", "contiguous", rtol=1e-4)
def channels_last_afterwards(place):
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Conv2d(4, 4, 3, padding=1) for _ in range(5)])

    def converted(model, step):
        model.to(memory_format=torch.channels_last)

    return trained(place, model, after=converted, data=lambda index: batch(index, 16).view(2, 4, 8, 8))


@family.refused("`torch.utils.swap_tensors` of two of the model's parameters", "exchanged with")
def swapped_parameters(place):
    def swapped(model, step):
        for block in model.blocks:
            block.up.weight.grad = None
        if step == 1:
            torch.utils.swap_tensors(model.blocks[0].up.weight, model.blocks[1].up.weight)

    return trained(place, Net(), after=swapped)


class Recorded(Block):
    """Counts, lists and registers in its forward."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.lists: dict[str, list[Any]] = {"sums": []}

    def forward(self, x):
        self.seen.add_(x.detach().mean(0))
        self.lists["sums"].append(x.detach().sum())
        self.register_buffer("latest", x.detach()[0])
        return super().forward(x)


@family.said(
    "`model.float()` with `torch.__future__.set_swap_module_params_on_conversion(True)`",
    "no longer in the model",
)
def swapped_by_a_conversion(place):
    def converted(model, step):
        torch.__future__.set_swap_module_params_on_conversion(True)
        model.float()

    return [loss for loss in trained(place, Net(), after=converted)[0] if loss is not None]


@same_bits("blocks that are recomputed take jacobians by `torch.func`")
def jacobian_in_recomputed(place):
    options = {"activations": "recompute"} if place.has_engine else {}
    return trained(place, Net(Jacobian), **options)


@same_bits("blocks that are recomputed give the gradients of their own energies")
def energy_in_recomputed(place):
    options = {"activations": "recompute"} if place.has_engine else {}
    return trained(place, Net(OfEnergy), **options)


@same_bits("blocks that are recomputed register buffers and append to lists in a dict in their forward")
def recorded_in_recomputed(place):
    def lists(model, step):
        return [block.lists for block in model.blocks]

    options = {"activations": "recompute"} if place.has_engine else {}
    return trained(place, Net(Recorded), after=lists, **options)


class LateClamp(Block):
    num_calls = 0

    def forward(self, x):
        self.num_calls += 1
        if self.num_calls > 2:
            self.up.weight.data.clamp_(-0.1, 0.1)
        return super().forward(x)


@family.refused("a block that is recomputed writes to the bytes of `.data` after a warm-up", "keep")
def late_clamp_in_recomputed(place):
    options = {"activations": "recompute"} if place.has_engine else {}
    return trained(place, Net(LateClamp), **options)


# Checkpoints of the user's.


@same_bits("selective checkpoints whose policy keeps products")
def selective_checkpoint(place):
    contexts = functools.partial(
        create_selective_checkpoint_contexts, [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
    )

    def call(model, x):
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
        return model.last(x)

    return trained(place, Net(), call=call)


@same_bits("checkpoints that run to their end in backward: `set_checkpoint_early_stop(False)`")
def checkpoint_to_the_end(place):
    def call(model, x):
        with set_checkpoint_early_stop(False):
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=False)
        return model.last(x)

    return trained(place, Net(), call=call)


@same_bits("a checkpointed function raises when it is run again, and training goes on")
def checkpoint_that_raises(place):
    engine = place.wrap(Net(), optimizer=Exact, lr=0.05)
    model, calls, found = engine.module, [], []

    def call(block, x):
        calls.append(block)
        if len(calls) == 2:
            raise KeyError("the second run")
        return block(x)

    for step in range(3):
        loss = model.last(checkpoint(call, model.blocks[0], batch(step), use_reentrant=False)).square().mean()
        engine.optimizer.zero_grad()
        found += [place.attempt(loss.backward), gradients(model)]
        engine.optimizer.step()
    return found, values(model)


# Loops.


@same_bits("a backward within a hook of another one, of another graph")
def backward_in_a_hook(place):
    def call(model, x):
        output, other, done = model(x), model.blocks[0](x).sum() * 1e-2, []

        def hook(gradient):
            if not done:
                done.append(True)
                other.backward()

        output.register_hook(hook)
        return output

    return trained(place, Net(), call=call)


@same_bits("gradients of many directions in one backward: `is_grads_batched=True`")
def batched_gradients(place):
    def directions(model, step):
        x = batch(step).requires_grad_()
        return torch.autograd.grad(model(x), x, torch.eye(128).view(128, 4, WIDTH)[:6], is_grads_batched=True)[0]

    return trained(place, Net(), after=directions)


@same_bits("each of two losses goes backward into its own half of the parameters")
def losses_by_inputs(place):
    engine = place.wrap(Net(), optimizer=Exact, lr=0.05)
    model = engine.module
    for step in range(3):
        engine.optimizer.zero_grad()
        output = engine(batch(step))
        output.square().mean().backward(inputs=list(model.blocks[:3].parameters()), retain_graph=True)
        output.abs().mean().backward(inputs=list(model.blocks[3:].parameters()))
        engine.optimizer.step()
    return values(model)


@same_bits("accumulation over batches of other sizes, one of them empty")
def accumulated_with_an_empty_batch(place):
    engine = place.wrap(Net(), optimizer=Exact, lr=0.05)
    found = []
    for _ in range(2):
        engine.optimizer.zero_grad()
        for rows in (4, 1, 0, 7):
            loss = engine(batch(rows, rows)).square().sum()
            loss.backward()
            found.append(loss.item())
        engine.optimizer.step()
    return found, values(engine.module)


@same_bits("truncated backpropagation through time: the state is carried over windows of three calls")
def windows_of_calls(place):
    engine = place.wrap(Net(), optimizer=Exact, lr=0.05)
    found, state = [], torch.zeros(4, WIDTH)
    for window in range(3):
        loss = torch.zeros(())
        for call in range(3):
            state = engine(batch(3 * window + call) + state)
            loss = loss + state.square().mean()
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        state = state.detach()
        found.append(loss.item())
    return found, values(engine.module)


@same_bits("parameters are frozen and thawed in their own forward, in turn")
def toggled_in_forward(place):
    class Toggled(Block):
        num_calls = 0

        def forward(self, x):
            self.num_calls += 1
            self.up.weight.requires_grad_(self.num_calls % 2 == 1)
            return super().forward(x)

    return trained(place, Net(Toggled), steps=4)


@same_bits("`register_parameter` after two steps, trained by an optimizer of its own")
def late_parameter_with_its_optimizer(place):
    class Shifted(Block):
        def forward(self, x):
            found = super().forward(x)
            return found + self.shift if hasattr(self, "shift") else found

    optimizers = []

    def after(model, step):
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 1:
            for block in model.blocks:
                block.register_parameter("shift", nn.Parameter(torch.zeros(WIDTH)))
            optimizers.append(torch.optim.SGD([block.shift for block in model.blocks], lr=0.1))

    return trained(place, Net(Shifted), after=after, steps=4)


@same_bits("progressive stacking: a deep copy of the last block is appended, and trained by an optimizer of its own")
def stacked_block(place):
    optimizers = []

    def after(model, step):
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        if step == 0:
            model.blocks.append(copy.deepcopy(model.blocks[-1]))
            optimizers.append(torch.optim.SGD(model.blocks[-1].parameters(), lr=0.1))

    return trained(place, Net(), after=after, steps=4)


@same_bits("LayerDrop: blocks are left out at random, others in each step")
def blocks_left_out(place):
    draws = random.Random(3)

    def call(model, x):
        x = model.first(x)
        for block in model.blocks:
            x = block(x) if draws.random() < 0.6 else x
        return model.last(x)

    return trained(place, Net(), call=call, steps=4)


@same_bits("a block's layer is an `nn.Identity` for one call, and itself for the next, in one loss")
def layer_put_aside(place):
    def call(model, x):
        layer = model.blocks[1].down
        model.blocks[1].down = nn.Identity()
        without = model(x)
        model.blocks[1].down = layer
        return without + model(x)

    return trained(place, Net(), call=call)
