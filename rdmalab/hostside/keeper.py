"""The keeper of a network namespace: a container's only process, with NET_ADMIN and little else.

With the ``docker`` backend the lab's owner has no rights over a host's network, and the host has
none either. So each host's network belongs to a container of its own, in which this runs and does
what the lab's steward asks for; the wire between the hosts is another one's network::

    lab's steward ──▶ keeper "switch": br0, v-alice, v-bob
                 ├──▶ keeper of alice's network: eth0, rxe_alice     alice joins it, with no rights
                 └──▶ keeper of bob's network: eth0, rxe_bob         bob joins it, with no rights

    python3 -m rdmalab.keeper keep FOLDER          the keeper; FOLDER/call is the steward's socket
    python3 -m rdmalab.keeper run FOLDER CMD ...   CMD in that keeper's network, as if it ran here

A keeper ends when the steward does, and its container and network with it.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from . import children
from .doorway import listen_at

__all__ = ["CALL", "DOOR", "command", "keep", "run"]

CALL = "call"  # the steward's socket
DOOR = "door"  # the keeper's own
WORD_BYTES = 65536
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)
ENVIRONMENT = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "LC_ALL": "C.UTF-8", "HOME": "/"}
NOT_FOUND = 127


def command(folder: Path, argv: Sequence[str]) -> list[str]:
    """The command line that runs ``argv`` in the network that is kept from ``folder``."""
    return [sys.executable, "-m", f"{__package__}.keeper", "run", str(folder), *argv]


class Keeper:
    """Serves one command for each connection to its door."""

    def __init__(self, folder: Path) -> None:
        self.door = listen_at(folder / DOOR, socket.SOCK_SEQPACKET)
        self.steward = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.steward.connect(str(folder / CALL))
        self.steward.send(json.dumps({"pid": os.getpid()}).encode())
        self.running: dict[int, socket.socket] = {}  # by pid
        self.wake_r, self.wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(self.wake_w)

    def serve(self) -> None:
        """Until the steward goes away."""
        while True:
            watched: list[Any] = [self.steward, self.door, self.wake_r, *self.running.values()]
            readable, _, _ = select.select(watched, [], [])
            if self.steward in readable:
                return
            if self.wake_r in readable:
                os.read(self.wake_r, 4096)
            if self.door in readable:
                self.begin(self.door.accept()[0])
            for pid, caller in list(self.running.items()):
                if caller in readable:
                    self.hear(pid, caller)
            self.reap()

    def begin(self, caller: socket.socket) -> None:
        """Start what a caller asks for, on the caller's own standard streams."""
        caller.settimeout(5)
        try:
            data, fds, _, _ = socket.recv_fds(caller, WORD_BYTES, 3)
            argv = json.loads(data)["argv"]
        except (OSError, ValueError, KeyError):
            caller.close()
            return
        pid = os.fork()
        if pid == 0:
            become(argv, fds)
        for fd in fds:
            os.close(fd)
        self.running[pid] = caller

    def hear(self, pid: int, caller: socket.socket) -> None:
        """A signal for a command; a caller that goes away ends it."""
        try:
            word = caller.recv(WORD_BYTES)
        except OSError:
            word = b""
        if not word:
            self.running.pop(pid).close()
        with contextlib.suppress(ProcessLookupError):  # it has ended; reap() says so
            os.killpg(pid, json.loads(word)["signal"] if word else signal.SIGKILL)

    def reap(self) -> None:
        """Tell callers how their commands ended; collect orphans too."""
        for pid, code in children.ended():
            caller = self.running.pop(pid, None)
            if caller is not None:
                with contextlib.suppress(OSError):  # nobody wants to know any more
                    caller.send(json.dumps({"exit": code}).encode())
                caller.close()


def become(argv: list[str], fds: list[int]) -> NoReturn:
    """In a fork of the keeper: run a command."""
    try:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        for target, fd in enumerate(fds):
            os.dup2(fd, target)
        os.closerange(3, 1024)
        os.execvpe(argv[0], argv, ENVIRONMENT)
    except BaseException as error:
        os.write(2, f"{argv[0]}: {error}\n".encode())
    os._exit(NOT_FOUND)


def keep(folder: Path) -> None:
    """A keeper's whole life."""
    Keeper(folder).serve()


def run(folder: Path, argv: list[str]) -> int:
    """Have a keeper run a command on our standard streams; its exit code, -N for a signal.

    Our own signals are handed on. Should we be killed, the keeper ends the command.
    """
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as keeper:
        keeper.connect(str(folder / DOOR))
        for signum in FORWARDED:
            word = json.dumps({"signal": signum}).encode()
            signal.signal(signum, lambda *_, word=word: keeper.send(word))
        socket.send_fds(keeper, [json.dumps({"argv": argv}).encode()], [0, 1, 2])
        answer = keeper.recv(WORD_BYTES)
    return int(json.loads(answer)["exit"]) if answer else 1


def main(words: list[str]) -> int:
    """``keep FOLDER`` or ``run FOLDER CMD ...``."""
    what, folder, *argv = words
    if what == "keep":
        keep(Path(folder))
        return 0
    code = run(Path(folder), argv)
    return code if code >= 0 else 128 - code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
