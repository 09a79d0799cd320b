"""Control flow that data decides, loops of one layer, searches and several models in the middle of training: exits,
depths, trees, caches, policies, games and students, at the joints of the engine."""

from __future__ import annotations

import copy
import random

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F

from misuses.case import Family
from misuses.exact import SGD
from misuses.joints import ACCUMULATED, PAIRS, PLAIN, RESUMED, batch, program, stepped
from misuses.place import values
from misuses.second_runs import net
from misuses.strangers import WIDTH, Block, Net

family = Family("programs of control")

ALL = (*ACCUMULATED, *PAIRS[:2])


def trained(run, build=Net, *, steps=3, forward=None, after=None, each=2, **options):
    """Micro-batches of a step, ``each`` of them; losses, gradients and values."""
    engine = run.engine(build(), **options)
    found = []
    for step in range(steps):

        def body(index):
            x = batch(index)
            loss = (engine(x) if forward is None else forward(engine, x, index)).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [each * step + index for index in range(each)], body)
        found.append(stepped(engine))
        if after is not None:
            found.append(after(engine, step))
    return found, values(engine.module)


def through(model, x, blocks):
    y = model.first(x)
    for block in blocks:
        y = block(y)
    return model.last(y)


# What data decides.


@program(family, "the number of blocks is that of a hash of the batch, the order as well", ALL)
def depth_by_hash(run):
    def forward(engine, x, index):
        model = engine.module
        key = int(x[0, 0].abs() * 1e4)
        blocks = [model.blocks[(key + turn * 3) % 5] for turn in range(1 + key % 5)]
        return through(model, x, blocks)

    return trained(run, forward=forward)


@program(family, "rows leave after each block once their norm is small; the rest goes on, and all meet at the end", ALL)
def rows_leave_early(run):
    class Exits(Net):
        def forward(self, x):
            y = self.first(x)
            out = torch.zeros_like(y)
            alive = torch.arange(len(y))
            for block in self.blocks:
                y = block(y)
                stays = y.norm(dim=1) > y.norm(dim=1).median()
                out = out.index_add(0, alive[~stays], y[~stays])
                y, alive = y[stays], alive[stays]
                if not len(alive):
                    break
            return self.last(out.index_add(0, alive, y))

    return trained(run, Exits)


@program(family, "mixture of depths with a capacity, tokens are routed by `topk` and weighted by the router", ALL)
def depths_by_router(run):
    class Routed(Block):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(WIDTH, 1)

        def forward(self, x):
            scores = self.router(x).squeeze(-1)
            chosen = scores.topk(len(x) // 3).indices.sort().values
            y = self.down(torch.tanh(self.up(x[chosen]))) * torch.sigmoid(scores[chosen])[:, None]
            return x.index_add(0, chosen, y)

    return trained(run, net(Routed))


@program(family, "a block is called until its output stands still, twelve times at most", ALL)
def until_it_stands(run):
    class Settles(Block):
        def forward(self, x):
            for _ in range(12):
                y = 0.5 * x + 0.5 * torch.tanh(self.down(torch.tanh(self.up(x))))
                if (y - x).abs().mean() < 0.05:
                    return y
                x = y
            return x

    return trained(run, net(Settles))


@program(family, "a tree of blocks: each calls itself on halves of its rows until they are few", ALL)
def tree_of_calls(run):
    class Tree(Block):
        def forward(self, x):
            y = x + self.down(torch.tanh(self.up(x)))
            if len(x) < 30:
                return y
            half = len(x) // 2 + int(x[0, 0] > 0)
            return torch.cat([self(y[:half]), self(y[half:])])

    return trained(run, net(Tree))


@program(family, "a block raises a signal of its own for an early exit, which the model catches with its tensor", ALL)
def exit_by_exception(run):
    class Enough(Exception):
        pass

    class Stops(Block):
        def forward(self, x):
            y = x + self.down(torch.tanh(self.up(x)))
            if x[0, 0] > 0.5:
                raise Enough(y)
            return y

    class Catches(Net):
        def forward(self, x):
            y = self.first(x)
            try:
                for block in self.blocks:
                    y = block(y)
            except Enough as enough:
                (y,) = enough.args
            return self.last(y)

    return trained(run, lambda: Catches(Stops), each=3)


@program(family, "depth by Python's `random`, width by torch's generator, drawn in the forward", ALL)
def drawn_depth(run):
    class Draws(Block):
        def forward(self, x):
            for _ in range(random.randint(1, 3)):
                width = int(torch.randint(8, WIDTH, ()))
                x = x + F.pad(
                    F.linear(torch.tanh(self.up(x))[:, :width], self.down.weight[:width, :width]), (0, WIDTH - width)
                )
            return x

    random.seed(3)
    return trained(run, net(Draws))


@program(family, "scheduled sampling: half of the rows are fed back from the model's own output, without a graph", ALL)
def fed_back(run):
    def forward(engine, x, index):
        with torch.no_grad():
            own = engine(x)
        mask = (torch.arange(len(x)) * 7 + index) % 2 == 0
        return engine(torch.where(mask[:, None], x, own))

    return trained(run, forward=forward)


@program(family, "a recurrent loop of as many turns as the batch says, over one block, the state goes through", ALL)
def loop_of_one_block(run):
    def forward(engine, x, index):
        model = engine.module
        state = model.first(x)
        for turn in range(2 + index % 4):
            state = model.blocks[turn % 2](state) + 0.1 * x
        return model.last(state)

    return trained(run, forward=forward)


@program(family, "lengths differ from batch to batch: 1, 160, 7 and 300 rows", ALL)
def rows_of_all_numbers(run):
    def forward(engine, x, index):
        return engine(batch(index, (1, 160, 7, 300)[index % 4]))

    return trained(run, forward=forward, each=4)


# Searches and caches.


class Remembers(Block):
    """Keeps what it has seen, for a generation; a training forward does not look at it."""

    def __init__(self):
        super().__init__()
        self.cache = None

    def forward(self, x):
        y = self.up(x)
        if not self.training:
            y = y if self.cache is None else torch.cat([self.cache, y])
            self.cache = y
            y = y.cumsum(0)[-len(x) :] * 0.1
        return x + self.down(torch.tanh(y))


@program(family, "generation with caches in modules after each step, row by row, and training between", RESUMED)
def generation_with_caches(run):
    def after(engine, step):
        model = engine.module.eval()
        rows = [batch(70 + step, 1)]
        with torch.no_grad():
            for _ in range(4):
                rows.append(model(rows[-1]))
        for block in model.blocks:
            block.cache = None
        model.train()
        return torch.cat(rows)

    return trained(run, lambda: Net(Remembers), after=after)


@program(family, "a beam search of width three between micro-batches, whose best path is the next target")
def beam_between(run):
    engine = run.engine()
    found, target = [], torch.zeros(WIDTH)
    for step in range(3):
        for index in range(2):
            loss = (engine(batch(2 * step + index)) - target).square().mean()
            loss.backward()
            found.append(loss.item())
            beams = [(0.0, batch(90 + index, 1))]
            with torch.no_grad():
                for _ in range(3):
                    grown = [
                        (score + float(y[0, k]), y.roll(k, 1))
                        for score, x in beams
                        for y in [engine(x)]
                        for k in range(3)
                    ]
                    beams = sorted(grown, key=lambda each: -each[0])[:3]
            target = beams[0][1][0]
        found.append(stepped(engine))
    return found, values(engine.module)


@program(family, "speculative: two blocks propose, all judge, rows that differ much are trained on alone", ALL)
def proposed_and_judged(run):
    def forward(engine, x, index):
        model = engine.module
        with torch.no_grad():
            proposed = through(model, x, model.blocks[:2])
        judged = engine(x)
        far = (judged.detach() - proposed).norm(dim=1)
        return judged[far >= far.median()]

    return trained(run, forward=forward)


# Several models.


def sgd(model, **options):
    return torch.optim.SGD(model.parameters(), 0.05, 0.9, **options)


@program(
    family, "PPO: the old policy is a copy that gets new weights every step, a reference stays, ratios are clipped"
)
def ppo_of_copies(run):
    engine = run.engine()
    reference, old = copy.deepcopy(engine.module), copy.deepcopy(engine.module)
    found = []
    for step in range(3):
        old.load_state_dict(engine.module.state_dict())
        x = batch(step)
        with torch.no_grad():
            actions = torch.distributions.Normal(old(x), 0.5).sample(())
            before = torch.distributions.Normal(old(x), 0.5).log_prob(actions)
            fixed = torch.distributions.Normal(reference(x), 0.5).log_prob(actions)
        advantage = actions.sin()
        for _ in range(2):
            now = torch.distributions.Normal(engine(x), 0.5).log_prob(actions)
            ratio = (now - before).exp()
            loss = -torch.min(ratio * advantage, ratio.clamp(0.8, 1.2) * advantage).mean() + 0.1 * (now - fixed).mean()
            loss.backward()
            found += [loss.item(), stepped(engine)]
    return found, values(engine.module), values(old)


@program(family, "PPO whose old and reference policies are two more engines, without optimizers of their own")
def ppo_of_engines(run):
    engine, old = run.engine(), run.engine()
    found = []
    for step in range(3):
        old.module.load_state_dict(engine.module.state_dict())
        x = batch(step)
        with torch.no_grad():
            before = old(x)
        for _ in range(2):
            y = engine(x)
            loss = ((y - before).exp().clamp(0.8, 1.2) * x.sin()).mean()
            loss.backward()
            found += [loss.item(), stepped(engine)]
    return found, values(engine.module), values(old.module)


@program(family, "a GAN of two engines: the maker's backward goes through the frozen critic, two critic steps for one")
def gan_of_two_engines(run):
    maker, critic = run.engine(), run.engine()
    found = []
    for step in range(3):
        for turn in range(2):
            fake = maker(batch(10 * step + turn)).detach()
            loss = F.softplus(critic(fake)).mean() + F.softplus(-critic(batch(10 * step + 5 + turn))).mean()
            loss.backward()
            found += [loss.item(), stepped(critic)]
        critic.module.requires_grad_(False)
        loss = F.softplus(-critic(maker(batch(10 * step + 9)))).mean()
        loss.backward()
        critic.module.requires_grad_(True)
        found += [loss.item(), stepped(maker)]
    return found, values(maker.module), values(critic.module)


@program(family, "a GAN with a penalty by differences of inputs (no second derivative), the critic is one engine")
def gan_with_finite_penalty(run):
    critic = run.engine()
    torch.manual_seed(8)
    maker = nn.Linear(WIDTH, WIDTH)
    optimizer = sgd(maker)
    found = []
    for step in range(3):
        real, fake = batch(step), maker(batch(20 + step))
        slope = (critic(real + 0.01) - critic(real)) / 0.01
        loss = critic(fake.detach()).mean() - critic(real).mean() + slope.square().mean()
        loss.backward()
        found += [loss.item(), stepped(critic)]
        (-critic(fake).mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        critic.optimizer.zero_grad()
    return found, values(maker), values(critic.module)


@program(family, "distillation of two engines: hidden states of the teacher by hooks, features matched at three depths")
def features_distilled(run):
    teacher, student = run.engine(), run.engine()
    with torch.no_grad():
        for p in teacher.module.parameters():
            p.mul_(0.9)
    kept = {"teacher": {}, "student": {}}
    for name, engine in (("teacher", teacher), ("student", student)):
        for index in (0, 2, 4):
            engine.module.blocks[index].register_forward_hook(
                lambda module, args, out, name=name, index=index: kept[name].__setitem__(index, out)
            )
    found = []
    for step in range(3):
        x = batch(step)
        with torch.no_grad():
            wanted = teacher(x)
        loss = (student(x) - wanted).square().mean()
        loss = loss + sum((kept["student"][i] - kept["teacher"][i].detach()).square().mean() for i in (0, 2, 4))
        loss.backward()
        found += [loss.item(), stepped(student)]
        for each in kept.values():
            each.clear()
    return found, values(student.module), values(teacher.module)


@program(family, "teacher and student learn together: one backward through both engines, agreement in both directions")
def both_learn(run):
    one, other = run.engine(), run.engine()
    with torch.no_grad():
        for p in other.module.parameters():
            p.mul_(1.1)
    found = []
    for step in range(3):
        a, b = one(batch(step)), other(batch(step + 30))
        loss = (a - b.detach()).square().mean() + (b - a.detach()).square().mean() + (a * b).mean()
        loss.backward()
        found += [loss.item(), stepped(one), stepped(other)]
    return found, values(one.module), values(other.module)


@program(family, "MAML of first order: two inner steps by `functional_call` with gradients of detached weights")
def maml_of_detached(run):
    engine = run.engine()
    model, found = engine.module, []
    for step in range(3):
        fast = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
        for turn in range(2):
            loss = functional_call(model, fast, (batch(10 * step + turn),)).square().mean()
            slopes = torch.autograd.grad(loss, list(fast.values()))
            fast = {
                name: (p - 0.1 * g).detach().requires_grad_() for (name, p), g in zip(fast.items(), slopes, strict=True)
            }
        functional_call(model, fast, (batch(10 * step + 9),)).square().mean().backward()
        for name, p in model.named_parameters():
            p.grad = fast[name].grad
        found.append(stepped(engine))
    return found, values(model)


@program(family, "MAML of second order over the head alone, whose weights are clones")
def second_order_of_head(run):
    engine = run.engine()
    model, found = engine.module, []
    for step in range(3):
        with torch.no_grad():
            h = model.first(batch(step))
            for block in model.blocks:
                h = block(h)
        weight = model.last.weight.detach().clone().requires_grad_()
        inner = F.linear(h, weight).square().mean()
        (slope,) = torch.autograd.grad(inner, weight, create_graph=True)
        outer = (F.linear(h, weight - 0.1 * slope) - 1).square().mean()
        (of_weight,) = torch.autograd.grad(outer, weight)
        engine(batch(step)).square().mean().backward()
        model.last.weight.grad.add_(of_weight)
        found += [outer.item(), stepped(engine)]
    return found, values(model)


@program(
    family,
    "DARTS by differences: weights are moved along a gradient and back, choices have another optimizer",
)
def darts_of_moved_weights(run):
    engine = run.engine()
    model, found = engine.module, []
    choice = nn.Parameter(torch.zeros(5))
    other = torch.optim.Adam([choice], 0.1)

    def loss_of(index):
        y = model.first(batch(index))
        for block, share in zip(model.blocks, choice.softmax(0), strict=True):
            y = y + share * block(y)
        return model.last(y).square().mean()

    for step in range(2):
        loss_of(step).backward()
        slopes = [p.grad.clone() for p in model.parameters()]
        engine.optimizer.zero_grad()
        other.zero_grad()
        sides = []
        for sign in (1.0, -2.0):
            with torch.no_grad():
                for p, g in zip(model.parameters(), slopes, strict=True):
                    p.add_(g, alpha=0.1 * sign)
            sides.append(torch.autograd.grad(loss_of(50 + step), choice)[0])
        with torch.no_grad():
            for p, g in zip(model.parameters(), slopes, strict=True):
                p.add_(g, alpha=0.1)
        choice.grad = (sides[0] - sides[1]) / 0.2
        other.step()
        loss_of(step).backward()
        found += [choice.detach().clone(), stepped(engine)]
    return found, values(model)


@program(family, "an actor and a critic share blocks; the critic's loss stops there every second step", ALL[:3])
def shared_trunk(run):
    def forward(engine, x, index):
        model = engine.module
        h = model.blocks[1](model.blocks[0](model.first(x)))
        actor = model.blocks[2](h)
        critic = model.blocks[4](model.blocks[3](h.detach() if index % 2 else h))
        return model.last(actor) * model.last(critic).mean(1, keepdim=True)

    return trained(run, forward=forward)


@program(family, "a replay of old outputs: what the model gave two steps before is a part of the input", PLAIN)
def replayed_outputs(run):
    kept = [torch.zeros(160, WIDTH)] * 2

    def forward(engine, x, index):
        y = engine(x + 0.1 * kept[-2])
        kept.append(y.detach())
        return y

    return trained(run, forward=forward, each=1, steps=5)


@program(family, "a memory bank in a buffer: rows are written in forward, read by the next forward, `index_copy_`", ALL)
def memory_bank(run):
    class Banks(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("bank", torch.zeros(12, WIDTH))
            self.at = 0

        def forward(self, x):
            y = torch.tanh(self.up(x))
            weights = (y @ self.bank.clone().t()).softmax(1)
            out = x + self.down(y) + 0.1 * weights @ self.bank.clone()
            with torch.no_grad():
                rows = torch.arange(self.at, self.at + 3) % 12
                self.bank.index_copy_(0, rows, y[:3].detach())
                self.at += 3
            return out

    return trained(run, net(Banks))


@program(family, "VQ: the codebook moves by averages in forward, dead codes are drawn anew, straight through", ALL)
def codebook(run):
    class Quantises(Block):
        def __init__(self):
            super().__init__()
            self.register_buffer("codes", torch.randn(8, WIDTH) * 0.3)
            self.register_buffer("uses", torch.ones(8))

        def forward(self, x):
            y = self.up(x)
            index = torch.cdist(y.detach(), self.codes).argmin(1)
            q = self.codes[index]
            if self.training:
                with torch.no_grad():
                    counts = torch.bincount(index, minlength=8).float()
                    sums = torch.zeros_like(self.codes).index_add_(0, index, y.detach())
                    self.uses.lerp_(counts, 0.3)
                    used = counts > 0
                    self.codes[used] = torch.lerp(self.codes[used], sums[used] / counts[used, None], 0.3)
                    dead = self.uses < 0.5
                    self.codes[dead] = y.detach()[torch.randint(len(y), (int(dead.sum()),))]
            return x + self.down(y + (q - y).detach())

    return trained(run, net(Quantises))


@program(
    family,
    "evolution beside gradients: two noisy copies are judged and the better one is taken",
    PLAIN,
)
def evolution_beside(run):
    def after(engine, step):
        if step % 2:
            return None
        state = {name: value.clone() for name, value in engine.module.state_dict().items()}
        scores = []
        for seed in (1, 2):
            draws = torch.Generator().manual_seed(seed)
            with torch.no_grad():
                for p in engine.module.parameters():
                    p.add_(torch.randn(p.shape, generator=draws), alpha=1e-3)
                moved = copy.deepcopy(engine.module.state_dict())
                scores.append((engine(batch(99)).square().mean().item(), moved))
            engine.module.load_state_dict(state)
        best = min(scores, key=lambda each: each[0])
        engine.module.load_state_dict(best[1])
        return [score for score, _ in scores]

    return trained(run, after=after, steps=4)


# Options of the engine beside features of torch.


def twice(place, body):
    """The engine's own way of a computation that PyTorch does not have: the bits of a run in RAM, here too."""
    if not place.has_engine:
        return True
    other = copy.copy(place)
    other.name = "ram"
    other.left = place.left
    torch.manual_seed(0)
    first = body(place)
    torch.manual_seed(0)
    second = body(other)
    flat = [torch.utils._pytree.tree_leaves(each) for each in (first, second)]
    return len(flat[0]) == len(flat[1]) and all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b for a, b in zip(*flat, strict=True)
    )


def adam(place, **options):
    return place.wrap(Net(), optimizer="adamw", **{"lr": 1e-2, "precision": "bf16", **options})


def plain_steps(engine, count=3, first=0, before=None):
    found = []
    for step in range(first, first + count):
        loss = engine(batch(step).bfloat16()).float().square().mean()
        engine.backward(loss)
        if before is not None:
            before(step)
        engine.step()
        found.append(loss.item())
    return found


_ROUNDED = {
    "bf16_weights": {"master_dtype": "bf16"},
    "bf16_moments": {"moments_dtype": "bf16"},
    "int8_moments": {"moments_dtype": "int8"},
    "all_rounded": {"master_dtype": "bf16", "moments_dtype": "bf16"},
}


def _of_rounded(name, options):
    words = name.replace("_", " ")

    def changed(place):
        def body(place):
            engine = adam(place, **options)
            model = engine.module
            found = [plain_steps(engine)]
            with torch.no_grad():
                model.blocks[1].up.weight.mul_(0.9)
                model.blocks[2].down.weight[3:5] = 0
            del engine.optimizer.state[model.first.weight]
            engine.optimizer.param_groups[0]["lr"] = 3e-3
            model.blocks[3].requires_grad_(False)
            found.append(plain_steps(engine, 2, 3, lambda step: model.last.weight.grad.mul_(0.3)))
            model.blocks[3].requires_grad_(True)
            found.append(plain_steps(engine, 2, 5))
            states = [engine.optimizer.state[p]["exp_avg"].float().clone() for p in model.parameters()]
            return found, states, list(values(model).values())

        return twice(place, body)

    changed.__name__ = f"rounded_{name}_changed"
    family.same_bits(f"{words}: weights, states, rates and frozen blocks change between steps; the bits of RAM")(
        changed
    )

    def resumed(place):
        def body(place):
            engine = adam(place, **options)
            found = [plain_steps(engine)]
            kept = copy.deepcopy([engine.module.state_dict(), engine.optimizer.state_dict()])
            found.append(plain_steps(engine, 3, 3))
            engine.module.load_state_dict(kept[0])
            engine.optimizer.load_state_dict(kept[1])
            again = plain_steps(engine, 3, 3)
            return found, again, again == found[-1], list(values(engine.module).values())

        return twice(place, body)

    resumed.__name__ = f"rounded_{name}_rolled_back"
    family.same_bits(f"{words}: a roll back by state dicts of model and optimizer; the bits of RAM")(resumed)


for _name, _options in _ROUNDED.items():
    _of_rounded(_name, _options)


@program(family, "`gradient_accumulation_steps=` with a schedule of the rate and of momentum", PLAIN)
def options_of_engine(run):
    engine = run.engine(gradient_accumulation_steps=2, **SGD)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        engine.optimizer, 0.1, total_steps=8, cycle_momentum=True, base_momentum=0.5, max_momentum=0.9
    )
    found = []
    for index in range(6):
        loss = engine(batch(index)).square().mean()
        engine.backward(loss)
        engine.step()
        if index % 2:
            schedule.step()
        found += [loss.item(), engine.optimizer.param_groups[0]["momentum"]]
    return found, values(engine.module)
