"""Models as they are built elsewhere: shared and generated weights, parametrizations, recurrent and graph networks,
implicit layers, and what a forward may take and give. The optimizer is torch's own arithmetic, so that bits are
compared."""

from __future__ import annotations

import collections
import functools
import math
import typing
from dataclasses import dataclass

import torch
from torch import nn
from torch.func import functional_call, jvp, stack_module_state, vmap
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from misuses.case import Family
from misuses.place import values
from misuses.strangers import WIDTH, Block, Exact, Net, batch, trained

family = Family("structures")


def same_bits(title, **options):
    return family.works(title, rtol=0.0, atol=0.0, **options)


class Chain(nn.Module):
    """Five modules of one kind, one after the other."""

    def __init__(self, make, count=5):
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make() for _ in range(count))

    def forward(self, x, *more):
        for block in self.blocks:
            x = block(x, *more)
        return x


def tokens(step, rows=4, length=8, vocab=WIDTH):
    return torch.randint(0, vocab, (rows, length), generator=torch.Generator().manual_seed(step))


def sequences(step, rows=4, length=6):
    return batch(step, rows * length).view(rows, length, WIDTH)


# Shared weights.


@same_bits("ALBERT: two groups of blocks, each of them used three times")
def shared_groups(place):
    class Shared(Net):
        def forward(self, x):
            for index in range(6):
                x = self.blocks[index // 3](x)
            return self.last(x)

    return trained(place, Shared())


@same_bits("T5: one embedding for encoder, decoder and head, which has a bias of its own and a scale")
def three_ties(place):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.shared = nn.Embedding(WIDTH, WIDTH)
            self.encoder, self.decoder = nn.Sequential(Block(), Block()), nn.Sequential(Block(), Block())
            self.encoder_embed = self.decoder_embed = self.shared
            self.head = nn.Linear(WIDTH, WIDTH)
            self.head.weight = self.shared.weight

        def forward(self, ids):
            memory = self.encoder(self.encoder_embed(ids)).mean(1, keepdim=True)
            return self.head(self.decoder(self.decoder_embed(ids) + memory) * WIDTH**-0.5)

    return trained(place, Tied(), data=tokens)


@same_bits("one LayerNorm is in all blocks, and another one is shared by pairs")
def shared_norms(place):
    net = Net()
    norms = [nn.LayerNorm(WIDTH) for _ in range(3)]
    for index, block in enumerate(net.blocks):
        block.norm, block.pair = norms[0], norms[1 + index % 2]
        block.forward = functools.partial(
            lambda block, x: x + block.down(block.pair(torch.tanh(block.up(block.norm(x))))), block
        )
    return trained(place, net)


@same_bits("a bias is shared by all layers, and the weights are not")
def shared_bias(place):
    net = Net()
    for block in net.blocks:
        block.up.bias = net.first.bias
        block.down.bias = net.first.bias
    return trained(place, net)


@same_bits("the weight is a property that gives another module's")
def weight_by_property(place):
    class Borrowing(nn.Module):
        def __init__(self, owner):
            super().__init__()
            object.__setattr__(self, "owner", owner)
            self.bias = nn.Parameter(torch.zeros(WIDTH))

        @property
        def weight(self):
            return self.owner.weight

        def forward(self, x):
            return F.linear(x, self.weight.t(), self.bias)

    net = Net()
    for block in net.blocks:
        block.down = Borrowing(block.up)
    return trained(place, net)


@same_bits("a module has two names, and its parent is one of its attributes")
def module_of_two_names(place):
    net = Net()
    net.backbone, net.stem = net.blocks, net.first
    for block in net.blocks:
        object.__setattr__(block, "parent", net)
        block.register_forward_hook(lambda block, inputs, output: output + 0.01 * block.parent.stem(output))
    return trained(place, net)


@same_bits("slimmable layers: slices of the weights, of another width in each step")
def slimmable(place):
    class Slim(Block):
        width = WIDTH

        def forward(self, x):
            hidden = F.linear(x, self.up.weight[: self.width], self.up.bias[: self.width])
            return x + F.linear(torch.tanh(hidden), self.down.weight[:, : self.width], self.down.bias)

    def call(model, x):
        outputs = []
        for width in (8, 20, WIDTH):
            Slim.width = width
            outputs.append(model(x))
        return torch.cat(outputs)

    return trained(place, Net(Slim), call=call)


@same_bits("slimmable layers whose width is an argument, and a table of widths that the model keeps")
def slimmable_by_argument(place):
    class Slim(Block):
        def forward(self, x, width):
            hidden = F.linear(x, self.up.weight[:width], self.up.bias[:width])
            return x + F.linear(torch.tanh(hidden), self.down.weight[:, :width], self.down.bias)

    class Widths(Net):
        widths = (8, 20, WIDTH)

        def forward(self, x):
            found = []
            for width in self.widths:
                y = self.first(x)
                for block in self.blocks:
                    y = block(y, width=width)
                found.append(self.last(y))
            return torch.stack(found)

    return trained(place, Widths(Slim))


@same_bits("a forward makes an `nn.Linear` and gives it the module's own parameters")
def layer_made_in_forward(place):
    class Making(Block):
        def forward(self, x):
            with torch.device("meta"):
                layer = nn.Linear(WIDTH, WIDTH)
            layer.weight, layer.bias = self.up.weight, self.down.bias
            return x + self.down(torch.tanh(layer(x)))

    return trained(place, Net(Making))


@same_bits("a `Sequential` is sliced in the forward")
def sliced_sequential(place):
    class Sliced(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.Sequential(*[Block() for _ in range(6)])

        def forward(self, x):
            early = self.layers[:3](x)
            return self.layers[3:](early) + self.layers[::2](early)

    return trained(place, Sliced())


# Generated weights and parametrizations.


@same_bits("a hypernetwork makes all weights of a target that has none of its own, by `functional_call`")
def hypernetwork_of_a_target(place):
    class Hyper(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(Block(), Block(), Block())
            self.target = nn.Sequential(nn.Linear(WIDTH, 4), nn.Tanh(), nn.Linear(4, 2)).requires_grad_(False)
            self.shapes = {name: p.shape for name, p in self.target.named_parameters()}
            self.make = nn.Linear(WIDTH, sum(shape.numel() for shape in self.shapes.values()))

        def forward(self, x):
            made = self.make(self.body(x)).mean(0)
            parts = made.split([shape.numel() for shape in self.shapes.values()])
            weights = {name: part.view(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
            return functional_call(self.target, weights, (x,))

    return trained(place, Hyper())


@same_bits("two parametrizations on one weight, and a value is assigned between steps (`right_inverse`)")
def stacked_parametrizations(place):
    class Softplus(nn.Module):
        def forward(self, w):
            return F.softplus(w)

        def right_inverse(self, w):
            return torch.log(torch.expm1(w))

    class Symmetric(nn.Module):
        def forward(self, w):
            return w.triu() + w.triu(1).transpose(-1, -2)

        def right_inverse(self, w):
            return w.triu()

    net = Net()
    for block in net.blocks:
        block.up.weight.data.abs_().add_(0.01)
        parametrize.register_parametrization(block.up, "weight", Symmetric(), unsafe=True)
        parametrize.register_parametrization(block.up, "weight", Softplus(), unsafe=True)

    def after(model, step):
        with torch.no_grad():
            model.blocks[step].up.weight = torch.full((WIDTH, WIDTH), 0.1)
        return model.blocks[0].up.weight.detach()

    return trained(place, net, after=after)


@same_bits("`weight_norm(dim=None)` on convolutions, `spectral_norm` with three iterations, in train and eval mode")
def norms_of_convolutions(place):
    def make():
        first = parametrizations.weight_norm(nn.Conv1d(4, 4, 3, padding=1), dim=None)
        second = parametrizations.spectral_norm(nn.Conv1d(4, 4, 3, padding=1), n_power_iterations=3)
        return nn.Sequential(first, nn.Tanh(), second)

    def after(model, step):
        model.eval()
        with torch.no_grad():
            found = model(batch(9).view(4, 4, 8))
        model.train()
        return found

    return trained(place, Chain(make), after=after, data=lambda step: batch(step).view(4, 4, 8))


@same_bits("orthogonal weights by `cayley`, `householder` and `matrix_exp`, with and without trivialization")
def orthogonal_maps(place):
    maps = [("cayley", True), ("householder", False), ("matrix_exp", True), ("matrix_exp", False), ("cayley", False)]
    net = Net()
    for block, (name, trivial) in zip(net.blocks, maps, strict=True):
        parametrizations.orthogonal(block.up, orthogonal_map=name, use_trivialization=trivial)
    return trained(place, net)


class LowRank(nn.Module):
    def __init__(self, rank=2):
        super().__init__()
        self.down = nn.Parameter(torch.randn(rank, WIDTH, generator=torch.Generator().manual_seed(5)))
        self.up = nn.Parameter(torch.zeros(WIDTH, rank))
        self.scale = 0.5

    def forward(self, weight):
        return weight + self.scale * self.up @ self.down


@same_bits("LoRA as a parametrization of a frozen weight, switched off for a reference, and removed in the end")
def lora_by_parametrization(place):
    net = Net()
    net.requires_grad_(False)
    for block in net.blocks:
        parametrize.register_parametrization(block.up, "weight", LowRank())

    def after(model, step):
        for block in model.blocks:
            block.up.parametrizations.weight[0].scale = 0.0
        with torch.no_grad():
            found = model(batch(9))
        for block in model.blocks:
            block.up.parametrizations.weight[0].scale = 0.5
        return found

    return trained(place, net, after=after)


@same_bits("DoRA: magnitude and direction of a frozen weight, with a norm that is detached")
def magnitude_and_direction(place):
    class Dora(Block):
        def __init__(self):
            super().__init__()
            self.requires_grad_(False)
            self.lora = LowRank()
            self.magnitude = nn.Parameter(self.up.weight.norm(dim=1))

        def forward(self, x):
            weight = self.lora(self.up.weight)
            weight = (self.magnitude / weight.norm(dim=1).detach())[:, None] * weight
            return x + self.down(torch.tanh(F.linear(x, weight, self.up.bias)))

    return trained(place, Net(Dora))


@same_bits("a Cholesky factor whose diagonal is made positive, in a Gaussian of the user's")
def cholesky_parameter(place):
    class Gaussian(nn.Module):
        def __init__(self):
            super().__init__()
            self.mean, self.raw = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.eye(WIDTH))

        def forward(self, x):
            factor = self.raw.tril(-1) + torch.diag(F.softplus(self.raw.diagonal()))
            law = torch.distributions.MultivariateNormal(self.mean, scale_tril=factor)
            return x + law.log_prob(x)[:, None] * 1e-2

    return trained(place, Chain(Gaussian))


@same_bits("low-rank, Kronecker and circulant weights")
def structured_weights(place):
    class Structured(nn.Module):
        def __init__(self):
            super().__init__()
            self.left, self.right = nn.Parameter(torch.randn(WIDTH, 3) / 9), nn.Parameter(torch.randn(3, WIDTH) / 9)
            self.a, self.b = nn.Parameter(torch.randn(4, 4) / 4), nn.Parameter(torch.randn(8, 8) / 4)
            self.ring = nn.Parameter(torch.randn(WIDTH) / 9)

        def forward(self, x):
            circle = torch.fft.irfft(torch.fft.rfft(x) * torch.fft.rfft(self.ring), n=WIDTH)
            return x @ self.left @ self.right + x @ torch.kron(self.a, self.b) + circle

    return trained(place, Chain(Structured))


# Containers and names.


@same_bits("`ParameterDict` and `ParameterList` inside of one another, iterated, indexed, with a key of a step")
def containers_of_parameters(place):
    class Held(nn.Module):
        def __init__(self):
            super().__init__()
            pieces = {f"p{i}": nn.ParameterList([torch.randn(WIDTH) / 9, torch.randn(WIDTH) / 9]) for i in range(3)}
            self.named = nn.ModuleDict(pieces)
            self.scales = nn.ParameterDict({"a": nn.Parameter(torch.ones(1)), "b": nn.Parameter(torch.ones(WIDTH))})
            self.step = 0

        def forward(self, x):
            self.step += 1
            for _, (scale, shift) in self.named.items():
                x = torch.tanh(x * (1 + scale) + shift)
            total = sum(p.sum() for p in self.scales.values()) * 1e-2
            return x * self.scales["ab"[self.step % 2]] + total

    return trained(place, Chain(Held), steps=4)


@same_bits("parameters of no dimension, of one element, and of none")
def smallest_parameters(place):
    class Smallest(Block):
        def __init__(self):
            super().__init__()
            self.gain, self.one = nn.Parameter(torch.tensor(0.5)), nn.Parameter(torch.ones(1, 1, 1))
            self.none = nn.Parameter(torch.zeros(0, WIDTH))

        def forward(self, x):
            return super().forward(torch.cat([x, self.none])) * self.gain + self.one.squeeze() * x

    return trained(place, Net(Smallest))


@same_bits("hundreds of parameters of one element, stacked in forward")
def many_small_parameters(place):
    class Many(nn.Module):
        def __init__(self):
            super().__init__()
            self.all = nn.ParameterList(nn.Parameter(torch.tensor(i / 99)) for i in range(WIDTH))

        def forward(self, x):
            return torch.tanh(x * torch.stack(list(self.all)))

    return trained(place, Chain(Many, 6))


@same_bits(
    "names that collide with methods: a parameter `data`, a module `grad`, a buffer `type`, one with a unicode name"
)
def odd_names(place):
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_parameter("data", nn.Parameter(torch.ones(WIDTH)))
            self.register_parameter("größe", nn.Parameter(torch.ones(WIDTH)))
            self.grad = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("shape", torch.ones(WIDTH))
            self.add_module("with space", nn.Linear(WIDTH, WIDTH))

        def forward(self, x):
            return self._modules["with space"](torch.tanh(self.grad(x * self.data))) * self.shape * self.größe

    return trained(place, Chain(Odd))


@same_bits("modules that are not registered: layers in an ordinary list, which nobody trains")
def layers_in_a_list(place):
    net = Net()
    torch.manual_seed(7)
    hidden = [nn.Linear(WIDTH, WIDTH) for _ in net.blocks]
    for block, layer in zip(net.blocks, hidden, strict=True):
        block.hidden = [layer]
        block.register_forward_hook(lambda block, inputs, output: output + block.hidden[0](output))

    def after(model, step):
        return [layer.weight.grad for layer in hidden], [layer.weight.detach() for layer in hidden]

    return trained(place, net, after=after)


@same_bits(
    "methods of the user's classes: `__getattr__`, `parameters` that leaves some out, `train` that keeps BatchNorm"
)
def overridden_methods(place):
    class Own(Net):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def __getattr__(self, name):
            try:
                return super().__getattr__(name)
            except AttributeError:
                return getattr(super().__getattr__("blocks")[0], name)

        def parameters(self, recurse=True):
            return (p for name, p in self.named_parameters() if not name.startswith("first"))

        def train(self, mode=True):
            super().train(mode)
            self.norm.eval()
            return self

        def forward(self, x):
            return super().forward(self.norm(x)) + self.down(x)

    def after(model, step):
        model.train()
        return model.norm.training, model.up.weight.detach()

    return trained(place, Own().train(), after=after)


@same_bits("`__call__` of a class is overridden, and `forward` has decorators with state")
def overridden_call(place):
    counts: collections.Counter[str] = collections.Counter()

    def counted(forward):
        @functools.wraps(forward)
        def run(self, *args, **kwargs):
            counts[type(self).__name__] += 1
            return forward(self, *args, **kwargs)

        return run

    class Own(Block):
        def __call__(self, x):
            return super().__call__(x * 1.01)

        @counted
        def forward(self, x):
            return super().forward(x)

    return trained(place, Net(Own), after=lambda model, step: counts["Own"])


# Statistics and buffers.


@same_bits("BatchNorm of all kinds: `momentum=None`, without statistics, InstanceNorm with them, frozen in some steps")
def kinds_of_batchnorm(place):
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Conv1d(4, 4, 3, padding=1)
            self.norms = nn.ModuleList(
                [
                    nn.BatchNorm1d(4, momentum=None),
                    nn.BatchNorm1d(4, track_running_stats=False),
                    nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
                    nn.GroupNorm(2, 4),
                ]
            )

        def forward(self, x):
            x = self.layer(x)
            for norm in self.norms:
                x = torch.tanh(norm(x))
            return x

    def after(model, step):
        for module in model.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.train(step % 2 == 1)

    return trained(place, Chain(Normed, 4), after=after, steps=4, data=lambda step: batch(step).view(4, 4, 8))


@same_bits("running quantiles and a histogram in buffers, one not persistent, one replaced in each forward")
def running_quantiles(place):
    class Quantiles(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("bounds", torch.tensor([-1.0, 1.0]))
            self.register_buffer("histogram", torch.zeros(8), persistent=False)
            self.register_buffer("latest", None)

        def forward(self, x):
            x = super().forward(x)
            if self.training:
                with torch.no_grad():
                    self.bounds.lerp_(torch.quantile(x.detach(), torch.tensor([0.1, 0.9])), 0.1)
                    self.histogram += torch.histc(x.detach(), 8, -3, 3)
                self.latest = x.detach().mean(0)
            return x.clamp(*self.bounds.tolist()) + 0.1 * x

    def after(model, step):
        model.eval()
        with torch.no_grad():
            found = model(batch(9))
        model.train()
        return found, sorted(model.state_dict())

    return trained(place, Net(Quantiles), after=after)


@same_bits("reversible instance normalisation: statistics are attributes from one call to the next, with gradients")
def reversible_instance_norm(place):
    class Rev(nn.Module):
        def __init__(self):
            super().__init__()
            self.gain, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))

        def forward(self, x, mode):
            if mode == "norm":
                self.mean, self.std = x.mean(1, keepdim=True), x.std(1, keepdim=True)
                return (x - self.mean) / self.std * self.gain + self.bias
            return (x - self.bias) / self.gain * self.std + self.mean

    class Forecast(Net):
        def __init__(self):
            super().__init__()
            self.rev = Rev()

        def forward(self, x):
            return self.rev(super().forward(self.rev(x, "norm")), "denorm")

    return trained(place, Forecast())


@same_bits("a rotary table grows in the forward when a sequence is longer, as a buffer that is not persistent")
def growing_rotary_table(place):
    class Rotary(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("table", torch.zeros(0, WIDTH), persistent=False)

        def forward(self, x):
            if len(self.table) < x.shape[1]:
                angles = torch.arange(x.shape[1])[:, None] / torch.arange(1, WIDTH + 1)
                self.register_buffer("table", angles.cos(), persistent=False)
            return super().forward(x * self.table[: x.shape[1]])

    return trained(place, Net(Rotary), data=lambda step: sequences(step, length=3 + 2 * step))


# Sequences.


@same_bits("bidirectional GRUs over packed sequences in any order of lengths")
def packed_gru(place):
    class Packed(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.GRU(WIDTH, WIDTH // 2, 2, batch_first=True, bidirectional=True)

        def forward(self, x: PackedSequence) -> PackedSequence:
            return self.rnn(x)[0]

    def call(model, x):
        packed = pack_padded_sequence(x, torch.tensor([3, 6, 1, 5]), batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(model(packed), batch_first=True)[0]

    return trained(place, Chain(Packed, 3), call=call, data=sequences)


@same_bits("`pack_sequence` through an LSTM with projections, states are handed from layer to layer")
def projected_lstm(place):
    class Projected(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.LSTM(WIDTH, 48, proj_size=WIDTH)

        def forward(self, x, state=None):
            return self.rnn(x, state)

    class Stack(Chain):
        def forward(self, x):
            state = None
            for block in self.blocks:
                x, state = block(x, state)
            return x.data

    def call(model, x):
        return model(pack_sequence([x[0], x[1, :4], x[2, :2]]))

    return trained(place, Stack(Projected), call=call, data=sequences)


@same_bits("`nn.RNN` with dropout between its layers and `relu`, and cells in a loop with teacher forcing")
def cells_in_a_loop(place):
    class Cells(nn.Module):
        def __init__(self):
            super().__init__()
            self.rnn = nn.RNN(WIDTH, WIDTH, 2, nonlinearity="relu", dropout=0.2, batch_first=True)
            self.cell, self.lstm = nn.GRUCell(WIDTH, WIDTH), nn.LSTMCell(WIDTH, WIDTH)

        def forward(self, x):
            x, _ = self.rnn(x)
            state, pair, found = x[:, 0], None, []
            for step in range(x.shape[1]):
                state = self.cell(x[:, step] if step % 2 else state, state)
                pair = self.lstm(state, pair)
                found.append(pair[0])
            return torch.stack(found, 1)

    def call(model, x):
        torch.manual_seed(3)
        return model(x)

    return trained(place, Chain(Cells, 3), call=call, data=sequences)


@same_bits("attention with masks, with keys of other widths, with `bias_k`, and weights of each head in the loss")
def kinds_of_attention(place):
    class Attending(nn.Module):
        def __init__(self):
            super().__init__()
            self.self_attention = nn.MultiheadAttention(WIDTH, 4, add_bias_kv=True, batch_first=True)
            self.cross = nn.MultiheadAttention(WIDTH, 2, kdim=8, vdim=16, batch_first=True)

        def forward(self, x):
            hidden = torch.zeros(x.shape[:2], dtype=torch.bool)
            hidden[:, -1] = True
            x = x + self.self_attention(x, x, x, key_padding_mask=hidden, need_weights=False)[0]
            mask = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
            y, weights = self.cross(x, x[..., :8], x[..., 8:24], attn_mask=mask, average_attn_weights=False)
            self.entropy = -(weights + 1e-6).log().mean()
            return x + y

    def penalty(model):
        return 0.01 * sum(block.entropy for block in model.blocks)

    return trained(place, Chain(Attending, 3), penalty=penalty, data=sequences)


@same_bits("`nn.Transformer` with encoder and decoder, norm first, and a causal mask")
def whole_transformer(place):
    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Transformer(WIDTH, 4, 2, 2, 64, dropout=0.0, batch_first=True, norm_first=True)

        def forward(self, x):
            mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1] - 1)
            return self.body(x[:, 1:], x[:, :-1], tgt_mask=mask, tgt_is_causal=True)

    return trained(place, Pair(), data=sequences)


@same_bits("bags of embeddings by offsets, with weights of each sample, padding, and three modes")
def bags_of_embeddings(place):
    class Bags(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.sum = nn.EmbeddingBag(WIDTH, WIDTH, mode="sum", padding_idx=3)
            self.mean = nn.EmbeddingBag(WIDTH, WIDTH, mode="mean")
            self.max = nn.EmbeddingBag(WIDTH, WIDTH, mode="max")
            self.body = nn.Sequential(Block(), Block(), Block())

        def forward(self, ids):
            flat, offsets = ids.flatten(), torch.tensor([0, 3, 3, 20])
            weighted = self.sum(flat, offsets, per_sample_weights=torch.linspace(0.1, 1, len(flat)))
            return self.body(weighted + self.mean(ids) + self.max(flat, offsets))

    return trained(place, Bags(), data=tokens)


@family.works(
    "sparse embeddings and bags with `torch.optim.SparseAdam` for them, and dense layers by another engine's AdamW"
)
def sparse_by_an_optimizer_of_its_own(place):
    class Sparse(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.table = nn.Embedding(WIDTH, WIDTH, sparse=True)
            self.bag = nn.EmbeddingBag(WIDTH, WIDTH, sparse=True, mode="sum")

        def forward(self, ids):
            return self.table(ids).sum(1) + self.bag(ids)

    tables, body = Sparse(), place.wrap(Net())
    sparse, found = torch.optim.SparseAdam(tables.parameters(), 1e-2), []
    for step in range(3):
        sparse.zero_grad()
        body.optimizer.zero_grad()
        loss = body(tables(tokens(step))).square().mean()
        loss.backward()
        sparse.step()
        body.optimizer.step()
        found.append(loss.item())
    return found, values(tables), values(body.module)


@same_bits("a state-space model: `-exp(A_log)`, a scan in a loop, a convolution over time, a gate")
def state_space(place):
    class Scan(nn.Module):
        def __init__(self):
            super().__init__()
            self.a_log = nn.Parameter(torch.log(torch.arange(1, 5).float()).repeat(WIDTH, 1))
            self.skip, self.project = nn.Parameter(torch.ones(WIDTH)), nn.Linear(WIDTH, WIDTH + 8)
            self.convolve = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)

        def forward(self, x):
            x = self.convolve(x.transpose(1, 2))[..., : x.shape[1]].transpose(1, 2)
            step, b, c = self.project(F.silu(x)).split([WIDTH, 4, 4], -1)
            decay = torch.exp(F.softplus(step)[..., None] * -torch.exp(self.a_log))
            state, found = x.new_zeros(x.shape[0], WIDTH, 4), []
            for t in range(x.shape[1]):
                state = decay[:, t] * state + b[:, t, None] * x[:, t, :, None]
                found.append((state * c[:, t, None]).sum(-1))
            return torch.stack(found, 1) + self.skip * x

    return trained(place, Chain(Scan, 3), data=sequences)


@same_bits("relative positions: a table of biases, indexed by an integer table, summed into the scores")
def relative_positions(place):
    class Relative(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
            self.table = nn.Parameter(torch.randn(15, 4, generator=torch.Generator().manual_seed(4)))
            where = torch.arange(8)
            self.register_buffer("index", where[:, None] - where[None, :] + 7)

        def forward(self, x):
            q, k, v = self.qkv(x).view(*x.shape[:2], 3, 4, 8).permute(2, 0, 3, 1, 4)
            length = x.shape[1]
            bias = self.table[self.index[:length, :length].reshape(-1)].view(length, length, 4).permute(2, 0, 1)
            x = x + self.out(F.scaled_dot_product_attention(q, k, v, attn_mask=bias).transpose(1, 2).flatten(2))
            return x

    return trained(place, Chain(Relative, 3), data=sequences)


# Convolutions and graphs.


@same_bits("a U-Net: strided and transposed convolutions, skips, `PixelShuffle`, depthwise and dilated layers")
def u_net(place):
    class Unet(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.stem = nn.Conv2d(1, 8, 3, padding=1)
            self.down = nn.ModuleList([nn.Conv2d(8, 16, 3, 2, 1), nn.Conv2d(16, 32, 3, 2, 1)])
            self.middle = nn.Sequential(nn.Conv2d(32, 32, 3, padding=2, dilation=2, groups=32), nn.Conv2d(32, 64, 1))
            self.shuffle = nn.PixelShuffle(2)
            self.up = nn.ModuleList([nn.Conv2d(32, 16, 3, padding=1), nn.ConvTranspose2d(32, 8, 2, 2)])
            self.out = nn.Conv2d(16, 1, 1)

        def forward(self, x):
            first = F.gelu(self.stem(x))
            second = F.gelu(self.down[0](first))
            third = F.gelu(self.down[1](second))
            x = self.shuffle(self.middle(third))
            x = torch.cat([self.up[0](torch.cat([x, x], 1)), second], 1)
            return self.out(torch.cat([self.up[1](x), first], 1))

    return trained(place, Unet(), data=lambda step: batch(step, 8).view(1, 1, 16, 16))


@same_bits("DenseNet: each block gets all outputs before it, and volumes of `Conv3d`")
def dense_net(place):
    class Dense(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.blocks = nn.ModuleList(nn.Conv3d(2 * (i + 1), 2, 3, padding=1) for i in range(5))

        def forward(self, x):
            found = [x]
            for block in self.blocks:
                found.append(torch.tanh(block(torch.cat(found, 1))))
            return torch.cat(found, 1)

    return trained(place, Dense(), data=lambda step: batch(step).view(1, 2, 4, 4, 4))


@same_bits("a graph network: messages by `index_add`, a sparse adjacency, attention by `scatter_reduce`")
def graph_network(place):
    generator = torch.Generator().manual_seed(2)
    source, target = torch.randint(0, 6, (2, 20), generator=generator)
    adjacency = torch.sparse_coo_tensor(torch.stack([target, source]), torch.ones(20), (6, 6)).coalesce() * 0.05

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.message, self.own = nn.Linear(2 * WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
            self.attention = nn.Parameter(torch.randn(WIDTH) / 9)

        def forward(self, x):
            sent = self.message(torch.cat([x[source], x[target]], 1))
            score = (torch.tanh(sent) @ self.attention).exp()
            total = torch.zeros(6).scatter_reduce(0, target, score, "sum")
            sent = sent * (score / total[target])[:, None]
            return self.own(torch.sparse.mm(adjacency, x)) + torch.zeros_like(x).index_add(0, target, sent)

    return trained(place, Chain(Layer, 4), data=lambda step: batch(step, 6))


@same_bits("Fourier operators: complex arithmetic over real parameters, `torch.view_as_complex`, `einsum`")
def fourier_operator(place):
    class Spectral(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight, self.point = nn.Parameter(torch.randn(4, 4, 3, 2) / 4), nn.Conv1d(4, 4, 1)

        def forward(self, x):
            modes = torch.fft.rfft(x)[..., :3]
            mixed = torch.einsum("bim,iom->bom", modes, torch.view_as_complex(self.weight))
            return torch.tanh(torch.fft.irfft(F.pad(mixed, (0, 2)), n=8) + self.point(x))

    return trained(place, Chain(Spectral), data=lambda step: batch(step).view(4, 4, 8))


@same_bits("a spatial transformer: the grid of `grid_sample` is learnt, and so is a table of features")
def spatial_transformer(place):
    class Warp(nn.Module):
        def __init__(self):
            super().__init__()
            self.where, self.table = nn.Linear(64, 6), nn.Parameter(torch.randn(1, 1, 8, 8))
            nn.init.zeros_(self.where.weight)
            self.where.bias.data.copy_(torch.tensor([1.0, 0, 0, 0, 1.0, 0]))

        def forward(self, x):
            grid = F.affine_grid(self.where(x.flatten(1)).view(-1, 2, 3), list(x.shape), align_corners=False)
            more = F.grid_sample(self.table.expand(len(x), -1, -1, -1), grid, align_corners=False)
            return F.grid_sample(x, grid, align_corners=False) + more

    return trained(place, Chain(Warp), data=lambda step: batch(step, 8).view(4, 1, 8, 8))


# Implicit layers and functions of the user's.


class Adjoint(torch.autograd.Function):
    """Steps of Euler; the gradients come from the equation backward in time."""

    @staticmethod
    def forward(ctx, function, x, *weights):
        ctx.function = function
        with torch.no_grad():
            for _ in range(4):
                x = x + 0.25 * function(x)
        ctx.save_for_backward(x, *weights)
        return x

    @staticmethod
    def backward(ctx, gradient):
        x, *weights = ctx.saved_tensors
        sums = [torch.zeros_like(w) for w in weights]
        for _ in range(4):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                slope = ctx.function(x)
                of_x, *of_weights = torch.autograd.grad(slope, (x, *weights), gradient)
            x = (x - 0.25 * slope).detach()
            gradient = gradient + 0.25 * of_x
            sums = [s + 0.25 * g for s, g in zip(sums, of_weights, strict=True)]
        return None, gradient, *sums


@same_bits("a neural ODE with the adjoint method: a Function gets all parameters, and differentiates in its backward")
def adjoint_method(place):
    class Flow(Block):
        def forward(self, x):
            return Adjoint.apply(super().forward, x, *self.parameters())

    return trained(place, Net(Flow))


@same_bits("the adjoint method from outside: the whole model is the function, its parameters are given by the caller")
def adjoint_from_outside(place):
    def call(model, x):
        return Adjoint.apply(model, x, *model.parameters())

    return trained(place, Net(), call=call)


@same_bits("deep equilibrium: a fixed point without gradients, and a hook that solves for the backward")
def equilibrium_with_a_hook(place):
    class Equilibrium(Block):
        def forward(self, x):
            def function(z):
                return 0.5 * torch.tanh(self.down(torch.tanh(self.up(z))) + x)

            with torch.no_grad():
                z = torch.zeros_like(x)
                for _ in range(8):
                    z = function(z)
            z = function(z)
            if torch.is_grad_enabled():
                start = z.detach().requires_grad_()
                value = function(start)

                def solve(gradient):
                    g = gradient
                    for _ in range(6):
                        g = torch.autograd.grad(value, start, g, retain_graph=True)[0] + gradient
                    return g

                z.register_hook(solve)
            return z

    return trained(place, Net(Equilibrium))


class Reverse(torch.autograd.Function):
    """A reversible block keeps its output alone."""

    @staticmethod
    def forward(ctx, x, first, second):
        ctx.first, ctx.second = first, second
        with torch.no_grad():
            a, b = x.chunk(2, -1)
            a = a + first(b)
            b = b + second(a)
        ctx.output = torch.cat([a, b], -1).detach()
        return ctx.output.clone()

    @staticmethod
    def backward(ctx, gradient):
        a, b = ctx.output.chunk(2, -1)
        da, db = gradient.chunk(2, -1)
        with torch.enable_grad():
            a = a.detach().requires_grad_()
            more = ctx.second(a)
            more.backward(db)
        da, b = da + a.grad, (b - more).detach()
        with torch.enable_grad():
            b = b.requires_grad_()
            more = ctx.first(b)
            more.backward(da)
        return torch.cat([da, db + b.grad], -1), None, None


@same_bits("reversible blocks: a Function computes its input again and calls backward in its backward")
def reversible_blocks(place):
    class Reversible(nn.Module):
        def __init__(self):
            super().__init__()
            half = WIDTH // 2
            self.first = nn.Sequential(nn.Linear(half, half), nn.Tanh())
            self.second = nn.Sequential(nn.Linear(half, half), nn.Tanh())

        def forward(self, x):
            return Reverse.apply(x, self.first, self.second)

    class Around(Net):
        def forward(self, x):
            return super().forward(x)

    return trained(place, Around(Reversible))


@same_bits("synthetic gradients: a layer predicts the gradient of its input, which goes backward at once")
def synthetic_gradients(place):
    engine = place.wrap(Net(), optimizer=Exact, lr=0.05)
    model = engine.module
    for step in range(3):
        engine.optimizer.zero_grad()
        hidden = model.first(batch(step))
        for block in model.blocks[:2]:
            hidden = block(hidden)
        guess = model.blocks[4](hidden.detach())
        hidden.backward(guess.detach())
        top = hidden.detach().requires_grad_()
        model.last(model.blocks[2](top)).square().mean().backward()
        (guess - top.grad).square().mean().backward()
        engine.optimizer.step()
    return values(model)


@same_bits("`torch.func.jvp` in a block's forward: a derivative along a direction in the output")
def derivative_in_forward(place):
    class Along(Block):
        def forward(self, x):
            value, slope = jvp(lambda z: torch.tanh(self.up(z)), (x,), (torch.ones_like(x),))
            return x + self.down(value + 0.1 * slope)

    return trained(place, Net(Along))


@same_bits("an ensemble whose stacked weights are the parameters: `vmap` over `functional_call` in the forward")
def ensemble_in_a_module(place):
    class Ensemble(nn.Module):
        def __init__(self):
            super().__init__()
            members = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)]
            stacked, _ = stack_module_state(members)
            self.base = [members[0].to("meta")]
            self.names = list(stacked)
            self.stacked = nn.ParameterList(nn.Parameter(value.detach().clone()) for value in stacked.values())

        def forward(self, x):
            weights = dict(zip(self.names, self.stacked, strict=True))
            return vmap(lambda w: functional_call(self.base[0], w, (x,)))(weights).mean(0)

    return trained(place, Chain(Ensemble, 4))


@family.works("checkpoints inside of checkpoints, with keyword arguments, dropout, and a weight of another block")
def nested_checkpoints(place):
    def call(model, x):
        def inner(x, *, block, scale):
            return block(F.dropout(x, 0.1)) * scale + F.linear(x, model.last.weight)

        def outer(x):
            for block in model.blocks[:3]:
                x = checkpoint(inner, x, block=block, scale=0.5, use_reentrant=False)
            return x

        torch.manual_seed(5)
        x = checkpoint(outer, model.first(x), use_reentrant=False)
        return model.last(checkpoint(model.blocks[3], x, use_reentrant=False, preserve_rng_state=False))

    return trained(place, Net(), call=call)


@same_bits("`checkpoint_wrapper` of torch.distributed around blocks, before wrapping")
def checkpoint_wrappers(place):
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing

    net = Net()
    apply_activation_checkpointing(net, check_fn=lambda module: isinstance(module, Block))
    return trained(place, net)


@same_bits("a function of `torch.jit.script` gets weights in a block's forward")
def scripted_function(place):
    @torch.jit.script
    def act(x, weight, bias):
        return torch.tanh(torch.nn.functional.linear(x, weight, bias)) * 0.5

    class Scripted(Block):
        def forward(self, x):
            return x + act(torch.tanh(self.up(x)), self.down.weight, self.down.bias)

    return trained(place, Net(Scripted))


# What a forward takes and gives.


class Pair(typing.NamedTuple):
    value: torch.Tensor
    extra: dict[str, torch.Tensor]


@dataclass
class Holder:
    inner: Pair
    loss: torch.Tensor | None = None


@same_bits("blocks take keyword arguments alone, and give named tuples within dataclasses")
def keywords_and_named_tuples(place):
    class Keyword(Block):
        def forward(self, *, state: Holder, scale: float = 1.0, mask: torch.Tensor | None = None) -> Holder:
            value = super().forward(state.inner.value) * scale
            if mask is not None:
                value = value * mask
            loss = value.square().mean() if state.loss is None else state.loss + value.square().mean()
            return Holder(Pair(value, {**state.inner.extra, str(len(state.inner.extra)): value.mean(1)}), loss)

    class Outer(Net):
        def forward(self, x):
            state = Holder(Pair(self.first(x), {}))
            for index, block in enumerate(self.blocks):
                state = block(state=state, scale=0.9, mask=(x > 0).float() if index % 2 else None)
            return torch.cat([self.last(state.inner.value).flatten(), *state.inner.extra.values(), state.loss[None]])

    return trained(place, Outer(Keyword))


@same_bits("a model returns itself, and the loss is an attribute with a graph")
def model_returns_itself(place):
    class Fluent(Net):
        def forward(self, x):
            self.result = super().forward(x)
            return self

    return trained(place, Fluent(), call=lambda model, x: model(x).result)


@same_bits("a model returns None, losses are in a list that a context manager gathers")
def losses_in_a_list(place):
    gathered: list[torch.Tensor] = []

    class Quiet(Block):
        def forward(self, x):
            x = super().forward(x)
            gathered.append(x.square().mean())
            return x

    def call(model, x):
        gathered.clear()
        model(x)
        return torch.stack(gathered).sqrt()

    return trained(place, Net(Quiet), call=call)


@same_bits("blocks write into a tensor that the caller made, in slices, and give nothing")
def written_output(place):
    class Writing(Block):
        def forward(self, x, out, index):
            out[index] = super().forward(x)

    class Outer(Net):
        def forward(self, x):
            out = x.new_zeros(len(self.blocks), *x.shape)
            for index, block in enumerate(self.blocks):
                block(self.first(x), out, index)
            return self.last(out)

    return trained(place, Outer(Writing))


@same_bits("an input that is used in place: `x += block(x)`, `x.mul_`, `x[:, :4] = 0` between blocks")
def in_place_between_blocks(place):
    class Plain(Block):
        def forward(self, x):
            return self.down(torch.tanh(self.up(x)))

    def call(model, x):
        x = model.first(x) * 1.0
        for block in model.blocks:
            more = block(x.clone())
            more.mul_(0.5)[:, :4] = 0
            x = x.add_(more)
        return model.last(x)

    return trained(place, Net(Plain), call=call)


@same_bits("outputs of a block are views of its input, of a chunk, and of an expanded parameter")
def views_as_outputs(place):
    class Prompted(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.prompt = nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.randn(1, 1, WIDTH) / 9)

        def forward(self, x):
            x = torch.cat([self.prompt.expand(len(x), 2, -1), torch.tanh(self.layer(x))], 1)
            left, right = x.chunk(2, dim=1)
            return left.transpose(0, 1).transpose(0, 1) + right

    return trained(place, Chain(Prompted, 3), data=lambda step: sequences(step, length=10))


@same_bits("an exit that depends on the data: blocks are used as often as the norm says")
def data_dependent_depth(place):
    def call(model, x):
        x, count = model.first(x), 0
        while x.norm() < 12 + count and count < 8:
            x = model.blocks[count % len(model.blocks)](x) * 1.3
            count += 1
        return model.last(x) * count

    return trained(place, Net(), call=call, steps=4)


@same_bits("a nested tensor of jagged rows through linear layers and a norm")
def nested_tensors(place):
    class Jagged(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(WIDTH, WIDTH)

        def forward(self, x):
            return self.layer(x) * 0.5 + x

    def call(model, x):
        nested = torch.nested.nested_tensor([x[0, :3], x[1], x[2, :1]], layout=torch.jagged)
        return model(nested).values()

    return trained(place, Chain(Jagged), call=call, data=sequences)


@same_bits("weights of a mixture over layers (ELMo), Gumbel choices and a differentiable architecture, in two groups")
def architecture_search(place):
    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.choices = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Identity(), Block()])
            self.alpha = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            weights = F.gumbel_softmax(self.alpha, hard=True)
            return sum(w * choice(x) for w, choice in zip(weights, self.choices, strict=True))

    net = Chain(Cell, 4)
    groups = [
        {"params": [p for n, p in net.named_parameters() if "alpha" in n], "lr": 0.5},
        {"params": [p for n, p in net.named_parameters() if "alpha" not in n]},
    ]
    engine = place.wrap(net, optimizer=Exact(groups, 0.05))
    for step in range(4):
        engine.optimizer.zero_grad()
        torch.manual_seed(step)
        for p in groups[step % 2]["params"]:
            p.requires_grad_(False)
        engine(batch(step)).square().mean().backward()
        for p in groups[step % 2]["params"]:
            p.requires_grad_(True)
        engine.optimizer.step()
    return values(net)


@same_bits("adaptive softmax, `nn.Bilinear`, `nn.PReLU` and a CTC loss")
def rare_layers(place):
    class Rare(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.body = nn.Sequential(Block(), nn.PReLU(WIDTH), Block(), nn.RReLU(), Block())
            self.pair = nn.Bilinear(WIDTH, WIDTH, 8)
            self.softmax = nn.AdaptiveLogSoftmaxWithLoss(WIDTH, 20, [4, 10], div_value=2.0)

        def forward(self, x):
            x = self.body(x)
            logits = self.pair(x, x.flip(0)).log_softmax(-1).unsqueeze(1).expand(-1, 2, -1)
            lengths = torch.tensor([4, 4])
            ctc = F.ctc_loss(logits, torch.tensor([[1, 2], [3, 4]]), lengths, torch.tensor([2, 1]))
            return (ctc + self.softmax(x, torch.tensor([0, 5, 12, 19])).loss).sqrt()

    return trained(place, Rare())


@same_bits("SIREN and a grid of splines that is moved by the data between steps (KAN)")
def moved_splines(place):
    class Spline(nn.Module):
        def __init__(self):
            super().__init__()
            self.coefficients = nn.Parameter(torch.randn(WIDTH, 5) / 9)
            self.first = nn.Linear(WIDTH, WIDTH)
            nn.init.uniform_(self.first.weight, -math.sqrt(6 / WIDTH) / 3, math.sqrt(6 / WIDTH) / 3)
            self.register_buffer("grid", torch.linspace(-1, 1, 5))

        def forward(self, x):
            x = torch.sin(3 * self.first(x))
            self.seen = x.detach()
            return (torch.exp(-(x[..., None] - self.grid).square()) * self.coefficients).sum(-1) + x

    def after(model, step):
        with torch.no_grad():
            for block in model.blocks:
                block.grid.copy_(block.seen.quantile(torch.linspace(0, 1, 5)))
                block.coefficients.copy_(block.coefficients.roll(1, 1))

    return trained(place, Chain(Spline), after=after)


# The same blocks, recomputed: what a backward asks for may lie behind something else than the outputs.


def recomputed(body):
    """The case, with ``activations="recompute"`` in the engine."""

    def case(place):
        wrap = place.wrap
        options = {"activations": "recompute"} if place.has_engine else {}
        place.wrap = functools.partial(wrap, **options)
        return body(place)

    return case


for _body in (
    equilibrium_with_a_hook,
    keywords_and_named_tuples,
    losses_in_a_list,
    kinds_of_attention,
    reversible_instance_norm,
    adjoint_method,
    reversible_blocks,
    derivative_in_forward,
    shared_groups,
    slimmable_by_argument,
    views_as_outputs,
    architecture_search,
):
    _case = recomputed(_body)
    _case.__name__ = f"{_body.__name__}_recomputed"
    _title = next(case.title for case in family.cases if case.name == _body.__name__)
    same_bits(f"{_title} (recomputed)")(_case)
