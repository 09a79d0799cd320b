"""What a loop's body hands on to the next micro-batch where its own source does not show it: in items, in functions
called for effect, in classes, in large containers, in gradients beside the model, in locks."""

from __future__ import annotations

import collections
import functools
import itertools
import queue
import threading

import torch
from torch import nn

from misuses.case import Family
from misuses.micro_batches import by_object, loss_of, trained, wrapped
from misuses.place import gradients, values
from misuses.strangers import WIDTH, Net, batch

family = Family("handed on")


def same_bits(title, **options):
    return family.works(title, rtol=0.0, atol=0.0, **options)


def over_items(place, items, body):
    """``items`` gives those of a step."""
    engine, found = wrapped(place), []
    for step in range(3):
        found.append(engine.together(items(step), lambda each: body(engine, each)))
        found.append(gradients(engine.module))
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


def mean_of(before, loss):
    return 0.5 * before + 0.5 * loss.item()


class Chunk:
    def __init__(self, x, document=None, before=None):
        self.x, self.document, self.before, self.out = x, document, before, None


class Document:
    def __init__(self):
        self.hidden = torch.zeros(WIDTH)


@same_bits("chunks of a document have its hidden state in common, and each moves it (truncated backpropagation)")
def items_share_a_document(place):
    def items(step):
        document = Document()
        return [Chunk(batch(10 * step + index), document) for index in range(4)]

    def body(engine, chunk):
        out = engine(chunk.x + chunk.document.hidden)
        out.square().mean().backward()
        chunk.document.hidden = out.detach().mean(0)
        return out.sum().item()

    return over_items(place, items, body)


@same_bits("each item knows the one before it, whose output it reads")
def items_are_linked(place):
    def items(step):
        found = [Chunk(batch(10 * step))]
        for index in range(1, 4):
            found.append(Chunk(batch(10 * step + index), before=found[-1]))
        return found

    def body(engine, chunk):
        before = chunk.before
        out = engine(chunk.x if before is None or before.out is None else chunk.x + before.out)
        out.square().mean().backward()
        chunk.out = out.detach()
        return out.sum().item()

    return over_items(place, items, body)


@same_bits("each item is a pair, with one and the same dictionary")
def items_share_a_dictionary(place):
    state = {"mean": 1.0}

    def body(engine, item):
        x, known = item
        loss = loss_of(engine, x) / known["mean"]
        loss.backward()
        known["mean"] = mean_of(known["mean"], loss)
        return loss.item()

    return over_items(place, lambda step: zip([batch(index) for index in range(4)], itertools.repeat(state)), body)


@same_bits("each item is written to, and has nothing in common with others but a mask and settings")
def items_of_their_own(place):
    mask = torch.ones(WIDTH)

    def items(step):
        return [{"x": batch(10 * step + index), "y": batch(99), "mask": mask} for index in range(4)]

    def body(engine, item):
        item["y"] = item["y"] * 2
        loss = ((engine(item["x"].requires_grad_()) - item.pop("y")) * item["mask"]).square().mean()
        loss.backward()
        return item["x"].grad

    return over_items(place, items, body)


@same_bits("`islice` of a generator whose items become harder with each loss")
def items_of_a_slice(place):
    class Rows:
        level = 1.0

        def __iter__(self):
            for index in itertools.count():
                yield batch(index) * self.level

    rows = Rows()
    each = iter(rows)

    def body(engine, x):
        loss = loss_of(engine, x)
        loss.backward()
        rows.level = 0.5 + loss.item()
        return loss.item()

    return over_items(place, lambda step: itertools.islice(each, 4), body)


@same_bits("an iterator of one's own, which begins anew at each `iter`, and whose items become harder")
def items_of_an_own_iterator(place):
    class Rows:
        level, count, left = 1.0, 0, 0

        def __iter__(self):
            self.left = 4
            return self

        def __next__(self):
            if not self.left:
                raise StopIteration
            self.left -= 1
            self.count += 1
            return batch(self.count) * self.level

    rows = Rows()

    def body(engine, x):
        loss = loss_of(engine, x)
        loss.backward()
        rows.level = 0.5 + loss.item()
        return loss.item()

    return over_items(place, lambda step: rows, body)


@same_bits("a class method goes backward, with a mean that the class has")
def effect_of_a_class_method(place):
    class Scaled:
        mean = 1.0

        @classmethod
        def backward(cls, loss):
            (loss / cls.mean).backward()
            cls.mean = mean_of(cls.mean, loss)

    def body(engine, x):
        loss = loss_of(engine, x)
        Scaled.backward(loss)
        return loss.item()

    return trained(place, body)


@same_bits("a function in an attribute of the trainer goes backward")
def effect_of_an_attribute(place):
    mean = 1.0

    def backward(loss):
        nonlocal mean
        (loss / mean).backward()
        mean = mean_of(mean, loss)

    class Trainer:
        def __init__(self, engine):
            self.engine, self.go = engine, backward

        def step(self, x):
            loss = loss_of(self.engine, x)
            self.go(loss)
            return loss.item()

    return by_object(place, lambda engine: Trainer(engine).step)


@same_bits("the first of a list of callbacks goes backward")
def effect_of_an_item(place):
    class Callback:
        def __init__(self):
            self.mean = 1.0

        def on_loss(self, loss):
            (loss / self.mean).backward()
            self.mean = mean_of(self.mean, loss)

    callbacks = [Callback()]

    def body(engine, x):
        loss = loss_of(engine, x)
        callbacks[0].on_loss(loss)
        return loss.item()

    return trained(place, body)


@same_bits("meters in a dictionary are updated, and read after the step")
def effect_of_meters(place):
    class Meter:
        def __init__(self):
            self.total = self.count = 0

        def update(self, value):
            self.total += value
            self.count += 1

    meters = {"loss": Meter()}

    def body(engine, x):
        loss = loss_of(engine, x)
        loss.backward()
        meters["loss"].update(loss.item())
        return loss.item()

    return trained(place, body), meters["loss"].total


@same_bits("a mean is an attribute of the trainer's class, moved by `type(self)`")
def kept_by_the_class(place):
    class Trainer:
        mean = 1.0

        def __init__(self, engine):
            self.engine = engine

        def step(self, x):
            loss = loss_of(self.engine, x) / self.mean
            loss.backward()
            type(self).mean = mean_of(self.mean, loss)
            return loss.item()

    return by_object(place, lambda engine: Trainer(engine).step)


@same_bits("a mean is a default of an argument that has a name only")
def kept_by_a_named_default(place):
    def body(engine, x, *, state={"mean": 1.0}):  # noqa: B006
        loss = loss_of(engine, x) / state["mean"]
        loss.backward()
        state["mean"] = mean_of(state["mean"], loss)
        return loss.item()

    return trained(place, body)


@same_bits("the strength of a gradient reversal, which its `Function` alone reads, grows")
def kept_for_a_function(place):
    class Reversed(torch.autograd.Function):
        strength = 1.0

        @staticmethod
        def forward(ctx, x):
            return x.view_as(x)

        @staticmethod
        def backward(ctx, gradient):
            return -Reversed.strength * gradient

    def body(engine, x):
        loss = Reversed.apply(engine(x)).square().mean()
        loss.backward()
        Reversed.strength += 0.1
        return loss.item()

    return trained(place, body)


@same_bits("a property reads what the body moves")
def kept_behind_a_property(place):
    weights = [1.0]

    class Settings:
        @property
        def weight(self):
            return weights[0]

    settings = Settings()

    def body(engine, x):
        loss = loss_of(engine, x) * settings.weight
        loss.backward()
        weights[0] *= 1.1
        return loss.item()

    return trained(place, body)


@same_bits("`with` an object whose class has the scale, and moves it at the end")
def kept_by_with(place):
    class Scaled:
        mean = 1.0

        def __enter__(self):
            return Scaled.mean

        def __exit__(self, *error):
            Scaled.mean *= 1.1

    def body(engine, x):
        with Scaled() as mean:
            loss = loss_of(engine, x) / mean
            loss.backward()
        return loss.item()

    return trained(place, body)


@same_bits("weights of 3,000 rows in a list are moved by their losses")
def kept_in_a_large_list(place):
    weights = [1.0] * 3000

    def body(engine, x):
        loss = loss_of(engine, x) * weights[7]
        loss.backward()
        weights[7] = 0.5 + loss.item()
        return loss.item()

    return trained(place, body)


@same_bits("a queue of 2,000 keys is full, and each output takes the place of the oldest (contrast)")
def kept_in_a_full_deque(place):
    keys = collections.deque([torch.ones(WIDTH) for _ in range(2000)], maxlen=2000)

    def body(engine, x):
        out = engine(x)
        loss = (out * keys[-1]).square().mean()
        loss.backward()
        keys.append(out.detach().mean(0))
        return loss.item()

    return trained(place, body)


def head():
    torch.manual_seed(3)
    return nn.Linear(WIDTH, 1)


@same_bits("gradients of a head beside the model are clipped in each micro-batch")
def gradients_beside_clipped(place):
    last = head()

    def body(engine, x):
        loss = last(engine(x)).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(last.parameters(), 0.01)
        return loss.item()

    return trained(place, body), last.weight.grad


@same_bits("the next loss is weighed by the gradients of a head beside the model (GradNorm)")
def gradients_beside_weigh(place):
    last = head()

    def body(engine, x):
        before = last.weight.grad
        weight = 1.0 if before is None else 1 / (1 + before.norm().item())
        loss = weight * last(engine(x)).square().mean()
        loss.backward()
        return loss.item()

    return trained(place, body)


@same_bits("a head beside the model gets gradients, and nobody looks at them before all have come")
def gradients_beside_summed(place):
    last = head()

    def body(engine, x):
        loss = last(engine(x)).square().mean()
        loss.backward()
        return loss.item()

    return trained(place, body), last.weight.grad


@same_bits("a full backward hook of a block scales by what the body moves")
def hook_reads_what_the_body_moves(place):
    scale, model = [1.0], Net()
    model.blocks[2].register_full_backward_hook(lambda module, given, got: tuple(each * scale[0] for each in given))

    def body(engine, x):
        loss = loss_of(engine, x)
        loss.backward()
        scale[0] *= 1.1
        return loss.item()

    return trained(place, body, model)


@same_bits("the rate of an optimizer beside the model weighs the loss, and moves with it")
def rate_beside(place):
    optimizer = torch.optim.SGD(head().parameters(), lr=0.5)

    def body(engine, x):
        loss = loss_of(engine, x) * optimizer.param_groups[0]["lr"]
        loss.backward()
        optimizer.param_groups[0]["lr"] = 0.5 + loss.item()
        return loss.item()

    return trained(place, body)


@same_bits("points of a Sobol sequence are drawn before the model and after it")
def sobol_points(place):
    points = torch.quasirandom.SobolEngine(1, scramble=True, seed=1)

    def body(engine, x):
        out = engine(x * points.draw(1).item())
        loss = (out - points.draw(1).item()).square().mean()
        loss.backward()
        return loss.item()

    return trained(place, body)


@same_bits("each micro-batch holds a lock")
def held_lock(place):
    lock = threading.Lock()

    def body(engine, x):
        with lock:
            loss = loss_of(engine, x)
            loss.backward()
        return loss.item()

    return trained(place, body)


@same_bits("a decorator holds a semaphore of one place around the body")
def held_semaphore(place):
    places = threading.BoundedSemaphore(1)

    def alone(function):
        @functools.wraps(function)
        def held(*args):
            places.acquire()
            try:
                return function(*args)
            finally:
                places.release()

        return held

    @alone
    def body(engine, x):
        loss = loss_of(engine, x)
        loss.backward()
        return loss.item()

    return trained(place, body)


@same_bits("a value goes round by a `SimpleQueue`")
def held_by_a_queue(place):
    means = queue.SimpleQueue()
    means.put(1.0)

    def body(engine, x):
        loss = loss_of(engine, x) / means.get()
        loss.backward()
        means.put(0.5 + loss.item())
        return loss.item()

    return trained(place, body)


@same_bits("a mean is kept for each thread by itself")
def kept_by_a_thread(place):
    known = threading.local()
    known.mean = 1.0

    def body(engine, x):
        loss = loss_of(engine, x) / known.mean
        loss.backward()
        known.mean = mean_of(known.mean, loss)
        return loss.item()

    return trained(place, body)
