"""What the engine stands on in torch is tried before it is trusted: each part that is gone or changed is refused."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree

from offload import torch_internals
from offload.errors import OLDEST_TORCH, TorchUnsupported

SEQUENCE = "the sequence numbers of autograd's nodes"
BACKWARD = "the numbers and callbacks of a backward"
LISTENERS = "modes and hooks of saved tensors"
SAVED = "the stack of hooks of saved tensors"
COUNTS = "the counts of who looks at a tensor's memory"
STORAGES = "weak references to storages"
WITNESS = "versions without memory"
VERSION = "changes that keep a tensor's version"
PYTREE = "torch.utils._pytree"
WRAPPER = "wrapper subclasses of Tensor"


@pytest.fixture(autouse=True)
def _tried_anew(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test sees what another one has found; nor does what runs after them."""
    torch_internals.check.cache_clear()
    torch_internals.can_swap_memory.cache_clear()
    yield
    monkeypatch.undo()
    torch_internals.check.cache_clear()
    torch_internals.can_swap_memory.cache_clear()


def _gone(*args: Any, **options: Any) -> Any:
    raise AttributeError("module 'torch._C' has no attribute like this")


def test_all_of_it_works_with_this_torch() -> None:
    torch_internals.check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
def test_trials_do_not_ask_for_the_default_dtype(dtype: torch.dtype) -> None:
    torch.set_default_dtype(dtype)
    try:
        assert all(trial() for trial in torch_internals._TRIALS.values())
    finally:
        torch.set_default_dtype(torch.float32)


def _expect_refusal(name: str, what: str) -> None:
    with pytest.raises(TorchUnsupported) as caught:
        torch_internals.check()
    message = str(caught.value)
    assert message.startswith(f"torch {torch.__version__} lacks {name}, or has changed it: ")
    assert re.search(what, message) and "Use a release of torch" in message


@pytest.mark.parametrize(
    ("function", "name"),
    [
        ("next_sequence_number", SEQUENCE),
        ("sequence_number", SEQUENCE),
        ("graph_task", BACKWARD),
        ("when_backward_ends", BACKWARD),
        ("keeps_version", VERSION),
        ("leaves_of", PYTREE),
        ("map_leaves", PYTREE),
        ("wrapper", WRAPPER),
    ],
)
def test_what_is_gone_is_refused(function: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, function, _gone)
    _expect_refusal(name, "AttributeError.*has no attribute like this")


@pytest.mark.parametrize(
    ("holder", "attribute", "name"),
    [
        (torch.autograd.grad_mode, "_unsafe_preserve_version_counter", VERSION),
        (torch.Tensor, "_make_wrapper_subclass", WRAPPER),
    ],
)
def test_what_torch_itself_has_lost_is_refused(
    holder: Any, attribute: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_attribute(monkeypatch, holder, attribute)
    _expect_refusal(name, "Error")


def hide_attribute(patch: pytest.MonkeyPatch, holder: Any, attribute: str) -> None:
    """Take it away, wherever it comes from."""
    if attribute in vars(holder):
        patch.delattr(holder, attribute)
        return

    class Hidden:
        def __get__(self, holder: Any, kind: type | None = None) -> Any:
            raise AttributeError(attribute)

    patch.setattr(holder, attribute, Hidden(), raising=False)  # a base class has it


def _never_call(call: Callable[[], None]) -> None:
    pass


def _of_another_shape(cls: type, meta: torch.Tensor, device: torch.device) -> Any:
    return torch.ones(3)


class _NoGradient:
    def __get__(self, tensor: torch.Tensor, kind: type | None = None) -> None:
        return None


@pytest.mark.parametrize(
    ("function", "changed", "name"),
    [
        ("next_sequence_number", lambda: 0, SEQUENCE),  # does not count
        ("sequence_number", lambda node: -1, SEQUENCE),  # of another kind
        ("sequence_number", lambda node: 1 << 60, SEQUENCE),
        ("graph_task", lambda: -1, BACKWARD),  # no backward is seen
        ("graph_task", lambda: 7, BACKWARD),  # nor its end
        ("when_backward_ends", _never_call, BACKWARD),
        ("keeps_version", lambda tensor: nullcontext(), VERSION),
        ("_top_hooks", lambda ignores: None, LISTENERS),
        ("function_modes", lambda: [object()], LISTENERS),
        ("num_owners", lambda storage: 1, COUNTS),
        ("_push_hooks", lambda pack, unpack: None, SAVED),
        ("leaves_of", lambda nested: [nested], PYTREE),
        ("map_leaves", lambda change, nested: nested, PYTREE),
        ("wrapper", _of_another_shape, WRAPPER),
        ("autograd_gradient", _NoGradient(), WRAPPER),
    ],
)
def test_what_works_in_another_way_is_refused(
    function: str, changed: Any, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_internals, function, changed)
    _expect_refusal(name, "it gave something else than expected" if name != WRAPPER else "")


def test_a_callback_that_comes_before_the_backward_ends_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def call_at_once(call: Callable[[], None]) -> None:
        call()

    monkeypatch.setattr(torch_internals, "when_backward_ends", call_at_once)
    _expect_refusal(BACKWARD, "it gave something else than expected")


@pytest.mark.parametrize(
    ("holder", "attribute"),
    [
        (torch._C, "_disabled_torch_function_impl"),
        (torch._C, "_current_graph_task_id"),
        (torch._C._autograd, "_get_sequence_nr"),
        (_pytree, "tree_map"),
    ],
)
def test_what_torch_has_lost_is_refused_with_its_version_from_the_import_on(
    holder: Any, attribute: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = importlib.util.spec_from_file_location("imported_anew", torch_internals.__file__)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    hide_attribute(monkeypatch, holder, attribute)
    with pytest.raises(TorchUnsupported, match=re.escape(torch.__version__)):
        spec.loader.exec_module(module)
        module.check()


def test_a_class_whose_operations_come_by_another_way_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def all_wrong(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return torch.zeros(2, requires_grad=True)

    monkeypatch.setattr(torch_internals._Probe, "__torch_function__", classmethod(all_wrong))
    _expect_refusal(WRAPPER, "")


def test_every_trial_is_tried_and_can_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    trials = torch_internals._TRIALS
    assert list(trials) == [SEQUENCE, BACKWARD, LISTENERS, SAVED, COUNTS, STORAGES, WITNESS, VERSION, PYTREE, WRAPPER]
    for name in list(trials):
        with monkeypatch.context() as patch:
            patch.setitem(trials, name, lambda: False)
            _expect_refusal(name, "something else")
        torch_internals.check.cache_clear()


def test_what_was_found_to_work_is_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    torch_internals.check()
    monkeypatch.setattr(torch_internals, "graph_task", _gone)
    torch_internals.check()


def test_a_refusal_is_not_remembered(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(torch_internals, "graph_task", _gone)
        _expect_refusal(BACKWARD, "AttributeError")
    torch_internals.check()


def test_the_project_asks_for_the_oldest_torch_that_the_engine_names() -> None:
    project = (Path(__file__).parents[2] / "pyproject.toml").read_text()
    assert re.findall(r'"torch>=([\d.]+)"', project) == [OLDEST_TORCH]
    with pytest.raises(TorchUnsupported, match=f"torch >= {re.escape(OLDEST_TORCH)} "):
        raise torch_internals._unsupported("torch.gone", "it is not there")


# What there is a fallback for.


def test_memory_cannot_be_swapped_where_the_call_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_internals, "swap_memory", _gone)
    assert not torch_internals.can_swap_memory()
    torch_internals.check()  # and nothing is refused for it


def test_memory_cannot_be_swapped_where_torch_has_lost_the_call(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(torch.UntypedStorage, "_swap_data_ptr_"):
        assert not torch_internals.can_swap_memory()
        return
    assert torch_internals.can_swap_memory()
    torch_internals.can_swap_memory.cache_clear()
    hide_attribute(monkeypatch, torch.UntypedStorage, "_swap_data_ptr_")
    assert not torch_internals.can_swap_memory()


def _copy_one_way(left: torch.UntypedStorage, right: torch.UntypedStorage) -> None:
    left.copy_(right)


@pytest.mark.parametrize("changed", [lambda left, right: None, _copy_one_way])
def test_memory_cannot_be_swapped_where_the_call_does_something_else(
    changed: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch_internals, "swap_memory", changed)
    assert not torch_internals.can_swap_memory()
