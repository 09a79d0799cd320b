"""The order of uses where some units are experts: their layers come in an order, and which of them come is told.

A layer with experts counts in the order as one use, whichever experts it is of: so routing, which is another for each
batch, does not disturb what is known of all else. Of experts three things are known. Those that a forward has been
routed to, as soon as the router has chosen. Those that its backward will use: the same, in reverse. And before either
the share of the layer's visits in which an expert was used, of late: one with a share of p is used again after 1 / p
visits, so that the experts that stay are those that are used most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat

from offload.tiers.weights.use_order import NEVER, UseOrder
from offload.units import Experts, UnitSpec

_DECAY = 0.98
"""Weight of a visit against that of the next one."""

_LIKELY = 0.9
"""Experts that are used in this share of visits are fetched before the router has chosen."""


class _Layer:
    """The experts of one layer, by the indices of their units."""

    def __init__(self, token: int, members: Sequence[int]) -> None:
        self.token = token
        """Stands for the layer in the order of uses."""
        self.coming: dict[int, int] = {}
        """Positions, in the present visit, of those that are used in it."""
        self.position = 0
        """Of the one that is used now."""
        self.is_told = False
        """The present visit was announced: it is a forward."""
        self.is_trained = False
        """After the last such visit came one that was not announced: its backward."""
        self._members = members
        self._visits = 0
        self._weight = 1.0
        """Number of visits so far, with their weights, and of one more without a use: few visits say little."""
        self._shares = dict.fromkeys(members, (0.0, 0))
        """Number of visits that an expert was used in, with their weights at the last of them, and the number of that
        one."""
        self._expected: dict[int, int] | None = None

    def begin(self, coming: Sequence[int], *, told: bool) -> None:
        """A visit begins."""
        if self.is_told:
            self.is_trained = not told
        self.coming = {index: position for position, index in enumerate(coming)}
        self.position, self.is_told, self._expected = 0, told, None
        self._visits += 1
        self._weight = self._weight * _DECAY + 1

    def use(self, index: int) -> bool:
        """The expert is used now; whether it was not before in this visit."""
        self.position = self.coming.setdefault(index, len(self.coming))
        count, last = self._shares[index]
        if last == self._visits:
            return False
        self._shares[index] = count * _DECAY ** (self._visits - last) + 1, self._visits
        return True

    def reversed_to(self, index: int) -> list[int]:
        """Uses of a backward that begins with this expert, after the present visit."""
        forward = list(self.coming)
        return forward[: forward.index(index) + 1][::-1] if index in self.coming else [index]

    def share(self, index: int) -> float:
        """Share of visits in which the expert was used."""
        count, last = self._shares[index]
        return count * _DECAY ** (self._visits - last) / self._weight

    def unknown(self) -> int:
        """Number of experts that the next visit will use beside those that are expected, if it uses as many as the
        present one."""
        return max(len(self.coming) - len(self.expected()), 0)

    def expected(self) -> dict[int, int]:
        """Those that the next visit will use, with positions."""
        if self._expected is None:
            if self.is_told and self.is_trained:
                coming = list(self.coming)[::-1]
            else:
                coming = [index for index in self._members if self.share(index) >= _LIKELY]
            self._expected = {index: position for position, index in enumerate(coming)}
        return self._expected


class RoutedOrder:
    """See the module's docstring. The interface is that of ``UseOrder``, with ``announce``."""

    def __init__(self, units: Sequence[UnitSpec]) -> None:
        tokens: dict[UnitSpec | Experts, int] = {}
        members: dict[Experts, list[int]] = {}
        for unit in units:
            tokens.setdefault(unit if unit.experts is None else unit.experts, len(tokens))
            if unit.experts is not None:
                members.setdefault(unit.experts, []).append(unit.index)
        layers = {experts: _Layer(tokens[experts], of) for experts, of in members.items()}
        self._token = [tokens[unit if unit.experts is None else unit.experts] for unit in units]
        self._layer = [None if unit.experts is None else layers[unit.experts] for unit in units]
        self._of_token: dict[int, int | _Layer] = {layer.token: layer for layer in layers.values()}
        self._of_token.update((tokens[unit], unit.index) for unit in units if unit.experts is None)
        self._num_tokens = len(tokens)
        self._order = UseOrder(len(tokens))
        self._now: _Layer | None = None
        """The layer that is visited."""
        self.visit: object = object()
        """Of a layer, or of a unit that is no expert: another one each time. See ``UseOrder.visit``."""

    def announce(self, indices: Sequence[int]) -> None:
        """The next uses are of these experts of one layer, in this order."""
        layer = self._layer[indices[0]]
        assert layer is not None
        self._visit(layer, indices, told=True)

    def use(self, index: int) -> bool:
        """The unit is being used now; whether it is an expert that was not used before in this visit of its layer."""
        layer = self._layer[index]
        if layer is None:
            self._now, self.visit = None, object()
            self._order.use(self._token[index])
            return False
        if self._now is not layer or (layer.is_told and layer.coming.get(index, -1) < layer.position):
            self._visit(layer, layer.reversed_to(index) if layer.is_told else [index], told=False)
        return layer.use(index)

    def end_step(self) -> None:
        """See ``UseOrder.end_step``."""
        self._now, self.visit = None, object()
        self._order.end_step()

    def distance(self, index: int) -> float:
        """See ``UseOrder.distance``."""
        layer, ahead = self._layer[index], 0
        if self._now is not None:
            ahead = len(self._now.coming) - self._now.position
            position = self._now.coming.get(index, -1)
            if position >= self._now.position:
                return position - self._now.position
        distance = ahead + self._order.distance(self._token[index])
        if layer is None or distance == NEVER:
            return distance
        position = layer.expected().get(index, -1)
        if position >= 0:
            return distance + position / len(layer.expected())
        share = layer.share(index)
        return distance + 1 + (1 / share - 1) * self._num_tokens if share else NEVER

    def first_use(self, index: int) -> float:
        """See ``UseOrder.first_use``. Experts of a layer have the same."""
        return self._order.first_use(self._token[index])

    def upcoming(self, *, wrap: bool = True) -> Iterator[int | None]:
        """See ``UseOrder.upcoming``. None stands for an expert that the router will choose."""
        if self._now is not None:
            yield from list(self._now.coming)[self._now.position :]
        for token in self._order.upcoming(wrap=wrap):
            found = self._of_token[token]
            if isinstance(found, _Layer):
                yield from found.expected()
                yield from repeat(None, found.unknown())
            else:
                yield found

    def _visit(self, layer: _Layer, coming: Sequence[int], *, told: bool) -> None:
        self._order.use(layer.token)
        layer.begin(coming, told=told)
        self._now, self.visit = layer, object()
