"""What a completion's status means, what usually causes it, and where to look next. Pure data.

The meanings are those of ``ibv_poll_cq(3)`` and of the InfiniBand Architecture Specification,
volume 1, chapters 10.10.3 (completion return status) and 11.6.2. ``soft_roce`` says where the
hosts' device answers otherwise; tests/fabric/test_verbs_statuses.py holds that against it.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["STATUSES", "Status", "explain", "status_name"]


class Status(NamedTuple):
    """One ``IBV_WC_*`` status, for reliable connections (RC) on RoCE."""

    code: int
    name: str
    means: str
    cause: str = ""
    look: str = ""
    soft_roce: str = ""


_RESET = "The queue pair is in ERR now; reset it and connect again."
_NOT_RC = "Not for RC queue pairs on RoCE: reliable datagrams (RD), which nobody built."

_ALL = (
    Status(0, "SUCCESS", "the order was carried out"),
    Status(
        *(1, "LOC_LEN_ERR", "a message was longer than its receive, or than the device can send"),
        cause="the receive that was posted is smaller than the message that came",
        look="the length of post_recv here against that of the peer's post_send",
        soft_roce="says LOC_QP_OP_ERR instead, and to the sender REM_OP_ERR",
    ),
    Status(
        *(2, "LOC_QP_OP_ERR", "the device found something wrong with the order or its queue pair"),
        cause="an order that does not fit the queue pair's type or state",
        look="the order's operation, its pieces and flags",
        soft_roce="says so too for a receive that is too small (specification: LOC_LEN_ERR), or"
        " whose memory it may not write (LOC_PROT_ERR)",
    ),
    Status(3, "LOC_EEC_OP_ERR", "an end-to-end context is not consistent", cause=_NOT_RC),
    Status(
        *(4, "LOC_PROT_ERR", "an order's own piece of memory is not valid for what it asks"),
        cause="an lkey of another region or of another PD, bytes past the region's end, or a READ"
        " or receive into a region without LOCAL_WRITE",
        look="each piece's address, length and lkey against the region's",
        soft_roce="says WR_FLUSH_ERR for a wrong lkey or bytes past the end of a SEND or WRITE,"
        " and LOC_QP_OP_ERR for a receive",
    ),
    Status(
        *(5, "WR_FLUSH_ERR", "the order came back undone: the queue pair had stopped"),
        cause="an earlier order failed, or somebody moved the queue pair to ERR",
        look="the first completion that is no flush, on this side or on the peer's",
        soft_roce="says so for local mistakes as well, on the very order that made them: a wrong"
        " lkey, bytes past the region's end, no route to the peer (link down), a path MTU above"
        " the port's, an operation that the queue pair's type does not have",
    ),
    Status(
        *(6, "MW_BIND_ERR", "a memory window could not be bound"),
        cause="the region lacks MW_BIND, or window and region are of different PDs",
        look="the region's access flags and both PDs",
        soft_roce="says WR_FLUSH_ERR for a region without MW_BIND",
    ),
    Status(
        *(7, "BAD_RESP_ERR", "the responder answered with something that makes no sense here"),
        cause="two queue pairs that disagree about packet numbers, or a broken peer",
        look="both cards: queue pair number and first packet number (PSN), crosswise",
    ),
    Status(
        *(8, "LOC_ACCESS_ERR", "a write of the peer's into this side's memory was refused"),
        cause="a WRITE with immediate to memory that may not be written",
        look="the region's access flags on this side",
    ),
    Status(
        *(9, "REM_INV_REQ_ERR", "the responder says: this request is not valid"),
        cause="the peer's queue pair does not allow the operation (qp_access_flags), answers no"
        " READs or atomics (max_dest_rd_atomic 0), or expects packets of another path MTU; by the"
        " specification also a message longer than the receive, or an atomic on an address that"
        " is no multiple of 8",
        look="the peer's qp_access_flags, max_dest_rd_atomic and path_mtu",
        soft_roce="says REM_OP_ERR for a message longer than the receive; and post_send refuses an"
        " atomic on an address that is no multiple of 8 with EINVAL, before anything is sent",
    ),
    Status(
        *(10, "REM_ACCESS_ERR", "the responder says: not with this key, not there, not so"),
        cause="a wrong rkey, an address outside the region, a region that does not allow this"
        " (REMOTE_WRITE, REMOTE_READ, REMOTE_ATOMIC), that has been closed, or is of another PD"
        " than the queue pair",
        look="address, length and rkey of the request against the peer's card; swap cards again"
        " if the peer has registered its memory anew",
    ),
    Status(
        *(11, "REM_OP_ERR", "the responder could not carry the request out"),
        cause="something failed on the peer: look at its completion",
        look="the peer's own completions, which name the cause",
        soft_roce="says so when the message is longer than the peer's receive (specification:"
        " REM_INV_REQ_ERR), or when the peer's receive has a wrong lkey or no LOCAL_WRITE",
    ),
    Status(
        *(12, "RETRY_EXC_ERR", "no acknowledgement came, however often the packets were sent"),
        cause="the peer's queue pair is gone, or in RESET, INIT or ERR; a wrong queue pair number"
        " or PSN; UDP port 4791 filtered; a link that is down or loses too much",
        look="the peer's ep.state; both cards; then ping, and rdma statistic on both hosts:"
        " does the peer's device receive packets at all?",
    ),
    Status(
        *(
            13,
            "RNR_RETRY_EXC_ERR",
            "the peer was not ready: no receive was posted, all retries long",
        ),
        cause="the peer posts its receive too late, or too few of them",
        look="does the peer post a receive before the send? Raise rnr_retry, or min_rnr_timer"
        " on the peer",
    ),
    Status(14, "LOC_RDD_VIOL_ERR", "the queue pair's reliable datagram domain is wrong", _NOT_RC),
    Status(15, "REM_INV_RD_REQ_ERR", "the responder refused a reliable datagram", _NOT_RC),
    Status(
        *(16, "REM_ABORT_ERR", "the responder aborted the operation"),
        cause="rare: the peer's queue pair was stopped in the middle of it",
        look="what the peer did with its queue pair",
    ),
    Status(17, "INV_EECN_ERR", "an end-to-end context number is not valid", _NOT_RC),
    Status(18, "INV_EEC_STATE_ERR", "an end-to-end context is in the wrong state", _NOT_RC),
    Status(
        *(19, "FATAL_ERR", "the device itself failed"),
        cause="a driver or firmware error",
        look="dmesg; open the device again",
    ),
    Status(
        *(20, "RESP_TIMEOUT_ERR", "the responder did not answer in time"),
        cause="as RETRY_EXC_ERR, on devices that tell the two apart",
        look="as for RETRY_EXC_ERR",
    ),
    Status(
        *(21, "GENERAL_ERR", "some other transport error"),
        cause="anything that has no status of its own",
        look="dmesg, and vendor_err in the card's manual",
        soft_roce="leaves vendor_err at 0, always",
    ),
    Status(
        *(22, "TM_ERR", "a tag-matching operation failed"),
        cause="tag matching, which only some cards have",
        look="the card's manual",
    ),
    Status(
        *(23, "TM_RNDV_INCOMPLETE", "a tag-matched message must be fetched by the program"),
        cause="tag matching: the buffer was too small for the rendezvous",
        look="the card's manual",
    ),
)

STATUSES: dict[int, Status] = {status.code: status for status in _ALL}


def status_name(code: int) -> str:
    """As in ``IBV_WC_REM_ACCESS_ERR``; an unknown code keeps its number."""
    return f"IBV_WC_{STATUSES[code].name}" if code in STATUSES else f"IBV_WC status {code}"


def explain(status: int | str) -> str:
    """A status, by code or by name, in a few lines: meaning, usual cause, next look."""
    code = status if isinstance(status, int) else _code_of(status)
    if code not in STATUSES:
        return f"{status_name(code)}: not a status of ibv_poll_cq(3)."
    found = STATUSES[code]
    lines = [f"{status_name(code)}: {found.means}."]
    if found.cause:
        lines.append(f"  Usual cause: {found.cause}.")
    if found.look:
        lines.append(f"  Look at: {found.look}.")
    if found.soft_roce:
        lines.append(f"  Soft-RoCE, the hosts' device, {found.soft_roce}.")
    return "\n".join(lines)


def _code_of(name: str) -> int:
    for status in _ALL:
        if name.removeprefix("IBV_WC_") == status.name:
            return status.code
    raise ValueError(f"{name!r} is no status; they are named as in {status_name(10)}")
