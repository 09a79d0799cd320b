"""Every key of a ``ds_config``: which values it takes, and what becomes of it here.

The table in ``docs/deepspeed.md``, the one that is printed at the start, the checks and the translation are this data.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from functools import partial
from typing import Any

from offload.compat.deepspeed import kinds


class Effect(Enum):
    """Effect of a key."""

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


def _rows(effect: Effect, names: str, kind: kinds.Kind, says: str = "", *harmless: Any) -> dict[str, Key]:
    """The same for each of the names; what it ``says`` is the name itself if nothing else is given."""
    return {name: Key(effect, kind, says or name, harmless) for name in names.split()}


honoured, idle = partial(_rows, Effect.HONOURED), partial(_rows, Effect.IDLE)
refused = partial(_rows, Effect.REFUSED)


def block(*rows: Mapping[str, Key | Block | Feature], is_switched: bool = False) -> Block:
    """All these rows."""
    return Block({name: key for row in rows for name, key in row.items()}, is_switched)


def _feature(effect: Effect, name: str, says: str, keys: str, *, is_switched: bool = True) -> dict[str, Feature]:
    return {name: Feature(effect, says, frozenset(keys.split()), is_switched)}


_ignored, _missing = partial(_feature, Effect.IDLE), partial(_feature, Effect.REFUSED)


_EXCHANGE = "the engine says what ranks exchange, and when; means are taken in fp32"
_EQUAL_PARTS = "each rank holds an equal part of each unit"
_WHOLE_MODEL = "each rank computes with the whole model, on data of its own"
_BUDGETS = "host_memory and device_memory bound all that is held"
_STAGED = "staging buffers are part of host_memory, and pinned where there is a GPU"
_MASTERS = "masters stay fp32, which is more exact"
_ADAPTS = "the loss scale starts at 2^16, is halved at an overflow and doubled after 2000 good steps"
_CHECKPOINTING = "activations are the model's: turn checkpointing on there"
_OVERLAP = "reads, updates and writes always overlap"
_LEAVE = "gradients leave as soon as they are complete"
_REPORT = "engine.engine.report() and timeline() have seconds, bytes and waits of a step"
_LOG = "nothing is written: log get_lr(), get_global_grad_norm() and the loss in the loop"
_ENGINES_IO = "the I/O engine sets it by itself; `offload bench` measures the disk"
_DEVICE = kinds.choice("none", "cpu", "nvme")

AIO = block(
    idle("block_size queue_depth intra_op_parallelism thread_count", kinds.COUNT, _ENGINES_IO),
    idle("single_submit overlap_events use_gds", kinds.FLAG, _ENGINES_IO),
)
"""Here it is taken at the top and in ``zero_optimization``, where the template of Hugging Face has it."""

_STAGING = block(
    honoured("nvme_path", kinds.PATHS, "nvme_path, if device is nvme; two different ones are both used"),
    idle("pin_memory", kinds.FLAG, _STAGED),
    idle("buffer_count buffer_size", kinds.COUNT, _STAGED),
    {"aio": AIO},
)
OFFLOAD_PARAM = block(
    honoured("device", _DEVICE, "nvme: nvme_path; cpu, none: host and device memory, as far as they go"),
    _STAGING.keys,
    idle("max_in_cpu", kinds.NATURAL, _BUDGETS),
)
OFFLOAD_OPTIMIZER = block(
    honoured("device", _DEVICE, "nvme: nvme_path, at any stage; cpu, none: host and device memory"),
    _STAGING.keys,
    idle("fast_init", kinds.FLAG, "states are made where they rest"),
    idle("pipeline pipeline_read pipeline_write", kinds.FLAG, _OVERLAP),
    idle("ratio", kinds.SHARE, "the budgets say which states a GPU updates and which the CPU"),
    idle("super_offload", kinds.FLAG, "updates overlap with compute in any case"),
    idle("cpuadam_cores_perc", kinds.SHARE, "kernels use the threads that torch has"),
)

ZERO = block(
    honoured(
        "stage",
        kinds.whole_up_to(3),
        'what ranks hold parts of: shard="states" for 0 and 1, "gradients" for 2, "weights" for 3; where bytes rest '
        "the budgets say",
    ),
    {"offload_param": OFFLOAD_PARAM, "offload_optimizer": OFFLOAD_OPTIMIZER, "aio": AIO},
    honoured("cpu_offload", kinds.FLAG, "the old name of offload_optimizer with device cpu"),
    honoured("cpu_offload_params cpu_offload_param", kinds.FLAG, "the old name of offload_param with device cpu"),
    idle("cpu_offload_use_pin_memory", kinds.FLAG, _STAGED),
    idle("contiguous_gradients", kinds.FLAG, "gradients of a unit always rest side by side"),
    idle(
        "reduce_scatter allgather_partitions stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential "
        "use_multi_rank_bucket_allreduce round_robin_gradients zero_quantized_weights "
        "zero_quantized_nontrainable_weights zero_quantized_gradients",
        kinds.FLAG,
        _EXCHANGE,
    ),
    idle("reduce_bucket_size allgather_bucket_size", kinds.NATURAL, _EXCHANGE),
    idle("zeropp_loco_param", kinds.ANY, _EXCHANGE),
    idle("overlap_comm", kinds.FLAG, "copies and reads always overlap with compute"),
    idle("sub_group_size", kinds.COUNT, "the engine's tile_bytes say what is updated in one go"),
    idle("stage3_prefetch_bucket_size", kinds.NATURAL, "how far to read ahead follows from host_memory"),
    idle(
        "stage3_param_persistence_threshold stage3_model_persistence_threshold stage3_max_live_parameters "
        "stage3_max_reuse_distance",
        kinds.NATURAL,
        _BUDGETS,
    ),
    idle("save_muon_momentum_buffer_in_memory", kinds.FLAG, _BUDGETS),
    idle(
        "stage3_gather_16bit_weights_on_model_save stage3_gather_fp16_weights_on_model_save",
        kinds.FLAG,
        "save_16bit_model always saves whole weights",
    ),
    idle("stage3_module_granularity_threshold", kinds.NATURAL, "units are found in the model"),
    idle("leaf_module", kinds.ANY, "units are found in the model"),
    idle("parameter_alignment", kinds.FLAG, "every parameter is aligned"),
    idle("compute_grad_norm", kinds.FLAG, "the norm costs no pass over the gradients, and is always known"),
    idle("ignore_unused_parameters", kinds.FLAG, "a parameter without a gradient takes no step"),
    idle("legacy_stage1 mics_hierarchical_params_gather", kinds.FLAG, _EQUAL_PARTS),
    idle("zero_hpz_partition_size", kinds.COUNT, _EQUAL_PARTS),
    idle("mics_shard_size", kinds.INTEGER, _EQUAL_PARTS),
    idle("grad_hooks", kinds.FLAG, _LEAVE),
    idle("load_from_fp32_weights", kinds.FLAG, "checkpoints have the fp32 masters"),
    idle("elastic_checkpoint", kinds.FLAG, "checkpoints fit any budgets and paths"),
    idle("pipeline_loading_checkpoint", kinds.FLAG, "checkpoints are read in parts"),
    idle("memory_efficient_linear", kinds.FLAG, "weights are held once in any case"),
    idle("override_module_apply", kinds.FLAG, "parameters can be read and written at any time"),
    idle("log_trace_cache_warnings", kinds.FLAG, "the order of units is not traced"),
    idle("enable_sanity_checks", kinds.FLAG, "records have checksums in any case"),
    _missing(
        "zenflow",
        "it delays updates, which changes the result: leave it out",
        "topk_ratio select_strategy select_interval update_interval overlap_step offload auto_ratio "
        "full_warm_up_rounds pt_reserved_cores_perc",
        is_switched=False,
    ),
)

_PRECISION_OFF = "without fp16 or bf16 the weights keep the dtype that the model has"

FP16 = block(
    honoured("enabled", kinds.FLAG, f'precision="fp16"; {_PRECISION_OFF}'),
    idle("auto_cast", kinds.FLAG, "inputs of the dtype that the model had before are always cast"),
    idle("loss_scale min_loss_scale", kinds.NUMBER, _ADAPTS),
    idle("initial_scale_power", kinds.NATURAL, _ADAPTS),
    idle("loss_scale_window hysteresis", kinds.COUNT, _ADAPTS),
    idle("consecutive_hysteresis", kinds.FLAG, _ADAPTS),
    idle("fp16_master_weights_and_grads", kinds.FLAG, _MASTERS),
    idle("opt_level", kinds.TEXT, "it is of amp, which is not there"),
    is_switched=True,
)

BF16 = block(
    honoured("enabled", kinds.FLAG, f'precision="bf16"; {_PRECISION_OFF}'),
    honoured(
        "check_grad_overflow",
        kinds.FLAG,
        "true: a step with a gradient that is not finite is left out, false: it raises NonFiniteGradient",
    ),
    honoured("bf16_optimizer_states", kinds.FLAG, 'moments_dtype="bf16"'),
    idle("bf16_master_weights_and_grads", kinds.FLAG, _MASTERS),
    idle("immediate_grad_update", kinds.FLAG, _LEAVE),
    is_switched=True,
)

_PARAMS = honoured("params", kinds.DICT, "by its type: see the next table")

_SECTIONS = {
    "optimizer": block(
        honoured("type", kinds.TEXT, "optimizer: a name with a kernel, or the class of torch.optim"),
        _PARAMS,
        idle("legacy_fusion", kinds.FLAG, "updates are fused in any case"),
    ),
    "scheduler": block(
        honoured("type", kinds.TEXT, "a scheduler of torch with DeepSpeed's formula, or torch's own by name"), _PARAMS
    ),
    "fp16": FP16,
    "bf16": BF16,
    "bfloat16": BF16,
    "zero_optimization": ZERO,
    "aio": AIO,
    "data_types": block(
        idle("grad_accum_dtype", kinds.TEXT, "several gradients are added up in fp32"),
        idle("param_dtype", kinds.TEXT, "fp16 or bf16 say it"),
        idle("buffer_dtype", kinds.TEXT, "buffers keep the dtype that the model has"),
    ),
    "activation_checkpointing": block(
        idle(
            "partition_activations cpu_checkpointing contiguous_memory_optimization synchronize_checkpoint_boundary "
            "profile",
            kinds.FLAG,
            _CHECKPOINTING,
        ),
        idle("number_checkpoints", kinds.NATURAL, _CHECKPOINTING),
    ),
    "checkpoint": block(
        idle("tag_validation", kinds.TEXT, "a checkpoint has one name on all ranks"),
        refused("load_universal", kinds.FLAG, "no checkpoint of DeepSpeed is read: load the weights", False),
        idle("use_node_local_storage", kinds.FLAG, "checkpoints go where save_checkpoint says"),
        idle("parallel_write", kinds.DICT, "each rank writes its part"),
        idle("writer", kinds.ANY, "data go to the disk by direct I/O"),
        idle("checkpoint_serialization", kinds.FLAG, "nothing is pickled"),
    ),
    "compile": block(
        idle(
            "enabled backend kwargs deepcompile free_activation offload_activation offload_activation_pin_memory "
            "offload_opt_states offload_parameters double_buffer symmetric_memory debug_log sync_before_reduce "
            "sync_after_reduce sync_before_allgather sync_after_allgather keep_int_input_tensors "
            "keep_all_input_tensors passes",
            kinds.ANY,
            "compile the blocks of the model with torch.compile before initialize",
        )
    ),
    "tensor_parallel": block(
        refused("autotp_size", kinds.NATURAL, f"{_WHOLE_MODEL}: write 1, or leave it out", 0, 1),
        idle(
            "enabled dtype tp_size tp preset_model tp_overlap_comm partition_config tp_grain_size mpu tp_group module "
            "injection_policy_tuple keep_module_on_host replace_with_kernel_inject",
            kinds.ANY,
            _WHOLE_MODEL,
        ),
    ),
}

_FEATURES = block(
    _missing("amp", "write bf16 or fp16 instead", "enabled opt_level loss_scale"),
    _missing(
        "torch_autocast",
        "run the forward in torch.autocast yourself, or write bf16",
        "enabled dtype lower_precision_safe_modules",
    ),
    _missing(
        "expert_parallel",
        f"{_WHOLE_MODEL}: leave it out",
        "enabled autoep_size expert_tensor_parallel_size preset_model use_grouped_mm disable_triton_grouped_mm "
        "moe_layer_pattern router_pattern expert_pattern score_func score_apply route_norm route_scale top_k "
        "routed_scaling_factor num_expert_groups num_limited_groups load_balance_coeff expert_w1 expert_w2 "
        "expert_w3 num_experts_attr top_k_attr has_shared_experts shared_experts_pattern "
        "shared_experts_gate_pattern",
    ),
    _missing(
        "pipeline",
        f"{_WHOLE_MODEL}: leave it out",
        "stages partition seed_layers activation_checkpoint_interval pipe_partitioned grad_partitioned",
        is_switched=False,
    ),
    _missing(
        "elasticity",
        "the number of ranks stays what it is: leave it out",
        "enabled max_train_batch_size micro_batch_sizes min_gpus max_gpus min_time version prefer_larger_batch "
        "ignore_non_elastic_batch_info num_gpus_per_node model_parallel_size",
    ),
    _missing(
        "autotuning",
        "nothing here wants tuning: leave it out",
        "enabled results_dir exps_dir overwrite metric start_profile_step end_profile_step fast "
        "max_train_batch_size min_train_batch_size max_train_micro_batch_size_per_gpu "
        "min_train_micro_batch_size_per_gpu mp_size num_tuning_micro_batch_sizes tuner_type tuner_early_stopping "
        "tuner_num_trials arg_mappings model_info model_info_path metric_path",
    ),
    _ignored(
        "flops_profiler",
        _REPORT,
        "enabled profile_step module_depth top_modules detailed output_file recompute_fwd_factor",
    ),
    _ignored("tensorboard", _LOG, "enabled output_path job_name"),
    _ignored("csv_monitor", _LOG, "enabled output_path job_name"),
    _ignored("wandb", _LOG, "enabled group team project"),
    _ignored(
        "comet",
        _LOG,
        "enabled workspace project samples_log_interval experiment_name api_key experiment_key online mode",
    ),
    _ignored("comms_logger", _REPORT, "enabled verbose prof_all debug prof_ops"),
    _missing(
        "curriculum_learning",
        "choose the samples in the data loader",
        "enabled curriculum_type min_difficulty max_difficulty schedule_type schedule_config",
    ),
    _missing("data_efficiency", "choose the samples in the data loader", "enabled seed data_routing data_sampling"),
    _missing(
        "compression_training",
        "compress the model before or after the training",
        "layer_reduction weight_quantization activation_quantization sparse_pruning row_pruning head_pruning "
        "channel_pruning",
    ),
    _missing(
        "quantize_training",
        "compress the model before or after the training",
        "enabled quantize_bits quantize_type quantize_schedule quantize_groups fp16_mixed_quantize "
        "quantize_change_ratio quantize_verbose quantizer_kernel",
    ),
    _missing(
        "sparse_attention",
        "the model's attention is the model's: leave it out",
        "mode block different_layout_per_head num_local_blocks num_global_blocks attention "
        "horizontal_global_attention num_different_global_patterns num_random_blocks local_window_blocks "
        "global_block_indices global_block_end_indices num_sliding_window_blocks",
        is_switched=False,
    ),
    _missing("progressive_layer_drop", "drop layers in the model", "enabled theta gamma"),
    _missing(
        "eigenvalue",
        "it steers compression, which is not there",
        "enabled verbose max_iter tol stability gas_boundary_resolution layer_name layer_num",
    ),
    _missing(
        "hybrid_engine",
        "generate with the module; see docs/generation.md",
        "enabled max_out_tokens inference_tp_size release_inference_cache pin_parameters tp_gather_partition_size "
        "enable_cuda_graph",
    ),
).keys

TOP = block(
    honoured("train_batch_size", kinds.COUNT, "train_batch_size(); checked against the two below"),
    honoured("train_micro_batch_size_per_gpu", kinds.COUNT, "batches of the data loader that initialize makes"),
    honoured("gradient_accumulation_steps", kinds.COUNT),
    refused(
        "managed_gradient_accumulation", kinds.FLAG, "use set_gradient_accumulation_boundary, and leave it out", True
    ),
    honoured(
        "gradient_clipping", kinds.NUMBER, "gradient_clipping; 1.0 if it is absent, as in DeepSpeed; 0 turns it off"
    ),
    honoured("steps_per_print", kinds.WHOLE_OR_INF, "so often a line with step, rate and norm is printed"),
    honoured("wall_clock_breakdown", kinds.FLAG, "that line has seconds of the step and of waits, too"),
    idle("memory_breakdown", kinds.FLAG, _REPORT),
    idle("dump_state", kinds.FLAG, "offload config from-deepspeed shows what the file means"),
    _SECTIONS,
    honoured("offload_engine", kinds.OPTIONS, "not DeepSpeed's: options of OffloadConfig, which go before others"),
    honoured("dataloader_drop_last", kinds.FLAG, "drop_last of the data loader that initialize makes"),
    idle("zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", kinds.FLAG, "every optimizer of torch runs"),
    idle("prescale_gradients disable_allgather sparse_gradients", kinds.FLAG, _EXCHANGE),
    idle("gradient_predivide_factor", kinds.NUMBER, _EXCHANGE),
    idle("gradient_allreduce_op", kinds.choice("mean", "sum"), _EXCHANGE),
    idle("communication_data_type seq_parallel_communication_data_type", kinds.TEXT, _EXCHANGE),
    idle("graph_harvesting", kinds.FLAG, "graphs of a GPU are not recorded"),
    idle("use_data_before_expert_parallelism", kinds.FLAG, _WHOLE_MODEL),
    idle("log_level", kinds.TEXT, "the engine prints nothing by itself"),
    _FEATURES,
)
