"""Kinds of blocks of which programs are put together: each takes rows and gives rows, in a way of its own."""

from __future__ import annotations

import functools

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune
from torch.utils.checkpoint import checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from misuses.strangers import WIDTH, Block

KINDS: dict[str, type[nn.Module]] = {}
"""By what a title says of them."""
NOT_SAVED = {
    "a memory of the last call, detached",
    "a nested autograd.backward of a critic of its own",
    "a trace of gradients that its backward hook keeps",
}
"""What these remember is in attributes that are no buffers: no checkpoint has it."""


def kind(told):
    def add(made):
        KINDS[told] = made
        return made

    return add


@kind("a checkpoint with dropout")
class Checkpointed(Block):
    def forward(self, x):
        return x + checkpoint(lambda x: self.down(F.dropout(torch.tanh(self.up(x)), 0.2)), x, use_reentrant=False)


@kind("a checkpoint with reentrance")
class Reentrant(Block):
    def forward(self, x):
        return x + checkpoint(lambda x: self.down(torch.tanh(self.up(x))), x, use_reentrant=True)


@kind("a selective checkpoint")
class Selective(Block):
    def forward(self, x):
        saves = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
        inner = lambda x: self.down(torch.tanh(self.up(x)))  # noqa: E731
        return x + checkpoint(inner, x, use_reentrant=False, context_fn=saves)


@kind("a checkpointed sequence")
class Sequence(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))

    def forward(self, x):
        return x + checkpoint_sequential(self.layers, 2, x, use_reentrant=False)


@kind("a weight norm")
class Normed(Block):
    def __init__(self):
        super().__init__()
        parametrizations.weight_norm(self.up)


@kind("a spectral norm")
class Spectral(Block):
    def __init__(self):
        super().__init__()
        parametrizations.spectral_norm(self.down)


class Masked(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("mask", (torch.arange(WIDTH * WIDTH) % 3 > 0).float().view(WIDTH, WIDTH))

    def forward(self, weight):
        return weight * self.mask


@kind("a mask by a parametrization, cached")
class Cached(Block):
    def __init__(self):
        super().__init__()
        parametrize.register_parametrization(self.up, "weight", Masked())

    def forward(self, x):
        with parametrize.cached():
            return x + self.down(torch.tanh(self.up(torch.tanh(self.up(x)))))


@kind("pruned weights")
class Pruned(Block):
    def __init__(self):
        super().__init__()
        prune.l1_unstructured(self.up, "weight", 0.4)
        prune.random_unstructured(self.down, "bias", 0.2)


@kind("a low rank over a frozen base")
class LowRank(Block):
    def __init__(self):
        super().__init__()
        self.up.requires_grad_(False)
        self.a, self.b = nn.Parameter(torch.randn(4, WIDTH) * 0.1), nn.Parameter(torch.randn(WIDTH, 4) * 0.1)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x) + F.dropout(x, 0.1) @ self.a.t() @ self.b.t()))


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ weight, gradient.t() @ x


@kind("a Function that saves its weight")
class Saves(Block):
    def forward(self, x):
        return x + self.down(torch.tanh(Product.apply(x, self.up.weight)))


class Again(torch.autograd.Function):
    """Computes anew in its backward, and goes backward there."""

    @staticmethod
    def forward(ctx, run, x, *weights):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.run(x), gradient)
        return None, x.grad, None, None


@kind("a Function that goes backward in its backward")
class Reversed(Block):
    def forward(self, x):
        return x + Again.apply(
            lambda x: self.down(torch.tanh(self.up(x))), x, self.up.weight[:0].sum(), self.down.weight[:0].sum()
        )


@kind("a fixed point with a hook")
class Equilibrium(Block):
    def forward(self, x):
        f = lambda z: 0.5 * torch.tanh(self.down(torch.tanh(self.up(z))) + x)  # noqa: E731
        with torch.no_grad():
            z = torch.zeros_like(x)
            for _ in range(4):
                z = f(z)
        z = f(z)
        if not torch.is_grad_enabled() or not z.requires_grad:
            return z
        start = z.detach().requires_grad_()
        again = f(start)

        def solve(gradient):
            found = gradient
            for _ in range(3):
                found = gradient + torch.autograd.grad(again, start, found, retain_graph=True)[0]
            return found

        z.register_hook(solve)
        return z


@kind("the gradient of an energy")
class Energy(Block):
    def forward(self, x):
        with torch.enable_grad():
            x = x * 1.0 if x.requires_grad else x.detach().requires_grad_()
            energy = torch.tanh(self.down(torch.tanh(self.up(x)))).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - 0.1 * force


@kind("routed rows of fused experts")
class Routed(nn.Module):
    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 4)
        self.experts = nn.Parameter(torch.randn(4, WIDTH, WIDTH) * 0.1)

    def forward(self, x):
        weights, chosen = self.router(x).softmax(1).topk(2, 1)
        out = torch.zeros_like(x)
        for expert in range(4):
            rows, slot = (chosen == expert).nonzero(as_tuple=True)
            inner = torch.tanh(x[rows] @ self.experts[expert]) * weights[rows, slot, None]
            out = out.index_add(0, rows, inner)
        return x + out


@kind("a GRU over rows")
class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x):
        out, _ = self.cell(x.view(-1, 8, WIDTH))
        return x + out.reshape(-1, WIDTH)


@kind("attention")
class Attends(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)

    def forward(self, x):
        y = self.norm(x).view(-1, 8, WIDTH)
        return x + self.attention(y, y, y, need_weights=False)[0].reshape(-1, WIDTH)


@kind("autocast")
class Sixteen(Block):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = self.down(torch.tanh(self.up(x)))
        return x + y.float()


@kind("writes in place")
class InPlace(Block):
    def forward(self, x):
        y = self.up(x).mul_(1.1).tanh_()
        y = torch.cat([y, y[:, :4]], 1)
        y[:, :4] = y[:, 4:8] * 0.5
        y = y[:, :WIDTH].add_(0.1)
        y = self.down(y)
        y += x
        return y


@kind("a batch norm")
class Batched(Block):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.norm(self.up(x))))


@kind("a buffer that the forward moves")
class Moves(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        y = torch.tanh(self.up(x))
        if self.training:
            self.mean.lerp_(y.detach().mean(0), 0.1)
        return x + self.down(y - self.mean.clone())


@kind("a buffer that the forward replaces")
class Replaces(Block):
    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x):
        y = torch.tanh(self.up(x))
        if self.training:
            self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return x + self.down(y - self.mean)


@kind("weights used by name beside the layer")
class Beside(Block):
    def forward(self, x):
        y = torch.tanh(self.up(x)) + torch.sigmoid(F.linear(x, self.up.weight[: WIDTH // 2].repeat(2, 1)))
        return x + F.linear(y, self.down.weight.t(), self.down.bias)


@kind("a product in double")
class Double(Block):
    def forward(self, x):
        y = F.linear(x.double(), self.up.weight.double(), self.up.bias.double())
        return x + self.down(torch.tanh(y).float())


@kind("`functional_call` of its layers with moved weights")
class Called(Block):
    def forward(self, x):
        moved = {name: p * 1.01 + 0.001 for name, p in self.up.named_parameters()}
        return x + self.down(torch.tanh(torch.func.functional_call(self.up, moved, (x,))))


@kind("`vmap` over stacked weights")
class Stacked(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.Parameter(torch.randn(3, WIDTH, WIDTH) * 0.1)
        self.biases = nn.Parameter(torch.zeros(3, WIDTH))

    def forward(self, x):
        many = torch.vmap(lambda w, b: torch.tanh(F.linear(x, w, b)))(self.weights, self.biases)
        return x + many.mean(0)


@kind("complex arithmetic")
class Complex(Block):
    def __init__(self):
        super().__init__()
        self.turn = nn.Parameter(torch.randn(WIDTH // 2, 2) * 0.3)

    def forward(self, x):
        y = torch.view_as_complex(self.up(x).view(-1, WIDTH // 2, 2).contiguous())
        y = torch.view_as_real(y * torch.view_as_complex(self.turn)).flatten(1)
        return x + self.down(torch.tanh(y))


@kind("a depth that is drawn")
class Drawn(Block):
    def forward(self, x):
        y = self.down(torch.tanh(self.up(x)))
        keep = (torch.rand(len(x), 1) > 0.3).to(x.dtype) if self.training else torch.ones(1)
        return x + y * keep


@kind("a memory of the last call, detached")
class Remembers(Block):
    last = None

    def forward(self, x):
        y = torch.tanh(self.up(x))
        y = y if self.last is None else y + 0.1 * self.last
        self.last = y.detach().mean(0)
        return x + self.down(y)


@kind("a hook on its output")
class Hooked(Block):
    def forward(self, x):
        y = torch.tanh(self.up(x))
        if y.requires_grad:
            y.register_hook(lambda gradient: gradient * 0.7 + 1e-4)
        return x + self.down(y)


@kind("hooks of saved tensors that round to bf16")
class Packs(Block):
    def forward(self, x):
        pack = lambda t: (t.dtype, t.bfloat16() if t.dtype == torch.float32 else t)  # noqa: E731
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda kept: kept[1].to(kept[0])):
            return x + self.down(torch.tanh(self.up(x)))


@kind("`save_on_cpu`")
class OnCpu(Block):
    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            return x + self.down(torch.tanh(self.up(x)))


@kind("an early return by the data")
class Leaves(Block):
    def forward(self, x):
        y = self.up(x)
        if y.mean() > 0:
            return x + torch.tanh(y)
        return x + self.down(torch.tanh(y))


@kind("blocks within")
class Nested(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleDict({"a": Block(), "b": Dropping()})

    def forward(self, x):
        return self.inner["b"](x=self.inner["a"](x))["x"]


class Dropping(Block):
    def forward(self, *, x):
        return {"x": x + F.dropout(self.down(torch.relu(self.up(x))), 0.1, self.training)}


@kind("forward-mode derivatives")
class Tangent(Block):
    def forward(self, x):
        y, slope = torch.func.jvp(lambda z: torch.tanh(self.up(z)), (x,), (torch.ones_like(x),))
        return x + self.down(y + 0.1 * slope)


@kind("straight-through rounding of weights")
class Straight(Block):
    def forward(self, x):
        weight = self.up.weight
        scale = weight.abs().mean()
        weight = weight + ((weight / scale).round().clamp(-1, 1) * scale - weight).detach()
        return x + self.down(torch.tanh(F.linear(x, weight, self.up.bias)))


@kind("numbers read from weights")
class Reads(Block):
    def forward(self, x):
        factor = 1 / (1 + self.up.weight.abs().max().item())
        return x + factor * self.down(torch.tanh(self.up(x))) + float(self.down.bias[0])


@kind("convolutions")
class Convolves(nn.Module):
    def __init__(self):
        super().__init__()
        self.wide = nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4)
        self.back = nn.ConvTranspose1d(WIDTH, WIDTH, 1)

    def forward(self, x):
        y = x.view(-1, 8, WIDTH).transpose(1, 2)
        return x + self.back(torch.tanh(self.wide(y))).transpose(1, 2).reshape(-1, WIDTH)


@kind("a table asked by the data")
class Table(Block):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(WIDTH, WIDTH)

    def forward(self, x):
        y = self.up(x)
        return x + self.down(torch.tanh(y)) + self.table(y.argmax(1))


@kind("a trace of gradients that its backward hook keeps")
class Traces(Block):
    trace = None

    def __init__(self):
        super().__init__()
        self.up.register_full_backward_hook(type(self).keep)

    @staticmethod
    def keep(layer, inputs, outputs):
        layer.trace = outputs[0].abs().mean(0)

    def forward(self, x):
        scale = 1.0 if getattr(self.up, "trace", None) is None else 1 / (1 + 100 * self.up.trace)
        return x + self.down(torch.tanh(self.up(x)) * scale)


@kind("the same layers thrice, as many as the norm says")
class Thrice(Block):
    def forward(self, x):
        for _ in range(1 + int(x.detach().abs().mean() * 3) % 3):
            x = x + 0.3 * self.down(torch.tanh(self.up(x)))
        return x


@kind("a target without gradients from its own weights")
class Targets(Block):
    def forward(self, x):
        with torch.no_grad():
            target = torch.tanh(self.up(x))
        y = torch.tanh(self.up(x) * 0.9)
        return x + self.down(y - target) + target


@kind("grad turned off and on")
class Switches(Block):
    def forward(self, x):
        was = torch.is_grad_enabled()
        torch.set_grad_enabled(False)
        scale = 1 + 0.1 * self.up(x).mean()
        torch.set_grad_enabled(was)
        return x + scale * self.down(torch.tanh(self.up(x)))


@kind("a loss of its own in an attribute")
class Owes(Block):
    def forward(self, x):
        y = torch.tanh(self.up(x))
        self.owed = y.square().mean()
        return x + self.down(y)


@kind("a nested autograd.backward of a critic of its own")
class Learns(Block):
    """An attribute that is no parameter learns in the forward."""

    def __init__(self):
        super().__init__()
        self.fast = torch.zeros(WIDTH)

    def forward(self, x):
        with torch.enable_grad():
            fast = self.fast.clone().requires_grad_()
            error = (x.detach() * (1 + fast) - self.up.weight.detach().mean(0)).square().mean()
            (gradient,) = torch.autograd.grad(error, fast)
        self.fast = self.fast - 0.1 * gradient
        return x + self.down(torch.tanh(self.up(x) * (1 + self.fast)))
