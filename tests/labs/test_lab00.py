"""Lab 00 on real hosts: solved it passes, untouched it fails where it should, wrong is told why."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
from nbclient import NotebookClient
from nbformat import NotebookNode
from nbgrader.utils import determine_grade, is_grade

from rdmalab import lab as labs

pytestmark = [pytest.mark.labs, pytest.mark.timeout(600)]

LABS = Path(__file__).parents[2] / "labs"
NAME = "00_meet_your_hosts"
FULL_MARKS = {
    "gid-index-own": 1,
    "gid-index-any": 2,
    "note-place": 2,
    "note-completion": 1,
}


def load_build() -> ModuleType:
    spec = importlib.util.spec_from_file_location("labs_build", LABS / "build.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


build = load_build()


@pytest.fixture(scope="module", autouse=True)
def hosts() -> Iterator[None]:
    """The hosts of this file's notebooks; the first notebook starts them, as a learner's would."""
    lab_id = f"test-lab00-{os.getpid()}"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RDMALAB_LAB", lab_id)
        yield
    labs.down(lab_id)


def solved() -> NotebookNode:
    return build.solved(LABS / "source" / f"{NAME}.py")


def answered(**answers: str) -> NotebookNode:
    """The lab with `answers` (task id with _ for -) in place of the solutions."""
    notebook = solved()
    empty = {cell.id: cell.source for cell in build.release(notebook).cells}
    for name, lines in answers.items():
        (cell,) = (cell for cell in notebook.cells if cell.id == name.replace("_", "-"))
        stub = next(line for line in empty[cell.id].splitlines() if build.STUB in line)
        indent = stub[: stub.index(build.STUB)]
        text = "\n".join(indent + line for line in lines.splitlines())
        cell.source = empty[cell.id].replace(stub, text)
    return notebook


def run(notebook: NotebookNode, folder: Path) -> NotebookNode:
    client = NotebookClient(
        notebook,
        timeout=120,
        kernel_name="python3",
        allow_errors=True,
        resources={"metadata": {"path": str(folder)}},
    )
    return asyncio.run(client.async_execute())  # execute() leaves its event loop open


def errors(notebook: NotebookNode) -> dict[str, str]:
    """What each failed cell said: cell id -> text of the exception."""
    return {
        cell.id: output.evalue
        for cell in notebook.cells
        if cell.cell_type == "code"
        for output in cell.outputs
        if output.output_type == "error"
    }


def printed(notebook: NotebookNode, cell_id: str = "", stream: str = "stdout") -> str:
    """What one cell, or all of them, wrote."""
    return "".join(
        output.text
        for cell in notebook.cells
        if cell.cell_type == "code" and cell_id in ("", cell.id)
        for output in cell.outputs
        if output.output_type == "stream" and output.name == stream
    )


def marks(notebook: NotebookNode) -> dict[str, float]:
    """The points that nbgrader gives."""
    return {cell.id: determine_grade(cell)[0] for cell in notebook.cells if is_grade(cell)}


def test_the_solved_lab_starts_the_hosts_and_gets_full_marks(tmp_path: Path) -> None:
    done = run(solved(), tmp_path)
    assert errors(done) == {}
    assert marks(done) == FULL_MARKS
    assert "hello bob, this is alice" in printed(done)
    assert "packets: 1 received, 1 sent" in printed(done)
    assert "completions in bob's queues: 0" in printed(done)


def test_run_all_works_again_also_after_a_run_that_was_broken_off(tmp_path: Path) -> None:
    """Alice never sends her pings, and bob still waits for them when the next run begins."""
    half = solved()
    last = next(n for n, cell in enumerate(half.cells) if cell.source.startswith("%%on bob --bg"))
    half.cells = half.cells[: last + 1]
    run(half, tmp_path)
    done = run(solved(), tmp_path)
    assert errors(done) == {}
    assert marks(done) == FULL_MARKS
    assert printed(done, stream="stderr") == ""


def test_the_untouched_lab_fails_in_its_checks_only(tmp_path: Path) -> None:
    """On hosts that have seen a solved one: no mark is left from there."""
    done = run(build.release(solved()), tmp_path)
    said = errors(done)
    assert list(said) == list(FULL_MARKS)
    assert len(set(said.values())) == len(said)
    assert set(marks(done).values()) == {0}
    for name in said:
        assert printed(done, name), f"{name} does not say what it looked at"


WRONG = {
    "index as a fixed number, note by SEND": (
        {"gid_index": "return 1", "note": "post_send(note)\nresult = wait(sent)"},
        {
            "gid-index-any": "The index must come from the table",
            "note-place": "Your note is not there",
            "note-completion": "the completion of another operation",
        },
    ),
    "GIDs compared as text, a wrong key": (
        {
            "gid_index": (
                "for index, gid in table.items():\n    if gid == str(wanted):\n        return index"
            ),
            "note": (
                "piece = SGE(mr.buf + OUTBOX, len(note), mr.lkey)\n"
                "order = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[piece])\n"
                'order.set_wr_rdma(peer["rkey"] + 1, peer["address"] + place)\n'
                "qp.post_send(order)\n"
                "result = wait(sent)"
            ),
        },
        {
            "gid-index-own": "No index came back",
            "gid-index-any": "The index must come from the table",
            "note-place": "Your note is not there",
            "note-completion": "The order ended with IBV_WC_REM_ACCESS_ERR",
        },
    ),
    "index 0 taken for none, more written than the note": (
        {
            "gid_index": (
                "found = [i for i, gid in table.items() if ipaddress.ip_address(gid) == wanted]\n"
                "return next(filter(None, found), None)"
            ),
            "note": (
                "mr.write(note + b'!', 15, OUTBOX)\n"
                "piece = SGE(mr.buf + OUTBOX, 15, mr.lkey)\n"
                "order = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[piece])\n"
                'order.set_wr_rdma(peer["rkey"], peer["address"] + place)\n'
                "qp.post_send(order)\n"
                "result = wait(sent)"
            ),
        },
        {
            "gid-index-any": "Index 0 is an answer like any other",
            "note-place": "Other bytes of bob's memory have changed",
        },
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_answer_is_told_why(name: str, tmp_path: Path) -> None:
    answers, wanted = WRONG[name]
    done = run(answered(**answers), tmp_path)
    said = errors(done)
    assert list(said) == list(wanted)
    for check, sentence in wanted.items():
        assert sentence in said[check]
    assert {check for check, points in marks(done).items() if points == 0} == set(wanted)
