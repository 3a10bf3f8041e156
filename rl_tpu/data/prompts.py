"""From a prompt source, or a mixture of several, to tokenized prompts."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, Literal

from rl_tpu.config.rules import source_rules
from rl_tpu.config.schema import DataConfig, PromptSourceConfig
from rl_tpu.data.generated import make_task
from rl_tpu.data.problem import Message, Problem, fingerprint
from rl_tpu.data.selection import describe_source, select_problems
from rl_tpu.errors import UserError
from rl_tpu.registry import one_line
from rl_tpu.types import Prompt

BLOCK = 256
"""Prompts tokenized at once: besides ids a fast tokenizer keeps much that nobody needs."""


@dataclass(frozen=True)
class PromptSet:
    """Prompts, how many were left out for which reason, and the fingerprints of the problems behind the prompts."""

    prompts: list[Prompt] = field(default_factory=list)
    left_out: Counter[str] = field(default_factory=Counter)
    fingerprints: set[bytes] = field(default_factory=set)

    def __len__(self) -> int:
        return len(self.prompts)

    def __str__(self) -> str:
        reasons = ", ".join(f"{count:,} {reason}" for reason, count in sorted(self.left_out.items()))
        return f"{len(self):,} prompts" + (f" (left out: {reasons})" if reasons else "")


def check_source(config: PromptSourceConfig) -> None:
    """Raise UserError for what is wrong with a source even before its file is there or a problem is generated."""
    for finding in source_rules(config):
        raise UserError(finding)
    if config.kind == "reasoning_gym":
        make_task(config.task, config.task_options)


def load_prompts(
    config: PromptSourceConfig,
    tokenizer: Any,
    *,
    max_prompt_tokens: int,
    too_long: Literal["skip", "fail"],
    elsewhere: Mapping[bytes, str] | None = None,
    name: str = "",
    template_options: Mapping[str, Any] | None = None,
) -> PromptSet:
    """Distinct problems of one source, rendered with the chat template and tokenized.

    A Hugging Face ``tokenizer`` with a chat template renders every problem with its generation prompt. A prompt of more
    than ``max_prompt_tokens`` tokens is skipped and counted, or an error. ``elsewhere`` has fingerprints of problems that
    are left out, and where they are; ``name`` is that of the source in a mixture, or of the evaluation set;
    ``template_options`` go to the chat template (an environment's tools). Raises UserError for anything wrong with the
    source, naming file and line.
    """
    check_source(config)
    found = PromptSet()
    problems = select_problems(config, found.left_out, elsewhere or {})
    for problem, messages, ids in _tokenized(problems, config, tokenizer, template_options or {}):
        if len(ids) <= max_prompt_tokens:
            identity = f"{name}/{problem.id}" if name else problem.id
            found.prompts.append(
                Prompt(identity, tuple(ids), problem.answer, messages, problem.metadata, name, problem.sampling)
            )
            found.fingerprints.add(fingerprint(problem.text))
        elif too_long == "fail":
            raise UserError(
                f"{problem.where}: the prompt has {len(ids)} tokens, more than max_prompt_tokens {max_prompt_tokens}"
            )
        else:
            found.left_out[f"longer than {max_prompt_tokens} tokens"] += 1
    if not found.prompts:
        raise UserError(f"{describe_source(config)}, side {config.part!r} of the split: {found}")
    return found


def load_training_prompts(
    config: DataConfig,
    tokenizer: Any,
    evaluation: Mapping[str, PromptSet] | None = None,
    template_options: Mapping[str, Any] | None = None,
) -> dict[str, PromptSet]:
    """The prompts of `data.train` by the name of their source in a mixture; the name of a lone source is empty.

    Of a problem in several sources the first one keeps it. With `exclude_evaluation` problems that are in an
    ``evaluation`` set (by name) are left out. Raises UserError as `load_prompts` does.
    """
    elsewhere: dict[bytes, str] = {}
    if config.exclude_evaluation:
        for name, chosen in (evaluation or {}).items():
            elsewhere |= dict.fromkeys(chosen.fingerprints, f"evaluation set {name}")
    sources: Mapping[str, PromptSourceConfig] = {"": config.train}
    if config.train.kind == "mixture" and config.train.sources:
        sources = config.train.sources
    training = {}
    for name, source in sources.items():
        training[name] = load_prompts(
            source,
            tokenizer,
            max_prompt_tokens=config.max_prompt_tokens,
            too_long=config.too_long,
            elsewhere=elsewhere,
            name=name,
            template_options=template_options,
        )
        elsewhere |= dict.fromkeys(training[name].fingerprints, f"source {name}")
    return training


def _tokenized(
    problems: Iterable[Problem], config: PromptSourceConfig, tokenizer: Any, options: Mapping[str, Any]
) -> Iterator[tuple[Problem, tuple[Message, ...], list[int]]]:
    problems = iter(problems)
    while block := list(islice(problems, BLOCK)):
        conversations = [_messages(problem, config) for problem in block]
        pairs = zip(conversations, block, strict=True)
        texts = [_render(turns, problem.where, tokenizer, options) for turns, problem in pairs]
        # The template wrote the special tokens already.
        ids = tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        yield from zip(block, map(tuple, conversations), ids, strict=True)


def _messages(problem: Problem, config: PromptSourceConfig) -> list[Message]:
    if not isinstance(problem.content, str):
        return problem.content
    # Not str.format: templates and problems are full of LaTeX braces.
    parts = {"{prompt}": problem.content, "{choices}": problem.choices}
    content = re.sub(r"\{prompt\}|\{choices\}", lambda place: parts[place[0]], config.template)
    user = {"role": "user", "content": content}
    return [{"role": "system", "content": config.system_prompt}, user] if config.system_prompt else [user]


def _render(messages: list[Message], where: str, tokenizer: Any, options: Mapping[str, Any]) -> str:
    if not getattr(tokenizer, "chat_template", None):
        name = getattr(tokenizer, "name_or_path", "") or "the tokenizer"
        raise UserError(f"{name} has no chat template (chat_template.jinja, or chat_template in tokenizer_config.json)")
    try:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    except Exception as error:  # templates raise whatever their authors chose, for example for an unknown role
        raise UserError(f"{where}: the chat template refuses these messages: {one_line(error)}") from error
    try:
        text.encode()
    except UnicodeEncodeError:
        raise UserError(f"{where}: the prompt holds half of a surrogate pair, which is no character") from None
    return text
