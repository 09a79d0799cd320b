"""Text of what ``offload plan`` found, for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from offload.run.units import nbytes

Facts = dict[str, Any]

_WORTH = 1.1
"""Least gain of another batch that is worth a line at the top."""

_PARTS = {
    "states": "Each GPU holds a part of the states, all gradients, and weights as far as it has room.",
    "gradients": "Each GPU holds a part of the states and gradients, and weights as far as it has room.",
    "weights": "Each GPU holds a part of everything, and gathers a unit's weights for its use.",
}
_UNITS = {"device": (1 << 30, "GPU, GiB"), "host": (1 << 30, "host, GiB"), "nvme": (10**9, "NVMe, GB")}
"""By tier: memory is counted in GiB, drives in GB."""


_ACTIVATIONS = {
    "keep": "",
    "recompute": ", activations recomputed",
    "host": ", activations recomputed from host memory",
    "nvme": ", activations recomputed from host memory and NVMe",
}


def shown(facts: Facts) -> RenderableType:
    """The answer, what was asked, tables of bytes, seconds, ways and advice, code, and what was assumed."""
    return Group(*_parts(facts))


def _parts(facts: Facts) -> Iterator[RenderableType]:
    yield from _answer(facts)
    tables = [_memory(facts), _links(facts)] if facts["fits"] else []
    tables += [_best_batches(facts)]
    tables += [_ways(facts)] if facts["ways"] else []
    tables += [_advice(facts)] if facts["advice"] else []
    for table in tables:
        yield from ("", table)
    if facts["fits"]:
        yield from ("", *_wear(facts))
    if facts["code"]:
        yield from ("", "To train it:", "", *(f"    {line}".rstrip() for line in facts["code"].splitlines()))
    yield from ("", "Assumed:", *(f"- {line}" for line in facts["assumptions"]))
    if "plot" in facts:
        yield f"The picture is in {facts['plot']}."


def _answer(facts: Facts) -> Iterator[str]:
    yield from _verdict(facts)
    yield ""
    yield from _asked(facts)
    if not facts["fits"]:
        return
    yield ""
    if facts["shard"] is not None:
        yield _PARTS[facts["shard"]]
    if least := facts["least_host_memory_bytes"]:
        yield f"The least host memory that works is {_size(least)}{_each(facts['machine'])}."
    yield f"Without overlap a step would take {_seconds(facts['unoverlapped_seconds'])}."
    yield from _batches(facts)
    if facts.get("seconds_if_clipped"):
        yield f"Where every step is clipped, it takes {_seconds(facts['seconds_if_clipped'])}."
    if facts["hours"] is not None:
        yield f"{facts['tokens_wanted']:,} tokens take {_hours(facts['hours'])}."


def _verdict(facts: Facts) -> Iterator[str]:
    """The first lines: does it fit, how fast, and what limits; or what there is too little of."""
    if facts["fits"]:
        yield (
            f"It fits: {facts['tokens_per_second']:,.0f} tokens a second, a step of {_seconds(facts['seconds'])}, "
            f"limited by {_limit(facts)}."
        )
        yield from _faster(facts)
        return
    shortage, each = facts["shortage"], _each(facts["machine"])
    beside = f"activations of this batch, {_size(facts['activation_bytes'])}, leave"
    there = beside if shortage["kind"] == "device memory" else "there is"
    yield (
        f"It does not fit: {shortage['kind']} of {_size(shortage['needed_bytes'])}{each} is the least that works, and "
        f"{there} {_size(shortage['given_bytes'])}."
    )
    if shortage["kind"] in ("device memory", "memory for activations"):
        nvme = facts["machine"]["nvme"] is not None
        smaller_ways = {
            "keep": "--activations recompute, ",
            "recompute": f"--activations {'nvme' if nvme else 'host'}, ",
        }
        less = smaller_ways.get(facts["workload"]["activations"], "")
        option = "--gradient-accumulation-steps" if facts["workload"]["together"] else "--batch"
        smaller = (
            f"{option} {facts['largest_batch']}, the largest that fits"
            if facts["largest_batch"]
            else "a shorter --sequence (no batch fits)"
        )
        yield f"Try {less}{smaller}."
    lacks_host = shortage["kind"] == "host memory" or not any(row["fits"] for row in facts["best_batches"])
    if lacks_host and facts["machine"]["nvme"] is None:
        yield "A drive holds what host memory does not: give --nvme-path DIR, or --nvme for one of another machine."
    yield from _faster(facts)
    for way in facts["ways"]:
        if way["fits"]:
            yield f"With {way['options']} it fits: {way['tokens_per_second']:,.0f} tokens a second."


def _faster(facts: Facts) -> Iterator[str]:
    """The best batch of all, where another than what was asked for makes more tokens a second."""
    fitting = [row for row in facts["best_batches"] if row["fits"]]
    best = max(fitting, key=lambda row: row["tokens_per_second"], default=None)
    asked = facts["tokens_per_second"] if facts["fits"] else 0.0
    if best is None or best["tokens_per_second"] < _WORTH * asked:
        return
    if best["micro_batch"] is None:
        options = f"--batch {best['batch']}"
    else:
        number = best["batch"] // best["micro_batch"]
        options = f"--batch {best['micro_batch']} --gradient-accumulation-steps {number} --together"
    options += f" --activations {best['activations']}"
    options += f" --loss-rows {best['loss_rows']}" if best["loss_rows"] else ""
    yield f"With {options}{'' if facts['fits'] else ' it fits'}: {best['tokens_per_second']:,.0f} tokens a second."


def _asked(facts: Facts) -> Iterator[str]:
    """The model, the machine and the step in words."""
    model, machine, workload = facts["model"], facts["machine"], facts["workload"]
    active = f", {_billions(model['active'])} of them active" if model["active"] < 0.99 * model["parameters"] else ""
    trained = ""
    if model["trained"] < model["parameters"]:
        base = f" over a base in {facts['base']}" if facts["base"] else ""
        adapters = f"{facts['lora']}: " if facts["lora"] else ""
        trained = f"; {adapters}{model['trained']:,} of them are trained{base}"
    yield (
        f"model: {model['name']}, {_billions(model['parameters'])} parameters{active} ({model['layers']} layers of "
        f"{model['width']:,}){trained}"
    )
    host = f"{_size(machine['host_memory_bytes'] * machine['ranks'] // machine['nodes'])} of host memory"
    node = " a node" if machine["nodes"] > 1 else ""
    yield f"machine: {_where(machine)}, {host}{node} ({machine['host_memory_from']})"
    micro = f" x {workload['micro_batches']}" if workload["micro_batches"] > 1 else ""
    micro += " together" if workload["together"] else ""
    yield (
        f"step: batch {workload['batch']}{micro} of {workload['sequence']:,} tokens, {workload['precision']}, "
        f"{workload['optimizer']} with {workload['moments_dtype']} moments"
        + (f", masters in {workload['master_dtype']}" if workload["master_dtype"] != "fp32" else "")
        + (f", gradients sent in {workload['exchange_dtype']}" if workload["exchange_dtype"] != "auto" else "")
        + _ACTIVATIONS[workload["activations"]]
        + (f", logits of {workload['loss_rows']:,} tokens at a time" if workload["loss_rows"] else "")
        + (", every step clipped" if workload["clipped"] else "")
    )


def _batches(facts: Facts) -> Iterator[str]:
    largest, computing, workload = facts["largest_batch"], facts["compute_bound_batch"], facts["workload"]
    each = _each(facts["machine"])
    what = "number of micro-batches together" if workload["together"] else "batch"
    said = f"The largest {what} that fits is {largest:,}{each}"
    if computing is None:
        yield f"{said}, and up to it compute does not limit."
    elif computing <= workload["micro_batches" if workload["together"] else "batch"]:
        yield f"{said}. Compute limits: nothing takes longer."
    else:
        yield f"{said}; from {computing:,} on, compute limits."


def _where(machine: Facts) -> str:
    if machine["device"] == "cpu":
        return "this one, computing on its CPU"
    nodes = f" on {machine['nodes']} nodes" if machine["nodes"] > 1 else ""
    return f"{machine['ranks']} x {machine['device']}{nodes}" if machine["ranks"] > 1 else f"one {machine['device']}"


def _each(machine: Facts) -> str:
    return " for each GPU" if machine["ranks"] > 1 else ""


def _limit(facts: Facts) -> str:
    """The busiest part; what the order of a step takes beyond it, and waits, where that is worth a word."""
    at_least = max(facts["bound_seconds"], facts["schedule_seconds"])
    order, waits, worth = at_least - facts["bound_seconds"], facts["seconds"] - at_least, 0.05 * facts["seconds"]
    beyond = f", {_seconds(at_least)} as forward comes before backward" if order > worth else ""
    beyond += f", and {_seconds(waits)} of waits" if waits > worth else ""
    return f"{facts['limit']} ({_seconds(facts['bound_seconds'])}){beyond}"


def _tiers(facts: Facts) -> list[str]:
    return ["device", "host", "nvme"] if facts["machine"]["device"] != "cpu" else ["host", "nvme"]


def _memory(facts: Facts) -> Table:
    tiers = _tiers(facts)
    table = _table(f"Bytes{_each(facts['machine'])}", *(_UNITS[tier][1] for tier in tiers))
    rows = facts["memory"]
    for kind, places in rows.items():
        if any(places.get(tier) for tier in tiers):
            table.add_row(kind, *_amounts(places, tiers))
        elif kind == "spare copies" and facts["nvme_write_bytes"]:
            table.add_row("spare copies: no room", *_amounts({}, tiers))
    table.add_section()
    table.add_row("in all", *_amounts({tier: sum(row.get(tier, 0) for row in rows.values()) for tier in tiers}, tiers))
    return table


def _amounts(places: dict[str, int], tiers: list[str]) -> Iterator[str]:
    """Bytes in the unit of each tier; nothing where there is none."""
    for tier in tiers:
        nbytes, (size, _) = places.get(tier, 0), _UNITS[tier]
        yield "" if not nbytes else f"{nbytes / size:,.1f}" if nbytes >= size / 10 else f"{nbytes / size:.2g}"


def _links(facts: Facts) -> Table:
    table = _table("A step", "seconds", "of the step")
    for name, seconds in sorted(facts["link_seconds"].items(), key=lambda item: -item[1]):
        if seconds:
            table.add_row(name, f"{seconds:,.3g}", f"{seconds / facts['seconds']:.0%}")
    return table


def _best_batches(facts: Facts) -> Table:
    """Of a batch with which compute limits a larger one is no faster."""
    tiers = _tiers(facts)
    title = "Which batch is best, by what becomes of activations; and their bytes"
    if rows := facts["best_batches"][0]["loss_rows"]:
        title += f"; with logits of {rows:,} tokens at a time (--loss-rows {rows})"
    columns = ["largest", "compute from", "best", "tokens a second", "limited by", "written a token"]
    table = _table(title, *columns, *(_UNITS[tier][1] for tier in tiers))
    for row in facts["best_batches"]:
        name = row["activations"]
        if row["micro_batch"] is not None:
            name += f", together, {row['micro_batch']:,} each"
        if row["fits"]:
            computing = row["compute_bound_batch"]
            table.add_row(
                name, f"{row['largest_batch']:,}", "" if computing is None else f"{computing:,}",
                f"{row['batch']:,}", f"{row['tokens_per_second']:,.0f}", row["limit"],
                nbytes(row["written_bytes_a_token"]), *_amounts(row["activation_bytes"], tiers),
            )  # fmt: skip
        else:
            table.add_row(name, "none", "", "", "", row["shortage"], "", *("" for _ in tiers))
    return table


def _ways(facts: Facts) -> Table:
    tiers = _tiers(facts)
    title = "Ways to train it"
    table = _table(title, "tokens a second", "limited by", *(_UNITS[tier][1] for tier in tiers), "written a step, GB")
    for row in facts["ways"]:
        if row["fits"]:
            written = f"{row['nvme_write_bytes'] / 1e9:,.1f}"
            speed = f"{row['tokens_per_second']:,.0f}"
            table.add_row(row["way"], speed, row["limit"], *_amounts(row["memory"], tiers), written)
        else:
            table.add_row(row["way"], "does not fit", f"{row['shortage']}", *("" for _ in tiers), "")
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
        f"NVMe{_each(facts['machine'])}. SSDs rated for {nbytes(wear['rated_bytes'])} a node (--endurance) last "
        f"{wear['steps']:,} steps: {_hours(wear['hours'])} of training on {_billions(wear['tokens'])} tokens."
    )
    if facts["no_spare_copies"]:
        yield (
            "NVMe has no room for spare copies: no update begins during backward, and a write that fails loses what it "
            "was writing over. Give the drives more room."
        )


def _hours(hours: float) -> str:
    if hours < 48:
        return f"{hours:,.1f} hours"
    return f"{hours / 24:,.0f} days" if hours >= 240 else f"{hours / 24:,.1f} days"


def _billions(count: int) -> str:
    for size, name in ((10**12, "trillion"), (10**9, "billion"), (10**6, "million")):
        if count >= size:
            return f"{count / size:,.4g} {name}"
    return f"{count:,}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f} s" if seconds >= 100 else f"{seconds:.3g} s"


def _size(size: int) -> str:
    """As memory is counted."""
    gib = size / (1 << 30)
    return f"{gib:,.1f} GiB" if gib >= 1 or not size else f"{gib:.2g} GiB"
