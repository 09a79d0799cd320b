"""Run the campaign: plain PyTorch, the engine in RAM, and the engine with the least budget and the rest on NVMe.

PYTHONPATH=tests python -m misuses [NAME ...] [--only PART] [--family NAME] [--markdown]
"""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import sys
import time
from collections import Counter

import torch

from misuses import FAMILIES
from misuses.case import Case
from misuses.judging import Verdict, judge
from misuses.running import Outcome, run
from misuses.table import markdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="cases of exactly this name")
    parser.add_argument("--only", action="append", default=[], metavar="PART", help="cases with this in their name")
    parser.add_argument("--family", action="append", default=[], metavar="NAME", help="families of this name")
    parser.add_argument("--markdown", action="store_true", help="write the table docs/outside-table.md to the output")
    parser.add_argument("--patience", type=float, default=1.0, help="a factor for the time that a case has")
    parser.add_argument("--at-once", type=int, default=3, help="processes")
    parser.add_argument("-v", action="store_true", help="print where an error was raised")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    progress = sys.stderr if arguments.markdown else sys.stdout
    start = time.monotonic()
    verdicts: list[Verdict] = []

    def done(case: Case, outcomes: dict[str, Outcome]) -> None:
        verdict = judge(case, outcomes)
        verdicts.append(verdict)
        mark = f"  <-- {verdict.fault}" if verdict.fault else ""
        reason = " ".join(verdict.reason.split())[:240]
        print(
            f"{case.family:<20}{case.name:<58}{verdict.result.value:<15}{verdict.seconds:>6.1f}  {reason}{mark}",
            file=progress,
            flush=True,
        )
        if arguments.v and verdict.trace:
            print("    " + verdict.trace.replace("\n", "\n    "), file=progress, flush=True)

    for family in FAMILIES:
        chosen = [case for case in family.cases if _chosen(case, arguments)]
        if not chosen:
            continue
        missing = {name for case in chosen for name in case.needs if importlib.util.find_spec(name) is None}
        chosen = [case for case in chosen if not missing & set(case.needs)]
        for name in family.preload if chosen else ():
            importlib.import_module(name)
        run(chosen, done, at_once=arguments.at_once, patience=arguments.patience)
    order = {case.name: index for index, case in enumerate(case for family in FAMILIES for case in family.cases)}
    verdicts.sort(key=lambda verdict: order[verdict.case.name])
    if arguments.markdown:
        print(markdown(verdicts), end="")
    counts = Counter(verdict.result.value for verdict in verdicts)
    failed = sum(bool(verdict.fault) for verdict in verdicts)
    summary = ", ".join(f"{count} {name}" for name, count in counts.most_common())
    print(f"{len(verdicts)} cases in {time.monotonic() - start:.0f} s: {summary}; {failed} failed", file=progress)
    sys.exit(failed > 0)


def _chosen(case: Case, arguments: argparse.Namespace) -> bool:
    if not arguments.names and not arguments.only and not arguments.family:
        return True
    by_name = case.name in arguments.names or any(part in case.name for part in arguments.only)
    return by_name or case.family in arguments.family


if __name__ == "__main__":
    main()
