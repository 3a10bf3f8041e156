"""The mathematics reward beside Math-Verify's own tests, and on answers that must not be rewarded."""

import json
from collections import Counter
from pathlib import Path

import pytest

from rl_tpu.rewards.mathematics import score
from rl_tpu.types import Prompt

PROMPT = Prompt("p", (1,), None)


def rows(name):
    lines = (Path(__file__).parent / name).read_text().splitlines()
    return [json.loads(line) for line in lines]


TRIPLES = rows("math_verify_triples.jsonl")[1:]  # the first line names their source and licence
NEGATIVES = rows("negatives.jsonl")


def agreement(triples, answer_format):
    """Share of the triples on which both say the same, and those on which they do not."""
    wrong = [
        triple
        for triple in triples
        if score(triple["pred"], triple["gold"], PROMPT, answer_format=answer_format) != triple["expected"]
    ]
    return 1 - len(wrong) / len(triples), wrong


def test_agrees_with_math_verifys_own_positive_triples():
    positive = [triple for triple in TRIPLES if triple["expected"]]
    assert len(positive) == 232
    share, wrong = agreement(positive, "free")
    assert share >= 0.95, wrong


def test_agrees_with_its_negative_triples():
    negative = [triple for triple in TRIPLES if not triple["expected"]]
    assert len(negative) == 43
    share, wrong = agreement(negative, "free")
    assert share >= 0.95, wrong


def test_agrees_on_boxed_answers_by_the_default_format():
    boxed = [triple for triple in TRIPLES if r"\\boxed" not in triple["pred"] and r"\boxed{" in triple["pred"]]
    assert len(boxed) > 80
    share, wrong = agreement(boxed, "any")
    assert share >= 0.95, wrong


def test_there_are_enough_negatives_of_every_kind():
    assert len(NEGATIVES) >= 150
    assert min(Counter(row["category"] for row in NEGATIVES).values()) >= 10


def response(row, side):
    piece, times = row.get("padding", ("", 0))
    return row[side].replace("{padding}", piece * times)


@pytest.mark.timeout(60)
@pytest.mark.parametrize(("side", "expected"), [("wrong", 0.0), ("right", 1.0)])
@pytest.mark.parametrize("category", sorted({row["category"] for row in NEGATIVES}))
def test_negatives(category, side, expected):
    """`wrong` earns nothing; its `right` twin is accepted, so a grader that rejects everything fails too."""
    chosen = [row for row in NEGATIVES if row["category"] == category]
    graded = {response(row, side): score(response(row, side), row["answer"], PROMPT) for row in chosen}
    assert {text[:200]: reward for text, reward in graded.items() if reward != expected} == {}
