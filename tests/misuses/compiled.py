"""Blocks that `torch.compile` has compiled, of each kind and with each habit of a loop: in RAM, on NVMe, recomputed and
with activations over the tiers. Plain PyTorch compiles the same blocks."""

from __future__ import annotations

import torch._dynamo

from misuses.case import Family
from misuses.composed import HABITS, Habit, play
from misuses.joints import program
from misuses.kinds_of_blocks import KINDS, NOT_SAVED

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
