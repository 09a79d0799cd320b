"""Parameters and modules are replaced, added, deleted and tied after the model was wrapped."""

import copy

import torch
from tiny import Block, loss_of
from torch import nn

from misuses.case import Family
from misuses.place import ADAMW, data, losses, small, train, train_by_hand, values

family = Family("surgery")

_WAY = r"engine|wrap"


@family.works_or_refused(
    "`module.weight = nn.Parameter(t)`: the new one is not in any optimizer, in PyTorch either", _WAY
)
def parameter_replaced(place):
    engine = place.small()
    train(engine, 1)
    torch.manual_seed(4)
    engine.module.head.weight = nn.Parameter(torch.randn(64, 32))
    found = train_by_hand(engine, 2)
    return found, values(engine.module)


@family.works("the engine is made anew after a parameter was replaced")
def parameter_replaced_then_wrapped_again(place):
    engine = place.small()
    train(engine, 1)
    model = engine.unwrap()
    torch.manual_seed(4)
    model.head.weight = nn.Parameter(torch.randn(64, 32))
    engine = place.wrap(model)
    return train(engine, 2), values(model)


@family.works("`model.head = nn.Linear(...)` after wrapping, trained by an optimizer of its own")
def module_replaced(place):
    engine = place.small()
    train(engine, 1)
    torch.manual_seed(4)
    engine.module.head = nn.Linear(32, 64)
    optimizer = torch.optim.AdamW(engine.module.head.parameters(), **ADAMW)
    for loss in losses(engine, 2):
        loss.backward()
        for one in (engine.optimizer, optimizer):
            one.step()
            one.zero_grad()
    return values(engine.module)


@family.works("`model.blocks.append(Block(...))` after wrapping: the new block computes and does not learn")
def block_appended(place):
    engine = place.small()
    torch.manual_seed(4)
    engine.module.blocks.append(Block(32))
    return train_by_hand(engine, 2), values(engine.module)


@family.works("`del model.blocks[3]`: the block is gone, the others learn on")
def block_deleted(place):
    engine = place.small()
    train(engine, 1)
    del engine.module.blocks[3]
    return train(engine, 2), values(engine.module)


@family.works("blocks are put in another order")
def blocks_reordered(place):
    engine = place.small()
    train(engine, 1)
    engine.module.blocks = nn.ModuleList(reversed(engine.module.blocks))
    return train(engine, 2), values(engine.module)


@family.works("a block stands twice in the list (shared afterwards)")
def block_shared_afterwards(place):
    engine = place.small()
    engine.module.blocks[3] = engine.module.blocks[2]
    return train_by_hand(engine, 2), values(engine.module)


@family.works("blocks are skipped at random (stochastic depth)")
def blocks_skipped(place):
    engine = place.small()
    model = engine.module
    torch.manual_seed(3)
    for tokens, targets in data(3):
        x = model.embed(tokens)
        for block in model.blocks:
            if torch.rand(()) < 0.6:
                x = block(x)
        loss_of(model.head(model.norm(x)), targets).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(model)


@family.works_or_refused("`del module.weight`, `module.bias = None`", _WAY)
def bias_removed(place):
    engine = place.small()
    train(engine, 1)
    engine.module.head.bias = None
    return train_by_hand(engine, 2), values(engine.module)


@family.works("`del module.bias` and `register_parameter('bias', None)`")
def bias_deleted(place):
    engine = place.small()
    train(engine, 1)
    del engine.module.head.bias
    engine.module.head.register_parameter("bias", None)
    return train_by_hand(engine, 2), values(engine.module)


@family.works("`register_parameter` of a new one after wrapping, trained by an optimizer of its own")
def parameter_registered(place):
    engine = place.small()
    model = engine.module
    model.register_parameter("scale", nn.Parameter(torch.ones(64)))
    optimizer = torch.optim.SGD([model.scale], lr=0.1)
    for tokens, targets in data(2):
        loss_of(engine(tokens) * model.scale, targets).backward()
        for one in (engine.optimizer, optimizer):
            one.step()
            one.zero_grad()
    return values(model)


@family.works_or_refused("`torch.utils.swap_tensors(p, t)`", _WAY)
def tensors_swapped(place):
    engine = place.small()
    torch.manual_seed(4)
    torch.utils.swap_tensors(engine.module.head.bias, nn.Parameter(torch.randn(64)))
    return train_by_hand(engine, 2), values(engine.module)


@family.works_or_refused("`torch.__future__.set_swap_module_params_on_conversion(True)`, then `load_state_dict`", _WAY)
def swap_on_load(place):
    engine = place.small()
    train(engine, 1)
    torch.__future__.set_swap_module_params_on_conversion(True)
    engine.module.load_state_dict(small().state_dict())
    return train(engine, 2), values(engine.module)


@family.works_or_refused("tying after wrapping: `model.head.weight = model.embed.weight`", _WAY)
def tied_afterwards(place):
    engine = place.small()
    train(engine, 1)
    engine.module.head.weight = engine.module.embed.weight
    return train_by_hand(engine, 2), values(engine.module)


@family.works("tied before wrapping")
def tied_before(place):
    model = small()
    model.head.weight = model.embed.weight
    engine = place.wrap(model)
    return train(engine, 2), model.head.weight is model.embed.weight, len(list(model.parameters())), values(model)


@family.works_or_refused("untying after wrapping: `model.head.weight = nn.Parameter(w.clone())`", _WAY)
def untied_afterwards(place):
    model = small()
    model.head.weight = model.embed.weight
    engine = place.wrap(model)
    train(engine, 1)
    model.head.weight = nn.Parameter(model.embed.weight.detach().clone())
    return train_by_hand(engine, 2), values(model)


@family.works("`model.embed.weight = model.embed.weight`: assigned to itself")
def assigned_to_itself(place):
    engine = place.small()
    engine.module.embed.weight = engine.module.embed.weight
    return train(engine, 2), values(engine.module)


@family.works_or_refused("`module._parameters['weight'] = t`, as old libraries do", _WAY)
def private_dict_written(place):
    engine = place.small()
    engine.module.head._parameters["weight"] = nn.Parameter(torch.ones(64, 32))
    return train_by_hand(engine, 2), values(engine.module)


@family.works("parameters are taken out of the model for a while and put back (`swap out for evaluation`)")
def taken_out_and_back(place):
    engine = place.small()
    train(engine, 1)
    kept = engine.module.head.weight
    engine.module.head.weight = nn.Parameter(torch.zeros(64, 32))
    found = [loss.item() for loss in losses(engine, 1)]
    engine.module.head.weight = kept
    return found, train(engine, 2), values(engine.module)


@family.works("the model is a submodule of another that is trained beside")
def inside_another(place):
    engine = place.small()
    torch.manual_seed(4)
    head = nn.Linear(64, 64)
    outer = nn.Sequential(engine.module, head)
    optimizer = torch.optim.SGD(head.parameters(), lr=0.1)
    for tokens, targets in data(2):
        loss_of(outer(tokens), targets).backward()
        for one in (engine.optimizer, optimizer):
            one.step()
            one.zero_grad()
    return values(outer)


@family.refused("the model is wrapped twice", "in an engine already")
def wrapped_twice(place):
    engine = place.small()
    again = place.wrap(engine.module)
    return train(again, 1)


@family.refused("a submodule of a wrapped model is wrapped", "in an engine already")
def submodule_wrapped(place):
    engine = place.small()
    again = place.wrap(engine.module.blocks)
    return len(list(again.module.parameters()))


@family.refused("a model that shares a submodule with a wrapped one is wrapped", "in an engine already")
def shared_submodule_wrapped(place):
    engine = place.small()
    other = small()
    other.embed = engine.module.embed
    again = place.wrap(other)
    return train(again, 1)


@family.refused("a model that contains a wrapped one is wrapped", "in an engine already")
def outer_model_wrapped(place):
    engine = place.small()
    again = place.wrap(nn.Sequential(engine.module, nn.Linear(64, 64)))
    return train(again, 1)


@family.works("a submodule is wrapped, the rest trained by torch: the loss goes through both")
def only_a_submodule_wrapped(place):
    model = small()
    rest = [p for name, p in model.named_parameters() if not name.startswith("blocks")]
    optimizer = torch.optim.AdamW(rest, **ADAMW)
    engine = place.wrap(model.blocks)
    for tokens, targets in data(3):
        loss_of(model(tokens), targets).backward()
        for one in (engine.optimizer, optimizer):
            one.step()
            one.zero_grad()
    return values(model)


@family.works("two engines over two parts of one model, in one loss")
def two_parts_two_engines(place):
    model = small()
    first, second = nn.ModuleList([model.embed, *model.blocks[:4]]), nn.ModuleList([*model.blocks[4:], model.head])
    one, other = place.wrap(first), place.wrap(second)
    for tokens, targets in data(3):
        loss_of(model(tokens), targets).backward()
        for engine in (one, other):
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return values(model)


@family.works("the submodule of a wrapped model is used in an ordinary model (a shared encoder)")
def shared_encoder(place):
    engine, other = place.small(), small()
    other.embed = engine.module.embed
    optimizer = torch.optim.AdamW([p for n, p in other.named_parameters() if not n.startswith("embed")], **ADAMW)
    for tokens, targets in data(2):
        (loss_of(engine(tokens), targets) + loss_of(other(tokens), targets)).backward()
        for one in (engine.optimizer, optimizer):
            one.step()
            one.zero_grad()
    return values(engine.module), values(other)


@family.works("a copy of the model learns from the model: `load_state_dict(deepcopy(...))` in turn")
def teacher_copy(place):
    engine = place.small()
    teacher = copy.deepcopy(engine.module)
    for tokens, _ in data(2):
        with torch.no_grad():
            wanted = teacher(tokens)
        nn.functional.mse_loss(engine(tokens), wanted * 0.9).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        teacher.load_state_dict(engine.module.state_dict())
    return values(teacher), values(engine.module)


@family.works("`model.forward = types.MethodType(...)`: forward is replaced after wrapping")
def forward_replaced(place):
    import types

    engine = place.small()

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))

    engine.module.forward = types.MethodType(forward, engine.module)
    return train(engine, 2), values(engine.module)


@family.works("`block.forward` of a unit is wrapped by a decorator")
def block_forward_decorated(place):
    engine = place.small()
    for block in engine.module.blocks:
        forward = block.forward
        block.forward = lambda x, forward=forward: forward(x) * 0.9
    return train(engine, 2), values(engine.module)


@family.works("`block.forward(x)` is called instead of `block(x)`: no hook runs")
def forward_called_directly(place):
    engine = place.small()
    model = engine.module
    for tokens, targets in data(2):
        x = model.embed.forward(tokens)
        for block in model.blocks:
            x = block.forward(x)
        loss_of(model.head.forward(model.norm.forward(x)), targets).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(model)


@family.works("`model.forward(x)` is called instead of `model(x)`")
def model_forward_called_directly(place):
    engine = place.small()
    for tokens, targets in data(2):
        loss_of(engine.module.forward(tokens), targets).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("`block.up(x)`: a layer inside a unit is called alone, with a gradient")
def layer_inside_unit_called(place):
    engine = place.small()
    torch.manual_seed(3)
    for _ in range(2):
        engine.module.blocks[2].up(torch.randn(4, 32)).square().mean().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("another method than `forward` is called (`model.encode(x)`)")
def another_method(place):
    from tiny import Tiny

    class Encoder(Tiny):
        def encode(self, tokens):
            x = self.embed(tokens)
            for block in self.blocks:
                x = block(x)
            return x

    torch.manual_seed(0)
    model = Encoder(32, 8, 64)
    engine = place.wrap(model)
    for tokens, _ in data(2):
        model.encode(tokens).square().mean().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(model)


@family.works("hooks of the engine are cleared: `module._forward_pre_hooks.clear()`", rtol=1e-4)
def hooks_cleared(place):
    engine = place.small()
    for module in engine.module.modules():
        module._forward_pre_hooks.clear()
        module._forward_hooks.clear()
    return train_by_hand(engine, 2), values(engine.module)
