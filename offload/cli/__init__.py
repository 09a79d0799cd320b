"""The command line: options in, a call of a room that knows nothing of it, and printing for people or programs."""

from offload.cli.app import main

__all__ = ["main"]
