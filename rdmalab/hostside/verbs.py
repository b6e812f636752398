"""One end of a reliable connection, with everything that it needs, and errors that explain.

::

    from rdmalab.verbs import Endpoint

    with Endpoint() as ep:            # on alice                # on bob
        ep.connect("bob")             #                         ep.connect("alice")
        ep.send(b"hello")             #                         ep.recv()  ->  b"hello"
        ep.write(b"note", 100)        # into bob's buffer       ep.buffer[100:104]  ->  b"note"

Nothing is hidden: ``ep.ctx``, ``ep.pd``, ``ep.scq``, ``ep.rcq``, ``ep.mr`` and ``ep.qp`` are plain
pyverbs objects.
"""

from __future__ import annotations

import struct
from typing import Any

from . import orders
from .card import Card
from .connection import Connection
from .ledger import Completion, Order
from .mishaps import CompletionError, EndpointError, WaitTimeout

__all__ = ["Card", "Completion", "CompletionError", "Endpoint", "EndpointError", "WaitTimeout"]


class Endpoint(Connection):
    """One end of a reliable connection: posts orders and waits for them.

    Its parameters are those of :class:`~rdmalab.connection.Connection`.
    """

    # ------------------------------------------------------------ posting: each returns a wr_id

    def post_recv(self, offset: int = 0, length: int | None = None) -> int:
        """Give the device a place in the buffer for one message."""
        length = self.size - offset if length is None else length
        order = Order(self.ledger.next_id(), "RECV", offset, length)
        self.qp.post_recv(orders.recv_request(order, self.mr))
        self.ledger.enter(order)
        return order.wr_id

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
        self.qp.post_send(orders.send_request(order, mr or self.mr, self.peer))
        self.ledger.enter(order)
        return order.wr_id

    # ------------------------------------------------------------ waiting

    def wait(
        self, n: int = 1, timeout_s: float = 5.0, queue: str | None = None
    ) -> list[Completion]:
        """The next ``n`` completions, of one queue (``send``, ``recv``) or of both.

        Raises :class:`CompletionError` if an order failed, :class:`WaitTimeout` if none came.
        """
        return self.arrivals.wait(n, timeout_s, queue)

    # ------------------------------------------------------------ post and wait

    def send(self, data: bytes) -> None:
        """Send one message and wait until the peer has it."""
        self.scratch[0 : len(data)] = data
        self._do("SEND", len(data))

    def recv(self, timeout_s: float = 5.0) -> bytes:
        """The next message. Posts a receive if none is posted."""
        if not self.ledger.open["recv"] and not self.arrivals.ready["recv"]:
            self.post_recv()
        (done,) = self.wait(timeout_s=timeout_s, queue="recv")
        first = done.offset or 0
        return self.buffer[first : first + (done.byte_len or 0)]

    def write(self, data: bytes, remote_offset: int) -> None:
        """Write into the peer's buffer and wait until it is done."""
        self.scratch[0 : len(data)] = data
        self._do("RDMA_WRITE", len(data), remote_offset)

    def read(self, remote_offset: int, length: int) -> bytes:
        """Bytes of the peer's buffer."""
        self._do("RDMA_READ", length, remote_offset)
        return self.scratch[0:length]

    def fetch_add(self, remote_offset: int, add: int) -> int:
        """Add to a number of 8 bytes in the peer's buffer; returns what it was before."""
        self._do("ATOMIC_FETCH_AND_ADD", 8, remote_offset, (add, 0))
        return int(struct.unpack("=Q", self.scratch[0:8])[0])

    def compare_swap(self, remote_offset: int, expect: int, swap: int) -> int:
        """Replace a number of 8 bytes if it is ``expect``; returns what it was before."""
        self._do("ATOMIC_CMP_AND_SWP", 8, remote_offset, (expect, swap))
        return int(struct.unpack("=Q", self.scratch[0:8])[0])

    def _do(
        self,
        operation: str,
        length: int,
        remote_offset: int | None = None,
        operands: tuple[int, int] | None = None,
    ) -> None:
        """Post one order on the scratch memory and wait for it."""
        self._post(operation, 0, length, remote_offset, None, operands, mr=self.scratch_mr)
        self.wait(queue="send")
