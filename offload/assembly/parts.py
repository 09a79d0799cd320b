"""The value that an assembly gives: all parts of an engine."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from offload.access import ExternalAccess
from offload.assembly.activations import Activations
from offload.assembly.run_plan import RunPlan
from offload.assembly.tiers import Tiers
from offload.assembly.updates import Updates
from offload.checkpoint.checkpoints import Checkpoints
from offload.checkpoint.safetensors.model_weights import ModelWeights
from offload.closing import Closers
from offload.growth import FixedPlan
from offload.model.aliases import Aliases
from offload.model.hooks import Hooks
from offload.model.resident import Resident
from offload.model.run_together import Together
from offload.optim.choose import OptimizerChoice
from offload.optimizer import OffloadOptimizer
from offload.progress import Progress
from offload.ranks.ranks import Ranks
from offload.report.meter import Meter
from offload.report.report import Bandwidths
from offload.report.reporter import Reporter
from offload.run.watch import Watch
from offload.step import Step
from offload.units import ParameterSpec
from offload.update.verdict import Verdict
from offload.waiting import Failure


@dataclass(frozen=True)
class Trained:
    """The parts of an engine that trains."""

    choice: OptimizerChoice
    updates: Updates
    verdict: Verdict
    optimizer: OffloadOptimizer
    step: Step


@dataclass(frozen=True)
class Assembly:
    """All parts of an engine."""

    run: RunPlan
    model: weakref.ref[nn.Module]
    ranks: Ranks
    failure: Failure
    meter: Meter
    watch: Watch
    progress: Progress
    holding: HeldGradients
    closers: Closers
    tiers: Tiers
    access: ExternalAccess
    specs: Mapping[nn.Parameter, Sequence[ParameterSpec]]
    """Of each parameter of the model: its spec, or those of its pieces in order."""
    hooks: Hooks
    aliases: Aliases
    together: Together
    resident: Resident
    checkpoints: Checkpoints
    model_weights: type[ModelWeights]
    bandwidths: Bandwidths | None
    reporter: Reporter
    growth: FixedPlan
    activations: Activations
    trained: Trained | None


@dataclass
class HeldGradients:
    """``now``: ranks exchange no gradients. See ``OffloadEngine.no_sync``."""

    now: bool = False
