"""``offload config``: what the configuration of another library means here."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from typer import Argument

from offload.cli.console import Json, show_answer


def from_deepspeed(
    file: Annotated[Path, Argument(metavar="FILE", help="The JSON file.")],
    json: Json = False,
) -> int:
    """Print what a configuration of DeepSpeed means here.

    That is the options of the engine, and what becomes of each key. Nothing is trained and nothing is written.
    """
    from offload.compat.deepspeed.shown import facts_of, text_of
    from offload.compat.deepspeed.translation import translate

    translation = translate(file)
    show_answer(facts_of(translation), text_of(translation), to_programs=json)
    return 0


def deepspeed_keys(json: Json = False) -> int:
    """List every key of DeepSpeed, and what becomes of it."""
    from offload.compat.deepspeed.table import key_facts, markdown

    show_answer(key_facts(), markdown(), to_programs=json)
    return 0
