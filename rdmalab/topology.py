"""Which hosts a lab has: names, addresses, devices. Pure data, no process is started here.

>>> [host.ip for host in plan(["alice", "bob"])]
['10.0.0.1', '10.0.0.2']
>>> plan(["alice"])[0].device
'rxe_alice'
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from .errors import UsageError

__all__ = [
    "DEFAULT_HOSTS",
    "DEFAULT_LAB",
    "DESK",
    "LAB_ID",
    "MAX_HOSTS",
    "HostPlan",
    "check_lab_id",
    "mac_addresses",
    "plan",
]

DEFAULT_HOSTS = ("alice", "bob")
DEFAULT_LAB = "default"
MAX_HOSTS = 8
NAME = re.compile(r"[a-z][a-z0-9]{0,11}\Z")  # with its "v-" an interface name of at most 15
LAB_ID = re.compile(r"[a-z0-9][a-z0-9_-]{0,30}\Z")
ETHERNET_MTU = 4200  # bytes; 4096 of payload and the RoCEv2 headers fit, as they do in 1024
HOST_MEMORY_MIB = 160  # for a host's processes; measured: an idle kernel takes about 25
HOST_PIDS = 256
DESK_MEMORY_MIB = 256  # a notebook's kernel with matplotlib and scapy, which it shares, takes 60


@dataclass(frozen=True)
class HostPlan:
    """One host of a lab. ``mtu`` in bytes on the wire, ``memory_mib`` for its processes."""

    name: str
    ip: str
    device: str
    mtu: int = ETHERNET_MTU
    memory_mib: int = HOST_MEMORY_MIB
    pids: int = HOST_PIDS

    def for_guest(self, mac: str) -> dict[str, Any]:
        """The facts as the guest's ``HostSpec`` takes them."""
        return {**self.__dict__, "mac": mac}


def plan(names: Sequence[str]) -> list[HostPlan]:
    """The hosts of a lab, numbered from 10.0.0.1 in the order of their names.

    Raises :class:`UsageError` for a name that cannot be a hostname here, for one given twice,
    and for more than :data:`MAX_HOSTS`.
    """
    if not 1 <= len(names) <= MAX_HOSTS:
        raise UsageError(f"A lab has 1 to {MAX_HOSTS} hosts, not {len(names)}.")
    for name in names:
        if not NAME.match(name):
            raise UsageError(
                f"{name!r} cannot be a host's name.",
                next_step="Use up to 12 small letters and digits that begin with a letter.",
            )
        if name == DESK.name:
            raise UsageError(f"{name!r} is no host's name: lab.desk is something else.")
        if list(names).count(name) > 1:
            raise UsageError(f"The host name {name!r} is given twice.")
    return [
        HostPlan(name, f"10.0.0.{index}", f"rxe_{name}")
        for index, name in enumerate(names, start=1)
    ]


# Where a notebook's own kernel runs when it is graded: no address and no device of its own.
DESK = HostPlan("desk", "", "", mtu=0, memory_mib=DESK_MEMORY_MIB)


def check_lab_id(lab: str) -> str:
    """The lab's id if it can be one (it becomes a folder's name); else :class:`UsageError`."""
    if not LAB_ID.match(lab):
        raise UsageError(
            f"{lab!r} cannot be a lab's id.",
            next_step="Use up to 31 small letters, digits, '-' and '_'.",
        )
    return lab


def mac_addresses(owner: str, lab: str, names: Sequence[str]) -> dict[str, str]:
    """A MAC address per host: locally administered, different for each owner, lab and host.

    Two labs never share a wire, but a capture of each should still tell their hosts apart.
    """
    digest = hashlib.sha256(f"{owner}/{lab}".encode()).hexdigest()
    stem = ":".join(digest[i : i + 2] for i in range(0, 8, 2))
    return {name: f"02:{stem}:{index:02x}" for index, name in enumerate(names, start=1)}
