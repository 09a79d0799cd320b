"""Every scheduler of torch, on ``engine.optimizer``."""

from torch.optim import lr_scheduler as of_torch

from misuses.case import Family
from misuses.place import losses, small, train, train_by_hand, values

family = Family("schedulers")

_MAKERS = {
    "StepLR": lambda o: of_torch.StepLR(o, 2, 0.5),
    "MultiStepLR": lambda o: of_torch.MultiStepLR(o, [1, 3], 0.5),
    "LambdaLR": lambda o: of_torch.LambdaLR(o, lambda step: 0.9**step),
    "MultiplicativeLR": lambda o: of_torch.MultiplicativeLR(o, lambda step: 0.9),
    "ConstantLR": lambda o: of_torch.ConstantLR(o, 0.5, 2),
    "LinearLR": lambda o: of_torch.LinearLR(o, 0.1, total_iters=3),
    "ExponentialLR": lambda o: of_torch.ExponentialLR(o, 0.8),
    "PolynomialLR": lambda o: of_torch.PolynomialLR(o, 5, 2.0),
    "CosineAnnealingLR": lambda o: of_torch.CosineAnnealingLR(o, 4, 1e-4),
    "CosineAnnealingWarmRestarts": lambda o: of_torch.CosineAnnealingWarmRestarts(o, 2),
    "OneCycleLR": lambda o: of_torch.OneCycleLR(o, 1e-2, total_steps=6),
    "CyclicLR": lambda o: of_torch.CyclicLR(o, 1e-3, 1e-2, step_size_up=2),
    "ChainedScheduler": lambda o: of_torch.ChainedScheduler(
        [of_torch.ExponentialLR(o, 0.8), of_torch.ConstantLR(o, 0.5, 2)]
    ),
    "SequentialLR": lambda o: of_torch.SequentialLR(
        o, [of_torch.LinearLR(o, 0.1, total_iters=2), of_torch.ExponentialLR(o, 0.8)], [2]
    ),
}


def with_scheduler(make):
    """A case of four steps with the scheduler that ``make`` makes of an optimizer."""

    def case(place):
        engine = place.small()
        scheduler = make(engine.optimizer)
        rates = []
        for loss in losses(engine, 4):
            engine.backward(loss)
            engine.step()
            scheduler.step()
            rates.append([group["lr"] for group in engine.optimizer.param_groups] + scheduler.get_last_lr())
        return rates, values(engine.module)

    return case


for _name, _make in _MAKERS.items():
    _case = with_scheduler(_make)
    _case.__name__ = f"scheduler_{_name}"
    family.works(f"`{_name}`")(_case)


@family.works("`ReduceLROnPlateau`")
def scheduler_plateau(place):
    engine = place.small()
    scheduler = of_torch.ReduceLROnPlateau(engine.optimizer, patience=0, factor=0.5)
    rates = []
    for loss in losses(engine, 4):
        engine.backward(loss)
        engine.step()
        scheduler.step(1.0)
        rates.append(engine.optimizer.param_groups[0]["lr"])
    return rates, values(engine.module)


@family.works("a scheduler that was built on the given optimizer before wrapping")
def scheduler_from_before(place):
    import torch

    model = small()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    scheduler = of_torch.OneCycleLR(optimizer, 1e-2, total_steps=6)
    engine = place.wrap(model, optimizer=optimizer)
    for loss in losses(engine, 4):
        engine.backward(loss)
        engine.step()
        scheduler.step()
    return values(model)


@family.works("a scheduler's `state_dict` saved and loaded into a new one")
def scheduler_saved(place):
    engine = place.small()
    scheduler = of_torch.CosineAnnealingLR(engine.optimizer, 6)
    for _ in range(2):
        train(engine, 1)
        scheduler.step()
    state = scheduler.state_dict()
    scheduler = of_torch.CosineAnnealingLR(engine.optimizer, 6)
    scheduler.load_state_dict(state)
    for _ in range(2):
        train(engine, 1)
        scheduler.step()
    return scheduler.get_last_lr(), values(engine.module)


@family.works("`scheduler.step()` before `optimizer.step()`, the old order, warns as in PyTorch")
def scheduler_first(place):
    import warnings

    engine = place.small()
    scheduler = of_torch.StepLR(engine.optimizer, 1, 0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loss in losses(engine, 2):
            scheduler.step()
            engine.backward(loss)
            engine.step()
    return ["optimizer.step()" in str(item.message) for item in caught], values(engine.module)


@family.works("the right order warns of nothing")
def scheduler_does_not_warn(place):
    import warnings

    engine = place.small()
    scheduler = of_torch.StepLR(engine.optimizer, 1, 0.5)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for loss in losses(engine, 2):
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            scheduler.step()
    return [str(item.message) for item in caught]


@family.works("a scheduler with `gradient_accumulation_steps=2`, stepped when a step was taken")
def scheduler_with_accumulation(place):
    engine = place.small(gradient_accumulation_steps=2)
    scheduler = of_torch.ExponentialLR(engine.optimizer, 0.5)
    for index, loss in enumerate(losses(engine, 4)):
        engine.backward(loss)
        if index % 2:
            engine.step()
            scheduler.step()
    return values(engine.module)


@family.works("warm-up by hand: `for g in optimizer.param_groups: g['lr'] = ...`")
def warm_up_by_hand(place):
    engine = place.small()
    for step in range(3):
        for group in engine.optimizer.param_groups:
            group["lr"] = 1e-3 * (step + 1)
        train_by_hand(engine, 1)
    return values(engine.module)
