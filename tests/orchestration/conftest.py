"""A small model and run file for whole runs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from onroute.cli.catalogs import CATALOGS
from onroute.core.config.load import load_config
from onroute.core.config.sections import RunConfig
from onroute.models.demo import build_demo_model
from onroute.observability.progress import Progress
from onroute.orchestration.run import execute

QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart.toml"
SMALL = (
    "--run.steps=4",
    "--run.supervised_steps=3",
    "--run.supervised_samples=16",
    "--run.supervised_lr=1e-5",
    "--run.eval_every=0",
    "--run.eval_prompts=8",
    "--run.eval_samples=2",
    "--data.prompts_per_step=4",
    "--data.samples_per_prompt=4",
    "--optimizer.warmup_steps=2",
    "--checkpoint.every=2",
    "--checkpoint.recorded_steps=2",
    "--tracking.trackers=[]",
    "--tracking.plots=false",
)


@pytest.fixture(scope="session")
def demo_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo's model after a warm-up, so that some samples are right and there is something to learn."""
    places = tmp_path_factory.mktemp("models")
    build_demo_model(places / "raw", seed=0)
    warm_up = (
        "--run.supervised_steps=60",
        "--run.supervised_samples=96",
        "--run.supervised_lr=1e-3",
        "--run.steps=1",
        "--run.eval_prompts=0",
    )
    folders = (f"--model.path={places / 'raw'}", f"--run.folder={places / 'run'}")
    config = load_config(
        QUICKSTART, merged(*SMALL, "--optimizer.warmup_steps=0", *warm_up, *folders), CATALOGS
    )
    execute(config, progress=Progress.silent())
    return places / "run" / "rollouts" / "step-000001" / "weights"


@pytest.fixture
def small_run(demo_model: Path, tmp_path: Path) -> Callable[..., RunConfig]:
    """A config of four tiny steps in a fresh folder; later overrides win."""

    def build(*overrides: str, folder: str = "run") -> RunConfig:
        places = (f"--model.path={demo_model}", f"--run.folder={tmp_path / folder}")
        return load_config(QUICKSTART, merged(*places, *SMALL, *overrides), CATALOGS)

    return build


def merged(*overrides: str) -> list[str]:
    """One override per key, the last one given."""
    return list({text.partition("=")[0]: text for text in overrides}.values())
