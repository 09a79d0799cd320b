"""Records that lie in files of other people's: aligned reads around unaligned bytes, and files that change."""

from __future__ import annotations

import ctypes
import os
import random
from collections.abc import Iterator
from pathlib import Path

import pytest
from interrupted import at_every_point

import aio_ext
from swapper import PAGE_BYTES, Arena, FilePart, InPlaceFiles, InPlaceRecord, ReadOnlyFile, WeightsChanged, align
from swapper.checksum import Once
from swapper.in_place import part_checksum

FILE_BYTES = 5 * PAGE_BYTES + 123
UNTOUCHED = 0xEE


@pytest.fixture
def content(tmp_path: Path) -> bytes:
    data = random.Random(1).randbytes(FILE_BYTES)
    (tmp_path / "weights").write_bytes(data)
    return data


@pytest.fixture
def file(tmp_path: Path, content: bytes) -> Iterator[ReadOnlyFile]:
    descriptor = os.open(tmp_path / "weights", os.O_RDONLY)
    yield ReadOnlyFile(tmp_path / "weights", descriptor, 7, os.fstat(descriptor))
    os.close(descriptor)


@pytest.fixture
def files(file: ReadOnlyFile) -> Iterator[InPlaceFiles]:
    files = InPlaceFiles([file])
    yield files
    files.close()


def read(record: InPlaceRecord, nbytes: int) -> bytes:
    """The record in memory that had another byte everywhere."""
    with aio_ext.Memory(nbytes) as memory:
        ctypes.memset(memory.address, UNTOUCHED, nbytes)
        record.read(memory.address).wait()
        return ctypes.string_at(memory.address, nbytes)


@pytest.mark.each_value
@pytest.mark.parametrize("block_bytes", [PAGE_BYTES, None])
@pytest.mark.parametrize("offset", [0, 64, PAGE_BYTES, PAGE_BYTES + 192])
@pytest.mark.parametrize("start", [0, 1, 100, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 8, 3 * PAGE_BYTES - 5])
def test_parts_of_any_length_at_any_byte_come_to_their_place_and_nothing_else_is_touched(
    start: int, offset: int, block_bytes: int | None, file: ReadOnlyFile, files: InPlaceFiles, content: bytes
) -> None:
    """In blocks of a page, as some drives want them, and in those of the drive that is here."""
    if block_bytes is not None:
        file.__dict__["block_bytes"] = block_bytes
    around = (0, 1, PAGE_BYTES - 1, PAGE_BYTES, PAGE_BYTES + 1, 2 * PAGE_BYTES, FILE_BYTES)
    for end in sorted({min(start + length, FILE_BYTES) for length in around} | {5 * PAGE_BYTES, FILE_BYTES - 1}):
        nbytes = end - start
        if nbytes <= 0:
            continue
        size = align(offset + nbytes) + PAGE_BYTES
        record = InPlaceRecord("it", [FilePart(file, start, nbytes, offset)], size, files)
        found = read(record, size)
        assert found[offset : offset + nbytes] == content[start:end]
        assert found[:offset] == bytes([UNTOUCHED]) * offset
        assert found[offset + nbytes :] == bytes([UNTOUCHED]) * (size - offset - nbytes)


def test_small_neighbours_come_in_one_request_whatever_their_order(file: ReadOnlyFile, content: bytes) -> None:
    """As the tensors of an expert lie in a file."""
    lengths, parts, start = (700, 5_000, 12, 9_000), [], 50
    for length in lengths:
        parts.append((start, length))
        start += length
    size, offset, record_parts = 8 * PAGE_BYTES, 0, []
    for start, length in reversed(parts):
        record_parts.append(FilePart(file, start, length, offset))
        offset += align(length)
    files = InPlaceFiles([file])
    record = InPlaceRecord("an expert", record_parts, size, files)
    assert record.edge_bytes == align(50 + sum(lengths), file.block_bytes)
    found = read(record, size)
    for part in record_parts:
        assert found[part.offset : part.offset + part.nbytes] == content[part.start : part.start + part.nbytes]
    counts = files.statistics().read
    assert (counts.operations, counts.bytes) == (1, record.edge_bytes)
    files.close()


def test_no_more_is_read_of_a_file_than_the_blocks_of_the_drive_that_a_part_lies_in(
    file: ReadOnlyFile, files: InPlaceFiles
) -> None:
    block = aio_ext.direct_io_alignment(file.descriptor)[1]
    for start, nbytes in ((700, 5_000), (PAGE_BYTES + 3, 3 * PAGE_BYTES)):
        before = files.statistics().read.bytes
        read(InPlaceRecord("it", [FilePart(file, start, nbytes, 0)], 4 * PAGE_BYTES, files), 4 * PAGE_BYTES)
        assert files.statistics().read.bytes - before <= align(nbytes, block) + block


def test_several_parts_of_several_files_make_one_record(tmp_path: Path, file: ReadOnlyFile, content: bytes) -> None:
    (tmp_path / "other").write_bytes(b"tiny")
    with (tmp_path / "other").open("rb") as stream:
        other = ReadOnlyFile(tmp_path / "other", stream.fileno(), 8, os.fstat(stream.fileno()))
        files = InPlaceFiles([file, other])
    parts = [
        FilePart(file, 9, 2 * PAGE_BYTES, 0),
        FilePart(other, 1, 2, 2 * PAGE_BYTES),
        FilePart(file, 0, 3 * PAGE_BYTES, 3 * PAGE_BYTES),
    ]
    size = 6 * PAGE_BYTES
    arena = Arena(16 * PAGE_BYTES)
    record = InPlaceRecord("it", parts, size, files)
    files.use(arena, record.edge_bytes, 1)
    found = read(record, size)
    files.close()
    assert found[: 2 * PAGE_BYTES] == content[9 : 9 + 2 * PAGE_BYTES]
    assert found[2 * PAGE_BYTES :][:2] == b"in"
    assert found[3 * PAGE_BYTES :] == content[: 3 * PAGE_BYTES]


def test_a_first_read_whose_judging_ctrl_c_strikes_at_any_point_gives_the_bytes_of_the_file(
    monkeypatch: pytest.MonkeyPatch, file: ReadOnlyFile, files: InPlaceFiles, content: bytes
) -> None:
    """It was made again, and moved what had been moved: the checksum of that was noted as the true one."""
    monkeypatch.setattr(Once, "start", lambda work: None)  # who waits judges
    nbytes, size = 5 * PAGE_BYTES, 6 * PAGE_BYTES

    def run(interrupted) -> None:
        record = InPlaceRecord("it", [FilePart(file, 100, nbytes, 0)], size, files)
        with aio_ext.Memory(size) as memory:
            ticket = record.read(memory.address)
            interrupted(ticket.wait)
            ticket.wait()
            assert ctypes.string_at(memory.address, nbytes) == content[100 : 100 + nbytes]
            assert list(record.checksums) == [part_checksum(memory.address, nbytes)]

    assert at_every_point("swapper/in_place.py", run) > 10


def test_bytes_that_have_changed_since_they_were_first_read_are_refused_by_the_name_of_the_file(
    tmp_path: Path, file: ReadOnlyFile, files: InPlaceFiles
) -> None:
    record = InPlaceRecord("weights of a", [FilePart(file, 50, 2 * PAGE_BYTES, 0)], 2 * PAGE_BYTES, files)
    assert list(record.checksums) == [None]
    read(record, 3 * PAGE_BYTES)
    assert None not in record.checksums
    status = file.status
    with (tmp_path / "weights").open("r+b") as stream:
        stream.seek(PAGE_BYTES)
        byte = stream.read(1)
        stream.seek(PAGE_BYTES)
        stream.write(bytes([byte[0] ^ 1]))
    os.utime(tmp_path / "weights", ns=(status.st_atime_ns, status.st_mtime_ns))  # as a failing disk would have it
    with pytest.raises(WeightsChanged, match=r"weights of a: .*/weights \[50, 8242\) is not what it was: checksum"):
        read(record, 3 * PAGE_BYTES)
    assert files.reads.num_second_reads == 1


def test_a_file_that_was_written_is_refused_before_its_bytes_are_used(
    tmp_path: Path, file: ReadOnlyFile, files: InPlaceFiles
) -> None:
    record = InPlaceRecord("weights of a", [FilePart(file, 0, 100, 0)], PAGE_BYTES, files)
    os.utime(tmp_path / "weights", ns=(1, 1))
    with pytest.raises(WeightsChanged, match=r"/weights has changed while it is read in place: time of change"):
        read(record, PAGE_BYTES)
    assert list(record.checksums) == [None]


@pytest.mark.parametrize("nbytes", [0, PAGE_BYTES, 5 * PAGE_BYTES])
def test_a_file_that_was_cut_off_is_refused_by_its_name(
    nbytes: int, tmp_path: Path, file: ReadOnlyFile, files: InPlaceFiles
) -> None:
    record = InPlaceRecord("weights of a", [FilePart(file, 7, FILE_BYTES - 7, 0)], 6 * PAGE_BYTES, files)
    os.truncate(tmp_path / "weights", nbytes)
    with pytest.raises(WeightsChanged, match=r"/weights has (changed|been cut off) while it is read in place"):
        read(record, 6 * PAGE_BYTES)


def test_another_file_under_the_same_name_is_not_read(
    tmp_path: Path, file: ReadOnlyFile, files: InPlaceFiles, content: bytes
) -> None:
    record = InPlaceRecord("weights of a", [FilePart(file, 0, 100, 0)], PAGE_BYTES, files)
    (tmp_path / "new").write_bytes(bytes(FILE_BYTES))
    (tmp_path / "new").rename(tmp_path / "weights")
    assert read(record, PAGE_BYTES)[:100] == content[:100]


def test_a_checksum_that_was_known_before_is_what_the_first_read_must_give(
    file: ReadOnlyFile, files: InPlaceFiles
) -> None:
    parts = [FilePart(file, 0, 100, 0)]
    first, second = (InPlaceRecord("weights of a", parts, PAGE_BYTES, files) for _ in range(2))
    read(first, PAGE_BYTES)
    second.expect(first.checksums)
    read(second, PAGE_BYTES)
    third = InPlaceRecord("weights of a", parts, PAGE_BYTES, files)
    third.expect([5])
    with pytest.raises(WeightsChanged, match="is not what it was: checksum"):
        read(third, PAGE_BYTES)
    with pytest.raises(WeightsChanged, match="other bytes than those that were trained with"):
        first.expect([5])


def test_memory_of_other_bytes_is_no_record_of_the_file(file: ReadOnlyFile, files: InPlaceFiles) -> None:
    record = InPlaceRecord("weights of a", [FilePart(file, 0, 100, 0)], PAGE_BYTES, files)
    with aio_ext.Memory(PAGE_BYTES) as memory:
        record.read(memory.address).wait()
        record.require(memory.address)
        ctypes.memset(memory.address, 0, 3)
        with pytest.raises(WeightsChanged, match=r"were to be changed, and they are read in place from .*/weights"):
            record.require(memory.address)
