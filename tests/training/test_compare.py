"""Native against replayed routing on tokens that a real engine sampled."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from onroute.core.config.sections import EngineConfig, ModelConfig
from onroute.core.errors import UserError
from onroute.core.samples import Group, Prompt, Sample, SampleRequest
from onroute.core.sampling import SamplingParams
from onroute.engines.huggingface import HuggingFaceEngine
from onroute.models.world import World
from onroute.training.compare import Comparison, Recorded, compare
from onroute.weights.local import LocalExchange
from tests.training.builders import run_config
from tests.training.conftest import FolderOf

NUM_SAMPLES, NEW_TOKENS = 24, 32


def sample_with(path: Path, dtype: str) -> list[Group]:
    """Samples of an engine in `dtype`, two of each prompt."""
    engine = HuggingFaceEngine(
        EngineConfig(dtype=dtype),  # type: ignore[arg-type]
        ModelConfig(path=str(path), experts="eager"),
        capture=True,
        exchange=LocalExchange(1 << 20),
    )
    rng = np.random.default_rng(0)
    prompts = [rng.integers(3, 128, 6).astype(np.int32) for _ in range(NUM_SAMPLES // 2)]
    requests = [
        SampleRequest(
            id=f"s{i}",
            prompt_tokens=prompts[i // 2],
            sampling=SamplingParams(max_new_tokens=NEW_TOKENS),
            seed=i,
        )
        for i in range(NUM_SAMPLES)
    ]
    answers = asyncio.run(engine.sample(requests))
    samples = [
        Sample(
            id=answer.id,
            prompt_id=f"p{i // 2}",
            tokens=np.concatenate([request.prompt_tokens, answer.tokens]),
            prompt_length=6,
            loss_mask=np.arange(6 + len(answer.tokens)) >= 6,
            log_probs=np.concatenate([np.zeros(6, np.float32), answer.log_probs]),
            weight_versions=np.concatenate([np.full(6, -1, np.int32), answer.weight_versions]),
            routing=answer.routing,
            reward=0.0,
            stop_reason=answer.stop_reason,
        )
        for i, (request, answer) in enumerate(zip(requests, answers, strict=True))
    ]
    return [
        Group(
            prompt=Prompt(id=f"p{n}", tokens=prompts[n], text=""), samples=tuple(samples[2 * n : 2 * n + 2])
        )
        for n in range(NUM_SAMPLES // 2)
    ]


def compared(path: Path, world: World, groups: list[Group], **changes: object) -> Comparison:
    config = run_config(path, data={"microbatch_tokens": 256}, **changes)  # type: ignore[arg-type]
    return compare(config, [Recorded(step=3, groups=groups, weights=path)], world)


def test_replay_takes_away_what_an_engine_in_bfloat16_routed_differently(moe: Path, world: World):
    groups = sample_with(moe, "bfloat16")
    found = compared(moe, world, groups)
    assert found.steps == (3,)
    assert found.num_sequences == NUM_SAMPLES
    assert found.replay["k3"] < found.native["k3"]
    assert found.replay["log_prob_abs_diff"] < found.native["log_prob_abs_diff"]
    assert found.k3_factor.value == pytest.approx(found.native["k3"] / found.replay["k3"], rel=1e-6)
    assert found.k3_factor.low > 1.0
    assert found.layers == (0, 1, 2)
    assert all(0.9 < share < 1.0 for share in found.agreement)
    engine = np.concatenate([s.log_probs[s.loss_mask] for group in groups for s in group.samples])
    np.testing.assert_array_equal(found.engine_log_probs, engine.astype(np.float64))
    gap = np.abs(found.native_log_probs - found.engine_log_probs)
    assert found.native["log_prob_abs_diff"] == pytest.approx(gap.mean(), rel=1e-6)
    assert found.native["tokens"] == len(engine)


def test_one_model_in_float32_on_both_sides_agrees_either_way(moe: Path, world: World):
    found = compared(moe, world, sample_with(moe, "float32"))
    assert found.native["log_prob_abs_diff_max"] < 1e-5
    assert found.replay["log_prob_abs_diff_max"] < 1e-5
    assert found.agreement == (1.0, 1.0, 1.0)


def test_replay_is_compared_also_for_a_run_that_trained_without_it(moe: Path, world: World):
    found = compared(moe, world, sample_with(moe, "bfloat16"), routing={"replay": "off"})
    assert found.replay["k3"] < found.native["k3"]


def test_rollouts_without_routes_and_dense_models_are_refused(moe: Path, folder_of: FolderOf, world: World):
    (first, *others) = sample_with(moe, "float32")
    bare = replace(first, samples=tuple(replace(s, routing=None) for s in first.samples))
    with pytest.raises(UserError, match=r"compare-no-routes.*step 3, sample s0"):
        compared(moe, world, [bare, *others])
    with pytest.raises(UserError, match="routing-dense-model"):
        compared(folder_of("qwen3"), world, [first])
