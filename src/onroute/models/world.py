"""The processes that train together, one or many, and the few agreements between them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import HashStore, Store  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from onroute.core.errors import CheckError, MachineError, OnrouteError, UserError

Result = TypeVar("Result")
_KINDS = {kind.__name__: kind for kind in (CheckError, MachineError, OnrouteError, UserError)}


@dataclass(frozen=True, slots=True, kw_only=True)
class World:
    """All trainer ranks. `mesh` has one axis, `shard`, over which parameters and data are cut."""

    rank: int
    size: int
    device: torch.device
    mesh: DeviceMesh

    def sum(self, tensor: Tensor) -> Tensor:
        """`tensor` summed over the ranks, in place. A collective."""
        if self.size > 1:
            dist.all_reduce(tensor, group=self.mesh.get_group())
        return tensor

    def max(self, tensor: Tensor) -> Tensor:
        """The largest over the ranks, element by element, in place. A collective."""
        if self.size > 1:
            dist.all_reduce(tensor, op=dist.ReduceOp.MAX, group=self.mesh.get_group())
        return tensor

    def gather(self, value: Result) -> list[Result]:
        """`value` of every rank, by rank, for small plain values. A collective."""
        if self.size == 1:
            return [value]
        told: list[Result | None] = [None] * self.size
        dist.all_gather_object(told, value, group=self.mesh.get_group())
        return cast(list[Result], told)

    def together(self, where: str, action: Callable[[], Result]) -> Result:
        """Run `action` on every rank; when it fails on any, raise the first rank's error on all.

        What can fail on one rank alone (a file, a bad sample) goes through here before the next
        collective, so that no rank waits for one that is gone.
        """
        failure: BaseException | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        if self.size == 1:
            if failure is not None:
                raise failure
            return result
        told: list[tuple[str, ...] | None] = [None] * self.size
        dist.all_gather_object(told, _tell(failure, where), group=self.mesh.get_group())
        first = next(((rank, words) for rank, words in enumerate(told) if words is not None), None)
        if first is not None:
            rank, (kind, code, what, place, fix) = first
            raise _KINDS[kind](code, what, f"{place} (rank {rank})", fix) from failure
        return result


def _tell(failure: BaseException | None, where: str) -> tuple[str, ...] | None:
    if failure is None:
        return None
    if isinstance(failure, OnrouteError):
        kind = next(k.__name__ for k in type(failure).__mro__ if k.__name__ in _KINDS)
        return (kind, failure.code, failure.what, failure.where, failure.fix)
    words = f"{type(failure).__name__}: {failure}".splitlines()[0]
    return ("MachineError", "rank-failed", words, where, "see that rank's log")


@dataclass(frozen=True, slots=True, kw_only=True)
class Place:
    """The place of a process among the ranks.

    gpu: which of the GPUs that this process sees is its own, where there are any.
    store: where the ranks meet; None lets torch find the one that torchrun names.
    """

    rank: int
    size: int
    gpu: int
    store: Store | None

    @classmethod
    def from_launcher(cls) -> Place:
        """The place that torchrun gave this process, or that of a process alone."""
        size = int(os.environ.get("WORLD_SIZE", "1"))
        return cls(
            rank=int(os.environ.get("RANK", "0")),
            size=size,
            gpu=int(os.environ.get("LOCAL_RANK", "0")),
            store=HashStore() if size == 1 else None,
        )


@contextmanager
def open_world(*, timeout_s: float, threads: int = 1, place: Place | None = None) -> Iterator[World]:
    """A world with this process at `place`, by default where torchrun put it; closed again at the end.

    On a machine with GPUs each rank takes its own, else the CPU with `threads`.
    """
    torch.set_num_threads(threads)
    place = place or Place.from_launcher()
    device = torch.device("cpu")
    backend = "gloo"
    if torch.cuda.is_available():
        device = torch.device("cuda", place.gpu)
        torch.cuda.set_device(device)
        backend = "cpu:gloo,cuda:nccl"
    dist.init_process_group(
        backend,
        rank=place.rank,
        world_size=place.size,
        store=place.store,
        timeout=timedelta(seconds=timeout_s),
    )
    try:
        mesh = init_device_mesh(device.type, (place.size,), mesh_dim_names=("shard",))
        yield World(rank=place.rank, size=place.size, device=device, mesh=mesh)
    finally:
        dist.destroy_process_group()
