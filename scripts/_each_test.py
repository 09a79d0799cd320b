"""Tests, each in a process of its own and several at a time: an address that is none ends one test, and one that hangs
is interrupted. Prints a line for each that did not pass, with the end of what it said, as soon as it is over, and their
count, also when it is interrupted itself: no test goes on then."""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed

_GRACE_S = 10
_SAID_LINES = 25
_PYTEST = [sys.executable, "-X", "faulthandler", "-m", "pytest", "-q", "-p", "no:cacheprovider"]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("paths", nargs="+")
    jobs = max(3 * (os.cpu_count() or 1) // 4, 1)
    parser.add_argument("--jobs", type=int, default=jobs, help="at a time (default: three for each four cores)")
    parser.add_argument("--seconds", type=float, default=90, help="for each test")
    options = parser.parse_args()
    started = time.monotonic()
    collected = subprocess.run([*_PYTEST, "--collect-only", *options.paths], capture_output=True, text=True)
    tests = [line for line in collected.stdout.splitlines() if "::" in line and not line.startswith(("ERROR", " "))]
    if not tests:
        print(collected.stdout, collected.stderr)
        return 1
    counts: Counter[str] = Counter()
    running = Running(options.seconds, max((os.cpu_count() or 1) // options.jobs, 1))
    with ThreadPoolExecutor(options.jobs) as pool:
        futures = {pool.submit(running.run, test): test for test in tests}
        try:
            for future in as_completed(futures):
                verdict, said = future.result()
                counts[verdict] += 1
                if verdict == "failed":
                    last = next((line for line in reversed(said) if line.startswith("E ")), "").removeprefix("E")
                    print(f"FAILED {futures[future]} - {last.strip()}", *said[-_SAID_LINES:], "", sep="\n", flush=True)
        except KeyboardInterrupt:
            running.end()
            pool.shutdown(cancel_futures=True)
            counts["interrupted"] = len(tests) - counts.total()
    order = ("failed", "interrupted", "passed", "skipped")
    said = ", ".join(f"{counts[verdict]} {verdict}" for verdict in order if counts[verdict])
    print(f"{said} in {time.monotonic() - started:.1f}s")
    return int(counts["failed"] + counts["interrupted"] > 0)


class Running:
    """Tests under way, each with a process group of its own and so many threads for torch. One takes at most so many
    ``seconds``."""

    def __init__(self, seconds: float, num_threads: int) -> None:
        self._seconds = seconds
        # Plugins that happen to be installed take longer to import than most tests take, and none is needed.
        plain = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "OMP_NUM_THREADS": str(num_threads)}
        self._environment = {**plain, **os.environ}
        self._processes: set[subprocess.Popen[str]] = set()

    def run(self, test: str) -> tuple[str, list[str]]:
        """``passed``, ``skipped`` or ``failed``, and what it printed."""
        command = [*_PYTEST, "-rfEs", "--tb=short", "-o", f"faulthandler_timeout={self._seconds * 2 / 3}", test]
        process = subprocess.Popen(
            command,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self._processes.add(process)
        try:
            output, _ = process.communicate(timeout=self._seconds)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGINT)
            try:
                output, _ = process.communicate(timeout=_GRACE_S)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                output, _ = process.communicate()
            return "failed", [*output.splitlines(), f"E   it took more than {self._seconds:g} s"]
        finally:
            self._processes.discard(process)
        lines = output.splitlines()
        if process.returncode:
            return "failed", lines
        return ("skipped" if any(line.startswith("SKIPPED") for line in lines) else "passed"), lines

    def end(self) -> None:
        """End all that are under way."""
        for process in list(self._processes):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main())
