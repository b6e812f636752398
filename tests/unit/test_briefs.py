"""What a check needs to know of its lab, worked out for the labs that there are."""

from __future__ import annotations

from pathlib import Path

import pytest

from rdmalab.grading.briefs import Briefs
from rdmalab.grading.course import Course
from rdmalab.hostside import checkcode

COURSE = Course(Path(__file__).parents[2] / "labs")
LAB01, LAB02 = "01_register_memory", "02_queue_pair_states"


def brief(lab: str, check: str, host: str) -> dict[str, set[str]]:
    found = Briefs(COURSE.lab(lab)).for_check(check)[host]
    lists = {name: set(getattr(found, name)) for name in ("asked", "carry", "later", "keep")}
    return {**lists, "given": checkcode.made_by(found.given)}


def test_what_one_check_has_found_the_next_one_takes_over() -> None:
    assert "results" in brief(LAB01, "flags-enough", "alice")["later"]
    assert brief(LAB01, "flags-least", "alice")["carry"] == {"results"}


def test_a_class_that_a_task_wants_is_asked_for() -> None:
    assert brief(LAB01, "pool-once", "alice")["asked"] == {"Pool"}
    assert brief(LAB01, "flags-least", "alice")["asked"] == set()


def test_helpers_and_tables_are_the_labs_own_but_not_what_a_task_makes() -> None:
    found = brief(LAB01, "pool-once", "alice")
    assert {"tried", "regions_of_mine", "PURPOSES", "MR", "LOCAL"} <= found["given"]
    assert not {"Pool", "rights", "memory", "pages_pinned"} & found["given"]


def test_a_check_may_put_a_new_queue_pair_where_the_lab_has_one() -> None:
    found = brief(LAB02, "connect-ready", "bob")
    assert "qp" in found["keep"] and "qp" not in found["carry"]


@pytest.mark.parametrize("name", COURSE.names)
def test_every_check_has_a_brief_on_each_host_and_is_plain_python(name: str) -> None:
    lab = COURSE.lab(name)
    for check in lab.points:
        for found in Briefs(lab).for_check(check).values():
            checkcode.parse(found.given)
    for cell in Briefs(lab).cells:
        if cell.kind == "check":
            assert cell.text and checkcode.compile_check(cell.text)
