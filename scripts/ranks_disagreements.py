#!/usr/bin/env python3
"""Random disagreements of ranks: each trains as one program does, or all end with one error, in time.

Each program has two to four processes, as a launcher starts them. One rank, or several, do something for themselves: an
option, a model, a weight or a gradient that only they write, a step more, an evaluation before a barrier, another order
of two engines, a variable of the environment. What may be different must change nothing: the weights have the bits of
the same program without it. What may not must be an error on all ranks that says what, before ``rank_timeout`` and some
seconds are over. Nothing hangs, and no process aborts.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import faulthandler
import hashlib
import os
import random
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which takes seconds, and torch.distributed wants it
from _ranks_processes import SERVE, Launcher, Process, end_all, serve
from torch import distributed, nn

from offload import OffloadEngine

WIDTH = 24
STEPS = 3
TIMEOUT_S = 4.0
SLACK_S = 60.0
"""Processes take this long to begin and to end on a machine that is busy."""
TROUBLE = ("terminate called", "Segmentation", "Fatal Python", "Aborted", "core dumped", "Exception ignored")


class Wrong(Exception):
    """The ranks did not end as they must."""


# What one rank does.


class Model(nn.Sequential):
    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(4)), nn.BatchNorm1d(WIDTH))


class Run:
    """One rank's program; ``odd``: it is one of those that do something for themselves."""

    def __init__(self, job: dict[str, Any]) -> None:
        self.job = job
        self.rank, self.size, self.odd = job["rank"], job["size"], job["odd"]
        self.model = Model()
        self.options: dict[str, Any] = {
            "lr": 1e-2,
            "rank_timeout": job["timeout_s"],
            "shard": job["shard"],
            "precision": "fp32",
            "optimizer": job["optimizer"],
        }
        if job["on_nvme"]:
            self.options |= {"nvme_path": job["folder"], "nvme_capacity": "64MiB", "tile_bytes": 65536}
        self.own = random.Random(job["seed"] + self.rank)

    def data(self, step: int) -> torch.Tensor:
        return torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(100 * step + self.rank))

    def evaluate(self, engine: OffloadEngine, times: int = 1) -> None:
        with torch.no_grad():
            for number in range(times):
                for layer in (number % 4, *range(4)):
                    engine.module[layer](self.data(77))

    def train(self, engine: OffloadEngine, steps: Sequence[int], act: Callable[[Run, OffloadEngine], Any]) -> None:
        for step in steps:
            engine.backward(engine(self.data(step)).square().mean())
            if step == 1 and self.job["when"] == "before":
                act(self, engine)
            engine.step()
            if step == 1 and self.job["when"] == "after":
                act(self, engine)

    def live(self) -> None:
        case = CASES[self.job["case"]]
        case.environment(self)
        case.prepare(self)
        with OffloadEngine(self.model, **self.options) as engine:
            self.train(engine, range(STEPS), case.act)
            case.end(self, engine)
            weights = [parameter.detach().clone() for parameter in engine.module.parameters()]
        digest = hashlib.sha256(b"".join(weight.numpy().tobytes() for weight in weights)).hexdigest()
        print(f"weights {digest}", flush=True)


def life(job: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1)
    warnings.simplefilter("ignore")
    Run(job).live()


# The cases. What is done for itself by ranks that are not odd is nothing.


def _nothing(*_: Any) -> None:
    return None


Act = Callable[[Run, OffloadEngine], Any]


@dataclass(frozen=True)
class Case:
    """``same``: nothing may come of it; else an error of all ranks that has these words. Acts are called on all ranks,
    between the steps (``act``, before or after the second one is taken) and after the last one (``end``)."""

    same: bool = False
    words: tuple[str, ...] = ()
    environment: Callable[[Run], Any] = _nothing
    prepare: Callable[[Run], Any] = _nothing
    act: Act = _nothing
    end: Act = _nothing
    when: str = "after"
    shard: str | None = None


def _option(name: str, *values: Any, same: bool = False, words: str | None = None) -> Case:
    def prepare(run: Run) -> None:
        if run.odd:
            run.options[name] = run.own.choice(values)

    return Case(same=same, prepare=prepare, words=() if same else (name if words is None else words,))


def _model(change: Callable[[nn.Module], Any], words: str, *, same: bool = False) -> Case:
    return Case(same=same, prepare=lambda run: change(run.model) if run.odd else None, words=(words,))


def _odd(act: Callable[[OffloadEngine], Any], words: str, when: str = "after", *, same: bool = False) -> Case:
    return Case(same=same, act=lambda run, engine: act(engine) if run.odd else None, words=(words,), when=when)


def _all(act: Act, words: str = "", when: str = "after", *, same: bool = False, shard: str | None = None) -> Case:
    return Case(same=same, act=act, words=(words,) if words else (), when=when, shard=shard)


def _other_seed(run: Run) -> None:
    run.model = Model(run.rank if run.odd else 0)


def _group_order(run: Run) -> None:
    parameters = list(run.model.parameters())
    cut = 3 if run.odd else 2
    groups = [{"params": parameters[:cut]}, {"params": parameters[cut:], "lr": 1e-3}]
    run.options["optimizer"] = torch.optim.AdamW(groups, lr=1e-2)
    del run.options["lr"]


def _write_weight(run: Run, engine: OffloadEngine) -> None:
    engine.module[1].weight.data.copy_(torch.full((WIDTH, WIDTH), 0.02 if run.odd else 0.01))


def _load_state_dict(run: Run, engine: OffloadEngine) -> None:
    engine.load_state_dict(Model(5 if run.odd else 4).state_dict())


def _load_states(run: Run, engine: OffloadEngine) -> None:
    found = engine.optimizer.state_dict()
    for state in found["state"].values():
        for name, value in state.items():
            if isinstance(value, torch.Tensor) and value.numel() > 1 and run.odd:
                state[name] = value * 1.5
    engine.optimizer.load_state_dict(found)


def _write_gradient(run: Run, engine: OffloadEngine) -> None:
    engine.module[2].weight.grad = torch.full((WIDTH, WIDTH), 2.0 if run.odd else 1.0)


def _evaluate_then_barrier(run: Run, engine: OffloadEngine) -> None:
    if run.odd:
        run.evaluate(engine, run.own.randint(1, 3))
    distributed.barrier()


def _uneven_then_reduce(run: Run, engine: OffloadEngine) -> None:
    run.evaluate(engine, run.own.randint(0, 4))
    distributed.all_reduce(torch.ones(1))


def _routed(run: Run, engine: OffloadEngine) -> None:
    """Each rank uses its own experts, and all reduce in between."""
    with torch.no_grad():
        for _ in range(2):
            engine.module[run.own.randrange(4)](run.data(5))
            distributed.all_reduce(torch.ones(1))


def _barrier_of_some(run: Run, engine: OffloadEngine) -> None:
    if run.odd:
        distributed.barrier()


def _save_on_some(run: Run, engine: OffloadEngine) -> None:
    if run.odd:
        engine.save_checkpoint(Path(run.job["folder"]) / "saved")


def _load_other_steps(run: Run, engine: OffloadEngine) -> None:
    folder = Path(run.job["folder"]) / "saved"
    engine.save_checkpoint(folder, tag="a")
    run.train(engine, [9], _nothing)
    engine.save_checkpoint(folder, tag="b")
    engine.load_checkpoint(folder, tag="a" if run.odd else "b")


def _close_early(run: Run, engine: OffloadEngine) -> None:
    if run.odd:
        engine.close()
        raise SystemExit(1)


def _one_more(run: Run, engine: OffloadEngine) -> None:
    if run.odd:
        run.train(engine, [9], _nothing)


def _two_engines(run: Run, engine: OffloadEngine) -> None:
    """Stepped in another order."""
    with OffloadEngine(Model(1), **run.options) as other:
        for each in (engine, other) if run.odd else (other, engine):
            run.train(each, [8], _nothing)


def _two_closed(run: Run, engine: OffloadEngine) -> None:
    other = OffloadEngine(Model(1), **run.options)
    for each in (engine, other) if run.odd else (other, engine):
        each.close()
    raise SystemExit(1)


def _sleep(engine: OffloadEngine) -> None:
    time.sleep(1.6 * engine.config.rank_timeout)


def _keep_the_interpreter(engine: OffloadEngine) -> None:
    ctypes.PyDLL(None).usleep(int(1.6e6 * engine.config.rank_timeout))


def _raise(engine: OffloadEngine) -> None:
    raise ValueError("planted")


def _start_again(run: Run) -> None:
    with OffloadEngine(Model(3), **run.options) as engine:
        run.train(engine, [0], _nothing)
    distributed.destroy_process_group()


def _variable(name: str, value: str) -> Callable[[Run], Any]:
    return lambda run: os.environ.__setitem__(name, value.format(run.size)) if run.odd else None


def _lr(engine: OffloadEngine) -> None:
    engine.optimizer.param_groups[0]["lr"] = 0.3


def _schedule(engine: OffloadEngine) -> None:
    torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5).step()


def _clip(run: Run, engine: OffloadEngine) -> None:
    engine.clip_grad_norm_(1e-4 if run.odd else 1e-3)


CASES: dict[str, Case] = {
    "nothing": Case(same=True),
    "lr": _option("lr", 1e-3, 0.5),
    "weight_decay": _option("weight_decay", 0.3, 0.4),
    "optimizer": _option("optimizer", "lion", "sgd"),
    "precision": _option("precision", "bf16", "fp16"),
    "shard": _option("shard", "auto"),
    "clipping": _option("gradient_clipping", 0.1, 2.0),
    "accumulation": _option("gradient_accumulation_steps", 2, 3),
    "moments": _option("moments_dtype", "bf16", "int8"),
    "rank_timeout": _option("rank_timeout", 2.0),
    "keep_last": _option("keep_last", 1),
    "an option that cannot be": _option("lr", -1.0, "much", words="lr"),
    "an option that there is not": _option("learning_rate", 1.0, words="learning_rate"),
    "prefetch": _option("prefetch", False, same=True),
    "tiles": _option("tile_bytes", 1 << 17, same=True),
    "host memory": _option("host_memory", "64MiB", "1GiB", same=True),
    "seed of the model": Case(same=True, prepare=_other_seed),
    "frozen": _model(lambda of: of[1].requires_grad_(False), "requires_grad of 1.weight"),
    "buffer": _model(lambda of: of.register_buffer("more", torch.zeros(2)), "the buffer of more"),
    "shape": _model(lambda of: setattr(of, "2", nn.Linear(WIDTH, WIDTH, bias=False)), "different models"),
    "dtype": _model(lambda of: of[0].double(), "the dtype of 0.weight"),
    "groups": Case(prepare=_group_order, words=("the list of parameters",)),
    "lr of a step": _odd(_lr, "lr of parameter group 0"),
    "a scheduler": _odd(_schedule, "lr of parameter group 0"),
    "clipping by hand": _all(_clip, "the factor of the gradient", "before"),
    "frozen later": _odd(lambda engine: engine.module[1].weight.requires_grad_(False), "requires_grad of 1.weight"),
    "zero_grad": _odd(lambda engine: engine.optimizer.zero_grad(), "", same=True),
    "a weight": _all(_write_weight, "the new value"),
    "a weight of one": _odd(lambda engine: engine.module[1].weight.data.zero_(), "different places"),
    "a state dict": _all(_load_state_dict, "the new value"),
    "states": _all(_load_states, "the new state"),
    "a gradient": _all(_write_gradient, "the new value", "before"),
    "evaluation, then a barrier": _all(_evaluate_then_barrier, same=True),
    "one batch more, then a reduction": _all(_uneven_then_reduce, same=True),
    "routed": _all(_routed, same=True),
    "a barrier of some": _all(_barrier_of_some, "wait for each other"),
    "saved by some": _all(_save_on_some, "different places"),
    "other checkpoints": _all(_load_other_steps, "the step is"),
    "closed early": _all(_close_early, "different places"),
    "one step more": Case(end=_one_more, words=("different places",)),
    "two engines": _all(_two_engines, "wait for each other"),
    "two engines closed": _all(_two_closed, "wait for each other"),
    "sleeps": _odd(_sleep, "", same=True),
    "keeps the interpreter": _odd(_keep_the_interpreter, "", same=True),
    "raises": _odd(_raise, "planted"),
    "started again": Case(same=True, environment=_start_again),
    "RANK of another": Case(environment=_variable("RANK", "0"), words=("RANK",)),
    "RANK too large": Case(environment=_variable("RANK", "{}"), words=("RANK",)),
    "WORLD_SIZE": Case(environment=lambda run: os.environ.update(WORLD_SIZE="two"), words=("WORLD_SIZE=two",)),
}


# What is seen from outside.


@dataclass(frozen=True)
class Program:
    """One of them, and which ranks are odd."""

    seed: int
    case: str
    size: int
    odd: tuple[int, ...]
    shard: str
    optimizer: str
    on_nvme: bool


def drawn(seed: int, only: Sequence[str] = ()) -> Program:
    """The cases come in turns, in an order of their own for each round."""
    names = list(only or CASES)
    number = seed % len(names)
    random.Random(seed // len(names)).shuffle(names)
    rng, name = random.Random(seed), names[number]
    size = rng.choice((2, 2, 3, 4))
    odd = sorted(rng.sample(range(size), rng.randint(1, size - 1)))
    if name in ("RANK of another", "RANK too large"):
        odd = [size - 1]
    shard = rng.choice(("weights", "weights", "gradients", "states"))
    return Program(seed, name, size, tuple(odd), shard, rng.choice(("adamw", "adam")), rng.random() < 0.25)


def run(program: Program, launcher: Launcher, timeout_s: float = TIMEOUT_S) -> str:
    """Raises ``Wrong``. Returns what the ranks have said."""
    case = CASES[program.case]
    found = _ends(program, launcher, timeout_s)
    statuses = {status for status, _ in found}
    said = [_last_error(told) for _, told in found]
    for rank, (_, told) in enumerate(found):
        if any(trouble in told for trouble in TROUBLE):
            raise Wrong(f"rank {rank} is in trouble: {told[-1500:]}")
    if case.same:
        agreeing = _ends(replace(program, case="nothing"), launcher, timeout_s)
        weights = {_weights(told) for _, told in (*found, *agreeing)}
        if len(weights) > 1 or "" in weights:
            ends = [(status, *text) for (status, _), text in zip(found, said, strict=True)]
            raise Wrong(f"other weights, or an error: {ends}")
        return "the same"
    if 0 in statuses or any(status < 0 for status in statuses):
        raise Wrong(f"some ended well, or by a signal: {[status for status, _ in found]}, {said}")
    kinds = {kind for kind, _ in said} - {"RuntimeError"}
    wrong = [text for kind, text in said if not all(word in text for word in case.words)]
    told = {text.partition(": ")[2] if text.startswith("rank ") else text for _, text in said}
    if wrong or len(said) > len([text for _, text in said if text]):
        raise Wrong(f"not what it is, on all ranks: {said}")
    return f"{'/'.join(sorted(kinds))}: {min(told, key=len)[:150]}"


def _ends(program: Program, launcher: Launcher, timeout_s: float) -> list[tuple[int, str]]:
    """The exit status of each rank, and all that it has told."""
    with tempfile.TemporaryDirectory() as name:
        shared = {"folder": name, "timeout_s": timeout_s, "when": CASES[program.case].when}
        shared |= {at: getattr(program, at) for at in ("seed", "case", "size", "shard", "optimizer", "on_nvme")}
        jobs = [{**shared, "rank": rank, "odd": rank in program.odd} for rank in range(program.size)]
        processes = launcher.start(jobs, Path(name))
        try:
            _wait(processes, 3 * timeout_s + SLACK_S)
            return [(process.status or 0, process.told()) for process in processes]
        finally:
            end_all(processes)


def _wait(processes: Sequence[Process], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    for rank, process in enumerate(processes):
        if not process.wait(deadline - time.monotonic()):
            for each in processes:
                each.send(signal.SIGUSR1)
            time.sleep(0.5)
            told = "\n".join(f"--- rank {rank}\n{each.told()[-3000:]}" for rank, each in enumerate(processes))
            raise Wrong(f"rank {rank} hangs\n{told}")


def _weights(told: str) -> str:
    return next((line for line in told.splitlines() if line.startswith("weights ")), "")


def _last_error(told: str) -> tuple[str, str]:
    """Its type and first line."""
    for line in reversed(told.splitlines()):
        name, _, text = line.rpartition("]: ")[2].partition(": ") if line.startswith("[rank") else line.partition(": ")
        kind = name.rpartition(".")[2]
        if kind.endswith(("Error", "Exit")) and kind[:1].isupper():
            return kind, text
    return "", ""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next ones count up")
    parser.add_argument("--count", type=int, default=len(CASES), help="programs")
    parser.add_argument(
        "--case", action="append", choices=list(CASES), help="one of them alone (default: all in turns)"
    )
    parser.add_argument("--timeout", type=float, default=TIMEOUT_S, help="rank_timeout of the engines, in seconds")
    arguments = parser.parse_args()
    launcher, wrong, kinds = Launcher(__file__), 0, Counter[str]()
    for seed in range(arguments.seed, arguments.seed + arguments.count):
        program, started = drawn(seed, arguments.case or ()), time.monotonic()
        try:
            said = run(program, launcher, arguments.timeout)
            kinds["the same" if said == "the same" else "one error"] += 1
        except Wrong as error:
            wrong, said = wrong + 1, f"WRONG: {error}"
        shown = f"{program.case}, {program.size} ranks, odd {program.odd}, {program.shard}"
        print(f"{seed}: {shown}: {said} ({time.monotonic() - started:.1f} s)", flush=True)
    with contextlib.suppress(BrokenPipeError):
        launcher.close()
    print(f"{arguments.count} programs from seed {arguments.seed}: {dict(kinds)}, {wrong} went wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    if SERVE in sys.argv:
        life(serve())
    else:
        sys.exit(main())
