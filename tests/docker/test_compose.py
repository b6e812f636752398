"""`docker compose up` as a learner has it: labs in a browser, an upgrade, a kill, and nothing left.

One project serves all tests.
"""

from __future__ import annotations

import http.client
import json
import os
import re
import socket
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import nbformat
import pytest
from nbformat import NotebookNode
from playwright.sync_api import Browser, Page

from ..browser.conftest import LABS, browser, folder  # noqa: F401  (fixtures)
from ..browser.jupyter import PROJECTOR, keep_all_cells, open_notebook, run_all
from ..browser.test_labs import looks_right, outputs, ran_without_an_error
from .engine import ROOT, Engine, compose_command, run

pytestmark = [pytest.mark.docker, pytest.mark.long, pytest.mark.timeout(1800)]

FILE = ROOT / "docker" / "compose.yaml"
NAMES = sorted(path.stem for path in (LABS / "source").glob("[0-9]*.py"))
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/lab\?token=\w+")
UP_S = 120
SETTINGS = "/tmp/home-1000/.jupyter/lab/user-settings/@jupyterlab/notebook-extension"
ALL_CELLS = '{"windowingMode": "none"}'
# The image of a next version: two labs have another text.
NEXT = """
FROM {image}
USER 0
RUN sed -i 's/Meet your hosts/Meet your new hosts/' /opt/rdmalab/labs/0[01]_*.ipynb
USER 1000:0
"""


class Project:
    """One compose project, with this checkout's file."""

    def __init__(self, engine: Engine, image: str) -> None:
        self.engine, self.image = engine, image
        self.name = f"rdmalabtest{os.getpid()}"
        self.container = ""  # its id, as of the last `up`
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    def compose(self, *words: str) -> str:
        """``docker compose WORDS``: what it printed."""
        env = {**self.engine.env, "RDMALAB_IMAGE": self.image, "RDMALAB_PORT": str(self.port)}
        env.pop("JUPYTER_TOKEN", None)
        tool = compose_command() or []
        done = run([*tool, "--file", str(FILE), "-p", self.name, *words], UP_S, env=env)
        assert done.returncode == 0, f"compose {words}:\n{done.stdout}\n{done.stderr}"
        return done.stdout

    def up(self) -> str:
        """Start it and wait until it is healthy; the address that it prints."""
        self.compose("up", "--detach", "--no-build")
        self.container = self.compose("ps", "--quiet").split()[0]
        end = time.monotonic() + UP_S
        while self.health() != "healthy":
            assert time.monotonic() < end, self.compose("logs", "--no-color")
            time.sleep(1)
        return ADDRESS.findall(self.compose("logs", "--no-color"))[-1]

    def health(self) -> str:
        """What the health check says."""
        return self.engine("inspect", "--format", "{{.State.Health.Status}}", self.container)

    def sh(self, script: str) -> str:
        """Run a shell script in the container, as its user."""
        return self.engine("exec", self.container, "sh", "-c", script, deadline_s=300)

    def left(self) -> str:
        """What the engine still has of this project."""
        mine = ("--filter", f"label=com.docker.compose.project={self.name}", "--quiet")
        kinds = (("ps", "--all"), ("volume", "ls"), ("network", "ls"))
        return "".join(self.engine(*kind, *mine) for kind in kinds)


@pytest.fixture(scope="module")
def project(engine: Engine, image: str) -> Iterator[Project]:
    """The project; all of it is gone in the end."""
    project = Project(engine, image)
    try:
        yield project
    finally:
        project.compose("down", "--volumes")


@pytest.fixture(scope="module")
def address(project: Project) -> str:
    """Where JupyterLab is, with its token; all cells of a notebook are in its page."""
    address = project.up()
    project.sh(f"mkdir -p {SETTINGS}; echo '{ALL_CELLS}' > {SETTINGS}/tracker.jupyterlab-settings")
    return address


@pytest.fixture
def page(browser: Browser) -> Iterator[Page]:  # noqa: F811  (the fixture)
    """A window as wide as a projector, in a fresh profile."""
    context = browser.new_context(viewport=PROJECTOR)
    yield context.new_page()
    context.close()


def asked(host: str, port: int, path: str) -> int:
    """The status that a GET is answered with; 0 if nobody listens there."""
    connection = http.client.HTTPConnection(host, port, timeout=10)
    try:
        connection.request("GET", path)
        return connection.getresponse().status
    except ConnectionRefusedError:
        return 0
    finally:
        connection.close()


def other_addresses() -> list[str]:
    """This machine's addresses that are not loopback."""
    return [word for word in run(["hostname", "-I"]).stdout.split() if "." in word]


def test_only_this_machine_reaches_it_and_only_with_the_token(
    project: Project, address: str
) -> None:
    token = urlsplit(address).query.removeprefix("token=")
    assert len(token) > 20
    assert asked("127.0.0.1", project.port, "/api/contents") == 403
    assert asked("127.0.0.1", project.port, f"/api/contents?token={token}") == 200
    assert other_addresses(), "this machine has no other address to try"
    for other in other_addresses():
        assert asked(other, project.port, "/api") == 0, other


def test_it_has_no_right_that_it_does_not_need(project: Project, address: str) -> None:
    """No capability, no new privilege, nothing of the file system to write but its volumes."""
    status = project.sh("cat /proc/self/status")
    assert re.search(r"^CapBnd:\s+0+$", status, re.M), status
    assert re.search(r"^NoNewPrivs:\s+1$", status, re.M), status
    assert "Read-only" in project.sh("touch /opt/x /usr/x /home/learner/x 2>&1 || true")
    assert "docker.sock" not in project.sh("cat /proc/self/mountinfo")


@pytest.mark.parametrize("name", NAMES)
def test_a_lab_runs_in_a_browser(
    page: Page,
    project: Project,
    address: str,
    folder: Path,  # noqa: F811  (the fixture)
    name: str,
) -> None:
    """Solved, each cell runs without an error, on hosts inside the container; in both themes."""
    keep_all_cells(page, address)
    put(project, folder / "solved" / f"{name}.ipynb", f"/work/{name}-solved.ipynb")
    open_notebook(page, address, f"{name}-solved.ipynb")
    run_all(page)
    notebook = saved(page, project, f"/work/{name}-solved.ipynb")
    errors = [o["evalue"] for o in outputs(notebook) if o.output_type == "error"]
    assert not errors, errors
    ran_without_an_error(notebook)
    assert "rxe_alice" in json.dumps(outputs(notebook))
    open_notebook(page, address, f"{name}-solved.ipynb")  # as it was saved, all of it
    looks_right(page, notebook, f"container-{name}")


def put(project: Project, file: Path, target: str) -> None:
    """Copy a file into the container, as its user."""
    command = [project.engine.program, "exec", "-i", project.container, "tee", target]
    subprocess.run(
        command,
        input=file.read_bytes(),
        env=project.engine.env,
        stdout=subprocess.DEVNULL,
        check=True,
        timeout=60,
    )


def saved(page: Page, project: Project, path: str) -> NotebookNode:
    """The notebook as it is in the container after a save."""
    before = project.sh(f"stat -c %y {path}")
    page.keyboard.press("Control+s")
    end = time.monotonic() + 60
    while time.monotonic() < end:
        page.wait_for_timeout(500)
        if project.sh(f"stat -c %y {path}") != before:
            return nbformat.reads(project.sh(f"cat {path}"), as_version=4)
    raise AssertionError("the notebook was not saved")


def test_b70_a_server_that_is_killed_comes_back_with_the_work(
    project: Project, address: str
) -> None:
    """B70, B61: killed as a memory limit or a culler kills; the next start has work and hosts."""
    project.sh("echo kept > /work/mine.txt; rdmalab up >&2")
    processes = on_the_machine(project)
    assert any("qemu-system" in name for name in processes.values()), processes
    project.engine("kill", project.container)
    assert gone(processes)
    project.up()
    assert project.sh("cat /work/mine.txt") == "kept"
    state = json.loads(project.sh("rdmalab up --json"))
    assert len(state["hosts"]) == 2
    assert state["restored"]


def test_an_upgrade_keeps_what_a_learner_wrote(
    project: Project, address: str, tmp_path: Path
) -> None:
    """A changed notebook stays, its new version lies beside it; an untouched one is the new one."""
    edit = 's/"nbformat": 4/"mine": "yes", "nbformat": 4/'
    project.sh(f"sed -i '{edit}' /work/{NAMES[0]}.ipynb; echo kept > /work/mine.txt")
    (tmp_path / "Dockerfile").write_text(NEXT.format(image=project.image))
    old, project.image = project.image, f"{project.image}-next"
    try:
        project.engine("build", "--tag", project.image, str(tmp_path))
        project.up()
        assert '"mine": "yes"' in project.sh(f"cat /work/{NAMES[0]}.ipynb")
        assert "new hosts" not in project.sh(f"cat /work/{NAMES[0]}.ipynb")
        assert "new hosts" in project.sh(f"cat /work/{NAMES[0]}.new.ipynb")
        assert project.sh("cat /work/mine.txt") == "kept"
        assert f"{NAMES[0]}.ipynb is as you left it" in project.compose("logs", "--no-color")
        assert json.loads(project.sh("rdmalab up --json"))["restored"]
    finally:
        project.compose("down")
        project.engine("rmi", project.image)
        project.image = old


def test_down_leaves_nothing(project: Project, address: str) -> None:
    """`down` keeps the work, `down --volumes` keeps nothing: no process, volume, network."""
    project.up()
    project.sh("echo kept > /work/mine.txt")
    project.compose("down")
    project.up()
    assert project.sh("cat /work/mine.txt; rdmalab up >&2") == "kept"
    processes = on_the_machine(project)
    assert any("qemu-system" in name for name in processes.values()), processes
    project.compose("down", "--volumes")
    assert project.left() == ""
    assert gone(processes)


def on_the_machine(project: Project) -> dict[str, str]:
    """The container's processes as this machine numbers them: pid to name."""
    lines = project.engine("top", project.container, "-eo", "pid,comm").splitlines()[1:]
    return {line.split()[0]: line.split(None, 1)[1] for line in lines}


def gone(processes: dict[str, str]) -> bool:
    """Whether all of them end, within some seconds."""
    end = time.monotonic() + 15
    while time.monotonic() < end:
        if not [pid for pid, name in processes.items() if comm(pid) == name]:
            return True
        time.sleep(0.2)
    return False


def comm(pid: str) -> str:
    """The name of the process that has this pid now; empty if there is none, or it is a zombie."""
    try:
        status = Path("/proc", pid, "status").read_text()
    except OSError:
        return ""
    return "" if "\nState:\tZ" in status else Path("/proc", pid, "comm").read_text().strip()
