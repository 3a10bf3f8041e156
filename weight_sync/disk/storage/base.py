"""What a place for versions must be able to do; one class per kind of place."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

COMMIT_FILE = "weight_sync.json"
VERSION_DIRECTORY = re.compile(r"v\d{8,}(-\d+)?(\.delta)?")
"""What versions are called; everything else in the same place is somebody else's and is left alone."""
REQUEST_BYTES = 64 * 2**20
"""The most that one request to an object store carries; its deadline is for that much."""


class Writer(ABC):
    """A file that is written from front to back."""

    @abstractmethod
    def write(self, data: memoryview | bytes) -> None: ...

    @abstractmethod
    def close(self) -> None:
        """The file is complete."""

    @abstractmethod
    def abandon(self) -> None:
        """Let go of a file that will not be complete. Never raises."""


class Store(ABC):
    """A place for version directories and one small pointer file."""

    @abstractmethod
    def directories(self) -> list[str]:
        """Committed directories."""

    @abstractmethod
    def claim(self) -> None:
        """Become the only sender that writes here, until ``release`` or the end of the process, where the place can tell.

        Raises WeightSyncError if another sender is.
        """

    @abstractmethod
    def release(self) -> None:
        """Let another sender write here."""

    @abstractmethod
    def remove_leftovers(self) -> None:
        """Remove what interrupted writes left behind."""

    @abstractmethod
    def require_space(self, nbytes: int) -> None:
        """Raises SpaceError with the numbers if ``nbytes`` more do not fit, where that is known."""

    @abstractmethod
    def begin(self, directory: str) -> None:
        """Make a place for a new directory that nobody sees yet."""

    @abstractmethod
    def require_begun(self, directory: str) -> None:
        """Raises WeightSyncError if another rank's ``begin`` cannot be seen from here."""

    @abstractmethod
    def create(self, directory: str, name: str) -> Writer:
        """A new file in a directory that was begun and not committed."""

    @abstractmethod
    def commit(self, directory: str, record: bytes) -> None:
        """Make the directory visible, with ``record`` as its commit file. All writers are closed."""

    @abstractmethod
    def discard(self, directory: str) -> None:
        """Remove a directory that was begun and will not be committed. Never raises."""

    @abstractmethod
    def remove(self, directory: str) -> None:
        """Remove a committed directory; it is gone for readers before its first file is. Raises StaleHandleError if it
        is not there."""

    @abstractmethod
    def replace(self, name: str, data: bytes) -> None:
        """Write a small file beside the directories; readers see the old bytes or the new ones."""

    @abstractmethod
    def read(self, *path: str) -> bytes:
        """A small file, whole. Raises StaleHandleError if it is not there."""

    @abstractmethod
    def read_into(self, targets: Sequence[torch.Tensor], offset: int, *path: str) -> int:
        """Fill ``targets`` [bytes] uint8 one after another from byte ``offset`` of a file; at most ``REQUEST_BYTES``
        together. Returns the bytes read, fewer at the file's end. Raises StaleHandleError if it is not there."""

    def put(self, directory: str, name: str, data: bytes) -> None:
        """A whole file of a directory that was begun."""
        writer = self.create(directory, name)
        try:
            writer.write(data)
            writer.close()
        except BaseException:
            writer.abandon()
            raise
