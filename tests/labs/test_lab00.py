"""Lab 00 on real hosts: solved it passes, untouched it fails where it should, wrong is told why."""

from __future__ import annotations

from pathlib import Path

import pytest
from nbformat import NotebookNode

from .learner import (
    Attempt,
    Retries,
    assert_solved,
    assert_untouched,
    errors,
    full_marks,
    judge,
    judge_retries,
    marks,
    printed,
    retries,
    run,
    solved,
    untouched,
)

pytestmark = [pytest.mark.labs, pytest.mark.timeout(1200)]

NAME = "00_meet_your_hosts"
BEGIN = {"note": "## 4"}  # hint 3: after an error, run again from section 4 on


def results(notebook: NotebookNode) -> list[str]:
    """The last expressions of the notebook's own cells as text: table, parts, ladder."""
    return [
        output["data"]["text/plain"]
        for cell in notebook.cells
        if cell.cell_type == "code" and "wire." in cell.source
        for output in cell.outputs
        if output.output_type == "execute_result"
    ]


def test_the_solved_lab_starts_the_hosts_and_gets_full_marks(tmp_path: Path) -> None:
    done = run(solved(NAME), tmp_path)
    assert errors(done) == {}
    assert marks(done) == full_marks(NAME)
    assert sum(full_marks(NAME).values()) == 6
    assert "hello bob, this is alice" in printed(done)
    assert "packets: 1 received, 1 sent" in printed(done)
    assert "completions in bob's queues: 0" in printed(done)
    table, parts, ladder = results(done)
    assert "RDMA WRITE ONLY" in table and "ACK" in table
    assert "b'written by alice'" in parts and parts.split()[-2:] == ["90", "bytes"]
    said = [ladder.index(word) for word in ("post_send", "SEND ONLY", "> alice: ACK", "completion")]
    assert said == sorted(said), "the completion comes after the ACK"


@pytest.mark.long
def test_run_all_works_again_also_after_a_run_that_was_broken_off(tmp_path: Path) -> None:
    """Alice never sends her pings, and bob still waits for them when the next run begins."""
    half = solved(NAME)
    last = next(n for n, cell in enumerate(half.cells) if cell.source.startswith("%%on bob --bg"))
    half.cells = half.cells[: last + 1]
    run(half, tmp_path)
    done = run(solved(NAME), tmp_path)
    assert_solved(NAME, done)


def test_the_untouched_lab_fails_in_its_checks_only(tmp_path: Path) -> None:
    """On hosts that have seen a solved one: no mark is left from there."""
    done = run(untouched(NAME), tmp_path)
    assert_untouched(NAME, done)


TRIES = [
    Attempt(
        "gid-index",
        "index as a fixed number",
        "return 1",
        {"gid-index-any": "The index must come from the table"},
    ),
    Attempt(
        "gid-index",
        "GIDs compared as text",
        "for index, gid in table.items():\n    if gid == str(wanted):\n        return index",
        {
            "gid-index-own": "No index came back",
            "gid-index-any": "The index must come from the table",
        },
    ),
    Attempt(
        "gid-index",
        "index 0 taken for none",
        "found = [i for i, gid in table.items() if ipaddress.ip_address(gid) == wanted]\n"
        "return next(filter(None, found), None)",
        {"gid-index-any": "Index 0 is an answer like any other"},
    ),
    Attempt(
        "gid-index",
        "right, in one line",
        "return next((i for i, g in table.items() if ipaddress.ip_address(g) == wanted), None)",
    ),
    Attempt(
        "note",
        "by SEND",
        "post_send(note)\nresult = wait(sent)",
        {
            "note-place": "Your note is not there",
            "note-completion": "This is the completion of another operation",
        },
    ),
    Attempt(
        "note",
        "a wrong key",
        "piece = SGE(mr.buf + OUTBOX, len(note), mr.lkey)\n"
        "order = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[piece])\n"
        'order.set_wr_rdma(peer["rkey"] + 1, peer["address"] + place)\n'
        "qp.post_send(order)\n"
        "result = wait(sent)",
        {
            "note-place": "Your note is not there",
            "note-completion": "The order ended with IBV_WC_REM_ACCESS_ERR",
        },
    ),
    Attempt(
        "note",
        "more written than the note",
        "mr.write(note + b'!', 15, OUTBOX)\n"
        "piece = SGE(mr.buf + OUTBOX, 15, mr.lkey)\n"
        "order = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[piece])\n"
        'order.set_wr_rdma(peer["rkey"], peer["address"] + place)\n'
        "qp.post_send(order)\n"
        "result = wait(sent)",
        {"note-place": "Other bytes of bob's memory have changed"},
    ),
    Attempt(
        "note",
        "right, sent from another place of the same memory",
        "mr.write(note, len(note), 512)\n"
        "order = SendWR(\n"
        "    opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[SGE(mr.buf + 512, len(note), mr.lkey)]\n"
        ")\n"
        'order.set_wr_rdma(peer["rkey"], peer["address"] + place)\n'
        "qp.post_send(order)\n"
        "result = wait(sent)",
    ),
]


@pytest.mark.long
def test_after_all_attempts_the_solution_still_passes(tried: dict[str, NotebookNode]) -> None:
    assert errors(tried[""]) == {}
    assert marks(tried[""]) == full_marks(NAME)


@pytest.mark.long
@pytest.mark.parametrize("attempt", TRIES, ids=str)
def test_an_answer_is_told_what_is_wrong_with_it(
    attempt: Attempt, tried: dict[str, NotebookNode]
) -> None:
    judge(attempt, tried[str(attempt)])


NOT_AWAITED = Attempt(
    "note",
    "nobody waits",
    "mr.write(note, len(note), OUTBOX)\n"
    "piece = SGE(mr.buf + OUTBOX, len(note), mr.lkey)\n"
    "order = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[piece])\n"
    'order.set_wr_rdma(peer["rkey"], peer["address"] + place)\n'
    "qp.post_send(order)",
    {"note-completion": "`result` is still None"},
)
RELATIVE = Attempt(
    "note",
    "a relative address",
    "mr.write(note, len(note), OUTBOX)\n"
    "piece = SGE(mr.buf + OUTBOX, len(note), mr.lkey)\n"
    "order = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[piece])\n"
    'order.set_wr_rdma(peer["rkey"], place)\n'
    "qp.post_send(order)\n"
    "result = wait(sent)",
    {
        "note-place": "Your note is not there",
        "note-completion": "The order ended with IBV_WC_REM_ACCESS_ERR",
    },
)
RETRIES = [*retries(TRIES), Retries((NOT_AWAITED, RELATIVE, TRIES[-1]))]


@pytest.mark.long
@pytest.mark.parametrize("attempt", RETRIES, ids=str)
def test_a_second_try_is_not_judged_by_what_the_first_has_left(
    attempt: Retries, tried: dict[str, NotebookNode]
) -> None:
    judge_retries(attempt, tried)
