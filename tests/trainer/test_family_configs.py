"""What of a config.json each family honours, and how the rest is refused: sizes as published, names, one line."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from family_models import EXPERTS, LLAMA3_ROPE, MODELS, by_saved_name, family_model
from torchtitan.config import ParallelismConfig
from transformers import AutoConfig, AutoModelForCausalLM

from rl_tpu.errors import UserError
from rl_tpu.trainer.families import FAMILIES, model_spec

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "hidden_act": "silu",
    "head_dim": 128,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": None,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
}
LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "attention_bias": False,
    "hidden_act": "silu",
    "mlp_bias": False,
    "pretraining_tp": 1,
    "rms_norm_eps": 1e-05,
    "vocab_size": 128256,
}
LLAMA31 = LLAMA | {
    "rope_theta": 500000.0,
    "rope_scaling": LLAMA3_ROPE | {"original_max_position_embeddings": 8192, "rope_theta": 500000.0},
}


def sized(base: dict, dim: int, hidden: int, layers: int, heads: int, kv_heads: int, tied: bool, **more) -> dict:
    sizes = {"hidden_size": dim, "intermediate_size": hidden, "num_hidden_layers": layers}
    heads = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "tie_word_embeddings": tied}
    return base | sizes | heads | more


PUBLISHED = {
    "Qwen3-0.6B": sized(QWEN3, 1024, 3072, 28, 16, 8, True),
    "Qwen3-1.7B": sized(QWEN3, 2048, 6144, 28, 16, 8, True),
    "Qwen3-4B": sized(QWEN3, 2560, 9728, 36, 32, 8, True),
    "Qwen3-8B": sized(QWEN3, 4096, 12288, 36, 32, 8, False),
    "Qwen3-14B": sized(QWEN3, 5120, 17408, 40, 40, 8, False),
    "Qwen3-32B": sized(QWEN3, 5120, 25600, 64, 64, 8, False),
    "Qwen3-30B-A3B": sized(QWEN3_MOE, 2048, 6144, 48, 32, 4, False, moe_intermediate_size=768),
    "Llama-3-8B": sized(LLAMA, 4096, 14336, 32, 32, 8, False, rope_theta=500000.0, rope_scaling=None),
    "Llama-3.2-1B": sized(LLAMA31, 2048, 8192, 16, 32, 8, True, head_dim=64),
    "SmolLM2-135M": sized(
        LLAMA,
        576,
        1536,
        30,
        9,
        3,
        True,
        vocab_size=49152,
        rope_theta=100000,
        rope_interleaved=False,
        is_llama_config=True,
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_sizes_have_the_tensors_that_transformers_has(name):
    """Both on the meta device, where they cost nothing. One layer says as much as all, and four are quicker."""
    settings = PUBLISHED[name] | {"num_hidden_layers": 4}
    config = AutoConfig.for_model(**settings)
    spec = model_spec(settings, 4096)
    with torch.device("meta"):
        theirs = AutoModelForCausalLM.from_config(config)
        ours = spec.model.build()
    if settings["tie_word_embeddings"]:
        theirs.tie_weights()
    expected = by_saved_name(theirs, theirs.state_dict())
    if settings["tie_word_embeddings"]:
        expected.pop("lm_head.weight")
    found = spec.state_dict_adapter(spec.model, None).to_hf(ours.state_dict())
    assert {name: tensor.shape for name, tensor in found.items()} == {n: t.shape for n, t in expected.items()}
    assert len(model_spec(PUBLISHED[name], 64).model.layers) == PUBLISHED[name]["num_hidden_layers"]


@pytest.mark.parametrize("name", ["Qwen3-4B", "Llama-3-8B", "Llama-3.2-1B", "SmolLM2-135M"])
def test_rotary_tables_are_those_of_transformers(name):
    theirs = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**PUBLISHED[name] | {"num_hidden_layers": 0, "vocab_size": 8})
    )
    positions = torch.arange(4096)
    cos, sin = theirs.model.rotary_emb(torch.zeros(1), positions[None])
    table = model_spec(PUBLISHED[name], 4096).model.layers[0].attention.rope.build().cache
    torch.testing.assert_close(table, torch.cat([cos[0], sin[0]], -1), rtol=0, atol=2e-4)  # 4096 x float32's precision


def test_all_families_are_tested():
    tested = {AutoModelForCausalLM._model_mapping[type(family_model(name).config)].__name__ for name in MODELS}
    assert tested == FAMILIES.keys()


def small(name: str) -> dict:
    config = family_model(name).config.to_dict()
    architecture = {"qwen3": "Qwen3ForCausalLM", "qwen3_moe": "Qwen3MoeForCausalLM", "llama": "LlamaForCausalLM"}
    return config | {"architectures": [architecture[config["model_type"]]]}


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("qwen3", {"hidden_size": None}, "no 'hidden_size', which Qwen3ForCausalLM needs"),
        ("qwen3", {"hidden_size": "64"}, "hidden_size = '64'; it has to be a positive integer"),
        ("qwen3", {"num_hidden_layers": 0}, "num_hidden_layers = 0; it has to be a positive integer"),
        ("qwen3", {"rms_norm_eps": -1}, "rms_norm_eps = -1; it has to be a positive number"),
        ("qwen3", {"tie_word_embeddings": "no"}, "tie_word_embeddings = 'no'; it has to be true or false"),
        ("qwen3", {"num_key_value_heads": 3}, "num_attention_heads = 4, not a multiple of num_key_value_heads = 3"),
        ("qwen3", {"hidden_act": "gelu"}, "hidden_act = 'gelu'; the trainer supports only 'silu'"),
        ("qwen3", {"use_sliding_window": True, "sliding_window": 64}, "use_sliding_window = True"),
        ("qwen3", {"layer_types": ["full_attention", "sliding_attention"]}, "layer_types with sliding_attention"),
        ("qwen3", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}}, "type 'yarn'"),
        ("qwen3", {"rope_parameters": None, "rope_scaling": {"type": "linear", "factor": 2.0}}, "type 'linear'"),
        ("qwen3", {"rope_parameters": [1]}, "rope_parameters = \\[1\\]; it has to be an object"),
        ("qwen3", {"rope_parameters": {"rope_type": "default"}}, "no 'rope_theta'"),
        ("qwen3", {"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "only one rotary embedding"),
        ("qwen3", {"rope_parameters": {"rope_theta": math.inf}}, "rope_theta = inf; it has to be a positive number"),
        ("qwen3", {"head_dim": 7}, "heads of 7 dimensions"),
        ("qwen3", {"quantization_config": {"quant_method": "fp8"}}, "a quantization_config; the trainer reads"),
        ("llama", {"rope_parameters": LLAMA3_ROPE | {"factor": None}}, "no 'factor'"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4}}, "type 'dynamic'"),
        ("llama", {"mlp_bias": True}, "mlp_bias = True"),
        ("llama", {"attention_bias": True}, "attention_bias = True"),
        ("llama", {"rope_interleaved": True}, "rope_interleaved = True"),
        ("qwen3_moe", {"num_experts_per_tok": 7}, "num_experts_per_tok = 7, more than its 6 experts"),
        ("qwen3_moe", {"mlp_only_layers": 1}, "mlp_only_layers = 1; it has to be a list of integers"),
        ("qwen3_moe", {"moe_intermediate_size": None}, "no 'moe_intermediate_size'"),
    ],
)
def test_a_setting_that_is_missing_wrong_or_not_computed_is_one_line(name, changes, message):
    with pytest.raises(UserError, match=f"^model.path: config.json .*{message}") as caught:
        model_spec(small(name) | changes, 64)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("config", [{}, [], {"architectures": "Qwen3ForCausalLM"}, {"architectures": [None]}])
def test_a_config_that_names_no_architecture_is_refused(config):
    with pytest.raises(UserError, match=r"\(none named\) is unknown; known: LlamaForCausalLM, Qwen3ForCausalLM"):
        model_spec(config, 64)


def test_an_unknown_architecture_is_told_what_is_known_and_how_to_add_it():
    with pytest.raises(
        UserError, match=r"^model.path: architecture GPT2LMHeadModel is unknown; known: .*docs/models.md"
    ):
        model_spec({"architectures": ["GPT2LMHeadModel"]}, 64)


def test_older_names_and_absent_settings_mean_what_they_mean_to_transformers():
    config = small("qwen3") | {"rope_parameters": None, "rope_theta": 5000.0, "head_dim": None}
    layer = model_spec(config, 64).model.layers[0]
    assert (layer.attention.rope.theta, layer.attention.rope.dim) == (5000.0, 128)
    config = small("qwen3_moe") | {"head_dim": None, "num_experts": EXPERTS["num_experts"], "num_local_experts": None}
    layer = model_spec(config, 64).model.layers[0]
    assert (layer.attention.rope.dim, layer.moe.num_experts) == (16, 6)
    config = small("llama") | {"rope_parameters": None, "head_dim": None}
    assert math.isclose(model_spec(config, 64).model.layers[0].attention.rope.theta, 10000.0)


def test_the_router_stays_as_it_is():
    """Neither the bias by which torchtitan balances experts nor a change of how the chosen ones are weighted."""
    for name, normalised in (("qwen3_moe", True), ("qwen3_moe mixed tied", False)):
        layers = model_spec(small(name), 64).model.layers
        experts = [layer.moe for layer in layers if layer.moe is not None]
        assert all(moe.load_balance_coeff is None and moe.router.route_norm is normalised for moe in experts)
    assert [layer.moe is not None for layer in layers] == [False, True, False, False, False, True]


def test_experts_are_not_cut_by_tensor_parallelism():
    model = model_spec(small("qwen3_moe"), 64).model
    cut = SimpleNamespace(parallelism=ParallelismConfig(tensor_parallel_degree=2))
    with pytest.raises(UserError, match=r"^trainer\.parallel\.tensor: 2 ranks cannot share .*; use 1$"):
        model.update_from_config(config=cut)
    model.update_from_config(config=SimpleNamespace(parallelism=ParallelismConfig()))
