"""What a rollout engine is, in three small protocols."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from onroute.core.samples import Completion, SampleRequest
from onroute.core.weights import WeightOffer, WeightReceipt


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCapabilities:
    """What an engine can do, probed from the running engine and never assumed.

    moe_layers: global decoder layers it reports routes for; empty when it reports none.
    tempered_log_probs: log-probs are those after temperature.
    context_length: most tokens, prompt and response together.
    """

    name: str
    returns_routes: bool
    moe_layers: tuple[int, ...]
    num_experts: int
    top_k: int
    tempered_log_probs: bool
    context_length: int


class Sampler(Protocol):
    """All that an environment sees of an engine."""

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """Completions in the order of `requests`. Requests of concurrent callers may share a batch."""
        ...


class WeightReceiver(Protocol):
    async def update_weights(self, offer: WeightOffer) -> WeightReceipt:
        """Take the offered weights whole, or raise; after a failure no token is sampled before a
        later push arrives whole."""
        ...


class Lifecycle(Protocol):
    async def capabilities(self) -> EngineCapabilities: ...

    async def pause(self) -> None:
        """Finish what runs; requests that come later wait for `resume`."""
        ...

    async def resume(self) -> None: ...

    async def release_memory(self) -> None:
        """Give device memory back until `reclaim_memory`; the weights are kept on the host."""
        ...

    async def reclaim_memory(self) -> None: ...

    async def health(self) -> None:
        """Return when the engine can serve, else raise `MachineError`."""
        ...

    async def close(self) -> None: ...


class Engine(Sampler, WeightReceiver, Lifecycle, Protocol):
    """A rollout engine."""
