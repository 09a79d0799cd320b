#!/usr/bin/env python3
"""Random malformed configurations: each must end in one clear error, and leave nothing behind.

A configuration draws options with values that cannot work, unknown names, names of other libraries, or something else
in the place of an ``OffloadConfig``, among options that are in order. Whoever writes it must read one ``OffloadError``:
one line, not a long one, that names what was wrong. Another exception, a configuration that passes in silence, or a
file that is left in a directory, is a fault. Configurations in order are drawn, too: they must pass, or be refused for
what the options ask for together. Prints one message of each kind, for a human to read. Exit status 1: faults.
"""

from __future__ import annotations

import argparse
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from offload import OffloadConfig, OffloadEngine, OffloadError
from offload.foreign import _OURS, _REASONS

LINE_MAX = 400
NAMES = tuple(OffloadConfig.__dataclass_fields__)
CHOICES = {
    "precision": ("auto", "bf16", "fp16", "fp32"),
    "moments_dtype": ("fp32", "bf16", "int8"),
    "io_backend": ("auto", "io_uring", "threads", "portable"),
    "optimizer": ("adam", "adamw", "adagrad", "lion", "sgd"),
}


class Unshowable:
    def __repr__(self) -> str:
        raise RuntimeError("never")


class Own(torch.optim.SGD):
    """An optimizer that cannot be built."""

    def __init__(self, params: Any, warmth: float = 1.0) -> None:
        raise OSError("two\nlines")


def wrong_anywhere() -> list[Any]:
    """Values that no option takes."""
    return [
        b"x", [5], {1: 2}, {"a", 5}, (1, 2, 3), object(), Unshowable(), lambda: 1, len, int, nn.Linear, nn.Linear(2, 2),
        float("nan"), float("-inf"), -1, -0.5, 1 + 2j, -(10**5000), torch.tensor(0.5), torch.zeros(3), torch.int8,
        np.zeros(3), np.array(["a", "b"]), np.float32("nan"), np.int64(-3), np.bool_(True), Path("no such thing"),
        "no such thing", "x" * 1000, "two\nlines", "", " ", True, range(3), nn.Parameter(torch.ones(2)), ["a", 5], ...,
    ]  # fmt: skip


NUMBERS: list[Any] = [None, "1e-3", "auto", float("inf"), 10**400, False, {}, []]
BYTES: list[Any] = [None, 1.5, 16e9, "12 GiBB", "1.5.2GiB", "-1GiB", "12,5 GiB", "1e9", "AUTO", 2**63, "9999999TiB", {}]
COUNTS: list[Any] = [None, -1, 2.5, 4.0, "4", "auto", float("inf"), {}]
BAD: dict[str, list[Any]] = {
    "nvme_path": [None, 5, ["/tmp", ""], "~no-such-user/x", "a\0b", {"/tmp": 1}, "{file}", "{missing}", "{dangling}",
                  ["{folder}", "{folder}"], ["{folder}", "{link}"], ["{folder}", "{folder}/."], "/proc", "/sys/kernel"],
    "device": [None, 0, 7.5, "gpu", "cuda:300", "cuda:-1", "CPU", "mps", "meta", "tpu:0", torch.device("meta"), []],
    "device_memory": BYTES,
    "host_memory": BYTES,
    "nvme_capacity": BYTES,
    "tile_bytes": [*BYTES, 0, 4096, "4KiB"],
    "precision": [None, "bfloat16", "float32", "fp8", "BF16", "half", torch.bfloat16, np.float32, 16, "16-true"],
    "moments_dtype": [None, torch.float32, "fp16", "int4", "8bit", 8, "auto"],
    "master_dtype": [None, torch.float32, "fp16", "int8", 16, "auto", "none"],
    "activations": [None, 5, True, "Recompute", "disk", "cpu", ["keep"], {"blocks.*": "disk"}, {5: "keep"},
                    {"blocks.0": None}],
    "activation_memory": [*BYTES, "auto", 0, 4096],
    "experts": [None, 5, ["experts", 5], {"experts": 1}, nn.ModuleList],
    "optimizer": ["AdamW", "Adam", "SGD", "rmsprop", "adamw_torch", "lamb", "muon", [], {}, {"type": "AdamW"}, 3,
                  nn.Module, Own, torch.optim.Optimizer, torch.optim.AdamW([torch.zeros(3, requires_grad=True)])],
    "lr": [value for value in NUMBERS if value is not None],
    "eps": [value for value in NUMBERS if value is not None],
    "weight_decay": [value for value in NUMBERS if value is not None],
    "betas": [0.9, "ab", (0.9,), (0.9, 1.0), (0.9, None), (0.9, 0.9, 0.9), ("0.9", "0.999"), {0.9: 1, 0.99: 1}],
    "optimizer_options": [None, 3, "momentum=0.9", [("momentum", 0.9)], {"no_such": 1}, {"amsgrad": "yes"}, {"lr": -1},
                          {"betas": 0.9}, {"eps": "x"}, {"maximize": 2}, {"params": []}, {"weight_decay": "1"}],
    "gradient_clipping": NUMBERS,
    "gradient_accumulation_steps": [None, 0, 2.5, 4.0, "4", float("inf"), {}],
    "io_backend": [None, "uring", "io-uring", "libaio", "posix", "THREADS", 3],
    "mesh": [0, "dp", (2,), [[0, 1]], True],
    "shard": [None, 3, "zero3", "weight", True, ["weights"]],
    "exchange_dtype": [None, "fp32", "BF16", "", 16, []],
    "rank_timeout": [None, 0, 0.5, -1, "60", float("inf"), float("nan"), []],
    "prefetch": [None, 0, 1, "no", "True", "auto", []],
    "weights": [5, "", "{missing}", "{file}", "{folder}", ["model.safetensors"], "a\0b", {}],
    "run_dir": [5, "", "{file}", "a\0b", {}, ["{folder}"]],
    "durable": COUNTS,
    "keep_last": COUNTS,
    "keep_every": COUNTS,
}  # fmt: skip
GOOD: dict[str, list[Any]] = {
    "nvme_path": ["{folder}", Path("{folder}"), ["{folder}", "{other}"], "{link}", ()],
    "device": ["cpu", torch.device("cpu")],
    "device_memory": ["auto", "1GiB"],
    "host_memory": ["auto", "1GiB", 1 << 28, np.int64(1 << 29), "100 kb"],
    "nvme_capacity": ["auto", "1 GiB", "10KiB"],
    "tile_bytes": ["auto", 65536, "128KiB"],
    "activations": ["keep", "recompute", {"blocks.0": "recompute"}, {}],
    "activation_memory": [16 << 20, "64MiB", np.int64(8 << 20)],
    "experts": ["experts", ("experts", "Experts"), ()],
    **{name: list(choices) for name, choices in CHOICES.items()},
    "lr": [None, 0, 1e-3, np.float32(1e-3), 1],
    "eps": [None, 1e-8, np.float64(1e-6)],
    "weight_decay": [None, 0, 0.01],
    "betas": [None, (0.9, 0.999), [np.float32(0.9), 0.95]],
    "optimizer_options": [{}, {"amsgrad": True}, {"momentum": 0.9, "nesterov": True}],
    "gradient_clipping": [0, 1.0, np.float32(0.5)],
    "gradient_accumulation_steps": [1, 4, np.int64(2)],
    "mesh": [None],
    "shard": ["auto", "states", "gradients", "weights"],
    "exchange_dtype": ["auto", "bf16", "int8"],
    "master_dtype": ["fp32"],
    "rank_timeout": [1, 60.0, np.float64(5)],
    "prefetch": [True, False],
    "weights": [None],
    "run_dir": [None, "{folder}", Path("{folder}") / "run"],
    "durable": [0, 1, np.int64(5)],
    "keep_last": [0, 2],
    "keep_every": [0, 10],
}
CONFIGS: list[Any] = [
    "{folder}", Path("{folder}"), ["{folder}"], "cuda", torch.device("cpu"), {}, {"lr": 1e-3}, 5, b"x", OffloadConfig,
    "ds_config.json", Path("config.yaml"), torch.optim.AdamW, torch.optim.SGD([torch.zeros(3)]), nn.Linear(2, 2),
    object(), Unshowable(), (), {"train_batch_size": 8, "fp16": {"enabled": True}},
    {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}, "optimizer": {"type": "AdamW"}, "aio": {},
     "bf16": {"enabled": "auto"}, "gradient_clipping": "auto", "train_micro_batch_size_per_gpu": 1},
]  # fmt: skip


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))


@dataclass
class Case:
    """One configuration. ``wrong`` are the names of what is wrong in it: one of them must be in the message."""

    options: dict[str, Any] = field(default_factory=dict)
    config: Any = None
    wrong: list[str] = field(default_factory=list)


def draw(rng: random.Random) -> Case:
    """Some options that are in order, and mostly one to three things that are not."""
    case = Case({name: rng.choice(GOOD[name]) for name in rng.sample(NAMES, rng.choice((0, 0, 1, 2, 4)))})
    if case.options.keys() & {"nvme_capacity", "durable"} and not case.options.get("nvme_path"):
        case.options["nvme_path"] = "{folder}"
    draws: list[Callable[[Case, random.Random], None]] = [draw_value, draw_value, draw_value, draw_name]
    for add in rng.choices(draws, k=rng.choice((0, 1, 1, 1, 2, 3))):
        add(case, rng)
    if rng.random() < 0.1:
        case.config = rng.choice(CONFIGS)
        case.wrong.append("config")
    return case


def draw_value(case: Case, rng: random.Random) -> None:
    """An option with a value that cannot work: of a pool, or a good one that is written wrong."""
    name = rng.choice(NAMES)
    kind = rng.random()
    if kind < 0.3:
        value = rng.choice([item for item in wrong_anywhere() if not (name == "prefetch" and item is True)])
    elif kind < 0.5 and name in CHOICES:
        value = mutated(rng.choice(CHOICES[name]), CHOICES[name], rng)
    else:
        value = rng.choice(BAD[name])
    case.options[name] = value
    case.wrong.append(name)
    if name == "optimizer_options" and isinstance(value, dict):
        case.options["optimizer"] = rng.choice(CHOICES["optimizer"])
        case.wrong += [key for key in value if isinstance(key, str)]


def draw_name(case: Case, rng: random.Random) -> None:
    """A name that there is not: one of another library, or one of ours that is written wrong."""
    theirs = sorted((_OURS.keys() | _REASONS.keys() | {"momentum", "amsgrad", "fused", "flux", "d"}) - set(NAMES))
    name = rng.choice(theirs) if rng.random() < 0.6 else mutated(rng.choice(NAMES), NAMES, rng)
    case.options[name] = rng.choice((True, 1, 0.5, "x", None, {}, torch.bfloat16, Unshowable()))
    case.wrong.append(name)


def mutated(text: str, others: tuple[str, ...], rng: random.Random) -> str:
    """The text with a letter too many or too few, in other case, or the like."""
    at = rng.randrange(len(text))
    ways = (text.upper(), text.title(), text[:at] + text[at + 1 :], text[:at] + "x" + text[at:], text.replace("_", "-"))
    found = rng.choice(ways)
    return found if found not in others else f"{text}_"


class Folders:
    """A directory with all that paths in the pools stand for."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for name in ("folder", "other"):
            (root / name).mkdir()
        (root / "file").touch()
        (root / "link").symlink_to("folder")
        (root / "dangling").symlink_to("missing")
        self._before = self._content()

    def filled(self, value: Any) -> Any:
        """The value with real paths."""
        if isinstance(value, list):
            return [self.filled(item) for item in value]
        if isinstance(value, Path):
            return Path(self.filled(str(value)))
        return (
            re.sub(r"^\{(\w+)\}", lambda match: str(self.root / match[1]), value) if isinstance(value, str) else value
        )

    def are_untouched(self) -> bool:
        return self._content() == self._before

    def _content(self) -> list[str]:
        return sorted(str(path) for path in self.root.rglob("*"))


@dataclass
class Outcome:
    """What came of a configuration. ``fault`` is what is wrong with that, if anything is."""

    message: str
    fault: str | None = None


def outcome_of(case: Case, folders: Folders) -> Outcome:
    """Make the configuration, and where that passes an engine."""
    options = {name: folders.filled(value) for name, value in case.options.items()}
    config, model = folders.filled(case.config), Tiny()
    try:
        try:
            OffloadConfig.of(config, options)
        finally:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of precisions and of paths in memory: right, and no errors
                OffloadEngine(model, config, **options).close()
    except OffloadError as error:
        return Outcome(f"{type(error).__name__}: {error}", _fault_of_error(error, case, model, folders))
    except Exception as error:
        return Outcome(
            f"{type(error).__name__}: {str(error)[:200]}", f"{type(error).__name__} instead of an OffloadError"
        )
    if case.wrong:
        return Outcome("passed", "nothing was said")
    leaves = case.options.get("durable") or case.options.get("run_dir")  # a store to go on from, a record of the run
    untouched = folders.are_untouched() or bool(leaves)
    return Outcome("passed", None if untouched else "something was left behind")


def _fault_of_error(error: OffloadError, case: Case, model: nn.Module, folders: Folders) -> str | None:
    what = str(error.args[0])
    if "\n" in what or len(what) > LINE_MAX:
        return "more than one line" if "\n" in what else "too long"
    settings = case.options.get("optimizer_options")  # good ones may be another optimizer's
    names = [*(case.wrong or case.options), *(settings if isinstance(settings, dict) else ())]
    if not any(name in what for name in names):
        return f"none of {', '.join(names)} is named"
    if any(type(parameter) is not nn.Parameter for parameter in model.parameters()):
        return "the model was touched"
    return None if folders.are_untouched() else "something was left behind"


def run(seed: int, count: int) -> tuple[dict[str, list[str]], list[str]]:
    """The messages of ``count`` configurations, by what they have in common, and the faults."""
    messages: dict[str, list[str]] = {}
    faults = []
    for index in range(count):
        with tempfile.TemporaryDirectory(prefix="malformed-") as root:
            case = draw(random.Random(f"{seed} {index}"))
            outcome = outcome_of(case, Folders(Path(root)))
            message = outcome.message.replace(root, "TMP")
            messages.setdefault(re.sub(r"got .*?(?=$|, did you mean)", "got", message), []).append(message)
            if outcome.fault is not None:
                faults.append(f"case {index}: {outcome.fault}\n  wrong: {case.wrong}\n  said: {outcome.message}")
    return messages, faults


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--count", type=int, default=500)
    parser.add_argument("--quiet", action="store_true", help="print no messages")
    arguments = parser.parse_args()
    messages, faults = run(arguments.seed, arguments.count)
    if not arguments.quiet:
        for _, alike in sorted(messages.items()):
            print(f"{len(alike):5} x {alike[0]}")
    print(*faults, sep="\n", end="\n" * bool(faults))
    passed = len(messages.get("passed", ()))
    print(
        f"{arguments.count} configurations, seed {arguments.seed}: {passed} passed, {arguments.count - passed} refused "
        f"with {len(messages) - bool(passed)} kinds of messages; {len(faults)} faults"
    )
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
