"""The driver's handle on all trainer ranks: every call goes to all of them, has a deadline, and names who failed."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import ray
import torch
from ray.exceptions import RayActorError, RayTaskError

from rl_tpu.config.schema import ClusterConfig, RunConfig
from rl_tpu.devices import get_device
from rl_tpu.errors import RunError, UserError
from rl_tpu.trainer import program_cache
from rl_tpu.trainer.packing import imbalance, padding_share, shared_share
from rl_tpu.trainer.rank import Place, TrainerRank, arrays_of
from rl_tpu.types import PackedBatch

CLOSE_TIMEOUT_S = 10.0
PEAK_MEMORY = "train/peak_memory_gb"
CACHE = ("train/cache_hits", "train/cache_misses")
"""Each rank's own, unlike other counts."""
COUNTS = (
    *(f"train/{name}" for name in ("tokens", "loss_tokens", "excluded_tokens", "skipped_updates", "early_stops")),
    "train/compilations",
    *CACHE,
)
GRACE_S = 5.0
"""How long the other ranks get to finish a call that failed on one of them."""


class TrainerGroup:
    """All ranks of the trainer. Make one with `start`; end it with `close`."""

    def __init__(self, config: RunConfig, actors: list[Any], logs: list[Path]):
        self._config = config
        self._actors = actors
        self._logs = logs
        self._places: list[Place] = []
        self._broken: str | None = None

    @classmethod
    async def start(
        cls, config: RunConfig, model_dir: Path, run_dir: Path, run_id: str, actor_options: Sequence[dict[str, Any]]
    ) -> TrainerGroup:
        """One Ray actor per entry of `actor_options` (keyword arguments of Ray's `.options()`), rank 0 first, each with
        the policy of `model_dir` in it. `run_id` names what weight_sync leaves outside the processes.

        Raises UserError for a model the trainer cannot take, RunError for a rank that fails or is late; nothing is left
        running then.
        """
        logs = [run_dir.resolve() / "logs" / f"trainer-rank-{rank}.log" for rank in range(len(actor_options))]
        remote = ray.remote(TrainerRank)
        actors = [remote.options(**options).remote(str(log)) for options, log in zip(actor_options, logs, strict=True)]
        group = cls(config, actors, logs)
        try:
            async with asyncio.timeout(config.trainer.start_timeout_s):
                group._places = await group._all("place")
                environments = rank_environments(config, group._places)
                each = [(config, str(model_dir.resolve()), run_id, environment) for environment in environments]
                await group._all("start", each=each)
        except BaseException as error:
            group._broken = "it did not start"
            await group.close()
            if isinstance(error, TimeoutError):
                raise RunError(
                    f"the trainer did not start within trainer.start_timeout_s = {config.trainer.start_timeout_s:g} s; "
                    f"logs: {logs[0].parent}/trainer-rank-*.log"
                ) from None
            raise
        return group

    async def learn(self, minibatches: Sequence[PackedBatch]) -> dict[str, float]:
        """The optimizer steps of one rollout step: `algorithm.epochs` passes over `minibatches`, in order; metrics
        `train/*` of them all (`merge_metrics`)."""
        results = await self._all("learn", ray.put([arrays_of(minibatch) for minibatch in minibatches]))
        metrics = merge_metrics([_over_ranks(step) for step in zip(*results, strict=True)])
        return metrics | self._packing(minibatches)

    async def logprobs(self, batches: Sequence[PackedBatch], *, reference: bool = False) -> list[torch.Tensor]:
        """Log-probability of every token under the loss mask of each batch, of the present policy or of the reference
        policy; each [R, L] float32, zero elsewhere."""
        arrays = ray.put([arrays_of(batch) for batch in batches])
        ranks = await self._all("logprobs", arrays, reference)
        # Ranks of one tensor-parallel group saw the same rows.
        parts = zip(*ranks[:: self._config.trainer.parallel.tensor], strict=True)
        return [torch.cat([torch.from_numpy(part.copy()) for part in batch]) for batch in parts]

    async def refresh_reference(self) -> None:
        """Make the present policy the reference."""
        await self._all("refresh_reference")

    async def publish(self, version: int, whole: bool = False) -> tuple[dict[str, Any], dict[str, float]]:
        """Publish the present policy as `version`: the handle that engines receive it by, and metrics.

        `sync/publish_s` is the slowest rank's; `sync/wire_bytes`, where the transport says it, what all ranks wrote.
        With `whole` engines can take it that hold no earlier version.
        """
        results = await self._all("publish", version, whole, timeout_s=self._config.weight_sync.timeout_s)
        handle, stats = results[0]
        metrics = {"sync/publish_s": max(stats["total_s"] for _, stats in results)}
        if "wire_bytes" in stats:
            metrics["sync/wire_bytes"] = float(stats["wire_bytes"])
        return handle, metrics

    async def full_tensors(self) -> dict[str, torch.Tensor]:
        """The whole present policy in Hugging Face's names and the engine's dtype, as the engines should hold it."""
        return (await self._all("full_tensors"))[0]

    async def save(self, directory: Path) -> None:
        """Write a checkpoint of the present policy into exactly `directory`; it is whole once it is `saved`."""
        await self._all("save", str(directory.resolve()))

    async def saved(self, wait: bool = True) -> bool:
        """Whether the checkpoint is on disk, every rank's part of it; with `wait`, once it is.

        Raises RunError where a rank could not write its part.
        """
        return all(await self._all("saved", wait))

    async def load(self, directory: Path) -> None:
        """Restore the checkpoint in `directory`; UserError if it is none of this model."""
        await self._all("load", str(directory.resolve()))

    async def export_hf(self, directory: Path) -> None:
        """Write the present policy as a Hugging Face directory."""
        await self._all("export_hf", str(directory.resolve()))

    async def close(self) -> None:
        """End all ranks, at the latest after a few seconds."""
        if self._broken is None:
            calls = [asyncio.wrap_future(actor.call.remote("close").future()) for actor in self._actors]
            done, _ = await asyncio.wait(calls, timeout=CLOSE_TIMEOUT_S)
            _failed(list(done))
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        self._broken = "it was closed"

    def _packing(self, minibatches: Sequence[PackedBatch]) -> dict[str, float]:
        """What became of the step's samples as rows."""
        positions = [minibatch.rows * minibatch.row_tokens for minibatch in minibatches]
        padding = sum(padding_share(batch) * size for batch, size in zip(minibatches, positions, strict=True))
        metrics = {
            "train/padding_share": padding / sum(positions),
            "train/rank_imbalance": max(imbalance(minibatch, self._config.data_ranks) for minibatch in minibatches),
        }
        if self._config.trainer.share_prompts:
            metrics["train/shared_prompt_share"] = fmean(map(shared_share, minibatches))
        return metrics

    async def _all(
        self, method: str, *args: Any, each: Sequence[tuple] | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """Call `method` on every rank with `args`, or with its own of `each`; all results, by rank.

        Once one rank fails and another does not come back, no later call is sent: the ranks would be out of step.
        """
        if self._broken is not None:
            raise RunError(f"the trainer is not there any more: {self._broken}")
        timeout_s = timeout_s or self._config.trainer.step_timeout_s
        refs = [actor.call.remote(method, *(each[rank] if each else args)) for rank, actor in enumerate(self._actors)]
        calls = [asyncio.wrap_future(ref.future()) for ref in refs]
        await asyncio.wait(calls, timeout=timeout_s, return_when=asyncio.FIRST_EXCEPTION)
        failures = _failed(calls)
        if failures:
            await asyncio.wait(calls, timeout=GRACE_S)
            # When a rank dies, another may be the first to complain, of the lost connection.
            dead = [rank for rank in _failed(calls) if isinstance(calls[rank].exception(), RayActorError)]
            failures = dead or failures
        late = [rank for rank, call in enumerate(calls) if not call.done()]
        if failures:
            error = self._failure(method, failures[0], calls[failures[0]].exception())
        elif late:
            error = RunError(
                f"trainer rank {', '.join(map(str, late))} did not finish {method} within {timeout_s:g} s; "
                f"log: {self._logs[late[0]]}"
            )
        else:
            return [call.result() for call in calls]
        if late:
            self._broken = str(error)
            for call in calls:
                call.cancel()
        raise error

    def _failure(self, method: str, rank: int, error: BaseException) -> Exception:
        """One line for what a rank raised."""
        cause = error.cause if isinstance(error, RayTaskError) else error
        if isinstance(cause, UserError):
            return UserError(str(cause))
        if isinstance(error, RayActorError):
            where = f" (process {self._places[rank].pid} on {self._places[rank].address})" if self._places else ""
            self._broken = f"rank {rank} died"
            return RunError(f"trainer rank {rank}{where} died in {method}; log: {self._logs[rank]}")
        reason = (str(cause).strip().splitlines() or ["no message"])[0]
        return RunError(
            f"trainer rank {rank} failed in {method}: {type(cause).__name__}: {reason}; log: {self._logs[rank]}"
        )


def _failed(calls: Sequence[asyncio.Future]) -> list[int]:
    return [rank for rank, call in enumerate(calls) if call.done() and call.exception()]


def rank_environments(config: RunConfig, places: Sequence[Place]) -> list[dict[str, str]]:
    """The environment of every rank: ranks on one host count up, and all meet at rank 0's port."""
    device, cluster = get_device(config.cluster.device), config.cluster
    nodes = [place.node for place in places]
    hosts = list(dict.fromkeys(nodes))
    return [
        device.rank_environment(
            rank=rank,
            local_rank=nodes[:rank].count(place.node),
            world_size=len(places),
            local_world_size=nodes.count(place.node),
            threads=config.trainer.threads_per_rank,
            master_address=places[0].address,
            master_port=places[0].port,
            chips=trainer_chips(cluster, hosts.index(place.node)),
        )
        | program_cache.environment(config)
        for rank, place in enumerate(places)
    ]


def trainer_chips(cluster: ClusterConfig, host: int) -> list[int]:
    """Chips of the `host`-th trainer host that train: the trainer takes the first chips of the cluster, in order."""
    return list(range(min(cluster.chips_per_host, cluster.trainer_chips - host * cluster.chips_per_host)))


def _over_ranks(ranks: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of one step, which all ranks agree on but for their own memory and programs."""
    peaks = {name: max(rank[name] for rank in ranks) for name in ranks[0] if name == PEAK_MEMORY}
    programs = {name: sum(rank[name] for rank in ranks) for name in ranks[0] if name in CACHE}
    return ranks[0] | peaks | programs


def merge_metrics(steps: Sequence[dict[str, float]]) -> dict[str, float]:
    """Metrics of several optimizer steps as those of one: counts add up, maxima stay maxima, the learning rate is the
    last, the deviation from the engine is the first step's (before the weights moved), the rest are means."""
    merged = {}
    for name in steps[0]:
        values = [step[name] for step in steps]
        if name in COUNTS:
            merged[name] = sum(values)
        elif name.startswith(("train/logprob_diff_", "train/mismatch_")):
            merged[name] = values[0]
        elif name.endswith("_max") or name == PEAK_MEMORY:
            merged[name] = max(values)
        elif name == "train/learning_rate":
            merged[name] = values[-1]
        else:
            merged[name] = sum(values) / len(values)
    seconds = sum(step["train/tokens"] / step["train/tokens_per_s"] for step in steps)
    updates = len(steps) - merged["train/skipped_updates"] - merged["train/early_stops"]
    return merged | {"train/updates": updates, "train/tokens_per_s": merged["train/tokens"] / seconds}
