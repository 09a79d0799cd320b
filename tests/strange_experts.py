"""Mixtures of experts as programs of others have them: many ways to route, to hold and to use the weights."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

WIDTH, COUNT, INNER = 48, 6, 56


class Expert(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, INNER)
        self.down = nn.Linear(INNER, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Layer(nn.Module):
    """A norm and a gate around what ``mix`` makes of tokens and of the gate's numbers."""

    def __init__(self, experts: nn.Module, mix: Callable[[Any, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, COUNT, bias=False)
        self.experts = experts
        self._mix = mix

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.norm(x).reshape(-1, WIDTH)
        return x + self._mix(self.experts, tokens, self.gate(tokens).softmax(-1)).view(x.shape)


class Net(nn.Module):
    def __init__(self, *layers: nn.Module, again: int = 1, checkpointed: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, WIDTH)
        self.layers = nn.ModuleList(layers)
        self.head = nn.Linear(WIDTH, 50)
        self._again, self._checkpointed = again, checkpointed

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for layer in [*self.layers] * self._again:
            x = checkpoint(layer, x, use_reentrant=False) if self._checkpointed else layer(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), tokens.flatten())


def a_list() -> nn.Module:
    return nn.ModuleList(Expert() for _ in range(COUNT))


class ByName(nn.ModuleDict):
    """Experts by name, as the models have them that came first."""

    def __init__(self) -> None:
        super().__init__({f"expert_{number}": Expert() for number in range(COUNT)})

    def __getitem__(self, number: Any) -> nn.Module:
        return super().__getitem__(number if isinstance(number, str) else f"expert_{number}")


class Fused(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(COUNT, 2 * INNER, WIDTH) * 0.1)
        self.down = nn.Parameter(torch.randn(COUNT, WIDTH, INNER) * 0.1)
        self.bias = nn.Parameter(torch.zeros(COUNT, WIDTH))

    def __getitem__(self, number: int) -> Callable[[Tensor], Tensor]:
        return lambda x: self.of(x, self.up[number], self.down[number], self.bias[number])

    def of(self, x: Tensor, up: Tensor, down: Tensor, bias: Tensor) -> Tensor:
        gate, value = F.linear(x, up).chunk(2, -1)
        return F.linear(F.silu(gate) * value, down, bias)


class ParallelExperts(nn.Module):
    """One weight of all experts, in a module of its own that is called after its class alone."""

    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(COUNT, rows, columns) * 0.1)

    def forward(self, x: Tensor, sizes: list[int]) -> Tensor:
        return torch.cat([F.linear(part, self.weight[number]) for number, part in enumerate(x.split(sizes))])


class Parallel(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = ParallelExperts(INNER, WIDTH), ParallelExperts(WIDTH, INNER)


def best(experts: Any, tokens: Tensor, gates: Tensor) -> Tensor:
    weights, chosen = gates.max(-1)
    out = torch.zeros_like(tokens)
    for number in chosen.unique().tolist():
        mine = chosen == number
        out[mine] = experts[number](tokens[mine]) * weights[mine, None]
    return out


def best_two_of_a_capacity(experts: Any, tokens: Tensor, gates: Tensor) -> Tensor:
    """Tokens beyond the capacity are dropped; experts without any are called with none."""
    weights, chosen = gates.topk(2, -1)
    out = torch.zeros_like(tokens)
    for number in range(COUNT):
        rows, places = (chosen == number).nonzero()[:4].unbind(-1)
        out = out.index_add(0, rows, experts[number](tokens[rows]) * weights[rows, places, None])
    return out


def experts_choose(experts: Any, tokens: Tensor, gates: Tensor) -> Tensor:
    weights, chosen = gates.t().topk(3, -1)
    out = torch.zeros_like(tokens)
    for number in range(COUNT):
        out = out.index_add(0, chosen[number], experts[number](tokens[chosen[number]]) * weights[number, :, None])
    return out


def soft(experts: Any, tokens: Tensor, gates: Tensor) -> Tensor:
    slots = gates.softmax(0).t() @ tokens
    return gates @ torch.cat([experts[number](slots[number : number + 1]) for number in range(COUNT)])


def all_but_half(experts: Any, tokens: Tensor, gates: Tensor) -> Tensor:
    """Half of the experts are never chosen."""
    return best(experts, tokens, gates[:, : COUNT // 2])


def stacked(experts: Any, tokens: Tensor, gates: Tensor) -> Tensor:
    up, down = (torch.stack([getattr(expert, name).weight for expert in experts]) for name in ("up", "down"))
    hidden = F.gelu(torch.bmm(tokens.expand(COUNT, *tokens.shape), up.transpose(1, 2)))
    return torch.einsum("ne,enw->nw", gates, torch.bmm(hidden, down.transpose(1, 2)))


def row_of_each_token(experts: Fused, tokens: Tensor, gates: Tensor) -> Tensor:
    chosen = gates.argmax(-1)
    gate, value = torch.einsum("nw,nhw->nh", tokens, experts.up[chosen]).chunk(2, -1)
    return torch.einsum("nh,nwh->nw", F.silu(gate) * value, experts.down[chosen]) + experts.bias[chosen]


def unbound(experts: Fused, tokens: Tensor, gates: Tensor) -> Tensor:
    rows = zip(experts.up.unbind(), experts.down, experts.bias.unbind(0), strict=True)
    return sum(experts.of(tokens, *row) * gates[:, number : number + 1] for number, row in enumerate(rows))  # type: ignore[return-value]


def of_sizes(experts: Parallel, tokens: Tensor, gates: Tensor) -> Tensor:
    weights, chosen = gates.max(-1)
    order = chosen.argsort(stable=True)
    sizes = torch.bincount(chosen, minlength=COUNT).tolist()
    done = experts.out(F.gelu(experts.into(tokens[order], sizes)), sizes) * weights[order, None]
    return torch.zeros_like(tokens).index_copy(0, order, done)


def tied() -> Net:
    experts = a_list()
    return Net(Layer(experts, best), Layer(experts, best))


def adapted_by_hand() -> Net:
    """Experts of one layer are frozen, and some of the weights of the other one."""
    net = Net(Layer(Fused(), best), Layer(Fused(), best))
    net.layers[0].requires_grad_(False)
    net.layers[1].experts.up.requires_grad_(False)  # type: ignore[union-attr, operator]
    return net


def half_detached(experts: Any, tokens: Tensor, gates: Tensor) -> Tensor:
    """Rows of experts are used once with a gradient and once without."""
    return best(experts, tokens, gates) + 0.1 * tokens @ experts.down[0].detach() @ experts.up[1].data[:INNER]


PROGRAMS: dict[str, Callable[[], Net]] = {
    "capacity": lambda: Net(Layer(a_list(), best_two_of_a_capacity)),
    "experts choose": lambda: Net(Layer(a_list(), experts_choose)),
    "soft": lambda: Net(Layer(a_list(), soft)),
    "half of them never": lambda: Net(Layer(a_list(), all_but_half)),
    "stacked": lambda: Net(Layer(a_list(), stacked)),
    "by name": lambda: Net(Layer(ByName(), best)),
    "tied": tied,
    "fused, capacity": lambda: Net(Layer(Fused(), best_two_of_a_capacity)),
    "fused, a row of each token": lambda: Net(Layer(Fused(), row_of_each_token)),
    "fused, unbound": lambda: Net(Layer(Fused(), unbound)),
    "fused, rows detached": lambda: Net(Layer(Fused(), half_detached)),
    "fused, three times": lambda: Net(Layer(Fused(), best), again=3),
    "fused, checkpointed": lambda: Net(Layer(Fused(), best), checkpointed=True),
    "fused, half of them never": lambda: Net(Layer(Fused(), all_but_half)),
    "named by a class": lambda: Net(Layer(Parallel(), of_sizes)),
    "partly frozen": adapted_by_hand,
}
