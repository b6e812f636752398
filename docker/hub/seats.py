"""A learner's seat: a container without rights, on a network that only it and the hub are on.

::

    learner's browser ── proxy, hub ──┬── network CLASS-ada ── container CLASS-ada
                                      └── network CLASS-bob ── container CLASS-bob

No way leads from one learner's container to another's, to the machine or outside: the networks are
internal, the machine has no address on them, and the hub forwards nothing. When a server ends, its
container and network are removed; what remains is the volume with the learner's work.
"""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from docker import APIClient
from docker.errors import APIError
from dockerspawner import DockerSpawner
from traitlets import Unicode

__all__ = ["LABEL", "Seat", "free_subnets", "rejoin"]

LABEL = "rdmalab.class"
HUB = "hub"  # the hub's name on each of the networks
PREFIX_LENGTH = 29  # six addresses: Docker's own, the hub's, the learner's
END_S = 20.0  # until Docker has taken an ended container off its network
# No address for the machine itself on it: what listens on all of its addresses would be reached.
NO_HOST = {"com.docker.network.bridge.inhibit_ipv4": "true"}
HTTP_NOT_FOUND, HTTP_FORBIDDEN = 404, 403


class Seat(DockerSpawner):
    """A learner's container, and its network."""

    class_id = Unicode(help="The class: a label, and the begin of names.").tag(config=True)
    subnets = Unicode(help="Where networks are taken from, as 172.30.0.0/16.").tag(config=True)
    _executor = ThreadPoolExecutor(8)  # requests to Docker: a class comes, and goes, at once
    _making = asyncio.Lock()  # one network at a time, or two get the same addresses

    async def start(self) -> tuple[str, int]:
        """Make the network, join it, start the container on it; its address and port."""
        self.network_name = self.object_name
        await self.clear()
        async with self._making:
            await self.make_network()
        try:
            await self.docker(
                "connect_container_to_network",
                socket.gethostname(),
                self.network_name,
                aliases=[HUB],
            )
            address: tuple[str, int] = await super().start()
            return address
        except BaseException:
            await self.clear()
            raise

    async def make_network(self) -> None:
        """A network of a few addresses that are used nowhere else on this machine."""
        used = subnets_of(await self.docker("networks"))
        for subnet in free_subnets(self.subnets, used):
            try:
                await self.docker(
                    "create_network",
                    self.network_name,
                    driver="bridge",
                    internal=True,
                    options=NO_HOST,
                    check_duplicate=True,
                    labels={LABEL: self.class_id},
                    ipam={"Driver": "default", "Config": [{"Subnet": subnet}]},
                )
                return
            except APIError as error:
                # Routes of this machine that Docker knows nothing of.
                if error.status_code != HTTP_FORBIDDEN or "overlap" not in str(error).lower():
                    raise
        raise RuntimeError(f"All networks in {self.subnets} are taken; RDMALAB_SUBNETS names more.")

    async def clear(self) -> None:
        """Take the network away, and the container if it is still there; both may be gone."""
        end = asyncio.get_running_loop().time() + END_S
        while True:
            try:
                found = await self.docker("inspect_network", self.object_name)
                for there in found["Containers"]:
                    if there.startswith(socket.gethostname()):
                        await self.docker(
                            "disconnect_container_from_network", there, self.object_name
                        )
                    else:
                        await self.docker("remove_container", there, force=True, v=True)
                await self.docker("remove_network", self.object_name)
                return
            except APIError as error:
                if error.status_code == HTTP_NOT_FOUND and "network" in str(error).lower():
                    return
                if asyncio.get_running_loop().time() > end:
                    self.log.error("%s is left behind: %s", self.object_name, error)
                    return
            await asyncio.sleep(0.5)


async def leave(seat: Seat) -> None:
    """What JupyterHub calls when a server has ended, by whatever cause."""
    await seat.clear()


def subnets_of(networks: list[dict[str, Any]]) -> list[ipaddress.IPv4Network]:
    """The IPv4 subnets of networks as Docker describes them."""
    texts = [part["Subnet"] for one in networks for part in (one["IPAM"]["Config"] or [])]
    return [ipaddress.IPv4Network(text) for text in texts if ":" not in text]


def free_subnets(of: str, used: list[ipaddress.IPv4Network]) -> Iterator[str]:
    """The small subnets of a large one that overlap with none in use."""
    for subnet in ipaddress.IPv4Network(of).subnets(new_prefix=PREFIX_LENGTH):
        if not any(subnet.overlaps(other) for other in used):
            yield str(subnet)


def rejoin(client: APIClient, class_id: str) -> None:
    """Put this hub on the networks of servers that an earlier hub has left running.

    A network without a container is what a server left that ended meanwhile: it is removed.
    """
    for network in client.networks(filters={"label": f"{LABEL}={class_id}"}):
        there = client.inspect_network(network["Id"])["Containers"]
        if any(one.startswith(socket.gethostname()) for one in there):
            continue
        if there:
            client.connect_container_to_network(socket.gethostname(), network["Id"], aliases=[HUB])
        else:
            client.remove_network(network["Id"])
