"""What a run leaves behind: metrics, samples, curves, timeline, summary."""

from rl_tpu.tracking.report import sweep_summary
from rl_tpu.tracking.rollout_metrics import rollout_metrics
from rl_tpu.tracking.run_directory import RunDirectory
from rl_tpu.tracking.tracker import Tracker

__all__ = ["RunDirectory", "Tracker", "rollout_metrics", "sweep_summary"]
