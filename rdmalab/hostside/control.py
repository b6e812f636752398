"""The control service of a running guest: one ROUTER socket with CurveZMQ.

A request is two frames or more: JSON ``{"id": ..., "op": ...}`` and binary frames. Replies carry
the same ``id``. ``hello`` makes a client known; from then on it also gets events::

    {"event": "kernel", "host": "alice", "state": "died" | "ready", "code": -11, "oom": false}

Operations: ``hello``, ``hosts``, ``interrupt``, ``restart``, ``exec`` (streams ``stdout`` and
``stderr`` frames, then ``exit``), ``signal``, ``root`` (a command with the guest's own rights, for
faults and captures; only the lab's owner has the key to ask for it).
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from dataclasses import dataclass, field
from typing import Any, NoReturn

import zmq

from . import network
from .hostlink import CONTROL_PORT, GUEST_ADDRESS, HostLink, listen, say

__all__ = ["ControlServer", "Running"]

CHUNK = 65536  # bytes of output a frame carries at most
WINDOW = 4 << 20  # bytes sent to a client and not yet acknowledged before its command is paused


@dataclass
class Running:
    """One command of a client, and the read ends of its output pipes by descriptor."""

    client: bytes
    ident: Any
    host: str | None
    pipes: dict[int, str] = field(default_factory=dict)
    code: int | None = None
    ended: float = 0.0
    unacked: int = 0
    process: subprocess.Popen[bytes] | None = None


class ControlServer:
    """Serves the controller's processes until the guest is switched off."""

    def __init__(self, hosts: dict[str, HostLink], curve: tuple[bytes, bytes]) -> None:
        self.hosts = hosts
        self.clients: dict[bytes, float] = {}
        self.running: dict[int, Running] = {}
        self.waiting: dict[str, list[tuple[bytes, Any]]] = {name: [] for name in hosts}
        self.next_id = 1
        self.next_look = 0.0
        self.listener = listen(CONTROL_PORT)
        self.router = zmq.Context().socket(zmq.ROUTER)
        self.router.curve_server = True
        self.router.curve_publickey, self.router.curve_secretkey = curve
        self.router.setsockopt(zmq.USE_FD, self.listener.fileno())
        self.router.setsockopt(zmq.SNDHWM, 0)  # nothing is dropped; WINDOW bounds what waits
        self.router.setsockopt(zmq.ROUTER_HANDOVER, 1)
        self.router.setsockopt(zmq.ROUTER_MANDATORY, 1)  # sending to one that is gone: an error
        self.router.bind(f"tcp://{GUEST_ADDRESS}:{CONTROL_PORT}")
        self.poller = zmq.Poller()
        self.poller.register(self.router, zmq.POLLIN)
        for link in hosts.values():
            self.poller.register(link.sock, zmq.POLLIN)

    def serve(self) -> NoReturn:
        """One event at a time, for ever; an error in one request ends that request only."""
        by_fd = {link.sock.fileno(): link for link in self.hosts.values()}
        while True:
            for source, _ in self.poller.poll(1000 if self.running else 60000):
                if source is self.router:
                    self.on_request()
                elif isinstance(source, int) and source in by_fd:
                    self.on_host(by_fd[source])
                elif isinstance(source, int):
                    self.on_output(source)
            self.reap()
            self.look_after_clients()

    def send(self, client: bytes, ident: Any, content: dict[str, Any], *buffers: bytes) -> None:
        """One reply or event; a client that has gone away is forgotten."""
        head = json.dumps({"id": ident, **content}).encode()
        try:
            self.router.send_multipart([client, head, *buffers])
        except zmq.ZMQError as error:
            if error.errno != zmq.EHOSTUNREACH:
                raise
            self.forget(client)

    def look_after_clients(self) -> None:
        """Notice, within a second or two, clients that were killed while a command of theirs runs.

        Only sending shows whether somebody is still there.
        """
        if self.running and time.monotonic() > self.next_look:
            self.next_look = time.monotonic() + 1.0
            for client in {job.client for job in self.running.values()}:
                self.send(client, None, {"event": "are you there?"})

    def forget(self, client: bytes) -> None:
        """A client has gone away: its commands end, for nobody could end them any more."""
        self.clients.pop(client, None)
        for number, job in self.running.items():
            if job.client == client and job.code is None:
                self.signal_command(number, job, signal.SIGKILL)

    # --- requests ---------------------------------------------------------------------------

    def on_request(self) -> None:
        """Carry out one request of a client."""
        client, head, *_ = self.router.recv_multipart()
        request: dict[str, Any] = {}
        try:
            request = json.loads(head)
            self.clients[client] = time.monotonic()
            handler = getattr(self, f"op_{request['op']}")
            handler(client, request)
        except Exception as error:  # a bad request must not end process 1
            say(f"request failed: {error!r}")
            self.send(client, request.get("id"), {"error": f"{type(error).__name__}: {error}"})

    def op_hello(self, client: bytes, request: dict[str, Any]) -> None:
        """Names, states; the client is sent events from now on."""
        states = {name: link.state for name, link in self.hosts.items()}
        self.send(client, request["id"], {"ok": True, "hosts": states, "time": time.time()})

    def op_interrupt(self, client: bytes, request: dict[str, Any]) -> None:
        """SIGINT to the host's kernel."""
        self.hosts[request["host"]].sock.send(b'{"op": "interrupt"}')
        self.send(client, request["id"], {"ok": True})

    def op_restart(self, client: bytes, request: dict[str, Any]) -> None:
        """A fresh kernel; answered when it serves."""
        link = self.hosts[request["host"]]
        link.state = "restarting"
        self.waiting[link.spec.name].append((client, request["id"]))
        link.sock.send(b'{"op": "restart"}')

    def op_exec(self, client: bytes, request: dict[str, Any]) -> None:
        """A command on a host, as its ordinary user or (``root``) as its administrator."""
        link = self.hosts[request["host"]]
        number, ends = self.start(client, request, link.spec.name)
        order = {"op": "exec", "id": number, "argv": request["argv"], "root": request.get("root")}
        socket.send_fds(link.sock, [json.dumps(order).encode()], ends)
        for end in ends:
            os.close(end)

    def op_root(self, client: bytes, request: dict[str, Any]) -> None:
        """A command with the guest's rights, in a host's network namespace if ``host`` is given."""
        number, (out, err) = self.start(client, request, request.get("host"))
        argv = request["argv"]
        if request.get("host"):
            argv = ["ip", "netns", "exec", request["host"], *argv]
        try:
            self.running[number].process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        finally:
            os.close(out)
            os.close(err)

    def start(
        self, client: bytes, request: dict[str, Any], host: str | None
    ) -> tuple[int, list[int]]:
        """Make the pipes of a new command. Returns its number and the write ends."""
        number, self.next_id = self.next_id, self.next_id + 1
        job = Running(client, request["id"], host)
        ends = []
        for stream in ("stdout", "stderr"):
            read, write = os.pipe2(os.O_CLOEXEC)
            job.pipes[read] = stream
            ends.append(write)
            self.poller.register(read, zmq.POLLIN)
        self.running[number] = job
        return number, ends

    def op_signal(self, client: bytes, request: dict[str, Any]) -> None:
        """A signal to a command that this client started earlier."""
        for number, job in self.running.items():
            if (job.client, job.ident) == (client, request["target"]):
                self.signal_command(number, job, request["signal"])
        self.send(client, request["id"], {"ok": True})

    def signal_command(self, number: int, job: Running, signum: int) -> None:
        """A signal to a command and all of its process group."""
        if job.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.process.pid, signum)
        elif job.host is not None:
            order = {"op": "signal", "id": number, "signal": signum}
            self.hosts[job.host].sock.send(json.dumps(order).encode())

    def op_ack(self, client: bytes, request: dict[str, Any]) -> None:
        """The client has taken so many bytes of a command's output; no reply."""
        for job in self.running.values():
            if (job.client, job.ident) == (client, request["target"]):
                job.unacked -= request["size"]
                for fd in job.pipes:
                    self.poller.register(fd, zmq.POLLIN)

    def op_log(self, client: bytes, request: dict[str, Any]) -> None:
        """The kernel's log."""
        text = network.run(["dmesg"])
        self.send(client, request["id"], {"ok": True, "log": text[-200_000:]})

    # --- events -----------------------------------------------------------------------------

    def on_host(self, link: HostLink) -> None:
        """A host's init reports."""
        data = link.sock.recv(65536)
        if not data:
            self.poller.unregister(link.sock)
            self.on_kernel_state(link, {"event": "failed", "detail": "the host's init ended"})
            return
        event = json.loads(data)
        if event["event"] == "exit":
            job = self.running.get(event["id"])
            if job is not None:
                job.code, job.ended = event["code"], time.monotonic()
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

    def on_output(self, fd: int) -> None:
        """A command printed, or closed its output."""
        for job in self.running.values():
            if fd in job.pipes:
                data = os.read(fd, CHUNK)
                if data:
                    job.unacked += len(data)
                    if job.unacked > WINDOW:
                        self.pause(job)
                    self.send(job.client, job.ident, {"stream": job.pipes[fd]}, data)
                else:
                    self.close_pipe(job, fd)
                return

    def pause(self, job: Running) -> None:
        """Stop reading until the client acknowledges; the full pipe then stops the command."""
        for fd in job.pipes:
            if fd in self.poller:
                self.poller.unregister(fd)

    def close_pipe(self, job: Running, fd: int) -> None:
        """No more output from there."""
        if fd in self.poller:
            self.poller.unregister(fd)
        os.close(fd)
        del job.pipes[fd]

    def reap(self) -> None:
        """Report ended commands once their output is drained; collect orphans of the guest."""
        for number, job in list(self.running.items()):
            if job.process is not None and job.code is None and job.process.poll() is not None:
                job.code, job.ended = job.process.returncode, time.monotonic()
            if job.code is None or (job.pipes and time.monotonic() < job.ended + 1.0):
                continue
            for fd in list(job.pipes):
                self.close_pipe(job, fd)
            self.send(job.client, job.ident, {"exit": job.code})
            del self.running[number]
        busy = any(job.process is not None for job in self.running.values())
        while not busy:
            try:
                if os.waitpid(-1, os.WNOHANG)[0] == 0:
                    return
            except ChildProcessError:
                return
