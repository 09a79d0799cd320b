"""The errors of the program beside those of the engine. The message is one line."""

from offload import ConfigError, OffloadError


class InputError(ConfigError, explained=False):
    """Something that was asked for cannot work: what, where, and the way out."""


class RunError(OffloadError, explained=False):
    """The run failed although it was asked for rightly."""
