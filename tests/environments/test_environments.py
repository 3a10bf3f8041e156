"""What environments write into a sample, token by token."""

import asyncio

import pytest

from rl_tpu.config.schema import EnvironmentConfig
from rl_tpu.environments import Chat, Environment, Transcript, make_environment
from rl_tpu.errors import UserError
from rl_tpu.types import Completion, Prompt, SamplingParams, VersionSpan

PARAMS = SamplingParams(max_response_tokens=200, temperature=0.7)


def completion(tokenizer, text, *, end=True, version=3):
    ids = tokenizer(text, add_special_tokens=False)["input_ids"] + ([tokenizer.eos_token_id] if end else [])
    logprobs = [-0.1 * (i + 1) for i in range(len(ids))]
    return Completion(ids, logprobs, "stop" if end else "length", [VersionSpan(version, 0, len(ids))])


class Script:
    """`generate` that answers from a list, and remembers what it was asked."""

    def __init__(self, *answers):
        self.answers = list(answers)
        self.calls = []

    async def __call__(self, ids, params, n):
        self.calls.append((list(ids), params, n))
        taken, self.answers = self.answers[:n], self.answers[n:]
        return taken


@pytest.fixture
def prompt(byte_tokenizer):
    messages = [{"role": "user", "content": "2 + 3 ="}]
    ids = byte_tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    return Prompt("p", tuple(ids), "5", tuple(messages))


def test_single_turn(byte_tokenizer, prompt):
    environment = make_environment(EnvironmentConfig(), byte_tokenizer)
    answers = [completion(byte_tokenizer, "5"), completion(byte_tokenizer, "long é", end=False)]
    script = Script(*answers)
    samples = asyncio.run(environment.run(prompt, 2, PARAMS, script))
    assert script.calls == [(list(prompt.ids), PARAMS, 2)]
    assert [sample.text for sample in samples] == ["5", "long é"]
    for sample, answer in zip(samples, answers, strict=True):
        assert sample.prompt_ids == list(prompt.ids)
        assert sample.response_ids == answer.response_ids
        assert sample.logprobs == answer.logprobs
        assert sample.loss_mask == [1] * len(answer.response_ids)
        assert sample.spans == answer.spans
        assert sample.finish_reason == answer.finish_reason


def test_ids_stay_as_sampled():
    """`he` + `llo` is what was sampled; a tokenizer would write `hello` with other ids."""

    class Merging:
        def decode(self, ids, skip_special_tokens):
            return "".join({7: "he", 8: "llo"}[i] for i in ids)

    class Twice(Environment):
        async def run(self, prompt, n, params, generate):
            transcript = Transcript(prompt)
            for _ in range(2):
                [answer] = await generate(transcript.ids, params, 1)
                transcript.add_completion(answer)
            return [transcript.finish(self.tokenizer)]

    script = Script(*(Completion([i], [-1.0], "stop", [VersionSpan(i, 0, 1)]) for i in (7, 8)))
    [sample] = asyncio.run(Twice(Merging()).run(Prompt("p", (1, 2), ""), 1, PARAMS, script))
    assert script.calls[1][0] == [1, 2, 7]
    assert sample.response_ids == [7, 8]
    assert sample.text == "hello"
    assert sample.spans == [VersionSpan(7, 0, 1), VersionSpan(8, 1, 2)]


def retry_once(tokenizer, **options):
    name = "examples.custom_environment.retry_once:RetryOnce"
    return make_environment(EnvironmentConfig(name=name, options=options), tokenizer)


def test_retry_continues_sampled_tokens_and_masks_the_message(byte_tokenizer, prompt):
    first, second = completion(byte_tokenizer, "6", version=3), completion(byte_tokenizer, "5", version=4)
    script = Script(first, second)
    [sample] = asyncio.run(retry_once(byte_tokenizer, feedback="No.").run(prompt, 1, PARAMS, script))

    conversation = [
        {"role": "user", "content": "2 + 3 ="},
        {"role": "assistant", "content": "6"},
        {"role": "user", "content": "No."},
    ]
    rendered = byte_tokenizer.apply_chat_template(conversation, add_generation_prompt=True, return_dict=False)
    continued, params, n = script.calls[1]
    assert continued == rendered
    assert n == 1
    message_tokens = len(rendered) - len(prompt.ids) - len(first.response_ids)
    assert params.max_response_tokens == 200 - len(first.response_ids) - message_tokens
    assert params.temperature == 0.7

    ones, others = [1] * len(first.response_ids), [0] * message_tokens
    assert sample.loss_mask == ones + others + [1] * len(second.response_ids)
    assert sample.logprobs == first.logprobs + [0.0] * message_tokens + second.logprobs
    assert sample.prompt_ids + sample.response_ids == rendered + second.response_ids
    written = [(span.version, sample.response_ids[span.start : span.end]) for span in sample.spans]
    assert written == [(3, first.response_ids), (4, second.response_ids)]
    assert (sample.oldest_version, sample.newest_version) == (3, 4)
    assert sample.text == "5"


def test_right_cut_off_and_long_answers_are_not_retried(byte_tokenizer, prompt):
    answers = [
        completion(byte_tokenizer, "5"),
        completion(byte_tokenizer, "6", end=False),
        completion(byte_tokenizer, "6" * 190),
    ]
    script = Script(*answers)
    samples = asyncio.run(retry_once(byte_tokenizer).run(prompt, 3, PARAMS, script))
    assert len(script.calls) == 1
    assert [sample.response_ids for sample in samples] == [answer.response_ids for answer in answers]
    assert all(set(sample.loss_mask) == {1} for sample in samples)


def test_message_after_a_turn_without_its_end_token_ends_it(byte_tokenizer, prompt):
    transcript = Transcript(prompt)
    transcript.add_completion(completion(byte_tokenizer, "6", end=False))
    message = transcript.render(Chat(byte_tokenizer), [{"role": "user", "content": "No."}])
    assert (
        byte_tokenizer.decode(message.ids)
        == message.text
        == "<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n"
    )


class NeedsOption(Environment):
    def __init__(self, tokenizer, turns: int):
        super().__init__(tokenizer)
        if turns < 1:
            raise ValueError("turns must be positive")

    async def run(self, prompt, n, params, generate):
        return []


@pytest.mark.parametrize(
    ("name", "options", "expected"),
    [
        ("single_trun", {}, "did you mean 'single_turn'"),
        ("single_turn", {"turns": 2}, "its options: none"),
        ("json:JSONDecoder", {}, "no subclass"),
        ("rl_tpu.environments:Environment", {}, "abstract"),
        ("test_environments:NeedsOption", {}, "turns"),
        ("test_environments:NeedsOption", {"turns": "many"}, "valid integer"),
        ("test_environments:NeedsOption", {"turns": 0}, "turns must be positive"),
        ("no_such_module:Thing", {}, "no module 'no_such_module'"),
    ],
)
def test_bad_environments_are_one_line(name, options, expected):
    with pytest.raises(UserError) as error:
        make_environment(EnvironmentConfig(name=name, options=options), None)
    assert expected in str(error.value)
    assert "\n" not in str(error.value)
