"""Plots: the figures that the eye reads are in the description, and the axes are honest."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from rdmalab import view
from rdmalab.errors import UsageError
from rdmalab.view.plots import curve
from rdmalab.view.theme import DARK, SERIES

RANDOM = np.random.default_rng(1)
SAMPLES = {
    "RDMA SEND": 60 + RANDOM.gamma(2, 15, 2000),
    "TCP": 50 + RANDOM.gamma(2, 25, 2000),
    "RDMA WRITE": 55 + RANDOM.gamma(2, 10, 2000),
}
SIZES = [1, 64, 4096, 65536]
SWEEP = {
    "RDMA SEND": {size: (80 + size / 100, 70 + size / 110, 95 + size / 90) for size in SIZES},
    "TCP": {size: (70 + size / 50, 60 + size / 60, 80 + size / 40) for size in SIZES},
}

PICTURES: dict[str, Callable[[], view.Picture]] = {
    "cdf": lambda: view.cdf(SAMPLES),
    "tail": lambda: view.cdf(SAMPLES, tail=True),
    "sweep": lambda: view.sweep(SWEEP),
    "lines": lambda: view.lines(
        {"ibv_reg_mr": {4096: 96, 1 << 20: 900, 64 << 20: 52000}},
        x_label="size",
        x_unit="B",
        y_label="time",
        y_unit="us",
    ),
    "bars": lambda: view.bars({"SEND": {"user": 231, "system": 144}, "WRITE": {"user": 2}}),
    "one bar": lambda: view.bars({"SEND": 466, "READ": (7, 6, 9)}, label="switches"),
    "ranges": lambda: view.ranges({"TCP": (10, 20), "here": 84}, own=["here"], label="latency"),
    "scatter": lambda: view.scatter(
        {"one": ([1, 2, 3], [3, 2, 1])}, x_label="n", y_label="time", y_unit="us"
    ),
}
every_picture = pytest.mark.parametrize("make", PICTURES.values(), ids=PICTURES)


@every_picture
def test_a_picture_is_one_described_svg_in_the_colours_of_the_page(
    make: Callable[[], view.Picture],
) -> None:
    picture = make()
    page = picture._repr_html_()
    assert page.count("<svg") == page.count("</svg>") == 1
    assert 'role="img"' in page
    assert f'aria-label="{picture.alt}"' in page
    element = page[page.index("<svg") : page.index("</svg>") + len("</svg>")]
    ElementTree.fromstring(element)
    assert "<style" not in element, "a style inside the drawing would hold for the whole page"
    bare = re.sub(r"var\(--rdmalab-\w+,#\w+\)", "", element)
    assert not re.search(r"#[0-9a-f]{6}\b", bare), "a colour that would not follow the theme"
    assert "font-family" not in bare or "DejaVu" not in bare
    assert repr(picture).startswith(f"[picture] {picture.alt}")


def test_two_pictures_share_no_ids() -> None:
    """An id that occurs twice in a page draws the wrong clip or marker."""
    pages = [PICTURES["sweep"]()._repr_html_() for _ in range(2)]
    one, other = (set(re.findall(r'\sid="([^"]+)"', page)) for page in pages)
    assert one
    assert not one & other
    for page, ids in zip(pages, (one, other), strict=True):
        used = re.findall(r'href="#([^"]+)"|url\(#([^)]+)\)', page)
        assert used
        assert {a or b for a, b in used} <= ids


def test_the_description_of_a_distribution_gives_its_percentiles() -> None:
    picture = view.cdf({"RDMA SEND": np.arange(1, 101)})
    assert "half took at most 50 µs, 99 % at most 99 µs (100 samples)" in picture.alt
    assert "logarithmic" in picture.alt


def test_of_few_samples_none_is_called_the_99th_percentile() -> None:
    picture = view.cdf({"RDMA SEND": np.arange(1, 36)})
    assert "half took at most 18 µs (35 samples)" in picture.alt
    assert "99 %" not in picture.alt


def test_a_distribution_keeps_its_slowest_sample() -> None:
    values = np.sort(np.append(RANDOM.normal(100, 5, 20000), 9000.0))
    x, y = curve(values)
    assert len(x) < 600
    assert x[-1] == 9000.0
    assert y[-1] == 1
    exact = np.searchsorted(values, x, side="right") / len(values)
    assert np.abs(exact - y).max() < 1e-9


def test_the_description_of_lines_gives_their_ends() -> None:
    alt = view.sweep(SWEEP).alt
    assert "RDMA SEND: 80 µs at 1 B to 735 µs at 64 KiB" in alt
    assert "message size (log scale)" in alt


def test_bars_and_linear_axes_begin_at_zero() -> None:
    bars = view.bars({"a": 500, "b": 501})
    assert bars.figure.axes[0].get_xlim()[0] == 0
    lines = view.lines(
        {"a": {500: 500, 501: 501}}, x_label="x", y_label="y", x_log=False, y_log=False
    )
    assert lines.figure.axes[0].get_xlim()[0] == lines.figure.axes[0].get_ylim()[0] == 0


def test_parts_of_a_bar_add_up() -> None:
    alt = PICTURES["bars"]().alt
    assert "SEND: 375 (user 231, system 144); WRITE: 2 (user 2)" in alt or "WRITE: 2" in alt


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda: view.cdf({}), "empty"),
        (lambda: view.cdf({"SEND": []}), "SEND: there is nothing to draw"),
        (lambda: view.cdf({"SEND": [1.0, float("nan")]}), "SEND: 1 values are no numbers"),
        (lambda: view.cdf({"SEND": [0.0, 1.0]}), "SEND: 0 µs has no place on a logarithmic axis"),
        (lambda: view.sweep({"SEND": {1: (1, 2)}}), "one y, or three"),
        (lambda: view.sweep({"SEND": {}}), "SEND: there is nothing"),
        (lambda: view.bars({"SEND": -1}), "negative"),
        (lambda: view.cdf({str(n): [1] for n in range(9)}), "9 sets of data"),
        (
            lambda: view.scatter({"a": ([1], [1, 2])}, x_label="x", y_label="y"),
            "1 values of x and 2 of y",
        ),
    ],
)
def test_what_cannot_be_drawn_is_said(make: Callable[[], view.Picture], sentence: str) -> None:
    with pytest.raises(UsageError, match=re.escape(sentence)):
        make()


def test_b44_the_caption_says_that_the_machine_is_emulated() -> None:
    lab = SimpleNamespace(state=SimpleNamespace(accel="tcg", backend="vm"))
    picture = view.cdf(SAMPLES, caption="300 messages each.", lab=lab)
    page = picture._repr_html_()
    assert "<figcaption>300 messages each. Measured with Soft-RoCE on an emulated machine" in page
    assert "accel tcg" in page
    lab.state.accel = "kvm"
    assert "emulated" not in view.conditions(lab)
    assert "accel kvm" in view.conditions(lab)


@pytest.mark.parametrize("ending", ["svg", "png", "pdf"])
def test_a_picture_is_saved(ending: str, tmp_path: Path) -> None:
    file = PICTURES["sweep"]().save(tmp_path / f"sweep.{ending}")
    head = {"svg": b"<?xml", "png": b"\x89PNG", "pdf": b"%PDF"}[ending]
    assert file.read_bytes().startswith(head)


def test_a_saved_svg_stands_alone_on_either_background(tmp_path: Path) -> None:
    picture = PICTURES["sweep"]()
    light = picture.save(tmp_path / "light.svg").read_text()
    dark = picture.save(tmp_path / "dark.svg", theme="dark").read_text()
    for text in (light, dark):
        ElementTree.fromstring(text)
        assert "var(" not in text
    assert SERIES[0].light in light
    assert SERIES[0].dark in dark
    assert not any(colour in dark for colour in DARK if colour not in DARK.values())


def test_another_ending_is_refused_in_words(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"\.gif"):
        PICTURES["sweep"]().save(tmp_path / "sweep.gif")
