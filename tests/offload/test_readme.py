import re
from pathlib import Path

README = Path(__file__).parents[2] / "README.md"


def test_the_example_of_the_readme_runs_as_it_stands(tmp_path: Path, capsys):
    (example,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL)
    exec(compile(example.replace('"/tmp"', repr(str(tmp_path))), "README.md", "exec"), {})
    printed = capsys.readouterr().out
    assert "nvme MiB" in printed and len(printed.splitlines()) > 6
