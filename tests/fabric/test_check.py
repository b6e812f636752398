"""`rdmalab check`: a learner's notebook on fresh hosts, judged by the lab's public checks.

From the pains' list: B45 (a kernel that ends), B46 (the timeout), B50 (a foreign kernel's name).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

from rdmalab import lab as labs
from rdmalab.checkcli import found
from rdmalab.errors import UsageError
from rdmalab.grading.course import LabForms

from .small_lab import ANSWERS, NAME, answered, labs_with_it

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("check") / "labs"


@pytest.fixture(scope="module")
def lab(folder: Path) -> LabForms:
    return labs_with_it(folder)


def command(folder: Path, *words: str) -> tuple[list[str], dict[str, str]]:
    env = {**os.environ, "RDMALAB_LABS": str(folder)}
    return [sys.executable, "-m", "rdmalab", "check", *words], env


def check(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    line, env = command(folder, *words)
    return subprocess.run(
        line, env=env, capture_output=True, text=True, timeout=250, stdin=subprocess.DEVNULL
    )


def saved(notebook: NotebookNode, path: Path) -> str:
    nbformat.write(notebook, path)
    return str(path)


def checks_of(document: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {check["check"]: check for task in document["tasks"] for check in task["checks"]}


def nothing_is_left() -> bool:
    return not [name for name in labs.known() if name.startswith("check-")]


def test_all_right_is_said_and_the_exit_code_is_0(
    folder: Path, lab: LabForms, tmp_path: Path
) -> None:
    """Also under another name, and with a kernel of which this machine has never heard (B50)."""
    notebook = answered(lab, ANSWERS)
    notebook.metadata.kernelspec = {"name": "nope", "display_name": "Python [root]"}
    done = check(folder, saved(notebook, tmp_path / "my copy (2).ipynb"))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "I looked at `total`, which is 42." in done.stdout
    assert "3 of 3 checks passed: 6 of 6 points." in done.stdout
    assert nothing_is_left()


def test_what_is_not_answered_is_told_by_each_checks_own_sentence(
    folder: Path, lab: LabForms
) -> None:
    """By the lab's number, on hosts that know nothing of an earlier, solved run."""
    done = check(folder, "90", "--json")
    assert done.returncode == 1
    document = json.loads(done.stdout)
    assert (document["lab"], document["score"], document["max_score"]) == (NAME, 0, 6)
    reasons = [check["reason"] for check in checks_of(document).values()]
    assert reasons == [
        "`total` is still None: nothing was added.",
        "`greeting` is still None: alice says nothing.",
        "`echo` is still None: bob is silent.",
    ]


def test_the_labs_own_checks_are_run_whatever_became_of_them(
    folder: Path, lab: LabForms, tmp_path: Path
) -> None:
    notebook = answered(lab, {"sum": "total = 1.5", "echo": ANSWERS["echo"]})
    cells = {cell.id: cell for cell in notebook.cells}
    cells["sum-value"].source = "assert True"
    notebook.cells.remove(cells["echo-text"])
    done = check(folder, saved(notebook, tmp_path / "mine.ipynb"), "--json")
    document = json.loads(done.stdout)
    judged = checks_of(document)
    assert judged["sum-value"]["reason"] == "`total` should be a whole number."
    assert judged["echo-text"]["verdict"] == "passed"
    assert document["score"] == 3
    assert any("sum-value had been edited" in note for note in document["notes"])
    assert any("echo-text was missing" in note for note in document["notes"])


@pytest.mark.long
def test_a_cell_that_overruns_is_stopped_and_a_dead_kernel_is_named(
    folder: Path, lab: LabForms, tmp_path: Path
) -> None:
    """B45, B46: what was not run has no points and says why; the rest has been judged."""
    answers = {
        "sum": "total = 42\nimport time\ntime.sleep(600)",
        "greeting": "greeting = 'hello from alice'",
        "echo": ANSWERS["echo"],
    }
    notebook = answered(lab, answers)
    at = next(n for n, cell in enumerate(notebook.cells) if cell.id == "echo")
    notebook.cells.insert(at, nbformat.v4.new_code_cell("import os\nos._exit(0)"))
    begun = time.monotonic()
    path = saved(notebook, tmp_path / "mine.ipynb")
    done = check(folder, path, "--timeout", "15", "--json")
    assert time.monotonic() - begun < 200
    judged = checks_of(json.loads(done.stdout))
    assert done.returncode == 1
    assert judged["sum-value"]["verdict"] == "passed"
    assert judged["greeting-text"]["verdict"] == "passed"
    assert judged["echo-text"]["verdict"] == "not run"
    assert "kernel ended in the cell that begins with 'import os'" in judged["echo-text"]["reason"]


def test_without_sources_the_notebooks_own_checks_are_run_and_edits_named(
    lab: LabForms, tmp_path: Path
) -> None:
    """As on a hub, where learners have the notebook and nothing else."""
    notebook = answered(lab, {"sum": "total = 42"})
    for cell in notebook.cells:
        if cell.id == "greeting-text":
            cell.source = "assert True"
    saved(notebook, tmp_path / f"{NAME}.ipynb")
    done = check(tmp_path, "90", "--json")
    document = json.loads(done.stdout)
    assert [one["score"] for one in checks_of(document).values()] == [2, 1, 0]
    assert document["notes"] == ["The check greeting-text was edited; grading runs the lab's own."]


def test_ctrl_c_ends_it_and_leaves_nothing(folder: Path, lab: LabForms, tmp_path: Path) -> None:
    notebook = answered(lab, {"sum": "import time\nprint('asleep')\ntime.sleep(600)"})
    marker = tmp_path / "asleep"
    at = next(n for n, cell in enumerate(notebook.cells) if cell.id == "sum")
    notebook.cells[at].source = f"open({str(marker)!r}, 'w').close()\nimport time\ntime.sleep(600)"
    line, env = command(folder, saved(notebook, tmp_path / "mine.ipynb"))
    running = subprocess.Popen(line, env=env, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
    end = time.monotonic() + 120
    while not marker.exists():
        assert time.monotonic() < end and running.poll() is None
        time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    _, err = running.communicate(timeout=60)
    assert running.returncode == 130
    assert err.decode().endswith("rdmalab: interrupted.\n")
    assert nothing_is_left()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "no notebook"),
        ('{"cells": 3}', "no notebook"),
        (json.dumps(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1")])), "no lab"),
    ],
)
def test_what_is_no_notebook_of_a_lab_is_refused(
    folder: Path,
    lab: LabForms,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    text: str,
    said: str,
) -> None:
    monkeypatch.setenv("RDMALAB_LABS", str(folder))
    path = tmp_path / "mine.ipynb"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        found(str(path))
