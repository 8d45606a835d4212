"""How a call of top-k, or of a mask before it, looks to a `TorchFunctionMode`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

import torch
from torch import Tensor

TorchFunction: TypeAlias = Callable[..., object]

TOP_K: Final[frozenset[TorchFunction]] = frozenset({torch.topk, torch.Tensor.topk})
_MASKED_FILL: Final[frozenset[TorchFunction]] = frozenset({torch.masked_fill, torch.Tensor.masked_fill})
_TORCH_WHERE: Final[TorchFunction] = torch.where
_TENSOR_WHERE: Final[TorchFunction] = torch.Tensor.where
MASKS: Final[frozenset[TorchFunction]] = _MASKED_FILL | {_TORCH_WHERE, _TENSOR_WHERE}


@dataclass(frozen=True, slots=True)
class TopKCall:
    """The arguments of one call: scores [..., width] and the axis it works along, counted from the front."""

    scores: Tensor
    axis: int

    @classmethod
    def parse(cls, args: Sequence[object], kwargs: Mapping[str, object]) -> TopKCall:
        """Read `topk(input, k, dim=-1, largest=True, sorted=True)`, each by position or by keyword."""
        scores = args[0] if args else kwargs["input"]
        axis = args[2] if len(args) > 2 else kwargs.get("dim", -1)
        assert isinstance(scores, Tensor)
        assert isinstance(axis, int)
        return cls(scores, axis % scores.ndim)

    @property
    def over_last_axis(self) -> bool:
        return self.axis == self.scores.ndim - 1


def masked_source(
    func: TorchFunction, args: Sequence[object], kwargs: Mapping[str, object], out: Tensor
) -> Tensor | None:
    """The tensor that a call out of `MASKS` masked, or None when it merged two full tensors."""
    if func in _MASKED_FILL:
        given = [args[0] if args else kwargs["input"]]
    elif func is _TENSOR_WHERE:
        given = [args[0], args[2] if len(args) > 2 else kwargs.get("other")]
    else:
        names = ("condition", "input", "other")
        given = [args[i] if len(args) > i else kwargs.get(names[i]) for i in (1, 2)]
    full = [t for t in given if isinstance(t, Tensor) and t.shape == out.shape]
    return full[0] if len(full) == 1 else None
