"""The page's own program, launched by torchrun."""

from __future__ import annotations

import re
from pathlib import Path

import forked
import pytest

PAGE = Path(__file__).parents[2] / "docs" / "ranks.md"


def test_torchrun_starts_the_program_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (program,) = re.findall(r'^```python title="train.py"\n(.*?)^```$', PAGE.read_text(), re.DOTALL | re.MULTILINE)
    (tmp_path / "train.py").write_text(program.replace("/mnt/nvme", str(tmp_path)))
    monkeypatch.chdir(tmp_path)
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    found = forked.run_module(*launcher, "train.py", **forked.children())
    assert found.returncode == 0, found.stderr
    loss, network = re.fullmatch(r"loss ([\d.]+), ([\d.]+) MB from other ranks\n", found.stdout).groups()  # type: ignore[union-attr]
    assert 5 < float(loss) < 6 and float(network) > 0
