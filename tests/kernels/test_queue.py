"""Kernels that a queue runs: the bits of those that are run at once, whatever runs beside them."""

from __future__ import annotations

import os
import random
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import forked
import pytest
import torch

from offload import kernels
from offload.native_optimizers import NATIVE_OPTIMIZERS

OPTIONS = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1, "amsgrad": False, "maximize": False}
ADAMW = NATIVE_OPTIMIZERS["adamw"].coefficients(OPTIONS, 3, 1)


def arrays(numel: int, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    grad, weight, first, second = (torch.randn(numel, generator=generator) for _ in range(4))
    return [grad, weight, first, second.abs_()]


def step(of: Sequence[torch.Tensor], native: kernels.Native, numel: int | None = None) -> None:
    grad, weight, first, second = of
    kernels.update(
        ADAMW,
        grad.numel() if numel is None else numel,
        grad=grad.data_ptr(),
        grad_dtype=kernels.Dtype.F32,
        weight=weight.data_ptr(),
        weight_dtype=kernels.Dtype.F32,
        native=native,
        **{name: state.data_ptr() for name, state in zip(ADAMW.states, (first, second), strict=True)},
    )


@pytest.mark.parametrize("seed", range(4))
def test_works_of_a_queue_give_the_bits_of_kernels_that_are_run_at_once(seed: int) -> None:
    draw = random.Random(seed)
    sizes = [draw.choice([1, 100, 16_384, 50_000, 300_001]) for _ in range(30)]
    expected, given = ([arrays(numel, index) for index, numel in enumerate(sizes)] for _ in range(2))
    for each in expected:
        step(each, kernels.on_host)
    queue, works = kernels.Queue(), list[kernels.Work]()
    for each in given:
        step(each, queue.by(draw.randint(1, 5), works))
        if draw.random() < 0.3:
            works[draw.randrange(len(works))].wait()
    for work in works:
        work.wait()
        assert work.done()
        assert work.seconds() >= 0
        assert work.seconds_since() >= 0
    assert len(works) == len(sizes)
    for here, there in zip(expected, given, strict=True):
        assert all(map(torch.equal, here, there))


def test_the_caller_of_a_queue_goes_on_while_it_works() -> None:
    of, was_done = [arrays(1 << 20, index) for index in range(8)], True
    for _ in range(100):  # under load the works of one turn may end before their caller looks
        works = list[kernels.Work]()
        native = kernels.Queue().by(1, works)
        for each in of:
            step(each, native)
        del native  # and with it the queue
        was_done = works[-1].done()
        works[-1].wait()
        assert all(work.done() for work in works), "one thread works in order"
        if not was_done:
            break
    assert not was_done, "each call has waited for its work"


def test_seconds_of_works_are_those_between_their_ends() -> None:
    of, works = [arrays(1 << 20, index) for index in range(8)], list[kernels.Work]()
    native, start = kernels.Queue().by(1, works), time.perf_counter()  # of two threads one may be late with a block
    for each in of:
        step(each, native)
    for work in works:
        work.wait()
    took = time.perf_counter() - start
    assert sum(work.seconds() for work in works) <= took
    assert works[0].seconds_since() > works[-1].seconds_since()


def test_other_threads_run_while_a_work_is_waited_for() -> None:
    """Python changes threads only where one waits, so who runs before the work is done runs inside of its wait."""
    of, interval, was_done = [arrays(1 << 20, index) for index in range(8)], sys.getswitchinterval(), True
    sys.setswitchinterval(3600)
    try:
        for _ in range(100):  # under load the works of one turn may end before the other thread has a core
            works, go = list[kernels.Work](), threading.Lock()
            go.acquire()

            def look(works: list[kernels.Work] = works, go: threading.Lock = go) -> None:
                nonlocal was_done
                go.acquire()
                was_done = works[-1].done()

            other = threading.Thread(target=look)
            other.start()
            native = kernels.Queue().by(1, works)
            for each in of:
                step(each, native)
            go.release()
            works[-1].wait()
            other.join(10)
            if not was_done:
                break
    finally:
        sys.setswitchinterval(interval)
    assert not was_done, "the interpreter was kept"


def test_a_queue_does_nothing_in_a_forked_process_and_does_not_hang_there() -> None:
    queue, works, of = kernels.Queue(), list[kernels.Work](), arrays(1 << 20, 0)
    step(of, queue.by(2, works))
    works[0].wait()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            step(of, queue.by(1, works))
        except RuntimeError as error:
            code = 0 if "forked" in str(error) else 2
        del queue
        os._exit(code)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_a_work_without_elements_is_done() -> None:
    works: list[kernels.Work] = []
    step(arrays(8, 0), kernels.Queue().by(2, works), numel=0)
    assert [work.done() for work in works] == [True]
    works[0].wait()
    assert works[0].seconds() == 0


WITHOUT_THREADS = """
import _thread, resource, sys, threading
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_queue import arrays, kernels, step
given, works = [arrays(300_001, 0) for _ in range(3)], []
most = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize() + (4 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, resource.RLIM_INFINITY))
over = threading.Event()
try:
    while True:  # the C library keeps stacks of threads that are over for new ones
        _thread.start_new_thread(over.wait, ())
except RuntimeError as error:
    print(error)
step(given[0], kernels.on_host)
step(given[1], kernels.Queue().by(4, works))
step(given[2], kernels.OnHost(kernels.always(4)))
works[0].wait()
resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
over.set()
print(len({b"".join(array.numpy().tobytes() for array in each) for each in given}))
"""


def test_where_the_system_gives_no_threads_the_caller_runs_kernels() -> None:
    """A limit of the address space leaves no room for a thread's stack."""
    assert forked.run_well(WITHOUT_THREADS, Path(__file__).parent) == "can't start new thread\n1\n"
