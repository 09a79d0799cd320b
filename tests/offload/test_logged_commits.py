"""Commits of a run whose state rests in memory: it goes on from its log with the same bits."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
import torch
from runs import bits, least, make_model, train

from offload import OffloadEngine
from offload.checkpoint.native.description import Description
from offload.plan.update_log import LOGGED_STEPS, log_bytes
from offload.planning import store_bytes
from swapper import StorageFull, generation_metadata

LAST = 12


def copied(engine: OffloadEngine, nvme: Path, to: Path) -> None:
    """The store as it is after the commit of the last step, which another program may take up."""
    engine._session.checkpoints.pass_boundary()
    engine._session.checkpoints.generations.wait()
    subprocess.run(["cp", "-a", "--sparse=always", str(nvme), str(to)], check=True)


def clamp(module: torch.nn.Module, _: object) -> None:
    module.weight.data.clamp_(-0.03, 0.03)


def num_logged(path: Path) -> int:
    metadata = generation_metadata(path / "run-1.store")
    return len(Description.decode(metadata, "the run").updates)


def test_a_run_goes_on_from_a_log_with_the_same_bits(tmp_path: Path) -> None:
    options = {"lr": 1e-3, "precision": "bf16", "gradient_clipping": 0.5}
    with OffloadEngine(make_model(), **options) as engine:
        expected, final = train(engine, LAST), bits(engine.module)
    nvme, copies = tmp_path / "nvme", {}
    nvme.mkdir()
    with OffloadEngine(make_model(), nvme_path=nvme, durable=1, **options) as engine:
        for step in range(1, LAST):
            train(engine, step)
            if step in (2, 10):  # most is logged once; each unit was written a second time, and logged since
                copies[step] = tmp_path / f"{step}"
                copied(engine, nvme, copies[step])
    assert num_logged(nvme) == 0  # at its end all is written
    assert 0 < num_logged(copies[2]) < num_logged(copies[10])
    small = least(tmp_path, **options)
    for step, path in copies.items():  # in place, and the last one into a new store
        budget = small if step == 10 else "1GiB"
        with OffloadEngine(make_model(1), nvme_path=path, durable=1, host_memory=budget, **options) as engine:
            engine.load_checkpoint()
            assert engine.global_step == step
            assert train(engine, step + 2) == expected[step : step + 2]
            assert step != 10 or bits(engine.module).equal(final)
            engine.close(discard=True)


@pytest.mark.parametrize("how", ["a write", "a forward that writes", "gradients that are replaced"])
def test_what_no_update_has_done_is_in_the_commit(how: str, tmp_path: Path) -> None:
    """Beside the training, and hidden from it: through memory that torch keeps no account of."""
    nvme, copy = tmp_path / "nvme", tmp_path / "copy"
    nvme.mkdir()

    def make(path: Path) -> OffloadEngine:
        model = make_model()
        if how == "a forward that writes":
            model[-1].register_forward_pre_hook(clamp)
        return OffloadEngine(model, lr=1e-2, nvme_path=path, durable=1)

    with make(nvme) as engine:
        for step in range(1, 5):
            train(engine, step)
            if step > 2 and how == "a write":
                engine.module[-1].weight.data.mul_(0.5)
            if step > 2 and how == "gradients that are replaced":
                engine.module[-1].weight.grad = torch.ones(200, 32)
        copied(engine, nvme, copy)
        final = bits(engine.module)
        engine.close(discard=True)
    assert num_logged(copy)
    with make(copy) as engine:
        engine.load_checkpoint()
        assert bits(engine.module).equal(final)
        engine.close(discard=True)


def test_a_checkpoint_and_its_store_need_no_log(tmp_path: Path) -> None:
    with OffloadEngine(make_model(), lr=1e-3, nvme_path=tmp_path, durable=1, keep_last=1) as engine:
        for step in (3, 6):
            train(engine, step)
            engine.save_checkpoint(tmp_path / "saved")
            assert num_logged(tmp_path) == 0
        train(engine, 8)
        final = bits(engine.module)
        engine.load_checkpoint(tmp_path / "saved")
        train(engine, 8)
        assert bits(engine.module).equal(final)
    (saved,) = (tmp_path / "saved").glob("step*")
    assert not Description.decode(generation_metadata(saved), "the checkpoint").updates


def test_a_log_takes_room_that_is_there_or_there_is_none(tmp_path: Path) -> None:
    def make(**options: object) -> OffloadEngine:
        return OffloadEngine(make_model(), lr=1e-3, nvme_path=tmp_path, **options)

    with make(durable=1) as engine:
        plan, log = engine.plan, log_bytes(engine.plan)
        needed = store_bytes(plan, engine.config, speculative=False)
        assert log == LOGGED_STEPS * plan.resident_bytes["grads"] and all(item.is_logged for item in plan.units)
    with make(durable=1, nvme_capacity=needed - 1) as engine:
        assert not log_bytes(engine.plan)
    with pytest.raises(StorageFull):
        make(durable=1, nvme_capacity=needed - log - 1)
    for options in ({"durable": 2}, {"durable": 1, "optimizer": "sgd"}, {"durable": 1, "optimizer": "muon"}):
        with make(**options) as engine:  # not every step; gradients are as large as what they change; another rule
            assert not log_bytes(engine.plan)
