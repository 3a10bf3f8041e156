from __future__ import annotations

import dataclasses
import json

import pytest
import torch

from weight_sync import Manifest, WeightSyncError

TENSORS = [
    ("a", torch.bfloat16, (3, 5)),
    ("b", torch.float32, ()),
    ("c", torch.float8_e4m3fn, (0, 2)),
    ("d", torch.int64, (100,)),
]


def hashed(manifest: Manifest, **hashes: str) -> Manifest:
    tensors = tuple(dataclasses.replace(t, xxh3_128=hashes.get(t.name, t.name * 32)) for t in manifest.tensors)
    return dataclasses.replace(manifest, tensors=tensors)


def test_layout_is_aligned_and_in_order():
    manifest = Manifest.lay_out(TENSORS, version=3)
    assert [(t.name, t.offset, t.nbytes) for t in manifest.tensors] == [
        ("a", 0, 30),
        ("b", 256, 4),
        ("c", 512, 0),
        ("d", 512, 800),
    ]
    assert manifest.total_bytes == 512 + 1024
    assert [t.torch_dtype for t in manifest.tensors] == [dtype for _, dtype, _ in TENSORS]


@pytest.mark.parametrize("with_hashes", [True, False])
def test_json_round_trip(with_hashes):
    manifest = Manifest.lay_out(TENSORS, version=12)
    manifest = hashed(manifest) if with_hashes else manifest
    assert Manifest.from_json(manifest.to_json()) == manifest


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda m: m.pop("tensors"), "tensors"),
        (lambda m: m["tensors"][0].update(nbytes=31), "31 bytes do not make bfloat16"),
        (lambda m: m["tensors"][1].update(offset=0), "b: offset 0 overlaps"),
        (lambda m: m["tensors"][1].update(offset=260), "b: offset 260"),
        (lambda m: m["tensors"][0].update(dtype="bfloat17"), "bfloat17"),
        (lambda m: m["tensors"][0].update(color="red"), "color"),
        (lambda m: m.update(total_bytes=1000), "tensors end at byte 1312"),
    ],
)
def test_json_that_contradicts_itself_is_refused(spoil, says):
    fields = json.loads(Manifest.lay_out(TENSORS).to_json())
    spoil(fields)
    with pytest.raises(WeightSyncError, match=says):
        Manifest.from_json(json.dumps(fields))


def test_text_that_is_no_json_is_refused():
    with pytest.raises(WeightSyncError, match="not a weight manifest"):
        Manifest.from_json("\x00\x00")


def test_diff_names_what_changed_stayed_came_and_went():
    old = hashed(Manifest.lay_out(TENSORS, version=1))
    resized = [("a", torch.bfloat16, (5, 3)), *TENSORS[1:3], ("e", torch.float32, (2,))]
    new = hashed(Manifest.lay_out(resized, version=2), b="f" * 32)
    diff = old.diff(new)
    assert (diff.changed, diff.unchanged, diff.added, diff.missing) == (["a", "b"], ["c"], ["e"], ["d"])


def test_a_tensor_without_a_hash_counts_as_changed():
    manifest = Manifest.lay_out(TENSORS)
    assert manifest.diff(manifest).changed == ["a", "b", "c", "d"]
