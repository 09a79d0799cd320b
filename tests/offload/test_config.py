"""What a user writes for an option: taken as it was meant, or refused in one line that says what to write."""

import dataclasses
import inspect
import pickle
import re
import typing
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch
from tiny import Tiny
from torch import nn

import offload
from offload import ConfigError, OffloadConfig, OffloadEngine, OffloadError, StoreUnsafe
from offload import errors as engine_errors
from offload.option_names import Options
from offload.planning import check_paths
from offload.testing.simulated import SimulatedDevice
from swapper import errors as store_errors
from swapper import paths as swapper_paths


def refusal(config: object = None, **options: object) -> str:
    """The one line of the error; a second one may say what to do."""
    with pytest.raises(ConfigError) as caught:
        OffloadConfig.of(config, options)  # type: ignore[arg-type]
    (what,) = caught.value.args
    assert "\n" not in what and len(what) < 450, what
    return str(caught.value)


def test_the_engines_signature_and_its_types_have_every_option_as_the_config_has_it() -> None:
    fields = {field.name: field for field in dataclasses.fields(OffloadConfig)}
    assert typing.get_type_hints(Options) == typing.get_type_hints(OffloadConfig)
    shown = inspect.signature(OffloadEngine).parameters
    assert list(shown) == ["model", "config", *fields]
    assert all(shown[name].default == getattr(OffloadConfig(), name) for name in fields)
    loading = inspect.signature(OffloadEngine.from_pretrained).parameters
    assert set(fields) - set(loading) == {"weights"}


# Something else than options.


@pytest.mark.parametrize(
    ("given", "instead"),
    [
        ("/mnt/nvme", "write OffloadEngine(model, nvme_path='/mnt/nvme')"),
        (Path("/mnt/nvme"), "write OffloadEngine(model, nvme_path='/mnt/nvme')"),
        (["/a", "/b"], "write OffloadEngine(model, nvme_path=['/a', '/b'])"),
        ({"lr": 1e-3}, "write OffloadEngine(model, **options)"),
        ("cuda:1", "write OffloadEngine(model, device='cuda:1')"),
        (torch.device("cpu"), "write OffloadEngine(model, device='cpu')"),
        (torch.optim.AdamW([torch.zeros(1)]), "write OffloadEngine(model, optimizer=...)"),
        ("ds_config.json", "no files are read"),
        (12, "options have names"),
        (OffloadConfig, "options have names"),
    ],
)
def test_what_is_no_config_is_refused_with_what_to_write(given: object, instead: str):
    assert instead in refusal(given)
    model = Tiny()
    with pytest.raises(ConfigError, match="config: expected an OffloadConfig"):
        OffloadEngine(model, given)  # type: ignore[arg-type]
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())


def test_a_configuration_of_deepspeed_is_translated():
    said = refusal(
        {
            "train_batch_size": 16,
            "gradient_accumulation_steps": 4,
            "gradient_clipping": 1.0,
            "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}},
            "fp16": {"enabled": False},
            "bf16": {"enabled": True},
            "zero_optimization": {"stage": 3, "offload_param": {"device": "nvme", "nvme_path": "/local_nvme"}},
            "steps_per_print": 10,
        }
    )
    for part in (
        "looks like DeepSpeed's",
        "gradient_accumulation_steps -> gradient_accumulation_steps",
        "gradient_clipping -> gradient_clipping",
        "optimizer -> optimizer, lr, betas, eps, weight_decay",
        'bf16 -> precision="bf16"',
        "zero_optimization -> nvme_path and host_memory",
        "leave out train_batch_size, steps_per_print",
    ):
        assert part in said
    assert "fp16" not in said


def test_options_without_names_and_what_is_no_model_are_refused():
    with pytest.raises(ConfigError, match="options have names: OffloadConfig"):
        OffloadConfig("/mnt/nvme")  # type: ignore[misc]
    with pytest.raises(ConfigError, match=r"model: expected a torch\.nn\.Module"):
        OffloadEngine("gpt2")  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"0\.weight has no shape yet"):
        OffloadEngine(nn.Sequential(nn.LazyLinear(4)))


# Names.


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        ("max_grad_norm", "here it is gradient_clipping"),
        ("clip_grad_norm", "here it is gradient_clipping"),
        ("learning_rate", "here it is lr"),
        ("torch_dtype", "here it is precision"),
        ("mixed_precision", "here it is precision"),
        ("amp", "here it is precision"),
        ("fp16", 'here it is precision="fp16"'),
        ("adam_beta2", "here it is betas"),
        ("adam_epsilon", "here it is eps"),
        ("zero_stage", "here it is nvme_path and host_memory"),
        ("offload_optimizer", "here it is nvme_path and host_memory"),
        ("cpu_offload", "here it is nvme_path and host_memory"),
        ("offload_folder", "here it is nvme_path"),
        ("accumulate_grad_batches", "here it is gradient_accumulation_steps"),
        ("max_memory", "here it is host_memory and device_memory"),
        ("lr_scheduler", "a scheduler of torch on engine.optimizer"),
        ("world_size", "leave it out, torchrun says it"),
        ("num_workers", "leave it out, your data loader says it"),
        ("prefetch_factor", "leave it out"),
        ("momentum", "write optimizer_options={'momentum': 1}"),
        ("amsgrad", "write optimizer_options={'amsgrad': 1}"),
        ("maximize", "write optimizer_options={'maximize': 1}"),
        ("hostmemory", "did you mean 'host_memory'?"),
        ("LR", "did you mean 'lr'?"),
        ("nvme-path", "did you mean 'nvme_path'?"),
        ("prefetch_bucket_size", "did you mean 'prefetch'?"),
        ("flux", "known are: nvme_path, device"),
    ],
)
def test_a_name_that_we_do_not_have_is_translated(name: str, hint: str):
    assert f"unknown option {name!r}" in refusal(**{name: 1}) and hint in refusal(**{name: 1})
    assert refusal(OffloadConfig(), **{name: 1}) == refusal(**{name: 1})
    with pytest.raises(ConfigError, match=f"unknown option '{name}'"):
        OffloadConfig(**{name: 1})  # type: ignore[arg-type]


def test_several_unknown_names_are_one_error():
    said = refusal(learning_rate=1, fp16=True, stage=3, world_size=2, rank=0)
    assert [name in said for name in ("learning_rate", "fp16", "stage")] == [True] * 3 and said.endswith("and 2 more")


def test_an_option_of_the_optimizer_that_was_given_is_known():
    class Own(torch.optim.SGD):
        def __init__(self, params: object, warmth: float = 1.0) -> None:
            super().__init__(params)  # type: ignore[arg-type]

    assert "write optimizer_options={'warmth': 2}" in refusal(optimizer=Own, warmth=2)


# Values.


@pytest.mark.parametrize(
    ("option", "value", "said"),
    [
        ("nvme_path", 5, "expected a directory, or a list of some, got 5"),
        ("nvme_path", b"x", "got b'x'"),
        ("nvme_path", [5], "got [5]"),
        ("nvme_path", "", "got ''"),
        ("nvme_path", ["/tmp", ""], "got ['/tmp', '']"),
        ("nvme_path", {"/tmp"}, "got {'/tmp'}"),
        ("nvme_path", None, "got None"),
        ("nvme_path", "a\0b", r"got 'a\x00b'"),
        ("nvme_path", "~nobody-of-this-name/x", "the home at the start of '~nobody-of-this-name/x' is not known"),
        ("device", 7.5, 'expected "cpu" or "cuda" ("cuda:1" is the second GPU), got 7.5'),
        ("device", "gpu", "got 'gpu'"),
        ("device", "cuda:300", "got 'cuda:300'"),
        ("device", SimulatedDevice, "SimulatedDevice"),
        ("host_memory", 1.5, 'expected bytes such as 1073741824, "12GiB" or "auto", got 1.5'),
        ("host_memory", "12 GiBB", "got '12 GiBB'"),
        ("host_memory", -1, "expected a number of bytes from 0 to 2^63, got -1"),
        ("host_memory", True, "got True"),
        ("device_memory", None, "got None"),
        ("tile_bytes", 4096, "expected at least 65536 bytes, got 4096"),
        ("precision", "bfloat16", "got 'bfloat16', did you mean 'bf16'?"),
        ("precision", "float32", "did you mean 'fp32'?"),
        ("precision", "FP16", "did you mean 'fp16'?"),
        ("precision", torch.bfloat16, "got torch.bfloat16, did you mean 'bf16'?"),
        ("precision", np.float32, "did you mean 'fp32'?"),
        ("precision", 16, "got 16, did you mean 'fp16'?"),
        ("precision", ["bf16"], "got ['bf16']"),
        ("moments_dtype", torch.float32, "got torch.float32, did you mean 'fp32'?"),
        ("optimizer", "AdamW", "got 'AdamW', did you mean 'adamw'?"),
        ("optimizer", "rmsprop", "did you mean torch.optim.RMSprop?"),
        ("optimizer", "adamw_torch", "did you mean 'adamw'?"),
        ("optimizer", nn.Linear, "Linear is not a torch.optim.Optimizer"),
        ("optimizer", 3, "a torch.optim.Optimizer (class or built), or None, got 3"),
        ("lr", float("nan"), "expected a finite number >= 0, got nan"),
        ("lr", float("inf"), "got inf"),
        ("lr", 10**400, "expected a finite number"),
        ("lr", "1e-3", "got '1e-3'"),
        ("lr", torch.tensor(1e-3), "got tensor(0.0010)"),
        ("eps", True, "got True"),
        ("betas", 0.9, "expected two numbers from 0 to less than 1, such as (0.9, 0.999), got 0.9"),
        ("betas", "ab", "got 'ab'"),
        ("betas", (0.9, float("nan")), "got (0.9, nan)"),
        ("optimizer_options", 3, 'expected a dict of options by name, such as {"momentum": 0.9}, got 3'),
        ("optimizer_options", {1: 2}, "got {1: 2}"),
        ("gradient_clipping", None, "expected a finite number >= 0, got None"),
        ("gradient_accumulation_steps", True, "expected a whole number >= 1, got True"),
        ("gradient_accumulation_steps", 2.5, "got 2.5"),
        (
            "gradient_accumulation_steps",
            10**20,
            "expected a whole number from 1 to 1,048,576, got 100000000000000000000",
        ),
        ("io_backend", "uring", "did you mean 'io_uring'?"),
        ("prefetch", "no", "expected True or False, got 'no'"),
    ],
)
def test_a_value_that_cannot_work_is_named_with_what_is_expected(option: str, value: object, said: str):
    message = refusal(**{option: value})
    assert message.startswith(f"{option}: ") and said in message


def test_a_value_that_cannot_be_shown_is_named_by_its_type():
    class Broken:
        def __repr__(self) -> str:
            raise ValueError("never")

    assert "Broken" in refusal(lr=Broken())
    assert len(refusal(lr="x" * 10_000)) < 200


def test_a_setting_that_is_given_twice_is_refused():
    assert "lr is given twice" in refusal(lr=1e-3, optimizer_options={"lr": 1e-2})


def test_numbers_of_numpy_are_numbers():
    config = OffloadConfig(
        lr=np.float32(0.5),
        eps=np.float64(1e-8),
        betas=[np.float32(0.5), np.float64(0.25)],  # type: ignore[arg-type]
        weight_decay=np.int64(0),
        gradient_accumulation_steps=np.int64(4),  # type: ignore[arg-type]
        host_memory=np.int64(1 << 30),  # type: ignore[arg-type]
    )
    taken = (config.lr, config.eps, config.betas, config.weight_decay, config.gradient_accumulation_steps)
    assert taken == (0.5, 1e-8, (0.5, 0.25), 0.0, 4) and config.host_memory == 1 << 30
    assert {type(number) for number in (*taken[:2], *(config.betas or ()), taken[3])} == {float}
    assert type(config.gradient_accumulation_steps) is type(config.host_memory) is int


def test_what_is_written_in_another_way_is_taken_as_it_is_meant(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("HOME", "/home/someone")
    assert OffloadConfig(nvme_path="~/swap").paths == (Path("/home/someone/swap"),)
    assert OffloadConfig(nvme_path=["/a", Path("/b")]).paths == (Path("/a"), Path("/b"))
    assert OffloadConfig(host_memory="1.5 GiB").host_memory == 3 << 29
    assert OffloadConfig(device=torch.device("cuda:1")).device == torch.device("cuda:1")
    for config in (OffloadConfig(lr=1e-3, nvme_path="/a"), OffloadConfig(optimizer_options={"amsgrad": True})):
        assert (
            pickle.loads(pickle.dumps(config)) == dataclasses.replace(config) == OffloadConfig.of(config, {}) == config
        )


# Precision.


def model_of(*dtypes: torch.dtype, device: str = "cpu") -> nn.Module:
    return nn.ModuleList(nn.Linear(2 + index, 10, dtype=dtype, device=device) for index, dtype in enumerate(dtypes))


@pytest.mark.parametrize(
    ("dtypes", "precision"),
    [
        ((torch.float32,), "fp32"),
        ((torch.bfloat16,), "bf16"),
        ((torch.float16,), "fp16"),
        ((), "fp32"),
    ],
)
def test_auto_is_the_dtype_of_the_model_and_says_nothing(dtypes: tuple[torch.dtype, ...], precision: str):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert OffloadConfig().of_model(model_of(*dtypes)).precision == precision


@pytest.mark.parametrize(
    ("precision", "dtypes", "said"),
    [
        (
            "bf16",
            (torch.float32,),
            "precision='bf16': 30 parameters are torch.float32, and become torch.bfloat16 (what is trained keeps an "
            "fp32 master); precision='fp32' keeps them",
        ),
        (
            "fp32",
            (torch.bfloat16,),
            "precision='fp32': 30 parameters are torch.bfloat16, and become torch.float32; precision='bf16' keeps them",
        ),
        (
            "auto",
            (torch.float32, torch.bfloat16),
            "precision='bf16': 30 parameters are torch.float32, and become torch.bfloat16 (what is trained keeps an "
            "fp32 master); precision='fp32' keeps them",
        ),
        (
            "auto",
            (torch.bfloat16, torch.float32),
            "precision='fp32': 30 parameters are torch.bfloat16, and become torch.float32",
        ),
        ("fp32", (torch.float64,), "precision='fp32': 30 parameters are torch.float64, and become torch.float32"),
    ],
)
def test_parameters_that_get_another_dtype_are_told_of_once(precision, dtypes, said):
    with pytest.warns(UserWarning) as caught:
        OffloadConfig(precision=precision).of_model(model_of(*dtypes))
    assert [str(item.message) for item in caught] == [said]


def test_a_model_without_values_is_not_converted():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert OffloadConfig(precision="bf16").of_model(model_of(torch.float32, device="meta")).precision == "bf16"


@pytest.mark.parametrize("dtypes", [(torch.float64,), (torch.float32, torch.float64)])
def test_a_float64_parameter_is_narrowed_only_when_that_is_asked_for(dtypes):
    with pytest.raises(ConfigError, match=r'parameter \w+.* is torch\.float64.*precision="fp32"'):
        OffloadConfig().of_model(model_of(*dtypes))


def test_a_dtype_in_which_nothing_is_trained_is_not_guessed_around():
    model = nn.Module()
    model.weight = nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn), requires_grad=False)
    with pytest.raises(ConfigError, match=r'"auto" finds torch\.float8_e4m3fn'):
        OffloadConfig().of_model(model)


def test_a_precision_that_is_not_resolved_has_no_dtype():
    with pytest.raises(RuntimeError, match="of_model"):
        _ = OffloadConfig().dtype


# Directories.


def test_a_wrong_path_is_refused_though_everything_fits_into_memory(make_model, tmp_path: Path):
    model = make_model()
    for path in (tmp_path / "missing", [tmp_path, tmp_path / "missing"]):
        with pytest.raises(StoreUnsafe, match=r"nvme_path: \S+missing does not exist"):
            OffloadEngine(model, nvme_path=path, host_memory="1GiB")
    assert all(type(parameter) is nn.Parameter for parameter in model.parameters())
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_is_given_twice_is_refused(tmp_path: Path):
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    for second in ("real", "link", "link/../real"):
        with pytest.raises(ConfigError, match=f"nvme_path: .*{re.escape(second)} is the same directory as .*real"):
            check_paths([tmp_path / "real", tmp_path / second])
    with pytest.raises(StoreUnsafe):
        check_paths([tmp_path / "real", tmp_path / "real" / ".." / "missing"])
    check_paths([tmp_path / "real", tmp_path])


def test_a_directory_in_memory_is_told_of_once_and_one_on_a_network_is_refused(tmp_path: Path, monkeypatch):
    (tmp_path / "other").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(swapper_paths, "file_system", lambda path: "tmpfs" if path == tmp_path else "ext4")
        with pytest.warns(UserWarning, match=r"is on tmpfs: .* host_memory does not count it") as caught:
            check_paths([tmp_path, tmp_path / "other"])
        assert len(caught) == 1
    monkeypatch.setattr(swapper_paths, "file_system", lambda _: "fuse.sshfs")
    with pytest.raises(StoreUnsafe, match=r"nvme_path: .* of type fuse\.sshfs, .* local disk"):
        check_paths([tmp_path])


def test_the_warning_names_the_line_that_makes_the_engine(make_model, tmp_path: Path, monkeypatch):
    monkeypatch.setattr(swapper_paths, "file_system", lambda _: "tmpfs")
    with pytest.warns(UserWarning, match="host_memory does not count it") as caught:
        OffloadEngine(make_model(), nvme_path=tmp_path).close()
    assert [Path(item.filename).name for item in caught] == [Path(__file__).name]
    with pytest.warns(UserWarning, match="precision='bf16'") as caught:
        OffloadEngine(make_model(), precision="bf16").close()
    assert [Path(item.filename).name for item in caught] == [Path(__file__).name]


# Errors.


def test_every_error_that_a_user_can_meet_is_public():
    kinds = {
        name
        for module in (engine_errors, store_errors)
        for name, kind in vars(module).items()
        if isinstance(kind, type) and issubclass(kind, OffloadError)
    }
    assert kinds <= set(offload.__all__)
    for name in offload.__all__:
        assert getattr(offload, name).__name__ == name
