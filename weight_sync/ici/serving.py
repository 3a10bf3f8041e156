"""What a sender rank does in the background: it serves links, sets of receiver ranks that ask for a version.

Requests arrive in the store. Rank 0 takes them in order, refuses those for versions that are gone, and passes the rest
on to the other ranks as jobs 1, 2, 3...; all ranks do the same jobs in the same order, one at a time. A link has
process groups of its own. Whatever goes wrong breaks that link alone: its groups are closed, the receivers find the
reason in the store, and make a new link when they ask again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from weight_sync.errors import WeightSyncError
from weight_sync.hashing import xxh3_128
from weight_sync.ici.broadcast import send_broadcast
from weight_sync.ici.buckets import Bucket, Staging, send_buckets
from weight_sync.ici.links import Group, Store, one_line
from weight_sync.ici.publication import Publication

log = logging.getLogger(__name__)

POLL_S = 0.01
"""How often a rank looks for work."""
REQUEST_GRACE_S = 5.0
"""A receiver that drew a number and died before it said what it wants is skipped after this."""
IDLE_VERSIONS = 8
"""A link that was not used for so many versions is given up; its receivers are gone or can make another."""


@dataclass
class Link:
    group: Group | None
    """With the receivers; None where only rank 0 is in it."""
    gather: Group | None = None
    """Of the sender ranks alone, where they send through rank 0."""
    store: Store | None = None
    """In which ``group`` was made, where that is not the sender's own."""
    used: int = 0
    """Sequence number of the version it served last."""
    plan: tuple[list, Any, dict[int, list[Bucket]]] | None = None
    """What was planned, and this rank's buckets by receiver rank: the same until the layout or the wants change."""


@dataclass
class LinkServer:
    """The background thread of one sender rank."""

    rank: int
    world_size: int
    address: tuple[str, int]
    device: torch.device
    timeout_s: float
    _publications: dict[int, Publication] = field(default_factory=dict)
    _links: dict[str, Link] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _idle: threading.Condition = field(default_factory=threading.Condition)
    _stopping: threading.Event = field(default_factory=threading.Event)
    _last_job: dict[int, int] = field(default_factory=dict)
    _done: int = 0

    def __post_init__(self) -> None:
        self._store = Store.connect(self.address, self.timeout_s, patient=True)  # a run that was suspended goes on
        self._staging = Staging(self.device)
        self._thread = threading.Thread(target=self._run, name="weight_sync links", daemon=True)
        self._thread.start()

    def offer(self, publication: Publication) -> None:
        """From now on receivers can have it."""
        with self._lock:
            self._publications[publication.sequence] = publication

    def withdraw(self, sequence: int) -> int:
        """On rank 0: from now on requests for it are refused. The number of the last job that may still read it."""
        if self.rank != 0:
            return 0
        with self._lock:
            self._publications.pop(sequence, None)
            return self._last_job.pop(sequence, 0)

    def forget(self, sequence: int, last_job: int) -> None:
        """Wait until this rank is through with the last job that reads it; its memory is free then.

        Every wait inside a job has a deadline, and so has this one.
        """
        deadline_s = 3 * self.timeout_s
        with self._idle:
            if not self._idle.wait_for(lambda: self._done >= last_job, deadline_s):
                raise WeightSyncError(
                    f"sender rank {self.rank}: a receiver still takes an older version after {deadline_s:g} s"
                )
        with self._lock:
            self._publications.pop(sequence, None)

    def close(self) -> None:
        """End the thread; if it waits for a receiver, it ends at that wait's deadline at the latest."""
        self._stopping.set()
        self._thread.join(min(5.0, self.timeout_s))

    def _run(self) -> None:
        jobs = self._requests() if self.rank == 0 else self._passed_on()
        try:
            for number, job, publication in jobs:
                self._do(job, publication)
                with self._idle:
                    self._done = number
                    self._idle.notify_all()
        except Exception as error:  # the store is gone, and with it sender rank 0
            if not self._stopping.is_set():
                log.warning("sender rank %d serves no more receivers: %s", self.rank, one_line(error))
        finally:
            self._links.clear()

    def _requests(self) -> Iterator[tuple[int, dict[str, Any], Publication]]:
        """Rank 0: (job number, request, version) of every request that can be served."""
        job = 0
        for number in self._numbers("requests"):
            request = self._request(number)
            if request is None:
                continue
            with self._lock:
                publication = self._publications.get(request["sequence"])
                if publication is not None:
                    job += 1
                    self._last_job[publication.sequence] = job
            if publication is None:
                line = f"version {request['version']} was overwritten by a later one"
                self._store.put(f"answer/{number}", {"error": line, "stale": True})
                continue
            request["number"] = number
            if self.world_size > 1:
                self._store.put(f"job/{job}", request)
            yield job, request, publication

    def _passed_on(self) -> Iterator[tuple[int, dict[str, Any], Publication]]:
        """Other ranks: the same."""
        number = 1
        while (job := self._poll(f"job/{number}")) is not None:
            self._store.let_go(f"job/{number}", readers=self.world_size - 1)
            with self._lock:
                publication = self._publications[job["sequence"]]
            yield number, job, publication
            number += 1

    def _numbers(self, counter: str) -> Iterator[int]:
        """1, 2, 3, ... as far as the counter has come."""
        number = 0
        while not self._stopping.wait(POLL_S):
            while number < self._store.count(counter, 0):
                number += 1
                yield number

    def _request(self, number: int) -> dict[str, Any] | None:
        try:
            return self._store.take(f"request/{number}", REQUEST_GRACE_S)
        except TimeoutError:
            return None

    def _poll(self, key: str) -> Any:
        while not self._stopping.wait(POLL_S):
            if (value := self._store.get(key)) is not None:
                return value
        return None

    def _do(self, job: dict[str, Any], publication: Publication) -> None:
        number, name = job["number"], job["link"]
        try:
            link = self._link(job, publication)
            if link is None:
                self._store.put(f"answer/{number}", {"error": f"link {name} is broken", "renew": True})
                return
            link.used = publication.sequence
            if job["kind"] == "broadcast":
                send_broadcast(link.group, link.gather, self.rank, publication, self._staging)
            else:
                self._send_regions(link, job, publication)
        except Exception as error:
            self._links.pop(name, None)
            line = f"sender rank {self.rank}: {one_line(error)}"
            log.warning("version %d, link %s: %s", publication.manifest.version, name, line)
            self._store.put(f"failed/{number}", line)

    def _link(self, job: Mapping[str, Any], publication: Publication) -> Link | None:
        """The job's link, made if it is new. None: it broke here."""
        name, sequence = job["link"], publication.sequence
        for other in [other for other, link in self._links.items() if link.used < sequence - IDLE_VERSIONS]:
            del self._links[other]
        known = self._links.get(name)
        if known is None and not job["new"]:
            return None
        if known is None and job["kind"] == "broadcast":
            known = self._meet_engines(job, publication.backend)
        else:
            self._answer(job, {})
            if known is None:
                size = self.world_size + job["receivers"]
                known = Link(self._group(self._store, name, size, publication.backend))
        self._links[name] = known
        return known

    def _meet_engines(self, job: Mapping[str, Any], backend: str) -> Link:
        """Engines do not come by our store: they get one for this link alone. When the link is given up it closes, and
        engines that still wait in it for others are let go."""
        name, link = job["link"], Link(None)
        if self.rank == 0:
            link.store = Store.serve(self.address[0], self.timeout_s)
            self._answer(job, {"store": link.store.address})
            link.group = self._group(link.store, name, 1 + job["receivers"], backend)
        if self.world_size > 1:
            link.gather = self._group(self._store, name, self.world_size, backend)
        return link

    def _group(self, store: Store, name: str, size: int, backend: str) -> Group:
        return Group(store, name, self.rank, size, backend, self.timeout_s)

    def _answer(self, job: Mapping[str, Any], answer: dict[str, Any]) -> None:
        if self.rank == 0:
            self._store.put(f"answer/{job['number']}", answer)

    def _send_regions(self, link: Link, job: Mapping[str, Any], publication: Publication) -> None:
        """Every receiver rank's regions, from this rank's part of the plan."""
        what = (job["wants"], publication.bucket_bytes, publication.bucket_tensors)
        if link.plan is None or link.plan[0] is not publication.held or link.plan[1] != what:
            link.plan = (publication.held, what, publication.buckets(job["wants"])[self.rank])
        buckets = {self.world_size + receiver: of for receiver, of in link.plan[2].items()}
        digests: dict[int, list[str]] = {peer: [] for peer in buckets}

        def digest(peer: int, bucket: Bucket, message: torch.Tensor) -> None:
            if job["digests"][peer - self.world_size]:
                digests[peer] += [xxh3_128(piece.cpu()) for _, piece in bucket.pieces(message)]

        send_buckets(link.group, buckets, publication.flat, self._staging, digest)
        for peer, of in digests.items():
            if of:
                self._store.put(f"digests/{job['number']}/{self.rank}/{peer - self.world_size}", of)
