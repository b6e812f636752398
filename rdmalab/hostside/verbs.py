"""One end of a reliable connection, with everything that it needs, and errors that explain.

::

    from rdmalab.verbs import Endpoint

    with Endpoint() as ep:            # on alice                # on bob
        ep.connect("bob")             #                         ep.connect("alice")
        ep.send(b"hello")             #                         ep.recv()  ->  b"hello"
        ep.write(b"note", 100)        # into bob's buffer       ep.buffer[100:104]  ->  b"note"

Nothing is hidden: ``ep.ctx``, ``ep.pd``, ``ep.scq``, ``ep.rcq``, ``ep.mr`` and ``ep.qp`` are plain
pyverbs objects, and ``Endpoint.explain()`` prints the calls that make and connect them.
"""

from __future__ import annotations

import struct
from typing import Any

from pyverbs.pyverbs_error import PyverbsRDMAError

from . import explanation, orders, refusals
from .bringup import modify
from .card import Card
from .connection import Connection
from .ledger import Completion, Order
from .memory import fork_status
from .mishaps import (
    BringUpError,
    CardError,
    CompletionError,
    EndpointError,
    PostError,
    ResourceError,
    WaitTimeout,
)

__all__ = [
    "BringUpError",
    "Card",
    "CardError",
    "Completion",
    "CompletionError",
    "Endpoint",
    "EndpointError",
    "PostError",
    "ResourceError",
    "WaitTimeout",
    "fork_status",
    "modify",
]


class Endpoint(Connection):
    """One end of a reliable connection: posts orders and waits for them.

    Its parameters are those of :class:`~rdmalab.connection.Connection`.
    """

    _scratch_order = 0  # the last order on the scratch memory

    @staticmethod
    def explain() -> None:
        """Print the raw pyverbs calls that stand behind it, as one page that runs by itself."""
        print(explanation.page())

    # ------------------------------------------------------------ posting: each returns a wr_id

    def post_recv(self, offset: int = 0, length: int | None = None) -> int:
        """Give the device a place in the buffer for one message."""
        length = self.size - offset if length is None else length
        order = Order(self.ledger.next_id(), "RECV", offset, length)
        return self._enter(order, self.mr)

    def post_send(
        self,
        offset: int = 0,
        length: int | None = None,
        imm: int | None = None,
        inline: bool = False,
        signaled: bool = True,
    ) -> int:
        """Send bytes of the buffer; the peer's oldest receive takes them.

        ``imm``: a number of 32 bits that travels along. ``inline``: the bytes are copied into the
        order. ``signaled=False``: a success gives no completion.
        """
        length = self.size - offset if length is None else length
        return self._post("SEND", offset, length, None, imm, None, inline, signaled)

    def post_write(
        self,
        offset: int,
        length: int,
        remote_offset: int,
        imm: int | None = None,
        inline: bool = False,
        signaled: bool = True,
    ) -> int:
        """Write bytes of the buffer into the peer's, which runs no code for it.

        With ``imm`` it uses up a receive of the peer's, which so gets a completion, too.
        """
        return self._post("RDMA_WRITE", offset, length, remote_offset, imm, None, inline, signaled)

    def post_read(self, offset: int, length: int, remote_offset: int, signaled: bool = True) -> int:
        """Read bytes of the peer's buffer into ours."""
        return self._post("RDMA_READ", offset, length, remote_offset, signaled=signaled)

    def post_fetch_add(
        self, offset: int, remote_offset: int, add: int, signaled: bool = True
    ) -> int:
        """Add to 8 bytes of the peer's; what they were before comes to ``offset``."""
        operands = (add, 0)
        return self._post(
            "ATOMIC_FETCH_AND_ADD", offset, 8, remote_offset, None, operands, signaled=signaled
        )

    def post_compare_swap(
        self, offset: int, remote_offset: int, expect: int, swap: int, signaled: bool = True
    ) -> int:
        """Put ``swap`` where ``expect`` is; what was there before comes to ``offset``."""
        operands = (expect, swap)
        return self._post(
            "ATOMIC_CMP_AND_SWP", offset, 8, remote_offset, None, operands, signaled=signaled
        )

    def _post(
        self,
        operation: str,
        offset: int,
        length: int,
        remote_offset: int | None = None,
        imm: int | None = None,
        operands: tuple[int, int] | None = None,
        inline: bool = False,
        signaled: bool = True,
        mr: Any = None,
    ) -> int:
        name = operation if imm is None else f"{operation}_WITH_IMM"
        place = (offset, length, remote_offset)
        order = Order(self.ledger.next_id(), name, *place, imm, operands, inline, signaled)
        if remote_offset is not None and self.peer is None:
            raise PostError(f"{name} needs a peer, and there is none yet: connect first.")
        return self._enter(order, mr or self.mr)

    def _enter(self, order: Order, mr: Any) -> int:
        """Post an order, if there is room for it and for its completion."""
        self._check_room(order, mr)
        try:
            if order.queue == "recv":
                self.qp.post_recv(orders.recv_request(order, mr))
            else:
                self.qp.post_send(orders.send_request(order, mr, self.peer))
        except PyverbsRDMAError as error:
            number = error.error_code
            raise PostError(self._why_refused(order, number), number) from None
        self.ledger.enter(order)
        return order.wr_id

    def _check_room(self, order: Order, mr: Any) -> None:
        queue, ledger = order.queue, self.ledger
        if not 0 <= order.offset <= order.offset + order.length <= mr.length:
            raise PostError(
                f"{order.operation}: bytes {order.offset} to {order.offset + order.length} are not"
                f" in the buffer of {mr.length} bytes."
            )
        if len(ledger.open[queue]) >= self.depth:
            unsignaled = ledger.unsignaled() if queue == "send" else 0
            held = len(ledger.open[queue])
            raise PostError(refusals.queue_full(queue, self.depth, held, unsignaled))
        if order.signaled and ledger.expected[queue] >= self.cq_depth:
            raise PostError(refusals.completions_full(queue, self.cq_depth))

    def _why_refused(self, order: Order, number: int) -> str:
        remote = (self.peer.address if self.peer else 0) + (order.remote_offset or 0)
        facts = {"length": order.length, "inline": order.inline, "remote": remote}
        facts["max_inline"] = self.max_inline
        return refusals.post(order.operation, number, self.state, facts)

    # ------------------------------------------------------------ waiting

    def wait(
        self, n: int = 1, timeout_s: float = 5.0, queue: str | None = None
    ) -> list[Completion]:
        """The next ``n`` completions, of one queue (``send``, ``recv``) or of both.

        Raises :class:`CompletionError` if an order failed, :class:`WaitTimeout` if none came.
        """
        return self.arrivals.wait(n, timeout_s, queue, self.situation)

    def wait_event(
        self, n: int = 1, timeout_s: float = 5.0, queue: str | None = None
    ) -> list[Completion]:
        """As :meth:`wait`, but asleep (completion channel) instead of polling."""
        return self.arrivals.wait_event(n, timeout_s, queue, self.situation)

    # ------------------------------------------------------------ post and wait

    def send(self, data: bytes) -> None:
        """Send one message and wait until the peer has it."""
        self._do("SEND", len(data), data=data)

    def recv(self, timeout_s: float = 5.0) -> bytes:
        """The next message: what the oldest receive gets. Posts one if none is posted."""
        if not self.ledger.open["recv"] and not self.arrivals.ready["recv"]:
            self.post_recv()
        (done,) = self.wait(timeout_s=timeout_s, queue="recv")
        first = done.offset or 0
        return self.buffer[first : first + (done.byte_len or 0)]

    def write(self, data: bytes, remote_offset: int) -> None:
        """Write into the peer's buffer and wait until it is done."""
        self._do("RDMA_WRITE", len(data), remote_offset, data=data)

    def read(self, remote_offset: int, length: int) -> bytes:
        """Bytes of the peer's buffer."""
        return self._do("RDMA_READ", length, remote_offset)

    def fetch_add(self, remote_offset: int, add: int) -> int:
        """Add to a number of 8 bytes in the peer's buffer; returns what it was before."""
        return number(self._do("ATOMIC_FETCH_AND_ADD", 8, remote_offset, (add, 0)))

    def compare_swap(self, remote_offset: int, expect: int, swap: int) -> int:
        """Replace a number of 8 bytes if it is ``expect``; returns what it was before."""
        return number(self._do("ATOMIC_CMP_AND_SWP", 8, remote_offset, (expect, swap)))

    def _do(
        self,
        operation: str,
        length: int,
        remote_offset: int | None = None,
        operands: tuple[int, int] | None = None,
        data: bytes = b"",
    ) -> bytes:
        """Post one order on the scratch memory, wait for it, and return what is there then."""
        if self._scratch_order in self.ledger.open["send"]:
            raise PostError(
                f"order {self._scratch_order}, of an earlier send(), write() or read(), has not"
                " completed, and its memory is still in use. wait() for it, or reset()."
            )
        if length > len(self.scratch):
            raise PostError(
                f"{operation}: {length} bytes; this endpoint moves {len(self.scratch)} at a time."
                " Open it with a larger size, or use ep.buffer and the post_ functions."
            )
        self.scratch[0 : len(data)] = data
        where = (0, length, remote_offset, None, operands)
        self._scratch_order = self._post(operation, *where, mr=self.scratch_mr)
        self.arrivals.wait_for(self._scratch_order, self.situation)
        return self.scratch[0:length]


def number(data: bytes) -> int:
    """8 bytes as the number that an atomic sees: unsigned, in this machine's order of bytes."""
    return int(struct.unpack("=Q", data)[0])
