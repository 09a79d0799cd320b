"""Scripts in the shapes of DeepSpeed's examples, with the import line changed: they train as torch does."""

import argparse
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn import functional

import offload.compat.deepspeed as deepspeed
from offload import ConfigError, OffloadEngine, StoreMissing
from offload.compat.deepspeed import schedules

VOCAB = 64


@pytest.fixture(autouse=True)
def one_process() -> Iterator[None]:
    """A script may make a process group."""
    yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


def gpt() -> nn.Module:
    torch.manual_seed(0)
    layers = [nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True) for _ in range(2)]
    return nn.Sequential(nn.Embedding(VOCAB, 32), *layers, nn.Linear(32, VOCAB))


class Bert(nn.Module):
    """Token types, a mask and a classifier, and the loss as the first output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.words, self.types = nn.Embedding(VOCAB, 32), nn.Embedding(2, 32)
        self.encoder = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(32, 2, 64, 0.0, batch_first=True), 2, enable_nested_tensor=False
        )
        self.classifier = nn.Linear(32, 3)

    def forward(self, input_ids, token_type_ids, attention_mask, labels):
        x = self.words(input_ids) + self.types(token_type_ids)
        logits = self.classifier(self.encoder(x, src_key_padding_mask=attention_mask == 0)[:, 0])
        return functional.cross_entropy(logits, labels), logits


class Net(nn.Module):
    """The network of the tutorial, smaller."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.conv1, self.conv2 = nn.Conv2d(3, 4, 5), nn.Conv2d(4, 8, 5)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1, self.fc2 = nn.Linear(8 * 5 * 5, 16), nn.Linear(16, 10)

    def forward(self, x):
        x = self.pool(functional.relu(self.conv1(x)))
        x = self.pool(functional.relu(self.conv2(x)))
        return self.fc2(functional.relu(self.fc1(x.flatten(1))))


def tokens(step: int, *shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, generator=torch.Generator().manual_seed(step))


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [parameter.detach().clone() for parameter in model.parameters()]


def close(found: list[torch.Tensor], wanted: list[torch.Tensor]) -> bool:
    """Equal up to rounding. The biases of keys are left out: they change no output, so that their gradients are nothing
    but rounding errors, which Adam makes large."""
    pairs = [(_without_keys(a), _without_keys(b)) for a, b in zip(found, wanted, strict=True)]
    return all(torch.allclose(a, b, rtol=1e-3, atol=1e-5) for a, b in pairs)


def _without_keys(bias: torch.Tensor) -> torch.Tensor:
    """``bias`` is that of queries, keys and values, or another parameter."""
    return torch.cat([bias[:32], bias[64:]]) if bias.shape == (96,) else bias


def gpt_loss(logits: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())


def config_of(**more: object) -> dict:
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 2, "gradient_clipping": 0.5,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
        "scheduler": {"type": "WarmupDecayLR", "params": {
            "total_num_steps": 10, "warmup_min_lr": 1e-3, "warmup_max_lr": 1e-2, "warmup_num_steps": 3}},
        **more,
    }  # fmt: skip


def on_nvme(path: Path) -> dict:
    part = {"device": "nvme", "nvme_path": str(path), "pin_memory": True, "buffer_count": 4}
    aio = {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True}
    return {"stage": 3, "offload_optimizer": part, "offload_param": part, "aio": aio}


def finetune_gpt(config: dict, num_batches: int, save: Path | None = None, resume: Path | None = None):
    """The loop of a fine-tune, as it stands in a script."""
    model_engine, _, _, lr_scheduler = deepspeed.initialize(model=gpt(), config=config)
    if resume is not None:
        load_path, client_state = model_engine.load_checkpoint(resume)
        assert load_path == str(resume / f"global_step{client_state['step']}")
    model_engine.train()
    losses, rates = [], []
    for step in range(model_engine.micro_steps, num_batches):
        ids = tokens(step, 2, 8).to(model_engine.device)
        loss = gpt_loss(model_engine(ids), ids)
        model_engine.backward(loss)
        rates += model_engine.get_lr() if model_engine.is_gradient_accumulation_boundary() else []
        model_engine.step()
        losses.append(loss.item())
    if save is not None:
        assert model_engine.save_checkpoint(save, client_state={"step": model_engine.global_steps})
    found = weights(model_engine.module)
    assert lr_scheduler.get_last_lr() == model_engine.get_lr()
    model_engine.destroy()
    return losses, rates, found


def test_a_gpt_fine_tune_trains_as_torch_and_as_the_engine(tmp_path: Path):
    losses, rates, found = finetune_gpt(config_of(zero_optimization=on_nvme(tmp_path)), 8)

    model = gpt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = schedules.WarmupDecayLR(optimizer, 10, 1e-3, 1e-2, 3)
    expected_losses, expected_rates = [], []
    for step in range(8):
        ids = tokens(step, 2, 8)
        loss = gpt_loss(model(ids), ids)
        (loss / 2).backward()
        expected_losses.append(loss.item())
        if step % 2:
            expected_rates.append(optimizer.param_groups[0]["lr"])
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
    assert losses == pytest.approx(expected_losses, rel=1e-4)
    assert rates == expected_rates and len(set(rates)) == 3
    assert close(found, weights(model))

    with OffloadEngine(gpt(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1, gradient_clipping=0.5,
                       gradient_accumulation_steps=2) as plain:  # fmt: skip
        schedule = schedules.WarmupDecayLR(plain.optimizer, 10, 1e-3, 1e-2, 3)
        for step in range(8):
            plain.backward(gpt_loss(plain(tokens(step, 2, 8)), tokens(step, 2, 8)))
            plain.step()
            if step % 2:
                schedule.step()
        assert all(torch.equal(a, b) for a, b in zip(found, weights(plain.module), strict=True))


def test_a_resumed_run_goes_on_with_the_bits_and_the_rates_of_the_whole_one(tmp_path: Path):
    whole = finetune_gpt(config_of(), 8)
    first = finetune_gpt(config_of(), 3, save=tmp_path)  # in the middle of an accumulation
    second = finetune_gpt(config_of(), 8, resume=tmp_path)
    assert first[0] + second[0] == whole[0] and first[1] + second[1] == whole[1]
    assert all(torch.equal(a, b) for a, b in zip(second[2], whole[2], strict=True))


def bert_batch(step: int) -> dict[str, torch.Tensor]:
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    return {
        "input_ids": tokens(step, 2, 8), "token_type_ids": tokens(step, 2, 8) % 2, "attention_mask": mask,
        "labels": tokens(step, 2) % 3,
    }  # fmt: skip


def test_a_bert_with_parameter_groups_trains_as_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    def groups(model: nn.Module) -> list[dict]:
        named = list(model.named_parameters())
        return [
            {"params": [p for name, p in named if "bias" not in name], "weight_decay": 0.1},
            {"params": [p for name, p in named if "bias" in name], "weight_decay": 0.0},
        ]

    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({
        "train_batch_size": 2, "steps_per_print": 2, "gradient_clipping": 0.0, "wall_clock_breakdown": True,
        "optimizer": {"type": "Adam", "params": {"lr": 5e-3, "eps": 1e-6}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": "auto", "warmup_num_steps": 2,
                                                     "warmup_type": "linear"}},
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    }))  # fmt: skip
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--deepspeed", "--deepspeed_config", str(path)])
    model = Bert()
    engine, optimizer, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=groups(model))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    losses = []
    for step in range(4):
        loss, _ = engine(**bert_batch(step))
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    assert engine.get_global_grad_norm() > 0 and engine.was_step_applied()

    reference = Bert()
    own = torch.optim.AdamW(groups(reference), lr=5e-3, eps=1e-6, weight_decay=0.0)
    schedule = schedules.WarmupLR(own, warmup_num_steps=2, warmup_type="linear")
    expected = []
    for step in range(4):
        loss, _ = reference(**bert_batch(step))
        loss.backward()
        own.step()
        own.zero_grad()
        schedule.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-4) and close(weights(engine.module), weights(reference))
    engine.destroy()


class Images(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        return torch.randn(3, 32, 32, generator=generator), index % 10


def test_a_cifar_loop_with_its_own_loader_trains_as_torch():
    deepspeed.init_distributed()
    assert torch.distributed.get_rank() == 0 and deepspeed.comm.get_world_size() == 1
    config = {
        "train_batch_size": 2, "dataloader_drop_last": True,
        "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-3, "warmup_num_steps": 3}},
        "gradient_clipping": 1.0, "prescale_gradients": False, "fp16": {"enabled": False, "initial_scale_power": 15},
        "zero_optimization": {"stage": 0, "cpu_offload": False},
    }  # fmt: skip
    net = Net()
    parameters = filter(lambda p: p.requires_grad, net.parameters())
    model_engine, _, trainloader, _ = deepspeed.initialize(
        model=net, model_parameters=parameters, training_data=Images(), config=config
    )
    device = deepspeed.get_accelerator().device_name(model_engine.local_rank)
    seen, losses = [], []
    for images, labels in trainloader:
        images, labels = images.to(device), labels.to(device)
        loss = functional.cross_entropy(model_engine(images), labels)
        model_engine.backward(loss)
        model_engine.step()
        seen.append((images, labels))
        losses.append(loss.item())
    assert len(seen) == 4 and sorted(torch.cat([labels for _, labels in seen]).tolist()) == list(range(8))

    reference = Net()
    own = torch.optim.AdamW(reference.parameters(), lr=1e-3, betas=(0.8, 0.999), weight_decay=3e-7)
    schedule = schedules.WarmupLR(own, 0, 1e-3, 3)
    expected = []
    for images, labels in seen:
        loss = functional.cross_entropy(reference(images), labels)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
        own.step()
        own.zero_grad()
        schedule.step()
        expected.append(loss.item())
    assert losses == pytest.approx(expected, rel=1e-4) and close(weights(net), weights(reference))
    model_engine.destroy()


def engine_of(config: dict | None = None, **more: object) -> deepspeed.DeepSpeedEngine:
    adam = {"type": "AdamW", "params": {"lr": 1e-2}}
    options = {"train_micro_batch_size_per_gpu": 2, "optimizer": adam, **(config or {})}
    return deepspeed.initialize(model=gpt(), config=options, **more)[0]


def step_with(engine: deepspeed.DeepSpeedEngine, step: int, factor: float = 1.0) -> None:
    ids = tokens(step, 2, 8)
    engine.backward(gpt_loss(engine(ids).float(), ids) * factor)
    engine.step()


def test_a_step_that_is_not_finite_is_left_out_with_bf16_and_the_schedule_stays():
    warmup = {"type": "WarmupLR", "params": {"warmup_num_steps": 4, "warmup_max_lr": 1e-2}}
    engine = engine_of({"bf16": {"enabled": True}, "scheduler": warmup})
    step_with(engine, 0)
    before, rate = weights(engine.module), engine.get_lr()
    with pytest.warns(UserWarning, match="the step is left out"):
        step_with(engine, 1, float("inf"))
    assert not engine.was_step_applied() and (engine.global_steps, engine.skipped_steps) == (1, 1)
    assert engine.get_lr() == rate and all(
        torch.equal(a, b) for a, b in zip(before, weights(engine.module), strict=True)
    )
    step_with(engine, 2)
    assert engine.was_step_applied() and engine.global_steps == 2
    engine.destroy()


def test_an_overflow_of_fp16_leaves_the_step_out():
    engine = engine_of({"fp16": {"enabled": True}})
    step_with(engine, 0, 1e30)
    assert (engine.global_steps, engine.skipped_steps) == (0, 1) and engine.fp16_enabled()
    engine.destroy()


def test_without_bf16_a_gradient_that_is_not_finite_is_an_error():
    from offload import NonFiniteGradient

    engine = engine_of()
    with pytest.raises(NonFiniteGradient):
        step_with(engine, 0, float("nan"))
    engine.destroy()


def test_boundaries_may_be_set_by_hand():
    engine, whole = engine_of(config_of()), engine_of(config_of())
    for count in range(2):
        engine.set_gradient_accumulation_boundary(count == 1)
        ids = tokens(count, 2, 8)
        engine.backward(gpt_loss(engine(ids), ids))
        assert engine.is_gradient_accumulation_boundary() is (count == 1)
        step_with(whole, count)
    engine.step()
    assert engine.global_steps == whole.global_steps == 1
    assert all(torch.equal(a, b) for a, b in zip(weights(engine.module), weights(whole.module), strict=True))
    engine.destroy()
    whole.destroy()


def test_the_lines_that_steps_per_print_asks_for(capsys: pytest.CaptureFixture[str]):
    engine = engine_of({"steps_per_print": 2, "wall_clock_breakdown": True})
    for step in range(4):
        step_with(engine, step)
    engine.destroy()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(",")[0] for line in lines] == ["step=2", "step=4"] and "waits" in lines[0]


def test_the_table_is_printed_once(capsys: pytest.CaptureFixture[str]):
    for _ in range(2):
        engine_of({"dump_state": True, "memory_breakdown": False}).destroy()
    printed = capsys.readouterr().err
    assert (
        printed.count("What becomes of the DeepSpeed configuration") == 1
        and "train_micro_batch_size_per_gpu = 2" in printed
    )


def test_a_saved_model_is_the_model(tmp_path: Path):
    engine = engine_of({"bf16": {"enabled": True}})
    step_with(engine, 0)
    assert engine.save_16bit_model(tmp_path) and engine.save_16bit_model(tmp_path / "safe", "model.safetensors")
    loaded = torch.load(tmp_path / "pytorch_model.bin", weights_only=True)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["pytorch_model.bin"]
    assert loaded.keys() == engine.module.state_dict().keys()
    for name, parameter in engine.module.named_parameters():
        assert loaded[name].dtype == torch.bfloat16 and torch.equal(loaded[name], parameter.detach())
    assert (tmp_path / "safe" / "model.safetensors").exists()
    engine.destroy()


def test_a_directory_without_checkpoints_gives_none_and_a_missing_tag_is_an_error(tmp_path: Path):
    engine = engine_of()
    with pytest.warns(UserWarning, match="there is no checkpoint"):
        assert engine.load_checkpoint(tmp_path) == (None, {})
    with pytest.raises(StoreMissing):
        engine.load_checkpoint(tmp_path, tag="global_step7")
    step_with(engine, 0)
    engine.save_checkpoint(tmp_path, tag=7)
    assert engine.load_checkpoint(tmp_path, 7) == (str(tmp_path / "7"), {})
    engine.destroy()


def test_a_schedule_may_be_kept_when_the_rest_is_loaded(tmp_path: Path):
    engine = engine_of(config_of())
    step_with(engine, 0)
    step_with(engine, 1)
    engine.save_checkpoint(tmp_path)
    step_with(engine, 2)
    step_with(engine, 3)
    kept = engine.lr_scheduler.last_epoch
    engine.load_checkpoint(tmp_path, load_lr_scheduler_states=False)
    assert (engine.global_steps, engine.lr_scheduler.last_epoch) == (1, kept)
    engine.load_checkpoint(tmp_path)
    assert engine.lr_scheduler.last_epoch == kept - 1
    engine.destroy()


@pytest.mark.filterwarnings("error:.*(overridden|before `optimizer.step).*:UserWarning")
def test_an_optimizer_and_a_schedule_that_the_script_has_built_go_before_the_files(capsys):
    model = gpt()
    built = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.StepLR(built, 1, 0.1)
    engine, optimizer, _, returned = deepspeed.initialize(
        model=model, optimizer=built, lr_scheduler=schedule, config=config_of(gradient_accumulation_steps=1)
    )
    assert "the optimizer that initialize was given is used" in " ".join(capsys.readouterr().err.split())
    step_with(engine, 0)
    assert returned is schedule and optimizer is engine.optimizer
    assert engine.get_lr() == [pytest.approx(0.05)] and engine.get_mom() == [(0.9, 0.999)]
    engine.destroy()


def test_both_may_be_functions():
    made = deepspeed.initialize(
        model=gpt(), optimizer=lambda parameters: torch.optim.NAdam(parameters, lr=0.5), config={"train_batch_size": 2},
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.1),
    )  # fmt: skip
    step_with(made[0], 0)
    assert made[0].get_lr() == [pytest.approx(0.05)]
    made[0].destroy()


def test_only_the_parameters_that_are_given_are_trained():
    model = gpt()
    engine = deepspeed.initialize(model=model, model_parameters=model[-1].parameters(), config=config_of(
        gradient_accumulation_steps=1, scheduler={}))[0]  # fmt: skip
    before = weights(model)
    step_with(engine, 0)
    changed = [not torch.equal(a, b) for a, b in zip(before, weights(model), strict=True)]
    assert changed == [False] * (len(changed) - 2) + [True, True]
    engine.destroy()


def test_a_model_that_is_made_within_zero_init_trains():
    with deepspeed.zero.Init(config_dict_or_path=config_of()):
        model = nn.Sequential(nn.Embedding(VOCAB, 32), nn.Linear(32, VOCAB))
    assert all(parameter.is_meta for parameter in model.parameters())
    engine = deepspeed.initialize(model=model, config=config_of(gradient_accumulation_steps=1))[0]
    with deepspeed.zero.GatheredParameters(model.parameters(), modifier_rank=0):
        before = weights(model)
    step_with(engine, 0)
    assert not torch.equal(before[0], model[0].weight.detach())
    engine.destroy()


def test_what_the_engine_says_of_itself():
    engine = engine_of(config_of(zero_optimization={"stage": 2}))
    assert engine.get_batch_info() == (4, 2, 2) and engine.zero_optimization_stage() == 2
    assert engine.get_global_grad_norm() is None and engine.gradient_clipping() == 0.5
    assert engine.device == torch.device("cpu") and (engine.local_rank, engine.world_size) == (0, 1)
    assert engine.config["gradient_accumulation_steps"] == 2 and not engine.bfloat16_enabled()
    assert engine.eval() is engine and not engine.module.training and engine.train().module.training
    assert len(list(engine.parameters())) == len(weights(engine.module))
    ids = tokens(0, 2, 8)
    with engine.no_sync():
        assert engine.backward(gpt_loss(engine(ids), ids)).item() == pytest.approx(
            gpt_loss(engine(ids), ids).item() / 2
        )
    engine.zero_grad()
    with pytest.raises(AttributeError, match="neither the engine nor the module Sequential has 'eval_batch'"):
        engine.eval_batch(None)
    engine.destroy()


def test_what_is_not_there_is_refused_in_words(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    engine = engine_of()
    for call in (
        lambda: engine.backward(torch.ones(()), retain_graph=True),
        lambda: engine.save_checkpoint(tmp_path, save_latest=False),
        lambda: engine.load_checkpoint(tmp_path, load_module_only=True),
        lambda: engine_of(mpu=object()),
        lambda: deepspeed.initialize(model=None, config={"train_batch_size": 1}),
        lambda: deepspeed.initialize(model=gpt()),
        lambda: deepspeed.initialize(argparse.Namespace(deepspeed_config="x"), gpt(), config={"train_batch_size": 1}),
    ):
        with pytest.raises(ConfigError):
            call()
    monkeypatch.setenv("WORLD_SIZE", "8")
    for call in (engine_of, deepspeed.init_distributed):
        with pytest.raises(ConfigError, match="one of 8 processes"):
            call()
    engine.destroy()


@pytest.mark.parametrize(
    ("config", "optimizer", "said"),
    [
        ({"bf16": {"enabled": True, "bf16_master_weights_and_grads": True}}, "Adafactor",
         r"master_dtype='bf16' needs.*with a kernel.*\(in the ds_config: bf16.bf16_master_weights_and_grads\)"),
        ({"bf16": {"enabled": True, "bf16_optimizer_states": True}}, "Adafactor",
         r"moments_dtype.*\(in the ds_config: bf16.bf16_optimizer_states\)"),
        ({"offload_engine": {"host_memory": 1}}, "AdamW",
         r"raise host_memory to \d+\. \(offload explain BudgetError\)"),
    ],
)  # fmt: skip
def test_an_error_of_the_engine_names_the_key_of_the_file(config: dict, optimizer: str, said: str):
    model = nn.Linear(4, 4)
    built = getattr(torch.optim, optimizer)(model.parameters())
    with pytest.raises(ConfigError, match=said):
        deepspeed.initialize(model=model, optimizer=built, config={"train_micro_batch_size_per_gpu": 1, **config})


def test_without_an_optimizer_it_only_runs():
    engine, optimizer, _, schedule = deepspeed.initialize(model=gpt(), config={"train_batch_size": 1})
    assert optimizer is None and schedule is None and engine(tokens(0, 1, 4)).shape == (1, 4, VOCAB)
    with pytest.raises(ConfigError, match="there is no optimizer"):
        engine.step()
    engine.destroy()
