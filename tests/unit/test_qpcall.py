"""The text of a call that moves a queue pair, and a refusal in words."""

from __future__ import annotations

import ast
import itertools

import pytest

from rdmalab.hostside.qpcall import INPUTS, call, explain, inputs_of
from rdmalab.hostside.qpstate import ATTRIBUTES, MOVES, STATES

VALUES = {key: one.default for key, one in INPUTS.items()} | {
    "dgid": "::ffff:10.0.0.2",
    "dest_qp_num": "18",
}


def given(old: str, new: str) -> tuple[str, ...]:
    return MOVES[old, new].required


def test_the_call_to_rtr_is_what_a_program_would_write() -> None:
    assert call("qp", "RTR", given("INIT", "RTR"), VALUES) == (
        "attr = QPAttr(qp_state=e.IBV_QPS_RTR)\n"
        'peer = GID("0000:0000:0000:0000:0000:ffff:0a00:0002")\n'
        "route = GlobalRoute(dgid=peer, sgid_index=1)\n"
        "attr.ah_attr = AHAttr(\n    gr=route, is_global=1, port_num=1)\n"
        "attr.path_mtu = e.IBV_MTU_1024\n"
        "attr.dest_qp_num = 18\n"
        "attr.rq_psn = 1000\n"
        "attr.max_dest_rd_atomic = 16\n"
        "attr.min_rnr_timer = 12  # 0.64 ms\n"
        "mask = (\n"
        "    e.IBV_QP_STATE | e.IBV_QP_AV |\n"
        "    e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN |\n"
        "    e.IBV_QP_RQ_PSN | e.IBV_QP_MAX_DEST_RD_ATOMIC |\n"
        "    e.IBV_QP_MIN_RNR_TIMER)\n"
        "qp.modify(attr, mask)"
    )


@pytest.mark.parametrize("pair", MOVES, ids="-".join)
def test_every_move_of_the_table_has_a_call_with_each_bit_once(pair: tuple[str, str]) -> None:
    """Python can read it, it sets what it names, and it is the last line that moves."""
    move = MOVES[pair]
    offered = [name for name in (*move.required, *move.optional) if inputs_of(name)]
    assert set(move.required) <= set(offered), "a required attribute without an input"
    text = call("ep.qp", move.new, tuple(offered), VALUES)
    assert max(map(len, text.splitlines())) <= 55, "it would be broken where it is shown"
    tree = ast.parse(text)
    assert ast.unparse(tree.body[-1]) == "ep.qp.modify(attr, mask)"
    bits = [node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    for name in ("STATE", *offered):
        assert bits.count(f"IBV_QP_{name}") == 1
        if name != "STATE":
            assert f"attr.{ATTRIBUTES[name].field} = " in text


def test_an_encoded_value_says_what_it_means() -> None:
    text = call("qp", "RTS", ("TIMEOUT",), {"timeout": "14"})
    assert "attr.timeout = 14  # 4.096 us * 2**14 = 67.1 ms" in text
    assert "for ever" in call("qp", "RTS", ("TIMEOUT",), {"timeout": "0"})
    assert "# 491.52 ms" in call("qp", "RTR", ("MIN_RNR_TIMER",), {"min_rnr_timer": "31"})
    assert "# 655.36 ms" in call("qp", "RTR", ("MIN_RNR_TIMER",), {"min_rnr_timer": "0"})
    assert "attr.path_mtu = 0  # no path MTU" in call("qp", "RTR", ("PATH_MTU",), {"path_mtu": 0})


@pytest.mark.parametrize(
    ("key", "text", "sentence"),
    [
        ("dest_qp_num", "", "dest_qp_num must be a whole number; there is nothing"),
        ("rq_psn", "many", "there is 'many'"),
        ("dgid", "10.0.0.2", "'10.0.0.2' is no GID"),
        ("qp_access_flags", "local_write, everything", "no right 'everything'"),
        ("rq_psn", "1); import os; (1", "must be a whole number"),
        ("dgid", '::"); import os; ("', "is no GID"),
    ],
)
def test_an_input_that_cannot_be_read_is_named(key: str, text: str, sentence: str) -> None:
    with pytest.raises(ValueError, match=sentence.replace("(", r"\(")):
        call("qp", "RTR", (INPUTS[key].attribute,), {**VALUES, key: text})


def test_b13_four_wrong_calls_get_four_explanations() -> None:
    """No way with a GID, a port that is not there, the wrong order, no access flags."""
    rtr, init = given("INIT", "RTR"), given("RESET", "INIT")
    said = [
        explain("INIT", "RTR", rtr, {**VALUES, "dgid": ""}, "EINVAL"),
        explain("RESET", "INIT", init, {**VALUES, "port_num": "2"}, "EINVAL"),
        explain("RESET", "RTS", given("RTR", "RTS"), VALUES, "EINVAL"),
        explain("RESET", "INIT", init[:2], VALUES, "EINVAL"),
    ]
    assert len(set(said)) == 4
    for text, part in zip(
        said,
        ("no GRH", "one port, number 1", "can be reached from RTR, SQD", "ACCESS_FLAGS"),
        strict=True,
    ):
        assert part in text


@pytest.mark.parametrize(
    ("errno", "part"),
    [("ENODATA", "Row 1 of our GID table is empty"), ("ETIMEDOUT", "Ethernet address of 10.0.0.2")],
)
def test_an_error_number_that_speaks_is_used(errno: str, part: str) -> None:
    assert part in explain("INIT", "RTR", given("INIT", "RTR"), VALUES, errno)


def test_every_refusal_is_explained() -> None:
    for old, new in itertools.product(STATES, STATES):
        text = explain(old, new, (), VALUES, "EINVAL")
        assert text.endswith(".")
        if (old, new) not in MOVES and new not in ("SQE", "ERR"):
            assert f"no move from {old} to {new}" in text
    assert "EINVAL" in explain("RESET", "ERR", (), VALUES, "EINVAL")
    assert "still be draining" in explain("SQD", "RESET", (), VALUES, "EINVAL")
    assert "takes no SQ_PSN" in explain("ERR", "RESET", ("SQ_PSN",), VALUES, "EINVAL")
