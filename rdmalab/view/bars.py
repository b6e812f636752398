"""Amounts side by side: :func:`bars`, which begin at zero, and :func:`ranges`, on a log axis."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import UsageError
from .axes import FONT, Scale, diagram, legend
from .picture import Picture
from .plots import caption_of
from .quantity import quantity
from .theme import MUTED, PAPER, TEXT, series

if TYPE_CHECKING:
    from ..lab import Lab

__all__ = ["bars", "ranges"]

BAR_HEIGHT = 0.62
LETTER = 0.0105  # of the figure's width, for a name's letter


def named_rows(axes: Any, names: Sequence[str]) -> None:
    """A row for each name, from the top; room for the longest one at the left."""
    axes.set_yticks(range(len(names)), labels=list(names))
    axes.set_ylim(len(names) - 0.5, -0.5)
    axes.grid(False, axis="y")
    axes.tick_params(axis="y", length=0)
    left = min(0.45, 0.04 + LETTER * max(map(len, names)))
    box = axes.get_position()
    axes.set_position((left, box.y0, box.x1 - left, box.height))


def bars(
    data: Mapping[str, float | tuple[float, float, float] | Mapping[str, float]],
    *,
    unit: str = "",
    label: str = "",
    title: str = "",
    caption: str = "",
    lab: Lab | None = None,
) -> Picture:
    """A bar from zero for each name, its value written beside it.

    A value is a number, ``(value, low, high)`` with an error bar, or a dict of parts that are laid
    end to end: ``view.bars({"SEND": {"user": 231, "system": 144}, ...}, unit="ms")``.
    """
    if not data:
        raise UsageError("There is nothing to draw: the dict of data is empty.")
    scale = Scale(label or title, unit, log=False)
    parts = {name: parts_of(name, value, scale) for name, value in data.items()}
    kinds = list(dict.fromkeys(kind for row in parts.values() for kind in row))
    figure, axes = diagram(
        title or label, label if title else "", "", legend_room=len(kinds) > 1, rows=len(data)
    )
    starts = np.zeros(len(parts))
    handles = []
    for number, kind in enumerate(kinds):
        one = series(number)
        widths = np.array([row.get(kind, 0.0) for row in parts.values()])
        style: dict[str, Any] = {
            "color": one.light,
            "edgecolor": PAPER,
            "hatch": one.hatch,
            "linewidth": 0,
        }
        handles.append(axes.barh(range(len(parts)), widths, BAR_HEIGHT, left=starts, **style))
        starts += widths
    reach = error_bars(axes, data, starts)
    scale.apply(axes, "x", np.append(reach * 1.08, 0.0))  # and room for what is written
    for row, (total, end) in enumerate(zip(starts, reach, strict=True)):
        words = f" {quantity(float(total), unit)}"
        axes.text(end, row, words, va="center", color=TEXT, fontsize=FONT)
    named_rows(axes, list(data))
    if len(kinds) > 1:
        legend(axes, handles, kinds)
    return Picture(figure, alt=told(label or title, parts, unit), caption=caption_of(caption, lab))


def parts_of(name: str, value: Any, scale: Scale) -> dict[str, float]:
    """The parts of one bar; a plain one has a single part without a name."""
    if isinstance(value, Mapping):
        parts = {str(kind): float(amount) for kind, amount in value.items()}
    else:
        parts = {"": float(value[0] if isinstance(value, Sequence | np.ndarray) else value)}
    if (scale.checked(parts.values(), name) < 0).any():
        raise UsageError(f"{name}: a bar begins at zero, so it cannot show a negative value.")
    return parts


def error_bars(axes: Any, data: Mapping[str, Any], ends: np.ndarray) -> np.ndarray:
    """Draw the error bars that there are; how far each row reaches."""
    reach = ends.copy()
    for row, value in enumerate(data.values()):
        if isinstance(value, Sequence | np.ndarray):
            middle, low, high = value
            spread = [[middle - low], [high - middle]]
            axes.errorbar(middle, row, xerr=spread, color=TEXT, capsize=5, linewidth=1.6)
            reach[row] = max(middle, high)
    return reach


def told(label: str, parts: Mapping[str, Mapping[str, float]], unit: str) -> str:
    """What the bars show, in a sentence each."""
    sentences = []
    for name, row in parts.items():
        words = f"{name}: {quantity(sum(row.values()), unit)}"
        if len(row) > 1:
            inner = ", ".join(f"{kind} {quantity(amount, unit)}" for kind, amount in row.items())
            words += f" ({inner})"
        sentences.append(words)
    return f"Bars: {label}. {'; '.join(sentences)}."


def ranges(
    data: Mapping[str, float | tuple[float, float]],
    *,
    unit: str = "us",
    label: str = "",
    title: str = "",
    own: Collection[str] = (),
    caption: str = "",
    lab: Lab | None = None,
) -> Picture:
    """A range, or a point, for each name on a logarithmic axis, where a bar would have no zero.

    ``own`` names those that were measured here; they are drawn as filled squares, what others have
    published as hollow circles.
    """
    if not data:
        raise UsageError("There is nothing to draw: the dict of data is empty.")
    scale = Scale(label or title, unit)
    figure, axes = diagram(
        title or label,
        scale.words() if title else "log scale",
        "filled squares: measured here; hollow circles: published" if own else "",
        legend_room=False,
        rows=len(data),
    )
    spans = {
        name: scale.checked(np.atleast_1d(np.asarray(value, dtype=float)).tolist(), name)
        for name, value in data.items()
    }
    words = {
        name: " to ".join(dict.fromkeys(quantity(float(end), unit) for end in (at.min(), at.max())))
        for name, at in spans.items()
    }
    for row, (name, at) in enumerate(spans.items()):
        span(axes, row, (float(at.min()), float(at.max())), words[name], own=name in own)
    everything = np.concatenate(list(spans.values()))
    scale.apply(
        axes, "x", np.append(everything, [everything.max() * 3, everything.min() / 1.2])
    )  # and room for the words
    named_rows(axes, list(data))
    said = "; ".join(
        f"{name}{' (measured here)' if name in own else ''}: {text}" for name, text in words.items()
    )
    alt = f"Ranges on a logarithmic axis: {label or title}. {said}."
    return Picture(figure, alt=alt, caption=caption_of(caption, lab))


def span(axes: Any, row: int, ends: tuple[float, float], words: str, *, own: bool) -> None:
    """One range and its figures."""
    one = series(1 if own else 0)
    axes.plot(ends, [row, row], color=one.light, linewidth=3)
    face = one.light if own else PAPER
    style: dict[str, Any] = {"color": one.light, "markerfacecolor": face, "markeredgewidth": 2}
    axes.plot(ends, [row, row], one.marker, markersize=9, **style)
    at = {"xytext": (12, 0), "textcoords": "offset points", "va": "center"}
    axes.annotate(words, (ends[1], row), **at, color=TEXT if own else MUTED, fontsize=FONT - 1)
