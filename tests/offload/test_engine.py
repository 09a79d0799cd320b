import json
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tiny, batches, least_budget, loss_of, train

from aio_ext.profile import IoProfile, save_profile
from offload import OffloadEngine, OffloadError
from offload.update.updater import Updater


@pytest.mark.each_value
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("clipping", [0.0, 0.05])
def test_result_does_not_depend_on_where_the_state_rests(make_model, tmp_path: Path, precision, clipping):
    options = {"precision": precision, "gradient_clipping": clipping, "lr": 1e-2}
    with OffloadEngine(make_model(), host_memory="1GiB", **options) as engine:
        assert sum(engine.plan.nvme_bytes.values()) == 0
        expected_losses, expected = train(engine)
    least = least_budget(make_model(), tmp_path, **options)
    for budget in (least, 2 * least):
        with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory=budget, **options) as engine:
            assert engine.plan.host_bytes <= budget
            assert sum(engine.plan.nvme_bytes.values()) > 0
            losses, weights = train(engine)
        assert losses == expected_losses
        for name, value in expected.items():
            assert torch.equal(weights[name], value), name
    assert all(not torch.equal(expected[name], p.to(expected[name])) for name, p in make_model().named_parameters())


def test_fp32_training_matches_torch_adamw(make_model):
    model, plain = make_model(), make_model()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.01)
    losses = []
    for tokens, targets in batches(5):
        loss = loss_of(plain(tokens), targets)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    with OffloadEngine(model, precision="fp32", lr=1e-2, gradient_clipping=0.5) as engine:
        got, weights = train(engine, 5)
    assert got == pytest.approx(losses, rel=1e-5)
    for name, parameter in plain.named_parameters():
        torch.testing.assert_close(weights[name], parameter.detach(), rtol=1e-4, atol=1e-5)


def test_everything_on_nvme_moves_the_bytes_that_the_plan_says(make_model, tmp_path: Path):
    budget = least_budget(make_model(), tmp_path, precision="fp32")
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory=budget, precision="fp32") as engine:
        store = engine._session.parts.tiers.store
        before = store.statistics()
        for tokens, targets in batches(4):
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
        engine.synchronize()
        after = store.statistics()
        assert after.write.bytes - before.write.bytes == 4 * engine.plan.step_write_bytes
        read_bytes = after.read.bytes - before.read.bytes
        assert 0.7 * 4 * engine.plan.step_read_bytes < read_bytes < 1.1 * 4 * engine.plan.step_read_bytes
        assert engine.report().nvme_write_bytes > 0.5 * engine.plan.step_write_bytes


def test_meta_model_trains_like_one_that_was_built_in_memory(tmp_path: Path):
    torch.manual_seed(3)
    real = Tiny()
    with torch.device("meta"):
        meta = Tiny()
    with OffloadEngine(real, host_memory="1GiB", precision="bf16") as engine:
        expected, _ = train(engine)
    torch.manual_seed(3)
    with OffloadEngine(meta, nvme_path=tmp_path, host_memory="5MiB", precision="bf16") as engine:
        losses, _ = train(engine)
    assert losses == expected


def test_the_timeline_of_a_step_has_every_kind_of_work_on_its_own_track(make_model, tmp_path: Path):
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory="5MiB", precision="fp32") as engine:
        with pytest.raises(OffloadError, match="no step"):
            engine.timeline(tmp_path / "trace.json")
        train(engine, 3)
        engine.timeline(tmp_path / "trace.json")
        report = engine.report()
    events = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e["ph"] == "X"]
    assert {e["cat"] for e in events} >= {"compute", "update", "read", "write"}
    computed = [e["name"] for e in events if e["cat"] == "compute"]
    assert computed[:7] == ["embed", "blocks.0", "blocks.1", "blocks.2", "blocks.3", "norm", "head"]
    assert all(e["dur"] >= 0 and e["ts"] >= 0 for e in events)
    read_bytes = sum(e["args"]["bytes"] for e in events if e["cat"] == "read")
    assert read_bytes == pytest.approx(report.nvme_read_bytes, rel=0.5)
    ends = [e["ts"] + e["dur"] for e in events if e["cat"] == "compute"]
    assert max(ends) < 1.5 * report.seconds * 1e6  # microseconds of this step; other jobs come between two clocks


def test_the_io_profile_of_the_path_is_used_if_there_is_one(make_model, tmp_path: Path, monkeypatch):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    profile = IoProfile(
        backend="threads",
        block_bytes=256 << 10,
        queue_depth=8,
        num_threads=4,
        read_bytes_per_s=3e9,
        write_bytes_per_s=2e9,
        mixed_bytes_per_s=2.4e9,
        mixed_q=1.5,
    )
    save_profile(tmp_path, profile)
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory="5MiB") as engine:
        train(engine, 2)
        assert engine.report().io_backend == "threads"
        assert (engine._session.bandwidths.read, engine._session.bandwidths.write, engine._session.bandwidths.q) == (
            3e9,
            2e9,
            1.5,
        )
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory="5MiB", io_backend="portable") as engine:
        train(engine, 1)
        assert engine.report().io_backend == "portable"
        assert engine._session.bandwidths.read != 3e9


def test_the_plan_says_what_a_step_will_take(make_model, tmp_path: Path):
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory="8MiB", precision="fp32") as engine:
        assert "limited by nvme" in str(engine.plan) and "compute is known after a step" in str(engine.plan)
        bandwidths, plan = engine._session.bandwidths, engine.plan
        assert bandwidths is not None
        assert plan.seconds == {"nvme": bandwidths.seconds(plan.step_read_bytes, plan.step_write_bytes)}
        train(engine, 2)
        assert engine.plan.seconds["compute"] == engine.report().compute_seconds
        assert "compute is known" not in str(engine.plan)


def test_synchronize_waits_for_the_last_writes_of_an_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    let_go, over, run_step = threading.Event(), [], Updater._run_step

    def end_late(updater: Updater, *arguments: Any) -> None:
        run_step(updater, *arguments)
        assert let_go.wait(60)
        over.append(updater)

    monkeypatch.setattr(Updater, "_run_step", end_late)
    with OffloadEngine(Tiny(), nvme_path=tmp_path, host_memory=least_budget(Tiny(), tmp_path)) as engine:
        session = engine._session
        ((tokens, targets),) = batches(1)
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
        session.wait_for_updates()  # all units are usable
        assert not over
        threading.Timer(0.2, let_go.set).start()
        engine.synchronize()
        assert over
        store, cache = session.parts.tiers.store, session.parts.tiers.host.cache
        assert all(transfer.done() for entry in cache.present for transfer in entry.transfers())
        moved = store.statistics()
        session.parts.tiers.host.drain()
        assert store.statistics().write.bytes == moved.write.bytes


class Backwards(Tiny):
    """Blocks that a forward uses in the reverse of their order in the model."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in reversed(self.blocks):
            x = block(x)
        return self.head(self.norm(x))


def test_units_are_updated_in_the_order_in_which_a_forward_uses_them(tmp_path: Path):
    options = {"nvme_path": tmp_path, "gradient_clipping": 1e-3, "host_memory": least_budget(Backwards(), tmp_path)}
    with OffloadEngine(Backwards(), **options) as engine:
        for tokens, targets in batches(3):
            engine.backward(loss_of(engine(tokens), targets))
            engine.step()
            engine.synchronize()
        spans = engine._session.parts.meter.trace.last  # from the second step's end to the third's
    updated = list(dict.fromkeys(span.name for span in spans if span.track == "update"))
    assert updated == ["embed", *(f"blocks.{index}" for index in (3, 2, 1, 0)), "norm", "head"]
