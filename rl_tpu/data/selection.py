"""Which problems of a source are taken: distinct, in no evaluation set, on the wanted side, of the wanted difficulty."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping

import xxhash
from tqdm import tqdm

from rl_tpu.config.schema import PromptSourceConfig
from rl_tpu.data.fields import file_problems
from rl_tpu.data.generated import generated_problems
from rl_tpu.data.problem import Problem, fingerprint, side
from rl_tpu.errors import UserError

QUIET_SECONDS = 5.0
"""Reading that takes longer shows a progress bar."""


def select_problems(
    config: PromptSourceConfig, left_out: Counter[str], elsewhere: Mapping[bytes, str]
) -> Iterator[Problem]:
    """The first ``size`` problems that are taken. Counts in ``left_out``, by reason, what is passed over.

    ``elsewhere`` has the fingerprints of problems that must not come again, and where they are.
    """
    generated = config.kind == "reasoning_gym"
    seen: set[bytes] = set()
    taken = since_new = 0
    problems = generated_problems(config) if generated else file_problems(config)
    # disable=None: only where standard error is a terminal
    for problem in tqdm(problems, describe_source(config), unit="row", delay=QUIET_SECONDS, disable=None, leave=False):
        key = _identity(problem, generated)
        if key in seen:
            since_new += 1
            if not generated:
                left_out["repeated"] += 1
            elif since_new > 1000 + 10 * len(seen):
                raise UserError(
                    f"{describe_source(config)} has only {taken} distinct problems on its side {config.part!r} of the "
                    f"split, not {config.size}{_why(left_out)}: lower size or widen task_options"
                )
            continue
        seen.add(key)
        since_new = 0
        if config.part not in ("all", side(problem.text, config.held_out_share)):
            continue
        place = elsewhere.get(fingerprint(problem.text))
        if place is not None:
            left_out[f"also in {place}"] += 1
        elif problem.pass_rate is not None and not config.min_pass_rate <= problem.pass_rate <= config.max_pass_rate:
            left_out["outside the pass rates"] += 1
        else:
            yield problem
            taken += 1
            if taken == config.size:
                return


def describe_source(config: PromptSourceConfig) -> str:
    """The source in an error message."""
    if config.kind == "reasoning_gym":
        return f"reasoning_gym task {config.task!r}"
    paths = config.path if isinstance(config.path, list) else [config.path]
    return f"prompt file{'s' if len(paths) > 1 else ''} {', '.join(map(str, paths))}"


def _identity(problem: Problem, generated: bool) -> bytes:
    """The same question with another answer is another problem of a file, but a generated task repeating itself."""
    answer = "" if generated else repr(problem.answer)
    return xxhash.xxh3_128_digest(f"{problem.content}\0{problem.choices}\0{answer}".encode(errors="surrogatepass"))


def _why(left_out: Counter[str]) -> str:
    return f" ({', '.join(f'{count:,} {reason}' for reason, count in left_out.items())})" if left_out else ""
