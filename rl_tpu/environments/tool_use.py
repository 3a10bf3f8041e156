"""Turns in which the policy calls tools and reads their answers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping, Sequence
from contextlib import AsyncExitStack
from typing import Any

from rl_tpu.environments.calling import TimeLimitError, call, together
from rl_tpu.environments.conversation import Conversation, Progress, Reply, require_positive
from rl_tpu.environments.hermes import Call, parse_calls
from rl_tpu.environments.tool import ToolError
from rl_tpu.environments.tool_registry import check_arguments, make_tools, unknown_tool
from rl_tpu.errors import RunError, UserError
from rl_tpu.registry import describe

log = logging.getLogger(__name__)

_ANSWER = "@@an answer@@"


class ToolUse(Conversation):
    """The policy calls tools (`hermes`) and reads what they answer, until it writes a turn without a call.

    Calls of one turn run at the same time; their answers are messages of the role `tool`, in order. A call that cannot be
    read, of an unknown tool, with wrong arguments or out of time is answered with what is wrong, and counted.

    Args:
        tools: names, import paths, or mappings ``{name, options}``; see `tool_registry`.
        tool_timeout_s: of one call.
        max_answer_chars: of one answer; of a longer one the middle is left out.
        max_calls: of one turn; others are refused.
        parallel_calls: at the same time, of all samples together; others wait.
        tool_role: role of the messages with answers, for templates that do not know `tool`.
        max_turns, max_turn_tokens, timeout_s, reward_text, template: see `Conversation`.
        on_error: what an exception of a tool does that is no ToolError: it is answered and counted as ``tool_faults``
            (`sample`), or ends the run (`fail`).
    """

    counts = ("tool_calls", "tool_errors", "tool_faults", "tool_seconds")

    def __init__(
        self,
        tokenizer: Any,
        tools: Sequence[str | Mapping[str, Any]],
        *,
        tool_timeout_s: float = 30.0,
        max_answer_chars: int = 4000,
        max_calls: int = 8,
        parallel_calls: int = 64,
        tool_role: str = "tool",
        **common: Any,
    ) -> None:
        self.tools = make_tools(tools)
        super().__init__(tokenizer, **common)
        require_positive(
            tool_timeout_s=tool_timeout_s,
            max_answer_chars=max_answer_chars,
            max_calls=max_calls,
            parallel_calls=parallel_calls,
        )
        self.tool_timeout_s = tool_timeout_s
        self.max_answer_chars = max_answer_chars
        self.max_calls = max_calls
        self.tool_role = tool_role
        self._places = asyncio.Semaphore(parallel_calls)
        self._opened = AsyncExitStack()
        self._check_template()

    @property
    def template_options(self) -> Mapping[str, Any]:
        return {"tools": [tool.schema for tool in self.tools.values()], **self.template}

    async def open(self) -> None:
        for tool in self.tools.values():
            self._opened.push_async_callback(tool.close)
            await tool.open()

    async def close(self) -> None:
        await self._opened.aclose()

    async def respond(self, progress: Progress) -> Reply:
        count = progress.measures
        _, calls = parse_calls(progress.transcript.turn_text(self.chat))
        count["tool_calls"] += len(calls)
        answers = await together(self._answer(each, index, count) for index, each in enumerate(calls))
        said = zip((each.name if each.name in self.tools else "" for each in calls), answers, strict=True)
        return Reply([{"role": self.tool_role, "name": name, "content": answer} for name, answer in said])

    async def _answer(self, each: Call, index: int, count: dict[str, float]) -> str:
        try:
            if each.arguments is None:
                raise ToolError(each.error)
            if index >= self.max_calls:
                raise ToolError(f"at most {self.max_calls} calls in one turn are answered")
            return self._readable(await self._call(each.name, each.arguments, count))
        except ToolError as error:
            count["tool_errors"] += 1
            return self._readable(f"Error: {error}")

    async def _call(self, name: str, arguments: dict[str, Any], count: dict[str, float]) -> str:
        if name not in self.tools:
            raise ToolError(unknown_tool(name, self.tools))
        tool = self.tools[name]
        check_arguments(tool, arguments)
        clock = asyncio.get_running_loop().time

        async def answer() -> str:
            return await tool.call(**arguments)

        async with self._places:
            start = clock()
            try:
                return str(await call(answer, timeout_s=self.tool_timeout_s))
            except TimeLimitError as error:
                raise ToolError(f"{name} gave {error}") from None
            except (ToolError, RunError):
                raise
            except Exception as error:
                count["tool_faults"] += 1
                message = f"tool {name!r} failed: {describe(error)}"
                if self.on_error == "fail":
                    raise RunError(f"{message} (environment.options.on_error is fail)") from error
                self.warn_once(f"tool {name}", message)
                raise ToolError(f"{name} failed: {type(error).__name__}: {error}") from error
            finally:
                count["tool_seconds"] += clock() - start

    def _readable(self, answer: str) -> str:
        # JSON may hold half of a surrogate pair, which no tokenizer takes.
        answer = answer.encode("utf-8", "replace").decode()
        left_out = len(answer) - self.max_answer_chars
        if left_out > 0:
            half = self.max_answer_chars // 2
            answer = f"{answer[:half]}\n... {left_out} characters left out ...\n{answer[len(answer) - half :]}"
        return self.chat.defused(answer)

    def _check_template(self) -> None:
        """Raise UserError if answers of tools would not reach the policy; say so if the tools' descriptions do not."""
        text, _ = self.chat.after_turn([{"role": self.tool_role, "name": "-", "content": _ANSWER}])
        if _ANSWER not in text:
            raise UserError(
                f"the chat template leaves out messages of the role {self.tool_role!r};"
                " set environment.options.tool_role to one that it shows, for example user"
            )
        prompt = self.chat.render([{"role": "user", "content": "-"}], generation_prompt=True)
        hidden = [name for name in self.tools if name not in prompt]
        if hidden:
            log.warning(
                "The chat template does not show the policy its tools (%s): describe them and how to call them in"
                " data.train.system_prompt, unless the policy knows them already.",
                ", ".join(hidden),
            )
