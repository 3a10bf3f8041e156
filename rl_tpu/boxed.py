r"""Answers in boxes: ``\boxed{...}``, in what a model wrote and in the solutions that a dataset holds."""

from __future__ import annotations

import re

# Between two boxes that give one answer together: "\boxed{1}, \boxed{2}", "$\boxed{1}$ or $\boxed{2}$".
CONNECTIVE = re.compile(
    r"(?:[\s$,;.:&*()\[\]{}]|\\[()\[\],;!\s]|\\\\|\\q?quad\b|\\(?:text|mathrm)\s*\{\s*(?:and|or)?\s*\}|\b(?:and|or)\b)*",
    re.IGNORECASE,
)
CONNECTIVE_CHARACTERS = 100


def last_boxed(text: str) -> tuple[int, str] | None:
    r"""Start and content of the last ``\boxed{...}`` whose braces close.

    Boxes side by side (``\boxed{1}, \boxed{2}``, ``\boxed{1} or \boxed{2}``) are one answer, a list: who boxes two
    answers has not given either. Words between them make the last one a correction.
    """
    boxes = _boxes(text)
    if not boxes:
        return None
    last, opened, end = boxes.pop()
    contents, start = [text[opened : end - 1]], last
    while boxes and boxes[-1][2] > start - CONNECTIVE_CHARACTERS:
        before, opened, end = boxes.pop()
        if end <= start:  # else the later box stands inside this one
            if not CONNECTIVE.fullmatch(text, end, start):
                break
            contents.append(text[opened : end - 1])
        start = before
    return last, ", ".join(dict.fromkeys(piece.strip() for piece in reversed(contents)))


def _boxes(text: str) -> list[tuple[int, int, int]]:
    r"""Start, start of the content, and end of every ``\boxed{...}`` whose braces close, in order of their starts."""
    found = []
    open_braces: list[re.Match[str]] = []
    for brace in re.finditer(r"\\f?boxed\s*\{|\\.|[{}]", text, re.DOTALL):
        if brace.group().endswith("{") and brace.group() != r"\{":
            open_braces.append(brace)
        elif brace.group() == "}" and open_braces:
            opening = open_braces.pop()
            if opening.group() != "{":
                found.append((opening.start(), opening.end(), brace.end()))
    return sorted(found)
