"""The embedded rollout engine: stock transformers, its own copy of the model, in this process."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from onroute.core.config.sections import EngineConfig, ModelConfig
from onroute.core.engine import EngineCapabilities
from onroute.core.errors import CheckError, MachineError
from onroute.core.samples import Completion, SampleRequest
from onroute.core.weights import WeightOffer, WeightReceipt
from onroute.engines.batching import RequestQueue
from onroute.engines.capture import RouteCapture
from onroute.engines.decode import decode
from onroute.engines.probe import probe_capabilities
from onroute.engines.requests import check_completion, check_request
from onroute.models.load import best_attention, context_length, load_plain, read_config
from onroute.models.names import PublishedLayout
from onroute.routing.dense import refuse_dense
from onroute.weights.bucket import BucketSource


class HuggingFaceEngine:
    """Samples with a KV cache, captures routes, takes weights bucket by bucket. See `core.engine`.

    There is no prefix cache: nothing computed with old weights outlives a batch.

    capture: return a `RoutingTrace` with every completion.
    exchange: where offers of `update_weights` are received.

    Raises:
        UserError: the model cannot be loaded, or `capture` is asked of a model without routers.
    """

    def __init__(
        self,
        config: EngineConfig,
        model_config: ModelConfig,
        *,
        capture: bool,
        exchange: BucketSource,
        device: torch.device | str = "cpu",
    ) -> None:
        path = Path(model_config.path)
        hf_config = read_config(path)
        if capture:
            refuse_dense(hf_config)
        self._device = torch.device(device)
        self._context_length = context_length(hf_config)
        self._vocab_size = int(hf_config.get_text_config().vocab_size)
        dtype: torch.dtype = getattr(torch, config.dtype)
        self._model = load_plain(
            path,
            dtype=dtype,
            attention=best_attention(path),
            experts=model_config.experts,
            device=self._device,
        )
        self._capture = RouteCapture(self._model) if capture else None
        self._layout = PublishedLayout(self._model)
        self._exchange = exchange
        self._queue = RequestQueue(self._run_batch, config.max_batch_size)
        self._running = asyncio.Event()
        self._running.set()
        self._version = 0
        self._is_whole = True
        self._is_released = False
        self._is_closed = False

    async def sample(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        """See `Sampler.sample`.

        Raises:
            UserError: a request cannot be served; it is named, and nothing of the call is sampled.
            CheckError: the last weight update did not arrive whole, or logits are not finite.
            MachineError: the engine is closed, released, or out of memory.
        """
        await self._running.wait()
        self._require_ready()
        for request in requests:
            check_request(request, context_length=self._context_length, vocab_size=self._vocab_size)
        return await self._queue.submit(requests)

    async def update_weights(self, offer: WeightOffer) -> WeightReceipt:
        """See `WeightReceiver.update_weights`. From the first bucket until all have arrived, nothing samples.

        Raises:
            CheckError: the version does not grow, or the offer, a bucket or the set of names is not
                what this model needs.
        """
        self._require_open()
        if offer.version <= self._version:
            raise CheckError(
                "engine-version",
                f"version {offer.version} was offered while version {self._version} is held",
                f"offer {offer.rendezvous}",
                "number the pushes upwards",
            )
        num_bytes, checksum, written = 0, 0, set[str]()
        with closing(self._exchange.receive(offer)) as arriving:
            for bucket in arriving:
                self._is_whole = False
                written.update(self._layout.apply(bucket.named()))
                num_bytes += bucket.num_bytes
                checksum = bucket.checksum
                await asyncio.sleep(0)
        self._require_all_written(written, offer)
        self._is_whole, self._version = True, offer.version
        return WeightReceipt(
            version=offer.version, num_tensors=len(offer.tensors), num_bytes=num_bytes, checksum=checksum
        )

    async def capabilities(self) -> EngineCapabilities:
        """Samples two tokens and looks at what came back."""
        self._require_ready()
        return probe_capabilities(
            "huggingface", self._model, self._run_batch, context_length=self._context_length
        )

    async def pause(self) -> None:
        """See `Lifecycle.pause`."""
        self._running.clear()
        await self._queue.idle()

    async def resume(self) -> None:
        self._running.set()

    async def release_memory(self) -> None:
        """Move the weights to the host. Sampling is refused until `reclaim_memory`."""
        self._require_open()
        self._is_released = True
        self._model.to("cpu")  # type: ignore[arg-type]
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    async def reclaim_memory(self) -> None:
        self._require_open()
        self._model.to(self._device)  # type: ignore[arg-type]
        self._is_released = False

    async def health(self) -> None:
        """Raises MachineError when the engine cannot serve, saying why."""
        self._require_open()
        if self._is_released:
            raise self._unable("the engine gave its memory back", "call reclaim_memory first")
        if not self._is_whole:
            raise self._unable("the last weight update did not arrive whole", "push all weights again")

    async def close(self) -> None:
        """Give the model up. Waiting requests end with an error; closing twice is fine."""
        if self._is_closed:
            return
        self._is_closed = True
        self._running.set()
        self._queue.fail(self._unable("the engine is closed", "start a new engine"))
        if self._capture is not None:
            self._capture.remove()
        self._model.to("meta")  # type: ignore[arg-type]

    def _run_batch(self, requests: Sequence[SampleRequest]) -> list[Completion]:
        self._require_ready()
        try:
            continuations = decode(self._model, requests, capture=self._capture)
        except torch.OutOfMemoryError as error:
            tokens = sum(len(r.prompt_tokens) + r.sampling.max_new_tokens for r in requests)
            raise MachineError(
                "engine-memory",
                f"out of memory on {self._device}: {len(requests)} requests, up to {tokens} tokens in all",
                f"first request {requests[0].id}",
                "lower engine.max_batch_size or engine.max_new_tokens",
            ) from error
        completions = []
        for request, continuation in zip(requests, continuations, strict=True):
            num_new = len(continuation.tokens)
            routing = None
            if self._capture is not None and continuation.routes is not None:
                routing = self._capture.trace(continuation.routes, len(request.prompt_tokens) + num_new)
            completion = Completion(
                id=request.id,
                tokens=continuation.tokens,
                log_probs=continuation.log_probs,
                routing=routing,
                stop_reason=continuation.stop_reason,
                weight_versions=np.full(num_new, self._version, dtype=np.int32),
            )
            check_completion(completion)
            completions.append(completion)
        return completions

    def _require_all_written(self, written: set[str], offer: WeightOffer) -> None:
        missing = [p.name for p in self._layout.parameters if p.name not in written]
        if missing:
            raise CheckError(
                "engine-weights-missing",
                f"{len(missing)} of {len(self._layout.parameters)} parameters got no new value: "
                + ", ".join(missing[:10]),
                f"version {offer.version}",
                "publish every parameter and persistent buffer",
            )

    def _require_open(self) -> None:
        if self._is_closed:
            raise self._unable("the engine is closed", "start a new engine")

    def _require_ready(self) -> None:
        self._require_open()
        if not self._is_whole:
            raise CheckError(
                "engine-weights-incomplete",
                "the last weight update did not arrive whole, so the engine holds a mix of two models",
                f"after version {self._version}",
                "push all weights again",
            )
        if self._is_released:
            raise self._unable("the engine gave its memory back", "call reclaim_memory first")

    def _unable(self, reason: str, fix: str) -> MachineError:
        return MachineError("engine-unable", reason, f"weights version {self._version}", fix)
