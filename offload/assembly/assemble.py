"""From a plan to an engine whose parts are tied together: one value, of which the session is a facade."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from offload.access import BeforeChange, ExternalAccess, Layout, Levels
from offload.assembly.compute import OnDevice, OnHost
from offload.assembly.run_plan import RunPlan
from offload.assembly.tiers import Tiers, make_tiers, store_bandwidths
from offload.assembly.updates import Updates, make_updates
from offload.birth.birth import Birth
from offload.birth.loading import Loader
from offload.checkpoint.checkpoints import Checkpoints
from offload.checkpoint.optimizer_states import OptimizerStates
from offload.checkpoint.run_state import RunState, Training
from offload.checkpoint.safetensors.model_weights import GatheredModelWeights, ModelWeights
from offload.closing import Closers
from offload.device.host import Cpu
from offload.device.protocol import Device
from offload.growth import FixedPlan, GrowingPlan
from offload.model.hooks import Hooks, UnitInModel
from offload.model.make import convert_statistics, give_ordinary_state_dicts, make_handles, move_to_device
from offload.model.parameter_metadata import ParameterMetadata
from offload.model.run_together import NotTogether, Together
from offload.optim.choose import OptimizerChoice
from offload.optim.loss_scale import LossScale
from offload.optimizer import OffloadOptimizer, refuse_others
from offload.passes import Passes, TrainingPasses
from offload.progress import Progress
from offload.ranks.ranks import Ranks
from offload.report.meter import Meter
from offload.report.report import LinkRates
from offload.report.reporter import Reporter
from offload.run.watch import Watch
from offload.spooled import Spooled
from offload.step import Step
from offload.step_warnings import StepWarnings
from offload.tiers.fence import UpdateFence
from offload.torch_internals import outside_of_graphs
from offload.units import ParameterSpec
from offload.update.forecast import Forecast
from offload.update.speculation_policy import SpeculationPolicy
from offload.update.verdict import Verdict
from swapper import OffloadError

_NOT_MADE = "the engine could not be made, and parameters that it had taken over are lost: build the model again"


@dataclass(frozen=True)
class Trained:
    """The parts of an engine that trains."""

    choice: OptimizerChoice
    updates: Updates
    verdict: Verdict
    optimizer: OffloadOptimizer
    step: Step


@dataclass
class HeldGradients:
    """``now``: ranks exchange no gradients. See ``OffloadEngine.no_sync``."""

    now: bool = False


def assemble(model: nn.Module, run: RunPlan, birth: Birth) -> Assembly:
    """Reserve everything, and take the model over. After an error nothing is left but what the message says."""
    parts = Assembly(model, run)
    try:
        parts.make(model, birth)
    except BaseException as error:
        parts.ranks.leave(error)
        parts.failure.record(OffloadError(_NOT_MADE))  # handles may stand in the model already
        parts.closers.close()
        raise
    parts.closers.callback(partial(parts.ranks.leave, None))  # first of all: others may still need this rank's part
    parts.meter.restart()
    return parts


class Assembly:
    """All parts of an engine, made one after the other. Each stands on those before it."""

    def __init__(self, model: nn.Module, run: RunPlan) -> None:
        self.model = weakref.ref(model)
        self.run = run
        self.failure = run.world.heartbeat.failure
        self.watch = Watch()
        self.meter = Meter()
        self.progress = Progress(LossScale() if run.config.precision == "fp16" else None)
        self.holding = HeldGradients()
        self.closers = Closers()
        self.closers.callback(self.watch.close)
        self.closers.callback(run.parts.release)
        self.ranks = Ranks(run.world, run.units, run.shards)
        self.model_weights = ModelWeights if self.ranks.size == 1 else GatheredModelWeights
        self.trained: Trained | None = None

    def make(self, model: nn.Module, birth: Birth) -> None:
        """Make the parts, and take ``model`` over."""
        run, choice = self.run, self.run.choice
        metadata = ParameterMetadata(run.units)
        had_states = {} if choice is None else choice.states()
        self.tiers = self._make_tiers()
        updates = None
        if choice is not None:
            updates = make_updates(run, self.tiers, choice.rule, self.failure, self.meter, self.closers)
        self.access = self._make_access(updates)
        handles = self._handles = make_handles(run.units, run.shards, self.tiers.parameters, self.access)
        of_shards = handles.of_shards(self.ranks)
        self.specs: Mapping[nn.Parameter, Sequence[ParameterSpec]] = of_shards.specs_by_parameter()
        """Of each parameter of the model: its spec, or those of its pieces in order."""
        self._backings = {**handles.backings, **of_shards.backings}
        replaced = (spec.parameter for unit in run.units for spec in unit.parameters)
        self._replaced = {id(parameter): weakref.ref(parameter) for parameter in replaced if parameter.requires_grad}
        self._take_over(model, birth)
        self.closers.callback(give_ordinary_state_dicts(run.units, self.access.spooled))
        self.bandwidths = store_bandwidths(self.tiers)
        self.growth = self._make_growth(updates)
        self.reporter = self._make_reporter(updates)
        if choice is None or updates is None:
            self.checkpoints = self._make_checkpoints(model, None)
            uses = self.tiers.computing.uses
            self.hooks = self._make_hooks(Passes(uses, self._backings, self.checkpoints, self.failure, self.closers))
        else:
            self._train(model, choice, updates, of_shards.of_model, had_states)
        # After the engine's own hooks: those that were there before see a gradient that was taken.
        metadata.give(handles.of_model, {spec: backing.in_use[0] for spec, backing in handles.backings.items()})
        self.together = self._make_together()

    # What bytes rest in and move by.

    def _make_tiers(self) -> Tiers:
        run, holding = self.run, self.holding
        if isinstance(run.processor, Cpu):
            variant: OnHost | OnDevice = OnHost(run)
        else:
            variant = OnDevice(run, cast(Device, run.processor), self.meter, self.closers)
        return make_tiers(run, self.ranks, variant, self.failure, self.meter, self.closers, lambda: holding.now)

    def _make_access(self, updates: Updates | None) -> ExternalAccess:
        tiers, config, computing = self.tiers, self.run.config, self.tiers.computing
        before = BeforeChange(agree=partial(self.ranks.barrier, "a change"), settle=computing.sink.settle)
        if updates is not None:
            before.invalidate = updates.updater.invalidate
        return ExternalAccess(
            Layout(self.run.plan.formats, config.dtype, None if self.run.choice is None else self.run.choice.rule),
            tiers.homes,
            Levels(tiers.host, computing.level, computing.whole),
            tiers.gradients,
            before,
            self.ranks,
            self.run.processor.torch_device,
            self.failure,
            Spooled(config.paths if any(self.run.plan.nvme_bytes.values()) else ()),
        )

    def _take_over(self, model: nn.Module, birth: Birth) -> None:
        """Values go to their homes, and handles into the model."""
        run, ranks, tiers, handles = self.run, self.ranks, self.tiers, self._handles

        def value(spec: ParameterSpec) -> torch.Tensor:
            whole = birth.value(spec.whole or spec)
            return whole if spec.whole is None else spec.shard_of(ranks.broadcast(spec.name, whole))

        buffers = [slot.address for slot in tiers.slots], [lease.address for lease in tiers.tile_buffers]
        loader = Loader(tiers.homes, self.access.layout, value, *buffers)
        shown = zip(birth.shown(run.units), run.shards, strict=True)
        loader.load(shown, handles.at_sites, handles.of_model)
        birth.fill_rest()
        for name, buffer in model.named_buffers():
            first = ranks.broadcast(name, buffer)
            if first is not buffer:
                buffer.copy_(first)
        convert_statistics(model, run.config.dtype)
        if not isinstance(run.processor, Cpu):
            self.closers.callback(move_to_device(model, run.processor.torch_device))

    def _make_growth(self, updates: Updates | None) -> FixedPlan:
        """Units move to a device once, if its memory was not given."""
        tiers, plan, config = self.tiers, self.run.plan, self.run.config
        if not tiers.computing.moving or updates is None or config.device_memory != "auto" or config.durable:
            return FixedPlan(plan)
        return GrowingPlan(
            plan,
            cast(Device, self.run.processor),
            tiers.computing.moving[0].growth,
            self.run.shards,
            tiers.gradients,
            tiers.host.fence,
            self.failure,
            updates.speculative.look_at_homes,
        )

    def _make_reporter(self, updates: Updates | None) -> Reporter:
        tiers, ranks = self.tiers, self.ranks
        return Reporter(
            self.meter,
            tiers.store,
            self.run.config.paths,
            _copied_bytes(tiers, updates),
            lambda: ranks.received_bytes,
            tiers.computing.uses.busy_seconds,
            self.bandwidths,
            next((moving.link for moving in tiers.computing.moving), LinkRates()),
        )

    # What trains.

    def _train(
        self,
        model: nn.Module,
        choice: OptimizerChoice,
        updates: Updates,
        of_model: dict[ParameterSpec, nn.Parameter],
        had_states: Mapping[ParameterSpec, dict[str, Any]],
    ) -> None:
        """``of_model``: the model's parameters by what this rank has of them. ``had_states``: what the optimizer that
        was given has of earlier steps."""
        tiers, access, specs, rule = self.tiers, self.access, self.specs, choice.rule
        uses, sink = tiers.computing.uses, tiers.computing.sink
        named_order = [spec for p in model.parameters() for spec in specs.get(p, ())]
        verdict = Verdict(self.run.shards, tiers.gradients, named_order, of_model, rule)
        wait = tiers.host.fence.wait_all
        states = OptimizerStates(rule, self.run.shards, specs, self._backings, verdict, access, wait)
        for group, of_group in choice.groups:
            group["params"] = list(dict.fromkeys(of_model[spec] for spec in of_group))
        groups = [group for group, _ in choice.groups]
        optimizer = OffloadOptimizer(groups, states, self.progress, choice.source)
        self.closers.callback(refuse_others(optimizer).remove)
        if had_states:
            states.replace_all({of_model[spec]: of_spec for spec, of_spec in had_states.items()})
        training = Training(optimizer, specs, rule, verdict, tiers.gradients)
        self.checkpoints = self._make_checkpoints(model, training)
        passes = TrainingPasses(
            uses,
            self._backings,
            self.checkpoints,
            self.failure,
            self.closers,
            sink,
            # Where ranks have shards, the gradients that compute makes are no update's, and the exchange waits.
            tiers.host.fence if self.ranks.size == 1 else UpdateFence.open(),
            updates.speculative,
            self._make_policy(updates, verdict, optimizer),
            self.progress,
            access,
            self.reporter,
        )
        self.hooks = self._make_hooks(passes)
        step = Step(
            config=self.run.config,
            progress=self.progress,
            units=self.run.units,
            hooks=self.hooks,
            uses=uses,
            passes=passes,
            level=tiers.computing.level,
            host=tiers.host,
            sink=sink,
            updater=updates.updater,
            resident=updates.resident,
            verdict=verdict,
            access=access,
            checkpoints=self.checkpoints,
            warnings=StepWarnings(model, self.hooks, access),
            reporter=self.reporter,
            watch=self.watch,
            growth=self.growth,
            failure=self.failure,
            specs=specs,
            backings=self._backings,
            replaced=self._replaced,
            param_groups=lambda: optimizer.param_groups,
        )
        optimizer.attach(step)
        self.trained = Trained(choice, updates, verdict, optimizer, step)

    def _make_policy(self, updates: Updates, verdict: Verdict, optimizer: OffloadOptimizer) -> SpeculationPolicy:
        plan = self.run.plan
        return SpeculationPolicy(
            updates.speculative,
            updates.updater,
            Forecast(self.run.config.gradient_clipping) if plan.speculative else None,
            verdict,
            self.tiers.gradients,
            self.tiers.computing.sink.complete,
            lambda: optimizer.param_groups,
            states_stored=plan.nvme_bytes["states"] > 0,
        )

    # What stands in the model and beside it.

    def _make_hooks(self, passes: Passes) -> Hooks:
        tiers, handles = self.tiers, self._handles
        in_model = [
            UnitInModel(unit, window, parameters)
            for unit, window, parameters in zip(self.run.units, tiers.windows, tiers.parameters, strict=True)
        ]
        one_thread = isinstance(self.run.processor, Cpu)
        return Hooks(in_model, handles.at_sites, handles.of_model, passes, outside_of_graphs, one_thread=one_thread)

    def _make_together(self) -> Together | NotTogether:
        if self.ranks.size > 1:
            return NotTogether("is for one rank")
        if not isinstance(self.run.processor, Cpu):
            return NotTogether(
                "is for models that compute on the CPU: a device's backward runs in a thread of torch's, which cannot "
                "wait"
            )
        drop = (lambda: None) if self.trained is None else self.trained.step.drop_gradients
        return Together(self.model, self.hooks, self.failure, drop)

    def _make_checkpoints(self, model: nn.Module, training: Training | None) -> Checkpoints:
        tiers, access, config, shards = self.tiers, self.access, self.run.config, self.run.shards
        wait, sink = tiers.host.fence.wait_all, tiers.computing.sink
        run = RunState(model, shards, self.progress, config.gradient_dtype, wait, training)
        speculative = self.run.plan.speculative
        checkpoints = Checkpoints(
            run, config, shards, tiers.opened, tiers.records, tiers.host, sink, access, speculative=speculative
        )
        generations = checkpoints.generations
        access.before.commit = generations.changing
        if self.ranks.size > 1 and config.durable:
            access.before.agree = generations.agree
        self.closers.callback(generations.stop)
        return checkpoints


def _copied_bytes(tiers: Tiers, updates: Updates | None) -> Callable[[], tuple[int, int]]:
    """Bytes copied to a device and to the host, since the engine was made."""

    def copied() -> tuple[int, int]:
        to_device, to_host = (0, 0) if updates is None else updates.device_side.copied_bytes
        for moving in tiers.computing.moving:
            to_device += moving.level.carrier.source.copied_bytes
            to_host += moving.transport.copied_bytes
        return to_device, to_host

    return copied
