"""Plots of what was measured: :func:`cdf`, :func:`sweep`, :func:`lines`, :func:`scatter`.

Each takes a dict from a name to its data, and returns a :class:`~rdmalab.view.picture.Picture`
whose description tells the figures that the eye would read from it. With ``lab=lab`` the caption
says under which conditions they were measured.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from matplotlib.ticker import FixedLocator, FuncFormatter

from ..errors import UsageError
from .axes import Scale, diagram, legend
from .picture import Picture
from .quantity import quantity
from .theme import BAND, SERIES, Series, series

if TYPE_CHECKING:
    from ..lab import Lab

__all__ = ["cdf", "conditions", "lines", "scatter", "sweep"]

CURVE_POINTS = 400  # of a distribution; its tail is drawn point by point
TAIL_POINTS = 60
FEWEST_FOR_P99 = 100  # samples: of fewer, the 99th percentile would be the slowest one
CLOUD_POINTS = 1500
Point = float | tuple[float, float, float]


def conditions(lab: Lab) -> str:
    """Under what conditions this lab measures, for a caption."""
    machines = {
        "tcg": "with Soft-RoCE on an emulated machine",
        "kvm": "with Soft-RoCE on a virtual machine",
        "native": "on this machine's own kernel",
    }
    return (
        f"Measured {machines[lab.state.accel]} (backend {lab.state.backend}, accel"
        f" {lab.state.accel}): compare shapes and counts, not microseconds."
    )


def caption_of(caption: str, lab: Lab | None) -> str:
    """A caption with the conditions behind it."""
    return " ".join(text for text in (caption, conditions(lab) if lab is not None else "") if text)


def look(one: Series) -> dict[str, Any]:
    """Matplotlib's arguments for a line of this look."""
    return {
        "color": one.light,
        "linestyle": one.line,
        "marker": one.marker,
        "markersize": 7,
        "linewidth": 2.4,
    }


def checked_names(data: Mapping[str, Any]) -> None:
    """``UsageError`` if there is nothing, or more than can be told apart."""
    if not data:
        raise UsageError("There is nothing to draw: the dict of data is empty.")
    if len(data) > len(SERIES):
        raise UsageError(
            f"{len(data)} sets of data in one picture cannot be told apart.",
            next_step=f"Draw at most {len(SERIES)} at once.",
        )


# ---------------------------------------------------------------- distributions


def cdf(
    samples: Mapping[str, Sequence[float] | np.ndarray],
    *,
    unit: str = "us",
    label: str = "half round trip",
    title: str = "How long did it take?",
    tail: bool = False,
    caption: str = "",
    lab: Lab | None = None,
) -> Picture:
    """The distribution of each set of samples, with its median and 99th percentile marked.

    ``view.cdf({"RDMA SEND": lat_us, "TCP": tcp_us}, lab=lab)``. At each time on the x axis the
    curve shows which share of the samples took at most that long. ``tail=True`` shows the share
    that took *longer* on a logarithmic axis instead: the rare slow ones, which the first form
    hides. A percentile is one of the samples; of fewer than 100, none is called the 99th.
    """
    checked_names(samples)
    scale = Scale(label, unit)
    sets = {name: np.sort(scale.checked(values, name)) for name, values in samples.items()}
    y_words = "share that took longer (log scale)" if tail else "share that took at most this long"
    figure, axes = diagram(title, scale.words(), y_words)
    everything = np.concatenate(list(sets.values()))
    handles, labels, said = [], [], []
    for number, (name, values) in enumerate(sets.items()):
        x, y = curve(values)
        style = look(series(number)) | {"drawstyle": "steps-post"}
        at = np.array([0.5, 0.99][: 1 + (len(values) >= FEWEST_FOR_P99)])
        marks = np.quantile(values, at, method="inverted_cdf")
        axes.plot(x, 1 - y if tail else y, **style | {"marker": ""})
        axes.plot(marks, 1 - at if tail else at, **style | {"linestyle": ""})
        handles += axes.plot([], [], **style)
        p50, *p99 = (quantity(float(mark), unit) for mark in marks)
        labels.append("\n".join([name, ", ".join([f"p50 {p50}", *(f"p99 {us}" for us in p99)])]))
        shares_said = ", ".join([f"half took at most {p50}", *(f"99 % at most {us}" for us in p99)])
        said.append(f"{name}: {shares_said} ({len(values):,} samples)")
    scale.apply(axes, "x", everything)
    shares(axes, max(map(len, sets.values())) if tail else 0)
    legend(axes, handles, labels)
    alt = f"Distribution of {label} on a logarithmic axis. {'; '.join(said)}."
    return Picture(figure, alt=alt, caption=caption_of(caption, lab))


def curve(values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Points of the distribution of sorted values: enough for the eye, every one of the tail."""
    count = len(values)
    ranks = np.linspace(0, count - 1, min(count, CURVE_POINTS)).round().astype(int)
    ranks = np.unique(np.concatenate([ranks, np.arange(max(0, count - TAIL_POINTS), count)]))
    return values[ranks], (ranks + 1) / count


def shares(axes: Any, tail_of: int) -> None:
    """The y axis of a distribution; ``tail_of``: the number of samples if it shows the tail."""
    if not tail_of:
        axes.set_ylim(0, 1.02)
        axes.yaxis.set_major_locator(FixedLocator([0, 0.25, 0.5, 0.75, 0.9, 0.99]))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda share, _: f"{share * 100:.0f} %"))
        return
    decades = max(2, int(np.ceil(np.log10(max(tail_of, 10)))))
    axes.set_yscale("log")
    axes.set_ylim(10.0**-decades, 1.2)
    axes.yaxis.set_major_locator(FixedLocator([10.0**-n for n in range(decades + 1)]))
    axes.yaxis.set_major_formatter(
        FuncFormatter(lambda share, _: "all" if share > 0.99 else f"1 in {round(1 / share):,}")
    )
    axes.yaxis.set_minor_locator(FixedLocator([]))


# ---------------------------------------------------------------- y against x


def lines(
    data: Mapping[str, Mapping[float, Point]],
    *,
    x_label: str,
    y_label: str,
    x_unit: str = "",
    y_unit: str = "",
    x_log: bool = True,
    y_log: bool = True,
    title: str = "",
    caption: str = "",
    lab: Lab | None = None,
) -> Picture:
    """A line for each set: ``{name: {x: y}}``, or ``{name: {x: (y, low, high)}}`` with a band.

    Units are ``B``, ``us`` (also ns, ms, s), a word, or nothing. A linear axis begins at zero.
    """
    checked_names(data)
    x_scale, y_scale = Scale(x_label, x_unit, x_log), Scale(y_label, y_unit, y_log)
    sets = {name: table(name, points, x_scale, y_scale) for name, points in data.items()}
    figure, axes = diagram(
        title or f"{y_label} against {x_label}", x_scale.words(), y_scale.words()
    )
    entries = []
    for number, (name, rows) in enumerate(sets.items()):
        one = series(number)
        if (rows[:, 2] < rows[:, 3]).any():
            axes.fill_between(
                rows[:, 0], rows[:, 2], rows[:, 3], color=one.light, alpha=BAND, linewidth=0
            )
        (handle,) = axes.plot(rows[:, 0], rows[:, 1], **look(one))
        entries.append((-rows[-1, 1], handle, name))
    everything = np.concatenate(list(sets.values()))
    x_scale.apply(axes, "x", everything[:, 0])
    y_scale.apply(axes, "y", everything[:, 1:].ravel())
    entries.sort(key=lambda entry: entry[0])  # in the order in which the lines end
    legend(axes, [entry[1] for entry in entries], [entry[2] for entry in entries])
    return Picture(figure, alt=told(sets, x_scale, y_scale), caption=caption_of(caption, lab))


def table(name: str, points: Mapping[float, Point], x: Scale, y: Scale) -> np.ndarray:
    """Rows of x, y, low, high, sorted by x."""
    if not points:
        raise UsageError(f"{name}: there is nothing to draw.")
    rows = [
        (place, *(point if isinstance(point, Sequence | np.ndarray) else (point,) * 3))
        for place, point in sorted(points.items())
    ]
    if {len(row) for row in rows} != {4}:
        raise UsageError(f"{name}: each x has one y, or three: (y, low, high).")
    x.checked((row[0] for row in rows), name)
    y.checked((value for row in rows for value in row[1:]), name)
    return np.asarray(rows, dtype=float)


def told(sets: Mapping[str, np.ndarray], x: Scale, y: Scale) -> str:
    """What the lines show, in a sentence each."""
    sentences = [
        f"{name}: {quantity(float(rows[0, 1]), y.unit)} at {quantity(float(rows[0, 0]), x.unit)}"
        f" to {quantity(float(rows[-1, 1]), y.unit)} at {quantity(float(rows[-1, 0]), x.unit)}"
        for name, rows in sets.items()
    ]
    return f"{y.words()} against {x.words()}. {'; '.join(sentences)}."


def sweep(
    data: Mapping[str, Mapping[float, Point]],
    *,
    unit: str = "us",
    label: str = "half round trip, median",
    title: str = "How does it grow with the size of the message?",
    caption: str = "",
    lab: Lab | None = None,
) -> Picture:
    """A value against message size: ``view.sweep({name: {size_bytes: (p50, low, high)}})``."""
    return lines(
        data,
        x_label="message size",
        x_unit="B",
        y_label=label,
        y_unit=unit,
        title=title,
        caption=caption,
        lab=lab,
    )


def scatter(
    data: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x_label: str,
    y_label: str,
    x_unit: str = "",
    y_unit: str = "",
    x_log: bool = False,
    y_log: bool = False,
    title: str = "",
    caption: str = "",
    lab: Lab | None = None,
) -> Picture:
    """A cloud of points for each set: ``{name: (xs, ys)}``. Of very many, evenly chosen ones."""
    checked_names(data)
    x_scale, y_scale = Scale(x_label, x_unit, x_log), Scale(y_label, y_unit, y_log)
    figure, axes = diagram(
        title or f"{y_label} against {x_label}", x_scale.words(), y_scale.words()
    )
    every_x, every_y, handles, said = [], [], [], []
    for number, (name, (xs, ys)) in enumerate(data.items()):
        x, y = x_scale.checked(xs, name), y_scale.checked(ys, name)
        if len(x) != len(y):
            raise UsageError(f"{name}: {len(x)} values of x and {len(y)} of y.")
        some = np.linspace(0, len(x) - 1, min(len(x), CLOUD_POINTS)).round().astype(int)
        style = look(series(number)) | {"linestyle": "", "markersize": 4, "alpha": 0.6}
        handles += axes.plot(x[some], y[some], **style)
        every_x.append(x)
        every_y.append(y)
        low, high = quantity(float(y.min()), y_unit), quantity(float(y.max()), y_unit)
        said.append(f"{name}: {len(x):,} points from {low} to {high}")
    x_scale.apply(axes, "x", np.concatenate(every_x))
    y_scale.apply(axes, "y", np.concatenate(every_y))
    legend(axes, handles, list(data))
    alt = f"{y_scale.words()} against {x_scale.words()}. {'; '.join(said)}."
    return Picture(figure, alt=alt, caption=caption_of(caption, lab))
