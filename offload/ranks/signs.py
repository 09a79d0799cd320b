"""Signs of life that need no interpreter: each rank has a small store of its own, which a thread of C++ answers.

A call that keeps the interpreter to itself for long (the GIL) stops all threads of Python, the heartbeat's too. So a
rank that has stopped counting is asked before it is taken for dead. A process that was stopped or killed does not
answer.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from datetime import timedelta
from typing import Any

from torch import distributed

from offload.ranks.torch_distributed import own_address

_TCPStore: Any = distributed.TCPStore  # type: ignore[attr-defined]

_FOR_EVER = timedelta(days=365)
"""A question without an answer has no end: a thread that came out of C++ while the interpreter ends would abort the
process (Python before 3.14)."""


class Signs:
    """Questions of a heartbeat to ranks that are silent: here nobody can be asked."""

    def ask(self, rank: int) -> None:
        """Ask a rank whether it lives, unless it was asked and has not answered. Never waits."""

    def has_answered(self, rank: int) -> bool:
        """The rank has answered since this was asked last."""
        return False


NO_SIGNS = Signs()


class OwnStores(Signs):
    """A store in each process. Where ranks cannot reach each other's, there are no answers."""

    def __init__(self, rank: int, store: Any, timeout_s: float) -> None:
        """``store`` is shared: addresses are told there."""
        self._store = store
        self._timeout_s = timeout_s
        self._asking: set[int] = set()
        self._answered: set[int] = set()
        """Each a step of the interpreter to change."""
        self._own: Any = None
        with contextlib.suppress(RuntimeError, OSError, AttributeError, ValueError):
            address = own_address(store)
            self._own = _TCPStore(address, 0, is_master=True, wait_for_workers=False)
            store.set(f"address {rank}", f"{self._own.port} {address}")

    def ask(self, rank: int) -> None:
        if rank not in self._asking:
            self._asking.add(rank)
            threading.Thread(target=self._ask, args=(rank,), name="offload-ask", daemon=True).start()

    def has_answered(self, rank: int) -> bool:
        answered = rank in self._answered
        self._answered.discard(rank)
        return answered

    def _ask(self, rank: int) -> None:
        """Of a process that is stopped the system takes the question, and nobody answers it: the thread stays then. One
        that has ended takes none."""
        with contextlib.suppress(RuntimeError, OSError, ValueError):
            if self._store.check([f"address {rank}"]):
                port, _, address = self._store.get(f"address {rank}").decode().partition(" ")
                socket.create_connection((address, int(port)), self._timeout_s).close()
                other = _TCPStore(address, int(port), is_master=False, timeout=_FOR_EVER, wait_for_workers=False)
                other.add("asked", 1)
                self._answered.add(rank)
        self._asking.discard(rank)
