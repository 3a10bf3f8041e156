"""Landlock: after `restrict` the process reaches only the named files, whoever it runs as. Never undone, inherited.

Source: Linux's Documentation/userspace-api/landlock.rst and include/uapi/linux/landlock.h. No library is used: it is three
system calls, and the bindings in the package registry want a kernel of 2024 or a compiled supervisor.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
import struct
from collections.abc import Iterable

# The same numbers on every machine.
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_GET_VERSION = 1
_RULE_PATH_BENEATH = 1

_READ_FILE, _READ_DIR = 1 << 2, 1 << 3
_WRITE_FILE, _TRUNCATE = 1 << 1, 1 << 14
_REMOVE_DIR, _REMOVE_FILE = 1 << 4, 1 << 5
_MAKE_DIR, _MAKE_REG, _MAKE_FIFO, _MAKE_SYM, _REFER = 1 << 7, 1 << 8, 1 << 10, 1 << 12, 1 << 13
READ = _READ_FILE | _READ_DIR
WRITE = (
    READ
    | _WRITE_FILE
    | _TRUNCATE
    | _REMOVE_DIR
    | _REMOVE_FILE
    | _MAKE_DIR
    | _MAKE_REG
    | _MAKE_FIFO
    | _MAKE_SYM
    | _REFER
)
_OF_FILES = _READ_FILE | _WRITE_FILE | _TRUNCATE

# How many rights to files an ABI knows; what a kernel does not know it does not guard (`seccomp` then does).
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 4: 15, 5: 16}
_NEWEST = max(_FILE_RIGHTS)
_BIND_TCP_AND_CONNECT_TCP = 3  # from ABI 4
_ABSTRACT_SOCKETS_AND_SIGNALS = 3  # from ABI 6

_libc = ctypes.CDLL(None, use_errno=True)


def abi() -> int:
    """The kernel's version of Landlock; 0 if it has none or it is off."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), _GET_VERSION))


def restrict(readable: Iterable[str], writable: Iterable[str]) -> None:
    """From now on this thread, and what it starts, reads only beneath the first paths and writes only beneath the second.

    Nothing can be executed, no TCP connection made (from ABI 4), no process outside signalled (from ABI 6). Paths that do
    not exist are left out. PR_SET_NO_NEW_PRIVS must be set. Raises OSError.
    """
    version = abi()
    if version == 0:
        raise OSError(errno.ENOSYS, "Landlock: the kernel has none, or it is off")
    rights = (1 << _FILE_RIGHTS[min(version, _NEWEST)]) - 1
    attributes = [rights]
    attributes += [_BIND_TCP_AND_CONNECT_TCP] if version >= 4 else []
    attributes += [_ABSTRACT_SOCKETS_AND_SIGNALS] if version >= 6 else []
    packed = struct.pack(f"{len(attributes)}Q", *attributes)
    ruleset = _call(_CREATE_RULESET, packed, ctypes.c_size_t(len(packed)), 0)
    try:
        for paths, allowed in ((readable, READ), (writable, WRITE)):
            for path in paths:
                _allow(ruleset, path, allowed & rights)
        _call(_RESTRICT_SELF, ruleset, 0)
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        opened = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return
    try:
        if not stat.S_ISDIR(os.fstat(opened).st_mode):
            rights &= _OF_FILES
        _call(_ADD_RULE, ruleset, _RULE_PATH_BENEATH, struct.pack("=Qi", rights, opened), 0)
    finally:
        os.close(opened)


def _call(number: int, *arguments: object) -> int:
    result = _libc.syscall(number, *arguments)
    if result < 0:
        raise OSError(ctypes.get_errno(), f"Landlock: {os.strerror(ctypes.get_errno())}")
    return result
