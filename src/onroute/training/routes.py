"""Replay on the trainer's model: hooks, session and proof in one place, or nothing when it is off."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onroute.core.batches import TokenSpan
from onroute.core.errors import CheckError
from onroute.core.routing import RoutingTrace
from onroute.core.samples import Sample
from onroute.models.activation import checkpointing
from onroute.routing.capture import RouteRecorder, trace_of
from onroute.routing.discovery import discover
from onroute.routing.interception import RouterHooks
from onroute.routing.selfcheck import SelfCheckReport, self_check
from onroute.routing.session import ReplaySession
from onroute.routing.sites import RoutingMap

PROBE_TOKENS = 12
PROBE_ROWS = 2


class TrainerRoutes:
    """The routers of one model under replay. Built on the sharded model; every rank builds its own."""

    def __init__(self, model: PreTrainedModel, device: torch.device, *, records: bool = False) -> None:
        """records: the routes to replay are those of a pass of this model, not those of the samples."""
        self._model, self.records = model, records
        self._device = device
        self.map: RoutingMap = discover(model, lambda: probe_logits(model, device))
        self.hooks = RouterHooks(model, self.map)
        self.session = ReplaySession(self.map, device)
        self._recorder = RouteRecorder(self.hooks)

    def prove(self) -> SelfCheckReport:
        """Run the self-check on this model. A collective when it is sharded; the caller decides what a
        failed check means."""
        return self_check(
            self._model,
            self.hooks,
            self.session,
            forward=lambda: probe_logits(self._model, self._device),
            checkpointing=self.checkpointing,
        )

    def checkpointing(self, enabled: bool) -> AbstractContextManager[None]:
        return checkpointing(self._model, self.session.context_fn, enabled=enabled)

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
        with self._recorder.recording() as record:
            yield
        for span in spans:
            rows = record.ids[:, span.offset : span.offset + span.length]
            traces[span.sample] = trace_of(rows, self.map, num_tokens=span.length)


def _traces(samples: Mapping[int, Sample]) -> dict[int, RoutingTrace]:
    return {index: sample.routing for index, sample in samples.items() if sample.routing is not None}


def probe_logits(model: PreTrainedModel, device: torch.device) -> Tensor:
    """Logits [rows, tokens, V] of a few fixed random tokens, the same on every rank."""
    vocabulary = int(model.config.get_text_config().vocab_size)
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (PROBE_ROWS, PROBE_TOKENS), generator=generator).to(device)
    logits: Tensor = model(input_ids=ids, use_cache=False).logits
    return logits
