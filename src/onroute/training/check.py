"""Can this model be trained on replayed routes: the self-check and the packing test, as data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from onroute.core.config.sections import ModelConfig
from onroute.core.errors import OnrouteError
from onroute.models import packing
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
    refusal = packing.packing_refusal(model, world.device, tolerance=packing.TOLERANCE["float32"])
    report = None
    reason = ""
    if expects_routing(model.config):
        try:
            report = TrainerRoutes(model, world.device).prove()
            report.require()
        except OnrouteError as error:
            reason = f"{error.what}; {error.where}"
    else:
        reason = "a dense model: it has no routed experts to replay"
    return ModelCheck(
        model_type=model_type,
        attention=attention,
        replay="refused" if reason else "ok",
        reason=reason,
        report=report,
        layouts=("rows",) if refusal else ("rows", "packed"),
    )
