"""The receiving end of ``ici``: one rank of a set of receivers that share a link to the sender's ranks."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from weight_sync.errors import StaleHandleError, VerificationError, WeightSyncError, require_positive
from weight_sync.hashing import default_threads, xxh3_128
from weight_sync.ici.buckets import Bucket, FlatRegions, Staging, ignore, receive_buckets
from weight_sync.ici.links import Group, Store, one_line
from weight_sync.ici.publication import Publication, Wants, read_publication
from weight_sync.manifest import Manifest
from weight_sync.receiver import require_hashes, require_transport, require_version
from weight_sync.sender import Region
from weight_sync.transport import Handle, Received, Receiver

REASON_S = 2.0
"""How long to look for what a sender rank said about a transfer that broke off."""


class LinkBrokenError(WeightSyncError):
    """The process group is of no more use."""


class Checks:
    """Hashes of what arrives: of every tensor when its last part is there, or of every part where regions are wanted."""

    def __init__(self, flat: FlatRegions, wanted: list[Region], whole: bool, threads: int):
        self.whole = whole
        self.pool = ThreadPoolExecutor(threads)
        self.tensors: dict[str, Future[str]] = {}
        self.parts: dict[int, list[tuple[str, str]]] = defaultdict(list)
        self._flat = flat
        self._regions = {region.name: region for region in wanted}
        self._missing = {region.name: region.nbytes for region in wanted}

    def see(self, peer: int, bucket: Bucket, message: torch.Tensor) -> None:
        if not self.whole:
            self.parts[peer] += [(part.name, xxh3_128(piece.cpu())) for part, piece in bucket.pieces(message)]
            return
        for part in bucket.parts:
            self._missing[part.name] -= part.nbytes
            if not self._missing[part.name]:
                self.tensors[part.name] = self.pool.submit(self._hash, self._regions[part.name])

    def _hash(self, region: Region) -> str:
        return xxh3_128(self._flat.bytes_of(region).cpu())


class IciReceiver(Receiver):
    """One receiver process.

    rank, world_size  within a set of receivers that call ``receive`` for the same handles together. Alone, a receiver has
                      a link of its own, which no other's failure touches
    name              of the set, if it is more than one process
    verify            whether to check every tensor's hash
    wants             which regions of which tensors this rank needs, at most one per tensor, from the manifest of a
                      version; None: every tensor whole. A region is checked against a hash that its sender made when it
                      sent it, a whole tensor against that in the manifest
    device            where received tensors lie (default: the kind of device that the sender has its own on)
    timeout_s         deadline of every wait for another rank; waiting for other receivers' turns may take twice that
    threads           for hashing; default: the cores, at most 8

    Tensors lie in memory that the next ``receive`` reuses.
    """

    def __init__(
        self,
        rank: int = 0,
        world_size: int = 1,
        name: str = "receivers",
        verify: bool = True,
        wants: Callable[[Manifest], Iterable[Region]] | None = None,
        device: str | None = None,
        timeout_s: float = 120.0,
        threads: int | None = None,
    ):
        require_positive(timeout_s=timeout_s, threads=threads)
        self._rank, self._world_size, self._name = rank, world_size, name
        self._verify, self._wants = verify, wants
        self._device, self._timeout_s = device, timeout_s
        self._threads = threads or default_threads()
        self._store: Store | None = None
        self._group: Group | None = None
        self._link: str | None = None
        self._staging: Staging | None = None
        self._wanted: list[Region] = []
        self._flat: FlatRegions | None = None
        self._received = 0
        self._number: int | None = None

    def receive(self, handle: Handle) -> Received:
        require_transport(handle, "ici", "version", "store", "sequence", "publication_xxh3_128")
        self._received += 1
        kept = self._link is not None
        try:
            return self._receive(handle)
        except LinkBrokenError:
            if not kept:
                raise
        return self._receive(handle)  # the link may have been broken for long; a new one tells

    def close(self) -> None:
        self._store = self._group = self._link = self._flat = self._staging = None
        self._wanted = []

    def _receive(self, handle: Handle) -> Received:
        start = time.perf_counter()
        self._number = None
        try:
            publication = self._read(handle)
            wants = self._wants and [[r.name, r.offsets, r.shape] for r in self._wants(publication.manifest)]
            wanted = publication.wanted(wants)
            if len({region.name for region in wanted}) < len(wanted):
                name = Counter(region.name for region in wanted).most_common(1)[0][0]
                raise WeightSyncError(f"{name}: a receiver can want one region of a tensor, not several")
            request = self._request(handle, wants)
            asked = time.perf_counter()
            checks = self._take(publication, request, wanted)
            taken = time.perf_counter()
            self._check(publication, request, checks)
        except (RuntimeError, TimeoutError) as error:
            self._group = self._link = None
            raise LinkBrokenError(f"version {handle['version']} did not arrive: {self._reason(error)}") from error
        end = time.perf_counter()

        received = self._received

        def check() -> None:
            if self._received != received:
                raise StaleHandleError(f"version {handle['version']} was overwritten by the receive after it")

        tensors = {region.name: self._flat.view(region) for region in wanted}
        stats = {
            "prepare_s": asked - start,
            "transfer_s": taken - asked,
            "verify_s": end - taken,
            "receive_s": end - start,
            "total_bytes": sum(region.nbytes for region in wanted),
        }
        return Received(handle["version"], publication.manifest, tensors, check, stats)

    def _read(self, handle: Handle) -> Publication:
        """What the sender says about the version."""
        address = tuple(handle["store"])
        try:
            if self._store is None or self._store.address != address:
                self.close()
                self._store = Store.connect(address, self._timeout_s)
            publication = read_publication(self._store, handle)
        except (RuntimeError, ConnectionError, TimeoutError) as error:
            self.close()
            raise StaleHandleError(
                f"version {handle['version']}: the sender at {address[0]}:{address[1]} is gone: {one_line(error)}"
            ) from error
        require_version(handle, publication.manifest)
        if self._verify:
            require_hashes(publication.manifest.tensors)
        return publication

    def _request(self, handle: Handle, wants: Wants) -> dict[str, Any]:
        """Ask the sender for the version, rank 0 for the whole set; the request as all ranks of the set know it."""
        digests = self._verify and wants is not None
        mine = {"link": self._link, "sequence": handle["sequence"], "wants": wants, "digests": digests}
        if self._rank != 0:
            mine["nonce"] = secrets.token_hex(8)
            self._store.put(f"set/{self._name}/{self._rank}", mine)
            request = self._store.take(f"set/{self._name}/{mine['nonce']}", self._timeout_s)
            if "error" in request:
                raise WeightSyncError(request["error"])
            return request
        others = [self._store.take(f"set/{self._name}/{rank}", self._timeout_s) for rank in range(1, self._world_size)]
        request = self._composed(handle, [mine, *others])
        for rank in others:
            self._store.put(f"set/{self._name}/{rank['nonce']}", request)
        if "error" in request:
            raise WeightSyncError(request["error"])
        self._store.put(f"request/{request['number']}", request)
        return request

    def _composed(self, handle: Handle, everyone: list[dict[str, Any]]) -> dict[str, Any]:
        """On rank 0: one request from what all ranks of the set ask for."""
        if len({rank["sequence"] for rank in everyone}) > 1:
            return {"error": f"the ranks of receivers {self._name!r} ask for different versions"}
        links = {rank["link"] for rank in everyone}
        new = len(links) > 1 or None in links
        return {
            "kind": "regions",
            "number": self._store.count("requests"),
            "version": handle["version"],
            "sequence": handle["sequence"],
            "receivers": self._world_size,
            "wants": [rank["wants"] for rank in everyone],
            "digests": [rank["digests"] for rank in everyone],
            "new": new,
            "link": f"link.{secrets.token_hex(8)}" if new else self._link,
        }

    def _join(self, request: dict[str, Any], publication: Publication) -> Group:
        """The link's group, once the sender has come to this request."""
        self._number = request["number"]
        answer = self._store.take(f"answer/{request['number']}", 2 * self._timeout_s, readers=self._world_size)
        if answer.get("stale"):
            raise StaleHandleError(answer["error"])
        if "error" in answer:
            raise RuntimeError(answer["error"])
        if request["new"]:
            senders = len(publication.held)
            rank, size = senders + self._rank, senders + self._world_size
            self._group = None  # closes the old one
            self._group = Group(self._store, request["link"], rank, size, publication.backend, self._timeout_s)
            self._link = request["link"]
        return self._group

    def _take(self, publication: Publication, request: dict[str, Any], wanted: list[Region]) -> Checks:
        """Receive everything wanted. Hashing goes on beside it."""
        plan = publication.buckets(request["wants"])
        buckets = {source: of[self._rank] for source, of in enumerate(plan) if self._rank in of}
        if wanted != self._wanted or self._flat is None:
            device = torch.device(self._device or publication.device)
            self._flat, self._staging = FlatRegions(wanted), Staging(device)
            self._flat.allocate(device)
            self._wanted = wanted
        checks = Checks(self._flat, wanted, request["wants"][self._rank] is None, self._threads)
        see = checks.see if self._verify else ignore
        group = self._join(request, publication)
        with checks.pool:
            receive_buckets(group, buckets, self._flat, self._staging, see)
        return checks

    def _check(self, publication: Publication, request: dict[str, Any], checks: Checks) -> None:
        """Raises VerificationError if a tensor or region is not what was sent."""
        if not self._verify:
            return
        if checks.whole:
            expected = {entry.name: entry.xxh3_128 for entry in publication.manifest.tensors}
            wrong = [name for name, found in checks.tensors.items() if found.result() != expected[name]]
        else:
            wrong = []
            for source, parts in checks.parts.items():
                sent = self._store.take(f"digests/{request['number']}/{source}/{self._rank}", self._timeout_s)
                wrong += [name for (name, found), said in zip(parts, sent, strict=True) if found != said]
        if wrong:
            raise VerificationError(publication.manifest.version, list(dict.fromkeys(wrong)))

    def _reason(self, error: Exception) -> str:
        """What a sender rank said about it, or else what was noticed here."""
        if self._number is None:
            return one_line(error)
        with contextlib.suppress(RuntimeError, TimeoutError):
            return self._store.take(f"failed/{self._number}", REASON_S)
        return one_line(error)
