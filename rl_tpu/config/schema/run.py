"""A whole run."""

from __future__ import annotations

from rl_tpu.config.schema.algorithm import AlgorithmConfig
from rl_tpu.config.schema.base import Section, Seed
from rl_tpu.config.schema.cluster import ClusterConfig
from rl_tpu.config.schema.data import DataConfig, PromptSourceConfig
from rl_tpu.config.schema.environment import EnvironmentConfig
from rl_tpu.config.schema.evaluation import EvaluationConfig
from rl_tpu.config.schema.preflight import PreflightConfig
from rl_tpu.config.schema.reward import RewardConfig
from rl_tpu.config.schema.rollout import RolloutConfig
from rl_tpu.config.schema.tracking import TrackingConfig
from rl_tpu.config.schema.trainer import TrainerConfig
from rl_tpu.config.schema.weight_sync import WeightSyncConfig


class ModelConfig(Section):
    """The policy at version 0."""

    path: str
    """Hugging Face directory with config.json, safetensors weights and a tokenizer with a chat template."""
    make: str | None = None
    """A Python script that writes `path` when it does not exist yet, called as `script --out PATH`. Looked up in the
    working directory, then beside configs/."""


class RunConfig(Section):
    """A whole run."""

    name: str
    """Name of the run; its directories are grouped under it."""
    seed: Seed = 0
    """Seed of the data order, of sampling and of initialisation."""
    run_dir: str | None = None
    """Directory of the run; null makes runs/NAME/TIME."""
    resume: str = "never"
    """`never` refuses a run_dir that holds a run; `auto` continues its newest whole checkpoint, or starts; a path
    continues that checkpoint."""
    replay: str | None = None
    """A run directory, of `python -m rl_tpu.generate` or of another training run with tracking.samples: learn from the
    samples that it holds, step by step. No engine is started and nothing is evaluated."""
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
    preflight: PreflightConfig = PreflightConfig()
    """Checks before the first run."""

    @property
    def trainer_ranks(self) -> int:
        return self.cluster.trainer_chips * self.cluster.devices_per_chip

    @property
    def data_ranks(self) -> int:
        """How many ways the trainer's rows are divided: ranks that share matrices see the same ones."""
        return self.trainer_ranks // self.trainer.parallel.tensor

    @property
    def samples_per_step(self) -> int:
        return self.rollout.prompts_per_step * self.rollout.samples_per_prompt

    @property
    def max_sample_tokens(self) -> int:
        return self.data.max_prompt_tokens + self.rollout.max_response_tokens

    @property
    def prompt_sources(self) -> dict[str, PromptSourceConfig]:
        """Every single source by its place in the configuration; those of a mixture are among them."""
        train = self.data.train
        if train.kind == "mixture" and train.sources:
            sources = {f"data.train.sources.{name}": source for name, source in train.sources.items()}
        else:
            sources = {"data.train": train}
        return sources | {f"evaluation.sets.{name}.source": each.source for name, each in self.evaluation.sets.items()}
