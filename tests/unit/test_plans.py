"""How checks are run: where, with which of the lab's definitions, and what may speak in them."""

from __future__ import annotations

from pathlib import Path

import pytest
from nbformat import NotebookNode

from rdmalab.grading.apparatus import body_of, hosts_of, portable
from rdmalab.grading.course import Course, LabForms
from rdmalab.grading.plans import CheckPlan, plans

from .small_course import CANARY, LABS, NAME, make_course


def planned(*cells: tuple[str, str]) -> dict[str, CheckPlan]:
    """Plans for cells ``(kind, source)``, whose ids are their numbers."""
    made = [
        NotebookNode(
            id=str(number),
            cell_type="code",
            source=source,
            metadata={"nbgrader": {"grade": kind == "check", "solution": kind == "task"}},
        )
        for number, (kind, source) in enumerate(cells)
    ]
    for cell in made:
        cell.metadata = NotebookNode(cell.metadata)
    notebook = NotebookNode(cells=made)
    return plans(LabForms("x", "X", notebook, notebook))


def test_where_a_cell_runs_is_in_its_first_line() -> None:
    assert hosts_of("%%on alice bob --timeout 115\nx") == ("alice", "bob")
    assert hosts_of("%%on bob -o x\nx") == ("bob",)
    assert hosts_of("x = 1\n%%on alice") == ()
    assert body_of("%%on alice\nx\n  !ls\n%hosts") == "\nx\n  pass\npass"


def test_a_check_brings_the_labs_own_definitions_along() -> None:
    found = planned(
        ("given", "%%on alice\nimport os\nMOST = 5\n"),
        ("given", "%%on alice bob\ndef inner():\n    return os.sep * MOST"),
        ("given", "def inner(): return 'desk'"),
        ("task", "%%on alice\ndef answer(): return inner()"),
        ("check", "%%on alice\nassert answer() == inner(), 'No.'"),
    )
    plan = found["4"]
    assert plan.hosts == ("alice",) and list(plan.briefs) == ["alice"] and not plan.elsewhere
    space: dict[str, object] = {}
    exec(plan.briefs["alice"].given, space)
    assert space["inner"]() == "/////" and "answer" not in space  # type: ignore[operator]


def test_a_check_on_the_desk_has_the_hosts_definitions_made_anew() -> None:
    found = planned(
        ("given", "%%on bob\ndef collect(): return 1\nclass Kept: pass"),
        ("given", "%%on alice\ndef collect(): return 2"),
        ("check", "lab.bob.run('x = collect()')\nassert lab.bob.get('x')"),
    )
    assert "return 1" in found["2"].elsewhere["bob"] and "return 2" in found["2"].elsewhere["alice"]
    assert "class" not in found["2"].elsewhere["bob"], "there may be objects of it"
    assert portable("def f():\n    global x\n    x = 1") == ""


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Course:
    return make_course(tmp_path_factory.mktemp("course") / "labs")


def test_hidden_tests_are_run_and_do_not_speak(small: Course) -> None:
    plan = plans(small.lab(NAME))["double-large"]
    assert CANARY in plan.source and CANARY not in plan.public
    assert "I looked at" in plan.public, "what the lab's own functions say is public"


@pytest.mark.parametrize("name", sorted(file.stem for file in (LABS / "source").glob("0*.py")))
def test_every_check_of_every_lab_has_a_plan(name: str) -> None:
    lab = Course(Path(LABS)).lab(name)
    found = plans(lab)
    assert list(found) == list(lab.points)
    for check, plan in found.items():
        for text in (plan.source, plan.public, *(b.given for b in plan.briefs.values())):
            compile(text, check, "exec")
