"""``rdmalab check``: the public checks of a learner's own notebook, on fresh hosts of its own."""

from __future__ import annotations

import json
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import UsageError
from .hostcli import Json, say
from .notebook import labs_folder

if TYPE_CHECKING:
    from .grading.course import LabForms
    from .grading.results import CheckResult, SubmissionResult

__all__ = ["check"]

CELL_S = 120.0
WIDTH = 96


def check(
    notebook: Annotated[str, typer.Argument(help="A lab's number or name, or a notebook's file.")],
    cell_s: Annotated[float, typer.Option("--timeout", help="Seconds for one cell.")] = CELL_S,
    as_json: Json = False,
) -> None:
    """Run a lab's notebook on fresh hosts, and say what its public checks say. Exit 1: not all."""
    from .grading.rehearsal import Rehearsal
    from .grading.submission import read

    path, lab, notes = found(notebook)
    tell = Teller(lab, quiet=as_json)
    begun = time.monotonic()
    run = Rehearsal(read(path), lab, cell_s=cell_s, tell=tell)
    run.notes += notes
    if not as_json:
        print(f"{lab.title}: {path}", flush=True)
    say("running all cells on fresh hosts ...")
    result = run.run(place(path))
    if as_json:
        seconds = round(time.monotonic() - begun, 1)
        print(json.dumps(document(result, path, seconds), indent=2))
    else:
        print(summary(result))
    raise typer.Exit(0 if result.score == result.points else 1)


def found(words: str) -> tuple[Path, LabForms, list[str]]:
    """The notebook that is meant, its lab, and what is to be said about it."""
    from .grading.course import Course
    from .grading.rehearsal import forms_of
    from .grading.submission import lab_name, read, recognise

    folder = labs_folder()
    course = Course(folder) if (folder / "build.py").is_file() else None
    path = Path(words)
    if path.suffix != ".ipynb":
        path = folder / f"{course.find(words)}.ipynb" if course else numbered(folder, words)
    submitted = read(path)
    name = lab_name(submitted) if course else ""
    if course and name not in course.names:
        name = recognise(submitted, course.released)
    if course and name:
        return path, course.lab(name), []
    forms, notes = forms_of(submitted, path.stem)
    if not forms.points:
        raise UsageError(
            f"{path} is the notebook of no lab: it has no checks.",
            next_step="Take a notebook of the labs, such as 00_meet_your_hosts.ipynb.",
        )
    return path, forms, notes


def numbered(folder: Path, words: str) -> Path:
    """The notebook of a lab in a folder without sources."""
    number = words.zfill(2) if words.isdigit() else words
    for path in sorted(folder.glob("*.ipynb")):
        if number in (path.stem, path.stem.partition("_")[0]):
            return path
    raise UsageError(
        f"There is no lab {words!r} in {folder}.", next_step="Name the notebook's file instead."
    )


def place(path: Path) -> Path:
    """Where to run a notebook: where it lies, or where the files are that its lab reads."""
    folder = path.resolve().parent
    return folder if (folder / "data").is_dir() else labs_folder().resolve()


class Teller:
    """Prints each check's result as it comes."""

    def __init__(self, lab: LabForms, *, quiet: bool) -> None:
        self.lab, self.quiet, self.task = lab, quiet, ""

    def __call__(self, result: CheckResult) -> None:
        if self.quiet:
            return
        task = max((t for t in self.lab.tasks if result.check.startswith(f"{t}-")), key=len)
        if task != self.task:
            self.task = task
            print(f"\n{self.lab.tasks[task]}")
        points = "point" if result.points == 1 else "points"
        verdict = "passed" if result.score else result.verdict.upper()
        print(f"  {verdict:<8} {result.check} ({result.points:g} {points})")
        for line in [*result.told, *filter(None, [result.reason_told])]:
            print(textwrap.fill(line, WIDTH, initial_indent=" " * 11, subsequent_indent=" " * 11))


def summary(result: SubmissionResult) -> str:
    """The last lines: what was amiss, and the points."""
    checks = [check for task in result.tasks for check in task.checks]
    good = sum(check.score > 0 for check in checks)
    lines = ["", *(f"Note: {note}" for note in result.notes)]
    lines += [
        f"{good} of {len(checks)} checks passed: {result.score:g} of {result.points:g} points."
    ]
    lines += ["These are the public checks; whoever grades may have more."]
    return "\n".join(lines)


def document(result: SubmissionResult, path: Path, seconds: float) -> dict[str, Any]:
    """The JSON document."""
    from .grading.results import for_learner

    told = for_learner(result)
    return {"file": str(path), "passed": result.score == result.points, **told, "seconds": seconds}
