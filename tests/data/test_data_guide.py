"""The mixture that docs/data.md describes composes."""

import re
from pathlib import Path

from rl_tpu.config.compose import load_config

GUIDE = (Path(__file__).parents[2] / "docs" / "data.md").read_text()


def test_a_mixture_of_ones_own(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "mine.yaml").write_text(re.search(r"```yaml\n(.*?)```", GUIDE, re.DOTALL)[1])
    train = load_config(["+experiment=qwen3_4b_dapo", "data=mine"], [str(tmp_path)]).data.train
    assert {name: source.weight for name, source in train.sources.items()} == {"gsm8k": 3, "sums": 1, "own": 0.5}
    assert (train.sources["sums"].size, train.sources["gsm8k"].prompt_field) == (5000, "question")
