"""The command ``offload``: its subcommands, and the exit status.

Nothing heavy is imported before the arguments are understood. Exit status: 0 done, 1 fault, 2 bad input,
128 + signal when stopped.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Sequence
from typing import Annotated

import typer
from typer.exceptions import TyperException

import offload
from offload.cli import bench, config, doctor, explain, export, inspect, plan, report, train
from offload.cli.command import Command
from offload.cli.console import show_error
from offload.cli.refused import words_of
from offload.cli.signals import Signals
from offload.train.stopped import Stopped

_COMMANDS = (
    train.train, plan.plan, doctor.doctor, report.report, bench.bench, inspect.inspect, export.export, explain.explain,
)  # fmt: skip


def _group(help: str, *commands: Callable[..., int]) -> typer.Typer:
    """Commands with the names of their functions."""
    group = typer.Typer(
        help=help,
        rich_markup_mode=None,  # help without boxes: it is read in pipes and narrow windows, too
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    for command in commands:
        group.command(cls=Command)(command)
    return group


def make_app() -> typer.Typer:
    """The command with all of its subcommands."""
    app = _group("Train models that do not fit into memory.", *_COMMANDS)
    app.callback()(_options)
    of_config = _group("Translate the configuration of another library.", config.from_deepspeed, config.deepspeed_keys)
    app.add_typer(of_config, name="config")
    return app


def _show_version(asked: bool) -> None:
    if asked:
        print(f"offload {offload.__version__}")
        raise typer.Exit


def _options(
    version: Annotated[
        bool, typer.Option("--version", help="Print the version.", callback=_show_version, is_eager=True)
    ] = False,
) -> None:
    pass


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; see ``offload.cli.main``."""
    given = sys.argv[1:] if arguments is None else arguments
    signals = Signals()
    try:
        with signals:
            command = typer.main.get_command(make_app())
            status = command.main(given or ["--help"], prog_name="offload", standalone_mode=False, obj=signals)
            sys.stdout.flush()
            return int(status or 0)
    except BrokenPipeError:  # whoever reads the answer has had enough: nothing is wrong
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    except TyperException as error:
        return _refuse(error)
    except Stopped as stopped:
        number = signal.Signals(signals.received or signal.SIGINT)
        print(f"offload: stopped by {number.name}{stopped}", file=sys.stderr, flush=True)
        sys.stdout.flush()
        os._exit(128 + number)  # all that is ours is closed; the interpreter would take a second to take torch apart


def _refuse(error: TyperException) -> int:
    """Say in one line what is wrong with the arguments; returns the exit status."""
    context: typer.Context | None = getattr(error, "ctx", None)
    program = context.command_path if context else "offload"
    show_error(program, type(error).__name__, words_of(error), to_programs=False)
    return error.exit_code
