"""Requests of the OpenAI chat API, checked and brought into the form that a chat template reads. Pure.

Served is `POST /chat/completions` as the package `openai` 2.8 speaks it
(https://platform.openai.com/docs/api-reference/chat), with the fields of it that make sense for a policy in training.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
"""Roles of the API, and what a chat template calls them."""
DRAWING = ("temperature", "top_p", "top_k", "min_p")
"""Fields of a request that are fields of SamplingParams too."""
BIASES = ("frequency_penalty", "presence_penalty", "logit_bias")
"""Fields that change the distribution if they are not 0 or empty."""


class ApiError(Exception):
    """An answer other than 200, in OpenAI's form."""

    def __init__(self, message: str, *, status: int = 400, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status = status
        kind = "invalid_request_error" if status < 500 else "server_error"
        self.body = {"error": {"message": message, "type": kind, "param": param, "code": code}}


@dataclass(frozen=True)
class ChatRequest:
    """``messages`` as a chat template reads them: every content is text, arguments of tool calls are objects.

    ``template_options`` go to the chat template besides, tools among them; ``sampling`` is what the request says about the
    distribution; ``max_tokens`` None: as many as there is room for.
    """

    messages: list[dict[str, Any]]
    template_options: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    sampling: dict[str, Any] = field(default_factory=dict)
    logprobs: bool = False
    stream: bool = False
    include_usage: bool = False


def parse_chat_request(body: Any) -> ChatRequest:
    """Raises ApiError for what is malformed, and for what the caller relies on and does not get here."""
    if not isinstance(body, dict):
        raise ApiError("the body must be a JSON object")
    if body.get("n") not in (None, 1):
        raise ApiError("n must be 1: a session is one sample; for several answers ask several times", param="n")
    if body.get("top_logprobs"):
        raise ApiError(
            "only the log-probabilities of sampled tokens are recorded: no top_logprobs", param="top_logprobs"
        )
    if body.get("functions") or body.get("function_call"):
        raise ApiError("functions and function_call are not served: use tools", param="functions")
    form = body.get("response_format")
    if form is not None and (not isinstance(form, dict) or form.get("type") != "text"):
        raise ApiError("only response_format text is served: others change the distribution", param="response_format")
    stream_options = body.get("stream_options")
    return ChatRequest(
        messages=_messages(body.get("messages")),
        template_options=_template_options(body),
        max_tokens=_max_tokens(body),
        stop=_stop(body.get("stop")),
        sampling={name: body[name] for name in DRAWING if body.get(name) is not None}
        | {name: body[name] for name in BIASES if body.get(name)},
        logprobs=bool(body.get("logprobs")),
        stream=bool(body.get("stream")),
        include_usage=isinstance(stream_options, dict) and bool(stream_options.get("include_usage")),
    )


def message_key(message: dict[str, Any]) -> str:
    """Equal for messages that say the same: white space around an answer, ids of calls and the order of keys aside."""
    content = message["content"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", ())]
    said = [message["role"], content.strip() if message["role"] == "assistant" else content, calls, message.get("name")]
    return json.dumps(said, sort_keys=True)


def _messages(found: Any) -> list[dict[str, Any]]:
    if not isinstance(found, list) or not found:
        raise ApiError("messages must be a list of at least one message", param="messages")
    return [parse_message(message, f"messages[{index}]") for index, message in enumerate(found)]


def parse_message(message: Any, where: str) -> dict[str, Any]:
    """One message as a chat template reads it. Raises ApiError."""
    role = message.get("role") if isinstance(message, dict) else None
    if not isinstance(role, str) or role not in ROLES:
        raise ApiError(f"{where} must be an object with one of the roles {', '.join(ROLES)}", param=where)
    parsed = {"role": ROLES[role], "content": _content(message.get("content"), where)}
    if calls := message.get("tool_calls"):
        parsed["tool_calls"] = _tool_calls(calls, f"{where}.tool_calls")
    return parsed | {key: message[key] for key in ("name", "tool_call_id") if isinstance(message.get(key), str)}


def _content(content: Any, where: str) -> str:
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [content]
    texts = [part.get("text") for part in parts if isinstance(part, dict) and part.get("type") == "text"]
    if len(texts) != len(parts) or not all(isinstance(text, str) for text in texts):
        raise ApiError(f"{where}.content must be text: this policy reads nothing else", param=f"{where}.content")
    return "".join(texts)


def _tool_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    parsed = []
    for call in calls if isinstance(calls, list) else [calls]:
        function = call.get("function") if isinstance(call, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise ApiError(f"{where} must be a list of calls of functions", param=where)
        arguments = function.get("arguments") or "{}"
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments)
            except ValueError:
                raise ApiError(f"{where}: the arguments of {function['name']} are no JSON", param=where) from None
        parsed.append({"type": "function", "function": {"name": function["name"], "arguments": arguments}})
        if isinstance(call.get("id"), str):
            parsed[-1]["id"] = call["id"]
    return parsed


def _template_options(body: dict[str, Any]) -> dict[str, Any]:
    options = body.get("chat_template_kwargs") or {}
    tools, choice = body.get("tools") or [], body.get("tool_choice")
    if not isinstance(options, dict):
        raise ApiError("chat_template_kwargs must be an object", param="chat_template_kwargs")
    if not isinstance(tools, list) or not all(_is_tool(tool) for tool in tools):
        raise ApiError("tools must be a list of functions, each with a name", param="tools")
    if choice not in (None, "auto", "none"):
        raise ApiError("only tool_choice auto and none are served: others change the distribution", param="tool_choice")
    return {**options, "tools": tools} if tools and choice != "none" else dict(options)


def _is_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) and tool.get("type") == "function" else None
    return isinstance(function, dict) and isinstance(function.get("name"), str)


def _max_tokens(body: dict[str, Any]) -> int | None:
    for name in ("max_completion_tokens", "max_tokens"):
        value = body.get(name)
        if value is not None:
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ApiError(f"{name} must be a whole number of at least 1", param=name)
            return value
    return None


def _stop(stop: Any) -> tuple[str, ...]:
    strings = [stop] if isinstance(stop, str) else stop or []
    if not isinstance(strings, list) or not all(isinstance(string, str) and string for string in strings):
        raise ApiError("stop must be a string or a list of strings, none of them empty", param="stop")
    return tuple(strings)
