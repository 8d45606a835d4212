"""A Ray cluster for one run: started here or attached to, with room for all actors, and left again."""

from __future__ import annotations

import ipaddress
import logging
import re
import signal
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar, cast
from uuid import uuid4

import ray
from ray.actor import ActorHandle
from ray.util import placement_group, remove_placement_group
from ray.util.placement_group import PlacementGroup
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from onroute.core.config.sections import RunConfig
from onroute.core.errors import MachineError

Actor = TypeVar("Actor")

OBJECT_STORE_BYTES = 1 << 30
"""Room for rollouts in a cluster of our own; taken as it fills, and Ray spills to disk beyond."""

WATCH = "watch"
"""The concurrency group of an actor's `stay`, which is answered by nothing but the actor's death."""

KNOCK_S = 10.0
"""How long a cluster's address may take to answer at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """The actors of a run, one CPU each; on a cluster with GPUs one for each rank and engine too."""

    ranks: int
    engines: int
    workers: int

    @property
    def num_actors(self) -> int:
        return self.ranks + self.engines + self.workers

    def bundles(self, *, gpus: bool) -> list[dict[str, float]]:
        """What each actor takes: ranks, then engines, then workers."""
        computing: dict[str, float] = {"CPU": 1, "GPU": 1} if gpus else {"CPU": 1}
        return [dict(computing) for _ in range(self.ranks + self.engines)] + [
            {"CPU": 1.0} for _ in range(self.workers)
        ]

    def words(self, *, gpus: bool) -> str:
        each = "1 CPU and 1 GPU" if gpus else "1 CPU"
        return (
            f"{self.ranks} trainer rank(s) x {each}, {self.engines} engine(s) x {each}, "
            f"{self.workers} environment worker(s) x 1 CPU"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Cluster:
    """Room for the actors of a demand; `words` say what it is."""

    group: PlacementGroup
    bundles: Sequence[dict[str, float]]
    words: str

    def create(self, kind: type[Actor], bundle: int, *arguments: object) -> ActorHandle[Actor]:
        """An actor of class `kind` in its bundle. It is never restarted by Ray: its state would be gone."""
        resources = self.bundles[bundle]
        options: dict[str, Any] = {
            "num_cpus": resources["CPU"],
            "num_gpus": resources.get("GPU", 0),
            "max_restarts": 0,
            "scheduling_strategy": PlacementGroupSchedulingStrategy(
                placement_group=self.group, placement_group_bundle_index=bundle
            ),
        }
        actor = ray.remote(concurrency_groups={WATCH: 1})(kind)  # type: ignore[call-overload]
        handle = actor.options(**options).remote(*arguments)
        return cast("ActorHandle[Actor]", handle)


@contextmanager
def open_cluster(config: RunConfig) -> Iterator[Cluster]:
    """Attach to `run.ray_address` or start a cluster on this machine; all actors are gone afterwards.

    Raises MachineError when Ray can't be reached, or has no room in `parallel.placement_timeout_s`.
    """
    demand = Demand(
        ranks=config.parallel.ranks, engines=config.parallel.engines, workers=config.environment.workers
    )
    try:
        with _kept_signals():
            _connect(config, demand)
        with _placed(demand, config.parallel.placement_timeout_s) as cluster:
            yield cluster
    finally:
        with _kept_signals():
            ray.shutdown()


def _connect(config: RunConfig, demand: Demand) -> None:
    address = config.run.ray_address
    own: dict[str, Any] = {
        "num_cpus": demand.num_actors,
        "include_dashboard": False,
        "object_store_memory": OBJECT_STORE_BYTES,
    }
    try:
        _knock(address)
        ray.init(
            address=address or "local",
            namespace=f"onroute-{uuid4().hex[:12]}",
            log_to_driver=False,
            logging_level=logging.ERROR,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": str(config.run.threads)}},
            **({} if address else own),
        )
    except (OSError, RuntimeError, ValueError) as error:
        raise MachineError(
            "ray-connect",
            f"Ray can't be {'reached' if address else 'started'}: {next(iter(str(error).splitlines()), '')}",
            f"run.ray_address = {address!r}",
            "see that the cluster runs, or leave run.ray_address out to start one on this machine",
        ) from error


def _knock(address: str) -> None:
    """Raises OSError when nobody answers at `HOST:PORT`: Ray itself would try for many minutes."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), timeout=KNOCK_S).close()


@contextmanager
def _placed(demand: Demand, timeout_s: float) -> Iterator[Cluster]:
    gpus = _total().get("GPU", 0) > 0
    bundles = demand.bundles(gpus=gpus)
    group = placement_group(bundles, strategy="PACK")
    try:
        if not group.wait(timeout_seconds=timeout_s):
            raise shortage(demand, timeout_s, gpus=gpus)
        words = f"Ray on {_num_nodes()} node(s): {demand.words(gpus=gpus)}"
        yield Cluster(group=group, bundles=bundles, words=words)
    finally:
        remove_placement_group(group)


def shortage(demand: Demand, timeout_s: float, *, gpus: bool) -> MachineError:
    """What was asked, what the cluster has, and what of it is free."""
    total = _total()
    free: Mapping[str, float] = ray.available_resources()  # type: ignore[no-untyped-call]
    kinds = ("CPU", "GPU") if gpus else ("CPU",)
    has = " and ".join(f"{total.get(kind, 0):g} {kind} ({free.get(kind, 0):g} free)" for kind in kinds)
    return MachineError(
        "ray-shortage",
        f"no room in the cluster within {timeout_s:g} s: asked: {demand.words(gpus=gpus)}; "
        f"the cluster has {has} on {_num_nodes()} node(s)",
        "parallel.ranks, parallel.engines, environment.workers",
        "lower them, add nodes, or raise parallel.placement_timeout_s if others will leave soon",
    )


def _total() -> Mapping[str, float]:
    total: Mapping[str, float] = ray.cluster_resources()  # type: ignore[no-untyped-call]
    return total


def _num_nodes() -> int:
    return len([node for node in ray.nodes() if node["Alive"]])  # type: ignore[no-untyped-call]


@contextmanager
def _kept_signals() -> Iterator[None]:
    """Ray takes SIGTERM for itself; a run must end by it as by Ctrl-C."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in handlers.items():
            if handler is not None:  # None: not set from Python, so it can't be set back either
                signal.signal(number, handler)


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """Where an actor runs: the address of its node, and the ids of its GPUs there."""

    node: str
    gpus: tuple[str, ...]


def physical_order(spots: Sequence[Spot]) -> list[int]:
    """Indices of `spots` so that neighbours are near each other: by node, then by GPU, as numbers.

    Nodes 10.0.0.9 and 10.0.0.10 come in this order, and so do GPUs "2" and "10".
    """
    return sorted(
        range(len(spots)), key=lambda i: (_address(spots[i].node), _natural(" ".join(spots[i].gpus)))
    )


def _address(node: str) -> tuple[int, int, tuple[tuple[int, int, str], ...]]:
    try:
        address = ipaddress.ip_address(node)
    except ValueError:  # a host name
        return (99, 0, _natural(node))
    return (address.version, int(address), ())


def _natural(text: str) -> tuple[tuple[int, int, str], ...]:
    """A key that sorts "gpu2" before "gpu10"."""
    parts = re.findall(r"\d+|\D+", text)
    return tuple((0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts)


def own_spot() -> Spot:
    """Where the actor that calls this runs."""
    node: str = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
    return Spot(node=node, gpus=tuple(str(number) for number in ray.get_gpu_ids()))
