"""Tests, each in a process of its own and several at a time: an address that is none ends one test, and one that hangs
is interrupted. Prints a line for each that did not pass, with the end of what it said, and their count."""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor

_GRACE_S = 10
_SAID_LINES = 25
_PYTEST = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+")
    parser.add_argument("--jobs", type=int, default=6)
    parser.add_argument("--seconds", type=float, default=90, help="for each test")
    options = parser.parse_args()
    started = time.monotonic()
    collected = subprocess.run([*_PYTEST, "--collect-only", *options.paths], capture_output=True, text=True)
    tests = [line for line in collected.stdout.splitlines() if "::" in line and not line.startswith(("ERROR", " "))]
    if not tests:
        print(collected.stdout, collected.stderr)
        return 1
    counts: Counter[str] = Counter()
    with ThreadPoolExecutor(options.jobs) as pool:
        for test, (verdict, said) in zip(tests, pool.map(lambda test: run(test, options.seconds), tests), strict=True):
            counts[verdict] += 1
            if verdict == "failed":
                last = next((line for line in reversed(said) if line.startswith("E ")), "").removeprefix("E").strip()
                print(f"FAILED {test} - {last}", *said[-_SAID_LINES:], "", sep="\n", flush=True)
    order = [f"{counts[verdict]} {verdict}" for verdict in ("failed", "passed", "skipped") if counts[verdict]]
    print(f"{', '.join(order)} in {time.monotonic() - started:.1f}s")
    return int(counts["failed"] > 0)


def run(test: str, seconds: float) -> tuple[str, list[str]]:
    """``passed``, ``skipped`` or ``failed``, and what it printed."""
    command = [*_PYTEST, "-rfEs", "--tb=short", "-o", f"faulthandler_timeout={seconds * 2 / 3}", test]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGINT)
        try:
            output, _ = process.communicate(timeout=_GRACE_S)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        return "failed", [*output.splitlines(), f"E   it took more than {seconds:g} s"]
    lines = output.splitlines()
    if process.returncode:
        return "failed", lines
    return ("skipped" if any(line.startswith("SKIPPED") for line in lines) else "passed"), lines


if __name__ == "__main__":
    sys.exit(main())
