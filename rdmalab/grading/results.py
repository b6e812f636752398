"""What grading found: points and sentences for a submission, and tables for a class.

A score is made from the outcomes of checks alone, and a check counts only if it ran to its end:
what was not run, was stopped or died has no points, and says so.

A result has two sides. ``reason`` and ``printed`` are for the instructor, as they came out of the
check; ``told`` and ``reason_told`` are for the learner and hold nothing that the public form of the
check could not say (:mod:`.sentences`). :func:`for_learner` and :func:`gradescope` use the latter
only.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

__all__ = [
    "CheckResult",
    "Outcome",
    "SubmissionResult",
    "TaskResult",
    "by_task",
    "class_csv",
    "for_learner",
    "gradescope",
    "passed",
]

PASSED, FAILED, NOT_RUN = "passed", "failed", "not run"
CHARACTERS = 4000  # of what a check printed or said that the instructor's result keeps


@dataclass(frozen=True)
class Outcome:
    """How one cell ended.

    ``ended``: ``ok``; ``raised`` (an error or a failed assertion); ``refused`` (what it looked at
    was no honest value); ``stopped`` (it overran and obeyed the interrupt); ``lost`` (a kernel or
    the machine went with it); ``not run``. ``why``: the sentence behind it.
    """

    ended: str
    why: str = ""
    printed: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class CheckResult:
    """One check: its points and what it found. ``told`` and ``reason_told`` may be handed out."""

    check: str
    points: float
    score: float
    verdict: str
    told: tuple[str, ...] = ()
    reason_told: str = ""
    printed: str = ""
    reason: str = ""
    seconds: float = 0.0


@dataclass(frozen=True)
class TaskResult:
    """A task with its checks. ``source``: the learner's own cell; ``title``: its heading."""

    task: str
    title: str
    source: str
    checks: tuple[CheckResult, ...]

    @property
    def score(self) -> float:
        """The points that were given."""
        return sum(check.score for check in self.checks)

    @property
    def points(self) -> float:
        """The points that there are."""
        return sum(check.points for check in self.checks)


@dataclass
class SubmissionResult:
    """One submission, graded.

    ``notes``: what was amiss with the file or while it ran; ``problem``: why there is no more to
    say. ``graded``: False if this machine could not grade it, so that it must be tried again.
    """

    name: str
    file: str
    lab: str = ""
    title: str = ""
    tasks: tuple[TaskResult, ...] = ()
    notes: list[str] = field(default_factory=list)
    problem: str = ""
    graded: bool = True
    seconds: float = 0.0
    cell_seconds: float = 0.0
    machines: int = 0
    key: str = ""

    @property
    def score(self) -> float:
        """The points that were given."""
        return sum(task.score for task in self.tasks)

    @property
    def points(self) -> float:
        """The points that there are."""
        return sum(task.points for task in self.tasks)

    def as_dict(self) -> dict[str, Any]:
        """The instructor's result, as its JSON file has it; ``feedback`` is the learner's part."""
        tasks = [
            {**asdict(task), "score": task.score, "max_score": task.points} for task in self.tasks
        ]
        return {
            "name": self.name,
            "file": self.file,
            "lab": self.lab,
            "score": self.score,
            "max_score": self.points,
            "graded": self.graded,
            "problem": self.problem,
            "notes": self.notes,
            "seconds": round(self.seconds, 1),
            "cell_seconds": round(self.cell_seconds, 1),
            "machines": self.machines,
            "tasks": tasks,
            "title": self.title,
            "key": self.key,
            "feedback": for_learner(self),
        }

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> SubmissionResult:
        """The result that a JSON file holds. Raises KeyError or TypeError for another file."""
        tasks = tuple(
            TaskResult(
                task["task"],
                task["title"],
                task["source"],
                tuple(
                    CheckResult(**{**check, "told": tuple(check["told"])})
                    for check in task["checks"]
                ),
            )
            for task in data["tasks"]
        )
        plain = ("name", "file", "lab", "title", "notes", "problem", "graded", "seconds")
        more = ("cell_seconds", "machines", "key")
        return cls(tasks=tasks, **{name: data[name] for name in (*plain, *more)})


def passed(check: str, points: float, outcome: Outcome | None, **told: Any) -> CheckResult:
    """The result of a check, from how it ended. ``told``: ``told`` and ``reason_told``."""
    if outcome is None or outcome.ended == "not run":
        why = outcome.why if outcome is not None and outcome.why else "This check was not run."
        return CheckResult(check, points, 0, NOT_RUN, reason=short(why), **told)
    well = outcome.ended == "ok"
    why = "" if well else outcome.why or "The check did not pass."
    return CheckResult(
        check,
        points,
        points if well else 0,
        PASSED if well else FAILED,
        printed=short(outcome.printed),
        reason=short(why),
        seconds=round(outcome.seconds, 2),
        **told,
    )


def short(text: str) -> str:
    """A text cut to what a result can hold."""
    text = text.strip()
    return text if len(text) <= CHARACTERS else text[:CHARACTERS] + " [...]"


def by_task(results: Iterable[CheckResult], tasks: Sequence[str]) -> dict[str, list[CheckResult]]:
    """Checks put under their tasks: a check is named after its task, ``TASK-what``."""
    found: dict[str, list[CheckResult]] = {task: [] for task in tasks}
    for result in results:
        owners = [task for task in tasks if result.check.startswith(f"{task}-")]
        found[max(owners, key=len)].append(result)
    return found


def for_learner(result: SubmissionResult) -> dict[str, Any]:
    """What the learner is told, as data; the HTML page says the same."""
    return {
        "lab": result.lab,
        "score": result.score,
        "max_score": result.points,
        "notes": [*result.notes, *filter(None, [result.problem])],
        "tasks": [
            {
                "task": task.task,
                "score": task.score,
                "max_score": task.points,
                "checks": [
                    {
                        "check": check.check,
                        "score": check.score,
                        "max_score": check.points,
                        "verdict": check.verdict,
                        "said": list(check.told),
                        "reason": check.reason_told,
                    }
                    for check in task.checks
                ],
            }
            for task in result.tasks
        ],
    }


def gradescope(result: SubmissionResult) -> dict[str, Any]:
    """The learner's part in the form of Gradescope's ``results.json``."""
    tests = [
        {
            "name": check.check,
            "score": check.score,
            "max_score": check.points,
            "status": "passed" if check.verdict == PASSED else "failed",
            "output": "\n".join([*check.told, *filter(None, [check.reason_told])]),
            "output_format": "text",
            "visibility": "visible",
        }
        for task in result.tasks
        for check in task.checks
    ]
    return {
        "score": result.score,
        "execution_time": round(result.seconds),
        "output": "\n".join([*result.notes, *filter(None, [result.problem])]),
        "output_format": "text",
        "visibility": "visible",
        "tests": tests,
    }


def class_csv(results: Sequence[SubmissionResult]) -> str:
    """The class as a table: one line for each submission, one column for each task."""
    tasks = list(dict.fromkeys(task.task for result in results for task in result.tasks))
    out = io.StringIO()
    writer = csv.writer(out)
    writer.writerow(["name", "file", "lab", "score", "max_score", *tasks, "problem"])
    for result in results:
        scores = {task.task: task.score for task in result.tasks}
        score = result.score if result.graded else ""
        row = [result.name, result.file, result.lab, score, result.points]
        cells = [*row, *(scores.get(task, "") for task in tasks), result.problem]
        writer.writerow([inert(cell) for cell in cells])
    return out.getvalue()


def inert(cell: Any) -> Any:
    """A cell that no spreadsheet takes for a formula: file names are the learners' own choice."""
    if isinstance(cell, str):
        cell = "".join(c if c.isprintable() else "?" for c in cell)
        return f"'{cell}" if cell[:1] in ("=", "+", "-", "@") else cell
    return cell
