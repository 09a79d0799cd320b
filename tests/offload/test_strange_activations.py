"""Blocks and loops of odd kinds with their activations over the tiers: all kinds once, in turns of modes."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import pytest
from strange_activations import LOOPS, Program, judge
from strange_blocks import BLOCKS, NUM_BLOCKS

REFUSED = {
    "WritesToItsInput": "writes to its arguments",
    "AddsInPlace": "writes to its arguments",
    "RectifiedInPlace": "writes to its arguments",
    "WritesToAViewOfItsInput": "writes to its arguments",
    "WritesToAnInputWithoutGradient": "writes to its arguments",
    "OutGiven": "writes to its arguments",
    "Accumulates": "writes to its arguments",
    "Streams": "writes to its arguments",
    "ArgumentInPlace": "changes values in place",
    "RowOfArgumentInPlace": "changes element 0 of a list in place",
    "WrittenAfterwards": "modified by an inplace operation",
}
"""Kinds that cannot be recomputed, and what the one error says."""

NEVER = {"GradientInside", "Penalised", "Doubled"}
"""Those that no mode takes, and the engine says so."""

PLAIN = [kind for kind in BLOCKS if kind not in REFUSED and kind not in NEVER]
SETTINGS = [("recompute", "ram"), ("nvme", "nvme"), ("host", "nvme"), ("auto", "nvme"), ("by unit", "nvme")]
IN_TURNS = [name for name in LOOPS if name != "penalty"]


def groups() -> Iterator[tuple[tuple[str, ...], str, tuple[str, str]]]:
    """Kinds of blocks, a loop and a setting: each kind and each loop once."""
    kinds, num_groups = iter(PLAIN), max(len(IN_TURNS), -(-len(PLAIN) // NUM_BLOCKS))
    for number in range(num_groups):
        of_model = (*islice(kinds, NUM_BLOCKS), "Draws", "Statistics", "Lazy", "Kind")[:NUM_BLOCKS]
        yield of_model, IN_TURNS[number % len(IN_TURNS)], SETTINGS[number % len(SETTINGS)]


@pytest.mark.one_in(6)
@pytest.mark.parametrize(
    ("kinds", "loop", "setting"), [*groups()], ids=lambda part: "+".join([part] if isinstance(part, str) else part)
)
def test_all_kinds_of_blocks_and_loops_have_the_bits_of_keep(
    kinds: tuple[str, ...], loop: str, setting: tuple[str, str], tmp_path: Path
):
    wrong, typed = judge(Program(kinds, loop, num_steps=2), tmp_path, [setting])
    assert not wrong, wrong[0]
    assert not typed, typed


@pytest.mark.one_in(2)
@pytest.mark.parametrize("kind", REFUSED)
def test_a_block_that_a_second_run_would_find_changed_is_one_error(kind: str, tmp_path: Path):
    wrong, typed = judge(Program((kind,) * NUM_BLOCKS, "plain", num_steps=1), tmp_path, [("nvme", "nvme")])
    assert not wrong, wrong[0]
    (message,) = typed
    assert REFUSED[kind] in message
    assert '"keep"' in message
