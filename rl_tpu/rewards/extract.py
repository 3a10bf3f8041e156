r"""Finding the final answer in what a model wrote: after its thinking, in tags, in a box or on an answer line."""

from __future__ import annotations

import re
from typing import Literal

from rl_tpu.boxed import last_boxed

AnswerFormat = Literal["any", "boxed", "answer_line", "last_line", "tag", "whole"]
"""Where an answer stands: `\\boxed{...}`; a line `Answer: ...`; the same as the very last line; `<answer>...</answer>`;
the whole response. `any` takes the last box or answer line, after tags if there are some."""

# Possessive (*+): a response that goes on in endless blanks is not tried again from every one of them.
ANSWER_LINE = re.compile(r"\banswer[*_ ]*+:[*_ ]*+\s*+(?:the (?:final )?answer is:? )?(\S[^\n]*)", re.IGNORECASE)
FAREWELL = re.compile(r"(?<!\s)\.?\s*+I hope it is correct.*", re.IGNORECASE)  # Minerva's few-shot examples end so
LAST_LINE = re.compile(r"\s*answer\s*:\s*(.*)", re.IGNORECASE)


def after_thinking(text: str) -> str:
    """What the model shows: after the last ``</think>`` and before a ``<think>`` that never closes.

    A text without tags is shown whole.
    """
    return text.rpartition("</think>")[2].partition("<think>")[0]


def find_answer(response: str, answer_format: AnswerFormat = "any") -> str | None:
    """The last answer in the given format, without its wrapping; None if there is none. See `AnswerFormat`."""
    if answer_format == "whole":
        found = [(0, response)]
    elif answer_format == "last_line":
        line = LAST_LINE.fullmatch(response.rstrip().rpartition("\n")[2])
        found = [(0, line.group(1))] if line else []
    else:
        finders = {"tag": last_tagged, "boxed": last_boxed, "answer_line": last_answer_line}
        wanted = finders.values() if answer_format == "any" else [finders[answer_format]]
        found = [answer for find in wanted if (answer := find(response))]
    return strip_marks(_inside(max(found)[1])) or None if found else None


def final_answer(text: str) -> str:
    r"""After the thinking: what stands in the last ``<answer>`` tags, else in the last ``\boxed{}``, else everything."""
    response = after_thinking(text)
    found = last_tagged(response) or last_boxed(response) or (0, response)
    return found[1].strip()


def last_tagged(text: str) -> tuple[int, str] | None:
    """Start and content of the last ``<answer>...</answer>``."""
    before, closed, _ = text.rpartition("</answer>")
    start = before.rfind("<answer>") if closed else -1
    return (start, before[start + len("<answer>") :]) if start >= 0 else None


def last_answer_line(text: str) -> tuple[int, str] | None:
    r"""Start and rest of the last line with ``Answer:`` (bold or not), or the next line if the rest is empty."""
    lines = list(ANSWER_LINE.finditer(text))
    return (lines[-1].start(), FAREWELL.sub("", lines[-1][1].partition("</answer>")[0])) if lines else None


def strip_marks(answer: str) -> str:
    r"""An answer without what only sets it off: dollars, ``\(...\)``, ``\[...\]``, bold, a full stop."""
    before = None
    while before != answer:
        before = answer
        answer = answer.strip().rstrip(".").strip("*`").strip()
        for start, end in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            if len(answer) >= len(start) + len(end) and answer.startswith(start) and answer.endswith(end):
                inner = answer[len(start) : -len(end)]
                if start not in inner:  # else these are the ends of two: $1$ and $2$
                    answer = inner
    return answer


def _inside(answer: str) -> str:
    """What stands in the answer's box, if it has one."""
    boxed = last_boxed(answer)
    return boxed[1] if boxed else answer
