"""Forwards that save odd tensors, whose activations go over the tiers, are recomputed, or chosen: a layer that has the
parameters itself (all that it saves goes over the tiers), and a block around it (its inputs go). Each program trains in
all modes. The optimizer is torch's own arithmetic, so that bits are compared."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, jacfwd, jvp, vjp, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from misuses.case import Family
from misuses.place import gradients, values
from misuses.strangers import Exact

family = Family("saved tensors")

WIDTH = 64
ROWS = 80
"""An activation of 20 KiB: smaller ones than 16 KiB stay where they are."""


class Layer(nn.Module):
    """It has its parameters itself, and no modules: all that it saves goes over the tiers."""

    def __init__(self, *shapes):
        super().__init__()
        for index, shape in enumerate(shapes or [(WIDTH, WIDTH)]):
            self.register_parameter("wuvst"[index], nn.Parameter(torch.randn(shape) / math.sqrt(shape[-1])))


class Around(nn.Module):
    """A block of a layer and a norm: its inputs go over the tiers, and its forward runs again."""

    def __init__(self, layer):
        super().__init__()
        self.norm, self.layer = nn.LayerNorm(WIDTH), layer

    def forward(self, x):
        return x + self.layer(self.norm(x))


class Net(nn.Module):
    def __init__(self, make):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([make(), Around(make()), make(), Around(make())])
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def batch(index, rows=ROWS):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(index))


def modes(place):
    if place.name == "nvme":
        return [
            {"activations": "nvme", "activation_memory": "96KiB"},
            {"activations": "recompute"},
            {"activations": "auto", "activation_memory": "96KiB"},
        ]
    return [{"activations": "host", "activation_memory": "8MiB"}, {"activations": "recompute"}, {}]


def trained(place, make, *, steps=3, data=batch, lr=0.05):
    """Losses, last gradients and values of a model of these layers, in each mode."""
    found: list[Any] = []
    for mode in modes(place):
        model = Net(make)
        options = mode if place.has_engine else {}
        torch.manual_seed(5)
        engine = place.wrap(model, optimizer=Exact, lr=lr, optimizer_options={"momentum": 0.9}, **options)
        last: dict[str, Any] = {}
        for step in range(steps):
            x = data(step)
            loss = engine(x).square().mean()
            engine.optimizer.zero_grad()
            loss.backward()
            found.append(loss.item())
            last = gradients(model)
            engine.optimizer.step()
            del loss
        found += [last, values(model)]
        if place.has_engine:
            engine.close()
            place.left.remove(engine)
    return found


def saves(title, lr=0.05, **options):
    """A case of a class of layers."""

    def add(make):
        def case(place):
            return trained(place, make, lr=lr)

        case.__name__ = "saves_" + "".join("_" + c.lower() if c.isupper() else c for c in make.__name__).lstrip("_")
        options.setdefault("rtol", 0.0)
        options.setdefault("atol", 0.0)
        options.setdefault("seconds", 90.0)
        family.works(title, **options)(case)
        return make

    return add


def same_bits(title, **options):
    return family.works(title, rtol=0.0, atol=0.0, seconds=90.0, **options)


# Functions of the user's own.


def function(forward, backward):
    class Own(torch.autograd.Function):
        pass

    Own.forward, Own.backward = staticmethod(forward), staticmethod(backward)
    return Own.apply


def _saves_views(ctx, x, w):
    top, half = x[:, : WIDTH // 2], x[::2].t()
    ctx.save_for_backward(top, half, w)
    return x @ w


def _from_views(ctx, g):
    top, half, w = ctx.saved_tensors
    return g @ w.t() + F.pad(top, (0, WIDTH // 2)), half.sum() * 1e-3 * w


views = function(_saves_views, _from_views)


@saves("a Function that saves views of its input: a slice, and a transposed one with steps")
class Views(Layer):
    def forward(self, x):
        return views(x, self.w)


def _saves_expanded(ctx, x, w):
    ctx.save_for_backward(x.mean(0, keepdim=True).expand(ROWS, WIDTH), x[:1].expand_as(x), w)
    return x @ w


expanded = function(
    _saves_expanded, lambda ctx, g: (g @ ctx.saved_tensors[2] + ctx.saved_tensors[1], ctx.saved_tensors[0].t() @ g)
)


@saves("a Function that saves expanded tensors, whose storage is smaller than their elements")
class Expanded(Layer):
    def forward(self, x):
        return expanded(x, self.w)


def _saves_kinds(ctx, x, w):
    mask = x > 0
    ctx.save_for_backward(
        mask, x.argsort(-1), (x * 100).to(torch.int8), x.to(torch.complex64) * 1j, x.double(), w, None
    )
    return torch.where(mask, x, 0) @ w


def _from_kinds(ctx, g):
    mask, order, small, turned, double, w, nothing = ctx.saved_tensors
    assert nothing is None and order.dtype == torch.int64 and small.dtype == torch.int8
    into = (g @ w.t()) * mask + order.float() * 1e-5 + small.float() * 1e-5 + turned.imag * 1e-4
    return into, double.float().t() @ g


kinds = function(_saves_kinds, _from_kinds)


@saves("a Function that saves bool, int64, int8, complex64 and float64 tensors, and None")
class Kinds(Layer):
    def forward(self, x):
        return kinds(x, self.w)


def _saves_empty(ctx, x, w):
    ctx.save_for_backward(x[:0], x.new_empty(0, 3, WIDTH), x.new_zeros(()), x, w)
    return x @ w


def _from_empty(ctx, g):
    none, empty, scalar, x, w = ctx.saved_tensors
    assert none.shape == (0, WIDTH) and empty.shape == (0, 3, WIDTH)
    return g @ w.t() + scalar, x.t() @ g


empty = function(_saves_empty, _from_empty)


@saves("a Function that saves tensors without elements and without dimensions")
class Empty(Layer):
    def forward(self, x):
        return empty(x, self.w)


def _saves_output(ctx, x, w):
    out = (x @ w).tanh()
    ctx.save_for_backward(out, x, w)
    return out


def _from_output(ctx, g):
    out, x, w = ctx.saved_tensors
    g = g * (1 - out * out)
    return g @ w.t(), x.t() @ g


own_tanh = function(_saves_output, _from_output)


@saves("a Function that saves its own output and its input")
class OwnOutput(Layer):
    def forward(self, x):
        return own_tanh(x, self.w)


def _saves_two(ctx, x, w):
    low, high = (x @ w).chunk(2, -1)
    ctx.save_for_backward(low, high, x, w)
    ctx.mark_non_differentiable(high)
    ctx.set_materialize_grads(False)
    return low.exp(), high


def _from_two(ctx, g, unused):
    assert unused is None
    low, high, x, w = ctx.saved_tensors
    g = torch.cat([g * low.exp(), torch.zeros_like(high)], -1)
    return g @ w.t(), x.t() @ g


two_outputs = function(_saves_two, _from_two)


@saves("a Function of two outputs, one of which is not differentiable, without made-up gradients")
class TwoOutputs(Layer):
    def forward(self, x):
        low, high = two_outputs(0.1 * x, self.w)
        return torch.cat([low, high], -1)


def _saves_in_place(ctx, x, w):
    ctx.mark_dirty(x)
    x.mul_(0.5)
    ctx.save_for_backward(x, w)
    return x, x @ w


in_place = function(
    _saves_in_place, lambda ctx, g, h: ((g + h @ ctx.saved_tensors[1].t()) * 0.5, ctx.saved_tensors[0].t() @ h)
)


@saves("a Function that writes to its input, marks it dirty, and saves it")
class InPlace(Layer):
    def forward(self, x):
        x, out = in_place(x * 1.0, self.w)
        return x + out


def _saves_on_ctx(ctx, x, w):
    ctx.x, ctx.w, ctx.many = x, w, {"mask": x > 0, "list": [x.abs(), x.sign()]}
    return (x * ctx.many["mask"]) @ w


def _from_ctx(ctx, g):
    many = ctx.many
    return (g @ ctx.w.t()) * many["mask"] + 1e-3 * many["list"][1], (ctx.x * many["mask"]).t() @ g


on_ctx = function(_saves_on_ctx, _from_ctx)


@saves("a Function that keeps tensors as attributes of `ctx`, in a dict and in a list")
class OnCtx(Layer):
    def forward(self, x):
        return on_ctx(x, self.w)


def _saves_same(ctx, x, w):
    ctx.save_for_backward(x, x, x.view(-1), x.unsqueeze(0), w, w.t())
    return x @ w


def _from_same(ctx, g):
    a, b, flat, more, _, turned = ctx.saved_tensors
    return g @ turned + 1e-3 * (b + flat.view_as(a) + more[0]), a.t() @ g


same = function(_saves_same, _from_same)


@saves("a Function that saves one tensor six times: as it is, flat, with a dimension more")
class Same(Layer):
    def forward(self, x):
        return same(x, self.w)


class WithSetup(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x, w):
        return x @ w, x.abs()

    @staticmethod
    def setup_context(ctx, inputs, output):
        x, w = inputs
        ctx.save_for_backward(x, w, output[1])
        ctx.save_for_forward(x, w)

    @staticmethod
    def backward(ctx, g, h):
        x, w, size = ctx.saved_tensors
        return g @ w.t() + h * x.sign() + 0 * size, x.t() @ g

    @staticmethod
    def jvp(ctx, dx, dw):
        x, w = ctx.saved_tensors
        return dx @ w + x @ dw, dx * x.sign()


@saves("a Function with `setup_context`, `save_for_forward` and a rule for `vmap`")
class SetUp(Layer):
    def forward(self, x):
        out, size = WithSetup.apply(x, self.w)
        return out + 0.1 * size


def _saves_sparse(ctx, x, w):
    ctx.save_for_backward(F.relu(x).to_sparse(), w)
    return F.relu(x) @ w


sparse = function(
    _saves_sparse, lambda ctx, g: ((g @ ctx.saved_tensors[1].t()), ctx.saved_tensors[0].to_dense().t() @ g)
)


@saves("a Function that saves a sparse tensor")
class Sparse(Layer):
    def forward(self, x):
        return sparse(x, self.w)


def _saves_both(ctx, x, w):
    ctx.save_for_backward(x, w)
    return x @ w


once = torch.autograd.function.once_differentiable
own_linear = function(_saves_both, once(lambda ctx, g: (g @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ g)))


@saves("a Function that can be differentiated once, and asks for `saved_tensors` twice")
class Once(Layer):
    def forward(self, x):
        return own_linear(own_linear(x, self.w), self.w)


def _asks_often(ctx, g):
    for _ in range(3):
        x, w = ctx.saved_tensors
    return g @ ctx.saved_tensors[1].t(), ctx.saved_tensors[0].t() @ g + 0 * (x.sum() + w.sum())


often = function(_saves_both, _asks_often)


@saves("Functions that ask for `saved_tensors` five times, one after the other, around an LSTM-like gate")
class Often(Layer):
    def forward(self, x):
        return often(torch.sigmoid(often(x, self.w)) * x, self.w)


def _backward_in_backward(ctx, g):
    x, w = (t.detach().requires_grad_() for t in ctx.saved_tensors)
    with torch.enable_grad():
        out = torch.tanh(x @ w)
    return torch.autograd.grad(out, (x, w), g)


again = function(lambda ctx, x, w: (ctx.save_for_backward(x, w), torch.tanh(x @ w))[1], _backward_in_backward)


@saves("a Function that computes its forward again in its backward, and differentiates there")
class AgainInside(Layer):
    def forward(self, x):
        return again(x, self.w)


# Writes, views, memory.


@saves("an output is written in place after it was saved by nobody: `add_`, `mul_`, `clamp_` in a row")
class WrittenInPlace(Layer):
    def forward(self, x):
        out = x @ self.w
        out.add_(0.1)
        out.mul_(2).add_(x)
        return out.clamp_(-3, 3)


@saves("a buffer of the forward is filled slice by slice, and read")
class FilledBySlices(Layer):
    def forward(self, x):
        out = torch.empty_like(x)
        for part, into in zip(x.chunk(4), out.chunk(4), strict=True):
            into.copy_(torch.tanh(part @ self.w))
        return out * x


@saves("what is saved is freed and its memory taken anew, many times in one forward")
class ManyShortLived(Layer):
    def forward(self, x):
        for _ in range(6):
            x = torch.sin(x) + 0.1 * torch.tanh(x @ self.w)
        return x


@saves("views of one large tensor: queries, keys and values of a fused product, of one storage")
class FusedQkv(Layer):
    def __init__(self):
        super().__init__((3 * WIDTH, WIDTH), (WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (x @ self.w.t()).view(4, -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        out = (q @ k.transpose(-1, -2)).softmax(-1) @ v
        return out.transpose(1, 2).reshape_as(x) @ self.u


@saves("scaled dot-product attention with a causal mask, with a bias, and with fewer key heads")
class Attention(Layer):
    def __init__(self):
        super().__init__((3 * WIDTH, WIDTH), (WIDTH, WIDTH), (20, 20))

    def forward(self, x):
        q, k, v = (x @ self.w.t()).view(4, -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out = out + F.scaled_dot_product_attention(q, k, v, attn_mask=self.v)
        out = out + F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True)
        return out.transpose(1, 2).reshape_as(x) @ self.u


@saves("scaled dot-product attention with dropout, and a bool mask")
class DroppedAttention(Layer):
    def __init__(self):
        super().__init__((3 * WIDTH, WIDTH))

    def forward(self, x):
        q, k, v = (x @ self.w.t()).view(4, -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        mask = torch.ones(20, 20, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.1).transpose(1, 2).reshape_as(x)


@saves("FlexAttention with a score function and a block mask")
class Flex(Layer):
    def __init__(self):
        super().__init__((3 * WIDTH, WIDTH))

    def forward(self, x):
        import warnings

        from torch.nn.attention.flex_attention import flex_attention

        q, k, v = (x @ self.w.t()).view(1, -1, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            out = flex_attention(q, k, v, score_mod=lambda score, b, h, i, j: score - 0.01 * (i - j).abs())
        return out.transpose(1, 2).reshape_as(x)


# Operations.


@saves("Fourier transforms, complex weights made of real ones, and back")
class Fourier(Layer):
    def __init__(self):
        super().__init__((WIDTH // 2 + 1, 2))

    def forward(self, x):
        return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(self.w), n=WIDTH)


@saves("complex products, `angle`, `abs` and `polar`")
class Complex(Layer):
    def forward(self, x):
        z = torch.complex(x, x @ self.w)
        z = z * z.conj() + torch.polar(z.abs(), z.angle())
        return torch.view_as_real(z).sum(-1) * 0.1


@saves("convolutions over rows: one and two dimensions, transposed, dilated, grouped")
class Convolutions(Layer):
    def __init__(self):
        super().__init__((WIDTH, 8, 3), (WIDTH, WIDTH // 4, 5), (4, 1, 3, 3))

    def forward(self, x):
        y = x.view(4, 20, WIDTH).transpose(1, 2)
        y = F.conv1d(y, self.w, padding=2, dilation=2, groups=8)
        y = y + F.conv_transpose1d(
            F.pad(y, (1, 1)), self.u.transpose(1, 2)[:, :1].expand(WIDTH, 1, 16)[:, :, :3], padding=2, groups=WIDTH
        )
        z = F.conv2d(y[:, None].expand(4, 4, WIDTH, 20), self.v, padding=1, groups=4)
        return z.mean(1).transpose(1, 2).reshape_as(x) * 0.3


@saves("bags of embeddings by offsets, with weights of each sample")
class Bags(Layer):
    def __init__(self):
        super().__init__((100, WIDTH))

    def forward(self, x):
        ids = (x * 50).long().remainder(100).view(-1)
        offsets = torch.arange(0, ids.numel(), WIDTH)
        weights = x.reshape(-1) * 0.1
        return x + F.embedding_bag(ids, self.w, offsets, mode="sum", per_sample_weights=weights)


@saves("`index_add`, `scatter_reduce` of each kind, `gather`, `index_select`, `index_put`")
class Scatter(Layer):
    def forward(self, x):
        rows = (x[:, 0] * 100).long().remainder(20)
        y = x @ self.w
        pooled = torch.zeros(20, WIDTH).index_add(0, rows, y)
        where = rows[:, None].expand_as(y)
        for kind in ("amax", "mean", "sum", "amin"):
            pooled = pooled.scatter_reduce(0, where, y, kind, include_self=True)
        pooled = pooled.index_put((rows[:5],), y[:5], accumulate=True)
        return pooled.index_select(0, rows) * 0.1 + y.gather(1, y.argsort(1)) * 0.1


@saves("`segment_reduce` and `unique` of rows")
class Segments(Layer):
    def forward(self, x):
        lengths = torch.tensor([10, 0, 30, 40])
        pooled = torch.segment_reduce(x @ self.w, "mean", lengths=lengths, axis=0, unsafe=False, initial=0.0)
        return x + pooled.repeat_interleave(lengths, 0)


@saves("sorts, top-k, `cummax`, `cumsum`, `logcumsumexp`, `kthvalue`, `median`")
class Sorting(Layer):
    def forward(self, x):
        y = x @ self.w
        top, _ = y.topk(WIDTH, -1)
        return 0.1 * (
            top
            + y.cummax(0).values
            + y.cumsum(0)
            + y.logcumsumexp(-1)
            + y.kthvalue(3, -1, True).values
            + y.median(0).values
            + y.sort(0, stable=True).values
        )


@saves("linear algebra in a forward: `solve`, `qr`, `cholesky`, `slogdet`, `svd`, `inv`")
class Algebra(Layer):
    def forward(self, x):
        square = self.w @ self.w.t() + 3 * torch.eye(WIDTH)
        lower = torch.linalg.cholesky(square)
        out = torch.linalg.solve(square, x.t()).t() + x @ torch.linalg.inv(lower)
        return (
            out + torch.linalg.qr(square)[0][0] + 1e-3 * torch.linalg.slogdet(square)[1] + torch.linalg.svdvals(square)
        )


@saves("norms of all kinds: layer, group, RMS, batch without statistics, local response, `normalize`")
class Norms(Layer):
    def __init__(self):
        super().__init__((WIDTH,), (WIDTH,))

    def forward(self, x):
        y = F.layer_norm(x, (WIDTH,), self.w, self.u) + F.rms_norm(x, (WIDTH,), self.w)
        y = y + F.group_norm(x[..., None], 4, self.w, self.u)[..., 0]
        y = y + F.batch_norm(x, None, None, self.w, self.u, training=True)
        return F.normalize(y, dim=-1) + F.local_response_norm(x[:, :, None], 3)[..., 0]


@saves("activations: gelu, silu, mish, softplus, hardswish, elu, prelu, glu, dropout and alpha dropout", lr=1e-3)
class Nonlinear(Layer):
    def __init__(self):
        super().__init__((WIDTH, WIDTH), (WIDTH,))

    def forward(self, x):
        y = x @ self.w
        y = F.gelu(y) + F.gelu(y, approximate="tanh") + F.silu(y) + F.mish(y) + F.softplus(y) + F.hardswish(y)
        y = y + F.elu(y) + F.prelu(y, self.u) + torch.cat([F.glu(y), F.glu(-y)], -1)
        return 0.05 * F.alpha_dropout(F.dropout(y, 0.1), 0.1)


class Randomised(Layer):
    def forward(self, x):
        return F.rrelu(x @ self.w, training=True)


@family.differs(
    "`F.rrelu` in a layer that is not recomputed: torch calls hooks of saved tensors before its noise is there",
    "gradients are wrong, as with torch's `save_on_cpu`: keep that layer's activations",
)
def saves_randomised(place):
    plain = Net(Randomised)
    engine = place.wrap(Net(Randomised), optimizer=Exact, lr=1e-3, **(modes(place)[0] if place.has_engine else {}))
    for model in (plain, engine.module):
        torch.manual_seed(5)
        model(batch(0)).square().mean().backward()
    pairs = zip(plain.parameters(), engine.module.parameters(), strict=True)
    return all(torch.equal(one.grad, other.grad) for one, other in pairs)


@saves("pooling: max with indices and back, fractional, adaptive, power-average; interpolation, unfold and fold")
class Pooling(Layer):
    def forward(self, x):
        y = (x @ self.w).view(4, 20, 8, 8)
        pooled, where = F.max_pool2d(y, 2, return_indices=True)
        y = y + F.max_unpool2d(pooled, where, 2) + F.interpolate(pooled, scale_factor=2, mode="bilinear")
        y = (
            y
            + F.interpolate(F.adaptive_avg_pool2d(y, 4), scale_factor=2, mode="nearest")
            + F.interpolate(F.lp_pool2d(y.abs() + 1, 2.0, 2), scale_factor=2)
        )
        y = y + F.fold(F.unfold(y, 3, padding=1), (8, 8), 3, padding=1) * 0.1
        return y.reshape_as(x) * 0.2


@saves("a CTC loss, `cdist`, cosine similarity and a triplet loss within a forward", lr=1e-3)
class Losses(Layer):
    def forward(self, x):
        y = (x @ self.w).log_softmax(-1)
        targets = torch.arange(1, 9).repeat(4, 1)
        loss = F.ctc_loss(y.view(20, 4, WIDTH), targets, torch.full((4,), 20), torch.full((4,), 8))
        loss = loss + torch.cdist(x[:40], y[:40]).mean() + F.cosine_similarity(x, y).mean()
        loss = loss + F.triplet_margin_loss(x, y, x.flip(0)) + F.kl_div(y, x.softmax(-1), reduction="batchmean")
        return x + y * torch.tanh(loss * 0.01) * 0.1


@saves("einsum over several tensors, bilinear, outer products, `baddbmm`, `addmm` with factors")
class Products(Layer):
    def __init__(self):
        super().__init__((WIDTH, 8, 8), (WIDTH, WIDTH))

    def forward(self, x):
        y = torch.einsum("ri,iab,rab->ri", x, self.w, x.view(-1, 8, 8))
        y = torch.addmm(y, x, self.u, beta=0.5, alpha=0.3)
        z = x.view(4, 20, WIDTH)
        return y * 0.1 + torch.baddbmm(z, z @ z.transpose(1, 2), z, beta=0.1, alpha=1e-3).view_as(x)


@saves("`where`, `masked_fill`, `masked_select`, `masked_scatter`, `take_along_dim`, `roll`, `flip`, `repeat`")
class Masks(Layer):
    def forward(self, x):
        y = x @ self.w
        mask = y > 0
        z = torch.where(mask, y, x).masked_fill(y > 2, 0.5).masked_scatter(mask, y.masked_select(mask) * 2)
        return z + torch.take_along_dim(y, y.argsort(-1), -1).roll(3, 0) + y.flip(1) + x[:20].repeat(4, 1)


@saves("an LSTM, a GRU and an RNN by `torch._VF`-like functions: cells with weights of the layer's own")
class Cells(Layer):
    def __init__(self):
        super().__init__((4 * WIDTH, WIDTH), (4 * WIDTH, WIDTH), (3 * WIDTH, WIDTH), (3 * WIDTH, WIDTH))

    def forward(self, x):
        state = (torch.zeros(4, WIDTH), torch.zeros(4, WIDTH))
        gated, found = torch.zeros(4, WIDTH), []
        for each in x.view(20, 4, WIDTH):
            state = torch.lstm_cell(each, state, self.w, self.u)
            gated = torch.gru_cell(state[0], gated, self.v, self.s)
            found.append(gated)
        return torch.cat(found)


class Recurrent(nn.Module):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, 2, bidirectional=True, dropout=0.1)
        self.gru = nn.GRU(WIDTH, WIDTH)

    def forward(self, x):
        y, _ = self.lstm(x.view(20, 4, WIDTH))
        return x + self.gru(y)[0].reshape_as(x)


saves("a bidirectional LSTM of two layers with dropout, and a GRU")(Recurrent)


# Transforms.


@saves("`vmap` over rows of a function of the weights")
class Mapped(Layer):
    def forward(self, x):
        return vmap(lambda row, w: torch.tanh(row @ w) * row.norm(), in_dims=(0, None))(x, self.w)


@saves("`torch.func.grad` of an energy of each row, by `vmap`")
class RowGradients(Layer):
    def forward(self, x):
        return vmap(grad(lambda row, w: torch.tanh(row @ w).square().sum()), in_dims=(0, None))(x, self.w)


@saves("`vjp` and `jvp` in a forward, the direction is the input")
class Directions(Layer):
    def forward(self, x):
        def layer(y):
            return torch.tanh(y @ self.w)

        out, pull = vjp(layer, x)
        return out + 0.1 * pull(x)[0] + 0.1 * jvp(layer, (x,), (x,))[1]


@saves("`jacfwd` over some rows")
class Jacobians(Layer):
    def forward(self, x):
        jacobian = vmap(jacfwd(lambda row: torch.tanh(row @ self.w)))(x[:5])
        return x + jacobian.mean(0).diagonal() + (x @ self.w) * 0.1


@saves("dual numbers of forward-mode differentiation in a forward")
class DualNumbers(Layer):
    def forward(self, x):
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(x, torch.ones_like(x))
            out, tangent = forward_ad.unpack_dual(torch.tanh(dual @ self.w))
        return out + 0.1 * tangent


class Jagged(Layer):
    """Each run of it makes a dimension of another name."""

    def forward(self, x):
        rows = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 10, 10, 50, ROWS]))
        return torch.tanh(torch.nested.nested_tensor_from_jagged((rows @ self.w).values(), rows.offsets()).values())


@family.works_or_refused("a nested tensor of jagged rows within a layer", "Do not recompute it", rtol=0.0, atol=0.0)
def saves_jagged(place):
    return trained(place, Jagged)


@saves("sparse products: COO and CSR with dense")
class SparseProducts(Layer):
    def forward(self, x):
        mixing = torch.eye(ROWS).roll(1, 0).to_sparse()
        return torch.sparse.mm(mixing, x @ self.w) + torch.sparse.mm(mixing.to_sparse_csr(), x)


@saves("`torch.utils.checkpoint` of a part of the layer, of each kind")
class CheckedInside(Layer):
    def forward(self, x):
        x = checkpoint(lambda y: torch.tanh(y @ self.w), x, use_reentrant=False)
        return x + checkpoint(lambda y, w: torch.sin(y @ w), x, self.w, use_reentrant=True)


@saves("hooks of saved tensors within the layer: they save in bf16 (lossy)")
class PackedInside(Layer):
    def forward(self, x):
        def pack(t):
            return t.bfloat16() if t.dtype == torch.float32 and t is not self.w and t.shape == x.shape else t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t.float() if t.dtype == torch.bfloat16 else t):
            return torch.tanh(x @ self.w) * x


@saves("a view with the negative bit: the imaginary part of a conjugate")
class Negative(Layer):
    def forward(self, x):
        return torch.complex(x, x @ self.w).conj().imag * torch.tanh(x) * 0.5


@saves("autocast to bfloat16 within the layer, and float64 in its middle")
class Cast(Layer):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            y = x @ self.w
        return torch.tanh(y.double()).float() + x.double().exp().log().float() * 0.1


@saves("tensors of other layouts: channels last, strides of zero, negative conjugates, overlapping by `as_strided`")
class Layouts(Layer):
    def forward(self, x):
        image = (x @ self.w).view(4, 20, 8, 8).to(memory_format=torch.channels_last)
        image = torch.tanh(image) * image.exp()
        windows = x.as_strided((ROWS - 2, 3, WIDTH), (WIDTH, WIDTH, 1)).sin().mean(1)
        z = torch.complex(x, x).conj().imag.neg() * x
        return image.contiguous().view_as(x) * 0.1 + F.pad(windows, (0, 0, 1, 1)) + z * 0.1


@saves("a gradient is multiplied by a hook on a tensor in the layer, which reads saved tensors itself")
class HookReads(Layer):
    def forward(self, x):
        y = x @ self.w
        z = torch.tanh(y)
        if z.requires_grad:
            z.register_hook(lambda g: g * (1 + y.detach().mean()))
        return z


@saves("a gradient within a forward: `torch.autograd.grad` by the weight, of a loss of its own")
class InnerLoss(Layer):
    def forward(self, x):
        with torch.enable_grad():
            loss = torch.tanh(x.detach() @ self.w).square().mean()
            (direction,) = torch.autograd.grad(loss, self.w)
        return torch.tanh(x @ (self.w - 0.1 * direction))


@saves("`functional_call` of a layer without parameters of its own, with slices of the weight")
class Called(Layer):
    def __init__(self):
        super().__init__((WIDTH + 1, WIDTH))
        self.__dict__["target"] = nn.Linear(WIDTH, WIDTH).to("meta")

    def forward(self, x):
        return torch.tanh(functional_call(self.target, {"weight": self.w[:WIDTH], "bias": self.w[WIDTH]}, x))


@saves("quantised in the forward: `fake_quantize` by channel and a straight-through rounding of rows")
class FakeQuantised(Layer):
    def forward(self, x):
        scale, zero = torch.full((WIDTH,), 0.05), torch.zeros(WIDTH, dtype=torch.int32)
        w = torch.fake_quantize_per_channel_affine(self.w, scale, zero, 0, -128, 127)
        return x @ w + (x.round() - x).detach()


@saves("losses of a softmax over bins, `bucketize`, `histc`, one-hot targets")
class Bins(Layer):
    def forward(self, x):
        bins = torch.bucketize(x, torch.linspace(-2, 2, WIDTH - 1))
        y = F.one_hot(bins[:, 0], WIDTH).float() @ self.w
        return y + (x @ self.w) * F.cross_entropy(x @ self.w, bins[:, 1], label_smoothing=0.1) * 0.1


@saves("grid samples, affine grids, `pixel_shuffle`, `channel_shuffle`")
class Grids(Layer):
    def __init__(self):
        super().__init__((4, 2, 3), (1, 20, 8, 8))

    def forward(self, x):
        grid = F.affine_grid(self.w, [4, 20, 8, 8], align_corners=False)
        y = F.grid_sample(x.view(4, 20, 8, 8), grid, align_corners=False) + self.u
        y = F.pixel_unshuffle(F.pixel_shuffle(y, 2), 2)
        return F.channel_shuffle(y, 4).reshape_as(x)


# Loops over such layers.


def loop(title, **options):
    """A case that is given a trained model of plain layers: ``body(engine, step)`` gives what is compared."""

    def add(body):
        def case(place):
            found: list[Any] = []
            for mode in modes(place):
                options = mode if place.has_engine else {}
                engine = place.wrap(
                    Net(ManyShortLived), optimizer=Exact, lr=0.05, optimizer_options={"momentum": 0.9}, **options
                )
                for step in range(3):
                    found.append(body(engine, step))
                    found.append(gradients(engine.module))
                    engine.optimizer.step()
                    engine.optimizer.zero_grad()
                found.append(values(engine.module))
                if place.has_engine:
                    engine.close()
                    place.left.remove(engine)
            return found

        case.__name__ = f"activations_{body.__name__}"
        same_bits(title, **options)(case)
        return body

    return add


@loop("a retained graph goes backward three times")
def retained(engine, step):
    loss = engine(batch(step)).square().mean()
    for index in range(3):
        loss.backward(retain_graph=index < 2)


@loop("halves of the parameters by `backward(inputs=...)` over a retained graph")
def by_inputs(engine, step):
    parameters = list(engine.module.parameters())
    loss = engine(batch(step)).square().mean()
    loss.backward(inputs=parameters[:5], retain_graph=True)
    loss.backward(inputs=parameters[5:])


@loop("a graph is dropped without a backward, and another one is trained")
def dropped(engine, step):
    engine(batch(step + 5)).sum()
    kept = engine(batch(step + 6))
    engine(batch(step)).square().mean().backward()
    return kept.detach().clone()


@loop("a backward stops in the middle by a hook, the gradients are dropped, the same batch trains")
def stopped(engine, step):
    def stop(g):
        raise KeyError("stop")

    out = engine.module.first(batch(step))
    for index, block in enumerate(engine.module.blocks):
        out = block(out)
        if index == 1:
            out.register_hook(stop)
    try:
        out.sum().backward()
    except KeyError:
        engine.optimizer.zero_grad()
    engine(batch(step)).square().mean().backward()


@loop("gradients of the input, and of a tensor in the middle, by `torch.autograd.grad`")
def of_inputs(engine, step):
    x, kept = batch(step).requires_grad_(), []
    handle = engine.module.blocks[1].register_forward_hook(lambda m, a, out: kept.append(out))
    out = engine(x)
    handle.remove()
    found = torch.autograd.grad(out.square().mean(), [x, kept[0]], retain_graph=True)
    out.mean().backward()
    return found


@loop("two models in one loss: the output is the input of the same model again")
def twice_through(engine, step):
    engine(engine(batch(step)) * 0.1).square().mean().backward()


@loop("three graphs alive, backward in the order of 2, 3, 1")
def three_alive(engine, step):
    one, two, three = (engine(batch(10 * step + index)).square().mean() for index in range(3))
    for loss in (two, three, one):
        loss.backward()


@loop("batches of other sizes, one row and none")
def other_sizes(engine, step):
    for rows in (ROWS + 40 * step,):
        engine(batch(step, rows)).square().mean().backward()
    return engine(batch(step)[:0]).sum().item()


@loop("a deep copy of the model is made while a graph is alive")
def copied(engine, step):
    import copy

    loss = engine(batch(step)).square().mean()
    other = copy.deepcopy(engine.module)
    loss.backward()
    return other(batch(step)).detach()


@loop("`torch.autograd.backward` of two roots with gradients, one of them in the middle")
def two_roots(engine, step):
    middle = engine.module.blocks[0](engine.module.first(batch(step)))
    out = middle
    for block in engine.module.blocks[1:]:
        out = block(out)
    torch.autograd.backward(
        [middle, engine.module.last(out)], [torch.ones_like(middle) * 0.01, torch.ones_like(out) * 0.02]
    )
