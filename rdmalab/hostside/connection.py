"""What one end of a reliable connection is made of, and how it meets its peer."""

from __future__ import annotations

import secrets
from ipaddress import IPv6Address
from typing import Any, Self

import pyverbs.enums as e
from pyverbs.cq import CQ
from pyverbs.device import Context
from pyverbs.mr import MR
from pyverbs.pd import PD

from . import bringup, here
from .arrivals import Arrivals
from .card import Card, Meeting, fit
from .ledger import Ledger
from .memory import Buffer, access_flags
from .mishaps import CardError, EndpointError

__all__ = ["Connection"]

REMOTE = e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC
ALL_ACCESS = "local_write remote_write remote_read remote_atomic"
SCRATCH = 65_536  # bytes of the endpoint's own, in which send(), write() and read() work


class Connection:
    """One end of a reliable connection: all that it is made of, and how it gets to its peer.

    A context manager; may be closed twice. What is posted on it is in :mod:`rdmalab.verbs`.

    ``size``: bytes of ``ep.buffer``, registered with the rights ``access``. ``depth``: orders in
    each queue at most. ``path_mtu`` (bytes): at most the port's. ``max_rd_atomic``: READs and
    atomics under way at most, in each direction. ``timeout``: 4.096 us * 2**timeout without an
    answer, then the device sends again, ``retry_cnt`` times; ``rnr_retry`` times when the peer has
    no receive posted, which then says to wait ``min_rnr_timer`` (12: 0.64 ms). ``psn``: number of
    the first packet (drawn at random). ``gid_index``: row of the GID table (found by value).
    """

    def __init__(
        self,
        size: int = 4096,
        access: str = ALL_ACCESS,
        depth: int = 64,
        path_mtu: int | None = None,
        max_inline: int = 0,
        max_rd_atomic: int = 16,
        timeout: int = 14,
        retry_cnt: int = 6,
        rnr_retry: int = 6,
        min_rnr_timer: int = 12,
        psn: int | None = None,
        gid_index: int | None = None,
    ) -> None:
        self.size, self.depth, self.max_rd_atomic = size, depth, max_rd_atomic
        self.timeout, self.retry_cnt = timeout, retry_cnt
        self.rnr_retry, self.min_rnr_timer = rnr_retry, min_rnr_timer
        self.psn = secrets.randbelow(1 << 24) if psn is None else psn
        self.access = access_flags(access)
        self.peer: Card | None = None
        self.ctx: Any = Context(name=here.device)
        self.pd: Any = PD(self.ctx)
        self.scq: Any = CQ(self.ctx, depth)
        self.rcq: Any = CQ(self.ctx, depth)
        self.buffer, self.scratch = Buffer(size), Buffer(SCRATCH)
        self.mr: Any = MR(self.pd, size, self.access, self.buffer.address)
        own = e.IBV_ACCESS_LOCAL_WRITE
        self.scratch_mr: Any = MR(self.pd, SCRATCH, own, self.scratch.address)
        self.qp: Any = bringup.make_queue_pair(self.pd, self.scq, self.rcq, depth, max_inline)
        self.gid_index = here.gid_index if gid_index is None else gid_index
        self.path_mtu = path_mtu or 128 << self.ctx.query_port(here.port).active_mtu
        self.ledger = Ledger()
        cqs = {"send": self.scq, "recv": self.rcq}
        self.arrivals = Arrivals(cqs, self.ledger, self._situation)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Close what was opened, the last first."""
        for thing in (self.qp, self.scratch_mr, self.mr, self.rcq, self.scq, self.pd, self.ctx):
            thing.close()

    # ------------------------------------------------------------ who we are, and connecting

    @property
    def state(self) -> str:
        """The queue pair's state, as the device tells it: ``RESET`` to ``ERR``."""
        return bringup.state_of(self.qp)

    @property
    def card(self) -> Card:
        """What the other side must know."""
        return Card(
            name=here.name,
            gid=str(IPv6Address(self.ctx.query_gid(here.port, self.gid_index).gid)),
            qpn=self.qp.qp_num,
            psn=self.psn,
            path_mtu=self.path_mtu,
            reads_out=self.max_rd_atomic,
            reads_in=self.max_rd_atomic,
            address=self.mr.buf,
            length=self.size,
            rkey=self.mr.rkey,
        )

    def connect(self, peer: str, deadline_s: float = 10.0) -> None:
        """Swap cards with a host, by name or address, and bring the queue pair up to RTS.

        Both sides call it, in either order. When it returns, both queue pairs are ready.
        """
        address = here.peers.get(peer, peer)
        with Meeting(here.ip, address, deadline_s=deadline_s) as meeting:
            card = Card.from_dict(meeting.swap(self.card.as_dict()))
            try:
                self.connect_card(card)
            except EndpointError as error:
                meeting.send({"failed": str(error)[:1000]})
                raise
            answer = meeting.swap({"ready": True})
            if answer != {"ready": True}:
                raise CardError(f"{peer} could not connect: {str(answer)[:1000]}")

    def connect_card(self, card: Card | dict[str, Any]) -> None:
        """Bring the queue pair up to RTS with the peer's card, which came some other way."""
        peer = Card.from_dict(card)
        agreed = fit(self.card, peer)
        if self.state == "RESET":
            self.to_init()
        bringup.to_rtr(self.qp, peer, agreed, self.gid_index, self.min_rnr_timer)
        bringup.to_rts(self.qp, self.psn, agreed, self.timeout, self.retry_cnt, self.rnr_retry)
        self.peer = peer

    def to_init(self) -> None:
        """RESET to INIT, where receives may be posted before anybody can send."""
        bringup.to_init(self.qp, self.access & REMOTE)

    def reset(self) -> None:
        """Back to RESET: open orders are dropped, and completions left over taken out."""
        bringup.to_reset(self.qp)
        self.arrivals.drop()
        self.peer = None

    def _situation(self) -> str:
        counts = [
            f"{queue} queue: {self.ledger.posted[queue]} posted,"
            f" {self.ledger.completed[queue]} completed"
            for queue in ("send", "recv")
        ]
        return f"The queue pair is in {self.state}; {'; '.join(counts)}."
