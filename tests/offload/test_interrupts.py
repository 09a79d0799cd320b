"""Signals that come in the middle of a step: it is taken whole, or not at all, and the interrupt is raised then."""

import signal
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from interrupted import at_every_point
from tiny import Tiny, batches, least_budget, loss_of
from torch.utils.checkpoint import checkpoint

import offload.interrupts
from offload import OffloadEngine
from offload.interrupts import held_back, undisturbed
from offload.model.handle import Handle
from offload.torch_internals import top_saved_tensors_hooks
from offload.waiting import Job

OPTIONS = {"precision": "fp32", "tile_bytes": 65536, "lr": 1e-2}


def test_what_comes_within_is_handled_at_the_end():
    before = signal.getsignal(signal.SIGINT)
    done = []
    with pytest.raises(KeyboardInterrupt), held_back():
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append("all of it")
    assert done == ["all of it"] and signal.getsignal(signal.SIGINT) is before


def test_it_comes_although_there_was_an_error():
    with pytest.raises(KeyboardInterrupt) as caught, held_back():
        signal.raise_signal(signal.SIGINT)
        raise ValueError
    assert isinstance(caught.value.__context__, ValueError)


def test_where_it_is_nested_it_waits_for_the_end_of_the_outer_one():
    events = []
    with pytest.raises(KeyboardInterrupt), held_back():
        with held_back():
            signal.raise_signal(signal.SIGINT)
        events.append("after the inner one")
    assert events == ["after the inner one"]


def test_a_handler_that_raises_as_soon_as_it_is_put_back_keeps_no_other_from_it(monkeypatch):
    """A time limit came then, and Ctrl-C did nothing from then on."""

    struck: list[int] = []

    def time_is_up(*_: object) -> None:
        raise TimeoutError

    def put(number: int, handler: object) -> None:
        signal.signal(number, handler)
        if handler is time_is_up and not struck:
            struck.append(number)
            signal.raise_signal(number)

    before = signal.signal(signal.SIGALRM, time_is_up)
    try:
        monkeypatch.setattr(offload.interrupts, "_signal", SimpleNamespace(signal=put, getsignal=signal.getsignal))
        with pytest.raises(KeyboardInterrupt), held_back():
            signal.raise_signal(signal.SIGINT)
        assert struck and signal.getsignal(signal.SIGALRM) is time_is_up
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.signal(signal.SIGINT, signal.default_int_handler)


def test_every_handler_is_called_and_put_back_exactly():
    events: list[str] = []

    def time_is_up(*_: object) -> None:
        events.append("alarm")
        raise TimeoutError

    def stop(*_: object) -> None:
        events.append("terminate")

    handlers = {signal.SIGALRM: time_is_up, signal.SIGTERM: stop, signal.SIGUSR1: signal.SIG_IGN}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        with pytest.raises(TimeoutError), held_back():
            for number in handlers:
                signal.raise_signal(number)
            events.append("the end")
        assert events[0] == "the end" and sorted(events[1:]) == ["alarm", "terminate"]
        assert {number: signal.getsignal(number) for number in handlers} == handlers
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def test_another_thread_holds_nothing_back():
    before = signal.getsignal(signal.SIGINT)
    found = []

    def look() -> None:
        with held_back():
            found.append(signal.getsignal(signal.SIGINT))

    thread = threading.Thread(target=look)
    thread.start()
    thread.join(60)
    assert found == [before]


class _Interrupt:
    """Sends Ctrl-C at the ``position``-th call inside of the engine, and counts them."""

    def __init__(self, position: int) -> None:
        self.position = position
        self.count = 0

    def __enter__(self) -> "_Interrupt":
        sys.settrace(self._call)
        return self

    def __exit__(self, *error: object) -> None:
        sys.settrace(None)

    def _call(self, frame: object, event: str, argument: object) -> None:
        if "/offload/" in frame.f_code.co_filename:  # type: ignore[attr-defined]
            self.count += 1
            if self.count == self.position:
                signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize("on_nvme", [False, True])
def test_a_step_that_is_interrupted_is_taken_whole_or_not_at_all(on_nvme: bool, tmp_path: Path):
    def built() -> Tiny:
        torch.manual_seed(0)
        return Tiny(width=32, num_blocks=3)

    memory = {}
    if on_nvme:
        memory = {"nvme_path": tmp_path, "host_memory": least_budget(built(), tmp_path, **OPTIONS)}

    def run(position: int) -> tuple[int, int, dict[str, torch.Tensor]]:
        """Two steps, the second one interrupted; how many calls it made, the steps taken, the weights."""
        with OffloadEngine(built(), **memory, **OPTIONS) as engine:
            for index, (tokens, targets) in enumerate(batches(2)):
                engine.optimizer.zero_grad()
                loss_of(engine(tokens), targets).backward()
                interrupt = _Interrupt(position if index else 0)
                try:
                    with interrupt:
                        engine.optimizer.step()
                except KeyboardInterrupt:
                    assert index
            return interrupt.count, engine.global_step, engine.state_dict()

    num_calls, taken, whole = run(0)
    assert taken == 2
    seen = set()
    for position in range(1, num_calls, max(num_calls // 12, 1)):
        _, taken, found = run(position)
        seen.add(taken)
        if taken == 2:
            assert all(torch.equal(found[name], value) for name, value in whole.items()), position
        else:
            assert not all(torch.equal(found[name], value) for name, value in whole.items()), position
    assert seen == {1, 2}


def test_a_commit_whose_wait_was_interrupted_is_waited_for_by_the_next_step(tmp_path: Path):
    """It reads memory: a step that did not wait changed what it had still to read, and no checksum told."""
    tokens, targets = batches(1)[0]
    with OffloadEngine(Tiny(16, 1), **OPTIONS, durable=1, nvme_path=tmp_path) as engine:

        def step() -> None:
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()

        step()
        with pytest.MonkeyPatch.context() as patch:
            wait = Mock(side_effect=KeyboardInterrupt)
            patch.setattr(Job, "wait", wait)
            for number in (1, 2):
                engine.optimizer.zero_grad()
                with pytest.raises(KeyboardInterrupt):
                    step()
                assert wait.call_count == number
        engine.optimizer.zero_grad()
        step()


def test_ctrl_c_while_a_gradient_is_asked_for_leaves_gradients_on():
    """A mode of torch's, ended late, put back what it had found in ``clip_grad_norm_``: no backward ran any more."""
    tokens, targets = batches(1)[0]
    with OffloadEngine(Tiny(16, 1), **OPTIONS) as engine:
        parameter = next(engine.module.parameters())

        def ask() -> None:
            torch._C._set_grad_enabled(False)
            try:
                assert parameter.grad is not None
            finally:
                torch._C._set_grad_enabled(True)

        def run(interrupted) -> None:
            engine.optimizer.zero_grad()
            loss_of(engine(tokens), targets).backward()
            interrupted(ask)
            assert torch.is_grad_enabled()

        at_every_point("/grad_mode.py", run)
        assert at_every_point("offload/torch_internals.py", run) > 1


class Checkpointed(Tiny):
    """Torch recomputes the first block."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        first, *others = self.blocks
        x = checkpoint(first, self.embed(tokens), use_reentrant=False)
        for block in others:
            x = block(x)
        return self.head(self.norm(x))


@pytest.mark.parametrize("activations", ["keep", "recompute"])
def test_a_checkpoint_that_ctrl_c_ends_keeps_nothing_of_the_next_batch_nor_of_the_next_engine(activations: str):
    """Torch leaves its hooks of saved tensors there where the end of their block is struck: what came next was saved in
    the interrupted call, and its backward ran that again."""

    def train(interrupted) -> dict[int, float]:
        torch.manual_seed(0)
        with OffloadEngine(Checkpointed(16, 2), **OPTIONS, activations=activations) as engine:
            losses = {}

            def step(tokens: torch.Tensor, targets: torch.Tensor) -> None:
                engine.optimizer.zero_grad()
                loss = loss_of(engine(tokens), targets)
                losses[engine.global_step] = loss.item()
                loss.backward()
                engine.optimizer.step()

            first, second, third = batches(3)
            step(*first)
            if interrupted(lambda: step(*second)) and engine.global_step == 1:
                step(*second)
            step(*third)
            return losses

    expected = train(lambda call: call())

    def run(interrupted) -> None:
        assert train(interrupted) == expected
        assert top_saved_tensors_hooks() is None

    assert at_every_point("torch/autograd/graph.py", run) > 4


@pytest.mark.parametrize("part", ["offload/model/unit_in_model.py", "offload/model/hooks.py"])
def test_what_ctrl_c_leaves_of_a_forward_is_put_back_by_the_next_call(part: str):
    """An interrupted end of a use left the parameters in the model: they rested, with others said to be there."""
    tokens, _ = batches(1)[0]
    with OffloadEngine(Tiny(16, 1), **OPTIONS) as engine:
        names = [name for name, _ in engine.module.named_parameters()]

        def run(interrupted) -> None:
            interrupted(lambda: engine(tokens))
            engine.optimizer.zero_grad()
            assert [name for name, p in engine.module.named_parameters() if isinstance(p, Handle)] == names

        assert at_every_point(part, run) > 50


@pytest.mark.parametrize("part", ["torch/nn/modules/linear.py", "offload/model/hooks.py"])
def test_after_a_forward_that_ctrl_c_ended_the_next_one_has_all_gradients(part: str):
    """Torch calls no hook after it. So the unit's next call was taken for one within that one, and had no gradient."""
    tokens, targets = batches(1)[0]
    with OffloadEngine(Tiny(16, 1), **OPTIONS) as engine:

        def gradients() -> list[torch.Tensor | None]:
            loss_of(engine(tokens), targets).backward()
            found = [p.grad if p.grad is None else p.grad.clone() for p in engine.module.parameters()]
            engine.optimizer.zero_grad()
            return found

        expected = gradients()

        def run(interrupted) -> None:
            interrupted(lambda: engine(tokens))
            for now, before in zip(gradients(), expected, strict=True):
                assert now is not None and torch.equal(now, before)

        assert at_every_point(part, run) > 2


def test_a_handler_that_looks_into_the_model_runs_between_the_engines_calls():
    """It ran in their middle, and found the engine's locks taken and its places half changed."""
    seen = []

    @undisturbed
    def call() -> str:
        signal.raise_signal(signal.SIGUSR1)
        seen.append("call")
        return "result"

    before = signal.signal(signal.SIGUSR1, lambda *_: seen.append("handler"))
    try:
        assert call() == "result"
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert seen == ["call", "handler"]
