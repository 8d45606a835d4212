"""The curves of a run as PNG files, drawn from its metrics.jsonl."""

from __future__ import annotations

from collections.abc import Sequence
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
_MAX_PHASES = 5
"""Phases that get a colour of their own; the shorter ones are drawn together."""


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
    if not len(reward) and not len(accuracy):
        return None
    figure, (axes,) = style.new_figure(
        "Reward", "Training batches: points, and their moving average. Held-out problems: 95 % interval."
    )
    labels: dict[str, tuple[float, str]] = {}
    if len(reward):
        style.curve(axes, reward.steps, reward.values, style.BLUE)
        labels["training"] = (_end(reward), style.BLUE)
    if len(accuracy):
        _draw_accuracy(axes, rows, accuracy)
        labels["held-out"] = (_end(accuracy), style.ORANGE)
    highest = max(s.values.max() for s in (reward, accuracy) if len(s))
    lowest = min(s.values.min() for s in (reward, accuracy) if len(s))
    if lowest >= 0.0 and highest <= 1.0:
        axes.set_ylim(-0.02, 1.02)
    style.name_axes(axes, x="step", y="mean reward, accuracy")
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
        linewidth=1.4,
        marker="o",
        markersize=5,
        elinewidth=1.2,
        capsize=3,
    )


def _plot_mismatch(rows: Sequence[MetricRow], path: Path) -> Path | None:
    wanted = (("mismatch/k3", "k3", style.BLUE), ("mismatch/log_prob_abs_diff", "mean |Δ|", style.ORANGE))
    found = [(_positive(series(rows, name)), label, color) for name, label, color in wanted]
    found = [(points, label, color) for points, label, color in found if len(points)]
    if not found:
        return None
    figure, (axes,) = style.new_figure(
        "Trainer against engine",
        "How far apart their log-probs of the sampled tokens are. k3 estimates KL(engine ‖ trainer).",
    )
    axes.set_yscale("log")
    everything = np.concatenate([points.values for points, _, _ in found])
    axes.set_ylim(float(everything.min()) / 1.4, 1.4 * float(everything.max()))
    axes.grid(which="minor", axis="y", color="#F3F4F5", linewidth=0.6)
    for points, _, color in found:
        style.curve(axes, points.steps, points.values, color)
    style.name_axes(axes, x="step", y="nats per token, log scale")
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
        "Route agreement", "Share of the engine's experts that the trainer's own router chooses as well."
    )
    for points, _, color in found:
        style.curve(axes, points.steps, 100 * points.values, color)
    lowest = min(float(points.values.min()) for points, _, _ in found)
    axes.set_ylim(top=100 + 4 * (1 - lowest))
    style.name_axes(axes, x="step", y="% of experts")
    style.label_right(axes, {label: (100 * _end(points), color) for points, label, color in found})
    return style.save(figure, path)


def _plot_speed(rows: Sequence[MetricRow], path: Path) -> Path | None:
    seconds, tokens = _phase_seconds(rows), series(rows, "perf/tokens_per_s")
    if not seconds and not len(tokens):
        return None
    columns = int(bool(seconds)) + int(len(tokens) > 0)
    figure, axes = style.new_figure(
        "Speed",
        "Where the time of a step goes, and what comes out.",
        columns=columns,
        gap=1.7,
        margin=0.3 if len(tokens) else 1.1,
    )
    if seconds:
        _draw_phases(axes[0], seconds)
    if len(tokens):
        style.curve(axes[-1], tokens.steps, tokens.values, style.BLUE)
        axes[-1].set_ylim(bottom=0)
        axes[-1].yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
        style.name_axes(axes[-1], x="step", y="tokens per second")
    return style.save(figure, path)


def _draw_phases(axes: Axes, seconds: dict[str, Series]) -> None:
    steps = np.unique(np.concatenate([points.steps for points in seconds.values()]))
    layers = np.zeros((len(seconds), len(steps)))
    for layer, points in zip(layers, seconds.values(), strict=True):
        layer[np.searchsorted(steps, points.steps)] = points.values
    colors = [*style.PALETTE[:_MAX_PHASES], style.GREY][: len(seconds)]
    axes.stackplot(steps, layers, colors=colors, linewidth=0.6, edgecolor="white")
    axes.set_ylim(0, 1.08 * float(np.percentile(layers.sum(axis=0), 98)) or 1.0)
    if len(steps) > 1:
        axes.set_xlim(float(steps[0]), float(steps[-1]))
    recent = layers[:, -max(1, len(steps) // 8) :].mean(axis=1)
    middles = np.cumsum(recent) - recent / 2
    style.name_axes(axes, x="step", y="seconds per step")
    style.label_right(axes, dict(zip(seconds, zip(middles.tolist(), colors, strict=True), strict=True)))


def _phase_seconds(rows: Sequence[MetricRow]) -> dict[str, Series]:
    """Seconds per phase, the longest first; those past the fifth are added up as "other"."""
    names = {name for row in rows for name in row.values if name.startswith("time/") and name.endswith("_s")}
    # The whole step is the sum of its phases and would be drawn twice.
    found = {n[5:-2].replace("_", " "): series(rows, n) for n in names if n != "time/step_s"}
    ranked = sorted(found.items(), key=lambda item: (-float(item[1].values.sum()), item[0]))
    kept = {name: points for name, points in ranked[:_MAX_PHASES] if len(points)}
    rest = [points for _, points in ranked[_MAX_PHASES:] if len(points)]
    if rest:
        steps = np.unique(np.concatenate([points.steps for points in rest]))
        total = np.zeros(len(steps))
        for points in rest:
            total[np.searchsorted(steps, points.steps)] += points.values
        kept["other"] = Series(steps=steps, values=total)
    return kept


def _at(rows: Sequence[MetricRow], name: str, reference: Series) -> NDArray[np.float64]:
    """The values of `name` at the steps of another series, and that series' own where it has none."""
    points = series(rows, name)
    known = dict(zip(points.steps.tolist(), points.values.tolist(), strict=True))
    own = zip(reference.steps.tolist(), reference.values.tolist(), strict=True)
    return np.array([known.get(step, value) for step, value in own])


def _positive(points: Series) -> Series:
    keep = points.values > 0
    return Series(steps=points.steps[keep], values=points.values[keep])


def _end(points: Series) -> float:
    return float(points.values[-max(1, len(points) // 12) :].mean())
