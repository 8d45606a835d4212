"""The curves of a run as PNG files, drawn from its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from onroute.observability import plot_style as style
from onroute.observability.metrics import METRICS_FILE
from onroute.observability.trackers.jsonl import MetricRow, read_metrics

if TYPE_CHECKING:
    from matplotlib.axes import Axes

PLOTS_FOLDER = "plots"
_MISMATCH_FLOOR = 1e-9
"""Differences below this are rounding; they are drawn here, so that a log axis keeps to what matters."""
_CUT_FROM = 5.0
"""Steps that took more than this many medians, a first one that compiles, are cut off and marked."""
_OTHER = "other"
_PHASES = {
    "generate": style.AMBER,
    "train": style.BLUE,
    "check": style.ORANGE,
    "push": style.SKY,
    _OTHER: style.GREY,
}
"""What every step does, from the bottom of the stack up. "other" adds up what has no name here."""
_OCCASIONAL = {"evaluate": style.GREEN, "save": style.PURPLE, "record": style.INK}
"""What some steps do."""
_BETWEEN_STEPS = frozenset({"evaluate", "save"})
"""Done after a step; the seconds are in the metrics of the next one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """One metric over the run, N points: steps int64 [N] ascending, values float64 [N], all finite."""

    steps: NDArray[np.int64]
    values: NDArray[np.float64]

    def __len__(self) -> int:
        return len(self.steps)


def series(rows: Sequence[MetricRow], name: str) -> Series:
    """The finite points of a metric; the last one counts where a step was logged twice."""
    points = {row.step: row.values[name] for row in rows if name in row.values}
    kept = sorted((step, value) for step, value in points.items() if np.isfinite(value))
    return Series(
        steps=np.array([step for step, _ in kept], dtype=np.int64),
        values=np.array([value for _, value in kept], dtype=np.float64),
    )


def plot_run(folder: Path) -> list[Path]:
    """Draw `folder`/plots/{reward,mismatch,routing,speed}.png; those without data are left out.

    Raises `UserError` when the folder has no metrics or matplotlib is not installed."""
    rows = read_metrics(folder / METRICS_FILE)
    plots = folder / PLOTS_FOLDER
    drawn = (
        _plot_reward(rows, plots / "reward.png"),
        _plot_mismatch(rows, plots / "mismatch.png"),
        _plot_routing(rows, plots / "routing.png"),
        _plot_speed(rows, plots / "speed.png"),
    )
    return [path for path in drawn if path is not None]


def _plot_reward(rows: Sequence[MetricRow], path: Path) -> Path | None:
    reward, accuracy = series(rows, "rollout/reward_mean"), series(rows, "eval/accuracy")
    found = [points for points in (reward, accuracy) if len(points)]
    if not found:
        return None
    notes = [f"Training: {style.average_note(len(reward))}."] if len(reward) else []
    notes += ["Held-out problems: 95 % interval."] if len(accuracy) else []
    figure, (axes,) = style.new_figure("Reward", " ".join(notes))
    labels: dict[str, tuple[float, str]] = {}
    if len(reward):
        style.curve(axes, reward.steps, reward.values, style.BLUE)
        labels["training"] = (_end(reward), style.BLUE)
    if len(accuracy):
        _draw_accuracy(axes, rows, accuracy)
        labels["held-out"] = (_end(accuracy), style.ORANGE)
    if all(points.values.min() >= 0.0 and points.values.max() <= 1.0 for points in found):
        axes.set_ylim(-0.04, 1.04)
    style.step_axis(axes, *(points.steps for points in found))
    style.name_y(axes, "mean reward, accuracy")
    style.label_right(axes, labels)
    return style.save(figure, path)


def _draw_accuracy(axes: Axes, rows: Sequence[MetricRow], accuracy: Series) -> None:
    low, high = _at(rows, "eval/accuracy_low", accuracy), _at(rows, "eval/accuracy_high", accuracy)
    errors = np.clip(np.stack([accuracy.values - low, high - accuracy.values]), 0.0, None)
    axes.errorbar(
        accuracy.steps,
        accuracy.values,
        yerr=errors,
        color=style.ORANGE,
        linestyle=":",
        linewidth=1.4,
        marker="o",
        markersize=5,
        elinewidth=1.2,
        capsize=3,
        zorder=3,
    )


def _plot_mismatch(rows: Sequence[MetricRow], path: Path) -> Path | None:
    wanted = (
        ("mismatch/log_prob_abs_diff", "mean |Δ log-prob|", style.ORANGE),
        ("mismatch/k3", "k3", style.BLUE),
    )
    found = [(series(rows, name), label, color) for name, label, color in wanted]
    found = [(_floored(points), label, color) for points, label, color in found if len(points)]
    if not found:
        return None
    everything = np.concatenate([points.values for points, _, _ in found])
    subtitle = (
        "Trainer and engine on the log-probs of the sampled tokens. k3 estimates KL(engine ‖ trainer).\n"
        f"{_capital(style.average_note(*(len(points) for points, _, _ in found)))}."
    )
    if everything.min() <= _MISMATCH_FLOOR:
        subtitle += " Below 1e-9 lies rounding; it is drawn at 1e-9."
    figure, (axes,) = style.new_figure("Trainer against engine", subtitle, margin=1.45)
    axes.set_yscale("log")
    axes.set_ylim(float(everything.min()) / 1.6, 1.6 * float(everything.max()))
    style.minor_grid(axes)
    for points, _, color in found:
        style.curve(axes, points.steps, points.values, color)
    style.step_axis(axes, *(points.steps for points, _, _ in found))
    style.name_y(axes, "nats per token, log scale")
    style.label_right(axes, {label: (_end(points), color) for points, label, color in found})
    return style.save(figure, path)


def _plot_routing(rows: Sequence[MetricRow], path: Path) -> Path | None:
    wanted = (
        ("routing/agreement", "all layers", style.BLUE),
        ("routing/agreement_worst_layer", "worst layer", style.ORANGE),
    )
    found = [(series(rows, name), label, color) for name, label, color in wanted]
    found = [(points, label, color) for points, label, color in found if len(points)]
    if not found:
        return None
    figure, (axes,) = style.new_figure(
        "Route agreement",
        "Share of the engine's experts that the trainer's own router chooses as well.\n"
        f"{_capital(style.average_note(*(len(points) for points, _, _ in found)))}.",
    )
    for points, label, color in found:
        style.curve(axes, points.steps, 100 * points.values, color, dashed=label == "worst layer")
    style.percent_axis(axes, 100 * min(float(points.values.min()) for points, _, _ in found))
    style.step_axis(axes, *(points.steps for points, _, _ in found))
    style.name_y(axes, "% of experts")
    style.label_right(axes, {label: (100 * _end(points), color) for points, label, color in found})
    return style.save(figure, path)


def _plot_speed(rows: Sequence[MetricRow], path: Path) -> Path | None:
    seconds, tokens = _phase_seconds(rows), series(rows, "perf/tokens_per_s")
    stacked = {name: seconds[name] for name in _PHASES if name in seconds}
    occasional = {name: seconds[name] for name in _OCCASIONAL if name in seconds}
    if not stacked and not len(tokens):
        return None
    lines = []
    if stacked:
        marks = "; marks above: what only some steps do, and its mean seconds" if occasional else ""
        lines.append(f"Where the time of a step goes{marks}.")
    if len(tokens):
        lines.append(f"Tokens per second: {style.average_note(len(tokens))}.")
    figure, axes = style.new_figure(
        "Speed",
        "\n".join(lines),
        columns=len(lines),
        gap=1.8,
        margin=0.3 if len(tokens) else 1.2,
    )
    steps = [points.steps for points in (*stacked.values(), tokens) if len(points)]
    for panel in axes:
        style.step_axis(panel, *steps)
    if stacked:
        _draw_phases(axes[0], stacked, occasional)
    if len(tokens):
        style.curve(axes[-1], tokens.steps, tokens.values, style.INK)
        axes[-1].set_ylim(bottom=0)
        axes[-1].yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        style.name_y(axes[-1], "tokens per second")
    return style.save(figure, path)


def _draw_phases(axes: Axes, stacked: Mapping[str, Series], occasional: Mapping[str, Series]) -> None:
    """Bars of a step each, its phases stacked, and above them a row of marks for each occasional one."""
    steps = np.unique(np.concatenate([points.steps for points in stacked.values()]))
    layers = np.zeros((len(stacked), len(steps)))
    for layer, points in zip(layers, stacked.values(), strict=True):
        layer[np.searchsorted(steps, points.steps)] = points.values
    tops = layers.cumsum(axis=0)
    totals, ceiling = tops[-1], _ceiling(tops[-1])
    half = 0.4 if len(steps) <= 40 else 0.5
    edges = np.union1d(steps - half, steps + half)
    # The highest first and each down to zero: a layer only peeps out above the next, without seams.
    for name, top in zip(reversed(list(stacked)), tops[::-1], strict=True):
        heights = np.zeros(len(edges) - 1)
        heights[np.searchsorted(edges, steps - half)] = np.minimum(top, ceiling)
        axes.stairs(heights, edges, fill=True, color=_PHASES[name], linewidth=0)
    recent = layers[:, -max(1, len(steps) // 8) :].mean(axis=1)
    middles = np.cumsum(recent) - recent / 2
    labels = {name: (float(y), _PHASES[name]) for name, y in zip(stacked, middles, strict=True)}
    marks = [
        ("d", _when(name, points), f"{name} {_short(float(points.values.mean()))}", _OCCASIONAL[name])
        for name, points in occasional.items()
    ]
    if totals.max() > ceiling:
        cut = steps[totals > ceiling].astype(np.float64)
        marks.insert(0, ("^", cut, f"cut, up to {_short(float(totals.max()))}", style.INK))
    for row, (marker, at, text, color) in enumerate(marks):
        height = ceiling * (1.08 + 0.08 * row)
        axes.plot(at, np.full(len(at), height), marker, color=color, markersize=4, markeredgewidth=0)
        labels[text] = (height, color)
    axes.set_ylim(0, ceiling * (1.08 + 0.08 * len(marks)))
    style.name_y(axes, "seconds per step")
    style.label_right(axes, labels)


def _ceiling(totals: NDArray[np.float64]) -> float:
    """The highest bar that is drawn whole, in seconds."""
    return float(totals[totals <= _CUT_FROM * np.median(totals)].max(initial=0.0)) or 1.0


def _when(name: str, points: Series) -> NDArray[np.float64]:
    """Where on the axis of steps it happened: between two steps or within one."""
    steps = points.steps.astype(np.float64)
    return steps - 0.5 if name in _BETWEEN_STEPS else steps


def _phase_seconds(rows: Sequence[MetricRow]) -> dict[str, Series]:
    """Seconds by phase; those without a colour of their own are added up as "other"."""
    names = {name for row in rows for name in row.values if name.startswith("time/") and name.endswith("_s")}
    # The whole step is the sum of its phases and would be drawn twice.
    found = {name[5:-2]: series(rows, name) for name in sorted(names - {"time/step_s"})}
    found = {name: points for name, points in found.items() if len(points)}
    named = {name: points for name, points in found.items() if name in _PHASES or name in _OCCASIONAL}
    rest = [points for name, points in found.items() if name not in named or name == _OTHER]
    if rest:
        steps = np.unique(np.concatenate([points.steps for points in rest]))
        total = np.zeros(len(steps))
        for points in rest:
            total[np.searchsorted(steps, points.steps)] += points.values
        named[_OTHER] = Series(steps=steps, values=total)
    return named


def _at(rows: Sequence[MetricRow], name: str, reference: Series) -> NDArray[np.float64]:
    """The values of `name` at the steps of another series, and that series' own where it has none."""
    points = series(rows, name)
    known = dict(zip(points.steps.tolist(), points.values.tolist(), strict=True))
    own = zip(reference.steps.tolist(), reference.values.tolist(), strict=True)
    return np.array([known.get(step, value) for step, value in own])


def _floored(points: Series) -> Series:
    return Series(steps=points.steps, values=np.maximum(points.values, _MISMATCH_FLOOR))


def _short(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds >= 10 else f"{seconds:.2g} s"


def _capital(text: str) -> str:
    return text[:1].upper() + text[1:]


def _end(points: Series) -> float:
    return float(points.values[-max(1, len(points) // 12) :].mean())
