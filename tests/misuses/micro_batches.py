"""Micro-batches that go together, with what people do in the body of a loop. Plain PyTorch runs them one after the
other. The optimizer is torch's own arithmetic, so that bits are compared."""

from __future__ import annotations

import contextlib
import copy
import threading
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from misuses.case import Family
from misuses.place import gradients, values
from misuses.strangers import WIDTH, Block, Exact, Net, batch

family = Family("micro-batches together")


def same_bits(title, **options):
    return family.works(title, rtol=0.0, atol=0.0, **options)


def near(title, **options):
    """Norms are summed up otherwise."""
    return family.works(title, **options)


def wrapped(place, model=None, **options):
    options = {"optimizer": Exact, "lr": 0.05, "optimizer_options": {"momentum": 0.9}, **options}
    return place.wrap(Net() if model is None else model, **options)


def trained(place, body, model=None, *, steps=3, micro_batches=4, before_step=None, **options):
    """What ``body`` gives, the gradients of each step, and all values."""
    engine = wrapped(place, model, **options)
    model, found = engine.module, []
    for step in range(steps):
        batches = [batch(10 * step + index) for index in range(micro_batches)]
        found.append(engine.together(batches, lambda each: body(engine, each)))
        found.append(gradients(model))
        if before_step is not None:
            found.append(before_step(model, step))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(model)


def loss_of(engine, x):
    return engine(x).square().mean()


# Backward in other ways.


@same_bits("two losses of one output, the first backward retains the graph")
def together_two_losses_retained(place):
    def body(engine, x):
        out = engine(x)
        out.square().mean().backward(retain_graph=True)
        out.abs().mean().backward()
        return out

    return trained(place, body)


@same_bits("two forwards in one call, both losses in one backward")
def together_two_forwards(place):
    def body(engine, x):
        loss = loss_of(engine, x) + loss_of(engine, x.flip(0))
        loss.backward()
        return loss.item()

    return trained(place, body)


@same_bits("two forwards, then the backward of the first, then that of the second")
def together_two_graphs(place):
    def body(engine, x):
        one, two = loss_of(engine, x), loss_of(engine, x + 1)
        one.backward()
        two.backward()
        return one.item(), two.item()

    return trained(place, body)


@same_bits("forward, backward, forward, backward: two rounds in each call")
def together_two_rounds(place):
    def body(engine, x):
        found = []
        for part in x.chunk(2):
            loss = loss_of(engine, part)
            loss.backward()
            found.append(loss.item())
        return found

    return trained(place, body)


@same_bits("`backward(inputs=...)` of the middle block alone")
def together_some_inputs(place):
    def body(engine, x):
        loss_of(engine, x).backward(inputs=list(engine.module.blocks[2].parameters()))

    return trained(place, body)


@same_bits("`backward(inputs=...)` twice over a retained graph: halves of the model")
def together_halves_by_inputs(place):
    def body(engine, x):
        parameters = list(engine.module.parameters())
        loss = loss_of(engine, x)
        loss.backward(inputs=parameters[:7], retain_graph=True)
        loss.backward(inputs=parameters[7:])
        return loss.item()

    return trained(place, body)


@same_bits("`torch.autograd.grad` by the input, then a backward of the same graph")
def together_grad_of_input_then_backward(place):
    def body(engine, x):
        x = x.clone().requires_grad_()
        loss = loss_of(engine, x)
        (gradient,) = torch.autograd.grad(loss, x, retain_graph=True)
        loss.backward()
        return gradient, x.grad

    return trained(place, body)


@same_bits("FGSM in each call: the input's gradient, then the moved input trains")
def together_adversarial(place):
    def body(engine, x):
        x = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(loss_of(engine, x), x)
        loss = loss_of(engine, (x + 0.1 * gradient.sign()).detach())
        loss.backward()
        return loss.item()

    return trained(place, body)


@same_bits("`torch.autograd.grad` by all parameters in each call, summed up by hand")
def together_grads_by_hand(place):
    total: dict[str, torch.Tensor] = {}

    def body(engine, x):
        parameters = list(engine.module.parameters())
        return [g.clone() for g in torch.autograd.grad(loss_of(engine, x), parameters)]

    engine = wrapped(place)
    found = []
    for step in range(2):
        each = engine.together([batch(10 * step + index) for index in range(3)], lambda x: body(engine, x))
        total = [sum(parts) for parts in zip(*each, strict=True)]
        for parameter, gradient in zip(engine.module.parameters(), total, strict=True):
            parameter.grad = gradient
        found.append(total)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


@same_bits("`loss.backward(gradient)` of outputs, with weights of each row")
def together_weighted_rows(place):
    def body(engine, x):
        out = engine(x)
        out.backward(torch.linspace(0, 1, out.numel()).view_as(out))

    return trained(place, body)


@same_bits("`torch.autograd.backward` of a list of middle and last outputs")
def together_many_roots(place):
    def body(engine, x):
        kept = []
        handle = engine.module.blocks[1].register_forward_hook(lambda module, args, out: kept.append(out))
        out = engine(x)
        handle.remove()
        torch.autograd.backward([out.sum(), kept[0].square().mean()])

    return trained(place, body)


@same_bits("the middle is detached: the upper half goes backward first, then the lower by the middle's gradient")
def together_two_pieces(place):
    def body(engine, x):
        model = engine.module
        low = model.first(x)
        for block in model.blocks[:3]:
            low = block(low)
        middle = low.detach().requires_grad_()
        high = middle
        for block in model.blocks[3:]:
            high = block(high)
        loss = model.last(high).square().mean()
        loss.backward()
        low.backward(middle.grad)
        return loss.item()

    return trained(place, body)


@same_bits("one call of four has no loss that needs gradients: it only looks")
def together_one_looks_only(place):
    def body(engine, x):
        if x[0, 0] > 0:
            with torch.no_grad():
                return engine(x).sum()
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    return trained(place, body)


@same_bits("each call evaluates without gradients first, and then trains")
def together_looks_then_trains(place):
    def body(engine, x):
        with torch.no_grad():
            aim = engine(x).softmax(-1)
        loss = F.cross_entropy(engine(x + 0.1), aim)
        loss.backward()
        with torch.inference_mode():
            after = engine(x).sum().item()
        return loss.item(), after

    return trained(place, body)


@family.works_or_refused("calls that do nothing, that return None, and that have no forward", "one after the other")
def together_empty_calls(place):
    def body(engine, x):
        if x[0, 0] > 0.5:
            return None
        if x[0, 0] > 0:
            sum(p.square().sum() for p in engine.module.last.parameters()).backward()
            return "penalty"
        loss_of(engine, x).backward()
        return "loss"

    return trained(place, body, micro_batches=5)


@family.works("a penalty of all weights in each call's loss", rtol=1e-5, atol=1e-6)
def together_penalty_in_call(place):
    def body(engine, x):
        loss = loss_of(engine, x) + 1e-3 * sum(p.square().sum() for p in engine.module.parameters())
        loss.backward()
        return loss.item()

    return trained(place, body)


@same_bits("calls use other blocks: LayerDrop by the batch")
def together_layers_by_batch(place):
    class Dropping(Net):
        def forward(self, x):
            x = self.first(x)
            for index, block in enumerate(self.blocks):
                if x[0, index] > -0.3:
                    x = block(x)
            return self.last(x)

    def body(engine, x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    return trained(place, body, Dropping())


@same_bits("calls use blocks in another order")
def together_other_orders(place):
    class Ordered(Net):
        def forward(self, x):
            order = torch.argsort(x[0, :5]).tolist()
            x = self.first(x)
            for index in order:
                x = self.blocks[index](x)
            return self.last(x)

    def body(engine, x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    return trained(place, body, Ordered())


@same_bits("calls loop over one block as often as the batch says")
def together_loops_by_batch(place):
    class Looping(Net):
        def forward(self, x):
            x = self.first(x)
            for _ in range(1 + int(x[0, 0] > 0) + int(x[0, 1] > 0)):
                for block in self.blocks[:3]:
                    x = block(x)
            return self.last(x)

    def body(engine, x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    return trained(place, body, Looping())


# Hooks.


@same_bits("`p.register_hook` that scales gradients, in the calls")
def together_parameter_hooks(place):
    model = Net()
    model.blocks[1].up.weight.register_hook(lambda g: g * 2)
    model.last.weight.register_hook(lambda g: g.clamp(-0.01, 0.01))

    def body(engine, x):
        loss_of(engine, x).backward()

    return trained(place, body, model)


@near("a post-accumulate hook counts the calls and sums up norms of the gradient so far")
def together_post_accumulate_counts(place):
    seen = []
    model = Net()

    def body(engine, x):
        loss_of(engine, x).backward()

    engine = wrapped(place, model)
    engine.module.blocks[0].up.weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
    for step in range(2):
        engine.together([batch(10 * step + index) for index in range(3)], lambda x: body(engine, x))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return seen, values(engine.module)


@same_bits("a hook on a tensor in the middle, whose gradient is divided by its norm")
def together_tensor_hooks(place):
    def body(engine, x):
        def put(module, args, out):
            out.register_hook(lambda g: g / (1 + g.norm()))

        handle = engine.module.blocks[2].register_forward_hook(put)
        loss = loss_of(engine, x)
        handle.remove()
        loss.backward()
        return loss.item()

    return trained(place, body)


@same_bits("full backward hooks on blocks change the gradient of the input")
def together_module_backward_hooks(place):
    model = Net()
    for block in model.blocks:
        block.register_full_backward_hook(lambda module, into, out: tuple(g * 0.5 for g in into))

    def body(engine, x):
        loss_of(engine, x).backward()

    return trained(place, body, model)


@same_bits("a forward hook puts another number into each call's output by a list that belongs to the call")
def together_hook_with_local_list(place):
    def body(engine, x):
        norms = []
        handles = [b.register_forward_hook(lambda m, a, out: norms.append(out.norm())) for b in engine.module.blocks]
        out = engine(x)
        for handle in handles:
            handle.remove()
        loss = out.square().mean() + 0.01 * torch.stack(norms[-5:]).sum()
        loss.backward()
        return loss.item()

    return trained(place, body)


@same_bits("`retain_grad` on the output of a block, read after the call's backward")
def together_retained_in_the_middle(place):
    def body(engine, x):
        kept = []

        def keep(module, args, out):
            out.retain_grad()
            kept.append(out)

        handle = engine.module.blocks[2].register_forward_hook(keep)
        loss = loss_of(engine, x)
        handle.remove()
        loss.backward()
        return kept[0].grad

    return trained(place, body)


# Checkpoints, autocast, scalers.


@same_bits("reentrant checkpoints around the blocks")
def together_reentrant_checkpoints(place):
    class Checked(Net):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.last(x)

    def body(engine, x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    return trained(place, body, Checked())


@same_bits("checkpoints that are not reentrant around pairs of blocks")
def together_other_checkpoints(place):
    class Checked(Net):
        def forward(self, x):
            x = self.first(x)
            for index in (0, 2):
                x = checkpoint(nn.Sequential(*self.blocks[index : index + 2]), x, use_reentrant=False)
            return self.last(x)

    def body(engine, x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    return trained(place, body, Checked())


@same_bits("autocast in each call, without its cache")
def together_autocast_in_call(place):
    def body(engine, x):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    return trained(place, body)


@near("`GradScaler.scale(loss).backward()` in the calls, `unscale_`, clipping, `step`")
def together_scaler(place):
    engine = wrapped(place)
    scaling = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=2)
    found = []

    def body(x):
        loss = loss_of(engine, x)
        scaling.scale(loss).backward()
        return loss.item()

    for step in range(4):
        found.append(engine.together([batch(10 * step + index) for index in range(3)], body))
        scaling.unscale_(engine.optimizer)
        found.append(nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1))
        scaling.step(engine.optimizer)
        scaling.update()
        engine.optimizer.zero_grad()
    return found, scaling.get_scale(), values(engine.module)


@near("clipping by value between the calls and the step, and norms of each block")
def together_clipped_after(place):
    def body(engine, x):
        loss_of(engine, x).backward()

    def clip(model, step):
        nn.utils.clip_grad_value_(model.parameters(), 0.02)
        return [nn.utils.clip_grad_norm_(block.parameters(), 0.05) for block in model.blocks]

    return trained(place, body, before_step=clip)


@near("clipping inside of each call, of what has been summed up so far")
def together_clipped_inside(place):
    def body(engine, x):
        loss_of(engine, x).backward()
        return nn.utils.clip_grad_norm_(engine.module.parameters(), 0.05)

    return trained(place, body)


@family.refused("the step is taken in the third call of four", "belongs after the call")
def together_step_inside(place):
    engine = wrapped(place)

    def body(index):
        loss_of(engine, batch(index)).backward()
        if index % 10 == 2:
            engine.optimizer.step()
            engine.optimizer.zero_grad()

    for step in range(3):
        engine.together([10 * step + index for index in range(4)], body)
    return values(engine.module)


@same_bits("gradients are halved in each call, of all that has been summed up so far")
def together_halves_inside(place):
    def body(engine, x):
        loss_of(engine, x).backward()
        for parameter in engine.module.parameters():
            parameter.grad.mul_(0.5)

    return trained(place, body)


@same_bits("each call's gradients are set aside, `p.grad = None`, and given back as a sum after all")
def together_set_aside(place):
    engine = wrapped(place)
    found = []

    def body(x):
        loss_of(engine, x).backward()
        aside = [p.grad.clone() for p in engine.module.parameters()]
        for parameter in engine.module.parameters():
            parameter.grad = None
        return aside

    for step in range(3):
        each = engine.together([batch(10 * step + index) for index in range(3)], body)
        for parameter, *parts in zip(engine.module.parameters(), *each, strict=True):
            parameter.grad = torch.stack(parts).amax(0)
        found.append(gradients(engine.module))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


@same_bits("an update by hand in each call: `p -= 0.1 * p.grad`, and the gradient is dropped")
def together_updates_by_hand(place):
    engine = wrapped(place)
    found = []

    def body(x):
        loss = loss_of(engine, x)
        loss.backward()
        with torch.no_grad():
            for parameter in engine.module.parameters():
                parameter -= 0.1 * parameter.grad
                parameter.grad = None
        return loss.item()

    for step in range(2):
        found.append(engine.together([batch(10 * step + index) for index in range(3)], body))
    return found, values(engine.module)


@same_bits("weights of the head are clamped before each call's forward")
def together_clamps_before(place):
    def body(engine, x):
        with torch.no_grad():
            engine.module.last.weight.clamp_(-0.1, 0.1).mul_(0.99)
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    return trained(place, body)


@family.works_or_refused("the last of four calls alone looks at gradients", "micro-batch")
def together_one_looks_at_gradients(place):
    engine = wrapped(place)

    def body(index):
        loss = loss_of(engine, batch(index))
        loss.backward()
        return [p.grad.clone() for p in engine.module.last.parameters()] if index % 10 == 1 else loss.item()

    found = []
    for step in range(3):
        found.append(engine.together([10 * step + index for index in range(4)], body))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


@same_bits("each call freezes one half of the model, another one each time")
def together_freezes_halves(place):
    def body(engine, x):
        for index, block in enumerate(engine.module.blocks):
            block.requires_grad_((index % 2 == 0) is bool(x[0, 0] > 0))
        loss = loss_of(engine, x)
        loss.backward()
        engine.module.requires_grad_(True)
        return loss.item()

    return trained(place, body)


@same_bits("a block freezes its own layer in its forward, as the input says")
def together_freezes_in_forward(place):
    class Toggled(Block):
        def forward(self, x):
            self.up.weight.requires_grad_(bool(x[0, 0] > 0))
            return super().forward(x)

    def body(engine, x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    return trained(place, body, Net(Toggled))


# Errors in a call, and training that goes on.


@same_bits("the third call raises, gradients are dropped, and training goes on")
def together_raises_in_the_third(place):
    engine = wrapped(place)
    found = []

    def body(index):
        loss = loss_of(engine, batch(index))
        if index == 12:
            raise KeyError("bad batch")
        loss.backward()
        return loss.item()

    for step in range(4):
        try:
            found.append(engine.together([10 * step + index for index in range(4)], body))
        except KeyError as error:
            found.append(str(error))
            engine.optimizer.zero_grad()
            continue
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


@same_bits("a hook raises in the second call's backward, gradients are dropped, and training goes on")
def together_raises_in_backward(place):
    engine = wrapped(place)
    found = []

    def stop(g):
        raise RuntimeError("in backward")

    def body(x):
        out = engine(x)
        if step == 1 and x[0, 0] > 0:
            out.register_hook(stop)
        out.square().mean().backward()

    for step in range(4):
        try:
            engine.together([batch(10 * step + index) for index in range(4)], body)
        except RuntimeError:
            found.append(step)
            engine.optimizer.zero_grad()
            continue
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


@same_bits("the loader raises after two micro-batches")
def together_loader_raises(place):
    engine = wrapped(place)
    found = []

    def loader(step):
        for index in range(4):
            if step == 1 and index == 2:
                raise OSError("broken shard")
            yield batch(10 * step + index)

    def body(x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    for step in range(3):
        try:
            found.append(engine.together(loader(step), body))
        except OSError as error:
            found.append(str(error))
            engine.optimizer.zero_grad()
            continue
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


@family.said(
    "a call raises StopIteration by an exhausted iterator, and the step is taken all the same", "no parameter has"
)
def together_stop_iteration(place):
    engine = wrapped(place)

    def body(x):
        loss_of(engine, x).backward()
        if x[0, 0] > 1e9:
            next(iter([]))
        return next(iter([x.sum()]))

    found = [engine.together([batch(index) for index in range(3)], body)]
    with contextlib.suppress(StopIteration, RuntimeError):
        engine.together([batch(3)], lambda x: next(iter([])))
    engine.optimizer.step()
    return found, values(engine.module)


@same_bits("the error of an assertion in the forward of one call, in the first `together` of all")
def together_raises_in_the_first(place):
    class Checking(Net):
        def forward(self, x):
            if x.shape[0] == 3:
                raise ValueError("three rows")
            return super().forward(x)

    engine = wrapped(place, Checking())
    found = []

    def body(x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    for rows in ([4, 3, 4], [4, 4], [3], [2, 5]):
        try:
            found.append(engine.together([batch(index, each) for index, each in enumerate(rows)], body))
            engine.optimizer.step()
        except ValueError as error:
            found.append(str(error))
        engine.optimizer.zero_grad()
    return found, values(engine.module)


# Several models.


@same_bits("two engines: the student's `together` calls the teacher's engine")
def together_teacher_engine(place):
    torch.manual_seed(3)
    teacher_model = nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, WIDTH))
    teacher = wrapped(place, teacher_model)
    engine = wrapped(place)
    found = []

    def body(x):
        with torch.no_grad():
            aim = teacher(x)
        loss = F.mse_loss(engine(x), aim)
        loss.backward()
        return loss.item()

    for step in range(3):
        found.append(engine.together([batch(10 * step + index) for index in range(3)], body))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module), values(teacher_model)


@same_bits("two engines in one `together`: generator and critic both get gradients")
def together_two_engines_trained(place):
    torch.manual_seed(3)
    critic = wrapped(place, nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), Block(), nn.Linear(WIDTH, 1)))
    engine = wrapped(place)
    found = []

    def body(x):
        loss = critic(engine(x)).square().mean()
        loss.backward()
        return loss.item()

    for step in range(3):
        found.append(engine.together([batch(10 * step + index) for index in range(3)], body))
        for each in (engine, critic):
            each.optimizer.step()
            each.optimizer.zero_grad()
    return found, values(engine.module), values(critic.module)


@family.works_or_refused("`together` of one engine inside of another one's", "together|micro-batch")
def together_nested_engines(place):
    torch.manual_seed(3)
    other = wrapped(place, nn.Sequential(nn.Linear(WIDTH, WIDTH), Block(), nn.Linear(WIDTH, WIDTH)))
    engine = wrapped(place)

    def inner(x):
        loss = other(x).square().mean()
        loss.backward()
        return loss.item()

    def body(x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item(), other.together(list(x.chunk(2)), inner)

    found = [engine.together([batch(index) for index in range(3)], body)]
    for each in (engine, other):
        each.optimizer.step()
    return found, values(engine.module), values(other.module)


@family.refused("`together` inside of the same engine's", "all of them at once")
def together_nested_same_engine(place):
    engine = wrapped(place)

    def inner(x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    found = [engine.together([batch(index) for index in range(2)], lambda x: engine.together(x.chunk(2), inner))]
    engine.optimizer.step()
    return found, values(engine.module)


@same_bits("an average of weights is moved after each step of together, and judges in the calls")
def together_average_judges(place):
    engine = wrapped(place)
    average = copy.deepcopy(engine.module)
    found = []

    def body(x):
        with torch.no_grad():
            aim = average(x)
        loss = loss_of(engine, x) + F.mse_loss(engine(x + 0.1), aim)
        loss.backward()
        return loss.item()

    for step in range(3):
        found.append(engine.together([batch(10 * step + index) for index in range(3)], body))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        with torch.no_grad():
            for a, p in zip(average.parameters(), engine.module.parameters(), strict=True):
                a.lerp_(p, 0.1)
    return found, values(engine.module), values(average)


# What a model may be.


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4, bias=False)
        self.experts = nn.ModuleList(Block() for _ in range(4))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows, slots = torch.where(chosen == index)
            if rows.numel():
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, slots, None])
        return x + out


@same_bits("a mixture of experts by `index_add_`, experts without tokens are left out")
def together_experts(place):
    def body(engine, x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    return trained(place, body, Net(Experts))


@same_bits("a mixture of experts whose auxiliary losses come back beside the output")
def together_experts_with_losses(place):
    class Told(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(Experts() for _ in range(3))

        def forward(self, x):
            losses = []
            for block in self.blocks:
                losses.append(block.gate(x).logsumexp(-1).square().mean())
                x = block(x)
            return x, losses

    def body(engine, x):
        out, losses = engine(x)
        loss = out.square().mean() + 0.01 * sum(losses)
        loss.backward()
        return loss.item()

    return trained(place, body, Told())


@same_bits("BatchNorm: its statistics move with each call")
def together_statistics(place):
    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return super().forward(self.norm(x))

    def body(engine, x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    return trained(place, body, Net(Normed))


@same_bits("dropout by the global generator")
def together_dropout(place):
    class Dropped(Block):
        def forward(self, x):
            return F.dropout(super().forward(x), 0.2)

    def body(engine, x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    return trained(place, body, Net(Dropped))


@same_bits("noise is drawn before the model, and again after the loss")
def together_noise_around(place):
    def body(engine, x):
        loss = loss_of(engine, x + 0.1 * torch.randn_like(x))
        loss.backward()
        return loss.item(), torch.rand(2)

    return trained(place, body)


@same_bits("Python's and numpy's generators are drawn from in each call")
def together_other_generators(place):
    import random

    import numpy

    random.seed(1)
    numpy.random.seed(1)

    def body(engine, x):
        loss = loss_of(engine, x * random.random() + float(numpy.random.rand()))
        loss.backward()
        return loss.item(), random.random(), float(numpy.random.rand())

    return trained(place, body)


@same_bits("an embedding, tied to the head, with lengths that differ")
def together_tied(place):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(40, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(3))
            self.head = nn.Linear(WIDTH, 40, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return self.head(x)

    engine = wrapped(place, Tied())
    found = []

    def body(ids):
        loss = F.cross_entropy(engine(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        return loss.item()

    for step in range(3):
        draw = torch.Generator().manual_seed(step)
        found.append(engine.together([torch.randint(0, 40, (2, 5 + n), generator=draw) for n in range(4)], body))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


@family.said(
    "a recurrent model whose state goes from one call to the next by a variable outside",
    "the function reads state, and a micro-batch changes it",
)
def together_state_between_calls(place):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.cell, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x, state):
            state = self.cell(x, state)
            return self.head(state), state

    engine = wrapped(place, Recurrent())
    found, state = [], [torch.zeros(4, WIDTH)]

    def body(x):
        out, after = engine(x, state[0])
        out.square().mean().backward()
        state[0] = after.detach()

    for step in range(2):
        engine.together([batch(10 * step + index) for index in range(3)], body)
        found.append(state[0])
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


@same_bits("part of the model is frozen, and one block is thawed between steps")
def together_frozen_parts(place):
    model = Net()
    engine = wrapped(place, model)
    found = []

    def body(x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    for step in range(3):
        for index, block in enumerate(engine.module.blocks):
            block.requires_grad_(index >= 3 - step)
        found.append(engine.together([batch(10 * step + index) for index in range(3)], body))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


@family.works_or_refused("two of the four calls freeze the head around their forward", "micro-batch")
def together_freezes_in_a_call(place):
    def body(engine, x):
        for parameter in engine.module.last.parameters():
            parameter.requires_grad_(bool(x[0, 0] > 0))
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    return trained(place, body)


@same_bits("`together` in turn with an ordinary loop, gradients of both add up")
def together_and_loop(place):
    engine = wrapped(place)

    def body(x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    found = []
    for step in range(3):
        found.append(body(batch(100 + step)))
        found.append(engine.together([batch(10 * step + index) for index in range(3)], body))
        found.append(body(batch(200 + step)))
        found.append(engine.together([batch(300 + step)], body))
        found.append(engine.together([], body))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


@same_bits("a graph from before `together` goes backward after it")
def together_graph_across(place):
    engine = wrapped(place)
    found = []

    def body(x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    for step in range(2):
        early = loss_of(engine, batch(50 + step))
        found.append(engine.together([batch(10 * step + index) for index in range(3)], body))
        early.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


@same_bits("outputs of all calls are kept with their graphs, until after the step")
def together_kept_outputs(place):
    def body(engine, x):
        out = engine(x)
        out.square().mean().backward(retain_graph=True)
        return out

    return trained(place, body)


@family.refused("losses come back from `together`, and their sum goes backward outside", "within the function")
def together_backward_outside(place):
    engine = wrapped(place)
    sum(engine.together([batch(index) for index in range(3)], lambda x: loss_of(engine, x))).backward()
    engine.optimizer.step()
    return values(engine.module)


@same_bits("`together` is called in another thread than the engine was made in")
def together_in_a_thread(place):
    engine = wrapped(place)
    found: list[Any] = []

    def body(x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    def all_steps():
        for step in range(2):
            found.append(engine.together([batch(10 * step + index) for index in range(3)], body))
            engine.optimizer.step()
            engine.optimizer.zero_grad()

    thread = threading.Thread(target=all_steps)
    thread.start()
    thread.join()
    return found, values(engine.module)


@same_bits("gradients are read, scaled and noised between two `together` of one step")
def together_between_two(place):
    engine = wrapped(place)
    found = []

    def body(x):
        loss_of(engine, x).backward()

    for step in range(2):
        engine.together([batch(10 * step + index) for index in range(2)], body)
        for parameter in engine.module.parameters():
            parameter.grad.mul_(0.5)
        found.append(gradients(engine.module))
        engine.together([batch(10 * step + index) for index in range(2, 4)], body, at_once=1)
        found.append(gradients(engine.module))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


@same_bits("`save_on_cpu` around the forward of each call")
def together_saved_on_cpu(place):
    def body(engine, x):
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    return trained(place, body)


@same_bits("a Function of the user's at the end, which keeps its output and the weights of its rows")
def together_function_at_the_end(place):
    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx, out, rows):
            result = out.exp() * rows
            ctx.save_for_backward(result, rows)
            return result

        @staticmethod
        def backward(ctx, gradient):
            result, _ = ctx.saved_tensors
            return gradient * result, None

    def body(engine, x):
        loss = Scaled.apply(engine(x) * 0.1, torch.linspace(0, 1, len(x))[:, None]).mean()
        loss.backward()
        return loss.item()

    return trained(place, body)


@same_bits("the model is called by its layers, root and head outside of `forward`")
def together_by_layers(place):
    def body(engine, x):
        model = engine.module
        x = model.first(x)
        for block in reversed(model.blocks):
            x = block(x)
        loss = model.last(x).square().mean()
        loss.backward()
        return loss.item()

    return trained(place, body)


@near("SAM: both passes by `together`, weights are moved between them")
def together_sharpness_aware(place):
    engine = wrapped(place)
    model, found = engine.module, []

    def body(x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    for step in range(3):
        batches = [batch(10 * step + index) for index in range(3)]
        found.append(engine.together(batches, body))
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        moves = [p.grad * (0.05 / norm) for p in model.parameters()]
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.add_(move)
        engine.optimizer.zero_grad()
        found.append(engine.together(batches, body))
        with torch.no_grad():
            for p, move in zip(model.parameters(), moves, strict=True):
                p.sub_(move)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(model)


@same_bits("PCGrad: each task's gradient by a `together` of its own, projected on each other")
def together_projected(place):
    engine = wrapped(place)
    model, found = engine.module, []
    for step in range(3):
        batches = [batch(10 * step + index) for index in range(3)]
        tasks = []
        for sign in (1, -1):

            def body(x):
                loss = F.softplus(sign * engine(x)).mean()  # noqa: B023
                loss.backward()
                return loss.item()

            found.append(engine.together(batches, body))
            tasks.append([p.grad.clone() for p in model.parameters()])
            engine.optimizer.zero_grad()
        dots = [(a * b).sum() for a, b in zip(*tasks, strict=True)]
        for p, a, b, dot in zip(model.parameters(), *tasks, dots, strict=True):
            p.grad = a + b - (dot.clamp(max=0) / b.square().sum()) * b
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(model)


@same_bits("a closure that runs `together` is given to the step")
def together_closure(place):
    engine = wrapped(place)
    found = []
    for step in range(3):

        def compute():
            engine.optimizer.zero_grad()

            def body(x):
                loss = loss_of(engine, x)
                loss.backward()
                return loss.item()

            return sum(engine.together([batch(10 * step + index) for index in range(3)], body))  # noqa: B023

        found.append(engine.optimizer.step(compute))
    return found, values(engine.module)


def _over_the_tiers(body, options):
    def case(place):
        wrap = place.wrap

        def with_activations(model, **given):
            return wrap(model, **(options(place) if place.has_engine else {}), **given)

        place.wrap = with_activations
        return body(place)

    return case


def _offloaded(place):
    where = {"activations": "host", "activation_memory": "4MiB"}
    if place.name == "nvme":
        where = {"activations": "nvme", "activation_memory": "64KiB"}
    return where


for _body, _title in (
    (together_two_losses_retained, "two losses of one output, the first backward retains the graph"),
    (together_two_graphs, "two forwards, then the backward of the first, then that of the second"),
    (together_grad_of_input_then_backward, "`torch.autograd.grad` by the input, then a backward of the same graph"),
    (together_halves_by_inputs, "`backward(inputs=...)` twice over a retained graph: halves of the model"),
    (together_raises_in_the_third, "the third call raises, gradients are dropped, and training goes on"),
    (together_raises_in_backward, "a hook raises in the second call's backward, and training goes on"),
    (together_reentrant_checkpoints, "reentrant checkpoints around the blocks"),
    (together_experts, "a mixture of experts by `index_add_`"),
    (together_loops_by_batch, "calls loop over one block as often as the batch says"),
    (together_kept_outputs, "outputs of all calls are kept with their graphs, until after the step"),
    (together_graph_across, "a graph from before `together` goes backward after it"),
    (together_two_engines_trained, "two engines in one `together`"),
):
    _case = _over_the_tiers(_body, _offloaded)
    _case.__name__ = f"{_body.__name__}_offloaded"
    same_bits(f"{_title} (activations over the tiers)")(_case)


# What a trainer hands on, in objects of its own.


class Balancer:
    """Divides losses by their running mean."""

    def __init__(self):
        self.mean = 1.0

    def scaled(self, loss):
        return loss / self.mean

    def backward(self, loss):
        self.scaled(loss).backward()
        self.mean = 0.5 * self.mean + 0.5 * loss.item()


class Trainer:
    def __init__(self, engine):
        self.engine, self.balancer = engine, Balancer()

    def step(self, x):
        loss = loss_of(self.engine, x)
        self.balancer.backward(loss)
        return loss.item()


class Scaled:
    def __init__(self, engine):
        self.engine, self.mean = engine, 1.0

    def loss(self, x):
        return loss_of(self.engine, x) / self.mean

    def measure(self, loss):
        self.mean = 0.5 * self.mean + 0.5 * loss.item()


class ByParent(Scaled):
    def step(self, x):
        loss = super().loss(x)
        loss.backward()
        super().measure(loss)
        return loss.item()


class Around(nn.Module):
    """As a LightningModule: the engine's model is in it."""

    def __init__(self, engine):
        super().__init__()
        self.net, self.mean = engine.module, 1.0
        self.register_buffer("centre", torch.zeros(WIDTH))

    def scaled(self, x):
        loss = self.net(x).square().mean() / self.mean
        loss.backward()
        self.mean = 0.5 * self.mean + 0.5 * loss.item()
        return loss.item()

    def centred(self, x):
        out = self.net(x)
        (out - self.centre).square().mean().backward()
        self.centre.lerp_(out.detach().mean(0), 0.5)
        return out.sum().item()


class Controller:
    __slots__ = ("weight",)

    def __init__(self):
        self.weight = 1.0

    def update(self, loss):
        self.weight *= 1 + 0.1 * loss


def by_object(place, make):
    """``make`` gives the body of the loop, over an engine."""
    engine, found = wrapped(place), []
    body = make(engine)
    for step in range(3):
        found.append(engine.together([batch(10 * step + index) for index in range(4)], body))
        found.append(gradients(engine.module))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


@same_bits("a balancer of losses goes backward itself, and moves its mean")
def together_balancer_backward(place):
    return by_object(place, lambda engine: Trainer(engine).step)


@same_bits("a trainer whose parent computes the loss by a running mean, called by `super()`")
def together_by_parent(place):
    return by_object(place, lambda engine: ByParent(engine).step)


@same_bits("a module around the model, as a LightningModule, has a running mean in an attribute")
def together_module_around_mean(place):
    return by_object(place, lambda engine: Around(engine).scaled)


@same_bits("a module around the model has a centre in a buffer (DINO)")
def together_module_around_centre(place):
    return by_object(place, lambda engine: Around(engine).centred)


@same_bits("a controller with slots has the weight of a penalty, and is moved by the loss (adaptive KL)")
def together_controller_with_slots(place):
    controller = Controller()

    def body(engine, x):
        loss = loss_of(engine, x) * controller.weight
        loss.backward()
        controller.update(loss.item())
        return loss.item()

    return trained(place, body)


@same_bits("weights of losses are parameters beside the model, with a step of their own in each micro-batch")
def together_uncertainty_weights(place):
    weights = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weights], 0.1)

    def body(engine, x):
        out = engine(x)
        losses = torch.stack([out.square().mean(), out.abs().mean()])
        ((-weights).exp() * losses + weights).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        return losses.tolist()

    return trained(place, body), weights.detach()


@same_bits("labelled rows come from one place of a data loader, others after the first forward (semi-supervised)")
def together_two_from_a_loader(place):
    rows = iter(torch.utils.data.DataLoader(torch.utils.data.TensorDataset(batch(99, 80)), 2))

    def body(engine, x):
        loss = loss_of(engine, next(rows)[0]) + 0.1 * engine(next(rows)[0]).abs().mean()
        loss.backward()
        return loss.item()

    return trained(place, body)


@same_bits("noise comes from a generator within an object, before the model and after it")
def together_generator_in_object(place):
    class Noise:
        def __init__(self):
            self.generator = torch.Generator().manual_seed(1)

        def __call__(self, x):
            return x + 0.1 * torch.randn(x.shape, generator=self.generator)

    noise = Noise()

    def body(engine, x):
        loss = noise(engine(noise(x))).square().mean()
        loss.backward()
        return loss.item()

    return trained(place, body)


@same_bits("the dataset of a loader becomes harder with each loss (a curriculum)")
def together_curriculum(place):
    class Rows(torch.utils.data.Dataset):
        def __init__(self):
            self.level = 1.0

        def __len__(self):
            return 4

        def __getitem__(self, index):
            return batch(index, 1)[0] * self.level

    rows, found, engine = Rows(), [], wrapped(place)

    def body(x):
        loss = loss_of(engine, x)
        loss.backward()
        rows.level = 0.5 + loss.item()
        return loss.item()

    for _ in range(3):
        found.append(engine.together(torch.utils.data.DataLoader(rows, 1), body))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)
