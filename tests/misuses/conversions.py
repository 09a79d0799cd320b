"""A wrapped model is converted, moved, copied, saved and loaded."""

import copy
import io
import pickle

import torch
from tiny import loss_of
from torch import nn

from misuses.case import Family
from misuses.place import ADAMW, data, losses, small, train, values

family = Family("conversions")


def _converted(place, convert):
    engine = place.small()
    train(engine, 1)
    found = convert(engine.module)
    return found is engine.module, train(engine, 2), values(engine.module)


_WAY = r"precision=|[Cc]onvert the model first"


@family.refused("`model.half()`", _WAY)
def half(place):
    return _converted(place, lambda model: model.half())


@family.refused("`model.bfloat16()`", _WAY)
def bfloat16(place):
    return _converted(place, lambda model: model.bfloat16())


@family.refused("`model.double()`", _WAY)
def double(place):
    return _converted(place, lambda model: model.double())


@family.refused("`model.to(torch.bfloat16)`", _WAY)
def to_dtype(place):
    return _converted(place, lambda model: model.to(torch.bfloat16))


@family.refused("`model.type(torch.float64)`", _WAY)
def type_(place):
    return _converted(place, lambda model: model.type(torch.float64))


@family.refused("`model.head.half()`: one layer", _WAY)
def half_of_one_layer(place):
    return _converted(place, lambda model: model.head.half())


@family.works("after `model.half()` was refused, the model is as it was")
def half_then_on(place):
    engine = place.small()
    train(engine, 1)
    if place.has_engine:
        place.attempt(engine.module.half)
        place.messages.clear()
    return train(engine, 2), values(engine.module)


@family.works("`model.float()`, where it is fp32 already")
def float_(place):
    return _converted(place, lambda model: model.float())


@family.works("`model.to('cpu')`, `.cpu()`")
def to_cpu(place):
    return _converted(place, lambda model: model.to("cpu").cpu())


@family.works("`model.to(device='cpu', dtype=torch.float32)`, `model.to(other_tensor)`")
def to_device_and_dtype(place):
    return _converted(place, lambda model: model.to(device="cpu", dtype=torch.float32).to(torch.zeros(1)))


@family.works("`model.cuda()` without CUDA raises")
def cuda(place):
    engine = place.small()
    return place.attempt(lambda: engine.module.to("cuda:0")), train(engine, 1), values(engine.module)


@family.works_or_refused("`model.to('meta')`", "meta|device|engine")
def to_meta(place):
    engine = place.small()
    engine.module.to("meta")
    return [p.is_meta for p in engine.module.parameters()]


@family.works_or_refused("`model.to_empty(device='cpu')`", "engine")
def to_empty(place):
    engine = place.small()
    train(engine, 1)
    engine.module.to_empty(device="cpu")
    twin = small()
    engine.module.load_state_dict(twin.state_dict())
    return train(engine, 1)


@family.works("`model.to(memory_format=torch.channels_last)`")
def channels_last(place):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(12)))
    engine = place.wrap(model)
    model.to(memory_format=torch.channels_last)
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 8, 6, 6)).square().mean())
        engine.step()
    return values(model)


@family.works("`channels_last` before wrapping")
def channels_last_before(place):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.ReLU()) for _ in range(12)))
    model.to(memory_format=torch.channels_last)
    engine = place.wrap(model)
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 8, 6, 6)).square().mean())
        engine.step()
    return values(model)


@family.works("`model._apply(lambda t: t)`, `model._apply(torch.clone)`")
def apply_private(place):
    return _converted(place, lambda model: model._apply(lambda t: t.clone()))


@family.works("`copy.deepcopy(model)`, then training both")
def deepcopied(place):
    engine = place.small()
    train(engine, 1)
    twin = place.wrap(copy.deepcopy(engine.module))
    return train(engine, 2), train(twin, 1), values(engine.module), values(twin.module)


@family.works("`copy.deepcopy(model)` gives an ordinary model that torch's AdamW trains")
def deepcopied_is_ordinary(place):
    engine = place.small()
    train(engine, 1)
    twin = copy.deepcopy(engine.module)
    optimizer = torch.optim.AdamW(twin.parameters(), **ADAMW)
    for tokens, targets in data(2):
        loss_of(twin(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(twin), values(engine.module)


@family.works("`copy.deepcopy(model.blocks[0])`")
def deepcopied_block(place):
    engine = place.small()
    train(engine, 1)
    block = copy.deepcopy(engine.module.blocks[0])
    torch.manual_seed(0)
    return block(torch.randn(2, 32)), values(block)


@family.works("`copy.deepcopy(p)`")
def deepcopied_parameter(place):
    engine = place.small()
    q = copy.deepcopy(engine.module.head.weight)
    return q, type(q).__name__, q.requires_grad


@family.works("a deepcopy with gradients: `deepcopy` of a parameter keeps its `grad`")
def deepcopied_with_gradients(place):
    engine = place.small()
    next(losses(engine, 1)).backward()
    twin = copy.deepcopy(engine.module)
    return [None if p.grad is None else p.grad for p in twin.parameters()]


@family.works("a tied weight stays tied in a deepcopy")
def deepcopied_tied(place):
    model = small()
    model.head.weight = model.embed.weight
    engine = place.wrap(model)
    train(engine, 1)
    twin = copy.deepcopy(model)
    return twin.head.weight is twin.embed.weight, len(list(twin.parameters()))


@family.works("`copy.copy(model)` shares the parameters: training one is seen in the other")
def shallow_copied(place):
    engine = place.small()
    twin = copy.copy(engine.module)
    train(engine, 1)
    return values(twin), [loss.item() for loss in losses(engine, 1, twin)]


@family.works_or_refused("`copy.copy(p)`", "copy")
def shallow_copied_parameter(place):
    engine = place.small()
    return copy.copy(engine.module.head.weight)


@family.works_or_refused("`copy.deepcopy(engine)`, `pickle.dumps(engine)`", "state_dict")
def engine_copied(place):
    engine = place.small()
    twin = copy.deepcopy(engine)
    return train(engine, 1), values(twin.module)


@family.works("`torch.save(model)` and `torch.load(weights_only=False)`")
def model_saved(place):
    engine = place.small()
    train(engine, 1)
    torch.save(engine.module, place.folder / "model.pt")
    twin = torch.load(place.folder / "model.pt", weights_only=False)
    return values(twin), next(type(p).__name__ for p in twin.parameters()), [loss.item() for loss in losses(twin, 1)]


@family.works("the model that was loaded so is trained by torch")
def model_saved_and_trained(place):
    engine = place.small()
    train(engine, 1)
    torch.save(engine.module, place.folder / "model.pt")
    twin = torch.load(place.folder / "model.pt", weights_only=False)
    optimizer = torch.optim.AdamW(twin.parameters(), **ADAMW)
    for tokens, targets in data(2):
        loss_of(twin(tokens), targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return values(twin)


@family.works("`pickle.dumps(model)`, `pickle.loads`")
def model_pickled(place):
    engine = place.small()
    return values(pickle.loads(pickle.dumps(engine.module)))


@family.works("`torch.save(model.state_dict())`, `torch.load` with `weights_only=True`")
def state_dict_saved(place):
    engine = place.small()
    train(engine, 1)
    buffer = io.BytesIO()
    torch.save(engine.module.state_dict(), buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=True)


@family.works("`torch.save(p)`, `torch.save(list(model.parameters()))`, `torch.save(p.data)`")
def parameters_saved(place):
    engine = place.small()
    buffer = io.BytesIO()
    p = engine.module.head.weight
    torch.save([p, p.data, p.detach(), p[0]], buffer)
    buffer.seek(0)
    found = torch.load(buffer, weights_only=True)
    return [type(t).__name__ for t in found], found


@family.works("a checkpoint of model, optimizer and scheduler, resumed in a new engine")
def checkpoint_resumed(place):
    engine = place.small()
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    train(engine, 2)
    scheduler.step()
    torch.save(
        {
            "model": engine.module.state_dict(),
            "optimizer": engine.optimizer.state_dict(),
            "scheduler": scheduler.state_dict(),
        },
        place.folder / "checkpoint.pt",
    )
    engine.close()
    saved = torch.load(place.folder / "checkpoint.pt", weights_only=True)
    model = small()
    model.load_state_dict(saved["model"])
    engine = place.wrap(model)
    scheduler = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1, 0.5)
    engine.optimizer.load_state_dict(saved["optimizer"])
    scheduler.load_state_dict(saved["scheduler"])
    found = train(engine, 2)
    scheduler.step()
    return found, train(engine, 1), values(model), scheduler.get_last_lr()


@family.works("safetensors' `save_file(model.state_dict())`", needs=("safetensors",))
def safetensors_file(place):
    from safetensors.torch import load_file, save_file

    engine = place.small()
    train(engine, 1)
    save_file(engine.module.state_dict(), place.folder / "model.safetensors")
    return load_file(place.folder / "model.safetensors")


@family.works("safetensors' `save_model(model)` and `load_model`", needs=("safetensors",))
def safetensors_model(place):
    from safetensors.torch import load_model, save_model

    engine = place.small()
    train(engine, 1)
    save_model(engine.module, str(place.folder / "model.safetensors"))
    twin = small()
    load_model(twin, str(place.folder / "model.safetensors"))
    return values(twin)


@family.works("safetensors' `load_model` into the wrapped model", needs=("safetensors",))
def safetensors_loaded(place):
    from safetensors.torch import load_model, save_model

    save_model(small(), str(place.folder / "model.safetensors"))
    engine = place.small()
    train(engine, 1)
    load_model(engine.module, str(place.folder / "model.safetensors"))
    return train(engine, 1), values(engine.module)


@family.works("`torch.distributed.checkpoint` of `model.state_dict()`, without processes")
def distributed_checkpoint(place):
    import torch.distributed.checkpoint as dcp

    engine = place.small()
    train(engine, 1)
    dcp.save({"model": engine.module.state_dict()}, checkpoint_id=str(place.folder / "dcp"), no_dist=True)
    found = {"model": small().state_dict()}
    dcp.load(found, checkpoint_id=str(place.folder / "dcp"), no_dist=True)
    return found


@family.works_or_refused("`torch.distributed.checkpoint.state_dict.get_model_state_dict(model)`", "state_dict")
def distributed_state_dict(place):
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    engine = place.small()
    train(engine, 1)
    return get_model_state_dict(engine.module)


@family.works_or_refused("`get_state_dict(model, optimizer)` of `torch.distributed.checkpoint`", "state_dict")
def distributed_state_dict_of_optimizer(place):
    from torch.distributed.checkpoint.state_dict import get_state_dict

    engine = place.small()
    train(engine, 1)
    return get_state_dict(engine.module, engine.optimizer)[1]["state"]


@family.works("`load_state_dict` between steps")
def loaded(place):
    engine = place.small()
    train(engine, 1)
    found = engine.module.load_state_dict(small().state_dict())
    return str(found), train(engine, 2), values(engine.module)


@family.works("`load_state_dict` between forward and backward: PyTorch raises")
def loaded_before_backward(place):
    engine = place.small()
    loss = next(losses(engine, 1))
    engine.module.load_state_dict(small().state_dict())
    loss.backward()


@family.works("`load_state_dict` between backward and step")
def loaded_before_step(place):
    engine = place.small()
    train(engine, 1)
    next(losses(engine, 1)).backward()
    engine.module.load_state_dict(small().state_dict())
    engine.optimizer.step()
    return values(engine.module)


@family.works("`load_state_dict(strict=False)` with a part, and with keys that nobody knows")
def loaded_in_part(place):
    engine = place.small()
    train(engine, 1)
    state = {k: v for k, v in small().state_dict().items() if "blocks.1" in k}
    found = engine.module.load_state_dict({**state, "nobody": torch.ones(1)}, strict=False)
    return sorted(found.missing_keys), found.unexpected_keys, train(engine, 1), values(engine.module)


@family.works("`load_state_dict` with missing keys raises, and with a wrong shape")
def loaded_wrongly(place):
    engine = place.small()
    state = small().state_dict()
    wrong = {**state, "head.weight": torch.zeros(3, 3)}
    part = dict(list(state.items())[1:])
    return (
        place.attempt(lambda: engine.module.load_state_dict(wrong)),
        place.attempt(lambda: engine.module.load_state_dict(part)),
        train(engine, 1),
        values(engine.module),
    )


@family.works_or_refused("`load_state_dict(assign=True)`", "assign|copy_")
def loaded_by_assignment(place):
    engine = place.small()
    train(engine, 1)
    engine.module.load_state_dict(small().state_dict(), assign=True)
    return train(engine, 2), values(engine.module)


@family.works("`load_state_dict` of one block")
def loaded_block(place):
    engine = place.small()
    train(engine, 1)
    engine.module.blocks[0].load_state_dict(small().blocks[1].state_dict())
    return train(engine, 1), values(engine.module)


@family.works("`load_state_dict` of another wrapped model's `state_dict()`")
def loaded_from_wrapped(place):
    one, other = place.small(), place.small()
    train(one, 2)
    other.module.load_state_dict(one.module.state_dict())
    return train(other, 1), values(other.module)


@family.works("`load_state_dict(model.state_dict())` of its own changes nothing")
def loaded_own(place):
    engine = place.small()
    train(engine, 1)
    engine.module.load_state_dict(engine.module.state_dict())
    return train(engine, 2), values(engine.module)


@family.works("`load_state_dict` in bf16 into an fp32 engine")
def loaded_in_bf16(place):
    engine = place.small()
    engine.module.load_state_dict({k: v.bfloat16() for k, v in small().state_dict().items()})
    return train(engine, 1), values(engine.module)


@family.works("`dict(model.named_parameters())` is loaded into another model")
def loaded_from_named_parameters(place):
    engine = place.small()
    train(engine, 1)
    twin = small()
    twin.load_state_dict(dict(engine.module.named_parameters()))
    return values(twin)


@family.differs(
    "a `state_dict()` is kept over steps, and follows them in PyTorch", "its tensors are copies of that moment"
)
def state_dict_is_live(place):
    engine = place.small()
    state = engine.module.state_dict()
    train(engine, 2)
    return state


@family.differs(
    "`model.state_dict()['head.weight'].fill_(1)` writes to the model in PyTorch",
    "a state dict holds copies. Write to the parameter: `model.head.weight.data.fill_(1)`.",
)
def state_dict_written(place):
    engine = place.small()
    engine.module.state_dict()["head.weight"].fill_(1)
    return values(engine.module)


@family.works("`state_dict(keep_vars=True)` holds the parameters")
def state_dict_keep_vars(place):
    engine = place.small()
    state = engine.module.state_dict(keep_vars=True)
    return state["head.weight"] is engine.module.head.weight, [isinstance(v, nn.Parameter) for v in state.values()]


@family.works("`state_dict(destination=..., prefix='model.')`")
def state_dict_prefix(place):
    engine = place.small()
    found = {}
    engine.module.state_dict(destination=found, prefix="model.")
    return found


@family.works("`state_dict` hooks of the user's, `_register_state_dict_hook`, `_register_load_state_dict_pre_hook`")
def state_dict_hooks(place):
    engine = place.small()
    model = engine.module
    model.register_state_dict_post_hook(lambda m, state, prefix, meta: state.update(extra=state["head.weight"] + 1))
    model.register_load_state_dict_pre_hook(lambda m, state, *_: state.pop("extra", None))
    state = model.state_dict()
    model.load_state_dict(state)
    return state


@family.works("the model in `nn.Sequential(model, more)`: `state_dict` of the whole")
def state_dict_of_outer(place):
    engine = place.small()
    outer = nn.Sequential(engine.module, nn.Linear(64, 3))
    return sorted(outer.state_dict()), {k: v for k, v in outer.state_dict().items() if k.startswith("0.")}


@family.works("`model.eval()`, `model.train(False)`, `model.train()` with dropout")
def eval_and_train(place):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.Dropout(0.5)) for _ in range(12)))
    engine = place.wrap(model)
    found = []
    for mode in (True, False, True):
        model.train(mode)
        torch.manual_seed(2)
        loss = engine(torch.ones(4, 48)).square().mean()
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found, values(model)


@family.works("`summary`: `sum(p.element_size() * p.nelement() ...)`, `model.__sizeof__`, `sys.getsizeof`")
def sizes(place):
    engine = place.small()
    return sum(p.element_size() * p.nelement() for p in engine.module.parameters())


@family.works("`str(model.state_dict().keys())`, `len(model.state_dict())`, `_metadata`")
def state_dict_keys(place):
    engine = place.small()
    state = engine.module.state_dict()
    return list(state), len(state), dict(state._metadata)


@family.works("`torch.nn.utils.skip_init`, `model.half()` on another, unrelated model beside")
def unrelated_model(place):
    engine = place.small()
    other = torch.nn.utils.skip_init(nn.Linear, 4, 4).half()
    return other.weight.dtype, train(engine, 1)
