"""Observers: what they are told, and those that come with the engine."""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import subprocess
import sys
import urllib.request
import warnings
from pathlib import Path

import pytest
import torch
from tiny import Tiny, batches, loss_of

from offload import ConfigError, LiveLine, Observer, OffloadEngine, Prometheus, TensorBoard
from offload.run.watch import Watch


class Notes(Observer):
    """Writes down what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[object, ...]] = []

    def begin(self, about) -> None:
        self.told.append(("begin", about["model"]["class"]))

    def step(self, record) -> None:
        self.told.append(("step", record.report.step, record.loss))

    def log(self, step, values) -> None:
        self.told.append(("log", step, values))

    def close(self, error) -> None:
        self.told.append(("close", error))


def take(engine: OffloadEngine, count: int) -> list[float]:
    losses = []
    for tokens, targets in batches(count):
        loss = loss_of(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def test_an_observer_is_told_of_all_in_order() -> None:
    notes = Notes()
    with OffloadEngine(Tiny()) as engine:
        engine.add_observer(notes)
        (first,) = take(engine, 1)
        engine.log(accuracy=0.5)
        (second,) = take(engine, 1)
    assert notes.told == [
        ("begin", "Tiny"), ("step", 1, first), ("log", 1, {"accuracy": 0.5}), ("step", 2, second), ("close", None),
    ]  # fmt: skip


def test_a_step_that_is_skipped_is_not_told() -> None:
    notes = Notes()
    with OffloadEngine(Tiny(), precision="fp16") as engine:
        engine.add_observer(notes)
        tokens, targets = batches(1)[0]
        engine.backward(loss_of(engine(tokens), targets) * float("inf"))
        engine.step()
        assert notes.told == [("begin", "Tiny")]
        (loss,) = take(engine, 1)
    assert notes.told[1] == ("step", 1, loss)  # without the loss of the step that was skipped


def test_an_observer_that_fails_is_warned_of_once_and_told_no_more() -> None:
    class Fails(Notes):
        def step(self, record) -> None:
            super().step(record)
            raise ValueError("planted")

        def __str__(self) -> str:
            return "my observer"

    fails, notes = Fails(), Notes()
    with OffloadEngine(Tiny()) as engine, warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        engine.add_observer(fails)
        engine.add_observer(notes)
        take(engine, 3)
    assert [str(one.message) for one in said if "observer" in str(one.message)] == [
        "my observer failed (planted): the training goes on, and it is told no more"
    ]
    assert len(fails.told) == 2 and len(notes.told) == 4 + 1


class OnDevice:
    """A number on a device: reading it waits."""

    def __init__(self, value: float) -> None:
        self.value = value
        self.was_read = False
        self.device = torch.device("cuda")

    def detach(self) -> OnDevice:
        return self

    def __float__(self) -> float:
        self.was_read = True
        return self.value


def test_a_loss_on_a_device_is_read_when_the_device_is_there_anyway() -> None:
    watch, loss = Watch(), OnDevice(2.5)
    watch.add(Observer())
    watch.saw_loss(loss, is_first=True)  # type: ignore[arg-type]
    assert not loss.was_read
    watch.arrive()
    assert loss.was_read


def test_what_is_no_number_is_refused() -> None:
    with OffloadEngine(Tiny()) as engine:
        engine.add_observer(Notes())
        with pytest.raises(ConfigError, match="log: name: expected a number or a tensor of one element, got str"):
            engine.log(name="x")


def test_without_a_terminal_a_tenth_of_the_way_is_a_line(capsys) -> None:
    with OffloadEngine(Tiny()) as engine:
        engine.add_observer(LiveLine(20, "work"))
        for _ in range(4):
            take(engine, 5)
        engine.log(accuracy=1.0)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition(" of")[0] for line in lines] == [f"work: step {2 * at}" for at in range(1, 11)]
    assert "loss " in lines[0] and "of the bound" in lines[0] and lines[0].endswith("left")
    assert not lines[-1].endswith("left")


def read_to_the_end(terminal: int) -> str:
    """What was written to the other side, which is closed: a single read may return a part of it."""
    read = b""
    with contextlib.suppress(OSError):  # EIO: no writer is left, and nothing to read
        while more := os.read(terminal, 1 << 16):
            read += more
    return read.decode()


def test_on_a_terminal_it_is_one_line_that_moves(monkeypatch) -> None:
    main, terminal = os.openpty()
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "300")
    with open(terminal, "w") as stderr, OffloadEngine(Tiny()) as engine:  # noqa: PTH123
        monkeypatch.setattr(sys, "stderr", stderr)
        engine.add_observer(LiveLine(3))
        take(engine, 3)
    shown = read_to_the_end(main)
    os.close(main)
    last = shown.replace("\x1b[2K", "\n").splitlines()[-2]
    assert "training: step 3 of 3  loss " in last and "of the bound" in last
    assert "left" in shown and "left" not in last


def test_tensorboard_gets_the_numbers(tmp_path: Path) -> None:
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    with OffloadEngine(Tiny()) as engine:
        engine.add_observer(TensorBoard(tmp_path))
        losses = take(engine, 2)
        engine.log(accuracy=0.5)
    events = accumulator.EventAccumulator(str(tmp_path))
    events.Reload()
    assert [(event.step, event.value) for event in events.Scalars("loss")] == [
        (at + 1, pytest.approx(loss)) for at, loss in enumerate(losses)
    ]
    assert {"accuracy", "grad_norm", "offload/seconds", "offload/bound_seconds"} <= set(events.Tags()["scalars"])


def test_prometheus_serves_the_last_step() -> None:
    pytest.importorskip("prometheus_client")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with OffloadEngine(Tiny()) as engine:
        engine.add_observer(Prometheus(port))
        losses = take(engine, 2)
        engine.log(**{"top-1": 0.25})
        served = urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics").read().decode()
        with pytest.raises(ConfigError, match=f"nothing can be served at 127.0.0.1:{port}"):
            Prometheus(port)
    values = dict(line.rsplit(" ", 1) for line in served.splitlines() if not line.startswith("#"))
    assert float(values["offload_loss"]) == losses[1] and float(values["offload_step"]) == 2
    assert float(values["offload_top_1"]) == 0.25 and float(values["offload_seconds"]) > 0
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics")


@pytest.mark.parametrize(
    ("module", "make"), [("tensorboard", lambda: TensorBoard(".")), ("prometheus_client", Prometheus)]
)
def test_a_missing_package_is_named(monkeypatch, module, make) -> None:
    for name in (module, "torch.utils.tensorboard"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(
        ConfigError, match=rf"package {module} is not installed: pip install 'offload-engine\[metrics\]'"
    ):
        make()


def test_the_log_says_what_a_user_of_a_library_expects(tmp_path: Path, caplog, monkeypatch) -> None:
    monkeypatch.setattr(logging.getLogger("offload"), "disabled", False)  # as import-linter leaves it
    caplog.set_level(logging.INFO, "offload")
    with OffloadEngine(Tiny(), precision="fp16") as engine:
        tokens, targets = batches(1)[0]
        engine.backward(loss_of(engine(tokens), targets) * float("inf"))
        engine.step()
        take(engine, 1)
        engine.save_checkpoint(tmp_path / "checkpoints")
        engine.load_checkpoint(tmp_path / "checkpoints")
    said = [record.getMessage() for record in caplog.records]
    assert said[0].startswith("engine made: 593,920 parameters in 7 units, ")
    assert said[1:] == [
        "a gradient is not finite: the step is skipped, the loss scale is 32768 now",
        f"checkpoint saved: {tmp_path / 'checkpoints' / 'step1'}, step 1",
        "checkpoint loaded: step 1",
    ]


def test_a_library_logs_nothing_unless_asked() -> None:
    code = "import logging, offload; logging.getLogger('offload').warning('unheard')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
