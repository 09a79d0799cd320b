"""Loops that are run today: preferences and rewards, teachers and distillation, two passes over a batch, meta-learning,
optimizers by hand, growing and pruning. Each at the joints of the engine; the optimizer is torch's own arithmetic, so
that bits are compared."""

from __future__ import annotations

import copy
import math
import random
from collections import defaultdict

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from misuses.case import Family
from misuses.joints import TODAY, batch, program, stepped
from misuses.place import gradients, values
from misuses.strangers import WIDTH, Block, Net

family = Family("loops of today")

PLAIN = ("plain", "mixed", "resumed")
TOGETHER = ("plain", "together", "together, over the tiers")


def loop(run, build=Net, *, steps=3, body, before=None, after=None, each=2, **options):
    """``body`` is called with the engine and a micro-batch's number, and gives the loss."""
    torch.manual_seed(5)
    engine = run.engine(build(), **options)
    found = []
    for step in range(steps):

        def run_one(index, engine=engine):
            loss = body(engine, index)
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [each * step + i for i in range(each)], run_one)
        if before is not None:
            found.append(before(engine, step))
        found.append(stepped(engine))
        if after is not None:
            found.append(after(engine, step))
        if step == 1:
            engine = run.resume(engine, build, **options)
    return found, values(engine.module)


def mean(engine, index):
    return engine(batch(index)).square().mean()


def today(title, joints=TODAY, **options):
    return program(family, title, joints, **options)


# Preferences and rewards.


class Adapted(nn.Module):
    """A frozen layer with an adapter that is switched."""

    on = True

    def __init__(self):
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.a, self.b = nn.Linear(WIDTH, 4, bias=False), nn.Linear(4, WIDTH, bias=False)

    def forward(self, x):
        out = self.base(x)
        if self.on:
            out = out + self.b(self.a(x))
        return x + torch.tanh(out)


def switch(model, on):
    for module in model.modules():
        if isinstance(module, Adapted):
            module.on = on


def log_probability(out, x):
    return out.log_softmax(-1).gather(-1, x.argmax(-1, keepdim=True)).squeeze(-1)


@today("DPO: the reference is the base with adapters switched off in the same micro-batch, chosen and rejected apart")
def dpo_by_switch(run):
    def body(engine, index):
        chosen, rejected = batch(index), batch(index + 50)
        switch(engine.module, False)
        with torch.no_grad():
            of = log_probability(engine(chosen), chosen) - log_probability(engine(rejected), rejected)
        switch(engine.module, True)
        now = log_probability(engine(chosen), chosen) - log_probability(engine(rejected), rejected)
        return -F.logsigmoid(0.1 * (now - of)).mean()

    return loop(run, lambda: Net(Adapted), body=body)


@today("ORPO and SimPO in one: odds ratios of both answers, a length norm, no reference", TOGETHER)
def orpo(run):
    def body(engine, index):
        chosen, rejected = batch(index), batch(index + 50, 80)
        good, bad = (log_probability(engine(x), x).mean() for x in (chosen, rejected))
        odds = (good - bad) - (torch.log1p(-good.exp()) - torch.log1p(-bad.exp()))
        return -good - 0.5 * F.logsigmoid(odds) - F.logsigmoid(2 * (good - bad) - 0.5)

    return loop(run, body=body)


@today("online DPO: two answers are sampled by the model itself, judged by a copy in plain torch, then trained on")
def dpo_online(run):
    torch.manual_seed(3)
    judge = Net()

    def body(engine, index):
        x = batch(index)
        with torch.no_grad():
            logits = engine(x)
            answers = [torch.multinomial(logits.softmax(-1), 1, generator=None) for _ in range(2)]
            score = [judge(x).gather(-1, a).mean() for a in answers]
        if score[0] < score[1]:
            answers.reverse()
        out = engine(x).log_softmax(-1)
        return -F.logsigmoid(out.gather(-1, answers[0]) - out.gather(-1, answers[1])).mean()

    return loop(run, body=body)


class ActorCritic(Net):
    def __init__(self):
        super().__init__()
        self.value_head = nn.Linear(WIDTH, 1)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x), self.value_head(x).squeeze(-1)


@today("PPO: a rollout, advantages by GAE, three epochs of shuffled parts, values clipped, an early stop by KL", PLAIN)
def ppo_epochs(run):
    torch.manual_seed(5)
    engine = run.engine(ActorCritic())
    found = []
    for step in range(2):
        x = batch(step)
        with torch.no_grad():
            logits, value = engine(x)
            old, action = logits.log_softmax(-1), torch.multinomial(logits.softmax(-1), 1)
            old = old.gather(-1, action).squeeze(-1)
        reward, advantage, last = batch(step + 60)[:, 0], torch.zeros(len(x)), 0.0
        for t in reversed(range(len(x))):
            after = value[t + 1] if t + 1 < len(x) else 0.0
            last = reward[t] + 0.9 * after - value[t] + 0.9 * 0.95 * last
            advantage[t] = last
        returns = advantage + value
        advantage = (advantage - advantage.mean()) / (advantage.std() + 1e-8)
        for _ in range(3):
            stop = False
            for part in torch.randperm(len(x)).split(80):
                logits, now = engine(x[part])
                new = logits.log_softmax(-1)
                entropy = -(new.exp() * new).sum(-1).mean()
                ratio = (new.gather(-1, action[part]).squeeze(-1) - old[part]).exp()
                policy = -torch.min(ratio * advantage[part], ratio.clamp(0.8, 1.2) * advantage[part]).mean()
                clipped = value[part] + (now - value[part]).clamp(-0.2, 0.2)
                critic = torch.max((now - returns[part]) ** 2, (clipped - returns[part]) ** 2).mean()
                (policy + 0.5 * critic - 0.01 * entropy).backward()
                nn.utils.clip_grad_value_(engine.module.parameters(), 0.5)
                found.append(stepped(engine))
                stop = ((ratio - 1) - ratio.log()).mean().item() > 0.05
            if stop:
                break
        if step == 0:
            engine = run.resume(engine, ActorCritic)
    return found, values(engine.module)


@today("GRPO: groups of answers, normed within the group, a KL to the base by the third estimator, masks of lengths")
def grpo_groups(run):
    torch.manual_seed(3)
    reference = Net().requires_grad_(False)

    def body(engine, index):
        x = batch(index, 40).repeat_interleave(4, 0)
        with torch.no_grad():
            old = engine(x).log_softmax(-1)
            action = torch.multinomial(old.exp(), 1)
            old = old.gather(-1, action)
            base = reference(x).log_softmax(-1).gather(-1, action)
        reward = (action % 7).float().view(-1, 4)
        advantage = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        new = engine(x).log_softmax(-1).gather(-1, action)
        kl = (base - new).exp() - (base - new) - 1
        mask = (action != 3).float()
        loss = -torch.min((new - old).exp() * advantage, (new - old).exp().clamp(0.8, 1.28) * advantage) + 0.04 * kl
        return (loss * mask).sum() / mask.sum()

    return loop(run, body=body)


@today("a reward model of pairs with a margin, ranks within lists by Plackett-Luce, a penalty on its centre", TOGETHER)
def rewards(run):
    def body(engine, index):
        scores = engine(batch(index)).mean(-1).view(-1, 4)
        ranked = scores.flip(-1).logcumsumexp(-1).flip(-1)
        return (
            (ranked - scores).mean()
            + 0.01 * scores.mean() ** 2
            - F.logsigmoid(scores[:, 0] - scores[:, 1] - 0.1).mean()
        )

    return loop(run, body=body)


@today("KTO: a KL of mismatched pairs without gradients, clamped, shared by the micro-batches through a list")
def kto(run):
    torch.manual_seed(3)
    reference, seen = Net().requires_grad_(False), []

    def body(engine, index):
        x = batch(index)
        with torch.no_grad():
            away = x.roll(1, 0)
            kl = (log_probability(engine(x), away) - log_probability(reference(x), away)).mean().clamp(min=0)
            seen.append(kl.item())
        ratio = log_probability(engine(x), x) - log_probability(reference(x), x)
        return (1 - torch.sigmoid(0.1 * (ratio - kl))).mean()

    found = loop(run, body=body)
    return found, seen


@today(
    "a process reward model: one forward, losses at the places of a mask, an ignored part, weights by position",
    TOGETHER,
)
def process_rewards(run):
    def body(engine, index):
        x = batch(index)
        labels = (x[:, 0] > 0).long()
        labels[x[:, 1] > 0.5] = -100
        logits = engine(x)[:, :2]
        loss = F.cross_entropy(logits, labels, reduction="none", ignore_index=-100)
        return (loss * torch.linspace(0.5, 1, len(x))).sum() / (labels != -100).sum()

    return loop(run, body=body)


@today("generation with a cache that grows, between micro-batches of one step; what it gives is the next input")
def generated_between(run):
    class Cached(nn.Module):
        def __init__(self):
            super().__init__()
            self.qkv, self.out, self.cache = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), None

        def forward(self, x):
            q, k, v = self.qkv(x).chunk(3, -1)
            if self.cache is not None:
                k, v = torch.cat([self.cache[0], k]), torch.cat([self.cache[1], v])
                self.cache = (k, v)
            return x + self.out(F.scaled_dot_product_attention(q[None], k[None], v[None])[0])

    def body(engine, index):
        model = engine.module
        with torch.no_grad():
            for block in model.blocks:
                block.cache = (torch.zeros(0, WIDTH), torch.zeros(0, WIDTH))
            token, tokens = batch(index, 1), []
            for _ in range(5):
                token = torch.tanh(engine(token))
                tokens.append(token)
            for block in model.blocks:
                block.cache = None
        return engine(torch.cat([*tokens, batch(index, 155)])).square().mean()

    return loop(run, lambda: Net(Cached), body=body)


# Teachers.


@today("BYOL: a target of a deep copy, moved by `lerp_` after the step, two views, a predictor; both sides symmetric")
def byol_of_today(run):
    torch.manual_seed(5)
    net = Net()
    target = copy.deepcopy(net).requires_grad_(False)
    engine = run.engine(net)
    found = []
    for step in range(3):

        def body(index, engine=engine):
            one, two = (
                batch(index),
                batch(index) + 0.1 * torch.randn(160, WIDTH, generator=torch.Generator().manual_seed(index)),
            )
            with torch.no_grad():
                goals = F.normalize(target(two), dim=-1), F.normalize(target(one), dim=-1)
            loss = sum(
                2 - 2 * (F.normalize(engine(x), dim=-1) * g).sum(-1).mean()
                for x, g in zip((one, two), goals, strict=True)
            )
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
        with torch.no_grad():
            for slow, fast in zip(target.parameters(), engine.module.parameters(), strict=True):
                slow.lerp_(fast, 0.1)
        if step == 1:
            engine = run.resume(engine)
    return found, values(engine.module), values(target)


@today("DINO: teacher and centre in the same module tree, `copy.deepcopy` of it before wrapping, sharpened, many crops")
def dino_of_today(run):
    class Dino(nn.Module):
        def __init__(self):
            super().__init__()
            self.student = Net()
            self.teacher = copy.deepcopy(self.student).requires_grad_(False)
            self.register_buffer("centre", torch.zeros(1, WIDTH))

        def forward(self, crops):
            outs = [self.student(x) / 0.1 for x in crops]
            with torch.no_grad():
                goals = [self.teacher(x) for x in crops[:2]]
                probabilities = [((g - self.centre) / 0.04).softmax(-1) for g in goals]
                self.centre.mul_(0.9).add_(torch.cat(goals).mean(0, keepdim=True), alpha=0.1)
            losses = [
                -(p * o.log_softmax(-1)).sum(-1).mean()
                for i, p in enumerate(probabilities)
                for j, o in enumerate(outs)
                if i != j
            ]
            return sum(losses) / len(losses)

    def after(engine, step):
        model = engine.module
        with torch.no_grad():
            for slow, fast in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                slow.data.mul_(0.95).add_((1 - 0.95) * fast.detach().data)
        return model.centre.clone()

    return loop(run, Dino, body=lambda e, i: e([batch(i), batch(i + 30), batch(i + 60), batch(i + 90)]), after=after)


@today(
    "data2vec: the teacher is an average of the student, its top blocks' outputs by hooks are the goal, input masked"
)
def data2vec(run):
    torch.manual_seed(3)
    teacher = Net().requires_grad_(False)
    kept = []
    for block in teacher.blocks[2:]:
        block.register_forward_hook(lambda m, a, out: kept.append(out))

    def body(engine, index):
        x = batch(index)
        with torch.no_grad():
            kept.clear()
            teacher(x)
            goal = F.layer_norm(sum(F.layer_norm(k, (WIDTH,)) for k in kept) / len(kept), (WIDTH,))
        mask = torch.rand(len(x), 1, generator=torch.Generator().manual_seed(index)) < 0.5
        out = engine(torch.where(mask, 0.0, x))
        return F.smooth_l1_loss(out[mask[:, 0]], goal[mask[:, 0]])

    def after(engine, step):
        teacher.load_state_dict(
            {n: v.lerp(engine.module.state_dict()[n], 0.2) for n, v in teacher.state_dict().items()}
        )

    return loop(run, body=body, after=after)


@today(
    "distillation by hidden states, attention and logits; the teacher's half of the blocks maps to the student's",
    TOGETHER,
)
def distilled(run):
    torch.manual_seed(3)
    teacher = Net().requires_grad_(False)
    teacher.blocks.append(Block().requires_grad_(False))

    def states(model, x):
        x = model.first(x)
        found = []
        for block in model.blocks:
            x = block(x)
            found.append(x)
        return model.last(x), found

    def body(engine, index):
        x = batch(index)
        with torch.no_grad():
            goal, hints = states(teacher, x)
        out, own = states(engine.module, x)
        loss = F.kl_div((out / 2).log_softmax(-1), (goal / 2).softmax(-1), reduction="batchmean") * 4
        for a, b in zip(own, hints[::2], strict=False):
            loss = loss + F.mse_loss(a @ a.t() / WIDTH, b @ b.t() / WIDTH)
        return loss

    return loop(run, body=body)


@today("on-policy distillation: the student's own samples, a generalised Jensen-Shannon divergence, skewed")
def on_policy(run):
    torch.manual_seed(3)
    teacher = Net().requires_grad_(False)

    def body(engine, index):
        x = batch(index)
        with torch.no_grad():
            drawn = torch.multinomial(engine(x).softmax(-1), 4, generator=None).float().mean(-1, keepdim=True)
        y = x + drawn / 16
        student, goal = engine(y).log_softmax(-1), teacher(y).log_softmax(-1)
        mix = torch.logsumexp(torch.stack([student + math.log(0.3), goal + math.log(0.7)]), 0)

        def kl(p, q):
            return (p.exp() * (p - q)).sum(-1).mean()

        return 0.7 * kl(goal, mix) + 0.3 * kl(student, mix)

    return loop(run, body=body)


class Medusa(Net):
    def __init__(self):
        super().__init__()
        self.heads = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.SiLU()) for _ in range(3))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return [self.last(x), *[self.last(x + head(x)) for head in self.heads]]


@today("Medusa: heads share the last layer, which is detached for them by `functional_call` of its detached values")
def medusa(run):
    class Detached(Medusa):
        def forward(self, x):
            x = self.first(x)
            for block in self.blocks:
                x = block(x)
            fixed = {n: p.detach() for n, p in self.last.named_parameters()}
            return [
                self.last(x),
                *[functional_call(self.last, fixed, (x.detach() + h(x.detach()),)) for h in self.heads],
            ]

    def body(engine, index):
        outs = engine(batch(index))
        return sum(o.square().mean() * 0.8**i for i, o in enumerate(outs))

    return loop(run, Detached, body=body)


@today("multi-token prediction as DeepSeek's: modules in a chain, one embedding and one head shared by all depths")
def mtp_chain(run):
    class Chain(Net):
        def __init__(self):
            super().__init__()
            self.merges = nn.ModuleList(nn.Linear(2 * WIDTH, WIDTH) for _ in range(2))
            self.extra = nn.ModuleList(Block() for _ in range(2))

        def forward(self, x):
            y, embedded = x, self.first(x)
            y = embedded
            for block in self.blocks:
                y = block(y)
            outs = [self.last(y)]
            for depth, (merge, block) in enumerate(zip(self.merges, self.extra, strict=True), 1):
                later = self.first(x.roll(-depth, 0))
                y = block(merge(torch.cat([F.rms_norm(y, (WIDTH,)), F.rms_norm(later, (WIDTH,))], -1)))
                outs.append(self.last(y))
            return outs

    return loop(run, Chain, body=lambda e, i: sum(o.square().mean() for o in e(batch(i))))


@today("EAGLE: a draft layer learns from the frozen model's features, its own output is fed back three times")
def eagle(run):
    class Eagle(nn.Module):
        def __init__(self):
            super().__init__()
            self.base = Net().requires_grad_(False)
            self.draft = nn.Sequential(nn.Linear(2 * WIDTH, WIDTH), Block())

        def forward(self, x):
            with torch.no_grad():
                feature = self.base.first(x)
                for block in self.base.blocks:
                    feature = block(feature)
                goal = self.base.last(feature).softmax(-1)
            state, loss = feature, 0.0
            for turn in range(3):
                state = self.draft(torch.cat([state, x.roll(-turn, 0)], -1))
                loss = loss - (goal.roll(-turn, 0) * self.base.last(state).log_softmax(-1)).sum(-1).mean()
            return loss

    return loop(run, Eagle, body=lambda e, i: e(batch(i)))


# Two passes.


@today("GradCache: representations without a graph, gradients of them by the contrast, a second forward per part")
def grad_cache_of_today(run):
    torch.manual_seed(5)
    engine = run.engine()
    found = []
    for step in range(3):
        parts = [batch(4 * step + i, 80) for i in range(4)]
        with torch.no_grad():
            cached = [engine(x) for x in parts]
        leaves = torch.cat(cached).requires_grad_()
        one, two = F.normalize(leaves, dim=-1).view(-1, 2, WIDTH).unbind(1)
        loss = F.cross_entropy(one @ two.t() * 10, torch.arange(len(one)))
        loss.backward()
        found.append(loss.item())
        given = leaves.grad.split(80)

        def body(index, engine=engine, parts=parts, given=given):
            out = engine(parts[index])
            surrogate = (out * given[index]).sum()
            surrogate.backward()
            return surrogate.item()

        found += run.accumulate(engine, range(4), body)
        found.append(stepped(engine))
        if step == 0:
            engine = run.resume(engine)
    return found, values(engine.module)


@today("CLIP: two towers, features gathered in a list over micro-batches, own features with gradients put among them")
def clip_gathered(run):
    class Towers(nn.Module):
        def __init__(self):
            super().__init__()
            self.image, self.text = Net(), Net()
            self.scale = nn.Parameter(torch.tensor(2.0))

        def forward(self, a, b):
            return F.normalize(self.image(a), dim=-1), F.normalize(self.text(b), dim=-1), self.scale.exp()

    def body(engine, index):
        first = index // 2 * 2
        with torch.no_grad():
            others = [engine(batch(i), batch(i + 50))[:2] for i in (first, first + 1)]
        a, b, scale = engine(batch(index), batch(index + 50))
        every_a, every_b = (
            torch.cat([o if i != index - first else own for i, o in enumerate(all_)])
            for all_, own in ((tuple(o[0] for o in others), a), (tuple(o[1] for o in others), b))
        )
        labels = torch.arange(160) + 160 * (index - first)
        return (F.cross_entropy(scale * a @ every_b.t(), labels) + F.cross_entropy(scale * b @ every_a.t(), labels)) / 2

    def after(engine, step):
        with torch.no_grad():
            engine.module.scale.clamp_(0, math.log(100))

    return loop(run, Towers, body=body, after=after)


@today(
    "SAM by hand: climb by the gradient's norm, a second backward there, back by what was kept, then the step", PLAIN
)
def sam_by_hand(run):
    torch.manual_seed(5)
    engine = run.engine()
    found = []
    for step in range(3):
        mean(engine, step).backward()
        parameters = list(engine.module.parameters())
        with torch.no_grad():
            norm = torch.stack([p.grad.square().sum() for p in parameters]).sum().sqrt()
            kept = []
            for p in parameters:
                e = p.grad * (0.05 / (norm + 1e-12))
                p.add_(e)
                kept.append(e)
        engine.optimizer.zero_grad()
        mean(engine, step).backward()
        with torch.no_grad():
            for p, e in zip(parameters, kept, strict=True):
                p.sub_(e)
        found.append(stepped(engine))
        if step == 0:
            engine = run.resume(engine)
    return found, values(engine.module)


@today("ASAM, of one block alone in turn, its climb scaled by the weights; the others stay", PLAIN)
def asam_in_turn(run):
    torch.manual_seed(5)
    engine = run.engine()
    found = []
    for step in range(4):
        mean(engine, step).backward()
        block = engine.module.blocks[step]
        old = {n: p.detach().clone() for n, p in block.named_parameters()}
        with torch.no_grad():
            for p in block.parameters():
                p += 0.05 * p.abs().square() * p.grad / (p.grad.norm() + 1e-12)
        engine.module.zero_grad()
        mean(engine, step).backward()
        with torch.no_grad():
            for n, p in block.named_parameters():
                p.copy_(old[n])
        found.append(stepped(engine))
    return found, values(engine.module)


@today("Lookahead: slow weights as a dict of clones, every second step fast ones are drawn back to them", TODAY)
def lookahead_of_today(run):
    slow = {}

    def after(engine, step):
        with torch.no_grad():
            for n, p in engine.module.named_parameters():
                slow.setdefault(n, p.detach().clone())
                if step % 2:
                    slow[n] += 0.5 * (p - slow[n])
                    p.data.copy_(slow[n])

    return loop(run, body=mean, after=after, steps=4)


@today("PCGrad: gradients of three losses by `autograd.grad` with a retained graph, projected, set by hand", PLAIN)
def gradient_surgery_of_today(run):
    torch.manual_seed(5)
    engine = run.engine()
    draw, found = random.Random(1), []
    for step in range(3):
        parameters = list(engine.module.parameters())
        out = engine(batch(step))
        losses = [out[:, :10].square().mean(), out[:, 10:20].abs().mean(), out[:, 20:].exp().mean()]
        flat = [
            torch.cat([g.flatten() for g in torch.autograd.grad(loss, parameters, retain_graph=True)])
            for loss in losses
        ]
        projected = []
        for i, own in enumerate(flat):
            g = own.clone()
            order = [j for j in range(3) if j != i]
            draw.shuffle(order)
            for j in order:
                dot = g @ flat[j]
                if dot < 0:
                    g -= dot / flat[j].square().sum() * flat[j]
            projected.append(g)
        offset, total = 0, sum(projected)
        for p in parameters:
            p.grad = total[offset : offset + p.numel()].view_as(p).clone()
            offset += p.numel()
        found.append(stepped(engine))
    return found, values(engine.module)


@today("uncertainty of tasks: log variances are parameters of the model that only the loss uses, clipped apart")
def uncertainty(run):
    class Tasks(Net):
        def __init__(self):
            super().__init__()
            self.log_variance = nn.Parameter(torch.zeros(3))

    def body(engine, index):
        out = engine(batch(index))
        losses = torch.stack([out[:, :10].square().mean(), out[:, 10:20].abs().mean(), out[:, 20:].cos().mean()])
        s = engine.module.log_variance
        return (losses * (-s).exp() + s).sum()

    def before(engine, step):
        return nn.utils.clip_grad_norm_([engine.module.log_variance], 0.1)

    return loop(run, Tasks, body=body, before=before)


@today(
    "GradNorm: norms of the last shared layer's gradients say how weights of tasks move, in a plain optimizer", PLAIN
)
def grad_norm_of_today(run):
    torch.manual_seed(5)
    engine = run.engine()
    weights = torch.ones(2, requires_grad=True)
    plain, found = torch.optim.Adam([weights], lr=0.05), []
    for step in range(3):
        out = engine(batch(step))
        losses = torch.stack([out[:, :16].square().mean(), out[:, 16:].abs().mean()])
        norms = torch.stack(
            [torch.autograd.grad(loss, engine.module.last.weight, retain_graph=True)[0].norm() for loss in losses]
        )
        goal = (norms * weights.detach()).mean() * torch.tensor([0.9, 1.1])
        plain.zero_grad()
        (norms * weights - goal).abs().sum().backward()
        (losses * weights.detach()).sum().backward()
        plain.step()
        found += [weights.tolist(), stepped(engine)]
    return found, values(engine.module)


# Differentiation of another kind.


@today("MAML over a clone of all weights: inner steps by `functional_call` with plain tensors, second order", PLAIN)
def maml_clones(run):
    torch.manual_seed(5)
    engine = run.engine()
    shape = Net()
    found = []
    for step in range(2):
        start = {n: p.detach().clone().requires_grad_() for n, p in engine.module.named_parameters()}
        outer = 0.0
        for task in range(2):
            fast = start
            for _ in range(2):
                loss = functional_call(shape, fast, (batch(10 * step + task, 20),)).square().mean()
                grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
                fast = {n: v - 0.1 * g for (n, v), g in zip(fast.items(), grads, strict=True)}
            outer = outer + functional_call(shape, fast, (batch(10 * step + task + 50, 20),)).square().mean()
        for (_n, p), g in zip(
            engine.module.named_parameters(), torch.autograd.grad(outer, list(start.values())), strict=True
        ):
            p.grad = g
        found += [outer.item(), stepped(engine)]
    return found, values(engine.module)


@today("Reptile: weights walk by plain steps of the engine's optimizer, then are drawn back to where they began", PLAIN)
def reptile_of_today(run):
    torch.manual_seed(5)
    engine = run.engine(lr=0.02)
    found = []
    for task in range(3):
        before = parameters_to_vector(engine.module.parameters()).detach().clone()
        for inner in range(2):
            mean(engine, 10 * task + inner).backward()
            found.append(stepped(engine))
        with torch.no_grad():
            now = parameters_to_vector(engine.module.parameters())
            vector_to_parameters(before + 0.3 * (now - before), engine.module.parameters())
        if task == 0:
            engine = run.resume(engine, lr=0.02)
    return found, values(engine.module)


@today("a Hessian-vector product by differences of two gradients, for a power iteration, between steps", PLAIN)
def sharpness(run):
    def after(engine, step):
        model = engine.module
        direction = [
            torch.randn(p.shape, generator=torch.Generator().manual_seed(i)) for i, p in enumerate(model.parameters())
        ]
        found = []
        for _ in range(2):
            norm = torch.stack([d.square().sum() for d in direction]).sum().sqrt()
            direction = [d / norm for d in direction]
            grads = []
            for sign in (1, -2, 1):
                with torch.no_grad():
                    for p, d in zip(model.parameters(), direction, strict=True):
                        p.add_(d, alpha=sign * 1e-2)
                if sign != 1 or not grads or len(grads) < 2:
                    mean(engine, 70).backward()
                    grads.append(gradients(model))
                    engine.optimizer.zero_grad()
            direction = [(grads[0][n] - grads[1][n]) / 2e-2 for n, _ in model.named_parameters()]
            found.append(torch.stack([d.square().sum() for d in direction]).sum().sqrt().item())
        return found

    return loop(run, body=mean, after=after)


@today("Fisher's diagonal by single rows between tasks, an elastic penalty on the distance from then (EWC)")
def ewc_of_today(run):
    kept = {}

    def body(engine, index):
        loss = mean(engine, index)
        if kept:
            loss = loss + 10 * sum(
                (kept[n][0] * (p - kept[n][1]) ** 2).sum() for n, p in engine.module.named_parameters()
            )
        return loss

    def after(engine, step):
        if step == 0:
            fisher = defaultdict(lambda: 0.0)
            for row in range(4):
                engine(batch(30, 4)[row : row + 1]).square().mean().backward()
                for n, p in engine.module.named_parameters():
                    fisher[n] = fisher[n] + p.grad.square() / 4
                engine.optimizer.zero_grad()
            for n, p in engine.module.named_parameters():
                kept[n] = (fisher[n], p.detach().clone())

    return loop(run, body=body, after=after, each=1)


@today("influence: dot products of a row's gradient with a test's, on the last two layers by `autograd.grad`", PLAIN)
def influence_of_today(run):
    def after(engine, step):
        model = engine.module
        chosen = [model.last.weight, model.blocks[4].down.weight]
        test = torch.autograd.grad(mean(engine, 90), chosen)
        found = []
        for row in range(3):
            own = torch.autograd.grad(engine(batch(step, 3)[row : row + 1]).square().mean(), chosen)
            found.append(sum((a * b).sum() for a, b in zip(test, own, strict=True)).item())
        return found

    return loop(run, body=mean, after=after)


@today("weights of samples are learnt by a look-ahead of the head in plain tensors (meta-weights)", PLAIN)
def meta_weights(run):
    def body(engine, index):
        model = engine.module
        feature = model.first(batch(index))
        for block in model.blocks:
            feature = block(feature)
        head = {n: p.detach().clone().requires_grad_() for n, p in model.last.named_parameters()}
        shape = nn.Linear(WIDTH, WIDTH)
        share = torch.zeros(len(feature), requires_grad=True)
        inner = (functional_call(shape, head, (feature.detach(),)).square().mean(-1) * share).sum()
        step = torch.autograd.grad(inner, list(head.values()), create_graph=True)
        moved = {n: v - 0.1 * g for (n, v), g in zip(head.items(), step, strict=True)}
        outer = functional_call(shape, moved, (feature.detach().flip(0),)).square().mean()
        weight = F.relu(-torch.autograd.grad(outer, share)[0])
        weight = weight / weight.sum().clamp(min=1e-8)
        return (model.last(feature).square().mean(-1) * weight).sum()

    return loop(run, body=body)


# Optimizers by hand.


class Lion(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.add_(torch.lerp(m, p.grad, 1 - group["betas"][0]).sign_(), alpha=-group["lr"])
                m.lerp_(p.grad, 1 - group["betas"][1])


class Adafactor(torch.optim.Optimizer):
    """Rows and columns, a step relative to the weights, clipped by its own root mean square."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                state["step"] = state.get("step", 0) + 1
                decay = 1 - state["step"] ** -0.8
                square = p.grad.square() + 1e-30
                if p.dim() > 1:
                    row = state.setdefault("row", torch.zeros(p.shape[:-1]))
                    col = state.setdefault("col", torch.zeros(p.shape[:-2] + p.shape[-1:]))
                    row.lerp_(square.mean(-1), 1 - decay)
                    col.lerp_(square.mean(-2), 1 - decay)
                    update = p.grad * (
                        (row / row.mean(-1, keepdim=True)).rsqrt()[..., None] * col.rsqrt()[..., None, :]
                    )
                else:
                    v = state.setdefault("v", torch.zeros_like(p))
                    v.lerp_(square, 1 - decay)
                    update = p.grad * v.rsqrt()
                update /= (update.square().mean().sqrt()).clamp(min=1.0)
                p.add_(update, alpha=-group["lr"] * max(1e-3, p.square().mean().sqrt().item()))


class ScheduleFree(torch.optim.Optimizer):
    """It keeps z, and what stands in the model is y in training and x in evaluation."""

    def __init__(self, params, lr=0.05, beta=0.9):
        super().__init__(params, {"lr": lr, "beta": beta, "k": 0, "train": True})

    @torch.no_grad()
    def swap(self, train):
        for group in self.param_groups:
            if group["train"] is train:
                continue
            for p in group["params"]:
                if "z" in self.state[p]:
                    weight = 1 - 1 / group["beta"] if not train else 1 - group["beta"]
                    p.lerp_(self.state[p]["z"], weight)
            group["train"] = train

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            c = 1 / (group["k"] + 1)
            for p in group["params"]:
                if p.grad is None:
                    continue
                z = self.state[p].setdefault("z", p.detach().clone())
                p.lerp_(z, c)
                p.add_(p.grad, alpha=group["lr"] * (group["beta"] * (1 - c) - 1))
                z.sub_(p.grad, alpha=group["lr"])
            group["k"] += 1


class Sophia(torch.optim.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def update_hessian(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    h = self.state[p].setdefault("hessian", torch.zeros_like(p))
                    h.mul_(0.9).addcmul_(p.grad, p.grad, value=0.1)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                h = state.setdefault("hessian", torch.zeros_like(p))
                m.lerp_(p.grad, 0.1)
                p.add_((m.abs() / (0.04 * h + 1e-15)).clamp(max=1).mul_(m.sign()), alpha=-group["lr"])


class Galore(torch.optim.Optimizer):
    """Adam in a subspace that is drawn anew every second step by an SVD of the gradient."""

    def __init__(self, params, lr=0.01, rank=4):
        super().__init__(params, {"lr": lr, "rank": rank})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                count = state["step"] = state.get("step", 0) + 1
                g = p.grad
                if g.dim() == 2:
                    if count % 2 == 1:
                        state["basis"] = torch.linalg.svd(g, full_matrices=False)[0][:, : group["rank"]].contiguous()
                    g = state["basis"].t() @ g
                m, v = state.setdefault("m", torch.zeros_like(g)), state.setdefault("v", torch.zeros_like(g))
                m.lerp_(g, 0.1)
                v.lerp_(g.square(), 0.01)
                update = m / (v.sqrt() + 1e-6)
                p.sub_(group["lr"] * (state["basis"] @ update if p.dim() == 2 else update))


def by_hand(kind, **options):
    return {"optimizer": kind, "optimizer_options": {}, **options}


@today("Lion by hand: the sign of an interpolation, decay before it")
def lion(run):
    return loop(run, body=mean, **by_hand(Lion, lr=1e-3))


@today("Adafactor by hand: states of rows and columns, a step relative to the weight's own size")
def adafactor(run):
    return loop(run, body=mean, **by_hand(Adafactor, lr=0.05))


@today("Schedule-free by hand: weights are swapped for an evaluation and back, by a method of the optimizer", PLAIN)
def schedule_free(run):
    def after(engine, step):
        engine.optimizer.swap(False)
        with torch.no_grad():
            found = mean(engine, 80).item()
        engine.optimizer.swap(True)
        return found

    return loop(run, body=mean, after=after, **by_hand(ScheduleFree, lr=0.05))


@program(
    family,
    "Sophia by hand: its method writes a Hessian to states before the first step has made them",
    PLAIN,
    refused=dict.fromkeys(PLAIN, "give all of them"),
)
def sophia(run):
    def before(engine, step):
        if step % 2 == 0:
            kept = {n: p.grad.detach().clone() for n, p in engine.module.named_parameters()}
            engine.optimizer.zero_grad()
            logits = engine(batch(step + 40))
            F.cross_entropy(logits, torch.multinomial(logits.detach().softmax(-1), 1).squeeze(-1)).backward()
            engine.optimizer.update_hessian()
            engine.optimizer.zero_grad()
            for n, p in engine.module.named_parameters():
                p.grad = kept[n]

    return loop(run, body=mean, before=before, steps=4, **by_hand(Sophia, lr=0.01))


@today("GaLore by hand: a basis in the states that is replaced, moments of another shape than the weight")
def galore(run):
    return loop(run, body=mean, steps=4, **by_hand(Galore, lr=0.01))


@today("muP: groups by the width of fan-in, rates scaled, the output multiplied, embeddings apart; warm-up by LambdaLR")
def mu_p(run):
    from misuses.strangers import Exact

    def grouped():
        torch.manual_seed(0)
        model = Net()
        matrices = [p for n, p in model.named_parameters() if p.dim() > 1 and "blocks" in n]
        rest = [p for n, p in model.named_parameters() if not (p.dim() > 1 and "blocks" in n)]
        optimizer = Exact(
            [{"params": matrices, "lr": 0.05 / 4, "weight_decay": 0.1}, {"params": rest, "lr": 0.05}], momentum=0.9
        )
        return model, optimizer

    model, optimizer = grouped()
    engine = run.place.wrap(model, optimizer=optimizer)
    schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda step: min(1.0, (step + 1) / 3))
    found = []
    for step in range(4):

        def body(index):
            loss = (engine(batch(index)) / 4).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
        schedule.step()
        found.append(schedule.get_last_lr())
    return found, values(model)


@today("rates fall layer by layer, and a freeze goes up block by block with `zero_grad` between (ULMFiT)", TODAY[:3])
def ulmfit(run):
    from misuses.strangers import Exact

    torch.manual_seed(0)
    model = Net()
    parts = [model.last, *reversed(model.blocks), model.first]
    optimizer = Exact([{"params": part.parameters(), "lr": 0.05 / 1.5**i} for i, part in enumerate(parts)], lr=0.05)
    engine = run.place.wrap(model, optimizer=optimizer)
    found = []
    for step in range(4):
        for i, part in enumerate(parts):
            part.requires_grad_(i <= 2 * step)

        def body(index):
            loss = mean(engine, index)
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
    return found, values(model)


@today("ReLoRA by hand: adapters are merged into a frozen weight, begin anew, their momentum is zero, the rate warms")
def re_lora(run):
    def after(engine, step):
        if step != 1:
            return
        torch.manual_seed(step)
        with torch.no_grad():
            for block in engine.module.blocks:
                block.base.weight.add_(block.b.weight @ block.a.weight)
                nn.init.kaiming_uniform_(block.a.weight, a=5**0.5)
                block.b.weight.zero_()
                for p in (block.a.weight, block.b.weight):
                    engine.optimizer.state[p]["momentum_buffer"].zero_()
        for group in engine.optimizer.param_groups:
            group["lr"] *= 0.5

    return loop(run, lambda: Net(Adapted), body=mean, after=after, steps=4)


@today("PiSSA: the adapter is made of singular vectors of the weight before wrapping, the rest is frozen")
def pissa(run):
    def build():
        torch.manual_seed(0)
        model = Net(Adapted)
        with torch.no_grad():
            for block in model.blocks:
                u, s, v = torch.linalg.svd(block.base.weight)
                block.b.weight.copy_(u[:, :4] * s[:4].sqrt())
                block.a.weight.copy_(s[:4, None].sqrt() * v[:4])
                block.base.weight.sub_(block.b.weight @ block.a.weight)
        return model

    return loop(run, build, body=mean)


@today("AdaLoRA: importance of ranks by products of weight and gradient, the least are masked after the step")
def ada_lora(run):
    class Ranked(Adapted):
        def __init__(self):
            super().__init__()
            self.e = nn.Parameter(torch.full((4,), 0.1))

        def forward(self, x):
            return x + torch.tanh(self.base(x) + self.b(self.a(x) * self.e))

    importance = {}

    def before(engine, step):
        for n, p in engine.module.named_parameters():
            if p.grad is not None:
                now = (p * p.grad).abs().detach()
                importance[n] = importance[n] * 0.8 + now * 0.2 if n in importance else now

    def after(engine, step):
        scores = {n: v for n, v in importance.items() if n.endswith(".e")}
        threshold = torch.cat(list(scores.values())).kthvalue(2 * (step + 1)).values
        with torch.no_grad():
            for n, p in engine.module.named_parameters():
                if n in scores:
                    p.masked_fill_(scores[n] <= threshold, 0.0)
        return {n: v.clone() for n, v in scores.items()}

    return loop(run, lambda: Net(Ranked), body=mean, before=before, after=after)


# Growing, sharing, dropping.


@today("ALBERT with a number of loops that is drawn for each micro-batch, one block, a loss at every loop")
def looped(run):
    class Looped(Net):
        def forward(self, x, count):
            x = self.first(x)
            outs = []
            for _ in range(count):
                x = self.blocks[0](x)
                x = self.blocks[1](x) if count % 2 else x
                outs.append(self.last(x))
            return outs

    draw = random.Random(2)
    counts = [draw.randrange(1, 7) for _ in range(20)]

    def body(engine, index):
        outs = engine(batch(index), counts[index])
        return sum(o.square().mean() * (i + 1) for i, o in enumerate(outs)) / len(outs)

    return loop(run, Looped, body=body)


@today("a recurrent depth whose first loops have no graph, the state begins by noise (Huginn)")
def recurrent_depth(run):
    class Deep(Net):
        def forward(self, x, free, bound):
            e = self.first(x)
            state = torch.randn_like(e) * 0.1
            with torch.no_grad():
                for _ in range(free):
                    state = self.blocks[1](self.blocks[0](state + e))
            for _ in range(bound):
                state = self.blocks[1](self.blocks[0](state + e))
            return self.last(state)

    return loop(run, Deep, body=lambda e, i: e(batch(i), i % 3, 1 + i % 2).square().mean())


@today(
    "gradual stacking: weights and momentum of a block are copied into the next one, which is called from then on",
    TODAY[:3],
)
def stacked_gradually(run):
    class Growing(Net):
        depth = 2

        def forward(self, x):
            x = self.first(x)
            for block in self.blocks[: self.depth]:
                x = block(x)
            return self.last(x)

    def after(engine, step):
        model = engine.module
        new, old = model.blocks[model.depth], model.blocks[model.depth - 1]
        new.load_state_dict(old.state_dict())
        for a, b in zip(new.parameters(), old.parameters(), strict=True):
            engine.optimizer.state[a] = {"momentum_buffer": engine.optimizer.state[b]["momentum_buffer"].clone()}
        model.depth += 1

    return loop(run, Growing, body=mean, after=after)


@today("LayerSkip: a dropout of layers that grows with depth, a loss of early exits by one head, rotated over layers")
def layer_skip(run):
    class Skipping(Net):
        def forward(self, x, exit_at):
            x = self.first(x)
            early = None
            for i, block in enumerate(self.blocks):
                if not (self.training and torch.rand(()).item() < 0.1 * i):
                    x = block(x)
                if i == exit_at:
                    early = self.last(x)
            return self.last(x), early

    def body(engine, index):
        out, early = engine(batch(index), index % 5)
        return out.square().mean() + 0.1 * early.square().mean()

    return loop(run, Skipping, body=body)


@today("magnitude pruning in `nn.utils.prune`, global, twice, made permanent in a copy that is judged", PLAIN)
def pruned_of_today(run):
    from torch.nn.utils import prune

    def build():
        model = Net()
        for block in model.blocks:
            prune.identity(block.up, "weight")
        return model

    def after(engine, step):
        modules = [(block.up, "weight") for block in engine.module.blocks]
        with torch.no_grad():
            scores = torch.cat([m.weight_orig.abs().flatten() for m, _ in modules])
            cut = scores.kthvalue(int(len(scores) * 0.2 * (step + 1))).values
            for m, _ in modules:
                m.weight_mask.copy_(m.weight_orig.abs() > cut)
        judged = build()
        judged.load_state_dict(engine.module.state_dict())
        for block in judged.blocks:
            prune.remove(block.up, "weight")
        return judged(batch(88)).detach()

    return loop(run, build, body=mean, after=after)


@today(
    "a progressive loss: masks of a U-Net's skips over units open one by one; skips are kept in a dict of the model",
    TODAY[:3],
)
def skips_in_dict(run):
    class Unet(Net):
        def __init__(self):
            super().__init__()
            self.opened, self.skips = 0, {}
            self.mix = nn.ParameterList(torch.zeros(WIDTH) for _ in range(2))

        def forward(self, x):
            x = self.first(x)
            self.skips.clear()
            for i, block in enumerate(self.blocks):
                if i >= 3 and i - 3 < self.opened:
                    x = x + self.skips.pop(4 - i) * (1 + self.mix[i - 3])
                x = block(x)
                self.skips[i] = x
            return self.last(x)

    def after(engine, step):
        engine.module.opened = step + 1

    return loop(run, Unet, body=mean, after=after)


@today("diffusion: adaLN by a timestep's embedding, a condition that falls out, min-SNR, an EMA that is sampled with")
def diffusion_of_today(run):
    class Conditioned(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.mod = nn.LayerNorm(WIDTH, elementwise_affine=False), nn.Linear(WIDTH, 3 * WIDTH)
            self.mlp = Block()

        def forward(self, x, c):
            shift, scale, gate = self.mod(F.silu(c)).chunk(3, -1)
            return x + gate * self.mlp(self.norm(x) * (1 + scale) + shift)

    class Dit(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.time, self.label = nn.Linear(8, WIDTH), nn.Embedding(5, WIDTH)
            self.blocks, self.last = nn.ModuleList(Conditioned() for _ in range(4)), nn.Linear(WIDTH, WIDTH)

        def forward(self, x, t, y):
            angle = t[:, None] * 10 ** -torch.arange(4.0)
            c = self.time(torch.cat([angle.sin(), angle.cos()], -1)) + self.label(y)
            for block in self.blocks:
                x = block(x, c)
            return self.last(x)

    average = {}

    def body(engine, index):
        draw = torch.Generator().manual_seed(index)
        x, noise = batch(index), torch.randn(160, WIDTH, generator=draw)
        t, y = torch.rand(160, generator=draw), torch.randint(4, (160,), generator=draw)
        y = torch.where(torch.rand(160, generator=draw) < 0.2, 4, y)
        a = (t * math.pi / 2).cos()[:, None]
        snr = (a**2 / (1 - a**2 + 1e-4)).squeeze(-1)
        out = engine(a * x + (1 - a**2).sqrt() * noise, t, y)
        return ((out - noise).square().mean(-1) * snr.clamp(max=5) / (snr + 1e-4)).mean()

    def after(engine, step):
        model = engine.module
        with torch.no_grad():
            for n, p in model.named_parameters():
                average[n] = average[n].lerp(p, 0.3) if n in average else p.detach().clone()
            x = batch(77, 8)
            for t in (0.9, 0.5, 0.1):
                times, label = torch.full((8,), t), torch.arange(8) % 4
                guided, free = (functional_call(model, average, (x, times, y)) for y in (label, torch.full((8,), 4)))
                x = x - 0.2 * (free + 2 * (guided - free))
        return x

    return loop(run, Dit, body=body, after=after)


@today("flow matching with a minibatch pairing by Sinkhorn, logit-normal times, shortcut targets by two half steps")
def flow_matching(run):
    def body(engine, index):
        draw = torch.Generator().manual_seed(index)
        x, noise = batch(index), torch.randn(160, WIDTH, generator=draw)
        cost = torch.cdist(x, noise)
        plan = (-cost).softmax(-1)
        for _ in range(5):
            plan = plan / plan.sum(0)
            plan = plan / plan.sum(1, keepdim=True)
        noise = noise[plan.argmax(-1)]
        t = torch.randn(160, 1, generator=draw).sigmoid()
        now = (1 - t) * noise + t * x
        with torch.no_grad():
            half = engine(now)
            goal = (half + engine(now + 0.1 * half)) / 2
        return F.mse_loss(engine(now), x - noise) + 0.1 * F.mse_loss(engine(now * 0.5), goal)

    return loop(run, body=body)


@today(
    "MAE: three quarters of the rows are left out by a shuffle, mask tokens in the decoder, a loss on what was masked"
)
def masked_autoencoder(run):
    class Mae(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.encoder, self.decoder = Net(), Net()
            self.mask_token = nn.Parameter(torch.zeros(1, WIDTH))
            self.positions = nn.Parameter(torch.randn(160, WIDTH) / 10)

        def forward(self, x):
            order = torch.rand(len(x)).argsort()
            kept, back = order[: len(x) // 4], order.argsort()
            latent = self.encoder((x + self.positions)[kept])
            full = torch.cat([latent, self.mask_token.expand(len(x) - len(kept), -1)])[back]
            out = self.decoder(full + self.positions)
            mask = torch.ones(len(x)).scatter(0, kept, 0.0)
            return ((out - x).square().mean(-1) * mask).sum() / mask.sum()

    return loop(run, Mae, body=lambda e, i: e(batch(i)))


@today("sequence chunks: the state of a recurrent model goes from micro-batch to micro-batch, detached, in a list")
def truncated_state(run):
    class Recurrent(Net):
        def forward(self, x, state):
            x = self.first(x) + state
            for block in self.blocks:
                x = block(x)
            return self.last(x), torch.tanh(x)

    state = [torch.zeros(160, WIDTH)]

    def body(engine, index):
        out, new = engine(batch(index), state[0])
        state[0] = new.detach()
        return out.square().mean()

    return loop(run, Recurrent, body=body, each=3)


@today(
    "backpropagation over two chunks: the state keeps its graph for one more micro-batch, gone through twice",
    TODAY[:2],
)
def two_chunks(run):
    class Recurrent(Net):
        def forward(self, x, state):
            x = self.first(x) + state
            for block in self.blocks:
                x = block(x)
            return self.last(x), torch.tanh(x)

    torch.manual_seed(5)
    engine = run.engine(Recurrent())
    found, state = [], torch.zeros(160, WIDTH)
    for step in range(3):
        losses = []
        leaf = state.detach().requires_grad_()
        one, middle = engine(batch(2 * step), leaf)
        (one.square().mean()).backward(retain_graph=True)
        joint = middle.detach().requires_grad_()
        two, state = engine(batch(2 * step + 1), joint)
        two.square().mean().backward()
        middle.backward(joint.grad)
        found += [losses, leaf.grad.clone(), stepped(engine)]
    return found, values(engine.module)


@today(
    "token-weighted accumulation: losses are sums, the number of all tokens of the step is counted before it", TOGETHER
)
def by_all_tokens(run):
    torch.manual_seed(5)
    engine = run.engine()
    found = []
    for step in range(3):
        parts = [(batch(3 * step + i, rows), rows) for i, rows in enumerate((160, 30, 90))]
        count = sum(rows for _, rows in parts)

        def body(part, engine=engine, count=count):
            out = engine(part[0])
            loss = out.square().sum() / (count * WIDTH)
            loss.backward()
            return {"loss": loss.item(), "rows": part[1], "largest": out.detach().abs().max()}

        found.append(run.accumulate(engine, parts, body))
        found.append(stepped(engine))
    return found, values(engine.module)


@today(
    "a chunked loss by a Function that makes its gradient in the forward (Liger), the head's weight given to it",
    TOGETHER,
)
def chunked_loss(run):
    class Fused(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, weight, bias, target):
            of_x, of_w, of_b, total = torch.empty_like(x), torch.zeros_like(weight), torch.zeros_like(bias), 0.0
            for rows in torch.arange(len(x)).split(40):
                with torch.enable_grad():
                    a, w, b = (t.detach().requires_grad_() for t in (x[rows], weight, bias))
                    loss = F.cross_entropy(F.linear(a, w, b), target[rows], reduction="sum") / len(x)
                    of_x[rows], w_grad, b_grad = torch.autograd.grad(loss, (a, w, b))
                of_w += w_grad
                of_b += b_grad
                total = total + loss.detach()
            ctx.save_for_backward(of_x, of_w, of_b)
            return total

        @staticmethod
        def backward(ctx, gradient):
            return (*(t * gradient for t in ctx.saved_tensors), None)

    def body(engine, index):
        model, x = engine.module, batch(index)
        y = model.first(x)
        for block in model.blocks:
            y = block(y)
        return Fused.apply(y, model.last.weight, model.last.bias, x.argmax(-1))

    return loop(run, body=body)


@today("embeddings: a padding row, scaled by frequency, a norm that is limited; gradients of rows are read and masked")
def embeddings(run):
    class Text(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.words = nn.Embedding(40, WIDTH, padding_idx=0)
            self.often = nn.Embedding(40, WIDTH, scale_grad_by_freq=True)
            self.blocks, self.last = nn.ModuleList(Block() for _ in range(3)), nn.Linear(WIDTH, 40)

        def forward(self, tokens):
            x = self.words(tokens) + self.often(tokens)
            for block in self.blocks:
                x = block(x)
            return self.last(x)

    def body(engine, index):
        tokens = torch.randint(40, (160,), generator=torch.Generator().manual_seed(index))
        return F.cross_entropy(engine(tokens), tokens.roll(-1))

    def before(engine, step):
        grad = engine.module.words.weight.grad
        found = grad.norm(dim=1)
        grad[10:20] = 0
        return found

    return loop(run, Text, body=body, before=before)


@today(
    "batch norm with a virtual batch, statistics moved by a momentum that a schedule changes; recalibrated at the end"
)
def ghost_norm(run):
    class Ghost(nn.Module):
        def __init__(self):
            super().__init__()
            self.up, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            y = self.up(x)
            y = torch.cat([self.norm(part) for part in y.chunk(4)]) if self.training else self.norm(y)
            return x + torch.tanh(y)

    def after(engine, step):
        for module in engine.module.modules():
            if isinstance(module, nn.BatchNorm1d):
                module.momentum = 0.1 / (step + 1)
                if step == 2:
                    module.reset_running_stats()
                    module.momentum = None
        if step == 2:
            with torch.no_grad():
                for i in range(2):
                    engine(batch(i + 60))
        engine.module.eval()
        with torch.no_grad():
            found = engine(batch(90, 8))
        engine.module.train()
        return found

    return loop(run, lambda: Net(Ghost), body=mean, after=after)
