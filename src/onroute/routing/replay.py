"""Routing replay for a training loop of one's own: any Hugging Face MoE, no engine, no run file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from onroute.core.batches import TokenSpan
from onroute.core.errors import CheckError
from onroute.core.routing import RoutingTrace
from onroute.routing.activation import checkpointing, enable_checkpointing
from onroute.routing.capture import RouteRecord, RouteRecorder, trace_of
from onroute.routing.discovery import decoder_stack, discover
from onroute.routing.interception import RouterHooks
from onroute.routing.ledger import Reduce
from onroute.routing.metrics import RoutingMetrics
from onroute.routing.probe import probe_logits
from onroute.routing.selfcheck import SelfCheckReport, self_check
from onroute.routing.session import ReplaySession


class RoutingReplay:
    """Records the experts of a forward pass, replays them in later ones, and proves that it did.

    >>> replay = RoutingReplay(model)
    >>> replay.prove().require()
    >>> with replay.recording() as record, torch.no_grad():
    ...     model(**batch)
    >>> with replay.replaying(record.ids):
    ...     loss_of(model(**batch)).backward()
    >>> metrics = replay.settle()  # raises before the optimizer steps, when a router was missed
    >>> optimizer.step()

    Outside `recording` and `replaying` the model is as it was. With activation checkpointing, a recompute
    must find its routes: switch it on with `replay.enable_checkpointing()`, or hand `replay.context_fn` to
    what does it for you.
    Build it last, on the very model that is called: after FSDP2, PEFT and whatever else changes modules.

    Raises:
        UserError: no routers to replay; see `discover`.
        CheckError: the model has routing hooks already.
    """

    def __init__(self, model: PreTrainedModel, device: torch.device | None = None) -> None:
        """device: where the model computes; without it, where its first parameter is."""
        self._model = model
        self._device = device or next(model.parameters()).device
        self.map = discover(model, lambda: probe_logits(model, self._device))
        self.hooks = RouterHooks(model, self.map)
        self.session = ReplaySession(self.map, self._device)
        self._recorder = RouteRecorder(self.hooks)
        self._open = ExitStack()
        self._recomputed: set[bool] = set()
        """Whether the layers were checkpointed, for each pass with gradients since the last settlement."""

    def prove(self, *, recompute: bool = True) -> SelfCheckReport:
        """Run the self-check on this model; `require()` of the report raises CheckError when a proof fails.

        A collective when the model is sharded.
        recompute: prove replay under activation checkpointing too; False for a model that has none.
        """
        return self_check(
            self._model,
            self.hooks,
            self.session,
            forward=lambda: probe_logits(self._model, self._device),
            checkpointing=self.checkpointing if recompute else None,
        )

    def checkpointing(self, enabled: bool) -> AbstractContextManager[None]:
        """Activation checkpointing of the decoder layers on or off for a context, made for replay."""
        return checkpointing(self._model, self.context_fn, enabled=enabled)

    def recording(self) -> AbstractContextManager[RouteRecord]:
        """Record one forward pass; `record.ids`, int64 [routers, rows, top_k], can be read afterwards.

        Rows are the flattened batch * sequence of that pass, padding included.
        """
        return self._recorder.recording()

    @contextmanager
    def replaying(self, ids: Tensor, valid: Tensor | None = None) -> Iterator[None]:
        """One forward pass over rows that take these experts; its backward pass may come inside or later.

        ids: integers [routers, rows, top_k], as `record.ids` or a part of its rows.
        valid: bool [rows]; the rows that are replayed, all when it is left out. The others stay live.

        Raises:
            CheckError: the ids do not fit the model's routers, or the number of rows of the forward pass.
        """
        rows = torch.ones(ids.shape[1], dtype=torch.bool) if valid is None else valid.cpu()
        self._check(ids, rows)
        trace = replace(trace_of(ids, self.map, num_tokens=ids.shape[1]), valid=rows.numpy())
        spans = [TokenSpan(sample=0, offset=0, length=ids.shape[1])]
        with self.replaying_samples({0: trace}, spans, ids.shape[1]):
            yield

    @contextmanager
    def replaying_samples(
        self, traces: Mapping[int, RoutingTrace], spans: Sequence[TokenSpan], num_rows: int
    ) -> Iterator[None]:
        """As `replaying`, with a trace for each sample and the places of the samples among `num_rows` rows.

        Raises:
            CheckError: a trace does not fit the model's routers, or a span its trace.
        """
        self.hooks.require_untouched()
        if not self.session.open_keys:
            self._open.enter_context(self.hooks.using(self.session))
        key = len(self.session.open_keys)
        self.session.load(traces)
        self.session.bind(key, spans, num_rows)
        if torch.is_grad_enabled():
            self._recomputed.add(self._recomputes())
        with self.session.microbatch(key):
            yield

    def enable_checkpointing(self) -> None:
        """Recompute every decoder layer in the backward pass, on the route of its forward pass.

        Raises UserError when the model's layers do not support it.
        """
        enable_checkpointing(self._model, self.context_fn)

    def context_fn(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        """For `torch.utils.checkpoint`, with `use_reentrant=False`: a recompute takes the routes of the pass
        that it repeats."""
        return self.session.context_fn()

    def settle(self, *, recompute: bool | None = None, reduce: Reduce | None = None) -> RoutingMetrics:
        """Prove that every pass since the last call was replayed in full; call it before the optimizer steps.

        recompute: whether the layers are checkpointed. Left out, it is seen from the model's own
            `gradient_checkpointing`; give it when something else does the checkpointing.
        reduce: sums over ranks, when there are several; every rank then calls this.

        Raises:
            CheckError: a router was missed, or used other experts; on every rank together.
        """
        try:
            return self.session.settle(recompute=self._settled(recompute), reduce=reduce)
        finally:
            self.clear()

    def clear(self) -> None:
        """Forget what has run, for instance after a forward pass that raised."""
        self._open.close()
        self._recomputed.clear()
        self.session.clear()

    def remove(self) -> None:
        """Give the model its own forward back, for good."""
        self.clear()
        self.hooks.remove()

    def _settled(self, recompute: bool | None) -> bool:
        if recompute is not None:
            return recompute
        if len(self._recomputed) > 1:
            raise CheckError(
                "routing-checkpointing-mixed",
                "activation checkpointing was switched between two forward passes",
                "before settle()",
                "settle before it is switched",
            )
        return True in self._recomputed

    def _recomputes(self) -> bool:
        return any(
            getattr(layer, "gradient_checkpointing", False) and layer.training
            for layer in decoder_stack(self._model)
        )

    def _check(self, ids: Tensor, valid: Tensor) -> None:
        expected = (len(self.map.sites), self.map.top_k)
        if ids.ndim != 3 or (ids.shape[0], ids.shape[2]) != expected or valid.shape != ids.shape[1:2]:
            raise CheckError(
                "routing-record-shape",
                f"routes are {list(ids.shape)} with a mask of {list(valid.shape)} rows",
                f"expected [{expected[0]}, rows, {expected[1]}] and as many rows",
                "give the ids of a recording of this model",
            )
        used = ids.cpu()[:, valid].long()
        outside = (used < 0) | (used >= self.map.num_experts)
        repeated = (used.sort(dim=-1).values.diff(dim=-1) == 0).any(dim=-1, keepdim=True)
        wrong = (outside | repeated).nonzero()
        if len(wrong):
            column, row, _ = wrong[0].tolist()
            raise CheckError(
                "routing-ids",
                f"experts {used[column, row].tolist()} are not {self.map.top_k} different ones "
                f"of 0..{self.map.num_experts - 1}",
                f"layer {self.map.layers[column]}, row {int(valid.nonzero()[row])}",
                "a row is replayed whole or not at all: leave it out of `valid`, or record it again",
            )
