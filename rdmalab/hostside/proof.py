"""Does a message get from one port of an RDMA device to another? Tried, with real verbs.

    python3 proof.py DEVICE PORT GID_INDEX DEVICE PORT GID_INDEX

Two queue pairs in one process, connected with each other, and one SEND. Prints ``ok``, or what
failed in one line. A file of its own: the doctor runs it before there are any hosts.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import pyverbs.enums as e
from pyverbs.addr import AHAttr, GlobalRoute
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr
from pyverbs.wr import SGE, RecvWR, SendWR

__all__ = ["main"]

MESSAGE = b"proof"
DEADLINE_S = 5.0


class End:
    """One end: device, queue pair, a few bytes of registered memory."""

    def __init__(self, device: str, port: str, gid_index: str) -> None:
        self.name, self.port, self.gid_index = device, int(port), int(gid_index)
        self.ctx = Context(name=device)
        self.pd = PD(self.ctx)
        self.cq = CQ(self.ctx, 4)
        self.mr = MR(self.pd, 64, e.IBV_ACCESS_LOCAL_WRITE)
        cap = QPCap(max_send_wr=2, max_recv_wr=2, max_send_sge=1, max_recv_sge=1)
        init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=self.cq, rcq=self.cq, cap=cap)
        self.qp = QP(self.pd, init, QPAttr(port_num=self.port))

    def connect(self, peer: End) -> None:
        """Bring the queue pair up towards the peer's."""
        gid = peer.ctx.query_gid(peer.port, peer.gid_index)
        route = GlobalRoute(dgid=gid, sgid_index=self.gid_index)
        attr = QPAttr(port_num=self.port)
        attr.dest_qp_num = peer.qp.qp_num
        attr.path_mtu = e.IBV_MTU_1024
        attr.max_rd_atomic = attr.max_dest_rd_atomic = 1
        attr.timeout, attr.retry_cnt, attr.rnr_retry, attr.min_rnr_timer = 14, 3, 3, 12
        attr.ah_attr = AHAttr(port_num=self.port, is_global=1, gr=route)
        self.qp.to_rts(attr)

    def sge(self) -> Any:
        """Where the message is, or comes to."""
        return SGE(self.mr.buf, len(MESSAGE), self.mr.lkey)

    def wait(self, what: str) -> None:
        """One completion. ``RuntimeError`` if it is late or tells of a failure."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            number, found = self.cq.poll()
            if number:
                status = e.ibv_wc_status(found[0].status).name
                if found[0].status != e.IBV_WC_SUCCESS:
                    raise RuntimeError(f"{what} on {self.name} ended with {status}")
                return
            time.sleep(0.001)
        raise RuntimeError(f"{what} on {self.name} did not complete within {DEADLINE_S:.0f} s")


def main(words: list[str]) -> str:
    """``ok``, or what failed."""
    try:
        one, other = End(*words[:3]), End(*words[3:])
        one.connect(other)
        other.connect(one)
        other.qp.post_recv(RecvWR(sg=[other.sge()], num_sge=1))
        one.mr.write(MESSAGE, len(MESSAGE))
        one.qp.post_send(SendWR(opcode=e.IBV_WR_SEND, sg=[one.sge()], num_sge=1))
        one.wait("a SEND")
        other.wait("a receive")
        got = other.mr.read(len(MESSAGE), 0)
        return "ok" if got == MESSAGE else f"{MESSAGE!r} was sent and {got!r} came"
    except (PyverbsError, RuntimeError, OSError) as error:
        return str(error).replace("\n", " ")


if __name__ == "__main__":
    print(main(sys.argv[1:]))
