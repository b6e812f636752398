"""Labs whose hosts run on this machine's own kernel have a process of their own: the steward.

It is what a QEMU is for a ``vm`` lab (``hostside/steward.py``): started here, found again by the
mark in its environment, and when it ends, all that belongs to its lab ends with it. Its code is a
copy in the lab's folder, which the hosts use too, so a lab does not change while it runs.
"""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from . import overlay
from .bootport import BootPort, adopt, collect
from .errors import BackendError
from .paths import runtime_dir
from .qmp import end_process
from .state import LabState, discard, lab_folder, process_started, write
from .topology import DESK, HostPlan, mac_addresses

__all__ = ["CODE", "StewardPort", "finish", "launched", "marked", "no_desk", "plan", "runs", "stop"]

MARK = "RDMALAB_OF"
CODE = "code/opt/rdmalab"  # in the lab's folder: what stands at /opt/rdmalab in a guest
END_S = 10.0
START_S = 300.0  # from one of its words to the next
Say = Callable[[str], None]


class StewardPort(BootPort):
    """The conversation with a steward until the lab is up."""

    noun = "lab's steward"
    detail = ""  # why it gave up, if it has

    def expect(self, event: str, say: Say) -> dict[str, Any]:
        """The steward's next message, which must be this one. Raises :class:`BackendError`."""
        said = self.read(START_S, say)
        if said["event"] == "failed":
            self.detail = said["detail"].rstrip(".")
            raise self.failure(f"gave up: {self.detail}")
        if said["event"] != event:
            raise self.failure(f"says {said['event']} instead of {event}")
        return said


def no_desk(hosts: list[HostPlan], backend: str) -> None:
    """:class:`BackendError` where a desk is wanted: submissions are kept apart by a guest only."""
    if DESK in hosts:
        raise BackendError(
            f"A notebook is graded inside a guest, which the {backend} backend does not have.",
            next_step="Grade with the vm backend; it is the default.",
        )


def plan(lab: str, hosts: list[HostPlan], ports: list[int], **more: Any) -> dict[str, Any]:
    """What a steward must know. ``ports``: of the hosts' devices."""
    macs = mac_addresses(str(os.getuid()), lab, [host.name for host in hosts])
    specs = [host.for_guest(macs[host.name]) for host in hosts]
    return {"lab": lab, "folder": str(lab_folder(lab)), "hosts": specs, "ports": ports, **more}


@contextlib.contextmanager
def launched(plan: dict[str, Any], hosts: list[HostPlan]) -> Iterator[StewardPort]:
    """Lay the hosts' side into the lab's folder and start its steward, which runs on afterwards."""
    folder = Path(plan["folder"])
    folder.mkdir(mode=0o700, parents=True)
    lay(folder, hosts)
    ours, theirs = socket.socketpair()
    with ours, theirs, open(folder / "console.log", "wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "rdmalab.steward", str(theirs.fileno())],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            cwd="/",
            env=environment(folder),
            pass_fds=(theirs.fileno(),),
        )
        adopt(process)
        theirs.close()
        port = StewardPort(ours, process, folder)
        port.send(plan)
        yield port


def lay(folder: Path, hosts: list[HostPlan]) -> None:
    """The hosts' side, readable for every uid that a container may have."""
    for name, data in overlay.files(hosts).items():
        file = folder / "code" / name.removeprefix("overlay/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(data)
        file.chmod(0o644)
    for place in [folder / "code", *(folder / "code").rglob("*")]:
        if place.is_dir():
            place.chmod(0o755)


def environment(folder: Path) -> dict[str, str]:
    """The steward's environment: nothing of the caller's, and the mark by which it is found."""
    return {
        "PATH": os.environ.get("PATH", "/usr/bin:/bin"),
        "LC_ALL": "C.UTF-8",
        "PYTHONPATH": str(folder / CODE),
        "PYTHONDONTWRITEBYTECODE": "1",
        "RDMALAB_RUNTIME_DIR": str(runtime_dir()),
        "USER": os.environ.get("USER") or str(os.getuid()),
        MARK: str(folder),
    }


def finish(port: StewardPort, facts: dict[str, Any], say: Say) -> LabState:
    """Wait for the steward to be ready; write and return the lab's state. ``facts``: of the start,
    as the state has them, and ``begin`` (monotonic, seconds)."""
    begin = facts.pop("begin")
    said = port.expect("ready", say)
    state = LabState(
        restored=False,
        ready_s=round(time.monotonic() - begin, 2),
        pid=port.pid,
        started=process_started(port.pid) or 0.0,
        hosts=said["hosts"],
        control=said["control"],
        **facts,
    )
    write(state)
    port.send({"op": "commit"})
    return state


def marked() -> dict[int, str]:
    """This user's processes that belong to labs here, stewards and hosts': pid to the lab's id."""
    import psutil

    folder = runtime_dir() / "labs"
    found = {}
    for process in psutil.process_iter(["uids"]):
        if process.info["uids"] and process.info["uids"].real == os.getuid():
            with contextlib.suppress(psutil.Error, OSError):
                mark = Path(process.environ().get(MARK, "/"))
                if mark.parent == folder:
                    found[process.pid] = mark.name
    return found


def strays(lab: str) -> list[int]:
    """Those of one lab, whatever is left of its folder."""
    return [pid for pid, name in marked().items() if name == lab]


def runs(state: LabState) -> bool:
    """Whether the process that a state names is that lab's steward, and no other with its pid."""
    import psutil

    try:
        mark = psutil.Process(state.pid).environ().get(MARK)
    except (psutil.Error, OSError):
        return False
    return state.alive() and mark == str(lab_folder(state.lab))


def stop(lab: str) -> bool:
    """End the lab's processes and remove its folder. True if there was anything."""
    ended = False
    end = time.monotonic() + END_S
    while (pids := strays(lab)) and time.monotonic() < end:
        for pid in pids:
            ended = end_process(pid, lambda pid: pid in strays(lab), 1.0) or ended
    collect()
    return discard(lab) or ended
