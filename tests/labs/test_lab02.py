"""Lab 02 on real hosts: solved it passes, untouched it fails where it should, wrong is told why."""

from __future__ import annotations

from pathlib import Path

import pytest
from nbformat import NotebookNode

from .learner import (
    Attempt,
    Retries,
    assert_runs_again,
    assert_solved,
    assert_untouched,
    full_marks,
    judge,
    judge_retries,
    printed,
    retries,
    run,
    untouched,
)

pytestmark = [pytest.mark.labs, pytest.mark.timeout(1200)]

NAME = "02_queue_pair_states"


TRIES = [
    Attempt(
        "to-init",
        "the state's bit alone",
        "attr.qp_state = e.IBV_QPS_INIT\nqp.modify(attr, e.IBV_QP_STATE)",
        {
            "to-init-state": "Refused: hold your mask against the table",
            "to-init-rights": "The rights that the caller asks for",
        },
    ),
    Attempt(
        "to-init",
        "fields filled in, but not the state",
        "attr.pkey_index, attr.port_num, attr.qp_access_flags = 0, here.port, rights\n"
        "qp.modify(attr, e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS)",
        {"to-init-state": "It should be in INIT"},
    ),
    Attempt(
        "to-init",
        "rights as a fixed number",
        "attr.qp_state, attr.port_num = e.IBV_QPS_INIT, here.port\n"
        "attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE\n"
        "mask = e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS\n"
        "qp.modify(attr, mask)",
        {"to-init-rights": "The rights that the caller asks for"},
    ),
    Attempt(
        "to-init",
        "ports counted from 0",
        "attr.qp_state, attr.qp_access_flags, attr.port_num = e.IBV_QPS_INIT, rights, 0\n"
        "mask = e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS\n"
        "qp.modify(attr, mask)",
        {
            "to-init-state": "Refused",
            "to-init-rights": "The rights that the caller asks for",
        },
    ),
    Attempt(
        "to-init",
        "right, with pyverbs' own move",
        "attr = QPAttr(port_num=here.port)\nattr.qp_access_flags = rights\nqp.to_init(attr)",
    ),
    Attempt(
        "to-rtr",
        "no route (B13)",
        "attr.qp_state, attr.path_mtu = e.IBV_QPS_RTR, min(mine['mtu'], peer['mtu'])\n"
        "attr.dest_qp_num, attr.rq_psn = peer['qp_num'], peer['psn']\n"
        "attr.max_dest_rd_atomic, attr.min_rnr_timer = 1, 12\n"
        "attr.ah_attr = AHAttr(port_num=here.port)\n"
        "mask = e.IBV_QP_STATE | e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN\n"
        "mask |= e.IBV_QP_RQ_PSN | e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER\n"
        "qp.modify(attr, mask)",
        {
            "to-rtr-state": "Is there a route",
            "to-rtr-peer": "not as bob has it",
            "to-rtr-bytes": "are not there",
        },
    ),
    Attempt(
        "to-rtr",
        "our own packet number and queue pair",
        "attr = everything(mine, peer)\n"
        "attr.dest_qp_num, attr.rq_psn = mine['qp_num'], mine['psn']\n"
        "qp.to_rtr(attr)",
        {
            "to-rtr-peer": "psn: not as bob has it",
            "to-rtr-bytes": "are not there",
        },
    ),
    Attempt(
        "to-rtr",
        "our own GID as the destination",
        "attr = everything(mine, {**peer, 'gid': mine['gid']})\nqp.to_rtr(attr)",
        {
            "to-rtr-peer": "gid: not as bob has it",
            "to-rtr-bytes": "are not there",
        },
    ),
    Attempt(
        "to-rtr",
        "GID 0 (B10)",
        "attr = everything(mine, peer)\n"
        "route = GlobalRoute(dgid=GID(peer['gid']), sgid_index=0)\n"
        "attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=here.port)\n"
        "qp.to_rtr(attr)",
        {
            "to-rtr-state": "with our own GID",
            "to-rtr-peer": "not as bob has it",
            "to-rtr-bytes": "are not there",
        },
    ),
    Attempt(
        "to-rtr",
        "on to RTS at once",
        "qp.to_rts(everything(mine, peer))",
        {
            "to-rtr-state": "RTR was asked for",
            "to-rtr-bytes": "RTR is enough to receive",
        },
    ),
    Attempt(
        "to-rtr",
        "the MTU as a fixed number",
        "attr = everything(mine, peer)\nattr.path_mtu = e.IBV_MTU_4096\nqp.to_rtr(attr)",
        {"to-rtr-peer": "A peer with an MTU of 512"},
    ),
    Attempt("to-rtr", "right, with pyverbs' own move", "qp.to_rtr(everything(mine, peer))"),
    Attempt(
        "to-rts",
        "the peer's packet number",
        "attr = everything(mine, peer)\n"
        "attr.sq_psn, attr.retry_cnt = peer['psn'], 6\n"
        "qp.to_rts(attr)",
        {"to-rts-bytes": "Which number does bob expect"},
    ),
    Attempt(
        "to-rts",
        "READs forgotten in the mask",
        "attr.qp_state, attr.sq_psn = e.IBV_QPS_RTS, mine['psn']\n"
        "attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.max_rd_atomic = 14, 6, 6, 1\n"
        "mask = e.IBV_QP_STATE | e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT | e.IBV_QP_RNR_RETRY\n"
        "qp.modify(attr, mask | e.IBV_QP_SQ_PSN)",
        {
            "to-rts-state": "Refused: hold your mask",
            "to-rts-bytes": "It did not come",
        },
    ),
    Attempt(
        "to-rts",
        "bits set, fields forgotten",
        "attr.qp_state, attr.sq_psn = e.IBV_QPS_RTS, mine['psn']\n"
        "mask = e.IBV_QP_STATE | e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT | e.IBV_QP_RNR_RETRY\n"
        "qp.modify(attr, mask | e.IBV_QP_SQ_PSN | e.IBV_QP_MAX_QP_RD_ATOMIC)",
        {"to-rts-state": "Timers and counters"},
    ),
    Attempt(
        "to-rts",
        "right, with pyverbs' own move",
        "attr = everything(mine, peer)\nattr.retry_cnt = 6\nqp.to_rts(attr)",
    ),
    Attempt(
        "connect",
        "without waiting for the peer",
        "peer = swap(mine, other)\n"
        "to_init(qp, e.IBV_ACCESS_REMOTE_WRITE)\n"
        "to_rtr(qp, mine, peer)\n"
        "to_rts(qp, mine)",
        {"connect-ready": "before bob could receive"},
    ),
    Attempt(
        "connect",
        "RTS before RTR",
        "peer = swap(mine, other)\n"
        "to_init(qp, e.IBV_ACCESS_REMOTE_WRITE)\n"
        "to_rts(qp, mine)\n"
        "to_rtr(qp, mine, peer)",
        {
            "connect-state": "a move that was refused",
            "connect-bytes": "The message is not there",
            "connect-ready": "not in RTS",
        },
    ),
    Attempt(
        "connect",
        "without waiting, by pyverbs' own moves",
        "peer = swap(mine, other)\nqp.to_rts(everything(mine, peer))",
        {"connect-ready": "before bob could receive"},
    ),
    Attempt(
        "connect",
        "a second card, with another packet number",
        "peer = swap(make_card(qp), other)\n"
        "to_init(qp, e.IBV_ACCESS_REMOTE_WRITE)\n"
        "to_rtr(qp, mine, peer)\n"
        "to_rts(qp, mine)\n"
        "swap('ready', other)",
        {
            "connect-bytes": "The message is not there",
            "connect-ready": "did not have the number that bob expected",
        },
    ),
    Attempt(
        "connect",
        "only one side meets the other",
        "if here.name == 'alice':\n    peer = swap(mine, other)",
        {
            "connect-state": "a swap that only one side has made",
            "connect-bytes": "The message is not there",
            "connect-ready": "not in RTS",
        },
    ),
    Attempt(
        "connect",
        "right, with pyverbs' moves and another way to wait",
        "peer = swap(mine, other)\n"
        "qp.to_rts(everything(mine, peer))\n"
        "while swap(state(qp), other) not in ('RTR', 'RTS'):\n"
        "    continue",
    ),
    Attempt(
        "recover",
        "straight to INIT",
        "to_init(qp, e.IBV_ACCESS_REMOTE_WRITE)\nconnect(qp, other)",
        {
            "recover-state": "the ways out of ERR",
            "recover-clean": "has not recovered",
            "recover-bytes": "Nothing crosses",
        },
    ),
    Attempt(
        "recover",
        "nothing emptied",
        "qp.modify(QPAttr(qp_state=e.IBV_QPS_RESET), e.IBV_QP_STATE)\nconnect(qp, other)",
        {"recover-clean": "These are from before"},
    ),
    Attempt(
        "recover",
        "reset, and left there",
        "qp.modify(QPAttr(qp_state=e.IBV_QPS_RESET), e.IBV_QP_STATE)\ndrain(sent, arrived)",
        {
            "recover-state": "it has to learn everything anew",
            "recover-clean": "has not recovered",
            "recover-bytes": "Nothing crosses",
        },
    ),
    Attempt(
        "recover",
        "a new queue pair instead",
        "drain(sent, arrived)\nnew = QP(pd, kind)\nconnect(new, other)\nnew.close()",
        {
            "recover-state": "it has to learn everything anew",
            "recover-clean": "has not recovered",
            "recover-bytes": "Nothing crosses",
        },
    ),
    Attempt(
        "recover",
        "right, by way of Task 4",
        "attr = QPAttr()\n"
        "attr.qp_state = e.IBV_QPS_RESET\n"
        "qp.modify(attr, e.IBV_QP_STATE)\n"
        "while sent.poll()[0] + arrived.poll()[0]:\n"
        "    continue\n"
        "connect(qp, other)",
    ),
    Attempt(
        "diagnose",
        "everything that differs, changed",
        "cure = {name: dict(HEALTHY) for name in PATIENTS}",
        {f"diagnose-{name}": "more than one change" for name in "abcd"},
    ),
    Attempt(
        "diagnose",
        "timers turned up",
        "cure = {name: {'timeout': 14, 'retry_cnt': 6} for name in PATIENTS}",
        {
            "diagnose-a": "A is still ill",
            "diagnose-b": "B is still ill",
            "diagnose-c": "C is still ill",
            "diagnose-d": "D is still ill",
        },
    ),
    Attempt(
        "diagnose",
        "wrong row, smallest MTU, RESET first",
        "cure['A'] = {'sgid_index': gid_index}\n"
        "cure['B'] = {'sgid_index': 2}\n"
        "cure['C'] = {'path_mtu': e.IBV_MTU_256}\n"
        "cure['D'] = {'order': 'RESET INIT RTS'}",
        {
            "diagnose-a": "A is still ill",
            "diagnose-b": "B is still ill",
            "diagnose-c": "C is still ill",
            "diagnose-d": "D is still ill",
        },
    ),
    Attempt(
        "diagnose",
        "right, written in one piece",
        "cure = {\n"
        "    'A': {'is_global': True},\n"
        "    'B': {'sgid_index': here.gid_index},\n"
        "    'C': {'path_mtu': 3},\n"
        "    'D': {'order': 'INIT INIT RTR RTS'},\n"
        "}",
    ),
]


def test_after_all_attempts_the_solution_still_passes(tried: dict[str, NotebookNode]) -> None:
    """And shows what its text speaks of."""
    done = tried[""]
    assert_solved(NAME, done)
    assert sum(full_marks(NAME).values()) == 17
    said = printed(done)
    for fact in (
        "with attributes: INIT\nwithout:         RESET",
        "refused: EINVAL\nstate: RESET",  # B13
        "nobody: ETIMEDOUT after",  # B12
        "bob's address: EINVAL after",  # B10
        "our GID 200: ENODATA after",
        "19 of 42 allowed; not as in the table: nothing",
        "INIT   taken     -              EINVAL    -",
        "SQD    taken     -              taken     -",
        "ERR    taken     WR_FLUSH_ERR   taken     WR_FLUSH_ERR",
        "(3, 'REM_ACCESS_ERR'), (4, 'WR_FLUSH_ERR'), (5, 'WR_FLUSH_ERR')]",
        "libibverbs remembers: IBV_QPS_RTS\nthe device says:      ERR",
        "bob: [(1, 'SUCCESS'), (2, 'SUCCESS'), (3, 'WR_FLUSH_ERR'), (4, 'WR_FLUSH_ERR')]",
        "first: 6 WR_FLUSH_ERR\nthen: [(7, 'WR_FLUSH_ERR'), (8, 'SUCCESS')]",
        "near sends 3000 bytes: REM_INV_REQ_ERR",
        "a request has come: INIT\naccepted:           RTS",
        "made:      INIT\nconnected: RTS",
    ):
        assert fact in said, fact


NOT_EMPTIED = next(attempt for attempt in TRIES if attempt.title == "nothing emptied")
LEFT_THERE = next(attempt for attempt in TRIES if attempt.title == "reset, and left there")
RETRIES = [*retries(TRIES), Retries((LEFT_THERE, NOT_EMPTIED, NOT_EMPTIED))]


@pytest.mark.long
@pytest.mark.parametrize("attempt", RETRIES, ids=str)
def test_a_second_try_is_not_judged_by_what_the_first_has_left(
    attempt: Retries, tried: dict[str, NotebookNode]
) -> None:
    judge_retries(attempt, tried)


@pytest.mark.long
@pytest.mark.parametrize("attempt", TRIES, ids=str)
def test_an_answer_is_told_what_is_wrong_with_it(
    attempt: Attempt, tried: dict[str, NotebookNode]
) -> None:
    judge(attempt, tried[str(attempt)])


@pytest.mark.long
def test_the_untouched_lab_fails_in_its_checks_only(tmp_path: Path) -> None:
    """On hosts that have seen a solved one: no mark is left from there."""
    done = run(untouched(NAME), tmp_path)
    assert_untouched(NAME, done)


@pytest.mark.long
def test_run_all_works_again_after_each_hosts_kernel_was_killed_in_the_middle(
    hosts: str, folder: Path
) -> None:
    """Killed with queue pairs in ERR and completions unread, in the section on recovery."""
    assert_runs_again(NAME, hosts, folder, until="recover-state")
