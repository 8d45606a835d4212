"""One optimizer step: one denominator for all ranks and microbatches, and when it must not happen."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from onroute.algorithms.losses.base import LossInputs, LossTerms
from onroute.core.batches import StepReport
from onroute.core.config.sections import RunConfig
from onroute.core.errors import CheckError
from onroute.core.samples import Sample
from onroute.models.load import load_plain
from onroute.models.world import World
from onroute.training.trainer import Trainer
from tests.ranks import run_world
from tests.training.builders import (
    LENGTHS,
    assert_same,
    batch_for,
    distance,
    make_samples,
    parameters_of,
    run_config,
    watched_gradients,
    with_log_probs,
)

AGGREGATIONS = ("token_mean", "sample_mean")


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    reports: list[StepReport]
    gradients: list[dict[str, Tensor]]
    parameters: dict[str, Tensor]


def train(world: World, config: RunConfig, batches: Sequence[Sequence[Sample]]) -> Trained:
    """What a fresh trainer makes of the batches."""
    trainer = Trainer(config, world, total_steps=len(batches) * config.data.optimizer_steps)
    with watched_gradients(trainer) as gradients:
        reports = [report for batch in batches for report in trainer.train(batch_for(config, batch, world))]
    return Trained(reports=reports, gradients=gradients, parameters=parameters_of(trainer.model))


def unclipped(
    path: Path, *, microbatch_tokens: int = 96, layout: str = "rows", replay: str = "rollout",
    aggregation: str = "token_mean",
) -> RunConfig:  # fmt: skip
    return run_config(
        path,
        data={"microbatch_tokens": microbatch_tokens, "layout": layout},
        routing={"replay": replay},
        algorithm={"aggregation": aggregation},
        optimizer={"clip_norm": math.inf},
    )


def by_hand(path: Path, samples: Sequence[Sample], aggregation: str) -> dict[str, Tensor]:
    """Gradients of the policy gradient's loss on live routes, sample by sample, in a plain model.

    At the sampling policy the ratio is 1, so the gradient is that of -sum(weight * advantage * log p).
    """
    model = load_plain(path, dtype=torch.float32, attention="sdpa", experts="eager")
    rewards = np.array([sample.reward for sample in samples]).reshape(-1, 2)
    deviation = rewards.std(axis=1, ddof=1, keepdims=True) + 1e-6
    advantages = ((rewards - rewards.mean(axis=1, keepdims=True)) / deviation).flatten()
    counts = [int(sample.loss_mask.sum()) for sample in samples]
    for sample, advantage, count in zip(samples, advantages, counts, strict=True):
        if count == 0:
            continue
        weight = 1 / sum(counts) if aggregation == "token_mean" else 1 / (sum(c > 0 for c in counts) * count)
        ids = torch.from_numpy(sample.tokens.astype(np.int64))
        logits = model(input_ids=ids[None], use_cache=False).logits[0]
        log_probs = logits.log_softmax(-1)[:-1].gather(1, ids[1:, None])[sample.prompt_length - 1 :]
        (-weight * advantage * log_probs).sum().backward()
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_gradients_are_those_of_all_samples_at_once(moe: Path, world: World, aggregation: str):
    samples = make_samples(layers=None)
    expected = by_hand(moe, samples, aggregation)
    for layout, tokens in (("rows", 96), ("rows", 28), ("rows", 14), ("packed", 64), ("packed", 16)):
        config = unclipped(
            moe, microbatch_tokens=tokens, layout=layout, replay="off", aggregation=aggregation
        )
        found = train(world, config, [samples]).gradients[0]
        assert distance(found, expected) < 2e-6, (layout, tokens)


@pytest.mark.parametrize("aggregation", AGGREGATIONS)
def test_two_ranks_with_uneven_loss_tokens_give_the_gradient_of_one(
    moe: Path, world: World, aggregation: str
):
    # All are 11 tokens long, so every other one goes to a rank: 18 and 4 loss tokens. A mean of means
    # would be far off.
    samples = make_samples([(2, 9), (9, 2), (2, 9), (9, 2)])
    one = train(world, unclipped(moe, aggregation=aggregation), [samples])
    for tokens in (96, 22, 11):
        config = unclipped(moe, microbatch_tokens=tokens, aggregation=aggregation)
        for rank in run_world(2, train, config, [samples]):
            assert distance(rank.gradients[0], one.gradients[0]) < 1e-6
            assert rank.reports[0].metrics["train/loss"] == pytest.approx(
                one.reports[0].metrics["train/loss"], rel=1e-6, abs=1e-7
            )
            assert rank.reports[0].metrics["train/loss_tokens"] == 22


def without_padding(report: StepReport) -> dict[str, float]:
    """The metrics that do not depend on which samples share a microbatch."""
    return {name: value for name, value in report.metrics.items() if name != "train/padding_share"}


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_two_ranks_train_as_one_over_three_steps(moe: Path, world: World, checkpointing: str):
    config = run_config(
        moe,
        data={"microbatch_tokens": 28},
        model={"activation_checkpointing": checkpointing},
        optimizer={"weight_decay": 0.1, "warmup_steps": 2},
    )
    batches = [make_samples(seed=seed) for seed in range(3)]
    one = train(world, config, batches)
    assert one.reports[0].metrics["train/grad_norm"] > config.optimizer.clip_norm / 10
    for rank in run_world(2, train, config, batches):
        for found, expected in zip(rank.reports, one.reports, strict=True):
            assert found.stepped
            assert without_padding(found) == pytest.approx(without_padding(expected), rel=2e-5, abs=1e-7)
        assert distance(rank.parameters, one.parameters) < 2e-6


@pytest.mark.parametrize(
    ("lengths", "budget"),
    [([(7, 1)] * 3 + [(1, 0)] * 3, 8), ([(4, 4)], 8), ([(4, 4), (3, 3), (2, 1)], 8)],
    ids=["long and short ones", "a rank without samples", "an odd number"],
)
def test_ranks_with_other_numbers_of_samples_meet(
    moe: Path, world: World, lengths: list[tuple[int, int]], budget: int
):
    samples = make_samples(lengths)
    one = train(world, unclipped(moe, microbatch_tokens=budget), [samples])
    for rank in run_world(2, train, unclipped(moe, microbatch_tokens=budget), [samples]):
        assert rank.reports[0].stepped
        if one.gradients[0] and any(bool(g.any()) for g in one.gradients[0].values()):
            assert distance(rank.gradients[0], one.gradients[0]) < 1e-6
        assert rank.reports[0].metrics["train/loss_tokens"] == sum(response for _, response in lengths)


def train_by_counts(world: World, config: RunConfig, samples: list[Sample], filler: int) -> dict[str, Tensor]:
    """Rank 0 alone has samples; the plan holds `filler` empty microbatches more than are needed."""
    trainer = Trainer(config, world, total_steps=1)
    batch = batch_for(config, samples, world)
    step = batch.plan.assignment[world.rank][0]
    assignment = ((((*step, *((),) * filler)),),) * world.size
    padded = replace(batch, plan=replace(batch.plan, assignment=assignment))
    with watched_gradients(trainer) as gradients:
        (report,) = trainer.train(padded)
    assert report.metrics["train/loss_tokens"] == 22
    return gradients[0]


@pytest.mark.parametrize("layout", ["rows", "packed"])
def test_fillers_change_nothing(moe: Path, world: World, layout: str):
    config = unclipped(moe, microbatch_tokens=32, layout=layout)
    samples = make_samples()
    assert_same(*(train_by_counts(world, config, samples, filler) for filler in (0, 3)))


def test_a_batch_without_anything_to_learn_moves_nothing(moe: Path, world: World):
    config = run_config(moe)
    trained = train(world, config, [make_samples([(3, 0), (4, 0)])])
    assert trained.reports[0].metrics["train/loss"] == 0.0
    assert trained.reports[0].metrics["train/grad_norm"] == 0.0
    assert_same(trained.parameters, parameters_of(Trainer(config, world, total_steps=1).model))


def test_with_one_step_the_training_pass_gives_the_log_probs_of_a_scoring_pass(moe: Path, world: World):
    config = run_config(moe)
    trainer = Trainer(config, world, total_steps=1)
    batch = batch_for(config, make_samples(), world)
    scored = torch.cat(trainer.log_probs(batch)).double()
    engine = np.concatenate(
        [
            batch.samples[index].log_probs[batch.samples[index].loss_mask]
            for microbatch in batch.plan.assignment[0][0]
            for index in microbatch
        ]
    )
    (report,) = trainer.train(batch)
    gaps = (scored - torch.from_numpy(engine).double()).abs()
    assert report.metrics["mismatch/log_prob_abs_diff_max"] == float(gaps.max())
    assert report.metrics["mismatch/log_prob_abs_diff"] == pytest.approx(float(gaps.mean()), rel=1e-12)
    assert report.metrics["train/policy_k1"] == 0.0


def test_several_steps_measure_their_ratios_against_the_policy_before_the_first(moe: Path, world: World):
    # The second step trains what the first has trained before: log p has moved, and by the ratio of
    # a policy scored once the mean log-ratio is not zero; scored anew it would be zero.
    config = run_config(moe, data={"optimizer_steps": 2}, optimizer={"lr": 1e-2})
    samples = make_samples([(3, 4)] * 4)
    twins = [*samples[:2], *(replace(s, id=f"{s.id}b", prompt_id="p1") for s in samples[:2])]
    trainer = Trainer(config, world, total_steps=2)
    batch = batch_for(config, twins, world)
    before = torch.cat(trainer.log_probs(batch))
    first, second = trainer.train(batch)
    assert first.metrics["train/policy_k1"] == 0.0
    one_step = Trainer(replace(config, data=replace(config.data, optimizer_steps=1)), world, total_steps=2)
    alone = batch_for(one_step._config, twins[:2], world)
    one_step.train(alone)
    after = torch.cat(one_step.log_probs(alone))
    shift = (before[len(after) :] - after).double().mean()
    assert abs(float(shift)) > 1e-4
    assert second.metrics["train/policy_k1"] == pytest.approx(float(shift), rel=1e-4)
    assert second.metrics["train/lr"] == 1e-2


def test_an_engine_too_far_off_is_refused_before_the_optimizer_moves(moe: Path, world: World):
    config = run_config(moe, algorithm={"max_log_prob_gap": 0.5})
    trainer = Trainer(config, world, total_steps=2)
    before = parameters_of(trainer.model)
    samples = make_samples()
    exact = trainer.log_probs(batch_for(config, samples, world))
    order = [i for mb in batch_for(config, samples, world).plan.assignment[0][0] for i in mb]
    split = np.split(torch.cat(exact).numpy(), np.cumsum([LENGTHS[index][1] for index in order])[:-1])
    values = dict(zip(order, split, strict=True))

    def engine(offset: float) -> list[Sample]:
        return [with_log_probs(sample, values[i] - offset) for i, sample in enumerate(samples)]

    with pytest.raises(CheckError, match=r"training-engine-gap.*differ by 0\.51 .*allowed are 0\.5;"):
        trainer.train(batch_for(config, engine(0.51), world))
    assert_same(parameters_of(trainer.model), before)
    assert not trainer._optimizer.state
    (report,) = trainer.train(batch_for(config, engine(0.49), world))
    assert report.stepped
    assert report.metrics["mismatch/log_prob_abs_diff"] == pytest.approx(0.49, abs=1e-5)


@contextmanager
def spoilt_loss(trainer: Trainer) -> Iterator[None]:
    """The loss is NaN for every token, on the rank that asks for it."""
    sound = trainer._loss

    def spoil(inputs: LossInputs, options: object) -> LossTerms:
        terms = sound(inputs, options)
        return replace(terms, per_token=terms.per_token * math.nan)

    trainer._loss = spoil
    try:
        yield
    finally:
        trainer._loss = sound


def train_spoilt(
    world: World, config: RunConfig, samples: list[Sample]
) -> tuple[list[dict[str, float]], str, bool]:
    """Train until it raises: metrics of each step, the error, whether the parameters are as before."""
    trainer = Trainer(config, world, total_steps=9)
    before, metrics = parameters_of(trainer.model), []
    with spoilt_loss(trainer) if world.rank == world.size - 1 else nullcontext():
        for _ in range(9):
            try:
                (report,) = trainer.train(batch_for(config, samples, world))
            except CheckError as error:
                after = parameters_of(trainer.model)
                return metrics, str(error), all(torch.equal(after[name], before[name]) for name in before)
            assert not report.stepped
            metrics.append(dict(report.metrics))
    raise AssertionError("it went on")


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_number_that_is_not_finite_on_one_rank_skips_the_step_on_all(moe: Path, ranks: int):
    config = run_config(moe, optimizer={"max_nonfinite_steps": 3})
    for metrics, error, untouched in run_world(ranks, train_spoilt, config, make_samples()):
        assert untouched
        assert [step["train/skipped"] for step in metrics] == [1.0, 1.0]
        assert all(math.isnan(step["train/loss"]) for step in metrics)
        assert "[training-nonfinite] loss or gradient was not finite in 3 steps in a row" in error
        assert "optimizer step 2" in error


def test_a_finite_step_ends_the_row_of_skipped_ones(moe: Path, world: World):
    config = run_config(moe, optimizer={"max_nonfinite_steps": 2})
    trainer = Trainer(config, world, total_steps=9)
    batch = batch_for(config, make_samples(), world)
    stepped = []
    for is_bad in (True, False, True, False):
        with spoilt_loss(trainer) if is_bad else nullcontext():
            stepped += [report.stepped for report in trainer.train(batch)]
    assert stepped == [False, True, False, True]
