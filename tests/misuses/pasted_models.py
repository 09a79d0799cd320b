"""Models that are pasted from papers' repositories, each as it is and at the joints of the engine. The optimizer is
torch's own arithmetic, so that bits are compared."""

from __future__ import annotations

import collections
import copy
import math
import random
import types

import numpy
import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from misuses.case import Family
from misuses.joints import ACCUMULATED, JOINTS, PLAIN, batch, program, stepped
from misuses.place import values
from misuses.strangers import WIDTH, Block, Net

family = Family("pasted models")


def trained(run, build, *, steps=4, loss_of=None, between=None, data=batch, **options):
    """Losses, gradients and all values of a run of micro-batches, resumed in its middle."""
    torch.manual_seed(11)
    engine = run.engine(build(), **options)
    found = []
    for step in range(steps):

        def body(index, engine=engine):
            out = engine(data(index))
            loss = out.square().mean() if loss_of is None else loss_of(engine.module, out, data(index))
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
        if between is not None:
            found.append(between(engine.module, step))
        if step == 1:
            engine = run.resume(engine, build, **options)
    return found, values(engine.module)


def of(make):
    return lambda: Net(make)


class VectorQuantised(Block):
    """An EMA codebook in buffers, dead codes are drawn anew from the batch, straight through."""

    def __init__(self):
        super().__init__()
        self.register_buffer("codes", batch(70, 8).clone())
        self.register_buffer("sizes", torch.ones(8))
        self.register_buffer("sums", self.codes.clone())
        self.register_buffer("ready", torch.tensor(False))

    def forward(self, x):
        x = self.up(x)
        if not self.ready:
            self.codes.copy_(x[torch.randperm(len(x))[:8]].detach())
            self.sums.copy_(self.codes)
            self.ready.fill_(True)
        nearest = torch.cdist(x.detach(), self.codes).argmin(1)
        chosen = self.codes[nearest]
        if self.training:
            with torch.no_grad():
                hot = F.one_hot(nearest, 8).to(x.dtype)
                self.sizes.mul_(0.9).add_(hot.sum(0), alpha=0.1)
                self.sums.mul_(0.9).add_(hot.T @ x.detach(), alpha=0.1)
                self.codes = self.sums / self.sizes.clamp(min=1e-3)[:, None]
                dead = self.sizes < 2
                self.codes[dead] = x.detach()[torch.randint(len(x), (int(dead.sum()),))]
        self.commitment = F.mse_loss(x, chosen.detach())
        return x + (chosen - x).detach() + self.down(x)


@program(
    family,
    "VQ-VAE: codebooks by EMA in buffers that are replaced, drawn anew where they are dead, first by the data",
    JOINTS,
)
def vq_vae_with_dead_codes(run):
    def loss_of(model, out, x):
        return F.mse_loss(out, x) + 0.25 * sum(block.commitment for block in model.blocks)

    return trained(run, of(VectorQuantised), loss_of=loss_of)


class Spectral(Block):
    def __init__(self):
        super().__init__()
        self.up = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH), n_power_iterations=2)
        self.down = nn.utils.spectral_norm(nn.Linear(WIDTH, WIDTH))


@program(family, "spectral norms old and new in one block: power iterations in buffers, in each forward", JOINTS)
def spectral_norms(run):
    return trained(run, of(Spectral))


class WeightNormed(Block):
    def __init__(self):
        super().__init__()
        self.up = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.down = nn.utils.weight_norm(nn.Linear(WIDTH, WIDTH), dim=None)


@program(family, "weight norms old and new in one block, magnitudes are scaled between steps", JOINTS)
def weight_norms(run):
    def between(model, step):
        with torch.no_grad():
            for block in model.blocks:
                block.up.parametrizations.weight.original0.mul_(0.9)
                block.down.weight_g.add_(0.1)

    return trained(run, of(WeightNormed), between=between)


@program(
    family,
    "pruning after wrapping: masks by amount grow between steps, made permanent in the end",
    (*PLAIN, "together"),
)
def pruning_grows(run):
    def between(model, step):
        for block in model.blocks:
            if step < 3:
                prune.l1_unstructured(block.up, "weight", amount=0.2)
                prune.ln_structured(block.down, "weight", amount=1, n=2, dim=0)
            else:
                prune.remove(block.up, "weight")
        return [float((block.up.weight == 0).float().mean()) for block in model.blocks]

    return trained(run, Net, between=between)


class FakeQuantised(Block):
    def __init__(self):
        super().__init__()
        from torch.ao.quantization import FakeQuantize, MovingAverageMinMaxObserver, PerChannelMinMaxObserver

        self.of_inputs = FakeQuantize(MovingAverageMinMaxObserver, quant_min=0, quant_max=255)
        self.of_weights = FakeQuantize(
            PerChannelMinMaxObserver,
            quant_min=-128,
            quant_max=127,
            dtype=torch.qint8,
            qscheme=torch.per_channel_symmetric,
        )

    def forward(self, x):
        return x + self.down(torch.tanh(F.linear(self.of_inputs(x), self.of_weights(self.up.weight), self.up.bias)))


@program(
    family,
    "`torch.ao.quantization.FakeQuantize` in blocks: observers on, then off, then quantisation alone",
    JOINTS,
    refused={"resumed": "another model"},
)
def fake_quantised(run):
    def between(model, step):
        from torch.ao.quantization import disable_fake_quant, disable_observer, enable_fake_quant

        model.apply((disable_fake_quant, enable_fake_quant, disable_observer, disable_observer)[step])

    return trained(run, of(FakeQuantised), between=between)


class Lora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, WIDTH) * 0.1), nn.Parameter(torch.zeros(WIDTH, 4))
        self.merged = False

    def merge(self, merged):
        if merged is not self.merged:
            sign = 1 if merged else -1
            self.base.weight.data += sign * (self.b @ self.a).data
        self.merged = merged

    def train(self, mode=True):
        self.merge(not mode)
        return super().train(mode)

    def forward(self, x):
        out = self.base(x)
        return torch.tanh(out if self.merged else out + (x @ self.a.T) @ self.b.T)


@program(
    family,
    "LoRA as its authors wrote it: `eval()` merges into the frozen weight by `.data +=`, `train()` takes it out",
    JOINTS,
)
def lora_by_mode(run):
    def between(model, step):
        model.eval()
        with torch.no_grad():
            out = model(batch(40))
        model.train()
        return out

    return trained(run, of(Lora), between=between)


class Depth(Block):
    """Each sample leaves the residual path out by a draw of its own."""

    def __init__(self):
        super().__init__()
        self.draws = torch.Generator().manual_seed(5)
        self.rate = 0.3

    def forward(self, x):
        if not self.training:
            return x + self.down(torch.tanh(self.up(x)))
        keep = torch.rand(len(x), 1, generator=self.draws) > self.rate
        return x + keep / (1 - self.rate) * self.down(torch.tanh(self.up(x)))


@program(
    family, "stochastic depth by sample, from a generator of each block, and rates that a schedule moves", ACCUMULATED
)
def depth_by_sample(run):
    def between(model, step):
        for index, block in enumerate(model.blocks):
            block.rate = 0.1 * step * index / 5

    return trained(run, of(Depth), between=between)


class PythonDraws(Block):
    def __init__(self):
        super().__init__()
        self.python, self.numpy = random.Random(4), numpy.random.default_rng(4)

    def forward(self, x):
        scale = self.python.choice([0.5, 1.0, 2.0]) * random.random()
        shift = torch.from_numpy(self.numpy.normal(size=WIDTH)).to(x.dtype)
        return x + self.down(torch.tanh(self.up(x) * scale + 0.1 * shift * numpy.random.rand()))


@program(family, "blocks draw from generators of Python's and numpy's, their own and the global ones", ACCUMULATED)
def python_draws(run):
    random.seed(1)
    numpy.random.seed(1)
    return trained(run, of(PythonDraws))


class MixtureOfDepths(Block):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 1)

    def forward(self, x):
        weight = self.router(x).squeeze(-1)
        chosen = weight.topk(len(x) // 2).indices.sort().values
        part = self.down(torch.tanh(self.up(x[chosen]))) * weight[chosen].sigmoid()[:, None]
        self.balance = F.binary_cross_entropy_with_logits(weight, torch.zeros_like(weight).index_fill(0, chosen, 1))
        return x.index_add(0, chosen, part)


@program(
    family,
    "mixture of depths: a router's top half, `index_add`, an auxiliary loss in an attribute of each block",
    JOINTS,
)
def mixture_of_depths_with_balance(run):
    return trained(
        run,
        of(MixtureOfDepths),
        loss_of=lambda model, out, x: out.square().mean() + 0.1 * sum(block.balance for block in model.blocks),
    )


class Exits(Net):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Linear(WIDTH, 7) for _ in self.blocks)

    def forward(self, x, sure=0.3):
        x, outs, rows = self.first(x), [], torch.arange(len(x))
        final = x.new_zeros(len(x), 7)
        for block, head in zip(self.blocks, self.heads, strict=True):
            x = block(x)
            outs.append(head(x))
            if not self.training:
                leave = F.softmax(outs[-1], -1).amax(-1) > sure
                final[rows[leave]] = outs[-1][leave]
                x, rows = x[~leave], rows[~leave]
                if not len(rows):
                    return final
        if self.training:
            return outs
        final[rows] = self.heads[-1](x)
        return final


@program(
    family,
    "early exits: all heads are trained, the last teaches the others; in evaluation rows leave one by one",
    JOINTS,
)
def exits_teach_one_another(run):
    def loss_of(model, outs, x):
        target = x.argmax(1) % 7
        teach = F.softmax(outs[-1].detach(), -1)
        return sum(F.cross_entropy(out, target) + F.kl_div(F.log_softmax(out, -1), teach) for out in outs)

    def between(model, step):
        model.eval()
        with torch.no_grad():
            out = model(batch(33))
        model.train()
        return out

    return trained(run, Exits, loss_of=loss_of, between=between)


class Language(nn.Module):
    """A recurrent model whose state is kept in the module from one batch to the next."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.norm = nn.Embedding(50, WIDTH), nn.LayerNorm(WIDTH)
        self.layers = nn.ModuleList(nn.LSTM(WIDTH, WIDTH, batch_first=True) for _ in range(3))
        self.head = nn.Linear(WIDTH, 50)
        self.states = None

    def forward(self, tokens):
        x = self.embed(tokens)
        states = self.states or [None] * 3
        new = []
        for layer, state in zip(self.layers, states, strict=True):
            out, state = layer(x, state)
            x = self.norm(x + out)
            new.append(tuple(each.detach() for each in state))
        self.states = new
        return self.head(x)


def tokens(index):
    return torch.randint(0, 50, (8, 20), generator=torch.Generator().manual_seed(index))


@program(
    family,
    "a recurrent language model keeps its states in the module, detached, and is told to forget them",
    ACCUMULATED,
)
def stateful_language_model(run):
    def loss_of(model, out, x):
        return F.cross_entropy(out[:, :-1].flatten(0, 1), x[:, 1:].flatten())

    def between(model, step):
        kept = [state[0] for state in model.states]
        if step % 2:
            model.states = None
        return kept

    return trained(run, Language, loss_of=loss_of, between=between, data=tokens)


@program(
    family, "truncated backpropagation (k1, k2): a deque of states, backward by `retain_graph` through the older ones"
)
def truncated_by_deque(run):
    torch.manual_seed(0)
    cell = nn.ModuleDict({"cell": nn.GRUCell(WIDTH, WIDTH), "mix": Block(), "head": nn.Linear(WIDTH, WIDTH)})
    engine = run.engine(cell)
    model, found = engine.module, []
    states = collections.deque([(None, torch.zeros(160, WIDTH))], maxlen=4)
    for step in range(9):
        before = states[-1][1].detach().requires_grad_()
        after = model["mix"](model["cell"](batch(step), before))
        states.append((before, after))
        if (step + 1) % 3 == 0:
            loss = model["head"](after).square().mean()
            loss.backward(retain_graph=True)
            for index in range(1, len(states) - 1):
                later = states[-index][0]
                if later is None or later.grad is None or states[-index - 1][0] is None:
                    break
                states[-index - 1][1].backward(later.grad, retain_graph=True)
            found += [loss.item(), stepped(engine)]
            states = collections.deque([(None, after.detach())], maxlen=4)
    return found, values(model)


class Equilibrium(nn.Module):
    """Anderson's acceleration without a graph; a hook solves for the gradient."""

    def __init__(self):
        super().__init__()
        self.up, self.down, self.inject = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        for layer in (self.up, self.down):
            nn.init.uniform_(layer.weight, -0.05, 0.05)

    def cell(self, z, x):
        return torch.tanh(self.inject(x) + self.down(torch.tanh(self.up(z))))

    @staticmethod
    def solve(f, z):
        points, images = [z], [f(z)]
        for _ in range(6):
            points = [*points, images[-1]][-3:]
            images = [*images, f(points[-1])][-3:]
            residual = torch.stack([i - p for i, p in zip(images, points, strict=True)]).flatten(1)
            gram = residual @ residual.T + 1e-4 * torch.eye(len(residual))
            weight = torch.linalg.solve(gram, torch.ones(len(residual)))
            points[-1] = (weight / weight.sum() @ torch.stack(images).flatten(1)).view_as(z)
        return points[-1]

    def forward(self, x):
        with torch.no_grad():
            z = self.solve(lambda z: self.cell(z, x), torch.zeros_like(x))
        z = self.cell(z, x)
        if torch.is_grad_enabled():
            start = z.clone().detach().requires_grad_()
            image = self.cell(start, x)

            def hook(gradient):
                return self.solve(
                    lambda y: torch.autograd.grad(image, start, y, retain_graph=True)[0] + gradient, gradient
                )

            if z.requires_grad:
                z.register_hook(hook)
        return x + z


@program(
    family, "deep equilibrium in blocks: Anderson's solver, a hook that solves by vector products of a graph it keeps"
)
def anderson_blocks(run):
    return trained(run, of(Equilibrium), steps=3)


class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(WIDTH // 2, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH))
        self.scale, self.shift = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("initialised", torch.tensor(0, dtype=torch.uint8))
        matrix = torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0]
        permutation, lower, upper = torch.linalg.lu(matrix)
        self.register_buffer("permutation", permutation)
        self.lower, self.upper = nn.Parameter(lower), nn.Parameter(upper)

    def forward(self, x, reverse=False):
        if not self.initialised and not reverse:
            with torch.no_grad():
                self.shift.data.copy_(-x.mean(0))
                self.scale.data.copy_(-(x.std(0) + 1e-6).log())
                self.initialised.fill_(1)
        weight = self.permutation @ (self.lower.tril(-1) + torch.eye(WIDTH)) @ self.upper.triu()
        if reverse:
            one, two = x.chunk(2, 1)
            shift, scale = self.net(one).chunk(2, 1)
            x = torch.cat([one, (two - shift) / (scale + 2).sigmoid()], 1) @ weight.inverse().T
            return x * (-self.scale).exp() - self.shift
        x = (x + self.shift) * self.scale.exp() @ weight.T
        one, two = x.chunk(2, 1)
        shift, scale = self.net(one).chunk(2, 1)
        scale = (scale + 2).sigmoid()
        determinant = self.scale.sum() + self.upper.diagonal().abs().log().sum() + scale.log().sum(1)
        return torch.cat([one, two * scale + shift], 1), determinant


class Flow(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.steps = nn.ModuleList(Coupling() for _ in range(4))

    def forward(self, x):
        total = 0
        for step in self.steps:
            x, determinant = step(x)
            total = total + determinant
        return x, total

    def sample(self, z):
        for step in reversed(self.steps):
            z = step(z, reverse=True)
        return z


GLOW = "Glow: ActNorm by the first batch through `.data.copy_`, LU convolutions, couplings; samples by the inverse"


def glow(run):
    def between(model, step):
        with torch.no_grad():
            return model.sample(0.5 * batch(50))

    return trained(
        run, Flow, loss_of=lambda m, out, x: 0.5 * out[0].square().mean() - out[1].mean() / WIDTH, between=between
    )


program(family, GLOW, ("plain", "together", "resumed"))(glow)


class Runge(nn.Module):
    """One field, four evaluations a step, a time as an embedding."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.field = nn.ModuleList(Block() for _ in range(2))
        self.time = nn.Linear(1, WIDTH)
        self.evaluations = 0

    def slope(self, t, x):
        self.evaluations += 1
        x = x + self.time(torch.full((1, 1), t))
        for block in self.field:
            x = block(x)
        return torch.tanh(x)

    def forward(self, x):
        for step in range(3):
            t, h = step / 3, 1 / 3
            a = self.slope(t, x)
            b = self.slope(t + h / 2, x + h / 2 * a)
            c = self.slope(t + h / 2, x + h / 2 * b)
            d = self.slope(t + h, x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
        return x


@program(
    family,
    "a neural ODE by Runge-Kutta: each block is used twelve times, evaluations are counted, a penalty of slopes",
    ACCUMULATED,
)
def runge_kutta(run):
    return trained(run, Runge, steps=3, between=lambda model, step: model.evaluations)


class Hyper(nn.Module):
    """A network makes the weights of another, layer by layer, from embeddings."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ParameterList(torch.randn(8) for _ in range(4))
        self.make = nn.ModuleList([nn.Linear(8, 64), nn.Linear(64, WIDTH * WIDTH + WIDTH)])
        object.__setattr__(self, "target", nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)]))

    def forward(self, x):
        made = {}
        for index, embedding in enumerate(self.layers):
            flat = 0.1 * self.make[1](torch.tanh(self.make[0](embedding)))
            made[f"{index}.weight"] = flat[: WIDTH * WIDTH].view(WIDTH, WIDTH)
            made[f"{index}.bias"] = flat[WIDTH * WIDTH :]
        return x + functional_call(self.target, made, (x,))


@program(family, "a hypernetwork from embeddings of layers; its target is an attribute that is not registered", JOINTS)
def hyper_embeddings(run):
    return trained(run, Hyper)


class Bags(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.bag = nn.EmbeddingBag(60, WIDTH, mode="sum", padding_idx=0, max_norm=5.0)
        self.words = nn.Embedding(60, WIDTH, padding_idx=3, max_norm=2.0, norm_type=1.0, scale_grad_by_freq=True)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, ids):
        x = self.bag(ids, per_sample_weights=torch.linspace(0, 1, ids.numel()).view_as(ids)) + self.words(ids).sum(1)
        for block in self.blocks:
            x = block(x)
        return x


@program(
    family,
    "bags and embeddings with `padding_idx`, `max_norm`, weights of samples and frequencies, before blocks",
    JOINTS,
)
def bags_and_norms(run):
    return trained(run, Bags, data=lambda i: torch.randint(0, 60, (160, 6), generator=torch.Generator().manual_seed(i)))


class Poincare(Block):
    """Points of a ball: Moebius sums with a learnt curvature and a bias on the ball."""

    def __init__(self):
        super().__init__()
        self.curvature = nn.Parameter(torch.tensor(0.5))
        self.point = nn.Parameter(0.01 * torch.randn(WIDTH))

    def forward(self, x):
        c = F.softplus(self.curvature)
        norm = x.norm(dim=-1, keepdim=True).clamp_min(1e-6)
        x = (c.sqrt() * norm).tanh() * x / (c.sqrt() * norm)
        y = self.point.expand_as(x)
        xy, x2, y2 = (x * y).sum(-1, keepdim=True), x.square().sum(-1, keepdim=True), y.square().sum(-1, keepdim=True)
        x = ((1 + 2 * c * xy + c * y2) * x + (1 - c * x2) * y) / (1 + 2 * c * xy + c**2 * x2 * y2)
        distance = torch.acosh(1 + 2 * (x - y).square().sum(-1) / (1 - x2.squeeze(-1)).clamp_min(1e-3))
        return super().forward(x) + 0.01 * distance[:, None]


@program(
    family,
    "hyperbolic layers: a learnt curvature, Moebius sums, gradients rescaled by hooks as Riemannian ones",
    ACCUMULATED,
)
def hyperbolic(run):
    def build():
        model = Net(Poincare)
        for block in model.blocks:
            point = block.point
            point.register_hook(lambda g, p=point: g * (1 - p.detach().square().sum()) ** 2 / 4)
        return model

    def between(model, step):
        with torch.no_grad():
            for block in model.blocks:
                norm = block.point.data.norm()
                if norm > 0.02:
                    block.point.data.mul_(0.02 / norm)

    return trained(run, build, between=between)


class HalfRegions(Block):
    """Autocast within the block, a Function of `torch.amp.custom_fwd`, a norm in double."""

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.up(x)
        with torch.autocast("cpu", enabled=False):
            y = F.layer_norm(y.double(), (WIDTH,)).to(x.dtype)
        return x + self.down(Squared.apply(y))


class Squared(torch.autograd.Function):
    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * torch.tanh(x)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * (torch.tanh(x) + x * (1 - torch.tanh(x) ** 2))


@program(
    family,
    "autocast for a part of each block, double in another, a Function with `custom_fwd` and `custom_bwd`",
    ACCUMULATED,
)
def half_regions(run):
    return trained(run, of(HalfRegions))


class Bayes(Block):
    """Weights by the reparametrisation trick; the divergence is kept for the loss."""

    def __init__(self):
        super().__init__()
        self.rho = nn.Parameter(torch.full((WIDTH, WIDTH), -4.0))

    def forward(self, x):
        deviation = F.softplus(self.rho)
        weight = self.up.weight + deviation * torch.randn_like(deviation) if self.training else self.up.weight
        self.divergence = (0.5 * (deviation.square() + self.up.weight.square()) - deviation.log()).mean()
        return x + self.down(torch.tanh(F.linear(x, weight, self.up.bias)))


@program(
    family,
    "Bayes by backprop: sampled weights, the divergence of each block in an attribute, weighted by the step",
    JOINTS,
)
def bayes_by_backprop(run):
    return trained(
        run, of(Bayes), loss_of=lambda m, out, x: F.mse_loss(out, x) + 0.01 * sum(b.divergence for b in m.blocks)
    )


class Noisy(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.deviation = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.full((WIDTH, WIDTH), 0.02))
        self.register_buffer("noise", torch.zeros(WIDTH, WIDTH))
        self.reset_noise()

    def reset_noise(self):
        one, two = torch.randn(WIDTH), torch.randn(WIDTH)
        self.noise.copy_(torch.outer(one.sign() * one.abs().sqrt(), two.sign() * two.abs().sqrt()))

    def forward(self, x):
        return torch.relu(F.linear(x, self.mean.weight + self.deviation * self.noise, self.mean.bias)) + x


@program(
    family,
    "noisy networks (Rainbow): factorised noise in buffers, drawn anew between micro-batches and after steps",
    JOINTS,
)
def noisy_networks(run):
    def loss_of(model, out, x):
        for block in model.blocks:
            block.reset_noise()
        return out.square().mean()

    return trained(run, of(Noisy), loss_of=loss_of)


class GhostNormed(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH, momentum=None)

    def forward(self, x):
        x = torch.cat([self.norm(part) for part in x.chunk(4)]) if self.training else self.norm(x)
        return x + self.down(F.dropout(torch.tanh(self.up(x)), 0.1, self.training))


@program(
    family,
    "ghost batches: one norm is called four times a forward, `momentum=None`, statistics forgotten between steps",
    JOINTS,
)
def ghost_batches(run):
    def between(model, step):
        model.eval()
        with torch.no_grad():
            out = model(batch(44))
        model.train()
        if step == 2:
            for block in model.blocks:
                block.norm.reset_running_stats()
        return out

    return trained(run, of(GhostNormed), between=between)


class Memory(nn.Module):
    """A memory that is written in each forward of each block, and read by the next block."""

    def __init__(self):
        super().__init__()
        self.key, self.value, self.erase = (nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x, memory):
        address = F.softmax(self.key(x) @ memory.T, -1)
        read = address @ memory
        kept = 1 - address.mean(0)[:, None] * torch.sigmoid(self.erase(x)).mean(0)
        return x + read, memory * kept + address.T @ self.value(x) / len(x)


class Turing(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.start = nn.Parameter(0.1 * torch.randn(12, WIDTH))
        self.blocks = nn.ModuleList(Memory() for _ in range(4))
        self.memory = None

    def forward(self, x):
        memory = self.start if self.memory is None else self.memory
        for block in self.blocks:
            x, memory = block(x, memory)
        self.memory = memory.detach()
        return x


@program(
    family, "a neural Turing machine: the memory goes from block to block, and detached to the next batch", ACCUMULATED
)
def turing_machine(run):
    def between(model, step):
        kept, model.memory = model.memory, None if step == 1 else model.memory
        return kept

    return trained(run, Turing, between=between)


class Slots(Block):
    """Attention of slots: drawn, refined three times by one cell."""

    def __init__(self):
        super().__init__()
        self.mean, self.deviation = nn.Parameter(torch.randn(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.cell = nn.GRUCell(WIDTH, WIDTH)

    def forward(self, x):
        slots = self.mean + self.deviation.exp() * torch.randn(5, WIDTH)
        for _ in range(3):
            weight = F.softmax(self.up(x) @ slots.T, -1)
            slots = self.cell((weight / weight.sum(0)).T @ x, slots)
        return x + self.down(weight @ slots)


@program(
    family, "slot attention: slots are drawn in the forward and refined by a cell that is called three times", JOINTS
)
def slot_attention(run):
    return trained(run, of(Slots))


class Switched(Block):
    """A checkpoint of torch's own that a flag turns on and off, as models of transformers have it."""

    def __init__(self):
        super().__init__()
        self.checkpointing = False

    def inner(self, x, scale):
        return x + scale * self.down(F.dropout(torch.tanh(self.up(x)), 0.1, self.training))

    def forward(self, x):
        if self.checkpointing and self.training:
            return torch.utils.checkpoint.checkpoint(self.inner, x, 0.5, use_reentrant=False)
        return self.inner(x, 0.5)


@program(family, "checkpointing is turned on and off by a flag of the blocks in the middle of the run", JOINTS)
def switched_checkpoints(run):
    def between(model, step):
        for index, block in enumerate(model.blocks):
            block.checkpointing = step % 2 == 0 or index == 1

    return trained(run, of(Switched), between=between)


class Shared(nn.Module):
    """Blocks refer to one configuration object, which counts calls and has the step in it."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.config = types.SimpleNamespace(calls=0, step=0, seen=[])
        self.blocks = nn.ModuleList(Configured(self.config) for _ in range(4))

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


class Configured(Block):
    def __init__(self, config):
        super().__init__()
        self.config = config

    def forward(self, x):
        self.config.calls += 1
        self.config.seen.append(round(x.detach().abs().mean().item(), 3))
        return x + self.down(torch.tanh(self.up(x) * (1 + 0.1 * self.config.step + 0.01 * (self.config.calls % 7))))


@program(
    family, "blocks share a namespace that counts their calls and decides: the count is in the numbers", ACCUMULATED
)
def shared_namespace(run):
    def between(model, step):
        model.config.step += 1
        return [model.config.calls, model.config.seen[-4:]]

    return trained(run, Shared, between=between)


CALLS = {"count": 0}


class Counting(Block):
    def forward(self, x):
        CALLS["count"] += 1
        return x + self.down(torch.tanh(self.up(x) * (1 + 0.1 * (CALLS["count"] % 7))))


@program(
    family,
    "blocks count their calls in a global, and the count is in the numbers",
    ("plain", "over the tiers", "together"),
)
def global_count(run):
    CALLS["count"] = 0
    return trained(run, of(Counting), between=lambda model, step: CALLS["count"])


class Deep(nn.Module):
    """An error of quantisation is kept in the module and added in the next forward."""

    def __init__(self):
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.error = None
        self.history = []

    def forward(self, x):
        y = self.up(x) if self.error is None else self.up(x + self.error)
        rounded = (y * 4).round() / 4
        self.error = (y - rounded).detach()
        self.history.append(self.error.abs().mean().item())
        return x + y + (rounded - y).detach()


@program(family, "rounding errors are kept in an attribute of each block and added in its next forward", ACCUMULATED)
def kept_errors(run):
    return trained(run, of(Deep), between=lambda model, step: [block.history for block in model.blocks])


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.head = nn.Embedding(50, WIDTH), nn.Linear(WIDTH, 50, bias=False)
        self.blocks = nn.ModuleList(Block() for _ in range(4))

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


@program(
    family, "a deep copy of a trained block is put into a plain model, and its outputs are the goal of the next steps"
)
def copied_block_teaches(run):
    engine = run.engine()
    found = []
    for step in range(4):
        block = copy.deepcopy(engine.module.blocks[step]).requires_grad_(False)
        loss = F.mse_loss(engine(batch(step)), block(batch(step)))
        loss.backward()
        found += [loss.item(), stepped(engine)]
    return found, values(engine.module)


@program(
    family,
    "`parametrize.cached()` around the micro-batches of a step, a parametrisation with a buffer that it writes",
    ACCUMULATED,
    refused={"recomputed": "saved other tensors", "over the tiers": "saved other tensors"},
)
def cached_parametrisation(run):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("calls", torch.zeros(()))

        def forward(self, weight):
            self.calls += 1
            return weight / (1 + 0.01 * self.calls)

    def build():
        model = Net()
        for block in model.blocks:
            parametrize.register_parametrization(block.up, "weight", Scaled())
        return model

    engine = run.engine(build())
    found = []
    for step in range(3):

        def body(index):
            with parametrize.cached():
                loss = engine(batch(index)).square().mean() + engine(batch(index) + 1).mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
    return found, values(engine.module)


@program(
    family,
    "windows of a long sequence: positions by an offset that the model keeps, a mask that grows, a sliding cache",
    ACCUMULATED,
)
def sliding_windows(run):
    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.cache, self.offset = None, 0

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            if self.cache is not None:
                k, v = torch.cat([self.cache[0], k], 1), torch.cat([self.cache[1], v], 1)
            old = k.shape[1] - q.shape[1]
            mask = torch.ones(q.shape[1], k.shape[1], dtype=torch.bool).tril(old)
            out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
            self.cache = k.detach()[:, -24:], v.detach()[:, -24:]
            self.offset += q.shape[1]
            return x + self.out(out) * math.cos(self.offset)

    return trained(
        run, of(Attention), data=lambda i: batch(i, 128).view(8, 16, WIDTH), between=lambda m, s: m.blocks[0].offset
    )
