"""What the tests want of their surroundings.

Shells start background jobs with Ctrl-C ignored, and programs inherit that: the tests want the default. The tests'
directories may be in memory: programs that the tests start do not warn of it.

Some tests have many cases, each of which trains something. All of them run with ``--all``. Otherwise, marked
``one_in(n)``, every n-th runs; marked ``each_value``, of the cases of several parametrizations as few run as have each
value of each parametrization.
"""

from __future__ import annotations

import gc
import os
import signal
from collections import defaultdict
from collections.abc import Hashable, Iterator

import pytest
import torch

signal.signal(signal.SIGINT, signal.default_int_handler)
os.environ.setdefault("PYTHONWARNINGS", "ignore:nvme_path")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--copy-windows", action="store_true", help="windows of a torch that cannot exchange memory of storages"
    )
    parser.addoption("--all", action="store_true", help="all cases of the tests of which some run otherwise")


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "one_in(n): a test of whose cases every n-th runs, and with --all each")
    config.addinivalue_line("markers", "each_value: a test of which some cases have each value, and with --all all run")
    if config.getoption("copy_windows"):
        torch.UntypedStorage._swap_data_ptr_ = _Missing()  # type: ignore[attr-defined]


@pytest.hookimpl(trylast=True)  # a case that somebody names runs
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("all"):
        return
    cases: defaultdict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    runs = {item for of_test in cases.values() for item in _chosen(of_test)}
    if left_out := [item for item in items if item not in runs]:
        config.hook.pytest_deselected(items=left_out)
        items[:] = [item for item in items if item in runs]


def _chosen(cases: list[pytest.Item]) -> list[pytest.Item]:
    """The cases of a test that run."""
    if marker := cases[0].get_closest_marker("one_in"):
        return cases[:: marker.args[0]]
    if cases[0].get_closest_marker("each_value"):
        return _with_each_value(cases)
    return cases


def _with_each_value(cases: list[pytest.Item]) -> list[pytest.Item]:
    """First the cases of which no value was seen yet, then those that have one which was not."""
    left = {case: _values(case) for case in cases}
    seen: set[Hashable] = set()
    for enough in (set.isdisjoint, lambda values, seen: not values <= seen):
        for case, values in [*left.items()]:
            if enough(values, seen):
                seen |= left.pop(case)
    return [case for case in cases if case not in left]


def _values(case: pytest.Item) -> set[Hashable]:
    """What each parametrization, and each parametrized fixture, has in a case."""
    params = {name: id(value) for name, value in case.callspec.params.items()}  # type: ignore[attr-defined]
    values: set[Hashable] = set()
    for marker in case.iter_markers("parametrize"):
        names = marker.args[0]
        names = names.split(",") if isinstance(names, str) else names
        values.add(tuple((name.strip(), params.pop(name.strip())) for name in names))
    return values | {*params.items()}


def pytest_collection_finish() -> None:
    gc.freeze()  # what the collector need not visit again costs a twelfth of the tests' time


class _Missing:
    def __get__(self, storage: object, kind: type) -> None:
        raise AttributeError("_swap_data_ptr_")


@pytest.fixture(autouse=True)
def short_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every engine measures its disk for 0.6 s when it is made, and tests make thousands."""
    monkeypatch.setattr("offload.tiers.bandwidth._SECONDS", 0.002)


@pytest.fixture(autouse=True)
def thread_as_it_was() -> Iterator[None]:
    """A test that leaves the thread with what changes the next ones in it fails itself."""
    before = _of_thread()
    yield
    assert _of_thread() == before


def _of_thread() -> dict[str, object]:
    """What autograd and the modes of torch do in this thread."""
    autograd = torch._C._autograd
    return {
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), torch._C._current_graph_task_id()),
        "hooks of saved tensors": (
            autograd._saved_tensors_hooks_get_disabled_error_message(),
            autograd._top_saved_tensors_default_hooks(True),
        ),
        "modes": (
            torch.overrides._get_current_function_mode_stack(),
            torch.utils._python_dispatch._get_current_dispatch_mode_stack(),
        ),
        "default dtype": torch.get_default_dtype(),
    }
