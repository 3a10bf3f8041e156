"""All trainer ranks, placed and joined as in a run, sum one number each; who does not come is named.

Without this, a rank that is missing shows as a run that waits for its time-out, in whichever process complains first.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray

from rl_tpu.config.schema import RunConfig
from rl_tpu.orchestrator.preflight.host import HostFacts, host_facts
from rl_tpu.registry import one_line
from rl_tpu.trainer.group import rank_environments
from rl_tpu.trainer.rank import Place, TrainerRank

GRACE_S = 5.0
"""How much longer the driver waits than the ranks do, so that they can say themselves what happened."""


class ProbeRank(TrainerRank):
    """One trainer rank without a policy."""

    def facts(self) -> HostFacts:
        """Of the host it runs on."""
        return host_facts()

    def add_up(self, device_name: str, environment: dict[str, str], timeout_s: float) -> Sum:
        """Meet the others and sum rank + 1 over all ranks, on the trainer's device and by its backend."""
        os.environ.update(environment)
        import torch
        import torch.distributed as dist

        from rl_tpu.devices import get_device
        from rl_tpu.trainer import process_group

        deadline = time.monotonic() + timeout_s
        rank, ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
        store = self._store = self._meet(timeout_s)  # others may still look into it when this rank has given up
        store.set(f"here/{rank}", "")
        if missing := [other for other in range(ranks) if not _comes(store, f"here/{other}", deadline)]:
            return Sum(missing=missing)
        device = get_device(device_name)
        torch_device = device.torch_device(int(environment["LOCAL_RANK"]))
        process_group.join(device, timeout_s, store)
        try:
            number = torch.full((1024,), float(rank + 1), device=torch_device)
            started = time.perf_counter()
            dist.all_reduce(number)
            value = float(number[-1].cpu())
            seconds = time.perf_counter() - started
        finally:
            process_group.leave()
        return Sum(value=value, seconds=seconds)


@dataclass(frozen=True)
class Sum:
    """What one rank saw."""

    value: float | None = None
    seconds: float = 0.0
    missing: Sequence[int] = ()
    """Ranks that had not come when the time was up."""


@dataclass(frozen=True)
class Ranks:
    """The actors of all ranks, and where they are."""

    actors: list[Any]
    places: list[Place]
    facts: list[HostFacts]

    def describe(self, rank: int) -> str:
        """Rank, host and process, as a person looks for them."""
        place = self.places[rank]
        return f"trainer rank {rank} on {self.facts[rank].name} ({place.address}, process {place.pid})"


class Missing(Exception):
    """Ranks or hosts that did not come; the message names them."""


def start_ranks(config: RunConfig, options: Sequence[dict[str, Any]], log_directory: Path) -> Ranks:
    """One actor for each entry of `options` (`Placement.trainer_options`).

    Raises Missing where one does not start within `preflight.collective_timeout_s`; none is left then.
    """
    remote, timeout_s = ray.remote(ProbeRank), config.preflight.collective_timeout_s
    logs = [log_directory / f"preflight-rank-{rank}.log" for rank in range(len(options))]
    actors = [remote.options(**each).remote(str(log)) for each, log in zip(options, logs, strict=True)]
    names = [f"trainer rank {rank}" for rank in range(len(actors))]
    try:
        places, facts = (_all(actors, method, timeout_s, names) for method in ("place", "facts"))
    except Missing as missing:
        end_ranks(actors)
        alive = sorted({node["NodeManagerHostname"] for node in ray.nodes() if node["Alive"]})
        raise Missing(f"{missing}; Ray's hosts are {', '.join(alive)}") from None
    return Ranks(actors, places, facts)


def sum_over_ranks(config: RunConfig, ranks: Ranks) -> float:
    """Seconds of the collective, the slowest rank's.

    Raises Missing with the ranks that did not take part, or with what went wrong on one of them.
    """
    timeout_s, count = config.preflight.collective_timeout_s, len(ranks.actors)
    # Who does not answer now is missing; later it would seem as if those were missing, too, that wait for it.
    _all(ranks.actors, "facts", timeout_s, [ranks.describe(rank) for rank in range(count)])
    environments = rank_environments(config, ranks.places)
    each = [(config.cluster.device, environment, timeout_s) for environment in environments]
    calls = [actor.call.remote("add_up", *args) for actor, args in zip(ranks.actors, each, strict=True)]
    ray.wait(calls, num_returns=count, timeout=timeout_s + GRACE_S)
    sums, missing, errors = [], set(), []
    for rank, call in enumerate(calls):
        try:
            found = ray.get(call, timeout=0)
        except ray.exceptions.GetTimeoutError:
            missing.add(rank)
        except ray.exceptions.RayActorError:
            missing.add(rank)
            errors.append(f"{ranks.describe(rank)} died")
        except ray.exceptions.RayTaskError as error:
            errors.append(f"{ranks.describe(rank)}: {one_line(error.cause)}")
        else:
            sums.append(found)
            missing.update(found.missing)
    if missing:
        named = ", ".join(ranks.describe(rank) for rank in sorted(missing))
        raise Missing(f"{named} did not come within {timeout_s:g} s" + "".join(f"; {error}" for error in errors))
    if errors:
        raise Missing(errors[0])
    right = count * (count + 1) / 2
    if wrong := [rank for rank, found in enumerate(sums) if found.value != right]:
        raise Missing(f"{ranks.describe(wrong[0])} got {sums[wrong[0]].value} instead of the sum {right}")
    return max(found.seconds for found in sums)


def end_ranks(actors: Sequence[Any]) -> None:
    for actor in actors:
        ray.kill(actor)


def _all(actors: Sequence[Any], method: str, timeout_s: float, names: Sequence[str]) -> list[Any]:
    """The method's result on every rank. Raises Missing with the names of those that have none."""
    calls = [actor.call.remote(method) for actor in actors]
    done, _ = ray.wait(calls, num_returns=len(calls), timeout=timeout_s)
    if late := [name for name, call in zip(names, calls, strict=True) if call not in done]:
        raise Missing(f"{', '.join(late)} did not answer within {timeout_s:g} s")
    results = []
    for name, call in zip(names, calls, strict=True):
        try:
            results.append(ray.get(call))
        except ray.exceptions.RayActorError:
            raise Missing(f"{name} died") from None
        except ray.exceptions.RayTaskError as error:
            raise Missing(f"{name} failed in {method}: {one_line(error.cause)}") from None
    return results


def _comes(store: Any, key: str, deadline: float) -> bool:
    """Whether the key is there before the deadline."""
    try:
        store.wait([key], timedelta(seconds=max(0.1, deadline - time.monotonic())))
        return True
    except RuntimeError:  # torch's DistStoreError: time is up
        return False
