"""The lock on a process that reads a stranger's text: no files, network, other processes or signals, bounded memory.

`lock` is called in a forked child that has nothing left to do but compute and write its result to a descriptor that is
open. From then on a seccomp filter lets through the system calls of memory, time, locks, read, write and exit, and
answers every other one with EPERM: nothing can be opened, connected, executed, forked, traced, signalled or even
looked up by name. The filter is an allowlist, so a system call that a future kernel adds is refused too.

Needs Linux on x86-64 or ARM64 and no library beyond libc: the filter is a dozen classic BPF instructions per group of
system calls, and the alternative, libseccomp's Python binding, needs a shared library that is not everywhere.
This module imports nothing but the standard library; run as a program it tests itself (`self_test`).

Source: https://www.kernel.org/doc/html/latest/userspace-api/seccomp_filter.html
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import resource
import signal
import socket
import struct
import sys
from collections.abc import Callable

ADDRESS_SPACE_EXTRA_BYTES = 512 << 20
"""The most that a text may make the process allocate beyond what it has when it is locked."""

_PR_SET_PDEATHSIG, _PR_SET_DUMPABLE, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 1, 4, 22, 38
_SECCOMP_MODE_FILTER = 2
_CLONE_NEWIPC, _CLONE_NEWUSER, _CLONE_NEWNET = 0x08000000, 0x10000000, 0x40000000

_LOAD, _JUMP_EQUAL, _JUMP_GREATER_EQUAL, _JUMP_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06
_NUMBER_AT, _ARCH_AT, _THIRD_ARGUMENT_AT = 0, 4, 32
_ALLOW, _KILL_PROCESS, _REFUSE = 0x7FFF0000, 0x80000000, 0x00050000 | errno.EPERM
_PROT_EXEC = 4
_X32_FIRST_NUMBER = 0x40000000

_ARCHES = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_CALLS: dict[str, tuple[int, int]] = {  # name: number on x86-64, on ARM64
    "read": (0, 63),
    "write": (1, 64),
    "munmap": (11, 215),
    "brk": (12, 214),
    "rt_sigaction": (13, 134),
    "rt_sigprocmask": (14, 135),
    "rt_sigreturn": (15, 139),
    "sched_yield": (24, 124),
    "mremap": (25, 216),
    "madvise": (28, 233),
    "getpid": (39, 172),
    "exit": (60, 93),
    "gettimeofday": (96, 169),
    "sigaltstack": (131, 132),
    "gettid": (186, 178),
    "futex": (202, 98),
    "restart_syscall": (219, 128),
    "clock_gettime": (228, 113),
    "exit_group": (231, 94),
    "getrandom": (318, 278),
}
_MAPPING_CALLS: dict[str, tuple[int, int]] = {"mmap": (9, 222), "mprotect": (10, 226)}
"""Allowed where they ask for no executable memory."""


class SandboxError(Exception):
    """This process cannot be locked; `str()` says why."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("instructions", ctypes.c_void_p))


def own_namespaces() -> bool:
    """Leave the network and the IPC namespace; whether the system lets us. Call with one thread.

    Root does it as root, since in a user namespace it could not read other users' files, such as its own libraries.
    """
    return _unshare(_CLONE_NEWNET | _CLONE_NEWIPC) or _unshare(_CLONE_NEWUSER | _CLONE_NEWNET | _CLONE_NEWIPC)


def _unshare(flags: int) -> bool:
    try:
        return bool(_libc().unshare(flags) == 0)
    except AttributeError:
        return False


def die_with_parent() -> None:
    """Have the kernel end this process with its parent, whatever it does then; on Linux. New namespaces undo it."""
    if sys.platform == "linux":
        _prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def limit_resources(cpu_s: int) -> None:
    """Bound memory, processor time, files and descriptors of this process, whatever the system."""
    limits = {"RLIMIT_CORE": 0, "RLIMIT_FSIZE": 0, "RLIMIT_CPU": cpu_s, "RLIMIT_NPROC": 0, "RLIMIT_NOFILE": 8}
    if sys.platform == "linux":
        limits["RLIMIT_AS"] = _address_space_bytes() + ADDRESS_SPACE_EXTRA_BYTES
    for name, limit in limits.items():
        kind: int = getattr(resource, name)
        hard = resource.getrlimit(kind)[1]
        bound = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (bound, bound))


def lock(cpu_s: int) -> None:
    """Give up everything but computing and the open descriptors, for good. Raises SandboxError.

    cpu_s: seconds of processor time after which the kernel kills this process.
    """
    arch = _ARCHES.get(platform.machine())
    if sys.platform != "linux" or arch is None or sys.maxsize < 2**32:
        raise SandboxError("there is a sandbox on 64-bit Linux on x86-64 and ARM64 only")
    instructions = _instructions(platform.machine(), arch)  # before the limits: it allocates
    limit_resources(cpu_s)
    _unshare(_CLONE_NEWUSER)  # root's capabilities, where the system lets us; the filter holds without
    die_with_parent()
    _prctl(_PR_SET_DUMPABLE, 0)
    _prctl(_PR_SET_NO_NEW_PRIVS, 1)
    buffer = ctypes.create_string_buffer(instructions, len(instructions))
    program = _Program(len(instructions) // 8, ctypes.addressof(buffer))
    _prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.addressof(program))


def _instructions(machine: str, arch: int) -> bytes:
    """The filter: `struct sock_filter` after `struct sock_filter`. Jumps count from the next instruction."""
    column = list(_ARCHES).index(machine)
    program = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_JUMP_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, _KILL_PROCESS),
        (_LOAD, 0, 0, _NUMBER_AT),
        (_JUMP_GREATER_EQUAL, 0, 1, _X32_FIRST_NUMBER),
        (_RETURN, 0, 0, _KILL_PROCESS),
    ]
    for numbers in _MAPPING_CALLS.values():
        program += [
            (_JUMP_EQUAL, 0, 4, numbers[column]),
            (_LOAD, 0, 0, _THIRD_ARGUMENT_AT),
            (_JUMP_SET, 0, 1, _PROT_EXEC),
            (_RETURN, 0, 0, _REFUSE),
            (_RETURN, 0, 0, _ALLOW),
        ]
    for numbers in _CALLS.values():
        program += [(_JUMP_EQUAL, 0, 1, numbers[column]), (_RETURN, 0, 0, _ALLOW)]
    program.append((_RETURN, 0, 0, _REFUSE))
    return b"".join(struct.pack("=HBBI", *instruction) for instruction in program)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _prctl(option: int, *arguments: int) -> None:
    padded = [ctypes.c_ulong(value) for value in (*arguments, 0, 0, 0, 0)[:4]]
    if _libc().prctl(ctypes.c_int(option), *padded) != 0:
        raise SandboxError(f"prctl {option}: {os.strerror(ctypes.get_errno())}")


def _address_space_bytes() -> int:
    with open("/proc/self/statm") as statm:
        return int(statm.read().split()[0]) * resource.getpagesize()


# --- the test of itself ---


def self_test() -> str | None:
    """Lock a forked child and let it try what it must not; None if all of it was refused, else what was not."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reader)
            os.write(writer, _attempts().encode()[:512])
        finally:
            os._exit(0)
    os.close(writer)
    found = b""
    while part := os.read(reader, 512):
        found += part
    os.close(reader)
    os.waitpid(child, 0)
    return None if found == b"locked" else found.decode(errors="replace") or "the locked process died"


def _attempts() -> str:
    parent = os.getppid()
    try:
        lock(cpu_s=5)
    except (SandboxError, OSError, ValueError) as error:
        return f"no sandbox here: {error}"
    attempts: dict[str, Callable[[], object]] = {
        "opening a file": lambda: os.open("/", os.O_RDONLY),
        "looking a file up": lambda: os.stat("/"),
        "a socket": lambda: socket.socket(socket.AF_INET, socket.SOCK_STREAM),
        "a local socket": lambda: socket.socketpair(),
        "a fork": os.fork,
        "a program": lambda: os.execv(sys.executable, [sys.executable]),
        "a signal": lambda: os.kill(parent, 0),
        "another process's limits": lambda: resource.prlimit(parent, resource.RLIMIT_NOFILE),
    }
    for name, attempt in attempts.items():
        try:
            attempt()
        except PermissionError:
            continue
        except OSError as error:
            return f"the filter leaves {name} to the system ({error})"
        return f"the filter lets {name} through"
    return "locked"


if __name__ == "__main__":
    sys.stdout.write(self_test() or "locked")
