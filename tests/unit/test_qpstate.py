"""The table of a queue pair's states: complete, and in agreement with itself."""

from __future__ import annotations

import itertools

import pytest

from rdmalab.hostside import qpstate
from rdmalab.hostside.qpstate import MOVES, STATES


def test_every_pair_of_states_has_an_answer() -> None:
    assert len(STATES) == 7
    pairs = set(itertools.product(STATES, repeat=2))
    assert set(MOVES) <= pairs
    # 7 to RESET, 6 to ERR (not from RESET), INIT and RTR and RTS and SQD onward or into themselves.
    assert {pair for pair in pairs if qpstate.allowed(*pair)} == {
        *((state, "RESET") for state in STATES),
        *((state, "ERR") for state in STATES if state != "RESET"),
        *(("RESET", "INIT"), ("INIT", "INIT"), ("INIT", "RTR"), ("RTR", "RTS")),
        *(("RTS", "RTS"), ("RTS", "SQD"), ("SQD", "SQD"), ("SQD", "RTS"), ("SQE", "RTS")),
    }


@pytest.mark.parametrize("pair", MOVES, ids="-".join)
def test_a_move_is_described_in_known_attributes(pair: tuple[str, str]) -> None:
    move = MOVES[pair]
    assert (move.old, move.new) == pair
    assert move.note
    names = [*move.required, *move.optional]
    assert set(names) <= set(qpstate.ATTRIBUTES) - {"STATE"}
    assert len(set(names)) == len(names), "required or optional, not both"


def test_the_bring_up_is_that_of_the_manual_page() -> None:
    """As ibv_modify_qp(3) of rdma-core 56 lists them for RC."""
    assert {pair: set(move.required) for pair, move in MOVES.items() if move.required} == {
        ("RESET", "INIT"): {"PKEY_INDEX", "PORT", "ACCESS_FLAGS"},
        ("INIT", "RTR"): {
            *("AV", "PATH_MTU", "DEST_QPN", "RQ_PSN", "MAX_DEST_RD_ATOMIC", "MIN_RNR_TIMER")
        },
        ("RTR", "RTS"): {"SQ_PSN", "MAX_QP_RD_ATOMIC", "RETRY_CNT", "RNR_RETRY", "TIMEOUT"},
    }
    for kind, rows in qpstate.REQUIRED.items():
        assert set(rows) == {"INIT", "RTR", "RTS"}, kind
        for names in rows.values():
            assert set(names) <= set(qpstate.ATTRIBUTES)


def test_every_state_has_its_words() -> None:
    assert set(qpstate.MEANING) == set(qpstate.POSTING) == set(STATES)
    answers = {"refused", "kept", "done", "flushed"}
    for posting in qpstate.POSTING.values():
        assert set(posting) <= answers
    for old, new in qpstate.AUTOMATIC:
        assert {old, new} <= set(STATES)
    for difference in qpstate.DIFFERENCES.values():
        assert all(difference)


def test_what_is_missing_or_too_much_is_named() -> None:
    given = {"STATE", "PORT", "QKEY"}
    assert qpstate.missing("RESET", "INIT", given) == ("PKEY_INDEX", "ACCESS_FLAGS")
    assert qpstate.unknown("RESET", "INIT", given) == ("QKEY",)
    assert qpstate.unknown("RTS", "RTS", {"STATE", "TIMEOUT"}) == ("TIMEOUT",)


def test_attributes_are_told_one_to_a_line() -> None:
    told = qpstate.attributes_in_words(("PORT", "PKEY_INDEX")).splitlines()
    assert told[0].startswith("IBV_QP_PORT        port_num: ")
    assert told[1].startswith("IBV_QP_PKEY_INDEX  pkey_index: ")
    assert qpstate.attributes_in_words(()) == ""
