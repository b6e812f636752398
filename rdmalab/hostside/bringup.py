"""The raw calls that make a queue pair and bring it up; :meth:`Endpoint.explain` prints them.

Each of the first functions is a piece that could stand in a cell as it is. ``modify`` is
``qp.modify(attr, mask)`` with an error that says what the kernel's number does not.
"""

from __future__ import annotations

import contextlib
import ipaddress
import subprocess
from pathlib import Path
from typing import Any

import pyverbs.enums as e
from pyverbs.addr import GID, AHAttr, GlobalRoute
from pyverbs.cq import CQ, CompChannel
from pyverbs.pyverbs_error import PyverbsRDMAError
from pyverbs.qp import QP, QPAttr, QPCap, QPInitAttr

from . import SYS_INFINIBAND, here, qpstate, refusals
from .card import Card, Fit, kind_of
from .mishaps import BringUpError

__all__ = [
    "make_completion_queue",
    "make_queue_pair",
    "modify",
    "most_inline",
    "state_of",
    "to_init",
    "to_reset",
    "to_rtr",
    "to_rts",
]

_most_inline: dict[str, int] = {}  # by device, once it has been tried
MOST = {"PATH_MTU": 5, "TIMEOUT": 31, "RETRY_CNT": 7, "RNR_RETRY": 7, "MIN_RNR_TIMER": 31}


def make_completion_queue(ctx: Any, depth: int) -> Any:
    """Room for ``depth`` completions, and a channel that can wake a program up for them."""
    channel = CompChannel(ctx)
    return CQ(ctx, depth, channel=channel), channel


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
    mask = e.IBV_QP_STATE | e.IBV_QP_PKEY_INDEX | e.IBV_QP_PORT | e.IBV_QP_ACCESS_FLAGS
    modify(qp, attr, mask)


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
    mask = e.IBV_QP_STATE | e.IBV_QP_AV | e.IBV_QP_PATH_MTU | e.IBV_QP_DEST_QPN
    mask |= e.IBV_QP_RQ_PSN | e.IBV_QP_MAX_DEST_RD_ATOMIC | e.IBV_QP_MIN_RNR_TIMER
    modify(qp, attr, mask)


def to_rts(qp: Any, psn: int, agreed: Fit, timeout: int, retry_cnt: int, rnr_retry: int) -> None:
    """RTR to RTS, ready to send: how long to wait, and how often to try again."""
    attr = QPAttr(qp_state=e.IBV_QPS_RTS)
    attr.sq_psn = psn
    attr.timeout = timeout  # 4.096 us * 2**timeout without an answer, then send again,
    attr.retry_cnt = retry_cnt  # at most so often;
    attr.rnr_retry = rnr_retry  # and so often when the peer has no receive posted
    attr.max_rd_atomic = agreed.max_rd_atomic
    mask = e.IBV_QP_STATE | e.IBV_QP_SQ_PSN | e.IBV_QP_TIMEOUT | e.IBV_QP_RETRY_CNT
    mask |= e.IBV_QP_RNR_RETRY | e.IBV_QP_MAX_QP_RD_ATOMIC
    modify(qp, attr, mask)


def to_reset(qp: Any) -> None:
    """From any state back to RESET: peer, orders and errors are forgotten."""
    modify(qp, QPAttr(qp_state=e.IBV_QPS_RESET), e.IBV_QP_STATE)


def most_inline(pd: Any, scq: Any, rcq: Any) -> int:
    """The most bytes that an order may carry inline, found by trying, once: no verb tells it."""
    if here.device in _most_inline:
        return _most_inline[here.device]
    fits, fails = 0, 1 << 16
    while fails - fits > 1:
        size = (fits + fails) // 2
        try:
            make_queue_pair(pd, scq, rcq, 1, size).close()
            fits = size
        except PyverbsRDMAError:
            fails = size
    _most_inline[here.device] = fits
    return fits


# ---------------------------------------------------------------- modify, and why it was refused


def state_of(qp: Any) -> str:
    """A queue pair's state as the device tells it: ``RESET`` to ``ERR``."""
    attr, _ = qp.query(e.IBV_QP_STATE)
    return qpstate.STATES[attr.qp_state]


def modify(qp: Any, attr: Any, mask: int) -> None:
    """``qp.modify(attr, mask)``; a refusal becomes a :class:`BringUpError` that explains it."""
    old, new = state_of(qp), qpstate.STATES[attr.qp_state]
    try:
        qp.modify(attr, mask)
    except PyverbsRDMAError as error:
        sent = {
            name: getattr(attr, attribute.field)
            for name, attribute in qpstate.ATTRIBUTES.items()
            if mask & getattr(e, f"IBV_QP_{name}")
        }
        number = error.error_code
        way = way_to_peer(sent, number)
        if "AV" in sent:
            sent["AV"] = f"(to {way.dgid} from index {way.sgid_index})" if way else None
        raise BringUpError(refusals.move(old, new, sent, number, way, limits()), number) from None


def limits() -> dict[str, int]:
    """The largest values of attributes, by the names of their mask bits."""
    return {**MOST, "PORT": len(list((SYS_INFINIBAND / here.device / "ports").iterdir()))}


def way_to_peer(sent: dict[str, Any], number: int) -> refusals.Way | None:
    """What the attributes, and this host, say of the way to the peer."""
    if "AV" not in sent:
        return None
    to = sent["AV"]
    dgid = str(ipaddress.IPv6Address(to.dgid or "::"))  # None without a global route
    held = SYS_INFINIBAND / here.device / "ports" / str(here.port) / "gids" / str(to.sgid_index)
    sgid = ""
    with contextlib.suppress(OSError):
        sgid = str(ipaddress.IPv6Address(held.read_text().strip()))
    peer_ip = str(ipaddress.IPv6Address(dgid).ipv4_mapped or dgid)
    right = None
    with contextlib.suppress(LookupError):
        right = here.gid_index
    return refusals.Way(
        is_global=bool(to.is_global),
        port=to.port_num,
        ports=limits()["PORT"],
        sgid_index=to.sgid_index or 0,
        sgid="" if sgid == "::" else sgid,
        kind=kind_of(sgid or "::"),
        dgid=dgid,
        peer_kind=kind_of(dgid),
        peer_ip=peer_ip,
        right_index=right,
        checks=look_at(peer_ip) if number in refusals.UNREACHABLE else "",
    )


def look_at(ip: str) -> str:
    """The obvious checks, done at once: our link, the route, the neighbour's answer."""
    said = []
    for device in Path("/sys/class/net").iterdir():
        if device.name != "lo":
            said.append(f"{device.name} is {(device / 'operstate').read_text().strip()}")
    for what, command in (
        ("route", ["ip", "route", "get", ip]),
        ("ARP", ["ip", "neigh", "show", ip]),
    ):
        done = subprocess.run(command, capture_output=True, text=True, timeout=5, check=False)
        answer = (done.stdout or done.stderr).strip().splitlines()
        said.append(f"{what}: {answer[0].strip() if answer else 'no entry'}")
    return f"Now: {'; '.join(said)}. Next: ping {ip}, and ip link on both hosts."
