"""The ledger of an endpoint: what was posted, and what has come back.

A completion that tells of an error holds little: of its fields only ``wr_id``, ``status``,
``qp_num`` and ``vendor_err`` are valid then (``ibv_poll_cq(3)``). So what the order *was* must be
remembered by whoever posted it. And a send that asked for no completion holds its place in the send
queue until a later one completes, so somebody must count. Pure Python, no device.
"""

from __future__ import annotations

from typing import NamedTuple

__all__ = ["Completion", "Ledger", "Order"]


class Order(NamedTuple):
    """A work request that was posted, or is about to be.

    ``operation`` is the verbs' name without its prefix: ``RECV``, ``SEND``, ``SEND_WITH_IMM``,
    ``RDMA_WRITE``, ``RDMA_WRITE_WITH_IMM``, ``RDMA_READ``, ``ATOMIC_FETCH_AND_ADD`` or
    ``ATOMIC_CMP_AND_SWP``. Offsets and lengths are in bytes; ``operands`` are those of an atomic.
    """

    wr_id: int
    operation: str
    offset: int = 0
    length: int = 0
    remote_offset: int | None = None
    imm: int | None = None
    operands: tuple[int, int] | None = None
    inline: bool = False
    signaled: bool = True

    @property
    def queue(self) -> str:
        """The queue that it goes to: ``send`` or ``recv``."""
        return "recv" if self.operation == "RECV" else "send"


class Completion(NamedTuple):
    """What came of an order.

    ``operation`` is what was posted, by our own ledger. ``byte_len`` (bytes), ``imm`` (a number)
    and ``offset`` (where in the buffer) are None where they are not valid.
    """

    wr_id: int
    operation: str
    status: str
    byte_len: int | None = None
    imm: int | None = None
    queue: str = "send"
    offset: int | None = None
    qp_num: int = 0
    vendor_err: int = 0

    @property
    def ok(self) -> bool:
        """Whether the order succeeded."""
        return self.status == "IBV_WC_SUCCESS"

    @property
    def flushed(self) -> bool:
        """Whether it came back undone, because the queue pair had stopped."""
        return self.status == "IBV_WC_WR_FLUSH_ERR"


class Ledger:
    """Orders by queue: how many were posted and completed, and which are open, the oldest first.

    ``expected``: open orders that will give a completion, so will need a place for it.
    """

    def __init__(self) -> None:
        self.posted = {"send": 0, "recv": 0}
        self.completed = {"send": 0, "recv": 0}
        self.expected = {"send": 0, "recv": 0}
        self.open: dict[str, dict[int, Order]] = {"send": {}, "recv": {}}
        self._last_id = 0

    def next_id(self) -> int:
        """A fresh ``wr_id``: 1, 2, 3 and so on."""
        self._last_id += 1
        return self._last_id

    def enter(self, order: Order) -> None:
        """Note an order that the device has taken."""
        queue = order.queue
        self.posted[queue] += 1
        self.expected[queue] += order.signaled
        self.open[queue][order.wr_id] = order

    def settle(self, queue: str, wr_id: int) -> Order | None:
        """The order that a completion is about, or None if it was not posted through us.

        A send queue is worked off in order: with this one, all before it are done as well.
        """
        self.completed[queue] += 1
        entries = self.open[queue]
        order = entries.pop(wr_id, None)
        if order is None:
            return None
        self.expected[queue] -= order.signaled
        if queue == "send":
            for earlier in list(entries):
                if earlier > wr_id:
                    break
                self.expected[queue] -= entries.pop(earlier).signaled
        return order

    def forget(self) -> None:
        """Drop all open orders: the queue pair has been reset, and with it its queues."""
        for queue, entries in self.open.items():
            entries.clear()
            self.expected[queue] = 0

    def unsignaled(self) -> int:
        """How many open sends will give no completion."""
        return len(self.open["send"]) - self.expected["send"]
