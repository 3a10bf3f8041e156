"""A problem as its source holds it, before the chat template, and which side of the split it is on."""

from __future__ import annotations

import unicodedata
from dataclasses import dataclass, field
from typing import Any, Literal

import xxhash

Message = dict[str, str]


@dataclass(frozen=True)
class Problem:
    """``content`` is plain text or a list of chat messages; ``where`` is its place for error messages.

    ``choices`` are lettered lines for the template's ``{choices}``; ``pass_rate`` is a share from 0 to 1 where known;
    ``sampling`` is what the row changes of its sampling.
    """

    id: str
    where: str
    content: str | list[Message]
    answer: Any
    metadata: dict[str, Any]
    choices: str = ""
    pass_rate: float | None = None
    sampling: dict[str, Any] = field(default_factory=dict)

    @property
    def text(self) -> str:
        """What the problem says, without system prompt or template: its identity in the split."""
        if not isinstance(self.content, str):
            return "\n".join(message["content"] for message in self.content if message["role"] != "system")
        return f"{self.content}\n{self.choices}" if self.choices else self.content


def side(text: str, held_out_share: float) -> Literal["train", "held_out"]:
    """The side of the split a problem belongs to. It follows from the text alone: no seed, no order, no file."""
    return (
        "held_out"
        if xxhash.xxh3_64_intdigest(text.encode(errors="surrogatepass")) < held_out_share * 2**64
        else "train"
    )


def fingerprint(text: str) -> bytes:
    """Equal for texts that differ only in case, white space or the way Unicode writes a character."""
    plain = " ".join(unicodedata.normalize("NFKC", text).casefold().split())
    return xxhash.xxh3_128_digest(plain.encode(errors="surrogatepass"))
