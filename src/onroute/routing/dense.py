"""Tells a model without routed experts from its configuration alone, before a weight is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Final

from onroute.core.errors import UserError

_COUNT_KEYS: Final = (
    "num_experts",
    "num_local_experts",
    "n_routed_experts",
    "moe_num_experts",
    "num_routed_experts",
)
"""Names under which the published configurations give the number of routed experts."""


def expert_count(config: object) -> int | None:
    """Routed experts per layer, or None for a dense model.

    config: a Hugging Face configuration, or the parsed `config.json`; a nested text configuration
        is searched too.
    """
    values = _values(config)
    for key in _COUNT_KEYS:
        count = values.get(key)
        if isinstance(count, int) and count > 1:
            return count
    return next((count for part in _nested(values) if (count := expert_count(part)) is not None), None)


def expects_routing(config: object) -> bool:
    """Whether a model of this configuration has routed experts."""
    return expert_count(config) is not None


def refuse_dense(config: object) -> None:
    """Raises UserError when replay is asked of a model that routes nothing."""
    if not expects_routing(config):
        raise dense_model_error(str(_values(config).get("model_type", type(config).__name__)))


def dense_model_error(model_type: str) -> UserError:
    return UserError(
        "routing-dense-model",
        'routing.replay = "rollout" was demanded, and this is a dense model: it has no routed experts',
        f"model type {model_type}",
        'set routing.replay = "off"',
    )


def _values(config: object) -> Mapping[str, object]:
    if isinstance(config, Mapping):
        return config
    # Not the attributes: a class default stands beside a renamed key that was set.
    to_dict: Callable[[], Mapping[str, object]] | None = getattr(config, "to_dict", None)
    return vars(config) if to_dict is None else to_dict()


def _nested(values: Mapping[str, object]) -> Iterator[object]:
    return (value for key, value in values.items() if key.endswith("config") and isinstance(value, Mapping))
