"""What a program puts on a model, takes off it and calls beside it while it is trained: parametrizations, pruning,
other modules, calls with other tensors, copies, subclasses, hooks that change gradients, gradients of parts."""

from __future__ import annotations

import copy
import io
import pickle
import threading

import torch
from torch import nn
from torch.func import functional_call
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, prune

from misuses.case import Family
from misuses.joints import ACCUMULATED, PAIRS, PLAIN, batch, program, stepped
from misuses.place import gradients, values
from misuses.second_runs import net
from misuses.strangers import WIDTH, Block, Net

family = Family("put on afterwards")

ALL = (*ACCUMULATED, *PAIRS[:2])


def trained(run, build=Net, *, steps=4, before=None, after=None, forward=None, engine=None, **options):
    """One batch a step; losses, gradients and values. ``before`` and ``after`` a step may change the model."""
    engine = run.engine(build(), **options) if engine is None else engine
    model, found = engine.module, []
    for step in range(steps):
        if before is not None:
            found.append(before(model, step))
        y = engine(batch(step)) if forward is None else forward(engine, batch(step), step)
        loss = y.square().mean()
        loss.backward()
        found += [loss.item(), stepped(engine)]
        if after is not None:
            found.append(after(model, step))
    return found, values(model)


# Parametrizations and masks.


class Symmetric(nn.Module):
    def forward(self, weight):
        return weight.triu() + weight.triu(1).t()

    def right_inverse(self, weight):
        return weight.triu()


@program(family, "`weight_norm` put on two layers before wrapping, removed from one between steps, values stay")
def weight_norm_removed(run):
    def build():
        model = Net()
        parametrizations.weight_norm(model.blocks[1].up)
        parametrizations.weight_norm(model.blocks[3].down)
        return model

    def after(model, step):
        if step == 1:
            kept = copy.deepcopy(model.blocks[1].up)
            parametrize.remove_parametrizations(kept, "weight")
            return kept.weight.clone()

    return trained(run, build, after=after)


@program(family, "`spectral_norm` whose vectors move in each forward, an evaluation between, recomputed or not", ALL)
def spectral_norm_moves(run):
    def build():
        model = Net()
        for block in model.blocks[1:4]:
            parametrizations.spectral_norm(block.up)
        return model

    engine = run.engine(build())
    found = []
    for step in range(3):

        def body(index):
            loss = engine(batch(index)).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
        engine.module.eval()
        with torch.no_grad():
            found.append(engine(batch(50)))
        engine.module.train()
    return found, values(engine.module)


@program(family, "`orthogonal` of each kind on square and tall weights", ALL[:3])
def orthogonal_kinds(run):
    def build():
        model = Net()
        for block, kind in zip(model.blocks, ("matrix_exp", "cayley", "householder"), strict=False):
            parametrizations.orthogonal(block.up, orthogonal_map=kind)
        return model

    return trained(run, build)


@program(family, "a parametrized weight is assigned between steps, its original is read, and `cached()` is around both")
def assigned_through_parametrization(run):
    def build():
        model = Net()
        for block in model.blocks[:3]:
            parametrize.register_parametrization(block.up, "weight", Symmetric())
        return model

    def after(model, step):
        if step == 1:
            with torch.no_grad():
                model.blocks[0].up.weight = model.blocks[1].up.weight * 0.9
        return model.blocks[0].up.parametrizations.weight.original.clone(), model.blocks[0].up.weight.clone()

    def forward(engine, x, step):
        with parametrize.cached():
            return engine(x) + engine(0.5 * x)

    return trained(run, build, after=after, forward=forward)


@program(family, "a parametrization is registered after wrapping, and removed two steps later")
def parametrized_in_the_middle(run):
    def before(model, step):
        if step == 1:
            parametrize.register_parametrization(model.blocks[2].up, "weight", Symmetric())
        if step == 3:
            parametrize.remove_parametrizations(model.blocks[2].up, "weight")

    return trained(run, before=before)


@program(family, "`weight_norm` of the old kind (hooks) is put on before wrapping and removed after it")
def old_weight_norm(run):
    def build():
        model = Net()
        nn.utils.weight_norm(model.blocks[1].up)
        return model

    return trained(run, build)


@program(family, "pruning before wrapping, a second mask on top in the middle (iterative pruning)")
def pruned_twice(run):
    def build():
        model = Net()
        for block in model.blocks:
            prune.l1_unstructured(block.up, "weight", 0.3)
        return model

    def after(model, step):
        if step == 1:
            for block in model.blocks[:2]:
                prune.random_unstructured(block.up, "weight", 0.2)

    return trained(run, build, after=after)


@program(family, "structured and global pruning before wrapping, masks are changed by hand in the middle")
def masks_changed(run):
    def build():
        model = Net()
        prune.ln_structured(model.blocks[0].up, "weight", 0.25, 2, 0)
        layers = [(block.down, "weight") for block in model.blocks]
        prune.global_unstructured(layers, prune.L1Unstructured, amount=0.4)
        return model

    def after(model, step):
        model.blocks[step].down.weight_mask[step] = 0
        return model.blocks[step].down.weight.clone()

    return trained(run, build, after=after)


# Calls with other tensors.


@program(family, "`functional_call` of the whole model with detached weights moved by noise, in each step", PLAIN)
def called_with_noise(run):
    def forward(engine, x, step):
        moved = {name: p.detach() + 0.01 for name, p in engine.module.named_parameters()}
        with torch.no_grad():
            target = functional_call(engine.module, moved, (x,))
        return engine(x) - 0.5 * target

    return trained(run, forward=forward)


@program(family, "`functional_call` of one block with half of its weights scaled, gradients come through", PLAIN)
def block_called_with_scaled(run):
    def forward(engine, x, step):
        model = engine.module
        y = model.blocks[0](model.first(x))
        block = model.blocks[1]
        y = functional_call(block, {"up.weight": block.up.weight * 0.5}, (y,))
        for block in model.blocks[2:]:
            y = block(y)
        return model.last(y)

    return trained(run, forward=forward)


@program(family, "`functional_call(strict=True)`, with ties and with a tuple of dictionaries", PLAIN)
def called_strictly(run):
    def forward(engine, x, step):
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        parts = (
            {n: w for n, w in weights.items() if "blocks" in n},
            {n: w for n, w in weights.items() if "blocks" not in n},
        )
        with torch.no_grad():
            y = functional_call(engine.module, tuple(parts), (x,), strict=True)
        return engine(x) + 0.1 * y

    return trained(run, forward=forward)


@program(family, "`torch.func.stack_module_state` of copies of two blocks, called by `vmap`, is a target", PLAIN)
def stacked_copies(run):
    def forward(engine, x, step):
        blocks = engine.module.blocks
        states, buffers = torch.func.stack_module_state([copy.deepcopy(blocks[0]), copy.deepcopy(blocks[1])])
        base = copy.deepcopy(blocks[0])
        states = {name: value.detach() for name, value in states.items()}
        y = torch.func.vmap(lambda s, b: functional_call(base, (s, b), (x,)))(states, buffers)
        return engine(x) - y.mean(0)

    return trained(run, forward=forward)


# Other modules in the middle.


@program(family, "a block is replaced by a frozen deep copy of itself, and put back two steps later", PLAIN)
def block_replaced_by_copy(run):
    kept = []

    def before(model, step):
        if step == 1:
            kept.append(model.blocks[2])
            model.blocks[2] = copy.deepcopy(model.blocks[2]).requires_grad_(False)
        if step == 3:
            model.blocks[2] = kept[0]

    return trained(run, before=before, steps=5)


@program(family, "two blocks change places between steps: `blocks[0], blocks[3] = blocks[3], blocks[0]`", PLAIN)
def blocks_change_places(run):
    def before(model, step):
        if step:
            model.blocks[0], model.blocks[3] = model.blocks[3], model.blocks[0]

    return trained(run, before=before)


@program(family, "a block is wrapped by a new module that scales it, after wrapping; and unwrapped again", PLAIN)
def block_wrapped_by_another(run):
    class Scales(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.inner = inner

        def forward(self, x):
            return 0.7 * self.inner(x)

    def before(model, step):
        if step == 1:
            model.blocks[1] = Scales(model.blocks[1])
        if step == 3:
            model.blocks[1] = model.blocks[1].inner

    return trained(run, before=before)


@program(family, "an `nn.Sequential` of the model's own blocks is made in each step, and called", PLAIN)
def sequential_of_blocks(run):
    def forward(engine, x, step):
        model = engine.module
        return nn.Sequential(model.first, *model.blocks[step % 3 :], model.last)(x)

    return trained(run, forward=forward)


@program(
    family,
    "dropout is put between blocks after wrapping: `blocks.insert(2, nn.Dropout())`",
    ALL[:3],
)
def dropout_inserted(run):
    def before(model, step):
        if step == 1:
            model.blocks.insert(2, nn.Dropout(0.3))
        if step == 3:
            del model.blocks[2]

    return trained(run, before=before)


@program(family, "a bias is taken away and put back as it was: `layer.bias = None`, then `layer.bias = kept`", PLAIN)
def bias_put_back(run):
    kept = []

    def before(model, step):
        if step == 1:
            kept.append(model.blocks[2].up.bias)
            model.blocks[2].up.bias = None
        if step == 3:
            model.blocks[2].up.bias = kept[0]

    return trained(run, before=before, steps=5)


@program(family, "weights of two layers are exchanged as objects: `a.weight, b.weight = b.weight, a.weight`", PLAIN)
def weights_exchanged(run):
    def before(model, step):
        if step == 2:
            a, b = model.blocks[0].up, model.blocks[3].down
            a.weight, b.weight = b.weight, a.weight

    return trained(run, before=before)


@program(family, "layers that were tied are untied by a new parameter with an optimizer of its own", PLAIN)
def untied_later(run):
    def build():
        model = Net()
        model.blocks[3].up.weight = model.blocks[0].up.weight
        return model

    engine = run.engine(build())
    model, found, other = engine.module, [], None
    for step in range(4):
        if step == 2:
            model.blocks[3].up.weight = nn.Parameter(model.blocks[0].up.weight.detach().clone())
            other = torch.optim.SGD([model.blocks[3].up.weight], 0.1)
        loss = engine(batch(step)).square().mean()
        loss.backward()
        if other is not None:
            other.step()
            other.zero_grad()
        found += [loss.item(), stepped(engine)]
    return found, values(model)


@program(
    family,
    "blocks are frozen and thawed in turn, between steps and between forward and backward",
    ALL[:3],
)
def frozen_in_turn(run):
    def before(model, step):
        for index, block in enumerate(model.blocks):
            block.requires_grad_(index % 3 != step % 3)

    def forward(engine, x, step):
        y = engine(x)
        engine.module.blocks[4].down.bias.requires_grad_(False)
        return y

    return trained(run, before=before, forward=forward, steps=6)


# Copies.


@program(family, "a deep copy of the model between forward and backward, which goes backward as well", PLAIN)
def copied_between_halves(run):
    copies = []

    def forward(engine, x, step):
        y = engine(x)
        other = copy.deepcopy(engine.module)
        other(x).square().mean().backward()
        copies.append(gradients(other))
        return y

    return trained(run, forward=forward), copies


@program(family, "a deep copy is made in a block's forward, of the block itself", ALL[:3])
def copied_in_forward(run):
    class Copies(Block):
        def forward(self, x):
            with torch.no_grad():
                other = copy.deepcopy(self.up)
                y = other(x)
            return x + self.down(torch.tanh(self.up(x))) + 0.1 * y

    return trained(run, net(Copies))


@program(family, "a deep copy of a model with hooks, parametrizations and ties is trained on by plain SGD", PLAIN)
def copied_with_everything(run):
    def build():
        model = Net()
        parametrizations.weight_norm(model.blocks[0].up)
        model.blocks[4].down.weight = model.blocks[3].down.weight
        model.blocks[1].register_forward_hook(lambda module, args, out: out * 0.9)
        return model

    engine = run.engine(build())
    found = [trained(run, engine=engine, steps=2)]
    other = copy.deepcopy(engine.module)
    optimizer = torch.optim.SGD(other.parameters(), 0.1)
    for step in range(2):
        loss = other(batch(step)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found, trained(run, engine=engine, steps=2), values(other)


@program(
    family,
    "pickles and files of a weight, its gradient, a layer, a list of all, an optimizer state",
    PLAIN,
)
def pieces_pickled(run):
    engine = run.engine()
    model = engine.module
    found = [trained(run, engine=engine, steps=1)]
    engine(batch(7)).square().mean().backward()
    things = {
        "weight": model.first.weight,
        "gradient": model.first.weight.grad,
        "layer": model.blocks[0].up,
        "list": list(model.parameters()),
        "states": engine.optimizer.state[model.first.weight],
        "data": model.last.weight.data,
        "view": model.last.weight[2:4],
    }
    for name, thing in things.items():
        if name != "view":
            file = io.BytesIO()
            torch.save(thing, file)
            file.seek(0)
            read = torch.load(file, weights_only=False)
        else:
            read = copy.copy(thing)
        found.append([name, dict(read.named_parameters()) if isinstance(read, nn.Module) else read])
    found.append(dict(pickle.loads(pickle.dumps(things["states"]))))
    found.append(copy.deepcopy(things["states"]))
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return found, trained(run, engine=engine, steps=1), values(model)


# Hooks that change gradients.


@program(family, "hooks on a weight replace its gradient in three ways, in their order, one returns None", ALL)
def three_hooks(run):
    engine = run.engine()
    w = engine.module.blocks[2].up.weight
    seen = []
    w.register_hook(lambda g: g * 0.3)
    w.register_hook(lambda g: seen.append(g.norm().item()))
    w.register_hook(lambda g: g.sign() * 1e-3)
    w.register_post_accumulate_grad_hook(lambda p: p.grad.add_(p.detach(), alpha=1e-3))
    found = []
    for step in range(3):

        def body(index):
            loss = engine(batch(index)).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
    return found, seen, values(engine.module)


@program(family, "a full backward hook on a block gives other gradients of its inputs, a pre-hook of its outputs", ALL)
def gradients_of_blocks_changed(run):
    engine = run.engine()
    engine.module.blocks[2].register_full_backward_hook(lambda module, inputs, outputs: (inputs[0] * 0.5 + 1e-4,))
    engine.module.blocks[3].register_full_backward_pre_hook(lambda module, outputs: (outputs[0].clamp(-1e-3, 1e-3),))
    found = []
    for step in range(3):

        def body(index):
            loss = engine(batch(index)).square().mean()
            loss.backward()
            return loss.item()

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
    return found, values(engine.module)


@program(family, "a hook on an activation writes to a weight of an earlier block in backward, through `.data`", PLAIN)
def weight_written_in_backward(run):
    def forward(engine, x, step):
        model = engine.module
        y = engine(x)

        def hook(g):
            model.last.bias.data.add_(g.mean(0))

        y.register_hook(hook)
        return y

    return trained(run, forward=forward)


@program(family, "a hook on a weight reads the gradient of another weight that came before", PLAIN)
def hook_reads_another_gradient(run):
    engine = run.engine()
    model = engine.module

    def hook(g):
        other = model.last.weight.grad
        return g if other is None else g + 0.1 * other

    model.first.weight.register_hook(hook)
    return trained(run, engine=engine)


@program(family, "gradients are exchanged between two weights in a post-accumulate hook of the later one", PLAIN)
def exchanged_in_hook(run):
    engine = run.engine()
    a, b = engine.module.blocks[0].up.weight, engine.module.blocks[4].up.weight

    def hook(p):
        if b.grad is not None:
            a.grad, b.grad = b.grad, a.grad

    a.register_post_accumulate_grad_hook(hook)
    return trained(run, engine=engine)


@program(family, "anomaly detection and deterministic mode around alternating steps, with multithreading off", ALL[:3])
def modes_in_turn(run):
    def forward(engine, x, step):
        torch.use_deterministic_algorithms(step % 2 == 0)
        torch.autograd.set_detect_anomaly(step % 2 == 1)
        torch.autograd.set_multithreading_enabled(step % 3 != 0)
        return engine(x)

    try:
        return trained(run, forward=forward)
    finally:
        torch.use_deterministic_algorithms(False)
        torch.autograd.set_detect_anomaly(False)


# Parts of a graph.


@program(family, "`torch.autograd.grad` by weights of two blocks, by an activation, then a backward, one graph", ALL)
def graph_in_parts(run):
    engine = run.engine()
    model, found = engine.module, []
    for step in range(3):

        def body(index):
            x = batch(index).requires_grad_()
            middle = model.blocks[1](model.blocks[0](model.first(x)))
            y = middle
            for block in model.blocks[2:]:
                y = block(y)
            loss = model.last(y).square().mean()
            some = torch.autograd.grad(
                loss, [model.blocks[3].up.weight, model.blocks[1].down.weight], retain_graph=True
            )
            (of_middle,) = torch.autograd.grad(loss, middle, retain_graph=True)
            (loss + 0.1 * of_middle.square().sum()).backward()
            return [g.clone() for g in some], of_middle, loss.item(), x.grad

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
    return found, values(model)


@program(family, "`retain_graph` in a loop of five backwards with growing weights, the last one frees", ALL)
def five_backwards(run):
    engine = run.engine()
    found = []
    for step in range(2):

        def body(index):
            y = engine(batch(index))
            for turn in range(5):
                (y.square().mean() * (turn + 1)).backward(retain_graph=turn < 4)
            return y

        found += run.accumulate(engine, [2 * step, 2 * step + 1], body)
        found.append(stepped(engine))
    return found, values(engine.module)


@program(family, "gradients by `materialize_grads` and `allow_unused`, of a block that was not used", PLAIN)
def unused_by_grad(run):
    def forward(engine, x, step):
        model = engine.module
        y = model.last(model.blocks[0](model.first(x)))
        asked = [model.blocks[1].up.weight, model.blocks[0].up.weight]
        zeros = torch.autograd.grad(y.sum(), asked, retain_graph=True, materialize_grads=True)
        nothing = torch.autograd.grad(y.sum(), asked, retain_graph=True, allow_unused=True)
        assert nothing[0] is None
        return y + sum(g.sum() for g in zeros) * 1e-4

    return trained(run, forward=forward)


@program(family, "a gradient penalty by the input within a block that is an energy, over two layers", ALL)
def penalty_within_block(run):
    class Penalised(Block):
        def forward(self, x):
            with torch.enable_grad():
                z = x.detach().requires_grad_()
                e = torch.tanh(self.down(torch.tanh(self.up(z)))).sum()
                (slope,) = torch.autograd.grad(e, z, create_graph=True)
            return x + self.down(torch.tanh(self.up(x))) + 0.1 * slope.norm(dim=1, keepdim=True)

    return trained(run, net(Penalised))


class Once(torch.autograd.Function):
    """Saves its weight, and its backward is a differentiable function of it."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return F.linear(x, weight)

    @staticmethod
    def backward(ctx, grad):
        x, weight = ctx.saved_tensors
        return F.linear(grad, weight.t()), grad.t() @ x


@program(family, "a Function that saves its weight is differentiated twice within a block", ALL)
def function_twice(run):
    class Twice(Block):
        def forward(self, x):
            with torch.enable_grad():
                z = x if x.requires_grad else x.detach().requires_grad_()
                (slope,) = torch.autograd.grad(torch.tanh(Once.apply(z, self.up.weight)).sum(), z, create_graph=True)
            return x + self.down(slope) + torch.tanh(Once.apply(x, self.up.weight))

    return trained(run, net(Twice))


@program(family, "a gradient penalty over the model: a typed error, and training goes on", PLAIN)
def penalty_over_model(run):
    engine = run.engine()
    model, found = engine.module, []
    for step in range(3):
        x = batch(step).requires_grad_()
        y = engine(x).square().mean()
        if run.place.has_engine and step == 1:

            def penalised(y=y, x=x):
                (slope,) = torch.autograd.grad(y, x, create_graph=True)
                (y + slope.square().sum()).backward()

            assert run.place.attempt(penalised) != "nothing raised"
            engine.optimizer.zero_grad()
            y = engine(x).square().mean()
        y.backward()
        found += [y.item(), stepped(engine)]
    return found, values(model)


# Threads.


@program(family, "a thread reads all weights and gradients' norms all the time while the loop trains", PLAIN)
def read_beside_the_loop(run):
    engine = run.engine()
    model = engine.module
    ended, seen = threading.Event(), []

    def read():
        while not ended.is_set():
            seen.append([bool(torch.isfinite(p.detach().clone()).all()) for p in model.parameters()])

    thread = threading.Thread(target=read)
    thread.start()
    try:
        found = trained(run, engine=engine, steps=6)
    finally:
        ended.set()
        thread.join()
    return found, all(all(each) for each in seen)


# Kinds of tensors.


@program(
    family, "a model with complex parameters", refused=dict.fromkeys(PLAIN, "complex64; only floating-point parameters")
)
def complex_parameters(run):
    class Turns(Block):
        def __init__(self):
            super().__init__()
            self.turn = nn.Parameter(torch.polar(torch.ones(WIDTH), torch.linspace(0, 1, WIDTH)))

        def forward(self, x):
            return x + self.down(torch.view_as_real(self.turn * self.up(x)).sum(-1))

    return trained(run, net(Turns))


@family.works("sparse gradients of an embedding, `Embedding(sparse=True)`, are read and stepped: they are dense here")
def sparse_table(place):
    class Embeds(Block):
        def __init__(self):
            super().__init__()
            self.table = nn.Embedding(50, WIDTH, sparse=True)

        def forward(self, x):
            return x + self.table((x[:, 0].abs() * 10).long() % 50)

    engine = place.wrap(net(Embeds)(), optimizer=torch.optim.SGD, lr=0.05)
    found = []
    for step in range(3):
        loss = engine(batch(step, 24)).square().mean()
        loss.backward()
        gradient = engine.module.blocks[1].table.weight.grad
        found += [loss.item(), gradient.to_dense() if gradient.is_sparse else gradient.clone()]
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


class Tagged(torch.Tensor):
    """A subclass that survives operations."""


@program(family, "batches, targets and hidden states are of a subclass of Tensor, with attributes", ALL)
def subclass_everywhere(run):
    def forward(engine, x, step):
        return engine(x.as_subclass(Tagged))

    found, last = trained(run, forward=forward)
    return found, last


@program(
    family,
    "a block makes a nested tensor of jagged rows: a second run of it would make another kind",
    refused=dict.fromkeys(PLAIN[1:], "Do not recompute it: activations="),
)
def nested_rows(run):
    class Nested(Block):
        def forward(self, x):
            parts = torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 7, 60, len(x)]))
            y = self.down(torch.tanh(self.up(parts)))
            return x + y.values()

    return trained(run, net(Nested))
