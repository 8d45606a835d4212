"""The per-token fields of a sample, known in one place."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from onroute.core.errors import CheckError
from onroute.core.routing import RoutingTrace
from onroute.core.samples import Sample

TOKEN_DTYPES: Mapping[str, type[np.generic]] = MappingProxyType(
    {
        "tokens": np.int32,
        "loss_mask": np.bool_,
        "log_probs": np.float32,
        "weight_versions": np.int32,
    }
)
"""The arrays of a `Sample` that have one entry per token, and their types."""

AnySample = TypeVar("AnySample", bound=Sample)


def cut(sample: AnySample, num_tokens: int) -> AnySample:
    """The first `num_tokens` tokens of a sample, in every per-token field; the sample itself when it
    is no longer than that. A sample that was cut stopped for its length.

    Fields are found by their values, so one that is added to the class is cut as well. The new last
    token counts as never having been an input: its routing row becomes invalid.

    10 prompt and 8 response tokens cut to 14: 4 response tokens, 13 valid routing rows.

    Raises:
        CheckError: the cut would go into the prompt.
    """
    if num_tokens >= sample.num_tokens:
        return sample
    if num_tokens < sample.prompt_length:
        raise CheckError(
            "data-cut",
            f"cannot cut to {num_tokens} tokens, the prompt alone has {sample.prompt_length}",
            f"sample {sample.id} of prompt {sample.prompt_id}",
            "leave out prompts that are longer than the limit",
        )
    shorter = {
        field.name: _cut_value(field.name, getattr(sample, field.name), num_tokens)
        for field in fields(sample)
    }
    return replace(sample, **{**shorter, "stop_reason": "length"})


def _cut_value(name: str, value: Any, num_tokens: int) -> Any:
    if isinstance(value, np.ndarray):
        return value[:num_tokens]
    if isinstance(value, RoutingTrace):
        valid = value.valid[:num_tokens].copy()
        valid[-1:] = False
        return replace(value, experts=value.experts[:num_tokens], valid=valid)
    if value is None or isinstance(value, str | int | float | np.generic):
        return value
    raise TypeError(f"field {name} of a sample holds {type(value).__name__}; say in {__name__} how it is cut")
