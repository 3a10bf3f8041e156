"""Several sources by weight: shares, epochs, a position that survives, and no problem twice."""

import json
from collections import Counter
from itertools import islice

import numpy as np
import pytest
from prompt_sources import answers, write_jsonl

from rl_tpu.config.schema import DataConfig
from rl_tpu.data import MixtureStream, PromptSet, load_training_prompts, open_stream
from rl_tpu.data.problem import fingerprint
from rl_tpu.errors import UserError
from rl_tpu.types import Prompt

SIZES = {"sums": 5, "logic": 3, "maths": 11}
WEIGHTS = {"sums": 1.0, "logic": 2.5, "maths": 0.5}
PROMPTS = {
    name: [Prompt(id=f"{name}/{n}", ids=(n,), answer=n, source=name) for n in range(size)]
    for name, size in SIZES.items()
}


def mixture(**changes):
    return MixtureStream(**{"prompts": PROMPTS, "weights": WEIGHTS, "seed": 3} | changes)


def draw(stream, count):
    return [(prompt.source, prompt.answer) for prompt in islice(stream, count)]


def test_shares_follow_the_weights():
    count = 40_000
    drawn = Counter(source for source, _ in draw(mixture(), count))
    for name, weight in WEIGHTS.items():
        share = weight / sum(WEIGHTS.values())
        assert abs(drawn[name] - count * share) < 4 * np.sqrt(count * share * (1 - share))


def test_choices_are_independent_of_each_other():
    names = [source for source, _ in draw(mixture(), 40_000)]
    pairs = Counter(zip(names[::2], names[1::2], strict=True))
    shares = {name: weight / sum(WEIGHTS.values()) for name, weight in WEIGHTS.items()}
    expected = {(a, b): 20_000 * shares[a] * shares[b] for a in shares for b in shares}
    chi_squared = sum((pairs[pair] - mean) ** 2 / mean for pair, mean in expected.items())
    assert chi_squared < 26.1  # 8 degrees of freedom, one in a thousand


def test_every_source_has_its_own_epochs_and_order():
    drawn = draw(mixture(), 3000)
    for name, size in SIZES.items():
        own = [answer for source, answer in drawn if source == name]
        epochs = [own[start : start + size] for start in range(0, len(own) - size, size)]
        assert all(sorted(epoch) == list(range(size)) for epoch in epochs)
        assert len({tuple(epoch) for epoch in epochs}) > min(4, len(epochs) // 2)
    same = {name: [Prompt(id=f"{name}{n}", ids=(n,), answer=n, source=name) for n in range(20)] for name in "ab"}
    drawn = draw(mixture(prompts=same, weights={"a": 1, "b": 1}), 200)
    assert [n for name, n in drawn if name == "a"][:20] != [n for name, n in drawn if name == "b"][:20]


def test_unshuffled_sources_keep_their_order():
    own = [answer for source, answer in draw(mixture(shuffle=False), 100) if source == "sums"]
    assert own == [n % 5 for n in range(len(own))]


@pytest.mark.parametrize("position", [0, 1, 37, 1023, 1024, 1025, 2500])
def test_resumed_equals_uninterrupted(position):
    whole = draw(mixture(), 3000)
    first = mixture()
    before = draw(first, position)
    second = mixture(prompts=dict(reversed(PROMPTS.items())))  # the order of the sources does not matter
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert second.epochs == first.epochs
    assert before + draw(second, 3000 - position) == whole


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"weights": WEIGHTS | {"maths": 1.0}}, "this mixture: shares"),
        ({"seed": 4}, "this mixture: seed"),
        ({"shuffle": False}, "source 'logic': shuffle"),
        ({"prompts": PROMPTS | {"maths": PROMPTS["maths"][:-1]}}, "source 'maths': size was 11, now it is 10"),
        ({"prompts": {"a": PROMPTS["maths"]}, "weights": {"a": 1}}, "shares"),
    ],
)
def test_a_position_of_another_mixture_is_refused(changes, words):
    other = mixture(**changes)
    untouched = other.state_dict()
    with pytest.raises(UserError, match=words):
        other.load_state_dict(mixture().state_dict())
    assert other.state_dict() == untouched


def test_the_first_source_that_is_used_up_ends_a_bounded_stream():
    drawn = draw(mixture(epochs=2), 10**6)
    counts = Counter(drawn)
    assert max(counts.values()) == 2
    used_up = [name for name, size in SIZES.items() if sum(counts[name, n] for n in range(size)) == 2 * size]
    assert len(used_up) >= 1
    stream = mixture(epochs=2)
    assert draw(stream, len(drawn)) == drawn == draw(mixture(), len(drawn))
    for _ in range(2):
        with pytest.raises(StopIteration):
            next(stream)


def sources(tmp_path, **files):
    """A configuration of a mixture, its files written."""
    train = {
        name: {"kind": "file", "path": str(write_jsonl(tmp_path / f"{name}.jsonl", rows)), "weight": weight}
        for name, (weight, rows) in files.items()
    }
    return {"kind": "mixture", "sources": train}


def row(text, answer):
    return {"prompt": text, "answer": answer}


def test_prompts_know_their_source_and_a_problem_stays_in_the_first(tmp_path, byte_tokenizer):
    first = (1, [row("What is 1 + 1?", "2"), row("What is 2 + 2?", "4")])
    second = (3, [row("what  is 1 + 1?\n", 2), row("What is 3 + 3?", "6")])
    config = DataConfig(train=sources(tmp_path, first=first, second=second))
    found = load_training_prompts(config, byte_tokenizer)
    assert {name: answers(chosen) for name, chosen in found.items()} == {"first": ["2", "4"], "second": ["6"]}
    assert found["second"].left_out == {"also in source first": 1}
    assert [(p.id, p.source) for p in found["second"].prompts] == [("second/second.jsonl:2", "second")]

    stream = open_stream(found, config, seed=0)
    drawn = Counter(prompt.source for prompt in islice(stream, 4000))
    assert abs(drawn["second"] - 3000) < 4 * np.sqrt(4000 * 0.75 * 0.25)
    again = open_stream(found, config, seed=0)
    again.load_state_dict(stream.state_dict())
    assert [p.id for p in islice(again, 50)] == [p.id for p in islice(stream, 50)]


def test_training_prompts_that_are_evaluated_are_left_out(tmp_path, byte_tokenizer):
    training = write_jsonl(tmp_path / "t.jsonl", [row("A  Question\n", 1), row("another", 2), row("x - 1", 3)])
    train = {"kind": "file", "path": str(training)}
    evaluated = {"aime": PromptSet(fingerprints={fingerprint("a question"), fingerprint("x + 1")})}
    found = load_training_prompts(DataConfig(train=train), byte_tokenizer, evaluated)[""]
    assert answers(found) == [2, 3]
    assert str(found) == "2 prompts (left out: 1 also in evaluation set aime)"
    kept = load_training_prompts(DataConfig(train=train, exclude_evaluation=False), byte_tokenizer, evaluated)[""]
    assert answers(kept) == [1, 2, 3]
    assert {prompt.source for prompt in kept.prompts} == {""}

    everything = {"aime": PromptSet(fingerprints=kept.fingerprints)}
    with pytest.raises(UserError, match=r"0 prompts .left out: 3 also in evaluation set aime"):
        load_training_prompts(DataConfig(train=train), byte_tokenizer, everything)


def test_a_mixture_without_sources(byte_tokenizer):
    with pytest.raises(UserError, match="sources are required for kind=mixture"):
        load_training_prompts(DataConfig(train={"kind": "mixture"}), byte_tokenizer)
