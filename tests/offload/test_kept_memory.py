"""What looks at a unit's memory beyond its use, whoever has it, sees that unit's bytes."""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import numpy
import pytest
import torch
from cache_rig import PART_BYTES, Call, Rig, fill, look
from stories import Model, Story
from torch import nn
from torch.utils.checkpoint import checkpoint

import aio_ext
from offload.model.own_writes import OwnWrites
from offload.model.strays import Strays
from offload.tiers.home import SpareHostHome
from offload.tiers.weights.carrier import HostBuffer
from offload.tiers.weights.pin import Purpose
from offload.tiers.window import POISON, CopyWindow, SwapWindow
from offload.uses import HostWindows
from swapper import Lease

NUMEL = PART_BYTES // 4

pytestmark = pytest.mark.skipif(not hasattr(torch.UntypedStorage, "_swap_data_ptr_"), reason="windows are copies there")


class Uses:
    """Uses of a rig's units, each with a window, whose strays are looked for at the end."""

    def __init__(self, rig: Rig) -> None:
        self.rig = rig
        poison = aio_ext.Pattern(PART_BYTES, POISON)
        self.windows = {name: SwapWindow(NUMEL, torch.float32, poison) for name in rig.units}
        self.strays = {
            name: Strays(rig.units[name], window, OwnWrites([window.flat]), [name])
            for name, window in self.windows.items()
        }
        for strays in self.strays.values():
            strays._is_seen = True
            strays.begin_use()
        self.host = HostWindows(list(self.windows.values()), rig.weights.cache.leave_memory)

    def use(self, name: str, within: Callable[[torch.Tensor], Any] = lambda flat: None) -> Any:
        self.strays[name].begin_use()
        self.rig.acquire(name)
        pin = self.rig.pins[name][-1]
        self.host.open(pin)
        flat = self.windows[name].flat
        assert look(flat.data_ptr()) == look(pin.place.address)
        result = within(flat)
        self.strays[name].end_use()
        self.host.close(pin)
        self.rig.release(name)
        return result


def address_of(array: Any) -> int:
    return int(array.ctypes.data)


HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "an array": lambda flat: flat.numpy(),
    "an array of an array": lambda flat: numpy.asarray(flat[:])[:],
    "a memory view": lambda flat: numpy.asarray(memoryview(flat.numpy())),
    "a capsule": lambda flat: numpy.from_dlpack(flat.detach()),
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_memory_that_somebody_looks_at_beyond_the_use_is_no_other_units(holder: str):
    uses = Uses(Rig("abc", num_slots=1))
    kept = uses.use("a", HOLDERS[holder])
    for name in "bcbc":
        uses.use(name)
        assert look(address_of(kept)) == "a"


def test_each_use_brings_up_to_date_what_is_looked_at():
    rig = Rig("ab", num_slots=1)
    uses = Uses(rig)
    kept = uses.use("a", lambda flat: flat.numpy())
    rig.end_step("a")
    rig.update("a", "n")
    uses.use("b")
    assert look(address_of(kept)) == "a"
    uses.use("a")
    assert look(address_of(kept)) == "n"


def test_what_is_looked_at_is_filled_while_a_transform_is_under_way():
    rig = Rig("ab", num_slots=1)
    uses, kept = Uses(rig), []

    def function(x: torch.Tensor) -> torch.Tensor:
        uses.use("a", lambda flat: kept.append(flat.detach()))
        return x.square().sum()

    torch.func.grad(function)(torch.ones(2))
    address = uses.windows["a"].flat.data_ptr()
    rig.end_step("a")
    rig.update("a", "n")
    torch.func.grad(function)(torch.ones(2))
    uses.use("b")
    assert look(address) == "n"


def test_memory_that_nobody_looks_at_any_more_is_the_next_ones():
    uses = Uses(Rig("ab", num_slots=1))
    kept = [uses.use("a", lambda flat: flat.numpy())]
    address = address_of(kept[0])
    kept.clear()
    uses.strays["a"].drop()
    assert uses.windows["a"].flat.isnan().all()
    kept.append(uses.use("b", lambda flat: flat.numpy()))
    assert address_of(kept[0]) != address
    assert uses.rig.acquire("a") == address


def test_what_is_looked_at_outlives_the_engine():
    rig = Rig("a", num_slots=1)
    kept = Uses(rig).use("a", lambda flat: flat.numpy())
    del rig
    gc.collect()
    assert look(address_of(kept)) == "a"


def test_a_place_leaves_its_memory_once_nobody_else_reads_there():
    rig = Rig("ab", num_slots=1)
    uses = Uses(rig)
    rig.acquire("a", Purpose.LOOK)
    (look_of_another,) = rig.pins["a"]
    using = Call(lambda: uses.use("a", lambda flat: flat.numpy()))
    rig.looks.wait(using)
    look_of_another.release()
    assert look(address_of(using.result())) == "a"


def test_a_speculative_update_that_holds_the_unit_is_not_waited_for():
    rig = Rig("ab", num_slots=2)
    uses = Uses(rig)
    rig.hold("a")
    kept = uses.use("a", lambda flat: flat.numpy())
    slot = rig.lend("a")
    fill(slot.address, "n")
    assert look(address_of(kept)) == "a"


def test_resident_weights_stay_at_their_address_while_somebody_looks_there():
    rig = Rig("a", resident="a")
    uses = Uses(rig)
    kept = uses.use("a", lambda flat: flat.numpy())
    assert address_of(kept) == rig.homes[0].weights.address
    fill(address_of(kept), "w")  # a write to it is one to the weights
    assert uses.use("a", lambda flat: look(flat.data_ptr())) == "w"


def test_a_speculative_update_is_copied_to_where_somebody_looks():
    memory = aio_ext.Memory(2 * PART_BYTES)
    home = SpareHostHome(Lease(memory.address, PART_BYTES), Lease(memory.address + PART_BYTES, PART_BYTES))
    take_back = home.leave([])
    fill(home.spare_address, "n")
    home.flip()
    assert (home.address, look(home.address)) == (memory.address, "n")
    take_back()
    fill(home.spare_address, "m")
    home.flip()
    assert (home.address, look(home.address)) == (memory.address + PART_BYTES, "m")


def test_places_beyond_the_plan_are_used_again():
    spares: list[Any] = []
    first, second = HostBuffer(aio_ext.Memory(PART_BYTES)), HostBuffer(aio_ext.Memory(PART_BYTES))
    fill(first.address, "f")
    fill(second.address, "s")
    address = first.address
    first.leave(spares)()
    second.leave(spares)
    assert (second.address, look(first.address), look(second.address)) == (address, "f", "s")
    assert spares == []


def test_a_window_that_copies_keeps_its_memory_too():
    memory = aio_ext.Memory(PART_BYTES)
    fill(memory.address, "a")
    window = CopyWindow(NUMEL, torch.float32, aio_ext.Pattern(PART_BYTES, POISON))
    window.close()
    window.open(memory.address)
    kept = window.flat.data_ptr()
    window.keep(True)
    window.close()
    fill(memory.address, "n")
    assert look(kept) == "a"
    window.open(memory.address)
    assert window.flat.data_ptr() == kept and look(kept) == "n"


def test_a_window_that_copies_leaves_its_memory_to_an_array_that_looks_at_it():
    memory = aio_ext.Memory(PART_BYTES)
    fill(memory.address, "a")
    window = CopyWindow(NUMEL, torch.float32, aio_ext.Pattern(PART_BYTES, POISON))
    window.open(memory.address)
    array = window.flat.numpy()
    for letter in "ab":
        window.close()
        fill(memory.address, letter)
        window.open(memory.address)
        assert look(array.ctypes.data) == letter


class _KeepsWhenRecomputed(nn.Linear):
    """Its second call is the checkpoint's."""

    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if self.calls == 2:
            self.__dict__["kept"] = self.weight.detach().numpy()
        return super().forward(x)


@pytest.mark.filterwarnings("ignore:unit a")
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("kind", [nn.Linear, _KeepsWhenRecomputed])
def test_what_a_recomputed_forward_keeps_is_seen_before_its_backward_comes(kind: type[nn.Linear], reentrant: bool):
    def forward(model: Model, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(lambda x: model.b(model.a(x)), x.requires_grad_(), use_reentrant=reentrant)

    story = Story(Model(forward, a=kind(4, 4), b=nn.Linear(4, 4)), "a", "b")
    are_left = []
    story.model.b.register_forward_pre_hook(lambda *_: are_left.append(story.units[0].strays.are_left))
    story.train()
    assert are_left == [False, kind is _KeepsWhenRecomputed]
