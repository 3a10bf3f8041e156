"""Every setting of a run: type, range, default and meaning. `configs/` fills these classes; nothing else is accepted.

Units stand in the field's name or docstring. The docstring under a field is its help text, the text of its error and its
line in docs/configuration.md.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Positive = Annotated[int, Field(ge=1)]
Count = Annotated[int, Field(ge=0)]
Seconds = Annotated[float, Field(gt=0)]
Share = Annotated[float, Field(ge=0, le=1)]
NonNegative = Annotated[float, Field(ge=0)]


class Section(BaseModel):
    """A strict, immutable part of the configuration: unknown keys are errors."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, use_attribute_docstrings=True, protected_namespaces=(), allow_inf_nan=False
    )


class ModelConfig(Section):
    """The policy at version 0."""

    path: str
    """Hugging Face directory with config.json, safetensors weights and a tokenizer with a chat template."""
    make: str | None = None
    """A Python script that writes `path` when it does not exist yet, called as `script --out PATH`. Looked up in the
    working directory, then beside configs/."""


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


class EnvironmentConfig(Section):
    """How a prompt becomes a sample."""

    name: str = "single_turn"
    """A registered name, or an import path `package.module:Class`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the environment."""


class RewardConfig(Section):
    """How a sample is scored."""

    name: str
    """A registered name (math, reasoning_gym), or an import path `package.module:function`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the reward function."""
    workers: Positive = 1
    """Worker processes."""
    timeout_s: Seconds = 10.0
    """Deadline of one sample's reward; past it the worker is replaced and the sample scores `failure_reward`."""
    failure_reward: float = 0.0
    """Reward of a sample whose grading timed out or crashed."""
    on_error: Literal["fail", "score"] = "fail"
    """A reward function that raises: end the run with the message (`fail`), or count it and give `failure_reward`."""


class AlgorithmConfig(Section):
    """From rewards to a loss."""

    advantage: Literal["group_std", "group_mean"] = "group_std"
    """`group_std`: (reward - group mean) / (group standard deviation + 1e-6), GRPO; `group_mean`: without the division."""
    clip_low: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """Ratio is clipped below at 1 - clip_low."""
    clip_high: Annotated[float, Field(gt=0)] = 0.2
    """Ratio is clipped above at 1 + clip_high; larger than clip_low is DAPO's clip-higher."""
    aggregation: Literal["token_mean", "sample_mean"] = "token_mean"
    """Mean over all tokens of the minibatch (DAPO), or over each sample first (GRPO as published)."""
    drop_uniform_groups: bool = False
    """Dynamic sampling: groups whose rewards are all equal teach nothing; drop them and generate others."""
    max_generation_batches: Positive = 10
    """With drop_uniform_groups: prompts drawn for one step are at most this many times prompts_per_step; then the step
    goes on with what it has."""
    overlong_buffer_tokens: Count = 0
    """Soft overlong penalty (DAPO): over the last so many tokens before max_response_tokens the reward falls linearly."""
    overlong_penalty: NonNegative = 1.0
    """Largest soft overlong penalty, subtracted at full length."""
    minibatches: Positive = 1
    """Optimizer steps per rollout step: the batch is cut into so many parts of equal sample count."""


class RolloutConfig(Section):
    """Writing answers: the engines and how they sample."""

    prompts_per_step: Positive
    """Prompts (groups) in one step's batch."""
    samples_per_prompt: Annotated[int, Field(ge=2)]
    """Answers per prompt, compared with each other."""
    max_response_tokens: Positive
    """Longest answer, in tokens."""
    temperature: Annotated[float, Field(gt=0)] = 1.0
    """Sampling temperature."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling; below 1 the trainer's and the engine's distributions differ."""
    top_k: Annotated[int, Field(ge=-1)] = -1
    """Sample among the k likeliest tokens; -1 for all."""
    max_staleness: Count = 0
    """How many policy versions a batch may lag behind the policy that trains on it. 0: generate, then train; 1: one step
    off; k: asynchronous with a bound."""
    engines: Positive = 1
    """SGLang servers."""
    tensor_parallel: Positive = 1
    """Devices per engine."""
    context_tokens: Positive = 4096
    """Longest prompt plus answer an engine accepts."""
    max_running_requests: Positive = 256
    """Samples an engine decodes at the same time."""
    kv_cache_tokens: Positive | None = None
    """Tokens the key-value cache holds; null lets the engine fill its memory."""
    dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the engine's weights."""
    threads_per_engine: Positive = 1
    """CPU threads of one engine process (on a CPU, more is slower for small models)."""
    start_timeout_s: Seconds = 300.0
    """Deadline for an engine to answer its health check."""
    request_timeout_s: Seconds = 600.0
    """Deadline of one generation request."""
    server_options: dict[str, Any] = Field(default_factory=dict)
    """Further SGLang server arguments, by their names with underscores."""


class OptimizerConfig(Section):
    """AdamW and its schedule."""

    learning_rate: Annotated[float, Field(gt=0)] = 1e-6
    """Peak learning rate."""
    beta1: Share = 0.9
    """Decay of the first moment."""
    beta2: Share = 0.95
    """Decay of the second moment."""
    epsilon: Annotated[float, Field(gt=0)] = 1e-8
    """Added to the root of the second moment."""
    weight_decay: NonNegative = 0.0
    """Decoupled weight decay."""
    warmup_steps: Count = 0
    """Optimizer steps of linear warm-up."""
    decay: Literal["constant", "linear", "cosine"] = "constant"
    """Shape after warm-up; linear and cosine end at zero with the last step."""
    max_grad_norm: Annotated[float, Field(gt=0)] = 1.0
    """Global gradient norm is clipped to this."""


class CheckpointConfig(Section):
    """Saving the run."""

    every_steps: Count = 0
    """Steps between checkpoints; 0 saves only at the end and when the run is interrupted."""
    keep: Annotated[int, Field(ge=1)] = 2
    """Newest checkpoints kept."""
    export_final: bool = True
    """Write the final policy as a Hugging Face directory."""


class TrainerConfig(Section):
    """Learning: TorchTitan ranks."""

    steps: Positive
    """Rollout steps of the run."""
    row_tokens: list[Positive] = Field(default=[2048], min_length=1)
    """Allowed lengths of packed rows, ascending; each is one compiled program on an XLA device."""
    rows_per_microbatch: Positive = 1
    """Packed rows in one forward and backward per rank."""
    param_dtype: Literal["float32", "bfloat16"] = "bfloat16"
    """Type of the forward and backward; master weights, gradients' reductions and optimizer stay float32."""
    optimizer: OptimizerConfig = OptimizerConfig()
    """Optimizer and schedule."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Saving."""
    threads_per_rank: Positive = 1
    """CPU threads of one rank."""
    start_timeout_s: Seconds = 600.0
    """Deadline for all ranks to build the model."""
    step_timeout_s: Seconds = 3600.0
    """Deadline of one call to the ranks (a step, a save)."""


class WeightSyncConfig(Section):
    """Carrying every new policy to the engines."""

    transport: str = "shared_memory"
    """Registered name of a transport, or an import path `package.module:ATTRIBUTE`."""
    options: dict[str, Any] = Field(default_factory=dict)
    """Keyword arguments of the transport's sender. In strings {run_dir} and {model_dir} stand for the run's directories."""
    delivery: Literal["staged", "broadcast"] = "staged"
    """How engines take a policy. Each fetches and verifies it while it generates and pauses only to load it (`staged`), or
    all stand still together while one copy is sent to all of them through SGLang's own endpoints (`broadcast`, with
    transport ici only): for many engines behind a narrow network, or where engines must not open connections of their
    own."""
    pause_mode: Literal["in_place", "retract", "abort"] = "retract"
    """What a new policy does to samples in flight: they go on with the key-value cache they have (`in_place`), go on with
    one computed anew (`retract`), or are dropped and written again from the start (`abort`)."""
    reload_attempts: Count = 1
    """How often, within one sync, engines that did not take a policy are sent the whole of it again."""
    verify: bool = True
    """Engines check xxh3-128 of every tensor before they load it."""
    check_engine_weights: bool = False
    """After every sync compare the engines' own checksums of their live weights with the trainer's (small models)."""
    timeout_s: Seconds = 300.0
    """Deadline of each part of a sync: publishing, staging on the engines, loading."""


class ClusterConfig(Section):
    """The machine: chips per host and who gets them. On a CPU a chip is a share of the cores."""

    device: str
    """Kind of accelerator, by its name in rl_tpu/devices: cpu (the same parts, smaller), cuda or tpu."""
    generation: str = ""
    """Chip generation, for example v7x."""
    hosts: Positive = 1
    """Hosts."""
    chips_per_host: Positive
    """Chips (CPU: shares) in one host."""
    devices_per_chip: Positive = 1
    """Devices torch sees in one chip: 2 on v7x, else 1. One process per device."""
    trainer_chips: Positive
    """Chips for the trainer ranks."""
    rollout_chips: Positive
    """Chips for the engines."""
    cpus_per_chip: Annotated[float, Field(gt=0)] = 1.0
    """CPU cores that Ray reserves with each chip."""
    address: str | None = None
    """Ray cluster to join (`auto` for a running one); null joins RAY_ADDRESS if set, else starts Ray on this machine."""
    start_timeout_s: Seconds = 120.0
    """Deadline for Ray to reserve the chips."""


class EvalSetConfig(Section):
    """One evaluation set and how it is sampled."""

    source: PromptSourceConfig
    """Its prompts."""
    samples_per_prompt: Positive = 1
    """Answers per prompt; pass@k is reported for k = 1, 2, 4, ... up to this."""
    temperature: NonNegative = 1.0
    """Sampling temperature; 0 is greedy."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling."""
    max_response_tokens: Positive | None = None
    """Longest answer; null takes rollout.max_response_tokens."""


class EvaluationConfig(Section):
    """Evaluation on held-out prompts. It always runs before the first step and after the last one."""

    every_steps: Count = 0
    """Steps between evaluations; 0 evaluates only before and after."""
    sets: dict[str, EvalSetConfig] = Field(default_factory=dict)
    """Evaluation sets by name."""


class WandbConfig(Section):
    """Weights & Biases."""

    mode: Literal["disabled", "offline", "online"] = "disabled"
    """offline writes to the run directory and needs no account; online uses WANDB_API_KEY and the other usual variables."""
    project: str = "rl_tpu"
    """Project name."""


class TrackingConfig(Section):
    """What a run leaves behind besides metrics.jsonl, summary.json and the curves, which are always written."""

    wandb: WandbConfig = WandbConfig()
    """Weights & Biases."""
    tensorboard: bool = True
    """Write TensorBoard event files."""
    samples: bool = True
    """Dump every sample of every step: prompt, response, ids, rewards, versions."""
    plot_metrics: list[str] = Field(default_factory=list)
    """Further metrics to draw besides the standard curves."""


class RunConfig(Section):
    """A whole run."""

    name: str
    """Name of the run; its directories are grouped under it."""
    seed: Annotated[int, Field(ge=0)] = 0
    """Seed of the data order, of sampling and of initialisation."""
    run_dir: str | None = None
    """Directory of the run; null makes runs/NAME/TIME."""
    resume: str = "never"
    """`never` refuses a run_dir that holds a run; `auto` continues its newest whole checkpoint, or starts; a path
    continues that checkpoint."""
    dry_run: bool = False
    """Resolve and check everything, print placement and batch arithmetic, start nothing."""
    model: ModelConfig
    """The policy."""
    data: DataConfig
    """Training prompts."""
    environment: EnvironmentConfig = EnvironmentConfig()
    """From prompt to sample."""
    reward: RewardConfig
    """Scoring."""
    algorithm: AlgorithmConfig = AlgorithmConfig()
    """Loss."""
    rollout: RolloutConfig
    """Engines and sampling."""
    trainer: TrainerConfig
    """Learning."""
    weight_sync: WeightSyncConfig = WeightSyncConfig()
    """New policies to the engines."""
    cluster: ClusterConfig
    """The machine."""
    evaluation: EvaluationConfig = EvaluationConfig()
    """Held-out prompts."""
    tracking: TrackingConfig = TrackingConfig()
    """Metrics and dumps."""

    @property
    def trainer_ranks(self) -> int:
        return self.cluster.trainer_chips * self.cluster.devices_per_chip

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def max_sample_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens
