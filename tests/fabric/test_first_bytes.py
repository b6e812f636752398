"""The main job: two hosts, and bytes that one writes into the other's memory."""

from __future__ import annotations

import pytest

import rdmalab

pytestmark = [pytest.mark.fabric, pytest.mark.timeout(300)]

SIZES = (1, 1024, 1025, 4096, 65_536, 1_048_576)

SET_UP = """
import os, socket, time
from pyverbs.addr import AHAttr, GID, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, SendWR
import pyverbs.enums as e
from rdmalab import here

ctx = Context(name=here.device)
pd, cq = PD(ctx), CQ(ctx, 16)
mr = MR(pd, 1 << 20, e.IBV_ACCESS_LOCAL_WRITE | e.IBV_ACCESS_REMOTE_WRITE)
caps = QPCap(max_send_wr=8, max_recv_wr=8)
qp = QP(pd, QPInitAttr(qp_type=e.IBV_QPT_RC, scq=cq, rcq=cq, cap=caps))
gid = ctx.query_gid(1, here.gid_index).gid
card = {"qpn": qp.qp_num, "addr": mr.buf, "rkey": mr.rkey, "gid": gid}

def connect(peer, mtu):
    attr = QPAttr(qp_state=e.IBV_QPS_INIT, port_num=1)
    attr.qp_access_flags = e.IBV_ACCESS_REMOTE_WRITE
    qp.modify(attr, e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS)
    route = GlobalRoute(dgid=GID(peer["gid"]), sgid_index=here.gid_index)
    attr = QPAttr(qp_state=e.IBV_QPS_RTR)
    attr.path_mtu, attr.dest_qp_num, attr.rq_psn = mtu, peer["qpn"], 0
    attr.max_dest_rd_atomic, attr.min_rnr_timer = 1, 12
    attr.ah_attr = AHAttr(port_num=1, is_global=1, gr=route)
    qp.modify(attr, e.IBV_QP_STATE | e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN
              | e.IBV_QP_RQ_PSN | e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER)
    attr = QPAttr(qp_state=e.IBV_QPS_RTS)
    attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.sq_psn, attr.max_rd_atomic = 14, 6, 6, 0, 1
    qp.modify(attr, e.IBV_QP_STATE | e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT | e.IBV_QP_RNR_RETRY
              | e.IBV_QP_SQ_PSN | e.IBV_QP_MAX_QP_RD_ATOMIC)

def write(peer, data):
    mr.write(data, len(data))
    wr = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[SGE(mr.buf, len(data), mr.lkey)],
                send_flags=e.IBV_SEND_SIGNALED)
    wr.set_wr_rdma(peer["rkey"], peer["addr"])
    qp.post_send(wr)
    end = time.monotonic() + 20
    while time.monotonic() < end:
        n, wcs = cq.poll()
        if n:
            return wcs[0].status
        os.sched_yield()
    raise TimeoutError("no completion in 20 s")
"""


@pytest.mark.parametrize("mtu_name", ["IBV_MTU_1024", "IBV_MTU_4096"])
def test_write_is_byte_equal_both_ways(lab: rdmalab.Lab, mtu_name: str) -> None:
    """Each size around the path MTU and up to 1 MiB, from alice to bob and back."""
    for host in lab.hosts:
        host.run(SET_UP)
    cards = {host.name: host.get("card") for host in lab.hosts}
    for host, peer in ((lab.alice, "bob"), (lab.bob, "alice")):
        host.put(peer=cards[peer])
        host.run(f"connect(peer, e.{mtu_name})")
    for host, other in ((lab.alice, lab.bob), (lab.bob, lab.alice)):
        for size in SIZES:
            host.run(f"data = os.urandom({size}); status = write(peer, data)")
            other.run(f"seen = mr.read({size}, 0)")
            assert host.get("status") == 0
            assert other.get("seen") == host.get("data"), f"{size} bytes from {host.name}"
