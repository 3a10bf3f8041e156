"""What is filled into a configuration before the parts of a run get it."""

from __future__ import annotations

from pathlib import Path

import pytest

from rl_tpu.config.compose import load_config
from rl_tpu.config.schema import WeightSyncConfig
from rl_tpu.errors import UserError
from rl_tpu.orchestrator.inputs import check_names, check_transport, fill_options


def test_directories_in_the_options_of_a_transport():
    nested = '+weight_sync.options={url:"{run_dir}/w",n:3,storage:{from:"{model_dir}",other:"{x}"}}'
    config = fill_options(
        load_config(["+experiment=quickstart", nested]), run_dir=Path("/runs/a"), model_dir=Path("/models/b")
    )
    expected = {"url": "/runs/a/w", "n": 3, "storage": {"from": "/models/b", "other": "{x}"}}
    assert config.weight_sync.options == expected


@pytest.mark.parametrize(
    ("transport", "options", "said"),
    [
        ("disk", {"url": None}, "'disk', option url: .*; it is None"),
        ("disk_delta", {"url": "/w", "keep": 1.5}, r"'disk_delta', option keep: .*integer.*; it is 1\.5"),
        ("ici", {"bucket_bytes": "many"}, "'ici', option bucket_bytes: .*integer.*; it is 'many'"),
    ],
)
def test_options_of_a_transport_have_its_types(transport, options, said):
    with pytest.raises(UserError, match=said):
        check_transport(WeightSyncConfig(transport=transport, options=options))
    check_transport(
        WeightSyncConfig(transport="disk_delta", options={"url": "{run_dir}/w", "keep": 3, "threads": None})
    )


def test_an_objective_that_there_is_not_is_named_before_anything_starts():
    with pytest.raises(UserError, match=r"unknown objective 'clipp', did you mean 'clip'\? \(known: cispo, clip\)"):
        check_names(load_config(["+experiment=quickstart", "algorithm.objective=clipp"]))
