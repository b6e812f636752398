"""The control service of a running guest: ROUTER sockets with CurveZMQ, one for each door.

A request is two frames or more: JSON ``{"id": ..., "op": ...}`` and binary frames. Replies carry
the same ``id``. ``hello`` makes a client known; from then on it also gets events::

    {"event": "kernel", "host": "alice", "state": "died" | "ready", "code": -11, "oom": false}

Operations: ``hello``, ``interrupt``, ``restart``, ``exec`` (streams ``stdout`` and ``stderr``
frames, then ``exit``), ``signal``, ``ack``, ``errand`` (a fault or a capture, see ``errands``),
``forks`` (how many processes each host was refused), ``log``, ``root`` (any command with the
guest's own rights).

The lab's owner comes in by a door where all of this can be had. The desk, if there is one, has a
door of its own, with a key of its own: what it asks for is about hosts, and never as root.
"""

from __future__ import annotations

import json
import socket
import time
from dataclasses import dataclass
from typing import Any, NoReturn

import zmq

from . import doorway, errands, network
from .cgroup import refused_forks
from .commands import Client, Commands
from .hostlink import CONTROL_PORT, DESK_PORT, HostLink, listen, say

__all__ = ["ControlServer", "Door"]

DESK_OPS = {"hello", "interrupt", "restart", "exec", "signal", "ack", "errand"}
DESK_COMMANDS = 16  # at the same time
DESK_REQUEST_BYTES = 1 << 20


@dataclass(frozen=True)
class Door:
    """One way in. ``curve``: its public and secret key; who knows the public one may knock.

    ``listener``: a listening socket, if it is not the guest's usual one.
    """

    curve: tuple[bytes, bytes]
    is_desks: bool = False
    listener: socket.socket | None = None

    def open(self) -> zmq.Socket[bytes]:
        """The socket behind it, listening."""
        port = DESK_PORT if self.is_desks else CONTROL_PORT
        listener = self.listener or listen(port)
        router: zmq.Socket[bytes] = zmq.Context.instance().socket(zmq.ROUTER)
        router.setsockopt(zmq.SNDHWM, 0)  # nothing is dropped; WINDOW bounds what waits
        router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to one that is gone: an error
        if self.is_desks:
            router.setsockopt(zmq.MAXMSGSIZE, DESK_REQUEST_BYTES)
        doorway.bind(router, listener.detach(), *self.curve)
        return router


class ControlServer:
    """Serves the controller's processes until the guest is switched off.

    ``hosts``: all containers by name, the desk included.
    """

    def __init__(self, hosts: dict[str, HostLink], doors: list[Door]) -> None:
        self.hosts, self.doors = hosts, doors
        self.routers = [door.open() for door in doors]
        self.clients: dict[Client, float] = {}
        self.waiting: dict[str, list[tuple[Client, Any]]] = {name: [] for name in hosts}
        self.next_look = 0.0
        self.poller = zmq.Poller()
        self.commands = Commands(self.poller, self.send)
        for watched in (*self.routers, *(link.sock for link in hosts.values())):
            self.poller.register(watched, zmq.POLLIN)

    def serve(self) -> NoReturn:
        """One event at a time, for ever; an error in one request ends that request only."""
        by_fd = {link.sock.fileno(): link for link in self.hosts.values()}
        while True:
            for source, _ in self.poller.poll(1000 if self.commands.running else 60000):
                if source in self.routers:
                    self.on_request(self.routers.index(source))
                elif isinstance(source, int) and source in by_fd:
                    self.on_host(by_fd[source])
                elif isinstance(source, int):
                    self.commands.on_output(source)
            self.commands.reap()
            self.look_after_clients()

    def send(self, client: Client, ident: Any, content: dict[str, Any], *buffers: bytes) -> None:
        """One reply or event; a client that has gone away is forgotten."""
        head = json.dumps({"id": ident, **content}).encode()
        try:
            self.routers[client.door].send_multipart([client.name, head, *buffers])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.clients.pop(client, None)
            self.commands.forget(client)

    def look_after_clients(self) -> None:
        """Notice, within a second or two, clients that were killed while a command of theirs runs.

        Only sending shows whether somebody is still there.
        """
        if self.commands.running and time.monotonic() > self.next_look:
            self.next_look = time.monotonic() + 1.0
            for client in {job.client for job in self.commands.running.values()}:
                self.send(client, None, {"event": "are you there?"})

    # --- requests ---------------------------------------------------------------------------

    def on_request(self, door: int) -> None:
        """Carry out one request of a client."""
        name, *frames = self.routers[door].recv_multipart()
        client = Client(door, name)
        request: Any = {}
        try:
            request = json.loads(frames[0])
            self.clients[client] = time.monotonic()
            if self.doors[door].is_desks:
                self.limit(client, request)
            handler = getattr(self, f"op_{request['op']}")
            handler(client, request)
        except Exception as error:  # a bad request must not end process 1
            if not self.doors[door].is_desks:  # which shall not fill the owner's disk with a log
                say(f"request failed: {error!r}")
            ident = request.get("id") if isinstance(request, dict) else None
            self.send(client, ident, {"error": f"{type(error).__name__}: {error}"[:1000]})

    def limit(self, client: Client, request: dict[str, Any]) -> None:
        """Refuse what the desk may not ask for: ``PermissionError``."""
        if request["op"] not in DESK_OPS or request.get("root"):
            raise PermissionError("only the lab's owner may ask for that")
        if "host" in request and not self.hosts[request["host"]].spec.device:
            raise PermissionError("the desk may ask for hosts only")
        mine = [job for job in self.commands.running.values() if job.client.door == client.door]
        if request["op"] in ("exec", "errand") and len(mine) >= DESK_COMMANDS:
            raise PermissionError(f"{DESK_COMMANDS} commands run already")

    def op_hello(self, client: Client, request: dict[str, Any]) -> None:
        """Names, states; the client is sent events from now on."""
        states = {name: link.state for name, link in self.hosts.items()}
        self.send(client, request["id"], {"ok": True, "hosts": states, "time": time.time()})

    def living(self, request: dict[str, Any]) -> HostLink:
        """The host that a request is about, unless it is gone for good: ``RuntimeError``."""
        link = self.hosts[request["host"]]
        if link.state == "failed":
            raise RuntimeError(f"{link.spec.name} is gone: its first process has ended")
        return link

    def op_interrupt(self, client: Client, request: dict[str, Any]) -> None:
        """SIGINT to the host's kernel."""
        self.living(request).sock.send(b'{"op": "interrupt"}')
        self.send(client, request["id"], {"ok": True})

    def op_restart(self, client: Client, request: dict[str, Any]) -> None:
        """A fresh kernel; answered when it serves."""
        link = self.living(request)
        link.state = "restarting"
        self.waiting[link.spec.name].append((client, request["id"]))
        link.sock.send(b'{"op": "restart"}')

    def inside(self, argv: list[str], host: str | None) -> list[str]:
        """A command line as it is run with the rights over a host's network (None: the wire)."""
        return errands.inside(argv, host)

    def op_exec(self, client: Client, request: dict[str, Any]) -> None:
        """A command on a host, as its ordinary user or (``root``) as its administrator."""
        link, root = self.living(request), bool(request.get("root"))
        self.commands.on_host(client, request["id"], link, request["argv"], root)

    def op_errand(self, client: Client, request: dict[str, Any]) -> None:
        """A fault or a capture on a host's link, in the errand's own words."""
        host = self.hosts[request["host"]].spec.name
        line = errands.line(request["argv"], host, self.inside)
        self.commands.in_guest(client, request["id"], line)

    def op_root(self, client: Client, request: dict[str, Any]) -> None:
        """A command with the guest's rights, in a host's network namespace if ``host`` is given."""
        argv = self.inside(request["argv"], request.get("host"))
        self.commands.in_guest(client, request["id"], argv)

    def op_signal(self, client: Client, request: dict[str, Any]) -> None:
        """A signal to a command that this client started earlier."""
        self.commands.signal(client, request["target"], request["signal"])
        self.send(client, request["id"], {"ok": True})

    def op_ack(self, client: Client, request: dict[str, Any]) -> None:
        """The client has taken so many bytes of a command's output; no reply."""
        self.commands.acknowledge(client, request["target"], request["size"])

    def op_forks(self, client: Client, request: dict[str, Any]) -> None:
        """How often each host, and the desk, was refused another process."""
        counts = {name: refused_forks(name) for name in self.hosts}
        self.send(client, request["id"], {"ok": True, "refused": counts})

    def op_log(self, client: Client, request: dict[str, Any]) -> None:
        """The kernel's log."""
        text = network.run(["dmesg"])
        self.send(client, request["id"], {"ok": True, "log": text[-200_000:]})

    # --- events -----------------------------------------------------------------------------

    def on_host(self, link: HostLink) -> None:
        """A host's init reports."""
        data = link.sock.recv(65536)
        if not data:
            self.poller.unregister(link.sock)
            self.commands.lost(link)
            self.on_kernel_state(link, {"event": "failed", "detail": "the host's init ended"})
            return
        event = json.loads(data)
        if event["event"] == "exit":
            self.commands.ended(event["id"], event["code"])
        else:
            self.on_kernel_state(link, event)

    def on_kernel_state(self, link: HostLink, event: dict[str, Any]) -> None:
        """Keep the state; tell clients of deaths and returns; answer restarts."""
        link.state = event["event"]
        if link.state not in ("ready", "died", "failed"):
            return
        name = link.spec.name
        notice = {key: value for key, value in event.items() if key != "event"}
        for client in list(self.clients):
            self.send(
                client, None, {"event": "kernel", "host": name, "state": link.state, **notice}
            )
        gone = link.state == "failed" or (link.state == "died" and not event["again"])
        if link.state == "ready" or gone:
            for client, ident in self.waiting[name]:
                answer = (
                    {"ok": True} if not gone else {"error": f"{name} cannot be restarted: {event}"}
                )
                self.send(client, ident, answer)
            self.waiting[name].clear()
