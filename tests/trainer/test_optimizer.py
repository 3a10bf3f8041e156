"""The schedule against transformers', and several whole steps against torch's optimizers on the transformers model."""

from __future__ import annotations

import pytest
import torch
from tiny_policy import make_samples, supervised_loss, tiny_qwen3, trainer_config
from torch.optim.lr_scheduler import LambdaLR
from transformers import (
    Qwen3ForCausalLM,
    get_constant_schedule_with_warmup,
    get_cosine_schedule_with_warmup,
    get_linear_schedule_with_warmup,
)

from rl_tpu.config.schema import AlgorithmConfig, OptimizerConfig
from rl_tpu.trainer.muon import direction
from rl_tpu.trainer.packing import pack
from rl_tpu.trainer.schedule import learning_rate_factor
from rl_tpu.trainer.step import PolicyTrainer

CONFIG = OptimizerConfig(
    learning_rate=3e-3,
    warmup_steps=2,
    decay="linear",
    weight_decay=0.1,
    max_grad_norm=0.05,
    beta2=0.98,
    momentum=0.9,
)


def factors(schedule: LambdaLR) -> list[float]:
    (factor,) = schedule.lr_lambdas
    return [factor(step) for step in range(4, 20)]


@pytest.mark.parametrize("decay", ["constant", "linear", "cosine"])
def test_after_the_warm_up_the_schedule_is_transformers(decay):
    make = {
        "constant": lambda optimizer: get_constant_schedule_with_warmup(optimizer, 4),
        "linear": lambda optimizer: get_linear_schedule_with_warmup(optimizer, 4, 20),
        "cosine": lambda optimizer: get_cosine_schedule_with_warmup(optimizer, 4, 20),
    }
    theirs = make[decay](torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0))
    ours = [learning_rate_factor(step, 4, 20, decay) for step in range(20)]
    assert ours[:4] == [0.25, 0.5, 0.75, 1.0]
    assert ours[4:] == pytest.approx(factors(theirs))
    assert learning_rate_factor(25, 4, 20, decay) == (1.0 if decay == "constant" else 0.0)


@pytest.mark.parametrize("decay", ["linear", "cosine"])
def test_the_schedule_may_end_above_zero(decay):
    to_zero = [learning_rate_factor(step, 4, 20, decay) for step in range(21)]
    to_a_tenth = [learning_rate_factor(step, 4, 20, decay, 0.1) for step in range(21)]
    assert to_a_tenth[:5] == to_zero[:5]
    assert to_a_tenth[5:] == pytest.approx([0.1 + 0.9 * factor for factor in to_zero[5:]])
    assert to_a_tenth[20] == 0.1


def torchs_optimizers(model: Qwen3ForCausalLM, name: str) -> list[torch.optim.Optimizer]:
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    inner = [p for p in model.model.layers.parameters() if p.ndim > 1]
    muon = []
    if name == "muon":
        muon = [torch.optim.Muon(inner, weight_decay=0.1, momentum=0.9, adjust_lr_fn="match_rms_adamw")]
        matrices = [model.model.embed_tokens.weight]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return [*muon, torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-8)]


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_several_updates_are_torchs_on_the_transformers_model(model_dir, name):
    model, batches = tiny_qwen3(True).train(), [make_samples(6, seed) for seed in range(4)]
    config = trainer_config(optimizer=CONFIG.model_copy(update={"name": name}), steps=4)
    trainer = PolicyTrainer(config, AlgorithmConfig(), model_dir, loss="supervised")
    metrics = [trainer.update(pack(samples, [64], 1, 128)) for samples in batches]
    ours = trainer.full_tensors()
    trainer.close()

    optimizers = torchs_optimizers(model, name)
    for step, samples in enumerate(batches):
        loss = supervised_loss(model, samples)
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        rate = 3e-3 * [0.5, 1.0, 1.0, 0.5][step]
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
            optimizer.step()
        model.zero_grad()
        assert metrics[step]["train/loss"] == pytest.approx(loss.item(), rel=1e-4)
        assert metrics[step]["train/grad_norm"] == pytest.approx(norm.item(), rel=1e-3)
        assert metrics[step]["train/learning_rate"] == pytest.approx(rate)
    theirs = model.state_dict()
    for name, tensor in ours.items():
        # Adam divides tiny gradients by their own size, so float noise in them moves a few weights visibly; Muon rounds
        # to bfloat16: 2e-5 is 1 % of how far they went.
        difference = (tensor - theirs[name]).abs()
        assert difference.mean() < 2e-5, name
        assert difference.max() < 2e-3, name


def test_a_stack_of_matrices_gets_a_direction_for_each():
    stack = torch.randn(3, 8, 5, generator=torch.Generator().manual_seed(0))
    for matrix, found in zip(stack, direction(stack), strict=True):
        assert torch.equal(found, direction(matrix))
        u, _, v = torch.linalg.svd(matrix, full_matrices=False)
        assert torch.linalg.svdvals(found).sub(1).abs().max() < 0.4, "near to orthogonal"
        assert (found * (u @ v)).sum() / (found.norm() * (u @ v).norm()) > 0.95
