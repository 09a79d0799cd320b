"""A slice of the campaign of random requests with injected faults; scripts/aio_torture.py runs the rest."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SCRIPT = Path(__file__).parent.parent.parent / "scripts" / "aio_torture.py"


def test_random_requests_agree_with_the_model(backend: str, tmp_path: Path) -> None:
    requests = 1500 if backend == "portable" else 6000
    command = [sys.executable, str(SCRIPT), "--backend", backend, "--requests", str(requests), "--path", str(tmp_path)]
    result = subprocess.run([*command, "--seed", "11"], capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr
    assert "no difference" in result.stdout
    assert list(tmp_path.iterdir()) == []
