"""The log of updates: which units a commit writes, and what is read of a generation with a log."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

import aio_ext
from offload.checkpoint.native.description import Description
from offload.checkpoint.native.logged_updates import LoggedUpdate, check_logged, logged
from offload.checkpoint.native.replay import replayed
from offload.checkpoint.native.saved_units import SavedParameter, SavedTile, SavedUnit, SavedUnits
from offload.checkpoint.native.update_log import UpdateLog
from offload.dtypes import BY_PRECISION
from offload.memory import tensor_at
from offload.native_optimizers import NATIVE_OPTIMIZERS
from offload.optim.formats import Formats, master_bytes
from offload.optim.kernel_rule import KernelRule
from offload.optim.rule import TileBytes
from offload.plan.update_log import LOGGED_STEPS, in_parts
from offload.tiers.gradients.last_step import LastGradients
from offload.tiers.home import HostHome, TileHomes, UnitHomes
from offload.tiers.store import RecordExtents
from offload.units import GRAIN, ParameterSpec, Tile, UnitSpec
from offload.update.step import Segment, UnitUpdate, apply
from offload.waiting import Failure
from swapper import Extent, OffloadError, align
from swapper.checked import Refused

ADAM = NATIVE_OPTIMIZERS["adamw"]


def unit(index: int, numel: int = 2 * GRAIN) -> UnitSpec:
    spec = ParameterSpec(f"p{index}", torch.Size([numel]), numel, 0, True, ())
    return UnitSpec(index, f"unit{index}", (), (spec,), numel, numel, 0)


# What is logged.


class Rig:
    """A log of some units, whose commits succeed."""

    def __init__(self, num_units: int = 8) -> None:
        self.units = [unit(index) for index in range(num_units)]
        self.memory = aio_ext.Memory(GRAIN * 4)
        home = HostHome(self.memory)
        homes = [UnitHomes(home, home, [TileHomes(Tile(0, 2 * GRAIN, 0), home)]) for _ in self.units]
        count = 0
        extents = []
        for _ in self.units:
            slots = tuple((Extent(count + slot, 0, GRAIN * 4),) for slot in range(LOGGED_STEPS))
            extents.append(RecordExtents((), (), None, slots))
            count += LOGGED_STEPS
        self.gradients = LastGradients(Failure())
        self.log = UpdateLog(self.units, homes, extents, self.gradients, 2)
        self.num_steps = 0

    def take_step(self, units: list[UnitSpec] | None = None) -> None:
        self.num_steps += 1
        frozen = ADAM.coefficients(ADAM.defaults, self.num_steps)
        self.log.step_taken([UnitUpdate(u, (Segment(0, 2 * GRAIN, frozen),)) for u in units or self.units])

    def commit(self) -> set[str]:
        """The names of the units whose records are written."""
        logging = self.log.next()
        self.log.committed(logging)
        self.last = logging
        return {u.name for u in self.units if logging.writes(u)}

    def step(self) -> set[str]:
        self.take_step()
        return self.commit()


def test_each_unit_is_written_in_its_turn_and_logged_between() -> None:
    rig = Rig()
    assert rig.step() == {u.name for u in rig.units}  # nothing is there to go on from
    written = [rig.step() for _ in range(2 * (LOGGED_STEPS + 1))]
    assert [len(names) for names in written] == [1] * len(written)
    assert Counter(name for names in written for name in names) == {u.name: 2 for u in rig.units}


def test_an_update_is_logged_where_no_update_lies_that_is_still_needed() -> None:
    rig = Rig(1)
    for _ in range(3 * (LOGGED_STEPS + 1)):
        before = {index for update in getattr(rig, "last", rig.log.next()).updates for index in update.gradients}
        names = rig.step()
        written = {extent.index for extent, _ in rig.last.gradients}
        assert not written & before and len(written) == (0 if names else 1)
        assert {extent.index for extent in rig.last.over} == (set(range(LOGGED_STEPS)) if names else set())


def settled() -> Rig:
    rig = Rig(3)
    rig.step()
    while rig.step():  # the next commit may write one unit in its turn; this one has written none
        pass
    return rig


def test_a_unit_is_written_after_what_no_update_has_done() -> None:
    rig = settled()
    first, second, _ = rig.units
    rig.take_step()
    rig.log.changing(first)
    rig.gradients.changes(second)
    assert rig.commit() >= {first.name, second.name}
    rig.take_step()
    assert not {first.name, second.name} & rig.commit()


def test_all_units_are_written_after_a_step_that_no_commit_has_and_after_a_commit_that_failed() -> None:
    everything = {u.name for u in settled().units}
    rig = settled()
    rig.take_step()
    assert rig.step() == everything
    rig = settled()
    rig.take_step()
    rig.log.next()  # it never succeeds
    assert rig.step() == everything
    assert {u.name for u in rig.units if rig.log.all().writes(u)} == everything


def test_a_unit_that_takes_no_step_keeps_its_log() -> None:
    rig = settled()
    before = rig.last.chains[rig.units[0]]
    rig.take_step(rig.units[1:])
    if rig.units[0].name not in rig.commit():
        assert rig.last.chains[rig.units[0]] == before


def test_coefficients_that_are_no_plain_numbers_are_not_logged() -> None:
    odd = ADAM.coefficients({**ADAM.defaults, "weight_decay": torch.tensor(0.1)})
    assert logged("u", 1, [0], [Segment(0, GRAIN, odd)]) is None
    for kernel in NATIVE_OPTIMIZERS.values():
        assert logged("u", 1, [0], [Segment(0, GRAIN, kernel.coefficients(kernel.defaults))]) is not None


def test_who_would_replace_gradients_that_a_commit_reads_waits() -> None:
    """As a wait ends with the first fatal error, who waits is known by it."""
    failure = Failure()
    gradients = LastGradients(failure)
    gradients.step_taken()
    gradients.begin_reading()
    failure.record(OffloadError("the disk is gone"))
    with pytest.raises(OffloadError, match="the disk is gone"):
        gradients.changes(unit(0))
    assert gradients.are_there(unit(0))
    gradients.end_reading()
    gradients.changes(unit(0))
    assert not gradients.are_there(unit(0)) and gradients.are_there(unit(1))


# What is read.


class Bytes:
    """A generation in memory. See ``Source``."""

    metadata = b""

    def __init__(self) -> None:
        self.extents: list[Extent] = []
        self.content: list[torch.Tensor] = []

    def add(self, content: torch.Tensor) -> int:
        raw = content.contiguous().view(-1).view(torch.uint8)
        self.extents.append(Extent(len(self.extents), 0, align(raw.numel())))
        self.content.append(raw.clone())
        return len(self.extents) - 1

    def holds(self, extent: Extent) -> bool:
        return True

    def read(self, extent: Extent, address: int, nbytes: int) -> Any:
        assert nbytes == extent.nbytes
        content = self.content[extent.index]
        tensor_at(address, content.numel(), torch.uint8).copy_(content)
        return Over()


class Over:
    def wait(self) -> None:
        pass


@pytest.mark.parametrize(
    ("precision", "moments", "gradients", "master"),
    [
        ("bf16", "fp32", torch.bfloat16, "fp32"),
        ("bf16", "int8", torch.float32, "fp32"),
        ("bf16", "bf16", torch.bfloat16, "bf16"),
        ("fp32", "bf16", torch.float32, "fp32"),
    ],
)
def test_records_are_read_as_they_are_after_all_logged_updates(
    precision: str, moments: str, gradients: torch.dtype, master: str
) -> None:
    """Two tiles and two segments with a gap between them, which no update changes."""
    dtype, numel, num_steps = BY_PRECISION[precision], 4 * GRAIN, 3
    formats = Formats(dtype.itemsize, master_bytes(precision, {"master": master}), gradients.itemsize)
    rule = KernelRule(ADAM, [dict(ADAM.defaults)], formats, (dtype, gradients), moments)
    spec = unit(0, numel)
    tiles = [rule.tile_between(spec, 0, GRAIN), rule.tile_between(spec, GRAIN, numel)]
    random = torch.Generator().manual_seed(0)
    weights = torch.randn(numel, generator=random).to(dtype)
    states = [torch.zeros(tile.nbytes, dtype=torch.uint8) for tile in tiles]
    source = Bytes()
    saved_tiles = [SavedTile(t.start, t.stop, t.nbytes, source.add(s)) for t, s in zip(tiles, states, strict=True)]
    parameter = SavedParameter("p0", (numel,), 0, True)
    saved = SavedUnit("unit0", numel, numel, (parameter,), (source.add(weights),), tuple(saved_tiles), None)
    updates = []
    for step in range(1, num_steps + 1):
        grads = torch.randn(numel, generator=random).to(gradients)
        segments = tuple(
            Segment(start, stop, ADAM.coefficients({**ADAM.defaults, "lr": lr}, step, 0.37))
            for start, stop, lr in ((0, 2 * GRAIN, 1e-2), (2 * GRAIN + 256, numel - 100, 1e-3))
        )
        num_tiles = 1 if step < num_steps else 2  # in parts of one and of several tiles
        parts = [(part[0].start, part[-1].stop) for part in in_parts(tiles, num_tiles)]
        one = logged("unit0", num_tiles, [source.add(grads[start:stop]) for start, stop in parts], segments)
        assert one is not None
        updates.append(one)
        for tile, of_tile in zip(tiles, states, strict=True):
            addresses = (of_tile.data_ptr(), weights[tile.start :].data_ptr(), grads[tile.start :].data_ptr())
            at = TileBytes.in_place(*addresses)
            apply(rule, formats, UnitUpdate(spec, segments), tile, at)
    run = {"gradient_dtype": gradients, "gradients": {}}
    description = Description(precision, rule.identity, SavedUnits([saved]), run, (), tuple(updates))
    reader = replayed(source, description)
    for _ in range(2):  # what is kept of one read is of no harm to the next
        for index, expected in (
            (saved.weights[0], weights),
            *zip((t.extent for t in saved_tiles), states, strict=True),
        ):
            with aio_ext.Memory(source.extents[index].nbytes) as memory:
                reader.read(source.extents[index], memory.address, source.extents[index].nbytes).wait()
                raw = expected.view(-1).view(torch.uint8)
                assert torch.equal(tensor_at(memory.address, raw.numel(), torch.uint8), raw)


# What is refused.


def test_a_log_that_cannot_be_is_refused() -> None:
    of_unit = SavedUnit("u", GRAIN, GRAIN, (), (0,), (SavedTile(0, GRAIN, 8, 1),), None)
    optimizer = {"optimizer": "adamw", "states": ["exp_avg", "exp_avg_sq"], "moments": "fp32"}
    good = logged("u", 1, [2], [Segment(0, GRAIN, ADAM.coefficients(ADAM.defaults))])
    assert good is not None
    check_logged([good], [of_unit], optimizer)
    (coefficients,) = good.coefficients
    amsgrad, momentum = {**coefficients, "amsgrad": True}, {**coefficients, "momentum": 0.9}
    damaged: dict[str, tuple[LoggedUpdate, Any]] = {
        "another unit": (replace(good, unit="v"), optimizer),
        "an optimizer without a kernel": (good, {**optimizer, "optimizer": "Adamax"}),
        "no optimizer": (good, None),
        "a tile without gradients": (replace(good, gradients=()), optimizer),
        "gradients without a tile": (replace(good, gradients=(2, 3)), optimizer),
        "elements beyond the unit": (replace(good, segments=((0, GRAIN + 256, 0),)), optimizer),
        "elements twice": (replace(good, segments=((0, 512, 0), (256, GRAIN, 0))), optimizer),
        "elements in the middle of a block": (replace(good, segments=((8, GRAIN, 0),)), optimizer),
        "coefficients that are not there": (replace(good, segments=((0, GRAIN, 1),)), optimizer),
        "a coefficient of another optimizer": (replace(good, coefficients=(momentum,)), optimizer),
        "a number of another type": (replace(good, coefficients=({**coefficients, "amsgrad": 0.0},)), optimizer),
        "half a step": (replace(good, coefficients=({**coefficients, "step": 1.5},)), optimizer),
        "no number that follows": (replace(good, coefficients=({**coefficients, "lr": 1e300},)), optimizer),
        "no step": (replace(good, coefficients=({**coefficients, "step": 0},)), optimizer),
        "a state without room": (replace(good, coefficients=(amsgrad,)), optimizer),
    }
    for name, (update, of) in damaged.items():
        with pytest.raises(Refused):
            check_logged([update], [of_unit], of)
            pytest.fail(name)
