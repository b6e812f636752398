"""Talk to a running QEMU through its monitor socket, with a deadline on everything.

The socket lies in the lab's 0700 folder. Whoever listens on it *is* the lab's QEMU: the kernel
names its pid (``SO_PEERCRED``), so no pid file is needed and no foreign process is ever touched.
"""

from __future__ import annotations

import json
import os
import re
import select
import shlex
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from .errors import BackendError

__all__ = [
    "Monitor",
    "end_process",
    "end_qemu",
    "forwards",
    "listener_pid",
    "migrate_in",
    "migrate_out",
    "monitor",
]

IGNORE_SHARED = [{"capability": "x-ignore-shared", "state": True}]
FORWARD = re.compile(r"HOST_FORWARD\]\s+\d+\s+127\.0\.0\.1\s+(\d+)\s+\S+\s+(\d+)")


def listener_pid(path: Path) -> int | None:
    """The pid of the process that listens on a Unix socket, or None if nobody does."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(1)
        try:
            sock.connect(str(path))
        except OSError:
            return None
        size = struct.calcsize("3i")
        pid, _, _ = struct.unpack(
            "3i", sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, size)
        )
        return int(pid) or None


class Monitor:
    """A connection to QEMU's monitor: JSON lines on a socket, each answer within a deadline.

    The package ``qemu.qmp`` would do this too, but on an asyncio loop of its own, and in a
    notebook's cell one is running already.
    """

    def __init__(self, sock: socket.socket, deadline_s: float) -> None:
        self.sock, self.deadline_s = sock, deadline_s
        self.buffer = b""
        self.read(time.monotonic() + deadline_s)  # the greeting
        self.cmd("qmp_capabilities")

    def cmd(self, name: str, **arguments: Any) -> Any:
        """Run a command and return its answer; :class:`BackendError` if QEMU refuses it."""
        end = time.monotonic() + self.deadline_s
        self.sock.sendall(json.dumps({"execute": name, "arguments": arguments}).encode() + b"\n")
        while True:
            message = self.read(end)
            if "return" in message:
                return message["return"]
            if "error" in message:
                raise BackendError(f"QEMU refused {name}: {message['error'].get('desc')}.")

    def read(self, end: float) -> dict[str, Any]:
        """The next message, answer or event. Raises OSError (TimeoutError) if it does not come."""
        while b"\n" not in self.buffer:
            self.sock.settimeout(max(0.001, end - time.monotonic()))
            data = self.sock.recv(65536)
            if not data:
                raise ConnectionResetError("it hung up")
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        return dict(json.loads(line))


@contextmanager
def monitor(path: Path, deadline_s: float = 10.0) -> Iterator[Monitor]:
    """A connected monitor. Raises :class:`BackendError` if QEMU does not answer in time."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.settimeout(deadline_s)
        try:
            connect(sock, path, time.monotonic() + deadline_s)
            yield Monitor(sock, deadline_s)
        except (OSError, ValueError) as error:
            raise BackendError(
                f"QEMU's monitor does not answer ({error}).",
                next_step="End the lab with: rdmalab down --all",
            ) from None


def connect(sock: socket.socket, path: Path, end: float) -> None:
    """Connect to a QEMU that is just starting: its socket has a name before it is listened on."""
    while True:
        try:
            return sock.connect(str(path))
        except ConnectionRefusedError:
            if time.monotonic() > end:
                raise
            time.sleep(0.005)


def forwards(qmp: Monitor) -> dict[int, int]:
    """QEMU's forwarded ports: guest port to the port on 127.0.0.1 that QEMU was given."""
    shown = str(qmp.cmd("human-monitor-command", **{"command-line": "info usernet"}))
    return {int(guest): int(host) for host, guest in FORWARD.findall(shown)}


def migrate_out(qmp: Monitor, file: Path, deadline_s: float = 20.0) -> None:
    """Save the devices' state to ``file``; the memory is in its own file already.

    The guest is *running* when the migration starts, so that it runs when it is restored.
    """
    qmp.cmd("migrate-set-capabilities", capabilities=IGNORE_SHARED)
    qmp.cmd("migrate", uri=f"exec:cat > {shlex.quote(str(file))}")
    wait_migration(qmp, deadline_s)


def migrate_in(qmp: Monitor, file: Path) -> None:
    """Load the devices' state into a QEMU that was started with ``-incoming defer``."""
    qmp.cmd("migrate-set-capabilities", capabilities=IGNORE_SHARED)
    qmp.cmd("migrate-incoming", uri=f"exec:cat {shlex.quote(str(file))}")


def wait_migration(qmp: Monitor, deadline_s: float) -> None:
    """Until the migration is completed; :class:`BackendError` when it fails or takes too long."""
    end = time.monotonic() + deadline_s
    while True:
        answer: Any = qmp.cmd("query-migrate")
        state = answer.get("status")
        if state == "completed":
            return
        if state == "failed" or time.monotonic() > end:
            raise BackendError(
                f"The hosts' state could not be saved (migration {state}:"
                f" {answer.get('error-desc', 'no reason given')}).",
                next_step="Is there room in the cache folder? rdmalab doctor tells.",
            )
        time.sleep(0.01)


def end_qemu(path: Path) -> bool:
    """End the QEMU that listens on ``path``, at once and for certain. True if there was one."""
    pid = listener_pid(path)
    return pid is not None and end_process(pid, lambda pid: listener_pid(path) == pid)


def end_process(pid: int, ours: Callable[[int], bool], deadline_s: float = 5.0) -> bool:
    """End a process: SIGTERM, and SIGKILL after ``deadline_s``. True if it was there, and ``ours``.

    ``ours`` is asked while a handle on the process is held: were the pid another's by now, it
    would say no, and if it says yes the handle cannot come to mean another process.
    """
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        if not ours(pid):
            return False
        for signum in (signal.SIGTERM, signal.SIGKILL):
            signal.pidfd_send_signal(handle, signum)
            if select.select([handle], [], [], deadline_s)[0]:  # readable: it has ended
                break
        return True
    except ProcessLookupError:
        return True
    finally:
        os.close(handle)
