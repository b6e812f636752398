"""The address card: all that one endpoint must know of another before its first packet.

RDMA peers meet by other means first. Here the card is plain data; as JSON it crosses a TCP socket
(:class:`Meeting`), or whatever else you have. On the socket each message is its length, four
bytes, most significant first, and then that many bytes of JSON. A peer is not trusted: nothing is
read past ``LARGEST`` bytes or past the deadline, and every number is checked against its field.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import json
import socket
import struct
import time
from dataclasses import dataclass
from typing import Any
from zlib import crc32

from .mishaps import CardError

__all__ = ["LARGEST", "PORT", "VERSION", "Card", "Fit", "Meeting", "fit", "kind_of"]

VERSION = 1
LARGEST = 4096  # bytes of one message
PORT = 18_600  # TCP; any free port would do
PORTS = 1000  # above it, for hosts that share an address
NAME_LENGTH = 64
PATH_MTUS = (256, 512, 1024, 2048, 4096)

# The largest value of each field, as wide as the verbs and the packets have it.
LIMITS = {
    "qpn": 2**24 - 1,
    "psn": 2**24 - 1,
    "path_mtu": 4096,
    "reads_out": 255,
    "reads_in": 255,
    "address": 2**64 - 1,
    "length": 2**64 - 1,
    "rkey": 2**32 - 1,
    "version": 2**32 - 1,
}


def kind_of(gid: str) -> str:
    """What a GID is made of: ``IPv4-mapped``, ``link-local`` or ``IPv6``."""
    address = ipaddress.IPv6Address(gid)
    if address.ipv4_mapped:
        return "IPv4-mapped"
    return "link-local" if address.is_link_local else "IPv6"


@dataclass(frozen=True)
class Card:
    """One endpoint's address card.

    ``gid``: which host, as ``::ffff:10.0.0.1``; ``qpn``: which queue pair on it; ``psn``: the
    number of the first packet that it will send; ``path_mtu``: bytes of data in a packet at most;
    ``reads_out``: READs and atomics that it will have under way, ``reads_in``: that it will answer
    at a time; ``address``, ``length``, ``rkey``: its memory, and the key to it.
    """

    name: str
    gid: str
    qpn: int
    psn: int
    path_mtu: int
    reads_out: int
    reads_in: int
    address: int
    length: int
    rkey: int
    version: int = VERSION

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or len(self.name) > NAME_LENGTH:
            raise CardError(f"no card: name must be a short text, not {self.name!r:.60}")
        for field, largest in LIMITS.items():
            value = getattr(self, field)
            if type(value) is not int or not 0 <= value <= largest:
                raise CardError(f"no card: {field} must be 0 to {largest:#x}, not {value!r:.60}")
        if self.version != VERSION:
            raise CardError(
                f"this card is of version {self.version}, and only {VERSION} is known here:"
                " both hosts must run the same rdmalab"
            )
        if self.path_mtu not in PATH_MTUS:
            raise CardError(f"no card: path_mtu must be one of {PATH_MTUS}, not {self.path_mtu}")
        try:
            ipaddress.IPv6Address(str(self.gid))
        except ValueError:
            raise CardError(f"no card: {self.gid!r:.60} is no GID") from None

    @property
    def ip(self) -> str:
        """The address that the GID holds: IPv4 if it is IPv4-mapped, else IPv6."""
        gid = ipaddress.IPv6Address(self.gid)
        return str(gid.ipv4_mapped or gid)

    @property
    def gid_in_full(self) -> str:
        """The GID as eight groups of four digits, which is the only form that pyverbs takes."""
        return ipaddress.IPv6Address(self.gid).packed.hex(":", 2)

    def as_dict(self) -> dict[str, Any]:
        """The card as plain data, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, data: Any) -> Card:
        """The card that the data describe. :class:`CardError` says what is wrong with them."""
        if isinstance(data, Card):
            return data
        if not isinstance(data, dict):
            raise CardError(f"a card is a dict with named fields, not {type(data).__name__}")
        fields = {field.name for field in dataclasses.fields(cls)}
        missing = sorted(fields - {"version"} - set(data))
        extra = sorted(str(key)[:30] for key in set(data) - fields)
        if missing or extra:
            words = [f"{', '.join(missing)} missing"] if missing else []
            words += [f"{', '.join(extra)} unknown"] if extra else []
            raise CardError(f"no card: {'; '.join(words)}")
        return cls(**data)


@dataclass(frozen=True)
class Fit:
    """What two endpoints agree on: each takes the smaller of what both can."""

    path_mtu: int  # bytes
    max_rd_atomic: int  # READs and atomics that we keep under way
    max_dest_rd_atomic: int  # that we answer at a time


def fit(mine: Card, peer: Card) -> Fit:
    """The agreement of two cards. :class:`CardError` if there can be none."""
    kinds = kind_of(mine.gid), kind_of(peer.gid)
    if kinds[0] != kinds[1]:
        raise CardError(
            f"the two GIDs are of different kinds: this endpoint has {mine.gid} ({kinds[0]}), its"
            f" peer on {peer.name} {peer.gid} ({kinds[1]}). No packet can have both as source and"
            " destination. On RoCE, use the IPv4-mapped GID on both sides: rdmalab.here.gid_index"
            " is its row in the GID table at this moment."
        )
    return Fit(
        path_mtu=min(mine.path_mtu, peer.path_mtu),
        max_rd_atomic=min(mine.reads_out, peer.reads_in),
        max_dest_rd_atomic=min(mine.reads_in, peer.reads_out),
    )


class Meeting:
    """A TCP connection between two hosts that both ask for it: the lower address listens.

    A context manager. ``deadline_s`` holds for everything from the first knock to the last
    message. ``CardError`` if the peer does not come, or is no such peer. Hosts that share a device
    have one address: there the ``names`` of this host and the peer decide, and each pair has a
    port of its own.
    """

    def __init__(
        self,
        mine: str,
        peer: str,
        *,
        names: tuple[str, str] = ("", ""),
        port: int = PORT,
        deadline_s: float = 10.0,
    ) -> None:
        self.mine, self.peer, self.port, self.deadline_s = mine, peer, port, deadline_s
        self.end = time.monotonic() + deadline_s
        if mine == peer and names[0] != names[1]:
            self.port += 1 + crc32(" ".join(sorted(names)).encode()) % PORTS
        elif mine == peer:
            raise CardError(
                f"{mine} cannot meet itself; connect two endpoints of one host with"
                " a.connect_card(b.card) and b.connect_card(a.card)"
            )
        ours, theirs = (ipaddress.ip_address(address).packed for address in (mine, peer))
        listens = (ours, names[0]) < (theirs, names[1])
        self.sock = self._accept() if listens else self._knock()

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        """End the connection."""
        self.sock.close()

    def swap(self, message: Any) -> Any:
        """Send a message and return the peer's."""
        self.send(message)
        return self.receive()

    def send(self, message: Any) -> None:
        """Send one message: anything that JSON can hold, up to ``LARGEST`` bytes."""
        body = json.dumps(message).encode()
        if len(body) > LARGEST:
            raise CardError(f"a message of {len(body)} bytes; {LARGEST} is the most")
        try:
            self.sock.settimeout(self.left())
            self.sock.sendall(struct.pack("!I", len(body)) + body)
        except TimeoutError:
            raise self.late("to take our message") from None
        except OSError as error:
            raise CardError(f"{self.peer} ended the conversation: {error.strerror}") from None

    def receive(self) -> Any:
        """The peer's next message."""
        (size,) = struct.unpack("!I", self._exactly(4))
        if size > LARGEST:
            raise CardError(
                f"{self.peer} announces a message of {size} bytes, and a card has at most"
                f" {LARGEST}: something else than rdmalab speaks on TCP port {self.port}"
            )
        try:
            return json.loads(self._exactly(size))
        except (ValueError, RecursionError):
            raise CardError(f"{self.peer} sent {size} bytes that are no JSON") from None

    def left(self) -> float:
        """Seconds until the deadline, at least a millisecond: 0 would mean `do not block`."""
        return max(0.001, self.end - time.monotonic())

    def late(self, what: str) -> CardError:
        """The error for a deadline that has passed."""
        return CardError(f"waited {self.deadline_s:g} s for {self.peer} {what}")

    def _exactly(self, size: int) -> bytes:
        data = b""
        while len(data) < size:
            if time.monotonic() > self.end:
                raise self.late("to send its card")
            try:
                self.sock.settimeout(self.left())
                piece = self.sock.recv(size - len(data))
            except TimeoutError:
                raise self.late("to send its card") from None
            except OSError as error:
                raise CardError(f"{self.peer} ended the conversation: {error.strerror}") from None
            if not piece:
                raise CardError(f"{self.peer} hung up in the middle of a message")
            data += piece
        return data

    def _accept(self) -> socket.socket:
        """Listen until the peer comes; who else comes is sent away."""
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((self.mine, self.port))
            except OSError as error:
                raise CardError(
                    f"cannot listen on {self.mine}, TCP port {self.port}: {error.strerror}."
                    " Does another connect() still wait on this host?"
                ) from None
            listener.listen()
            while time.monotonic() < self.end:
                listener.settimeout(self.left())
                try:
                    sock, address = listener.accept()
                except TimeoutError:
                    break
                if address[0] == self.peer:
                    return sock
                sock.close()
        raise self.late(f"to connect to TCP port {self.port}: has it called connect() as well?")

    def _knock(self) -> socket.socket:
        """Try until the peer listens."""
        why = ""
        while time.monotonic() < self.end:
            try:
                there, here = (self.peer, self.port), (self.mine, 0)
                return socket.create_connection(there, self.left(), source_address=here)
            except OSError as error:
                why = error.strerror or "no answer"
            time.sleep(0.02)
        raise self.late(f"to listen on TCP port {self.port} ({why}): has it called connect()?")
