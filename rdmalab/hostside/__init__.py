"""The half of rdmalab that runs on the hosts. In the guest this package is named ``rdmalab``.

``rdmalab.here`` tells a host's own name, address, device and GID. The modules ``agent``,
``hostinit``, ``hostkernel`` and ``network`` bring the hosts up; learners never need them, and
may read them. Nothing here imports the controller's half, and the standard library, pyzmq and
ipykernel are all that the machinery needs; only the teaching modules import pyverbs.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

__all__ = ["HERE_FILE", "Here", "here"]

HERE_FILE = "/run/rdmalab/here.json"


@dataclass(frozen=True)
class Here:
    """This host's own facts.

    ``gid`` is the IPv4-mapped GID (``::ffff:10.0.0.1``) and ``gid_index`` the row of the GID
    table that holds it: look a GID up by value, the row can move. ``mtu`` is the port's active
    path MTU in bytes (``ibv_port_attr.active_mtu``).
    """

    lab: str
    name: str
    ip: str
    device: str
    port: int
    gid: str
    gid_index: int
    mtu: int
    peers: dict[str, str]  # name -> IPv4 address, this host included


def __getattr__(name: str) -> Any:
    """``rdmalab.here`` is read when asked for, so that it is right after a restored start too."""
    if name != "here":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with open(HERE_FILE, encoding="utf-8") as file:
        return Here(**json.load(file))
