"""From fields of a row to question, answer and pass rate."""

import pytest
from prompt_sources import answers, load_source, write_jsonl

from rl_tpu.errors import UserError


def refused(tokenizer, **options):
    with pytest.raises(UserError) as error:
        load_source(tokenizer, **options)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    ("pattern", "field", "expected"),
    [
        (r"####\s*(.*)", "6 / 2 = <<6/2=3>>3\n#### 3 is wrong\nso\n#### 1,234 ", "1,234"),
        (r"\d+", "first 1, then 22", "22"),
        (r"(?:is|are) (\w+)", "it is a, they are b", "b"),
        ("boxed", r"so $\boxed{1}$, no: $\boxed{\frac{1}{2}}$.", r"\frac{1}{2}"),
        ("boxed", r"\boxed{ \left\{ 1, 2 \right\} }", r"\left\{ 1, 2 \right\}"),
        ("boxed", r"a \boxed{never closes, \boxed{2}", "2"),
    ],
)
def test_answer_patterns(tmp_path, byte_tokenizer, pattern, field, expected):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "?", "answer": field}])
    assert answers(load_source(byte_tokenizer, path=str(path), answer_pattern=pattern)) == [expected]


@pytest.mark.parametrize(
    ("pattern", "field", "words"),
    [
        ("####(.*)", "no mark", ["p.jsonl:1", "'####(.*)' finds no answer in field 'answer': 'no mark'"]),
        ("####(.*)", "#### ", ["p.jsonl:1", "finds no answer"]),
        ("(a)|b", "b", ["p.jsonl:1", "finds no answer"]),
        ("boxed", r"\boxed 3", ["p.jsonl:1", "'boxed' finds no answer"]),
        ("boxed", 3, ["p.jsonl:1", "needs text", "int"]),
        ("(", "x", ["answer_pattern '(' is no regular expression"]),
    ],
)
def test_an_answer_that_is_not_found_is_named(tmp_path, byte_tokenizer, pattern, field, words):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "?", "answer": field}])
    message = refused(byte_tokenizer, path=str(path), answer_pattern=pattern)
    for word in words:
        assert word in message


CHOICES = {"choices_field": "options.text", "template": "{prompt}\n{choices}\nLetter?"}


def test_choices_become_lettered_lines_and_the_answer_a_letter(tmp_path, byte_tokenizer):
    rows = [
        {"prompt": f"{{choices}} {answer}?", "options": {"text": ["one", "B", "{prompt}"]}, "answer": answer}
        for answer in (0, 2, "B", "one", "C")
    ]
    found = load_source(byte_tokenizer, path=str(write_jsonl(tmp_path / "p.jsonl", rows)), **CHOICES)
    assert answers(found) == ["A", "C", "B", "A", "C"]
    assert found.prompts[0].messages[-1]["content"] == "{choices} 0?\nA. one\nB. B\nC. {prompt}\nLetter?"


@pytest.mark.parametrize(
    ("options", "answer", "words"),
    [
        (["one", "two"], 2, ["p.jsonl:1", "position from 0 to 1, a letter from A to B", "it is 2"]),
        (["one", "two"], -1, ["p.jsonl:1"]),
        (["one", "two"], True, ["p.jsonl:1", "True"]),
        (["one", "two"], "three", ["p.jsonl:1", "three"]),
        (["one", "two"], ["A"], ["p.jsonl:1", "['A']"]),
        (["one", "one"], "one", ["p.jsonl:1", "text of one choice"]),
        (["one"], 0, ["p.jsonl:1", "2 to 26 texts"]),
        (["one", 2], 0, ["p.jsonl:1", "2 to 26 texts"]),
        ("one", 0, ["p.jsonl:1", "2 to 26 texts"]),
    ],
)
def test_unfit_choices_are_named(tmp_path, byte_tokenizer, options, answer, words):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "?", "options": {"text": options}, "answer": answer}])
    message = refused(byte_tokenizer, path=str(path), **CHOICES)
    for word in words:
        assert word in message


def test_pass_rates_as_shares_or_scores(tmp_path, byte_tokenizer):
    rates = [0, 0.2, [0, 0, 1, 1], [True, False, False, False], 0.8, 1.0, [1, 1]]
    rows = [{"prompt": f"question {n}", "answer": n, "solved": {"by_4b": rate}} for n, rate in enumerate(rates)]
    path = str(write_jsonl(tmp_path / "p.jsonl", rows))
    rated = {"path": path, "pass_rate_field": "solved.by_4b"}
    found = load_source(byte_tokenizer, **rated, min_pass_rate=0.2, max_pass_rate=0.8)
    assert answers(found) == [1, 2, 3, 4]
    assert found.left_out == {"outside the pass rates": 3}
    assert answers(load_source(byte_tokenizer, **rated)) == list(range(7))
    assert answers(load_source(byte_tokenizer, **rated, max_pass_rate=0.5, size=3)) == [0, 1, 2]
    assert "0 prompts (left out: 7 outside" in refused(byte_tokenizer, **rated, min_pass_rate=0.9, max_pass_rate=0.95)


@pytest.mark.parametrize("rate", [None, "0.5", 1.5, -0.1, [], [0.5, None], [2], float("nan")])
def test_what_is_no_pass_rate_is_named(tmp_path, byte_tokenizer, rate):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "?", "answer": 1, "rate": rate}])
    message = refused(byte_tokenizer, path=str(path), pass_rate_field="rate")
    assert "p.jsonl:1: the pass rate (field 'rate')" in message


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"min_pass_rate": 0.1}, "need pass_rate_field"),
        ({"pass_rate_field": "r", "min_pass_rate": 0.5, "max_pass_rate": 0.4}, "min_pass_rate 0.5 exceeds"),
        ({"choices_field": "c"}, "choices_field and {choices}"),
        ({"template": "{prompt} {choices}"}, "choices_field and {choices}"),
        ({"path": []}, "path is required"),
    ],
)
def test_settings_that_do_not_fit_together(byte_tokenizer, options, expected):
    assert expected in refused(byte_tokenizer, **{"path": "p.jsonl", **options})
