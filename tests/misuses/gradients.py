"""What people do with ``parameter.grad``, and the hooks by which they see gradients."""

import torch
from tiny import loss_of
from torch import nn

from misuses.case import Family
from misuses.place import ADAMW, data, gradients, losses, small, train, train_by_hand, values

family = Family("gradients")


def _changed(place, change, steps=2):
    engine = place.small()
    for loss in losses(engine, steps):
        engine.optimizer.zero_grad()
        loss.backward()
        change(engine.module)
        engine.optimizer.step()
    return values(engine.module)


@family.works("`p.grad` is read")
def read(place):
    engine = place.small()
    next(losses(engine, 1)).backward()
    return gradients(engine.module)


@family.works("`p.grad.mul_(2)`")
def mul(place):
    return _changed(place, lambda model: [p.grad.mul_(2) for p in model.parameters()])


@family.works("`p.grad /= 2` and `p.grad += p` (weight decay by hand), with `no_grad`")
def operators(place):
    def change(model):
        with torch.no_grad():
            for p in model.parameters():
                p.grad /= 2
                p.grad += 0.01 * p

    return _changed(place, change)


@family.works("`p.grad = t`")
def assigned(place):
    def change(model):
        for p in model.parameters():
            p.grad = torch.full_like(p, 1e-3)

    return _changed(place, change)


@family.works("`p.grad = t` before any forward")
def assigned_without_backward(place):
    engine = place.small()
    for p in engine.module.parameters():
        p.grad = torch.full(p.shape, 1e-3)
    engine.optimizer.step()
    return values(engine.module)


@family.works("`p.grad = t` of another shape raises")
def assigned_other_shape(place):
    engine = place.small()
    next(losses(engine, 1)).backward()

    def assign():
        engine.module.head.weight.grad = torch.zeros(3)

    return place.attempt(assign), gradients(engine.module)


@family.works("`p.grad = t` of another dtype raises")
def assigned_other_dtype(place):
    engine = place.small()
    next(losses(engine, 1)).backward()

    def assign():
        engine.module.head.weight.grad = engine.module.head.weight.grad.double()

    return place.attempt(assign), gradients(engine.module)


@family.works("`p.grad = 1.0` raises")
def assigned_number(place):
    engine = place.small()

    def assign():
        engine.module.head.weight.grad = 1.0

    return place.attempt(assign)


@family.works("`p.grad = None` for some")
def set_to_none(place):
    def change(model):
        model.head.weight.grad = None

    return _changed(place, change)


@family.works("`p.grad.zero_()`")
def zeroed(place):
    return _changed(place, lambda model: [p.grad.zero_() for p in model.blocks[3].parameters()])


@family.works("`p.grad.data` is changed")
def data_of_grad(place):
    return _changed(place, lambda model: [p.grad.data.add_(1e-3) for p in model.parameters()])


@family.works("`p.grad.data = t`")
def data_of_grad_assigned(place):
    def change(model):
        for p in model.parameters():
            p.grad.data = torch.full(p.shape, 1e-3)

    return _changed(place, change)


@family.works("`p.grad[0] = 0` and `p.grad[:, mask] = 0` (frozen rows)")
def masked(place):
    def change(model):
        model.head.weight.grad[0] = 0
        model.embed.weight.grad[torch.arange(64) % 2 == 0] = 0
        model.blocks[1].up.weight.grad[:, :4] = 0

    return _changed(place, change)


@family.works("noise is added to gradients")
def noise(place):
    def change(model):
        torch.manual_seed(5)
        for p in model.parameters():
            p.grad.add_(torch.randn_like(p.grad), alpha=1e-3)

    return _changed(place, change)


@family.works("`torch.nan_to_num_(p.grad)`")
def nan_to_num(place):
    def change(model):
        model.head.bias.grad[0] = float("nan")
        for p in model.parameters():
            torch.nan_to_num_(p.grad, nan=0.0)

    return _changed(place, change)


@family.works_or_refused("a kept `p.grad` after `zero_grad`", r"\.clone\(\)")
def kept(place):
    engine = place.small()
    next(losses(engine, 1)).backward()
    found = [p.grad for p in engine.module.parameters()]
    engine.optimizer.zero_grad()
    return list(found)


@family.works("a kept `p.grad` after the step")
def kept_over_step(place):
    engine = place.small()
    next(losses(engine, 1)).backward()
    found = [p.grad for p in engine.module.parameters()]
    engine.optimizer.step()
    return list(found)


@family.works("`p.grad.clone()` is kept over steps (gradient accumulation by hand)")
def cloned(place):
    engine = place.small()
    total = [torch.zeros_like(p) for p in engine.module.parameters()]
    for loss in losses(engine, 2):
        engine.optimizer.zero_grad()
        loss.backward()
        for t, p in zip(total, engine.module.parameters(), strict=True):
            t.add_(p.grad.clone())
    for t, p in zip(total, engine.module.parameters(), strict=True):
        p.grad = t
    engine.optimizer.step()
    return values(engine.module)


@family.works("`p.grad is p.grad`")
def same_object(place):
    engine = place.small()
    next(losses(engine, 1)).backward()
    p = engine.module.head.weight
    return p.grad is p.grad


@family.works("`p.grad` before backward is None, after it is not, after `zero_grad` is")
def none_or_not(place):
    engine = place.small()
    found = [[p.grad is None for p in engine.module.parameters()]]
    next(losses(engine, 1)).backward()
    found.append([p.grad is None for p in engine.module.parameters()])
    engine.optimizer.zero_grad()
    found.append([p.grad is None for p in engine.module.parameters()])
    return found


@family.works("`p.grad.dtype`, `.device`, `.shape`, `.requires_grad`, `.is_sparse`, `.layout`")
def attributes(place):
    engine = place.small()
    next(losses(engine, 1)).backward()
    g = engine.module.head.weight.grad
    return g.dtype, g.device, list(g.shape), g.requires_grad, g.is_sparse, g.layout, g.is_contiguous(), g.numel()


@family.works("`p.grad.numpy()`, `.tolist()`, `.item()`, `float()`")
def out_of_torch(place):
    engine = place.small()
    next(losses(engine, 1)).backward()
    g = engine.module.head.bias.grad
    return g.numpy(), g.tolist(), g[0].item(), float(g[1]), f"{g[2].item():.3e}"


@family.works("`torch.isfinite(p.grad).all()` for all parameters")
def finite(place):
    engine = place.small()
    next(losses(engine, 1)).backward()
    return all(torch.isfinite(p.grad).all() for p in engine.module.parameters())


@family.works("one parameter's gradient is added to another's")
def added_to_another(place):
    def change(model):
        for one, other in zip(model.blocks[0].parameters(), model.blocks[1].parameters(), strict=True):
            other.grad.add_(one.grad)

    return _changed(place, change)


@family.works("one gradient tensor is given to two parameters")
def shared_gradient(place):
    def change(model):
        model.blocks[0].up.weight.grad = model.blocks[1].up.weight.grad

    return _changed(place, change)


@family.works("gradients are copied from another model")
def copied_from_model(place):
    engine, twin = place.small(), small()
    for tokens, targets in data(2):
        loss_of(twin(tokens), targets).backward()
        for p, q in zip(engine.module.parameters(), twin.parameters(), strict=True):
            p.grad = q.grad
        engine.optimizer.step()
        twin.load_state_dict(engine.module.state_dict())
        twin.zero_grad()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("gradients are copied to another model, which an optimizer of its own trains")
def copied_to_model(place):
    engine, twin = place.small(), small()
    optimizer = torch.optim.AdamW(twin.parameters(), **ADAMW)
    for loss in losses(engine, 2):
        engine.module.zero_grad()
        loss.backward()
        for p, q in zip(engine.module.parameters(), twin.parameters(), strict=True):
            q.grad = p.grad.clone()
        optimizer.step()
    return values(twin)


@family.works("projected gradients (PCGrad): read of two losses, combined, written")
def projected(place):
    engine = place.small()
    found = []
    for loss in losses(engine, 2):
        engine.module.zero_grad()
        loss.backward()
        found.append(torch.cat([p.grad.flatten() for p in engine.module.parameters()]))
    one, other = found
    one = one - torch.dot(one, other).clamp(max=0) / other.square().sum() * other
    start = 0
    for p in engine.module.parameters():
        p.grad = one[start : start + p.numel()].view_as(p).clone()
        start += p.numel()
    engine.optimizer.step()
    return values(engine.module)


@family.works("sharpness-aware minimisation (SAM): weights are moved, a second backward, moved back")
def sharpness_aware(place):
    engine = place.small()
    model = engine.module
    for tokens, targets in data(2):
        engine.optimizer.zero_grad()
        loss_of(engine(tokens), targets).backward()
        norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()
        old = {}
        with torch.no_grad():
            for p in model.parameters():
                old[p] = p.detach().clone()
                p.add_(p.grad * (0.05 / (norm + 1e-12)))
        model.zero_grad()
        loss_of(engine(tokens), targets).backward()
        with torch.no_grad():
            for p in model.parameters():
                p.copy_(old[p])
        engine.optimizer.step()
    return values(model)


# Hooks by which gradients are seen.


def _halve(p):
    p.grad.mul_(0.5)


@family.works("`p.register_hook` that scales the gradient")
def hook_scales(place):
    engine = place.small()
    for p in engine.module.parameters():
        p.register_hook(lambda g: g * 0.5)
    return train_by_hand(engine, 2), values(engine.module)


@family.works("`p.register_hook` before wrapping")
def hook_before_wrapping(place):
    model = small()
    for p in model.parameters():
        p.register_hook(lambda g: g * 0.5)
    engine = place.wrap(model)
    return train(engine, 2), values(model)


@family.works("`p.register_hook` that only looks: called once for each parameter and backward")
def hook_counts(place):
    engine = place.small()
    seen = {}
    for name, p in engine.module.named_parameters():
        p.register_hook(lambda g, name=name: seen.__setitem__(name, seen.get(name, 0) + 1))
    train(engine, 2)
    return seen


@family.works("a hook's `remove()`")
def hook_removed(place):
    engine = place.small()
    handles = [p.register_hook(lambda g: g * 0.5) for p in engine.module.parameters()]
    train(engine, 1)
    for handle in handles:
        handle.remove()
    train(engine, 1)
    return values(engine.module)


@family.works("a hook that masks a gradient (`head.weight.register_hook(lambda g: g * mask)`)")
def hook_masks(place):
    engine = place.small()
    mask = (torch.arange(64) % 2).float().unsqueeze(1)
    engine.module.head.weight.register_hook(lambda g: g * mask)
    return train(engine, 2), values(engine.module)


@family.works("`register_post_accumulate_grad_hook` that reads `p.grad`")
def post_accumulate_hook(place):
    engine = place.small()
    seen = {}
    for name, p in engine.module.named_parameters():
        p.register_post_accumulate_grad_hook(lambda p, name=name: seen.__setitem__(name, p.grad.norm().item()))
    train(engine, 1)
    return seen


@family.works("`register_post_accumulate_grad_hook` that changes `p.grad`")
def post_accumulate_hook_changes(place):
    engine = place.small()
    for p in engine.module.parameters():
        p.register_post_accumulate_grad_hook(_halve)
    return train(engine, 2), values(engine.module)


@family.works("`register_post_accumulate_grad_hook` before wrapping")
def post_accumulate_hook_before_wrapping(place):
    model = small()
    for p in model.parameters():
        p.register_post_accumulate_grad_hook(_halve)
    engine = place.wrap(model)
    return train(engine, 2), values(model)


@family.works_or_refused(
    "the optimizer in the backward: a hook steps an `SGD` of its own for each parameter and drops the gradient",
    r"engine\.optimizer",
)
def optimizer_in_backward(place):
    engine = place.small()
    optimizers = {p: torch.optim.SGD([p], lr=0.1) for p in engine.module.parameters()}

    def step(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in engine.module.parameters():
        p.register_post_accumulate_grad_hook(step)
    for loss in losses(engine, 2):
        loss.backward()
    return values(engine.module)


@family.works_or_refused(
    "a hook on the node that accumulates: `p.expand_as(p).grad_fn.next_functions[0][0].register_hook`",
    "register_post_accumulate_grad_hook",
)
def accumulate_node(place):
    engine = place.small()
    seen = {}
    kept = []
    for name, p in engine.module.named_parameters():
        node = p.expand_as(p).grad_fn.next_functions[0][0]
        kept.append(node)
        node.register_hook(lambda *_, name=name: seen.__setitem__(name, seen.get(name, 0) + 1))
    train(engine, 2)
    return seen


@family.works_or_refused(
    "`torch.autograd.graph.register_multi_grad_hook` over all parameters", "register_post_accumulate_grad_hook"
)
def multi_grad_hook(place):
    engine = place.small()
    seen = []
    torch.autograd.graph.register_multi_grad_hook(
        list(engine.module.parameters()), lambda grads: seen.append([g is not None for g in grads])
    )
    train(engine, 2)
    return seen


@family.works("`register_full_backward_hook` on blocks: gradients of inputs and outputs")
def full_backward_hook(place):
    engine = place.small()
    seen = []
    for block in engine.module.blocks:
        block.register_full_backward_hook(lambda m, gi, go: seen.append((gi[0].norm().item(), go[0].norm().item())))
    train(engine, 2)
    return seen


@family.works("`register_full_backward_hook` that changes the input's gradient")
def full_backward_hook_changes(place):
    engine = place.small()
    for block in engine.module.blocks:
        block.register_full_backward_hook(lambda m, gi, go: (gi[0] * 0.5,))
    return train(engine, 2), values(engine.module)


@family.works("`register_full_backward_hook` that reads the block's own weight")
def full_backward_hook_reads_weight(place):
    engine = place.small()
    seen = []
    for block in engine.module.blocks:
        block.register_full_backward_hook(lambda m, gi, go: seen.append(m.up.weight.norm().item()))
    train(engine, 2)
    return seen


@family.works("`register_full_backward_pre_hook`")
def full_backward_pre_hook(place):
    engine = place.small()
    for block in engine.module.blocks:
        block.register_full_backward_pre_hook(lambda m, go: (go[0] * 0.5,))
    return train(engine, 2), values(engine.module)


@family.works("`nn.Module.register_full_backward_hook` on Linear layers inside blocks")
def full_backward_hook_inside(place):
    engine = place.small()
    seen = []
    for module in engine.module.modules():
        if isinstance(module, nn.Linear):
            module.register_full_backward_hook(lambda m, gi, go: seen.append(go[0].norm().item()))
    train(engine, 2)
    return seen


@family.works("`torch.nn.modules.module.register_module_full_backward_hook`, for all modules")
def global_backward_hook(place):
    engine = place.small()
    seen = []
    nn.modules.module.register_module_full_backward_hook(lambda m, gi, go: seen.append(type(m).__name__))
    train(engine, 1)
    return seen


@family.works("forward hooks that read weights and activations (`print statistics`)")
def forward_hook_reads(place):
    engine = place.small()
    seen = []
    for block in engine.module.blocks:
        block.register_forward_hook(lambda m, a, o: seen.append((m.up.weight.std().item(), o.std().item())))
    train(engine, 2)
    return seen


@family.works("a forward hook that replaces the output")
def forward_hook_changes(place):
    engine = place.small()
    engine.module.blocks[2].register_forward_hook(lambda m, a, o: o * 0.5)
    return train(engine, 2), values(engine.module)


@family.works("a forward pre-hook that changes the input")
def forward_pre_hook_changes(place):
    engine = place.small()
    engine.module.blocks[2].register_forward_pre_hook(lambda m, a: (a[0] * 0.5,))
    return train(engine, 2), values(engine.module)


@family.works("a forward pre-hook that changes the weight under `no_grad`")
def forward_pre_hook_writes(place):
    engine = place.small()

    def clamp(module, args):
        with torch.no_grad():
            module.up.weight.clamp_(-0.05, 0.05)

    for block in engine.module.blocks:
        block.register_forward_pre_hook(clamp)
    return train(engine, 2), values(engine.module)


@family.works("a forward pre-hook that writes `module.weight.data = ...`")
def forward_pre_hook_assigns_data(place):
    engine = place.small()

    def clamp(module, args):
        module.weight.data = module.weight.data.clamp(-0.05, 0.05)

    for block in engine.module.blocks:
        block.up.register_forward_pre_hook(clamp)
    return train(engine, 2), values(engine.module)


@family.works("a forward hook after the block that writes its weight: backward raises in PyTorch")
def forward_hook_writes(place):
    engine = place.small()

    def clamp(module, args, output):
        with torch.no_grad():
            module.down.weight.mul_(0.5)

    engine.module.blocks[3].register_forward_hook(clamp)
    return train(engine, 2), values(engine.module)


@family.works("`output.register_hook` on a block's output")
def tensor_hook_on_output(place):
    engine = place.small()
    seen = []
    engine.module.blocks[2].register_forward_hook(
        lambda m, a, o: o.register_hook(lambda g: seen.append(g.norm().item())) and None
    )
    train(engine, 2)
    return seen


@family.works("`output.retain_grad()` on a block's output")
def retain_grad(place):
    engine = place.small()
    kept = []
    engine.module.blocks[2].register_forward_hook(lambda m, a, o: (kept.append(o), o.retain_grad())[1])
    train(engine, 1)
    return kept[0].grad


@family.works("`p.retain_grad()` on a parameter does nothing")
def retain_grad_of_parameter(place):
    engine = place.small()
    engine.module.head.weight.retain_grad()
    return train(engine, 1), values(engine.module)


@family.works("freezing: `requires_grad_(False)` after wrapping, the parameter must not move any more")
def frozen_after_wrapping(place):
    engine = place.small()
    train(engine, 1)
    engine.module.blocks[0].requires_grad_(False)
    engine.module.head.bias.requires_grad = False
    train_by_hand(engine, 2)
    return values(engine.module)


@family.works("freezing after wrapping, with the engine's loop")
def frozen_after_wrapping_engine_loop(place):
    engine = place.small()
    train(engine, 1)
    engine.module.blocks[0].requires_grad_(False)
    train(engine, 2)
    return values(engine.module)


@family.works("frozen for a while, then trained again")
def frozen_and_thawed(place):
    engine = place.small()
    block = engine.module.blocks[0]
    train(engine, 1)
    block.requires_grad_(False)
    train(engine, 1)
    block.requires_grad_(True)
    train(engine, 1)
    return [p.requires_grad for p in block.parameters()], values(engine.module)


@family.works_or_refused(
    "unfreezing what was frozen when it was wrapped: `requires_grad_(True)`", "Make the engine while it requires grad"
)
def thawed_after_wrapping(place):
    model = small()
    model.blocks[0].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), **ADAMW)
    engine = place.wrap(model, optimizer=optimizer)
    train(engine, 1)
    model.blocks[0].requires_grad_(True)
    train(engine, 1)
    return values(model)


@family.works_or_refused(
    "unfreezing what was frozen, where the optimizer has only what was trainable: it gets gradients and does not move",
    "Make the engine while it requires grad",
)
def thawed_outside_of_optimizer(place):
    model = small()
    model.blocks[0].requires_grad_(False)
    engine = place.wrap(model)
    train(engine, 1)
    model.blocks[0].requires_grad_(True)
    train_by_hand(engine, 1)
    return gradients(model), values(model)


@family.works("`model.requires_grad_(False)` for evaluation, then `True` again")
def all_frozen_for_evaluation(place):
    engine = place.small()
    train(engine, 1)
    engine.module.requires_grad_(False)
    found = [loss.requires_grad for loss in losses(engine, 2)]
    engine.module.requires_grad_(True)
    return found, train(engine, 2), values(engine.module)


@family.works("frozen between forward and backward")
def frozen_between(place):
    engine = place.small()
    loss = next(losses(engine, 1))
    engine.module.blocks[0].requires_grad_(False)
    loss.backward()
    engine.optimizer.step()
    return values(engine.module)
