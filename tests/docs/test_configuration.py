"""The pages of options, methods and commands are made from the sources."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).parents[2] / "scripts"))

import config_reference
import reference

from offload import OffloadConfig


def test_the_page_is_that_of_the_options():
    assert config_reference.PAGE.read_text() == config_reference.page(), "run scripts/config_reference.py --write"


def test_the_page_of_methods_and_commands_is_that_of_their_docstrings():
    assert reference.PAGE.read_text() == reference.page(), "run scripts/reference.py --write"
    for heading in ("### engine.step()", "### OffloadEngine.from_pretrained()", "### offload plan", "### LiveLine"):
        assert f"\n{heading}\n" in reference.page()


def test_every_option_is_there_with_its_default():
    found = config_reference.options()
    assert list(found) == [field.name for field in dataclasses.fields(OffloadConfig)]
    made = OffloadConfig()
    for name in ("lr", "gradient_accumulation_steps", "precision", "prefetch"):
        assert found[name].default.strip('"') == str(getattr(made, name))
        assert f"### {name}\n\n`{found[name].type}`, default `{found[name].default}`" in config_reference.page()
