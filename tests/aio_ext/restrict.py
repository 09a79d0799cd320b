"""Run a command without something: ``python restrict.py RESTRICTION COMMAND...``, or this process: ``restrict``.

RESTRICTION is ``setup`` or ``enter`` (a seccomp filter answers io_uring_setup or io_uring_enter with EPERM), ``hidden``
(io_uring_setup gets ENOSYS) or ``memlock`` (64 KiB of locked memory, without the capability to exceed it).
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import struct
import sys

_PR_CAPBSET_DROP, _PR_SET_NO_NEW_PRIVS, _CAP_IPC_LOCK = 24, 38, 14
_SECCOMP = {"x86_64": 317, "aarch64": 277}
_SECCOMP_SET_MODE_FILTER, _TSYNC = 1, 1
_IO_URING_SETUP, _IO_URING_ENTER = 425, 426  # on every architecture

_libc = ctypes.CDLL(None, use_errno=True)


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_char_p))


def deny(number: int, error: int) -> None:
    """From now on the system call ``number`` fails with ``error``, in all threads and what they execute."""
    load_number = struct.pack("HBBI", 0x20, 0, 0, 0)
    if_equal = struct.pack("HBBI", 0x15, 0, 1, number)
    fail = struct.pack("HBBI", 0x06, 0, 0, 0x00050000 | error)
    allow = struct.pack("HBBI", 0x06, 0, 0, 0x7FFF0000)
    program = _Program(4, load_number + if_equal + fail + allow)
    _call(_libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0))
    _call(_libc.syscall(_SECCOMP[platform.machine()], _SECCOMP_SET_MODE_FILTER, _TSYNC, ctypes.byref(program)))


def limit_locked_memory(nbytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (nbytes, nbytes))
    if os.geteuid() == 0:
        _call(_libc.prctl(_PR_CAPBSET_DROP, _CAP_IPC_LOCK, 0, 0, 0))


def _call(result: int) -> None:
    if result != 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


_RESTRICTIONS = {
    "setup": lambda: deny(_IO_URING_SETUP, errno.EPERM),
    "enter": lambda: deny(_IO_URING_ENTER, errno.EPERM),
    "hidden": lambda: deny(_IO_URING_SETUP, errno.ENOSYS),
    "memlock": lambda: limit_locked_memory(64 << 10),
}


def restrict(restriction: str) -> None:
    """Take it from this process, and from all that it starts; what ``memlock`` takes, from those alone."""
    _RESTRICTIONS[restriction]()


if __name__ == "__main__":
    restrict(sys.argv[1])
    os.execv(sys.argv[2], sys.argv[2:])
