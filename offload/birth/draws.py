"""Random numbers drawn in pieces, from known places of the generator's stream.

[Note: Pieces of one draw] torch's generator on the CPU gives one number after the other. ``uniform_`` and ``normal_``
fill memory without gaps in order, the second one in blocks of 16 elements. So calls on its pieces, one after the other,
give the numbers of one call on all of it, if all pieces but the last one are whole blocks, and the last one is at least
one. The state before each is kept (5 KB), and they are drawn from there, by as many threads as there are cores. States
follow from each other without the numbers between (``generator_state.py``); only a piece that is not of whole blocks is
drawn for it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Lock
from typing import Any

import torch
from torch import Tensor

from offload.birth.generator_state import advance, numbers_of
from offload.memory import passing_tensor
from offload.ranks.host_cores import host_cores

_BLOCK = 16
"""Elements that ``normal_`` makes at a time, where there are as many."""

_PIECE = 1 << 22
"""Elements of a piece: whole blocks."""

_KEPT_PIECES = 4
"""An expert has rows of a few weights, which end within a piece of each."""

_IN_ORDER = (torch.ops.aten.uniform_, torch.ops.aten.normal_)


class Draw:
    """One call of ``uniform_`` or ``normal_`` on memory without gaps."""

    def __init__(
        self, function: Callable[..., Any], settings: Sequence[Any], like: Tensor, generator: torch.Generator
    ) -> None:
        """Draw once: the ``generator`` moves on. The call is ``function`` on a tensor ``like`` this one, on the meta
        device or not, with these ``settings`` of the distribution."""
        self._function, self._settings = function, settings
        self._states: list[Tensor] = []
        of_block = numbers_of(function, like.dtype, _BLOCK)
        state = generator.get_state()
        for start, stop in _pieces(like.numel()):
            self._states.append(state.clone())
            blocks, rest = divmod(stop - start, _BLOCK)
            if rest or of_block is None:
                generator.set_state(state)
                function(_memory(stop - start, like), *settings, generator=generator)
                state = generator.get_state()
            else:
                advance(state, blocks * of_block)
        generator.set_state(state)

    def fill(self, tensor: Tensor) -> None:
        """Put the numbers into a contiguous tensor. No generator of the program notices."""
        self.fill_from(0, tensor, tensor.numel(), KeptPieces())

    def fill_from(self, begin: int, out: Tensor, numel: int, kept: KeptPieces) -> None:
        """Put the numbers from ``begin`` on, of ``numel`` in all, into a contiguous tensor. A piece of which others may
        want the rest is ``kept``."""
        flat = out.view(-1)
        end = begin + len(flat)

        def draw(piece: tuple[int, tuple[int, int]]) -> None:
            number, (start, stop) = piece
            if begin <= start and stop <= end:
                self._draw(number, flat[start - begin : stop - begin])
                return
            first, last = max(start, begin), min(stop, end)
            whole = kept.piece(
                self, number, lambda: self._draw(number, _memory(stop - start, out)), is_last=last == stop
            )
            flat[first - begin : last - begin] = whole[first - start : last - start]

        wanted = [piece for piece in enumerate(_pieces(numel)) if piece[1][0] < end and piece[1][1] > begin]
        with ThreadPoolExecutor(max(int(host_cores().available), 1)) as threads:
            list(threads.map(draw, wanted))

    def _draw(self, number: int, into: Tensor) -> Tensor:
        """The piece of this number again."""
        generator = torch.Generator()
        generator.set_state(self._states[number])
        self._function(into, *self._settings, generator=generator)
        return into


class KeptPieces:
    """The last pieces that were drawn for a part of theirs: rows are asked for one after the other."""

    def __init__(self) -> None:
        self._pieces: OrderedDict[tuple[Draw, int], Tensor] = OrderedDict()
        self._lock = Lock()

    def piece(self, draw: Draw, number: int, make: Callable[[], Tensor], *, is_last: bool) -> Tensor:
        """The piece of this number of a draw. It is kept no longer if this ``is_last``: its end is wanted."""
        with self._lock:
            value = self._pieces.pop((draw, number), None)
            if value is None:
                value = make()
            if is_last:
                return value
            self._pieces[draw, number] = value
            while len(self._pieces) > _KEPT_PIECES:
                self._pieces.popitem(last=False)
        return value


def comes_in_pieces(function: Any, tensor: Tensor) -> bool:
    """The call that fills this tensor can be a ``Draw``."""
    return getattr(function, "overloadpacket", None) in _IN_ORDER and tensor.is_contiguous()


def _pieces(numel: int) -> Iterator[tuple[int, int]]:
    """Start and stop of each piece."""
    starts = range(0, max(numel - _BLOCK + 1, 1), _PIECE)
    yield from zip(starts, [*starts[1:], numel], strict=True)


def _memory(numel: int, like: Tensor) -> Tensor:
    """Memory for so many elements of the same dtype, which goes back to the system."""
    return passing_tensor(numel * like.itemsize).view(like.dtype)
