"""The schemas of known data sets: files as they are published, read by the presets of configs/, graded by the rewards."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prompt_sources import write_jsonl

from rl_tpu.config.compose import load_config
from rl_tpu.data import load_prompts, load_training_prompts, open_stream
from rl_tpu.rewards import find_reward


def dapo_row(question, answer, index):
    text = (
        "Solve the following math problem step by step. The last line of your response should be of the form Answer: "
        f"$Answer (without quotes) where $Answer is the answer to the problem.\n\n{question}\n\nRemember to put your "
        'answer on its own line after "Answer:".'
    )
    return {
        "data_source": "math_dapo",
        "prompt": [{"content": text, "role": "user"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": answer, "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": str(index)},
    }


GSM8K = {
    "question": "Natalia sold clips to 48 friends in April, and half as many in May. How many in all?",
    "answer": "In May she sold 48/2 = <<48/2=24>>24 clips.\nIn all 48+24 = <<48+24=72>>72 clips.\n#### 72",
}
MATH = {
    "problem": "What is $\\frac{1}{4} + \\frac{1}{4}$?",
    "level": "Level 1",
    "type": "Algebra",
    "solution": "It is $\\frac{2}{4} = \\boxed{\\frac{1}{2}}$.",
}
MATH_500 = {
    "problem": "Find $x$ if $2x = 6$.",
    "solution": "So $x = \\boxed{3}$.",
    "answer": "3",
    "subject": "Algebra",
    "level": 1,
    "unique_id": "test/algebra/1.json",
}
AIME25 = {"problem": "Find the sum of all integer bases $b > 9$.", "answer": "70", "id": "0"}
MMLU = {
    "question": "What is the capital of France?",
    "subject": "geography",
    "choices": ["Rome", "Paris", "Berlin", "Madrid"],
    "answer": 1,
}
FILES = {
    "dapo-math-17k.parquet": [dapo_row("What is 1 + 1?", "2", 0)] * 100 + [dapo_row("What is 2 + 2?", "4", 1)] * 100,
    "aime-2024.parquet": [dapo_row("How many minutes does the walk take?", "204", 60)] * 32,
    "gsm8k/main/train-00000-of-00001.parquet": [GSM8K],
    "gsm8k/main/test-00000-of-00001.parquet": [GSM8K | {"question": "How many then?", "answer": "So\n#### 1,072"}],
    "gsm8k/socratic/train-00000-of-00001.parquet": [GSM8K],
    "hendrycks_math/algebra/train-00000-of-00001.parquet": [MATH],
    "hendrycks_math/geometry/train-00000-of-00001.parquet": [MATH | {"problem": "What is $0.5$ as a fraction?"}],
    "hendrycks_math/algebra/test-00000-of-00001.parquet": [MATH],
    "MATH-500/test.jsonl": [MATH_500],
    "aime25/test.jsonl": [AIME25],
    "mmlu/all/test-00000-of-00001.parquet": [MMLU],
    "mmlu/all/auxiliary_train-00000-of-00001.parquet": [MMLU | {"answer": 0}],
}


@pytest.fixture
def configured(tmp_path, monkeypatch):
    """A configuration composed with the published files in RL_TPU_DATA."""
    for name, rows in FILES.items():
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        else:
            write_jsonl(path, rows)
    monkeypatch.setenv("RL_TPU_DATA", str(tmp_path))
    return lambda *overrides: load_config(["+experiment=qwen3_4b_dapo", "evaluation=none", *overrides])


def reward_of(prompt, response, name="math", **options):
    scored = find_reward(name, options)(response, prompt.answer, prompt)
    return scored if isinstance(scored, float) else sum(scored.values())


@pytest.mark.parametrize(
    ("preset", "expected", "ends_with", "asked"),
    [
        ("dapo_math_17k", ["2", "4"], 'after "Answer:".', "Answer: {}"),
        ("gsm8k", ["72"], "within \\boxed{}.", "\\boxed{{{}}}"),
        ("math", ["\\frac{1}{2}"] * 2, "within \\boxed{}.", "\\boxed{{{}}}"),
    ],
)
def test_training_presets(configured, byte_tokenizer, preset, expected, ends_with, asked):
    found = load_training_prompts(configured(f"data={preset}").data, byte_tokenizer)[""]
    assert [prompt.answer for prompt in found.prompts] == expected
    for prompt in found.prompts:
        assert prompt.messages[-1]["content"].endswith(ends_with)
        assert reward_of(prompt, "It is " + asked.format(prompt.answer)) == 1.0
        assert reward_of(prompt, "It is " + asked.format("17")) == 0.0


@pytest.mark.parametrize(
    ("preset", "reward", "expected", "response"),
    [
        ("aime24", "math", "204", "Answer: 204"),
        ("aime25", "math", "70", "\\boxed{70}"),
        ("math_500", "math", "3", "\\boxed{3}"),
        ("gsm8k", "math", "1,072", "\\boxed{1072}"),
        ("mmlu", "multiple_choice", "B", "France is in Europe.\nAnswer: B"),
    ],
)
def test_evaluation_presets(configured, byte_tokenizer, preset, reward, expected, response):
    (chosen,) = configured(f"evaluation={preset}").evaluation.sets.values()
    (prompt,) = load_prompts(chosen.source, byte_tokenizer, max_prompt_tokens=2000, too_long="fail").prompts
    assert prompt.answer == expected
    assert reward_of(prompt, response, reward) == 1.0
    assert reward_of(prompt, response.replace(expected, "").replace("1072", "5"), reward) == 0.0


def test_repeated_rows_of_the_published_files_are_counted(configured, byte_tokenizer):
    found = load_training_prompts(configured("data=dapo_math_17k").data, byte_tokenizer)[""]
    assert str(found) == "2 prompts (left out: 198 repeated)"


def test_mixture_preset(configured, byte_tokenizer):
    config = configured("data=maths_mixture", "+data/source@data.train.sources.sums=chain_sum", "evaluation=aime24")
    found = load_training_prompts(config.data, byte_tokenizer)
    assert {name: len(chosen) for name, chosen in found.items()} == {"gsm8k": 1, "math": 2, "dapo": 2, "sums": 2000}
    weights = {name: source.weight for name, source in config.data.train.sources.items()}
    assert weights == {"gsm8k": 1, "math": 3, "dapo": 6, "sums": 1}
    assert next(open_stream(found, config.data, config.seed)).source in weights
    assert list(config.prompt_sources) == [
        *(f"data.train.sources.{name}" for name in weights),
        "evaluation.sets.aime24.source",
    ]


def test_every_preset_of_a_source_is_used_by_these_tests(configured):
    from rl_tpu.config.compose import resource

    names = {path.stem for path in resource("configs/data/source").glob("*.yaml")}
    assert names == {"chain_sum", "dapo_math_17k", "gsm8k", "math", "math_500", "aime24", "aime25", "mmlu"}
