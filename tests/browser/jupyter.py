"""A notebook in JupyterLab, driven as a reader drives it: by menu, mouse and keyboard."""

from __future__ import annotations

import contextlib
import os
import re
import time
from pathlib import Path

import nbformat
from nbformat import NotebookNode
from playwright.sync_api import Locator, Page, expect

__all__ = [
    "PROJECTOR",
    "THEMES",
    "keep_all_cells",
    "menu",
    "open_notebook",
    "picture",
    "run_all",
    "run_cells",
    "saved",
    "show",
    "show_heading",
    "theme",
    "wait_until_idle",
]

expect.set_options(timeout=20_000)  # the machine may be busy, and the hosts are emulated
PROJECTOR = {"width": 1280, "height": 720}
THEMES = ("Light", "Dark")
PICTURES = (
    Path(os.environ.get("RDMALAB_PICTURES", "")) if "RDMALAB_PICTURES" in os.environ else None
)


def open_notebook(page: Page, jupyterlab: str, path: str) -> None:
    """Open a notebook (its path below the labs' folder) and wait until its kernel is idle."""
    base, token = jupyterlab.split("/lab?")
    page.goto(f"{base}/lab/tree/{path}?reset&{token}")
    expect(page.locator(".jp-NotebookPanel")).to_be_visible(timeout=60_000)
    expect(page.locator(".jp-Cell").first).to_be_visible(timeout=60_000)
    expect(page.get_by_text("Python 3 (ipykernel) | Idle")).to_be_visible(timeout=90_000)


def keep_all_cells(page: Page, jupyterlab: str) -> None:
    """Let JupyterLab keep all cells of a notebook in the page, not only those in sight."""
    base, token = jupyterlab.split("/lab?token=")
    setting = {"raw": '{"windowingMode": "none"}'}
    answer = page.request.put(
        f"{base}/lab/api/settings/@jupyterlab/notebook-extension:tracker",
        headers={"Authorization": f"token {token}"},
        data=setting,
    )
    assert answer.ok, answer.text()


def menu(page: Page, *names: str) -> None:
    """Click through the menu bar, as a learner does."""
    page.get_by_role("menuitem", name=names[0], exact=True).click()
    for name in names[1:]:
        page.locator(".lm-Menu-item", has_text=re.compile(f"^{re.escape(name)}")).first.click()


def theme(page: Page, name: str) -> None:
    """Switch to the ``Light`` or ``Dark`` theme by the menu; what is open stays as it is."""
    if page.evaluate("() => document.body.dataset.jpThemeName") != f"JupyterLab {name}":
        menu(page, "Settings", "Theme", f"JupyterLab {name}")
    page.wait_for_function(
        "name => document.body.dataset.jpThemeName === name",
        arg=f"JupyterLab {name}",
        timeout=60_000,
    )
    page.wait_for_timeout(300)  # the new style sheet is being laid over the page


def run_all(page: Page) -> None:
    """Restart the notebook's kernel, run all cells, wait for the last one."""
    menu(page, "Kernel", "Restart Kernel and Run All Cells…")
    page.get_by_role("button", name="Confirm Kernel Restart").click()
    wait_until_idle(page)


def run_cells(page: Page, *numbers: int) -> None:
    """Run code cells (counted from 0) by click and Shift+Enter; each until it is done."""
    for number in numbers:
        page.locator(".jp-CodeCell .cm-content").nth(number).click()
        page.keyboard.press("Shift+Enter")
        wait_until_idle(page)


def wait_until_idle(page: Page, deadline_s: float = 240) -> None:
    """Until no cell shows the asterisk of a running or queued one (three looks in a row)."""
    end = time.monotonic() + deadline_s
    calm = 0
    while calm < 3:
        assert time.monotonic() < end, "cells still run"
        page.wait_for_timeout(300)
        prompts = page.evaluate(
            "() => [...document.querySelectorAll('.jp-InputPrompt')].map(e => e.textContent)"
        )
        busy = any("*" in prompt for prompt in prompts)
        started = any(any(map(str.isdigit, prompt)) for prompt in prompts)
        calm = calm + 1 if started and not busy else 0


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


def show(page: Page, part: Locator) -> None:
    """Scroll the notebook until a part of it is at its top."""
    part.evaluate("e => e.scrollIntoView({block: 'start'})")
    page.wait_for_timeout(400)


def show_heading(page: Page, text: str) -> None:
    """Scroll the notebook until a heading is at its top."""
    show(page, page.locator(".jp-Notebook h2", has_text=text).first)


def picture(page: Page, name: str) -> None:
    """Keep a screenshot if somebody wants to look (RDMALAB_PICTURES names the folder)."""
    if PICTURES is not None:
        PICTURES.mkdir(parents=True, exist_ok=True)
        page.screenshot(path=PICTURES / f"{name}.png")
