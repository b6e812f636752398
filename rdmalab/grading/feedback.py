"""The page that a learner gets: points, sentences and the learner's own answers; no hidden test.

One file that needs nothing else: no script, no picture, no network. Everything on it that a
submission has had a hand in is escaped.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from html import escape
from pathlib import Path

from .results import FAILED, NOT_RUN, PASSED, CheckResult, SubmissionResult, TaskResult

__all__ = ["page"]

MARKS = {PASSED: "✓ passed", FAILED: "✗ not passed", NOT_RUN: "– not run"}
CODE = re.compile(r"`([^`\n]+)`")
POINTS = re.compile(r" \(\d+ points?\)$")
POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def number(points: float) -> str:
    """Points as people write them."""
    return f"{points:g}"


def out_of(score: float, points: float) -> str:
    """As in ``2 of 3 points``."""
    return f"{number(score)} of {number(points)} point{'' if points == 1 else 's'}"


def words(text: str) -> str:
    """A sentence, escaped, with what stands in `backticks` as code."""
    return CODE.sub(r"<code>\1</code>", escape(text))


def check_lines(check: CheckResult) -> Iterator[str]:
    """One check: verdict, points, what it looked at, why."""
    kind = check.verdict.replace(" ", "-")
    yield f'<div class="check {kind}"><header><span class="mark">{MARKS[check.verdict]}</span>'
    yield f"<span>{escape(check.check)}</span>"
    yield f'<span class="points">{out_of(check.score, check.points)}</span></header>'
    for line in check.told:
        yield f'<p class="said">{words(line)}</p>'
    if check.reason_told:
        yield f'<p class="reason">{words(check.reason_told)}</p>'
    yield "</div>"


def task_lines(task: TaskResult) -> Iterator[str]:
    """One task: its checks, and the learner's own cell."""
    title = POINTS.sub("", task.title)  # they stand beside it, with what was given of them
    yield f"<section><header><h2>{escape(title)}</h2>"
    yield f'<span class="points">{out_of(task.score, task.points)}</span></header>'
    for check in task.checks:
        yield from check_lines(check)
    if task.source:
        yield "<details><summary>Your answer</summary>"
        yield f"<pre><code>{escape(task.source)}</code></pre></details>"
    yield "</section>"


def page(result: SubmissionResult) -> str:
    """The HTML page for a submission."""
    return "\n".join(lines(result)) + "\n"


def lines(result: SubmissionResult) -> Iterator[str]:
    """The page's lines."""
    style = (Path(__file__).parent / "feedback.css").read_text(encoding="utf-8")
    title = escape(result.title or "A submission")
    yield '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">'
    yield f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
    yield '<meta name="viewport" content="width=device-width, initial-scale=1">'
    yield f"<title>{title}</title>\n<style>\n{style}</style>\n</head>\n<body>\n<main>"
    yield f'<h1>{title}</h1>\n<p class="soft">{escape(result.name)}</p>'
    if result.tasks:
        share = 100 * result.score / result.points if result.points else 0
        yield f'<p class="total">{out_of(result.score, result.points)}</p>'
        yield f'<div class="bar" aria-hidden="true"><div style="width: {share:.1f}%"></div></div>'
    for note in filter(None, [result.problem, *result.notes]):
        yield f'<p class="note">{escape(note)}</p>'
    for task in result.tasks:
        yield from task_lines(task)
    yield "</main>\n</body>\n</html>"
