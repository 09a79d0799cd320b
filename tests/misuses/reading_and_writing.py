"""What people do with a parameter's value outside of its module's forward."""

import copy
import ctypes

import torch
from torch import nn

from misuses.case import Family
from misuses.place import data, losses, small, train, values

family = Family("values")


def _written(place, write):
    """Train, write, train on: the weights at the end, and what ``write`` gave."""
    engine = place.small()
    train(engine, 1)
    found = write(engine.module)
    return found if not isinstance(found, (list, torch.Tensor)) else None, train(engine, 2), values(engine.module)


@family.works("`p.data = t`")
def data_assigned(place):
    def write(model):
        for p in model.parameters():
            p.data = p.data * 0.9

    return _written(place, write)


@family.works("`p.data.copy_(t)`")
def data_copied(place):
    return _written(place, lambda model: model.head.weight.data.copy_(torch.ones(64, 32)))


@family.works("`p.data.clamp_`, `.mul_`, `.add_`, `.fill_`, `.zero_`")
def data_changed(place):
    def write(model):
        model.head.weight.data.clamp_(-0.1, 0.1)
        model.blocks[0].up.weight.data.mul_(0.5).add_(0.01)
        model.blocks[1].up.bias.data.fill_(0.1)
        model.blocks[2].up.bias.data.zero_()

    return _written(place, write)


@family.works("`p.data[0] = 1`, `p.data[:, 1] += 1`")
def data_indexed(place):
    def write(model):
        model.head.weight.data[0] = 1
        model.head.weight.data[:, 1] += 1
        model.embed.weight.data[torch.tensor([3, 5])] = 0

    return _written(place, write)


@family.works("`p.copy_`, `p.mul_`, `p[0] = 1` under `no_grad`")
def changed_under_no_grad(place):
    @torch.no_grad()
    def write(model):
        model.head.weight.copy_(torch.ones(64, 32))
        model.blocks[0].up.weight.mul_(0.5)
        model.blocks[1].up.bias[0] = 1
        model.blocks[1].up.bias[1:3] += 1

    return _written(place, write)


@family.works("`p.mul_(2)` with gradients enabled raises")
def changed_with_grad(place):
    engine = place.small()
    return place.attempt(lambda: engine.module.head.weight.mul_(2)), values(engine.module)


@family.works("`p.view(-1)[0] = 1` and `p.t()[0] = 1`, `p.reshape(-1)[3:5] = 0`, `p.T.mul_`, `p.flatten()`")
def written_through_views(place):
    @torch.no_grad()
    def write(model):
        model.head.weight.view(-1)[0] = 1
        model.head.weight.t()[0] = 1
        model.blocks[0].up.weight.reshape(-1)[3:5] = 0
        model.blocks[1].up.weight.T.mul_(0.5)
        model.blocks[2].up.weight.flatten()[7] = 2
        model.blocks[3].up.weight.unbind(0)[1].fill_(0.1)
        model.blocks[4].up.weight.diagonal().fill_(1)
        for part in model.blocks[5].up.weight.chunk(4):
            part.mul_(0.5)
        model.blocks[6].up.weight.narrow(0, 2, 3).zero_()

    return _written(place, write)


@family.works("`nn.init.*` on wrapped parameters")
def initialised(place):
    def write(model):
        torch.manual_seed(7)
        nn.init.xavier_uniform_(model.head.weight)
        nn.init.zeros_(model.head.bias)
        nn.init.kaiming_normal_(model.blocks[0].up.weight)
        nn.init.trunc_normal_(model.blocks[1].up.weight, std=0.02)
        nn.init.orthogonal_(model.blocks[2].up.weight)
        nn.init.constant_(model.blocks[3].up.bias, 0.3)
        nn.init.eye_(model.head.weight)
        nn.init.sparse_(model.blocks[4].up.weight, 0.5)

    return _written(place, write)


@family.works("`model.apply(init)`")
def applied(place):
    def init(module):
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def write(model):
        torch.manual_seed(7)
        model.apply(init)

    return _written(place, write)


@family.works("`module.reset_parameters()`")
def reset_parameters(place):
    def write(model):
        torch.manual_seed(7)
        model.head.reset_parameters()
        model.embed.reset_parameters()
        model.blocks[0].norm.reset_parameters()

    return _written(place, write)


@family.works("`parameters_to_vector` and `vector_to_parameters`")
def vector(place):
    def write(model):
        flat = nn.utils.parameters_to_vector(model.parameters())
        nn.utils.vector_to_parameters(flat * 0.9, model.parameters())

    return _written(place, write)


@family.works("`p.uniform_`, `p.normal_`, `torch.nn.init.uniform_` keep to the seed")
def random_in_place(place):
    @torch.no_grad()
    def write(model):
        torch.manual_seed(7)
        model.head.weight.uniform_(-0.1, 0.1)
        model.blocks[0].up.weight.normal_(0, 0.02)

    return _written(place, write)


@family.works("`torch._foreach_mul_(list(model.parameters()), 0.9)`, `_foreach_lerp_`, `_foreach_copy_`")
def foreach(place):
    @torch.no_grad()
    def write(model):
        parameters = list(model.parameters())
        torch._foreach_mul_(parameters, 0.9)
        torch._foreach_copy_(parameters[:2], [torch.ones_like(p) for p in parameters[:2]])
        torch._foreach_lerp_(parameters, [torch.zeros_like(p) for p in parameters], 0.1)

    return _written(place, write)


@family.works("`torch.add(a, b, out=p)`, `torch.mul(..., out=p.data)`")
def out_argument(place):
    @torch.no_grad()
    def write(model):
        torch.add(torch.ones(64, 32), 1.0, out=model.head.weight)
        torch.mul(torch.ones(128), 0.1, out=model.blocks[0].up.bias.data)

    return _written(place, write)


@family.works("`a, b = b, a` of two blocks' values through `.data`")
def exchanged(place):
    def write(model):
        one, other = model.blocks[0].up.weight, model.blocks[1].up.weight
        one.data, other.data = other.data.clone(), one.data.clone()

    return _written(place, write)


@family.works("`one.data = other.data.clone()`")
def data_cloned(place):
    def write(model):
        model.blocks[0].up.weight.data = model.blocks[1].up.weight.data.clone()

    return _written(place, write)


@family.works_or_refused("`one.data = other.data` without a clone ties the values in PyTorch", r"clone\(\)|tie|share")
def data_tied(place):
    def write(model):
        model.blocks[0].up.weight.data = model.blocks[1].up.weight.data

    return _written(place, write)


@family.works("`p.numpy()` of what requires grad raises; `p.detach().numpy()` gives it")
def to_numpy(place):
    engine = place.small()
    p = engine.module.head.weight
    return place.attempt(p.numpy), p.detach().numpy(), p.detach().cpu().numpy()


@family.works_or_refused(
    "`p.detach().numpy()[...] = 0` writes to the weight in PyTorch",
    "read-only",
    also=("ValueError",),
)
def numpy_written(place):
    engine = place.small()
    engine.module.head.bias.detach().numpy()[:] = 7
    return values(engine.module)


@family.works_or_refused(
    "`torch.from_numpy`-style sharing: `torch.from_dlpack(p.detach())` is written to", "copy|address"
)
def dlpack_written(place):
    engine = place.small()
    torch.from_dlpack(engine.module.head.bias.detach()).fill_(7)
    return values(engine.module)


@family.works("`p.tolist()`, `p[0, 0].item()`, `float(p[0, 0])`, `bool`, `len`, `int`, iteration")
def weight_out_of_torch(place):
    engine = place.small()
    p = engine.module.head.bias
    return p.tolist(), p[0].item(), float(p[1]), bool(p[2] > 0), len(p), int(p[3] * 100), [v.item() for v in p][:5]


@family.works("`p.item()` of many elements raises")
def item_of_many(place):
    engine = place.small()
    return place.attempt(engine.module.head.bias.item)


@family.works("`p.half()`, `.double()`, `.to(torch.bfloat16)`, `.cpu()`, `.clone()`, `.contiguous()`, `.float()`")
def converted_tensor(place):
    engine = place.small()
    p = engine.module.head.weight
    return p.half(), p.double(), p.to(torch.bfloat16), p.cpu(), p.clone(), p.contiguous(), p.float(), p.type(torch.half)


@family.works("`p.float() is p`, `p.contiguous() is p`, `p.to('cpu') is p`")
def converted_to_itself(place):
    engine = place.small()
    p = engine.module.head.weight
    return p.float() is p, p.contiguous() is p, p.to("cpu") is p, p.cpu() is p, p.to(torch.float32) is p


@family.works("arithmetic: `p + 1`, `p @ p.t()`, `p == p`, `torch.allclose(p, q)`, `torch.equal`")
def arithmetic(place):
    engine = place.small()
    p, twin = engine.module.head.weight, small().head.weight
    return p + 1, p @ p.t(), bool((p == p).all()), torch.allclose(p, twin), torch.equal(p, twin), torch.equal(twin, p)


@family.works("`torch.testing.assert_close(p, q)`")
def assert_close(place):
    engine = place.small()
    torch.testing.assert_close(engine.module.head.weight, small().head.weight)
    torch.testing.assert_close(small().head.weight.detach(), engine.module.head.weight.detach())


@family.works("`p.is_leaf`, `p.grad_fn`, `p.requires_grad`, `p.is_contiguous()`, `p.stride()`, `p.layout`, `p.device`")
def weight_attributes(place):
    engine = place.small()
    p = engine.module.head.weight
    q = p.view(-1)
    return (
        *(p.is_leaf, p.grad_fn, p.requires_grad, p.is_contiguous(), p.stride(), p.layout, p.device, p.dtype),
        *(p.numel(), p.nelement(), p.element_size(), p.dim(), p.ndim, p.size(0), p.is_sparse, p.is_quantized),
        *(p.is_floating_point(), p.is_complex(), p.is_inference(), p.nbytes, p.itemsize, p.is_meta, p.is_cuda),
        *(q.is_leaf, type(q.grad_fn).__name__, q.requires_grad, p.storage_offset()),
    )


@family.works("`isinstance(p, nn.Parameter)`, `isinstance(p, torch.Tensor)`, `torch.is_tensor(p)`")
def instances(place):
    engine = place.small()
    p = engine.module.head.weight
    return (
        *(isinstance(p, nn.Parameter), isinstance(p, torch.Tensor), torch.is_tensor(p)),
        *(isinstance(p.data, nn.Parameter), isinstance(p.detach(), nn.Parameter), isinstance(p[0], nn.Parameter)),
        isinstance(p, torch.FloatTensor),
    )


@family.differs("`type(p) is nn.Parameter`", "it is an `nn.Parameter`, of a class derived from it")
def exact_type(place):
    engine = place.small()
    return type(engine.module.head.weight) is nn.Parameter


@family.works("parameters as keys of dicts and sets, `id(p)`, `hash(p)`, before and after training")
def identity(place):
    engine = place.small()
    model = engine.module
    names = {p: name for name, p in model.named_parameters()}
    ids = {id(p) for p in model.parameters()}
    train(engine, 2)
    return (
        *(
            names[model.head.weight],
            all(p in names for p in model.parameters()),
            {id(p) for p in model.parameters()} == ids,
        ),
        *(model.head.weight is model.head.weight, len(set(model.parameters()))),
        any(p is model.head.weight for p in engine.optimizer.param_groups[0]["params"]),
    )


@family.differs(
    "`module.weight is p` inside a forward, with `p` from outside",
    "inside a unit's forward its modules hold ordinary parameters, outside of it handles",
)
def identity_inside_forward(place):
    engine = place.small()
    model = engine.module
    p, found = model.blocks[0].up.weight, []
    model.blocks[0].up.register_forward_pre_hook(lambda m, a: found.append(m.weight is p))
    next(losses(engine, 1))
    return found


@family.works("`p in list(model.parameters())` (an elementwise `==` in PyTorch)")
def in_list(place):
    engine = place.small()
    parameters = list(engine.module.parameters())
    return parameters[0] in parameters, place.attempt(lambda: parameters[1] in parameters)


@family.works("`p.data_ptr()`")
def data_ptr(place):
    engine = place.small()
    return engine.module.head.weight.data_ptr() != 0


@family.works("an array over `p.data_ptr()` is read after a step, written to, and read after `p.mul_(2)`")
def array_at_address(place):
    engine = place.small()
    weight = engine.module.head.weight
    array = (ctypes.c_float * weight.numel()).from_address(weight.data_ptr())
    train(engine, 1)
    after_step = sum(array)
    array[5] = 0.5
    after = train(engine, 1), weight.flatten()[5].item()
    with torch.no_grad():
        weight.mul_(2)
    return after_step, after, sum(array), values(engine.module)


@family.works("`p.untyped_storage()`, and addresses of views, of `p.data` and of tied weights")
def storage(place):
    engine = place.small()
    weight = engine.module.head.weight
    storage = weight.untyped_storage()
    addresses = [
        t.data_ptr() - storage.data_ptr() for t in (weight, weight.data, weight[1], weight.t(), weight.detach())
    ]
    return storage.nbytes(), addresses, train(engine, 2), values(engine.module)


@family.refused("`p.untyped_storage().resize_(0)`, as FSDP does", r"address.* cannot be resized")
def storage_resized(place):
    engine = place.small()
    engine.module.head.weight.untyped_storage().resize_(0)


@family.works("safetensors: `save` of live parameters, of `p.data` and of one under two names", needs=("safetensors",))
def safetensors_of_live_parameters(place):
    from safetensors.torch import load, save

    engine = place.small()
    named = dict(engine.module.named_parameters())
    found = []
    for _ in range(2):
        found += [train(engine, 1), load(save(named)), load(save({n: p.data for n, p in named.items()}))]
    head = engine.module.head.weight
    try:
        save({"one": head, "another": head.detach()})
    except RuntimeError as error:
        found.append(str(error).strip()[:60])
    head.data = torch.ones_like(head.data)
    return [*found, load(save({"head": head})), train(engine, 1), values(engine.module)]


@family.refused("`p.share_memory_()`", r"address|process|memory")
def share_memory(place):
    engine = place.small()
    engine.module.head.weight.share_memory_()


@family.refused("`model.share_memory()` (Hogwild)", r"address|process|memory")
def model_share_memory(place):
    engine = place.small()
    engine.module.share_memory()
    return train(engine, 1), values(engine.module)


@family.works("`print(model)`, `repr(p)`, `str(p)`, `f'{p}'`, `f'{p[0]:.3f}'`")
def printed(place):
    engine = place.small()
    model = engine.module
    p = model.head.bias
    return repr(model), repr(p), str(p), f"{p}", f"{p[0].item():.3f}", repr(p[0]), repr(model.head.weight.data[:2, :2])


@family.works("`f'{p[0]:.3f}'` of what requires grad")
def formatted(place):
    engine = place.small()
    return f"{engine.module.head.bias[0]:.3f}"


@family.works("`sum(p.numel() for p in model.parameters() if p.requires_grad)`")
def counted(place):
    engine = place.small()
    return sum(p.numel() for p in engine.module.parameters() if p.requires_grad)


@family.works("`named_parameters`, `named_buffers`, `named_modules`, `get_parameter`, `_parameters`, `children`")
def names(place):
    model = place.small().module
    return (
        *([name for name, _ in model.named_parameters()], [name for name, _ in model.named_buffers()]),
        *([name for name, _ in model.named_modules()], list(model.get_parameter("head.weight").shape)),
        *(list(model.head._parameters), [name for name, _ in model.named_children()]),
        [name for name, _ in model.blocks[0].named_parameters(recurse=False)],
    )


@family.works("`dir(p)`, `p.__dict__`, own attributes: `p.tag = 'x'`")
def own_attribute(place):
    engine = place.small()
    engine.module.head.weight.tag = "decay"
    train(engine, 1)
    return engine.module.head.weight.tag


@family.works("an attribute that a parameter had before wrapping (`p.no_decay = True`)")
def attribute_from_before(place):
    model = small()
    model.head.weight.no_decay = True
    engine = place.wrap(model)
    train(engine, 1)
    return getattr(model.head.weight, "no_decay", False)


@family.works("a subclass of `nn.Parameter` stays one")
def subclass_of_parameter(place):
    class Special(nn.Parameter):
        pass

    model = small()
    model.head.weight = Special(model.head.weight.data)
    engine = place.wrap(model)
    return isinstance(model.head.weight, Special), train(engine, 1), values(model)


@family.works("`p.detach()` shares the value: written to, it changes the weight")
def detached_written(place):
    def write(model):
        model.head.bias.detach().fill_(0.5)

    return _written(place, write)


@family.works("a kept `q = p.data` sees later steps")
def kept_data_sees_steps(place):
    engine = place.small()
    q, v = engine.module.head.weight.data, engine.module.head.weight.view(-1)
    train(engine, 2)
    return q, v


@family.works("`p.clone()` with gradient: `(p.clone() * 2).sum().backward()`")
def clone_has_gradient(place):
    engine = place.small()
    (engine.module.head.weight.clone() * 2).sum().backward()
    return engine.module.head.weight.grad


@family.works("`F.linear(x, model.head.weight)` outside of the model, with a gradient")
def used_outside(place):
    engine = place.small()
    torch.manual_seed(2)
    nn.functional.linear(
        torch.randn(3, 32), engine.module.head.weight, engine.module.head.bias
    ).square().sum().backward()
    engine.optimizer.step()
    return values(engine.module)


@family.works("`torch.sparse`, `torch.fft`, `torch.linalg.svdvals` of a weight")
def linear_algebra(place):
    p = place.small().module.head.weight
    return torch.linalg.svdvals(p), torch.fft.rfft(p).abs(), p.to_sparse().to_dense(), torch.linalg.matrix_norm(p, 2)


@family.works("`torch.topk`, `.max(dim)`, `.sort`, `.unique`, `.histc`, `.quantile` of a weight")
def statistics(place):
    p = place.small().module.head.weight
    return (
        *(torch.topk(p.abs().flatten(), 5), p.max(dim=1), p.sort(dim=0)[0], len(p.detach().unique())),
        *(p.detach().histc(10), p.quantile(0.5), p.std(), p.var(), p.argmax()),
    )


@family.works("`torch.stack([p for p in ...])` and `torch.cat` over parameters of several units")
def stacked(place):
    model = place.small().module
    return torch.stack([b.up.weight for b in model.blocks]).mean(), torch.cat([b.up.bias for b in model.blocks])


@family.works("`torch.cdist(p, q)`, cosine similarity of all blocks (weight statistics)")
def compared_over_blocks(place):
    model = place.small().module
    return [
        nn.functional.cosine_similarity(a.up.weight.flatten(), b.up.weight.flatten(), 0).item()
        for a in model.blocks
        for b in model.blocks
    ]


@family.works("pruning by hand: `p.data[p.abs() < t] = 0` after every step")
def pruned_by_hand(place):
    engine = place.small()
    for _ in range(3):
        train(engine, 1)
        for p in engine.module.parameters():
            p.data[p.abs() < 0.01] = 0
    return values(engine.module)


@family.works("weights are normalised after every step: `w.data.div_(w.data.norm(dim=1, keepdim=True))`")
def normalised_after_steps(place):
    engine = place.small()
    for _ in range(3):
        train(engine, 1)
        for block in engine.module.blocks:
            w = block.up.weight
            w.data.div_(w.data.norm(dim=1, keepdim=True))
    return values(engine.module)


@family.works("weight noise: added before forward, taken back before the step")
def noise_around_forward(place):
    engine = place.small()
    for loss in losses(engine, 0):
        del loss
    for index in range(2):
        torch.manual_seed(index)
        noise = {p: torch.randn_like(p) * 0.01 for p in engine.module.parameters()}
        with torch.no_grad():
            for p, n in noise.items():
                p.add_(n)
        next(losses(engine, 1)).backward()
        with torch.no_grad():
            for p, n in noise.items():
                p.sub_(n)
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("target network: `t.data.copy_(tau * p.data + (1 - tau) * t.data)` (soft update)")
def soft_update(place):
    engine, target = place.small(), small()
    for _ in range(3):
        train(engine, 1)
        for t, p in zip(target.parameters(), engine.module.parameters(), strict=True):
            t.data.copy_(0.1 * p.data + 0.9 * t.data)
    return values(target)


@family.works("EMA by `lerp_` with a deepcopy")
def ema_by_lerp(place):
    engine = place.small()
    average = copy.deepcopy(engine.module).requires_grad_(False)
    for _ in range(3):
        train(engine, 1)
        with torch.no_grad():
            for a, p in zip(average.parameters(), engine.module.parameters(), strict=True):
                a.lerp_(p, 0.1)
    return values(average)


@family.works("EMA by state dicts")
def ema_by_state_dict(place):
    engine = place.small()
    average = {k: v.clone() for k, v in engine.module.state_dict().items()}
    for _ in range(3):
        train(engine, 1)
        for k, v in engine.module.state_dict().items():
            average[k].mul_(0.9).add_(v, alpha=0.1)
    return average


@family.works("EMA weights are put into the model for evaluation, and taken out again")
def ema_swapped_in(place):
    engine = place.small()
    train(engine, 1)
    average = {name: p.detach().clone() * 0.9 for name, p in engine.module.named_parameters()}
    kept = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
    with torch.no_grad():
        for name, p in engine.module.named_parameters():
            p.copy_(average[name])
        found = [loss.item() for loss in losses(engine, 2)]
        for name, p in engine.module.named_parameters():
            p.copy_(kept[name])
    return found, train(engine, 2), values(engine.module)


@family.works("`AveragedModel` (SWA), `update_parameters`, evaluation with it")
def swa(place):
    engine = place.small()
    average = torch.optim.swa_utils.AveragedModel(engine.module)
    for _ in range(3):
        train(engine, 1)
        average.update_parameters(engine.module)
    with torch.no_grad():
        return [average(tokens).mean().item() for tokens, _ in data(2)], values(average.module)


@family.works("`AveragedModel` with `get_ema_multi_avg_fn`")
def swa_ema(place):
    engine = place.small()
    average = torch.optim.swa_utils.AveragedModel(
        engine.module, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
    )
    for _ in range(3):
        train(engine, 1)
        average.update_parameters(engine.module)
    return values(average.module)


@family.works("`SWALR` on `engine.optimizer`")
def swa_lr(place):
    engine = place.small()
    scheduler = torch.optim.swa_utils.SWALR(engine.optimizer, swa_lr=1e-3, anneal_epochs=2)
    for _ in range(3):
        train(engine, 1)
        scheduler.step()
    return values(engine.module)


@family.works("`swa_utils.update_bn(loader, averaged model)`")
def swa_update_bn(place):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.Tanh()) for _ in range(12)))
    engine = place.wrap(model)
    average = torch.optim.swa_utils.AveragedModel(model)
    x = torch.randn(16, 48)
    engine.backward(engine(x).square().mean())
    engine.step()
    average.update_parameters(model)
    torch.optim.swa_utils.update_bn([x, x + 1], average)
    return values(average.module)


@family.works("`update_bn(loader, model)` on the wrapped model")
def update_bn(place):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.Tanh()) for _ in range(12)))
    place.wrap(model)
    x = torch.randn(16, 48)
    torch.optim.swa_utils.update_bn([x, x + 1], model)
    return values(model)


@family.works("weights are read, viewed and written within `torch.inference_mode()`")
def written_in_inference_mode(place):
    engine = place.small()
    block = engine.module.blocks[1]
    train(engine, 1)
    with torch.inference_mode():
        block.up.weight.data.clamp_(-0.1, 0.1)
        block.up.bias.detach()[2:4].zero_()
        block.down.weight.t()[0].mul_(0.5)
        block.down.bias.copy_(engine.module.blocks[0].down.bias)
        kept = block.down.weight.view(-1)[:3]
    return kept.is_inference(), train(engine, 2), values(engine.module)


@family.works("buffers are written, and replaced")
def buffers(place):
    torch.manual_seed(1)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(48, 48), nn.BatchNorm1d(48), nn.Tanh()) for _ in range(12)))
    engine = place.wrap(model)
    model[0][1].running_mean.fill_(1.0)
    model[1][1].running_var = torch.full((48,), 2.0)
    model[2].register_buffer("more", torch.ones(3))
    model.eval()
    return engine(torch.ones(4, 48)), values(model)
