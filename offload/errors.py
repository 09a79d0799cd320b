"""The engine's own errors, beside those of the store, and its warnings. All errors are ``OffloadError``."""

from __future__ import annotations

import contextlib
import errno
import sys
import warnings
from collections.abc import Iterator

from swapper.errors import OffloadError, StorageFull, failed, of_limit

OLDEST_TORCH = "2.8"
"""The oldest release of torch that has all that the engine stands on. ``pyproject.toml`` asks for it, too."""


class ConfigError(OffloadError, ValueError, explained=False):
    """An option or a model that cannot work. Nothing was allocated."""


class BudgetError(ConfigError):
    """A budget is too small for the model. ``needed_bytes`` is the least that works, of the option that ``budget``
    names: what all ranks on the machine share, or, of ``device_memory``, each one's. Nothing was allocated."""

    def __init__(self, message: str, needed_bytes: int, *, budget: str = "host_memory") -> None:
        """``{needed}`` in ``message`` stands for ``needed_bytes``."""
        super().__init__(message.replace("{needed}", str(needed_bytes)))
        self.message = message
        self.needed_bytes = needed_bytes
        self.budget = budget


OTHER_OPTIMIZERS = (
    "If that cannot be changed, take one that makes of a parameter what follows from it and its gradient alone: "
    'optimizer="adamw", "lion", "sgd", "adagrad", "muon" or "lamb", or most others (docs/optimizers.md lists which)'
)
"""The way that there is beside all optimizers that cannot run so."""


def cannot_run_alone(name: str, why: str) -> str:
    """Message for an optimizer of this name that needs several parameters at once."""
    return f"optimizer {name} cannot run one parameter at a time: {why.removesuffix('.')}. {OTHER_OPTIMIZERS}"


class WeightsError(ConfigError):
    """A file with weights that is not there, is damaged, or does not fit the model."""


class NonFiniteGradient(OffloadError):
    """A gradient holds NaN or infinity. The step was not taken: weights and states are what they were before it."""


class DeviceMemoryError(OffloadError):
    """The device has no room for weights that compute needs. What is stored in host memory and on NVMe is whole."""


class ActivationError(OffloadError):
    """An activation could not be kept over the tiers, or not be had back. With ``needed_bytes`` of
    ``activation_memory`` it can, where that is known; else 0."""

    survives = "Weights, optimizer states and everything that was committed. This batch has no gradients that count."
    advice = "Call optimizer.zero_grad() and go on with the next batch. If a drive fails again: see `dmesg`."

    def __init__(self, what: str, *, advice: str | None = None, needed_bytes: int = 0) -> None:
        super().__init__(what, advice=advice)
        self.needed_bytes = needed_bytes


class WaitTimeout(OffloadError):
    """A thread of the engine did not do its part within the deadline."""

    survives = "What was committed or checkpointed; the step under way may be incomplete."
    advice = "A disk or a device may hang: see `dmesg`. End the process."


class RankError(OffloadError):
    """A rank has failed, is gone, or does something else than the others: all of them end, with the same message."""

    survives = "What every rank has committed or checkpointed."
    advice = "Start all ranks again, as `torchrun --max-restarts` does, and go on from there: load_checkpoint."


class TorchUnsupported(OffloadError):
    """This release of torch lacks, or has changed, something that the engine stands on."""


def warn(message: str) -> None:
    """Warn of something that the user has written, at the line of the user's program that called the engine, or torch
    that called it."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (__package__, "torch"):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


@contextlib.contextmanager
def named(what: str) -> Iterator[None]:
    """What the system refuses within is an ``OffloadError`` that says ``what`` it was; of a limit, which one it is and
    what to do."""
    try:
        yield
    except OSError as error:
        raise _named(what, error) from error
    except RuntimeError as error:
        if str(error) != "can't start new thread":  # Python does not say it in another way
            raise
        raise _named(what, OSError(errno.EAGAIN, str(error))) from error


def _named(what: str, error: OSError) -> OffloadError:
    limit = of_limit(error)
    if limit is not None:
        return OffloadError(f"{what}: {error.strerror}.", advice=limit)
    told = failed(what, error)
    told.survives = "What is stored is as it was: training can go on."
    if not isinstance(told, StorageFull):
        told.advice = "See to what the system names, and call it again."
    return told
