"""Architectures that are not of ``transformers``: each has something that an engine can trip over."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from zoo.specimen import Batch, Specimen, tokens

_WIDTH = 48
_CLASSES = 10


class Convolutional(nn.Module):
    """Residual convolutions with batch norm: buffers that forward changes."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv2d(_WIDTH, _WIDTH, 3, padding=1, bias=False)
            self.norm = nn.BatchNorm2d(_WIDTH)

        def forward(self, x: Tensor) -> Tensor:
            return x + F.relu(self.norm(self.conv(x)))

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, _WIDTH, 3, stride=2)
        self.blocks = nn.Sequential(*(self.Block() for _ in range(4)))
        self.head = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.blocks(self.stem(x)).mean(dim=(2, 3)))


class Recurrent(nn.Module):
    """Two kinds of recurrent layers: they keep a second list of their own parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, _WIDTH)
        self.lstm = nn.LSTM(_WIDTH, _WIDTH, num_layers=2, bidirectional=True, dropout=0.1, batch_first=True)
        self.gru = nn.GRU(2 * _WIDTH, _WIDTH, batch_first=True)
        self.cell = nn.GRUCell(_WIDTH, _WIDTH)
        self.head = nn.Linear(_WIDTH, 99)

    def forward(self, x: Tensor) -> Tensor:
        x, _ = self.gru(self.lstm(self.embed(x))[0])
        state = torch.zeros_like(x[:, 0])
        states = []
        for moment in x.unbind(1):
            state = self.cell(moment, state)
            states.append(state)
        return self.head(torch.stack(states, 1))


class UNet(nn.Module):
    """Down and up again, with connections across: early outputs are used late."""

    def __init__(self) -> None:
        super().__init__()
        widths = [16, 32, 64]
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        pairs = list(pairwise(widths))
        self.down = nn.ModuleList(nn.Conv2d(a, b, 4, stride=2, padding=1) for a, b in pairs)
        self.norms = nn.ModuleList(nn.GroupNorm(4, b) for _, b in pairs)
        self.up = nn.ModuleList(nn.ConvTranspose2d(b, a, 4, stride=2, padding=1) for a, b in reversed(pairs))
        self.mix = nn.ModuleList(nn.Conv2d(2 * a, a, 3, padding=1) for a, _ in reversed(pairs))
        self.head = nn.Conv2d(widths[0], 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        across = []
        for down, norm in zip(self.down, self.norms, strict=True):
            across.append(x)
            x = F.silu(norm(down(x)))
        for up, mix in zip(self.up, self.mix, strict=True):
            x = mix(torch.cat([up(x), across.pop()], dim=1))
        return self.head(x)


class Graph(nn.Module):
    """Messages along the edges of a graph, gathered by index."""

    class Round(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.message = nn.Linear(2 * _WIDTH, _WIDTH)
            self.update = nn.GRUCell(_WIDTH, _WIDTH)

        def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
            source, target = edges
            messages = F.relu(self.message(torch.cat([nodes[source], nodes[target]], dim=-1)))
            return self.update(torch.zeros_like(nodes).index_add(0, target, messages), nodes)

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, _WIDTH)
        self.rounds = nn.ModuleList(self.Round() for _ in range(3))
        self.head = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, features: Tensor, edges: Tensor) -> Tensor:
        nodes = self.embed(features)
        for one in self.rounds:
            nodes = one(nodes, edges)
        return self.head(nodes)


class Mixer(nn.Module):
    """Perceptrons over patches and over channels, in turns."""

    class Block(nn.Module):
        def __init__(self, patches: int) -> None:
            super().__init__()
            self.norms = nn.ModuleList(nn.LayerNorm(_WIDTH) for _ in range(2))
            self.patches = nn.Sequential(nn.Linear(patches, 64), nn.GELU(), nn.Linear(64, patches))
            self.channels = nn.Sequential(nn.Linear(_WIDTH, 128), nn.GELU(), nn.Linear(128, _WIDTH))

        def forward(self, x: Tensor) -> Tensor:
            x = x + self.patches(self.norms[0](x).transpose(1, 2)).transpose(1, 2)
            return x + self.channels(self.norms[1](x))

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, _WIDTH, 8, stride=8)
        self.blocks = nn.ModuleList(self.Block(16) for _ in range(4))
        self.head = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class Variational(nn.Module):
    """An autoencoder that draws noise in the middle, and adds its own second loss."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Flatten(), nn.Linear(768, 64), nn.ReLU(), nn.Linear(64, 2 * 16))
        self.decoder = nn.Sequential(nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 768))

    def forward(self, x: Tensor) -> Tensor:
        mean, log_variance = self.encoder(x).chunk(2, dim=-1)
        drawn = mean + torch.randn_like(mean) * (log_variance / 2).exp()
        divergence = (mean.square() + log_variance.exp() - 1 - log_variance).mean() / 2
        return F.mse_loss(self.decoder(drawn), x.flatten(1)) + divergence


class Reparametrized(nn.Module):
    """Weights that are computed from parameters of another module, anew in every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = weight_norm(nn.Linear(32, 64))
        self.middle = nn.ModuleList(spectral_norm(nn.Linear(64, 64)) for _ in range(6))
        self.head = weight_norm(nn.Linear(64, _CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for layer in self.middle:
            x = F.relu(layer(x))
        return self.head(x)


class Recommender(nn.Module):
    """Large tables of which a step touches a few rows, summed in bags."""

    def __init__(self) -> None:
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(500, 16, mode="sum") for _ in range(4))
        self.top = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, _CLASSES))

    def forward(self, bags: Tensor) -> Tensor:
        return self.top(torch.cat([table(bags[:, i]) for i, table in enumerate(self.tables)], dim=-1))


class Flow(nn.Module):
    """Invertible couplings: every block returns a tuple, the loss needs all of the second parts."""

    class Coupling(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 32))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            kept, changed = x.chunk(2, dim=-1)
            scale, shift = self.net(kept).chunk(2, dim=-1)
            return torch.cat([changed * torch.tanh(scale).exp() + shift, kept], dim=-1), torch.tanh(scale).sum(-1)

    def __init__(self) -> None:
        super().__init__()
        self.couplings = nn.ModuleList(self.Coupling() for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        total = torch.zeros(len(x))
        for coupling in self.couplings:
            x, log_volume = coupling(x)
            total = total + log_volume
        return (x.square().sum(-1) / 2 - total).mean()


class Torchs(nn.Module):
    """``nn.Transformer``: its attention reads the weights of a child that is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(99, _WIDTH)
        self.body = nn.Transformer(_WIDTH, 4, 2, 2, 96, dropout=0.1, batch_first=True)
        self.head = nn.Linear(_WIDTH, 99)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(self.embed(x), self.embed(x.flip(1))))


class Integrated(nn.Module):
    """Blocks called eight times each in one forward, as the right-hand sides of differential equations."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(32, _WIDTH)
        self.rates = nn.ModuleList(
            nn.Sequential(nn.Linear(_WIDTH, 96), nn.Tanh(), nn.Linear(96, _WIDTH)) for _ in range(4)
        )
        self.head = nn.Linear(_WIDTH, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x)
        for rate in self.rates:
            for _ in range(8):
                x = x + rate(x) / 8
        return self.head(x)


class Generated(nn.Module):
    """One network writes the weights of another, which is called with them."""

    def __init__(self) -> None:
        super().__init__()
        self.code = nn.Parameter(torch.randn(8) / 4)
        self.writer = nn.Linear(8, 32 * _CLASSES)
        self.body = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(32, 32), nn.Tanh())))
        self.target = nn.Linear(32, _CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.target.weight + self.writer(self.code).view(_CLASSES, 32)
        return torch.func.functional_call(self.target, {"weight": weight}, (self.body(x),))


def _images(generator: torch.Generator) -> Batch:
    return {"x": torch.randn(4, 3, 32, 32, generator=generator)}


def _small_images(generator: torch.Generator) -> Batch:
    return {"x": torch.randn(4, 3, 16, 16, generator=generator)}


def _texts(generator: torch.Generator) -> Batch:
    return {"x": tokens(generator, 99)}


def _graphs(generator: torch.Generator) -> Batch:
    edges = torch.randint(0, 20, (2, 60), generator=generator)
    return {"features": torch.randn(20, 8, generator=generator), "edges": edges}


def _bags(generator: torch.Generator) -> Batch:
    return {"bags": torch.randint(0, 500, (4, 4, 3), generator=generator)}


def _points(generator: torch.Generator) -> Batch:
    return {"x": torch.randn(16, 32, generator=generator)}


def _surprise(output: Tensor) -> Tensor:
    """Cross-entropy against fixed classes, which is as good a loss as any."""
    flat = output.flatten(0, -2)
    return F.cross_entropy(flat, torch.arange(len(flat)) * 7 % flat.shape[-1])


def _square(output: Tensor) -> Tensor:
    return (output - 1).square().mean()


def _itself(output: Any) -> Tensor:
    return output


SPECIMENS = [
    Specimen("convolutional", "plain", Convolutional, _images, _surprise),
    Specimen("recurrent", "plain", Recurrent, _texts, _surprise),
    Specimen("u-net", "plain", UNet, _images, _square),
    Specimen("graph", "plain", Graph, _graphs, _surprise),
    Specimen("mixer", "plain", Mixer, _images, _surprise),
    Specimen("variational", "plain", Variational, _small_images, _itself),
    Specimen("reparametrized", "plain", Reparametrized, _points, _surprise),
    Specimen("recommender", "plain", Recommender, _bags, _surprise),
    Specimen("flow", "plain", Flow, _points, _itself),
    Specimen("nn.Transformer", "plain", Torchs, _texts, _surprise),
    Specimen("integrated", "plain", Integrated, _points, _surprise),
    Specimen("generated", "plain", Generated, _points, _surprise),
]
