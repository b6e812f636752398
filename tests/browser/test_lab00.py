"""Lab 00 in a real browser: opened, run from top to bottom, restarted and run again, looked at."""

from __future__ import annotations

import contextlib
import json
import os
import re
import time
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from playwright.sync_api import Browser, Page, expect

from .conftest import setting

pytestmark = [pytest.mark.browser, pytest.mark.timeout(400)]

NOTEBOOK = "00_meet_your_hosts.ipynb"
PROJECTOR = {"width": 1280, "height": 900}
PICTURES = (
    Path(os.environ.get("RDMALAB_PICTURES", "")) if "RDMALAB_PICTURES" in os.environ else None
)


@pytest.fixture
def page(browser: Browser, jupyterlab: str) -> Page:
    """The lab's notebook, open in JupyterLab in a fresh profile."""
    context = browser.new_context(viewport=PROJECTOR)
    page = context.new_page()
    base, token = jupyterlab.split("/lab?")
    page.goto(f"{base}/lab/tree/solved/{NOTEBOOK}?reset&{token}")
    expect(page.locator(".jp-NotebookPanel")).to_be_visible(timeout=60_000)
    expect(page.locator(".jp-Cell").first).to_be_visible(timeout=60_000)
    expect(page.get_by_text("Python 3 (ipykernel) | Idle")).to_be_visible(timeout=90_000)
    return page


def menu(page: Page, *names: str) -> None:
    """Click through the menu bar, as a learner does."""
    page.get_by_role("menuitem", name=names[0], exact=True).click()
    for name in names[1:]:
        page.get_by_role("menuitem", name=name, exact=True).first.click()


def run_all(page: Page) -> None:
    """Restart the notebook's kernel, run all cells, wait for the last one."""
    menu(page, "Kernel", "Restart Kernel and Run All Cells…")
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    wait_until_idle(page)


def wait_until_idle(page: Page, deadline_s: float = 240) -> None:
    """Until no cell shows the asterisk of a running or queued one (three looks in a row)."""
    end = time.monotonic() + deadline_s
    calm = 0
    while calm < 3:
        assert time.monotonic() < end, "cells still run"
        page.wait_for_timeout(700)
        busy = page.evaluate(
            "() => [...document.querySelectorAll('.jp-InputPrompt')]"
            ".some(e => e.textContent.includes('*'))"
        )
        started = page.evaluate(
            "() => [...document.querySelectorAll('.jp-InputPrompt')]"
            ".some(e => /\\d/.test(e.textContent))"
        )
        calm = calm + 1 if started and not busy else 0


def picture(page: Page, name: str) -> None:
    """Keep a screenshot if somebody wants to look (RDMALAB_PICTURES names the folder)."""
    if PICTURES is not None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=PICTURES / f"{name}.png")


def test_opens_without_a_pop_up(page: Page) -> None:
    """A learner meets the lab, not a question about news."""
    page.wait_for_timeout(2000)
    assert page.locator(".jp-Notification-Toast, .Toastify__toast").count() == 0
    picture(page, "lab00-open")


def saved(page: Page, file: Path) -> NotebookNode:
    """The notebook as it is after a save: a long one is never in the page as a whole."""
    before = file.stat().st_mtime_ns
    page.keyboard.press("Control+s")
    end = time.monotonic() + 30
    while time.monotonic() < end:
        page.wait_for_timeout(200)
        if file.stat().st_mtime_ns != before:
            with contextlib.suppress(ValueError):  # half of it is written
                return nbformat.read(file, as_version=4)
    raise AssertionError("the notebook was not saved")


def test_restart_and_run_all_twice(page: Page, folder: Path) -> None:
    """Solved, each cell runs without an error; again after a restart; both themes show it."""
    for _ in range(2):
        run_all(page)
        seen = saved(page, folder / "solved" / NOTEBOOK)
        cells = [cell for cell in seen.cells if cell.cell_type == "code" and cell.source.strip()]
        assert all(cell.execution_count for cell in cells), "not every cell was run"
        outputs = [output for cell in cells for output in cell.outputs]
        assert not [o for o in outputs if o.output_type == "error"]
        assert "rxe_alice" in json.dumps(outputs)
    for theme in ("Light", "Dark"):
        setting(folder, "apputils-extension/themes", {"theme": f"JupyterLab {theme}"})
        page.reload()
        page.wait_for_function(
            "name => document.body.dataset.jpThemeName === name",
            arg=f"JupyterLab {theme}",
            timeout=60_000,
        )
        for heading in (
            "1 Two computers",
            "6 Ping-pong",
            "7 First RDMA WRITE",
            "8 A first capture",
        ):
            show_heading(page, heading)
            picture(page, f"lab00-{heading.split()[0]}-{theme.lower()}")
        look_at_the_ladder(page, theme)


def look_at_the_ladder(page: Page, theme: str) -> None:
    """It stands in the page itself, so that it takes the theme's colours; and it has a name."""
    ladder = page.get_by_role("img", name="One SEND")
    expect(ladder).to_be_visible()
    ladder.evaluate("e => e.scrollIntoView({block: 'center'})")
    page.wait_for_timeout(800)
    picture(page, f"lab00-ladder-{theme.lower()}")
    ground = ladder.locator(".rl-bg").evaluate("e => getComputedStyle(e).fill")
    light = sum(map(int, re.findall(r"\d+", ground)[:3])) > 3 * 128
    assert light == (theme == "Light"), ground


def show_heading(page: Page, text: str) -> None:
    """Scroll the notebook until a heading is at its top."""
    heading = page.locator(".jp-Notebook h2", has_text=text).first
    heading.evaluate("e => e.scrollIntoView({block: 'start'})")
    page.wait_for_timeout(800)
