"""All of it for one path: the search, the comparison, and the profile that the engine loads by itself."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tqdm import tqdm

from aio_ext import available_backends
from aio_ext.profile import save_profile
from offload.bench.contest import compare
from offload.bench.further import sustained, tensors
from offload.bench.plot import plot
from offload.bench.result import profile_of, result_of
from offload.bench.search import default, num_probes, search
from offload.bench.subject import MODES, USES, subject

FIO_MISSING = "fio is not installed: nothing to compare with (`apt-get install fio`)"


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of a measurement beside the path. ``size`` is the file's in bytes; None: 1 GiB, or a quarter of the
    room."""

    backends: Sequence[str] = ()
    full: bool = False
    pairs: int = 5
    size: int | None = None
    fio: bool = True
    sustained_gib: float | None = None
    num_tensors: int | None = None
    plot: Path | None = None
    keep_profile: bool = True
    any_file_system: bool = False


def measure(path: Path, options: Options, *, show_progress: bool) -> dict[str, Any]:
    """Find the best settings of a path, and compare them with fio; see ``result.py`` for the figures.

    Works in a file that it makes itself and that has no name from then on: nothing is left behind, however it ends.
    Raises ``BenchError`` for a path that cannot be measured.
    """
    backends = list(options.backends) or [name for name in available_backends() if name != "portable"] or ["portable"]
    has_fio = shutil.which("fio") is not None
    with subject(path, options.size, options.any_file_system) as it:
        with tqdm(
            total=num_probes(backends, options.full) + options.pairs * len(MODES),
            disable=None if show_progress else True,
            leave=False,
            file=sys.stderr,
        ) as bar:
            bar.set_description("first write")
            with it.range(default(backends[0])) as range_:  # blocks never written are a matter of the file system
                range_.measure("write", it.nbytes)
                it.bytes_per_s = range_.measure("read", it.nbytes // 4).bytes_per_s
            setting = search(it, bar, backends, options.full)
            result = result_of(it, setting, *compare(it, setting, has_fio and options.fio, options.pairs, bar))
            if options.fio and not has_fio:
                result["unavailable"]["fio"] = FIO_MISSING
            if options.sustained_gib:
                result["sustained"] = sustained(it, setting, options.sustained_gib, bar)
            if options.num_tensors:
                result["tensors"] = tensors(it, setting, options.num_tensors, bar)
        if options.plot:
            plot(it, options.plot)
        result["tried"] = [
            {**asdict(s), **{use: [round(v, 3) for v in found[use]] for use in USES}} for s, found in it.tried.items()
        ]
    if options.keep_profile:
        save_profile(path, profile_of(result))
    return result
