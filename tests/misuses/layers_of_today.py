"""Layers that are trained today: experts and their routers, attention over long sequences, scans with a state, and what
is made of weights in a forward. Each at the joints of the engine; the optimizer is torch's own arithmetic, so that bits
are compared."""

from __future__ import annotations

import itertools
import math
import random
import types
from typing import ClassVar

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from misuses.case import Family
from misuses.joints import TODAY, batch, program, stepped
from misuses.place import values
from misuses.strangers import WIDTH, Block, Net

family = Family("layers of today")

EXPERTS = 4
LAYERS = TODAY[:3]


def trained(run, build, *, steps=3, loss_of=None, after=None, before=None, data=batch, resumes=True, **options):
    torch.manual_seed(5)
    options = {"lr": 0.003, **options}
    engine = run.engine(build(), **options)
    found = []
    for step in range(steps):

        def body(index, engine=engine):
            out = engine(data(index))
            loss = out.float().square().mean() if loss_of is None else loss_of(engine.module, out, index)
            loss = loss / (1 + loss.detach().abs())
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        if before is not None:
            found.append(before(engine.module, step))
        found.append(stepped(engine))
        if after is not None:
            found.append(after(engine.module, step))
        if step == 1 and resumes:
            engine = run.resume(engine, build, **options)
    return found, values(engine.module)


def layer(title, joints=LAYERS, *, loss_of=None, after=None, before=None, data=batch, steps=3, **options):
    """A class of layers, five of them in a ``Net``, trained."""

    def add(make):
        def body(run):
            return trained(run, lambda: Net(make), loss_of=loss_of, after=after, before=before, data=data, steps=steps)

        body.__name__ = "today" + "".join("_" + c.lower() if c.isupper() else c for c in make.__name__)
        program(family, title, joints, **options)(body)
        return make

    return add


# Routers.


class Routed(nn.Module):
    """Experts in a list; ``route`` gives weights and numbers."""

    top = 2

    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(Block() for _ in range(EXPERTS))

    def route(self, x):
        return self.gate(x).softmax(-1).topk(self.top, -1)

    def forward(self, x):
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            where, slot = torch.where(chosen == index)
            if where.numel() == 0:
                continue
            out.index_add_(0, where, expert(x[where]) * weights[where, slot, None])
        return x + out


def auxiliary(model, out, index):
    return out.square().mean() + 0.01 * sum(block.auxiliary for block in model.blocks)


@layer(
    "Shazeer's noisy gate: softplus of the noise, load by a normal distribution, squared variations", loss_of=auxiliary
)
class NoisyGate(Routed):
    def __init__(self):
        super().__init__()
        self.noise = nn.Parameter(torch.zeros(WIDTH, EXPERTS))

    def route(self, x):
        clean = self.gate(x)
        deviation = F.softplus(x @ self.noise) + 1e-2
        noisy = clean + torch.randn_like(clean) * deviation if self.training else clean
        top, chosen = noisy.topk(self.top + 1, -1)
        threshold = torch.where(noisy > top[:, -1:], top[:, -1:], top[:, -2:-1])
        load = torch.distributions.Normal(0.0, 1.0).cdf((clean - threshold) / deviation).sum(0)
        weights = top[:, :-1].softmax(-1)
        importance = torch.zeros_like(clean).scatter(1, chosen[:, :-1], weights).sum(0)
        self.auxiliary = sum(t.var() / (t.mean() ** 2 + 1e-10) for t in (load, importance))
        return weights, chosen[:, :-1]


class Scaled(torch.autograd.Function):
    """Megatron's: the auxiliary loss gets a gradient of its own."""

    main_loss_backward_scale = torch.tensor(1.0)

    @staticmethod
    def forward(ctx, output, loss):
        ctx.save_for_backward(loss)
        return output

    @staticmethod
    def backward(ctx, gradient):
        (loss,) = ctx.saved_tensors
        return gradient, torch.ones_like(loss) * Scaled.main_loss_backward_scale

    @staticmethod
    def set_loss_scale(scale):
        Scaled.main_loss_backward_scale = scale


def scaled(model, out, index):
    Scaled.set_loss_scale(torch.tensor(0.5 + index))
    return out.square().mean()


@layer(
    "Megatron's `MoEAuxLossAutoScaler`: a Function gives the auxiliary loss a gradient, by a scale of the class",
    loss_of=scaled,
)
class AutoScaled(Routed):
    def forward(self, x):
        logits = self.gate(x)
        loss = logits.logsumexp(-1).square().mean() * 1e-2
        return Scaled.apply(super().forward(x), loss)


TRACKED: dict[str, torch.Tensor] = {}


def tracked(model, step):
    found = {name: value.clone() for name, value in TRACKED.items()}
    TRACKED.clear()
    return found


@layer(
    "losses of layers are summed up in a global tracker, detached, and read after the step (Megatron)", after=tracked
)
class Tracked(Routed):
    def route(self, x):
        scores = self.gate(x).softmax(-1)
        weights, chosen = scores.topk(2, -1)
        share = F.one_hot(chosen, EXPERTS).float().mean((0, 1))
        loss = (scores.mean(0) * share).sum()
        TRACKED["balance"] = TRACKED.get("balance", torch.zeros(())) + loss.detach()
        return weights + 0 * loss, chosen


def biased(model, step):
    found = []
    with torch.no_grad():
        for block in model.blocks:
            load = block.tokens_per_expert
            block.expert_bias.add_(torch.sign(load.mean() - load), alpha=1e-2)
            block.expert_bias.sub_(block.expert_bias.mean())
            found.append(load.clone())
            load.zero_()
    return found


@layer(
    "DeepSeek-V3: groups limit the choice, sigmoid scores, a bias in a buffer moves by the step's load (torchtitan)",
    TODAY,
    after=biased,
    steps=4,
)
class Biased(Routed):
    def __init__(self):
        super().__init__()
        self.register_buffer("expert_bias", torch.zeros(EXPERTS), persistent=True)
        self.register_buffer("tokens_per_expert", torch.zeros(EXPERTS), persistent=False)
        self.shared = nn.Linear(WIDTH, WIDTH)

    def route(self, x):
        scores = self.gate(x.float()).sigmoid()
        choice = scores + self.expert_bias
        groups = choice.view(-1, 2, 2).topk(1, -1)[0].sum(-1).topk(1, -1)[1]
        mask = torch.zeros(len(x), 2).scatter_(1, groups, 1).repeat_interleave(2, 1).bool()
        chosen = choice.masked_fill(~mask, -math.inf).topk(2, -1)[1]
        weights = scores.gather(1, chosen)
        with torch.no_grad():
            self.tokens_per_expert.add_(torch.histc(chosen.float(), EXPERTS, 0, EXPERTS))
        return weights / (weights.sum(-1, keepdim=True) + 1e-20) * 2.5, chosen

    def forward(self, x):
        return super().forward(x) + self.shared(x)


@layer(
    "the bias moves in the forward instead, by a load that is averaged: the buffer is another tensor each time", TODAY
)
class BiasedInForward(Routed):
    def __init__(self):
        super().__init__()
        self.register_buffer("load", torch.full((EXPERTS,), 1 / EXPERTS))

    def route(self, x):
        scores = self.gate(x).sigmoid()
        chosen = (scores - self.load).topk(2, -1)[1]
        if self.training and torch.is_grad_enabled():
            self.load = 0.9 * self.load + 0.1 * F.one_hot(chosen, EXPERTS).float().mean((0, 1))
        return scores.gather(1, chosen), chosen


@layer("GShard: the second expert is drawn with a chance by its weight, tokens over the capacity fall")
class RandomSecond(Routed):
    def forward(self, x):
        scores = self.gate(x).softmax(-1)
        (first, second), (one, two) = (t.unbind(-1) for t in scores.topk(2, -1))
        kept = torch.rand_like(second) < 2 * second
        out, capacity = x.clone(), len(x) // EXPERTS
        filled = [0] * EXPERTS
        for weight, chosen, allowed in ((first, one, torch.ones_like(kept)), (second, two, kept)):
            for index, expert in enumerate(self.experts):
                where = torch.nonzero((chosen == index) & allowed).squeeze(-1)[: capacity - filled[index]]
                filled[index] += len(where)
                if len(where):
                    out = out.index_add(0, where, expert(x[where]) * weight[where, None])
        return out


@layer(
    "Switch: jitter on the router's input, another capacity in evaluation, an evaluation after each step",
    after=lambda m, s: (
        m.eval()(batch(80, 24)).detach() if m.train() is None else (m.eval()(batch(80, 24)).detach(), m.train())[0]
    ),
)
class Jittered(Routed):
    top = 1

    def route(self, x):
        if self.training:
            x = x * torch.empty_like(x).uniform_(0.98, 1.02)
        return super().route(x)

    def forward(self, x):
        weights, chosen = self.route(x)
        capacity = int((1.0 if self.training else 2.0) * len(x) / EXPERTS)
        hot = F.one_hot(chosen[:, 0], EXPERTS)
        kept = ((hot.cumsum(0) * hot).sum(-1) <= capacity)[:, None]
        out = x.clone()
        for index, expert in enumerate(self.experts):
            where = torch.where((chosen == index) & kept)[0]
            out[where] = expert(x[where]) * weights[where]
        return out


class Sampled(torch.autograd.Function):
    """SparseMixer's: a midpoint that is drawn in the forward."""

    @staticmethod
    def forward(ctx, scores, multiplier, chosen, is_top):
        ctx.save_for_backward(multiplier, chosen, scores)
        mask = torch.rand_like(multiplier) > 0.75
        return multiplier * torch.where(is_top | mask, 1.0, 1 / 3)

    @staticmethod
    def backward(ctx, gradient):
        multiplier, chosen, scores = ctx.saved_tensors
        of_scores = -scores * gradient * multiplier
        return of_scores.scatter_add(1, chosen, gradient * multiplier), None, None, None


@layer("SparseMixer (Phi-MoE): the choice is drawn by Gumbel noise, a Function draws once more in its forward")
class SparseMixer(Routed):
    def route(self, x):
        scores = self.gate(x)
        noise = -torch.empty_like(scores).exponential_().log()
        chosen = (scores + noise).argmax(-1, keepdim=True)
        probabilities = scores.softmax(-1)
        multiplier = probabilities.gather(1, chosen)
        is_top = chosen == scores.argmax(-1, keepdim=True)
        return Sampled.apply(probabilities, multiplier, chosen, is_top), chosen


@layer("Gumbel-softmax with hard choices, whose temperature falls with a counter of the module")
class Gumbel(Routed):
    def __init__(self):
        super().__init__()
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        share = F.gumbel_softmax(self.gate(x), tau=2.0 / self.calls, hard=True)
        return x + sum(share[:, i, None] * expert(x) for i, expert in enumerate(self.experts))


@layer(
    "ReMoE: the router is a ReLU, the number of experts differs from token to token, the penalty follows the sparsity",
    loss_of=lambda m, out, i: out.square().mean() + sum(b.coefficient * b.penalty for b in m.blocks),
)
class ReluRouted(Routed):
    def __init__(self):
        super().__init__()
        self.coefficient = 1e-3

    def forward(self, x):
        scores = F.relu(self.gate(x))
        self.penalty = scores.sum(-1).mean()
        sparsity = (scores == 0).float().mean().item()
        self.coefficient *= 1.2 ** (1 if sparsity < 0.5 else -1)
        out = x
        for index, expert in enumerate(self.experts):
            where = scores[:, index].nonzero().squeeze(-1)
            out = out.index_add(0, where, expert(x[where]) * scores[where, index, None])
        return out


@layer("top-p: as many experts as reach 60 percent of the probability, sorted and cut")
class TopP(Routed):
    def forward(self, x):
        probabilities, order = self.gate(x).softmax(-1).sort(-1, descending=True)
        kept = probabilities.cumsum(-1) - probabilities < 0.6
        out = x
        for index, expert in enumerate(self.experts):
            where, slot = torch.where(kept & (order == index))
            out = out.index_add(0, where, expert(x[where]) * probabilities[where, slot, None])
        return out


@layer("Sinkhorn balances the choice without gradients, weights are the router's own")
class Sinkhorn(Routed):
    def route(self, x):
        logits = self.gate(x)
        with torch.no_grad():
            cost = logits.exp()
            rows, columns = torch.ones(len(x)), torch.ones(EXPERTS)
            for _ in range(4):
                rows = 1 / (len(x) * (cost * columns).sum(1))
                columns = 1 / (EXPERTS * (cost * rows[:, None]).sum(0))
            chosen = (cost * columns * rows[:, None]).topk(2, -1)[1]
        return logits.sigmoid().gather(1, chosen), chosen


@layer("experts that do nothing: zero, copy and constant ones beside two that compute (MoE++)")
class Idle(Routed):
    def __init__(self):
        super().__init__()
        self.constant = nn.Parameter(torch.randn(WIDTH) / 6)
        del self.experts[2:]

    def forward(self, x):
        weights, chosen = self.route(x)
        ways = [self.experts[0], self.experts[1], lambda y: y, lambda y: self.constant.expand_as(y)]
        out = torch.zeros_like(x)
        for index, way in enumerate(ways):
            where, slot = torch.where(chosen == index)
            out = out.index_put((where,), way(x[where]) * weights[where, slot, None], accumulate=True)
        return x + out


@layer("experts of attention: each head is one, values are routed (SwitchHead)")
class RoutedHeads(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.qk = nn.Linear(WIDTH, EXPERTS), nn.Linear(WIDTH, 2 * WIDTH)
        self.values = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH) / 6)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        weights, chosen = self.gate(x).sigmoid().topk(2, -1)
        share = torch.zeros(len(x), EXPERTS).scatter(1, chosen, weights)
        v = torch.einsum("bi,eij,be->bj", x, self.values, share)
        q, k, v = (t.view(4, -1, 4, WIDTH // 4).transpose(1, 2) for t in (*self.qk(x).chunk(2, -1), v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).reshape(-1, WIDTH))


@layer("each token's own expert by a low-rank product: rows of a table are weights (PEER, one head), `sparse` in part")
class Tiny(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = nn.Linear(WIDTH, 16)
        self.keys = nn.Parameter(torch.randn(2, 8, 8))
        self.up, self.down = nn.Embedding(64, WIDTH), nn.Embedding(64, WIDTH)

    def forward(self, x):
        scores = torch.einsum("bpd,pkd->bpk", self.query(x).view(-1, 2, 8), self.keys)
        (one, i), (two, j) = (part.topk(3, -1) for part in scores.unbind(1))
        total = (one[:, :, None] + two[:, None]).flatten(1)
        index = (i[:, :, None] * 8 + j[:, None]).flatten(1)
        top, place = total.topk(4, -1)
        index = index.gather(1, place)
        h = F.gelu(torch.einsum("bi,bki->bk", x, self.up(index))) * top.softmax(-1)
        return x + torch.einsum("bk,bki->bi", h, self.down(index))


@layer("an expert drops out whole, and the router's weights are divided anew over the rest")
class DroppedExpert(Routed):
    def route(self, x):
        logits = self.gate(x)
        if self.training:
            logits = logits.masked_fill(torch.rand(EXPERTS).argsort() == 0, -math.inf)
        weights, chosen = logits.softmax(-1).topk(2, -1)
        return weights / weights.sum(-1, keepdim=True), chosen


@layer("experts in the closures of a list, built in the constructor from modules with other names")
class Closures(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate, self.ways = nn.Linear(WIDTH, 3), []
        for name in ("small", "middle", "large"):
            module = Block()
            setattr(self, name, module)
            scale = len(name)
            self.ways.append(lambda x, module=module, scale=scale: module(x) / scale)

    def forward(self, x):
        chosen = self.gate(x).argmax(-1)
        weights = self.gate(x).softmax(-1)
        out = x
        for index, way in enumerate(self.ways):
            where = (chosen == index).nonzero()[:, 0]
            if len(where):
                out = out.index_copy(0, where, way(x[where]) * weights[where, index, None])
        return out


@layer("weights of experts in a `ParameterList` are stacked in the forward, and go into one `bmm`")
class StackedInForward(nn.Module):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS)
        self.ups = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 6 for _ in range(EXPERTS))

    def forward(self, x):
        share = self.gate(x).softmax(-1)
        out = torch.bmm(x.expand(EXPERTS, -1, -1), torch.stack(list(self.ups)))
        return x + torch.einsum("ebi,be->bi", torch.tanh(out), share)


@layer("`torch.func.stack_module_state` of the list of experts in the forward, `vmap` over `functional_call`")
class StackedState(Routed):
    def __init__(self):
        super().__init__()
        object.__setattr__(self, "skeleton", Block())

    def forward(self, x):
        names = [name for name, _ in self.experts[0].named_parameters()]
        stacked = {name: torch.stack([e.get_parameter(name) for e in self.experts]) for name in names}
        outs = torch.vmap(lambda p: functional_call(self.skeleton, p, (x,)))(stacked)
        return x + torch.einsum("ebi,be->bi", outs, self.gate(x).softmax(-1))


@layer("soft merging: weights of the experts are averaged by the batch's router, one call (SMEAR)")
class Smeared(Routed):
    def forward(self, x):
        share = self.gate(x).softmax(-1).mean(0)
        merged = {
            name: sum(s * e.get_parameter(name) for s, e in zip(share, self.experts, strict=True))
            for name, _ in self.experts[0].named_parameters()
        }
        return functional_call(self.experts[0], merged, (x,))


@layer("the router is in fp32 within a forward in autocast, with autocast off around it")
class Fp32Router(Routed):
    def route(self, x):
        with torch.autocast("cpu", enabled=False):
            return self.gate(x.float()).softmax(-1).topk(2, -1)

    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            weights, chosen = self.route(x)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                where, slot = torch.where(chosen == index)
                out.index_add_(0, where, (expert(x[where]) * weights[where, slot, None]).to(out.dtype))
        return x + out


# Attention over long sequences.


def packed(index):
    """Rows of several sequences, one after the other."""
    return batch(index)


class Attention(nn.Module):
    heads = 4

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def split(self, x, rows=2):
        return (t.view(rows, -1, self.heads, WIDTH // self.heads).transpose(1, 2) for t in self.qkv(x).chunk(3, -1))

    def join(self, y):
        return self.out(y.transpose(1, 2).reshape(-1, WIDTH))


@layer("packing: positions begin anew at each document, the mask is of the documents' numbers, rotary by positions")
class Packed(Attention):
    def forward(self, x):
        ends = (x[:, 0] > 0.8).long()
        document = ends.cumsum(0) - ends
        starts = torch.zeros_like(document).scatter_reduce(
            0, document, torch.arange(len(x)), "amin", include_self=False
        )
        position = torch.arange(len(x)) - starts[document]
        q, k, v = self.split(x, 1)
        angle = position[:, None] / 100 ** (torch.arange(4) / 4)
        cos, sin = angle.cos(), angle.sin()

        def turned(t):
            a, b = t.chunk(2, -1)
            return torch.cat([a * cos - b * sin, a * sin + b * cos], -1)

        mask = (document[:, None] == document) & torch.ones(len(x), len(x), dtype=torch.bool).tril()
        return x + self.join(F.scaled_dot_product_attention(turned(q), turned(k), v, attn_mask=mask))


@layer("varlen: a list of lengths is made of the data, each document is attended alone, rows are joined again")
class Varlen(Attention):
    def forward(self, x):
        cuts = [0, *(x[:, 0] > 1.0).nonzero()[:, 0].tolist(), len(x)]
        lengths = [b - a for a, b in itertools.pairwise(cuts)]
        parts = []
        for part in x.split(lengths):
            if len(part):
                parts.append(self.join(F.scaled_dot_product_attention(*self.split(part, 1), is_causal=True)))
        return x + torch.cat(parts)


@layer(
    "nested tensors: jagged rows through a layer, back by `unbind`. A second run has a number of its own for them",
    refused={"mixed": "keep", "together, over the tiers": "keep"},
)
class Jagged(Attention):
    def forward(self, x):
        nested = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 40, 41, 160]))
        y = torch.tanh(self.out(nested))
        return x + torch.cat(y.unbind())


def uneager(score, b, h, q, k):
    return score


@layer("FlexAttention without compiling: a sliding window that grows with a counter, block masks made in the forward")
class Flexible(Attention):
    def __init__(self):
        super().__init__()
        self.calls = 0
        self.bias = nn.Parameter(torch.zeros(4))

    def forward(self, x):
        self.calls += 1
        window = 8 * self.calls
        q, k, v = self.split(x, 1)
        mask = create_block_mask(lambda b, h, i, j: (i >= j) & (i - j < window), 1, 1, len(x), len(x), device="cpu")
        y = flex_attention(q, k, v, block_mask=mask)
        return x + self.join(y * self.bias.exp()[:, None, None])


@layer("FlexAttention with a learnt bias that is captured by `score_mod`", seconds=120.0)
class FlexibleBias(Attention):
    def __init__(self):
        super().__init__()
        self.slopes = nn.Parameter(torch.randn(4) / 10)

    def forward(self, x):
        q, k, v = self.split(x, 1)
        slopes = self.slopes

        def score(s, b, h, i, j):
            return s - slopes[h] * (i - j).abs()

        return x + self.join(flex_attention(q, k, v, score_mod=score))


@layer("a ring by hand: chunks of keys come one after the other, an online softmax with running maximum and sum")
class Ring(Attention):
    def forward(self, x):
        q, k, v = self.split(x)
        out, maximum, total = torch.zeros_like(q), q.new_full((*q.shape[:-1], 1), -math.inf), 0.0
        for keys, vals in zip(k.split(20, 2), v.split(20, 2), strict=True):
            scores = q @ keys.mT / math.sqrt(q.shape[-1])
            new = torch.maximum(maximum, scores.amax(-1, keepdim=True))
            share, kept = (scores - new).exp(), (maximum - new).exp()
            total = total * kept + share.sum(-1, keepdim=True)
            out, maximum = out * kept + share @ vals, new
        return x + self.join(out / total)


class RingFunction(torch.autograd.Function):
    """The same with a backward of its own, that recomputes scores from what it kept of the softmax."""

    @staticmethod
    def forward(ctx, q, k, v):
        scores = q @ k.mT
        lse = scores.logsumexp(-1, keepdim=True)
        out = (scores - lse).exp() @ v
        ctx.save_for_backward(q, k, v, out, lse)
        return out, lse

    @staticmethod
    def backward(ctx, gradient, of_lse):
        q, k, v, out, lse = ctx.saved_tensors
        p = (q @ k.mT - lse).exp()
        d = p * (gradient @ v.mT - (gradient * out).sum(-1, keepdim=True) + of_lse)
        return d @ k, d.mT @ q, p.mT @ gradient


@layer("ring attention by a Function that gives out and log-sum, merged over chunks with gradients of both")
class RingByFunction(Attention):
    def forward(self, x):
        q, k, v = self.split(x)
        out = lse = None
        for keys, vals in zip(k.chunk(4, 2), v.chunk(4, 2), strict=True):
            one, of_one = RingFunction.apply(q, keys, vals)
            if out is None:
                out, lse = one, of_one
            else:
                new = torch.logaddexp(lse, of_one)
                out, lse = out * (lse - new).exp() + one * (of_one - new).exp(), new
        return x + self.join(out)


@layer("Transformer-XL: keys and values of the last call are a memory in an attribute, detached", TODAY[:3])
class Memory(Attention):
    def __init__(self):
        super().__init__()
        self.memory = None

    def forward(self, x):
        q, k, v = self.split(x)
        if self.memory is not None:
            k, v = torch.cat([self.memory[0], k], 2), torch.cat([self.memory[1], v], 2)
        self.memory = (k[:, :, -16:].detach(), v[:, :, -16:].detach())
        return x + self.join(F.scaled_dot_product_attention(q, k, v))


@layer("Infini-attention: a matrix of associations is read and moved by segments, its gate is learnt")
class Infini(Attention):
    def __init__(self):
        super().__init__()
        self.gate = nn.Parameter(torch.zeros(4, 1, 1))

    def forward(self, x):
        q, k, v = self.split(x)
        memory, norm, outs = q.new_zeros(2, 4, 8, 8), q.new_zeros(2, 4, 8, 1), []
        for a, b, c in zip(q.split(20, 2), k.split(20, 2), v.split(20, 2), strict=True):
            read = (F.elu(a) + 1) @ memory / ((F.elu(a) + 1) @ norm + 1e-6)
            local = F.scaled_dot_product_attention(a, b, c, is_causal=True)
            outs.append(self.gate.sigmoid() * read + (1 - self.gate.sigmoid()) * local)
            memory = memory + (F.elu(b) + 1).mT @ c
            norm = norm + (F.elu(b) + 1).sum(2)[..., None]
        return x + self.join(torch.cat(outs, 2))


@layer("LSH attention: rows are sorted by a hash from random directions, chunks are attended, sorted back (Reformer)")
class Hashed(Attention):
    def forward(self, x):
        q, k, v = self.split(x, 1)
        hashes = (q @ torch.randn(8, 4)).argmax(-1)
        order = hashes.argsort(-1, stable=True)
        index = order[..., None].expand_as(q)
        a, b, c = (t.gather(2, index).view(1, 4, -1, 32, 8) for t in (q, k, v))
        y = F.scaled_dot_product_attention(a, b, c).view(1, 4, -1, 8)
        return x + self.join(torch.empty_like(y).scatter_(2, index, y))


@layer("native sparse attention: compressed blocks by a learnt mean, the best blocks in full, a window; three gates")
class NativeSparse(Attention):
    def __init__(self):
        super().__init__()
        self.compress, self.gate = nn.Parameter(torch.zeros(16)), nn.Linear(WIDTH, 3)

    def forward(self, x):
        q, k, v = self.split(x)
        blocks = [t.unflatten(2, (-1, 16)) for t in (k, v)]
        ck, cv = (torch.einsum("bhnld,l->bhnd", t, self.compress.softmax(0)) for t in blocks)
        scores = q @ ck.mT
        coarse = scores.softmax(-1) @ cv
        chosen = scores.mean(2).topk(2, -1)[1]
        index = chosen[..., None, None].expand(-1, -1, -1, 16, 8)
        fine = F.scaled_dot_product_attention(q, *(t.gather(2, index).flatten(2, 3) for t in blocks))
        near = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).tril().triu(-8)
        window = F.scaled_dot_product_attention(q, k, v, attn_mask=near)
        gates = self.gate(x).sigmoid().view(2, -1, 1, 3).transpose(1, 2)
        return x + self.join(sum(g * y for g, y in zip(gates.split(1, -1), (coarse, fine, window), strict=True)))


@layer("MLA: keys and values from a small latent that is normed, a rotary part that all heads share")
class Latent(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.kv_a = nn.Linear(WIDTH, 4 * 12), nn.Linear(WIDTH, 8 + 4)
        self.norm, self.kv_b, self.out = nn.RMSNorm(8), nn.Linear(8, 4 * 16, bias=False), nn.Linear(32, WIDTH)

    def forward(self, x):
        q = self.q(x).view(2, -1, 4, 12).transpose(1, 2)
        latent, turned = self.kv_a(x).split([8, 4], -1)
        k, v = self.kv_b(self.norm(latent)).view(2, -1, 4, 16).transpose(1, 2).chunk(2, -1)
        shared = turned.view(2, -1, 1, 4).transpose(1, 2).expand(-1, 4, -1, -1)
        y = F.scaled_dot_product_attention(q, torch.cat([k, shared], -1), v)
        return x + self.out(y.transpose(1, 2).reshape(-1, 32))


@layer("the absorbed form of MLA: `kv_b.weight` is viewed and goes into the queries by `einsum`")
class Absorbed(Latent):
    def forward(self, x):
        q, q_turned = self.q(x).view(2, -1, 4, 12).split([8, 4], -1)
        latent, turned = self.kv_a(x).view(2, -1, 12).split([8, 4], -1)
        latent = self.norm(latent)
        up, down = self.kv_b.weight.view(4, 16, 8).split(8, 1)
        scores = torch.einsum("bqhd,hdc,bkc->bhqk", q, up, latent) + torch.einsum("bqhr,bkr->bhqk", q_turned, turned)
        y = torch.einsum("bhqk,bkc,hvc->bqhv", scores.softmax(-1), latent, down)
        return x + self.out(y.reshape(-1, 32))


@layer("differential attention: two maps, a scale of exponents of learnt vectors, a norm of heads")
class Differential(Attention):
    def __init__(self):
        super().__init__()
        self.lambdas = nn.ParameterDict({name: torch.randn(4) / 10 for name in ("q1", "k1", "q2", "k2")})
        self.norm = nn.RMSNorm(8, elementwise_affine=False)

    def forward(self, x):
        q, k, v = self.split(x)
        named = self.lambdas
        scale = (named["q1"] @ named["k1"]).exp() - (named["q2"] @ named["k2"]).exp() + 0.8
        maps = [(a @ b.mT).softmax(-1) for a, b in zip(q.chunk(2, -1), k.chunk(2, -1), strict=True)]
        return x + self.join(self.norm((maps[0] - scale * maps[1]) @ v) * 0.2)


# Scans with a state.


@layer("Mamba by hand: a step size by softplus, a scan in a loop over chunks, each chunk checkpointed")
class Scanned(nn.Module):
    def __init__(self):
        super().__init__()
        self.proj, self.out = nn.Linear(WIDTH, 2 * WIDTH + 9), nn.Linear(WIDTH, WIDTH)
        self.log = nn.Parameter(torch.arange(1.0, 5.0).log().repeat(WIDTH, 1))
        self.skip = nn.Parameter(torch.ones(WIDTH))

    def chunk(self, state, y, step, b, c):
        outs = []
        for t in range(y.shape[1]):
            decay = (-self.log.exp() * step[:, t, :, None]).exp()
            state = decay * state + step[:, t, :, None] * b[:, t, None] * y[:, t, :, None]
            outs.append((state * c[:, t, None]).sum(-1))
        return state, torch.stack(outs, 1)

    def forward(self, x):
        y, gate, rest = self.proj(x.view(8, -1, WIDTH)).split([WIDTH, WIDTH, 9], -1)
        step, b, c = F.softplus(rest[..., :1]).expand_as(y), rest[..., 1:5], rest[..., 5:]
        state, outs = x.new_zeros(8, WIDTH, 4), []
        for parts in zip(*(t.split(5, 1) for t in (y, step, b, c)), strict=True):
            state, out = checkpoint(self.chunk, state, *parts, use_reentrant=False)
            outs.append(out)
        out = (torch.cat(outs, 1) + self.skip * y) * F.silu(gate)
        return x + self.out(out).view_as(x)


@layer("RWKV: the token before is mixed in by learnt shares, a state with a bonus goes through time in log space")
class Receptance(nn.Module):
    def __init__(self):
        super().__init__()
        self.mix = nn.ParameterDict({n: torch.rand(1, 1, WIDTH) for n in "rkv"})
        self.decay, self.bonus = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.r, self.k, self.v, self.o = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x):
        y = x.view(8, -1, WIDTH)
        last = F.pad(y, (0, 0, 1, -1))
        r, k, v = (getattr(self, n)(torch.lerp(last, y, self.mix[n])) for n in "rkv")
        top = x.new_full((8, WIDTH), -1e30)
        num = den = x.new_zeros(8, WIDTH)
        outs = []
        for t in range(y.shape[1]):
            high = torch.maximum(top, self.bonus + k[:, t])
            a, b = (top - high).exp(), (self.bonus + k[:, t] - high).exp()
            outs.append((a * num + b * v[:, t]) / (a * den + b))
            high = torch.maximum(top - self.decay.exp(), k[:, t])
            a, b = (top - self.decay.exp() - high).exp(), (k[:, t] - high).exp()
            num, den, top = a * num + b * v[:, t], a * den + b, high
        return x + self.o(r.sigmoid() * torch.stack(outs, 1)).view_as(x)


@layer(
    "the delta rule: a matrix state unlearns before it learns (DeltaNet), norms of keys, the state kept detached",
    TODAY[:3],
)
class Delta(Attention):
    def __init__(self):
        super().__init__()
        self.beta = nn.Linear(WIDTH, 4)
        self.register_buffer("state", torch.zeros(2, 4, 8, 8), persistent=False)

    def forward(self, x):
        q, k, v = self.split(x)
        k, beta = F.normalize(k, dim=-1), self.beta(x).sigmoid().view(2, -1, 4).transpose(1, 2)
        state, outs = self.state, []
        for t in range(0, q.shape[2], 8):
            a, b, c, g = q[:, :, t : t + 8], k[:, :, t : t + 8], v[:, :, t : t + 8], beta[:, :, t : t + 8, None]
            outs.append(a @ state)
            state = state + (b * g).mT @ (c - b @ state)
        self.state = state.detach()
        return x + self.join(torch.cat(outs, 2))


@layer("LSTM over chunks of a sequence, hidden states handed on and detached at a random place")
class Truncated(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn, self.out = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, WIDTH)
        self.draw = random.Random(4)

    def forward(self, x):
        state, outs = None, []
        for part in x.view(4, -1, WIDTH).split(10, 1):
            out, state = self.rnn(part, state)
            if self.draw.random() < 0.5:
                state = tuple(s.detach() for s in state)
            outs.append(out)
        return x + self.out(torch.cat(outs, 1)).view_as(x)


@layer("a GRU whose state lives in a buffer over calls and steps, and begins anew where a row says so", TODAY)
class StatefulGru(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.register_buffer("state", torch.zeros(160, WIDTH))

    def forward(self, x):
        begins = x[:, :1] > 1
        state = self.cell(x, torch.where(begins, 0.0, self.state))
        self.state.copy_(state.detach())
        return x + state


@layer("an SSM as a convolution by FFT: the kernel is made of complex exponentials of real parameters (S4D)")
class Convolved(nn.Module):
    def __init__(self):
        super().__init__()
        self.real, self.imaginary = nn.Parameter(torch.zeros(WIDTH, 4)), nn.Parameter(torch.rand(WIDTH, 4))
        self.c = nn.Parameter(torch.randn(WIDTH, 4, 2))
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = x.view(4, -1, WIDTH).mT
        length = y.shape[-1]
        poles = torch.complex(-self.real.exp(), self.imaginary)
        kernel = (torch.view_as_complex(self.c)[..., None] * (poles[..., None] * torch.arange(length) / 10).exp()).sum(
            1
        )
        y = torch.fft.irfft(torch.fft.rfft(y, 2 * length) * torch.fft.rfft(kernel.real, 2 * length))[..., :length]
        return x + self.out(torch.tanh(y.mT)).reshape_as(x)


# Checkpoints of pieces.


def policy(ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE


@layer("the attention alone is checkpointed, by a policy that saves products; the rest of the block is not")
class PieceCheckpointed(Attention):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 64), nn.Linear(64, WIDTH)

    def attend(self, x):
        return self.join(F.scaled_dot_product_attention(*self.split(x)))

    def forward(self, x):
        def contexts():
            return create_selective_checkpoint_contexts(policy)

        x = x + checkpoint(self.attend, x, use_reentrant=False, context_fn=contexts)
        return x + self.down(F.gelu(self.up(x)))


@layer("the MLP runs in chunks of rows, each checkpointed with reentrance, with dropout")
class ChunkedMlp(Block):
    def piece(self, x):
        return self.down(F.dropout(torch.tanh(self.up(x)), 0.2, self.training))

    def forward(self, x):
        return x + torch.cat([checkpoint(self.piece, part, use_reentrant=True) for part in x.split(50)])


@layer("`save_on_cpu` around a part of a block, a hook that halves what is saved around another")
class SavedByUser(Block):
    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            h = torch.tanh(self.up(x))
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.bfloat16(), lambda t: t.float()):
            return x + self.down(h * h)


@layer("every second call of a block is checkpointed, decided by a counter of the class")
class Alternating(Block):
    calls = 0

    def forward(self, x):
        type(self).calls += 1
        if type(self).calls % 2:
            return checkpoint(super().forward, x, use_reentrant=False)
        return super().forward(x)


# Weights that are made in the forward.


@layer("DoRA by hand: a frozen base, a direction with a detached norm, a magnitude, dropout on the adapter's input")
class Dora(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, WIDTH) / 6), nn.Parameter(torch.randn(WIDTH, 4) / 20)
        self.magnitude = nn.Parameter(self.base.weight.norm(dim=1))

    def forward(self, x):
        weight = self.base.weight + self.b @ self.a
        scale = (self.magnitude / weight.norm(dim=1).detach())[None]
        dropped = F.dropout(x, 0.1, self.training)
        return (
            x + (scale - 1) * F.linear(x, self.base.weight) + scale * (dropped @ self.a.t() @ self.b.t()) + self.base(x)
        )


@layer("VeRA: random matrices are buffers of the first block that all share by a reference, scales are trained")
class Vera(nn.Module):
    shared: ClassVar[dict[str, torch.Tensor]] = {}

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.d, self.scale = nn.Parameter(torch.full((8,), 0.1)), nn.Parameter(torch.full((WIDTH,), 0.1))
        if not Vera.shared:
            Vera.shared.update(a=torch.randn(8, WIDTH), b=torch.randn(WIDTH, 8))
        self.register_buffer("a", Vera.shared["a"])
        self.register_buffer("b", Vera.shared["b"])

    def forward(self, x):
        return torch.tanh(x + self.base(x) + self.scale * F.linear(self.d * F.linear(x, self.a), self.b))


@layer("OFT: an orthogonal factor by Cayley's transform of a skew parameter, over a frozen base")
class Orthogonal(nn.Module):
    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.skew = nn.Parameter(torch.randn(4, 8, 8) / 20)

    def forward(self, x):
        skew, eye = self.skew - self.skew.mT, torch.eye(8)
        turn = torch.block_diag(*torch.linalg.solve(eye + skew, eye - skew))
        return x + torch.tanh(F.linear(x, turn @ self.base.weight, self.base.bias))


@layer("(IA)3 and prompts: a scale of activations, rows before the keys, both are all that is trained")
class Prompted(Attention):
    def __init__(self):
        super().__init__()
        for p in self.parameters():
            p.requires_grad_(False)
        self.scale, self.prefix = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.randn(2, 1, 4, 6, 8))

    def forward(self, x):
        q, k, v = self.split(x)
        k, v = (torch.cat([p.expand(2, -1, -1, -1), t], 2) for p, t in zip(self.prefix, (k, v), strict=True))
        return x + self.join(F.scaled_dot_product_attention(q, k, v)) * self.scale


@layer("a hypernetwork of the block makes two small weights of a code, called by `functional_call`")
class Hyper(nn.Module):
    def __init__(self):
        super().__init__()
        self.code, self.make = nn.Parameter(torch.randn(6)), nn.Linear(6, 2 * 4 * WIDTH)
        object.__setattr__(self, "target", nn.ModuleDict({"a": nn.Linear(WIDTH, 4, bias=False)}))

    def forward(self, x):
        a, b = (self.make(self.code) / 8).chunk(2)
        hidden = functional_call(self.target["a"], {"weight": a.view(4, WIDTH)}, (x,))
        return x + torch.tanh(hidden) @ b.view(4, WIDTH)


class Rounded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, scale):
        ctx.save_for_backward(weight, scale)
        return (weight / scale).round().clamp(-8, 7) * scale

    @staticmethod
    def backward(ctx, gradient):
        weight, scale = ctx.saved_tensors
        inside = ((weight / scale) > -8) & ((weight / scale) < 7)
        of_scale = gradient * ((weight / scale).round().clamp(-8, 7) - torch.where(inside, weight / scale, 0))
        return gradient * inside, of_scale.sum(1, keepdim=True)


@layer("LSQ: quantisation with learnt scales of rows, which begin by the weight in the first forward", TODAY)
class Lsq(Block):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.full((WIDTH, 1), 0.05))
        self.register_buffer("begun", torch.tensor(False))

    def forward(self, x):
        if not self.begun:
            self.begun.fill_(True)
            self.offset = self.up.weight.detach().abs().mean(1, keepdim=True) / 4
        return x + self.down(torch.tanh(F.linear(x, Rounded.apply(self.up.weight, self.scale), self.up.bias)))


@layer("BitNet: ternary weights by a mean of absolute values, activations in int8, straight through")
class Ternary(Block):
    def linear(self, module, x):
        scale = 1 / module.weight.abs().mean().clamp(min=1e-5)
        weight = module.weight + ((module.weight * scale).round().clamp(-1, 1) / scale - module.weight).detach()
        of_x = 127 / x.abs().amax(-1, keepdim=True).clamp(min=1e-5)
        x = x + ((x * of_x).round() / of_x - x).detach()
        return F.linear(x, weight, module.bias)

    def forward(self, x):
        return x + self.linear(self.down, torch.tanh(self.linear(self.up, x)))


@layer(
    "weights are sampled: a mean and a deviation each, a KL as a loss kept by the block (Bayes by backprop)",
    loss_of=auxiliary,
)
class Bayesian(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.rho = (
            nn.Parameter(torch.randn(WIDTH, WIDTH) / 6),
            nn.Parameter(torch.full((WIDTH, WIDTH), -4.0)),
        )

    def forward(self, x):
        deviation = F.softplus(self.rho)
        weight = self.mean + deviation * torch.randn_like(deviation)
        prior = torch.distributions.Normal(0.0, 0.1)
        posterior = torch.distributions.Normal(self.mean, deviation)
        self.auxiliary = torch.distributions.kl_divergence(posterior, prior).mean()
        return x + torch.tanh(x @ weight)


@layer("a weight norm and an orthogonal parametrization in one block")
class Parametrized(Block):
    def __init__(self):
        super().__init__()
        parametrizations.weight_norm(self.up)
        parametrizations.orthogonal(self.down)


class Masked(nn.Module):
    def __init__(self, mask):
        super().__init__()
        self.register_buffer("mask", mask)

    def forward(self, weight):
        return weight * self.mask


def lottery(model, step):
    """Magnitudes say what stays; the rest begins anew at its first value."""
    with torch.no_grad():
        for block in model.blocks:
            of = block.up.parametrizations.weight
            keep = of.original.abs() >= of.original.abs().flatten().kthvalue(100 * (step + 1)).values
            of[0].mask.copy_(keep)
            of.original.copy_(block.first)


@layer(
    "a lottery ticket: a parametrization masks, after each step the mask shrinks and weights are rewound",
    TODAY,
    after=lottery,
)
class Ticket(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("first", self.up.weight.detach().clone())
        parametrize.register_parametrization(self.up, "weight", Masked(torch.ones(WIDTH, WIDTH)))


# Depth.


@layer("stochastic depth by a rate of the block's number, rows drop by themselves")
class DropPath(Block):
    count = 0

    def __init__(self):
        super().__init__()
        DropPath.count += 1
        self.rate = 0.1 * (DropPath.count % 5)

    def forward(self, x):
        out = super().forward(x) - x
        if not self.training or self.rate == 0:
            return x + out
        return x + out * x.new_empty(len(x), 1).bernoulli_(1 - self.rate).div_(1 - self.rate)


@layer("a reversible block by a Function that calls `torch.autograd.backward` on what it computes anew", LAYERS)
class Reversible(Block):
    def forward(self, x):
        return ReversibleFunction.apply(x, self.up, self.down, *self.parameters())


class ReversibleFunction(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, f, g, *parameters):
        ctx.f, ctx.g = f, g
        a, b = x.detach().chunk(2)
        with torch.no_grad():
            a = a + torch.tanh(f(b))
            b = b + torch.tanh(g(a))
        out = torch.cat([a, b])
        ctx.save_for_backward(out)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (out,) = ctx.saved_tensors
        a, b = out.chunk(2)
        of_a, of_b = gradient.chunk(2)
        parameters = [*ctx.f.parameters(), *ctx.g.parameters()]
        with torch.no_grad():
            b0 = b - torch.tanh(ctx.g(a))
            a0 = a - torch.tanh(ctx.f(b0))
        with torch.enable_grad():
            leaf = b0.detach().requires_grad_()
            one = a0 + torch.tanh(ctx.f(leaf))
            mid = one.detach().requires_grad_()
            two = torch.tanh(ctx.g(mid))
            found = torch.autograd.grad(two, [mid, *ctx.g.parameters()], of_b)
            of_a = of_a + found[0]
            other = torch.autograd.grad(one, [leaf, *ctx.f.parameters()], of_a)
        del parameters
        return torch.cat([of_a, of_b + other[0]]), None, None, *other[1:], *found[1:]


@layer("DEQ: a fixed point without gradients, one more step with them, a hook that solves for the backward")
class Equilibrium(Block):
    def cell(self, z, x):
        return torch.tanh(self.down(torch.tanh(self.up(z))) * 0.5 + x)

    def forward(self, x):
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(8):
                z = self.cell(z, x)
        z = self.cell(z, x)
        if not z.requires_grad:
            return z
        z0 = z.detach().requires_grad_()
        again = self.cell(z0, x.detach())

        def solve(gradient):
            found = gradient
            for _ in range(6):
                found = torch.autograd.grad(again, z0, found, retain_graph=True)[0] + gradient
            return found

        z.register_hook(solve)
        return z


@layer("a neural ODE: Heun's steps over the block's own layers, as many as a learnt time says")
class Heun(Block):
    def __init__(self):
        super().__init__()
        self.time = nn.Parameter(torch.tensor(0.5))

    def field(self, t, x):
        return self.down(torch.tanh(self.up(x) + t))

    def forward(self, x):
        count = 2 + int(self.time.item() * 2)
        h = self.time / count
        for i in range(count):
            k = self.field(i * h, x)
            x = x + h / 2 * (k + self.field((i + 1) * h, x + h * k))
        return x


@layer("mixture of recursions: a router says how often each row passes the same two layers")
class Recursive(Block):
    def __init__(self):
        super().__init__()
        self.gate = nn.Linear(WIDTH, 3)

    def forward(self, x):
        weights = self.gate(x).softmax(-1)
        depth = weights.argmax(-1)
        for turn in range(3):
            where = (depth >= turn).nonzero()[:, 0]
            if len(where) == 0:
                break
            x = x.index_put((where,), super().forward(x[where]) * (1 + weights[where, turn, None]))
        return x


@layer("hyper-connections: four streams, mixed by weights that the input makes, in each block")
class HyperConnected(Block):
    def __init__(self):
        super().__init__()
        self.static, self.dynamic = nn.Parameter(torch.eye(4) + 0.1), nn.Linear(WIDTH // 4, 4)

    def forward(self, x):
        streams = x.view(-1, 4, WIDTH // 4)
        share = self.static + torch.tanh(self.dynamic(streams)) * 0.1
        mixed = torch.einsum("bij,bjd->bid", share, streams).reshape_as(x)
        return super().forward(mixed)


class Tally:
    """A class that nobody makes an object of."""

    calls = 0
    shares: ClassVar[list[float]] = []

    @classmethod
    def count(cls, x):
        cls.calls += 1
        cls.shares = [*cls.shares[-2:], x.detach().mean().item()]
        return 1 + 0.1 * (cls.calls % 3)


@layer("a forward counts in attributes of a class by its class method, and scales by the count", TODAY)
class CountedByClass(Block):
    def forward(self, x):
        return super().forward(x) * Tally.count(x)


class Plain:
    calls = 0


@layer("a forward counts in an attribute of a class that it names", TODAY)
class CountedInClass(Block):
    def forward(self, x):
        Plain.calls += 1
        return super().forward(x) / (1 + 0.1 * (Plain.calls % 3))


class Counting(torch.autograd.Function):
    calls = 0

    @staticmethod
    def forward(ctx, x):
        Counting.calls += 1
        ctx.scale = 1 + 0.1 * (Counting.calls % 3)
        return x * ctx.scale

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.scale


@layer("a Function counts its forwards in an attribute of its own, and scales by the count", TODAY)
class CountedByFunction(Block):
    def forward(self, x):
        return super().forward(Counting.apply(x))


REPLACED = torch.tensor(0.1)
WRITTEN = torch.tensor(0.1)


@layer("a forward replaces a tensor that is a global", TODAY[:3])
class GlobalReplaced(Block):
    def forward(self, x):
        global REPLACED
        REPLACED = 0.9 * REPLACED + 0.1 * x.detach().mean().abs()
        return super().forward(x) * (1 + REPLACED)


@layer("a forward writes to a tensor that is a global", TODAY[:3])
class GlobalWritten(Block):
    def forward(self, x):
        WRITTEN.lerp_(x.detach().mean().abs(), 0.1)
        return super().forward(x) * (1 + WRITTEN.item())


@layer("a forward replaces a tensor that is an attribute of its class", TODAY[:3])
class OfClassReplaced(Block):
    scale = torch.tensor(0.1)

    def forward(self, x):
        type(self).scale = 0.9 * self.scale + 0.1 * x.detach().mean().abs()
        return super().forward(x) * (1 + self.scale)


@layer("a forward writes to a tensor that is an attribute of its class", TODAY[:3])
class OfClassWritten(Block):
    scale = torch.tensor(0.1)

    def forward(self, x):
        self.scale.lerp_(x.detach().mean().abs(), 0.1)
        return super().forward(x) * (1 + self.scale.item())


def counting_in_closure():
    kept = torch.tensor(0.1)
    written = torch.tensor(0.1)

    def scale(x):
        nonlocal kept
        kept = 0.9 * kept + 0.1 * x.detach().mean().abs()
        written.lerp_(kept, 0.5)
        return 1 + kept + written.item()

    return scale


scale_in_closure = counting_in_closure()


@layer("a function that a forward calls keeps tensors in its closure, one replaced, one written to", TODAY[:3])
class InClosure(Block):
    def forward(self, x):
        return super().forward(x) * scale_in_closure(x)


TABLE = {"scale": torch.tensor(0.1), "count": torch.zeros(1)}


@layer("a forward replaces a tensor in a global dict, and writes to another one", TODAY[:3])
class InTable(Block):
    def forward(self, x):
        TABLE["scale"] = 0.9 * TABLE["scale"] + 0.1 * x.detach().mean().abs()
        TABLE["count"] += 1
        return super().forward(x) * (1 + TABLE["scale"] + 0.1 * (TABLE["count"].item() % 3))


shared = types.ModuleType("shared")
exec(
    """
calls, seen = 0, None

def scale(x):
    global calls, seen
    calls += 1
    seen = x.detach().mean() if seen is None else 0.9 * seen + 0.1 * x.detach().mean()
    return 1 + 0.1 * (calls % 3) + seen.abs()
""",
    vars(shared),
)


@layer(
    "a forward calls a function of another module of Python, which counts in its globals: `shared.scale(x)`", TODAY[:3]
)
class ByModule(Block):
    def forward(self, x):
        return super().forward(x) * shared.scale(x)


settings = types.ModuleType("settings")
settings.turn = 0


@layer("a forward counts in a variable of another module of Python: `settings.turn += 1`", TODAY[:3])
class InModule(Block):
    def forward(self, x):
        settings.turn += 1
        return super().forward(x) * (1 + 0.1 * (settings.turn % 3))


class Carried:
    hidden = None


@program(family, "the loop hands a state on in an attribute of a class: `Carried.hidden = ...`", LAYERS)
def today_state_in_class(run):
    def loss_of(model, out, index):
        loss = (out if Carried.hidden is None else out + Carried.hidden).square().mean()
        Carried.hidden = out.detach()
        return loss

    return trained(run, Net, loss_of=loss_of)


@program(family, "the loop hands a state on in a module of Python: `settings.hidden = ...`", LAYERS)
def today_state_in_module(run):
    settings.hidden = torch.zeros(160, WIDTH)

    def loss_of(model, out, index):
        loss = (out + settings.hidden).square().mean()
        settings.hidden = out.detach()
        return loss

    return trained(run, Net, loss_of=loss_of)


# Of images, sound and other things.


@layer("a rational function with learnt coefficients in place of an activation (KAN by hand)")
class Rational(Block):
    def __init__(self):
        super().__init__()
        self.top, self.bottom = nn.Parameter(torch.tensor([0.0, 1.0, 0.1])), nn.Parameter(torch.tensor([0.1, 0.1]))

    def forward(self, x):
        y = self.up(x)
        top = sum(c * y**i for i, c in enumerate(self.top))
        return x + self.down(top / (1 + (self.bottom[0] * y + self.bottom[1] * y * y).abs()))


@layer(
    "splines: a basis of knots that is a buffer, coefficients by `einsum`, the grid moves to the data each tenth call"
)
class Splines(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("grid", torch.linspace(-2, 2, 8))
        self.weight, self.calls = nn.Parameter(torch.randn(WIDTH, WIDTH, 8) / 30), 0

    def forward(self, x):
        self.calls += 1
        if self.calls % 3 == 0:
            self.grid.copy_(torch.quantile(x.detach().flatten(), torch.linspace(0.05, 0.95, 8)))
        basis = (-((x[..., None] - self.grid) ** 2)).exp()
        return x + torch.einsum("bik,oik->bo", basis, self.weight)


@layer("SIREN: sines with a frequency, initialised by bounds, complex phases of a learnt angle")
class Sines(Block):
    def __init__(self):
        super().__init__()
        self.angle = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        turned = torch.polar(torch.ones(WIDTH), self.angle) * torch.sin(5 * self.up(x))
        return x + self.down(turned.real + turned.imag)


@layer("an image block: depthwise and transposed convolutions, batch norm, squeeze and excitation, pixels shuffled")
class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.deep, self.norm = nn.Conv2d(8, 8, 3, padding=1, groups=8), nn.BatchNorm2d(8)
        self.down, self.up = nn.Conv2d(8, 16, 2, stride=2), nn.ConvTranspose2d(16, 8, 2, stride=2)
        self.squeeze = nn.Sequential(nn.Linear(8, 2), nn.SiLU(), nn.Linear(2, 8), nn.Sigmoid())

    def forward(self, x):
        y = x.view(10, 8, 8, 8)
        z = F.gelu(self.norm(self.deep(y)))
        z = z * self.squeeze(z.mean((2, 3)))[..., None, None]
        return x + self.up(F.silu(self.down(z))).reshape_as(x)


@layer("deformable: offsets by a convolution, `grid_sample` at them, a mask by a sigmoid")
class Deformed(nn.Module):
    def __init__(self):
        super().__init__()
        self.offset, self.mix = nn.Conv2d(8, 3, 3, padding=1), nn.Conv2d(8, 8, 1)

    def forward(self, x):
        y = x.view(10, 8, 8, 8)
        shift, mask = self.offset(y).split([2, 1], 1)
        axis = torch.linspace(-1, 1, 8)
        grid = torch.stack(torch.meshgrid(axis, axis, indexing="xy"), -1) + 0.3 * torch.tanh(shift).permute(0, 2, 3, 1)
        return x + self.mix(F.grid_sample(y, grid, align_corners=True) * mask.sigmoid()).reshape_as(x)


@layer("a Fourier operator: complex weights as a real parameter, modes cut, an inverse transform")
class Fourier(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.mix = nn.Parameter(torch.randn(8, 4, 4, 2) / 4), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        y = torch.fft.rfft2(x.view(-1, 8, 4, 16))
        out = torch.zeros_like(y)
        out[..., :4, :4] = y[..., :4, :4] * torch.view_as_complex(self.weight)
        return x + torch.tanh(self.mix(torch.fft.irfft2(out, s=(4, 16)).reshape_as(x)))


@layer("slots compete for rows by three turns of attention with a GRU cell, drawn from a learnt Gaussian")
class Slots(nn.Module):
    def __init__(self):
        super().__init__()
        self.mean, self.log = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.kv, self.cell, self.back = nn.Linear(WIDTH, 2 * WIDTH), nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        k, v = self.kv(x).chunk(2, -1)
        slots = self.mean + self.log.exp() * torch.randn(6, WIDTH)
        for _ in range(3):
            share = (slots @ k.t() / WIDTH**0.5).softmax(0)
            slots = self.cell(share / share.sum(-1, keepdim=True) @ v, slots)
        return x + self.back(share.t() @ slots)


@layer("a Perceiver: learnt latents ask the rows, the rows ask the latents, by `nn.MultiheadAttention`")
class Perceiver(nn.Module):
    def __init__(self):
        super().__init__()
        self.latents = nn.Parameter(torch.randn(1, 6, WIDTH))
        self.read, self.write = (nn.MultiheadAttention(WIDTH, 4, batch_first=True) for _ in range(2))

    def forward(self, x):
        y = x.view(4, -1, WIDTH)
        latents, _ = self.read(self.latents.expand(4, -1, -1), y, y, need_weights=False)
        return x + self.write(y, latents, latents)[0].reshape_as(x)


@layer("mixing over time by a Toeplitz matrix that is made of a parameter by `as_strided` of a padded copy")
class Toeplitz(Block):
    def __init__(self):
        super().__init__()
        self.taps = nn.Parameter(torch.randn(79) / 10)

    def forward(self, x):
        matrix = self.taps.clone().as_strided((40, 40), (1, 1)).flip(0)
        return super().forward(x + (matrix @ x.view(4, 40, WIDTH)).reshape_as(x))


@layer("contextual positions: a cumulative sum of gates asks a table of positions, interpolated between two rows")
class Contextual(Attention):
    def __init__(self):
        super().__init__()
        self.table = nn.Parameter(torch.zeros(12, 8))

    def forward(self, x):
        q, k, v = self.split(x)
        scores = q @ k.mT
        position = scores.sigmoid().flip(-1).cumsum(-1).flip(-1).clamp(max=11)
        rows = q @ self.table.t()
        low = position.floor().long()
        share = position - low
        bias = rows.gather(-1, low) * (1 - share) + rows.gather(-1, position.ceil().long()) * share
        return x + self.join(((scores + bias) / 8**0.5).softmax(-1) @ v)


@layer("sigmoid attention with a bias of the length, `out=` of a product in evaluation, ALiBi slopes in a buffer")
class Sigmoidal(Attention):
    def __init__(self):
        super().__init__()
        self.register_buffer("slopes", 2.0 ** -torch.arange(1, 5).view(4, 1, 1))

    def forward(self, x):
        q, k, v = self.split(x)
        index = torch.arange(q.shape[2])
        bias = -self.slopes * (index[:, None] - index).abs()
        return x + self.join(torch.sigmoid(q @ k.mT + bias - math.log(q.shape[2])) @ v)


@layer("retention: chunks with a decaying state across, a group norm over heads, a gate")
class Retention(Attention):
    def __init__(self):
        super().__init__()
        self.gate, self.norm = nn.Linear(WIDTH, WIDTH), nn.GroupNorm(4, WIDTH)
        self.register_buffer("decay", 1 - 2.0 ** (-3 - torch.arange(4.0)).view(4, 1, 1), persistent=False)

    def forward(self, x):
        q, k, v = self.split(x)
        state, outs, place = torch.zeros(2, 4, 8, 8), [], torch.arange(20)
        inside = torch.where(place[:, None] >= place, self.decay ** (place[:, None] - place).clamp(min=0), 0.0)
        for a, b, c in zip(q.split(20, 2), k.split(20, 2), v.split(20, 2), strict=True):
            outs.append((a @ b.mT * inside) @ c + (a * self.decay ** (place[:, None] + 1)) @ state)
            state = state * self.decay**20 + (b * self.decay ** (19 - place[:, None])).mT @ c
        y = torch.cat(outs, 2).transpose(1, 2).reshape(-1, WIDTH)
        return x + self.out(self.norm(y) * F.silu(self.gate(x)))


@layer("a linear recurrent unit: complex diagonal states, exponentials of exponentials, a scan by doubling")
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.nu, self.theta = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.out = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x):
        y = torch.complex(x, torch.zeros_like(x)).view(4, 40, WIDTH)
        pole, step = torch.polar((-self.nu.exp()).exp(), self.theta), 1
        while step < 40:
            y = y + F.pad(y[:, :-step] * pole, (0, 0, step, 0))
            pole, step = pole * pole, step * 2
        return x + self.out(torch.cat([y.real, y.imag], -1).view(-1, 2 * WIDTH) / 8)


@layer("mLSTM: exponential gates with a running maximum, a matrix memory, in a loop over time")
class MatrixMemory(Attention):
    def __init__(self):
        super().__init__()
        self.gates = nn.Linear(WIDTH, 8)

    def forward(self, x):
        q, k, v = self.split(x, 8)
        i, f = self.gates(x).view(8, -1, 4, 2).permute(0, 2, 1, 3).unbind(-1)
        f, top = F.logsigmoid(f), torch.zeros(8, 4)
        memory, norm, outs = torch.zeros(8, 4, 8, 8), torch.zeros(8, 4, 8), []
        for t in range(q.shape[2]):
            high = torch.maximum(f[..., t] + top, i[..., t])
            keep, add = (f[..., t] + top - high).exp()[..., None], (i[..., t] - high).exp()[..., None]
            memory = keep[..., None] * memory + (add * v[:, :, t])[..., None] * k[:, :, t, None]
            norm, top = keep * norm + add * k[:, :, t], high
            outs.append((memory @ q[:, :, t, :, None])[..., 0] / (norm * q[:, :, t]).sum(-1, True).abs().clamp(min=1))
        return x + self.join(torch.stack(outs, 2))


@layer("a dynamic tanh for a norm, gains that begin small, shared by two places of a block")
class DynamicTanh(Block):
    def __init__(self):
        super().__init__()
        self.alpha, self.gain = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.full((WIDTH,), 0.1))

    def forward(self, x):
        y = torch.tanh(self.alpha * x) * self.gain
        return x + self.down(torch.tanh(self.alpha * self.up(y)) * self.gain)


@layer("rows are merged by similarity and spread again (ToMe): pairs by a bipartite match, `scatter_reduce`")
class Merging(Block):
    def forward(self, x):
        a, b = x[::2], x[1::2]
        scores, match = (F.normalize(a.detach(), dim=-1) @ F.normalize(b.detach(), dim=-1).t()).max(-1)
        gone = scores.topk(20)[1]
        merged = b.scatter_reduce(0, match[gone, None].expand(-1, WIDTH), a[gone], "mean")
        out = super().forward(torch.cat([a, merged]))
        one = out[: len(a)].index_copy(0, gone, out[len(a) :][match[gone]])
        return torch.stack([one, out[len(a) :]], 1).reshape_as(x)


@layer("a memory of keys asked by `topk`, values in an `nn.EmbeddingBag` with weights of each sample")
class KeyMemory(nn.Module):
    def __init__(self):
        super().__init__()
        self.keys, self.values = nn.Parameter(torch.randn(40, WIDTH) / 6), nn.EmbeddingBag(40, WIDTH, mode="sum")

    def forward(self, x):
        weights, index = (x @ self.keys.t()).topk(4, -1)
        return x + self.values(index, per_sample_weights=weights.softmax(-1))


@layer("capsules: routing by agreement for three turns, the last one alone with gradients, squashed")
class Capsules(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4, 8, 8) / 4)

    def forward(self, x):
        votes = torch.einsum("bid,ijde->bije", x.view(-1, 4, 8), self.weight)
        logits = torch.zeros(votes.shape[:3])
        for turn in range(3):
            given = votes if turn == 2 else votes.detach()
            s = (logits.softmax(2)[..., None] * given).sum(1)
            norm = s.square().sum(-1, keepdim=True)
            out = s * norm.sqrt() / (1 + norm + 1e-6)
            logits = logits + (given * out[:, None]).sum(-1).detach()
        return x + out.reshape_as(x)


@layer("a graph of the rows' own nearest neighbours, attention by `scatter_reduce` with a softmax by hand")
class Neighbours(Block):
    def forward(self, x):
        near = torch.cdist(x.detach(), x.detach()).topk(4, largest=False)[1]
        source, target = near.flatten(), torch.arange(len(x)).repeat_interleave(4)
        h = self.up(x)
        score = (h[source] * h[target]).sum(-1) / WIDTH
        high = torch.full((len(x),), -math.inf).scatter_reduce(0, target, score.detach(), "amax")
        share = (score - high[target]).exp()
        total = torch.zeros(len(x)).index_add(0, target, share)
        return x + self.down(torch.zeros_like(h).index_add(0, target, (share / total[target])[:, None] * h[source]))


@layer(
    "normalising flow: couplings with an inverse, a log-determinant kept by the block, in the loss", loss_of=auxiliary
)
class Coupling(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32))
        self.permute = nn.Parameter(torch.randn(WIDTH, WIDTH) / 20)

    def forward(self, x):
        turn = torch.matrix_exp(self.permute - self.permute.t())
        a, b = (x @ turn).chunk(2, -1)
        scale, shift = self.net(a).chunk(2, -1)
        self.auxiliary = -torch.tanh(scale).sum(-1).mean()
        return torch.cat([a, b * torch.tanh(scale).exp() + shift], -1)


@layer("an energy by a sum over the block's output, two steps down its gradient in the forward, with a graph")
class Descent(Block):
    def forward(self, x):
        with torch.enable_grad():
            y = x if x.requires_grad else x.detach().requires_grad_()
            for _ in range(2):
                energy = self.down(torch.tanh(self.up(y))).square().sum()
                y = y - 0.01 * torch.autograd.grad(energy, y, create_graph=True)[0]
        return y


# Graph networks.


def _on_graph(run, adjacency):
    class Graph(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("adjacency", adjacency.clone())

        def forward(self, x):
            return x + self.down(torch.tanh(self.adjacency @ self.up(x)))

    torch.manual_seed(5)
    engine, found = run.engine(Net(Graph)), []
    for index in range(3):
        engine(batch(index)).square().mean().backward()
        found.append(stepped(engine))
        if index == 1:
            engine = run.resume(engine, lambda: Net(Graph))
    return found, {name: p.detach().clone() for name, p in engine.module.named_parameters()}


def _edges():
    return (torch.rand(160, 160, generator=torch.Generator().manual_seed(1)) < 0.1).float()


@program(family, "a graph network whose adjacency is a sparse buffer of coordinates", TODAY)
def graph_in_a_sparse_buffer(run):
    return _on_graph(run, _edges().to_sparse())


@program(family, "the same, in CSR", TODAY)
def graph_in_a_compressed_buffer(run):
    return _on_graph(run, _edges().to_sparse_csr())
