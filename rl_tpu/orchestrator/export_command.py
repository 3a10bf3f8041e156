"""The command line of export: a checkpoint of any run, in one process on this host's CPU, without starting anything."""

from __future__ import annotations

import sys
from pathlib import Path

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from rl_tpu.errors import UserError
from rl_tpu.orchestrator.job import exit_code
from rl_tpu.registry import one_line
from rl_tpu.tracking import RunDirectory
from rl_tpu.trainer.export import export_checkpoint

USAGE = "usage: python -m rl_tpu.export checkpoint=RUN_DIR/checkpoints/step-NNNNNN out=DIR [model=DIR]"


def main() -> None:
    """Exit codes as in training."""
    sys.exit(exit_code(lambda: export(sys.argv[1:])))


def export(arguments: list[str]) -> None:
    """Write the policy of `checkpoint` to `out`, with the configuration and tokenizer of `model` (default: the model that
    the checkpoint's run started from)."""
    paths = {}
    for argument in arguments:
        name, equals, value = argument.partition("=")
        if not equals or name not in ("checkpoint", "out", "model"):
            raise UserError(f"command line: {argument!r}; {USAGE}")
        paths[name] = Path(value).expanduser().resolve()
    if not {"checkpoint", "out"} <= paths.keys():
        raise UserError(USAGE)
    checkpoint, out = paths["checkpoint"], paths["out"]
    for part in ("state.json", "trainer/.metadata"):
        if not (checkpoint / part).is_file():
            raise UserError(f"checkpoint={checkpoint} is no checkpoint directory (it has no {part})")
    if out.exists():
        raise UserError(f"out={out} exists already: choose another directory or remove it")
    export_checkpoint(checkpoint / "trainer", paths.get("model") or model_of_run(checkpoint.parents[1]), out)
    print(f"written to {out}")


def model_of_run(run_dir: Path) -> Path:
    """The model that a run started from."""
    path = RunDirectory(run_dir).config
    if not path.is_file():
        raise UserError(f"{path} is missing: say with model=DIR which model the run started from")
    try:
        return Path(OmegaConf.load(path).model.path).expanduser().resolve()
    except (OSError, ValueError, YAMLError, OmegaConfBaseException, AttributeError) as error:
        raise UserError(f"{path} does not name the run's model ({one_line(error)}): say it with model=DIR") from None
