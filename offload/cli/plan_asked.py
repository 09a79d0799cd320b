"""Options of ``offload plan`` as values, read before anything heavy is imported: a mistake is told at once."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from offload.predict.machine import Drive
    from offload.predict.variants import Base, Lora


class Asked:
    """The options of a question. ``given`` has the options as they were typed; what has a unit is a number here."""

    def __init__(self, given: Mapping[str, Any]) -> None:
        """Raises ``BadParameter`` for options that contradict each other, ``ConfigError`` for what is no number, or
        no model."""
        _refuse_contradictions(given)
        from offload.predict import gpus, known, rates, variants
        from offload.predict.machine import parse_drive

        def optional(name: str, parse: Any) -> Any:
            text = given[name]
            return None if text is None else parse(f"--{name.replace('_', '-')}", text)

        self.given = given
        self.model: str | None = given["model"]
        _check_files(given)
        self.known = None if self.model is None else known.config_of(self.model)
        if self.model is not None:
            _check_model(self.model, is_known=self.known is not None)
        self.parameters: int | None = optional("parameters", rates.count)
        self.tokens: int | None = optional("tokens", rates.count)
        self.lora: Lora | None = None if given["lora"] is None else variants.Lora.parse(given["lora"])
        self.base: Base = variants.BASES[given["base"]] if given["base"] else variants.AS_WEIGHTS
        self.gpu: str | None = given["gpu"]
        if self.gpu not in (None, "cpu"):
            self.gpu = gpus.find_gpu(str(self.gpu)).name
        self.compute: float | None = optional("compute", rates.flops_per_second)
        host, device = given["host_memory"], given["device_memory"]
        self.host_bytes = None if host in ("auto", "least") else rates.nbytes("--host-memory", host)
        self.takes_least = host == "least"
        self.device_bytes = None if device == "auto" else rates.nbytes("--device-memory", device)
        kept = given["activation_memory"]
        self.activation_memory = None if kept == "auto" else rates.nbytes("--activation-memory", kept)
        self.drives: list[Drive] = [parse_drive(text) for text in given["nvme"] or ()]
        self.paths = [path.expanduser() for path in given["nvme_path"] or ()]
        self.sustained_write: float | None = optional("sustained_write", rates.bytes_per_second)
        self.memory_bandwidth: float | None = optional("memory_bandwidth", rates.bytes_per_second)
        self.network = rates.network_bytes_per_second("--network", given["network"])
        self.rated_bytes = rates.nbytes("--endurance", given["endurance"])


def _check_files(given: Mapping[str, Any]) -> None:
    """Raises ``BadParameter`` for a file that could not be written when the answer is there."""
    for option, ends in (("plot", (".svg", ".png")), ("write", (".json",))):
        path: Path | None = given[option]
        if path is None:
            continue
        if path.suffix not in ends:
            raise typer.BadParameter(
                f"expected a name that ends in {' or '.join(ends)}, got {path}", param_hint=f"--{option}"
            )
        if path.is_dir() or not os.access(path.parent, os.W_OK):
            raise typer.BadParameter(
                f"{path} cannot be written: give a file in a folder that you may write to", param_hint=f"--{option}"
            )


def _check_model(name: str, *, is_known: bool) -> None:
    """Raises ``ConfigError`` for what names no model."""
    from offload.errors import ConfigError
    from offload.predict import known

    path = Path(name).expanduser()
    if is_known or path.exists() or ":" in name:
        return
    if name.startswith((".", "/", "~")) or name.endswith(".json"):
        raise ConfigError(f"{name}: there is no such file or directory")
    near = known.nearest(name)
    meant = f" Did you mean {', '.join(near)}?" if near else ""
    raise ConfigError(
        f"{name} is no file, no folder, no MODULE:FACTORY, and none of the {len(known.configs())} models that are "
        f"known by name.{meant} For any other model of the hub download its config.json, and give its path"
    )


def _refuse_contradictions(given: Mapping[str, Any]) -> None:
    """Raises ``BadParameter`` for options that need others, or have no meaning with them."""
    described = given["gpu"] not in (None, "cpu")
    if (given["model"] is None) == (given["parameters"] is None):
        raise typer.BadParameter("give a MODEL or --parameters, one of the two")
    if given["model"] is not None and (given["layers"] or given["width"]):
        raise typer.BadParameter("--layers and --width describe a model of --parameters: MODEL has its own")
    if described and given["nvme_path"]:
        raise typer.BadParameter("--nvme-path is of this machine, and --gpu describes another: give --nvme")
    if not described and (given["gpus"], given["nodes"]) != (1, 1):
        raise typer.BadParameter("--gpus and --nodes describe a machine with --gpu")
    if not described and given["device_memory"] != "auto":
        raise typer.BadParameter("--device-memory is of a machine with --gpu")
    if given["shard"] != "auto" and given["gpus"] * given["nodes"] == 1:
        raise typer.BadParameter("--shard is of several GPUs: give --gpus or --nodes")
    if given["exchange_dtype"] != "auto" and given["gpus"] * given["nodes"] == 1:
        raise typer.BadParameter("--exchange-dtype is of several GPUs: give --gpus or --nodes")
    if given["sustained_write"] is not None and not given["nvme"]:
        raise typer.BadParameter("--sustained-write is of drives that --nvme describes")
    if given["activations"] == "nvme" and not given["nvme"] and not given["nvme_path"]:
        raise typer.BadParameter("--activations nvme needs a drive: give --nvme or --nvme-path")
    if given["activation_memory"] != "auto" and given["activations"] not in ("host", "nvme"):
        raise typer.BadParameter("--activation-memory is of --activations host or nvme")
    if given["together"] and given["gradient_accumulation_steps"] == 1:
        raise typer.BadParameter("--together is of several micro-batches: give --gradient-accumulation-steps")
    quantised = given["base"] not in (None, "bf16")
    if quantised and given["lora"] is None and (given["model"] is None or ":" not in given["model"]):
        raise typer.BadParameter("--base is of frozen weights: give --lora, too")
    if quantised and given["gpus"] * given["nodes"] > 1:
        raise typer.BadParameter("--base of several GPUs: the engine keeps a quantised base on one")
    if given["tune"] and (given["model"] is None or given["gpu"] is not None or given["lora"] is not None):
        raise typer.BadParameter("--tune takes real steps: give a MODEL, and no --gpu and no --lora")
    if given["write"] is not None and not given["tune"]:
        raise typer.BadParameter("--write is where --tune writes its options")
