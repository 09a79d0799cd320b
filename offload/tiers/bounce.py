"""Pinned pieces of host memory, through which any host memory is copied to a device and back.

A copy of memory that is not pinned goes through a buffer of the driver's, and blocks its thread without a deadline.
"""

from __future__ import annotations

import threading
from collections import deque
from itertools import cycle

import torch

import aio_ext
from offload.device.protocol import Device, Event
from offload.memory import private_memory, tensor_at

_PIECE_BYTES = 2 << 20
_NUM_PIECES = 2
"""One is filled, or emptied, while the device copies the other."""


class Bounce:
    """Takes its memory when it is first used. Calls may come from several threads, and return when the bytes are there.
    All tensors are flat, of bytes."""

    def __init__(self, device: Device) -> None:
        self._device = device
        self._lock = threading.Lock()
        """Guards the pieces."""
        self._memory: aio_ext.Memory | None = None
        self._pieces: list[torch.Tensor] = []

    def to_device(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source``, in host memory, into ``target``."""
        stream = self._device.to_device
        under_way: deque[tuple[Event, torch.Tensor, torch.Tensor]] = deque()

        def end_one() -> None:
            arrived, *_alive = under_way.popleft()  # what is copied must live until then
            arrived.wait()

        with self._lock:
            for start, piece in self._pieces_for(target.nbytes):
                if len(under_way) == _NUM_PIECES:
                    end_one()
                part = target[start : start + len(piece)]
                self._fill(piece, source[start : start + len(piece)])
                stream.copy(part, piece)
                under_way.append((stream.record(), part, piece))
            while under_way:
                end_one()

    def to_host(self, target: torch.Tensor, source: torch.Tensor) -> None:
        """Copy ``source``, in the device's memory, into ``target``."""
        stream = self._device.to_host
        under_way: deque[tuple[Event, torch.Tensor, torch.Tensor, torch.Tensor]] = deque()

        def end_one() -> None:
            arrived, piece, into, _ = under_way.popleft()
            arrived.wait()
            self._empty(piece, into)

        with self._lock:
            for start, piece in self._pieces_for(source.nbytes):
                if len(under_way) == _NUM_PIECES:
                    end_one()
                part = source[start : start + len(piece)]
                stream.copy(piece, part)
                under_way.append((stream.record(), piece, target[start : start + len(piece)], part))
            while under_way:
                end_one()

    def close(self) -> None:
        """Give the memory back."""
        memory, self._memory = self._memory, None
        if memory is not None:
            self._pieces.clear()
            self._device.unpin(memory.address)
            memory.close()

    def _pieces_for(self, nbytes: int) -> list[tuple[int, torch.Tensor]]:
        """Start of each part of so many bytes, and the piece that it passes through."""
        if self._memory is None:
            self._memory = private_memory(_NUM_PIECES * _PIECE_BYTES)
            self._device.pin(self._memory.address, _NUM_PIECES * _PIECE_BYTES)
            self._pieces = list(
                tensor_at(self._memory.address, _NUM_PIECES * _PIECE_BYTES, torch.uint8).split(_PIECE_BYTES)
            )
        starts = range(0, nbytes, _PIECE_BYTES)
        return [(start, piece[: nbytes - start]) for start, piece in zip(starts, cycle(self._pieces), strict=False)]

    def _fill(self, piece: torch.Tensor, source: torch.Tensor) -> None:
        piece.copy_(source)

    def _empty(self, piece: torch.Tensor, target: torch.Tensor) -> None:
        target.copy_(piece)
