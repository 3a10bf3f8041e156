"""A seeded stream of prompts, from one source or several by weight, with a position that can be saved."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import xxhash

from rl_tpu.config.schema import DataConfig
from rl_tpu.data.prompts import PromptSet
from rl_tpu.errors import UserError
from rl_tpu.types import Prompt

CHOICES = 1024
"""Choices among sources that are made at once: those of draw n hang on the seed and n alone."""


def open_stream(training: Mapping[str, PromptSet], config: DataConfig, seed: int) -> PromptStream | MixtureStream:
    """The stream that `data` asks for over what `load_training_prompts` found."""
    options = {"seed": seed, "shuffle": config.shuffle, "epochs": config.epochs}
    prompts = {name: found.prompts for name, found in training.items()}
    if config.train.kind != "mixture":
        return PromptStream(prompts[""], **options)
    return MixtureStream(prompts, {name: source.weight for name, source in config.train.sources.items()}, **options)


class PromptStream(Iterator[Prompt]):
    """All prompts once per epoch, for ever or for ``epochs``. With ``shuffle`` an order follows from seed and epoch."""

    def __init__(
        self, prompts: Sequence[Prompt], *, seed: int = 0, shuffle: bool = True, epochs: int | None = None
    ) -> None:
        if not prompts:
            raise UserError("there are no prompts to draw from")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
        self._epochs = epochs
        self._drawn = 0
        self._order: tuple[int, np.ndarray] | None = None
        digest = xxhash.xxh3_64()
        for prompt in prompts:
            digest.update(prompt.id.encode())
            digest.update(np.asarray(prompt.ids, dtype=np.int64).tobytes())
        self._fingerprint = digest.hexdigest()

    @property
    def epoch(self) -> int:
        """Whole passes behind the position."""
        return self._drawn // len(self._prompts)

    def __next__(self) -> Prompt:
        epoch, position = divmod(self._drawn, len(self._prompts))
        if epoch == self._epochs:
            raise StopIteration
        self._drawn += 1
        return self._prompts[self._order_of(epoch)[position]]

    def state_dict(self) -> dict[str, Any]:
        """The position: JSON-ready, a few numbers whatever the size of the set."""
        return {
            "drawn": self._drawn,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "size": len(self._prompts),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. Raises UserError if prompts, seed or shuffle differ from then."""
        _check_settings(state, self.state_dict(), "these prompts")
        self._drawn = state["drawn"]

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            size = len(self._prompts)
            shuffled = np.random.default_rng([self._seed, epoch]).permutation(size)
            self._order = (epoch, shuffled if self._shuffle else np.arange(size))
        return self._order[1]


class MixtureStream(Iterator[Prompt]):
    """Every draw chooses a source with probability proportional to its weight and takes that source's next prompt.

    Each source has its own order and epochs. The choice of draw n follows from the seed and n; ``shuffle`` is about the
    order within a source. With ``epochs`` the stream ends where a source that is chosen has been passed that many times.
    """

    def __init__(
        self,
        prompts: Mapping[str, Sequence[Prompt]],
        weights: Mapping[str, float],
        *,
        seed: int = 0,
        shuffle: bool = True,
        epochs: int | None = None,
    ) -> None:
        total = sum(weights.values())
        self._shares = {name: weights[name] / total for name in sorted(prompts)}
        self._streams = {
            # A seed of its own, so that sources of one size are not in one order.
            name: PromptStream(
                prompts[name], seed=xxhash.xxh3_64_intdigest(f"{seed}/{name}".encode()), shuffle=shuffle, epochs=epochs
            )
            for name in self._shares
        }
        self._seed = seed
        self._drawn = 0
        self._choices: tuple[int, np.ndarray] | None = None

    @property
    def epochs(self) -> dict[str, int]:
        """Whole passes behind the position, by source."""
        return {name: stream.epoch for name, stream in self._streams.items()}

    def __next__(self) -> Prompt:
        block, position = divmod(self._drawn, CHOICES)
        prompt = next(self._streams[self._choices_of(block)[position]])
        self._drawn += 1
        return prompt

    def state_dict(self) -> dict[str, Any]:
        """The position: JSON-ready, a few numbers for each source."""
        sources = {name: stream.state_dict() for name, stream in self._streams.items()}
        return {"drawn": self._drawn, "seed": self._seed, "shares": self._shares, "sources": sources}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. Raises UserError if sources, shares, seed or shuffle differ from then."""
        now = self.state_dict()
        _check_settings(state, now | {"sources": state.get("sources")}, "this mixture")
        for name in self._streams:
            _check_settings(state["sources"][name], now["sources"][name], f"source {name!r}")
        for name, stream in self._streams.items():
            stream.load_state_dict(state["sources"][name])
        self._drawn = state["drawn"]

    def _choices_of(self, block: int) -> np.ndarray:
        if self._choices is None or self._choices[0] != block:
            draws = np.random.default_rng([self._seed, block]).random(CHOICES)
            bounds = np.cumsum(list(self._shares.values()))
            names = np.array(list(self._shares), dtype=object)
            self._choices = (block, names[np.minimum(np.searchsorted(bounds, draws, side="right"), len(names) - 1)])
        return self._choices[1]


def _check_settings(then: dict[str, Any], now: dict[str, Any], what: str) -> None:
    """Raise UserError unless a saved position is of the same prompts and settings; only ``drawn`` may differ."""
    for key in {**now, **then}:
        if key != "drawn" and then.get(key) != now.get(key):
            raise UserError(
                f"the saved data position does not fit {what}: {key} was {then.get(key)!r}, now it is {now.get(key)!r}; "
                "resume with the data settings of the checkpoint, or start a new run"
            )
