"""Network that joins the ranks, and the time that the two collectives of a unit take over it.

[Note: What a collective takes] Of ``nbytes`` that ``N`` ranks hold in equal parts, ``R`` of them on each node:

- *Gathered*, a rank receives ``(N-1)/N``, and a node ``(N-R)/N`` through its network card: each part comes once and
  goes on inside. Rings that pass through all ranks of a node reach both at the same time.
- *Exchanged directly*, each rank sends each other one its part, and adds up what it has received, in the order of the
  ranks. A rank receives ``(R-1)/N`` inside, and a node ``R (N-R)/N``: R times as much.
- *Added up inside* first, a rank receives ``(R-1)/R`` inside, and a node ``(N-R)/N``.

A collective takes the longer of the two, as they run at once, and what comes before its first byte. Source: the lower
bounds of Chan, Heimlich, Purkayastha and van de Geijn, "Collective communication: theory, practice, and experience",
Concurrency and Computation 19 (2007), 1749-1783, for each of the two links; NVIDIA nccl-tests, doc/PERFORMANCE.md, has
the same factors.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Network:
    """``num_ranks`` ranks, ``ranks_a_node`` of them on each node.

    ``gather`` and ``exchange`` are the bytes a second that a rank receives from the others of its node in the two
    collectives, ``between`` what a node receives from all others. ``wait_seconds`` is a turn of a few bytes: ranks
    agree on each collective in one, and tell each other the scales of gradients in another. ``gather_cores`` and
    ``exchange_cores`` are the seconds of a core that each byte takes which a rank receives; 0 where engines of their
    own move it. ``added_inside``: gradients are added up inside of a node before they leave it.
    """

    num_ranks: int
    ranks_a_node: int
    gather: float
    exchange: float
    between: float
    wait_seconds: float
    gather_cores: float = 0.0
    exchange_cores: float = 0.0
    added_inside: bool = False

    def gather_seconds(self, nbytes: float) -> float:
        """Until every rank has all ``nbytes``. See [Note: What a collective takes]."""
        inside = self.received_bytes(nbytes) / self.gather
        return self.wait_seconds + max(inside, self._of_others * nbytes / self.between)

    def exchange_seconds(self, nbytes: float) -> float:
        """Until every rank has the sum of its part of the ``nbytes`` that each has. See the same note."""
        ranks, local = self.num_ranks, self.ranks_a_node
        if self.added_inside:
            inside, between = (local - 1) / local, self._of_others
        else:
            inside, between = (local - 1) / ranks, local * self._of_others
        return 2 * self.wait_seconds + max(inside * nbytes / self.exchange, between * nbytes / self.between)

    @property
    def settle_seconds(self) -> float:
        """At the end of backward the ranks meet, and meet again to add up sums of squares: two turns each."""
        return 4 * self.wait_seconds

    def received_bytes(self, nbytes: float) -> float:
        """Bytes that a rank receives of ``nbytes``, in either collective."""
        return nbytes * (self.num_ranks - 1) / self.num_ranks

    @property
    def _of_others(self) -> float:
        """The part that the ranks of a node do not have."""
        return (self.num_ranks - self.ranks_a_node) / self.num_ranks


ALONE = Network(1, 1, math.inf, math.inf, math.inf, 0.0)
"""The network of a single rank: nothing crosses it, and it takes no time."""
