"""Training loops as papers and their code write them: who is trained when, from what, and what is put back. The
optimizer is torch's own arithmetic, so that bits are compared."""

from __future__ import annotations

import collections
import copy
import math
import random
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.optim import lr_scheduler, swa_utils

from misuses.case import Family
from misuses.place import gradients, values
from misuses.strangers import WIDTH, Block, Exact, Net, batch, trained

family = Family("training loops")

SGD: dict[str, Any] = {"optimizer": Exact, "lr": 0.05, "optimizer_options": {"momentum": 0.9}}


def same_bits(title, **options):
    return family.works(title, rtol=0.0, atol=0.0, **options)


def wrapped(place, model=None, **options):
    """The engine and its model."""
    engine = place.wrap(Net() if model is None else model, **{**SGD, **options})
    return engine, engine.module


def frozen(model, is_frozen):
    for parameter in model.parameters():
        parameter.requires_grad_(not is_frozen)


class Seeded(nn.Sequential):
    """Some blocks and a layer to ``outputs``."""

    def __init__(self, outputs=WIDTH, blocks=3, seed=0):
        torch.manual_seed(seed)
        super().__init__(*[Block() for _ in range(blocks)], nn.Linear(WIDTH, outputs))


# Several players.


@same_bits("a GAN in one model and one engine: each player is frozen while the other learns")
def gan_in_one_engine(place):
    model = nn.ModuleDict({"maker": Seeded(), "critic": Seeded(1, seed=1)})
    engine, model = wrapped(place, model)
    found = []
    for step in range(3):
        for player, other in (("critic", "maker"), ("maker", "critic")):
            frozen(model[other], True)
            frozen(model[player], False)
            made = model["critic"](model["maker"](batch(step)))
            loss = F.softplus(-made).mean()
            if player == "critic":
                loss = F.softplus(made).mean() + F.softplus(-model["critic"](batch(step + 50))).mean()
            engine.optimizer.zero_grad()
            loss.backward()
            found += [loss.item(), gradients(model)]
            engine.optimizer.step()
    return found, values(model)


@same_bits("WGAN: two engines, weights of the critic are clipped, three steps of it for one of the other")
def wgan(place):
    maker, critic = wrapped(place, Seeded())[0], wrapped(place, Seeded(1, seed=1))[0]
    found = []
    for step in range(5):
        loss = critic(maker(batch(step)).detach()).mean() - critic(batch(step + 50)).mean()
        critic.optimizer.zero_grad()
        loss.backward()
        critic.optimizer.step()
        for p in critic.module.parameters():
            p.data.clamp_(-0.1, 0.1)
        if step % 2 == 0:
            maker.optimizer.zero_grad()
            loss = -critic(maker(batch(step))).mean()
            loss.backward()
            maker.optimizer.step()
        found.append(loss.item())
    return found, values(maker.module), values(critic.module)


@family.said("a GAN whose critic gets more gradients by the maker's backward, and they are read", "no zero_grad")
def gan_of_two_backwards(place):
    maker, critic = wrapped(place, Seeded())[0], wrapped(place, Seeded(1, seed=1))[0]
    found = []
    for step in range(3):
        critic.module.zero_grad()
        F.softplus(-critic(batch(step + 50))).mean().backward()
        made = maker(batch(step))
        F.softplus(critic(made.detach())).mean().backward()
        critic.optimizer.step()
        maker.module.zero_grad()
        F.softplus(-critic(made)).mean().backward()
        found.append([g for g in gradients(critic.module).values() if g is not None])
        maker.optimizer.step()
    return found, values(maker.module), values(critic.module)


@same_bits("a cycle of two translators in one engine, and the other way round")
def cycle_of_translators(place):
    model = nn.ModuleDict({"there": Seeded(), "back": Seeded(seed=1)})

    def call(model, x):
        there, back = model["there"], model["back"]
        return torch.cat([back(there(x)) - x, there(back(x)) - x, there(x) - x])

    return trained(place, model, call=call)


@same_bits("DQN: the target is a plain copy, and gets `online.state_dict()` every second step")
def dqn(place):
    engine, online = wrapped(place, Seeded(4))
    target = copy.deepcopy(online)
    replay, found, draws = collections.deque(maxlen=4), [], random.Random(1)
    for step in range(5):
        with torch.no_grad():
            action = online(batch(step)).argmax(1)
        replay.append((batch(step), action, batch(step + 1), torch.linspace(0, 1, 4)))
        x, action, after, reward = draws.choice(replay)
        with torch.no_grad():
            aim = reward + 0.9 * target(after).max(1).values
        loss = F.smooth_l1_loss(engine(x).gather(1, action[:, None]).squeeze(1), aim)
        engine.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_value_(online.parameters(), 0.01)
        engine.optimizer.step()
        if step % 2:
            target.load_state_dict(online.state_dict())
        found += [loss.item(), action]
    return found, values(online), values(target)


@same_bits("double DQN: the target is in an engine without an optimizer, and gets the other's state dict")
def double_dqn(place):
    engine, online = wrapped(place, Seeded(4))
    target = Seeded(4)
    target.load_state_dict(online.state_dict())
    target.requires_grad_(False)
    if place.has_engine:
        target = place.wrap(target, optimizer=None).module
    found = []
    for step in range(4):
        with torch.no_grad():
            best = online(batch(step + 1)).argmax(1, keepdim=True)
            aim = 0.1 + 0.9 * target(batch(step + 1)).gather(1, best)
        loss = (engine(batch(step)).max(1, keepdim=True).values - aim).square().mean()
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        if step % 2:
            target.load_state_dict(online.state_dict())
        found.append(loss.item())
    return found, values(target)


@same_bits("a target by `torch._foreach_lerp_` over both lists of parameters, both of them in engines")
def target_by_foreach(place):
    engine, online = wrapped(place, Seeded(4))
    target = copy.deepcopy(online).requires_grad_(False)
    if place.has_engine:
        target = place.wrap(target, optimizer=None).module
    for step in range(3):
        engine.optimizer.zero_grad()
        (engine(batch(step)) - 0.9 * target(batch(step + 1))).square().mean().backward()
        engine.optimizer.step()
        with torch.no_grad():
            torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), 0.1)
    return values(online), values(target)


@same_bits("soft actor-critic: three engines, the actor learns through frozen critics, a temperature by a plain Adam")
def soft_actor_critic(place):
    actor = wrapped(place, Seeded(2 * 4))[0]
    critics = [wrapped(place, Seeded(1, seed=seed))[0] for seed in (1, 2)]
    targets = [copy.deepcopy(critic.module) for critic in critics]
    log_alpha = torch.zeros((), requires_grad=True)
    own, found, noise = torch.optim.SGD([log_alpha], 0.1), [], torch.Generator().manual_seed(3)

    def act(x):
        mean, log_std = actor(x).chunk(2, 1)
        drawn = mean + log_std.clamp(-2, 1).exp() * torch.randn(mean.shape, generator=noise)
        return torch.tanh(drawn), (-drawn.square()).sum(1)

    def joined(x, action):
        return torch.cat([x[:, 4:], action], 1)

    for step in range(3):
        with torch.no_grad():
            action, entropy = act(batch(step + 1))
            after = torch.min(*[target(joined(batch(step + 1), action)) for target in targets])
            aim = 0.1 + 0.9 * (after.squeeze(1) - log_alpha.exp() * entropy)
        for critic in critics:
            critic.optimizer.zero_grad()
            (critic(batch(step)).squeeze(1) - aim).square().mean().backward()
            critic.optimizer.step()
        for critic in critics:
            frozen(critic.module, True)
        action, entropy = act(batch(step))
        worth = torch.min(*[critic(joined(batch(step), action)) for critic in critics])
        loss = (log_alpha.exp().detach() * entropy - worth.squeeze(1)).mean()
        actor.optimizer.zero_grad()
        loss.backward()
        actor.optimizer.step()
        for critic in critics:
            frozen(critic.module, False)
        own.zero_grad()
        (-log_alpha * (entropy.detach() - 4)).mean().backward()
        own.step()
        with torch.no_grad():
            for critic, target in zip(critics, targets, strict=True):
                for p, t in zip(critic.module.parameters(), target.parameters(), strict=True):
                    t.mul_(0.9).add_(p, alpha=0.1)
        found.append(loss.item())
    return found, values(actor.module), [values(critic.module) for critic in critics], [values(t) for t in targets]


class ActorCritic(nn.Module):
    """A trunk with two heads, and a recurrent state."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.trunk = nn.Sequential(Block(), Block(), Block())
        self.cell = nn.GRUCell(WIDTH, WIDTH)
        self.policy, self.value = nn.Linear(WIDTH, 4), nn.Linear(WIDTH, 1)

    def forward(self, x, state=None):
        state = self.cell(self.trunk(x), state)
        return self.policy(state), self.value(state).squeeze(-1), state


@same_bits("A2C with a recurrent policy: a rollout is one graph, one episode is cut in it")
def recurrent_actor_critic(place):
    engine, model = wrapped(place, ActorCritic())
    found, state = [], None
    for update in range(3):
        terms = []
        for step in range(3):
            logits, value, state = engine(batch(3 * update + step), state)
            chosen = logits.log_softmax(1)[:, step]
            advantage = (1.0 + 0.1 * step - value).detach()
            entropy = -(logits.softmax(1) * logits.log_softmax(1)).sum(1)
            terms.append((-chosen * advantage + 0.5 * (1.0 - value).square() - 0.01 * entropy).mean())
            state = state * torch.tensor([1.0, 1.0, float(step != 1), 1.0])[:, None]
        engine.optimizer.zero_grad()
        torch.stack(terms).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        engine.optimizer.step()
        state = state.detach()
        found += [torch.stack(terms).detach(), round(norm.item(), 3)]
    return found, values(model)


@same_bits("ANIL: the head alone is adapted in an inner loop, by `autograd.grad`; the body learns from the adapted one")
def anil(place):
    engine, model = wrapped(place)
    for step in range(3):
        engine.optimizer.zero_grad()
        for task in range(2):
            fast = {"weight": model.last.weight, "bias": model.last.bias}
            hidden = batch(step + 10 * task)
            for block in model.blocks:
                hidden = block(hidden)
            for _ in range(2):
                loss = functional_call(model.last, fast, (hidden,)).square().mean()
                slopes = torch.autograd.grad(loss, list(fast.values()), retain_graph=True)
                fast = {name: fast[name] - 0.1 * slope for name, slope in zip(fast, slopes, strict=True)}
            functional_call(model.last, fast, (hidden,)).abs().mean().backward()
        engine.optimizer.step()
    return values(model)


@same_bits("first-order MAML: a plain copy is trained, and its gradients become the model's")
def first_order_maml(place):
    engine, model = wrapped(place)
    for step in range(2):
        engine.optimizer.zero_grad()
        for task in range(2):
            learner = copy.deepcopy(model)
            inner = torch.optim.SGD(learner.parameters(), 0.1)
            for _ in range(2):
                inner.zero_grad()
                learner(batch(step + 10 * task)).square().mean().backward()
                inner.step()
            slopes = torch.autograd.grad(learner(batch(step + 90)).abs().mean(), list(learner.parameters()))
            for p, slope in zip(model.parameters(), slopes, strict=True):
                p.grad = slope if p.grad is None else p.grad + slope
        engine.optimizer.step()
    return values(model)


# Teachers.


@same_bits("distillation: teacher and student are in engines, hints by forward hooks of both")
def hints_of_a_teacher(place):
    student, teacher = wrapped(place)[0], place.wrap(Net(), **SGD)
    seen: dict[str, list[torch.Tensor]] = {"student": [], "teacher": []}
    for name, engine in (("student", student), ("teacher", teacher)):
        for block in engine.module.blocks:
            block.register_forward_hook(lambda block, inputs, output, name=name: seen[name].append(output))
    found = []
    for step in range(3):
        for hints in seen.values():
            hints.clear()
        with torch.no_grad():
            soft = (teacher(batch(step + 1)) / 2).softmax(1)
        loss = F.kl_div((student(batch(step)) / 2).log_softmax(1), soft, reduction="batchmean")
        loss = loss + sum(F.mse_loss(a, b) for a, b in zip(seen["student"], seen["teacher"], strict=True))
        student.optimizer.zero_grad()
        loss.backward()
        student.optimizer.step()
        found.append(loss.item())
    return found, values(student.module), values(teacher.module)


@same_bits("deep mutual learning: two engines teach each other, with one backward of the sum")
def mutual_learning(place):
    engines = [wrapped(place, Seeded(8, seed=seed))[0] for seed in (0, 1)]
    found = []
    for step in range(3):
        first, second = (engine(batch(step)).log_softmax(1) for engine in engines)
        loss = F.kl_div(first, second.detach(), log_target=True) + F.kl_div(second, first.detach(), log_target=True)
        loss = loss - first[:, 0].mean() - second[:, 1].mean()
        for engine in engines:
            engine.optimizer.zero_grad()
        loss.backward()
        for engine in engines:
            engine.optimizer.step()
        found.append(loss.item())
    return found, [values(engine.module) for engine in engines]


@same_bits("born again: the student of one generation teaches the next, which begins anew by `reset_parameters`")
def born_again(place):
    engine, model = wrapped(place)
    found, teacher = [], None
    for generation in range(3):
        torch.manual_seed(generation)
        model.apply(lambda module: module.reset_parameters() if isinstance(module, nn.Linear) else None)
        engine.optimizer.state.clear()
        for step in range(2):
            loss = engine(batch(step)).square().mean()
            if teacher is not None:
                with torch.no_grad():
                    aim = functional_call(model, teacher, (batch(step),))
                loss = loss + F.mse_loss(engine(batch(step)), aim)
            engine.optimizer.zero_grad()
            loss.backward()
            engine.optimizer.step()
            found.append(loss.item())
        teacher = {name: p.detach().clone() for name, p in model.named_parameters()}
    return found, values(model)


@same_bits("pseudo labels: eval mode for the labels, train mode with dropout for the step")
def pseudo_labels(place):
    torch.manual_seed(0)
    net = nn.Sequential(Block(), nn.Dropout(0.3), Block(), nn.Dropout(0.3), Block(), nn.Linear(WIDTH, 5))
    engine, model = wrapped(place, net)
    found = []
    for step in range(4):
        model.eval()
        with torch.no_grad():
            soft = model(batch(step)).softmax(1)
        sure, label = soft.max(1)
        model.train()
        torch.manual_seed(step)
        loss = (F.cross_entropy(model(batch(step) + 0.1), label, reduction="none") * (sure > 0.2)).mean()
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        found += [loss.item(), label]
    return found, values(model)


@same_bits("DINO: students of several crops, a centre in a buffer, gradients of the last layer dropped at first")
def dino(place):
    engine, student = wrapped(place)
    teacher, centre, found = copy.deepcopy(student).requires_grad_(False), torch.zeros(1, WIDTH), []
    for step in range(4):
        with torch.no_grad():
            soft = [((teacher(batch(10 * step + crop)) - centre) / 0.1).softmax(1) for crop in range(2)]
        hard = [student(batch(10 * step + crop)).log_softmax(1) for crop in range(3)]
        pairs = [-(s * h).sum(1).mean() for i, s in enumerate(soft) for j, h in enumerate(hard) if i != j]
        engine.optimizer.zero_grad()
        torch.stack(pairs).mean().backward()
        if step < 2:
            for name, p in student.named_parameters():
                if "last" in name:
                    p.grad = None
        engine.optimizer.step()
        with torch.no_grad():
            centre = 0.9 * centre + 0.1 * torch.cat(soft).mean(0, keepdim=True)
            for p, t in zip(student.parameters(), teacher.parameters(), strict=True):
                t.data.mul_(0.9).add_(0.1 * p.detach().data)
        found.append(torch.stack(pairs).detach())
    return found, values(student), values(teacher)


@same_bits("MoCo: the key encoder is in a second engine, moved by `k.data = k.data * m + q.data * (1 - m)`")
def momentum_encoder_in_an_engine(place):
    engine, query = wrapped(place)
    key = copy.deepcopy(query).requires_grad_(False)
    if place.has_engine:
        key = place.wrap(key, optimizer=None).module
    queue, found = F.normalize(batch(77, 8), dim=1), []
    for step in range(3):
        with torch.no_grad():
            for q, k in zip(query.parameters(), key.parameters(), strict=True):
                k.data = k.data * 0.9 + q.data * (1.0 - 0.9)
            keys = F.normalize(key(batch(step + 1)), dim=1)
        queries = F.normalize(engine(batch(step)), dim=1)
        logits = torch.cat([(queries * keys).sum(1, keepdim=True), queries @ queue.t()], 1) / 0.1
        loss = F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        queue = torch.cat([keys, queue])[:8]
        found.append(loss.item())
    return found, values(query), values(key)


class Towers(nn.Module):
    def __init__(self):
        super().__init__()
        self.image, self.text = Seeded(16), Seeded(16, seed=1)
        self.logit_scale = nn.Parameter(torch.tensor(math.log(1 / 0.07)))

    def forward(self, image, text):
        image, text = F.normalize(self.image(image), dim=-1), F.normalize(self.text(text), dim=-1)
        return self.logit_scale.exp() * image @ text.t()


@same_bits("CLIP: two towers, a scale that is a parameter of no dimension and is clamped after each step")
def clip_of_two_towers(place):
    engine, model = wrapped(place, Towers())
    found, labels = [], torch.arange(4)
    for step in range(3):
        logits = engine(batch(step), batch(step + 50))
        loss = (F.cross_entropy(logits, labels) + F.cross_entropy(logits.t(), labels)) / 2
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(14))
        found += [loss.item(), model.logit_scale.item()]
    return found, values(model)


@same_bits("GradCache: representations without gradients, their gradients, then the forward again with dropout as then")
def grad_cache(place):
    torch.manual_seed(0)
    net = nn.Sequential(Block(), nn.Dropout(0.2), Block(), nn.Dropout(0.2), nn.Linear(WIDTH, 8))
    engine, model = wrapped(place, net)
    found = []
    for step in range(2):
        states, kept = [], []
        for chunk in range(3):
            states.append(torch.get_rng_state())
            with torch.no_grad():
                kept.append(model(batch(3 * step + chunk)))
        joined = torch.cat(kept).requires_grad_()
        loss = F.cross_entropy(joined @ joined.t(), torch.arange(12))
        loss.backward()
        engine.optimizer.zero_grad()
        for chunk, slope in enumerate(joined.grad.split(4)):
            torch.set_rng_state(states[chunk])
            (model(batch(3 * step + chunk)) * slope).sum().backward()
        engine.optimizer.step()
        found.append(loss.item())
    return found, values(model)


# Averages.


@same_bits("`AveragedModel(use_buffers=True)` with an `avg_fn` of the user's, over BatchNorm")
def averaged_with_buffers(place):
    torch.manual_seed(0)
    net = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block(), nn.BatchNorm1d(WIDTH), Block())
    engine, model = wrapped(place, net)
    average = swa_utils.AveragedModel(model, avg_fn=lambda old, new, count: 0.7 * old + 0.3 * new, use_buffers=True)
    for step in range(3):
        engine.optimizer.zero_grad()
        engine(batch(step)).square().mean().backward()
        engine.optimizer.step()
        average.update_parameters(model)
    average.eval()
    return average(batch(9)), values(average), values(model)


@same_bits("`swa_utils.AveragedModel` of an average is deep-copied for an evaluation, and `update_bn` is called on it")
def average_of_a_copy(place):
    torch.manual_seed(0)
    engine, model = wrapped(place, nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), Block(), Block()))
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_swa_multi_avg_fn())
    found = []
    for step in range(3):
        engine.optimizer.zero_grad()
        engine(batch(step)).square().mean().backward()
        engine.optimizer.step()
        average.update_parameters(model)
        look = copy.deepcopy(average)
        swa_utils.update_bn([batch(20), batch(21)], look)
        found.append(look.eval()(batch(9)))
    return found, average.n_averaged, values(average)


@same_bits("an average as a parametrized call: `functional_call(model, averages)` judges each step")
def average_by_functional_call(place):
    engine, model = wrapped(place)
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = []
    for step in range(3):
        with torch.no_grad():
            aim = functional_call(model, averages, (batch(step),))
        engine.optimizer.zero_grad()
        F.mse_loss(engine(batch(step)), aim + 1).backward()
        engine.optimizer.step()
        for name, p in model.named_parameters():
            averages[name].lerp_(p.detach(), 0.2)
        found.append(aim)
    return found, values(model)


@same_bits("a snapshot ensemble: state dicts at the end of cycles, whose predictions are averaged by a second model")
def snapshot_ensemble(place):
    engine, model = wrapped(place)
    schedule = lr_scheduler.CosineAnnealingWarmRestarts(engine.optimizer, 2)
    snapshots, other = [], Net()
    for step in range(6):
        engine.optimizer.zero_grad()
        engine(batch(step)).square().mean().backward()
        engine.optimizer.step()
        schedule.step(step + 0.5)
        if step % 2:
            snapshots.append(copy.deepcopy(model.state_dict()))
    found = []
    for snapshot in snapshots:
        other.load_state_dict(snapshot)
        with torch.no_grad():
            found.append(other(batch(9)))
    return found, values(model)


# Starting anew and going back.


@same_bits("early stopping: `copy.deepcopy(model.state_dict())` of the best epoch comes back, and training goes on")
def early_stopping(place):
    engine, model = wrapped(place, lr=0.3)
    best, least, waited, found = None, math.inf, 0, []
    for step in range(8):
        loss = engine(batch(step)).square().mean()
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        model.eval()
        with torch.no_grad():
            score = model(batch(9)).abs().mean().item()
        model.train()
        found.append(score)
        waited += 1
        if score < least:
            best, least, waited = copy.deepcopy(model.state_dict()), score, 0
        if waited == 2:
            model.load_state_dict(best)
            engine.optimizer.param_groups[0]["lr"] *= 0.1
            waited = 0
    model.load_state_dict(best)
    return found, values(model)


@same_bits("a learning rate finder by hand: rates grow, then model and optimizer get their first state dicts again")
def rate_finder(place):
    engine, model = wrapped(place)
    first = copy.deepcopy((model.state_dict(), engine.optimizer.state_dict()))
    found = []
    for step in range(4):
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-3 * 4**step
        loss = engine(batch(step)).square().mean()
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        found.append(loss.item())
    model.load_state_dict(first[0])
    engine.optimizer.load_state_dict(first[1])
    for step in range(2):
        engine.optimizer.zero_grad()
        engine(batch(step)).square().mean().backward()
        engine.optimizer.step()
    return found, engine.optimizer.param_groups[0]["lr"], values(model)


@same_bits("warm restarts that forget the momentum: `optimizer.state = collections.defaultdict(dict)`")
def restarts_without_momentum(place):
    engine, model = wrapped(place)
    schedule = lr_scheduler.CosineAnnealingWarmRestarts(engine.optimizer, 2, T_mult=2)
    for step in range(6):
        if schedule.T_cur == 0:
            engine.optimizer.state = collections.defaultdict(dict)
        engine.optimizer.zero_grad()
        engine(batch(step)).square().mean().backward()
        engine.optimizer.step()
        schedule.step()
    return values(model)


@same_bits("folds in one engine: first values and first optimizer state are loaded again for each")
def folds_in_one_engine(place):
    engine, model = wrapped(place)
    first = copy.deepcopy((model.state_dict(), engine.optimizer.state_dict()))
    found = []
    for fold in range(3):
        model.load_state_dict(first[0])
        engine.optimizer.load_state_dict(first[1])
        for step in range(3):
            if step != fold:
                engine.optimizer.zero_grad()
                engine(batch(step)).square().mean().backward()
                engine.optimizer.step()
        with torch.no_grad():
            found += [model(batch(fold)), values(model)]
    return found


@same_bits("shrink and perturb between epochs: `p.mul_(0.5).add_(noise)` with a generator of the user's")
def shrink_and_perturb(place):
    noise = torch.Generator().manual_seed(4)

    def after(model, step):
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(0.5).add_(torch.randn(p.shape, generator=noise), alpha=0.01)

    return trained(place, Net(), after=after)


@same_bits("dead units are drawn anew: rows of weights and of the momentum, by their activations")
def dead_units(place):
    engine, model = wrapped(place)
    for step in range(4):
        x = batch(step)
        engine.optimizer.zero_grad()
        engine(x).square().mean().backward()
        engine.optimizer.step()
        if step != 1:
            continue
        with torch.no_grad():
            for block in model.blocks:
                dead = block.up(x).abs().mean(0).argsort()[:4]
                block.up.weight[dead] = 0.01
                block.up.bias.index_fill_(0, dead, 0.0)
                block.down.weight[:, dead] = 0.0
                engine.optimizer.state[block.up.weight]["momentum_buffer"][dead] = 0.0
    return values(model)


@same_bits("a line search: a step is taken, judged, and taken back by the weights of before")
def line_search(place):
    engine, model = wrapped(place)
    found = []
    for step in range(3):
        engine.optimizer.zero_grad()
        loss = engine(batch(step)).square().mean()
        loss.backward()
        slopes = gradients(model)
        before = [p.detach().clone() for p in model.parameters()]
        rate = 1.0
        for _ in range(4):
            with torch.no_grad():
                for p, value, slope in zip(model.parameters(), before, slopes.values(), strict=True):
                    p.copy_(value - rate * slope)
                if model(batch(step)).square().mean() < loss:
                    break
            rate *= 0.5
        found.append(rate)
    return found, values(model)


@same_bits("hypergradient descent: the rate moves by the product of this gradient and the last one")
def hypergradient(place):
    engine, model = wrapped(place, optimizer_options={})
    last, rates = None, []
    for step in range(4):
        engine.optimizer.zero_grad()
        engine(batch(step)).square().mean().backward()
        now = torch.cat([p.grad.flatten() for p in model.parameters()])
        if last is not None:
            engine.optimizer.param_groups[0]["lr"] += 1e-3 * torch.dot(now, last).item()
        last = now
        rates.append(engine.optimizer.param_groups[0]["lr"])
        engine.optimizer.step()
    return rates, values(model)


# Accumulation and losses.


@same_bits("the number of micro-batches grows with the step, and each loss is divided by it")
def growing_accumulation(place):
    engine, model = wrapped(place)
    found, index = [], 0
    for count in (1, 3, 2, 4):
        engine.optimizer.zero_grad()
        for _ in range(count):
            loss = engine(batch(index)).square().mean() / count
            loss.backward()
            found.append(loss.item())
            index += 1
        engine.optimizer.step()
    return found, values(model)


@same_bits("sums of losses over tokens: gradients are divided by the number of tokens after the last micro-batch")
def divided_by_tokens(place):
    engine, model = wrapped(place)
    for step in range(3):
        engine.optimizer.zero_grad()
        tokens = 0
        for rows in (2, 5, 1):
            engine(batch(step, rows)).square().sum().backward()
            tokens += rows
        torch._foreach_div_([p.grad for p in model.parameters()], tokens)
        engine.optimizer.step()
    return values(model)


@same_bits("a batch gives no loss, another one is skipped after its backward, steps go on")
def batches_without_a_loss(place):
    engine, model = wrapped(place)
    found = []
    for step in range(6):
        output = engine(batch(step))
        loss = None if step % 3 == 1 else output.square().mean()
        if loss is None:
            found.append(None)
            continue
        loss.backward()
        if step == 3:
            engine.optimizer.zero_grad()
            continue
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        found.append(loss.item())
    return found, values(model)


@same_bits("three heads on one trunk, three backwards with `retain_graph`, a head is left out in some steps")
def heads_in_turn(place):
    class Heads(Net):
        def __init__(self):
            super().__init__()
            self.heads = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(3))

        def forward(self, x):
            hidden = super().forward(x)
            return [head(hidden) for head in self.heads]

    engine, model = wrapped(place, Heads())
    found = []
    for step in range(4):
        engine.optimizer.zero_grad()
        outputs = engine(batch(step))
        chosen = [0, 1, 2] if step % 2 == 0 else [0, 2]
        for index in chosen:
            outputs[index].square().mean().backward(retain_graph=index != chosen[-1])
        found.append({name: g is not None for name, g in gradients(model).items()})
        engine.optimizer.step()
    return found, values(model)


@same_bits("the trunk's output is detached, each head goes backward alone, the trunk last by `backward(feature.grad)`")
def detached_trunk(place):
    engine, model = wrapped(place)
    for step in range(3):
        engine.optimizer.zero_grad()
        hidden = model.first(batch(step))
        for block in model.blocks[:3]:
            hidden = block(hidden)
        feature = hidden.detach().requires_grad_()
        for block in model.blocks[3:]:
            model.last(block(feature)).square().mean().backward()
        hidden.backward(feature.grad)
        engine.optimizer.step()
    return values(model)


@same_bits("a loss of a sum over examples, each of them a forward of its own, and one backward")
def forward_of_each_example(place):
    def call(model, x):
        return torch.cat([model(row[None]) for row in x])

    return trained(place, Net(), call=call)


@same_bits("forwards run ahead: the next batch's forward comes before this one's backward, and one step for both")
def forwards_ahead(place):
    engine, model = wrapped(place)
    for step in range(3):
        engine.optimizer.zero_grad()
        waiting = engine(batch(2 * step)).square().mean()
        then = engine(batch(2 * step + 1)).square().mean()
        with torch.no_grad():
            model(batch(99))
        waiting.backward()
        then.backward()
        engine.optimizer.step()
    return values(model)


@same_bits("static loss scale by hand: `(loss * 1024).backward()`, then `p.grad.div_(1024)` of what is finite")
def static_scale(place):
    engine, model = wrapped(place)
    skipped = []
    for step in range(4):
        engine.optimizer.zero_grad()
        loss = engine(batch(step)).square().mean() * 1024
        (loss * math.inf if step == 2 else loss).backward()
        bad = any(not torch.isfinite(p.grad).all() for p in model.parameters())
        skipped.append(bad)
        if bad:
            continue
        for p in model.parameters():
            p.grad.div_(1024)
        engine.optimizer.step()
    return skipped, values(model)


@same_bits("Grokfast: a slow average of gradients is added, `p.grad = p.grad + 2 * average`")
def grokfast(place):
    averages: dict[str, torch.Tensor] = {}

    def between(model, step):
        for name, p in model.named_parameters():
            average = averages.setdefault(name, torch.zeros_like(p.grad))
            average.mul_(0.9).add_(p.grad, alpha=0.1)
            p.grad = p.grad + 2 * average

    return trained(place, Net(), between=between)


@same_bits("uncertainty of tasks: weights of losses are parameters that no module's forward uses")
def weights_of_losses(place):
    net = Net()
    net.log_vars = nn.Parameter(torch.zeros(3))

    def penalty(model):
        hidden = model(batch(7))
        losses = torch.stack([hidden.square().mean(), hidden.abs().mean(), hidden.exp().mean()])
        return (losses * torch.exp(-model.log_vars) + model.log_vars).sum()

    return trained(place, net, penalty=penalty)


@same_bits("curriculum: thawed layer by layer from the top, all in the optimizer from the start")
def thawed_from_the_top(place):
    engine, model = wrapped(place)
    layers = [model.first, *model.blocks, model.last]
    for layer in layers:
        frozen(layer, True)
    found = []
    for layer in reversed(layers):
        frozen(layer, False)
        engine.optimizer.zero_grad()
        engine(batch(len(found))).square().mean().backward()
        found.append([name for name, g in gradients(model).items() if g is not None])
        engine.optimizer.step()
    return found, values(model)


@same_bits("greedy layerwise training: one block after the other with a head of its own, the rest frozen")
def greedy_layers(place):
    engine, model = wrapped(place)
    for index, block in enumerate(model.blocks):
        frozen(model, True)
        frozen(block, False)
        frozen(model.last, False)
        hidden = batch(index)
        for before in model.blocks[: index + 1]:
            hidden = before(hidden)
        engine.optimizer.zero_grad()
        model.last(hidden).square().mean().backward()
        engine.optimizer.step()
    return values(model)


@same_bits("forward-forward: each block has a loss of its own and steps alone, its input detached")
def forward_forward(place):
    engine, model = wrapped(place)
    found = []
    for step in range(2):
        hidden = batch(step)
        for block in model.blocks:
            hidden = block(hidden.detach())
            engine.optimizer.zero_grad()
            loss = F.softplus(hidden.square().mean(1) - 1).mean()
            loss.backward()
            engine.optimizer.step()
            found.append(loss.item())
    return found, values(model)


@same_bits("feedback alignment: a hook replaces the gradient that flows back by a fixed random one")
def feedback_alignment(place):
    matrix = batch(5, WIDTH)

    def call(model, x):
        for block in model.blocks:
            x = block(x)
            x.register_hook(lambda gradient: 0.1 * gradient @ matrix)
        return model.last(x)

    return trained(place, Net(), call=call)


@same_bits("progressive growing: a new engine for a wider model, its weights made of the old one's")
def grown_wider(place):
    engine, model = wrapped(place)
    for step in range(2):
        engine.optimizer.zero_grad()
        engine(batch(step)).square().mean().backward()
        engine.optimizer.step()
    wider = Seeded(2 * WIDTH, blocks=5)
    with torch.no_grad():
        wider[-1].weight[:WIDTH].copy_(model.last.weight)
        wider[-1].weight[WIDTH:] = model.last.weight + 0.01
        for old, new in zip(model.blocks, wider, strict=False):
            new.load_state_dict(old.state_dict())
    engine, wider = wrapped(place, wider)
    for step in range(2):
        engine.optimizer.zero_grad()
        engine(batch(step)).square().mean().backward()
        engine.optimizer.step()
    return values(wider)
