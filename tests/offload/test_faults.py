"""What happens when something goes wrong: one clear error, nothing hangs, nothing is left behind."""

import gc
import resource
import signal
import threading
import time
import weakref
from pathlib import Path

import forked
import pytest
import torch
from tiny import Tiny, batches, least_budget, loss_of, train

from offload import (
    BudgetError,
    ConfigError,
    NonFiniteGradient,
    OffloadEngine,
    OffloadError,
    StorageFull,
    StoreUnsafe,
)


def test_a_non_finite_gradient_changes_nothing(make_model, tmp_path: Path):
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory="5MiB", lr=1e-2) as engine:
        train(engine, 1)
        before = engine.state_dict()
        tokens, targets = batches(1)[0]
        engine.backward(loss_of(engine(tokens), targets) * float("inf"))
        with pytest.raises(NonFiniteGradient, match=r"gradient of \S+ is not finite"):
            engine.step()
        after = engine.state_dict()
        assert all(torch.equal(before[name], after[name]) for name in before)
        assert engine.global_step == 1
        train(engine, 1)
        assert engine.global_step == 2


def test_the_least_budget_works_and_one_byte_less_is_refused(make_model, tmp_path: Path):
    budget = least_budget(make_model(), tmp_path)
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory=budget) as engine:
        train(engine, 2)
    with pytest.raises(BudgetError, match=f"least that works for this model is {budget:,} bytes") as caught:
        OffloadEngine(make_model(), nvme_path=tmp_path, host_memory=budget - 1)
    assert caught.value.needed_bytes == budget


def test_without_nvme_everything_must_fit(make_model):
    with pytest.raises(BudgetError, match="no nvme_path") as caught:
        OffloadEngine(make_model(), host_memory="1MiB")
    with OffloadEngine(make_model(), host_memory=caught.value.needed_bytes) as engine:
        train(engine, 1)


def test_nvme_capacity_is_obeyed(make_model, tmp_path: Path):
    budget = least_budget(make_model(), tmp_path)
    with pytest.raises(BudgetError, match="nvme_capacity is too small") as caught:
        OffloadEngine(make_model(), nvme_path=tmp_path, host_memory=budget, nvme_capacity="1MiB")
    needed = caught.value.needed_bytes
    OffloadEngine(make_model(), nvme_path=tmp_path, host_memory=budget, nvme_capacity=needed).close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"host_memory": "lots"}, "host_memory: expected bytes"),
        ({"host_memory": -1}, "host_memory: expected a number of bytes"),
        ({"hostmemory": "1GiB"}, "unknown option 'hostmemory', did you mean 'host_memory'"),
        ({"precision": "fp8"}, "precision: expected one of 'auto', 'bf16', 'fp16', 'fp32', got 'fp8'"),
        ({"lr": -1.0}, "lr: expected a finite number >= 0"),
        ({"betas": (0.9, 1.0)}, "betas: expected two numbers from 0 to less than 1"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps: expected a whole number >= 1"),
        ({"tile_bytes": 17}, "tile_bytes: expected at least 65536 bytes"),
        ({"device": "mps"}, 'device: expected "cpu" or "cuda"'),
        ({"optimizer": "soap"}, "optimizer: expected one of"),
    ],
)
def test_a_wrong_option_is_named(make_model, options, message):
    model = make_model()
    with pytest.raises(ConfigError, match=message):
        OffloadEngine(model, **options)
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())


def test_a_model_that_cannot_be_offloaded_is_refused():
    with pytest.raises(ConfigError, match="no floating-point parameters"):
        OffloadEngine(torch.nn.ReLU())
    model = torch.nn.Linear(4, 4, dtype=torch.complex64)
    with pytest.raises(ConfigError, match=r"weight is torch\.complex64"):
        OffloadEngine(model)

    class Silent(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(4, device="meta"))

    with pytest.raises(ConfigError, match=r"no reset_parameters\(\)"):
        OffloadEngine(Silent())


def test_a_wrong_path_is_refused_before_the_model_is_touched(make_model, tmp_path: Path):
    model = make_model()
    (tmp_path / "file").touch()
    for path, error in ((tmp_path / "missing", StoreUnsafe), (tmp_path / "file", StoreUnsafe)):
        with pytest.raises(error):
            OffloadEngine(model, nvme_path=path, host_memory="5MiB")
    assert all(type(p) is torch.nn.Parameter for p in model.parameters())
    assert [entry.name for entry in tmp_path.iterdir()] == ["file"]


def test_a_disk_that_fails_in_the_middle_raises_the_first_error_everywhere(tmp_path: Path):
    """RLIMIT_FSIZE makes every later write fail: the update's, on its own thread."""
    code = f"""
import resource, signal
import torch
from tiny import Tiny, batches, loss_of
from offload import OffloadEngine, OffloadError
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
engine = OffloadEngine(Tiny(), nvme_path={str(tmp_path)!r}, host_memory="5MiB")
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
first = None
try:
    for tokens, targets in batches(4):
        engine.backward(loss_of(engine(tokens), targets))
        engine.step()
    engine.synchronize()
except OffloadError as error:
    first = error
    print(type(error).__name__, error)
try:
    engine.module.head.weight.norm()
except OffloadError as error:
    print("same", error is first)
engine.close()
print("closed")
"""
    told = forked.run_well(code)
    assert "StorageIOError write of" in told and "File too large" in told, told
    assert "same True" in told and told.endswith("closed\n")


def test_a_full_file_system_is_refused_at_the_start(make_model, tmp_path: Path):
    with pytest.raises(StorageFull):
        raise_limit_and_build(make_model(), tmp_path)


def raise_limit_and_build(model: torch.nn.Module, path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    previous = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))
    try:
        OffloadEngine(model, nvme_path=path, host_memory="5MiB")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, previous)


def test_an_engine_that_is_dropped_ends_by_itself(make_model, tmp_path: Path):
    before = set(threading.enumerate())
    engine = OffloadEngine(make_model(), nvme_path=tmp_path, host_memory="5MiB")
    train(engine, 1)
    gone = weakref.ref(engine._session)
    del engine

    def threads() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t not in before and t.name in ("offload-update", "offload-close")]

    deadline = time.monotonic() + 30
    while (gone() is not None or threads()) and time.monotonic() < deadline:  # the update under way still needs it
        gc.collect()
        time.sleep(0.01)
    assert gone() is None and not threads()
    OffloadEngine(Tiny(), nvme_path=tmp_path, host_memory="5MiB").close()


def test_a_process_that_ends_without_close_ends_cleanly(tmp_path: Path):
    code = f"""
from tiny import Tiny, train
from offload import OffloadEngine
engine = OffloadEngine(Tiny(), nvme_path={str(tmp_path)!r}, host_memory="5MiB")
train(engine, 2)
"""
    run = forked.run(code)
    assert run.returncode == 0 and run.stderr == "", run.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [MemoryError(), OffloadError("no more memory")])
def test_a_commit_that_fails_in_any_way_is_told_of(error, make_model, tmp_path, monkeypatch):
    """The thread of commits would end without a word, and the run go on without commits."""
    monkeypatch.setattr("offload.waiting.WAIT_TIMEOUT_S", 5.0)

    def fail(*_: object) -> None:
        raise error

    engine = OffloadEngine(make_model(), lr=1e-2, nvme_path=tmp_path, durable=1)
    monkeypatch.setattr("swapper.DurableStore.commit", fail)
    with pytest.raises(type(error)) as raised:
        train(engine, 3)
    assert raised.value is error
    engine.close()
