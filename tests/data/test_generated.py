"""Problems from reasoning-gym: seeded, split by their text, as many distinct ones as asked for."""

import pytest

from rl_tpu.config.schema import PromptSourceConfig
from rl_tpu.data import load_prompts
from rl_tpu.errors import UserError

SMALL_SUMS = {"min_terms": 2, "max_terms": 2, "min_digits": 1, "max_digits": 1}
"""10 x 10 numbers and two signs: 200 problems in all."""


def load(tokenizer, **options):
    config = PromptSourceConfig(**{"kind": "reasoning_gym", "task": "chain_sum", **options})
    return load_prompts(config, tokenizer, max_prompt_tokens=500, too_long="fail")


def questions(found):
    return [prompt.metadata["question"] for prompt in found.prompts]


def test_seeded_and_a_prefix_of_a_larger_set(byte_tokenizer):
    first = load(byte_tokenizer, size=20)
    assert first == load(byte_tokenizer, size=20)
    assert questions(load(byte_tokenizer, size=700))[:20] == questions(first)
    assert questions(load(byte_tokenizer, size=20, seed=5)) != questions(first)
    assert len({prompt.id for prompt in load(byte_tokenizer, size=700).prompts}) == 700


def test_answers_are_right(byte_tokenizer):
    for prompt in load(byte_tokenizer, size=50).prompts:
        assert eval(prompt.metadata["notes"]["expression"]) == int(prompt.answer)


def test_whole_small_task_splits_into_disjoint_sides(byte_tokenizer):
    everything = load(byte_tokenizer, size=200, task_options=SMALL_SUMS)
    assert len(set(questions(everything))) == 200
    with pytest.raises(UserError, match="has only 200 distinct problems"):
        load(byte_tokenizer, size=201, task_options=SMALL_SUMS)

    with pytest.raises(UserError, match=r"only (\d+) distinct problems on its side 'held_out'") as error:
        load(byte_tokenizer, size=150, task_options=SMALL_SUMS, part="held_out")
    held_out_size = int(str(error.value).split("only ")[1].split()[0])
    held_out = load(byte_tokenizer, size=held_out_size, task_options=SMALL_SUMS, part="held_out", seed=1)
    train = load(byte_tokenizer, size=200 - held_out_size, task_options=SMALL_SUMS, part="train", seed=2)
    assert set(questions(held_out)) | set(questions(train)) == set(questions(everything))
    assert not set(questions(held_out)) & set(questions(train))


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"task": "chain_sums"}, "unknown reasoning_gym task 'chain_sums', did you mean 'chain_sum'"),
        ({"task_options": {"min_term": 2}}, "no option 'min_term', did you mean 'min_terms'"),
        ({"task_options": {"min_terms": 5, "max_terms": 2}}, "refuses options"),
        ({"task_options": {"min_terms": "two"}}, "chain_sum"),
        ({"task_options": {"size": 3}}, "set size of the prompt source"),
        ({"task": None}, "task (for example chain_sum)"),
        ({"size": None}, "size are required"),
    ],
)
def test_bad_settings_are_one_line(byte_tokenizer, options, expected):
    with pytest.raises(UserError) as error:
        load(byte_tokenizer, **{"size": 3, **options})
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
