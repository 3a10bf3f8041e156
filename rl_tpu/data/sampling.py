"""What a row changes of its sampling (``sampling_field``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from rl_tpu.config.schema.base import Count, NonNegative, Positive, Seed
from rl_tpu.errors import UserError
from rl_tpu.registry import nearest
from rl_tpu.types import Prompt

TRAINING = ("max_response_tokens", "stop_token_ids")
"""What a row may change in training: the trainer computes one distribution for all."""


class _Overrides(BaseModel):
    """The fields of SamplingParams."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    max_response_tokens: Positive | None = None
    temperature: NonNegative | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Literal[-1] | Positive | None = None
    min_p: Annotated[float, Field(ge=0, lt=1)] | None = None
    stop_token_ids: list[Count] | None = None
    seed: Seed | None = None


def row_sampling(value: Any, field: str, where: str) -> dict[str, Any]:
    """The field's content as arguments of SamplingParams; null stands for none. Raises UserError, naming file and row."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise UserError(f"{where}: the sampling (field {field!r}) must be an object with names and values: {value!r}")
    given = {name: each for name, each in value.items() if each is not None}  # Parquet fills what a row leaves out
    try:
        found = _Overrides.model_validate(given).model_dump(exclude_none=True)
    except ValidationError as error:
        first = error.errors()[0]
        name = ".".join(map(str, first["loc"]))
        if first["type"] == "extra_forbidden":
            raise UserError(
                f"{where}: {field}.{name} is no setting of sampling{nearest(name, list(_Overrides.model_fields))}"
            ) from None
        raise UserError(f"{where}: {field}.{name}: {first['msg']}, it is {first['input']!r}") from None
    if "stop_token_ids" in found:
        found["stop_token_ids"] = tuple(found["stop_token_ids"])
    return found


def check_training_sampling(prompts: list[Prompt], max_response_tokens: int) -> None:
    """Raise UserError for a training prompt that changes what the trainer must know of all, or wants too long an answer."""
    for prompt in prompts:
        for name in prompt.sampling:
            if name not in TRAINING:
                raise UserError(
                    f"prompt {prompt.id!r} sets its own {name}: in training a row may change {' and '.join(TRAINING)} only,"
                    " because the trainer's log-probabilities are of one distribution"
                )
        wanted = prompt.sampling.get("max_response_tokens", 0)
        if wanted > max_response_tokens:
            raise UserError(
                f"prompt {prompt.id!r} wants max_response_tokens {wanted}, rollout.max_response_tokens is"
                f" {max_response_tokens}"
            )
