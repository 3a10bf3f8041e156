"""Rows that change how they are sampled: what is taken, and what is refused before anything starts."""

from __future__ import annotations

import json

import pytest

from rl_tpu.config.schema import PromptSourceConfig
from rl_tpu.data import load_prompts
from rl_tpu.data.sampling import check_training_sampling
from rl_tpu.errors import UserError
from rl_tpu.types import Prompt


def load(tmp_path, tokenizer, *samplings, field="sampling"):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": f"{i} + 1 =", "answer": "2", "sampling": each} for i, each in enumerate(samplings)]
    path.write_text("\n".join(map(json.dumps, rows)))
    config = PromptSourceConfig(kind="file", path=str(path), sampling_field=field)
    return load_prompts(config, tokenizer, max_prompt_tokens=200, too_long="fail").prompts


def test_each_row_has_its_own(tmp_path, byte_tokenizer):
    first, second, third = load(
        tmp_path,
        byte_tokenizer,
        {"max_response_tokens": 7, "stop_token_ids": [3, 4]},
        None,
        {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 9, "max_response_tokens": None},
    )
    assert first.sampling == {"max_response_tokens": 7, "stop_token_ids": (3, 4)}
    assert second.sampling == {}
    assert third.sampling == {"temperature": 0.5, "top_p": 0.9, "top_k": 4, "min_p": 0.1, "seed": 9}


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (5, r"rows.jsonl:2: the sampling \(field 'sampling'\) must be an object"),
        ({"temprature": 1.0}, r"rows.jsonl:2: sampling.temprature is no setting of sampling.*temperature"),
        (
            {"max_response_tokens": 0},
            "rows.jsonl:2: sampling.max_response_tokens: .*greater than or equal to 1, it is 0",
        ),
        ({"top_p": "high"}, "rows.jsonl:2: sampling.top_p: .*it is 'high'"),
        ({"seed": 2**70}, "rows.jsonl:2: sampling.seed: Input should be less than 4294967296"),
    ],
)
def test_what_is_wrong_is_named_with_its_row(tmp_path, byte_tokenizer, value, message):
    with pytest.raises(UserError, match=message):
        load(tmp_path, byte_tokenizer, {}, value)


def test_training_has_one_distribution_and_one_longest_answer():
    check_training_sampling([Prompt("p", (1,), "", sampling={"max_response_tokens": 8, "stop_token_ids": (2,)})], 8)
    with pytest.raises(UserError, match="prompt 'p' sets its own temperature: in training"):
        check_training_sampling([Prompt("p", (1,), "", sampling={"temperature": 0.5})], 8)
    with pytest.raises(UserError, match=r"prompt 'p' wants max_response_tokens 9, rollout\.max_response_tokens is 8"):
        check_training_sampling([Prompt("p", (1,), "", sampling={"max_response_tokens": 9})], 8)
