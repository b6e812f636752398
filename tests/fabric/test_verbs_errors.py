"""Errors of rdmalab.verbs teach: what was tried, what came back by name, why, and what to do."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator

import pytest

import rdmalab

from .endpoints import CLOSE, connect, counters, text_of, value

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(300)]

# A queue pair in INIT, and all that its move to RTR needs, as a learner would write it by hand.
BY_HAND = """
import pyverbs.enums as e
from pyverbs.addr import AHAttr, GID, GlobalRoute
from pyverbs.qp import QPAttr
from rdmalab import here
from rdmalab.verbs import Endpoint, modify

def gid(ip):
    return "0000:0000:0000:0000:0000:ffff:%02x%02x:%02x%02x" % tuple(int(x) for x in ip.split("."))

def rtr(index, ip, port=1, is_global=1, mtu=3):
    attr = QPAttr(qp_state=e.IBV_QPS_RTR)
    attr.path_mtu, attr.dest_qp_num, attr.max_dest_rd_atomic = mtu, 17, 1
    route = GlobalRoute(dgid=GID(gid(ip)), sgid_index=index)
    attr.ah_attr = AHAttr(port_num=port, is_global=is_global, gr=route)
    mask = e.IBV_QP_STATE | e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN | e.IBV_QP_RQ_PSN
    mask |= e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER
    modify(ep.qp, attr, mask)

ep = Endpoint()
"""


@pytest.fixture
def hand(shared_lab: rdmalab.Lab) -> Iterator[rdmalab.Lab]:
    """alice with an unconnected endpoint, and functions to move its queue pair by hand."""
    shared_lab.alice.run(f"{CLOSE}\n{BY_HAND}")
    yield shared_lab
    shared_lab.alice.run(CLOSE)


@pytest.fixture
def pair(shared_lab: rdmalab.Lab) -> Iterator[rdmalab.Lab]:
    """Hosts with a fresh, connected endpoint each, that give up within half a second."""
    connect(shared_lab)
    yield shared_lab
    for host in shared_lab.hosts:
        host.run(CLOSE)


# ---------------------------------------------------------------- bring-up


def test_b13_four_bad_bring_ups_have_four_different_explanations(hand: rdmalab.Lab) -> None:
    """B13: each names the errno, both states, and the field that is wrong."""
    alice = hand.alice
    no_access = (
        "attr = QPAttr(qp_state=e.IBV_QPS_INIT, port_num=1)\n"
        "modify(ep.qp, attr, e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT)"
    )
    too_far = (
        "attr = QPAttr(qp_state=e.IBV_QPS_RTS)\n"
        "modify(ep.qp, attr, e.IBV_QP_STATE | e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT"
        " | e.IBV_QP_RNR_RETRY | e.IBV_QP_SQ_PSN | e.IBV_QP_MAX_QP_RD_ATOMIC)"
    )
    texts = {
        ("RESET", "INIT", "qp_access_flags"): text_of(alice, no_access, "BringUpError"),
        ("RESET", "RTS", "RESET to INIT to RTR to RTS"): text_of(alice, too_far, "BringUpError"),
    }
    alice.run("ep.to_init()")
    call = "rtr(here.gid_index, '10.0.0.2', {})"
    texts["INIT", "RTR", "is_global=0"] = text_of(alice, call.format("is_global=0"), "BringUpError")
    texts["INIT", "RTR", "port_num is 2"] = text_of(alice, call.format("port=2"), "BringUpError")
    for (old, new, field), text in texts.items():
        assert f"from {old} to {new}" in text and "EINVAL (22, Invalid argument)" in text
        assert field in text, text
        others = [key[2] for key in texts if key[2] != field]
        assert not any(other in text for other in others), text


def test_b10_index_0_is_named_as_what_it_is(hand: rdmalab.Lab) -> None:
    """B10: the link-local GID at index 0, by value, and the index that would be right."""
    alice = hand.alice
    link_local = value(alice, "str(ep.ctx.query_gid(1, 0).gid)")
    assert link_local.startswith("fe80:")
    right = alice.gid_index
    alice.run("ep.to_init()")
    text = text_of(alice, "rtr(0, '10.0.0.2')", "BringUpError")
    assert "sgid_index 0 is the link-local GID fe80::" in text
    assert f"IPv4-mapped GID is at index {right}" in text
    text = text_of(alice, "rtr(77, '10.0.0.2')", "BringUpError")
    assert "sgid_index is 77, and that row of the GID table is empty" in text
    assert f"at index {right}" in text


def test_b10_an_endpoint_that_is_told_index_0_stops_before_any_move(hand: rdmalab.Lab) -> None:
    alice = hand.alice
    alice.run("ep.close()\nep, other = Endpoint(gid_index=0), Endpoint()")
    text = text_of(alice, "ep.connect_card(other.card)", "CardError")
    assert "fe80::" in text and "(link-local)" in text and "(IPv4-mapped)" in text
    assert "gid_index" in text
    assert value(alice, "ep.state") == "RESET"
    alice.run("other.close()")


def test_b12_a_peer_that_nobody_has_is_unreachable(hand: rdmalab.Lab) -> None:
    """B12: the kernel asks for the address and gives up after a second; the text has all of it."""
    hand.alice.run("ep.to_init()")
    text = text_of(hand.alice, "rtr(here.gid_index, '10.0.0.77')", "BringUpError")
    assert "10.0.0.77 is unreachable" in text
    assert re.search(r"ETIMEDOUT|EHOSTUNREACH|ENETUNREACH", text)
    assert "eth0 is up" in text and "ping 10.0.0.77" in text


def test_b12_a_link_that_is_down_is_named_and_comes_back(hand: rdmalab.Lab) -> None:
    """B12: bob's link goes down; the error within 15 s; then it is up again, in the same kernel."""
    alice = hand.alice
    alice.run("ep.to_init()")
    forget = ["sh", "-c", "ip neigh flush all"]
    with hand.fault("bob", down=True):
        hand.remote.run("exec", forget, host="alice", root=True)
        start = time.monotonic()
        text = text_of(alice, "rtr(here.gid_index, '10.0.0.2')", "BringUpError")
        assert time.monotonic() - start < 15
        assert "10.0.0.2 is unreachable" in text
    hand.remote.run("exec", forget, host="alice", root=True)
    alice.run(
        "import time\n"
        "for _ in range(20):\n"
        "    try:\n"
        "        rtr(here.gid_index, '10.0.0.2')\n"
        "        break\n"
        "    except RuntimeError:\n"
        "        time.sleep(0.5)"
    )
    assert value(alice, "ep.state") == "RTR"


def test_b25_more_reads_than_the_device_has(hand: rdmalab.Lab) -> None:
    """B25: asked and cap, both in the text."""
    cap = value(hand.alice, "ep.ctx.query_device().max_qp_rd_atom")
    text = text_of(hand.alice, f"Endpoint(max_rd_atomic={cap + 1})", "ResourceError")
    assert f"max_rd_atomic is {cap + 1}" in text and f"takes {cap} at most" in text
    assert "EINVAL" in text


def test_b25_read_depth_is_the_smaller_and_all_reads_succeed(shared_lab: rdmalab.Lab) -> None:
    """B25: 16 READs against a peer that answers one at a time."""
    connect(shared_lab, "max_rd_atomic=16", "max_rd_atomic=1")
    shared_lab.bob.run("ep.buffer[0:16] = bytes(range(16))")
    assert value(shared_lab.alice, "ep.agreed.max_rd_atomic") == 1
    assert value(shared_lab.alice, "ep.qp.query(1 << 13)[0].max_rd_atomic") == 1
    assert value(shared_lab.bob, "ep.qp.query(1 << 17)[0].max_dest_rd_atomic") == 1
    shared_lab.alice.run("for place in range(16): ep.post_read(place, 1, place)")
    assert value(shared_lab.alice, "all(c.ok for c in ep.wait(16, timeout_s=10))")
    assert value(shared_lab.alice, "ep.buffer[0:16]") == bytes(range(16))


def test_a_peer_that_does_not_come_or_does_not_exist_is_named(hand: rdmalab.Lab) -> None:
    text = text_of(hand.alice, "ep.connect('carol')", "CardError")
    assert "no host 'carol'" in text and "alice, bob" in text
    text = text_of(hand.alice, "ep.connect('bob', deadline_s=0.5)", "CardError")
    assert "10.0.0.2" in text and "has it called connect()" in text
    text = text_of(hand.alice, "ep.connect('alice')", "CardError")
    assert "connect_card" in text


# ---------------------------------------------------------------- memory and queues


def test_b04_the_memlock_limit_is_named_with_what_was_asked(shared_lab: rdmalab.Lab) -> None:
    """B04: a process whose limit is 64 KiB, as in many a container."""
    code = (
        "import sys; sys.path.insert(0, '/opt/rdmalab')\n"
        "from rdmalab.verbs import Endpoint\n"
        "Endpoint(size=16384).close(); print('16 KiB: fine')\n"
        "try: Endpoint(size=1 << 20)\n"
        "except Exception as error: print(type(error).__name__, error)"
    )
    argv = ["bash", "-c", 'ulimit -l 64; exec python3 -c "$0"', code]
    said = shared_lab.remote.run("exec", argv, host="bob", timeout_s=60)
    assert "16 KiB: fine" in said
    assert "ResourceError 1 MiB could not be registered: ENOMEM" in said
    assert "memlock" in said and "64 KiB" in said and "pinned already" in said


def test_b23_remote_write_without_local_write(hand: rdmalab.Lab) -> None:
    """B23: EINVAL of reg_mr, with the reason."""
    text = text_of(hand.alice, "Endpoint(access='remote_write')", "ResourceError")
    assert "EINVAL" in text and "remote_write without local_write" in text


def test_b26_the_inline_limit_is_probed_and_suggested(hand: rdmalab.Lab) -> None:
    """B26: no verb tells the limit, so the error finds it out; what it says then works."""
    alice = hand.alice
    text = text_of(alice, "Endpoint(max_inline=1 << 20)", "ResourceError")
    found = re.search(r"grants (\d+) at most", text)
    assert found and f"max_inline={found[1]}" in text and "EINVAL" in text
    connect(hand, f"max_inline={found[1]}, size=8192")
    limit = int(found[1])
    assert value(alice, "ep.max_inline") == limit
    alice.run(f"ep.buffer[0:{limit}] = b'a' * {limit}")
    alice.run(f"ep.post_write(0, {limit}, 0, inline=True); ep.buffer[0:{limit}] = b'b' * {limit}")
    alice.run("ep.wait()")
    assert value(hand.bob, f"ep.buffer[0:{limit}]") == b"a" * limit
    before = counters(hand, "bob")["rcvd_pkts"]
    text = text_of(alice, f"ep.post_write(0, {limit + 1}, 0, inline=True)", "PostError")
    assert f"{limit + 1} bytes inline" in text and f"takes {limit}" in text
    assert counters(hand, "bob")["rcvd_pkts"] == before, "something was sent all the same"


def test_b30_a_full_send_queue_is_named(pair: rdmalab.Lab) -> None:
    """B30: 200 unsignaled posts into a queue of 64; depth, what is in it, and the cure."""
    code = (
        "posted = 0\n"
        "for _ in range(200):\n"
        "    ep.post_write(0, 8, 0, signaled=False)\n"
        "    posted += 1"
    )
    text = text_of(pair.alice, code, "PostError")
    assert value(pair.alice, "posted") == 64
    assert "send queue is full" in text and "depth is 64" in text and "64 orders are in it" in text
    assert "Signal every" in text and "unsignaled" in text.lower()
    connect(pair)
    pair.alice.run(
        "for number in range(200):\n"
        "    ep.post_write(0, 8, 0, signaled=number % 16 == 15)\n"
        "    if number % 16 == 15: ep.wait()"
    )


def test_b30_a_completion_queue_is_not_overrun(pair: rdmalab.Lab) -> None:
    """B30: a CQ of 8, 64 signaled sends, nobody polls: refused at the ninth; then all is well."""
    connect(pair, "cq_depth=8")
    text = text_of(pair.alice, "for _ in range(64): ep.post_write(0, 8, 0)", "PostError")
    assert "room for 8 completions" in text and "IBV_EVENT_CQ_ERR" in text and "wait()" in text
    assert value(pair.alice, "len(ep.wait(8))") == 8
    pair.alice.run("ep.post_write(0, 8, 0); ep.wait()")
    assert value(pair.alice, "ep.events") == []


def test_b30_a_queue_that_was_overrun_is_told_of(pair: rdmalab.Lab) -> None:
    """B30: the same behind the endpoint's back, on the raw queue pair: the wait ends, in words."""
    connect(pair, "cq_depth=8")
    pair.alice.run(
        "from rdmalab.ledger import Order\n"
        "from rdmalab.orders import send_request\n"
        "for number in range(60):\n"
        "    order = Order(1000 + number, 'RDMA_WRITE', 0, 8, 0)\n"
        "    ep.qp.post_send(send_request(order, ep.mr, ep.peer))"
    )
    text = text_of(pair.alice, "ep.wait(60, timeout_s=2)", "WaitTimeout")
    assert "IBV_EVENT_CQ_ERR" in text and "too small" in text
    connect(pair)
    pair.alice.run("ep.write(b'well again', 0)")


# ---------------------------------------------------------------- waiting


def test_b18_rnr_retry_7_ends_at_the_deadline_and_names_the_cause(shared_lab: rdmalab.Lab) -> None:
    """B18: the device would try for ever; our wait does not, and the next cell works."""
    connect(shared_lab, "rnr_retry=7")
    alice = shared_lab.alice
    alice.run("wr_id = ep.post_send(0, 8)")
    start = time.monotonic()
    text = text_of(alice, "ep.wait(timeout_s=2)", "WaitTimeout")
    assert time.monotonic() - start < 10
    assert f"SEND (wr_id {value(alice, 'wr_id')})" in text
    assert "no receive posted on the peer (bob)" in text and "rnr_retry=7" in text
    assert "in RTS" in text and "1 posted, 0 completed" in text
    shared_lab.bob.run("ep.post_recv()")
    assert value(alice, "ep.wait()[0].ok")


def test_b18_rnr_retry_0_fails_at_once(shared_lab: rdmalab.Lab) -> None:
    """B18: the other extreme: an error on a harmless race."""
    connect(shared_lab, "rnr_retry=0")
    text = text_of(shared_lab.alice, "ep.send(b'early')", "CompletionError")
    assert "IBV_WC_RNR_RETRY_EXC_ERR" in text and "post a receive before the send" in text
    shared_lab.alice.run("x = 1")


def test_b18_waits_that_cannot_end_well_say_why(pair: rdmalab.Lab) -> None:
    """B18: nothing posted; only unsignaled posted; a receive to which nobody sends."""
    alice = pair.alice
    text = text_of(alice, "ep.wait(timeout_s=0.2)", "WaitTimeout")
    assert "nothing was posted" in text
    alice.run("ep.post_write(0, 8, 0, signaled=False)")
    text = text_of(alice, "ep.wait(timeout_s=0.2)", "WaitTimeout")
    assert "unsignaled" in text
    connect(pair, prepare="ep.post_recv()")
    text = text_of(alice, "ep.wait(timeout_s=0.2, queue='recv')", "WaitTimeout")
    assert "bob has sent nothing" in text and "RECV (wr_id 1)" in text


def test_b19_the_first_real_cause_comes_before_the_flushes(pair: rdmalab.Lab) -> None:
    """B19: one WRITE with a wrong rkey, five good ones behind it."""
    alice = pair.alice
    alice.run(
        "import dataclasses\n"
        "good = ep.peer\n"
        "ep.peer = dataclasses.replace(good, rkey=good.rkey ^ 1)\n"
        "bad = ep.post_write(0, 8, 0)\n"
        "ep.peer = good\n"
        "for _ in range(4): ep.post_write(0, 8, 0)\n"
        "ep.post_read(0, 8, 0)\n"
        "try: ep.wait(6)\n"
        "except Exception as error: caught = error"
    )
    text = value(alice, "str(caught)")
    bad = value(alice, "bad")
    assert text.startswith(f"RDMA_WRITE (wr_id {bad}) failed.\nIBV_WC_REM_ACCESS_ERR: ")
    assert text.count("Usual cause:") == 1 and "+5 flushed because of it" in text
    assert value(alice, "(caught.cause.wr_id, caught.cause.status)") == [
        bad,
        "IBV_WC_REM_ACCESS_ERR",
    ]
    flushed = value(alice, "[c.operation for c in caught.flushed]")
    assert flushed == ["RDMA_WRITE"] * 4 + ["RDMA_READ"]
    assert value(alice, "ep.state") == "ERR" and "reset(), then connect" in text
    after = text_of(alice, "ep.write(b'and another', 0)", "CompletionError")
    assert f"came earlier: RDMA_WRITE (wr_id {bad}) ended with IBV_WC_REM_ACCESS_ERR" in after
    assert "reset() it first" in text_of(alice, "ep.connect('bob')", "BringUpError")
    job = pair.bob.start("ep.reset(); ep.connect('alice')", timeout_s=30)
    alice.run("ep.reset(); ep.connect('bob')")
    job.result()
    alice.run("ep.write(b'again', 0)")


def test_b19_the_other_side_learns_that_it_was_its_peer(pair: rdmalab.Lab) -> None:
    """B19: bob sees his receives flushed and no cause; the device's event tells it."""
    pair.bob.run("for _ in range(3): ep.post_recv()")
    text_of(pair.alice, "ep.write(b'far too far', 1 << 40)", "CompletionError")
    text = text_of(pair.bob, "ep.wait(timeout_s=5)", "CompletionError")
    assert "+2 flushed" in text and "RECV (wr_id 1) failed" in text
    if "IBV_EVENT_QP_ACCESS_ERR" in value(pair.bob, "ep.events"):
        assert "refused a request of alice" in text


def test_b23_each_mistake_with_an_atomic_has_its_own_explanation(pair: rdmalab.Lab) -> None:
    """B23: no REMOTE_ATOMIC at the target; an odd address; max_rd_atomic 0; and how it is right."""
    alice = pair.alice
    pair.bob.run("ep.buffer[64:72] = (37).to_bytes(8, 'little')")
    assert value(alice, "ep.fetch_add(64, 5)") == 37
    assert value(pair.bob, "int.from_bytes(ep.buffer[64:72], 'little')") == 42
    text = text_of(alice, "ep.fetch_add(68, 1)", "PostError")
    assert "EINVAL" in text and "multiple of 8" in text and "IBV_WC_REM_INV_REQ_ERR" in text
    connect(pair, bob="access='local_write remote_write remote_read'")
    text = text_of(alice, "ep.fetch_add(64, 1)", "CompletionError")
    assert "IBV_WC_REM_ACCESS_ERR" in text and "REMOTE_ATOMIC" in text
    connect(pair, bob="max_rd_atomic=0")
    alice.run("ep.post_fetch_add(0, 64, 1)")
    text = text_of(alice, "ep.wait(timeout_s=1)", "WaitTimeout")
    assert "max_rd_atomic=0" in text and "never begun" in text
