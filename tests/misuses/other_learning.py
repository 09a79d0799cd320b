"""Other ways to learn than one backward of one loss: local and Hebbian rules, feedback of other kinds, contrasts of two
phases, inner loops within a forward, weights made of other weights, and memory that a program manages by itself."""

from __future__ import annotations

import copy
import io
import math
import weakref
from pathlib import Path

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from misuses.case import Family
from misuses.joints import batch, program, stepped
from misuses.loops_of_today import loop, mean
from misuses.place import gradients, values
from misuses.strangers import WIDTH, Block, Net

family = Family("other ways to learn")
TWO = ("plain", "mixed")
FOUR = ("plain", "mixed", "together", "resumed")
PLAIN = ("plain", "mixed", "resumed")
WHOLE = ("plain", "recomputed", "together", "resumed")


def other(title, joints=TWO, **options):
    return program(family, title, joints, **options)


# Feedback of other kinds.


class Feedback(torch.autograd.Function):
    """Kolen and Pollack: the way back is by a weight of its own, which gets the same gradient as the one forward."""

    @staticmethod
    def forward(ctx, x, weight, back):
        ctx.save_for_backward(x, back)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, back = ctx.saved_tensors
        moved = gradient.t() @ x
        return gradient @ back, moved, moved.clone()


class KolenPollack(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)
        self.back = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.2)

    def forward(self, x):
        return x + torch.tanh(Feedback.apply(x, self.weight, self.back))


@other("Kolen-Pollack: a weight that is used in the backward alone, and gets the gradient of the forward's", FOUR)
def kolen_pollack(run):
    return loop(run, lambda: Net(KolenPollack), body=mean)


class Direct(torch.autograd.Function):
    error = None

    @staticmethod
    def forward(ctx, x, feedback):
        ctx.save_for_backward(feedback)
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        (feedback,) = ctx.saved_tensors
        return Direct.error @ feedback, None


class Top(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        Direct.error = gradient.clone()
        return gradient


@other("direct feedback alignment: a Function at the top keeps the error in a class, each block's backward uses it")
def direct_feedback(run):
    class Aligned(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("feedback", torch.randn(WIDTH, WIDTH) * 0.1)

        def forward(self, x):
            return Direct.apply(super().forward(x), self.feedback)

    return loop(run, lambda: Net(Aligned), body=lambda e, i: Top.apply(e(batch(i))).square().mean())


@other("sign-symmetric feedback: a Function whose backward uses `weight.sign()` of the weight that it saved", FOUR)
def sign_symmetric(run):
    class Signs(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            ctx.save_for_backward(x, weight)
            return x @ weight.t()

        @staticmethod
        def backward(ctx, gradient):
            x, weight = ctx.saved_tensors
            return gradient @ weight.sign() * 0.05, gradient.t() @ x

    class Own(Block):
        def forward(self, x):
            return x + Signs.apply(torch.tanh(Signs.apply(x, self.up.weight)), self.down.weight)

    return loop(run, lambda: Net(Own), body=mean)


@other("Hebb: gradients are outer products of activities from forward hooks, there is no backward at all", ("plain",))
def hebbian(run):
    torch.manual_seed(5)
    net = Net()
    activity = {}
    for name, layer in net.named_modules():
        if isinstance(layer, nn.Linear):
            layer.register_forward_hook(lambda m, a, out, name=name: activity.__setitem__(name, (a[0], out)))
    engine = run.engine(net)
    found = []
    for index in range(4):
        with torch.no_grad():
            engine(batch(index))
        for name, layer in net.named_modules():
            if isinstance(layer, nn.Linear):
                x, y = activity[name]
                layer.weight.grad = -(y.t() @ x - y.square().sum(0)[:, None] * layer.weight) / len(x)
                layer.bias.grad = torch.zeros_like(layer.bias)
        found.append(stepped(engine))
    return found, values(net)


@other(
    "Oja's rule: a block moves its own weight under `no_grad` in its forward, the rest learns by gradients",
    ("plain", "mixed", "together", "resumed"),
    refused={"mixed": "writes to its weights.*Do not recompute"},
)
def oja(run):
    class Oja(Block):
        def forward(self, x):
            if self.training and torch.is_grad_enabled():
                with torch.no_grad():
                    y = x @ self.up.weight.t()
                    self.up.weight.add_(1e-3 * (y.t() @ x - y.t() @ y @ self.up.weight) / len(x))
            return super().forward(x)

    return loop(run, lambda: Net(Oja), body=mean)


@other(
    "equilibrium propagation: two phases of a free energy, the state walks by `autograd.grad`, weights by the contrast"
)
def equilibrium_propagation(run):
    class Energy(Net):
        def energy(self, x, states):
            total, before = 0, torch.tanh(self.first(x))
            for block, state in zip(self.blocks, states, strict=True):
                total = total + (state - block(before)).square().sum()
                before = torch.tanh(state)
            return total

        def forward(self, x, states):
            return self.energy(x, states)

    def settle(engine, x, states, target, beta):
        for _ in range(3):
            states = [s.detach().requires_grad_() for s in states]
            total = engine(x, states) + beta * (states[-1] - target).square().sum()
            states = [s - 0.05 * g for s, g in zip(states, torch.autograd.grad(total, states), strict=True)]
        return [s.detach() for s in states]

    def body(engine, index):
        x, target = batch(index), batch(index + 30)
        states = [torch.zeros_like(x) for _ in range(5)]
        free = settle(engine, x, states, target, 0.0)
        nudged = settle(engine, x, free, target, 0.5)
        return (engine(x, nudged) - engine(x, free)) / len(x)

    return loop(run, Energy, body=body, each=1)


@other("predictive coding: an inner loop over activations of all blocks at once, then weights learn from the errors")
def predictive_coding(run):
    def body(engine, index):
        model = engine.module
        x, target = batch(index), batch(index + 30)
        with torch.no_grad():
            states, h = [], model.first(x)
            for block in model.blocks:
                h = block(h)
                states.append(h)
        states[-1] = target

        def errors():
            h, total = model.first(x), 0
            for block, state in zip(model.blocks, states, strict=True):
                total = total + (state - block(h)).square().mean()
                h = state
            return total

        for _ in range(2):
            states = [s.detach().requires_grad_(n < 4) for n, s in enumerate(states)]
            moved = torch.autograd.grad(errors(), states[:-1])
            states = [*(s - 0.1 * g for s, g in zip(states, moved, strict=False)), states[-1]]
        states = [s.detach() for s in states]
        return errors()

    return loop(run, body=body, each=1)


@other("target propagation: each block has a learnt inverse, targets go down by inverses, every block has its own loss")
def target_propagation(run):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

        def forward(self, x, inverse=False):
            return torch.tanh((self.back if inverse else self.up)(x))

    def body(engine, index):
        model = engine.module
        x = batch(index)
        hidden = [model.first(x)]
        for block in model.blocks:
            hidden.append(block(hidden[-1].detach()))
        target = (hidden[-1] - 0.1 * hidden[-1]).detach()
        loss = 0
        for block, before, after in zip(reversed(model.blocks), hidden[-2::-1], hidden[:0:-1], strict=True):
            loss = loss + (after - target).square().mean()
            noisy = before.detach() + 0.01
            loss = loss + (block(block(noisy), inverse=True) - noisy).square().mean()
            with torch.no_grad():
                target = before + block(target, inverse=True) - block(after, inverse=True)
        return loss

    return loop(run, lambda: Net(Pair), body=body)


@other(
    "difference of two passes: the second forward's weights are moved by `functional_call`, the slope is a gradient",
    ("plain",),
)
def perturbed_difference(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    found = []
    for index in range(3):
        direction = {n: torch.randn_like(p) for n, p in engine.module.named_parameters()}
        with torch.no_grad():
            now = mean(engine, index)
            moved = {n: p + 1e-3 * direction[n] for n, p in engine.module.named_parameters()}
            then = functional_call(engine.module, moved, (batch(index),)).square().mean()
        slope = (then - now) / 1e-3
        for name, parameter in engine.module.named_parameters():
            parameter.grad = slope * direction[name]
        found.append((slope.item(), stepped(engine)))
    return found, values(engine.module)


@other("flipout: signs by row before and after a random perturbation of the weight, drawn in the forward", FOUR)
def flipout(run):
    class Flipout(Block):
        def forward(self, x):
            r, s = (torch.randint_like(x, 2) * 2 - 1 for _ in range(2))
            noise = torch.randn_like(self.up.weight) * 0.05 * self.up.weight
            return x + self.down(torch.tanh(self.up(x) + F.linear(x * s, noise) * r))

    return loop(run, lambda: Net(Flipout), body=mean)


@other(
    "real-time recurrent learning: sensitivities by `jacfwd` of a cell, carried over steps, give `p.grad` by a product",
    ("plain",),
)
def real_time_recurrent(run):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4) * 0.3)
            self.inp = nn.Linear(WIDTH, 4)

        def forward(self, x):
            return self.inp(x)

    torch.manual_seed(5)
    engine = run.engine(nn.Sequential(nn.Linear(WIDTH, WIDTH), Cell()))
    cell = engine.module[1]
    state, sensitivity, found = torch.zeros(4), torch.zeros(4, 4, 4), []
    for index in range(4):
        with torch.no_grad():
            drive = engine(batch(index))[0]
        weight = cell.weight.detach().clone()
        step = lambda w, s, d=drive: torch.tanh(w @ s + d)  # noqa: E731
        direct = torch.func.jacfwd(step, 0)(weight, state)
        through = torch.func.jacfwd(step, 1)(weight, state)
        sensitivity = direct + torch.einsum("ij,jkl->ikl", through, sensitivity)
        state = step(weight, state)
        cell.weight.grad = torch.einsum("i,ikl->kl", 2 * state, sensitivity)
        found.append(stepped(engine))
    return found, values(engine.module)


@other(
    "score matching by slices: a product of the output with noise, `autograd.grad(create_graph=True)` in each block",
    FOUR,
)
def sliced_scores(run):
    class Score(Block):
        def forward(self, x):
            with torch.enable_grad():
                leaf = x.detach().requires_grad_()
                score = self.down(torch.tanh(self.up(leaf)))
                v = torch.ones_like(score)
                (slope,) = torch.autograd.grad((score * v).sum(), leaf, create_graph=True)
            self.loss = (slope * v).sum(-1).mean() + 0.5 * score.square().sum(-1).mean()
            return x + 0.1 * score

    def body(engine, index):
        out = engine(batch(index)).square().mean()
        return out + 0.01 * sum(block.loss for block in engine.module.blocks)

    return loop(run, lambda: Net(Score), body=body)


@other(
    "test-time training: fast weights are buffers, moved in each forward by an inner gradient of `torch.func`",
    FOUR,
)
def test_time_training(run):
    class Fast(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("fast", torch.eye(WIDTH))

        def forward(self, x):
            def inner(w):
                return (x.detach() @ w - torch.tanh(x.detach())).square().mean()

            self.fast = (self.fast - 0.1 * torch.func.grad(inner)(self.fast)).detach()
            return x + self.down(torch.tanh(self.up(x @ self.fast)))

    return loop(run, lambda: Net(Fast), body=mean)


@other(
    "test-time training by heads: the slow weight is where the fast one begins, two inner steps with a graph (Titans)",
    FOUR,
)
def titans(run):
    class Memory(Block):
        def forward(self, x):
            weight, momentum = self.up.weight, torch.zeros(WIDTH, WIDTH)
            outs = []
            for part in x.chunk(2):
                surprise = (part @ weight.t() - part).t() @ part / len(part)
                momentum = 0.9 * momentum - 0.1 * surprise
                weight = 0.99 * weight + momentum
                outs.append(part + self.down(torch.tanh(part @ weight.t())))
            return torch.cat(outs)

    return loop(run, lambda: Net(Memory), body=mean)


@other("LISTA: one dictionary is used by five unrolled steps with thresholds of their own", FOUR)
def lista(run):
    class Lista(nn.Module):
        def __init__(self):
            super().__init__()
            self.dictionary = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
            self.steps, self.limits = nn.Parameter(torch.full((5,), 0.1)), nn.Parameter(torch.full((5,), 0.01))

        def forward(self, x):
            z = torch.zeros_like(x)
            for t in range(5):
                z = F.softshrink(z + self.steps[t] * (x - z @ self.dictionary) @ self.dictionary.t(), 0.0)
                z = z.sign() * (z.abs() - self.limits[t]).relu()
            return x + z

    return loop(run, lambda: Net(Lista), body=mean)


@other("modern Hopfield retrieval from a bank that is filled in evaluation, and a learnt inverse temperature", FOUR)
def hopfield(run):
    class Bank(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("bank", torch.zeros(0, WIDTH))
            self.beta = nn.Parameter(torch.tensor(1.0))

        def forward(self, x):
            if not self.training:
                self.bank = torch.cat([self.bank, x[:2].detach()])[-6:]
            out = super().forward(x)
            return out if not len(self.bank) else out + (self.beta * x @ self.bank.t()).softmax(-1) @ self.bank

    def after(engine, step):
        engine.module.eval()
        with torch.no_grad():
            engine.module(batch(90 + step))
        engine.module.train()

    if run.joint == "resumed":  # the bank has grown by then: the new model's has to be of its size
        return loop(run, lambda: Net(Bank), body=mean)
    return loop(run, lambda: Net(Bank), body=mean, after=after)


# Weights of other weights.


class Flat(nn.Module):
    """FSDP's flat parameter by hand: one vector, whose views are attributes of plain layers in each forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner = Net(Block)
        self.shapes = [(name, p.shape, p.numel()) for name, p in self.inner.named_parameters()]
        self.flat = nn.Parameter(torch.cat([p.detach().flatten() for p in self.inner.parameters()]))
        for name, _, _ in self.shapes:
            owner, _, last = name.rpartition(".")
            delattr(self.inner.get_submodule(owner), last)

    def forward(self, x):
        parts = self.flat.split([numel for _, _, numel in self.shapes])
        for (name, shape, _), part in zip(self.shapes, parts, strict=True):
            owner, _, last = name.rpartition(".")
            setattr(self.inner.get_submodule(owner), last, part.view(shape))
        return self.inner(x)


@other(
    "one flat parameter of the whole model; its views are set as attributes of layers in each forward",
    ("plain", "resumed"),
)
def flat_parameter(run):
    return loop(run, Flat, body=mean)


class FlatBlock(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        sizes = [(m, n) for m in (self.up, self.down) for n in ("weight", "bias")]
        self.flat = nn.Parameter(torch.cat([getattr(m, n).detach().flatten() for m, n in sizes]))
        for m, n in sizes:
            delattr(m, n)

    def forward(self, x):
        w = WIDTH * WIDTH
        for m, start in ((self.up, 0), (self.down, w + WIDTH)):
            m.weight = self.flat[start : start + w].view(WIDTH, WIDTH)
            m.bias = self.flat[start + w : start + w + WIDTH]
        return x + self.down(torch.tanh(self.up(x)))


@other(
    "a flat parameter in each block; views stay as attributes of layers after the forward and are read in the loop",
    FOUR,
)
def flat_blocks(run):
    def after(engine, step):
        return [block.up.bias.detach().sum().item() for block in engine.module.blocks]

    if run.joint == "resumed":
        return loop(run, lambda: Net(FlatBlock), body=mean)
    return loop(run, lambda: Net(FlatBlock), body=mean, after=after)


@other("the head is a slice of the embedding's rows, in a property: a partial tie", PLAIN)
def partial_tie(run):
    class Partly(Net):
        def __init__(self):
            super().__init__()
            self.embed = nn.Embedding(3 * WIDTH, WIDTH)

        @property
        def head_weight(self):
            return self.embed.weight[WIDTH : 2 * WIDTH]

        def forward(self, x):
            tokens = (x[:, 0].abs() * 100).long() % (3 * WIDTH)
            return F.linear(super().forward(x + self.embed(tokens)), self.head_weight)

    return loop(run, Partly, body=mean, each=1)


@other(
    "blocks are tied by transposition: the second half's weights are the first half's, turned, mirrored in order", FOUR
)
def mirrored(run):
    class Mirrored(Net):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            for block in reversed(self.blocks):
                x = x - F.linear(torch.tanh(F.linear(x, block.down.weight.t())), block.up.weight.mT)
            return self.last(x)

    return loop(run, Mirrored, body=mean, each=1)


@other("a bank of templates at the root, blocks have coefficients alone and mix their weights from it", FOUR)
def templates(run):
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.mix = nn.Parameter(torch.randn(4) * 0.5)

        def forward(self, x, bank):
            return x + torch.tanh(F.linear(x, torch.einsum("k,kij->ij", self.mix, bank)))

    class Templates(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.bank = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.1)
            self.blocks = nn.ModuleList(Mixing() for _ in range(5))

        def forward(self, x):
            for block in self.blocks:
                x = block(x, self.bank)
            return x

    return loop(run, Templates, body=mean)


@other("each block's weight is the one before it plus a low-rank change: a chain through lists that are not registered")
def chained_weights(run):
    class Chained(nn.Module):
        def __init__(self):
            super().__init__()
            self.before = []
            self.base = nn.Parameter(torch.randn(WIDTH, WIDTH) * 0.1)
            self.a, self.b = nn.Parameter(torch.randn(WIDTH, 2) * 0.1), nn.Parameter(torch.randn(2, WIDTH) * 0.1)

        def weight(self):
            return (self.before[0].weight() if self.before else self.base) + self.a @ self.b

        def forward(self, x):
            return x + torch.tanh(F.linear(x, self.weight()))

    def build():
        net = Net(Chained)
        for one, two in zip(net.blocks, net.blocks[1:], strict=False):
            two.before.append(one)
            two.base = None
        return net

    return loop(run, build, body=mean, each=1)


@other(
    "the root computes weights of all blocks from codes, and sets them as plain attributes of the blocks",
    ("plain", "resumed"),
)
def weights_set_by_root(run):
    class Bare(nn.Module):
        weight = None

        def forward(self, x):
            return x + torch.tanh(F.linear(x, self.weight))

    class Root(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.codes = nn.Parameter(torch.randn(5, 8))
            self.net = nn.Linear(8, WIDTH * WIDTH)
            self.blocks = nn.ModuleList(Bare() for _ in range(5))

        def forward(self, x):
            for block, code in zip(self.blocks, self.codes, strict=True):
                block.weight = self.net(code).view(WIDTH, WIDTH) * 0.1
            for block in self.blocks:
                x = block(x)
            return x

    return loop(run, Root, body=mean)


@other("weights grow on demand: a `ParameterDict` of embeddings gets new keys in the forward, which no optimizer has")
def grows_in_forward(run):
    class Growing(Block):
        def __init__(self):
            super().__init__()
            self.table = nn.ParameterDict()

        def forward(self, x):
            key = str(int(x[0, 0].abs() * 3))
            if key not in self.table:
                self.table[key] = nn.Parameter(torch.ones(WIDTH))
            return super().forward(x) * self.table[key]

    torch.manual_seed(5)
    engine = run.engine(Net(Growing))
    found = []
    for index in range(4):
        loss = mean(engine, index)
        loss.backward()
        found.append(loss.item())
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, {n: v for n, v in values(engine.module).items() if "table" not in n}


@other(
    "weights in one `nn.Parameter` of four dimensions, blocks are `unbind`-ed views kept in a list of the forward",
    WHOLE,
)
def stacked_layers(run):
    class Stacked(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.weights = nn.Parameter(torch.randn(6, 2, WIDTH, WIDTH) * 0.1)
            self.scale = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            for up, down in self.weights.unbind():
                x = x + torch.tanh(x @ up) @ down
            return self.scale(x)

    return loop(run, Stacked, body=mean)


@other(
    "a scan over stacked layers: `vmap` of one block's function over weights, and `functional_call` of slices",
    WHOLE,
)
def scanned_layers(run):
    class Scanned(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            blocks = [Block() for _ in range(5)]
            stacked, _ = torch.func.stack_module_state(blocks)
            self.names = list(stacked)
            self.stack = nn.ParameterList([nn.Parameter(v.detach()) for v in stacked.values()])
            self.template = [copy.deepcopy(blocks[0]).to("meta")]

        def forward(self, x):
            for layer in range(5):
                weights = {n: v[layer] for n, v in zip(self.names, self.stack, strict=True)}
                x = functional_call(self.template[0], weights, (x,))
            return x

    return loop(run, Scanned, body=mean)


@other(
    "weight decay to the first values: a dict of clones by name, a penalty that grows, on biases alone by hooks", FOUR
)
def decay_to_start(run):
    starts = {}

    def body(engine, index):
        if not starts:
            starts.update({n: p.detach().clone() for n, p in engine.module.named_parameters()})
        penalty = sum((p - starts[n]).square().sum() for n, p in engine.module.named_parameters() if p.dim() > 1)
        return mean(engine, index) + 0.01 * (index + 1) * penalty

    return loop(run, body=body, each=1)


@other("orthogonality of each block's weights, as a loss of the block that it returns beside its output", FOUR)
def orthogonal_losses(run):
    class Ortho(Block):
        def forward(self, x):
            x, loss = x if isinstance(x, tuple) else (x, 0)
            gram = self.up.weight @ self.up.weight.t() - torch.eye(WIDTH)
            return super().forward(x), loss + gram.square().sum() * 1e-3

    class Summed(Net):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return self.last(x[0]).square().mean() + x[1]

    return loop(run, lambda: Summed(Ortho), body=lambda e, i: e(batch(i)))


@other(
    "a spectral penalty by a power iteration whose vectors are kept in the loop, on weights outside of the forward",
    PLAIN,
)
def spectral_penalties(run):
    vectors = {}

    def body(engine, index):
        loss = mean(engine, index)
        for name, parameter in engine.module.named_parameters():
            if parameter.dim() == 2:
                u = vectors.setdefault(name, torch.ones(parameter.shape[0]) / math.sqrt(parameter.shape[0]))
                v = F.normalize(parameter.detach().t() @ u, dim=0)
                vectors[name] = F.normalize(parameter.detach() @ v, dim=0)
                loss = loss + 0.01 * (vectors[name] @ parameter @ v)
        return loss

    return loop(run, body=body, each=1)


@other("path-SGD-like norms: a forward of `abs` weights on ones gives a penalty, by `functional_call` of `p.abs()`")
def path_norms(run):
    def body(engine, index):
        weights = {n: p.abs() for n, p in engine.module.named_parameters()}
        return mean(engine, index) + 1e-6 * functional_call(engine.module, weights, (torch.ones(1, WIDTH),)).sum()

    return loop(run, body=body, each=1)


# Memory that the program manages.


@other(
    "sharding by hand: a hook drops `p.data = torch.empty(0)` after a block's forward, another brings it back",
    ("plain",),
    refused={"plain": "Resize it before"},
)
def sharded_by_hand(run):
    torch.manual_seed(5)
    net, store = Net(), {}

    def bring(module, args):
        for name, parameter in module.named_parameters():
            parameter.data = store[module, name]

    def drop(module, args, out):
        for name, parameter in module.named_parameters():
            store[module, name] = parameter.data
            parameter.data = torch.empty(0)

    engine = run.engine(net)
    with torch.no_grad():
        whole = net(batch(0)).sum().item()
    for block in net.blocks:
        for name, parameter in block.named_parameters():
            store[block, name] = parameter.data
        block.register_forward_pre_hook(bring)
        block.register_forward_hook(drop)
    with torch.no_grad():
        again = net(batch(0)).sum().item()
    return whole == again, engine is not None


@other(
    "weights are dropped by `untyped_storage().resize_(0)` after a forward and filled again (FSDP by hand)",
    ("plain",),
    refused={"plain": "a copy"},
)
def resized_storage(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    kept = [p.detach().clone() for p in engine.module.blocks[1].parameters()]
    for parameter in engine.module.blocks[1].parameters():
        parameter.untyped_storage().resize_(0)
    for parameter, value in zip(engine.module.blocks[1].parameters(), kept, strict=True):
        parameter.untyped_storage().resize_(value.numel() * 4)
        parameter.data.copy_(value)
    mean(engine, 0).backward()
    return stepped(engine)


@other("weights change place with a twin by `p.data.set_(other)` and back", ("plain",))
def set_storage(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    twin = torch.full((WIDTH, WIDTH), 0.01)
    weight = engine.module.blocks[1].up.weight
    kept = weight.detach().clone()
    weight.data.set_(twin)
    one = mean(engine, 0).item()
    weight.data.set_(kept)
    found = [one, mean(engine, 0).item()]
    mean(engine, 0).backward()
    return found, stepped(engine)


@other("`p.data.t_()`, `p.data.unsqueeze_(0)` and `squeeze_` of a weight's alias change the alias alone")
def metadata_in_place(run):
    def after(engine, step):
        alias = engine.module.blocks[0].up.weight.data
        alias.t_()
        alias.unsqueeze_(0).squeeze_(0)
        alias.mul_(0.99)
        return list(alias.shape), alias.clone()

    return loop(run, body=mean, after=after)


@other("two parameters are overlapping windows of one buffer", ("plain",), refused={"plain": "Tie them"})
def overlapping(run):
    torch.manual_seed(5)
    net = Net()
    flat = torch.randn(WIDTH * WIDTH + 64) * 0.1
    net.blocks[0].up.weight = nn.Parameter(flat[: WIDTH * WIDTH].view(WIDTH, WIDTH))
    net.blocks[1].up.weight = nn.Parameter(flat[64:].view(WIDTH, WIDTH))
    engine = run.engine(net)
    mean(engine, 0).backward()
    return stepped(engine), values(net)


@other("weights come from `torch.from_file(shared=True)`, and the file is read after the run", ("plain",))
def from_a_file(run):
    torch.manual_seed(5)
    path = str(run.place.folder / "weights.bin")
    net = Net()
    mapped = torch.from_file(path, shared=True, size=WIDTH * WIDTH, dtype=torch.float32)
    mapped.copy_(net.blocks[0].up.weight.detach().flatten())
    net.blocks[0].up.weight = nn.Parameter(mapped.view(WIDTH, WIDTH))
    engine = run.engine(net)
    for index in range(3):
        mean(engine, index).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    engine.synchronize()
    seen = torch.frombuffer(bytearray(Path(path).read_bytes()), dtype=torch.float32).clone()
    return seen, values(net)


@other(
    "weights are over a `bytearray` by `torch.frombuffer`, which the program reads by `struct` after each step",
    ("plain",),
)
def over_a_bytearray(run):
    import struct

    torch.manual_seed(5)
    net = Net()
    memory = bytearray(WIDTH * 4)
    bias = torch.frombuffer(memory, dtype=torch.float32)
    net.blocks[0].up.bias = nn.Parameter(bias)
    engine = run.engine(net)
    found = []
    for index in range(3):
        mean(engine, index).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        engine.synchronize()
        found.append(list(struct.unpack_from("8f", memory)))
    return found, values(net)


@other("gradients are over one flat bucket that is a `bytearray`, views are given again in each step", FOUR)
def bucket_of_bytes(run):
    def before(engine, step):
        total = sum(p.numel() for p in engine.module.parameters())
        flat = torch.frombuffer(bytearray(total * 4), dtype=torch.float32)
        start = 0
        for parameter in engine.module.parameters():
            view = flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()
            if parameter.grad is not None:
                view.copy_(parameter.grad)
            parameter.grad = view
        flat.mul_(0.5)
        return flat.clone()

    return loop(run, body=mean, before=before)


@other(
    "`torch.serialization` writes a model with `weakref`s to its layers around it; a state dict is read back by `mmap`"
)
def saved_by_mmap(run):
    def after(engine, step):
        known = weakref.ref(engine.module.first)
        path = run.place.folder / f"state{step}.pt"
        torch.save(engine.module.state_dict(), path)
        state = torch.load(path, mmap=True, weights_only=True)
        engine.module.load_state_dict({n: v * 0.99 for n, v in state.items()})
        return known() is engine.module.first

    return loop(run, body=mean, after=after)


@other("a state dict goes by `assign=True` into a meta copy of the model, which evaluates, between steps")
def assigned_to_meta(run):
    def after(engine, step):
        with torch.device("meta"):
            shadow = Net()
        shadow.load_state_dict(engine.module.state_dict(), assign=True)
        with torch.no_grad():
            return shadow(batch(70)).sum().item()

    return loop(run, body=mean, after=after)


@other("weights are packed into one bytes object by a `pickle.Pickler` with protocol 5 and out-of-band buffers")
def out_of_band(run):
    import pickle

    def after(engine, step):
        buffers = []
        arrays = {n: p.detach().numpy() for n, p in engine.module.named_parameters()}
        data = pickle.dumps(arrays, protocol=5, buffer_callback=buffers.append)
        back = pickle.loads(data, buffers=buffers)
        return {n: torch.as_tensor(v.copy()) for n, v in back.items()}

    return loop(run, body=mean, after=after)


@other("reversible over the whole model by a Function of the program's: its backward runs blocks again")
def reversible_whole(run):
    class Whole(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, blocks, *weights):
            ctx.blocks, ctx.inputs = blocks, []
            with torch.no_grad():
                for block in blocks:
                    ctx.inputs.append(x)
                    x = block(x)
            return x

        @staticmethod
        def backward(ctx, gradient):
            for block, x in zip(reversed(ctx.blocks), reversed(ctx.inputs), strict=True):
                with torch.enable_grad():
                    leaf = x.detach().requires_grad_()
                    out = block(leaf)
                torch.autograd.backward(out, gradient)
                gradient = leaf.grad
            return gradient, None

    class Reversed(Net):
        def forward(self, x):
            return self.last(Whole.apply(self.first(x), self.blocks))

    return loop(run, Reversed, body=mean)


@other("a pipeline by hand: microbatches 1F1B over three stages of one model, activations and gradients in queues")
def one_forward_one_backward(run):
    from collections import deque

    def stages(model):
        return [lambda x: model.blocks[1](model.blocks[0](model.first(x))),
                lambda x: model.blocks[3](model.blocks[2](x)),
                lambda x: model.last(model.blocks[4](x))]  # fmt: skip

    torch.manual_seed(5)
    engine = run.engine(Net())
    found = []
    for step in range(2):
        calls = stages(engine.module)
        queues = [deque() for _ in calls]
        order = ["f0", "f1", "f2", "b0", "f3", "b1", "b2", "b3"]
        for item in order:
            index = 4 * step + int(item[1])
            if item[0] == "f":
                x = batch(index)
                for call, queue in zip(calls, queues, strict=True):
                    leaf = x.detach().requires_grad_()
                    out = call(leaf)
                    queue.append((leaf, out))
                    x = out
            else:
                gradient = None
                for queue in reversed(queues):
                    leaf, out = queue.popleft()
                    if gradient is None:
                        out.square().mean().backward()
                    else:
                        out.backward(gradient)
                    gradient = leaf.grad
        found.append(stepped(engine))
    return found, values(engine.module)


@other("layers are called in a thread-free interleave of two micro-batches, layer by layer (dual batch overlap)", FOUR)
def dual_batch(run):
    def body(engine, index):
        one, two = engine.module.first(batch(index)), engine.module.first(batch(index + 9))
        for block in engine.module.blocks:
            one, two = block(one), block(two)
        return engine.module.last(one).square().mean() + engine.module.last(two).abs().mean()

    return loop(run, body=body)


@other("a loss over chunks of rows, each a checkpoint of the head alone with the target, summed by a Python loop", FOUR)
def chunked_head(run):
    def body(engine, index):
        model = engine.module
        hidden = model.first(batch(index))
        for block in model.blocks:
            hidden = block(hidden)

        def part(h, t):
            return F.mse_loss(model.last(h), t, reduction="sum")

        chunks = zip(hidden.chunk(4), batch(index + 5).chunk(4), strict=True)
        return sum(checkpoint(part, h, t, use_reentrant=False) for h, t in chunks) / hidden.numel()

    return loop(run, body=body)


@other(
    "a loss over chunks: each chunk of the head goes backward at once into a detached hidden state, then the trunk",
    ("plain", "mixed", "together"),
)
def chunked_backward(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    found = []
    for step in range(3):

        def one(index, engine=engine):
            model = engine.module
            hidden = model.first(batch(index))
            for block in model.blocks:
                hidden = block(hidden)
            leaf, total = hidden.detach().requires_grad_(), 0.0
            for h, t in zip(leaf.chunk(4), batch(index + 5).chunk(4), strict=True):
                loss = F.mse_loss(model.last(h), t, reduction="sum") / leaf.numel()
                loss.backward()
                total += loss.item()
            torch.autograd.backward([hidden], [leaf.grad])
            return total

        found += run.accumulate(engine, [2 * step, 2 * step + 1], one)
        found.append(stepped(engine))
    return found, values(engine.module), gradients(engine.module)


@other("weights are a stream: a block's weight is cast to float8 and back with a scale that is kept in a buffer", FOUR)
def float8_weights(run):
    class Eight(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("amax", torch.ones(4))

        def cast(self, x):
            self.amax = torch.cat([self.amax[1:], x.detach().abs().max()[None]])
            scale = 448 / self.amax.max()
            return x + ((x * scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() / scale - x).detach()

        def forward(self, x):
            return x + self.down(torch.tanh(F.linear(self.cast(x), self.cast(self.up.weight), self.up.bias)))

    return loop(run, lambda: Net(Eight), body=mean)


@other("a float8 head by a Function with scales of its own for weight, input and gradient (`_scaled_mm` by hand)", FOUR)
def float8_head(run):
    class Head(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight):
            x8, w8 = (x * 16).to(torch.float8_e4m3fn), (weight * 64).to(torch.float8_e4m3fn)
            ctx.save_for_backward(x8, w8)
            return (x8.float() / 16) @ (w8.float() / 64).t()

        @staticmethod
        def backward(ctx, gradient):
            x8, w8 = ctx.saved_tensors
            g = (gradient * 4096).to(torch.float8_e5m2).float() / 4096
            return g @ (w8.float() / 64), g.t() @ (x8.float() / 16)

    class Headed(Net):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            return Head.apply(x, self.last.weight) + self.last.bias

    return loop(run, Headed, body=mean)


@other(
    "compiled pieces: a function of activations by `torch.compile(backend='eager')` in each block, and a method",
    ("plain",),
    places=("torch", "ram"),
)
def compiled_pieces(run):
    piece = torch.compile(lambda x, scale: torch.tanh(x) * scale, backend="eager")

    class Pieces(Block):
        def forward(self, x):
            return x + self.down(piece(self.up(x), 0.5))

    return loop(run, lambda: Net(Pieces), body=mean)


@other(
    "compiled autograd: `torch._dynamo.compiled_autograd` around the backward, without a compiler",
    ("plain",),
    places=("torch", "ram"),
    refused={"plain": "turn off compiled autograd"},
    also=("NotImplementedError",),
)
def compiled_autograd(run):
    from torch._dynamo import compiled_autograd

    torch.manual_seed(5)
    engine = run.engine(Net())
    found = []
    for index in range(3):
        loss = mean(engine, index)
        with compiled_autograd._enable(lambda graph: graph):
            loss.backward()
        found.append((loss.item(), stepped(engine)))
    return found, values(engine.module)


@other("a model that saves itself to bytes in its forward, as a checksum, each second call", FOUR)
def saves_itself(run):
    class Saving(Block):
        calls = 0

        def forward(self, x):
            file = io.BytesIO()
            torch.save({n: p.detach().clone() for n, p in self.named_parameters()}, file)
            return super().forward(x) * (1 + len(file.getvalue()) * 1e-9)

    return loop(run, lambda: Net(Saving), body=mean)
