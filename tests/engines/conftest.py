"""A tiny model in a folder, and engines on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from onroute.core.config.sections import EngineConfig, ModelConfig
from onroute.core.samples import SampleRequest
from onroute.core.sampling import SamplingParams
from onroute.core.weights import WeightOffer
from onroute.engines.huggingface import HuggingFaceEngine
from onroute.models.names import PublishedLayout
from onroute.models.tiny import tiny_model
from onroute.weights.local import LocalExchange

MakeRequest = Callable[..., SampleRequest]
MakeEngine = Callable[..., HuggingFaceEngine]


@pytest.fixture(scope="session")
def model() -> PreTrainedModel:
    """float32, 3 MoE layers, 8 experts, top 2. Not to be changed."""
    return tiny_model("qwen3_moe")


@pytest.fixture(scope="session")
def folder(model: PreTrainedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    model.save_pretrained(path)
    return path


@pytest.fixture(scope="session")
def make_request() -> MakeRequest:
    """A request with a random prompt of `length` tokens that depends on `seed`."""

    def make(
        length: int = 5, *, seed: int = 0, prompt: list[int] | None = None, **sampling: Any
    ) -> SampleRequest:
        ids = np.random.default_rng(seed).integers(3, 128, length) if prompt is None else np.array(prompt)
        params = SamplingParams(**{"max_new_tokens": 8, **sampling})
        return SampleRequest(id=f"r{seed}", prompt_tokens=ids.astype(np.int32), sampling=params, seed=seed)

    return make


@pytest.fixture
def exchange() -> LocalExchange:
    """Buckets of 1 KiB, so that every push is many of them."""
    return LocalExchange(1 << 10)


@pytest.fixture
def make_engine(folder: Path, exchange: LocalExchange) -> MakeEngine:
    def make(
        *,
        path: Path = folder,
        capture: bool = True,
        dtype: str = "float32",
        exchange: LocalExchange = exchange,
        **config: Any,
    ) -> HuggingFaceEngine:
        engine_config = EngineConfig(dtype=dtype, **config)  # type: ignore[arg-type]
        model_config = ModelConfig(path=str(path), experts="eager")
        return HuggingFaceEngine(engine_config, model_config, capture=capture, exchange=exchange)

    return make


@pytest.fixture(scope="session")
def log_probs_of() -> Callable[[PreTrainedModel, SampleRequest, Any, float], Any]:
    """Log-probs of the sampled tokens in one plain, uncached forward pass of the whole sequence."""

    def compute(model: PreTrainedModel, request: SampleRequest, tokens: Any, temperature: float) -> Any:
        ids = torch.from_numpy(np.concatenate([request.prompt_tokens, tokens]).astype(np.int64))
        start = len(request.prompt_tokens)
        with torch.no_grad():
            logits = model(input_ids=ids[None], use_cache=False).logits[0, start - 1 : -1]
        return (logits.float() / temperature).log_softmax(-1).gather(-1, ids[start:, None])[:, 0].numpy()

    return compute


@pytest.fixture(scope="session")
def trained() -> PreTrainedModel:
    """Another model of the same shape, as a trainer would hold it: float32."""
    return tiny_model("qwen3_moe", seed=1)


@pytest.fixture
def publish(exchange: LocalExchange) -> Callable[..., WeightOffer]:
    def offer(model: PreTrainedModel, version: int = 1) -> WeightOffer:
        layout = PublishedLayout(model)
        return exchange.publish(version, layout.specs, layout.tensors)

    return offer
