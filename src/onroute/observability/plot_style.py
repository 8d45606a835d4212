"""How every plot of this package looks. Needs matplotlib, which is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from onroute.core.errors import UserError

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#9A5B8C"
SKY, AMBER, GREY, INK = "#56B4E9", "#E69F00", "#8A8F98", "#30343B"
PALETTE = (BLUE, AMBER, GREEN, ORANGE, SKY, PURPLE)
"""After Okabe and Ito: told apart by readers who are blind to some colours."""

_DPI = 150
_LABEL_GAP = 0.062
"""Least distance between two labels at the right edge, as a share of the height of the axes."""


def new_figure(
    title: str, subtitle: str, *, columns: int = 1, gap: float = 0.95, margin: float = 0.95
) -> tuple[Figure, list[Axes]]:
    """A figure of one row of axes under a title and a line that says what is seen.

    gap: inches between two axes. margin: inches at the right, where the series' names stand.
    Raises `UserError` when matplotlib is not installed."""
    try:
        from matplotlib.figure import Figure as MatplotlibFigure
    except ImportError as error:
        raise UserError(
            "observability-missing-package",
            f"matplotlib cannot be imported: {error}",
            "plots of a run",
            'install it: pip install "onroute[tracking]", or set tracking.plots = false',
        ) from error
    height, panel = 3.9, 6.0 if columns == 1 else 3.5
    width = 0.65 + panel * columns + gap * (columns - 1) + margin
    figure = MatplotlibFigure(figsize=(width, height), dpi=_DPI, facecolor="white")
    grid = figure.subplots(1, columns, squeeze=False)
    figure.subplots_adjust(
        left=0.65 / width,
        right=1 - margin / width,
        bottom=0.55 / height,
        top=1 - 0.92 / height,
        wspace=gap / panel,
    )
    x = 0.2 / width
    figure.text(x, 1 - 0.18 / height, title, size=12.5, weight="bold", color=INK, va="top")
    figure.text(x, 1 - 0.44 / height, subtitle, size=9, color=GREY, va="top")
    all_axes: list[Axes] = list(grid[0])
    for axes in all_axes:
        _dress(axes)
    return figure, all_axes


def _dress(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color("#C9CDD3")
    axes.grid(axis="y", color="#E8EAED", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=INK, labelsize=8.5, length=0, pad=4)
    axes.margins(x=0.02)
    axes.xaxis.label.set(color=INK, size=9)
    axes.yaxis.label.set(color=INK, size=9)


def name_axes(axes: Axes, *, x: str, y: str) -> None:
    """The unit of y stands above its axis, where it is read without turning the head."""
    axes.set_xlabel(x)
    axes.set_title(y, loc="left", size=9, color=INK, pad=7)


def curve(axes: Axes, steps: NDArray[np.int64], values: NDArray[np.float64], color: str) -> None:
    """The raw points, light, and their moving average over about a twelfth of the run."""
    axes.plot(steps, values, ".", color=color, alpha=0.4, markersize=4.5, markeredgewidth=0)
    # On a log axis the average of logarithms is the one that lies in the middle of the points.
    middle = np.exp(smooth(np.log(values))) if axes.get_yscale() == "log" else smooth(values)
    axes.plot(steps, middle, color=color, linewidth=1.8)


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred moving average over about a twelfth of the points; half a window at the ends."""
    half = len(values) // 24
    means = [values[max(0, i - half) : i + half + 1].mean() for i in range(len(values))]
    return np.array(means, dtype=np.float64)


def label_right(axes: Axes, labels: Mapping[str, tuple[float, str]]) -> None:
    """Names of series at the right edge, each at the height of its last value and moved apart
    where they would overlap. labels: text → (value, colour)."""
    right = axes.get_xlim()[1]
    to_axes = axes.transData + axes.transAxes.inverted()
    placed = sorted((float(to_axes.transform((right, v))[1]), t, c) for t, (v, c) in labels.items())
    heights = spread(np.array([y for y, _, _ in placed]), _LABEL_GAP)
    for height, (_, text, color) in zip(heights, placed, strict=True):
        axes.text(1.015, height, text, transform=axes.transAxes, color=color, size=8.5, va="center")


def spread(heights: NDArray[np.float64], gap: float) -> NDArray[np.float64]:
    """Ascending heights, moved as little as needed to be at least `gap` apart and inside 0 to 1."""
    out = np.clip(heights, 0.0, 1.0)
    for i in range(1, len(out)):
        out[i] = max(out[i], out[i - 1] + gap)
    if len(out) and out[-1] > 1.0:
        out[-1] = 1.0
        for i in range(len(out) - 2, -1, -1):
            out[i] = min(out[i], out[i + 1] - gap)
    return out


def save(figure: Figure, path: Path) -> Path:
    """Write the PNG whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_suffix(".tmp")
    figure.savefig(temporary, format="png")
    return temporary.replace(path)
