"""Every code block of the README and of ``docs/`` runs, or is counted among those that do not.

``python`` and ``sh`` blocks run: those of a page in order, in one namespace and one directory. A block with a title is
the file of that name. ``py`` and ``console`` blocks do not run: they need a GPU, a network, a system's packages, or
models that are not there. All others are data and output.
"""

from __future__ import annotations

import re
import runpy
import shlex
import sys
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import pytest

from offload import cli, closing

_ROOT = Path(__file__).parents[2]
_PAGES = {
    str(path.relative_to(_ROOT)): path.read_text() for path in (_ROOT / "README.md", *(_ROOT / "docs").rglob("*.md"))
}
_RUN_ELSEWHERE = {
    "docs/deepspeed.md": "tests/compat/test_deepspeed_docs.py",
    "docs/integrations/accelerate.md": "tests/integrations/test_accelerate.py",
    "docs/integrations/compile.md": "tests/integrations/test_compile.py",
    "docs/integrations/lightning.md": "tests/integrations/test_lightning.py",
    "docs/integrations/others.md": "tests/integrations/test_others.py",
    "docs/integrations/peft.md": "tests/integrations/test_peft.py",
    "docs/integrations/transformers.md": "tests/integrations/test_transformers.py",
    "docs/integrations/trl.md": "tests/integrations/test_trl.py",
    "docs/recipes/compress.md": "tests/recipes/test_compress.py",
    "docs/recipes/diffusion.md": "tests/recipes/test_diffusion.py",
    "docs/recipes/low-precision.md": "tests/recipes/test_low_precision.py",
    "docs/recipes/matrix-optimizers.md": "tests/recipes/test_matrix_optimizers.py",
    "docs/recipes/pair-bias.md": "tests/recipes/test_pair_bias.py",
    "docs/recipes/serving.md": "tests/recipes/test_serving.py",
    "docs/recipes/techniques.md": "tests/recipes/test_techniques.py",
}
"""Pages whose blocks are run by the tests of what they are about, beside the same in memory."""

_NOT_RUN = {
    "README.md": 2,
    "docs/birth.md": 2,
    "docs/checkpoints.md": 1,
    "docs/contributing.md": 2,
    "docs/doctor.md": 1,
    "docs/integrations/transformers.md": 1,
    "docs/migration.md": 5,
    "docs/plan.md": 5,
    "docs/quickstart.md": 2,
    "docs/ranks.md": 3,
    "docs/meshes.md": 2,
    "docs/gpu.md": 1,
    "docs/questions.md": 1,
    "docs/recipes/communication.md": 1,
    "docs/recipes/experts.md": 2,
    "docs/recipes/from-deepspeed.md": 2,
    "docs/recipes/full.md": 2,
    "docs/recipes/generation.md": 2,
    "docs/recipes/go-on.md": 2,
    "docs/recipes/long-sequences.md": 1,
    "docs/recipes/lora.md": 2,
}
"""How many ``py`` and ``console`` blocks each page has."""


@dataclass(frozen=True)
class Block:
    language: str
    title: str
    text: str


def _blocks(page: str) -> list[Block]:
    found = re.findall(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', _PAGES[page], re.DOTALL | re.MULTILINE)
    assert _PAGES[page].count("```") == 2 * len(found), f"{page}: a block that is not understood"
    return [Block(*each) for each in found]


_BLOCKS = {page: _blocks(page) for page in sorted(_PAGES)}
_THAT_RUN = [
    page
    for page, blocks in _BLOCKS.items()
    if page not in _RUN_ELSEWHERE and any(block.language in ("python", "sh") for block in blocks)
]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The present folder of a page; at the end every engine that its blocks have left open is closed."""
    monkeypatch.chdir(tmp_path)
    before = set(closing._open)
    yield tmp_path
    for closers in set(closing._open) - before:
        closers.close()


@pytest.mark.parametrize("page", _THAT_RUN)
def test_the_blocks_of_a_page_run_in_order(page: str, folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("webbrowser.open", lambda *_: True)
    names: dict[str, object] = {"__name__": "__main__"}
    with warnings.catch_warnings():
        warnings.filterwarnings("error", category=UserWarning)
        warnings.filterwarnings("ignore", message="nvme_path: .* is on")  # the tests' directory may be in memory
        for block in _BLOCKS[page]:
            if block.title:
                (folder / block.title).write_text(block.text)
            elif block.language == "python":
                exec(compile(block.text, page, "exec"), names)
            elif block.language == "sh":
                for command in block.text.replace("\\\n", " ").splitlines():
                    _run(shlex.split(command, comments=True), monkeypatch)


def _run(command: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """``offload ...`` and ``python FILE ...``, without the seconds that a process of its own takes to import torch."""
    program, *arguments = command
    if program == "offload":
        assert cli.main(arguments) == 0, command
    else:
        assert program == "python", f"{command}: a console block?"
        monkeypatch.setattr(sys, "argv", arguments)
        runpy.run_path(arguments[0], run_name="__main__")


def test_blocks_that_do_not_run_are_counted():
    counts = Counter({page: sum(b.language in ("py", "console") for b in blocks) for page, blocks in _BLOCKS.items()})
    assert dict(+counts) == _NOT_RUN


@pytest.mark.parametrize("page", _RUN_ELSEWHERE)
def test_what_runs_elsewhere_is_read_there(page: str):
    assert Path(page).name in (_ROOT / _RUN_ELSEWHERE[page]).read_text()
