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

import ctypes
import fcntl
import json
import os
import resource
import select
import signal
import socket
import stat
import struct
import sys
import time
import traceback
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from . import HERE_FILE, Here, hostkernel
from .network import HostSpec, uverbs_node

__all__ = ["HostInit", "LEARNER_UID", "become"]

LEARNER_UID = 1000
HOME = "/home/learner"
CGROUP = Path("/sys/fs/cgroup")
MS_RDONLY, MS_NOSUID, MS_NODEV, MS_NOEXEC, MS_BIND = 1, 2, 4, 8, 4096
MS_REMOUNT, MS_REC, MS_PRIVATE = 32, 16384, 1 << 18
PR_SET_NO_NEW_PRIVS, PR_CAPBSET_DROP = 38, 24
SIOCSIFHWADDR, ARPHRD_ETHER = 0x8924, 1
KEEP_FOR_ROOT = {12, 13, 14, 19}  # capabilities(7): NET_ADMIN, NET_RAW, IPC_LOCK, SYS_PTRACE
CRASH_LOOP = 3  # kernels that die before they are ready, in a row
libc = ctypes.CDLL(None, use_errno=True)


def mount(source: str, target: str, kind: str, flags: int = 0, data: str = "") -> None:
    """mount(2). Raises ``OSError`` with the target's name."""
    done = libc.mount(
        source.encode(), target.encode(), kind.encode(), ctypes.c_ulong(flags), data.encode()
    )
    if done:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), target)


def become(
    spec: HostSpec, agent: socket.socket, listeners: dict[str, socket.socket], peers: dict[str, str]
) -> None:
    """Turn a fork of the nursery into a new host. Returns in the nursery only.

    A middle process enters the network namespace that the agent made and unshares the others;
    its child is process 1 of the new PID namespace and becomes the host.
    """
    middle = os.fork()
    if middle:
        os.waitpid(middle, 0)
        return
    try:
        fd = os.open(f"/run/netns/{spec.name}", os.O_RDONLY)
        os.setns(fd, os.CLONE_NEWNET)
        os.close(fd)
        cgroups = join_cgroup(spec)
        os.unshare(
            os.CLONE_NEWPID
            | os.CLONE_NEWNS
            | os.CLONE_NEWUTS
            | os.CLONE_NEWIPC
            | os.CLONE_NEWCGROUP
        )
        if os.fork() == 0:
            HostInit(spec, agent, listeners, peers, cgroups).main()
    except BaseException:
        fail(agent, traceback.format_exc())
    os._exit(0)


def fail(agent: socket.socket, text: str) -> None:
    """Tell the agent why this host cannot be; the console gets it too."""
    print(text, file=sys.__stderr__, flush=True)
    agent.send(json.dumps({"event": "failed", "detail": text[-3000:]}).encode())


def join_cgroup(spec: HostSpec) -> Path:
    """Make the host's cgroup with its limits and enter its ``init`` leaf.

    ``user`` is for everything that learners start (``kernel`` and what ``rdmalab exec`` runs);
    the limits are on it, so that a fork bomb or a memory hog cannot take this process along.
    """
    folder = CGROUP / spec.name
    user = folder / "user"
    (folder / "init").mkdir(parents=True, exist_ok=True)
    (folder / "init" / "cgroup.procs").write_text("0")
    (folder / "cgroup.subtree_control").write_text("+pids +memory +rdma")
    for leaf in ("kernel", "exec"):
        (user / leaf).mkdir(parents=True, exist_ok=True)
    (user / "pids.max").write_text(str(spec.pids))
    (user / "memory.max").write_text(str(spec.memory_mib << 20))
    for other in Path("/sys/class/infiniband").iterdir():
        if other.name != spec.device:
            (user / "rdma.max").write_text(f"{other.name} hca_handle=0 hca_object=0")
    return user


class HostInit:
    """The host's process 1. ``main`` never returns."""

    def __init__(
        self,
        spec: HostSpec,
        agent: socket.socket,
        listeners: dict[str, socket.socket],
        peers: dict[str, str],
        user_cgroup: Path,
    ) -> None:
        self.spec, self.agent, self.listeners, self.peers = spec, agent, listeners, peers
        self.user = user_cgroup
        self.user_fd = os.open(user_cgroup, os.O_RDONLY | os.O_DIRECTORY)
        self.wake_r, self.wake_w = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        self.kernel_pid = 0
        self.kernel_channel: socket.socket | None = None
        self.kernel_state = "none"
        self.keys: dict[str, str] | None = None
        self.crashes = 0
        self.oom_kills = 0
        self.running: dict[int, int] = {}  # pid -> the agent's id of an exec

    def main(self) -> NoReturn:
        """Set the host up, start a kernel, serve the agent."""
        try:
            signal.signal(signal.SIGCHLD, lambda *_: None)
            signal.set_wakeup_fd(self.wake_w)
            self.set_up()
            self.tell("up")
            self.start_kernel()
            while True:
                self.step()
        except BaseException:
            fail(self.agent, traceback.format_exc())
            os._exit(1)

    def tell(self, event: str, **facts: Any) -> None:
        """One datagram to the agent."""
        self.agent.send(json.dumps({"event": event, **facts}).encode())

    # --- set-up -----------------------------------------------------------------------------

    def set_up(self) -> None:
        """Hostname and mounts: what makes this a machine of its own."""
        socket.sethostname(self.spec.name)
        Path("/proc/self/oom_score_adj").write_text("-1000")
        mount("none", "/", "", MS_REC | MS_PRIVATE)
        mount("proc", "/proc", "proc", MS_NOSUID | MS_NODEV | MS_NOEXEC)
        Path("/proc/sys/net/ipv4/ping_group_range").write_text("0 2147483647")
        mount("sysfs", "/sys", "sysfs", MS_NOSUID | MS_NODEV | MS_NOEXEC | MS_RDONLY)
        self.make_dev()
        for target, mode in (("/tmp", "1777"), ("/run", "755"), ("/var/tmp", "1777")):
            mount("tmpfs", target, "tmpfs", MS_NOSUID | MS_NODEV, f"mode={mode}")
        home = f"mode=700,uid={LEARNER_UID},gid={LEARNER_UID}"
        mount("tmpfs", HOME, "tmpfs", MS_NOSUID | MS_NODEV, home)
        os.chdir(HOME)
        for name in os.listdir("/sys/class/infiniband"):
            if name != self.spec.device:
                real = os.path.realpath(f"/sys/class/infiniband/{name}")
                mount("tmpfs", real, "tmpfs", MS_RDONLY, "mode=000")

    def make_dev(self) -> None:
        """A /dev of its own: the usual nodes, and of RDMA this host's device only."""
        mount("tmpfs", "/dev", "tmpfs", MS_NOSUID, "mode=755")
        os.umask(0)
        for name, minor in (("null", 3), ("zero", 5), ("full", 7), ("random", 8), ("urandom", 9)):
            os.mknod(f"/dev/{name}", 0o666 | stat.S_IFCHR, os.makedev(1, minor))
        os.mknod("/dev/tty", 0o666 | stat.S_IFCHR, os.makedev(5, 0))
        for name in ("pts", "shm", "infiniband"):
            os.mkdir(f"/dev/{name}", 0o755)
        mount("devpts", "/dev/pts", "devpts", MS_NOSUID, "newinstance,ptmxmode=0666")
        mount("tmpfs", "/dev/shm", "tmpfs", MS_NOSUID | MS_NODEV, "mode=1777")
        os.symlink("pts/ptmx", "/dev/ptmx")
        for link, target in (
            ("fd", "fd"),
            ("stdin", "fd/0"),
            ("stdout", "fd/1"),
            ("stderr", "fd/2"),
        ):
            os.symlink(f"/proc/self/{target}", f"/dev/{link}")
        node, major, minor = uverbs_node(self.spec.device)
        os.mknod(f"/dev/infiniband/{node}", 0o666 | stat.S_IFCHR, os.makedev(major, minor))
        cm = Path("/sys/class/misc/rdma_cm/dev").read_text().strip().split(":")
        os.mknod("/dev/infiniband/rdma_cm", 0o666 | stat.S_IFCHR, os.makedev(*map(int, cm)))
        os.umask(0o022)

    def identity(self, here: dict[str, Any], mac: str) -> None:
        """Take the lab's MAC address and facts; called at each start, restored or not."""
        request = struct.pack(
            "16sH6s8x", b"eth0", ARPHRD_ETHER, bytes.fromhex(mac.replace(":", ""))
        )
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            fcntl.ioctl(sock, SIOCSIFHWADDR, request)
        os.makedirs(os.path.dirname(HERE_FILE), exist_ok=True)
        Path(HERE_FILE).write_text(json.dumps(asdict(Here(**here))))

    # --- processes --------------------------------------------------------------------------

    def start_kernel(self) -> None:
        """Fork a kernel; it gets ready and then waits for keys."""
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        pid = os.fork()
        if pid == 0:
            try:
                ours.close()
                self.lower_rights("kernel")
                fds = {name: sock.fileno() for name, sock in self.listeners.items()}
                hostkernel.serve(theirs, fds)
            except BaseException:
                traceback.print_exc(file=sys.__stderr__)
            os._exit(70)
        theirs.close()
        self.kernel_pid, self.kernel_channel, self.kernel_state = pid, ours, "starting"
        self.oom_kills = self.read_oom_kills()

    def lower_rights(self, leaf: str, root: bool = False) -> None:
        """From here on: in the limited cgroup, without rights over the host.

        ``root`` keeps uid 0 with the four capabilities of an administrator of this host's own
        network (for ``rdmalab exec --root``); it is never used for a kernel.
        """
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.setsid()
        self.write_cgroup(f"{leaf}/cgroup.procs", b"0")
        Path("/proc/self/oom_score_adj").write_text("500")
        self.agent.close()
        os.close(self.user_fd)
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (64 << 20, 64 << 20))
        keep = KEEP_FOR_ROOT if root else set()
        for cap in range(64):
            if cap not in keep:
                libc.prctl(PR_CAPBSET_DROP, cap, 0, 0, 0)
        libc.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
        if not root:
            os.setgroups([])
            os.setresgid(LEARNER_UID, LEARNER_UID, LEARNER_UID)
            os.setresuid(LEARNER_UID, LEARNER_UID, LEARNER_UID)
        user = "root" if root else "learner"
        os.environ.clear()
        os.environ.update(
            HOME=HOME,
            USER=user,
            LOGNAME=user,
            HOSTNAME=self.spec.name,
            PATH="/usr/local/bin:/usr/bin:/usr/sbin:/bin:/sbin",
            PYTHONPATH="/opt/rdmalab",
            PYTHONDONTWRITEBYTECODE="1",
            IPYTHONDIR=f"{HOME}/.ipython",
            LANG="C.UTF-8",
            TERM="xterm-256color",
        )
        os.chdir(HOME)

    def execute(self, message: dict[str, Any], fds: list[int]) -> None:
        """Start a command of ``rdmalab exec`` with its output on the pipes that came along."""
        pid = os.fork()
        if pid == 0:
            try:
                null = os.open("/dev/null", os.O_RDONLY)
                for target, fd in enumerate([null, *fds]):
                    os.dup2(fd, target)
                self.lower_rights("exec", root=message.get("root", False))
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

    def write_cgroup(self, file: str, data: bytes) -> None:
        """Write to a file of the ``user`` cgroup; /sys/fs/cgroup itself is hidden from the host."""
        fd = os.open(file, os.O_WRONLY, dir_fd=self.user_fd)
        try:
            os.write(fd, data)
        finally:
            os.close(fd)

    def read_cgroup(self, file: str) -> dict[str, str]:
        """A flat-keyed file of the ``user`` cgroup, such as ``memory.events``."""
        with os.fdopen(os.open(file, os.O_RDONLY, dir_fd=self.user_fd)) as lines:
            return dict(line.split() for line in lines)

    def read_oom_kills(self) -> int:
        """How often the kernel has killed a process of this host for want of memory."""
        return int(self.read_cgroup("memory.events")["oom_kill"])

    def kill_all(self, folder: str, deadline_s: float = 5.0) -> None:
        """End every process in a cgroup below ``user``, fork bombs included; bounded in time."""
        self.write_cgroup(f"{folder}/cgroup.kill", b"1")
        end = time.monotonic() + deadline_s
        while time.monotonic() < end:
            self.reap()
            if self.read_cgroup(f"{folder}/cgroup.events")["populated"] == "0":
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
        word = self.kernel_channel.recv(64).decode()
        if word == "parked":
            self.kernel_state = "parked"
            self.tell("parked")
            self.send_keys()
            return
        if word == "ready":
            self.kernel_state, self.crashes = "ready", 0
            self.tell("ready")
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
            os._exit(0)
        message = json.loads(data)
        op = message["op"]
        if op == "kernel":
            self.identity(message["here"], message["mac"])
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
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if pid == self.kernel_pid:
                self.kernel_pid = 0
                self.on_death(code)
            elif pid in self.running:
                self.tell("exit", id=self.running.pop(pid), code=code)

    def on_death(self, code: int) -> None:
        """The kernel ended by itself: say so, and have a fresh one unless it keeps dying."""
        oom = self.read_oom_kills() > self.oom_kills
        self.crashes = self.crashes + 1 if self.kernel_state != "ready" else 0
        again = self.crashes < CRASH_LOOP
        self.tell("died", code=code, oom=oom, again=again)
        self.close_channel()
        self.kill_all("kernel" if self.crashes == 0 else ".")
        if again:
            self.start_kernel()
