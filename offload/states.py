"""Reading and changing a parameter's value and gradient from outside of the model's own order."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import torch

from offload.compute import Compute
from offload.device_homes import DeviceHomes
from offload.failure import Failure
from offload.gradient_handle import GradientHandle, GradientLink
from offload.gradients import Gradients
from offload.layout import Formats
from offload.memory import tensor_at
from offload.pieces import Cut
from offload.residency import Weights
from offload.rule import Rule
from offload.tiles import Tiles
from offload.unit import Unit
from offload.units import ParameterSpec
from offload.update import Updater


class Access:
    """What links share: the way to weights, masters and gradients.

    ``rule``, ``tiles`` and ``updater`` are None without training, ``homes`` where no unit is at home on a device.
    """

    def __init__(
        self,
        weights: Weights,
        gradients: Gradients,
        homes: DeviceHomes | None,
        rule: Rule | None,
        tiles: Tiles | None,
        updater: Updater | None,
        compute: Compute,
        formats: Formats,
        failure: Failure,
        device: torch.device,
    ) -> None:
        self.weights = weights
        self.gradients = gradients
        self.homes = homes
        self.rule = rule
        self.tiles = tiles
        self.updater = updater
        self.compute = compute
        self.formats = formats
        self.failure = failure
        self.device = device

    def begin_change(self, unit: Unit) -> None:
        """Weights or gradients of the unit are about to change: what was worked out from them is void."""
        self.compute.settle()
        if self.updater is not None:
            self.updater.drop(unit)

    def gradients_of(self, unit: Unit) -> Gradients | DeviceHomes:
        """Who keeps the unit's gradients."""
        return self.homes if unit.on_device and self.homes is not None else self.gradients

    @contextlib.contextmanager
    def weights_of(self, unit: Unit, spec: ParameterSpec, *, to_change: bool = False) -> Iterator[int]:
        """The address of one parameter's weights, to look at or (``to_change``) change."""
        if unit.on_device and self.homes is not None:
            with self.homes.weights(unit, spec.offset, spec.offset + spec.numel, to_change=to_change) as address:
                yield address
        else:
            with self.weights.borrowed(unit, to_change=to_change) as address:
                yield address + spec.offset * self.formats.weights


class ParameterLink:
    """Reads and writes one parameter for its handle."""

    def __init__(self, unit: Unit, spec: ParameterSpec, access: Access) -> None:
        self.name = spec.name
        self._unit = unit
        self._spec = spec
        self._access = access

    def read(self) -> torch.Tensor:
        """A copy of the value, once the last step's update has reached it."""
        access = self._access
        with access.failure.guard(), access.weights_of(self._unit, self._spec) as address:
            return self._tensor(address).clone()

    def write(self, value: torch.Tensor) -> None:
        """Set the value. The fp32 master becomes exactly this; moments stay as they are."""
        access = self._access
        access.begin_change(self._unit)
        access.compute.outdate([self._unit])
        weights = access.weights_of(self._unit, self._spec, to_change=True)
        with access.failure.guard(), weights as address, torch.no_grad():
            self._tensor(address).copy_(value)
            if access.formats.master and self._spec.trainable:
                self._write_master(address)

    @property
    def gradient(self) -> torch.Tensor | None:
        """A handle on the gradient for the coming step, or None if there is none."""
        link = self.gradient_link()
        return None if link is None else self.gradient_handle(link, self._spec.shape)

    @gradient.setter
    def gradient(self, value: torch.Tensor | None) -> None:
        if value is None:
            self._access.compute.settle()
            self._unit.gradients.pop(self._spec, None)
        elif not (isinstance(value, GradientHandle) and value.is_of(self._spec)):
            with self._access.failure.guard():
                self._access.begin_change(self._unit)
                self._access.weights.wait_for_update(self._unit)
                self._access.gradients_of(self._unit).write(self._unit, self._spec, value.detach())

    def gradient_link(self) -> PlainGradientLink | None:
        """What a handle on the gradient needs, if there is a gradient."""
        self._access.compute.settle()
        there = self._spec in self._unit.gradients
        return PlainGradientLink(self._unit, self._spec, self._access) if there else None

    def gradient_handle(self, link: GradientLink, shape: torch.Size) -> GradientHandle:
        """A handle on a gradient of this parameter, or of the whole that it is a piece of."""
        meta = torch.empty(shape, dtype=self._unit.dtype, device="meta")
        return GradientHandle(link, meta, self._access.device)

    def _tensor(self, address: int) -> torch.Tensor:
        return tensor_at(address, self._spec.numel, self._unit.dtype).view(self._spec.shape)

    def _write_master(self, weights: int) -> None:
        """Make the master what the parameter's weights, at this address, are."""
        spec, formats, rule, tiles = self._spec, self._access.formats, self._access.rule, self._access.tiles
        assert rule is not None and tiles is not None
        value = self._tensor(weights).float().flatten()
        for tile in self._unit.tiles:
            start, stop = max(spec.offset, tile.start), min(spec.offset + spec.numel, tile.stop)
            if start < stop:
                with tiles.opened(tile, to_change=True) as address:
                    formats.put_master(
                        value[start - spec.offset : stop - spec.offset],
                        weights + (start - spec.offset) * formats.weights,
                        address + rule.master_offset(tile.tile, start),
                    )


class CutLink:
    """Reads and writes a parameter that is in pieces. ``links`` are those of the pieces, in order."""

    def __init__(self, cut: Cut, links: Sequence[ParameterLink]) -> None:
        self.name = cut.name
        self.cut = cut
        self._links = links

    def read(self) -> torch.Tensor:
        """A copy of the whole value."""
        return torch.cat([link.read() for link in self._links])

    def write(self, value: torch.Tensor) -> None:
        """As ``ParameterLink.write``."""
        for link, part in zip(self._links, self.cut.split(value), strict=True):
            link.write(part)

    @property
    def gradient(self) -> torch.Tensor | None:
        """A handle on the gradient, or None if one of the pieces has none."""
        parts = [part for link in self._links if (part := link.gradient_link()) is not None]
        if len(parts) < len(self._links):
            return None
        return self._links[0].gradient_handle(CutGradientLink(self.cut, parts), self.cut.shape)

    @gradient.setter
    def gradient(self, value: torch.Tensor | None) -> None:
        if value is not None and isinstance(value, GradientHandle) and value.is_of(self.cut):
            return
        parts = [None] * len(self._links) if value is None else self.cut.split(value.detach())
        for link, part in zip(self._links, parts, strict=True):
            link.gradient = part


class PlainGradientLink:
    """Reads and changes one gradient for its handle, ``parameter.grad``."""

    gradient: torch.Tensor | None = None

    def __init__(self, unit: Unit, spec: ParameterSpec, access: Access) -> None:
        self.name = f"the gradient of {spec.name}"
        self.spec = spec
        self._unit = unit
        self._access = access

    def read(self) -> torch.Tensor:
        with self._access.failure.guard():
            self._access.compute.settle()
            return self._access.gradients_of(self._unit).read(self._unit, self.spec).to(self._unit.dtype)

    def write(self, value: torch.Tensor) -> None:
        with self._access.failure.guard():
            self._access.begin_change(self._unit)
            self._access.gradients_of(self._unit).write(self._unit, self.spec, value)

    # What clip_grad_norm_ asks of each gradient, without bringing it in.

    def norm(self) -> float:
        """Its 2-norm, from the sum that was added up while it came."""
        self._access.compute.settle()
        return float(self._unit.gradients[self.spec].norm_squared ** 0.5)

    def multiply(self, factor: float) -> None:
        """Multiply it, when the update reads it."""
        self._access.compute.settle()
        self._unit.gradients[self.spec].scale *= factor


class CutGradientLink:
    """The same for a parameter that is in pieces. ``links`` are those of the pieces, in order."""

    gradient: torch.Tensor | None = None

    def __init__(self, cut: Cut, links: Sequence[PlainGradientLink]) -> None:
        self.name = f"the gradient of {cut.name}"
        self.spec = cut
        self._links = links

    def read(self) -> torch.Tensor:
        return torch.cat([link.read() for link in self._links])

    def write(self, value: torch.Tensor) -> None:
        for link, part in zip(self._links, self.spec.split(value), strict=True):
            link.write(part)

    def norm(self) -> float:
        return float(sum(link.norm() ** 2 for link in self._links) ** 0.5)

    def multiply(self, factor: float) -> None:
        for link in self._links:
            link.multiply(factor)
