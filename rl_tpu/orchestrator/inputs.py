"""Everything a run reads, found and checked before anything starts: model directory, tokenizer, prompts."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from rl_tpu.algorithms.objectives import find_objective
from rl_tpu.config.compose import find_file
from rl_tpu.config.schema import ModelConfig, RunConfig, WeightSyncConfig
from rl_tpu.data import PromptSet, check_source, files_exist, load_prompts, load_tokenizer, load_training_prompts
from rl_tpu.data.sampling import check_training_sampling
from rl_tpu.devices import get_device
from rl_tpu.environments import Environment, find_environment, make_environment
from rl_tpu.errors import RunError, UserError
from rl_tpu.orchestrator.evaluation import EvalSet
from rl_tpu.registry import check_types, one_line
from rl_tpu.rewards import make_plan
from rl_tpu.types import Prompt
from weight_sync import WeightSyncError
from weight_sync.transport import find_transport

SENDER_ARGUMENTS = {"run_id", "rank", "world_size", "group", "hashes"}
"""What every sender is opened with; not the user's."""


@dataclass
class Inputs:
    """What a run reads."""

    model_dir: Path
    tokenizer: PreTrainedTokenizerBase
    environment: Environment
    """Made, not yet open."""
    train: dict[str, PromptSet]
    """By the name of the source in a mixture; the name of a lone source is empty."""
    eval_sets: list[EvalSet]
    found: dict[str, PromptSet]
    """What was read from each source, by its place in the configuration."""

    @property
    def train_prompts(self) -> list[Prompt]:
        return [prompt for found in self.train.values() for prompt in found.prompts]


def read_inputs(config: RunConfig, *, training: bool = True) -> Inputs:
    """Find the model (making it if the configuration says how) and load every prompt.

    Raises:
        UserError: a file is missing or unreadable, a row is broken, a model directory is incomplete.
        RunError: the script that makes the model failed.
    """
    model_dir = _model_directory(config.model)
    tokenizer = load_tokenizer(model_dir)
    _check_context(config, model_dir)
    environment = make_environment(config.environment, tokenizer)
    options = environment.template_options
    data = config.data
    rendering = {"max_prompt_tokens": data.max_prompt_tokens, "too_long": data.too_long, "template_options": options}
    sets = {
        name: load_prompts(each.source, tokenizer, name=name, **rendering)
        for name, each in config.evaluation.sets.items()
    }
    train = load_training_prompts(data, tokenizer, sets, options) if training else {}
    for chosen in train.values():
        check_training_sampling(chosen.prompts, config.rollout.max_response_tokens)
    available = sum(map(len, train.values())) * (data.epochs or 0)
    if training and data.epochs and available < config.rollout.prompts_per_step:
        raise UserError(
            f"data.epochs {data.epochs} over {available // data.epochs} prompts give {available}, fewer than the"
            f" rollout.prompts_per_step {config.rollout.prompts_per_step} of one step"
        )
    found = {f"data.train.sources.{name}" if name else "data.train": chosen for name, chosen in train.items()}
    found |= {f"evaluation.sets.{name}.source": chosen for name, chosen in sets.items()}
    eval_sets = [EvalSet(name, config.evaluation.sets[name], chosen.prompts) for name, chosen in sets.items()]
    return Inputs(model_dir, tokenizer, environment, train, eval_sets, found)


def check_names(config: RunConfig) -> None:
    """Devices, rewards, environments, objectives, tasks and transports must exist and take their options. Reads no file,
    loads no model.

    Raises:
        UserError: one does not; the known names are listed.
    """
    get_device(config.cluster.device).check_eager(config.trainer.execution.eager)
    make_plan(config.reward)
    find_environment(config.environment)
    find_objective(config.algorithm.objective)
    for source in config.prompt_sources.values():
        check_source(source)
    check_transport(config.weight_sync)


def check_transport(sync: WeightSyncConfig) -> None:
    """The transport must exist, and its sender take the options. Raises UserError."""
    try:
        opens = find_transport(sync.transport).open_sender
    except WeightSyncError as error:
        raise UserError(f"weight_sync.transport: {error}") from None
    parameters = inspect.signature(opens).parameters
    known = {name: parameter for name, parameter in parameters.items() if name not in SENDER_ARGUMENTS}
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in known.values()):
        return
    for name in sync.options:
        if name not in known:
            raise UserError(
                f"weight_sync.options.{name} is no option of transport {sync.transport}; it takes {', '.join(known)}"
            )
    for name, parameter in known.items():
        if parameter.default is parameter.empty and name not in sync.options:
            raise UserError(f"weight_sync.options.{name} is required by transport {sync.transport}")
    check_types("weight_sync.transport", sync.transport, opens, sync.options)


def fill_options(config: RunConfig, **directories: Path) -> RunConfig:
    """The configuration with the names of ``directories`` in braces, in the transport's options, replaced by paths."""

    def fill(value: Any) -> Any:
        if isinstance(value, dict):
            return {name: fill(item) for name, item in value.items()}
        if isinstance(value, str):
            for name, path in directories.items():
                value = value.replace(f"{{{name}}}", str(path))
        return value

    sync = config.weight_sync.model_copy(update={"options": fill(config.weight_sync.options)})
    return config.model_copy(update={"weight_sync": sync})


def missing_files(config: RunConfig) -> list[str]:
    """Files the configuration names that are not on this machine (for a dry run), as `what: path`."""
    files = {} if config.model.make else {"model": config.model.path}
    missing = [f"{what}: {path}" for what, path in files.items() if not find_file(path).exists()]
    sources = {where: source for where, source in config.prompt_sources.items() if source.kind == "file"}
    return missing + [f"{where}: {source.path}" for where, source in sources.items() if not files_exist(source)]


def _model_directory(model: ModelConfig) -> Path:
    path = Path(model.path).expanduser().resolve()
    if path.exists() or model.make is None:
        return path
    script = find_file(model.make)
    if not script.is_file():
        raise UserError(f"model.make={model.make!r} is no file in the working directory nor in the package")
    path.parent.mkdir(parents=True, exist_ok=True)
    done = subprocess.run([sys.executable, str(script), "--out", str(path)], check=False)
    if done.returncode != 0 or not path.exists():
        raise RunError(f"{model.make} --out {path} ended with exit code {done.returncode}; its output is above")
    return path


def _check_context(config: RunConfig, model_dir: Path) -> None:
    path = model_dir / "config.json"
    try:
        limit = json.loads(path.read_text()).get("max_position_embeddings")
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"model.path: {path} cannot be read: {one_line(error)}") from None
    if limit is not None and config.rollout.context_tokens > limit:
        raise UserError(
            f"rollout.context_tokens {config.rollout.context_tokens} exceed the model's max_position_embeddings {limit}"
            f" ({path})"
        )
