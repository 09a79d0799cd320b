"""Order of accesses to memory, by vector clocks, whatever order they happened to come in."""

from __future__ import annotations

from dataclasses import dataclass, field

Clock = dict[str, int]
"""Position in each actor's work up to which it is known to be over."""

HOST = "host"


@dataclass
class _Access:
    """Last access to the bytes ``[start, stop)``: by whom, and when by his clock."""

    start: int
    stop: int
    write: tuple[str, int] | None = None
    reads: Clock = field(default_factory=dict)


class Order:
    """Knowledge of each actor (the host, each stream) of what is over; and ``violations``: accesses to the same bytes,
    one of which writes, that nothing orders."""

    def __init__(self) -> None:
        self.clocks: dict[str, Clock] = {HOST: {}}
        self.violations: list[str] = []
        self._accesses: list[_Access] = []

    def tick(self, actor: str) -> Clock:
        """A new moment of an actor. A stream is given work by the host: it comes after all that the host knows of."""
        clock = self.clocks.setdefault(actor, {})
        join(clock, self.clocks[HOST])
        clock[actor] = clock.get(actor, 0) + 1
        return clock

    def access(self, actor: str, address: int, nbytes: int, *, writes: bool) -> None:
        """``actor`` reads or writes these bytes in his present moment."""
        clock, stop = self.clocks[actor], address + nbytes
        rest: list[_Access] = []
        for item in self._accesses:
            if item.stop <= address or stop <= item.start:
                rest.append(item)
                continue
            self._check(item, actor, clock, writes)
            if item.start < address:
                rest.append(_Access(item.start, address, item.write, dict(item.reads)))
            if stop < item.stop:
                rest.append(_Access(stop, item.stop, item.write, dict(item.reads)))
            if not writes:
                now = {**item.reads, actor: clock.get(actor, 0)}
                rest.append(_Access(max(item.start, address), min(item.stop, stop), item.write, now))
        if writes:
            rest.append(_Access(address, stop, (actor, clock.get(actor, 0))))
        else:
            rest += [_Access(a, b, None, {actor: clock.get(actor, 0)}) for a, b in _gaps(rest, address, stop)]
        self._accesses = rest

    def forget(self, address: int, nbytes: int) -> None:
        """These bytes are other memory from now on."""
        self._accesses = [item for item in self._accesses if not (address <= item.start < address + nbytes)]

    def _check(self, item: _Access, actor: str, clock: Clock, writes: bool) -> None:
        what = "writes" if writes else "reads"
        where = f"[{item.start:#x}, {item.stop:#x})"
        if item.write is not None and item.write[1] > clock.get(item.write[0], 0):
            self.violations.append(f"{actor} {what} {where}, which {item.write[0]} may still write")
        for reader, moment in item.reads.items() if writes else ():
            if moment > clock.get(reader, 0):
                self.violations.append(f"{actor} writes {where}, which {reader} may still read")


def join(clock: Clock, other: Clock) -> None:
    """Give ``clock`` the knowledge of ``other`` of what is over."""
    for actor, moment in other.items():
        clock[actor] = max(clock.get(actor, 0), moment)


def _gaps(items: list[_Access], start: int, stop: int) -> list[tuple[int, int]]:
    """The parts of ``[start, stop)`` that no item covers."""
    gaps = []
    for item in sorted(items, key=lambda item: item.start):
        if item.stop <= start or stop <= item.start:
            continue
        if start < item.start:
            gaps.append((start, item.start))
        start = max(start, item.stop)
    return [*gaps, (start, stop)] if start < stop else gaps
