"""Attention by segments and under a mask against attention written out one token at a time."""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import pad

from rl_tpu.trainer import segment_attention as by_segment
from rl_tpu.trainer.attention import SegmentAttention, segment_mask, segment_table

# Lengths of the segments of two rows of 40 tokens; (length, i) has the i-th segment of the row as its prefix.
LAYOUTS = {
    "segments": [[13, 1, 20], [7, 7, 7, 19]],
    "one_row": [[40], [39]],
    "prefixes": [[5, (4, 1), (4, 1), (9, 1), 6, (1, 5)], [10, (10, 1), 3, 3, (3, 4)]],
    "single_tokens": [[1] * 40, [1, (1, 1), (38, 1)]],
    "padding_row": [[12, (12, 1)], []],
    "all_padding": [[], []],
}


def ids(layout: list, length: int = 40) -> tuple[torch.Tensor, torch.Tensor]:
    segment_ids, prefix_ids = torch.zeros(2, len(layout), length, dtype=torch.int64)
    for row, segments in enumerate(layout):
        start = 0
        for number, segment in enumerate(segments, 1):
            tokens, prefix = segment if isinstance(segment, tuple) else (segment, 0)
            segment_ids[row, start : start + tokens] = number
            prefix_ids[row, start : start + tokens] = prefix
            start += tokens
    return segment_ids, prefix_ids


def inputs(rows: int, length: int, dtype: torch.dtype) -> list[torch.Tensor]:
    """Queries of 4 heads, keys and values of 2, and a gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    shapes = [(rows, length, heads, 8) for heads in (4, 2, 2, 4)]
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes]


def run(
    attention_masks: torch.Tensor, dtype: torch.dtype, real: torch.Tensor, scale: float | None = None
) -> list[torch.Tensor]:
    """Output and the gradients of queries, keys and values at the `real` positions [2, 40], zero at the others. With a
    table they are all that the module sees, but for three tokens of no segment at the end."""
    *qkv, grad = (tensor * real[..., None, None] for tensor in inputs(2, 40, dtype))
    packed = attention_masks.dtype == torch.int64
    if packed:
        *qkv, grad = (pad(tensor[real], (0, 0, 0, 0, 0, 3)).unsqueeze(0) for tensor in (*qkv, grad))
    qkv = [tensor.requires_grad_() for tensor in qkv]
    out = SegmentAttention(SegmentAttention.Config())(
        *qkv, attention_masks=attention_masks, scale=scale, enable_gqa=True
    )
    assert out.isfinite().all()
    out.backward(grad)
    found = [out.detach(), *(tensor.grad for tensor in qkv)]
    if packed:
        for tensor in found:
            assert not tensor[0, -3:].any()
        spread = [tensor.new_zeros(2, 40, *tensor.shape[2:]) for tensor in found]
        for whole, tensor in zip(spread, found, strict=True):
            whole[real] = tensor[0, :-3]
        return spread
    return [tensor * real[..., None, None] for tensor in found]


def written_out(segment_ids: torch.Tensor, prefix_ids: torch.Tensor, scale: float) -> list[torch.Tensor]:
    """As `run`, token by token in float64; the gradients are autograd's."""
    *qkv, grad = inputs(2, 40, torch.float64)
    q, k, v = [tensor.requires_grad_() for tensor in qkv]
    out = 0 * (q + k.sum() + v.sum())
    for row in range(2):
        for t in range(40):
            if segment_ids[row, t] == 0:
                continue
            own = [s for s in range(t + 1) if segment_ids[row, s] == segment_ids[row, t]]
            prefix = [s for s in range(t) if prefix_ids[row, t] > 0 and segment_ids[row, s] == prefix_ids[row, t]]
            seen = own + prefix
            for head in range(4):
                weights = torch.softmax(scale * k[row, seen, head // 2] @ q[row, t, head], 0)
                out[row, t, head] = weights @ v[row, seen, head // 2]
    out.backward(grad)
    return [out.detach(), q.grad, k.grad, v.grad]


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_both_equal_attention_written_out(layout, dtype):
    segment_ids, prefix_ids = ids(LAYOUTS[layout])
    expected = written_out(segment_ids, prefix_ids, 8**-0.5)
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.bfloat16: 5e-2}[dtype]
    for attention_masks in (segment_table(segment_ids, prefix_ids), segment_mask(segment_ids, prefix_ids)):
        found = run(attention_masks, dtype, segment_ids > 0)
        for ours, theirs in zip(found, expected, strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=tolerance, atol=tolerance)


def test_the_scale_is_used():
    segment_ids, prefix_ids = ids(LAYOUTS["prefixes"])
    for ours, theirs in zip(
        run(segment_table(segment_ids, prefix_ids), torch.float64, segment_ids > 0, scale=0.7),
        written_out(segment_ids, prefix_ids, 0.7),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs)


def test_table_of_two_rows():
    table = segment_table(*ids([[2, (3, 1), (3, 1)], [4, 5]], 10))
    assert table.tolist() == [[0, 2, 0, 0], [2, 5, 0, 2], [5, 8, 0, 2], [8, 12, 0, 0], [12, 17, 0, 0]]


def test_the_cost_is_the_sum_of_the_squares(monkeypatch):
    """Counted in pairs of a query and a key given to the kernel, forwards and backwards."""
    pairs = {"forward": 0, "backward": 0}

    def counted(name, kernel, first):
        def call(*tensors, **options):
            q, k = tensors[first : first + 2]
            pairs[name] += q.shape[0] * q.shape[2] * k.shape[2]
            return kernel(*tensors, **options)

        return call

    monkeypatch.setattr(by_segment, "_flash", counted("forward", by_segment._flash, 0))
    monkeypatch.setattr(by_segment, "_flash_backward", counted("backward", by_segment._flash_backward, 1))
    layout = [[13, 1, 20], [10, (4, 1), (4, 1), (9, 1)]]
    segment_ids, prefix_ids = ids(layout)
    run(segment_table(segment_ids, prefix_ids), torch.float32, segment_ids > 0)
    expected = 13**2 + 1 + 20**2 + 10**2 + 4**2 + 4**2 + 9**2 + (4 + 4 + 9) * 10
    assert pairs == {"forward": expected, "backward": expected}
    assert expected < 0.4 * 2 * 40**2


def test_neighbours_of_equal_length_go_together():
    parts = list(by_segment.parts(segment_table(*ids([[4] * 6 + [2] * 3], 40))))
    assert [part.count for part in parts] == [6, 3]


def test_the_operator_is_sound_for_compilers():
    """torch's own checks: schema, fake tensors, autograd registration, dynamic shapes."""
    q, k, v, _ = inputs(1, 40, torch.float32)
    table = segment_table(*ids(LAYOUTS["prefixes"][:1]))
    tensors = [tensor[0].requires_grad_() for tensor in (q, k, v)]
    torch.library.opcheck(by_segment.segment_attention, (*tensors, table, 0.3))


def test_a_compiled_graph_serves_other_segments():
    module = SegmentAttention(SegmentAttention.Config())
    graphs = []

    def backend(graph, _):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, backend=backend, fullgraph=True)
    *qkv, _ = inputs(1, 80, torch.float32)
    for layout in ("segments", "prefixes"):
        table = segment_table(*ids(LAYOUTS[layout]))
        torch._dynamo.mark_dynamic(table, 0)
        expected = module(*qkv, attention_masks=table, enable_gqa=True)
        torch.testing.assert_close(compiled(*qkv, attention_masks=table, enable_gqa=True), expected)
    assert len(graphs) == 1
