"""Ping-pong between two hosts, over TCP and with RDMA SEND, WRITE and READ, and what it tells.

::

    bob     measure.server()                          answers one client, until that goes
    alice   with measure.Session("bob") as session:
                lat_us = session.run("send", size=64, rounds=1000)
            print(measure.summary(lat_us))

A sample is the time between two ``perf_counter_ns``, once for each round, divided by two: *half* a
round trip. For READ it is the whole: only one side acts. Python's garbage collection is off while
a loop of :mod:`rdmalab.rounds` runs, and the first rounds are not kept.

``session.tool("send", ...)`` runs perftest (or sockperf) over the same link instead: the same in
C, with which a figure from Python is to be compared first.
"""

from __future__ import annotations

import contextlib
import gc
import json
import resource
import secrets
import socket
import struct
import time
from array import array
from collections.abc import Iterator
from typing import Any

import numpy
from pyverbs.cq import CQEX, CqInitAttrEx

from . import bringup, here, rounds, tools
from .percentiles import band, percentile, summary
from .verbs import Endpoint

__all__ = ["KINDS", "Session", "band", "client", "percentile", "server", "summary"]

KINDS = tuple(rounds.KINDS)
PORT = 18620  # where the two sides meet; the C tools use the ports after it
TOOL_PORTS = 2000
TOOL_TRIES = 6  # for a run of perftest that could not time a cycle; under load 1 of 25 could not
WARM_UP = 30  # rounds that are run and not kept; they tell how many there is time for
LEAST = 10  # rounds that are kept, however slow they are
AT_MOST_S = 5.0  # for one run
CONNECT_S = 20.0  # how long a client waits for its server, and either for the other's queue pair
IDLE_S = 20.0  # how long a server waits for its client, and for its next order
RETRY_S = 0.02


class LeanEndpoint(Endpoint):
    """An endpoint with extended completion queues (``ibv_create_cq_ex``).

    ``CQ.poll`` makes a Python object of thirteen fields for each completion, which under emulation
    takes longer than the message's whole way; here its status is read in place. ``scq`` and
    ``rcq`` stay empty, so what waits on an endpoint (``send``, ``wait``) is of no use on this one.
    """

    def _make_queue_pair(self, max_inline: int) -> Any:
        self.sent, self.arrived = (
            self._keep(CQEX(self.ctx, CqInitAttrEx(cqe=self.cq_depth))) for _ in range(2)
        )
        return bringup.make_queue_pair(self.pd, self.sent, self.arrived, self.depth, max_inline)


class Link:
    """What both sides have: a control connection (JSON lines), a TCP connection, a queue pair."""

    def __init__(self, control: socket.socket, data: socket.socket, peer_ip: str) -> None:
        self.control, self.data = control, data
        self.lines = control.makefile("rw", encoding="utf-8")
        data.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        patience = struct.pack("ll", int(rounds.WAIT_S), 0)  # struct timeval: a deadline in the
        data.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, patience)  # kernel costs no call
        self.ep = LeanEndpoint(size=2 * rounds.LARGEST)
        self.loops = {kind: loop(self.ep, data) for kind, loop in rounds.KINDS.items()}
        try:
            self.ep.connect(peer_ip, deadline_s=CONNECT_S)
        except BaseException:
            self.close()
            raise

    def say(self, **message: Any) -> None:
        """One line to the other side."""
        self.lines.write(json.dumps(message) + "\n")
        self.lines.flush()

    def hear(self) -> dict[str, Any]:
        """One line from the other side; empty when it has gone."""
        heard: dict[str, Any] = json.loads(self.lines.readline() or "{}")
        return heard

    def close(self) -> None:
        """Close the connections and the queue pair. May be called twice."""
        with contextlib.suppress(OSError):
            self.lines.close()
        self.control.close()
        self.data.close()
        self.ep.close()


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """No garbage collection in the block: it would stop a loop at moments of its own choice."""
    was_on = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def usage() -> dict[str, float]:
    """This process's CPU time (s) and context switches so far. Source: getrusage(2)."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return {
        "user_s": used.ru_utime,
        "system_s": used.ru_stime,
        "voluntary": used.ru_nvcsw,
        "involuntary": used.ru_nivcsw,
    }


def since(before: dict[str, float]) -> dict[str, float]:
    """What :func:`usage` has grown by."""
    return {name: value - before[name] for name, value in usage().items()}


# ---------------------------------------------------------------- the side that answers


def server(idle_s: float = IDLE_S) -> int:
    """Answer one client until it goes; how many runs that were.

    Raises ``TimeoutError`` if none comes, or one is silent, for ``idle_s`` seconds.
    """
    with socket.create_server((here.ip, PORT)) as listening:
        listening.settimeout(idle_s)
        control, (peer_ip, _) = listening.accept()
        data, _ = listening.accept()
    control.settimeout(idle_s)
    data.settimeout(None)
    link = Link(control, data, peer_ip)
    runs = 0
    try:
        while order := link.hear():
            answer(link, **order)
            runs += 1
    finally:
        link.close()
    return runs


def answer(link: Link, do: str, kind: str, size: int, number: int, port: int) -> None:
    """One order of the client: a ping-pong of ``number`` rounds, or a C tool's server."""
    if do == "tool":
        with tools.served(kind, size=size, rounds=number, port=port):
            link.say(ready=True)
            link.hear()  # until the client is done
        return
    loop = link.loops[kind]
    loop.ready(size, number)
    link.say(ready=True)
    with quiet():
        before = usage()
        loop.pong(number)
    link.hear()
    link.say(**since(before))


# ---------------------------------------------------------------- the side that asks


class Session:
    """Measurements from this host to ``peer`` (a name or an address), where a server answers.

    A context manager. ``used`` and ``peer_used`` tell what this process and the peer's have used
    in the last run, its warm-up not counted: ``user_s``, ``system_s``, and context switches,
    ``voluntary`` and ``involuntary``.
    """

    def __init__(self, peer: str, *, wait_s: float = CONNECT_S) -> None:
        self.peer_ip = here.peers.get(peer, peer)
        self.used: dict[str, float] = {}
        self.peer_used: dict[str, float] = {}
        self.pace: dict[str, float] = {}  # seconds that a round of a kind took in its warm-up
        self.ports = secrets.randbelow(TOOL_PORTS)
        control = self.meet(time.monotonic() + wait_s)
        data = socket.create_connection((self.peer_ip, PORT), timeout=wait_s)
        control.settimeout(IDLE_S)
        data.settimeout(None)
        self.link = Link(control, data, self.peer_ip)

    def meet(self, end: float) -> socket.socket:
        """A connection to the server, which may be there a little later than we are."""
        while True:
            try:
                return socket.create_connection((self.peer_ip, PORT), timeout=5)
            except ConnectionRefusedError:
                if time.monotonic() > end:
                    raise TimeoutError(
                        f"{self.peer_ip} does not answer: run measure.server() there first,"
                        " beside the notebook (%%on bob --bg)."
                    ) from None
                time.sleep(RETRY_S)

    def run(
        self,
        kind: str,
        *,
        size: int = 64,
        rounds: int = 1000,
        at_most_s: float = AT_MOST_S,
        warm_up: int = WARM_UP,
    ) -> Any:
        """A ping-pong; its samples in microseconds, a numpy array.

        ``kind``: ``tcp``, ``send``, ``write`` or ``read``; ``size`` in bytes, 1 to 65536. There are
        fewer samples than ``rounds`` if they would take longer than ``at_most_s`` seconds.
        """
        self.pace[kind] = float(self.loop(kind, size, warm_up).mean()) / 1e9
        stamps = self.loop(kind, size, self.affordable(kind, rounds, at_most_s))
        return stamps / (1000 * self.link.loops[kind].halves)

    def affordable(self, kind: str, rounds: int, at_most_s: float) -> int:
        """As many rounds as there is time for, going by the last ones."""
        return max(LEAST, min(rounds, int(at_most_s / self.pace[kind])))

    def loop(self, kind: str, size: int, number: int) -> Any:
        """``number`` rounds; the time of each, from its beginning to the next one's, in ns."""
        loop = self.link.loops[kind]
        stamps = array("q", bytes(8 * (number + 1)))
        loop.ready(size, number)
        self.order("run", kind, size, number)
        with quiet():
            before = usage()
            loop.ping(number, stamps)
            self.used = since(before)
        self.link.say(done=True)
        self.peer_used = self.link.hear()
        return numpy.diff(numpy.frombuffer(stamps, dtype=numpy.int64))

    def tool(
        self, kind: str, *, size: int = 64, rounds: int = 1000, at_most_s: float = AT_MOST_S
    ) -> Any:
        """The same with a C tool (:data:`rdmalab.tools.TOOLS`); its samples in microseconds."""
        if kind not in self.pace:
            self.run(kind, size=size, rounds=0)
        number = self.affordable(kind, rounds, at_most_s)
        for _ in range(TOOL_TRIES - 1):
            with contextlib.suppress(tools.UnsteadyClock):
                return self.tool_once(kind, size, number)
        return self.tool_once(kind, size, number)

    def tool_once(self, kind: str, size: int, number: int) -> Any:
        """A C tool's server there and its client here, on a port of their own; the samples."""
        self.ports = self.ports % TOOL_PORTS + 1  # earlier ones may still be closing
        port = PORT + self.ports
        self.order("tool", kind, size, number, port)
        try:
            return tools.asked(kind, self.peer_ip, size=size, rounds=number, port=port)
        finally:
            self.link.say(done=True)

    def order(self, do: str, kind: str, size: int, number: int, port: int = 0) -> None:
        """Tell the server what comes, and wait until it is ready for it."""
        self.link.say(do=do, kind=kind, size=size, number=number, port=port)
        if not self.link.hear().get("ready"):
            raise ConnectionError(f"{self.peer_ip} went away: look at what its cell says (%wait).")

    def close(self) -> None:
        """End the server, too. May be called twice."""
        self.link.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


def client(kind: str, peer: str, *, size: int = 64, rounds: int = 1000) -> Any:
    """One ping-pong against a server that ends with it; see :meth:`Session.run`."""
    with Session(peer) as session:
        return session.run(kind, size=size, rounds=rounds)
