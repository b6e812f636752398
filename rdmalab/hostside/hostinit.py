"""Process 1 of a host: makes the host's namespaces, then starts and reaps its processes.

It is forked from the *nursery*, a process that has already imported what a kernel needs, so a
kernel that died is replaced in the time of a fork. It keeps root's rights in order to lower
them for everything it starts: learners' code runs as ``learner`` (uid 1000), without
capabilities, with no-new-privileges, inside a cgroup with limits on memory, processes and, through
the rdma controller, on the one RDMA device that belongs to this host.

It talks to the agent (process 1 of the guest) over a socket pair, in JSON datagrams:

==================== ======================================================================
from the agent       ``kernel`` (keys and listening sockets), ``restart``, ``interrupt``,
                     ``exec`` (argv, with two pipe ends attached), ``signal``, ``identity``
to the agent         ``up``, ``parked``, ``ready``, ``died``, ``exit``, ``failed``
==================== ======================================================================
"""

from __future__ import annotations

import json
import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import Any, NoReturn

from . import children, hostkernel
from .container import Container, leave_console, listen_again, name_process
from .lodging import Lodging
from .network import HostSpec

__all__ = ["HostInit", "become"]

CRASH_LOOP = 3  # kernels that die before they are ready, in a row
WORD_BYTES = 4096  # of what a kernel says before it serves


def become(spec: HostSpec, agent: socket.socket, listeners: dict[str, socket.socket]) -> None:
    """Turn a fork of the nursery into a new host. Returns in the nursery only.

    A middle process enters the network namespace that the agent made and unshares the others;
    its child is process 1 of the new PID namespace and becomes the host.
    """
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return
    try:
        house = Container(spec)
        if os.fork() == 0:
            HostInit(spec, agent, listeners, house).main()
    except BaseException:
        fail(agent, traceback.format_exc())
    os._exit(0)


def fail(agent: socket.socket, text: str) -> None:
    """Tell the agent why this host cannot be; the console gets it too."""
    print(text, file=sys.__stderr__, flush=True)
    agent.send(json.dumps({"event": "failed", "detail": text[-3000:]}).encode())


class HostInit:
    """The host's process 1. ``main`` never returns."""

    def __init__(
        self,
        spec: HostSpec,
        agent: socket.socket,
        listeners: dict[str, socket.socket],
        house: Container | Lodging,
    ) -> None:
        self.spec, self.agent, self.listeners, self.house = spec, agent, listeners, house
        self.wake_r, self.wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.kernel_pid = 0
        self.kernel_channel: socket.socket | None = None
        self.kernel_state = "none"
        self.keys: dict[str, Any] | None = None
        self.crashes = 0
        self.oom_kills = 0
        self.running: dict[int, int] = {}  # pid -> the agent's id of an exec
        self.ending: set[int] = set()  # those that were sent a signal

    def main(self) -> NoReturn:
        """Set the host up, start a kernel, serve the agent."""
        try:
            signal.signal(signal.SIGCHLD, lambda *_: None)
            signal.set_wakeup_fd(self.wake_w)
            name_process("init")
            self.tell("up", **self.house.set_up())
            self.start_kernel()
            while True:
                self.step()
        except BaseException:
            fail(self.agent, traceback.format_exc())
            os._exit(1)

    def tell(self, event: str, **facts: Any) -> None:
        """One datagram to the agent."""
        self.agent.send(json.dumps({"event": event, **facts}).encode())

    # --- processes --------------------------------------------------------------------------

    def start_kernel(self) -> None:
        """Fork a kernel; it gets ready and then waits for keys."""
        for sock in self.listeners.values():
            listen_again(sock)
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                self.forget()
                leave_console()
                name_process("kernel")
                self.house.lower_rights("kernel")
                fds = {name: sock.fileno() for name, sock in self.listeners.items()}
                hostkernel.serve(theirs, fds, is_desk=self.spec.is_desk)
            except BaseException:
                theirs.send(traceback.format_exc()[-WORD_BYTES:].encode())
            os._exit(70)
        theirs.close()
        self.kernel_pid, self.kernel_channel, self.kernel_state = pid, ours, "starting"
        self.oom_kills = self.house.oom_kills()

    def forget(self) -> None:
        """Close what a learner's process shall not have: the ways to the agent and to this one."""
        self.agent.close()
        os.close(self.wake_r)
        os.close(self.wake_w)

    def execute(self, message: dict[str, Any], fds: list[int]) -> None:
        """Start a command of ``rdmalab exec`` with its output on the pipes that came along."""
        pid = os.fork()
        if pid == 0:
            try:
                null = os.open("/dev/null", os.O_RDONLY)
                for target, fd in enumerate([null, *fds]):
                    os.dup2(fd, target)
                self.house.lower_rights("exec", root=bool(message.get("root")))
                signal.signal(signal.SIGINT, signal.SIG_DFL)
                os.closerange(3, 1024)
                os.execvpe(message["argv"][0], message["argv"], os.environ)
            except FileNotFoundError:
                os.write(2, f"{message['argv'][0]}: no such command on {self.spec.name}\n".encode())
                os._exit(127)
            except BaseException as error:
                os.write(2, f"{message['argv'][0]}: {error}\n".encode())
                os._exit(126)
        for fd in fds:
            os.close(fd)
        self.running[pid] = message["id"]

    def kill_all(self, folder: str, deadline_s: float = 5.0) -> None:
        """End every process of learners on this host, fork bombs included; bounded in time."""
        self.house.kill(folder, self.running)
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            self.reap()
            if self.house.empty(folder, self.running):
                return
            time.sleep(0.005)

    # --- events -----------------------------------------------------------------------------

    def step(self) -> None:
        """Wait for a message of the agent or the kernel, or for a child's end."""
        watched: list[Any] = [self.agent, self.wake_r]
        if self.kernel_channel is not None:
            watched.append(self.kernel_channel)
        readable, _, _ = select.select(watched, [], [])
        if self.wake_r in readable:
            os.read(self.wake_r, 4096)
        if self.kernel_channel in readable:
            self.on_kernel()
        if self.agent in readable:
            self.on_agent()
        self.reap()

    def on_kernel(self) -> None:
        """The kernel says how far it is; at its end the channel reads empty."""
        assert self.kernel_channel is not None
        word = self.kernel_channel.recv(WORD_BYTES).decode(errors="replace")
        if word == "parked":
            self.kernel_state = "parked"
            self.tell("parked")
            self.send_keys()
            return
        if word == "ready":
            self.kernel_state, self.crashes = "ready", 0
            self.tell("ready")
        elif word:
            print(word, file=sys.__stderr__, flush=True)  # its last words, for the console's log
        self.kernel_channel.close()
        self.kernel_channel = None

    def send_keys(self) -> None:
        """Open a parked kernel, once there are keys."""
        if self.keys is not None and self.kernel_state == "parked":
            assert self.kernel_channel is not None
            self.kernel_state = "binding"
            self.kernel_channel.send(json.dumps(self.keys).encode())

    def on_agent(self) -> None:
        """One request of the agent."""
        data, fds, _, _ = socket.recv_fds(self.agent, 65536, 2)
        if not data:
            self.house.kill(".", ())
            os._exit(0)
        message = json.loads(data)
        op = message["op"]
        if op == "kernel":
            if not self.spec.is_desk:
                self.house.take_identity(message["here"], message["mac"])
            self.keys = message["keys"]
            self.send_keys()
        elif op == "restart":
            self.restart()
        elif op == "interrupt":
            self.send_signal(self.kernel_pid, signal.SIGINT)
        elif op == "exec":
            self.execute(message, fds)
        elif op == "signal":
            for pid, ident in self.running.items():
                if ident == message["id"]:
                    self.ending.add(pid)
                    self.send_signal(pid, message["signal"])

    def send_signal(self, pid: int, signum: int) -> None:
        """Signal a process and its group, as a terminal would."""
        try:
            if pid > 1:
                os.killpg(pid, signum)
        except ProcessLookupError:
            pass  # it ended in between; reap() reports that

    def restart(self) -> None:
        """A fresh kernel; everything that learners' processes on this host held is freed."""
        self.kernel_pid, self.crashes = 0, 0
        self.tell("died", restarted=True, again=True)
        self.close_channel()
        self.kill_all(".")
        self.start_kernel()

    def close_channel(self) -> None:
        """Forget the old kernel's end of the conversation."""
        if self.kernel_channel is not None:
            self.kernel_channel.close()
            self.kernel_channel = None
        self.kernel_state = "none"

    def reap(self) -> None:
        """Collect ended children; report the kernel's and the commands' ends."""
        for pid, code in children.ended():
            if pid == self.kernel_pid:
                self.kernel_pid = 0
                self.on_death(code)
            elif pid in self.running:
                if pid in self.ending:  # an ended command takes its children along
                    self.ending.discard(pid)
                    self.send_signal(pid, signal.SIGKILL)
                self.tell("exit", id=self.running.pop(pid), code=code)

    def on_death(self, code: int) -> None:
        """The kernel ended by itself: say so, and have a fresh one unless it keeps dying."""
        oom = self.house.oom_kills() > self.oom_kills
        self.crashes = self.crashes + 1 if self.kernel_state != "ready" else 0
        again = self.crashes < CRASH_LOOP
        self.tell("died", code=code, oom=oom, again=again)
        self.close_channel()
        self.kill_all("kernel" if self.crashes == 0 else ".")
        if again:
            self.start_kernel()
