"""``offload plan``: its options, and which of them do not go together."""

from __future__ import annotations

import json as json_module
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer
from typer import Argument, Option

from offload.cli.console import Json, show_answer, show_json, teller

if TYPE_CHECKING:
    from offload.predict.machine import Machine
    from offload.predict.model import Model
    from offload.predict.prediction import Prediction
    from offload.predict.workload import Workload


# fmt: off
def plan(
    context: typer.Context,
    model: Annotated[str | None, Argument(metavar="MODEL", show_default=False,
        help="A Hugging Face config.json or a directory with one, or MODULE:FACTORY, a function without arguments "
             "that returns a model. Or give --parameters.")] = None,
    parameters: Annotated[str | None, Option(metavar="N", show_default=False,
        help="A transformer with so many parameters, such as 7e9 or 7B.")] = None,
    layers: Annotated[int | None, Option(min=1, metavar="N", show_default=False, help="Its layers.")] = None,
    width: Annotated[int | None, Option(min=1, metavar="N", show_default=False, help="Its width.")] = None,
    vocabulary: Annotated[int, Option(min=1, metavar="N", help="Its vocabulary.")] = 32_000,
    gpu: Annotated[str | None, Option(metavar="NAME", show_default=False,
        help="Describe a machine with this GPU, such as h100. Without: this machine, computing on its CPU.")] = None,
    gpus: Annotated[int, Option(min=1, metavar="N", help="GPUs of a node.")] = 1,
    nodes: Annotated[int, Option(min=1, metavar="N", help="Nodes.")] = 1,
    compute: Annotated[str | None, Option(metavar="FLOPS", show_default=False,
        help="What a GPU, or this CPU, achieves in training, such as 400TFLOPS.")] = None,
    host_memory: Annotated[str, Option(metavar="BYTES",
        help="Host memory that the engine may take of a node; auto: most of what is free here; "
             "least: the least that works.")] = "auto",
    device_memory: Annotated[str, Option(metavar="BYTES",
        help="What the engine may hold of a GPU's memory; auto: most of what activations leave.")] = "auto",
    nvme: Annotated[list[str] | None, Option(metavar="READ,WRITE,BYTES", show_default=False,
        help="An SSD of each node, such as 7GB/s,5GB/s,3.8TB. Give it once for each.")] = None,
    nvme_path: Annotated[list[Path] | None, Option(metavar="DIR", show_default=False,
        help="A folder on an SSD of this machine, whose bandwidth is looked at.")] = None,
    memory_bandwidth: Annotated[str, Option(metavar="RATE",
        help="Of a described node's host memory, what updates get.")] = "200GB/s",
    network: Annotated[str, Option(metavar="RATE", help="Of a described node, each way.")] = "400Gb/s",
    shard: Annotated[Literal["auto", "states", "gradients", "weights"], Option(
        help="What GPUs hold parts of: optimizer states; gradients, too; weights, too; "
             "auto: the first one that needs no NVMe, else weights.")] = "auto",
    endurance: Annotated[str, Option(metavar="BYTES",
        help="What the SSDs of a node may write in their life (TBW).")] = "600TB",
    batch: Annotated[int, Option(min=1, metavar="N", help="Sequences of a forward, on each GPU.")] = 1,
    sequence: Annotated[int, Option(min=1, metavar="N", help="Tokens of a sequence.")] = 2048,
    precision: Annotated[Literal["bf16", "fp16", "fp32"], Option(help="Of weights and gradients.")] = "bf16",
    optimizer: Annotated[Literal["adam", "adamw", "adagrad", "lion", "sgd"], Option(
        help="What updates the weights.")] = "adamw",
    moments_dtype: Annotated[Literal["fp32", "bf16", "int8"], Option(help="Of the optimizer's states.")] = "fp32",
    gradient_clipping: Annotated[float, Option(min=0, metavar="X", help="Bound of the gradient norm; 0: none.")] = 0,
    clipped: Annotated[Literal["never", "always"] | None, Option(show_default=False,
        help="Whether steps reach that bound.  [default: never]")] = None,
    gradient_accumulation_steps: Annotated[int, Option(min=1, metavar="N", help="Forwards of a step.")] = 1,
    activation_checkpointing: Annotated[bool, Option("--activation-checkpointing",
        help="Blocks keep their inputs alone, and are computed once more in backward.")] = False,
    plot: Annotated[Path | None, Option(metavar="FILE", show_default=False,
        help="Draw the step time into this svg or png.")] = None,
    over: Annotated[Literal["host-memory", "batch"], Option(help="What --plot draws it over.")] = "host-memory",
    tune: Annotated[bool, Option("--tune",
        help="Try the settings that matter by short real steps of the model, on this machine.")] = False,
    write: Annotated[Path | None, Option(metavar="FILE", show_default=False,
        help="Where --tune writes the options of OffloadEngine, as JSON.")] = None,
    json: Json = False,
) -> int:
    # fmt: on
    """Say whether a model fits, how fast it is, and what limits it.

    The answer comes from the engine's own planning, on this machine or on one that the options describe.
    """
    given = context.params
    _refuse_contradictions(given)
    from offload.cli.plan_shown import shown
    from offload.predict import facts, rates
    from offload.predict.advice import advise
    from offload.predict.endurance import Endurance
    from offload.predict.prediction import least_host_bytes, predict
    from offload.predict.workload import Workload

    workload = Workload(
        batch=batch, sequence=sequence, micro_batches=gradient_accumulation_steps, precision=precision,
        moments_dtype=moments_dtype, optimizer=optimizer, clipped=clipped == "always",
        recomputed=activation_checkpointing, shard=shard,
        device_bytes=None if device_memory == "auto" else rates.nbytes("--device-memory", device_memory),
    )  # fmt: skip
    found = _model(given)
    rated = rates.nbytes("--endurance", endurance)
    if tune:
        options: dict[str, Any] = {"gradient_clipping": gradient_clipping, "host_memory": host_memory}
        if nvme_path:
            options["nvme_path"] = [str(path) for path in nvme_path]
        return _tune(lambda: _model(given), workload, options, write, json)
    machine = _this_machine(found, workload, given) if gpu is None else _described(given)
    if host_memory == "least":
        machine = replace(machine, host_bytes=least_host_bytes(found, machine, workload))
    prediction = predict(found, machine, workload)
    advice = advise(prediction)
    answer = facts.facts_of(prediction, _least(prediction), advice, Endurance.of(prediction, rated))
    if gradient_clipping and clipped is None:
        always = predict(found, machine, replace(workload, clipped=True))
        answer["seconds_if_clipped"] = always.seconds if always.fits else None
    if plot is not None:
        from offload.predict.plot import plot as draw

        draw(prediction, over, plot)
        answer["plot"] = str(plot)
    show_answer(answer, shown(answer), to_programs=json)
    return 0


def _refuse_contradictions(given: dict[str, Any]) -> None:
    """Raises ``BadParameter`` for options that need others, or have no meaning with them."""
    if (given["model"] is None) == (given["parameters"] is None):
        raise typer.BadParameter("give a MODEL or --parameters, one of the two")
    if given["model"] is not None and (given["layers"] or given["width"]):
        raise typer.BadParameter("--layers and --width describe a model of --parameters: MODEL has its own")
    if given["gpu"] is not None and given["nvme_path"]:
        raise typer.BadParameter("--nvme-path is of this machine, and --gpu describes another: give --nvme")
    if given["gpu"] is not None and given["host_memory"] == "auto":
        raise typer.BadParameter("--host-memory must say what a node of the described machine gives, such as 1.5TiB")
    if given["gpu"] is None and (given["gpus"], given["nodes"]) != (1, 1):
        raise typer.BadParameter("--gpus and --nodes describe a machine with --gpu")
    if given["gpu"] is None and given["device_memory"] != "auto":
        raise typer.BadParameter("--device-memory is of a machine with --gpu")
    if given["shard"] != "auto" and given["gpus"] * given["nodes"] == 1:
        raise typer.BadParameter("--shard is of several GPUs: give --gpus or --nodes")
    if given["tune"] and (given["parameters"] is not None or given["gpu"] is not None):
        raise typer.BadParameter("--tune takes real steps: give a MODEL, and no --gpu")
    if given["write"] is not None and not given["tune"]:
        raise typer.BadParameter("--write is where --tune writes its options")


def _model(given: dict[str, Any]) -> Model:
    from offload.predict import model, rates

    name: str | None = given["model"]
    if name is None:
        numel = rates.count("--parameters", given["parameters"])
        return model.from_count(numel, given["layers"], given["width"], given["vocabulary"])
    if ":" in name and not Path(name).exists():
        return model.from_factory(name)
    return model.from_hugging_face(Path(name).expanduser())


def _this_machine(model: Model, workload: Workload, given: dict[str, Any]) -> Machine:
    from offload.planning import check_paths
    from offload.predict import rates
    from offload.predict.machine import nvme_of, parse_drive
    from offload.predict.overhead import record_seconds, unit_seconds
    from offload.predict.probe import probe

    paths = [path.expanduser() for path in given["nvme_path"] or ()]
    check_paths(paths)
    drives = [parse_drive(text) for text in given["nvme"] or ()]
    host_bytes, compute = _host_bytes(given["host_memory"]), given["compute"]
    machine = probe(paths, model, workload, host_bytes=host_bytes, drives=nvme_of(drives, 1))
    of_record = record_seconds(paths[0]) if paths else 0.0
    machine = replace(machine, unit_seconds=unit_seconds(), record_seconds=of_record)
    if drives:
        machine = replace(machine, nvme_bytes=sum(drive.nbytes for drive in drives))
    if compute is not None:
        flops = rates.flops_per_second("--compute", compute)
        cores = replace(machine.cores, blocks=flops, head=flops)
        assumptions = (f"compute: {compute}, as given", *machine.assumptions[1:])
        machine = replace(machine, cores=cores, assumptions=assumptions)
    return machine


def _described(given: dict[str, Any]) -> Machine:
    from offload.predict import rates
    from offload.predict.machine import described, parse_drive

    compute = given["compute"]
    return described(
        given["gpu"],
        host_bytes=_host_bytes(given["host_memory"]) or 0,
        gpus=given["gpus"],
        nodes=given["nodes"],
        drives=[parse_drive(text) for text in given["nvme"] or ()],
        compute=None if compute is None else rates.flops_per_second("--compute", compute),
        memory_bandwidth=rates.bytes_per_second("--memory-bandwidth", given["memory_bandwidth"]),
        network=rates.bytes_per_second("--network", given["network"]),
    )


def _least(prediction: Prediction) -> int | None:
    """The least host memory, if that is what can be too small."""
    from offload.errors import BudgetError
    from offload.predict.prediction import least_host_bytes

    try:
        return least_host_bytes(prediction.model, prediction.machine, prediction.workload)
    except BudgetError:
        return None


def _tune(build: Any, workload: Workload, options: dict[str, Any], write: Path | None, json: bool) -> int:
    from offload.predict.tuning import shown, tune

    say = teller(to_programs=json)
    tuned = tune(build, workload, options, say)
    if write is not None:
        write.write_text(json_module.dumps(tuned.options, indent=2) + "\n")
    if json:
        trials = [{"settings": dict(trial.settings), "seconds": trial.seconds} for trial in tuned.trials]
        show_json({"defaults_stand": tuned.defaults_stand, "options": dict(tuned.options), "trials": trials})
        return 0
    for trial in tuned.trials:
        spread = f"{min(trial.seconds):.3f} to {max(trial.seconds):.3f}"
        say(f"{shown(trial.settings):<24} {trial.median:.3f} s a step ({spread})")
    faster = tuned.trials[0].median / tuned.best.median
    say(
        "the defaults stand: nothing beats them by 5 % and in every round"
        if tuned.defaults_stand
        else f"{shown(tuned.best.settings)} makes a step {faster:.2f} times as fast as the defaults"
    )
    say(f"engine = OffloadEngine(model, {', '.join(f'{name}={value!r}' for name, value in tuned.options.items())})")
    if write is not None:
        say(f"the same options are in {write}: OffloadEngine(model, **json.load(open({str(write)!r})))")
    return 0


def _host_bytes(text: str) -> int | None:
    """None: "auto". "least" begins with nothing."""
    from offload.predict import rates

    if text == "least":
        return 0
    return None if text == "auto" else rates.nbytes("--host-memory", text)
