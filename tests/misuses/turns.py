"""Turns that a training takes: parts that thaw and freeze, optimizers of two steps, snapshots that come back, batches
that are tried again, and micro-batches that go together. The optimizer is torch's own arithmetic, so that bits are
compared."""

from __future__ import annotations

import collections
import copy
import math
import random

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler
from torch.utils.checkpoint import checkpoint

from misuses.case import Family
from misuses.exact import loss_of, step, wrapped
from misuses.place import gradients, values
from misuses.strangers import WIDTH, Block, Net, batch

family = Family("turns")
same_bits = family.same_bits


class ExactAdamW(torch.optim.AdamW):
    """It has no kernel: a step is the operations of torch."""


def set_trained(module, is_trained):
    for p in module.parameters():
        p.requires_grad_(is_trained)


# Who is trained.


@same_bits("LISA: the ends are always trained, of the blocks one at random; the others are frozen, with AdamW's decay")
def lisa(place):
    engine, model = wrapped(place, optimizer=ExactAdamW, lr=0.01, optimizer_options={"weight_decay": 0.1})
    draw, found = random.Random(0), []
    for index in range(5):
        chosen = draw.randrange(5)
        for number, block in enumerate(model.blocks):
            set_trained(block, number == chosen)
        found.append(step(engine, loss_of(engine, index)))
    return found, values(model)


@same_bits("BAdam: one block after the other for two steps each, its moments are thrown away when it is frozen again")
def block_coordinates(place):
    engine, model = wrapped(place, optimizer=ExactAdamW, lr=0.01, optimizer_options={"weight_decay": 0.1})
    found = []
    for index in range(6):
        for number, block in enumerate(model.blocks):
            set_trained(block, number == index // 2)
        found.append(step(engine, loss_of(engine, index)))
        if index % 2:
            for p in model.blocks[index // 2].parameters():
                for value in engine.optimizer.state[p].values():
                    value.zero_()
    return found, values(model)


@same_bits(
    "biases and norms alone in even steps, matrices alone in odd ones, by `requires_grad_` between forward and backward"
)
def frozen_after_forward(place):
    engine, model = wrapped(place)
    found = []
    for index in range(4):
        set_trained(model, True)
        loss = loss_of(engine, index)
        for p in model.parameters():
            p.requires_grad_((p.dim() == 1) == (index % 2 == 0))
        found.append(step(engine, loss))
    return found, values(model)


@same_bits("layer-wise decay of rates, warm-up for the head first; a group's rate is 0 for a while and its decay stays")
def layerwise_rates(place):
    model = Net()
    groups = [{"params": list(b.parameters()), "lr": 0.05 * 0.7 ** (5 - i)} for i, b in enumerate(model.blocks)]
    groups += [{"params": [*model.first.parameters()], "lr": 0.0}, {"params": [*model.last.parameters()], "lr": 0.1}]
    engine = place.wrap(model, optimizer=ExactAdamW(groups, lr=0.05, weight_decay=0.1))
    scheduler = lr_scheduler.SequentialLR(
        engine.optimizer,
        [
            lr_scheduler.LinearLR(engine.optimizer, 0.1, total_iters=2),
            lr_scheduler.CosineAnnealingLR(engine.optimizer, 3),
        ],
        milestones=[2],
    )
    found = []
    for index in range(5):
        found.append(step(engine, loss_of(engine, index)))
        scheduler.step()
        if index == 2:
            engine.optimizer.param_groups[5]["lr"] = 0.02
            scheduler._schedulers[1].base_lrs[5] = 0.02
        found.append([g["lr"] for g in engine.optimizer.param_groups])
    return found, values(model)


@same_bits(
    "the gradient of a block is set to None at random before the step (gradient dropout), momentum and decay skip it"
)
def gradients_dropped(place):
    engine, model = wrapped(place, optimizer=ExactAdamW, lr=0.01, optimizer_options={"weight_decay": 0.1})
    draw = random.Random(1)
    for index in range(5):
        engine.optimizer.zero_grad()
        loss_of(engine, index).backward()
        for block in model.blocks:
            if draw.random() < 0.5:
                for p in block.parameters():
                    p.grad = None
        engine.optimizer.step()
    return values(model), [engine.optimizer.state[p]["step"] for p in model.parameters() if p in engine.optimizer.state]


@same_bits(
    "gradients of unused blocks stay zero tensors (`zero_grad(set_to_none=False)`): decay and momentum go on for them"
)
def zeros_of_unused(place):
    engine, model = wrapped(place, optimizer=ExactAdamW, lr=0.01, optimizer_options={"weight_decay": 0.1})
    draw, found = random.Random(2), []
    for index in range(6):
        x = model.first(batch(index))
        for block in model.blocks:
            if draw.random() < 0.5:
                x = block(x)
        loss = model.last(x).square().mean()
        engine.optimizer.zero_grad(set_to_none=index % 3 == 2)
        loss.backward()
        found.append(gradients(model))
        engine.optimizer.step()
    return found, values(model)


# Optimizers of two steps.


@family.said(
    "SAM by hand: `e_w` in a dict by parameter, the perturbed gradient, weights back by `p.data = old`",
    "look at memory",
)
def sam_by_data(place):
    engine, model = wrapped(place)
    found = []
    for index in range(3):
        engine.optimizer.zero_grad()
        loss_of(engine, index).backward()
        old = {}
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        for p in model.parameters():
            old[p] = p.data.clone()
            p.data.add_(p.grad * (0.05 / norm))
        model.zero_grad()
        loss_of(engine, index).backward()
        for p in model.parameters():
            p.data = old[p]
        found.append(gradients(model))
        engine.optimizer.step()
    return found, values(model)


@same_bits(
    "ASAM and LookSAM: perturbed by the size of weights, the second gradient is reused for two steps "
    "from `.grad` clones"
)
def look_sam(place):
    engine, model = wrapped(place)
    kept, found = {}, []
    for index in range(4):
        engine.optimizer.zero_grad()
        loss_of(engine, index).backward()
        if index % 2 == 0:
            first = {n: p.grad.clone() for n, p in model.named_parameters()}
            moves = {n: p.detach().abs() * p.grad * 0.1 for n, p in model.named_parameters()}
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), list(moves.values()))
            engine.optimizer.zero_grad()
            loss_of(engine, index).backward()
            with torch.no_grad():
                torch._foreach_sub_(list(model.parameters()), list(moves.values()))
            kept = {n: p.grad - first[n] for n, p in model.named_parameters()}
        else:
            for n, p in model.named_parameters():
                p.grad.add_(kept[n], alpha=0.5)
        found.append(gradients(model))
        engine.optimizer.step()
    return found, values(model)


@same_bits("lookahead with slow weights by `torch._foreach_lerp_` every second step, and a reset of momentum buffers")
def lookahead_resets(place):
    engine, model = wrapped(place)
    slow, found = [p.detach().clone() for p in model.parameters()], []
    for index in range(5):
        found.append(step(engine, loss_of(engine, index)))
        if index % 2:
            torch._foreach_lerp_(slow, [p.detach() for p in model.parameters()], 0.5)
            with torch.no_grad():
                torch._foreach_copy_(list(model.parameters()), slow)
            for p in model.parameters():
                engine.optimizer.state[p]["momentum_buffer"].zero_()
    return found, values(model)


@same_bits(
    "CAGrad and PCGrad: gradients of three losses by `retain_graph` and `zero_grad`, flat, projected, "
    "written back in views"
)
def gradient_surgery(place):
    engine, model = wrapped(place)
    found = []
    for index in range(3):
        out = engine(batch(index))
        tasks = []
        for number, loss in enumerate((out.square().mean(), out.abs().mean(), (out - 1).square().mean())):
            model.zero_grad()
            loss.backward(retain_graph=number < 2)
            tasks.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
        merged = [t.clone() for t in tasks]
        for i in range(3):
            for j in range(3):
                dot = merged[i] @ tasks[j]
                if i != j and dot < 0:
                    merged[i] -= dot / tasks[j].square().sum() * tasks[j]
        total = sum(merged)
        at = 0
        for p in model.parameters():
            p.grad.copy_(total[at : at + p.numel()].view_as(p))
            at += p.numel()
        engine.optimizer.step()
        found.append(total)
    return found, values(model)


@same_bits("GradNorm and uncertainty weights: weights of the losses in a plain optimizer, one backward fills both")
def loss_weights(place):
    engine, model = wrapped(place)
    weights = nn.Parameter(torch.zeros(2))
    own, found = torch.optim.Adam([weights], 0.1), []
    for index in range(4):
        out = engine(batch(index))
        losses = torch.stack([out.square().mean(), out.abs().mean()])
        own.zero_grad()
        found.append(step(engine, (losses * (-weights).exp()).sum() + weights.sum()))
        own.step()
        found.append(weights.detach().clone())
    return found, values(model)


@family.works("optimizer in backward with clipping by the norm of each: a post-accumulate hook sets `p.grad` to None")
def updates_in_hooks(place):
    engine, model = wrapped(place)
    buffers = {n: torch.zeros(p.shape) for n, p in model.named_parameters()}
    found = []

    def update(name, p):
        with torch.no_grad():
            buffers[name].mul_(0.9).add_(p.grad * (0.1 / p.grad.norm().clamp(min=0.1)))
            p.sub_(buffers[name], alpha=0.05)
        p.grad = None

    for name, p in model.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: update(name, p))
    for index in range(3):
        loss = loss_of(engine, index)
        loss.backward()
        found += [loss.item(), gradients(model)]
    return found, values(model), buffers


@same_bits("an error of quantised gradients is fed back: `p.grad = sign * mean` and the rest is kept for the next step")
def error_feedback(place):
    engine, model = wrapped(place)
    rest = collections.defaultdict(float)
    found = []
    for index in range(3):
        engine.optimizer.zero_grad()
        loss_of(engine, index).backward()
        for n, p in model.named_parameters():
            wanted = p.grad + rest[n]
            sent = wanted.sign() * wanted.abs().mean()
            rest[n] = wanted - sent
            p.grad = sent
        found.append(gradients(model))
        engine.optimizer.step()
    return found, values(model), dict(rest)


@same_bits(
    "DiLoCo: inner steps by the engine, the outer step by a plain Nesterov SGD over a copy, which is loaded back"
)
def diloco(place):
    engine, model = wrapped(place, optimizer=ExactAdamW, lr=0.01, optimizer_options={"weight_decay": 0.1})
    outer_params = [nn.Parameter(p.detach().clone()) for p in model.parameters()]
    outer, found = torch.optim.SGD(outer_params, lr=0.7, momentum=0.9, nesterov=True), []
    for round_ in range(2):
        for index in range(2):
            found.append(step(engine, loss_of(engine, 10 * round_ + index)))
        for mine, theirs in zip(outer_params, model.parameters(), strict=True):
            mine.grad = mine.data - theirs.data
        outer.step()
        for mine, theirs in zip(outer_params, model.parameters(), strict=True):
            theirs.data.copy_(mine.data)
    return found, values(model)


@same_bits(
    "gradients are divided by a number of tokens, multiplied twice, unscaled by `GradScaler`'s "
    "operation, read in between"
)
def products_of_gradients(place):
    engine, model = wrapped(place)
    found = []
    for index in range(3):
        engine.optimizer.zero_grad()
        loss_of(engine, index).backward()
        for p in model.parameters():
            p.grad.div_(3)
            p.grad.mul_(0.7)
        if index == 1:
            loss_of(engine, index + 10).backward()
        for p in model.parameters():
            p.grad.mul_(torch.tensor(0.3)).mul_(0.1)
            p.grad /= 7
        grads = [p.grad for p in model.parameters()]
        torch._amp_foreach_non_finite_check_and_unscale_(grads, torch.zeros(1), torch.tensor(1 / 3))
        torch._foreach_mul_(grads, 0.9)
        torch._foreach_div_(grads, torch.tensor(4.0))
        if index:
            found.append(gradients(model))
        engine.optimizer.step()
    return found, values(model)


# Things that go wrong, and come back.


@same_bits(
    "a spike of the loss: model and optimizer go back two steps, from a ring of deep copies, and the batch is skipped"
)
def back_two_steps(place):
    engine, model = wrapped(place)
    ring, found, index = collections.deque(maxlen=2), [], 0
    while index < 6:
        ring.append((copy.deepcopy(model.state_dict()), copy.deepcopy(engine.optimizer.state_dict())))
        x = batch(index) * (30 if index == 3 else 1)
        loss = engine(x).square().mean()
        if loss > 5:
            engine.optimizer.zero_grad()
            loss.backward()
            weights, states = ring[0]
            model.load_state_dict(weights)
            engine.optimizer.load_state_dict(states)
            engine.optimizer.zero_grad()
            index += 1
            continue
        found.append(step(engine, loss))
        index += 1
    return found, values(model), [s["momentum_buffer"] for s in engine.optimizer.state.values()]


@same_bits("a NaN is met by `nan_to_num_` on gradients, and a batch with an infinite loss is not stepped")
def nan_batches(place):
    engine, model = wrapped(place)
    found = []
    for index in range(4):
        x = batch(index)
        if index == 1:
            x[0, 0] = math.nan
        if index == 2:
            x[0, 0] = math.inf
        loss = engine(x).square().mean()
        engine.optimizer.zero_grad()
        loss.backward()
        if index == 1:
            for p in model.parameters():
                torch.nan_to_num_(p.grad, nan=0.0, posinf=1.0, neginf=-1.0)
        if not all(p.grad.isfinite().all() for p in model.parameters()):
            engine.optimizer.zero_grad()
            continue
        found.append(gradients(model))
        engine.optimizer.step()
    return found, values(model)


@same_bits("out of memory in the third micro-batch's backward: gradients so far are kept, the rest is tried in halves")
def retried_in_halves(place):
    class Fails(torch.autograd.Function):
        armed = False

        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, gradient):
            if Fails.armed:
                Fails.armed = False
                raise MemoryError("no memory")
            return gradient

    engine, model = wrapped(place)
    found = []
    for index in range(2):
        engine.optimizer.zero_grad()
        for micro in range(3):
            x = batch(10 * index + micro)
            kept = {n: None if p.grad is None else p.grad.clone() for n, p in model.named_parameters()}
            Fails.armed = micro == 2
            try:
                hidden = Fails.apply(model.blocks[1](model.blocks[0](model.first(x))))
                for block in model.blocks[2:]:
                    hidden = block(hidden)
                model.last(hidden).square().sum().backward()
            except MemoryError:
                for n, p in model.named_parameters():
                    p.grad = kept[n]
                for part in x.chunk(2):
                    engine(part).square().sum().backward()
        found.append(gradients(model))
        engine.optimizer.step()
    return found, values(model)


@same_bits("a learning rate finder: both state dicts kept, ten growing rates, both loaded back, the best rate trains")
def rate_range_test(place):
    engine, model = wrapped(place)
    found = [step(engine, loss_of(engine, 0))]
    kept = copy.deepcopy((model.state_dict(), engine.optimizer.state_dict()))
    for number in range(6):
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.001 * 3**number
        found.append(step(engine, loss_of(engine, number)))
    model.load_state_dict(kept[0])
    engine.optimizer.load_state_dict(kept[1])
    found.append([g["lr"] for g in engine.optimizer.param_groups])
    return found, step(engine, loss_of(engine, 1)), values(model)


@same_bits(
    "`load_state_dict(strict=False)` of a checkpoint with missing and foreign keys, in the middle of accumulation"
)
def partial_checkpoint(place):
    engine, model = wrapped(place)
    loss_of(engine, 0).backward()
    state = {k: v * 0.5 for k, v in model.state_dict().items() if "blocks.1" not in k}
    state["other.weight"] = torch.zeros(1)
    told = model.load_state_dict(state, strict=False)
    loss_of(engine, 1).backward()
    found = gradients(model)
    engine.optimizer.step()
    return sorted(told.missing_keys), told.unexpected_keys, found, values(model)


@same_bits("surgery of a state dict: blocks renumbered, heads averaged, biases of zeros; loaded while training")
def state_surgery(place):
    engine, model = wrapped(place)
    found = [step(engine, loss_of(engine, index)) for index in range(2)]
    state = collections.OrderedDict((name, value.clone()) for name, value in model.state_dict().items())
    for part in ("up", "down"):
        for kind in ("weight", "bias"):
            a, b = f"blocks.0.{part}.{kind}", f"blocks.3.{part}.{kind}"
            state[a], state[b] = state[b], state[a]
    state["last.bias"] = torch.zeros_like(state["last.bias"])
    state["last.weight"] = state["last.weight"].view(4, -1, WIDTH).mean(0, keepdim=True).repeat(4, 1, 1).flatten(0, 1)
    model.load_state_dict(state)
    return found, step(engine, loss_of(engine, 3)), values(model)


@same_bits("`load_state_dict(assign=True)` of leaves of a plain model of the same kind, which trains on by itself")
def assigned_from_plain(place):
    engine, model = wrapped(place)
    other = Net()
    own, found = torch.optim.SGD(other.parameters(), 0.1), []
    for index in range(2):
        found.append(step(engine, loss_of(engine, index)))
        own.zero_grad()
        loss_of(other, index + 30).backward()
        own.step()
        model.load_state_dict(other.state_dict(), assign=True)
    return found, step(engine, loss_of(engine, 5)), values(model), values(other)


@same_bits("crossover of two engines: half of the layers of one come from the other, with their momentum")
def crossover(place):
    engines = [wrapped(place)[0], wrapped(place, lr=0.1)[0]]
    found = []
    for index in range(3):
        for number, engine in enumerate(engines):
            found.append(step(engine, loss_of(engine, 10 * index + number)))
        one, two = (e.module for e in engines)
        for i in range(0, 5, 2):
            one.blocks[i].load_state_dict(two.blocks[i].state_dict())
            for p, q in zip(one.blocks[i].parameters(), two.blocks[i].parameters(), strict=True):
                engines[0].optimizer.state[p]["momentum_buffer"].copy_(engines[1].optimizer.state[q]["momentum_buffer"])
    return found, [values(e.module) for e in engines]


# Micro-batches together.


def together(place, body, model=None, *, steps=2, count=4, before=None, **options):
    engine, model = wrapped(place, model, **options)
    found = []
    for index in range(steps):
        batches = [batch(10 * index + i, 1 + i % 3) for i in range(count)]
        found += [engine.together(batches, lambda x: body(engine, x)), gradients(model)]
        if before is not None:
            found.append(before(model, index))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(model)


def trains(engine, x, scale=1.0):
    loss = engine(x).square().mean() * scale
    loss.backward()
    return loss.item()


@same_bits("together: the number of micro-batches changes from step to step, one of them is empty of rows")
def together_uneven(place):
    engine, model = wrapped(place)
    found = []
    for index, count in enumerate((3, 1, 5, 2)):
        batches = [batch(10 * index + i, (4, 1, 2, 0, 3)[i]) for i in range(count)]
        found.append(engine.together(batches, lambda x: trains(engine, x, 1.0 if len(x) else 0.0) if len(x) else 0.0))
        found.append(gradients(model))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(model)


@same_bits("together: blocks at random, other ones in each micro-batch (LayerDrop)")
def together_layer_drop(place):
    class Drops(Net):
        def forward(self, x):
            draw = random.Random(int(x.sum().item() * 1000))
            x = self.first(x)
            for block in self.blocks:
                if draw.random() < 0.6:
                    x = block(x)
            return self.last(x)

    return together(place, trains, Drops())


@same_bits("together: the head's weight is used outside of its module by a fused loss")
def together_weight_outside(place):
    def body(engine, x):
        model = engine.module
        hidden = model.first(x)
        for block in model.blocks:
            hidden = block(hidden)
        loss = F.linear(hidden, model.last.weight).square().mean()
        loss.backward()
        return loss.item()

    return together(place, body)


@family.works("together: a penalty on all weights in each micro-batch")
def together_penalty(place):
    def body(engine, x):
        loss = engine(x).square().mean() + 0.01 * sum(p.square().sum() for p in engine.module.parameters())
        loss.backward()
        return loss.item()

    return together(place, body)


@same_bits("together: `x` is updated by its gradient three times before it trains (PGD)")
def together_pgd(place):
    def body(engine, x):
        x = x.clone()
        for _ in range(3):
            x.requires_grad_()
            (g,) = torch.autograd.grad(engine(x).square().mean(), x)
            x = (x + 0.1 * g.sign()).detach()
        return trains(engine, x)

    return together(place, body)


@same_bits("together: blocks are called by a checkpoint of the user's, with dropout")
def together_checkpoints(place):
    class Random(Block):
        def forward(self, x):
            return x + self.down(F.dropout(torch.tanh(self.up(x)), 0.3, self.training))

    def body(engine, x):
        x = engine.module.first(x)
        for block in engine.module.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        loss = engine.module.last(x).square().mean()
        loss.backward()
        return loss.item()

    return together(place, body, Net(Random))


@same_bits("together: a micro-batch returns early without a forward, another has a forward only")
def together_early(place):
    def body(engine, x):
        if len(x) == 1:
            return "too short"
        if len(x) == 3:
            with torch.no_grad():
                return engine(x)
        return trains(engine, x)

    return together(place, body)


@same_bits("together: a buffer of the model decides (a queue in MoCo), and each micro-batch writes to it")
def together_queue(place):
    class Queued(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("queue", torch.zeros(6, WIDTH))

        def forward(self, x):
            out = super().forward(x)
            loss = (out @ self.queue.clone().t()).square().mean() + out.square().mean()
            self.queue = torch.cat([out.detach(), self.queue])[:6]
            return loss

    def body(engine, x):
        loss = engine(x)
        loss.backward()
        return loss.item()

    return together(place, body, Queued())


@same_bits("together: gradients of parameters by `autograd.grad` are added to a list of one's own, no backward")
def together_grads_in_lists(place):
    engine, model = wrapped(place)
    found = []
    for index in range(2):
        sums = [torch.zeros(p.shape) for p in model.parameters()]

        def body(x, sums=sums):
            grads = torch.autograd.grad(engine(x).square().mean(), list(model.parameters()))
            for total, g in zip(sums, grads, strict=True):
                total.add_(g)
            return len(grads)

        found.append(engine.together([batch(10 * index + i) for i in range(3)], body))
        for p, total in zip(model.parameters(), sums, strict=True):
            p.grad = total
        found.append(gradients(model))
        engine.optimizer.step()
    return found, values(model)


@same_bits("together: hooks of weights that count, clip and keep, added within each micro-batch and removed at its end")
def together_hooks_inside(place):
    def body(engine, x):
        norms = []
        handles = [
            block.up.weight.register_hook(lambda g: norms.append(g.norm().item()) or g * 0.5)
            for block in engine.module.blocks
        ]
        loss = trains(engine, x)
        for handle in handles:
            handle.remove()
        return loss, norms

    return together(place, body)


@same_bits("together: each micro-batch reads and writes a bias of a block between forward and backward")
def together_writes_between(place):
    def body(engine, x):
        loss = engine(x).square().mean()
        with torch.no_grad():
            before = engine.module.blocks[2].down.bias.sum().item()
            engine.module.blocks[2].down.bias.add_(0.01)
        loss.backward()
        return loss.item(), before

    return together(place, body)


@same_bits("together: generators as micro-batches, an iterator that loads lazily, and `at_once=2`")
def together_lazy(place):
    engine, model = wrapped(place)
    seen, found = [], []

    def load():
        for i in range(5):
            seen.append(i)
            yield batch(i)

    found.append(engine.together(load(), lambda x: trains(engine, x), at_once=2))
    found.append(gradients(model))
    engine.optimizer.step()
    return found, sorted(seen), values(model)
