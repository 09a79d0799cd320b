"""The room that opens and parses what others may have written: bounds first, and a refusal that names the field."""

from __future__ import annotations

import json
import os
import re
import signal
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from swapper import StorageCorrupt, StoreUnsafe, open_generation, waiting
from swapper.checked import (
    FLAG,
    TEXT,
    Cursor,
    FileName,
    Int,
    ListOf,
    MapOf,
    OneOf,
    Optional,
    Real,
    Record,
    Refused,
    Shape,
    Text,
    Tuple,
    open_regular,
    read_regular,
    refusals,
    require_held,
    text_of,
)
from swapper.manifest import Entry, Manifest


@contextmanager
def within_seconds(seconds: int) -> Iterator[None]:
    def late(*_: object) -> None:
        raise AssertionError("it waits")

    former = signal.signal(signal.SIGALRM, late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, former)


@pytest.mark.parametrize(
    ("kind", "value", "words"),
    [
        (Int(), -1, "-1 is not between 0"),
        (Int(0, 9), 10, "10 is not between 0 and 9"),
        (Int(), True, "expected a whole number, not True"),
        (Int(), 1.0, "expected a whole number, not 1.0"),
        (Int(), 10**500, "a number beyond all bounds"),
        (Real(), "1", "expected a number, not '1'"),
        (Real(), 10**400, "expected a number"),
        (Real(finite=True, above=0.0), float("nan"), "nan is not a number above 0.0"),
        (Real(finite=True, above=0.0), 0, "0 is not a number above 0.0"),
        (FLAG, 1, "expected true or false, not 1"),
        (TEXT, None, "expected a string, not None"),
        (TEXT, "\ud800", "has half of a letter"),
        (Text(3), "abcd", "a string has 4 letters, and can have at most 3"),
        (Text(not_="x"), "x", "it cannot be 'x'"),
        (OneOf({"a": 1}), "b", "'b' is none of a"),
        (OneOf({"a": 1}), ["a"], "a list of 1 is none of a"),
        (FileName(), "../a", "is not the name of a file in this directory"),
        (FileName(), "..", "is not the name of a file"),
        (FileName(), "", "is not the name of a file"),
        (FileName(), "/etc/passwd", "is not the name of a file"),
        (FileName(), "a\0", "is not the name of a file"),
        (FileName(), "é" * 200, "is not the name of a file"),
        (Shape(), [1 << 40, 1 << 40], "more elements than can be"),
        (Shape(), [0, 1 << 60, 1 << 60], "more elements than can be"),
        (Shape(), [2, -1], r"\[1\]: -1 is not between"),
        (Shape(), [1] * 65, "a list of 65 can have at most 64"),
        (Tuple(Int(), Int()), [1], "expected a list of 2"),
        (MapOf(Int()), {"a": "b"}, "a: expected a whole number, not 'b'"),
        (MapOf(Int()), [], "expected an object, not a list of 0"),
        (Record(dict, {"a": Int()}), {}, "a: it is not there"),
        (Record(dict, {"a": Int()}), {"a": 1, "b": 2}, "a field 'b' is none of a"),
        (Record(dict, {"a": ListOf(MapOf(Int()))}), {"a": [{}, {"x": None}]}, r"a\[1\].x: expected a whole number"),
    ],
)
def test_what_cannot_be_is_refused_by_its_field(kind: Any, value: Any, words: str):
    with pytest.raises(Refused) as refused:
        kind.take(value)
    assert re.search(words, str(refused.value))


def test_what_can_be_becomes_what_the_format_makes_of_it():
    kind = Record(dict, {"a": Int(), "s": Shape()}, {"o": Optional(TEXT), "n": OneOf({"f": float})})
    assert kind.take({"a": 1, "s": [2, 3], "n": "f"}) == {"a": 1, "s": (2, 3), "n": float}
    assert kind.take({"a": 1, "s": [], "o": None}) == {"a": 1, "s": (), "o": None}


def test_text_is_read_record_by_record_as_it_is_taken_at_once():
    item = Record(dict, {"a": Int(), "l": ListOf(Record(dict, {"x": Int()}))}, in_parts=True)
    kind = MapOf(ListOf(item))
    long = {"a": 1, "l": [{"x": x} for x in range(5000)]}
    content = {"one": [], "two": [{"a": 1, "l": [{"x": 2}]}, long]}
    for text in (json.dumps(content), json.dumps(content, indent=1)):
        cursor = Cursor(text)
        found = kind.read(cursor)
        cursor.end()
        assert found == kind.take(content)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", r"expected \{"),
        ("{", "expected a name at letter 1"),
        ("{[[]]: 1}", "expected a name at letter 1"),
        ('{"a"', "expected :"),
        ('{"a": [1, 2}', "expected , at letter 11"),
        ('{"a": [1]} x', "there is more behind it"),
        ('{"a": [1], "a": [2]}', "there twice"),
        ('{"a": [{"b": 1, "b": 2}]}', "there twice"),
        ('{"a": ' + "[" * 100_000, "too deep|more than"),
        ('{"a": [' + "9" * 5000 + "]}", "Exceeds the limit|beyond all bounds"),
    ],
)
def test_text_that_is_none_is_refused(text: str, words: str):
    kind = MapOf(ListOf(Int()))
    with pytest.raises(StorageCorrupt, match=words), refusals("it", StorageCorrupt):
        cursor = Cursor(text)
        kind.read(cursor)
        cursor.end()


@pytest.mark.parametrize("item", [b"[],", b"{},", b'"",', b"300,", b'{"a":0},', b"[[[[[[[[]]]]]]]],"])
def test_text_that_would_take_far_more_memory_is_refused_before_it_does(item: bytes):
    text = b"[" + item * ((8 << 20) // len(item)) + b"0]"
    tracemalloc.start()
    try:
        with pytest.raises(Refused, match="would take more than"):
            require_held(text, 64 << 20)
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()


def test_one_record_cannot_be_larger_than_records_are():
    text = '[{"a": [' + "[]," * 1_000_000 + "[]]}]"
    tracemalloc.start()
    try:
        with pytest.raises(Refused, match=r"\[0\]: it has more than 262,144 letters"):
            ListOf(Record(dict, {"a": Int()})).read(Cursor(text))
        assert tracemalloc.get_traced_memory()[1] < 16 << 20
    finally:
        tracemalloc.stop()


def test_wide_letters_are_counted_as_they_are_held():
    assert text_of("é😀".encode()) == "é😀"
    with pytest.raises(Refused, match="it is no text"):
        text_of(b"\xff")

    class Huge(bytes):
        def __len__(self) -> int:
            return 60 << 20

    with pytest.raises(Refused, match="would take"):
        text_of(Huge("😀".encode()))


def test_a_manifest_takes_a_few_times_its_bytes():
    entries = tuple(Entry(4096 * (index % 1000), 1 << 40, 0, (1 << 63) + index) for index in range(10_000))
    data = Manifest(bytes(16), 1 << 41, 2, 1, entries).encode()
    tracemalloc.start()
    try:
        Manifest.decode(data)
        assert tracemalloc.get_traced_memory()[1] < 8 * len(data)
    finally:
        tracemalloc.stop()


def pipe(path: Path) -> None:
    os.mkfifo(path)


def folder(path: Path) -> None:
    path.mkdir()


def link(path: Path) -> None:
    path.symlink_to(__file__)


@pytest.mark.parametrize("make", [pipe, folder, link])
def test_what_is_no_regular_file_is_refused_without_waiting(make: Callable[[Path], None], tmp_path: Path):
    make(tmp_path / "it")
    with within_seconds(5), pytest.raises((Refused, OSError)):
        read_regular(tmp_path / "it", 100)


def test_a_file_is_read_up_to_its_bound_and_not_followed_by_waits(tmp_path: Path):
    (tmp_path / "it").write_bytes(b"12345")
    assert read_regular(tmp_path / "it", 5) == b"12345"
    with pytest.raises(Refused, match="it has 5 bytes, and can have at most 4"):
        read_regular(tmp_path / "it", 4)
    with pytest.raises(Refused, match="zero byte"):
        read_regular("a\0", 4)
    file = open_regular(tmp_path / "it")
    assert os.get_blocking(file.number)
    file.close()


@pytest.mark.parametrize("name", ["data.0", "generation.0000000000000001"])
def test_a_pipe_in_the_place_of_a_checkpoints_file_is_an_error_at_once(name: str, tmp_path: Path):
    manifest = Manifest(bytes(16), 1, 2, 1, (Entry(4096, 1, 0, 0),))
    (tmp_path / "generation.0000000000000001").write_bytes(manifest.encode())
    (tmp_path / "data.0").write_bytes(bytes(4096))
    open_generation(tmp_path).close()
    (tmp_path / name).unlink()
    os.mkfifo(tmp_path / name)
    with within_seconds(5), pytest.raises((StoreUnsafe, StorageCorrupt), match="not a regular file"):
        open_generation(tmp_path)


def test_a_copy_with_links_and_one_of_another_user_can_be_read(tmp_path: Path):
    manifest = Manifest(bytes(16), 1, 2, 1, (Entry(4096, 1, 0, 0),))
    name = "generation.0000000000000001"
    (tmp_path / name).write_bytes(manifest.encode())
    (tmp_path / "data.0").write_bytes(bytes(4096))
    (tmp_path / "copy").mkdir()
    for each in (name, "data.0"):
        (tmp_path / "copy" / each).hardlink_to(tmp_path / each)
    open_generation(tmp_path / "copy").close()
    if os.geteuid() == 0:
        os.chown(tmp_path / name, 12345, 12345)
        os.chown(tmp_path / "data.0", 12345, 12345)
        open_generation(tmp_path).close()


def test_a_manifest_under_the_name_of_another_generation_is_refused(tmp_path: Path):
    (tmp_path / "generation.0000000000000002").write_bytes(Manifest(bytes(16), 1, 2, 1, ()).encode())
    with pytest.raises(StorageCorrupt, match="it is that of generation 1"):
        open_generation(tmp_path)


def test_all_transfers_are_waited_for_also_when_one_fails_or_none_can_begin_any_more():
    waited = []

    class Transfer:
        def __init__(self, name: str, error: Exception | None = None) -> None:
            self.name, self.error = name, error

        def wait(self) -> None:
            waited.append(self.name)
            if self.error is not None:
                raise self.error

    with pytest.raises(StorageCorrupt, match="first"), waiting() as tickets:
        tickets += [Transfer("a", StorageCorrupt("first")), Transfer("b")]  # type: ignore[list-item]
    with pytest.raises(KeyError), waiting() as tickets:
        tickets.append(Transfer("c"))  # type: ignore[arg-type]
        raise KeyError
    assert waited == ["a", "b", "c"]
