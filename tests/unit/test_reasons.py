"""Why an order failed, or why nothing came: the likely cause is named, and no other."""

from __future__ import annotations

from typing import Any

import pytest

from rdmalab.hostside.ledger import Completion, Ledger, Order
from rdmalab.hostside.reasons import Situation, failed, nothing_came


def now(**other: Any) -> Situation:
    facts: dict[str, Any] = {
        "state": "RTS",
        "peer": "bob",
        "timeout": 14,
        "retry_cnt": 6,
        "rnr_retry": 6,
        "reads": 16,
    }
    return Situation(**{**facts, **other})


def waited(*orders: Order, queue: str | None = None, **situation: Any) -> str:
    ledger = Ledger()
    for order in orders:
        ledger.enter(order)
    return nothing_came(ledger, 0, 1, 2.0, queue, now(**situation))


SEND, WRITE, READ = Order(1, "SEND"), Order(2, "RDMA_WRITE"), Order(3, "RDMA_READ")
QUIET = Order(4, "RDMA_WRITE", signaled=False)

CASES = {
    "no receive posted on the peer": waited(SEND, rnr_retry=7),
    "max_rd_atomic=0": waited(READ, reads=0),
    "retry_cnt=7": waited(WRITE, retry_cnt=7),
    "timeout=0": waited(WRITE, timeout=0).replace("only timeout=0 means", ""),
    "are unsignaled": waited(QUIET),
    "bob has sent nothing": waited(Order(5, "RECV"), queue="recv"),
    "nothing was posted": waited(),
    "has lost completions": waited(WRITE, events=("IBV_EVENT_CQ_ERR",)),
    "held in SQD": waited(WRITE, state="SQD"),
    "gives up after about 0.47 s": waited(WRITE),
}


@pytest.mark.parametrize("words", CASES)
def test_b18_the_likely_cause_is_named(words: str) -> None:
    assert words in CASES[words]


def test_b18_a_write_is_not_blamed_on_a_missing_receive() -> None:
    assert "no receive" not in waited(WRITE, rnr_retry=7)
    assert "no receive" in waited(Order(6, "RDMA_WRITE_WITH_IMM"), rnr_retry=7)


def test_many_open_orders_are_counted_not_listed() -> None:
    text = waited(*(Order(number, "SEND") for number in range(1, 60)))
    assert "SEND (wr_id 4), 55 more" in text and "(wr_id 5)" not in text


def test_b19_flushes_are_counted_behind_their_cause() -> None:
    cause = Completion(7, "RDMA_WRITE", "IBV_WC_REM_ACCESS_ERR")
    flushes = [Completion(n, "SEND", "IBV_WC_WR_FLUSH_ERR") for n in (8, 9)]
    text = failed(cause, flushes, now(state="ERR"))
    assert text.startswith("RDMA_WRITE (wr_id 7) failed.\nIBV_WC_REM_ACCESS_ERR: ")
    assert "+2 flushed because of it: SEND (wr_id 8), SEND (wr_id 9)." in text
    assert "WR_FLUSH_ERR" not in text, "the noise is not explained, only the cause"
    assert "reset(), then connect" in text


def test_b19_nothing_but_flushes_points_elsewhere() -> None:
    flush = Completion(1, "RECV", "IBV_WC_WR_FLUSH_ERR", queue="recv")
    assert "somebody moved this queue pair" in failed(flush, [], now(state="ERR"))
    told = failed(flush, [], now(state="ERR", events=("IBV_EVENT_QP_ACCESS_ERR",)))
    assert "refused a request of bob" in told


def test_b19_what_is_posted_afterwards_points_back_at_the_first_failure() -> None:
    flush = Completion(9, "SEND", "IBV_WC_WR_FLUSH_ERR")
    first = Completion(7, "RDMA_WRITE", "IBV_WC_REM_ACCESS_ERR")
    text = failed(flush, [], now(state="ERR"), first)
    assert "came earlier: RDMA_WRITE (wr_id 7) ended with IBV_WC_REM_ACCESS_ERR" in text
