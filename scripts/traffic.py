#!/usr/bin/env python3
"""Bytes that steps move, against what they must: programs of all kinds, at several budgets.

Tests that compare bits see nothing of a weight that is read twice. Here each program trains for some steps with the
least host memory, with half of what it can use and with all of it. What the store reads and writes in the last of them
is compared with the plan's own numbers, with bounds that are worked out from PyTorch alone (``_traffic_needs.py``), and
with an equivalent program, where there is one.

    python scripts/traffic.py                     # all of it
    python scripts/traffic.py --only together     # cases whose name has the word
    python scripts/traffic.py --zoo --seconds 600 # models of the zoo, as many as the time has room for
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from _traffic_cases import Case, cases, of_experts, of_zoo, seeded
from _traffic_needs import Bytes, Needs, Plain, bound

from offload import BudgetError, OffloadEngine
from offload.plan.plan import Plan

WARM, MEASURED = 4, 4
OPTIONS: dict[str, Any] = {"lr": 1e-3, "tile_bytes": 65536}
SHARE = 1.1
"""Of a bound, that counts as reached."""
SHARE_OF_BEST = 1.35
"""The same of what a cache reads that knows the future, and waits for no transfer."""


@dataclass(frozen=True)
class Seen:
    """Bytes and transfers of a step, by what was moved and in which direction."""

    plan: Plan
    moved: Counter[str]
    counts: Counter[str]
    by_unit: Counter[str]
    store_read: float
    store_written: float
    host_bytes: int
    budget: int

    def total(self, track: str, *, but: str = "activations") -> float:
        return sum(nbytes for name, nbytes in self.moved.items() if name.startswith(track) and but not in name)


def all_cases() -> Iterator[Case]:
    yield from cases()
    yield from of_experts()


def budgets(case: Case, folder: Path) -> dict[str, int]:
    """Host memory: the least, half of the way, and all that is of use."""
    options = {**OPTIONS, **case.options}
    try:
        OffloadEngine(seeded(case.make), nvme_path=folder, host_memory=1, **options).close()
    except BudgetError as error:
        least = error.needed_bytes
    with OffloadEngine(seeded(case.make), nvme_path=folder, host_memory=1 << 30, **options) as engine:
        most = engine.plan.host_bytes
    return {"least": least, "half": (least + most) // 2, "all": most}


def measure(case: Case, budget: int, folder: Path) -> Seen:
    """Train some steps, and count in the last ones."""
    options = {**OPTIONS, **case.options}
    with OffloadEngine(seeded(case.make), nvme_path=folder, host_memory=budget, **options) as engine:
        parts = engine._session.parts
        store, trace, transfer = parts.tiers.store, parts.meter.trace, parts.meter.trace.transfer
        moved: Counter[str] = Counter()
        counts: Counter[str] = Counter()
        by_unit: Counter[str] = Counter()
        counting = False

        def counted(track: str, name: str, nbytes: int, ticket: Any) -> Any:
            if counting:
                kind = f"{track} {name.split(' of ')[0]}" if " of " in name else f"{track} activations"
                moved[kind] += nbytes
                counts[kind] += 1
                by_unit[f"{track} {name}"] += nbytes
            return transfer(track, name, nbytes, ticket)

        trace.transfer = counted
        for index in range(WARM):
            case.step(engine, index)
        engine.synchronize()
        counting, before = True, None if store is None else store.statistics()
        for index in range(WARM, WARM + MEASURED):
            case.step(engine, index)
        engine.synchronize()
        counting, after = False, None if store is None else store.statistics()
        plan, (host_bytes, _) = engine.plan, engine._session.memory_bytes()
    for of_steps in (moved, counts, by_unit):
        for name in of_steps:
            of_steps[name] /= MEASURED  # type: ignore[assignment]
    reads = 0.0 if store is None else (after.read.bytes - before.read.bytes) / MEASURED
    writes = 0.0 if store is None else (after.write.bytes - before.write.bytes) / MEASURED
    return Seen(plan, moved, counts, by_unit, reads, writes, host_bytes, budget)


def judge(case: Case, place: str, seen: Seen, needs: Needs) -> Iterator[str]:
    """What is more than it must be, in words."""
    plan, moved = seen.plan, seen.moved
    read, written = seen.total("read"), seen.total("write")
    if place == "all" and (read or written):
        yield f"all is resident, and {read:,.0f} are read and {written:,.0f} written"
    unit = max((item.unit.read_bytes(plan.formats.weights) for item in plan.units), default=0)
    slack = 2 * unit + 2 * plan.staging.tile_bytes
    if max(abs(seen.store_read - read), abs(seen.store_written - written)) > slack:  # what is under way at the ends
        yield f"records: {read + written:,.0f}, the store: {seen.store_read + seen.store_written:,.0f}"
    yield from _against_needs(case, seen, needs, slack)
    if case.is_planned and needs.num_backwards and not case.takes_weights_out:
        yield from _against_plan(seen, slack)
    if moved["read activations"] > SHARE * moved["write activations"]:
        yield f"activations: {moved['read activations']:,.0f} read, {moved['write activations']:,.0f} written"
    if seen.host_bytes > seen.budget:
        yield f"host memory: {seen.host_bytes:,} taken, {seen.budget:,} allowed"


def _against_needs(case: Case, seen: Seen, needs: Needs, slack: int) -> Iterator[str]:
    least, moved = bound(seen.plan, needs), seen.moved
    weights, each = moved["read weights"], least.weights_read_each / case.shared
    if not case.takes_weights_out:
        if weights > SHARE * each + slack:
            yield f"weights: {weights:,.0f} read, {each:,.0f} needed"
        elif case.shared == 1 and weights > SHARE_OF_BEST * least.weights_read + slack:
            yield f"weights: {weights:,.0f} read, {least.weights_read:,.0f} with a cache that knows the future"
    grads = least.grads * max(needs.num_backwards // case.shared, 1) * case.gives
    for kind, most in (
        ("write weights", least.weights_written),
        ("read states", least.states),
        ("write states", least.states),
        ("read gradients", grads),
        ("write gradients", grads),
    ):
        if moved[kind] > SHARE * most + (seen.plan.staging.tile_bytes if most else 0):
            yield f"{kind}: {moved[kind]:,.0f}, {most:,.0f} needed"


def _against_plan(seen: Seen, slack: int) -> Iterator[str]:
    weights = max((item.unit.numel * seen.plan.formats.weights for item in seen.plan.units), default=0)
    # The plan reads nothing again that lies in a slot as a step turns to backward or to the next one. Where compute is
    # almost nothing, an update may have taken the slot by then.
    in_slots = 2 * seen.plan.staging.num_slots * weights
    for track, planned, more, least in (
        ("read", seen.plan.step_read_bytes, in_slots, 0.6),
        ("write", seen.plan.step_write_bytes, 0, 0.8),
    ):
        nbytes = seen.total(track)
        if nbytes > SHARE * planned + slack + more or nbytes < least * planned - slack:
            yield f"{track}: {nbytes:,.0f}, {planned:,} planned"
    transfers = sum(count for kind, count in seen.counts.items() if "activations" not in kind)
    if transfers > 1.5 * seen.plan.step_transfers + 8:
        yield f"{transfers:,.0f} transfers, {seen.plan.step_transfers:,} planned"


def needs_of(case: Case) -> Needs:
    """What a step of it needs, by PyTorch."""
    model = seeded(case.needs_of or case.make)
    case.step(Plain(model), 0)  # what a first step alone does is not looked at
    return Needs.of(model, case.step, WARM)


def line(case: Case, place: str, seen: Seen, least: Bytes) -> str:
    mib = 1 << 20
    plan = seen.plan
    read, written = seen.total("read"), seen.total("write")
    return (
        f"{case.name:<40} {place:<6}{read / mib:8.2f}{plan.step_read_bytes / mib:8.2f}"
        f"{written / mib:8.2f}{plan.step_write_bytes / mib:8.2f}"
        f"{seen.moved['read weights'] / mib:9.2f}{least.weights_read / mib:8.2f}{least.weights_read_each / mib:8.2f}"
        f"{sum(seen.counts.values()):7.0f}{plan.step_transfers:6}{plan.staging.num_slots:4}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[], help="words that a case's name has")
    parser.add_argument("--zoo", action="store_true", help="the models of the zoo")
    parser.add_argument("--seed", type=int, default=0, help="of their order")
    parser.add_argument("--seconds", type=float, default=float("inf"))
    parser.add_argument("--budgets", nargs="*", default=["least", "half", "all"])
    parser.add_argument("--units", action="store_true", help="bytes of each unit")
    parser.add_argument("--path", default=None, help="a folder on the drive")
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    chosen = list(of_zoo() if options.zoo else all_cases())
    if options.zoo:
        random.Random(options.seed).shuffle(chosen)
    print(
        f"{'MiB a step':<46}{'read':>8}{'plan':>8}{'written':>8}{'plan':>8}{'weights':>9}{'best':>8}{'each':>8}"
        "  moves  plan slots"
    )
    end, num, findings = time.monotonic() + options.seconds, 0, 0
    reads: dict[tuple[str, str], float] = {}
    with tempfile.TemporaryDirectory(dir=options.path) as name:
        for case in chosen:
            if options.only and not any(word in case.name for word in options.only):
                continue
            if time.monotonic() > end:
                break
            num += 1
            try:
                needs, places = needs_of(case), budgets(case, Path(name))
                for place in options.budgets:
                    seen = measure(case, places[place], Path(name))
                    reads[case.name, place] = seen.total("read")
                    print(line(case, place, seen, bound(seen.plan, needs)), flush=True)
                    found = list(judge(case, place, seen, needs))
                    if case.like is not None and (case.like, place) in reads:
                        other = reads[case.like, place]
                        if seen.total("read") > 1.2 * other + 2 * seen.plan.staging.slot_bytes:
                            found.append(f"{seen.total('read'):,.0f} read, {other:,.0f} by {case.like}")
                    findings += len(found)
                    for finding in found:
                        print(f"    FINDING {finding}", flush=True)
                    if options.units and found:
                        for what, nbytes in sorted(seen.by_unit.items()):
                            print(f"        {what:<60}{nbytes:12,.0f}")
            except Exception:
                findings += 1
                print(f"{case.name}: {traceback.format_exc()[-900:]}", flush=True)
    print(f"{num} cases, {findings} findings")
    return int(findings > 0)


if __name__ == "__main__":
    sys.exit(main())
