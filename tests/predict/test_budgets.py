"""More memory, as the forecast plays it; the plan is chosen by playing steps with another compute."""

from __future__ import annotations

import random
from dataclasses import replace
from itertools import pairwise

import pytest

from offload.predict.architecture import Architecture
from offload.predict.machine import Cores, Machine
from offload.predict.model import from_architecture
from offload.predict.prediction import least_host_bytes, predict
from offload.predict.workload import Workload
from offload.report.report import Bandwidths

_BUDGETS = 8
_SLOWER = 1.06
"""With a choice by cost alone 22 of the first 200 seeds had a budget that is slower than the one below it, 9 by more
than 2 %, none by more than this. Of the choice by playing none of the first nine seeds had one."""


def played(seed: int) -> list[float]:
    """Seconds of a step of a drawn model on a drawn machine, from the least budget to one that holds everything."""
    drawn = random.Random(seed)
    width = 64 * drawn.randint(2, 12)
    model = from_architecture(
        f"{width} wide",
        Architecture(
            layers=drawn.choice([2, 4, 6, 8, 12]), width=width, heads=width // 64, vocabulary=32_000, hidden=4 * width,
            kv_heads=width // 64, head_width=64, tied=True, gated=False, norm="layer", positions=1024,
        ),
    )  # fmt: skip
    workload = Workload(
        batch=drawn.choice([1, 4]),
        sequence=128,
        precision=drawn.choice(["bf16", "fp32"]),
        clipped=drawn.random() < 0.3,
    )
    machine = Machine(
        host_bytes=0,
        beside_bytes=1e12,
        nvme_bytes=1 << 40,
        nvme=Bandwidths(drawn.uniform(1e9, 7e9), drawn.uniform(1e9, 7e9), drawn.choice([1.0, 1.5, 3.0])),
        cores=Cores(drawn.uniform(1e11, 1e13), drawn.uniform(1e11, 1e13), 0.95, drawn.choice([2.0, 8.0, 16.0])),
        update=drawn.uniform(1e10, 1e11),
        checksum=drawn.uniform(5e9, 2e10),
        unit_seconds=1e-4,
        record_seconds=1e-4,
    )
    machine = replace(machine, cores=replace(machine.cores, gradients=machine.update))
    least = least_host_bytes(model, machine, workload)
    room = 16 * model.num_parameters - least
    budgets = [least + room * part // (_BUDGETS - 1) for part in range(_BUDGETS)]
    return [predict(model, replace(machine, host_bytes=budget), workload).seconds for budget in budgets]


@pytest.mark.one_in(2)
@pytest.mark.parametrize("seed", [0, 31, 67, 174])
def test_more_memory_is_not_slower_but_for_what_a_choice_without_the_batch_does_not_see(seed: int):
    seconds = played(seed)
    assert seconds[-1] < seconds[0]
    assert all(more <= _SLOWER * fewer for fewer, more in pairwise(seconds)), seconds
