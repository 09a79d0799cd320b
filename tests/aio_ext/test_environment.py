"""Where something is missing or forbidden, the queue says so and works without it."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

HERE = Path(__file__).parent
ROOT = HERE.parent.parent


def run(restriction: str, *command: str) -> subprocess.CompletedProcess[str]:
    restrict = [sys.executable, str(HERE / "restrict.py"), restriction] if restriction else []
    return subprocess.run(
        [*restrict, sys.executable, *command],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )


def python(restriction: str, code: str) -> str:
    result = run(restriction, "-c", textwrap.dedent(code))
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.parametrize(
    ("restriction", "reason"),
    [("setup", "seccomp"), ("enter", "seccomp"), ("hidden", "kernel has no io_uring")],
)
def test_without_io_uring_threads_serve_the_queue_and_a_note_says_why(restriction: str, reason: str) -> None:
    output = python(
        restriction,
        """
        import aio_ext
        print(aio_ext.available_backends())
        print(aio_ext.unavailable_backends())
        with aio_ext.Queue() as queue:
            print(queue.backend, queue.notes)
        try:
            aio_ext.Queue("io_uring")
        except OSError as error:
            print("refused:", error)
        """,
    ).splitlines()
    assert output[0] == "('threads', 'portable')"
    assert reason in output[1]
    assert output[2].startswith("threads") and reason in output[2]
    assert output[3].startswith("refused:") and reason in output[3]


@pytest.mark.parametrize("restriction", ["setup", "memlock"])
def test_the_suite_passes_in_a_restricted_process(restriction: str) -> None:
    files = [str(HERE / name) for name in ("test_queue.py", "test_waiting.py", "test_faults.py")]
    result = run(
        restriction, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files, "-k", "not more_requests and not portable"
    )
    assert result.returncode == 0, result.stdout + result.stderr
    if restriction == "setup":
        assert "io_uring does not work here" in result.stdout


def test_memory_that_may_not_be_locked_is_used_by_its_address(tmp_path: Path) -> None:
    output = python(
        "memlock",
        f"""
        import os, aio_ext
        fd = os.open({str(tmp_path / "data")!r}, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        with aio_ext.Memory(8 << 20) as memory, aio_ext.Queue() as queue:
            file = queue.register_file(fd)
            queue.register_memory(memory.address, memory.nbytes)
            queue.write(file, 0, memory.address, 1 << 20).wait(10)
            print(queue.backend, "|", *queue.notes)
        """,
    )
    backend, _, notes = output.partition("|")
    if backend.strip() == "io_uring":
        assert "ulimit -l" in notes


def test_requests_fail_when_the_ring_is_taken_away_under_way(tmp_path: Path) -> None:
    output = python(
        "",
        f"""
        import os, sys, aio_ext
        sys.path.insert(0, {str(HERE)!r})
        import restrict
        if "io_uring" in aio_ext.available_backends():
            fd = os.open({str(tmp_path / "data")!r}, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            with aio_ext.Memory(8 << 20) as memory, aio_ext.Queue("io_uring", block_bytes=64 << 10) as queue:
                file = queue.register_file(fd)
                queue.write(file, 0, memory.address, 1 << 20).wait(10)
                restrict.deny(426, 1)  # io_uring_enter, EPERM
                try:
                    queue.write(file, 0, memory.address, 8 << 20).wait(10)
                except aio_ext.QueueError as error:
                    print(error.strerror)
                try:
                    queue.write(file, 0, memory.address, 8 << 20)
                except OSError as error:
                    print(error)
        """,
    )
    assert output in ("", "Operation not permitted\n[Errno 1] the queue is closed: Operation not permitted\n")


def test_without_the_extension_the_portable_queue_does_the_work(tmp_path: Path) -> None:
    output = python(
        "",
        f"""
        import ctypes, os, sys
        sys.modules["aio_ext._aio"] = None  # importing it fails
        import aio_ext
        print(aio_ext.available_backends())
        fd = os.open({str(tmp_path / "data")!r}, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        with aio_ext.Memory(4 << 20) as memory, aio_ext.Queue() as queue, aio_ext.Pattern(1 << 20, 0x7FFF) as pattern:
            memory.populate()
            file = queue.register_file(fd)
            queue.write(file, 0, pattern.address, 1 << 20).wait(10)
            queue.read(file, 0, memory.address, 1 << 20).wait(10)
            print(queue.backend, ctypes.string_at(memory.address, 1 << 20) == b"\\xff\\x7f" * (1 << 19))
            print(queue.notes)
            called = []
            queue.sync(file).add_done_callback(called.append)
        try:
            aio_ext.Queue("threads")
        except OSError as error:
            print("refused:", error)
        """,
    ).splitlines()
    assert output[:2] == ["('portable',)", "portable True"]
    assert "not built" in output[2] and "not built" in output[3]


def test_the_suite_passes_without_the_extension() -> None:
    files = [str(HERE / name) for name in ("test_queue.py", "test_memory.py")]
    selected = "not running_over_the_end and not more_requests"  # there are no guard pages
    code = f"""
        import sys
        sys.modules["aio_ext._aio"] = None
        import pytest
        sys.exit(pytest.main(["-q", "-p", "no:cacheprovider", *{files!r}, "-k", {selected!r}]))
    """
    result = run("", "-c", textwrap.dedent(code))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "[portable]" not in result.stdout  # neither skipped nor failed


@pytest.mark.parametrize("backend", ["io_uring", "threads", "portable"])
def test_a_write_that_the_kernel_really_cuts_short_fails_where_it_stopped(backend: str, tmp_path: Path) -> None:
    output = python(
        "",
        f"""
        import os, resource, aio_ext
        if {backend!r} in aio_ext.available_backends():
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
            fd = os.open({str(tmp_path / "data")!r}, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
            with aio_ext.Memory(4 << 20) as memory, aio_ext.Queue({backend!r}, block_bytes=768 << 10) as queue:
                file = queue.register_file(fd)
                ticket = queue.write(file, 0, memory.address, 1536 << 10)
                try:
                    ticket.wait(10)
                except aio_ext.QueueError as error:
                    print(error.strerror, error.bytes_done, error.error_offset, queue.statistics().short_transfers)
        """,
    )
    assert output in ("", f"File too large {1 << 20} {1 << 20} 1\n")


def test_a_sync_for_which_the_kernel_gets_no_thread_says_so(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("another user's limit of threads takes root")
    output = python(
        "",
        f"""
        import os, resource, aio_ext
        if "io_uring" in aio_ext.available_backends():
            fd = os.open({str(tmp_path / "data")!r}, os.O_RDWR | os.O_CREAT, 0o600)
            with aio_ext.Queue("io_uring") as queue:
                file = queue.register_file(fd)
                resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
                os.setresuid(65534, 65534, 0)  # of all threads
                try:
                    queue.sync(file).wait(10)
                except aio_ext.QueueError as error:
                    print(error.strerror)
        """,
    )
    assert output in ("", "Resource temporarily unavailable\n")


def test_a_file_system_without_o_direct_rules_is_assumed_to_need_4096(tmp_path: Path) -> None:
    output = python(
        "",
        """
        import os, aio_ext
        fd = os.memfd_create("x")
        print(aio_ext.direct_io_alignment(fd))
        """,
    )
    assert output == "(4096, 4096)\n"
