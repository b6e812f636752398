"""A verbs call that was refused, in words. Pure: facts go in, a few sentences come out.

The kernel answers with a number, and EINVAL alone stands for dozens of reasons. What was asked, in
which state, and what the device can do is known here, so the reason can mostly be named.
"""

from __future__ import annotations

import errno
import os
from typing import Any, NamedTuple

from .qpstate import ATTRIBUTES, MOVES, STATES, missing, unknown

__all__ = [
    "Way",
    "amount",
    "completions_full",
    "errno_name",
    "memory",
    "move",
    "post",
    "queue_full",
]

UNREACHABLE = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)
PATH = ("RESET", "INIT", "RTR", "RTS")
FIX_GRH = (
    "ah_attr has no global route (is_global=0). On RoCE every packet carries one, so it must be"
    " AHAttr(..., is_global=1, gr=GlobalRoute(dgid=..., sgid_index=...))."
)


def errno_name(number: int) -> str:
    """As in ``EINVAL (22, Invalid argument)``."""
    return f"{errno.errorcode.get(number, 'errno')} ({number}, {os.strerror(number)})"


def amount(size: int) -> str:
    """A number of bytes, as in ``64 KiB``, where that is exact."""
    for unit, power in (("MiB", 20), ("KiB", 10)):
        if size and size % (1 << power) == 0:
            return f"{size >> power} {unit}"
    return f"{size} bytes"


# ---------------------------------------------------------------- moves between states


class Way(NamedTuple):
    """What is known about the way to the peer when a queue pair moves to RTR.

    ``sgid`` is our GID at ``sgid_index`` (empty: that row is empty), ``kind`` and ``peer_kind``
    those of both GIDs; ``right_index`` is the row of our IPv4-mapped GID; ``checks`` is what the
    host says of the peer's address.
    """

    is_global: bool
    port: int
    ports: int
    sgid_index: int
    sgid: str
    kind: str
    dgid: str
    peer_kind: str
    peer_ip: str
    right_index: int | None
    checks: str = ""


def move(
    old: str, new: str, sent: dict[str, Any], number: int, way: Way | None, limits: dict[str, int]
) -> str:
    """Why a queue pair refused to move from ``old`` to ``new``.

    ``sent``: attributes by the names of their mask bits; ``limits``: the largest that the device
    takes, by the same names.
    """
    reasons = list(_reasons(old, new, set(sent), way))
    if not reasons:
        reasons = [
            f"{ATTRIBUTES[name].field} is {sent[name]}; this device takes {largest} at most."
            for name, largest in limits.items()
            if name in sent and sent[name] > largest
        ]
    if not reasons:
        reasons = ["All that the move requires is there, so one of the values is wrong."]
    values = ", ".join(f"{ATTRIBUTES[name].field}={value}" for name, value in sent.items())
    head = f"The move from {old} to {new} was refused with {errno_name(number)}."
    if number in UNREACHABLE and way is not None:
        reasons = [
            f"The peer {way.peer_ip} is unreachable: the kernel looked up the way to it (ARP) and"
            f" got no answer. {way.checks}".rstrip()
        ]
    return "\n  ".join([head, *reasons, f"Sent: {values}."])


def _reasons(old: str, new: str, given: set[str], way: Way | None) -> Any:
    """What can be seen to be wrong, the plainest first."""
    if (old, new) not in MOVES:
        yield _no_such_move(old, new)
        return
    for name in missing(old, new, given):
        field, words = ATTRIBUTES[name]
        yield f"IBV_QP_{name} is missing from the mask: {field}, {words}."
    for name in unknown(old, new, given):
        yield f"IBV_QP_{name} ({ATTRIBUTES[name].field}) does not belong to this move."
    if way is None:
        return
    if not way.is_global:
        yield FIX_GRH
    elif not way.sgid:
        yield f"sgid_index is {way.sgid_index}, and that row of the GID table is empty.{_use(way)}"
    elif way.kind != way.peer_kind:
        yield (
            f"sgid_index {way.sgid_index} is the {way.kind} GID {way.sgid}, and the peer's GID"
            f" {way.dgid} is {way.peer_kind}: no packet can have both.{_use(way)}"
        )
    if not 1 <= way.port <= way.ports:
        yield f"port_num is {way.port}; this device's ports are counted from 1 to {way.ports}."


def _use(way: Way) -> str:
    if way.right_index is None:
        return ""
    return f" This host's IPv4-mapped GID is at index {way.right_index} (rdmalab.here.gid_index)."


def _no_such_move(old: str, new: str) -> str:
    possible = ", ".join(state for state in STATES if (old, state) in MOVES)
    text = f"There is no such move. From {old} a queue pair can go to: {possible}."
    if old in PATH and new in PATH and PATH.index(new) > PATH.index(old):
        steps = " to ".join(PATH[PATH.index(old) : PATH.index(new) + 1])
        text += f" The order is {steps}, one step after the other."
    elif old in ("ERR", "SQD") and new in PATH:
        text += f" Move it to RESET first, then to {new} step by step."
    return text


# ---------------------------------------------------------------- memory


def memory(size: int, access: str, number: int, limit: int, pinned: int) -> str:
    """Why ``reg_mr`` refused ``size`` bytes with these rights; limit and pinned are in bytes."""
    head = f"{amount(size)} could not be registered: {errno_name(number)}."
    words = set(access.split())
    if number == errno.ENOMEM and pinned + size > limit:
        return (
            f"{head}\n  Registered memory is pinned, and the memlock limit of this process is"
            f" {amount(limit)} (ulimit -l, RLIMIT_MEMLOCK); {amount(pinned)} are pinned already"
            f" (VmPin), so {amount(max(0, limit - pinned))} are left for the {amount(size)} asked"
            " for. Close memory regions that are not needed, register less, or raise the limit."
        )
    if number == errno.EINVAL and "local_write" not in words:
        given = " and ".join(sorted(words & {"remote_write", "remote_atomic"}))
        if given:
            return (
                f"{head}\n  {given} without local_write: what a peer writes, this device writes"
                " into memory for it, so it needs local_write, too (ibv_reg_mr(3))."
            )
    return f"{head}\n  Rights asked for: {access or 'none'}."


# ---------------------------------------------------------------- posting


def queue_full(queue: str, depth: int, open_orders: int, unsignaled: int) -> str:
    """Why an order does not fit into its queue."""
    name = "send queue" if queue == "send" else "receive queue"
    text = f"The {name} is full: its depth is {depth}, and {open_orders} orders are in it."
    if queue == "recv":
        return f"{text} Wait for messages, or open the endpoint with a larger depth."
    if unsignaled == open_orders:
        text += (
            " None of them is signaled. An unsignaled order holds its place until a signaled one"
            " behind it has completed and was polled."
        )
    every = max(1, depth // 2)
    return (
        f"{text} Signal every N-th order (N of {every}, say) and poll: wait() frees the places. A"
        " card would refuse here, too; Soft-RoCE alone might not."
    )


def completions_full(queue: str, depth: int) -> str:
    """Why an order is not posted: nobody would have a place for its completion."""
    return (
        f"The completion queue of the {queue} queue has room for {depth} completions, and {depth}"
        " are open or wait there to be polled. One more might overrun it: the device would drop"
        " completions and report IBV_EVENT_CQ_ERR, and whoever waits for them would wait for ever."
        " wait() first, or open the endpoint with a larger cq_depth."
    )


def post(operation: str, number: int, state: str, facts: dict[str, Any]) -> str:
    """Why ``post_send`` or ``post_recv`` refused. ``facts``: length, inline, max_inline, remote."""
    head = f"{operation} was refused with {errno_name(number)}."
    queue = "recv" if operation == "RECV" else "send"
    if number == errno.ENOMEM:
        return f"{head}\n  The {queue} queue is full: wait() for completions, which frees places."
    if queue == "send" and state in ("RESET", "INIT", "RTR"):
        return (
            f"{head}\n  The queue pair is in {state}; sends are taken from RTS on: connect first."
        )
    if queue == "recv" and state == "RESET":
        return (
            f"{head}\n  The queue pair is in RESET; receives are taken from INIT on:"
            " to_init(), or connect."
        )
    if facts.get("inline") and facts["length"] > facts["max_inline"]:
        return (
            f"{head}\n  {facts['length']} bytes inline, and this queue pair takes"
            f" {facts['max_inline']}. Nothing was sent. Post without inline, or open the endpoint"
            f" with max_inline={facts['length']}."
        )
    if operation.startswith("ATOMIC") and facts.get("remote", 0) % 8:
        return (
            f"{head}\n  An atomic works on 8 bytes at an address that is a multiple of 8, and"
            f" {facts['remote']:#x} is none. Soft-RoCE's library refuses it here; on a card the"
            " peer would, with IBV_WC_REM_INV_REQ_ERR."
        )
    return f"{head}\n  The queue pair is in {state}."
