"""A cache of keys and values that rests in memory and on NVMe: the tokens of one that stays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import least_budget

from offload import ActivationError, ConfigError, OffloadEngine

transformers = pytest.importorskip("transformers")

from offload.integrations.transformers import OffloadedCache  # noqa: E402


def make_model() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=64, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        vocab_size=200, pad_token_id=0, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def prompts() -> tuple[torch.Tensor, torch.Tensor]:
    """Of different lengths, padded on the left."""
    tokens = torch.randint(3, 200, (8, 150), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(tokens)
    tokens[3, :40], mask[3, :40] = 0, 0
    return tokens, mask


def generate(model: Any, options: dict[str, Any]) -> torch.Tensor:
    tokens, mask = prompts()
    given = {"max_new_tokens": 70, "min_new_tokens": 70, "do_sample": False, **options}
    return model.generate(tokens, attention_mask=mask, **given)[:, tokens.shape[1] :]


@pytest.mark.each_value
@pytest.mark.parametrize("options", [{}, {"num_beams": 2, "max_new_tokens": 12, "min_new_tokens": 12}])
@pytest.mark.parametrize("mode", ["host", "nvme"])
def test_the_tokens_are_those_of_a_cache_that_stays(mode: str, options: dict[str, Any], tmp_path: Path) -> None:
    expected = generate(make_model(), options)
    memory = "64MiB" if mode == "host" else "256KiB"
    given = {"optimizer": None, "activations": mode, "activation_memory": memory}
    budget = least_budget(make_model(), tmp_path, **given)
    with OffloadEngine(make_model(), nvme_path=tmp_path, host_memory=budget, **given) as engine:
        cache = OffloadedCache(engine)
        tokens = generate(engine.module, {**options, "past_key_values": cache})
        pool = engine.activation_pool
        assert torch.equal(tokens, expected)
        length = 150 + options.get("max_new_tokens", 70) - 1
        sequences = 8 * options.get("num_beams", 1)
        assert cache.get_seq_length() == length
        away = 4 * 2 * sequences * 2 * 16 * 4 * (length // 64 * 64)  # layers, keys and values, heads, width, fp32
        if mode == "host":
            assert pool.taken_bytes >= away and pool.nvme_bytes == 0
        else:
            assert pool.nvme_bytes >= away - pool.memory.nbytes > 0
            assert engine.report().activations.read_bytes > 0
        del cache
        assert pool.taken_bytes == pool.nvme_bytes == 0


def test_tokens_are_removed_from_its_end(tmp_path: Path) -> None:
    given = {"optimizer": None, "activations": "nvme", "activation_memory": "1MiB", "nvme_path": tmp_path}
    tokens, _ = prompts()
    with OffloadEngine(make_model(), **given) as engine, torch.no_grad():
        cache = OffloadedCache(engine)
        engine.module(tokens, past_key_values=cache)
        cache.crop(-50)
        assert cache.get_seq_length() == 100
        again = engine.module(tokens[:, 100:], past_key_values=cache).logits
        whole = engine.module(tokens).logits[:, 100:]
        assert torch.allclose(again, whole, atol=1e-5)
        cache.reset()
        assert cache.get_seq_length() == 0
        del cache


def test_what_has_no_room_or_no_place_is_said(tmp_path: Path) -> None:
    unset = pytest.raises(ConfigError, match="no memory was set aside: give the engine activations=")
    with OffloadEngine(make_model(), optimizer=None) as engine, unset:
        OffloadedCache(engine)
    given = {"optimizer": None, "activations": "host", "activation_memory": "1MiB", "nvme_path": tmp_path}
    with (
        OffloadEngine(make_model(), **given) as engine,
        pytest.raises(ActivationError, match="Raise activation_memory"),
    ):
        generate(engine.module, {"past_key_values": OffloadedCache(engine)})
