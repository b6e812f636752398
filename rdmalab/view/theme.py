"""Colours, line styles and sizes of all pictures, for a light and for a dark page.

A picture is drawn once, in the light colours. Where it becomes part of a page, each colour is
replaced by a CSS variable (:func:`adaptive`), and :data:`STYLE` gives the variables their values by
the page's theme: JupyterLab and its HTML export mark ``<body>`` with ``data-jp-theme-light``,
Visual Studio Code with a class. So a picture follows a change of the theme, in a saved notebook
too. Series differ in colour, line style, marker and hatch: in greyscale three of these are left.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

__all__ = [
    "BAND",
    "GRID",
    "MUTED",
    "PAPER",
    "SERIES",
    "STYLE",
    "TEXT",
    "Series",
    "adaptive",
    "series",
]


@dataclass(frozen=True)
class Series:
    """How one set of data is drawn: ``line`` and ``hatch`` are matplotlib's words."""

    light: str
    dark: str
    line: str | tuple[int, tuple[float, ...]]
    marker: str
    hatch: str


# After Okabe and Ito (2008), whose colours stay apart for colour-blind readers; made darker for the
# light page and lighter for the dark one, so that each has a contrast of 3:1 or more with its page.
SERIES = (
    Series("#0072b2", "#56b4e9", "-", "o", ""),
    Series("#c04d00", "#ff9d5c", (0, (6, 2)), "s", "//"),
    Series("#008060", "#2fd6a5", (0, (6, 2, 1.5, 2)), "^", ".."),
    Series("#a8458a", "#f0a6d8", (0, (1.5, 1.5)), "D", "xx"),
    Series("#7a6400", "#e8d44d", (0, (10, 3)), "v", "\\\\"),
    Series("#5b5b6e", "#b9b9cc", (0, (3, 1.5, 1.5, 1.5, 1.5, 1.5)), "P", "oo"),
)
TEXT = "#1b1b1c"
MUTED = "#565657"
GRID = "#d3d3d4"
PAPER = "#fffffe"
BAND = 0.2  # how much of its colour an error band has
DARK = {TEXT: "#ececec", MUTED: "#b4b4b5", GRID: "#464647", PAPER: "#121213"}
DARK |= {one.light: one.dark for one in SERIES}
COLOUR = re.compile("|".join(DARK), re.IGNORECASE)


def variable(colour: str) -> str:
    """The CSS variable that stands for a colour of the light page."""
    return f"--rdmalab-{colour[1:]}"


def declare(colours: dict[str, str]) -> str:
    """CSS declarations of the variables."""
    return "".join(f"{variable(name)}:{value};" for name, value in colours.items())


STYLE = (
    f".rdmalab-view{{{declare({name: name for name in DARK})}}}"
    f'[data-jp-theme-light="false"] .rdmalab-view,.vscode-dark .rdmalab-view{{{declare(DARK)}}}'
)


def adaptive(drawing: str) -> str:
    """SVG or CSS with our colours replaced by their variables (where there are none: as before)."""
    return COLOUR.sub(lambda found: f"var({variable(found[0].lower())},{found[0]})", drawing)


def dark(drawing: str) -> str:
    """SVG in the dark page's colours, for a file that stands alone."""
    return COLOUR.sub(lambda found: DARK[found[0].lower()], drawing)


def series(number: int) -> Series:
    """The look of the set of data with this number, counted from 0."""
    return SERIES[number % len(SERIES)]
