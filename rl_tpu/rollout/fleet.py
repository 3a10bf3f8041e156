"""Several engines as one: requests go to the least busy, a new policy goes to all, and a broken one is left out."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import RunError, UserError
from rl_tpu.rollout.checksums import differing, expected_checksums, key_value_heads
from rl_tpu.rollout.delivery import make_delivery
from rl_tpu.rollout.drafts import ABORT, Draft, make_drafts
from rl_tpu.rollout.engine import Engine, EngineLostError, UpdateRefusedError, WeightUpdate
from rl_tpu.rollout.routing import Router
from rl_tpu.rollout.sglang import SGLangEngine
from rl_tpu.types import Completion, SamplingParams

log = logging.getLogger(__name__)

COUNTED = ("sync/aborted_requests", "rollout/resumed_samples", "rollout/reused_tokens")
"""Metrics counted from one update to the next: samples that updates took out of engines, those that were gone on with by
another request, and the tokens that these had by then."""


class Fleet:
    """Create with `start`, or from any engines. ``lost`` says by name which engines get no requests, and why.

    An engine that does not take a new policy is left out until it has taken one. An engine whose process is gone, or
    does not answer, is started anew in the background and brought the policy that the others serve.
    """

    def __init__(self, engines: Sequence[Engine], config: RunConfig, key_value_heads: int | None = None):
        """``key_value_heads`` of the model: `check_weights` needs it where an engine has more ranks than that."""
        self.engines = list(engines)
        self.lost: dict[str, str] = {}
        self._config = config
        self._key_value_heads = key_value_heads
        self._delivery = make_delivery(config)
        self._policy: tuple[Mapping[str, Any], int] | None = None
        """Handle and version of the newest one; before the first update engines serve their model directory."""
        self._updates: dict[str, WeightUpdate] = {}
        """By which engines took it."""
        self._failed: set[str] = set()
        """Engines that did not, at first."""
        self._restarts: dict[str, asyncio.Task[None]] = {}
        self._recoveries: Counter[str] = Counter()
        """How often each engine was whole again. What befell its requests before says nothing about it now."""
        self._syncing = False
        self._changed = asyncio.Event()
        """Set, and replaced, whenever an engine comes back or is given up."""
        self._counted: Counter[str] = Counter()
        """Not yet reported."""
        self._aside: dict[str, Evaluator] = {}
        """By the engine that was set aside for it."""
        self._requests = 0
        """Requests since the last update."""
        names = [engine.name for engine in engines]
        self._router = Router(names, config.rollout.max_running_requests, lambda: [e.name for e in self._serving()])

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
            return cls(await asyncio.gather(*tasks), config, key_value_heads(Path(model_dir)))
        except BaseException:
            for task in tasks:
                task.cancel()
            results = await asyncio.gather(*tasks, return_exceptions=True)
            await asyncio.gather(*(result.close() for result in results if isinstance(result, SGLangEngine)))
            raise

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int = 1, session: str | None = None
    ) -> list[Completion]:
        """``n`` completions, from the engine of the session or from the one with the least to do (see `routing`).

        If an engine is lost meanwhile, or an update takes the samples out of it (weight_sync.pause_mode=resume), another
        one goes on where it stopped; with pause_mode=abort they are written again from the start.

        Without a seed of its own a request gets one that follows from the run's seed, the policy version and the number
        of requests before it under that version.
        """
        if params.seed is None:
            params = dataclasses.replace(params, seed=self._next_seed())
        drafts = make_drafts(prompt_ids, params, n)
        while unfinished := [draft for draft in drafts if not draft.finished]:
            await self._require_engine()
            await self._write(unfinished, session)
        return [draft.completion() for draft in drafts]

    @contextlib.asynccontextmanager
    async def set_aside(self) -> AsyncIterator[Evaluator]:
        """Take the least busy engine out of routing and of updates: inside, it serves the policy that it has now.

        At the end it is brought the newest policy and serves again like the others. Raises RunError if fewer than two
        engines serve.
        """
        serving = self._serving()
        if len(serving) < 2:
            raise RunError(f"no engine can be set aside: {len(serving)} of {len(self.engines)} serve")
        engine = min(serving, key=lambda engine: self._router.tokens[engine.name])
        held = self._policy
        self._aside[engine.name] = evaluator = Evaluator(self, engine.name)
        try:
            yield evaluator
        finally:
            current = held is self._policy or engine.name in self._updates  # in these since it was started anew
            if current or engine.name in self.lost:
                del self._aside[engine.name]
                self._notify()
            else:
                self._restarts[engine.name] = asyncio.create_task(self._catch_up(engine, aside=True))

    async def update_weights(self, handle: Mapping[str, Any], version: int) -> dict[str, float]:
        """Bring policy ``version`` to all engines at the same time; metrics ``sync/*``, the slowest engine's.

        An engine that does not take it gets no more requests; it is ``behind`` until `reload`, or a later update,
        succeeds.
        """
        self._policy, self._requests = (handle, version), 0
        self._updates = {}
        updated = [engine for engine in self.engines if engine.name not in self._aside]
        await self._bring([engine for engine in updated if engine.name not in self._restarts])
        self._failed = {engine.name for engine in updated} - self._updates.keys()
        counted, self._counted = self._counted, Counter()
        waiting = {"rollout/waiting_samples": float(self._router.waiting)}
        return self._metrics() | waiting | {name: float(counted[name]) for name in COUNTED}

    async def reload(self, handle: Mapping[str, Any], version: int) -> dict[str, float]:
        """Bring the same version, published whole, to the engines that are ``behind``; metrics of the sync so far."""
        self._policy = (handle, version)
        await self._bring(self.behind)
        return self._metrics()

    @property
    def behind(self) -> list[Engine]:
        """Engines that live and do not hold the newest policy."""
        late = [engine for engine in self.engines if engine.name not in self._updates]
        return [engine for engine in late if engine.name not in self._restarts and engine.name not in self._aside]

    @contextlib.asynccontextmanager
    async def syncing(self) -> AsyncIterator[None]:
        """Around all attempts to bring a policy: meanwhile requests that find no engine wait for one to come back.

        At the end an engine serves, if need be after one was started anew; raises RunError if none does.
        """
        self._syncing = True
        try:
            yield
        finally:
            self._syncing = False
            self._notify()
        await self._require_engine()

    async def weight_checksums(self) -> dict[str, dict[str, str]]:
        """The engines' checksums of their live weights: engine name -> parameter -> checksum."""
        engines = self._serving()
        checksums = await asyncio.gather(*(engine.weight_checksums() for engine in engines))
        return {engine.name: sums for engine, sums in zip(engines, checksums, strict=True)}

    async def check_weights(self, named_tensors: Mapping[str, torch.Tensor]) -> float:
        """Compare the live weights of all engines with the trainer's Hugging Face tensors; how many engines were equal.

        Raises RunError that names the engine and the parameters if one differs.
        """
        expected = expected_checksums(named_tensors, self._config.rollout.tensor_parallel, self._key_value_heads)
        held = await self.weight_checksums()
        for name, checksums in held.items():
            if wrong := differing(expected, checksums):
                raise RunError(f"{name} holds other weights than the trainer: {', '.join(wrong)}")
        return float(len(held))

    async def close(self) -> None:
        """End all engines."""
        restarts = list(self._restarts.values())
        for restart in restarts:
            restart.cancel()
        await asyncio.gather(*restarts, return_exceptions=True)
        await asyncio.gather(*(engine.close() for engine in self.engines), return_exceptions=True)

    async def _bring(self, engines: Sequence[Engine]) -> None:
        """Have engines take the newest policy."""
        coming = self._delivery.deliver(engines, *self._policy)
        await asyncio.gather(*map(self._settle, engines, coming))

    async def _settle(self, engine: Engine, coming: Awaitable[WeightUpdate]) -> None:
        try:
            update = await coming
        except RunError as error:
            if not await self._lose_if_broken(engine, error):
                self._lose(engine, str(error))
            return
        self._updates[engine.name] = update
        self._found(engine)
        self._notify()

    def _metrics(self) -> dict[str, float]:
        updates = list(self._updates.values())
        verify = self._config.weight_sync.verify
        return {
            "sync/receive_s": max((update.stage_seconds for update in updates), default=0.0),
            "sync/pause_s": max((update.pause_seconds for update in updates), default=0.0),
            "sync/bytes": float(max((update.bytes for update in updates), default=0)),
            "sync/verified_tensors": float(max((update.tensors for update in updates), default=0) if verify else 0),
            "sync/failed_engines": float(len(self._failed)),
            "sync/reloaded_engines": float(len(self._failed & self._updates.keys())),
        }

    async def _lose_if_broken(self, engine: Engine, error: RunError, recoveries: int | None = None) -> bool:
        """Whether an error means that an engine could not be used. If it is dead or hangs, it is started anew.

        ``recoveries`` of it there had been when what ended with the error began.
        """
        dead = await engine.failure() is not None
        lost = dead or isinstance(error, EngineLostError)
        if lost and not dead and recoveries not in (None, self._recoveries[engine.name]):
            return True
        if not lost:
            lost = dead = not await engine.healthy()
        if lost:
            self._lose(engine, str(error))
        if dead and engine.name not in self._restarts:
            self._restarts[engine.name] = asyncio.create_task(self._restart(engine))
        if lost:
            self._notify()
        return lost

    async def _restart(self, engine: Engine) -> None:
        """Start an engine anew and have it take the newest policy."""
        try:
            await engine.restart()
        except (RunError, UserError) as error:
            self.lost[engine.name] = str(error)
            log.warning("%s could not be started anew: %s", engine.name, error)
            del self._restarts[engine.name]
            self._notify()
        else:
            await self._catch_up(engine)
            if engine.name not in self.lost:
                log.warning("%s was started anew and serves again", engine.name)

    async def _catch_up(self, engine: Engine, aside: bool = False) -> None:
        """Have an engine that is lost, or was set ``aside``, take the newest policy, and serve again."""
        try:
            policy, update = None, None
            while policy is not self._policy:
                policy = self._policy
                try:
                    (coming,) = self._delivery.deliver([engine], *policy)
                    update = await coming
                except UpdateRefusedError:
                    if policy is self._policy:
                        raise
                    # else a newer one has replaced it meanwhile
        except (RunError, UserError) as error:
            self.lost[engine.name] = str(error)
            log.warning("%s did not take the newest policy: %s", engine.name, error)
        else:
            if update is not None:
                self._updates[engine.name] = update
            self._found(engine)
        finally:
            del self._restarts[engine.name]
            if aside:
                del self._aside[engine.name]
            self._notify()

    async def _require_engine(self) -> None:
        """Return once an engine serves; wait as long as one may come back. Raises RunError if none will."""
        while not self._serving():
            if not (self._restarts or self._syncing):
                raise RunError(f"no engine is left: {self._losses()}")
            await self._changed.wait()

    def _notify(self) -> None:
        """Wake up who waits for an engine, also where none will come."""
        self._changed.set()
        self._changed = asyncio.Event()
        self._router.changed()
        if not self._serving() and not (self._restarts or self._syncing):
            self._router.fail(RunError(f"no engine is left: {self._losses()}"))

    def _lose(self, engine: Engine, reason: str) -> None:
        if engine.name in self.lost:
            return  # the first reason says most
        self.lost[engine.name] = reason
        self._router.fail(EngineLostError(reason), engine.name)
        if evaluator := self._aside.get(engine.name):
            evaluator.lost = reason
        log.warning("%s gets no more requests until it has taken a new policy: %s", engine.name, reason)

    def _found(self, engine: Engine) -> None:
        if self.lost.pop(engine.name, None):
            self._recoveries[engine.name] += 1

    def _serving(self) -> list[Engine]:
        """Those that take any request."""
        return [engine for engine in self.engines if engine.name not in self.lost and engine.name not in self._aside]

    async def _write(self, drafts: Sequence[Draft], session: str | None, only: frozenset[str] | None = None) -> None:
        """Go on with samples on one engine, until they are finished or it cannot go on. Raises what another engine would
        not do better."""
        written = sum(len(draft.response_ids) for draft in drafts)
        tokens = sum(len(draft.prompt_ids) + draft.params.max_response_tokens for draft in drafts)
        seat = await self._router.seat(len(drafts), tokens, session, only)
        if written:
            self._counted["rollout/resumed_samples"] += sum(bool(draft.response_ids) for draft in drafts)
            self._counted["rollout/reused_tokens"] += written
        engine = next(engine for engine in self.engines if engine.name == seat.engine)
        ended, recoveries = self._delivery.ended, self._recoveries[engine.name]
        with self._router.taken(seat) as one_leaves:
            for draft in drafts:
                draft.on_finish = one_leaves
            try:
                await engine.write(drafts)
            except RunError as error:
                if not await self._lose_if_broken(engine, error, recoveries):
                    raise
        aborted = [draft for draft in drafts if draft.finish_reason == ABORT]
        mode = self._config.weight_sync.pause_mode
        if aborted and engine.name not in self.lost:
            if mode not in ("abort", "resume") or self._delivery.begun == ended:
                raise RunError(f"{engine.name} aborted an answer, which is no sample of the policy")
            self._counted["sync/aborted_requests"] += len(aborted)
            if mode == "abort":
                for draft in aborted:
                    draft.restart()

    def _losses(self) -> str:
        return "; ".join(self.lost[engine.name] for engine in self.engines if engine.name in self.lost)

    def _next_seed(self) -> int:
        version = self._policy[1] if self._policy else 0
        text = f"{self._config.seed} {version} {self._requests}"
        self._requests += 1
        # Below 2**62, so that adding a sample's number stays within SGLang's signed 64 bits.
        return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 2


class Evaluator:
    """An engine that was set aside, as `Fleet.generate` offers the others."""

    def __init__(self, fleet: Fleet, engine: str):
        self.engine = engine
        self.lost: str | None = None
        """Why it is none any more; the engine may serve again, but not the policy that it was to keep."""
        self._fleet = fleet

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, n: int = 1, session: str | None = None
    ) -> list[Completion]:
        """``n`` completions under the policy that the engine keeps. Raises RunError if it is lost."""
        drafts = make_drafts(prompt_ids, params, n)
        while unfinished := [draft for draft in drafts if not draft.finished]:
            if self.lost:
                raise EngineLostError(self.lost)
            await self._fleet._write(unfinished, session, frozenset({self.engine}))
        return [draft.completion() for draft in drafts]
