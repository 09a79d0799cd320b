"""Text of what ``offload plan`` found, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from offload.run.units import nbytes

Facts = dict[str, Any]

_PARTS = {
    "states": "Each GPU holds a part of the states, all gradients, and weights as far as it has room.",
    "gradients": "Each GPU holds a part of the states and gradients, and weights as far as it has room.",
    "weights": "Each GPU holds a part of everything, and gathers a unit's weights for its use.",
}


def shown(facts: Facts) -> RenderableType:
    """The answer, a table of bytes, one of seconds, what would help, and what was assumed."""
    return Group(*_parts(facts))


def _parts(facts: Facts) -> Iterator[RenderableType]:
    yield from _answer(facts)
    tables = [_memory(facts), _links(facts)] if facts["fits"] else []
    tables += [_advice(facts)] if facts["advice"] else []
    for table in tables:
        yield from ("", table)
    if facts["fits"]:
        yield from ("", *_wear(facts))
    yield from ("", "Assumed:", *(f"- {line}" for line in facts["assumptions"]))
    if "plot" in facts:
        yield f"The picture is in {facts['plot']}."


def _answer(facts: Facts) -> Iterator[str]:
    model, machine, workload = facts["model"], facts["machine"], facts["workload"]
    yield f"{model['parameters']:,} parameters ({model['layers']} layers of {model['width']:,}), {_where(machine)}"
    clipped = ", every step clipped" if workload["clipped"] else ""
    micro = f" x {workload['micro_batches']}" if workload["micro_batches"] > 1 else ""
    yield (
        f"batch {workload['batch']}{micro} of {workload['sequence']:,} tokens, {workload['precision']}, "
        f"{workload['optimizer']} with {workload['moments_dtype']} moments"
        + (", activations recomputed" if workload["recomputed"] else "")
        + clipped
    )
    yield ""
    if not facts["fits"]:
        yield from _shortage(facts)
        return
    yield (
        f"It fits. A step takes {_seconds(facts['seconds'])}: {facts['tokens_per_second']:,.0f} tokens a second, "
        f"limited by {_limit(facts)}."
    )
    if facts["shard"] is not None:
        yield _PARTS[facts["shard"]]
    if (least := facts["least_host_memory_bytes"]) is not None:
        yield f"The least host memory is {_size(least)}{_each(machine)}."
    yield f"One part after the other would take {_seconds(facts['unoverlapped_seconds'])}."
    if facts["limit"] == "compute":
        yield "The run is compute-bound: no link takes longer than compute."
    else:
        yield f"From a batch of {facts['compute_bound_batch']:,} on, the run is compute-bound."
    if facts.get("seconds_if_clipped"):
        yield f"Where every step is clipped, it takes {_seconds(facts['seconds_if_clipped'])}."


def _where(machine: Facts) -> str:
    if machine["device"] == "cpu":
        return "on this machine's CPU"
    nodes = f" on {machine['nodes']} nodes" if machine["nodes"] > 1 else ""
    return f"{machine['ranks']} x {machine['device']}{nodes}" if machine["ranks"] > 1 else f"on one {machine['device']}"


def _each(machine: Facts) -> str:
    return " for each GPU" if machine["ranks"] > 1 else ""


def _shortage(facts: Facts) -> Iterator[str]:
    shortage = facts["shortage"]
    each = _each(facts["machine"])
    yield (
        f"It does not fit: {shortage['kind']} of {_size(shortage['needed_bytes'])}{each} is the least that works, and "
        f"there is {_size(shortage['given_bytes'])}."
    )
    if shortage["kind"] == "device memory":
        recomputed = "" if facts["workload"]["recomputed"] else "--activation-checkpointing, "
        yield (
            f"That is what is left: activations of this batch take {_size(facts['activation_bytes'])}. Try "
            f"{recomputed}a smaller --batch or a shorter --sequence."
        )


def _limit(facts: Facts) -> str:
    """The busiest part; and what waits cost beyond it, where that is worth a word."""
    waits = facts["seconds"] - facts["bound_seconds"]
    beyond = f", and {_seconds(waits)} of waits" if waits > 0.05 * facts["seconds"] else ""
    return f"{facts['limit']} ({_seconds(facts['bound_seconds'])}){beyond}"


def _memory(facts: Facts) -> Table:
    on_device = facts["machine"]["device"] != "cpu"
    tiers = ["device", "host", "nvme"] if on_device else ["host", "nvme"]
    table = _table(f"Bytes{_each(facts['machine'])}", *({"nvme": "NVMe"}.get(tier, tier) for tier in tiers))
    rows = facts["memory"]
    for kind, places in rows.items():
        if any(places.get(tier) for tier in tiers):
            table.add_row(kind, *(_size(places.get(tier, 0)) if places.get(tier) else "" for tier in tiers))
    table.add_section()
    table.add_row("in all", *(_size(sum(places.get(tier, 0) for places in rows.values())) for tier in tiers))
    return table


def _links(facts: Facts) -> Table:
    table = _table("A step", "seconds", "of the step")
    for name, seconds in sorted(facts["link_seconds"].items(), key=lambda item: -item[1]):
        if seconds:
            table.add_row(name, f"{seconds:,.3g}", f"{seconds / facts['seconds']:.0%}")
    return table


def _advice(facts: Facts) -> Table:
    title = "What would help most" if facts["fits"] else "With one of these it fits"
    table = _table(title, "a step then", "tokens a second", *(["faster"] if facts["fits"] else []))
    for row in facts["advice"]:
        gain = [f"{row['gain']:.2f} x"] if facts["fits"] else []
        table.add_row(row["change"], _seconds(row["seconds"]), f"{row['tokens_per_second']:,.0f}", *gain)
    return table


def _table(title: str, *columns: str) -> Table:
    """An empty table: names, and beside them columns of numbers."""
    table = Table("", title=title, title_justify="left")
    for name in columns:
        table.add_column(name, justify="right")
    return table


def _wear(facts: Facts) -> Iterator[str]:
    wear = facts["endurance"]
    if not wear["written_bytes"]:
        yield "Nothing is written to SSDs."
        return
    yield (
        f"A step reads {nbytes(facts['nvme_read_bytes'])} and writes {nbytes(facts['nvme_write_bytes'])} on "
        f"NVMe{_each(facts['machine'])}. SSDs rated for {nbytes(wear['rated_bytes'])} a node last {wear['steps']:,} "
        f"steps, {_days(wear['days'])} of training."
    )


def _days(days: float) -> str:
    return f"{days:,.0f} days" if days >= 10 else f"{days:,.1f} days" if days >= 1 else f"{days * 24:,.1f} hours"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _size(size: int) -> str:
    """As memory is counted."""
    power = min((max(size, 1).bit_length() - 1) // 10, 4)
    return f"{size / (1 << 10 * power):,.1f} {('B', 'KiB', 'MiB', 'GiB', 'TiB')[power]}"
