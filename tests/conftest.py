"""What the tests want of their surroundings.

Shells start background jobs with Ctrl-C ignored, and programs inherit that: the tests want the default. The tests'
directories may be in memory: programs that the tests start do not warn of it.

Some tests have many cases, each of which trains something. Marked ``one_in(n)``, every n-th of them runs, and all of
them with ``--all``.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import Counter

import pytest
import torch

signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("PYTHONWARNINGS", "ignore:nvme_path")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--copy-windows", action="store_true", help="windows of a torch that cannot exchange memory of storages"
    )
    parser.addoption("--all", action="store_true", help="all cases of the tests of which every n-th runs otherwise")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_in(n): a test of whose cases every n-th runs, and with --all each")
    if config.getoption("copy_windows"):
        torch.UntypedStorage._swap_data_ptr_ = _Missing()  # type: ignore[attr-defined]


@pytest.hookimpl(trylast=True)  # a case that somebody names runs
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("all"):
        return
    seen: Counter[str] = Counter()
    kept, left_out = [], []
    for item in items:
        marker = item.get_closest_marker("one_in")
        test = item.nodeid.partition("[")[0]
        (left_out if marker and seen[test] % marker.args[0] else kept).append(item)
        seen[test] += 1
    if left_out:
        config.hook.pytest_deselected(items=left_out)
        items[:] = kept


def pytest_collection_finish() -> None:
    gc.freeze()  # what the collector need not visit again costs a twelfth of the tests' time


class _Missing:
    def __get__(self, storage: object, kind: type) -> None:
        raise AttributeError("_swap_data_ptr_")


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine measures its disk for 0.6 s when it is made, and tests make thousands."""
    monkeypatch.setattr("offload.tiers.bandwidth._SECONDS", 0.02)
