"""Environments of the package `verifiers`: its tasks, programs and rewards, with the policy behind its API.

Written for verifiers 0.4 (`verifiers.v1`), which rl_tpu does not bring along. The prompts of a run are rows that name a
task by its place in the taskset; this writes them:

    python -m rl_tpu.environments.agent.verifiers_tasks '{taskset: {id: my_tasks}}' --out my_tasks.jsonl
"""

from __future__ import annotations

import argparse
import importlib
import json
import sys
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack
from itertools import islice
from pathlib import Path
from statistics import fmean
from typing import Any

import yaml

from rl_tpu.environments.agent.base import AgentEnvironment
from rl_tpu.environments.agent.responses import MODEL
from rl_tpu.errors import RunError, UserError
from rl_tpu.registry import describe
from rl_tpu.types import Prompt

TASK_FIELD = "task"
"""Of a row: the place of its task in the taskset, from 0."""


class VerifiersTasks(AgentEnvironment):
    """``env`` is what verifiers calls an environment's configuration: a taskset, and who works on it and where, for example
    ``{taskset: {id: my_tasks}, agent: {harness: {id: "null"}, runtime: {type: subprocess}}}``.

    A sample is an episode. Its reward is the mean of the rewards of its trainable traces; their metrics and named rewards
    become measures. An episode that is not ok has failed. The other options are those of `AgentEnvironment`.
    """

    def __init__(
        self,
        tokenizer: Any,
        env: dict[str, Any],
        **common: Any,
    ) -> None:
        super().__init__(tokenizer, **common)
        self._vf = _package()
        self._env = _load(env)
        self._unread = iter(self._env.taskset)
        self._tasks: list[Any] = []
        self._stack = AsyncExitStack()

    async def open(self) -> None:
        await super().open()
        await self._stack.enter_async_context(self._env.serving())

    async def close(self) -> None:
        try:
            await self._stack.aclose()
        finally:
            await super().close()

    async def play(self, prompt: Prompt, base_url: str, api_key: str) -> dict[str, float]:
        # One configuration for all, because verifiers keeps a client for each. It tells us the trace that a request belongs
        # to. The key is a variable that is not set: nobody's key belongs here.
        client = self._vf.EvalClientConfig(base_url=self.endpoint.url, api_key_var="RL_TPU_NO_KEY")
        episode = await self._env.run_episode(
            self._task(prompt),
            self._vf.ModelContext(MODEL, client),
            on_trace=lambda trace: self.endpoint.name(base_url, trace.id),
        )
        if not episode.ok:
            errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
            raise RuntimeError(
                "; ".join(f"{error.type}: {error.message}" for error in errors) or "the episode is not ok"
            )
        return _outcome([trace for trace in episode.traces if trace.agent.trainable])

    def _task(self, prompt: Prompt) -> Any:
        """Raises RunError where the prompt's row names no task of the taskset."""
        place = prompt.metadata.get(TASK_FIELD)
        if isinstance(place, int) and place >= 0:
            self._tasks += islice(self._unread, max(0, place + 1 - len(self._tasks)))
            if place < len(self._tasks):
                return self._tasks[place]
        raise RunError(
            f"prompt {prompt.id!r}: its field {TASK_FIELD!r} is {place!r}, which is no place in the taskset; write the"
            " prompts with python -m rl_tpu.environments.agent.verifiers_tasks"
        )


def rows(env: Any) -> Iterator[dict[str, Any]]:
    """A row of prompts per task: what the task asks, its answer if it has one, and its place."""
    for place, task in enumerate(env.taskset):
        data = task.data
        system = [{"role": "system", "content": data.system_prompt}] if data.system_prompt else []
        asked = data.prompt_text or data.name or f"task {place}"
        yield {
            "messages": [*system, {"role": "user", "content": asked}],
            "answer": str(getattr(data, "answer", "")),
            TASK_FIELD: place,
        }


def _package() -> Any:
    try:
        return importlib.import_module("verifiers.v1")
    except ImportError as error:
        raise UserError(
            f"environment 'verifiers' needs the package verifiers, 0.4 or what is compatible with it ({describe(error)}):"
            " install it beside rl_tpu as docs/environments.md says"
        ) from None


def _load(config: Mapping[str, Any]) -> Any:
    loaders = importlib.import_module("verifiers.v1.utils.loaders")
    try:
        return loaders.load_environment(loaders.resolve_env_config(dict(config)))
    except Exception as error:  # unknown tasksets, wrong fields, whatever a taskset raises while it is made
        raise UserError(
            f"verifiers cannot make the environment of environment.options.env: {describe(error)}"
        ) from error


def _outcome(traces: list[Any]) -> dict[str, float]:
    values: dict[str, list[float]] = {"reward": [trace.reward for trace in traces] or [0.0]}
    for trace in traces:
        named = {name: reward.value for name, reward in trace.rewards.items() if reward is not None}
        for name, value in {**trace.metrics, **named}.items():
            if name != "reward" and isinstance(value, int | float):
                values.setdefault(name, []).append(float(value))
    return {name: fmean(each) for name, each in values.items()}


def main() -> int:
    parser = argparse.ArgumentParser(description="Write the prompts of a verifiers environment as JSON lines.")
    parser.add_argument("env", help="the environment's configuration, as environment.options.env has it")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    parser.add_argument("--count", type=int, help="of tasks, the first ones; needed where there is no end to them")
    arguments = parser.parse_args()
    try:
        _package()
        env = _load(yaml.safe_load(arguments.env))
        if not env.taskset.bounded and arguments.count is None:
            raise UserError("there is no end to these tasks: say --count")
        with arguments.out.open("w") as out:
            for row in islice(rows(env), arguments.count):
                out.write(json.dumps(row) + "\n")
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
