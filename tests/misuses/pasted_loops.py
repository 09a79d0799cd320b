"""Training loops that are pasted from the web, each as it is and at the joints of the engine. The optimizer is torch's
own arithmetic, so that bits are compared."""

from __future__ import annotations

import copy
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from misuses.case import Family
from misuses.joints import ACCUMULATED, JOINTS, RESUMED, Run, batch, program, stepped
from misuses.place import gradients, values
from misuses.strangers import WIDTH, Block, Exact, Net

family = Family("pasted loops")


def seeded(outputs=WIDTH, blocks=3, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(*[Block() for _ in range(blocks)], nn.Linear(WIDTH, outputs))


class Pair(nn.Module):
    """A model and a frozen one beside it."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = seeded(), seeded()
        self.teacher.requires_grad_(False)
        self.register_buffer("centre", torch.zeros(WIDTH))

    def forward(self, x):
        with torch.no_grad():
            target = self.teacher(x)
        return self.student(x), target


@program(family, "mean teacher within one engine: frozen weights follow the trained ones by `mul_().add_()`", JOINTS)
def mean_teacher_in_engine(run):
    engine = run.engine(Pair())
    found = []
    for step in range(4):

        def body(index, engine=engine):
            out, target = engine(batch(index))
            loss = F.mse_loss(out, target + 0.1 * batch(index + 50))
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [3 * step, 3 * step + 1], body)
        found.append(stepped(engine))
        model = engine.module
        with torch.no_grad():
            for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                slow.mul_(0.9).add_(fast, alpha=0.1)
        if step == 1:
            engine = run.resume(engine, Pair)
    return found, values(engine.module)


@program(
    family, "DINO within one engine: the teacher by `torch._foreach_lerp_`, a centre in a buffer, two crops", JOINTS
)
def dino_in_engine(run):
    engine = run.engine(Pair())
    found = []
    for step in range(4):
        model = engine.module

        def body(index, model=model, engine=engine):
            one, two = batch(index), batch(index) + 0.1 * batch(index + 50)
            with torch.no_grad():
                target = F.softmax((model.teacher(one) - model.centre) / 0.1, -1)
                model.centre.mul_(0.9).add_(target.mean(0), alpha=0.1)
            loss = -(target * F.log_softmax(model.student(two), -1)).sum(-1).mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [3 * step, 3 * step + 1], body)
        found.append(stepped(engine))
        torch._foreach_lerp_(
            [p.data for p in model.teacher.parameters()], [p.data for p in model.student.parameters()], 0.2
        )
        if step == 1:
            engine = run.resume(engine, Pair)
    return found, values(engine.module)


class Queue(Pair):
    def __init__(self):
        super().__init__()
        self.register_buffer("queue", F.normalize(batch(99, 64), dim=1).T.contiguous())
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def forward(self, query, key):
        query = F.normalize(self.student(query), dim=1)
        with torch.no_grad():
            for slow, fast in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
                slow.data = slow.data * 0.9 + fast.data * 0.1
            key = F.normalize(self.teacher(key), dim=1)
        logits = torch.cat([(query * key).sum(1, keepdim=True), query @ self.queue.clone().detach()], 1) / 0.2
        with torch.no_grad():
            start = int(self.pointer)
            self.queue[:, start : start + 16] = key[:16].T
            self.pointer[0] = (start + 16) % 64
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


@program(
    family, "MoCo as in its repository: the forward moves the key encoder by `.data =`, and writes to its queue", JOINTS
)
def moco_in_forward(run):
    engine = run.engine(Queue())
    found = []
    for step in range(4):

        def body(index, engine=engine):
            loss = engine(batch(index), batch(index) + 0.1 * batch(index + 50))
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [3 * step, 3 * step + 1], body)
        found.append(stepped(engine))
        if step == 1:
            engine = run.resume(engine, Queue)
    return found, values(engine.module)


class Players(nn.Module):
    """A maker and a critic share their first blocks."""

    def __init__(self):
        super().__init__()
        self.shared, self.maker, self.critic = seeded(), seeded(seed=1), seeded(1, seed=2)

    def forward(self, x, player):
        return getattr(self, player)(self.shared(x))


@program(family, "a GAN over a shared backbone: one optimizer of two groups whose rates are set to 0 in turn", JOINTS)
def gan_on_a_backbone(run):
    def options(model):
        groups = [[*model.shared.parameters(), *model.maker.parameters()], list(model.critic.parameters())]
        return Exact([{"params": group} for group in groups], lr=0.05, momentum=0.5)

    model = Players()
    engine = _with(run, model, options(model))
    found = []
    for step in range(4):
        for player in ("critic", "maker"):
            for group, name in zip(engine.optimizer.param_groups, ("maker", "critic"), strict=True):
                group["lr"] = 0.05 if name == player else 0.0
            model = engine.module

            def body(index, model=model, player=player):
                fake = model(batch(index), "maker")
                if player == "critic":
                    real, fake = model(batch(index + 70), "critic"), model(fake.detach(), "critic")
                    loss = F.softplus(-real).mean() + F.softplus(fake).mean()
                else:
                    loss = F.softplus(-model(fake, "critic")).mean()
                loss.backward()
                return loss.item()

            found += run.accumulate(engine, [3 * step, 3 * step + 1], body)
            found.append(stepped(engine))
        if step == 1 and run.joint == "resumed" and run.place.has_engine:
            engine.save_checkpoint(run.place.folder / "saved")
            engine.close()
            run.place.left.remove(engine)
            model = Players()
            engine = _with(run, model, options(model))
            engine.load_checkpoint(run.place.folder / "saved")
    return found, values(engine.module)


def _with(run, model, optimizer):
    """The engine takes an optimizer that has been built."""
    keep = Run(run.place, run.joint)
    options = {"optimizer": optimizer}
    if run.place.has_engine:
        if run.joint == "recomputed":
            options["activations"] = "recompute"
        if run.joint == "over the tiers":
            options["activations"] = "nvme" if run.place.name == "nvme" else "host"
            options["activation_memory"] = "4MiB"
    return keep.place.wrap(model, **options)


class Actor(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk, self.policy, self.value = seeded(), nn.Linear(WIDTH, 5), nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = torch.tanh(self.trunk(x))
        return torch.distributions.Categorical(logits=self.policy(x)), self.value(x).squeeze(-1)


def actor():
    torch.manual_seed(3)
    return Actor()


@program(
    family, "PPO: the old policy is a deep copy that is made in the middle of accumulation, with a KL to it", JOINTS
)
def ppo_with_a_copy(run):
    engine = run.engine(actor())
    found, old = [], copy.deepcopy(engine.module).requires_grad_(False)
    for step in range(4):
        x = batch(step)
        with torch.no_grad():
            policy, value = old(x)
            action = policy.sample()
            before = policy.log_prob(action)
            gain = x.sum(1).tanh() * (action == 2) - value

        def body(rows, x=x, action=action, before=before, gain=gain, engine=engine, old=old):
            now, value = engine(x[rows])
            ratio = (now.log_prob(action[rows]) - before[rows]).exp()
            clipped = ratio.clamp(0.8, 1.2)
            loss = -torch.min(ratio * gain[rows], clipped * gain[rows]).mean() - 0.01 * now.entropy().mean()
            with torch.no_grad():
                reference, _ = old(x[rows])
            loss = (
                loss
                + 0.5 * (value - x[rows, 0]).square().mean()
                + 0.1 * torch.distributions.kl_divergence(now, reference).mean()
            )
            loss.backward()
            return loss.item()

        rows = torch.arange(160).split(80)
        found += run.accumulate(engine, rows[:1], body)
        if step % 2:
            old = copy.deepcopy(engine.module).requires_grad_(False)
            found.append([p.grad is None for p in old.parameters()])
        found += run.accumulate(engine, rows[1:], body)
        found.append(stepped(engine))
        if step == 1:
            engine = run.resume(engine, actor)
    return found, values(engine.module)


class Normed(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(F.gelu(self.norm(self.up(x))))


@program(
    family, "BYOL: a deep copy is the target, whose buffers follow, too; a predictor, two views in one loss", JOINTS
)
def byol_with_buffers(run):
    engine = run.engine(Net(Normed))
    target = copy.deepcopy(engine.module).requires_grad_(False)
    found = []
    for step in range(4):

        def body(index, engine=engine):
            one, two = batch(index), batch(index) + 0.2 * batch(index + 50)
            with torch.no_grad():
                goals = target(one), target(two)
            loss = sum(
                2 - 2 * F.cosine_similarity(engine(x), goal).mean() for x, goal in zip((two, one), goals, strict=True)
            )
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [3 * step, 3 * step + 1], body)
        found.append(stepped(engine))
        with torch.no_grad():
            for slow, fast in zip(target.state_dict().values(), engine.module.state_dict().values(), strict=True):
                if slow.is_floating_point():
                    slow.lerp_(fast, 0.1)
                else:
                    slow.copy_(fast)
        if step == 1:
            engine = run.resume(engine, lambda: Net(Normed))
    return found, values(engine.module), values(target)


@program(
    family,
    "evaluation in the middle of accumulation: `eval()`, BatchNorm, `inference_mode`, `train()` again",
    ACCUMULATED,
)
def evaluation_in_accumulation(run):
    engine = run.engine(Net(Normed))
    found = []
    for step in range(3):

        def body(index):
            loss = engine(batch(index)).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [4 * step, 4 * step + 1], body)
        engine.module.eval()
        with torch.inference_mode():
            found.append(engine(batch(90)))
        with torch.no_grad():
            found.append(engine.module(batch(91)))
        engine.module.train()
        found += run.accumulate(engine, [4 * step + 2, 4 * step + 3], body)
        found.append(stepped(engine))
    return found, values(engine.module)


@program(
    family, "free adversarial training: one backward gives the weights' gradient and the input's, the batch is replayed"
)
def free_adversarial(run):
    engine = run.engine()
    delta = torch.zeros(160, WIDTH, requires_grad=True)
    found = []
    for step in range(2):
        for _ in range(3):
            loss = (engine(batch(step) + delta) - 1).square().mean()
            loss.backward()
            found += [loss.item(), delta.grad.clone()]
            with torch.no_grad():
                delta.add_(0.1 * delta.grad.sign()).clamp_(-0.2, 0.2)
            delta.grad = None
            found.append(stepped(engine))
    return found, values(engine.module)


@program(
    family,
    "virtual adversarial training: two rounds of power iteration by the input's gradient, then a KL",
    ACCUMULATED,
)
def virtual_adversarial(run):
    engine = run.engine()
    found = []
    for step in range(3):

        def body(index):
            x = batch(index)
            with torch.no_grad():
                sure = F.softmax(engine(x), -1)
            move = F.normalize(batch(index + 40), dim=1)
            for _ in range(2):
                move.requires_grad_()
                far = F.kl_div(F.log_softmax(engine(x + move), -1), sure, reduction="batchmean")
                (move,) = torch.autograd.grad(far, move)
                move = F.normalize(move, dim=1).detach()
            loss = (
                F.kl_div(F.log_softmax(engine(x + move), -1), sure, reduction="batchmean") + engine(x).square().mean()
            )
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
    return found, values(engine.module)


class Dropping(Block):
    def forward(self, x):
        return x + self.down(F.dropout(torch.tanh(self.up(x)), 0.2, self.training))


@program(family, "R-Drop: two passes with other dropouts, a symmetric KL between them", JOINTS)
def r_drop_twice(run):
    engine = run.engine(Net(Dropping))
    torch.manual_seed(5)
    found = []
    for step in range(4):

        def body(index, engine=engine):
            one, two = F.log_softmax(engine(batch(index)), -1), F.log_softmax(engine(batch(index)), -1)
            both = F.kl_div(one, two, log_target=True, reduction="batchmean")
            both = both + F.kl_div(two, one, log_target=True, reduction="batchmean")
            loss = both - (one[:, 3] + two[:, 3]).mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
        if step == 1:
            engine = run.resume(engine, lambda: Net(Dropping))
    return found, values(engine.module)


@program(family, "manifold mixup: hidden states are mixed by a forward pre-hook at a random layer", ACCUMULATED)
def mixup_by_pre_hook(run):
    engine = run.engine()
    found = []
    for step in range(4):

        def body(index):
            draws = torch.Generator().manual_seed(index)
            order = torch.randperm(160, generator=draws)
            block = engine.module.blocks[int(torch.randint(5, (), generator=draws))]
            handle = block.register_forward_pre_hook(lambda module, args: (0.7 * args[0] + 0.3 * args[0][order],))
            out = engine(batch(index))
            handle.remove()
            loss = 0.7 * (out - 1).square().mean() + 0.3 * (out - batch(9)[order]).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
    return found, values(engine.module)


@program(
    family,
    "elastic weight consolidation: a Fisher diagonal by many backwards, anchors, a penalty of all weights",
    JOINTS[:3],
)
def elastic_weights(run):
    engine = run.engine()
    model = engine.module
    fisher = {name: torch.zeros_like(p) for name, p in model.named_parameters()}
    for index in range(4):
        model.zero_grad()
        engine(batch(index, 16)).square().mean().backward()
        for name, p in model.named_parameters():
            fisher[name] += p.grad.detach().clone().pow(2) / 4
    model.zero_grad()
    anchors = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = []
    for step in range(3):
        loss = (engine(batch(step + 10)) - 1).square().mean()
        for name, p in model.named_parameters():
            loss = loss + 10 * (fisher[name] * (p - anchors[name]).pow(2)).sum()
        loss.backward()
        found += [loss.item(), stepped(engine)]
    return found, values(model)


@program(
    family, "synaptic intelligence: path integrals of gradients and moves are kept in buffers of the model", RESUMED
)
def synaptic_intelligence(run):
    def build():
        model = Net()
        for name, p in list(model.named_parameters()):
            model.register_buffer(name.replace(".", "__") + "_path", torch.zeros_like(p))
        return model

    engine = run.engine(build())
    found = []
    for step in range(4):
        model = engine.module
        loss = engine(batch(step)).square().mean()
        loss.backward()
        before = {name: p.detach().clone() for name, p in model.named_parameters()}
        slopes = gradients(model)
        found += [loss.item(), stepped(engine)]
        for name, p in model.named_parameters():
            getattr(model, name.replace(".", "__") + "_path").sub_(slopes[name] * (p.detach() - before[name]))
        if step == 1:
            engine = run.resume(engine, build)
    return found, values(engine.module)


@program(family, "GEM: a gradient of the memory of old tasks projects this one's, both flat", JOINTS[:3])
def gradient_memory(run):
    engine = run.engine()
    model, found = engine.module, []

    def flat(index):
        model.zero_grad()
        engine(batch(index)).sub(index % 2).square().mean().backward()
        return torch.cat([p.grad.flatten() for p in model.parameters()])

    for step in range(3):
        old, new = flat(100), flat(step)
        product = (old * new).sum()
        if product < 0 or step == 1:
            new = new - product / (old * old).sum() * old
        start = 0
        for p in model.parameters():
            p.grad.copy_(new[start : start + p.numel()].view_as(p))
            start += p.numel()
        found += [product.item(), stepped(engine)]
    return found, values(model)


@program(
    family,
    "Sophia's estimate: each second step a backward of sampled labels, squares kept by parameter, moves by hand",
)
def sampled_labels(run):
    engine = run.engine()
    model, found = engine.module, []
    curvature = {p: torch.zeros_like(p) for p in model.parameters()}
    moments = {p: torch.zeros_like(p) for p in model.parameters()}
    for step in range(4):
        if step % 2 == 0:
            logits = engine(batch(step))
            labels = torch.distributions.Categorical(logits=logits.detach()).sample()
            F.cross_entropy(logits, labels).backward()
            for p in model.parameters():
                curvature[p].mul_(0.9).addcmul_(p.grad, p.grad, value=0.1 * 160)
                p.grad = None
        loss = F.cross_entropy(engine(batch(step)), batch(step).argmax(1))
        loss.backward()
        with torch.no_grad():
            for p in model.parameters():
                moments[p].lerp_(p.grad, 0.1)
                p.addcdiv_(moments[p], curvature[p].clamp(min=1e-3), value=-0.01)
                p.grad = None
        found.append(loss.item())
    return found, values(model)


@program(
    family,
    "SVRG: a full gradient and a snapshot of the weights, each step corrected by the snapshot's gradient",
    JOINTS[:4],
)
def variance_reduced(run):
    engine = run.engine()
    model, found = engine.module, []
    for _ in range(2):
        snapshot = copy.deepcopy(model)
        snapshot.zero_grad()

        def body(index):
            loss = engine(batch(index)).square().mean() / 3
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, range(3), body)
        full = gradients(model)
        model.zero_grad()
        for index in range(3):
            snapshot.zero_grad()
            snapshot(batch(index)).square().mean().backward()
            loss = engine(batch(index)).square().mean()
            loss.backward()
            for (name, p), old in zip(model.named_parameters(), snapshot.parameters(), strict=True):
                p.grad.sub_(old.grad).add_(full[name])
            found += [loss.item(), stepped(engine)]
    return found, values(model)


@program(
    family,
    "Polyak's step: the rate is the loss by the square of the gradient, set in the group before each step",
    RESUMED,
)
def polyak_step(run):
    engine = run.engine()
    found = []
    for step in range(4):
        loss = engine(batch(step)).square().mean()
        loss.backward()
        total = sum((g.double() ** 2).sum() for g in gradients(engine.module).values()).item()
        engine.optimizer.param_groups[0]["lr"] = min(0.1, loss.item() / total)
        found += [loss.item(), engine.optimizer.param_groups[0]["lr"], stepped(engine)]
        if step == 1:
            engine = run.resume(engine)
    return found, values(engine.module)


@program(
    family,
    "FixMatch: sure labels of weak views teach strong ones, a mask that is empty at first; a ramp of the weight",
    JOINTS,
)
def fix_match(run):
    engine = run.engine()
    found = []
    for step in range(4):

        def body(index, engine=engine, step=step):
            weak, strong = batch(index), batch(index) + 0.5 * batch(index + 30)
            logits = engine(torch.cat([batch(7), weak, strong]))
            known, weak, strong = logits.split(160)
            sure, label = F.softmax(weak.detach() / (0.5 + step), -1).max(-1)
            mask = sure > 0.1 * step
            loss = F.cross_entropy(known, batch(7).argmax(1))
            loss = loss + step * (F.cross_entropy(strong, label, reduction="none") * ~mask).mean()
            loss.backward()
            return loss.item(), int(mask.sum())

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
        if step == 1:
            engine = run.resume(engine)
    return found, values(engine.module)


@program(
    family,
    "SwAV: prototypes are normalised before each forward, codes by Sinkhorn, their gradient dropped at first",
    JOINTS,
)
def swav(run):
    engine = run.engine()
    found = []
    for step in range(4):
        with torch.no_grad():
            weight = engine.module.last.weight.data.clone()
            engine.module.last.weight.copy_(F.normalize(weight, dim=1, p=2))

        def body(index, engine=engine):
            one, two = engine(batch(index)), engine(batch(index) + 0.1 * batch(index + 30))
            loss = 0.0
            for out, other in ((one, two), (two, one)):
                with torch.no_grad():
                    codes = torch.exp(other / 0.5).T
                    for _ in range(3):
                        codes /= codes.sum(1, keepdim=True)
                        codes /= codes.sum(0, keepdim=True)
                loss = loss - (codes.T * F.log_softmax(out / 0.1, 1)).sum(1).mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        if step < 2:
            for name, p in engine.module.named_parameters():
                if "last" in name:
                    p.grad = None
        found.append(stepped(engine))
        if step == 1:
            engine = run.resume(engine)
    return found, values(engine.module)


@program(
    family, "federated averaging: three engines train from the same weights, the server averages state dicts by size"
)
def federated(run):
    engines = [run.engine() for _ in range(3)]
    server = copy.deepcopy(engines[0].state_dict())
    found = []
    for turn in range(2):
        sums = {name: torch.zeros_like(value) for name, value in server.items()}
        for client, engine in enumerate(engines):
            engine.load_state_dict(server)
            engine.optimizer.state.clear()
            for step in range(2):
                loss = engine(batch(10 * client + 2 * turn + step, 160 - 16 * client)).square().mean()
                loss.backward()
                found += [loss.item(), stepped(engine)]
            for name, value in engine.state_dict().items():
                sums[name] += value * (client + 1) / 6
        server = {name: value.clone() for name, value in sums.items()}
    return found, server


@program(family, "elastic averaging: two engines are drawn to a centre that is in neither, after each second step")
def elastic_averaging(run):
    engines = [run.engine() for _ in range(2)]
    centre = [p.detach().clone() for p in engines[0].module.parameters()]
    found = []
    for step in range(4):
        for index, engine in enumerate(engines):
            loss = engine(batch(2 * step + index)).square().mean()
            loss.backward()
            found += [loss.item(), stepped(engine)]
            if step % 2:
                with torch.no_grad():
                    for p, c in zip(engine.module.parameters(), centre, strict=True):
                        move = 0.3 * (p - c)
                        p.sub_(move)
                        c.add_(move)
    return found, [values(engine.module) for engine in engines], centre


@program(
    family,
    "a lottery ticket: train, cut by magnitude with hooks of gradients, rewind to the first weights, train",
    RESUMED,
)
def lottery_ticket(run):
    engine = run.engine()
    first = copy.deepcopy(engine.module.state_dict())
    found, masks = [], {}
    for turn in range(2):
        for step in range(2):
            loss = engine(batch(step)).sub(1).square().mean()
            loss.backward()
            for name, p in engine.module.named_parameters():
                if name in masks:
                    p.grad.mul_(masks[name])
            found += [loss.item(), stepped(engine)]
        if turn == 0:
            for name, p in engine.module.named_parameters():
                if p.dim() == 2:
                    masks[name] = (p.abs() > p.abs().flatten().kthvalue(p.numel() // 2).values).float().detach()
            engine.module.load_state_dict({name: value * masks.get(name, 1) for name, value in first.items()})
            engine.optimizer.state.clear()
            engine = run.resume(engine)
    return found, values(engine.module)


@program(family, "a soup: weights of three points of the run, greedy by an evaluation, loaded and trained on", RESUMED)
def model_soup(run):
    engine = run.engine()
    found, points = [], []
    for step in range(3):
        loss = engine(batch(step)).square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
        points.append({name: p.detach().clone() for name, p in engine.module.named_parameters()})
    chosen = [points[-1]]
    best = math.inf
    for point in reversed(points):
        trial = [*chosen, point]
        engine.load_state_dict({name: sum(each[name] for each in trial) / len(trial) for name in point})
        with torch.no_grad():
            now = engine(batch(50)).square().mean().item()
        found.append(now)
        if now <= best:
            best, chosen = now, trial
    engine.load_state_dict({name: sum(each[name] for each in chosen) / len(chosen) for name in points[0]})
    engine = run.resume(engine)
    loss = engine(batch(5)).square().mean()
    loss.backward()
    return found, stepped(engine), values(engine.module)


@program(
    family,
    "a loss landscape in the middle of training: filter-normalised directions, weights are put back",
    ACCUMULATED,
)
def landscape(run):
    engine = run.engine()
    model, found = engine.module, []
    for step in range(3):

        def body(index):
            loss = engine(batch(index)).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [3 * step], body)
        kept = [p.data.clone() for p in model.parameters()]
        for amount in (-0.5, 0.5):
            for index, (p, old) in enumerate(zip(model.parameters(), kept, strict=True)):
                way = torch.randn(p.shape, generator=torch.Generator().manual_seed(index))
                if p.dim() > 1:
                    way *= old.norm(dim=1, keepdim=True) / (way.norm(dim=1, keepdim=True) + 1e-10)
                else:
                    way.fill_(0)
                p.data = old + amount * way
            with torch.no_grad():
                found.append(engine(batch(60)).square().mean().item())
        for p, old in zip(model.parameters(), kept, strict=True):
            p.data.copy_(old)
        found += run.accumulate(engine, [3 * step + 1, 3 * step + 2], body)
        found.append(stepped(engine))
    return found, values(model)


@program(
    family,
    "workers of a `DataLoader` beside the steps, evaluation by a second one within the epoch, a generator's state",
)
def loaders_beside(run):
    engine = run.engine()
    data = TensorDataset(batch(0, 64), batch(1, 64))
    draws = torch.Generator().manual_seed(4)
    train = DataLoader(data, 16, shuffle=True, num_workers=2, generator=draws, persistent_workers=True)
    judge = DataLoader(data, 32, num_workers=1)
    found = []
    for _ in range(2):
        for index, (x, y) in enumerate(train):
            loss = F.mse_loss(engine(x), y)
            loss.backward()
            found += [loss.item(), stepped(engine)]
            if index == 1:
                with torch.no_grad():
                    found.append(sum(F.mse_loss(engine(x), y).item() for x, y in judge))
    return found, values(engine.module)


@program(
    family,
    "out of memory in a forward or a backward: gradients are dropped, the batch is tried again in halves",
    ACCUMULATED,
)
def halved_batches(run):
    engine = run.engine()
    model, found = engine.module, []
    state = {"limit": 100, "where": "forward"}

    def forward_hook(module, args, out):
        if len(out) > state["limit"] and state["where"] == "forward":
            raise MemoryError("too many rows")
        if len(out) > state["limit"]:
            out.register_hook(fail)

    def fail(gradient):
        raise MemoryError("too many rows")

    model.blocks[2].register_forward_hook(forward_hook)
    for step in range(4):
        state["where"] = "forward" if step % 2 else "backward"
        parts = 1
        while True:
            try:

                def body(x, parts=parts):
                    loss = engine(x).square().mean() / parts
                    loss.backward()
                    return loss.item()

                losses = run.accumulate(engine, batch(step).chunk(parts), body)
                break
            except MemoryError:
                engine.optimizer.zero_grad()
                parts *= 2
        found += [parts, losses, stepped(engine)]
    return found, values(model)
