"""Numbers as people write them, machines that are described, models from a count, a config or a factory."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from offload import ConfigError
from offload.predict import rates
from offload.predict.gpus import GPUS, find_gpu
from offload.predict.machine import (
    DESKTOP_MEMORY,
    HOP,
    LINK_SHARE,
    SERVER_MEMORY,
    UNKNOWN_CAPACITY,
    described,
    parse_drive,
)
from offload.predict.model import from_count, from_factory, from_hugging_face
from offload.predict.network import ALONE


@pytest.mark.parametrize(
    ("text", "rate"), [("7GB/s", 7e9), ("3.5 GiB/s", 3.5 * 2**30), ("400Gb/s", 50e9), ("500MB/s", 5e8)]
)
def test_a_rate_of_a_network_may_be_in_bytes_or_bits(text, rate):
    assert rates.network_bytes_per_second("--network", text) == pytest.approx(rate)


def test_a_rate_of_a_drive_is_in_bytes():
    assert rates.bytes_per_second("--nvme", "3.5 GiB/s") == 3.5 * 2**30
    with pytest.raises(ConfigError, match="got '7Gb/s', did you mean \"7GB/s\"\\?"):
        parse_drive("7Gb/s,5Gb/s,2TB")


@pytest.mark.parametrize("text", ["7", "7GB", "GB/s", "0GB/s", "1.2.3GB/s"])
def test_what_is_no_rate_is_refused_with_an_example(text):
    with pytest.raises(ConfigError, match="7GB/s"):
        rates.bytes_per_second("--nvme", text)


def test_counts_and_compute_rates():
    assert [rates.count("--parameters", text) for text in ("7e9", "7B", "1.5T", "350M")] == [
        7 * 10**9, 7 * 10**9, 15 * 10**11, 35 * 10**7,
    ]  # fmt: skip
    assert rates.flops_per_second("--compute", "400TFLOPS") == 4e14
    with pytest.raises(ConfigError, match="400TFLOPS"):
        rates.flops_per_second("--compute", "fast")
    with pytest.raises(ConfigError, match="7e9"):
        rates.count("--parameters", "many")


def test_a_rank_has_its_share_of_its_node():
    drives = [parse_drive("7GB/s,5GB/s,3.8TB"), parse_drive("3GB/s,1GB/s,2TB")]
    machine = described("h100", host_bytes=1 << 40, gpus=8, nodes=4, drives=drives)
    assert machine.num_ranks == 32 and machine.num_nodes == 4
    assert machine.host_bytes == (1 << 40) // 8 and machine.nvme_bytes == int(5.8e12) // 8
    assert machine.nvme is not None and machine.nvme.read == 10e9 / 8 and machine.nvme.write == 6e9 / 8
    network = machine.network
    assert (network.num_ranks, network.ranks_a_node, network.between) == (32, 8, 50e9)
    assert network.gather == network.exchange == LINK_SHARE * GPUS["h100"].peers
    assert network.wait_seconds == pytest.approx(31 * HOP) and not network.added_inside
    assert described("h100", host_bytes=1 << 40).network is ALONE
    assert any("several GPUs were never tried" in line for line in machine.assumptions)


def test_an_unknown_gpu_and_half_a_drive_are_refused():
    with pytest.raises(ConfigError, match="rtx4090"):
        described("h1000", host_bytes=1)
    with pytest.raises(ConfigError, match=r"3\.8TB"):
        parse_drive("7GB/s,5GB/s,3GB/s,2TB")


def test_a_drive_may_be_one_rate_or_two_and_its_capacity_unknown():
    one, two, whole = (parse_drive(text) for text in ("6GB/s", "7GB/s, 5GB/s", "7GB/s,5GB/s,3.8TB"))
    assert (one.read, one.write, one.nbytes) == (6e9, 6e9, UNKNOWN_CAPACITY)
    assert (two.read, two.write, two.nbytes) == (7e9, 5e9, UNKNOWN_CAPACITY)
    assert whole.nbytes == 3_800_000_000_000
    slow = described("4090", host_bytes=1 << 36, drives=[one], sustained_write=1.5e9)
    assert slow.nvme is not None and (slow.nvme.read, slow.nvme.write) == (6e9, 1.5e9)
    assert any("1.5 GB/s in the long run" in line for line in slow.assumptions)
    quick = described("4090", host_bytes=1 << 36, drives=[one])
    assert any("--sustained-write" in line for line in quick.assumptions)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("4090", "rtx4090"), ("RTX 4090", "rtx4090"), ("NVIDIA GeForce RTX 5090", "rtx5090"), ("H100", "h100"),
        ("AMD Instinct MI300X", "mi300x"), ("RTX PRO 6000", "rtx-pro-6000"), ("DGX Spark", "gb10"),
        ("Strix Halo", "strix-halo"),
    ],
)  # fmt: skip
def test_a_gpu_is_known_by_the_names_that_people_have_for_it(text: str, name: str):
    assert find_gpu(text).name == name


def test_what_a_node_has_depends_on_its_gpus():
    desktop, server = described("4090", host_bytes=1), described("h100", host_bytes=1)
    assert (desktop.update, server.update) == (DESKTOP_MEMORY, SERVER_MEMORY)
    assert desktop.cores.blocks == pytest.approx(0.9 * 165e12) and server.cores.blocks == pytest.approx(0.45 * 989e12)
    shared = described("gb10", host_bytes=48 * 10**9)
    assert shared.device.memory_bytes == 80 * 10**9  # one memory: what the host has the GPU lacks


@pytest.mark.parametrize(
    ("cores", "gpus", "expected"), [(None, 1, 200e9), (16, 1, 200e9), (4, 1, 90e9), (4, 2, 30e9), (1, 1, 30e9)]
)
def test_updates_get_what_cores_sweep_and_memory_carries(cores: int | None, gpus: int, expected: float):
    """A core of the CPU sees to each GPU, and each GPU's rank has its part of the others."""
    machine = described("h100", host_bytes=1, cores=cores, gpus=gpus)
    assert machine.update == expected and any("--cores" in line for line in machine.assumptions)


def test_a_number_of_bytes_has_its_unit():
    assert rates.nbytes("--host-memory", "1073741824") == 1 << 30
    with pytest.raises(ConfigError, match=r'such as "64GiB" or "3\.8TB", got \'64\''):
        rates.nbytes("--host-memory", "64")


@pytest.mark.parametrize("count", [20e6, 350e6, 1e9, 7e9, 70e9, 1e12])
def test_a_described_model_has_as_many_parameters_as_it_was_asked_for(count):
    model = from_count(int(count))
    assert model.num_parameters == pytest.approx(count, rel=2e-3)
    assert next(model.module.parameters()).is_meta


def test_layers_and_width_are_taken_and_a_contradiction_is_refused():
    assert from_count(10**8, 12, 704).num_parameters == pytest.approx(1e8, rel=1e-3)
    model = from_count(7 * 10**9, 32, 4096)
    assert (model.layers, model.width) == (32, 4096) and model.num_parameters == pytest.approx(7e9, rel=1e-3)
    with pytest.raises(ConfigError, match="too few for 200 layers of width 4,096"):
        from_count(7 * 10**9, 200, 4096)


def test_products_of_a_model_are_two_flop_a_weight_and_an_embedding_has_none():
    model = from_count(10**9)
    units = model.units(torch.bfloat16)
    forward = sum(model.flops(unit)[0] for unit in units)
    tables = model.vocabulary * model.width
    assert forward == pytest.approx(2 * (model.num_parameters - tables), rel=1e-3)
    for parameter in model.module.layers[0].parameters():
        parameter.requires_grad_(False)
    frozen = model.flops(next(unit for unit in model.units(torch.bfloat16) if unit.name == "layers.0"))
    assert frozen[0] > 0 and frozen[1] == 0


def test_a_config_of_hugging_face(tmp_path: Path):
    config = {
        "model_type": "llama", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 3,
        "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 500, "architectures": ["LlamaForCausalLM"],
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    for path in (tmp_path, tmp_path / "config.json"):
        model = from_hugging_face(path)
        assert (model.layers, model.width, model.attention_width, model.vocabulary) == (3, 64, 64, 500)
        assert next(model.module.parameters()).is_meta
    with pytest.raises(ConfigError, match="there is no such file or directory"):
        from_hugging_face(tmp_path / "nothing")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "none that there is"}))
    with pytest.raises(ConfigError, match="not a config of a model"):
        from_hugging_face(tmp_path)


def test_what_libraries_log_while_shapes_are_made_is_not_shown(tmp_path: Path):
    """A bert without a decoder: transformers says something of it, torchao and torch of kernels that they lack."""
    config = {
        "model_type": "bert", "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4,
        "intermediate_size": 128, "vocab_size": 1000,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    code = (
        "import logging, sys\nfrom pathlib import Path\nfrom offload.predict.model import from_hugging_face\n"
        "from_hugging_face(Path(sys.argv[1]))\nassert 'transformers' in sys.modules\n"
        "logging.getLogger('another').warning('heard')\n"
    )
    made = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, check=True, text=True)
    assert (made.stdout, made.stderr) == ("", "heard\n")


def test_only_the_experts_that_a_token_passes_compute(tmp_path: Path):
    config = {
        "model_type": "mixtral", "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
        "num_attention_heads": 4, "num_key_value_heads": 4, "vocab_size": 300, "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = from_hugging_face(tmp_path)
    flops = sum(model.flops(unit)[0] for unit in model.units(torch.float32))
    experts = 2 * 8 * 3 * 64 * 128
    others = model.num_parameters - experts - 300 * 64
    assert flops == pytest.approx(2 * (experts / 4 + others), rel=0.02)


def test_a_factory_is_built_without_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "planned_models.py").write_text(
        "from torch import nn\n"
        "def build():\n"
        "    return nn.Sequential(nn.Embedding(300, 32), *(nn.Sequential(nn.Linear(32, 32)) for _ in range(5)))\n"
        "number = 7\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    model = from_factory("planned_models:build")
    assert (model.layers, model.width, model.vocabulary) == (5, 32, 300)
    assert all(parameter.is_meta for parameter in model.module.parameters())
    with pytest.raises(ConfigError, match="no function"):
        from_factory("planned_models:number")
    with pytest.raises(ConfigError, match="no attribute 'missing'"):
        from_factory("planned_models:missing")
    sys.modules.pop("planned_models")


def test_a_factory_draws_no_random_number_for_its_shapes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "drawing_models.py").write_text(
        "import torch\n"
        "def build():\n"
        "    model = torch.nn.Linear(1 << 20, 1 << 20)\n"  # four terabytes
        "    torch.nn.init.trunc_normal_(model.weight)\n"
        "    model.table = torch.nn.Parameter(torch.randn(1 << 20, 1 << 20))\n"
        "    return model\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    before = torch.get_rng_state()
    model = from_factory("drawing_models:build")
    assert model.num_parameters == 2**41 + 2**20 and torch.equal(torch.get_rng_state(), before)
    sys.modules.pop("drawing_models")


def test_a_model_without_floats_is_refused():
    model = from_count(20 * 10**6)
    empty = type(model)("nothing", nn.Identity(), 1, 1, 1, 0)
    with pytest.raises(ConfigError, match="nothing to offload"):
        empty.units(torch.float32)
