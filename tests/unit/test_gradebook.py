"""What nbgrader is given of a grading: it must come to the same points, and never to others.

The traps are those by which nbgrader loses or gives away marks (docs/instructors.md names them).
From the pains' list: B45 (a check that never ran), B47 (what a page may hold), B51 (links).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode
from nbgrader.api import Gradebook
from nbgrader.nbgraderformat import MetadataValidator
from nbgrader.utils import determine_grade, is_grade

from rdmalab.errors import UsageError
from rdmalab.grading import gradebook
from rdmalab.grading.course import Course, LabForms
from rdmalab.grading.report import tasks_of
from rdmalab.grading.results import Outcome, SubmissionResult
from rdmalab.grading.submission import Step, restore

LABS = Path(__file__).parents[2] / "labs"
NAME = "00_meet_your_hosts"
make: Any = nbformat.v4


@pytest.fixture(scope="module")
def lab() -> LabForms:
    return Course(LABS).lab(NAME)


def result_of(lab: LabForms, verdicts: dict[str, Outcome], **more: Any) -> SubmissionResult:
    return SubmissionResult("x", "x.ipynb", lab.name, tasks=tasks_of(lab, (), verdicts), **more)


def graded(notebook: NotebookNode) -> dict[str, float]:
    """The points that nbgrader reads from a notebook."""
    return {cell.id: determine_grade(cell)[0] for cell in notebook.cells if is_grade(cell)}


OUTCOMES = [
    (Outcome("ok"), 1),
    (Outcome("ok", printed="I looked at `result`, which should be the completion of a WRITE."), 1),
    (Outcome("ok", printed="7"), 1),  # nbgrader takes a number for partial credit
    (Outcome("raised", "AssertionError: no"), 0),
    (Outcome("raised", ""), 0),
    (Outcome("refused", "A value was not honest."), 0),
    (Outcome("stopped", "did not finish within 120 s."), 0),
    (Outcome("lost", "ended the kernel of desk."), 0),
    (Outcome("not run", ""), 0),
    (None, 0),
]


@pytest.mark.parametrize(("outcome", "share"), OUTCOMES)
def test_nbgrader_reads_the_same_points(
    lab: LabForms, outcome: Outcome | None, share: float
) -> None:
    """B45: a check without an output, which nbgrader gives full marks for, does not exist."""
    verdicts = {check: outcome for check in lab.points if outcome is not None}
    result = result_of(lab, verdicts)
    notebook = gradebook.annotated(lab, [], result)
    assert graded(notebook) == {check: share * points for check, points in lab.points.items()}
    assert sum(graded(notebook).values()) == result.score
    checks = [cell for cell in notebook.cells if is_grade(cell)]
    assert all(cell.outputs for cell in checks)
    assert not [o for c in checks for o in c.outputs if o.get("name") == "stderr"]


def test_the_notebook_is_the_labs_own_with_the_learners_code(lab: LabForms) -> None:
    """Deleted, duplicated, edited and moved cells: nbgrader meets each of the lab's cells once."""
    notebook = make.new_notebook(cells=[dict(cell) for cell in lab.released.cells])
    notebook = nbformat.from_dict(json.loads(json.dumps(notebook)))
    checks = [cell for cell in notebook.cells if is_grade(cell)]
    notebook.cells.remove(checks[0])
    notebook.cells.append(nbformat.from_dict(json.loads(json.dumps(checks[1]))))
    checks[2].source = "print('mine')"
    notebook.cells.append(make.new_markdown_cell("<script>canary()</script>"))
    notebook.cells.append(make.new_code_cell("canary = '<script>'"))
    notebook.cells.reverse()
    restored = restore(notebook, lab.released, lab.released)
    done = gradebook.annotated(lab, restored.steps, result_of(lab, {}, notes=restored.notes))
    MetadataValidator().validate_nb(done)
    assert [c.id for c in done.cells if is_grade(c)] == list(lab.points)
    given = {cell.id: cell.source for cell in lab.released.cells}
    assert all(cell.source == given[cell.id] for cell in done.cells if is_grade(cell))
    assert [c.source for c in done.cells if "canary" in c.source] == ["canary = '<script>'"]
    assert done.metadata == lab.released.metadata


def test_notes_are_the_output_of_a_cell_and_not_markdown(lab: LabForms) -> None:
    result = result_of(lab, {}, notes=["The cell '<script>' did this."], problem="No notebook.")
    first = gradebook.annotated(lab, [Step("own-1", "own", "x = 1", True)], result).cells[0]
    assert (first.cell_type, first.source) == ("code", gradebook.NOTES)
    assert first.outputs[0].text == "No notebook.\nThe cell '<script>' did this.\n"


# --- what lies beside a notebook


@pytest.fixture
def folders(tmp_path: Path) -> tuple[Path, Path, Path]:
    """A secret of the grader's, an assignment's source, and a submission with hostile files."""
    secret = tmp_path / "secret"
    secret.write_text("canary")
    source, submitted = tmp_path / "source", tmp_path / "submitted"
    for folder in (source, submitted):
        (folder / "images").mkdir(parents=True)
        (folder / "images" / "a.svg").write_text("<svg/>")
        (folder / "lab.ipynb").write_text("{}")
    (submitted / "timestamp.txt").write_text("2026-11-29 12:00:00 UTC")
    (submitted / "notes.txt").write_text("mine")
    (submitted / "images" / "b.svg").symlink_to(secret)
    (submitted / "home").symlink_to(tmp_path)
    return secret, source, submitted


def test_links_in_a_submission_are_taken_away_before_nbgrader_follows_them(
    folders: tuple[Path, Path, Path],
) -> None:
    """B51: nbgrader copies what a link leads to, with the grader's rights, into the feedback."""
    secret, _, submitted = folders
    gradebook.without_links(assignment="x", student="*", notebooks=[str(submitted / "lab.ipynb")])
    assert sorted(path.name for path in submitted.rglob("*")) == [
        *("a.svg", "images", "lab.ipynb", "notes.txt", "timestamp.txt"),
    ]
    assert secret.read_text() == "canary"


def test_files_of_a_learners_own_are_not_handed_on(folders: tuple[Path, Path, Path]) -> None:
    secret, source, submitted = folders
    autograded = submitted.parent / "autograded"
    shutil.copytree(submitted, autograded, symlinks=True)
    gradebook.only_ours(autograded, source)
    left = sorted(str(p.relative_to(autograded)) for p in autograded.rglob("*") if p.is_file())
    assert left == ["images/a.svg", "lab.ipynb", "timestamp.txt"]
    assert secret.read_text() == "canary"


# --- the gradebook


def test_a_lab_that_has_changed_since_is_not_graded_by_other_points(
    lab: LabForms, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With nbgrader's programs where only this Python has them (``.venv/bin/nbgrader``)."""
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    gradebook.find_programs()
    url = f"sqlite:///{tmp_path / 'gradebook.db'}"
    with pytest.raises(UsageError, match="not those that the gradebook has"):
        gradebook.agree(url, NAME, lab)
    with Gradebook(url) as book:
        book.add_assignment(NAME)
        book.add_notebook(NAME, NAME)
        for check, points in lab.points.items():
            book.add_grade_cell(check, NAME, NAME, max_score=points, cell_type="code")
    gradebook.agree(url, NAME, lab)
    with Gradebook(url) as book:
        book.find_grade_cell(check, NAME, NAME).max_score += 1
        book.db.commit()
    with pytest.raises(UsageError, match="generate_assignment 00_meet_your_hosts --force"):
        gradebook.agree(url, NAME, lab)


def test_what_is_no_lab_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a course of their own"):
        gradebook.known(Course(LABS), "essay")


# --- the guide


def test_the_guide_has_the_labs_points_and_minutes() -> None:
    guide = (LABS.parent / "docs" / "instructors.md").read_text()
    table = (LABS / "README.md").read_text()
    course = Course(LABS)
    for name in course.names:
        found = course.lab(name)
        title = found.title.removeprefix("Lab ").replace(":", "")
        (row,) = (line for line in guide.splitlines() if line.startswith(f"| {title} |"))
        (other,) = (line for line in table.splitlines() if f"({name}.ipynb)" in line)
        assert row.split(" | ")[1:3] == [
            f"{sum(found.points.values()):g}",
            other.split(" | ")[1],
        ]


def test_the_guides_private_test_fits_its_lab(tmp_path: Path) -> None:
    """What the guide shows is accepted by the build."""
    guide = (LABS.parent / "docs" / "instructors.md").read_text()
    text = guide.partition("```python\n# labs/private/")[2].partition("```")[0]
    name, _, cells = text.partition("\n")
    shutil.copytree(LABS / "source", tmp_path / "source")
    shutil.copy(LABS / "build.py", tmp_path)
    (tmp_path / "private").mkdir()
    (tmp_path / "private" / name).write_text(cells)
    found = Course(tmp_path).lab(name.removesuffix(".py"))
    assert "The one entry there is has index 7." in found.hidden
