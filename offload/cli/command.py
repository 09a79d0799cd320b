"""A command whose faults are told in its name: one line for what goes wrong on purpose, a traceback for the rest."""

from __future__ import annotations

from typing import Any

from typer.core import TyperCommand

from offload.cli.console import show_error


class Command(TyperCommand):
    """Runs a function of its options that returns the exit status. Errors give 2 for bad input and 1 for a fault."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError:
            raise
        except Exception as error:
            status = _status_of(error)
            if status is None:
                raise
            wants_json = ctx.params.get("json", False)
            show_error(ctx.command_path, type(error).__name__, _message_of(error), to_programs=wants_json)
            return status


def _status_of(error: Exception) -> int | None:
    """None: nobody meant to raise it."""
    if isinstance(error, ImportError):  # such as a native part that was not built
        return 1
    from offload.errors import ConfigError
    from swapper.errors import OffloadError, StorageFull, StoreMissing, StoreUnsafe

    if isinstance(error, (ConfigError, StoreMissing, StoreUnsafe, StorageFull)):
        return 2
    no_memory = isinstance(error, RuntimeError) and "can't allocate memory" in str(error)  # torch's MemoryError
    return 1 if no_memory or isinstance(error, (OffloadError, OSError, MemoryError)) else None


def _message_of(error: Exception) -> str:
    message = str(error)
    if isinstance(error, ImportError) and "pip install" not in message:
        message += "; run `pip install -e .` in the project's folder"
    return message
