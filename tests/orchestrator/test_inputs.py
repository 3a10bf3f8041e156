"""What is filled into a configuration before the parts of a run get it."""

from __future__ import annotations

from pathlib import Path

from rl_tpu.config.compose import load_config
from rl_tpu.orchestrator.inputs import fill_options


def test_directories_in_the_options_of_a_transport():
    nested = '+weight_sync.options={url:"{run_dir}/w",n:3,storage:{from:"{model_dir}",other:"{x}"}}'
    config = fill_options(
        load_config(["+experiment=quickstart", nested]), run_dir=Path("/runs/a"), model_dir=Path("/models/b")
    )
    expected = {"url": "/runs/a/w", "n": 3, "storage": {"from": "/models/b", "other": "{x}"}}
    assert config.weight_sync.options == expected
