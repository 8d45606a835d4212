"""`torchrun -m onroute.training run.toml --rollouts FOLDER`: train on recorded rollouts.

Takes `--section.key=value` like `onroute train`. Rank 0 prints one JSON object per optimizer step; the
last line says what was done. The checkpoint goes to `checkpoints/` in the run folder.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path

from onroute.algorithms.catalog import ADVANTAGES, LOSSES
from onroute.core.batches import StepReport
from onroute.core.config.catalog import Catalogs
from onroute.core.config.load import load_config
from onroute.core.errors import INTERRUPTED, OnrouteError, UserError
from onroute.environments.catalog import ENVIRONMENTS
from onroute.models.world import World, open_world
from onroute.observability.catalog import TRACKERS
from onroute.training.recorded import load_batches, train_on

CATALOGS = Catalogs(
    engines=None, environments=ENVIRONMENTS, advantages=ADVANTAGES, losses=LOSSES, trackers=TRACKERS
)


def main(arguments: Sequence[str]) -> int:
    """Train and return the exit code; every rank ends with the first failing rank's line."""
    parser = argparse.ArgumentParser(prog="python -m onroute.training", description=__doc__)
    parser.add_argument(
        "run_file", type=Path, metavar="RUN.TOML", help="the TOML file of the run, as for `onroute train`"
    )
    parser.add_argument(
        "--rollouts",
        type=Path,
        required=True,
        metavar="FOLDER",
        help="recorded rollouts of a run: RUN/rollouts",
    )
    known, overrides = parser.parse_known_args(arguments)
    try:
        config = load_config(known.run_file, overrides, CATALOGS)
        checkpoints = Path(config.run.folder) / "checkpoints"
        if checkpoints.exists():
            raise UserError(
                "run-folder",
                "the run folder holds checkpoints already",
                str(checkpoints),
                "choose another run.folder",
            )
        batches = load_batches(known.rollouts)
        with open_world(timeout_s=config.parallel.timeout_s, threads=config.run.threads) as world:
            steps = _Reporter(world)
            trainer = train_on(config, batches, world, report=steps.report)
            folder = checkpoints / f"step-{len(batches):06d}"
            trainer.save(folder, {})
            steps.close(ranks=world.size, checkpoint=folder)
    except OnrouteError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr, flush=True)
        return INTERRUPTED
    except Exception:
        traceback.print_exc()
        return 1
    return 0


class _Reporter:
    """Prints on rank 0 alone."""

    def __init__(self, world: World) -> None:
        self._is_first = world.rank == 0
        self._count = 0

    def report(self, step: StepReport) -> None:
        self._count += 1
        # Numbers that are not finite as in metrics.jsonl: "NaN", "Infinity"; JSON has none.
        metrics = {
            name: value if math.isfinite(value) else json.dumps(value) for name, value in step.metrics.items()
        }
        self._print({"step": self._count, "stepped": step.stepped, **metrics})

    def close(self, *, ranks: int, checkpoint: Path) -> None:
        self._print({"optimizer_steps": self._count, "ranks": ranks, "checkpoint": str(checkpoint)})

    def _print(self, record: dict[str, object]) -> None:
        if self._is_first:
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
