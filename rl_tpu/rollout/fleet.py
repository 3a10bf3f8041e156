"""Several engines as one: requests go to the least busy, a new policy goes to all, and a broken one is left out."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import RunError
from rl_tpu.rollout.checksums import differing, expected_checksums
from rl_tpu.rollout.engine import Engine, WeightUpdate
from rl_tpu.rollout.sglang import SGLangEngine
from rl_tpu.types import Completion, SamplingParams

log = logging.getLogger(__name__)


class Fleet:
    """Create with `start`, or from any engines. ``lost`` says by name which engines get no requests, and why."""

    def __init__(self, engines: Sequence[Engine], config: RunConfig):
        self.engines = list(engines)
        self.lost: dict[str, str] = {}
        self._timeout_s = config.weight_sync.timeout_s
        self._load = dict.fromkeys((engine.name for engine in engines), 0)
        """Tokens asked of each engine and not yet answered."""

    @classmethod
    async def start(
        cls, config: RunConfig, model_dir: Path, run_dir: Path, actor_options: Sequence[Mapping[str, Any]]
    ) -> Fleet:
        """Start all engines at once; ``actor_options`` are Ray's options of each engine's actor.

        Raises UserError or RunError of the first engine that did not start; then none is left running.
        """
        starts = [
            SGLangEngine.start(config, Path(model_dir), Path(run_dir), index, options)
            for index, options in enumerate(actor_options)
        ]
        tasks = [asyncio.ensure_future(start) for start in starts]
        try:
            return cls(await asyncio.gather(*tasks), config)
        except BaseException:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(result.close() for result in results if isinstance(result, SGLangEngine)))
            raise

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, n: int = 1) -> list[Completion]:
        """``n`` completions from the engine with the least to do. If it fails, another one is asked."""
        cost = n * (len(prompt_ids) + params.max_response_tokens)
        while True:
            engine = self._least_busy()
            self._load[engine.name] += cost
            try:
                return await engine.generate(prompt_ids, params, n)
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
        return {
            "sync/engine_seconds": max(update.seconds for update in updates),
            "sync/pause_seconds": max(update.pause_seconds for update in updates),
            "sync/verify_seconds": max(update.verify_seconds for update in updates),
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
        await asyncio.gather(*(engine.close() for engine in self.engines))

    async def _update(self, engine: Engine, handle: Mapping[str, Any], version: int) -> WeightUpdate | None:
        try:
            async with asyncio.timeout(self._timeout_s):
                update = await engine.update_weights(handle, version)
        except TimeoutError:
            self._lose(engine, f"{engine.name} did not take version {version} within {self._timeout_s:g} s")
        except RunError as error:
            self._lose(engine, str(error))
        else:
            self.lost.pop(engine.name, None)
            return update
        return None

    def _lose(self, engine: Engine, reason: str) -> None:
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
        return "; ".join(f"{name}: {reason}" for name, reason in self.lost.items())
