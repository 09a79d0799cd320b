"""The command line: options in, a call of a room that knows nothing of it, and printing for people or programs."""

from __future__ import annotations

import signal
import sys
from collections.abc import Sequence

__all__ = ["main"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command with ``sys.argv`` or the given arguments; returns the exit status. Without any: help."""
    try:
        from offload.cli import app  # here: a Ctrl-C while the parser is loaded is one line, too
    except KeyboardInterrupt:
        print("offload: stopped by SIGINT", file=sys.stderr)
        return 128 + signal.SIGINT
    return app.main(arguments)
