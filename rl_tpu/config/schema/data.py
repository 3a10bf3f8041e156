"""Prompts: where they come from and which are taken."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from rl_tpu.config.schema.base import Positive, Section, Share


class PromptSourceConfig(Section):
    """Where prompts come from: files, or a generated reasoning-gym task."""

    kind: Literal["file", "reasoning_gym"]
    """`file` reads JSONL, Parquet and Hugging Face dataset directories; `reasoning_gym` generates problems."""
    path: str | list[str] | None = None
    """file: a .jsonl, .jsonl.gz, .parquet or .arrow file, a glob, a directory (a hub snapshot, or what `save_to_disk` of
    the datasets library wrote), or a list of these."""
    split: str | None = None
    """file: which split of a directory, for example train; needed where it holds several."""
    prompt_field: str = "prompt"
    """file: the field with the prompt, a string or a list of chat messages (DAPO-Math-17k has the latter)."""
    answer_field: str = "answer"
    """file: the field with the expected answer; dots go into nested fields (DAPO-Math-17k: reward_model.ground_truth)."""
    answer_pattern: str | None = None
    r"""file: which part of the answer field is the answer: `boxed` is the content of its last `\boxed{...}` (MATH), anything
    else a regular expression whose last match counts, its group if it has one (GSM8K: `####\s*(.*)`)."""
    choices_field: str | None = None
    """file: the field with the options of a multiple-choice question, a list of texts. `{choices}` in the template becomes
    lettered lines; an answer that is a position (from 0) or an option's text becomes its letter."""
    sampling_field: str | None = None
    """file: the field with what a row changes of its sampling, an object with names and values of SamplingParams. In
    training max_response_tokens (at most rollout.max_response_tokens) and stop_token_ids, in evaluation any."""
    pass_rate_field: str | None = None
    """file: a field that says how often a model solved the problem: a share from 0 to 1, or a list of scores from 0 to 1."""
    min_pass_rate: Share = 0.0
    """file: problems with a smaller share are left out."""
    max_pass_rate: Share = 1.0
    """file: problems with a larger share are left out."""
    task: str | None = None
    """reasoning_gym: the task's name, for example chain_sum."""
    task_options: dict[str, Any] = Field(default_factory=dict)
    """reasoning_gym: the task's own options, for example min_terms."""
    size: Positive | None = None
    """Problems to generate (reasoning_gym, required) or to use at most (file: the first ones; all if null)."""
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
    """How a plain prompt becomes the user's message; `{prompt}` is replaced, and `{choices}` with choices_field."""


class MixedSourceConfig(PromptSourceConfig):
    """One source of a mixture."""

    weight: Annotated[float, Field(gt=0)] = 1.0
    """Its part of the prompts drawn, relative to the weights of the other sources; how many prompts it has does not count."""


class TrainingSourceConfig(PromptSourceConfig):
    """The prompts to train on: one source, or a mixture of several."""

    kind: Literal["file", "reasoning_gym", "mixture"]
    """One source as below, or `mixture`, which draws from `sources` by their weights and needs nothing else."""
    sources: dict[str, MixedSourceConfig] = Field(default_factory=dict)
    """mixture: sources by name; every prompt knows the name of its source."""


class DataConfig(Section):
    """Prompts to train on."""

    train: TrainingSourceConfig
    """Source of the training prompts."""
    max_prompt_tokens: Positive = 1024
    """Longest accepted prompt, chat template included, in tokens."""
    too_long: Literal["skip", "fail"] = "skip"
    """What happens to a longer prompt: skipped and counted, or an error."""
    exclude_evaluation: bool = True
    """Leave out training prompts whose text, but for case and white space, is in one of the run's evaluation sets."""
    shuffle: bool = True
    """A new seeded order for every pass over the prompts."""
    epochs: Positive | None = None
    """Passes over the prompts (in a mixture: over the source that is first used up) after which the run ends, even before
    trainer.steps; null repeats them as long as there are steps."""
