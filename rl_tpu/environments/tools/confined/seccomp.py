"""Seccomp: after `restrict` the kernel refuses every system call that `syscall_numbers` does not list. Never undone.

A refused call fails with EPERM, which Python raises as PermissionError; a call of a foreign instruction set (x32, 32 bits)
too. Source: Linux's Documentation/userspace-api/seccomp_filter.rst, include/uapi/linux/{seccomp,filter}.h. No library is
used: those in the package registry need libseccomp on the host, and this is one list.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct

from syscall_numbers import ALLOWED, CHECKED, FIRST_RECENT, MACHINES

_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER = 22, 2

# Classic BPF on one register: load a word, mask it, compare it and jump, return.
_LOAD, _AND, _RETURN = 0x20, 0x54, 0x06
_IF_EQUAL, _IF_AT_LEAST, _IF_ANY_BIT = 0x15, 0x35, 0x45
# Offsets in struct seccomp_data, little-endian: nr, arch, instruction_pointer, then six arguments of 64 bits.
_NUMBER, _ARCH, _ARGUMENTS = 0, 4, 16
_X32 = 0x40000000

_CLONE_THREAD = 0x00010000
_FCNTL_COMMANDS = (0, 1, 2, 3, 4, 5, 6, 7, 1030, 1032)
"""Duplicates, flags, locks, a pipe's size; not who gets a file's signals, not leases, not notifications."""
_IOCTL_REQUESTS = (0x5401, 0x5413, 0x541B, 0x5421, 0x5450, 0x5451)
"""Is it a terminal, the terminal's size, how many bytes wait, blocking or not, closed on exec or not."""

Instruction = tuple[int, int, int, int]
"""Operation, instructions to skip if true, instructions to skip if not, operand."""
_ALLOW: Instruction = (_RETURN, 0, 0, 0x7FFF0000)


def restrict() -> None:
    """Install the filter in this thread and what it starts. PR_SET_NO_NEW_PRIVS must be set. Raises OSError."""
    machine = platform.machine()
    if machine not in MACHINES:
        raise OSError(
            errno.ENOSYS, f"seccomp: no list of system calls for {machine} (there is one for {list(MACHINES)})"
        )
    instructions = program(machine, os.getpid())
    code = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *instruction) for instruction in instructions))
    libc = ctypes.CDLL(None, use_errno=True)
    header = struct.pack("@HP", len(instructions), ctypes.addressof(code))  # struct sock_fprog
    if libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, header, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"seccomp: {os.strerror(ctypes.get_errno())}")


def program(machine: str, pid: int) -> list[Instruction]:
    """The filter for the process ``pid``."""
    instructions = [
        (_LOAD, 0, 0, _ARCH),
        (_IF_EQUAL, 1, 0, MACHINES[machine]),
        _refuse(errno.EPERM),
        (_LOAD, 0, 0, _NUMBER),
        (_IF_AT_LEAST, 0, 1, _X32),
        _refuse(errno.EPERM),
    ]
    checks = _checks(pid)
    for name, number in ALLOWED[machine].items() | CHECKED[machine].items():
        decision = checks.get(name, [_ALLOW])
        instructions += [(_IF_EQUAL, 0, len(decision), number), *decision]
    return [*instructions, (_IF_AT_LEAST, 0, 1, FIRST_RECENT), _refuse(errno.ENOSYS), _refuse(errno.EPERM)]


def _checks(pid: int) -> dict[str, list[Instruction]]:
    """What decides about a call by its arguments."""
    only_itself = _only(0, (pid,))
    return {
        "open": _open(1),
        "openat": _open(2),
        "clone": [_load(0), (_IF_ANY_BIT, 0, 1, _CLONE_THREAD), _ALLOW, _refuse(errno.EPERM)],
        "kill": only_itself,
        "tgkill": only_itself,
        "prlimit64": _only(0, (0, pid)),
        "fcntl": _only(1, _FCNTL_COMMANDS),
        "ioctl": _only(1, _IOCTL_REQUESTS),
        "socketpair": _only(0, (socket.AF_UNIX,)),
        # With an address a datagram could go to any socket.
        "sendto": [_load(4), (_IF_EQUAL, 0, 3, 0), _load(4, high=True), *_only_loaded((0,)), _refuse(errno.EPERM)],
    }


def _open(flags: int) -> list[Instruction]:
    """Refused: to truncate a file that is opened for reading, and to open it for neither reading nor writing (3), which
    truncates too. Landlock looks at neither before ABI 3."""
    return [
        _load(flags),
        (_AND, 0, 0, os.O_ACCMODE | os.O_TRUNC),
        (_IF_EQUAL, 3, 0, os.O_TRUNC),
        (_AND, 0, 0, os.O_ACCMODE),
        (_IF_EQUAL, 1, 0, os.O_ACCMODE),
        _ALLOW,
        _refuse(errno.EPERM),
    ]


def _only(argument: int, values: tuple[int, ...]) -> list[Instruction]:
    """Allowed if the argument, an int of 32 bits, is one of the values."""
    return [_load(argument), *_only_loaded(values)]


def _only_loaded(values: tuple[int, ...]) -> list[Instruction]:
    compared = [instruction for value in values for instruction in ((_IF_EQUAL, 0, 1, value), _ALLOW)]
    return [*compared, _refuse(errno.EPERM)]


def _load(argument: int, high: bool = False) -> Instruction:
    return (_LOAD, 0, 0, _ARGUMENTS + 8 * argument + 4 * high)


def _refuse(error: int) -> Instruction:
    return (_RETURN, 0, 0, 0x00050000 | error)
