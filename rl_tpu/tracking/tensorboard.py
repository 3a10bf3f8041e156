"""Metrics as TensorBoard event files."""

from __future__ import annotations

from pathlib import Path

from rl_tpu.tracking.sink import Metrics, Sink, evaluation_metrics


class TensorBoardSink(Sink):
    """Scalars under the metrics' own names. A resumed run hides the steps it repeats."""

    name = "TensorBoard"

    def __init__(self, folder: Path, start_step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter  # a second of imports

        self._writer = SummaryWriter(str(folder), purge_step=start_step)

    def log(self, step: int, metrics: Metrics) -> None:
        for name, value in metrics.items():
            self._writer.add_scalar(name, value, step)
        self._writer.flush()

    def evaluation(self, step: int, version: int, results: dict[str, Metrics]) -> None:
        self.log(step, evaluation_metrics(results))

    def close(self) -> None:
        self._writer.close()
