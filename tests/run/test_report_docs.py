"""The code blocks of docs/report.md run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

from offload.run.reading import read_run

PAGE = Path(__file__).parents[2] / "docs" / "report.md"


def test_the_examples_run_as_they_stand(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    examples = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, object] = {}
    for example in examples:
        exec(compile(example, "docs/report.md", "exec"), names)
    assert len(examples) == 2
    run = read_run(tmp_path / "runs" / "first")
    assert len(run.steps) == 3 and run.metrics["examples"][-1] == (3, 8.0)
    assert names["slowest"].seconds > 0  # type: ignore[attr-defined]
    assert "training: step 3 of 3" in capsys.readouterr().err
