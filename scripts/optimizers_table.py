#!/usr/bin/env python3
"""Optimizers of libraries over the tiers, against plain torch: the table of docs/optimizers.md.

Each optimizer trains a small model for some steps, with a learning rate that changes on the way: in memory as ever, in
an engine with everything in host RAM, and in one with the least budget that it runs with, the rest on NVMe. Weights are
compared with those of plain torch. ``exact`` are equal bits, ``rounding`` less than a 1e-4th of what training moved;
anything else is an error of this script, unless the engine refuses: then the reason is in the table.

Libraries that are not installed are left out. ``--libraries`` is a directory that some were installed into
(``pip install --no-deps --target DIR pytorch_optimizer timm schedulefree lion-pytorch prodigyopt torch-optimi``).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import importlib.metadata
import importlib.util
import json
import sys
import tempfile
import types
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload import BudgetError, ConfigError, OffloadEngine
from offload.errors import OTHER_OPTIMIZERS

STEPS = 6
ROUNDING = 1e-4

BEGIN, END = "<!-- table -->", "<!-- end of table -->"

Row = tuple[str, str, str, str]
"""Library, name, result and note."""

TOO_SLOW = {"pytorch_optimizer Kron", "timm kron", "timm kronc", "timm kronw"}
"""A step of these takes minutes without opt_einsum."""

Build = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Candidate:
    """An optimizer of a library, and how to build it over a model."""

    library: str
    name: str
    build: Build


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.up = nn.Linear(64, 256)
        self.down = nn.Linear(256, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(32, 64), Block(), Block(), nn.LayerNorm(64), nn.Linear(64, 32))


def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Weights after some steps of an ordinary loop."""
    if callable(getattr(optimizer, "train", None)):  # schedule-free
        optimizer.train()
    generator = torch.Generator().manual_seed(1)
    for step in range(STEPS):
        if step == STEPS // 2:
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
        tokens = torch.randint(0, 32, (4, 9), generator=generator)
        optimizer.zero_grad()
        logits = model(tokens[:, :-1])
        nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()
    return {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def offloaded(build: Build, **options: Any) -> dict[str, torch.Tensor]:
    model = make_model()
    with OffloadEngine(model, optimizer=build(model), precision="fp32", **options) as engine:
        assert engine.optimizer is not None
        return train(model, engine.optimizer)


def least(build: Build, path: Path) -> int:
    """The least host memory that the engine asks for."""
    model = make_model()
    try:
        OffloadEngine(model, optimizer=build(model), precision="fp32", nvme_path=path, host_memory=1).close()
    except BudgetError as error:
        return error.needed_bytes
    raise AssertionError("an engine in one byte of memory")


def judge(candidate: Candidate, path: Path) -> tuple[str, str]:
    """The result of an optimizer, and what there is to say of it."""
    if f"{candidate.library} {candidate.name}" in TOO_SLOW:
        return "not tried", "a step takes minutes without opt_einsum"
    model = make_model()
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    try:
        expected = train(model, candidate.build(model))
    except Exception as error:
        try:
            offloaded(candidate.build)
        except ConfigError as refusal:
            return "refused", said(refusal)
        except Exception:
            pass
        return "not tried", f"plain torch raises: {said(error)}"
    if not all(value.isfinite().all() for value in expected.values()):
        return "not tried", "the weights of plain torch are not finite"
    try:
        runs = [
            offloaded(candidate.build),
            offloaded(candidate.build, nvme_path=path, host_memory=least(candidate.build, path)),
        ]
    except ConfigError as error:
        return "refused", said(error)
    except Exception as error:
        return "WRONG", f"{type(error).__name__}: {said(error)}"
    if all(torch.equal(run[name], value) for run in runs for name, value in expected.items()):
        return "exact", ""
    moved = sum(float((value - before[name]).square().sum()) for name, value in expected.items()) ** 0.5
    apart = max(sum(float((run[n] - value).square().sum()) for n, value in expected.items()) ** 0.5 for run in runs)
    share = apart / max(moved, 1e-30)
    return ("rounding" if share < ROUNDING else "WRONG"), f"{share:.0e} of what training moved"


def said(error: Exception) -> str:
    text = " ".join(str(error).split())
    text = text.removesuffix(f". {OTHER_OPTIMIZERS}")  # the page says it once
    return text.replace("|", "\\|")


# What there is.


def over(kind: Any) -> Build:
    """Build ``kind`` in the first of the usual forms that it takes and that trains in plain torch."""

    def matrices(model: nn.Module, *, others: bool) -> list[nn.Parameter]:
        return [parameter for parameter in model.parameters() if (parameter.ndim < 2) is others]

    forms: list[Build] = [
        lambda model: kind(model.parameters(), lr=1e-3),
        lambda model: kind(list(model.parameters()), lr=1e-3),
        lambda model: kind(model.parameters()),
        lambda model: kind(model, lr=1e-3),
        lambda model: kind(
            [
                {"params": matrices(model, others=False), "use_muon": True},
                {"params": matrices(model, others=True), "use_muon": False},
            ],
            lr=1e-3,
        ),
        lambda model: kind(matrices(model, others=False), lr=1e-3),
    ]
    found: list[Build] = []

    def build(model: nn.Module) -> torch.optim.Optimizer:
        for form in forms if not found else ():
            own = make_model()
            with contextlib.suppress(Exception):
                train(own, form(own))
                found.append(form)
                break
        return (found or forms)[0](model)

    return build


def candidate(library: str, kind: Any) -> Candidate:
    return Candidate(library, kind.__name__, over(kind))


def optimizers_in(module: Any) -> list[Any]:
    kinds = [kind for name, kind in sorted(vars(module).items()) if isinstance(kind, type) and name[0] != "_"]
    return [kind for kind in kinds if issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer]


def of_torch() -> Iterator[Candidate]:
    for kind in optimizers_in(torch.optim):
        yield candidate("torch", kind)
    for kind in (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD):
        yield candidate("torch", type(f"{kind.__name__} (a subclass)", (kind,), {}))


def of_pytorch_optimizer() -> Iterator[Candidate]:
    library = importlib.import_module("pytorch_optimizer")
    for name in sorted(library.get_supported_optimizers()):
        yield candidate("pytorch_optimizer", library.load_optimizer(name))


def of_timm() -> Iterator[Candidate]:
    if importlib.util.find_spec("torchvision") is None:  # which timm's models need, and its optimizers do not
        package, models = types.ModuleType("timm"), types.ModuleType("timm.models")
        package.__path__ = list(importlib.util.find_spec("timm").submodule_search_locations)  # type: ignore[union-attr]
        models.group_parameters = None  # type: ignore[attr-defined]
        sys.modules.update({"timm": package, "timm.models": models})
    module = importlib.import_module("timm.optim._optim_factory")
    for name in sorted(module.list_optimizers(exclude_filters=["fused*", "bnb*", "*lookahead*"])):
        if module.get_optimizer_info(name).opt_class.__module__.startswith("timm"):

            def build(model: nn.Module, name: str = name) -> torch.optim.Optimizer:
                return module.create_optimizer_v2(model.parameters(), name, lr=1e-3)  # type: ignore[no-any-return]

            yield Candidate("timm", name, build)
    lamb = importlib.import_module("timm.optim.lamb").Lamb
    yield Candidate("timm", "lamb, max_grad_norm=None", lambda m: lamb(m.parameters(), lr=1e-3, max_grad_norm=None))


def of_module(module: str, library: str) -> Callable[[], Iterator[Candidate]]:
    """All optimizers that a module has."""
    return lambda: (candidate(library, kind) for kind in optimizers_in(importlib.import_module(module)))


LIBRARIES = {
    "torch": of_torch,
    "pytorch_optimizer": of_pytorch_optimizer,
    "timm": of_timm,
    "schedulefree": of_module("schedulefree", "schedulefree"),
    "lion_pytorch": of_module("lion_pytorch", "lion-pytorch"),
    "prodigyopt": of_module("prodigyopt", "prodigyopt"),
    "optimi": of_module("optimi", "optimi"),
    "grokadamw": of_module("grokadamw", "grokadamw"),
    "torchao": of_module("torchao.optim", "torchao"),
}
"""By what is imported."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--libraries", type=Path, help="directory that libraries were installed into")
    parser.add_argument(
        "--nvme-path", type=Path, help="where to put what goes to NVMe (default: a temporary directory)"
    )
    parser.add_argument("--only", help="candidates whose library or name contains this")
    parser.add_argument("--results", type=Path, help="file of results: those that it has are not tried again")
    parser.add_argument("--page", type=Path, help="the page to write the table into, between its two marks")
    options = parser.parse_args()
    if options.libraries is not None:
        sys.path.append(str(options.libraries))
    torch.set_num_threads(1)
    torch.compiler.set_stance("force_eager")  # some compile their step, which takes longer than all of this
    warnings.simplefilter("ignore")
    known: dict[str, Row] = {}
    if options.results is not None and options.results.exists():
        known = {" ".join(row[:2]): tuple(row) for row in map(json.loads, options.results.read_text().splitlines())}
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(dir=options.nvme_path) as folder:
        for candidate in available():
            name = f"{candidate.library} {candidate.name}"
            if options.only and options.only not in name:
                continue
            row = known.get(name) or (candidate.library, candidate.name, *judge(candidate, Path(folder)))
            if options.results is not None and name not in known:
                with options.results.open("a") as results:
                    print(json.dumps(row), file=results)
            print(f"{row[0]:18} {row[1]:28} {row[2]:10} {row[3][:230]}", flush=True)
            rows.append(row)
    counts = Counter(result for _, _, result, _ in rows)
    print(dict(counts))
    if options.page is not None:
        write(options.page, rows, counts)
    return 1 if counts["WRONG"] else 0


def available() -> Iterator[Candidate]:
    for package, candidates in LIBRARIES.items():
        if importlib.util.find_spec(package) is None:
            print(f"{package} is not installed")
        else:
            yield from candidates()


def write(page: Path, rows: Sequence[Row], counts: Counter[str]) -> None:
    """Put the table between the marks of the page."""
    packages = {"lion-pytorch": "lion-pytorch", "optimi": "torch-optimi"}
    libraries = dict.fromkeys(row[0] for row in rows)
    versions = ", ".join(f"{name} {importlib.metadata.version(packages.get(name, name))}" for name in libraries)
    lines = [f"{len(rows)} optimizers: " + ", ".join(f"{number} {result}" for result, number in counts.items()) + "."]
    lines += [f"Versions: {versions}.", "", "| optimizer | library | result | |", "|---|---|---|---|"]
    lines += [f"| {name} | {library} | {result} | {note} |" for library, name, result, note in rows]
    before, _, rest = page.read_text().partition(BEGIN)
    page.write_text(before + BEGIN + "\n" + "\n".join(lines) + "\n" + END + rest.partition(END)[2])


if __name__ == "__main__":
    sys.exit(main())
