"""``OffloadEngine``: a model whose weights, gradients and optimizer states are stored wherever there is room."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import nn

from offload import option_values
from offload.assembly.assemble import assemble
from offload.assembly.run_plan import join_world, plan_run
from offload.birth import from_pretrained
from offload.birth.birth import Birth
from offload.checkpoint.safetensors.export import MAX_SHARD_BYTES, save_model
from offload.config import OffloadConfig
from offload.errors import ConfigError, RankError, named
from offload.memory import on_cpu
from offload.model.handle import Handle
from offload.model.inputs import Inputs
from offload.optimizer import OffloadOptimizer
from offload.option_names import Options, with_options
from offload.option_values import as_path
from offload.plan.plan import Plan
from offload.ranks.world import World, tell_ranks
from offload.report.report import ExpertUse, Report
from offload.run.about import about, fingerprint, summary
from offload.run.directory import RunDirectory
from offload.run.observer import Observer
from offload.session import Session
from offload.tiers.activations.pool import ActivationPool
from swapper import OffloadError

if TYPE_CHECKING:
    from typing_extensions import Unpack

_log = logging.getLogger("offload")

_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


class OffloadEngine:
    """Trains ``model`` with its state on a device, in host RAM and on NVMe, as far as each goes.

    ``engine(*inputs)`` runs the model, ``engine.backward(loss)`` and ``engine.step()`` train it; so does PyTorch's own
    loop with ``engine.optimizer``. ``engine.module is model``, and any of its parameters can be read or written at any
    time. Options are the fields of ``OffloadConfig``.

    Everything is reserved here: raises ``ConfigError``, ``BudgetError`` (with ``needed_bytes``), ``StoreUnsafe``
    or ``StorageFull`` before the model is touched. Call ``close`` at the end, or use it in ``with``: the model has its
    weights again then, if they fit into memory.
    """

    @with_options()
    def __init__(self, model: nn.Module, config: OffloadConfig | None = None, **options: Unpack[Options]) -> None:
        try:
            self.config = self._checked(model, OffloadConfig.of(config, options))
        except ConfigError as error:
            tell_ranks(options.get("mesh"), error)
            raise
        self.module = model
        with torch.inference_mode(False), torch.enable_grad(), on_cpu(), named("making the engine"):
            self._session = self._make(model)

    @classmethod
    @with_options("weights")
    def from_pretrained(
        cls,
        model_class: Any,
        path: str | os.PathLike[str],
        config: OffloadConfig | None = None,
        *,
        model_kwargs: Mapping[str, Any] | None = None,
        peft_config: Any = None,
        **options: Any,
    ) -> OffloadEngine:
        """An engine over ``model_class.from_pretrained(path, **model_kwargs)`` of ``transformers``. The model is never
        whole in memory: its weights are streamed to where they are stored. The model, in eval mode, is
        ``engine.module``.

        ``model_class`` is a model or auto class, ``path`` a directory with safetensors or the name of a repository on
        the hub; of GGUF ``model_kwargs`` have the name of the file there (``gguf_file``); ``peft_config`` is a config
        of ``peft``, such as ``LoraConfig``, whose new adapter is what is trained; ``config`` and ``options`` are the
        engine's. Weights that are not trained, quantised or not, are read where they are: all but the adapter's, and
        with ``optimizer=None`` all. Raises ``WeightsError`` for files that are missing, damaged or do not fit,
        ``ConfigError`` for what can only be loaded in memory.
        """
        config = OffloadConfig.of(config, options)
        trains = config.optimizer is not None
        model, weights = from_pretrained.build(model_class, path, model_kwargs or {}, peft_config, trains=trains)
        return cls(model, config, weights=weights)

    @classmethod
    def _checked(cls, model: nn.Module, config: OffloadConfig) -> OffloadConfig:
        """The options for this model. Raises ``ConfigError``."""
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model: expected a torch.nn.Module, got {type(model).__name__}")
        if cls.holds(model):
            raise ConfigError(
                "the model's parameters are in an engine already. Its unwrap() gives an ordinary model back, and so "
                "does close(), if memory has room for it; else they are gone: build the model again."
            )
        return config.of_model(model)

    @staticmethod
    def holds(model: nn.Module) -> bool:
        """Tell whether an engine has the parameters of ``model``, or had them when it was closed without giving them
        back."""
        return any(isinstance(parameter, Handle) for parameter in model.parameters())

    def _make(self, model: nn.Module) -> Session:
        world = join_world(self.config)
        try:
            return self._make_in(world, model)
        except BaseException as error:
            world.refuse(error)
            raise

    def _make_in(self, world: World, model: nn.Module) -> Session:
        with contextlib.closing(Birth(model, self.config.weights_path, self.config.dtype)) as birth:
            plan = plan_run(model, self.config, world, birth)
            self._inputs = Inputs(plan.processor, self.config.converted_dtypes(model), self.config.dtype)
            path = self.config.run_path if world.rank == 0 else None
            run = None if path is None else RunDirectory(path, fingerprint(plan.plan))
            try:
                birth.begin()
                session = Session(assemble(model, plan, birth))
            except BaseException:
                if run is not None:
                    run.abandon()
                raise
        _log.info("engine made: %s", summary(session.plan, session.bandwidths))
        session.watch.about = partial(about, self.config, session.plan, type(model).__name__, session.bandwidths)
        if run is not None:
            run.trace = session.meter.trace
            session.watch.add(run)
        return session

    @property
    def optimizer(self) -> OffloadOptimizer | None:
        """The optimizer, for schedulers and PyTorch's own loop; None if the engine does not train."""
        return self._session.optimizer

    @property
    def global_step(self) -> int:
        """Optimizer steps done."""
        return self._session.progress.global_step

    @property
    def plan(self) -> Plan:
        """Placement of everything, and what a step moves and takes. ``print`` it."""
        session, seconds = self._session, {}
        plan = session.plan_so_far()
        if session.bandwidths is not None:
            seconds["nvme"] = session.bandwidths.seconds(plan.step_read_bytes, plan.step_write_bytes)
        if session.last_report is not None:
            seconds["compute"] = session.last_report.compute_seconds
        return replace(plan, seconds=seconds, drives=session.drives)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model. Where ``precision`` has changed the dtype of weights, inputs of the dtype that they had are
        cast likewise; all others are what the caller gave, who may change them as soon as this returns."""
        self._session.failure.check()
        args, kwargs = self._inputs.bring((args, kwargs))
        try:
            return self.module(*args, **kwargs)
        finally:
            self._inputs.wait()

    def backward(self, loss: torch.Tensor) -> None:
        """Compute the gradients of ``loss`` (divided by ``gradient_accumulation_steps``) and bring them to their
        homes."""
        self._session.failure.check()
        self._session.backward(loss)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Within, ranks exchange no gradients at the end of a backward, if they have the memory for those of the whole
        model (``shard="states"``); else they do, as always. For all micro-batches of a step but the last.

        As ``DistributedDataParallel.no_sync``. Gradients are added up on each rank first then, and between ranks later:
        the last bits differ from a step without it, as sums in another order do.
        """
        self._session.failure.check()
        holding = self._session.holding
        before, holding.now = holding.now, True
        try:
            yield
        finally:
            holding.now = before

    def together(
        self, micro_batches: Iterable[_Item], function: Callable[[_Item], _Result], at_once: int | None = None
    ) -> list[_Result]:
        """Call ``function`` with each micro-batch, and bring each unit's weights in once for all of them; the results.

        ``function`` is the body of a training loop: it computes a loss and calls ``backward`` or ``loss.backward()``.
        The calls are under way at the same time, each in a thread of its own; one computes at a time. Losses, gradients
        and all later weights have the bits of the loop ``[function(each) for each in micro_batches]``. The activations
        of all of them are there at a time, of ``at_once`` of them if that is given: in memory, or where ``activations``
        has them. ``step`` comes after the call.

        Where the function draws random numbers in the model (dropout), and in a few other cases, the calls come one
        after the other, as in a loop, and there is one warning. Raises ``OffloadError`` if something comes in another
        order than in a loop all the same. After an error of any call the gradients of the coming step are dropped.
        """
        self._session.failure.check()
        if at_once is not None:
            option_values.as_count("at_once", at_once)
        return self._session.together(micro_batches, function, at_once)

    @contextlib.contextmanager
    def resident(self, module: nn.Module) -> Iterator[None]:
        """Keep the weights of ``module``, a block of the model, in memory within: they are brought in once, its
        parameters are ordinary ones, and what was written to them is stored at the end, once for all of it.

        For what looks at a block's weights many times, or changes them: calibration, quantisation, pruning. A step,
        ``zero_grad()``, a load and ``close()`` end it early. Layers in pieces and fused experts come as they are used,
        as always. Raises ``ConfigError`` for a module whose units memory has no room for at a time, before any is
        brought in, and for one that is no part of the model.
        """
        self._session.failure.check()
        with self._session.parts.resident.of(module):
            yield

    def step(self) -> None:
        """Take an optimizer step with the gradients since the last one. Returns at once: the update runs behind.

        Does nothing until ``gradient_accumulation_steps`` calls of ``backward`` have been made. ``loss.backward()``
        counts nothing: after it the step is taken, or ``ConfigError`` raised if there are to be several. Raises
        ``NonFiniteGradient`` if a gradient is NaN or infinite: the gradients are dropped and nothing else has changed.
        With ``precision="fp16"`` that is part of training: the step is skipped and the loss scale halved.
        """
        trained = self._session.trained
        self._session.failure.check()
        if trained.step.is_due():
            trained.optimizer.step()  # through the optimizer, so that schedulers see it
            trained.step.forget_used()

    def clip_grad_norm_(self, max_norm: float) -> torch.Tensor:
        """Scale all gradients so that their global 2-norm is at most ``max_norm``; the norm before. Moves no bytes.

        As ``torch.nn.utils.clip_grad_norm_``. A norm that is not finite scales nothing; ``step`` says so.
        """
        step = self._session.trained.step
        self._session.failure.check()
        return torch.tensor(step.clip_grad_norm(max_norm), device=self._session.torch_device)

    def synchronize(self) -> None:
        """Wait until the last step's update is done everywhere, until nothing of it is on its way to NVMe any more, and
        until all ranks are here: meanwhile this one gives what others want of its weights. Training never needs it."""
        self._session.synchronize()

    def report(self) -> Report:
        """The report of the last step, with the memory that the engine takes now. An engine with ``optimizer=None``
        reports the last forward of the model: in generation, a token. Raises ``OffloadError`` before the first one."""
        if self._session.last_report is None:
            raise OffloadError("no step has been taken yet: there is nothing to report")
        on_host, on_device = self._session.memory_bytes()
        return replace(self._session.last_report, host_memory_bytes=on_host, device_memory_bytes=on_device)

    @property
    def activation_pool(self) -> ActivationPool:
        """The memory of ``activation_memory``, and what of it goes on to NVMe. ``OffloadedCache`` is stored there, too.
        Raises ``ConfigError`` if nothing was set aside."""
        return self._session.activation_pool

    def expert_use(self) -> ExpertUse:
        """Bytes of experts that tokens were sent to, and bytes of experts read from NVMe, since the engine was made."""
        return self._session.expert_use()

    def log(self, **values: float | torch.Tensor) -> None:
        """Tell the observers, such as the run directory, of metrics of yours that belong to the last step taken:
        ``engine.log(loss=loss, accuracy=0.9)``. Numbers, or tensors of one element; on a device, nobody waits for them.

        ``engine.backward(loss)`` has told them the loss already. Without observers nothing happens.
        """
        self._session.failure.check()
        self._session.watch.log(self.global_step, values)

    def add_observer(self, observer: Observer) -> None:
        """Have ``observer`` told of each step (of each forward, if nothing is trained), of what is logged, and of the
        end: ``offload.LiveLine``,
        ``offload.TensorBoard``, ``offload.Prometheus``, or a subclass of ``offload.Observer`` of your own."""
        self._session.failure.check()
        self._session.watch.add(observer)

    def timeline(self, path: str | os.PathLike[str]) -> None:
        """Write what the last step did, and when, to the file ``path``: a trace that ui.perfetto.dev opens.

        Tracks: the uses of units by compute, what the training thread waited for, updates, and each read and write.
        Raises ``OffloadError`` before the first step.
        """
        self.report()
        with named(f"writing the timeline to {path}"):
            self._session.meter.trace.write(as_path("path", path))

    def state_dict(self) -> dict[str, Any]:
        """The model's state dict, with ordinary tensors: it holds the whole model in memory."""
        found = self.module.state_dict()
        self._session.checkpoints.saved.note("the state dict that was taken")
        return found

    def load_state_dict(self, state_dict: dict[str, Any], strict: bool = True) -> Any:
        """Load weights into the model. Each master becomes exactly the weight; moments stay."""
        return self.module.load_state_dict(state_dict, strict=strict)

    def save_model(
        self,
        dir: str | os.PathLike[str],
        dtype: str | None = None,
        max_shard_bytes: int | str = MAX_SHARD_BYTES,
    ) -> None:
        """Write the weights for others into the directory ``dir``: safetensors as ``transformers`` writes them, which
        its ``from_pretrained`` loads, with ``config.json`` for a model of its own. Of a model of ``peft`` the adapter.

        ``dtype`` is "fp32", "bf16" or "fp16"; None: that of ``precision``. Another one than that is cast from the fp32
        master. Tied weights are written once. Weights are read a few MiB at a time, so the model need not fit into
        memory. What was in ``dir`` stays as it is until the new files are complete, and goes then if it is weights.

        Raises ``StorageFull`` before anything is written if there is no room. Training can go on in any case.
        """
        self._session.failure.check()
        with named("save_model"):
            weights = self._session.weights()
            with weights.together():
                save_model(self.module, weights, dir, dtype or self.config.precision, max_shard_bytes)
        self._session.checkpoints.saved.note(dir)

    def save_checkpoint(self, dir: str | os.PathLike[str], tag: str | None = None, client_state: object = None) -> None:
        """Save all that a bit-identical continuation needs as ``dir/tag``; ``tag`` is "stepN" unless it is given.

        That is: weights, optimizer states, accumulated gradients, parameter groups, the loss scale, the states of
        random generators and of registered objects, and ``client_state``: numbers, strings, tensors, arrays, and lists,
        tuples and dicts of them. What is stored on NVMe is not copied if ``dir`` is on the file system of
        ``nvme_path``: the files get a second name there. On another one it is copied while training goes on: the next
        ``save_checkpoint``, ``load_checkpoint`` and ``close`` wait for that, and raise what it has failed with. The
        options ``keep_last`` and ``keep_every`` say which checkpoints stay.

        Raises ``StorageFull`` if there is no room: the checkpoints that there were are whole, and training can go on.
        """
        self._session.failure.check()
        with named("save_checkpoint"):
            self._session.save_checkpoint(dir, tag, client_state)

    def load_checkpoint(self, dir: str | os.PathLike[str] | None = None, tag: str | None = None) -> Any:
        """Go on from a checkpoint: the latest in ``dir``, or the one with this ``tag``. Returns its ``client_state``.

        Budgets, paths, I/O backends, dtypes of moments and masters, and numbers of threads may be others. Without
        ``dir`` it goes on from the last step that a run with ``durable`` has committed under ``nvme_path``; if there is
        none, nothing happens, and ``global_step`` is 0.

        Raises ``ConfigError`` for a checkpoint of another model, ``StoreMissing`` if there is none, ``StorageCorrupt``
        for a damaged one: the message names what else is there. If the damage shows while it is read, the engine is of
        no use any more.
        """
        self._session.failure.check()
        with torch.inference_mode(False), named("load_checkpoint"):
            return self._session.load_checkpoint(dir, tag)

    def save_dcp(self, dir: str | os.PathLike[str]) -> None:
        """Write weights, optimizer states and parameter groups as a ``torch.distributed.checkpoint`` for others into
        the directory ``dir``: ``{"model": ..., "optimizer": ...}`` as ``get_state_dict(model, optimizer)`` has them.

        All ranks call this, and each writes what it has, a few MiB at a time. What is trained is written in fp32, from
        the masters. The checkpoint that is in ``dir`` is whole until the new one is. Raises ``StorageFull`` before
        anything is written if there is no room. Training can go on in any case.
        """
        self._session.failure.check()
        with torch.inference_mode(False), on_cpu(), named("save_dcp"):
            self._session.save_dcp(dir)

    def load_dcp(self, dir: str | os.PathLike[str], states: bool = True) -> None:
        """Go on from the ``torch.distributed.checkpoint`` in ``dir``, which any number of ranks of an engine, of DDP,
        FSDP2 or plain PyTorch has written: weights, optimizer states, steps and the options of parameter groups.

        All ranks call this, and each reads what it needs. Masters become exactly the weights. Without ``states`` the
        optimizer stays as it is. Random generators, the loss scale and registered objects do in any case, and
        accumulated gradients are dropped with the states that they belong to. Of the pickle ``.metadata`` only torch's
        own classes of metadata are made, so it runs no code.

        Raises ``WeightsError`` for a checkpoint that is not whole, of another model, or without optimizer states:
        nothing has changed then. If damage shows while it is read, the engine is of no use any more.
        """
        self._session.failure.check()
        with torch.inference_mode(False), on_cpu(), named("load_dcp"):
            self._session.load_dcp(dir, states=states)

    def wait_for_checkpoint(self) -> None:
        """Return when no checkpoint is on its way to another file system. Raises, once, what it has failed with."""
        self._session.failure.check()
        self._session.checkpoints.generations.wait_for_background()

    def register_for_checkpointing(self, *objects: Any) -> None:
        """Have the states of these objects (schedulers, data loaders, ...) saved and restored with every commit and
        checkpoint: whatever has ``state_dict`` and ``load_state_dict``. Call it before ``load_checkpoint``."""
        self._session.checkpoints.register(objects)

    def close(self, discard: bool = False) -> None:
        """End the engine: transfers in flight are waited for, memory and disk are given back. Safe to call twice.

        The model has ordinary parameters again, with the values of the last step, as after ``unwrap``, if memory has
        room for all of them. If not, they are gone, and a warning says so if there were steps since they were last
        saved. ``discard`` ends the engine at once and without a word: the weights are not wanted. All ranks give the
        same.
        """
        with named("close"):
            self._session.close(discard=discard)

    def unwrap(self) -> nn.Module:
        """End the engine and return the model, with ordinary parameters that have the values of the last step.

        Gradients that no step has used go with them, optimizer states do not (``optimizer.state_dict()``, before).
        Raises ``BudgetError`` if memory has no room for all weights at once: the engine goes on then.
        """
        with named("unwrap"):
            self._session.unwrap()
        return self.module

    def __enter__(self) -> OffloadEngine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        first = self._session.failure.first
        with named("close"):
            self._session.close(error)
        if isinstance(first, RankError) and isinstance(error, RuntimeError) and not isinstance(error, OffloadError):
            raise first from error  # a collective of the program's own ends so, when the others have ended

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ConfigError(
            "an OffloadEngine cannot be copied or pickled. Save engine.state_dict() and "
            "engine.optimizer.state_dict(), or copy.deepcopy(engine.module)."
        )

    def __getattr__(self, name: str) -> Any:
        if self._is_of_module(name):
            raise AttributeError(f"an OffloadEngine is not the model and has no {name!r}: use engine.module.{name}")
        raise AttributeError(f"'OffloadEngine' object has no attribute {name!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        if not hasattr(type(self), name) and self._is_of_module(name):
            raise AttributeError(f"an OffloadEngine is not the model: set engine.module.{name}, which the model reads")
        super().__setattr__(name, value)

    def _is_of_module(self, name: str) -> bool:
        """The model has this public attribute, or would have it as any module, and the engine has none of its name."""
        known = name.startswith("_") or name in vars(self)
        return not known and (hasattr(nn.Module, name) or hasattr(vars(self).get("module"), name))
