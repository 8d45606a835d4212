"""Settings of every test: one thread, so that results and times do not depend on the machine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import torch

from tests.disk import CannotMount, Disk, mounted

torch.set_num_threads(1)

hypothesis.settings.register_profile("onroute", deadline=None, derandomize=True, max_examples=50)
hypothesis.settings.load_profile("onroute")


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    try:
        with mounted(tmp_path / "disk") as one:
            yield one
    except CannotMount as error:
        pytest.skip(f"a file system can't be mounted here: {error}")
