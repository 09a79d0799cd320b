"""What the tests want of their surroundings.

Shells start background jobs with Ctrl-C ignored, and programs inherit that: the tests want the default. The tests'
directories may be in memory: programs that the tests start do not warn of it.
"""

import os
import signal

import pytest

signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("PYTHONWARNINGS", "ignore:nvme_path")


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine measures its disk for 0.6 s when it is made, and tests make thousands."""
    monkeypatch.setattr("offload.tiers.bandwidth._SECONDS", 0.02)
