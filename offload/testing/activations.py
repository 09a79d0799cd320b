"""Activations of a model on a simulated device: what autograd saves for a backward takes the device's memory."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from offload.testing.pools import Pools


@dataclass
class _Piece:
    """Memory under saved tensors, ``num_saved`` of them, that belongs to the work of a stream."""

    stream: str
    nbytes: int
    num_saved: int = 0


class _Saved:
    """A tensor that a graph has saved."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor


class Activations:
    """Counts each piece of memory once, from the first graph that saves it until the last one drops it."""

    def __init__(
        self, pools: Pools, lock: threading.RLock, stream: Callable[[], str], own: Callable[[int], bool]
    ) -> None:
        """``stream`` names the one that this thread computes on. Memory at an ``own`` address is counted already."""
        self._pools = pools
        self._lock = lock
        self._stream = stream
        self._own = own
        self._pieces: dict[int, _Piece] = {}
        """By address."""
        self.used_bytes = 0
        self.most_used_bytes = 0

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count what this thread saves within. Raises ``torch.OutOfMemoryError`` where there is no room."""
        with torch.autograd.graph.saved_tensors_hooks(self._save, lambda saved: saved.tensor):
            yield

    def _save(self, tensor: torch.Tensor) -> _Saved:
        saved = _Saved(tensor)
        memory = tensor.untyped_storage()
        address, nbytes = memory.data_ptr(), memory.nbytes()
        with self._lock:
            if nbytes and not self._own(address):
                piece = self._pieces.get(address)
                if piece is None:
                    piece = _Piece(self._stream(), nbytes)
                    if not self._pools.take(piece.stream, nbytes):
                        raise torch.OutOfMemoryError(
                            f"simulated: no room for {nbytes:,} bytes, {self._pools.free_bytes:,} are free"
                        )
                    self._pieces[address] = piece
                    self.used_bytes += nbytes
                    self.most_used_bytes = max(self.most_used_bytes, self.used_bytes)
                piece.num_saved += 1
                weakref.finalize(saved, self._drop, address).atexit = False
        return saved

    def _drop(self, address: int) -> None:
        with self._lock:
            piece = self._pieces[address]
            piece.num_saved -= 1
            if piece.num_saved == 0:
                del self._pieces[address]
                self.used_bytes -= piece.nbytes
                self._pools.give(piece.stream, piece.nbytes)
