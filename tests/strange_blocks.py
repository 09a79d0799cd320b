"""Blocks of odd kinds: each has a child, so that it is recomputed, and takes and gives a hidden state by ``call``."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import random
import threading
from typing import Any

import numpy
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from offload import attention_in_tiles, in_tiles

WIDTH, ROWS, BATCH, NUM_BLOCKS = 64, 32, 4, 4


class Kind(nn.Module):
    """A block of this kind, and how the model around it calls it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> Any:
        return x + self.mlp(x)

    def call(self, x: torch.Tensor, world: dict[str, Any]) -> torch.Tensor:
        """``world`` is the forward's own: what blocks hand on to each other beside the hidden state."""
        return self(x)


class Draws(Kind):
    def forward(self, x):
        x = F.dropout(x, 0.2, self.training) + 0.1 * torch.rand_like(x)
        scale = 1 + 0.1 * random.random() + 0.1 * float(numpy.random.rand())
        return x + scale * F.dropout(self.mlp(x), 0.1)


class Statistics(Kind):
    def __init__(self):
        super().__init__()
        self.batch = nn.BatchNorm1d(WIDTH)
        self.register_buffer("mean_of", torch.zeros(WIDTH))

    def forward(self, x):
        x = self.batch(x.flatten(0, 1)).view_as(x)
        if self.training:
            self.mean_of.lerp_(x.detach().mean((0, 1)), 0.1)
        return x + self.mlp(x) + self.mean_of


class ReplacedBuffer(Kind):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, x):
        self.scale = 0.9 * self.scale + 0.1 * x.detach().abs().max()
        return x + self.mlp(x / self.scale)


class WritesToItsInput(Kind):
    def forward(self, x):
        x.mul_(0.5)
        return x + self.mlp(x)

    def call(self, x, world):
        return self(x + 0)


class AddsInPlace(Kind):
    def forward(self, x):
        x += self.mlp(x.clone())
        return x

    def call(self, x, world):
        return self(x * 1.5)


class RectifiedInPlace(Kind):
    """As a block of a residual network that begins with an activation in place."""

    def __init__(self):
        super().__init__()
        self.act = nn.ReLU(inplace=True)

    def forward(self, x):
        return self.mlp(self.act(x))

    def call(self, x, world):
        return x.detach().mean() + self(x - 0.1)


class WritesToAViewOfItsInput(Kind):
    def forward(self, x):
        x[:, 0] = 1.0
        return x + self.mlp(x)

    def call(self, x, world):
        return self(x * 1.1)


class WritesToAnInputWithoutGradient(Kind):
    """A running state, as a scan's."""

    def forward(self, x, memory):
        memory.mul_(0.5).add_(x.detach().mean(0, keepdim=True).expand_as(memory))
        return x + self.mlp(x + memory)

    def call(self, x, world):
        return self(x, world.setdefault("memory", torch.zeros(BATCH, ROWS, WIDTH)[: len(x)]))


class ReadsAnInputWithoutGradient(Kind):
    def forward(self, x, mask):
        return x + self.mlp(x.masked_fill(mask, 0.0))

    def call(self, x, world):
        return self(x, world.setdefault("mask", (torch.arange(ROWS * WIDTH).view(ROWS, WIDTH) % 7 == 0).expand_as(x)))


class Keywords(Kind):
    def forward(self, *, hidden, scale=1.0, extra=None, **more):
        return hidden + scale * self.mlp(hidden + (0 if extra is None else extra["a"][0])) * more["gate"]

    def call(self, x, world):
        return self(hidden=x, extra={"a": [x * 0.1]}, gate=torch.sigmoid(x), flag="a")


class SeveralOutputs(Kind):
    def forward(self, x):
        hidden = self.mlp(x)
        return {"hidden": x + hidden, "aux": (hidden.square().mean(), hidden[:, 0]), "text": "a"}

    def call(self, x, world):
        out = self(x)
        world["losses"].append(out["aux"][0] + 0 * out["aux"][1].sum())
        return out["hidden"]


@dataclasses.dataclass
class Box:
    hidden: torch.Tensor
    steps: list[torch.Tensor] = dataclasses.field(default_factory=list)


class Boxed(Kind):
    """Takes and gives an object that torch does not look into."""

    def forward(self, box):
        box.steps.append(box.hidden.detach())
        return Box(box.hidden + self.mlp(box.hidden), box.steps)

    def call(self, x, world):
        box = world.setdefault("box", Box(x))
        box.hidden = x
        world["box"] = self(box)
        return world["box"].hidden


class WritesAnAttributeOfItsArgument(Kind):
    def forward(self, box):
        box.hidden = box.hidden + self.mlp(box.hidden)

    def call(self, x, world):
        box = Box(x)
        self(box)
        return box.hidden


Named = collections.namedtuple("Named", "hidden other")


class NamedTuples(Kind):
    def forward(self, given):
        return Named(given.hidden + self.mlp(given.other), given.hidden)

    def call(self, x, world):
        given = world.get("named") or Named(x, x)
        world["named"] = self(Named(x, given.other))
        return world["named"].hidden


class AddsToADictionary(Kind):
    def forward(self, x, found):
        hidden = self.mlp(x)
        found.setdefault("aux", []).append(hidden.square().mean())
        found["last"] = hidden
        return x + hidden + (0.1 * found["before"] if "before" in found else 0)

    def call(self, x, world):
        found = world.setdefault("found", {})
        x = self(x, found)
        found["before"] = found["last"]
        world["losses"].append(found["aux"].pop())
        return x


class Nested(Kind):
    def __init__(self):
        super().__init__()
        self.inner = nn.ModuleList([Draws(), Statistics()])

    def forward(self, x):
        for block in self.inner:
            x = block(x)
        return x + self.mlp(x)


class TwiceInItself(Kind):
    def forward(self, x, depth=2):
        x = x + self.mlp(x)
        return self(x, depth - 1) if depth > 1 else x


class UsedTwice(Kind):
    def call(self, x, world):
        return self(0.5 * self(x))


class Loops(Kind):
    """Found a fixed point, and then once with its graph."""

    def call(self, x, world):
        with torch.no_grad():
            z = x
            for _ in range(3):
                z = 0.5 * self(z)
        return self(z + 0.1 * x)


class CheckpointInside(Kind):
    reentrant = False

    def forward(self, x):
        return x + checkpoint(self.mlp, x, use_reentrant=self.reentrant)


class ReentrantCheckpointInside(CheckpointInside):
    reentrant = True


class CheckpointAround(Kind):
    reentrant = False

    def call(self, x, world):
        return checkpoint(self, x, use_reentrant=self.reentrant)


class ReentrantCheckpointAround(CheckpointAround):
    reentrant = True


class Hooked(Kind):
    def __init__(self):
        super().__init__()
        self.__dict__["calls"] = []
        self.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 1.1,), kwargs), with_kwargs=True)
        self.register_forward_hook(lambda module, args, out: out + 0.01 * args[0])
        self.register_full_backward_hook(lambda module, before, after: (before[0] * 0.9,))
        self.register_full_backward_pre_hook(lambda module, after: (after[0] * 1.1,))
        self.up.register_forward_hook(lambda module, args, out: out * 1.01)
        self.down.register_full_backward_hook(lambda module, before, after: (before[0] * 0.95,))


class TensorHooks(Kind):
    def forward(self, x):
        hidden = self.mlp(x)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient * 0.7)
            hidden.grad_fn.register_prehook(lambda gradients: tuple(0.9 * gradient for gradient in gradients))
        return x + hidden


class RetainedGradient(Kind):
    def forward(self, x):
        self.__dict__["hidden"] = hidden = self.mlp(x)
        if hidden.requires_grad:
            hidden.retain_grad()
        return x + hidden


class Autocast(Kind):
    def forward(self, x):
        with torch.autocast("cpu", torch.bfloat16):
            hidden = self.mlp(x)
        return x + hidden.float()


class CastAround(Kind):
    def call(self, x, world):
        with torch.autocast("cpu", torch.bfloat16):
            return self(x).float()


class Cube(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        out = x**3 * weight.sum()
        ctx.save_for_backward(x, weight, out)
        ctx.kept = x.detach().sign()
        ctx.set_materialize_grads(False)
        return out, x.abs().argmax(-1)

    @staticmethod
    def backward(ctx, gradient, _):
        x, weight, out = ctx.saved_tensors
        of_weight = (gradient * x**3).sum().expand_as(weight) + 0 * out.sum()
        return gradient * 3 * x**2 * weight.sum() + 0 * ctx.kept, of_weight


class OwnFunction(Kind):
    def forward(self, x):
        out, index = Cube.apply(0.3 * torch.tanh(self.up(x)), self.up.bias + 0.1)
        return x + self.down(out) + 0.001 * index.unsqueeze(-1)


class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        x.mul_(2)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class DirtyFunction(Kind):
    def forward(self, x):
        return x + self.down(Dirty.apply(self.up(x)).tanh())


class RunsBlockInBackward(torch.autograd.Function):
    """A reversible layer: its backward runs the forward again by itself."""

    @staticmethod
    def forward(ctx, x, block, *parameters):
        ctx.block, ctx.num = block, len(parameters)
        with torch.no_grad():
            out = block.mlp(x)
        ctx.save_for_backward(x)
        return out

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            out = ctx.block.mlp(x)
        found = torch.autograd.grad(out, [x, *ctx.block.parameters()], gradient, allow_unused=True)
        return found[0], None, *found[1:]


class Reversible(Kind):
    def forward(self, x):
        return x + RunsBlockInBackward.apply(x, self, *self.parameters())


class Views(Kind):
    """Saves views of all kinds of one storage."""

    def forward(self, x):
        hidden = self.up(self.norm(x))
        left, right = hidden.chunk(2, -1)
        turned = hidden.transpose(1, 2) @ hidden
        windows = hidden.unfold(1, 4, 2).mean(-1).mean(1, keepdim=True)
        strided = torch.as_strided(hidden, (BATCH, 8, WIDTH), (ROWS * 2 * WIDTH, 2 * WIDTH, 1), 3).exp().mean()
        wide = x[:, :1].expand_as(x) * x.flip(1)
        mixed = torch.sigmoid(left) * right + turned.mean() + windows[..., :WIDTH] + 0.1 * wide
        return x + self.down(torch.cat([mixed, mixed.roll(1, 1)], -1)) + 1e-3 * strided


class Complex(Kind):
    def forward(self, x):
        spectrum = torch.fft.rfft(self.norm(x), dim=1)
        mixed = torch.fft.irfft(spectrum * spectrum.abs().exp().reciprocal(), n=x.shape[1], dim=1)
        return x + self.mlp(mixed)


class Sorted(Kind):
    def forward(self, x):
        values, index = self.norm(x).sort(-1)
        scattered = torch.zeros_like(x).scatter(-1, index, values.cumsum(-1) * 0.1)
        pooled = F.max_pool1d(x.transpose(1, 2), 3, 1, 1).transpose(1, 2)
        return x + self.mlp(scattered + pooled) + torch.logcumsumexp(x, 1) * 0.01


class Routed(Kind):
    """Experts chosen by the values."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(WIDTH, 3, bias=False)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3))

    def forward(self, x):
        flat = x.flatten(0, 1)
        weights, chosen = self.router(flat).softmax(-1).max(-1)
        out = torch.zeros_like(flat)
        for index in chosen.unique().tolist():
            rows = (chosen == index).nonzero()[:, 0]
            out = out.index_add(0, rows, self.experts[index](flat[rows]) * weights[rows, None])
        return x + out.view_as(x) + self.mlp(x)


class Attention(Kind):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, dropout=0.1, batch_first=True)

    def forward(self, x, mask=None):
        y = self.norm(x)
        return x + self.attention(y, y, y, attn_mask=mask, need_weights=False)[0] + self.mlp(x)

    def call(self, x, world):
        return self(x, mask=world.setdefault("causal", torch.full((x.shape[1],) * 2, float("-inf")).triu(1)))


class CrossAttention(Kind):
    def __init__(self):
        super().__init__()
        self.layer = nn.TransformerDecoderLayer(WIDTH, 4, 2 * WIDTH, 0.1, batch_first=True)

    def forward(self, x, memory):
        return self.layer(x, memory) + self.mlp(x)

    def call(self, x, world):
        return self(x, world.setdefault("memory", x.flip(1)))


class Recurrent(Kind):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(WIDTH, WIDTH, num_layers=2, dropout=0.1, batch_first=True)

    def forward(self, x, state=None):
        hidden, state = self.rnn(self.norm(x), state)
        return x + hidden + self.mlp(x), state

    def call(self, x, world):
        x, world["state"] = self(x, world.get("state"))
        return x


class Gated(Kind):
    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True, bidirectional=True)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x, [ROWS - i for i in range(len(x))], batch_first=True)
        hidden, _ = nn.utils.rnn.pad_packed_sequence(self.rnn(packed)[0], batch_first=True, total_length=x.shape[1])
        return x + self.down(hidden) + self.mlp(x)


class PackedSequences(Kind):
    """A packed sequence goes in and comes out."""

    def __init__(self):
        super().__init__()
        self.rnn = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, packed):
        return self.rnn(packed._replace(data=packed.data + self.mlp(packed.data)))[0]

    def call(self, x, world):
        packed = nn.utils.rnn.pack_padded_sequence(x, [ROWS - i for i in range(len(x))], batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(self(packed), batch_first=True, total_length=x.shape[1])[0]


class Scan(Kind):
    """A state space, step by step, its state updated in place."""

    def __init__(self):
        super().__init__()
        self.decay = nn.Parameter(torch.rand(WIDTH))

    def forward(self, x):
        y, outs = self.norm(x), []
        state = torch.zeros_like(y[:, 0])
        for row in range(y.shape[1]):
            state = state * torch.sigmoid(self.decay) + y[:, row]
            outs.append(state)
        return x + self.mlp(torch.stack(outs, 1))


class Convolved(Kind):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(nn.Conv1d(WIDTH, WIDTH, 3, padding=1, groups=4), nn.GroupNorm(4, WIDTH), nn.SiLU())

    def forward(self, x):
        return x + self.conv(x.transpose(1, 2)).transpose(1, 2) + self.mlp(x)


class Image(Kind):
    def __init__(self):
        super().__init__()
        self.conv = nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
            nn.Dropout2d(0.1), nn.ConvTranspose2d(8, 4, 2, 2),
        ).to(memory_format=torch.channels_last)  # fmt: skip

    def forward(self, x):
        image = x.unflatten(-1, (4, 16)).permute(0, 2, 1, 3).to(memory_format=torch.channels_last)
        return x + self.conv(image).permute(0, 2, 1, 3).flatten(2) + self.mlp(x)


class GradientInside(Kind):
    """A force: the gradient of an energy, whose own gradient is wanted."""

    def forward(self, x):
        with torch.enable_grad():
            x = x if x.requires_grad else x.requires_grad_()
            energy = torch.tanh(self.up(x)).square().sum()
            (force,) = torch.autograd.grad(energy, x, create_graph=True)
        return x - 0.1 * force + self.down(self.up(x).tanh())


class GradientInsideAlone(Kind):
    def forward(self, x):
        with torch.inference_mode(False), torch.enable_grad():
            y = x.clone().detach().requires_grad_()
            (force,) = torch.autograd.grad(torch.tanh(self.up(y)).square().sum(), y)
        return x - 0.1 * force + self.mlp(x)


class PartlyWithout(Kind):
    def forward(self, x):
        with torch.no_grad():
            scale = self.mlp(x).abs().mean()
        return x + self.mlp(x.detach()) + self.mlp(x) / (1 + scale)


class Frozen(Kind):
    def __init__(self):
        super().__init__()
        self.up.requires_grad_(False)
        self.norm.requires_grad_(False)


class AllFrozen(Kind):
    def __init__(self):
        super().__init__()
        self.requires_grad_(False)


class Detached(Kind):
    """No gradient comes through it to what is before."""

    def call(self, x, world):
        return self(x.detach()) + 0.1 * x


class Same(Kind):
    """Gives its input as it is, and what it computes by an attribute."""

    def forward(self, x):
        self.__dict__["result"] = self.mlp(x)
        return x

    def call(self, x, world):
        return self(x) + self.__dict__.pop("result")


class ViewOfInput(Kind):
    def forward(self, x):
        return x.transpose(1, 2), self.mlp(x)

    def call(self, x, world):
        view, hidden = self(x)
        return view.transpose(1, 2) + hidden


class ReturnsItsWeight(Kind):
    def forward(self, x):
        return x + self.mlp(x), self.up.weight

    def call(self, x, world):
        x, weight = self(x)
        world["losses"].append(1e-2 * weight.square().mean())
        return x


class Counts(Kind):
    """What it does depends on how often it was called."""

    def __init__(self):
        super().__init__()
        self.count, self.history, self.table = 0, [], {}

    def forward(self, x):
        self.count += 1
        self.history.append(float(x.detach().mean()))
        self.table[self.count] = x.detach()[:1, :1]
        return x + self.mlp(x) / self.count + self.history[-1] + self.table[self.count]


class Lazy(Kind):
    """Makes a table in its first forward."""

    def __init__(self):
        super().__init__()
        self.table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.sin(torch.arange(ROWS * WIDTH, dtype=torch.float32)).view(ROWS, WIDTH)
        return x + self.mlp(x + self.table[: x.shape[1]])


class OwnGenerator(Kind):
    def __init__(self):
        super().__init__()
        self.__dict__["generator"] = torch.Generator().manual_seed(3)

    def forward(self, x):
        return x + self.mlp(x * torch.rand(x.shape, generator=self.generator))


class OwnGenerators(Kind):
    def __init__(self):
        super().__init__()
        self.rng, self.numpy = random.Random(3), numpy.random.default_rng(3)

    def forward(self, x):
        return x + self.mlp(x) * (self.rng.random() + float(self.numpy.random()))


class AttributeInPlace(Kind):
    def __init__(self):
        super().__init__()
        self.mean = torch.zeros(WIDTH)

    def forward(self, x):
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)))
        return x + self.mlp(x + self.mean)


@dataclasses.dataclass
class Memory:
    values: torch.Tensor
    rows: list[torch.Tensor]


class ArgumentInPlace(Kind):
    def forward(self, x, memory):
        memory.values.mul_(0.5).add_(x.detach().mean((0, 1)))
        return x + self.mlp(x + memory.values)

    def call(self, x, world):
        return self(x, world.setdefault("memory", Memory(torch.zeros(WIDTH), [])))


class RowOfArgumentInPlace(Kind):
    def forward(self, x, memory):
        memory.rows[0].mul_(0.5).add_(x.detach().mean((0, 1)))
        return x + self.mlp(x + memory.rows[0])

    def call(self, x, world):
        return self(x, world.setdefault("memory", Memory(torch.zeros(1), [torch.zeros(WIDTH)])))


class Normed(Kind):
    def __init__(self):
        super().__init__()
        self.up = nn.utils.parametrizations.weight_norm(self.up)
        self.down = nn.utils.parametrizations.spectral_norm(self.down)


class Vectorised(Kind):
    def forward(self, x):
        return x + torch.func.vmap(lambda row: self.down(torch.tanh(self.up(row))), randomness="same")(x)


class Called(Kind):
    """By ``functional_call``, with other weights."""

    def forward(self, x):
        weights = {name: value * 0.9 for name, value in self.up.named_parameters()}
        return x + self.down(torch.func.functional_call(self.up, weights, (x,)).tanh())


class SavesOnCpu(Kind):
    def forward(self, x):
        with torch.autograd.graph.save_on_cpu():
            hidden = self.mlp(x)
        return x + hidden


class SavesOnCpuAround(Kind):
    def call(self, x, world):
        with torch.autograd.graph.save_on_cpu():
            return self(x)


class ChangesGradMode(Kind):
    def forward(self, x):
        torch.set_grad_enabled(False)
        scale = self.up(x).abs().mean()
        torch.set_grad_enabled(True)
        return x + self.mlp(x) * scale


class Aliases(Kind):
    """Its arguments look at one memory."""

    def forward(self, x, first, flat):
        return x + self.mlp(x) + 0.1 * first.tanh() + 0.01 * flat.view_as(x).square()

    def call(self, x, world):
        return self(x, x[:, :1], x.reshape(-1))


class Expanded(Kind):
    def forward(self, x, row):
        return x + self.mlp(row * x)

    def call(self, x, world):
        return self(x, x.mean((0, 1)).expand_as(x))


class Wide(Kind):
    """Single tensors larger than the memory of activations."""

    def forward(self, x):
        wide = x.repeat(1, 8, 1)
        return x + self.mlp(wide).unflatten(1, (8, -1)).mean(1)

    def call(self, x, world):
        return self(x.repeat(1, 3, 1).unflatten(1, (3, -1)).mean(1))


class Doubled(Kind):
    """Computes in double, and takes integers."""

    def __init__(self):
        super().__init__()
        self.double()

    def forward(self, x, places):
        return (x + self.mlp(x)).gather(1, places.unsqueeze(-1).expand_as(x))

    def call(self, x, world):
        return self(x.double(), torch.arange(x.shape[1]).flip(0).expand(x.shape[:2])).float()


class Sparse(Kind):
    """A sparse matrix is an argument."""

    def forward(self, x, graph):
        return x + self.mlp(torch.stack([torch.sparse.mm(graph, each) for each in x]))

    def call(self, x, world):
        graph = world.setdefault("graph", torch.eye(x.shape[1]).to_sparse())
        return self(x, graph)


class Jagged(Kind):
    def forward(self, rows):
        return rows + self.mlp(rows)

    def call(self, x, world):
        rows = torch.nested.as_nested_tensor([each[: ROWS - i] for i, each in enumerate(x)], layout=torch.jagged)
        return torch.nested.to_padded_tensor(self(rows), 0.0, (len(x), ROWS, WIDTH))


class OwnTensor(torch.Tensor):
    pass


class Subclassed(Kind):
    def call(self, x, world):
        return self(x.as_subclass(OwnTensor)).as_subclass(torch.Tensor)


class Adversarial(Kind):
    """Its input is a leaf."""

    def call(self, x, world):
        leaf = x.detach().requires_grad_()
        out = self(leaf)
        world.setdefault("leaves", []).append(leaf)
        return out + x


class Skips(Kind):
    """Not every step."""

    def call(self, x, world):
        return x if random.random() < 0.5 else self(x)


class Raises(Kind):
    """Once in its middle, and is tried again by the model."""

    def forward(self, x):
        hidden = self.mlp(x)
        if self.__dict__.setdefault("count", 0) < 1:
            self.__dict__["count"] += 1
            raise KeyError("once")
        return x + hidden

    def call(self, x, world):
        with contextlib.suppress(KeyError):
            return self(x)
        return self(x)


class Bound(Kind):
    """Hands on a closure over its result."""

    def forward(self, x):
        hidden = self.mlp(x)
        return lambda scale: x + scale * hidden

    def call(self, x, world):
        return self(x)(0.5)


class Yields(Kind):
    def forward(self, x):
        for scale in (0.5, 0.25):
            x = x + scale * self.mlp(x)
            yield x

    def call(self, x, world):
        *_, x = self(x)
        return x


class Resets(Kind):
    """Writes to its result after the call."""

    def call(self, x, world):
        x = self(x) * 1.0
        x[:, -1] = 0.0
        x.add_(1e-2)
        return x


class WrittenAfterwards(Kind):
    """Its caller writes to its input after the call. Nothing that torch saves is changed by that."""

    def forward(self, x):
        return x + self.mlp(x * 1.0)

    def call(self, x, world):
        x = x * 1.0
        out = self(x)
        x.add_(1.0)
        return out + 0.1 * x


class Penalised(Kind):
    """A gradient of the input, and then its own backward."""

    def call(self, x, world):
        out = self(x)
        if out.requires_grad:
            (gradient,) = torch.autograd.grad(out.sum(), x, create_graph=True)
            world["losses"].append(1e-3 * gradient.square().mean())
        return out


class SetsRequiresGrad(Kind):
    def forward(self, x, bias):
        bias.requires_grad_()
        return x + self.mlp(x + bias)

    def call(self, x, world):
        return self(x, torch.zeros(x.shape))


class DetachesInPlace(Kind):
    def forward(self, x, skip):
        skip.detach_()
        return x + self.mlp(x + skip)

    def call(self, x, world):
        return self(x, 1.0 * x)


class SwapsData(Kind):
    """Gives its input another memory."""

    def forward(self, x, scratch):
        scratch.data = x.detach() * 2
        return x + self.mlp(x + scratch)

    def call(self, x, world):
        return self(x, torch.zeros(x.shape))


class OutGiven(Kind):
    """Writes its result to where it is told to."""

    def forward(self, x, out):
        hidden = self.mlp(x)
        out.copy_(hidden.detach())
        return x + hidden

    def call(self, x, world):
        out = world.setdefault("out", torch.zeros(x.shape))
        x = self(x, out)
        return x + 0.1 * out.mean()


class Accumulates(Kind):
    """Adds to a tensor of the whole forward, with its graph."""

    def forward(self, x, total):
        hidden = self.mlp(x)
        total.add_(hidden)
        return x + hidden

    def call(self, x, world):
        total = world.setdefault("total", x * 0)
        x = self(x, total)
        if self.__dict__.get("is_last"):
            x = x + 0.1 * total
        return x


class Streams(Kind):
    """A tensor of the whole forward, of which each block writes its row."""

    def forward(self, x, rows, index):
        hidden = self.mlp(x)
        rows[index] = hidden
        return x + hidden

    def call(self, x, world):
        rows = world.setdefault("rows", torch.zeros(NUM_BLOCKS, *x.shape))
        index = world["index"]
        x = self(x, rows, index)
        return x + 0.1 * rows[index]


class InThreads(Kind):
    def call(self, x, world):
        found = []
        thread = threading.Thread(target=lambda: found.append(self(x)))
        thread.start()
        thread.join()
        return found[0]


class WeightOutside(Kind):
    """Its weight is used by the model, too."""

    def call(self, x, world):
        world["losses"].append(1e-3 * self.up.weight.square().sum())
        return self(x)


class Penned(Kind):
    """Its loss is made within, by what is saved of a sum."""

    def forward(self, x):
        hidden = self.mlp(x)
        self.__dict__["aux"] = hidden.logsumexp(-1).square().mean()
        return x + hidden

    def call(self, x, world):
        x = self(x)
        world["losses"].append(1e-2 * self.__dict__.pop("aux"))
        return x


class TilesOfRows(Kind):
    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))
        in_tiles(self.inner, rows=24)

    def forward(self, x):
        return x + self.inner(self.norm(x)) + self.mlp(x)


class Heads(nn.Module):
    def __init__(self):
        super().__init__()
        self.head_dim = 16
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def forward(self, x):
        q, k, v = (p(x).unflatten(-1, (-1, 16)).transpose(1, 2) for p in (self.q_proj, self.k_proj, self.v_proj))
        return self.o_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class TilesOfHeads(Kind):
    def __init__(self):
        super().__init__()
        self.attention = Heads()
        attention_in_tiles(self.attention, tiles=2)

    def forward(self, x):
        return x + self.attention(self.norm(x)) + self.mlp(x)


BLOCKS: dict[str, type[Kind]] = {
    kind.__name__: kind for kind in list(globals().values()) if isinstance(kind, type) and issubclass(kind, Kind)
}
