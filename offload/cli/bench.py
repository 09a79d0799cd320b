"""``offload bench``."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from offload.cli.console import Json, show_answer


class Backend(str, Enum):
    """Backends that move bytes."""

    IO_URING = "io_uring"
    THREADS = "threads"
    PORTABLE = "portable"


# fmt: off
def bench(
    paths: Annotated[list[Path], Argument(metavar="PATH", help="Directories on the drives to measure.")],
    full: Annotated[bool, Option("--full", help="Try every combination, not only the promising ones.")] = False,
    backend: Annotated[list[Backend] | None, Option(
        metavar="NAME", show_default=False, help="Only io_uring, threads or portable; may be given again.")] = None,
    sustained: Annotated[float | None, Option(metavar="GiB", help="Also write so much, to fill a fast cache.")] = None,
    tensors: Annotated[int | None, Option(metavar="N", min=1, help="Also move N tensors of 64 KiB to 1 MiB.")] = None,
    pairs: Annotated[int, Option(metavar="N", min=1, help="Measurements, in turns with fio.")] = 5,
    size: Annotated[int | None, Option(metavar="MiB", min=1, help="Size of the file (default: 1024).")] = None,
    plot: Annotated[Path | None, Option(metavar="PNG", help="Draw bandwidth over depth and block size.")] = None,
    no_fio: Annotated[bool, Option("--no-fio", help="Do not run fio.")] = False,
    no_profile: Annotated[bool, Option("--no-profile", help="Do not keep the profile.")] = False,
    any_file_system: Annotated[bool, Option("--any-file-system", help="Also in memory or over a network.")] = False,
    json: Json = False,
) -> int:
    # fmt: on
    """Measure drives, and keep what engines load.

    Finds the best I/O settings of each PATH in one to two minutes, and compares them with fio. The profile is stored in
    $XDG_CONFIG_HOME/offload/io_profiles.json. Nothing else is left behind, however it ends.
    """
    from aio_ext.profile import profiles_path
    from offload.bench.measurement import Options, measure
    from offload.bench.table import table

    options = Options(
        backends=[each.value for each in backend or ()],
        full=full,
        pairs=pairs,
        size=size and size << 20,
        fio=not no_fio,
        sustained_gib=sustained,
        num_tensors=tensors,
        plot=plot,
        keep_profile=not no_profile,
        any_file_system=any_file_system,
    )
    results = [measure(path, options, show_progress=not json) for path in paths]
    kept = [] if no_profile else [f"profile: {profiles_path()}"]
    facts = results[0] if len(results) == 1 else {**results[0], "paths": results}
    show_answer(facts, "\n".join([*map(table, results), *kept]), to_programs=json)
    return 0
