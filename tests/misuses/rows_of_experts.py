"""Experts in weights of three dimensions that are named so, which the engine cuts by rows: what programs do with a row,
with several and with the whole. AdamW by a kernel, so that rounding alone may differ; RAM and NVMe have the same
bits."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from misuses.case import Family
from misuses.joints import PAIRS, Run, batch, stepped
from misuses.place import ADAMW, gradients, values
from misuses.strangers import WIDTH

family = Family("rows of experts")

COUNT, INNER = 4, 64
"""2,048 elements of an expert: fewer are not cut."""

ALL = ("plain", "recomputed", "over the tiers", "together", "resumed", *PAIRS[:2])


class Experts(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Parameter(torch.randn(COUNT, WIDTH, INNER) / 6)
        self.down = nn.Parameter(torch.randn(COUNT, INNER, WIDTH) / 8)
        self.bias = nn.Parameter(torch.zeros(COUNT, INNER))

    def forward(self, x, weights, chosen):
        out = torch.zeros_like(x)
        for index in chosen.unique().tolist():
            where, slot = torch.where(chosen == index)
            out = out.index_add(0, where, self.one(index, x[where]) * weights[where, slot, None])
        return out

    def one(self, index, x):
        return torch.tanh(x @ self.up[index] + self.bias[index]) @ self.down[index]


class Layer(nn.Module):
    def __init__(self, make=Experts, top=2):
        super().__init__()
        self.top = top
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)
        self.experts = make()

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).topk(self.top, -1)
        return x + self.experts(x, weights, chosen)


class Model(nn.Module):
    def __init__(self, make=Experts, layers=3):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer(make) for _ in range(layers))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


OPTIONS = {**ADAMW, "optimizer": "adamw", "optimizer_options": {}}


def trained(run, build, *, steps=3, loss_of=None, before=None, after=None, forward=None, **options):
    options = {**OPTIONS, **options}
    engine = run.engine(build(), **options)
    found = []
    for step in range(steps):

        def body(index, engine=engine):
            x = batch(index, 48)
            out = engine(x) if forward is None else forward(engine, x)
            loss = out.square().mean() if loss_of is None else loss_of(engine.module, out)
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        if before is not None:
            found.append(before(engine, step))
        found.append(stepped(engine))
        if after is not None:
            found.append(after(engine, step))
        if step == 1:
            engine = run.resume(engine, build, **options)
    return found, values(engine.module)


def program(title, joints=ALL, **options):
    def add(body):
        for joint in joints:

            def case(place, joint=joint):
                return body(Run(place, joint))

            case.__name__ = body.__name__ + ("" if joint == "plain" else "_" + joint.replace(",", "").replace(" ", "_"))
            family.works(title if joint == "plain" else f"{title} ({joint})", **options)(case)
        return body

    return add


def experts(title, joints=("plain", "recomputed", "over the tiers", "together"), **options):
    """A class of experts, trained."""

    def add(make):
        def body(run):
            return trained(run, lambda: Model(make))

        body.__name__ = "rows_" + "".join("_" + c.lower() if c.isupper() else c for c in make.__name__).strip("_")
        program(title, joints, **options)(body)
        return make

    return add


# One row.


@experts("a row by a number, products by `@`, a bias of two dimensions", ALL)
class ByNumber(Experts):
    pass


@experts("a row is transposed and given to `F.linear`: `self.up[e].t()`, `.T`, `.mT`")
class Transposed(Experts):
    def one(self, index, x):
        return F.linear(torch.tanh(F.linear(x, self.up[index].t(), self.bias[index])), self.down[index].mT)


@experts("a row by `select`, `narrow`, `[e:e + 1]` and `index_select`")
class Selected(Experts):
    def one(self, index, x):
        up = self.up.select(0, index)
        down = self.down.narrow(0, index, 1)[0]
        bias = self.bias[index : index + 1].index_select(0, torch.tensor([0]))
        return torch.tanh(torch.addmm(bias[0], x, up)) @ down


@experts("a row counted from the end: `self.up[e - 4]`, `self.up[-1]` for a shared one")
class FromTheEnd(Experts):
    def one(self, index, x):
        return torch.tanh(x @ self.up[index - COUNT]) @ self.down[index] + x @ self.up[-1] @ self.down[-1]


@experts("an index with an ellipsis, with None and with a tuple: `self.up[e, ...]`, `[e, :, :32]`, `[None, e]`")
class Indexed(Experts):
    def one(self, index, x):
        h = torch.tanh(x @ self.up[index, ...] + self.bias[(index,)])
        return h[:, :32] @ self.down[index, :32] + h[:, 32:] @ self.down[index][32:, :]


@experts("two halves of a row by `chunk` and `split`: gate and up in one weight")
class Halves(Experts):
    def one(self, index, x):
        gate, up = self.up[index].chunk(2, -1)
        return F.silu(x @ gate) * (x @ up) @ self.down[index].split(32)[0]


@experts("a row is normalised in the forward: `F.normalize(self.up[e], dim=0)`, with a norm of it in the loss")
class Normalised(Experts):
    def one(self, index, x):
        return torch.tanh(x @ F.normalize(self.up[index], dim=0)) @ (self.down[index] / self.down[index].norm())


@experts("a row goes through a mask, a dropout of weights and a fake quantisation with a straight-through gradient")
class Quantised(Experts):
    def one(self, index, x):
        row = self.up[index]
        scale = row.detach().abs().amax(0) / 7
        row = row + ((row / scale).round() * scale - row).detach()
        return torch.tanh(x @ (row * (row.abs() > 0.05))) @ self.down[index]


@experts("a row is detached in one of two uses")
class DetachedOnce(Experts):
    def one(self, index, x):
        return torch.tanh(x @ self.up[index]) @ self.down[index] + 0.1 * (x @ self.up[index].detach())[:, :WIDTH]


@experts("rows are kept in a list of the forward, and used after all of them were taken")
class TakenFirst(Experts):
    def forward(self, x, weights, chosen):
        rows = [(self.up[e], self.down[e], self.bias[e]) for e in range(COUNT)]
        out = x * 0
        for index, (up, down, bias) in enumerate(rows):
            weight = (weights * (chosen == index)).sum(-1, keepdim=True)
            out = out + torch.tanh(x @ up + bias) @ down * weight
        return out


@experts("`zip(self.up, self.down, self.bias)` and `enumerate(self.up.unbind())`")
class Zipped(Experts):
    def forward(self, x, weights, chosen):
        out = x * 0
        for index, (up, down, bias) in enumerate(zip(self.up, self.down, self.bias, strict=True)):
            weight = (weights * (chosen == index)).sum(-1, keepdim=True)
            out = out + torch.tanh(x @ up + bias) @ down * weight
        for index, up in enumerate(self.up.unbind()):
            out = out + 0.01 * (x @ up)[:, index : index + WIDTH]
        return out


@experts("unbound over another dimension: `self.up.unbind(1)`, and `self.bias.unbind(-1)`")
class UnboundOtherwise(Experts):
    def forward(self, x, weights, chosen):
        rows = torch.stack([part.sum(0) for part in self.up.unbind(1)])
        return super().forward(x, weights, chosen) + 0.01 * x @ rows[:, :WIDTH] + self.bias.unbind(-1)[3].sum()


# Several rows, and the whole.


@experts("rows of a list, of a mask and of a tensor: `self.up[[0, 2]]`, `self.up[used]`, `self.up[chosen]`")
class Several(Experts):
    def forward(self, x, weights, chosen):
        out = super().forward(x, weights, chosen)
        used = torch.zeros(COUNT, dtype=torch.bool)
        used[chosen.flatten()] = True
        mean = self.up[used].mean(0)[:, :WIDTH] + self.up[[0, 2]].sum(0)[:, :WIDTH]
        own = torch.einsum("bi,bij->bj", x, self.up[chosen[:, 0]])
        return out + 0.01 * x @ mean + 0.01 * own[:, :WIDTH]


@experts("`bmm` with padded capacity, `baddbmm` with biases")
class Padded(Experts):
    def forward(self, x, weights, chosen):
        hot = F.one_hot(chosen, COUNT).sum(1).to(x.dtype)
        given = torch.einsum("bi,be->ebi", x, hot)
        h = torch.tanh(torch.baddbmm(self.bias[:, None], given, self.up))
        out = torch.bmm(h, self.down)
        share = torch.zeros(len(x), COUNT).scatter(1, chosen, weights)
        return torch.einsum("ebi,be->bi", out, share)


@experts("`bmm` whose first factor is the weight: `torch.bmm(self.up.transpose(1, 2), x.t())`, `self.up.bmm(...)`")
class WeightFirst(Experts):
    def forward(self, x, weights, chosen):
        given = x.t().expand(COUNT, WIDTH, len(x))
        h = torch.tanh(torch.bmm(self.up.transpose(1, 2), given))
        out = self.down.transpose(1, 2).bmm(h)
        share = torch.zeros(len(x), COUNT).scatter(1, chosen, weights)
        return torch.einsum("eib,be->bi", out, share)


@experts("`matmul` with broadcasting, and `einsum` over all experts")
class Broadcast(Experts):
    def forward(self, x, weights, chosen):
        h = torch.tanh(x @ self.up + self.bias[:, None])
        share = torch.zeros(len(x), COUNT).scatter(1, chosen, weights)
        return torch.einsum("ebh,ehi,be->bi", h, self.down, share)


@experts("`bmm` with a vector of no rows: an expert list of zero tokens")
class NoRows(Experts):
    def forward(self, x, weights, chosen):
        none = torch.bmm(x.new_zeros(COUNT, 0, WIDTH), self.up)
        return super().forward(x, weights, chosen) + none.sum()


@experts("`F.grouped_mm` in bfloat16 over tokens that are sorted by their expert", rtol=1e-3, atol=1e-4)
class Grouped(Experts):
    def forward(self, x, weights, chosen):
        order = chosen.flatten().argsort(stable=True)
        given = x.repeat_interleave(chosen.shape[1], 0)[order]
        offsets = chosen.flatten().bincount(minlength=COUNT).cumsum(0).to(torch.int32)
        h = F.grouped_mm(given.bfloat16(), self.up.bfloat16(), offs=offsets)
        out = F.grouped_mm(torch.tanh(h), self.down.bfloat16(), offs=offsets).to(x.dtype)
        return (out[order.argsort()].view(len(x), -1, WIDTH) * weights[..., None]).sum(1)


@experts("`torch.vmap` over the experts, by hand over `(up, down, bias)`")
class Mapped(Experts):
    def forward(self, x, weights, chosen):
        def one(up, down, bias):
            return torch.tanh(x @ up + bias) @ down

        out = torch.vmap(one)(self.up, self.down, self.bias)
        share = torch.zeros(len(x), COUNT).scatter(1, chosen, weights)
        return torch.einsum("ebi,be->bi", out, share)


@experts("the whole is reshaped: `self.up.view(-1, 64)`, `.flatten(1)`, `.permute(1, 0, 2).reshape(32, -1)`")
class Reshaped(Experts):
    def forward(self, x, weights, chosen):
        h = torch.tanh((x @ self.up.permute(1, 0, 2).reshape(WIDTH, -1)).view(len(x), COUNT, INNER) + self.bias)
        share = torch.zeros(len(x), COUNT).scatter(1, chosen, weights)
        out = (h * share[..., None]).flatten(1) @ self.down.view(-1, WIDTH)
        return out + 0 * self.up.flatten(1).sum()


@experts("all experts merged for each row (SMEAR): `torch.einsum('be,eio->bio', weights, self.up)`")
class Merged(Experts):
    def forward(self, x, weights, chosen):
        share = torch.zeros(len(x), COUNT).scatter(1, chosen, weights).mean(0)
        up, down = torch.einsum("e,eio->io", share, self.up), torch.tensordot(share, self.down, 1)
        return torch.tanh(x @ up + share @ self.bias) @ down


@experts("each expert is checkpointed by the program's own `checkpoint`, without and with reentrance")
class Checkpointed(Experts):
    def one(self, index, x):
        return checkpoint(super().one, index, x, use_reentrant=index % 2 == 0)


@experts("an expert's product in autocast, the router's weights in fp32", rtol=1e-2, atol=1e-4)
class InAutocast(Experts):
    def one(self, index, x):
        with torch.autocast("cpu", torch.bfloat16):
            return super().one(index, x).float()


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight.t(), x.t() @ gradient


@experts("a Function of the program's takes a row, and saves it")
class ByFunction(Experts):
    def one(self, index, x):
        return Product.apply(torch.tanh(Product.apply(x, self.up[index])), self.down[index])


@experts("a hook on a row that is in use scales its gradient: `row.register_hook`")
class HookOnRow(Experts):
    def one(self, index, x):
        up = self.up[index] * 1.0
        up.register_hook(lambda gradient: gradient * 0.5)
        return torch.tanh(x @ up) @ self.down[index]


@experts("experts are chained: each gives its output to the next one that a token chose")
class Chained(Experts):
    def forward(self, x, weights, chosen):
        for slot in range(chosen.shape[1]):
            out = torch.zeros_like(x)
            for index in chosen[:, slot].unique():
                where = chosen[:, slot] == index
                out[where] = self.one(index, x[where])
            x = x + out * weights[:, slot, None]
        return x


@experts("an expert is a `numpy` integer, a 0-dimensional int32 tensor and a bool")
class OddIndices(Experts):
    def one(self, index, x):
        import numpy

        up, down = self.up[numpy.int64(index)], self.down[torch.tensor(index, dtype=torch.int32)]
        return torch.tanh(x @ up + self.bias[True].sum(0)[index]) @ down


@experts("the router's own choice is by a weight of the experts: norms of activations (autonomy of experts)")
class Autonomous(Experts):
    def forward(self, x, weights, chosen):
        norms = torch.stack([(x @ self.up[e][:, :4]).norm(dim=-1) for e in range(COUNT)], -1)
        weights, chosen = norms.softmax(-1).topk(1, -1)
        return super().forward(x, weights, chosen)


# The loop.


@program("the number of experts for a token changes between steps, and is larger in evaluation")
def rows_top_changes(run):
    def after(engine, step):
        model = engine.module
        for layer in model.layers:
            layer.top = 4
        with torch.no_grad():
            found = engine(batch(90, 16))
        for layer in model.layers:
            layer.top = 1 + step % 3
        return found

    return trained(run, Model, after=after)


@program("gradients of single experts are read, scaled by their load and zeroed: `p.grad[e].mul_(s)`")
def rows_gradients_scaled(run):
    def before(engine, step):
        found = []
        for layer in engine.module.layers:
            for p in layer.experts.parameters():
                p.grad[step].mul_(0.5)
                p.grad[(step + 1) % COUNT].zero_()
                found.append(p.grad.flatten(1).norm(dim=1))
        return found

    return trained(run, Model, before=before)


@program("an expert is copied over another one, and the router's row with noise: `w[a].copy_(w[b])`")
def rows_copied(run):
    def after(engine, step):
        with torch.no_grad():
            for layer in engine.module.layers:
                for p in layer.experts.parameters():
                    p[step].copy_(p[step + 1])
                layer.gate.weight[step] = layer.gate.weight[step + 1] + 0.01
        return [values(layer) for layer in engine.module.layers]

    return trained(run, Model, after=after)


@program("two experts change places: `w[[0, 1]] = w[[1, 0]]`, with their states")
def rows_exchanged(run):
    def after(engine, step):
        with torch.no_grad():
            for layer in engine.module.layers:
                for p in layer.experts.parameters():
                    p[[0, 1]] = p[[1, 0]]
                    for name in ("exp_avg", "exp_avg_sq"):
                        state = engine.optimizer.state[p][name]
                        state[[0, 1]] = state[[1, 0]].clone()

    return trained(run, Model, after=after)


@program("states of an expert are set to zero, those of the others are read")
def rows_of_states(run):
    def after(engine, step):
        found = []
        for layer in engine.module.layers:
            for p in layer.experts.parameters():
                engine.optimizer.state[p]["exp_avg"][step].zero_()
                found.append(engine.optimizer.state[p]["exp_avg"].flatten(1).norm(dim=1))
        return found

    return trained(run, Model, after=after)


@program("experts of a layer are frozen in the second step: `requires_grad_(False)`, and thawed", ALL[:4])
def rows_frozen_in_turn(run):
    def after(engine, step):
        for number, layer in enumerate(engine.module.layers):
            layer.experts.requires_grad_(number != step)

    return trained(run, Model, after=after, steps=4)


@program("gradients are clipped for experts and for the rest apart")
def rows_clipped_apart(run):
    def before(engine, step):
        inside = [p for n, p in engine.module.named_parameters() if "experts" in n]
        outside = [p for n, p in engine.module.named_parameters() if "experts" not in n]
        return nn.utils.clip_grad_norm_(inside, 0.05), nn.utils.clip_grad_norm_(outside, 0.05)

    return trained(run, Model, before=before)


@program("experts are a group of their own, with another rate and no decay")
def rows_group(run):
    torch.manual_seed(0)
    model = Model()
    groups = [
        {"params": [p for n, p in model.named_parameters() if "experts" in n], "lr": 3e-3, "weight_decay": 0.0},
        {"params": [p for n, p in model.named_parameters() if "experts" not in n]},
    ]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    engine = run.place.wrap(model, optimizer=optimizer)
    found = []
    for step in range(3):

        def body(index):
            loss = engine(batch(index, 48)).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
    return found, values(model)


@program("a penalty on the experts' overlap: products of the flat rows of a weight with each other")
def rows_overlap(run):
    def loss_of(model, out):
        overlap = 0.0
        for layer in model.layers:
            flat = F.normalize(layer.experts.up.flatten(1), dim=1)
            overlap = overlap + (flat @ flat.t()).triu(1).square().sum()
        return out.square().mean() + 0.1 * overlap

    return trained(run, Model, loss_of=loss_of)


@program("an EMA of the experts by rows, in plain tensors, loaded into the model for an evaluation and back")
def rows_ema(run):
    averages = {}

    def after(engine, step):
        model = engine.module
        for name, p in model.named_parameters():
            if "experts" in name:
                for row in range(COUNT):
                    now = p[row].detach()
                    key = f"{name}.{row}"
                    averages[key] = averages[key].lerp(now, 0.1) if key in averages else now.clone()
        kept = {name: p.detach().clone() for name, p in model.named_parameters()}
        with torch.no_grad():
            for name, p in model.named_parameters():
                if "experts" in name:
                    for row in range(COUNT):
                        p[row] = averages[f"{name}.{row}"]
            found = engine(batch(91, 16))
            for name, p in model.named_parameters():
                p.copy_(kept[name])
        return found

    return trained(run, Model, after=after)


@program("an expert's rows are taken outside of the forward and go into a loss: `model.experts.up[0] @ x`")
def rows_outside(run):
    def loss_of(model, out):
        rows = model.layers[0].experts.up[0] @ model.layers[1].experts.down[1]
        return out.square().mean() + 0.01 * rows.square().mean() + model.layers[2].experts.up[2].norm()

    return trained(run, Model, loss_of=loss_of)


@family.refused("`torch.autograd.grad` by the fused weights: their gradients come in pieces", "Call backward")
def rows_by_grad(place):
    engine = place.wrap(Model(), **OPTIONS)
    found = []
    for step in range(3):
        loss = engine(batch(step, 48)).square().mean()
        parameters = list(engine.module.parameters())
        for p, gradient in zip(parameters, torch.autograd.grad(loss, parameters), strict=True):
            p.grad = gradient
        found += [loss.item(), stepped(engine)]
    return found, values(engine.module)


@program("an evaluation within `inference_mode` between micro-batches, to other experts")
def rows_evaluated_between(run):
    def forward(engine, x):
        with torch.inference_mode():
            engine(x.flip(0) + 1)
        return engine(x)

    return trained(run, Model, forward=forward)


@program("the experts are grown: a model of twice as many goes on in a new engine, with rows of the old one")
def rows_upcycled(run):
    class More(Experts):
        def __init__(self):
            super().__init__()
            for name, p in list(self.named_parameters()):
                setattr(self, name, nn.Parameter(torch.cat([p.detach(), p.detach()])))

        def one(self, index, x):
            return super().one(index, x) + super().one(index + COUNT, x)

    engine = run.engine(Model(), **OPTIONS)
    found = []
    for step in range(2):
        loss = engine(batch(step, 48)).square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
    state = engine.module.state_dict()
    engine.close()
    model = Model(More)
    model.load_state_dict(
        {name: torch.cat([value, value * 0.5]) if "experts" in name else value.clone() for name, value in state.items()}
    )
    engine = run.engine(model, **OPTIONS)
    for step in range(2):
        loss = engine(batch(step + 2, 48)).square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
    return found, values(engine.module)


@program("one bank of fused experts in two layers, each with its own router", ALL)
def rows_shared_bank(run):
    def build():
        model = Model()
        model.layers[2].experts = model.layers[0].experts
        return model

    return trained(run, build)


@program("gradients of the rows are looked at between micro-batches, and the experts that have none are counted")
def rows_looked_at(run):
    engine = run.engine(Model(), **OPTIONS)
    found = []
    for step in range(2):
        for index in range(3):
            loss = engine(batch(3 * step + index, 3)).square().mean()
            loss.backward()
            found.append([(layer.experts.up.grad.flatten(1).abs().sum(1) == 0) for layer in engine.module.layers])
        found.append(gradients(engine.module))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


@program("no token goes to a layer in one micro-batch: an early return, `p.grad` is None there")
def rows_layer_left_out(run):
    class Skips(Experts):
        num_calls = 0

        def forward(self, x, weights, chosen):
            if x[0, 0] > 0:
                return torch.zeros_like(x)
            return super().forward(x, weights, chosen)

    return trained(run, lambda: Model(Skips), steps=4)
