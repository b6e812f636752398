"""Captures of a real wire: packets of each operation, refusals, repetitions; tshark as witness."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

import rdmalab

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(120)]

# One end of a connection, in raw pyverbs: what a learner has after Lab 00. Path MTU 1024.
END = """
import time
import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR
from rdmalab import here
import os

ctx = Context(name=here.device)
pd = PD(ctx)
cq = CQ(ctx, 128)
ALL = e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ
ALL |= e.IBV_ACCESS_REMOTE_ATOMIC
mr = MR(pd, 1 << 18, ALL)
qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=QPCap(64, 64, 1, 1)))
card = {"gid": str(ctx.query_gid(1, here.gid_index)), "qp_num": qp.qp_num, "address": mr.buf}
card["rkey"] = mr.rkey

def connect(peer, rnr_retry=6):
    attr = QPAttr(port_num=1)
    attr.qp_access_flags = ALL
    attr.path_mtu = e.IBV_MTU_1024
    attr.dest_qp_num, attr.rq_psn, attr.sq_psn = peer["qp_num"], 1000, 1000
    attr.max_rd_atomic = attr.max_dest_rd_atomic = 16
    route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=here.gid_index)
    attr.ah_attr = AHAttr(gr=route, is_global=1, port_num=1)
    attr.timeout, attr.retry_cnt, attr.min_rnr_timer, attr.rnr_retry = 14, 6, 18, rnr_retry
    qp.to_rts(attr)

def post_recv(length=8192):
    qp.post_recv(RecvWR(num_sge=1, sg=[SGE(mr.buf + 131072, length, mr.lkey)]))

def post(opcode, length=8, rkey=None, imm=None, **atomic):
    wr = SendWR(opcode=opcode, num_sge=1, sg=[SGE(mr.buf, length, mr.lkey)], imm_data=imm or 0)
    rkey = peer["rkey"] if rkey is None else rkey
    if atomic:
        wr.set_wr_atomic(rkey, peer["address"] + 4096, **atomic)
    elif "SEND" not in e.ibv_wr_opcode(opcode).name:
        wr.set_wr_rdma(rkey, peer["address"] + 4096)
    qp.post_send(wr)

def wait(count=1, seconds=10):
    end, found = time.monotonic() + seconds, []
    while len(found) < count:
        found += cq.poll(8)[1] or []
        assert time.monotonic() < end, found
        os.sched_yield()
    return [e.ibv_wc_status(wc.status).name for wc in found]
"""


@pytest.fixture
def pair(shared_lab: rdmalab.Lab) -> Iterator[rdmalab.Lab]:
    """alice and bob, connected; a fresh pair of queue pairs for each test."""
    lab = shared_lab
    for host in lab.hosts:
        host.restart()
        host.run(END)
    connect(lab)
    yield lab


def connect(lab: rdmalab.Lab, **options: int) -> None:
    for host, other in ((lab.alice, lab.bob), (lab.bob, lab.alice)):
        host.put(peer=other.get("card"))
        host.run(f"connect(peer, **{options})")


def opcodes(table: list[rdmalab.packets.Packet]) -> list[str]:
    return [f"{packet.src}: {packet.title}" for packet in table]


def test_a_send_of_5000_bytes(pair: rdmalab.Lab) -> None:
    """At MTU 1024: First, three Middle, Last, and one acknowledgement, asked for by the last."""
    pair.bob.run("post_recv()")
    with pair.capture() as wire:
        pair.alice.run("post(e.IBV_WR_SEND, 5000); assert wait() == ['IBV_WC_SUCCESS']")
    middle = ["alice: SEND MIDDLE"] * 3
    assert opcodes(wire.packets) == ["alice: SEND FIRST", *middle, "alice: SEND LAST", "bob: ACK"]
    sends, ack = wire.packets[:5], wire.packets[5]
    assert [packet.psn for packet in sends] == [1000, 1001, 1002, 1003, 1004]
    assert [packet.payload for packet in sends] == [1024] * 4 + [904]
    assert [packet.ack_request for packet in sends] == [False] * 4 + [True]
    assert {packet.qp for packet in sends} == {pair.bob.get("card")["qp_num"]}
    assert (ack.psn, ack.msn, ack.syndrome, ack.dst) == (1004, 1, "ACK", "alice")
    assert ack.qp == pair.alice.get("card")["qp_num"]
    assert wire.count(opcode="SEND_MIDDLE", src="alice") == 3
    assert wire.packets.notes == ()


def test_fifty_short_captures_lose_nothing(pair: rdmalab.Lab) -> None:
    """What passes right after the capture begins, and right before it ends, is in it."""
    lost = []
    for number in range(50):
        with pair.capture("bob" if number % 2 else "alice") as wire:
            pair.alice.run("post(e.IBV_WR_RDMA_WRITE, 3000); wait()")
        seen = [packet.opcode.rpartition("_")[2] for packet in wire.packets]
        if seen != ["FIRST", "MIDDLE", "LAST", "ACKNOWLEDGE"]:
            lost.append((number, seen, wire.figures))
    assert not lost
