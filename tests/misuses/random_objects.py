"""Random programs over gradients and parameters as objects: kept, swapped, shared, assigned, views, hooks, leaves."""

import random

import torch
from tiny import loss_of
from torch import nn

from misuses.case import Family
from misuses.place import data, values

family = Family("random programs")

NUM_PROGRAMS = 12


class _Net(nn.Module):
    """Layers of one shape, so that anything can take anything's place."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(64, 16)
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(6))
        self.head = nn.Linear(16, 64)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = x + torch.tanh(layer(x)) * getattr(layer.weight, "factor", 1.0)
        return self.head(x)


class _Program:
    """What one program has, and what it may do next."""

    def __init__(self, place, seed):
        torch.manual_seed(seed)
        self.random = random.Random(seed)
        self.engine = place.wrap(_Net(), optimizer="sgd", lr=0.1)
        self.model = self.engine.module
        self.weights = [layer.weight for layer in self.model.layers]
        self.kept, self.given, self.hooks, self.found = [], [], [], []
        self.batches = data(4)
        self.num_backwards = 0

    def run(self, length=20):
        calls = sorted(name for name in dir(self) if name.startswith("do_"))
        for _ in range(length):
            getattr(self, self.random.choice(calls))()
        self.do_backward()
        self.do_step()
        return self.found, values(self.model)

    def pick(self):
        return self.random.choice(self.weights)

    def picked_gradient(self):
        weight = self.pick()
        if weight.grad is None:
            self.do_backward()
        return weight.grad

    def loss(self):
        tokens, targets = self.batches[self.num_backwards % 4]
        self.num_backwards += 1
        return loss_of(self.model(tokens), targets)

    def do_backward(self):
        loss = self.loss()
        if self.random.random() < 0.4:
            loss = loss + 0.01 * self.pick().pow(2).sum()
        loss.backward()

    do_backward_again = do_backward

    def do_step(self):
        self.engine.optimizer.step()
        self.kept.clear()
        self.found.append([w.grad is None or w.grad.norm().item() for w in self.weights])
        self.do_zero()

    def do_zero(self):
        how = self.random.randrange(4)
        if how == 0:
            self.engine.optimizer.zero_grad()
        elif how == 1:
            self.model.zero_grad()
        elif how == 2:
            self.model.zero_grad(set_to_none=False)
        else:
            for p in self.model.parameters():
                p.grad = None

    def do_keep(self):
        self.kept.append(self.picked_gradient())

    def do_look(self):
        self.found.append([g.sum().item() for g in self.kept])
        self.found.append([g.abs().max().item() for g in self.given])

    def do_change_kept(self):
        if self.kept:
            self.random.choice(self.kept).mul_(self.random.choice([0.5, 2.0]))

    def do_assign_kept(self):
        if self.kept:
            self.pick().grad = self.random.choice(self.kept)

    def do_share(self):
        self.pick().grad = self.picked_gradient()

    def do_swap(self):
        p, q = self.random.sample(self.weights, 2)
        p.grad, q.grad = q.grad, p.grad

    def do_assign(self):
        given = torch.randn(16, 16, generator=torch.Generator().manual_seed(self.random.randrange(100)))
        self.pick().grad = given
        self.given.append(given)

    def do_change_given(self):
        for given in self.given:
            given.data.mul_(1.5)

    def do_bucket(self):
        flat = torch.zeros(2, 16, 16)
        for view, weight in zip(flat, self.random.sample(self.weights, 2), strict=True):
            weight.grad = view
        self.given.append(flat)

    def do_change_gradient(self):
        gradient = self.picked_gradient()
        how = self.random.randrange(5)
        if how == 0:
            gradient.mul_(torch.tensor(0.5))
        elif how == 1:
            gradient.clamp_(-1e-3, 1e-3)
        elif how == 2:
            gradient.zero_()
        elif how == 3:
            gradient[0].add_(1e-3)
        else:
            gradient.view(-1)[::2] = 0

    def do_clip(self):
        self.found.append(nn.utils.clip_grad_norm_(self.model.parameters(), 0.5).item())

    def do_drop(self):
        self.pick().grad = None

    def do_hook(self):
        if self.hooks and self.random.random() < 0.5:
            self.hooks.pop().remove()
        elif self.random.random() < 0.5:
            self.hooks.append(self.pick().register_hook(lambda gradient: gradient.clamp(-2e-3, 2e-3)))
        else:
            seen = self.found
            hook = self.pick().register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.norm().item()))
            self.hooks.append(hook)

    def do_attribute(self):
        weight = self.pick()
        if hasattr(weight, "factor"):
            del weight.factor
        else:
            weight.factor = 1.0 + self.random.random()

    def do_write(self):
        weight, other = self.random.sample(self.weights, 2)
        how = self.random.randrange(3)
        with torch.no_grad():
            if how == 0:
                weight.copy_(other)
            elif how == 1:
                weight.data.mul_(0.9)
            else:
                weight[1].add_(other[2])

    def do_leaf(self):
        weight = self.pick()
        leaf = weight.detach().requires_grad_() if self.random.random() < 0.5 else nn.Parameter(weight)
        (leaf * 2).sum().backward()
        self.found.append(leaf.grad.sum().item())

    def do_grad(self):
        found = torch.autograd.grad(self.loss(), self.weights)
        self.found.append([g.norm().item() for g in found])


def _add(seed):
    def body(place):
        return _Program(place, seed).run()

    body.__name__ = f"random_objects_{seed}"
    family.works(f"random program {seed}", rtol=1e-4, atol=1e-5)(body)


for number in range(NUM_PROGRAMS):
    _add(number)
