"""Activations in the forecast: the bytes that the engine moves, their time on the links, and the best batch."""

from __future__ import annotations

import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import Tiny
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from offload import OffloadEngine
from offload.cli import main
from offload.play.schedule import KeptWork, Places, Steps, UnitWork, step_seconds
from offload.predict.activation_bytes import activation_bytes
from offload.predict.architecture import Architecture
from offload.predict.best_batches import best_batches
from offload.predict.machine import CONTEXT_BYTES, Machine, described, parse_drive
from offload.predict.model import Model, from_architecture, from_count
from offload.predict.prediction import predict
from offload.predict.workload import Workload

SEQUENCE, BATCH = 64, 4


def seventy_billion() -> tuple[Model, Machine]:
    shapes = Architecture(layers=80, width=8192, heads=64, vocabulary=32_000, hidden=28_672, kv_heads=8, head_width=128)
    return from_architecture("70B", shapes), described("4090", host_bytes=64 << 30, drives=[parse_drive("7GB/s,6GB/s")])


def example(**options: object) -> Workload:
    return Workload(moments_dtype="int8", **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("memory", [128 << 10, 1 << 20])
def test_the_activations_that_leave_are_those_that_the_engine_moves(memory: int, tmp_path: Path):
    with torch.device("meta"):
        model = Model("tiny", Tiny(), 4, 128, 0, 256)
    workload = Workload(batch=BATCH, sequence=SEQUENCE, precision="fp32", activations="nvme", activation_memory=1 << 20)
    forecast = replace(activation_bytes(model, workload), memory=memory)  # which is set aside in whole MiB
    options = {"activations": "nvme", "activation_memory": memory, "precision": "fp32"}
    with OffloadEngine(Tiny(), nvme_path=tmp_path, host_memory="16MiB", **options) as engine:
        engine.backward(engine(torch.randint(0, 256, (BATCH, SEQUENCE))).float().square().mean())
        engine.step()
        use = engine.report().activations
    assert forecast.leaving == pytest.approx(use.kept_bytes, rel=0.1)
    assert forecast.written == pytest.approx(use.write_bytes, rel=0.1)
    assert forecast.read == pytest.approx(use.read_bytes, rel=0.1)


def test_inputs_that_blocks_share_are_counted_once_and_what_they_pass_on_each_time():
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor, shared: torch.Tensor) -> torch.Tensor:
            return self.layer(x).relu() + shared

    class Whole(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed, self.blocks, self.head = (
                nn.Linear(4, 8),
                nn.ModuleList(Block() for _ in range(5)),
                nn.Linear(8, 2),
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.embed(x)
            shared = x.sigmoid().detach()
            for block in self.blocks:
                x = block(x, shared)
            return self.head(x)

    with torch.device("meta"):
        kept = Model("own", Whole(), 5, 8, 0, 0).kept(100, torch.float32)
    hidden = 100 * 8 * 4
    assert not kept.reason
    assert (kept.inputs, kept.input) == (5 * hidden + hidden, 2 * hidden)
    assert kept.around == hidden + 100 * 4 * 4  # what the head and the first layer were given; blocks have the rest


def test_what_is_alive_where_the_model_computes_does_not_grow_with_layers_or_micro_batches_that_leave():
    workload = Workload(batch=2, sequence=512, activations="nvme", loss_rows=128)
    shapes = Architecture(layers=8, width=512, heads=8, vocabulary=1000, hidden=2048, kv_heads=8, head_width=64)
    few, many = (from_architecture("", replace(shapes, layers=layers)) for layers in (8, 48))
    assert activation_bytes(few, workload).computing == activation_bytes(many, workload).computing
    assert activation_bytes(many, workload).leaving > 3 * activation_bytes(few, workload).leaving
    together = replace(workload, micro_batches=8, together=True)
    assert activation_bytes(few, together).computing == activation_bytes(few, workload).computing
    assert activation_bytes(few, together).leaving == 8 * activation_bytes(few, workload).leaving
    assert (
        activation_bytes(few, replace(workload, loss_rows=None)).computing > activation_bytes(few, workload).computing
    )
    kept = replace(together, activations="recompute")
    one = activation_bytes(few, replace(kept, micro_batches=1, together=False)).computing
    assert one < activation_bytes(few, kept).computing < 8 * one


def test_compute_waits_for_activations_on_their_way_and_no_longer_than_for_the_slowest_part():
    plain = [UnitWork(1.0, 2.0) for _ in range(8)]
    places, steps = Places(8, 8), Steps()
    quick = [replace(work, kept=KeptWork(0.1, 0.2, 0.2, 0.1)) for work in plain]
    assert step_seconds(plain, places, steps) == pytest.approx(24)
    assert 24 < step_seconds(quick, places, steps) < 26  # but for the ends they are beside compute
    slow = [replace(work, kept=KeptWork(write=1.5, read=2.5)) for work in plain]
    assert 32 <= step_seconds(slow, places, steps) < 38
    one_way = [replace(work, kept=KeptWork(to_host=3.0)) for work in plain]
    assert 24 + 8 * 2 - 6 <= step_seconds(one_way, places, steps) < 24 + 8 * 2 + 6


def test_micro_batches_together_move_weights_and_states_as_often_as_one():
    model, machine = seventy_billion()
    plain = predict(model, machine, example(activations="recompute"))
    loop = predict(model, machine, example(activations="recompute", micro_batches=4))
    together = predict(model, machine, example(activations="nvme", micro_batches=4, together=True, loss_rows=1024))
    moved = together.written_bytes - together.activations.written
    assert loop.written_bytes > 1.5 * plain.written_bytes
    assert moved < 1.3 * plain.written_bytes  # gradients that are added up are wider
    assert together.tokens == loop.tokens == 4 * plain.tokens
    assert together.seconds < loop.seconds / 2


def test_the_best_batch_is_the_least_with_which_compute_limits_or_the_largest():
    model, machine = seventy_billion()
    workload = example(batch=4, loss_rows=1024)
    rows = best_batches(predict(model, machine, workload))
    found = {(row.prediction.workload.activations, row.prediction.workload.together): row for row in rows}
    assert list(found) == [(mode, False) for mode in ("keep", "recompute", "host", "nvme")] + [
        ("host", True), ("nvme", True)
    ]  # fmt: skip
    assert found["keep", False].largest == 0 and not found["keep", False].prediction.fits
    recomputed, nvme, together = found["recompute", False], found["nvme", False], found["nvme", True]
    assert recomputed.best == recomputed.largest < nvme.largest
    assert nvme.prediction.tokens_per_second > 3 * recomputed.prediction.tokens_per_second
    assert together.best == together.computing and together.prediction.limit == "compute"
    assert together.prediction.workload.batch == 4
    fewer = together.prediction.workload.of_size(together.best // 4 - 1)
    assert predict(model, machine, fewer).limit != "compute"
    for row in (recomputed, nvme):
        larger = row.prediction.workload.of_size(row.largest + 1)
        assert row.prediction.fits and not predict(model, machine, larger).fits


def test_host_memory_for_activations_is_taken_from_weights_and_states_and_nvme_has_to_have_room():
    model, machine = (
        from_count(10**9, 16, 2048),
        described("4090", host_bytes=8 << 30, drives=[parse_drive("7GB/s,6GB/s,1TB")]),
    )
    kept = predict(model, machine, Workload(activations="recompute"))
    host = predict(model, machine, Workload(activations="host"))
    assert kept.plan is not None and host.plan is not None
    assert host.plan.memory["activations"]["host"] == host.activations.memory >= host.activations.leaving
    large = Workload(batch=64, activations="host", loss_rows=256)
    shortage = predict(model, machine, large).shortage
    assert shortage is not None and shortage.kind == "host memory"
    assert shortage.needed_bytes > activation_bytes(model, large).leaving
    small = replace(machine, nvme_bytes=1 << 30)
    needed = predict(model, small, replace(large, activations="nvme")).shortage
    assert needed is not None and needed.kind == "NVMe" and needed.given_bytes == 1 << 30
    room = machine.device.memory_bytes - CONTEXT_BYTES
    assert activation_bytes(model, replace(large, activations="nvme")).computing < room


def test_the_command_names_the_options_of_the_best_batch_and_its_code_has_them(capsys: pytest.CaptureFixture[str]):
    machine = ["--gpu", "4090", "--host-memory", "8GiB", "--nvme", "6GB/s", "--sequence", "512"]
    asked = ["plan", "meta-llama/Llama-3.2-1B", *machine]
    assert main(asked) == 0
    shown = capsys.readouterr().out
    assert "Which batch is best" in shown and "nvme, together, 1 each" in shown
    advised = re.search(r"^With (.*): ([\d,]+) tokens a second\.$", shown, re.MULTILINE)
    assert advised is not None and advised[1].endswith("--loss-rows 2048")
    assert main([*asked, *advised[1].split()]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith(f"It fits: {advised[2]} tokens a second")
    mode = re.search(r"--activations (\w+)", advised[1])
    assert mode is not None and f"activations='{mode[1]}'" in shown
    assert ("activation_memory=" in shown) == (mode[1] in ("host", "nvme"))
    assert "logits of 2,048 tokens at a time" in shown and "loss_of(tokens):" in shown


def test_the_code_to_paste_trains_an_adapter_with_the_loss_of_the_model(tmp_path: Path, capsys):
    torch.manual_seed(0)
    shapes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    LlamaForCausalLM(LlamaConfig(vocab_size=128, num_key_value_heads=2, **shapes)).save_pretrained(tmp_path)
    capsys.readouterr()
    machine = ["--gpu", "4090", "--host-memory", "1GiB"]
    assert main(["plan", str(tmp_path), *machine, "--lora", "r=4", "--loss-rows", "16", "--json"]) == 0
    names: dict[str, Any] = {}
    exec(json.loads(capsys.readouterr().out)["code"].replace("device='cuda', ", ""), names)
    engine, tokens = names["engine"], torch.randint(0, 128, (2, 20))
    with engine:
        loss = names["loss_of"](tokens)
        assert torch.allclose(loss, engine(tokens, labels=tokens).loss, rtol=1e-2)  # of logits in bf16
        engine.backward(loss)
        engine.step()
    assert {name.split(".")[-3] for name, p in names["model"].named_parameters() if p.requires_grad} == {
        "lora_A", "lora_B"
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--activations", "nvme"], "give --nvme or --nvme-path"),
        (["--activation-memory", "1GiB"], "is of --activations host or nvme"),
        (["--together"], "give --gradient-accumulation-steps"),
    ],
)
def test_options_of_activations_that_contradict_are_refused(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
):
    assert main(["plan", "--parameters", "1e9", "--gpu", "4090", *options]) != 0
    assert said in " ".join(capsys.readouterr().err.replace("│", " ").split())


def test_a_batch_from_which_compute_limits_is_none_where_activations_take_longer_than_it():
    model, machine = seventy_billion()
    slow = replace(machine, nvme=replace(machine.nvme, read=1e8, write=1e8))  # type: ignore[type-var]
    workload = example(batch=1, loss_rows=1024, activations="nvme", micro_batches=2, together=True)
    found = predict(model, slow, workload)
    assert found.limit == "NVMe" and found.compute_bound_batch > 1 << 16
    assert not math.isinf(found.seconds)
