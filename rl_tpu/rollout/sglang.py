"""SGLang as an engine: a Ray actor owns the server process, the driver talks to the server itself over HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import ray

from rl_tpu.config.schema import RunConfig
from rl_tpu.errors import RunError, UserError
from rl_tpu.rollout.actor import ServerActor
from rl_tpu.rollout.arguments import server_environment, server_options
from rl_tpu.rollout.checksums import on_rank
from rl_tpu.rollout.drafts import Draft, make_drafts
from rl_tpu.rollout.engine import EngineLostError, UpdateRefusedError, WeightUpdate
from rl_tpu.rollout.responses import events, parse_json, read_event, request_body
from rl_tpu.rollout.weight_loader import LOADER, NOTHING_LOADED, load_payload, stage_action, staged_action
from rl_tpu.types import Completion, SamplingParams

CONTROL_TIMEOUT_S = 30.0
"""Deadline of a small request and of a call to an engine's actor."""
SHARED_PROMPT_TOKENS = 16
"""A prompt this long is read once before its n samples are asked for, which then find it in the prefix cache. (SGLang's
own ``n`` does the same, but gives all n samples one seed.)"""
NO_TIMEOUT = aiohttp.ClientTimeout(total=None)
"""Of a single read: the deadline is the whole request's."""
POLL_S = 0.02
"""Between two questions whether a version is staged."""
ABORT_TIMEOUT_S = 5.0
"""Within this the samples that an update takes out should have ended; those that have not are aborted a little later."""
CLEANUP_TIMEOUT_S = 10.0
"""Deadline of each request that ends an update."""
KEEP_ALIVE_S = 3.0
"""SGLang closes a connection that was idle for 5 s; a request sent just then would be lost."""


class SGLangEngine:
    """The driver's side of one engine. Create with `start`."""

    def __init__(
        self,
        config: RunConfig,
        model_dir: Path,
        run_dir: Path,
        index: int,
        actor_options: Mapping[str, Any],
        chips: Sequence[int] = (),
    ) -> None:
        self.name = f"engine {index}"
        self.log = run_dir / "logs" / f"engine-{index}.log"
        self.url = ""
        self.starts = 0
        """How often its server was started. A new one knows nothing of what the one before was told."""
        self._config = config
        self._vocabulary = vocabulary_size(model_dir)
        self._options = server_options(config, model_dir, index)
        self._environment = server_environment(config, model_dir, chips)
        self._actor_options = actor_options
        self._actor: Any = None
        self._session: aiohttp.ClientSession | None = None
        self._updating = asyncio.Lock()
        self._writing: set[asyncio.Future[None]] = set()
        """One for each `write` that goes on."""
        self._admits = asyncio.Event()
        """Not set while an update takes out what is being written: what it took out would begin again before it."""
        self._admits.set()
        self._broken_loads: list[str] = []
        """Why each of them broke off."""

    @classmethod
    async def start(
        cls,
        config: RunConfig,
        model_dir: Path,
        run_dir: Path,
        index: int,
        actor_options: Mapping[str, Any],
        chips: Sequence[int] = (),
    ) -> SGLangEngine:
        """Start the actor with Ray's ``actor_options`` and wait until its server answers.

        Raises:
            UserError: the model cannot be read, or SGLang does not know one of rollout.server_options.
            RunError: it did not start; nothing is left running.
        """
        engine = cls(config, model_dir, run_dir, index, actor_options, chips)
        await engine._launch()
        return engine

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, n: int) -> list[Completion]:
        """``n`` completions of the prompt; with ``finish_reason`` ``abort`` what an update aborted."""
        drafts = make_drafts(prompt_ids, params, n)
        await self.write(drafts)
        return [draft.completion() for draft in drafts]

    async def write(self, drafts: Sequence[Draft]) -> None:
        broken_loads = len(self._broken_loads)
        ended = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(self._config.rollout.request_timeout_s):
                await self._admits.wait()
                self._writing.add(ended)
                prompt = drafts[0].prompt_ids
                fresh = not any(draft.response_ids for draft in drafts)
                if fresh and len(drafts) > 1 and len(prompt) >= SHARED_PROMPT_TOKENS:
                    self._body(drafts)  # refuses what the server would die of
                    read_only = {"input_ids": list(prompt), "sampling_params": {"max_new_tokens": 0}}
                    await self.post("/generate", read_only, None, retry=True)
                await self._stream("/generate", drafts)
        except TimeoutError:
            raise RunError(self._late("/generate", self._config.rollout.request_timeout_s)) from None
        finally:
            self._writing.discard(ended)
            ended.set_result(None)
            if broken := self._broken_loads[broken_loads:]:
                for draft in drafts:
                    if not draft.finished:  # its last token may come from weights that are no policy
                        draft.restart()
        if broken:
            raise EngineLostError(f"{self.name} dropped its requests: {broken[0]}")

    async def stage(self, handle: Mapping[str, Any], version: int) -> WeightUpdate:
        sync = self._config.weight_sync
        start = time.perf_counter()
        try:
            async with asyncio.timeout(sync.timeout_s):
                await self._command(stage_action(handle, version, sync.transport, sync.verify))
                while not (report := await self._command(staged_action(version)))["staged"]:
                    await asyncio.sleep(POLL_S)
        except TimeoutError:
            raise UpdateRefusedError(
                f"{self.name} did not receive policy version {version} within weight_sync.timeout_s"
                f" {sync.timeout_s:g} s (log: {self.log})"
            ) from None
        return WeightUpdate(version, report["tensors"], report["bytes"], time.perf_counter() - start)

    async def load(self, staged: WeightUpdate) -> WeightUpdate:
        timeout_s = self._config.weight_sync.timeout_s
        body = {
            "serialized_named_tensors": [load_payload(staged.version)] * self._config.rollout.tensor_parallel,
            "load_format": LOADER,
            "weight_version": str(staged.version),
            # Samples that keep their entries pin the cache; `prefix_cache` keeps new ones away from them.
            "flush_cache": self._config.weight_sync.pause_mode != "in_place",
        }

        async def change() -> None:
            try:
                await self.post("/update_weights_from_tensor", body, timeout_s)
            except RunError as error:
                raise refusal_or_loss(error) from None

        return dataclasses.replace(staged, pause_seconds=await self.stand_still(change))

    async def stand_still(self, change: Callable[[], Awaitable[None]]) -> float:
        """Stop generating, let ``change`` bring other weights through a weight update session, go on generating. For how
        many seconds it stood still.

        ``change`` raises UpdateRefusedError if it left the weights as they were. Every other error is, or becomes,
        EngineLostError.
        """
        async with self._updating:
            start = time.perf_counter()
            try:
                async with self._paused():
                    await change()
            except UpdateRefusedError:
                raise
            except RunError as error:
                raise EngineLostError(str(error)) from None
            return time.perf_counter() - start

    async def update_weights(self, handle: Mapping[str, Any], version: int) -> WeightUpdate:
        """Both halves of an update."""
        return await self.load(await self.stage(handle, version))

    async def restart(self) -> None:
        await self._end()
        await self._launch()

    async def failure(self) -> str | None:
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                return await self._actor.failure.remote()
        except (ray.exceptions.RayError, TimeoutError):
            return f"{self.name} is gone: its Ray actor died (log: {self.log})"

    async def weight_checksums(self) -> dict[str, str]:
        request = {"action": "checksum"}
        answer = await self.post("/weights_checker", request, self._config.weight_sync.timeout_s, retry=True)
        ranks = [rank["checksums"] for rank in answer["ranks"]]
        return {on_rank(name, i, len(ranks)): value for i, held in enumerate(ranks) for name, value in held.items()}

    async def healthy(self) -> bool:
        timeout = aiohttp.ClientTimeout(total=CONTROL_TIMEOUT_S)
        try:
            async with self._http().get(f"{self.url}/health_generate", timeout=timeout) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError, OSError):
            return False

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        await self._end()

    async def _launch(self) -> None:
        # Concurrent calls: `failure` and `close` must be answered while `start` waits.
        remote = ray.remote(ServerActor).options(max_concurrency=4, max_restarts=0, **self._actor_options)
        driver = ray.util.get_node_ip_address()
        actor = self._actor = remote.remote(self.name, self._options, self._environment, self.log, driver)
        self.starts += 1
        timeout_s = self._config.rollout.start_timeout_s
        try:
            async with asyncio.timeout(timeout_s + CONTROL_TIMEOUT_S):
                self.url = await actor.start.remote(timeout_s)
        except BaseException as error:
            ray.kill(actor)  # and with it a server that is still starting
            cause = getattr(error, "cause", None)
            if isinstance(cause, UserError | RunError):
                raise type(cause)(str(cause)) from None
            if isinstance(error, ray.exceptions.RayError | TimeoutError):
                raise RunError(f"{self.name} did not start: {_one_line(error)} (log: {self.log})") from None
            raise

    async def _end(self) -> None:
        with contextlib.suppress(ray.exceptions.RayError, TimeoutError):  # a dead actor's server is gone already
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await self._actor.close.remote()
        ray.kill(self._actor)

    async def _command(self, action: str) -> dict[str, Any]:
        """Have `weight_loader` do something on all ranks; its report. Raises UpdateRefusedError."""
        try:
            answer = await self.post("/weights_checker", {"action": action}, CONTROL_TIMEOUT_S, retry=True)
            return json.loads(answer["message"])
        except EngineLostError:
            raise
        except RunError as error:
            raise UpdateRefusedError(str(error)) from None

    @contextlib.asynccontextmanager
    async def _paused(self):
        """Generation stands still and a weight update session is open.

        Where a load broke off, samples in flight are dropped: no token may come from weights that are no policy.
        """
        mode = self._config.weight_sync.pause_mode
        how = "in_place" if mode == "in_place" else "retract"
        try:
            if mode == "resume":  # before it pauses: of what is aborted once it was retracted SGLang does not tell all
                self._admits.clear()
                await self.post("/abort_request", {"abort_all": True}, CONTROL_TIMEOUT_S)
                if self._writing:  # the server only notes the request, and would retract first what it is to abort
                    await asyncio.wait(set(self._writing), timeout=ABORT_TIMEOUT_S)
            await self.post("/pause_generation", {"mode": how}, CONTROL_TIMEOUT_S)
        finally:
            self._admits.set()
        try:
            if mode == "abort":
                await self.post("/abort_request", {"abort_all": True}, CONTROL_TIMEOUT_S)
            await self.post("/begin_weight_update", {}, CONTROL_TIMEOUT_S)
            try:
                yield
            finally:
                await self.post("/end_weight_update", {}, CLEANUP_TIMEOUT_S)
        except BaseException as error:
            if not isinstance(error, UpdateRefusedError):
                self._broken_loads.append(_one_line(error))
                await self.post("/abort_request", {"abort_all": True}, CLEANUP_TIMEOUT_S)
            raise
        finally:
            await self.post("/continue_generation", {}, CLEANUP_TIMEOUT_S)

    async def _stream(self, path: str, drafts: Sequence[Draft], retry: bool = True) -> None:
        """Read a streamed answer into its samples. A connection that broke is made again, if the server lives, until one
        of them brings nothing."""
        for draft in drafts:
            draft.begin()
        drafts = [draft for draft in drafts if not draft.finished]
        if not drafts:
            return
        body, starts, received = self._body(drafts), self.starts, [0] * len(drafts)  # tokens of each sample
        try:
            async with self._http().post(self.url + path, json=body, timeout=NO_TIMEOUT) as response:
                if response.status != 200:
                    parse_json(self.name, path, response.status, await response.text())
                async for event in events(response):
                    if "error" in event:
                        parse_json(self.name, path, 400, json.dumps(event))
                    index = event.get("index", 0)
                    received[index] = read_event(event, drafts[index], received[index])
            if not all(draft.finish_reason for draft in drafts):
                raise ConnectionError("the answer ended before it was whole")
        except (aiohttp.ClientError, OSError) as error:
            failure = await self._failure_soon(starts)
            if failure is not None:
                raise EngineLostError(failure) from None
            if not (retry or any(received)):
                raise RunError(f"{self.name} broke off {path}: {_one_line(error)} (log: {self.log})") from None
            unfinished = [draft for draft in drafts if not draft.finish_reason]
            await self._stream(path, unfinished, retry=any(received))

    def _body(self, drafts: Sequence[Draft]) -> dict[str, Any]:
        return request_body(drafts, self._vocabulary, bool(self._options.get("enable_deterministic_inference")))

    async def post(self, path: str, body: Mapping[str, Any], timeout_s: float | None, retry: bool = False) -> Any:
        """The JSON answer. ``retry`` a request whose connection broke once, if the server lives and it does no harm.

        Raises EngineLostError where SGLang is gone, RunError where it refuses the request or does not answer.
        """
        timeout, starts = aiohttp.ClientTimeout(total=timeout_s), self.starts
        try:
            async with self._http().post(self.url + path, json=body, timeout=timeout) as response:
                status, text = response.status, await response.text()
        except TimeoutError:
            raise RunError(self._late(path, timeout_s)) from None
        except (aiohttp.ClientError, OSError) as error:
            failure = await self._failure_soon(starts)
            if failure is None and retry:
                return await self.post(path, body, timeout_s)
            if failure is not None:
                raise EngineLostError(failure) from None
            raise RunError(f"{self.name} broke off {path}: {_one_line(error)} (log: {self.log})") from None
        return parse_json(self.name, path, status, text)

    def _late(self, path: str, timeout_s: float) -> str:
        return f"{self.name} did not answer {path} within {timeout_s:g} s (log: {self.log})"

    async def _failure_soon(self, starts: int) -> str | None:
        """Why the server of that start is gone; None if it still runs a second after a connection broke."""
        for _ in range(10):
            if self.starts > starts:
                return f"{self.name} was started anew"
            if failure := await self.failure():
                return failure
            await asyncio.sleep(0.1)
        return None

    def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S)
            self._session = aiohttp.ClientSession(connector=connector)
        return self._session


def vocabulary_size(model_dir: Path) -> int:
    """From the model's config.json. Raises UserError."""
    path = model_dir / "config.json"
    try:
        return int(json.loads(path.read_text())["vocab_size"])
    except OSError as error:
        raise UserError(f"model.path {model_dir} is no Hugging Face model: {error.strerror}: {path}") from None
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} gives no vocab_size: {_one_line(error)}") from None


def refusal_or_loss(error: RunError) -> UpdateRefusedError | EngineLostError:
    """What it means that SGLang did not do what should have changed its weights."""
    if isinstance(error, EngineLostError):
        return error
    return (UpdateRefusedError if NOTHING_LOADED in str(error) else EngineLostError)(str(error))


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())[:300] or type(error).__name__
