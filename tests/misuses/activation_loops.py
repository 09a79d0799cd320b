"""Loops and models around activations that go over the tiers, are recomputed, or chosen: what blocks take and give,
what torch's own switches do, what is copied. Each program trains in all modes. The optimizer is torch's own arithmetic,
so that bits are compared."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import io
import types
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

from misuses.case import Family
from misuses.place import gradients, values
from misuses.saved_tensors import ROWS, WIDTH, batch, modes
from misuses.strangers import Exact

family = Family("activation loops")

SGD: dict[str, Any] = {"optimizer": Exact, "lr": 0.05, "optimizer_options": {"momentum": 0.9}}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, make=Block, count=4):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(make() for _ in range(count))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def in_modes(place, body, make=Net):
    """What ``body(engine)`` gives, and all values, in each mode."""
    found: list[Any] = []
    for mode in modes(place):
        torch.manual_seed(5)
        engine = place.wrap(make(), **{**SGD, **(mode if place.has_engine else {})})
        found += [body(engine), values(engine.module)]
        if place.has_engine:
            engine.close()
            place.left.remove(engine)
    return found


def update(engine, loss):
    engine.optimizer.zero_grad()
    loss.backward()
    last = gradients(engine.module)
    engine.optimizer.step()
    return loss.item(), last


def trained(place, make):
    def body(engine):
        return [update(engine, engine(batch(index)).square().mean()) for index in range(3)]

    return in_modes(place, body, make)


def net_of(block):
    return lambda: Net(block)


def case(title, make=Net, **options):
    """``body(engine)`` in each mode."""

    def add(body):
        def program(place):
            return in_modes(place, body, make)

        program.__name__ = f"activations_{body.__name__}"
        family.works(title, rtol=0.0, atol=0.0, **{"seconds": 90.0, **options})(program)
        return body

    return add


def block(title, **options):
    """A class of blocks, in each mode."""

    def add(kind):
        def program(place):
            return trained(place, net_of(kind))

        program.__name__ = "activations_of" + "".join("_" + c.lower() if c.isupper() else c for c in kind.__name__)
        family.works(title, rtol=0.0, atol=0.0, **{"seconds": 90.0, **options})(program)
        return kind

    return add


# What blocks take and give.


@block("a block gives its input as it is, in a tuple with its output, and one of them twice")
class GivesItsInput(Block):
    def forward(self, x):
        x = x[0] if isinstance(x, tuple) else x
        out = super().forward(x)
        return out, x, out

    def __call__(self, x):
        return super().__call__(x)[0] + 0.1 * x


@dataclasses.dataclass
class State:
    x: torch.Tensor
    seen: list
    scale: float = 1.0


@block("a block takes and gives a dataclass, tensors with gradients in it")
class TakesState(Block):
    def forward(self, state):
        state = State(state, [], 1.0) if isinstance(state, torch.Tensor) else state
        out = super().forward(state.x * state.scale)
        return State(out + 0.1 * sum(state.seen), [*state.seen, out], state.scale * 0.9)

    def __call__(self, x):
        state = super().__call__(x)
        return state.x


@block("a block takes a dict and keyword arguments, the same tensor twice, slices, strings and None")
class TakesKeywords(Block):
    def forward(self, given, *, again, part, kind, nothing=None):
        assert nothing is None and kind == "tanh" and given["x"] is again
        out = super().forward(given["x"])
        return out.index_add(0, torch.arange(part.start, part.stop), again[part])

    def __call__(self, x):
        return super().__call__({"x": x, "n": 3}, again=x, part=slice(0, 5), kind="tanh")


@block("a block writes what it computed into a dict that it was given, and the next one reads that")
class WritesToDict(Block):
    def forward(self, x, world):
        if "last" in world:
            x = x + 0.1 * world["last"]
        world["last"] = torch.sin(x)
        return super().forward(x)

    def __call__(self, x):
        return super().__call__(x, {"last": x * 0.5})


@block("a block's first half is without gradients, its middle is detached")
class HalfWithout(Block):
    def forward(self, x):
        with torch.no_grad():
            gate = torch.sigmoid(self.up(x))
        y = super().forward(x)
        return y * gate + (y.detach() - x.detach()) * 0.1


@block("a block gives what does not need gradients, and an output by an attribute")
class ByAttribute(Block):
    def forward(self, x):
        self.__dict__["out"] = super().forward(x)
        return x.argmax(-1)

    def __call__(self, x):
        super().__call__(x)
        return self.__dict__.pop("out")


@block("blocks of views: outputs are transposed, chunks, expanded, and an `unbind`")
class Views(Block):
    def forward(self, x):
        one, two = super().forward(x).chunk(2, -1)
        rows = torch.stack(one.t().contiguous().unbind(0)).t()
        return torch.cat([two, rows], -1).t()

    def __call__(self, x):
        return super().__call__(x).t()


@block("the activations are viewed as other dtypes: bytes, int32 and halves of one storage")
class OtherDtypes(Block):
    def forward(self, x):
        y = super().forward(x)
        sign = (y.detach().view(torch.int32) >> 31).float()
        small = y.detach().view(torch.int16)[:, 1::2].float() * 1e-6
        return y * (1 + sign * 0.1) + small * torch.sin(y)


@block("a float8 and a uint16 copy is saved by a Function, and a complex128 one")
class SmallDtypes(Block):
    class Kept(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            sixteen = (x.abs() * 1000).to(torch.int32).to(torch.uint16)
            ctx.save_for_backward(x.to(torch.float8_e4m3fn), sixteen, x.to(torch.complex128))
            return x * 1.0

        @staticmethod
        def backward(ctx, g):
            eight, sixteen, double = ctx.saved_tensors
            return g + eight.float() * 1e-3 + sixteen.to(torch.int32).float() * 1e-6 + double.real.float() * 1e-4

    def forward(self, x):
        return self.Kept.apply(super().forward(x))


class Tagged(torch.Tensor):
    """A subclass without anything of its own."""


@block("a subclass of Tensor goes through the blocks")
class Subclass(Block):
    def forward(self, x):
        return super().forward(x.as_subclass(Tagged)).as_subclass(torch.Tensor)


@block("in-place operations on what was saved by nobody, between saves of one storage at other versions")
class Versions(Block):
    def forward(self, x):
        y = self.up(x)
        a = y[: ROWS // 2].sum() * 1e-3
        y.mul_(0.5)
        b = torch.sin(y)
        y2 = y.clone()
        y2.add_(1)
        return x + self.down(b * y2) + a


@block("a block's storage is resized to nothing after its use, and made anew")
class Resized(Block):
    def forward(self, x):
        with torch.no_grad():
            scratch = torch.empty_like(x)
            scratch.copy_(x)
            scratch.untyped_storage().resize_(0)
            scratch.untyped_storage().resize_(x.nbytes)
            scratch.copy_(x * 2)
        return super().forward(x * scratch.sigmoid())


@block("threads within a forward: halves of the rows are computed in two of them")
class Threads(Block):
    def forward(self, x):
        import threading

        enabled, found = torch.is_grad_enabled(), {}

        def run(index, part):
            with torch.set_grad_enabled(enabled):
                found[index] = torch.tanh(part) * part

        threads = [threading.Thread(target=run, args=pair) for pair in enumerate(x.chunk(2))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return super().forward(x) + torch.cat([found[0], found[1]])


@block("sorting networks and a `while` that depends on values")
class Loops(Block):
    def forward(self, x):
        count = 0
        while x.norm() > 30 and count < 4:
            x = x * 0.8 + torch.sin(self.up(x)) * 0.01
            count += 1
        return super().forward(x)


@block("tied layers in a block, and one that is called three times")
class Tied(Block):
    def __init__(self):
        super().__init__()
        self.down.weight = self.up.weight

    def forward(self, x):
        for _ in range(3):
            x = super().forward(x)
        return x


@block("a parametrization and a weight norm in a block")
class Parametrized(Block):
    def __init__(self):
        super().__init__()
        nn.utils.parametrizations.weight_norm(self.up)
        nn.utils.parametrizations.spectral_norm(self.down)


@block("an LSTM in a block, bidirectional, over packed sequences")
class Packed(Block):
    def __init__(self):
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH // 2, bidirectional=True, batch_first=True)

    def forward(self, x):
        packed = nn.utils.rnn.pack_padded_sequence(x.view(4, -1, WIDTH), [20, 15, 9, 3], batch_first=True)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.lstm(packed)[0], batch_first=True, total_length=20)
        return super().forward(x) + out.reshape_as(x)


@block("mixtures of experts in a block, by `nonzero` and `index_put`")
class Mixed(Block):
    def __init__(self):
        super().__init__()
        self.gate, self.experts = nn.Linear(WIDTH, 3), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x):
        weights, chosen = self.gate(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for index, expert in enumerate(self.experts):
            rows = (chosen == index).nonzero()[:, 0]
            if len(rows):
                out = out.index_put((rows,), expert(x[rows]) * weights[rows, None])
        return super().forward(x) + out


# Torch's switches.


@case("mutation of saved tensors is allowed: `allow_mutation_on_saved_tensors` around the step")
def mutation_allowed(engine):
    found = []
    for index in range(3):
        with torch.autograd.graph.allow_mutation_on_saved_tensors():
            out = engine(batch(index))
            y = torch.sin(out)
            out.mul_(2)
            found.append(update(engine, y.square().mean()))
    return found


@case("hooks of saved tensors around the loop count bytes and hand on")
def hooks_that_count(engine):
    count = []

    def pack(t):
        count.append(1)
        return t

    found = []
    for index in range(3):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = engine(batch(index)).square().mean()
        found.append(update(engine, loss))
    return found


@case("hooks of saved tensors around the loop keep a file of each (as torch's tutorial does)")
def hooks_that_write_files(engine):
    def pack(t):
        file = io.BytesIO()
        torch.save(t.detach().clone(), file)
        return file.getvalue()

    found = []
    for index in range(2):
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda data: torch.load(io.BytesIO(data))):
            loss = engine(batch(index)).square().mean()
        found.append(update(engine, loss))
    return found


def _disabled(place):
    def body(engine):
        found = []
        with torch.autograd.graph.disable_saved_tensors_hooks("no hooks here"):
            found += [update(engine, engine(batch(index)).square().mean()) for index in range(2)]
        return found

    return in_modes(place, body)


_disabled.__name__ = "activations_hooks_disabled"
family.works_or_refused("`disable_saved_tensors_hooks` around the loop", "hooks", rtol=0.0, atol=0.0)(_disabled)


@case("`save_on_cpu` around the model, checkpoints within by `checkpoint_sequential`")
def sequential_checkpoints(engine):
    model, found = engine.module, []
    for index in range(2):
        with torch.autograd.graph.save_on_cpu():
            x = model.first(batch(index).requires_grad_())
            x = checkpoint_sequential(nn.Sequential(*model.blocks), 2, x, use_reentrant=False)
            loss = model.last(x).square().mean()
        found.append(update(engine, loss))
    return found


@case("checkpoints of the user's around single blocks, reentrant and not, in turn, with debug off")
def checkpoints_in_turn(engine):
    model, found = engine.module, []
    for index in range(3):
        x = model.first(batch(index))
        for number, each in enumerate(model.blocks):
            x = checkpoint(each, x, use_reentrant=number % 2 == 0)
        found.append(update(engine, model.last(x).square().mean()))
    return found


@case("`torch.autograd.functional.jacobian`, `vjp` and `vhp` of inputs, plain and vectorized")
def functional_jacobians(engine):
    from torch.autograd.functional import jacobian, vjp

    x = batch(0)[:3]
    found = [jacobian(lambda y: engine(y)[:, :4].sum(0), x)]
    found.append(vjp(lambda y: engine(y), x, torch.ones_like(x)))
    return found, update(engine, engine(batch(1)).square().mean())


@case("`is_grads_batched=True` over eight directions, and a training step")
def batched_directions(engine):
    x = batch(0).requires_grad_()
    out = engine(x)
    directions = torch.eye(8, out.numel()).view(8, *out.shape)
    (found,) = torch.autograd.grad(out, x, directions, is_grads_batched=True)
    return found, update(engine, engine(batch(1)).square().mean())


@case("anomaly detection, and multithreading of autograd turned off")
def anomaly_and_one_thread(engine):
    with torch.autograd.detect_anomaly(check_nan=True), torch.autograd.set_multithreading_enabled(False):
        return [update(engine, engine(batch(index)).square().mean()) for index in range(2)]


@case("deterministic algorithms, memory filled with NaN where it is new")
def deterministic(engine):
    torch.use_deterministic_algorithms(True)
    try:
        return [update(engine, engine(batch(index)).square().mean()) for index in range(2)]
    finally:
        torch.use_deterministic_algorithms(False)


@case("what nodes have saved is read from the graph before the backward: `grad_fn._saved_mat1` and others")
def graph_is_read(engine):
    loss = engine(batch(0)).square().mean()
    sums, seen, todo = [], set(), [loss.grad_fn]
    while todo:
        node = todo.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ in ("TanhBackward0", "NativeLayerNormBackward0", "PowBackward0"):
            for name in ("_saved_result", "_saved_mean", "_saved_self"):
                if hasattr(node, name):
                    sums.append(getattr(node, name).double().sum().item())
        todo += [each for each, _ in node.next_functions]
    return sorted(sums), update(engine, loss)


@case("autocast to bfloat16 around the model, `cache_enabled` and not")
def cast(engine):
    found = []
    for index in range(3):
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=index % 2 == 0):
            loss = engine(batch(index)).float().square().mean()
        found.append(update(engine, loss))
    return found


@family.works_or_refused(
    "per-sample gradients of inputs by `torch.func.vmap(grad)` of the whole model", "create_graph", rtol=0.0, atol=0.0
)
def activations_mapped_over_the_model(place):
    from torch.func import grad, vmap

    def body(engine):
        engine.module.requires_grad_(False)
        found = vmap(grad(lambda row: engine.module(row[None]).square().sum()))(batch(0)[:6])
        engine.module.requires_grad_(True)
        return found, update(engine, engine(batch(1)).square().mean())

    return in_modes(place, body)


# Copies, methods, hooks.


@case("a deep copy, a pickle and a file of the model between steps, each trained by torch for a step")
def copies(engine):
    found = [update(engine, engine(batch(0)).square().mean())]
    file = io.BytesIO()
    torch.save(engine.module, file)
    file.seek(0)
    for other in (copy.deepcopy(engine.module), torch.load(file, weights_only=False)):
        optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
        other(batch(1)).square().mean().backward()
        optimizer.step()
        found.append(values(other))
    return found, update(engine, engine(batch(2)).square().mean())


@case("`block.forward` is replaced by a method of the user's after wrapping, which calls the one that was there")
def forward_replaced(engine):
    found = [update(engine, engine(batch(0)).square().mean())]
    each = engine.module.blocks[1]
    before = each.forward
    each.forward = types.MethodType(lambda self, x: before(x) * 0.5, each)
    found.append(update(engine, engine(batch(1)).square().mean()))
    each.forward = before
    return found, update(engine, engine(batch(2)).square().mean())


@case("the class's own method is called: `Block.forward(block, x)`, and signatures are looked at")
def forward_of_class(engine):
    import inspect

    model = engine.module
    names = [list(inspect.signature(each.forward).parameters) for each in model.blocks]
    x = model.first(batch(0))
    for each in model.blocks:
        x = Block.forward(each, x)
    return names, update(engine, model.last(x).square().mean())


@case("forward hooks that replace inputs and outputs, of the block and of layers in it; backward hooks that scale")
def hooks_everywhere(engine):
    model = engine.module
    model.blocks[0].register_forward_pre_hook(lambda m, a: (a[0] * 0.9,))
    model.blocks[1].register_forward_hook(lambda m, a, out: out + a[0])
    model.blocks[2].up.register_forward_hook(lambda m, a, out: out * 1.1)
    model.blocks[2].register_full_backward_hook(lambda m, i, o: tuple(g * 0.5 for g in i))
    model.blocks[3].register_full_backward_pre_hook(lambda m, o: tuple(g * 2 for g in o))
    return [update(engine, engine(batch(index)).square().mean()) for index in range(3)]


@case("blocks are taken out, put in another order and repeated between steps")
def reordered(engine):
    found = []
    for order in ([0, 1, 2, 3], [3, 1], [2, 2, 0], [0, 1, 2, 3]):
        x = engine.module.first(batch(len(found)))
        for index in order:
            x = engine.module.blocks[index](x)
        found.append(update(engine, engine.module.last(x).square().mean()))
    return found


@case("graphs of five batches are alive at once, and go backward from the last to the first")
def five_alive(engine):
    losses = [engine(batch(index)).square().mean() for index in range(5)]
    engine.optimizer.zero_grad()
    for loss in reversed(losses):
        loss.backward()
    found = gradients(engine.module)
    engine.optimizer.step()
    return found


@case("a graph is half used: `autograd.grad` to the middle alone, then dropped; the next one trains")
def half_used(engine):
    found = []
    for index in range(3):
        x = out = engine.module.blocks[0](engine.module.first(batch(index)))
        for each in engine.module.blocks[1:]:
            out = each(out)
        found.append(torch.autograd.grad(engine.module.last(out).sum(), x))
        del out, x
        found.append(update(engine, engine(batch(index)).square().mean()))
    return found


@case("an error in the middle of a backward, the same graph goes backward again by `retain_graph`")
def backward_again_after_error(engine):
    stop = [True]

    def hook(g):
        if stop[0]:
            raise KeyError("once")

    loss = None
    handle = engine.module.blocks[1].register_forward_hook(lambda m, a, out: out.register_hook(hook) and None)
    loss = engine(batch(0)).square().mean()
    handle.remove()
    with contextlib.suppress(KeyError):
        loss.backward(retain_graph=True)
    engine.optimizer.zero_grad()
    stop[0] = False
    loss.backward()
    found = gradients(engine.module)
    engine.optimizer.step()
    return found


@case("dropout in blocks, and a seed that is set between forward and backward")
def seeds_between(engine):
    found = []
    for index in range(3):
        loss = engine(batch(index)).square().mean()
        torch.manual_seed(99 + index)
        found += [update(engine, loss), torch.rand(1)]
    return found


class Dropped(Block):
    def forward(self, x):
        return F.dropout(super().forward(x), 0.2, self.training)


@case("dropout within blocks, three graphs alive, backward in another order, draws in between", net_of(Dropped))
def dropout_out_of_order(engine):
    losses = [engine(batch(index)).square().mean() for index in range(3)]
    engine.optimizer.zero_grad()
    draws = []
    for index in (1, 2, 0):
        losses[index].backward()
        draws.append(torch.rand(2))
    found = gradients(engine.module)
    engine.optimizer.step()
    return found, draws


@family.works(
    "two engines in one folder, activations of both over the tiers, one through the other", rtol=0.0, atol=0.0
)
def activations_of_two_engines(place):
    found = []
    for mode in modes(place):
        options = {**SGD, **(mode if place.has_engine else {})}
        one, two = place.wrap(Net(count=2), **options), place.wrap(Net(count=3), **options)
        for index in range(2):
            for each in (one, two):
                each.optimizer.zero_grad()
            loss = two(one(batch(index))).square().mean() + one(two(batch(index))).mean()
            loss.backward()
            found += [loss.item(), gradients(one.module)]
            for each in (one, two):
                each.optimizer.step()
        found += [values(one.module), values(two.module)]
        for each in (one, two) if place.has_engine else ():
            each.close()
            place.left.remove(each)
    return found


@case("`engine.together` over micro-batches of other lengths, one of them raises, training goes on")
def together_with_errors(engine):
    def body(item):
        index, rows = item
        loss = engine(batch(index, rows)).square().mean()
        if index == 12:
            raise ValueError("bad")
        loss.backward()
        return loss.item()

    found = []
    for step in range(3):
        try:
            found.append(engine.together([(10 * step + index, 40 + 20 * index) for index in range(4)], body))
            found.append(gradients(engine.module))
            engine.optimizer.step()
        except ValueError:
            found.append("bad")
        engine.optimizer.zero_grad()
    return found
