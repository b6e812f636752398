"""A host's control group (cgroup v2): limits on what learners start, and an end for all of it.

::

    /sys/fs/cgroup/NAME/          one host
    ├── init/                     its process 1: no limit, so it can always clean up
    └── user/                     limits: memory, processes, the one RDMA device
        ├── kernel/               the Jupyter kernel and its children
        └── exec/                 what ``rdmalab exec`` runs
"""

from __future__ import annotations

import os

from . import SYS_INFINIBAND
from .network import HostSpec
from .processors import CGROUPS, CONTROLLERS

__all__ = ["Cgroup", "refused_forks"]


class Cgroup:
    """The ``user`` group of a host. Making one moves the calling process into ``init``.

    The files are reached through a descriptor: the host itself does not see /sys/fs/cgroup.
    """

    def __init__(self, spec: HostSpec) -> None:
        folder = CGROUPS / spec.name
        user = folder / "user"
        (folder / "init").mkdir(parents=True, exist_ok=True)
        (folder / "init" / "cgroup.procs").write_text("0")
        (folder / "cgroup.subtree_control").write_text(CONTROLLERS)
        for leaf in ("kernel", "exec"):
            (user / leaf).mkdir(parents=True, exist_ok=True)
        self.fd = os.open(user, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self.write("pids.max", spec.pids)
        self.write("memory.max", spec.memory_mib << 20)
        for other in SYS_INFINIBAND.iterdir():
            if other.name != spec.device:
                self.write("rdma.max", f"{other.name} hca_handle=0 hca_object=0")

    def write(self, file: str, value: object) -> None:
        """Write a value to one of the group's files."""
        fd = os.open(file, os.O_WRONLY, dir_fd=self.fd)
        try:
            os.write(fd, str(value).encode())
        finally:
            os.close(fd)

    def read(self, file: str) -> dict[str, str]:
        """A flat-keyed file of the group, such as ``memory.events``."""
        with os.fdopen(os.open(file, os.O_RDONLY, dir_fd=self.fd)) as lines:
            return dict(line.split() for line in lines)

    def enter(self, leaf: str) -> None:
        """Move the calling process into ``kernel`` or ``exec``."""
        self.write(f"{leaf}/cgroup.procs", 0)

    def oom_kills(self) -> int:
        """How often the kernel has killed a process of this host for want of memory."""
        return int(self.read("memory.events")["oom_kill"])

    def kill(self, folder: str) -> None:
        """End every process below ``folder``, a fork bomb's included, all at once."""
        self.write(f"{folder}/cgroup.kill", 1)

    def empty(self, folder: str) -> bool:
        """Whether no process is left below ``folder``."""
        return self.read(f"{folder}/cgroup.events")["populated"] == "0"

    def close(self) -> None:
        """Let go of the group's folder; what a process does before it runs learners' code."""
        os.close(self.fd)


def refused_forks(host: str) -> int:
    """How often a host was refused another process; for the guest itself, not for a host."""
    events = (CGROUPS / host / "user" / "pids.events").read_text()
    return int(dict(line.split() for line in events.splitlines())["max"])
