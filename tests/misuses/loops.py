"""The order of forward, backward and step, as people write it."""

import torch
from tiny import loss_of
from torch.nn import functional as F

from misuses.case import Family
from misuses.place import ADAMW, data, gradients, losses, small, train, train_by_hand, values

family = Family("loops")


@family.works("the engine's own loop")
def own_loop(place):
    engine = place.small()
    return train(engine, 3), values(engine.module)


@family.works("PyTorch's loop with `engine.optimizer`")
def plain_loop(place):
    engine = place.small()
    return train_by_hand(engine, 3), values(engine.module)


@family.works("PyTorch's loop, calling the model itself")
def plain_loop_on_the_model(place):
    model = small()
    engine = place.wrap(model)
    found = []
    for loss in losses(engine, 3, model):
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        found.append(loss.item())
    return found, values(model)


@family.works("`loss.backward()` with `engine.step()`")
def loss_backward_then_engine_step(place):
    engine = place.small()
    for loss in losses(engine, 3):
        loss.backward()
        if place.has_engine:
            engine.step()
        else:
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("`engine.backward(loss)` with `engine.optimizer.step()`")
def engine_backward_then_optimizer_step(place):
    engine = place.small()
    for loss in losses(engine, 3):
        engine.optimizer.zero_grad()
        engine.backward(loss)
        engine.optimizer.step()
    return values(engine.module)


@family.works("`optimizer.step()` without a backward changes nothing")
def step_without_backward(place):
    engine = place.small()
    engine.optimizer.step()
    engine.optimizer.step()
    return train_by_hand(engine), values(engine.module)


@family.works("two backwards before a step add up")
def two_backwards_one_step(place):
    engine = place.small()
    for loss in losses(engine, 2):
        loss.backward()
    engine.optimizer.step()
    return values(engine.module)


@family.said("`optimizer.step()` twice without `zero_grad`: the gradient acts twice", "uses gradients up")
def step_twice(place):
    engine = place.small()
    for loss in losses(engine, 1):
        loss.backward()
    engine.optimizer.step()
    engine.optimizer.step()
    return values(engine.module)


@family.said("a loop that forgets `zero_grad`: gradients go on adding up", r"no zero_grad\(\) since the last step")
def zero_grad_forgotten(place):
    engine = place.small()
    for loss in losses(engine, 3):
        loss.backward()
        engine.optimizer.step()
    return values(engine.module)


@family.works("`zero_grad` before the step: the gradients are gone and nothing moves")
def zero_grad_before_step(place):
    engine = place.small()
    for loss in losses(engine, 2):
        loss.backward()
        engine.optimizer.zero_grad()
        engine.optimizer.step()
    return values(engine.module)


@family.works("gradients are read after the step, wherever they are stored")
def gradients_read_after_step(place):
    engine = place.small()
    for loss in losses(engine, 1):
        loss.backward()
    engine.optimizer.step()
    return gradients(engine.module)


@family.works("`gradient_accumulation_steps=2` by the engine's calls")
def accumulation_by_option(place):
    engine = place.small(gradient_accumulation_steps=2)
    for tokens, targets in data(4):
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
    return values(engine.module)


@family.works("accumulation by hand: `(loss / 2).backward()`, a step at every second")
def accumulation_by_hand(place):
    engine = place.small()
    for index, loss in enumerate(losses(engine, 4)):
        (loss / 2).backward()
        if index % 2:
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("the last batches of an epoch are fewer than `gradient_accumulation_steps`, then `optimizer.step()`")
def accumulation_cut_short(place):
    engine = place.small(gradient_accumulation_steps=4)
    for tokens, targets in data(2):
        engine.backward(loss_of(engine(tokens), targets))
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    return values(engine.module)


@family.refused("`loss.backward()` and `engine.step()` with `gradient_accumulation_steps=2`", r"engine\.backward")
def plain_backward_with_accumulation_option(place):
    engine = place.small(gradient_accumulation_steps=2)
    for index, loss in enumerate(losses(engine, 4)):
        (loss / 2).backward()
        if place.has_engine:
            engine.step()
        elif index % 2:
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("`optimizer.step(closure)`")
def closure(place):
    engine = place.small()
    tokens, targets = data(1)[0]

    def again():
        engine.optimizer.zero_grad()
        loss = loss_of(engine(tokens), targets)
        loss.backward()
        return loss

    return engine.optimizer.step(again).item(), values(engine.module)


@family.refused("`optimizer=torch.optim.LBFGS`", r"LBFGS")
def lbfgs(place):
    engine = place.small(optimizer=torch.optim.LBFGS, lr=1e-2)
    tokens, targets = data(1)[0]

    def again():
        engine.optimizer.zero_grad()
        loss = loss_of(engine(tokens), targets)
        loss.backward()
        return loss

    engine.optimizer.step(again)


@family.works("`zero_grad(set_to_none=False)` leaves zeros, which decay the weights in a step")
def zero_grad_to_zero(place):
    engine = place.small()
    train_by_hand(engine, 1)
    for loss in losses(engine, 1):
        loss.backward()
    engine.optimizer.zero_grad(set_to_none=False)
    zeros = gradients(engine.module)
    engine.optimizer.step()
    return zeros, values(engine.module)


@family.works("`model.zero_grad()` before each backward")
def model_zero_grad(place):
    engine = place.small()
    for loss in losses(engine, 3):
        engine.module.zero_grad()
        loss.backward()
        engine.optimizer.step()
    return values(engine.module)


@family.works("`model.zero_grad(set_to_none=False)` after the step: zeros, which are read")
def model_zero_grad_to_zero(place):
    engine = place.small()
    for loss in losses(engine, 3):
        loss.backward()
        engine.optimizer.step()
        engine.module.zero_grad(set_to_none=False)
    return gradients(engine.module), values(engine.module)


@family.works("`p.grad = None` for all parameters instead of `zero_grad`")
def grads_set_to_none(place):
    engine = place.small()
    for loss in losses(engine, 3):
        for p in engine.module.parameters():
            p.grad = None
        loss.backward()
        engine.optimizer.step()
    return values(engine.module)


@family.works("zeroing one block's gradients by `block.zero_grad()`")
def block_zero_grad(place):
    engine = place.small()
    for loss in losses(engine, 2):
        loss.backward()
        engine.module.blocks[2].zero_grad()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


SINCE = r"no zero_grad\(\) since"


@family.said("`block.zero_grad()` after each step, and the rest is never zeroed", SINCE)
def zeroed_in_part(place):
    engine = place.small()
    for loss in losses(engine, 3):
        loss.backward()
        engine.optimizer.step()
        engine.module.blocks.zero_grad()
    return values(engine.module)


@family.said("half of the gradients are made zeros after each step, the others go on", SINCE)
def zeros_in_part(place):
    engine = place.small()
    for loss in losses(engine, 3):
        loss.backward()
        engine.optimizer.step()
        for p in engine.module.blocks.parameters():
            p.grad = torch.zeros_like(p)
    return values(engine.module)


@family.said("what a backward does not reach was not zeroed: the old gradient acts again", SINCE)
def not_reached_and_not_zeroed(place):
    engine = place.small()
    for index, loss in enumerate(losses(engine, 2)):
        if index:
            loss = engine.module.head(torch.ones(2, 32)).square().mean()
        loss.backward()
        engine.optimizer.step()
        engine.module.head.zero_grad()
    return values(engine.module)


class EverySecond(torch.optim.Optimizer):
    """Vectors are stepped every second time, by the sum of two gradients."""

    count = 0

    def __init__(self, params, lr):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        self.count += 1
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and not self._rests(p):
                    p.add_(p.grad, alpha=-group["lr"])

    def zero_grad(self, set_to_none=True):
        for group in self.param_groups:
            for p in group["params"]:
                if not self._rests(p):
                    p.grad = None

    def _rests(self, p):
        return p.ndim < 2 and self.count % 2


@family.said("an optimizer that steps some parameters every second time, and zeroes the others alone", SINCE)
def every_second_step(place):
    engine = place.small(optimizer=EverySecond, lr=0.05)
    for loss in losses(engine, 4):
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("each part of the model is zeroed by its own `zero_grad()`")
def zeroed_part_by_part(place):
    engine = place.small()
    for loss in losses(engine, 3):
        loss.backward()
        engine.optimizer.step()
        for part in engine.module.children():
            part.zero_grad()
    return values(engine.module)


@family.works("backward twice through one graph raises")
def backward_twice(place):
    engine = place.small()
    loss = next(losses(engine, 1))
    loss.backward()
    loss.backward()


@family.works("training goes on after a second backward was refused")
def backward_twice_then_on(place):
    engine = place.small()
    loss = next(losses(engine, 1))
    loss.backward()
    said = place.attempt(loss.backward)
    engine.optimizer.zero_grad()
    return said, train_by_hand(engine), values(engine.module)


@family.works("`backward(retain_graph=True)` and backward again: twice the gradient")
def retained_graph(place):
    engine = place.small()
    loss = next(losses(engine, 1))
    loss.backward(retain_graph=True)
    loss.backward()
    found = gradients(engine.module)
    engine.optimizer.step()
    return found, values(engine.module)


@family.works("retained graph, then a step, then backward again: PyTorch raises, for the weights have changed")
def retained_graph_over_a_step(place):
    engine = place.small()
    loss = next(losses(engine, 1))
    loss.backward(retain_graph=True)
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    loss.backward()
    engine.optimizer.step()
    return values(engine.module)


@family.works("a forward before the step, its backward after it: PyTorch raises")
def forward_step_backward(place):
    engine = place.small()
    first, second = losses(engine, 2)
    first.backward()
    engine.optimizer.step()
    engine.optimizer.zero_grad()
    second.backward()
    engine.optimizer.step()
    return values(engine.module)


@family.works("a forward, then weights written by hand, then its backward: PyTorch raises")
def forward_write_backward(place):
    engine = place.small()
    loss = next(losses(engine, 1))
    with torch.no_grad():
        for p in engine.module.parameters():
            p.mul_(0.9)
    loss.backward()
    engine.optimizer.step()
    return values(engine.module)


@family.works("two forwards, then both backwards in turn, the first one first")
def two_forwards_two_backwards(place):
    engine = place.small()
    first, second = list(losses(engine, 2))
    first.backward()
    second.backward()
    engine.optimizer.step()
    return values(engine.module)


@family.works("two losses in one backward: `(a + b).backward()`")
def sum_of_two_losses(place):
    engine = place.small()
    first, second = list(losses(engine, 2))
    (first + 0.5 * second).backward()
    engine.optimizer.step()
    return values(engine.module)


@family.works("two losses of one output, `torch.autograd.backward([a, b])`")
def backward_of_a_list(place):
    engine = place.small()
    tokens, targets = data(1)[0]
    logits = engine(tokens)
    torch.autograd.backward([loss_of(logits, targets), 1e-3 * logits.square().mean()])
    engine.optimizer.step()
    return values(engine.module)


@family.works("auxiliary loss from a middle block, kept by a forward hook")
def auxiliary_loss(place):
    engine = place.small()
    kept = []
    engine.module.blocks[3].register_forward_hook(lambda module, args, output: kept.append(output))
    for loss in losses(engine, 2):
        (loss + kept.pop().square().mean()).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("`loss.backward(gradient)` of a loss that is not a scalar")
def backward_of_vector(place):
    engine = place.small()
    tokens, targets = data(1)[0]
    loss = F.cross_entropy(engine(tokens).flatten(0, 1), targets.flatten(), reduction="none")
    loss.backward(torch.full_like(loss, 1 / loss.numel()))
    engine.optimizer.step()
    return values(engine.module)


@family.works("`backward()` of a loss that is not a scalar raises")
def backward_of_vector_without_gradient(place):
    engine = place.small()
    tokens, _ = data(1)[0]
    said = place.attempt(lambda: engine.backward(engine(tokens).flatten()))
    return said, train(engine), values(engine.module)


@family.works("a loss that is detached raises")
def detached_loss(place):
    engine = place.small()
    said = [place.attempt(lambda loss=loss: engine.backward(loss.detach())) for loss in losses(engine, 1)]
    return said, train(engine), values(engine.module)


@family.works("a loss that is a float raises")
def float_loss(place):
    engine = place.small()
    said = [place.attempt(lambda loss=loss: engine.backward(loss.item())) for loss in losses(engine, 1)]
    return said, train(engine), values(engine.module)


@family.refused("a loss that is NaN: the step is refused, the weights stay whole", r"gradient.*not|NaN|finite")
def nan_loss(place):
    engine = place.small()
    for loss in losses(engine, 1):
        (loss * float("nan")).backward()
        engine.optimizer.step()


@family.works("after a NaN step was refused, training goes on as if the batch had been skipped")
def nan_loss_then_on(place):
    engine = place.small()
    train_by_hand(engine, 1)
    for loss in losses(engine, 1):
        engine.optimizer.zero_grad()
        if place.has_engine:
            (loss * float("inf")).backward()
            place.attempt(engine.optimizer.step)
    place.messages.clear()
    return train_by_hand(engine, 2), values(engine.module)


@family.works("a forward under `no_grad`, then backward raises")
def backward_of_no_grad(place):
    engine = place.small()
    with torch.no_grad():
        loss = next(losses(engine, 1))
    said = place.attempt(loss.backward)
    return said, train(engine), values(engine.module)


@family.works("`loss.backward()` called inside `no_grad`")
def backward_inside_no_grad(place):
    engine = place.small()
    for loss in losses(engine, 2):
        with torch.no_grad():
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("evaluation under `no_grad` between forward and backward")
def evaluation_between(place):
    engine = place.small()
    found = []
    for loss in losses(engine, 2):
        with torch.no_grad():
            found.append(next(losses(engine, 1)).item())
        engine.backward(loss)
        with torch.no_grad():
            found.append(next(losses(engine, 1)).item())
        engine.step()
    return found, values(engine.module)


@family.works("`inference_mode` between steps")
def inference_mode(place):
    engine = place.small()
    found = train(engine, 1)
    with torch.inference_mode():
        found += [loss.item() for loss in losses(engine, 2)]
    return found, train(engine, 2), values(engine.module)


@family.works_or_refused("the model is built and wrapped under `inference_mode`, and only evaluated", "inference_mode")
def wrapped_in_inference_mode(place):
    with torch.inference_mode():
        engine = place.small()
        found = [loss.item() for loss in losses(engine, 1)]
    return found


@family.works("wrapped under `no_grad`, trained outside")
def wrapped_in_no_grad(place):
    with torch.no_grad():
        engine = place.small()
    return train(engine), values(engine.module)


@family.works("a forward that raises, then training goes on")
def exception_in_forward(place):
    engine = place.small()

    def fail(module, args):
        raise ValueError("the user's mistake")

    train(engine, 1)
    hook = engine.module.blocks[4].register_forward_pre_hook(fail)
    said = place.attempt(lambda: list(losses(engine, 1)))
    hook.remove()
    return said, train(engine, 2), values(engine.module)


@family.works("a backward that raises half-way, `zero_grad`, then training goes on")
def exception_in_backward(place):
    engine = place.small()
    broken = [True]

    def fail(gradient):
        if broken[0]:
            raise ValueError("the user's mistake")

    engine.module.blocks[4].register_forward_hook(lambda m, a, output: output.register_hook(fail) and None)
    train_by_hand(engine, 0)
    loss = next(losses(engine, 1))
    said = place.attempt(loss.backward)
    broken[0] = False
    return said, train_by_hand(engine, 2), values(engine.module)


@family.works("a backward that raises half-way leaves the gradients that have come")
def gradients_after_exception_in_backward(place):
    engine = place.small()

    def fail(gradient):
        raise ValueError("the user's mistake")

    engine.module.blocks[4].register_forward_hook(lambda m, a, output: output.register_hook(fail) and None)
    said = place.attempt(next(losses(engine, 1)).backward)
    return said, gradients(engine.module)


@family.works_or_refused(
    "gradient penalty: `autograd.grad(create_graph=True)` of an input, then backward", "create_graph"
)
def gradient_penalty(place):
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Tanh()) for _ in range(12)))
    torch.manual_seed(1)
    engine = place.wrap(model)
    for _ in range(2):
        x = torch.randn(4, 48, requires_grad=True)
        loss = engine(x).square().mean()
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        (loss + slope.square().sum()).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(model)


@family.works_or_refused(
    "gradient penalty of all weights: `autograd.grad(..., create_graph=True)`, then backward", "create_graph"
)
def gradient_norm_penalty(place):
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Tanh()) for _ in range(12)))
    engine = place.wrap(model)
    loss = engine(torch.randn(4, 48)).square().mean()
    slopes = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    (loss + sum(slope.square().sum() for slope in slopes)).backward()
    engine.optimizer.step()
    return values(model)


@family.works("`torch.autograd.grad` of the loss by an input")
def grad_of_input(place):
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Tanh()) for _ in range(12)))
    engine = place.wrap(model)
    x = torch.randn(4, 48, requires_grad=True)
    (slope,) = torch.autograd.grad(engine(x).square().mean(), x)
    return slope, gradients(model)


@family.works("`torch.autograd.grad(loss, model.parameters())`")
def grad_of_parameters(place):
    engine = place.small()
    loss = next(losses(engine, 1))
    return list(torch.autograd.grad(loss, list(engine.module.parameters())))


@family.works("`torch.autograd.grad` by one weight of a block")
def grad_of_one_weight(place):
    engine = place.small()
    loss = next(losses(engine, 1))
    return torch.autograd.grad(loss, engine.module.blocks[2].up.weight)


@family.works("`torch.autograd.grad(..., allow_unused=True)` must not give None for what was used")
def grad_of_parameters_allow_unused(place):
    engine = place.small()
    loss = next(losses(engine, 1))
    found = torch.autograd.grad(loss, list(engine.module.parameters()), allow_unused=True)
    return [item is None for item in found], list(found)


@family.works("`loss.backward(inputs=[one weight])` gives that one a gradient and no other")
def backward_to_some_inputs(place):
    engine = place.small()
    loss = next(losses(engine, 1))
    loss.backward(inputs=[engine.module.blocks[2].up.weight])
    found = gradients(engine.module)
    engine.optimizer.step()
    return found, values(engine.module)


@family.works("`torch.autograd.backward(loss, inputs=list(model.parameters()))`")
def backward_to_all_inputs(place):
    engine = place.small()
    loss = next(losses(engine, 1))
    torch.autograd.backward(loss, inputs=list(engine.module.parameters()))
    engine.optimizer.step()
    return values(engine.module)


@family.works("the input wants a gradient, too (adversarial training)")
def gradient_of_input(place):
    torch.manual_seed(1)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Tanh()) for _ in range(12)))
    engine = place.wrap(model)
    x = torch.randn(4, 48, requires_grad=True)
    for _ in range(2):
        engine(x).square().mean().backward()
        x = (x + 0.1 * x.grad.sign()).detach().requires_grad_()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return x, values(model)


@family.works("`gradient_clipping=` clips as `clip_grad_norm_` before the step")
def clipping_by_option(place):
    engine = place.small(gradient_clipping=0.1)
    return train(engine, 3), values(engine.module)


@family.works("two engines in one process, in turn")
def two_engines(place):
    one, other = place.small(), place.wrap(small(6))
    found = []
    for left, right in zip(losses(one, 3), losses(other, 3), strict=True):
        one.backward(left)
        other.backward(right)
        one.step()
        other.step()
        found += [left.item(), right.item()]
    return found, values(one.module), values(other.module)


@family.works("the output of one engine's model is the input of another's (generator, discriminator)")
def chained_engines(place):
    def mlp(seed):
        torch.manual_seed(seed)
        return torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(48, 48), torch.nn.Tanh()) for _ in range(12)))

    generator, critic = place.wrap(mlp(1)), place.wrap(mlp(2))
    noise = torch.randn(4, 48)
    for _ in range(2):
        critic.optimizer.zero_grad()
        critic(generator(noise).detach()).mean().backward()
        critic.optimizer.step()
        generator.optimizer.zero_grad()
        (-critic(generator(noise)).mean()).backward()
        generator.optimizer.step()
    return values(generator.module), values(critic.module)


@family.works("distillation: the wrapped model learns from an ordinary one")
def distillation(place):
    engine, teacher = place.small(), small(4)
    for tokens, _ in data(2):
        with torch.no_grad():
            wanted = teacher(tokens).softmax(-1)
        F.kl_div(engine(tokens).log_softmax(-1), wanted, reduction="batchmean").backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("one model is wrapped, another is trained beside it by its own optimizer, in one loss")
def beside_an_ordinary_model(place):
    engine, other = place.small(), small(2)
    beside = torch.optim.AdamW(other.parameters(), **ADAMW)
    for tokens, targets in data(2):
        loss_of(engine(tokens) + other(tokens), targets).backward()
        for optimizer in (engine.optimizer, beside):
            optimizer.step()
            optimizer.zero_grad()
    return values(engine.module), values(other)


@family.works("a model is called twice in one loss, with shared graph parts")
def called_twice(place):
    engine = place.small()
    for tokens, targets in data(2):
        logits = engine(tokens)
        again = engine(logits.argmax(-1))
        (loss_of(logits, targets) + loss_of(again, targets)).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("only the head's loss: `with no_grad` around the body")
def frozen_body_by_no_grad(place):
    engine = place.small()
    model = engine.module
    for tokens, targets in data(2):
        with torch.no_grad():
            x = model.embed(tokens)
            for block in model.blocks:
                x = block(x)
        loss_of(model.head(model.norm(x)), targets).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(model)


@family.works("only one block of the model is called and trained")
def one_block_only(place):
    engine = place.small()
    block = engine.module.blocks[5]
    torch.manual_seed(3)
    for _ in range(2):
        block(torch.randn(4, 32)).square().mean().backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("a loss made of weights alone (L1, L2 by hand)")
def loss_of_weights(place):
    engine = place.small()
    for loss in losses(engine, 2):
        penalty = sum(p.abs().sum() for p in engine.module.parameters())
        (loss + 1e-4 * penalty).backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return values(engine.module)


@family.works("`engine.backward` of a loss with a weight penalty, without a forward")
def weight_penalty_alone(place):
    engine = place.small()
    engine.backward(sum(p.square().sum() for p in engine.module.parameters()))
    engine.step()
    return values(engine.module)
