"""Prompts: where they come from and which are taken."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from rl_tpu.config.schema.base import Positive, Section, Share


class PromptSourceConfig(Section):
    """Where prompts come from: files, or a generated reasoning-gym task."""

    kind: Literal["file", "reasoning_gym"]
    """`file` reads JSONL or Parquet; `reasoning_gym` generates problems."""
    path: str | None = None
    """file: a .jsonl or .parquet file."""
    prompt_field: str = "prompt"
    """file: the field with the prompt, a string or a list of chat messages (DAPO-Math-17k has the latter)."""
    answer_field: str = "answer"
    """file: the field with the expected answer; dots go into nested fields (DAPO-Math-17k: reward_model.ground_truth)."""
    task: str | None = None
    """reasoning_gym: the task's name, for example chain_sum."""
    task_options: dict[str, Any] = Field(default_factory=dict)
    """reasoning_gym: the task's own options, for example min_terms."""
    size: Positive | None = None
    """Problems to generate (reasoning_gym, required) or rows to use at most (file; all if null)."""
    seed: int = 0
    """reasoning_gym: seed of the generator."""
    part: Literal["all", "train", "held_out"] = "all"
    """Which side of the split by `held_out_share`: a problem's side follows from a hash of its text alone, so a problem on
    one side never occurs on the other, whatever the seed."""
    held_out_share: Share = 0.2
    """Share of all problems that belong to the part `held_out`."""
    system_prompt: str | None = None
    """Put before prompts that are plain strings."""
    template: str = "{prompt}"
    """How a plain prompt becomes the user's message; `{prompt}` is replaced."""


class DataConfig(Section):
    """Prompts to train on."""

    train: PromptSourceConfig
    """Source of the training prompts."""
    max_prompt_tokens: Positive = 1024
    """Longest accepted prompt, chat template included, in tokens."""
    too_long: Literal["skip", "fail"] = "skip"
    """What happens to a longer prompt: skipped and counted, or an error."""
    shuffle: bool = True
    """A new seeded order for every pass over the prompts."""
