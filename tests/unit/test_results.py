"""Points, tables and what is handed out."""

from __future__ import annotations

import csv
import io
import json

import pytest

from rdmalab.grading.results import (
    CheckResult,
    Outcome,
    SubmissionResult,
    TaskResult,
    class_csv,
    for_learner,
    gradescope,
    passed,
)


def result(name: str = "ada", score: int = 1) -> SubmissionResult:
    good = CheckResult("a-x", 1, score, "passed" if score else "failed", told=("I looked.",))
    secret = {"printed": "secret 1", "reason": "secret 2", "reason_told": "Not so."}
    bad = CheckResult("a-y", 2, 0, "failed", **secret)  # type: ignore[arg-type]
    task = TaskResult("a", "Task 1", "x = 1", (good, bad))
    return SubmissionResult(name, f"{name}.ipynb", "01_lab", "Lab 01", (task,), ["A note."])


@pytest.mark.parametrize("ended", ["raised", "refused", "stopped", "lost", "not run"])
def test_only_a_check_that_ran_to_its_end_has_points(ended: str) -> None:
    assert passed("a-x", 2, Outcome("ok")).score == 2
    assert passed("a-x", 2, Outcome(ended)).score == 0
    assert passed("a-x", 2, Outcome(ended)).reason
    assert passed("a-x", 2, None).verdict == "not run"


def test_what_is_long_is_cut() -> None:
    assert len(passed("a-x", 2, Outcome("raised", "y" * 10**6, "z" * 10**6)).printed) < 5000


def test_a_result_survives_its_file() -> None:
    mine = result()
    again = SubmissionResult.from_dict(json.loads(json.dumps(mine.as_dict())))
    assert again == mine and (again.score, again.points) == (1, 3)


def test_b47_what_is_handed_out_has_only_what_may_be_told() -> None:
    """B47: the instructor's side stays with the instructor."""
    mine = result()
    assert "secret" in json.dumps(mine.as_dict()["tasks"])
    for handed in (for_learner(mine), gradescope(mine), mine.as_dict()["feedback"]):
        text = json.dumps(handed)
        assert "secret" not in text and "Not so." in text and "I looked." in text


def test_gradescope_gets_its_form() -> None:
    document = gradescope(result())
    assert document["score"] == 1 and document["visibility"] == "visible"
    assert [test["score"] for test in document["tests"]] == [1, 0]
    assert [test["status"] for test in document["tests"]] == ["passed", "failed"]


def test_the_class_is_a_table() -> None:
    rows = list(csv.DictReader(io.StringIO(class_csv([result("ada"), result("bob", 0)]))))
    assert [(row["name"], row["score"], row["a"]) for row in rows] == [
        ("ada", "1", "1"),
        ("bob", "0", "0"),
    ]


@pytest.mark.parametrize("name", ["=1+1", "+x", "-x", "@x", "\tx", "=HYPERLINK(1)\n,9"])
def test_a_files_name_is_no_formula_and_no_second_row(name: str) -> None:
    rows = list(csv.DictReader(io.StringIO(class_csv([result(name)]))))
    assert len(rows) == 1 and rows[0]["name"][0] in "'?" and rows[0]["score"] == "1"
