"""Parts of torch that look into modules and parameters: ``func``, ``compile``, ``jit``, ``fx``, ``export``."""

import copy

import torch
from tiny import Block, Tiny, loss_of
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune

from misuses.case import Family
from misuses.place import VOCAB, data, gradients, losses, small, train, values

family = Family(
    "torch's features",
    preload=("torch.fx.experimental.proxy_tensor", "torch.export"),
)


def _mlp(make=lambda: nn.Linear(48, 48), layers=12):
    torch.manual_seed(1)
    return nn.Sequential(*(nn.Sequential(make(), nn.Tanh()) for _ in range(layers)))


def _trained(place, model, steps=2, prepare=None):
    engine = place.wrap(model)
    if prepare is not None:
        prepare(model)
    torch.manual_seed(2)
    found = []
    for _ in range(steps):
        loss = engine(torch.randn(4, 48)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found, values(model)


# torch.func


@family.works("`torch.func.functional_call(model, parameters, x)` with the model's own parameters")
def functional_call(place):
    engine = place.small()
    tokens, targets = data(1)[0]
    parameters = dict(engine.module.named_parameters())
    loss = loss_of(torch.func.functional_call(engine.module, parameters, (tokens,)), targets)
    loss.backward()
    return loss, gradients(engine.module)


@family.works("`functional_call` with other tensors; the model is untouched afterwards")
def functional_call_with_others(place):
    engine = place.small()
    tokens, _ = data(1)[0]
    parameters = {name: torch.full_like(p, 0.01) for name, p in engine.module.named_parameters()}
    found = torch.func.functional_call(engine.module, parameters, (tokens,))
    return found, train(engine, 2), values(engine.module)


@family.works("`functional_call` with a few parameters replaced (fast weights)")
def functional_call_in_part(place):
    engine = place.small()
    tokens, targets = data(1)[0]
    fast = {"head.weight": engine.module.head.weight * 0.5}
    loss_of(torch.func.functional_call(engine.module, fast, (tokens,)), targets).backward()
    return gradients(engine.module)


@family.works_or_refused("`torch.func.grad` over `functional_call`", "create_graph")
def func_grad(place):
    engine = place.small()
    tokens, targets = data(1)[0]
    parameters = {name: p.detach() for name, p in engine.module.named_parameters()}

    def loss(ps):
        return loss_of(torch.func.functional_call(engine.module, ps, (tokens,)), targets)

    return torch.func.grad(loss)(parameters)


@family.works_or_refused("per-sample gradients: `vmap(grad(...))`", "create_graph")
def func_vmap(place):
    model = _mlp()
    place.wrap(model)
    torch.manual_seed(2)
    parameters = {name: p.detach() for name, p in model.named_parameters()}

    def loss(ps, x):
        return torch.func.functional_call(model, ps, (x.unsqueeze(0),)).square().mean()

    return torch.func.vmap(torch.func.grad(loss), in_dims=(None, 0))(parameters, torch.randn(5, 48))


@family.works("`torch.func.vmap(model)` over a batch")
def vmap_of_model(place):
    model = _mlp()
    place.wrap(model)
    torch.manual_seed(2)
    with torch.no_grad():
        return torch.func.vmap(model)(torch.randn(5, 48))


@family.works_or_refused("`torch.func.jacrev(model)`, `jacfwd`, by the input", "create_graph")
def jacobian(place):
    model = _mlp()
    place.wrap(model)
    torch.manual_seed(2)
    x = torch.randn(48)
    return torch.func.jacrev(model)(x), torch.func.jacfwd(model)(x)


@family.works_or_refused("`torch.func.vjp(model, x)`: forward, and what it gives called later", "create_graph")
def func_vjp(place):
    model = _mlp()
    place.wrap(model)
    torch.manual_seed(2)
    output, pull_back = torch.func.vjp(model, torch.randn(3, 48))
    return output, pull_back(torch.ones_like(output))


@family.works("`torch.autograd.functional.jacobian(model, x)`, `hessian` of a sum")
def autograd_jacobian(place):
    model = _mlp(layers=10)
    place.wrap(model)
    torch.manual_seed(2)
    return torch.autograd.functional.jacobian(model, torch.randn(48))


@family.works_or_refused("`torch.autograd.functional.hessian`", "create_graph")
def autograd_hessian(place):
    model = _mlp(layers=10)
    place.wrap(model)
    torch.manual_seed(2)
    return torch.autograd.functional.hessian(lambda x: model(x).square().sum(), torch.randn(48))


@family.works("`torch.func.stack_module_state` of a wrapped and an ordinary model (an ensemble)")
def stack_module_state(place):
    model, twin = _mlp(), _mlp()
    place.wrap(model)
    return torch.func.stack_module_state([model, twin])[0]


@family.works("forward-mode AD: `torch.autograd.forward_ad` through the model")
def forward_mode(place):
    model = _mlp()
    place.wrap(model)
    torch.manual_seed(2)
    with torch.autograd.forward_ad.dual_level():
        x = torch.autograd.forward_ad.make_dual(torch.randn(2, 48), torch.randn(2, 48))
        return torch.autograd.forward_ad.unpack_dual(model(x)).tangent


@family.works("`torch.nn.utils.stateless.functional_call`")
def stateless(place):
    engine = place.small()
    tokens, _ = data(1)[0]
    parameters = {name: p.detach() * 0.9 for name, p in engine.module.named_parameters()}
    return torch.nn.utils.stateless.functional_call(engine.module, parameters, (tokens,))


# Compilers and tracers


@family.works("`torch.compile(model, backend='eager')`", seconds=120, places=("torch", "ram"))
def compiled_model_eager(place):
    engine = place.wrap(small(1))
    model = torch.compile(engine.module, backend="eager")
    found = []
    for loss in losses(engine, 2, model):
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found, values(engine.module)


@family.works("`torch.compile(model, backend='aot_eager')`", seconds=120, places=("torch", "ram"))
def compiled_model(place):
    engine = place.wrap(small(2))
    model = torch.compile(engine.module, backend="aot_eager")
    found = []
    for loss in losses(engine, 2, model):
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found, values(engine.module)


@family.works("`model.compile(backend='eager')` before wrapping", seconds=120, places=("torch", "ram"))
def compiled_before_wrapping(place):
    model = small(1)
    model.compile(backend="eager")
    engine = place.wrap(model)
    return train(engine, 2), values(model)


@family.works("`model.blocks[i] = torch.compile(block)` before wrapping", seconds=120, places=("torch", "ram"))
def compiled_blocks_before(place):
    model = small(1)
    for index, block in enumerate(model.blocks):
        model.blocks[index] = torch.compile(block, backend="eager")
    engine = place.wrap(model)
    return train(engine, 2), values(model)


@family.works("`block.compile(backend='eager')` after wrapping", seconds=120, places=("torch", "ram"))
def compiled_blocks_after(place):
    model = small(1)
    engine = place.wrap(model)
    for block in model.blocks:
        block.compile(backend="eager")
    return train(engine, 2), values(model)


@family.works_or_refused(
    "`torch.compile(model, fullgraph=True)`",
    "without fullgraph",
    also=("Unsupported",),
    seconds=120,
    places=("torch", "ram"),
)
def compiled_fullgraph(place):
    engine = place.wrap(small(1))
    model = torch.compile(engine.module, backend="aot_eager", fullgraph=True)
    for loss in losses(engine, 1, model):
        engine.backward(loss)
        engine.step()
    return values(engine.module)


@family.works("`torch.compile` of a training step function", seconds=120, places=("torch", "ram"))
def compiled_step(place):
    engine = place.wrap(small(1))

    def step(tokens, targets):
        loss = loss_of(engine.module(tokens), targets)
        loss.backward()
        return loss

    compiled = torch.compile(step, backend="eager")
    for tokens, targets in data(1):
        compiled(tokens, targets)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("`torch.compile(optimizer.step)`", seconds=120, places=("torch", "ram"))
def compiled_optimizer_step(place):
    engine = place.wrap(small(1))
    step = torch.compile(lambda: engine.optimizer.step(), backend="eager")
    for loss in losses(engine, 2):
        loss.backward()
        step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works_or_refused("`torch.jit.trace(model, x)`", "jit|deepcopy|unwrap")
def jit_trace(place):
    model = _mlp()
    place.wrap(model)
    torch.manual_seed(2)
    x = torch.randn(2, 48)
    traced = torch.jit.trace(model, x)
    with torch.no_grad():
        return traced(x + 1)


@family.works_or_refused(
    "`torch.jit.trace` of a trained model; the trace follows later steps in PyTorch", "jit|deepcopy|unwrap"
)
def jit_trace_then_train(place):
    model = _mlp()
    engine = place.wrap(model)
    torch.manual_seed(2)
    x = torch.randn(2, 48)
    traced = torch.jit.trace(model, x)
    engine.backward(engine(x).square().mean())
    engine.step()
    with torch.no_grad():
        return traced(x)


@family.works_or_refused("`torch.jit.script(model)`", "jit|deepcopy|unwrap")
def jit_script(place):
    model = _mlp()
    place.wrap(model)
    torch.manual_seed(2)
    with torch.no_grad():
        return torch.jit.script(model)(torch.randn(2, 48))


@family.works("`torch.jit.trace(copy.deepcopy(model), x)`")
def jit_trace_of_copy(place):
    model = _mlp()
    place.wrap(model)
    torch.manual_seed(2)
    x = torch.randn(2, 48)
    with torch.no_grad():
        return torch.jit.trace(copy.deepcopy(model), x)(x + 1)


@family.works("`torch.fx.symbolic_trace(model)`, run and trained")
def fx_trace(place):
    model = _mlp()
    engine = place.wrap(model)
    graph = torch.fx.symbolic_trace(model)
    torch.manual_seed(2)
    for _ in range(2):
        graph(torch.randn(4, 48)).square().mean().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(model)


@family.works("`torch.fx.symbolic_trace` before wrapping: the graph module is wrapped")
def fx_trace_before(place):
    return _trained(place, torch.fx.symbolic_trace(_mlp()))


@family.works_or_refused("`torch.export.export(model, (x,))`", "export|copy|unwrap", seconds=120)
def exported(place):
    model = _mlp()
    place.wrap(model)
    torch.manual_seed(2)
    x = torch.randn(2, 48)
    program = torch.export.export(model, (x,))
    return program.module()(x)


@family.works("`torch.export.export(copy.deepcopy(model), (x,))`", seconds=120)
def exported_copy(place):
    model = _mlp()
    place.wrap(model)
    torch.manual_seed(2)
    x = torch.randn(2, 48)
    return torch.export.export(copy.deepcopy(model), (x,)).module()(x)


@family.works("`torch.utils.flop_counter.FlopCounterMode` around forward and backward")
def flop_counter(place):
    from torch.utils.flop_counter import FlopCounterMode

    engine = place.small()
    with FlopCounterMode(display=False) as counter:
        engine.backward(next(losses(engine, 1)))
    engine.step()
    return counter.get_total_flops()


@family.works("a `TorchDispatchMode` of the user's around a step sees the model's products")
def dispatch_mode(place):
    from torch.utils._python_dispatch import TorchDispatchMode

    seen = []

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            if "mm" in func.name():
                seen.append(func.name())
            return func(*args, **(kwargs or {}))

    engine = place.small()
    with Seeing():
        engine.backward(next(losses(engine, 1)))
        engine.step()
    return len(seen), values(engine.module)


@family.works("a `TorchFunctionMode` of the user's around a step")
def function_mode(place):
    from torch.overrides import TorchFunctionMode

    class Passing(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            return func(*args, **(kwargs or {}))

    engine = place.small()
    with Passing():
        found = train(engine, 2)
    return found, values(engine.module)


@family.works_or_refused("`FakeTensorMode` around a forward of the model", "fake|meta")
def fake_mode(place):
    from torch._subclasses import FakeTensorMode

    engine = place.small()
    with FakeTensorMode(allow_non_fake_inputs=True), torch.no_grad():
        shape = tuple(engine.module(data(1)[0][0]).shape)
    return shape, train(engine, 2), values(engine.module)


# Parametrizations, pruning, normalisation


class _Symmetric(nn.Module):
    def forward(self, w):
        return w.triu() + w.triu(1).t()


@family.works("`parametrize.register_parametrization` before wrapping")
def parametrized_before(place):
    model = _mlp()
    for layer in model:
        parametrize.register_parametrization(layer[0], "weight", _Symmetric())
    return _trained(place, model)


@family.works_or_refused("`parametrize.register_parametrization` after wrapping", "engine|wrap")
def parametrized_after(place):
    def prepare(model):
        for layer in model:
            parametrize.register_parametrization(layer[0], "weight", _Symmetric())

    return _trained(place, _mlp(), prepare=prepare)


@family.works_or_refused("`parametrize.remove_parametrizations` after training", "engine|wrap")
def parametrization_removed(place):
    model = _mlp()
    for layer in model:
        parametrize.register_parametrization(layer[0], "weight", _Symmetric())
    _trained(place, model)
    for layer in model:
        parametrize.remove_parametrizations(layer[0], "weight")
    return model(torch.ones(1, 48)), values(model)


@family.works("`with parametrize.cached():`")
def parametrize_cached(place):
    model = _mlp()
    for layer in model:
        parametrize.register_parametrization(layer[0], "weight", _Symmetric())
    engine = place.wrap(model)
    torch.manual_seed(2)
    for _ in range(2):
        with parametrize.cached():
            x = torch.randn(4, 48)
            (engine(x) + engine(x + 1)).square().mean().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(model)


@family.works("`parametrizations.weight_norm` before wrapping")
def weight_norm_before(place):
    return _trained(place, _mlp(lambda: parametrizations.weight_norm(nn.Linear(48, 48))))


@family.works_or_refused("`parametrizations.weight_norm` after wrapping", "engine|wrap")
def weight_norm_after(place):
    return _trained(place, _mlp(), prepare=lambda m: [parametrizations.weight_norm(layer[0]) for layer in m])


@family.works("the old `nn.utils.weight_norm` before wrapping")
def old_weight_norm_before(place):
    return _trained(place, _mlp(lambda: nn.utils.weight_norm(nn.Linear(48, 48))))


@family.works_or_refused("the old `nn.utils.weight_norm` after wrapping", "engine|wrap")
def old_weight_norm_after(place):
    return _trained(place, _mlp(), prepare=lambda m: [nn.utils.weight_norm(layer[0]) for layer in m])


@family.works_or_refused("`nn.utils.remove_weight_norm` after training", "engine|wrap")
def old_weight_norm_removed(place):
    model = _mlp(lambda: nn.utils.weight_norm(nn.Linear(48, 48)))
    _trained(place, model)
    for layer in model:
        nn.utils.remove_weight_norm(layer[0])
    return model(torch.ones(1, 48)), values(model)


@family.works("`parametrizations.spectral_norm` before wrapping")
def spectral_norm_before(place):
    return _trained(place, _mlp(lambda: parametrizations.spectral_norm(nn.Linear(48, 48))))


@family.works("the old `nn.utils.spectral_norm` before wrapping")
def old_spectral_norm_before(place):
    return _trained(place, _mlp(lambda: nn.utils.spectral_norm(nn.Linear(48, 48))))


@family.works("`parametrizations.orthogonal` before wrapping", rtol=1e-4, atol=1e-4)
def orthogonal_before(place):
    return _trained(place, _mlp(lambda: parametrizations.orthogonal(nn.Linear(48, 48))))


@family.works("`prune.l1_unstructured` before wrapping")
def pruned_before(place):
    model = _mlp()
    for layer in model:
        prune.l1_unstructured(layer[0], "weight", 0.5)
    return _trained(place, model)


@family.works_or_refused("`prune.l1_unstructured` after wrapping", "engine|wrap")
def pruned_after(place):
    return _trained(
        place, _mlp(), prepare=lambda model: [prune.l1_unstructured(layer[0], "weight", 0.5) for layer in model]
    )


@family.works_or_refused("`prune.remove` after training", "engine|wrap")
def prune_removed(place):
    model = _mlp()
    for layer in model:
        prune.l1_unstructured(layer[0], "weight", 0.5)
    _trained(place, model)
    for layer in model:
        prune.remove(layer[0], "weight")
    return model(torch.ones(1, 48)), values(model)


@family.works("`prune.global_unstructured` before wrapping, masks that change between steps")
def pruned_globally(place):
    model = _mlp()
    prune.global_unstructured([(layer[0], "weight") for layer in model], prune.L1Unstructured, amount=0.3)
    engine = place.wrap(model)
    torch.manual_seed(2)
    for _ in range(2):
        engine.backward(engine(torch.randn(4, 48)).square().mean())
        engine.step()
        for layer in model:
            layer[0].weight_mask[0] = 0
    return values(model)


@family.works("`nn.utils.fuse_linear_bn_weights`, `nn.utils.fusion` of a wrapped block")
def fused(place):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48)) for _ in range(12)))
    place.wrap(model)
    model.eval()
    return values(nn.utils.fusion.fuse_linear_bn_eval(model[0][0], model[0][1]))


@family.works_or_refused("dynamic quantisation of a wrapped model: `quantize_dynamic`", "deepcopy|unwrap")
def quantized(place):
    model = _mlp()
    place.wrap(model)
    found = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, torch.qint8)
    torch.manual_seed(2)
    return found(torch.randn(2, 48))


@family.works("quantisation-aware training: fake quantisation of weights and activations")
def fake_quantized(place):
    model = _mlp()
    for layer in model:
        layer.append(torch.ao.quantization.FakeQuantize.with_args(quant_min=0, quant_max=255)())
    return _trained(place, model)


# Modules


@family.works("`nn.LSTM` and `flatten_parameters()`")
def lstm(place):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.LSTM(48, 48, batch_first=True) for _ in range(8))

        def forward(self, x):
            for layer in self.layers:
                layer.flatten_parameters()
                x = layer(x)[0]
            return x

    torch.manual_seed(1)
    engine = place.wrap(Recurrent())
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 5, 48)).square().mean())
        engine.step()
    return values(engine.module)


@family.works("`pack_padded_sequence` through an LSTM")
def packed_sequence(place):
    from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.ModuleList(nn.LSTM(48, 48, batch_first=True) for _ in range(8))

        def forward(self, x, lengths):
            for layer in self.layers:
                packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
                x = pad_packed_sequence(layer(packed)[0], batch_first=True, total_length=x.shape[1])[0]
            return x

    torch.manual_seed(1)
    engine = place.wrap(Recurrent())
    for _ in range(2):
        engine.backward(engine(torch.randn(3, 5, 48), torch.tensor([5, 2, 3])).square().mean())
        engine.step()
    return values(engine.module)


@family.works("hidden states of an LSTM are carried over steps, detached")
def hidden_states_carried(place):
    torch.manual_seed(1)
    model = nn.ModuleList([nn.LSTM(48, 48, num_layers=6), nn.Linear(48, 48)])
    engine = place.wrap(model)
    state = None
    for _ in range(3):
        y, state = model[0](torch.randn(4, 2, 48), state)
        model[1](y).square().mean().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        state = tuple(s.detach() for s in state)
    return values(model)


@family.works("hidden states carried over a step without detaching: PyTorch raises")
def hidden_states_not_detached(place):
    torch.manual_seed(1)
    model = nn.ModuleList([nn.LSTM(48, 48, num_layers=6), nn.Linear(48, 48)])
    engine = place.wrap(model)
    state = None
    for _ in range(3):
        y, state = model[0](torch.randn(4, 2, 48), state)
        model[1](y).square().mean().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(model)


@family.works(
    "`nn.MultiheadAttention` and `nn.TransformerEncoder` with the fast path in evaluation", rtol=1e-4, atol=1e-5
)
def transformer_encoder(place):
    torch.manual_seed(1)
    layer = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 8)
    engine = place.wrap(model)
    x = torch.randn(2, 5, 32)
    engine.backward(engine(x).square().mean())
    engine.step()
    model.eval()
    with torch.no_grad():
        found = engine(x)
    return found, values(model)


@family.works("lazy modules, initialised by a forward before wrapping")
def lazy_modules(place):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.LazyLinear(48), nn.Tanh()) for _ in range(12)))
    model(torch.ones(1, 48))
    return _trained(place, model)


@family.works_or_refused("lazy modules that are not initialised yet", "[Ll]azy|forward|initiali")
def lazy_modules_uninitialised(place):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.LazyLinear(48), nn.Tanh()) for _ in range(12)))
    engine = place.wrap(model) if place.has_engine else None
    return (engine or model)(torch.ones(1, 48)).shape


@family.works("a model built under `torch.device('meta')`, wrapped, then filled by `load_state_dict`")
def meta_model(place):
    if place.has_engine:
        with torch.device("meta"):
            model = Tiny(32, 8, VOCAB)
    else:
        model = small()
    engine = place.wrap(model)
    model.load_state_dict(small().state_dict())
    return train(engine, 2), values(model)


@family.works("`nn.ParameterList` and `nn.ParameterDict` in the root")
def parameter_containers(place):
    class Sum(nn.Module):
        def __init__(self):
            super().__init__()
            self.list = nn.ParameterList(nn.Parameter(torch.randn(48, 48) / 7) for _ in range(8))
            self.dict = nn.ParameterDict({"a": torch.randn(48), "b": torch.randn(48)})

        def forward(self, x):
            for w in self.list:
                x = torch.tanh(x @ w)
            return x * self.dict["a"] + self.dict["b"]

    torch.manual_seed(1)
    return _trained(place, Sum())


@family.works("a parameter that no forward uses gets no gradient and does not move")
def unused_parameter(place):
    model = _mlp()
    model[3].register_parameter("unused", nn.Parameter(torch.ones(48)))
    return _trained(place, model)


class _Turned(nn.Module):
    """It multiplies by complex numbers, which are one parameter, or its real and imaginary parts."""

    def __init__(self, of_parts):
        super().__init__()
        torch.manual_seed(0)
        self.before, self.after = nn.Linear(8, 8), nn.Linear(8, 8)
        factor = torch.randn(8, dtype=torch.complex64)
        self.factor = nn.Parameter(torch.view_as_real(factor).clone() if of_parts else factor)

    def forward(self, x):
        factor = self.factor if self.factor.is_complex() else torch.view_as_complex(self.factor)
        return self.after((self.before(x) * factor).abs())


def _turned(place, of_parts):
    engine = place.wrap(_Turned(of_parts))
    for _ in range(3):
        engine.backward(engine(torch.ones(4, 8)).square().mean())
        engine.step()
    return values(engine.module)


@family.refused("a complex parameter", "view_as_real.*view_as_complex")
def complex_parameter(place):
    return _turned(place, False)


@family.works("a complex parameter's real and imaginary parts: what the refusal names")
def complex_parameter_by_parts(place):
    return _turned(place, True)


@family.works("complex numbers inside, real parameters")
def complex_inside(place):
    class Fourier(nn.Module):
        def __init__(self):
            super().__init__()
            self.real, self.imaginary = nn.Parameter(torch.randn(25)), nn.Parameter(torch.randn(25))

        def forward(self, x):
            return torch.fft.irfft(torch.fft.rfft(x) * torch.complex(self.real, self.imaginary), n=48)

    return _trained(place, _mlp(Fourier))


@family.works("an integer parameter that is not trained")
def integer_parameter(place):
    model = _mlp()
    model[0].register_parameter("table", nn.Parameter(torch.arange(5), requires_grad=False))
    return _trained(place, model)


@family.works("`nn.Embedding(sparse=True)` with SGD")
def sparse_embedding(place):
    torch.manual_seed(0)
    model = Tiny(32, 8, VOCAB)
    model.embed = nn.Embedding(VOCAB, 32, sparse=True)
    engine = place.wrap(model, optimizer="sgd", lr=0.1)
    return train(engine, 2), values(model)


@family.works("`nn.Embedding(scale_grad_by_freq=True, padding_idx=0)`")
def embedding_options(place):
    torch.manual_seed(0)
    model = Tiny(32, 8, VOCAB)
    model.embed = nn.Embedding(VOCAB, 32, scale_grad_by_freq=True, padding_idx=0)
    engine = place.wrap(model)
    return train(engine, 2), values(model)


@family.works("a weight that is not contiguous: `nn.Parameter(t.t())`")
def not_contiguous(place):
    model = _mlp()
    torch.manual_seed(4)
    model[2][0].weight = nn.Parameter(torch.randn(48, 48).t())
    return _trained(place, model)


@family.refused(
    "two parameters over one memory: `b = nn.Parameter(a.data)`", r"2\.0\.weight and 3\.0\.weight.*Tie them"
)
def parameters_share_memory(place):
    model = _mlp()
    model[3][0].weight = nn.Parameter(model[2][0].weight.data)
    return _trained(place, model)


@family.works_or_refused("a parameter that is an expanded tensor", "memory|expand|contiguous")
def expanded_parameter(place):
    model = _mlp()
    model[2][0].bias = nn.Parameter(torch.ones(1).expand(48))
    engine = place.wrap(model)
    return engine(torch.ones(2, 48))


# Modes around a step


@family.works("`checkpoint(use_reentrant=False)` around blocks")
def checkpointed(place):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Tiny):
        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=False)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    engine = place.wrap(Checkpointed(32, 8, VOCAB))
    return train(engine, 3), values(engine.module)


@family.works("`checkpoint(use_reentrant=True)` around blocks")
def checkpointed_reentrant(place):
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(Tiny):
        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = checkpoint(block, x, use_reentrant=True)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    engine = place.wrap(Checkpointed(32, 8, VOCAB))
    return train(engine, 3), values(engine.module)


@family.works("`checkpoint_sequential` over several blocks")
def checkpoint_sequential(place):
    from torch.utils.checkpoint import checkpoint_sequential

    model = _mlp()
    engine = place.wrap(model)
    torch.manual_seed(2)
    for _ in range(2):
        x = torch.randn(4, 48, requires_grad=True)
        checkpoint_sequential(model, 3, x, use_reentrant=False).square().mean().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(model)


@family.works("`checkpoint` of half a block: a weight is used in and outside of it")
def checkpointed_inside_block(place):
    from torch.utils.checkpoint import checkpoint

    class Half(Block):
        def forward(self, x):
            h = checkpoint(lambda x: self.up(self.norm(x)), x, use_reentrant=False)
            return x + self.down(nn.functional.gelu(h)) * self.up.weight.mean()

    torch.manual_seed(0)
    model = Tiny(32, 0, VOCAB)
    model.blocks.extend(Half(32) for _ in range(8))
    engine = place.wrap(model)
    return train(engine, 3), values(model)


@family.works("`selective activation checkpointing` with a policy")
def selective_checkpointing(place):
    from functools import partial

    from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

    def policy(context, op, *args, **kwargs):
        return CheckpointPolicy.MUST_SAVE if op is torch.ops.aten.addmm.default else CheckpointPolicy.PREFER_RECOMPUTE

    class Checkpointed(Tiny):
        def forward(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                contexts = partial(create_selective_checkpoint_contexts, policy)
                x = checkpoint(block, x, use_reentrant=False, context_fn=contexts)
            return self.head(self.norm(x))

    torch.manual_seed(0)
    engine = place.wrap(Checkpointed(32, 8, VOCAB))
    return train(engine, 2), values(engine.module)


@family.works("`torch.autograd.graph.save_on_cpu()` around forward")
def save_on_cpu(place):
    engine = place.small()
    for tokens, targets in data(2):
        with torch.autograd.graph.save_on_cpu():
            loss = loss_of(engine(tokens), targets)
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("`saved_tensors_hooks` that quantise what is saved (and so copy weights)")
def saved_tensors_hooks(place):
    engine = place.small()
    for tokens, targets in data(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: t.clone(), lambda t: t):
            loss = loss_of(engine(tokens), targets)
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("`saved_tensors_hooks` that keep what is saved as it is, by reference")
def saved_tensors_kept(place):
    engine = place.small()
    for tokens, targets in data(2):
        with torch.autograd.graph.saved_tensors_hooks(lambda t: [t], lambda kept: kept[0]):
            loss = loss_of(engine(tokens), targets)
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("`save_on_disk`-like hooks: `torch.save` of what is saved")
def saved_tensors_on_disk(place):
    engine = place.small()
    count = iter(range(10**6))

    def pack(t):
        path = place.folder / f"saved{next(count)}"
        torch.save(t, path)
        return path

    for tokens, targets in data(1):
        with torch.autograd.graph.saved_tensors_hooks(pack, torch.load):
            loss = loss_of(engine(tokens), targets)
        loss.backward()
        engine.optimizer.step()
    return values(engine.module)


@family.works("`torch.autograd.graph.allow_mutation_on_saved_tensors`")
def allow_mutation(place):
    engine = place.small()
    with torch.autograd.graph.allow_mutation_on_saved_tensors():
        loss = next(losses(engine, 1))
        loss.backward()
    engine.optimizer.step()
    return values(engine.module)


@family.works("`detect_anomaly` in a healthy run")
def anomaly(place):
    engine = place.small()
    with torch.autograd.detect_anomaly(check_nan=True):
        found = train(engine, 2)
    return found, values(engine.module)


@family.works("`detect_anomaly` raises for a NaN in backward")
def anomaly_nan(place):
    engine = place.small()
    engine.module.blocks[3].register_forward_hook(lambda m, a, o: (o - o.detach()).sqrt() + o)
    with torch.autograd.detect_anomaly(check_nan=True):
        return place.attempt(lambda: next(losses(engine, 1)).backward())


@family.works("`torch.use_deterministic_algorithms(True)`")
def deterministic(place):
    torch.use_deterministic_algorithms(True)
    engine = place.small()
    return train(engine, 2), values(engine.module)


@family.works("`torch.use_deterministic_algorithms(True)` fills fresh memory, and warns of nothing")
def deterministic_without_warnings(place):
    import warnings

    torch.use_deterministic_algorithms(True)
    engine = place.small()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return train(engine, 2)


@family.works("`torch.profiler.profile` around steps")
def profiler(place):
    engine = place.small()
    with torch.profiler.profile(record_shapes=True) as profile:
        found = train(engine, 2)
    return found, len(profile.key_averages()) > 0, values(engine.module)


@family.works("`torch.autograd.profiler.emit_itt`, `record_function`")
def record_function(place):
    engine = place.small()
    with torch.profiler.record_function("step"):
        return train(engine, 2), values(engine.module)


@family.works("`torch.autograd.set_grad_enabled(False)` during wrapping, `True` afterwards")
def grad_disabled_while_wrapping(place):
    model = small()
    torch.set_grad_enabled(False)
    engine = place.wrap(model)
    torch.set_grad_enabled(True)
    return train(engine, 2), values(model)


@family.works("`torch.autograd.set_multithreading_enabled(False)`")
def single_threaded_autograd(place):
    torch.autograd.set_multithreading_enabled(False)
    engine = place.small()
    return train(engine, 2), values(engine.module)


@family.works("`torch.set_flush_denormal(True)`")
def flush_denormal(place):
    torch.set_flush_denormal(True)
    engine = place.small()
    return train(engine, 2), values(engine.module)


@family.works("`torch.utils.data.DataLoader` with no workers")
def data_loader(place):
    from torch.utils.data import DataLoader, TensorDataset

    engine = place.small()
    tokens, targets = zip(*data(4), strict=True)
    loader = DataLoader(TensorDataset(torch.stack(tokens), torch.stack(targets)), batch_size=None)
    for tokens, targets in loader:
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
    return values(engine.module)


@family.works("`torch.manual_seed` and dropout: random numbers as in PyTorch")
def random_numbers(place):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.Dropout(0.3)) for _ in range(12)))
    engine = place.wrap(model)
    torch.manual_seed(9)
    found = []
    for _ in range(3):
        loss = engine(torch.randn(4, 48)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found, torch.rand(3)


@family.works("wrapping draws no random number of the user's")
def random_state_while_wrapping(place):
    model = small()
    torch.manual_seed(9)
    place.wrap(model)
    return torch.rand(3)
