"""Who goes where, and the words for it."""

from __future__ import annotations

import pytest

from onroute.orchestration.ray.cluster import Demand, Spot, physical_order
from onroute.orchestration.ray.workers import contiguous


def spots(*places: tuple[str, str]) -> list[Spot]:
    return [Spot(node=node, gpus=tuple(gpus.split())) for node, gpus in places]


@pytest.mark.parametrize(
    ("places", "order"),
    [
        ([("10.0.0.1", "10"), ("10.0.0.1", "2"), ("10.0.0.1", "1")], [2, 1, 0]),
        ([("10.0.0.10", ""), ("10.0.0.9", ""), ("9.255.0.1", "")], [2, 1, 0]),
        ([("10.0.0.2", "0"), ("10.0.0.1", "1"), ("10.0.0.2", "1"), ("10.0.0.1", "0")], [3, 1, 0, 2]),
        ([("fd00::10", "0"), ("fd00::9", "0"), ("10.0.0.1", "0")], [2, 1, 0]),
        ([("node10", "0"), ("node9", "0"), ("10.0.0.1", "0")], [2, 1, 0]),
        ([("10.0.0.1", ""), ("10.0.0.1", "")], [0, 1]),
    ],
    ids=["GPUs", "addresses", "both", "IPv6", "names", "equal"],
)
def test_ranks_are_ordered_by_node_and_gpu_as_numbers(places, order):
    assert physical_order(spots(*places)) == order


def test_only_ranks_and_engines_take_gpus():
    demand = Demand(ranks=2, engines=1, workers=2)
    assert demand.bundles(gpus=False) == [{"CPU": 1}] * 5
    assert demand.bundles(gpus=True) == [{"CPU": 1, "GPU": 1}] * 3 + [{"CPU": 1}] * 2
    assert demand.words(gpus=True) == (
        "2 trainer rank(s) x 1 CPU and 1 GPU, 1 engine(s) x 1 CPU and 1 GPU, 2 environment worker(s) x 1 CPU"
    )


@pytest.mark.parametrize(
    ("count", "shares", "sizes"), [(8, 2, [4, 4]), (7, 3, [2, 2, 3]), (2, 5, [1, 1]), (1, 1, [1])]
)
def test_prompts_are_shared_out_in_runs_of_neighbours_none_of_them_empty(count, shares, sizes):
    items = list(range(count))
    parts = [items[share] for share in contiguous(count, shares)]
    assert [len(part) for part in parts] == sizes
    assert [item for part in parts for item in part] == items
