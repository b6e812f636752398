"""Start a QEMU and talk with its guest over the boot port, in JSON lines, until it is a lab's.

The port is a Unix socket in the lab's 0700 folder that QEMU connects to as it starts. The guest
powers itself off when the other end goes away too early, so a start that is killed leaves nothing.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import qemu
from .console import said_in
from .errors import BackendError
from .paths import runtime_dir

__all__ = ["BootPort", "GuestPanic", "adopt", "collect", "launched"]

_children: list[subprocess.Popen[bytes]] = []  # QEMUs of this process, to be collected


def adopt(process: subprocess.Popen[bytes]) -> None:
    """Remember a process that outlives whoever started it, see :func:`collect`."""
    _children.append(process)


def collect() -> None:
    """Collect QEMUs (or stewards) of this process that have ended, so that none stays a zombie."""
    _children[:] = [process for process in _children if process.poll() is None]


class GuestPanic(BackendError):
    """The guest's kernel panicked while it was being started."""

    @property
    def log(self) -> str:
        """The sentence that says where the log is."""
        return self.what[self.what.rindex("Its log") :]


class BootPort:
    """The conversation with a guest that is being started, in JSON lines."""

    noun = "guest"

    def __init__(self, sock: socket.socket, process: subprocess.Popen[bytes], folder: Path) -> None:
        self.sock, self.process, self.folder = sock, process, folder
        self.pid = process.pid
        self.buffer = b""

    def send(self, message: dict[str, Any]) -> None:
        """One message to the guest."""
        self.sock.settimeout(5)
        self.sock.sendall(json.dumps(message).encode() + b"\n")

    def read(self, deadline_s: float, say: Callable[[str], None]) -> dict[str, Any]:
        """The guest's next message. :class:`BackendError` with its console if it does not come."""
        begin = time.monotonic()
        told = 0
        while b"\n" not in self.buffer:
            waited = time.monotonic() - begin
            if waited // 10 > told:
                told = int(waited // 10)
                say(f"still starting ({waited:.0f} s; at most {deadline_s:.0f} s)")
            if waited > deadline_s:
                raise self.failure(f"did not answer in {deadline_s:.0f} s")
            self.sock.settimeout(0.5)
            try:
                data = self.sock.recv(65536)
            except TimeoutError:
                continue
            if not data:
                raise self.failure("ended before it was ready")
            self.buffer += data
        line, _, self.buffer = self.buffer.partition(b"\n")
        message: dict[str, Any] = json.loads(line)
        return message

    def failure(self, what: str) -> BackendError:
        """Why the guest is no more: QEMU's and the guest's last words, where all of it is."""
        said = said_in(self.folder)
        where = said.keep(f"start-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}")
        error = GuestPanic if said.panicked else BackendError
        return error(
            f"The {self.noun} {what}.{said.shown()}{where}", next_step="Then: rdmalab doctor."
        )


def environment() -> dict[str, str]:
    """QEMU's environment: nothing of the caller's, and the folder by which strays are found."""
    path = os.environ.get("PATH", "/usr/bin:/bin")
    return {"PATH": path, "LC_ALL": "C", "RDMALAB_RUNTIME_DIR": str(runtime_dir())}


@contextlib.contextmanager
def launched(folder: Path, line: list[str], *inherited: int) -> Iterator[BootPort]:
    """Start QEMU and accept its boot port. The port is closed at the end; QEMU runs on.

    ``inherited``: descriptors that it gets, by the same numbers.
    """
    path = folder / "boot.sock"
    path.unlink(missing_ok=True)
    (folder / "qmp.sock").unlink(missing_ok=True)
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as server:
        server.bind(str(path))
        server.listen(1)
        with open(folder / "qemu.log", "wb") as log:
            log.write((qemu.shown(line) + "\n").encode())
            log.flush()
            process = subprocess.Popen(
                line,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
                cwd="/",
                env=environment(),
                pass_fds=inherited,
            )
        adopt(process)
        server.settimeout(0.2)
        sock = accept(server, process, folder)
        with contextlib.closing(sock):
            wait_listening(folder / "qmp.sock", process, sock, folder)
            yield BootPort(sock, process, folder)


def accept(server: socket.socket, process: subprocess.Popen[bytes], folder: Path) -> socket.socket:
    """QEMU's connection to the boot port, made as soon as it has read its command line."""
    end = time.monotonic() + 20
    while True:
        try:
            return server.accept()[0]
        except TimeoutError:
            ended = process.poll() is not None
        if ended or time.monotonic() > end:
            raise BootPort(server, process, folder).failure("could not be started by QEMU")


def wait_listening(
    path: Path, process: subprocess.Popen[bytes], sock: socket.socket, folder: Path
) -> None:
    """Until QEMU's monitor is there; it is made before the boot port or just after."""
    end = time.monotonic() + 20
    while not path.exists():
        if process.poll() is not None or time.monotonic() > end:
            raise BootPort(sock, process, folder).failure("could not be started by QEMU")
        time.sleep(0.002)
