"""Blocks that `torch.compile` has compiled, of each kind and with each habit of a loop: in RAM, on NVMe, recomputed and
with activations over the tiers. Plain PyTorch compiles the same blocks."""

from __future__ import annotations

import torch
import torch._dynamo

from misuses.case import Family
from misuses.composed import HABITS, Habit, play
from misuses.joints import batch, program, stepped
from misuses.kinds_of_blocks import KINDS, NOT_SAVED
from misuses.place import values

family = Family("compiled")

JOINTS = ("plain", "recomputed", "over the tiers", "together", "mixed", "resumed, recomputed")


class Before(Habit):
    """Blocks are compiled, and then wrapped."""

    backend = "aot_eager"

    def build(self, model):
        torch._dynamo.reset()
        self.compile(model)

    def compile(self, model):
        for block in model.blocks:
            block.compile(backend=self.backend)


class After(Before):
    backend = "eager"

    def build(self, model):
        torch._dynamo.reset()

    def attach(self, engine):
        super().attach(engine)
        self.compile(engine.module)


WAYS = {"compiled before wrapping (aot_eager)": Before, "compiled after wrapping (eager)": After}


def add(number, kind, habit):
    joint = JOINTS[number % len(JOINTS)]
    if kind in NOT_SAVED:
        joint = joint.replace("resumed, ", "")
    way = [*WAYS][number % 2]

    def body(run):
        return play(run, [kind, "", ""], [HABITS[habit](), WAYS[way]()])

    body.__name__ = f"compiled_{number}"
    program(family, f"blocks are {way}, the first: {kind}; the loop: {habit}", (joint,), seconds=180.0)(body)


kinds, habits = [*KINDS][::2], [*HABITS]
for number in range(10):
    add(number, kinds[number % len(kinds)], habits[number * 7 % len(habits)])


# Functions of the loop, compiled.


@program(family, "a compiled function halves gradients", ("plain", "recomputed", "over the tiers"), seconds=180.0)
def compiled_halving(run):
    torch._dynamo.reset()
    engine = run.engine()

    @torch.compile(backend="aot_eager")
    def halve(parameters):
        for parameter in parameters:
            parameter.grad.mul_(0.5)

    found = []
    for index in range(2):
        loss = engine.module(batch(index)).square().mean()
        loss.backward()
        halve(list(engine.module.blocks[0].parameters()))
        found += [loss.item(), stepped(engine)]
    return found, values(engine.module)


@program(family, "a compiled function assigns gradients", ("plain", "recomputed"), seconds=180.0)
def compiled_assigning(run):
    torch._dynamo.reset()
    engine = run.engine()

    @torch.compile(backend="aot_eager")
    def halve(parameter):
        parameter.grad = parameter.grad * 0.5

    found = []
    for index in range(2):
        loss = engine.module(batch(index)).square().mean()
        loss.backward()
        halve(engine.module.last.weight)
        found += [loss.item(), stepped(engine)]
    return found, values(engine.module)
