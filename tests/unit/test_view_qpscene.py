"""What the live state diagram shows, told by answers as a host gives them (plain data)."""

from __future__ import annotations

import json
from typing import Any

import pytest

from rdmalab.hostside.qpstate import STATES
from rdmalab.view.qpscene import Scene


def told(state: str, **more: Any) -> dict[str, Any]:
    """As ``rdmalab.qpmove.look`` answers."""
    facts = {"number": 17, "type": "RC", "gid": "::ffff:10.0.0.1", "gid_index": 1, "mtu": 4096}
    return {"found": True, "state": state, **facts, **more}


def result(old: str, state: str, errno: str = "", error: str = "") -> dict[str, Any]:
    """As ``rdmalab.qpmove.perform`` answers."""
    return {**told(state), "old": old, "errno": errno, "error": error, "took_ms": 3.2}


@pytest.fixture
def scene() -> Scene:
    scene = Scene("alice", "qp")
    scene.seen(told("RESET"))
    return scene


@pytest.mark.parametrize("state", STATES)
def test_all_seven_moves_are_offered_and_the_illegal_ones_marked(state: str) -> None:
    scene = Scene("alice", "qp")
    scene.seen(told(state))
    moves = scene.as_dict()["moves"]
    assert [move["to"] for move in moves] == list(STATES)
    assert all(move["note"] for move in moves)
    assert json.loads(json.dumps(scene.as_dict())) == scene.as_dict(), "the page gets plain data"


def test_the_usual_next_move_is_chosen_so_that_enter_leads_on(scene: Scene) -> None:
    walked = []
    for _ in range(3):
        old, new = scene.state, scene.chosen
        scene.answered(result(old, new))
        walked.append(new)
        assert scene.kind == "done"
    assert walked == ["INIT", "RTR", "RTS"]
    assert scene.log == [
        "RESET to INIT: done, in 3 ms. Now: INIT.",
        "INIT to RTR: done, in 3 ms. Now: RTR.",
        "RTR to RTS: done, in 3 ms. Now: RTS.",
    ]


def test_a_refusal_keeps_the_choice_and_says_why(scene: Scene) -> None:
    scene.chosen = "RTR"
    scene.answered(result("RESET", "RESET", "EINVAL"))
    assert scene.kind == "refused"
    assert "refused with EINVAL. There is no move from RESET to RTR" in scene.answer
    assert "still in RESET" in scene.answer
    assert scene.chosen == "RTR"


def test_what_python_refuses_is_no_answer_of_the_kernel(scene: Scene) -> None:
    scene.answered(result("RESET", "RESET", error="OverflowError: value too large"))
    assert scene.kind == "trouble"
    assert "did not reach the kernel. OverflowError" in scene.answer


def test_an_attribute_that_is_left_out_is_not_in_the_call(scene: Scene) -> None:
    assert "IBV_QP_PORT" in scene.call()
    scene.give("PORT", False)
    assert "PORT" not in scene.call()
    (port,) = (field for field in scene.fields() if field["attribute"] == "PORT")
    assert port["required"]
    assert not port["given"]
    scene.give("PORT", True)
    assert scene.call().count("IBV_QP_PORT") == 1


def test_a_peers_card_fills_in_what_the_reader_has_not_set(scene: Scene) -> None:
    scene.set("rq_psn", " 7 ")
    for card in (
        {"gid": "::ffff:10.0.0.2", "qp_num": 18, "psn": 1000, "mtu": 3},  # by hand: MTU as a code
        {"gid": "::ffff:10.0.0.2", "qpn": 18, "psn": 9, "path_mtu": 1024},  # Endpoint's
        {"gid": "::ffff:10.0.0.2", "number": 18, "mtu": 1024},  # qpmove.look's
    ):
        scene.values.update(dgid="", dest_qp_num="", path_mtu="")
        scene.learn(card)
        assert scene.values["dgid"] == "::ffff:10.0.0.2"
        assert scene.values["dest_qp_num"] == "18"
        assert scene.values["path_mtu"] == "1024"
        assert scene.values["rq_psn"] == "7"


def test_path_mtu_is_the_smaller_of_both_sides(scene: Scene) -> None:
    scene.seen(told("RESET", mtu=1024))
    scene.learn({"mtu": 4096})
    assert scene.values["path_mtu"] == "1024"


def test_what_code_does_is_told(scene: Scene) -> None:
    scene.seen(told("INIT"))
    assert scene.answer == "RESET to INIT: done by code, not from here."
    scene.seen(told("INIT"))
    assert len(scene.log) == 1, "nothing new, nothing said"
    scene.seen(told("RESET", number=18))
    assert scene.answer == "qp is another queue pair now, in RESET."
    scene.seen({"found": False, "why": "qp is closed; run the cell that makes it"})
    assert scene.kind == "trouble"
    assert "qp is closed" in scene.answer
    assert scene.as_dict()["moves"] == []
    assert scene.as_dict()["call"] == ""
    scene.seen(told("RESET"))
    assert scene.answer == "qp is there, in RESET."


def test_an_unreadable_input_is_said_where_the_call_would_be(scene: Scene) -> None:
    scene.set("port_num", "one")
    assert scene.as_dict()["call"] == "# port_num must be a whole number; there is 'one'."


def test_a_datagram_queue_pair_has_its_own_attributes() -> None:
    scene = Scene("alice", "qp")
    scene.seen(told("RESET", type="UD"))
    assert "QKEY" in scene.given()
    assert "moves of RC" in scene.status()


def test_a_device_may_move_a_queue_pair_too() -> None:
    scene = Scene("alice", "qp")
    for state in ("RTS", "ERR"):
        scene.seen(told(state))
    assert scene.answer == "RTS to ERR: done by code, or the device itself, not from here."


def test_after_a_while_at_work_the_host_is_there_again(scene: Scene) -> None:
    scene.busy = True
    scene.seen(told("RESET"))
    assert scene.answer == "alice has time again: qp is in RESET."
