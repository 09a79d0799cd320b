"""Peers of ``gpu_batches.py`` on the CPU: they train, the report has their rows, and one that fails is named."""

from __future__ import annotations

import io
import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import forked
import pytest
import torch

from offload import ConfigError
from offload.compat.deepspeed.checking import check
from offload.compat.deepspeed.keys import TOP

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import _gpu_report
import _step_deepspeed
import _step_peers
from _step_model import Shape
from _step_process import Turns, WorkerFailed, last_words

_SCRIPT = Path(__file__).parents[2] / "scripts" / "gpu_batches.py"
_SHAPE = Shape.parse("llama:2x64", 1, 8, checkpointing=True)


def test_fsdp2_trains_as_plain_pytorch_does() -> None:
    generator = torch.Generator().manual_seed(0)
    peer = _step_peers.FSDP2(_SHAPE, {"device": "cpu", "precision": "fp32"})
    try:
        model = _SHAPE.model()
        model.load_state_dict({name: _step_peers._local(value) for name, value in peer.model.state_dict().items()})
        optimizer = torch.optim.AdamW(model.parameters(), **_step_peers.ADAMW)
        for _ in range(3):
            tokens, targets = _SHAPE.tokens(generator)
            loss = model(tokens, targets)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            assert peer.step(tokens, targets) == pytest.approx(loss.item(), rel=1e-5)
        num_parameters = sum(weight.numel() for weight in model.parameters())
        facts = peer.facts()
        assert facts["parameters"] == num_parameters
        num_counts = len([*model.parameters()])  # AdamW's steps, one number each
        assert facts["host_memory_bytes"] == 16 * num_parameters + 4 * num_counts
    finally:
        peer.close()


@pytest.mark.skipif(_step_peers.missing_module("deepspeed") is not None, reason="DeepSpeed is not installed")
@pytest.mark.parametrize(("system", "bytes_a_parameter"), [("deepspeed", 24), ("deepspeed_zero2", 20)])
def test_deepspeed_trains_as_plain_pytorch_does(system: str, bytes_a_parameter: int) -> None:
    """What it keeps in the precision of compute takes 4 bytes in fp32: weights, and with ZeRO-3 their gradients."""
    request = {"shape": asdict(_SHAPE), "device": "cpu", "precision": "fp32", "clipping": 0.0}
    plain, peer = (Turns(None).take({**request, "system": name}, 0, 3) for name in ("in_memory", system))
    assert peer["losses"] == pytest.approx(plain["losses"], rel=1e-5)
    assert peer["parameters"] == plain["parameters"]
    assert peer["host_memory_bytes"] == bytes_a_parameter * peer["parameters"]


@pytest.mark.parametrize("system", _step_deepspeed.ZERO)
def test_settings_are_keys_of_deepspeed(system: str) -> None:
    """It refuses keys that it does not know, and so does the table of its keys here."""
    request = {"system": system, "precision": "bf16", "clipping": 0.0}
    config = _step_deepspeed.config_of(_SHAPE, request)
    assert check(config, TOP).values["zero_optimization"]["stage"] == config["zero_optimization"]["stage"]
    config["zero_optimization"] = {**config["zero_optimization"], "prefetch_bucket": 1}
    with pytest.raises(ConfigError, match="prefetch_bucket"):
        check(config, TOP)


def test_rows_of_others_stay_where_a_peer_fails(tmp_path: Path) -> None:
    """Without a GPU torchao's optimizer is refused, or it is not installed."""
    options = ["--device", "cpu", "--sizes", "llama:1x64", "--batches", "1", "--context", "8", "--warm-up", "0"]
    options += ["--steps", "1", "--seconds", "100", "--system", "torchao_offload", "engine", "fsdp2"]
    done = forked.run_script(_SCRIPT, *options, **forked.children())
    missing = _step_peers.missing_module("torchao_offload")
    assert done.returncode == (1 if missing is None else 0), done.stdout + done.stderr
    first = done.stdout.splitlines()[0]
    assert first.startswith("llama:1x64 torchao_offload: ")
    assert ("is not installed" in first) == (missing is not None)
    (tmp_path / "peers.log").write_text(done.stdout)
    result: dict[str, Any] = {"parts": {}, "rates": {}, "runs": []}
    _gpu_report.add(result, tmp_path, "peers", done.returncode, 1)
    rows = _gpu_report.runs_table(result["runs"])[1:]
    assert [row.split()[:3] for row in rows] == [["llama:1x64", "engine", "auto"], ["llama:1x64", "fsdp2", "batch"]]
    assert all(run["losses"] and run["peak_rss_bytes"] for run in json.loads(done.stdout.splitlines()[-1])["runs"])


def test_what_is_not_installed_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(_step_peers._MODULES, "torchao_offload", "no_such_module")
    assert _step_peers.missing_module("torchao_offload") == "no_such_module"
    assert _step_peers.missing_module("fsdp2") is None


def test_a_system_that_takes_too_long_is_ended() -> None:
    with pytest.raises(WorkerFailed, match=r"it took more than 0\.1 s"):
        Turns(None, 0.1).take({"system": "engine"}, 1, 1)


def test_of_a_system_that_failed_its_error_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """And neither the advice in an error of CUDA nor what NCCL says at exit."""
    text = """a library's warning
[rank0]: Traceback (most recent call last):
[rank0]:   File "scripts/_step_worker.py", line 1, in <module>
[rank0]:     main()
[rank0]: torch.AcceleratorError: CUDA error: out of memory
[rank0]: Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
[rank0]:[W1127 04:18:30.410 ProcessGroupNCCL.cpp:1524] Warning: destroy_process_group() was not called
"""
    assert last_words(io.StringIO(text)) == "torch.AcceleratorError: CUDA error: out of memory"
    assert last_words(io.StringIO("one\nKilled\n\n")) == "Killed"
    assert last_words(io.StringIO("")) == "it ended without a word (out of memory?)"
    forked.fork_children(monkeypatch)
    with pytest.raises(WorkerFailed, match="KeyError: 'system'"):
        Turns(None).take({"shape": asdict(_SHAPE)}, 1, 1)
