"""Several engines as one: requests go to the least busy, a new policy goes to all, and a broken one is left out."""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import RunError
from rl_tpu.rollout.checksums import differing, expected_checksums
from rl_tpu.rollout.engine import Engine, EngineLostError, WeightUpdate
from rl_tpu.rollout.sglang import SGLangEngine
from rl_tpu.types import Completion, SamplingParams

log = logging.getLogger(__name__)


class Fleet:
    """Create with `start`, or from any engines. ``lost`` says by name which engines get no requests, and why."""

    def __init__(self, engines: Sequence[Engine], config: RunConfig):
        self.engines = list(engines)
        self.lost: dict[str, str] = {}
        self._seed = config.seed
        self._version = 0
        self._requests = 0
        """Requests since the last update."""
        self._load = dict.fromkeys((engine.name for engine in engines), 0)
        """Tokens asked of each engine and not yet answered."""

    @classmethod
    async def start(
        cls,
        config: RunConfig,
        model_dir: Path,
        run_dir: Path,
        actor_options: Sequence[Mapping[str, Any]],
        chips: Sequence[Sequence[int]] = (),
    ) -> Fleet:
        """Start all engines at once.

        ``actor_options`` are Ray's options of each engine's actor; ``chips`` each engine's chips on its host, where Ray
        does not choose them. Logs go to run_dir/logs.

        Raises UserError or RunError of the first engine that did not start; then none is left running.
        """
        tasks = [
            asyncio.create_task(
                SGLangEngine.start(
                    config, Path(model_dir), Path(run_dir), index, options, chips[index] if chips else ()
                )
            )
            for index, options in enumerate(actor_options)
        ]
        try:
            return cls(await asyncio.gather(*tasks), config)
        except BaseException:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(result.close() for result in results if isinstance(result, SGLangEngine)))
            raise

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, n: int = 1) -> list[Completion]:
        """``n`` completions from the engine with the least to do. If that is lost meanwhile, another one is asked.

        Without a seed of its own a request gets one that follows from the run's seed, the policy version and the number
        of requests before it under that version.
        """
        cost = n * (len(prompt_ids) + params.max_response_tokens)
        if params.seed is None:
            params = dataclasses.replace(params, seed=self._next_seed())
        while True:
            engine = self._least_busy()
            self._load[engine.name] += cost
            try:
                completions = await engine.generate(prompt_ids, params, n)
                if any(completion.finish_reason == "abort" for completion in completions):
                    raise RunError(f"{engine.name} aborted an answer, which is no sample of the policy")
                return completions
            except EngineLostError as error:
                self._lose(engine, str(error))
            except RunError as error:
                if await engine.healthy():
                    raise
                self._lose(engine, str(error))
            finally:
                self._load[engine.name] -= cost

    async def update_weights(self, handle: Mapping[str, Any], version: int) -> dict[str, float]:
        """Bring policy ``version`` to all engines at the same time; metrics ``sync/*``, the slowest engine's.

        An engine that did not take it whole gets no more requests until a later update succeeds. Raises RunError if
        none took it.
        """
        outcomes = await asyncio.gather(*(self._update(engine, handle, version) for engine in self.engines))
        updates = [outcome for outcome in outcomes if outcome is not None]
        if not updates:
            raise RunError(f"no engine took policy version {version}: {self._losses()}")
        self._version, self._requests = version, 0
        return {
            "sync/engine_s": max(update.seconds for update in updates),
            "sync/pause_s": max(update.pause_seconds for update in updates),
            "sync/verify_s": max(update.verify_seconds for update in updates),
            "sync/bytes": float(updates[0].bytes),
            "sync/tensors": float(updates[0].tensors),
            "sync/failed_engines": float(len(self.engines) - len(updates)),
        }

    async def weight_checksums(self) -> dict[str, dict[str, str]]:
        """The engines' checksums of their live weights: engine name -> parameter -> checksum."""
        engines = self._serving()
        checksums = await asyncio.gather(*(engine.weight_checksums() for engine in engines))
        return {engine.name: sums for engine, sums in zip(engines, checksums, strict=True)}

    async def check_weights(self, named_tensors: Mapping[str, torch.Tensor]) -> float:
        """Compare the live weights of all engines with the trainer's Hugging Face tensors; how many engines were equal.

        Raises RunError that names the engine and the parameters if one differs.
        """
        expected = expected_checksums(named_tensors)
        held = await self.weight_checksums()
        for name, checksums in held.items():
            if wrong := differing(expected, checksums):
                raise RunError(f"{name} holds other weights than the trainer: {', '.join(wrong)}")
        return float(len(held))

    async def close(self) -> None:
        """End all engines."""
        await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)

    async def _update(self, engine: Engine, handle: Mapping[str, Any], version: int) -> WeightUpdate | None:
        try:
            update = await engine.update_weights(handle, version)
        except RunError as error:
            self._lose(engine, str(error))
            return None
        self.lost.pop(engine.name, None)
        return update

    def _next_seed(self) -> int:
        text = f"{self._seed} {self._version} {self._requests}"
        self._requests += 1
        # Below 2**62, so that adding a sample's number stays within SGLang's signed 64 bits.
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2

    def _lose(self, engine: Engine, reason: str) -> None:
        if engine.name in self.lost:
            return  # the first reason says most
        self.lost[engine.name] = reason
        log.warning("%s gets no more requests until it has taken a new policy: %s", engine.name, reason)

    def _serving(self) -> list[Engine]:
        serving = [engine for engine in self.engines if engine.name not in self.lost]
        if not serving:
            raise RunError(f"no engine is left: {self._losses()}")
        return serving

    def _least_busy(self) -> Engine:
        return min(self._serving(), key=lambda engine: self._load[engine.name])

    def _losses(self) -> str:
        return "; ".join(self.lost[engine.name] for engine in self.engines if engine.name in self.lost)
