"""The wire between the hosts: a bridge, a veth pair and an rxe device per host.

Plans are lists of command lines built by pure functions; :func:`run` is the one place that
runs them. ``python -m rdmalab.network`` on a guest prints the plan of its lab, so that a reader
sees the raw ``ip`` and ``rdma`` lines that a host stands for.

The RDMA subsystem stays in its default network-namespace mode, *shared*: rdma_cm works in it,
and what a host may open is decided by the device nodes in its own /dev and by its rdma cgroup
(see ``hostinit``). In *exclusive* mode rdma_cm cannot make its QP1 on this kernel.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from . import gid_row

__all__ = [
    "BRIDGE",
    "PLAN_FILE",
    "HostSpec",
    "active_mtu",
    "commands",
    "enter_network",
    "find_gid",
    "run",
    "uverbs_node",
]

BRIDGE = "br0"
SYS_VERBS = Path("/sys/class/infiniband_verbs")
PLAN_FILE = Path("/opt/rdmalab/lab.json")  # which hosts there are, and whether there is a desk
IPV6_ADDRESSES = Path("/proc/net/if_inet6")
"""Not there where the kernel was booted with ``ipv6.disable=1``."""


@dataclass(frozen=True)
class HostSpec:
    """One host as the lab's plan states it; ``mtu`` is the Ethernet MTU in bytes.

    The desk is one without a device, in the guest's own network namespace.
    """

    name: str
    ip: str
    mac: str
    device: str
    mtu: int
    memory_mib: int
    pids: int

    @property
    def is_desk(self) -> bool:
        """Whether this is the desk."""
        return not self.device

    @property
    def switch_port(self) -> str:
        """The bridge's end of the host's cable."""
        return f"v-{self.name}"


def no_address(link: str, ipv6: bool) -> list[str]:
    """The line that keeps the kernel from giving ``link`` a link-local address of its own.

    None where the kernel has no IPv6: ``ip`` would fail there with "Operation not supported".
    """
    return [f"link set {link} addrgenmode none"] if ipv6 else []


def bridge_plan(mtu: int, ipv6: bool) -> list[str]:
    """Lines for ``ip -batch``: a bridge that the guest itself has no address on."""
    return [
        f"link add {BRIDGE} mtu {mtu} type bridge",
        *no_address(BRIDGE, ipv6),
        f"link set {BRIDGE} up",
    ]


def cable_plan(host: HostSpec, ipv6: bool, space: str | None = None) -> list[str]:
    """Lines for ``ip -batch`` in the guest's own namespace: the host's namespace and cable.

    ``space``: the pid of a process in the host's namespace, where there is one already.
    """
    return [
        *([] if space else [f"netns add {host.name}"]),
        f"link add {host.switch_port} mtu {host.mtu} type veth"
        f" peer name eth0 mtu {host.mtu} address {host.mac} netns {space or host.name}",
        *no_address(host.switch_port, ipv6),
        f"link set {host.switch_port} master {BRIDGE} up",
    ]


def address_plan(host: HostSpec) -> list[str]:
    """Lines for ``ip -netns NAME -batch``: loopback, address, link up."""
    return ["link set lo up", f"addr add {host.ip}/24 dev eth0", "link set eth0 up"]


def device_plan(host: HostSpec) -> list[str]:
    """Lines for ``rdma -b`` run inside the host's namespace: its Soft-RoCE device."""
    return [f"link add {host.device} type rxe netdev eth0"]


def commands(
    hosts: list[HostSpec], spaces: Mapping[str, str] = MappingProxyType({})
) -> list[tuple[list[str], list[str], str | None]]:
    """The whole plan: (command line, batch lines for its standard input, namespace or None).

    ``spaces``: namespaces that are there already, see :func:`cable_plan`.
    """
    mtu = max(host.mtu for host in hosts)
    ipv6 = IPV6_ADDRESSES.exists()
    root = bridge_plan(mtu, ipv6)
    root += [line for host in hosts for line in cable_plan(host, ipv6, spaces.get(host.name))]
    plan: list[tuple[list[str], list[str], str | None]] = [(["ip", "-batch", "-"], root, None)]
    for host in hosts:
        plan.append((["ip", "-batch", "-"], address_plan(host), host.name))
        plan.append((["rdma", "-b", "-"], device_plan(host), host.name))
    return plan


def run(
    command: list[str],
    lines: list[str] | None = None,
    netns: str | None = None,
    timeout_s: float = 60,
) -> str:
    """Run one command of a plan, in a named network namespace if one is given.

    Returns its standard output. Raises ``RuntimeError`` with the command, its exit code and its
    error text.
    """
    enter = None
    if netns is not None:
        fd = os.open(f"/run/netns/{netns}", os.O_RDONLY | os.O_CLOEXEC)

        def enter() -> None:
            os.setns(fd, os.CLONE_NEWNET)

    try:
        done = subprocess.run(
            command,
            input="\n".join([*(lines or []), ""]),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            preexec_fn=enter,
            check=False,
        )
    finally:
        if netns is not None:
            os.close(fd)
    if done.returncode:
        shown = " ".join(command) + (f" <<< {lines}" if lines else "")
        raise RuntimeError(f"{shown}: exit {done.returncode}: {done.stderr.strip()}")
    return done.stdout


def enter_network(spec: HostSpec) -> None:
    """Put the calling process into the host's network namespace; the desk stays where it is."""
    if not spec.is_desk:
        fd = os.open(f"/run/netns/{spec.name}", os.O_RDONLY)
        os.setns(fd, os.CLONE_NEWNET)
        os.close(fd)


def uverbs_node(device: str) -> tuple[str, int, int]:
    """The device node of an RDMA device: (``uverbsN``, major, minor).

    Numbers are reused by the kernel, so it is looked up each time.
    """
    for entry in SYS_VERBS.iterdir():
        ibdev = entry / "ibdev"
        if ibdev.exists() and ibdev.read_text().strip() == device:
            major, minor = (entry / "dev").read_text().strip().split(":")
            return entry.name, int(major), int(minor)
    raise RuntimeError(f"{device} has no uverbs node in {SYS_VERBS}")


def find_gid(device: str, ip: str, timeout_s: float = 5.0, port: int = 1) -> int:
    """The index of the GID ``::ffff:IP`` in a port's table, found by value.

    The kernel fills the table after the address has been set, so this waits until the entry is
    there. Raises ``RuntimeError`` after ``timeout_s``.
    """
    deadline = time.monotonic() + timeout_s
    while (row := gid_row(device, port, f"::ffff:{ip}")) is None:
        if time.monotonic() > deadline:
            raise RuntimeError(f"{device} shows no GID ::ffff:{ip} after {timeout_s} s")
        time.sleep(0.02)
    return row


def active_mtu(device: str) -> int:
    """The port's active path MTU in bytes, as the device itself answers (``ibv_query_port``)."""
    shown = run(["ibv_devinfo", "-d", device, "-i", "1"])
    line = next(line for line in shown.splitlines() if "active_mtu:" in line)
    return int(line.split(":")[1].split()[0])
