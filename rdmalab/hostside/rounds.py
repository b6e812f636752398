"""The loops of :mod:`rdmalab.measure`: a class for each kind of message.

Work requests, buffers and the place for the stamps are made before a loop begins; within it no
object is made that outlives its round. A wait polls, yields and naps (:mod:`.patience`).
"""

from __future__ import annotations

import socket
import time
from abc import ABC, abstractmethod
from array import array
from collections.abc import Callable
from typing import Any

from . import here, patience

__all__ = ["KINDS", "LARGEST", "Rounds"]

LARGEST = 1 << 16  # bytes of a message; the memory is an outbox and an inbox of this size
WAIT_S = 5.0  # for one message
AHEAD = 8  # receives that are posted before they are needed


def rest(spins: int, deadline: float) -> float:
    """What a wait does after ``spins`` empty polls; the deadline, which the first nap sets.

    A deadline that is looked at in each poll would cost as much as the poll.
    """
    patience.rest(spins)
    if spins < patience.SPINS:
        return deadline
    now = time.monotonic()
    if deadline and now > deadline:
        raise TimeoutError(f"{here.name}: nothing came within {WAIT_S:g} s")
    return deadline or now + WAIT_S


def waiter() -> Callable[[Any], None]:
    """A function that polls an extended completion queue until it has one completion.

    It raises ``RuntimeError`` for a bad status, and ``TimeoutError`` after ``WAIT_S``.
    """
    import pyverbs.enums as e
    from pyverbs.cq import PollCqAttr

    options = PollCqAttr()

    def wait(queue: Any) -> None:
        spins, deadline = 0, 0.0
        while queue.start_poll(options):  # ENOENT: none is there
            deadline = rest(spins, deadline)
            spins += 1
        status = queue.status
        queue.end_poll()
        if status:
            name = e.ibv_wc_status(status).name
            raise RuntimeError(f"{here.name}: a work request ended with {name}")

    return wait


class Rounds(ABC):
    """One kind of message: ``ready`` on both sides, then ``ping`` on one and ``pong`` on the other.

    ``ping`` puts rounds + 1 stamps (ns) into ``stamps``.
    """

    halves = 2  # of a round trip in a sample

    def __init__(self, ep: Any, data: socket.socket) -> None:
        self.ep, self.data = ep, data
        self.wait = waiter()

    @abstractmethod
    def ready(self, size: int, rounds: int) -> None:
        """Make everything that the loops need, and post what must be there before."""

    @abstractmethod
    def ping(self, rounds: int, stamps: array[int]) -> None:
        """The side that asks."""

    @abstractmethod
    def pong(self, rounds: int) -> None:
        """The side that answers."""


class TcpRounds(Rounds):
    """``sendall`` and ``recv_into``: two system calls in each round and on each side."""

    def ready(self, size: int, rounds: int) -> None:
        """Two buffers."""
        self.out, self.box = bytes(size), memoryview(bytearray(size))

    def take(self) -> None:
        """One whole message: TCP is a stream of bytes and may deliver it in pieces."""
        box, data = self.box, self.data
        got = data.recv_into(box)
        while got < len(box):
            more = data.recv_into(box[got:])
            if not more:
                raise ConnectionError(f"{here.name}: the other side closed the connection")
            got += more

    def ping(self, rounds: int, stamps: array[int]) -> None:
        """Send, then take the answer."""
        clock, send, take, out = time.perf_counter_ns, self.data.sendall, self.take, self.out
        for i in range(rounds):
            stamps[i] = clock()
            send(out)
            take()
        stamps[rounds] = clock()

    def pong(self, rounds: int) -> None:
        """Take, then send the answer."""
        send, take, out = self.data.sendall, self.take, self.out
        for _ in range(rounds):
            take()
            send(out)


class SendRounds(Rounds):
    """SEND: a receive for each message, posted long before it comes."""

    def ready(self, size: int, rounds: int) -> None:
        """Two work requests, and the first receives posted."""
        import pyverbs.enums as e
        from pyverbs.wr import SGE, RecvWR, SendWR

        mr = self.ep.mr
        flags = e.IBV_SEND_SIGNALED
        out = SGE(mr.buf, size, mr.lkey)
        self.send = SendWR(opcode=e.IBV_WR_SEND, num_sge=1, sg=[out], send_flags=flags)
        self.receive = RecvWR(num_sge=1, sg=[SGE(mr.buf + LARGEST, size, mr.lkey)])
        self.ahead = min(AHEAD, rounds)
        for _ in range(self.ahead):
            self.ep.qp.post_recv(self.receive)

    def ping(self, rounds: int, stamps: array[int]) -> None:
        """Send, then wait for the answer's receive to complete."""
        qp, sent, arrived, wait = self.ep.qp, self.ep.sent, self.ep.arrived, self.wait
        clock, send, receive = time.perf_counter_ns, self.send, self.receive
        more = rounds - self.ahead
        for i in range(rounds):
            stamps[i] = clock()
            qp.post_send(send)
            wait(arrived)
            if i < more:
                qp.post_recv(receive)
            wait(sent)  # it is there already: the answer came after its acknowledgement
        stamps[rounds] = clock()

    def pong(self, rounds: int) -> None:
        """Wait for a receive to complete, then send the answer."""
        qp, sent, arrived, wait = self.ep.qp, self.ep.sent, self.ep.arrived, self.wait
        send, receive = self.send, self.receive
        more = rounds - self.ahead
        for i in range(rounds):
            wait(arrived)
            qp.post_send(send)
            if i < more:
                qp.post_recv(receive)
            wait(sent)


class WriteRounds(Rounds):
    """RDMA WRITE: the receiver looks at the last byte of its memory until it changes."""

    def ready(self, size: int, rounds: int) -> None:
        """A work request, and the last byte of the inbox cleared."""
        import ctypes

        import pyverbs.enums as e
        from pyverbs.wr import SGE, SendWR

        mr, peer = self.ep.mr, self.ep.peer
        flags = e.IBV_SEND_SIGNALED
        out = SGE(mr.buf, size, mr.lkey)
        self.write = SendWR(opcode=e.IBV_WR_RDMA_WRITE, num_sge=1, sg=[out], send_flags=flags)
        self.write.set_wr_rdma(peer.rkey, peer.address + LARGEST)
        self.memory = (ctypes.c_ubyte * (2 * LARGEST)).from_address(mr.buf)
        self.last = size - 1
        self.memory[LARGEST + self.last] = 0

    def seen(self, number: int) -> None:
        """Wait until the last byte of the inbox is ``number``."""
        memory, place = self.memory, LARGEST + self.last
        spins, deadline = 0, 0.0
        while memory[place] != number:
            deadline = rest(spins, deadline)
            spins += 1

    def ping(self, rounds: int, stamps: array[int]) -> None:
        """Write, then look for the answer in memory."""
        clock, post, write = time.perf_counter_ns, self.ep.qp.post_send, self.write
        memory, last, seen = self.memory, self.last, self.seen
        sent, wait = self.ep.sent, self.wait
        for i in range(rounds):
            stamps[i] = clock()
            memory[last] = number = i % 255 + 1
            post(write)
            seen(number)
            wait(sent)
        stamps[rounds] = clock()

    def pong(self, rounds: int) -> None:
        """Look for a message in memory, then write the answer."""
        post, write = self.ep.qp.post_send, self.write
        memory, last, seen = self.memory, self.last, self.seen
        sent, wait = self.ep.sent, self.wait
        for i in range(rounds):
            number = i % 255 + 1
            seen(number)
            memory[last] = number
            post(write)
            wait(sent)


class ReadRounds(Rounds):
    """RDMA READ: the other side's program does nothing at all."""

    halves = 1

    def ready(self, size: int, rounds: int) -> None:
        """A work request."""
        import pyverbs.enums as e
        from pyverbs.wr import SGE, SendWR

        mr, peer = self.ep.mr, self.ep.peer
        flags = e.IBV_SEND_SIGNALED
        box = SGE(mr.buf + LARGEST, size, mr.lkey)
        self.read = SendWR(opcode=e.IBV_WR_RDMA_READ, num_sge=1, sg=[box], send_flags=flags)
        self.read.set_wr_rdma(peer.rkey, peer.address)

    def ping(self, rounds: int, stamps: array[int]) -> None:
        """Read, and wait for its completion."""
        clock, post, read = time.perf_counter_ns, self.ep.qp.post_send, self.read
        sent, wait = self.ep.sent, self.wait
        for i in range(rounds):
            stamps[i] = clock()
            post(read)
            wait(sent)
        stamps[rounds] = clock()

    def pong(self, rounds: int) -> None:
        """Nothing: the device answers, and the program sleeps."""


KINDS: dict[str, type[Rounds]] = {
    "tcp": TcpRounds,
    "send": SendRounds,
    "write": WriteRounds,
    "read": ReadRounds,
}
