"""One trainer rank: log-probabilities, losses and updates on packed rows. No Ray; all ranks call everything together."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from rl_tpu.algorithms.aggregation import token_weights
from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.algorithms.masked import usable_tokens
from rl_tpu.config.schema import AlgorithmConfig, TrainerConfig
from rl_tpu.devices import get_device, prepare_torchtitan
from rl_tpu.errors import RunError
from rl_tpu.trainer import checkpoint, export, process_group
from rl_tpu.trainer.compilations import KeptPrograms
from rl_tpu.trainer.layout import Layout
from rl_tpu.trainer.packing import rank_rows, rows_per_microbatch
from rl_tpu.trainer.tally import Tally
from rl_tpu.types import PackedBatch
from weight_sync import Shard


class PolicyTrainer:
    """The policy on one rank and everything that changes it.

    In a process that a launcher prepared (RANK, WORLD_SIZE, ... in the environment) it is one of several ranks, else
    the only one.

    Args:
        config: rows, micro-batches, parallelism, precision, optimizer, threads.
        algorithm: the loss, and how many optimizer steps one rollout step makes.
        model_dir: Hugging Face directory of the policy at version 0.
        distribution: what answers are sampled from (default: the whole softmax); every log-probability here is its.
        max_response_tokens: longest answer; the aggregation `constant_length` needs it.
        loss: `policy` (as `algorithm` composes it) or `supervised` (cross-entropy of the masked tokens).
        store: where several ranks meet; default: at MASTER_ADDR.

    Raises UserError for a model directory that cannot be read, an architecture that no family knows or an objective that
    there is not.
    """

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        model_dir: Path,
        *,
        device: str = "cpu",
        distribution: Distribution | None = None,
        max_response_tokens: int | None = None,
        seed: int = 0,
        loss: Literal["policy", "supervised"] = "policy",
        store: dist.Store | None = None,
    ):
        self.config, self.algorithm, self.distribution = config, algorithm, distribution or Distribution()
        self._max_response_tokens = max_response_tokens
        self._skipped_in_a_row = 0
        self.device = get_device(device)
        self._kept_programs = KeptPrograms(self.device) if config.execution.cache else None
        torch.set_num_threads(config.threads_per_rank)
        torch.manual_seed(seed)
        prepare_torchtitan(self.device)
        torch_device = self.device.torch_device(int(os.environ.get("LOCAL_RANK", "0")))
        self.device.prepare_execution(config.execution.eager)
        process_group.join(self.device, config.step_timeout_s, store)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.layout = Layout(self.ranks, self.rank, config.parallel)
        try:
            self._build(Path(model_dir), torch_device, loss)
        except BaseException:
            process_group.leave()
            raise

    def _build(self, model_dir: Path, torch_device: torch.device, loss: str) -> None:
        # These import torchtitan, which has to know its device first.
        from rl_tpu.trainer.execution import EagerExecution
        from rl_tpu.trainer.graph.execution import GraphExecution
        from rl_tpu.trainer.model import build_policy
        from rl_tpu.trainer.reference import ReferencePolicy

        self.model_dir = model_dir
        self.policy = build_policy(model_dir, self.device, torch_device, self.config)
        checkpoint.load_hf(self.policy, model_dir)
        self.reference: ReferencePolicy | None = None
        if self.algorithm.kl.coefficient:
            self.reference = ReferencePolicy(self.policy, model_dir, self.device, self.config)
        self.execution = (GraphExecution if self.config.execution.mode == "graph" else EagerExecution)(
            self.policy, self.reference, self.config, self.algorithm, self.distribution, self.device, loss
        )
        updates = self.config.steps * self.algorithm.minibatches * self.algorithm.epochs
        self.optimizer = self.execution.build_optimizer(updates)
        background = self.config.checkpoint.mode == "async"
        self._checkpointer = checkpoint.PolicyCheckpointer(self.policy, self.optimizer, self.reference, background)

    def learn(self, minibatches: Sequence[PackedBatch]) -> list[dict[str, float]]:
        """`algorithm.epochs` passes over `minibatches`, one optimizer step for each; the metrics of every step.

        Stops early where a step exceeds `algorithm.max_kl`.

        Raises RunError once `trainer.max_skipped_updates` updates in a row had no finite gradient.
        """
        steps: list[dict[str, float]] = []
        for minibatch in [minibatch for _ in range(self.algorithm.epochs) for minibatch in minibatches]:
            steps.append(self.update(minibatch))
            if steps[-1].get("train/early_stops"):
                break
        return steps

    def update(self, minibatch: PackedBatch) -> dict[str, float]:
        """One optimizer step on `minibatch` (the rows of all ranks, packed for so many); metrics over all ranks.

        The policy stays as it is if the gradient's norm is not finite (`train/skipped_updates`), and if it is further
        than `algorithm.max_kl` from the old policy already (`train/early_stops`).
        """
        started = time.perf_counter()
        metrics = self.backward(minibatch)
        too_far = self.algorithm.max_kl is not None and metrics["approx_kl"] > self.algorithm.max_kl
        metrics |= self._step(apply=not too_far) | {"early_stops": float(too_far)}
        metrics["tokens"] = float((minibatch.segment_ids > 0).sum())
        metrics["tokens_per_s"] = metrics["tokens"] / (time.perf_counter() - started)
        if self.policy.static_shapes:
            metrics["compilations"] = float(self.execution.compilations.since_last())
        if self._kept_programs:
            metrics |= self._kept_programs.since_last()
        if (peak := self.device.memory().peak_bytes) is not None:
            metrics["peak_memory_gb"] = peak / 1e9
        return {f"train/{name}": value for name, value in metrics.items()}

    def backward(self, minibatch: PackedBatch) -> dict[str, float]:
        """Add the gradient of the minibatch's loss to the parameters'; statistics of the loss over all ranks.

        The loss is a weighted sum over the whole minibatch whose weights are known before the first micro-batch, so the
        gradient does not depend on how rows are cut into ranks and micro-batches. Tokens whose given log-probabilities
        are no finite numbers are left out and counted (`excluded_tokens`). `logprob_diff_*` and `mismatch_k3` are the
        distance from the engine's log-probabilities: the engine's deviation as long as the weights are those that wrote
        the batch.
        """
        minibatch, excluded = usable(minibatch)
        weights = token_weights(
            minibatch.loss_mask, minibatch.sample_ids, self.algorithm.aggregation, self._max_response_tokens
        )
        tally = Tally(self.policy.data_group)
        for part in self._microbatches(minibatch):
            self.execution.backward(minibatch.select(part), weights[part], tally)
        loss_tokens = float(minibatch.loss_mask.sum())
        metrics = tally.reduce(loss_tokens) | {"loss_tokens": loss_tokens}
        return metrics | {"excluded_tokens": excluded + metrics.get("excluded_tokens", 0.0)}

    def logprobs(self, batch: PackedBatch, *, reference: bool = False, only_loss: bool = False) -> torch.Tensor:
        """Log-probabilities of the labels in this rank's rows (`rank_rows`), with `only_loss` of those under the loss mask
        alone; [R / data ranks, L] float32 on the host, zero elsewhere. Of the policy, or of the reference policy."""
        parts = [batch.select(part) for part in self._microbatches(batch)]
        found = [self.execution.logprobs(rows, reference=reference, only_loss=only_loss).cpu() for rows in parts]
        self.execution.reshard()
        return torch.cat(found)

    def refresh_reference(self) -> None:
        """Make the present policy the reference."""
        self.reference.refresh_from(self.policy)

    def shards(self, dtype: torch.dtype) -> Iterator[Shard]:
        """This rank's part of the policy for weight_sync, in the engine's `dtype`."""
        return export.shards(self.policy, dtype)

    def full_tensors(self) -> dict[str, torch.Tensor]:
        """The whole policy in Hugging Face's names, float32 on the host, on rank 0; elsewhere empty."""
        return dict(export.full_tensors(self.policy, keep=self.rank == 0))

    def export_hf(self, directory: Path) -> None:
        """Write the policy as a Hugging Face directory that transformers and SGLang load."""
        tensors = export.full_tensors(self.policy, keep=self.rank == 0)
        if self.rank == 0:
            export.write_hf(directory, tensors, self.model_dir)
        for _ in tensors:
            pass  # the other ranks take part in gathering them
        dist.barrier()

    def save(self, directory: Path) -> None:
        """Write model, optimizer, schedule and random state as they are now into exactly `directory`; with
        `checkpoint.mode` async it is whole once it is `saved`. Raises RunError where that fails."""
        self._checkpointer.save(directory)

    def saved(self, wait: bool = True) -> bool:
        """Whether all that was saved is on disk; with `wait`, once it is. Raises RunError for what could not be written."""
        return self._checkpointer.finish(wait)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, on any number of ranks; UserError where `directory` holds no such checkpoint."""
        self._checkpointer.load(directory)

    def close(self) -> None:
        """Leave the process group, once nothing is being written any more."""
        try:
            self._checkpointer.finish()
        finally:
            process_group.leave()

    def _step(self, apply: bool) -> dict[str, float]:
        metrics = self.optimizer.step(apply)
        self._skipped_in_a_row = self._skipped_in_a_row + 1 if metrics["skipped_updates"] else 0
        if self._skipped_in_a_row >= self.config.max_skipped_updates:
            raise RunError(
                f"the gradient was not finite in {self._skipped_in_a_row} updates in a row (trainer.max_skipped_updates);"
                " the policy is as it was before them: look at the batches' rewards and log-probabilities"
            )
        return metrics

    def _microbatches(self, batch: PackedBatch) -> Iterator[slice]:
        """This rank's rows of the batch, as many at a time as a micro-batch has."""
        own = rank_rows(batch, self.layout.data_rank, self.layout.data_ranks)
        size = rows_per_microbatch(batch.row_tokens, self.config.microbatch_tokens)
        return (slice(start, start + size) for start in range(own.start, own.stop, size))


def usable(batch: PackedBatch) -> tuple[PackedBatch, float]:
    """The batch without the tokens whose given log-probabilities are no finite numbers, and how many those are."""
    given = [batch.sampler_logprobs, batch.old_logprobs]
    given += [] if batch.reference_logprobs is None else [batch.reference_logprobs]
    mask = usable_tokens(batch.loss_mask, *given)
    return replace(batch, loss_mask=mask), float((batch.loss_mask - mask).sum())
