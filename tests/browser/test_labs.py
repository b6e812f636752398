"""Every lab in a real browser: opened, run from top to bottom, looked at in both themes.

A new lab is found by its file name. Lab 00 is run twice, with a restart in between. CI runs the
other labs in the container's JupyterLab, looked at as here (tests/docker/test_compose.py).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from playwright.sync_api import Browser, Locator, Page, expect

from ..conftest import REQUIRE_ALL
from .conftest import LABS
from .jupyter import (
    PROJECTOR,
    THEMES,
    open_notebook,
    picture,
    run_all,
    saved,
    show,
    theme,
)

pytestmark = [pytest.mark.browser, pytest.mark.timeout(500)]

NAMES = sorted(path.stem for path in (LABS / "source").glob("[0-9]*.py"))
FIRST, *LATER = NAMES
ALL = [FIRST, *(pytest.param(name, marks=pytest.mark.long) for name in LATER)]
every_lab = pytest.mark.parametrize("name", ALL)
labs_run_here = pytest.mark.parametrize("name", [FIRST] if REQUIRE_ALL else ALL)
# What may stand for a picture in an output; the drawings of the text are images.
DRAWN = ".jp-OutputArea-output :is(svg, img, table)"


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    """A window as wide as a projector, in a fresh profile."""
    context = browser.new_context(viewport=PROJECTOR)
    yield context.new_page()
    context.close()


def outputs(notebook: NotebookNode) -> list[NotebookNode]:
    return [
        output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs
    ]


def drawn_by_the_lab(notebook: NotebookNode) -> list[str]:
    """The lab's own pictures and tables among its outputs, as HTML."""
    pages = ["".join(one.get("data", {}).get("text/html", "")) for one in outputs(notebook)]
    return [page for page in pages if re.search("<svg|<table", page)]


def ran_without_an_error(notebook: NotebookNode) -> None:
    cells = [c for c in notebook.cells if c.cell_type == "code" and c.source.strip()]
    assert all(cell.execution_count for cell in cells), "not every cell was run"
    assert not [o for o in outputs(notebook) if o.output_type == "error"]
    assert not [o for o in outputs(notebook) if o.get("name") == "stderr"]


def test_a_lab_opens_without_a_pop_up(page: Page, jupyterlab: str) -> None:
    """A learner meets the lab, not a question about news."""
    open_notebook(page, jupyterlab, f"{FIRST}.ipynb")
    page.wait_for_timeout(2000)
    assert page.locator(".jp-Notification-Toast, .Toastify__toast").count() == 0
    picture(page, "lab00-open")


@labs_run_here
def test_a_lab_runs_and_shows_its_pictures(
    page: Page, jupyterlab: str, folder: Path, name: str
) -> None:
    """Solved, each cell runs without an error; drawings and pictures are there in both themes."""
    file = folder / "solved" / f"{name}.ipynb"
    open_notebook(page, jupyterlab, f"solved/{name}.ipynb")
    for _ in range(2 if name == FIRST else 1):
        run_all(page)
        notebook = saved(page, file)
        ran_without_an_error(notebook)
    assert "rxe_alice" in json.dumps(outputs(notebook))
    open_notebook(page, jupyterlab, f"solved/{name}.ipynb")  # as it was saved, all of it
    looks_right(page, notebook, name)


def looks_right(page: Page, notebook: NotebookNode, name: str) -> None:
    """A notebook that is open with all its outputs, in both themes."""
    for look in THEMES:
        theme(page, look)
        drawings_of_the_text_are_there(page, notebook)
        pictures_stand_out(page, notebook, look)
        keep(page, name, look)


def drawings_of_the_text_are_there(page: Page, notebook: NotebookNode) -> None:
    """Each image of the text was loaded and has a description."""
    wanted = len(
        re.findall(r"!\[", "".join(c.source for c in notebook.cells if c.cell_type == "markdown"))
    )
    images = page.locator(".jp-MarkdownOutput img")
    expect(images).to_have_count(wanted)
    for image in images.all():
        assert image.evaluate("e => e.complete && e.naturalWidth > 0")
        assert len(image.get_attribute("alt") or "") > 40


def pictures_stand_out(page: Page, notebook: NotebookNode, look: str) -> None:
    """The lab's own pictures are in the page, described, and their text has the page's contrast."""
    wanted = len(drawn_by_the_lab(notebook))
    expect(page.locator(DRAWN).nth(wanted - 1)).to_be_attached()
    for part in page.locator(DRAWN).all():
        show(page, part)
        if part.evaluate("e => !!e.closest('.rdmalab-static')") and not part.is_visible():
            continue  # a live widget's static picture is hidden beside it
        box = part.bounding_box()
        assert box
        assert box["width"] > 100
        if part.evaluate("e => e.tagName") == "svg":
            assert part.get_attribute("aria-label") or part.locator("title, desc").count()
            assert box["width"] < PROJECTOR["width"]
            readable(part, look)
        for ground in part.locator(".rl-bg").all():  # a ladder stands on the page's own ground
            ink = ground.evaluate("e => getComputedStyle(e).fill")
            assert (max(map(int, re.findall(r"\d+", ink)[:3])) > 128) == (look == "Light"), ink


def readable(part: Locator, look: str) -> None:
    """Most words of a drawing are light on the dark page and dark on the light one.

    Words on a filled box may be the other way about.
    """
    inks = part.evaluate("e => [...e.querySelectorAll('text')].map(t => getComputedStyle(t).fill)")
    light = [max(map(int, re.findall(r"\d+", ink)[:3])) > 128 for ink in inks]
    assert not light or (sum(light) > len(light) / 2) == (look == "Dark"), inks


def keep(page: Page, name: str, look: str) -> None:
    """Screenshots of all pictures, for who wants to look at them."""
    for number, part in enumerate(page.locator(f"{DRAWN}, .jp-MarkdownOutput img").all()):
        if part.is_visible():
            show(page, part)
            picture(page, f"{name}-{number:02}-{look.lower()}")


@every_lab
def test_an_untouched_lab_opens_and_shows_its_drawings(
    page: Page, jupyterlab: str, folder: Path, name: str
) -> None:
    """What a learner sees first: the text with its drawings and hints, and no output."""
    open_notebook(page, jupyterlab, f"{name}.ipynb")
    notebook = nbformat.read(folder / f"{name}.ipynb", as_version=4)
    drawings_of_the_text_are_there(page, notebook)
    hints = "".join(c.source for c in notebook.cells).count("<details>")
    expect(page.locator(".jp-MarkdownOutput details")).to_have_count(hints)
    assert page.locator(".jp-OutputArea-output").count() == 0
