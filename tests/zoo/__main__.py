"""Train the whole zoo: plain PyTorch, the engine in RAM, and the engine with everything on NVMe, in several ways.

PYTHONPATH=tests python -m zoo --ways all > zoo.txt
"""

from __future__ import annotations

import argparse
import signal
import sys
import tempfile
import time
import warnings
from typing import Any

from zoo import SPECIMENS
from zoo.judging import Reference, differences
from zoo.specimen import Specimen
from zoo.training import in_engine
from zoo.ways import WAYS

_SECONDS_MAX = 180
"""A specimen that takes longer hangs."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="specimens (default: all)")
    parser.add_argument("--ways", choices=["all", *WAYS], default="default", help="how NVMe or a device is used")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    signal.signal(signal.SIGALRM, _too_long)
    chosen = [SPECIMENS[name] for name in arguments.names] or list(SPECIMENS.values())
    ways = WAYS if arguments.ways == "all" else {arguments.ways: WAYS[arguments.ways]}
    print(f"{'family':<16}{'specimen':<32}{'of the tolerance':>17}{'seconds':>9}  verdict", flush=True)
    failed = 0
    for specimen in chosen:
        start = time.monotonic()
        share, faults = _train(specimen, ways)
        failed += bool(faults)
        verdict = "; ".join(faults) or "the same bits"
        seconds = time.monotonic() - start
        print(f"{specimen.family:<16}{specimen.name:<32}{share:>17.4f}{seconds:>9.1f}  {verdict}", flush=True)
    print(f"{len(chosen)} specimens, {len(ways)} ways, {failed} failed")
    sys.exit(failed > 0)


def _train(specimen: Specimen, ways: dict[str, dict[str, Any]]) -> tuple[float, list[str]]:
    """The share of the tolerance that the engine in RAM takes, and what went wrong."""
    signal.alarm(_SECONDS_MAX)
    try:
        reference = Reference.of(specimen)
        in_ram = in_engine(specimen)
        share, where = reference.excess(in_ram)
        faults = [f"{where} is far from PyTorch's"] if share > 1 else []
        for way, options in ways.items():
            with tempfile.TemporaryDirectory() as folder:
                differing = differences(in_ram, in_engine(specimen, nvme_path=folder, **options))
            faults += [f"{way}: {len(differing)} differ, {differing[0]} first"] if differing else []
        return share, faults
    except Exception as error:
        return float("nan"), [f"{type(error).__name__}: {str(error)[:160]}"]
    finally:
        signal.alarm(0)


def _too_long(number: int, frame: Any) -> None:
    raise TimeoutError(f"not done after {_SECONDS_MAX} s: it hangs")


if __name__ == "__main__":
    main()
