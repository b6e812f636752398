"""The half of rdmalab that runs on the hosts. In the guest this package is named ``rdmalab``.

``rdmalab.here`` tells a host's own name, address, device and GID. The modules ``agent``,
``hostinit``, ``hostkernel`` and ``network`` bring the hosts up; learners never need them, and
may read them. Nothing here imports the controller's half, and the standard library, pyzmq and
ipykernel are all that the machinery needs; only the teaching modules import pyverbs.
"""

from __future__ import annotations

import ipaddress
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["HERE_FILE", "Here", "gid_row", "here", "netdev_of"]

HERE_FILE = os.environ.get("RDMALAB_HERE", "/run/rdmalab/here.json")
SYS_INFINIBAND = Path("/sys/class/infiniband")


def gid_row(device: str, port: int, gid: str) -> int | None:
    """The row of a port's GID table that holds ``gid`` (RoCE v2) at this moment, or None.

    Rows move when addresses come and go, and row 0 is usually the link-local address, so a GID
    is looked up by its value each time. Source: Documentation/ABI/stable/sysfs-class-infiniband.
    """
    folder = SYS_INFINIBAND / device / "ports" / str(port)
    wanted = ipaddress.IPv6Address(gid).packed.hex(":", 2)
    for row in range(len(list((folder / "gids").iterdir()))):
        held = (folder / "gids" / str(row)).read_text().strip()
        if held == wanted and "v2" in (folder / "gid_attrs" / "types" / str(row)).read_text():
            return row
    return None


def netdev_of(device: str, port: int, row: int) -> str:
    """The network interface that a row of a port's GID table belongs to."""
    place = SYS_INFINIBAND / device / "ports" / str(port) / "gid_attrs" / "ndevs" / str(row)
    return place.read_text().strip()


@dataclass(frozen=True)
class Here:
    """This host's own facts.

    ``gid`` is the IPv4-mapped GID (``::ffff:10.0.0.1``). ``mtu`` is the port's active path MTU in
    bytes (``ibv_port_attr.active_mtu``).
    """

    lab: str
    name: str
    ip: str
    device: str
    port: int
    gid: str
    mtu: int
    peers: dict[str, str]  # name -> IPv4 address, this host included

    @property
    def gid_index(self) -> int:
        """The row of the GID table that holds ``gid`` now. ``LookupError`` if none does."""
        row = gid_row(self.device, self.port, self.gid)
        if row is None:
            raise LookupError(
                f"{self.device} has no GID {self.gid} now: has eth0 lost its address {self.ip}?"
                f" ip addr add {self.ip}/24 dev eth0 brings it back."
            )
        return row


class NotYet:
    """``here`` for modules that are imported before this is a host: it looks when it is used."""

    def __getattr__(self, name: str) -> Any:
        return getattr(read_here(), name)


def read_here() -> Here:
    """This host's facts, from the file that its init has written."""
    with open(HERE_FILE, encoding="utf-8") as file:
        return Here(**json.load(file))


def __getattr__(name: str) -> Any:
    """``rdmalab.here`` is read when asked for, so that it is right after a restored start too."""
    if name != "here":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return read_here() if Path(HERE_FILE).exists() else NotYet()
