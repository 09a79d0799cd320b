"""Programs in processes of their own that begin in milliseconds: forked from one that has imported the engine.

To import it, and torch, takes a core five seconds, and the tests run many programs. One that is run here begins as
``python -W ignore -c`` lets it begin in this directory, but for what is imported already, and ends as every program
does, by itself or by a signal. What a test says of importing needs ``subprocess``.

All workers of pytest-xdist share the process that forks.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
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
import time
import types
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest

TIMEOUT_S = 300.0
"""A program that takes longer is killed."""
INTERPRETER = str(Path(__file__).with_name("forked_python"))
"""With the environment of ``children()``, an interpreter that forks. It knows a script, ``-c`` and ``-m``."""
_NAMESPACES = ("/proc/self/ns/user", "/proc/self/ns/mnt")
"""What a process sees by: a mount needs the rights of its user namespace."""


class Program:
    """A program that runs, here and with ``environment`` besides that of this process. ``stdout`` and ``stderr`` are
    text files, to be read; ``returncode`` is known after its end, and negative if a signal was that. ``stdin`` is a
    descriptor, which stays open here."""

    def __init__(
        self,
        text: str,
        *arguments: object,
        stdin: int | None = None,
        timeout_s: float = TIMEOUT_S,
        **environment: str,
    ) -> None:
        (stdout, own_stdout), (stderr, own_stderr) = os.pipe(), os.pipe()
        request = _request(text, map(str, arguments), {**os.environ, **environment})
        with Path(os.devnull).open() as nothing:
            own_stdin = nothing.fileno() if stdin is None else stdin
            self._server, self.pid, self._process = _ask(_server(), request, own_stdin, own_stdout, own_stderr)
        os.close(own_stdout), os.close(own_stderr)
        self.stdout, self.stderr = os.fdopen(stdout), os.fdopen(stderr)
        self.returncode: int | None = None
        self._timer = threading.Timer(timeout_s, self.send_signal, [signal.SIGKILL])
        self._timer.daemon = True
        self._timer.start()

    def send_signal(self, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):  # it has ended; another process may have its id by now
            signal.pidfd_send_signal(self._process, number)

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
        self._timer.cancel()
        self._timer.join()  # it may be sending a signal
        self.stdout.close(), self.stderr.close(), self._server.close(), os.close(self._process)


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
    return run(_text_of_module(name), *arguments, **environment)


def run_script(script: Path, *arguments: object, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run a file to its end, as ``python -W ignore FILE`` does."""
    return run(_text_of_script(str(script)), *arguments, **environment)


def children() -> dict[str, str]:
    """The environment of a program whose ``sys.executable`` forks, too: the interpreters that it starts, and those that
    these start, begin in milliseconds. A signal that ends one of them ends what was forked for it."""
    return {"FORKED_SERVER": _server(), "FORKED_PYTHON": sys.executable}


def fork_children(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreters that this process itself begins by ``sys.executable`` be forked, for one test."""
    for name, value in children().items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "executable", INTERPRETER)


def import_ahead(*modules: str) -> None:
    """All programs from now on have these imported, too, but for those that are not installed."""
    connection = _connection(_server())
    socket.send_fds(connection, [json.dumps({"modules": modules}).encode()], ())
    connection.recv(64)
    connection.close()


def _text_of_module(name: str) -> str:
    return f"import runpy; runpy.run_module({name!r}, run_name='__main__')"


def _text_of_script(script: str) -> str:
    """Runs a file; what stands beside it can be imported, and what stands in this directory."""
    begin = f"import runpy, sys; sys.path.insert(0, {os.path.dirname(script)!r}); sys.argv[0] = {script!r}"  # noqa: PTH120
    return f"{begin}; runpy.run_path({script!r}, run_name='__main__')"


# The process that forks, and how it is asked.


def _request(text: str, arguments: Iterable[str], environment: dict[str, str]) -> dict[str, Any]:
    return {"text": text, "arguments": [*arguments], "environment": environment, "at": str(Path.cwd())}


def _ask(name: str, request: dict[str, Any], *descriptors: int) -> tuple[socket.socket, int, int]:
    """A connection over which the status comes when the program ends, the id of its process, and a pidfd of it. It
    sees the mounts that this process does."""
    connection = _connection(name)
    with contextlib.ExitStack() as closing:
        namespaces = [closing.enter_context(Path(file).open()).fileno() for file in _NAMESPACES]
        socket.send_fds(connection, [json.dumps(request).encode()], [*descriptors, *namespaces])
    process, pidfds, _, _ = socket.recv_fds(connection, 64, 1)
    return connection, int(process), pidfds[0]


def _connection(name: str) -> socket.socket:
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    for _ in range(100):  # another worker has the name, and does not listen yet
        with contextlib.suppress(ConnectionRefusedError):
            connection.connect(f"\0{name}")
            break
        time.sleep(0.01)
    return connection


@cache
def _server() -> str:
    """The name of its socket. It ends when the process does that began the tests."""
    tests = os.getppid() if "PYTEST_XDIST_WORKER" in os.environ else os.getpid()
    name = f"offload-forked-{tests}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
        try:
            listener.bind(f"\0{name}")
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
            return name  # another worker has begun it
        listener.listen()
        command = [sys.executable, "-W", "ignore", __file__, str(listener.fileno()), str(tests)]
        subprocess.Popen(command, pass_fds=[listener.fileno()], stdin=subprocess.DEVNULL, start_new_session=True)
        return name


def _serve(listener: socket.socket, tests: int) -> dict[str, Any]:
    """Fork a process for each request. Returns in the forked ones: what is to be done there."""
    selector = selectors.DefaultSelector()
    over = os.pidfd_open(tests)
    selector.register(over, selectors.EVENT_READ)
    selector.register(listener, selectors.EVENT_READ)
    running: dict[int, socket.socket] = {}
    gc.freeze()  # a collection would copy what forked processes share
    while True:
        for key, _ in selector.select():
            if key.fileobj == over:
                os._exit(0)
            if isinstance(key.fileobj, socket.socket) and key.fileobj is not listener:  # whoever asked is gone
                if key.data in running:
                    selector.unregister(key.fileobj)
                    os.kill(key.data, signal.SIGKILL)
                continue
            if key.fileobj is not listener:
                selector.unregister(key.fileobj)
                os.close(key.fd)
                status = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                with running.pop(key.data) as connection, contextlib.suppress(KeyError, BrokenPipeError):
                    selector.unregister(connection)
                    connection.send(str(status).encode())
                continue
            connection, _ = listener.accept()
            data, files, _, _ = socket.recv_fds(connection, 1 << 20, 3 + len(_NAMESPACES))
            request: dict[str, Any] = json.loads(data)
            if "modules" in request:
                for module in request["modules"]:
                    with contextlib.suppress(ModuleNotFoundError):  # it is for the program that needs it to say so
                        importlib.import_module(module)
                gc.freeze()
                connection.send(b"0")
                connection.close()
                continue
            process = os.fork()
            if process == 0:
                for own in range(3):
                    os.dup2(files[own], own)
                for descriptor, file in zip(files[3:], _NAMESPACES, strict=True):
                    _enter(descriptor, file)
                for descriptor in files:
                    os.close(descriptor)
                listener.close(), connection.close(), selector.close(), os.close(over)
                return request
            for descriptor in files:
                os.close(descriptor)
            pidfd = os.pidfd_open(process)
            socket.send_fds(connection, [str(process).encode()], [pidfd])
            running[process] = connection
            selector.register(pidfd, selectors.EVENT_READ, process)
            selector.register(connection, selectors.EVENT_READ, process)


def _enter(namespace: int, own: str) -> None:
    """Be in this namespace, if it is another one than the ``own``. ``os.setns`` is there from Python 3.12 on."""
    is_own = os.path.samestat(os.fstat(namespace), Path(own).stat())
    if not is_own and ctypes.CDLL(None, use_errno=True).setns(namespace, 0):
        raise OSError(ctypes.get_errno(), own)


def _run_forked(listener: socket.socket, tests: int) -> None:
    for module in ("torch._dynamo", "offload.engine"):
        importlib.import_module(module)
    sys.modules["offload.tiers.bandwidth"]._SECONDS = 0.002  # type: ignore[attr-defined]  # as in the conftest of all
    request = _serve(listener, tests)
    os.chdir(request["at"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if "FORKED_SERVER" in os.environ:
        sys.executable = INTERPRETER
    sys.argv = ["-c", *request["arguments"]]
    sys.modules["__main__"] = types.ModuleType("__main__")
    exec(compile(request["text"], "<string>", "exec"), vars(sys.modules["__main__"]))


def _stand_in(name: str, *arguments: str) -> None:
    """Have done what an interpreter would do for these arguments, pass SIGTERM on, and end as what was done ends."""
    text, rest = _meant_by(arguments)
    connection, process, _ = _ask(name, _request(text, rest, dict(os.environ)), 0, 1, 2)
    signal.signal(signal.SIGTERM, lambda *_: os.kill(process, signal.SIGTERM))
    status = int(connection.recv(64))
    if status < 0:
        signal.signal(-status, signal.SIG_DFL) if status != -signal.SIGKILL else None
        os.kill(os.getpid(), -status)
    sys.exit(status)


def _meant_by(arguments: tuple[str, ...]) -> tuple[str, tuple[str, ...]]:
    """The text of the program, and its arguments."""
    first, *rest = arguments
    if first in ("-m", "-c"):
        return _text_of_module(rest[0]) if first == "-m" else rest[0], tuple(rest[1:])
    if first.startswith("-"):  # -W ignore, -u
        return _meant_by(tuple(rest[first == "-W" :]))
    return _text_of_script(first), tuple(rest)


if __name__ == "__main__":
    if sys.argv[1].isdecimal():
        _run_forked(socket.socket(fileno=int(sys.argv[1])), int(sys.argv[2]))
    else:
        _stand_in(*sys.argv[1:])
