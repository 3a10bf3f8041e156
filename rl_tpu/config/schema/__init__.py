"""Every setting of a run: type, range, default and meaning. `configs/` fills these classes; nothing else is accepted.

One file for each group of `configs/`. Units stand in the field's name or docstring. The docstring under a field is its
help text, the text of its error and its line in docs/configuration.md.
"""

from rl_tpu.config.schema.algorithm import AlgorithmConfig, CorrectionConfig, KLConfig
from rl_tpu.config.schema.cluster import ClusterConfig
from rl_tpu.config.schema.data import DataConfig, MixedSourceConfig, PromptSourceConfig, TrainingSourceConfig
from rl_tpu.config.schema.environment import EnvironmentConfig
from rl_tpu.config.schema.evaluation import EvalSetConfig, EvaluationConfig
from rl_tpu.config.schema.preflight import PreflightConfig
from rl_tpu.config.schema.reward import RewardConfig
from rl_tpu.config.schema.rollout import RolloutConfig
from rl_tpu.config.schema.run import ModelConfig, RunConfig
from rl_tpu.config.schema.tracking import TrackingConfig, WandbConfig
from rl_tpu.config.schema.trainer import (
    CheckpointConfig,
    ExecutionConfig,
    KernelConfig,
    OptimizerConfig,
    ParallelConfig,
    TrainerConfig,
)
from rl_tpu.config.schema.weight_sync import WeightSyncConfig

__all__ = [
    "AlgorithmConfig",
    "CheckpointConfig",
    "ClusterConfig",
    "CorrectionConfig",
    "DataConfig",
    "EnvironmentConfig",
    "EvalSetConfig",
    "EvaluationConfig",
    "ExecutionConfig",
    "KLConfig",
    "KernelConfig",
    "MixedSourceConfig",
    "ModelConfig",
    "OptimizerConfig",
    "ParallelConfig",
    "PreflightConfig",
    "PromptSourceConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "TrackingConfig",
    "TrainerConfig",
    "TrainingSourceConfig",
    "WandbConfig",
    "WeightSyncConfig",
]
