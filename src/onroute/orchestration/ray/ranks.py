"""The actor of one trainer rank."""

from __future__ import annotations

import socket
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import ray
import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

from onroute.core.batches import BatchPlan, StepReport, TrainBatch
from onroute.core.config.sections import RunConfig
from onroute.core.samples import Group, Json, Sample, SampleFacts
from onroute.core.weights import Transport, WeightOffer, WeightReceipt, WeightVersion
from onroute.data.batch import train_batch
from onroute.data.recorded import save_rollouts, step_folder
from onroute.models.world import Place, open_world
from onroute.orchestration.folder import SAMPLED_BY
from onroute.orchestration.ray.cluster import WATCH, Spot, own_spot
from onroute.training.export import export_model
from onroute.training.trainer import Trainer
from onroute.weights import broadcast, shared_memory
from onroute.weights.sender import Sender


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreAddress:
    """Where the ranks meet."""

    host: str
    port: int


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """A batch without the arrays of its samples, for all ranks. groups: the group number of each sample."""

    plan: BatchPlan
    facts: Sequence[SampleFacts]
    groups: Sequence[int]


class TrainerRank:
    """One rank of the trainer. After `start`, every method but `publish` is a collective of all ranks."""

    def __init__(self, config: RunConfig) -> None:
        self._config = config
        self._open = ExitStack()
        self._store: Store | None = None
        self._sender: Sender | None = None
        self._rank = 0

    def spot(self) -> Spot:
        return own_spot()

    @ray.method(concurrency_group=WATCH)
    def stay(self) -> None:
        """Never returns: whoever awaits it hears of this actor's death."""
        threading.Event().wait()

    def open_store(self) -> StoreAddress:
        """Let the ranks meet here, on a port that nobody else has."""
        host = own_spot().node
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family)
        port = listener.getsockname()[1]
        # Given a socket, the store listens on this interface alone instead of on all.
        self._store = TCPStore(
            host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )
        return StoreAddress(host=host, port=port)

    def start(self, rank: int, size: int, address: StoreAddress, transport: Transport) -> None:
        """Join the other ranks and build the trainer."""
        config, timeout_s = self._config, self._config.parallel.timeout_s
        timeout = timedelta(seconds=timeout_s)
        if self._store is None:
            self._store = TCPStore(address.host, address.port, is_master=False, timeout=timeout)
        self._rank = rank
        place = Place(rank=rank, size=size, gpu=0, store=self._store)  # Ray shows an actor its own GPU only
        world = self._open.enter_context(
            open_world(timeout_s=timeout_s, threads=config.run.threads, place=place)
        )
        self._trainer = Trainer(config, world, total_steps=config.run.steps * config.data.optimizer_steps)
        if rank == 0:
            self._sender = self._open_sender(transport, address.host, world.device)

    def train(self, batch: PlannedBatch, starts: Sequence[int], *groups: Group) -> list[StepReport]:
        """groups: those this rank needs; starts: the global index of the first sample of each."""
        samples: dict[int, Sample] = {
            start + number: sample
            for start, group in zip(starts, groups, strict=True)
            for number, sample in enumerate(group.samples)
        }
        return self._trainer.train(
            train_batch(batch.plan, self._rank, samples=samples, facts=batch.facts, groups=batch.groups)
        )

    def supervise(self, batch: TrainBatch) -> StepReport:
        return self._trainer.supervise(batch)

    def publish(self, version: WeightVersion) -> WeightOffer:
        """Rank 0 alone: announce the current weights."""
        assert self._sender is not None  # opened on rank 0
        return self._sender.publish(version, self._trainer.published.specs)

    def send(self, offer: WeightOffer) -> WeightReceipt | None:
        """Gather the weights; rank 0 sends them on and tells what it sent."""
        if self._sender is not None:
            return self._sender.send(offer, self._trainer.weights())
        for _ in self._trainer.weights():
            pass
        return None

    def record(self, folder: Path, step: int, *groups: Group) -> None:
        """groups: all of the step for rank 0, none for the others."""
        target = step_folder(folder, step) / SAMPLED_BY
        export_model(self._trainer, Path(self._config.model.path), target)
        if self._rank == 0:
            save_rollouts(folder, step, groups)

    def save(self, folder: Path, facts: Mapping[str, Json]) -> None:
        self._trainer.save(folder, dict(facts))

    def load(self, folder: Path) -> dict[str, Json]:
        return self._trainer.load(folder)

    def _open_sender(self, transport: Transport, host: str, device: torch.device) -> Sender:
        receivers, max_bytes = self._config.parallel.engines, self._config.engine.push_bucket_mib << 20
        deadline_s = self._config.parallel.timeout_s
        if transport == "shared_memory":
            return shared_memory.open_sender(receivers=receivers, max_bytes=max_bytes, deadline_s=deadline_s)
        return broadcast.open_sender(
            receivers=receivers, max_bytes=max_bytes, host=host, device=device, deadline_s=deadline_s
        )
