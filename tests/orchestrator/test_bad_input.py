"""What a user can get wrong in files: one clear line, exit code 2, and nothing was started."""

from __future__ import annotations

import json
import shutil

import pyarrow
import pyarrow.parquet
import pytest
import ray

from rl_tpu.config.compose import load_config
from rl_tpu.orchestrator.job import exit_code, run_job

ROW = {"prompt": "What is 1 + 1?", "answer": "2"}


@pytest.fixture
def start(tiny_model, tmp_path, capsys):
    """Start a job in this process; its exit code and what it said."""

    def start(*overrides: str) -> tuple[int, str]:
        fixed = [f"model.path={tiny_model}", "model.make=null", "evaluation=none", f"run_dir={tmp_path / 'run'}"]
        code = exit_code(lambda: run_job(load_config(["+experiment=quickstart", *fixed, *overrides])))
        assert not ray.is_initialized()
        assert not (tmp_path / "run").exists()
        return code, capsys.readouterr().err

    return start


def one_line(outcome: tuple[int, str], *words: str) -> None:
    code, message = outcome
    assert code == 2
    assert message.startswith("error: ")
    assert message.count("\n") == 1
    for word in words:
        assert word in message


def prompts(tmp_path, *lines: str, name: str = "prompts.jsonl") -> list[str]:
    path = tmp_path / name
    path.write_text("".join(line + "\n" for line in lines))
    return ["data.train.kind=file", f"data.train.path={path}", "reward.name=math"]


def test_missing_prompt_file(start, tmp_path):
    one_line(start("data.train.kind=file", f"data.train.path={tmp_path / 'none.jsonl'}"), "none.jsonl")


def test_unreadable_prompt_files(start, tmp_path):
    one_line(start(*prompts(tmp_path, json.dumps(ROW), "{not json")), "prompts.jsonl:2")
    one_line(start(*prompts(tmp_path, "PAR1 and nonsense", name="prompts.parquet")), "prompts.parquet")
    one_line(start("data.train.kind=file", f"data.train.path={tmp_path}"), str(tmp_path))


def test_a_row_without_the_field(start, tmp_path):
    rows = [json.dumps(ROW), json.dumps({"question": "1 + 1", "answer": "2"})]
    one_line(start(*prompts(tmp_path, *rows)), "prompts.jsonl:2", "'prompt'", "question")


def test_a_parquet_row_without_the_nested_field(start, tmp_path):
    path = tmp_path / "dapo.parquet"
    row = {"prompt": [{"role": "user", "content": "1 + 1"}], "reward_model": {"style": "rule"}}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    outcome = start(
        "data.train.kind=file", f"data.train.path={path}", "data.train.answer_field=reward_model.ground_truth"
    )
    one_line(outcome, "dapo.parquet", "reward_model.ground_truth", "style")


def test_an_empty_prompt_set(start, tmp_path):
    one_line(start(*prompts(tmp_path)), "prompts.jsonl")


def test_a_null_answer(start, tmp_path):
    one_line(start(*prompts(tmp_path, json.dumps(ROW | {"answer": None}))), "prompts.jsonl:1", "answer")


def test_a_prompt_longer_than_the_budget(start, tmp_path):
    long = prompts(tmp_path, json.dumps(ROW), json.dumps({"prompt": "why? " * 200, "answer": "2"}))
    one_line(start(*long, "data.too_long=fail"), "prompts.jsonl:2", "48")


def test_model_directories(start, tiny_model, tmp_path):
    one_line(start(f"model.path={tmp_path / 'nowhere'}"), "nowhere")
    for gone, word in (
        ("tokenizer.json", "tokenizer"),
        ("model.safetensors", "safetensors"),
        ("config.json", "config.json"),
    ):
        broken = tmp_path / f"without-{word}"
        shutil.copytree(tiny_model, broken)
        for file in broken.glob("tokenizer*" if word == "tokenizer" else gone):
            file.unlink()
        one_line(start(f"model.path={broken}"), str(broken), word)


def test_names(start):
    one_line(start("reward.name=mth"), "mth", "math")
    one_line(start("environment.name=singleturn"), "singleturn", "single_turn")
    one_line(start("data.train.task=chain_sums"), "chain_sums", "chain_sum")
    one_line(start("cluster.device=gpu"), "gpu", "cpu, cuda, tpu")
    one_line(start("weight_sync.transport=carrier_pigeon"), "carrier_pigeon", "shared_memory")


def test_options_of_a_transport(start):
    one_line(start("+weight_sync.options.slot=1"), "weight_sync.options.slot", "shared_memory", "slots")
    one_line(start("+weight_sync.options.rank=1"), "weight_sync.options.rank is no option")
    one_line(start("weight_sync.transport=disk"), "weight_sync.options.url is required by transport disk")


def test_resume_from_what_is_no_checkpoint(start, tmp_path):
    one_line(start(f"resume={tmp_path}"), str(tmp_path))


def test_a_context_beyond_the_model(start):
    one_line(
        start("rollout.context_tokens=100000", "rollout.kv_cache_tokens=200000"), "100000", "max_position_embeddings"
    )


def test_more_cores_than_the_machine_has(start):
    one_line(start("cluster.cpus_per_chip=500"), "needs 1000 CPU", "trainer_chips 1 + rollout_chips 1")
