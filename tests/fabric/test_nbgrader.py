"""nbgrader's own commands on a course of one lab: release, autograde in the sandbox, feedback.

Each trap by which nbgrader loses marks, gives them away or lets hidden tests out is in one of the
submissions. From the pains' list: B45 (a kernel that ends), B47 (hidden tests that leak), B50 (a
foreign kernel's name), B51 (what a submission could reach), B52 (the same points again).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from nbgrader.api import Gradebook

from rdmalab import lab as labs
from rdmalab.grading.course import LabForms
from rdmalab.state import lab_folder

from .small_lab import ANSWERS, NAME, answered, labs_with_it

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(600)]

PRIVATE = """\
# %% check="greeting-text"
# %%on alice
assert len(greeting) == 16, "CANARY three: a private one."
"""
SCRIPT = "<script>fetch('/api/contents')</script>"
POINTS = {"ada": 6, "bea": 0, "cem": 3, "dan": 3, "eve": 0, "fay": 4}


def nbgrader(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "RDMALAB_LABS": str(folder)}
    return subprocess.run(
        [sys.executable, "-m", "nbgrader", *words],
        cwd=folder,
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
        stdin=subprocess.DEVNULL,
    )


def hostile(lab: LabForms, folder: Path) -> NotebookNode:
    """Two right answers among deleted, doubled and edited checks, scripts, and a killed kernel."""
    answers = {
        "sum": "total = 42\nimport sys\nprint('stderr costs marks', file=sys.stderr)",
        "greeting": "greeting = 'hello from alice'\nprint('<script>out()</script>')",
        "echo": "import os\nos._exit(0)",
    }
    notebook = answered(lab, answers)
    cells = {cell.id: cell for cell in notebook.cells}
    notebook.cells.remove(cells["greeting-text"])
    double = nbformat.from_dict(json.loads(json.dumps(cells["sum-value"])))
    double.id, double.source = "double", "6"  # nbgrader would take the number for points
    notebook.cells.append(double)
    cells["echo-text"].source = "assert True"
    notebook.cells.insert(0, nbformat.v4.new_markdown_cell(SCRIPT))
    notebook.cells[-1].outputs = [nbformat.v4.new_output("display_data", {"text/html": SCRIPT})]
    (folder / "more").mkdir()
    (folder / "secret.txt").symlink_to(folder.parents[2] / "gradebook.db")
    (folder / "more" / "notes.txt").write_text("CANARY of another file")
    return notebook


def submit(course: Path, lab: LabForms) -> None:
    """What the class hands in."""
    for student in POINTS:
        folder = course / "submitted" / student / NAME
        folder.mkdir(parents=True)
        if student == "eve":
            (folder / f"{NAME}.ipynb").write_text("This is no notebook.")
            continue
        if student == "dan":
            notebook = hostile(lab, folder)
        else:
            right = {"ada": ANSWERS, "cem": ["sum", "greeting"], "fay": ["greeting", "echo"]}
            chosen = right.get(student, ())
            notebook = answered(lab, {task: ANSWERS[task] for task in chosen})
        if student == "fay":
            notebook.metadata.kernelspec = {"name": "nope", "display_name": "Python [root]"}
        nbformat.write(notebook, folder / f"{NAME}.ipynb")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("nbgrader") / "labs"


@pytest.fixture(scope="module")
def course(folder: Path) -> Iterator[Path]:
    """The course, from the build to the feedback, by the commands that the guide names."""
    lab = labs_with_it(folder)
    (folder / "private").mkdir()
    (folder / "private" / f"{NAME}.py").write_text(PRIVATE)
    build = [sys.executable, str(folder / "build.py"), "--course"]
    subprocess.run(build, check=True, timeout=120, stdout=subprocess.DEVNULL)
    made = nbgrader(folder, "generate_assignment", NAME)
    assert made.returncode == 0, made.stderr
    submit(folder / "course", lab)
    graded = nbgrader(folder, "autograde", NAME)
    assert graded.returncode == 0, graded.stderr
    told = nbgrader(folder, "generate_feedback", NAME)
    assert told.returncode == 0, told.stderr
    yield folder / "course"


def points_of(course: Path) -> dict[str, float]:
    with Gradebook(f"sqlite:///{course / 'gradebook.db'}") as book:
        return {one.student_id: one.score for one in book.assignment_submissions(NAME)}


def texts(folder: Path) -> dict[Path, str]:
    return {
        path: path.read_bytes().decode(errors="replace")
        for path in folder.rglob("*")
        if path.is_file()
    }


def test_the_release_is_the_notebook_in_labs_with_its_pictures(course: Path, folder: Path) -> None:
    """No second form of a lab: what nbgrader hands out is what the repository has."""
    released = course / "release" / NAME
    assert json.loads((released / f"{NAME}.ipynb").read_text()) == json.loads(
        (folder / f"{NAME}.ipynb").read_text()
    )
    assert sorted(str(p.relative_to(released)) for p in released.rglob("*") if p.is_file()) == [
        *(f"{NAME}.ipynb", "images/00_two_hosts.svg"),
    ]


def test_each_submission_has_the_points_that_it_earned(course: Path) -> None:
    """B45, B50: one that ends its kernel, or is no notebook, costs nobody else anything."""
    assert points_of(course) == POINTS
    with Gradebook(f"sqlite:///{course / 'gradebook.db'}") as book:
        waiting = [one.needs_manual_grade for one in book.assignment_submissions(NAME)]
    assert not any(waiting)


def test_nothing_that_a_learner_gets_has_a_hidden_test_or_a_script(course: Path) -> None:
    """B47: nor has what the feedback is made of, nor another's file that lay beside a notebook."""
    found = {}
    for part in ("release", "autograded", "feedback"):
        found |= texts(course / part)
    for student in POINTS:
        found |= texts(course / "graded" / student / "feedback")
    assert len(found) > 3 * len(POINTS)
    for path, text in found.items():
        for word in ("CANARY", "HIDDEN", "SOLUTION", "SQLite", "forty-two"):
            assert word not in text, f"{word} in {path}"
        if path.suffix == ".html":
            assert "fetch('/api/contents')" not in text, path
            assert "<script>out()" not in text, path


def test_the_feedback_says_what_was_wrong(course: Path) -> None:
    def page(student: str) -> str:
        return (course / "feedback" / student / NAME / f"{NAME}.html").read_text()

    assert "nothing was added" in page("bea")
    assert "bob is silent" in page("cem")
    assert "This is no notebook" not in page("eve") and "is no notebook" in page("eve")
    assert "kernel of bob" in page("dan")
    assert "The check greeting-text was missing; it was put back." in page("dan")


def test_the_instructor_reads_the_hidden_tests_sentence(course: Path) -> None:
    result = json.loads((course / "graded" / "cem" / "results" / f"{NAME}.json").read_text())
    assert result["score"] == 3
    assert (course / "graded" / "eve" / "results" / f"{NAME}.json").is_file()


@pytest.mark.long
def test_rdmalab_grade_gives_the_same_points(course: Path, folder: Path, tmp_path: Path) -> None:
    """B52: and gives them again."""
    env = {**os.environ, "RDMALAB_LABS": str(folder)}
    files = [str(course / "submitted" / name / NAME / f"{NAME}.ipynb") for name in POINTS]
    words = ["grade", *files, "--lab", "90", "--out", str(tmp_path / "out"), "--json"]
    done = subprocess.run(
        [sys.executable, "-m", "rdmalab", *words],
        env=env,
        capture_output=True,
        text=True,
        timeout=500,
        stdin=subprocess.DEVNULL,
    )
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)["results"]
    assert dict(zip(POINTS, [one["score"] for one in results], strict=True)) == points_of(course)
    left = [name for name in labs.known() if name.startswith("grade-")]
    assert not left, {name: os.listdir(lab_folder(name)) for name in left}
