"""The placement: a pure function from units and budgets to a tier for every record, decided once, before step 1."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from offload.errors import BudgetError
from offload.optim.formats import Formats
from offload.plan.choice import Placements
from offload.plan.judge import Conditions
from offload.plan.plan import Plan, TilesOf
from offload.plan.routing import EVERYWHERE, Routing
from offload.units import UnitSpec
from swapper import readable_bytes


def make_plan(
    units: Sequence[UnitSpec],
    formats: Formats,
    tiles_of: TilesOf | None,
    host_bytes: int,
    nvme_bytes: int,
    tile_bytes: int | None = None,
    compute_bytes: int = 0,
    speculative: bool = False,
    num_backwards: int = 1,
    rereads: bool = False,
    conditions: Conditions | None = None,
    routing: Routing = EVERYWHERE,
    placements_of: Callable[..., Placements] = Placements,
) -> Plan:
    """Give every kind of every unit a tier, within the budgets, by traffic saved per byte.

    Access is cyclic, so what is resident in RAM is fixed and spread evenly over the units, and the disk always has
    something to do. In a step of ``num_backwards`` = k micro-batches, a byte of weights saves 2k + 1 transfers (read
    for each forward and backward, written), one of states two, one of gradients 2k. With k = 1 states come before
    gradients: theirs are both after the verdict, where the disk has most to do if a step is clipped. ``speculative``
    tells that streamed units may be updated during backward: then units are resident with their weights and states
    together, which is what such an update moves, and the others have work for the disk in forward and in backward;
    ``rereads`` tells that such an update reads the weights anew, as where a device computes. A tied weight in pieces
    would go over the disk for each of its sites; it is always resident, and so are its gradients. ``tiles_of`` is None
    where nothing is trained. ``tile_bytes=None`` lets the tile shrink when memory is short, and grow where a device
    computes and nothing goes to NVMe. ``compute_bytes`` are taken beside all that.

    Buffers take memory that records could be stored in, and small tiles are more transfers. So every staging that fits
    is filled, and the plan is the one whose step costs least (``Records.step_cost``). More memory never costs more.
    With
    ``conditions`` those that cost least are played, and so are those of smaller budgets (``Placements.by_playing``).
    ``routing`` tells of experts how many of them are expected to move. ``placements_of`` makes placements, or finds
    those that it has made of the same arguments.

    Raises ``BudgetError``, naming the least budget that works.
    """
    placements = placements_of(
        tuple(units),
        formats,
        tiles_of,
        tile_bytes,
        compute_bytes,
        speculative,
        num_backwards,
        rereads,
        conditions,
        routing,
    )
    everything_bytes = placements.everything.total_bytes
    if everything_bytes <= host_bytes:
        return placements.everything.plan(host_bytes)
    if nvme_bytes == 0 and any(unit.stored_numel for unit in units):
        raise BudgetError(
            "host_memory is too small to hold everything and there is no nvme_path: "
            f"{readable_bytes(everything_bytes)} are needed, {readable_bytes(host_bytes)} are given. "
            "Give an nvme_path, or raise host_memory to {needed}.",
            everything_bytes,
        )
    least_on_nvme = everything_bytes - host_bytes  # whatever is chosen
    choose = placements.choose if least_on_nvme <= nvme_bytes else placements.by_cost
    plan = choose(host_bytes).plan(host_bytes)
    needed = sum(plan.nvme_bytes.values())
    if needed > nvme_bytes:
        raise BudgetError(
            f"nvme_capacity is too small: {readable_bytes(needed)} must be stored on NVMe where host memory is "
            f"{readable_bytes(host_bytes)}, {readable_bytes(nvme_bytes)} are given. "
            "Raise nvme_capacity to {needed}, or raise host_memory.",
            needed,
            budget="nvme_capacity",
        )
    return plan
