"""One trainer rank: log-probabilities, losses and updates on packed rows. No Ray; all ranks call everything together."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as dist

from rl_tpu.algorithms.losses import clipped_policy_loss, supervised_loss, token_weights
from rl_tpu.config.schema import AlgorithmConfig, TrainerConfig
from rl_tpu.devices import get_device, prepare_torchtitan
from rl_tpu.trainer import process_group
from rl_tpu.trainer.packing import rank_rows
from rl_tpu.trainer.tally import Tally
from rl_tpu.types import PackedBatch


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
    ):
        self.config, self.algorithm, self.temperature, self.loss = config, algorithm, temperature, loss
        self.device = get_device(device)
        torch.set_num_threads(config.threads_per_rank)
        torch.manual_seed(seed)
        prepare_torchtitan(self.device)
        process_group.join(self.device, config.step_timeout_s)
        self.rank, self.ranks = dist.get_rank(), dist.get_world_size()

        # These import torchtitan, which has to know its device first.
        from rl_tpu.trainer.checkpoint import load_hf
        from rl_tpu.trainer.model import build_policy
        from rl_tpu.trainer.optimizer import build_optimizer

        self.policy = build_policy(
            Path(model_dir),
            self.device,
            local_rank=int(os.environ.get("LOCAL_RANK", "0")),
            max_tokens=max(config.row_tokens),
            param_dtype=config.param_dtype,
        )
        load_hf(self.policy, Path(model_dir))
        self.optimizer, self.schedule = build_optimizer(
            self.policy.model, config.optimizer, self.device, config.steps * algorithm.minibatches
        )

    def update(self, minibatch: PackedBatch) -> dict[str, float]:
        """One optimizer step on `minibatch` (the rows of all ranks, packed for so many); metrics over all ranks.

        The loss is a weighted sum over the whole minibatch whose weights are known before the first micro-batch, so the
        gradient does not depend on how rows are cut into ranks and micro-batches. An update whose gradient norm is not
        finite leaves weights and optimizer as they are and counts in `train/skipped_updates`. `train/logprob_diff_*` is
        the distance from the engine's log-probabilities: the engine's deviation as long as the weights are still those
        that wrote the batch.
        """
        started = time.perf_counter()
        weights = token_weights(minibatch.loss_mask, minibatch.segment_ids, self.algorithm.aggregation)
        own = rank_rows(minibatch, self.rank, self.ranks)
        tally = Tally()
        for rows, row_weights in zip(
            self._microbatches(minibatch.select(own)),
            weights[own].to(self.policy.device).split(self.config.rows_per_microbatch),
            strict=True,
        ):
            logprobs, entropy = self._forward(rows)
            loss = (self._token_loss(rows, logprobs, tally) * row_weights).sum()
            loss.backward()
            tally.add(loss=loss, entropy=entropy * rows.loss_mask, loss_tokens=rows.loss_mask)
        sums, maxima = tally.reduce()
        loss_tokens = max(1.0, sums.pop("loss_tokens"))
        means = {name: value if name == "loss" else value / loss_tokens for name, value in sums.items()}
        tokens = float((minibatch.segment_ids > 0).sum())
        metrics = means | maxima | self._step() | {"tokens": tokens, "loss_tokens": loss_tokens}
        metrics["tokens_per_s"] = tokens / (time.perf_counter() - started)
        return {f"train/{name}": value for name, value in metrics.items()}

    @torch.no_grad()
    def logprobs(self, batch: PackedBatch) -> torch.Tensor:
        """Log-probabilities of the labels in this rank's rows (`rank_rows`), [R / ranks, L] float32 on the host; zero
        where nothing is predicted."""
        own = batch.select(rank_rows(batch, self.rank, self.ranks))
        logprobs = torch.cat([self._forward(rows)[0].cpu() for rows in self._microbatches(own)])
        self.policy.reshard()
        return logprobs

    def close(self) -> None:
        """Leave the process group."""
        process_group.leave()

    def _microbatches(self, rows: PackedBatch) -> Iterator[PackedBatch]:
        """The rows, so many at a time, on the device."""
        for start in range(0, rows.rows, self.config.rows_per_microbatch):
            part = rows.select(slice(start, start + self.config.rows_per_microbatch))
            yield PackedBatch(**{name: tensor.to(self.policy.device) for name, tensor in part.tensors().items()})

    def _forward(self, rows: PackedBatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Log-probability of every label and entropy of every prediction, both [R, L] float32; the latter without a
        gradient."""
        from torchtitan.components.loss import compute_logprobs

        from rl_tpu.trainer.attention import document_mask

        logits = self.policy.model(
            rows.input_ids, positions=rows.positions, attention_masks=document_mask(rows.segment_ids)
        )
        return compute_logprobs(logits.float() / self.temperature, rows.labels, return_entropy=True)

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

    def _step(self) -> dict[str, float]:
        """Clip the gradient, step the optimizer unless the gradient is not finite, and step the schedule."""
        from torchtitan.distributed.utils import clip_grad_norm_

        norm = float(
            clip_grad_norm_(self.policy.model.parameters(), self.config.optimizer.max_grad_norm, foreach=False)
        )
        learning_rate = self.schedule.schedulers[0].get_last_lr()[0]
        if math.isfinite(norm):
            self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step()
        return {
            "grad_norm": norm,
            "learning_rate": learning_rate,
            "skipped_updates": float(not math.isfinite(norm)),
        }
