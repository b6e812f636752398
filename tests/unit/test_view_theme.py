"""Colours that can be read: on both pages, by colour-blind readers, and in greyscale."""

from __future__ import annotations

import itertools
import re

import pytest

from rdmalab.view import theme
from rdmalab.view.theme import DARK, GRID, MUTED, PAPER, SERIES, STYLE, TEXT, adaptive


def luminance(colour: str) -> float:
    """Relative luminance as the Web Content Accessibility Guidelines (WCAG 2.2) define it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    light, dark = sorted((luminance(one), luminance(other)), reverse=True)
    return (light + 0.05) / (dark + 0.05)


# JupyterLab's two pages: --jp-layout-color0 of its light and of its dark theme.
PAGES = {"light": "#ffffff", "dark": "#111111"}


@pytest.mark.parametrize("page", PAGES)
def test_text_and_lines_stand_out_from_the_page(page: str) -> None:
    """WCAG 1.4.3 asks 4.5:1 of text, 1.4.11 asks 3:1 of lines and marks."""
    for colour in (TEXT, MUTED):
        assert contrast(colour if page == "light" else DARK[colour], PAGES[page]) >= 4.5
    for one in SERIES:
        assert contrast(getattr(one, page), PAGES[page]) >= 3, one


def seen(colour: str, kind: str) -> tuple[float, ...]:
    """A colour as somebody without red (protan) or green (deutan) cones sees it.

    Matrices of Viénot, Brettel and Mollon (1999), on linear RGB.
    """
    linear = [(int(colour[at : at + 2], 16) / 255) ** 2.2 for at in (1, 3, 5)]
    rows = {
        "protan": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
        "deutan": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
    }[kind]
    mixed = (sum(a * b for a, b in zip(row, linear, strict=True)) for row in rows)
    return tuple(255 * max(0.0, value) ** (1 / 2.2) for value in mixed)


@pytest.mark.parametrize("kind", ["protan", "deutan"])
@pytest.mark.parametrize("page", PAGES)
def test_the_first_three_colours_stay_apart_for_colour_blind_readers(kind: str, page: str) -> None:
    """Three is what the labs draw together most; beyond that, line and marker must do."""
    for one, other in itertools.combinations(SERIES[:3], 2):
        pair = [seen(getattr(each, page), kind) for each in (one, other)]
        assert sum((a - b) ** 2 for a, b in zip(*pair, strict=True)) ** 0.5 > 40, (one, other)


def test_no_two_series_are_told_apart_by_colour_alone() -> None:
    for feature in ("light", "dark", "line", "marker", "hatch"):
        assert len({str(getattr(one, feature)) for one in SERIES}) == len(SERIES), feature


def test_every_colour_has_a_variable_with_a_value_on_both_pages() -> None:
    drawing = "".join(f"fill: {colour};" for colour in DARK)
    replaced = adaptive(drawing)
    for colour, other in DARK.items():
        name = re.escape(f"--rdmalab-{colour[1:]}")
        assert re.search(rf"var\({name},{colour}\)", replaced)
        assert re.findall(rf"{name}:(#\w+);", STYLE) == [colour, other]
    assert {TEXT, MUTED, GRID, PAPER} <= set(DARK)
    assert theme.dark(drawing) == "".join(f"fill: {colour};" for colour in DARK.values())
