"""Other threads, interrupts, and signals."""

import contextlib
import os
import queue
import random
import signal
import sys
import threading
import time

import torch
from tiny import loss_of

from misuses.case import Family
from misuses.place import data, losses, train, train_by_hand, values

family = Family("threads and interrupts")


def _in_thread(call):
    """What ``call`` gives in another thread; its exception is raised here."""
    answer = queue.Queue()

    def run():
        try:
            answer.put((call(), None))
        except BaseException as error:
            answer.put((None, error))

    thread = threading.Thread(target=run)
    thread.start()
    found, error = answer.get(timeout=50)
    thread.join()
    if error is not None:
        raise error
    return found


@family.works("the whole training runs in another thread than the one that wrapped")
def trained_in_thread(place):
    engine = place.small()
    return _in_thread(lambda: train(engine, 2)), values(engine.module)


@family.works("the model is wrapped in another thread")
def wrapped_in_thread(place):
    engine = _in_thread(place.small)
    return train(engine, 2), values(engine.module)


@family.works("forward in another thread, backward here")
def forward_in_thread(place):
    engine = place.small()
    for index in range(2):
        tokens, targets = data(2)[index]
        loss = _in_thread(lambda tokens=tokens, targets=targets: loss_of(engine(tokens), targets))
        engine.backward(loss)
        engine.step()
    return values(engine.module)


@family.works("forward here, backward in another thread")
def backward_in_thread(place):
    engine = place.small()
    for loss in losses(engine, 2):
        _in_thread(lambda loss=loss: engine.backward(loss))
        engine.step()
    return values(engine.module)


@family.works("`step` in another thread")
def step_in_thread(place):
    engine = place.small()
    for loss in losses(engine, 2):
        engine.backward(loss)
        _in_thread(engine.step)
    return values(engine.module)


@family.works("a weight is read in another thread between steps (a logger)")
def read_in_thread(place):
    engine = place.small()
    found = []
    for _ in range(2):
        train(engine, 1)
        found.append(_in_thread(lambda: engine.module.blocks[3].up.weight.norm().item()))
    return found, train(engine, 1)


@family.works("a thread reads weights and state dicts all the time while another trains", seconds=90)
def read_all_the_time(place):
    engine = place.small()
    stop, errors = threading.Event(), []

    def read():
        while not stop.is_set():
            try:
                for p in engine.module.parameters():
                    if not torch.isfinite(p.detach()).all():
                        errors.append("not finite")
                engine.module.state_dict()
            except Exception as error:
                errors.append(f"{type(error).__name__}: {error}")
                return

    thread = threading.Thread(target=read)
    thread.start()
    try:
        for _ in range(3):
            train(engine, 2)
    finally:
        stop.set()
        thread.join()
    return sorted(set(errors)), values(engine.module)


@family.works_or_refused("two threads run the model at once under `no_grad` (a server)", "thread", seconds=90)
def two_threads_evaluate(place):
    engine = place.small()
    batches = data(2)
    with torch.no_grad():
        expected = [engine(tokens) for tokens, _ in batches]
    found, errors = [], []
    barrier = threading.Barrier(2)

    def run(index):
        try:
            barrier.wait()
            with torch.no_grad():
                for _ in range(20):
                    found.append(bool(torch.allclose(engine(batches[index][0]), expected[index], atol=1e-5)))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return all(found), len(found)


@family.works_or_refused("two threads do forward and backward at once (Hogwild)", "thread", seconds=90)
def two_threads_train(place):
    engine = place.small()
    batches = data(2)
    errors = []
    barrier = threading.Barrier(2)

    def run(index):
        tokens, targets = batches[index]
        try:
            barrier.wait()
            for _ in range(10):
                loss_of(engine(tokens), targets).backward()
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return all(bool(torch.isfinite(p.grad).all()) for p in engine.module.parameters()), [
        round(p.grad.norm().item(), 2) for p in engine.module.parameters()
    ]


@family.works_or_refused("evaluation in one thread while another trains", "thread", seconds=90)
def evaluate_while_training(place):
    engine = place.small()
    tokens = data(1)[0][0]
    stop, errors, count = threading.Event(), [], [0]

    def run():
        while not stop.is_set():
            try:
                with torch.no_grad():
                    if not torch.isfinite(engine(tokens)).all():
                        raise ArithmeticError("NaN in an evaluation")
                count[0] += 1
            except Exception as error:
                errors.append(error)
                return

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(4):
            train(engine, 3)
    finally:
        stop.set()
        thread.join()
    if errors:
        raise errors[0]
    return values(engine.module)


@family.works("`asyncio`: steps in `asyncio.to_thread`")
def asyncio_to_thread(place):
    import asyncio

    engine = place.small()

    async def main():
        return [await asyncio.to_thread(train, engine, 1) for _ in range(3)]

    return asyncio.run(main()), values(engine.module)


@family.works("a `ThreadPoolExecutor` trains two engines, one in each thread")
def two_engines_two_threads(place):
    from concurrent.futures import ThreadPoolExecutor

    engines = [place.small(), place.small()]
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda engine: train(engine, 3), engines))
    return found, [values(engine.module) for engine in engines]


@family.works("the engine is closed by another thread between steps; training it then raises")
def closed_by_thread(place):
    engine = place.small()
    train(engine, 1)
    found = values(engine.module)
    _in_thread(engine.close)
    return found


@family.works_or_refused("`close()` by another thread in the middle of a forward", "closed", seconds=60)
def closed_by_thread_in_forward(place):
    engine = place.small()
    train(engine, 1)
    closed = []

    def close(module, args):
        if not closed:
            closed.append(True)
            _in_thread(engine.close)

    engine.module.blocks[3].register_forward_pre_hook(close)
    return train(engine, 2), values(engine.module)


def _interrupted(place, prepare):
    """Train, be interrupted, go on; the interrupt comes where ``prepare`` puts it."""
    engine = place.small()
    train_by_hand(engine, 1)
    undo = prepare(engine)
    caught = "nothing"
    try:
        train_by_hand(engine, 1)
    except KeyboardInterrupt:
        caught = "KeyboardInterrupt"
    undo()
    engine.optimizer.zero_grad()
    return caught, train_by_hand(engine, 2), values(engine.module)


def _raise_interrupt(*_):
    raise KeyboardInterrupt


@family.works("Ctrl-C in a forward, then training goes on")
def interrupt_in_forward(place):
    return _interrupted(
        place, lambda engine: engine.module.blocks[3].up.register_forward_pre_hook(_raise_interrupt).remove
    )


@family.works("Ctrl-C between two blocks, then training goes on")
def interrupt_between_blocks(place):
    return _interrupted(place, lambda engine: engine.module.blocks[3].register_forward_hook(_raise_interrupt).remove)


@family.works("Ctrl-C in a backward, then training goes on")
def interrupt_in_backward(place):
    return _interrupted(
        place, lambda engine: engine.module.blocks[3].register_full_backward_hook(_raise_interrupt).remove
    )


@family.works("Ctrl-C in a hook of the optimizer's step, then training goes on")
def interrupt_in_step(place):
    return _interrupted(place, lambda engine: engine.optimizer.register_step_pre_hook(_raise_interrupt).remove)


@family.works("a real SIGINT in the middle of a forward, then training goes on")
def real_interrupt(place):
    def strike(*_):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)

    return _interrupted(place, lambda engine: engine.module.blocks[3].up.register_forward_pre_hook(strike).remove)


class _Interrupting:
    """Sends Ctrl-C at the ``position``-th call inside of the engine; counts them."""

    def __init__(self, position):
        self.position = position
        self.count = 0
        self.where = "nowhere"

    def __enter__(self):
        sys.settrace(self._trace)
        return self

    def __exit__(self, *error):
        sys.settrace(None)

    def _trace(self, frame, event, argument):
        if "/offload/" in frame.f_code.co_filename:
            self.count += 1
            if self.count == self.position:
                self.where = f"{frame.f_code.co_filename.rpartition('/offload/')[2]}:{frame.f_code.co_name}"
                signal.raise_signal(signal.SIGINT)


def _go_on_after_interrupts(place, number, prepare, work):
    """Be interrupted in ``work``, once at each of ``number`` calls in it, and train on. Where that hangs, or is wrong.

    ``work`` is given the engine, and what ``prepare`` gives for it.
    """
    if not place.has_engine:
        return "nothing wrong"

    def too_long(*_):
        raise TimeoutError

    signal.signal(signal.SIGALRM, too_long)
    faults = []
    engine = place.small()
    prepared = prepare(engine)
    with _Interrupting(0) as counting:
        work(engine, prepared)
    stride = max(counting.count // number, 1)
    for position in range(1, counting.count, stride):
        engine = place.small()
        train_by_hand(engine, 1)
        prepared = prepare(engine)
        with contextlib.suppress(KeyboardInterrupt), _Interrupting(position) as interrupt:
            work(engine, prepared)
        signal.setitimer(signal.ITIMER_REAL, 5)
        doing = "training on"
        try:
            engine.optimizer.zero_grad()
            found = train_by_hand(engine, 2)
            if not all(0 < loss < 20 for loss in found):
                faults.append(f"{interrupt.where} ({position}): losses {found}")
            doing = "close"
            engine.close()
        except TimeoutError:
            faults.append(f"{interrupt.where} ({position}): {doing} hangs")
            break  # what hangs is not left by further calls
        except Exception as error:
            faults.append(f"{interrupt.where} ({position}): {doing}: {type(error).__name__}: {error}")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    return "; ".join(faults) or "nothing wrong"


@family.works("Ctrl-C at sixteen places in a forward, one after the other: training goes on", seconds=120)
def interrupts_all_over_forward(place):
    return _go_on_after_interrupts(place, 16, lambda engine: None, lambda engine, _: list(losses(engine, 1)))


def _loss_after_zero_grad(engine):
    engine.optimizer.zero_grad()
    return next(losses(engine, 1))


@family.works("Ctrl-C at sixteen places in a backward: training goes on", seconds=120)
def interrupts_all_over_backward(place):
    return _go_on_after_interrupts(place, 16, _loss_after_zero_grad, lambda _, loss: loss.backward())


@family.works("Ctrl-C at thirty places in a step: training goes on", seconds=120)
def interrupts_all_over_step(place):
    return _go_on_after_interrupts(
        place,
        30,
        lambda engine: _loss_after_zero_grad(engine).backward(),
        lambda engine, _: engine.optimizer.step(),
    )


@family.works_or_refused(
    "Ctrl-C at random moments, twelve times: training goes on", "interrupt|one more unit than was planned", seconds=60
)
def interrupts_at_random(place):
    engine = place.small()
    train_by_hand(engine, 1)
    chance = random.Random(1)
    caught = 0
    signal.signal(signal.SIGALRM, _raise_interrupt)
    for _ in range(12):
        try:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(0.001, 0.05))
            for _ in range(30):
                train_by_hand(engine, 2)
        except KeyboardInterrupt:
            caught += 1
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    engine.optimizer.zero_grad()
    train_by_hand(engine, 2)
    finite = all(bool(torch.isfinite(p).all()) for p in engine.module.parameters())
    return caught > 6, finite, sum(p.numel() for p in engine.module.parameters())


@family.works("a time limit by `signal.alarm` that raises in a step, then the engine is closed")
def alarm_then_close(place):
    engine = place.small()
    signal.signal(signal.SIGALRM, lambda *_: (_ for _ in ()).throw(TimeoutError("time is up")))
    signal.setitimer(signal.ITIMER_REAL, 0.15)
    said = "nothing"
    try:
        for _ in range(3000):
            train(engine, 2)
    except TimeoutError:
        said = "TimeoutError"
    engine.close()
    return said


@family.works("SIGTERM ends the program, and leaves no file behind", seconds=60)
def sigterm(place):
    pid = os.fork()
    if pid == 0:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        engine = place.small()
        train(engine, 1)
        (place.folder / "ready").touch()
        time.sleep(30)
        os._exit(1)
    for _ in range(3000):
        if (place.folder / "ready").exists():
            break
        time.sleep(0.01)
    os.kill(pid, signal.SIGTERM)
    _, status = os.waitpid(pid, 0)
    return os.WTERMSIG(status), sorted(
        path.name for path in place.folder.iterdir() if path.name not in ("output", "ready")
    )


@family.works("SIGSTOP and SIGCONT (Ctrl-Z, fg) in the middle of training", seconds=60)
def stopped_and_continued(place):
    engine = place.small()
    pid = os.getpid()
    child = os.fork()
    if child == 0:
        for _ in range(5):
            time.sleep(0.02)
            os.kill(pid, signal.SIGSTOP)
            time.sleep(0.05)
            os.kill(pid, signal.SIGCONT)
        os._exit(0)
    found = train(engine, 3)
    os.waitpid(child, 0)
    return found, train(engine, 2), values(engine.module)
