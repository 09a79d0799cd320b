"""Mixtures of experts as people write them, trained whole, frozen in part, and by adapters. The optimizer is torch's
own arithmetic, so that bits are compared."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from misuses.case import Family
from misuses.place import values
from misuses.strangers import WIDTH, Block, Net, batch, trained

family = Family("expert models")

EXPERTS = 6


def same_bits(title, **options):
    return family.works(title, rtol=0.0, atol=0.0, **{"seconds": 90.0, **options})


def rows(step):
    return batch(step, 24)


def runs(place, make, **options):
    return trained(place, Net(make), data=rows, **options)


class Listed(nn.Module):
    """Experts in a list, a gate."""

    def __init__(self, top=2, count=EXPERTS):
        super().__init__()
        self.top, self.gate = top, nn.Linear(WIDTH, count, bias=False)
        self.experts = nn.ModuleList(Block() for _ in range(count))

    def route(self, x):
        return self.gate(x).softmax(-1).topk(self.top, -1)

    def forward(self, x):
        weights, chosen = self.route(x)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            where, slot = torch.where(chosen == index)
            if where.numel():
                out.index_add_(0, where, expert(x[where]) * weights[where, slot, None])
        return x + out


class Stacked(nn.Module):
    """Experts in weights of three dimensions."""

    def __init__(self, count=EXPERTS):
        super().__init__()
        self.gate = nn.Linear(WIDTH, count, bias=False)
        self.up = nn.Parameter(torch.randn(count, WIDTH, WIDTH) / 6)
        self.down = nn.Parameter(torch.randn(count, WIDTH, WIDTH) / 6)


@same_bits("top-2 by `index_add_`, experts that get no rows")
def experts_index_add(place):
    return runs(place, Listed)


@same_bits("routing with ties: logits are rounded, `topk` takes what comes")
def experts_ties(place):
    class Ties(Listed):
        def route(self, x):
            return ((self.gate(x) * 2).round() + 0 * self.gate(x)).softmax(-1).topk(self.top, -1)

    return runs(place, Ties)


@same_bits("a capacity: rows beyond it are dropped and go by the residual")
def experts_capacity(place):
    class Capacity(Listed):
        def forward(self, x):
            weights, chosen = self.route(x)
            out = x.clone()
            for index, expert in enumerate(self.experts):
                where, slot = torch.where(chosen == index)
                where, slot = where[:5], slot[:5]
                out = out.index_add(0, where, expert(x[where]) * weights[where, slot, None])
            return out

    return runs(place, Capacity)


@same_bits("all experts over all rows by `einsum`, weighted")
def experts_dense(place):
    class Dense(Stacked):
        def forward(self, x):
            h = torch.tanh(torch.einsum("bi,eij->bej", x, self.up))
            return x + torch.einsum("bej,ejk,be->bk", h, self.down, self.gate(x).softmax(-1))

    return runs(place, Dense)


@same_bits("dispatch and combine by one-hot tensors (GShard), `bmm` over experts")
def experts_gshard(place):
    class GShard(Stacked):
        def forward(self, x):
            weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
            mask = F.one_hot(chosen, EXPERTS).sum(1)
            place = (mask.cumsum(0) - 1) * mask
            kept = mask * (place < 10)
            dispatch = F.one_hot(place, 24)[..., :10] * kept[..., None]
            combine = dispatch * (self.gate(x).softmax(-1) * kept)[..., None]
            given = torch.einsum("bec,bi->eci", dispatch.to(x.dtype), x)
            out = torch.bmm(torch.tanh(torch.bmm(given, self.up)), self.down)
            return x + torch.einsum("bec,eck->bk", combine, out) + 0 * weights.sum()

    return runs(place, GShard)


@same_bits("experts choose their rows (expert choice)")
def experts_choose(place):
    class Choice(Stacked):
        def forward(self, x):
            scores = self.gate(x).softmax(-1).t()
            weights, chosen = scores.topk(8, -1)
            out = torch.bmm(torch.tanh(torch.bmm(x[chosen], self.up)), self.down) * weights[..., None]
            return x + torch.zeros_like(x).index_add(0, chosen.flatten(), out.flatten(0, 1))

    return runs(place, Choice)


@same_bits("rows are sorted by expert, each expert gets a slice of one tensor (MegaBlocks by hand)")
def experts_sorted(place):
    class Sorted(Stacked):
        def forward(self, x):
            weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
            order = chosen.flatten().argsort(stable=True)
            given = x.repeat_interleave(2, 0)[order]
            counts = chosen.flatten().bincount(minlength=EXPERTS).tolist()
            parts = []
            for index, part in enumerate(given.split(counts)):
                parts.append(torch.tanh(part @ self.up[index]) @ self.down[index])
            out = torch.cat(parts)[order.argsort()].view(-1, 2, WIDTH)
            return x + (out * weights[..., None]).sum(1)

    return runs(place, Sorted)


@same_bits("`torch.nn.functional.grouped_mm` over offsets, in bfloat16")
def experts_grouped(place):
    class Grouped(Stacked):
        def forward(self, x):
            weights, chosen = self.gate(x).softmax(-1).max(-1)
            order = chosen.argsort(stable=True)
            offsets = chosen.bincount(minlength=EXPERTS).cumsum(0).to(torch.int32)
            given = x[order].bfloat16()
            h = torch.tanh(torch._grouped_mm(given, self.up.bfloat16(), offs=offsets))
            out = torch._grouped_mm(h, self.down.bfloat16(), offs=offsets).to(x.dtype)
            return x + out[order.argsort()] * weights[:, None]

    return runs(place, Grouped)


@same_bits("weights of the chosen experts are gathered for each row: `self.up[chosen]`")
def experts_gathered(place):
    class Gathered(Stacked):
        def forward(self, x):
            weights, chosen = self.gate(x).softmax(-1).topk(2, -1)
            h = torch.tanh(torch.einsum("bi,bkij->bkj", x, self.up[chosen]))
            return x + torch.einsum("bkj,bkjo,bk->bo", h, self.down[chosen], weights)

    return runs(place, Gathered)


@same_bits("a shared expert beside the chosen ones, its output gated by a sigmoid")
def experts_shared(place):
    class Shared(Listed):
        def __init__(self):
            super().__init__()
            self.shared, self.shared_gate = Block(), nn.Linear(WIDTH, 1)

        def forward(self, x):
            return super().forward(x) + self.shared(x) * self.shared_gate(x).sigmoid()

    return runs(place, Shared)


@same_bits("routing by a hash of the row, without a gate")
def experts_hashed(place):
    class Hashed(Listed):
        def route(self, x):
            key = (x[:, :4] * 100).long().sum(1).remainder(EXPERTS)
            return torch.ones(len(x), 1), key[:, None]

        def __init__(self):
            super().__init__()
            del self.gate

    return runs(place, Hashed)


@same_bits("every second expert is frozen, and the gate is")
def experts_frozen_in_part(place):
    model = Net(Listed)
    for block in model.blocks:
        block.gate.requires_grad_(False)
        for expert in block.experts[::2]:
            expert.requires_grad_(False)
    return trained(place, model, data=rows)


@same_bits("experts are frozen and thawed in turn, a part in each step")
def experts_thawed_in_turn(place):
    def turn(model, step):
        for block in model.blocks:
            for index, expert in enumerate(block.experts):
                expert.requires_grad_(index % 3 == step % 3)

    return trained(place, Net(Listed), data=rows, after=turn, steps=5)


@same_bits("one bank of experts is used by all layers, each with a gate of its own (MoEUT)")
def experts_one_bank(place):
    class Bank(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.gates = nn.ModuleList(nn.Linear(WIDTH, EXPERTS, bias=False) for _ in range(3))
            self.experts = nn.ModuleList(Block() for _ in range(EXPERTS))

        def forward(self, x):
            for gate in self.gates:
                weights, chosen = gate(x).softmax(-1).max(-1)
                out = torch.zeros_like(x)
                for index in chosen.unique().tolist():
                    where = (chosen == index).nonzero()[:, 0]
                    out[where] = self.experts[index](x[where]) * weights[where, None]
                x = x + out
            return x

    return trained(place, Bank(), data=rows)


@same_bits("an expert is called several times, in a loop of thinking steps that depends on its rows")
def experts_in_a_loop(place):
    class Looping(Listed):
        def forward(self, x):
            _, chosen = self.route(x)
            for index in chosen[:, 0].tolist()[:7]:
                x = x + 0.1 * self.experts[index](x)
            return x

    return runs(place, Looping)


@same_bits("noise on the gate in training (noisy top-k), none in evaluation")
def experts_noisy(place):
    class Noisy(Listed):
        def route(self, x):
            logits = self.gate(x)
            if self.training:
                logits = logits + torch.randn_like(logits) * F.softplus(logits)
            return logits.softmax(-1).topk(2, -1)

    def evaluated(model, step):
        model.eval()
        with torch.no_grad():
            found = model(rows(9))
        model.train()
        return found

    return runs(place, Noisy, after=evaluated)


@same_bits("a bias on the gate balances the load and moves without a gradient (DeepSeek-V3)")
def experts_biased(place):
    class Biased(Listed):
        def __init__(self):
            super().__init__()
            self.register_buffer("bias", torch.zeros(EXPERTS))
            self.register_buffer("load", torch.zeros(EXPERTS))

        def route(self, x):
            scores = self.gate(x).sigmoid()
            chosen = (scores + self.bias).topk(2, -1).indices
            self.load += chosen.flatten().bincount(minlength=EXPERTS)
            weights = scores.gather(1, chosen)
            return weights / weights.sum(-1, keepdim=True), chosen

    def balance(model, step):
        for block in model.blocks:
            block.bias += 0.01 * (block.load.mean() - block.load).sign()
            block.load.zero_()

    return runs(place, Biased, after=balance)


@same_bits("auxiliary losses are kept in attributes and summed up in the loop (Switch, z-loss)")
def experts_losses(place):
    class Told(Listed):
        def route(self, x):
            logits = self.gate(x)
            share = logits.softmax(-1)
            used = F.one_hot(share.argmax(-1), EXPERTS).float().mean(0)
            self.loss = EXPERTS * (share.mean(0) * used).sum() + 0.1 * logits.logsumexp(-1).square().mean()
            return share.topk(1, -1)

    return runs(place, Told, penalty=lambda model: 0.01 * sum(block.loss for block in model.blocks))


@same_bits("soft mixtures: slots are mixtures of rows (SoftMoE)")
def experts_soft(place):
    class Soft(Stacked):
        def __init__(self):
            super().__init__()
            self.slots = nn.Parameter(torch.randn(EXPERTS, 2, WIDTH) / 6)

        def forward(self, x):
            logits = torch.einsum("bi,esi->bes", x, self.slots)
            given = torch.einsum("bes,bi->esi", logits.softmax(0), x)
            out = torch.bmm(torch.tanh(torch.bmm(given, self.up)), self.down)
            combine = logits.flatten(1).softmax(-1).view_as(logits)
            return x + torch.einsum("bes,esk->bk", combine, out) + 0 * self.gate(x).sum()

    return runs(place, Soft)


@same_bits("a tree of experts: a gate chooses a group, another one a leaf")
def experts_tree(place):
    class Tree(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.groups = nn.Linear(WIDTH, 2), nn.ModuleList(Listed(1, 3) for _ in range(2))

        def forward(self, x):
            share = self.gate(x).softmax(-1)
            chosen = share.argmax(-1)
            out = torch.zeros_like(x)
            for index, group in enumerate(self.groups):
                where = (chosen == index).nonzero()[:, 0]
                if len(where):
                    out = out.index_put((where,), group(x[where]) * share[where, index, None])
            return x + out

    return runs(place, Tree)


@same_bits("product keys: millions of tiny experts in two embedding tables (PEER)")
def experts_peer(place):
    class Peer(nn.Module):
        def __init__(self):
            super().__init__()
            self.query = nn.Linear(WIDTH, 16)
            self.keys = nn.Parameter(torch.randn(2, 8, 8) / 3)
            self.down, self.up = nn.Embedding(64, WIDTH), nn.Embedding(64, WIDTH)

        def forward(self, x):
            one, two = self.query(x).chunk(2, -1)
            a, i = (one @ self.keys[0].t()).topk(3, -1)
            b, j = (two @ self.keys[1].t()).topk(3, -1)
            score, which = (a[:, :, None] + b[:, None]).flatten(1).topk(4, -1)
            ids = i.gather(1, which // 3) * 8 + j.gather(1, which % 3)
            h = F.gelu(torch.einsum("bi,bki->bk", x, self.down(ids))) * score.softmax(-1)
            return x + torch.einsum("bk,bki->bi", h, self.up(ids))

    return runs(place, Peer, lr=1e-4)


@same_bits("experts are checkpointed one by one")
def experts_checkpointed(place):
    class Checked(Listed):
        def forward(self, x):
            weights, chosen = self.route(x)
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                where, slot = torch.where(chosen == index)
                if where.numel():
                    given = checkpoint(expert, x[where], use_reentrant=False)
                    out = out.index_add(0, where, given * weights[where, slot, None])
            return x + out

    return runs(place, Checked)


@same_bits("accumulation: each micro-batch goes to other experts, some get no gradient at all")
def experts_accumulated(place):
    from misuses.strangers import Exact

    engine = place.wrap(Net(Listed), optimizer=Exact, lr=0.05, optimizer_options={"momentum": 0.9, "weight_decay": 0.1})
    found = []
    for step in range(3):
        for part in range(3):
            loss = engine(batch(10 * step + part, 2)).square().mean() / 3
            loss.backward()
            found.append(loss.item())
        found.append([name for name, p in engine.module.named_parameters() if p.grad is None])
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


class Adapted(nn.Module):
    """A frozen expert with an adapter."""

    def __init__(self):
        super().__init__()
        self.base = Block().requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        return self.base(x) + self.b(self.a(x))


@same_bits("LoRA on each expert of a list, the gate is trained")
def experts_with_adapters(place):
    class WithAdapters(Listed):
        def __init__(self):
            super().__init__()
            self.experts = nn.ModuleList(Adapted() for _ in range(EXPERTS))

    return runs(place, WithAdapters)


@same_bits("LoRA of three dimensions over stacked experts that are frozen")
def experts_stacked_adapters(place):
    class StackedAdapters(Stacked):
        def __init__(self):
            super().__init__()
            self.up.requires_grad_(False)
            self.down.requires_grad_(False)
            self.a = nn.Parameter(torch.randn(EXPERTS, WIDTH, 4) / 6)
            self.b = nn.Parameter(torch.zeros(EXPERTS, 4, WIDTH))

        def forward(self, x):
            weights, chosen = self.gate(x).softmax(-1).max(-1)
            out = torch.zeros_like(x)
            for index in range(EXPERTS):
                where = (chosen == index).nonzero()[:, 0]
                h = torch.tanh(x[where] @ (self.up[index] + self.a[index] @ self.b[index])) @ self.down[index]
                out = out.index_add(0, where, h * weights[where, None])
            return x + out

    return runs(place, StackedAdapters)


@same_bits("the adapters are the experts: a frozen layer, a gate over LoRAs (MoLoRA)")
def experts_of_adapters(place):
    class OfAdapters(nn.Module):
        def __init__(self):
            super().__init__()
            self.base, self.gate = Block().requires_grad_(False), nn.Linear(WIDTH, EXPERTS)
            self.a = nn.ParameterList(torch.randn(WIDTH, 4) / 6 for _ in range(EXPERTS))
            self.b = nn.ParameterList(torch.randn(4, WIDTH) / 6 for _ in range(EXPERTS))

        def forward(self, x):
            share = self.gate(x).softmax(-1)
            change = [x @ a @ b for a, b in zip(self.a, self.b, strict=True)]
            return self.base(x) + torch.einsum("ebi,be->bi", torch.stack(change), share)

    return runs(place, OfAdapters)


@same_bits("upcycling: experts begin as copies of a trained dense layer, a new engine goes on")
def experts_upcycled(place):
    import copy

    from misuses.strangers import Exact

    found = []
    engine = place.wrap(Net(), optimizer=Exact, lr=0.05)
    for step in range(2):
        engine.optimizer.zero_grad()
        loss = engine(rows(step)).square().mean()
        loss.backward()
        engine.optimizer.step()
        found.append(loss.item())
    dense = engine.unwrap()
    if place.has_engine:
        place.left.remove(engine)
    model = Net(Listed)
    for block, old in zip(model.blocks, dense.blocks, strict=True):
        block.experts = nn.ModuleList(copy.deepcopy(old) for _ in range(EXPERTS))
    model.first, model.last = dense.first, dense.last
    return found, trained(place, model, data=rows)


@same_bits("the least used expert is drawn anew between steps, its momentum set to zero")
def experts_drawn_anew(place):
    from misuses.strangers import Exact

    engine = place.wrap(Net(Listed), optimizer=Exact, lr=0.05, optimizer_options={"momentum": 0.9})
    found = []
    for step in range(3):
        engine.optimizer.zero_grad()
        loss = engine(rows(step)).square().mean()
        loss.backward()
        engine.optimizer.step()
        found.append(loss.item())
        with torch.no_grad():
            for block in engine.module.blocks:
                for parameter in block.experts[step].parameters():
                    draw = torch.Generator().manual_seed(step)
                    parameter.copy_(torch.randn(parameter.shape, generator=draw) / 6)
                    state = engine.optimizer.state[parameter]
                    if state.get("momentum_buffer") is not None:
                        state["momentum_buffer"].zero_()
    return found, values(engine.module)


@same_bits("experts are pruned for an evaluation by `-inf` logits, and the gate's rows are exchanged after it")
def experts_pruned(place):
    class Prunable(Listed):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.zeros(EXPERTS))

        def route(self, x):
            return (self.gate(x) + self.mask).softmax(-1).topk(2, -1)

    def pruned(model, step):
        for block in model.blocks:
            block.mask[step] = float("-inf")
            block.gate.weight.data[[0, 1]] = block.gate.weight.data[[1, 0]]
        with torch.no_grad():
            return model(rows(8))

    return runs(place, Prunable, after=pruned)


@same_bits("experts go over the tiers with their activations recomputed")
def experts_recomputed(place):
    return runs(place, Listed, **({"activations": "recompute"} if place.has_engine else {}))


@same_bits("stacked experts, in one `vmap` over them")
def experts_mapped(place):
    from torch.func import vmap

    class Mapped(Stacked):
        def forward(self, x):
            out = vmap(lambda up, down: torch.tanh(x @ up) @ down)(self.up, self.down)
            return x + torch.einsum("ebi,be->bi", out, self.gate(x).softmax(-1))

    return runs(place, Mapped)


@same_bits("experts of other shapes and kinds in one list: an identity, zeros, a constant, a wide one")
def experts_of_kinds(place):
    class Zero(nn.Module):
        def forward(self, x):
            return torch.zeros_like(x)

    class Constant(nn.Module):
        def __init__(self):
            super().__init__()
            self.value = nn.Parameter(torch.randn(WIDTH))

        def forward(self, x):
            return self.value.expand_as(x)

    class Kinds(Listed):
        def __init__(self):
            super().__init__(count=5)
            wide = nn.Sequential(nn.Linear(WIDTH, 3 * WIDTH), nn.GELU(), nn.Linear(3 * WIDTH, WIDTH))
            self.experts = nn.ModuleList([Block(), nn.Identity(), Zero(), Constant(), wide])

    return runs(place, Kinds)
