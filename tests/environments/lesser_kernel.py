"""One call of the Python tool under a kernel that lacks something: ``lesser_kernel.py landlock|seccomp ISOLATION PROGRAM``.

A filter of system calls stands for the kernel: it fails them as a kernel does that was built without.
"""

from __future__ import annotations

import asyncio
import ctypes
import errno
import platform
import sys
from pathlib import Path

from sandboxes import ask

from rl_tpu.environments.tools import watch
from rl_tpu.environments.tools.python import Python
from rl_tpu.errors import UserError

sys.path.append(str(Path(watch.__file__).parent / "confined"))

import seccomp

LANDLOCK_CREATE_RULESET, PRCTL, SET_SECCOMP = 444, {"x86_64": 157, "aarch64": 167}, 22


def without(feature: str) -> list[seccomp.Instruction]:
    """Everything is allowed but what the feature begins with."""
    if feature == "landlock":
        refused = [(seccomp._IF_EQUAL, 0, 1, LANDLOCK_CREATE_RULESET), seccomp._refuse(errno.ENOSYS)]
    else:
        number = PRCTL[platform.machine()]
        refused = [(seccomp._IF_EQUAL, 0, 3, number), seccomp._load(0)]
        refused += [(seccomp._IF_EQUAL, 0, 1, SET_SECCOMP), seccomp._refuse(errno.EINVAL)]
    return [(seccomp._LOAD, 0, 0, 0), *refused, seccomp._ALLOW]


async def main(isolation: str, program: str) -> str:
    tool = Python(isolation=isolation)
    try:
        await tool.open()
        return (await ask(tool, program)).text
    except UserError as error:
        return f"UserError: {error}"
    finally:
        await tool.close()


ctypes.CDLL(None).prctl(38, 1, 0, 0, 0)
seccomp.program = lambda machine, pid: without(sys.argv[1])
seccomp.restrict()
print(asyncio.run(main(*sys.argv[2:])))
