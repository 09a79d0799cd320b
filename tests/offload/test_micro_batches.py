"""Micro-batches that run together: the bits of the loop, and weights that come in once for all of them."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import forked
import pytest
import torch
from tiny import Block, Tiny, batches, least_budget, loss_of
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from offload import OffloadEngine, OffloadError
from offload.model.body import Body
from offload.model.interleave import MicroBatches
from offload.model.items import SharedItems
from offload.testing.simulated import SimulatedDevice

OPTIONS = {"lr": 1e-2, "tile_bytes": 65536}
Forward = Callable[[Tensor], Tensor]


@pytest.fixture(autouse=True)
def nothing_hangs() -> Iterator[None]:
    """Fails a test that takes minutes, or that leaves a thread."""

    def too_late(number: int, frame: Any) -> None:
        raise TimeoutError("the test did not end")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(180)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("offload-micro-batch")]


class Tied(Tiny):
    """The head is the embedding."""

    def __init__(self) -> None:
        super().__init__(width=64)
        self.head.weight = self.embed.weight


class Checkpointed(Tiny):
    """Blocks are computed twice."""

    def __init__(self, reentrant: bool) -> None:
        super().__init__(width=64)
        self.reentrant = reentrant

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.head(self.norm(x))


class InParts(Block):
    """Two checkpoints within one block."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda x: torch.nn.functional.gelu(self.up(self.norm(x))), x, use_reentrant=True)
        return x + checkpoint(self.down, hidden, use_reentrant=True)


class CheckpointedInParts(Tiny):
    def __init__(self) -> None:
        super().__init__(width=64)
        self.blocks = nn.ModuleList(InParts(64) for _ in range(4))


class Routed(Tiny):
    """Micro-batches take blocks by their tokens: other ones, in another number, some twice, some never."""

    def __init__(self) -> None:
        super().__init__(width=64, num_blocks=6)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        draw = random.Random(int(tokens.sum()))
        for block in draw.choices(self.blocks, k=draw.randrange(2, 9)):
            x = block(x)
        return self.head(self.norm(x))


class Twice(Tiny):
    """Each block is called twice, one call after the other."""

    def __init__(self) -> None:
        super().__init__(width=64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(block(x))
        return self.head(self.norm(x))


class Owner(Tiny):
    """The whole model is a unit of its own parameters, around all others."""

    def __init__(self) -> None:
        super().__init__(width=64)
        self.shift = nn.Parameter(torch.randn(64) / 10)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) + self.shift
        for block in self.blocks:
            x = block(x) * self.shift.cos()
        return self.head(self.norm(x))


class Keeping(Tiny):
    """An attribute carries a loss of one block to the end."""

    def __init__(self) -> None:
        super().__init__(width=64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            x = block(x)
            if index == 1:
                self.kept = x.square().mean()
        return self.head(self.norm(x)) * (1 + self.kept)


class Hooking(Tiny):
    """Each forward of a block hooks one of its weights, for good."""

    def __init__(self) -> None:
        super().__init__(width=64)
        self.blocks.append(_Hooking(64, 64))


class _Hooking(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.weight.register_hook(lambda gradient: 1.1 * gradient)
        return super().forward(x)


class Remembering(Tiny):
    """The state of a recurrent net goes on with the next forward."""

    def __init__(self) -> None:
        super().__init__(width=64)
        self.blocks = nn.ModuleList(nn.GRU(64, 64, batch_first=True) for _ in range(3))
        self.states: list[Tensor | None] = [None] * 3

    def forward(self, tokens: Tensor) -> Tensor:
        x, states = self.embed(tokens), []
        for block, state in zip(self.blocks, self.states, strict=True):
            out, state = block(x, state)
            x = x + out
            states.append(state.detach())
        self.states = states
        return self.head(self.norm(x))


class Enough(Exception):
    """Carries the output of the block that ends a forward."""


class _Ending(Block):
    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if x[0, 0, 0] > 0:
            raise Enough(out)
        return out


class Ending(Tiny):
    """A block ends the forward by an exception, sooner or later."""

    def __init__(self) -> None:
        super().__init__(width=64)
        self.blocks = nn.ModuleList(_Ending(64) for _ in range(4))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        try:
            for block in self.blocks:
                x = block(x)
        except Enough as enough:
            (x,) = enough.args
        return self.head(self.norm(x))


def _keeps_products(context: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operation in products else CheckpointPolicy.PREFER_RECOMPUTE


class WithPolicy(Tiny):
    """A policy says what checkpoints keep."""

    def __init__(self) -> None:
        super().__init__(width=64)

    def forward(self, tokens: Tensor) -> Tensor:
        x, modes = self.embed(tokens), partial(create_selective_checkpoint_contexts, _keeps_products)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=modes)
        return self.head(self.norm(x))


class Generated(Tiny):
    """The head is called with another weight than its own."""

    def __init__(self) -> None:
        super().__init__(width=64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        weight = {"weight": x.mean() * torch.ones(256, 64), "bias": torch.zeros(256)}
        return torch.func.functional_call(self.head, weight, (self.norm(x),))


class WithDropout(Tiny):
    def __init__(self) -> None:
        super().__init__(width=64)
        self.dropout = nn.Dropout(0.2)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.dropout(block(x))
        return self.head(self.norm(x))


class WithNorm(Tiny):
    """The embedding changes its own weights."""

    def __init__(self) -> None:
        super().__init__(width=64)
        self.embed = nn.Embedding(256, 64, max_norm=1.0)


class Centring(Tiny):
    """A buffer is read in the beginning of a forward, and written in its end."""

    centre: Tensor

    def __init__(self) -> None:
        super().__init__(width=64)
        self.register_buffer("centre", torch.zeros(64))

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) - self.centre
        for block in self.blocks:
            x = block(x)
        self.move(x.detach().mean((0, 1)))
        return self.head(self.norm(x))

    def move(self, mean: Tensor) -> None:
        with torch.no_grad():
            self.centre.lerp_(mean, 0.1)


class CentringByData(Centring):
    """Neither the buffer's identity nor its version shows it."""

    def move(self, mean: Tensor) -> None:
        self.centre.data.lerp_(mean, 0.1)


class CountingInAnObject(Centring):
    def __init__(self) -> None:
        super().__init__()
        self.shared = SimpleNamespace(inner=SimpleNamespace(calls={"all": 0}))

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (1 + 0.1 * self.shared.inner.calls["all"])

    def move(self, mean: Tensor) -> None:
        self.shared.inner.calls["all"] += 1


class CountingOutside(Centring):
    """It counts in a class that it names, in a tensor that is a global, and in another module of Python."""

    def __init__(self) -> None:
        super().__init__()
        Tally.calls = AS_MODULE.calls = 0
        CALLS.zero_()

    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * (1 + 0.1 * Tally.calls + 0.1 * CALLS.item() + 0.1 * AS_MODULE.calls)


class CountingInAClass(CountingOutside):
    def move(self, mean: Tensor) -> None:
        Tally.count()


class CountingInATensor(CountingOutside):
    def move(self, mean: Tensor) -> None:
        CALLS.add_(1)


class CountingInAModule(CountingOutside):
    def move(self, mean: Tensor) -> None:
        AS_MODULE.calls += 1


class Tally:
    calls = 0

    @classmethod
    def count(cls) -> None:
        cls.calls += 1


CALLS = torch.zeros(())
AS_MODULE = ModuleType("as_module")
AS_MODULE.calls = 0  # type: ignore[attr-defined]


class NormedTwice(Centring):
    """Statistics of torch's own modules are read and written in each of two uses of a block."""

    def __init__(self) -> None:
        super().__init__()
        self.statistics = nn.BatchNorm1d(64)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = self.statistics(block(x).transpose(1, 2)).transpose(1, 2)
        return self.head(self.norm(x))


class OwnGenerator(Centring):
    """All blocks draw from one generator of the program's own."""

    def __init__(self) -> None:
        super().__init__()
        self.draws = torch.Generator().manual_seed(1)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x) * (torch.rand(64, generator=self.draws) > 0.1)
        return self.head(self.norm(x))


@dataclass
class Outcome:
    losses: list[float]
    norms: list[float | None]
    weights: dict[str, Tensor]
    read_bytes: list[int]
    write_bytes: int
    planned_write_bytes: int
    """In all steps."""

    def check_bits_of(self, loop: Outcome) -> None:
        assert self.losses == loop.losses
        assert self.norms == loop.norms
        for name, weight in loop.weights.items():
            assert torch.equal(self.weights[name], weight), name


def built(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


def train(
    make: Callable[[], nn.Module],
    path: Path,
    k: int,
    *,
    together: bool,
    budget: float = 1.0,
    steps: int = 3,
    body: Callable[[OffloadEngine, Any], float] | None = None,
    at_once: int | None = None,
    **options: Any,
) -> Outcome:
    """A few steps of ``k`` micro-batches. ``budget``: so many times the least host memory."""
    options = {**OPTIONS, "gradient_accumulation_steps": k, **options}
    least = least_budget(built(make), path, **options)
    losses, norms, reads = [], [], []
    with OffloadEngine(built(make), nvme_path=path, host_memory=int(least * budget), **options) as engine:

        def run(micro_batch: Any) -> float:
            return (body or forward_and_backward)(engine, micro_batch)

        data, before, before_last = batches(steps * k), 0, 0
        for step in range(steps):
            if step == 1:  # in the first one a micro-batch runs alone
                before = moved_bytes(engine)[1]
            if step == steps - 1:
                before_last = moved_bytes(engine)[0]
            micro_batches = iter(data[step * k : (step + 1) * k])
            losses += (
                engine.together(micro_batches, run, at_once) if together else [run(each) for each in micro_batches]
            )
            engine.step()
            report = engine.report()
            norms.append(report.grad_norm)
            reads.append(report.nvme_read_bytes)
        weights = {name: value.detach().clone() for name, value in engine.module.named_parameters()}
        read, written = moved_bytes(engine)
        reads[-1] = read - before_last  # all of its update, and nothing of the one before
        planned = (steps - 1) * engine.plan.step_write_bytes
    return Outcome(losses, norms, weights, reads, written - before, planned)


def moved_bytes(engine: OffloadEngine) -> tuple[int, int]:
    """Bytes that were read from the store so far, and written to it."""
    engine.synchronize()
    tiers = engine._session.parts.tiers
    if tiers.store is None:
        return 0, 0
    moved = tiers.store.statistics()
    return moved.read.bytes, moved.write.bytes


def forward_and_backward(engine: OffloadEngine, micro_batch: Any) -> float:
    loss = loss_of(engine(micro_batch[0]), micro_batch[1])
    engine.backward(loss)
    return loss.item()


def both(make: Callable[[], nn.Module], path: Path, k: int = 3, **options: Any) -> tuple[Outcome, Outcome]:
    """The loop, and together, which says nothing."""
    loop = train(make, path, k, together=False, **options)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="engine.together")
        return loop, train(make, path, k, together=True, **options)


@pytest.mark.parametrize(
    ("k", "budget"),
    [(1, 1.0), (2, 1.6), (2, 20.0), (4, 1.0), (4, 20.0)],
    ids=["1-least", "2-half", "2-all", "4-least", "4-all"],
)
def test_the_bits_are_those_of_the_loop(k: int, budget: float, tmp_path: Path):
    loop, together = both(lambda: Tiny(width=64), tmp_path, k, budget=budget)
    together.check_bits_of(loop)


@pytest.mark.parametrize(
    ("make", "share"),
    [
        (Tied, 0.5),
        (lambda: Checkpointed(reentrant=True), 0.5),
        (lambda: Checkpointed(reentrant=False), 0.5),
        (CheckpointedInParts, 0.5),
        (Routed, 0.8),
        (Owner, 0.5),
        (WithPolicy, 0.5),
        (Twice, 0.5),
    ],
    ids=["tied", "reentrant", "not reentrant", "in parts", "routed", "owner", "policy", "twice"],
)
def test_models_of_all_kinds_run_together(make: Callable[[], nn.Module], share: float, tmp_path: Path):
    loop, together = both(make, tmp_path, k=4)
    together.check_bits_of(loop)
    assert together.read_bytes[-1] < share * loop.read_bytes[-1]
    if make is not Routed:  # whose micro-batches come to some units at other times than the others
        assert together.write_bytes <= 1.02 * together.planned_write_bytes


def test_a_recomputed_block_that_ends_a_forward_by_an_exception_runs_together(tmp_path: Path):
    loop, together = both(Ending, tmp_path, k=3, activations="recompute")
    together.check_bits_of(loop)


@pytest.mark.one_in(2)
@pytest.mark.parametrize(
    "options",
    [{"precision": "bf16"}, {"precision": "fp16"}, {"gradient_clipping": 0.1}, {"optimizer": torch.optim.Adamax}],
    ids=str,
)
def test_options_change_nothing_in_it(options: dict[str, Any], tmp_path: Path):
    loop, together = both(lambda: Tiny(width=64), tmp_path, **options)
    together.check_bits_of(loop)


def test_four_micro_batches_read_what_one_does(tmp_path: Path):
    make = lambda: Tiny(width=64, num_blocks=12)  # noqa: E731
    one = train(make, tmp_path, 1, together=True, steps=4)
    loop, together = both(make, tmp_path, 4, steps=4)
    together.check_bits_of(loop)
    assert loop.read_bytes[-1] > 2.0 * one.read_bytes[-1]
    assert together.read_bytes[-1] < 1.15 * one.read_bytes[-1]


def test_two_at_once_read_half_of_what_a_loop_does(tmp_path: Path):
    make = lambda: Tiny(width=64, num_blocks=12)  # noqa: E731
    loop, together = both(make, tmp_path, 4, at_once=2)
    together.check_bits_of(loop)
    assert together.read_bytes[-1] < 0.65 * loop.read_bytes[-1]


def test_each_unit_is_brought_in_once_in_each_direction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    least = least_budget(Tiny(width=64), tmp_path, **OPTIONS)
    with OffloadEngine(Tiny(width=64), nvme_path=tmp_path, host_memory=least, **OPTIONS) as engine:
        told: list[tuple[str, str]] = []
        passes, hooks = engine._session.trained.step.passes, engine._session.parts.hooks
        for name in ("begin_use", "end_backward"):

            def tell(unit: Any, name: str, call: Any) -> None:
                told.append((name, unit.name))
                call(unit)

            monkeypatch.setattr(passes, name, partial(tell, name=name, call=getattr(passes, name)))
        run = lambda each: loss_of(engine(each[0]), each[1]).backward()  # noqa: E731
        engine.together(batches(3), run)  # whose first forward is alone
        engine.optimizer.zero_grad()
        told.clear()
        engine.together(batches(3), run)
    names = [unit.spec.name for unit in hooks.units]
    assert [unit for name, unit in told if name == "begin_use"] == [*names, *names[-2::-1]]  # the last one stays
    assert [unit for name, unit in told if name == "end_backward"] == names[::-1]


@pytest.mark.parametrize(
    "options",
    [{}, {"activations": "host"}, {"activations": "nvme", "activation_memory": "64KiB"}],
    ids=["keep", "host", "nvme"],
)
def test_on_a_device_micro_batches_have_the_bits_of_the_loop_and_every_access_is_ordered(
    options: dict[str, Any], tmp_path: Path
):
    make = lambda: Tiny(width=64, num_blocks=6)  # noqa: E731
    loop = train(make, tmp_path, 4, together=False)
    device = SimulatedDevice(seed=3)
    train(make, tmp_path, 4, together=True, device=device, device_memory="2MiB", **options).check_bits_of(loop)
    assert device.violations == []
    assert device.allocated_bytes == 0


def test_on_a_device_weights_come_in_once_in_each_direction_for_all_micro_batches(tmp_path: Path):
    copied = {}
    for k, together in ((1, False), (4, False), (4, True)):
        options = {**OPTIONS, "gradient_accumulation_steps": k, "device_memory": "2MiB"}
        with OffloadEngine(Tiny(width=64, num_blocks=12), device=SimulatedDevice(), **options) as engine:
            run = partial(forward_and_backward, engine)
            for _ in range(3):  # the first forward of all is alone, and what is fetched ahead follows a step later
                engine.together(batches(k), run) if together else [run(each) for each in batches(k)]
                engine.step()
            copied[k, together] = engine.report().to_device_bytes
    assert copied[4, False] > 2 * copied[1, False]  # some of the copies stay from one micro-batch to the next
    assert copied[4, True] <= copied[1, False]


def test_activations_of_many_micro_batches_cross_once_each_way(tmp_path: Path):
    """More of one unit's than the memory holds: the first micro-batch's, which backward wants first, stay."""
    k, options = 32, {"activations": "nvme", "activation_memory": "128KiB"}
    make = lambda: Tiny(width=64, num_blocks=6)  # noqa: E731
    least = least_budget(built(make), tmp_path, **OPTIONS, **options)
    given = {**OPTIONS, "gradient_accumulation_steps": k, **options}
    with OffloadEngine(built(make), nvme_path=tmp_path, host_memory=least, **given) as engine:
        losses = engine.together(batches(k), partial(forward_and_backward, engine))
        engine.step()
        use = engine.report().activations
    assert use.read_bytes <= use.write_bytes <= use.kept_bytes
    assert use.host_bytes_max <= 128 << 10
    with OffloadEngine(built(make), **OPTIONS, gradient_accumulation_steps=k) as engine:
        assert losses == [forward_and_backward(engine, each) for each in batches(k)]


def test_micro_batches_that_only_look_need_no_backward(tmp_path: Path):
    least = least_budget(built(lambda: Tiny(width=64)), tmp_path, **OPTIONS)
    made = OffloadEngine(built(lambda: Tiny(width=64)), nvme_path=tmp_path, host_memory=least, **OPTIONS)
    with made as engine, torch.no_grad():
        loop = [engine(each[0]) for each in batches(3)]
        together = engine.together(batches(3), lambda each: engine(each[0]))
    assert not any(each.requires_grad for each in together)
    assert all(map(torch.equal, loop, together))


# Where the order of the loop matters.


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (WithDropout, "draws random numbers"),
        (WithNorm, "changes its weights"),
        (Keeping, "Keeping keeps something"),
        (Remembering, "Remembering keeps something"),
        (Generated, "Linear keeps something"),
        (Hooking, "Hooking keeps something"),
        (Centring, "Centring keeps something"),
        (CentringByData, "writes to a tensor that a module keeps"),
        (CountingInAnObject, "SimpleNamespace keeps something"),
        (CountingInAClass, "keeps something"),
        (CountingInATensor, "keeps something"),
        (CountingInAModule, "keeps something"),
        (NormedTwice, "several times, which keeps statistics"),
        (OwnGenerator, "draws random numbers"),
    ],
)
def test_micro_batches_run_one_by_one_where_they_must(make: Callable[[], nn.Module], reason: str, tmp_path: Path):
    loop = train(make, tmp_path, 3, together=False)
    with pytest.warns(UserWarning, match=f"engine.together.*{reason}") as caught:
        together = train(make, tmp_path, 3, together=True)
    together.check_bits_of(loop)
    assert len([each for each in caught if "together" in str(each.message)]) == 1


@pytest.mark.parametrize("holder", [Tally, AS_MODULE])
def test_what_the_function_hands_on_in_a_class_or_a_module_of_python_is_not_shared(holder: Any, tmp_path: Path):
    def carrying(engine: OffloadEngine, micro_batch: Any) -> float:
        scale = Tally.calls + AS_MODULE.calls
        holder.calls = 0.5 * scale + micro_batch[0].float().mean().item()
        loss = loss_of(engine(micro_batch[0]), micro_batch[1]) * (1 + scale)
        engine.backward(loss)
        return loss.item()

    Tally.calls = AS_MODULE.calls = 0
    loop = train(lambda: Tiny(width=64), tmp_path, 3, together=False, body=carrying)
    Tally.calls = AS_MODULE.calls = 0
    with pytest.warns(UserWarning, match="calls, and a micro-batch changes it"):
        train(lambda: Tiny(width=64), tmp_path, 3, together=True, body=carrying).check_bits_of(loop)


def test_a_function_whose_file_was_edited_while_it_runs_reads_all_that_it_names(tmp_path: Path):
    program = "seen = [0]\n\ndef run(item):\n    item = item + seen[0]\n    seen[0] = item\n"
    file = tmp_path / "program.py"
    file.write_text(program)
    names: dict[str, Any] = {}
    exec(compile(program, str(file), "exec"), names)
    file.write_text("seen = [0]\n\ndef other(item):\n    seen[0] = item\n\n" + program)
    body = Body(names["run"], [], lambda module: False)
    names["run"](1)
    assert body.changed() == "seen"


def test_numbers_drawn_before_the_model_hold_back_the_first_call_alone(tmp_path: Path):
    def noisy(engine: OffloadEngine, micro_batch: Any) -> float:
        tokens = torch.where(torch.rand(micro_batch[0].shape) < 0.1, 3, micro_batch[0])
        return forward_and_backward(engine, (tokens, micro_batch[1]))

    loop, together = both(lambda: Tiny(width=64, num_blocks=12), tmp_path, 4, body=noisy)
    together.check_bits_of(loop)
    assert together.read_bytes[0] > 0.8 * loop.read_bytes[0]
    assert together.read_bytes[-1] < 0.6 * loop.read_bytes[-1]


def test_parametrisations_that_are_cached_are_not_shared(tmp_path: Path):
    class Halving(nn.Module):
        def forward(self, weight: Tensor) -> Tensor:
            return weight / 2

    class Halved(Tiny):
        def __init__(self) -> None:
            super().__init__(width=64)
            parametrize.register_parametrization(self.head, "weight", Halving())

    def cached(engine: OffloadEngine, micro_batch: Any) -> float:
        with parametrize.cached():
            return forward_and_backward(engine, micro_batch)

    loop = train(Halved, tmp_path, 3, together=False, body=cached)
    with pytest.warns(UserWarning, match=r"engine.together.*parametrize\.cached"):
        train(Halved, tmp_path, 3, together=True, body=cached).check_bits_of(loop)


def test_casts_that_autocast_keeps_are_not_shared(tmp_path: Path):
    def cast(engine: OffloadEngine, micro_batch: Any, keep: bool = True) -> float:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=keep):
            loss = loss_of(engine(micro_batch[0]), micro_batch[1])
        engine.backward(loss)
        return loss.item()

    make = lambda: Tiny(width=64)  # noqa: E731
    loop = train(make, tmp_path, 3, together=False, body=cast)
    with pytest.warns(UserWarning, match="autocast keeps"):
        train(make, tmp_path, 3, together=True, body=cast).check_bits_of(loop)
    loop, together = both(make, tmp_path, 3, body=lambda engine, each: cast(engine, each, keep=False))
    together.check_bits_of(loop)


def test_modes_of_the_caller_are_those_of_each_micro_batch(tmp_path: Path):
    def seen(_: int) -> tuple[Any, ...]:
        return (
            torch.is_grad_enabled(),
            torch.is_inference_mode_enabled(),
            torch.get_default_device(),
            torch.is_autocast_enabled("cpu"),
            torch.get_autocast_dtype("cpu"),
            torch.get_num_threads(),
        )

    def runs_backward_itself(_: int) -> bool:
        return not torch._C._is_multithreading_enabled()

    with OffloadEngine(Tiny(width=64), **OPTIONS) as engine:
        for mode in (
            contextlib.nullcontext(),
            torch.no_grad(),
            torch.inference_mode(),
            torch.device("meta"),
            torch.autocast("cpu", torch.float16, cache_enabled=False),
        ):
            with mode:
                assert engine.together(range(2), seen) == [seen(0)] * 2
        assert engine.together(range(2), runs_backward_itself) == [True] * 2
        assert not runs_backward_itself(0)
        hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
        with hooks, pytest.warns(UserWarning, match="a mode of torch"):
            assert engine.together(range(2), lambda _: threading.current_thread()) == [threading.main_thread()] * 2


# Errors.


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[OffloadEngine]:
    model = built(lambda: Tiny(width=64))
    least = least_budget(model, tmp_path, **OPTIONS)
    with OffloadEngine(model, nvme_path=tmp_path, host_memory=least, **OPTIONS) as engine:
        yield engine


def check_that_it_trains(engine: OffloadEngine) -> None:
    """One more step has the loss and the norm of an engine that nothing has happened to."""
    losses = engine.together(batches(2), lambda each: forward_and_backward(engine, each))
    engine.optimizer.step()
    with OffloadEngine(built(lambda: Tiny(width=64)), **OPTIONS) as other:
        assert losses == [forward_and_backward(other, each) for each in batches(2)]
        other.optimizer.step()
        assert engine.report().grad_norm == other.report().grad_norm


@pytest.mark.one_in(3)
@pytest.mark.parametrize("which", [0, 1, 3])
@pytest.mark.parametrize("where", ["before", "forward", "loss", "backward", "after"])
def test_an_error_of_one_ends_all(engine: OffloadEngine, where: str, which: int):
    class Ours(BaseException):
        pass

    def fail_at(place: str, index: int) -> None:
        if (place, index) == (where, which):
            raise Ours

    numbered = list(enumerate(batches(4)))
    present = {}

    def in_backward(gradient: Tensor, index: int) -> Tensor:
        fail_at("backward", index)
        return gradient

    def in_forward(module: nn.Module, args: Any, output: Tensor) -> None:
        index = present[threading.get_ident()]
        fail_at("forward", index)
        output.register_hook(lambda gradient: in_backward(gradient, index))

    hook = engine.module.blocks[2].up.register_forward_hook(in_forward)

    def run(item: Any) -> None:
        index, micro_batch = item
        present[threading.get_ident()] = index
        fail_at("before", index)
        logits = engine(micro_batch[0])
        fail_at("loss", index)
        engine.backward(loss_of(logits, micro_batch[1]))
        fail_at("after", index)

    with pytest.raises(Ours):
        engine.together(numbered, run)
    hook.remove()
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    check_that_it_trains(engine)


def test_an_interrupt_ends_all(engine: OffloadEngine):
    """It comes to the main thread, while another one computes."""

    def run(micro_batch: Any) -> None:
        if micro_batch is data[1]:
            os.kill(os.getpid(), signal.SIGINT)
        engine.backward(loss_of(engine(micro_batch[0]), micro_batch[1]))

    data = batches(3)
    with pytest.raises(KeyboardInterrupt):
        engine.together(data, run)
    check_that_it_trains(engine)


def test_a_second_interrupt_is_not_held_up_by_what_computes(engine: OffloadEngine, monkeypatch: pytest.MonkeyPatch):
    interrupted, go_on, wait_for_end = threading.Event(), threading.Event(), MicroBatches._wait_for_end

    def wait_again(group: MicroBatches) -> None:
        if group._error is not None:
            interrupted.set()
        wait_for_end(group)

    monkeypatch.setattr(MicroBatches, "_wait_for_end", wait_again)

    def run(micro_batch: Any) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        interrupted.wait(30)  # two signals at once are one
        os.kill(os.getpid(), signal.SIGINT)
        go_on.wait(30)

    with pytest.raises(KeyboardInterrupt):
        engine.together(batches(2), run)
    with pytest.raises(OffloadError, match="that may still run"):
        engine(batches(1)[0][0])
    go_on.set()
    for thread in threading.enumerate():
        if thread.name.startswith("offload-micro-batch"):
            thread.join(30)


def test_a_program_that_an_error_of_a_micro_batch_ends_does_not_wait_for_its_units(tmp_path: Path):
    """An update waits for the memory of a unit that the error has left in use, and the end waits for the update."""
    program = """
import os, sys
import torch
from offload import OffloadEngine

class Layer(torch.nn.Linear):
    def forward(self, x):
        y = super().forward(x)
        if os.environ.pop("FAILS", ""):
            raise ValueError("the model's own")
        return y

def run(batch):
    engine.backward(engine(batch).square().mean())

model = torch.nn.Sequential(*(Layer(1024, 1024) for _ in range(6)))
engine = OffloadEngine(model, nvme_path=sys.argv[1], host_memory="24MiB", optimizer="sgd")
engine.together(torch.ones(2, 1, 1024), run)
engine.step()
os.environ["FAILS"] = "True"
engine.together(torch.ones(2, 1, 1024), run)
"""
    found = forked.run(program, tmp_path)
    assert found.returncode == 1
    assert "the model's own" in found.stderr


@pytest.mark.parametrize("end", ["engine.close()", "engine.close(discard=True)", ""], ids=["close", "discard", "exit"])
def test_memory_that_an_interrupted_micro_batch_computes_with_is_there_until_it_ends(tmp_path: Path, end: str):
    """The window of the unit that computes would be unmapped under it. Without ``close`` the program's end waits."""
    program = f"""
import ctypes, os, signal, sys, time
import torch
from offload import OffloadEngine

class Layer(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.eye(512))

    def forward(self, x):
        y = x @ self.weight
        if os.environ.pop("INTERRUPTED", ""):
            address = self.weight.data_ptr()
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.2)
            for _ in range(100):  # as a kernel that takes long
                ctypes.string_at(address, 1 << 20)
                time.sleep(0.01)
        return y

def run(batch):
    engine.backward(engine(batch).square().mean())

model = torch.nn.Sequential(*(Layer() for _ in range(6)))
engine = OffloadEngine(model, nvme_path=sys.argv[1], host_memory="12MiB", optimizer="sgd")
engine.together(torch.ones(2, 1, 512), run)
engine.step()
os.environ["INTERRUPTED"] = "True"
try:
    engine.together(torch.ones(2, 1, 512), run)
except KeyboardInterrupt:
    print("interrupted", flush=True)
    {end}
"""
    found = forked.run(program, tmp_path)
    assert found.returncode == 0, found.stderr
    assert "interrupted" in found.stdout


def test_an_error_of_the_data_is_raised_as_it_is(engine: OffloadEngine):
    def data() -> Iterator[Any]:
        yield from batches(2)
        raise ValueError("no more to read")

    with pytest.raises(ValueError, match="no more to read"):
        engine.together(data(), lambda each: forward_and_backward(engine, each))
    check_that_it_trains(engine)


@pytest.mark.parametrize(
    ("misuse", "message"),
    [
        (lambda engine: engine.optimizer.step(), "a step"),
        (lambda engine: engine.optimizer.zero_grad(), "zero_grad"),
        (lambda engine: engine.together([1], print), "within a micro-batch of another one"),
    ],
    ids=["step", "zero_grad", "together"],
)
def test_what_concerns_all_is_refused_in_one(engine: OffloadEngine, misuse: Any, message: str):
    def run(micro_batch: Any) -> None:
        forward_and_backward(engine, micro_batch)
        misuse(engine)

    with pytest.raises(OffloadError, match=message):
        engine.together(batches(2), run)
    check_that_it_trains(engine)


def test_a_backward_after_the_call_is_refused(engine: OffloadEngine):
    losses = engine.together(batches(2), lambda each: loss_of(engine(each[0]), each[1]))
    with pytest.raises(OffloadError, match="Call the backward within the function"):
        sum(losses).backward()
    engine.optimizer.zero_grad()
    check_that_it_trains(engine)


def test_an_order_that_no_loop_has_is_refused(engine: OffloadEngine):
    """The third one draws in the model, and then the second does. The first call of all, which is alone, does not."""

    def run(item: Any) -> None:
        index, micro_batch = item
        logits = engine(micro_batch[0])
        if index == 2:
            torch.rand(1)
        engine.backward(loss_of(logits, micro_batch[1]))
        if index == 1:
            torch.rand(1)

    with pytest.warns(UserWarning, match="draws random"), pytest.raises(OffloadError, match="A loop has another order"):
        engine.together(enumerate(batches(3)), run)
    engine.together(enumerate(batches(3)), run)  # one after the other


def looks_at_a_gradient(engine: OffloadEngine) -> None:
    _ = next(engine.module.parameters()).grad


def writes_to_a_weight(engine: OffloadEngine) -> None:
    with torch.no_grad():
        engine.module.blocks[0].up.weight.mul_(0.9)


def freezes_a_block(engine: OffloadEngine) -> None:
    engine.module.blocks[0].requires_grad_(False)
    engine.module.blocks[0].requires_grad_(True)


def clips(engine: OffloadEngine) -> None:
    engine.clip_grad_norm_(1.0)


def saves_a_checkpoint(engine: OffloadEngine) -> None:
    with tempfile.TemporaryDirectory() as path:
        engine.save_checkpoint(path)


@pytest.mark.parametrize("act", [looks_at_a_gradient, writes_to_a_weight, freezes_a_block, clips, saves_a_checkpoint])
def test_what_all_micro_batches_have_in_common_is_touched_in_the_order_of_the_loop_or_not_at_all(engine, act):
    """The first call does not show it."""

    def run(item: Any) -> float:
        index, micro_batch = item
        loss = loss_of(engine(micro_batch[0]), micro_batch[1])
        engine.backward(loss)
        if index == 1:
            act(engine)
        return loss.item()

    with pytest.warns(UserWarning, match="one after the other"), pytest.raises(OffloadError, match="another order"):
        engine.together(enumerate(batches(3)), run)
    assert len(engine.together(enumerate(batches(3)), run)) == 3  # one after the other
    engine.step()


def test_a_call_within_a_forward_is_refused(engine: OffloadEngine):
    hook = engine.module.blocks[0].up.register_forward_hook(lambda *args: engine.together([1], print))
    with pytest.raises(OffloadError, match="within a forward or backward"):
        engine(batches(1)[0][0])
    hook.remove()
    check_that_it_trains(engine)


def test_a_thread_that_a_function_of_a_block_names_may_change_by_itself():
    watcher = threading.Thread()

    def watched(x: torch.Tensor) -> torch.Tensor:
        watcher.woken = object()  # type: ignore[attr-defined]
        return x

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.steps = nn.Linear(4, 4), [watched]

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.steps[0](self.linear(x))

    model = nn.Sequential(Watched(), Watched(), Watched())
    with OffloadEngine(model, gradient_accumulation_steps=3) as engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(2):  # the first forward of all is alone
            engine.together([torch.ones(2, 4)] * 3, lambda x: engine.backward(engine(x).sum()))
            engine.step()


@dataclass(eq=False)
class Document:
    hidden: float = 0.0


@pytest.mark.parametrize("moves", [True, False])
def test_items_hand_on_what_they_have_in_common_and_is_moved(moves: bool):
    document, items = Document(), SharedItems(lambda module: False)
    assert not items.is_changed_for({"document": [document], "own": [1]})
    if moves:
        document.hidden = 1.0
    assert items.is_changed_for({"document": [document], "own": [2]}) is moves


def test_what_a_data_loader_within_iterators_reads_is_known():
    class Rows(torch.utils.data.Dataset[float]):
        level = 1.0

        def __len__(self) -> int:
            return 4

        def __getitem__(self, index: int) -> float:
            return index * self.level

    rows = Rows()
    loader = iter(torch.utils.data.DataLoader(rows, 1))
    body = Body(print, enumerate(zip(loader, range(4), strict=True)), lambda module: False)
    assert body.changed() is None
    rows.level = 2.0
    assert body.changed() == "self.level"


def test_micro_batches_that_hold_a_lock_run_one_after_the_other(engine: OffloadEngine):
    lock = threading.Lock()

    def run(micro_batch: Any) -> None:
        with lock:
            forward_and_backward(engine, micro_batch)

    with pytest.warns(UserWarning, match="the function reads lock"):
        for _ in range(2):  # the first call of all runs alone
            engine.together(batches(3), run)
            engine.step()
