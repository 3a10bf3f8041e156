"""SGLang as an engine: a Ray actor owns the server process, the driver talks to the server over HTTP."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import aiohttp
import ray

from rl_tpu.config.schema import RunConfig
from rl_tpu.devices import get_device
from rl_tpu.errors import RunError, UserError
from rl_tpu.rollout.arguments import server_arguments, server_options
from rl_tpu.rollout.engine import WeightUpdate
from rl_tpu.rollout.process import ServerProcess, free_port
from rl_tpu.rollout.responses import parse_completion, parse_json, parse_update, request_body
from rl_tpu.rollout.weight_loader import LOADER, encode_request
from rl_tpu.types import Completion, SamplingParams

CONTROL_TIMEOUT_S = 60.0
"""Deadline of a control request and of a call to an engine's actor."""


class ServerActor:
    """Ray actor on the engine's devices. The server lives as long as this process, however that ends."""

    def __init__(self, name: str, config: RunConfig, model_dir: Path, log: Path, index: int):
        device = get_device(config.cluster.device)
        shared_host = config.cluster.hosts == 1 and config.cluster.address is None
        host = "127.0.0.1" if shared_host else ray.util.get_node_ip_address()
        port = free_port(host)
        options = {**server_options(config, model_dir, index), "host": host, "port": port}
        # An accelerator's chips are already chosen by Ray, in this process' environment.
        shares = range(config.rollout.tensor_parallel) if device.chip_resource is None else ()
        environment = {
            **device.engine_environment(config.rollout.threads_per_engine, list(shares)),
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # /health only says whether the server is up
        }
        self._timeout_s = config.rollout.start_timeout_s
        self._server = ServerProcess(name, f"http://{host}:{port}", server_arguments(options), environment, log)

    def start(self) -> str:
        """The server's URL, once it answers. Raises UserError or RunError."""
        self._server.wait_healthy(self._timeout_s)
        return self._server.url

    def failure(self) -> str | None:
        """Why the server does not run; None while it does."""
        return self._server.failure()

    def close(self) -> None:
        self._server.close()


class SGLangEngine:
    """The driver's side of one engine. Create with `start`."""

    def __init__(self, name: str, url: str, actor: Any, config: RunConfig, log: Path):
        self.name = name
        self.url = url
        self.log = log
        self._actor = actor
        self._config = config
        self._session: aiohttp.ClientSession | None = None
        self._update_lock = asyncio.Lock()

    @classmethod
    async def start(
        cls, config: RunConfig, model_dir: Path, run_dir: Path, index: int, actor_options: Mapping[str, Any]
    ) -> SGLangEngine:
        """Start the actor with Ray's ``actor_options`` and wait until its server answers.

        Raises:
            UserError: SGLang does not know one of rollout.server_options.
            RunError: it did not start; nothing is left running.
        """
        name, log = f"engine {index}", run_dir / "logs" / f"engine-{index}.log"
        # Concurrent calls: `failure` and `close` must be answered while `start` waits.
        options = {"max_concurrency": 4, "max_restarts": 0, **actor_options}
        actor = ray.remote(ServerActor).options(**options).remote(name, config, model_dir, log, index)
        try:
            async with asyncio.timeout(config.rollout.start_timeout_s + CONTROL_TIMEOUT_S):
                url = await actor.start.remote()
        except (ray.exceptions.RayError, TimeoutError, asyncio.CancelledError) as error:
            ray.kill(actor)
            cause = getattr(error, "cause", None)
            if isinstance(cause, UserError | RunError):
                raise type(cause)(str(cause)) from None
            if isinstance(error, asyncio.CancelledError):
                raise
            raise RunError(f"{name} did not start: {_one_line(error)} (log: {log})") from None
        return cls(name, url, actor, config, log)

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams, n: int) -> list[Completion]:
        body = request_body(prompt_ids, params, n)
        answer = await self._post("/generate", body, self._config.rollout.request_timeout_s)
        return [parse_completion(item) for item in answer]

    async def update_weights(self, handle: Mapping[str, Any], version: int) -> WeightUpdate:
        sync = self._config.weight_sync
        body = {
            "serialized_named_tensors": [encode_request(handle, sync.transport, sync.verify)]
            * self._config.rollout.tensor_parallel,
            "load_format": LOADER,
            "weight_version": str(version),
            "flush_cache": True,
        }
        async with self._update_lock:
            start = time.perf_counter()
            # Requests in flight give up their cache, wait, and go on under the new weights; none is aborted.
            await self._control("/pause_generation", {"mode": "retract"})
            try:
                paused = time.perf_counter()
                await self._control("/begin_weight_update", {})
                try:
                    answer = await self._control("/update_weights_from_tensor", body, sync.timeout_s)
                finally:
                    await self._control("/end_weight_update", {})
            finally:
                await self._control("/continue_generation", {})
            end = time.perf_counter()
        return parse_update(answer, version, seconds=end - start, pause_seconds=end - paused)

    async def weight_checksums(self) -> dict[str, str]:
        answer = await self._control("/weights_checker", {"action": "checksum"}, self._config.weight_sync.timeout_s)
        checksums: dict[str, str] = {}
        for rank in answer["ranks"]:
            checksums.update(rank["checksums"])
        return checksums

    async def healthy(self) -> bool:
        try:
            async with (await self._http()).get(f"{self.url}/health_generate", timeout=_timeout(30)) as response:
                return response.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def close(self) -> None:
        if self._session is not None:
            await self._session.close()
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                await self._actor.close.remote()
        except (ray.exceptions.RayError, TimeoutError):
            pass  # the actor is gone, and its server with it
        ray.kill(self._actor)

    async def _control(self, path: str, body: Mapping[str, Any], timeout_s: float = CONTROL_TIMEOUT_S) -> Any:
        return await self._post(path, body, timeout_s)

    async def _post(self, path: str, body: Mapping[str, Any], timeout_s: float) -> Any:
        """The JSON answer. Raises UserError where SGLang refuses the request, RunError where it failed."""
        try:
            async with (await self._http()).post(self.url + path, json=body, timeout=_timeout(timeout_s)) as response:
                status, text = response.status, await response.text()
        except TimeoutError:
            raise RunError(f"{self.name} did not answer {path} within {timeout_s:g} s (log: {self.log})") from None
        except aiohttp.ClientError as error:
            raise RunError(await self._why_unreachable(path, error)) from None
        return parse_json(self.name, path, status, text)

    async def _why_unreachable(self, path: str, error: Exception) -> str:
        try:
            async with asyncio.timeout(CONTROL_TIMEOUT_S):
                for _ in range(20):  # a dying server takes a moment to be gone
                    if failure := await self._actor.failure.remote():
                        return failure
                    await asyncio.sleep(0.1)
        except (ray.exceptions.RayError, TimeoutError):
            return f"{self.name} is gone: its Ray actor died (log: {self.log})"
        return f"{self.name} broke off {path}: {_one_line(error)} (log: {self.log})"

    async def _http(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0))
        return self._session


def _timeout(seconds: float) -> aiohttp.ClientTimeout:
    return aiohttp.ClientTimeout(total=seconds)


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
