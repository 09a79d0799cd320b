"""What people do to gradients, weights and states between a backward and the next forward, pasted from the web, each
as it is and at the joints of the engine. The optimizer is torch's own arithmetic, so that bits are compared."""

from __future__ import annotations

import collections
import copy
import io
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils
from torch.optim.optimizer import Optimizer

from misuses.case import Family
from misuses.joints import ACCUMULATED, JOINTS, PLAIN, RESUMED, batch, program, stepped
from misuses.place import values
from misuses.strangers import WIDTH, Block, Net

family = Family("pasted steps")


def trained(run, *, build=Net, steps=4, before_step=None, after_step=None, each=None, resumes=True, **options):
    """``before_step`` comes between backward and step, ``each`` after each backward; what they give is compared."""
    engine = run.engine(build(), **options)
    found = []
    for step in range(steps):

        def body(index, engine=engine, step=step):
            loss = engine(batch(index)).square().mean()
            loss.backward()
            return loss.item(), None if each is None else each(engine.module, step)

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        if before_step is not None:
            found.append(before_step(engine, step))
        found.append(stepped(engine))
        if after_step is not None:
            found.append(after_step(engine, step))
        if step == 1 and resumes:
            engine = run.resume(engine, build, **options)
    return found, values(engine.module)


# Gradients.


@program(
    family,
    "adaptive clipping by rows: norms of each row of weight and gradient, `p.grad.copy_(torch.where(...))`",
    JOINTS,
)
def clipping_by_rows(run):
    def before_step(engine, step):
        for p in engine.module.parameters():
            if p.dim() < 2:
                continue
            weight = p.detach().square().sum(1, keepdim=True).sqrt().clamp_(min=1e-3)
            slope = p.grad.detach().square().sum(1, keepdim=True).sqrt()
            most = weight * 0.01
            p.grad.detach().copy_(torch.where(slope > most, p.grad * (most / slope.clamp(min=1e-6)), p.grad))

    return trained(run, before_step=before_step)


@program(family, "gradient noise: `p.grad += torch.randn_like(p.grad) * sigma`, sigma falls with the step", JOINTS)
def noise_on_gradients(run):
    torch.manual_seed(3)

    def before_step(engine, step):
        for p in engine.module.parameters():
            p.grad += torch.randn_like(p.grad) * math.sqrt(0.01 / (1 + step) ** 0.55)

    return trained(run, before_step=before_step)


@program(
    family, "weight decay by hand between backward and step: `p.data.mul_`, `p.data.add_`, `p.copy_` by kind", JOINTS
)
def decay_by_hand(run):
    def before_step(engine, step):
        for name, p in engine.module.named_parameters():
            if p.dim() < 2:
                p.data.add_(p.data, alpha=-1e-3)
            elif "up" in name:
                p.data.mul_(1 - 1e-2)
            else:
                with torch.no_grad():
                    p.copy_(p * (1 - 1e-3))

    return trained(run, before_step=before_step)


@program(
    family,
    "weights are written through views after each step: rows, columns, strides, the diagonal, a transposed view",
    JOINTS,
)
def writes_through_many_views(run):
    def after_step(engine, step):
        model = engine.module
        with torch.no_grad():
            model.first.weight[3:5].zero_()
            model.first.weight.t().mul_(1.01)
            model.first.weight.view(-1)[::7] += 0.01
            model.last.weight.diagonal().add_(0.02)
            model.last.weight[:, torch.tensor([1, 4, 9])] = 0.1
            model.last.bias.unsqueeze(0).sub_(0.01)
            model.blocks[0].up.weight.index_copy_(0, torch.tensor([2, 5]), torch.ones(2, WIDTH))
            model.blocks[1].up.weight.masked_fill_(model.blocks[1].up.weight.abs() < 0.01, 0.0)
            model.blocks[2].up.weight.unfold(0, 4, 4).mul_(0.99)
            torch.as_strided(model.blocks[3].down.weight, (4, 4), (WIDTH, 1), 5).fill_(0.05)
            nn.init.orthogonal_(model.blocks[4].up.weight[:8])
            model.blocks[4].down.weight.chunk(4)[2].clamp_(-0.05, 0.05)

    return trained(run, after_step=after_step)


@program(
    family, "dead neurons are drawn anew after a step: rows and columns by activity, momentum rows set to zero", JOINTS
)
def dead_neurons(run):
    def after_step(engine, step):
        model, optimizer = engine.module, engine.optimizer
        draws = torch.Generator().manual_seed(step)
        for block in model.blocks:
            with torch.no_grad():
                quiet = torch.relu(block.up(batch(80))).mean(0).argsort()[:3]
                block.up.weight[quiet] = torch.randn(3, WIDTH, generator=draws) * 0.1
                block.down.weight[:, quiet] = 0
                optimizer.state[block.up.weight]["momentum_buffer"][quiet] = 0
                optimizer.state[block.down.weight]["momentum_buffer"][:, quiet] = 0
        return [optimizer.state[p]["momentum_buffer"].clone() for p in model.blocks[0].parameters()]

    return trained(run, after_step=after_step)


@program(family, "GaLore: each second step a projection by SVD, `p.grad` goes to the low rank and back", JOINTS)
def low_rank_gradients(run):
    bases = {}

    def before_step(engine, step):
        for name, p in engine.module.named_parameters():
            if p.dim() < 2:
                continue
            if step % 2 == 0:
                bases[name] = torch.linalg.svd(p.grad, full_matrices=False)[0][:, :8]
            p.grad = bases[name] @ (bases[name].T @ p.grad)

    return trained(run, before_step=before_step)


@program(
    family,
    "Shampoo by a step pre-hook: Kronecker statistics of `p.grad`, inverse roots, the gradient replaced",
    RESUMED,
)
def kronecker_hook(run):
    statistics = {}

    def hook(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for index, p in enumerate(group["params"]):
                if p.grad is None or p.dim() != 2:
                    continue
                left, right = statistics.setdefault(index, [torch.eye(p.shape[0]), torch.eye(p.shape[1])])
                left.add_(p.grad @ p.grad.T)
                right.add_(p.grad.T @ p.grad)
                roots = []
                for each in (left, right):
                    eigenvalues, vectors = torch.linalg.eigh(each)
                    roots.append(vectors @ torch.diag(eigenvalues.clamp(min=1e-6).pow(-0.25)) @ vectors.T)
                p.grad.copy_(roots[0] @ p.grad @ roots[1])

    engine = run.engine()
    handle = engine.optimizer.register_step_pre_hook(hook)
    found = []
    for step in range(4):
        loss = engine(batch(step)).square().mean()
        loss.backward()
        found.append(loss.item())
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        if step == 1 and run.joint == "resumed":
            engine = run.resume(engine)
            if run.place.has_engine:
                handle.remove()
                engine.optimizer.register_step_pre_hook(hook)
    return found, values(engine.module), statistics


@program(
    family,
    "K-FAC: forward pre-hooks and backward hooks of layers gather factors, gradients are preconditioned",
    ACCUMULATED,
)
def kronecker_factors(run):
    factors = collections.defaultdict(dict)

    def build():
        model = Net()
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):

                def inputs(module, args, name=name):
                    if torch.is_grad_enabled():
                        a = args[0].detach()
                        factors[name]["a"] = 0.9 * factors[name].get("a", torch.eye(WIDTH)) + 0.1 * a.T @ a / len(a)

                def outputs(module, grad_in, grad_out, name=name):
                    g = grad_out[0].detach()
                    factors[name]["g"] = 0.9 * factors[name].get("g", torch.eye(WIDTH)) + 0.1 * g.T @ g * len(g)

                module.register_forward_pre_hook(inputs)
                module.register_full_backward_hook(outputs)
        return model

    def before_step(engine, step):
        for name, module in engine.module.named_modules():
            if isinstance(module, nn.Linear):
                damp = 0.1 * torch.eye(WIDTH)
                left = torch.linalg.inv(factors[name]["g"] + damp)
                module.weight.grad = left @ module.weight.grad @ torch.linalg.inv(factors[name]["a"] + damp)
                module.bias.grad.copy_(left @ module.bias.grad)

    return trained(run, build=build, before_step=before_step, steps=3)


@program(family, "PowerSGD with error feedback: a rank of two, the rest is kept by name and added next time", JOINTS)
def power_sgd(run):
    errors, queries = {}, {}

    def before_step(engine, step):
        for name, p in engine.module.named_parameters():
            if p.dim() < 2:
                continue
            whole = p.grad + errors.get(name, 0)
            query = queries.get(name, torch.ones(WIDTH, 2).cumsum(0))
            left = torch.linalg.qr(whole @ query)[0]
            queries[name] = whole.T @ left
            p.grad.copy_(left @ queries[name].T)
            errors[name] = (whole - p.grad).detach()

    return trained(run, before_step=before_step)


@program(
    family,
    "signs by majority: each micro-batch's gradient is taken as signs and dropped, the vote becomes the gradient",
    ACCUMULATED,
)
def majority_of_signs(run):
    votes = {}

    def each(model, step):
        for name, p in model.named_parameters():
            votes[name] = votes.get(name, 0) + p.grad.sign()
            p.grad = None

    def before_step(engine, step):
        for name, p in engine.module.named_parameters():
            p.grad = 1e-2 * votes.pop(name).sign()

    return trained(run, each=each, before_step=before_step)


@program(
    family,
    "LARS: layers' rates by norms of weights and gradients, applied to `p.grad.data`; centralised gradients",
    JOINTS,
)
def rates_of_layers(run):
    def before_step(engine, step):
        rates = []
        for p in engine.module.parameters():
            g = p.grad.data
            if p.dim() > 1:
                g.sub_(g.mean(1, keepdim=True))
            rate = (p.data.square().sum().sqrt() / (g.square().sum().sqrt() + 1e-8)).item()
            g.mul_(0.01 * rate)
            rates.append(rate)
        return rates

    return trained(run, before_step=before_step)


@program(
    family, "cautious momentum: a mask of signs between momentum and gradient, read from `optimizer.state`", RESUMED
)
def cautious_masks(run):
    def before_step(engine, step):
        shares = []
        for p in engine.module.parameters():
            state = engine.optimizer.state[p]
            if "momentum_buffer" in state and state["momentum_buffer"] is not None:
                mask = (state["momentum_buffer"] * p.grad > 0).to(p.dtype)
                shares.append(mask.mean().item())
                p.grad.mul_(mask / mask.mean().clamp(min=1e-3))
        return shares

    return trained(run, before_step=before_step)


@program(family, "PCGrad by `autograd.grad` of three losses of one forward, written by `p.grad = `", PLAIN)
def surgery_by_autograd_grad(run):
    engine = run.engine()
    model, found = engine.module, []
    for step in range(3):
        out = engine(batch(step))
        losses = [out[:, :10].square().mean(), (out[:, 10:20] - 1).abs().mean(), out[:, 20:].sum(1).tanh().mean()]
        parameters = list(model.parameters())
        flat = []
        for index, loss in enumerate(losses):
            slopes = torch.autograd.grad(loss, parameters, retain_graph=index < 2, allow_unused=True)
            flat.append(torch.cat([s.flatten() for s in slopes]))
        fixed = [f.clone() for f in flat]
        for one in fixed:
            for other in flat:
                product = one @ other
                if product < 0:
                    one -= product / (other @ other) * other
        whole, start = sum(fixed), 0
        for p in parameters:
            p.grad = whole[start : start + p.numel()].view_as(p).clone()
            start += p.numel()
        found += [loss.item() for loss in losses] + [stepped(engine)]
    return found, values(model)


@program(
    family,
    "GradNorm: norms of the tasks' gradients of one shared layer, weights of losses learn by their own Adam",
    PLAIN,
)
def grad_norm(run):
    engine = run.engine()
    model, found = engine.module, []
    weights = nn.Parameter(torch.ones(3))
    other = torch.optim.Adam([weights], lr=0.05)
    for step in range(3):
        out = engine(batch(step))
        losses = torch.stack(
            [out[:, :10].square().mean(), (out[:, 10:20] - 1).abs().mean(), out[:, 20:].square().mean()]
        )
        if step == 0:
            first = losses.detach()
        norms = []
        for loss in losses:
            (slope,) = torch.autograd.grad(loss, model.last.weight, retain_graph=True)
            norms.append((slope * slope).sum().sqrt())
        norms = torch.stack(norms)
        goal = (norms * weights.detach()).mean() * (losses.detach() / first)
        (norms * weights - goal).abs().sum().backward()
        other.step()
        other.zero_grad()
        (weights.detach() * losses).sum().backward()
        found += [losses.detach().clone(), weights.detach().clone(), stepped(engine)]
    return found, values(model)


@program(
    family,
    "micro-batches are weighted by agreement: gradients set aside, cosines to their mean, summed up by hand",
    ACCUMULATED,
)
def agreeing_micro_batches(run):
    engine = run.engine()
    found = []
    for step in range(3):
        kept = []

        def body(index, kept=kept):
            loss = engine(batch(index)).square().mean()
            loss.backward()
            kept.append([p.grad.clone() for p in engine.module.parameters()])
            engine.module.zero_grad()
            return loss.item()

        found += run.accumulate(engine, range(3 * step, 3 * step + 3), body)
        flat = torch.stack([torch.cat([g.flatten() for g in each]) for each in kept])
        share = F.softmax(F.cosine_similarity(flat, flat.mean(0, keepdim=True)), 0)
        for index, p in enumerate(engine.module.parameters()):
            p.grad = sum(w * each[index] for w, each in zip(share, kept, strict=True))
        found += [share, stepped(engine)]
    return found, values(engine.module)


# Optimizers around the optimizer.


class Lookahead:
    """As pasted from a repository: it wraps any optimizer, has slow weights in its own state, and a state dict."""

    def __init__(self, optimizer, k=2, alpha=0.5):
        self.optimizer, self.k, self.alpha, self.count = optimizer, k, alpha, 0
        self.param_groups = optimizer.param_groups
        self.slow = {}

    def step(self, closure=None):
        loss = self.optimizer.step(closure)
        self.count += 1
        if self.count % self.k == 0:
            for group in self.param_groups:
                for index, fast in enumerate(group["params"]):
                    slow = self.slow.setdefault(index, fast.data.clone())
                    slow += (fast.data - slow) * self.alpha
                    fast.data.copy_(slow)
        return loss

    def zero_grad(self):
        self.optimizer.zero_grad()


@program(
    family, "Lookahead wraps the engine's optimizer as an object of its own, a scheduler runs over its groups", PLAIN
)
def lookahead_object(run):
    engine = run.engine()
    optimizer = Lookahead(engine.optimizer)
    found = []
    for step in range(5):
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * 0.9**step
        loss = engine(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, values(engine.module), optimizer.slow


class Sam:
    """The wrapper of the reference code: first and second step, the base optimizer's groups are its own."""

    def __init__(self, base, rho=0.05):
        self.base, self.rho, self.param_groups = base, rho, base.param_groups
        self.state = collections.defaultdict(dict)

    @torch.no_grad()
    def first_step(self):
        norm = torch.stack([p.grad.detach().clone().norm() for g in self.param_groups for p in g["params"]]).norm()
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.data.clone()
                p.add_(p.grad * (self.rho / (norm + 1e-12)))
                p.grad = None

    @torch.no_grad()
    def second_step(self):
        for group in self.param_groups:
            for p in group["params"]:
                p.data = self.state[p]["old"]
        self.base.step()
        self.base.zero_grad()


@program(
    family,
    "SAM as its wrapper class does it, over accumulated micro-batches, BatchNorm's statistics off in the second",
    ACCUMULATED,
)
def sam_wrapper(run):
    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return super().forward(self.norm(x))

    engine = run.engine(Net(Normed))
    optimizer = Sam(engine.optimizer)
    found = []
    norms = [m for m in engine.module.modules() if isinstance(m, nn.BatchNorm1d)]
    for step in range(3):
        for first in (True, False):
            for norm in norms:
                if first:
                    norm.momentum = norm.__dict__.pop("old_momentum", 0.1)
                else:
                    norm.old_momentum, norm.momentum = norm.momentum, 0.0

            def body(index):
                loss = engine(batch(index)).square().mean()
                loss.backward()
                return loss.item()

            found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
            (optimizer.first_step if first else optimizer.second_step)()
    return found, values(engine.module)


@program(
    family, "adversarial weight perturbation: a copy is attacked by its own optimizer, its move is added and taken away"
)
def weight_perturbation(run):
    engine = run.engine()
    proxy = copy.deepcopy(engine.module)
    attack = torch.optim.SGD(proxy.parameters(), lr=0.01)
    found = []
    for step in range(3):
        proxy.load_state_dict(engine.module.state_dict())
        proxy.train()
        (-proxy(batch(step)).square().mean()).backward()
        attack.step()
        attack.zero_grad()
        moves = {}
        for (name, p), q in zip(engine.module.named_parameters(), proxy.parameters(), strict=True):
            if p.dim() > 1:
                difference = q.detach() - p.detach()
                old = p.detach().clone()
                moves[name] = 0.1 * old.norm() / (difference.norm() + 1e-20) * difference
        with torch.no_grad():
            for name, p in engine.module.named_parameters():
                if name in moves:
                    p.add_(moves[name])
        loss = engine(batch(step)).square().mean()
        loss.backward()
        slopes = stepped(engine)
        with torch.no_grad():
            for name, p in engine.module.named_parameters():
                if name in moves:
                    p.sub_(moves[name])
        found += [loss.item(), slopes]
    return found, values(engine.module)


@program(family, "a trust region: the step is taken back by halves until the output has moved little", RESUMED)
def trust_region(run):
    engine = run.engine()
    found = []
    for step in range(4):
        loss = engine(batch(step)).square().mean()
        loss.backward()
        with torch.no_grad():
            before = engine(batch(90))
        old = [p.detach().clone() for p in engine.module.parameters()]
        found += [loss.item(), stepped(engine)]
        moves = [p.detach() - o for p, o in zip(engine.module.parameters(), old, strict=True)]
        for half in range(5):
            with torch.no_grad():
                far = (engine(batch(90)) - before).square().mean().item()
                if far < 1e-4:
                    break
                for p, o, move in zip(engine.module.parameters(), old, moves, strict=True):
                    p.copy_(o + move * 0.5 ** (half + 1))
        found += [half, far]
        if step == 1:
            engine = run.resume(engine)
    return found, values(engine.module)


class Prodding(Optimizer):
    """Of the user's: states of two kinds, a group option that it counts in, `_foreach_` arithmetic."""

    def __init__(self, parameters, lr=0.01, beta=0.9):
        super().__init__(parameters, {"lr": lr, "beta": beta, "k": 0})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["k"] += 1
            parameters = [p for p in group["params"] if p.grad is not None]
            for p in parameters:
                if not self.state[p]:
                    self.state[p]["mean"], self.state[p]["far"] = torch.zeros_like(p), p.detach().clone()
            means = [self.state[p]["mean"] for p in parameters]
            torch._foreach_lerp_(means, [p.grad for p in parameters], 1 - group["beta"])
            torch._foreach_add_(parameters, torch._foreach_sign(means), alpha=-group["lr"] / math.sqrt(group["k"]))
            for p in parameters:
                self.state[p]["far"].lerp_(p, 0.1)


@program(
    family,
    "an optimizer of the user's: counts in a group, `_foreach_` operations, a copy of the weights as a state",
    JOINTS,
)
def own_optimizer(run):
    def after_step(engine, step):
        return [engine.optimizer.param_groups[0]["k"]] + [
            engine.optimizer.state[p]["far"].clone() for p in engine.module.last.parameters()
        ]

    return trained(run, optimizer=Prodding, optimizer_options={}, after_step=after_step)


@program(
    family,
    "layers are frozen and thawed by a schedule, discriminative rates, a warm-up that begins anew for each",
    JOINTS,
)
def gradual_unfreezing(run):
    engine = run.engine()
    found = []
    for step in range(6):
        model = engine.module
        for index, block in enumerate(model.blocks):
            block.requires_grad_(index >= 5 - step)
        model.first.requires_grad_(step == 5)
        for group in engine.optimizer.param_groups:
            group["lr"] = 0.05 * min(1, (step % 3 + 1) / 3)

        def body(index, engine=engine):
            loss = engine(batch(index)).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
        if step == 2:
            for p in engine.module.parameters():
                p.requires_grad_(True)
            engine = run.resume(engine)
    return found, values(engine.module)


@program(family, "OneCycle with momentum, clipping by value, over accumulated micro-batches", ACCUMULATED)
def one_cycle(run):
    def schedule(engine):
        return lr_scheduler.OneCycleLR(
            engine.optimizer, max_lr=0.1, total_steps=8, cycle_momentum=True, base_momentum=0.8, max_momentum=0.95
        )

    engine = run.engine()
    scheduler, found = schedule(engine), []
    for step in range(6):

        def body(index, engine=engine):
            loss = engine(batch(index)).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        nn.utils.clip_grad_value_(engine.module.parameters(), 0.01)
        found.append(stepped(engine))
        scheduler.step()
        group = engine.optimizer.param_groups[0]
        found += [group["lr"], group["momentum"]]
    return found, values(engine.module)


@program(
    family,
    "an average by `AveragedModel` of an EMA with warm-up, on buffers too, that is swapped in for evaluation",
    RESUMED,
)
def swapped_average(run):
    class Normed(Block):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return super().forward(self.norm(x))

    engine = run.engine(Net(Normed))
    average = swa_utils.AveragedModel(
        engine.module,
        avg_fn=lambda old, new, count: old + (new - old) * max(0.1, 1 / (1 + count)),
        use_buffers=True,
    )
    found = []
    for step in range(4):
        loss = engine(batch(step)).square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
        average.update_parameters(engine.module)
        kept = copy.deepcopy(engine.module.state_dict())
        engine.module.load_state_dict(average.module.state_dict())
        engine.module.eval()
        with torch.no_grad():
            found.append(engine(batch(60)))
        engine.module.train()
        engine.module.load_state_dict(kept)
        if step == 1:
            engine = run.resume(engine, lambda: Net(Normed))
    return found, values(engine.module), values(average)


# Files.


@program(
    family,
    "a training script's checkpoint: model, optimizer, scheduler, random state in one file, `weights_only`, `mmap`",
)
def script_checkpoint(run):
    engine = run.engine()
    scheduler = lr_scheduler.CosineAnnealingLR(engine.optimizer, 6)
    found = []
    path = run.place.folder / "checkpoint.pt"
    for step in range(5):
        loss = engine(batch(step) + 0.1 * torch.randn(160, WIDTH)).square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
        scheduler.step()
        if step == 1:
            torch.save(
                {
                    "model": engine.module.state_dict(),
                    "optimizer": engine.optimizer.state_dict(),
                    "scheduler": scheduler.state_dict(),
                    "random": torch.get_rng_state(),
                    "step": step,
                },
                path,
            )
        if step == 3:
            saved = torch.load(path, weights_only=True, mmap=True)
            engine.module.load_state_dict(saved["model"])
            engine.optimizer.load_state_dict(saved["optimizer"])
            scheduler.load_state_dict(saved["scheduler"])
            torch.set_rng_state(saved["random"])
    return found, values(engine.module)


@program(
    family,
    "DDP's names: a state dict with `module.` is stripped, half of the tensors in float16, `strict=False`",
)
def stripped_names(run):
    engine = run.engine()
    found = []
    for step in range(4):
        loss = engine(batch(step)).square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
        if step == 1:
            buffer = io.BytesIO()
            torch.save(
                {f"module.{n}": v.half() if "up" in n else v for n, v in engine.module.state_dict().items()}, buffer
            )
            buffer.seek(0)
            state = torch.load(buffer, weights_only=True)
            state["module.extra"] = torch.ones(3)
            state.pop("module.last.bias")
            known = engine.module.load_state_dict(
                {n.removeprefix("module."): v for n, v in state.items()}, strict=False
            )
            found.append([known.missing_keys, known.unexpected_keys])
    return found, values(engine.module)


@program(
    family, "a deep copy takes a state dict by `assign=True` and is trained by torch; its weights come back by `copy_`"
)
def assigned_copy(run):
    engine = run.engine()
    found = []
    for step in range(3):
        loss = engine(batch(step)).square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
        twin = Net()
        twin.load_state_dict({n: v.clone() for n, v in engine.module.state_dict().items()}, assign=True)
        optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        twin(batch(step + 10)).square().mean().backward()
        optimizer.step()
        with torch.no_grad():
            for p, q in zip(engine.module.parameters(), twin.parameters(), strict=True):
                p.copy_(q)
    return found, values(engine.module)


@program(
    family, "the optimizer is changed in the middle (SWATS): unwrapped, momentum taken over by hand, wrapped again"
)
def other_optimizer(run):
    engine = run.engine()
    found = []
    for step in range(2):
        loss = engine(batch(step)).square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
    kept = [engine.optimizer.state[p]["momentum_buffer"].clone() for p in engine.module.parameters()]
    model = engine.unwrap()
    if run.place.has_engine:
        run.place.left.remove(engine)
    engine = run.engine(model, optimizer=Prodding, lr=0.01, optimizer_options={"beta": 0.8})
    loss = engine(batch(2)).square().mean()
    loss.backward()
    found += [loss.item(), stepped(engine)]
    for p, momentum in zip(engine.module.parameters(), kept, strict=True):
        engine.optimizer.state[p]["mean"].copy_(momentum)
    loss = engine(batch(3)).square().mean()
    loss.backward()
    return found, stepped(engine), values(engine.module)


@program(
    family,
    "net2net: unwrapped, a block is added as an identity and layers are widened, wrapped again with old momentum",
)
def grown_net(run):
    engine = run.engine()
    found = []
    for step in range(2):
        loss = engine(batch(step)).square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
    kept = {n: engine.optimizer.state[p]["momentum_buffer"].clone() for n, p in engine.module.named_parameters()}
    model = engine.unwrap()
    if run.place.has_engine:
        run.place.left.remove(engine)
    torch.manual_seed(8)
    block = Block()
    nn.init.zeros_(block.down.weight)
    nn.init.zeros_(block.down.bias)
    model.blocks.append(block)
    old = model.blocks[0]
    wide_up, wide_down = nn.Linear(WIDTH, WIDTH + 8), nn.Linear(WIDTH + 8, WIDTH)
    with torch.no_grad():
        rows = torch.cat([torch.arange(WIDTH), torch.arange(8)])
        wide_up.weight.copy_(old.up.weight[rows])
        wide_up.bias.copy_(old.up.bias[rows])
        wide_down.weight.copy_(old.down.weight[:, rows])
        wide_down.weight[:, :8] /= 2
        wide_down.weight[:, -8:] /= 2
        wide_down.bias.copy_(old.down.bias)
    old.up, old.down = wide_up, wide_down
    engine = run.engine(model)
    for step in range(2, 4):
        loss = engine(batch(step)).square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
        if step == 2:
            for name, p in engine.module.named_parameters():
                if name in kept and kept[name].shape == p.shape:
                    engine.optimizer.state[p]["momentum_buffer"].add_(kept[name])
    return found, values(engine.module)


# Hooks and looks.


@program(
    family,
    "hooks of all kinds at once: full backward (pre-)hooks, tensor hooks, post-accumulate hooks, all logged and scaled",
    ACCUMULATED,
)
def hooks_of_all_kinds(run):
    log = []

    def build():
        model = Net()
        for name, module in model.named_modules():
            if isinstance(module, nn.Linear):
                module.register_full_backward_pre_hook(lambda m, g: (g[0] * 0.99,))
                module.register_full_backward_hook(
                    lambda m, i, o, n=name: (
                        log.append((n, float(o[0].abs().sum()))) or (i[0] if i[0] is None else i[0] * 1.01,)
                    )
                )
                module.register_forward_hook(
                    lambda m, a, o: o.register_hook(lambda g: g * 1.001) and None if o.requires_grad else None
                )
        for p in model.parameters():
            p.register_hook(lambda g: g * 0.5)
        return model

    engine = run.engine(build())
    norms = []
    for p in engine.module.parameters():
        p.register_post_accumulate_grad_hook(lambda p: norms.append(float((p.grad * p.grad).sum())))
    found = []
    for step in range(3):

        def body(index):
            loss = engine(batch(index)).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
    return found, values(engine.module), sorted(log), sorted(norms)


@program(
    family,
    "Grad-CAM in the middle of training: eval mode, hooks, a backward of one class whose gradients are dropped",
    RESUMED,
)
def class_activation_map(run):
    def after_step(engine, step):
        model, kept = engine.module, {}
        model.eval()
        handles = [
            model.blocks[2].register_forward_hook(lambda m, a, o: kept.update(activation=o)),
            model.blocks[2].register_full_backward_hook(lambda m, i, o: kept.update(slope=o[0])),
        ]
        out = model(batch(70))
        out[:, 3].sum().backward()
        for handle in handles:
            handle.remove()
        model.zero_grad()
        model.train()
        return torch.relu((kept["activation"] * kept["slope"].mean(0)).sum(1))

    return trained(run, after_step=after_step)


@program(
    family,
    "dataset condensation: the synthetic batch learns from a match of gradients by two passes over the model",
    PLAIN,
)
def matched_gradients(run):
    engine = run.engine()
    model, found = engine.module, []
    synthetic = batch(5, 16).requires_grad_()
    optimizer = torch.optim.SGD([synthetic], lr=10.0)
    for step in range(3):
        loss = engine(batch(step)).square().mean()
        real = torch.autograd.grad(loss, list(model.parameters()))
        for sign in (1e-2, -1e-2):
            with torch.no_grad():
                for p, slope in zip(model.parameters(), real, strict=True):
                    p.add_(slope, alpha=sign if sign > 0 else 2 * sign)
            ((engine(synthetic).square().mean()) / (2 * sign)).backward(inputs=[synthetic])
        with torch.no_grad():
            for p, slope in zip(model.parameters(), real, strict=True):
                p.add_(slope, alpha=1e-2)
        optimizer.step()
        optimizer.zero_grad()
        engine(synthetic.detach()).square().mean().backward()
        found += [loss.item(), synthetic.detach().clone(), stepped(engine)]
    return found, values(model)


@program(
    family,
    "DARTS by differences: weights are moved by a gradient, two backwards of the architecture's part, moved back",
    PLAIN,
)
def darts_by_differences(run):
    class Mixed(Block):
        def __init__(self):
            super().__init__()
            self.alpha = nn.Parameter(torch.zeros(3))

        def forward(self, x):
            share = F.softmax(self.alpha, 0)
            return share[0] * x + share[1] * super().forward(x) + share[2] * torch.tanh(self.down(x))

    engine = run.engine(Net(Mixed))
    model, found = engine.module, []
    alphas = [p for n, p in model.named_parameters() if "alpha" in n]
    weights = [p for n, p in model.named_parameters() if "alpha" not in n]
    for step in range(3):
        slopes = torch.autograd.grad(engine(batch(step + 20)).square().mean(), weights)
        finite = []
        for sign in (1, -2):
            with torch.no_grad():
                for p, slope in zip(weights, slopes, strict=True):
                    p.add_(slope, alpha=0.01 * sign)
            finite.append(torch.autograd.grad(engine(batch(step)).square().mean(), alphas))
        with torch.no_grad():
            for p, slope in zip(weights, slopes, strict=True):
                p.add_(slope, alpha=0.01)
        loss = engine(batch(step + 20)).square().mean()
        loss.backward()
        for alpha, plus, minus in zip(alphas, *finite, strict=True):
            alpha.grad.sub_((plus - minus) / 0.02 * 0.05)
        found += [loss.item(), stepped(engine)]
    return found, values(model)


@program(
    family,
    "a tied head that is untied after two steps by unwrapping, and tied to the transposed embedding before",
    PLAIN,
)
def untied_head(run):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed = nn.Embedding(50, WIDTH)
            self.blocks = nn.ModuleList(Block() for _ in range(4))
            self.head = None

        def forward(self, ids):
            x = self.embed(ids)
            for block in self.blocks:
                x = block(x)
            return x @ self.embed.weight.T if self.head is None else self.head(x)

    engine = run.engine(Tied())
    found = []
    ids = torch.randint(0, 50, (160,), generator=torch.Generator().manual_seed(1))
    for step in range(4):
        if step == 2:
            model = engine.unwrap()
            if run.place.has_engine:
                run.place.left.remove(engine)
            model.head = nn.Linear(WIDTH, 50, bias=False)
            model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
            engine = run.engine(model)
        loss = F.cross_entropy(engine(ids), ids.roll(step + 1))
        loss.backward()
        found += [loss.item(), stepped(engine)]
    return found, values(engine.module)


@program(
    family,
    "`GradScaler` over micro-batches: an overflow is put into one, the step is skipped, the scale grows again",
    ACCUMULATED,
)
def scaler_overflow(run):
    engine = run.engine()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    found = []
    for step in range(5):

        def body(index, step=step):
            loss = engine(batch(index)).square().mean()
            if step == 1:
                loss = loss * float("inf")
            scaler.scale(loss).backward()
            return step

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        scaler.unscale_(engine.optimizer)
        nn.utils.clip_grad_value_(engine.module.parameters(), 0.05)
        scaler.step(engine.optimizer)
        scaler.update()
        engine.optimizer.zero_grad()
        found.append(scaler.get_scale())
    return found, values(engine.module)


@program(
    family,
    "Adam by hand over `named_parameters()` with a dict of moments, no engine step at all, weights by `addcdiv_`",
    ACCUMULATED,
)
def adam_by_hand(run):
    engine = run.engine()
    first, second, found = {}, {}, []
    for step in range(1, 4):

        def body(index):
            loss = engine(batch(index)).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        with torch.no_grad():
            for name, p in engine.module.named_parameters():
                first.setdefault(name, torch.zeros_like(p)).lerp_(p.grad, 0.1)
                second.setdefault(name, torch.zeros_like(p)).mul_(0.99).addcmul_(p.grad, p.grad, value=0.01)
                bias = math.sqrt(1 - 0.99**step)
                p.addcdiv_(first[name], second[name].sqrt().div_(bias).add_(1e-8), value=-0.01 / (1 - 0.9**step))
        engine.module.zero_grad()
    return found, values(engine.module)


@program(
    family,
    "two steps' worth of momentum are looked at, saved and compared by `optimizer.state_dict()` in each step",
    RESUMED,
)
def state_dicts_each_step(run):
    def after_step(engine, step):
        state = engine.optimizer.state_dict()
        return [state["state"][0]["momentum_buffer"].clone(), sorted(state["param_groups"][0]), len(state["state"])]

    return trained(run, after_step=after_step)


def test_time(engine, step):
    """Entropy of a copy whose norms alone are trained (TENT)."""
    twin = copy.deepcopy(engine.module)
    twin.requires_grad_(False)
    biases = [p.requires_grad_() for n, p in twin.named_parameters() if "bias" in n]
    optimizer = torch.optim.SGD(biases, lr=0.1)
    for index in range(2):
        logits = twin(batch(60 + index))
        (-(F.softmax(logits, 1) * F.log_softmax(logits, 1)).sum(1).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        return twin(batch(62))


@program(
    family, "test-time adaptation of a deep copy between steps: biases alone, by the entropy of its outputs", RESUMED
)
def adapted_copies(run):
    return trained(run, after_step=test_time)


@program(
    family, "temperature scaling by L-BFGS over detached logits in each epoch, the temperature is in the loss", PLAIN
)
def temperature_scaling(run):
    engine = run.engine()
    temperature, found = torch.ones((), requires_grad=True), []
    labels = batch(3).argmax(1)
    for step in range(3):
        with torch.no_grad():
            logits = engine(batch(50))
        optimizer = torch.optim.LBFGS([temperature], max_iter=5)

        def closure(logits=logits, optimizer=optimizer):
            optimizer.zero_grad()
            loss = F.cross_entropy(logits / temperature, labels)
            loss.backward()
            return loss

        optimizer.step(closure)
        loss = F.cross_entropy(engine(batch(step)) / temperature.detach(), labels)
        loss.backward()
        found += [loss.item(), temperature.item(), stepped(engine)]
    return found, values(engine.module)
