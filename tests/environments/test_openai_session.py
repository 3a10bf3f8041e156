"""What a session makes of an agent's requests, token by token; the answers are scripted."""

import asyncio

import pytest
from transformers import AutoTokenizer

from rl_tpu.environments.agent.protocol import ApiError, parse_chat_request
from rl_tpu.environments.agent.session import Session
from rl_tpu.environments.chat import Chat
from rl_tpu.errors import RunError
from rl_tpu.types import Completion, Prompt, SamplingParams, VersionSpan

TOOLS_TEMPLATE = (
    "{% if tools %}{{ '<|im_start|>system\n' + (tools | tojson) + '<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] }}"
    "{% for call in message.get('tool_calls') or [] %}"
    "{{ '\n<tool_call>\n' + (call['function'] | tojson) + '\n</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if messages[0]['content'] == 'raise' %}{{ raise_exception('not this one') }}{% endif %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}
USER = {"role": "user", "content": "2 + 3 ="}
AGAIN = {"role": "user", "content": "No."}


@pytest.fixture(scope="module")
def tokenizer(byte_tokenizer, tmp_path_factory):
    """Of its own, with tools in its template."""
    path = tmp_path_factory.mktemp("tokenizer")
    byte_tokenizer.save_pretrained(path)
    tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
    tokenizer.chat_template = TOOLS_TEMPLATE
    return tokenizer


class Script:
    """`generate` that says one text after the other; None is cut off at the token limit."""

    def __init__(self, tokenizer, *texts):
        self.tokenizer = tokenizer
        self.texts = list(texts)
        self.calls = []
        self.completions = []

    async def __call__(self, ids, params, n):
        self.calls.append((list(ids), params))
        text = self.texts.pop(0)
        ids = self.tokenizer(text, add_special_tokens=False)["input_ids"] + [self.tokenizer.eos_token_id]
        reason = "stop" if len(ids) <= params.max_response_tokens else "length"
        ids = ids[: params.max_response_tokens]
        version = len(self.calls)
        completion = Completion(ids, [-0.5] * len(ids), reason, [VersionSpan(version, 0, len(ids))])
        self.completions.append(completion)
        return [completion]


def talk(tokenizer, script, *bodies, response_tokens=400, seed=None, **options):
    """A session after these requests, and what each was answered; errors are answers too."""
    prompt = Prompt("p", tuple(range(50)), "5", (USER,))
    params = SamplingParams(response_tokens, temperature=0.7, seed=seed)

    async def run():
        session = Session(
            tokenizer, lambda template_options: Chat(tokenizer, template_options), prompt, params, script, **options
        )
        answers = []
        for body in bodies:
            body = body(answers) if callable(body) else body
            try:
                answers.append(await session.chat(parse_chat_request(body)))
            except ApiError as error:
                answers.append(error)
        failure = session.failure.exception() if session.failure.done() else None
        await session.close()
        return session, answers, failure

    return asyncio.run(run())


def sample_of(session):
    """What trains."""
    transcript = session.longest().transcript
    return transcript.finish(session.longest().chat.tokenizer, transcript.last_turn_ids())


def render(tokenizer, messages, **options):
    return tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False, **options)


def test_a_request_that_goes_on_continues_the_sampled_tokens(tokenizer):
    script = Script(tokenizer, " 6 ", "5")
    said = {"role": "assistant", "content": "6"}  # stripped by the agent: still the policy's own
    session, answers, _ = talk(tokenizer, script, {"messages": [USER]}, {"messages": [USER, said, AGAIN]})
    assert [answer.content for answer in answers] == [" 6 ", "5"]
    first, second = script.completions
    between = tokenizer("\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)[
        "input_ids"
    ]
    assert script.calls[0][0] == render(tokenizer, [USER])
    assert script.calls[1][0] == script.calls[0][0] + first.response_ids + between

    sample = sample_of(session)
    assert sample.prompt_ids == script.calls[0][0]
    assert sample.response_ids == first.response_ids + between + second.response_ids
    ones = [1] * len(first.response_ids)
    assert sample.loss_mask == ones + [0] * len(between) + [1] * len(second.response_ids)
    assert sample.logprobs == first.logprobs + [0.0] * len(between) + second.logprobs
    written = [(span.version, sample.response_ids[span.start : span.end]) for span in sample.spans]
    assert written == [(1, first.response_ids), (2, second.response_ids)]
    assert sample.text == "5"
    assert (session.answers, session.conversations) == (2, 1)


def test_other_beginnings_are_conversations_of_their_own(tokenizer):
    """A chain of two, a retry of its second question, another tongue, and a changed answer."""
    script = Script(tokenizer, "6", "5", "a longer five", "5", "5")
    said = {"role": "assistant", "content": "6"}
    session, _, _ = talk(
        tokenizer,
        script,
        {"messages": [USER]},
        {"messages": [USER, said, AGAIN]},
        {"messages": [USER, said, {"role": "user", "content": "Sure?"}]},
        {"messages": [{"role": "system", "content": "Be brief."}, USER]},
        {"messages": [USER, {"role": "assistant", "content": "7"}, AGAIN]},
    )
    first, _, retried, *_ = script.completions
    assert (session.answers, session.conversations) == (5, 4)
    assert script.calls[2][0][: len(script.calls[0][0] + first.response_ids)] == script.calls[0][0] + first.response_ids
    assert script.calls[4][0] == render(tokenizer, [USER, {"role": "assistant", "content": "7"}, AGAIN])
    sample = sample_of(session)  # the one with most tokens of the policy
    assert sample.text == "a longer five"
    assert sample.response_ids[: len(first.response_ids)] == first.response_ids
    assert sample.response_ids[-len(retried.response_ids) :] == retried.response_ids
    assert sum(sample.loss_mask) == len(first.response_ids + retried.response_ids)


def test_of_equally_long_ones_the_latest_trains(tokenizer):
    session, _, _ = talk(tokenizer, Script(tokenizer, "5", "6"), {"messages": [USER]}, {"messages": [USER]})
    assert sample_of(session).text == "6"
    assert session.conversations == 2


def test_tool_calls(tokenizer):
    wrote = 'I add.\n<tool_call>\n{"name": "add", "arguments": {"a": 2, "b": 3}}\n</tool_call>'
    script = Script(tokenizer, wrote, "5")

    def go_on(answers):
        message = answers[0].message
        [call] = message["tool_calls"]
        result = {"role": "tool", "content": "=5", "tool_call_id": call["id"]}
        return {"messages": [USER, message, result], "tools": [ADD]}

    session, answers, _ = talk(tokenizer, script, {"messages": [USER], "tools": [ADD]}, go_on)
    assert answers[0].content == "I add."
    assert answers[0].finish_reason == "tool_calls"
    assert [(name, eval(arguments)) for name, arguments in answers[0].tool_calls] == [("add", {"a": 2, "b": 3})]
    assert script.calls[0][0] == render(tokenizer, [USER], tools=[ADD])
    between = tokenizer("\n<|im_start|>tool\n=5<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False)[
        "input_ids"
    ]
    assert script.calls[1][0] == script.calls[0][0] + script.completions[0].response_ids + between
    assert (answers[1].content, answers[1].finish_reason, session.conversations) == ("5", "stop", 1)


@pytest.mark.parametrize(
    ("wrote", "tools"),
    [('<tool_call>\n{"name": "add", "argu\n</tool_call>', [ADD]), ('<tool_call>\n{"name": "add"}\n</tool_call>', [])],
)
def test_broken_calls_and_calls_without_tools_are_text(tokenizer, wrote, tools):
    _, [answer], _ = talk(tokenizer, Script(tokenizer, wrote), {"messages": [USER], "tools": tools})
    assert (answer.content, answer.tool_calls, answer.finish_reason) == (wrote, [], "stop")


def test_a_stop_string_ends_the_answer_at_the_token_that_completes_it(tokenizer):
    script = Script(tokenizer, "one STOP two", "next")
    said = {"role": "assistant", "content": "one "}
    session, answers, _ = talk(
        tokenizer,
        script,
        {"messages": [USER], "stop": ["STOP", "never"]},
        {"messages": [USER, said, AGAIN]},
    )
    assert (answers[0].content, answers[0].finish_reason, len(answers[0].tokens)) == ("one ", "stop", 8)
    sample = sample_of(session)
    kept = script.completions[0].response_ids[:8]
    between = tokenizer(
        "<|im_end|>\n<|im_start|>user\nNo.<|im_end|>\n<|im_start|>assistant\n", add_special_tokens=False
    )["input_ids"]
    assert sample.response_ids == kept + between + script.completions[1].response_ids
    assert sample.spans[0] == VersionSpan(1, 0, 8)
    assert len(sample.logprobs) == len(sample.loss_mask) == len(sample.response_ids)


def test_the_budget_is_the_prompts_tokens_and_the_responses(tokenizer):
    """50 tokens of the prompt and 60 of the response hold every conversation, whatever the agent puts before it."""
    script = Script(tokenizer, "x" * 200, "x" * 200)
    own = len(render(tokenizer, [USER]))
    session, answers, _ = talk(
        tokenizer,
        script,
        {"messages": [USER], "max_tokens": 9},
        {"messages": [USER, {"role": "assistant", "content": "x" * 9}, {"role": "user", "content": "Go on."}]},
        {"messages": [USER, {"role": "assistant", "content": "x" * 9}, {"role": "user", "content": "y" * 70}]},
        {"messages": [{"role": "user", "content": "y" * 110}]},
        response_tokens=60,
    )
    assert script.calls[0][1].max_response_tokens == 9
    assert (answers[0].finish_reason, answers[0].prompt_tokens) == ("length", own)
    sample = sample_of(session)
    assert len(sample.response_ids) == 60
    assert sample.total_tokens <= 110
    assert (answers[1].finish_reason, sample.finish_reason) == ("length", "length")
    for refused in answers[2:]:
        assert refused.body["error"]["code"] == "context_length_exceeded"
    assert session.context_exceeded
    assert session.answers == 2


def test_seeds_differ_between_answers(tokenizer):
    body = {"messages": [USER], "seed": 4}
    script = Script(tokenizer, "a", "b", "c")
    talk(tokenizer, script, body, body, body, seed=100, seed_step=8)
    assert [params.seed for _, params in script.calls] == [100, 108, 116]


def test_the_run_says_how_tokens_are_drawn(tokenizer):
    body = {"messages": [USER], "temperature": 0.2, "top_p": 1, "presence_penalty": 1}
    script = Script(tokenizer, "5")
    session, _, _ = talk(tokenizer, script, body)
    assert script.calls[0][1].temperature == 0.7
    assert session.ignored == {"temperature", "presence_penalty"}
    _, [refused, answer], _ = talk(
        tokenizer, Script(tokenizer, "5"), body, {"messages": [USER], "temperature": 0.7}, strict=True
    )
    assert refused.status == 400
    assert "presence_penalty, temperature is other than the run's" in str(refused)
    assert answer.content == "5"


def test_messages_that_the_template_refuses(tokenizer):
    session, [refused], _ = talk(tokenizer, Script(tokenizer), {"messages": [{"role": "user", "content": "raise"}]})
    assert (refused.status, "not this one" in str(refused)) == (400, True)
    assert session.longest() is None


def test_an_engine_that_fails_is_told_to_the_run(tokenizer):
    async def broken(ids, params, n):
        raise RunError("no engine is left")

    _, [answer], failure = talk(tokenizer, broken, {"messages": [USER]})
    assert answer.status == 503
    assert isinstance(failure, RunError)


def test_closing_ends_what_is_being_written(tokenizer):
    async def run():
        never = asyncio.Event()

        async def generate(ids, params, n):
            await never.wait()

        session = Session(
            tokenizer, lambda options: Chat(tokenizer, options), Prompt("p", (1,), ""), SamplingParams(400), generate
        )
        asking = asyncio.ensure_future(session.chat(parse_chat_request({"messages": [USER]})))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        await session.close()
        with pytest.raises(ApiError, match="has ended") as error:
            await asyncio.wait_for(asking, 5)
        assert error.value.status == 410

    asyncio.run(run())
