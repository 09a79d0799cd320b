"""Every key of a ``ds_config``: which values it takes, and what becomes of it here.

The table in ``docs/deepspeed.md``, the one that is printed at the start, the checks and the translation are this data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from offload.compat.deepspeed import kinds


class Effect(Enum):
    """What becomes of a key."""

    HONOURED = "honoured"
    IDLE = "accepted, no effect"
    REFUSED = "refused"


@dataclass(frozen=True)
class Key:
    """One value. ``harmless``: what a refused key may be, since it asks for nothing."""

    effect: Effect
    kind: kinds.Kind
    says: str
    harmless: tuple[Any, ...] = ()

    @property
    def takes_auto(self) -> bool:
        return self.effect is not Effect.REFUSED and self.kind.takes_auto


@dataclass(frozen=True)
class Block:
    """Keys under one name; ``is_switched`` by ``enabled``, and off without it."""

    keys: Mapping[str, Key | Block | Feature]
    is_switched: bool = False


@dataclass(frozen=True)
class Feature:
    """A block of which nothing is taken over: its effect if it is on. Only the names at its first level are known.

    ``is_switched``: on if ``enabled`` is true somewhere in it. Else it is on when it is there.
    """

    effect: Effect
    says: str
    keys: frozenset[str] = field(default_factory=frozenset)
    is_switched: bool = True


def _honoured(kind: kinds.Kind, says: str) -> Key:
    return Key(Effect.HONOURED, kind, says)


def _idle(kind: kinds.Kind, says: str) -> Key:
    return Key(Effect.IDLE, kind, says)


def _refused(kind: kinds.Kind, says: str, *harmless: Any) -> Key:
    return Key(Effect.REFUSED, kind, says, harmless)


def _feature(effect: Effect, says: str, names: str, *, is_switched: bool = True) -> Feature:
    return Feature(effect, says, frozenset(names.split()), is_switched)


_EXCHANGE = "the engine says what ranks exchange, and when; means are taken in fp32"
_EQUAL_PARTS = "each rank holds an equal part of each unit"
_WHOLE_MODEL = "each rank computes with the whole model, on data of its own"
_BUDGETS = "host_memory and device_memory bound all that is held"
_FOLLOWS = "how far to read ahead follows from host_memory"
_STAGED = "staging buffers are part of host_memory, and pinned where there is a GPU"
_MASTERS = "masters stay fp32, which is more exact"
_ADAPTS = "the loss scale starts at 2^16, is halved at an overflow and doubled after 2000 good steps"
_MODELS = "activations are the model's: turn checkpointing on there"
_IO = "the I/O engine sets it by itself; `offload bench` measures the disk"
_REPORT = "engine.engine.report() and timeline() have seconds, bytes and waits of a step"
_LOG = "nothing is written: log get_lr(), get_global_grad_norm() and the loss in the loop"

AIO = Block(
    {
        name: _idle(kind, _IO)
        for name, kind in {
            "block_size": kinds.COUNT,
            "queue_depth": kinds.COUNT,
            "intra_op_parallelism": kinds.COUNT,
            "thread_count": kinds.COUNT,
            "single_submit": kinds.FLAG,
            "overlap_events": kinds.FLAG,
            "use_gds": kinds.FLAG,
        }.items()
    }
)
"""Here it is taken at the top and in ``zero_optimization``, where the template of Hugging Face has it."""

_DEVICE = kinds.choice("none", "cpu", "nvme")

OFFLOAD_PARAM = Block(
    {
        "device": _honoured(_DEVICE, "nvme: nvme_path; cpu, none: host and device memory, as far as they go"),
        "nvme_path": _honoured(kinds.PATHS, "nvme_path, if device is nvme; two different ones are both used"),
        "pin_memory": _idle(kinds.FLAG, _STAGED),
        "buffer_count": _idle(kinds.COUNT, _STAGED),
        "buffer_size": _idle(kinds.COUNT, _STAGED),
        "max_in_cpu": _idle(kinds.NATURAL, _BUDGETS),
        "aio": AIO,
    }
)

OFFLOAD_OPTIMIZER = Block(
    {
        "device": _honoured(_DEVICE, "nvme: nvme_path, at any stage; cpu, none: host and device memory"),
        "nvme_path": _honoured(kinds.PATHS, "nvme_path, if device is nvme; two different ones are both used"),
        "pin_memory": _idle(kinds.FLAG, _STAGED),
        "buffer_count": _idle(kinds.COUNT, _STAGED),
        "buffer_size": _idle(kinds.COUNT, _STAGED),
        "fast_init": _idle(kinds.FLAG, "states are made where they rest"),
        "pipeline": _idle(kinds.FLAG, "reads, updates and writes always overlap"),
        "pipeline_read": _idle(kinds.FLAG, "reads, updates and writes always overlap"),
        "pipeline_write": _idle(kinds.FLAG, "reads, updates and writes always overlap"),
        "ratio": _idle(kinds.SHARE, "the budgets say which states a GPU updates and which the CPU"),
        "super_offload": _idle(kinds.FLAG, "updates overlap with compute in any case"),
        "cpuadam_cores_perc": _idle(kinds.SHARE, "kernels use the threads that torch has"),
        "aio": AIO,
    }
)

ZERO = Block(
    {
        "stage": _honoured(
            kinds.whole_up_to(3),
            'what ranks hold parts of: shard="states" for 0 and 1, "gradients" '
            'for 2, "weights" for 3; where bytes rest the budgets say',
        ),
        "offload_param": OFFLOAD_PARAM,
        "offload_optimizer": OFFLOAD_OPTIMIZER,
        "aio": AIO,
        "cpu_offload": _honoured(kinds.FLAG, "the old name of offload_optimizer with device cpu"),
        "cpu_offload_params": _honoured(kinds.FLAG, "the old name of offload_param with device cpu"),
        "cpu_offload_param": _honoured(kinds.FLAG, "the old name of offload_param with device cpu"),
        "cpu_offload_use_pin_memory": _idle(kinds.FLAG, _STAGED),
        "contiguous_gradients": _idle(kinds.FLAG, "gradients of a unit always rest side by side"),
        "reduce_scatter": _idle(kinds.FLAG, _EXCHANGE),
        "reduce_bucket_size": _idle(kinds.NATURAL, _EXCHANGE),
        "allgather_partitions": _idle(kinds.FLAG, _EXCHANGE),
        "allgather_bucket_size": _idle(kinds.NATURAL, _EXCHANGE),
        "overlap_comm": _idle(kinds.FLAG, "copies and reads always overlap with compute"),
        "sub_group_size": _idle(kinds.COUNT, "the engine's tile_bytes say what is updated in one go"),
        "stage3_prefetch_bucket_size": _idle(kinds.NATURAL, _FOLLOWS),
        "stage3_param_persistence_threshold": _idle(kinds.NATURAL, _BUDGETS),
        "stage3_model_persistence_threshold": _idle(kinds.NATURAL, _BUDGETS),
        "stage3_max_live_parameters": _idle(kinds.NATURAL, _BUDGETS),
        "stage3_max_reuse_distance": _idle(kinds.NATURAL, _BUDGETS),
        "stage3_gather_16bit_weights_on_model_save": _idle(kinds.FLAG, "save_16bit_model always saves whole weights"),
        "stage3_gather_fp16_weights_on_model_save": _idle(kinds.FLAG, "save_16bit_model always saves whole weights"),
        "stage3_module_granularity_threshold": _idle(kinds.NATURAL, "units are found in the model"),
        "stage3_use_all_reduce_for_fetch_params": _idle(kinds.FLAG, _EXCHANGE),
        "stage3_allgather_sequential": _idle(kinds.FLAG, _EXCHANGE),
        "use_multi_rank_bucket_allreduce": _idle(kinds.FLAG, _EXCHANGE),
        "round_robin_gradients": _idle(kinds.FLAG, _EXCHANGE),
        "parameter_alignment": _idle(kinds.FLAG, "every parameter is aligned"),
        "compute_grad_norm": _idle(kinds.FLAG, "the norm costs no pass over the gradients, and is always known"),
        "ignore_unused_parameters": _idle(kinds.FLAG, "a parameter without a gradient takes no step"),
        "legacy_stage1": _idle(kinds.FLAG, _EQUAL_PARTS),
        "grad_hooks": _idle(kinds.FLAG, "gradients leave as soon as they are complete"),
        "load_from_fp32_weights": _idle(kinds.FLAG, "checkpoints have the fp32 masters"),
        "elastic_checkpoint": _idle(kinds.FLAG, "checkpoints fit any budgets and paths"),
        "zero_hpz_partition_size": _idle(kinds.COUNT, _EQUAL_PARTS),
        "zero_quantized_weights": _idle(kinds.FLAG, _EXCHANGE),
        "zero_quantized_nontrainable_weights": _idle(kinds.FLAG, _EXCHANGE),
        "zero_quantized_gradients": _idle(kinds.FLAG, _EXCHANGE),
        "zeropp_loco_param": _idle(kinds.ANY, _EXCHANGE),
        "mics_shard_size": _idle(kinds.INTEGER, _EQUAL_PARTS),
        "mics_hierarchical_params_gather": _idle(kinds.FLAG, _EQUAL_PARTS),
        "memory_efficient_linear": _idle(kinds.FLAG, "weights are held once in any case"),
        "pipeline_loading_checkpoint": _idle(kinds.FLAG, "checkpoints are read in parts"),
        "override_module_apply": _idle(kinds.FLAG, "parameters can be read and written at any time"),
        "log_trace_cache_warnings": _idle(kinds.FLAG, "the order of units is not traced"),
        "enable_sanity_checks": _idle(kinds.FLAG, "records have checksums in any case"),
        "save_muon_momentum_buffer_in_memory": _idle(kinds.FLAG, _BUDGETS),
        "leaf_module": _idle(kinds.ANY, "units are found in the model"),
        "zenflow": _feature(
            Effect.REFUSED,
            "it delays updates, which changes the result: leave it out",
            "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
            "full_warm_up_rounds pt_reserved_cores_perc",
            is_switched=False,
        ),
    }
)

_PRECISION_OFF = "without fp16 or bf16 the weights keep the dtype that the model has"

FP16 = Block(
    {
        "enabled": _honoured(kinds.FLAG, f'precision="fp16"; {_PRECISION_OFF}'),
        "auto_cast": _idle(kinds.FLAG, "floating-point inputs are always cast to the weights' dtype"),
        "loss_scale": _idle(kinds.NUMBER, _ADAPTS),
        "initial_scale_power": _idle(kinds.NATURAL, _ADAPTS),
        "loss_scale_window": _idle(kinds.COUNT, _ADAPTS),
        "hysteresis": _idle(kinds.COUNT, _ADAPTS),
        "consecutive_hysteresis": _idle(kinds.FLAG, _ADAPTS),
        "min_loss_scale": _idle(kinds.NUMBER, _ADAPTS),
        "fp16_master_weights_and_grads": _idle(kinds.FLAG, _MASTERS),
        "opt_level": _idle(kinds.TEXT, "it is of amp, which is not there"),
    },
    is_switched=True,
)

BF16 = Block(
    {
        "enabled": _honoured(kinds.FLAG, f'precision="bf16"; {_PRECISION_OFF}'),
        "check_grad_overflow": _honoured(kinds.FLAG, "true: a step with a gradient that is not finite is left out, "
                                         "false: it raises NonFiniteGradient"),
        "bf16_optimizer_states": _honoured(kinds.FLAG, 'moments_dtype="bf16"'),
        "bf16_master_weights_and_grads": _idle(kinds.FLAG, _MASTERS),
        "immediate_grad_update": _idle(kinds.FLAG, "gradients leave as soon as they are complete"),
    },
    is_switched=True,
)  # fmt: skip

_PARAMS = "by its type: see the next table"

_MONITOR = "enabled output_path job_name"

TOP = Block(
    {
        "train_batch_size": _honoured(kinds.COUNT, "train_batch_size(); checked against the two below"),
        "train_micro_batch_size_per_gpu": _honoured(kinds.COUNT, "batches of the data loader that initialize makes"),
        "gradient_accumulation_steps": _honoured(kinds.COUNT, "gradient_accumulation_steps"),
        "managed_gradient_accumulation": _refused(
            kinds.FLAG, "use set_gradient_accumulation_boundary, and leave it out", True
        ),
        "gradient_clipping": _honoured(kinds.NUMBER, "gradient_clipping; 1.0 if it is absent, as in DeepSpeed; "
                                       "0 turns it off"),
        "steps_per_print": _honoured(kinds.WHOLE_OR_INF, "so often a line with step, rate and norm is printed"),
        "wall_clock_breakdown": _honoured(kinds.FLAG, "that line has seconds of the step and of waits, too"),
        "memory_breakdown": _idle(kinds.FLAG, _REPORT),
        "dump_state": _idle(kinds.FLAG, "offload config from-deepspeed shows what the file means"),
        "optimizer": Block(
            {
                "type": _honoured(kinds.TEXT, "optimizer: a name with a kernel, or the class of torch.optim"),
                "params": _honoured(kinds.DICT, _PARAMS),
                "legacy_fusion": _idle(kinds.FLAG, "updates are fused in any case"),
            }
        ),
        "scheduler": Block(
            {
                "type": _honoured(kinds.TEXT, "a scheduler of torch with DeepSpeed's formula, or torch's own by name"),
                "params": _honoured(kinds.DICT, _PARAMS),
            }
        ),
        "fp16": FP16,
        "bf16": BF16,
        "bfloat16": BF16,
        "zero_optimization": ZERO,
        "aio": AIO,
        "offload_engine": _honoured(kinds.OPTIONS, "not DeepSpeed's: options of OffloadConfig, which go before others"),
        "zero_allow_untested_optimizer": _idle(kinds.FLAG, "every optimizer of torch runs"),
        "zero_force_ds_cpu_optimizer": _idle(kinds.FLAG, "every optimizer of torch runs"),
        "dataloader_drop_last": _honoured(kinds.FLAG, "drop_last of the data loader that initialize makes"),
        "prescale_gradients": _idle(kinds.FLAG, _EXCHANGE),
        "gradient_predivide_factor": _idle(kinds.NUMBER, _EXCHANGE),
        "gradient_allreduce_op": _idle(kinds.choice("mean", "sum"), _EXCHANGE),
        "communication_data_type": _idle(kinds.TEXT, _EXCHANGE),
        "seq_parallel_communication_data_type": _idle(kinds.TEXT, _EXCHANGE),
        "disable_allgather": _idle(kinds.FLAG, _EXCHANGE),
        "sparse_gradients": _idle(kinds.FLAG, _EXCHANGE),
        "graph_harvesting": _idle(kinds.FLAG, "graphs of a GPU are not recorded"),
        "use_data_before_expert_parallelism": _idle(kinds.FLAG, _WHOLE_MODEL),
        "log_level": _idle(kinds.TEXT, "the engine prints nothing by itself"),
        "data_types": Block(
            {
                "grad_accum_dtype": _idle(kinds.TEXT, "several gradients are added up in fp32"),
                "param_dtype": _idle(kinds.TEXT, "fp16 or bf16 say it"),
                "buffer_dtype": _idle(kinds.TEXT, "buffers keep the dtype that the model has"),
            }
        ),
        "activation_checkpointing": Block(
            {
                "partition_activations": _idle(kinds.FLAG, _MODELS),
                "cpu_checkpointing": _idle(kinds.FLAG, _MODELS),
                "contiguous_memory_optimization": _idle(kinds.FLAG, _MODELS),
                "number_checkpoints": _idle(kinds.NATURAL, _MODELS),
                "synchronize_checkpoint_boundary": _idle(kinds.FLAG, _MODELS),
                "profile": _idle(kinds.FLAG, _MODELS),
            }
        ),
        "checkpoint": Block(
            {
                "tag_validation": _idle(kinds.TEXT, "a checkpoint has one name on all ranks"),
                "load_universal": _refused(kinds.FLAG, "no checkpoint of DeepSpeed is read: load the weights", False),
                "use_node_local_storage": _idle(kinds.FLAG, "checkpoints go where save_checkpoint says"),
                "parallel_write": _idle(kinds.DICT, "each rank writes its part"),
                "writer": _idle(kinds.ANY, "data go to the disk by direct I/O"),
                "checkpoint_serialization": _idle(kinds.FLAG, "nothing is pickled"),
            }
        ),
        "compile": Block(
            {
                name: _idle(kinds.ANY, "compile the blocks of the model with torch.compile before initialize")
                for name in (
                    "enabled", "backend", "kwargs", "deepcompile", "free_activation", "offload_activation",
                    "offload_activation_pin_memory", "offload_opt_states", "offload_parameters", "double_buffer",
                    "symmetric_memory", "debug_log", "sync_before_reduce", "sync_after_reduce", "sync_before_allgather",
                    "sync_after_allgather", "keep_int_input_tensors", "keep_all_input_tensors", "passes",
                )
            }
        ),
        "amp": _feature(Effect.REFUSED, "write bf16 or fp16 instead", "enabled opt_level loss_scale"),
        "torch_autocast": _feature(
            Effect.REFUSED,
            "run the forward in torch.autocast yourself, or write bf16",
            "enabled dtype lower_precision_safe_modules",
        ),
        "tensor_parallel": Block(
            {
                "autotp_size": _refused(kinds.NATURAL, f"{_WHOLE_MODEL}: write 1, or leave it out", 0, 1),
                **{
                    name: _idle(kinds.ANY, _WHOLE_MODEL)
                    for name in (
                        "enabled", "dtype", "tp_size", "tp", "preset_model", "tp_overlap_comm", "partition_config",
                        "tp_grain_size", "mpu", "tp_group", "module", "injection_policy_tuple",
                        "keep_module_on_host", "replace_with_kernel_inject",
                    )
                },
            }
        ),
        "expert_parallel": _feature(
            Effect.REFUSED,
            f"{_WHOLE_MODEL}: leave it out",
            "enabled autoep_size expert_tensor_parallel_size preset_model use_grouped_mm disable_triton_grouped_mm "
            "moe_layer_pattern router_pattern expert_pattern score_func score_apply route_norm route_scale top_k "
            "routed_scaling_factor num_expert_groups num_limited_groups load_balance_coeff expert_w1 expert_w2 "
            "expert_w3 num_experts_attr top_k_attr has_shared_experts shared_experts_pattern "
            "shared_experts_gate_pattern",
        ),
        "pipeline": _feature(
            Effect.REFUSED,
            f"{_WHOLE_MODEL}: leave it out",
            "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned",
            is_switched=False,
        ),
        "elasticity": _feature(
            Effect.REFUSED,
            "the number of ranks stays what it is: leave it out",
            "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time version prefer_larger_batch "
            "ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size",
        ),
        "autotuning": _feature(
            Effect.REFUSED,
            "nothing here wants tuning: leave it out",
            "enabled results_dir exps_dir overwrite metric start_profile_step end_profile_step fast "
            "max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu "
            "min_train_micro_batch_size_per_gpu mp_size num_tuning_micro_batch_sizes tuner_type tuner_early_stopping "
            "tuner_num_trials arg_mappings model_info model_info_path metric_path",
        ),
        "flops_profiler": _feature(
            Effect.IDLE,
            _REPORT,
            "enabled profile_step module_depth top_modules detailed output_file recompute_fwd_factor",
        ),
        "tensorboard": _feature(Effect.IDLE, _LOG, _MONITOR),
        "csv_monitor": _feature(Effect.IDLE, _LOG, _MONITOR),
        "wandb": _feature(Effect.IDLE, _LOG, "enabled group team project"),
        "comet": _feature(
            Effect.IDLE,
            _LOG,
            "enabled workspace project samples_log_interval experiment_name api_key experiment_key online mode",
        ),
        "comms_logger": _feature(Effect.IDLE, _REPORT, "enabled verbose prof_all debug prof_ops"),
        "curriculum_learning": _feature(
            Effect.REFUSED,
            "choose the samples in the data loader",
            "enabled curriculum_type min_difficulty max_difficulty schedule_type schedule_config",
        ),
        "data_efficiency": _feature(
            Effect.REFUSED, "choose the samples in the data loader", "enabled seed data_routing data_sampling"
        ),
        "compression_training": _feature(
            Effect.REFUSED,
            "compress the model before or after the training",
            "layer_reduction weight_quantization activation_quantization sparse_pruning row_pruning head_pruning "
            "channel_pruning",
        ),
        "quantize_training": _feature(
            Effect.REFUSED,
            "compress the model before or after the training",
            "enabled quantize_bits quantize_type quantize_schedule quantize_groups fp16_mixed_quantize "
            "quantize_change_ratio quantize_verbose quantizer_kernel",
        ),
        "sparse_attention": _feature(
            Effect.REFUSED,
            "the model's attention is the model's: leave it out",
            "mode block different_layout_per_head num_local_blocks num_global_blocks attention "
            "horizontal_global_attention num_different_global_patterns num_random_blocks local_window_blocks "
            "global_block_indices global_block_end_indices num_sliding_window_blocks",
            is_switched=False,
        ),
        "progressive_layer_drop": _feature(Effect.REFUSED, "drop layers in the model", "enabled theta gamma"),
        "eigenvalue": _feature(
            Effect.REFUSED,
            "it steers compression, which is not there",
            "enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
        ),
        "hybrid_engine": _feature(
            Effect.REFUSED,
            "generate with the module; see docs/generation.md",
            "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
            "enable_cuda_graph",
        ),
    }
)  # fmt: skip

_LR = _honoured(kinds.NUMBER, "lr")
_DECAY = _honoured(kinds.NUMBER, "weight_decay; 0 if it is absent, as in DeepSpeed")
_EPS = _honoured(kinds.NUMBER, "eps")
_STATES = _idle(kinds.FLAG, 'states are fp32; moments_dtype in "offload_engine" makes them smaller')
_MAX_NORM = _refused(kinds.NUMBER, "write gradient_clipping at the top instead")

ADAM_PARAMS = Block(
    {
        "lr": _LR,
        "betas": _honoured(kinds.BETAS, "betas"),
        "eps": _EPS,
        "weight_decay": _DECAY,
        "adam_w_mode": _honoured(
            kinds.FLAG, 'true, as it is if absent: "adamw", also for the type Adam; false: "adam"'
        ),
        "adamw_mode": _honoured(kinds.FLAG, "another name of adam_w_mode"),
        "torch_adam": _idle(kinds.FLAG, "the kernels do what torch's Adam does"),
        "amsgrad": _honoured(kinds.FLAG, "amsgrad"),
        "bias_correction": _refused(kinds.FLAG, "Adam here corrects the bias: write true", True),
        "set_grad_none": _idle(kinds.FLAG, "a step uses gradients up"),
        "fp32_optimizer_states": _STATES,
        "max_grad_norm": _MAX_NORM,
    }
)
LION_PARAMS = Block(
    {
        "lr": _LR,
        "betas": _honoured(kinds.BETAS, "betas; (0.9, 0.999) if it is absent, as in DeepSpeed"),
        "weight_decay": _DECAY,
        "set_grad_none": _idle(kinds.FLAG, "a step uses gradients up"),
        "fp32_optimizer_states": _STATES,
        "max_grad_norm": _MAX_NORM,
    }
)
ADAGRAD_PARAMS = Block(
    {
        "lr": _LR,
        "eps": _EPS,
        "weight_decay": _DECAY,
        "lr_decay": _honoured(kinds.NUMBER, "lr_decay"),
        "amsgrad": _refused(kinds.FLAG, "Adagrad has no such variant: leave it out", False),
        "fp32_optimizer_states": _STATES,
        "max_grad_norm": _MAX_NORM,
    }
)

_TYPE = _honoured(kinds.choice("log", "linear"), "warmup_type; log if it is absent")
_WARMUP = _honoured(kinds.COUNT, "warmup_num_steps; 1000 if it is absent, at least 2")
_TOTAL = _honoured(kinds.COUNT, "total_num_steps")
_LAST = _refused(kinds.INTEGER, "load_checkpoint resumes the schedule: leave it out", -1)

WARMUP_PARAMS = Block(
    {
        "warmup_min_lr": _honoured(kinds.RATES, "warmup_min_lr"),
        "warmup_max_lr": _honoured(kinds.RATES, "warmup_max_lr; the optimizer's lr if it is absent or auto"),
        "warmup_num_steps": _WARMUP,
        "warmup_type": _TYPE,
        "last_batch_iteration": _LAST,
    }
)
WARMUP_DECAY_PARAMS = Block(
    {
        **WARMUP_PARAMS.keys,
        "warmup_max_lr": _honoured(kinds.RATES, "warmup_max_lr; 0.001 if it is absent, the optimizer's lr if auto"),
        "total_num_steps": _TOTAL,
    }
)
WARMUP_COSINE_PARAMS = Block(
    {
        "total_num_steps": _TOTAL,
        "warmup_min_ratio": _honoured(kinds.SHARE, "warmup_min_ratio"),
        "warmup_num_steps": _WARMUP,
        "cos_min_ratio": _honoured(kinds.SHARE, "cos_min_ratio; 0.0001 if it is absent"),
        "warmup_type": _TYPE,
        "last_batch_iteration": _LAST,
    }
)
ONE_CYCLE_PARAMS = Block(
    {
        **{
            name: _honoured(kind, name)
            for name, kind in {
                "cycle_min_lr": kinds.NUMBER,
                "cycle_max_lr": kinds.NUMBER,
                "decay_lr_rate": kinds.NUMBER,
                "cycle_first_step_size": kinds.COUNT,
                "cycle_second_step_size": kinds.COUNT,
                "cycle_first_stair_count": kinds.NATURAL,
                "cycle_second_stair_count": kinds.NATURAL,
                "decay_step_size": kinds.NATURAL,
                "cycle_momentum": kinds.FLAG,
                "cycle_min_mom": kinds.SHARE,
                "cycle_max_mom": kinds.SHARE,
                "decay_mom_rate": kinds.NUMBER,
            }.items()
        },
        "last_batch_iteration": _LAST,
    }
)
RANGE_TEST_PARAMS = Block(
    {
        "lr_range_test_min_lr": _honoured(kinds.RATES, "lr_range_test_min_lr"),
        "lr_range_test_step_size": _honoured(kinds.COUNT, "lr_range_test_step_size"),
        "lr_range_test_step_rate": _honoured(kinds.NUMBER, "lr_range_test_step_rate"),
        "lr_range_test_staircase": _honoured(kinds.FLAG, "lr_range_test_staircase"),
        "last_batch_iteration": _LAST,
    }
)
