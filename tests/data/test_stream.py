"""The order of prompts, and a position that survives a restart."""

import json

import pytest

from rl_tpu.data import PromptStream
from rl_tpu.errors import UserError
from rl_tpu.types import Prompt

PROMPTS = [Prompt(id=f"p{n}", ids=(n,), answer=n) for n in range(7)]


def draw(stream, count):
    return [next(stream).answer for _ in range(count)]


def test_every_epoch_is_a_permutation_and_a_new_one():
    stream = PromptStream(PROMPTS, seed=3)
    epochs = [draw(stream, 7) for _ in range(20)]
    assert all(sorted(epoch) == list(range(7)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 15
    assert stream.epoch == 20
    assert epochs[0] == draw(PromptStream(PROMPTS, seed=3), 7)
    assert epochs[0] != draw(PromptStream(PROMPTS, seed=4), 7)


def test_unshuffled_is_the_files_order():
    assert draw(PromptStream(PROMPTS, shuffle=False), 16) == [*range(7), *range(7), 0, 1]


def test_a_bound_on_epochs_ends_the_stream():
    stream = PromptStream(PROMPTS, seed=3, epochs=2)
    assert [prompt.answer for prompt in stream] == draw(PromptStream(PROMPTS, seed=3), 14)
    resumed = PromptStream(PROMPTS, seed=3, epochs=3)
    resumed.load_state_dict(stream.state_dict())
    assert len(list(resumed)) == 7


@pytest.mark.parametrize("position", [0, 1, 6, 7, 8, 20])
def test_resumed_equals_uninterrupted(position):
    whole = draw(PromptStream(PROMPTS, seed=9), 40)
    first = PromptStream(PROMPTS, seed=9)
    before = draw(first, position)
    saved = json.loads(json.dumps(first.state_dict()))
    second = PromptStream(list(PROMPTS), seed=9)
    second.load_state_dict(saved)
    assert before + draw(second, 40 - position) == whole


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (PromptStream(PROMPTS[:-1], seed=9), "size"),
        (PromptStream(PROMPTS[::-1], seed=9), "fingerprint"),
        (PromptStream([*PROMPTS[:-1], Prompt(id="p6", ids=(99,), answer=6)], seed=9), "fingerprint"),
        (PromptStream(PROMPTS, seed=8), "seed"),
        (PromptStream(PROMPTS, seed=9, shuffle=False), "shuffle"),
    ],
)
def test_a_position_among_other_prompts_is_refused(other, key):
    with pytest.raises(UserError, match=key):
        other.load_state_dict(PromptStream(PROMPTS, seed=9).state_dict())


def test_no_prompts():
    with pytest.raises(UserError, match="no prompts"):
        PromptStream([])
