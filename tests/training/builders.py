"""Runs on tiny models: their config, their samples, what a trainer holds."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from onroute.core.batches import TrainBatch
from onroute.core.config.sections import (
    AlgorithmConfig,
    DataConfig,
    EngineConfig,
    EnvironmentConfig,
    ModelConfig,
    OptimizerConfig,
    RoutingConfig,
    RunConfig,
    RunSection,
)
from onroute.core.routing import RoutingTrace
from onroute.core.samples import Group, Prompt, Sample
from onroute.data.batch import whole_batch
from onroute.data.plan import plan_batch
from onroute.models.world import World
from onroute.training.trainer import Trainer

LENGTHS = ((3, 4), (3, 1), (5, 9), (5, 2), (2, 6), (2, 0))
"""(prompt, response) of six samples, two a prompt; the last response is empty."""


def run_config(path: Path, **changes: Mapping[str, Any]) -> RunConfig:
    """float32, replay on, no checks at start, any engine accepted; `changes` by section."""
    defaults: dict[str, tuple[type[Any], dict[str, Any]]] = {
        "model": (ModelConfig, {"path": str(path), "dtype": "float32", "experts": "eager"}),
        "routing": (RoutingConfig, {"start_check": False}),
        "engine": (EngineConfig, {}),
        "data": (DataConfig, {"microbatch_tokens": 32}),
        "algorithm": (AlgorithmConfig, {"max_log_prob_gap": math.inf}),
        "optimizer": (OptimizerConfig, {"lr": 1e-3}),
        "environment": (EnvironmentConfig, {"name": "none"}),
        "run": (RunSection, {"folder": "unused"}),
    }
    return RunConfig(
        **{name: cls(**{**values, **changes.get(name, {})}) for name, (cls, values) in defaults.items()}
    )


def random_trace(num_tokens: int, *, layers: Sequence[int], seed: int) -> RoutingTrace:
    """Distinct experts out of 8, two a token and layer; the last token was never an input."""
    rng = np.random.default_rng(seed)
    experts = rng.random((num_tokens, len(layers), 8)).argsort(axis=-1)[..., :2].astype(np.uint8)
    valid = np.arange(num_tokens) < num_tokens - 1
    return RoutingTrace(experts=experts, layers=tuple(layers), num_experts=8, valid=valid)


def make_sample(
    prompt: int, response: int, *, number: int, layers: Sequence[int] | None = (0, 1, 2), seed: int = 0
) -> Sample:
    """Random tokens, log-probs, reward and, unless `layers` is None, routes."""
    total = prompt + response
    rng = np.random.default_rng((seed, number))
    mask = np.arange(total) >= prompt
    return Sample(
        id=f"s{number}",
        prompt_id=f"p{number // 2}",
        tokens=rng.integers(0, 128, total).astype(np.int32),
        prompt_length=prompt,
        loss_mask=mask,
        log_probs=np.where(mask, -5 * rng.random(total), 0).astype(np.float32),
        weight_versions=np.where(mask, 0, -1).astype(np.int32),
        routing=None if layers is None else random_trace(total, layers=layers, seed=seed * 100 + number),
        reward=float(rng.random()),
        stop_reason="stop",
    )


def make_samples(
    lengths: Sequence[tuple[int, int]] = LENGTHS,
    *,
    layers: Sequence[int] | None = (0, 1, 2),
    seed: int = 0,
) -> list[Sample]:
    return [
        make_sample(*length, number=number, layers=layers, seed=seed) for number, length in enumerate(lengths)
    ]


def grouped(samples: Sequence[Sample]) -> list[Group]:
    """Two samples a prompt. The samples must share their prompts' tokens only by name."""
    return [
        Group(
            prompt=Prompt(id=pair[0].prompt_id, tokens=pair[0].tokens[: pair[0].prompt_length], text=""),
            samples=tuple(pair),
        )
        for pair in (samples[i : i + 2] for i in range(0, len(samples), 2))
    ]


def make_batch(
    samples: Sequence[Sample],
    *,
    ranks: int = 1,
    rank: int = 0,
    steps: int = 1,
    layout: str = "rows",
    microbatch_tokens: int = 32,
) -> TrainBatch:
    groups = [number // 2 for number in range(len(samples))]
    plan = plan_batch(
        [s.num_tokens for s in samples], groups, ranks=ranks, steps=steps, layout=layout,
        microbatch_tokens=microbatch_tokens,
    )  # fmt: skip
    return whole_batch(samples, groups, plan, rank)


def batch_for(config: RunConfig, samples: Sequence[Sample], world: World) -> TrainBatch:
    """What this rank trains of `samples` under `config`."""
    return make_batch(
        samples, ranks=world.size, rank=world.rank, steps=config.data.optimizer_steps,
        layout=config.data.layout, microbatch_tokens=config.data.microbatch_tokens,
    )  # fmt: skip


def whole(tensor: Tensor) -> Tensor:
    """A copy of the full tensor; a collective when it is sharded."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def parameters_of(model: PreTrainedModel) -> dict[str, Tensor]:
    return {name: whole(parameter) for name, parameter in model.named_parameters()}


@contextmanager
def watched_gradients(trainer: Trainer) -> Iterator[list[dict[str, Tensor]]]:
    """The gradients that the optimizer is given, one entry a step; clipping has been done by then."""
    seen: list[dict[str, Tensor]] = []

    def note(*_: object) -> None:
        seen.append(
            {name: whole(p.grad) for name, p in trainer.model.named_parameters() if p.grad is not None}
        )

    handle = trainer._optimizer.register_step_pre_hook(note)
    try:
        yield seen
    finally:
        handle.remove()


def assert_same(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> None:
    """Bit for bit."""
    assert a.keys() == b.keys()
    assert [name for name in a if not torch.equal(a[name], b[name])] == []


def distance(a: Mapping[str, Tensor], b: Mapping[str, Tensor]) -> float:
    """|a - b| / |b| over all tensors together."""
    assert a.keys() == b.keys()
    difference = sum(float((a[name] - b[name]).double().square().sum()) for name in a)
    return math.sqrt(difference / sum(float(b[name].double().square().sum()) for name in b))


def with_log_probs(sample: Sample, values: np.ndarray) -> Sample:
    """The sample as an engine with these log-probs of its loss tokens would have sampled it."""
    log_probs = np.zeros(sample.num_tokens, np.float32)
    log_probs[sample.loss_mask] = values
    return replace(sample, log_probs=log_probs)
