"""The plan counts the experts that tokens are sent to, of an engine and of a described machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from offload import OffloadEngine
from offload.plan.plan import Plan, Tier
from offload.plan.routing import Routing
from offload.predict.machine import Cores, Machine
from offload.predict.model import from_hugging_face
from offload.predict.prediction import predict
from offload.predict.variants import AS_WEIGHTS, Lora
from offload.predict.workload import Workload
from offload.report.report import Bandwidths

EXPERTS, CHOSEN = 64, 4
ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-4}


def here(host_bytes: int) -> Machine:
    """A machine whose CPU computes."""
    return Machine(
        host_bytes=host_bytes, nvme_bytes=1 << 40, nvme=Bandwidths(2e9, 2e9, 1.0), cores=Cores(5e10, 5e10), update=4e10,
        checksum=2e10, unit_seconds=1e-4, record_seconds=1e-3,
    )  # fmt: skip


def model(*, lora: bool = False) -> Any:
    """Each token is sent to experts that are drawn."""
    torch.manual_seed(0)
    config = transformers.Qwen3MoeConfig(
        hidden_size=64, num_hidden_layers=3, num_attention_heads=2, num_key_value_heads=2, head_dim=32,
        intermediate_size=64, moe_intermediate_size=64, num_experts=EXPERTS, num_experts_per_tok=CHOSEN, vocab_size=100,
    )  # fmt: skip
    made = transformers.AutoModelForCausalLM.from_config(config)
    generator = torch.Generator().manual_seed(1)

    def draw(_: Any, args: Any) -> Any:
        hidden, indices, weights = args
        drawn = torch.stack([torch.randperm(EXPERTS, generator=generator)[:CHOSEN] for _ in range(len(indices))])
        return hidden, drawn, weights

    for layer in made.model.layers:
        layer.mlp.experts.register_forward_pre_hook(draw)
    if lora:
        peft = pytest.importorskip("peft")
        return peft.get_peft_model(made, peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return made


def counted(engine: OffloadEngine, what: str, tokens: int) -> tuple[Plan, float, float]:
    """The plan after some steps, and the bytes that each of the last ones has read and written."""
    store = engine._session.parts.tiers.store
    assert store is not None

    def steps(numbers: range) -> None:
        for number in numbers:
            batch = torch.randint(0, 100, (1, tokens), generator=torch.Generator().manual_seed(number))
            if what == "generate":
                with torch.no_grad():
                    engine(input_ids=batch)
            else:
                engine.backward(engine(input_ids=batch, labels=batch).loss)
                engine.step()

    def moved() -> tuple[int, int]:
        """Bytes read and written so far: no more are on their way."""
        engine.synchronize()
        statistics = store.statistics()
        return statistics.read.bytes, statistics.write.bytes

    num_steps = 24 if what == "generate" else 2
    steps(range(num_steps))
    before = moved()
    steps(range(num_steps, 2 * num_steps))
    read, written = (there - here for there, here in zip(moved(), before, strict=True))
    return engine.plan, read / num_steps, written / num_steps


@pytest.mark.one_in(3)
@pytest.mark.parametrize(
    ("what", "tokens", "host_memory"),
    [
        ("generate", 1, "2MiB"),
        ("generate", 1, "5MiB"),
        ("generate", 16, "2MiB"),
        ("lora", 4, "2MiB"),
        ("lora", 4, "6MiB"),
        ("lora", 256, "2MiB"),
        ("full", 4, "8MiB"),
        ("full", 256, "8MiB"),
    ],
)
def test_the_plan_tells_within_a_tenth_what_a_step_moves_once_tokens_were_seen(
    what: str, tokens: int, host_memory: str, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"optimizer": None} if what == "generate" else ADAMW
    with OffloadEngine(model(lora=what == "lora"), nvme_path=tmp_path, host_memory=host_memory, **options) as engine:
        assert "reads at most" in str(engine.plan)
        at_most = engine.plan.step_read_bytes
        plan, read, written = counted(engine, what, tokens)
    assert any(item.unit.experts is not None and item.weights is Tier.NVME for item in plan.units)
    assert read * 0.9 <= plan.step_read_bytes <= read * 1.1
    assert written * 0.9 <= plan.step_write_bytes <= written * 1.1
    assert "reads at most" not in str(plan) and f"a forward is sent to {plan.routing.touched:.1%}" in str(plan)
    if tokens == 4:
        assert plan.step_read_bytes < at_most


@pytest.mark.one_in(2)
@pytest.mark.parametrize(("lora", "tokens"), [(True, 4), (True, 16), (False, 4), (False, 256), (True, 256)])
def test_a_forecast_counts_the_union_of_the_experts_that_tokens_choose(lora: bool, tokens: int, tmp_path: Path) -> None:
    host_memory = (2 if lora else 8) << 20
    made = model()
    file = tmp_path / "config.json"
    file.write_text(json.dumps(made.config.to_dict()))
    described = from_hugging_face(file)
    if lora:
        described = described.with_adapters(Lora(4, ("q_proj", "v_proj")), AS_WEIGHTS)
    found = predict(described, here(host_memory), Workload(sequence=tokens, precision="fp32"))
    with OffloadEngine(model(lora=lora), nvme_path=tmp_path, host_memory=host_memory, **ADAMW) as engine:
        _, read, _ = counted(engine, "train", tokens)
    assert read * 0.9 <= found.read_bytes <= read * 1.1


def test_the_share_of_experts_that_tokens_choose() -> None:
    assert Routing.of_tokens(1, 8 / 256).touched == 8 / 256
    assert Routing.of_tokens(2, 0.5).touched == 0.75
    assert Routing.of_tokens(5, 1.0).touched == 1.0
    assert Routing.of_tokens(4096, 8 / 256).touched == pytest.approx(1.0)
