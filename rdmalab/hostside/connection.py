"""What one end of a reliable connection is made of, and how it meets its peer."""

from __future__ import annotations

import contextlib
import secrets
from ipaddress import IPv6Address, ip_address
from typing import Any, Self

import pyverbs.enums as e
from pyverbs.device import Context
from pyverbs.pd import PD
from pyverbs.pyverbs_error import PyverbsRDMAError

from . import bringup, here, reasons, refusals
from .arrivals import Arrivals, event_files, event_names
from .card import Card, Fit, Meeting, fit
from .ledger import Ledger
from .memory import Buffer, register
from .mishaps import BringUpError, CardError, EndpointError, ResourceError

__all__ = ["Connection"]

REMOTE = e.IBV_ACCESS_REMOTE_WRITE | e.IBV_ACCESS_REMOTE_READ | e.IBV_ACCESS_REMOTE_ATOMIC
ALL_ACCESS = "local_write remote_write remote_read remote_atomic"
PAGE = 4096
OBJECTS = ("qp", "scratch_mr", "mr", "scq", "rcq", "pd", "ctx")


def address_of(peer: str) -> str:
    """The address of a host that is given by name or address."""
    address = here.peers.get(peer, peer)
    try:
        return str(ip_address(address))
    except ValueError:
        known = ", ".join(here.peers)
        raise CardError(f"there is no host {peer!r} in this lab; there are: {known}") from None


class Closed:
    """What stands for each object of an endpoint that is closed: any use of it says so."""

    def __getattr__(self, name: str) -> Any:
        raise EndpointError("This endpoint is closed. Open a new one: ep = Endpoint(...).")


class Connection:
    """One end of a reliable connection: all that it is made of, and how it gets to its peer.

    A context manager; may be closed twice. What is posted on it is in :mod:`rdmalab.verbs`.

    ``size``: bytes of ``ep.buffer``, registered with the rights ``access``. ``depth``: orders in
    each queue at most; ``cq_depth``: completions in each completion queue at most (as ``depth``).
    ``path_mtu`` (bytes): at most the port's. ``max_inline``: bytes that may travel in an order
    itself. ``max_rd_atomic``: READs and atomics under way at most, in each direction. ``timeout``:
    4.096 us * 2**timeout without an answer, then the device sends again, ``retry_cnt`` times;
    ``rnr_retry`` times when the peer has no receive posted, which then says to wait
    ``min_rnr_timer`` (12: 0.64 ms). ``psn``: number of the first packet (drawn at random).
    ``gid_index``: row of the GID table (found by its value). ``share``: another endpoint of this
    host, whose memory this one gives its peer, too; then ``size`` and ``access`` are as there.
    """

    size: int
    access: str
    buffer: Buffer
    ctx: Any
    pd: Any
    mr: Any
    _event_file: int

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
        cq_depth: int | None = None,
        gid_index: int | None = None,
        share: Connection | None = None,
    ) -> None:
        self.size = share.size if share else size
        self.access = share.access if share else access
        self.depth = depth
        self.cq_depth = cq_depth or depth
        self.max_rd_atomic = max_rd_atomic
        self.timeout, self.retry_cnt = timeout, retry_cnt
        self.rnr_retry, self.min_rnr_timer = rnr_retry, min_rnr_timer
        self.psn = secrets.randbelow(1 << 24) if psn is None else psn
        self.peer: Card | None = None
        self.agreed: Fit | None = None
        self.ledger = Ledger()
        self._events: list[str] = []
        self._opened: list[Any] = []
        try:
            self._open(max_inline, share)
            self.gid_index = here.gid_index if gid_index is None else gid_index
            self.path_mtu = path_mtu or 128 << self.ctx.query_port(here.port).active_mtu
        except BaseException:
            self.close()
            raise

    def _open(self, max_inline: int, share: Connection | None) -> None:
        """Open the device and make everything on it."""
        if share is not None:
            self.ctx, self.pd, self.buffer, self.mr = share.ctx, share.pd, share.buffer, share.mr
            self._event_file = share._event_file
        else:
            before = event_files()
            self.ctx = self._keep(Context(name=here.device))
            (self._event_file,) = event_files() - before
            self.pd = self._keep(PD(self.ctx))
            self.buffer = Buffer(self.size)
            self.mr = self._keep(register(self.pd, self.buffer, self.access))
        self._check_read_depth()
        cqs, channels, files = {}, {}, {}
        for name in ("send", "recv"):
            before = event_files()
            cqs[name], channels[name] = bringup.make_completion_queue(self.ctx, self.cq_depth)
            self._opened += [channels[name], cqs[name]]
            (files[name],) = event_files() - before
        self.scq, self.rcq = cqs["send"], cqs["recv"]
        self.scratch = Buffer(max(self.size, PAGE))  # in which send(), write() and read() work
        self.scratch_mr = self._keep(register(self.pd, self.scratch, "local_write"))
        self.qp = self._keep(self._make_queue_pair(max_inline))
        _, granted = self.qp.query(e.IBV_QP_CAP)
        self.max_inline = granted.cap.max_inline_data
        self.arrivals = Arrivals(cqs, channels, files, self.ledger)

    def _keep(self, thing: Any) -> Any:
        self._opened.append(thing)
        return thing

    def _make_queue_pair(self, max_inline: int) -> Any:
        try:
            return bringup.make_queue_pair(self.pd, self.scq, self.rcq, self.depth, max_inline)
        except PyverbsRDMAError as error:
            number = error.error_code
            text = f"No queue pair could be made: {refusals.errno_name(number)}."
            most = bringup.most_inline(self.pd, self.scq, self.rcq)
            if max_inline > most:
                text += (
                    f"\n  max_inline is {max_inline} bytes, and this device grants {most} at most"
                    f" (found by trying; no verb tells it). Use max_inline={most} or less."
                )
            raise ResourceError(text, number) from None

    def _check_read_depth(self) -> None:
        device = self.ctx.query_device()
        most = min(device.max_qp_rd_atom, device.max_qp_init_rd_atom)
        if self.max_rd_atomic > most:
            raise ResourceError(
                f"max_rd_atomic is {self.max_rd_atomic}; {here.device} takes {most} at most"
                " (max_qp_rd_atom, max_qp_init_rd_atom of ibv_devinfo -v). On the way to RTS the"
                " kernel would refuse it with EINVAL (22, Invalid argument)."
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):
            self.close()

    def close(self) -> None:
        """Close what was opened, the last first. What is in ``ep.buffer`` can still be read."""
        while self._opened:
            self._opened.pop().close()
        for name in OBJECTS:
            setattr(self, name, Closed())
        if hasattr(self, "arrivals"):
            self.arrivals.cqs = dict.fromkeys(self.arrivals.cqs, Closed())

    # ------------------------------------------------------------ how things stand

    @property
    def state(self) -> str:
        """The queue pair's state, as the device tells it: ``RESET`` to ``ERR``."""
        return bringup.state_of(self.qp)

    @property
    def events(self) -> list[str]:
        """What the device has told since it was opened, as in ``IBV_EVENT_QP_ACCESS_ERR``."""
        self._events += event_names(self.ctx, self._event_file)
        return list(self._events)

    def situation(self) -> reasons.Situation:
        """How things stand, for an error's text."""
        return reasons.Situation(
            state=self.state,
            peer=self.peer.name if self.peer else "the peer",
            timeout=self.timeout,
            retry_cnt=self.retry_cnt,
            rnr_retry=self.rnr_retry,
            reads=self.agreed.max_rd_atomic if self.agreed else 0,
            events=tuple(self.events),
        )

    # ------------------------------------------------------------ meeting the peer

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
        self._check_free()
        names = (here.name, peer if peer in here.peers else here.name)
        with Meeting(here.ip, address_of(peer), names=names, deadline_s=deadline_s) as meeting:
            card = Card.from_dict(meeting.swap(self.card.as_dict()))
            try:
                self.connect_card(card)
            except EndpointError as error:
                meeting.send({"failed": str(error)[:1000]})
                raise
            answer = meeting.swap({"ready": True})
            if answer != {"ready": True}:
                why = answer.get("failed", answer) if isinstance(answer, dict) else answer
                raise CardError(f"{peer} could not connect: {str(why)[:1000]}")

    def connect_card(self, card: Card | dict[str, Any]) -> None:
        """Bring the queue pair up to RTS with the peer's card, which came some other way."""
        self._check_free()
        peer = Card.from_dict(card)
        agreed = fit(self.card, peer)
        if self.state == "RESET":
            self.to_init()
        bringup.to_rtr(self.qp, peer, agreed, self.gid_index, self.min_rnr_timer)
        bringup.to_rts(self.qp, self.psn, agreed, self.timeout, self.retry_cnt, self.rnr_retry)
        self.peer, self.agreed = peer, agreed

    def _check_free(self) -> None:
        state = self.state
        if state not in ("RESET", "INIT"):
            whose = f", and its peer is {self.peer.name}" if self.peer else ""
            raise BringUpError(
                f"This endpoint is in {state}{whose}. To connect it anew, reset() it first."
            )

    def to_init(self) -> None:
        """RESET to INIT, where receives may be posted before anybody can send.

        The queue pair lets the peer do all; what it may do to the memory, the region's rights say.
        """
        bringup.to_init(self.qp, REMOTE)

    def reset(self) -> None:
        """Back to RESET: open orders are dropped, and completions left over taken out."""
        bringup.to_reset(self.qp)
        self.arrivals.drop()
        self.peer = self.agreed = None
