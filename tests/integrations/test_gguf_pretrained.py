"""``from_pretrained`` of GGUF files: the model of ``transformers`` over blocks as they are in the file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf_files import of_model

from offload import BudgetError, ConfigError, OffloadEngine, WeightsError
from offload.torch_internals import can_swap_memory

transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytest.importorskip("accelerate")  # without it transformers reads no GGUF file

BF16 = torch.bfloat16
_SIZES: dict[str, Any] = {
    **{"hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4},
    **{"num_key_value_heads": 2, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2},
}
_MOE = {"head_dim": 128, "moe_intermediate_size": 768, "num_experts": 8, "num_experts_per_tok": 2}
MODELS: dict[str, Any] = {
    "llama": lambda: transformers.LlamaConfig(**_SIZES),
    "qwen2": lambda: transformers.Qwen2Config(**_SIZES),
    "qwen3moe": lambda: transformers.Qwen3MoeConfig(**(_SIZES | _MOE | {"num_hidden_layers": 2})),
    "minimax-m2": lambda: transformers.MiniMaxM2Config(
        **(_SIZES | {"head_dim": 64, "num_local_experts": 4, "num_experts_per_tok": 2})
    ),
    "gemma2": lambda: transformers.Gemma2Config(**(_SIZES | {"head_dim": 64})),
    "nemotron": lambda: transformers.NemotronConfig(**_SIZES),
    "gpt2": lambda: transformers.GPT2Config(n_embd=256, n_layer=2, n_head=4, vocab_size=100),
}
"""In another form in their files are: rows of queries and keys (pairs); nothing; experts (two matrices of which are one
here); the same by other names; norms (one more); these and biases of norms; matrices (transposed)."""


def lora(architecture: str = "llama", **options: Any) -> Any:
    layers = ["c_attn"] if architecture == "gpt2" else ["q_proj", "v_proj"]
    return peft.LoraConfig(r=4, target_modules=layers, task_type="CAUSAL_LM", **options)


def file_of(tmp_path: Path, architecture: str, kind: Any = "Q4_K", config: Any = None) -> dict[str, Any]:
    """Options of ``from_pretrained`` for a model in a file in ``tmp_path``."""
    of_model(tmp_path / "model.gguf", config or MODELS[architecture](), architecture, kind)
    return {"gguf_file": "model.gguf", "dtype": BF16}


def ordinary(tmp_path: Path, options: dict[str, Any]) -> Any:
    """The model as transformers has it of the file: dequantised."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    model.set_experts_implementation("eager")
    return model


def over(tmp_path: Path, options: dict[str, Any], **own: Any) -> OffloadEngine:
    torch.manual_seed(1)
    own = {"nvme_path": tmp_path, "lr": 1e-2} | own if "optimizer" not in own else own
    return OffloadEngine.from_pretrained(transformers.AutoModelForCausalLM, tmp_path, model_kwargs=options, **own)


def least(tmp_path: Path, options: dict[str, Any], **own: Any) -> int:
    with pytest.raises(BudgetError) as error:
        over(tmp_path, options, host_memory=1, **own)
    return error.value.needed_bytes


def over_least(tmp_path: Path, options: dict[str, Any], **own: Any) -> OffloadEngine:
    """The same with the least memory."""
    return over(tmp_path, options, host_memory=least(tmp_path, options, **own), **own)


def losses(engine: OffloadEngine) -> list[float]:
    found = []
    for step in range(3):
        tokens = torch.randint(3, 100, (2, 8), generator=torch.Generator().manual_seed(step))
        loss = engine(input_ids=tokens, labels=tokens).loss
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def generated(model: Any) -> torch.Tensor:
    prompt = torch.tensor([[5, 6, 7]])
    return model.generate(input_ids=prompt, max_new_tokens=6, do_sample=False)  # type: ignore[no-any-return]


def adapted(model: Any, architecture: str, **options: Any) -> Any:
    torch.manual_seed(1)
    return peft.get_peft_model(model, lora(architecture, **options), autocast_adapter_dtype=False)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("architecture", MODELS)
def test_an_adapter_trains_over_a_file_as_over_the_dequantised_model(architecture: str, tmp_path: Path) -> None:
    options = file_of(tmp_path, architecture)
    file = tmp_path / "model.gguf"
    content, before = file.read_bytes(), file.stat()
    with OffloadEngine(adapted(ordinary(tmp_path, options), architecture), lr=1e-2) as engine:
        expected, tokens = losses(engine), generated(engine.module)
    with over_least(tmp_path, options, peft_config=lora(architecture)) as engine:
        assert losses(engine) == expected
        assert torch.equal(generated(engine.module), tokens)
        assert (engine.plan.in_place_bytes > len(content) // 2) is (architecture != "gpt2")
        engine.save_model(tmp_path / "adapter")
    assert file.read_bytes() == content and file.stat().st_mtime_ns == before.st_mtime_ns
    again = peft.PeftModel.from_pretrained(ordinary(tmp_path, options), tmp_path / "adapter")
    assert torch.equal(generated(again), tokens)


@pytest.mark.parametrize("architecture", ["llama", "qwen3moe"])
def test_dora_begins_with_the_norms_of_a_file_and_trains_over_it(architecture: str, tmp_path: Path) -> None:
    options = file_of(tmp_path, architecture)
    with OffloadEngine(adapted(ordinary(tmp_path, options), architecture, use_dora=True), lr=1e-2) as engine:
        expected = losses(engine)
    with over_least(tmp_path, options, peft_config=lora(architecture, use_dora=True)) as engine:
        assert losses(engine) == expected
        assert engine.plan.in_place_bytes > (tmp_path / "model.gguf").stat().st_size // 2


def test_of_experts_in_a_file_a_few_are_in_memory(tmp_path: Path) -> None:
    options = file_of(tmp_path, "qwen3moe")
    needed, size = least(tmp_path, options, peft_config=lora()), (tmp_path / "model.gguf").stat().st_size
    assert needed < (size // 3 if can_swap_memory() else size // 2)  # with copies of the weights in use
    with over(tmp_path, options, peft_config=lora(), host_memory=needed) as engine:
        losses(engine)
        use = engine.expert_use()
        assert 0 < use.read_bytes <= 1.01 * use.routed_bytes
        adapter = sum(value.numel() for value in engine.module.parameters() if value.requires_grad)
        assert engine.plan.step_write_bytes <= 2 * 14 * adapter + (1 << 16)


def mixed(name: str) -> str:
    """Types as they are mixed in a file of medium size."""
    return "Q6_K" if "ffn_down" in name or "attn_v" in name or "token_embd" in name else "Q4_K"


def uneven(name: str) -> str:
    """One type for half of an expert's first matrix, and another one for the other."""
    return "Q8_0" if "gate_exps" in name else "Q5_K"


@pytest.mark.one_in(3)
@pytest.mark.parametrize(("architecture", "kind"), [("llama", mixed), ("qwen3moe", mixed), ("qwen3moe", uneven)])
def test_a_file_has_several_types(architecture: str, kind: Any, tmp_path: Path) -> None:
    options = file_of(tmp_path, architecture, kind)
    with over_least(tmp_path, options, optimizer=None) as engine:
        assert torch.equal(generated(engine.module), generated(ordinary(tmp_path, options)))


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16"])
def test_a_file_is_not_quantised(kind: str, tmp_path: Path) -> None:
    options = file_of(tmp_path, "llama", kind)
    with over_least(tmp_path, options, optimizer=None) as engine:
        assert torch.equal(generated(engine.module), generated(ordinary(tmp_path, options)))
        assert engine.plan.in_place_bytes > 0


def test_biases_of_queries_and_keys_are_in_the_order_of_their_rows(tmp_path: Path) -> None:
    config = transformers.LlamaConfig(**_SIZES, attention_bias=True, dtype="bfloat16")
    options = file_of(tmp_path, "llama", config=config) | {"config": config}
    values = ordinary(tmp_path, options).state_dict()
    with over(tmp_path, options, optimizer=None) as engine:
        found = engine.state_dict()
        assert "model.layers.0.self_attn.q_proj.bias" in found
        assert all(torch.equal(found[name].detach()[...], value) for name, value in values.items())


def test_a_unit_that_has_to_be_copied_is_named_with_its_bytes_and_why(tmp_path: Path) -> None:
    config = transformers.GPT2Config(n_embd=256, n_layer=8, n_head=4, vocab_size=100)
    options = file_of(tmp_path, "gpt2", config=config)
    why = r"transformer\.h\.0, .* bytes .*: .*c_attn\.base_layer\.weight is put together"
    with pytest.warns(UserWarning, match=why), over_least(tmp_path, options, peft_config=lora("gpt2")) as engine:
        assert engine.plan.streams


def test_all_of_it_can_be_trained(tmp_path: Path) -> None:
    options = file_of(tmp_path, "llama")
    with OffloadEngine(ordinary(tmp_path, options), lr=1e-2) as engine:
        expected = losses(engine)
    with over(tmp_path, options) as engine:
        assert losses(engine) == expected
        engine.save_model(tmp_path / "trained")
    assert (tmp_path / "trained" / "config.json").exists()


def test_the_dtype_is_that_of_torch_unless_one_is_given(tmp_path: Path) -> None:
    options = file_of(tmp_path, "llama")
    del options["dtype"]
    with over(tmp_path, options, optimizer=None) as engine:
        assert engine.module.dtype is ordinary(tmp_path, options).dtype is torch.float32


def test_tensors_that_transformers_has_no_names_for_are_refused(tmp_path: Path) -> None:
    options = file_of(tmp_path, "qwen2")
    file = tmp_path / "model.gguf"
    file.write_bytes(file.read_bytes().replace(b"blk.1.ffn_up.", b"blk.1.ffn_ab."))
    with pytest.raises(WeightsError, match=r"layers.1.mlp.up_proj.weight are not there.*nothing.*blk.1.ffn_ab.weight"):
        over(tmp_path, options, peft_config=lora())


def test_architectures_that_transformers_does_not_know_are_refused(tmp_path: Path) -> None:
    options = file_of(tmp_path, "qwen2")
    file = tmp_path / "model.gguf"
    file.write_bytes(file.read_bytes().replace(b"qwen2", b"owen2"))
    with pytest.raises(ConfigError, match=r"does not read the model's config in model\.gguf .*owen2"):
        over(tmp_path, options)


def test_models_that_transformers_has_no_names_for_are_refused(tmp_path: Path) -> None:
    config = transformers.OPTConfig(hidden_size=64, ffn_dim=64, num_hidden_layers=1, num_attention_heads=2)
    options = file_of(tmp_path, "qwen2") | {"config": config}
    with pytest.raises(ConfigError, match=r"no names for the tensors of a GGUF file \(qwen2\) in a model of type opt"):
        over(tmp_path, options)


def test_without_the_library_that_is_said(tmp_path: Path, monkeypatch: Any) -> None:
    options = file_of(tmp_path, "llama")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(ConfigError, match="pip install gguf"):
        over(tmp_path, options)


def test_a_file_that_is_not_there_or_damaged_is_named(tmp_path: Path) -> None:
    options = file_of(tmp_path, "llama")
    with pytest.raises(WeightsError, match=r"cannot open the weights file .*other\.gguf"):
        over(tmp_path, options | {"gguf_file": "other.gguf"})
    file = tmp_path / "model.gguf"
    file.write_bytes(file.read_bytes()[:3000])
    with pytest.raises(WeightsError, match=r"model\.gguf is damaged"):
        over(tmp_path, options)
