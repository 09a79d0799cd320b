"""Autocast, scalers, 16-bit layers and settings of kernels, to the bit: at the joints of the engine, in every order
that a program may have them."""

from __future__ import annotations

import contextlib

import torch
from torch import nn
from torch.nn import functional as F

from misuses.case import Family
from misuses.exact import SGD
from misuses.joints import ACCUMULATED, PAIRS, PLAIN, batch, program, stepped
from misuses.place import gradients, values
from misuses.second_runs import net
from misuses.strangers import WIDTH, Block, Exact, Net

family = Family("sixteen bits")

ALL = (*ACCUMULATED, *PAIRS[:2])
BF16, FP16 = torch.bfloat16, torch.float16


def cast(dtype=BF16, **options):
    return torch.autocast("cpu", dtype, **options)


def trained(run, build=Net, *, steps=3, forward=None, loss=None, backward=None, **options):
    """Two micro-batches a step; losses, gradients and values."""
    engine = run.engine(build(), **options)
    found = []
    for step in range(steps):

        def body(index):
            x = batch(index)
            y = engine(x) if forward is None else forward(engine, x)
            result = y.float().square().mean() if loss is None else loss(engine, y)
            result.backward() if backward is None else backward(result)
            return result.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
    return found, values(engine.module)


# Autocast.


@program(family, "fp16 autocast with its cache around the forward", ALL)
def fp16_with_cache(run):
    def forward(engine, x):
        with cast(FP16):
            return engine(x)

    return trained(run, forward=forward)


@program(family, "forward, loss and backward within one autocast", ALL)
def backward_within(run):
    engine = run.engine()
    found = []
    for step in range(3):

        def body(index):
            with cast():
                loss = engine(batch(index)).float().square().mean()
                loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
    return found, values(engine.module)


@program(family, "two forwards of one batch within one autocast, whose cache serves both")
def two_forwards_of_a_cache(run):
    def forward(engine, x):
        with cast():
            return engine(x) + engine(0.5 * x)

    return trained(run, forward=forward)


@program(family, "an evaluation without gradients comes first within the autocast: its casts are not kept")
def evaluation_first(run):
    def forward(engine, x):
        with cast():
            with torch.no_grad():
                y = engine(x)
            return engine(x + 0.1 * y.float())

    return trained(run, forward=forward)


@program(family, "the cache is cleared in a block's forward: `torch.clear_autocast_cache()`")
def cache_cleared(run):
    class Clears(Block):
        def forward(self, x):
            y = self.up(x)
            torch.clear_autocast_cache()
            return x + self.down(torch.tanh(y + self.up(0.5 * x)))

    def forward(engine, x):
        with cast():
            return engine(x)

    return trained(run, net(Clears), forward=forward)


@program(family, "a block turns autocast off, its own casts are to bf16 and to double", ALL)
def casts_of_its_own(run):
    class Casts(Block):
        def forward(self, x):
            y = self.up(x)
            with torch.autocast("cpu", enabled=False):
                low = F.linear(y.bfloat16(), self.down.weight.bfloat16(), self.down.bias.bfloat16())
                high = F.linear(y.double(), self.up.weight.double())
            return x + torch.tanh(low) + torch.tanh(high).to(x.dtype)

    def forward(engine, x):
        with cast(cache_enabled=False):
            return engine(x)

    return trained(run, net(Casts), forward=forward)


@program(family, "autocast is fp16 in one block, bf16 in the next, and off around them", ALL)
def dtypes_of_blocks(run):
    class Half(Block):
        def forward(self, x):
            with cast(FP16, cache_enabled=False):
                y = self.down(torch.tanh(self.up(x)))
            with cast(BF16, cache_enabled=False):
                return x + y + self.down(torch.tanh(self.up(0.1 * x)))

    return trained(run, net(Half), loss=lambda engine, y: y.float().square().mean())


@program(family, "a forward pre-hook enters autocast, a forward hook leaves it, on one block")
def autocast_by_hooks(run):
    engine = run.engine()
    stacks = []

    def enter(module, args):
        stacks.append(contextlib.ExitStack())
        stacks[-1].enter_context(cast())

    def leave(module, args, out):
        stacks.pop().close()
        return out.float()

    engine.module.blocks[2].register_forward_pre_hook(enter)
    engine.module.blocks[2].register_forward_hook(leave)
    found = []
    for step in range(3):
        loss = engine(batch(step)).square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
    return found, values(engine.module)


@program(family, "`forward` of each block is decorated by `torch.autocast` after wrapping")
def decorated_forwards(run):
    engine = run.engine()
    for block in engine.module.blocks:
        block.forward = cast()(block.forward)
    found = []
    for step in range(3):
        loss = engine(batch(step)).float().square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
    return found, values(engine.module)


@program(family, "the whole loop stands within one autocast: the second backward meets casts whose graph is gone")
def loop_within_autocast(run):
    engine = run.engine()
    found = []
    with cast():
        for step in range(2):
            loss = engine(batch(step)).float().square().mean()
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            found.append(loss.item())
    return found, values(engine.module)


@program(family, "the whole loop stands within one autocast without a cache")
def loop_within_autocast_without_cache(run):
    engine = run.engine()
    found = []
    with cast(cache_enabled=False):
        for step in range(3):
            loss = engine(batch(step)).float().square().mean()
            loss.backward()
            found += [loss.item(), stepped(engine)]
    return found, values(engine.module)


@program(family, "weights are written between two evaluations in one autocast")
def written_within_autocast(run):
    engine = run.engine()
    found = []
    with cast():
        for turn in range(3):
            with torch.no_grad():
                found.append(engine(batch(turn)).float())
                for p in engine.module.parameters():
                    p.mul_(0.9)
    return found, values(engine.module)


@program(family, "autocast is toggled between micro-batches, dtypes as well: fp32, bf16, fp16 add up", ALL)
def toggled_between(run):
    def forward(engine, x):
        kind = (None, BF16, FP16)[int(x[0, 0].abs() * 1000) % 3]
        with cast(kind, cache_enabled=False) if kind else contextlib.nullcontext():
            return engine(x)

    return trained(run, forward=forward)


@program(family, "`torch.set_autocast_dtype` and `set_autocast_enabled` by hand, left on for the backward")
def set_by_hand(run):
    def forward(engine, x):
        torch.set_autocast_enabled("cpu", True)
        torch.set_autocast_dtype("cpu", FP16)
        return engine(x)

    def backward(loss):
        loss.backward()
        torch.set_autocast_enabled("cpu", False)
        torch.set_autocast_dtype("cpu", BF16)
        torch.clear_autocast_cache()

    return trained(run, forward=forward, backward=backward)


class Scaled(torch.autograd.Function):
    """A product in the autocast of its forward, also in backward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return (grad @ weight).to(x.dtype), (grad.t() @ x.to(grad.dtype)).to(weight.dtype)


@program(family, "a Function of `custom_fwd` saves weights, its backward is in the forward's autocast", ALL)
def custom_forward(run):
    class Custom(Block):
        def forward(self, x):
            return x + self.down(torch.tanh(Scaled.apply(x, self.up.weight)))

    def forward(engine, x):
        with cast(cache_enabled=False):
            return engine(x)

    return trained(run, net(Custom), forward=forward)


class InFloat(torch.autograd.Function):
    """A Function whose inputs are cast to fp32 and that runs without autocast."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return grad @ weight, grad.t() @ x


@program(family, "a Function of `custom_fwd(cast_inputs=float32)` between layers in autocast", ALL)
def custom_forward_in_float(run):
    class Custom(Block):
        def forward(self, x):
            return x + self.down(torch.tanh(InFloat.apply(x, self.up.weight)))

    def forward(engine, x):
        with cast(cache_enabled=False):
            return engine(x)

    return trained(run, net(Custom), forward=forward)


@program(family, "autocast around attention, a norm, a softmax and a loss that it promotes to fp32", ALL)
def promoted_operations(run):
    class Mixed(Block):
        def forward(self, x):
            q = self.up(x).view(4, -1, 8)
            y = F.scaled_dot_product_attention(q, q, q).reshape(-1, WIDTH)
            y = F.layer_norm(y, (WIDTH,), self.down.bias, self.up.bias)
            return x + self.down(F.softmax(y, -1)) + torch.cumsum(y, 0) * 1e-3

    def forward(engine, x):
        with cast(cache_enabled=False):
            return engine(x)

    return trained(run, net(Mixed), forward=forward)


@program(family, "a model's LSTM in autocast, over its state in fp32", PLAIN)
def lstm_in_autocast(run):
    class Recurrent(Block):
        def __init__(self):
            super().__init__()
            self.cell = nn.LSTM(WIDTH, WIDTH, batch_first=True)

        def forward(self, x):
            y, _ = self.cell(x.view(8, -1, WIDTH))
            return x + self.down(y.reshape(-1, WIDTH))

    def forward(engine, x):
        with cast():
            return engine(x)

    return trained(run, net(Recurrent), forward=forward)


# Settings of kernels.


@program(family, "products in bf16 by `set_float32_matmul_precision('medium')` around the forward alone", ALL)
def matmul_precision_of_forward(run):
    def forward(engine, x):
        torch.set_float32_matmul_precision("medium")
        try:
            return engine(x)
        finally:
            torch.set_float32_matmul_precision("highest")

    return trained(run, forward=forward)


@program(family, "`torch.backends.mkldnn.flags(enabled=False)` around the forward alone, autocast on", ALL)
def without_mkldnn(run):
    def forward(engine, x):
        with torch.backends.mkldnn.flags(enabled=False), cast(cache_enabled=False):
            return engine(x)

    return trained(run, forward=forward)


@program(family, "`torch.backends.mkldnn.matmul.fp32_precision = 'bf16'` around the forward alone", ALL)
def mkldnn_precision(run):
    def forward(engine, x):
        of = torch.backends.mkldnn.matmul
        before = of.fp32_precision
        of.fp32_precision = "bf16"
        try:
            return engine(x)
        finally:
            of.fp32_precision = before

    return trained(run, forward=forward)


@program(family, "`torch.set_num_threads` changes between forward and backward", ALL)
def threads_of_halves(run):
    def forward(engine, x):
        torch.set_num_threads(2)
        return engine(x)

    def backward(loss):
        torch.set_num_threads(1)
        loss.backward()

    return trained(run, forward=forward, backward=backward)


@program(family, "denormal numbers are flushed in the forward alone, and made large again in a block", ALL)
def flushed_in_forward(run):
    class Enlarges(Block):
        def forward(self, x):
            return self.down(x) + torch.tanh(1e37 * (self.up(x) * 1e-20 * 1e-18))

    def forward(engine, x):
        torch.set_flush_denormal(True)
        try:
            return engine(x)
        finally:
            torch.set_flush_denormal(False)

    return trained(run, net(Enlarges), forward=forward)


# Scalers.


def scaled(run, scaler, *, steps=4, before=None, overflow=(), **options):
    """Steps by a scaler; losses, scales, values."""
    engine = run.engine(**options)
    found = []
    for step in range(steps):

        def body(index):
            with cast(FP16, cache_enabled=False):
                y = engine(batch(index))
            loss = y.float().square().mean()
            scaler.scale(loss * (float("inf") if index in overflow else 1.0)).backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        if before is not None:
            found.append(before(engine, step))
        scaler.step(engine.optimizer)
        scaler.update()
        engine.optimizer.zero_grad()
        found.append(scaler.get_scale())
    return found, scaler.state_dict(), values(engine.module)


@program(family, "a scale that is no power of two, which grows by 1.7 after each step", ALL)
def odd_scale(run):
    return scaled(run, torch.amp.GradScaler("cpu", 1000.0, growth_factor=1.7, growth_interval=1))


@program(family, "a scaler whose second step overflows, with clipping after `unscale_`", ALL)
def overflow_and_clipping(run):
    scaler = torch.amp.GradScaler("cpu", 2.0**10, growth_interval=2)

    def before(engine, step):
        scaler.unscale_(engine.optimizer)
        return nn.utils.clip_grad_norm_(engine.module.parameters(), 0.02).item()

    return scaled(run, scaler, before=before, overflow=(3,))


@program(family, "`unscale_`, then gradients are read, clipped by value and given noise, an odd scale")
def unscaled_and_changed(run):
    scaler = torch.amp.GradScaler("cpu", 300.0, growth_factor=1.3, growth_interval=1)
    draws = torch.Generator().manual_seed(3)

    def before(engine, step):
        scaler.unscale_(engine.optimizer)
        found = gradients(engine.module)
        nn.utils.clip_grad_value_(engine.module.parameters(), 1e-3)
        for p in engine.module.parameters():
            p.grad.add_(torch.randn(p.shape, generator=draws), alpha=1e-4)
        return found

    return scaled(run, scaler, before=before)


@program(family, "gradients are scaled by hand before `unscale_`, of an odd scale")
def scaled_before_unscale(run):
    scaler = torch.amp.GradScaler("cpu", 300.0, growth_factor=1.3, growth_interval=1)

    def before(engine, step):
        for p in engine.module.parameters():
            p.grad.mul_(0.7)
        scaler.unscale_(engine.optimizer)
        return gradients(engine.module)

    return scaled(run, scaler, before=before)


@program(family, "`scaler.update(new_scale)` with a number and a tensor")
def scale_set(run):
    engine = run.engine()
    scaler = torch.amp.GradScaler("cpu", 8.0)
    found = []
    for step in range(4):
        scaler.scale(engine(batch(step)).square().mean()).backward()
        scaler.step(engine.optimizer)
        scaler.update([3.0, torch.tensor(5.0), 16.0, None][step])
        engine.optimizer.zero_grad()
        found.append(scaler.get_scale())
    return found, values(engine.module)


@program(family, "wrong order: `unscale_` twice, `step` twice, `update` without a step: PyTorch's errors")
def scaler_out_of_order(run):
    engine = run.engine()
    scaler = torch.amp.GradScaler("cpu", 8.0)
    found = [run.place.attempt(scaler.update)]
    scaler.scale(engine(batch(0)).square().mean()).backward()
    scaler.unscale_(engine.optimizer)
    found.append(run.place.attempt(lambda: scaler.unscale_(engine.optimizer)))
    scaler.step(engine.optimizer)
    found.append(run.place.attempt(lambda: scaler.step(engine.optimizer)))
    scaler.update()
    engine.optimizer.zero_grad()
    found.append(run.place.attempt(lambda: scaler.step(engine.optimizer, closure=lambda: 1)))
    return found, values(engine.module)


@program(family, "one scaler for the engine's optimizer and one of the user's: an overflow in the first skips it alone")
def scaler_of_two_optimizers(run):
    engine = run.engine()
    torch.manual_seed(5)
    head = nn.Linear(WIDTH, 4)
    plain = torch.optim.SGD(head.parameters(), 0.1, 0.9)
    scaler = torch.amp.GradScaler("cpu", 2.0**8, growth_interval=2)
    found = []
    for step in range(5):
        scaler.scale(head(engine(batch(step))).square().mean()).backward()
        if step == 1:
            engine.module.blocks[2].up.weight.grad[0, 0] = float("inf")
        if step == 2:
            head.weight.grad[0, 0] = float("nan")
        for optimizer in (engine.optimizer, plain):
            if step % 2:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
        scaler.update()
        for optimizer in (engine.optimizer, plain):
            optimizer.zero_grad()
        found.append(scaler.get_scale())
    return found, values(head), values(engine.module)


@program(family, "one scaler for two engines, one loss through both")
def scaler_of_two_engines(run):
    one, other = run.engine(), run.engine()
    scaler = torch.amp.GradScaler("cpu", 100.0, growth_factor=3.0, growth_interval=2)
    found = []
    for step in range(4):
        y = one(batch(step))
        scaler.scale(other(y).square().mean() + (y - 1).square().mean()).backward()
        scaler.unscale_(one.optimizer)
        nn.utils.clip_grad_value_(one.module.parameters(), 1e-3)
        for engine in (one, other):
            scaler.step(engine.optimizer)
        scaler.update()
        for engine in (one, other):
            engine.optimizer.zero_grad()
        found.append(scaler.get_scale())
    return found, values(one.module), values(other.module)


@program(family, "the input's gradient under a scaler: `autograd.grad` of the scaled loss, unscaled by hand")
def input_gradient_unscaled(run):
    engine = run.engine()
    scaler = torch.amp.GradScaler("cpu", 128.0, growth_interval=1)
    found = []
    for step in range(3):
        x = batch(step).requires_grad_()
        (slope,) = torch.autograd.grad(scaler.scale(engine(x).square().mean()), x)
        slope = slope / scaler.get_scale()
        scaler.scale(engine((x + 0.1 * slope.sign()).detach()).square().mean()).backward()
        scaler.step(engine.optimizer)
        scaler.update()
        engine.optimizer.zero_grad()
        found += [slope.norm().item(), scaler.get_scale()]
    return found, values(engine.module)


@program(family, "a scaler of the user's that is a subclass, looks at the gradients and skips by their norm")
def subclass_of_scaler(run):
    class Looks(torch.amp.GradScaler):
        def _unscale_grads_(self, optimizer, *args, **kwargs):
            found = super()._unscale_grads_(optimizer, *args, **kwargs)
            norm = torch.stack([p.grad.norm() for g in optimizer.param_groups for p in g["params"]]).norm()
            for value in found.values():
                value.add_((norm > 0.1).float())
            return found

    return scaled(run, Looks("cpu", 64.0, growth_interval=2))


# Layers of 16 bits.


@program(family, "the residual stream is bf16, weights are fp32 and cast at each use", ALL)
def low_stream(run):
    class Low(Block):
        def forward(self, x):
            y = F.linear(x.bfloat16(), self.up.weight.bfloat16(), self.up.bias.bfloat16())
            y = F.linear(torch.tanh(y), self.down.weight.bfloat16(), self.down.bias.bfloat16())
            return x.bfloat16() + y

    def forward(engine, x):
        model = engine.module
        y = model.first(x)
        for block in model.blocks:
            y = block(y)
        return model.last(y.float())

    return trained(run, lambda: Net(Low), forward=forward)


@program(family, "weights are rounded to bf16 at random in each forward, by a generator of the block", ALL)
def rounded_at_random(run):
    class Rounds(Block):
        def __init__(self):
            super().__init__()
            self.draws = torch.Generator().manual_seed(4)

        def low(self, weight):
            bits = weight.detach().view(torch.int32)
            noise = torch.randint(0, 1 << 16, bits.shape, generator=self.draws, dtype=torch.int32)
            rounded = ((bits + noise) & -65536).view(torch.float32)
            return weight + (rounded - weight).detach()

        def forward(self, x):
            return x + F.linear(torch.tanh(F.linear(x, self.low(self.up.weight))), self.low(self.down.weight))

    return trained(run, lambda: Net(Rounds))


@program(family, "gradients are rounded to bf16 by hooks on parameters, and sums of micro-batches as well", PLAIN)
def gradients_rounded(run):
    model = Net()
    engine = run.engine(model)
    for p in engine.module.parameters():
        p.register_hook(lambda gradient: gradient.bfloat16().float())
        p.register_post_accumulate_grad_hook(lambda p: p.grad.copy_(p.grad.bfloat16()))
    found = []
    for step in range(3):
        for index in range(3):
            engine(batch(3 * step + index)).square().mean().backward()
        found.append(stepped(engine))
    return found, values(engine.module)


def pure(run, dtype, build=Net, *, count=3, change=None):
    """A model in 16 bits with masters, one backward a step; in PyTorch by hand."""
    model = build()
    if run.place.has_engine:
        engine = run.engine(model, precision="bf16")
        model = engine.module
    else:
        masters = [p.detach().clone().requires_grad_() for p in model.parameters()]
        model.to(dtype)
        optimizer = Exact(masters, lr=SGD["lr"], **SGD["optimizer_options"])
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(_rounded(master))
    found = []
    for step in range(count):
        loss = model(batch(step).to(dtype)).float().square().mean()
        loss.backward()
        if change is not None:
            change(model, step)
        found += [loss.item(), gradients(model)]
        if run.place.has_engine:
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            continue
        for p, master in zip(model.parameters(), masters, strict=True):
            master.grad = None if p.grad is None else p.grad.float()
            p.grad = None
        optimizer.step()
        with torch.no_grad():
            for p, master in zip(model.parameters(), masters, strict=True):
                p.copy_(_rounded(master))
    return found, values(model)


def _rounded(master):
    """To nearest, ties away from zero, as the engine rounds masters."""
    bits = master.detach().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(BF16)


@program(family, "`precision='bf16'` beside bf16 weights with masters that a loop of plain PyTorch keeps")
def bf16_with_masters(run):
    return pure(run, BF16)


@program(family, "`precision='bf16'`: gradients are scaled, clipped by value, and one is dropped")
def bf16_gradients_changed(run):
    def change(model, step):
        for p in model.parameters():
            p.grad.mul_(0.5)
        model.blocks[step].up.weight.grad.clamp_(-1e-3, 1e-3)
        model.blocks[step + 1].down.weight.grad = None

    return pure(run, BF16, change=change)


@program(
    family,
    "`precision='bf16'`: gradients are multiplied by a number that is no power of two",
    differs=dict.fromkeys(PLAIN, "the update takes such a product in fp32, and does not round it to 16 bits first"),
)
def bf16_gradients_scaled(run):
    def change(model, step):
        for p in model.parameters():
            p.grad.mul_(0.3)

    return pure(run, BF16, change=change)


@program(family, "`precision='bf16'`: gradients are divided by three, added to, and assigned")
def bf16_gradients_assigned(run):
    def change(model, step):
        model.first.weight.grad.div_(3)
        model.last.weight.grad.add_(1e-3)
        model.blocks[1].up.weight.grad = model.blocks[1].up.weight.grad * 2 + model.blocks[2].up.weight.grad

    return pure(run, BF16, change=change)
