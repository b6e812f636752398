"""A host's place on a kernel that is not ours: a Docker container, or plain processes.

What a :class:`~rdmalab.container.Container` does with the guest's rights is done there by others
(Docker makes namespaces, limits and device nodes) or not at all (plain processes share this
machine). What is left is to start a host's processes with no right to more, and to end all of them:
a host's first process is the parent of everything that is started on it, orphans included.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
from collections.abc import Collection
from pathlib import Path
from typing import Any, NamedTuple

from .container import MEMLOCK_BYTES, environment, write_here
from .network import HostSpec

__all__ = ["Lodging"]

PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER, PR_SET_NO_NEW_PRIVS = 1, 4, 36, 38
PR_CAPBSET_DROP, CAP_IPC_LOCK, CAPABILITY_VERSION_3 = 24, 14, 0x2008_0522
MEMORY_EVENTS = Path("/sys/fs/cgroup/memory.events")
HANDED_ON = ("RDMALAB_HERE", "RDMALAB_OF")  # where this host's facts are; whose process this is
libc = ctypes.CDLL(None, use_errno=True)


def keep_to_the_limit() -> None:
    """Give up the right to pin memory beyond the limit, where the owner is root and has it.

    It is bit 14 of the three sets (effective, permitted, inheritable) that capget(2) fills, for
    capabilities 0 to 31, then for the others, in version 3 of its structure.
    """
    header, sets = (ctypes.c_uint32 * 2)(CAPABILITY_VERSION_3, 0), (ctypes.c_uint32 * 6)()
    libc.capget(header, sets)
    for number in range(3):
        sets[number] &= ~(1 << CAP_IPC_LOCK)
    libc.prctl(PR_CAPBSET_DROP, CAP_IPC_LOCK, 0, 0, 0)
    libc.capset(header, sets)


class Kin(NamedTuple):
    """A process as /proc/PID/stat has it."""

    parent: int
    session: int
    ended: bool


def processes() -> dict[int, Kin]:
    """All processes that can be seen from here."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = entry.read_text(errors="replace").rpartition(")")[2].split()
        except OSError:
            continue  # it has ended
        found[int(entry.parent.name)] = Kin(int(fields[1]), int(fields[3]), fields[0] in "ZX")
    return found


def descendants(of: int, among: dict[int, Kin]) -> dict[int, Kin]:
    """The children of a process, their children, and so on."""
    found: dict[int, Kin] = {}
    parents = {of}
    while parents:
        born = {pid: kin for pid, kin in among.items() if kin.parent in parents}
        parents = set(born) - set(found)
        found |= born
    return found


class Lodging:
    """Where a host lives. ``home``: its folder; ``alone``: in namespaces of its own (Docker)."""

    def __init__(self, spec: HostSpec, home: str, port: int, alone: bool) -> None:
        self.spec, self.home, self.port, self.alone = spec, home, port, alone

    def set_up(self) -> dict[str, Any]:
        """Become the parent of all orphans. Returns the device's active path MTU in bytes.

        Learners' processes have this one's uid, and still may not look into it (PR_SET_DUMPABLE).
        """
        from pyverbs.device import Context

        libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        libc.prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
        os.chdir(self.home)
        with Context(name=self.spec.device) as context:
            return {"mtu": 128 << context.query_port(self.port).active_mtu}

    def take_identity(self, here: dict[str, Any], mac: str) -> None:
        """Write down the host's facts; its MAC address is as it was made."""
        write_here(here)

    def lower_rights(self, leaf: str, *, root: bool = False) -> None:
        """A session of its own that ends with the host; no new rights; the guest's limits.

        There are no rights to keep for ``root``: others have them (see ``steward``).
        """
        if root:
            raise PermissionError("there is no administrator here")
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        libc.prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)
        libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        pinned = resource.getrlimit(resource.RLIMIT_MEMLOCK)[1]
        if pinned == resource.RLIM_INFINITY or pinned > MEMLOCK_BYTES:
            pinned = MEMLOCK_BYTES  # a learner shall run into it, and not into the memory's end
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (pinned, pinned))
        keep_to_the_limit()
        Path("/proc/self/oom_score_adj").write_text("500")
        handed_on = {name: os.environ[name] for name in HANDED_ON if name in os.environ}
        own = {"HOME": self.home, "IPYTHONDIR": f"{self.home}/.ipython"}
        own["PYTHONPATH"] = os.environ["PYTHONPATH"]
        user = "learner" if self.alone else os.environ.get("USER", str(os.getuid()))
        os.environ.clear()
        os.environ.update({**environment(self.spec.name, user), **own, **handed_on})
        os.chdir(self.home)

    def oom_kills(self) -> int:
        """How often a process has been killed for want of memory; 0 where nobody counts."""
        if not self.alone or not MEMORY_EVENTS.exists():
            return 0
        lines = MEMORY_EVENTS.read_text().splitlines()
        return int(dict(line.split() for line in lines)["oom_kill"])

    def members(self, leaf: str, commands: Collection[int]) -> list[int]:
        """The living processes of ``kernel`` or (``.``) of this host.

        The kernel's are those that are in no session of the ``commands`` that ``exec`` has started.
        """
        return [
            pid
            for pid, kin in descendants(os.getpid(), processes()).items()
            if not kin.ended and (leaf == "." or kin.session not in commands)
        ]

    def kill(self, leaf: str, commands: Collection[int]) -> None:
        """End them, except for those that are born meanwhile."""
        for pid in self.members(leaf, commands):
            with contextlib.suppress(ProcessLookupError, PermissionError):  # it ended, or changed
                os.kill(pid, signal.SIGKILL)

    def empty(self, leaf: str, commands: Collection[int]) -> bool:
        """Whether none is left; those born since the last look are ended now."""
        self.kill(leaf, commands)
        return not self.members(leaf, commands)
