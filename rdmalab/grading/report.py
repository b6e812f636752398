"""From the outcomes of a run to a result: points by task, and the sentences for each side."""

from __future__ import annotations

import re
from collections.abc import Sequence

from .apparatus import Apparatus
from .course import HIDDEN, LabForms
from .results import CheckResult, Outcome, TaskResult, by_task, passed
from .sentences import Sentences
from .submission import Step

__all__ = ["tasks_of"]

SOURCE_CHARACTERS = 20_000  # of an answer that is shown again
ERROR = re.compile(r"\A([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning))\b")
UNSEEN = "It holds for what this check shows, and not for something that it does not show."
FAILED = "This check did not pass."


def tasks_of(
    lab: LabForms, steps: Sequence[Step], verdicts: dict[str, Outcome]
) -> tuple[TaskResult, ...]:
    """The lab's tasks with their checks, as a run has found them."""
    public = public_texts(lab)
    results = [
        check_result(lab, check, verdicts.get(check), Sentences(public[check], lab.hidden))
        for check in lab.points
    ]
    mine = {step.id: step.source[:SOURCE_CHARACTERS] for step in steps if step.kind == "task"}
    return tuple(
        TaskResult(task, lab.tasks[task], mine.get(task, ""), tuple(checks))
        for task, checks in by_task(results, list(lab.tasks)).items()
    )


def public_texts(lab: LabForms) -> dict[str, str]:
    """For each check the source that can speak in it: its own, and the functions that it uses."""
    apparatus, found = Apparatus(), {}
    for cell in lab.released.cells:
        if cell.cell_type == "code":
            if cell.id in lab.points:
                brought = apparatus.for_check(cell.source)
                found[cell.id] = "\n".join([without_magic(cell.source), *brought.values()])
            apparatus.hear(cell.source, task=cell.id in lab.tasks)
    return found


def without_magic(source: str) -> str:
    """A cell without lines that are no Python."""
    return "\n".join(line for line in source.splitlines() if not line.startswith(("%", "!")))


def check_result(
    lab: LabForms, check: str, outcome: Outcome | None, sentences: Sentences
) -> CheckResult:
    """One check's result, with what the learner is told of it."""
    points = lab.points[check]
    if outcome is None or outcome.ended == "not run":
        why = outcome.why if outcome is not None else "This check was not run."
        return passed(check, points, outcome, reason_told=why)
    told = tuple(sentences.lines(outcome.printed))
    return passed(
        check, points, outcome, told=told, reason_told=reason(lab, check, outcome, sentences)
    )


def reason(lab: LabForms, check: str, outcome: Outcome, sentences: Sentences) -> str:
    """Why a check gave no points, in words that the learner may have."""
    if outcome.ended == "ok":
        return ""
    if outcome.ended == "lost" and outcome.why.startswith("The "):
        return outcome.why
    if outcome.ended in ("lost", "stopped"):
        return f"With this answer the check {outcome.why}"
    said = [sentences.line(line) for line in outcome.why.splitlines()]
    if said and said[0]:
        return " ".join(filter(None, said))
    found = ERROR.match(outcome.why)
    if found and found.group(1) != "AssertionError":
        return f"The check ended with an error, {found.group(1)}, before it could tell."
    hidden = HIDDEN[0] in next(c.source for c in lab.solved.cells if c.id == check)
    return UNSEEN if hidden else FAILED
