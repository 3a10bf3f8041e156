"""What a program is bound by before it runs: limits, rights, files, system calls. All by the kernel, without being root."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sysconfig
from collections import namedtuple

import landlock
import seccomp

_PR_SET_PDEATHSIG, _PR_SET_NO_NEW_PRIVS = 1, 38
_CAPABILITY_VERSION_3 = 0x20080522
_LIBRARIES = ("/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/local/lib", "/etc/ld.so.cache")
_DATA = ("/usr/share/zoneinfo", "/dev/urandom")
_OPEN_FILES = 64

_libc = ctypes.CDLL(None, use_errno=True)


class Missing(Exception):
    """The kernel does not isolate. The message says what it lacks."""


Bounds = namedtuple("Bounds", "parent scratch packages memory_bytes file_bytes cpu_s best_effort")
"""``parent`` is the process that this one ends with, ``scratch`` the directory it may write in, ``packages`` are directories
it may read besides the standard library; with ``best_effort`` what the kernel lacks is left out."""


def confine(bounds: Bounds) -> None:
    """Bind this process, which has one thread. Raises Missing."""
    _set_limits(bounds)
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _drop_capabilities()
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != bounds.parent:  # it ended before it could be watched
        os._exit(1)
    readable = [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib"), *_LIBRARIES, *_DATA, *bounds.packages]
    try:
        landlock.restrict(readable, writable=[bounds.scratch, "/dev/null"])
    except OSError as error:
        if not bounds.best_effort:
            raise Missing(f"{error.strerror} (Linux 5.13 or newer has it, with landlock in its lsm= list)") from error
    try:
        seccomp.restrict()
    except OSError as error:
        if not bounds.best_effort:
            raise Missing(error.strerror) from error


def _set_limits(bounds: Bounds) -> None:
    for kind, value in (
        (resource.RLIMIT_AS, bounds.memory_bytes),
        (resource.RLIMIT_FSIZE, bounds.file_bytes),
        (resource.RLIMIT_CPU, bounds.cpu_s),
        (resource.RLIMIT_NOFILE, _OPEN_FILES),
        (resource.RLIMIT_CORE, 0),
    ):
        most = resource.getrlimit(kind)[1]
        value = value if most == resource.RLIM_INFINITY else min(value, most)
        resource.setrlimit(kind, (value, value))


def _drop_capabilities() -> None:
    """Root without capabilities: bound by limits and by the modes of files like everyone."""
    header = struct.pack("=Ii", _CAPABILITY_VERSION_3, 0)
    _libc.capset(header, bytes(24))
