"""Process 1 of the guest: builds the hosts, waits to be thawed, serves the lab's controller.

Life of a guest::

    boot -> hosts built, kernels parked -> (snapshot) -> thaw: time, seed, identity, keys -> ready

Before ``ready`` it talks JSON lines over a virtio-serial port whose other end is a socket in the
lab's 0700 folder. From then on it serves one ROUTER socket with CurveZMQ; its public key, which
a client must know in order to speak at all, goes out over that port and nowhere else.
"""

from __future__ import annotations

import base64
import ctypes
import fcntl
import importlib
import json
import os
import select
import signal
import socket
import struct
import subprocess
import sys
import time
import traceback
from pathlib import Path
from typing import Any, NoReturn

from . import network, processors
from .hostlink import (
    CHANNELS,
    CONTROL_PORT,
    DESK_PORT,
    GUEST_ADDRESS,
    HostFailed,
    HostLink,
    fresh_keys,
    listen,
    say,
)
from .network import HostSpec

__all__ = ["Agent", "main"]

PORT_NAME = "org.rdmalab.boot"
MODULES = ("virtio_net", "veth", "bridge", "ib_uverbs", "rdma_rxe", "rdma_ucm")
RNDADDENTROPY, RNDRESEEDCRNG = 0x40085203, 0x5207
BOOT_DEADLINE_S = 480.0  # longer than any controller waits
TELL_MS = 5000
READY_S = 30
PARK_S = 240  # for one host's kernel to be parked, once the nursery is ready
PARKED_DEADLINE_S = 120.0  # a guest that nobody thaws in this time powers itself off


def power_off(why: str) -> NoReturn:
    """End the guest; QEMU ends with it."""
    say(f"power off: {why}")
    os.sync()
    ctypes.CDLL(None).reboot(0x4321FEDC)
    os._exit(1)


def set_up_guest() -> None:
    """The file systems that init left out."""
    from .container import mount, stay_in_memory

    for source, target, kind, data in (
        ("tmpfs", "/run", "tmpfs", "mode=755,size=16m"),
        ("tmpfs", "/tmp", "tmpfs", "mode=1777,size=64m"),
        ("devpts", "/dev/pts", "devpts", "ptmxmode=0666"),
    ):
        os.makedirs(target, exist_ok=True)
        mount(source, target, kind, 0, data)
    for folder in ("/run/netns", "/home/learner"):
        os.makedirs(folder, exist_ok=True)
    Path("/proc/sys/kernel/dmesg_restrict").write_text("0")
    stay_in_memory()


def connect_guest() -> None:
    """Load what the hosts need and give the guest its link to QEMU's user network."""
    network.run(["modprobe", "-a", *MODULES])
    nic = next(p.name for p in Path("/sys/class/net").iterdir() if p.name != "lo")
    lines = ["link set lo up", f"addr add {GUEST_ADDRESS}/24 dev {nic}", f"link set {nic} up"]
    network.run(["ip", "-batch", "-"], lines)


def open_port() -> Any:
    """The virtio-serial port to the controller, found by name."""
    for entry in Path("/sys/class/virtio-ports").iterdir():
        if (entry / "name").read_text().strip() == PORT_NAME:
            return os.open(f"/dev/{entry.name}", os.O_RDWR)
    power_off(f"no virtio port named {PORT_NAME}")


def reseed(seed: bytes) -> None:
    """Credit fresh randomness to the kernel and make its generator use it at once."""
    with open("/dev/random", "wb") as device:
        fcntl.ioctl(device, RNDADDENTROPY, struct.pack("ii", 8 * len(seed), len(seed)) + seed)
        fcntl.ioctl(device, RNDRESEEDCRNG)


class Agent:
    """Process 1 once the guest is set up. ``boot`` builds the hosts, ``serve`` never returns."""

    def __init__(self, plan: dict[str, Any]) -> None:
        self.specs = [HostSpec(**facts) for facts in plan["hosts"]]
        self.desk_spec = HostSpec(**plan["desk"]) if "desk" in plan else None
        self.hosts: dict[str, HostLink] = {}
        self.desk: HostLink | None = None
        self.doors: dict[str, tuple[bytes, bytes]] = {}  # whose: public and secret key

    def boot(self, nursery_sock: socket.socket) -> None:
        """Network, devices, hosts; returns when every kernel is parked."""
        connect_guest()
        for command, lines, netns in network.commands(self.specs):
            network.run(command, lines, netns)
        say("network and rxe devices are up")
        importlib.import_module(f"{__package__}.control")  # now, and not at each restored start
        if nursery_sock.recv(64) != b"ready":
            power_off("the nursery died")
        say("nursery is ready")
        peers = {spec.name: spec.ip for spec in self.specs}
        hosts_file = "".join(f"{ip}\t{name}\n" for name, ip in peers.items())
        Path("/etc/hosts").write_text(f"127.0.0.1\tlocalhost\n{hosts_file}")
        for index, spec in enumerate(self.specs):
            self.hosts[spec.name] = self.order_host(nursery_sock, index, spec)
        if self.desk_spec:
            self.desk = self.order_host(nursery_sock, len(self.specs), self.desk_spec)
        for link in self.hosts.values():
            link.mtu = network.active_mtu(link.spec.device)
        for link in self.links().values():
            link.wait("parked", PARK_S)
        nursery_sock.close()
        say("kernels are parked")

    def order_host(self, nursery_sock: socket.socket, index: int, spec: HostSpec) -> HostLink:
        """Have the nursery fork one host."""
        base = CONTROL_PORT + 100 + 10 * index
        listeners = {name: listen(base + i) for i, name in enumerate(CHANNELS)}
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        order = json.dumps({"spec": spec.__dict__}).encode()
        fds = [theirs.fileno(), *(sock.fileno() for sock in listeners.values())]
        socket.send_fds(nursery_sock, [order], fds)
        theirs.close()
        return HostLink(spec, index, ours, listeners)

    def thaw(self, order: dict[str, Any]) -> dict[str, Any]:
        """Take the lab's identity, time and randomness; open the kernels with fresh keys.

        Returns what the controller must know to speak with them.
        """
        import zmq

        processors.use(order["cpus"])
        time.clock_settime(time.CLOCK_REALTIME, order["time"])
        reseed(base64.b64decode(order["seed"]))
        self.doors["owner"] = zmq.curve_keypair()
        reply: dict[str, Any] = {"event": "ready", "port": CONTROL_PORT}
        reply["curve"] = self.doors["owner"][0].decode()
        peers = {spec.name: spec.ip for spec in self.specs}
        for link in self.hosts.values():
            link.introduce(order["lab"], peers, order["macs"][link.spec.name])
        reply["hosts"] = [self.facts(link, order) for link in self.hosts.values()]
        if self.desk:
            self.doors["desk"] = zmq.curve_keypair()
            self.introduce_desk(self.desk, reply["hosts"], order)
            reply["desk"] = {"name": self.desk.spec.name, "kernel": self.kernel(self.desk)}
        for link in self.links().values():
            link.wait("ready", READY_S)
        return reply

    def links(self) -> dict[str, HostLink]:
        """All containers by name: the hosts and, if there is one, the desk."""
        return {**self.hosts, **({self.desk.spec.name: self.desk} if self.desk else {})}

    def introduce_desk(
        self, link: HostLink, hosts: list[dict[str, Any]], order: dict[str, Any]
    ) -> None:
        """Give the desk's kernel its keys, and what it must know to speak with the hosts."""
        curve = self.doors["desk"][0].decode()
        control = {"ip": GUEST_ADDRESS, "port": DESK_PORT, "curve": curve}
        facts = {"hosts": hosts, "control": control, **order["machine"]}
        link.keys = fresh_keys()
        link.sock.send(json.dumps({"op": "kernel", "keys": {**link.keys, "lab": facts}}).encode())

    def facts(self, link: HostLink, order: dict[str, Any]) -> dict[str, Any]:
        """What a controller must know of one host."""
        row = network.find_gid(link.spec.device, link.spec.ip)
        mac = order["macs"][link.spec.name]
        return {**link.facts(), "gid_index": row, "mac": mac, "kernel": self.kernel(link)}

    def kernel(self, link: HostLink) -> dict[str, Any]:
        """How to reach a kernel and how to speak with it."""
        ports = {name: sock.getsockname()[1] for name, sock in link.listeners.items()}
        return {**link.secrets(), "ip": GUEST_ADDRESS, "ports": ports}


def converse(agent: Agent) -> None:
    """The conversation over the boot port: parked, thaw, ready, commit.

    The guest powers itself off when the controller goes away in the middle of it, so that an
    ``rdmalab up`` that is killed leaves no guest behind.
    """
    signal.alarm(int(PARKED_DEADLINE_S))
    port = open_port()
    tell(port, {"event": "parked"})
    with os.fdopen(port, "rb", buffering=0) as lines:
        reader = iter(lambda: lines.readline(), b"")
        order = json.loads(next(reader, b"{}"))
        if order.get("op") != "thaw":
            power_off("the controller went away before the thaw")
        reply = agent.thaw(order)
        tell(port, reply)
        if json.loads(next(reader, b"{}")).get("op") != "commit":
            power_off("the controller went away before the start was complete")
    signal.alarm(0)


def tell(port: int, message: dict[str, Any]) -> None:
    """One message to the controller, if it is still there: a write to nobody waits for ever."""
    ready = select.poll()
    ready.register(port, select.POLLOUT)
    events = ready.poll(TELL_MS)
    if not events or events[0][1] & (select.POLLHUP | select.POLLERR):
        power_off("the controller went away")
    os.write(port, json.dumps(message).encode() + b"\n")


def main(nursery_sock: socket.socket) -> NoReturn:
    """Entry point of the guest's process 1; ``nursery_sock`` leads to the nursery (``boot``)."""
    try:
        signal.signal(signal.SIGALRM, lambda *_: power_off("nobody thawed this guest"))
        signal.alarm(int(BOOT_DEADLINE_S))
        say("agent starts")
        set_up_guest()
        agent = Agent(json.loads(network.PLAN_FILE.read_text()))
        agent.boot(nursery_sock)
        converse(agent)
        from .control import ControlServer, Door

        doors = [Door(keys, is_desks=whose == "desk") for whose, keys in agent.doors.items()]
        ControlServer(agent.links(), doors).serve()
    except HostFailed as failed:
        power_off(str(failed))
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    subprocess.run(["dmesg"], check=False, timeout=10)
    power_off("the agent failed")
