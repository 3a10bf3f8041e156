r"""Finding the final answer in what a model wrote: after its thinking, in tags, in a box or on an answer line."""

from __future__ import annotations

import re


def after_thinking(text: str) -> str:
    """What follows the last ``</think>``; everything if there is none."""
    return text.rpartition("</think>")[2]


def last_tagged(text: str) -> str | None:
    """Content of the last ``<answer>...</answer>``."""
    found = re.findall(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found[-1].strip() if found else None


def last_boxed(text: str) -> tuple[int, str] | None:
    r"""Start and content of the last ``\boxed{...}`` whose braces close."""
    last = None
    open_braces: list[re.Match[str]] = []
    for brace in re.finditer(r"\\f?boxed\s*\{|\\.|[{}]", text, re.DOTALL):
        if brace.group().endswith("{") and brace.group() != r"\{":
            open_braces.append(brace)
        elif brace.group() == "}" and open_braces:
            opening = open_braces.pop()
            if opening.group() != "{" and (last is None or opening.start() > last[0]):
                last = (opening.start(), text[opening.end() : brace.start()])
    return last


def last_answer_line(text: str) -> tuple[int, str] | None:
    r"""Start and rest of the last line with ``Answer:`` (bold or not), or the next line if the rest is empty."""
    matches = list(re.finditer(r"(?i)\banswer[*_ ]*:[*_ ]*\s*(\S[^\n]*)", text))
    return (matches[-1].start(), matches[-1].group(1)) if matches else None


def final_answer(text: str) -> str:
    r"""After the thinking: what stands in the last ``<answer>`` tags, else in the last ``\boxed{}``, else everything."""
    response = after_thinking(text)
    tagged = last_tagged(response)
    if tagged is not None:
        return tagged
    boxed = last_boxed(response)
    return (boxed[1] if boxed else response).strip()


def strip_marks(answer: str) -> str:
    r"""An answer without what only sets it off: dollars, ``\(...\)``, ``\[...\]``, bold, a full stop."""
    before = None
    while before != answer:
        before = answer
        answer = answer.strip().removesuffix(".").strip("*`").strip()
        for start, end in (("$$", "$$"), ("$", "$"), (r"\(", r"\)"), (r"\[", r"\]")):
            if len(answer) > len(start) + len(end) and answer.startswith(start) and answer.endswith(end):
                answer = answer[len(start) : -len(end)]
    return answer
