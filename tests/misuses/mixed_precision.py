"""``autocast``, ``GradScaler`` and the engine's own 16-bit precisions."""

import torch
from tiny import loss_of
from torch import nn

from misuses.case import Family
from misuses.place import data, gradients, losses, small, train, values

family = Family("mixed precision")


@family.works("`torch.autocast('cpu', bfloat16)` over an fp32 engine", rtol=1e-3, atol=1e-4)
def autocast(place):
    engine = place.small()
    found = []
    for tokens, targets in data(3):
        with torch.autocast("cpu", torch.bfloat16):
            loss = loss_of(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


@family.works("`autocast` around one evaluation, then training in fp32")
def autocast_for_evaluation(place):
    engine = place.small()
    tokens, _ = data(1)[0]
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        engine(tokens)
    return train(engine, 2), values(engine.module)


@family.works("`GradScaler('cpu')` around PyTorch's loop in fp32")
def grad_scaler(place):
    engine = place.small()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for loss in losses(engine, 3):
        engine.optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(engine.optimizer)
        scaler.update()
    return scaler.get_scale(), values(engine.module)


@family.works("`GradScaler` with `unscale_` and `clip_grad_norm_`")
def grad_scaler_unscale_clip(place):
    engine = place.small()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    norms = []
    for loss in losses(engine, 3):
        engine.optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(engine.optimizer)
        norms.append(nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1).item())
        scaler.step(engine.optimizer)
        scaler.update()
    return norms, values(engine.module)


@family.works("`GradScaler` skips a step with an infinite gradient, and halves its scale")
def grad_scaler_skips(place):
    engine = place.small()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    scales = []
    for index, loss in enumerate(losses(engine, 3)):
        engine.optimizer.zero_grad()
        scaler.scale(loss * (float("inf") if index == 1 else 1.0)).backward()
        scaler.step(engine.optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, values(engine.module)


@family.works("`GradScaler(enabled=False)`")
def grad_scaler_disabled(place):
    engine = place.small()
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for loss in losses(engine, 2):
        engine.optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(engine.optimizer)
        scaler.step(engine.optimizer)
        scaler.update()
    return values(engine.module)


@family.works("`GradScaler` with fp16 `autocast`", rtol=2e-3, atol=1e-3)
def grad_scaler_autocast_fp16(place):
    engine = place.small()
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = []
    for tokens, targets in data(3):
        engine.optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = loss_of(engine(tokens), targets)
        scaler.scale(loss).backward()
        scaler.step(engine.optimizer)
        scaler.update()
        found.append(loss.item())
    return found


@family.works_or_refused("`GradScaler` over an engine with `precision='fp16'`", "scale", rtol=2e-2, atol=1e-2)
def grad_scaler_with_fp16_engine(place):
    engine = place.small(precision="fp16")
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    found = []
    for tokens, targets in data(3):
        engine.optimizer.zero_grad()
        loss = loss_of(engine(tokens), targets)
        scaler.scale(loss).backward()
        scaler.step(engine.optimizer)
        scaler.update()
        found.append(loss.item())
    return found


@family.works("`precision='bf16'`: losses near those of fp32", rtol=2e-2, atol=2e-2)
def bf16_engine(place):
    engine = place.small(precision="bf16")
    return train(engine, 3)


@family.works_or_refused("`precision='fp16'` by `loss.backward()`", r"engine\.backward", rtol=2e-2, atol=2e-2)
def fp16_engine_plain_backward(place):
    engine = place.small(precision="fp16")
    found = []
    for tokens, targets in data(3):
        engine.optimizer.zero_grad()
        loss = loss_of(engine(tokens), targets)
        loss.backward()
        engine.optimizer.step()
        found.append(loss.item())
    return found


@family.works("`precision='bf16'`, an fp32 input given to the model and not to the engine: as a bf16 model does")
def bf16_engine_model_called(place):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(12)))
    if not place.has_engine:
        model = model.bfloat16()
    place.wrap(model, precision="bf16")
    return place.attempt(lambda: model(torch.randn(4, 48)))


@family.works(
    "BatchNorm's running statistics with `precision='bf16'` are those of `model.bfloat16()`", rtol=2e-2, atol=1e-2
)
def batch_norm_in_bf16(place):
    torch.manual_seed(1)
    model = nn.Sequential(nn.BatchNorm1d(48), *(nn.Sequential(nn.Linear(48, 48), nn.Tanh()) for _ in range(12)))
    model[0].momentum = 0.004
    if not place.has_engine:
        model.bfloat16()
    engine = place.wrap(model, precision="bf16")
    with torch.no_grad():
        for _ in range(300):
            engine((torch.randn(16, 48) + 3).bfloat16())
    return model[0].running_mean.float(), model[0].running_var.float(), int(model[0].num_batches_tracked)


@family.works("a model that is half bf16, half fp32, wrapped in fp32", rtol=1e-1, atol=5e-2)
def model_of_two_dtypes(place):
    model = small()
    model.blocks[0].up.bfloat16()
    if not place.has_engine:
        model.blocks[0].up.float()
    engine = place.wrap(model)
    return train(engine, 2), sorted({str(p.dtype) for p in model.parameters()})


@family.works_or_refused("a model in float64, wrapped in fp32", "float64|precision", rtol=1e-4, atol=1e-4)
def model_in_float64(place):
    model = small().double()
    if not place.has_engine:
        model.float()
    engine = place.wrap(model)
    return train(engine, 2), sorted({str(p.dtype) for p in model.parameters()})


@family.works("gradients are fp32 in an fp32 engine under autocast", rtol=2e-2, atol=1e-3)
def gradients_under_autocast(place):
    engine = place.small()
    tokens, targets = data(1)[0]
    with torch.autocast("cpu", torch.bfloat16):
        loss = loss_of(engine(tokens), targets)
    loss.backward()
    return {str(g.dtype) for g in gradients(engine.module).values()}


@family.works("`set_default_dtype(float64)` after wrapping: the weights stay fp32")
def default_dtype_changed(place):
    engine = place.small()
    torch.set_default_dtype(torch.float64)
    found = train(engine, 2)
    torch.set_default_dtype(torch.float32)
    return found, values(engine.module)


@family.works("`set_default_dtype(bfloat16)` while wrapping")
def default_dtype_while_wrapping(place):
    model = small()
    torch.set_default_dtype(torch.bfloat16)
    engine = place.wrap(model)
    torch.set_default_dtype(torch.float32)
    return train(engine, 2), values(model)


@family.works("`torch.set_default_device('meta')` while wrapping and training")
def default_device_meta(place):
    model, batches = small(), data(2)
    torch.set_default_device("meta")
    engine = place.wrap(model)
    found = []
    for tokens, targets in batches:
        loss = loss_of(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    torch.set_default_device(None)
    return found, values(model)
