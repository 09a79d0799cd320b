"""A model that writes to its own weights while it computes, or reads those of other modules."""

import contextlib

import torch
from tiny import Block, Tiny, loss_of
from torch import nn
from torch.nn import functional as F

from misuses.case import Family
from misuses.place import VOCAB, data, train, train_by_hand, values

family = Family("inside a forward")


def _model(forward_of_block):
    """``small`` with another forward of its blocks."""

    class Special(Block):
        def forward(self, x):
            return forward_of_block(self, x)

    torch.manual_seed(0)
    model = Tiny(32, 0, VOCAB)
    model.blocks.extend(Special(32) for _ in range(8))
    return model


def _plain(self, x):
    return x + self.down(F.gelu(self.up(self.norm(x))))


def _trained(place, forward_of_block):
    engine = place.wrap(_model(forward_of_block))
    return train(engine, 3), values(engine.module)


@family.works("`self.up.weight.data.clamp_(...)` in forward")
def data_clamped(place):
    def forward(self, x):
        self.up.weight.data.clamp_(-0.1, 0.1)
        return _plain(self, x)

    return _trained(place, forward)


@family.works("`with torch.no_grad(): self.up.weight.mul_(0.99)` in forward")
def multiplied(place):
    def forward(self, x):
        with torch.no_grad():
            self.up.weight.mul_(0.99)
        return _plain(self, x)

    return _trained(place, forward)


@family.works("`self.up.weight.data = torch.renorm(self.up.weight.data, 2, 0, 0.5)` in forward (max norm)")
def renormalised(place):
    def forward(self, x):
        self.up.weight.data = torch.renorm(self.up.weight.data, p=2, dim=0, maxnorm=0.5)
        return _plain(self, x)

    return _trained(place, forward)


@family.works("a max-norm layer: `class MaxNormLinear(nn.Linear)` whose forward renormalises `self.weight.data`")
def max_norm_layer(place):
    class MaxNormLinear(nn.Linear):
        def forward(self, x):
            self.weight.data = torch.renorm(self.weight.data, p=2, dim=0, maxnorm=0.3)
            return super().forward(x)

    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(MaxNormLinear(48, 48), nn.Tanh()) for _ in range(12)))
    engine = place.wrap(model)
    for _ in range(3):
        engine.backward(engine(torch.randn(4, 48)).square().mean())
        engine.step()
    return values(model)


@family.works("`nn.Embedding(max_norm=...)` renormalises its own weight in forward")
def embedding_max_norm(place):
    torch.manual_seed(0)
    model = Tiny(32, 8, VOCAB)
    model.embed = nn.Embedding(VOCAB, 32, max_norm=0.5)
    engine = place.wrap(model)
    return train(engine, 3), values(model)


@family.works("`nn.EmbeddingBag(max_norm=...)`")
def embedding_bag_max_norm(place):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.EmbeddingBag(VOCAB, 48, max_norm=0.5), *(nn.Sequential(nn.Linear(48, 48)) for _ in range(12))
    )
    engine = place.wrap(model)
    for tokens, _ in data(3):
        engine.backward(engine(tokens).square().mean())
        engine.step()
    return values(model)


@family.works("the write is seen after an evaluation, without a backward")
def written_in_evaluation(place):
    def forward(self, x):
        self.up.weight.data.mul_(0.9)
        return _plain(self, x)

    engine = place.wrap(_model(forward))
    with torch.no_grad():
        engine(data(1)[0][0])
    return values(engine.module)


@family.works("the write happens in evaluation only, between training steps")
def written_in_evaluation_between_steps(place):
    def forward(self, x):
        if not self.training:
            self.up.weight.data.mul_(0.9)
        return _plain(self, x)

    engine = place.wrap(_model(forward))
    found = train(engine, 1)
    engine.module.eval()
    with torch.no_grad():
        engine(data(1)[0][0])
    engine.module.train()
    return found, train(engine, 2), values(engine.module)


@family.works("`nn.init` in the first forward (data-dependent initialisation)")
def data_dependent_initialisation(place):
    def forward(self, x):
        if not hasattr(self, "ready"):
            self.ready = True
            with torch.no_grad():
                self.up.bias.copy_(-self.up(self.norm(x)).mean(dim=(0, 1)))
        return _plain(self, x)

    return _trained(place, forward)


@family.works("the write comes after the use: PyTorch refuses the backward")
def written_after_use(place):
    def forward(self, x):
        y = _plain(self, x)
        with torch.no_grad():
            self.up.weight.mul_(0.9)
        return y

    return _trained(place, forward)


@family.works("the write comes after the use, through `.data`: PyTorch computes with the new values")
def written_after_use_through_data(place):
    def forward(self, x):
        y = _plain(self, x)
        self.up.weight.data.mul_(0.9)
        return y

    return _trained(place, forward)


@family.refused(
    "`self.up.weight.data = t` after the use: backward has the old values",
    "assign before the use, or after the step",
)
def data_assigned_after_use(place):
    def forward(self, x):
        y = _plain(self, x)
        self.up.weight.data = self.up.weight.data * 0.9
        return y

    return _trained(place, forward)


@family.works("binary weights: `w.data.sign_()` in forward, real ones put back after the step")
def binary_weights(place):
    def forward(self, x):
        if not hasattr(self, "real"):
            self.real = None
        self.real = self.up.weight.data.clone()
        self.up.weight.data = self.up.weight.data.sign() * self.up.weight.data.abs().mean()
        return _plain(self, x)

    engine = place.wrap(_model(forward))
    found = []
    for tokens, targets in data(3):
        loss = loss_of(engine(tokens), targets)
        engine.optimizer.zero_grad()
        loss.backward()
        for block in engine.module.blocks:
            block.up.weight.data.copy_(block.real)
        engine.optimizer.step()
        found.append(loss.item())
    return found, values(engine.module)


@family.works("straight-through: `w + (w.round() - w).detach()`")
def straight_through(place):
    def forward(self, x):
        w = self.up.weight
        w = w + ((w * 8).round() / 8 - w).detach()
        return x + self.down(F.gelu(F.linear(self.norm(x), w, self.up.bias)))

    return _trained(place, forward)


@family.works("a block reads another block's weight (shared by reference)")
def weight_of_another_block(place):
    model = _model(lambda self, x: _plain(self, x) * self.other[0].up.weight.mean())
    for index, block in enumerate(model.blocks):
        block.other = [model.blocks[(index + 1) % 8]]
    engine = place.wrap(model)
    return train(engine, 3), values(model)


@family.works("a block writes to another block's weight in its forward")
def writes_to_another_block(place):
    def forward(self, x):
        with torch.no_grad():
            self.other[0].up.weight.mul_(0.99)
        return _plain(self, x)

    model = _model(forward)
    for index, block in enumerate(model.blocks[:-1]):
        block.other = [model.blocks[index + 1]]
    model.blocks[-1].other = [nn.Module()]
    model.blocks[-1].other[0].up = nn.Linear(2, 2)
    engine = place.wrap(model)
    return train(engine, 3), values(model)


@family.works("the root's forward reads all weights (a penalty in the output)")
def penalty_in_forward(place):
    class Penalised(Tiny):
        def forward(self, tokens):
            return super().forward(tokens) + 1e-3 * sum(p.square().sum() for p in self.parameters())

    torch.manual_seed(0)
    engine = place.wrap(Penalised(32, 8, VOCAB))
    return train(engine, 3), values(engine.module)


@family.works("forward keeps `self.cache = self.up.weight` and uses it in the next one")
def weight_kept_over_forwards(place):
    def forward(self, x):
        y = _plain(self, x)
        kept = self.__dict__.get("kept")
        self.__dict__["kept"] = self.up.weight
        return y if kept is None else y * (1 + kept.mean())

    return _trained(place, forward)


@family.works("forward keeps `self.up.weight.detach()` and it is read after the forward")
def detached_weight_kept(place):
    def forward(self, x):
        self.__dict__["kept"] = self.up.weight.detach()
        return _plain(self, x)

    engine = place.wrap(_model(forward))
    train(engine, 1)
    return [block.kept for block in engine.module.blocks]


@family.works("forward returns its weight beside its output")
def weight_returned(place):
    class Returning(Tiny):
        def forward(self, tokens):
            return super().forward(tokens), self.head.weight, [b.up.bias for b in self.blocks]

    torch.manual_seed(0)
    engine = place.wrap(Returning(32, 8, VOCAB))
    for tokens, targets in data(2):
        logits, weight, biases = engine(tokens)
        (loss_of(logits, targets) + weight.square().mean() + sum(b.square().sum() for b in biases)).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("a block returns `self.up.weight` in a dict, and it is used in the loss")
def weight_returned_by_block(place):
    class Returning(Block):
        def forward(self, x):
            return {"x": _plain(self, x), "w": self.up.weight}

    torch.manual_seed(0)
    blocks = nn.ModuleList(Returning(32) for _ in range(10))
    engine = place.wrap(blocks)
    x, penalty = torch.randn(4, 32), 0.0
    for block in blocks:
        found = block(x)
        x, penalty = found["x"], penalty + found["w"].square().sum()
    (x.square().mean() + penalty).backward()
    engine.optimizer.step()
    return values(blocks)


@family.works("a lambda kept in forward uses the weight later")
def closure_over_module(place):
    def forward(self, x):
        self.__dict__["later"] = lambda y: F.linear(y, self.up.weight)
        return _plain(self, x)

    engine = place.wrap(_model(forward))
    for tokens, targets in data(2):
        loss = loss_of(engine(tokens), targets)
        loss = loss + sum(block.later(torch.ones(2, 32)).square().mean() for block in engine.module.blocks)
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("a generator: forward yields the blocks' outputs one by one")
def generator_forward(place):
    class Yielding(Tiny):
        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
                yield x
            yield self.head(self.norm(x))

    torch.manual_seed(0)
    engine = place.wrap(Yielding(32, 8, VOCAB))
    for tokens, targets in data(2):
        *_, logits = engine(tokens)
        loss_of(logits, targets).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("a block's forward is a generator, which is exhausted after its call has returned")
def generator_block(place):
    class Yielding(Block):
        def forward(self, x):
            h = self.norm(x)
            yield h
            h = F.gelu(F.linear(h, self.up.weight, self.up.bias))
            yield h
            yield x + F.linear(h, self.down.weight, self.down.bias)

    torch.manual_seed(0)
    model = nn.ModuleList(Yielding(32) for _ in range(10))
    engine = place.wrap(model)
    for _ in range(2):
        x = torch.ones(4, 32)
        for block in model:
            *_, x = block(x)
        x.square().mean().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(model)


@family.works("buffers are changed in forward (a running mean)")
def buffer_in_forward(place):
    def forward(self, x):
        self.seen.mul_(0.9).add_(x.detach().mean(), alpha=0.1)
        self.count = self.count + 1
        return _plain(self, x) - self.seen

    model = _model(forward)
    for block in model.blocks:
        block.register_buffer("seen", torch.zeros(32))
        block.register_buffer("count", torch.zeros((), dtype=torch.long))
    engine = place.wrap(model)
    return train(engine, 3), values(model)


@family.works("a custom `autograd.Function` that saves the weight")
def custom_function(place):
    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x, w)
            return x @ w.t()

        @staticmethod
        def backward(ctx, g):
            x, w = ctx.saved_tensors
            return g @ w, g.flatten(0, -2).t() @ x.flatten(0, -2)

    def forward(self, x):
        return x + self.down(F.gelu(Multiply.apply(self.norm(x), self.up.weight) + self.up.bias))

    return _trained(place, forward)


@family.works("a custom `autograd.Function` that keeps the weight as `ctx.w = w` (as old code does)")
def custom_function_keeps_weight(place):
    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.x, ctx.w = x, w
            return x @ w.t()

        @staticmethod
        def backward(ctx, g):
            return g @ ctx.w, g.flatten(0, -2).t() @ ctx.x.flatten(0, -2)

    def forward(self, x):
        return x + self.down(F.gelu(Multiply.apply(self.norm(x), self.up.weight) + self.up.bias))

    return _trained(place, forward)


@family.works("a custom `autograd.Function` that writes the weight's gradient to `w.grad` itself")
def custom_function_writes_grad(place):
    class Multiply(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, w):
            ctx.save_for_backward(x)
            ctx.w = w
            return x @ w.detach().t()

        @staticmethod
        def backward(ctx, g):
            (x,) = ctx.saved_tensors
            found = g.flatten(0, -2).t() @ x.flatten(0, -2)
            ctx.w.grad = found if ctx.w.grad is None else ctx.w.grad + found
            return g @ ctx.w.detach(), None

    def forward(self, x):
        return x + self.down(F.gelu(Multiply.apply(self.norm(x), self.up.weight) + self.up.bias))

    engine = place.wrap(_model(forward))
    return train_by_hand(engine, 3), values(engine.module)


@family.works("`torch.autograd.grad` inside forward by the layer's own weight (meta learning, inner loop)")
def inner_loop(place):
    def forward(self, x):
        w = self.up.weight
        inner = F.linear(self.norm(x), w, self.up.bias).square().mean()
        (slope,) = torch.autograd.grad(inner, w, create_graph=False, retain_graph=True)
        return x + self.down(F.gelu(F.linear(self.norm(x), w - 0.1 * slope, self.up.bias)))

    return _trained(place, forward)


@family.works("a forward inside a forward: the block calls itself once more")
def recursive_block(place):
    def forward(self, x, depth=1):
        y = _plain(self, x)
        return self(y, depth - 1) if depth else y

    model = _model(_plain)
    cls = type(model.blocks[0])
    cls.forward = forward
    engine = place.wrap(model)
    return train(engine, 2), values(model)


@family.works("a forward that trains: it calls backward of an own loss inside")
def backward_inside_forward(place):
    def forward(self, x):
        if torch.is_grad_enabled():
            self.up(self.norm(x.detach())).square().mean().backward()
        return _plain(self, x)

    engine = place.wrap(_model(forward))
    return train_by_hand(engine, 2), values(engine.module)


@family.works("early exit: forward raises `StopIteration`-like control flow, caught by the caller")
def early_exit(place):
    class Stop(Exception):
        pass

    def stop(module, args, output):
        raise Stop

    engine = place.wrap(_model(_plain))
    hook = engine.module.blocks[4].register_forward_hook(stop)
    for tokens, _ in data(2):
        with contextlib.suppress(Stop):
            engine(tokens)
    hook.remove()
    return train(engine, 2), values(engine.module)


@family.works("activations are kept by a hook and used after the step")
def activations_after_step(place):
    engine = place.wrap(_model(_plain))
    kept = []
    engine.module.blocks[4].register_forward_hook(lambda m, a, o: kept.append(o))
    train(engine, 2)
    return kept


@family.works("in-place activations: `F.relu(x, inplace=True)`, `x += y` on a block's output")
def in_place_activations(place):
    def forward(self, x):
        y = self.down(F.relu(self.up(self.norm(x)), inplace=True))
        y += x
        return y

    engine = place.wrap(_model(forward))
    for tokens, targets in data(2):
        logits = engine(tokens)
        logits *= 0.5
        loss_of(logits, targets).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("a bias is added in place to an output: `out.add_(self.bias)`; a view of a weight is an output")
def view_of_weight_is_output(place):
    class Positions(nn.Module):
        def __init__(self):
            super().__init__()
            self.table = nn.Parameter(torch.randn(32, 32))

        def forward(self, length):
            return self.table[:length]

    class Positioned(Tiny):
        def __init__(self):
            super().__init__(32, 8, VOCAB)
            self.positions = Positions()

        def forward(self, tokens):
            x = self.embed(tokens)
            x += self.positions(tokens.shape[1])
            for block in self.blocks:
                x = block(x)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    engine = place.wrap(Positioned())
    return train(engine, 3), values(engine.module)
