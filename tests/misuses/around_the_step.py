"""What a program has on around ``optimizer.step()``: modes, autocast, settings, context variables. A step of an
optimizer without a kernel is computed in another thread, later on, and must find them as they were."""

from __future__ import annotations

import contextlib
import contextvars

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from misuses.case import Family
from misuses.groups_and_rates import ADAM, ExactAdam
from misuses.place import values
from misuses.strangers import Net, batch

family = Family("around the step")


class Products(torch.optim.Optimizer):
    """A step with matrix products, written without ``no_grad``."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                g = p.grad
                if g.dim() == 2:
                    state = self.state[p]
                    if "left" not in state:
                        state["left"] = torch.zeros(len(g), len(g))
                    state["left"].mul_(0.9).add_(g @ g.t(), alpha=0.1)
                    g = (torch.eye(len(g)) + state["left"]) @ g
                p.data.add_(g.to(p.dtype), alpha=-group["lr"])


class NeedsNoGrad(torch.optim.Optimizer):
    """A step that works within ``no_grad`` of its caller alone."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])


class Makes(torch.optim.Optimizer):
    """A step that makes tensors of the default dtype, and asks for the default device."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    factor = torch.tensor(1 / 3) * torch.ones(()) + torch.linspace(0, 1, 3).sum()
                    p.sub_((p.grad * factor).to(p.dtype), alpha=group["lr"])


SCALE = contextvars.ContextVar("SCALE", default=1.0)


class Reads(torch.optim.Optimizer):
    """A step that reads a context variable."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"] * SCALE.get())


def trained(place, optimizer, around, *, build=Net, scale=1.0, steps=4, **options):
    """Losses and values of a loop whose steps are within ``around(step)``."""
    net = build()
    engine = place.wrap(net, optimizer=optimizer(net.parameters(), **options))
    found = []
    for step in range(steps):
        engine.optimizer.zero_grad()
        loss = engine(batch(step)).square().mean() * scale
        loss.backward()
        with around(step):
            engine.optimizer.step()
        found.append(loss.item())
    return found, values(net)


@family.same_bits("autocast around the step of an optimizer with matrix products: they are in bf16")
def step_in_autocast(place):
    return trained(place, Products, lambda step: torch.autocast("cpu", torch.bfloat16))


@family.same_bits("autocast around every second step")
def every_second_step_in_autocast(place):
    return trained(place, Products, lambda step: torch.autocast("cpu", torch.bfloat16, enabled=step % 2 == 0))


@family.same_bits("the whole loop is within autocast without a cache, the optimizer has matrix products")
def all_in_autocast(place):
    with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
        return trained(place, Products, lambda step: contextlib.nullcontext())


@family.refused("`no_grad` around a step that is written without it", "requires grad is being used in an in-place")
def step_in_no_grad(place):
    return trained(place, NeedsNoGrad, lambda step: torch.no_grad())


@family.refused("`inference_mode` around a step that is written without `no_grad`", "requires grad is being used")
def step_in_inference_mode(place):
    return trained(place, NeedsNoGrad, lambda step: torch.inference_mode())


@family.works_or_refused("a step that is written without `no_grad`, and called without: PyTorch raises")
def step_without_no_grad(place):
    return trained(place, NeedsNoGrad, lambda step: contextlib.nullcontext(), steps=1)


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@family.same_bits("the default dtype is float64 around a step that makes tensors")
def step_in_doubles(place):
    return trained(place, Makes, lambda step: default_dtype(torch.float64))


@family.same_bits("`with torch.device('cpu')` around a step that makes tensors")
def step_on_a_device(place):
    return trained(place, Makes, lambda step: torch.device("cpu"))


@contextlib.contextmanager
def scaled(value):
    token = SCALE.set(value)
    try:
        yield
    finally:
        SCALE.reset(token)


@family.same_bits("a context variable is set around the step, which reads it")
def step_reads_variable(place):
    return trained(place, Reads, lambda step: scaled(1.0 + step))


class Halves(TorchFunctionMode):
    """Halves the rate of subtractions."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func is torch.Tensor.sub_ and "alpha" in kwargs:
            kwargs["alpha"] *= 0.5
        return func(*args, **kwargs)


@family.works_or_refused("a `TorchFunctionMode` around the step changes its operations", "mode|TorchFunctionMode")
def step_in_function_mode(place):
    return trained(place, Reads, lambda step: Halves())


class Rounds(TorchDispatchMode):
    """Rounds the results of products."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if func is torch.ops.aten.mm.default:
            found = found.bfloat16().float()
        return found


@family.works_or_refused("a `TorchDispatchMode` around the step rounds its products", "mode|TorchDispatchMode")
def step_in_dispatch_mode(place):
    return trained(place, Products, lambda step: Rounds())


@contextlib.contextmanager
def flushed():
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(False)


@family.same_bits("denormal numbers are flushed around the step: moments of tiny gradients vanish")
def step_flushes(place):
    return trained(place, ExactAdam, lambda step: flushed(), scale=1e-20, **{**ADAM, "eps": 1e-30})


@family.same_bits("denormal numbers are flushed in the whole program, an optimizer without a kernel")
def all_flushed(place):
    with flushed():
        return trained(place, ExactAdam, lambda step: contextlib.nullcontext(), scale=1e-20, **{**ADAM, "eps": 1e-30})


@contextlib.contextmanager
def products_in_bf16():
    before = torch.backends.mkldnn.matmul.fp32_precision
    torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    try:
        yield
    finally:
        torch.backends.mkldnn.matmul.fp32_precision = before


@family.same_bits("fp32 products may be in bf16 around the step, by `mkldnn.matmul.fp32_precision`")
def step_with_precision(place):
    return trained(place, Products, lambda step: products_in_bf16())


@family.same_bits("oneDNN is off around the step, which has products in autocast")
def step_without_mkldnn(place):
    @contextlib.contextmanager
    def both(step):
        with torch.backends.mkldnn.flags(enabled=False), torch.autocast("cpu", torch.bfloat16):
            yield

    return trained(place, Products, both)


@family.same_bits("a step pre-hook enters autocast and a post-hook leaves it")
def autocast_by_step_hooks(place):
    net = Net()
    engine = place.wrap(net, optimizer=Products(net.parameters()))
    stack = contextlib.ExitStack()
    cast = torch.autocast("cpu", torch.bfloat16)
    engine.optimizer.register_step_pre_hook(lambda *args: stack.enter_context(cast) and None)
    engine.optimizer.register_step_post_hook(lambda *args: stack.close())
    found = []
    for step in range(3):
        engine.optimizer.zero_grad()
        loss = engine(batch(step)).square().mean()
        loss.backward()
        engine.optimizer.step()
        found.append(loss.item())
    return found, values(net)


@family.same_bits("anomaly detection, a profiler and deterministic algorithms around steps")
def step_is_looked_at(place):
    @contextlib.contextmanager
    def looked(step):
        torch.use_deterministic_algorithms(True)
        try:
            with torch.autograd.set_detect_anomaly(True), torch.profiler.profile():
                yield
        finally:
            torch.use_deterministic_algorithms(False)

    return trained(place, Products, looked, steps=2)


@family.same_bits("the number of threads changes around the step")
def step_with_threads(place):
    @contextlib.contextmanager
    def with_two(step):
        torch.set_num_threads(2)
        try:
            yield
        finally:
            torch.set_num_threads(1)

    return trained(place, Products, with_two)


# What is kept of an optimizer over a load.


@family.works_or_refused("`optimizer.state` is kept from before `load_state_dict`, and written to", r"optimizer\.state")
def state_from_before_a_load(place):
    net = Net()
    engine = place.wrap(net, optimizer=ExactAdam(net.parameters(), **ADAM))
    kept = engine.optimizer.state

    def step(index):
        engine.optimizer.zero_grad()
        engine(batch(index)).square().mean().backward()
        engine.optimizer.step()

    step(0)
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    step(1)
    with torch.no_grad():
        kept[net.first.weight]["exp_avg"].zero_()
    step(2)
    return values(net)


@family.same_bits(
    "`param_groups[0]` is kept from before `load_state_dict`, and written to: it is another one's by then"
)
def group_from_before_a_load(place):
    net = Net()
    engine = place.wrap(net, optimizer=ExactAdam(net.parameters(), **ADAM))
    kept = engine.optimizer.param_groups[0]

    def step(index):
        engine.optimizer.zero_grad()
        engine(batch(index)).square().mean().backward()
        engine.optimizer.step()

    step(0)
    engine.optimizer.load_state_dict(engine.optimizer.state_dict())
    kept["lr"] = 0.5
    step(1)
    return engine.optimizer.param_groups[0]["lr"], values(net)


@family.same_bits("rate and decay are huge: what overflows does so in the same places")
def overflowing(place):
    net = Net()
    engine = place.wrap(net, optimizer=ExactAdam(net.parameters(), **ADAM))
    engine.optimizer.param_groups[0]["weight_decay"] = 1e20
    found = []
    for step in range(3):
        engine.optimizer.param_groups[0]["lr"] = (1e-2, 1e18, 1e18)[step]
        engine.optimizer.zero_grad()
        for p in net.parameters():
            p.grad = torch.full_like(p, 1e-3)
        engine.optimizer.step()
        found.append(values(net))
    return found


@family.works("the same by a kernel")
def overflowing_by_kernel(place):
    net = Net()
    engine = place.wrap(net, optimizer=torch.optim.AdamW(net.parameters(), **ADAM))
    engine.optimizer.param_groups[0]["weight_decay"] = 1e20
    found = []
    for step in range(3):
        engine.optimizer.param_groups[0]["lr"] = (1e-2, 1e18, 1e18)[step]
        engine.optimizer.zero_grad()
        for p in net.parameters():
            p.grad = torch.full_like(p, 1e-3)
        engine.optimizer.step()
        found.append([torch.isfinite(p.detach().clone()) for p in net.parameters()])
    return found


@family.same_bits("a hook of all optimizers' steps enters modes: `register_optimizer_step_pre_hook` with autocast")
def autocast_by_global_hook(place):
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    stack = contextlib.ExitStack()
    handles = [
        register_optimizer_step_pre_hook(
            lambda *args: stack.enter_context(torch.autocast("cpu", torch.bfloat16)) and None
        ),
        register_optimizer_step_post_hook(lambda *args: stack.close()),
    ]
    try:
        return trained(
            place, Products, lambda step: contextlib.nullcontext(), build=lambda: nn.Sequential(*Net().blocks)
        )
    finally:
        for handle in handles:
            handle.remove()


# What a step reads, changed as soon as it has returned.


class Masked(torch.optim.Optimizer):
    """A step that multiplies by a mask: an attribute of the parameter, or an entry of its state."""

    def __init__(self, params, lr=0.05):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    state = self.state[p]
                    state["count"] = state.get("count", 0) + 1
                    mask = state["mask"] if "mask" in state else getattr(p, "mask", 1.0)
                    p.sub_(p.grad * mask, alpha=group["lr"])


def masked(place, masks_of):
    net = nn.Sequential(*(nn.Linear(32, 32) for _ in range(40)))
    engine = place.wrap(net, optimizer=Masked(net.parameters()))
    found = []
    for step in range(4):
        engine.optimizer.zero_grad()
        masks = masks_of(engine, step)
        for mask in masks:
            mask.fill_(1.0 + step)
        loss = engine(batch(step)).square().sum()
        loss.backward()
        engine.optimizer.step()
        for mask in masks:
            mask.fill_(100.0)
        found.append(loss.item())
    return found, values(net)


@family.same_bits("masks are attributes of parameters, and are written as soon as the step has returned")
def attributes_written_after_step(place):
    def masks_of(engine, step):
        if step == 0:
            for p in engine.module.parameters():
                p.mask = torch.ones_like(p)
        return [p.mask for p in engine.module.parameters()]

    return masked(place, masks_of)


@family.same_bits("masks are entries of states, held by the program, and are written as soon as the step has returned")
def entries_written_after_step(place):
    masks = []

    def masks_of(engine, step):
        if step == 1:
            for p in engine.module.parameters():
                masks.append(torch.ones(p.shape))
                engine.optimizer.state[p]["mask"] = masks[-1]
        return masks

    return masked(place, masks_of)


@family.same_bits("an option of the group is a tensor, and is written as soon as the step has returned")
def option_written_after_step(place):
    def masks_of(engine, step):
        group = engine.optimizer.param_groups[0]
        if step == 0:
            group["lr"] = torch.tensor(0.0)
        group["lr"].fill_(0.05 / (1 + step))
        return []

    found, last = masked(place, masks_of)
    return found, last
