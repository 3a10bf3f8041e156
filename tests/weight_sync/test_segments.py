"""The files themselves: names, reservation, and files that are none of ours."""

from __future__ import annotations

import pytest

from weight_sync import SpaceError, WeightSyncError, remove_segments, remove_stale_segments
from weight_sync.shared_memory.segments import DIRECTORY, Segment, SegmentName


@pytest.mark.parametrize("run_id", ["a", "a.1.deadbeef.0", "weight_sync.x", "run-3_b.7"])
def test_names_are_read_back_as_they_were_written(run_id):
    name = SegmentName.new(run_id, 2)[1]
    assert SegmentName.parse(str(name)) == name


@pytest.mark.parametrize(
    "text", ["weight_sync.a", "weight_sync.a.12.xyz.0", "weight_sync..1.deadbeef.0", "weight_sync"]
)
def test_other_names_are_left_alone(text):
    assert SegmentName.parse(text) is None


def test_memory_is_reserved_at_once_or_not_at_all(run_id):
    """The file system's own refusal, for the case that something else took the space after it was looked at."""
    path = DIRECTORY / str(SegmentName.new(run_id, 1)[0])
    with pytest.raises(SpaceError, match=r"/dev/shm could not give 10000\.00 GB: No space left"):
        Segment.create(path, 10**13)
    assert not path.exists()


def test_ranks_of_different_hosts_are_told():
    with pytest.raises(WeightSyncError, match="all ranks must share a host"):
        Segment.share(DIRECTORY / "weight_sync.elsewhere.1.deadbeef.0")


@pytest.mark.parametrize("content", [b"", b"x" * 10_000])
def test_a_file_that_is_no_segment_is_refused(tmp_path, content):
    path = tmp_path / "file"
    path.write_bytes(content)
    with pytest.raises(WeightSyncError, match="is no weight segment"):
        Segment.open(path)


def test_removal_touches_only_what_is_meant(tmp_path):
    names = [str(SegmentName(run_id, 1, "deadbeef", 0)) for run_id in ("one", "one.two", "two")]
    for name in [*names, "weight_sync.notes", "other"]:
        (tmp_path / name).touch()
    assert [path.name for path in remove_segments("one", tmp_path)] == [names[0]]
    owned = Segment.create(tmp_path / str(SegmentName("mine", 1, "deadbeef", 0)), 10)
    assert sorted(path.name for path in remove_stale_segments(tmp_path)) == sorted(names[1:])
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted([owned.path.name, "weight_sync.notes", "other"])
    del owned
    assert len(remove_stale_segments(tmp_path)) == 1
