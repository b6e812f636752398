"""What the device really answers, held against what statuses.py says of it; and limits kept.

Both ends are on alice: her device takes its own packets in, so one process drives both in order.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest

import rdmalab
from rdmalab.hostside.statuses import STATUSES

from .endpoints import CLOSE, text_of, value

pytestmark = [pytest.mark.fabric, pytest.mark.long, pytest.mark.timeout(300)]

BOTH_ENDS = """
import dataclasses
import pyverbs.enums as e
from pyverbs.wr import SGE
from rdmalab import bringup
from rdmalab.ledger import Order
from rdmalab.orders import send_request
from rdmalab.verbs import Endpoint

FAST = {"rnr_retry": 1}  # not less patience with acknowledgements: a busy machine answers late

def ends(first={}, second={}, twist=None):
    a, b = Endpoint(**{**FAST, **first}), Endpoint(**{**FAST, **second})
    a_card, b_card = a.card, b.card
    if twist: a_card, b_card = twist(a_card, b_card)
    a.connect_card(b_card)
    b.connect_card(a_card)
    return a, b

def statuses(a, b, n=1):
    found = {}
    for name, ep in (("requester", a), ("responder", b)):
        try: ep.wait(n, timeout_s=8 if ep is a else 0.3)
        except Exception as error:
            cause = getattr(error, "cause", None)
            found[name] = cause.status.removeprefix("IBV_WC_") if cause else None
        else: found[name] = "SUCCESS"
    return found

def raw(ep, operation, address, length, lkey, offset=0):
    order = Order(9000, operation, 0, length, None if operation == "SEND" else offset)
    wr = send_request(order, ep.mr, ep.peer)
    wr.sg_list = SGE(address, length, lkey)
    ep.qp.post_send(wr)

def run(name):
    a, b = CASES[name]()
    try: return statuses(a, b)
    finally: a.close(); b.close()

def too_long():
    a, b = ends(); b.post_recv(0, 32); a.post_send(0, 64); return a, b
def wrong_lkey_send():
    a, b = ends(); b.post_recv(); raw(a, "SEND", a.mr.buf, 8, a.mr.lkey ^ 1); return a, b
def wrong_lkey_write():
    a, b = ends(); raw(a, "RDMA_WRITE", a.mr.buf, 8, a.mr.lkey ^ 1); return a, b
def past_the_end():
    a, b = ends(); raw(a, "RDMA_WRITE", a.mr.buf + 4090, 8, a.mr.lkey); return a, b
def read_into_readonly():
    a, b = ends({"access": ""}); a.post_read(0, 8, 0); return a, b
def receive_readonly():
    a, b = ends({}, {"access": ""}); b.post_recv(); a.post_send(0, 8); return a, b
def wrong_rkey():
    a, b = ends(); a.peer = dataclasses.replace(a.peer, rkey=a.peer.rkey ^ 1)
    a.post_write(0, 8, 0); return a, b
def no_right():
    a, b = ends({}, {"access": "local_write remote_write"}); a.post_read(0, 8, 0); return a, b
def no_right_on_the_qp():
    a, b = Endpoint(**FAST), Endpoint(**FAST)
    bringup.to_init(b.qp, e.IBV_ACCESS_REMOTE_WRITE)
    a.connect_card(b.card); b.connect_card(a.card)
    a.post_read(0, 8, 0); return a, b
def other_mtu():
    a, b = ends(twist=lambda x, y: (dataclasses.replace(x, path_mtu=256),
                                    dataclasses.replace(y, path_mtu=1024)))
    b.post_recv(); a.post_send(0, 3000); return a, b
def no_receive():
    a, b = ends(); a.post_send(0, 8); return a, b
def gone():
    a, b = ends(); b.reset(); a.post_write(0, 8, 0); return a, b
def other_psn():
    a, b = ends(twist=lambda x, y: (dataclasses.replace(x, psn=(x.psn - 1000) % (1 << 24)), y))
    a.post_write(0, 8, 0); return a, b
def flushed():
    a, b = ends(); b.post_recv()
    from pyverbs.qp import QPAttr
    b.qp.modify(QPAttr(qp_state=e.IBV_QPS_ERR), e.IBV_QP_STATE); a.post_write(0, 8, 0); return a, b

CASES = {name: made for name, made in globals().items() if name in NAMES}
"""


class Answer(NamedTuple):
    """Statuses by the specification and by Soft-RoCE; None: no completion."""

    spec: tuple[str | None, str | None]
    here: tuple[str | None, str | None]


def same(requester: str | None, responder: str | None = None) -> Answer:
    return Answer((requester, responder), (requester, responder))


EXPECTED = {
    "too_long": Answer(("REM_INV_REQ_ERR", "LOC_LEN_ERR"), ("REM_OP_ERR", "LOC_QP_OP_ERR")),
    "wrong_lkey_send": Answer(("LOC_PROT_ERR", None), ("WR_FLUSH_ERR", None)),
    "wrong_lkey_write": Answer(("LOC_PROT_ERR", None), ("WR_FLUSH_ERR", None)),
    "past_the_end": Answer(("LOC_PROT_ERR", None), ("WR_FLUSH_ERR", None)),
    "read_into_readonly": same("LOC_PROT_ERR"),
    "receive_readonly": Answer(("REM_OP_ERR", "LOC_PROT_ERR"), ("REM_OP_ERR", "LOC_QP_OP_ERR")),
    "wrong_rkey": same("REM_ACCESS_ERR"),
    "no_right": same("REM_ACCESS_ERR"),
    "no_right_on_the_qp": same("REM_INV_REQ_ERR"),
    "other_mtu": same("REM_INV_REQ_ERR", "REM_INV_REQ_ERR"),
    "no_receive": same("RNR_RETRY_EXC_ERR"),
    "gone": same("RETRY_EXC_ERR"),
    "other_psn": same("RETRY_EXC_ERR"),
    "flushed": same("RETRY_EXC_ERR", "WR_FLUSH_ERR"),
}


@pytest.fixture(scope="module")
def answers(start_shared: Callable[[], rdmalab.Lab]) -> dict[str, dict[str, str | None]]:
    """What the device answered in each case, run one after the other in one process."""
    shared_lab = start_shared()
    shared_lab.alice.run(CLOSE)
    shared_lab.alice.run(f"NAMES = {sorted(EXPECTED)}\n{BOTH_ENDS}")
    shared_lab.alice.run("answers = {name: run(name) for name in CASES}", timeout_s=120)
    found: dict[str, dict[str, str | None]] = shared_lab.alice.get("answers")
    return found


@pytest.mark.parametrize("case", EXPECTED)
def test_the_device_answers_as_we_say(case: str, answers: dict[str, Any]) -> None:
    """By Soft-RoCE, or (another kernel may be better) by the specification; both are taught."""
    got = (answers[case]["requester"], answers[case]["responder"])
    assert got in (EXPECTED[case].spec, EXPECTED[case].here)


@pytest.mark.parametrize("case", [name for name, a in EXPECTED.items() if a.spec != a.here])
def test_where_the_two_differ_the_explanation_says_so(case: str) -> None:
    """Each status that Soft-RoCE gives instead names the specification's, or the other way."""
    spec, here = EXPECTED[case]
    by_name = {status.name: status for status in STATUSES.values()}
    for right, got in zip(spec, here, strict=True):
        if right is not None and got is not None and right != got:
            said = by_name[got].soft_roce + by_name[right].soft_roce
            assert right in said or got in said, (right, got)


def test_b14_other_path_mtus_are_explained_as_such(shared_lab: rdmalab.Lab) -> None:
    """B14: 1024 on one side and 256 on the other, set by hand: the error's text says path MTU."""
    shared_lab.alice.run(f"NAMES = ['other_mtu']\n{BOTH_ENDS}\na, b = other_mtu()")
    text = text_of(shared_lab.alice, "a.wait()", "CompletionError")
    assert "IBV_WC_REM_INV_REQ_ERR" in text and "path MTU" in text
    shared_lab.alice.run("a.close(); b.close()")


EDGES = {  # address (start is the region's), length, twist of the key, whether it is allowed
    "inside": ("start + 4095", 1, 0, True),
    "off by one": ("start + 4096", 1, 0, False),
    "over the end": ("start + 4095", 2, 0, False),
    "before the start": ("start - 1", 1, 0, False),
    "a wrong key": ("start", 1, 1, False),
    "wraps": ("(1 << 64) - 1024", 1024, 0, False),
}


def test_b22_nothing_gets_past_the_edge_of_a_region(
    shared_lab: rdmalab.Lab, guest: Callable[..., Any]
) -> None:
    """B22: off by one, before the start, a wrong key, addresses that wrap; the guest stays well."""
    alice = shared_lab.alice
    alice.run(f"NAMES = []\n{BOTH_ENDS}")
    alice.run(
        "from pyverbs.mr import MR\n"
        "from rdmalab.memory import Buffer\n"
        "def write(address, length, twist):\n"
        "    a, b = ends()\n"
        "    three = Buffer(3 * 4096)\n"
        "    three[0:12288] = b'g' * 12288\n"
        "    rights = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE\n"
        "    middle = MR(b.pd, 4096, rights, three.address + 4096)\n"
        "    where = eval(address, {'start': middle.buf})\n"
        "    a.peer = dataclasses.replace(a.peer, address=where, rkey=middle.rkey ^ twist)\n"
        "    a.buffer[0:length] = b'x' * length\n"
        "    a.post_write(0, length, 0)\n"
        "    said = statuses(a, b)['requester']\n"
        "    middle.close(); a.close(); b.close()\n"
        "    whole = three[0:4096] + three[8192:12288] == b'g' * 8192\n"
        "    return said, whole, three[8191:8192].decode()"
    )
    for name, (address, length, twist, good) in EDGES.items():
        expected = ["SUCCESS", True, "x"] if good else ["REM_ACCESS_ERR", True, "g"]
        assert value(alice, f"write({address!r}, {length}, {twist})") == expected, name
    assert not re.search(r"BUG:|Oops|general protection", guest(shared_lab, "dmesg").out)


@pytest.mark.long
def test_b24_atomics_under_loss_count_exactly_once(shared_lab: rdmalab.Lab) -> None:
    """B24: two clients add 1 to one number, 300 times each, while 5 % of the packets are lost."""
    alice, bob = shared_lab.alice, shared_lab.bob
    for host in (alice, bob):
        host.run(CLOSE)
        host.run(
            "from rdmalab.verbs import Endpoint\n"
            "one = Endpoint(timeout=13)\n"
            f"two = Endpoint(timeout=13, share=one if {host is bob} else None)"
        )
    cards = {
        host.name: [value(host, f"{n}.card.as_dict()") for n in ("one", "two")]
        for host in (alice, bob)
    }
    for host, peer in ((alice, "bob"), (bob, "alice")):
        host.put(cards=cards[peer])
        host.run("one.connect_card(cards[0]); two.connect_card(cards[1])")
    with shared_lab.fault("bob", loss="5%"):
        alice.run(
            "old = []\n"
            "for _ in range(300):\n"
            "    for ep in (one, two): ep.post_fetch_add(0, 0, 1)\n"
            "    for ep in (one, two):\n"
            "        ep.wait(timeout_s=20)\n"
            "        old.append(int.from_bytes(ep.buffer[0:8], 'little'))",
            timeout_s=110,
        )
    assert sorted(alice.get("old")) == list(range(600))
    assert value(bob, "int.from_bytes(one.buffer[0:8], 'little')") == 600
    alice.run(
        "import json, subprocess\n"
        "shown = subprocess.check_output(['rdma', '-j', 'statistic', 'show'])\n"
        "again = sum(row.get('completer_retry_err', 0) for row in json.loads(shown))"
    )
    assert alice.get("again") > 0, "no packet was lost, so nothing was tested"
    for host in (alice, bob):
        host.run("two.close(); one.close()")
