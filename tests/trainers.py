"""What the tests of trainers of ``transformers`` share: tiny models, tokens, and runs that are compared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import BudgetError, OffloadEngine

transformers = pytest.importorskip("transformers")

VOCAB = 128
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 64, "intermediate_size": 160, "num_attention_heads": 4,
    "pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2,
}  # fmt: skip


def llama(seed: int = 1, layers: int = 4) -> nn.Module:
    transformers.set_seed(seed)
    config = transformers.LlamaConfig(**_SIZES, num_hidden_layers=layers, attention_dropout=0.1)
    return transformers.LlamaForCausalLM(config)


def long_llama() -> nn.Module:
    """One whose state is at least four times the least budget; so is that of ``long_bert``."""
    return llama(layers=12)


def bert(layers: int = 4) -> nn.Module:
    transformers.set_seed(1)
    return transformers.BertForMaskedLM(transformers.BertConfig(**_SIZES, num_hidden_layers=layers))


def long_bert() -> nn.Module:
    return bert(layers=16)


def t5(seed: int = 1) -> nn.Module:
    transformers.set_seed(seed)
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(
            vocab_size=VOCAB, d_model=64, d_kv=16, d_ff=160, num_layers=3, num_heads=4, decoder_start_token_id=0
        )
    )  # fmt: skip


def rows(num: int = 24, length: int = 8) -> list[dict[str, torch.Tensor]]:
    """Examples that are to be repeated."""
    tokens = torch.randint(3, VOCAB, (num, length), generator=torch.Generator().manual_seed(0))
    return [{"input_ids": row, "labels": row} for row in tokens]


def arguments(folder: Path, **changes: Any) -> dict[str, Any]:
    """Options of ``TrainingArguments``: 6 steps an epoch."""
    return {
        "output_dir": str(folder), "per_device_train_batch_size": 4, "num_train_epochs": 2, "logging_steps": 1,
        "save_strategy": "no", "report_to": [], "disable_tqdm": True, "use_cpu": True, "seed": 3,
        "learning_rate": 1e-3, "weight_decay": 0.1, "optim": "adamw_torch", **changes,
    }  # fmt: skip


def least(model: nn.Module, path: Path, **options: Any) -> int:
    """The least ``host_memory`` for an engine over ``model``."""
    with pytest.raises(BudgetError) as refused:
        OffloadEngine(model, nvme_path=path, host_memory=1, **options)
    return refused.value.needed_bytes


def state_bytes(model: nn.Module) -> int:
    """Weights, gradients and two moments in fp32."""
    return 16 * sum(parameter.numel() for parameter in model.parameters())


def losses(trainer: Any, key: str = "loss") -> list[float]:
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def bits(model: nn.Module) -> torch.Tensor:
    return torch.cat([parameter.detach().clone().view(-1) for parameter in model.parameters()])


def words(num: int, seed: int) -> str:
    """A text of ``num`` words that ``tokenizer`` knows."""
    found = torch.randint(3, VOCAB, (num,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{index}" for index in found.tolist())


def tokenizer() -> Any:
    """One token a word."""
    tokenizers = pytest.importorskip("tokenizers")
    vocabulary = {"<pad>": 0, "<eos>": 1, "<unk>": 2, **{f"w{index}": index for index in range(3, VOCAB)}}
    found = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    found.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=found, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>"
    )
