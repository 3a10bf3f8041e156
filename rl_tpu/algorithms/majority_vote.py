"""Whether the answer that most samples give is right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Sequence


def majority_solved(answers: Sequence[Hashable | None], solved: Sequence[bool]) -> float:
    """Probability that the answer given most often is right; ``answers`` and ``solved`` are of the samples of one prompt.

    Samples without an answer (None) do not vote. Among answers given equally often each wins with the same probability.
    Where a grader judged samples of the same answer differently, the answer is right with the share it found right. 0 if
    nobody votes.

    Wang et al. 2022, Self-Consistency Improves Chain of Thought Reasoning in Language Models, arXiv 2203.11171.
    """
    votes: dict[Hashable, list[bool]] = defaultdict(list)
    for answer, right in zip(answers, solved, strict=True):
        if answer is not None:
            votes[answer].append(right)
    if not votes:
        return 0.0
    most = max(map(len, votes.values()))
    winners = [rights for rights in votes.values() if len(rights) == most]
    return sum(sum(rights) / most for rights in winners) / len(winners)
