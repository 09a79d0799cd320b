"""The end of an engine, after which the model has its weights again, and the end of the program."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
import warnings
import weakref
from collections.abc import Callable
from functools import partial
from pathlib import Path

import forked
import pytest
import torch
from runs import backward, bits, least, make_model, train

from offload import OffloadEngine, OffloadError, closing
from offload.checkpoint import program_end


def test_what_is_open_at_the_end_of_the_program_is_closed_the_newest_first(monkeypatch: pytest.MonkeyPatch):
    made = [closing.Closers() for _ in range(20)]
    closed: list[int] = []
    for number, closers in enumerate(made):
        closers.callback(partial(closed.append, number))
    monkeypatch.setattr(closing, "_open", weakref.WeakSet(made))
    closing._close_all()
    assert closed == list(reversed(range(20)))


def small(path: Path, **options) -> OffloadEngine:
    return OffloadEngine(make_model(), lr=1e-3, nvme_path=path, host_memory=least(path), **options)


def without_room(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine._session.parts.run.processor, "free_bytes", lambda: 1000, raising=False)


@pytest.mark.parametrize("end", ["with", "close", "an exception"])
def test_after_the_end_the_model_is_an_ordinary_one_with_the_weights_of_the_last_step(tmp_path: Path, end: str):
    engine = small(tmp_path)
    model = engine.module
    train(engine, 2)
    expected = bits(model)
    if end == "close":
        engine.close()
    else:
        with pytest.raises(KeyboardInterrupt) if end == "an exception" else warnings.catch_warnings(), engine:
            if end == "an exception":
                model(torch.zeros(1, 3, dtype=torch.int64))
                raise KeyboardInterrupt
    assert {type(parameter) for parameter in model.parameters()} == {torch.nn.Parameter}
    torch.save(model.state_dict(), tmp_path / "model.pt")
    model.load_state_dict(torch.load(tmp_path / "model.pt", weights_only=True))
    assert bits(model).equal(expected)
    with OffloadEngine(model, lr=1e-3) as again:
        train(again, 1)
    with pytest.raises(OffloadError, match="the engine is closed, and the model has its weights again"):
        backward(engine, 0)


def test_gradients_of_no_step_come_with_the_weights(tmp_path: Path):
    engine = small(tmp_path)
    backward(engine, 0)
    expected = [parameter.grad.clone() for parameter in engine.module.parameters()]
    engine.close()
    assert all(p.grad.equal(gradient) for p, gradient in zip(engine.module.parameters(), expected, strict=True))


SAVES: dict[str, Callable[[OffloadEngine, Path], object]] = {
    "save_checkpoint": lambda engine, path: engine.save_checkpoint(path),
    "save_model": lambda engine, path: engine.save_model(path),
    "save_dcp": lambda engine, path: engine.save_dcp(path),
    "state_dict": lambda engine, path: engine.state_dict(),
}


def hold_updates_until_the_end(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    """Updates read nothing more before they are told to end, or the store has given its space back."""
    store, updater, ends = engine._session.parts.tiers.store, engine._session.trained.updates.updater, threading.Event()
    assert store is not None
    read, give_back, stop = store.read, store.give_back, updater.pipeline.stop

    def held(*args, **options):
        assert threading.current_thread().name != "offload-update" or ends.wait(30)
        return read(*args, **options)

    def given_back():
        give_back()
        ends.set()
        with contextlib.suppress(OffloadError):
            updater.host.fence.wait_all()

    def stopped():
        stop()
        ends.set()

    monkeypatch.setattr(store, "read", held)
    monkeypatch.setattr(store, "give_back", given_back)
    monkeypatch.setattr(updater.pipeline, "stop", stopped)


def test_the_error_of_the_program_is_not_replaced_by_torchs_of_memory_at_the_end(tmp_path: Path, monkeypatch):
    """The same lack of memory, most likely, meets the model's own weights."""

    def no_memory(*_: object) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    engine = small(tmp_path)
    train(engine, 1)
    monkeypatch.setattr("offload.session.OrdinaryParameters", no_memory)
    with pytest.raises(ValueError, match="of the program"), engine:
        raise ValueError("of the program")


def test_steps_that_go_with_the_weights_are_warned_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    engine = small(tmp_path)
    train(engine, 1)
    engine.save_checkpoint(tmp_path / "saved")
    train(engine, 2)
    engine._session.trained.updates.updater.speculative._num_speculative = 0
    backward(engine, 2)
    hold_updates_until_the_end(engine, monkeypatch)
    engine.step()
    without_room(engine, monkeypatch)
    with pytest.warns(
        UserWarning, match=r"weights take .*and 2 steps since.*save_checkpoint\(dir\), or engine.save_model"
    ):
        engine.close()
    with pytest.raises(OffloadError, match="the engine is closed, and the weights went with it"):
        bits(engine.module)
    engine.close()


@pytest.mark.parametrize("save", [*SAVES, "durable", "discard"])
def test_nothing_is_said_where_nothing_is_lost_or_nobody_wants_it(tmp_path: Path, monkeypatch, save: str):
    engine = small(tmp_path, durable=int(save == "durable"))
    train(engine, 1)
    if save in SAVES:
        SAVES[save](engine, tmp_path / "saved")
    without_room(engine, monkeypatch)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine.close(discard=save == "discard")


_INTERRUPTED = """
import os, signal, sys
from pathlib import Path
from runs import least, make_model, train
from offload import OffloadEngine

path, how = Path(sys.argv[1]), sys.argv[2]
engine = OffloadEngine(make_model(), lr=1e-3, nvme_path=path, host_memory=least(path), durable=int(how == "durable"))

if how == "hooked":
    sys.excepthook = lambda kind, error, trace: print(f"own: {kind.__name__}", file=sys.stderr)

def run():
    train(engine, 2)
    if how == "failed":
        raise ValueError("another")
    if how == "ended":
        engine.close()
    if how == "saved":
        engine.save_checkpoint(path / "saved")
        train(engine, 3)
    os.kill(os.getpid(), signal.SIGINT)

if how == "closed":
    with engine:
        run()
run()
"""


@pytest.mark.parametrize(
    ("how", "said"),
    [
        ("closed", "after step 2: none of its 2 steps is saved. With durable=1, or engine.save_checkpoint"),
        ("open", "after step 2: none of its 2 steps is saved. With durable=1, or engine.save_checkpoint"),
        ("saved", "after step 3: step 2 is in {path}/saved/step2; the step since is not saved"),
        ("durable", "after step 2: step 2 is committed under {path}: engine.load_checkpoint() goes on from it"),
    ],
)
def test_the_last_line_after_ctrl_c_says_what_is_kept(tmp_path: Path, how: str, said: str):
    ended = forked.run(_INTERRUPTED, tmp_path, how)
    assert ended.returncode == -signal.SIGINT
    (line,) = [line for line in ended.stderr.splitlines() if not line.startswith("  ")]
    assert line.startswith(f"offload: interrupted {said.format(path=tmp_path)}")


@pytest.mark.parametrize("how", ["ended", "failed", "hooked"])
def test_other_exceptions_are_shown_as_ever(tmp_path: Path, how: str):
    ended = forked.run(_INTERRUPTED, tmp_path, how)
    lines = ended.stderr.splitlines()
    assert any(line.startswith("Traceback") for line in lines) == (how != "hooked")
    assert any(line.startswith("offload: interrupted") for line in lines) == (how == "hooked")
    assert lines.count("own: KeyboardInterrupt") == (how == "hooked")
    assert (lines[-1] == "KeyboardInterrupt") == (how == "ended")


def test_a_commit_for_which_no_thread_begins_is_made_by_who_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    start = threading.Thread.start

    def refuse(thread: threading.Thread) -> None:  # as Python 3.12 does at a program's end
        if thread.name in ("offload-commit", "offload-checkpoint"):
            raise RuntimeError("can't create new thread at interpreter shutdown")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    folders = [tmp_path / name for name in ("nvme", "saved", "other")]
    for folder in folders:
        folder.mkdir()
    with OffloadEngine(make_model(), lr=1e-3, nvme_path=folders[0], durable=1) as engine:
        train(engine, 2)
        engine.save_checkpoint(folders[1])
        expected = bits(engine.unwrap())
    for folder, path in ((folders[0], None), (folders[2], folders[1])):
        with OffloadEngine(make_model(1), lr=1e-3, nvme_path=folder, durable=1) as engine:
            engine.load_checkpoint(path)
            assert engine.global_step == 2
            assert torch.equal(bits(engine.unwrap()), expected)


@pytest.mark.parametrize("module", ["exceptiongroup._formatting", "theirs"])
def test_a_hook_that_formats_alone_is_told_of_other_exceptions(module: str, monkeypatch: pytest.MonkeyPatch):
    seen: list[BaseException] = []

    def hook(kind: type[BaseException], error: BaseException, trace: object) -> None:
        seen.append(error)

    hook.__module__ = module
    monkeypatch.setattr(sys, "excepthook", hook)
    monkeypatch.setattr(program_end, "_show_other", sys.__excepthook__)
    with OffloadEngine(make_model(), lr=1e-3):
        assert (sys.excepthook is program_end._show) == (module != "theirs")
        error = ValueError("other")
        sys.excepthook(ValueError, error, None)
        assert seen == [error]
