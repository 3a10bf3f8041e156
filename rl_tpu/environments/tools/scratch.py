"""Directories for programs that nobody has read: whatever they leave in them is counted and removed."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import itertools
import os
import secrets
import tempfile
import time
from pathlib import Path

PREFIX = "rl_tpu-sandbox-"
_STALE_S = 60.0


class ScratchDirectories:
    """A directory full of scratch directories, locked as long as its process lives.

    Making one removes those of processes that were killed before they could do it: they are no longer locked.
    """

    def __init__(self) -> None:
        for left in Path(tempfile.gettempdir()).glob(f"{PREFIX}*"):
            with contextlib.suppress(OSError):  # locked, or another user's
                if time.time() - left.stat().st_mtime > _STALE_S:  # a young one may be about to be locked
                    os.close(_lock(left))
                    remove_tree(left)
        self.path = Path(tempfile.mkdtemp(prefix=PREFIX))
        self._lock = _lock(self.path)

    def make(self) -> Path:
        """A new, empty scratch directory."""
        return Path(tempfile.mkdtemp(dir=self.path))

    def remove(self) -> None:
        """This one, with all that is in it."""
        remove_tree(self.path)
        os.close(self._lock)


def _lock(directory: Path) -> int:
    """The descriptor that holds the lock. Raises BlockingIOError if another process has it."""
    opened = os.open(directory, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BaseException:
        os.close(opened)
        raise
    return opened


def holds_more(top: Path, most_bytes: int, most_entries: int) -> bool:
    """Whether a directory holds more bytes or more entries than it may. A program may be writing in it."""
    held = entries = 0
    pending = [os.fspath(top)]
    while pending:
        try:
            with os.scandir(pending.pop()) as found:
                for entry in found:
                    entries += 1
                    if entry.is_dir(follow_symlinks=False):
                        pending.append(entry.path)
                    else:
                        held += entry.stat(follow_symlinks=False).st_size
        except OSError as error:
            if error.errno == errno.ENAMETOOLONG:  # so deep that nobody can count it
                return True
        if held > most_bytes or entries > most_entries:
            return True
    return False


def remove_tree(top: Path) -> None:
    """Remove a directory of any depth and any modes, without following links.

    What lies deeper is moved up first: shutil.rmtree gives up after a thousand levels.
    """
    names = (top / f"{secrets.token_hex(8)}-{number}" for number in itertools.count())
    pending = _remove_files(top)
    while pending:
        directory = pending.pop()
        for below, moved in zip(_remove_files(directory), names, strict=False):
            os.rename(below, moved)
            pending.append(moved)
        os.rmdir(directory)
    os.rmdir(top)


def _remove_files(directory: Path) -> list[Path]:
    """Remove what is no directory; the directories that are left, each made ours to write."""
    with os.scandir(directory) as found:
        entries = list(found)
    directories = [Path(entry.path) for entry in entries if entry.is_dir(follow_symlinks=False)]
    for entry in entries:
        if not entry.is_dir(follow_symlinks=False):
            os.unlink(entry.path)
    for path in directories:
        os.chmod(path, 0o700)
    return directories
