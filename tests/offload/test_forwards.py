"""Forwards of an engine that does not train are reported, as steps are."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from runs import least, make_model
from torch import nn

from offload import Observer, OffloadEngine, OffloadError, StepRecord
from offload.run.forwards import Forwards, whole_modules


class Seen(Observer):
    def __init__(self) -> None:
        self.records: list[StepRecord] = []

    def step(self, record: StepRecord) -> None:
        self.records.append(record)


def test_each_forward_is_reported_with_its_bytes_and_tokens(tmp_path: Path):
    model = make_model()
    budget = least(tmp_path)
    with OffloadEngine(model, optimizer=None, nvme_path=tmp_path, host_memory=budget) as engine:
        with pytest.raises(OffloadError, match="nothing to report"):
            engine.report()
        seen = Seen()
        engine.add_observer(seen)
        tokens = torch.zeros(3, 4, dtype=torch.int64)
        with torch.no_grad():
            for _ in range(4):
                model(tokens)
        report = engine.report()
        assert [record.report.step for record in seen.records] == [1, 2, 3, 4]
        assert report.sequences == 3 and report.tokens_per_second == 3 / report.seconds
        assert "tokens/s, of 3 sequences" in str(report) and str(report).startswith("forward 4 took")
        read = sum(record.report.nvme_read_bytes for record in seen.records)
        assert read == pytest.approx(4 * engine.plan.nvme_bytes["weights"], rel=0.5)
    assert not model._forward_hooks and not model._forward_pre_hooks


def test_a_wrapper_and_what_it_wraps_are_one_forward():
    inner = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    wrapper = nn.ModuleDict({"wrapped": inner})
    assert list(whole_modules(wrapper)) == [wrapper, inner]
    reports = Counted()
    forwards = Forwards(reports, reports, dict)  # type: ignore[arg-type]
    for _ in range(2):  # the wrapper's forward calls the other one's
        forwards.begin(wrapper, (), {})
        forwards.begin(inner, (), {})
        forwards.end(inner, (), {}, 1)
        forwards.end(wrapper, (), {}, 1)
    forwards.begin(inner, (), {})
    forwards.end(inner, (), {}, None)  # it has raised
    assert reports.numbers == [1, 2]


def test_a_pause_longer_than_a_forward_belongs_to_none():
    reports = Counted()
    forwards = Forwards(reports, reports, dict)  # type: ignore[arg-type]
    for now, restarts in ((5.0, 1), (5.5, 1), (9.0, 2)):  # the first one, a second after half a second, a third
        reports.now = now
        forwards.begin(nn.Identity(), (), {})
        forwards.end(nn.Identity(), (), {}, 1)
        assert reports.restarts == restarts


class Counted:
    """A reporter, its meter and a watch: a forward lasts a second."""

    def __init__(self) -> None:
        self.numbers: list[int] = []
        self.restarts, self.now, self.ended = 0, 0.0, 0.0
        self.meter, self.seconds = self, 1.0

    def idle_seconds(self) -> float:
        return self.now - self.ended

    def restart(self) -> None:
        self.restarts += 1

    def report(self, memory, step, *_, **__):
        self.numbers.append(step)
        self.ended = self.now
        return self

    def step(self, report, groups) -> None:
        pass
