"""What the command line says about wrong prompt sources."""

import pytest

from rl_tpu.config.compose import check_command_line
from rl_tpu.errors import UserError

MIXTURE = ["+experiment=qwen3_4b_dapo", "data=maths_mixture"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data.train.promt_field=x"], ["'data.train.promt_field'", "did you mean 'data.train.prompt_field'"]),
        (["data.exclude_evaluations=false"], ["did you mean 'data.exclude_evaluation'"]),
        (["+data.train.sources.math.wieght=2"], ["'data.train.sources.math.wieght'", "did you mean", "weight"]),
        (
            ["+evaluation.sets.aime24.source.weight=2"],
            ["unknown configuration key 'evaluation.sets.aime24.source.weight'"],
        ),
        (["data.train.sources.math.weight=0"], ["data.train.sources.math.weight=0", "greater than 0"]),
        (["data.train.sources.math.path=null"], ["data.train.sources.math.path is required for kind=file"]),
        (
            ["data.train.sources.gsm8k.answer_pattern='('"],
            ["sources.gsm8k.answer_pattern '('", "no regular expression"],
        ),
        (["+data.train.sources.sums.kind=reasoning_gym"], ["data.train.sources.sums.task", "are required"]),
        (["+data.train.sources.more.kind=mixture"], ["data.train.sources.more.kind='mixture'"]),
        (["data.epochs=0"], ["data.epochs=0", "greater than or equal to 1"]),
        (["data=dapo_math_17k", "data.train.kind=mixture"], ["data.train.sources are required for kind=mixture"]),
        (["data=dapo_math_17k", "data.train.template=no"], ["data.train.template 'no' must contain {prompt}"]),
        (["data=dapo_math_17k", "data.train.max_pass_rate=0.5"], ["data.train.pass_rate_field"]),
        (["data=dapo_math_17k", "data.train.max_pass_rate=50"], ["less than or equal to 1"]),
        (["data=gsm"], ["data/gsm", "gsm8k"]),
    ],
)
def test_one_clear_line(arguments, words):
    with pytest.raises(UserError) as caught:
        check_command_line([*MIXTURE, *arguments] if not arguments[0].startswith("data=") else [MIXTURE[0], *arguments])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message
