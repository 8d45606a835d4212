"""Replay on the trainer's model: hooks, session and proof in one place, or nothing when it is off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from transformers import PreTrainedModel

from onroute.core.batches import TokenSpan
from onroute.core.errors import CheckError
from onroute.core.routing import RoutingTrace
from onroute.core.samples import Sample
from onroute.routing.capture import trace_of
from onroute.routing.replay import RoutingReplay
from onroute.routing.selfcheck import SelfCheckReport


class TrainerRoutes:
    """The routers of one model under replay. Built on the sharded model; every rank builds its own."""

    def __init__(self, model: PreTrainedModel, device: torch.device, *, records: bool = False) -> None:
        """records: the routes to replay are those of a pass of this model, not those of the samples."""
        self.records = records
        self._replay = RoutingReplay(model, device)
        self.map, self.hooks, self.session = self._replay.map, self._replay.hooks, self._replay.session

    def prove(self) -> SelfCheckReport:
        """Run the self-check on this model. A collective when it is sharded; the caller decides what a
        failed check means."""
        return self._replay.prove()

    def require(self, samples: Mapping[int, Sample]) -> None:
        """Raises CheckError unless every sample brought routes of its own length for these routers, when they
        are needed, and the routers and experts are as they were when replay was installed."""
        self.hooks.require_untouched()
        if self.records:
            return
        for sample in samples.values():
            rows = 0 if sample.routing is None else sample.routing.num_tokens
            if rows != sample.num_tokens:
                raise CheckError(
                    "routing-missing",
                    f"{rows} route rows for {sample.num_tokens} tokens",
                    f"sample {sample.id}",
                    "see that the engine captures routes, and keep them with the sample they belong to",
                )
        self.session.load(_traces(samples))

    @contextmanager
    def replaying(self, samples: Mapping[int, Sample]) -> Iterator[None]:
        """Replay the routes of `samples` in the body, or those that are recorded in it; nothing of them is
        left afterwards."""
        traces = {} if self.records else _traces(samples)
        with self.session.holding(traces), self.hooks.using(self.session):
            yield

    @contextmanager
    def recording(self, spans: Sequence[TokenSpan], traces: dict[int, RoutingTrace]) -> Iterator[None]:
        """One forward pass on live routes in the body; the trace of each of its samples goes to `traces`."""
        with self._replay.recording() as record:
            yield
        for span in spans:
            rows = record.ids[:, span.offset : span.offset + span.length]
            traces[span.sample] = trace_of(rows, self.map, num_tokens=span.length)


def _traces(samples: Mapping[int, Sample]) -> dict[int, RoutingTrace]:
    return {index: sample.routing for index, sample in samples.items() if sample.routing is not None}
