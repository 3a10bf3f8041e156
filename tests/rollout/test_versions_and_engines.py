"""What an engine does while a version is on its way, and a version on disk that SGLang takes without us."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path

import aiohttp
import pytest
import torch
from tiny import changed, load_model, make_config, weights_of

from rl_tpu.rollout.checksums import differing, expected_checksums
from rl_tpu.rollout.sglang import SGLangEngine
from weight_sync import Shard, open_sender

PROMPT = [5, 40, 41, 42, 90, 91, 17, 200]
DEADLINE_S = 120.0


def shards(tensors):
    return [Shard.whole(*item) for item in tensors.items()]


@pytest.fixture(scope="module")
def on_disk(model_dirs, tmp_path_factory):
    """A sender of normal Hugging Face checkpoints, in several files each; publishes bfloat16, returns the directory."""
    url = tmp_path_factory.mktemp("weights")
    sender = open_sender("disk", run_id="on-disk", url=str(url), model_dir=str(model_dirs["untied"]), file_bytes=2**17)

    def publish(version: int, seed: int) -> tuple[Path, dict[str, torch.Tensor]]:
        weights = changed(weights_of(load_model(model_dirs["untied"])), seed)
        tensors = {name: tensor.bfloat16() for name, tensor in weights.items()}
        directory = url / sender.publish(version, shards(tensors))["directory"]
        assert len(list(directory.glob("*.safetensors"))) > 1
        return directory, tensors

    yield publish
    sender.close()


@pytest.fixture(scope="module")
def started_from(on_disk):
    """The version that the engine was started from: its directory and its tensors."""
    return on_disk(1, seed=1)


@pytest.fixture(scope="module")
def engine(started_from, local_ray, run, tmp_path_factory):
    sync = {"transport": "gated_transport:TRANSPORT", "timeout_s": DEADLINE_S}
    config = make_config(started_from[0], rollout={"dtype": "bfloat16"}, weight_sync=sync)
    options = {"num_cpus": 0, "runtime_env": {"env_vars": {"PYTHONPATH": str(Path(__file__).parent)}}}
    engine = run(SGLangEngine.start(config, started_from[0], tmp_path_factory.mktemp("run"), 0, options))
    yield engine
    run(engine.close())


def test_sglang_loads_a_version_by_itself(engine, started_from, on_disk, run):
    """It started from one, and takes the next one through its own ``/update_weights_from_disk``."""
    directory, first = started_from
    assert differing(expected_checksums(first), run(engine.weight_checksums())) == []
    directory, second = on_disk(2, seed=2)

    async def update() -> dict:
        url, body = f"{engine.url}/update_weights_from_disk", {"model_path": str(directory)}
        async with aiohttp.ClientSession() as session, session.post(url, json=body) as response:
            return await response.json()

    answer = run(update())
    assert answer["success"], answer
    assert differing(expected_checksums(second), run(engine.weight_checksums())) == []


class Writing:
    """One answer after another while it is entered, streamed: ``tokens`` so far, over all of them."""

    def __init__(self, url: str):
        self._url, self.tokens = f"{url}/generate", 0

    async def _write(self) -> None:
        body = {"input_ids": PROMPT, "stream": True, "sampling_params": {"max_new_tokens": 400, "ignore_eos": True}}
        async with aiohttp.ClientSession() as session:
            while True:
                before = self.tokens
                async with session.post(self._url, json=body) as response:
                    async for line in response.content:
                        if line.startswith(b"data: {"):
                            info = json.loads(line.removeprefix(b"data: "))["meta_info"]
                            self.tokens = before + info["completion_tokens"]

    async def more(self, tokens: int) -> None:
        goal = self.tokens + tokens
        async with asyncio.timeout(DEADLINE_S):
            while self.tokens < goal:
                await asyncio.sleep(0.02)

    async def stands_still(self) -> None:
        """Until nothing has come for a second: what was on its way has arrived."""
        before = -1
        async with asyncio.timeout(DEADLINE_S):
            while self.tokens > before:
                before = self.tokens
                await asyncio.sleep(1)

    async def __aenter__(self) -> Writing:
        self._task = asyncio.create_task(self._write())
        await self.more(1)
        return self

    async def __aexit__(self, *_) -> None:
        self._task.cancel()


def test_an_engine_writes_while_a_version_is_staged_and_not_while_it_is_loaded(engine, on_disk, run, run_id, tmp_path):
    gate = {name: tmp_path / name for name in ("staging", "loading")}
    for path in gate.values():
        path.touch()
    new = on_disk(3, seed=3)[1]
    sender = open_sender("shared_memory", run_id=run_id)
    handle = sender.publish(3, shards(new)) | {"gate": {name: str(path) for name, path in gate.items()}}

    async def update() -> tuple[int, int]:
        async with Writing(engine.url) as writing:
            staging = asyncio.create_task(engine.stage(handle, 3))
            await asyncio.sleep(0.2)
            before = writing.tokens
            await writing.more(200)  # it cannot be staged before the file is gone
            while_staged = writing.tokens - before
            assert not staging.done()
            gate["staging"].unlink()
            loading = asyncio.create_task(engine.load(await staging))
            await writing.stands_still()
            before = writing.tokens
            await asyncio.sleep(1)
            while_loaded = writing.tokens - before
            assert not loading.done()
            gate["loading"].unlink()
            report = await loading
            assert report.pause_seconds > 1
            await writing.more(20)
        return while_staged, while_loaded

    while_staged, while_loaded = run(update())
    sender.close()
    print(f"tokens while a version was staged: {while_staged}, while it was loaded: {while_loaded}")
    assert while_staged >= 200
    assert while_loaded == 0
    assert differing(expected_checksums(new), run(engine.weight_checksums())) == []
