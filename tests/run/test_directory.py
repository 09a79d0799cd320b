"""The run directory: what a run leaves there, and what goes wrong with it."""

from __future__ import annotations

import json
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny import Tiny, batches, least_budget, loss_of

from offload import ConfigError, OffloadEngine, StoreUnsafe
from offload.run import directory
from offload.run.figures import figures
from offload.run.reading import read_run


def take(engine: OffloadEngine, count: int) -> list[float]:
    """Steps from the engine's present one on; their losses."""
    losses = []
    for tokens, targets in batches(8)[engine.global_step :][:count]:
        loss = loss_of(engine(tokens), targets)
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


@pytest.fixture
def options(tmp_path: Path) -> Iterator[dict[str, object]]:
    torch.manual_seed(0)
    nvme = tmp_path / "nvme"
    nvme.mkdir()
    yield {"nvme_path": nvme, "host_memory": 2 * least_budget(Tiny(), nvme), "run_dir": tmp_path / "runs" / "a"}


def test_each_step_is_recorded_with_its_loss_and_what_it_moved(options) -> None:
    with OffloadEngine(Tiny(), **options) as engine:
        assert read_run(options["run_dir"]).is_running
        losses = take(engine, 5)
        engine.log(accuracy=0.5, correct=torch.tensor(7))
        report, plan = engine.report(), engine.plan
    run = read_run(options["run_dir"])
    found = figures(run)
    assert (list(run.steps), list(run.numbers["loss"])) == ([1, 2, 3, 4, 5], losses)
    assert run.metrics == {"accuracy": [(5, 0.5)], "correct": [(5, 7.0)]}
    assert (found["state"], found["parameters"]) == ("finished", plan.num_parameters)
    assert run.numbers["seconds"][-1] == report.seconds and run.numbers["learning_rate"][-1] == 1e-3
    assert run.memory == plan.memory and run.numbers["process_bytes"][-1] > 50e6
    (drive,) = found["drives"]
    assert drive["path"] == str(options["nvme_path"])
    assert drive["write_bytes"] == sum(run.numbers["nvme_write_bytes"]) > 0
    assert 0 < drive["busy_share"] <= 1 and drive["measured_bytes_per_s"] > 0
    assert run.timeline is not None and run.timeline[0] == directory.TIMELINE_STEP
    assert {"compute", "update", "read", "write"} <= {track for track, *_ in run.timeline[1]}


def test_a_resumed_run_goes_on_in_its_directory(options, tmp_path: Path) -> None:
    with OffloadEngine(Tiny(), **options) as engine:
        take(engine, 2)
        engine.save_checkpoint(tmp_path / "checkpoints")
        take(engine, 2)
        engine.log(accuracy=0.1)
    with OffloadEngine(Tiny(), **options) as engine:
        engine.load_checkpoint(tmp_path / "checkpoints")
        losses = take(engine, 1)
        run = read_run(options["run_dir"])
    assert list(run.steps) == [1, 2, 3] and run.numbers["loss"][2] == losses[0]
    assert (run.num_repeated, [part.first_step for part in run.sections]) == (2, [1, 3])
    assert run.metrics["accuracy"] == []
    written = figures(run)["drives"][0]["write_bytes"]
    assert written > sum(run.numbers["nvme_write_bytes"])  # what was taken again was written all the same


def test_an_engine_that_goes_back_replaces_its_own_steps(tmp_path: Path) -> None:
    with OffloadEngine(Tiny(), run_dir=tmp_path / "run") as engine:
        take(engine, 1)
        engine.save_checkpoint(tmp_path / "checkpoints")
        take(engine, 3)
        engine.load_checkpoint(tmp_path / "checkpoints")
        (loss,) = take(engine, 1)
    run = read_run(tmp_path / "run")
    assert list(run.steps) == [1, 2] and run.numbers["loss"][1] == loss
    assert (run.num_repeated, run.sections[0].last_step) == (3, 2)


def test_the_mean_loss_of_micro_batches_is_that_of_the_step(tmp_path: Path) -> None:
    with OffloadEngine(Tiny(), run_dir=tmp_path / "run", gradient_accumulation_steps=2) as engine:
        losses = take(engine, 1) + take(engine, 1)
    (found,) = read_run(tmp_path / "run").numbers["loss"]
    assert found == pytest.approx(sum(losses) / 2)


def test_a_loop_of_ones_own_logs_its_loss(tmp_path: Path) -> None:
    with OffloadEngine(Tiny(), run_dir=tmp_path / "run") as engine:
        for tokens, targets in batches(2):
            loss = loss_of(engine(tokens), targets)
            loss.backward()
            engine.optimizer.step()
            engine.optimizer.zero_grad()
            engine.log(loss=loss)
    found = figures(read_run(tmp_path / "run"))
    assert found["steps"] == 2 and found["loss_last"] == loss.item()


def test_what_belongs_to_others_is_refused_and_stays(options, tmp_path: Path) -> None:
    with OffloadEngine(Tiny(), **options) as engine:
        take(engine, 1)
        with pytest.raises(ConfigError, match="another process"):
            OffloadEngine(Tiny(), **options)
    before = (options["run_dir"] / "run.jsonl").read_bytes()
    with pytest.raises(ConfigError, match=r"another model is there \(Tiny, 593,920 parameters\)"):
        OffloadEngine(Tiny(64), run_dir=options["run_dir"])
    assert (options["run_dir"] / "run.jsonl").read_bytes() == before
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be written"):
        OffloadEngine(Tiny(), run_dir=tmp_path / "file")


def test_an_engine_that_cannot_be_made_leaves_no_directory(tmp_path: Path) -> None:
    with pytest.raises((ConfigError, StoreUnsafe)):
        OffloadEngine(Tiny(), run_dir=tmp_path / "run", nvme_path=tmp_path / "missing")

    class Fails(Tiny):
        def to(self, *_: object, **__: object):
            raise RuntimeError("planted")

        def named_modules(self, *args: object, **options: object):
            if Path(tmp_path / "run").exists():
                raise RuntimeError("planted")
            return super().named_modules(*args, **options)

    with pytest.raises(RuntimeError, match="planted"):
        OffloadEngine(Fails(), run_dir=tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_the_error_that_ended_it_is_said(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), OffloadEngine(Tiny(), run_dir=tmp_path / "run") as engine:
        take(engine, 1)
        _ = 1 / 0
    assert figures(read_run(tmp_path / "run"))["state"] == "ended by ZeroDivisionError: division by zero"


def test_a_line_that_was_cut_off_is_left_out(tmp_path: Path) -> None:
    with OffloadEngine(Tiny(), run_dir=tmp_path / "run") as engine:
        take(engine, 2)
    file = tmp_path / "run" / "run.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    steps = [at for at, line in enumerate(lines) if json.loads(line)["kind"] == "step"]
    file.write_bytes(b"".join(lines[: steps[1]]) + lines[steps[1]][:40])  # as a kill leaves it
    assert figures(read_run(tmp_path / "run"))["state"] == "killed"
    with OffloadEngine(Tiny(), run_dir=tmp_path / "run") as engine:
        take(engine, 3)
    run = read_run(tmp_path / "run")
    assert (list(run.steps), run.num_damaged, run.num_repeated) == ([1, 2, 3], 1, 1)


def test_a_full_disk_is_warned_of_once_and_changes_nothing(tmp_path: Path) -> None:
    def losses(**options: object) -> list[float]:
        torch.manual_seed(0)
        with OffloadEngine(Tiny(), **options) as engine:
            for run in engine._session.watch._observers:
                run._file.close()
                run._file = Path("/dev/full").open("wb", buffering=0)  # noqa: SIM115
            return take(engine, 3)

    expected = losses()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        assert losses(run_dir=tmp_path / "run") == expected
    (warning,) = [str(one.message) for one in said if "record of the run" in str(one.message)]
    assert "No space left" in warning and "training goes on" in warning


def test_a_step_costs_less_than_a_millisecond(options) -> None:
    with OffloadEngine(Tiny(), **options) as engine:
        take(engine, 5)
        watch, seconds = engine._session.watch, []
        for _ in range(100):
            watch._told = None
            start = time.perf_counter()
            watch.step(engine._session.last_report, engine.optimizer.param_groups)
            seconds.append(time.perf_counter() - start)
    assert sorted(seconds)[50] < 1e-3


def test_where_there_is_no_run_the_error_says_so(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is a file: give the run directory"):
        read_run(Path(__file__))
    with pytest.raises(ConfigError, match=r"run\.jsonl is missing"):
        read_run(tmp_path)
    (tmp_path / "run.jsonl").write_text("nothing\n")
    with pytest.raises(ConfigError, match="no line that a run begins with"):
        read_run(tmp_path)
