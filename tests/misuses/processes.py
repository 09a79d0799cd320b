"""Other processes: data loaders, forks, and the wrappers of torch's distributed packages."""

import atexit
import builtins
import ctypes
import gc
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist
from tiny import loss_of
from torch import nn
from torch.utils.data import DataLoader, Dataset

from misuses.case import Family
from misuses.place import ADAMW, data, losses, small, train, values
from offload.ranks import heartbeat

family = Family("processes", preload=("torch.distributed", "torch.distributed.fsdp", "torch.nn.parallel"))


class Batches(Dataset):
    """Batches as ``data`` gives them."""

    def __init__(self, count=4):
        self.batches = data(count)

    def __len__(self):
        return len(self.batches)

    def __getitem__(self, index):
        return self.batches[index]


def _group(place, world=1, rank=0):
    os.environ.update(MASTER_ADDR="127.0.0.1", GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{place.folder}/rendezvous", world_size=world, rank=rank)


def _loader(workers, context, **options):
    return DataLoader(Batches(), batch_size=None, num_workers=workers, multiprocessing_context=context, **options)


@family.works("a `DataLoader` with two forked workers, made before wrapping")
def loader_before(place):
    loader = _loader(2, "fork")
    engine = place.small()
    for tokens, targets in loader:
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
    return values(engine.module)


@family.works("a `DataLoader` with two forked workers, iterated while the engine trains, twice")
def loader_forked(place):
    engine = place.small()
    for _ in range(2):
        for tokens, targets in _loader(2, "fork"):
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
    return values(engine.module)


@family.works("a `DataLoader` with `persistent_workers=True`")
def loader_persistent(place):
    engine = place.small()
    loader = _loader(2, "fork", persistent_workers=True)
    for _ in range(2):
        for tokens, targets in loader:
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
    return values(engine.module)


@family.works("the engine is closed while a loader's workers still run")
def loader_outlives_engine(place):
    engine = place.small()
    iterator = iter(_loader(2, "fork", persistent_workers=True))
    tokens, targets = next(iterator)
    engine.backward(loss_of(engine(tokens), targets))
    engine.step()
    found = values(engine.module)
    engine.close()
    return found, [t.sum() for t, _ in iterator]


@family.works("`pin_memory=True`")
def loader_pinned(place):
    import warnings

    engine = place.small()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for tokens, targets in DataLoader(Batches(), batch_size=None, pin_memory=True):
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
    return values(engine.module)


class _UsesModel(Dataset):
    """A dataset that runs the model in the worker."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 2

    def __getitem__(self, index):
        with torch.no_grad():
            return self.model(data(1)[0][0]).sum()


@family.works_or_refused("a forked worker runs the model: an error in the worker, not a hang", "process", seconds=90)
def loader_runs_model(place):
    torch.set_num_threads(1)
    engine = place.small()
    try:
        return list(DataLoader(_UsesModel(engine.module), batch_size=None, num_workers=1, timeout=30))
    except Exception as error:
        raise _as_ours(error) from error


class _KnowsModel(Dataset):
    """A dataset that refers to the model and does not use it."""

    def __init__(self, model):
        self.model = model

    def __len__(self):
        return 2

    def __getitem__(self, index):
        return data(1)[0]


@family.works("a dataset that refers to the model and does not use it, in forked workers")
def loader_refers_to_model(place):
    engine = place.small()
    for tokens, targets in DataLoader(_KnowsModel(engine.module), batch_size=None, num_workers=2):
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
    return values(engine.module)


def _as_ours(error):
    """An error that came from a child as text, as the engine's if it is that."""
    from swapper import OffloadError

    text = str(error)
    if "OffloadError" in text or "ConfigError" in text:
        at = max(text.rfind("OffloadError"), text.rfind("ConfigError"))
        return OffloadError(text[at:])
    return error


def _in_fork(call, seconds=15):
    """What ``call`` gives in a forked child; its exception is raised here."""
    to_read, to_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            try:
                answer = repr(call())
            except BaseException as error:
                answer = f"raises {type(error).__name__}: {error}"
            os.write(to_write, answer.encode()[:60000])
        finally:
            os._exit(0)
    os.close(to_write)
    stop = time.monotonic() + seconds
    while time.monotonic() < stop:
        found, status = os.waitpid(pid, os.WNOHANG)
        if found:
            break
        time.sleep(0.02)
    else:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
        raise AssertionError(f"the child hangs: not done after {seconds} s")
    if os.WIFSIGNALED(status):
        raise AssertionError(f"the child was killed by signal {os.WTERMSIG(status)}")
    with os.fdopen(to_read, "rb") as pipe:
        answer = pipe.read().decode()
    if answer.startswith("raises "):
        raise _as_ours(RuntimeError(answer.removeprefix("raises ")))
    return answer


@family.works_or_refused("`os.fork()`: the child reads a weight", "process")
def fork_reads_weight(place):
    engine = place.small()
    train(engine, 1)
    return _in_fork(lambda: round(engine.module.blocks[5].up.weight.sum().item(), 3))


@family.works_or_refused("`os.fork()`: the child calls the model", "process")
def fork_calls_model(place):
    engine = place.small()
    train(engine, 1)

    def child():
        with torch.no_grad():
            return round(engine(data(1)[0][0]).sum().item(), 2)

    return _in_fork(child)


@family.works_or_refused("`os.fork()`: the child trains", "process")
def fork_trains(place):
    engine = place.small()
    train(engine, 1)
    return _in_fork(lambda: [round(loss, 3) for loss in train(engine, 1)])


@family.works_or_refused("`os.fork()`: the child takes the state dict", "process")
def fork_takes_state_dict(place):
    engine = place.small()
    train(engine, 1)
    return _in_fork(lambda: sorted(engine.state_dict()))


@family.works("`os.fork()`: the child closes the engine, and the parent trains on", seconds=90)
def fork_closes(place):
    engine = place.small()
    train(engine, 1)
    _in_fork(lambda: place.attempt(engine.close))
    place.messages.clear()
    return train(engine, 2), values(engine.module)


@family.works("`os.fork()`: the child drops the engine, and the parent trains on", seconds=90)
def fork_drops(place):
    engine = place.small()
    train(engine, 1)
    pid = os.fork()
    if pid == 0:
        try:
            place.left.clear()
            del engine
            gc.collect()
            time.sleep(0.2)
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return train(engine, 2), values(engine.module)


@family.works(
    "`os.fork()`: the child ends by `sys.exit` with all its `atexit` calls, and the parent trains on", seconds=90
)
def fork_exits(place):
    engine = place.small()
    train(engine, 1)
    pid = os.fork()
    if pid == 0:
        try:
            atexit._run_exitfuncs()
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    return train(engine, 2), values(engine.module)


@family.works("`subprocess.run` while the engine trains")
def subprocess_beside(place):
    engine = place.small()
    train(engine, 1)
    found = subprocess.run([sys.executable, "-c", "print(1)"], capture_output=True, text=True, check=True).stdout
    return found, train(engine, 1), values(engine.module)


def _target(model, queue):
    try:
        queue.put(("weights", {name: p.detach().sum().item() for name, p in model.named_parameters()}))
    except Exception as error:
        queue.put(("error", f"{type(error).__name__}: {error}"))


def _in_process(context, model):
    context = multiprocessing.get_context(context)
    queue = context.Queue()
    process = context.Process(target=_target, args=(model, queue))
    process.start()
    kind, found = queue.get(timeout=40)
    process.join(10)
    if kind == "error":
        raise _as_ours(RuntimeError(found))
    return found


@family.works_or_refused("`multiprocessing` by fork: the model is an argument", "process", seconds=90)
def multiprocessing_fork(place):
    engine = place.small()
    train(engine, 1)
    return _in_process("fork", engine.module)


@family.works_or_refused("`multiprocessing` by spawn: the model is pickled into the child", "process", seconds=120)
def multiprocessing_spawn(place):
    engine = place.small()
    train(engine, 1)
    return _in_process("spawn", engine.module)


@family.works_or_refused(
    "`torch.multiprocessing` by spawn: the model is shared with the child", "address|process", seconds=120
)
def torch_multiprocessing_spawn(place):
    import torch.multiprocessing as mp

    engine = place.small()
    train(engine, 1)
    context = mp.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=_target, args=(engine.module, queue))
    process.start()
    kind, found = queue.get(timeout=40)
    process.join(10)
    if kind == "error":
        raise _as_ours(RuntimeError(found))
    return found


@family.works_or_refused("a parameter in a `multiprocessing.Queue` of torch's", "address|process", seconds=60)
def parameter_in_queue(place):
    import torch.multiprocessing as mp

    engine = place.small()
    queue = mp.get_context("fork").SimpleQueue()
    queue.put(engine.module.head.bias.detach())
    return queue.get()


# Wrappers of torch's


@family.works_or_refused("`nn.DataParallel(model)` on the CPU", "process|DataParallel")
def data_parallel(place):
    engine = place.small()
    model = nn.DataParallel(engine.module)
    found = []
    for loss in losses(engine, 2, model):
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        found.append(loss.item())
    return found, values(engine.module)


@family.works_or_refused(
    "`DistributedDataParallel(model)` in a group of one process", "process|Distributed", seconds=60
)
def ddp(place):
    _group(place)
    engine = place.small()
    model = nn.parallel.DistributedDataParallel(engine.module)
    found = []
    for loss in losses(engine, 2, model):
        engine.optimizer.zero_grad()
        loss.backward()
        engine.optimizer.step()
        found.append(loss.item())
    return found, values(engine.module)


@family.works_or_refused(
    "`DistributedDataParallel` before wrapping, in a group of one process", "process|Distributed|take clones"
)
def ddp_before(place):
    _group(place)
    model = nn.parallel.DistributedDataParallel(small())
    engine = place.wrap(model)
    return train(engine, 2), values(model)


@family.works_or_refused("`fully_shard(model)` after wrapping, in a group of one process", "engine")
def fully_shard_after(place):
    from torch.distributed.fsdp import fully_shard

    _group(place)
    engine = place.small()
    if place.has_engine:
        fully_shard(engine.module)
    return train(engine, 2), values(engine.module)


@family.works_or_refused(
    "`fully_shard(model)` before wrapping, in a group of one process", "process|fully_shard|DTensor"
)
def fully_shard_before(place):
    from torch.distributed.fsdp import fully_shard

    _group(place)
    model = small()
    if place.has_engine:
        fully_shard(model)
    engine = place.wrap(model)
    return train(engine, 2), values(model)


@family.works_or_refused("`FullyShardedDataParallel(model)` after wrapping", "process|[Ss]hard|address")
def fsdp_after(place):
    from torch.distributed.fsdp import FullyShardedDataParallel

    _group(place)
    engine = place.small()
    if not place.has_engine:
        return train(engine, 2)
    model = FullyShardedDataParallel(engine.module, device_id=torch.device("cpu"), use_orig_params=True)
    return [loss.item() for loss in losses(engine, 2, model)]


@family.works_or_refused("`ZeroRedundancyOptimizer(model.parameters(), AdamW)` after wrapping", r"engine\.optimizer")
def zero_redundancy(place):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    _group(place)
    engine = place.small()
    optimizer = ZeroRedundancyOptimizer(engine.module.parameters(), torch.optim.AdamW, **ADAMW)
    for loss in losses(engine, 2):
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return values(engine.module)


@family.works("a process group of one process is there, and nothing is made of it")
def group_of_one(place):
    _group(place)
    engine = place.small()
    return train(engine, 2), values(engine.module)


@family.refused(
    "a process group of two, of which one makes no engine: the other waits for half an hour", "ranks have come"
)
def group_of_two(place):
    """Here it waits for some seconds."""
    heartbeat.PATIENCE_S = 5.0
    to_read, to_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _group(place, 2, 1)
            os.close(to_write)
            os.read(to_read, 1)
        finally:
            os._exit(0)
    _group(place, 2, 0)
    try:
        engine = place.small()
        return train(engine, 1)
    finally:
        os.close(to_write)
        os.waitpid(pid, 0)


@family.works_or_refused("a process group of two processes that is made after wrapping", "process", seconds=90)
def group_of_two_after(place):
    engine = place.small()
    to_read, to_write = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            _group(place, 2, 1)
            os.close(to_write)
            os.read(to_read, 1)
        finally:
            os._exit(0)
    _group(place, 2, 0)
    try:
        return train(engine, 1)
    finally:
        os.close(to_write)
        os.waitpid(pid, 0)


@family.works("`WORLD_SIZE=1` in the environment, as `torchrun` sets it")
def environment_of_one(place):
    os.environ.update(WORLD_SIZE="1", RANK="0", LOCAL_RANK="0")
    engine = place.small()
    return train(engine, 1)


@family.works("`dist.all_reduce(p.grad)` in a group of one process")
def all_reduce_gradients(place):
    _group(place)
    engine = place.small()
    for loss in losses(engine, 2):
        engine.optimizer.zero_grad()
        loss.backward()
        for p in engine.module.parameters():
            dist.all_reduce(p.grad)
            p.grad.div_(1)
        engine.optimizer.step()
    return values(engine.module)


@family.works("`dist.broadcast(p.data, 0)` in a group of one process")
def broadcast_weights(place):
    _group(place)
    engine = place.small()
    for p in engine.module.parameters():
        dist.broadcast(p.data, 0)
    return train(engine, 2), values(engine.module)


@family.works("a program that forgets `close()` ends by itself, without a word", seconds=90)
def close_forgotten(place):
    options = {"nvme_path": str(place.folder)} if place.name == "nvme" else {}
    program = f"""
import torch
from offload import OffloadEngine
model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(16)))
engine = OffloadEngine(model, precision="fp32", **{options!r})
engine.backward(engine(torch.ones(2, 64)).mean())
engine.step()
print("done")
"""
    if not place.has_engine:
        program = "print('done')"
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=80, check=False)
    return found.returncode, found.stdout, found.stderr.splitlines()[-1:]


def _program(place, body):
    """Exit status, output and last line of the errors of a process that runs ``body`` and ends as Python ends."""
    output, errors = place.folder / "stdout", place.folder / "stderr"
    pid = os.fork()
    if pid == 0:
        for number, path in ((1, output), (2, errors)):
            os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600), number)
        status = 0
        try:
            body(place)
        except SystemExit as leaving:
            status = leaving.code
        except BaseException:
            traceback.print_exc()
            status = 1
        place.left.clear()
        ctypes.pythonapi.Py_Exit(status)  # finalizes the interpreter, with all calls of atexit
    stop = time.monotonic() + 60
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if time.monotonic() > stop:
            os.kill(pid, 9)
            os.waitpid(pid, 0)
            raise AssertionError("the program does not end")
        time.sleep(0.02)
    last = [line for line in errors.read_text().splitlines() if line.strip()][-1:]
    return ended[1], output.read_text(), last


@family.works("a program that raises in the middle of training ends with its own traceback", seconds=90)
def program_raises(place):
    def body(place):
        train(place.small(), 1)
        raise ValueError("the user")

    return _program(place, body)


@family.works("`sys.exit(3)` between backward and step", seconds=90)
def program_exits(place):
    def body(place):
        next(losses(place.small(), 1)).backward()
        sys.exit(3)

    return _program(place, body)


@family.works("`sys.exit(3)` in a hook in the middle of a backward", seconds=90)
def program_exits_in_backward(place):
    def body(place):
        engine = place.small()
        engine.module.blocks[3].register_full_backward_hook(lambda *_: sys.exit(3))
        next(losses(engine, 1)).backward()

    return _program(place, body)


@family.works("`os._exit(0)` right after a step", seconds=90)
def program_ends_at_once(place):
    def body(place):
        train(place.small(), 1)
        os._exit(0)

    return _program(place, body)


@family.works("an engine in a global of a module that is cleared at the end", seconds=90)
def engine_in_global(place):
    def body(place):
        builtins.kept = place.small()
        train(builtins.kept, 1)

    return _program(place, body)


@family.works("the engine is used by an `atexit` call of the user's (to save at the end)", seconds=90)
def used_at_exit(place):
    def body(place):
        engine = place.small()
        train(engine, 1)
        state = engine.optimizer.state_dict
        atexit.register(lambda: print(len(engine.state_dict()), len(state()["state"]), flush=True))

    return _program(place, body)


@family.works("a thread of the program goes on when the main thread has ended", seconds=90)
def thread_outlives_main(place):
    def body(place):
        engine = place.small()
        train(engine, 1)

        def go_on():
            time.sleep(0.3)
            print(len(train(engine, 2)), flush=True)

        threading.Thread(target=go_on).start()

    return _program(place, body)
