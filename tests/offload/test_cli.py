"""The command line itself: help, mistakes, completion, and what is imported for them."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

import offload
from offload.cli import main


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "offload", *arguments]
    return subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, check=False)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["train", "--help"], ["train", "--steps", "0"]])
def test_help_version_and_mistakes_do_not_wait_for_torch(arguments: list[str]):
    code = f"import sys; from offload.cli import main; main({arguments}); sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_help_of_every_command_does_not_wait_for_torch(capsys: pytest.CaptureFixture[str]):
    every = [[name, "-h"] for name in commands(capsys)] + [
        ["config", name, "-h"] for name in commands(capsys, "config")
    ]
    code = (
        f"import sys; from offload.cli import main; [main(each) for each in {every}]; sys.exit('torch' in sys.modules)"
    )
    assert len(every) > 8
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, check=False).returncode == 0


def test_the_version_is_that_of_the_installed_package(capsys: pytest.CaptureFixture[str]):
    with contextlib.suppress(PackageNotFoundError):  # sources that are on the path have no metadata
        assert offload.__version__ == version("offload-engine")
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"offload {offload.__version__}\n"


def commands(capsys: pytest.CaptureFixture[str], *group: str) -> list[str]:
    assert main([*group, "--help"]) == 0
    lines = capsys.readouterr().out.partition("Commands:\n")[2].splitlines()
    return [line.split()[0] for line in lines]


def test_all_help_fits_into_80_columns_and_says_what_each_command_does(capsys: pytest.CaptureFixture[str]):
    names = commands(capsys)
    assert {"train", "inspect", "export", "config"} <= set(names)
    for arguments in ([], *([name] for name in names), *(["config", name] for name in commands(capsys, "config"))):
        assert main([*arguments, "--help"]) == 0
        text = capsys.readouterr().out
        assert max(map(len, text.splitlines())) <= 80 and "..." not in text.partition("Commands:")[2]
        assert "\x1b" not in text


def test_without_arguments_there_is_help(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys, "argv", ["offload"])
    assert main() == 0
    assert capsys.readouterr().out.startswith("Usage: offload ")


SIZE = 'expected a size with its unit, such as "64GiB" or "3.8TB"'


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["trian"], "offload: error: no such command 'trian'. Did you mean 'train'?"),
        (["train", "--stepps", "3"], "offload train: error: no such option: --stepps (Possible options: --steps)"),
        (["inspect"], "offload inspect: error: missing argument 'CHECKPOINT'."),
        (["config"], "offload config: error: missing command."),
        (["config", "from-deepspeed", "a", "b"], "offload config from-deepspeed: error: got unexpected extra argument"),
        (["train", "--lr", "nan"], "offload train: error: --lr: expected a finite number above 0, got nan"),
    ],
)
def test_a_mistake_is_one_line_and_status_2(arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]):
    assert main(arguments) == 2
    printed = capsys.readouterr()
    assert printed.out == "" and printed.err.startswith(said) and printed.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ("train --precision bf61", "expected one of 'auto', 'fp32', 'bf16', got 'bf61', did you mean 'bf16'?"),
        ("train --steps 0", "expected at least 1, got '0'"),
        ("train --steps 1e3", "expected a whole number, got '1e3'"),
        (
            "plan --batch 999999999999999999999 --parameters 7e9",
            "expected at most 1048576, got '999999999999999999999'",
        ),
        ("plan --gpus 9999 --parameters 7e9 --gpu h100", "expected at most 1024, got '9999'"),
        ("plan --cores 0 --parameters 7e9 --gpu h100", "expected a finite number above 0, got 0.0"),
        ("plan --gradient-clipping nan --parameters 7e9", "expected a finite number >= 0, got nan"),
        ("plan --host-memory -1GiB --parameters 7e9", f"{SIZE}, got '-1GiB'"),
        ("plan --host-memory 0 --parameters 7e9", f"{SIZE}, got '0'"),
        ("train --width 100", "100 is not divisible by twice the --heads, 16"),
        ("train --device-memory 1GiB", "the model computes on the CPU: give --host-memory, or --device cuda"),
        ("plan --plot step.doc --parameters 7e9", "expected a name that ends in .svg or .png, got step.doc"),
        (
            "plan --plot /nowhere/step.svg --parameters 7e9",
            "/nowhere/step.svg cannot be written: give a file in a folder that you may write to",
        ),
        ("plan --parameters 1e30", "expected at most 1e16, got '1e30'"),
        (
            "plan --device-memory 500GiB --parameters 1e8 --gpu h100",
            "500GiB is more than this GPU has, 80GB: give less, or auto",
        ),
        ("plan --endurance 0TB --parameters 7e9", f"{SIZE}, got '0TB'"),
    ],
)
def test_a_mistake_names_the_option_what_is_expected_and_what_was_given(
    arguments: str, said: str, capsys: pytest.CaptureFixture[str]
):
    words = arguments.split()
    assert main(words) == 2
    assert capsys.readouterr().err == f"offload {words[0]}: error: {words[1]}: {said}\n"


def test_a_mistake_of_ours_keeps_its_traceback(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("offload.checkpoint.native.inspection.inspect_directory", lambda *_, **__: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["inspect", str(tmp_path)])


def test_the_shell_completes_commands_and_options():
    def completed(line: str) -> list[str]:
        words = line.split(" ")
        environment = {"COMP_WORDS": line, "COMP_CWORD": str(len(words) - 1), "_OFFLOAD_COMPLETE": "complete_bash"}
        return run(**environment).stdout.split()

    assert completed("offload ins") == ["inspect"]
    assert completed("offload train --tile") == ["--tile-bytes"]
    assert "complete -o default -F _offload_completion offload" in run(_OFFLOAD_COMPLETE="source_bash").stdout


def test_a_reader_that_has_had_enough_is_no_fault(tmp_path: Path):
    """``offload explain StorageFull | head -1``: the pipe is closed before the answer comes."""
    reader, writer = os.pipe()
    os.close(reader)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "offload", "explain", "StorageFull"],
            stdout=writer,
            stderr=subprocess.PIPE,
            check=False,
        )
    finally:
        os.close(writer)
    assert done.stderr == b"" and done.returncode != 0


def test_ctrl_c_while_the_parser_is_loaded_is_one_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    class Interrupted:
        def find_spec(self, name: str, *_: object) -> None:
            if name == "offload.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "offload.cli.app")
    monkeypatch.delattr("offload.cli.app", raising=False)
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    assert main(["--version"]) == 130
    assert capsys.readouterr().err == "offload: stopped by SIGINT\n"
