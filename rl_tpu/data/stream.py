"""An endless, seeded stream of prompts with a position that can be saved."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import xxhash

from rl_tpu.errors import UserError
from rl_tpu.types import Prompt


class PromptStream(Iterator[Prompt]):
    """All prompts once per epoch, for ever. With ``shuffle`` an epoch's order is a function of seed and epoch.

    The state is a few numbers, whatever the size of the set.
    """

    def __init__(self, prompts: Sequence[Prompt], *, seed: int = 0, shuffle: bool = True) -> None:
        if not prompts:
            raise UserError("there are no prompts to draw from")
        self._prompts = prompts
        self._seed = seed
        self._shuffle = shuffle
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
        self._drawn += 1
        return self._prompts[self._order_of(epoch)[position]]

    def state_dict(self) -> dict[str, Any]:
        """The position: JSON-ready."""
        return {
            "drawn": self._drawn,
            "seed": self._seed,
            "shuffle": self._shuffle,
            "size": len(self._prompts),
            "fingerprint": self._fingerprint,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue at a saved position. Raises UserError if prompts, seed or shuffle differ from then."""
        for key, now in self.state_dict().items():
            if key != "drawn" and state[key] != now:
                raise UserError(
                    f"the saved data position does not fit these prompts: {key} was {state[key]!r}, now it is {now!r}; "
                    "resume with the data settings of the checkpoint, or start a new run"
                )
        self._drawn = state["drawn"]

    def _order_of(self, epoch: int) -> np.ndarray:
        if self._order is None or self._order[0] != epoch:
            size = len(self._prompts)
            shuffled = np.random.default_rng([self._seed, epoch]).permutation(size)
            self._order = (epoch, shuffled if self._shuffle else np.arange(size))
        return self._order[1]
