"""The campaign as a page of the documentation."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

from misuses.judging import Result, Verdict

_HEAD = """\
# What works in a loop: all programs that were tried

[What works in a loop](outside.md) has the rules. Each line is a small program. It runs three times: under plain
PyTorch, under the engine with everything in RAM, and under the engine with the least budget and the rest on NVMe
(some with `torch.compile` run in RAM only). "The same" means the numbers of plain PyTorch, and the same bits in RAM
and on NVMe. This page is made by `PYTHONPATH=tests python -m misuses --markdown > docs/outside-table.md`.
"""


def markdown(verdicts: Sequence[Verdict]) -> str:
    """A table for each family."""
    pages = [_HEAD]
    for family, items in groupby(verdicts, key=lambda verdict: verdict.case.family):
        lines = [f"\n## {family.capitalize()}\n", "| case | plain PyTorch | the engine |", "|---|---|---|"]
        lines += [f"| {_cell(v.case.title)} | {_cell(v.in_torch)} | {_cell(_engine(v))} |" for v in items]
        pages.append("\n".join(lines) + "\n")
    return "".join(pages)


def _engine(verdict: Verdict) -> str:
    if verdict.result is Result.AS_IN_TORCH:
        return "the same"
    if verdict.result is Result.OUR_ERROR:
        return _quoted(verdict.reason)
    if verdict.result is Result.DIFFERS:
        return f"differs: {verdict.reason}"
    if verdict.result is Result.SAID:
        return "goes on, and says: " + _quoted(verdict.reason)
    return f"**{verdict.result.value}**: {verdict.reason}"


def _quoted(message: str) -> str:
    name, _, text = message.partition(": ")
    return f"`{name}`: {text}"


def _cell(text: str) -> str:
    text = " ".join(text.split()).replace("|", "\\|")
    return text if len(text) <= 400 else text[:397] + "..."
