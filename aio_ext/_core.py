"""The core that serves this process: the native one, or the portable one where the extension is not built."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ._aio import (
        Channel,
        FaultPlan,
        Lease,
        anonymous_memory,
        direct_io_alignment,
        lease_containing,
        pattern_memory,
        uring_obstacle,
    )

    NATIVE = True
else:
    try:
        from ._aio import (
            Channel,
            FaultPlan,
            Lease,
            anonymous_memory,
            direct_io_alignment,
            lease_containing,
            pattern_memory,
            uring_obstacle,
        )

        NATIVE = True
    except ImportError:
        from .portable_memory import (
            Channel,
            Lease,
            anonymous_memory,
            direct_io_alignment,
            lease_containing,
            pattern_memory,
            uring_obstacle,
        )

        FaultPlan = None  # faults are injected by the native core only
        NATIVE = False

__all__ = [
    "NATIVE",
    "Channel",
    "FaultPlan",
    "Lease",
    "anonymous_memory",
    "direct_io_alignment",
    "lease_containing",
    "pattern_memory",
    "uring_obstacle",
]
