"""Ways to differentiate: forward mode, transforms, edges of graphs, operators and Functions of one's own. The optimizer
is torch's own arithmetic, so that bits are compared."""

from __future__ import annotations

import contextvars
import copy
import random

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.autograd.graph import get_gradient_edge
from torch.func import functional_call
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from misuses import joints
from misuses.case import Family
from misuses.exact import step, wrapped
from misuses.joints import ROWS, program, stepped
from misuses.loops_of_today import loop, mean
from misuses.place import gradients, values
from misuses.strangers import WIDTH, Block, Net, batch, trained

family = Family("calculus", preload=("torch.fx.experimental.proxy_tensor", "torch._higher_order_ops"))
same_bits = family.same_bits


# Forward mode.


@same_bits(
    "MeanFlow: the target is the tangent of `torch.func.jvp(model, x, v)`, the loss goes backward through the value"
)
def mean_flow(place):
    engine, model = wrapped(place)
    found = []
    for index in range(3):
        x, v = batch(index), batch(index + 50)
        u, tangent = torch.func.jvp(model, (x,), (v,))
        found.append(step(engine, (u - (v - 0.5 * tangent).detach()).square().mean()))
    return found, values(model)


@program(
    family,
    "MeanFlow of today: `torch.func.jvp` of a model in two arguments, activations of 20 KiB, accumulated",
    ("plain", "recomputed", "over the tiers", "mixed"),
)
def mean_flow_of_two_arguments(run):
    engine, found = run.engine(), []
    for index in range(4):
        x, v, t = joints.batch(index), joints.batch(index + 50), torch.rand(ROWS, 1)

        def velocity(z, t):
            return engine(z + torch.sin(t))

        u, tangent = torch.func.jvp(velocity, ((1 - t) * x + t * v, t), (v - x, torch.ones_like(t)))
        loss = (u - (v - x - t * tangent).detach()).square().mean()
        loss.backward()
        found.append(loss.item())
        if index % 2:
            found.append(stepped(engine))
    return found, values(engine.module)


@program(
    family,
    "`torch.func.vmap` over the whole model, whose activations are of 10 KiB a sample and more together",
    ("plain", "recomputed", "over the tiers", "mixed"),
)
def model_under_vmap(run):
    engine, found = run.engine(), []
    for index in range(3):
        torch.func.vmap(engine.module)(joints.batch(index).view(2, ROWS // 2, -1)).square().mean().backward()
        found.append(stepped(engine))
    return found, values(engine.module)


@same_bits("a loss over the tangent of `torch.func.jvp`, backward through it (sCM, PINN by forward mode)")
def tangent_trains(place):
    engine, model = wrapped(place)
    found = []
    for index in range(3):
        _, tangent = torch.func.jvp(model, (batch(index),), (batch(index + 50),))
        found.append(step(engine, (tangent - 1).square().mean()))
    return found, values(model)


@same_bits("dual numbers over the input by `forward_ad`, the loss is of the tangent, backward through it")
def dual_trains(place):
    engine, model = wrapped(place)
    found = []
    for index in range(3):
        with forward_ad.dual_level():
            out = forward_ad.unpack_dual(engine(forward_ad.make_dual(batch(index), batch(index + 50))))
            found.append(step(engine, out.primal.square().mean() + out.tangent.square().mean()))
    return found, values(model)


@same_bits("forward gradients: a tangent for each weight, `jvp` by `functional_call`, no backward")
def forward_gradients(place):
    engine, model = wrapped(place)
    found = []
    for index in range(3):
        draw = torch.Generator().manual_seed(index)
        weights = {name: p.detach() for name, p in model.named_parameters()}
        tangents = {name: torch.randn(p.shape, generator=draw) for name, p in weights.items()}
        loss, slope = torch.func.jvp(
            lambda w, x: functional_call(model, w, (x,)).square().mean(),
            (weights, batch(index)),
            (tangents, torch.zeros(4, WIDTH)),
        )
        for name, p in model.named_parameters():
            p.grad = slope * tangents[name]
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        found += [loss, slope]
    return found, values(model)


@same_bits("`torch.func.linearize` of the model, its map is called for two directions after a step")
def linearized(place):
    engine, model = wrapped(place)
    out, push = torch.func.linearize(lambda x: model(x), batch(0))
    loss = step(engine, engine(batch(1)).square().mean())
    return out, push(batch(2)), loss, values(model)


@family.refused(
    "`torch.func.vjp` of the model by its input; the pullback is called twice, and after a step",
    "not wrapped",
)
def pullback_after_step(place):
    engine, model = wrapped(place)
    out, pull = torch.func.vjp(lambda x: model(x), batch(0))
    first = pull(torch.ones_like(out))[0], pull(batch(5))[0]
    return out, first, step(engine, engine(batch(1)).square().mean()), values(model)


@family.works_or_refused(
    "`torch.func.grad_and_value(has_aux=True)` over detached weights gives `p.grad`",
    "not wrapped",
)
def grad_and_value_with_aux(place):
    engine, model = wrapped(place)
    found = []

    def loss_of(weights, x):
        out = functional_call(model, weights, (x,))
        return out.square().mean(), out

    for index in range(3):
        weights = {name: p.detach() for name, p in model.named_parameters()}
        grads, (loss, out) = torch.func.grad_and_value(loss_of, has_aux=True)(weights, batch(index))
        for name, p in model.named_parameters():
            p.grad = grads[name]
        engine.optimizer.step()
        found += [loss, out]
    return found, values(model)


@family.works_or_refused(
    "per-sample gradients of the last layer, clipped, by `vmap(grad(functional_call))` over one block of the model",
    "not wrapped",
)
def per_sample_of_last(place):
    engine, model = wrapped(place)
    found = []
    for index in range(3):
        with torch.no_grad():
            hidden = model.first(batch(index))
            for block in model.blocks:
                hidden = block(hidden)
        weights = {name: p.detach() for name, p in model.last.named_parameters()}
        each = torch.func.vmap(
            torch.func.grad(lambda w, x: functional_call(model.last, w, (x,)).square().mean()), in_dims=(None, 0)
        )(weights, hidden)
        norms = torch.stack([g.flatten(1).norm(dim=1) for g in each.values()]).norm(dim=0)
        for name, p in model.last.named_parameters():
            factor = (0.1 / norms).clamp(max=1).view(-1, *[1] * (each[name].dim() - 1))
            p.grad = (each[name] * factor).mean(0)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        found.append(norms)
    return found, values(model)


@same_bits("`make_fx` traces the model and the graph is run")
def traced_by_make_fx(place):
    from torch.fx.experimental.proxy_tensor import make_fx

    engine, model = wrapped(place)
    first = step(engine, engine(batch(0)).square().mean())
    graph = make_fx(lambda x: model(x))(batch(1))
    return first, graph(batch(2)), values(model)


@same_bits("`torch.func.functionalize` of the model with an in-place activation")
def functionalized(place):
    engine, model = wrapped(place)

    def call(x):
        out = model(x).clone()
        return out.relu_()

    found = [step(engine, torch.func.functionalize(call)(batch(index)).square().mean()) for index in range(3)]
    return found, values(model)


# Edges and graphs.


@same_bits("`backward(inputs=[...])` and `autograd.grad` with gradient edges of activations")
def gradient_edges(place):
    engine, model = wrapped(place)
    found = []
    for index in range(3):
        hidden = model.blocks[0](model.first(batch(index)))
        edge = get_gradient_edge(hidden)
        out = hidden
        for block in model.blocks[1:]:
            out = block(out)
        loss = model.last(out).square().mean()
        (by_edge,) = torch.autograd.grad(loss, [edge], retain_graph=True)
        found += [by_edge, step(engine, loss)]
    return found, values(model)


@family.refused(
    "the gradient edge of a parameter outside of a forward: `get_gradient_edge(weight)`",
    "register_post_accumulate_grad_hook",
)
def gradient_edge_of_parameter(place):
    engine, model = wrapped(place)
    loss = engine(batch(0)).square().mean()
    edge = get_gradient_edge(model.blocks[1].up.weight)
    (found,) = torch.autograd.grad(loss, [edge], retain_graph=True)
    return found, step(engine, loss), values(model)


@same_bits("pipelined stages: each stage's input is a detached leaf, backward of the last first, gradients handed on")
def pipelined_stages(place):
    engine, model = wrapped(place)
    stages = [lambda x: model.blocks[0](model.first(x)), lambda x: model.blocks[2](model.blocks[1](x)), None]
    stages[2] = lambda x: model.last(model.blocks[4](model.blocks[3](x)))
    found = []
    for index in range(2):
        micro = [batch(10 * index + i) for i in range(3)]
        kept = []
        for x in micro:  # all forwards first
            inputs, outputs = [], []
            for stage in stages:
                x = x.detach().requires_grad_()
                inputs.append(x)
                x = stage(x)
                outputs.append(x)
            kept.append((inputs, outputs))
        for inputs, outputs in kept:
            loss = outputs[-1].square().mean()
            loss.backward()
            for stage in (1, 0):
                torch.autograd.backward(outputs[stage], inputs[stage + 1].grad)
            found.append((loss.item(), inputs[0].grad))
        found.append(gradients(model))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(model)


@same_bits("zero-bubble: gradients of inputs first, of weights later, by `autograd.grad` over parts of one graph")
def zero_bubble(place):
    engine, model = wrapped(place)
    found = []
    for index in range(3):
        x = batch(index).requires_grad_()
        loss = engine(x).square().mean()
        (of_input,) = torch.autograd.grad(loss, x, retain_graph=True)
        engine.optimizer.zero_grad()
        loss.backward(inputs=list(model.parameters()))
        found += [of_input, gradients(model)]
        engine.optimizer.step()
    return found, values(model)


@same_bits(
    "GradCache with two towers of one model: forward without a graph, gradients of representations, forward again"
)
def gradient_cache_with_dropout(place):
    class Noisy(Net):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.2, self.training)

    engine, model = wrapped(place, Noisy())
    found = []
    for index in range(3):
        parts, states, kept = batch(index, 8).chunk(4), [], []
        for part in parts:
            states.append(torch.get_rng_state())
            with torch.no_grad():
                kept.append(model(part))
        codes = torch.cat(kept).requires_grad_()
        loss = F.cross_entropy(codes @ codes.t(), torch.arange(8).roll(1))
        loss.backward()
        engine.optimizer.zero_grad()
        for part, state, gradient in zip(parts, states, codes.grad.chunk(4), strict=True):
            with torch.random.fork_rng():
                torch.set_rng_state(state)
                (model(part) * gradient).sum().backward()
        found += [loss.item(), gradients(model)]
        engine.optimizer.step()
    return found, values(model)


@same_bits("a surrogate in the loss: the straight-through estimator over a hard choice of blocks")
def gumbel_over_blocks(place):
    class Chosen(Net):
        def __init__(self):
            super().__init__()
            self.logits = nn.Parameter(torch.zeros(3, 5))

        def forward(self, x):
            x = self.first(x)
            for logits in self.logits:
                weights = F.gumbel_softmax(logits, hard=True)
                x = sum(w * block(x) for w, block in zip(weights, self.blocks, strict=True))
            return self.last(x)

    return trained(place, Chosen())


# Functions and operators of one's own.


class ChunkedLoss(torch.autograd.Function):
    """The gradients of hidden states and of the head are computed in the forward, chunk by chunk (Liger)."""

    @staticmethod
    def forward(ctx, hidden, weight, target):
        loss, of_hidden, of_weight = 0.0, [], torch.zeros_like(weight)
        for rows, wanted in zip(hidden.chunk(2), target.chunk(2), strict=True):
            with torch.enable_grad():
                rows, copied = rows.detach().requires_grad_(), weight.detach().requires_grad_()
                part = F.cross_entropy(F.linear(rows, copied), wanted, reduction="sum")
            one, two = torch.autograd.grad(part, (rows, copied))
            of_hidden.append(one)
            of_weight += two
            loss = loss + part.detach()
        ctx.save_for_backward(torch.cat(of_hidden), of_weight)
        return loss

    @staticmethod
    def backward(ctx, gradient):
        of_hidden, of_weight = ctx.saved_tensors
        return of_hidden * gradient, of_weight * gradient, None


@same_bits("a fused loss over the head's weight, which the head itself never sees (Liger, cut cross entropy)")
def fused_head_loss(place):
    engine, model = wrapped(place)
    found = []
    for index in range(3):
        hidden = model.first(batch(index))
        for block in model.blocks:
            hidden = block(hidden)
        found.append(step(engine, ChunkedLoss.apply(hidden, model.last.weight, torch.arange(4))))
    return found, values(model)


@same_bits("a fused loss over the head's weight within the model's forward, with a mask that leaves no token once")
def fused_head_loss_inside(place):
    class Fused(Net):
        def forward(self, x, target):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            if (target < 0).all():
                return x.sum() * 0
            return ChunkedLoss.apply(x, self.last.weight, target)

    engine, model = wrapped(place, Fused())
    targets = [torch.arange(4), torch.full((4,), -1), torch.arange(4) + 3]
    return [step(engine, engine(batch(i), target)) for i, target in enumerate(targets)], values(model)


class SetsMaterialize(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, weight, bias)
        out = F.linear(x, weight, bias)
        mask = out > 0
        ctx.mark_non_differentiable(mask)
        return out, mask, out.sum()

    @staticmethod
    def backward(ctx, of_out, of_mask, of_sum):
        assert of_mask is None and of_sum is None
        x, weight, _ = ctx.saved_tensors
        need = ctx.needs_input_grad
        return (
            of_out @ weight if need[0] else None,
            of_out.t() @ x if need[1] else None,
            of_out.sum(0) if need[2] else None,
        )


class WithMask(Block):
    def forward(self, x):
        out, mask, _ = SetsMaterialize.apply(x, self.up.weight, self.up.bias)
        return x + self.down(out * mask)


@same_bits(
    "a Function with several outputs, some without gradients, that looks at `needs_input_grad`; a bias is frozen"
)
def function_of_many_outputs(place):
    model = Net(WithMask)
    model.blocks[1].up.bias.requires_grad_(False)
    model.blocks[2].up.weight.requires_grad_(False)
    return trained(place, model)


class DirtyInput(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        ctx.mark_dirty(x)
        ctx.save_for_backward(scale)
        return x.mul_(scale)

    @staticmethod
    def backward(ctx, gradient):
        (scale,) = ctx.saved_tensors
        return gradient * scale, None


class Dirty(Block):
    def forward(self, x):
        hidden = self.up(x)
        return x + self.down(DirtyInput.apply(hidden, self.down.bias.detach() + 1))


@same_bits("a Function that changes its input in place (`mark_dirty`)")
def function_marks_dirty(place):
    return trained(place, Net(Dirty))


class NewStyle(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight):
        return x @ weight.t()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, weight = inputs
        ctx.save_for_backward(x, weight)
        ctx.save_for_forward(x, weight)

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.transpose(-1, -2) @ x

    @staticmethod
    def jvp(ctx, of_x, of_weight):
        x, weight = ctx.saved_tensors
        found = 0
        if of_x is not None:
            found = found + of_x @ weight.t()
        if of_weight is not None:
            found = found + x @ of_weight.t()
        return found


class WithNewStyle(Block):
    def forward(self, x):
        return x + self.down(torch.tanh(NewStyle.apply(x, self.up.weight)))


@same_bits("a Function with `setup_context` and `jvp`: trained, then `torch.func.jvp` over the model")
def function_with_setup_context(place):
    engine, model = wrapped(place, Net(WithNewStyle))
    found = [step(engine, engine(batch(index)).square().mean()) for index in range(2)]
    with torch.no_grad():
        found.append(torch.func.jvp(lambda x: model(x), (batch(5),), (batch(6),)))
    return found, values(model)


@torch.library.custom_op("misuses::scaled_linear", mutates_args=())
def scaled_linear(x: torch.Tensor, weight: torch.Tensor, scale: float) -> torch.Tensor:
    return (x @ weight.t()) * scale


@scaled_linear.register_fake
def _(x, weight, scale):
    return x.new_empty(x.shape[0], weight.shape[0])


def _kept(ctx, inputs, output):
    x, weight, ctx.scale = inputs
    ctx.save_for_backward(x, weight)


def _back(ctx, gradient):
    x, weight = ctx.saved_tensors
    return (gradient @ weight) * ctx.scale, (gradient.t() @ x) * ctx.scale, None


scaled_linear.register_autograd(_back, setup_context=_kept)


@torch.library.custom_op("misuses::normalise_", mutates_args=("weight",))
def normalise_(weight: torch.Tensor) -> None:
    weight.div_(weight.norm(dim=1, keepdim=True).clamp(min=1.0))


class ByOperator(Block):
    def forward(self, x):
        return x + self.down(torch.tanh(scaled_linear(x, self.up.weight, 0.5)))


@same_bits("blocks compute by a `torch.library.custom_op` with `register_autograd`")
def custom_operator(place):
    return trained(place, Net(ByOperator))


@same_bits("a `custom_op` that changes its argument is called on weights after each step")
def custom_operator_mutates(place):
    def after(model, index):
        with torch.no_grad():
            for block in model.blocks:
                normalise_(block.up.weight)

    return trained(place, Net(), after=after)


class Conditional(Block):
    def forward(self, x):
        return x + torch.cond(x.sum() > 0, lambda x: self.down(torch.tanh(x)), lambda x: self.down(torch.sin(x)), (x,))


@family.refused(
    "`torch.cond` in a block, both branches use its weights: they are in one memory, which torch refuses",
    "aliasing",
    seconds=120,
    places=("torch", "ram"),
    also=("UncapturedHigherOrderOpError",),
)
def conditional_block(place):
    return trained(place, Net(Conditional), steps=1)


# Modes.


class FakeQuantised(TorchFunctionMode):
    """Each weight of ``F.linear`` is rounded, with a straight-through gradient."""

    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is F.linear:
            x, weight, *rest = args
            self.seen += isinstance(weight, nn.Parameter)
            weight = weight + ((weight * 16).round() / 16 - weight).detach()
            args = (x, weight, *rest)
        return func(*args, **kwargs or {})


@same_bits("a `TorchFunctionMode` rounds all weights of `F.linear`, around forward and backward")
def function_mode_rounds(place):
    engine, model = wrapped(place)
    found = []
    for index in range(3):
        with FakeQuantised() as mode:
            loss = engine(batch(index)).square().mean()
            engine.optimizer.zero_grad()
            loss.backward()
        found += [loss.item(), gradients(model), mode.seen]
        engine.optimizer.step()
    return found, values(model)


class NoisyProducts(TorchDispatchMode):
    """Noise on the output of each product."""

    def __init__(self):
        super().__init__()
        self.draw = torch.Generator().manual_seed(3)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **kwargs or {})
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default):
            out = out + 0.01 * torch.randn(out.shape, generator=self.draw)
        return out


@same_bits("a `TorchDispatchMode` adds noise to each product in forward and backward (analogue hardware)")
def dispatch_mode_noise(place):
    engine, model = wrapped(place)
    found, mode = [], NoisyProducts()
    for index in range(3):
        engine.optimizer.zero_grad()
        with mode:
            loss = engine(batch(index)).square().mean()
            loss.backward()
        found += [loss.item(), gradients(model)]
        engine.optimizer.step()
    return found, values(model)


@same_bits("a `TorchDispatchMode` with noise over blocks that are checkpointed")
def dispatch_mode_over_checkpoints(place):
    engine, model = wrapped(place)
    found, mode = [], NoisyProducts()
    for index in range(3):
        engine.optimizer.zero_grad()
        with mode:
            x = model.first(batch(index))
            for block in model.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            model.last(x).square().mean().backward()
        found.append(gradients(model))
        engine.optimizer.step()
    return found, values(model)


scale_now = contextvars.ContextVar("scale_now", default=1.0)


class InContext(Block):
    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) * scale_now.get()


@same_bits("blocks read a `contextvars.ContextVar`, which is reset before the backward")
def context_variables(place):
    engine, model = wrapped(place, Net(InContext))
    found = []
    for index in range(3):
        token = scale_now.set(0.5 * (index + 1))
        loss = engine(batch(index)).square().mean()
        scale_now.reset(token)
        found.append(step(engine, loss))
    return found, values(model)


@same_bits(
    "blocks read a context variable and are checkpointed; it is reset before the backward, so torch finds other values"
)
def context_variables_checkpointed(place):
    def call(model, x):
        token = scale_now.set(0.5)
        x = model.first(x)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        scale_now.reset(token)
        return model.last(x)

    return trained(place, Net(InContext), call=call)


class Random(Block):
    def forward(self, x):
        return x + self.down(F.dropout(torch.tanh(self.up(x)), 0.3, self.training))


@same_bits("checkpoints with `preserve_rng_state=False` over dropout: the second run draws other masks")
def checkpoint_without_rng(place):
    def call(model, x):
        x = model.first(x)
        for block in model.blocks:
            x = checkpoint(block, x, use_reentrant=False, preserve_rng_state=False)
        return model.last(x)

    return trained(place, Net(Random), call=call)


# Second order, where it stays within what is allowed, or is to be refused.


@family.works_or_refused("a Hessian-vector product by forward over reverse: `jvp(grad(f))` by `functional_call`")
def forward_over_reverse(place):
    engine, model = wrapped(place)
    step(engine, engine(batch(0)).square().mean())
    weights = {name: p.detach() for name, p in model.named_parameters()}
    directions = {name: torch.ones_like(p) for name, p in weights.items()}
    return torch.func.jvp(
        torch.func.grad(lambda w: functional_call(model, w, (batch(1),)).square().mean()), (weights,), (directions,)
    ), values(model)


@family.works_or_refused("a Hessian-vector product by `autograd.grad` twice over detached copies of all weights")
def hessian_over_copies(place):
    engine, model = wrapped(place)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    loss = functional_call(model, weights, (batch(1),)).square().mean()
    first = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
    second = torch.autograd.grad(sum(g.sum() for g in first), list(weights.values()), allow_unused=True)
    return second, step(engine, engine(batch(0)).square().mean()), values(model)


@family.refused(
    "WGAN-GP: the critic is in an engine, the penalty is on its gradient by the input ", "create_graph|twice|gradient"
)
def penalty_on_critic(place):
    engine, model = wrapped(place)
    x = batch(0).requires_grad_()
    (gradient,) = torch.autograd.grad(engine(x).sum(), x, create_graph=True)
    (gradient.norm(dim=1) - 1).square().mean().backward()
    engine.optimizer.step()
    return values(model)


@family.works_or_refused(
    "WGAN-GP with `functional_call` over clones of the parameters, whose gradients come back through `clone`",
    "not wrapped",
)
def penalty_over_clones(place):
    engine, model = wrapped(place)
    found = []
    for index in range(2):
        weights = {name: p.clone() for name, p in model.named_parameters()}
        x = batch(index).requires_grad_()
        out = functional_call(model, weights, (x,))
        (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        found.append(step(engine, out.mean() + (gradient.norm(dim=1) - 1).square().mean()))
    return found, values(model)


@family.works_or_refused(
    "second-order MAML over clones of the parameters by `functional_call`, the outer gradients come through `clone`",
    "not wrapped",
)
def maml_over_clones(place):
    engine, model = wrapped(place)
    found = []
    for index in range(2):
        weights = {name: p.clone() for name, p in model.named_parameters()}
        for inner in range(2):
            loss = functional_call(model, weights, (batch(10 * index + inner),)).square().mean()
            grads = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            weights = {name: w - 0.1 * g for (name, w), g in zip(weights.items(), grads, strict=True)}
        found.append(step(engine, functional_call(model, weights, (batch(10 * index + 7),)).square().mean()))
    return found, values(model)


@same_bits("a differentiable step of SGD by hand on a copy of the head, the outer loss trains the body")
def differentiable_head(place):
    engine, model = wrapped(place)
    found = []
    for index in range(3):
        hidden = model.first(batch(index))
        for block in model.blocks:
            hidden = block(hidden)
        weight = model.last.weight.detach().clone().requires_grad_()
        (gradient,) = torch.autograd.grad(F.linear(hidden, weight).square().mean(), weight, create_graph=True)
        found.append(step(engine, F.linear(hidden, weight.detach() - 0.1 * gradient).abs().mean()))
    return found, values(model)


@same_bits("REPTILE and influence: `copy.deepcopy(model)` trains by a plain optimizer, its difference is the gradient")
def copied_learner(place):
    engine, model = wrapped(place)
    found = []
    for index in range(2):
        learner = copy.deepcopy(model)
        own = torch.optim.SGD(learner.parameters(), 0.05)
        for inner in range(3):
            own.zero_grad()
            loss = learner(batch(10 * index + inner)).square().mean()
            loss.backward()
            own.step()
        engine.optimizer.zero_grad()
        for p, q in zip(model.parameters(), learner.parameters(), strict=True):
            p.grad = p.detach() - q.detach()
        engine.optimizer.step()
        found.append(loss.item())
    return found, values(model)


# Graphs within a forward that is recomputed.


class Physics(nn.Module):
    """The residual of a differential equation. ``asks`` says how the input comes to have a gradient."""

    def __init__(self, asks):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(1, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))
        self.k = nn.Parameter(torch.ones(1))
        self.asks = asks

    def forward(self, x):
        with torch.enable_grad():
            x = self.asks(x)
            u = self.net(x)
            (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
            (curve,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
        return (curve + self.k * u).square().mean() + (u - 1).square().mean()


class Equations(nn.Module):
    def __init__(self, asks):
        super().__init__()
        self.blocks = nn.ModuleList(Physics(asks) for _ in range(3))

    def forward(self, x):
        return sum(block(x.clone()) for block in self.blocks)


_IN_TIERS = ("plain", "recomputed", "over the tiers", "mixed")


def _solved(run, asks):
    return loop(run, lambda: Equations(asks), body=lambda engine, i: engine(joints.batch(i)[:, :1].contiguous()))


@program(family, "a PINN: a block takes `x.requires_grad_()`, u_x and u_xx by `grad(create_graph=True)`", _IN_TIERS)
def physics_in_block(run):
    return _solved(run, lambda x: x.requires_grad_())


@program(family, "the same, by `x.detach().requires_grad_()`", _IN_TIERS)
def physics_of_a_detached_input(run):
    return _solved(run, lambda x: x.detach().requires_grad_())


class CountedForce(Block):
    """Draws and counts before, between and after its own backwards."""

    def __init__(self):
        super().__init__()
        self.num_calls, self.log = 0, []
        self.register_buffer("seen", torch.zeros(2))

    def moment(self):
        self.num_calls += 1
        self.log.append(random.random())
        self.seen.add_(1)
        return self.log[-1] + self.num_calls + self.seen.sum()

    def force(self, x):
        energy = torch.tanh(self.down(torch.tanh(self.up(x)) * self.moment())).square().mean()
        return torch.autograd.grad(energy, x, create_graph=True)[0] * self.moment()

    def forward(self, x):
        x = x if x.requires_grad else x.detach().requires_grad_()
        return x - 0.01 * F.dropout(self.force(x), 0.1, self.training)


class CountedCurve(CountedForce):
    def force(self, x):
        force = super().force(x)
        return torch.autograd.grad(torch.tanh(force * self.moment()).sum(), x, create_graph=True)[0]


def _counted(run, kind):
    def kept(engine, step):
        return [(block.num_calls, list(block.log)) for block in engine.module.blocks]

    random.seed(3)
    return loop(run, lambda: Net(kind), body=mean, after=kept)


@program(family, "a block that is its energy's force draws from `random` and counts around `autograd.grad`", _IN_TIERS)
def counted_force(run):
    return _counted(run, CountedForce)


@program(family, "the same, differentiated once more in the forward", _IN_TIERS)
def counted_curve(run):
    return _counted(run, CountedCurve)
