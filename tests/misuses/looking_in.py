"""Looks into a model and its training, by hooks and by tools, and conversions of the whole: what a debugging session, a
logger or a library does around a loop."""

from __future__ import annotations

import collections
import contextlib
import copy
import gc
import io
import logging
import pickle
import weakref

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset, WeightedRandomSampler

from misuses.case import Family
from misuses.place import gradients, values
from misuses.strangers import WIDTH, Block, Exact, Net, batch, trained

family = Family("looking in")


def same_bits(title, **options):
    return family.works(title, rtol=0.0, atol=0.0, **options)


def wrapped(place, net=None, **options):
    engine = place.wrap(Net() if net is None else net, **{"optimizer": Exact, "lr": 0.05, **options})
    return engine, engine.module


def step_of(engine, index, loss=None):
    engine.optimizer.zero_grad()
    loss = engine(batch(index)).square().mean() if loss is None else loss
    loss.backward()
    engine.optimizer.step()
    return loss.item()


# Hooks.


@same_bits("forward pre-hooks with kwargs, prepended, and `always_call` ones after a forward that raises")
def kinds_of_forward_hooks(place):
    seen = []

    class Raising(Block):
        def forward(self, x, *, scale=1.0):
            if scale == 0.0:
                raise ValueError("no scale")
            return super().forward(x) * scale

    net = Net(Raising)
    engine, net = wrapped(place, net)
    block = net.blocks[2]
    block.register_forward_pre_hook(lambda m, args, kwargs: (args, {**kwargs, "scale": 0.5}), with_kwargs=True)
    block.register_forward_pre_hook(lambda m, args: seen.append("first"), prepend=True)
    block.register_forward_hook(lambda m, args, kwargs, out: out + kwargs["scale"], with_kwargs=True)
    block.register_forward_hook(lambda m, args, out: seen.append(out is None), always_call=True)
    found = [step_of(engine, 0)]
    with contextlib.suppress(ValueError):
        net.blocks[0](batch(0), scale=0.0)
    net.blocks[1].register_forward_hook(lambda m, args, out: seen.append("always"), always_call=True)
    with contextlib.suppress(ValueError):
        net.blocks[1](batch(0), scale=0.0)
    found.append(step_of(engine, 1))
    return found, seen, values(net)


@same_bits("hooks of all modules: forward, pre-forward, backward and pre-backward, put on and removed in a run")
def global_hooks(place):
    of_torch = torch.nn.modules.module
    counts = collections.Counter()

    def count(name):
        def hook(module, *more):
            counts[f"{name} {type(module).__name__}"] += 1

        return hook

    engine, net = wrapped(place)
    found = [step_of(engine, 0)]
    handles = [
        of_torch.register_module_forward_pre_hook(count("pre")),
        of_torch.register_module_forward_hook(count("forward")),
        of_torch.register_module_full_backward_pre_hook(count("backward pre")),
        of_torch.register_module_full_backward_hook(count("backward")),
    ]
    found.append(step_of(engine, 1))
    for handle in handles:
        handle.remove()
    found.append(step_of(engine, 2))
    return found, dict(counts), values(net)


@same_bits("hooks of registrations: `register_module_parameter_registration_hook`, and of buffers and modules")
def registration_hooks(place):
    of_torch, seen = torch.nn.modules.module, []
    handles = [
        of_torch.register_module_parameter_registration_hook(lambda m, name, p: seen.append(("parameter", name))),
        of_torch.register_module_buffer_registration_hook(lambda m, name, b: seen.append(("buffer", name))),
        of_torch.register_module_module_registration_hook(lambda m, name, s: seen.append(("module", name))),
    ]
    net = Net()
    built = len(seen)
    engine, net = wrapped(place, net)
    step_of(engine, 0)
    step_of(engine, 1)
    for handle in handles:
        handle.remove()
    return built, seen, values(net)


@same_bits("hooks on a tensor that several losses share, `retain_grad` in the middle, hooks removed in a hook")
def tensor_hooks(place):
    engine, net = wrapped(place)
    found = []
    for step in range(3):
        hidden = net.first(batch(step))
        hidden.retain_grad()
        handles = []

        def once(gradient, handles=handles, found=found):
            found.append(gradient.norm().item())
            handles[0].remove()
            return gradient * 0.5

        handles.append(hidden.register_hook(once))
        middle = net.blocks[1](net.blocks[0](hidden))
        middle.retain_grad()
        loss = net.last(net.blocks[2](middle)).square().mean() + hidden.abs().mean()
        step_of(engine, step, loss)
        found += [hidden.grad.clone(), middle.grad.clone()]
    return found, values(net)


@same_bits("`loss.grad_fn` is walked by hand, nodes are counted by `next_functions`, a hook is put on inner nodes")
def graph_walked(place):
    engine, net = wrapped(place)
    found = []
    for step in range(2):
        loss = engine(batch(step)).square().mean()
        names, waiting, known = collections.Counter(), [loss.grad_fn], set()
        while waiting:
            node = waiting.pop()
            if node is None or node in known:
                continue
            known.add(node)
            names[node.name()] += 1
            if node.name() == "TanhBackward0":
                node.register_hook(lambda inputs, outputs: (inputs[0] * 0.9,))
            waiting += [other for other, _ in node.next_functions]
        found += [names["TanhBackward0"], names["AddmmBackward0"], step_of(engine, step, loss)]
    return found, values(net)


@same_bits("`torch.autograd.graph.register_multi_grad_hook` over activations, and a node's metadata")
def multi_hooks_over_activations(place):
    engine, net = wrapped(place)
    found = []
    for step in range(2):
        kept = []
        hooks = [b.register_forward_hook(lambda m, args, out, kept=kept: kept.append(out)) for b in net.blocks]
        loss = engine(batch(step)).square().mean()
        torch.autograd.graph.register_multi_grad_hook(kept, lambda all_: found.append([g.norm().item() for g in all_]))
        loss.grad_fn.metadata["step"] = step
        step_of(engine, step, loss)
        for hook in hooks:
            hook.remove()
    return found, values(net)


@same_bits("post-accumulate hooks count the gradients of each micro-batch, and clip each parameter by itself")
def clipped_as_they_come(place):
    engine, net = wrapped(place)
    seen = collections.Counter()
    for name, p in net.named_parameters():

        def hook(p, name=name):
            seen[name] += 1
            p.grad.clamp_(-1e-3, 1e-3)

        p.register_post_accumulate_grad_hook(hook)
    for step in range(2):
        engine.optimizer.zero_grad()
        for micro in range(2):
            engine(batch(2 * step + micro)).square().mean().backward()
        engine.optimizer.step()
    return dict(seen), values(net)


@same_bits("hooks of state dicts: `register_state_dict_pre_hook`, `register_load_state_dict_post_hook`, a renamed key")
def hooks_of_state_dicts(place):
    net, seen = Net(), []
    net.blocks[1].register_state_dict_pre_hook(lambda module, prefix, keep: seen.append(prefix))
    net.register_state_dict_post_hook(lambda module, state, prefix, local: state.update({"extra": torch.ones(1)}))
    net.blocks[0].register_load_state_dict_post_hook(lambda module, keys: seen.append(len(keys.missing_keys)))

    def renamed(module, state, prefix, *more):
        for key in [key for key in state if key.startswith("old.")]:
            state[key.replace("old.", "first.")] = state.pop(key)

    net.register_load_state_dict_pre_hook(renamed)
    engine, net = wrapped(place, net)
    found = [step_of(engine, 0)]
    state = {key.replace("first.", "old."): value.clone() for key, value in net.state_dict().items()}
    found.append(step_of(engine, 1))
    keys = net.load_state_dict(state, strict=False)
    found.append(step_of(engine, 2))
    return found, seen, list(keys.missing_keys), list(keys.unexpected_keys), values(net)


@same_bits("extra state: `get_extra_state` and `set_extra_state` of a module that counts")
def extra_state(place):
    class Counting(Block):
        count = 0

        def forward(self, x):
            self.count += 1
            return super().forward(x)

        def get_extra_state(self):
            return {"count": self.count, "tensor": torch.tensor(self.count)}

        def set_extra_state(self, state):
            self.count = state["count"]

    engine, net = wrapped(place, Net(Counting))
    step_of(engine, 0)
    kept = copy.deepcopy(net.state_dict())
    step_of(engine, 1)
    step_of(engine, 2)
    net.load_state_dict(kept)
    return [block.count for block in net.blocks], [k for k in kept if "extra" in k], values(net)


# Tools.


@same_bits("a summary of layers: hooks on all modules collect shapes and numbers of parameters, then go")
def summary_of_layers(place):
    engine, net = wrapped(place)
    rows, handles = [], []
    for name, module in net.named_modules():

        def hook(module, args, out, name=name):
            own = sum(p.numel() for p in module.parameters(recurse=False))
            size = sum(p.numel() * p.element_size() for p in module.parameters())
            rows.append((name, type(module).__name__, list(out.shape), own, size, module.training))

        handles.append(module.register_forward_hook(hook))
    net.eval()
    with torch.no_grad():
        net(torch.zeros(2, WIDTH))
    net.train()
    for handle in handles:
        handle.remove()
    return rows, step_of(engine, 0), values(net)


@same_bits("histograms and norms of weights, gradients and updates are logged in each step")
def logged_statistics(place):
    engine, net = wrapped(place)
    rows = []
    for step in range(3):
        before = {name: p.detach().clone() for name, p in net.named_parameters()}
        engine.optimizer.zero_grad()
        engine(batch(step)).square().mean().backward()
        for name, p in net.named_parameters():
            rows.append((name, torch.histc(p.grad, 8).tolist(), p.grad.abs().max().item(), p.std().item()))
        engine.optimizer.step()
        for name, p in net.named_parameters():
            rows.append(((p.detach() - before[name]).norm() / before[name].norm()).item())
    return rows, values(net)


@same_bits("`named_parameters()` is iterated once before the loop, and its list is used in all steps")
def list_from_before_the_loop(place):
    engine, net = wrapped(place)
    listed, by_name = list(net.named_parameters()), dict(net.named_parameters())
    rows = []
    for step in range(3):
        step_of(engine, step)
        rows += [(name, p.sum().item(), by_name[name] is p) for name, p in listed]
    return rows


@same_bits("anomaly detection around whole steps, with a clean run, and a check of NaN by hooks on all outputs")
def anomaly_detection(place):
    engine, net = wrapped(place)
    bad = []
    for module in net.modules():
        module.register_forward_hook(lambda m, args, out: bad.append(m) if not torch.isfinite(out).all() else None)
    with torch.autograd.detect_anomaly(check_nan=True):
        found = [step_of(engine, step) for step in range(2)]
    return found, len(bad), values(net)


@same_bits("a profiler with a schedule, `record_function` in the loop and in a block, memory and shapes on")
def profiled_with_a_schedule(place):
    from torch.profiler import ProfilerActivity, profile, record_function, schedule

    class Named(Block):
        def forward(self, x):
            with record_function("a block of mine"):
                return super().forward(x)

    engine, net = wrapped(place, Net(Named))
    ready = []
    with profile(
        activities=[ProfilerActivity.CPU],
        schedule=schedule(wait=1, warmup=1, active=2),
        record_shapes=True,
        profile_memory=True,
        on_trace_ready=lambda p: ready.append({e.key: e.count for e in p.key_averages() if e.key == "a block of mine"}),
    ) as profiler:
        for step in range(4):
            with record_function("step"):
                step_of(engine, step)
            profiler.step()
    return ready, values(net)


@same_bits("modes of the user's that log: operators by `TorchDispatchMode`, functions by `TorchFunctionMode`")
def logging_modes(place):
    products = collections.Counter()

    class Operators(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            name = func.__name__
            if "addmm" in name or "tanh" in name:
                products[name] += 1
            return func(*args, **(kwargs or {}))

    class Functions(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            if func in (F.linear, torch.tanh):
                products[func.__name__] += 1
            return func(*args, **(kwargs or {}))

    engine, net = wrapped(place)
    found = []
    for step in range(2):
        engine.optimizer.zero_grad()
        with Operators(), Functions():
            loss = engine(batch(step)).square().mean()
            loss.backward()
        engine.optimizer.step()
        found.append(loss.item())
    return found, dict(products), values(net)


@same_bits("a debugger's look: `repr` of everything, `vars`, `dir`, `gc.get_objects`, weak references to parameters")
def debuggers_look(place):
    engine, net = wrapped(place)
    found = [step_of(engine, 0)]
    for module in net.modules():
        repr(module), dir(module), sorted(vars(module))
        for p in module.parameters():
            repr(p), str(p), dir(p), vars(p)
    watched = [weakref.ref(p) for p in net.parameters()]
    sum(isinstance(item, nn.Parameter) for item in gc.get_objects())
    found += [step_of(engine, 1), all(ref() is p for ref, p in zip(watched, net.parameters(), strict=True))]
    repr(engine.optimizer), str(engine.optimizer)
    gc.collect()
    return found, values(net)


@same_bits("a logger holds outputs and losses of old steps as they are, with their graphs, and reads them later")
def graphs_kept_by_a_logger(place):
    engine, net = wrapped(place)
    kept = []
    for step in range(4):
        output = engine(batch(step))
        loss = output.square().mean()
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        kept.append((output, loss))
    return [loss.item() for _, loss in kept], [output.detach() for output, _ in kept], values(net)


# The whole model, converted, copied and saved.


@same_bits("`parameters_to_vector` in each step, moved by noise, given back by `vector_to_parameters`, with gradients")
def vector_of_parameters(place):
    engine, net = wrapped(place)
    noise = torch.Generator().manual_seed(2)
    for step in range(3):
        engine.optimizer.zero_grad()
        engine(batch(step)).square().mean().backward()
        flat = nn.utils.parameters_to_vector([p.grad for p in net.parameters()])
        vector = nn.utils.parameters_to_vector(net.parameters()).detach()
        vector = vector - 0.01 * flat + 1e-3 * torch.randn(len(vector), generator=noise)
        nn.utils.vector_to_parameters(vector, net.parameters())
    return values(net), gradients(net)


@same_bits("foreach operations over weights and gradients by hand: an Adam of lists, without the engine's step")
def adam_by_foreach(place):
    engine, net = wrapped(place)
    parameters = list(net.parameters())
    first, second = (
        [torch.zeros_like(p.detach()) for p in parameters],
        [torch.zeros_like(p.detach()) for p in parameters],
    )
    for step in range(3):
        net.zero_grad()
        engine(batch(step)).square().mean().backward()
        slopes = [p.grad for p in parameters]
        with torch.no_grad():
            torch._foreach_lerp_(first, slopes, 0.1)
            torch._foreach_mul_(second, 0.99)
            torch._foreach_addcmul_(second, slopes, slopes, 0.01)
            roots = torch._foreach_sqrt(second)
            torch._foreach_add_(roots, 1e-3)
            torch._foreach_addcdiv_(parameters, first, roots, -1e-2)
    return values(net)


@same_bits("copies: `deepcopy` in the middle of accumulation, `pickle`, `torch.save` of the whole, each trained on")
def copies_in_accumulation(place):
    engine, net = wrapped(place)
    engine(batch(0)).square().mean().backward()
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    others = [copy.deepcopy(net), pickle.loads(pickle.dumps(net)), torch.load(file, weights_only=False)]
    found = [[p.grad for p in other.parameters()] for other in others]
    for other in others:
        optimizer = torch.optim.SGD(other.parameters(), 0.1)
        other(batch(1)).square().mean().backward()
        optimizer.step()
    engine.optimizer.step()
    return found, [values(other) for other in others], values(net)


@same_bits(
    "`copy.deepcopy` of a list of a model, its parameters and its optimizer's groups keeps what is one object one"
)
def deepcopy_keeps_identity(place):
    engine, net = wrapped(place)
    step_of(engine, 0)
    other, listed = copy.deepcopy((net, list(net.parameters())))
    same = [a is b for a, b in zip(other.parameters(), listed, strict=True)]
    with torch.no_grad():
        listed[0].zero_()
    return same, values(other), step_of(engine, 1), values(net)


@same_bits(
    "`load_state_dict(strict=False)` of a part in each step, with a tensor that is not contiguous and one of float64"
)
def odd_state_dicts(place):
    engine, net = wrapped(place)
    found = []
    for step in range(3):
        found.append(step_of(engine, step))
        state = {"first.weight": batch(step, WIDTH).t(), "last.bias": torch.ones(WIDTH, dtype=torch.float64) * step}
        keys = net.load_state_dict(state, strict=False)
        found.append(len(keys.missing_keys))
    return found, values(net)


@same_bits("`requires_grad_` flips of single weights between forward and backward, between micro-batches and in hooks")
def flips_between(place):
    engine, net = wrapped(place)
    found = []
    for step in range(3):
        engine.optimizer.zero_grad()
        loss = engine(batch(step)).square().mean()
        net.blocks[step].up.weight.requires_grad_(False)
        loss.backward()
        found.append([name for name, g in gradients(net).items() if g is None])
        net.last.requires_grad_(step % 2 == 0)
        engine(batch(step + 10)).square().mean().backward()
        net.blocks[step].up.weight.requires_grad_(True)
        found.append([name for name, g in gradients(net).items() if g is None])
        engine.optimizer.step()
        net.last.requires_grad_(True)
    return found, values(net)


@same_bits("train and eval of parts flip in each step, with dropout and BatchNorm, `module.training` set by hand")
def modes_flip(place):
    torch.manual_seed(0)
    net = nn.Sequential(Block(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.3), Block(), nn.BatchNorm1d(WIDTH), Block())
    engine, net = wrapped(place, net)
    found = []
    for step in range(4):
        net.train(step % 2 == 0)
        net[2].training = True
        net[4].eval()
        torch.manual_seed(step)
        found.append(step_of(engine, step))
    return found, values(net)


@same_bits(
    "`model.to(device, non_blocking=True)`, `.float()`, `.cpu()`, `.requires_grad_()`, `.type(torch.float32)` chained"
)
def chained_conversions(place):
    engine, net = wrapped(place)
    found = [step_of(engine, 0)]
    again = net.to(torch.device("cpu"), non_blocking=True).float().cpu().requires_grad_().type(torch.float32).train()
    found += [again is net, step_of(engine, 1)]
    net.blocks[2].to(torch.float32)
    net.last.to("cpu", dtype=torch.float32)
    return found, step_of(engine, 2), values(net)


@same_bits("a second model shares some of the model's layers by name, is saved whole, and read into a third")
def shared_layers_saved(place):
    engine, net = wrapped(place)
    step_of(engine, 0)
    second = nn.ModuleDict({"body": net.blocks, "head": nn.Linear(WIDTH, 2)})
    nn.init.ones_(second["head"].weight), nn.init.zeros_(second["head"].bias)
    step_of(engine, 1)
    third = nn.ModuleDict({"body": nn.ModuleList(Block() for _ in range(5)), "head": nn.Linear(WIDTH, 2)})
    third.load_state_dict(second.state_dict())
    return values(third), [name for name, _ in second.named_parameters()], step_of(engine, 2)


# Data.


class Squares(Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return batch(index, 1)[0], index % 3


class Stream(IterableDataset):
    def __iter__(self):
        info = torch.utils.data.get_worker_info()
        number, count = (0, 1) if info is None else (info.id, info.num_workers)
        return (batch(index, 1)[0] for index in range(number, 8, count))


@same_bits(
    "a `DataLoader` with forked workers, a sampler with weights, a `collate_fn` and a `worker_init_fn`, three epochs"
)
def loader_with_everything(place):
    def collate(items):
        return torch.stack([x for x, _ in items]), torch.tensor([y for _, y in items])

    sampler = WeightedRandomSampler([0.5 + i % 3 for i in range(12)], 8, generator=torch.Generator().manual_seed(1))
    loader = DataLoader(
        Squares(), 4, sampler=sampler, num_workers=2, collate_fn=collate, worker_init_fn=lambda number: None
    )
    engine, net = wrapped(place)
    found = []
    for _ in range(3):
        for x, y in loader:
            engine.optimizer.zero_grad()
            loss = F.cross_entropy(engine(x), y)
            loss.backward()
            engine.optimizer.step()
            found.append(loss.item())
    return found, values(net)


@same_bits("an endless loader of a stream, two loaders zipped, one left in the middle of its epoch")
def loaders_zipped(place):
    engine, net = wrapped(place)
    stream = iter(DataLoader(Stream(), 2, num_workers=1, prefetch_factor=1))
    found = []
    for (x,), more in zip(DataLoader(TensorDataset(batch(3, 8)), 2), stream, strict=False):
        found.append(step_of(engine, 0, engine(torch.cat([x, more])).square().mean()))
        if len(found) == 3:
            break
    return found, values(net)


# Precision.


@same_bits("autocast in a decorator, nested and switched off for a block, with fp32 weights")
def nested_autocast(place):
    class Careful(Block):
        @torch.autocast("cpu", enabled=False)
        def forward(self, x):
            return super().forward(x.float())

    class Cast(Net):
        def __init__(self):
            super().__init__()
            self.blocks[2] = Careful()

        @torch.autocast("cpu", torch.bfloat16)
        def forward(self, x):
            return super().forward(x).float()

    return trained(place, Cast())


@same_bits("autocast with weights that are used twice in one region (its cache), and `cache_enabled=False`")
def autocast_with_a_cache(place):
    found = []
    for cached in (True, False):

        def call(model, x, cached=cached):
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=cached):
                y = model(model(x))
                with torch.no_grad():
                    more = model(x)
            return (y + more).float()

        found.append(trained(place, Net(), call=call))
    return found


@same_bits("`GradScaler` with accumulation, clipping after `unscale_`, and a scheduler that steps if the scale held")
def scaler_with_everything(place):
    engine, net = wrapped(place)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    schedule, rates = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5), []
    for step in range(5):
        for micro in range(2):
            loss = engine(batch(2 * step + micro)).square().mean() / 2
            scaler.scale(loss * (float("inf") if step == 2 and micro else 1.0)).backward()
        scaler.unscale_(engine.optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1e6)
        before = scaler.get_scale()
        scaler.step(engine.optimizer)
        scaler.update()
        engine.optimizer.zero_grad()
        if scaler.get_scale() >= before:
            schedule.step()
        rates.append((engine.optimizer.param_groups[0]["lr"], scaler.get_scale()))
    return rates, values(net)


@same_bits("`GradScaler` state dict goes into a new one in the middle of a run")
def scaler_saved(place):
    engine, net = wrapped(place)
    scaler = torch.amp.GradScaler("cpu", init_scale=16.0, growth_interval=1)
    for step in range(4):
        engine.optimizer.zero_grad()
        scaler.scale(engine(batch(step)).square().mean()).backward()
        scaler.step(engine.optimizer)
        scaler.update()
        state = scaler.state_dict()
        scaler = torch.amp.GradScaler("cpu")
        scaler.load_state_dict(state)
    return scaler.get_scale(), values(net)


@same_bits("logging of everything at level DEBUG changes nothing and prints no error")
def logging_at_debug(place):
    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    logging.getLogger().addHandler(handler)
    logging.getLogger().setLevel(logging.DEBUG)
    engine, net = wrapped(place)
    found = [step_of(engine, step) for step in range(2)]
    logging.getLogger().removeHandler(handler)
    return found, "Error" in stream.getvalue(), values(net)
