"""Shapes of configurations that people have, and what each means here."""

import copy
import json
from types import SimpleNamespace

import pytest
import torch

from offload import ConfigError, OffloadConfig
from offload.compat.deepspeed import translate
from offload.compat.deepspeed.keys import Effect
from offload.compat.deepspeed.table import table_of

BATCH = {"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2}
ADAMW = {"type": "AdamW", "params": {"lr": 3e-5, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7}}
ADAM_AUTO = {"type": "AdamW", "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}}
WARMUP = {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 500}}
WARMUP_AUTO = {
    "type": "WarmupLR",
    "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"},
}
FP16 = {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "initial_scale_power": 16, "hysteresis": 2,
        "min_loss_scale": 1}  # fmt: skip
AIO = {"block_size": 262144, "queue_depth": 32, "thread_count": 1, "single_submit": False, "overlap_events": True}
BUCKETS = {"overlap_comm": True, "contiguous_gradients": True, "reduce_bucket_size": 5e8, "allgather_bucket_size": 5e8}
STAGE3 = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": "auto",
    "stage3_prefetch_bucket_size": "auto", "stage3_param_persistence_threshold": "auto",
    "stage3_max_live_parameters": 1e9, "stage3_max_reuse_distance": 1e9,
    "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
AUTO_BATCH = {
    "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto", "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto", "steps_per_print": 2000, "wall_clock_breakdown": False,
}  # fmt: skip
CPU = {"device": "cpu", "pin_memory": True}


def nvme(path: str = "/local_nvme", **more: object) -> dict:
    return {"device": "nvme", "nvme_path": path, "pin_memory": True, **more}


def zero(stage: int, **more: object) -> dict:
    return {**BATCH, "zero_optimization": {"stage": stage, **more}}


@pytest.mark.parametrize(("config", "batch"), [
    ({"train_batch_size": 16}, (16, 4, 1)),
    ({"train_batch_size": 16, "train_micro_batch_size_per_gpu": 2}, (16, 2, 2)),
    ({"train_batch_size": 16, "gradient_accumulation_steps": 4}, (16, 1, 4)),
    ({"train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (24, 2, 3)),
    ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 3}, (24, 2, 3)),
])  # fmt: skip
def test_a_batch_is_that_of_all_ranks(monkeypatch: pytest.MonkeyPatch, config: dict, batch: tuple[int, int, int]):
    monkeypatch.setenv("WORLD_SIZE", "4")
    found = translate(config).batch
    assert (found.train, found.micro, found.steps) == batch
    with pytest.raises(ConfigError, match="x 4 processes"):
        translate({"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2})
    with pytest.raises(ConfigError, match="gradient_accumulation_steps=2 does the same in 4 processes"):
        translate({**BATCH, "train_batch_size": 16, "gradient_accumulation_steps": 4})


PLAIN = {"precision": "auto", "gradient_clipping": 1.0, "gradient_accumulation_steps": 4}
ADAM_OPTIONS = {"optimizer": "adamw", "lr": 3e-5, "betas": (0.8, 0.999), "eps": 1e-8, "weight_decay": 3e-7}
SHARDS = ("states", "states", "gradients", "weights")
ONE = {**PLAIN, "gradient_accumulation_steps": 1}

SHAPES = {
    # name: (the configuration, all options of the engine, the scheduler's name)
    "no stage": (BATCH, PLAIN, None),
    "stage 0": (zero(0), PLAIN, None),
    "stage 1, buckets": (zero(1, reduce_bucket_size=5e8), PLAIN, None),
    "stage 2, buckets": (zero(2, **BUCKETS, reduce_scatter=True, allgather_partitions=True), PLAIN, None),
    "stage 3": (zero(3), PLAIN, None),
    "a flag for a stage": ({**BATCH, "zero_optimization": True}, PLAIN, None),
    "the oldest offload": (zero(2, cpu_offload=True, cpu_offload_use_pin_memory=True), PLAIN, None),
    "stage 1, states on the CPU": (zero(1, offload_optimizer=CPU), PLAIN, None),
    "stage 2, states on the CPU": (zero(2, offload_optimizer=CPU, round_robin_gradients=True), PLAIN, None),
    "stage 2, states on NVMe": (zero(2, offload_optimizer=nvme()), {**PLAIN, "nvme_path": ["/local_nvme"]}, None),
    "stage 3, states on the CPU": (zero(3, offload_optimizer=CPU), PLAIN, None),
    "stage 3, weights on the CPU": (zero(3, offload_param=CPU), PLAIN, None),
    "stage 3, all on the CPU": (zero(3, offload_optimizer={**CPU, "ratio": 0.3}, offload_param=CPU), PLAIN, None),
    "stage 3, device none": (
        zero(3, offload_optimizer={"device": "none", "nvme_path": None}, offload_param={"device": "none"}), PLAIN, None,
    ),
    "stage 3, a path that nothing uses": (
        zero(3, offload_optimizer={"device": "cpu", "nvme_path": "/nowhere"}), PLAIN, None,
    ),
    "stage 3, states on NVMe": (
        zero(3, offload_optimizer=nvme(buffer_count=4, fast_init=False, pipeline_read=True, pipeline_write=True)),
        {**PLAIN, "nvme_path": ["/local_nvme"]}, None,
    ),
    "stage 3, weights on NVMe": (
        zero(3, offload_param=nvme(buffer_count=5, buffer_size=1e8, max_in_cpu=1e9)),
        {**PLAIN, "nvme_path": ["/local_nvme"]}, None,
    ),
    "stage 3, all on NVMe": (
        {**zero(3, offload_param=nvme(), offload_optimizer=nvme()), "aio": {**AIO, "intra_op_parallelism": 2}},
        {**PLAIN, "nvme_path": ["/local_nvme"]}, None,
    ),
    "stage 3, weights and states on two SSDs": (
        zero(3, offload_param=nvme("/mnt/a"), offload_optimizer=nvme("/mnt/b")),
        {**PLAIN, "nvme_path": ["/mnt/a", "/mnt/b"]}, None,
    ),
    "stage 3, weights on the CPU, states on NVMe": (
        zero(3, offload_param=CPU, offload_optimizer=nvme()), {**PLAIN, "nvme_path": ["/local_nvme"]}, None,
    ),
    "the template for NVMe of Hugging Face": (
        {
            "fp16": {**FP16, "enabled": "auto"}, "bf16": {"enabled": "auto"}, "optimizer": ADAM_AUTO,
            "scheduler": WARMUP_AUTO,
            "zero_optimization": {
                **STAGE3, "offload_optimizer": nvme(buffer_count=4, fast_init=False),
                "offload_param": nvme(buffer_count=5, buffer_size=1e8, max_in_cpu=1e9), "aio": AIO,
            },
            **AUTO_BATCH,
        },
        {**ONE, "optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.0, "nvme_path": ["/local_nvme"]}, "WarmupLR",
    ),
    "the template for stage 2 of Hugging Face": (
        {
            "fp16": {**FP16, "enabled": "auto"}, "optimizer": ADAM_AUTO, "scheduler": WARMUP_AUTO,
            "zero_optimization": {"stage": 2, "offload_optimizer": CPU, **BUCKETS}, **AUTO_BATCH,
        },
        {**ONE, "optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.0}, "WarmupLR",
    ),
    "fp16 with Adam and warm-up": (
        {**BATCH, "fp16": FP16, "optimizer": ADAMW, "scheduler": WARMUP, "gradient_clipping": 0.5},
        {**PLAIN, **ADAM_OPTIONS, "precision": "fp16", "gradient_clipping": 0.5}, "WarmupLR",
    ),
    "fp16, off": ({**BATCH, "fp16": {**FP16, "enabled": False}}, PLAIN, None),
    "bf16, no clipping": (
        {**BATCH, "bf16": {"enabled": True}, "gradient_clipping": 0},
        {**PLAIN, "precision": "bf16", "gradient_clipping": 0.0}, None,
    ),
    "bf16 with small states": (
        {**BATCH, "bf16": {"enabled": True, "bf16_master_weights_and_grads": True, "bf16_optimizer_states": True}},
        {**PLAIN, "precision": "bf16", "moments_dtype": "bf16", "master_dtype": "bf16"}, None,
    ),
    "small states of a block that is off": (
        {**BATCH, "bf16": {"enabled": False, "bf16_master_weights_and_grads": True}}, PLAIN, None,
    ),
    "bfloat16 by its old name": ({**BATCH, "bfloat16": {"enabled": True}}, {**PLAIN, "precision": "bf16"}, None),
    "Adam is AdamW": (
        {**BATCH, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "torch_adam": False}}},
        {**PLAIN, "optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.0}, None,
    ),
    "Adam, and no other": (
        {**BATCH, "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "adam_w_mode": False, "weight_decay": 0.1}}},
        {**PLAIN, "optimizer": "adam", "lr": 1e-3, "weight_decay": 0.1}, None,
    ),
    "torch's AdamW with its decay": (
        {**BATCH, "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "torch_adam": True}}},
        {**PLAIN, "optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.01}, None,
    ),
    "Adam of the CPU by its class": (
        {**BATCH, "optimizer": {"type": "DeepSpeedCPUAdam", "params": {"lr": 2e-4, "bias_correction": True}}},
        {**PLAIN, "optimizer": "adamw", "lr": 2e-4, "weight_decay": 0.0}, None,
    ),
    "amsgrad": (
        {**BATCH, "optimizer": {"type": "AdamW", "params": {"amsgrad": True}}},
        {**PLAIN, "optimizer": "adamw", "lr": 1e-3, "weight_decay": 0.0, "optimizer_options": {"amsgrad": True}}, None,
    ),
    "Lion": (
        {**BATCH, "optimizer": {"type": "Lion", "params": {"lr": 1e-4, "weight_decay": 0.1}}},
        {**PLAIN, "optimizer": "lion", "lr": 1e-4, "betas": (0.9, 0.999), "weight_decay": 0.1}, None,
    ),
    "Adagrad": (
        {**BATCH, "optimizer": {"type": "Adagrad", "params": {"lr": 0.02}}},
        {**PLAIN, "optimizer": "adagrad", "lr": 0.02, "weight_decay": 0.0}, None,
    ),
    "SGD of torch": (
        {**BATCH, "optimizer": {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}},
        {**PLAIN, "optimizer": torch.optim.SGD, "lr": 0.1, "optimizer_options": {"momentum": 0.9}}, None,
    ),
    "a decay to the end": (
        {**BATCH, "optimizer": ADAMW, "scheduler": {"type": "WarmupDecayLR", "params": {
            "total_num_steps": 1000, "warmup_min_lr": 0, "warmup_max_lr": 3e-5, "warmup_num_steps": 100}}},
        {**PLAIN, **ADAM_OPTIONS}, "WarmupDecayLR",
    ),
    "a cosine": (
        {**BATCH, "scheduler": {"type": "WarmupCosineLR", "params": {"total_num_steps": 1e3, "cos_min_ratio": 0.1}}},
        PLAIN, "WarmupCosineLR",
    ),
    "one cycle": (
        {**BATCH, "scheduler": {"type": "OneCycle", "params": {
            "cycle_first_step_size": 1000, "cycle_first_stair_count": 500, "cycle_second_step_size": 1000,
            "cycle_second_stair_count": 500, "decay_step_size": 1000, "cycle_min_lr": 0.0001, "cycle_max_lr": 0.001,
            "decay_lr_rate": 0.001, "cycle_min_mom": 0.85, "cycle_max_mom": 0.99, "decay_mom_rate": 0.0}}},
        PLAIN, "OneCycle",
    ),
    "a scheduler of torch": (
        {**BATCH, "scheduler": {"type": "StepLR", "params": {"step_size": 10, "gamma": 0.5}}}, PLAIN, "StepLR",
    ),
    "CIFAR": (
        {
            "train_batch_size": 16, "steps_per_print": 2000,
            "optimizer": {"type": "Adam", "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8,
                                                      "weight_decay": 3e-7}},
            "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 0.001,
                                                         "warmup_num_steps": 1000}},
            "gradient_clipping": 1.0, "prescale_gradients": False, "bf16": {"enabled": False},
            "fp16": {**FP16, "enabled": False, "fp16_master_weights_and_grads": False, "initial_scale_power": 15},
            "wall_clock_breakdown": False,
            "zero_optimization": {"stage": 0, "allgather_partitions": True, "reduce_scatter": True,
                                  "allgather_bucket_size": 50000000, "reduce_bucket_size": 50000000,
                                  "overlap_comm": True, "contiguous_gradients": True, "cpu_offload": False},
        },
        {**ONE, **ADAM_OPTIONS, "lr": 0.001}, "WarmupLR",
    ),
    "Megatron with activation checkpointing": (
        {
            "train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 2, "steps_per_print": 1,
            "zero_optimization": {"stage": 1, "contiguous_gradients": True}, "gradient_clipping": 1.0,
            "fp16": FP16, "wall_clock_breakdown": True, "zero_allow_untested_optimizer": False,
            "activation_checkpointing": {"partition_activations": True, "cpu_checkpointing": True,
                                         "contiguous_memory_optimization": False, "number_checkpoints": 24,
                                         "synchronize_checkpoint_boundary": False, "profile": False},
        },
        {**PLAIN, "precision": "fp16", "gradient_accumulation_steps": 2}, None,
    ),
    "monitors, profilers and other blocks": (
        {
            **BATCH, "tensorboard": {"enabled": True, "output_path": "logs", "job_name": "run"},
            "wandb": {"enabled": False, "group": None, "team": "t", "project": "p"}, "csv_monitor": {"enabled": True},
            "flops_profiler": {"enabled": True, "profile_step": 1, "module_depth": -1, "top_modules": 1,
                               "detailed": True, "output_file": None},
            "comms_logger": {"enabled": True, "verbose": False}, "memory_breakdown": False, "dump_state": True,
            "checkpoint": {"tag_validation": "Warn", "load_universal": False}, "elasticity": {"enabled": False},
            "data_types": {"grad_accum_dtype": "fp32"}, "amp": {"enabled": False, "opt_level": "O1"},
            "tensor_parallel": {"autotp_size": 1}, "compile": {"deepcompile": False}, "curriculum_learning": {},
        },
        PLAIN, None,
    ),
    "ZeRO++": (
        zero(3, zero_quantized_weights=True, zero_hpz_partition_size=8, zero_quantized_gradients=True,
             reduce_bucket_size=10000000, reduce_scatter=True),
        {**PLAIN, "exchange_dtype": "int8"}, None,
    ),
    "ZeRO++ and bf16 between ranks: the fewest bytes": (
        {**zero(3, zero_quantized_gradients=True), "communication_data_type": "bf16"},
        {**PLAIN, "exchange_dtype": "int8"}, None,
    ),
    "budgets of ours beside theirs": (
        {**zero(3, offload_optimizer=nvme()), "offload_engine": {"host_memory": "20GiB", "durable": 1}},
        {**PLAIN, "nvme_path": ["/local_nvme"], "host_memory": "20GiB", "durable": 1}, None,
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", SHAPES)
def test_a_configuration_that_people_have_means_what_it_says(name: str):
    config, options, scheduler = SHAPES[name]
    before = copy.deepcopy(config)
    translation = translate(config)
    zero = config.get("zero_optimization", {})
    stage = int(zero) if isinstance(zero, bool) else zero.get("stage")
    assert translation.options == {**options, **({} if stage is None else {"shard": SHARDS[stage]})}
    assert (translation.scheduler.name if translation.scheduler else None) == scheduler
    assert config == before
    assert len(table_of(translation.rows)) > 20


def test_there_are_enough_of_them():
    assert len(SHAPES) >= 30
    devices = {json.dumps(part) for config, _, _ in SHAPES.values() for part in [config.get("zero_optimization")]}
    assert len(devices) > 15


TRAINING = SimpleNamespace(
    per_device_train_batch_size=4, gradient_accumulation_steps=8, max_grad_norm=0.3, learning_rate=2e-5, adam_beta1=0.8,
    adam_beta2=0.95, adam_epsilon=1e-6, weight_decay=0.05, fp16=False, bf16=True, warmup_steps=0, warmup_ratio=0.1,
    max_steps=205,
)  # fmt: skip


def test_auto_comes_from_the_arguments_of_a_trainer():
    config, _, _ = SHAPES["the template for NVMe of Hugging Face"]
    decay = {"type": "WarmupDecayLR", "params": {**WARMUP_AUTO["params"], "total_num_steps": "auto"}}
    translation = translate({**config, "scheduler": decay}, TRAINING)
    assert translation.options == {
        "optimizer": "adamw", "lr": 2e-5, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.05, "precision": "bf16",
        "nvme_path": ["/local_nvme"], "gradient_clipping": 0.3, "gradient_accumulation_steps": 8, "shard": "weights",
    }  # fmt: skip
    assert (translation.batch.train, translation.batch.micro) == (32, 4)
    assert translation.scheduler is not None and translation.scheduler.missing == ()
    assert translation.scheduler.params == {
        "warmup_min_lr": 0.0, "warmup_max_lr": None, "warmup_num_steps": 21, "total_num_steps": 205,
    }  # fmt: skip
    shown = table_of(translation.rows)
    assert "gradient_clipping = auto -> 0.3" in shown and "bf16.enabled = auto -> True" in shown


def test_an_optimizer_that_is_built_says_what_auto_is():
    built = torch.optim.AdamW([torch.nn.Parameter(torch.zeros(1))], lr=0.25)
    part = translate({**BATCH, "optimizer": ADAM_AUTO}, None, built).optimizer
    assert part is not None and part.settings["lr"] == 0.25


def test_a_number_of_steps_that_nothing_says_is_missed_when_it_is_needed():
    config = {**BATCH, "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": "auto"}}}
    scheduler = translate(config).scheduler
    assert scheduler is not None
    with pytest.raises(ConfigError, match='total_num_steps is "auto", and nothing says it'):
        scheduler.make(torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1))


def test_each_key_that_was_given_has_its_row():
    rows = translate(SHAPES["CIFAR"][0]).rows
    by_key = {row.key: row for row in rows}
    assert len(by_key) == len(rows)
    assert by_key["optimizer.params.lr"].effect is Effect.HONOURED
    assert by_key["zero_optimization.overlap_comm"].effect is Effect.IDLE
    assert by_key["fp16.initial_scale_power"].says == "its block is off"


def test_a_file_and_a_text_are_read_as_a_dict_is(tmp_path):
    config, options, _ = SHAPES["fp16 with Adam and warm-up"]
    path = tmp_path / "ds.json"
    path.write_text(json.dumps(config))
    assert translate(path).options == translate(str(path)).options == translate(json.dumps(config)).options == options


CONTRADICTIONS = [
    ({**BATCH, "gradient_accumulation_steps": 2}, "train_batch_size=8 is not train_micro_batch_size_per_gpu=2 x "
     "gradient_accumulation_steps=2 x 1 process: gradient_accumulation_steps=4 does the same in 1 process"),
    ({"train_batch_size": 9, "train_micro_batch_size_per_gpu": 2}, "train_batch_size=9 is no multiple of"),
    ({"gradient_accumulation_steps": 2}, "train_batch_size or train_micro_batch_size_per_gpu is needed"),
    ({**BATCH, "fp16": {"enabled": True}, "bf16": {"enabled": True}}, "fp16.enabled and bf16.enabled are both true"),
    (zero(3, offload_param={"device": "nvme"}), 'offload_param.device is "nvme" and there is no nvme_path'),
    (zero(3, ofload_param=CPU), "unknown key 'ofload_param' in zero_optimization, did you mean 'offload_param'?"),
    (zero(3, offload_param={**CPU, "bufer_count": 5}), "offload_param, did you mean 'buffer_count'?"),
    (zero(3, aio={"queue_dept": 5}), "zero_optimization.aio, did you mean 'queue_depth'?"),
    ({**BATCH, "gradient_cliping": 1}, "did you mean 'gradient_clipping'?"),
    ({**BATCH, "optimizer": {"type": "Adam", "params": {"learning_rate": 1}}}, "unknown key 'learning_rate' in opt"),
    ({**BATCH, "optimizer": {"type": "SGD", "params": {"lr": 1.0, "momentun": 1}}}, "did you mean 'momentum'?"),
    ({**BATCH, "optimizer": {"type": "OneBitAdam"}}, "optimizer.type='OneBitAdam' is not there"),
    ({**BATCH, "optimizer": {"type": "ZeroOneAdam"}}, "zero_quantized_gradients for gradients in 8 bits"),
    ({**BATCH, "optimizer": {"type": "Adamm"}}, "did you mean 'Adam'?"),
    ({**BATCH, "optimizer": {"type": "Adam", "params": {"max_grad_norm": 1.0}}}, "write gradient_clipping at the top"),
    ({**BATCH, "scheduler": {"type": "WarmUpLR"}}, "did you mean 'WarmupLR'?"),
    ({**BATCH, "scheduler": {"type": "WarmupDecayLR"}}, "needs scheduler.params.total_num_steps"),
    (zero(4), "zero_optimization.stage: expected a whole number from 0 to 3, got 4"),
    (zero(3, zenflow={"topk_ratio": 0.1}), "zero_optimization.zenflow is not there: it delays updates"),
    ({**BATCH, "tensor_parallel": {"autotp_size": 4}}, "tensor_parallel.autotp_size=4 is not there"),
    ({**BATCH, "compression_training": {"weight_quantization": {"shared_parameters": {"enabled": True}}}},
     "compression_training is not there"),
    ({**BATCH, "tensorboard": {"outputpath": "x"}}, "in tensorboard, did you mean 'output_path'?"),
    ({**BATCH, "offload_engine": {"host_mem": 1}}, "unknown option 'host_mem'"),
]  # fmt: skip


@pytest.mark.parametrize(("config", "message"), CONTRADICTIONS, ids=range(len(CONTRADICTIONS)))
def test_what_cannot_be_is_one_line_that_says_what_to_do(config: dict, message: str):
    with pytest.raises(ConfigError) as refused:
        translate(config)
    assert message in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize(("given", "meant"), [("bf16", "bf16"), ("fp32", "auto"), ("fp16", "auto"), (None, "auto")])
def test_the_dtype_that_ranks_communicate_in_is_that_of_the_exchange(given: str | None, meant: str):
    options = translate({**BATCH, "communication_data_type": given}).options
    assert OffloadConfig(**options).exchange_dtype == meant


def test_a_dtype_that_ranks_cannot_communicate_in_is_told():
    with pytest.raises(
        ConfigError, match="communication_data_type: expected one of 'fp32', 'fp16', 'bf16', got 'int8'"
    ):
        translate({**BATCH, "communication_data_type": "int8"})
