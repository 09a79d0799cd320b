#!/usr/bin/env python3
"""Random training programs, on the CPU at small budgets and on a simulated device: the same bits, every access ordered.

Each program draws a model (nested units, checkpointing, tied weights, frozen parts), budgets from the least to plenty,
what becomes of activations, a precision, and what happens between steps (evaluation, writes through handles,
accumulation, clipping). It runs on the CPU with everything in RAM and with little of it, and on a device whose streams
run as late as they may: losses, weights and states must be equal to the last bit, no buffer may be read before its copy
is over nor changed before its readers are done, device memory must stay within the plan, and all of it must be free at
the end. Speculative updates on the device are counted: a campaign in which none was begun, or none flipped, has not
shown what it is for."""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _device_around import Around, AroundDevice
from torch import nn
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from offload import BudgetError, OffloadEngine, kernels
from offload.optim.kernel_rule import KernelRule
from offload.testing.order import HOST
from offload.testing.simulated import SimulatedDevice
from offload.tiers.activations.copies import Copying, DeviceCopies
from offload.tiers.bounce import Bounce
from offload.tiers.gradients.device import DeviceGradients
from offload.tiers.gradients.exchange import Bucket
from offload.tiers.gradients.norms import SentSums
from offload.tiers.gradients.transport import GradientTransport
from offload.units import UnitSpec
from offload.update.host_side import HostSide, HostWork
from offload.update.speculative import SpeculativeUpdate, SpeculativeUpdates
from offload.update.step import UnitUpdate
from swapper import DurableStore, Scratch

WIDTH = 32
VOCAB = 64
HUGE_VOCAB = 20_011

NUM_SPECULATIVE = 30
"""Some of so many programs updates units speculatively."""


class Block(nn.Module):
    """Adds to ``x``, and passes ``bias`` through, if there is one."""

    def __init__(self, hidden: int, recompute: str | None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, hidden)
        self.down = nn.Linear(hidden, WIDTH)
        self._recompute = recompute

    def forward(self, x: torch.Tensor, bias: torch.Tensor | None) -> Any:
        return recomputed(self._body, self._recompute, x, bias)

    def _body(self, x: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
        x = x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))
        return (x if bias is None else x + bias), bias


class Model(nn.Module):
    """An embedding, blocks (one may be called twice), a gain that the model itself owns, and a head (maybe tied).

    The vocabulary may be so large that embedding and head are cut into pieces. A ``deep`` one takes more memory than
    the buffers through which it can be streamed.
    """

    def __init__(self, rng: random.Random, *, deep: bool) -> None:
        super().__init__()
        self.vocabulary = rng.choice((VOCAB, VOCAB, VOCAB, HUGE_VOCAB))
        self.embed = nn.Embedding(self.vocabulary, WIDTH)
        recompute = rng.choice((None, None, "reentrant", "other"))
        shapes = [rng.choice((32, 64, 128)) for _ in range(rng.randint(2, 6))]
        if deep and self.vocabulary == VOCAB:
            shapes = [256, *shapes, 256, 256, *shapes, 256, 256]
        self.blocks = nn.ModuleList(Block(hidden, recompute) for hidden in shapes)
        self.twice = rng.choice((None, rng.randrange(len(self.blocks))))
        self.gain = nn.Parameter(torch.ones(WIDTH))
        self.register_buffer("shift", torch.randn(WIDTH))
        self.head = nn.Linear(WIDTH, self.vocabulary, bias=False)
        if rng.random() < 0.3:
            self.head.weight = self.embed.weight
        if rng.random() < 0.3:
            self.blocks[rng.randrange(len(self.blocks))].requires_grad_(False)
        self.recompute = None
        if rng.random() < 0.5:  # the whole block, with the engine's hooks on it
            self.recompute = recompute
            for block in self.blocks:
                block._recompute = None
        self.early_stop = rng.random() < 0.5
        self.has_bias = rng.random() < 0.5

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        bias = x.mean(-1, keepdim=True) if self.has_bias else None
        with set_checkpoint_early_stop(self.early_stop):
            for index, block in enumerate(self.blocks):
                for _ in range(1 + (index == self.twice)):
                    x, bias = recomputed(block, self.recompute, x, bias)
        return self.head(x * self.gain + self.shift.to(x.dtype))


def recomputed(call: Callable[..., Any], how: str | None, *args: Any) -> Any:
    """What ``call`` gives, whose activations are made anew in backward; unless ``how`` is None."""
    return call(*args) if how is None else checkpoint(call, *args, use_reentrant=how == "reentrant")


@dataclass(frozen=True)
class Program:
    """One training program, all of it from one seed."""

    seed: int

    def options(self) -> dict[str, Any]:
        rng = random.Random(self.seed)
        return {
            "precision": rng.choice(("bf16", "fp32", "fp16")),
            "gradient_accumulation_steps": rng.choice((1, 1, 3)),
            "gradient_clipping": rng.choice((0.0, 0.5)) * random.Random(self.seed + 10).choice((1, 10)),
            "optimizer": rng.choice(("adamw", "adamw", "sgd", torch.optim.NAdam)),
            "prefetch": rng.random() < 0.8,
            "tile_bytes": 64 * 1024,
            "lr": 1e-2,
        }

    @property
    def deep(self) -> bool:
        return random.Random(self.seed + 9).random() < 0.4

    @property
    def activations(self) -> dict[str, Any]:
        """What becomes of activations, where it may not change a bit."""
        mode = random.Random(self.seed + 12).choice(("keep", "keep", "recompute", "host", "nvme", "nvme"))
        return {"activations": mode, "activation_memory": 64 << 10 if mode == "nvme" else 64 << 20}

    def model(self) -> Model:
        torch.manual_seed(self.seed)
        return Model(random.Random(self.seed + 1), deep=self.deep)

    def run(self, engine: OffloadEngine, around: Around) -> tuple[list[Any], dict[str, Any]]:
        """Losses and what was read on the way; the model's and the optimizer's state at the end."""
        rng = random.Random(self.seed + 2)
        generator = torch.Generator().manual_seed(self.seed)
        seen: list[Any] = []
        for step in range(rng.randint(2, 4)):
            for _ in range(engine.config.gradient_accumulation_steps):
                tokens = torch.randint(0, engine.module.vocabulary, (2, 8), generator=generator)
                seen.append(around.forward_and_backward(engine, tokens, step))
            if rng.random() < 0.3:
                seen.append(engine.module.blocks[0].up.weight.grad.float().norm().item()) if _trains(engine) else None
            if rng.random() < 0.3:
                seen.append(float(torch.nn.utils.clip_grad_norm_(engine.module.parameters(), 1.0)))
            around.change_weights()
            around.before_step(engine)
            if rng.random() < 0.1:
                engine.optimizer.zero_grad()
            else:
                engine.step()
            if rng.random() < 0.4:
                for _ in range(rng.randint(1, 3)):
                    with torch.no_grad(), around.evaluation():
                        seen.append(engine(tokens).float().sum().item())
            if rng.random() < 0.3:
                around.change_weights()
                with torch.no_grad():
                    engine.module.blocks[-1].down.weight.mul_(0.5)
            if rng.random() < 0.3:
                seen.append(engine.module.gain.detach().float().sum().item())
        around.change_weights()
        weights = {name: p.detach().clone() for name, p in engine.module.named_parameters()}
        return seen, {"weights": weights, "states": engine.optimizer.state_dict()["state"]}


def _trains(engine: OffloadEngine) -> bool:
    return engine.module.blocks[0].up.weight.grad is not None


@contextlib.contextmanager
def watched(device: SimulatedDevice, engine: OffloadEngine) -> Iterator[None]:
    """Tell the device of what the disk, the optimizer and the model do."""
    read, write, apply, take = DurableStore.read, DurableStore.write, KernelRule.apply, GradientTransport.take
    write_shadow, read_sums = DurableStore.write_shadow, SentSums.read
    fill, empty, of_ranks = Bounce._fill, Bounce._empty, Bucket.of
    out, back = DeviceCopies.out, DeviceCopies.back
    give, end, given = HostSide.begin, HostSide.end, dict[HostWork, Any]()
    scratch_calls = {name: getattr(Scratch, name) for name in ("read", "write")}
    arithmetic = {name: getattr(DeviceGradients, name) for name in ("put", "add", "rescale_and_add")}

    def watch_read(store: Any, extent: Any, address: int, nbytes: int, **options: Any) -> Any:
        device.host_access(address, nbytes, writes=True)
        return read(store, extent, address, nbytes, **options)

    def watch_write(store: Any, extent: Any, address: int, nbytes: int, **options: Any) -> Any:
        device.host_access(address, nbytes, writes=False)
        return write(store, extent, address, nbytes, **options)

    def watch_write_shadow(store: Any, extent: Any, address: int, nbytes: int, **options: Any) -> Any:
        device.host_access(address, nbytes, writes=False)
        return write_shadow(store, extent, address, nbytes, **options)

    def watch_apply(rule: Any, frozen: Any, tile: Any, start: int, stop: int, at: Any, native: Any) -> None:
        if isinstance(native, (kernels.OnHost, kernels.OnQueue)):  # on the device, its stream tells
            formats, by = rule._formats, HOST if isinstance(native, kernels.OnHost) else "queue"
            device.host_access(at.states, tile.nbytes, writes=True, by=by)
            device.host_access(at.weights, (stop - start) * formats.weights, writes=True, by=by)
            device.host_access(at.grads, (stop - start) * formats.grads, writes=False, by=by)
        apply(rule, frozen, tile, start, stop, at, native)

    def watch_give(side: Any, *args: Any) -> HostWork | None:
        work: HostWork | None = give(side, *args)
        if work is not None:
            given[work] = device.given("queue")
        return work

    def watch_end(side: Any, work: HostWork) -> None:
        end(side, work)
        device.host_waited(given.pop(work))

    def watch_arithmetic(name: str) -> Any:
        def watched_call(place: Any, spec: Any, *args: Any) -> float:
            device.compute_access(place._tensor(spec), writes=True)
            return float(arithmetic[name](place, spec, *args))

        return watched_call

    def watch_sums(sent: Any) -> Any:
        on_host, _ = sent.views
        device.host_access(on_host.data_ptr(), on_host.nbytes, writes=False)
        return read_sums(sent)

    def watch_fill(bounce: Any, piece: torch.Tensor, source: torch.Tensor) -> None:
        device.host_access(piece.data_ptr(), piece.nbytes, writes=True)
        fill(bounce, piece, source)

    def watch_empty(bounce: Any, piece: torch.Tensor, target: torch.Tensor) -> None:
        device.host_access(piece.data_ptr(), piece.nbytes, writes=False)
        empty(bounce, piece, target)

    def watch_take(gradients: Any, unit: Any, spec: Any, gradient: torch.Tensor, scale: float) -> None:
        device.compute_access(gradient, writes=True)
        take(gradients, unit, spec, gradient, scale)

    def watch_exchange(gradients: Any, spec: Any) -> torch.Tensor:
        elements = of_ranks(gradients, spec)
        device.compute_access(elements, writes=True)
        return elements

    def compute(module: nn.Module, args: Any) -> None:
        for parameter in module._parameters.values():
            if parameter is not None and type(parameter) is nn.Parameter:
                device.compute_access(parameter, writes=False)

    def watch_scratch(name: str) -> Any:
        def watched_call(scratch: Any, place: Any, address: int, **options: Any) -> Any:
            device.host_access(address, place.nbytes, writes=name == "read")
            return scratch_calls[name](scratch, place, address, **options)

        return watched_call

    def watch_out(copies: Any, address: int, source: torch.Tensor) -> Copying | None:
        device.compute_access(source, writes=True)
        return out(copies, address, source)

    def watch_back(copies: Any, target: torch.Tensor, address: int) -> Copying | None:
        copying = back(copies, target, address)
        device.compute_access(target, writes=False)
        return copying

    units = [item.unit for item in engine.plan.units]
    modules = dict.fromkeys([*engine.module.modules(), *(m for unit in units for m in unit.modules)])
    hooks = [module.register_forward_pre_hook(compute) for module in modules]
    with (
        mock.patch.object(DurableStore, "read", watch_read),
        mock.patch.object(DurableStore, "write", watch_write),
        mock.patch.object(KernelRule, "apply", watch_apply),
        mock.patch.multiple(HostSide, begin=watch_give, end=watch_end),
        mock.patch.object(DurableStore, "write_shadow", watch_write_shadow),
        mock.patch.object(GradientTransport, "take", watch_take),
        mock.patch.object(Bounce, "_fill", watch_fill),
        mock.patch.object(Bounce, "_empty", watch_empty),
        mock.patch.multiple(DeviceGradients, **{name: watch_arithmetic(name) for name in arithmetic}),
        mock.patch.multiple(Scratch, **{name: watch_scratch(name) for name in scratch_calls}),
        mock.patch.multiple(DeviceCopies, out=watch_out, back=watch_back),
        mock.patch.object(SentSums, "read", watch_sums),
        mock.patch.object(Bucket, "of", watch_exchange),
    ):
        yield
    for hook in hooks:
        hook.remove()


def least(make: Any, option: str, **budgets: int) -> int:
    """The least budget beside other ``budgets``, as the engine says."""
    try:
        make(**{option: 1}, **budgets).close()
    except BudgetError as error:
        return error.needed_bytes
    return 1


@contextlib.contextmanager
def counted(speculative: Counter[str]) -> Iterator[None]:
    """Count the speculative updates that are ``begun`` and ``flipped`` within."""
    begin, flip = SpeculativeUpdates.begin, SpeculativeUpdates._flip

    def count_begin(updates: SpeculativeUpdates, unit: UnitSpec, update: UnitUpdate | None) -> bool:
        speculative["begun"] += update is not None
        return begin(updates, unit, update)

    def count_flip(updates: SpeculativeUpdates, one: SpeculativeUpdate) -> None:
        speculative["flipped"] += 1
        flip(updates, one)

    with mock.patch.multiple(SpeculativeUpdates, begin=count_begin, _flip=count_flip):
        yield


def check(seed: int, folder: Path, speculative: Counter[str] | None = None) -> list[str]:
    """Run one program on the CPU, with everything in RAM and with little, and on the device; what was wrong. Early
    updates on the device are counted."""
    program = Program(seed)
    rng = random.Random(seed + 3)
    with OffloadEngine(program.model(), nvme_path=folder, **program.options()) as engine:
        expected = program.run(engine, Around())
    wrong = []

    def on_cpu(**budgets: int) -> OffloadEngine:
        options = program.options() | program.activations
        return OffloadEngine(program.model(), nvme_path=folder, **options, **budgets)

    host_memory = int(least(on_cpu, "host_memory") * random.Random(seed + 4).choice((1, 1, 1.3, 2)))
    with on_cpu(host_memory=host_memory) as engine:
        if not _equal(program.run(engine, Around()), expected):
            wrong.append(f"other bits on the CPU with {host_memory} bytes")
    eagerness = rng.choice((0.0, 0.3, 0.9))
    link_speed = random.Random(seed + 5).choice((1.0, 1e9, 1e15, 1e15))  # updates on the CPU, on both, on the device
    auto = random.Random(seed + 6).choice((None, None, None, None if program.deep else 1 << 40, 500_000, 900_000))
    if auto is not None and program.model().vocabulary == HUGE_VOCAB:
        auto *= 20
    memory_bytes, queue_depth = auto or 1 << 40, random.Random(seed + 7).choice((2, 8, 64))
    device = SimulatedDevice(seed, eagerness, memory_bytes=memory_bytes, link_speed=link_speed, queue_depth=queue_depth)
    around = AroundDevice(
        seed, device, may_lack_memory=auto is None and program.options()["gradient_accumulation_steps"] == 1
    )

    def make(**budgets: int) -> OffloadEngine:
        options = program.options() | program.activations
        return OffloadEngine(program.model(), nvme_path=folder, device=device, **options, **budgets)

    budgets: dict[str, int] = {}
    if auto is None:
        share = rng.choice((1, 1.3, 3, 4, 4, 4, 5, 20))
        budgets["device_memory"] = int(least(make, "device_memory") * (min(share, 3) if program.deep else share))
    if rng.random() < 0.8 or program.deep:
        budgets["host_memory"] = int(least(make, "host_memory", **budgets) * rng.choice((1, 1, 1.3, 2)))
    engine = make(**budgets)
    device.most_allocated_bytes = device.allocated_bytes
    with (
        counted(Counter() if speculative is None else speculative),
        watched(device, engine),
        warnings.catch_warnings(record=True) as said,
    ):
        warnings.simplefilter("always")
        try:
            found = program.run(engine, around)
            allowed = engine.plan.device.total_bytes - engine.plan.device.gradients_bytes
        finally:
            engine.close()
            around.close()
    if any("memory for one more unit than was planned" in str(warning.message) for warning in said):
        # A block's second call, recomputed inside of another unit's backward, which no structure of the model shows.
        allowed += max(item.unit.numel for item in engine.plan.units) * engine.config.dtype.itemsize
    if not _equal(found, expected):
        wrong.append("other bits on the device than on the CPU")
    if device.most_allocated_bytes > allowed:
        wrong.append(f"{device.most_allocated_bytes} bytes of weights on the device, {allowed} were planned")
    if device.allocated_bytes or device.pinned:
        wrong.append(f"{device.allocated_bytes} bytes and {len(device.pinned)} pinned ranges are left")
    return wrong + device.violations[:5]


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return torch.equal(left.nan_to_num(), right.nan_to_num())
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(_equal(a, b) for a, b in zip(left, right, strict=True))
    return bool(left == right or (left != left and right != right))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0, help="of the first program; the next ones count up")
    parser.add_argument("--seconds", type=float, default=60, help="how long to go on")
    parser.add_argument("--programs", type=int, default=1 << 62, help="how many to run at most")
    parser.add_argument("--path", type=Path, default=Path(tempfile.gettempdir()), help="a folder for the swap store")
    options = parser.parse_args()
    torch.set_num_threads(1)  # models are small, and threads that wait for one another take the time of others
    deadline, seed, failed = time.monotonic() + options.seconds, options.seed, 0
    speculative: Counter[str] = Counter()
    while time.monotonic() < deadline and seed - options.seed < options.programs:
        try:
            wrong = check(seed, options.path, speculative)
        except Exception:
            print(f"seed {seed}:", flush=True)
            raise
        failed += bool(wrong)
        for line in wrong:
            print(f"seed {seed}: {line}")
        seed += 1
    count = seed - options.seed
    print(
        f"{count} programs from seed {options.seed}: {failed} went wrong; {speculative['begun']} speculative updates "
        f"were begun on the device and {speculative['flipped']} of them flipped"
    )
    if count >= NUM_SPECULATIVE and not speculative["flipped"]:
        print("no speculative update was of use: the programs do not show what they are for")
        return 1
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
