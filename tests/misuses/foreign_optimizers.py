"""Optimizers and schedulers that are not the engine's, and what people do with the engine's own."""

import copy

import torch
from torch import nn

from misuses.case import Family
from misuses.place import ADAMW, data, gradients, losses, small, train, train_by_hand, values

family = Family("optimizers")


def _loop(engine, optimizer, steps=2):
    for loss in losses(engine, steps):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return values(engine.module)


@family.refused("`AdamW(model.parameters())` built after wrapping", r"engine\.optimizer|optimizer=")
def adamw_after_wrapping(place):
    engine = place.small()
    return _loop(engine, torch.optim.AdamW(engine.module.parameters(), **ADAMW))


@family.refused("`SGD(model.parameters())` built after wrapping", r"engine\.optimizer|optimizer=")
def sgd_after_wrapping(place):
    engine = place.small()
    return _loop(engine, torch.optim.SGD(engine.module.parameters(), lr=0.1))


@family.refused("`AdamW(foreach=True)` built after wrapping", r"engine\.optimizer|optimizer=")
def foreach_after_wrapping(place):
    engine = place.small()
    return _loop(engine, torch.optim.AdamW(engine.module.parameters(), foreach=True, **ADAMW))


@family.refused("`AdamW(fused=True)` built after wrapping", r"engine\.optimizer|optimizer=")
def fused_after_wrapping(place):
    engine = place.small()
    return _loop(engine, torch.optim.AdamW(engine.module.parameters(), fused=True, **ADAMW))


@family.refused("`SGD` over one block, built after wrapping", r"engine\.optimizer|optimizer=")
def optimizer_over_submodule(place):
    engine = place.small()
    return _loop(engine, torch.optim.SGD(engine.module.blocks[1].parameters(), lr=0.1))


@family.refused("`Adafactor` built after wrapping", r"engine\.optimizer|optimizer=")
def adafactor_after_wrapping(place):
    engine = place.small()
    return _loop(engine, torch.optim.Adafactor(engine.module.parameters()))


@family.works_or_refused("an optimizer that was given to an engine is given to the next one", "load_state_dict")
def optimizer_given_twice(place):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine = place.wrap(model, optimizer=optimizer)
    train(engine, 1)
    engine.close()
    return train(place.wrap(model, optimizer=optimizer), 1)


@family.refused(
    "an optimizer built before wrapping and not given to the engine, stepped", r"engine\.optimizer|optimizer="
)
def optimizer_from_before(place):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine = place.wrap(model)
    return _loop(engine, optimizer)


@family.works("an optimizer built before wrapping and given as `optimizer=`: its own `step` works")
def optimizer_given(place):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine = place.wrap(model, optimizer=optimizer)
    return _loop(engine, optimizer)


@family.works("the optimizer that was given has its states, and goes on with them")
def optimizer_given_with_states(place):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for tokens, targets in data(2):
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    engine = place.wrap(model, optimizer=optimizer)
    return _loop(engine, optimizer)


@family.works("the given optimizer's `param_groups[0]['lr']` is changed afterwards")
def lr_of_given_optimizer(place):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine = place.wrap(model, optimizer=optimizer)
    train(engine, 1)
    optimizer.param_groups[0]["lr"] = 1e-4
    train(engine, 1)
    return values(model)


@family.works("the given optimizer's `state_dict()` after training")
def state_dict_of_given_optimizer(place):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine = place.wrap(model, optimizer=optimizer)
    train(engine, 2)
    return optimizer.state_dict()["state"]


@family.works("an EMA-free `torch.optim` class as `optimizer=`: NAdam")
def nadam(place):
    engine = place.small(optimizer=torch.optim.NAdam, lr=1e-3)
    return train(engine, 3), values(engine.module)


@family.works("`SGD` with momentum and nesterov")
def sgd_with_momentum(place):
    engine = place.small(
        optimizer="sgd", lr=1e-2, optimizer_options={"momentum": 0.9, "nesterov": True}, weight_decay=0.01
    )
    return train(engine, 3), values(engine.module)


@family.works("`amsgrad=True`, given as a built optimizer")
def amsgrad(place):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True, **ADAMW)
    engine = place.wrap(model, optimizer=optimizer)
    return train(engine, 3), values(model)


@family.works("`maximize=True`, given as a built optimizer")
def maximize(place):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), maximize=True, **ADAMW)
    engine = place.wrap(model, optimizer=optimizer)
    return train(engine, 3), values(model)


@family.works("a subclass of AdamW with a `step` of its own")
def own_subclass(place):
    class Clipped(torch.optim.AdamW):
        @torch.no_grad()
        def step(self, closure=None):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.clamp_(-1e-3, 1e-3)
            return super().step(closure)

    engine = place.small(optimizer=Clipped, **ADAMW)
    return train(engine, 3), values(engine.module)


@family.works("an optimizer written by hand: `p -= lr * p.grad` under `no_grad`")
def sgd_by_hand(place):
    engine = place.small()
    for loss in losses(engine, 3):
        loss.backward()
        with torch.no_grad():
            for p in engine.module.parameters():
                p -= 0.1 * p.grad
                p.grad = None
    return values(engine.module)


@family.works("the same through `.data`: `p.data.add_(p.grad.data, alpha=-lr)`")
def sgd_by_hand_through_data(place):
    engine = place.small()
    for loss in losses(engine, 3):
        engine.module.zero_grad()
        loss.backward()
        for p in engine.module.parameters():
            p.data.add_(p.grad.data, alpha=-0.1)
    return values(engine.module)


@family.refused("`engine.optimizer.add_param_group` with new parameters", r"optimizer of its own")
def add_new_parameters(place):
    engine = place.small()
    extra = nn.Linear(VOCAB := 64, VOCAB)
    train(engine, 1)
    engine.optimizer.add_param_group({"params": list(extra.parameters()), "lr": 0.1})
    for tokens, targets in data(1):
        logits = extra(engine(tokens))
        nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten()).backward()
        engine.optimizer.step()
    return values(extra), values(engine.module)


@family.works("`engine.optimizer.add_param_group` with parameters that are in a group already raises")
def add_duplicates(place):
    engine = place.small()
    return (
        place.attempt(lambda: engine.optimizer.add_param_group({"params": list(engine.module.head.parameters())})),
        train(engine),
        values(engine.module),
    )


@family.works_or_refused("`add_param_group` with the engine's parameters that no group had (gradual unfreezing)")
def add_parameters_of_model(place):
    model = small()
    optimizer = torch.optim.AdamW(model.head.parameters(), **ADAMW)
    engine = place.wrap(model, optimizer=optimizer)
    train(engine, 1)
    engine.optimizer.add_param_group({"params": list(model.norm.parameters())})
    train(engine, 1)
    return values(model)


@family.works("a built optimizer over the head only: the rest does not move")
def optimizer_over_head(place):
    model = small()
    optimizer = torch.optim.AdamW(model.head.parameters(), **ADAMW)
    engine = place.wrap(model, optimizer=optimizer)
    train(engine, 2)
    return values(model)


@family.works("`param_groups[0]['lr']`, `['weight_decay']`, `['betas']` and `['eps']` are changed between steps")
def settings_changed(place):
    engine = place.small()
    train(engine, 1)
    group = engine.optimizer.param_groups[0]
    group["lr"], group["weight_decay"], group["betas"], group["eps"] = 3e-3, 0.2, (0.8, 0.95), 1e-3
    train(engine, 2)
    return values(engine.module)


@family.works("the learning rate is changed between backward and step")
def lr_changed_before_step(place):
    engine = place.small()
    for loss in losses(engine, 3):
        engine.backward(loss)
        engine.optimizer.param_groups[0]["lr"] *= 0.5
        engine.step()
    return values(engine.module)


@family.works("`lr` as a tensor in `param_groups`")
def lr_as_tensor(place):
    engine = place.small()
    engine.optimizer.param_groups[0]["lr"] = torch.tensor(3e-3)
    train(engine, 2)
    engine.optimizer.param_groups[0]["lr"].fill_(1e-3)
    train(engine, 1)
    return values(engine.module)


@family.works_or_refused("`lr` as a tensor when wrapping", r"lr")
def lr_as_tensor_when_wrapping(place):
    engine = place.small(lr=torch.tensor(3e-3))
    return train(engine, 2), values(engine.module)


@family.works("`lr` as a numpy number in `param_groups`")
def lr_as_numpy(place):
    import numpy as np

    engine = place.small()
    engine.optimizer.param_groups[0]["lr"] = np.float64(3e-3)
    train(engine, 2)
    return values(engine.module)


@family.works("`lr = 0`: nothing moves")
def lr_zero(place):
    engine = place.small()
    engine.optimizer.param_groups[0]["lr"] = 0.0
    train(engine, 2)
    return values(engine.module)


@family.works_or_refused("a negative `lr` in `param_groups`", r"lr")
def lr_negative(place):
    engine = place.small()
    engine.optimizer.param_groups[0]["lr"] = -1e-3
    train(engine, 2)
    return values(engine.module)


@family.works("two parameter groups by a built optimizer, one `lr` set to zero")
def two_groups(place):
    model = small()
    groups = [{"params": list(model.blocks.parameters())}, {"params": [*model.head.parameters()], "lr": 1e-3}]
    optimizer = torch.optim.AdamW(groups, **ADAMW)
    engine = place.wrap(model, optimizer=optimizer)
    train(engine, 1)
    engine.optimizer.param_groups[0]["lr"] = 0.0
    train(engine, 1)
    return values(model)


@family.works_or_refused("a parameter is taken out of `param_groups[0]['params']`: it must not move any more")
def parameter_taken_out_of_group(place):
    engine = place.small()
    train(engine, 1)
    group = engine.optimizer.param_groups[0]
    group["params"] = [p for p in group["params"] if p is not engine.module.head.weight]
    train_by_hand(engine, 2)
    return values(engine.module)


@family.works("`optimizer.state[p]` after a step")
def state_of_parameter(place):
    engine = place.small()
    train(engine, 2)
    return dict(engine.optimizer.state[engine.module.head.weight])


@family.works("`len(optimizer.state)` after a step")
def number_of_states(place):
    engine = place.small()
    train(engine, 2)
    return len(engine.optimizer.state)


@family.works_or_refused("`optimizer.state.clear()` starts the moments anew", "state")
def states_cleared(place):
    engine = place.small()
    train(engine, 2)
    engine.optimizer.state.clear()
    train(engine, 1)
    return values(engine.module)


@family.works_or_refused("a moment is scaled through `optimizer.state[p]['exp_avg'].mul_(0)`", "state")
def moment_changed(place):
    engine = place.small()
    train(engine, 2)
    for p in engine.module.parameters():
        engine.optimizer.state[p]["exp_avg"].mul_(0)
    train(engine, 1)
    return values(engine.module)


@family.works("`optimizer.state_dict()` of a torch AdamW is loaded into the engine's")
def state_dict_from_torch(place):
    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    for tokens, targets in data(2):
        nn.functional.cross_entropy(model(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    state = copy.deepcopy(optimizer.state_dict())
    engine = place.wrap(model)
    engine.optimizer.load_state_dict(state)
    train(engine, 2)
    return values(model)


@family.works("the engine's `optimizer.state_dict()` is loaded into a torch AdamW")
def state_dict_to_torch(place):
    engine = place.small()
    train(engine, 2)
    twin = small()
    twin.load_state_dict(engine.module.state_dict())
    optimizer = torch.optim.AdamW(twin.parameters(), lr=1.0)
    optimizer.load_state_dict(engine.optimizer.state_dict())
    for tokens, targets in data(2):
        nn.functional.cross_entropy(twin(tokens).flatten(0, 1), targets.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(twin), optimizer.state_dict()["param_groups"][0]["lr"]


@family.works("the keys of `optimizer.state_dict()['param_groups'][0]`")
def keys_of_groups(place):
    engine = place.small()
    found = set(engine.optimizer.state_dict()["param_groups"][0])
    return sorted(found & {"lr", "betas", "eps", "weight_decay", "amsgrad", "maximize", "params"})


@family.works("`copy.deepcopy(optimizer.state_dict())` and back: a rollback to an earlier point")
def rollback(place):
    engine = place.small()
    train(engine, 1)
    kept = copy.deepcopy((engine.state_dict(), engine.optimizer.state_dict()))
    train(engine, 2)
    engine.load_state_dict(kept[0])
    engine.optimizer.load_state_dict(kept[1])
    return train(engine, 2), values(engine.module)


@family.works("`optimizer.load_state_dict` of another model's raises")
def state_dict_of_other_model(place):
    engine = place.small()
    other = small(4)
    wrong = torch.optim.AdamW(other.parameters(), **ADAMW).state_dict()
    return place.attempt(lambda: engine.optimizer.load_state_dict(wrong)), train(engine), values(engine.module)


@family.works("`torch.save` and `torch.load` of `optimizer.state_dict()`")
def optimizer_state_saved(place):
    engine = place.small()
    train(engine, 2)
    torch.save(engine.optimizer.state_dict(), place.folder / "optimizer.pt")
    engine.optimizer.load_state_dict(torch.load(place.folder / "optimizer.pt", weights_only=True))
    return train(engine, 1), values(engine.module)


@family.works_or_refused("`pickle` of `engine.optimizer`", "state_dict")
def optimizer_pickled(place):
    import pickle

    engine = place.small()
    train(engine, 1)
    return len(pickle.loads(pickle.dumps(engine.optimizer)).param_groups)


@family.works_or_refused("`copy.deepcopy(engine.optimizer)`", "state_dict")
def optimizer_copied(place):
    engine = place.small()
    train(engine, 1)
    twin = copy.deepcopy(engine.optimizer)
    return [tuple(p.shape) for p in twin.param_groups[0]["params"]]


@family.works("`print(optimizer)`")
def optimizer_printed(place):
    engine = place.small()
    return "lr: 0.01" in repr(engine.optimizer)


@family.works("`isinstance(engine.optimizer, torch.optim.Optimizer)` and `optimizer.defaults['lr']`")
def optimizer_is_one(place):
    engine = place.small()
    return isinstance(engine.optimizer, torch.optim.Optimizer), engine.optimizer.defaults["lr"]


@family.works("`optimizer.register_step_pre_hook` and `_post_hook`")
def step_hooks(place):
    engine = place.small()
    seen = []
    engine.optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    engine.optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    train_by_hand(engine, 2)
    return seen


@family.works("a step pre-hook that scales gradients")
def step_hook_scales(place):
    engine = place.small()

    def halve(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            for p in group["params"]:
                p.grad.mul_(0.5)

    engine.optimizer.register_step_pre_hook(halve)
    train_by_hand(engine, 2)
    return values(engine.module)


@family.works("a group's gradients are dropped before the step: its parameters stay")
def group_skipped(place):
    engine = place.small()
    for loss in losses(engine, 2):
        loss.backward()
        for p in engine.module.blocks[1].parameters():
            p.grad = None
        found = gradients(engine.module)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


class _Table:
    """Options of some parameters, as a library keeps them beside the optimizer."""

    def __init__(self):
        self.of = {}


class _ByTable(torch.optim.SGD):
    def __init__(self, params, table, **options):
        super().__init__(params, **options)
        self.table = table

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-self.table.of.get(id(p), group["lr"]))


def _by_table(place, given_before):
    model, table = small(), _Table()
    if given_before:
        table.of[id(model.head.weight)] = 0.5
    engine = place.wrap(model, optimizer=_ByTable(model.parameters(), table, lr=0.01))
    found = train(engine)
    table.of[id(engine.module.embed.weight)] = 0.3
    return found, train(engine), values(engine.module)


@family.same_bits("rates of some parameters in a table by their `id()`, beside the optimizer")
def rates_by_id(place):
    return _by_table(place, True)


@family.same_bits("the same, put into the table after two steps")
def rates_by_id_later(place):
    return _by_table(place, False)


def _bitsandbytes(place, override):
    from bitsandbytes.optim import AdamW, GlobalOptimManager

    manager, model = GlobalOptimManager.get_instance(), small()
    manager.initialize()
    override(manager, model)
    engine = place.wrap(model, optimizer=AdamW(model.parameters(), lr=0.01, optim_bits=8, min_8bit_size=1024))
    return train(engine), values(engine.module)


@family.same_bits("bitsandbytes' `override_config` of one weight: another rate", needs=("bitsandbytes",))
def bitsandbytes_override(place):
    return _bitsandbytes(place, lambda manager, model: manager.override_config(model.head.weight, "lr", 0.1))


@family.same_bits(
    "bitsandbytes' `register_parameters` and `override_config`: one weight's states have 32 bits",
    needs=("bitsandbytes",),
)
def bitsandbytes_registered(place):
    def override(manager, model):
        manager.register_parameters(model.parameters())
        manager.override_config(model.head.weight, "optim_bits", 32)

    return _bitsandbytes(place, override)


@family.works("bitsandbytes' AdamW with states in 8 bits, no parameter apart", needs=("bitsandbytes",))
def bitsandbytes_in_8_bits(place):
    return _bitsandbytes(place, lambda manager, model: None)


@family.same_bits(
    "bitsandbytes' `register_module_override`, as `transformers` calls it for embeddings: their states have 32 bits",
    needs=("bitsandbytes",),
)
def bitsandbytes_of_modules(place):
    return _bitsandbytes(
        place, lambda manager, model: manager.register_module_override(model.embed, "weight", {"optim_bits": 32})
    )


@family.same_bits(
    "bitsandbytes' `register_module_override` of a bias's rate, and an override of another weight after two steps",
    needs=("bitsandbytes",),
)
def bitsandbytes_of_modules_and_later(place):
    from bitsandbytes.optim import AdamW, GlobalOptimManager

    manager, model = GlobalOptimManager.get_instance(), small()
    manager.initialize()
    engine = place.wrap(model, optimizer=AdamW(model.parameters(), lr=0.01, optim_bits=8, min_8bit_size=1024))
    manager.register_module_override(model.head, "weight", {"lr": 0.1})
    found = train(engine)
    manager.override_config(engine.module.embed.weight, "weight_decay", 0.5)
    found += train(engine)
    return found, values(engine.module), engine.optimizer.mng is manager, sorted(manager.index2config)


@family.same_bits(
    "bitsandbytes' options by place, left by another model, are this model's too: groups that begin with frozen ones",
    needs=("bitsandbytes",),
)
def bitsandbytes_by_place(place):
    from bitsandbytes.optim import GlobalOptimManager, Lion

    manager, model = GlobalOptimManager.get_instance(), small()
    manager.initialize()
    manager.index2config |= {(0, 2): {"lr": 0.1}, (1, 1): {"optim_bits": 32, "weight_decay": 0.5}}
    first, second, *rest = model.parameters()
    first.requires_grad_(False)
    groups = [{"params": [first, *rest[:3]]}, {"params": [*rest[3:], second], "weight_decay": 0.1}]
    engine = place.wrap(model, optimizer=Lion(groups, lr=0.003, optim_bits=8, min_8bit_size=1024))
    return train(engine), values(engine.module)


@family.works("AdamW with moments in 8 bits, by name: what the refusal names", rtol=0.1, atol=0.1)
def moments_in_8_bits_by_name(place):
    options = {"moments_dtype": "int8"} if place.has_engine else {}
    return train(place.small(lr=0.01, **options))
