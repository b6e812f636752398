"""From captured bytes to packets: scapy's RoCE layer, and the headers that it lacks.

::

    Ethernet | IP | UDP 4791 | BTH | RETH, AtomicETH, AETH, ImmDt, ... | payload | pad | ICRC
                               12    what follows depends on the opcode                   4 bytes

Nothing that arrives on the wire may raise here: a peer chooses these bytes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from scapy.config import conf
from scapy.contrib.roce import AETH, BTH
from scapy.fields import BitField, ByteField, IntField, XIntField, XLongField
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether
from scapy.packet import Packet as Layer
from scapy.packet import bind_layers

from .opcodes import CNP, OPERATIONS, RNR_TIMER_MS, opcode_name, syndrome_in_words
from .packets import UNDECODED, Atomic, Packet, Reth
from .pcap import Record

__all__ = ["AtomicAckETH", "AtomicETH", "DETH", "Decoder", "IETH", "ImmDt", "RETH", "dissect"]

ROCE_PORT = 4791
BTH_BYTES, ICRC_BYTES, UDP_BYTES = 12, 4, 8
CNP_PADDING_BYTES = 16


class _Extended(Layer):
    """A header between BTH and payload; which one comes next is in :data:`HEADERS`."""

    def guess_payload_class(self, payload: bytes) -> type[Layer]:
        """The header after this one for the packet's opcode, or the payload itself."""
        base: Layer | None = self
        while base is not None and not isinstance(base, BTH):
            base = base.underlayer
        chain = headers_of(base.opcode) if base is not None else ()
        after = chain[chain.index(type(self)) + 1 :] if type(self) in chain else ()
        return after[0] if after else conf.raw_layer


class RETH(_Extended):
    """RDMA extended transport header (IBTA 9.3.3)."""

    name = "RETH"
    fields_desc = [XLongField("va", 0), XIntField("rkey", 0), IntField("length", 0)]


class AtomicETH(_Extended):
    """Atomic extended transport header (9.3.5)."""

    name = "AtomicETH"
    fields_desc = [
        XLongField("va", 0),
        XIntField("rkey", 0),
        XLongField("swap_or_add", 0),
        XLongField("compare", 0),
    ]


class Acknowledge(_Extended, AETH):
    """AETH (9.3.6.1) in a packet where more may follow; scapy binds its own to plain ACKs only."""

    name = "AETH"
    fields_desc = AETH.fields_desc


class AtomicAckETH(_Extended):
    """What was in the memory before an atomic operation (9.3.6.3)."""

    name = "AtomicAckETH"
    fields_desc = [XLongField("original_value", 0)]


class ImmDt(_Extended):
    """Immediate data (9.3.7)."""

    name = "ImmDt"
    fields_desc = [XIntField("data", 0)]


class IETH(_Extended):
    """Invalidate extended transport header (9.3.8)."""

    name = "IETH"
    fields_desc = [XIntField("rkey", 0)]


class DETH(_Extended):
    """Datagram extended transport header (9.3.2)."""

    name = "DETH"
    fields_desc = [XIntField("qkey", 0), ByteField("reserved", 0), BitField("src_qp", 0, 24)]


SIZES: dict[type[Layer], int] = {
    RETH: 16,
    AtomicETH: 28,
    Acknowledge: 4,
    AtomicAckETH: 8,
    ImmDt: 4,
    IETH: 4,
    DETH: 8,
}


def chain_for(operation: str) -> tuple[type[Layer], ...]:
    """The headers behind the BTH for an operation (IBTA Volume 1, table of opcodes)."""
    chain: list[type[Layer]] = []
    if operation in ("COMPARE_SWAP", "FETCH_ADD"):
        chain.append(AtomicETH)
    if operation in ("RDMA_READ_REQUEST", "ATOMIC_WRITE") or operation.startswith(
        ("RDMA_WRITE_FIRST", "RDMA_WRITE_ONLY")
    ):
        chain.append(RETH)
    if operation.endswith("ACKNOWLEDGE") or (
        operation.startswith("RDMA_READ_RESPONSE") and not operation.endswith("MIDDLE")
    ):
        chain.append(Acknowledge)
    if operation == "ATOMIC_ACKNOWLEDGE":
        chain.append(AtomicAckETH)
    if operation.endswith("IMMEDIATE"):
        chain.append(ImmDt)
    if operation.endswith("INVALIDATE"):
        chain.append(IETH)
    return tuple(chain)


# By opcode. RD and XRC have one more header in front, which nothing here can send: left as bytes.
HEADERS: dict[int, tuple[type[Layer], ...]] = {
    (number << 5) | index: (*((DETH,) if number == 3 else ()), *chain_for(operation))
    for number in (0, 1, 3)
    for index, operation in enumerate(OPERATIONS)
}


def headers_of(code: int) -> tuple[type[Layer], ...]:
    """The headers behind the BTH for an opcode byte."""
    return HEADERS.get(code, ())


def _bind() -> None:
    """Tell scapy which of our headers follows its BTH."""
    BTH.payload_guess = [(f, c) for f, c in BTH.payload_guess if c is not AETH]
    for code, chain in HEADERS.items():
        if chain:
            bind_layers(BTH, chain[0], opcode=code)


_bind()


def dissect(frame: bytes) -> Layer:
    """An Ethernet frame as scapy's layers, with ours behind the BTH. Raises what scapy raises."""
    return Ether(frame)


def read_headers(layers: Layer, code: int, room: int) -> tuple[dict[str, Any], int, str]:
    """What the headers behind the BTH say, their bytes, and why they are not whole (or "").

    ``room``: bytes between BTH and ICRC by the UDP length.
    """
    found: dict[str, Any] = {}
    size = 0
    for kind in headers_of(code):
        layer = layers.getlayer(kind)
        size += SIZES[kind]
        if layer is None or size > room:
            return found, size, f"too short for its {kind.__name__}"
        found |= plain(layer)
    return found, size, ""


def plain(layer: Layer) -> dict[str, Any]:
    """One of our headers as attributes of :class:`Packet`."""
    if isinstance(layer, RETH):
        return {"reth": Reth(layer.va, layer.rkey, layer.length)}
    if isinstance(layer, AtomicETH):
        return {"atomic": Atomic(layer.va, layer.rkey, layer.swap_or_add, layer.compare)}
    if isinstance(layer, AtomicAckETH):
        return {"atomic_original": layer.original_value}
    if isinstance(layer, ImmDt):
        return {"imm": layer.data}
    if isinstance(layer, IETH):
        return {"invalidate_rkey": layer.rkey}
    if isinstance(layer, DETH):
        return {"qkey": layer.qkey, "src_qp": layer.src_qp}
    kind, value = layer.syndrome >> 5, layer.syndrome & 0x1F
    return {
        "syndrome": syndrome_in_words(layer.syndrome),
        "msn": layer.msn,
        "credits": value if kind == 0 and value != 0x1F else None,  # 31: no limit is given
        "rnr_timer_ms": RNR_TIMER_MS[value] if kind == 1 else None,
    }


def describe(frame: bytes, length: int) -> tuple[dict[str, Any], Any, Any]:
    """Attributes of a frame's packet, and its IP and Ethernet layers if it has them.

    ``length``: of the frame on the wire; ``frame`` may be a part of it.
    """
    layers = dissect(frame)
    ip = layers.getlayer(IP) or layers.getlayer(IPv6)
    udp, bth = layers.getlayer(UDP), layers.getlayer(BTH)
    if udp is None:
        return {"opcode": UNDECODED, "note": "no UDP packet"}, ip, layers
    inside = (udp.len or 0) - UDP_BYTES
    room = inside - BTH_BYTES - ICRC_BYTES
    if bth is None or room < 0:
        note = f"{inside} bytes in UDP, too short for a RoCEv2 packet"
        return {"opcode": UNDECODED, "note": note}, ip, layers
    transport, operation = opcode_name(bth.opcode)
    known: dict[str, Any] = {"opcode": operation, "transport": transport, "code": bth.opcode}
    known |= {"qp": bth.dqpn, "psn": bth.psn, "ack_request": bool(bth.ackreq)}
    known |= {"solicited": bool(bth.solicited)}
    further, size, known["note"] = read_headers(bth, bth.opcode, room)
    size += CNP_PADDING_BYTES if bth.opcode == CNP else 0
    known |= {**further, "payload": max(0, room - size - bth.padcount)}
    if len(frame) == length:
        known["icrc"] = bth.icrc
    return known, ip, layers


class Decoder:
    """Packets out of frames, in their order.

    ``names``: host names by IP and by MAC address.
    """

    def __init__(self, names: Mapping[str, str] | None = None) -> None:
        self.names = dict(names or {})
        self.count = 0
        self._seen: set[tuple[Any, ...]] = set()

    def packet(self, record: Record) -> Packet:
        """One frame as a packet; whatever it holds."""
        time_s, frame, length = record
        ip = ether = None
        try:
            known, ip, ether = describe(frame, length)
        except Exception as error:  # scapy on bytes that no honest peer sends
            known = {"opcode": UNDECODED, "note": f"undecodable ({type(error).__name__})"}
        self.count += 1
        src, dst = (self._name(ip, ether, end) for end in ("src", "dst"))
        key = (src, dst, *(known.get(name) for name in ("qp", "psn", "code", "syndrome")))
        again = known["opcode"] != UNDECODED and key in self._seen
        self._seen.add(key)
        return Packet(self.count, time_s, src, dst, again=again, length=length, **known)

    def _name(self, ip: Any, ether: Any, end: str) -> str:
        """A host's name, by its IP or MAC address; else the address itself."""
        addresses = [str(getattr(layer, end, "")) for layer in (ip, ether) if layer is not None]
        named = [self.names[address] for address in addresses if address in self.names]
        return (named or addresses or ["?"])[0] or "?"
