"""Submitted notebooks put into order again: what editors do to them changes no mark."""

from __future__ import annotations

import copy
import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType

import pytest
from nbformat import NotebookNode

from rdmalab.errors import UsageError
from rdmalab.grading import submission
from rdmalab.grading.submission import Restored, Step

LABS = Path(__file__).parents[2] / "labs"
NAME = "00_meet_your_hosts"


def load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("labs_build_too", LABS / "build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = load_build()


@pytest.fixture(scope="module")
def lab() -> NotebookNode:
    return build.solved(LABS / "source" / f"{NAME}.py")


@pytest.fixture(scope="module")
def released(lab: NotebookNode) -> NotebookNode:
    return build.release(lab)


@pytest.fixture
def mine(released: NotebookNode) -> NotebookNode:
    """A learner's notebook, with one answer in it."""
    notebook = copy.deepcopy(released)
    task = by_id(notebook, "gid-index")
    task.source = task.source.replace("pass  # your lines go here", "return 1")
    return notebook


def by_id(notebook: NotebookNode, name: str) -> NotebookNode:
    (cell,) = (cell for cell in notebook.cells if cell.get("id") == name)
    return cell


def steps(restored: Restored) -> dict[str, Step]:
    return {step.id: step for step in restored.steps}


@pytest.fixture
def wanted(mine: NotebookNode, lab: NotebookNode, released: NotebookNode) -> list[Step]:
    """What an untouched order of cells gives."""
    restored = submission.restore(copy.deepcopy(mine), lab, released)
    assert restored.notes == []
    return restored.steps


def test_an_answer_is_run_between_the_labs_own_checks(
    wanted: list[Step], lab: NotebookNode
) -> None:
    assert [step.id for step in wanted] == [c.id for c in lab.cells if c.cell_type == "code"]
    by_name = {step.id: step for step in wanted}
    assert "return 1" in by_name["gid-index"].source and by_name["gid-index"].changed
    assert "BEGIN HIDDEN TESTS" in by_name["gid-index-any"].source, "hidden tests are put back"
    assert not by_name["note"].changed and "pass  # your" in by_name["note"].source
    assert "BEGIN SOLUTION" not in "".join(step.source for step in wanted)


def test_an_edited_check_is_the_labs_own_again(
    mine: NotebookNode, lab: NotebookNode, released: NotebookNode, wanted: list[Step]
) -> None:
    by_id(mine, "gid-index-any").source = "%%on alice\nassert True"
    restored = submission.restore(mine, lab, released)
    assert restored.steps == wanted
    assert restored.notes == ["The check gid-index-any had been edited; the lab's own was run."]


def test_a_check_that_was_deleted_is_back(
    mine: NotebookNode, lab: NotebookNode, released: NotebookNode, wanted: list[Step]
) -> None:
    mine.cells = [cell for cell in mine.cells if cell.id != "note-place"]
    restored = submission.restore(mine, lab, released)
    assert restored.steps == wanted
    assert restored.notes == ["The check note-place was missing; it was put back."]


def test_a_task_that_was_deleted_is_the_untouched_one(
    mine: NotebookNode, lab: NotebookNode, released: NotebookNode
) -> None:
    mine.cells = [cell for cell in mine.cells if cell.id != "gid-index"]
    restored = submission.restore(mine, lab, released)
    assert not steps(restored)["gid-index"].changed
    assert restored.notes == ["The answer to gid-index was missing."]


def test_cells_that_were_moved_run_in_the_labs_order(
    mine: NotebookNode, lab: NotebookNode, released: NotebookNode, wanted: list[Step]
) -> None:
    mine.cells = mine.cells[::-1]
    restored = submission.restore(mine, lab, released)
    assert restored.steps == wanted
    assert restored.notes == ["The cells had been moved; they were run in the lab's order."]


@pytest.mark.parametrize("touched", ["first", "second", "both"])
def test_of_two_copies_the_one_that_was_written_into_counts(
    touched: str, mine: NotebookNode, lab: NotebookNode, released: NotebookNode
) -> None:
    """JupyterLab copies nbgrader's metadata along, and gives the copy another id."""
    task = by_id(mine, "note")
    copied = copy.deepcopy(task)
    copied.id = "0815"
    for which, cell in (("first", task), ("second", copied)):
        if touched in (which, "both"):
            cell.source = cell.source.replace("pass  # your lines go here", f"x = '{which}'")
    mine.cells.insert(mine.cells.index(task) + 1, copied)
    restored = submission.restore(mine, lab, released)
    assert f"x = '{'first' if touched == 'first' else 'second'}'" in steps(restored)["note"].source
    assert restored.notes == ["The cell note stands there more than once."]


def test_own_cells_stay_where_they_stood(
    mine: NotebookNode, lab: NotebookNode, released: NotebookNode, wanted: list[Step]
) -> None:
    mine.cells.insert(0, NotebookNode(cell_type="code", source="first = 1", metadata={}))
    at = mine.cells.index(by_id(mine, "gid-index")) + 1
    mine.cells.insert(at, NotebookNode(cell_type="code", source="own = 2", metadata={}))
    restored = submission.restore(mine, lab, released)
    names = [step.source if step.kind == "own" else step.id for step in restored.steps]
    assert names[0] == "first = 1" and names[names.index("own = 2") - 1] == "gid-index"
    assert [step for step in restored.steps if step.kind != "own"] == wanted


@pytest.mark.parametrize("ids", [True, False])
def test_a_cell_that_the_lab_has_twice_is_found_twice(
    ids: bool, mine: NotebookNode, lab: NotebookNode, released: NotebookNode, wanted: list[Step]
) -> None:
    forms = [copy.deepcopy(form) for form in (lab, released, mine)]
    for form in forms:
        again = copy.deepcopy(by_id(form, "cell-003"))
        again.id = "cell-999"
        form.cells.append(again)
    if not ids:
        for cell in forms[2].cells:
            del cell["id"]
    restored = submission.restore(forms[2], forms[0], forms[1])
    assert restored.notes == []
    assert [step.id for step in restored.steps] == [*(step.id for step in wanted), "cell-999"]
    assert not any(step.changed for step in restored.steps if step.kind == "given")


def test_an_editor_that_drops_ids_and_metadata_costs_nothing(
    mine: NotebookNode, lab: NotebookNode, released: NotebookNode, wanted: list[Step]
) -> None:
    """As some web editors do: what is left is the text."""
    for cell in mine.cells:
        cell.metadata = NotebookNode()
        del cell["id"]
        cell.source = cell.source.replace("\n", "  \n") + "\n"
    restored = submission.restore(mine, lab, released)
    assert restored.notes == []
    assert [step.id for step in restored.steps] == [step.id for step in wanted]
    assert "return 1" in steps(restored)["gid-index"].source
    assert submission.recognise(mine, {NAME: released, "99": NotebookNode(cells=[])}) == NAME


def test_a_given_cell_that_was_changed_is_run_as_it_was_handed_in(
    mine: NotebookNode, lab: NotebookNode, released: NotebookNode
) -> None:
    cell = next(cell for cell in mine.cells if cell.source.startswith("rounds = 300"))
    cell.source = cell.source.replace("300", "30")
    restored = submission.restore(mine, lab, released)
    step = steps(restored)[cell.id]
    assert step.changed and step.source.startswith("rounds = 30\n")


def test_a_lab_is_known_by_what_it_says_and_by_what_it_has(
    mine: NotebookNode, released: NotebookNode
) -> None:
    labs = {NAME: released, "99_other": NotebookNode(cells=[])}
    assert submission.recognise(mine, labs) == NAME
    assert submission.recognise(NotebookNode(cells=[], metadata={}), labs) == ""
    told = NotebookNode(cells=[], metadata={"rdmalab": {"lab": "99_other"}})
    assert submission.recognise(told, labs) == "99_other"
    lies = NotebookNode(cells=[], metadata={"rdmalab": {"lab": ["../../etc"]}})
    assert submission.recognise(lies, labs) == ""


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "is no notebook"),
        ("{", "is no notebook"),
        ("[" * 100_000, "is no notebook"),
        ("null", "is no notebook"),
        ('{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": 7}', "is no notebook"),
        ('{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": []}', "no code cells"),
        ('{"nbformat": 4, "nbformat_minor": 5, "metadata": {}, "cells": [1]}', "is no notebook"),
    ],
)
def test_what_is_no_notebook_is_said_in_a_sentence(text: str, said: str, tmp_path: Path) -> None:
    file = tmp_path / "x.ipynb"
    file.write_text(text)
    with pytest.raises(UsageError, match=said):
        submission.read(file)


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    file = tmp_path / "x.ipynb"
    with open(file, "wb") as out:
        out.truncate(100 << 20)
    with pytest.raises(UsageError, match="has 100 MB"):
        submission.read(file)
    with pytest.raises(UsageError, match="cannot be read"):
        submission.read(tmp_path / "none.ipynb")


def test_a_whole_file_is_read(mine: NotebookNode, tmp_path: Path) -> None:
    file = tmp_path / "renamed (1).ipynb"
    file.write_text(json.dumps(mine))
    assert len(submission.read(file).cells) == len(mine.cells)
