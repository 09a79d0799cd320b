"""The text to learn from: files read as bytes, a few windows at a time, so that even a large corpus costs no memory."""

import bisect
import os
import sysconfig
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from offload.train.errors import InputError, RunError

_NOT_SOURCE = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
"""Folders of the standard library that are left out: what others installed, tests, and tables of characters."""


class Text:
    """The bytes of some files, one after the other. Holds names and sizes only; every read goes to the files."""

    def __init__(self, files: Sequence[Path]) -> None:
        sizes = [path.stat().st_size for path in files]
        self._files = [path for path, size in zip(files, sizes, strict=True) if size]
        self._ends = list(accumulate(size for size in sizes if size))

    def __len__(self) -> int:
        return self._ends[-1] if self._ends else 0

    @property
    def num_files(self) -> int:
        return len(self._files)

    def read(self, offset: int, length: int) -> bytes:
        """``length`` bytes from ``offset`` on, across the ends of files. Raises ``RunError`` if a file has shrunk."""
        index = bisect.bisect_right(self._ends, offset)
        data = bytearray()
        while len(data) < length:
            start = self._ends[index - 1] if index else 0
            size = min(length - len(data), self._ends[index] - offset)
            with self._files[index].open("rb", buffering=0) as file:
                piece = os.pread(file.fileno(), size, offset - start)
            if len(piece) != size:
                raise RunError(f"{self._files[index]} became shorter while it was read")
            data += piece
            offset, index = offset + size, index + 1
        return bytes(data)


def open_text(paths: Sequence[Path], *, window: int) -> Text:
    """The text of files and folders, or the Python standard library's own source if there are none.

    Of a folder, all files below it are taken in the order of their names, without hidden ones and without those that
    hold a zero byte in their first KiB. Raises ``InputError`` if the text is shorter than one ``window`` of bytes, or
    if a path cannot be read.
    """
    try:
        files = [file for path in paths for file in _files_of(path)] if paths else list(_standard_library())
        text = Text(files)
    except OSError as error:
        raise InputError(f"cannot read the text {error.filename}: {error.strerror}") from error
    if len(text) < window:
        named = ", ".join(map(str, paths)) or "the Python standard library"
        hint = "" if paths else "; give a text with --text"
        raise InputError(
            f"the text is too short: {len(text)} bytes in {named}, and one training window has {window} bytes{hint}"
        )
    return text


def batches(text: Text, *, batch: int, context: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Endless random windows: tokens and, one byte later, targets; int64 ``(batch, context)`` each.

    The same text and seed give the same batches in every process; torch's global generator is not touched.
    """
    generator = torch.Generator().manual_seed(seed)
    while True:
        offsets = torch.randint(len(text) - context, (batch,), generator=generator).tolist()
        windows = bytearray().join(text.read(offset, context + 1) for offset in offsets)
        rows = torch.frombuffer(windows, dtype=torch.uint8).view(batch, context + 1).long()
        yield rows[:, :-1].contiguous(), rows[:, 1:].contiguous()


def _standard_library() -> Iterator[Path]:
    for file in _walk(Path(sysconfig.get_path("stdlib")), skip=_NOT_SOURCE):
        if file.suffix == ".py":
            yield file


def _files_of(path: Path) -> Iterator[Path]:
    if not path.is_dir():
        path.open("rb").close()
        yield path
        return
    for file in _walk(path, skip=set()):
        with file.open("rb") as opened:
            if b"\0" not in opened.read(1024):
                yield file


def _walk(folder: Path, *, skip: set[str]) -> Iterator[Path]:
    """The regular files below a folder in a fixed order, without hidden ones."""
    for parent, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if name not in skip and not name.startswith("."))
        for name in sorted(names):
            file = Path(parent, name)
            if not name.startswith(".") and file.is_file():
                yield file
