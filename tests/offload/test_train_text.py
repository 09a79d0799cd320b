"""Text and batches."""

from __future__ import annotations

from itertools import islice

import pytest
import torch

from offload.train.errors import InputError, RunError
from offload.train.text import batches, open_text


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "a.txt").write_bytes(b"abc")
    (tmp_path / "b" / "c.txt").write_bytes(b"defgh")
    (tmp_path / "empty.txt").write_bytes(b"")
    (tmp_path / "d.txt").write_bytes(b"ij")
    (tmp_path / "picture").write_bytes(b"\x89PNG\0\0")
    (tmp_path / ".hidden").write_bytes(b"hidden")
    return tmp_path


def test_a_folder_is_read_in_order_without_hidden_and_binary_files(folder):
    text = open_text([folder], window=1)
    assert text.read(0, len(text)) == b"abcijdefgh"
    assert text.num_files == 3


def test_reads_cross_the_ends_of_files(folder):
    text = open_text([folder], window=1)
    for offset in range(10):
        for length in range(10 - offset):
            assert text.read(offset, length) == b"abcijdefgh"[offset : offset + length]


def test_a_named_file_is_read_as_it_is(folder):
    text = open_text([folder / "picture", folder / ".hidden"], window=1)
    assert text.read(0, len(text)) == b"\x89PNG\0\0hidden"


def test_without_paths_it_is_the_source_of_the_standard_library():
    text = open_text([], window=1)
    assert len(text) > 1_000_000
    assert b"import" in text.read(0, 20_000)


@pytest.mark.parametrize("name", ["missing", "empty.txt", "b"])
def test_text_that_cannot_be_used_is_named(folder, name):
    with pytest.raises(InputError, match=name):
        open_text([folder / name], window=6)


def test_a_file_that_shrinks_is_an_error_and_not_a_shorter_batch(folder):
    text = open_text([folder / "a.txt"], window=1)
    (folder / "a.txt").write_bytes(b"a")
    with pytest.raises(RunError, match="shorter"):
        text.read(0, 3)


def test_batches_are_windows_with_targets_one_byte_later(folder):
    text = open_text([folder], window=4)
    for tokens, targets in islice(batches(text, batch=2, context=3, seed=1), 20):
        for row, target in zip(tokens, targets, strict=True):
            window = bytes(row.tolist())
            assert window in b"abcijdefgh"
            assert window[1:] + bytes([target[-1]]) == bytes(target.tolist())


def test_a_text_of_exactly_one_window_works(folder):
    text = open_text([folder / "a.txt"], window=3)
    tokens, targets = next(batches(text, batch=1, context=2, seed=0))
    assert (bytes(tokens[0].tolist()), bytes(targets[0].tolist())) == (b"ab", b"bc")


def test_batches_depend_on_the_seed_alone(folder):
    text = open_text([folder], window=4)
    torch.manual_seed(3)
    first = [tokens.tolist() for tokens, _ in islice(batches(text, batch=2, context=3, seed=5), 9)]
    torch.manual_seed(4)
    state = torch.get_rng_state()
    again = [tokens.tolist() for tokens, _ in islice(batches(text, batch=2, context=3, seed=5), 9)]
    other = [tokens.tolist() for tokens, _ in islice(batches(text, batch=2, context=3, seed=6), 9)]
    assert first == again != other
    assert torch.equal(state, torch.get_rng_state())
