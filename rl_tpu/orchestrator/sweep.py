"""After a Hydra sweep (`-m`): one table and one file over its runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console

from rl_tpu.tracking import sweep_summary


class SweepSummary(Callback):
    """Hydra calls this when the last run of a sweep has ended."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        directory = Path(config.hydra.sweep.dir)
        runs = sorted(path for path in directory.iterdir() if path.is_dir()) if directory.is_dir() else []
        if runs and not config.dry_run:
            Console(highlight=False).print(sweep_summary(runs, directory / "sweep_summary.json"))
