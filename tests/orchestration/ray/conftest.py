"""One Ray cluster for all runs of the suite, and the processes that runs leave or lose there."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from ray.cluster_utils import Cluster

from onroute.core.config.sections import RunConfig
from onroute.orchestration.folder import numbered

ACTORS = ("TrainerRank", "EngineActor", "EnvironmentWorker")


class Machine:
    """A cluster of one node with room for 2 ranks, 1 engine and 2 workers."""

    def __init__(self, cluster: Cluster) -> None:
        self.address: str = cluster.address
        self._raylet = next(info.process.pid for info in cluster.head_node.all_processes["raylet"])

    def actors(self, kind: str = "") -> list[int]:
        """Processes of this cluster that run an actor of a run."""
        return [
            pid for pid, name in self._children() if any(f"ray::{a}" in name for a in ACTORS) and kind in name
        ]

    def _children(self) -> list[tuple[int, str]]:
        found = []
        for folder in Path("/proc").iterdir():
            if not folder.name.isdecimal():
                continue
            try:
                parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
                name = (folder / "cmdline").read_bytes().decode(errors="replace")
            except (OSError, ValueError):
                continue
            if parent == self._raylet:
                found.append((int(folder.name), name))
        return found

    def kill_one(self, kind: str, config: RunConfig, *, after_save: int) -> threading.Thread:
        """Kill the first actor of `kind` when the checkpoint of that step is there."""
        checkpoints = Path(config.run.folder) / "checkpoints"

        def wait_and_kill() -> None:
            deadline = time.monotonic() + 120
            while after_save not in numbered(checkpoints) and time.monotonic() < deadline:
                time.sleep(0.02)
            os.kill(min(self.actors(kind)), signal.SIGKILL)

        thread = threading.Thread(target=wait_and_kill, daemon=True)
        thread.start()
        return thread

    def is_empty(self) -> bool:
        """Whether all actors are gone, now or within the seconds that a kill takes."""
        deadline = time.monotonic() + 10
        while self.actors() and time.monotonic() < deadline:
            time.sleep(0.05)
        return not self.actors()


def on_ray(machine: Machine) -> tuple[str, str]:
    return "--run.on=ray", f"--run.ray_address={machine.address}"


@pytest.fixture(scope="session")
def machine() -> Iterator[Machine]:
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 5, "include_dashboard": False, "object_store_memory": 256 << 20},
    )
    yield Machine(cluster)
    cluster.shutdown()


@pytest.fixture
def ray_run(machine: Machine, small_run: Callable[..., RunConfig]) -> Callable[..., RunConfig]:
    """`small_run` on two ranks and two workers of the suite's cluster."""

    def build(*overrides: str, folder: str = "run") -> RunConfig:
        return small_run(*on_ray(machine), *overrides, folder=folder)

    return build
