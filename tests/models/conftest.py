"""Folders of tiny models, saved once for all tests of this room; a test that damages one copies it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onroute.models.tiny import tiny_config, tiny_model

SavedModel = Callable[..., Path]


@pytest.fixture(scope="session")
def saved(tmp_path_factory: pytest.TempPathFactory) -> SavedModel:
    """saved(model_type, **settings): the folder of that tiny model; not to be written to."""
    folders: dict[str, Path] = {}

    def save(model_type: str, **settings: Any) -> Path:
        key = f"{model_type} {sorted(settings.items())}"
        if key not in folders:
            folders[key] = tmp_path_factory.mktemp(model_type)
            tiny_model(model_type, config=tiny_config(model_type, **settings)).save_pretrained(folders[key])
        return folders[key]

    return save


@pytest.fixture
def copied(saved: SavedModel, tmp_path: Path) -> SavedModel:
    """copied(model_type, **settings): a copy of that folder, the test's own."""

    def copy(model_type: str, **settings: Any) -> Path:
        return shutil.copytree(saved(model_type, **settings), tmp_path / "model")

    return copy
