"""Programs in processes of their own that begin in milliseconds: forked from one that has imported the engine.

To import it, and torch, takes a core five seconds, and the tests run many programs. One that is run here begins as
``python -W ignore -c`` lets it begin in this directory, but for what is imported already, and ends as every program
does, by itself or by a signal. What a test says of importing needs ``subprocess``.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import threading
import types
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

TIMEOUT_S = 300.0
"""A program that takes longer is killed."""


class Program:
    """A program that runs, here and with ``environment`` besides that of this process. ``stdout`` and ``stderr`` are
    text files, to be read; ``returncode`` is known after its end, and negative if a signal was that."""

    def __init__(self, text: str, *arguments: object, **environment: str) -> None:
        (stdout, own_stdout), (stderr, own_stderr) = os.pipe(), os.pipe()
        request = _request(text, map(str, arguments), {**os.environ, **environment})
        self._server, self.pid = _ask(_server()[0], request, own_stdout, own_stderr)
        os.close(own_stdout), os.close(own_stderr)
        self.stdout, self.stderr = os.fdopen(stdout), os.fdopen(stderr)
        self.returncode: int | None = None
        self._timer = threading.Timer(TIMEOUT_S, self.send_signal, [signal.SIGKILL])
        self._timer.daemon = True
        self._timer.start()

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)  # nobody has waited for it: its id is not given to another process

    def communicate(self) -> tuple[str, str]:
        """What is left of stdout and stderr, to the end of the program."""
        errors: list[str] = []
        reader = threading.Thread(target=lambda: errors.append(self.stderr.read()))
        reader.start()
        output = self.stdout.read()
        reader.join()
        self.wait()
        return output, errors[0]

    def wait(self) -> int:
        """Until its end; ``returncode``. Its output must be read by then, or be little."""
        if self.returncode is None:
            self._timer.cancel()
            self.returncode = int(self._server.recv(64))
        return self.returncode

    def __enter__(self) -> Program:
        return self

    def __exit__(self, *error: object) -> None:
        if self.returncode is None:
            self.send_signal(signal.SIGKILL)
            self.wait()
        self.stdout.close(), self.stderr.close(), self._server.close()


def run(text: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a program to its end."""
    with Program(text, *arguments, **environment) as program:
        output, errors = program.communicate()
    assert program.returncode is not None
    return subprocess.CompletedProcess(text, program.returncode, output, errors)


def run_well(text: str, *arguments: object) -> str:
    """Run a program that ends with status 0; its stdout."""
    done = run(text, *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout


def run_module(name: str, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a module to its end, as ``python -W ignore -m NAME`` does."""
    return run(f"import runpy; runpy.run_module({name!r}, run_name='__main__')", *arguments, **environment)


def run_script(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    """Run a file to its end, as ``python -W ignore FILE`` does."""
    return run(_text_of(str(script)), *arguments)


def stand_in(script: Path) -> list[str]:
    """The command that runs a file so: for launchers, which start their programs themselves."""
    return [sys.executable, "-S", __file__, _server()[0], str(script)]


def import_ahead(*modules: str) -> None:
    """All programs from now on have these imported, too."""
    connection, _ = _ask(_server()[0], {"modules": modules})
    connection.close()


def _text_of(script: str) -> str:
    """Runs a file; what stands beside it can be imported, and what stands in this directory."""
    begin = f"import runpy, sys; sys.path.insert(0, {os.path.dirname(script)!r}); sys.argv[0] = {script!r}"  # noqa: PTH120
    return f"{begin}; runpy.run_path({script!r}, run_name='__main__')"


# The process that forks, and how it is asked.


def _request(text: str, arguments: Iterable[str], environment: dict[str, str]) -> dict[str, Any]:
    return {"text": text, "arguments": [*arguments], "environment": environment, "at": str(Path.cwd())}


def _ask(name: str, request: dict[str, Any], *descriptors: int) -> tuple[socket.socket, int]:
    """A connection over which the status comes when the program ends, and its process."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.connect(f"\0{name}")
    socket.send_fds(connection, [json.dumps(request).encode()], descriptors)
    return connection, int(connection.recv(64))


@cache
def _server() -> tuple[str, subprocess.Popen[bytes]]:
    """The name of its socket. It ends when this process does, and with it the server's standard input."""
    name = f"offload-forked-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        listener.bind(f"\0{name}")
        listener.listen()
        command = [sys.executable, "-W", "ignore", __file__, str(listener.fileno())]
        passed = [listener.fileno()]
        return name, subprocess.Popen(command, pass_fds=passed, stdin=subprocess.PIPE, start_new_session=True)


def _serve(listener: socket.socket) -> dict[str, Any]:
    """Fork a process for each request. Returns in the forked ones: what is to be done there."""
    selector = selectors.DefaultSelector()
    selector.register(sys.stdin, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    gc.freeze()  # a collection would copy what forked processes share
    while True:
        for key, _ in selector.select():
            if key.fileobj is sys.stdin:
                os._exit(0)
            if key.fileobj is not listener:
                process, connection = key.data
                selector.unregister(key.fileobj)
                os.close(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
                with contextlib.suppress(BrokenPipeError):  # whoever asked may be gone
                    connection.send(str(status).encode())
                connection.close()
                continue
            connection, _ = listener.accept()
            data, outputs, _, _ = socket.recv_fds(connection, 1 << 20, 2)
            request: dict[str, Any] = json.loads(data)
            if "modules" in request:
                for module in request["modules"]:
                    importlib.import_module(module)
                gc.freeze()
                connection.send(b"0")
                connection.close()
                continue
            process = os.fork()
            if process == 0:
                for descriptor, own in zip([os.open(os.devnull, os.O_RDONLY), *outputs], range(3), strict=True):
                    os.dup2(descriptor, own)
                    os.close(descriptor)
                listener.close(), connection.close(), selector.close()
                return request
            for descriptor in outputs:
                os.close(descriptor)
            selector.register(os.pidfd_open(process), selectors.EVENT_READ, (process, connection))
            connection.send(str(process).encode())


def _run_forked(listener: socket.socket) -> None:
    for module in ("torch._dynamo", "offload.engine"):
        importlib.import_module(module)
    sys.modules["offload.tiers.bandwidth"]._SECONDS = 0.02  # type: ignore[attr-defined]  # as in the conftest of all
    request = _serve(listener)
    os.chdir(request["at"])
    os.environ.clear()
    os.environ.update(request["environment"])
    sys.argv = ["-c", *request["arguments"]]
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(request["text"], "<string>", "exec"), vars(sys.modules["__main__"]))


def _stand_in(name: str, script: str, *arguments: str) -> None:
    """Have a script run, pass SIGTERM on to it, and end as it does."""
    connection, process = _ask(name, _request(_text_of(script), arguments, dict(os.environ)), 1, 2)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(process, signal.SIGTERM))
    status = int(connection.recv(64))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        _run_forked(socket.socket(fileno=int(sys.argv[1])))
    else:
        _stand_in(*sys.argv[1:])
