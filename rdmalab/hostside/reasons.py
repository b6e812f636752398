"""Why an order failed, or why nothing came back. Pure: facts go in, sentences come out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from .ledger import Completion, Ledger, Order
from .statuses import explain

__all__ = ["Situation", "failed", "nothing_came"]

FOR_EVER = 7  # the largest retry count
NAMED = 4  # orders that an error lists one by one


class Situation(NamedTuple):
    """How an endpoint stands when a wait ends badly.

    ``state`` is the queue pair's, ``events`` are those of the device (``IBV_EVENT_*``) since it was
    opened; ``reads`` is how many READs and atomics were agreed on with the peer.
    """

    state: str
    peer: str
    timeout: int
    retry_cnt: int
    rnr_retry: int
    reads: int
    events: tuple[str, ...] = ()


def failed(
    cause: Completion, flushed: list[Completion], now: Situation, earlier: Completion | None = None
) -> str:
    """The text of a CompletionError. ``earlier``: the first failure since the connection began."""
    text = f"{cause.operation} (wr_id {cause.wr_id}) failed.\n{explain(cause.status)}"
    if flushed:
        text += f"\n+{len(flushed)} flushed because of it: {_list_completions(flushed)}."
    if cause.flushed:
        text += f"\n{_why_only_flushes(cause, now, earlier)}"
    if now.state == "ERR":
        text += "\nThe queue pair is in ERR and flushes whatever is posted: reset(), then connect."
    else:
        text += f"\nThe queue pair is in {now.state}."
    return text


def _why_only_flushes(cause: Completion, now: Situation, earlier: Completion | None) -> str:
    """Nothing but flushes: where the cause may be."""
    if earlier is not None:
        what = f"{earlier.operation} (wr_id {earlier.wr_id})"
        return f"The cause came earlier: {what} ended with {earlier.status}."
    if "IBV_EVENT_QP_ACCESS_ERR" in now.events:
        return (
            "No completion here tells the cause, but the device does (IBV_EVENT_QP_ACCESS_ERR): it"
            f" refused a request of {now.peer}, for its key, address or rights, and stopped. The"
            f" completion on {now.peer} says IBV_WC_REM_ACCESS_ERR."
        )
    if cause.queue == "recv":
        return (
            "Only flushes came, so the cause is not on this side: a refused request of"
            f" {now.peer}'s (see the completion there), or somebody moved this queue pair to ERR."
        )
    return (
        "Only flushes came: either this very order is at fault (see above what Soft-RoCE says so"
        " for), or somebody moved this queue pair to ERR."
    )


def nothing_came(
    ledger: Ledger, came: int, wanted: int, timeout_s: float, queue: str | None, now: Situation
) -> str:
    """The text of a :class:`~rdmalab.mishaps.WaitTimeout`."""
    where = "either queue" if queue is None else f"the {queue} queue"
    queues = ("send", "recv") if queue is None else (queue,)
    lines = [f"Waited {timeout_s:g} s for {wanted} completion(s) of {where}; {came} came."]
    lines.append(f"The queue pair is in {now.state}.")
    for name in queues:
        listed = _list_orders(list(ledger.open[name].values()))
        lines[-1] += (
            f" {name.capitalize()} queue: {ledger.posted[name]} posted,"
            f" {ledger.completed[name]} completed, open: {listed}."
        )
    causes = list(_likely(ledger, queues, now))
    lines += [f"Likely: {cause}" for cause in causes]
    return "\n  ".join(lines)


def _likely(ledger: Ledger, queues: tuple[str, ...], now: Situation) -> Iterator[str]:
    """What probably keeps the completions from coming, the likeliest first."""
    if "IBV_EVENT_CQ_ERR" in now.events:
        yield (
            "the completion queue was too small and has lost completions (IBV_EVENT_CQ_ERR); it is"
            " of no use any more. Make a new endpoint, with a larger cq_depth, and poll earlier."
        )
    sends = list(ledger.open["send"].values()) if "send" in queues else []
    waiting = [order for order in sends if order.signaled]
    if sends and not waiting:
        yield "the open sends are unsignaled, and a success of theirs gives no completion."
    elif sends:
        yield from _likely_send(waiting, now)
    elif "recv" in queues and ledger.open["recv"]:
        yield (
            f"{now.peer} has sent nothing that uses up a receive. (A WRITE without immediate, a"
            " READ and an atomic use none, and give this side no completion.)"
        )
    else:
        yield "nothing was posted through this endpoint that could still complete."


def _likely_send(waiting: list[Order], now: Situation) -> Iterator[str]:
    needs_receive = any(
        order.operation.startswith("SEND") or order.operation.endswith("IMM") for order in waiting
    )
    if needs_receive and now.rnr_retry == FOR_EVER:
        yield (
            f"no receive posted on the peer ({now.peer}): with rnr_retry=7 the device tries again"
            " for ever, and never tells. post_recv there; or choose rnr_retry below 7."
        )
        return
    answered = [o for o in waiting if o.operation.startswith(("RDMA_READ", "ATOMIC"))]
    if answered and now.reads == 0:
        yield (
            "this queue pair may have 0 READs or atomics under way (max_rd_atomic=0), so"
            f" {answered[0].operation} is never begun. A card would refuse it at once."
        )
    if now.retry_cnt == FOR_EVER or now.timeout == 0:
        what = "timeout=0" if now.timeout == 0 else "retry_cnt=7"
        yield (
            f"{now.peer} does not answer, and with {what} the device tries for ever (Soft-RoCE;"
            " by the specification only timeout=0 means for ever). Is its queue pair in RTR or"
            " RTS, is the link up?"
        )
    elif now.state == "SQD":
        yield "sends are held in SQD; after the move to RTS, Soft-RoCE needs another post."
    else:
        seconds = 4.096e-6 * 2**now.timeout * (now.retry_cnt + 1)
        yield (
            f"{now.peer} is slow, or not there: the device itself gives up after about"
            f" {seconds:.2g} s without an answer (4.096 us * 2**{now.timeout}, times"
            f" {now.retry_cnt + 1}); wait longer to hear its status."
        )


def _list_orders(orders: list[Order]) -> str:
    """As in ``SEND (wr_id 3), 2 more``."""
    named = [f"{order.operation} (wr_id {order.wr_id})" for order in orders[:NAMED]]
    return _and_more(named, len(orders))


def _list_completions(completions: list[Completion]) -> str:
    named = [f"{found.operation} (wr_id {found.wr_id})" for found in completions[:NAMED]]
    return _and_more(named, len(completions))


def _and_more(named: list[str], count: int) -> str:
    more = [f"{count - len(named)} more"] if count > len(named) else []
    return ", ".join([*named, *more]) or "none"
