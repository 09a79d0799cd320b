"""What programs do around an optimizer: wrappers, groups that change, state dicts on their way, subclasses."""

import copy
import warnings

import torch
from torch import nn
from torch.optim import lr_scheduler, swa_utils

from misuses.case import Family
from misuses.place import ADAMW, losses, small, train_by_hand, values

family = Family("optimizer programs")

_TOGETHER = r"cannot run one parameter at a time: .*docs/optimizers\.md"


def _setup(place, kind=torch.optim.AdamW, **options):
    model = small(2)
    optimizer = kind(model.parameters(), **(options or ADAMW))
    return model, optimizer, place.wrap(model, optimizer=optimizer)


class ByHand(torch.optim.Optimizer):
    """SGD, one parameter after the other."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.change(p)
                    p.sub_(p.grad, alpha=group["lr"])

    def change(self, p):
        pass


@family.refused("a parameter stands twice in the optimizer's list", "2 times")
def parameter_given_twice(place):
    model = small(2)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer = torch.optim.SGD([*model.parameters(), model.norm.weight], lr=0.1)
    return train_by_hand(place.wrap(model, optimizer=optimizer))


@family.works("AdamW with a group that decays as Adam does")
def group_decays_otherwise(place):
    model = small(2)
    groups = [{"params": model.blocks.parameters(), "decoupled_weight_decay": False}, {"params": [model.head.weight]}]
    engine = place.wrap(model, optimizer=torch.optim.AdamW(groups, lr=1e-2, eps=1e-4, weight_decay=0.5))
    return train_by_hand(engine, 3), values(model)


@family.works("weights and averages change places for an evaluation: `p.data, average = average, p.data`")
def averages_swapped(place):
    model, _, engine = _setup(place)
    averages = {name: p.detach().clone() for name, p in model.named_parameters()}
    found = []
    for _ in range(2):
        train_by_hand(engine, 1)
        for name, p in model.named_parameters():
            averages[name].lerp_(p.detach(), 0.3)
        for _ in range(2):
            for name, p in model.named_parameters():
                p.data, averages[name] = averages[name], p.data
            with torch.no_grad():
                found.append(next(losses(engine, 1, model)).item())
    return found, values(model), averages


@family.works("sharpness-aware minimisation: up the gradient, backward again, down, step")
def up_then_down(place):
    model, optimizer, engine = _setup(place, torch.optim.SGD, lr=0.1, momentum=0.9)
    for _ in range(2):
        next(losses(engine, 1, model)).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        with torch.no_grad():
            up = [0.05 * p.grad / norm for p in model.parameters()]
            torch._foreach_add_(list(model.parameters()), up)
        optimizer.zero_grad()
        next(losses(engine, 1, model)).backward()
        with torch.no_grad():
            for p, distance in zip(model.parameters(), up, strict=True):
                p.sub_(distance)
        optimizer.step()
        optimizer.zero_grad()
    return values(model)


@family.works("a learning rate that is a tensor, and `OneCycleLR` with momentum")
def tensor_rate_one_cycle(place):
    model, optimizer, engine = _setup(place, lr=torch.tensor(1e-2), eps=1e-4)
    schedule = lr_scheduler.OneCycleLR(optimizer, 2e-2, total_steps=6)
    for _ in range(3):
        train_by_hand(engine, 1)
        schedule.step()
    return values(model), optimizer.param_groups[0]["betas"]


@family.works("`GradScaler`, an infinite loss, and `unscale_` in every second step, over RMSprop")
def scaler_over_rmsprop(place):
    model, optimizer, engine = _setup(place, torch.optim.RMSprop, lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
    for number, loss in enumerate(losses(engine, 3, model)):
        optimizer.zero_grad()
        scaler.scale(loss * (float("inf") if number == 1 else 1.0)).backward()
        if number % 2:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        scaler.update()
    return values(model), scaler.get_scale()


@family.works("`SWALR` and `AveragedModel`, whose weights are loaded in the end")
def averaged_and_loaded(place):
    model, optimizer, engine = _setup(place, torch.optim.SGD, lr=0.1, momentum=0.9)
    averaged, schedule = swa_utils.AveragedModel(model), swa_utils.SWALR(optimizer, 0.01, 2)
    for _ in range(3):
        train_by_hand(engine, 1)
        schedule.step()
        averaged.update_parameters(model)
    model.load_state_dict(averaged.module.state_dict())
    train_by_hand(engine, 1)
    return values(model)


@family.works("Adam's state dict is loaded into AdamW")
def adams_states_into_adamw(place):
    before = small(2)
    adam = torch.optim.Adam(before.parameters(), lr=1e-2, eps=1e-4, weight_decay=0.3)
    next(losses(None, 1, before)).backward()
    adam.step()
    model, optimizer, engine = _setup(place)
    optimizer.load_state_dict(adam.state_dict())
    return train_by_hand(engine), values(model), optimizer.param_groups[0]["decoupled_weight_decay"]


@family.works("a counter in a group is rolled back by an earlier state dict")
def counter_rolled_back(place):
    class Counting(ByHand):
        def step(self, closure=None):
            for group in self.param_groups:
                group["count"] = group.get("count", 0) + 1
                group["lr"] = 0.1 / group["count"]
            return super().step(closure)

    model = small(2)
    optimizer = Counting(model.parameters())
    engine = place.wrap(model, optimizer=optimizer)
    first = copy.deepcopy(optimizer.state_dict())
    train_by_hand(engine, 2)
    optimizer.load_state_dict(first)
    return train_by_hand(engine, 2), values(model), optimizer.param_groups[0]["count"]


@family.works("a `zero_grad` of the optimizer's own that leaves half of each gradient, between two backwards")
def own_zero_grad(place):
    class Halving(torch.optim.SGD):
        def zero_grad(self):
            for group in self.param_groups:
                for p in group["params"]:
                    if p.grad is not None:
                        p.grad.mul_(0.5)

    model, optimizer, engine = _setup(place, Halving, lr=0.1)
    for loss in losses(engine, 2, model):
        optimizer.zero_grad()
        loss.backward()
    optimizer.step()
    return values(model)


@family.refused("a step that divides by the norm of all gradients from the sixth on", _TOGETHER)
def norm_of_all_later(place):
    class Later(ByHand):
        count = 0

        def step(self, closure=None):
            self.count += 1
            gradients = [p.grad for p in self.param_groups[0]["params"] if p.grad is not None]
            if self.count > 5:
                torch._foreach_div_(gradients, torch.stack([g.norm() for g in gradients]).norm())
            return super().step(closure)

    model = small(2)
    return train_by_hand(place.wrap(model, optimizer=Later(model.parameters())), 7)


@family.refused("a step that adds noise from its fifth on", _TOGETHER)
def noise_later(place):
    class Noisy(ByHand):
        def change(self, p):
            state = self.state[p]
            state["n"] = state.get("n", 0) + 1
            if state["n"] > 4:
                p.add_(torch.randn_like(p), alpha=0.01)

    model = small(2)
    return train_by_hand(place.wrap(model, optimizer=Noisy(model.parameters())), 6)


@family.refused("a step that looks at a parameter of the model by name", "looks at a parameter of the model")
def step_looks_at_model(place):
    model = small(2)

    class Looking(ByHand):
        def change(self, p):
            p.grad.mul_(model.norm.weight.mean())

    return train_by_hand(place.wrap(model, optimizer=Looking(model.parameters())))


@family.refused("`state['start'] = p.data`, without a clone", "is the parameter itself")
def state_is_parameter(place):
    class Pulled(ByHand):
        def change(self, p):
            p.lerp_(self.state[p].setdefault("start", p.data), 0.1)

    model = small(2)
    return train_by_hand(place.wrap(model, optimizer=Pulled(model.parameters())))


@family.refused("a learning rate that has become NaN", "lr must be finite")
def rate_is_nan(place):
    model, optimizer, engine = _setup(place)
    optimizer.param_groups[0]["lr"] = float("nan")
    return train_by_hand(engine, 1), values(model)


@family.works("gradients with noise, of several losses projected on each other, and some taken away")
def gradients_edited(place):
    model, optimizer, engine = _setup(place)
    generator = torch.Generator().manual_seed(5)
    for number, loss in enumerate(losses(engine, 3, model)):
        loss.backward()
        for p in model.parameters():
            p.grad += torch.randn(p.shape, generator=generator) * 0.01
        if number == 1:
            model.head.weight.grad = model.head.weight.grad.sign()
            model.blocks[0].up.weight.grad = None
        nn.utils.clip_grad_value_(model.parameters(), 0.01)
        optimizer.step()
        optimizer.zero_grad()
    return values(model), optimizer.state_dict()["state"]
