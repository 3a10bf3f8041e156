"""Which reward functions score a prompt, and how their numbers add up."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from rl_tpu.config.schema import RewardConfig
from rl_tpu.config.schema.reward import RewardChoice, RewardPart
from rl_tpu.errors import RunError, UserError
from rl_tpu.rewards.registry import Scope, find_reward, scope_of
from rl_tpu.types import Prompt

DEFAULT_SOURCE = "default"
ENVIRONMENT = "environment"
"""As a reward's name: no function, only what the environment gives for turns. Also the name of that part of every reward."""


@dataclass(frozen=True)
class Term:
    """One function of a weighted sum. A single number it returns is the part ``label``."""

    name: str
    options: dict[str, Any]
    weight: float
    label: str
    scope: Scope


@dataclass(frozen=True)
class Plan:
    """``terms`` of all sums; ``routes`` says which of them (by position) score a source; `DEFAULT_SOURCE` takes the rest.

    A prompt's source is its own (``source_field`` None) or a field of its row.
    """

    terms: tuple[Term, ...]
    routes: dict[str, tuple[int, ...]]
    source_field: str | None

    def route(self, prompt: Prompt) -> tuple[int, ...]:
        """Positions of the terms that score this prompt. Raises RunError for a source without a reward."""
        source = _field(prompt.metadata, self.source_field) if self.source_field else prompt.source
        chosen = self.routes.get(str(source), self.routes.get(DEFAULT_SOURCE))
        if chosen is None:
            raise RunError(
                f"prompt {prompt.id!r} has the source {source!r}, for which reward.by_source has no entry (it has:"
                f" {', '.join(sorted(self.routes))}); add it, or one named {DEFAULT_SOURCE!r}"
            )
        return chosen


def make_plan(config: RewardConfig) -> Plan:
    """Find every function that the configuration names.

    Raises UserError: none or two of `name`, `parts` and `by_source` are set, a function is unknown or does not take its
    options, or two parts of a sum have the same label.
    """
    _exactly_one("reward", {"name": config.name, "parts": config.parts, "by_source": config.by_source})
    choices = config.by_source or {DEFAULT_SOURCE: config}
    terms: list[Term] = []
    routes = {}
    for source, choice in choices.items():
        if config.by_source:
            _exactly_one(f"reward.by_source.{source}", {"name": choice.name, "parts": choice.parts})
        found = list(_terms(choice))
        labels = [term.label for term in found]
        for label in labels:
            if labels.count(label) > 1:
                raise UserError(f"two parts of one reward are called {label!r}; give each a `label` of its own")
        routes[source] = tuple(range(len(terms), len(terms) + len(found)))
        terms += found
    return Plan(tuple(terms), routes, config.source_field)


def _terms(choice: RewardChoice) -> Iterator[Term]:
    if choice.name == ENVIRONMENT:
        return
    for part in choice.parts or [RewardPart(name=choice.name, options=choice.options)]:
        function = find_reward(part.name, part.options)
        yield Term(part.name, part.options, part.weight, part.label or part.name.rpartition(":")[2], scope_of(function))


def _exactly_one(where: str, settings: dict[str, Any]) -> None:
    given = [name for name, value in settings.items() if value]
    if len(given) != 1:
        has = f"{' and '.join(given)} are set" if given else "none is set"
        raise UserError(f"{where} takes one of {', '.join(settings)}: {has}")


def _field(row: Any, name: str) -> Any:
    for key in name.split("."):
        row = row.get(key) if isinstance(row, dict) else None
    return row
