"""The command line's way into a typed configuration: what composes, and the one line that says what does not."""

import pytest

from rl_tpu.config.compose import check_command_line, load_config, resource
from rl_tpu.errors import UserError

QUICKSTART = "+experiment=quickstart"
EXPERIMENTS = sorted(file.stem for file in resource("configs/experiment").glob("*.yaml"))


@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_every_experiment_composes(experiment):
    assert load_config([f"+experiment={experiment}"]).name == experiment


def test_overrides_reach_nested_fields():
    config = load_config([QUICKSTART, "trainer.optimizer.learning_rate=0.5", "rollout.top_k=7", "model.make=null"])
    assert (config.trainer.optimizer.learning_rate, config.rollout.top_k, config.model.make) == (0.5, 7, None)


def test_every_value_of_a_sweep_is_checked():
    check_command_line([QUICKSTART, "seed=0,1", "rollout.temperature=0.5,1.0"])
    with pytest.raises(UserError, match=r"rollout\.temperature=-1"):
        check_command_line([QUICKSTART, "-m", "seed=0,1", "rollout.temperature=0.5,-1"])


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["rollout.tempreture=1"], ["rollout.tempreture", "did you mean 'rollout.temperature'"]),
        (["+trainer.optimiser.learning_rate=1"], ["trainer.optimiser", "did you mean 'trainer.optimizer'"]),
        (["sead=1"], ["'sead'", "did you mean 'seed'"]),
        (["+evaluation.sets.held_out.temprature=1"], ["evaluation.sets.held_out.temprature", "temperature"]),
        (["seed=4294967296"], ["seed=4294967296", "less than 4294967296"]),
        (["rollout.temperature=0"], ["rollout.temperature=0", "greater than 0"]),
        (["rollout.samples_per_prompt=0"], ["rollout.samples_per_prompt=0", "greater than or equal to 1"]),
        (["rollout.samples_per_prompt=1"], ["samples_per_prompt 1 leaves nothing to compare", "batch_mean"]),
        (["algorithm.correction.mode=mask"], ["correction.mode mask", "algorithm.old_logprobs=recompute"]),
        (["algorithm=cispo", "algorithm.dual_clip=3"], ["algorithm.dual_clip 3.0 has no meaning", "objective cispo"]),
        (["rollout.top_k=0"], ["rollout.top_k 0 leaves no token"]),
        (["rollout.temperature=1e-9"], ["rollout.temperature 1e-09 is greedy", "1e-06"]),
        (["trainer.optimizer.beta1=1"], ["trainer.optimizer.beta1=1", "less than 1"]),
        (["trainer.optimizer.momentum=1"], ["trainer.optimizer.momentum=1", "less than 1"]),
        (
            ["data=maths_mixture", "data.train.sources.gsm8k.wieght=2"],
            ["data.train.sources.gsm8k.wieght", "did you mean 'data.train.sources.gsm8k.weight'"],
        ),
        (
            ["evaluation.sets.held_out.sorce.kind=file"],
            ["evaluation.sets.held_out.sorce", "did you mean 'evaluation.sets.held_out.source'"],
        ),
        (["=5"], ["'=5' is neither KEY=VALUE nor an option"]),
        (["algorithm.correction.low=3"], ["algorithm.correction.low 3.0 is more than", "high 2.0"]),
        (["algorithm.kl.refresh_steps=5"], ["algorithm.kl.refresh_steps 5", "algorithm.kl.coefficient 0"]),
        (["algorithm.baseline=batch_mean"], ["algorithm.scale group_std", "batch_std"]),
        (["rollout.oversampling=0.5"], ["rollout.oversampling=0.5", "greater than or equal to 1"]),
        (["rollout.oversampling=1.5"], ["oversampling 1.5 keeps groups in flight", "max_staleness 0", "1 or more"]),
        (
            ["rollout.oversampling=1.5", "rollout.max_staleness=1"],
            ["oversampling 1.5", "max_staleness 1 + 1) x prompts_per_step 16 = 32 groups", "stale_groups drop"],
        ),
        (["rollout.stale_groups=correct"], ["stale_groups correct", "algorithm.correction.mode truncate or mask"]),
        (["trainer.steps=many"], ["trainer.steps='many'", "valid integer"]),
        (["algorithm.scale=std"], ["algorithm.scale='std'", "group_std"]),
        (["weight_sync.delivery=broadcast"], ["delivery=broadcast needs weight_sync.transport ici", "shared_memory"]),
        (["weight_sync.pause_mode=wait"], ["weight_sync.pause_mode='wait'", "retract"]),
        (["model=qwen"], ["model/qwen", "qwen3_4b"]),
        (["cluster.trainer_chips=3"], ["3 + rollout_chips 1 = 4 chips", "= 2"]),
        (["rollout.engines=2"], ["rollout.engines 2 x tensor_parallel 1 = 2 devices"]),
        (["cluster.devices_per_chip=2"], ["whole chips", "multiple of cluster.devices_per_chip 2"]),
        (["algorithm.minibatches=7"], ["= 128 samples are not divisible by algorithm.minibatches 7"]),
        (["trainer.parallel.tensor=3"], ["= 1 trainer ranks are not divisible", "replicas 1 x tensor 3 = 3"]),
        (["data.max_prompt_tokens=4000"], ["tokens do not fit the longest row", "context_tokens"]),
        (["trainer.row_tokens=[256,128]"], ["[256, 128] must ascend"]),
        (["trainer.microbatch_tokens=100"], ["microbatch_tokens 100 do not hold one row", "row_tokens, 128"]),
        (["rollout.kv_cache_tokens=16"], ["rollout.kv_cache_tokens 16"]),
        (["data.train.task=null"], ["data.train.task"]),
        (["rollout.engines"], ["'rollout.engines' is neither KEY=VALUE nor an option"]),
    ],
)
def test_wrong_settings_end_in_one_clear_line(arguments, words):
    with pytest.raises(UserError) as caught:
        check_command_line([QUICKSTART, *arguments])
    message = str(caught.value)
    assert "\n" not in message
    for word in words:
        assert word in message


def test_an_unknown_experiment_names_the_known_ones():
    with pytest.raises(UserError, match=r"experiment/quickstrat.*quickstart"):
        check_command_line(["+experiment=quickstrat"])


def test_without_an_experiment_the_message_names_them():
    with pytest.raises(UserError, match=r"\+experiment=.*quickstart"):
        check_command_line([])


def test_ranks_that_share_matrices_share_rows():
    shape = ["cluster.chips_per_host=9", "cluster.trainer_chips=8", "trainer.parallel.replicas=2"]
    config = load_config([QUICKSTART, *shape, "trainer.parallel.tensor=2"])
    assert (config.trainer_ranks, config.data_ranks) == (8, 4)


def test_qwen3_4b_dapo_is_canonical_dapo_on_one_v7x_host():
    config = load_config(["+experiment=qwen3_4b_dapo"])
    assert (config.rollout.prompts_per_step, config.rollout.samples_per_prompt) == (512, 16)
    assert (config.algorithm.clip_low, config.algorithm.clip_high) == (0.2, 0.28)
    assert config.algorithm.aggregation == "token_mean"
    assert config.algorithm.drop_uniform_groups
    assert config.rollout.max_response_tokens - config.algorithm.overlong_buffer_tokens == 16384
    assert config.trainer.optimizer.learning_rate == 1e-6
    assert (config.cluster.trainer_chips, config.cluster.rollout_chips, config.trainer_ranks) == (2, 2, 4)
