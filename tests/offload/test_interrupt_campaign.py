"""A slice of the campaign that interrupts a step at every line, and that it finds what it is there to find."""

from __future__ import annotations

import sys
from pathlib import Path

import forked
import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"
sys.path.append(str(SCRIPTS))

import interrupts  # noqa: E402

PLANTED = f"""
import sys, time
sys.path.insert(0, {str(SCRIPTS)!r})
import interrupts

def recover(engine, step):
    {{}}

interrupts.recover = recover
raise SystemExit(interrupts.main())
"""


@pytest.mark.one_in(4)
@pytest.mark.parametrize("variant", interrupts.VARIANTS)
def test_a_step_that_is_interrupted_at_some_line_leaves_the_same_bits_or_raises_our_error(variant: str):
    count = 1 if interrupts.VARIANTS[variant].once else 10
    options = ["--seed", "11", "--variant", variant, "--trials", str(count), "--together", "10"]
    found = forked.run_script(SCRIPTS / "interrupts.py", *options)
    assert found.returncode == 0, found.stdout + found.stderr
    assert f"{variant}: {count} of " in found.stdout


@pytest.mark.parametrize(
    ("planted", "words", "count", "deadline"),
    [
        ("pass", "other losses from step", 6, "60"),
        ("time.sleep(100)", "not over after 4 s: rank 0 in recover (<string>:7)", 1, "4"),
        ("raise KeyError(step)", "KeyError: ", 1, "60"),
    ],
    ids=["gradients are kept", "a hang", "another error"],
)
def test_the_campaign_finds_a_mistake(planted: str, words: str, count: int, deadline: str):
    options = ["--seed", "11", "--variant", "ram", "--deadline", deadline]
    found = forked.run(PLANTED.format(planted), *options, "--trials", count, "--together", count)
    assert found.returncode == 1, found.stdout + found.stderr
    assert words in found.stdout
