"""What is known of a version in storage: its directory's name, its commit record, and how long it is kept."""

from __future__ import annotations

import json
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from weight_sync.disk.storage import COMMIT_FILE, Store
from weight_sync.errors import StaleHandleError, WeightSyncError
from weight_sync.hashing import xxh3_128
from weight_sync.manifest import Manifest

LATEST_FILE = "latest"


def directory_name(version: int, delta: bool, taken: Iterable[str]) -> str:
    """``v00000012``, a delta ``v00000012.delta``; what is published again ``v00000012-2``, for names are never reused."""
    stems = {name.removesuffix(".delta") for name in taken}
    stem = f"v{version:08d}"
    number = 1
    while stem in stems:
        number += 1
        stem = f"v{version:08d}-{number}"
    return stem + (".delta" if delta else "")


@dataclass(frozen=True)
class Link:
    """Another version's directory, and the hash of its record, so that it is known again."""

    directory: str
    record_xxh3_128: str


@dataclass(frozen=True)
class FileRecord:
    """One file of tensors. ``tensors`` are byte offset and length by name; a header is hashed, as readers of
    checkpoints trust it."""

    tensors: dict[str, tuple[int, int]]
    header_bytes: int = 0
    header_xxh3_128: str | None = None


@dataclass(frozen=True)
class Record:
    """The commit file of a version.

    publish   counts the publishes into one place, across runs
    chain     what a delta builds on: the full base first, the previous version last; empty for a full version
    files     by name
    """

    run_id: str
    publish: int
    manifest: Manifest
    chain: tuple[Link, ...]
    files: dict[str, FileRecord]

    @property
    def is_delta(self) -> bool:
        return bool(self.chain)

    def to_json(self) -> bytes:
        return json.dumps(asdict(self), separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, text: bytes) -> Record:
        """Raises WeightSyncError if the text is no record."""
        try:
            fields = json.loads(text)
            return cls(
                run_id=fields["run_id"],
                publish=fields["publish"],
                manifest=Manifest.from_json(json.dumps(fields["manifest"])),
                chain=tuple(Link(**link) for link in fields["chain"]),
                files={name: _file_record(file) for name, file in fields["files"].items()},
            )
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise WeightSyncError(f"not the commit file of a version: {type(error).__name__}: {error}") from error


def _file_record(fields: dict[str, Any]) -> FileRecord:
    tensors = {name: (int(offset), int(nbytes)) for name, (offset, nbytes) in fields["tensors"].items()}
    return FileRecord(tensors, fields["header_bytes"], fields["header_xxh3_128"])


def read_record(store: Store, link: Link) -> Record:
    """Raises StaleHandleError if the version was removed, WeightSyncError if its record is not the one linked to."""
    text = store.read(link.directory, COMMIT_FILE)
    if xxh3_128(text) != link.record_xxh3_128:
        raise WeightSyncError(f"{store}/{link.directory}/{COMMIT_FILE} is damaged: its manifest cannot be trusted")
    return Record.from_json(text)


class History:
    """Committed versions in the order they were published, and which of them may go."""

    def __init__(self, store: Store):
        """Reads what is there; a version whose record cannot be read counts as the oldest."""
        self._store = store
        found = []
        for directory in store.directories():
            try:
                record = Record.from_json(store.read(directory, COMMIT_FILE))
                found.append((record.publish, directory, [link.directory for link in record.chain]))
            except WeightSyncError:
                found.append((0, directory, []))
        self.next_publish = max((publish for publish, _, _ in found), default=0) + 1
        self._chains = {directory: chain for _, directory, chain in sorted(found)}

    @property
    def directories(self) -> list[str]:
        return list(self._chains)

    def add(self, directory: str, record: Record) -> None:
        self._chains[directory] = [link.directory for link in record.chain]
        self.next_publish = record.publish + 1

    def remove_old(self, keep: int) -> None:
        """Remove all but the newest ``keep`` versions and what those build on."""
        newest = self.directories[-keep:]
        needed = set(newest).union(*(self._chains[directory] for directory in newest))
        old = [directory for directory in self._chains if directory not in needed]
        for directory in old:
            with suppress(StaleHandleError):  # somebody else has removed it
                self._store.remove(directory)
            del self._chains[directory]
