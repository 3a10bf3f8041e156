"""Prompt files: both schemas, and one clear line for every way a file can be bad."""

import gzip

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prompt_sources import answers, load_source, write_jsonl

from rl_tpu.config.schema import PromptSourceConfig
from rl_tpu.data import load_prompts
from rl_tpu.errors import UserError

DAPO_ROWS = [
    {
        "data_source": "math_dapo",
        "prompt": [{"role": "user", "content": f"What is {n} + 1? Put the answer on the last line after Answer:"}],
        "ability": "MATH",
        "reward_model": {"ground_truth": str(n + 1), "style": "rule-lighteval/MATH_v2"},
        "extra_info": {"index": f"id-{n}"},
    }
    for n in range(5)
]


def load(path, tokenizer, **options):
    return load_source(tokenizer, path=str(path), **{"max_prompt_tokens": 200, **options})


def refused(path, tokenizer, **options):
    with pytest.raises(UserError) as error:
        load(path, tokenizer, **options)
    message = str(error.value)
    assert "\n" not in message
    assert str(path) in message
    return message


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_dapo_schema(tmp_path, byte_tokenizer, suffix):
    path = tmp_path / f"dapo{suffix}"
    if suffix == ".jsonl":
        write_jsonl(path, DAPO_ROWS)
    else:
        pq.write_table(pa.Table.from_pylist(DAPO_ROWS), path)
    found = load(path, byte_tokenizer, answer_field="reward_model.ground_truth")
    assert [prompt.answer for prompt in found.prompts] == ["1", "2", "3", "4", "5"]
    first = found.prompts[0]
    assert first.id == f"dapo{suffix}:1"
    assert list(first.messages) == DAPO_ROWS[0]["prompt"]
    assert first.metadata["data_source"] == "math_dapo"
    assert first.metadata["extra_info"] == {"index": "id-0"}


def test_ids_are_those_of_the_tokenizers_own_chat_rendering(tmp_path, byte_tokenizer):
    rows = [{"prompt": "2+2? é", "answer": 4}, {"prompt": "$\\frac{1}{2}$ {prompt}?", "answer": 0.5}]
    path = write_jsonl(tmp_path / "plain.jsonl", rows)
    found = load(path, byte_tokenizer, system_prompt="Be brief.", template="Q: {prompt} \\boxed{}")
    for row, prompt in zip(rows, found.prompts, strict=True):
        messages = [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Q: " + row["prompt"] + " \\boxed{}"},
        ]
        expected = byte_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
        assert list(prompt.ids) == expected
        assert byte_tokenizer.decode(prompt.ids).endswith("<|im_start|>assistant\n")
        assert prompt.answer == row["answer"]
        assert prompt.metadata == {}


def test_repeated_rows_are_one_problem_but_another_answer_is_another(tmp_path, byte_tokenizer):
    rows = [{"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "1"}, {"prompt": "a", "answer": "2"}]
    found = load(write_jsonl(tmp_path / "p.jsonl", rows), byte_tokenizer)
    assert [prompt.answer for prompt in found.prompts] == ["1", "2"]
    assert found.left_out == {"repeated": 1}


def test_size_takes_the_first_rows(tmp_path, byte_tokenizer):
    rows = [{"prompt": f"q{n}", "answer": n} for n in range(10)]
    found = load(write_jsonl(tmp_path / "p.jsonl", rows), byte_tokenizer, size=3)
    assert [prompt.answer for prompt in found.prompts] == [0, 1, 2]


def test_sides_of_the_split_are_disjoint_and_whole(tmp_path, byte_tokenizer):
    rows = [{"prompt": f"problem {n}", "answer": n} for n in range(500)]
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    other_order = write_jsonl(tmp_path / "reversed.jsonl", rows[::-1])
    train = {prompt.answer for prompt in load(path, byte_tokenizer, part="train").prompts}
    held_out = {prompt.answer for prompt in load(path, byte_tokenizer, part="held_out").prompts}
    assert train | held_out == set(range(500))
    assert not train & held_out
    assert 70 <= len(held_out) <= 130  # a fifth of 500, within more than three standard deviations
    assert {prompt.answer for prompt in load(other_order, byte_tokenizer, part="held_out").prompts} == held_out


def test_too_long_prompts_are_skipped_and_counted_or_refused(tmp_path, byte_tokenizer):
    rows = [{"prompt": "x" * length, "answer": 0} for length in (10, 300, 11)]
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    shortest = len(load(path, byte_tokenizer).prompts[0].ids)
    found = load(path, byte_tokenizer, max_prompt_tokens=shortest)
    assert (len(found), found.left_out) == (1, {f"longer than {shortest} tokens": 2})
    message = refused(path, byte_tokenizer, max_prompt_tokens=shortest + 1, too_long="fail")
    assert "p.jsonl:2" in message
    assert str(shortest + 290) in message
    assert "0 prompts (left out: 3 longer than 5 tokens)" in refused(path, byte_tokenizer, max_prompt_tokens=5)


def test_gzip(tmp_path, byte_tokenizer):
    lines = b"".join(b'{"prompt": "question %d", "answer": %d}\n' % (n, n) for n in range(1000))
    path = tmp_path / "p.jsonl.gz"
    path.write_bytes(gzip.compress(lines))
    found = load(path, byte_tokenizer)
    assert answers(found) == list(range(1000))
    assert found.prompts[41].id == "p.jsonl.gz:42"
    path.write_bytes(path.read_bytes()[:-20])
    assert "broken gzip file after line" in refused(path, byte_tokenizer)
    path.write_bytes(lines)
    assert "broken gzip file after line 0" in refused(path, byte_tokenizer)


def test_byte_order_mark_and_blank_lines_are_no_problem(tmp_path, byte_tokenizer):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a", "answer": 1}\n\n  \n{"prompt": "b", "answer": 2}')
    assert [prompt.id for prompt in load(path, byte_tokenizer).prompts] == ["p.jsonl:1", "p.jsonl:4"]


GOOD = b'{"prompt": "a", "answer": 1}\n'


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"{broken\n", ["bad.jsonl:2", "not JSON"]),
        (b"[1, 2]\n", ["bad.jsonl:2", "object on one line", "list"]),
        (b'{"prompt": "\xff", "answer": 1}\n', ["bad.jsonl:2", "UTF-8"]),
        (
            b'{"promt": "a", "answer": 1}\n',
            ["bad.jsonl:2", "no field 'prompt'", "did you mean 'promt'", "promt, answer"],
        ),
        (b'{"prompt": "a", "anser": 1}\n', ["bad.jsonl:2", "no field 'answer'", "prompt, anser"]),
        (b'{"prompt": "a", "answer": null}\n', ["bad.jsonl:2", "null"]),
        (b'{"prompt": null, "answer": 1}\n', ["bad.jsonl:2", "NoneType"]),
        (b'{"prompt": 3, "answer": 1}\n', ["bad.jsonl:2", "int"]),
        (b'{"prompt": " ", "answer": 1}\n', ["bad.jsonl:2", "empty"]),
        (b'{"prompt": [], "answer": 1}\n', ["bad.jsonl:2", "empty"]),
        (b'{"prompt": [{"role": "user"}], "answer": 1}\n', ["bad.jsonl:2", "role and content"]),
        (b'{"prompt": [{"role": "user", "content": null}], "answer": 1}\n', ["bad.jsonl:2", "role and content"]),
        (b'{"prompt": "\\ud800", "answer": 1}\n', ["bad.jsonl:2", "surrogate"]),
        (b'{"prompt": [{"role": "system", "content": "\\ud800"}], "answer": 1}\n', ["bad.jsonl:2", "surrogate"]),
        (b"[" * 100000 + b"\n", ["bad.jsonl:2", "not JSON"]),
    ],
)
def test_bad_line_is_named(tmp_path, byte_tokenizer, content, expected):
    path = tmp_path / "bad.jsonl"
    path.write_bytes(GOOD + content)
    message = refused(path, byte_tokenizer)
    for part in expected:
        assert part in message


def test_missing_nested_field_names_what_is_there(tmp_path, byte_tokenizer):
    path = write_jsonl(tmp_path / "bad.jsonl", DAPO_ROWS)
    message = refused(path, byte_tokenizer, answer_field="reward_model.ground_thruth")
    assert "bad.jsonl:1" in message
    assert "did you mean 'ground_truth'" in message
    assert "no fields" in refused(path, byte_tokenizer, answer_field="data_source.x")


def test_bad_files(tmp_path, byte_tokenizer):
    assert "no prompt file" in refused(tmp_path / "none.jsonl", byte_tokenizer)
    assert "has no .jsonl" in refused(tmp_path, byte_tokenizer)
    (tmp_path / "p.csv").write_text("a,b\n")
    assert ".jsonl, .jsonl.gz, .parquet, .arrow files, not '.csv'" in refused(tmp_path / "p.csv", byte_tokenizer)
    (tmp_path / "empty.jsonl").write_text("")
    assert "0 prompts" in refused(tmp_path / "empty.jsonl", byte_tokenizer)
    (tmp_path / "corrupt.parquet").write_bytes(b"PAR1 this is no parquet file PAR1")
    assert "Parquet" in refused(tmp_path / "corrupt.parquet", byte_tokenizer)
    (tmp_path / "empty.parquet").write_bytes(b"")
    assert "Parquet" in refused(tmp_path / "empty.parquet", byte_tokenizer)


def test_truncated_parquet(tmp_path, byte_tokenizer):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": f"q{n}", "answer": n} for n in range(1000)]), path)
    path.write_bytes(path.read_bytes()[:-100])
    assert "Parquet" in refused(path, byte_tokenizer)


def test_parquet_values_that_python_does_not_know(tmp_path, byte_tokenizer):
    path, row = tmp_path / "p.parquet", {"prompt": ["?"], "answer": ["1"]}
    pq.write_table(pa.table(row | {"day": pa.array([2**42], pa.timestamp("s"))}), path)
    assert "Parquet file (after row 0): date value out of range" in refused(path, byte_tokenizer)
    two_bytes = [None, pa.py_buffer(b"\0\0\0\0\2\0\0\0"), pa.py_buffer(b"\xff\xfe")]
    pq.write_table(pa.table(row | {"prompt": pa.Array.from_buffers(pa.string(), 1, two_bytes)}), path)
    assert "Parquet file (after row 0): 'utf-8' codec" in refused(path, byte_tokenizer)


def test_parquet_row_is_named(tmp_path, byte_tokenizer):
    path = tmp_path / "p.parquet"
    pq.write_table(pa.Table.from_pylist([{"prompt": "a", "answer": "1"}, {"prompt": "b", "answer": None}]), path)
    assert "p.parquet:2" in refused(path, byte_tokenizer)


def test_file_that_cannot_be_read(tmp_path, byte_tokenizer):
    path = tmp_path / "p.jsonl"
    path.symlink_to("/proc/self/mem")  # opens, then fails to read, for root too
    assert "cannot read" in refused(path, byte_tokenizer)


def test_template_and_tokenizer_faults(tmp_path, byte_tokenizer):
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD)
    with pytest.raises(UserError, match=r"\{prompt\}"):
        load(path, byte_tokenizer, template="no place")
    with pytest.raises(UserError, match="path is required"):
        load_prompts(PromptSourceConfig(kind="file"), byte_tokenizer, max_prompt_tokens=9, too_long="skip")
    with pytest.raises(UserError, match="nothing is on the side"):
        load(path, byte_tokenizer, part="held_out", held_out_share=0.0)


class WithoutTemplate:
    chat_template = None
    name_or_path = "some/base-model"


def test_tokenizer_without_template(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD)
    with pytest.raises(UserError, match="some/base-model has no chat template"):
        load(path, WithoutTemplate())


def test_template_that_refuses_a_role(tmp_path, byte_tokenizer, monkeypatch):
    template = "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system role') }}{% endif %}x"
    monkeypatch.setattr(byte_tokenizer, "chat_template", template)
    path = tmp_path / "p.jsonl"
    path.write_bytes(GOOD)
    assert "no system role" in refused(path, byte_tokenizer, system_prompt="hello")
