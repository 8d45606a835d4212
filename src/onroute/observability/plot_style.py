"""How every plot of this package looks. Needs matplotlib, which is imported on first use."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from onroute.core.errors import UserError
from onroute.core.files import replacing

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#D55E00", "#009E73", "#9A5B8C"
SKY, AMBER, GREY, INK = "#56B4E9", "#E69F00", "#8A8F98", "#30343B"
"""After Okabe and Ito: told apart by readers who are blind to some colours."""

SUBTITLE, FAINT = "#6B717B", "#C9CDD3"

_DPI = 150
_LABEL_GAP = 0.062
"""Least distance between two labels at the right edge, as a share of the height of the axes."""


def new_figure(
    title: str, subtitle: str, *, rows: int = 1, columns: int = 1, gap: float = 0.95, margin: float = 0.95
) -> tuple[Figure, list[Axes]]:
    """A figure of axes, row by row, under a title and a line or more that say what is seen.

    gap: inches between two axes of a row. margin: inches at the right, where the series' names stand.
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
    panel, panel_height, row_gap = 6.0 if columns == 1 else 3.5, 2.45, 0.9
    left, bottom, top = 0.65, 0.55, 0.92 + 0.17 * subtitle.count("\n")
    width = left + panel * columns + gap * (columns - 1) + margin
    height = bottom + panel_height * rows + row_gap * (rows - 1) + top
    figure = MatplotlibFigure(figsize=(width, height), dpi=_DPI, facecolor="white")
    grid = figure.subplots(rows, columns, squeeze=False)
    figure.subplots_adjust(
        left=left / width,
        right=1 - margin / width,
        bottom=bottom / height,
        top=1 - top / height,
        wspace=gap / panel,
        hspace=row_gap / panel_height,
    )
    x = 0.2 / width
    figure.text(x, 1 - 0.18 / height, title, size=12.5, weight="bold", color=INK, va="top")
    figure.text(x, 1 - 0.44 / height, subtitle, size=9, color=SUBTITLE, va="top", linespacing=1.35)
    all_axes: list[Axes] = list(grid.flat)
    for axes in all_axes:
        _dress(axes)
    return figure, all_axes


def _dress(axes: Axes) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    for side in ("left", "bottom"):
        axes.spines[side].set_color(FAINT)
    axes.grid(axis="y", color="#E8EAED", linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(which="both", colors=INK, labelsize=8.5, length=0, pad=4)
    axes.margins(x=0.02)
    axes.xaxis.label.set(color=INK, size=9)
    axes.yaxis.label.set(color=INK, size=9)


def step_axis(axes: Axes, *steps: NDArray[np.int64]) -> None:
    """Name the x axis "step", mark whole steps only, and give it the range of all the series `steps`."""
    from matplotlib.ticker import MaxNLocator

    first, last = min(int(s.min()) for s in steps), max(int(s.max()) for s in steps)
    room = max(0.5, 0.02 * (last - first))
    axes.set_xlim(first - room, last + room)
    axes.xaxis.set_major_locator(MaxNLocator(nbins=9, integer=True, min_n_ticks=1))
    axes.set_xlabel("step")


def name_y(axes: Axes, name: str) -> None:
    """The unit of y stands above its axis, where it is read without turning the head."""
    axes.set_title(name, loc="left", size=9, color=INK, pad=7)


def percent_axis(axes: Axes, lowest: float) -> None:
    """A y axis from below `lowest` to 100 %, with air above 100 so that a line there is seen."""
    room = max(100 - lowest, 0.1)
    axes.set_ylim(100 - 1.25 * room, 100 + 0.15 * room)
    axes.ticklabel_format(axis="y", useOffset=False)
    axes.set_yticks([tick for tick in axes.get_yticks() if 100 - 1.25 * room <= tick <= 100 + 1e-9])


def plain(value: float) -> str:
    """A number of an axis as it is written in text, with the minus sign of the other axes."""
    return f"{value:g}".replace("-", "−")


def minor_grid(axes: Axes) -> None:
    axes.grid(which="minor", axis="y", color="#F3F4F5", linewidth=0.6)


def curve(
    axes: Axes, steps: NDArray[np.int64], values: NDArray[np.float64], color: str, *, dashed: bool = False
) -> None:
    """The raw points, light, and their moving average (`average_note` says over how many).

    dashed: for a series that may lie on another one, which then shows through."""
    alone = window(len(values)) == 1
    axes.plot(
        steps,
        values,
        "o" if alone else ".",
        color=color,
        alpha=1.0 if alone else 0.4,
        markersize=4.5,
        markeredgewidth=0,
    )
    # On a log axis the average of logarithms is the one that lies in the middle of the points.
    middle = np.exp(smooth(np.log(values))) if axes.get_yscale() == "log" else smooth(values)
    axes.plot(steps, middle, color=color, linewidth=1.8, linestyle=(0, (3, 2)) if dashed else "-")


def window(num_points: int) -> int:
    """Points in the moving average: about a twelfth of the run, an odd number; 1 in short runs."""
    return 2 * (num_points // 24) + 1


def average_note(*num_points: int) -> str:
    """What the points and the line of curves with so many points are, for a subtitle."""
    width = window(max(num_points))
    return "a point a step, " + (f"and the moving average over {width} steps" if width > 1 else "joined")


def smooth(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Centred moving average over `window` points; half a window at the ends."""
    half = window(len(values)) // 2
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
    """Write the PNG whole or not at all. Raises MachineError when it can't be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as writing:
        figure.savefig(writing, format="png")
    return path
