"""What this user's labs are: a folder, a state file and a lock for each.

::

    runtime_dir()/labs/ID/     state.json  qmp.sock  boot.sock  console.log  qemu.log
    runtime_dir()/ID.lock      held while the lab is started or stopped

The state file holds the lab's keys, so the folder is 0700. A lab runs if the process that its state
names (pid and start time) runs; a pid alone is never trusted, since it may be another's by now.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from .errors import BackendError
from .paths import SOCKET_PATH_MAX, runtime_dir
from .topology import LAB_ID, check_lab_id

__all__ = [
    "LabState",
    "discard",
    "lab_folder",
    "lab_ids",
    "locked",
    "process_started",
    "read",
    "write",
]


@dataclass(frozen=True)
class LabState:
    """A running lab, as its state file has it.

    ``hosts``: name, ip, device, gid, gid_index, mtu (path MTU, bytes), mac, and ``kernel`` with
    its keys, address and ports. ``control``: the control service's address, port and public key.
    ``desk``: name and ``kernel`` of the desk, if the lab has one.
    ``ready_s``: how long the start took, in seconds.
    """

    lab: str
    backend: str
    accel: str
    accel_why: str
    restored: bool
    ready_s: float
    pid: int
    started: float
    hosts: list[dict[str, Any]]
    control: dict[str, Any] = field(default_factory=dict)
    desk: dict[str, Any] | None = None

    def alive(self) -> bool:
        """Whether the lab's process still runs."""
        return process_started(self.pid) == self.started

    def public(self) -> dict[str, Any]:
        """What ``rdmalab up --json`` prints: no keys in it."""
        facts = ("name", "ip", "device", "gid", "gid_index", "mtu")
        hosts = [{key: host[key] for key in facts} for host in self.hosts]
        shown = {
            key: getattr(self, key) for key in ("lab", "backend", "accel", "restored", "ready_s")
        }
        return {**shown, "hosts": hosts, "accel_why": self.accel_why}


def process_started(pid: int) -> float | None:
    """When a process started (clock ticks since boot, or seconds where /proc is absent).

    None if there is no such process, or it has ended and is not collected yet.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rsplit(b")", 1)[1].split()
    except OSError:
        if os.path.isdir("/proc/self"):
            return None
        return _started_without_proc(pid)
    return None if fields[0] in (b"Z", b"X") else float(fields[19])


def _started_without_proc(pid: int) -> float | None:
    import psutil

    try:
        return float(psutil.Process(pid).create_time())
    except psutil.Error:
        return None


def lab_folder(lab: str) -> Path:
    """The lab's folder; it need not exist. Raises :class:`BackendError` if its path is too long."""
    folder = runtime_dir() / "labs" / check_lab_id(lab)
    if len(os.fsencode(folder / "boot.sock")) > SOCKET_PATH_MAX:
        raise BackendError(
            f"{folder} is too long for a socket's path ({SOCKET_PATH_MAX} bytes).",
            next_step="Set RDMALAB_RUNTIME_DIR to a shorter folder.",
        )
    return folder


def lab_ids() -> list[str]:
    """The labs of this user that have a folder, running or not."""
    folder = runtime_dir() / "labs"
    entries = folder.iterdir() if folder.is_dir() else ()
    return sorted(entry.name for entry in entries if LAB_ID.match(entry.name) and entry.is_dir())


def read(lab: str) -> LabState | None:
    """The lab's state, or None if there is none that can be read and believed."""
    try:
        found = LabState(**json.loads((lab_folder(lab) / "state.json").read_text()))
        found.public()
    except (OSError, ValueError, TypeError, KeyError):
        return None
    kinds = ((found.pid, int), (found.started, float), (found.hosts, list))
    believed = all(isinstance(value, kind) for value, kind in kinds) and found.lab == lab
    return found if believed else None


def write(state: LabState) -> None:
    """Replace the lab's state file, all at once."""
    file = lab_folder(state.lab) / "state.json"
    part = file.with_suffix(".part")
    part.touch(mode=0o600)
    part.write_text(json.dumps(asdict(state)))
    part.replace(file)


def discard(lab: str, deadline_s: float = 2.0) -> bool:
    """Remove the lab's folder, however full; True if there was one.

    What is ending may still write a last file, so this is tried for a while.
    """
    folder = lab_folder(lab)
    there = folder.exists()
    end = time.monotonic() + deadline_s
    while folder.exists() and time.monotonic() < end:
        shutil.rmtree(folder, ignore_errors=True)
    return there


@contextlib.contextmanager
def locked(lab: str, say: Callable[[str], None], deadline_s: float = 180.0) -> Iterator[None]:
    """Hold the lab's lock; the kernel frees it however this process ends.

    Its file goes with it. Raises :class:`BackendError` if somebody else holds it for longer than
    ``deadline_s``.
    """
    path = runtime_dir() / f"{check_lab_id(lab)}.lock"
    end = time.monotonic() + deadline_s
    while True:
        with open(path, "w") as lock:
            wait_for(lock, path, say, end)
            if not is_file(lock, path):
                continue  # its holder took it away when it was done; the lock is a new file now
            try:
                yield
            finally:
                path.unlink(missing_ok=True)
            return


def wait_for(lock: IO[str], path: Path, say: Callable[[str], None], end: float) -> None:
    """Take a lock that somebody may hold; :class:`BackendError` after ``end``."""
    begin = time.monotonic()
    told = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            waited = time.monotonic() - begin
        if waited > 1 and not told:
            say(f"another rdmalab is starting or stopping the lab {path.stem!r}; waiting for it")
            told = True
        if time.monotonic() > end:
            raise BackendError(
                f"Another rdmalab has held the lab {path.stem!r} for {waited:.0f} s.",
                next_step=f"Find it with: fuser -v {path}",
            )
        time.sleep(0.05)


def is_file(lock: IO[str], path: Path) -> bool:
    """Whether an open file is still the one at that path."""
    try:
        return os.path.samestat(os.fstat(lock.fileno()), path.stat())
    except FileNotFoundError:
        return False
