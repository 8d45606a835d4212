"""Between a model's own parameters and the tensors of its published safetensors layout.

The running model may fuse what the files keep apart (all experts of a layer in one tensor). Names
and shapes on the way out come from transformers' own reverse conversion, parameter by parameter, so
no more than one full parameter is in memory. The way in inverts that conversion exactly: it only
moves elements, so sending each element's index through it tells where every element comes from.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, revert_weight_conversion

from onroute.core.errors import CheckError
from onroute.core.weights import TensorSpec


@dataclass(frozen=True, slots=True)
class PublishedParameter:
    """One parameter or persistent buffer of the model, and the published tensors made from it."""

    name: str
    published: tuple[str, ...]


class PublishedLayout:
    """Which published tensors a model has. Worked out once from shapes alone; reads no weight."""

    def __init__(self, model: PreTrainedModel) -> None:
        _remember_conversion(model)
        self._model = model
        tied = set(getattr(model, "all_tied_weights_keys", None) or ())
        self.parameters: tuple[PublishedParameter, ...] = ()
        specs: list[TensorSpec] = []
        for name, value in model.state_dict().items():
            if name in tied:
                continue
            shapes = revert_weight_conversion(
                model, {name: torch.empty(value.shape, dtype=value.dtype, device="meta")}
            )
            self.parameters += (PublishedParameter(name, tuple(shapes)),)
            specs += [
                TensorSpec(
                    name=published, dtype=str(value.dtype).removeprefix("torch."), shape=tuple(shape.shape)
                )
                for published, shape in shapes.items()
            ]
        self.specs = tuple(specs)

    def tensors(self) -> Iterator[dict[str, Tensor]]:
        """Parameter by parameter, the full published tensors, gathered over the ranks.

        On a sharded model this is a collective: every rank must walk it to the end.
        """
        state = self._model.state_dict()
        for parameter in self.parameters:
            value = state[parameter.name].detach()
            full = value.full_tensor() if isinstance(value, DTensor) else value
            yield revert_weight_conversion(self._model, {parameter.name: full})

    def apply(self, tensors: Mapping[str, Tensor]) -> tuple[str, ...]:
        """Copy published tensors into the model in place, cast to its dtypes; names of what was written.

        A parameter is written when all of its published tensors are there.

        Raises CheckError for an unknown name, a wrong shape, or a parameter given only in part.
        """
        written: list[str] = []
        left = dict(tensors)
        state = self._model.state_dict()
        for parameter in self.parameters:
            given = [name for name in parameter.published if name in left]
            if not given:
                continue
            if len(given) < len(parameter.published):
                missing = sorted(set(parameter.published) - set(given))
                raise _refused(f"{parameter.name} came without {', '.join(missing[:10])}")
            self._write(parameter, state[parameter.name], {name: left.pop(name) for name in given})
            written.append(parameter.name)
        if left:
            raise _refused(f"unknown tensor(s) {', '.join(sorted(left)[:10])}")
        return tuple(written)

    def _write(self, parameter: PublishedParameter, target: Tensor, tensors: Mapping[str, Tensor]) -> None:
        origin = torch.arange(target.numel(), device=target.device).view(target.shape)
        origins = revert_weight_conversion(self._model, {parameter.name: origin})
        flat = target.view(-1)
        for name, source in origins.items():
            tensor = tensors[name]
            if tensor.shape != source.shape:
                raise _refused(
                    f"{name} has shape {list(tensor.shape)}, this model holds {list(source.shape)}"
                )
            if source is origin:
                target.copy_(tensor)
            else:
                flat[source.reshape(-1)] = tensor.reshape(-1).to(device=target.device, dtype=target.dtype)


def _remember_conversion(model: PreTrainedModel) -> None:
    """Let a model built from its configuration convert like one that was loaded; also saves working
    the mapping out again for every parameter."""
    if getattr(model, "_weight_conversions", None) is None:
        mapping = get_model_conversion_mapping(model, add_legacy=False)
        kept = [entry for entry in mapping if not isinstance(entry, PrefixChange)]
        object.__setattr__(model, "_weight_conversions", kept)


def _refused(what: str) -> CheckError:
    return CheckError("weights-names", what, "weight update", "sender and receiver must hold the same model")
