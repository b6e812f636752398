"""JupyterLab as a learner starts it, and Debian's Chromium to look at it with."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from playwright.sync_api import Browser, sync_playwright

from rdmalab import lab as labs

LABS = Path(__file__).parents[2] / "labs"
ADDRESS = re.compile(r"http://127\.0\.0\.1:\d+/lab\?token=\w+")
FLAGS = (
    "--no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking"
    " --disable-component-update --disable-sync"
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """Chromium from Debian; nothing is downloaded.

    Closed with its file: as long as it is open playwright has an event loop in this thread, in
    which no notebook of another file's tests could be run.
    """
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("no chromium here; rdmalab doctor --fix --test installs it")
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=FLAGS.split())
        yield chromium
        chromium.close()


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the labs with their solved forms beside them (``solved/``)."""
    folder = tmp_path_factory.mktemp("labs")
    shutil.copytree(LABS, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns(".*"))
    build = [sys.executable, str(LABS / "build.py"), "--solved", str(folder / "solved")]
    subprocess.run(build, check=True, timeout=120, stdout=subprocess.DEVNULL)
    return folder


@pytest.fixture(scope="session")
def jupyterlab(folder: Path) -> Iterator[str]:
    """`rdmalab lab` on that folder; yields the address that it prints, token included."""
    with serving(folder, "browser") as address:
        yield address


@contextmanager
def serving(folder: Path, lab: str) -> Iterator[str]:
    """`rdmalab lab` on a folder, with this lab's hosts; the address that it prints."""
    log = folder.parent / "jupyterlab.log"
    env = {**os.environ, "RDMALAB_LABS": str(folder), "RDMALAB_LAB": lab}
    env["JUPYTER_CONFIG_DIR"] = str(folder.parent / "config")
    setting(
        folder, "notebook-extension/tracker", {"windowingMode": "none"}
    )  # all cells in the page
    with open(log, "wb") as out:
        server = subprocess.Popen(
            [sys.executable, "-m", "rdmalab", "lab", "--no-browser"],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=out,
            start_new_session=True,
        )
    try:
        yield wait_for_address(log, server)
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait(60)
        labs.down(lab)


def setting(folder: Path, name: str, value: dict[str, object]) -> None:
    """A JupyterLab user setting, as its settings editor would write it."""
    file = folder.parent / "config/lab/user-settings/@jupyterlab" / f"{name}.jupyterlab-settings"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(value))


def wait_for_address(log: Path, server: subprocess.Popen[bytes]) -> str:
    end = time.monotonic() + 90
    while time.monotonic() < end and server.poll() is None:
        found = ADDRESS.search(log.read_text(errors="replace"))
        if found:
            return found[0]
        time.sleep(0.2)
    raise AssertionError(f"no address of JupyterLab in:\n{log.read_text(errors='replace')}")
