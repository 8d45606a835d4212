"""Native against replayed routing, in one picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from onroute.observability import plot_style as style

if TYPE_CHECKING:
    from matplotlib.axes import Axes

COMPARE_FILE = "compare.png"
_MAX_POINTS = 20_000
_FLOOR = 1e-8
"""Log-prob differences below this are drawn here, so that exact agreement fits on a log axis."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedTokens:
    """The same N sampled tokens under the engine and twice under the trainer; L MoE layers.

    layers: the global decoder layer indices, [L].
    agreement: share of the engine's experts that the trainer's own router chooses, [L], 0 to 1.
    engine, native, replay: natural log-probs of the tokens, each [N].
    """

    layers: tuple[int, ...]
    agreement: NDArray[np.float64]
    engine: NDArray[np.float64]
    native: NDArray[np.float64]
    replay: NDArray[np.float64]


def plot_compare(compared: ComparedTokens, folder: Path) -> Path:
    """Draw `folder`/compare.png: agreement by layer, the differences' distribution, token by token.

    Tokens whose log-prob is not finite on any side are left out.
    Raises `UserError` when matplotlib is not installed."""
    finite = np.isfinite(compared.engine) & np.isfinite(compared.native) & np.isfinite(compared.replay)
    engine, native, replay = (x[finite] for x in (compared.engine, compared.native, compared.replay))
    figure, axes = style.new_figure(
        "Native against replayed routing",
        f"The same {len(engine):,} sampled tokens, scored by the trainer with its own router and on the "
        "engine's routes.",
        columns=3,
        gap=0.75,
        margin=0.3,
    )
    _draw_layers(axes[0], compared)
    _draw_differences(axes[1], np.abs(native - engine), np.abs(replay - engine))
    _draw_tokens(axes[2], engine, native, replay)
    return style.save(figure, folder / COMPARE_FILE)


def _draw_layers(axes: Axes, compared: ComparedTokens) -> None:
    shares = 100 * np.asarray(compared.agreement)
    positions = np.arange(len(shares))
    axes.plot(positions, shares, "-", color=style.BLUE, linewidth=1.2, alpha=0.5)
    axes.plot(positions, shares, "o", color=style.BLUE, markersize=4.5)
    stride = max(1, -(-len(shares) // 8))
    axes.set_xticks(positions[::stride], [str(layer) for layer in compared.layers[::stride]])
    if len(shares):
        axes.set_xlim(-0.5, len(shares) - 0.5)
        room = max(100 - float(shares.min()), 0.1)
        axes.set_ylim(100 - 1.25 * room, 100 + 0.08 * room)
        worst = int(shares.argmin())
        on_right = positions[worst] < len(shares) / 2
        axes.annotate(
            f"{shares[worst]:.2f} %",
            (float(positions[worst]), float(shares[worst])),
            xytext=(8 if on_right else -8, -9),
            textcoords="offset points",
            ha="left" if on_right else "right",
            size=8.5,
            color=style.BLUE,
        )
    style.name_axes(axes, x="decoder layer", y="route agreement, % of experts")


def _draw_differences(axes: Axes, native: NDArray[np.float64], replay: NDArray[np.float64]) -> None:
    """Share of tokens that differ by more than x: a curve further left is closer to the engine."""
    axes.set_xscale("log")
    labels = (("native", native, style.ORANGE), ("replay", replay, style.BLUE))
    for index, (name, gaps, color) in enumerate(labels):
        if not len(gaps):
            continue
        ordered = np.sort(np.maximum(gaps, _FLOOR))
        share = 100 * (1 - np.arange(1, len(ordered) + 1) / len(ordered)) + 100 / len(ordered)
        axes.plot(ordered, share, color=color, linewidth=1.8)
        axes.text(
            0.04,
            0.05 + 0.085 * (1 - index),
            f"{name}  mean {gaps.mean():.1e}",
            transform=axes.transAxes,
            size=8.5,
            color=color,
        )
    if len(native):
        shortest = float(np.quantile(np.concatenate([native, replay]), 0.1))
        axes.set_xlim(left=max(shortest, _FLOOR) / 2)
    axes.set_yscale("log")
    axes.grid(which="minor", axis="y", color="#F3F4F5", linewidth=0.6)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    style.name_axes(axes, x="|Δ log-prob| against the engine, nats", y="% of tokens that differ by more")


def _draw_tokens(
    axes: Axes, engine: NDArray[np.float64], native: NDArray[np.float64], replay: NDArray[np.float64]
) -> None:
    stride = max(1, -(-len(engine) // _MAX_POINTS))
    if len(engine):
        low = float(min(engine.min(), native.min(), replay.min()))
        axes.plot([low, 0], [low, 0], color="#C9CDD3", linewidth=1)
    for trainer, color, size in ((native, style.ORANGE, 3.2), (replay, style.BLUE, 2.0)):
        axes.plot(
            engine[::stride],
            trainer[::stride],
            ".",
            color=color,
            alpha=0.45,
            markersize=size,
            markeredgewidth=0,
            rasterized=True,
        )
    axes.text(0.04, 0.92, "native", transform=axes.transAxes, size=8.5, color=style.ORANGE)
    axes.text(0.04, 0.835, "replay", transform=axes.transAxes, size=8.5, color=style.BLUE)
    style.name_axes(axes, x="engine log-prob, nats", y="trainer log-prob, nats")
