"""The folder that a run's results go to: made before the work begins, so that a wrong place is known at once."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator
from pathlib import Path

from offload.train.errors import InputError


@contextlib.contextmanager
def output_folder(path: Path) -> Iterator[Path]:
    """The folder, made if it is not there. If the block fails, the folders made here are removed again.

    Raises ``InputError`` if it cannot be made or written to.
    """
    made: list[Path] = []
    try:
        try:
            for folder in [*reversed(path.absolute().parents), path]:
                if not folder.exists():
                    folder.mkdir()
                    made.append(folder)
            tempfile.TemporaryFile(dir=path).close()
        except OSError as error:
            raise InputError(f"--out: cannot write to {path}: {error.strerror}") from error
        yield path
    except BaseException:
        for folder in reversed(made):
            with contextlib.suppress(OSError):  # not empty: somebody else's by now
                folder.rmdir()
        raise
