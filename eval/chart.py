"""speed.png: how much faster each decoder is, and how far its pictures are from the backbone's own distribution."""

from collections.abc import Sequence
from math import cos, pi, sin
from pathlib import Path
from typing import Any

from draftgrid.common.files import atomic
from draftgrid.common.packages import need

Box = tuple[float, float, float, float]
TICKS = (0.1, 0.2, 0.5, 1, 1.5, 2, 3, 4, 5, 7, 10, 15, 20), (-3, -1, -0.3, -0.1, -0.05, 0, 0.05, 0.1, 0.3, 1, 3)
RADII = (9, 13, 18, 24, 31, 39, 48, 58)
"""How far from its marker a number may stand, in points, nearest first."""
TURNS = tuple(k * pi / 4 for k in range(8))


def speed_chart(rows: Sequence[dict[str, Any]], labels: Sequence[str], title: str, path: str | Path) -> None:
    """Write a PNG of speed-up (x, log) against excess NLL with its interval (y), a numbered point per row.

    Filled markers are exact decoders, hollow ones lossy; a colour per decoder. The same rows give the same bytes.
    """
    need("matplotlib", use="speed.png")
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.lines import Line2D
    from matplotlib.ticker import FuncFormatter, NullFormatter

    names = list(dict.fromkeys(r["decoder"] for r in rows))
    colour = dict(zip(names, (colormaps["tab10"](i % 10) for i in range(len(names))), strict=True))
    width, height = 7.7 + 0.065 * max(len(label) for label in labels), max(5.6, 0.6 + 0.155 * len(rows))
    figure = Figure(figsize=(width, height), dpi=130)
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0.75 / width, 0.5 / height, 6.3 / width, (height - 0.85) / height))
    axes.set_xscale("log")
    # Exact decoders lie around 0 within a few hundredths, lossy ones reach past 1: both have to be seen.
    axes.set_yscale("symlog", linthresh=0.1, linscale=1.0)
    axes.axhline(0, color="0.6", linewidth=0.8, zorder=0)
    for r in rows:
        mean, low, high = r["excess_nll"]
        interval = [[max(0.0, mean - low)], [max(0.0, high - mean)]]
        axes.errorbar(r["speedup"], mean, interval, fmt="o", markersize=6, elinewidth=0.8, **_paint(r, colour))
    least, most = (f(r["speedup"] for r in rows) for f in (min, max))
    axes.set_xlim(least / 1.15, most * 1.15)
    axes.set_xlabel("speed-up over AR (same prompts, same process)")
    axes.set_ylabel("excess NLL, nats a token (95 %)")
    axes.set_title(title, fontsize=10)
    (left, right), (bottom, top) = axes.get_xlim(), axes.get_ylim()
    axes.set_xticks([x for x in TICKS[0] if left < x < right])
    axes.set_yticks([y for y in TICKS[1] if bottom < y < top])
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: f"{x:g}x"))
    axes.xaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.yaxis.set_major_formatter(FuncFormatter(lambda y, _: f"{y:+g}" if y else "0"))
    axes.grid(color="0.92", linewidth=0.6, zorder=0)

    figure.canvas.draw()  # only now the points' places are known
    pixels = axes.transData.transform([(r["speedup"], r["excess_nll"][0]) for r in rows])
    points = [(float(x), float(y)) for x, y in pixels * 72 / figure.dpi]
    centred: dict[str, Any] = {"textcoords": "offset points", "ha": "center", "va": "center", "fontsize": 7.5}
    for i, (r, (dx, dy)) in enumerate(zip(rows, places(points), strict=True)):
        line = {"arrowstyle": "-", "color": "0.6", "linewidth": 0.5} if abs(dx) + abs(dy) > 16 else None
        at = r["speedup"], r["excess_nll"][0]
        axes.annotate(str(i + 1), at, (dx, dy), color=colour[r["decoder"]], arrowprops=line, **centred)
    marks = [Line2D([], [], marker="o", linestyle="", markersize=5, **_paint(r, colour)) for r in rows]
    texts = [f"{i + 1}  {label}" for i, label in enumerate(labels)]
    look: dict[str, Any] = {"loc": "upper left", "alignment": "left", "frameon": False, "labelspacing": 0.3}
    look |= {"title": "filled: exact, hollow: lossy", "fontsize": 7.5, "title_fontsize": 7.5}
    figure.legend(marks, texts, bbox_to_anchor=(7.1 / width, 1 - 0.2 / height), **look)
    with atomic(path) as temporary:
        figure.savefig(temporary, format="png", metadata={"Software": None})


def _paint(row: dict[str, Any], colour: dict[str, Any]) -> dict[str, Any]:
    own = colour[row["decoder"]]
    return {"color": own, "markerfacecolor": own if row["exact"] else "white"}


def places(points: Sequence[tuple[float, float]], width: float = 10, height: float = 8) -> list[tuple[float, float]]:
    """Points (x, y) -> where each one's number stands beside it, clear of all points and of the numbers before it."""
    taken: list[Box] = [(x - 4, y - 4, x + 4, y + 4) for x, y in points]
    found = []
    for x, y in points:
        spots = [(r * cos(turn), r * sin(turn)) for r in RADII for turn in TURNS]
        boxes = [(x + dx - width / 2, y + dy - height / 2, x + dx + width / 2, y + dy + height / 2) for dx, dy in spots]
        free = (k for k, box in enumerate(boxes) if not any(_touch(box, other) for other in taken))
        best = next(free, len(spots) - 1)
        taken.append(boxes[best])
        found.append(spots[best])
    return found


def _touch(a: Box, b: Box) -> bool:
    return a[0] < b[2] and b[0] < a[2] and a[1] < b[3] and b[1] < a[3]
