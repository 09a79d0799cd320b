#!/usr/bin/env python3
"""Random training programs on two to four ranks: the same bits wherever shards rest.

Each program draws a model (prime sizes, tied weights, frozen blocks, large layers, checkpointing), options, the order
in which each rank uses the blocks, which may leave some out, and what happens between steps: one rank evaluates or
reads weights, all of them change some. It runs with ``shard="weights"`` in RAM, and then otherwise: replicated weights,
whole gradients, small budgets on NVMe, and on a simulated device for each rank, which reports what was not ordered.
What each rank has seen, and all weights and optimizer states, must be equal to the last bit; and the weights on all
ranks.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from ranks.pool import Pool
from ranks.programs import GRADIENTS, STATES, WEIGHTS, Placement, Program, bits, bits_of_placements

SIZES = (29, 31, 59, 97, 113, 127)


def drawn(seed: int) -> tuple[int, Program, list[Placement]]:
    """The number of ranks, the program, and where its shards rest."""
    rng = random.Random(seed)
    size = rng.choice((2, 2, 3, 4))
    hidden = [rng.choice(SIZES) for _ in range(rng.randint(1, 5))]
    frozen = [index for index in range(len(hidden)) if rng.random() < 0.2]
    model = {
        "hidden": hidden,
        "large": rng.random() < 0.15,
        "tied": rng.random() < 0.3,
        "frozen": frozen,
        "recompute": rng.choice((None, None, "reentrant", "other")),
        "seed": seed,
    }
    options: dict[str, Any] = {
        "precision": rng.choice(("fp32", "bf16", "fp16")),
        "gradient_accumulation_steps": rng.choice((1, 1, 1, 2, 3)),
        "gradient_clipping": rng.choice((0.0, 0.5, 5.0)),
        "optimizer": rng.choice(("adamw", "adamw", "sgd", "lion")),
        "prefetch": rng.random() < 0.8,
    }
    if options["optimizer"] == "sgd":
        options["optimizer_options"] = {"momentum": rng.choice((0.0, 0.9))}
    if rng.random() < 0.4:
        options["moments_dtype"] = rng.choice(("bf16", "int8"))
    overflows = options["precision"] == "fp16" and rng.random() < 0.4
    steps = rng.randint(2, 4)
    program = Program(
        model=model,
        options=options,
        loop="engine" if options["precision"] == "fp16" else rng.choice(("engine", "plain")),
        steps=steps,
        clip=rng.choice((None, None, 1.0)),
        paths=[_path(rng, len(hidden)) for _ in range(rng.choice((1, size)))],
        planted=(rng.randrange(size), rng.randrange(steps), math.inf) if overflows else None,
        actions=[_action(rng, steps, size) for _ in range(rng.randint(0, 4))],
    )
    small = Placement("weights", rng.choice((1.0, 1.0, 1.2, 1.6)), rng.choice(("io_uring", "threads", "portable")))
    placements = [WEIGHTS, rng.choice((GRADIENTS, Placement("gradients", 1.0))), small]
    placements.append(rng.choice((STATES, Placement("states", 1.0))))
    if not program.model["large"]:
        budget, on_device = rng.choice((None, 1.0, 1.2)), rng.choice((1.0, 1.2, 1.5, 2.0, 20.0))
        shard = rng.choice(("states", "gradients", "weights"))
        placements.append(Placement(shard, budget if on_device <= 1.2 else None, on_device=on_device, seed=seed))
    return size, program, placements


def _path(rng: random.Random, num_blocks: int) -> list[int] | None:
    return rng.choice((None, rng.choices(range(num_blocks), k=rng.randint(0, num_blocks + 1))))


def _action(rng: random.Random, steps: int, size: int) -> tuple[int, str, int]:
    what = rng.choice(("evaluate", "read", "state dict", "write", "gradient"))
    return rng.randrange(steps), what, rng.randrange(size)


def check(pools: dict[int, Pool], seed: int, folder: Path) -> list[str]:
    """Run one program with its shards everywhere; what was wrong."""
    size, program, placements = drawn(seed)
    pool = pools.setdefault(size, Pool(size))
    found = pool(bits_of_placements, program, placements, folder, states=True, timeout_s=120)
    wrong = []
    for rank, of_rank in enumerate(found):
        if len(set(of_rank["bits"].values())) > 1:
            wrong.append(f"rank {rank} of {size}: {of_rank['bits']}")
    for name in ("weights", "states"):
        if len({bits(of_rank[name]) for of_rank in found}) > 1:
            wrong.append(f"ranks have other {name}")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next ones count up")
    parser.add_argument("--seconds", type=float, default=60, help="how long to go on")
    parser.add_argument("--programs", type=int, default=1 << 62, help="how many to run at most")
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()), help="a folder for the swap store")
    options = parser.parse_args()
    deadline, seed, failed = time.monotonic() + options.seconds, options.seed, 0
    pools: dict[int, Pool] = {}
    sizes: Counter[int] = Counter()
    while time.monotonic() < deadline and seed - options.seed < options.programs:
        sizes[drawn(seed)[0]] += 1
        try:
            wrong = check(pools, seed, options.path)
        except AssertionError as error:
            wrong = [str(error)]
        failed += bool(wrong)
        for line in wrong:
            print(f"seed {seed}: {line}", flush=True)
        seed += 1
    for pool in pools.values():
        pool.stop()
    of_sizes = ", ".join(f"{count} on {size} ranks" for size, count in sorted(sizes.items()))
    print(f"{seed - options.seed} programs from seed {options.seed} ({of_sizes}): {failed} went wrong")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
