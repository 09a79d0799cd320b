"""Where the engine might give copies: arguments, gradients and parameters that a program keeps and changes."""

import torch
import torch.nn.functional as F
from torch import nn

from misuses.case import Family
from misuses.place import gradients, losses, small, train, values

family = Family("objects")


# Arguments, and attributes of the engine.


class _Auxiliary(nn.Module):
    """Blocks that put an auxiliary loss into a list of the caller's, and their output into a dict."""

    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(5))
        self.temperature = 1.0

    def forward(self, x, auxiliary=None, cache=None):
        for index, block in enumerate(self.blocks):
            x = torch.tanh(block(x)) / self.temperature
            if auxiliary is not None:
                auxiliary.append(x.pow(2).mean())
            if cache is not None:
                cache[index] = cache.get(index, 0) + x
        return x


def _auxiliary(place, **options):
    torch.manual_seed(0)
    return place.wrap(_Auxiliary(), **options)


@family.works("`engine(x, losses)` of a model that appends its auxiliary losses to the list")
def list_appended_to(place):
    engine = _auxiliary(place)
    for _ in range(3):
        auxiliary = []
        out = engine(torch.ones(2, 16), auxiliary)
        engine.backward(out.mean() + sum(auxiliary))
        engine.step()
    return len(auxiliary), values(engine.module)


@family.works("a cache that is given as a dict, in a list, is filled by the model and given again")
def cache_filled(place):
    engine = _auxiliary(place)
    cache = {}
    with torch.no_grad():
        for _ in range(2):
            out = engine(torch.ones(2, 16), cache=cache)
    return out, cache


class _Clock(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(2, 4)

    def forward(self, seconds):
        phase = (seconds / 86400.0) % 1.0
        return self.linear(torch.stack([phase.sin(), phase.cos()], -1).float())


@family.works("timestamps in float64 as arguments")
def float64_arguments(place):
    torch.manual_seed(0)
    engine = place.wrap(_Clock())
    return engine(1.7e9 + torch.arange(5, dtype=torch.float64) * 3600), engine(torch.tensor([1e9 + 0.5]).double())


@family.refused("`engine.temperature = 0.1` of an attribute of the model", r"engine\.module\.temperature")
def attribute_of_the_model_set(place):
    engine = _auxiliary(place)
    if not place.has_engine:
        engine = engine.module
    engine.temperature = 0.1
    return engine(torch.ones(2, 16))


@family.refused("a method of the model's own is called on the engine", r"engine\.module\.generate")
def method_of_the_model(place):
    model = nn.Linear(2, 2)
    model.generate = lambda x: model(x).argmax(-1)
    engine = place.wrap(model)
    return (engine if place.has_engine else engine.module).generate(torch.ones(1, 2))


# Gradients.


def _step_with(place, change, steps=2, **options):
    engine = place.small(**options)
    for loss in losses(engine, steps, engine.module):
        engine.optimizer.zero_grad()
        loss.backward()
        change(engine.module)
        engine.optimizer.step()
    return values(engine.module)


@family.works("the gradients of two weights are swapped")
def gradients_swapped(place):
    def swap(model):
        p, q = model.blocks[0].up.weight, model.blocks[5].up.weight
        p.grad, q.grad = q.grad, p.grad

    return _step_with(place, swap)


@family.works("gradients of one loss are kept, set to None, and those of another one added (gradient surgery)")
def gradients_kept_and_dropped(place):
    engine = place.small()
    parameters = list(engine.module.parameters())
    first, second = losses(engine, 2, engine.module)
    first.backward()
    kept = [p.grad for p in parameters]
    for p in parameters:
        p.grad = None
    second.backward()
    for p, g in zip(parameters, kept, strict=True):
        p.grad.add_(g, alpha=0.5)
    engine.optimizer.step()
    return [g.norm() for g in kept], values(engine.module)


@family.works("gradients are kept over `zero_grad()`")
def gradients_kept_over_zero_grad(place):
    engine = place.small()
    first, second = losses(engine, 2, engine.module)
    first.backward()
    kept = [p.grad for p in engine.module.parameters()]
    engine.optimizer.zero_grad()
    second.backward()
    return [g.clone() for g in kept], gradients(engine.module)


@family.works("`p.grad = g; g.mul_(s)`")
def assigned_and_scaled(place):
    def change(model):
        kept = []
        for p in model.parameters():
            g = torch.full_like(p, 1e-2)
            p.grad = g
            kept.append(g)
        for index, g in enumerate(kept):
            g.mul_(1 + index)

    return _step_with(place, change)


@family.works("`p.grad = g`, then `p.grad is g`, and backward adds to it")
def assigned_and_added_to(place):
    engine = place.small()
    kept = {}
    for name, p in engine.module.named_parameters():
        kept[name] = p.grad = torch.full_like(p, 1e-3)
    same = [p.grad is kept[name] for name, p in engine.module.named_parameters()]
    next(losses(engine, 1, engine.module)).backward()
    return same, {name: g.clone() for name, g in kept.items()}


@family.works("gradients are views of one flat bucket, which is scaled and zeroed")
def flat_bucket(place):
    engine = place.small()
    parameters = list(engine.module.parameters())
    flat = torch.zeros(sum(p.numel() for p in parameters))
    start = 0
    for p in parameters:
        p.grad = flat[start : start + p.numel()].view_as(p)
        start += p.numel()
    norms = []
    for loss in losses(engine, 3, engine.module):
        loss.backward()
        norms.append(flat.norm().item())
        flat.mul_(0.5)
        engine.optimizer.step()
        flat.zero_()
    return norms, values(engine.module)


@family.works("a gradient is scaled by a tensor whose number is changed through `.data`")
def scaled_by_data(place):
    scale = torch.ones(())

    def change(model):
        for index, p in enumerate(model.parameters()):
            scale.data.fill_(1.0 + index / 10)
            p.grad.mul_(scale)

    return _step_with(place, change, optimizer="sgd", lr=0.1)


@family.works("the optimizer of the head calls `zero_grad()`: the others' gradients stay")
def partial_zero_grad(place):
    model = small()
    engine = place.wrap(model, optimizer=torch.optim.SGD(model.head.parameters(), lr=0.1))
    for loss in losses(engine, 2, model):
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return gradients(model), values(model)


@family.works("norms of gradients are read after the step")
def norms_after_the_step(place):
    engine = place.small()
    norms = []
    for loss in losses(engine, 2, engine.module):
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        norms.append([p.grad.norm() for p in engine.module.parameters()])
    return norms


@family.works("gradients are read after the step, `zero_grad()` makes them None", places=("torch", "ram"))
def read_after_the_step(place):
    engine = place.small()
    next(losses(engine, 1, engine.module)).backward()
    engine.optimizer.step()
    found = gradients(engine.module)
    engine.optimizer.zero_grad()
    return found, gradients(engine.module)


# Parameters.


class _Scaled(nn.Linear):
    """Reads attributes of its weight, and leaves some there."""

    def forward(self, x):
        self.weight.uses = getattr(self.weight, "uses", 0) + 1
        return super().forward(x) * getattr(self.weight, "factor", 1.0)


def _with_scaled(place):
    model = small(3)
    for block in model.blocks:
        block.up = _Scaled(32, 128)
    return place.wrap(model)


@family.works("attributes that are set on parameters after wrapping, in forward and outside")
def attributes_both_ways(place):
    engine = _with_scaled(place)
    for index, block in enumerate(engine.module.blocks):
        block.up.weight.factor = 1.0 + index
    found = train(engine)
    uses = [block.up.weight.uses for block in engine.module.blocks]
    del engine.module.blocks[0].up.weight.factor
    return found, uses, train(engine)


class _SeesGradient(nn.Linear):
    def forward(self, x):
        grad = self.weight.grad
        self.seen = None if grad is None else grad.norm().item()
        return super().forward(x)


@family.works("`self.weight.grad` in a forward")
def gradient_in_forward(place):
    model = small(3)
    model.blocks[1].up = _SeesGradient(32, 128)
    engine = place.wrap(model)
    found = []
    for loss in losses(engine, 3, model):
        found.append(model.blocks[1].up.seen)
        loss.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    next(losses(engine, 1, model))
    return found, model.blocks[1].up.seen


@family.works("`p._version` moves with a step, and not without")
def versions(place):
    engine = place.small()
    parameters = list(engine.module.parameters())
    before = [p._version for p in parameters]
    next(losses(engine, 1))
    still = [p._version == v for p, v in zip(parameters, before, strict=True)]
    train(engine, 1)
    return still, [p._version > v for p, v in zip(parameters, before, strict=True)]


@family.works("`p.detach().requires_grad_()` is a leaf with a gradient of its own")
def detached_leaf(place):
    engine = place.small()
    weight = engine.module.head.weight
    leaf = weight.detach().requires_grad_()
    (leaf * weight.detach()).sum().backward()
    return leaf.grad, weight.grad is None


@family.works("`nn.Parameter(p)` in another module, with an optimizer of its own, moves the one memory")
def parameter_of_a_parameter(place):
    engine = place.small()
    other = nn.Linear(32, 64, bias=False)
    other.weight = nn.Parameter(engine.module.head.weight)
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    other(torch.ones(1, 32)).sum().backward()
    found = other.weight.grad.clone(), engine.module.head.weight.grad is None
    optimizer.step()
    return found, engine.module.head.weight.detach(), train(engine, 1)


def _hooked(place, register):
    engine = place.small()
    model = engine.module
    seen = []
    weight = model.blocks[2].up.weight
    register(weight, seen)
    for loss in losses(engine, 2, model):
        engine.optimizer.zero_grad()
        (loss + 1e-2 * weight.pow(2).sum() + weight.abs().mean()).backward()
        engine.optimizer.step()
    return seen, values(model)


@family.works("a hook on a weight that is used in its unit and in a penalty sees the whole gradient")
def hook_sees_the_whole(place):
    def register(weight, seen):
        def hook(gradient):
            seen.append(gradient.norm().item())
            return gradient.clamp(-1e-2, 1e-2)

        weight.register_hook(hook)

    return _hooked(place, register)


@family.works("a post-accumulate hook on such a weight runs once a backward")
def post_hook_runs_once(place):
    def register(weight, seen):
        weight.register_post_accumulate_grad_hook(lambda p: seen.append((p is weight, p.grad.norm().item())))

    return _hooked(place, register)


@family.works("a graph over weights from before a step, used after it, raises")
def old_graph_over_weights(place):
    engine = place.small()
    penalty = sum(p.pow(2).sum() for p in engine.module.parameters())
    train(engine, 1)
    return place.attempt(penalty.backward)


# Modules that look at the parameters of others, or have their own ideas of them.


@family.works("`nn.TransformerEncoder` in evaluation, with a padding mask")
def encoder_with_padding(place):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    engine = place.wrap(nn.Sequential(nn.Linear(8, 16), nn.TransformerEncoder(layer, 3), nn.Linear(16, 4)))
    mask = torch.tensor([[False] * 4, [False, False, True, True]])
    engine.module.eval()
    with torch.no_grad():
        hidden = engine.module[0](torch.ones(2, 4, 8))
        out = engine.module[1](hidden, src_key_padding_mask=mask)
    engine.module.train()
    return out, engine.module[2](engine.module[1](hidden, src_key_padding_mask=mask)).mean()


@family.refused("a submodule that is a `torch.jit.ScriptModule`", "ScriptModule")
def scripted_submodule(place):
    engine = place.wrap(nn.Sequential(nn.Linear(4, 4), torch.jit.script(nn.Linear(4, 4))))
    return engine(torch.ones(1, 4))


class _WeightDrop(nn.Module):
    """As in AWD-LSTM: the recurrent weight is another module's parameter, and a tensor in the LSTM."""

    def __init__(self, inner, name):
        super().__init__()
        self.inner, self.name = inner, name
        weight = getattr(inner, name)
        del inner._parameters[name]
        self.raw = nn.Parameter(weight.data)
        setattr(inner, name, self.raw.detach())

    def forward(self, x):
        setattr(self.inner, self.name, F.dropout(self.raw, 0.5, self.training))
        return self.inner(x)[0]


@family.works("weight drop on an LSTM")
def weight_drop(place):
    torch.manual_seed(0)
    engine = place.wrap(nn.Sequential(nn.Linear(8, 8), _WeightDrop(nn.LSTM(8, 8), "weight_hh_l0"), nn.Linear(8, 4)))
    found = []
    for _ in range(3):
        loss = engine(torch.ones(5, 2, 8)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found, values(engine.module)


class _Gates(nn.Module):
    """A cell that keeps its parameters in lists, too."""

    def __init__(self):
        super().__init__()
        self.gates = []
        for index in range(4):
            weight, bias = nn.Parameter(torch.randn(8, 16) / 4), nn.Parameter(torch.zeros(8))
            self.register_parameter(f"weight{index}", weight)
            self.register_parameter(f"bias{index}", bias)
            self.gates.append((weight, bias))

    def forward(self, x):
        hidden = cell = torch.zeros(x.shape[1], 8)
        for step in x:
            both = torch.cat([step, hidden], -1)
            i, f, o, g = (F.linear(both, weight, bias) for weight, bias in self.gates)
            cell = f.sigmoid() * cell + i.sigmoid() * g.tanh()
            hidden = o.sigmoid() * cell.tanh()
        return hidden


@family.works("a cell whose gates are in a list of parameters")
def list_of_gates(place):
    torch.manual_seed(0)
    engine = place.wrap(nn.Sequential(nn.Linear(8, 8), _Gates(), nn.Linear(8, 4)))
    found = []
    for _ in range(3):
        loss = engine(torch.ones(5, 2, 8)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found, values(engine.module)


class _Gathered(nn.Module):
    """A cell whose gates' weights are joined from a list of layers that are in other units."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 8) for _ in range(4))
        self.gates = [layer.weight for layer in self.layers]

    def forward(self, x):
        weight = torch.cat(self.gates)
        cell = torch._VF.lstm_cell(x[0], [torch.zeros(2, 8), torch.zeros(2, 8)], weight, weight[:, :8].contiguous())
        return cell[0]


@family.works("`torch.cat` of a list of gates' weights, for `torch.lstm_cell`")
def gathered_gates(place):
    torch.manual_seed(0)
    engine = place.wrap(nn.Sequential(nn.Linear(8, 16), _Gathered(), nn.Linear(8, 4)))
    found = []
    for _ in range(3):
        loss = engine(torch.ones(5, 2, 8)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found, values(engine.module)


@family.refused("a float64 parameter with `precision='auto'`", "float64", places=("torch", "ram"))
def float64_parameter(place):
    model = small(2)
    model.norm.double()
    return values(place.wrap(model, precision="auto").module)


# Gradients and hooks, together with what else a step has.


def _net(width=16):
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width) for _ in range(5)))


def _input(seed=0):
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(seed))


def _micro_batches(place, kind):
    model = _net()
    model[2] = kind(16, 16)
    engine = place.wrap(model)
    for index in range(3):
        model(_input(index)).pow(2).mean().backward()
    found = gradients(model)
    engine.optimizer.step()
    return found, values(model)


class _DropsGradient(nn.Linear):
    def forward(self, x):
        self.weight.grad = None
        return super().forward(x)


class _HalvesGradient(nn.Linear):
    def forward(self, x):
        if self.weight.grad is not None:
            self.weight.grad.mul_(0.5)
        return super().forward(x)


class _PutsGradient(nn.Linear):
    def forward(self, x):
        self.weight.grad = torch.ones_like(self.weight)
        return super().forward(x)


class _GoesBackward(nn.Linear):
    def forward(self, x):
        super().forward(x.detach()).abs().mean().backward()
        return super().forward(x)


@family.works("a forward drops its weight's gradient")
def gradient_dropped_in_forward(place):
    return _micro_batches(place, _DropsGradient)


@family.works("a forward halves its weight's gradient")
def gradient_halved_in_forward(place):
    return _micro_batches(place, _HalvesGradient)


@family.works("a forward sets its weight's gradient")
def gradient_set_in_forward(place):
    return _micro_batches(place, _PutsGradient)


@family.works("a forward makes a backward of its own, gradients add up")
def backward_in_forward(place):
    return _micro_batches(place, _GoesBackward)


@family.works("`engine.clip_grad_norm_` of gradients that were assigned")
def assigned_and_clipped(place):
    engine = place.wrap(_net())
    for index in range(2):
        engine.module(_input(index)).pow(2).mean().backward()
        for p in engine.module.parameters():
            p.grad = p.grad * 1.5
        norm = engine.clip_grad_norm_(0.01)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return norm, values(engine.module)


@family.works("`gradient_clipping=` and `gradient_accumulation_steps=` with gradients that were assigned")
def assigned_and_clipped_by_options(place):
    engine = place.wrap(_net(), gradient_clipping=0.01, gradient_accumulation_steps=2)
    for index in range(4):
        engine.backward(engine.module(_input(index)).pow(2).mean())
        for p in engine.module.parameters():
            p.grad = p.grad * 1.5
        engine.step()
    return values(engine.module)


@family.works("`GradScaler` with a gradient that was assigned")
def assigned_and_unscaled(place):
    engine = place.wrap(_net())
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for index in range(2):
        engine.optimizer.zero_grad()
        scaler.scale(engine.module(_input(index)).pow(2).mean()).backward()
        weight = engine.module[0].weight
        weight.grad = weight.grad.clone()
        scaler.unscale_(engine.optimizer)
        scaler.step(engine.optimizer)
        scaler.update()
    return values(engine.module)


@family.works("`torch.autograd.grad` by a weight that has hooks and stands in a penalty, too")
def autograd_grad_with_hooks(place):
    engine = place.wrap(_net())
    weight, seen = engine.module[2].weight, []
    weight.register_hook(lambda gradient: (seen.append(gradient.norm().item()), gradient * 2)[1])
    loss = engine.module(_input()).pow(2).mean() + weight.abs().mean()
    return torch.autograd.grad(loss, [weight, engine.module[0].weight]), seen


class _Cached(nn.Linear):
    """Rounds its weight once for each version of it."""

    def forward(self, x):
        if getattr(self, "version", None) != self.weight._version:
            self.version = self.weight._version
            self.rounded = (self.weight.detach() * 16).round() / 16
        return F.linear(x, self.rounded + (self.weight - self.weight.detach()), self.bias)


@family.works("a rounded weight is kept as long as `self.weight._version` is the same")
def cached_by_version(place):
    model = _net()
    model[1] = _Cached(16, 16)
    engine = place.wrap(model)
    for index in range(3):
        engine.optimizer.zero_grad()
        model(_input(index)).pow(2).mean().backward()
        engine.optimizer.step()
    with torch.no_grad():
        model[1].weight.mul_(0.5)
    return model(_input()), values(model)


@family.works("views of a gradient are changed, the gradient is clipped, and the views see it")
def views_of_a_gradient(place):
    engine = place.wrap(_net())
    engine.module(_input()).pow(2).mean().backward()
    gradient = engine.module[0].weight.grad
    row, turned = gradient.view(-1)[:4], gradient.t()
    row.mul_(3)
    turned[0].zero_()
    norm = nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
    return norm, gradient.clone(), row.clone(), turned.clone()


def _train_step(engine, seed):
    engine.optimizer.zero_grad()
    engine.module(_input(seed)).pow(2).mean().backward()
    engine.optimizer.step()


@family.works(
    "gradients of a worker's plain model are the engine's: `p.grad = q.grad`, and the worker's backward adds to them"
)
def gradients_of_a_worker(place):
    engine, worker = place.wrap(_net(), optimizer="sgd", lr=0.1), _net()
    worker(_input()).pow(2).mean().backward()
    for p, q in zip(engine.module.parameters(), worker.parameters(), strict=True):
        p.grad = q.grad
    for index in range(2):
        worker.zero_grad(set_to_none=False)
        worker(_input(index)).pow(2).mean().backward()
        engine.optimizer.step()
    return values(engine.module)


@family.works("gradients of the engine's model are a plain one's: `q.grad = p.grad`")
def gradients_for_a_plain_model(place):
    engine, other = place.wrap(_net()), _net()
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    engine.module(_input()).pow(2).mean().backward()
    for p, q in zip(engine.module.parameters(), other.parameters(), strict=True):
        q.grad = p.grad
    optimizer.step()
    engine.optimizer.step()
    return values(engine.module), values(other)


@family.works("fast weights `p - 0.1 * g` by `functional_call`: gradients reach the parameters (higher, first order)")
def fast_weights(place):
    engine = place.wrap(_net())
    model = engine.module
    found = torch.autograd.grad(model(_input()).pow(2).mean(), list(model.parameters()))
    fast = {name: p - 0.1 * g for (name, p), g in zip(model.named_parameters(), found, strict=True)}
    torch.func.functional_call(model, fast, (_input(3),)).abs().mean().backward()
    engine.optimizer.step()
    return values(model)


@family.works("a step post-hook, and code after the scheduler, log norms of gradients")
def norms_in_a_post_hook(place):
    engine, seen = place.wrap(_net()), []
    schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    engine.optimizer.register_step_post_hook(
        lambda *_: seen.append([p.grad.norm().item() for p in engine.module.parameters()])
    )
    for index in range(2):
        _train_step(engine, index)
        schedule.step()
        seen.append(torch.stack([p.grad.norm() for p in engine.module.parameters()]).norm().item())
    return seen


@family.works("a post-accumulate hook that returns something raises")
def post_hook_returns(place):
    engine = place.wrap(_net())
    engine.module[0].weight.register_post_accumulate_grad_hook(lambda p: p.grad.clamp_(-1e-3, 1e-3))
    return place.attempt(engine.module(_input()).sum().backward)


_OTHER_OBJECT = "in its unit's forward `self.weight` is another object than outside: look it up by its name."


class _LooksUp(nn.Linear):
    def forward(self, x):
        return super().forward(x) * self.factors.get(self.weight, 1.0)


@family.differs("a dict keyed by parameters is looked up in a forward by `self.weight`", _OTHER_OBJECT)
def looked_up_in_forward(place):
    torch.manual_seed(0)
    model = nn.Sequential(_LooksUp(16, 16), nn.Linear(16, 4))
    engine = place.wrap(model)
    model[0].factors = {model[0].weight: 2.0}
    return engine.module(_input())
