"""Orders (work requests) as the verbs want them, and their posting.

``send_request`` and ``recv_request`` are raw pyverbs, and :meth:`Endpoint.explain` prints them.
"""

from __future__ import annotations

import socket
from typing import Any

import pyverbs.enums as e
from pyverbs.wr import SGE, RecvWR, SendWR

from .card import Card
from .ledger import Order

__all__ = ["recv_request", "send_request"]


def recv_request(order: Order, mr: Any) -> Any:
    """A place for the next message: ``order.length`` bytes of the region, from the offset on."""
    place = SGE(mr.buf + order.offset, order.length, mr.lkey)
    return RecvWR(wr_id=order.wr_id, num_sge=1, sg=[place])


def send_request(order: Order, mr: Any, peer: Card | None) -> Any:
    """A request for the send queue, of any operation."""
    piece = SGE(mr.buf + order.offset, order.length, mr.lkey)
    flags = e.IBV_SEND_SIGNALED if order.signaled else 0
    if order.inline:
        flags |= e.IBV_SEND_INLINE
    opcode = getattr(e, f"IBV_WR_{order.operation}")
    wr = SendWR(wr_id=order.wr_id, opcode=opcode, num_sge=1, sg=[piece], send_flags=flags)
    if order.imm is not None:
        wr.imm_data = socket.htonl(order.imm)  # the verbs want it in the wire's order of bytes
    if order.remote_offset is not None and peer is not None:
        address = peer.address + order.remote_offset
        if order.operands is None:
            wr.set_wr_rdma(peer.rkey, address)
        else:
            wr.set_wr_atomic(peer.rkey, address, *order.operands)
    return wr
