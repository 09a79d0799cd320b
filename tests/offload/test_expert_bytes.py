"""Bytes of experts: those that tokens were sent to are read, once in forward and once in backward."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from experts import CONFIGS, built, text
from tiny import least_budget

from offload import OffloadEngine
from offload.plan.plan import Tier

ADAMW: dict[str, Any] = {"lr": 1e-2, "weight_decay": 0.01, "eps": 1e-4}


def test_generation_reads_the_experts_that_tokens_were_sent_to_and_that_were_not_there(tmp_path: Path) -> None:
    model = built(CONFIGS["qwen3_moe"]()).eval()
    budget = least_budget(model, tmp_path, optimizer=None)
    with OffloadEngine(model, optimizer=None, nvme_path=tmp_path, host_memory=budget) as engine:
        of_experts = sum(item.unit.numel * 4 for item in engine.plan.units if item.unit.experts is not None)
        before = engine.expert_use()
        engine.module.generate(text(1, 1), max_new_tokens=12, do_sample=False)
        use, last = engine.expert_use(), engine.report().experts
    assert last.routed_bytes == of_experts / 4 and last.read_bytes <= last.routed_bytes  # of the last token
    routed, read = use.routed_bytes - before.routed_bytes, use.read_bytes - before.read_bytes
    assert routed == 12 * of_experts / 4  # each token needs two of eight
    assert 0 < read <= routed
    assert use.hit_rate == 1 - use.read_bytes / use.routed_bytes


def test_generation_reads_nothing_in_vain(tmp_path: Path) -> None:
    model = built(CONFIGS["qwen3_moe"]()).eval()
    budget = least_budget(model, tmp_path, optimizer=None)
    with OffloadEngine(model, optimizer=None, nvme_path=tmp_path, host_memory=budget) as engine:
        away = [item.unit for item in engine.plan.units if item.weights is Tier.NVME]
        a_sweep = sum(unit.numel * 4 for unit in away if unit.experts is None)
        assert a_sweep > 0
        engine.module.generate(text(1, 1), max_new_tokens=4, do_sample=False)  # the order of the layers is known
        store = engine._session.parts.tiers.store
        before, read_before = engine.expert_use(), store.statistics().read.bytes
        engine.module.generate(text(1, 1), max_new_tokens=12, do_sample=False)
        fetched = engine.expert_use().read_bytes - before.read_bytes
        assert store.statistics().read.bytes - read_before <= 1.05 * (fetched + 12 * a_sweep)


def test_a_training_step_reads_each_expert_at_most_twice(tmp_path: Path) -> None:
    model = built(CONFIGS["qwen3_moe"]())
    budget = least_budget(model, tmp_path, **ADAMW)
    with OffloadEngine(model, **ADAMW, nvme_path=tmp_path, host_memory=budget) as engine:
        for seed in range(3):
            before = engine.expert_use()
            tokens = text(1, 4, seed)
            engine(input_ids=tokens, labels=tokens).loss.backward()
            use = engine.expert_use()
            routed, read = use.routed_bytes - before.routed_bytes, use.read_bytes - before.read_bytes
            assert read <= routed  # which counts forward and backward
            engine.optimizer.step()
            assert engine.report().experts.routed_bytes == routed
            engine.optimizer.zero_grad()
