"""Can this model be trained on replayed routes: the self-check and the packing test, as data."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from transformers import PreTrainedModel

from onroute.core.config.sections import ModelConfig
from onroute.core.errors import OnrouteError
from onroute.models import packing
from onroute.models.families.build import tiny_family
from onroute.models.families.refused import REFUSED
from onroute.models.load import best_attention, read_config
from onroute.models.shard import load_sharded
from onroute.models.world import World
from onroute.routing.dense import expects_routing
from onroute.routing.selfcheck import SelfCheckReport
from onroute.training.routes import TrainerRoutes


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCheck:
    """replay: whether every check passed. reason: why not; empty when it is ok.
    layouts: what the model may be trained in; packing is measured, rows are always right.
    """

    model_type: str
    attention: str
    replay: Literal["ok", "refused"]
    reason: str
    report: SelfCheckReport | None
    layouts: tuple[str, ...]


def check_model(path: Path, world: World) -> ModelCheck:
    """Load the model in `path` in float32 and prove replay on it.

    Raises UserError when the folder holds no model that can be loaded; a model that can be loaded but
    not replayed is a result, not an error.
    """
    model_type = str(read_config(path).model_type)
    attention = best_attention(path)
    config = ModelConfig(path=str(path), dtype="float32", attention=attention)
    model = load_sharded(path, config, world, reshard=True)
    return _explained(_checked(model, model_type, attention, world))


def check_family(model_type: str, world: World) -> ModelCheck:
    """Prove replay on a tiny random model of this type. A type that can't be built tiny is a result too."""
    try:
        model = tiny_family(model_type)
        found = _checked(model, model_type, model.config._attn_implementation or "", world)
    except OnrouteError as error:
        found = ModelCheck(
            model_type=model_type,
            attention="",
            replay="refused",
            reason=f"{error.what}; {error.where}",
            report=None,
            layouts=(),
        )
    return _explained(found)


def as_expected(found: ModelCheck) -> bool:
    """Whether a family passes or is refused as the table of refused families says."""
    return (found.replay == "refused") == (found.model_type in REFUSED)


def _explained(found: ModelCheck) -> ModelCheck:
    """With the reason that is known of its family, where it is refused."""
    known = REFUSED.get(found.model_type)
    return replace(found, reason=known) if known and found.replay == "refused" else found


def _checked(model: PreTrainedModel, model_type: str, attention: str, world: World) -> ModelCheck:
    report = None
    reason = ""
    layouts: tuple[str, ...] = ("rows",)
    if expects_routing(model.config):
        try:
            report = TrainerRoutes(model, world.device).prove()
            report.require()
        except OnrouteError as error:
            reason = f"{error.what}; {error.where}"
    else:
        reason = "a dense model: it has no routed experts to replay"
    if packing.packing_refusal(model, world.device, tolerance=packing.TOLERANCE["float32"]) is None:
        layouts = ("rows", "packed")
    return ModelCheck(
        model_type=model_type,
        attention=attention,
        replay="refused" if reason else "ok",
        reason=reason,
        report=report,
        layouts=layouts,
    )
