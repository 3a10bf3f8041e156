"""Directories, globs and lists of files. The datasets library wrote the directories and is the second reader."""

import json

import pytest
from prompt_sources import answers, load_source, write_jsonl

from rl_tpu.config.schema import PromptSourceConfig
from rl_tpu.data.files import files_exist, source_files
from rl_tpu.data.rows import read_rows
from rl_tpu.errors import UserError


@pytest.fixture(scope="module")
def datasets(tmp_path_factory):
    """The library, without a network and with a cache of its own."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        import datasets

        patch.setattr(datasets.config, "HF_DATASETS_OFFLINE", True)
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path_factory.mktemp("cache")))
        datasets.disable_progress_bars()
        yield datasets


def rows(first, last):
    return [
        {
            "prompt": f"question {n}",
            "answer": n,
            "level": ["a", "b"][n % 2],
            "nested": {"share": n / 100, "list": [n, n]},
        }
        for n in range(first, last)
    ]


def ours(path, split=None):
    config = PromptSourceConfig(kind="file", path=str(path), split=split)
    return [row for file, _ in source_files(config) for _, row in read_rows(file)]


def test_a_saved_dataset_reads_as_the_library_reads_it(datasets, tmp_path, byte_tokenizer):
    whole = datasets.Dataset.from_list(rows(0, 5000)).cast_column("level", datasets.ClassLabel(names=["a", "b"]))
    whole = whole.shuffle(seed=1).select(range(4000))
    whole.save_to_disk(tmp_path / "saved", num_shards=3)
    theirs = list(datasets.load_from_disk(tmp_path / "saved"))
    assert ours(tmp_path / "saved") == theirs
    assert len(theirs) == 4000
    found = load_source(byte_tokenizer, path=str(tmp_path / "saved"))
    assert answers(found) == [row["answer"] for row in theirs]
    assert found.prompts[0].id == "data-00000-of-00003.arrow:1"


def test_splits_of_a_saved_dictionary(datasets, tmp_path):
    parts = {"train": rows(0, 20), "held-back": rows(20, 25)}
    saved = datasets.DatasetDict({name: datasets.Dataset.from_list(part) for name, part in parts.items()})
    saved.save_to_disk(tmp_path / "saved")
    for name, part in parts.items():
        assert ours(tmp_path / "saved", name) == list(datasets.load_from_disk(tmp_path / "saved")[name]) == part
    with pytest.raises(UserError, match=r"has the splits held-back, train; choose one with split"):
        ours(tmp_path / "saved")
    with pytest.raises(UserError, match=r"no split 'trian', did you mean 'train'\? \(it has held-back, train\)"):
        ours(tmp_path / "saved", "trian")


HUB_FOLDERS = {
    "shards": {"data/train-00000-of-00002.parquet": (0, 7), "data/train-00001-of-00002.parquet": (7, 12)},
    "two splits": {"train-00000-of-00001.parquet": (0, 7), "test-00000-of-00001.parquet": (7, 12)},
    "own split": {
        "data/auxiliary_train-00000-of-00001.parquet": (0, 4),
        "data/dev-00000-of-00001.parquet": (4, 6),
    },
    "jsonl": {"train.jsonl": (0, 5), "test.jsonl": (5, 6)},
    "words": {"my-valid_rows.jsonl": (0, 5), "rows_for_testing.jsonl": (5, 6)},
    "one file": {"dapo-math-17k.parquet": (0, 5)},
}


@pytest.mark.parametrize("folder", HUB_FOLDERS)
def test_a_hub_folder_reads_as_the_library_reads_it(datasets, tmp_path, folder):
    directory = tmp_path / folder
    for name, (first, last) in HUB_FOLDERS[folder].items():
        path = directory / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            datasets.Dataset.from_list(rows(first, last)).to_parquet(path)
        else:
            write_jsonl(path, rows(first, last))
    (directory / "README.md").write_text("# A data set\n")
    theirs = {str(name): list(part) for name, part in datasets.load_dataset(str(directory)).items()}
    assert {name: ours(directory, name) for name in theirs} == theirs
    if len(theirs) == 1:
        assert ours(directory) == next(iter(theirs.values()))
    else:
        with pytest.raises(UserError, match=f"has the splits {', '.join(sorted(theirs))}"):
            ours(directory)


def test_a_hub_snapshot_is_links_to_blobs(tmp_path, byte_tokenizer):
    blob = write_jsonl(tmp_path / "blobs" / "0f3a", rows(0, 3))
    link = tmp_path / "snapshots" / "main" / "data" / "train.jsonl"
    link.parent.mkdir(parents=True)
    link.symlink_to(blob)
    found = load_source(byte_tokenizer, path=str(tmp_path / "snapshots" / "main"))
    assert (answers(found), found.prompts[0].id) == ([0, 1, 2], "train.jsonl:1")


def test_globs_and_lists_give_every_prompt_an_id_of_its_own(tmp_path, byte_tokenizer):
    for subject, first in (("algebra", 0), ("geometry", 10), ("logic", 20)):
        write_jsonl(tmp_path / "maths" / subject / "train.jsonl", rows(first, first + 2))
        write_jsonl(tmp_path / "maths" / subject / "test.jsonl", rows(first + 5, first + 6))
    pattern = str(tmp_path / "maths" / "*" / "train.jsonl")
    found = load_source(byte_tokenizer, path=pattern)
    assert answers(found) == [0, 1, 10, 11, 20, 21]
    assert [prompt.id for prompt in found.prompts][:3] == [
        "algebra/train.jsonl:1",
        "algebra/train.jsonl:2",
        "geometry/train.jsonl:1",
    ]

    pair = [str(tmp_path / "maths" / subject / "train.jsonl") for subject in ("logic", "algebra")]
    found = load_source(byte_tokenizer, path=pair)
    assert answers(found) == [20, 21, 0, 1]
    assert [prompt.id for prompt in found.prompts][1:3] == ["logic/train.jsonl:2", "algebra/train.jsonl:1"]

    odd = write_jsonl(tmp_path / "[1]*.jsonl", rows(0, 1))
    assert answers(load_source(byte_tokenizer, path=str(odd))) == [0]


def test_what_is_wrong_with_a_path_is_said(tmp_path, datasets):
    def refused(path, split=None):
        with pytest.raises(UserError) as error:
            ours(path, split)
        assert "\n" not in str(error.value)
        return str(error.value)

    assert "there is no prompt file" in refused(tmp_path / "*.jsonl")
    write_jsonl(tmp_path / "gsm8k" / "main" / "train.jsonl", rows(0, 1))
    write_jsonl(tmp_path / "gsm8k" / "socratic" / "train.jsonl", rows(0, 1))
    assert "there is some in main, socratic" in refused(tmp_path / "gsm8k")
    (tmp_path / "table.csv").write_text("a,b\n")
    assert "not '.csv'" in refused(tmp_path / "*.csv")

    saved = tmp_path / "saved"
    datasets.Dataset.from_list(rows(0, 100)).save_to_disk(saved, num_shards=2)
    shard = saved / "data-00001-of-00002.arrow"
    whole = shard.read_bytes()
    shard.write_bytes(whole[: len(whole) // 2])
    assert f"cannot read the prompt file {shard}: Expected to be able to read" in refused(saved)
    shard.write_bytes(b"")
    assert "not a readable Arrow file" in refused(saved)
    shard.unlink()
    assert "lacks data-00001-of-00002.arrow" in refused(saved)
    for files in (3, [], [3], [{}]):
        (saved / "state.json").write_text(json.dumps({"_data_files": files}))
        assert "state.json is not what save_to_disk writes" in refused(saved)
    (saved / "dataset_dict.json").write_text(json.dumps({"splits": []}))
    assert "dataset_dict.json is not what save_to_disk writes: ValueError splits is empty" in refused(saved)


def test_whether_files_are_there(tmp_path):
    write_jsonl(tmp_path / "a.jsonl", rows(0, 1))
    for path, there in [("a.jsonl", True), ("*.jsonl", True), ("b.jsonl", False), ("*.parquet", False), (".", True)]:
        assert files_exist(PromptSourceConfig(kind="file", path=str(tmp_path / path))) is there
    assert not files_exist(PromptSourceConfig(kind="file", path=[str(tmp_path / "a.jsonl"), str(tmp_path / "b.jsonl")]))
