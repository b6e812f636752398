"""What makes a host a machine of its own: mounts, device nodes, identity, rights.

Everything here acts on the calling process and its namespaces.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import os
import resource
import signal
import socket
import stat
import struct
from collections.abc import Collection
from dataclasses import asdict
from pathlib import Path
from typing import Any

from . import HERE_FILE, Here, deskseat
from .cgroup import Cgroup
from .network import HostSpec, enter_network, uverbs_node

__all__ = [
    "LEARNER_UID",
    "MEMLOCK_BYTES",
    "Container",
    "environment",
    "leave_console",
    "listen_again",
    "mount",
    "name_process",
    "stay_in_memory",
    "write_here",
]

LEARNER_UID = 1000
HOME = "/home/learner"
MEMLOCK_BYTES = 64 << 20
FILES_SHARE = 0.4  # of a host's memory, for files; an idle kernel needs about 40 MiB of 160
MESSAGE_QUEUES = 32  # of System V; each holds up to 16 KiB
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC = 1, 2, 4, 8
MS_BIND, MS_REC, MS_PRIVATE, MNT_DETACH = 4096, 16384, 1 << 18, 2
MCL_CURRENT, MCL_FUTURE, MCL_ONFAULT = 1, 2, 4
PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP, PR_SET_NAME = 38, 24, 15
SIOCSIFHWADDR, ARPHRD_ETHER = 0x8924, 1
KEEP_FOR_ROOT = {12, 13, 14, 19}  # capabilities(7): NET_ADMIN, NET_RAW, IPC_LOCK, SYS_PTRACE
libc = ctypes.CDLL(None, use_errno=True)


class Container:
    """A host's place in the guest, with the guest's means: namespaces and a control group.

    Making one puts the calling process into the host's network and group, and unshares the rest;
    its next child is process 1 there.
    """

    def __init__(self, spec: HostSpec) -> None:
        self.spec = spec
        enter_network(spec)
        self.cgroup = Cgroup(spec)
        flags = os.CLONE_NEWPID | os.CLONE_NEWNS | os.CLONE_NEWUTS | os.CLONE_NEWIPC
        os.unshare(flags | os.CLONE_NEWCGROUP)

    def set_up(self) -> dict[str, Any]:
        """Make this a machine of its own. Returns what there is to be told of it: nothing."""
        set_up(self.spec)
        return {}

    def take_identity(self, here: dict[str, Any], mac: str) -> None:
        """See :func:`take_identity`."""
        take_identity(here, mac)

    def lower_rights(self, leaf: str, *, root: bool = False) -> None:
        """See :func:`lower_rights`."""
        lower_rights(self.spec, self.cgroup, leaf, root=root)

    def oom_kills(self) -> int:
        """How often a process of this host has been killed for want of memory."""
        return self.cgroup.oom_kills()

    def kill(self, leaf: str, commands: Collection[int]) -> None:
        """End all processes of ``kernel``, of ``exec`` or (``.``) of both.

        ``commands``: pids of what ``exec`` has started, for who has no control groups.
        """
        self.cgroup.kill(leaf)

    def empty(self, leaf: str, commands: Collection[int]) -> bool:
        """Whether none is left there."""
        return self.cgroup.empty(leaf)


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2). Raises ``OSError`` with the target's name."""
    done = libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()
    )
    if done:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


def stay_in_memory() -> None:
    """Keep what the calling process uses in memory, so that it answers when there is none left.

    A host can use up the guest's memory with RDMA objects, which no control group counts. Until the
    kernel ends its processes, programs of which parts were dropped crawl. Children do not inherit
    it (mlockall(2)).
    """
    libc.mlockall(MCL_CURRENT | MCL_FUTURE | MCL_ONFAULT)


def name_process(name: str) -> None:
    """The name that ``ps`` shows for the calling process (prctl(2), at most 15 bytes)."""
    libc.prctl(PR_SET_NAME, name.encode(), 0, 0, 0)


def set_up(spec: HostSpec) -> None:
    """Hostname and mounts: what makes this a machine of its own. Then process 1 stays in memory."""
    socket.sethostname(spec.name)
    Path("/proc/self/oom_score_adj").write_text("-1000")
    mount("none", "/", "", MS_REC | MS_PRIVATE)
    mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
    if not spec.is_desk:
        Path("/proc/sys/net/ipv4/ping_group_range").write_text("0 2147483647")
    libc.umount2(b"/sys", MNT_DETACH)  # with the guest's control groups
    mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)
    make_dev(spec)
    for folder in deskseat.COVERED if spec.is_desk else (deskseat.FOLDER,):
        if os.path.isdir(folder):
            mount("tmpfs", folder, "tmpfs", MS_RDONLY, "mode=000")
    mount("tmpfs", "/run", "tmpfs", MS_NOSUID | MS_NODEV, "mode=755")
    make_folders(spec)
    # What is no file and has no owner any more would outlive its processes and fill their memory.
    Path("/proc/sys/kernel/shm_rmid_forced").write_text("1")
    Path("/proc/sys/kernel/msgmni").write_text(str(MESSAGE_QUEUES))
    os.chdir(HOME)
    for name in os.listdir("/sys/class/infiniband"):
        if name != spec.device:
            real = os.path.realpath(f"/sys/class/infiniband/{name}")
            mount("tmpfs", real, "tmpfs", MS_RDONLY, "mode=000")
    if spec.is_desk:
        deskseat.preload()
    stay_in_memory()  # last: the desk imports as a user, who may lock little


def make_folders(spec: HostSpec) -> None:
    """The four folders that a learner can write to, on one tmpfs.

    Files count as the host's memory and outlive a restart, so together they may take only a part
    of it (:data:`FILES_SHARE`): a full disk says so, and a fresh kernel still finds room.
    """
    size = int(spec.memory_mib * FILES_SHARE)
    mount("tmpfs", "/mnt", "tmpfs", MS_NOSUID | MS_NODEV, f"mode=755,size={size}m")
    for target, mode in (
        ("/tmp", 0o1777),
        ("/var/tmp", 0o1777),
        ("/dev/shm", 0o1777),
        (HOME, 0o700),
    ):
        inner = f"/mnt/{target.strip('/').replace('/', '-')}"
        os.mkdir(inner)
        os.chmod(inner, mode)
        mount(inner, target, "", MS_BIND)
    os.chown(HOME, LEARNER_UID, LEARNER_UID)
    libc.umount2(b"/mnt", MNT_DETACH)


def make_dev(spec: HostSpec) -> None:
    """A /dev of its own: the usual nodes, and of RDMA this host's device only."""
    mount("tmpfs", "/dev", "tmpfs", MS_NOSUID, "mode=755")
    os.umask(0)
    for name, minor in (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)):
        os.mknod(f"/dev/{name}", 0o666 | stat.S_IFCHR, os.makedev(1, minor))
    os.mknod("/dev/tty", 0o666 | stat.S_IFCHR, os.makedev(5, 0))
    for name in ("pts", "shm", "infiniband"):
        os.mkdir(f"/dev/{name}", 0o755)
    mount("devpts", "/dev/pts", "devpts", MS_NOSUID, "newinstance,ptmxmode=0666")
    os.symlink("pts/ptmx", "/dev/ptmx")
    for link, target in (
        ("fd", "fd"),
        ("stdin", "fd/0"),
        ("stdout", "fd/1"),
        ("stderr", "fd/2"),
    ):
        os.symlink(f"/proc/self/{target}", f"/dev/{link}")
    os.umask(0o022)
    if not spec.is_desk:
        make_verbs_nodes(spec)


def make_verbs_nodes(spec: HostSpec) -> None:
    """The device nodes of this host's RDMA device and of rdma_cm."""
    os.umask(0)
    node, major, minor = uverbs_node(spec.device)
    os.mknod(f"/dev/infiniband/{node}", 0o666 | stat.S_IFCHR, os.makedev(major, minor))
    cm = Path("/sys/class/misc/rdma_cm/dev").read_text().strip().split(":")
    os.mknod("/dev/infiniband/rdma_cm", 0o666 | stat.S_IFCHR, os.makedev(*map(int, cm)))
    os.umask(0o022)


def take_identity(here: dict[str, Any], mac: str) -> None:
    """Take the lab's MAC address and facts; called at each start, restored or not."""
    request = struct.pack("16sH6s8x", b"eth0", ARPHRD_ETHER, bytes.fromhex(mac.replace(":", "")))
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        fcntl.ioctl(sock, SIOCSIFHWADDR, request)
    write_here(here)


def write_here(here: dict[str, Any]) -> None:
    """Write down this host's facts, where ``rdmalab.here`` reads them."""
    os.makedirs(os.path.dirname(HERE_FILE), exist_ok=True)
    Path(HERE_FILE).write_text(json.dumps(asdict(Here(**here))))


def listen_again(sock: socket.socket) -> None:
    """Mend a listening socket, if a learner's process, which shares it, has turned it off."""
    if not sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
        libc.connect(sock.fileno(), bytes(16), 16)  # AF_UNSPEC ends what it was turned into
        sock.listen(64)


def leave_console() -> None:
    """Standard streams to nowhere: the console is a file on the lab owner's disk."""
    null = os.open("/dev/null", os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(null, fd)
    os.close(null)


def lower_rights(spec: HostSpec, cgroup: Cgroup, leaf: str, *, root: bool = False) -> None:
    """From here on: in the limited cgroup, without rights over the host.

    ``root`` keeps uid 0 with the four capabilities of an administrator of this host's own
    network (for ``rdmalab exec --root``); it is never used for a kernel.
    """
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.setsid()
    cgroup.enter(leaf)
    cgroup.close()
    Path("/proc/self/oom_score_adj").write_text("500")
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_MEMLOCK, (MEMLOCK_BYTES, MEMLOCK_BYTES))
    for cap in range(64):
        if not (root and cap in KEEP_FOR_ROOT):
            libc.prctl(PR_CAPBSET_DROP, cap, 0, 0, 0)
    libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    if not root:
        os.setgroups([])
        os.setresgid(LEARNER_UID, LEARNER_UID, LEARNER_UID)
        os.setresuid(LEARNER_UID, LEARNER_UID, LEARNER_UID)
    os.environ.clear()
    os.environ.update(environment(spec.name, "root" if root else "learner"))
    os.environ.update(deskseat.environment() if spec.is_desk else {})
    os.chdir(HOME)


def environment(host: str, user: str) -> dict[str, str]:
    """The environment of everything that runs on a host."""
    return {
        "HOME": HOME,
        "USER": user,
        "LOGNAME": user,
        "HOSTNAME": host,
        "PATH": "/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin",
        "PYTHONPATH": "/opt/rdmalab",
        "PYTHONDONTWRITEBYTECODE": "1",
        "IPYTHONDIR": f"{HOME}/.ipython",
        "LANG": "C.UTF-8",
        "TERM": "xterm-256color",
    }
