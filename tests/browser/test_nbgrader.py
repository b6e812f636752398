"""nbgrader in JupyterLab, by mouse: the Validate button, and Formgrader from release to points."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Page, expect

from rdmalab import lab as labs
from rdmalab.grading.course import LabForms
from rdmalab.topology import DEFAULT_HOSTS

from ..fabric.small_lab import ANSWERS, NAME, answered, labs_with_it
from .conftest import serving
from .jupyter import PROJECTOR, menu, open_notebook, picture, run_all, saved

pytestmark = [pytest.mark.browser, pytest.mark.timeout(500)]
MANY_S = 240  # a whole notebook is run, on hosts that are started for it


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nbgrader") / "labs"


@pytest.fixture(scope="module")
def lab(folder: Path) -> LabForms:
    """The folder, made: a course of one lab."""
    return labs_with_it(folder)


@pytest.fixture(scope="module")
def server(folder: Path, lab: LabForms) -> Iterator[str]:
    with serving(folder, "nbgrader") as address:
        yield address


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:
    context = browser.new_context(viewport=PROJECTOR)
    context.set_default_navigation_timeout(MANY_S * 1000)  # the machine may be busy
    yield context.new_page()
    context.close()


def validated(page: Page) -> str:
    """Click on Validate; what the dialog says."""
    page.get_by_role("button", name="Validate").first.click()
    dialog = page.locator(".jp-Dialog")
    expect(dialog).to_be_visible(timeout=MANY_S * 1000)
    picture(page, "nbgrader-validate")
    text = dialog.inner_text()
    dialog.get_by_role("button", name="OK").click()
    return text


@pytest.mark.long
def test_validate_runs_on_fresh_hosts(page: Page, server: str, folder: Path, lab: LabForms) -> None:
    """What the open notebook has left on its own hosts neither counts nor is touched."""
    file = folder / "mine.ipynb"
    nbformat.write(answered(lab, ANSWERS), file)
    open_notebook(page, server, "mine.ipynb")
    run_all(page)
    page.wait_for_timeout(500)
    text = validated(page)
    assert "Success! Your notebook passes all the tests." in text
    # The answers go; what they made stays on the open notebook's hosts.
    saved(page, file)
    nbformat.write(lab.released, file)
    open_notebook(page, server, "mine.ipynb")
    text = validated(page)
    for sentence in (
        "`total` is still None: nothing was added.",
        "`greeting` is still None: alice says nothing.",
        "`echo` is still None: bob is silent.",
    ):
        assert sentence in text
    alice = labs.up(lab="nbgrader").alice
    assert alice.get("greeting") == "hello from alice"
    assert not [name for name in labs.known() if name.startswith("validate-")]


def answer(page: Page, text: str) -> None:
    """Wait for Formgrader's window that says how it went, and close it."""
    window = page.locator(".modal.in, .modal.show").last
    expect(window).to_contain_text(text, timeout=MANY_S * 1000)
    window.get_by_role("button", name="OK").click()
    expect(window).to_be_hidden()


def hand_in(folder: Path, lab: LabForms) -> None:
    """Two submissions: one complete, one of which two tasks of three are answered."""
    for student, tasks in (("ada", list(ANSWERS)), ("cem", ["sum", "greeting"])):
        place = folder / "course" / "submitted" / student / NAME
        place.mkdir(parents=True)
        notebook = answered(lab, {task: ANSWERS[task] for task in tasks})
        notebook.cells.append(nbformat.v4.new_markdown_cell("<img src=x onerror='canary()'>"))
        nbformat.write(notebook, place / f"{NAME}.ipynb")


@pytest.fixture
def warm() -> None:
    """The grader's machine has been started once: a first start is nobody's click to wait for."""
    labs.up(DEFAULT_HOSTS, lab="warm", desk=True)
    labs.down("warm")


@pytest.mark.long
@pytest.mark.timeout(900)
def test_formgrader_from_release_to_points(
    page: Page, warm: None, server: str, folder: Path, lab: LabForms
) -> None:
    build = [sys.executable, str(folder / "build.py"), "--course"]
    subprocess.run(build, check=True, timeout=120, stdout=subprocess.DEVNULL)
    base, token = server.split("/lab?")
    page.goto(f"{base}/lab?reset&{token}")
    menu(page, "Nbgrader", "Formgrader")
    frame = page.frame_locator("iframe[src*=formgrader]")
    expect(frame.get_by_role("link", name=NAME, exact=True)).to_be_visible(timeout=60_000)
    picture(page, "nbgrader-formgrader")

    page.goto(f"{base}/formgrader/manage_assignments?{token}")
    page.locator("tr", has_text=NAME).locator(".assign a").click()
    answer(page, "Successfully created the student version")
    released = folder / "course" / "release" / NAME / f"{NAME}.ipynb"
    assert "CANARY" not in released.read_text()

    hand_in(folder, lab)
    page.goto(f"{base}/formgrader/manage_submissions/{NAME}")
    for student in ("ada", "cem"):
        page.locator("tr", has_text=student).locator(".autograde a").click()
        answer(page, f"Successfully autograded '{NAME}' for student '{student}'")
    expect(page.locator("tr", has_text="ada").locator(".score")).to_have_text("6 / 6")
    expect(page.locator("tr", has_text="cem").locator(".score")).to_have_text("3 / 6")
    picture(page, "nbgrader-submissions")

    page.goto(f"{base}/formgrader/gradebook/{NAME}/{NAME}")
    page.get_by_role("link", name="Submission").last.click()
    expect(page.get_by_text("bob is silent").first).to_be_visible(timeout=60_000)
    content = page.content()
    assert "CANARY" not in content and "canary()" not in content
    picture(page, "nbgrader-submission")
