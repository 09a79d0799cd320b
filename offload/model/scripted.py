"""Functions of TorchScript in a block that runs again.

Torch's checkpoint ends a second run by an exception as soon as all that was saved is there. From within a scripted
function the interpreter passes on a ``RuntimeError`` of its own, whose last line says what the exception said: nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch.utils import checkpoint

from offload.torch_internals import found

_Stop: type[Exception] = found(checkpoint, "_StopRecomputationError")


@contextmanager
def stopped_in_script() -> Iterator[None]:
    """Within, such an error is the end of the run that it stands for. Errors with words go on as they are; torch says
    what is missing if a run has ended too early."""
    try:
        yield
    except RuntimeError as error:
        text = str(error)
        if "TorchScript interpreter" in text and text.rstrip().endswith("RuntimeError:"):
            raise _Stop from error
        raise
