"""A class: a real JupyterHub, two learners in two browsers, each with own hosts and no way across.

The tests stand in the order of a lesson; one hub serves all.
"""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from playwright.sync_api import Browser, Page, expect

from ..browser.conftest import browser, folder  # noqa: F401  (fixtures)
from ..browser.jupyter import PROJECTOR, menu, open_notebook, picture, wait_until_idle
from ..browser.test_labs import ran_without_an_error
from .engine import ROOT, Engine, compose_command, run, settings

pytestmark = [pytest.mark.docker, pytest.mark.long, pytest.mark.timeout(1500)]

HUB = ROOT / "docker" / "hub"
LEARNERS = ("ada", "bob")
LAB = "03_one_sided_two_sided"
IDLE_S = 80  # longer than two signs of life of a silent cell (rdmalab/pulse.py)
UP_S = 240
SILENT = f"""import pathlib, time
pathlib.Path("/work/begun").touch()
time.sleep({IDLE_S + 60})
pathlib.Path("/work/done").touch()"""
# Whether a cell shows the asterisk of a running or queued one.
BUSY = """() => [...document.querySelectorAll('.jp-InputPrompt')]
    .some(prompt => prompt.textContent.includes('*'))"""
# Which of these addresses, each host:port, can be connected to.
REACH = """
import socket, sys
from concurrent.futures import ThreadPoolExecutor
def reached(word):
    host, _, port = word.rpartition(":")
    try:
        socket.create_connection((host, int(port)), 4).close()
        return True
    except OSError:
        return False
words = sys.argv[1:]
with ThreadPoolExecutor(len(words)) as pool:
    print(*[word for word, yes in zip(words, pool.map(reached, words)) if yes])
"""


class Lesson:
    """One class with this checkout's compose file, on a free port of this machine."""

    def __init__(self, engine: Engine, image: str) -> None:
        self.engine = engine
        self.name = f"rdmalabclass{os.getpid()}"
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.base = f"http://127.0.0.1:{port}"
        self.env = {
            **engine.env,
            "RDMALAB_CLASS": self.name,
            "RDMALAB_IMAGE": image,
            "RDMALAB_HUB": f"127.0.0.1:{port}",
            "RDMALAB_IDLE_S": str(IDLE_S),
        }

    def compose(self, *words: str) -> str:
        """``docker compose WORDS``: what it printed."""
        tool = [*(compose_command() or []), "--file", str(HUB / "compose.yaml"), "-p", self.name]
        done = run([*tool, *words], UP_S, env=self.env)
        assert done.returncode == 0, f"compose {words}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    @property
    def hub(self) -> str:
        """The hub's container."""
        return self.compose("ps", "--quiet", "hub").strip()

    def up(self) -> None:
        """Start it; returns when the hub answers through its proxy."""
        self.compose("up", "--detach", "--no-build")
        look = "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/hub/health')"
        hub = self.hub
        until(lambda: self.engine.ask("exec", hub, "python3", "-c", look).returncode == 0, 90)

    def codes(self) -> dict[str, str]:
        """The learners' codes, by the command that docs/class.md gives."""
        slips = self.engine("exec", self.hub, "python3", "-m", "codes", *LEARNERS)
        return dict(map(str.split, slips.splitlines()))

    def sh(self, learner: str, script: str, *words: str) -> str:
        """Run a shell script in a learner's container, as its user."""
        name = f"{self.name}-{learner}"
        return self.engine("exec", name, "sh", "-c", script, "sh", *words, deadline_s=300)

    def reached(self, learner: str, *addresses: str) -> list[str]:
        """Which of the addresses a program in a learner's container can connect to."""
        return self.sh(learner, 'exec python3 -c "$@"', REACH, *addresses).split()

    def seats(self) -> list[str]:
        """The learners' containers and networks, running or not, as ``kind name``."""
        mine = ("--filter", f"label=rdmalab.class={self.name}")
        rows = self.engine("ps", "--all", "--format", "container {{.Names}}", *mine)
        rows += "\n" + self.engine("network", "ls", "--format", "network {{.Name}}", *mine)
        return sorted(row for row in rows.splitlines() if row)

    def end(self) -> None:
        """Take all of it away, whatever a failing test has left."""
        self.compose("down", "--volumes")
        for kind, name in map(str.split, self.seats()):
            self.engine.ask(*(["rm", "--force"] if kind == "container" else [kind, "rm"]), name)
        for learner in LEARNERS:
            self.engine.ask("volume", "rm", f"{self.name}-work-{learner}")


def until(true: Callable[[], object], deadline_s: float) -> None:
    """Return when it is true; an AssertionError after the deadline."""
    end = time.monotonic() + deadline_s
    while not true():
        assert time.monotonic() < end, f"not so within {deadline_s:.0f} s"
        time.sleep(0.5)


@pytest.fixture(scope="module")
def lesson(engine: Engine, image: str) -> Iterator[Lesson]:
    """The class, open."""
    engine("build", "--tag", "rdmalab-hub:local", *settings(), str(HUB), deadline_s=900)
    lesson = Lesson(engine, image)
    try:
        lesson.up()
        yield lesson
    finally:
        lesson.end()


@pytest.fixture(scope="module")
def pages(browser: Browser, lesson: Lesson) -> Iterator[dict[str, Page]]:  # noqa: F811  (fixture)
    """A browser for each learner, logged in with the learner's code, with an own server."""
    codes = lesson.codes()
    pages = {}
    for name in LEARNERS:
        page = pages[name] = browser.new_context(viewport=PROJECTOR).new_page()
        log_in(page, lesson, name, codes[name])
    for name, page in pages.items():
        page.wait_for_url(f"**/user/{name}/lab**", timeout=120_000)
        expect(page.locator(".jp-DirListing-content")).to_contain_text(LAB[:12], timeout=90_000)
        assert page.locator(".jp-Notification-Toast, .Toastify__toast").count() == 0
        picture(page, f"hub-{name}")
    yield pages
    for page in pages.values():
        page.context.close()


def log_in(page: Page, lesson: Lesson, name: str, code: str) -> None:
    page.goto(f"{lesson.base}/hub/login")
    page.locator("#username_input").fill(name)
    page.locator("#password_input").fill(code)
    page.locator("#login_submit").click()


# ---------------------------------------------------------------- who comes in, and where to


def test_a_code_opens_its_own_learners_door_only(
    browser: Browser,  # noqa: F811  (the fixture)
    lesson: Lesson,
) -> None:
    codes = lesson.codes()
    page = browser.new_context().new_page()
    for name, code in (("bob", codes["ada"]), ("ada", "aaaa-bbbb-cccc")):
        log_in(page, lesson, name, code)
        expect(page.locator(".login_error")).to_contain_text("Invalid username or password")
    assert lesson.seats() == []
    page.context.close()


def test_a_learners_container_has_no_right(lesson: Lesson, pages: dict[str, Page]) -> None:
    """No capability, no device, no socket of Docker's, a read-only root, a share of the machine."""
    (facts,) = json.loads(lesson.engine("inspect", f"{lesson.name}-ada"))
    host = facts["HostConfig"]
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["ReadonlyRootfs"] is True
    assert host["Privileged"] is False
    assert not host["Devices"]
    assert 0 < host["Memory"] == host["MemorySwap"]
    assert host["CpuQuota"] > 0
    assert 0 < host["PidsLimit"] < 5000
    assert facts["Config"]["User"] == "1000:0"
    assert {mount["Destination"]: mount["RW"] for mount in facts["Mounts"]} == {
        "/work": True,
        "/share": False,
    }
    status = lesson.sh("ada", "cat /proc/1/status")
    assert re.search(r"^CapBnd:\s+0+$", status, re.M), status


def test_neither_learner_reaches_the_others_server(lesson: Lesson, pages: dict[str, Page]) -> None:
    """By the browser: 403 for whoever is logged in as somebody else."""
    page = pages["ada"].context.new_page()
    answer = page.goto(f"{lesson.base}/user/bob/lab")
    assert answer is not None
    assert answer.status == 403
    contents = page.request.get(f"{lesson.base}/user/bob/api/contents")
    assert contents.status == 403
    page.close()


def test_no_way_leads_from_one_container_to_another_or_outside(
    lesson: Lesson, pages: dict[str, Page]
) -> None:
    """Past the browser: the other's address and name, the machine's, the world's; only the hub."""
    where = "{{range .NetworkSettings.Networks}}{{.IPAddress}} {{.Gateway}}{{end}}"
    ways = {
        name: lesson.engine("inspect", "--format", where, f"{lesson.name}-{name}").split()
        for name in LEARNERS
    }
    server = f"{ways['bob'][0]}:8888"
    assert lesson.reached("bob", server) == [server], "the witness: it does listen there"
    with socket.create_server(("0.0.0.0", 0)) as everywhere:  # on each of this machine's addresses
        port = everywhere.getsockname()[1]
        addresses = [ip for ip in run(["hostname", "-I"]).stdout.split() if "." in ip]
        machine = [f"{ip}:{port}" for ip in (*addresses, ways["ada"][1], ways["bob"][1])]
        assert len(machine) > 2
        others = [server, f"{lesson.name}-bob:8888", "192.0.2.1:80", "1.1.1.1:53"]
        assert lesson.reached("ada", *others, *machine) == []
    # The hub's own doors: its API, which asks for a token; not its proxy's.
    assert lesson.reached("ada", "hub:8081", "hub:8001") == ["hub:8081"]


# ---------------------------------------------------------------- a lesson


def test_both_run_lab_03_at_the_same_time_on_own_hosts(
    lesson: Lesson,
    pages: dict[str, Page],
    folder: Path,  # noqa: F811  (the fixture)
) -> None:
    for name, page in pages.items():
        put(lesson, name, (folder / "solved" / f"{LAB}.ipynb").read_bytes(), "mine.ipynb")
        open_notebook(page, f"{lesson.base}/user/{name}/lab?of=hub", "mine.ipynb")
    for page in pages.values():
        start_all(page)
    for page in pages.values():
        page.wait_for_function(BUSY, timeout=60_000)
    assert all(page.evaluate(BUSY) for page in pages.values()), "not at the same time"
    for name, page in pages.items():
        wait_until_idle(page, 600)
        picture(page, f"hub-lab03-{name}")
        page.keyboard.press("Control+s")
        wait_until_saved(lesson, name)
        ran_without_an_error(notebook(lesson, name))
    lesson.sh("ada", "rdmalab exec alice -- sh -c 'echo ada > /tmp/whose'")
    assert lesson.sh("ada", "rdmalab exec alice -- cat /tmp/whose") == "ada"
    assert "No such file" in lesson.sh("bob", "rdmalab exec alice -- cat /tmp/whose 2>&1 || true")


def start_all(page: Page) -> None:
    """Restart the notebook's kernel and run all cells; does not wait for them."""
    menu(page, "Kernel", "Restart Kernel and Run All Cells…")
    page.get_by_role("button", name="Confirm Kernel Restart").click()


def put(lesson: Lesson, learner: str, content: bytes, name: str) -> None:
    """Write a file into a learner's folder of work, as the learner."""
    command = [lesson.engine.program, "exec", "-i", f"{lesson.name}-{learner}"]
    command += ["tee", f"/work/{name}"]
    subprocess.run(
        command, input=content, env=lesson.env, stdout=subprocess.DEVNULL, check=True, timeout=60
    )


def notebook(lesson: Lesson, learner: str) -> nbformat.NotebookNode:
    """The learner's notebook as it is saved."""
    return nbformat.reads(lesson.sh(learner, "cat /work/mine.ipynb"), as_version=4)


def wait_until_saved(lesson: Lesson, learner: str) -> None:
    """Until the saved notebook has the count of its last cell."""

    def saved() -> bool:
        cells = [c for c in notebook(lesson, learner).cells if c.cell_type == "code" and c.source]
        return bool(cells[-1].execution_count)

    until(saved, 60)


def test_a_hub_that_is_lost_finds_its_learners_again(
    lesson: Lesson, pages: dict[str, Page]
) -> None:
    """Killed and made anew while both work: servers and hosts run on, and are reached again."""
    before = lesson.seats()
    assert len(before) == 2 * len(LEARNERS)
    lesson.engine("rm", "--force", lesson.hub)
    lesson.up()
    end = time.monotonic() + 60
    for name, page in pages.items():
        while page.request.get(f"{lesson.base}/user/{name}/api/status").status != 200:
            assert time.monotonic() < end, f"{name}'s server is not reached again"
            time.sleep(0.5)
    assert lesson.seats() == before
    assert lesson.sh("ada", "rdmalab exec alice -- cat /tmp/whose") == "ada"


def test_b70_an_idle_server_is_culled_and_one_with_a_silent_cell_is_not(
    lesson: Lesson, pages: dict[str, Page]
) -> None:
    """B70: both have closed their tabs; ada's cell still computes, and says nothing.

    A culled server leaves neither container, network nor process; the next start has the learner's
    work, and fresh hosts in a moment.
    """
    kernel = {"name": "python3", "display_name": "Python 3 (ipykernel)", "language": "python"}
    cells = [nbformat.v4.new_code_cell(text) for text in ("%load_ext rdmalab", SILENT)]
    book = nbformat.v4.new_notebook(cells=cells, metadata={"kernelspec": kernel})
    put(lesson, "ada", nbformat.writes(book).encode(), "silent.ipynb")
    ada, bob = pages["ada"], pages["bob"]
    open_notebook(ada, f"{lesson.base}/user/ada/lab?of=hub", "silent.ipynb")
    start_all(ada)
    until(lambda: "begun" in lesson.sh("ada", "ls /work"), 90)
    processes = lesson.engine("top", f"{lesson.name}-bob", "-eo", "pid").split()[1:]
    assert len(processes) > 3
    begun = time.monotonic()
    for page in (ada, bob):
        page.goto("about:blank")
    until(lambda: f"container {lesson.name}-bob" not in lesson.seats(), IDLE_S + 50)
    assert time.monotonic() - begun < IDLE_S + 55, "ada's cell has ended: this would say nothing"
    until(lambda: f"network {lesson.name}-bob" not in lesson.seats(), 30)
    assert not [pid for pid in processes if Path("/proc", pid).exists()]
    until(lambda: "done" in lesson.sh("ada", "ls /work"), 90)
    bob.goto(f"{lesson.base}/hub/spawn")
    bob.wait_for_url("**/user/bob/lab**", timeout=120_000)
    wait_until_saved(lesson, "bob")
    assert json.loads(lesson.sh("bob", "rdmalab up --json"))["restored"]


def test_the_end_of_the_class_leaves_the_work_only(lesson: Lesson, pages: dict[str, Page]) -> None:
    assert lesson.seats()
    lesson.compose("down", "--volumes")
    assert lesson.seats() == []
    volumes = lesson.engine("volume", "ls", "--quiet", "--filter", f"name={lesson.name}")
    assert sorted(volumes.split()) == [f"{lesson.name}-work-{name}" for name in LEARNERS]
