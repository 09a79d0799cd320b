"""``offload train`` as a user meets it: results, refusals, one line each, and nothing left behind."""

from __future__ import annotations

import io
import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from pathlib import Path
from signal import SIGINT, SIGTERM
from typing import Any

import forked
import pytest
import torch
from busy_machine import allowed

from offload import OffloadEngine
from offload.cli import main
from offload.run.figures import figures
from offload.run.reading import read_run
from offload.train import command, reference, training, verify
from offload.train.settings import Settings

_TINY = (
    *("--layers", "3", "--width", "64", "--heads", "4", "--context", "32", "--batch", "2", "--steps", "4"),
    *("--precision", "fp32"),  # nothing need be measured to choose it
)


class Place:
    """A folder for the text, the store and the results of one run, with the means to run it."""

    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.nvme = folder / "nvme"
        self.out = folder / "results" / "run"
        self.text = folder / "text"
        self.nvme.mkdir()
        self.text.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
        self._capsys = capsys

    def arguments(self, *options: object) -> list[str]:
        text = () if "--text" in options else (self.text,)
        places = ("--nvme-path", self.nvme, "--out", self.out, "--host-memory", "2MiB")
        return ["train", *map(str, text), *_TINY, *map(str, places), *map(str, options)]

    def train(self, *options: object) -> tuple[int, str, str]:
        """Run in this process. Returns exit status, stdout, stderr."""
        self._capsys.readouterr()
        status = main(self.arguments(*options))
        out, err = self._capsys.readouterr()
        return status, out, err

    def fork(self, *options: object) -> forked.Program:
        """Run in a process of its own, to which all is imported."""
        text = "import runpy; runpy.run_module('offload', run_name='__main__')"
        return forked.Program(text, *self.arguments(*options))

    def start(self, *options: object) -> subprocess.Popen[str]:
        """Run in a process of its own, from its first import on."""
        return subprocess.Popen(
            [sys.executable, "-m", "offload", *self.arguments(*options)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def assert_nothing_left(self) -> None:
        assert list(self.nvme.iterdir()) == []
        assert not self.out.parent.exists()


@pytest.fixture
def place(tmp_path, capsys, monkeypatch):
    """One thread: for models this small a second one gains nothing, and costs much where a core is busy."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield Place(tmp_path, capsys)
    torch.set_num_threads(num_threads)


@pytest.fixture
def quick(monkeypatch):
    """A run draws no pictures, its model writes four bytes, and ``--verify`` repeats steps in this process."""

    def repeat(settings: Settings, num_steps: int) -> Iterator[dict[str, Any]]:
        answers: list[dict[str, Any]] = []
        request = {"settings": asdict(settings), "steps": num_steps, "num_threads": 1, "parent": os.getppid()}
        with monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", io.StringIO(json.dumps(request)))
            patch.setattr(reference, "_answer", answers.append)
            reference.main()
        yield from answers

    monkeypatch.setattr(verify, "_repeat", repeat)
    monkeypatch.setattr(training, "generate", partial(_write_four_bytes, training.generate))
    monkeypatch.setattr("offload.train.plots.plot_loss", lambda *figures: None)
    monkeypatch.setattr("offload.train.plots.plot_memory", lambda *figures: None)


def _write_four_bytes(generate: Callable[..., bytes], *arguments: Any, length: int, **options: Any) -> bytes:
    return generate(*arguments, length=4, **options)


# Results.


def test_json_is_one_object_and_the_results_are_written(place):
    status, out, err = place.train("--steps", "15", "--lr", "1e-2", "--verify", "2", "--json")
    assert status == 0, err
    figures = json.loads(out)
    assert figures["parameters"] == 3 * (12 * 64**2 + 4 * 64) + 2 * 256 * 64 + 2 * 64
    assert figures["model_state_bytes"] == figures["parameters"] * (16 if figures["precision"] == "fp32" else 14)
    assert figures["host_memory_bytes"] == 2 << 20
    assert figures["host_memory_used_bytes"] <= 2 << 20
    assert figures["peak_rss_bytes"] > figures["rss_imports_bytes"] > 0
    assert figures["steps"] == 15
    assert figures["loss_last"] < figures["loss_first"] - 1
    assert figures["step_seconds_median"] > 0
    assert figures["bound_seconds"] > 0
    assert figures["bound_by"] in ("compute", "nvme", "schedule")
    assert figures["nvme_read_bytes_per_step"] > 0
    assert figures["nvme_write_bytes_per_step"] > 0
    assert figures["io_backend"] in ("io_uring", "threads")
    assert figures["verified"] is True

    record = json.loads((place.out / "run.json").read_text())
    assert {key: record[key] for key in figures} == figures
    assert len(record["series"]["losses"]) == 15
    for picture in ("loss.png", "memory.png"):
        assert (place.out / picture).read_bytes().startswith(b"\x89PNG")
    assert list(place.nvme.iterdir()) == []


def test_the_table_is_for_people_and_goes_to_stdout(place):
    status, out, _ = place.train()
    assert status == 0
    for word in ("parameters", "model state", "budget", "peak RSS", "bound", "endurance", "sample", "loss.png"):
        assert word in out
    assert "verified" not in out  # nobody asked


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize(
    "options",
    [
        ("--precision", "fp32", "--io-backend", "threads", "--host-memory", "2000KiB"),
        ("--precision", "bf16", "--io-backend", "auto", "--tile-bytes", "128KiB"),
        ("--precision", "bf16", "--io-backend", "threads", "--host-memory", "auto"),
    ],
)
def test_every_way_to_run_gives_the_bits_of_the_run_in_memory(place, options):
    status, out, err = place.train("--verify", "3", "--json", *options)
    assert status == 0, err
    assert json.loads(out)["verified"] is True


@pytest.mark.usefixtures("quick")
def test_budgets_tiles_and_backends_change_no_loss(place):
    def losses(*options):
        assert place.train(*options)[0] == 0
        return json.loads((place.out / "run.json").read_text())["series"]["losses"]

    expected = losses()
    assert losses("--host-memory", "64MiB") == expected
    assert losses("--io-backend", "threads", "--tile-bytes", "64KiB") == expected
    assert losses("--seed", "1") != expected


@pytest.mark.usefixtures("quick")
@pytest.mark.parametrize("what", ["loss", "weights"])
def test_one_wrong_bit_is_found_and_named(place, monkeypatch, what):
    def wrong(*args, **kwargs):
        training = real(*args, **kwargs)
        if what == "loss":
            loss = training.steps[1].loss
            object.__setattr__(training.steps[1], "loss", torch.tensor(loss).nextafter(torch.tensor(9.0)).item())
        else:
            training.digests["head.weight"] = "0" * 32
        return training

    real = command.train
    monkeypatch.setattr(command, "train", wrong)
    status, out, _ = place.train("--verify", "3")
    assert status == 1
    assert ("verified     NO: the loss of step 2" if what == "loss" else "head.weight") in out


def test_without_matplotlib_there_are_no_pictures_and_one_line_says_so(place, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.delitem(sys.modules, "offload.train.plots", raising=False)
    status, out, err = place.train("--host-memory", "auto")
    assert status == 0, err
    assert "no pictures: matplotlib is not installed (pip install 'offload-engine[plot]')" in out.splitlines()
    assert {file.name for file in place.out.iterdir()} == {"run.json", "run.jsonl"}
    assert "nothing is stored there" in out and "by nothing" not in out


# Refusals.


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--nvme-path", "{missing}"), "missing"),
        (("--nvme-path", "{text}"), "not a directory"),
        (("--host-memory", "100KiB"), "the least that works"),
        (("--host-memory", "much"), "host_memory"),
        (("--nvme-capacity", "10KiB"), "nvme_capacity"),
        (("--text", "/dev/null"), "too short"),
        (("--text", "{missing}"), "missing"),
        (("--context", "100000"), "too short"),
        (("--heads", "5"), "not divisible"),
        (("--heads", "64"), "not divisible"),
        (("--steps", "0"), "--steps"),
        (("--batch", "1000000000"), "GiB are free: give --batch "),
        (("--batch", "1000000", "--context", "1000000000"), "GiB are free: give a smaller --context"),
        (("--layers", "many"), "--layers"),
        (("--lr", "-1"), "--lr"),
        (("--lr", "nan"), "--lr"),
        (("--verify", "5"), "more than --steps"),
        (("--precision", "int3"), "--precision"),
        (("--out", "{text}"), "--out"),
        (("--out", "{text}/below"), "--out"),
        (("--out", "/proc/here"), "--out"),
        (("--no-such-option",), "--no-such-option"),
    ],
)
def test_what_cannot_work_is_one_line_and_leaves_nothing(place, tmp_path, options, said):
    filled = [option.format(missing=tmp_path / "missing", text=place.text) for option in options]
    status, _, err = place.train(*filled)
    assert status == 2
    assert err.count("\n") == 1 and err.startswith("offload train: error: ")
    assert said in err
    place.assert_nothing_left()


@pytest.mark.usefixtures("quick")
def test_the_least_budget_that_the_error_names_works(place):
    _, _, err = place.train("--host-memory", "1KiB")
    least = int(re.findall(r"Raise host_memory to (\d+)", err)[0])
    assert place.train("--host-memory", least)[0] == 0
    assert place.train("--host-memory", least - 1)[0] == 2


@pytest.mark.usefixtures("quick")
def test_two_runs_on_one_path_do_not_disturb_each_other(place):
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(8)))
    with OffloadEngine(model, nvme_path=place.nvme, host_memory="3MiB", precision="fp32") as engine:
        assert sum(engine.plan.nvme_bytes.values()) > 0
        before = [p.detach().clone() for p in model.parameters()]
        status, _, _ = place.train()
        assert status == 0
        assert all(torch.equal(p.detach().clone(), value) for p, value in zip(model.parameters(), before, strict=True))
    assert not any(place.nvme.iterdir())


@pytest.mark.parametrize("mount", ["ro", "size=512k"])
def test_a_path_that_cannot_be_written_or_is_too_small_is_refused(place, mount):
    def mounted(*command):
        return subprocess.run(command, capture_output=True, check=False).returncode == 0

    if not mounted("mount", "-t", "tmpfs", "-o", mount, "tmpfs", str(place.nvme)):
        pytest.skip("needs the right to mount")
    try:
        status, _, err = place.train()
    finally:
        subprocess.run(["umount", str(place.nvme)], check=True)
    assert status == 2
    assert err.count("\n") == 1 and str(place.nvme) in err
    place.assert_nothing_left()


@pytest.mark.parametrize(("module", "status"), [("aio_ext._aio", 2), ("offload.kernels._kernels", 1)])
def test_a_missing_native_part_is_one_line(place, module, status):
    done = forked.run(
        f"""
import sys
for name in [name for name in sys.modules if name.startswith(("offload", "aio_ext"))]:
    del sys.modules[name]
sys.modules[{module!r}] = None
from offload.cli import main
sys.exit(main(sys.argv[1:]))
""",
        *place.arguments(),
    )
    assert done.returncode == status
    assert done.stderr.splitlines()[-1].startswith("offload train: error: "), done.stderr
    assert "Traceback" not in done.stderr and "pip install" in done.stderr
    place.assert_nothing_left()


# Being stopped.


@pytest.mark.parametrize(
    ("number", "status", "options", "line"),
    [
        (SIGINT, 130, ("--steps", "1000"), ""),
        (SIGINT, 130, ("--steps", "300"), "training: step 30"),
        (SIGTERM, 143, ("--steps", "60", "--verify", "60"), "verifying: step 6"),
    ],
    ids=["at the start", "in training", "in verifying"],
)
def test_a_signal_ends_it_within_two_seconds_and_leaves_the_record_of_its_steps(place, number, status, options, line):
    run = place.fork(*options) if line else place.start(*options)
    assert run.stdout is not None and run.stderr is not None
    threading.Thread(target=run.stdout.read, daemon=True).start()
    if line:
        for said in run.stderr:
            if said.startswith(line):
                break
        else:
            pytest.fail(f"it never said {line!r}")
    else:
        _wait_for_handler(run.pid)  # which comes before the imports
    children = _children(run.pid)
    sent = time.monotonic()
    run.send_signal(number)
    last = run.stderr.read().splitlines()[-1]
    assert run.wait() == status
    took = time.monotonic() - sent
    assert took < allowed(2)
    kept = re.fullmatch(rf"offload: stopped by {number.name}( after step (\d+), which is kept: .*)?", last)
    assert kept is not None, last
    assert not [pid for pid in children if Path(f"/proc/{pid}").exists()]
    assert bool(children) == line.startswith("verifying")
    if line:  # steps were taken: their record stays
        checkpoints = ["checkpoints"] if "training" in line else []
        assert sorted(file.name for file in place.out.iterdir()) == [*checkpoints, "run.jsonl"]
        assert bool(kept[1]) == bool(checkpoints) and not any(place.nvme.iterdir())
        ended = figures(read_run(place.out))
        assert ended["steps"] >= 30 and ended["state"].startswith(("ended by Stopped", "finished"))
    else:
        place.assert_nothing_left()


@pytest.mark.usefixtures("quick")
def test_a_run_that_is_stopped_goes_on_as_if_it_had_not_been(place: Place, monkeypatch: pytest.MonkeyPatch):
    def losses() -> list[float]:
        run = read_run(place.out)
        return list(run.numbers["loss"])

    assert place.train("--steps", "6")[0] == 0
    expected = losses()
    shutil.rmtree(place.out)
    with monkeypatch.context() as patch, pytest.raises(_Ended, match="130"):
        batches = Settings.batches
        patch.setattr(Settings, "batches", lambda settings: _interrupted(batches(settings), 3))
        patch.setattr("offload.cli.app.os._exit", _end)
        place.train("--steps", "6")
    assert losses() == expected[:3]
    status, _, err = place.train("--steps", "6", "--lr", "0.5")
    assert status == 2 and "has step 3 of a run with lr 0.001, and here it is 0.5" in err
    assert place.train("--steps", "6", "--verify", "2")[0] == 2
    assert place.train("--steps", "6")[0] == 0
    assert losses() == expected


class _Ended(Exception):
    """In place of ``os._exit``."""


def _end(status: int) -> None:
    raise _Ended(status)


def _interrupted(batches: Iterator[Any], after: int) -> Iterator[Any]:
    """The user presses Ctrl-C while a batch is drawn."""
    for number, batch in enumerate(batches):
        if number == after:
            os.kill(os.getpid(), SIGINT)
        yield batch


def _wait_for_handler(pid: int) -> None:
    """Until the process handles SIGTERM, which nobody but the program does."""
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        (caught,) = [line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if "SigCgt" in line]
        if int(caught.split()[1], 16) & 1 << (SIGTERM - 1):
            return
    pytest.fail("no handler for SIGTERM")


def _children(pid: int) -> list[int]:
    """The processes that a process has started and that still run."""
    tasks = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(child) for task in tasks for child in task.read_text().split()]
