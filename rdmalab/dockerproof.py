"""Can containers of this machine have Soft-RoCE devices of their own? Tried, in one container.

It gets what the keeper of a host's network gets, makes a device on a cable that leads nowhere, and
takes both away. The doctor asks this; a start needs no proof, it is one.
"""

from __future__ import annotations

import os
import secrets
from typing import Any

__all__ = ["prove", "reason"]

SCRIPT = """
rdma system show || exit 1
ip link add proof0 type veth peer name proof1 &&
ip addr add 10.0.0.1/24 dev proof0 && ip link set proof0 up && ip link set proof1 up || exit 2
rdma link add $0 type rxe netdev proof0 || exit 3
rdma link show $0/1 || exit 4
rdma link delete $0
"""
EXCLUSIVE = "`sudo rdma system set netns shared`, before there is any other network namespace."
KERNEL = (
    "Boot Linux 7.1 or newer (Debian: linux-image-amd64 from backports), or use the vm backend."
)


def prove(client: Any, image: str) -> tuple[str, str]:
    """What failed, and the next step; two empty strings if all is well. ``image``: the hosts'."""
    import docker.errors

    name = f"rxe_proof_{secrets.token_hex(3)}"
    try:
        client.containers.run(
            image,
            ["sh", "-c", SCRIPT, name],
            user="0:0",
            cap_drop=["ALL"],
            cap_add=["NET_ADMIN"],
            security_opt=["no-new-privileges"],
            network_mode="none",
            read_only=True,
            remove=True,
            stderr=True,
        )
    except docker.errors.ContainerError as error:
        said = (error.stderr or b"").decode(errors="replace").strip()
        return reason(error.exit_status, said)
    except docker.errors.APIError as error:
        return (
            f"the engine refuses a container: {error.explanation}",
            "Is it rootless? Use another.",
        )
    return "", ""


def reason(code: int, said: str) -> tuple[str, str]:
    """The likely cause of a step's failure, and the next step. ``code``: which of the script's.

    >>> reason(1, "Failed to open NETLINK_RDMA socket")[0]
    'this kernel has no RDMA subsystem loaded (Failed to open NETLINK_RDMA socket)'
    """
    last = said.splitlines()[-1] if said else f"exit code {code}"
    if code == 1:
        return f"this kernel has no RDMA subsystem loaded ({last})", "`sudo modprobe rdma_rxe`"
    if "not permitted" in said:
        cause = "the engine's root has no rights on this kernel: it is rootless, or remaps users"
        return f"{cause} ({last})", "Use an engine that runs as this machine's root."
    if code == 4:
        return "RDMA devices do not stay where they are made (netns mode is exclusive)", EXCLUSIVE
    if code == 3:
        release = os.uname().release
        return f"kernel {release} makes no rxe device in a container ({last})", KERNEL
    return f"a container cannot have a network of its own ({last})", "`sudo modprobe veth`"
