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
_MAX_POINTS = 8_000
"""Tokens drawn one by one; of more, an even choice."""
_MAX_OUTLIERS = 200
"""Tokens that are drawn in any case: those that are furthest off."""
_FLOOR = 1e-8
"""Log-prob differences below this are drawn here, so that exact agreement fits on a log axis."""
_MAX_LABELLED_LAYERS = 8


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
    engine = compared.engine[finite]
    native, replay = compared.native[finite] - engine, compared.replay[finite] - engine
    subtitle = (
        f"The same {len(engine):,} sampled tokens, scored by the trainer with its own router (native) and on "
        "the engine's routes (replay).\nΔ: log-prob of a token under the trainer less that under the engine."
    )
    if len(engine) > _MAX_POINTS:
        subtitle += f" Drawn one by one: one of {_stride(len(engine))} tokens and those furthest off."
    figure, axes = style.new_figure(
        "Native against replayed routing",
        subtitle,
        rows=2,
        columns=2,
        gap=0.75,
        margin=0.3,
    )
    _draw_layers(axes[0], compared)
    _draw_differences(axes[1], np.abs(native), np.abs(replay))
    _draw_tokens((axes[2], axes[3]), engine, (native, replay))
    return style.save(figure, folder / COMPARE_FILE)


def _draw_layers(axes: Axes, compared: ComparedTokens) -> None:
    """One point a layer; the number stands at each of a few layers, and at the worst of many."""
    shares = 100 * np.asarray(compared.agreement)
    positions = np.arange(len(shares))
    axes.plot(positions, shares, "o", color=style.BLUE, markersize=4.5)
    stride = max(1, -(-len(shares) // _MAX_LABELLED_LAYERS))
    axes.set_xticks(positions[::stride], [str(layer) for layer in compared.layers[::stride]])
    axes.set_xlabel("decoder layer")
    style.name_y(axes, "route agreement, % of experts")
    if not len(shares):
        return
    edge = max(0.5, 0.03 * len(shares))
    axes.set_xlim(-edge, len(shares) - 1 + edge)
    style.percent_axis(axes, float(shares.min()))
    few = len(shares) <= _MAX_LABELLED_LAYERS
    for layer in positions if few else [int(shares.argmin())]:
        axes.annotate(
            f"{shares[layer]:.2f}",
            (float(positions[layer]), float(shares[layer])),
            xytext=(0, -6),
            textcoords="offset points",
            ha="center",
            va="top",
            size=8.5,
            color=style.BLUE,
        )


def _draw_differences(axes: Axes, native: NDArray[np.float64], replay: NDArray[np.float64]) -> None:
    """Share of tokens that differ by more than x: a curve further left is closer to the engine."""
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_xlabel("x, nats")
    style.name_y(axes, "% of tokens with |Δ| above x")
    if not len(native):
        return
    everything = np.maximum(np.concatenate([native, replay]), _FLOOR)
    left = max(float(np.quantile(everything, 0.1)) / 2, _FLOOR)
    # Where the two are one curve, the wider native one shows on both sides of replay.
    for row, ((name, gaps, color), width) in enumerate(zip(_kinds(native, replay), (2.6, 1.4), strict=True)):
        x, share = share_above(np.maximum(gaps, _FLOOR))
        axes.step([min(left, x[0]), *x], [100.0, *100 * share], where="post", color=color, linewidth=width)
        text = f"{name}: mean {gaps.mean():.1e}" if gaps.any() else f"{name}: exactly 0"
        axes.text(0.97, 0.9 - 0.1 * row, text, transform=axes.transAxes, ha="right", size=8.5, color=color)
    axes.set_xlim(left, max(2 * float(everything.max()), 10 * left))
    axes.set_ylim(70 / len(native), 150)
    style.minor_grid(axes)
    axes.yaxis.set_major_formatter(lambda value, _: style.plain(value))


def share_above(values: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """The different values x ascending, and for each the share of `values` that are greater, 0 to 1."""
    x, counts = np.unique(values, return_counts=True)
    return x, 1 - counts.cumsum() / len(values)


def _draw_tokens(
    panels: tuple[Axes, Axes],
    engine: NDArray[np.float64],
    deltas: tuple[NDArray[np.float64], NDArray[np.float64]],
) -> None:
    """Δ of each token against the engine's log-prob, native and replay side by side on the same axes.

    Δ is linear up to its 90th percentile and logarithmic beyond: the few that are far off are the story,
    and the many that are close must not hide in one line."""
    chosen = _chosen(np.maximum(*np.abs(deltas)))
    gaps = np.abs(np.concatenate(deltas))
    linear = 10 ** np.floor(np.log10(max(float(np.quantile(gaps, 0.9)), _FLOOR))) if len(gaps) else 1.0
    limit = 2 * max(float(gaps.max(initial=0.0)), linear)
    for axes, (name, delta, color) in zip(panels, _kinds(*deltas), strict=True):
        axes.set_yscale("symlog", linthresh=linear, linscale=0.7)
        axes.set_ylim(-limit, limit)
        axes.axhline(0.0, color=style.FAINT, linewidth=1)
        axes.plot(
            engine[chosen],
            delta[chosen],
            ".",
            color=color,
            alpha=0.45,
            markersize=4,
            markeredgewidth=0,
            rasterized=True,
        )
        axes.set_yticks(_ticks(linear, limit))
        axes.minorticks_off()
        axes.yaxis.set_major_formatter(lambda value, _: style.plain(value))
        axes.set_xlabel("log-prob under the engine, nats")
        style.name_y(axes, f"Δ of {name}, nats")


def _chosen(gaps: NDArray[np.float64]) -> NDArray[np.int64]:
    """Which of the tokens with these |Δ| are drawn, ascending."""
    furthest = np.argsort(gaps)[-_MAX_OUTLIERS:]
    return np.union1d(np.arange(0, len(gaps), _stride(len(gaps))), furthest).astype(np.int64)


def _stride(num_tokens: int) -> int:
    return max(1, -(-num_tokens // _MAX_POINTS))


def _ticks(linear: float, limit: float) -> list[float]:
    """Zero and at most four powers of ten on each side, from the linear part's end on."""
    first, last = round(np.log10(linear)), int(np.floor(np.log10(limit)))
    powers = [10.0**exponent for exponent in range(first, last + 1, max(1, -(-(last - first + 1) // 4)))]
    return [*(-power for power in reversed(powers)), 0.0, *powers]


def _kinds(
    native: NDArray[np.float64], replay: NDArray[np.float64]
) -> tuple[tuple[str, NDArray[np.float64], str], tuple[str, NDArray[np.float64], str]]:
    return ("native", native, style.ORANGE), ("replay", replay, style.BLUE)
