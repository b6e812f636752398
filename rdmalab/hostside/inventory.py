"""What a host's RDMA device is and which GIDs it has, as plain data: for the notebook's tables.

>>> from rdmalab import inventory       # on a host
>>> inventory.gids()                    # doctest: +SKIP
[{'index': 1, 'gid': '::ffff:10.0.0.1', 'type': 'RoCE v2', ...}, ...]
"""

from __future__ import annotations

import ipaddress
from typing import Any

import pyverbs.enums as e
from pyverbs.device import Context

from . import Here, netdev_of

__all__ = ["device", "gid_words", "gids"]

GID_TYPES = {
    e.IBV_GID_TYPE_IB: "InfiniBand",
    e.IBV_GID_TYPE_ROCE_V1: "RoCE v1",
    e.IBV_GID_TYPE_ROCE_V2: "RoCE v2",
}
LINK_LAYERS = {e.IBV_LINK_LAYER_INFINIBAND: "InfiniBand", e.IBV_LINK_LAYER_ETHERNET: "Ethernet"}


def this_host() -> Here:
    """The host's own facts (``rdmalab.here`` is read anew each time)."""
    import rdmalab

    here: Here = rdmalab.here
    return here


def device() -> dict[str, Any]:
    """The device of this host, its port and its limits. Opens the device, and closes it."""
    here = this_host()
    with Context(name=here.device) as context:
        limits, port = context.query_device(), context.query_port(here.port)
    return {
        "device": here.device,
        "port": here.port,
        "state": e.ibv_port_state(port.state).name.removeprefix("IBV_PORT_").lower(),
        "link_layer": LINK_LAYERS.get(port.link_layer, "unknown"),
        "mtu": f"{128 << port.active_mtu} bytes",
        "netdev": netdev_of(here.device, here.port, here.gid_index),
        "ip": here.ip,
        "gid": here.gid,
        "max_qp": f"{limits.max_qp:,}",
        "max_mr": f"{limits.max_mr:,}",
        "max_rd_atomic": f"{limits.max_qp_rd_atom:,}",
    }


def gids() -> list[dict[str, Any]]:
    """The GID table of this host's port: its index, value, type, origin and use."""
    here = this_host()
    with Context(name=here.device) as context:
        room = context.query_port(here.port).gid_tbl_len
        entries = context.query_gid_table(room)
        return [
            {
                "index": entry.gid_index,
                "type": GID_TYPES.get(entry.gid_type, str(entry.gid_type)),
                **gid_words(entry.gid_str(), here.ip),
            }
            for entry in entries
        ]


def gid_words(gid: str, own_ip: str) -> dict[str, str]:
    """A GID in its short form, what it is made from, and what it is good for."""
    address = ipaddress.IPv6Address(gid)
    mapped = address.ipv4_mapped
    if mapped is not None:
        own = str(mapped) == own_ip
        use = "IPv4: choose this one" if own else "IPv4"
        return {"gid": f"::ffff:{mapped}", "origin": f"IPv4 address {mapped}", "use": use}
    if address.is_link_local:
        origin = "link-local IPv6, from a MAC address"
        return {"gid": str(address), "origin": origin, "use": "IPv6 on the same link"}
    return {"gid": str(address), "origin": "IPv6 address", "use": "IPv6"}
