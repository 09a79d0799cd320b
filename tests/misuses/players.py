"""Reinforcement learning, adversaries and teachers: several models of which one's gradient goes through another, and
searches that take a step back. The optimizer is torch's own arithmetic, so that bits are compared."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils

from misuses.case import Family
from misuses.place import gradients, values
from misuses.strangers import WIDTH, Block, Exact, batch

family = Family("players")

SGD: dict[str, Any] = {"optimizer": Exact, "lr": 0.05, "optimizer_options": {"momentum": 0.9}}


def same_bits(title, **options):
    return family.works(title, rtol=0.0, atol=0.0, **{"seconds": 90.0, **options})


class Seeded(nn.Sequential):
    def __init__(self, outputs=WIDTH, blocks=3, seed=0, inputs=WIDTH):
        torch.manual_seed(seed)
        super().__init__(nn.Linear(inputs, WIDTH), *[Block() for _ in range(blocks)], nn.Linear(WIDTH, outputs))


def wrapped(place, model=None, **options):
    return place.wrap(Seeded() if model is None else model, **{**SGD, **options})


def update(engine, loss):
    engine.optimizer.zero_grad()
    loss.backward()
    engine.optimizer.step()
    return loss.item()


def frozen(engine, is_frozen):
    for parameter in engine.module.parameters():
        parameter.requires_grad_(not is_frozen)


@same_bits("DDPG: the actor learns through a frozen critic, both have soft targets that are plain copies")
def ddpg(place):
    actor, critic = wrapped(place, Seeded(4)), wrapped(place, Seeded(1, inputs=WIDTH + 4, seed=1))
    targets = copy.deepcopy(actor.module), copy.deepcopy(critic.module)
    found = []
    for step in range(3):
        x, reward, after = batch(step), torch.linspace(0, 1, 4)[:, None], batch(step + 1)
        with torch.no_grad():
            aim = reward + 0.9 * targets[1](torch.cat([after, targets[0](after).tanh()], 1))
        found.append(update(critic, F.mse_loss(critic(torch.cat([x, actor(x).tanh().detach()], 1)), aim)))
        frozen(critic, True)
        found.append(update(actor, -critic(torch.cat([x, actor(x).tanh()], 1)).mean()))
        frozen(critic, False)
        for target, engine in zip(targets, (actor, critic), strict=True):
            for t, p in zip(target.parameters(), engine.module.parameters(), strict=True):
                t.data.mul_(0.9).add_(p.data, alpha=0.1)
    return found, values(actor.module), values(critic.module), values(targets[1])


@same_bits("TD3: two critics in one engine, delayed actor, noise on the target's action by a generator")
def td3(place):
    critics = nn.ModuleList([Seeded(1, inputs=WIDTH + 4, seed=1), Seeded(1, inputs=WIDTH + 4, seed=2)])
    actor, both = wrapped(place, Seeded(4)), wrapped(place, critics)
    target = copy.deepcopy(both.module)
    draw, found = torch.Generator().manual_seed(5), []
    for step in range(4):
        x, after = batch(step), batch(step + 1)
        with torch.no_grad():
            action = actor(after).tanh() + 0.1 * torch.randn(4, 4, generator=draw).clamp(-0.5, 0.5)
            given = torch.cat([after, action], 1)
            aim = 0.5 + 0.9 * torch.minimum(target[0](given), target[1](given))
            own = torch.cat([x, actor(x).tanh()], 1)
        found.append(update(both, sum(F.mse_loss(c(own), aim) for c in both.module)))
        if step % 2:
            found.append(update(actor, -both.module[0](torch.cat([x, actor(x).tanh()], 1)).mean()))
            with torch.no_grad():
                for t, p in zip(target.parameters(), both.module.parameters(), strict=True):
                    t.lerp_(p, 0.2)
    return found, values(actor.module), values(both.module)


@same_bits("PPO over four epochs of two pieces: ratio, clipping, an entropy, a critic that shares the trunk")
def ppo_of_epochs(place):
    engine = wrapped(place, Seeded(6))
    found = []
    for rollout in range(2):
        x = batch(rollout, 8)
        with torch.no_grad():
            out = engine(x)
            old = torch.distributions.Categorical(logits=out[:, :5])
            torch.manual_seed(rollout)
            action = old.sample()
            before, gain = old.log_prob(action), torch.linspace(-1, 1, 8) - out[:, 5]
        for epoch in range(4):
            for rows in torch.randperm(8, generator=torch.Generator().manual_seed(epoch)).chunk(2):
                out = engine(x[rows])
                now = torch.distributions.Categorical(logits=out[:, :5])
                ratio = (now.log_prob(action[rows]) - before[rows]).exp()
                loss = -torch.minimum(ratio * gain[rows], ratio.clamp(0.8, 1.2) * gain[rows]).mean()
                loss = loss + 0.5 * (out[:, 5] - gain[rows]).square().mean() - 0.01 * now.entropy().mean()
                found.append(update(engine, loss))
    return found, values(engine.module)


@same_bits("GRPO: groups of samples, a reference in another engine, a KL term, several updates a batch")
def grpo(place):
    engine, reference = wrapped(place, Seeded(5)), wrapped(place, Seeded(5))
    frozen(reference, True)
    found = []
    for step in range(2):
        x = batch(step, 2).repeat_interleave(4, 0)
        torch.manual_seed(step)
        with torch.no_grad():
            first = engine(x).log_softmax(-1)
            action = torch.multinomial(first.exp(), 1)
            aside = reference(x).log_softmax(-1).gather(1, action)
        reward = (action == 2).float().view(2, 4)
        gain = ((reward - reward.mean(1, keepdim=True)) / (reward.std(1, keepdim=True) + 1e-4)).view(-1, 1)
        for _ in range(2):
            now = engine(x).log_softmax(-1).gather(1, action)
            apart = aside - now
            loss = -((now - first.gather(1, action)).exp() * gain - 0.1 * (apart.exp() - apart - 1)).mean()
            found.append(update(engine, loss))
    return found, values(engine.module)


@same_bits("DPO with the weights of before as reference, called by `functional_call`")
def dpo_functional(place):
    from torch.func import functional_call

    engine = wrapped(place, Seeded(5))
    before = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
    found = []
    for step in range(3):
        good, bad = batch(step), batch(step + 50)
        with torch.no_grad():
            aside = [functional_call(engine.module, before, (each,)).logsumexp(-1) for each in (good, bad)]
        margin = (engine(good).logsumexp(-1) - aside[0]) - (engine(bad).logsumexp(-1) - aside[1])
        found.append(update(engine, -F.logsigmoid(0.1 * margin).mean()))
    return found, values(engine.module)


@same_bits(
    "dreamer: a world model is rolled out five steps, the actor's gradient goes through it and does not train it"
)
def world_model(place):
    world, actor = wrapped(place, Seeded(inputs=WIDTH + 4, seed=1)), wrapped(place, Seeded(4))
    found = []
    for step in range(2):
        x = batch(step)
        found.append(update(world, F.mse_loss(world(torch.cat([x, actor(x).detach()], 1)), batch(step + 1))))
        frozen(world, True)
        state, total = x, 0.0
        for _ in range(5):
            state = world(torch.cat([state, actor(state).tanh()], 1))
            total = total - state[:, 0].mean()
        found.append(update(actor, total))
        frozen(world, False)
    return found, values(world.module), values(actor.module)


@same_bits(
    "a GAN with the gradient of the critic by the fake input, fed back as a loss of features (no double backward)"
)
def gan_by_input_gradient(place):
    maker, critic = wrapped(place), wrapped(place, Seeded(1, seed=1))
    found = []
    for step in range(3):
        made = maker(batch(step))
        fake = made.detach().requires_grad_()
        (direction,) = torch.autograd.grad(critic(fake).sum(), fake)
        found.append(update(maker, F.mse_loss(made, (fake + 0.1 * direction).detach())))
        found.append(update(critic, (F.softplus(critic(fake.detach())) + F.softplus(-critic(batch(step + 9)))).mean()))
    return found, values(maker.module), values(critic.module)


@same_bits("an adversarial reversal of the gradient: one model, a domain head behind a Function that turns the sign")
def gradient_reversal(place):
    class Reversed(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, g):
            return -0.5 * g

    model = nn.ModuleDict({"trunk": Seeded(), "task": nn.Linear(WIDTH, 3), "domain": Seeded(2, 1, seed=1)})
    engine = wrapped(place, model)
    found = []
    for step in range(3):
        h = model["trunk"](batch(step))
        task = F.cross_entropy(model["task"](h), torch.arange(4) % 3)
        domain = F.cross_entropy(model["domain"](Reversed.apply(h)), torch.arange(4) % 2)
        found.append(update(engine, task + domain))
    return found, values(model)


@same_bits("both players step on one graph: retained for the second, who learns from its own part by `inputs=`")
def one_graph_two_players(place):
    maker, critic = wrapped(place), wrapped(place, Seeded(1, seed=1))
    found = []
    for step in range(3):
        score = critic(maker(batch(step)))
        maker.optimizer.zero_grad()
        critic.optimizer.zero_grad()
        F.softplus(score).mean().backward(inputs=list(critic.module.parameters()), retain_graph=True)
        F.softplus(-score).mean().backward(inputs=list(maker.module.parameters()))
        found.append((score, list(gradients(critic.module).values())))
        critic.optimizer.step()
        maker.optimizer.step()
    return found, values(maker.module), values(critic.module)


@same_bits("extragradient: a step to look ahead, gradients there, back, and the real step")
def extragradient(place):
    engine = wrapped(place)
    found = []
    for step in range(3):
        kept = [p.detach().clone() for p in engine.module.parameters()]
        engine.optimizer.zero_grad()
        engine(batch(step)).square().mean().backward()
        with torch.no_grad():
            for p in engine.module.parameters():
                p.sub_(p.grad, alpha=0.1)
        found.append(0.0)
        engine.optimizer.zero_grad()
        loss = engine(batch(step)).square().mean()
        loss.backward()
        with torch.no_grad():
            for p, value in zip(engine.module.parameters(), kept, strict=True):
                p.copy_(value)
        engine.optimizer.step()
        found.append(loss.item())
    return found, values(engine.module)


@same_bits("optimistic gradients: the last gradient is kept and subtracted")
def optimistic(place):
    engine, last, found = wrapped(place), {}, []
    for step in range(4):
        engine.optimizer.zero_grad()
        loss = engine(batch(step)).square().mean()
        loss.backward()
        for name, p in engine.module.named_parameters():
            now = p.grad.clone()
            p.grad = 2 * now - last.get(name, now)
            last[name] = now
        engine.optimizer.step()
        found.append(loss.item())
    return found, values(engine.module)


@same_bits("AlphaZero-like self-play: the net plays by its own evaluations, the best net so far is a second engine")
def self_play(place):
    now, best = wrapped(place, Seeded(3)), wrapped(place, Seeded(3))
    found = []
    for step in range(3):
        with torch.no_grad():
            policy = best(batch(step)).softmax(-1)
        found.append(update(now, F.cross_entropy(now(batch(step)), policy.square() / policy.square().sum(-1, True))))
        with torch.inference_mode():
            wins = (now(batch(9)).max(-1).values > best(batch(9)).max(-1).values).float().mean().item()
        if wins >= 0.5:
            best.module.load_state_dict(now.module.state_dict())
        found.append(wins)
    return found, values(best.module)


@same_bits("beam search and greedy decoding by the model between steps, and training on what was found")
def trained_on_beams(place):
    class Language(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.body, self.head = nn.Embedding(20, WIDTH), Seeded(), nn.Linear(WIDTH, 20)

        def forward(self, ids):
            return self.head(self.body(self.embed(ids).cumsum(1)))

    engine = wrapped(place, Language())
    found = []
    for step in range(3):
        beams = [(0.0, torch.tensor([step]))]
        with torch.no_grad():
            for _ in range(4):
                wider = []
                for score, ids in beams:
                    share = engine(ids[None])[0, -1].log_softmax(-1)
                    for value, token in zip(*share.topk(2), strict=True):
                        wider.append((score + value.item(), torch.cat([ids, token[None]])))
                beams = sorted(wider, key=lambda each: -each[0])[:3]
        ids = beams[0][1][None]
        found.append((beams[0][0], ids))
        found.append(update(engine, F.cross_entropy(engine(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())))
    return found, values(engine.module)


@same_bits("contrastive search: a teacher's and an amateur's logits are subtracted, both are engines, hooks read them")
def contrastive_decoding(place):
    expert, amateur = wrapped(place, Seeded(9)), wrapped(place, Seeded(9, 1, seed=3))
    seen, found = [], []
    expert.module.register_forward_hook(lambda m, a, out: seen.append(out.argmax(-1)))
    amateur.module.register_forward_hook(lambda m, a, out: out * 0.5)
    for step in range(3):
        with torch.inference_mode():
            chosen = (expert(batch(step)).log_softmax(-1) - amateur(batch(step)).log_softmax(-1)).argmax(-1)
        found.append((chosen, update(amateur, F.cross_entropy(amateur(batch(step)), chosen.clone()))))
    return found, seen, values(amateur.module)


@same_bits("speculative sampling: a draft model proposes, the engine accepts, both go on to learn from it")
def speculative_sampling(place):
    target, draft = wrapped(place, Seeded(7)), wrapped(place, Seeded(7, 1, seed=3))
    found = []
    for step in range(3):
        torch.manual_seed(step)
        with torch.no_grad():
            p, q = target(batch(step)).softmax(-1), draft(batch(step)).softmax(-1)
            token = torch.multinomial(q, 1)
            accepted = torch.rand(4, 1) < p.gather(1, token) / q.gather(1, token)
        found.append(accepted)
        found.append(update(draft, F.kl_div(draft(batch(step)).log_softmax(-1), p, reduction="batchmean")))
    return found, values(draft.module)


# Searches.


@same_bits("a learning rate finder: rates grow, the best one is chosen, model and optimizer go back")
def rate_found_and_taken(place):
    engine = wrapped(place)
    kept = copy.deepcopy([engine.module.state_dict(), engine.optimizer.state_dict()])
    tried = []
    for step in range(6):
        engine.optimizer.param_groups[0]["lr"] = 1e-3 * 3**step
        tried.append(update(engine, engine(batch(step)).square().mean()))
    engine.module.load_state_dict(kept[0])
    engine.optimizer.load_state_dict(kept[1])
    engine.optimizer.param_groups[0]["lr"] = 1e-3 * 3 ** min(range(6), key=tried.__getitem__)
    return tried, [update(engine, engine(batch(step)).square().mean()) for step in range(3)], values(engine.module)


@same_bits("Lookahead around the engine's optimizer by a step post-hook")
def lookahead_by_hook(place):
    engine = wrapped(place)
    slow = [p.detach().clone() for p in engine.module.parameters()]
    count = itertools.count(1)

    def after(optimizer, args, kwargs):
        if next(count) % 2 == 0:
            with torch.no_grad():
                for p, s in zip(engine.module.parameters(), slow, strict=True):
                    s.lerp_(p, 0.5)
                    p.copy_(s)

    engine.optimizer.register_step_post_hook(after)
    return [update(engine, engine(batch(step)).square().mean()) for step in range(5)], values(engine.module)


@family.works("adaptive sharpness-aware steps (ASAM), and a schedule of its radius", rtol=1e-5, atol=1e-6)
def adaptive_sharpness(place):
    engine = wrapped(place)
    found = []
    for step in range(3):
        engine.optimizer.zero_grad()
        loss = engine(batch(step)).square().mean()
        loss.backward()
        norm = torch.stack([(p.abs() * p.grad).norm() for p in engine.module.parameters()]).norm()
        moves = [p.detach().square() * p.grad * (0.05 / (1 + step) / norm) for p in engine.module.parameters()]
        for p, move in zip(engine.module.parameters(), moves, strict=True):
            p.data.add_(move)
        engine.optimizer.zero_grad()
        engine(batch(step)).square().mean().backward()
        for p, move in zip(engine.module.parameters(), moves, strict=True):
            p.data.sub_(move)
        engine.optimizer.step()
        found.append(loss.item())
    return found, values(engine.module)


@same_bits("gradient surgery of three tasks: CAGrad-like weights from products of gradients")
def three_tasks(place):
    engine = wrapped(place)
    found = []
    for step in range(3):
        tasks = []
        for task in range(3):
            engine.optimizer.zero_grad()
            out = engine(batch(step))
            (out[:, task].square().mean() if task else F.softplus(out).mean()).backward()
            tasks.append(torch.cat([p.grad.flatten() for p in engine.module.parameters()]))
        stacked = torch.stack(tasks)
        share = (stacked @ stacked.t()).softmax(-1).mean(0)
        mixed, at = share @ stacked, 0
        for p in engine.module.parameters():
            p.grad = mixed[at : at + p.numel()].view(p.shape)
            at += p.numel()
        engine.optimizer.step()
        found.append(share)
    return found, values(engine.module)


@family.refused("a product of the Hessian and a vector, by a double backward", "backward|gradient|twice|once")
def hessian_product(place):
    engine = wrapped(place)
    parameters = list(engine.module.parameters())
    first = torch.autograd.grad(engine(batch(0)).square().mean(), parameters, create_graph=True)
    return torch.autograd.grad(sum((g * g.detach()).sum() for g in first), parameters)


@family.works(
    "a product of the Hessian and a vector, by differences of gradients at moved weights", rtol=1e-4, atol=1e-4
)
def hessian_by_differences(place):
    engine = wrapped(place)
    found = []
    vector = [torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) for p in engine.module.parameters()]
    for sign in (1, -2, 1):
        with torch.no_grad():
            for p, v in zip(engine.module.parameters(), vector, strict=True):
                p.add_(v, alpha=0.01 * sign)
        engine.optimizer.zero_grad()
        engine(batch(0)).square().mean().backward()
        found.append([p.grad.clone() for p in engine.module.parameters()])
    return found, [update(engine, engine(batch(1)).square().mean())], values(engine.module)


@same_bits("gradient noise that falls, by a generator of the user's, added in hooks of parameters")
def noise_in_hooks(place):
    engine = wrapped(place)
    draw, scale = torch.Generator().manual_seed(3), [0.1]
    for p in engine.module.parameters():
        p.register_hook(lambda g: g + scale[0] * torch.ones_like(g) * torch.rand(1, generator=draw))
    found = []
    for step in range(3):
        scale[0] = 0.1 / (1 + step)
        found.append(update(engine, engine(batch(step)).square().mean()))
    return found, values(engine.module)


@same_bits("stochastic weight averaging from the third step on, its rate, `update_bn`, and a cycle")
def averaging_from_the_third(place):
    class Normed(Seeded):
        def __init__(self):
            super().__init__()
            self.insert(1, nn.BatchNorm1d(WIDTH))

    engine = wrapped(place, Normed())
    average = swa_utils.AveragedModel(engine.module)
    cosine = lr_scheduler.CosineAnnealingLR(engine.optimizer, 3)
    constant = swa_utils.SWALR(engine.optimizer, 0.02, anneal_epochs=2)
    found = []
    for step in range(6):
        found.append(update(engine, engine(batch(step)).square().mean()))
        if step < 3:
            cosine.step()
        else:
            average.update_parameters(engine.module)
            constant.step()
    swa_utils.update_bn([batch(20), batch(21)], average)
    return found, values(average), constant.get_last_lr()


@same_bits("population based training: three engines, the worst takes weights and states of the best, its rate moves")
def population(place):
    engines = [wrapped(place, Seeded(blocks=1, seed=seed), lr=0.02 * (seed + 1)) for seed in range(3)]
    found = []
    for step in range(4):
        losses = [update(e, e(batch(step)).square().mean()) for e in engines]
        found.append(losses)
        best, worst = engines[losses.index(min(losses))], engines[losses.index(max(losses))]
        worst.module.load_state_dict(best.module.state_dict())
        rate = best.optimizer.param_groups[0]["lr"]
        worst.optimizer.load_state_dict(copy.deepcopy(best.optimizer.state_dict()))
        worst.optimizer.param_groups[0]["lr"] = rate * (1.2 if step % 2 else 0.8)
    return found, [values(e.module) for e in engines]


@same_bits(
    "an evolution of perturbations: antithetic pairs by in-place noise, the update as `p.grad`, no backward at all"
)
def evolution_of_pairs(place):
    engine = wrapped(place)
    found = []

    def move(seed, scale):
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p in engine.module.parameters():
                p.add_(torch.randn(p.shape, generator=draw), alpha=scale)

    for step in range(2):
        pairs = []
        for seed in range(2):
            scores = []
            for scale in (0.01, -0.02, 0.01):
                move(10 * step + seed, scale)
                with torch.no_grad():
                    scores.append(engine(batch(step)).square().mean().item())
            pairs.append(scores[0] - scores[1])
        for p in engine.module.parameters():
            p.grad = torch.zeros(p.shape)
        for seed, gain in enumerate(pairs):
            draw = torch.Generator().manual_seed(10 * step + seed)
            for p in engine.module.parameters():
                p.grad.add_(torch.randn(p.shape, generator=draw), alpha=gain)
        engine.optimizer.step()
        found.append(pairs)
    return found, values(engine.module)


@same_bits("simulated annealing: a step is taken back if the loss has grown and a draw says so")
def annealing(place):
    engine = wrapped(place)
    found, last = [], math.inf
    for step in range(5):
        kept = copy.deepcopy([engine.module.state_dict(), engine.optimizer.state_dict()])
        now = update(engine, engine(batch(step)).square().mean())
        if now > last:
            engine.module.load_state_dict(kept[0])
            engine.optimizer.load_state_dict(kept[1])
        last = now
        found.append(now)
    return found, values(engine.module)


@same_bits("Bayesian by dropout in evaluation, and SWAG: mean and squares of weights, samples loaded for judging")
def swag(place):
    engine = wrapped(place)
    mean = [torch.zeros(p.shape) for p in engine.module.parameters()]
    square = [torch.zeros(p.shape) for p in engine.module.parameters()]
    found = []
    for step in range(4):
        found.append(update(engine, engine(batch(step)).square().mean()))
        for p, m, s in zip(engine.module.parameters(), mean, square, strict=True):
            m.add_(p.detach(), alpha=0.25)
            s.addcmul_(p.detach(), p.detach(), value=0.25)
    kept = [p.detach().clone() for p in engine.module.parameters()]
    for seed in range(2):
        draw = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for p, m, s in zip(engine.module.parameters(), mean, square, strict=True):
                p.copy_(m + (s - m * m).clamp(min=0).sqrt() * torch.randn(p.shape, generator=draw))
            found.append(engine(batch(9)))
    with torch.no_grad():
        for p, value in zip(engine.module.parameters(), kept, strict=True):
            p.copy_(value)
    return found, [update(engine, engine(batch(5)).square().mean())], values(engine.module)
