"""Requests and answers of the OpenAI chat API, held against the package `openai`."""

import json

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from rl_tpu.environments.agent.protocol import ApiError, message_key, parse_chat_request, parse_message
from rl_tpu.environments.agent.responses import Answer, completion, events

ASK = {"messages": [{"role": "user", "content": "2 + 3 ="}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object", "properties": {}}}}


def test_messages_become_what_a_chat_template_reads():
    call = {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
    messages = [
        {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
        {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None},
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    ]
    request = parse_chat_request({"messages": messages, "tools": [TOOL], "chat_template_kwargs": {"thinking": False}})
    assert request.messages == [
        {"role": "system", "content": "Be brief."},
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "add", "arguments": {"a": 2}}}],
        },
        {"role": "tool", "content": "5", "tool_call_id": "c1"},
    ]
    assert request.template_options == {"thinking": False, "tools": [TOOL]}
    assert parse_chat_request({**ASK, "tools": [TOOL], "tool_choice": "none"}).template_options == {}


def test_what_a_request_asks_for():
    request = parse_chat_request(
        {**ASK, "max_tokens": 9, "max_completion_tokens": 7, "stop": "x", "temperature": 0, "top_p": None}
        | {"presence_penalty": 0, "logit_bias": {"5": 1}, "seed": 3, "logprobs": True, "n": 1, "user": "me"}
    )
    assert (request.max_tokens, request.stop, request.logprobs, request.stream) == (7, ("x",), True, False)
    assert request.sampling == {"temperature": 0, "logit_bias": {"5": 1}}


@pytest.mark.parametrize(
    ("change", "param", "expected"),
    [
        ({"n": 2}, "n", "n must be 1"),
        ({"messages": []}, "messages", "at least one"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0]", "one of the roles"),
        ({"messages": ["hello"]}, "messages[0]", "must be an object"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages[0].content", "must be text"),
        (
            {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "{"}}]}]},
            "messages[0].tool_calls",
            "the arguments of f are no JSON",
        ),
        ({"tools": [{"type": "web_search"}]}, "tools", "list of functions"),
        ({"tools": [TOOL], "tool_choice": "required"}, "tool_choice", "auto and none"),
        ({"response_format": {"type": "json_object"}}, "response_format", "only response_format text"),
        ({"functions": [{}]}, "functions", "use tools"),
        ({"logprobs": True, "top_logprobs": 3}, "top_logprobs", "no top_logprobs"),
        ({"max_tokens": 0}, "max_tokens", "at least 1"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens", "whole number"),
        ({"stop": [""]}, "stop", "none of them empty"),
        ({"chat_template_kwargs": 3}, "chat_template_kwargs", "an object"),
    ],
)
def test_what_is_refused(change, param, expected):
    with pytest.raises(ApiError) as error:
        parse_chat_request({**ASK, **change})
    assert error.value.status == 400
    said = error.value.body["error"]
    assert said["param"] == param
    assert expected in said["message"]
    assert said["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [None, [], "text", 3])
def test_a_body_that_is_no_object(body):
    with pytest.raises(ApiError, match="JSON object"):
        parse_chat_request(body)


def test_the_same_message_in_other_clothes():
    def key(**message):
        return message_key(parse_message(message, "here"))

    call = {"type": "function", "function": {"name": "f", "arguments": '{"a":1,"b":2}'}}
    other = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"b": 2, "a": 1}'}}
    assert key(role="assistant", content=" so ", tool_calls=[call]) == key(
        role="assistant", content="so", tool_calls=[other]
    )
    assert key(role="assistant", content=None) == key(role="assistant", content="")
    assert key(role="user", content="so ") != key(role="user", content="so")
    assert key(role="user", content="so") != key(role="tool", content="so")


ANSWER = Answer(
    id="1f",
    created=1,
    content="I add.",
    tool_calls=[("add", '{"a": 2}'), ("add", '{"a": 3}')],
    finish_reason="tool_calls",
    tokens=[("I", -0.5), (" add", -1.5), (".", -0.25)],
    prompt_tokens=11,
)


def test_an_answer_is_what_the_client_expects():
    body = completion(ANSWER, logprobs=True)
    parsed = ChatCompletion.model_validate(body, strict=True)
    [choice] = parsed.choices
    assert choice.message.content == "I add."
    assert [call.function.arguments for call in choice.message.tool_calls] == ['{"a": 2}', '{"a": 3}']
    assert len({call.id for call in choice.message.tool_calls}) == 2
    assert [(token.token, token.logprob) for token in choice.logprobs.content] == ANSWER.tokens
    assert (parsed.usage.prompt_tokens, parsed.usage.completion_tokens, parsed.usage.total_tokens) == (11, 3, 14)
    assert completion(ANSWER, logprobs=False)["choices"][0]["logprobs"] is None


def test_events_add_up_to_the_answer():
    lines = "".join(events(ANSWER, logprobs=True, include_usage=True)).strip().split("\n\n")
    assert lines.pop() == "data: [DONE]"
    chunks = [ChatCompletionChunk.model_validate(json.loads(line.removeprefix("data: "))) for line in lines]
    whole = ChatCompletion.model_validate(completion(ANSWER, logprobs=True))
    delta = chunks[0].choices[0].delta
    assert delta.content == whole.choices[0].message.content
    assert [call.index for call in delta.tool_calls] == [0, 1]
    assert [call.function.model_dump() for call in delta.tool_calls] == [
        call.function.model_dump() for call in whole.choices[0].message.tool_calls
    ]
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices] == [None, "tool_calls"]
    assert chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {whole.id}
    assert len(list(events(ANSWER, logprobs=False, include_usage=False))) == 3
