"""``make setup`` in three stages: in order, once, and anew exactly when something has changed.

The Makefile is the real one; Python, pip and rdmalab are scripts that write down each call.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]

PYTHON = """#!/bin/sh
case "$*" in
  -V) cat "$HERE/version" ;;
  "-m rdmalab.doctor"*) echo "$*" >> "$HERE/calls"; [ ! -e "$HERE/no-doctor" ] ;;
  "-m venv"*)
    echo "$*" >> "$HERE/calls"
    rm -rf .venv; mkdir -p .venv/bin
    cp "$HERE/tool" .venv/bin/python; cp "$HERE/tool" .venv/bin/rdmalab ;;
esac
"""

TOOL = """#!/bin/sh
echo "$(basename "$0") $*" >> "$HERE/calls"
case "$*" in *pip*) [ ! -e "$HERE/no-network" ] ;; esac
"""

SYSTEM = "-m rdmalab.doctor --fix --system"
VENV = "-m venv --clear .venv"
PIP = "python -m pip install --quiet --progress-bar off --editable .[test]"
IMAGE = "rdmalab image build"


class Checkout:
    """A folder with the Makefile, and beside it what its programs write down."""

    def __init__(self, folder: Path) -> None:
        self.here = folder
        self.folder = folder / "checkout"
        self.folder.mkdir()
        for name in ("Makefile", "pyproject.toml"):
            shutil.copy(ROOT / name, self.folder)
        for name, text in (("python", PYTHON), ("tool", TOOL)):
            (folder / name).write_text(text)
            (folder / name).chmod(0o755)
        (folder / "version").write_text("Python 3.13.5\n")

    def make(self, *targets: str) -> subprocess.CompletedProcess[str]:
        """Run make, as nobody's child: variables of a make above us would reach it."""
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("MAKE", "MFLAGS"))}
        (self.here / "calls").write_text("")
        return subprocess.run(
            ["make", f"PYTHON={self.here}/python", *targets],
            cwd=self.folder,
            env={**clean, "HERE": str(self.here), "LC_ALL": "C"},
            capture_output=True,
            text=True,
            timeout=60,
        )

    def calls(self) -> list[str]:
        return (self.here / "calls").read_text().splitlines()


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    return Checkout(tmp_path)


def test_the_first_time_all_three_stages(checkout: Checkout) -> None:
    done = checkout.make("setup")
    assert done.returncode == 0, done.stderr
    assert checkout.calls() == [SYSTEM, VENV, PIP, IMAGE]
    assert done.stdout.count("\n") == 1, "one line of progress"


def test_the_second_time_only_the_quick_looks(checkout: Checkout) -> None:
    checkout.make("setup")
    os.utime(checkout.folder / "pyproject.toml")  # as `git checkout` does
    done = checkout.make("setup")
    assert checkout.calls() == [SYSTEM, IMAGE] and done.stdout == ""


def test_a_changed_pyproject_fills_the_environment_again(checkout: Checkout) -> None:
    checkout.make("setup")
    with (checkout.folder / "pyproject.toml").open("a") as file:
        file.write("# another dependency\n")
    checkout.make("setup")
    assert checkout.calls() == [SYSTEM, PIP, IMAGE]


def test_another_python_or_another_folder_needs_a_new_environment(checkout: Checkout) -> None:
    """Scripts in .venv/bin name their folder and Python in the first line."""
    checkout.make("setup")
    (checkout.here / "version").write_text("Python 3.14.0\n")
    checkout.make("setup")
    assert checkout.calls() == [SYSTEM, VENV, PIP, IMAGE]
    checkout.folder = checkout.folder.rename(checkout.here / "moved")
    checkout.make("setup")
    assert checkout.calls() == [SYSTEM, VENV, PIP, IMAGE]


def test_where_the_system_cannot_be_mended_nothing_else_is_tried(checkout: Checkout) -> None:
    (checkout.here / "no-doctor").touch()
    assert checkout.make("lab").returncode != 0
    assert checkout.calls() == [SYSTEM]


def test_a_failed_pip_is_said_in_one_sentence_and_tried_again(checkout: Checkout) -> None:
    (checkout.here / "no-network").touch()
    done = checkout.make("setup")
    assert done.returncode != 0
    assert checkout.calls() == [SYSTEM, VENV, PIP]
    said, make = done.stderr.splitlines()
    assert said.startswith("rdmalab: The Python packages could not be installed")
    assert make.startswith("make: ***")
    (checkout.here / "no-network").unlink()
    assert checkout.make("setup").returncode == 0
    assert checkout.calls() == [SYSTEM, PIP, IMAGE], "the environment itself was made already"


def test_the_tests_bring_what_only_they_need(checkout: Checkout) -> None:
    checkout.make("test")
    calls = checkout.calls()
    assert calls[:4] == [f"{SYSTEM} --test", VENV, PIP, IMAGE]
    assert calls[4].startswith("python -m pytest")


def test_lab_starts_what_setup_has_made(checkout: Checkout) -> None:
    checkout.make("lab", "LAB_ARGS=--no-browser")
    assert checkout.calls() == [SYSTEM, VENV, PIP, IMAGE, "rdmalab lab --no-browser"]


def test_clean_stops_the_hosts_before_it_removes_the_way_to_them(checkout: Checkout) -> None:
    checkout.make("setup")
    checkout.make("clean")
    assert checkout.calls() == ["rdmalab down --all"]
    assert not (checkout.folder / ".venv").exists()
    assert checkout.make("clean").returncode == 0, "there may be nothing to clean"


def test_every_target_is_explained(checkout: Checkout) -> None:
    explained = checkout.make("help").stdout
    for target in ("setup", "lab", "test", "bench", "labs", "lint", "clean"):
        assert f"make {target} " in explained
    assert checkout.make().stdout == explained, "`make` alone changes nothing"
