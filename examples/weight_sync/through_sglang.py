"""Updates of a real SGLang server, for ``python -m weight_sync.bench --baselines``, with a payload named ``qwen3_*``.

The server has a model of the payload's shapes with random weights. ``sglang, update_weights_from_tensor`` sends the
weights as SGLang's own endpoint takes them over HTTP: pickled, base64, a bucket a request. The others send them through
weight_sync and the engine of rl_tpu, which stages a version while it generates and stands still only for the load. All
end when the engine serves the new weights, and are checked by the checksums that SGLang makes of its live parameters.
"""

from __future__ import annotations

import asyncio
import pickle
import secrets
import shutil
import tempfile
import time
import urllib.request
from functools import partial
from pathlib import Path
from typing import Any

import pybase64
import ray
import torch
from transformers import Qwen3Config

from rl_tpu.config.schema import RunConfig
from rl_tpu.rollout.checksums import differing, expected_checksums
from rl_tpu.rollout.sglang import SGLangEngine
from weight_sync import Shard, open_sender
from weight_sync.bench.baselines import Baseline, Open
from weight_sync.bench.payload import HEAD_DIM, QWEN3, VOCABULARY, Payload

Tensors = dict[str, torch.Tensor]
BUCKET_BYTES = 256 * 10**6
DEADLINE_S = 300


def baselines(payload: Payload) -> dict[str, Open]:
    if payload.name not in QWEN3:
        raise ValueError(f"payload {payload.name} is no model; through SGLang go: {', '.join(QWEN3)}")
    names = {"shared_memory": "sglang, weight_sync by shared_memory", "disk": "sglang, weight_sync by disk"}
    ours = {name: partial(ThroughWeightSync, payload, transport) for transport, name in names.items()}
    return ours | {"sglang, update_weights_from_tensor": partial(OverHTTP, payload)}


def make_model(payload: Payload, directory: Path) -> None:
    """A configuration; the weights are made up by SGLang's ``load_format dummy``."""
    shape = QWEN3[payload.name]
    Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        dtype="bfloat16",
        num_hidden_layers=shape["layers"],
        hidden_size=shape["hidden"],
        intermediate_size=shape["intermediate"],
        num_attention_heads=shape["heads"],
        num_key_value_heads=shape["kv_heads"],
        head_dim=HEAD_DIM,
        vocab_size=shape.get("vocabulary", VOCABULARY),
        tie_word_embeddings=shape.get("tied", False),
        max_position_embeddings=4096,
    ).save_pretrained(directory)


def make_config(directory: Path, transport: str) -> RunConfig:
    return RunConfig.model_validate({
        "name": "bench",
        "model": {"path": str(directory)},
        "data": {"train": {"kind": "file", "path": "unused.jsonl"}},
        "reward": {"name": "math"},
        "rollout": {
            "prompts_per_step": 1,
            "samples_per_prompt": 2,
            "max_response_tokens": 8,
            "context_tokens": 512,
            "kv_cache_tokens": 2048,
            "max_running_requests": 4,
            "dtype": "bfloat16",
            "start_timeout_s": DEADLINE_S,
            "server_options": {"load_format": "dummy", "skip_tokenizer_init": True, "mem_fraction_static": 0.5},
        },
        "weight_sync": {"transport": transport, "timeout_s": DEADLINE_S},
        "trainer": {"steps": 1},
        "cluster": {"device": "cpu", "chips_per_host": 2, "trainer_chips": 1, "rollout_chips": 1},
    })  # fmt: skip


class Engine(Baseline):
    """The server, started and checked; how weights come to it is the subclass's business."""

    def __init__(self, payload: Payload, tensors: Tensors, transport: str = "shared_memory"):
        self.tensors = tensors
        self.directory = Path(tempfile.mkdtemp(prefix="weight_sync-bench-"))
        self._runner = asyncio.Runner()
        self.engine = None
        try:
            ray.init(address="local", num_cpus=1, include_dashboard=False, configure_logging=False, log_to_driver=False)
            make_model(payload, self.directory)
            config = make_config(self.directory, transport)
            self.engine = self.run(SGLangEngine.start(config, self.directory, self.directory, 0, {"num_cpus": 0}))
        except BaseException:
            Engine.close(self)
            raise

    def run(self, coroutine) -> Any:
        return self._runner.run(coroutine)

    def check(self) -> None:
        wrong = differing(expected_checksums(self.tensors), self.run(self.engine.weight_checksums()))
        if wrong:
            raise RuntimeError(f"{len(wrong)} of the engine's parameters are not what was sent, {wrong[0]} first")

    def close(self) -> None:
        if self.engine is not None:
            self.run(self.engine.close())
        self._runner.close()
        ray.shutdown()
        shutil.rmtree(self.directory)


class ThroughWeightSync(Engine):
    """Publish, stage, load."""

    verified = True

    def __init__(self, payload: Payload, transport: str, tensors: Tensors):
        super().__init__(payload, tensors, transport)
        options = {"url": str(self.directory / "weights")} if transport == "disk" else {}
        self._sender = open_sender(transport, run_id=f"bench-{secrets.token_hex(4)}", **options)
        self._version = 0

    def transfer(self) -> dict[str, float]:
        self._version += 1
        start = time.perf_counter()
        handle = self._sender.publish(self._version, [Shard.whole(*item) for item in self.tensors.items()])
        published = time.perf_counter()
        update = self.run(self._update(handle))
        stage_s = published - start + update.stage_seconds
        return {"stage_s": stage_s, "pause_s": update.pause_seconds}

    async def _update(self, handle: dict):
        return await self.engine.load(await self.engine.stage(handle, self._version))

    def close(self) -> None:
        self._sender.close()
        super().close()


class OverHTTP(Engine):
    """The endpoint of SGLang, between the requests that it wants around it. The engine stands still throughout."""

    def __init__(self, payload: Payload, tensors: Tensors):
        super().__init__(payload, tensors)

    def transfer(self) -> dict[str, float]:
        start = time.perf_counter()
        self._post("/pause_generation", b'{"mode": "retract"}')
        self._post("/begin_weight_update", b"{}")
        for bucket in self._buckets():
            data = pybase64.b64encode(pickle.dumps(bucket))
            self._post(
                "/update_weights_from_tensor", b'{"flush_cache": false, "serialized_named_tensors": ["' + data + b'"]}'
            )
        self._post("/end_weight_update", b"{}")
        self._post("/continue_generation", b"{}")
        return {"pause_s": time.perf_counter() - start}

    def _buckets(self) -> list[list[tuple[str, torch.Tensor]]]:
        buckets, room = [], 0
        for name, tensor in self.tensors.items():
            if not buckets or tensor.nbytes > room:
                buckets.append([])
                room = BUCKET_BYTES
            buckets[-1].append((name, tensor))
            room -= tensor.nbytes
        return buckets

    def _post(self, path: str, body: bytes) -> None:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.engine.url + path, body, headers)
        with urllib.request.urlopen(request, timeout=DEADLINE_S) as response:
            response.read()
