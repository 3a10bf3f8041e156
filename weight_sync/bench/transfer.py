"""A payload from the private tensors of sender processes to verified tensors in receiver processes, round by round."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from weight_sync.bench import limits, processes
from weight_sync.bench.payload import Payload, add_sums, hold, sums
from weight_sync.bench.processes import State, Worker, WorkerError, close_all, each, on_all
from weight_sync.bench.timing import WARM_UPS, Figures, each_round, make_row, timed
from weight_sync.shared_memory.segments import remove_segments
from weight_sync.transport import open_receiver, open_sender


@dataclass(frozen=True)
class Case:
    """A transport and what is hashed: ``none`` nothing, ``inline`` the sender hashes in publish and the receiver checks.

    ``ahead``: as ``inline``, but the sender hashes before the clock starts, as a trainer does while engines generate.
    """

    transport: str
    hashing: str = "inline"

    @property
    def verified(self) -> bool:
        return self.hashing != "none"


HASHED = Case("shared_memory", "inline")


def cases_of(transport: str, senders: int) -> list[Case]:
    """Hashing costs about as much as copying through memory, and hides behind slower transports. Only whole tensors can
    be hashed ahead, and several senders hold rows of them."""
    if transport != HASHED.transport:
        return [Case(transport)]
    return [Case(transport, "none"), HASHED] + ([Case(transport, "ahead")] if senders == 1 else [])


class Group:
    """Sender processes that share a payload, and receiver processes. After an error it must be closed."""

    def __init__(self, payload: Payload, senders: int, receivers: int, directory: Path, timeout_s: float):
        self.payload, self.timeout_s = payload, timeout_s
        self._directory = directory
        self._run_id = f"bench-{secrets.token_hex(4)}"
        self._round = 0
        self.senders = [Worker(f"sender {rank}") for rank in range(senders)]
        self.receivers = [Worker(f"receiver {index}") for index in range(receivers)]
        self.everybody = self.senders + self.receivers
        rendezvous = str(directory / f"gloo-{self._run_id}")
        ranks = [(rank, senders) for rank in range(senders)]
        try:
            if senders > 1:
                each(self.senders, timeout_s, processes.join, [(*rank, rendezvous, timeout_s) for rank in ranks])
            each(self.senders, timeout_s, hold, [(payload, *rank) for rank in ranks])
        except BaseException:
            self.close()
            raise

    def measure(self, case: Case, repeats: int, progress: Callable[[str], None]) -> dict[str, Any]:
        """A row of the results. Raises WorkerError if anything failed or a round's bytes did not arrive."""
        with self.opened(case):
            rounds, peaks = zip(*(self.one_round(case) for _ in each_round(repeats, progress)), strict=True)
        peaks = [max(of_worker) for of_worker in zip(*peaks, strict=True)]
        senders = len(self.senders)
        return make_row(
            "transport",
            case.transport,
            self.payload.nbytes,
            rounds[WARM_UPS:],
            senders,
            len(self.receivers),
            verified=case.verified,
            hashing=case.hashing,
            changed_share=self.payload.changed,
            peak_rss_bytes={"senders": peaks[:senders], "receivers": peaks[senders:]},
        )

    @contextmanager
    def opened(self, case: Case) -> Iterator[None]:
        """Both ends are open; after an error they stay so until the group is closed."""
        on_all(self.everybody, self.timeout_s, processes.give_back_memory)
        with tempfile.TemporaryDirectory(dir=self._directory, prefix="case-", ignore_cleanup_errors=True) as place:
            options = _options(case, self._run_id, place)
            on_all(self.senders, self.timeout_s, open_sending, case.transport, options)
            on_all(self.receivers, self.timeout_s, open_receiving, case.transport, {"verify": case.verified})
            yield
            on_all(self.receivers, self.timeout_s, close_receiving)
            on_all(self.senders, self.timeout_s, close_sending)

    def one_round(self, case: Case) -> tuple[Figures, list[int]]:
        """What it took, and the peak memory of every process [bytes], senders first."""
        self._round += 1
        changed = on_all(self.senders, self.timeout_s, change, self._round)
        memcpy_gb_per_s = limits.memcpy_rate(self.senders[0], self.timeout_s)
        on_all(self.everybody, self.timeout_s, processes.reset_peak_memory)
        if case.hashing == "ahead":
            on_all(self.senders, self.timeout_s, hash_ahead)
        start = time.perf_counter()
        published = on_all(self.senders, self.timeout_s, publish, self._round)
        staged = time.perf_counter()
        handle, stats = published[0]
        on_all(self.receivers, self.timeout_s, receive, handle)
        received = time.perf_counter()
        load_s = on_all(self.receivers, self.timeout_s, load)
        peaks = on_all(self.everybody, self.timeout_s, processes.peak_memory)
        self._compare(add_sums(changed), on_all(self.receivers, self.timeout_s, received_sums))
        taken = {
            "total_s": received - start,
            "stage_s": staged - start,
            "receive_s": received - staged,
            "pause_s": max(load_s),
            "memcpy_gb_per_s": memcpy_gb_per_s,
        }
        if "wire_bytes" in stats:
            taken["wire_bytes"] = stats["wire_bytes"]
        return taken, peaks

    def _compare(self, sent: dict[str, int], arrived: list[dict[str, int]]) -> None:
        for receiver, found in zip(self.receivers, arrived, strict=True):
            wrong = sorted(name for name in sent.keys() | found.keys() if sent.get(name) != found.get(name))
            if wrong:
                raise WorkerError(
                    f"{receiver.name} has not got what was sent in round {self._round}: {len(wrong)} of {len(sent)} "
                    f"tensors differ, {wrong[0]} first"
                )

    def close(self) -> None:
        close_all(self.everybody)
        remove_segments(self._run_id)  # of a sender that had to be killed


def _options(case: Case, run_id: str, place: str) -> dict[str, Any]:
    options: dict[str, Any] = {"run_id": run_id, "hashes": case.verified}
    return options | {"url": place} if case.transport.startswith("disk") else options


# --- run in a sender ---


def open_sending(state: State, transport: str, options: dict[str, Any]) -> None:
    rank, world_size, group = state["shards"].rank, state["shards"].world_size, state.get("group")
    state["sender"] = open_sender(transport, rank=rank, world_size=world_size, group=group, **options)


def change(state: State, round_number: int) -> dict[str, int]:
    return state["shards"].change(round_number)


def hash_ahead(state: State) -> None:
    state["sender"].hash_ahead(state["shards"].shards)


def publish(state: State, version: int) -> tuple[dict, dict[str, float]]:
    sender = state["sender"]
    return sender.publish(version, state["shards"].shards), sender.stats


def close_sending(state: State) -> None:
    state.pop("sender").close()


# --- run in a receiver ---


def open_receiving(state: State, transport: str, options: dict[str, Any]) -> None:
    state["receiver"] = open_receiver(transport, **options)


def receive(state: State, handle: dict) -> None:
    state["received"] = state["receiver"].receive(handle)


def load(state: State) -> float:
    """As an engine does that has staged the version: copy into its parameters, then check. Returns seconds."""
    received = state["received"]
    if "parameters" not in state:
        state["parameters"] = {name: torch.ones_like(tensor) for name, tensor in received.tensors.items()}

    def copy() -> None:
        with received:
            for name, tensor in received.tensors.items():
                state["parameters"][name].copy_(tensor)

    return timed(copy)


def received_sums(state: State) -> dict[str, int]:
    """Of what was handed out, and of what was loaded."""
    arrived, loaded = sums(state.pop("received").tensors), sums(state["parameters"])
    return {name: value if loaded.get(name) == value else None for name, value in arrived.items()}


def close_receiving(state: State) -> None:
    state.pop("receiver").close()
    state.pop("parameters", None)
