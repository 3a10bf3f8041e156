"""Engine checksums against sha256 of transformers' tensors, fused by hand. (Real engines: test_engine, test_fleet.)"""

from __future__ import annotations

import hashlib

import pytest
import torch

from rl_tpu.rollout.checksums import differing, expected_checksums


def digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(bytes(tensor.contiguous().view(torch.uint8).flatten().tolist())).hexdigest()[:16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_parts_are_stacked_as_the_engine_does(dtype):
    generator = torch.Generator().manual_seed(0)
    attention, mlp = "model.layers.3.self_attn", "model.layers.3.mlp"
    rows = {f"{attention}.q_proj.weight": 8, f"{attention}.k_proj.weight": 4, f"{attention}.v_proj.weight": 4}
    rows |= {
        f"{mlp}.gate_proj.weight": 6,
        f"{mlp}.up_proj.weight": 6,
        f"{mlp}.down_proj.weight": 5,
        "model.norm.weight": 1,
    }
    named = {name: torch.randn(count, 5, generator=generator).to(dtype) for name, count in rows.items()}
    # Order of the names does not matter, nor does memory layout.
    shuffled = dict(reversed(named.items())) | {"model.norm.weight": named["model.norm.weight"].T.contiguous().T}
    assert expected_checksums(shuffled) == {
        f"{attention}.qkv_proj.weight": digest(torch.cat([named[f"{attention}.{x}_proj.weight"] for x in "qkv"])),
        f"{mlp}.gate_up_proj.weight": digest(torch.cat([named[f"{mlp}.{x}_proj.weight"] for x in ("gate", "up")])),
        f"{mlp}.down_proj.weight": digest(named[f"{mlp}.down_proj.weight"]),
        "model.norm.weight": digest(named["model.norm.weight"]),
    }


def test_experts_are_stacked_in_the_order_of_their_numbers():
    experts = "model.layers.0.mlp.experts"
    named = {f"{experts}.{i}.{x}_proj.weight": torch.randn(4, 3) for i in range(12) for x in ("down", "gate", "up")}
    gate_up = [named[f"{experts}.{i}.{x}_proj.weight"] for i in range(12) for x in ("gate", "up")]
    down = [named[f"{experts}.{i}.down_proj.weight"] for i in range(12)]
    assert expected_checksums(named) == {
        f"{experts}.w13_weight": digest(torch.cat(gate_up)),
        f"{experts}.w2_weight": digest(torch.cat(down)),
    }


def test_the_vocabulary_is_filled_up_with_zeros():
    named = {name: torch.randn(65, 3) for name in ("model.embed_tokens.weight", "lm_head.weight", "model.other.weight")}
    expected = expected_checksums(named)
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        assert expected[name] == digest(torch.cat([named[name], torch.zeros(128 - 65, 3)]))
    assert expected["model.other.weight"] == digest(named["model.other.weight"])


def test_each_rank_has_its_slice_and_ranks_share_scarce_heads():
    """Four ranks, eight query heads and two key-value heads of two rows each, as SGLang's QKVParallelLinear loads them.

    (Real engines of two ranks: test_matrix. On a CPU SGLang starts none with more ranks than key-value heads.)
    """
    attention, mlp = "model.layers.3.self_attn", "model.layers.3.mlp"
    rows = {f"{attention}.q_proj.weight": 16, f"{attention}.k_proj.weight": 4, f"{attention}.v_proj.weight": 4}
    rows |= {f"{attention}.q_proj.bias": 16, f"{attention}.k_proj.bias": 4, f"{attention}.v_proj.bias": 4}
    rows |= {f"{attention}.o_proj.weight": 5, f"{attention}.o_proj.bias": 5, "model.embed_tokens.weight": 130}
    rows |= {f"{mlp}.experts.{i}.{x}_proj.weight": 8 for i in range(2) for x in ("gate", "up", "down")}
    named = {name: torch.randn(count, 8) if "weight" in name else torch.randn(count) for name, count in rows.items()}
    expected = expected_checksums(named, tensor_parallel=4, key_value_heads=2)
    assert len(expected) == 4 * 7

    filled = torch.cat([named["model.embed_tokens.weight"], torch.zeros(192 - 130, 8)])
    for rank in range(4):
        head = slice(rank // 2 * 2, rank // 2 * 2 + 2)
        for kind in ("weight", "bias"):
            q, k, v = (named[f"{attention}.{x}_proj.{kind}"] for x in "qkv")
            fused = torch.cat([q[rank * 4 : rank * 4 + 4], k[head], v[head]])
            assert expected[f"{attention}.qkv_proj.{kind} of rank {rank}"] == digest(fused)
        columns = named[f"{attention}.o_proj.weight"][:, rank * 2 : rank * 2 + 2]
        assert expected[f"{attention}.o_proj.weight of rank {rank}"] == digest(columns)
        assert expected[f"{attention}.o_proj.bias of rank {rank}"] == digest(named[f"{attention}.o_proj.bias"])
        assert expected[f"model.embed_tokens.weight of rank {rank}"] == digest(filled[rank * 48 : rank * 48 + 48])
        mine = slice(rank * 2, rank * 2 + 2)
        gate_up = [named[f"{mlp}.experts.{i}.{x}_proj.weight"][mine] for i in range(2) for x in ("gate", "up")]
        down = [named[f"{mlp}.experts.{i}.down_proj.weight"][:, mine] for i in range(2)]
        assert expected[f"{mlp}.experts.w13_weight of rank {rank}"] == digest(torch.cat(gate_up))
        assert expected[f"{mlp}.experts.w2_weight of rank {rank}"] == digest(torch.cat(down))


def test_differing_names_every_parameter_that_is_not_equal():
    expected = {"a": "1", "b": "2", "c": "3"}
    assert differing(expected, dict(expected)) == []
    assert differing(expected, {"a": "1", "b": "0", "d": "4"}) == ["b", "c", "d"]


def test_a_tied_output_layer_may_be_listed_on_one_side_only():
    tied = {"model.embed_tokens.weight": "1", "lm_head.weight": "1"}
    alone = {"model.embed_tokens.weight": "1"}
    assert differing(tied, alone) == differing(alone, tied) == []
    assert differing({**tied, "lm_head.weight": "2"}, alone) == ["lm_head.weight"]
    assert differing(alone, {**tied, "lm_head.weight": "2"}) == ["lm_head.weight"]
    sliced = {"model.embed_tokens.weight of rank 1": "1"}
    assert differing(sliced, {**sliced, "lm_head.weight of rank 1": "1"}) == []
    assert differing(sliced, {**sliced, "lm_head.weight of rank 1": "2"}) == ["lm_head.weight of rank 1"]
