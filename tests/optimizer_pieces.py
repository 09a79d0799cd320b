"""Pieces that optimizers are put together from: ``ALONE`` look at one parameter and at what is shared, ``TOGETHER``
need several parameters at once."""

import torch


class FromPieces(torch.optim.Optimizer):
    """SGD, with whatever else ``pieces`` do: functions of the optimizer, a group and its parameters with gradients."""

    def __init__(self, params, pieces=(), lr=0.1, **options):
        super().__init__(params, {"lr": lr, **options})
        self.pieces = pieces
        self.count = 0
        self.history = []
        self.scale = torch.ones(1)
        for piece in pieces:
            getattr(piece, "at_start", lambda optimizer: None)(self)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            factors = dict.fromkeys(params, 1.0)
            for piece in self.pieces:
                piece(self, group, params, factors)
            for p in params:
                p.sub_(p.grad, alpha=float(group["lr"] * factors[p]))
        for piece in self.pieces:
            getattr(piece, "at_end", lambda optimizer: None)(self)


# Pieces that look at one parameter, and at what is shared.


def group_counter(optimizer, group, params, factors):
    group["k"] = group.get("k", 0) + 1
    for p in params:
        factors[p] /= group["k"]


def group_tensor(optimizer, group, params, factors):
    group.setdefault("t", torch.zeros(())).add_(1)
    for p in params:
        factors[p] *= 1 + 0.1 * float(group["t"])


def decayed_sum(optimizer, group, params, factors):
    group["weight_sum"] = group.get("weight_sum", 0.0) + float(group["lr"]) ** 2
    for p in params:
        factors[p] *= 1 + group["weight_sum"]


def momentum(optimizer, group, params, factors):
    for p in params:
        state = optimizer.state[p]
        state["buffer"] = 0.9 * state.get("buffer", torch.zeros_like(p)) + p.grad
        p.grad.copy_(state["buffer"])


def nested_states(optimizer, group, params, factors):
    for p in params:
        state = optimizer.state[p]
        state.setdefault("sides", [torch.zeros(length) for length in p.shape])
        for dim, side in enumerate(state["sides"]):
            side.add_(p.grad.abs().sum([other for other in range(p.ndim) if other != dim]))
        p.grad.div_(1 + state["sides"][0].mean())


def late_state(optimizer, group, params, factors):
    for p in params:
        state = optimizer.state[p]
        state["n"] = state.get("n", 0) + 1
        if state["n"] == 2:
            state["kept"] = p.clone()
        if "kept" in state:
            p.lerp_(state["kept"], 0.1)


def own_norm(optimizer, group, params, factors):
    for p in params:
        factors[p] /= 1 + float(p.grad.norm())


def attribute_of_parameter(optimizer, group, params, factors):
    for p in params:
        factors[p] *= getattr(p, "lr_scale", 1.0)


def attribute_counter(optimizer, group, params, factors):
    for p in params:
        factors[p] /= 1 + optimizer.count


def _count(optimizer):
    optimizer.count += 1
    optimizer.history = [*optimizer.history[-2:], optimizer.count]
    optimizer.scale.mul_(0.5)


attribute_counter.at_end = _count


def entry_of_no_parameter(optimizer, group, params, factors):
    for p in params:
        factors[p] *= 1 + optimizer.state["all"].get("seen", 0)


def _see(optimizer):
    optimizer.state["all"]["seen"] = optimizer.state["all"].get("seen", 0) + 1


entry_of_no_parameter.at_end = _see


def masked(optimizer, group, params, factors):
    for p in params:
        p.grad.mul_(optimizer.state[p]["mask"])


def _make_masks(optimizer):
    for group in optimizer.param_groups:
        for p in group["params"]:
            optimizer.state[p]["mask"] = torch.ones_like(p).mul_(0.5)


masked.at_start = _make_masks


def every_second_time(optimizer, group, params, factors):
    for p in params:
        state = optimizer.state[p]
        if "before" in state:
            p.grad.add_(state.pop("before"))
        else:
            state["before"] = p.grad.clone()


ALONE = [
    masked,
    every_second_time,
    group_counter,
    group_tensor,
    decayed_sum,
    momentum,
    nested_states,
    late_state,
    own_norm,
    attribute_of_parameter,
    attribute_counter,
    entry_of_no_parameter,
]

# Pieces that need several parameters.


def norm_of_all(optimizer, group, params, factors):
    norm = sum(float(p.grad.square().sum()) for p in params) ** 0.5
    for p in params:
        factors[p] /= 1 + norm


def noise(optimizer, group, params, factors):
    for p in params:
        p.add_(torch.randn_like(p), alpha=0.01)


def own_noise(optimizer, group, params, factors):
    group.setdefault("generator", torch.Generator().manual_seed(0))
    for p in params:
        p.add_(torch.randn(p.shape, generator=group["generator"]), alpha=0.01)


def position(optimizer, group, params, factors):
    for index, p in enumerate(params):
        factors[p] *= 0.9**index


def counted_for_each_parameter(optimizer, group, params, factors):
    for _ in params:
        group["k"] = group.get("k", 0) + 1


def learnt_step_size(optimizer, group, params, factors):
    group["d"] = max(group.get("d", 1e-6), *(float(p.grad.abs().max()) for p in params)) if params else 1.0
    for p in params:
        factors[p] *= group["d"]


def states_in_group(optimizer, group, params, factors):
    group.setdefault("of", {}).update((p, 1) for p in params)


def kept_on_parameter(optimizer, group, params, factors):
    for p in params:
        p.seen = getattr(p, "seen", 0) + 1


def parameters_in_attribute(optimizer, group, params, factors):
    optimizer.params = params


def slowed_by_id(optimizer, group, params, factors):
    for p in params:
        factors[p] *= dict(optimizer.slowed).get(id(p), 1.0)


def _slow_the_first(optimizer):
    optimizer.slowed = ((id(optimizer.param_groups[0]["params"][0]), 0.5),)


slowed_by_id.at_start = _slow_the_first


class Packed(torch.Tensor):
    """A kind of tensor that a library keeps states in."""


def tensors_of_own_kind(optimizer, group, params, factors):
    for p in params:
        optimizer.state[p]["moment"] = torch.zeros_like(p).as_subclass(Packed)


TOGETHER = {
    tensors_of_own_kind: "keeps states in Packed",
    norm_of_all: "depended on the others",
    noise: "draws random numbers",
    own_noise: "generator|depended on the others",
    position: "depended on the others",
    counted_for_each_parameter: "option 'k' of group 0 depended on",
    learnt_step_size: "option 'd' of group 0 depended on",
    states_in_group: "keeps parameters, or states of them, in its group option 'of'",
    kept_on_parameter: "attribute of a parameter",
    slowed_by_id: r"knows parameters by their id\(\) in its attribute 'slowed'",
    parameters_in_attribute: "keeps parameters, or states of them, in its attribute 'params': .*group of their own",
}
