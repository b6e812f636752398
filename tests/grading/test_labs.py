"""The labs, graded: solved, half solved, untouched; alone, in any order, under load."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from nbgrader.api import Gradebook

from rdmalab.grading.classroom import Classroom
from rdmalab.grading.course import Course, LabForms
from rdmalab.grading.machine import LabMachine
from rdmalab.grading.results import Outcome, SubmissionResult
from rdmalab.grading.runner import Limits

from .many import LABS, answered, hand_in, make_course, solved

pytestmark = [pytest.mark.labs, pytest.mark.timeout(1500)]

WHOLE = "01_register_memory"
NAMES = sorted(file.stem for file in (LABS / "source").glob("0*.py"))


@pytest.fixture(scope="module")
def course() -> Course:
    return Course(LABS)


@pytest.fixture
def raised(monkeypatch: pytest.MonkeyPatch) -> list[Outcome]:
    """What did not go well of the cells that are run on the desk."""
    found: list[Outcome] = []
    run = LabMachine.run

    def watched(self: LabMachine, source: str, limits: Limits, *, ours: bool) -> Outcome:
        outcome = run(self, source, limits, ours=ours)
        found.extend([outcome] if outcome.ended != "ok" else [])
        return outcome

    monkeypatch.setattr(LabMachine, "run", watched)
    return found


def grade(course: Course, out: Path, files: list[Path], jobs: int = 1) -> list[SubmissionResult]:
    results = Classroom(course, out).grade(files, jobs, lambda result, new: None)
    assert all(result.graded for result in results), [result.notes for result in results]
    return results


def scores(result: SubmissionResult) -> dict[str, float]:
    return {task.task: task.score for task in result.tasks}


def full(lab: LabForms, tasks: list[str]) -> dict[str, float]:
    """All points for these tasks, and none for the others."""
    return {
        task: sum(
            points
            for check, points in lab.points.items()
            if task in tasks and check.startswith(f"{task}-")
        )
        for task in lab.tasks
    }


def first_half(lab: LabForms) -> list[str]:
    """After these nothing has to be run any more, which saves time (`forms` has every other)."""
    return list(lab.tasks)[: len(lab.tasks) // 2]


def forms(lab: LabForms) -> dict[str, list[str]]:
    """Who has solved which tasks: student to tasks."""
    return {"all": list(lab.tasks), "half": list(lab.tasks)[::2], "none": []}


def told(result: SubmissionResult, out: Path) -> str:
    """All that a learner receives."""
    page = (out / "feedback" / f"{result.name}.html").read_text()
    return page + json.dumps(result.as_dict()["feedback"])


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES)
def test_solved_has_all_untouched_none_and_half_its_half(
    name: str, course: Course, tmp_path: Path, raised: list[Outcome]
) -> None:
    """And no cell of the solved one raises: labs run at the desk as beside JupyterLab."""
    lab = course.lab(name)
    half = forms(lab)["half"]
    files = [
        hand_in(tmp_path / f"{what}.ipynb", solved(course, name, tasks))
        for what, tasks in forms(lab).items()
    ]
    results = grade(course, tmp_path / "out", files[:1])
    assert not raised
    results += grade(course, tmp_path / "out", files[1:])
    reasons = [
        (check.check, check.reason)
        for result in results[:2]
        for task in result.tasks
        for check in task.checks
        if check.score < check.points
    ]
    assert scores(results[0]) == full(lab, list(lab.tasks)), reasons
    assert scores(results[1]) == full(lab, half), reasons
    assert scores(results[2]) == full(lab, [])
    assert [result.machines for result in results] == [1, 1, 0]
    secrets = [line.strip() for line in lab.hidden.splitlines() if len(line.strip()) > 25]
    answers = [
        line.strip()
        for cell in solved(course, name, half).cells
        for line in cell.source.splitlines()
    ]
    for result in results:
        text = told(result, tmp_path / "out")
        leaked = [s for s in secrets if s in text and not (result.name == "all" or s in answers)]
        assert not leaked


def points_of(course: Path, name: str) -> dict[str, dict[str, float]]:
    """What nbgrader's gradebook has: student to task to points."""
    found: dict[str, dict[str, float]] = {}
    with Gradebook(f"sqlite:///{course / 'gradebook.db'}") as book:
        for handed_in in book.assignment_submissions(name):
            tasks = found.setdefault(handed_in.student.id, {})
            for grade in handed_in.notebooks[0].grades:
                task = grade.name.rpartition("-")[0]
                tasks[task] = tasks.get(task, 0) + grade.score
    return found


@pytest.mark.long
@pytest.mark.parametrize("name", NAMES[1:])
def test_nbgrader_gives_the_points_that_rdmalab_grade_gives(name: str, tmp_path: Path) -> None:
    """A course made and graded by the guide's commands; the whole of one lab, half of others."""
    folder = tmp_path / "labs"
    shutil.copytree(LABS, folder, ignore=shutil.ignore_patterns("course", "private", "0*.ipynb"))
    course = Course(folder)
    course.build.build(folder)
    lab = course.lab(name)
    subprocess.run([sys.executable, str(folder / "build.py"), "--course"], check=True, timeout=120)
    nbgrader(folder, "generate_assignment", name)
    handed_in = {"half": first_half(lab), "none": []}
    if name == WHOLE:
        handed_in["all"] = list(lab.tasks)
    for who, tasks in handed_in.items():
        place = folder / "course" / "submitted" / who / name
        place.mkdir(parents=True)
        hand_in(place / f"{name}.ipynb", solved(course, name, tasks))
    nbgrader(folder, "autograde", name)
    found = points_of(folder / "course", name)
    assert found == {who: full(lab, tasks) for who, tasks in handed_in.items()}


def nbgrader(folder: Path, *words: str) -> None:
    env = {**os.environ, "RDMALAB_LABS": str(folder)}
    line = [sys.executable, "-m", "nbgrader", *words]
    done = subprocess.run(
        line, cwd=folder, env=env, capture_output=True, text=True, timeout=800, check=False
    )
    assert done.returncode == 0, done.stderr


LEAVES = {
    "one": "import builtins; builtins.two = 1; open('/tmp/two', 'w').write('1')\none = 1",
    "two": "two = 1",
}
FINDS = {
    "one": "one = 1",
    "two": "import builtins, os\ntwo = hasattr(builtins, 'two') or os.path.exists('/tmp/two')",
}


@pytest.mark.fabric
def test_two_submissions_in_either_order_get_the_marks_that_they_get_alone(tmp_path: Path) -> None:
    course = make_course(tmp_path / "labs", {"one": "alice", "two": "alice"})
    leaves = hand_in(tmp_path / "leaves.ipynb", answered(course, LEAVES))
    finds = hand_in(tmp_path / "finds.ipynb", answered(course, FINDS))
    for number, (files, jobs) in enumerate((([leaves, finds], 1), ([finds, leaves], 2))):
        results = grade(course, tmp_path / f"out{number}", files, jobs)
        found = {result.name: scores(result) for result in results}
        assert found["leaves"] == {"one": 1, "two": 1}
        assert found["finds"] == {"one": 1, "two": 0}


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Processes that do nothing but compute."""
    spin = [sys.executable, "-c", "while True: pass"]
    running = [subprocess.Popen(spin) for _ in range(count)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


@pytest.mark.long
def test_b52_a_busy_machine_changes_no_score(course: Course, tmp_path: Path) -> None:
    """B52: the lab that measures time, half solved, three times, once beside computing loops."""
    lab = course.lab("04_tcp_rdma_latency")
    tasks = ["tcp", "send", "percentile"]
    file = hand_in(tmp_path / "half.ipynb", solved(course, lab.name, tasks))
    for number, load in enumerate((0, 2, 0)):
        with busy(load):
            (result,) = grade(course, tmp_path / f"out{number}", [file])
        assert scores(result) == full(lab, tasks), (number, result.notes)
