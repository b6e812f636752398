"""An empty diagram: its size, its two axes with round ticks and units, its legend."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from ..errors import UsageError
from .quantity import log_ticks, quantity
from .theme import GRID, MUTED, TEXT

__all__ = ["Scale", "diagram", "legend"]

INCHES = (9.0, 4.6)
FONT = 13  # points, of a picture 9 inches wide: readable from the last row at 1280 x 720
ABOVE, BELOW, ROW = 0.87, 0.69, 0.34  # inches: for the title, the x axis, a named row
ROOM = 1.12  # of a logarithmic axis beyond the first and the last value


@dataclass(frozen=True)
class Scale:
    """What an axis shows. ``unit``: ``B``, ``us``, ``""`` or a word; linear ones begin at zero."""

    label: str
    unit: str = ""
    log: bool = True

    def checked(self, values: Iterable[float], whose: str = "The data") -> np.ndarray:
        """The finite values as an array. ``UsageError`` for none, or for what cannot be shown."""
        array = np.asarray(list(values), dtype=float)
        if array.size == 0:
            raise UsageError(f"{whose}: there is nothing to draw.")
        if not np.isfinite(array).all():
            raise UsageError(f"{whose}: {int((~np.isfinite(array)).sum())} values are no numbers.")
        if self.log and array.min() <= 0:
            raise UsageError(
                f"{whose}: {quantity(float(array.min()), self.unit)} has no place on a logarithmic"
                " axis.",
                next_step="Leave it out, or ask for a linear axis.",
            )
        return array

    def words(self) -> str:
        """The axis' title: what, and whether its steps are factors."""
        return f"{self.label} (log scale)" if self.log else self.label

    def apply(self, axes: Axes, which: str, values: np.ndarray) -> None:
        """Set one axis (``x`` or ``y``) up for these values."""
        axis = getattr(axes, f"{which}axis")
        set_limits = getattr(axes, f"set_{which}lim")
        words = FuncFormatter(lambda value, _: quantity(value, self.unit))
        if not self.log:
            top = float(values.max()) or 1.0
            set_limits(min(0.0, float(values.min()) * 1.08), top * 1.08)
            axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
            axis.set_major_formatter(words)
            return
        low, high = float(values.min()), float(values.max())
        getattr(axes, f"set_{which}scale")("log")  # which sets formatters of its own
        set_limits(low / ROOM, high * ROOM)
        axis.set_major_locator(FixedLocator(log_ticks(low / ROOM, high * ROOM, self.unit)))
        axis.set_major_formatter(words)
        axis.set_minor_locator(NullLocator())


def diagram(
    title: str, x_words: str, y_words: str, *, legend_room: bool = True, rows: int = 0
) -> tuple[Figure, Axes]:
    """A figure with one pair of axes; room for a legend at its right, and for many ``rows``."""
    width = INCHES[0]
    above = ABOVE if y_words else ABOVE - ROW
    height = max(INCHES[1], BELOW + above + ROW * rows)
    figure = Figure(figsize=(width, height))
    part = 0.53 if legend_room else 0.84
    axes = figure.add_axes((0.12, BELOW / height, part, 1 - (BELOW + above) / height))
    axes.set_facecolor("none")
    axes.grid(True, color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side, spine in axes.spines.items():
        spine.set_visible(side in ("left", "bottom"))
        spine.set_color(MUTED)
    axes.tick_params(colors=MUTED, labelcolor=TEXT, labelsize=FONT - 2, length=4)
    figure.text(0.02, 1 - 0.28 / height, title, color=TEXT, fontsize=FONT + 2, fontweight="bold")
    figure.text(0.02, 1 - 0.64 / height, y_words, color=TEXT, fontsize=FONT - 1)
    axes.set_xlabel(x_words, color=TEXT, fontsize=FONT - 1)
    return figure, axes


def legend(axes: Axes, handles: Sequence[Any], labels: Sequence[str]) -> None:
    """The legend, at the right of the axes; each entry shows colour, line style and marker."""
    axes.legend(
        list(handles),
        list(labels),
        loc="upper left",
        bbox_to_anchor=(1.01, 1.0),
        frameon=False,
        labelcolor=TEXT,
        fontsize=FONT - 1,
        handlelength=3.4,
        labelspacing=0.9,
    )
