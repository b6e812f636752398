"""nbgrader in JupyterLab, by mouse: the Validate button, and Formgrader from release to points."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Page, expect

from rdmalab import lab as labs
from rdmalab.grading.course import LabForms

from ..fabric.small_lab import ANSWERS, answered, labs_with_it
from .conftest import serving
from .jupyter import PROJECTOR, open_notebook, picture, run_all, saved

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
