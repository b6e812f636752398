"""The live state diagram in a real browser: clicked, driven by keys, followed, re-run, exported.

``rdma resource show qp`` on the host is the witness at each step.
"""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbconvert import HTMLExporter
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from playwright.sync_api import Browser, Locator, Page, expect

import rdmalab

from .jupyter import THEMES, menu, open_notebook, picture, run_all, run_cells, saved, show, theme

pytestmark = [pytest.mark.browser, pytest.mark.long, pytest.mark.timeout(400)]

MAKE = """%%on alice bob
import pyverbs.enums as e
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from rdmalab import here

for name in ("qp", "pd", "ctx"):
    if name in globals():
        globals().pop(name).close()
ctx = Context(name=here.device)
pd, room = PD(ctx), QPCap(max_send_wr=8, max_recv_wr=8)
cq = CQ(ctx, 16)
qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=room))"""
MADE_OR_RESET = """try:
    qp.modify(QPAttr(qp_state=e.IBV_QPS_RESET), e.IBV_QP_STATE)
except NameError:
""" + textwrap.indent(MAKE.partition("\n")[2], "    ")
CELLS = (
    "%load_ext rdmalab\nimport rdmalab\nfrom rdmalab import view\nlab = rdmalab.up()",
    MAKE,
    'diagram = view.qp_diagram(lab.alice, "qp", peer=lab.bob)\ndiagram',
    """%%on alice
if qp.query(e.IBV_QP_STATE)[0].qp_state != e.IBV_QPS_RESET:
    qp.modify(QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE)""",
    "view.devices(lab)",
    "view.gids(lab)",
    "%%on alice --bg\nimport time\ntime.sleep(4)",
    "%wait alice",
)
MADE, SHOWN, BY_CODE, DEVICES, GIDS, AT_WORK, WAIT = range(1, len(CELLS))
NOTEBOOK = "states.ipynb"


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    """A notebook with the diagram, as a lab would have it."""
    cells = [new_markdown_cell("# The states of a queue pair"), *map(new_code_cell, CELLS)]
    for number, cell in enumerate(cells):
        cell.id = f"cell-{number}"
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    notebook = new_notebook(cells=cells, metadata={"kernelspec": kernel})
    nbformat.write(notebook, folder / NOTEBOOK)
    return folder / NOTEBOOK


@pytest.fixture(scope="module")
def page(browser: Browser, jupyterlab: str, file: Path) -> Iterator[Page]:
    """The notebook, run."""
    page = browser.new_context(viewport={"width": 1280, "height": 720}).new_page()
    open_notebook(page, jupyterlab, NOTEBOOK)
    run_all(page)
    yield page
    page.close()


@pytest.fixture(scope="module")
def hosts(page: Page) -> Iterator[rdmalab.Lab]:
    """The same hosts, reached from here: the witness's way."""
    lab = rdmalab.up(lab="browser")
    yield lab
    lab.close()


def witness(lab: rdmalab.Lab, host: str = "alice") -> list[str]:
    """The states of the host's own queue pairs, as the kernel's netlink interface tells them."""
    text = lab.remote.run("exec", ["rdma", "-j", "resource", "show", "qp"], host=host)
    return [
        one["state"]
        for one in json.loads(text)
        if one["ifname"] == f"rxe_{host}" and one["type"] == "RC"
    ]


@pytest.fixture(autouse=True)
def reset(page: Page, hosts: rdmalab.Lab) -> None:
    """Each test begins in RESET, whatever the one before it has left."""
    hosts.alice.run(MADE_OR_RESET)
    live(page).get_by_role("button", name="Look again").click()
    expect(live(page).locator("svg")).to_have_attribute("aria-label", re.compile("is in RESET"))


def live(page: Page) -> Locator:
    return page.locator(".rdmalab-live")


def answer(page: Page) -> Locator:
    return live(page).locator(".rdmalab-answer")


def click(page: Page, new: str) -> None:
    """Choose a move by a click on its name, then press the button that makes it."""
    live(page).get_by_role("radio", name=re.compile(f"→ {new}$")).click()
    expect(live(page).locator(".rdmalab-call")).to_contain_text(f"IBV_QPS_{new}")
    live(page).get_by_role("button", name="Run it on alice").click()


def test_from_reset_to_rts_and_into_err_by_mouse(page: Page, hosts: rdmalab.Lab) -> None:
    """At each step the page, the answer and the kernel's own list say the same."""
    expect(live(page)).to_have_count(1)
    assert witness(hosts) == ["RESET"]
    show(page, live(page))
    for old, new in [("RESET", "INIT"), ("INIT", "RTR"), ("RTR", "RTS"), ("RTS", "ERR")]:
        picture(page, f"states-{old.lower()}")
        click(page, new)
        expect(answer(page)).to_contain_text(f"{old} to {new}: done")
        expect(live(page).locator("svg")).to_have_attribute(
            "aria-label", re.compile(f"is in {new};")
        )
        assert witness(hosts) == [new]
    picture(page, "states-err")
    click(page, "RESET")
    expect(answer(page)).to_contain_text("ERR to RESET: done")
    assert witness(hosts) == ["RESET"]


def test_a_state_in_the_drawing_is_clicked(page: Page, hosts: rdmalab.Lab) -> None:
    live(page).locator('g[data-to="RTR"] rect').click()
    expect(live(page).locator(".rdmalab-call")).to_contain_text("IBV_QPS_RTR")
    live(page).get_by_role("button", name="Run it on alice").click()
    expect(answer(page)).to_contain_text("RESET to RTR: refused with EINVAL")
    expect(answer(page)).to_contain_text("RTR can be reached from INIT")
    assert witness(hosts) == ["RESET"]


def test_an_attribute_is_left_out_and_one_is_changed(page: Page, hosts: rdmalab.Lab) -> None:
    """The kernel's refusal is in words; what was typed is in the call."""
    click(page, "INIT")
    expect(answer(page)).to_contain_text("RESET to INIT: done")
    live(page).get_by_role("radio", name="INIT → RTR").click()
    expect(live(page).get_by_label("dgid:")).to_have_value("::ffff:10.0.0.2")
    live(page).get_by_label("give PATH_MTU").uncheck()
    expect(live(page).locator(".rdmalab-call")).not_to_contain_text("PATH_MTU")
    live(page).get_by_role("button", name="Run it on alice").click()
    expect(answer(page)).to_contain_text("requires PATH_MTU")
    picture(page, "states-refused")
    assert witness(hosts) == ["INIT"]
    live(page).get_by_label("give PATH_MTU").check()
    live(page).get_by_label("rq_psn:").fill("4242")
    live(page).get_by_label("rq_psn:").press("Tab")
    expect(live(page).locator(".rdmalab-call")).to_contain_text("attr.rq_psn = 4242")
    click(page, "RTR")
    expect(answer(page)).to_contain_text("INIT to RTR: done")
    shown = hosts.remote.run("exec", ["rdma", "resource", "show", "qp"], host="alice")
    assert "rq-psn 4242" in shown


def test_by_keyboard_only(page: Page, hosts: rdmalab.Lab) -> None:
    """One stop for Tab in each list, arrows inside, Enter makes the move; focus stays and shows."""
    live(page).get_by_role("radio", name="RESET → INIT").focus()
    for old, new in [("RESET", "INIT"), ("INIT", "RTR"), ("RTR", "RTS")]:
        focused = page.locator(":focus")
        for key in ("ArrowDown", "ArrowUp"):
            page.keyboard.press(key)
            expect(focused).to_have_attribute("role", "radio")
        expect(focused).to_have_text(f"{old} → {new}")
        expect(focused).to_have_attribute("aria-checked", "true")
        page.keyboard.press("Enter")
        expect(answer(page)).to_contain_text(f"{old} to {new}: done")
        assert focused.evaluate("e => getComputedStyle(e).outlineStyle") != "none"
        assert witness(hosts) == [new]
    picture(page, "states-keys")
    for _ in range(2):  # from the list of moves to the other list, then out of both
        page.keyboard.press("Tab")
    assert page.evaluate("() => !!document.activeElement.closest('.rdmalab-live')")
    assert page.locator(".jp-mod-editMode").count() == 0, "a key went to the notebook instead"


def test_it_follows_what_code_does_and_lives_once(page: Page, hosts: rdmalab.Lab) -> None:
    """B54: shown again and again, it reacts once; the older pictures are gone."""
    run_cells(page, SHOWN, SHOWN, SHOWN)
    expect(live(page)).to_have_count(1)
    click(page, "INIT")
    expect(answer(page)).to_contain_text("RESET to INIT: done")
    assert live(page).locator(".rdmalab-log li").count() == 1
    run_cells(page, BY_CODE)
    expect(answer(page)).to_contain_text("INIT to ERR: done by code, not from here.")
    assert witness(hosts) == ["ERR"]
    run_cells(page, MADE)
    expect(answer(page)).to_contain_text("qp is another queue pair now, in RESET")
    assert witness(hosts) == ["RESET"]


def test_a_closed_queue_pair_and_a_fresh_kernel_are_said(page: Page, hosts: rdmalab.Lab) -> None:
    """A picture must not crash the kernel that it looks at, and finds what is made anew."""
    hosts.alice.run("qp.close()")
    live(page).get_by_role("radio", name="RESET → INIT").click()
    live(page).get_by_role("button", name="Run it on alice").click()
    expect(answer(page)).to_contain_text("qp is closed; run the cell that makes it")
    hosts.alice.run("pass")  # it lives
    hosts.alice.restart()
    live(page).get_by_role("button", name="Look again").click()
    expect(answer(page)).to_contain_text("there is no variable 'qp'")
    picture(page, "states-gone")
    run_cells(page, MADE)
    expect(answer(page)).to_contain_text("qp is there, in RESET")
    assert witness(hosts) == ["RESET"]


def test_a_host_at_work_is_said_and_asked_again(page: Page, hosts: rdmalab.Lab) -> None:
    """A look in between waits for nobody and stops nobody."""
    run_cells(page, AT_WORK)
    live(page).get_by_role("radio", name="RESET → INIT").click()
    live(page).get_by_role("button", name="Run it on alice").click()
    expect(answer(page)).to_contain_text("alice is at work")
    assert witness(hosts) == ["RESET"]
    run_cells(page, WAIT)
    expect(answer(page)).not_to_contain_text("at work")
    click(page, "INIT")
    expect(answer(page)).to_contain_text("RESET to INIT: done")


@pytest.mark.parametrize("name", THEMES)
def test_picture_and_tables_follow_the_theme(page: Page, name: str) -> None:
    """Colours come from the page: text stands out from what is behind it."""
    theme(page, name)
    for part, what in [
        (live(page), "states"),
        (tables(page).first, "devices"),
        (tables(page).last, "gids"),
    ]:
        show(page, part)
        picture(page, f"{what}-{name.lower()}")
    ink = tables(page).first.evaluate("e => getComputedStyle(e).color")
    assert (min(map(int, re.findall(r"\d+", ink)[:3])) > 128) == (name == "Dark"), ink


def tables(page: Page) -> Locator:
    return page.locator(".jp-OutputArea-output .rdmalab-view:has(table)")


def test_saved_and_exported_it_is_a_picture(page: Page, file: Path, tmp_path: Path) -> None:
    """B53, B54: where no widget runs there is a static picture; no widget state is in the file."""
    notebook = saved(page, file)
    assert "widgets" not in notebook.metadata
    text, _ = HTMLExporter(template_name="lab", theme="dark").from_notebook_node(notebook)
    exported = tmp_path / "states.html"
    exported.write_text(text, encoding="utf-8")
    other = page.context.new_page()
    other.route(re.compile("^http"), lambda route: route.abort())  # as on a train
    other.goto(exported.as_uri())
    static = other.locator(".rdmalab-static")
    expect(static).to_be_visible()
    expect(static.locator("svg")).to_have_attribute("aria-label", re.compile("is in RESET"))
    expect(other.get_by_text("Error displaying widget")).to_have_count(0)
    static.scroll_into_view_if_needed()
    picture(other, "states-exported")
    other.close()


def test_opened_without_its_kernel_it_is_a_picture(page: Page, jupyterlab: str, file: Path) -> None:
    """B53: no "model not found" where the live picture was, but what it showed last."""
    saved(page, file)
    menu(page, "Kernel", "Shut Down Kernel")
    expect(page.get_by_text("No Kernel | Unknown")).to_be_visible()
    open_notebook(page, jupyterlab, NOTEBOOK)
    static = page.locator(".rdmalab-static")
    expect(static).to_be_visible()
    page.wait_for_timeout(3000)  # so long a widget's model is waited for
    expect(page.get_by_text("Error displaying widget")).to_be_hidden()
    show(page, static)
    picture(page, "states-without-kernel")
