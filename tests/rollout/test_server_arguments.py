"""From the configuration to SGLang's command line; from requests and answers to ours."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from tiny import make_config

from rl_tpu.errors import RunError
from rl_tpu.rollout.arguments import server_environment, server_options, spare_other_models
from rl_tpu.rollout.process import server_arguments
from rl_tpu.rollout.responses import parse_json
from rl_tpu.rollout.worker_environment import WORKER_ENVIRONMENTS


def test_options_become_flags():
    options = {"a_b": 1, "flag": True, "no": False, "unset": None, "many": ["x", "y"], "nested": {"k": 1}}
    assert server_arguments(options) == ["--a-b", "1", "--flag", "--many", "x", "y", "--nested", '{"k": 1}']


def test_the_configuration_reaches_the_server(model_dirs):
    rollout = {"kv_cache_tokens": 4096, "server_options": {"page_size": 4, "disable_overlap_schedule": False}}
    config = make_config(model_dirs["tied"], rollout=rollout, seed=100)
    options = server_options(config, model_dirs["tied"], 2)
    assert options["model_path"] == str(model_dirs["tied"])
    assert options["max_total_tokens"] == 4096
    assert options["random_seed"] == 102
    assert options["device"] == "cpu"
    assert options["enable_deterministic_inference"] is True
    assert options["page_size"] == 4
    assert "--disable-overlap-schedule" not in server_arguments(options)  # the user's word is the last


V7X = {"device": "tpu", "generation": "v7x", "chips_per_host": 4, "devices_per_chip": 2}
SPLIT = {"trainer_chips": 2, "rollout_chips": 2}


def test_a_tpu_engine_differs_from_a_cpu_engine_in_what_the_devices_say_and_nothing_else(model_dirs):
    model = model_dirs["tied"]
    rollout = {"tensor_parallel": 4, "context_tokens": 1000, "max_running_requests": 48}
    cpu = make_config(model, rollout=rollout)
    tpu = make_config(model, rollout=rollout, cluster=V7X | SPLIT)
    of_devices = {
        "device": ("cpu", "tpu"),
        "attention_backend": ("torch_native", None),
        "mem_fraction_static": (0.1, None),
        "enable_deterministic_inference": (True, None),
        "disable_overlap_schedule": (True, None),
        "sleep_on_idle": (True, None),
        "chunked_prefill_size": (None, 1024),
        "max_prefill_tokens": (None, 1024),
        "cuda_graph_bs_prefill": (None, [128, 256, 512, 1024]),
        "cuda_graph_bs_decode": (None, [1, 2, 4, 8, 16, 32, 64]),
    }
    options = server_options(cpu, model, 0), server_options(tpu, model, 0)
    names = {name for name in options[0] | options[1] if options[0].get(name) != options[1].get(name)}
    assert {name: (options[0].get(name), options[1].get(name)) for name in names} == of_devices
    environment = server_environment(cpu, model, [2, 3]), server_environment(tpu, model, [2, 3])
    names = {name for name in environment[0] | environment[1] if environment[0].get(name) != environment[1].get(name)}
    assert names == {"SGLANG_PLATFORM", "SGLANG_CPU_OMP_THREADS_BIND", "TORCH_DEVICE_BACKEND_AUTOLOAD"}
    assert environment[1]["SGLANG_PLATFORM"] == "tpu_oot"
    assert environment[1]["TORCH_DEVICE_BACKEND_AUTOLOAD"] == "1"


def test_long_prompts_are_read_in_chunks_on_a_tpu(model_dirs):
    config = make_config(model_dirs["tied"], rollout={"context_tokens": 22528}, cluster=V7X | SPLIT)
    options = server_options(config, model_dirs["tied"], 0)
    assert options["chunked_prefill_size"] == options["cuda_graph_bs_prefill"][-1] == 4096


PARSE = """
import argparse, sys
from rl_tpu.rollout import server
server.prepare()
from sglang.srt.server_args import ServerArgs
parser = argparse.ArgumentParser()
ServerArgs.add_cli_args(parser)
parsed = parser.parse_args(sys.argv[1:])
print(parsed.cuda_graph_bs_prefill, parsed.cuda_graph_bs_decode, parsed.chunked_prefill_size, parsed.device)

import os
from sglang.srt.managers import scheduler
from sglang.srt.plugins.hook_registry import HookRegistry
HookRegistry.apply_hooks()
try:
    scheduler.configure_scheduler_process("no arguments", 1)
except Exception:  # it needs a server's arguments; what comes before it does not
    pass
print(os.environ["TPU_VISIBLE_DEVICES"])
"""


def test_sglang_knows_a_tpu_engine_s_arguments_and_each_worker_its_environment(model_dirs):
    config = make_config(model_dirs["tied"], rollout={"tensor_parallel": 2}, cluster=V7X | SPLIT)
    arguments = server_arguments(server_options(config, model_dirs["tied"], 0))
    workers = [{"TPU_VISIBLE_DEVICES": "4"}, {"TPU_VISIBLE_DEVICES": "5"}]
    environment = os.environ | {"SGLANG_PLATFORM": "rl_tpu_cpu", WORKER_ENVIRONMENTS: json.dumps(workers)}
    command = [sys.executable, "-c", PARSE, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    lines = done.stdout.splitlines()
    assert "[128, 256, 512, 1024] [1, 2, 4, 8, 16, 32, 64] 1024 tpu" in lines, done.stderr
    assert lines[-1] == "5", done.stderr


def test_only_the_model_at_hand_is_imported(model_dirs, tmp_path):
    spared = spare_other_models(model_dirs["tied"])["SGLANG_DISABLED_MODEL_ARCHS"].split(",")
    assert "qwen3" not in spared
    assert {"llama", "qwen2", "qwen3_moe"} <= set(spared)
    assert spare_other_models(tmp_path) == {}
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["UnheardOf"]}))
    assert spare_other_models(tmp_path) == {}


@pytest.mark.parametrize(
    ("status", "text", "message"),
    [
        (400, '{"success": false, "message": "no"}', "engine 0 refused /x: no$"),
        (400, '{"error": {"message": "too long"}}', "refused /x: too long$"),
        (500, "Internal Server Error", "refused /x: Internal Server Error$"),
        (503, "", "refused /x: HTTP status 503$"),
    ],
)
def test_a_refusal_says_what_sglang_said(status, text, message):
    with pytest.raises(RunError, match=message):
        parse_json("engine 0", "/x", status, text)
