"""Train models that do not fit: weights, gradients and optimizer states on GPU, host RAM and NVMe, bit for bit."""

from offload.config import OffloadConfig
from offload.engine import OffloadEngine
from offload.errors import BudgetError, ConfigError, NonFiniteGradient
from offload.plan import Plan
from offload.report import Report
from swapper import OffloadError, StorageError, StorageFull, StorageIOError, StorageTimeout, StoreLocked, StoreUnsafe

__all__ = [
    "BudgetError",
    "ConfigError",
    "NonFiniteGradient",
    "OffloadConfig",
    "OffloadEngine",
    "OffloadError",
    "Plan",
    "Report",
    "StorageError",
    "StorageFull",
    "StorageIOError",
    "StorageTimeout",
    "StoreLocked",
    "StoreUnsafe",
]
