"""How often k tries contain a right one."""

from __future__ import annotations

from math import comb


def pass_at_k(n: int, c: int, k: int) -> float:
    """Unbiased estimate of the probability that at least one of k samples is right, from n samples of which c are.

    The share of all k-subsets of the n samples that hold a right one: 1 - C(n - c, k) / C(n, k)
    in exact integers (Chen et al. 2021, Evaluating Large Language Models Trained on Code, arXiv 2107.03374, eq. 1).

    Raises ValueError unless 0 <= c <= n and 1 <= k <= n.
    """
    if not (0 <= c <= n and 1 <= k <= n):
        raise ValueError(f"pass@k needs 0 <= c <= n and 1 <= k <= n, got n={n}, c={c}, k={k}")
    subsets = comb(n, k)
    return (subsets - comb(n - c, k)) / subsets
