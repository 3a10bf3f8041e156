"""Environments of several turns on a real SGLang engine, up to the trainer's gradient.

The policy was taught a conversation of four turns with two tool calls (`talker`), and mostly says it.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import talker
import torch
from scripted import prompt
from transformers import Qwen3ForCausalLM

from rl_tpu.config.schema import AlgorithmConfig, EnvironmentConfig, TrainerConfig
from rl_tpu.environments import Progress, Reply, make_environment
from rl_tpu.environments.tool_use import ToolUse
from rl_tpu.trainer.packing import pack
from rl_tpu.trainer.step import PolicyTrainer
from rl_tpu.types import SamplingParams

TOKENS = 500


class FollowUp(ToolUse):
    """A user who has a second question."""

    async def respond(self, progress: Progress) -> Reply:
        reply = await super().respond(progress)
        asked = sum(message["role"] == "user" for message in progress.transcript.conversation(self.chat))
        if reply.messages or asked == 2:
            return reply
        return Reply([{"role": "user", "content": talker.FOLLOW_UP}], reward=0.25)


@pytest.fixture(scope="module")
def conversations(byte_tokenizer, policy_engine, run):
    """Samples of conversations with calls of a tool, and what the engine returned: its prompts and completions, raw."""
    environment = make_environment(
        EnvironmentConfig(name="test_on_engine:FollowUp", options={"tools": ["some_tools:add"]}), byte_tokenizer
    )
    raw = []

    async def generate(ids, params, n):
        completions = await policy_engine.generate(ids, params, n)
        raw.extend((tuple(ids), completion.response_ids, completion.logprobs) for completion in completions)
        return completions

    params = SamplingParams(max_response_tokens=TOKENS, temperature=1.0, seed=3)
    return run(environment.run(prompt(byte_tokenizer, talker.QUESTION), 12, params, generate)), raw


def written(sample):
    return torch.tensor(sample.loss_mask, dtype=torch.bool)


def transformers_logprobs(model, sample):
    """Of every response token, one sample at a time, without packing."""
    whole = torch.tensor([sample.prompt_ids + sample.response_ids])
    logits = model(whole).logits[0, len(sample.prompt_ids) - 1 : -1]
    return torch.log_softmax(logits, -1).gather(1, torch.tensor(sample.response_ids)[:, None])[:, 0]


def test_four_turns_with_two_calls_are_what_the_engine_sampled(conversations, byte_tokenizer):
    samples, raw = conversations
    whole = [sample for sample in samples if len(sample.turns) == 4 and sample.measures["tool_calls"] == 2]
    assert len(whole) >= 2
    texts = [
        tuple(byte_tokenizer.decode(sample.response_ids[each.start : each.end - 1]) for each in sample.turns)
        for sample in whole
    ]
    assert talker.TURNS in texts
    for sample in samples:
        for each in sample.turns:
            read = tuple(sample.prompt_ids + sample.response_ids[: each.start])
            sampled = (read, sample.response_ids[each.start : each.end], sample.logprobs[each.start : each.end])
            raw.remove(sampled)  # each of the engine's completions is one turn of one sample
        turns = torch.zeros(len(sample.response_ids), dtype=torch.bool)
        for each in sample.turns:
            turns[each.start : each.end] = True
        assert torch.equal(turns, written(sample))
        assert len(sample.response_ids) <= TOKENS
    assert raw == []
    for sample in whole:
        heard = [byte_tokenizer.decode(sample.response_ids[a.end : b.start]) for a, b in pairwise(sample.turns)]
        assert "user\n" + talker.FOLLOW_UP in heard[1]
        assert all("tool\n" in answer for answer in (heard[0], heard[2]))
        assert [each.reward for each in sample.turns] == [0, 0.25, 0, 0]
        assert sample.measures["template_mismatch"] == 0
    rendered = byte_tokenizer.apply_chat_template(talker.conversation(), tokenize=False)
    sample = whole[texts.index(talker.TURNS)]
    assert byte_tokenizer.decode(sample.prompt_ids + sample.response_ids) + "\n" == rendered


def test_the_trainer_s_log_probabilities_are_the_engine_s(conversations, trainer):
    samples, _ = conversations
    batch = pack(samples, [1024])
    found = trainer.logprobs(batch, only_loss=True)
    ours, theirs = found[batch.loss_mask > 0], batch.sampler_logprobs[batch.loss_mask > 0]
    assert len(ours) == sum(sum(sample.loss_mask) for sample in samples) > 1000
    assert (ours - theirs).abs().max() < 1e-4


@pytest.fixture
def trainer(policy_dir):
    config = TrainerConfig(steps=1, row_tokens=[1024], param_dtype="float32")
    trainer = PolicyTrainer(config, AlgorithmConfig(), policy_dir)
    yield trainer
    trainer.close()


def gradients(trainer, batch):
    for parameter in trainer.policy.model.parameters():
        parameter.grad = None
    trainer.backward(batch)
    found = {name: parameter.grad.clone() for name, parameter in trainer.policy.model.named_parameters()}
    return trainer.policy.adapter.to_hf(found)


def test_only_what_the_policy_wrote_has_a_gradient(conversations, trainer, policy_dir):
    samples, _ = conversations
    for number, sample in enumerate(samples):
        sample.advantage = (-1.0) ** number + 0.1 * number
    batch = pack(samples, [1024])
    masked = (batch.labels >= 0) & (batch.loss_mask == 0)
    assert masked.any()

    # What stands at tokens of the environment or of the prompt does not matter, to the bit.
    expected = gradients(trainer, batch)
    for column in (batch.sampler_logprobs, batch.old_logprobs, batch.advantages):
        column[masked] = torch.randn(int(masked.sum()), generator=torch.Generator().manual_seed(1)) * 5
    for name, gradient in gradients(trainer, batch).items():
        assert torch.equal(gradient, expected[name]), name

    # The hidden state that predicts a token reaches the loss through that token's logits alone.
    states = []
    hook = trainer.policy.model.lm_head.register_forward_pre_hook(
        lambda _, inputs: (inputs[0].retain_grad(), states.append(inputs[0]))[0]
    )
    gradients(trainer, batch)
    hook.remove()
    real = batch.segment_ids > 0
    sizes = torch.cat(
        [state.grad.abs().sum(-1).flatten()[: int(row.sum())] for state, row in zip(states, real, strict=True)]
    )
    assert (sizes[batch.loss_mask[real] == 0] == 0).all()
    assert (sizes[batch.loss_mask[real] > 0] > 0).float().mean() > 0.9  # some tokens are as good as certain

    # And it is the gradient of the policy's own tokens, as transformers sees it, one sample at a time.
    model = Qwen3ForCausalLM.from_pretrained(policy_dir, dtype=torch.float32)
    tokens = sum(sum(sample.loss_mask) for sample in samples)
    sum(
        -sample.advantage * transformers_logprobs(model, sample)[written(sample)].sum() / tokens for sample in samples
    ).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(expected[name], parameter.grad, atol=2e-5, rtol=2e-3)


def test_a_second_chance(byte_tokenizer, policy_engine, run, policy_model):
    name = "examples.custom_environment.retry_once:RetryOnce"
    environment = make_environment(EnvironmentConfig(name=name, options={"feedback": "No."}), byte_tokenizer)
    params = SamplingParams(max_response_tokens=160, temperature=1.0, seed=11)
    samples = run(environment.run(prompt(byte_tokenizer, "2 + 3 ="), 12, params, policy_engine.generate))
    assert len(samples) == 12
    retried = [sample for sample in samples if 0 in sample.loss_mask]
    assert len(retried) >= 3
    for sample in samples:
        assert len(sample.response_ids) == len(sample.loss_mask) == len(sample.logprobs) <= 160
        with torch.no_grad():
            expected = transformers_logprobs(policy_model, sample)
        ours = torch.tensor(sample.logprobs)
        torch.testing.assert_close(ours[written(sample)], expected[written(sample)], atol=1e-4, rtol=1e-3)
        assert not ours[~written(sample)].any()
        message = [i for i, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask == 0]
        if message:
            text = byte_tokenizer.decode(message)
            assert text == "\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
