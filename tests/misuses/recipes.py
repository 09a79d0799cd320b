"""Training recipes as their own repositories write them: language models, alignment, diffusion, distillation, contrast,
quantisation, pruning. The optimizer is torch's own arithmetic, so that bits are compared."""

from __future__ import annotations

import copy
import math
from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize
from torch.optim import swa_utils

from misuses.case import Family
from misuses.exact import step, wrapped
from misuses.place import gradients, values
from misuses.strangers import WIDTH, Block, Exact, Net, batch, trained

family = Family("recipes")
same_bits = family.same_bits


# Language models.


class Attention(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)

    def forward(self, x, first=None, cache=None):
        b, t, c = x.shape
        q, k, v = (part.view(b, t, self.heads, -1).transpose(1, 2) for part in self.c_attn(x).chunk(3, -1))
        if first is not None:  # value residual
            v = 0.5 * (v + first)
        if cache is not None:
            if cache:
                k, v = torch.cat([cache["k"], k], 2), torch.cat([cache["v"], v], 2)
            cache["k"], cache["v"] = k, v
        out = F.scaled_dot_product_attention(q, k, v, is_causal=t > 1)
        return self.c_proj(out.transpose(1, 2).reshape(b, t, c)), v


class Layer(nn.Module):
    def __init__(self, width=16):
        super().__init__()
        self.attn = Attention(width)
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(width, 2 * width, bias=False), "c_proj": nn.Linear(2 * width, width, bias=False)}
        )
        self.lambdas = nn.Parameter(torch.tensor([1.0, 0.0]))

    def forward(self, x, x0=None, first=None, cache=None):
        x = self.lambdas[0] * x + self.lambdas[1] * (x if x0 is None else x0)
        out, v = self.attn(F.rms_norm(x, (x.size(-1),)), first, cache)
        x = x + out
        return x + self.mlp["c_proj"](F.relu(self.mlp["c_fc"](F.rms_norm(x, (x.size(-1),)))).square()), v


class GPT(nn.Module):
    def __init__(self, layers=4, width=16, vocab=32):
        super().__init__()
        torch.manual_seed(0)
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(vocab, width), "h": nn.ModuleList(Layer(width) for _ in range(layers))}
        )
        self.lm_head = nn.Linear(width, vocab, bias=False)
        self.skip_weights = nn.Parameter(torch.ones(layers // 2))

    def forward(self, tokens, targets=None, caches=None):
        x = x0 = F.rms_norm(self.transformer["wte"](tokens), (16,))
        first, skips, half = None, [], len(self.transformer["h"]) // 2
        for i, layer in enumerate(self.transformer["h"]):
            if i >= half:
                x = x + self.skip_weights[i - half] * skips.pop()
            x, v = layer(x, x0, first, None if caches is None else caches[i])
            first = v if first is None and caches is None else first
            if i < half:
                skips.append(x)
        logits = 15 * torch.tanh(self.lm_head(x) / 15)
        if targets is None:
            return logits[:, -1:]
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1)


def text(index, rows=2, length=8):
    found = torch.randint(0, 32, (rows, length + 1), generator=torch.Generator().manual_seed(index))
    return found[:, :-1], found[:, 1:]


@same_bits(
    "modded-nanogpt: value residuals from the first layer, skips of a U-net by weights of the model, softcapped logits"
)
def modded_nanogpt(place):
    engine, model = wrapped(place, GPT())
    return [step(engine, engine(*text(index))) for index in range(3)], values(model)


@same_bits(
    "nanoGPT: the head is tied to the embedding after half of the training by assigning its value, then by a hook"
)
def value_tied_late(place):
    engine, model = wrapped(place, GPT())
    found = []
    for index in range(4):
        found.append(step(engine, engine(*text(index))))
        if index >= 1:
            with torch.no_grad():
                mean = (model.lm_head.weight + model.transformer["wte"].weight) / 2
                model.lm_head.weight.copy_(mean)
                model.transformer["wte"].weight.copy_(mean)
    return found, values(model)


@same_bits("accumulation over micro-batches of uneven length, each loss a sum, divided by all tokens before the step")
def uneven_by_tokens(place):
    engine, model = wrapped(place, GPT())
    found = []
    for index in range(3):
        engine.optimizer.zero_grad()
        count = 0
        for i, length in enumerate((8, 3, 5)):
            tokens, targets = text(10 * index + i, length=length)
            targets = targets.masked_fill(targets < 8 * i, -1)
            num = (targets >= 0).sum().item()
            count += num
            (engine(tokens, targets) * num).backward()
        for p in model.parameters():
            p.grad.div_(count)
        found.append(gradients(model))
        engine.optimizer.step()
    return found, values(model)


@same_bits("generation with a cache of keys and values in the middle of accumulation; the cache lives over a step")
def generation_between(place):
    engine, model = wrapped(place, GPT())
    found = []
    caches = [{} for _ in range(4)]
    token = text(99)[0][:, :1]
    for index in range(3):
        engine.optimizer.zero_grad()
        engine(*text(index)).backward()
        model.eval()
        with torch.no_grad():
            for _ in range(2):
                token = model(token, caches=caches).argmax(-1)
                found.append(token)
        model.train()
        engine(*text(index + 10)).backward()
        engine.optimizer.step()
    return found, [c["k"] for c in caches], values(model)


@same_bits(
    "curricula: the length of sequences and the number of layers grow (progressive stacking by `nn.ModuleList` slices)"
)
def progressive_depth(place):
    class Growing(GPT):
        depth = 1

        def forward(self, tokens, targets):
            x = self.transformer["wte"](tokens)
            for layer in self.transformer["h"][: self.depth]:
                x, _ = layer(x)
            return F.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())

    engine, model = wrapped(place, Growing())
    found = []
    for index in range(4):
        model.depth = index + 1
        if index:  # G_stack: the new layer begins as the last one
            model.transformer["h"][index].load_state_dict(model.transformer["h"][index - 1].state_dict())
        found.append(step(engine, engine(*text(index, length=2 * index + 2))))
    return found, values(model)


@same_bits("mixture of depths: half of the tokens pass a layer, chosen by a router, the rest go by")
def mixture_of_depths(place):
    class Routed(GPT):
        def __init__(self):
            super().__init__()
            self.routers = nn.ModuleList(nn.Linear(16, 1) for _ in range(4))

        def forward(self, tokens, targets):
            x = self.transformer["wte"](tokens)
            for router, layer in zip(self.routers, self.transformer["h"], strict=True):
                score = router(x).squeeze(-1)
                top, index = score.topk(tokens.shape[1] // 2)
                index, order = index.sort()
                index = index[..., None].expand(-1, -1, 16)
                out, _ = layer(x.gather(1, index))
                x = x.scatter_add(1, index, out * top.gather(1, order).sigmoid()[..., None])
            return F.cross_entropy(self.lm_head(x).flatten(0, 1), targets.flatten())

    engine, model = wrapped(place, Routed())
    return [step(engine, engine(*text(index))) for index in range(3)], values(model)


@same_bits(
    "multi-token prediction: the trunk is detached, each head goes backward by itself, the trunk once at the end"
)
def multi_token_prediction(place):
    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk = Net()
            self.heads = nn.ModuleList(nn.Linear(WIDTH, 4) for _ in range(3))

    engine, model = wrapped(place, Heads())
    found = []
    for index in range(3):
        engine.optimizer.zero_grad()
        hidden = model.trunk(batch(index))
        leaf = hidden.detach().requires_grad_()
        for number, head in enumerate(model.heads):
            loss = F.cross_entropy(head(leaf), torch.full((4,), number))
            loss.backward()
            found.append(loss.item())
        hidden.backward(leaf.grad)
        found.append(gradients(model))
        engine.optimizer.step()
    return found, values(model)


@same_bits("early exits: all exits are trained with weights; in evaluation the first sure one ends the forward")
def early_exits(place):
    class Exits(Net):
        def __init__(self):
            super().__init__()
            self.exits = nn.ModuleList(nn.Linear(WIDTH, 3) for _ in range(5))

        def forward(self, x):
            x, found = self.first(x), []
            for block, leave in zip(self.blocks, self.exits, strict=True):
                x = block(x)
                found.append(leave(x))
                if not self.training and found[-1].softmax(-1).max() > 0.5:
                    return found[-1]
            return found

    engine, model = wrapped(place, Exits())
    found = []
    for index in range(4):
        outs = engine(batch(index))
        found.append(
            step(engine, sum(F.cross_entropy(o, torch.tensor([0, 1, 2, 0])) / (i + 1) for i, o in enumerate(outs)))
        )
        model.eval()
        with torch.no_grad():
            found.append(model(batch(9, 1)))
        model.train()
    return found, values(model)


@same_bits("adaptive computation: one block is called until a halting probability says stop, with a ponder cost")
def ponder(place):
    class Ponder(Net):
        def __init__(self):
            super().__init__()
            self.halt = nn.Linear(WIDTH, 1)

        def forward(self, x):
            x, left, out, cost = self.first(x), 1.0, 0.0, 0.0
            for count in range(6):
                x = self.blocks[count % 2](x)
                p = self.halt(x).sigmoid().mean()
                out, cost, left = out + left * p * x, cost + left, left * (1 - p)
                if left.item() < 0.2:
                    break
            return self.last(out + left * x), cost

    engine, model = wrapped(place, Ponder())
    found = []
    for index in range(3):
        out, cost = engine(batch(index))
        found.append(step(engine, out.square().mean() + 0.01 * cost))
    return found, values(model)


# Alignment.


def log_probability(model, tokens):
    logits = model(tokens[:, :-1]).log_softmax(-1)
    return logits.gather(-1, tokens[:, 1:, None]).squeeze(-1)


class Full(GPT):
    def forward(self, tokens):
        x = self.transformer["wte"](tokens)
        for layer in self.transformer["h"]:
            x, _ = layer(x)
        return self.lm_head(x)


class LoRALinear(nn.Module):
    def __init__(self, base, rank=2):
        super().__init__()
        self.base = base.requires_grad_(False)
        draw = torch.Generator().manual_seed(base.in_features)
        self.a = nn.Parameter(torch.randn(rank, base.in_features, generator=draw) * 0.1)
        self.b = nn.Parameter(torch.randn(base.out_features, rank, generator=draw) * 0.01)
        self.enabled, self.merged = True, False

    def forward(self, x):
        out = self.base(x)
        return out + x @ self.a.t() @ self.b.t() if self.enabled and not self.merged else out

    @torch.no_grad()
    def merge(self, sign=1):
        self.base.weight.add_(self.b @ self.a, alpha=sign)
        self.merged = sign > 0


def with_lora(model):
    model.requires_grad_(False)
    for layer in model.transformer["h"]:
        layer.attn.c_attn = LoRALinear(layer.attn.c_attn)
        layer.mlp["c_fc"] = LoRALinear(layer.mlp["c_fc"])
    return model


def adapters(model):
    return [m for m in model.modules() if isinstance(m, LoRALinear)]


@same_bits("DPO: the reference is the same model with its adapters switched off, chosen and rejected in one batch")
def dpo_adapters_off(place):
    engine, model = wrapped(place, with_lora(Full()))
    found = []
    for index in range(3):
        tokens = text(index, rows=4)[0]
        with torch.no_grad():
            for each in adapters(model):
                each.enabled = False
            reference = log_probability(model, tokens).sum(-1)
            for each in adapters(model):
                each.enabled = True
        ratio = (log_probability(engine, tokens).sum(-1) - reference).view(2, 2)
        found.append(step(engine, -F.logsigmoid(0.1 * (ratio[0] - ratio[1])).mean()))
    return found, values(model)


@same_bits("LoRA merged by hand into the frozen base for rollouts, unmerged before training, each step")
def lora_merged_for_rollouts(place):
    engine, model = wrapped(place, with_lora(Full()))
    found = []
    for index in range(3):
        for each in adapters(model):
            each.merge()
        with torch.no_grad():
            found.append(model(text(index)[0]))
        for each in adapters(model):
            each.merge(-1)
        found.append(step(engine, log_probability(engine, text(index)[0]).mean()))
    return found, values(model)


@same_bits(
    "PPO: log-probabilities of the rollout, four epochs of minibatches over it, a value head, a KL to a "
    "frozen copy, early stop"
)
def ppo_with_value_head(place):
    class Actor(Net):
        def __init__(self):
            super().__init__()
            self.value, self.policy = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 4)

        def forward(self, x):
            x = super().forward(x)
            return torch.distributions.Categorical(logits=self.policy(x)), self.value(x).squeeze(-1)

    engine, model = wrapped(place, Actor())
    frozen = copy.deepcopy(model).requires_grad_(False).eval()
    found = []
    for rollout in range(2):
        x = batch(rollout, 8)
        with torch.no_grad():
            policy, value = model(x)
            action = policy.probs.argmax(-1)
            old = policy.log_prob(action)
            advantage = torch.linspace(-1, 1, 8) - value
        for epoch in range(3):
            order = torch.randperm(8, generator=torch.Generator().manual_seed(10 * rollout + epoch))
            for part in order.chunk(2):
                policy, value = engine(x[part])
                ratio = (policy.log_prob(action[part]) - old[part]).exp()
                gain = torch.min(ratio * advantage[part], ratio.clamp(0.8, 1.2) * advantage[part]).mean()
                with torch.no_grad():
                    base, _ = frozen(x[part])
                kl = torch.distributions.kl_divergence(policy, base).mean()
                loss = (
                    -gain + 0.5 * (value - advantage[part]).square().mean() + 0.1 * kl - 0.01 * policy.entropy().mean()
                )
                engine.optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_value_(model.parameters(), 0.1)
                engine.optimizer.step()
                found.append((loss.item(), kl.item()))
            if kl > 0.5:
                break
    return found, values(model)


@same_bits("GRPO with the old policy in a ring of state dicts, loaded into one copy for ratios off policy")
def ring_of_policies(place):
    engine, model = wrapped(place, Net())
    behaviour, ring, found = copy.deepcopy(model), [], []
    for index in range(4):
        ring.append({k: v.clone() for k, v in model.state_dict().items()})
        behaviour.load_state_dict(ring[max(0, len(ring) - 3)], assign=index % 2 == 1)
        with torch.no_grad():
            old = behaviour(batch(index)).log_softmax(-1)
        new = engine(batch(index)).log_softmax(-1)
        found.append(step(engine, ((new - old).exp().clamp(0.9, 1.1) * torch.linspace(-1, 1, WIDTH)).mean()))
    return found, values(model), values(behaviour)


@same_bits("a reward model and a policy share their trunk: two heads, a ranking loss and a policy loss in turn")
def shared_trunk_of_reward(place):
    class Two(Net):
        def __init__(self):
            super().__init__()
            self.reward, self.policy = nn.Linear(WIDTH, 1), nn.Linear(WIDTH, 4)

    engine, model = wrapped(place, Two())
    found = []
    for index in range(4):
        hidden = engine(batch(index))
        if index % 2:
            good, bad = model.reward(hidden).chunk(2)
            loss = -F.logsigmoid(good - bad).mean()
        else:
            with torch.no_grad():
                score = model.reward(hidden)
            loss = -(model.policy(hidden).log_softmax(-1)[:, :1] * score).mean()
        found.append(step(engine, loss))
    return found, values(model)


# Diffusion and flows.


class Denoiser(Net):
    def __init__(self):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, WIDTH), nn.SiLU(), nn.Linear(WIDTH, 2 * WIDTH))
        self.register_buffer("alphas", torch.linspace(1, 0.1, 10).cumprod(0))
        self.null = nn.Parameter(torch.zeros(WIDTH))

    def forward(self, x, t, label=None):
        scale, shift = self.time(t.float().view(-1, 1) / 10).chunk(2, -1)
        label = self.null.expand(x.shape) if label is None else label
        return super().forward(x * (1 + scale) + shift + label)


@same_bits("DDPM with min-SNR weights, an EMA by `torch._foreach_lerp_`, samples by DDIM with guidance between steps")
def diffusion(place):
    engine, model = wrapped(place, Denoiser())
    average = copy.deepcopy(model).requires_grad_(False).eval()
    found = []
    for index in range(3):
        draw = torch.Generator().manual_seed(index)
        x, noise = batch(index), torch.randn(4, WIDTH, generator=draw)
        t = torch.randint(0, 10, (4,), generator=draw)
        a = model.alphas[t].view(-1, 1)
        out = engine(a.sqrt() * x + (1 - a).sqrt() * noise, t, None if index == 1 else batch(50))
        snr = (a / (1 - a)).clamp(max=5)
        found.append(step(engine, (snr * (out - noise).square()).mean()))
        torch._foreach_lerp_(list(average.parameters()), [p.detach() for p in model.parameters()], 0.1)
        with torch.inference_mode():
            sample = batch(77)
            for now in (9, 5, 1):
                at = torch.full((4,), now)
                guided = 2 * average(sample, at, batch(50)) - average(sample, at)
                sample = sample - 0.1 * guided
            found.append(sample)
    return found, values(model), values(average)


@same_bits(
    "consistency training: the target is the model itself at the next time, without a graph and with the same dropout"
)
def consistency(place):
    class Dropped(Denoiser):
        def forward(self, x, t, label=None):
            return F.dropout(super().forward(x, t, label), 0.3, self.training)

    engine, model = wrapped(place, Dropped())
    found = []
    for index in range(3):
        state = torch.get_rng_state()
        out = engine(batch(index), torch.full((4,), 5))
        torch.set_rng_state(state)
        with torch.no_grad():
            target = model(batch(index) * 0.9, torch.full((4,), 4))
        found.append(step(engine, F.huber_loss(out, target)))
    return found, values(model)


@same_bits("a gradient of rewards through four steps of sampling (DRaFT), the last two alone keep their graphs")
def draft(place):
    engine, model = wrapped(place, Denoiser())
    found = []
    for index in range(3):
        x = batch(index)
        for now in (9, 7, 5, 3):
            with torch.set_grad_enabled(now <= 5):
                x = x - 0.2 * engine(x, torch.full((4,), now))
        found.append(step(engine, (x - 1).square().mean()))
    return found, values(model)


@same_bits("adversarial distillation: a student, its fake score model and a frozen teacher, all three in engines (DMD)")
def distribution_matching(place):
    student, fake = wrapped(place, Denoiser())[0], wrapped(place, Denoiser(), lr=0.1)[0]
    teacher = Denoiser().requires_grad_(False)
    if place.has_engine:
        teacher = place.wrap(teacher, optimizer=None)
    found, t = [], torch.full((4,), 6)
    for index in range(3):
        made = student(batch(index), torch.full((4,), 9))
        noisy = made + 0.3 * batch(index + 60)
        with torch.no_grad():
            direction = fake(noisy, t) - teacher(noisy, t)
        found.append(step(student, 0.5 * F.mse_loss(made, (made - direction).detach())))
        found.append(step(fake, F.mse_loss(fake(noisy.detach(), t), batch(index + 60))))
    return found, values(student.module), values(fake.module)


# Distillation and contrast.


@same_bits("distillation with the teacher's embedding as the student's: one frozen module in both models")
def shared_embedding(place):
    embed = nn.Embedding(32, 16).requires_grad_(False)
    teacher, student = Full(), Full(layers=2)
    teacher.transformer["wte"] = embed
    student.transformer["wte"] = embed
    teacher.requires_grad_(False).eval()
    engine, model = wrapped(place, student)
    found = []
    for index in range(3):
        tokens = text(index)[0]
        with torch.no_grad():
            soft = teacher(tokens).softmax(-1)
        found.append(step(engine, F.kl_div(engine(tokens).log_softmax(-1), soft, reduction="batchmean")))
    return found, values(model), embed.weight.detach().clone()


@same_bits("MoCo: the key encoder follows by `mul_().add_()` under no_grad, a queue in a buffer, keys are shuffled")
def moco_queue(place):
    class Queued(Net):
        def __init__(self):
            super().__init__()
            self.register_buffer("queue", F.normalize(torch.randn(16, WIDTH), dim=1))
            self.register_buffer("at", torch.zeros(1, dtype=torch.long))

    engine, model = wrapped(place, Queued())
    keys = Net().requires_grad_(False)
    keys.load_state_dict(model.state_dict(), strict=False)
    found = []
    for index in range(4):
        q = F.normalize(engine(batch(index)), dim=1)
        with torch.no_grad():
            for pk, pq in zip(keys.parameters(), model.parameters(), strict=True):
                pk.data.mul_(0.9).add_(pq.data, alpha=0.1)
            order = torch.randperm(4, generator=torch.Generator().manual_seed(index))
            k = F.normalize(keys(batch(index)[order]), dim=1)[order.argsort()]
        logits = torch.cat([(q * k).sum(1, keepdim=True), q @ model.queue.clone().t()], 1) / 0.2
        found.append(step(engine, F.cross_entropy(logits, torch.zeros(4, dtype=torch.long))))
        at = int(model.at)
        model.queue[at : at + 4] = k
        model.at[0] = (at + 4) % 16
    return found, values(model), values(keys)


@same_bits("VICReg and Barlow twins in one loss over two views, the expander is thrown away and put back")
def two_views(place):
    class Expanded(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.expander = Net(), nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

        def forward(self, x):
            return self.expander(self.trunk(x))

    engine, model = wrapped(place, Expanded())
    found = []
    for index in range(3):
        one, two = engine(batch(index, 8)), engine(batch(index, 8) + 0.1 * batch(index + 50, 8))
        covariance = (one.t() @ two) / 8
        loss = F.mse_loss(one, two) + F.relu(1 - one.std(0)).mean() + covariance.square().mean()
        found.append(step(engine, loss))
        expander, model.expander = model.expander, nn.Identity()
        with torch.no_grad():
            found.append(model(batch(9)))
        model.expander = expander
    return found, values(model)


@same_bits("SimSiam: stop-gradient of both branches, weights of the predictor without decay, its own constant rate")
def simsiam(place):
    class Siamese(nn.Module):
        def __init__(self):
            super().__init__()
            self.trunk, self.predictor = Net(), nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU(), nn.Linear(8, WIDTH))

    model = Siamese()
    groups = [
        {"params": list(model.trunk.parameters()), "fix_lr": False},
        {"params": list(model.predictor.parameters()), "fix_lr": True, "weight_decay": 0.0},
    ]
    optimizer = Exact(groups, lr=0.1, momentum=0.9, weight_decay=0.01)
    engine = place.wrap(model, optimizer=optimizer)
    model, found = engine.module, []
    for index in range(4):
        for group in engine.optimizer.param_groups:
            if not group["fix_lr"]:
                group["lr"] = 0.05 * (1 + math.cos(math.pi * index / 4))
        z = [model.trunk(batch(index)), model.trunk(batch(index) * 0.9)]
        p = [model.predictor(each) for each in z]
        loss = -(F.cosine_similarity(p[0], z[1].detach()).mean() + F.cosine_similarity(p[1], z[0].detach()).mean()) / 2
        found.append(step(engine, loss))
    return found, values(model)


# Quantisation, pruning, norms.


class FakeQuantise(nn.Module):
    """Observers in buffers that grow, a switch in a buffer, and a learnt scale."""

    def __init__(self):
        super().__init__()
        self.register_buffer("low", torch.tensor(0.0))
        self.register_buffer("high", torch.tensor(0.0))
        self.register_buffer("enabled", torch.tensor([1], dtype=torch.uint8))
        self.register_buffer("seen", torch.zeros(0), persistent=False)
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, x):
        if self.enabled[0]:
            with torch.no_grad():
                low, high = torch.aminmax(x.detach())
                self.low.copy_(torch.min(self.low, low))
                self.high.copy_(torch.max(self.high, high))
                self.seen.resize_(self.seen.numel() + 1)
                self.seen[-1] = high
        scale = (self.high - self.low).clamp(min=1e-6) / 15 * self.scale
        rounded = x / scale
        return (rounded + (rounded.round() - rounded).detach()) * scale


class Quantised(Block):
    def __init__(self):
        super().__init__()
        self.of_weight, self.of_input = FakeQuantise(), FakeQuantise()

    def forward(self, x):
        return x + F.linear(torch.tanh(self.up(self.of_input(x))), self.of_weight(self.down.weight), self.down.bias)


@same_bits(
    "fake quantisation of weights and inputs: observers in buffers that are resized, learnt scales, switched off later"
)
def fake_quantise_by_hand(place):
    def after(model, index):
        if index == 1:
            for block in model.blocks:
                block.of_weight.enabled[0] = 0
                block.of_input.enabled.zero_()
        return [block.of_weight.seen for block in model.blocks]

    return trained(place, Net(Quantised), after=after, steps=4)


@same_bits(
    "a parametrization that is registered before, removed with `leave_parametrized=False` in evaluation copies only"
)
def parametrized_copy(place):
    class Soft(nn.Module):
        def __init__(self):
            super().__init__()
            self.threshold = nn.Parameter(torch.tensor(0.01))

        def forward(self, w):
            return w.sign() * F.relu(w.abs() - self.threshold)

    model = Net()
    for block in model.blocks:
        parametrize.register_parametrization(block.up, "weight", Soft())
        parametrizations.spectral_norm(block.down)
    engine, model = wrapped(place, model)
    found = []
    for index in range(3):
        found.append(step(engine, engine(batch(index)).square().mean()))
        frozen = copy.deepcopy(model).eval()
        for block in frozen.blocks:
            parametrize.remove_parametrizations(block.up, "weight", leave_parametrized=True)
        with torch.no_grad():
            found.append(frozen(batch(9)))
    return found, values(model)


@same_bits(
    "RigL: the least weights are cut and the ones with the largest gradients grow, masks of weights and "
    "of gradients by hooks"
)
def rigl(place):
    engine, model = wrapped(place)
    masks = {}
    for number, block in enumerate(model.blocks):
        draw = torch.Generator().manual_seed(number)
        masks[number] = (torch.rand(WIDTH, WIDTH, generator=draw) > 0.5).float()
        block.up.weight.data.mul_(masks[number])
    found = []
    for index in range(4):
        engine.optimizer.zero_grad()
        loss = engine(batch(index)).square().mean()
        loss.backward()
        if index == 2:
            for number, block in enumerate(model.blocks):
                mask, weight = masks[number], block.up.weight
                drop = (weight.detach().abs() + (1 - mask) * 9).flatten().topk(10, largest=False).indices
                grow = (weight.grad.abs() * (1 - mask)).flatten().topk(10).indices
                mask.view(-1)[drop] = 0
                mask.view(-1)[grow] = 1
                engine.optimizer.state[weight]["momentum_buffer"].mul_(mask)
        for number, block in enumerate(model.blocks):
            block.up.weight.grad.mul_(masks[number])
        engine.optimizer.step()
        with torch.no_grad():
            for number, block in enumerate(model.blocks):
                block.up.weight.mul_(masks[number])
        found.append(loss.item())
    return found, values(model)


@same_bits("nGPT: after each step all matrices are projected to the sphere by `F.normalize` and `copy_`")
def sphere(place):
    def after(model, index):
        for name, p in model.named_parameters():
            if p.dim() == 2:
                p.data.copy_(F.normalize(p.data, dim=0 if "down" in name else 1))

    return trained(place, Net(), after=after)


@same_bits(
    "muP: `p.infshape` attributes, rates by the width, initial values by `nn.init` after wrapping, output multiplied"
)
def mup(place):
    engine, model = wrapped(place)
    for name, p in model.named_parameters():
        p.infshape = SimpleNamespace(width=p.shape[-1], name=name)
    torch.manual_seed(5)
    for module in model.modules():
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=1 / math.sqrt(module.weight.infshape.width))
            nn.init.zeros_(module.bias)
    handle = model.last.register_forward_hook(lambda module, args, out: out / module.weight.infshape.width * 8)
    found = [step(engine, engine(batch(index)).square().mean()) for index in range(3)]
    handle.remove()
    return found, engine(batch(9)).detach(), values(model)


@same_bits(
    "EMA by `swa_utils.get_ema_multi_avg_fn` with buffers, from the second step on, swapped into the model for judging"
)
def ema_multi(place):
    class Normed(Net):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(WIDTH)

        def forward(self, x):
            return super().forward(self.norm(x))

    engine, model = wrapped(place, Normed())
    average = swa_utils.AveragedModel(model, multi_avg_fn=swa_utils.get_ema_multi_avg_fn(0.8), use_buffers=True)
    found = []
    for index in range(4):
        found.append(step(engine, engine(batch(index)).square().mean()))
        average.update_parameters(model)
        kept = copy.deepcopy(model.state_dict())
        model.load_state_dict(average.module.state_dict())
        model.eval()
        with torch.no_grad():
            found.append(engine(batch(9)))
        model.train()
        model.load_state_dict(kept)
    return found, values(model), values(average)


@same_bits(
    "expert choice with capacity: dropped tokens, `index_add_`, a balance loss, and one expert that nobody chooses"
)
def capacity_and_dropped(place):
    class Routed(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = nn.Linear(WIDTH, 4, bias=False)
            self.experts = nn.ModuleList(Block() for _ in range(4))
            self.register_buffer("load", torch.zeros(4))

        def forward(self, x):
            scores = self.router(x).softmax(-1)
            scores = scores * torch.tensor([1.0, 1, 1, 0])
            top, chosen = scores.topk(2, dim=-1)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows, slot = (chosen == number).nonzero(as_tuple=True)
                rows, slot = rows[:3], slot[:3]
                if len(rows):
                    out.index_add_(0, rows, expert(x[rows]) * top[rows, slot, None])
            self.load = 0.9 * self.load + 0.1 * torch.bincount(chosen.flatten(), minlength=4)
            return x + out, (scores.mean(0) * self.load).sum()

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.layers = nn.ModuleList(Routed() for _ in range(3))

        def forward(self, x):
            total = 0
            for layer in self.layers:
                x, extra = layer(x)
                total = total + extra
            return x, total

    engine, model = wrapped(place, Model())
    found = []
    for index in range(4):
        out, extra = engine(batch(index, 6))
        found.append(step(engine, out.square().mean() + 0.01 * extra))
    return found, values(model)
