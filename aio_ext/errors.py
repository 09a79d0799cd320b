"""The one exception that a failed request raises."""

from __future__ import annotations

import os


class QueueError(OSError):
    """A request that did not succeed.

    ``errno`` and ``strerror`` are the kernel's (``ENODATA``: the file ended before the request did; ``ECANCELED``: the
    queue was closed first). ``bytes_done`` counts what was transferred, not necessarily from the front: blocks finish
    in any order, and after the first failure no further ones are started.
    """

    def __init__(
        self, errno: int, operation: str, file: str, offset: int, nbytes: int, bytes_done: int, error_offset: int
    ) -> None:
        super().__init__(errno, os.strerror(errno))
        self.operation = operation
        self.file = file
        self.offset = offset
        self.nbytes = nbytes
        self.bytes_done = bytes_done
        self.error_offset = error_offset
        """Offset in the file of the block that failed first."""

    def __str__(self) -> str:
        place = f"{self.operation} of {self.file}"
        if self.operation == "sync":
            return f"{place}: [Errno {self.errno}] {self.strerror}"
        return (
            f"{place}, [{self.offset}, {self.offset + self.nbytes}): [Errno {self.errno}] {self.strerror} "
            f"at offset {self.error_offset}; {self.bytes_done} of {self.nbytes} bytes done"
        )

    def __reduce__(self) -> tuple[type[QueueError], tuple[int, str, str, int, int, int, int]]:
        number = self.errno or 0
        fields = (self.operation, self.file, self.offset, self.nbytes, self.bytes_done, self.error_offset)
        return type(self), (number, *fields)
