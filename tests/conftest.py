"""What the tests want of their surroundings.

Shells start background jobs with Ctrl-C ignored, and programs inherit that: the tests want the default. The tests'
directories may be in memory: programs that the tests start do not warn of it.
"""

from __future__ import annotations

import os
import signal

import pytest
import torch

signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("PYTHONWARNINGS", "ignore:nvme_path")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--copy-windows", action="store_true", help="windows of a torch that cannot exchange memory of storages"
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("copy_windows"):
        torch.UntypedStorage._swap_data_ptr_ = _Missing()  # type: ignore[attr-defined]


class _Missing:
    def __get__(self, storage: object, kind: type) -> None:
        raise AttributeError("_swap_data_ptr_")


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine measures its disk for 0.6 s when it is made, and tests make thousands."""
    monkeypatch.setattr("offload.tiers.bandwidth._SECONDS", 0.02)
