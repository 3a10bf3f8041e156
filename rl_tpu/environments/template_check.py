"""Whether the chat template, given a conversation as messages, writes what the policy read."""

from __future__ import annotations

import logging

from rl_tpu.environments.chat import Chat
from rl_tpu.environments.transcript import Transcript
from rl_tpu.errors import UserError

log = logging.getLogger(__name__)

EXCERPT = 60
"""Characters of a difference that are shown."""


class TemplateCheck:
    """Compares transcripts with renderings; the first difference of each kind is reported, all are counted.

    A policy that is trained on its transcript and served by rendering messages reads something else then. Text is
    compared and not ids: a policy may well spell a word with other tokens than the tokenizer would choose.
    """

    def __init__(self, chat: Chat) -> None:
        self._chat = chat
        self._reported: set[str] = set()

    def differs(self, transcript: Transcript) -> bool | None:
        """Whether what the policy read before its last turn is not what the template writes of these messages.

        None where there is nothing to compare: one turn alone, or ids that belong to no messages.
        """
        if len(transcript.turns) < 2:
            return None
        try:
            pieces = transcript.pieces(self._chat)
            if pieces is None:
                return None
            written = self._chat.render(transcript.conversation(self._chat, len(transcript.turns) - 1), True)
        except UserError as error:
            self._report("refused", f"{error}; what the policy read was rendered turn by turn")
            return True
        held = "".join(text for _, text in pieces)
        if written == held:
            return False
        at = _first_difference(written, held)
        where, text = _piece(pieces, at)
        kind, why = ("the prompt" if where == "the prompt" else "messages"), ""
        if where.startswith("turn"):
            kind = "turn"
            if "</think>" in text and text not in written:
                kind, why = "reasoning", " (it leaves out or changes the reasoning of earlier turns)"
        self._report(
            kind,
            f"at {where} it writes {_excerpt(written, at)} where the transcript has {_excerpt(held, at)}"
            f"{why}. Training uses the transcript, the tokens that the policy read and wrote; serve the policy with a"
            " template that keeps them",
        )
        return True

    def _report(self, kind: str, message: str) -> None:
        if kind not in self._reported:
            self._reported.add(kind)
            more = "Further differences of this kind are only counted (environment/template_mismatch)"
            log.warning("The chat template, given a whole conversation: %s. %s.", message, more)


def _first_difference(one: str, other: str) -> int:
    pairs = enumerate(zip(one, other, strict=False))
    return next((place for place, (a, b) in pairs if a != b), min(len(one), len(other)))


def _piece(pieces: list[tuple[str, str]], at: int) -> tuple[str, str]:
    """The piece that holds the character number ``at`` of all pieces together, or the last one."""
    for where, text in pieces:
        if at < len(text):
            return where, text
        at -= len(text)
    return pieces[-1]


def _excerpt(text: str, at: int) -> str:
    """From ``at`` on, or from the beginning of a tag that two texts have the beginning of in common."""
    tag = text.rfind("<", max(0, at - 20), at)
    start = at if tag < 0 or ">" in text[tag:at] else tag
    return repr(text[start : start + EXCERPT]) + ("..." if len(text) > start + EXCERPT else "")
