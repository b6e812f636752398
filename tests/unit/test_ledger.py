"""The ledger: what was posted, what is open, what a completion settles."""

from __future__ import annotations

from rdmalab.hostside.ledger import Ledger, Order


def posted(ledger: Ledger, *signaled: bool, operation: str = "RDMA_WRITE") -> list[int]:
    numbers = []
    for sign in signaled:
        order = Order(ledger.next_id(), operation, signaled=sign)
        ledger.enter(order)
        numbers.append(order.wr_id)
    return numbers


def test_a_signaled_send_settles_the_unsignaled_before_it() -> None:
    ledger = Ledger()
    numbers = posted(ledger, False, False, True, False)
    assert (len(ledger.open["send"]), ledger.expected["send"], ledger.unsignaled()) == (4, 1, 3)
    settled = ledger.settle("send", numbers[2])
    assert settled is not None and settled.wr_id == numbers[2]
    assert list(ledger.open["send"]) == [numbers[3]]
    assert (ledger.expected["send"], ledger.unsignaled()) == (0, 1)


def test_receives_settle_one_by_one() -> None:
    ledger = Ledger()
    first, second = posted(ledger, True, True, operation="RECV")
    ledger.settle("recv", second)
    assert list(ledger.open["recv"]) == [first]
    assert ledger.open["send"] == {} and ledger.completed == {"send": 0, "recv": 1}


def test_a_completion_of_somebody_elses_order_settles_none_of_ours() -> None:
    ledger = Ledger()
    posted(ledger, True)
    assert ledger.settle("send", 4711) is None
    assert len(ledger.open["send"]) == ledger.expected["send"] == 1


def test_numbers_are_never_used_twice_even_after_a_reset() -> None:
    ledger = Ledger()
    before = posted(ledger, True, False)
    ledger.forget()
    after = posted(ledger, True)
    assert ledger.open["send"].keys() == set(after) and not set(before) & set(after)
    assert ledger.expected["send"] == 1
