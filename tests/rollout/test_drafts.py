"""Samples that several requests write after each other."""

from __future__ import annotations

import random

from rl_tpu.rollout.drafts import ABORT, Draft, make_drafts
from rl_tpu.types import SamplingParams, VersionSpan

PROMPT = (7, 8, 9)


def spans(*triples: tuple[int, int, int]) -> list[VersionSpan]:
    return [VersionSpan(*triple) for triple in triples]


def test_each_sample_has_its_seed():
    assert [draft.params.seed for draft in make_drafts(PROMPT, SamplingParams(4, seed=10), 3)] == [10, 11, 12]
    assert [draft.params.seed for draft in make_drafts(PROMPT, SamplingParams(4), 2)] == [None, None]


def test_it_is_gone_on_with_where_it_stopped():
    params = SamplingParams(10, temperature=0.5, seed=3)
    draft = Draft(PROMPT, params)
    draft.begin()
    assert draft.request() == ([7, 8, 9], params)
    draft.extend([1, 2], [-0.1, -0.2], spans((4, 0, 2)))
    draft.extend([3], [-0.3], spans((4, 0, 3)))
    draft.finish(ABORT)
    assert not draft.finished
    draft.begin()
    assert draft.finish_reason == ""
    assert draft.request() == ([7, 8, 9, 1, 2, 3], SamplingParams(7, temperature=0.5, seed=3))
    draft.extend([5], [-0.5], spans((5, 0, 1)))
    draft.finish("stop")
    assert draft.finished
    completion = draft.completion()
    assert (completion.response_ids, completion.logprobs) == ([1, 2, 3, 5], [-0.1, -0.2, -0.3, -0.5])
    assert completion.spans == spans((4, 0, 3), (5, 3, 4))
    assert completion.finish_reason == "stop"


def test_requests_under_one_policy_leave_one_span():
    draft = Draft(PROMPT, SamplingParams(10))
    for ids in ([1, 2], [], [3]):
        draft.begin()
        draft.extend(ids, [0.0] * len(ids), spans((4, 0, len(ids))))
    assert draft.spans == spans((4, 0, 3))


def test_a_request_that_lasts_over_updates():
    draft = Draft(PROMPT, SamplingParams(20))
    draft.begin()
    draft.extend([1] * 4, [0.0] * 4, spans((1, 0, 3), (2, 3, 4)))
    draft.begin()
    draft.extend([1] * 2, [0.0] * 2, spans((2, 0, 2)))
    draft.extend([1] * 3, [0.0] * 3, spans((2, 0, 2), (3, 2, 5)))
    assert draft.spans == spans((1, 0, 3), (2, 3, 6), (3, 6, 9))


def test_nothing_is_left_to_write():
    """Its engine was lost with the last token written and its end not told: it is whole."""
    finished = []
    draft = Draft(PROMPT, SamplingParams(2), on_finish=lambda: finished.append(True))
    draft.begin()
    draft.extend([1, 2], [0.0, 0.0], spans((0, 0, 2)))
    draft.begin()
    assert (draft.finish_reason, finished) == ("length", [True])
    assert draft.completion().spans == spans((0, 0, 2))


def test_an_aborted_one_is_not_whole():
    finished = []
    draft = Draft(PROMPT, SamplingParams(2), on_finish=lambda: finished.append(True))
    draft.begin()
    draft.finish(ABORT)
    assert finished == []


def test_from_the_start_again():
    draft = Draft(PROMPT, SamplingParams(5, seed=1))
    draft.begin()
    draft.extend([1, 2], [0.0, 0.0], spans((3, 0, 2)))
    draft.cached_prompt_tokens = 2
    draft.finish(ABORT)
    draft.restart()
    assert draft == Draft(PROMPT, draft.params, draft.on_finish)


def test_any_cut_of_a_sample_gives_the_same_sample():
    """However its tokens are spread over requests and over what a request streams."""
    for seed in range(200):
        dice = random.Random(seed)
        versions = sorted(dice.choices(range(4), k=dice.randint(1, 40)))
        ids, logprobs = list(range(len(versions))), [-float(i) for i in range(len(versions))]
        draft = Draft(PROMPT, SamplingParams(100))
        at = 0
        while at < len(ids):
            draft.begin()
            assert draft.request()[0] == [*PROMPT, *ids[:at]]
            first, last = at, dice.randint(at, len(ids))
            while at < last:
                until = dice.randint(at + 1, last)
                draft.extend(ids[at:until], logprobs[at:until], runs(versions[first:until]))
                at = until
        assert (draft.response_ids, draft.logprobs, draft.spans) == (ids, logprobs, runs(versions))


def runs(versions: list[int]) -> list[VersionSpan]:
    """Spans of equal neighbours."""
    edges = [i for i in range(1, len(versions)) if versions[i] != versions[i - 1]]
    ends = zip([0, *edges], [*edges, len(versions)], strict=True)
    return [VersionSpan(versions[start], start, end) for start, end in ends]
