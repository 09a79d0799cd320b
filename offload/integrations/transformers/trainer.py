"""A trainer whose model is in an engine: what is the engine's work in place of what the trainer does in memory."""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator, Mapping
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
import transformers
from torch import nn
from transformers import Trainer

from offload.config import OffloadConfig
from offload.engine import OffloadEngine
from offload.errors import ConfigError
from offload.integrations.random_states import random_states_kept
from offload.integrations.transformers.callback import OffloadCallback
from offload.integrations.transformers.reference import Sharing
from offload.integrations.transformers.settings import engine_config, for_arguments, refuse_arguments

_USED = (
    "call_model_init", "create_accelerator_and_postprocess", "create_optimizer", "_load_best_model",
    "_load_from_checkpoint", "_load_optimizer_and_scheduler", "_move_model_to_device", "_save", "_save_checkpoint",
    "_save_optimizer_and_scheduler",
)  # fmt: skip
"""Methods of ``Trainer`` that are replaced here. Most are private, so they may go with any release."""

_missing = [name for name in _USED if not hasattr(Trainer, name)]
if _missing:
    raise ImportError(
        f"transformers {transformers.__version__} has no Trainer.{_missing[0]}, which the engine's trainer replaces; "
        "5.23 was tried. Trainer(optimizers=(engine.optimizer, None)) needs none of it"
    )

TAG = "offload"
"""The engine's checkpoint is the folder of this name in a trainer's checkpoint."""

_SCHEDULER, _ARGUMENTS = "scheduler.pt", "training_args.bin"


class OffloadTrainerMixin(Trainer):
    """Puts an engine under a trainer: ``class MyTrainer(OffloadTrainerMixin, SFTTrainer)``.

    ``offload`` is an ``OffloadConfig``, a dict of its options, or an ``OffloadEngine`` that has the model already
    (``model`` may be left out then). The optimizer is the one that the trainer would have built: its class, groups and
    settings are those of ``TrainingArguments``. With an ``OffloadEngine`` it is that engine's own. Without a
    ``train_dataset`` the engine only evaluates, and holds weights alone.

    A frozen ``ref_model`` is put into an engine of its own, which gets the least of ``host_memory`` that it runs with.

    The engine is there from the trainer's construction on, after ``train`` as well, as ``trainer.engine``. ``close``
    ends it, and so does ``with``; the end of the program does, too. Raises ``ConfigError`` for what cannot work, and
    what ``OffloadEngine`` raises.
    """

    def __init__(
        self, *args: Any, offload: OffloadConfig | Mapping[str, Any] | OffloadEngine | None = None, **kwargs: Any
    ) -> None:
        self._engine: OffloadEngine | None = None
        self._reference: OffloadEngine | None = None
        self._figures: OffloadCallback | None = None
        self._checkpoint_has_weights = False
        """While a checkpoint is saved: the engine's part of it has the weights."""
        self._takes_part = False
        """In the saving of a model that is under way."""
        given = offload if isinstance(offload, OffloadEngine) else None
        # The class's method builds what the engine takes over, a subclass's as well; who asks the trainer gets it.
        self.create_optimizer = self._optimizer_of_engine  # type: ignore[method-assign]
        self._config = engine_config(None if isinstance(offload, OffloadEngine) else offload)
        if given is not None and not args:
            kwargs.setdefault("model", given.module)
        super().__init__(*args, **kwargs)
        if given is not None:
            self._take_engine(given)
        else:
            self._make_engine()

    @property
    def engine(self) -> OffloadEngine:
        """The engine that has the model."""
        if self._engine is None:
            raise ConfigError("the trainer is closed: its engine is gone. Make a new trainer")
        return self._engine

    @property
    def reference_engine(self) -> OffloadEngine | None:
        """The engine that has ``ref_model``, if the trainer has put it into one."""
        return self._reference

    def close(self, discard: bool = False) -> None:
        """End the engine and that of the reference model. The models have their weights again, if they fit into memory:
        see ``OffloadEngine.close``. Safe to call twice."""
        for engine in self._given_up():
            engine.close(discard)

    def __enter__(self) -> OffloadTrainerMixin:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        for engine in self._given_up():
            engine.__exit__(kind, error, traceback)

    def _given_up(self) -> list[OffloadEngine]:
        """The engines, which are the trainer's no longer."""
        engines, self._engine, self._reference = (self._engine, self._reference), None, None
        return [engine for engine in engines if engine is not None]

    # The engine, and the optimizer over it.

    def _take_engine(self, engine: OffloadEngine) -> None:
        """Use the engine that the user made over ``model``."""
        if self.model is not engine.module:
            raise ConfigError("offload is an engine over another model than the trainer's: give model=engine.module")
        if self.optimizer is not None and self.optimizer is not engine.optimizer:
            raise ConfigError("optimizers: the engine in offload= has an optimizer already. Leave optimizers= out")
        if self._frozen() is not None:
            raise ConfigError(
                "the engine in offload= has all of its budgets, and ref_model needs some of them: give the options in "
                "offload= in its place, or ref_model=OffloadEngine(reference, optimizer=None, ...).module"
            )
        self._engine, self.optimizer = engine, engine.optimizer
        self._show_engine()

    def _make_engine(self) -> None:
        """Put the model into an engine, if it is not in one: a trainer with ``model_init`` has a new one in each
        ``train``."""
        if self._engine is not None and self._engine.module is self.model:
            return
        self.close()
        trains = self._config.optimizer is not None and self.train_dataset is not None
        config = for_arguments(self._config, self.args, trains=trains)
        reference = self._frozen()
        sharing = Sharing(config, reference) if reference is not None else None
        if trains:
            type(self).create_optimizer(self)
        optimizer = self.optimizer if trains else None
        model: Any = self.model
        with _adapters_in_turns(model) if trains else contextlib.nullcontext():
            if sharing is None:
                self._engine = OffloadEngine(model, config, optimizer=optimizer)
            else:
                self._engine, self._reference = sharing.engines(model, optimizer)
        self.optimizer = self._engine.optimizer
        self._show_engine()

    def _frozen(self) -> nn.Module | None:
        """The reference model, if there is one that is in no engine yet."""
        reference = getattr(self, "ref_model", None)
        if reference is None or self._reference is not None or OffloadEngine.holds(reference):
            return None
        return reference  # type: ignore[no-any-return]

    def _show_engine(self) -> None:
        """Have the engine's figures in the logs, before whatever else looks at them."""
        if self._figures is not None:
            self._figures.engine = self.engine
        elif self.engine.optimizer is not None:
            self._figures = OffloadCallback(self.engine)
            self.callback_handler.callbacks.insert(0, self._figures)

    def create_accelerator_and_postprocess(self) -> None:
        """Refuse what the engine cannot follow, and leave devices to it: nothing moves models or states. Batches go to
        the device as ever, and to other ranks by that way (``dispatch_batches``)."""
        refuse_arguments(self.args)
        if self.args.n_gpu > 1:
            self.args._n_gpu = 1
        super().create_accelerator_and_postprocess()
        self.accelerator.device_placement = False
        self.accelerator.prepare_data_loader = partial(_placing, self.accelerator.prepare_data_loader)
        # Ranks exchange gradients in the engine: nothing is to wrap the model for it.
        self.accelerator.prepare_model = partial(self.accelerator.prepare_model, evaluation_mode=True)

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """The engine brings weights where they are needed."""

    def call_model_init(self, trial: Any = None) -> nn.Module:
        """The former model goes first."""
        self.close(discard=True)
        return super().call_model_init(trial)

    def _optimizer_of_engine(self, model: Any = None) -> torch.optim.Optimizer:
        """The engine's optimizer: it is made, if the model is not in an engine yet."""
        self._make_engine()
        if self.optimizer is None:
            raise ConfigError(
                "the trainer was made without train_dataset (or with optimizer=None), so its engine evaluates only: "
                "make it with one"
            )
        return self.optimizer

    def train(self, *args: Any, **kwargs: Any) -> Any:
        """As ever. Returns when the checkpoints are complete."""
        output = super().train(*args, **kwargs)
        self.engine.wait_for_checkpoint()
        return output

    # Checkpoints.

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        whole = self.args.save_only_model or self.args.push_to_hub
        self._checkpoint_has_weights = not whole and not _adapters(self.model)
        try:
            super()._save_checkpoint(model, trial)
        finally:
            self._checkpoint_has_weights = False

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As the Trainer's. All ranks take part: earlier releases, such as 5.20, call ``_save`` in one alone."""
        self._takes_part = False
        super().save_model(output_dir, _internal_call)
        if not (self._takes_part or self._engine is None or _saves_adapters_itself(self.model)):
            self._save(output_dir)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        self._takes_part = True
        if state_dict is not None or self._engine is None or _saves_adapters_itself(self.model):
            super()._save(output_dir, state_dict)
            return
        folder = Path(output_dir or self.args.output_dir or ".")
        folder.mkdir(parents=True, exist_ok=True)
        if not self._checkpoint_has_weights:
            self.engine.save_model(folder)
        if not self.args.should_save:
            return
        if self._checkpoint_has_weights:
            for config in (getattr(self.model, name, None) for name in ("config", "generation_config")):
                if config is not None and hasattr(config, "save_pretrained"):
                    config.save_pretrained(folder)
        tokenizer: Any = self.processing_class
        if tokenizer is None:
            tokenizer = getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, folder / _ARGUMENTS)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        self.engine.save_checkpoint(output_dir, TAG)
        if self.args.save_total_limit:  # an older one goes next: not before this one is complete on all ranks
            self.engine.wait_for_checkpoint()
            self.accelerator.wait_for_everyone()
        if not self.args.should_save:
            return
        scheduler: Any = self.lr_scheduler
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch asks that the optimizer be saved, too
            torch.save(scheduler.state_dict(), Path(output_dir, _SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        if _has_engine(resume_from_checkpoint):
            return
        folder = Path(resume_from_checkpoint)
        if folder.is_dir() and not any(folder.rglob("*model*")):
            raise ConfigError(f"{folder} has no weights: its process ended before it was complete. Take an older one")
        super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _has_engine(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        self._load_engine(checkpoint)
        scheduler: Any = self.lr_scheduler
        scheduler.load_state_dict(torch.load(Path(checkpoint, _SCHEDULER), weights_only=True))

    def _load_best_model(self) -> None:
        best = self.state.best_model_checkpoint
        if best is not None and _has_engine(best):
            self._load_engine(best)
        else:
            super()._load_best_model()

    def _load_engine(self, checkpoint: str) -> None:
        """Go on from the engine's part of a checkpoint. Random generators are the trainer's to set."""
        with random_states_kept():
            self.engine.load_checkpoint(checkpoint, TAG)


class OffloadTrainer(OffloadTrainerMixin):
    """``transformers.Trainer`` with ``offload=``: see ``OffloadTrainerMixin``."""


def _placing(prepare: Any, loader: Any, device_placement: bool | None = None, **options: Any) -> Any:
    """What an accelerator makes of a loader, as if it placed things on devices."""
    return prepare(loader, device_placement is not False, **options)


def _adapters(model: Any) -> dict[str, Any]:
    """The adapters of a model of ``peft``, or of one into which ``transformers`` has put some."""
    return getattr(model, "peft_config", None) or {}


@contextlib.contextmanager
def _adapters_in_turns(model: nn.Module) -> Iterator[None]:
    """Within, all adapters of a model that has several require grad, so that its engine has room for each. ``peft``
    thaws the one that is made active, if only for a forward: with DPO the reference is an adapter."""
    layers: list[Any] = [module for module in model.modules() if hasattr(module, "adapter_layer_names")]
    parts = [getattr(layer, name) for layer in layers for name in layer.adapter_layer_names]
    of_adapters = [parameter for part in parts if isinstance(part, nn.Module) for parameter in part.parameters()]
    frozen = [item for item in of_adapters if not item.requires_grad] if len(_adapters(model)) > 1 else []
    try:
        for parameter in frozen:
            parameter.requires_grad_(True)
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _saves_adapters_itself(model: Any) -> bool:
    """It has several adapters, or one that ``transformers`` itself has put in: the engine's ``save_model`` writes one
    of ``peft``."""
    return len(_adapters(model)) > 1 or bool(getattr(model, "_hf_peft_config_loaded", False))


def _has_engine(checkpoint: str | os.PathLike[str]) -> bool:
    return Path(checkpoint, TAG).is_dir()
