"""Train models that do not fit: weights, gradients and optimizer states on GPU, host RAM and NVMe, bit for bit."""

from __future__ import annotations

import logging
from importlib import import_module
from typing import TYPE_CHECKING, Any

from offload.version import VERSION

if TYPE_CHECKING:
    from offload.birth.initialise import deferred_init as deferred_init
    from offload.config import OffloadConfig as OffloadConfig
    from offload.engine import OffloadEngine as OffloadEngine
    from offload.errors import ActivationError as ActivationError
    from offload.errors import BudgetError as BudgetError
    from offload.errors import ConfigError as ConfigError
    from offload.errors import DeviceMemoryError as DeviceMemoryError
    from offload.errors import NonFiniteGradient as NonFiniteGradient
    from offload.errors import RankError as RankError
    from offload.errors import TorchUnsupported as TorchUnsupported
    from offload.errors import WaitTimeout as WaitTimeout
    from offload.errors import WeightsError as WeightsError
    from offload.model.tiles import attention_in_tiles as attention_in_tiles
    from offload.model.tiles import cross_entropy_in_tiles as cross_entropy_in_tiles
    from offload.model.tiles import in_tiles as in_tiles
    from offload.plan.plan import Plan as Plan
    from offload.report.report import ExpertUse as ExpertUse
    from offload.report.report import Report as Report
    from offload.run.live import LiveLine as LiveLine
    from offload.run.observer import Observer as Observer
    from offload.run.observer import StepRecord as StepRecord
    from offload.run.prometheus import Prometheus as Prometheus
    from offload.run.tensorboard import TensorBoard as TensorBoard
    from swapper import OffloadError as OffloadError
    from swapper import StorageCorrupt as StorageCorrupt
    from swapper import StorageError as StorageError
    from swapper import StorageFull as StorageFull
    from swapper import StorageIOError as StorageIOError
    from swapper import StorageTimeout as StorageTimeout
    from swapper import StoreExists as StoreExists
    from swapper import StoreLocked as StoreLocked
    from swapper import StoreMissing as StoreMissing
    from swapper import StoreMisuse as StoreMisuse
    from swapper import StoreUnsafe as StoreUnsafe
    from swapper import WeightsChanged as WeightsChanged

_PUBLIC = {
    "offload.config": ("OffloadConfig",),
    "offload.engine": ("OffloadEngine",),
    "offload.errors": (
        "ActivationError", "BudgetError", "ConfigError", "DeviceMemoryError", "NonFiniteGradient", "RankError",
        "TorchUnsupported", "WaitTimeout", "WeightsError",
    ),
    "offload.model.tiles": ("attention_in_tiles", "cross_entropy_in_tiles", "in_tiles"),
    "offload.plan.plan": ("Plan",),
    "offload.report.report": ("ExpertUse", "Report"),
    "offload.run.live": ("LiveLine",),
    "offload.run.observer": ("Observer", "StepRecord"),
    "offload.run.prometheus": ("Prometheus",),
    "offload.run.tensorboard": ("TensorBoard",),
    "swapper": (
        "OffloadError", "StorageCorrupt", "StorageError", "StorageFull", "StorageIOError", "StorageTimeout",
        "StoreExists", "StoreLocked", "StoreMissing", "StoreMisuse", "StoreUnsafe", "WeightsChanged",
    ),
    "offload.birth.initialise": ("deferred_init",),
}  # fmt: skip
_HOMES = {name: module for module, names in _PUBLIC.items() for name in names}
__all__ = list(_HOMES)
__version__ = VERSION

logging.getLogger(__name__).addHandler(logging.NullHandler())


def __getattr__(name: str) -> Any:
    """Public names are imported when first used: the command line must not wait for torch to print a mistake."""
    if name not in _HOMES:
        raise AttributeError(f"module 'offload' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
