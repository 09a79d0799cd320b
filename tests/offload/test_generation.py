"""Evaluation and generation with streamed weights: the tokens of the model in memory, one sweep for a batch."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import least_budget
from torch import nn

from offload import OffloadEngine
from offload.model.own_writes import OwnWrites
from offload.tiers.weights.use_order import UseOrder

transformers = pytest.importorskip("transformers")


PAD = 0
PROMPTS = torch.tensor([[5, 6, 7, 8, 9], [PAD, PAD, 11, 12, 13], [PAD, 21, 22, 23, 24]])
"""Of different lengths, padded on the left."""

SPECIAL = {"pad_token_id": PAD, "bos_token_id": 1, "eos_token_id": 2}


def llama() -> nn.Module:
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=5, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=500, max_position_embeddings=128, **SPECIAL,
        )
    )  # fmt: skip


def gpt2() -> nn.Module:
    """Its head is tied to the embedding."""
    return transformers.GPT2LMHeadModel(
        transformers.GPT2Config(n_embd=64, n_layer=5, n_head=4, vocab_size=500, n_positions=128, **SPECIAL)
    )


def large_layers() -> nn.Module:
    """Embedding and head are cut into pieces."""
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=12_000, max_position_embeddings=128, **SPECIAL,
        )
    )  # fmt: skip


def t5() -> nn.Module:
    """An encoder that is used once, and a decoder that is used for every token."""
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            d_model=64, d_ff=128, num_layers=3, num_decoder_layers=3, num_heads=4, d_kv=16, vocab_size=500,
            pad_token_id=PAD, eos_token_id=1, decoder_start_token_id=PAD,
        )
    )  # fmt: skip


WAYS: dict[str, dict[str, Any]] = {
    "greedy": {"do_sample": False},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "beams": {"do_sample": False, "num_beams": 3},
    "static cache": {"do_sample": False, "cache_implementation": "static"},
    "no cache": {"do_sample": False, "use_cache": False},
    "prompt lookup": {"do_sample": False, "prompt_lookup_num_tokens": 2},
}


def generated(model: nn.Module, way: str, prompts: torch.Tensor = PROMPTS, num_tokens: int = 8) -> torch.Tensor:
    torch.manual_seed(7)
    if way == "prompt lookup":  # is for one prompt
        prompts = prompts[:1]
    mask = (prompts != PAD).long()
    return model.generate(prompts, attention_mask=mask, max_new_tokens=num_tokens, **WAYS[way])


@pytest.fixture(autouse=True)
def _one_thread() -> Iterator[None]:
    """These models are so small that threads only wait for each other."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def drawn(build: Callable[[], nn.Module]) -> nn.Module:
    """A model with weights so large that it says more than one word over and over."""
    torch.manual_seed(0)
    model = build().eval()
    for parameter in model.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.2)
    return model


@contextlib.contextmanager
def streaming(model: nn.Module, path: Path, **options: Any) -> Iterator[OffloadEngine]:
    """An engine over a copy of the model, with as little memory as it can do with."""
    options = {"optimizer": None, **options}
    least = least_budget(model, path, **options)
    with OffloadEngine(copy.deepcopy(model), nvme_path=path, host_memory=least, **options) as engine:
        assert engine.plan.nvme_bytes["weights"] > engine.plan.resident_bytes["weights"]
        yield engine


def read_bytes(engine: OffloadEngine) -> int:
    """Read from NVMe since the engine was made."""
    engine.synchronize()
    return engine._session.parts.tiers.store.statistics().read.bytes


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    ("build", "precision"),
    [(llama, "bf16"), (llama, "fp32"), (t5, "fp32"), (gpt2, "fp32"), (large_layers, "fp32"), (large_layers, "bf16")],
)
def test_tokens_are_those_of_the_model_in_memory(build: Callable[[], nn.Module], precision: str, tmp_path: Path):
    model = drawn(build).to({"fp32": torch.float32, "bf16": torch.bfloat16}[precision])
    with streaming(model, tmp_path, precision=precision) as engine:
        for way in WAYS:
            expected = generated(model, way)
            if way == "sampling":
                assert len(expected.unique()) > 10  # it says more than one word
            with torch.inference_mode():
                assert torch.equal(generated(engine.module, way), expected), way
        assert torch.equal(generated(engine.module, "greedy"), generated(model, "greedy"))


def test_logits_have_the_bits_of_the_model_in_memory(tmp_path: Path):
    model = drawn(llama)
    with streaming(model, tmp_path) as engine:
        for forward in (model, engine.module):
            out = forward.generate(
                PROMPTS, attention_mask=(PROMPTS != PAD).long(), max_new_tokens=6, do_sample=False,
                output_scores=True, output_hidden_states=True, return_dict_in_generate=True,
            )  # fmt: skip
            if forward is model:
                expected = out
        assert all(torch.equal(a, b) for a, b in zip(out.scores, expected.scores, strict=True))
        last, last_expected = out.hidden_states[-1], expected.hidden_states[-1]
        assert all(torch.equal(a, b) for a, b in zip(last, last_expected, strict=True))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("budget", ["least", "all"])
def test_generation_between_steps_changes_nothing_of_the_training(budget: str, tmp_path: Path):
    model = drawn(gpt2)
    batches = torch.randint(3, 500, (5, 2, 12), generator=torch.Generator().manual_seed(1))
    options = {"lr": 1e-2, "gradient_clipping": 1.0}

    def run(*, generating: bool) -> tuple[list[float], dict[str, torch.Tensor]]:
        least = least_budget(model, tmp_path, **options) if budget == "least" else "1GiB"
        losses = []
        with OffloadEngine(copy.deepcopy(model), nvme_path=tmp_path, host_memory=least, **options) as engine:
            torch.manual_seed(3)
            for batch in batches:
                engine.module.train()
                loss = engine(batch, labels=batch).loss
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
                if generating:
                    state = torch.get_rng_state()
                    in_memory = gpt2()
                    found = {way: generated(engine.module.eval(), way) for way in ("greedy", "sampling", "beams")}
                    in_memory.load_state_dict(engine.module.state_dict())
                    for way, tokens in found.items():
                        assert torch.equal(generated(in_memory.eval(), way), tokens), way
                    torch.set_rng_state(state)
            return losses, {name: value.clone() for name, value in engine.module.state_dict().items()}

    losses, weights = run(generating=False)
    same_losses, same_weights = run(generating=True)
    assert same_losses == losses and len(set(losses)) == 5
    assert all(torch.equal(same_weights[name], value) for name, value in weights.items())


def test_a_batch_of_prompts_reads_each_weight_once_a_token_as_one_prompt_does(tmp_path: Path):
    model = drawn(llama)
    model.generation_config.eos_token_id = None
    prompts = torch.randint(3, 500, (16, 5), generator=torch.Generator().manual_seed(1))
    num_tokens = 12
    with streaming(model, tmp_path) as engine:
        on_nvme = engine.plan.nvme_bytes["weights"]
        staged = (
            engine.plan.staging.num_slots * engine.plan.staging.slot_bytes
        )  # what a sweep may find, or leave for the next
        for batch in (prompts[:1], prompts, prompts.repeat(4, 1)):
            before = read_bytes(engine)
            tokens = generated(engine.module, "greedy", batch, num_tokens)
            assert tokens.shape == (len(batch), 5 + num_tokens)
            assert abs(read_bytes(engine) - before - num_tokens * on_nvme) <= staged
        before = read_bytes(engine)
        generated(engine.module, "beams", prompts, num_tokens)
        assert abs(read_bytes(engine) - before - num_tokens * on_nvme) <= staged


def test_the_first_units_of_a_token_are_read_while_the_last_one_computes(tmp_path: Path):
    model = drawn(llama)
    with streaming(model, tmp_path) as engine:
        host = engine._session.parts.tiers.host
        events: list[tuple[str, str]] = []
        fetch, take = host.carrier.fetch, host.take
        host.carrier.fetch = lambda unit, place: events.append(("fetch", unit.name)) or fetch(unit, place)
        host.take = lambda pin, **how: events.append(("use", pin.entry.unit.name)) or take(pin, **how)
        streamed = [unit.unit.name for unit in engine.plan.units if unit.weights.value == "nvme"]
        for _ in range(3):
            engine(torch.tensor([[5]]))
        events.clear()
        engine(torch.tensor([[5]]))
        engine.synchronize()
        assert events[0][0] == "use"  # and was fetched before
        fetched = [name for kind, name in events if kind == "fetch"]
        assert sorted(fetched) == sorted(streamed)  # each once
        assert fetched.index(streamed[0]) > fetched.index(streamed[-1])  # the first one, for the token after this


def test_looking_for_own_writes_takes_no_memory():
    weights = [
        nn.Parameter(torch.randn(count).to(dtype))
        for count in (1 << 20, 1001)
        for dtype in (torch.float32, torch.bfloat16)
    ]
    weights.append(nn.Parameter(torch.randn(10)[3:]))
    before, allocated = OwnWrites(weights), 0
    with torch.profiler.profile(profile_memory=True) as profile:
        before.begin(is_copy=True)
    for event in profile.events():
        allocated += max(event.self_cpu_memory_usage, 0)
    assert allocated < 64 << 10
    for index, weight in enumerate(weights):
        before.begin(is_copy=True)
        weight.data[-1] += 1
        assert [changed for changed, _, _ in before.end()] == [index]


def test_sweeps_without_steps_are_learnt():
    order = UseOrder(4)
    for index in (0, 1, 2, 3) * 2 + (0, 1):
        order.use(index)
    assert list(order.upcoming()) == [2, 3, 0, 1]
    order.use(2)
    order.use(3)
    assert list(order.upcoming()) == [0, 1, 2, 3]
    assert [order.distance(index) for index in range(4)] == [0, 1, 2, 3]


def test_a_unit_that_is_used_several_times_in_a_sweep_is_expected_each_time():
    order = UseOrder(3)
    for index in (0, 1, 1, 1, 2, 0) * 3 + (0, 1, 1):
        order.use(index)
    assert list(order.upcoming()) == [1, 2, 0, 0, 1, 1]


def test_sweeps_between_steps_do_not_spoil_what_a_step_looks_like():
    order = UseOrder(4)
    step = (0, 1, 2, 3, 3, 2, 1, 0)
    for index in step:
        order.use(index)
    order.end_step()
    for index in (0, 1, 2, 3) * 5:
        order.use(index)
    for index in (0, 1, 2, 3, 3):
        order.use(index)
    assert list(order.upcoming())[:3] == [2, 1, 0]
    for index in (2, 1, 0):
        order.use(index)
    order.end_step()
    assert list(order.upcoming())[:4] == [0, 1, 2, 3]
    for index in (0, 1, 2, 3, 3):
        order.use(index)
    assert list(order.upcoming())[:3] == [2, 1, 0]


def test_generation_without_end_keeps_what_it_has_learnt():
    order = UseOrder(4)
    for _ in range(5000):
        for index in range(4):
            assert order.distance(index) <= 8
            order.use(index)
    assert list(order.upcoming()) == [0, 1, 2, 3]
    assert len(order._uses) <= 3 * order._max_uses
    order.end_step()
    assert list(order.upcoming())[:4] == [0, 1, 2, 3]
