"""Code that runs at moments that nobody chose: signal handlers, finalizers of the collector, tracers, handlers of logs
and warnings, modes of torch, callbacks of autograd. They look into the model, or train it, from there."""

from __future__ import annotations

import contextlib
import gc
import io
import logging
import signal
import sys
import threading
import time
import tracemalloc
import warnings
import weakref

import torch
from torch import nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from misuses.case import Family
from misuses.joints import batch, program, stepped
from misuses.loops_of_today import loop, mean
from misuses.place import gradients, values
from misuses.strangers import WIDTH, Block, Net

family = Family("odd hours")
TWO = ("plain", "mixed")


def void(_):
    """Nothing, as the result of a hook."""


def odd(title, joints=("plain",), **options):
    return program(family, title, joints, **options)


@contextlib.contextmanager
def ticking(handler, seconds=0.001):
    """``handler`` is called by a signal again and again, between any two instructions of the main thread."""
    over = []

    def handle(number, frame):
        with torch.no_grad():
            handler()
        if not over:
            signal.setitimer(signal.ITIMER_REAL, seconds)

    before = signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, seconds)
    try:
        yield
    finally:
        over.append(1)
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def ticked(run, look, **options):
    """A loop, within which a signal handler looks at the model all the time."""
    current = []

    def body(engine, index):
        current[:] = [engine]
        return mean(engine, index)

    with ticking(lambda: look(current[0]) if current else None, options.pop("seconds", 0.002)):
        return loop(run, body=body, **options)


# Signals.


@odd("a timer's signal handler reads norms of all weights every two milliseconds of training", TWO)
def signal_reads_norms(run):
    return ticked(run, lambda e: [p.norm().item() for p in e.module.parameters()])


@odd("a timer's signal handler takes a state dict of the model, wherever the loop is", TWO)
def signal_takes_state(run):
    return ticked(run, lambda e: e.module.state_dict(), seconds=0.005)


@odd("a timer's signal handler takes the optimizer's state dict, wherever the loop is")
def signal_takes_optimizer_state(run):
    return ticked(run, lambda e: e.optimizer.state_dict(), seconds=0.005)


@odd("a timer's signal handler evaluates the model without gradients, in the middle of whatever runs")
def signal_evaluates(run):
    def look(engine):
        with torch.no_grad():
            engine.module(batch(99))

    return ticked(run, look, seconds=0.01)


@odd("a timer's signal handler reads `p.grad` of all parameters")
def signal_reads_gradients(run):
    return ticked(run, lambda e: [None if p.grad is None else p.grad.norm().item() for p in e.module.parameters()])


@odd("a timer's signal handler makes a deep copy of the model")
def signal_copies(run):
    import copy

    return ticked(run, lambda e: copy.deepcopy(e.module), seconds=0.01)


@odd("a timer's signal handler prints the model and each parameter, and reads the group's rate")
def signal_prints(run):
    return ticked(run, lambda e: (repr(e.module), [repr(p) for p in e.module.parameters()], e.optimizer.param_groups))


@odd("SIGUSR1 in a forward hook asks for a snapshot, which the handler takes by `torch.save` of both state dicts", TWO)
def signal_saves(run):
    saved, current = [], []

    def handler(number, frame):
        file = io.BytesIO()
        torch.save([current[0].module.state_dict(), current[0].optimizer.state_dict()], file)
        saved.append(torch.load(io.BytesIO(file.getvalue()), weights_only=True)[0])

    signal.signal(signal.SIGUSR1, handler)
    net = Net()
    net.blocks[2].register_forward_hook(lambda *a: signal.raise_signal(signal.SIGUSR1))

    def body(engine, index):
        current[:] = [engine]
        return mean(engine, index)

    found = loop(run, lambda: net, body=body)
    return found, saved


@odd("SIGUSR1 in a tensor's hook in the middle of a backward: the handler reads the gradients that have come")
def signal_in_backward(run):
    seen, current = [], []

    def handler(number, frame):
        seen.append([None if p.grad is None else p.grad.norm().item() for p in current[0].module.last.parameters()])

    signal.signal(signal.SIGUSR1, handler)

    def body(engine, index):
        current[:] = [engine]
        hidden = engine.module.blocks[0](engine.module.first(batch(index)))
        hidden.register_hook(lambda g: signal.raise_signal(signal.SIGUSR1))
        for block in engine.module.blocks[1:]:
            hidden = block(hidden)
        return engine.module.last(hidden).square().mean()

    found = loop(run, body=body)
    return found, len(seen)


@odd("a signal handler halves the rate and scales a weight between backward and step")
def signal_changes(run):
    current = []

    def handler(number, frame):
        for group in current[0].optimizer.param_groups:
            group["lr"] *= 0.5
        with torch.no_grad():
            current[0].module.first.weight.mul_(0.9)

    signal.signal(signal.SIGUSR1, handler)

    def before(engine, step):
        current[:] = [engine]
        signal.raise_signal(signal.SIGUSR1)

    return loop(run, body=mean, before=before)


class Stop(BaseException):
    """No ``Exception``: what catches those does not catch it."""


@odd("a signal handler raises an error of the program's own at many moments of a forward, and the batch is tried again")
def signal_raises(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    found = []
    for step in range(3):
        for wait in range(12):

            def raising(number, frame):
                raise Stop

            signal.signal(signal.SIGALRM, raising)
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.0003 * (wait + 1))
                mean(engine, step)
                signal.setitimer(signal.ITIMER_REAL, 0)
            except Stop:
                pass
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
        mean(engine, step).backward()
        found.append(stepped(engine))
    return found, values(engine.module)


@odd("a signal handler raises `TimeoutError` in a backward, gradients are dropped, and the batch is tried again", TWO)
def signal_raises_in_backward(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    found = []

    def handler(number, frame):
        raise TimeoutError

    signal.signal(signal.SIGUSR1, handler)
    for step in range(3):
        for place in range(3):
            hidden = engine.module.first(batch(step))
            for number, block in enumerate(engine.module.blocks):
                hidden = block(hidden)
                if number == place:
                    hidden.register_hook(lambda g: signal.raise_signal(signal.SIGUSR1))
            with contextlib.suppress(TimeoutError):
                engine.module.last(hidden).square().mean().backward()
            engine.optimizer.zero_grad()
        mean(engine, step).backward()
        found.append(stepped(engine))
    return found, values(engine.module)


def ended_by(kind, place, run, build=Net):
    """A forward, or a backward, is ended by an error that is no ``Exception`` at a block, and caught; the loop goes on
    without a `zero_grad`."""
    torch.manual_seed(5)
    net = build()
    due = []

    def forward_hook(module, args):
        if due and place == "forward":
            due.clear()
            raise kind

    def backward_hook(module, gradients):
        if due and place == "backward":
            due.clear()
            raise kind

    net.blocks[2].down.register_forward_pre_hook(forward_hook)
    net.blocks[2].register_full_backward_pre_hook(backward_hook)
    engine = run.engine(net)
    found = []
    for step in range(4):
        if step % 2:
            due.append(1)
            with contextlib.suppress(kind):
                mean(engine, step + 20).backward()
            due.clear()
        loss = mean(engine, step)
        loss.backward()
        found.append((loss.item(), stepped(engine)))
    return found, values(net)


class OwnParameters(Net):
    """The root has a parameter of its own, and is in use around its blocks."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x):
        return super().forward(x) * self.scale


ENDED = ("plain", "mixed", "over the tiers")


@odd("Ctrl-C in the middle of a forward is caught, and the next forward follows without `zero_grad`", ENDED)
def interrupted_forward_goes_on(run):
    return ended_by(KeyboardInterrupt, "forward", run)


@odd("Ctrl-C in the middle of a backward is caught: the gradients that came stay, and the next ones are added", ENDED)
def interrupted_backward_goes_on(run):
    return ended_by(KeyboardInterrupt, "backward", run)


@odd("`sys.exit` in a forward is caught, and training goes on without `zero_grad`; the root has weights", ENDED)
def exit_in_forward_goes_on(run):
    return ended_by(SystemExit, "forward", run, OwnParameters)


@odd("an error of the program's own that is no `Exception` ends a forward, and training goes on", ENDED)
def own_error_in_forward_goes_on(run):
    return ended_by(Stop, "forward", run, OwnParameters)


@odd("an error of the program's own that is no `Exception` ends a backward, and training goes on", ENDED)
def own_error_in_backward_goes_on(run):
    return ended_by(Stop, "backward", run, OwnParameters)


@odd("`asyncio.CancelledError` ends a forward by a hook, and training goes on", ENDED)
def cancelled_in_forward_goes_on(run):
    import asyncio

    return ended_by(asyncio.CancelledError, "forward", run)


# The collector.


class Cycle:
    """It is freed by the collector, at a moment of its choice, and looks at a model then."""

    def __init__(self, call):
        self.me, self.call = self, call

    def __del__(self):
        self.call()


@contextlib.contextmanager
def collecting(call, threshold=5):
    """Finalizers run ``call`` at almost every allocation of a container."""
    before = gc.get_threshold()
    gc.set_threshold(threshold, 1, 1)
    inside = []

    def look():
        if not inside:
            inside.append(1)
            try:
                with torch.no_grad():
                    call()
                Cycle(look)
            finally:
                inside.clear()

    def again(phase, info):
        if phase == "stop" and not inside:
            Cycle(look)

    gc.callbacks.append(again)
    Cycle(look)
    try:
        yield
    finally:
        gc.callbacks.remove(again)
        gc.set_threshold(*before)


def collected(run, look, threshold=300):
    """The collector comes all the time from the second step on. Errors of finalizers are ignored by Python: the engine
    refuses those that come in the middle of its own work."""
    current, within = [], contextlib.ExitStack()

    def body(engine, index):
        if index == 2:
            current[:] = [engine]
            within.enter_context(collecting(lambda: look(current[0]), threshold))
        current[:] = [engine]
        return mean(engine, index)

    sys.unraisablehook = void
    with within:
        return loop(run, body=body)


@odd("finalizers that the collector runs read the norm of a weight, the collector comes all the time", TWO)
def finalizer_reads(run):
    return collected(run, lambda e: e.module.blocks[1].up.weight.norm().item())


@odd("finalizers that the collector runs write the head's bias to a file of state dicts")
def finalizer_saves(run):
    return collected(run, lambda e: torch.save(e.module.last.state_dict(), io.BytesIO()))


@odd("finalizers that the collector runs read gradients and states of the optimizer")
def finalizer_reads_states(run):
    def look(engine):
        for parameter in engine.module.last.parameters():
            _ = parameter.grad
            _ = engine.optimizer.state.get(parameter)

    return collected(run, look)


@odd("finalizers that the collector runs evaluate the model", ("plain",))
def finalizer_evaluates(run):
    def look(engine):
        with torch.no_grad():
            engine.module(batch(50))

    return collected(run, look, 2000)


@odd("`gc.collect()` in each forward hook, each tensor hook and before each step; the collector is off in between", TWO)
def collected_by_hand(run):
    def collect(gradient):
        gc.collect()

    gc.disable()
    net = Net()
    for block in net.blocks:
        block.register_forward_hook(lambda m, a, out: void(out.register_hook(collect)))
    found = loop(run, lambda: net, body=mean, before=lambda e, s: gc.collect() >= 0)
    gc.enable()
    return found


@odd("objects are frozen by `gc.freeze()`, and unfrozen, between steps; referrers of weights are counted")
def collector_frozen(run):
    def after(engine, step):
        gc.freeze()
        _ = len(gc.get_referrers(engine.module.first.weight))
        gc.unfreeze()

    return loop(run, body=mean, after=after)


@odd("a `weakref.finalize` of each output writes to a list; the count is that of outputs", TWO)
def finalized_outputs(run):
    gone = []

    def body(engine, index):
        out = engine(batch(index))
        weakref.finalize(out, gone.append, index)
        return out.square().mean()

    found = loop(run, body=body)
    return found, sorted(gone)


@odd("a module of the model has a `__del__` that reads its weight; the block is taken out between steps")
def module_with_del(run):
    seen = []

    class Dying(Block):
        def __del__(self):
            if "up" in self._modules:
                seen.append(self.up.weight.shape[0])

    def after(engine, step):
        if step == 1:
            del engine.module.blocks[-1]
            gc.collect()

    return loop(run, lambda: Net(Dying), body=mean, after=after, each=1)


# Tracers.


@odd("`sys.settrace` with a tracer that reads a weight at each call of a function of the program's", TWO)
def traced(run):
    current, seen = [], []

    def tracer(frame, event, argument):
        if current and frame.f_code.co_name == "forward" and frame.f_code.co_filename == __file__:
            seen.append(current[0].module.last.weight.detach().norm().item())
        return None

    class Own(Block):
        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x)))

    def body(engine, index):
        current[:] = [engine]
        sys.settrace(tracer)
        try:
            return mean(engine, index)
        finally:
            sys.settrace(None)

    return loop(run, lambda: Net(Own), body=body), len(seen) > 0


@odd("`sys.settrace` steps through lines of a block's forward and reads `frame.f_locals` and its own weight", TWO)
def traced_lines(run):
    seen = []

    def lines(frame, event, argument):
        block = frame.f_locals.get("self")
        if isinstance(block, nn.Module) and event == "line":
            seen.append(block.up.weight.detach().sum().item())
        return lines

    def tracer(frame, event, argument):
        return lines if frame.f_code.co_name == "forward" and frame.f_code.co_filename == __file__ else None

    class Own(Block):
        def forward(self, x):
            h = self.up(x)
            h = torch.tanh(h)
            return x + self.down(h)

    def body(engine, index):
        sys.settrace(tracer)
        try:
            return mean(engine, index)
        finally:
            sys.settrace(None)

    return loop(run, lambda: Net(Own), body=body), len(seen) > 0


@odd("`sys.setprofile` counts calls of the program's functions around forward, backward and step", TWO)
def profiled_calls(run):
    seen = []

    def profile(frame, event, argument):
        if event == "call" and frame.f_code.co_filename == __file__ and frame.f_code.co_name == "counted":
            seen.append(1)

    class Own(Block):
        def counted(self, x):
            return self.up(x)

        def forward(self, x):
            return x + self.down(torch.tanh(self.counted(x)))

    sys.setprofile(profile)
    threading.setprofile(profile)
    try:
        return loop(run, lambda: Net(Own), body=mean)
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


@odd("a tracer that raises in the middle of a forward, once; the batch is tried again")
def tracer_raises(run):
    class Own(Block):
        def forward(self, x):
            return x + self.down(torch.tanh(self.up(x)))

    calls = []

    def tracer(frame, event, argument):
        if frame.f_code.co_name == "forward" and frame.f_code.co_filename == __file__:
            calls.append(1)
            if len(calls) == 3:
                raise ValueError("a breakpoint")
        return None

    def body(engine, index):
        if index == 1:
            sys.settrace(tracer)
            with contextlib.suppress(ValueError):
                engine(batch(index))
            sys.settrace(None)
        return mean(engine, index)

    return loop(run, lambda: Net(Own), body=body)


@odd("`tracemalloc` is on, snapshots between steps; `sys.setswitchinterval(1e-6)`", TWO)
def tracemalloc_on(run):
    tracemalloc.start(5)
    sys.setswitchinterval(1e-6)
    try:
        return loop(run, body=mean, after=lambda e, s: len(tracemalloc.take_snapshot().traces) > 0)
    finally:
        tracemalloc.stop()
        sys.setswitchinterval(0.005)


@odd("all warnings are errors in the whole loop: `simplefilter('error')`", ("plain", "mixed", "together", "resumed"))
def warnings_are_errors(run):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return loop(run, body=mean)


@odd("all warnings are errors: bf16 autocast, a deep copy, a state dict, an evaluation")
def warnings_are_errors_in_more(run):
    import copy

    def body(engine, index):
        with torch.autocast("cpu", torch.bfloat16):
            return mean(engine, index)

    def after(engine, step):
        copied = copy.deepcopy(engine.module)
        engine.module.load_state_dict(copied.state_dict())
        engine.module.eval()
        with torch.inference_mode():
            found = engine.module(batch(77)).sum().item()
        engine.module.train()
        return found, [torch.equal(a, b) for a, b in zip(copied.parameters(), engine.module.parameters(), strict=True)]

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return loop(run, body=body, after=after)


@odd("`warnings.showwarning` is replaced by one that reads all weights, and the loop warns in each hook", TWO)
def warning_looks(run):
    current, seen = [], []

    def show(*arguments, **keywords):
        if current:
            seen.append(sum(p.detach().abs().sum().item() for p in current[0].module.parameters()))

    net = Net()
    net.blocks[1].register_forward_hook(lambda *a: warnings.warn("here", stacklevel=1))

    def body(engine, index):
        current[:] = [engine]
        return mean(engine, index)

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = show
        found = loop(run, lambda: net, body=body)
    return found, len(seen) > 0


@odd("a `logging.Handler` at the root, at level DEBUG, reads weights at each record, of whatever logger", TWO)
def log_handler_looks(run):
    current, inside = [], []

    class Looking(logging.Handler):
        def emit(self, record):
            if current and not inside:
                inside.append(1)
                try:
                    current[0].module.blocks[0].up.weight.norm().item()
                    current[0].optimizer.state_dict()
                finally:
                    inside.clear()

    handler = Looking(level=0)
    logging.getLogger().addHandler(handler)
    level = logging.getLogger().level
    logging.getLogger().setLevel(0)
    logging.getLogger("offload").setLevel(1)

    def body(engine, index):
        current[:] = [engine]
        logging.getLogger("mine").debug("forward %d", index)
        return mean(engine, index)

    try:
        return loop(run, body=body)
    finally:
        logging.getLogger().removeHandler(handler)
        logging.getLogger().setLevel(level)


@odd("`sys.stdout` and `sys.stderr` are closed, and replaced by ones that raise, in the whole run")
def closed_output(run):
    class Broken(io.TextIOBase):
        def write(self, text):
            raise OSError("no terminal")

    before = sys.stdout, sys.stderr
    sys.stdout = sys.stderr = Broken()
    try:
        return loop(run, body=mean)
    finally:
        sys.stdout, sys.stderr = before


@odd("the recursion limit is almost reached where the model is called, and where it is trained", TWO)
def deep_recursion(run):
    def deep(depth, call):
        return call() if depth == 0 else deep(depth - 1, call)

    def body(engine, index):
        return deep(800, lambda: mean(engine, index))

    return loop(run, body=body)


@odd("recursion runs out in the middle of a forward (`RecursionError`), is caught, and the batch is tried again", TWO)
def recursion_runs_out(run):
    class Recursive(Block):
        bad = False

        def again(self, x):
            return self.again(x) + self.up(x)

        def forward(self, x):
            if Recursive.bad:
                Recursive.bad = False
                return self.again(x)
            return super().forward(x)

    def body(engine, index):
        if index % 2:
            Recursive.bad = True
            with contextlib.suppress(RecursionError):
                engine(batch(index))
            Recursive.bad = False
        return mean(engine, index)

    return loop(run, lambda: Net(Recursive), body=body)


# Modes that look.


@odd("a `TorchDispatchMode` reads a weight of the model at each operation of forward and backward", TWO)
def dispatch_mode_reads(run):
    current, inside = [], []

    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if current and not inside:
                inside.append(1)
                try:
                    current[0].module.first.weight.detach().norm().item()
                finally:
                    inside.clear()
            return function(*args, **(kwargs or {}))

    def body(engine, index):
        current[:] = [engine]
        with Looking():
            return mean(engine, index)

    return loop(run, body=body)


@odd("a `TorchFunctionMode` evaluates the next block at each product of a block", TWO)
def function_mode_evaluates(run):
    current, inside, seen = [], [], []

    class Looking(TorchFunctionMode):
        def __torch_function__(self, function, types, args=(), kwargs=None):
            if function is F.linear and current and not inside:
                inside.append(1)
                try:
                    with torch.no_grad():
                        seen.append(current[0].module.blocks[3](batch(5)).sum().item())
                finally:
                    inside.clear()
            return function(*args, **(kwargs or {}))

    def body(engine, index):
        current[:] = [engine]
        with Looking():
            return mean(engine, index)

    return loop(run, body=body)


@odd("a `TorchDispatchMode` that raises at the tenth operation of a backward, once; the batch is tried again", TWO)
def dispatch_mode_raises(run):
    class Raising(TorchDispatchMode):
        left = 10

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.left -= 1
            if self.left == 0:
                raise MemoryError("simulated")
            return function(*args, **(kwargs or {}))

    def body(engine, index):
        if index % 2:
            loss = mean(engine, index)
            with contextlib.suppress(MemoryError), Raising():
                loss.backward()
            engine.optimizer.zero_grad()
        return mean(engine, index)

    return loop(run, body=body)


@odd("a `TorchDispatchMode` that raises at each of the first forty operations of a forward, in turn", TWO)
def dispatch_mode_raises_everywhere(run):
    class Raising(TorchDispatchMode):
        def __init__(self, left):
            super().__init__()
            self.left = left

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.left -= 1
            if self.left == 0:
                raise MemoryError("simulated")
            return function(*args, **(kwargs or {}))

    def body(engine, index):
        for place in range(1, 40):
            with contextlib.suppress(MemoryError), Raising(place):
                mean(engine, index)
        return mean(engine, index)

    return loop(run, body=body, steps=2)


@odd(
    "operations raise in a step that is written by hand: `MemoryError` between two weights, gradients stay, step again"
)
def step_raises_by_mode(run):
    class Raising(TorchDispatchMode):
        left = 6

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.left -= 1
            if self.left == 0:
                raise MemoryError("simulated")
            return function(*args, **(kwargs or {}))

    torch.manual_seed(5)
    engine = run.engine(Net())
    found = []
    for step in range(3):
        mean(engine, step).backward()
        kept = gradients(engine.module)
        with contextlib.suppress(MemoryError), Raising(), torch.no_grad():
            for parameter in engine.module.parameters():
                parameter.sub_(0.01 * parameter.grad)
        found.append(values(engine.module))
        for name, parameter in engine.module.named_parameters():
            parameter.grad = kept[name]
        engine.optimizer.step()
        engine.optimizer.zero_grad()
    return found, values(engine.module)


# Callbacks of autograd.


@odd("`queue_callback` in a hook: at the end of the backward all gradients are scaled, as DDP's reducer would", TWO)
def queued_callback(run):
    net = Net()
    current = []

    def finish():
        for parameter in current[0].module.parameters():
            if parameter.grad is not None:
                parameter.grad.mul_(0.5)

    def body(engine, index):
        current[:] = [engine]
        out = engine(batch(index))
        out.register_hook(lambda g: torch.autograd.Variable._execution_engine.queue_callback(finish))
        return out.square().mean()

    return loop(run, lambda: net, body=body, each=1)


@odd("`queue_callback` in a hook: the step is taken at the end of the backward, within it")
def queued_step(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    found = []

    def finish():
        found.append(gradients(engine.module))
        engine.optimizer.step()
        engine.optimizer.zero_grad()

    for index in range(3):
        out = engine(batch(index))
        out.register_hook(lambda g: torch.autograd.Variable._execution_engine.queue_callback(finish))
        loss = out.square().mean()
        loss.backward()
        found.append(loss.item())
    return found, values(engine.module)


@odd("`queue_callback` of a callback that raises: gradients are there, and training goes on")
def queued_raises(run):
    def finish():
        raise KeyError("late")

    def body(engine, index):
        if index % 2:
            out = engine(batch(index + 10))
            out.register_hook(lambda g: torch.autograd.Variable._execution_engine.queue_callback(finish))
            with contextlib.suppress(KeyError):
                out.square().mean().backward()
            engine.optimizer.zero_grad()
        return mean(engine, index)

    return loop(run, body=body, each=1)


@odd("`register_prehook` on nodes of blocks' outputs scales the gradient that comes in", TWO)
def node_prehooks(run):
    net = Net()
    for block in net.blocks:

        def hook(module, args, out):
            out.grad_fn.register_prehook(lambda grads: tuple(g * 0.9 for g in grads))

        block.register_forward_hook(hook)
    return loop(run, lambda: net, body=mean)


@odd("`register_hook` on nodes counts gradients of inputs, and replaces one", TWO)
def node_hooks(run):
    seen = []

    def body(engine, index):
        out = engine(batch(index))

        def hook(grad_inputs, grad_outputs):
            seen.append(len(grad_inputs))
            return tuple(None if g is None else g * 2 for g in grad_inputs)

        loss = out.square().mean()
        loss.grad_fn.register_hook(hook)
        return loss

    return loop(run, body=body), seen


@odd("`register_multi_grad_hook(mode='any')` over weights of two blocks, and `mode='all'` over activations", TWO)
def multi_grad_hooks(run):
    seen = []

    def body(engine, index):
        kept = []
        hooks = [b.register_forward_hook(lambda m, a, out: kept.append(out)) for b in engine.module.blocks]
        loss = mean(engine, index)
        for hook in hooks:
            hook.remove()
        torch.autograd.graph.register_multi_grad_hook(kept, lambda grads: seen.append([g.norm().item() for g in grads]))
        torch.autograd.graph.register_multi_grad_hook(kept, lambda grad: seen.append(grad.sum().item()), mode="any")
        return loss

    return loop(run, body=body), seen


@odd("`register_multi_grad_hook(mode='any')` over all parameters: it runs once, at the first gradient")
def multi_grad_any(run):
    seen = []
    torch.manual_seed(5)
    engine = run.engine(Net())
    handle = torch.autograd.graph.register_multi_grad_hook(
        list(engine.module.parameters()), lambda g: seen.append(1), mode="any"
    )
    found = []
    for index in range(3):
        mean(engine, index).backward()
        found.append(stepped(engine))
    handle.remove()
    return found, seen


@odd(
    "`increment_version` of a weight between forward and backward: PyTorch raises; then training goes on",
    differs={"plain": "`increment_version` outside of a forward tells the engine nothing"},
)
def version_incremented(run):
    def body(engine, index):
        if index == 1:
            loss = mean(engine, 30)
            torch.autograd.graph.increment_version(engine.module.blocks[1].up.weight)
            raised = run.place.attempt(loss.backward)
            engine.optimizer.zero_grad()
            return mean(engine, index) * len(raised)
        return mean(engine, index)

    return loop(run, body=body, each=1)


@odd("`_unsafe_preserve_version_counter` around a write to a weight between forward and backward")
def version_preserved(run):
    def body(engine, index):
        loss = mean(engine, index)
        bias = engine.module.blocks[1].up.bias
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(bias):
            bias.add_(0.1)
        return loss

    return loop(run, body=body)


@odd("`torch.autograd.graph.set_warn_on_accumulate_grad_stream_mismatch`, `set_multithreading_enabled` in hooks", TWO)
def settings_in_hooks(run):
    net = Net()
    net.blocks[2].register_full_backward_hook(lambda m, i, o: torch.autograd.set_multithreading_enabled(False) and None)
    return loop(run, lambda: net, body=mean)


@odd("hooks turn grad mode off and on again within a backward, and compute with weights there", TWO)
def grad_mode_in_hooks(run):
    seen = []

    def body(engine, index):
        out = engine(batch(index))

        def hook(gradient):
            with torch.enable_grad():
                loss = (engine.module.last.weight * 2).sum()
                seen.append(loss.requires_grad)
            return gradient * 1.5

        out.register_hook(hook)
        return out.square().mean()

    return loop(run, body=body), seen


@odd("a whole forward and backward of the same model within a hook of its own backward (nested training)", TWO)
def nested_in_hook(run):
    def body(engine, index):
        out = engine(batch(index))

        def hook(gradient):
            mean(engine, index + 40).backward()

        out.register_hook(hook)
        return out.square().mean()

    return loop(run, body=body, each=1)


@odd("an evaluation of the whole model within a hook in the middle of its own backward scales the gradient", TWO)
def evaluated_in_hook(run):
    net = Net()

    def hook(module, grad_input, grad_output):
        with torch.no_grad():
            scale = torch.sigmoid(net(batch(60)).mean())
        return tuple(g * scale for g in grad_input)

    net.blocks[2].register_full_backward_hook(hook)
    return loop(run, lambda: net, body=mean)


@odd("a state dict is loaded in a hook at the end of a backward (queue_callback), before the step")
def loaded_in_callback(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    kept = {n: v.clone() for n, v in engine.module.state_dict().items()}
    found = []
    for index in range(3):
        out = engine(batch(index))
        out.register_hook(
            lambda g: torch.autograd.Variable._execution_engine.queue_callback(
                lambda: engine.module.load_state_dict(kept)
            )
        )
        out.square().mean().backward()
        found.append(stepped(engine))
    return found, values(engine.module)


# Threads at odd hours.


@odd(
    "a frozen lower half encodes the next batch in a worker thread while the upper half trains (a pipeline of loaders)",
    refused={"plain": "give each thread its turn"},
)
def frozen_half_in_thread(run):
    from concurrent.futures import ThreadPoolExecutor

    torch.manual_seed(5)
    net = Net()
    net.first.requires_grad_(False)
    net.blocks[:3].requires_grad_(False)
    engine = run.engine(net)

    def encode(index):
        with torch.no_grad():
            x = net.first(batch(index))
            for block in net.blocks[:3]:
                x = block(x)
        return x

    found = []
    with ThreadPoolExecutor(1) as pool:
        after = pool.submit(encode, 0)
        for index in range(8):
            x = after.result()
            after = pool.submit(encode, index + 1)
            for block in net.blocks[3:]:
                x = block(x)
            loss = net.last(x).square().mean()
            loss.backward()
            found.append((loss.item(), stepped(engine)))
        after.result()
    return found, values(net)


@odd("two threads go backward at once from two heads of one trunk's output, each into its own graph's part")
def two_backwards_at_once(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    found = []
    for index in range(4):
        trunk = engine.module(batch(index))
        leaf = trunk.detach().requires_grad_()
        gradient = [None, None]

        def back(which, leaf=leaf, gradient=gradient):
            loss = (leaf * (which + 1)).tanh().square().mean()
            (gradient[which],) = torch.autograd.grad(loss, leaf)

        threads = [threading.Thread(target=back, args=(which,)) for which in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        trunk.backward(gradient[0] + gradient[1])
        found.append(stepped(engine))
    return found, values(engine.module)


@odd("each block is called by another thread of a pool, the graph goes through all of them, backward in a fifth", TWO)
def blocks_in_threads(run):
    from concurrent.futures import ThreadPoolExecutor

    pools = [ThreadPoolExecutor(1) for _ in range(6)]

    def body(engine, index):
        x = engine.module.first(batch(index))
        for pool, block in zip(pools, engine.module.blocks, strict=False):
            x = pool.submit(block, x).result()
        return engine.module.last(x).square().mean()

    try:
        return loop(run, body=body)
    finally:
        for pool in pools:
            pool.shutdown()


@odd("the step is taken by a thread while the main thread waits in a forward hook for it")
def step_in_hook_by_thread(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    found = []
    mean(engine, 0).backward()
    turns = []

    def hook(module, args):
        if turns:
            turns.clear()
            thread = threading.Thread(target=lambda: found.append(stepped(engine)))
            thread.start()
            thread.join(20)
            assert not thread.is_alive() or run.place.has_engine
            if thread.is_alive():
                raise ValueError("it hangs")

    engine.module.register_forward_pre_hook(hook)
    for index in range(1, 4):
        turns.append(1)
        mean(engine, index).backward()
    return found, values(engine.module)


@odd("a thread of the program's own reads all weights in an endless loop, as a daemon, until the program ends")
def daemon_reads(run):
    torch.manual_seed(5)
    engine = run.engine(Net())
    over = threading.Event()

    def read():
        while not over.is_set():
            for parameter in engine.module.parameters():
                parameter.detach().sum().item()

    thread = threading.Thread(target=read, daemon=True)
    thread.start()
    found = []
    for index in range(6):
        loss = mean(engine, index)
        loss.backward()
        found.append((loss.item(), stepped(engine)))
    over.set()
    thread.join()
    return found, values(engine.module)


@odd("a `threading.Timer` changes the rate between two steps; the loop waits for it")
def timer_changes_rate(run):
    def after(engine, step):
        timer = threading.Timer(0.001, lambda: engine.optimizer.param_groups[0].update(lr=0.01 * (step + 1)))
        timer.start()
        timer.join()

    return loop(run, body=mean, after=after)


@odd("an asyncio loop: `asyncio.wait_for` cancels a task between two blocks, and the batch is tried again", TWO)
def asyncio_cancelled(run):
    import asyncio

    async def forward(engine, index, slow):
        x = engine.module.first(batch(index))
        for number, block in enumerate(engine.module.blocks):
            x = block(x)
            await asyncio.sleep(0 if not slow or number < 2 else 5)
        return engine.module.last(x).square().mean()

    def body(engine, index):
        async def both():
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(forward(engine, index, True), 0.02)
            return await forward(engine, index, False)

        return asyncio.run(both())

    return loop(run, body=body)


@odd("asyncio: two forwards of one model are interleaved block by block by `gather`, losses in one backward", TWO)
def asyncio_interleaved(run):
    import asyncio

    async def forward(engine, index):
        x = engine.module.first(batch(index))
        for block in engine.module.blocks:
            x = block(x)
            await asyncio.sleep(0)
        return engine.module.last(x).square().mean()

    def body(engine, index):
        async def both():
            return await asyncio.gather(forward(engine, index), forward(engine, index + 20))

        one, other = asyncio.run(both())
        return one + other

    return loop(run, body=body)


@odd("a barrier: four threads evaluate through one engine, each in its turn, their outputs are the targets", TWO)
def barrier_of_evaluations(run):
    def body(engine, index):
        barrier, lock, outs = threading.Barrier(4), threading.Lock(), {}

        def evaluate(which):
            barrier.wait()
            with lock, torch.no_grad():
                outs[which] = engine(batch(index + 10 * which))

        threads = [threading.Thread(target=evaluate, args=(which,)) for which in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return F.mse_loss(engine(batch(index)), sum(outs[which] for which in range(4)))

    return loop(run, body=body)


@odd("the interpreter's lock is given up in a forward by `time.sleep(0)`, while a thread counts in Python", TWO)
def busy_thread(run):
    over = []

    def count():
        number = 0
        while not over:
            number += 1

    class Sleepy(Block):
        def forward(self, x):
            time.sleep(0)
            return super().forward(x)

    thread = threading.Thread(target=count, daemon=True)
    thread.start()
    try:
        return loop(run, lambda: Net(Sleepy), body=mean)
    finally:
        over.append(1)
        thread.join()


@odd("weak keys: `WeakTensorKeyDictionary` and `WeakIdKeyDictionary` keyed by parameters", TWO)
def weak_keys(run):
    from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

    torch.manual_seed(5)
    engine = run.engine(Net())
    by_tensor, by_id = WeakTensorKeyDictionary(), WeakIdKeyDictionary()
    for number, parameter in enumerate(engine.module.parameters()):
        by_tensor[parameter] = by_id[parameter] = 1 + number / WIDTH
    found = []
    for index in range(3):
        mean(engine, index).backward()
        for parameter in engine.module.parameters():
            parameter.grad.mul_(by_tensor[parameter]).add_(by_id[parameter] * 1e-3)
        gc.collect()
        found.append((len(by_tensor), len(by_id), stepped(engine)))
    return found, values(engine.module)
