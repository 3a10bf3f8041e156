"""One trainer rank: log-probabilities, losses and updates on packed rows. No Ray; all ranks call everything together."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from rl_tpu.algorithms.distribution import Distribution
from rl_tpu.algorithms.losses import clipped_policy_loss, supervised_loss, token_weights
from rl_tpu.config.schema import AlgorithmConfig, TrainerConfig
from rl_tpu.devices import get_device, prepare_torchtitan
from rl_tpu.trainer import checkpoint, export, process_group
from rl_tpu.trainer.layout import Layout
from rl_tpu.trainer.packing import rank_rows, rows_per_microbatch
from rl_tpu.trainer.tally import Tally
from rl_tpu.types import PackedBatch
from weight_sync import Shard


class PolicyTrainer:
    """The policy on one rank and everything that changes it.

    In a process that a launcher prepared (RANK, WORLD_SIZE, ... in the environment) it is one of several ranks, else
    the only one. `temperature` is the sampling temperature: it belongs to the policy's distribution, so every
    log-probability here is one of softmax(logits / temperature).

    Args:
        config: rows, micro-batches, precision, optimizer, threads.
        algorithm: the loss, and how many optimizer steps one rollout step makes.
        model_dir: Hugging Face directory of the policy at version 0.
        loss: `policy_gradient` (clipped, against sampler_logprobs) or `supervised` (cross-entropy of the masked tokens).
        store: where several ranks meet; default: at MASTER_ADDR.

    Raises UserError for a model directory that cannot be read or whose architecture no family knows.
    """

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: AlgorithmConfig,
        model_dir: Path,
        *,
        device: str = "cpu",
        temperature: float = 1.0,
        seed: int = 0,
        loss: Literal["policy_gradient", "supervised"] = "policy_gradient",
        store: dist.Store | None = None,
    ):
        self.config, self.algorithm, self.temperature, self.loss = config, algorithm, temperature, loss
        self.device = get_device(device)
        torch.set_num_threads(config.threads_per_rank)
        torch.manual_seed(seed)
        prepare_torchtitan(self.device)
        torch_device = self.device.torch_device(int(os.environ.get("LOCAL_RANK", "0")))
        process_group.join(self.device, config.step_timeout_s, store)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()
        self.layout = Layout(self.ranks, self.rank, config.parallel)
        try:
            self._build(Path(model_dir), torch_device)
        except BaseException:
            process_group.leave()
            raise

    def _build(self, model_dir: Path, torch_device: torch.device) -> None:
        # These import torchtitan, which has to know its device first.
        from rl_tpu.trainer.model import build_policy
        from rl_tpu.trainer.optimizer import PolicyOptimizer

        self.model_dir = model_dir
        self.policy = build_policy(model_dir, self.device, torch_device, self.config)
        checkpoint.load_hf(self.policy, model_dir)
        self.optimizer = PolicyOptimizer(
            self.policy.model,
            self.config.optimizer,
            self.device,
            total_steps=self.config.steps * self.algorithm.minibatches,
        )
        self._checkpointer = checkpoint.PolicyCheckpointer(self.policy, self.optimizer)

    def update(self, minibatch: PackedBatch) -> dict[str, float]:
        """One optimizer step on `minibatch` (the rows of all ranks, packed for so many); metrics over all ranks.

        The loss is a weighted sum over the whole minibatch whose weights are known before the first micro-batch, so the
        gradient does not depend on how rows are cut into ranks and micro-batches. An update whose gradient norm is not
        finite changes nothing and counts in `train/skipped_updates`. `train/logprob_diff_*` is the distance from the
        engine's log-probabilities: the engine's deviation as long as the weights are still those that wrote the batch.
        """
        started = time.perf_counter()
        weights = token_weights(minibatch.loss_mask, minibatch.segment_ids, self.algorithm.aggregation)
        own = rank_rows(minibatch, self.layout.data_rank, self.layout.data_ranks)
        tally = Tally()
        for rows, row_weights in zip(
            self._microbatches(minibatch.select(own)),
            weights[own]
            .to(self.policy.device)
            .split(rows_per_microbatch(minibatch.row_tokens, self.config.microbatch_tokens)),
            strict=True,
        ):
            logprobs, entropy = self.policy.logprobs(rows, Distribution(self.temperature))
            loss = (self._token_loss(rows, logprobs, tally) * row_weights).sum()
            loss.backward()
            tally.add(loss=loss, entropy=entropy * rows.loss_mask, loss_tokens=rows.loss_mask)
        sums, maxima = tally.reduce(self.policy.data_group)
        loss_tokens = sums.pop("loss_tokens")
        means = {name: value if name == "loss" else value / max(1.0, loss_tokens) for name, value in sums.items()}
        tokens = float((minibatch.segment_ids > 0).sum())
        metrics = means | maxima | self.optimizer.step() | {"tokens": tokens, "loss_tokens": loss_tokens}
        metrics["tokens_per_s"] = tokens / (time.perf_counter() - started)
        if (peak := self.device.memory().peak_bytes) is not None:
            metrics["peak_memory_gb"] = peak / 1e9
        return {f"train/{name}": value for name, value in metrics.items()}

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """Log-probabilities of the labels in this rank's rows (`rank_rows`), [R / ranks, L] float32 on the host; zero
        where nothing is predicted."""
        own = batch.select(rank_rows(batch, self.layout.data_rank, self.layout.data_ranks))
        logprobs = torch.cat(
            [self.policy.logprobs(rows, Distribution(self.temperature))[0].cpu() for rows in self._microbatches(own)]
        )
        self.policy.reshard()
        return logprobs

    def shards(self, dtype: torch.dtype) -> Iterator[Shard]:
        """This rank's part of the policy for weight_sync, in the engine's `dtype`."""
        return export.shards(self.policy, dtype)

    def full_tensors(self) -> dict[str, torch.Tensor]:
        """The whole policy in Hugging Face's names, float32 on the host, on rank 0; elsewhere empty."""
        return dict(export.full_tensors(self.policy, keep=self.rank == 0))

    def export_hf(self, directory: Path) -> None:
        """Write the policy as a Hugging Face directory that transformers and SGLang load."""
        tensors = self.full_tensors()
        if self.rank == 0:
            export.write_hf(directory, tensors, self.model_dir)
        dist.barrier()

    def save(self, directory: Path) -> None:
        """Write model, optimizer, schedule and random state into exactly `directory`."""
        self._checkpointer.save(directory)

    def load(self, directory: Path) -> None:
        """Restore what `save` wrote, on any number of ranks; UserError where `directory` holds no such checkpoint."""
        self._checkpointer.load(directory)

    def close(self) -> None:
        """Leave the process group."""
        process_group.leave()

    def _microbatches(self, rows: PackedBatch) -> Iterator[PackedBatch]:
        """The rows, so many at a time, on the device."""
        count = rows_per_microbatch(rows.row_tokens, self.config.microbatch_tokens)
        for start in range(0, rows.rows, count):
            part = rows.select(slice(start, start + count))
            yield PackedBatch(**{name: tensor.to(self.policy.device) for name, tensor in part.tensors().items()})

    def _token_loss(self, rows: PackedBatch, logprobs: torch.Tensor, tally: Tally) -> torch.Tensor:
        """The loss of every token, [R, L], with its statistics put into `tally`."""
        if self.loss == "supervised":
            return supervised_loss(logprobs, rows.loss_mask)
        policy = clipped_policy_loss(
            logprobs,
            rows.sampler_logprobs,
            rows.advantages,
            rows.loss_mask,
            self.algorithm.clip_low,
            self.algorithm.clip_high,
        )
        log_ratio = (logprobs.detach() - rows.sampler_logprobs) * rows.loss_mask
        tally.add(
            clip_fraction=policy.clipped,
            ratio_mean=policy.ratio,
            # The estimator k3 of http://joschu.net/blog/kl-approx.html: never negative, and of low variance.
            approx_kl=(policy.ratio - 1) * rows.loss_mask - log_ratio,
            logprob_diff_mean=log_ratio.abs(),
        )
        tally.maximum(ratio_max=policy.ratio, logprob_diff_max=log_ratio.abs())
        return policy.loss
