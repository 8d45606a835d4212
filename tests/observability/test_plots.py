from __future__ import annotations

import math
import sys

import numpy as np
import pytest

from onroute.core.errors import UserError
from onroute.observability import plots
from onroute.observability.metrics import Metrics
from onroute.observability.plot_compare import ComparedTokens, plot_compare
from onroute.observability.plot_style import smooth, spread
from onroute.observability.plots import plot_run, series
from onroute.observability.trackers.jsonl import MetricRow, read_metrics


def full_metrics(step):
    return {
        "rollout/reward_mean": 0.2 + step / 100,
        "eval/accuracy": 0.5,
        "eval/accuracy_low": 0.4,
        "eval/accuracy_high": 0.6,
        "mismatch/k3": 1e-4,
        "mismatch/log_prob_abs_diff": 5e-3,
        "routing/agreement": 0.997,
        "routing/agreement_worst_layer": 0.99,
        "perf/tokens_per_s": 5000.0,
    } | {f"time/{name}_s": 0.1 for name in ("a", "b", "c", "d", "e", "f", "g", "step")}


def write(folder, rows):
    with Metrics(folder) as metrics:
        for step, row in rows:
            metrics.log(step, row)


def is_drawn(path):
    from matplotlib.image import imread

    pixels = imread(path)
    return pixels.shape[0] > 300 and np.ptp(pixels) > 0.5


def test_a_run_gives_four_pictures(tmp_path):
    write(tmp_path, [(step, full_metrics(step)) for step in range(1, 31)])
    paths = plot_run(tmp_path)
    assert [path.name for path in paths] == ["reward.png", "mismatch.png", "routing.png", "speed.png"]
    assert all(path.parent == tmp_path / "plots" and is_drawn(path) for path in paths)


@pytest.mark.parametrize("name", [*full_metrics(0)])
def test_any_one_series_alone_with_any_one_point_is_no_error(tmp_path, name):
    write(tmp_path, [(0, {name: full_metrics(0)[name]})])
    alone = {"eval/accuracy_low", "eval/accuracy_high", "time/step_s"}
    assert len(plot_run(tmp_path)) == (0 if name in alone else 1)


@pytest.mark.parametrize("value", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_values_that_no_axis_can_show_are_no_error(tmp_path, value):
    rows = [(step, dict.fromkeys(full_metrics(step), value)) for step in range(1, 4)]
    write(tmp_path, [*rows, (4, {"rollout/reward_mean": 0.5})])
    assert plot_run(tmp_path)[0].name == "reward.png"


def test_a_run_without_metrics_gives_no_picture(tmp_path):
    write(tmp_path, [])
    assert plot_run(tmp_path) == []


def test_drawing_leaves_the_global_figures_of_matplotlib_alone(tmp_path):
    import matplotlib.pyplot as plt

    write(tmp_path, [(1, full_metrics(1))])
    plot_run(tmp_path)
    assert plt.get_fignums() == []


def test_a_series_keeps_finite_points_and_the_last_of_a_step():
    rows = [
        MetricRow(step=2, time=0.0, values={"a": 1.0}),
        MetricRow(step=1, time=0.0, values={"a": 5.0}),
        MetricRow(step=3, time=0.0, values={"a": math.nan}),
        MetricRow(step=4, time=0.0, values={"b": 1.0}),
        MetricRow(step=2, time=1.0, values={"a": 7.0}),
    ]
    points = series(rows, "a")
    assert points.steps.tolist() == [1, 2]
    assert points.values.tolist() == [5.0, 7.0]


def test_phases_past_the_fifth_are_added_up_and_the_whole_step_is_not_a_phase(tmp_path):
    row = {f"time/{name}_s": 0.1 * rank for rank, name in enumerate("abcdefg", start=1)}
    write(tmp_path, [(1, row | {"time/step_s": 9.0})])
    seconds = plots._phase_seconds(read_metrics(tmp_path / "metrics.jsonl"))
    assert [*seconds] == ["g", "f", "e", "d", "c", "other"]
    assert seconds["other"].values.tolist() == pytest.approx([0.3])  # a 0.1 + b 0.2


def test_smoothing_averages_a_twelfth_of_the_points_and_keeps_short_runs_as_they_are():
    short = np.array([1.0, 5.0, 2.0])
    assert smooth(short).tolist() == short.tolist()
    spike = np.zeros(24)
    spike[12] = 3.0
    assert smooth(spike)[10:15].tolist() == [0.0, 1.0, 1.0, 1.0, 0.0]  # window of three


def test_labels_that_would_overlap_are_moved_apart_and_stay_inside():
    assert spread(np.array([0.1, 0.5]), 0.1).tolist() == [0.1, 0.5]
    assert spread(np.array([0.5, 0.5, 0.52]), 0.1).tolist() == pytest.approx([0.5, 0.6, 0.7])
    assert spread(np.array([0.95, 0.99, 1.4]), 0.1).tolist() == pytest.approx([0.8, 0.9, 1.0])


@pytest.mark.parametrize(("num_tokens", "num_layers"), [(500, 12), (1, 1), (0, 3)])
@pytest.mark.parametrize("exact", [True, False])
def test_the_comparison_is_drawn_for_any_number_of_tokens_and_for_exact_agreement(
    tmp_path, num_tokens, num_layers, exact
):
    random = np.random.default_rng(0)
    engine = -random.exponential(1.0, num_tokens)
    noise = np.zeros(num_tokens) if exact else random.normal(0, 0.01, num_tokens)
    native = engine + 2 * noise
    if num_tokens > 1:
        native[0] = -np.inf
    compared = ComparedTokens(
        layers=tuple(range(1, num_layers + 1)),
        agreement=np.ones(num_layers) if exact else random.uniform(0.9, 1.0, num_layers),
        engine=engine,
        native=native,
        replay=engine + noise,
    )
    path = plot_compare(compared, tmp_path)
    assert path == tmp_path / "compare.png"
    assert is_drawn(path)


def test_without_matplotlib_the_extra_to_install_is_named(tmp_path, monkeypatch):
    write(tmp_path, [(1, full_metrics(1))])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"observability-missing-package.*onroute\[tracking\]"):
        plot_run(tmp_path)
