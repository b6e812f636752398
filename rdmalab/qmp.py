"""Talk to a running QEMU through its monitor socket, with a deadline on everything.

The socket lies in the lab's 0700 folder. Whoever listens on it *is* the lab's QEMU: the kernel
names its pid (``SO_PEERCRED``), so no pid file is needed and no foreign process is ever touched.
"""

from __future__ import annotations

import os
import re
import select
import shlex
import signal
import socket
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .errors import BackendError

if TYPE_CHECKING:
    from qemu.qmp.legacy import QEMUMonitorProtocol

__all__ = ["end_qemu", "forwards", "listener_pid", "migrate_in", "migrate_out", "monitor"]

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


@contextmanager
def monitor(path: Path, deadline_s: float = 10.0) -> Iterator[QEMUMonitorProtocol]:
    """A connected monitor. Raises :class:`BackendError` if QEMU does not answer in time."""
    from qemu.qmp import QMPError
    from qemu.qmp.legacy import QEMUMonitorProtocol

    client = QEMUMonitorProtocol(str(path))
    client.settimeout(deadline_s)
    try:
        client.connect()
        yield client
    except (QMPError, OSError, TimeoutError) as error:
        raise BackendError(
            f"QEMU's monitor does not answer ({type(error).__name__}: {error}).",
            next_step="End the lab with: rdmalab down --all",
        ) from None
    finally:
        with suppress(QMPError, OSError, EOFError):  # it may be gone, which is what closing wants
            client.close()


def forwards(qmp: QEMUMonitorProtocol) -> dict[int, int]:
    """QEMU's forwarded ports: guest port to the port on 127.0.0.1 that QEMU was given."""
    shown: Any = qmp.cmd("human-monitor-command", **{"command-line": "info usernet"})
    return {int(guest): int(host) for host, guest in FORWARD.findall(shown)}


def migrate_out(qmp: QEMUMonitorProtocol, file: Path, deadline_s: float = 20.0) -> None:
    """Save the devices' state to ``file``; the memory is in its own file already.

    The guest is *running* when the migration starts, so that it runs when it is restored.
    """
    qmp.cmd("migrate-set-capabilities", capabilities=IGNORE_SHARED)
    qmp.cmd("migrate", uri=f"exec:cat > {shlex.quote(str(file))}")
    wait_migration(qmp, deadline_s)


def migrate_in(qmp: QEMUMonitorProtocol, file: Path) -> None:
    """Load the devices' state into a QEMU that was started with ``-incoming defer``."""
    qmp.cmd("migrate-set-capabilities", capabilities=IGNORE_SHARED)
    qmp.cmd("migrate-incoming", uri=f"exec:cat {shlex.quote(str(file))}")


def wait_migration(qmp: QEMUMonitorProtocol, deadline_s: float) -> None:
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


def end_qemu(path: Path, deadline_s: float = 5.0) -> bool:
    """End the QEMU that listens on ``path``, at once and for certain. True if there was one."""
    pid = listener_pid(path)
    if pid is None:
        return False
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        if listener_pid(path) != pid:  # it ended, and the pid may be another's by now
            return True
        signal.pidfd_send_signal(handle, signal.SIGTERM)
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            if gone(handle):
                return True
            time.sleep(0.01)
        signal.pidfd_send_signal(handle, signal.SIGKILL)
        end = time.monotonic() + deadline_s
        while not gone(handle) and time.monotonic() < end:
            time.sleep(0.01)
        return True
    except ProcessLookupError:
        return True
    finally:
        os.close(handle)


def gone(pidfd: int) -> bool:
    """Whether the process of a pidfd has ended (it is readable then)."""
    return bool(select.select([pidfd], [], [], 0)[0])
