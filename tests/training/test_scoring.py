"""Log-probs are those of a plain forward pass, whatever the layout, and asking for them changes nothing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from onroute.core.samples import Sample
from onroute.models.load import load_plain
from onroute.models.world import World
from onroute.training.microbatch import assemble, split_by_sample
from onroute.training.scoring import score, under
from onroute.training.trainer import Trainer
from tests.training.builders import (
    LENGTHS,
    assert_same,
    batch_for,
    make_batch,
    make_samples,
    parameters_of,
    run_config,
)


def scored(
    trainer: Trainer,
    samples: Sequence[Sample],
    *,
    layout: str,
    microbatch_tokens: int,
    temperature: float = 1.0,
) -> dict[int, NDArray[np.float32]]:
    """Log-probs by sample, under replay when the trainer has it."""
    batch = make_batch(samples, layout=layout, microbatch_tokens=microbatch_tokens)
    nothing = np.zeros(len(samples))
    microbatches = [
        assemble(
            batch, indices, layout=layout, device=torch.device("cpu"), advantages=nothing, weights=nothing
        )
        for indices in batch.plan.assignment[0][0]
    ]
    if trainer.routes is None:
        values = score(trainer.model, microbatches, within=under(None), temperature=temperature)
    else:
        with trainer.routes.replaying(batch.samples):
            session = trainer.routes.session
            values = score(trainer.model, microbatches, within=under(session), temperature=temperature)
            session.settle(recompute=False)
    parts: dict[int, NDArray[np.float32]] = {}
    for microbatch, value in zip(microbatches, values, strict=True):
        parts |= split_by_sample(microbatch, batch.samples, value)
    return parts


@pytest.fixture(scope="module")
def trainer(moe: Path, world: World) -> Trainer:
    """Not to be changed."""
    return Trainer(run_config(moe), world, total_steps=1)


@pytest.mark.parametrize("temperature", [1.0, 0.5])
def test_log_probs_are_those_of_a_plain_forward_pass(moe: Path, world: World, temperature: float):
    trainer = Trainer(run_config(moe, routing={"replay": "off"}), world, total_steps=1)
    samples = make_samples(layers=None)
    found = scored(trainer, samples, layout="rows", microbatch_tokens=48, temperature=temperature)
    plain = load_plain(moe, dtype=torch.float32, attention="sdpa", experts="eager")
    for index, sample in enumerate(samples):
        ids = torch.from_numpy(sample.tokens.astype(np.int64))
        with torch.no_grad():
            logits = plain(input_ids=ids[None], use_cache=False).logits[0]
        predicted = torch.log_softmax(logits / temperature, dim=-1)[:-1].gather(1, ids[1:, None])[:, 0]
        expected = predicted[sample.prompt_length - 1 :].numpy()
        np.testing.assert_allclose(found[index], expected, atol=1e-6, rtol=0)
        assert len(found[index]) == LENGTHS[index][1]


def test_temperature_changes_the_log_probs(trainer: Trainer):
    samples = make_samples()
    warm, cold = (
        scored(trainer, samples, layout="rows", microbatch_tokens=48, temperature=t) for t in (1.0, 0.5)
    )
    assert np.abs(warm[2] - cold[2]).max() > 0.01


def test_under_replay_rows_packed_and_one_sample_at_a_time_agree(trainer: Trainer):
    samples = make_samples()
    rows = scored(trainer, samples, layout="rows", microbatch_tokens=84)
    packed = scored(trainer, samples, layout="packed", microbatch_tokens=64)
    alone = scored(trainer, samples, layout="rows", microbatch_tokens=14)
    for index in range(len(samples)):
        np.testing.assert_allclose(packed[index], rows[index], atol=1e-5, rtol=0)
        np.testing.assert_allclose(alone[index], rows[index], atol=1e-5, rtol=0)


def test_replayed_log_probs_follow_the_routes(trainer: Trainer):
    samples = make_samples()
    rerouted = [
        replace(sample, routing=other.routing)
        for sample, other in zip(samples, make_samples(seed=1), strict=True)
    ]
    found, moved = (scored(trainer, s, layout="rows", microbatch_tokens=84) for s in (samples, rerouted))
    assert np.abs(found[2] - moved[2]).max() > 1e-3


def test_asking_for_log_probs_changes_no_training(moe: Path, world: World):
    config = run_config(moe)
    samples = make_samples()
    asking, silent = (Trainer(config, world, total_steps=3) for _ in range(2))
    batch = batch_for(config, samples, world)
    torch.manual_seed(5)
    drawn = torch.rand(2)
    torch.manual_seed(5)
    for _ in range(3):
        before = torch.get_rng_state()
        asking.log_probs(batch)
        assert torch.equal(before, torch.get_rng_state())
        assert asking.model.training
        assert all(p.grad is None for p in asking.model.parameters())
        assert asking.train(batch) == silent.train(batch)
    assert_same(parameters_of(asking.model), parameters_of(silent.model))
    assert torch.equal(torch.rand(2), drawn)


def test_a_score_that_fails_leaves_the_model_in_training(trainer: Trainer):
    batch = make_batch(make_samples())
    with pytest.raises(ValueError, match="nothing to see"):
        _score_and_fail(trainer, batch)
    assert trainer.model.training


def _score_and_fail(trainer: Trainer, batch: object) -> None:
    def fail(*_: object) -> None:
        raise ValueError("nothing to see")

    handle = trainer.model.register_forward_pre_hook(fail)
    try:
        trainer.log_probs(batch)  # type: ignore[arg-type]
    finally:
        handle.remove()
