"""Programs whose bytes are counted: shapes of models, loops and options. See ``traffic.py``."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

sys.path.append(str(Path(__file__).parents[1] / "tests"))

from tiny import Block, Tiny, loss_of

Step = Callable[[Any, int], None]


@dataclass(frozen=True)
class Case:
    name: str
    make: Callable[[], nn.Module]
    step: Step
    """Runs a step of this number, on the engine or what stands for it."""
    options: dict[str, Any] = field(default_factory=dict)
    like: str | None = None
    """Case that moves the same bytes."""
    shared: int = 1
    """Micro-batches that share one coming of the weights."""
    is_planned: bool = True
    """Each unit is used once forward and once backward: what a plan can know before the first step."""
    takes_weights_out: bool = False
    """The caller uses weights outside of their modules: each such use may bring the unit in anew."""
    gives: int = 1
    """Times that a backward comes to a unit's gradients, others between: those of a weight that is used inside of its
    module and outside, of pieces that are used several times, of a list of weights that are stacked."""
    needs_of: Callable[[], nn.Module] | None = None
    """Model that shows them, where this one cannot."""

    def but(self, name: str, **changes: Any) -> Case:
        options = {**self.options, **changes.pop("options", {})}
        changes.setdefault("like", self.name)
        return replace(self, name=name, options=options, **changes)


# Batches and steps.


def batch(number: int, size: int = 4) -> tuple[Tensor, Tensor]:
    tokens = torch.randint(0, 256, (size, 17), generator=torch.Generator().manual_seed(number))
    return tokens[:, :-1], tokens[:, 1:]


def _pass(run: Any, number: int) -> None:
    tokens, targets = batch(number)
    run.backward(loss_of(run(tokens), targets))


def plainly(run: Any, index: int) -> None:
    _pass(run, index)
    run.step()


def accumulating(count: int) -> Step:
    def step(run: Any, index: int) -> None:
        for number in range(count):
            _pass(run, count * index + number)
            if hasattr(run, "config") and number < count - 1:
                run.step()
        run.step()

    return step


def together(count: int) -> Step:
    def step(run: Any, index: int) -> None:
        def of_one(number: int) -> None:
            _pass(run, number)

        run.together([count * index + number for number in range(count)], of_one)
        run.step()

    return step


def evaluating(run: Any, index: int) -> None:
    with torch.no_grad():
        run(batch(1000 + index)[0])
    plainly(run, index)


def evaluating_between(run: Any, index: int) -> None:
    loss = loss_of(run(batch(index)[0]), batch(index)[1])
    with torch.no_grad():
        run(batch(1000 + index)[0])
    run.backward(loss)
    run.step()


def two_graphs(run: Any, index: int) -> None:
    losses = [loss_of(run(batch(number)[0]), batch(number)[1]) for number in (index, index + 1)]
    run.backward(losses[0] + losses[1])
    run.step()


def logging(run: Any, index: int) -> None:
    plainly(run, index)
    if hasattr(run, "report"):
        run.report()
        str(run.plan)


def norms_read(run: Any, index: int) -> None:
    """The loop looks at each gradient's norm, as loggers do."""
    _pass(run, index)
    module = run.module if hasattr(run, "config") else run.model
    [parameter.grad.norm() for parameter in module.parameters() if parameter.grad is not None]
    run.step()


def clipped_by_hand(run: Any, index: int) -> None:
    _pass(run, index)
    module = run.module if hasattr(run, "config") else run.model
    torch.nn.utils.clip_grad_norm_(module.parameters(), 0.1)
    run.step()


def by_optimizer(run: Any, index: int, *, set_to_none: bool = True) -> None:
    """The loop of plain PyTorch; of those who have gradients of zeros between steps, without ``set_to_none``."""
    tokens, targets = batch(index)
    loss = loss_of(run(tokens), targets)
    if not hasattr(run, "config"):
        run.backward(loss)
        run.step()
        return
    run.optimizer.zero_grad(set_to_none=set_to_none)
    loss.backward()
    run.optimizer.step()


def twice_backward(run: Any, index: int) -> None:
    """Two losses of one graph."""
    out = run(batch(index)[0])
    loss = loss_of(out, batch(index)[1])
    backward = torch.Tensor.backward if hasattr(run, "config") else run.backward
    backward(loss, retain_graph=True)
    backward(out.square().mean())
    if hasattr(run, "config"):
        run.optimizer.step()
        run.optimizer.zero_grad()
    else:
        run.step()


def averaging(run: Any, index: int) -> None:
    """An average of the weights beside the model, as for evaluation: it reads each weight once."""
    plainly(run, index)
    module = run.module if hasattr(run, "config") else run.model
    average = run.__dict__.setdefault("_average", {})
    with torch.no_grad():
        for name, value in module.named_parameters():
            average[name] = torch.lerp(average.get(name, torch.zeros_like(value)), value, 0.1)


def generating(run: Any, index: int) -> None:
    tokens = batch(index)[0]
    with torch.no_grad():
        for _ in range(4):
            tokens = torch.cat([tokens[:, 1:], run(tokens)[:, -1:].argmax(-1)], 1)


def forward_only(run: Any, index: int) -> None:
    with torch.no_grad():
        run(batch(index)[0])


def scaled(run: Any, index: int) -> None:
    """A scaler of PyTorch's around the loop."""
    tokens, targets = batch(index)
    loss = loss_of(run(tokens), targets)
    if not hasattr(run, "config"):
        run.backward(loss)
        run.step()
        return
    scaler = run.__dict__.setdefault("_scaler_of_the_loop", torch.amp.GradScaler("cpu", init_scale=256.0))
    run.optimizer.zero_grad()
    scaler.scale(loss).backward()
    scaler.unscale_(run.optimizer)
    scaler.step(run.optimizer)
    scaler.update()


# Models.

WIDTH = 64


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return make()


class Blocks(Tiny):
    """Blocks, called in some way."""

    def __init__(self, count: int = 6, *, tied: bool = False, seq: bool = False, width: int = WIDTH) -> None:
        super().__init__(width, count)
        if tied:
            self.head.weight = self.embed.weight
        if seq:
            self.blocks = nn.Sequential(*self.blocks)

    def middle(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = self.through(block, x)
        return x

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)  # type: ignore[no-any-return]

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.middle(self.embed(tokens))))  # type: ignore[no-any-return]


class InSequence(Blocks):
    def __init__(self) -> None:
        super().__init__(seq=True)

    def middle(self, x: Tensor) -> Tensor:
        return self.blocks(x)  # type: ignore[no-any-return, operator]


class Checkpointed(Blocks):
    def __init__(self, *, reentrant: bool, **more: Any) -> None:
        super().__init__(**more)
        self.reentrant = reentrant

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return checkpoint(block, x, use_reentrant=self.reentrant)  # type: ignore[no-any-return]


class InHalves(Checkpointed):
    """Two checkpoints within each block."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__(reentrant=reentrant)
        for block in self.blocks:
            block.forward = partial(self._compute, block)

    def _compute(self, block: Any, x: Tensor) -> Tensor:
        hidden = checkpoint(lambda x: F.gelu(block.up(block.norm(x))), x, use_reentrant=self.reentrant)
        return x + checkpoint(block.down, hidden, use_reentrant=self.reentrant)  # type: ignore[no-any-return]

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x)  # type: ignore[no-any-return]


class InSegments(Checkpointed):
    """Two blocks to a checkpoint."""

    def middle(self, x: Tensor) -> Tensor:
        blocks = list(self.blocks)
        for start in range(0, len(blocks), 2):
            x = checkpoint(nn.Sequential(*blocks[start : start + 2]), x, use_reentrant=self.reentrant)
        return x


def _keeps_products(context: Any, operation: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    products = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if operation in products else CheckpointPolicy.PREFER_RECOMPUTE


class Selective(Blocks):
    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        modes = partial(create_selective_checkpoint_contexts, _keeps_products)
        return checkpoint(block, x, use_reentrant=False, context_fn=modes)  # type: ignore[no-any-return]


class Twice(Blocks):
    """Each block twice, one after the other."""

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(block(x))  # type: ignore[no-any-return]


class TwoRounds(Blocks):
    """All blocks, and all of them again."""

    def middle(self, x: Tensor) -> Tensor:
        for _ in range(2):
            x = super().middle(x)
        return x


class Owner(Blocks):
    """The whole model is a unit of its own parameters, around all others."""

    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.randn(WIDTH) / 10)

    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return block(x) * self.shift.cos()  # type: ignore[no-any-return]


class OfBlocks(nn.Module):
    """A block that owns a scale, and has blocks in it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.inner = nn.ModuleList(Block(WIDTH) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x * self.scale)
        return x


class Nested(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(OfBlocks() for _ in range(3))


class Hooked(Blocks):
    """Hooks of the user's around every module, forward and backward."""

    def __init__(self) -> None:
        super().__init__()
        for module in self.modules():
            module.register_forward_hook(lambda module, args, output: None)
            module.register_full_backward_hook(lambda module, into, out: None)


class HookedGradients(Blocks):
    """Hooks of the user's on every gradient."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.parameters():
            parameter.register_hook(lambda gradient: gradient * 0.5)
            parameter.register_post_accumulate_grad_hook(lambda parameter: None)


class Adapter(nn.Module):
    """A frozen layer, and a small one beside it that is trained."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Linear(base.in_features, 4, bias=False)
        self.up = nn.Linear(4, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))  # type: ignore[no-any-return]


class Adapted(Blocks):
    """Small layers are trained beside frozen ones."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        for block in self.blocks:
            block.up, block.down = Adapter(block.up), Adapter(block.down)


class WeightsOutside(Blocks):
    """A penalty over all weights, taken by the model after its blocks."""

    def forward(self, tokens: Tensor) -> Tensor:
        out = super().forward(tokens)
        return out + 1e-3 * sum(block.up.weight.square().mean() for block in self.blocks)


class Functional(Blocks):
    """The caller takes weights out of the modules."""

    def through(self, block: Any, x: Tensor) -> Tensor:
        h = F.linear(block.norm(x), block.up.weight, block.up.bias)
        return x + F.linear(F.gelu(h), block.down.weight, block.down.bias)


class ByParts(Blocks):
    """The caller calls the modules in the blocks."""

    def through(self, block: Any, x: Tensor) -> Tensor:
        return x + block.down(F.gelu(block.up(block.norm(x))))  # type: ignore[no-any-return]


class Partly(Blocks):
    """Every other block is frozen."""

    def __init__(self) -> None:
        super().__init__()
        for block in list(self.blocks)[::2]:
            block.requires_grad_(False)


class Base(Blocks):
    """All but the last block and the head is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)
        self.blocks[-1].requires_grad_(True)
        self.head.requires_grad_(True)


class Skipped(Blocks):
    """Some blocks are never called."""

    def middle(self, x: Tensor) -> Tensor:
        for block in list(self.blocks)[::2]:
            x = block(x)
        return x


class Detached(Blocks):
    """The first half runs without gradients."""

    def middle(self, x: Tensor) -> Tensor:
        blocks = list(self.blocks)
        with torch.no_grad():
            for block in blocks[:3]:
                x = block(x)
        for block in blocks[3:]:
            x = block(x)
        return x


class WithDropout(Blocks):
    def through(self, block: nn.Module, x: Tensor) -> Tensor:
        return F.dropout(block(x), 0.1, self.training)


class Reversed(Blocks):
    """Blocks in the reverse order of their registration."""

    def middle(self, x: Tensor) -> Tensor:
        for block in reversed(list(self.blocks)):
            x = block(x)
        return x


class UNet(Blocks):
    """Outputs of the first blocks go to the last ones."""

    def middle(self, x: Tensor) -> Tensor:
        blocks, kept = list(self.blocks), []
        for block in blocks[:3]:
            x = block(x)
            kept.append(x)
        for block in blocks[3:]:
            x = block(x + kept.pop())
        return x


def compiled() -> nn.Module:
    model = Blocks()
    for block in model.blocks:
        block.compile(backend="eager")
    return model


def in_halves(make: Callable[[], nn.Module], dtype: torch.dtype) -> Callable[[], nn.Module]:
    return lambda: make().to(dtype)


PLAIN = Case("plain", Blocks, plainly)
FOUR = {"gradient_accumulation_steps": 4}


def cases() -> Iterator[Case]:
    """All of them."""
    yield PLAIN
    yield PLAIN.but("in a sequential", make=InSequence)
    yield PLAIN.but("hooks of the user's", make=Hooked)
    yield PLAIN.but("compiled blocks", make=compiled, needs_of=Blocks)
    yield PLAIN.but("report after each step", step=logging)
    yield PLAIN.but("plain loop", step=by_optimizer)
    yield PLAIN.but("dropout", make=WithDropout)
    yield PLAIN.but("norms of gradients read", step=norms_read)
    yield PLAIN.but("GradScaler", step=scaled)
    yield PLAIN.but("clipped rarely", options={"gradient_clipping": 1e6})
    yield PLAIN.but("U-net", make=UNet)
    yield PLAIN.but("no prefetch", options={"prefetch": False})
    yield PLAIN.but("parts of blocks called", make=ByParts)
    yield PLAIN.but("threads", options={"io_backend": "threads"})
    yield PLAIN.but("reversed", make=Reversed, like=None)
    yield PLAIN.but("clipped always", options={"gradient_clipping": 1e-3}, like=None)
    yield PLAIN.but("clipped by hand", step=clipped_by_hand, like=None)
    yield PLAIN.but("zeros between steps", step=partial(by_optimizer, set_to_none=False))
    yield PLAIN.but("hooks on gradients", make=HookedGradients)
    yield PLAIN.but("two backwards", step=twice_backward, is_planned=False, like=None)
    yield PLAIN.but("average of weights", step=averaging, is_planned=False, like=None)
    yield PLAIN.but("two graphs", is_planned=False, step=two_graphs, like=None)
    yield PLAIN.but("evaluation before", is_planned=False, step=evaluating, like=None)
    yield PLAIN.but("evaluation between", is_planned=False, step=evaluating_between, like=None)
    yield PLAIN.but("generation", step=generating, like=None)
    yield PLAIN.but("generation, not trained", step=generating, options={"optimizer": None, "lr": None}, like=None)
    yield PLAIN.but("forward, not trained", step=forward_only, options={"optimizer": None, "lr": None}, like=None)
    # Checkpoints.
    yield PLAIN.but("reentrant", make=partial(Checkpointed, reentrant=True))
    yield PLAIN.but("not reentrant", make=partial(Checkpointed, reentrant=False))
    yield PLAIN.but("selective", make=Selective)
    yield PLAIN.but("halves of blocks, reentrant", make=partial(InHalves, reentrant=True))
    yield PLAIN.but("halves of blocks, not reentrant", make=partial(InHalves, reentrant=False))
    yield PLAIN.but("segments, reentrant", make=partial(InSegments, reentrant=True), like=None)
    yield PLAIN.but("segments, not reentrant", make=partial(InSegments, reentrant=False), like="segments, reentrant")
    for mode in ("recompute", "host", "nvme"):
        yield PLAIN.but(f"activations {mode}", options={"activations": mode, "activation_memory": "1MiB"})
    yield PLAIN.but("activations nvme, little memory", options={"activations": "nvme", "activation_memory": "64KiB"})
    # Micro-batches.
    loop = PLAIN.but("four in a loop", step=accumulating(4), options=FOUR, like=None)
    once = PLAIN.but("four together", step=together(4), options=FOUR, like=None, shared=4)
    yield loop
    yield once
    for name, make in {
        "in a sequential": InSequence,
        "reentrant": partial(Checkpointed, reentrant=True),
        "not reentrant": partial(Checkpointed, reentrant=False),
        "selective": Selective,
        "halves of blocks, reentrant": partial(InHalves, reentrant=True),
        "dropout": WithDropout,
        "hooks of the user's": Hooked,
        "compiled blocks": compiled,
        "U-net": UNet,
    }.items():
        yield loop.but(f"four in a loop, {name}", make=make, needs_of=Blocks if make is compiled else None)
        if name != "dropout":
            yield once.but(f"four together, {name}", make=make, needs_of=Blocks if make is compiled else None)
    for mode in ("recompute", "host", "nvme"):
        yield once.but(f"four together, activations {mode}", options={"activations": mode, "activation_memory": "1MiB"})
    yield once.but(
        "four together, activations nvme, little memory",
        options={"activations": "nvme", "activation_memory": "64KiB"},
    )
    # A plan does not see either that a backward ends at the first trained block.
    not_planned = {"two rounds", "blocks never called", "half without gradients", "frozen base"}
    for name, make in {
        "tied": partial(Blocks, tied=True),
        "each block twice": Twice,
        "two rounds": TwoRounds,
        "owner of all": Owner,
        "nested units": Nested,
        "weights outside": WeightsOutside,
        "parts of blocks called": ByParts,
        "functional": Functional,
        "partly frozen": Partly,
        "frozen base": Base,
        "adapters": Adapted,
        "blocks never called": Skipped,
        "half without gradients": Detached,
    }.items():
        special: dict[str, Any] = {
            "make": make, "like": None, "is_planned": name not in not_planned,
            "takes_weights_out": name in ("weights outside", "functional"), "gives": 1 + (name == "weights outside"),
        }  # fmt: skip
        yield PLAIN.but(name, **special)
        yield PLAIN.but(f"{name}, recomputed", options={"activations": "recompute"}, **special)
        yield loop.but(f"four in a loop, {name}", **special)
        if not special["takes_weights_out"]:  # micro-batches run one after the other
            yield once.but(f"four together, {name}", **special)
    # Formats.
    for precision, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16)):
        yield PLAIN.but(precision, options={"precision": precision}, like=None, needs_of=Blocks)
        yield PLAIN.but(f"{precision}, built so", make=in_halves(Blocks, dtype), like=precision)
    yield PLAIN.but("int8 moments", options={"moments_dtype": "int8"}, like=None)
    yield PLAIN.but(
        "bf16 master and moments",
        needs_of=Blocks,
        like=None,
        options={"precision": "bf16", "master_dtype": "bf16", "moments_dtype": "bf16"},
    )
    yield PLAIN.but("sgd", options={"optimizer": "sgd", "lr": 1e-3}, like=None)
    yield PLAIN.but("lion", options={"optimizer": "lion"}, like=None)
    yield PLAIN.but("muon", options={"optimizer": "muon"}, like=None)
    yield PLAIN.but("NAdam of torch", options={"optimizer": torch.optim.NAdam}, like=None)


def of_experts() -> Iterator[Case]:
    """Mixtures of experts, as programs of others have them."""
    from strange_experts import PROGRAMS

    def step(run: Any, index: int) -> None:
        tokens = torch.randint(0, 50, (2, 16), generator=torch.Generator().manual_seed(index))
        run.backward(run(tokens))
        run.step()

    more = {"fused, three times", "fused, checkpointed", "tied"}  # experts come again while their layer is under way
    outside = {"stacked", "fused, a row of each token"}
    for name, make in PROGRAMS.items():
        yield Case(
            f"experts: {name}", make, step, is_planned=name not in more, takes_weights_out=name in outside,
            gives=3 if name in outside or name == "fused, three times" else 1,
        )  # fmt: skip


def of_zoo(names: Sequence[str] = ()) -> Iterator[Case]:
    """The zoo's models, one micro-batch a step."""
    from zoo import SPECIMENS

    for specimen in SPECIMENS.values():
        if names and specimen.name not in names:
            continue

        def step(run: Any, index: int, specimen: Any = specimen) -> None:
            torch.manual_seed(index)
            drawn = specimen.draw(torch.Generator().manual_seed(index))
            run.backward(specimen.loss(run(**drawn)))
            run.step()

        yield Case(f"zoo: {specimen.name}", lambda specimen=specimen: specimen.build().train(), step)
        yield Case(
            f"zoo: {specimen.name}, recomputed", lambda specimen=specimen: specimen.build().train(), step,
            options={"activations": "recompute"},
        )  # fmt: skip
