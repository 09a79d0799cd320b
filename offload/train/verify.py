"""``--verify``: the first steps once more in memory, in a process of their own, compared bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from offload.train import process
from offload.train.errors import InputError, RunError
from offload.train.settings import STATE_BYTES, Settings

_CHILD = "import json, sys; sys.path[:] = json.loads(sys.argv[1]); from offload.train.reference import main; main()"


@dataclass(frozen=True)
class Verification:
    """Outcome of the repetition. ``difference`` names the first value that differs; None: all bits agree."""

    num_steps: int
    difference: str | None
    step_seconds_median: float
    activation_bytes: int


def check_fits_in_memory(settings: Settings) -> None:
    """Raise ``InputError`` if the repetition would not fit into what memory the machine has left."""
    num_parameters = sum(parameter.numel() for parameter in settings.empty_model().parameters())
    needed = num_parameters * sum(STATE_BYTES[settings.precision].values()) + settings.activation_bytes_estimated
    available = process.available_bytes()
    if needed > available:
        raise InputError(
            f"--verify repeats the steps in memory, which takes about {needed:,} bytes, and {available:,} are free: "
            "leave --verify away, or make the model smaller"
        )


def check_activations_fit(settings: Settings) -> None:
    """Raise ``InputError`` if a step on the CPU would not fit into what memory the machine has left."""
    needed, available = settings.activation_bytes_estimated, process.available_bytes()
    if needed <= available:
        return
    fitting = settings.batch * available // needed
    advice = f"--batch {fitting} or less" if fitting else "a smaller --context"
    raise InputError(
        f"--batch: {settings.batch:,} windows of {settings.context:,} bytes take about {needed / 2**30:,.1f} GiB for "
        f"activations, and {available / 2**30:,.1f} GiB are free: give {advice}"
    )


def verify(
    settings: Settings, losses: Sequence[float], digests: Mapping[str, str], on_step: Callable[[int, float], None]
) -> Verification:
    """Repeat ``len(losses)`` steps and compare every loss, and the weights after the last with their ``digests``.

    ``on_step`` is called with number and loss of each repeated step. Raises ``RunError`` if the repetition fails.
    """
    difference = None
    seconds = []
    with contextlib.closing(_repeat(settings, len(losses))) as answers:
        for index, loss in enumerate(losses):
            answer = next(answers)
            repeated = float.fromhex(answer["loss"])
            seconds.append(answer["seconds"])
            if difference is None and answer["loss"] != loss.hex():
                difference = f"the loss of step {index + 1} is {loss!r}, and in memory {repeated!r}"
            on_step(index + 1, repeated)
        last = next(answers)
    if difference is None:
        names = [name for name, digest in last["digests"].items() if digests.get(name) != digest]
        if names or len(digests) != len(last["digests"]):
            difference = f"{len(names)} of {len(digests)} parameters differ after step {len(losses)}: {names[:1]}"
    return Verification(
        num_steps=len(losses),
        difference=difference,
        step_seconds_median=median(seconds),
        activation_bytes=last["activation_bytes"],
    )


def _repeat(settings: Settings, num_steps: int) -> Generator[dict[str, Any], None, None]:
    """Answers of ``reference.main``, line by line. Close it: the process is gone afterwards."""
    request = {
        "settings": dataclasses.asdict(settings),
        "steps": num_steps,
        "num_threads": torch.get_num_threads(),
        "parent": os.getpid(),
    }
    with tempfile.TemporaryFile("w+") as faults:
        child = subprocess.Popen(
            [sys.executable, "-c", _CHILD, json.dumps(sys.path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=faults,
            text=True,
            start_new_session=True,  # Ctrl-C is for the parent, which ends the child
        )
        assert child.stdin is not None and child.stdout is not None
        try:
            child.stdin.write(json.dumps(request))
            child.stdin.close()
            for line in child.stdout:
                yield json.loads(line)
            faults.seek(0)
            reason = (faults.read().strip().splitlines() or [f"it ended with status {child.wait()}"])[-1]
            raise RunError(f"--verify: the repetition in memory failed: {reason}")
        finally:
            child.kill()
            child.wait()
            child.stdout.close()
