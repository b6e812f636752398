"""From the outcomes of a run to a result: points by task, and the sentences for each side."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from .course import HIDDEN, LabForms
from .plans import plans
from .results import CheckResult, Outcome, TaskResult, by_task, passed
from .sentences import Sentences
from .submission import Step

__all__ = ["tasks_of"]

SOURCE_CHARACTERS = 20_000  # of an answer that is shown again
ERROR = re.compile(r"\A([A-Z]\w*(?:Error|Exception|Interrupt|Exit|Warning))\b")
MISSING = re.compile(r"\ANameError: name '(\w+)' is not defined")
BUILDS = "This check builds on an earlier one, which did not pass."
UNSEEN = "It holds for what this check shows, and not for something that it does not show."
FAILED = "This check did not pass."


def tasks_of(
    lab: LabForms, steps: Sequence[Step], verdicts: dict[str, Outcome]
) -> tuple[TaskResult, ...]:
    """The lab's tasks with their checks, as a run has found them."""
    results = []
    for check, plan in plans(lab).items():
        sentences = Sentences(plan.public, lab.hidden)
        result = check_result(lab, check, verdicts.get(check), sentences)
        builds = {name for brief in plan.briefs.values() for name in brief.carry}
        missing = MISSING.match(result.reason)
        if missing and missing.group(1) in builds:
            result = replace(result, reason_told=BUILDS)
        results.append(result)
    mine = {step.id: step.source[:SOURCE_CHARACTERS] for step in steps if step.kind == "task"}
    return tuple(
        TaskResult(task, lab.tasks[task], mine.get(task, ""), tuple(checks))
        for task, checks in by_task(results, list(lab.tasks)).items()
    )


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
