"""Tiny models in folders, and the world of one rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from onroute.models.tiny import tiny_config, tiny_model
from onroute.models.world import World, open_world

FolderOf = Callable[..., Path]


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with open_world(timeout_s=60.0) as one_rank:
        yield one_rank


@pytest.fixture(scope="session")
def folder_of(tmp_path_factory: pytest.TempPathFactory) -> FolderOf:
    """The folder of a tiny model of a family, built once."""
    built: dict[str, Path] = {}

    def get(model_type: str, **changes: object) -> Path:
        key = f"{model_type}{sorted(changes.items())}"
        if key not in built:
            built[key] = tmp_path_factory.mktemp(model_type)
            tiny_model(model_type, config=tiny_config(model_type, **changes)).save_pretrained(built[key])
        return built[key]

    return get


@pytest.fixture(scope="session")
def moe(folder_of: FolderOf) -> Path:
    """qwen3_moe: 3 MoE layers, 8 experts, top 2."""
    return folder_of("qwen3_moe")
