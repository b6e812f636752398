"""pyverbs with a rail: what would crash libibverbs raises an error instead.

libibverbs trusts its caller, as C libraries do: a call on a closed object, a queue pair without a
completion queue, a copy past the end of a region end the process (SIGSEGV), and in a notebook all
variables with it. A host's kernel therefore has, under pyverbs' own names, classes that look first.
They are subclasses; nothing else about them is new, and ``raw(QP)`` is the class below.

How: an object that is closed changes its class to one whose every method refuses. So an object in
use pays nothing for it. Only ``post_send`` (for orders that lack what they need), ``MR.read`` and
``MR.write`` (bounds) look at each call.

``CQ`` is a case apart: ``QPInitAttr`` takes no subclass of it (it asks ``type(cq) is CQ``), so its
own methods are replaced inside the class.
"""

from __future__ import annotations

import ctypes
import functools
import sys
import weakref
from typing import Any

import pyverbs.addr
import pyverbs.cq
import pyverbs.device
import pyverbs.enums as e
import pyverbs.mr
import pyverbs.pd
import pyverbs.qp
import pyverbs.srq
import pyverbs.wr
from pyverbs.pyverbs_error import PyverbsUserError

from . import orphans
from .mishaps import OwnLines

__all__ = ["GUARDED", "WouldCrash", "install", "raw"]

NOUNS = {
    "AH": "address handle",
    "CQ": "completion queue",
    "CompChannel": "completion channel",
    "Context": "device context",
    "MR": "memory region",
    "MW": "memory window",
    "PD": "protection domain",
    "QP": "queue pair",
    "SRQ": "shared receive queue",
}
BIND_MW = int(e.IBV_WR_BIND_MW)  # here, since looking it up takes as long as the whole check
raw_post_send = pyverbs.qp.QP.post_send
STILL_FINE = {"close", "set_log_level"}  # on a closed object


class WouldCrash(OwnLines, PyverbsUserError):
    """libibverbs would have crashed here, and this host's kernel with it."""


def refuse_closed(kind: str) -> WouldCrash:
    """The error for a call on a closed object."""
    return WouldCrash(
        f"this {NOUNS[kind]} ({kind}) is closed, and libibverbs would crash on it. Was it closed"
        " by itself, or with something that it was made on? Closing a Context or PD closes all"
        " that was made with it, closing a CQ its queue pairs. Make a new one."
    )


def raw(guarded: type) -> Any:
    """pyverbs' own class below a guarded one."""
    return next(kind for kind in guarded.__mro__ if kind.__module__.startswith("pyverbs."))


def closed_form(guarded: type) -> type:
    """The class that a guarded object has after ``close``: each of its methods refuses."""

    def refuse(self: Any, *args: Any, **named: Any) -> Any:
        raise refuse_closed(guarded.__name__)

    body: dict[str, Any] = {"is_closed": True, "close": raw(guarded).close}
    body["__str__"] = lambda self: f"closed {guarded.__name__}"
    for name in dir(guarded):
        if not name.startswith("_") and name not in STILL_FINE and name != "is_closed":
            method = callable(getattr(guarded, name))
            body[name] = refuse if method else property(refuse)
    return type(guarded.__name__, (guarded,), body)


def need_open(*things: Any) -> None:
    """Raise if one of the things that a new object shall be made with is closed."""
    for thing in things:
        if getattr(thing, "is_closed", False) or id(thing) in CLOSED_CQS:
            raise refuse_closed(type(thing).__name__)


class Guarded:
    """What all guarded classes share. It stands before a pyverbs class: ``QP(Guarded, RawQP)``."""

    is_closed = False

    def __init__(self, *args: Any, **named: Any) -> None:
        need_open(*args, *named.values())
        super().__init__(*args, **named)

    def close(self) -> None:
        """Close it as pyverbs does; from then on every call on it refuses."""
        super().close()  # type: ignore[misc] # pyverbs' own
        self.__class__ = CLOSED[type(self)]

    def __del__(self) -> None:
        # What nobody refers to any more is closed by pyverbs, in the midst of its deallocation,
        # when an object may not change its class any more; so it changes now.
        if orphans.collecting():
            orphans.keep(self)
        else:
            self.__class__ = CLOSED[type(self)]


class Context(Guarded, pyverbs.device.Context):
    """A device context that says so when it is closed."""


class PD(Guarded, pyverbs.pd.PD):
    """A protection domain that says so when it, or its context, is closed."""


class CompChannel(Guarded, pyverbs.cq.CompChannel):
    """A completion channel that says so when it, or its context, is closed."""


class MW(Guarded, pyverbs.mr.MW):
    """A memory window that says so when it, or its protection domain, is closed."""


class SRQ(Guarded, pyverbs.srq.SRQ):
    """A shared receive queue that says so when it, or its protection domain, is closed."""


class AH(Guarded, pyverbs.addr.AH):
    """An address handle that says so when it, or its protection domain, is closed."""


class MR(Guarded, pyverbs.mr.MR):
    """A memory region whose ``read`` and ``write`` stay inside it."""

    def _check(self, length: int, offset: int) -> None:
        if not 0 <= offset <= offset + length <= self.length:
            raise WouldCrash(
                f"bytes {offset} to {offset + length} are not in this memory region of"
                f" {self.length} bytes; libibverbs would copy them all the same, from or over"
                " whatever lies beside it"
            )

    def read(self, length: int, offset: int) -> Any:
        """``length`` bytes of the region from ``offset`` on."""
        self._check(length, offset)
        return super().read(length, offset)

    def write(self, data: Any, length: int, offset: int = 0) -> None:
        """Copy ``length`` bytes of ``data`` into the region, from ``offset`` on."""
        self._check(length, offset)
        if length > len(data.encode() if isinstance(data, str) else data):
            raise WouldCrash(f"length is {length}, and the data have only {len(data)} bytes")
        super().write(data, length, offset)


class SendWR(pyverbs.wr.SendWR):
    """A send request that knows whether it has what its operation needs."""

    has_address = has_window = False

    def set_wr_ud(self, ah: Any, rqpn: int, rqkey: int) -> None:
        """Address a datagram."""
        need_open(ah)
        super().set_wr_ud(ah, rqpn, rqkey)
        self.has_address = True

    def set_bind_wr(self, mw: Any, bind_info: Any) -> None:
        """Name the memory window to bind, and to what."""
        need_open(mw)
        super().set_bind_wr(mw, bind_info)
        self.has_window = True


class QP(Guarded, pyverbs.qp.QP):
    """A queue pair that has both completion queues, and says so when it is closed."""

    def __init__(self, creator: Any, init_attr: Any, *args: Any, **named: Any) -> None:
        for field, queue in (("scq", "send_cq"), ("rcq", "recv_cq")):
            cq = getattr(init_attr, queue)
            if cq is None:
                raise WouldCrash(
                    f"QPInitAttr has no {field}: a queue pair needs a completion queue for its"
                    " sends (scq) and one for its receives (rcq), which may be the same. libibverbs"
                    " would crash without."
                )
            need_open(cq)
        super().__init__(creator, init_attr, *args, **named)
        if init_attr.qp_type == e.IBV_QPT_UD:
            self.__class__ = DatagramQP

    def post_send(self, wr: Any, bad_wr: Any = None) -> None:
        """Post a request; one that binds a memory window must have its window."""
        if wr.opcode == BIND_MW and not wr.has_window:
            raise WouldCrash(
                "BIND_MW needs its window, or libibverbs would crash:"
                " wr.set_bind_wr(mw, info) before post_send"
            )
        raw_post_send(self, wr, bad_wr)


class DatagramQP(QP):
    """A queue pair for datagrams (UD): each of them needs an address."""

    def post_send(self, wr: Any, bad_wr: Any = None) -> None:
        """Post a request that has its address."""
        if not wr.has_address:
            raise WouldCrash(
                "a datagram (UD) needs an address, or libibverbs would crash:"
                " wr.set_wr_ud(ah, qpn, qkey) before post_send"
            )
        raw_post_send(self, wr, bad_wr)


# ---------------------------------------------------------------- CQ, from inside

CLOSED_CQS: dict[int, weakref.ref[Any]] = {}  # by id, as long as somebody refers to it
FLAGS_AT = 168  # where a class keeps its flags: PyTypeObject.tp_flags, on machines of 64 bits
IMMUTABLE = 1 << 8  # Py_TPFLAGS_IMMUTABLETYPE


def guard_cq(kind: Any) -> None:
    """Replace the methods of pyverbs' CQ by such that look first."""
    flags = ctypes.c_ulong.from_address(id(kind) + FLAGS_AT)
    if flags.value != kind.__flags__:
        return  # another Python than we know: better no guard than a wrong write
    make, below, close = kind.__init__, kind.poll, kind.close

    def __init__(self: Any, *args: Any, **named: Any) -> None:
        need_open(*args, *named.values())
        make(self, *args, **named)

    def poll(self: Any, num_entries: int = 1) -> Any:
        """Take up to ``num_entries`` completions out: how many there were, and a list of them."""
        if CLOSED_CQS and id(self) in CLOSED_CQS:
            raise refuse_closed("CQ")
        return below(self, num_entries)

    def close_and_note(self: Any) -> None:
        """Close it as pyverbs does; from then on every call on it refuses."""
        close(self)
        ident = id(self)
        CLOSED_CQS[ident] = weakref.ref(self, lambda _: CLOSED_CQS.pop(ident, None))

    def __del__(self: Any) -> None:
        if orphans.collecting():
            orphans.keep(self)

    new: dict[str, Any] = {name: looks_first(getattr(kind, name)) for name in CQ_METHODS}
    new |= {"__init__": __init__, "__del__": __del__, "poll": poll, "close": close_and_note}
    new["__exit__"] = lambda self, *exc: close_and_note(self)
    flags.value &= ~IMMUTABLE  # Python lets nobody change a class that is written in C
    for name, method in new.items():
        setattr(kind, name, method)
    flags.value |= IMMUTABLE


CQ_METHODS = ("req_notify", "ack_events", "resize", "__str__")


def looks_first(method: Any) -> Any:
    """The method of CQ, but with a look whether the queue is closed."""

    @functools.wraps(method)
    def guarded(self: Any, *args: Any, **named: Any) -> Any:
        if CLOSED_CQS and id(self) in CLOSED_CQS:
            raise refuse_closed("CQ")
        return method(self, *args, **named)

    return guarded


# ---------------------------------------------------------------- putting them in place

GUARDED = (Context, PD, CompChannel, MW, SRQ, AH, MR, QP, DatagramQP, SendWR)
CLOSED: dict[type, type] = {kind: closed_form(kind) for kind in GUARDED if kind is not SendWR}
CLOSED |= {closed: closed for closed in CLOSED.values()}


def install() -> None:
    """Put the guarded classes under pyverbs' names, in every module of it. Once per process."""
    if pyverbs.qp.QP is QP:
        return
    for guarded in (kind for kind in GUARDED if kind is not DatagramQP):
        below = raw(guarded)
        for name, module in list(sys.modules.items()):
            if name.startswith("pyverbs.") and getattr(module, guarded.__name__, None) is below:
                setattr(module, guarded.__name__, guarded)
    guard_cq(pyverbs.cq.CQ)
    orphans.watch()
