"""From a plan to an engine whose parts are tied together: one value, of which the session is a facade."""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, cast

import torch
from torch import nn

from offload.access import BeforeChange, ExternalAccess, Levels
from offload.assembly.activations import make_activations
from offload.assembly.compute import OnDevice, OnHost
from offload.assembly.forwards import count_forwards
from offload.assembly.parts import Assembly, HeldGradients, Trained
from offload.assembly.run_plan import RunPlan
from offload.assembly.tiers import Tiers, make_tiers, store_bandwidths
from offload.assembly.updates import Updates, copied_bytes, make_updates
from offload.birth.birth import Birth
from offload.birth.loading import Loader
from offload.checkpoint.checkpoints import Checkpoints
from offload.checkpoint.native.commit import JointPublication, Publication
from offload.checkpoint.optimizer_states import OptimizerStates
from offload.checkpoint.run_state import RunState, Training
from offload.checkpoint.safetensors.model_weights import GatheredModelWeights, ModelWeights
from offload.closing import Closers
from offload.device.host import Cpu
from offload.device.protocol import Device
from offload.elements import Layout
from offload.growth import FixedPlan, GrowingPlan
from offload.model.backing import ParameterBacking
from offload.model.converted import explain_dtypes
from offload.model.encoders import show_first_layers
from offload.model.experts import announce_routes, compute_by_expert
from offload.model.hooks import Hooks
from offload.model.make import (
    Handles,
    convert_statistics,
    give_ordinary_state_dicts,
    make_handles,
    memory_of,
    move_to_device,
)
from offload.model.outside_of_graphs import outside_of_graphs
from offload.model.parameter_metadata import ParameterMetadata
from offload.model.piecewise import PiecewiseHandle
from offload.model.resident import Resident
from offload.model.run_together import Together
from offload.model.unit_in_model import UnitInModel
from offload.optim.choose import OptimizerChoice
from offload.optim.loss_scale import LossScale
from offload.optimizer import OffloadOptimizer, refuse_others
from offload.passes import Passes, TrainingPasses
from offload.progress import Progress
from offload.quantised.linear_4bit import compute_in_engine
from offload.ranks.agreement import fact_of
from offload.ranks.ranks import Ranks
from offload.report.meter import Meter
from offload.report.report import Bandwidths, ExpertUse, LinkRates, MemoryRates
from offload.report.reporter import Reporter
from offload.run.forwards import Forwards
from offload.run.watch import Watch
from offload.spooled import Spooled
from offload.step import Step
from offload.step_warnings import StepWarnings
from offload.tiers.fence import UpdateFence
from offload.tiers.gradients.own import OwnGradients
from offload.tiers.weights.cache import WeightCache
from offload.units import FusedExperts, ParameterSpec
from offload.update.forecast import Forecast
from offload.update.speculation_policy import SpeculationPolicy
from offload.update.verdict import Verdict
from swapper import OffloadError

_NOT_MADE = "the engine could not be made, and parameters that it had taken over are lost: build the model again"


def assemble(model: nn.Module, run: RunPlan, birth: Birth) -> Assembly:
    """Reserve everything, and take the model over. After an error nothing is left but what the message says."""
    return _Assembler(model, run, birth).assemble()


class _Assembler:
    """One stage after the other. Each stands on those before it."""

    def __init__(self, model: nn.Module, run: RunPlan, birth: Birth) -> None:
        self.model = model
        self.run = run
        self.birth = birth
        self.config = run.config
        self.failure = run.world.heartbeat.failure
        self.watch = Watch()
        self.meter = Meter()
        self.progress = Progress(LossScale() if run.config.precision == "fp16" else None)
        self.holding = HeldGradients()
        self.closers = Closers()
        self.closers.callback(self.watch.close)
        self.closers.callback(run.parts.release)
        self.ranks = Ranks.of(run.world, run.units, run.shards)

    def assemble(self) -> Assembly:
        try:
            found = self._assemble()
        except BaseException as error:
            self.ranks.leave(error)
            self.failure.record(OffloadError(_NOT_MADE))  # handles may stand in the model already
            self.closers.close()
            raise
        self.closers.callback(partial(self.ranks.leave, None))  # first of all: others may still need this rank's part
        self.meter.restart()
        self.ranks.collectives.resume()
        return found

    def _assemble(self) -> Assembly:
        run, choice, closers = self.run, self.run.choice, self.closers
        metadata = ParameterMetadata(run.units)
        closers.callback(explain_dtypes(self.model, self.config.converted_dtypes(self.model), self.config.dtype))
        memory = memory_of(run.units, self.config.dtype, run.processor.torch_device)
        had_states = {} if choice is None else choice.states()
        tiers = self._tiers()
        self.activations = make_activations(run, self.meter, closers)
        updates = None
        if choice is not None:
            updates = make_updates(run, tiers, choice.rule, self.failure, self.meter, closers)
        access = self._access(tiers, updates)
        handles = make_handles(run.units, run.shards, tiers.parameters, access)
        of_shards = handles.of_shards(self.ranks)
        replaced = (spec.parameter for unit in run.units for spec in unit.parameters)
        taken_over = {id(parameter): weakref.ref(parameter) for parameter in replaced if parameter.requires_grad}
        self._take_over(tiers, access, handles)
        closers.callback(give_ordinary_state_dicts(run.units, access.spooled))
        bandwidths = store_bandwidths(tiers)
        growth = self._growth(tiers, updates)
        reporter = self._reporter(tiers, updates, bandwidths)
        shared = _Shared(tiers, access, handles, of_shards, reporter, growth, taken_over)
        if choice is None or updates is None:
            checkpoints = self._checkpoints(shared, None)
            passes = Passes(tiers.computing.uses, shared.backings, handles.aliases, checkpoints, self.failure, closers)
            hooks, trained = self._hooks(shared, passes), None
            count_forwards(self.model, Forwards(reporter, self.watch, lambda: growth.plan.memory), closers)
        else:
            hooks, checkpoints, trained = self._train(shared, choice, updates, had_states)
        # After the engine's own hooks: those that were there before see a gradient that was taken.
        metadata.give(handles.of_model, {spec: backing.in_use[0] for spec, backing in handles.backings.items()})
        for spec, alias in memory.items():
            handles.backings[spec].follow(alias)
        return Assembly(
            run=run,
            model=weakref.ref(self.model),
            ranks=self.ranks,
            failure=self.failure,
            meter=self.meter,
            watch=self.watch,
            progress=self.progress,
            holding=self.holding,
            closers=closers,
            tiers=tiers,
            access=access,
            specs=shared.specs,
            hooks=hooks,
            aliases=handles.aliases,
            together=self._together(hooks, trained),
            resident=Resident(hooks, checkpoints.before_boundary, tiers.computing.level.has_room),
            checkpoints=checkpoints,
            model_weights=ModelWeights if self.ranks.size == 1 else GatheredModelWeights,
            bandwidths=bandwidths,
            reporter=reporter,
            growth=growth,
            activations=self.activations,
            trained=trained,
        )

    def _reporter(self, tiers: Tiers, updates: Updates | None, bandwidths: Bandwidths | None) -> Reporter:
        ranks = self.ranks
        return Reporter(
            self.meter,
            tiers.store,
            tiers.files,
            self.config.paths,
            copied_bytes(tiers, updates),
            lambda: ranks.received_bytes,
            tiers.computing.uses.busy_seconds,
            bandwidths,
            next((moving.link for moving in tiers.computing.moving), LinkRates()),
            self.activations.scratch,
            self.activations.take_use,
            partial(_expert_use, tiers.host.cache, self.run.plan.formats.weights),
            lambda: 0 if updates is None else updates.host_side.moved_bytes,
            next((moving.host_memory for moving in tiers.computing.moving), MemoryRates()),
        )

    # What bytes rest in and move by.

    def _tiers(self) -> Tiers:
        run = self.run
        if isinstance(run.processor, Cpu):
            variant: OnHost | OnDevice = OnHost(run)
        else:
            variant = OnDevice(run, cast(Device, run.processor), self.meter, self.closers)
        holding = self.holding  # and nothing that holds the model
        return make_tiers(run, self.ranks, variant, self.failure, self.meter, self.closers, lambda: holding.now)

    def _access(self, tiers: Tiers, updates: Updates | None) -> ExternalAccess:
        plan, config, computing = self.run.plan, self.config, tiers.computing
        before = BeforeChange(agree=partial(self.ranks.barrier, "a change"), settle=computing.sink.settle)
        if updates is not None:
            before.invalidate = updates.updater.invalidate
        return ExternalAccess(
            Layout(plan.formats, config.dtype, None if self.run.choice is None else self.run.choice.rule),
            tiers.homes,
            Levels(tiers.host, computing.level, computing.whole),
            tiers.gradients,
            OwnGradients(computing.sink),
            before,
            self.ranks,
            self.run.processor.torch_device,
            self.failure,
            Spooled(config.paths if plan.streams else ()),
        )

    def _take_over(self, tiers: Tiers, access: ExternalAccess, handles: Handles) -> None:
        """Values go to their homes, and handles into the model."""
        model, run, ranks = self.model, self.run, self.ranks

        def value(spec: ParameterSpec) -> torch.Tensor:
            whole = self.birth.value(spec.whole or spec)
            if spec.whole is None:
                return whole
            if self.birth.is_read(spec):
                ranks.barrier(f"the weights of {spec.name}", lambda: {"the value in the files": fact_of(whole)})
                return spec.shard_of(whole)
            return spec.shard_of(ranks.broadcast(spec.name, whole))

        buffers = [slot.address for slot in tiers.slots], [lease.address for lease in tiers.tile_buffers]
        loader = Loader(tiers.homes, access.layout, value, *buffers)
        shown = zip(self.birth.shown(run.units), run.shards, strict=True)
        loader.load(shown, handles.of_model)
        self.birth.fill_rest(run.units)
        for name, buffer in model.named_buffers():
            first = ranks.broadcast(name, buffer)
            if first is not buffer:
                buffer.copy_(first)
        convert_statistics(model, self.config.dtype)
        if not isinstance(run.processor, Cpu):
            self.closers.callback(move_to_device(model, run.processor.torch_device))

    def _growth(self, tiers: Tiers, updates: Updates | None) -> FixedPlan:
        """Units move to a device once, if its memory was not given."""
        plan, config = self.run.plan, self.config
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
            lambda activations=self.activations: activations.chosen.kept_bytes,  # type: ignore[misc]
        )

    # What trains.

    def _train(
        self,
        shared: _Shared,
        choice: OptimizerChoice,
        updates: Updates,
        had_states: Mapping[ParameterSpec, dict[str, Any]],
    ) -> tuple[Hooks, Checkpoints, Trained]:
        """``had_states``: what the optimizer that was given has of earlier steps."""
        tiers, access, specs, of_model = shared.tiers, shared.access, shared.specs, shared.of_shards.of_model
        named_order = [spec for _, p in nn.Module.named_parameters(self.model) for spec in specs.get(p, ())]
        verdict = Verdict(self.run.shards, tiers.gradients, named_order, of_model, choice.rule)
        states = OptimizerStates(
            choice.rule, self.run.shards, specs, shared.backings, verdict, access, tiers.host.fence.wait_all
        )
        optimizer = self._optimizer(choice, states, of_model)
        if had_states:
            states.replace_all({of_model[spec]: of_spec for spec, of_spec in had_states.items()})
        training = Training(optimizer, specs, choice.rule, verdict, tiers.gradients)
        checkpoints = self._checkpoints(shared, training)
        passes = self._passes(shared, updates, checkpoints, self._policy(tiers, updates, verdict, optimizer))
        hooks = self._hooks(shared, passes)
        step = Step(
            config=self.config,
            progress=self.progress,
            units=self.run.units,
            hooks=hooks,
            uses=tiers.computing.uses,
            passes=passes,
            level=tiers.computing.level,
            host=tiers.host,
            sink=access.own_gradients,
            updater=updates.updater,
            cores=updates.cores,
            resident=updates.resident,
            verdict=verdict,
            access=access,
            checkpoints=checkpoints,
            warnings=StepWarnings(self.model, hooks, access),
            reporter=shared.reporter,
            watch=self.watch,
            growth=shared.growth,
            activations=self.activations.chosen,
            failure=self.failure,
            specs=specs,
            backings=shared.backings,
            wholes=[parameter.backing for parameter in specs if isinstance(parameter, PiecewiseHandle)],
            replaced=shared.taken_over,
            param_groups=lambda: optimizer.param_groups,
        )
        optimizer.attach(step)
        return hooks, checkpoints, Trained(choice, updates, verdict, optimizer, step)

    def _passes(
        self, shared: _Shared, updates: Updates, checkpoints: Checkpoints, policy: SpeculationPolicy
    ) -> TrainingPasses:
        tiers, access = shared.tiers, shared.access
        aliases = shared.handles.aliases
        of_all = (tiers.computing.uses, shared.backings, aliases, checkpoints, self.failure, self.closers)
        # Where ranks have shards, the gradients that compute makes are no update's, and the exchange waits.
        fence = tiers.host.fence if self.ranks.size == 1 else UpdateFence.open()
        of_step = (updates.speculative, policy, self.progress, access, shared.reporter)
        return TrainingPasses(*of_all, access.own_gradients, fence, *of_step)

    def _optimizer(
        self, choice: OptimizerChoice, states: OptimizerStates, of_model: Mapping[ParameterSpec, nn.Parameter]
    ) -> OffloadOptimizer:
        """The one that users see, which is theirs if they have given one."""
        for group, of_group in choice.groups:
            group["params"] = list(dict.fromkeys(of_model[spec] for spec in of_group))
        groups = [group for group, _ in choice.groups]
        if choice.source is None:
            optimizer = OffloadOptimizer(groups, states, self.progress)
        else:
            optimizer = OffloadOptimizer.over(choice.source, groups, states, self.progress)
        self.closers.callback(refuse_others(optimizer).remove)
        return optimizer

    def _policy(
        self, tiers: Tiers, updates: Updates, verdict: Verdict, optimizer: OffloadOptimizer
    ) -> SpeculationPolicy:
        plan = self.run.plan
        return SpeculationPolicy(
            updates.speculative,
            updates.updater,
            Forecast(self.config.gradient_clipping) if plan.updates_early else None,
            verdict,
            tiers.gradients,
            tiers.computing.sink.complete,
            lambda: optimizer.param_groups,
            states_stored=plan.nvme_bytes["states"] > 0,
        )

    # What stands in the model and beside it.

    def _hooks(self, shared: _Shared, passes: Passes) -> Hooks:
        tiers, handles = shared.tiers, shared.handles
        has_gradients = shared.access.has_gradients if self.run.choice is not None else lambda unit: False
        in_model = [
            UnitInModel(unit, window, parameters, has_gradients)
            for unit, window, parameters in zip(self.run.units, tiers.windows, tiers.parameters, strict=True)
        ]
        one_thread = isinstance(self.run.processor, Cpu)
        hooks = Hooks(in_model, handles.of_model, passes, outside_of_graphs, one_thread=one_thread)
        sharers = len(self.ranks.world.local_ranks) if one_thread else 1
        self.activations.tie(hooks, self.model, self.run.processor, sharers)
        owners = {site[0]: unit for unit in in_model for site in unit.sites}
        self.closers.callback(show_first_layers(self.model, owners))
        experts = dict.fromkeys(unit.experts for unit in self.run.units)
        self.closers.callback(compute_by_expert(of for of in experts if isinstance(of, FusedExperts)))
        packed = (spec for unit in self.run.units for spec in unit.parameters if spec.packing is not None)
        places = ((site.module, spec.packing.kind) for spec in packed if spec.packing for site in spec.sites)
        self.closers.callback(compute_in_engine(places))
        self.closers.callback(announce_routes(self.run.units, passes.announce, outside_of_graphs))
        return hooks

    def _together(self, hooks: Hooks, trained: Trained | None) -> Together:
        drop = (lambda: None) if trained is None else trained.step.drop_gradients
        return Together(weakref.ref(self.model), hooks, self.run.processor, self.failure, drop)

    def _checkpoints(self, shared: _Shared, training: Training | None) -> Checkpoints:
        tiers, access, config = shared.tiers, shared.access, self.config
        run = RunState(
            self.model, self.run.shards, self.progress, config.gradient_dtype, tiers.host.fence.wait_all, training
        )
        checkpoints = Checkpoints(
            run,
            config,
            self.run.shards,
            tiers.opened,
            tiers.records,
            tiers.host,
            access.own_gradients,
            access,
            tiers.last_gradients,
            Publication() if self.ranks.size == 1 else JointPublication(self.ranks),
            speculative=self.run.plan.speculative,
        )
        generations = checkpoints.generations
        access.before.commit = generations.changing
        if self.ranks.size > 1 and config.durable:
            access.before.agree = generations.agree
        self.closers.callback(generations.stop)
        return checkpoints


@dataclass(frozen=True)
class _Shared:
    """Parts that the later stages stand on."""

    tiers: Tiers
    access: ExternalAccess
    handles: Handles
    of_shards: Handles
    """The same by what this rank has of each parameter."""
    reporter: Reporter
    growth: FixedPlan
    taken_over: Mapping[int, weakref.ref[nn.Parameter]]

    @cached_property
    def backings(self) -> Mapping[ParameterSpec, ParameterBacking]:
        return {**self.handles.backings, **self.of_shards.backings}

    @cached_property
    def specs(self) -> Mapping[nn.Parameter, Sequence[ParameterSpec]]:
        return self.of_shards.specs_by_parameter()


def _expert_use(cache: WeightCache[Any], bytes_each: int) -> ExpertUse:
    """Bytes of experts that compute has used, of those that were fetched for it, and of all that could have been."""
    return ExpertUse(*(count * bytes_each for count in cache.experts.all))
