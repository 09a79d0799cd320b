"""Answer of ``offload plan``: the model, the machine and the workload that were asked for, and what becomes of them."""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from offload.cli.console import show_answer, show_json, teller
from offload.cli.plan_asked import Asked
from offload.cli.plan_code import code
from offload.cli.plan_shown import shown
from offload.errors import BudgetError, ConfigError
from offload.memory import available_bytes
from offload.planning import AUTO_SHARE, check_paths
from offload.predict import facts
from offload.predict import model as models
from offload.predict.advice import advise, ways
from offload.predict.architecture import Architecture
from offload.predict.best_batches import best_batches
from offload.predict.endurance import Endurance
from offload.predict.gpus import find_gpu
from offload.predict.machine import Machine, described, nvme_of
from offload.predict.model import Model
from offload.predict.prediction import Batches, Prediction, least_host_bytes, predict
from offload.predict.workload import Workload
from offload.ranks.host_cores import host_cores

if TYPE_CHECKING:
    from offload.predict.tuning import Tuned


def planned(asked: Asked) -> int:
    """Print the forecast; returns the exit status."""
    given = asked.given
    model, workload = _model(asked), _workload(asked)
    machine = _machine(model, workload, asked)
    if workload.device_bytes is not None and workload.device_bytes > machine.device.memory_bytes:
        has = f"{machine.device.memory_bytes / 1e9:,.0f}GB"
        raise ConfigError(
            f"--device-memory: {given['device_memory']} is more than this GPU has, {has}: give less, or auto"
        )
    if asked.takes_least:
        machine = replace(machine, host_bytes=least_host_bytes(model, machine, workload))
    prediction = predict(model, machine, workload)
    wear = Endurance.of(prediction, asked.rated_bytes)
    answer = facts.facts_of(prediction, _least(prediction), advise(prediction), wear)
    answer["machine"]["host_memory_from"] = _source(asked)
    answer |= facts.of_batches(Batches.of(prediction))
    answer["best_batches"] = facts.of_best_batches(best_batches(prediction))
    answer["ways"] = facts.of_ways(ways(prediction)) if asked.lora is None else []
    answer["lora"], answer["base"] = asked.lora and str(asked.lora), asked.base.name or None
    answer |= facts.of_training(prediction, asked.tokens)
    if given["gradient_clipping"] and given["clipped"] is None:
        always = predict(model, machine, replace(workload, clipped=True))
        answer["seconds_if_clipped"] = always.seconds if always.fits else None
    answer["code"] = code(asked, prediction) if prediction.fits else None
    if given["plot"] is not None:
        from offload.predict.plot import plot as draw

        draw(prediction, given["over"], given["plot"])
        answer["plot"] = str(given["plot"])
    show_answer(answer, shown(answer), to_programs=given["json"])
    return 0


def _workload(asked: Asked) -> Workload:
    given = asked.given
    return Workload(
        batch=given["batch"],
        sequence=given["sequence"],
        micro_batches=given["gradient_accumulation_steps"],
        precision=given["precision"],
        moments_dtype=given["moments_dtype"],
        master_dtype=given["master_dtype"],
        optimizer=given["optimizer"],
        gradient_clipping=given["gradient_clipping"],
        clipped=given["clipped"] == "always",
        activations=given["activations"],
        activation_memory=asked.activation_memory,
        together=given["together"],
        loss_rows=given["loss_rows"],
        shard=given["shard"],
        exchange_dtype=given["exchange_dtype"],
        device_bytes=asked.device_bytes,
    )


def _model(asked: Asked) -> Model:
    found = _plain_model(asked)
    if asked.lora is not None:
        return found.with_adapters(asked.lora, asked.base)
    return replace(found, base=asked.base) if asked.base.bits else found


def _plain_model(asked: Asked) -> Model:
    name, given = asked.model, asked.given
    if name is None:
        assert asked.parameters is not None
        return models.from_count(asked.parameters, given["layers"], given["width"], given["vocabulary"])
    path = Path(name).expanduser()
    if asked.known is not None and not path.exists():
        shapes = Architecture.of_config(asked.known)
        assert shapes is not None
        return models.from_architecture(name, shapes)
    return models.from_factory(name) if ":" in name and not path.exists() else models.from_hugging_face(path)


def _machine(model: Model, workload: Workload, asked: Asked) -> Machine:
    if asked.gpu is None and torch.cuda.is_available():
        return _with_this_gpu(asked)
    return _with_this_cpu(model, workload, asked) if asked.gpu in (None, "cpu") else _described(asked, str(asked.gpu))


def _described(asked: Asked, gpu: str, cores: float | None = None) -> Machine:
    """``cores``: of the machine, where nobody has said how many."""
    return described(
        gpu,
        host_bytes=_free_here() if asked.host_bytes is None else asked.host_bytes,
        gpus=asked.given["gpus"],
        nodes=asked.given["nodes"],
        drives=asked.drives,
        compute=asked.compute,
        memory_bandwidth=asked.memory_bandwidth,
        cores=asked.given["cores"] or cores,
        network=asked.network,
        sustained_write=asked.sustained_write,
    )


def _with_this_gpu(asked: Asked) -> Machine:
    """This machine with its first GPU. Raises ``ConfigError`` for one whose data sheet is not known."""
    from offload.predict.measurements import Measurements
    from offload.predict.probe import drive_rates

    name = torch.cuda.get_device_name(0)
    try:
        gpu = find_gpu(name).name
    except ConfigError:
        raise ConfigError(
            f"the data sheet of this machine's {name} is not known: name the nearest one, as in --gpu 4090 "
            "--compute 150TFLOPS, or give --gpu cpu"
        ) from None
    check_paths(asked.paths)
    machine = _described(asked, gpu, host_cores().available)
    if not asked.paths or asked.drives:
        return machine
    with Measurements(teller(to_programs=asked.given["json"])) as kept:
        rates, how = drive_rates(asked.paths, measurements=kept)
    line = f"NVMe reads {rates.read / 1e9:,.2f} and writes {rates.write / 1e9:,.2f} GB/s ({how})"
    return replace(machine, nvme=rates, nvme_bytes=_free_on(asked.paths), assumptions=(*machine.assumptions, line))


def _with_this_cpu(model: Model, workload: Workload, asked: Asked) -> Machine:
    from aio_ext.profile import file_system_key
    from offload.predict.measurements import Measurements
    from offload.predict.overhead import record_seconds, unit_seconds
    from offload.predict.probe import probe

    check_paths(asked.paths)
    host_bytes, drives = 0 if asked.takes_least else asked.host_bytes, nvme_of(asked.drives, 1)
    with Measurements(teller(to_programs=asked.given["json"])) as kept:
        machine = probe(asked.paths, model, workload, host_bytes=host_bytes, drives=drives, measurements=kept)
        of_record = 0.0
        if asked.paths:
            path = asked.paths[0]
            of_record = kept.of(f"a record on {file_system_key(path)}", lambda: record_seconds(path))
        machine = replace(machine, unit_seconds=kept.of("a unit", unit_seconds), record_seconds=of_record)
    if kept.origin is not None:
        machine = replace(machine, assumptions=(*machine.assumptions, kept.origin))
    if asked.drives:
        machine = replace(machine, nvme_bytes=sum(drive.nbytes for drive in asked.drives))
    if asked.compute is not None:
        cores = replace(machine.cores, blocks=asked.compute, head=asked.compute)
        assumptions = (f"compute: {asked.given['compute']}, as given", *machine.assumptions[1:])
        machine = replace(machine, cores=cores, assumptions=assumptions)
    return machine


def _free_here() -> int:
    return int(available_bytes() * AUTO_SHARE)


def _free_on(paths: list[Path]) -> int:
    from offload.planning import free_bytes_of

    return free_bytes_of(paths)


def _source(asked: Asked) -> str:
    if asked.takes_least:
        return "the least that works"
    return "given" if asked.host_bytes is not None else "most of what is free on this machine"


def _least(prediction: Prediction) -> int | None:
    """The least host memory, if that is what can be too small."""
    try:
        return least_host_bytes(prediction.model, prediction.machine, prediction.workload)
    except BudgetError:
        return None


def tuned(asked: Asked) -> int:
    """Try settings by real steps, and print the best; returns the exit status."""
    from offload.predict.tuning import shown as settings_shown
    from offload.predict.tuning import tune

    given = asked.given
    name = str(asked.model)
    if asked.known is not None and not Path(name).expanduser().exists():
        raise ConfigError(f"--tune takes real steps, and of {name} only shapes are known: give its config.json")
    options: dict[str, Any] = {"gradient_clipping": given["gradient_clipping"], "host_memory": given["host_memory"]}
    if asked.takes_least:
        model, workload = _model(asked), _workload(asked)
        options["host_memory"] = least_host_bytes(model, _machine(model, workload, asked), workload)
    if asked.paths:
        options["nvme_path"] = [str(path) for path in asked.paths]
    say = teller(to_programs=given["json"])
    found = tune(lambda: models.to_train(name), _workload(asked), options, say)
    write: Path | None = given["write"]
    if write is not None:
        write.write_text(json_module.dumps(found.options, indent=2) + "\n")
    if given["json"]:
        trials = [{"settings": dict(trial.settings), "seconds": trial.seconds} for trial in found.trials]
        answer = {"defaults_stand": found.defaults_stand, "options": dict(found.options), "loop": dict(found.loop)}
        show_json({**answer, "trials": trials})
        return 0
    for trial in found.trials:
        spread = f"{min(trial.seconds):.3f} to {max(trial.seconds):.3f}"
        say(f"{settings_shown(trial.settings):<40} {trial.median:.3f} s a step ({spread})")
    say(_verdict(found, settings_shown(found.best)))
    say(f"engine = OffloadEngine(model, {', '.join(f'{name}={value!r}' for name, value in found.options.items())})")
    if found.loop["together"] or found.loop["batch"] != given["batch"]:
        together = ", by engine.together" if found.loop["together"] else ""
        say(f"the loop: micro-batches of {found.loop['batch']}{together}")
    if write is not None:
        say(f"the same options are in {write}: OffloadEngine(model, **json.load(open({str(write)!r})))")
    return 0


def _verdict(found: Tuned, best: str) -> str:
    if len(found.trials) == 1:
        return "the defaults stand: no setting that was not given bears on this step"
    if found.defaults_stand:
        return "the defaults stand: nothing beats them by 5 % and in every round, twice"
    return f"{best} makes a step {found.faster:.2f} times as fast as the defaults, once more"
