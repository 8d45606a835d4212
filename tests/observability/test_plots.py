from __future__ import annotations

import math
import sys

import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.text import Text

from onroute.core.errors import UserError
from onroute.observability import plot_style as style
from onroute.observability import plots
from onroute.observability.metrics import Metrics
from onroute.observability.plot_compare import ComparedTokens, plot_compare, share_above
from onroute.observability.plot_style import smooth, spread
from onroute.observability.plots import plot_run, series
from onroute.observability.trackers.jsonl import MetricRow, read_metrics

PHASES = ("generate", "train", "check", "push", "evaluate", "save", "record", "new", "step")


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
    } | {f"time/{name}_s": 0.1 for name in PHASES}


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
    never_alone = {"eval/accuracy_low", "eval/accuracy_high"}
    never_alone |= {f"time/{phase}_s" for phase in ("step", "evaluate", "save", "record")}
    assert len(plot_run(tmp_path)) == (0 if name in never_alone else 1)


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


@pytest.fixture
def figures(monkeypatch):
    """The figures as they are before they become pixels, by the name of their file."""
    seen = {}

    def keep(figure, path):
        seen[path.name] = figure
        return path

    monkeypatch.setattr(style, "save", keep)
    return seen


def texts(axes):
    return {text.get_text(): text.get_color() for text in axes.texts}


def subtitle(figure):
    return figure.texts[1].get_text()


def test_phases_without_a_colour_are_added_up_and_the_whole_step_is_not_a_phase(tmp_path):
    row = {f"time/{name}_s": 0.1 * rank for rank, name in enumerate(("train", "a", "b", "other"), start=1)}
    write(tmp_path, [(1, row | {"time/step_s": 9.0})])
    seconds = plots._phase_seconds(read_metrics(tmp_path / "metrics.jsonl"))
    assert {*seconds} == {"train", "other"}
    assert seconds["other"].values.tolist() == pytest.approx([0.9])  # a 0.2 + b 0.3 + other 0.4


@pytest.mark.parametrize("longest", ["generate", "train", "push"])
def test_a_phase_has_one_colour_in_every_run(tmp_path, figures, longest):
    row = {"time/generate_s": 0.1, "time/train_s": 0.1, "time/push_s": 0.1, "time/new_s": 0.1}
    write(tmp_path, [(step, row | {f"time/{longest}_s": 5.0}) for step in range(1, 5)])
    plot_run(tmp_path)
    (axes,) = figures["speed.png"].axes
    assert texts(axes) == {
        "generate": style.AMBER,
        "train": style.BLUE,
        "push": style.SKY,
        "other": style.GREY,
    }
    drawn = [to_hex(patch.get_facecolor()).upper() for patch in axes.patches]
    assert drawn == [style.GREY, style.SKY, style.BLUE, style.AMBER]  # the top of the stack lies behind


def test_evaluation_is_a_mark_between_the_steps_and_adds_nothing_to_a_bar(tmp_path, figures):
    rows = [(step, {"time/train_s": 1.0, "perf/tokens_per_s": 9.0}) for step in range(1, 5)]
    rows[2][1].update({"time/evaluate_s": 7.0, "time/record_s": 0.25})  # counted in the metrics of step 3
    write(tmp_path, [*rows, (0, {"eval/accuracy": 0.5})])
    plot_run(tmp_path)
    bars, tokens = figures["speed.png"].axes
    assert bars.patches[0].get_data().values.max() == 1.0
    assert [line.get_xdata().tolist() for line in bars.lines] == [[2.5], [3.0]]
    assert all(1.0 < line.get_ydata()[0] < bars.get_ylim()[1] for line in bars.lines)
    assert {"evaluate 7 s", "record 0.25 s"} <= {*texts(bars)}
    assert bars.get_xlim() == tokens.get_xlim() == (0.5, 4.5)


def test_a_first_step_that_takes_far_longer_is_cut_and_its_seconds_are_named(tmp_path, figures):
    write(tmp_path, [(step, {"time/train_s": 60.0 if step == 1 else 2.0}) for step in range(1, 10)])
    plot_run(tmp_path)
    (axes,) = figures["speed.png"].axes
    assert axes.patches[0].get_data().values.max() == 2.0
    assert axes.lines[0].get_xdata().tolist() == [1.0]
    assert "cut, up to 60 s" in texts(axes)


@pytest.mark.parametrize("num_steps", [1, 2, 4, 30])
def test_only_whole_steps_are_marked(tmp_path, figures, num_steps):
    write(tmp_path, [(step, full_metrics(step)) for step in range(1, num_steps + 1)])
    plot_run(tmp_path)
    ticks = [t for figure in figures.values() for axes in figure.axes for t in axes.get_xticks()]
    assert ticks
    assert all(tick == round(tick) for tick in ticks)


@pytest.mark.parametrize(("num_steps", "note"), [(4, "joined"), (80, "moving average over 7 steps")])
def test_each_plot_with_a_moving_average_says_over_how_many_steps(tmp_path, figures, num_steps, note):
    write(tmp_path, [(step, full_metrics(step)) for step in range(1, num_steps + 1)])
    plot_run(tmp_path)
    assert len(figures) == 4
    assert all(note in subtitle(figure) for figure in figures.values())


def test_full_agreement_lies_below_the_frame_and_both_series_are_seen(tmp_path, figures):
    row = {"routing/agreement": 1.0, "routing/agreement_worst_layer": 1.0}
    write(tmp_path, [(step, row) for step in range(1, 5)])
    plot_run(tmp_path)
    (axes,) = figures["routing.png"].axes
    assert axes.get_ylim()[1] > 100.0
    assert max(axes.get_yticks()) <= 100.0 + 1e-9
    assert [line.get_linestyle() for line in axes.lines[1::2]] == ["-", "--"]  # the dashed one on top


def test_rounding_is_drawn_at_the_floor_with_a_note_and_both_series_are_named(tmp_path, figures):
    rows = [{"mismatch/k3": 1e-15, "mismatch/log_prob_abs_diff": 1e-7}, {"mismatch/k3": 0.0}]
    write(tmp_path, list(enumerate(rows, start=1)))
    plot_run(tmp_path)
    (axes,) = figures["mismatch.png"].axes
    assert axes.lines[2].get_ydata().tolist() == [1e-9, 1e-9]
    assert axes.get_ylim()[0] > 1e-10
    assert "drawn at 1e-9" in subtitle(figures["mismatch.png"])
    assert texts(axes) == {"k3": style.BLUE, "mean |Δ log-prob|": style.ORANGE}


def test_without_rounding_there_is_no_note_of_a_floor(tmp_path, figures):
    write(tmp_path, [(1, {"mismatch/k3": 1e-4})])
    plot_run(tmp_path)
    assert "1e-9" not in subtitle(figures["mismatch.png"])


def test_at_reward_zero_training_shows_under_the_dotted_held_out_line(tmp_path, figures):
    write(tmp_path, [(step, {"rollout/reward_mean": 0.0, "eval/accuracy": 0.0}) for step in range(1, 5)])
    plot_run(tmp_path)
    (axes,) = figures["reward.png"].axes
    training, held_out = axes.lines[1], axes.containers[0].lines[0]
    assert (training.get_linestyle(), held_out.get_linestyle()) == ("-", ":")
    assert held_out.get_zorder() > training.get_zorder()
    assert axes.get_ylim()[0] < 0.0


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


def compared(num_tokens, num_layers, native_delta):
    engine = -np.linspace(0.1, 5.0, num_tokens)
    return ComparedTokens(
        layers=tuple(range(num_layers)),
        agreement=np.linspace(0.99, 0.95, num_layers),
        engine=engine,
        native=engine + native_delta,
        replay=engine.copy(),
    )


def test_the_share_above_a_value_counts_the_greater_ones_only():
    x, share = share_above(np.array([0.2, 0.1, 0.2, 0.4]))
    assert x.tolist() == [0.1, 0.2, 0.4]
    assert share.tolist() == [0.75, 0.25, 0.0]


@pytest.mark.parametrize(("num_layers", "labelled"), [(3, ["99.00", "97.00", "95.00"]), (9, ["95.00"])])
def test_layers_are_unjoined_points_each_named_if_few_and_else_the_worst(
    tmp_path, figures, num_layers, labelled
):
    plot_compare(compared(10, num_layers, 0.01), tmp_path)
    axes = figures["compare.png"].axes[0]
    assert [*texts(axes)] == labelled
    assert [line.get_linestyle() for line in axes.lines] == ["None"]


def test_differences_are_steps_and_exact_agreement_is_said_in_words(tmp_path, figures):
    plot_compare(compared(10, 3, 0.01), tmp_path)
    axes = figures["compare.png"].axes[1]
    assert [line.get_drawstyle() for line in axes.lines] == ["steps-post", "steps-post"]
    assert [*texts(axes)] == ["native: mean 1.0e-02", "replay: exactly 0"]


def test_native_and_replay_have_panels_of_their_own_with_the_same_range(tmp_path, figures):
    plot_compare(compared(10, 3, 0.01), tmp_path)
    native, replay = figures["compare.png"].axes[2:]
    assert native.get_ylim() == replay.get_ylim()
    assert native.lines[1].get_ydata() == pytest.approx(np.full(10, 0.01))
    assert replay.lines[1].get_ydata().tolist() == [0.0] * 10


def test_among_many_tokens_the_one_that_is_far_off_is_drawn(tmp_path, figures):
    delta = np.zeros(50_000)
    delta[12_345] = 3.0
    plot_compare(compared(50_000, 3, delta), tmp_path)
    drawn = figures["compare.png"].axes[2].lines[1].get_ydata()
    assert len(drawn) < 10_000
    assert drawn.max() == pytest.approx(3.0)


def test_text_in_the_comparison_is_readable_at_a_width_of_1000_pixels(tmp_path, figures):
    plot_compare(compared(10, 3, 0.01), tmp_path)
    figure = figures["compare.png"]
    shrink = 1000 / (figure.get_figwidth() * figure.dpi)
    sizes = [text.get_size() for text in figure.findobj(Text) if text.get_text()]
    assert min(sizes) * figure.dpi / 72 * shrink > 12  # pixels


def test_without_matplotlib_the_extra_to_install_is_named(tmp_path, monkeypatch):
    write(tmp_path, [(1, full_metrics(1))])
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(UserError, match=r"observability-missing-package.*onroute\[tracking\]"):
        plot_run(tmp_path)
