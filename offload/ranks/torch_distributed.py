"""Private parts of ``torch.distributed`` that ranks stand on. Each is looked up when it is used: a program of one rank
needs none. All others of torch are in ``torch_internals.py``."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import torch

from offload.torch_internals import found


def own_store(prefix: str) -> Any:
    """The store that the processes of ``torch.distributed`` share, with keys of one's own; where it can be had, by a
    connection of one's own, too: another thread may use the common one to wait for something."""
    from torch.distributed import distributed_c10d

    store = found(distributed_c10d, "_get_default_store")()
    with suppress(AttributeError, RuntimeError, NotImplementedError):  # only some stores can be reached twice
        store = store.clone()
    return found(distributed_c10d, "PrefixStore")(prefix, store)


def own_address(store: Any) -> str:
    """The address of this machine on the way to the process that has ``store``. Raises ``AttributeError`` for one that
    is reached in another way than over TCP."""
    while not hasattr(store, "host"):
        store = store.underlying_store
    family, kind, _, _, address = socket.getaddrinfo(store.host, store.port, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind) as way:
        way.connect(address)  # which sends nothing
        return str(way.getsockname()[0])


@contextmanager
def groups_by_members() -> Iterator[None]:
    """A group that is made within is made by its members alone. Where the program has bound its processes to devices
    (``init_process_group(device_id=)``), torch would split it off the group of all of them, and wait for the others."""
    everyone = found(torch.distributed, "group").WORLD
    bound = getattr(everyone, "bound_device_id", None)
    if bound is None:
        yield
        return
    everyone.bound_device_id = None
    try:
        yield
    finally:
        everyone.bound_device_id = bound


class _Former:
    """Holds the place of a group that is destroyed: names follow from how many groups there are, and one of its name
    would find in the common store what it has left."""

    def shutdown(self) -> None:
        """The program destroys all groups."""


def destroy_group(group: Any) -> None:
    """End the threads and connections of a group in which no collective is under way."""
    from torch.distributed import distributed_c10d

    names = found(distributed_c10d, "_world").pg_names
    name = names[group]
    torch.distributed.destroy_process_group(group)
    names[_Former()] = name


def abort_group(group: Any) -> None:
    """End the transfers of an nccl group that wait for a peer which is gone: they return as if they were done."""
    from torch.distributed import distributed_c10d

    found(distributed_c10d, "_abort_process_group")(group)
