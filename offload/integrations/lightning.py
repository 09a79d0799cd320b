"""``Trainer(strategy="offload_nvme")`` and ``OffloadStrategy(...)`` for Lightning: docs/integrations/lightning.md.

Lightning has two import names, ``lightning.pytorch`` and ``pytorch_lightning``, whose classes are different. Importing
this module registers the strategy with each that is installed.

[Note: A checkpoint's two parts] A checkpoint is a folder under the name that Lightning gives it. The engine saves
weights, states and random generators there, without holding them in memory. What else Lightning saves (loops,
callbacks, schedulers, hyperparameters) is an ordinary file of Lightning's beside them. Both carry one random name, so
that parts of two checkpoints, left by an interrupted replacement, are told apart.
"""

from __future__ import annotations

import contextlib
import importlib.util
import inspect
import os
import uuid
from collections.abc import Iterator, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from offload.config import OffloadConfig
from offload.engine import OffloadEngine
from offload.errors import ConfigError
from offload.integrations.lightning_precision import PRECISIONS, OfLightning, precision_over
from offload.integrations.random_states import RandomStates, random_states_kept
from swapper import OffloadError

_NAME = "offload_nvme"
_PACKAGES = ("lightning.pytorch", "pytorch_lightning")
_TRIED = "2.6.6"
"""The version of Lightning that this was tried with."""

_SAID_ELSEWHERE = {
    "optimizer": "configure_optimizers returns the optimizer",
    **dict.fromkeys(("lr", "betas", "eps", "weight_decay", "optimizer_options"), "configure_optimizers says it"),
    "device": "write Trainer(accelerator=..., devices=...)",
    "precision": 'write Trainer(precision="bf16-true"), "16-true" or "32-true"',
    "gradient_clipping": "write Trainer(gradient_clip_val=...)",
    "gradient_accumulation_steps": "write Trainer(accumulate_grad_batches=...)",
    "durable": "write Trainer(callbacks=[ModelCheckpoint(...)])",
    **dict.fromkeys(("keep_last", "keep_every"), "write ModelCheckpoint(save_top_k=...)"),
}
"""Options of the engine that a program of Lightning gives in another place."""

_TRAINER_FILE = "trainer.ckpt"
_ENGINE_TAG = "engine"
_ID = "offload_checkpoint"
"""Under this key Lightning's part of a checkpoint has the name of both."""


_CURRENT = "current_model_state"
"""Where ``WeightAveraging`` puts the state dict of the model, which it replaces by that of the averages."""


_OF_DDP = ("barrier", "broadcast", "distributed_sampler_kwargs", "num_processes", "reduce", "set_world_ranks")
"""Methods by which ``DDPStrategy`` handles processes. It is no base: Lightning would give one process a distributed
sampler."""


_KEPT = "_offload_kept"
"""Attribute of a module that has its ``_Kept``."""


class _Kept:
    """A module's engine. It ends with the module and not with the trainer: runs of other trainers go on with it, and so
    do those of this one after a run of another module. A copy of the module, and a file of it, have none."""

    def __init__(self, engine: OffloadEngine | None = None) -> None:
        self.engine = engine

    def __reduce__(self) -> Any:
        return _Kept, ()


def _engine_of(module: Any) -> OffloadEngine | None:
    """The engine that a run has left with the module, if the weights are still there."""
    kept = getattr(module, _KEPT, None)
    return kept.engine if kept is not None and OffloadEngine.holds(module) else None


class _Strategy(OfLightning):  # type: ignore[misc]
    """The strategy. A mixin over ``ParallelStrategy`` of one of the packages, which is ``package``, with what
    ``_OF_DDP`` names."""

    strategy_name = _NAME
    package: Any
    world_size: int
    optimizers: list[Any]
    num_nodes = 1
    _start_method = "popen"
    """Of the processes that ``DDPStrategy`` starts."""

    def __init__(
        self,
        nvme_path: Any = None,
        host_memory: int | str = "auto",
        *,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        """``options`` are fields of ``OffloadConfig``. Without ``nvme_path`` the store is under the trainer's
        ``default_root_dir``. Raises ``ConfigError`` for options that cannot work."""
        for name, instead in _SAID_ELSEWHERE.items():
            if name in options:
                raise ConfigError(f"OffloadStrategy({name}=...): leave it out, {instead}")
        self._engine: OffloadEngine | None = None
        self._checkpoint: tuple[Path, str] | None = None
        """The folder and the name of the checkpoint that the present run begins with, if the engine saved it."""
        self._averages: Mapping[str, Any] = {}
        """Weights that a callback has put into that checkpoint in the model's place, for whoever evaluates them."""
        self._generators: RandomStates | None = None
        """Those of the checkpoint, while the run has not begun."""
        self._is_set_up = False
        """The engine is that of the present run: what is loaded now goes to it at once."""
        self._has_nvme_path = nvme_path is not None
        self._config = OffloadConfig(nvme_path=nvme_path or (), host_memory=host_memory, **options)
        super().__init__(accelerator=accelerator, checkpoint_io=checkpoint_io, precision_plugin=precision_plugin)

    @property
    def engine(self) -> OffloadEngine:
        """The engine of the model that the last run of the trainer had. Raises ``OffloadError`` if there is none."""
        if self._engine is None:
            raise OffloadError(
                "the strategy has no engine yet, or it is closed: the trainer makes one when a run begins"
            )
        return self._engine

    def close(self) -> None:
        """End the engine: memory and disk are given back. The model has its weights again, if they fit into memory: see
        ``OffloadEngine.close``."""
        if self._engine is not None:
            engine, self._engine = self._engine, None
            engine.close()

    # Where it runs.

    @property
    def root_device(self) -> torch.device:
        """Device on which this process computes. Raises ``ConfigError`` for what is neither a CPU nor a GPU."""
        device = torch.device(self.parallel_devices[self.local_rank])
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f'the engine computes on "cpu" or "cuda", and the trainer has {device.type!r}')
        return device

    @property
    def is_distributed(self) -> bool:
        """Each process is to have its part of the data."""
        return self.world_size > 1

    def _configure_launcher(self) -> None:
        """Processes of ``devices=2`` are started as ``DDPStrategy`` does, where no launcher has."""
        if self.is_distributed:
            self.package.strategies.DDPStrategy._configure_launcher(self)

    def setup_environment(self) -> None:
        """Start ``torch.distributed`` among the trainer's processes. Not by Lightning's own function: that ends it
        before the program's end, when the engine still needs it to end on all ranks."""
        super().setup_environment()
        if self.world_size == 1 or torch.distributed.is_initialized():
            return
        environment = self.cluster_environment
        os.environ.update(MASTER_ADDR=environment.main_address, MASTER_PORT=str(environment.main_port))
        backend = "gloo" if self.root_device.type == "cpu" else "cpu:gloo,cuda:nccl"
        torch.distributed.init_process_group(backend, rank=self.global_rank, world_size=self.world_size)

    def model_to_device(self) -> None:
        """No bytes move: it tells the modules which device they are on."""
        self.model.to(self.root_device)

    @property
    def precision_plugin(self) -> Any:
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        self._precision_plugin = None if plugin is None else precision_over(plugin)

    @contextlib.contextmanager
    def tensor_init_context(self, empty_init: bool | None = None) -> Iterator[None]:
        """Modules are built in host memory, whatever computes; with ``empty_init`` on the meta device, for weights that
        come from a checkpoint or from the modules' own initialisers."""
        with torch.device("meta" if empty_init else "cpu"):
            yield

    # A run.

    def connect(self, model: Any) -> None:
        """A run of the trainer begins."""
        self._checkpoint = None
        self._generators = None
        self._is_set_up = False
        super().connect(model)

    def setup(self, trainer: Any) -> None:
        """Make the engine: for training over the optimizer of ``configure_optimizers``, else without states. Evaluation
        goes on with the engine of a run before."""
        self.accelerator.setup(trainer)
        self._engine = _engine_of(self.lightning_module)
        if trainer.state.fn == self.package.trainer.states.TrainerFn.FITTING:
            if self._engine is not None:
                self._engine.unwrap()
            self._engine = None
            self.setup_optimizers(trainer)
            self._engine = self._make(trainer, self._only_optimizer())
            self.optimizers = [self._engine.optimizer]
        elif self._engine is None:
            self._engine = self._make(trainer, None)
        elif self._engine.config.precision != PRECISIONS[self.precision_plugin.precision]:
            raise ConfigError(
                f"the module's engine has precision={self._engine.config.precision!r}, and this trainer "
                f"{self.precision_plugin.precision!r}: give both trainers one precision, or close the first "
                "(trainer.strategy.close())"
            )
        self.precision_plugin.engine = self._engine
        self.model_to_device()
        if self._checkpoint is not None:
            self._begin_with(trainer, *self._checkpoint)
        self._is_set_up = True
        self.setup_precision_plugin()

    def process_dataloader(self, dataloader: Any) -> Any:
        """Undo the draws that Lightning has made before this to find out whether a loader can be iterated over: the
        uninterrupted run has not made them, and the epoch's iterator is made with the checkpoint's random numbers."""
        if self._generators is not None and self.lightning_module.trainer.training:
            self._generators.restore()
        return dataloader

    def on_train_start(self) -> None:
        """In the middle of an epoch the random generators go on where they were. Making the loader's iterator has drawn
        from them just now; at the begin of an epoch that belongs to the run."""
        loop = self.lightning_module.trainer.fit_loop
        is_inside = loop.restarted_mid_epoch and not loop.epoch_loop.batch_progress.is_last_batch
        if self._generators is not None and is_inside:
            self._generators.restore()
        self._generators = None

    @property
    def engine_runs_backward(self) -> bool:
        """``engine.backward`` is what Lightning's backward would be, and the engine gains by it."""
        module = self.lightning_module
        if not module.automatic_optimization or type(module).backward is not self.package.LightningModule.backward:
            return False
        clips = module.trainer.gradient_clip_val or (
            type(module).configure_gradient_clipping is not self.package.LightningModule.configure_gradient_clipping
        )
        return self.engine.config.precision == "fp16" or not clips

    def teardown(self) -> None:
        """The run is over. The engine stays with the model, which can be saved, evaluated and read as ever."""
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()
        if self._engine is None:
            return
        try:
            self._engine.synchronize()
        except OffloadError:
            self.close()
            raise
        self._engine.wait_for_checkpoint()

    def on_exception(self, exception: BaseException) -> None:
        """Ctrl-C ends the engine, which says what is kept: Lightning ends the program without a traceback."""
        super().on_exception(exception)
        if isinstance(exception, KeyboardInterrupt) and self._engine is not None:
            engine, self._engine = self._engine, None
            engine.__exit__(type(exception), exception, exception.__traceback__)

    def _make(self, trainer: Any, optimizer: torch.optim.Optimizer | None) -> OffloadEngine:
        options: dict[str, Any] = {}
        if not self._has_nvme_path:
            options["nvme_path"] = Path(trainer.default_root_dir)
            options["nvme_path"].mkdir(parents=True, exist_ok=True)
        engine = OffloadEngine(
            self.lightning_module,
            self._config,
            optimizer=optimizer,
            device=self.root_device,
            precision=PRECISIONS[self.precision_plugin.precision],
            gradient_accumulation_steps=1 if optimizer is None else self._most_micro_batches(trainer),
            **options,
        )
        setattr(self.lightning_module, _KEPT, _Kept(engine))
        return engine

    def _only_optimizer(self) -> torch.optim.Optimizer:
        if len(self.optimizers) != 1:
            raise ConfigError(
                f"configure_optimizers gave {len(self.optimizers)} optimizers, and the engine takes over one: give "
                "one, with a parameter group for each part of the model"
            )
        (optimizer,) = self.optimizers
        own = set(map(id, self.lightning_module.parameters()))
        if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            raise ConfigError(
                "configure_optimizers gave no optimizer over the module's parameters: the engine needs one"
            )
        assert isinstance(optimizer, torch.optim.Optimizer)
        return optimizer

    def _most_micro_batches(self, trainer: Any) -> int:
        """Backwards that are added up for one step, at most."""
        numbers: list[int] = [trainer.accumulate_grad_batches]
        for callback in trainer.callbacks:
            if isinstance(callback, self.package.callbacks.GradientAccumulationScheduler):
                numbers += callback.scheduling.values()
        return max(numbers)

    # Checkpoints.

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Nothing, where the engine saves the weights: see [Note: A checkpoint's two parts]."""
        return {} if self._engine is not None else super().lightning_module_state_dict()

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Nothing, where the engine saves the states."""
        return {} if self._engine is not None else super().optimizer_state(optimizer)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save the folder ``filepath``. With weights alone (``weights_only``) it is one file as of any strategy."""
        if self._engine is None:
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if "optimizer_states" not in checkpoint:
            if self.is_global_zero:  # others' engines give what this one wants
                checkpoint["state_dict"] = self.lightning_module.state_dict()
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        folder = _local(filepath)
        if self.is_global_zero and folder.is_file():
            folder.unlink()
        name = self.broadcast(uuid.uuid4().hex)
        self._engine.save_checkpoint(folder, _ENGINE_TAG, client_state=name)
        super().save_checkpoint({**checkpoint, _ID: name}, folder / _TRAINER_FILE, storage_options)

    def remove_checkpoint(self, filepath: Any) -> None:
        """Remove a checkpoint when the one after it is complete."""
        if self._engine is not None:
            self._engine.wait_for_checkpoint()
            self.barrier()
        super().remove_checkpoint(filepath)

    def load_checkpoint(self, checkpoint_path: Any, **kwargs: Any) -> dict[str, Any]:
        """Lightning's part of a checkpoint. ``setup`` loads the engine's. Files of other strategies are read whole."""
        folder = Path(checkpoint_path)
        if not folder.is_dir():
            return super().load_checkpoint(checkpoint_path, **kwargs)  # type: ignore[no-any-return]
        if not (folder / _TRAINER_FILE).exists():
            raise ConfigError(f"{folder} is no complete checkpoint of this strategy: {_TRAINER_FILE} is not there")
        checkpoint: dict[str, Any] = super().load_checkpoint(folder / _TRAINER_FILE, **kwargs)
        self._checkpoint = folder, checkpoint[_ID]
        self._averages = checkpoint["state_dict"]
        if _CURRENT in checkpoint:  # the engine's part has it: see ``_begin_with``
            checkpoint[_CURRENT] = self.lightning_module.state_dict()
        return checkpoint

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Take the weights of another strategy's file. Those that the engine saved come with their states: in ``setup``
        where a run begins with them, at once where one goes back to them (a search for the learning rate)."""
        if self._checkpoint is None:
            super().load_model_state_dict(checkpoint, strict=strict)
        elif self._is_set_up:
            with random_states_kept():
                self._load(*self._checkpoint)

    @property
    def lightning_restore_optimizer(self) -> bool:
        """The states are in another strategy's file."""
        return self._checkpoint is None

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Take the states of another strategy's file."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)

    def _begin_with(self, trainer: Any, folder: Path, name: str) -> None:
        is_fitting = trainer.state.fn == self.package.trainer.states.TrainerFn.FITTING
        with contextlib.nullcontext() if is_fitting else random_states_kept():
            self._load(folder, name)
        if is_fitting:
            self._generators = RandomStates()
        elif self._averages:
            self.lightning_module.load_state_dict(self._averages)

    def _load(self, folder: Path, name: str) -> None:
        if self.engine.load_checkpoint(folder, _ENGINE_TAG) != name:
            raise ConfigError(f"{folder} was being replaced when a run ended: its parts are of two checkpoints")


def _local(path: Any) -> Path:
    """``path`` on this machine. Raises ``ConfigError`` for one elsewhere."""
    if "://" in str(path):
        raise ConfigError(f"checkpoint {path}: the engine saves to local file systems. Give a local dirpath")
    return Path(path)


def _strategy_for(name: str) -> Any:
    """The strategy over the classes of one package, registered there."""
    package = import_module(name)
    loop = import_module(f"{name}.loops.fit_loop")
    if not hasattr(getattr(loop, "_FitLoop", None), "restarted_mid_epoch"):
        raise ImportError(
            f"{name} {package.__version__} has no loops.fit_loop._FitLoop.restarted_mid_epoch, which resuming needs: "
            f"version {_TRIED} was tried"
        )
    base, ddp = package.strategies.ParallelStrategy, package.strategies.DDPStrategy
    of_ddp = {name: inspect.getattr_static(ddp, name) for name in _OF_DDP}
    own = {"package": package, "__doc__": _Strategy.__doc__, **of_ddp}
    strategy = type("OffloadStrategy", (_Strategy, base), own)
    package.strategies.StrategyRegistry.register(_NAME, strategy, description=__doc__.splitlines()[0], override=True)
    return strategy


_strategies = {
    name: _strategy_for(name) for name in _PACKAGES if importlib.util.find_spec(name.partition(".")[0]) is not None
}
if not _strategies:
    raise ImportError(f"Lightning is not installed: pip install lightning (version {_TRIED} was tried)")

OffloadStrategy: Any = next(iter(_strategies.values()))
"""For ``lightning.pytorch``; where only the other package is installed, for that one."""

PytorchLightningOffloadStrategy: Any = _strategies.get("pytorch_lightning")
"""For ``pytorch_lightning``; None where it is not installed."""
