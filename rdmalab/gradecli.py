"""``rdmalab grade``: submitted notebooks in, points, sentences and pages out."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from .errors import MachineError, UsageError
from .hostcli import Json, say

if TYPE_CHECKING:
    from rich.console import Console

    from .grading.classroom import Classroom
    from .grading.results import SubmissionResult
    from .grading.runner import Limits

__all__ = ["grade"]

Heard = Callable[["SubmissionResult", bool], None]


def grade(
    notebooks: Annotated[
        list[Path], typer.Argument(help="Notebooks, or folders with notebooks in them.")
    ],
    lab: Annotated[
        str | None,
        typer.Option(help="Which lab all must be of, such as 01 (default: as they say)."),
    ] = None,
    out: Annotated[Path, typer.Option(help="Where results go.")] = Path("graded"),
    jobs: Annotated[int, typer.Option(min=1, max=64, help="So many at the same time.")] = 1,
    gradescope: Annotated[
        Path | None, typer.Option(help="Write Gradescope's results.json (one notebook).")
    ] = None,
    cell_seconds: Annotated[float, typer.Option(min=1, help="The most for one cell.")] = 120,
    notebook_seconds: Annotated[float, typer.Option(min=1, help="The most in all.")] = 1800,
    as_json: Json = False,
) -> None:
    """Grade submitted notebooks, each on fresh hosts, without trusting what is in them.

    OUT/results.csv is the class, OUT/results/ is for the instructor, OUT/feedback/ for learners.
    What was graded before and has not changed is not run again.
    """
    from .grading.runner import Limits

    files = list(submissions(notebooks))
    if gradescope is not None and len(files) != 1:
        raise UsageError(f"--gradescope takes one notebook, not {len(files)}.")
    room = classroom(lab, out, Limits(cell_s=cell_seconds, notebook_s=notebook_seconds))
    with progress(len(files)) as heard:
        results = room.grade(files, jobs, heard)
    if gradescope is not None:
        write_gradescope(gradescope, results[0])
    if as_json:
        document = {"results": [result.as_dict() for result in results], "out": str(out)}
        print(json.dumps(document, indent=2))
    else:
        show(results, out)
    failed = [result.name for result in results if not result.graded]
    if failed:
        raise MachineError(
            f"{len(failed)} of {len(results)} could not be graded.",
            next_step="The same command tries these again; what is done is not done again.",
        )


def classroom(lab: str | None, out: Path, limits: Limits) -> Classroom:
    """What grades, with the labs that ``rdmalab lab`` would open."""
    from .grading.classroom import Classroom
    from .grading.course import Course
    from .notebook import labs_folder

    course = Course(labs_folder())
    return Classroom(course, out, course.find(lab) if lab else "", limits, say)


def submissions(words: list[Path]) -> Iterator[Path]:
    """The notebooks that words name, each once; a folder stands for those below it."""
    seen = set()
    for word in words:
        if not word.exists():
            raise UsageError(f"There is no {word}.", next_step="Name notebooks, or a folder.")
        found = sorted(word.rglob("*.ipynb")) if word.is_dir() else [word]
        if not found:
            raise UsageError(f"There is no notebook in {word}.")
        for file in found:
            if ".ipynb_checkpoints" not in file.parts and file.resolve() not in seen:
                seen.add(file.resolve())
                yield file


@contextlib.contextmanager
def progress(total: int) -> Iterator[Heard]:
    """A bar over the class on a terminal's stderr, a line for each submission elsewhere."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    columns = (TextColumn("grading"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as bar:
        task = bar.add_task("grading", total=total)
        done = 0

        def heard(result: SubmissionResult, new: bool) -> None:
            nonlocal done
            done += 1
            bar.advance(task)
            if console.is_terminal:
                bar.console.print(line(result, new), markup=False, highlight=False)
            else:
                say(f"{done} of {total}: {line(result, new)}")

        yield heard


def line(result: SubmissionResult, new: bool) -> str:
    """One submission in a line."""
    if not result.graded:
        return f"{result.name}: could not be graded"
    points = f"{result.score:g} of {result.points:g} points" if result.points else "0 points"
    how = f"{result.seconds:.0f} s" if new else "graded before"
    return f"{result.name}: {points} ({how}){'. ' + result.problem if result.problem else ''}"


def write_gradescope(file: Path, result: SubmissionResult) -> None:
    """Gradescope's file, which holds what the learner may see."""
    from .grading.results import gradescope

    try:
        file.write_text(json.dumps(gradescope(result), indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise MachineError(f"{file} cannot be written: {error.strerror}.") from None


def show(results: list[SubmissionResult], out: Path, console: Console | None = None) -> None:
    """The class as a table, by lab, with the mean of each task."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    console = console or Console()
    for lab in dict.fromkeys(result.lab for result in results):
        members = [result for result in results if result.lab == lab]
        tasks = list(dict.fromkeys(task.task for member in members for task in member.tasks))
        table = Table(title=Text(lab or "of no lab"), title_justify="left")
        table.add_column("submission", overflow="fold")
        for name in (*tasks, "points"):
            table.add_column(name, justify="right")
        table.add_column("remarks", overflow="fold")
        for member in members:
            table.add_row(*map(Text, row(member, tasks)))
        if len(members) > 1:
            table.add_section()
            table.add_row(*map(Text, means(members, tasks)))
        console.print(table)
    console.print(f"Results are in {out}; {out}/feedback is for the learners.", markup=False)


def row(result: SubmissionResult, tasks: list[str]) -> list[str]:
    """One submission's cells."""
    scores = {task.task: f"{task.score:g}" for task in result.tasks}
    total = f"{result.score:g}/{result.points:g}" if result.graded else "-"
    remark = result.problem or (result.notes[0] if result.notes else "")
    more = f" (and {len(result.notes) - 1} more)" if len(result.notes) > 1 else ""
    return [result.name, *(scores.get(task, "") for task in tasks), total, remark + more]


def means(results: list[SubmissionResult], tasks: list[str]) -> list[str]:
    """The last row: the mean of each column."""

    def mean(values: list[Any]) -> str:
        return f"{sum(values) / len(values):.1f}" if values else ""

    graded = [result for result in results if result.graded]
    by_task = [[t.score for r in graded for t in r.tasks if t.task == task] for task in tasks]
    return ["mean", *map(mean, by_task), mean([result.score for result in graded]), ""]
