"""What happens between a forward and its backward, and how often and from where the backward comes: with blocks of each
kind, which are recomputed, kept elsewhere or as they are."""

from __future__ import annotations

import contextlib
import copy
import gc
import random
import threading

import torch
from torch import nn

from misuses.case import Family
from misuses.composed import Habit, play
from misuses.joints import program
from misuses.kinds_of_blocks import KINDS

family = Family("between")

JOINTS = ("recomputed", "over the tiers", "mixed", "together, over the tiers", "recomputed", "plain")

BETWEEN: dict[str, type[Habit]] = {}


def between(told):
    def add(made):
        BETWEEN[told] = made
        return made

    return add


def in_thread(call):
    """What it gives, or raises."""
    found = []

    def run():
        try:
            found.append((call(), None))
        except BaseException as error:
            found.append((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    value, error = found[0]
    if error is not None:
        raise error
    return value


@between("the backward is in a thread of its own")
class InThread(Habit):
    def backward(self, loss, next):
        in_thread(lambda: next(loss))


@between("an evaluation in train mode without gradients, which moves what a forward moves")
class Moved(Habit):
    def loss(self, loss, x, y):
        with torch.no_grad():
            return loss * (1 + self.engine(x.detach() * 0.5).abs().mean())


@between("another forward whose graph is thrown away")
class Another(Habit):
    def loss(self, loss, x, y):
        return loss * (1 + self.engine(x.detach() * 0.5).abs().mean().detach())


@between("another forward, which goes backward before")
class First(Habit):
    def loss(self, loss, x, y):
        self.engine(x.detach() * 0.5).square().mean().backward()
        return loss


@between("halves of the output go backward in turn, the graph is retained")
class InHalves(Habit):
    def loss(self, loss, x, y):
        self.y = threading.local() if not hasattr(self, "y") else self.y
        self.y.value = y
        return loss

    def backward(self, loss, next):
        y, self.y.value = self.y.value, None
        (loss * 0.1 + y[:, :16].abs().mean()).backward(retain_graph=True)
        (y[:, 16:].abs().mean()).backward()


@between("the backward goes thrice, in growing parts")
class Thrice(Habit):
    def backward(self, loss, next):
        for factor in (0.25, 0.5):
            (loss * factor).backward(retain_graph=True)
        next(loss)


@between("gradients by hidden states first, then by weights of the blocks before them")
class Chained(Habit):
    forward_is_its_own = True

    def forward(self, x):
        x = self.model.first(x)
        hidden = []
        for block in self.model.blocks:
            x = block(x)
            hidden.append(x)
        x = self.model.last(x)
        loss = x.square().mean()
        slopes = torch.autograd.grad(loss, hidden[2::3], retain_graph=True)
        return x / (1 + sum(slope.abs().sum() for slope in slopes))


@between("a seed is set")
class Seeded(Habit):
    def loss(self, loss, x, y):
        torch.manual_seed(5)
        random.seed(5)
        return loss


@between("eval mode is set for the backward")
class InEval(Habit):
    @contextlib.contextmanager
    def around_backward(self):
        self.model.eval()
        yield
        self.model.train()


@between("the default dtype and autocast are others for the backward")
class OtherDtype(Habit):
    @contextlib.contextmanager
    def around_backward(self):
        torch.set_default_dtype(torch.float64)
        with torch.autocast("cpu", torch.bfloat16):
            yield
        torch.set_default_dtype(torch.float32)


@between("gradients are dropped and garbage is collected")
class Collected(Habit):
    def loss(self, loss, x, y):
        gc.collect()
        return loss

    def between(self, step):
        gc.collect()


@between("a deep copy of the model goes forward and backward")
class CopyBetween(Habit):
    def loss(self, loss, x, y):
        twin = copy.deepcopy(self.model)
        twin(x.detach()).square().mean().backward()
        return loss * (1 + twin.last.weight.grad.abs().max())


@between("weights, buffers and states are read, and the state dict is taken")
class Looked(Habit):
    def loss(self, loss, x, y):
        state = self.model.state_dict()
        return loss * (1 + sum(v.float().abs().mean() for v in state.values()) / len(state))


@between("forward hooks of all blocks come in the first step and go in the second")
class ComingHooks(Habit):
    def between(self, step):
        if step == 0:
            self.handles = [
                block.register_forward_hook(lambda block, inputs, output: output * 1.01) for block in self.model.blocks
            ]
        if step == 1:
            for handle in self.handles:
                handle.remove()


@between("the output is written in place before the loss")
class Written(Habit):
    forward_is_its_own = True

    def forward(self, x):
        y = self.engine(x)
        y.mul_(0.5)
        y[:, :3] = y[:, 3:6].clone()
        return y


@between("hidden states are written in place between blocks")
class WrittenBetween(Habit):
    forward_is_its_own = True

    def forward(self, x):
        x = self.model.first(x)
        for block in self.model.blocks:
            x = block(x).clone()
            x.mul_(0.9)
            x[:, 0] = 0.1
        return self.model.last(x)


@between("two graphs are held, the first goes backward last")
class LastFirst(Habit):
    forward_is_its_own = True

    def forward(self, x):
        first = self.engine(x)
        second = self.engine(x * 0.7)
        second.square().mean().backward()
        return first


@between("a backward is broken off by a hook, the same graph goes backward again")
class BrokenOff(Habit):
    forward_is_its_own = True

    def forward(self, x):
        x = self.model.first(x)
        for index, block in enumerate(self.model.blocks):
            x = block(x)
            if index == 3:
                x.register_hook(self.stop)
        self.stops = True
        return self.model.last(x)

    def stop(self, gradient):
        if self.stops:
            raise InterruptedError

    def backward(self, loss, next):
        with contextlib.suppress(InterruptedError):
            (loss * 1.0).backward(retain_graph=True)
        self.stops = False
        next(loss)


@between("`torch.autograd.grad` by the input, of a row of the output at a time")
class Rows(Habit):
    def batch(self, x):
        return x.clone().requires_grad_()

    def loss(self, loss, x, y):
        slopes = [torch.autograd.grad(y[row].sum(), x, retain_graph=True)[0].abs().sum() for row in (0, 7)]
        return loss * (1 + 1e-3 * sum(slopes))


@between("`backward(inputs=...)` of the upper blocks, then of the lower ones, one graph")
class UpperFirst(Habit):
    def backward(self, loss, next):
        weights = [p for p in self.model.parameters() if p.requires_grad]
        half = len(weights) // 2
        loss.backward(inputs=weights[half:], retain_graph=True)
        loss.backward(inputs=weights[:half])


@between("a subset of rows goes on to the loss by a mask that the output makes")
class Chosen(Habit):
    forward_is_its_own = True

    def forward(self, x):
        y = self.engine(x)
        return y[y.detach().mean(1) > 0]


@between("activations of all blocks get a hook that notes and scales, and `retain_grad`")
class Noted(Habit):
    forward_is_its_own = True

    def forward(self, x):
        x = self.model.first(x)
        self.kept = []
        for block in self.model.blocks:
            x = block(x)
            if x.requires_grad:
                x.retain_grad()
                x.register_hook(lambda gradient: gradient * 0.95)
                self.kept.append(x)
        return self.model.last(x)

    def between(self, step):
        with torch.no_grad():
            for p in self.model.last.parameters():
                p.grad.mul_(1 + min(1.0, sum(x.grad.abs().max().item() for x in self.kept)))
        self.kept = []


@between("gradients of a step are taken of a batch, its parts, and the batch again by one norm layer")
class Parts(Habit):
    forward_is_its_own = True

    def forward(self, x):
        norm = nn.functional.layer_norm
        whole = norm(self.engine(x), (32,))
        parts = torch.cat([self.engine(part) for part in x.split(96)])
        return whole + parts.detach() * 0.1 + 0.1 * norm(parts, (32,))


names = [*KINDS]
for index, told in enumerate(BETWEEN):
    for part in range(0, len(names), 3):
        of = [names[(part + place + index) % len(names)] for place in range(3)]

        def body(run, of=of, told=told):
            return play(run, of, [BETWEEN[told]()])

        body.__name__ = f"between_{index}_{part // 3}"
        joint = JOINTS[(index + part // 3) % len(JOINTS)]
        if BETWEEN[told] is InThread:  # a micro-batch has one thread
            joint = joint.replace("together, ", "")
        program(family, f"blocks: {', '.join(of)}; {told}", (joint,))(body)
