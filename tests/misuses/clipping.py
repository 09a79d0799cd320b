"""Clipping and looking at gradients as a whole."""

import torch
from torch import nn

from misuses.case import Family
from misuses.place import losses, train_by_hand, values

family = Family("clipping")


def _clipped(place, clip, **options):
    engine = place.small(**options)
    found = []
    for loss in losses(engine, 3):
        engine.optimizer.zero_grad()
        loss.backward()
        result = clip(list(engine.module.parameters()))
        found.append(result.item() if isinstance(result, torch.Tensor) else result)
        engine.optimizer.step()
    return found, values(engine.module)


@family.works("`clip_grad_norm_`")
def clip_2_norm(place):
    return _clipped(place, lambda ps: nn.utils.clip_grad_norm_(ps, 0.1))


@family.works("`clip_grad_norm_` with a generator")
def clip_generator(place):
    return _clipped(place, lambda ps: nn.utils.clip_grad_norm_((p for p in ps), 0.1))


@family.works("`clip_grad_norm_(norm_type=inf)`")
def clip_inf_norm(place):
    return _clipped(place, lambda ps: nn.utils.clip_grad_norm_(ps, 1e-3, norm_type=float("inf")))


@family.works("`clip_grad_norm_(norm_type=1)`")
def clip_1_norm(place):
    return _clipped(place, lambda ps: nn.utils.clip_grad_norm_(ps, 1.0, norm_type=1))


@family.works("`clip_grad_norm_(foreach=True)`")
def clip_foreach(place):
    return _clipped(place, lambda ps: nn.utils.clip_grad_norm_(ps, 0.1, foreach=True))


@family.works("`clip_grad_norm_` of each block alone")
def clip_each(place):
    return _clipped(place, lambda ps: sum(nn.utils.clip_grad_norm_([p], 0.01).item() for p in ps))


@family.works("`clip_grad_norm_` twice")
def clip_twice(place):
    return _clipped(place, lambda ps: (nn.utils.clip_grad_norm_(ps, 0.2), nn.utils.clip_grad_norm_(ps, 0.1))[1])


@family.works("`clip_grad_norm_(error_if_nonfinite=True)` raises for a NaN")
def clip_error_if_nonfinite(place):
    engine = place.small()
    (next(losses(engine, 1)) * float("nan")).backward()
    nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0, error_if_nonfinite=True)


@family.works("`clip_grad_value_`")
def clip_value(place):
    return _clipped(place, lambda ps: nn.utils.clip_grad_value_(ps, 1e-3))


@family.works("`clip_grad_value_(foreach=True)`")
def clip_value_foreach(place):
    return _clipped(place, lambda ps: nn.utils.clip_grad_value_(ps, 1e-3, foreach=True))


@family.works("`get_total_norm` and `clip_grads_with_norm_`")
def total_norm(place):
    def clip(ps):
        norm = nn.utils.get_total_norm([p.grad for p in ps])
        nn.utils.clip_grads_with_norm_(ps, 0.1, norm)
        return norm

    return _clipped(place, clip)


@family.works("`torch._foreach_norm` over the gradients")
def foreach_norm(place):
    return _clipped(place, lambda ps: torch.stack(torch._foreach_norm([p.grad for p in ps])).norm())


@family.works("`torch._foreach_mul_` over the gradients")
def foreach_mul(place):
    return _clipped(place, lambda ps: torch._foreach_mul_([p.grad for p in ps], 0.5) and None)


@family.works("clipping by hand: `torch.cat([g.flatten() ...]).norm()`, then `p.grad *= factor`")
def clip_by_hand(place):
    def clip(ps):
        norm = torch.cat([p.grad.flatten() for p in ps]).norm()
        for p in ps:
            p.grad *= min(0.1 / norm.item(), 1.0)
        return norm

    return _clipped(place, clip)


@family.works("clipping by hand: `p.grad.data.norm(2)`, then `p.grad.data.mul_`, as in old code")
def clip_by_hand_through_data(place):
    def clip(ps):
        total = sum(p.grad.data.norm(2).item() ** 2 for p in ps) ** 0.5
        for p in ps:
            p.grad.data.mul_(min(0.1 / (total + 1e-6), 1.0))
        return total

    return _clipped(place, clip)


@family.works("adaptive clipping (AGC): each gradient by the norm of its weight")
def adaptive_clipping(place):
    @torch.no_grad()
    def clip(ps):
        for p in ps:
            limit = p.norm().clamp(min=1e-3) * 0.01
            norm = p.grad.norm()
            p.grad.copy_(torch.where(norm > limit, p.grad * (limit / norm), p.grad))

    return _clipped(place, clip)


@family.works("`engine.clip_grad_norm_`")
def clip_by_engine(place):
    engine = place.small()
    found = []
    for loss in losses(engine, 3):
        engine.backward(loss)
        found.append(engine.clip_grad_norm_(0.1).item())
        engine.step()
    return found, values(engine.module)


@family.works("`engine.clip_grad_norm_` beside `gradient_clipping=`")
def clip_by_both(place):
    engine = place.small(gradient_clipping=0.05)
    for loss in losses(engine, 3):
        engine.backward(loss)
        engine.clip_grad_norm_(0.1)
        engine.step()
    return values(engine.module)


@family.works("the norm is logged without clipping: `clip_grad_norm_(parameters, inf)`")
def norm_without_clipping(place):
    return _clipped(place, lambda ps: nn.utils.clip_grad_norm_(ps, float("inf")))


@family.works("`clip_grad_norm_` before any backward")
def clip_without_gradients(place):
    engine = place.small()
    norm = nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
    return norm, train_by_hand(engine, 1)


@family.works("clipping between micro-batches that add up")
def clip_between_micro_batches(place):
    engine = place.small()
    for loss in losses(engine, 3):
        loss.backward()
        nn.utils.clip_grad_norm_(engine.module.parameters(), 0.1)
    engine.optimizer.step()
    return values(engine.module)
