"""A trainer under replay uses the recorded experts, whole, or does not step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import MethodType

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from onroute.core.config.sections import RunConfig
from onroute.core.errors import CheckError, UserError
from onroute.core.samples import Sample
from onroute.data.intake import RouteShape, check_rollouts
from onroute.models.world import World
from onroute.routing.interception import RouterHooks
from onroute.training.trainer import Trainer
from tests.ranks import run_world
from tests.training.builders import (
    assert_same,
    batch_for,
    grouped,
    make_samples,
    parameters_of,
    random_trace,
    run_config,
    watched_gradients,
)
from tests.training.conftest import FolderOf


@pytest.mark.parametrize("experts", ["eager", "grouped_mm"])
def test_checkpointing_leaves_loss_and_gradients_as_they_are(moe: Path, world: World, experts: str):
    seen = []
    for checkpointing in ("none", "full"):
        config = run_config(
            moe,
            model={"activation_checkpointing": checkpointing, "experts": experts},
            data={"microbatch_tokens": 16},
        )
        trainer = Trainer(config, world, total_steps=1)
        batch = batch_for(config, make_samples(), world)
        assert len(batch.plan.assignment[0][0]) >= 3
        with watched_gradients(trainer) as gradients:
            (report,) = trainer.train(batch)
        # The routes are drawn at random, far from what the live routers would choose.
        assert report.metrics["routing/agreement"] < 0.6
        seen.append((report, gradients[0], parameters_of(trainer.model)))
    (plain, plain_gradients, plain_parameters), (full, full_gradients, full_parameters) = seen
    assert plain == full
    assert_same(plain_gradients, full_gradients)
    assert_same(plain_parameters, full_parameters)


def chosen_experts(
    trainer: Trainer, samples: Sequence[Sample], config: RunConfig, world: World
) -> list[Tensor]:
    """Ids [rows, top_k] that each router hands to its experts, in the order of the calls."""
    seen: list[Tensor] = []
    assert trainer.routes is not None
    routers = {trainer.model.get_submodule(site.module_name) for site in trainer.routes.map.sites}

    def look(module: nn.Module, args: object, output: tuple[Tensor, ...]) -> None:
        if module in routers:
            seen.append(output[2].detach().clone())

    # A hook on the router itself would be refused.
    handle = register_module_forward_hook(look)
    trainer.train(batch_for(config, samples, world))
    handle.remove()
    return seen


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_every_token_with_a_route_takes_it_and_padding_stays_valid(
    moe: Path, world: World, checkpointing: str
):
    # Rows of 6 and 3 tokens, the second padded to 6: 9 real tokens, of which 2 were never an input.
    config = run_config(
        moe, model={"activation_checkpointing": checkpointing}, data={"microbatch_tokens": 12}
    )
    samples = make_samples([(2, 4), (1, 2)])
    trainer = Trainer(config, world, total_steps=1)
    seen = chosen_experts(trainer, samples, config, world)
    assert len(seen) == (6 if checkpointing == "full" else 3)
    layers = [0, 1, 2] + ([2, 1, 0] if checkpointing == "full" else [])
    for layer, ids in zip(layers, seen, strict=True):
        assert ids.shape == (12, 2)
        for sample, start in zip(samples, (0, 6), strict=True):
            assert sample.routing is not None
            fed = sample.num_tokens - 1
            assert torch.equal(
                ids[start : start + fed].sort()[0],
                torch.from_numpy(sample.routing.experts[:fed, layer].astype(np.int64)).sort()[0],
            )
        assert ((ids >= 0) & (ids < 8)).all()
        assert (ids[:, 0] != ids[:, 1]).all()


def test_the_share_of_replayed_tokens_is_told_apart_from_those_that_have_no_route(moe: Path, world: World):
    config = run_config(moe)
    trainer = Trainer(config, world, total_steps=1)
    (report,) = trainer.train(batch_for(config, make_samples([(2, 4), (1, 2)]), world))
    assert report.metrics["routing/replayed_share"] == 1.0


@pytest.mark.parametrize("model_type", ["glm4_moe_lite", "deepseek_v3"])
def test_layers_without_experts_have_no_column(folder_of: FolderOf, world: World, model_type: str):
    config = run_config(folder_of(model_type), routing={"start_check": True})
    trainer = Trainer(config, world, total_steps=1)
    assert trainer.routes is not None
    assert trainer.routes.map.layers == (1, 2)
    samples = make_samples(layers=(1, 2))
    scored = torch.cat(trainer.log_probs(batch_for(config, samples, world)))
    (report,) = trainer.train(batch_for(config, samples, world))
    assert report.stepped
    assert report.metrics["routing/replayed_share"] == 1.0
    # Each of the two columns matters.
    fresh = Trainer(config, world, total_steps=1)
    for column in range(2):
        changed = []
        for sample in samples:
            assert sample.routing is not None
            experts = sample.routing.experts.copy()
            experts[:, column] = (experts[:, column] + 1) % 8
            changed.append(replace(sample, routing=replace(sample.routing, experts=experts)))
        moved = torch.cat(fresh.log_probs(batch_for(config, changed, world)))
        assert not torch.equal(moved, scored)
    with pytest.raises(CheckError, match=r"routing-trace-fit.*3 layers \(0, 1, 2\)"):
        trainer.train(batch_for(config, make_samples(), world))


@pytest.mark.parametrize(("model_type", "replay"), [("qwen3", "off"), ("qwen3_moe", "off")])
def test_without_replay_dense_and_moe_models_train(
    folder_of: FolderOf, world: World, model_type: str, replay: str
):
    config = run_config(folder_of(model_type), routing={"replay": replay})
    trainer = Trainer(config, world, total_steps=1)
    before = parameters_of(trainer.model)
    (report,) = trainer.train(batch_for(config, make_samples(layers=None), world))
    assert report.stepped
    assert not any(name.startswith("routing/") for name in report.metrics)
    after = parameters_of(trainer.model)
    assert all(not torch.equal(after[name], before[name]) for name in before)


def test_a_dense_model_under_replay_is_refused_before_its_weights_are_read(
    folder_of: FolderOf, world: World, tmp_path: Path
):
    (tmp_path / "config.json").write_text((folder_of("qwen3") / "config.json").read_text())
    with pytest.raises(UserError, match=r"routing-.*replay"):
        Trainer(run_config(tmp_path), world, total_steps=1)


def rerouted(sample: Sample, num_tokens: int) -> Sample:
    return replace(sample, routing=random_trace(num_tokens, layers=(0, 1, 2), seed=9))


BROKEN = {
    "routes of another sample": (
        lambda s: rerouted(s, s.num_tokens + 1),
        r"routing-missing.*15 route rows for \d+ tokens.*sample s2",
    ),
    "no routes": (
        lambda s: replace(s, routing=None),
        r"routing-missing.* 0 route rows for \d+ tokens.*sample s2",
    ),
    "routes of a larger model": (
        lambda s: replace(s, routing=random_trace(s.num_tokens, layers=(0, 1, 2, 3), seed=9)),
        r"routing-trace-fit.*4 layers",
    ),
}


@pytest.mark.parametrize(("break_it", "message"), BROKEN.values(), ids=BROKEN)
def test_routes_that_are_not_those_of_the_sample_move_nothing(
    moe: Path, world: World, break_it, message: str
):
    config = run_config(moe)
    trainer = Trainer(config, world, total_steps=1)
    before = parameters_of(trainer.model)
    sound = make_samples()
    broken = [*sound[:2], break_it(sound[2]), *sound[3:]]
    for use in (trainer.train, trainer.log_probs):
        with pytest.raises(CheckError, match=message):
            use(batch_for(config, broken, world))
    assert_same(parameters_of(trainer.model), before)
    assert not trainer._optimizer.state
    # Nothing of the failed batch is left: the next one trains.
    assert trainer.train(batch_for(config, sound, world))[0].stepped


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_a_router_that_was_patched_after_the_check_moves_nothing(moe: Path, world: World, checkpointing: str):
    config = run_config(moe, model={"activation_checkpointing": checkpointing})
    trainer = Trainer(config, world, total_steps=1)
    assert trainer.routes is not None
    before = parameters_of(trainer.model)
    router = trainer.model.get_submodule(trainer.routes.map.sites[1].module_name)
    router.forward = MethodType(type(router).forward, router)
    with pytest.raises(CheckError, match=r"routing-patched.*layers\.1\."):
        trainer.train(batch_for(config, make_samples(), world))
    assert_same(parameters_of(trainer.model), before)
    assert not trainer._optimizer.state


def faults_on_last_rank(
    world: World, config: RunConfig, samples: list[Sample], kind: str
) -> tuple[str, bool]:
    trainer = Trainer(config, world, total_steps=1)
    assert trainer.routes is not None
    batch = batch_for(config, samples, world)
    if world.rank == 1 and kind == "patched":
        router = trainer.model.get_submodule(trainer.routes.map.sites[1].module_name)
        router.forward = MethodType(type(router).forward, router)
    if world.rank == 1 and kind != "patched":
        change = {"missing": lambda s: replace(s, routing=None), "longer": lambda s: rerouted(s, 99)}[kind]
        batch = replace(batch, samples={index: change(s) for index, s in batch.samples.items()})
    before = parameters_of(trainer.model)
    with pytest.raises(CheckError) as caught:
        trainer.train(batch)
    after = parameters_of(trainer.model)
    return str(caught.value), all(torch.equal(after[name], before[name]) for name in before)


@pytest.mark.parametrize("kind", ["patched", "missing", "longer"])
def test_a_fault_on_one_rank_stops_all_before_the_optimizer(moe: Path, kind: str):
    for message, untouched in run_world(2, faults_on_last_rank, run_config(moe), make_samples(), kind):
        assert message.startswith("[routing-")
        assert untouched


def test_routes_of_zeros_are_refused_on_arrival():
    samples = make_samples()
    routing = samples[3].routing
    assert routing is not None
    zeros = replace(samples[3], routing=replace(routing, experts=np.zeros_like(routing.experts)))
    shape = RouteShape(layers=(0, 1, 2), num_experts=8, top_k=2)
    check_rollouts(grouped(samples), context_length=64, routes=shape)
    with pytest.raises(CheckError, match=r"engine returned all-zero routes for 3/3 layers; sample s3"):
        check_rollouts(grouped([*samples[:3], zeros, *samples[4:]]), context_length=64, routes=shape)
    with pytest.raises(CheckError, match=r"routing-missing.*sample s3"):
        check_rollouts(
            grouped([*samples[:3], replace(samples[3], routing=None), *samples[4:]]),
            context_length=64, routes=shape,
        )  # fmt: skip
    with pytest.raises(UserError, match=r"data-context.*14 tokens, the context holds 13"):
        check_rollouts(grouped(samples), context_length=13, routes=shape)
    check_rollouts(grouped(make_samples(layers=None)), context_length=64, routes=None)


def test_a_failed_check_at_the_start_stops_the_run(moe: Path, world: World, monkeypatch: pytest.MonkeyPatch):
    # Hooks that look at the choice and never change it: replay would silently be off.
    monkeypatch.setattr(RouterHooks, "_install", lambda self, column, site, module: None)
    with pytest.raises(CheckError):
        Trainer(run_config(moe, routing={"start_check": True}), world, total_steps=1)
    monkeypatch.undo()
    Trainer(run_config(moe, routing={"start_check": True}), world, total_steps=1)
