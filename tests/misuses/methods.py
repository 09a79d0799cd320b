"""Published methods, each written out in small: what they do to parameters, gradients and modules is theirs."""

import copy
import math

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributions import Categorical, Independent, Normal, kl_divergence
from torch.func import functional_call, grad, vmap

from misuses.case import Family
from misuses.place import gradients, losses, small, train, values

family = Family("methods")


def _mlp(width=16, depth=4, out=4):
    torch.manual_seed(0)
    layers = []
    for _ in range(depth):
        layers += [nn.Linear(width, width), nn.Tanh()]
    return nn.Sequential(*layers, nn.Linear(width, out))


def _x(rows=8, width=16, seed=1):
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed))


def _loop(engine, compute, steps=3):
    found = []
    for index in range(steps):
        engine.optimizer.zero_grad()
        loss = compute(index)
        loss.backward()
        engine.optimizer.step()
        found.append(loss.item())
    return found, values(engine.module)


# Distributions and latent variables.


class _Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = _mlp(out=16)
        self.mean, self.log_std, self.value = nn.Linear(16, 3), nn.Parameter(torch.zeros(3)), nn.Linear(16, 1)

    def forward(self, x):
        hidden = self.body(x)
        return Independent(Normal(self.mean(hidden), self.log_std.exp()), 1), self.value(hidden).squeeze(-1)


@family.works("PPO: the actor returns a distribution, the old one is kept over several epochs")
def ppo(place):
    torch.manual_seed(0)
    engine = place.wrap(_Actor())
    x = _x()
    with torch.no_grad():
        policy, _ = engine.module(x)
        action = policy.mean + 0.1
        old = policy.log_prob(action)
    advantage = torch.linspace(-1, 1, 8)

    def compute(index):
        policy, value = engine.module(x)
        ratio = (policy.log_prob(action) - old).exp()
        clipped = torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean()
        return -clipped + 0.5 * value.pow(2).mean() - 0.01 * policy.entropy().mean()

    return _loop(engine, compute, 4)


@family.works("REINFORCE with a categorical policy and a baseline that is an attribute")
def reinforce(place):
    torch.manual_seed(0)
    model = _mlp()
    model.baseline = 0.0
    engine = place.wrap(model)

    def compute(index):
        policy = Categorical(logits=model(_x(seed=index)))
        action = torch.arange(8) % 4
        reward = action.float()
        model.baseline = 0.9 * model.baseline + 0.1 * reward.mean().item()
        return -(policy.log_prob(action) * (reward - model.baseline)).mean()

    return _loop(engine, compute)


class _Vae(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.decoder = _mlp(out=8), nn.Sequential(nn.Linear(4, 16), nn.ReLU(), nn.Linear(16, 16))
        self.register_buffer("prior_mean", torch.zeros(4))

    def encode(self, x):
        mean, log_var = self.encoder(x).chunk(2, -1)
        return Normal(mean, (0.5 * log_var).exp())

    def forward(self, x):
        posterior = self.encode(x)
        torch.manual_seed(3)
        return self.decoder(posterior.rsample()), posterior


@family.works("a VAE whose encoder gives a distribution, with `kl_divergence`")
def vae(place):
    torch.manual_seed(0)
    engine = place.wrap(_Vae())

    def compute(index):
        x = _x(seed=index)
        out, posterior = engine.module(x)
        prior = Normal(engine.module.prior_mean, torch.ones(4))
        return F.mse_loss(out, x) + 0.1 * kl_divergence(posterior, prior).sum(-1).mean()

    return _loop(engine, compute)


class _Quantised(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.round()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class _Vq(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.codes, self.decoder = _mlp(out=4), nn.Embedding(10, 4), nn.Linear(4, 16)

    def forward(self, x):
        z = self.encoder(x)
        index = torch.cdist(z, self.codes.weight).argmin(-1)
        code = self.codes(index)
        return self.decoder(z + (code - z).detach()), F.mse_loss(code, z.detach()) + 0.25 * F.mse_loss(z, code.detach())


@family.works("VQ-VAE: the codebook is looked through outside of its embedding")
def vq_vae(place):
    torch.manual_seed(0)
    engine = place.wrap(_Vq())

    def compute(index):
        x = _x(seed=index)
        out, auxiliary = engine.module(x)
        return F.mse_loss(out, x) + auxiliary

    return _loop(engine, compute)


# Averages, teachers, copies.


@family.works("EMA by hand: a dict of clones, stored and swapped in for evaluation, and back")
def ema_swapped(place):
    engine = place.small()
    shadow = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    found = []
    for loss in losses(engine, 3, engine.module):
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        with torch.no_grad():
            for name, p in engine.module.named_parameters():
                shadow[name].mul_(0.9).add_(p, alpha=0.1)
    engine.optimizer.zero_grad()
    backup = {name: p.data.clone() for name, p in engine.module.named_parameters()}
    for name, p in engine.module.named_parameters():
        p.data.copy_(shadow[name])
    with torch.no_grad():
        found += [loss.item() for loss in losses(engine, 1, engine.module)]
    for name, p in engine.module.named_parameters():
        p.data.copy_(backup[name])
    return found, train(engine), shadow


@family.works("SWA by `torch.optim.swa_utils.AveragedModel` and `SWALR`")
def stochastic_averaging(place):
    engine = place.small(optimizer="sgd", lr=0.1)
    averaged = torch.optim.swa_utils.AveragedModel(engine.module)
    schedule = torch.optim.swa_utils.SWALR(engine.optimizer, swa_lr=0.05, anneal_epochs=2)
    for loss in losses(engine, 3, engine.module):
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        averaged.update_parameters(engine.module)
        schedule.step()
    return values(averaged.module), engine.optimizer.param_groups[0]["lr"]


@family.works("mean teacher: a deep copy of the model is moved by `lerp_` and gives targets")
def mean_teacher(place):
    engine = place.wrap(_mlp())
    teacher = copy.deepcopy(engine.module).requires_grad_(False)

    def compute(index):
        x = _x(seed=index)
        with torch.no_grad():
            target = teacher(x)
            for p, q in zip(teacher.parameters(), engine.module.parameters(), strict=True):
                p.lerp_(q, 0.1)
        return F.mse_loss(engine.module(x + 0.1), target)

    return _loop(engine, compute), values(teacher)


@family.works("BYOL: an online net, a predictor, a target net in one module")
def byol(place):
    torch.manual_seed(0)
    online = _mlp()
    model = nn.ModuleDict({"online": online, "predictor": nn.Linear(4, 4), "target": copy.deepcopy(online)})
    model["target"].requires_grad_(False)
    engine = place.wrap(model)

    def compute(index):
        x = _x(seed=index)
        prediction = F.normalize(model["predictor"](model["online"](x)), dim=-1)
        with torch.no_grad():
            target = F.normalize(model["target"](x * 0.9), dim=-1)
        loss = 2 - 2 * (prediction * target).sum(-1).mean()
        with torch.no_grad():
            for p, q in zip(model["target"].parameters(), model["online"].parameters(), strict=True):
                p.data.mul_(0.99).add_(q.data, alpha=0.01)
        return loss

    return _loop(engine, compute)


@family.works("MoCo: a queue in a buffer, the key encoder by momentum in its forward")
def moco(place):
    class Moco(nn.Module):
        def __init__(self):
            super().__init__()
            self.query, self.key = _mlp(), _mlp()
            self.key.requires_grad_(False)
            self.register_buffer("queue", F.normalize(torch.ones(4, 8).cumsum(-1), dim=0))

        def forward(self, x):
            query = F.normalize(self.query(x), dim=-1)
            with torch.no_grad():
                for p, q in zip(self.query.parameters(), self.key.parameters(), strict=True):
                    q.data = q.data * 0.9 + p.data * 0.1
                key = F.normalize(self.key(x * 0.9), dim=-1)
            logits = torch.cat([(query * key).sum(-1, keepdim=True), query @ self.queue.clone()], 1)
            self.queue.copy_(torch.cat([self.queue[:, 4:], key[:4].t()], 1))
            return F.cross_entropy(logits / 0.2, torch.zeros(len(x), dtype=torch.long))

    torch.manual_seed(0)
    engine = place.wrap(Moco())
    return _loop(engine, lambda index: engine.module(_x(seed=index)))


@family.works("Polyak averaging of the last steps' state dicts (model soup)")
def soup(place):
    engine = place.small()
    states = []
    for _ in range(3):
        train(engine, 1)
        states.append(copy.deepcopy(engine.module.state_dict()))
    engine.module.load_state_dict({name: sum(s[name] for s in states) / 3 for name in states[0]})
    return train(engine), values(engine.module)


@family.works("Lookahead by hand: slow weights, every second step")
def lookahead(place):
    engine = place.small()
    slow = [p.detach().clone() for p in engine.module.parameters()]
    for index in range(4):
        train(engine, 1)
        if index % 2:
            with torch.no_grad():
                for p, s in zip(engine.module.parameters(), slow, strict=True):
                    s += 0.5 * (p - s)
                    p.copy_(s)
    return values(engine.module)


@family.works("Reptile: inner steps on the engine, then back to the start and a part of the way")
def reptile(place):
    engine = place.wrap(_mlp(), optimizer="sgd", lr=0.1)
    for task in range(2):
        start = {name: value.clone() for name, value in engine.module.state_dict().items()}
        for index in range(2):
            engine.optimizer.zero_grad()
            engine.module(_x(seed=10 * task + index)).pow(2).mean().backward()
            engine.optimizer.step()
        now = engine.module.state_dict()
        engine.module.load_state_dict({name: start[name] + 0.3 * (now[name] - start[name]) for name in start})
    return values(engine.module)


# Gradients that are combined, privatised, projected, sharpened.


@family.works("PCGrad: two tasks' gradients, each projected off the other")
def pcgrad(place):
    engine = place.wrap(_mlp())
    parameters = list(engine.module.parameters())
    found = []
    for step in range(2):
        tasks = []
        for task in range(2):
            engine.optimizer.zero_grad()
            (engine.module(_x(seed=step))[:, task].pow(2).mean() * (task - 0.5)).backward()
            tasks.append([p.grad for p in parameters])
        first, second = (torch.cat([g.flatten() for g in task]) for task in tasks)
        dot = first @ second
        if dot < 0:
            first = first - dot / second.norm() ** 2 * second
        found.append(dot.item())
        for p, part in zip(parameters, (first + second).split([p.numel() for p in parameters]), strict=True):
            p.grad = part.view_as(p)
        engine.optimizer.step()
    return found, values(engine.module)


@family.works("SAM: up along the gradient, a second backward, back, step")
def sam(place):
    engine = place.wrap(_mlp())
    for index in range(2):
        engine.optimizer.zero_grad()
        engine.module(_x(seed=index)).pow(2).mean().backward()
        norm = torch.stack([p.grad.norm() for p in engine.module.parameters()]).norm()
        moved = {}
        with torch.no_grad():
            for p in engine.module.parameters():
                moved[p] = p.grad * (0.05 / (norm + 1e-12))
                p.add_(moved[p])
        engine.module.zero_grad()
        engine.module(_x(seed=index)).pow(2).mean().backward()
        with torch.no_grad():
            for p, e in moved.items():
                p.sub_(e)
        engine.optimizer.step()
    return values(engine.module)


class _GradSample:
    """Per-sample gradients of linear layers in ``p.grad_sample``, as Opacus makes them by hooks."""

    def __init__(self, model):
        self.handles = []
        for module in model.modules():
            if isinstance(module, nn.Linear):
                self.handles.append(module.register_forward_hook(self._keep))
                self.handles.append(module.register_full_backward_hook(self._sample))

    def _keep(self, module, args, output):
        if torch.is_grad_enabled():
            module.activations = args[0].detach()

    def _sample(self, module, grad_input, grad_output):
        out = grad_output[0]
        module.weight.grad_sample = torch.einsum("bi,bj->bij", out, module.activations) * len(out)
        module.bias.grad_sample = out * len(out)
        del module.activations


@family.works("DP-SGD: per-sample gradients as attributes of parameters, clipped, summed, with noise")
def dp_sgd(place):
    engine = place.wrap(_mlp(), optimizer="sgd", lr=0.1)
    _GradSample(engine.module)
    parameters = list(engine.module.parameters())
    generator = torch.Generator().manual_seed(5)
    for index in range(3):
        engine.optimizer.zero_grad()
        engine.module(_x(seed=index)).pow(2).mean().backward()
        norms = torch.stack([p.grad_sample.flatten(1).norm(dim=1) for p in parameters]).norm(dim=0)
        factor = (1.0 / (norms + 1e-6)).clamp(max=1.0)
        for p in parameters:
            summed = torch.einsum("b,b...->...", factor, p.grad_sample)
            p.summed_grad = summed + 0.1 * torch.randn(summed.shape, generator=generator)
            p.grad = p.summed_grad.view_as(p)
            p.grad.div_(len(norms))
            p.grad_sample = p.summed_grad = None
        engine.optimizer.step()
    return norms, values(engine.module)


@family.works("per-sample gradients by `torch.func.vmap(grad)` over `functional_call` with detached parameters")
def per_sample_by_func(place):
    engine = place.wrap(_mlp())
    model = engine.module
    parameters = {name: p.detach().clone() for name, p in model.named_parameters()}

    def loss(parameters, x):
        return functional_call(model, parameters, (x[None],)).pow(2).mean()

    found = vmap(grad(loss), (None, 0))(parameters, _x())
    for name, p in model.named_parameters():
        p.grad = found[name].mean(0)
    engine.optimizer.step()
    return values(model)


@family.works("MAML by hand: an inner step by `torch.func.grad`, `functional_call` with moved weights (first order)")
def maml_first_order(place):
    engine = place.wrap(_mlp())
    model = engine.module
    for task in range(2):
        fast = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        inner = functional_call(model, fast, (_x(seed=task),)).pow(2).mean()
        found = torch.autograd.grad(inner, list(fast.values()))
        fast = {n: (p - 0.1 * g).detach().requires_grad_() for (n, p), g in zip(fast.items(), found, strict=True)}
        functional_call(model, fast, (_x(seed=task + 9),)).pow(2).mean().backward()
        for name, p in model.named_parameters():
            p.grad = fast[name].grad if p.grad is None else p.grad + fast[name].grad
    engine.optimizer.step()
    return values(model)


@family.works("gradient accumulation into `p.main_grad` by hooks (Megatron)")
def main_grad(place):
    engine = place.wrap(_mlp())
    for p in engine.module.parameters():
        p.main_grad = torch.zeros(p.shape)

        def hook(p):
            p.main_grad.add_(p.grad)
            p.grad = None

        p.register_post_accumulate_grad_hook(hook)
    for index in range(2):
        for part in range(2):
            engine.module(_x(seed=2 * index + part)).pow(2).mean().backward()
        for p in engine.module.parameters():
            p.grad = p.main_grad
        engine.optimizer.step()
        for p in engine.module.parameters():
            p.main_grad.zero_()
    return values(engine.module)


@family.works("gradient noise, centralisation and sign, by a hook on each parameter")
def hooks_that_change(place):
    engine = place.wrap(_mlp())
    for index, p in enumerate(engine.module.parameters()):
        if index % 3 == 0:
            p.register_hook(lambda g: g - g.mean())
        elif index % 3 == 1:
            p.register_hook(torch.sign)
    return _loop(engine, lambda index: engine.module(_x(seed=index)).pow(2).mean())


@family.works("adaptive gradient clipping (AGC) by units of each weight")
def agc(place):
    engine = place.wrap(_mlp())

    def clip():
        for p in engine.module.parameters():
            dims = tuple(range(1, p.dim()))
            norm = p.detach().norm(dim=dims, keepdim=True) if dims else p.detach().abs()
            of_grad = p.grad.detach().norm(dim=dims, keepdim=True) if dims else p.grad.detach().abs()
            clipped = p.grad * (0.01 * norm.clamp(min=1e-3) / of_grad.clamp(min=1e-6))
            p.grad.detach().copy_(torch.where(of_grad > 0.01 * norm.clamp(min=1e-3), clipped, p.grad))

    for index in range(3):
        engine.optimizer.zero_grad()
        engine.module(_x(seed=index)).pow(2).mean().backward()
        clip()
        engine.optimizer.step()
    return values(engine.module)


@family.works("GradNorm-like weights of losses from norms of `autograd.grad` by the last shared layer")
def gradnorm(place):
    engine = place.wrap(_mlp())
    shared = engine.module[6].weight
    found = []

    def compute(index):
        out = engine.module(_x(seed=index))
        parts = [out[:, 0].pow(2).mean(), out[:, 1].abs().mean()]
        norms = [torch.autograd.grad(part, shared, retain_graph=True)[0].norm() for part in parts]
        found.append([n.item() for n in norms])
        return sum(part / n for part, n in zip(parts, norms, strict=True))

    return _loop(engine, compute), found


@family.works("EWC: Fisher information from squared gradients, then a penalty around old weights")
def ewc(place):
    engine = place.wrap(_mlp())
    model = engine.module
    fisher = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
    for index in range(2):
        model.zero_grad()
        F.log_softmax(model(_x(seed=index)), -1)[:, 0].mean().backward()
        for name, p in model.named_parameters():
            fisher[name] += p.grad.detach() ** 2
    model.zero_grad()
    old = {name: p.detach().clone() for name, p in model.named_parameters()}

    def compute(index):
        penalty = sum((fisher[n] * (p - old[n]) ** 2).sum() for n, p in model.named_parameters())
        return model(_x(seed=5 + index)).pow(2).mean() + 10 * penalty

    return _loop(engine, compute)


@family.works("influence: gradients of single examples, dotted with those of another")
def influence(place):
    engine = place.wrap(_mlp())
    parameters = list(engine.module.parameters())
    target = torch.autograd.grad(engine.module(_x(1, seed=7)).sum(), parameters)
    found = []
    for index in range(3):
        g = torch.autograd.grad(engine.module(_x(1, seed=index)).sum(), parameters)
        found.append(sum((a * b).sum() for a, b in zip(g, target, strict=True)).item())
    return found


@family.works("integrated gradients, saliency and occlusion of inputs (captum)")
def attributions(place):
    engine = place.wrap(_mlp())
    x = _x(2)
    total = torch.zeros_like(x)
    for alpha in torch.linspace(0.1, 1, 5):
        point = (alpha * x).requires_grad_()
        total += torch.autograd.grad(engine.module(point)[:, 0].sum(), point)[0]
    layer = {}
    handle = engine.module[4].register_forward_hook(lambda m, a, o: layer.update(out=o))
    out = engine.module(x)[:, 1].sum()
    handle.remove()
    of_layer = torch.autograd.grad(out, layer["out"])[0]
    return total * x / 5, of_layer


@family.works("Grad-CAM: a forward hook and a full backward hook on one layer")
def grad_cam(place):
    engine = place.wrap(_mlp())
    seen = {}
    engine.module[2].register_forward_hook(lambda m, a, o: seen.update(out=o.detach()))
    engine.module[2].register_full_backward_hook(lambda m, gi, go: seen.update(grad=go[0].detach()))
    engine.module(_x())[:, 0].sum().backward()
    return F.relu(seen["out"] * seen["grad"].mean(0))


@family.works("FGSM and PGD with the model's own gradients set aside")
def adversarial(place):
    engine = place.wrap(_mlp())

    def compute(index):
        x = _x(seed=index)
        delta = torch.zeros_like(x, requires_grad=True)
        for _ in range(2):
            engine.module(x + delta).pow(2).mean().backward()
            delta.data = (delta + 0.01 * delta.grad.sign()).clamp(-0.02, 0.02)
            delta.grad.zero_()
        engine.optimizer.zero_grad()
        return engine.module(x + delta.detach()).pow(2).mean()

    return _loop(engine, compute)


@family.works("`FreeLB`: gradients of several adversarial steps add up on the weights")
def free_lb(place):
    engine = place.wrap(_mlp())
    for index in range(2):
        engine.optimizer.zero_grad()
        delta = torch.full((8, 16), 1e-2, requires_grad=True)
        for _ in range(3):
            (engine.module(_x(seed=index) + delta).pow(2).mean() / 3).backward()
            delta = (delta + 0.01 * delta.grad / delta.grad.norm()).detach().requires_grad_()
        engine.optimizer.step()
    return values(engine.module)


@family.works("Hutchinson's trace by `torch.autograd.grad` of inputs, twice is refused", places=("torch", "ram"))
def jacobian_norm(place):
    engine = place.wrap(_mlp())
    x = _x().requires_grad_()
    out = engine.module(x)
    v = torch.ones_like(out)
    (jacobian,) = torch.autograd.grad(out, x, v, retain_graph=True)
    return jacobian.norm(), torch.autograd.grad(out, x, 2 * v)[0]


# Structure: LoRA, ties, masks, gates, own Functions, parametrisations.


class _Lora(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(torch.randn(2, base.in_features) / 4)
        self.b = nn.Parameter(torch.zeros(base.out_features, 2))

    def forward(self, x):
        return self.base(x) + x @ self.a.t() @ self.b.t()

    def merge(self):
        self.base.weight.data += self.b.data @ self.a.data


@family.works("LoRA by hand: frozen bases, trained, merged into `base.weight.data`, evaluated")
def lora(place):
    model = _mlp()
    for index in (0, 2, 4):
        model[index] = _Lora(model[index])
    engine = place.wrap(model)
    found = _loop(engine, lambda index: model(_x(seed=index)).pow(2).mean())
    for index in (0, 2, 4):
        model[index].merge()
        model[index].b.data.zero_()
    with torch.no_grad():
        return found, model(_x(seed=9))


@family.works("LoRA computed as `F.linear(x, W + B @ A)` from the base's weight")
def lora_in_weight(place):
    class Lora(_Lora):
        def forward(self, x):
            return F.linear(x, self.base.weight + self.b @ self.a, self.base.bias)

    model = _mlp()
    for index in (0, 2, 4):
        model[index] = Lora(model[index])
    engine = place.wrap(model)
    return _loop(engine, lambda index: model(_x(seed=index)).pow(2).mean())


@family.works("weight tying by `F.linear(x, self.embed.weight)` in the model's forward")
def tied_by_use(place):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.body = nn.Embedding(32, 16), _mlp(out=16)

        def forward(self, tokens):
            return F.linear(self.body(self.embed(tokens)), self.embed.weight)

    torch.manual_seed(0)
    engine = place.wrap(Tied())
    tokens = torch.arange(12).view(3, 4)
    return _loop(engine, lambda index: F.cross_entropy(engine.module(tokens).flatten(0, 1), tokens.flatten()))


@family.works("an encoder whose decoder is its transposed weights")
def transposed(place):
    class Auto(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = nn.Linear(16, 8), nn.Linear(8, 4)

        def forward(self, x):
            code = self.second(torch.tanh(self.first(x)))
            return F.linear(torch.tanh(F.linear(code, self.second.weight.t())), self.first.weight.t())

    torch.manual_seed(0)
    engine = place.wrap(Auto())
    return _loop(engine, lambda index: F.mse_loss(engine.module(_x(seed=index)), _x(seed=index)))


class _Binary(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        ctx.save_for_backward(weight)
        return weight.sign() * weight.abs().mean()

    @staticmethod
    def backward(ctx, gradient):
        (weight,) = ctx.saved_tensors
        return gradient * (weight.abs() < 0.3)


class _BinaryLinear(nn.Linear):
    def forward(self, x):
        return F.linear(x, _Binary.apply(self.weight), self.bias)


@family.works("binary weights by an autograd Function that saves the weight")
def binary_weights_saved(place):
    torch.manual_seed(0)
    engine = place.wrap(nn.Sequential(*(_BinaryLinear(16, 16) for _ in range(4))))
    return _loop(engine, lambda index: engine.module(_x(seed=index)).pow(2).mean())


@family.works("fake quantisation with a learned step size (LSQ) and a straight-through estimate")
def lsq(place):
    class Lsq(nn.Linear):
        def __init__(self):
            super().__init__(16, 16)
            self.step = nn.Parameter(torch.tensor(0.05))

        def forward(self, x):
            scaled = (self.weight / self.step).clamp(-8, 7)
            rounded = scaled + (scaled.round() - scaled).detach()
            return F.linear(x, rounded * self.step, self.bias)

    torch.manual_seed(0)
    engine = place.wrap(nn.Sequential(*(Lsq() for _ in range(4))))
    return _loop(engine, lambda index: engine.module(_x(seed=index)).pow(2).mean())


@family.works("lottery ticket: prune by magnitude, rewind to the start, masks applied after each step")
def lottery(place):
    engine = place.wrap(_mlp())
    start = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    found = [_loop(engine, lambda index: engine.module(_x(seed=index)).pow(2).mean())]
    masks = {n: (p.detach().abs() > p.detach().abs().median()).float() for n, p in engine.module.named_parameters()}
    with torch.no_grad():
        for name, p in engine.module.named_parameters():
            p.copy_(start[name] * masks[name])
    for index in range(2):
        engine.optimizer.zero_grad()
        engine.module(_x(seed=index)).pow(2).mean().backward()
        for name, p in engine.module.named_parameters():
            p.grad.mul_(masks[name])
        engine.optimizer.step()
        with torch.no_grad():
            for name, p in engine.module.named_parameters():
                p.mul_(masks[name])
    return found, values(engine.module)


@family.works("`torch.nn.utils.prune` before wrapping, masks in buffers")
def pruned(place):
    model = _mlp()
    for index in (0, 2, 4):
        nn.utils.prune.l1_unstructured(model[index], "weight", amount=0.5)
    engine = place.wrap(model)
    return _loop(engine, lambda index: model(_x(seed=index)).pow(2).mean())


@family.works("spectral norm and weight norm by `parametrizations`, orthogonal, on several layers")
def parametrised(place):
    model = _mlp()
    nn.utils.parametrizations.spectral_norm(model[0])
    nn.utils.parametrizations.weight_norm(model[2])
    nn.utils.parametrizations.orthogonal(model[4])
    engine = place.wrap(model)
    return _loop(engine, lambda index: model(_x(seed=index)).pow(2).mean())


class _HyperNet(nn.Module):
    """Makes the weights of another layer."""

    def __init__(self):
        super().__init__()
        self.code = nn.Parameter(torch.ones(4) / 2)
        self.make = nn.Linear(4, 16 * 16)
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        return self.head(F.linear(x, self.make(self.code).view(16, 16)))


@family.works("a hypernetwork")
def hypernetwork(place):
    torch.manual_seed(0)
    engine = place.wrap(_HyperNet())
    return _loop(engine, lambda index: engine.module(_x(seed=index)).pow(2).mean())


@family.works("stochastic depth, with a generator of its own, by skipping blocks")
def stochastic_depth(place):
    model = small(6)
    generator = torch.Generator().manual_seed(4)

    def skip(block):
        inner = block.forward
        block.forward = lambda x: inner(x) if torch.rand((), generator=generator) < 0.6 else x

    for block in model.blocks:
        skip(block)
    engine = place.wrap(model)
    return train(engine, 4), values(model)


@family.works("Mixture of experts with `index_add_`, load loss kept in an attribute, experts without tokens")
def experts(place):
    class Moe(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate, self.experts = nn.Linear(16, 6), nn.ModuleList(nn.Linear(16, 16) for _ in range(6))

        def forward(self, x):
            weights, chosen = self.gate(x).softmax(-1).max(-1)
            self.load = weights.pow(2).mean()
            out = torch.zeros_like(x)
            for index, expert in enumerate(self.experts):
                rows = (chosen == index).nonzero()[:, 0]
                if len(rows):
                    out = out.index_add(0, rows, expert(x[rows]) * weights[rows, None])
            return out

    torch.manual_seed(0)
    model = nn.Sequential(Moe(), Moe())
    engine = place.wrap(model)
    return _loop(engine, lambda index: model(_x(seed=index)).pow(2).mean() + model[0].load + model[1].load)


@family.works("a DEQ: a fixed point under `no_grad`, one step with gradients")
def fixed_point(place):
    torch.manual_seed(0)
    engine = place.wrap(nn.ModuleDict({"cell": nn.Linear(16, 16), "head": nn.Linear(16, 4)}))
    model = engine.module

    def compute(index):
        x = _x(seed=index)
        z = torch.zeros_like(x)
        with torch.no_grad():
            for _ in range(4):
                z = torch.tanh(model["cell"](z) + x)
        return model["head"](torch.tanh(model["cell"](z) + x)).pow(2).mean()

    return _loop(engine, compute)


@family.works("truncated backpropagation through time: the state is detached between pieces")
def truncated_bptt(place):
    torch.manual_seed(0)
    engine = place.wrap(nn.ModuleDict({"cell": nn.GRUCell(16, 16), "head": nn.Linear(16, 4)}))
    model, state = engine.module, torch.zeros(8, 16)
    for piece in range(3):
        engine.optimizer.zero_grad()
        loss = 0
        for step in range(3):
            state = model["cell"](_x(seed=3 * piece + step), state)
            loss = loss + model["head"](state).pow(2).mean()
        loss.backward()
        engine.optimizer.step()
        state = state.detach()
    return state, values(model)


@family.works("a GAN: two engines, the generator's loss passes through the frozen discriminator")
def gan(place):
    generator, discriminator = place.wrap(_mlp(out=16)), place.wrap(_mlp(out=1))
    found = []
    for index in range(2):
        discriminator.optimizer.zero_grad()
        fake = generator.module(_x(seed=index)).detach()
        loss = (
            F.softplus(-discriminator.module(_x(seed=index + 5))).mean() + F.softplus(discriminator.module(fake)).mean()
        )
        loss.backward()
        discriminator.optimizer.step()
        generator.optimizer.zero_grad()
        for p in discriminator.module.parameters():
            p.requires_grad = False
        loss = F.softplus(-discriminator.module(generator.module(_x(seed=index)))).mean()
        loss.backward()
        generator.optimizer.step()
        for p in discriminator.module.parameters():
            p.requires_grad = True
        found.append(loss.item())
    return found, values(generator.module), values(discriminator.module)


@family.works("DPO: the reference's log-probabilities by the same model before training, then two batches in one loss")
def dpo(place):
    engine = place.small()
    tokens = torch.arange(32).view(2, 16) % 64

    def log_probability(tokens):
        logits = engine.module(tokens[:, :-1]).log_softmax(-1)
        return logits.gather(-1, tokens[:, 1:, None]).sum((1, 2))

    with torch.no_grad():
        reference = log_probability(tokens)

    def compute(index):
        chosen, rejected = (log_probability(tokens) - reference).chunk(2)
        return -F.logsigmoid(0.1 * (chosen - rejected)).mean()

    return _loop(engine, compute)


@family.works("R-Drop: two passes with dropout, a symmetric divergence")
def r_drop(place):
    model = _mlp()
    model.insert(2, nn.Dropout(0.5))
    engine = place.wrap(model)

    def compute(index):
        torch.manual_seed(index)
        first, second = (model(_x(seed=index)).log_softmax(-1) for _ in range(2))
        both = F.kl_div(first, second, log_target=True) + F.kl_div(second, first, log_target=True)
        return both - first[:, 0].mean()

    return _loop(engine, compute)


@family.works("mixup of hidden states by a forward pre-hook that changes the arguments")
def manifold_mixup(place):
    engine = place.wrap(_mlp())
    engine.module[4].register_forward_pre_hook(lambda module, args: (0.7 * args[0] + 0.3 * args[0].flip(0),))
    return _loop(engine, lambda index: engine.module(_x(seed=index)).pow(2).mean())


@family.works("Langevin dynamics of weights: noise by hand after each step")
def langevin(place):
    engine = place.wrap(_mlp(), optimizer="sgd", lr=0.1)
    generator = torch.Generator().manual_seed(3)
    for index in range(3):
        engine.optimizer.zero_grad()
        engine.module(_x(seed=index)).pow(2).mean().backward()
        engine.optimizer.step()
        with torch.no_grad():
            for p in engine.module.parameters():
                p += 0.01 * torch.randn(p.shape, generator=generator)
    return values(engine.module)


@family.works("evolution strategies: perturbed copies by `functional_call`, the update as `p.grad`")
def evolution(place):
    engine = place.wrap(_mlp(), optimizer="sgd", lr=0.1)
    model = engine.module
    generator = torch.Generator().manual_seed(3)
    for _ in range(2):
        total = {name: torch.zeros(p.shape) for name, p in model.named_parameters()}
        for _ in range(3):
            noise = {name: torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}
            moved = {name: p.detach() + 0.1 * noise[name] for name, p in model.named_parameters()}
            score = functional_call(model, moved, (_x(),)).pow(2).mean().item()
            for name in total:
                total[name] += score * noise[name]
        for name, p in model.named_parameters():
            p.grad = total[name] / 3
        engine.optimizer.step()
    return values(model)


@family.works("SPSA and MeZO: weights are moved in place with a seed, forward only")
def mezo(place):
    engine = place.wrap(_mlp(), optimizer="sgd", lr=0.1)
    model = engine.module

    def move(seed, factor):
        generator = torch.Generator().manual_seed(seed)
        for p in model.parameters():
            p.data.add_(torch.randn(p.shape, generator=generator), alpha=factor)

    with torch.no_grad():
        for seed in range(3):
            move(seed, 1e-2)
            up = model(_x(seed=seed)).pow(2).mean()
            move(seed, -2e-2)
            down = model(_x(seed=seed)).pow(2).mean()
            move(seed, 1e-2)
            move(seed, -0.1 * ((up - down) / 2e-2).item())
    return values(model)


@family.works("gradient checkpointing of a segment that reads `self.weight.grad` and an attribute")
def checkpointed_reads(place):
    class Reads(nn.Linear):
        def forward(self, x):
            scale = 1.0 if self.weight.grad is None else 1 / (1 + self.weight.grad.norm().item())
            return super().forward(x) * scale * getattr(self.weight, "gain", 1.0)

    torch.manual_seed(0)
    model = nn.Sequential(*(Reads(16, 16) for _ in range(4)))
    place.wrap(model)
    for index, layer in enumerate(model):
        layer.weight.gain = 1 + index / 10
    found = []
    for index in range(3):
        x = _x(seed=index).requires_grad_()
        loss = torch.utils.checkpoint.checkpoint(model, x, use_reentrant=False).pow(2).mean()
        loss.backward()
        found.append(loss.item())
    return found, gradients(model)


@family.works("surgery on state dicts: renamed, sliced, grown and loaded with `strict=False`")
def state_dict_surgery(place):
    engine = place.small()
    state = {f"module.{name}": value for name, value in engine.module.state_dict().items()}
    state = {name.removeprefix("module."): value * 0.9 for name, value in state.items() if "norm" not in name}
    missing = engine.module.load_state_dict(state, strict=False)
    return sorted(missing.missing_keys), train(engine), values(engine.module)


@family.works("discriminative learning rates, layers thawed one after the other")
def gradual_thawing(place):
    model = _mlp()
    groups = [{"params": layer.parameters(), "lr": 0.1 * 0.5**index} for index, layer in enumerate(model[::2])]
    engine = place.wrap(model, optimizer=torch.optim.SGD(groups, lr=0.1))
    found = []
    for thawed in range(1, 4):
        for index, layer in enumerate(model[::2]):
            layer.requires_grad_(index >= 5 - thawed)
        engine.optimizer.zero_grad()
        loss = model(_x(seed=thawed)).pow(2).mean()
        loss.backward()
        engine.optimizer.step()
        found.append(loss.item())
    return found, values(model)


@family.works("gradients are gathered into one vector and given back (`parameters_to_vector`, L-BFGS-like)")
def flat_vectors(place):
    engine = place.wrap(_mlp(), optimizer="sgd", lr=0.1)
    parameters = list(engine.module.parameters())
    engine.module(_x()).pow(2).mean().backward()
    vector = nn.utils.parameters_to_vector([p.grad for p in parameters])
    nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(parameters) - 0.1 * vector, parameters)
    for p in parameters:
        p.grad = None
    return vector, _loop(engine, lambda index: engine.module(_x(seed=index)).pow(2).mean())


@family.works("weights are standardised (NFNet) in a subclass of Conv2d")
def standardised(place):
    class Conv(nn.Conv2d):
        def forward(self, x):
            weight = self.weight
            mean = weight.mean((1, 2, 3), keepdim=True)
            weight = (weight - mean) / (weight.var((1, 2, 3), keepdim=True) + 1e-4).sqrt()
            return F.conv2d(x, weight, self.bias, padding=1)

    torch.manual_seed(0)
    engine = place.wrap(nn.Sequential(Conv(3, 8, 3), nn.ReLU(), Conv(8, 8, 3), nn.ReLU(), Conv(8, 4, 3)))
    x = torch.linspace(-1, 1, 3 * 64).view(1, 3, 8, 8)
    return _loop(engine, lambda index: engine.module(x * (1 + index)).pow(2).mean())


@family.works("temperature and bias of a calibrated model are parameters set as attributes, `LBFGS` over them alone")
def calibrated(place):
    engine = place.wrap(_mlp())
    temperature = nn.Parameter(torch.ones(()))
    with torch.no_grad():
        logits = engine.module(_x())
    optimizer = torch.optim.LBFGS([temperature], lr=0.1, max_iter=5)

    def closure():
        optimizer.zero_grad()
        loss = F.cross_entropy(logits / temperature, torch.arange(8) % 4)
        loss.backward()
        return loss

    optimizer.step(closure)
    return temperature.detach(), values(engine.module)


@family.works("a normalising flow with `slogdet` of a weight in the loss")
def flow(place):
    class Mixing(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.linalg.qr(torch.randn(8, 8))[0])

        def forward(self, x):
            return x @ self.weight, torch.slogdet(self.weight)[1]

    torch.manual_seed(0)
    model = nn.ModuleList(Mixing() for _ in range(4))
    engine = place.wrap(model)

    def compute(index):
        x, total = _x(width=8, seed=index), 0
        for layer in model:
            x, log_det = layer(x)
            total = total + log_det
        return 0.5 * x.pow(2).sum(-1).mean() - total + 0.5 * math.log(2 * math.pi)

    return _loop(engine, compute)


@family.works("orthogonality penalty and spectral penalty over all weights of the model, outside of forward")
def weight_penalties(place):
    engine = place.wrap(_mlp())

    def compute(index):
        penalty = 0
        for p in engine.module.parameters():
            if p.dim() == 2:
                gram = p @ p.t()
                penalty = penalty + (gram - torch.eye(len(gram))).pow(2).sum() + torch.linalg.matrix_norm(p, 2)
        return engine.module(_x(seed=index)).pow(2).mean() + 1e-3 * penalty

    return _loop(engine, compute)


@family.works("K-FAC-like: statistics by hooks, gradients preconditioned in place")
def kfac(place):
    engine = place.wrap(_mlp(), optimizer="sgd", lr=0.1)
    model = engine.module
    inputs, outputs = {}, {}
    for module in model:
        if isinstance(module, nn.Linear):
            module.register_forward_pre_hook(lambda m, a: inputs.update({m: a[0].detach()}))
            module.register_full_backward_hook(lambda m, gi, go: outputs.update({m: go[0].detach()}))
    for index in range(2):
        engine.optimizer.zero_grad()
        model(_x(seed=index)).pow(2).mean().backward()
        for module in inputs:
            a, g = inputs[module], outputs[module] * 8
            left = torch.eye(g.shape[1]) + g.t() @ g
            right = torch.eye(a.shape[1]) + a.t() @ a / 8
            module.weight.grad.copy_(torch.linalg.solve(left, module.weight.grad) @ torch.linalg.inv(right))
        engine.optimizer.step()
    return values(model)


@family.works("Muon-like: momentum kept by the user, orthogonalised, written as the gradient")
def muon(place):
    engine = place.wrap(_mlp(), optimizer="sgd", lr=0.02)
    momentum = {}
    for index in range(3):
        engine.optimizer.zero_grad()
        engine.module(_x(seed=index)).pow(2).mean().backward()
        for p in engine.module.parameters():
            if p.dim() == 2:
                m = momentum.setdefault(p, torch.zeros_like(p))
                m.mul_(0.9).add_(p.grad)
                u, _, v = torch.linalg.svd(m, full_matrices=False)
                p.grad = u @ v
        engine.optimizer.step()
    return values(engine.module)
