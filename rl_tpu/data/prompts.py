"""From a prompt source to tokenized prompts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Literal

from rl_tpu.config.schema import PromptSourceConfig
from rl_tpu.data.files import file_problems
from rl_tpu.data.generated import generated_problems, make_task
from rl_tpu.data.problem import Message, Problem, side
from rl_tpu.errors import UserError
from rl_tpu.registry import one_line
from rl_tpu.types import Prompt


@dataclass(frozen=True)
class PromptSet:
    """``skipped`` counts prompts left out as too long, ``duplicates`` repeated problems (the first one stays)."""

    prompts: list[Prompt]
    skipped: int = 0
    duplicates: int = 0

    def __len__(self) -> int:
        return len(self.prompts)


def check_source(config: PromptSourceConfig) -> None:
    """Raise UserError for what is wrong with a source even before its file is there or a problem is generated."""
    if "{prompt}" not in config.template:
        raise UserError(f"the prompt template {config.template!r} has no {{prompt}} in it")
    if config.held_out_share == {"held_out": 0.0, "train": 1.0}.get(config.part):
        raise UserError(f"with held_out_share {config.held_out_share} nothing is on the side {config.part!r}")
    if config.kind == "file" and config.path is None:
        raise UserError("a prompt source of kind file needs a path")
    if config.kind == "reasoning_gym":
        if config.task is None:
            raise UserError("a prompt source of kind reasoning_gym needs a task, for example chain_sum")
        if config.size is None:
            raise UserError("a prompt source of kind reasoning_gym needs a size, the number of problems to generate")
        make_task(config.task, config.task_options)


def load_prompts(
    config: PromptSourceConfig, tokenizer: Any, *, max_prompt_tokens: int, too_long: Literal["skip", "fail"]
) -> PromptSet:
    """Distinct problems of one side of the split, rendered with the chat template and tokenized.

    A Hugging Face ``tokenizer`` with a chat template renders every problem with its generation prompt. A prompt of more
    than ``max_prompt_tokens`` tokens is skipped and counted, or an error. Raises UserError for anything wrong with the
    source, naming file and line.
    """
    check_source(config)
    problems, duplicates = _select(config)
    texts, rendered_messages = [], []
    for problem in problems:
        messages = _messages(problem, config)
        texts.append(_render(messages, problem.where, tokenizer))
        rendered_messages.append(tuple(messages))
    prompts = []
    for problem, messages, tokens in zip(problems, rendered_messages, _tokenize(texts, tokenizer), strict=True):
        if len(tokens) <= max_prompt_tokens:
            prompts.append(Prompt(problem.id, tuple(tokens), problem.answer, messages, problem.metadata))
        elif too_long == "fail":
            raise UserError(
                f"{problem.where}: the prompt has {len(tokens)} tokens, more than max_prompt_tokens {max_prompt_tokens}"
            )
    skipped = len(problems) - len(prompts)
    if not prompts:
        why = f"; all {skipped} are longer than {max_prompt_tokens} tokens" if skipped else ""
        raise UserError(f"{_source(config)} has no prompt on its side {config.part!r} of the split{why}")
    return PromptSet(prompts, skipped, duplicates)


def _select(config: PromptSourceConfig) -> tuple[list[Problem], int]:
    """The first ``size`` distinct problems on the wanted side, and how many repetitions were passed over."""
    problems: Iterable[Problem] = (
        generated_problems(config) if config.kind == "reasoning_gym" else file_problems(config)
    )
    chosen: list[Problem] = []
    seen: set[tuple[str, str]] = set()
    duplicates = since_new = 0
    for problem in problems:
        # The same question with another answer is another problem of a file, but a generated task repeating itself.
        key = (str(problem.content), "" if config.kind == "reasoning_gym" else repr(problem.answer))
        if key in seen:
            duplicates += 1
            since_new += 1
            if config.kind == "reasoning_gym" and since_new > 1000 + 10 * len(seen):
                raise UserError(
                    f"{_source(config)} has only {len(chosen)} distinct problems on its side {config.part!r} of the "
                    f"split, not {config.size}: lower size or widen task_options"
                )
            continue
        seen.add(key)
        since_new = 0
        if config.part in ("all", side(problem.text, config.held_out_share)):
            chosen.append(problem)
        if len(chosen) == config.size:
            break
    return chosen, duplicates


def _messages(problem: Problem, config: PromptSourceConfig) -> list[Message]:
    if not isinstance(problem.content, str):
        return problem.content
    # Not str.format: templates and problems are full of LaTeX braces.
    user = {"role": "user", "content": config.template.replace("{prompt}", problem.content)}
    return [{"role": "system", "content": config.system_prompt}, user] if config.system_prompt else [user]


def _render(messages: list[Message], where: str, tokenizer: Any) -> str:
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise UserError(f"{name} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception as error:  # templates raise whatever their authors chose, for example for an unknown role
        raise UserError(f"{where}: the chat template refuses these messages: {one_line(error)}") from error
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: the prompt holds half of a surrogate pair, which is no character") from None
    return text


def _tokenize(texts: list[str], tokenizer: Any) -> Iterator[list[int]]:
    """Token ids of rendered prompts. In blocks: besides ids a fast tokenizer keeps much that nobody needs."""
    for start in range(0, len(texts), 256):
        block = texts[start : start + 256]
        # The template wrote the special tokens already.
        yield from tokenizer(block, add_special_tokens=False, verbose=False)["input_ids"]


def _source(config: PromptSourceConfig) -> str:
    return f"prompt file {config.path}" if config.kind == "file" else f"reasoning_gym task {config.task!r}"
