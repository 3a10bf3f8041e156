"""From the configuration to SGLang's command line; from requests and answers to ours."""

from __future__ import annotations

import json

import pytest
from tiny import make_config

from rl_tpu.errors import RunError
from rl_tpu.rollout.arguments import server_environment, server_options, spare_other_models
from rl_tpu.rollout.process import server_arguments
from rl_tpu.rollout.responses import parse_json


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


def test_an_accelerator_gets_no_option_of_the_cpu_platform(model_dirs):
    cluster = {"device": "tpu", "chips_per_host": 4, "trainer_chips": 2, "rollout_chips": 2}
    config = make_config(model_dirs["tied"], cluster=cluster)
    assert "enable_deterministic_inference" not in server_options(config, model_dirs["tied"], 0)
    assert server_environment(config, model_dirs["tied"], [2, 3])["TPU_VISIBLE_CHIPS"] == "2,3"


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
