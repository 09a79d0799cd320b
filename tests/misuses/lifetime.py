"""The end of an engine, and what is used after it."""

import gc

import torch
from tiny import loss_of
from torch import nn

from misuses.case import Family
from misuses.place import ADAMW, data, losses, small, train, train_by_hand, values

family = Family("lifetime")

_CLOSED = r"closed"


def _closed(place):
    engine = place.small()
    train(engine, 1)
    engine.close()
    return engine


@family.refused("the model is run after `close()`", _CLOSED)
def forward_after_close(place):
    return [loss.item() for loss in losses(_closed(place), 1)]


@family.works("the model itself is called after `close()`")
def model_after_close(place):
    engine = _closed(place)
    return engine.module(data(1)[0][0])


@family.works("a weight is read after `close()`")
def read_after_close(place):
    return _closed(place).module.head.weight.norm().item()


@family.works("a weight is written after `close()`")
def written_after_close(place):
    engine = _closed(place)
    engine.module.head.weight.data.zero_()
    return True


@family.works("`state_dict()` after `close()`")
def state_dict_after_close(place):
    return dict(_closed(place).state_dict())


@family.works("`model.state_dict()` after the `with` block")
def state_dict_after_with(place):
    with place.small() as engine:
        train(engine, 1)
    return dict(engine.module.state_dict())


@family.works("`torch.save(model)` after `close()`")
def saved_after_close(place):
    engine = _closed(place)
    torch.save(engine.module, place.folder / "model.pt")
    return True


@family.works("`copy.deepcopy(model)` after `close()`")
def copied_after_close(place):
    import copy

    return values(copy.deepcopy(_closed(place).module))


@family.refused("`engine.step()` after `close()`", _CLOSED)
def step_after_close(place):
    engine = place.small()
    next(losses(engine, 1)).backward()
    engine.close()
    engine.optimizer.step()
    return True


@family.refused("`backward` after `close()`", _CLOSED)
def backward_after_close(place):
    engine = place.small()
    loss = next(losses(engine, 1))
    engine.close()
    loss.backward()
    return True


@family.refused("`optimizer.state_dict()` after `close()`", _CLOSED)
def optimizer_state_after_close(place):
    return len(_closed(place).optimizer.state_dict()["state"])


@family.works("`p.grad` after `close()`")
def gradient_after_close(place):
    engine = place.small()
    next(losses(engine, 1)).backward()
    engine.close()
    return engine.module.head.weight.grad.norm().item()


@family.works("`print(model)`, shapes, names, `numel` after `close()`")
def shapes_after_close(place):
    model = _closed(place).module
    return repr(model), [(name, tuple(p.shape), str(p.dtype)) for name, p in model.named_parameters()]


@family.works("`optimizer.param_groups[0]['lr']` after `close()`")
def settings_after_close(place):
    return _closed(place).optimizer.param_groups[0]["lr"]


@family.works("`close()` twice, and in and after a `with` block")
def closed_twice(place):
    with place.small() as engine:
        train(engine, 1)
        engine.close()
    engine.close()


@family.works("the model is wrapped again after `close()`")
def wrapped_after_close(place):
    engine = _closed(place)
    again = place.wrap(engine.module)
    return train(again, 1)


@family.works("after `close()`, `load_state_dict` into a freshly built model, and on")
def rebuilt_after_close(place):
    engine = place.small()
    train(engine, 1)
    state = engine.state_dict()
    engine.close()
    model = small()
    model.load_state_dict(state)
    again = place.wrap(model)
    return train(again, 2), values(model)


@family.works("`engine.unwrap()` gives an ordinary model back")
def unwrapped(place):
    engine = place.small()
    train(engine, 2)
    model = engine.unwrap()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for tokens, targets in data(2):
        loss_of(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model), type(model.head.weight).__name__, model.head.weight.is_leaf


@family.works("`engine.unwrap()` and wrapped again")
def unwrapped_and_wrapped(place):
    engine = place.small()
    train(engine, 1)
    model = engine.unwrap()
    again = place.wrap(model)
    return train(again, 2), values(model)


@family.works("`engine.unwrap()`: hooks of the user's and ties are still there")
def unwrapped_keeps_hooks(place):
    model = small()
    model.head.weight = model.embed.weight
    engine = place.wrap(model)
    seen = []
    model.blocks[0].register_forward_hook(lambda m, a, o: seen.append(1))
    train(engine, 1)
    model = engine.unwrap()
    model(data(1)[0][0])
    return seen, model.head.weight is model.embed.weight, values(model)


@family.works("`engine.unwrap()` with gradients under way: `p.grad` afterwards")
def unwrapped_with_gradients(place):
    engine = place.small()
    next(losses(engine, 1)).backward()
    model = engine.unwrap()
    return [None if p.grad is None else p.grad for p in model.parameters()]


@family.works("a frozen parameter is frozen after `engine.unwrap()`")
def unwrapped_frozen(place):
    model = small()
    model.blocks[0].requires_grad_(False)
    engine = place.wrap(model)
    train(engine, 1)
    return [p.requires_grad for p in engine.unwrap().parameters()]


@family.works("the engine is dropped, the model used on")
def engine_dropped_model_used(place):
    engine = place.small()
    train(engine, 1)
    model = engine.module
    place.left.clear()
    del engine
    gc.collect()
    return [loss.item() for loss in losses(None, 2, model)], values(model)


@family.works("the engine is dropped, its optimizer and the model train on")
def engine_dropped_training_on(place):
    engine = place.small()
    model, optimizer = engine.module, engine.optimizer
    place.left.clear()
    del engine
    gc.collect()
    for loss in losses(None, 2, model):
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@family.works("the model is dropped, the engine trains on")
def model_dropped(place):
    model = small()
    engine = place.wrap(model)
    del model
    gc.collect()
    return train(engine, 2), values(engine.module)


@family.works("a parameter outlives engine and model")
def parameter_outlives(place):
    engine = place.small()
    train(engine, 1)
    p = engine.module.head.weight
    place.left.clear()
    del engine
    gc.collect()
    return p.detach().clone()


@family.works("the gradient's tensor outlives engine and model")
def gradient_outlives(place):
    engine = place.small()
    next(losses(engine, 1)).backward()
    g = engine.module.head.weight.grad
    place.left.clear()
    del engine
    gc.collect()
    return g.clone()


@family.works("a loss outlives engine and model, and is used for backward")
def loss_outlives(place):
    engine = place.small()
    loss = next(losses(engine, 1))
    place.left.clear()
    del engine
    gc.collect()
    loss.backward()
    return loss


@family.works("engines are made and closed in a loop (a search over learning rates)")
def many_engines(place):
    found = []
    for lr in (1e-3, 3e-3, 1e-2, 3e-2):
        with place.wrap(small(), lr=lr) as engine:
            found.append(train(engine, 2))
    return found


@family.works("engines are made and dropped in a loop, without `close()`", seconds=90)
def many_engines_dropped(place):
    found = []
    for lr in (1e-3, 3e-3, 1e-2, 3e-2):
        engine = place.wrap(small(), lr=lr)
        place.left.clear()
        found.append(train(engine, 2))
        del engine
        gc.collect()
    return found


@family.works("a cross-validation: the initial weights are kept and loaded again for each fold")
def folds(place):
    engine = place.small()
    start = {name: value.clone() for name, value in engine.state_dict().items()}
    found = []
    for _ in range(3):
        engine.load_state_dict(start)
        found.append(train_by_hand(engine, 1)[0])
    return found


@family.works_or_refused("`close()` inside a forward hook", _CLOSED)
def closed_in_forward(place):
    engine = place.small()
    train(engine, 1)
    engine.module.blocks[3].register_forward_hook(lambda *_: engine.close())
    return train(engine, 1), values(engine.module)


@family.works_or_refused("`close()` inside a backward hook", _CLOSED)
def closed_in_backward(place):
    engine = place.small()
    train(engine, 1)
    engine.module.blocks[3].register_full_backward_hook(lambda *_: engine.close())
    return train(engine, 1), values(engine.module)


@family.works("an exception leaves the `with` block; the model is built anew and trained")
def exception_leaves_with(place):
    try:
        with place.small() as engine:
            train(engine, 1)
            raise ValueError("the user")
    except ValueError:
        pass
    engine = place.small()
    return train(engine, 2), values(engine.module)


@family.works("wrapping fails for a bad option, and the model is as it was")
def wrapping_fails(place):
    model = small()
    if place.has_engine:
        place.attempt(lambda: place.wrap(model, gradient_clipping=-1.0))
        place.attempt(lambda: place.wrap(model, nonsense=1))
        place.messages.clear()
    engine = place.wrap(model)
    return train(engine, 2), values(model)


@family.works("wrapping fails for too small a budget, and the model trains under torch")
def wrapping_fails_for_budget(place):
    from offload import OffloadEngine

    model = small()
    if place.has_engine:
        place.attempt(lambda: OffloadEngine(model, host_memory=1, nvme_path=place.folder))
        place.messages.clear()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for tokens, targets in data(2):
        loss_of(model(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return type(model.head.weight).__name__, values(model)


@family.works("a model that was trained by torch is wrapped with its gradients there: they are the first step's")
def gradients_from_before(place):
    model = small()
    tokens, targets = data(1)[0]
    loss_of(model(tokens), targets).backward()
    engine = place.wrap(model)
    engine.optimizer.step()
    return values(model)


@family.works_or_refused("a graph from before wrapping: backward after it", "Run the forward again")
def graph_from_before(place):
    model = small()
    tokens, targets = data(1)[0]
    loss = loss_of(model(tokens), targets)
    engine = place.wrap(model)
    loss.backward()
    engine.optimizer.step()
    return values(model)


@family.works("a kept reference to a parameter from before wrapping sees the training")
def parameter_from_before(place):
    model = small()
    p = model.head.weight
    engine = place.wrap(model)
    train(engine, 2)
    return p


@family.works("a list of parameters from before wrapping is clipped: `params = list(model.parameters())`")
def parameter_list_from_before(place):
    model = small()
    params = list(model.parameters())
    engine = place.wrap(model)
    for loss in losses(engine, 2):
        engine.optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(params, 0.01)
        engine.optimizer.step()
    return values(model)


@family.works("an EMA that was built over the parameters before wrapping")
def ema_from_before(place):
    model = small()
    params = list(model.parameters())
    shadow = [p.detach().clone() for p in params]
    engine = place.wrap(model)
    for _ in range(2):
        train(engine, 1)
        for s, p in zip(shadow, params, strict=True):
            s.lerp_(p.detach(), 0.1)
    return shadow


@family.works("a module that another model shares was wrapped: the other one sees the training")
def shared_with_ordinary_model(place):
    model, other = small(), small()
    other.blocks = model.blocks
    engine = place.wrap(model)
    train(engine, 2)
    return other(data(1)[0][0])


@family.works("an empty model raises")
def empty_model(place):
    place.wrap(nn.Sequential(nn.ReLU()))


@family.works("a model that is one layer")
def one_layer(place):
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    engine = place.wrap(model)
    for _ in range(2):
        engine.backward(engine(torch.ones(2, 8)).square().mean())
        engine.step()
    return values(model)


@family.works("a model in which nothing is to be trained, for evaluation")
def all_frozen(place):
    model = small().requires_grad_(False)
    if place.has_engine:
        place.wrap(model)
    with torch.no_grad():
        return model(data(1)[0][0])


@family.works("`optimizer=None`: a model that is evaluated, with gradients of its inputs")
def without_optimizer(place):
    model = small()
    engine = place.wrap(model, optimizer=None) if place.has_engine else model
    with torch.no_grad():
        return engine(data(1)[0][0])


@family.refused("something that is not a module is wrapped", "Module")
def not_a_module(place):
    if not place.has_engine:
        return None
    return place.wrap([nn.Linear(2, 2)]).module


@family.refused("`OffloadEngine(model.parameters())`", "Module")
def parameters_instead_of_model(place):
    if not place.has_engine:
        return None
    return place.wrap(small().parameters()).module


@family.refused(
    "`engine.parameters()`, `engine.train()`, `engine.to(...)`: the engine is not the module", r"engine\.module"
)
def engine_as_module(place):
    engine = place.small()
    if not place.has_engine:
        return None
    for name in ("parameters", "train", "eval", "to", "named_parameters", "zero_grad"):
        getattr(engine, name)
    return True
