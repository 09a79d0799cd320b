"""``offload plan``: its options, and which of them do not go together."""

from __future__ import annotations

import atexit
import gc
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from typer import Argument, Option

from offload.cli.console import Json
from offload.cli.plan_asked import Asked
from offload.cli.refused import above_zero, not_negative
from offload.native_optimizers import MATRIX_DEFAULTS, NATIVE_OPTIMIZERS

if TYPE_CHECKING:
    _Optimizer = str
else:
    _names = (*NATIVE_OPTIMIZERS, *MATRIX_DEFAULTS)
    _Optimizer = Literal[_names]


# fmt: off
def plan(
    model: Annotated[str | None, Argument(metavar="MODEL", show_default=False,
        help="The name of a known model of the hub (Qwen/Qwen3-32B), a config.json or a folder with one, or "
             "MODULE:FACTORY, a function without arguments that returns a model. Or give --parameters.")] = None,
    parameters: Annotated[str | None, Option(metavar="N", show_default=False,
        help="A transformer with so many parameters, such as 7e9 or 7B.")] = None,
    layers: Annotated[int | None, Option(min=1, max=4096, metavar="N", show_default=False, help="Its layers.")] = None,
    width: Annotated[int | None, Option(min=1, max=1 << 20, metavar="N", show_default=False, help="Its width.")] = None,
    vocabulary: Annotated[int, Option(min=1, max=1 << 24, metavar="N", help="Its vocabulary.")] = 32_000,
    lora: Annotated[str | None, Option(metavar="r=N", show_default=False,
        help="Train adapters of this rank over a frozen model; r=16,targets=q_proj+v_proj: over these layers.")] = None,
    base: Annotated[
        Literal["bf16", "int8", "fp8", "int4", "nvfp4", "mxfp4", "nf4", "q8_0", "q6_k", "q5_k", "q4_k"] | None,
        Option(show_default=False,
            help="How the frozen matrices under adapters are stored.  [default: as the weights]")] = None,
    gpu: Annotated[str | None, Option(metavar="NAME", show_default=False,
        help="A GPU, such as 4090 or h100. Without: this machine, computing on its GPU or else its CPU; "
             "cpu: on its CPU.")] = None,
    gpus: Annotated[int, Option(min=1, max=1024, metavar="N", help="GPUs of a node.")] = 1,
    nodes: Annotated[int, Option(min=1, max=1 << 20, metavar="N", help="Nodes.")] = 1,
    compute: Annotated[str | None, Option(metavar="FLOPS", show_default=False,
        help="What a GPU, or this CPU, achieves in training, such as 400TFLOPS.")] = None,
    host_memory: Annotated[str, Option(metavar="BYTES",
        help="Host memory that the engine may take of a node, such as 64GiB; auto: most of what is free on this "
             "machine; least: the least that works.")] = "auto",
    device_memory: Annotated[str, Option(metavar="BYTES",
        help="What the engine may hold of a GPU's memory; auto: most of what activations leave.")] = "auto",
    nvme: Annotated[list[str] | None, Option(metavar="READ,WRITE,BYTES", show_default=False,
        help="An SSD of each node, such as 7GB/s,5GB/s,3.8TB, or 6GB/s for both. Give it once for each.")] = None,
    sustained_write: Annotated[str | None, Option(metavar="RATE", show_default=False,
        help="What each of them still writes when its fast cache is full.")] = None,
    nvme_path: Annotated[list[Path] | None, Option(metavar="DIR", show_default=False,
        help="A folder on an SSD of this machine, whose bandwidth is looked at.")] = None,
    memory_bandwidth: Annotated[str | None, Option(metavar="RATE", show_default=False,
        help="Of a described node's host memory, what updates get.  [default: 70GB/s of a desktop, 200GB/s of a "
             "server]")] = None,
    cores: Annotated[float | None, Option(callback=above_zero, metavar="N", show_default=False,
        help="Of a described node's CPU.  [default: as many as updates need for that]")] = None,
    network: Annotated[str, Option(metavar="RATE", help="Of a described node, each way.")] = "400Gb/s",
    shard: Annotated[Literal["auto", "states", "gradients", "weights"], Option(
        help="What GPUs hold parts of: optimizer states; gradients, too; weights, too; "
             "auto: the first one that needs no NVMe, else weights.")] = "auto",
    exchange_dtype: Annotated[Literal["auto", "bf16", "int8"], Option(
        help="What GPUs send each other gradients in; auto: as they are.")] = "auto",
    endurance: Annotated[str, Option(metavar="BYTES",
        help="What the SSDs of a node may write in their life (TBW).")] = "600TB",
    tokens: Annotated[str | None, Option(metavar="N", show_default=False,
        help="Say how long a training on so many tokens takes, such as 1e9 or 500M.")] = None,
    batch: Annotated[int, Option(min=1, max=1 << 20, metavar="N", help="Sequences of a forward, on each GPU.")] = 1,
    sequence: Annotated[int, Option(min=1, max=1 << 28, metavar="N", help="Tokens of a sequence.")] = 2048,
    precision: Annotated[Literal["bf16", "fp16", "fp32"], Option(help="Of weights and gradients.")] = "bf16",
    optimizer: Annotated[_Optimizer, Option(
        help="What updates the weights.")] = "adamw",
    moments_dtype: Annotated[Literal["fp32", "bf16", "int8"], Option(help="Of the optimizer's states.")] = "fp32",
    master_dtype: Annotated[Literal["fp32", "bf16"], Option(
        help="Of what the optimizer updates in bf16: a master beside the weights, or the weights.")] = "fp32",
    gradient_clipping: Annotated[float, Option(callback=not_negative, metavar="X",
        help="Bound of the gradient norm; 0: none.")] = 0,
    clipped: Annotated[Literal["never", "always"] | None, Option(show_default=False,
        help="Whether steps reach that bound.  [default: never]")] = None,
    gradient_accumulation_steps: Annotated[int, Option(min=1, max=1 << 20, metavar="N",
        help="Forwards of a step.")] = 1,
    activations: Annotated[Literal["keep", "recompute", "host", "nvme"], Option(
        help="What becomes of activations: blocks keep them; keep their inputs alone, and are computed once more in "
             "backward; and these inputs go to host memory, or on to NVMe.")] = "keep",
    activation_memory: Annotated[str, Option(metavar="BYTES",
        help="Of host memory, what is set aside for activations of host and nvme; auto: what serves them.")] = "auto",
    together: Annotated[bool, Option("--together",
        help="Micro-batches of a step pass each unit together, by engine.together.")] = False,
    loss_rows: Annotated[int | None, Option(min=1, max=1 << 28, metavar="N", show_default=False,
        help="Tokens of which logits exist at a time, by cross_entropy_in_tiles.  [default: all]")] = None,
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
    asked = Asked(locals())  # values of the annotated types: a parser's own table has text for some
    with _uncollected():
        from offload.cli import plan_made  # all options are known to be right: now torch may take its time

        if not tune:
            return plan_made.planned(asked)
    return plan_made.tuned(asked)


@contextmanager
def _uncollected() -> Iterator[None]:
    """No search for cycles: a forecast leaves next to none, and searches take a tenth of its time; nor one through all
    of torch as the program ends."""
    was = gc.isenabled()
    atexit.register(gc.freeze)
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
