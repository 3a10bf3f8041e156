"""A real engine with each family: its log-probabilities, the trainer's, and what it holds after an update."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from family_models import by_saved_name, family_model
from safetensors.torch import load_file
from tiny import END, VOCABULARY, changed, make_config, make_tokenizer, reference_logprobs

from rl_tpu.errors import UserError
from rl_tpu.rollout.arguments import server_options
from rl_tpu.rollout.checksums import differing, expected_checksums
from rl_tpu.rollout.sglang import SGLangEngine
from rl_tpu.types import SamplingParams

PROMPT = [5, 40, 41, 42, 90, 91, 17, 200]


@pytest.fixture(scope="module", params=["llama", "llama tied, long context", "qwen3_moe", "qwen3_moe plain scores"])
def served(request, local_ray, run, tmp_path_factory) -> SimpleNamespace:
    """An engine, the directory it read, and transformers' twin of what it holds."""
    directory = tmp_path_factory.mktemp("family")
    ends = {"eos_token_id": END, "pad_token_id": 0, "bos_token_id": None}
    model = family_model(request.param, VOCABULARY, **ends)
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    engine = run(
        SGLangEngine.start(make_config(directory), directory, tmp_path_factory.mktemp("run"), 0, {"num_cpus": 0})
    )
    yield SimpleNamespace(engine=engine, model=model, files=load_file(directory / "model.safetensors"))
    run(engine.close())


@pytest.mark.parametrize(
    "changes", [{"mlp_only_layers": [1]}, {"decoder_sparse_step": 2}, {"tie_word_embeddings": True}]
)
def test_a_model_that_the_server_would_compute_otherwise_is_refused(tmp_path, changes):
    family_model("qwen3_moe", VOCABULARY, **changes).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=f"SGLang .*{next(iter(changes))}") as caught:
        server_options(make_config(tmp_path), tmp_path, 0)
    assert "\n" not in str(caught.value)


def worst_difference(served: SimpleNamespace, run) -> float:
    completions = run(served.engine.generate(PROMPT, SamplingParams(24, temperature=0.8, seed=3), 4))
    return max(
        float((torch.tensor(c.logprobs) - reference_logprobs(served.model, PROMPT, c.response_ids, 0.8)).abs().max())
        for c in completions
    )


def test_logprobs_and_an_update(served, run, publish):
    assert worst_difference(served, run) < 1e-4
    assert differing(expected_checksums(served.files), run(served.engine.weight_checksums())) == []

    parameters = changed({name: p.detach() for name, p in served.model.named_parameters()}, seed=1)
    weights = by_saved_name(served.model, parameters)
    run(served.engine.update_weights(publish(1, weights), 1))
    assert differing(expected_checksums(weights), run(served.engine.weight_checksums())) == []
    assert worst_difference(served, run) > 0.01, "the weights changed"
    served.model.load_state_dict(parameters, strict=False)
    assert worst_difference(served, run) < 1e-4
