"""The core that serves this process: the native one, or the portable one where the extension is not built."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from . import _aio as core

    NATIVE = True
else:
    try:
        from . import _aio as core
    except ImportError:
        from . import portable_memory as core
    NATIVE = core.__name__.endswith("_aio")

__all__ = ["NATIVE", "core"]
