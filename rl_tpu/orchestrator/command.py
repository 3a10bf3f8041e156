"""The command line of training: check it, then let Hydra run one job or a sweep of them."""

from __future__ import annotations

import sys
from pathlib import Path

import hydra
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from omegaconf import DictConfig

from rl_tpu.config.compose import ROOT_CONFIG, check_command_line, register_with_hydra, resource, validate
from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import UserError
from rl_tpu.orchestrator.job import exit_code, run_job

register_with_hydra()
_exit_codes = [0]
"""Of the runs so far; a sweep goes on after a run that failed."""


@hydra.main(version_base="1.3", config_path=str(resource("configs").resolve()), config_name=ROOT_CONFIG)
def _task(composed: DictConfig) -> None:
    code = exit_code(lambda: run_job(_configuration(composed)))
    if code > 128:
        sys.exit(code)  # interrupted: the rest of a sweep is not started either
    _exit_codes.append(code)


def _configuration(composed: DictConfig) -> RunConfig:
    """Of this run. UserError even now: values of a sweep that are right one by one may contradict each other."""
    config = validate(composed)
    hydra_config = HydraConfig.get()
    if hydra_config.mode == RunMode.MULTIRUN:
        run_dir = Path(hydra_config.sweep.dir) / hydra_config.sweep.subdir
        config = config.model_copy(update={"run_dir": str(run_dir)})
    return config


USAGE = """usage: python -m rl_tpu.train [-m] +experiment=NAME [KEY=VALUE ...]

  +experiment=NAME      one of: {experiments}
  KEY=VALUE             any setting of docs/configuration.md, checked before anything starts
  -m KEY=A,B            a sweep: one run per value
  dry_run=true          print placement, batch arithmetic and files, start nothing
  resume=auto           continue the newest whole checkpoint
  --config-dir DIR      also look for experiments and groups in DIR
  --cfg job             print the composed configuration (and Hydra's other options: --hydra-help)
"""


def train() -> None:
    """Exit codes: 0 done, 1 a part of the run failed, 2 bad input, 128 + signal when interrupted."""
    if {"-h", "--help"} & set(sys.argv[1:]):
        names = sorted(file.stem for file in resource("configs/experiment").glob("*.yaml"))
        print(USAGE.format(experiments=", ".join(names)), end="")
        return
    # Hydra's parser takes -m in front of the overrides only.
    sys.argv[1:] = sorted(sys.argv[1:], key=lambda argument: argument not in ("-m", "--multirun"))
    try:
        check_command_line(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    _task()
    sys.exit(max(_exit_codes))
