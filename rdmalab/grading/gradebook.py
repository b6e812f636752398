"""nbgrader's autograde through the sandbox: same submissions, same points, nothing run here.

nbgrader would read a submission, run it with the grader's rights, and look at the outputs for
points. ``labs/nbgrader_config.py`` puts these two in the place of the reader and the runner:

:class:`Unread`    nbgrader itself opens no submitted file
:class:`Sandbox`   :class:`~.classroom.Classroom` grades the file, as ``rdmalab grade`` does; what
                   nbgrader gets is the lab as it was handed out, with the learner's code in it and
                   each check's verdict as its output

So an autograded notebook, of which nbgrader makes the feedback, holds no hidden test, no output of
the submission's and none of its markdown, which could be a script for the grader's browser.
"""

from __future__ import annotations

import copy
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import nbformat
from nbconvert.exporters import NotebookExporter
from nbformat import NotebookNode
from nbgrader.api import Gradebook, MissingEntry
from nbgrader.coursedir import CourseDirectory
from nbgrader.preprocessors import NbGraderPreprocessor

from ..errors import MachineError, UsageError
from ..notebook import labs_folder
from .classroom import Classroom
from .course import Course, LabForms
from .results import PASSED, CheckResult, SubmissionResult
from .submission import Step, read, restore

__all__ = ["Sandbox", "Unread", "annotated", "find_programs", "without_links"]

Resources = dict[str, Any]
make: Any = nbformat.v4  # has no types
NOTES = "# What was noticed while this notebook was graded"
KEPT = ("timestamp.txt",)  # by which nbgrader knows when a submission came


def find_programs() -> None:
    """Put this Python's own programs on PATH: nbgrader calls ``alembic`` by that bare name."""
    places = os.environ.get("PATH", os.defpath).split(os.pathsep)
    own = str(Path(sys.executable).parent)
    if own not in places:
        os.environ["PATH"] = os.pathsep.join([own, *places])


class Unread(NotebookExporter):
    """nbgrader's reader of submitted files, which reads none: :class:`Sandbox` does."""

    def from_filename(
        self, filename: str, resources: Any = None, **kw: Any
    ) -> tuple[NotebookNode, Resources]:
        """An empty notebook, through the preprocessors."""
        convert: Any = self.from_notebook_node  # has no types
        found: tuple[NotebookNode, Resources] = convert(make.new_notebook(), resources, **kw)
        return found


class Sandbox(NbGraderPreprocessor):  # type: ignore[misc]  # nbgrader has no types
    """Grades one submission; the notebook that comes out has its verdicts as outputs."""

    def preprocess(self, nb: NotebookNode, resources: Resources) -> tuple[NotebookNode, Resources]:
        """Grade the submitted file. Raises :class:`RdmalabError` if this machine cannot.

        nbgrader then leaves the submission as not graded, goes on, and says so at its end.
        """
        about = resources["nbgrader"]
        student, assignment, name = (about[k] for k in ("student", "assignment", "notebook"))
        places = CourseDirectory(parent=self)
        submitted, autograded = (
            Path(places.format_path(step, student, assignment))
            for step in (places.submitted_directory, places.autograded_directory)
        )
        course = Course(labs_folder())
        lab = known(course, name)
        agree(about["db_url"], assignment, lab)
        only_ours(autograded, Path(places.format_path(places.source_directory, ".", assignment)))
        room = Classroom(
            course, Path(places.root) / "graded" / student, lab=name, say=self.log.info
        )
        file = submitted / f"{name}.ipynb"
        (result,) = room.grade([file], 1, lambda result, new: None)
        if not result.graded:
            raise MachineError(f"{student}'s {name} could not be graded: {' '.join(result.notes)}")
        return annotated(lab, steps_of(file, lab), result), resources


def known(course: Course, name: str) -> LabForms:
    """The lab of this name; an error that says what to do with other assignments."""
    if name not in course.names:
        raise UsageError(
            f"{name} is no lab of {course.folder}, and nothing else is graded here.",
            next_step="Keep other assignments in a course of their own, with nbgrader's own rules.",
        )
    return course.lab(name)


def agree(db_url: str, assignment: str, lab: LabForms) -> None:
    """Refuse to grade by other checks or points than the gradebook has for what was handed out."""
    try:
        with Gradebook(db_url) as book:
            cells = book.find_notebook(lab.name, assignment).grade_cells
            points = {cell.name: cell.max_score for cell in cells}
    except MissingEntry:
        points = {}
    if points != lab.points:
        raise UsageError(
            f"The checks of {lab.name} are not those that the gradebook has for {assignment}.",
            next_step="Has the lab changed since it was handed out? Go back to that version, or"
            f" run: python labs/build.py --course && nbgrader generate_assignment {assignment}"
            " --force",
        )


def only_ours(folder: Path, source: Path) -> None:
    """Take files away that a learner put beside the notebook: nbgrader would hand them on."""
    for path in [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]:
        inside = path.relative_to(folder)
        ours = path.suffix == ".ipynb" or str(inside) in KEPT or (source / inside).is_file()
        if path.is_symlink() or not ours:
            path.unlink()


def without_links(*, notebooks: Sequence[str], **more: Any) -> None:
    """Before nbgrader copies a submission: take away what is no file but leads to one.

    A link in a submission can point to anything that the grader may read.
    """
    for folder in {Path(notebook).parent for notebook in notebooks}:
        for path in [path for path in folder.rglob("*") if path.is_symlink()]:
            path.unlink()


def steps_of(file: Path, lab: LabForms) -> list[Step]:
    """The learner's cells in the lab's order; of what is no notebook, none."""
    try:
        return restore(read(file), lab.released, lab.released).steps
    except UsageError:
        return []


def annotated(lab: LabForms, steps: Sequence[Step], result: SubmissionResult) -> NotebookNode:
    """The lab as handed out, with the learner's code and, as outputs, what the checks found."""
    notebook = copy.deepcopy(lab.released)
    checks = {check.check: check for task in result.tasks for check in task.checks}
    mine = {step.id: step.source for step in steps}
    own = own_cells(steps)
    cells = [noted(result)] if result.notes or result.problem else []
    cells += own.get("", [])
    for cell in notebook.cells:
        if cell.id in checks:
            cell.outputs = list(outputs(checks[cell.id]))
        elif cell.cell_type == "code" and cell.id in mine:
            cell.source = mine[cell.id]
        cells += [cell, *own.get(cell.id, [])]
    notebook.cells = cells
    return notebook


def own_cells(steps: Sequence[Step]) -> dict[str, list[NotebookNode]]:
    """The cells that a learner has added, by the id of the lab's cell before them."""
    found: dict[str, list[NotebookNode]] = {}
    behind = ""
    for step in steps:
        if step.kind == "own":
            found.setdefault(behind, []).append(make.new_code_cell(step.source, id=step.id))
        else:
            behind = step.id
    return found


def noted(result: SubmissionResult) -> NotebookNode:
    """A cell that says what was amiss with a submission. An output's text is never a script."""
    text = "\n".join(filter(None, [result.problem, *result.notes]))
    cell: NotebookNode = make.new_code_cell(NOTES, id="grading-notes", outputs=[said(text)])
    return cell


def said(text: str) -> NotebookNode:
    """Text that a cell has printed."""
    output: NotebookNode = make.new_output("stream", name="stdout", text=f"{text}\n")
    return output


def outputs(check: CheckResult) -> Iterator[NotebookNode]:
    """A check's verdict as nbgrader reads it: an error gives nothing, anything else all points.

    There is never an empty output, a number or a word on stderr, each of which nbgrader takes for
    a verdict of another kind.
    """
    lines = list(check.told)
    if check.verdict == PASSED:
        yield said("\n".join(lines or ["This check has passed."]))
        return
    if lines:
        yield said("\n".join(lines))
    why = check.reason_told or "This check did not pass."
    name = "NotPassed" if check.verdict != "not run" else "NotRun"
    yield make.new_output("error", ename=name, evalue=why, traceback=[f"{name}: {why}"])
