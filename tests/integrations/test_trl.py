"""Trainers of TRL over engines are the trainers of TRL; a reference model has an engine of its own."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from offload import BudgetError, ConfigError, OffloadEngine

transformers = pytest.importorskip("transformers")
trl = pytest.importorskip("trl")
datasets = pytest.importorskip("datasets")
peft = pytest.importorskip("peft")

from trainers import arguments, bits, least, llama, long_llama, losses, state_bytes, tokenizer, words  # noqa: E402

from offload.integrations.transformers import OffloadTrainerMixin  # noqa: E402

DOCUMENT = Path(__file__).parents[2] / "docs" / "integrations" / "trl.md"

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


class OffloadSFT(OffloadTrainerMixin, trl.SFTTrainer):
    pass


class OffloadDPO(OffloadTrainerMixin, trl.DPOTrainer):
    pass


class OffloadKTO(OffloadTrainerMixin, trl.KTOTrainer):
    pass


class OffloadGRPO(OffloadTrainerMixin, trl.GRPOTrainer):
    pass


@pytest.fixture
def run():
    """Makes a trainer and trains; those with an engine are closed at the end of the test."""
    trainers: list[Any] = []

    def make(kind: Any, *args: Any, resume: Path | None = None, **options: Any) -> Any:
        trainer = kind(*args, processing_class=tokenizer(), **options)
        if isinstance(trainer, OffloadTrainerMixin):
            trainers.append(trainer)
        trainer.train(resume_from_checkpoint=None if resume is None else str(resume))
        return trainer

    yield make
    for trainer in trainers:
        trainer.close()


def sft(folder: Path, **changes: Any) -> dict[str, Any]:
    """What an ``SFTTrainer`` is made of beside the model."""
    given = {"max_steps": 5, "bf16": False, "max_length": 32, **changes}
    texts = datasets.Dataset.from_list([{"text": words(10, seed)} for seed in range(16)])
    return {"args": trl.SFTConfig(**arguments(folder, **given)), "train_dataset": texts}


def dpo(folder: Path, **changes: Any) -> dict[str, Any]:
    """What a ``DPOTrainer`` is made of beside the models."""
    given = {"max_steps": 4, "bf16": False, "max_length": 32, **changes}
    pairs = [
        {"prompt": words(4, seed), "chosen": " " + words(5, 100 + seed), "rejected": " " + words(5, 200 + seed)}
        for seed in range(16)
    ]
    return {"args": trl.DPOConfig(**arguments(folder, **given)), "train_dataset": datasets.Dataset.from_list(pairs)}


def lora(folder: Path) -> Any:
    return peft.LoraConfig(r=4, lora_dropout=0.1, task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])


def test_supervised_training_has_the_losses_of_the_trainer_in_memory(tmp_path: Path, run: Callable[..., Any]):
    budget = least(long_llama(), tmp_path)
    assert state_bytes(long_llama()) >= 4 * budget
    other = run(trl.SFTTrainer, long_llama(), **sft(tmp_path, max_grad_norm=0.5))
    own = run(
        OffloadSFT, long_llama(), **sft(tmp_path, max_grad_norm=0.5),
        offload={"nvme_path": tmp_path, "host_memory": budget},
    )  # fmt: skip
    for key in ("loss", "grad_norm", "mean_token_accuracy"):
        assert losses(own, key) == pytest.approx(losses(other, key), rel=1e-3 if key == "grad_norm" else 1e-5)
    assert torch.allclose(own.model.lm_head.weight, other.model.lm_head.weight, atol=1e-4), "TRL reads it by itself"
    assert not own.model.lm_head.weight.equal(long_llama().lm_head.weight)


def test_an_adapter_goes_on_from_its_checkpoint_with_the_same_bits(tmp_path: Path, run: Callable[..., Any]):
    given = {"save_strategy": "steps", "save_steps": 3}
    options = {"nvme_path": tmp_path, "host_memory": "1.8MiB"}
    other = run(trl.SFTTrainer, llama(), **sft(tmp_path / "plain"), peft_config=lora(tmp_path))
    own = run(OffloadSFT, llama(), **sft(tmp_path / "own", **given), peft_config=lora(tmp_path), offload=options)
    assert losses(own) == pytest.approx(losses(other), rel=1e-5)
    checkpoint = tmp_path / "own" / "checkpoint-3"
    assert (checkpoint / "adapter_model.safetensors").exists() and (checkpoint / "offload").is_dir()
    resumed = run(
        OffloadSFT, llama(), **sft(tmp_path / "own", **given), peft_config=lora(tmp_path), offload=options,
        resume=checkpoint,
    )  # fmt: skip
    assert losses(resumed) == losses(own) and bits(resumed.model).equal(bits(own.model))


def test_preferences_are_learnt_beside_a_frozen_reference_that_shares_the_budget(tmp_path: Path, run):
    reference_needs = least(llama(), tmp_path, optimizer=None)
    budget = least(llama(), tmp_path) + reference_needs
    reference: nn.Module = llama(2)
    other = run(trl.DPOTrainer, llama(), llama(2), **dpo(tmp_path))
    own = run(OffloadDPO, llama(), reference, **dpo(tmp_path), offload={"nvme_path": tmp_path, "host_memory": budget})
    for key in ("loss", "rewards/margins", "logps/chosen"):
        assert losses(own, key) == pytest.approx(losses(other, key), rel=1e-3, abs=1e-5), key
    frozen = own.reference_engine
    assert frozen.module is reference is own.ref_model and frozen.optimizer is None
    assert frozen.config.host_memory == reference_needs
    assert own.engine.config.host_memory + frozen.config.host_memory == budget
    assert frozen.plan.nvme_bytes["weights"] > 0 and bits(reference).equal(bits(llama(2)))


def test_a_reference_that_follows_the_model_does_so_in_its_engine(tmp_path: Path, run: Callable[..., Any]):
    given = {"sync_ref_model": True, "ref_model_sync_steps": 2, "ref_model_mixup_alpha": 0.5}
    other = run(trl.DPOTrainer, llama(), llama(2), **dpo(tmp_path, **given))
    options = {"nvme_path": tmp_path, "host_memory": "3MiB"}
    own = run(OffloadDPO, llama(), llama(2), **dpo(tmp_path, **given), offload=options)
    assert losses(own) == pytest.approx(losses(other), rel=1e-4)
    assert torch.allclose(bits(own.ref_model), bits(other.ref_model), atol=1e-5)
    assert not bits(own.ref_model).equal(bits(llama(2)))


def test_reference_values_that_are_computed_first_need_no_reference_model(tmp_path: Path, run: Callable[..., Any]):
    given = {"precompute_ref_log_probs": True}
    other = run(trl.DPOTrainer, llama(), **dpo(tmp_path, **given))
    options = {"nvme_path": tmp_path, "host_memory": "1.8MiB"}
    own = run(OffloadDPO, llama(), **dpo(tmp_path, **given), offload=options)
    assert losses(own) == pytest.approx(losses(other), rel=1e-5) and own.reference_engine is None


def test_single_answers_are_learnt_beside_a_frozen_reference(tmp_path: Path, run: Callable[..., Any]):
    answers = [
        {"prompt": words(4, seed), "completion": " " + words(5, 100 + seed), "label": seed % 2 == 0}
        for seed in range(16)
    ]
    args = trl.KTOConfig(**arguments(tmp_path, max_steps=3, bf16=False, max_length=32))
    given = {"args": args, "train_dataset": datasets.Dataset.from_list(answers)}
    other = run(trl.KTOTrainer, llama(), llama(2), **given)
    own = run(OffloadKTO, llama(), llama(2), **given, offload={"nvme_path": tmp_path, "host_memory": "3MiB"})
    assert losses(own) == pytest.approx(losses(other), rel=1e-5)
    assert own.reference_engine.module is own.ref_model


def test_answers_that_are_generated_and_rewarded_are_those_of_the_trainer_in_memory(tmp_path: Path, run):
    def reward(completions: list[str], **kwargs: Any) -> list[float]:
        return [float(len(set(completion.split()))) for completion in completions]

    changes = {"max_steps": 3, "bf16": False, "max_completion_length": 6, "num_generations": 4}
    args = trl.GRPOConfig(**arguments(tmp_path, **changes))
    prompts = datasets.Dataset.from_list([{"prompt": words(4, seed)} for seed in range(16)])
    given = {"args": args, "train_dataset": prompts, "reward_funcs": reward}
    other = run(trl.GRPOTrainer, llama(), **given)
    own = run(OffloadGRPO, llama(), **given, offload={"nvme_path": tmp_path, "host_memory": "1.8MiB"})
    assert losses(own) == pytest.approx(losses(other), rel=1e-4, abs=1e-6)
    assert losses(own, "reward") == losses(other, "reward") and len(set(losses(own, "reward"))) > 1


def test_a_budget_too_small_for_both_says_what_both_need(tmp_path: Path, run: Callable[..., Any]):
    policy, reference = llama(), llama(2)
    needed = least(policy, tmp_path) + least(reference, tmp_path, optimizer=None)
    for given in (1, needed - 1):
        with pytest.raises(BudgetError, match="frozen") as refused:
            run(OffloadDPO, policy, reference, **dpo(tmp_path), offload={"nvme_path": tmp_path, "host_memory": given})
        assert refused.value.needed_bytes == needed and f"Raise host_memory to {needed}." in str(refused.value)
    assert not OffloadEngine.holds(policy) and not OffloadEngine.holds(reference)
    options = {"nvme_path": tmp_path, "host_memory": needed}
    assert len(losses(run(OffloadDPO, policy, reference, **dpo(tmp_path), offload=options))) == 4


def test_a_reference_may_come_in_an_engine_of_its_own(tmp_path: Path, run: Callable[..., Any]):
    with OffloadEngine(llama(2), optimizer=None, nvme_path=tmp_path, host_memory="1MiB") as reference:
        options = {"nvme_path": tmp_path, "host_memory": least(llama(), tmp_path)}
        own = run(OffloadDPO, llama(), reference.module, **dpo(tmp_path), offload=options)
        assert own.reference_engine is None and len(losses(own)) == 4
    with OffloadEngine(llama(), nvme_path=tmp_path) as engine, pytest.raises(ConfigError, match="all of its budgets"):
        run(OffloadDPO, engine.module, llama(2), **dpo(tmp_path), offload=engine)


def test_a_reference_that_trl_loads_by_itself_goes_into_an_engine(tmp_path: Path, run: Callable[..., Any]):
    llama().save_pretrained(tmp_path / "model")
    model = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "model")
    options = {"nvme_path": tmp_path, "host_memory": "3MiB"}
    own = run(OffloadDPO, model, **dpo(tmp_path), offload=options)
    assert own.reference_engine.module is own.ref_model
    assert bits(own.ref_model).equal(bits(llama())) and not bits(own.model).equal(bits(llama()))


def test_preferences_with_an_adapter_need_no_reference(tmp_path: Path, run: Callable[..., Any]):
    other = run(trl.DPOTrainer, llama(), **dpo(tmp_path), peft_config=lora(tmp_path))
    options = {"nvme_path": tmp_path, "host_memory": "1.8MiB"}
    own = run(OffloadDPO, llama(), **dpo(tmp_path), peft_config=lora(tmp_path), offload=options)
    assert losses(own) == pytest.approx(losses(other), rel=1e-5) and own.reference_engine is None


def test_preferences_go_on_from_an_adapter_whose_copy_is_the_reference(tmp_path: Path, run: Callable[..., Any]):
    def adapted() -> Any:
        transformers.set_seed(1)
        return peft.get_peft_model(llama(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))

    other = run(trl.DPOTrainer, adapted(), **dpo(tmp_path))
    own = run(OffloadDPO, adapted(), **dpo(tmp_path), offload={"nvme_path": tmp_path, "host_memory": "1.8MiB"})
    assert losses(own) == pytest.approx(losses(other), rel=1e-5)
    frozen = {name: value for name, value in own.model.named_parameters() if ".ref." in name}
    assert frozen and not any(value.requires_grad for value in frozen.values())
    assert all(value.equal(dict(other.model.named_parameters())[name]) for name, value in frozen.items())


def test_the_example_of_the_document_runs_as_it_stands(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.chdir(tmp_path)
    (example,) = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), re.DOTALL)
    exec(compile(example, DOCUMENT.name, "exec"), {})
    assert "rewards/margins" in capsys.readouterr().out
