"""Properties of packing on random samples."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
import torch
from tiny_policy import VOCABULARY

from rl_tpu.errors import RunError, UserError
from rl_tpu.trainer.packing import (
    imbalance,
    microbatch_shape,
    pack,
    padding_share,
    per_sample_sums,
    rank_rows,
    rows_per_microbatch,
    shared_share,
    spread,
)
from rl_tpu.types import IGNORE_INDEX, PackedBatch, Sample


def grouped_samples(groups: int, seed: int, longest_prompt: int = 20, longest_response: int = 40) -> list[Sample]:
    """Random groups: of one sample, with a prompt of one token, with empty responses, of a prompt seen before."""
    draw = random.Random(seed)
    samples: list[Sample] = []
    for _ in range(groups):
        prompt = [draw.randrange(VOCABULARY) for _ in range(draw.choice([1, 2, draw.randint(1, longest_prompt)]))]
        if samples and draw.random() < 0.2:
            prompt = draw.choice(samples).prompt_ids
        for _ in range(draw.choice([1, 2, 4, 8])):
            length = draw.choice([0, 1, draw.randint(1, longest_response)])
            samples.append(
                Sample(
                    prompt_ids=list(prompt),
                    response_ids=[draw.randrange(VOCABULARY) for _ in range(length)],
                    loss_mask=[int(draw.random() < 0.8) for _ in range(length)],
                    logprobs=[draw.uniform(-7, -3) for _ in range(length)],
                    spans=[],
                    finish_reason="stop",
                    advantage=draw.gauss(0, 1),
                )
            )
    return samples


def sample_of(prompt: int, response: int) -> Sample:
    return Sample([1] * prompt, [2] * response, [1] * response, [-1.0] * response, [], "stop")


def visible(batch: PackedBatch, row: int) -> torch.Tensor:
    """[L, L] bool by the definition of PackedBatch: the row's token sees these."""
    segments, prefixes = batch.segment_ids[row], batch.prefix_ids[row]
    causal = torch.ones(len(segments), len(segments), dtype=torch.bool).tril()
    same = segments[:, None] == segments[None, :]
    prefix = (prefixes[:, None] == segments[None, :]) & (prefixes[:, None] > 0)
    return causal & (same | prefix)


def check(batch: PackedBatch, samples: list[Sample]) -> None:
    """Everything that a batch says of its samples, token by token and from the definition."""
    sequences = [sample.prompt_ids + sample.response_ids for sample in samples]
    seen: dict[tuple[int, int], int] = {}  # (sample, position) -> how often
    for row in range(batch.rows):
        mask = visible(batch, row)
        column = {name: tensor[row].tolist() for name, tensor in batch.tensors().items()}
        end = sum(segment > 0 for segment in column["segment_ids"])
        segments = column["segment_ids"][:end]
        assert segments == sorted(segments)
        assert set(segments) == set(range(1, max(segments, default=0) + 1))
        for t in range(end):
            sees = mask[t].nonzero().flatten().tolist()
            history = [column["input_ids"][j] for j in sorted(sees, key=lambda j: column["positions"][j])]
            at, sample_id = column["positions"][t], column["sample_ids"][t]
            assert sorted(column["positions"][j] for j in sees) == list(range(at + 1))
            if not sample_id:
                owners = [u for u in range(end) if column["prefix_ids"][u] == segments[t]]
                assert len({column["sample_ids"][u] for u in owners}) > 1, "a prefix has several answers"
                assert all(history == sequences[column["sample_ids"][u] - 1][: at + 1] for u in owners)
                assert column["labels"][t] == IGNORE_INDEX
                assert column["loss_mask"][t] == column["sampler_logprobs"][t] == column["advantages"][t] == 0
                continue
            sample, sequence = samples[sample_id - 1], sequences[sample_id - 1]
            assert history == sequence[: at + 1], "a token sees exactly its own sample up to itself"
            seen[sample_id, at] = seen.get((sample_id, at), 0) + 1
            assert column["labels"][t] == (sequence[at + 1] if at + 1 < len(sequence) else IGNORE_INDEX)
            k = at + 1 - len(sample.prompt_ids)
            counts = 0 <= k < len(sample.response_ids) and sample.loss_mask[k]
            assert column["loss_mask"][t] == counts
            assert column["sampler_logprobs"][t] == pytest.approx(sample.logprobs[k] if counts else 0)
            assert column["advantages"][t] == pytest.approx(sample.advantage if counts else 0)
            assert column["old_logprobs"][t] == column["sampler_logprobs"][t]
        assert mask[end:, :end].sum() == 0
        padding = slice(end, None)
        assert column["positions"][padding] == list(range(batch.row_tokens - end))
        for name in ("input_ids", "segment_ids", "prefix_ids", "sample_ids", "loss_mask", "advantages"):
            assert not any(column[name][padding])
        assert set(column["labels"][padding]) <= {IGNORE_INDEX}
    predicted = {(s, at) for s, at in seen if at >= len(samples[s - 1].prompt_ids) - 1}
    assert predicted == {
        (s, at) for s, sample in enumerate(samples, 1) for at in range(len(sample.prompt_ids) - 1, sample.total_tokens)
    }
    assert set(seen.values()) == {1}


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("seed", range(30))
def test_every_sample_is_packed_once_and_sees_itself_alone(seed, share_prompts):
    draw = random.Random(seed)
    ranks, microbatch_tokens = draw.choice([1, 2, 3]), draw.choice([None, 100, 300])
    samples = grouped_samples(draw.randint(1, 12), seed)
    row_tokens = sorted(draw.sample([60, 64, 100, 128, 256], draw.randint(1, 3)))
    batch = pack(samples, row_tokens, ranks, microbatch_tokens, share_prompts)
    check(batch, samples)
    assert batch.row_tokens in row_tokens
    rows, length = microbatch_shape(batch, microbatch_tokens)
    assert batch.rows % (ranks * rows) == 0
    assert rows == 1 or rows * length <= microbatch_tokens
    again = pack(samples, row_tokens, ranks, microbatch_tokens, share_prompts)
    assert all(torch.equal(a, b) for a, b in zip(batch.tensors().values(), again.tensors().values(), strict=True))


@pytest.mark.parametrize("seed", range(30))
def test_sharing_never_costs_tokens_or_positions(seed):
    draw = random.Random(seed)
    samples = grouped_samples(draw.randint(1, 12), seed, longest_prompt=draw.choice([5, 60]))
    row_tokens, ranks = draw.choice([[100], [128, 256], [512]]), draw.choice([1, 2])
    plain = pack(samples, row_tokens, ranks)
    shared = pack(samples, row_tokens, ranks, share_prompts=True)
    assert shared.input_ids.numel() <= plain.input_ids.numel()
    total = sum(sample.total_tokens for sample in samples)
    tokens = int((shared.segment_ids > 0).sum())
    assert int((plain.segment_ids > 0).sum()) == total
    assert shared_share(plain) == 0
    assert tokens <= total
    assert shared_share(shared) == pytest.approx(1 - tokens / total, abs=1e-6)


def test_a_group_shares_its_prompt_in_as_few_rows_as_it_needs():
    group = [sample_of(33, 15) for _ in range(8)]  # 32 shared tokens, 16 of each answer
    one = pack(group, [32 + 8 * 16], share_prompts=True)
    assert one.rows == 1
    assert padding_share(one) == 0
    assert shared_share(one) == pytest.approx(1 - 160 / (8 * 48))
    two = pack(group, [32 + 4 * 16], share_prompts=True)
    assert two.rows == 2
    assert padding_share(two) == 0
    assert two.prefix_ids[:, :32].sum() == 0
    assert (two.prefix_ids[:, 32:] == 1).all()
    assert two.positions[0, 32:48].tolist() == list(range(32, 48))


def test_a_block_is_cut_where_that_saves_a_row():
    samples = [sample_of(101, 99) for _ in range(15)]
    for i, sample in enumerate(samples):
        sample.prompt_ids = [i // 5] * 101  # three groups of 100 shared and 5 x 100 own tokens
    batch = pack(samples, [1000], share_prompts=True)
    assert batch.rows == 2
    assert int((batch.segment_ids > 0).sum()) == 1900
    check(batch, samples)
    roomy = pack(samples, [1800], share_prompts=True)
    assert roomy.rows == 1
    assert padding_share(roomy) == 0


def fewest_rows(samples: list[Sample], capacity: int) -> tuple[int, int]:
    """Rows, and among the packings of so few rows the fewest tokens, by trying every division of the samples."""

    def tokens(chosen: int) -> int:
        members = [sample for i, sample in enumerate(samples) if chosen >> i & 1]
        prompts = {tuple(sample.prompt_ids): len(sample.prompt_ids) - 1 for sample in members}
        return sum(prompts.values()) + sum(len(sample.response_ids) + 1 for sample in members)

    sizes = [tokens(chosen) for chosen in range(1 << len(samples))]
    best = [(0, 0)]
    for chosen in range(1, 1 << len(samples)):
        first = chosen & -chosen  # is in some row; which others are with it?
        others, found = chosen ^ first, []
        for row in (first | (others & part) for part in range(others + 1) if part & ~others == 0):
            if sizes[row] <= capacity:
                rows, size = best[chosen ^ row]
                found.append((rows + 1, size + sizes[row]))
        best.append(min(found))
    return best[-1]


def test_shared_prompts_come_near_the_fewest_rows_and_tokens():
    found, best = [], []
    for seed in range(60):
        draw = random.Random(seed)
        samples = []
        for group in range(draw.randint(1, 3)):
            prompt = [group] * draw.randint(2, 40)
            for _ in range(draw.randint(1, 4)):
                samples.append(replace(sample_of(1, draw.randint(1, 40)), prompt_ids=prompt))
        capacity = draw.choice([81, 100, 130])
        batch = pack(samples[:8], [capacity], share_prompts=True)
        found.append((batch.rows, int((batch.segment_ids > 0).sum())))
        best.append(fewest_rows(samples[:8], capacity))
    assert all(rows <= fewest + 1 for (rows, _), (fewest, _) in zip(found, best, strict=True))
    for of_ours, of_best in zip(zip(*found, strict=True), zip(*best, strict=True), strict=True):
        assert sum(of_ours) <= 1.01 * sum(of_best)


def test_a_group_of_one_and_a_prompt_of_one_token_are_laid_plainly():
    samples = [sample_of(1, 5), sample_of(1, 7), sample_of(9, 3)]
    plain, shared = pack(samples, [32]), pack(samples, [32], share_prompts=True)
    assert all(torch.equal(a, b) for a, b in zip(plain.tensors().values(), shared.tensors().values(), strict=True))


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("seed", range(10))
def test_ranks_share_rows_and_tokens_evenly(seed, share_prompts):
    ranks = 2 + seed % 3
    samples = grouped_samples(40, seed)
    batch = pack(samples, [128], ranks, share_prompts=share_prompts)
    tokens = [int((batch.select(rank_rows(batch, rank, ranks)).segment_ids > 0).sum()) for rank in range(ranks)]
    assert sum(tokens) == int((batch.segment_ids > 0).sum())
    assert imbalance(batch, ranks) == pytest.approx(max(tokens) * ranks / sum(tokens))
    assert max(tokens) - min(tokens) <= 128


def test_what_does_not_fill_the_ranks_rows_is_spread_over_them():
    batch = pack([sample_of(10, 20)] * 6, [64], 4)  # three full rows would do
    assert batch.rows == 4
    assert imbalance(batch, 4) == pytest.approx(60 / 45)


def test_the_length_that_needs_fewest_positions_is_chosen_and_the_longer_of_two_equals():
    assert pack([sample_of(10, 20)] * 8, [32, 64, 256]).row_tokens == 256
    assert pack([sample_of(10, 20)] * 9, [32, 64, 256]).row_tokens == 32
    assert pack([sample_of(20, 20)] * 6, [64, 128]).row_tokens == 128
    assert pack([sample_of(30, 3)] * 2, [32, 64]).row_tokens == 64
    # 24 x 32 tokens fill 8, 6 or 4 rows; two rows of 96 or 128 make a micro-batch, or one of 192.
    assert pack([sample_of(16, 16)] * 24, [96, 128, 192], microbatch_tokens=256).row_tokens == 128
    # The budget is exceeded only for a sample that does not fit otherwise.
    assert pack([sample_of(16, 16)] * 24, [32, 96, 768], microbatch_tokens=100).row_tokens == 96
    assert pack([sample_of(90, 10)], [32, 96, 128, 768], microbatch_tokens=100).row_tokens == 128


def test_rows_of_a_microbatch_are_those_that_the_budget_holds():
    assert rows_per_microbatch(64, 256) == rows_per_microbatch(64, 300) == 4
    assert rows_per_microbatch(64, 63) == rows_per_microbatch(64, None) == 1
    assert microbatch_shape(pack([sample_of(32, 32)] * 4, [128]), 512) == (4, 128)


def test_an_exact_fit_has_no_padding():
    batch = pack([sample_of(32, 32)] * 4, [128])
    assert batch.rows == 2
    assert padding_share(batch) == 0


@pytest.mark.parametrize("share_prompts", [False, True])
@pytest.mark.parametrize("seed", range(5))
def test_a_value_per_sample_reaches_its_tokens_and_sums_come_back(seed, share_prompts):
    samples = grouped_samples(8, seed)
    batch = pack(samples, [128], share_prompts=share_prompts)
    values = [sample.advantage for sample in samples]
    torch.testing.assert_close(spread(values, batch), batch.advantages)
    written = torch.tensor([float(sum(sample.loss_mask)) for sample in samples])
    torch.testing.assert_close(per_sample_sums(batch.loss_mask, batch, len(samples)), written)
    logprobs = [sum(p for p, m in zip(s.logprobs, s.loss_mask, strict=True) if m) for s in samples]
    noise = torch.where(batch.loss_mask > 0, batch.sampler_logprobs, float("nan"))
    torch.testing.assert_close(per_sample_sums(noise, batch, len(samples)), torch.tensor(logprobs, dtype=torch.float32))


def test_a_value_that_is_not_finite_stays_with_its_sample():
    samples = [sample_of(2, 3), sample_of(2, 3)]
    samples[1].loss_mask = [0, 0, 0]
    batch = pack(samples, [16])
    assert spread([1.0, float("nan")], batch).sum() == 3
    samples[1].logprobs = [float("nan")] * 3
    assert pack(samples, [16]).sampler_logprobs.isfinite().all()


def test_bad_samples_are_refused_with_the_numbers():
    with pytest.raises(UserError, match=r"sample of 70 tokens does not fit the longest row of 64"):
        pack([sample_of(30, 40)], [32, 64])
    with pytest.raises(RunError, match="no sample"):
        pack([], [64])
    broken = sample_of(3, 4)
    broken.logprobs.pop()
    with pytest.raises(RunError, match="4 response ids, 4 mask values and 3 logprobs"):
        pack([broken], [64])
    with pytest.raises(RunError, match="no prompt"):
        pack([sample_of(0, 4)], [64])
    with pytest.raises(RunError, match="another number of ranks than 2"):
        rank_rows(pack([sample_of(3, 4)], [64]), 0, 2)
