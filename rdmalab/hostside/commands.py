"""Commands of the control service's clients: their output on its way, their signals, their end.

A client that does not acknowledge what it is sent has its command paused; a client that has gone
away has it ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import zmq

from .hostlink import HostLink

__all__ = ["Client", "Commands", "Running"]

CHUNK = 65536  # bytes of output a frame carries at most
ARGV_BYTES = 60_000  # of a command line, as it travels to a host's first process
WINDOW = 4 << 20  # bytes sent to a client and not yet acknowledged before its command is paused


class Client(NamedTuple):
    """Who asks: by which door (its number), and the name that the socket there knows it by."""

    door: int
    name: bytes


Send = Callable[..., None]  # (client, id of the request, content, data)


@dataclass
class Running:
    """One command of a client, and the read ends of its output pipes by descriptor."""

    client: Client
    ident: Any
    link: HostLink | None
    pipes: dict[int, str] = field(default_factory=dict)
    code: int | None = None
    ended: float = 0.0
    unacked: int = 0
    process: subprocess.Popen[bytes] | None = None


class Commands:
    """All that run now. ``poller`` watches their pipes, ``send`` takes what they say."""

    def __init__(self, poller: zmq.Poller, send: Send) -> None:
        self.poller, self.send = poller, send
        self.running: dict[int, Running] = {}
        self.next_id = 1

    def on_host(
        self, client: Client, ident: Any, link: HostLink, argv: list[str], root: bool
    ) -> None:
        """Start one on a host, as its ordinary user or (``root``) as its administrator."""
        if len(json.dumps(argv)) > ARGV_BYTES:
            raise ValueError("the command line is too long")
        number, ends = self.begin(client, ident, link)
        order = {"op": "exec", "id": number, "argv": argv, "root": root}
        try:
            socket.send_fds(link.sock, [json.dumps(order).encode()], ends)
        except OSError:
            self.drop(number)
            raise
        finally:
            for end in ends:
                os.close(end)

    def in_guest(self, client: Client, ident: Any, argv: list[str]) -> None:
        """Start one with the guest's own rights."""
        number, (out, err) = self.begin(client, ident, None)
        try:
            self.running[number].process = subprocess.Popen(
                argv, stdin=subprocess.DEVNULL, stdout=out, stderr=err, start_new_session=True
            )
        except BaseException:
            self.drop(number)
            raise
        finally:
            os.close(out)
            os.close(err)

    def begin(self, client: Client, ident: Any, link: HostLink | None) -> tuple[int, list[int]]:
        """Make the pipes of a new command. Returns its number and the write ends."""
        number, self.next_id = self.next_id, self.next_id + 1
        job = Running(client, ident, link)
        ends = []
        for stream in ("stdout", "stderr"):
            read, write = os.pipe2(os.O_CLOEXEC)
            job.pipes[read] = stream
            ends.append(write)
            self.poller.register(read, zmq.POLLIN)
        self.running[number] = job
        return number, ends

    def drop(self, number: int) -> None:
        """Forget one that could not be started."""
        job = self.running.pop(number)
        for fd in list(job.pipes):
            self.close_pipe(job, fd)

    def signal(self, client: Client, ident: Any, signum: int) -> None:
        """A signal to a command that this client started earlier."""
        for number, job in self.running.items():
            if (job.client, job.ident) == (client, ident):
                self.kill(number, job, signum)

    def kill(self, number: int, job: Running, signum: int) -> None:
        """A signal to a command and all of its process group."""
        if job.process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(job.process.pid, signum)
        elif job.link is not None:
            order = {"op": "signal", "id": number, "signal": signum}
            with contextlib.suppress(OSError):  # the host is gone, and the command with it
                job.link.sock.send(json.dumps(order).encode())

    def acknowledge(self, client: Client, ident: Any, size: int) -> None:
        """The client has taken so many bytes of a command's output."""
        for job in self.running.values():
            if (job.client, job.ident) == (client, ident):
                job.unacked -= size
                for fd in job.pipes:
                    self.poller.register(fd, zmq.POLLIN)

    def forget(self, client: Client) -> None:
        """A client has gone away: its commands end, for nobody could end them any more."""
        for number, job in self.running.items():
            if job.client == client and job.code is None:
                self.kill(number, job, signal.SIGKILL)

    def lost(self, link: HostLink) -> None:
        """A host is gone, and what ran on it."""
        for number, job in self.running.items():
            if job.link is link:
                self.ended(number, -signal.SIGKILL)

    def ended(self, number: int, code: int) -> None:
        """A host reports the end of one."""
        job = self.running.get(number)
        if job is not None:
            job.code, job.ended = code, time.monotonic()

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
