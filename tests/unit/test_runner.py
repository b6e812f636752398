"""Steps, verdicts and machines that are lost. The machine here is a Python process, a real one."""

from __future__ import annotations

import pytest

from rdmalab.grading.course import Course
from rdmalab.grading.runner import Limits, Run
from rdmalab.grading.submission import restore

from .small_course import NAME, SOLVED, ProcessMachine, make_course, submission

QUICK = Limits(cell_s=2, machines=5)


@pytest.fixture(scope="module")
def course(tmp_path_factory: pytest.TempPathFactory) -> Course:
    return make_course(tmp_path_factory.mktemp("course") / "labs")


def graded(course: Course, own: tuple[str, str] | None = None, **answers: str) -> Run:
    """Run a submission; ``own``: a cell of the learner's behind a cell of the lab's."""
    lab = course.lab(NAME)
    notebook = submission(course, **answers)
    if own is not None:
        at = next(n for n, cell in enumerate(notebook.cells) if cell.id == own[0])
        cell = {"cell_type": "code", "source": own[1], "metadata": {}, "outputs": []}
        notebook.cells.insert(at + 1, type(notebook)(cell))
    run = Run(lab, restore(notebook, lab.solved, lab.released).steps, ProcessMachine, QUICK)
    run.grade()
    return run


def ended(run: Run) -> list[str]:
    return [run.verdicts[check].ended for check in run.lab.points]


def test_a_solved_lab_passes_and_takes_one_machine(course: Course) -> None:
    run = graded(course, **SOLVED)
    assert ended(run) == ["ok", "ok", "ok"] and run.machines == 1
    assert "I looked at 200" in run.verdicts["double-large"].printed


def test_an_untouched_lab_needs_no_machine(course: Course) -> None:
    run = graded(course)
    assert ended(run) == ["not run"] * 3 and run.machines == 0
    assert {verdict.why for verdict in run.verdicts.values()} == {
        "The task's cell is as it was handed out."
    }


def test_half_a_lab_gets_its_half(course: Course) -> None:
    assert ended(graded(course, double="return 2 * x")) == ["ok", "ok", "not run"]
    assert ended(graded(course, halve="half = 21")) == ["not run", "not run", "ok"]
    assert ended(graded(course, double="return 6", halve="half = 1")) == ["ok", "raised", "raised"]


@pytest.mark.parametrize("end", ["import os; os._exit(0)", "while True: pass"])
def test_b45_a_cell_that_ends_or_freezes_its_kernel_costs_its_own_points_only(
    end: str, course: Course
) -> None:
    """B45: what did not run has no points, and all else is run without that cell."""
    run = graded(course, double=f"return 2 * x\n{end}", halve="half = 21")
    assert ended(run) == ["lost", "lost", "ok"] and run.machines == 2
    assert run.notes[0].startswith("The answer to double") and "without it" in run.notes[0]


def test_a_check_that_ends_its_kernel_costs_its_own_points_only(course: Course) -> None:
    answer = "if x == 100: import os; os._exit(0)\n    return 2 * x"
    run = graded(course, double=answer, halve="half = 21")
    assert ended(run) == ["ok", "lost", "ok"] and run.machines == 2


def test_an_own_cell_that_ends_the_kernel_costs_nothing(course: Course) -> None:
    run = graded(course, own=("double-large", "import os; os._exit(0)"), **SOLVED)
    assert ended(run) == ["ok", "ok", "ok"] and run.machines == 2
    assert "The cell that begins with 'import os; os._exit(0)'" in run.notes[0]


def test_a_given_cell_that_dies_is_not_left_out(course: Course) -> None:
    """What the learner ran last before it is: here, what the lab's own cell calls is deadly."""
    deadly = "from os import _exit\nlooked = lambda value: _exit(3)"
    run = graded(course, own=("double", deadly), **SOLVED)
    assert ended(run) == ["ok", "ok", "ok"] and run.machines == 2
    assert run.notes[0].startswith("The cell that begins with 'from os import _exit'")


def test_there_is_an_end_to_fresh_machines(course: Course) -> None:
    lab = course.lab(NAME)
    notebook = submission(course, **SOLVED)
    bomb = {"cell_type": "code", "source": "import os; os._exit(1)", "metadata": {}}
    notebook.cells[1:1] = [type(notebook)(bomb) for _ in range(9)]
    run = Run(lab, restore(notebook, lab.solved, lab.released).steps, ProcessMachine, QUICK)
    run.grade()
    assert ended(run) == ["not run"] * 3 and run.machines == QUICK.machines


def test_there_is_an_end_to_time(course: Course) -> None:
    lab = course.lab(NAME)
    steps = restore(submission(course, **SOLVED), lab.solved, lab.released).steps
    run = Run(lab, steps, ProcessMachine, Limits(notebook_s=0))
    run.grade()
    assert ended(run) == ["not run"] * 3 and "which is the limit" in run.notes[0]


def test_state_that_is_left_for_an_untouched_task_gives_nothing(course: Course) -> None:
    run = graded(course, double="globals().update(half=21)\n    return 2 * x")
    assert ended(run) == ["ok", "ok", "not run"]


def test_a_check_uses_the_labs_own_functions(course: Course) -> None:
    """B51: the submission makes the checker's functions anew, to say what it likes."""
    fake = "return 7\nclass Yes:\n    __eq__ = lambda *x: True\nlooked = lambda value: Yes()"
    assert ended(graded(course, double=fake)) == ["raised", "raised", "not run"]
