"""Random configurations that cannot be: one clear line each, at once, before anything is allocated."""

import copy
import json
import random
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from offload import ConfigError
from offload.compat import deepspeed
from offload.compat.deepspeed import entry, kinds
from offload.compat.deepspeed.checking import all_keys
from offload.compat.deepspeed.keys import TOP, Key

NUM_CASES = 500
SEED = 7

GOOD = {
    "train_batch_size": 8, "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": 4,
    "gradient_clipping": 1.0, "steps_per_print": 10,
    "fp16": {"enabled": False, "loss_scale": 0, "initial_scale_power": 16}, "bf16": {"enabled": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": {"total_num_steps": 100, "warmup_num_steps": 10}},
    "zero_optimization": {
        "stage": 3, "overlap_comm": True, "reduce_bucket_size": 5e8, "sub_group_size": 1e9,
        "offload_param": {"device": "nvme", "nvme_path": "/nvme", "buffer_count": 5, "pin_memory": True},
        "offload_optimizer": {"device": "nvme", "nvme_path": "/nvme", "pipeline_read": True},
        "aio": {"block_size": 262144, "thread_count": 1},
    },
    "aio": {"queue_depth": 32},
    "activation_checkpointing": {"cpu_checkpointing": True},
    "tensorboard": {"enabled": True, "output_path": "x"},
    "checkpoint": {"tag_validation": "Warn"},
}  # fmt: skip

WRONG = [-1, -0.5, "x", "", " ", [], [1], {}, {"a": 1}, float("nan"), float("-inf"), True, 0.5, 1 << 70, None, object(),
         b"x", (1, 2, 3), 10**400]  # fmt: skip
REFUSED = {
    "amp": {"enabled": True}, "torch_autocast": {"enabled": True}, "elasticity": {"enabled": True},
    "tensor_parallel": {"autotp_size": 2}, "autotuning": {"enabled": True}, "sparse_attention": {"mode": "fixed"},
    "curriculum_learning": {"enabled": True}, "data_efficiency": {"enabled": True}, "eigenvalue": {"enabled": True},
    "progressive_layer_drop": {"enabled": True}, "hybrid_engine": {"enabled": True}, "pipeline": {"stages": 2},
    "compression_training": {"sparse_pruning": {"shared_parameters": {"enabled": True}}},
    "managed_gradient_accumulation": False, "expert_parallel": {"enabled": True},
    "quantize_training": {"enabled": True},
}  # fmt: skip

Broken = tuple[Any, str]
"""A configuration, and what its error has to name."""


def blocks(config: dict, path: str = "") -> list[tuple[dict, str]]:
    """All objects in the configuration, with their paths."""
    found = [(config, path)]
    for name, value in config.items():
        if isinstance(value, dict):
            found += blocks(value, f"{path}.{name}" if path else name)
    return found


def mistype(draw: random.Random, config: dict) -> Broken:
    """A name with one letter too many, too few or of another kind, at any level."""
    block, _ = draw.choice(blocks(config))
    name = draw.choice(list(block))
    at = draw.randrange(len(name))
    letter = draw.choice("xqzj")
    broken = draw.choice(
        [name[:at] + name[at + 1 :], name[:at] + letter + name[at:], name[:at] + letter + name[at + 1 :]]
    )
    block[broken] = block.pop(name)
    return config, repr(broken)


def invent(draw: random.Random, config: dict) -> Broken:
    """A name that nobody knows, or that is no text."""
    block, _ = draw.choice(blocks(config))
    name = draw.choice(["warp", "nvme", "zz", "offload", 5, ("a",), "", "two\nlines", "x" * 5000])
    block[name] = 1
    return config, "unknown key"


def misvalue(draw: random.Random, config: dict) -> Broken:
    """A value that the key does not take."""
    specs = {key: spec for key, spec in all_keys(TOP) if isinstance(spec, Key) and spec.kind is not kinds.ANY}
    key = draw.choice(sorted(specs))
    refused = [value for value in WRONG if value is not None and not _takes(specs[key], key, value)]
    *path, name = key.split(".")
    block = config
    for part in path:
        block = block.setdefault(part, {})
    block[name] = draw.choice(refused)
    if path and path[0] in ("fp16", "bf16", "bfloat16") and name != "enabled":
        config[path[0]].setdefault("enabled", False)
    return config, key


def _takes(spec: Key, key: str, value: object) -> bool:
    try:
        spec.kind.check(key, value)
    except ConfigError:
        return False
    return True


def no_object(draw: random.Random, config: dict) -> Broken:
    """Something else in the place of a block."""
    name = draw.choice([name for name, value in config.items() if isinstance(value, dict)])
    config[name] = draw.choice([3, "x", [1], 0.5])
    return config, name


def contradict(draw: random.Random, config: dict) -> Broken:
    """Numbers or blocks that do not go together."""
    kind = draw.randrange(4)
    if kind == 0:
        config["gradient_accumulation_steps"] = draw.choice([1, 2, 3, 5, 64])
        return config, "train_batch_size"
    if kind == 1:
        config["fp16"]["enabled"] = True
        return config, "fp16.enabled and bf16.enabled"
    if kind == 2:
        del config["zero_optimization"][draw.choice(["offload_param", "offload_optimizer"])]["nvme_path"]
        return config, "nvme_path"
    del config["train_batch_size"], config["train_micro_batch_size_per_gpu"]
    return config, "train_batch_size"


def ask_for_more(draw: random.Random, config: dict) -> Broken:
    """A part of DeepSpeed that is not there."""
    name = draw.choice(sorted(REFUSED))
    config[name] = REFUSED[name]
    return config, name


def other_types(draw: random.Random, config: dict) -> Broken:
    """An optimizer or a scheduler that is not there, or with settings of another."""
    kind = draw.randrange(4)
    if kind == 0:
        config["optimizer"]["type"] = draw.choice(
            ["OneBitAdam", "ZeroOneAdam", "OneBitLamb", "Lamb", "Muon", "Adan", "sdg"]
        )
        return config, "optimizer.type"
    if kind == 1:
        config["scheduler"]["type"] = draw.choice(["WarmupLr", "Linear", "OneCycleLR2", "CosineWarmup", "LRScheduler2"])
        return config, "scheduler.type"
    if kind == 2:
        config["optimizer"]["params"][draw.choice(["momentum", "nesterov", "learning_rate"])] = 1
        return config, "optimizer.params"
    config["scheduler"]["type"] = draw.choice(["OneCycle", "LRRangeTest", "StepLR"])
    return config, "scheduler.params"


def no_file(draw: random.Random, config: dict) -> Broken:
    """A path or a text that holds no configuration."""
    text = json.dumps(config)
    cut = draw.randrange(1, len(text))
    return draw.choice([
        (text[:cut], "config"), ("/no/such/ds.json", "/no/such/ds.json"), (Path("/"), "/"), (5, "config"),
        ([config], "config"), ('{"stage": 1, "stage": 2}', "given twice"), (b"{}", "config"), ("x" * 5000, "x"),
        ("\0", "config"), ("{" * 20000, "config"),
    ])  # fmt: skip


BREAK: list[Callable[[random.Random, dict], Broken]] = [
    mistype, invent, misvalue, misvalue, no_object, contradict, ask_for_more, other_types, no_file,
]  # fmt: skip


def test_each_of_many_malformed_configurations_is_one_clear_line_at_once(monkeypatch: pytest.MonkeyPatch):
    def allocate(*_: object, **__: object) -> None:
        raise AssertionError("something was to be allocated")

    monkeypatch.setattr(entry, "OffloadEngine", allocate)
    model, draw, messages = nn.Linear(2, 2), random.Random(SEED), set()
    for case in range(NUM_CASES):
        broken, named = BREAK[case % len(BREAK)](draw, copy.deepcopy(GOOD))
        began = time.process_time()
        with pytest.raises(ConfigError) as refused:
            deepspeed.initialize(model=model, config=broken)
        message = str(refused.value)
        assert time.process_time() - began < 1, (case, message)
        assert "\n" not in message and 15 < len(message) < 400, (case, message)
        assert named in message, (case, named, message)
        messages.add(re.sub(r"\d+", "N", message))
    assert len(messages) > NUM_CASES / 3


def test_what_they_were_made_of_is_in_order():
    assert deepspeed.translate(GOOD).options["nvme_path"] == ["/nvme"]
