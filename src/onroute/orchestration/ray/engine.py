"""The actor of a rollout engine, and the engine as the driver sees it."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import ray
import torch
from ray import ObjectRef
from ray.actor import ActorHandle

from onroute.core.config.sections import RunConfig
from onroute.core.engine import Engine, EngineCapabilities
from onroute.core.samples import Completion, SampleRequest
from onroute.core.weights import Transport, WeightOffer, WeightReceipt
from onroute.engines.catalog import ENGINES
from onroute.orchestration.ray.calls import Call, Calls, Limit, Result
from onroute.orchestration.ray.cluster import WATCH, Spot, own_spot
from onroute.orchestration.ray.rounds import Rounds, Seat
from onroute.weights import broadcast, shared_memory
from onroute.weights.receiver import Receiver


class EngineActor:
    """An engine in a process of its own."""

    _engine: Engine
    _rounds: Rounds

    def __init__(self, config: RunConfig, index: int) -> None:
        """index: which of the engines it is."""
        self._config, self._index = config, index

    async def spot(self) -> Spot:
        return own_spot()

    @ray.method(concurrency_group=WATCH)
    async def stay(self) -> None:
        """Never returns: whoever awaits it hears of this actor's death."""
        await asyncio.Event().wait()

    async def start(self, transport: Transport) -> EngineCapabilities:
        """Load the model; what the running engine can do."""
        torch.set_num_threads(self._config.run.threads)
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._engine = ENGINES[self._config.engine.name].load()(
            self._config.engine,
            self._config.model,
            capture=self._config.routing.replay == "rollout",
            exchange=self._open_receiver(transport, device),
            device=device,
        )
        self._rounds = Rounds(self._engine)
        return await self._engine.capabilities()

    async def sample_round(self, seat: Seat, requests: Sequence[SampleRequest]) -> list[Completion]:
        return await self._rounds.sample(seat, requests)

    async def leave(self, seat: Seat) -> None:
        self._rounds.leave(seat)

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        return await self._engine.sample(requests)

    async def update_weights(self, offer: WeightOffer) -> WeightReceipt:
        return await self._engine.update_weights(offer)

    async def capabilities(self) -> EngineCapabilities:
        return await self._engine.capabilities()

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def release_memory(self) -> None:
        await self._engine.release_memory()

    async def reclaim_memory(self) -> None:
        await self._engine.reclaim_memory()

    async def health(self) -> None:
        await self._engine.health()

    def _open_receiver(self, transport: Transport, device: torch.device) -> Receiver:
        deadline_s = self._config.parallel.timeout_s
        if transport == "shared_memory":
            return shared_memory.open_receiver(self._index, deadline_s=deadline_s)
        return broadcast.open_receiver(self._index, device=device, deadline_s=deadline_s)


class RayEngine:
    """An `Engine` around the actor."""

    def __init__(self, actor: ActorHandle[EngineActor], role: str, calls: Calls, limit: Limit) -> None:
        self._actor, self._role, self._calls, self._limit = actor, role, calls, limit

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        return await self._answer(self._actor.sample.remote(requests), "sampling")

    async def update_weights(self, offer: WeightOffer) -> WeightReceipt:
        phase = f"taking weights of version {offer.version}"
        return await self._answer(self._actor.update_weights.remote(offer), phase)

    async def capabilities(self) -> EngineCapabilities:
        return await self._answer(self._actor.capabilities.remote(), "telling what it can do")

    async def pause(self) -> None:
        await self._answer(self._actor.pause.remote(), "pausing")

    async def resume(self) -> None:
        await self._answer(self._actor.resume.remote(), "resuming")

    async def release_memory(self) -> None:
        await self._answer(self._actor.release_memory.remote(), "releasing memory")

    async def reclaim_memory(self) -> None:
        await self._answer(self._actor.reclaim_memory.remote(), "reclaiming memory")

    async def health(self) -> None:
        await self._answer(self._actor.health.remote(), "telling its health")

    async def close(self) -> None:
        """End the process. Asks nothing of it, so that a dead engine hides no error."""
        ray.kill(self._actor)

    async def _answer(self, asked: ObjectRef[Result], phase: str) -> Result:
        return await self._calls.one(Call(self._role, asked), phase=phase, limit=self._limit)
