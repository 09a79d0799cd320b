"""The figures for people."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from aio_ext.measure import READS, WRITES
from offload.bench.subject import ENGINE_BYTES, MIB, MODES, Setting


def table(result: dict[str, Any]) -> str:
    """Text of the figures of ``measure``."""
    return "\n".join(_lines(result))


def _lines(result: dict[str, Any]) -> Iterator[str]:
    setting = Setting(result["backend"], result["block_bytes"], result["queue_depth"])
    yield f"{result['path']} ({result['file_system']}, Linux {result['kernel']}, {result['cpus']} CPUs): {setting}"
    cache = result["cache_bytes"]
    if cache:
        yield f"last-level cache: {cache // MIB} MiB; what rests in it is moved faster on some machines"
    yield from _contest(result, "as the engine's buffers")
    yield from _contest(result["in_flight"], "what is in flight")
    yield f"mixed is {READS} bytes read to {WRITES} written; q = {result['mixed_q']} (1: they share the drive)"
    if result["huge_bytes"] < ENGINE_BYTES:
        yield (
            f"only {result['huge_bytes'] // MIB} of {ENGINE_BYTES // MIB} MiB of memory rest on huge pages: expect less"
        )
    if result["fio"] and not result["fio"]["huge_pages"]:
        yield "fio ran on ordinary pages: none of 2 MiB are reserved (`sysctl vm.nr_hugepages=64` reserves some)"
    if "sustained" in result:
        s = result["sustained"]
        after = f"{s['last_gib_per_s']:.2f} GiB/s after {s['written_gib']} GiB"
        yield f"sustained writes: {s['first_gib_per_s']:.2f} at first, {after}"
    for kind in ("read", "write") if "tensors" in result else ():
        t = result["tensors"][kind]
        rates = f"{t['small_gib_per_s']:.2f} GiB/s, {t['ratio']:.2f} of {t['large_gib_per_s']:.2f} in large requests"
        yield f"{result['tensors']['count']} small tensors, {kind}: {rates}"
    yield from result["unavailable"].values()


def _contest(found: dict[str, Any], what: str) -> Iterator[str]:
    fio = found["fio"]
    yield (
        f"memory {found['footprint_bytes'] / MIB:g} MiB, {what}"
        + (f"; fio has {fio['queue_depth']} blocks in flight:\n" if fio else ":\n")
        + f"{'':8}{'GiB/s':>8}{'spread':>16}{'CPU s/GiB':>11}"
        + (f"{'fio':>8}{'ratio':>8}{'its CPU':>9}" if fio else "")
    )
    for mode in MODES:
        samples = found["samples_gib_per_s"][mode]
        spread = f"{min(samples):.2f} to {max(samples):.2f}"
        line = f"{mode:8}{found[f'{mode}_gib_per_s']:8.2f}{spread:>16}{found['cpu_seconds_per_gib'][mode]:11.3f}"
        if fio:
            line += f"{fio[f'{mode}_gib_per_s']:8.2f}{fio['ratio'][mode]:8.2f}{fio['cpu_seconds_per_gib'][mode]:9.3f}"
        yield line
