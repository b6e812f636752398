"""The raw calls that make a queue pair and bring it up: what :meth:`Endpoint.explain` prints.

Each function is a piece that you could write into a cell as it stands. ``modify`` is
``qp.modify(attr, mask)``, with an error that says what the kernel would not: from which state to
which, what was sent, what is missing.
"""

from __future__ import annotations

from typing import Any

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

from . import here, qpstate
from .card import Card, Fit
from .mishaps import BringUpError, errno_name

__all__ = [
    "make_queue_pair",
    "mask_of",
    "modify",
    "state_of",
    "to_init",
    "to_reset",
    "to_rtr",
    "to_rts",
]


def make_queue_pair(pd: Any, scq: Any, rcq: Any, depth: int, max_inline: int) -> Any:
    """A reliable connection (RC) in state RESET, with room for ``depth`` orders each way."""
    cap = QPCap(max_send_wr=depth, max_recv_wr=depth, max_send_sge=1, max_recv_sge=1)
    cap.max_inline_data = max_inline
    init = QPInitAttr(qp_type=e.IBV_QPT_RC, scq=scq, rcq=rcq, cap=cap, sq_sig_all=0)
    return QP(pd, init)  # without a QPAttr: with one, pyverbs would move it to INIT at once


def to_init(qp: Any, access: int) -> None:
    """RESET to INIT: the port, and what the peer may do."""
    attr = QPAttr(qp_state=e.IBV_QPS_INIT)
    attr.pkey_index = 0
    attr.port_num = here.port
    attr.qp_access_flags = access
    modify(qp, attr, ["STATE", "PKEY_INDEX", "PORT", "ACCESS_FLAGS"])


def to_rtr(qp: Any, peer: Card, agreed: Fit, gid_index: int, min_rnr_timer: int) -> None:
    """INIT to RTR, ready to receive: who the peer is, and the way to it."""
    attr = QPAttr(qp_state=e.IBV_QPS_RTR)
    attr.path_mtu = agreed.path_mtu.bit_length() - 8  # the code: 1 is 256 bytes, 5 is 4096
    attr.dest_qp_num = peer.qpn
    attr.rq_psn = peer.psn
    attr.max_dest_rd_atomic = agreed.max_dest_rd_atomic
    attr.min_rnr_timer = min_rnr_timer
    route = GlobalRoute(dgid=GID(peer.gid_in_full), sgid_index=gid_index)
    attr.ah_attr = AHAttr(port_num=here.port, is_global=1, gr=route)
    mask = ["STATE", "AV", "PATH_MTU", "DEST_QPN", "RQ_PSN", "MAX_DEST_RD_ATOMIC", "MIN_RNR_TIMER"]
    modify(qp, attr, mask)


def to_rts(qp: Any, psn: int, agreed: Fit, timeout: int, retry_cnt: int, rnr_retry: int) -> None:
    """RTR to RTS, ready to send: how long to wait, and how often to try again."""
    attr = QPAttr(qp_state=e.IBV_QPS_RTS)
    attr.sq_psn = psn
    attr.timeout = timeout  # 4.096 us * 2**timeout without an answer, then send again,
    attr.retry_cnt = retry_cnt  # at most so often;
    attr.rnr_retry = rnr_retry  # and so often when the peer has no receive posted
    attr.max_rd_atomic = agreed.max_rd_atomic
    mask = ["STATE", "SQ_PSN", "TIMEOUT", "RETRY_CNT", "RNR_RETRY", "MAX_QP_RD_ATOMIC"]
    modify(qp, attr, mask)


def mask_of(names: list[str]) -> int:
    """The mask bits of attributes: ``mask_of(["STATE", "PORT"])``."""
    return sum(getattr(e, f"IBV_QP_{name}") for name in names)


def state_of(qp: Any) -> str:
    """A queue pair's state as the device tells it: ``RESET`` to ``ERR``."""
    attr, _ = qp.query(e.IBV_QP_STATE)
    return qpstate.STATES[attr.qp_state]


def modify(qp: Any, attr: Any, names: list[str]) -> None:
    """``qp.modify(attr, mask)``; a refusal becomes a :class:`BringUpError` in words."""
    old, new = state_of(qp), qpstate.STATES[attr.qp_state]
    try:
        qp.modify(attr, mask_of(names))
    except PyverbsRDMAError as error:
        number = error.error_code
        raise BringUpError(f"{old} to {new} was refused: {errno_name(number)}", number) from None


def to_reset(qp: Any) -> None:
    """From any state back to RESET: peer, orders and errors are forgotten."""
    modify(qp, QPAttr(qp_state=e.IBV_QPS_RESET), ["STATE"])
