"""What comes back from rollouts is checked here, once, before anything is learned from it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from onroute.core.config.sections import RunConfig
from onroute.core.engine import EngineCapabilities, Lifecycle
from onroute.core.errors import UserError
from onroute.core.samples import Group, SampleFacts
from onroute.data.intake import RouteShape, check_rollouts


@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """What every sample must fit: the engine's own capabilities, and whether routes are demanded."""

    capabilities: EngineCapabilities
    needs_routes: bool
    temperature: float

    def require(self) -> None:
        """Raises UserError before the first rollout when the engine can't give what the run needs."""
        if self.temperature != 1.0 and not self.capabilities.tempered_log_probs:
            raise UserError(
                "engine-log-probs",
                f"the engine {self.capabilities.name!r} returns log-probs before temperature",
                f"engine.temperature = {self.temperature:g}",
                "ask it for processed log-probs, or set engine.temperature = 1.0",
            )
        if self.needs_routes and not self.capabilities.returns_routes:
            raise UserError(
                "engine-no-routes",
                f"the engine {self.capabilities.name!r} returns no routes",
                'routing.replay = "rollout"',
                'switch on its route capture, or set routing.replay = "off"',
            )

    def check(self, groups: Iterable[Group]) -> None:
        """Raises CheckError or UserError naming the sample that breaks a promise."""
        told = self.capabilities
        shape = RouteShape(layers=told.moe_layers, num_experts=told.num_experts, top_k=told.top_k)
        check_rollouts(
            groups, context_length=told.context_length, routes=shape if self.needs_routes else None
        )


async def open_intake(config: RunConfig, engine: Lifecycle) -> Intake:
    """The checks of a run, from what its engine shows of itself.

    Raises UserError before the first rollout when the engine can't give what the run needs.
    """
    intake = Intake(
        capabilities=await engine.capabilities(),
        needs_routes=config.routing.replay == "rollout",
        temperature=config.engine.temperature,
    )
    intake.require()
    return intake


def rollout_metrics(facts: Sequence[SampleFacts]) -> dict[str, float]:
    """Lengths, endings and bytes of one batch of rollouts."""
    responses = np.array([fact.num_tokens - fact.prompt_length for fact in facts])
    return {
        "rollout/samples": float(len(facts)),
        "rollout/response_tokens_mean": float(responses.mean()),
        "rollout/response_tokens_max": float(responses.max()),
        "rollout/truncated_share": float(np.mean([fact.stop_reason == "length" for fact in facts])),
        "rollout/token_bytes": float(sum(fact.token_bytes for fact in facts)),
        "rollout/route_bytes": float(sum(fact.route_bytes for fact in facts)),
    }
