"""One packet taken apart: its headers from the outside in, their bytes, and what each one says."""

from __future__ import annotations

import html
from typing import Any, NamedTuple

from scapy.contrib.roce import BTH
from scapy.layers.inet import IP, UDP
from scapy.layers.inet6 import IPv6
from scapy.layers.l2 import Ether

from .decoder import ICRC_BYTES, Decoder, dissect, headers_of, plain
from .packets import UNDECODED, Packet
from .pcap import Record

__all__ = ["Anatomy", "Part", "take_apart"]

PAYLOAD_SHOWN = 24  # bytes


class Part(NamedTuple):
    """A header, the payload, or what follows it. ``size``: bytes in the frame."""

    name: str
    size: int
    says: str


class Anatomy(list[Part]):
    """The parts of a frame in order; a list that shows itself as a table."""

    def __repr__(self) -> str:
        lines = [f"{part.name:<12}{part.size:>5} bytes  {part.says}" for part in self]
        return "\n".join([*lines, f"{'in all':<12}{sum(part.size for part in self):>5} bytes"])

    def _repr_html_(self) -> str:
        left = ' style="text-align:left"'
        rows = [(part.name, str(part.size), part.says) for part in self]
        rows.append(("in all", str(sum(part.size for part in self)), ""))
        body = "".join(
            "<tr>" + "".join(f"<td{left}>{html.escape(text)}</td>" for text in row) + "</tr>"
            for row in rows
        )
        head = "".join(f'<th scope="col"{left}>{name}</th>' for name in ("part", "bytes", "says"))
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def take_apart(record: Record) -> Anatomy:
    """The parts of a captured frame; their sizes add up to its length on the wire."""
    packet = Decoder().packet(record)
    parts = Anatomy()
    try:
        layers = dissect(record.frame)
    except Exception:  # scapy on bytes that no honest peer sends
        return Anatomy([Part("bytes", record.length, packet.note)])
    for layer, name in ((Ether, "Ethernet"), (IP, "IPv4"), (IPv6, "IPv6"), (UDP, "UDP")):
        found = layers.getlayer(layer)
        if found is not None:
            parts.append(Part(name, len(found) - len(found.payload), outside(found)))
    if packet.opcode != UNDECODED:
        parts += inside(layers.getlayer(BTH), packet)
    at = sum(part.size for part in parts)
    ending = ICRC_BYTES if packet.opcode != UNDECODED else 0
    payload = packet.payload if ending else record.length - at
    if payload:
        parts.append(Part("payload", payload, quoted(record.frame[at : at + payload])))
    pad = record.length - at - payload - ending
    if pad > 0:
        parts.append(Part("pad", pad, "to a multiple of four bytes"))
    if ending:
        known = "" if packet.icrc is None else f"0x{packet.icrc:08x}, "
        parts.append(Part("ICRC", ending, f"{known}checksum of what must not change on the way"))
    return parts


def outside(layer: Any) -> str:
    """What a header says that any network card understands."""
    if isinstance(layer, UDP):
        return f"port {layer.sport} -> {layer.dport}"
    return f"{layer.src} -> {layer.dst}"


def inside(bth: Any, packet: Packet) -> list[Part]:
    """The transport headers: BTH, and those that its opcode asks for."""
    said = [f"{packet.transport} {packet.opcode.replace('_', ' ')}".strip()]
    said += [f"to QP {packet.qp}", f"PSN {packet.psn}"]
    said += ["asks for an acknowledgement"] if packet.ack_request else []
    parts = [Part("BTH", 12, ", ".join(said))]
    for kind in headers_of(bth.opcode):
        layer = bth.getlayer(kind)
        if layer is not None:
            known = Packet(0, 0.0, "", "", packet.opcode, **plain(layer))
            says = "; ".join(filter(None, (known.syndrome, known.details)))
            parts.append(Part(layer.name, len(layer) - len(layer.payload), says))
    return parts


def quoted(data: bytes) -> str:
    """The beginning of the payload, as Python writes bytes."""
    more = " ..." if len(data) > PAYLOAD_SHOWN else ""
    return f"{data[:PAYLOAD_SHOWN]!r}{more}"
