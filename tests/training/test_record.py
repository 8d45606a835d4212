"""Routes that the trainer records in its old-policy pass are those it trains on."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook

from onroute.core.config.sections import RunConfig
from onroute.models.world import World
from onroute.training.trainer import Trainer
from tests.ranks import run_world
from tests.training.builders import assert_same, batch_for, make_samples, parameters_of, run_config


def recording(path: Path, **changes: Mapping[str, object]) -> RunConfig:
    return run_config(path, routing={"start_check": False, "replay": "record"}, **changes)


def routes_by_pass(trainer: Trainer, config: RunConfig, world: World) -> list[list[Tensor]]:
    """[passes][layers] the ids [rows, top_k] handed to the experts; one microbatch a pass."""
    assert trainer.routes is not None
    seen: list[Tensor] = []
    routers = {trainer.model.get_submodule(site.module_name) for site in trainer.routes.map.sites}

    def look(module: nn.Module, args: object, output: tuple[Tensor, ...]) -> None:
        if module in routers:
            seen.append(output[2].detach().clone())

    handle = register_module_forward_hook(look)
    trainer.train(batch_for(config, make_samples([(3, 4), (3, 4), (3, 4), (3, 4)], layers=None), world))
    handle.remove()
    layers = len(trainer.routes.map.sites)
    return [seen[begin : begin + layers] for begin in range(0, len(seen), layers)]


def test_the_first_step_agrees_with_its_record_in_every_row_and_needs_no_routes_of_the_engine(
    moe: Path, world: World
):
    config = recording(moe, data={"microbatch_tokens": 16})
    (report,) = Trainer(config, world, total_steps=1).train(
        batch_for(config, make_samples(layers=None), world)
    )
    assert report.stepped
    assert report.metrics["routing/replayed_share"] == 1.0
    assert report.metrics["routing/agreement"] == 1.0
    assert report.metrics["routing/live_rows"] == 0.0


def test_a_second_step_takes_the_recorded_routes_though_its_router_would_choose_others(
    moe: Path, world: World
):
    config = recording(
        moe, data={"microbatch_tokens": 16, "optimizer_steps": 2}, optimizer={"lr": 0.3, "clip_norm": 1e9}
    )
    trainer = Trainer(config, world, total_steps=2)
    first, second, *trained = routes_by_pass(trainer, config, world)
    assert len(trained) == 2
    for recorded, replayed in zip((first, second), trained, strict=True):
        for layer, ids in zip(recorded, replayed, strict=True):
            assert torch.equal(layer, ids)
    (one, two) = Trainer(config, world, total_steps=2).train(
        batch_for(config, make_samples([(3, 4)] * 4, layers=None), world)
    )
    assert one.metrics["routing/agreement"] == 1.0
    assert two.metrics["routing/agreement"] < 1.0
    assert two.metrics["routing/replayed_share"] == 1.0


def test_with_one_step_it_learns_what_the_live_router_learns(moe: Path, world: World):
    seen = []
    for replay in ("record", "off"):
        config = run_config(moe, routing={"start_check": False, "replay": replay})
        trainer = Trainer(config, world, total_steps=1)
        trainer.train(batch_for(config, make_samples(layers=None), world))
        seen.append(parameters_of(trainer.model))
    assert_same(*seen)


def losses(world: World, path: Path) -> list[float]:
    config = recording(path, data={"microbatch_tokens": 16, "optimizer_steps": 2}, optimizer={"lr": 0.01})
    trainer = Trainer(config, world, total_steps=2)
    reports = trainer.train(batch_for(config, make_samples(layers=None), world))
    assert all(report.metrics["routing/replayed_share"] == 1.0 for report in reports)
    return [report.metrics["train/loss"] for report in reports]


def test_two_ranks_record_and_learn_what_one_does(moe: Path, world: World):
    one = losses(world, moe)
    for two in run_world(2, losses, moe):
        assert two == pytest.approx(one, abs=1e-6)


def test_nothing_of_a_batch_is_left_for_the_next(moe: Path, world: World):
    config = recording(moe)
    trainer = Trainer(config, world, total_steps=2)
    trainer.train(batch_for(config, make_samples(layers=None), world))
    assert trainer.routes is not None
    assert trainer.routes.session._traces == {}
    (report,) = trainer.train(batch_for(config, make_samples(layers=None, seed=1), world))
    assert report.metrics["routing/agreement"] == 1.0
