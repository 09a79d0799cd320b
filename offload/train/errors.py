"""The errors of the program that are the user's to mend; everything else it raises comes from the engine."""


class InputError(Exception):
    """Something that was asked for cannot work. The message is one line: what, where, and the way out."""


class RunError(Exception):
    """The run failed although it was asked for rightly. The message is one line."""
