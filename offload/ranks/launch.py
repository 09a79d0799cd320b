"""The start of several processes by a launcher: what its environment says of them, and their roll call."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from datetime import timedelta
from itertools import count
from typing import Any

import torch
from torch import distributed

from offload.errors import ConfigError
from offload.ranks.heartbeat import PATIENCE_S, STORE_IS_GONE

_LAUNCHED = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""Variables that a launcher such as torchrun puts into the environment."""

_START = "Start them by torchrun, or call torch.distributed.init_process_group before the engine is made."

_HEARD_S = 1.0
"""Time in which all processes that have come hear why they cannot start."""

_OTHERS_STORE = timedelta(seconds=10)

_starts = count()
"""Of ``torch.distributed``, here: a program may destroy it and go on."""


def initialise() -> bool:
    """Initialise ``torch.distributed`` if a launcher has started several processes, which all call this. False: it has
    not. Raises ``ConfigError``, at once and on all of them, for numbers that cannot be."""
    if not is_launched():
        return False
    size = _number("WORLD_SIZE")
    if size < 2:
        return False
    if "RANK" not in os.environ:
        raise ConfigError(f"this is one of {size} processes (WORLD_SIZE), and RANK is not set. {_START}")
    rank = _number("RANK")
    try:
        store = _meet(rank, size)
        own = distributed.PrefixStore(f"{start_name()}.{next(_starts)}", store)  # type: ignore[attr-defined]
        _call_the_roll(own, rank, size)
        backend = "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo"
        distributed.init_process_group(backend, store=own, rank=rank, world_size=size)
    except ValueError as error:
        if isinstance(error, ConfigError):
            raise
        raise ConfigError(
            f"this is one of {size} processes (WORLD_SIZE), and torch.distributed cannot start: {error}. {_START}"
        ) from None
    return True


def is_launched() -> bool:
    """A launcher has started this process, it may be with others."""
    return "TORCHELASTIC_RUN_ID" in os.environ or all(name in os.environ for name in _LAUNCHED)


def processes_here() -> int:
    """Processes that a launcher has started on this machine, as far as it says so."""
    value = os.environ.get("LOCAL_WORLD_SIZE", "")
    return int(value) if value.isdecimal() else 1


def local_number() -> int | None:
    """Number of this process among those on this machine, if a launcher says so: some say -1 for one process."""
    value = os.environ.get("LOCAL_RANK", "")
    return int(value) if value.isdecimal() else None


def _number(name: str) -> int:
    value = os.environ.get(name, "")
    if not value.isdecimal():
        raise ConfigError(
            f"{name}={value}: expected a whole number, as torchrun puts into the environment of each process"
        )
    return int(value)


def start_name() -> str:
    """A name for this start of all processes: it does not find what former ones have said. The store of torchrun's own
    process outlives those that it starts anew, with all keys (torch 2.13): addresses of processes that are gone, and
    the error that ended them."""
    is_torchruns = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return f"start {os.environ.get('TORCHELASTIC_RESTART_COUNT', '0') if is_torchruns else '0'}"


def _meet(rank: int, size: int) -> Any:
    """The store that all processes share."""
    try:
        return next(distributed.rendezvous("env://"))[0]  # type: ignore[attr-defined]
    except RuntimeError as error:
        said = str(error).partition(chr(10))[0]
    if rank == 0:  # another process may have the store, and this number: the roll call tells both
        with contextlib.suppress(RuntimeError):
            address, port = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
            return distributed.TCPStore(address, port, size, False, _OTHERS_STORE)  # type: ignore[attr-defined]
    raise ConfigError(f"torch.distributed cannot start: {said}")


def _call_the_roll(store: Any, rank: int, size: int) -> None:
    """Wait until every rank is there, once. ``torch.distributed`` would wait half an hour for one that has another's
    number, or run with the wrong one."""
    wrong = ""
    if rank >= size:
        wrong = f"RANK={rank}: with WORLD_SIZE={size}, ranks are 0 to {size - 1}"
    elif store.add(f"here {rank}", 1) > 1:
        wrong = f"RANK={rank} is the number of two processes"
    try:
        if wrong:
            store.set("wrong", wrong)
        _wait_until(
            lambda: store.check(["wrong"]) or store.check([f"here {other}" for other in range(size)]), PATIENCE_S
        )
        if not store.check(["wrong"]):
            return
        said = store.get("wrong").decode()
        num_heard = store.add("heard", 1)
        _wait_until(lambda: max(num_heard, store.add("heard", 0)) >= size, _HEARD_S)  # it may be in this process
    except RuntimeError:
        said = wrong or STORE_IS_GONE
    raise ConfigError(f"{said}. Give each process a number of its own, as torchrun does")


def _wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition() and time.monotonic() < deadline:
        time.sleep(0.02)
